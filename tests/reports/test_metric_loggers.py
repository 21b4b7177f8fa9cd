"""Metrics of a run for other tools, read back from their own files."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError, JournalUnavailable
from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal, JournalPage
from rolecall.core.journal.payloads.run import ChainHead, DatasetProgress, EvaluationFinished, RunEnded, StepCommitted
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.reports import metric_loggers
from rolecall.reports.metric_loggers import Point, follow, point_of
from rolecall.rl_runtime.tasks.check import checked

NAN = float("nan")


def step(n: int, **changes: Any) -> StepCommitted:
    values: dict[str, Any] = {
        "step": n,
        "epoch": 1,
        "policy_version": n + 1,
        "groups": (),
        "microbatches": (),
        "reward": n / 10,
        "loss": 0.5,
        "grad_norm": 1.0,
        "log_ratio_max": None,
        "health": {"entropy": 1.25},
        "tokens": 100,
        "seconds": 2.0,
        "attempts": 1,
        "staleness": 0,
        "gradient_digest": "",
        "ledger": ChainHead(position=0, hash=""),
        "versions": {},
        "dataset": DatasetProgress(rows=8, rows_seen=12, dropped={"prompt too long": 2}),
    }
    return StepCommitted(**{**values, **changes})


def evaluation(n: int, reward: float | None = 0.5) -> EvaluationFinished:
    return EvaluationFinished(
        step=n,
        version_min=n,
        version_max=n,
        prompts=10,
        samples=1,
        reward=reward,
        reward_low=0.4,
        reward_high=0.6,
        pass_at={"1": 0.25},
        unscored={"reward_failed": 3},
        response_length=7.0,
        seconds=3.0,
    )


class Tool:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.identities: list[str] = []
        self.closed = 0
        self.fails_at = 10**9

    def make(self, run: RunDir, job: JobConfig, identity: str) -> "Tool":
        self.identities.append(identity)
        return self

    def write(self, points: Sequence[Point]) -> None:
        if len(self.points) + len(points) > self.fails_at:
            raise OSError("the disk is full")
        self.points += points

    def close(self) -> None:
        self.closed += 1


class Run:
    def __init__(self, path: Path, **logging: Any) -> None:
        self.clock = FakeClock()
        self.job = parse_job({"logging": logging})
        self.dir = create_run_dir(path, "mine", None)
        self.journal = Journal(self.dir.database_url, clock=self.clock)

    def follow(self, clock: Any = None) -> None:
        follow(self.dir, self.job, clock or self.clock)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    tool = Tool()
    monkeypatch.setattr(metric_loggers, "MAKERS", {**metric_loggers.MAKERS, "tensorboard": tool.make})
    return tool


def test_points_have_the_finite_numbers_of_steps_and_evaluations() -> None:
    found = point_of(Event(seq=1, wall_at=7.0, payload=step(3, reward=None, loss=NAN)))
    assert found is not None and (found.step, found.at) == (4, 7.0)
    assert found.values == {
        "train/grad_norm": 1.0,
        "train/tokens": 100.0,
        "train/step_seconds": 2.0,
        "train/staleness": 0.0,
        "health/entropy": 1.25,
        "data/epoch": 1.5,
        "data/rows_seen": 12.0,
        "data/dropped/prompt_too_long": 2.0,
    }
    found = point_of(Event(seq=2, wall_at=8.0, payload=evaluation(4)))
    assert found is not None and found.step == 4
    assert found.values["evaluation/pass_at_1"] == 0.25 and found.values["evaluation/unscored"] == 3.0
    assert point_of(Event(seq=3, wall_at=9.0, payload=RunEnded(outcome="completed", because=""))) is None


def test_a_restart_continues_without_doubling_a_point(tmp_path: Path, tool: Tool) -> None:
    run = Run(tmp_path, tensorboard=True)
    run.journal.append(evaluation(0))
    run.journal.append(step(0))

    class Killed(BaseException):
        pass

    class Dies(FakeClock):
        """Of a process that is killed while it waits for more."""

        def sleep(self, seconds: float) -> None:
            raise Killed

    with pytest.raises(Killed):
        run.follow(Dies())
    assert [p.step for p in tool.points] == [0, 1]
    run.journal.append(step(1))
    run.journal.append(RunEnded(outcome="completed", because=""))
    run.follow()
    assert [p.step for p in tool.points] == [0, 1, 2]
    assert len(set(tool.identities)) == 1 and len(tool.identities) == 2, "the same run of the tool"
    assert tool.closed == 1


def test_follows_a_run_that_goes_on_until_it_ends(tmp_path: Path, tool: Tool) -> None:
    run = Run(tmp_path, tensorboard=True)
    coming = [step(0), step(1), RunEnded(outcome="completed", because="")]

    class Writes(FakeClock):
        def sleep(self, seconds: float) -> None:
            run.journal.append(coming.pop(0))

    run.follow(Writes())
    assert [p.step for p in tool.points] == [1, 2] and not coming


def test_a_journal_that_cannot_be_read_at_the_end_of_the_run_is_read_again(
    tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, tensorboard=True)
    run.journal.append(step(0))
    run.journal.append(RunEnded(outcome="completed", because=""))
    page, failures = Journal.page, [JournalUnavailable(where="here", reason="it restarts", hint="wait")]

    def unavailable_once(journal: Journal, **wanted: Any) -> JournalPage:
        if failures:
            raise failures.pop()
        return page(journal, **wanted)

    monkeypatch.setattr(Journal, "page", unavailable_once)
    run.follow()
    assert [p.step for p in tool.points] == [1]


def test_a_tool_that_fails_is_one_warning_and_the_others_continue(
    tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = Tool()
    other.fails_at = 0
    monkeypatch.setitem(metric_loggers.MAKERS, "wandb", other.make)  # type: ignore[arg-type]
    run = Run(tmp_path, tensorboard=True, wandb={"project": "p"})
    coming: list[Any] = [step(1), step(2), RunEnded(outcome="completed", because="")]
    run.journal.append(step(0))

    class Writes(FakeClock):
        def sleep(self, seconds: float) -> None:
            run.journal.append(coming.pop(0))

    run.follow(Writes())
    assert [p.step for p in tool.points] == [1, 2, 3]
    assert [r.getMessage() for r in caplog.records] == ["logging.wandb: stopped: OSError: the disk is full"]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    run = Run(tmp_path, tensorboard=True)
    run.journal.append(evaluation(0, reward=0.125))
    run.journal.append(step(0))
    run.journal.append(step(1, reward=None))
    run.journal.append(RunEnded(outcome="completed", because=""))
    run.follow()
    found = event_accumulator.EventAccumulator(str(run.dir.path / "tensorboard"))
    found.Reload()
    assert [(s.step, s.value) for s in found.Scalars("evaluation/reward")] == [(0, 0.125)]
    assert [(s.step, s.value) for s in found.Scalars("train/loss")] == [(1, 0.5), (2, 0.5)]
    assert [s.step for s in found.Scalars("train/reward")] == [1]
    assert found.Scalars("train/loss")[0].wall_time == run.clock.wall()


def test_wandb_gets_its_own_run_with_the_step_as_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    made = SimpleNamespace(
        define_metric=lambda *a, **k: calls.append((a, k)),
        log=lambda values: calls.append(values),
        finish=lambda: calls.append("finished"),
    )

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return made

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = Run(tmp_path, wandb={"project": "mine", "entity": "us"})
    run.job = parse_job(
        {**run.job.model_dump(mode="json"), "recovery": {"webhook_url": "https://hooks.slack.com/services/s3cret"}}
    )
    run.journal.append(step(0))
    run.journal.append(RunEnded(outcome="completed", because=""))
    run.follow()
    assert (calls[0]["project"], calls[0]["entity"], calls[0]["name"]) == ("mine", "us", "mine")
    assert calls[0]["id"] == json.loads((run.dir.path / "logging" / "wandb.json").read_text())["identity"]
    assert calls[0]["config"]["recovery"]["webhook_url"] == "https://hooks.slack.com/***"
    assert calls[1] == (("*",), {"step_metric": "step"})
    assert calls[2]["step"] == 1 and calls[2]["train/loss"] == 0.5
    assert calls[-1] == "finished"


def test_mlflow_finds_its_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, str] = {}
    logged: list[Any] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            assert tracking_uri == "file:///tracked"

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if runs else None

        def create_experiment(self, name: str) -> str:
            assert name == "rolecall"
            return "7"

        def search_runs(self, experiments: list[str], query: str) -> Any:
            found = [r for identity, r in runs.items() if query == f"tags.`rolecall.identity` = '{identity}'"]
            return [SimpleNamespace(info=SimpleNamespace(run_id=r)) for r in found]

        def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> Any:
            runs[tags["rolecall.identity"]] = f"run-{len(runs)}"
            return SimpleNamespace(info=SimpleNamespace(run_id=f"run-{len(runs) - 1}"))

        def log_metric(self, run_id: str, name: str, value: float, *, timestamp: int, step: int) -> None:
            logged.append((run_id, name, value, timestamp, step))

        def set_terminated(self, run_id: str) -> None:
            logged.append((run_id, "terminated"))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    run = Run(tmp_path, mlflow={"tracking_uri": "file:///tracked"})
    run.journal.append(step(0))
    run.journal.append(RunEnded(outcome="completed", because=""))
    run.follow()
    run.follow()
    assert list(runs.values()) == ["run-0"]
    assert ("run-0", "train/loss", 0.5, int(run.clock.wall() * 1000), 1) in logged
    assert len([entry for entry in logged if "train/loss" in entry]) == 1


def test_a_missing_package_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse_job({"logging": {"wandb": {"project": "p"}, "mlflow": {}}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        checked(job)
    assert caught.value.problems == (
        "logging.wandb: package wandb is not installed: pip install wandb",
        "logging.mlflow: package mlflow is not installed: pip install mlflow",
    )
    assert checked(parse_job({})) == parse_job({})
