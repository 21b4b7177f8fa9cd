"""Metrics of a run in TensorBoard, Weights & Biases and MLflow: `python -m rolecall.reports.metric_loggers RUN`.

A process of its own that reads the run's journal, so a slow or failing tool neither delays nor ends the run: its
failure is one warning, and the others continue. Each tool's position in the journal is kept in `logging/` of the run's
directory after its points are written; a restarted process continues there. The x axis is the number of committed
steps, and the time of a point is that of its event.
"""

import json
import logging
import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import JournalUnavailable
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import EvaluationFinished, StepCommitted
from rolecall.core.journal.run_end import recorded_end
from rolecall.core.policy_health import policy_health_of
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.recovery.notifications.target import without_secret_urls
from rolecall.views.journal_reader import JournalReader

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
NICENESS = 10
PAGE_EVENTS = 500
"""Read at once: this many points at most are written again when the process is killed between writing and keeping its
position. They have the same step, time and value as before."""
KINDS = (EventKind.STEP_COMMITTED, EventKind.EVALUATION_FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Metrics of one step or evaluation, by name (`train/reward`); finite numbers only."""

    step: int
    at: float  # wall seconds
    values: Mapping[str, float]


def point_of(event: Event) -> Point | None:
    """None for an event without metrics."""
    values: dict[str, float | int | None]
    match event.payload:
        case StepCommitted() as committed:
            step = committed.policy_version
            values = {
                "train/reward": committed.reward,
                "train/loss": committed.loss,
                "train/grad_norm": committed.grad_norm,
                "train/tokens": committed.tokens,
                "train/step_seconds": committed.seconds,
                "train/staleness": committed.staleness,
                **{f"health/{name}": value for name, value in policy_health_of(committed).items()},
            }
            if (data := committed.dataset) is not None:
                values |= {"data/epoch": data.epoch + data.epoch_share, "data/rows_seen": data.rows_seen}
                values |= {f"data/dropped/{_word(reason)}": num for reason, num in data.dropped.items()}
        case EvaluationFinished() as result:
            step = result.step
            values = {
                "evaluation/reward": result.reward,
                "evaluation/reward_low": result.reward_low,
                "evaluation/reward_high": result.reward_high,
                "evaluation/response_length": result.response_length,
                "evaluation/unscored": sum(result.unscored.values()),
                **{f"evaluation/pass_at_{_word(k)}": share for k, share in result.pass_at.items()},
            }
        case _:
            return None
    finite = {name: float(v) for name, v in values.items() if v is not None and math.isfinite(v)}
    return Point(step=step, at=event.wall_at, values=finite)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text)


class MetricLogger(Protocol):
    """One tool. Any exception ends its use."""

    def write(self, points: Sequence[Point]) -> None:
        """Returns once the points are safe with the tool, or in its own files."""

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files in `tensorboard/` of the run's directory."""

    def __init__(self, run: RunDir, job: JobConfig, identity: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        del job, identity
        self._writer: Any = EventFileWriter(str(run.path / "tensorboard"))

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as FileEvent
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(FileEvent(wall_time=point.at, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """One run of Weights & Biases, continued under the same id after a restart."""

    def __init__(self, run: RunDir, job: JobConfig, identity: str) -> None:
        import wandb

        assert job.logging.wandb is not None
        self._run: Any = wandb.init(
            project=job.logging.wandb.project,
            entity=job.logging.wandb.entity,
            name=run.run_id,
            id=identity,
            resume="allow",
            dir=str(run.path),
            config=without_secret_urls(job.model_dump(mode="json")),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """One run of MLflow, found again by its tag after a restart."""

    TAG = "rolecall.identity"

    def __init__(self, run: RunDir, job: JobConfig, identity: str) -> None:
        from mlflow.tracking import MlflowClient

        assert job.logging.mlflow is not None
        name = job.logging.mlflow.experiment
        self._client: Any = MlflowClient(tracking_uri=job.logging.mlflow.tracking_uri)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{identity}'")
        made = runs[0] if runs else self._client.create_run(experiment, run_name=run.run_id, tags={self.TAG: identity})
        self._run_id = made.info.run_id

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._client.log_metric(self._run_id, name, value, timestamp=int(point.at * 1000), step=point.step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


MAKERS: Mapping[str, Callable[[RunDir, JobConfig, str], MetricLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


@dataclass(slots=True)
class _Follower:
    """One tool, and how far it is in the journal."""

    name: str
    path: Path
    logger: MetricLogger
    identity: str
    seq: int

    def take(self, events: Sequence[Event], seq: int) -> None:
        points = [point for e in events if e.seq > self.seq and (point := point_of(e)) is not None]
        if points:
            self.logger.write(points)
        if seq > self.seq:
            self.seq = seq
            write_atomically(self.path, json.dumps({"identity": self.identity, "seq": seq}) + "\n")


def _followers(run: RunDir, job: JobConfig) -> Iterator[_Follower]:
    folder = run.path / "logging"
    folder.mkdir(exist_ok=True)
    for name in job.logging.names:
        path = folder / f"{name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {"identity": uuid.uuid4().hex, "seq": 0}
            write_atomically(path, json.dumps(kept) + "\n")
        try:
            made = MAKERS[name](run, job, kept["identity"])
        except Exception as e:  # noqa: BLE001 deliberate: a tool of others may fail in any way, and the run goes on
            logger.warning("logging.%s: no metrics go there: %s: %s", name, type(e).__name__, e)
            continue
        yield _Follower(name, path, made, kept["identity"], int(kept["seq"]))


def follow(run: RunDir, job: JobConfig, clock: Clock) -> None:
    """Writes the run's metrics until it has ended, or no tool is left."""
    followers = list(_followers(run, job))
    reader = JournalReader(KINDS, page_events=PAGE_EVENTS)
    reader.seq = min((f.seq for f in followers), default=0)
    ended = False
    while followers and not ended:
        try:
            with closing(Journal(run.database_url, create=False)) as journal:
                end = recorded_end(journal)  # asked first: then nothing comes after the pages
                for page in reader.pages(journal):
                    for follower in list(followers):
                        try:
                            follower.take(page.events, reader.seq)
                        except Exception as e:  # noqa: BLE001 deliberate: as above
                            logger.warning("logging.%s: stopped: %s: %s", follower.name, type(e).__name__, e)
                            followers.remove(follower)
                ended = end is not None
        except JournalUnavailable as e:
            logger.warning("%s", e)
        if not ended:
            clock.sleep(POLL_SECONDS)
    for follower in followers:
        try:
            follower.logger.close()
        except Exception as e:  # noqa: BLE001 deliberate: as above
            logger.warning("logging.%s: not closed: %s: %s", follower.name, type(e).__name__, e)


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    os.nice(NICENESS)
    run = RunDir(Path(argv[0]))
    follow(run, parse_job(run.config()), SystemClock())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
