"""What torch's hooks tell of a training loop that reports nothing itself."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

from rolecall.agent.autostart.training import STEPS_WITHOUT_LEAD, Modules, TrainingWatch, is_rank


class Report:
    """Records what is reported."""

    def __init__(self, started: bool = False) -> None:
        self.started = started
        self.phases: list[str] = []
        self.steps: list[int] = []
        self.units: list[tuple[float, float]] = []

    def start(self) -> None:
        self.started = True

    def is_started(self) -> bool:
        return self.started

    def enter_phase(self, name: str) -> None:
        self.phases.append(name)

    def set_step(self, n: int) -> None:
        self.steps.append(n)

    def progress(self, units: int = 1, *, busy_seconds: float = 0.0, exchange_seconds: float = 0.0) -> None:
        assert units == 1
        self.units.append((busy_seconds, exchange_seconds))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """A loop whose loading, forward and backward pass take as long as given."""

    def __init__(self, report: Report) -> None:
        self.report, self.clock = report, Clock()
        self.watch = TrainingWatch(report, lambda: Modules(torch), self.clock)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds = 0.0
        self.model[1].register_forward_hook(lambda *_: self._advance())

    def _advance(self) -> None:
        self.clock.now += self.seconds

    def step(
        self, *, loading: float = 0.0, forward: float = 0.0, backward: float = 0.0, accumulated: int = 1, optimizer: Any = None
    ) -> None:  # fmt: skip
        self.clock.now += loading
        self.seconds = forward
        for _ in range(accumulated):
            self.model(torch.ones(1, 2)).sum().backward()
            self.clock.now += backward
        (optimizer or self.optimizer).step()

    def evaluate(self, seconds: float) -> None:
        self.seconds = seconds
        with torch.no_grad():
            self.model(torch.ones(1, 2))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(Report())
    handle = register_optimizer_step_post_hook(made.watch.after_optimizer)
    yield made
    handle.remove()
    assert not modules._global_forward_pre_hooks and not modules._global_forward_hooks, "the search has ended"


def warm(job: Job) -> Report:
    """Two steps: the rank is known, and its modules are found."""
    job.step()
    job.step()
    return job.report


def test_a_process_is_a_rank_with_its_first_step(job: Job) -> None:
    job.model(torch.ones(1, 2))
    assert not job.report.started
    report = warm(job)
    assert report.started and report.steps == [1, 2] and len(report.units) == 2
    assert set(report.phases) == {"wait"}, "no progress is due before the modules are known"


def test_a_step_is_judged_from_its_first_forward_pass(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    job.step(loading=0.5, forward=2.0, backward=3.0, accumulated=2)
    assert report.phases == ["step", "wait"]
    assert report.units[-1] == (pytest.approx(4.5), pytest.approx(6.0)), "own: loading and forward; the rest may wait"


def test_evaluation_is_no_work_of_a_step(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    job.evaluate(40.0)
    assert report.phases == []
    job.step(loading=1.0, forward=2.0, backward=1.0)
    busy, _ = report.units[-1]
    assert busy == pytest.approx(2.0), "how long it loaded cannot be told from how long it evaluated"


def test_of_several_optimizers_one_leads(job: Job) -> None:
    report = warm(job)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(4):
        job.step()
        job.step(optimizer=other)
    assert report.steps[-1] == 6


def test_another_leads_when_the_first_has_ended(job: Job) -> None:
    report = warm(job)
    other = torch.optim.SGD(job.model.parameters(), lr=0.1)
    for _ in range(STEPS_WITHOUT_LEAD + 3):
        job.step(optimizer=other)
    assert report.steps[-1] == 2 + 3


def test_a_job_that_reports_itself_is_left_to_it() -> None:
    job = Job(Report(started=True))
    job.watch.after_optimizer(job.optimizer, (), {})
    job.watch.after_optimizer(job.optimizer, (), {})
    assert not job.report.steps and not job.report.phases


def test_other_threads_do_not_count(job: Job) -> None:
    report = warm(job)
    del report.phases[:]
    thread = threading.Thread(target=lambda: job.model(torch.ones(1, 2)))
    thread.start()
    thread.join(30)
    assert report.phases == []


def test_nothing_is_raised_into_the_job() -> None:
    class Broken(Report):
        def start(self) -> None:
            raise OSError("no space")

    job = Job(Broken())
    job.watch.after_optimizer(job.optimizer, (), {})
    job.watch.after_optimizer(job.optimizer, (), {})
    assert not job.report.steps


def test_an_actor_of_ray_is_a_rank_if_it_is_told_which() -> None:
    assert is_rank({}) and is_rank({"RANK": "3"})
    assert not is_rank({"RAY_JOB_ID": "01000000"})
    assert is_rank({"RAY_JOB_ID": "01000000", "RANK": "0"})
