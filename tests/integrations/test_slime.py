"""The functions that slime calls by their paths, in a stand-in with its documented signatures. slime itself was not
run: it is not on the package index."""

import enum
import importlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolecall.integrations import slime
from rolecall.integrations.training import Training, watch_optimizers
from tests.integrations.recorded import Clock, Recorded

PATHS = {
    "custom_megatron_init_path": "rolecall.integrations.slime.megatron_init",
    "custom_rollout_log_function_path": "rolecall.integrations.slime.rollout_log",
}
"""As in docs/howto/frameworks.md."""


def load_function(path: str) -> Any:
    """As slime's: the part before the last dot is a module."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def initialize(args: SimpleNamespace) -> None:
    load_function(args.custom_megatron_init_path)(args)


class TrainActor:
    """slime's actor of a trainer: the hook is called in a function that gets `args` alone."""

    def init(self, args: SimpleNamespace, role: str) -> None:
        self.role = role
        initialize(args)


class Status(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    reward: Any
    response_length: int = 10
    status: Status = Status.COMPLETED

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rank": 3, "world_size": 8, "reward_key": None, **PATHS, **changed})


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    undo: list[Any] = []
    for name in ("ROLECALL_ROLE", "ROLECALL_REPLICA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(slime, "Training", lambda: Training(recorded, Clock()))
    monkeypatch.setattr(slime, "watch_optimizers", lambda _: undo.append(watch_optimizers(recorded)))
    slime._manager.cache_clear()
    yield recorded
    slime._manager.cache_clear()
    for forget in undo:
        forget()


def log(rollout_id: int, samples: list[Any], **changed: Any) -> Any:
    function = load_function(PATHS["custom_rollout_log_function_path"])
    return function(rollout_id, arguments(**changed), samples, {"rollout/metric": 1.0}, 12.5)


def test_a_trainer_registers_before_its_first_step_and_its_steps_are_counted(report: Recorded) -> None:
    TrainActor().init(arguments(), "actor")
    assert report.calls == [("start", {"rank": 3, "world_size": 8}), ("phase", "wait")]
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        (parameter * 2).sum().backward()
        optimizer.step()
    assert report.of("step") == [1, 2] and len(report.of("progress")) == 2


@pytest.mark.parametrize("named", ["", "ROLECALL_ROLE", "ROLECALL_REPLICA"])
def test_a_critic_is_a_replica_of_its_own_unless_the_environment_names_it(
    report: Recorded, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    if named:
        monkeypatch.setenv(named, "value/0")
    TrainActor().init(arguments(), "critic")
    identity = {} if named else {"role": "critic", "replica": "critic/0"}
    assert report.of("start") == [{"rank": 3, "world_size": 8, **identity}]


def test_a_hook_that_no_actor_calls_is_of_a_trainer(report: Recorded) -> None:
    initialize(arguments())
    assert report.of("start") == [{"rank": 3, "world_size": 8}]


def test_the_rollout_manager_reports_each_rollout_and_slime_logs_it_too(report: Recorded) -> None:
    samples = [Sample(1.0, 10), Sample(0.0, 30, Status.TRUNCATED), Sample(None, 20, Status.ABORTED), Sample(True, 40)]
    assert log(7, samples) is False and log(8, [Sample({"math": 0.5})], reward_key="math") is False
    assert report.of("start") == [{"rank": 0, "role": "controller", "replica": "controller/0"}]
    assert report.of("step") == [7, 8] and report.of("progress") == [(1, 0.0)] * 2
    assert report.of("update") == [{"reward": pytest.approx(2 / 3)}, {"reward": 0.5}]
    assert report.of("health") == [
        {"response_length": 25.0, "truncated_fraction": 0.25},
        {"response_length": 10.0, "truncated_fraction": 0.0},
    ]
    assert report.phases[-1] == "wait", "training follows"


def test_a_reward_that_is_not_a_number_is_reported(report: Recorded) -> None:
    log(0, [Sample(math.nan), Sample(1.0)])
    assert math.isnan(report.of("update")[0]["reward"])


@pytest.mark.parametrize("samples", [[], [Sample(None)]])
def test_a_rollout_without_rewards_has_none(report: Recorded, samples: list[Sample]) -> None:
    assert log(0, samples) is False
    assert report.of("step") == [0] and report.of("update") == []


def test_what_another_version_passes_never_raises(report: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    load_function(PATHS["custom_megatron_init_path"])(SimpleNamespace())
    assert "rolecall does not watch this trainer: AttributeError" in caplog.text
    caplog.clear()
    assert log(0, [[Sample(1.0)]]) is False and log(1, [[Sample(1.0)]]) is False
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert report.of("step") == [0], "nothing more is reported"


def test_a_reporter_that_fails_never_raises(report: Recorded) -> None:
    report.fails = True
    TrainActor().init(arguments(), "actor")
    assert log(0, [Sample(1.0)]) is False
