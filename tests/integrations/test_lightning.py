"""The callback of Lightning, under stand-ins of its two packages. Real Lightning: `real/README.md`."""

import importlib
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rolecall.integrations.training import Training
from tests.integrations.recorded import Clock, Recorded

MODULE = "rolecall.integrations.lightning"
RANK = {"global_rank": 3, "world_size": 4, "local_rank": 1}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> type:
    for part in {name.partition(".")[0], name}:
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    callback = type("Callback", (), {})
    sys.modules[name].Callback = callback  # type: ignore[attr-defined]
    return callback


@pytest.fixture(autouse=True)
def _imported_anew() -> Iterator[None]:
    sys.modules.pop(MODULE, None)
    yield
    sys.modules.pop(MODULE, None)


def test_a_callback_of_the_package_that_the_job_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    base = stand_in(monkeypatch, "pytorch_lightning")
    assert issubclass(importlib.import_module(MODULE).RolecallCallback, base)


def test_a_callback_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = stand_in(monkeypatch, "pytorch_lightning"), stand_in(monkeypatch, "lightning.pytorch")
    made = importlib.import_module(MODULE).RolecallCallback
    assert all(issubclass(made, base) for base in bases)


def test_without_lightning_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lightning") or importlib.util.find_spec("pytorch_lightning"):
        pytest.skip("Lightning is installed")
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module(MODULE)


@pytest.fixture
def report() -> Recorded:
    return Recorded()


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch, report: Recorded) -> Any:
    stand_in(monkeypatch, "lightning.pytorch")
    return importlib.import_module(MODULE).RolecallCallback(Training(report, Clock()))


def batch(callback: Any, trainer: Any, *, steps: bool, index: int = 0) -> None:
    callback.on_train_batch_start(trainer, None, None, index)
    trainer.global_step += steps
    callback.on_train_batch_end(trainer, None, None, None, index)


def test_a_step_of_several_batches_is_one_step(callback: Any, report: Recorded) -> None:
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, logged_metrics={"train_loss": 0.5}, **RANK)
    callback.on_train_start(trainer, None)
    for _ in range(2):
        batch(callback, trainer, steps=False)
        batch(callback, trainer, steps=True)
    callback.on_train_end(trainer, None)
    assert report.of("step") == [1, 2] and len(report.of("progress")) == 2
    assert report.phases == ["wait", "step", "wait", "step", "wait"]
    assert report.of("update") == [{"loss": 0.5}], "only where Lightning logs"


def test_the_rank_is_that_of_the_trainer(callback: Any, report: Recorded) -> None:
    callback.on_train_start(SimpleNamespace(**RANK), None)
    assert report.of("start") == [{"rank": 3, "world_size": 4, "local_rank": 1}]


def test_a_job_that_has_started_the_reporter_itself_keeps_its_rank(callback: Any, report: Recorded) -> None:
    report.start(source="integration", replica="actor/2", rank=0)
    callback.on_train_start(SimpleNamespace(**RANK), None)
    assert report.of("start") == [{"replica": "actor/2", "rank": 0}]


def test_validation_within_an_epoch_is_no_step(callback: Any, report: Recorded) -> None:
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=50, logged_metrics={})
    batch(callback, trainer, steps=False)
    callback.on_validation_start(trainer, None)
    assert report.phases[-1] == "wait" and not report.of("progress")
    batch(callback, trainer, steps=True)
    assert report.of("step") == [1, 1] and len(report.of("progress")) == 1


def test_an_exception_is_reported(callback: Any, report: Recorded) -> None:
    error = ValueError("bad sample")
    callback.on_train_batch_start(SimpleNamespace(global_step=0), None, None, 0)
    callback.on_exception(None, None, error)
    assert report.of("exception") == [error] and report.phases[-1] == "wait"


def test_a_callback_is_sent_without_its_state(callback: Any) -> None:
    assert pickle.loads(pickle.dumps(callback)) is not callback


def test_metrics_that_cannot_be_computed_do_not_reach_the_job(callback: Any, report: Recorded) -> None:
    class Trainer:
        global_step, log_every_n_steps = 0, 1

        @property
        def logged_metrics(self) -> dict[str, float]:
            raise RuntimeError("a metric cannot be computed")

    batch(callback, Trainer(), steps=True)
    assert len(report.of("progress")) == 1
