"""What a framework's callback makes of a training process."""

import logging
import os
import threading
from typing import Any

import pytest
import torch

from rolecall.agent.autostart import training as hooks
from rolecall.integrations.training import (
    ShortLock,
    Training,
    first_number,
    hook,
    known_number,
    watch_optimizers,
)
from tests.integrations.recorded import Clock, Recorded


def test_a_step_is_a_unit_and_nothing_is_due_between_two() -> None:
    report, clock = Recorded(), Clock()
    training = Training(report, clock)
    training.begin()
    training.begin_step(1)
    clock.now += 3.0
    training.end_step()
    assert report.calls == [
        ("start", {}),
        ("phase", "wait"),
        ("step", 1),
        ("phase", "step"),
        ("progress", (1, 3.0)),
        ("phase", "wait"),
    ]


def test_a_step_whose_time_says_nothing_is_not_compared() -> None:
    report, clock = Recorded(), Clock()
    training = Training(report, clock)
    training.begin_step(1)
    clock.now += 3.0
    training.end_step(compared=False)
    assert report.of("progress") == [(1, 0.0)]


def test_a_job_that_reports_by_itself_keeps_its_name() -> None:
    report = Recorded(started=True)
    Training(report).begin()
    assert report.of("start") == []
    Training(report).begin(rank=3)
    assert report.of("start") == [{"rank": 3}], "what a framework knows for certain counts"


def test_phases_end_in_any_order() -> None:
    """Reward functions may be coroutines."""
    report = Recorded()
    training = Training(report)
    training.begin_step(1)
    first, second = training.during("score"), training.during("score")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert report.phases == ["step", "score"]
    second.__exit__(None, None, None)
    assert report.phases == ["step", "score", "step"]


def test_a_phase_in_a_phase_comes_back_to_it() -> None:
    report = Recorded()
    training = Training(report)
    training.begin_step(1)
    with training.during("generate"), training.during("score"):
        pass
    assert report.phases == ["step", "generate", "score", "generate", "step"]


def test_outside_of_a_step_phases_are_not_told() -> None:
    report = Recorded()
    training = Training(report)
    with training.during("score"):
        pass
    assert report.phases == []


def test_a_phase_that_outlives_its_step_changes_nothing() -> None:
    report = Recorded()
    training = Training(report)
    training.begin_step(1)
    late = training.during("score")
    late.__enter__()
    training.end_step()
    late.__exit__(None, None, None)
    assert report.phases == ["step", "score", "wait"]


def test_a_step_that_was_given_up_counts_nothing() -> None:
    report = Recorded()
    training = Training(report)
    training.begin_step(1)
    training.wait()
    training.end_step()
    training.begin_step(1)
    assert report.of("progress") == [] and report.phases == ["step", "wait", "step"]


def test_an_exception_is_reported_once_and_ctrl_c_is_none() -> None:
    report = Recorded()
    training = Training(report)
    training.begin_step(1)
    error = ValueError("bad sample")
    training.failed(error)
    assert report.of("exception") == [error] and report.phases[-1] == "wait"
    assert getattr(error, "_rolecall_reported", False), "the excepthook leaves it out"
    training.failed(KeyboardInterrupt())
    assert report.of("exception") == [error]


def test_a_reporter_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    report = Recorded()
    training = Training(report)
    report.fails = True
    with caplog.at_level(logging.WARNING):
        training.begin_step(1)
        with training.during("score"):
            pass
        training.end_step()
        training.failed(ValueError("x"))
    report.fails = False
    training.begin_step(2)
    assert report.calls == []
    assert len(caplog.records) == 1 and "no page" in caplog.records[0].getMessage()


def test_the_exception_of_the_job_passes_through_a_phase() -> None:
    training = Training(Recorded())
    training.begin_step(1)
    with pytest.raises(ZeroDivisionError), training.during("score"):
        raise ZeroDivisionError


def test_nothing_known_is_not_reported() -> None:
    report = Recorded()
    training = Training(report)
    training.update(loss=None)
    training.health(entropy=None)
    assert report.calls == []
    training.update(loss=0.5, reward=None)
    assert report.of("update") == [{"loss": 0.5}]


class Watch:
    stood_down = 0

    def stand_down(self) -> None:
        self.stood_down += 1


def test_the_hooks_of_exec_stand_down(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(hooks, "_watches", {watch})
    Training(Recorded()).begin()
    assert watch.stood_down == 1


def test_a_step_is_counted_once_where_a_framework_inside_has_a_callback() -> None:
    """As a worker of Ray Train that runs a Trainer of transformers."""
    report = Recorded()
    Training(report).begin()
    forget = watch_optimizers(report)  # type: ignore[arg-type]
    assert forget is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    assert report.of("step") == [1]
    Training(report).begin()
    optimizer.step()
    assert report.of("step") == [1]
    forget()


def test_numbers_of_logs() -> None:
    logs = {"a": "0.5", "b": True, "c": None, "d": [1.0, 2.0], "e": 3}
    assert first_number(logs, ("a", "b", "c", "d", "e")) == 3.0
    assert first_number(logs, ("a", "missing")) is None
    assert known_number(float("nan")) is None and known_number(0.0) == 0.0 and known_number(None) is None


class Callback:
    def __init__(self, training: Training) -> None:
        self._training = training
        self.called = 0

    @hook
    def on_step(self, state: Any, *, logs: object = None) -> None:
        self.called += 1
        self._training.begin_step(state.step)


def test_whatever_fails_in_a_hook_does_not_reach_the_job(caplog: pytest.LogCaptureFixture) -> None:
    """A framework of another version may give it something else."""
    report = Recorded()
    callback = Callback(Training(report))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            callback.on_step(None, logs={})
    assert callback.called == 3 and report.calls == []
    assert len(caplog.records) == 1 and "no attribute 'step'" in caplog.text


def test_what_cannot_be_a_number_is_none() -> None:
    class Strange:
        def get(self, name: str) -> float:
            raise RuntimeError("not initialized")

    assert first_number(Strange(), ("a",)) is None  # type: ignore[arg-type]


def test_a_signal_handler_may_come_back() -> None:
    lock = ShortLock()
    with lock, lock:
        pass


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    training, held, done = Training(Recorded()), threading.Event(), threading.Event()

    def hold() -> None:
        with training._lock:
            held.set()
            done.wait(30.0)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30.0)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if training._lock._lock.acquire(timeout=5.0) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
