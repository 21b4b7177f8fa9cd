"""Courses of training as agents would tell them: rows of signs in, observations out."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.stages.numbers.collapse import TrainingStepPoint

Row = Mapping[str, float]
WALL = 1_700_000_000.0
STEP_SECONDS = 2.0


def points(rows: Iterable[Row]) -> list[TrainingStepPoint]:
    """One a row, in order. `step` is where the row says, else one more than before; a lower one forgets what came
    after."""
    made: list[TrainingStepPoint] = []
    for row in rows:
        step = int(row.get("step", made[-1].step + 1 if made else 0))
        made = [p for p in made if p.step < step]
        made.append(
            TrainingStepPoint(step, WALL + step, {k: v for k, v in row.items() if k != "step" and not math.isnan(v)})
        )
    return made


def sample(replica: str, at: float, version: int, row: Row, **more: Any) -> ProcessSample:
    fields = {
        "process": ProcessId(node=NodeId(f"node-{replica.replace('/', '-')}"), pid=7, start_ticks=7),
        "role": replica.partition("/")[0],
        "replica": replica,
        "rank": 0,
        "incarnation": 1,
        "at": at,
        "wall_at": WALL + at,
        "alive": True,
        "page_ok": True,
        "phase": "wait",
        "phase_entries": version,
        "beats": int(at * 10),
        "policy_version": version,
        "step": version,
        "healths": 1 if "entropy" in row else 0,
        **{k: v for k, v in row.items() if k != "step"},
    }
    return ProcessSample(**{**fields, **more})


def observation(at: float, samples: Sequence[ProcessSample], **more: Any) -> Observation:
    batches = tuple(
        SampleBatch(
            node=p.process.node, agent_pid=1, cursor=1, lost=0, at=at, wall_at=WALL + at, processes=(p,), hosts=()
        )
        for p in samples
    )
    return Observation(wall_at=WALL + at, batches=batches, **more)


def reported(
    rows: Iterable[Row], *, replicas: Sequence[str] = ("trainer/0", "trainer/1"), start: float = 0.0, first: int = 0
) -> Iterator[Observation]:
    """Two looks a step: in the first one only the first replica has finished it. A rollout generates beside them."""
    now, before = start, None
    for number, row in enumerate(rows):
        version = int(row.get("step", first + number)) + 1
        here = (version, row)
        for behind in (before, here):
            now += STEP_SECONDS / 2
            pages = [here, *[behind or here] * (len(replicas) - 1)]
            reported_by = [sample(r, now, v, said) for r, (v, said) in zip(replicas, pages, strict=True)]
            engine = sample("rollout/0", now, version, {}, phase="generate", progress=int(now * 50), progress_at=now)
            yield observation(now, [*reported_by, engine])
        before = here
