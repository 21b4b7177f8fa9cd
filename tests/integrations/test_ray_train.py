"""Ray Train: a worker's training function and the controller's callback, without a cluster."""

import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ray_train_module = pytest.importorskip("ray.train")
if not hasattr(ray_train_module, "UserCallback"):
    pytest.skip("needs Ray Train v2", allow_module_level=True)

from rolecall.integrations import ray_train
from rolecall.integrations.training import Training
from tests.integrations.recorded import Clock, Recorded

CONTEXT = SimpleNamespace(
    get_world_rank=lambda: 1,
    get_world_size=lambda: 2,
    get_local_rank=lambda: 0,
    get_experiment_name=lambda: "run-7",
)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setattr(ray_train, "Training", lambda: Training(recorded, Clock()))
    monkeypatch.setattr(ray_train, "reporter", recorded)
    monkeypatch.setattr(ray_train.ray.train, "get_context", lambda: CONTEXT)
    yield recorded


def loop(config: dict[str, Any]) -> float:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(config["steps"]):
        (parameter * 2).sum().backward()
        optimizer.step()
    return float(parameter.detach())


def test_a_worker_registers_with_its_rank_and_its_steps_are_counted(report: Recorded) -> None:
    expected = loop({"steps": 3})
    assert report.calls == []
    assert ray_train.reported(loop)({"steps": 3}) == expected
    assert report.of("start") == [{"rank": 1, "world_size": 2, "local_rank": 0, "run_id": "run-7"}]
    assert report.of("step") == [1, 2, 3] and len(report.of("progress")) == 3
    count = len(report.calls)
    loop({"steps": 2})
    assert len(report.calls) == count, "the next training function of this process is not the same"


def test_ray_train_sees_the_same_parameters() -> None:
    assert list(inspect.signature(ray_train.reported(loop)).parameters) == ["config"]
    assert list(inspect.signature(ray_train.reported(lambda: None)).parameters) == []


def test_an_exception_is_reported_before_ray_takes_it(report: Recorded) -> None:
    error = ValueError("bad sample")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="bad sample"):
        ray_train.reported(fail)()
    assert report.of("exception") == [error]


def test_outside_of_ray_train_the_function_runs(report: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("no session")

    monkeypatch.setattr(ray_train.ray.train, "get_context", missing)
    assert ray_train.reported(lambda: 5)() == 5


def test_the_controller_tells_what_workers_report() -> None:
    report = Recorded()
    callback = ray_train.RolecallCallback(Training(report, Clock()))
    callback.after_report(None, [{"loss": 0.5, "epoch": 1}, {"loss": 9.0}], None)
    callback.after_report(None, [], None)
    assert report.of("start") == [{"role": "controller", "replica": "controller/0", "rank": 0}]
    assert report.of("step") == [1, 2] and report.phases[-1] == "wait"
    assert report.of("update") == [{"loss": 0.5}]


def test_the_callback_is_sent_to_the_controller() -> None:
    callback = ray_train.RolecallCallback()
    assert isinstance(pickle.loads(pickle.dumps(callback)), ray_train.RolecallCallback)


def test_what_fails_in_the_callback_does_not_reach_the_controller() -> None:
    report = Recorded()
    callback = ray_train.RolecallCallback(Training(report, Clock()))
    callback.after_report(None, [None], None)  # type: ignore[list-item]
    assert report.of("step") == [1]


def test_hooks_that_cannot_be_removed_change_nothing(report: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck() -> None:
        raise RuntimeError("no such hook")

    monkeypatch.setattr(ray_train, "watch_optimizers", lambda _: stuck)
    assert ray_train.reported(lambda: 5)() == 5
