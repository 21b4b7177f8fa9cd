"""Progress of the run: curves over its steps, and its ETTR with the lost time by fault (`views/ettr.py`).

Both are updated event by event, so a poll of a week-old run costs no more than of a new one.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.evaluations import EvaluationHistory, EvaluationPoint
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import IncidentOpened
from rolecall.core.journal.payloads.run import DatasetProgress, EvaluationFinished, RunEnded, StepCommitted
from rolecall.core.membership import Actual
from rolecall.core.policy_health import BY_NAME, policy_health_of
from rolecall.views.ettr import EttrAccount, EttrAccumulator, Loss

BUCKETS_MAX = 200
"""Points of a curve, at most as many as a chart draws (`charts.POINTS_MAX`), so that none is left out. With more steps,
neighbouring points are merged."""

RECENT_EVENTS = 10
COMMITS_KEPT = 4096
"""Commits in which the step at an onset is looked up, the newest."""
_K = EventKind
ROUTINE = frozenset(
    {_K.STEP_COMMITTED, _K.WEIGHTS_ADMITTED, _K.CHECKPOINT_WRITTEN, _K.MICROBATCH_RECOMPUTED, _K.MICROBATCH_COMPARED}
    | {_K.REWARDS_COMPARED, _K.INCIDENT_UPDATED, _K.EVALUATION_FINISHED}
)
"""Kinds that a healthy run writes all the time, or that repeat an incident."""

STEP_MAX = 2**53
"""Largest integer that a chart can represent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One point of a curve: consecutive steps; unreported values are NaN."""

    first_step: int
    last_step: int
    at: float  # of the last commit, wall seconds
    num: int
    reward: float
    seconds: float
    seconds_max: float
    tokens: float
    signs: Mapping[str, float] = field(default_factory=dict)
    """Policy health metrics (core/policy_health.py) that its steps have."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.seconds * self.num) if self.seconds > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrends:
    """Trends as shown. `account` is None until training has started and the whole journal has been read."""

    curve: tuple[Bucket, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    dataset: DatasetProgress | None = None
    """At the newest step."""
    account: EttrAccount | None = None
    recent: tuple[Event, ...] = ()
    """The newest events that are not `ROUTINE`, newest last. That replicas stop because the run ends is left out: with
    many, nothing else would be seen."""
    still_open: tuple[Loss, ...] = ()
    """Losses of open incidents, until infinity while they go on."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Incident -> the step that was being worked on at its onset; an incident before the first step has none."""


def merged(earlier: Bucket, later: Bucket) -> Bucket:
    """Merges two neighbours: means over steps, maximum of step times and extremes."""
    num = earlier.num + later.num

    def mean(x: float, y: float) -> float:
        known = [(v, n) for v, n in ((x, earlier.num), (y, later.num)) if math.isfinite(v)]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else math.nan

    def larger(x: float, y: float) -> float:
        return max((v for v in (x, y) if math.isfinite(v)), default=math.nan)

    return Bucket(
        first_step=min(earlier.first_step, later.first_step),
        last_step=max(earlier.last_step, later.last_step),
        at=later.at,
        num=num,
        reward=mean(earlier.reward, later.reward),
        seconds=mean(earlier.seconds, later.seconds),
        seconds_max=max(earlier.seconds_max, later.seconds_max),
        tokens=earlier.tokens + later.tokens,
        signs={
            name: (larger if BY_NAME[name].is_extreme else mean)(
                earlier.signs.get(name, math.nan), later.signs.get(name, math.nan)
            )
            for name in {**earlier.signs, **later.signs}
        },
    )


def step_at(commits: Sequence[tuple[float, int]], at: float) -> int | None:
    """The step that was being worked on at `at` (wall seconds): the next to be committed. `commits`: (time, step) in
    order; None where they have a gap at that time."""
    after = bisect_right(commits, at, key=lambda c: c[0])
    before = commits[after - 1][1] if after else -1
    if after == len(commits):
        return before + 1 if commits else None
    return commits[after][1] if commits[after][1] <= before + 1 else None


class Curve:
    """All steps in at most `BUCKETS_MAX` points, each with the same number of steps except the last."""

    def __init__(self) -> None:
        self._full: list[Bucket] = []
        self._last: Bucket | None = None
        self._width = 1

    def add(self, step: Bucket) -> None:
        self._last = step if self._last is None else merged(self._last, step)
        if self._last.num >= self._width:
            self._full.append(self._last)
            self._last = None
        if len(self._full) >= BUCKETS_MAX:
            self._full = [merged(a, b) for a, b in zip(self._full[::2], self._full[1::2], strict=True)]
            self._width *= 2

    def points(self) -> tuple[Bucket, ...]:
        return (*self._full, *([self._last] if self._last else ()))


@dataclass
class RunTrendsProjection:
    """Owned by one thread."""

    curve: Curve = field(default_factory=Curve)
    ettr: EttrAccumulator = field(default_factory=EttrAccumulator)
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    stops: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    commits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=COMMITS_KEPT))
    steps: dict[str, int] = field(default_factory=dict)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    dataset: DatasetProgress | None = None

    def take(self, event: Event) -> None:
        """Raises ValueError: a step that no run reaches."""
        if isinstance(event.payload, StepCommitted):
            self.curve.add(_bucket(event.payload, event.wall_at))
            self.commits.append((event.wall_at, event.payload.step))
            self.dataset = event.payload.dataset
        elif isinstance(event.payload, IncidentOpened) and event.incident_id:
            found = step_at(self.commits, event.payload.diagnosis.onset)
            if found is not None:
                self.steps.setdefault(event.incident_id, found)
        self.ettr.take(event)
        if isinstance(event.payload, EvaluationFinished) and not 0 <= event.payload.step <= STEP_MAX:
            raise ValueError(f"invalid step {str(event.payload.step)[:30]}")
        self.evaluations.take(event)
        if isinstance(event.payload, RunEnded):
            why = event.payload.because
            self.stops = deque((s for s in self.stops if s.payload.reason != why), maxlen=RECENT_EVENTS)
        if event.kind not in ROUTINE:
            (self.stops if event.kind == _K.REPLICA_STOPPED else self.recent).append(event)

    def trends(
        self, now: float, current: Mapping[ReplicaId, Actual], *, whole: bool, watched: bool = True
    ) -> RunTrends:
        """`now`: wall seconds. `whole`: the whole journal has been read. `watched`: a watch holds the lease."""
        ettr = self.ettr
        ettr.num_rollouts = ettr.num_rollouts or sum(r.startswith("rollout/") for r in current)
        ettr.num_trainers = ettr.num_trainers or sum(r.startswith("trainer/") for r in current)
        account = ettr.account(now, watched=watched) if whole else None
        return RunTrends(
            curve=self.curve.points(),
            evaluations=self.evaluations.points(),
            dataset=self.dataset,
            account=account,
            recent=tuple(sorted((*self.recent, *self.stops), key=lambda e: e.seq)[-RECENT_EVENTS:]),
            still_open=ettr.open_losses(),
            steps=dict(self.steps),
        )


def _bucket(committed: StepCommitted, at: float) -> Bucket:
    step = committed.step
    if not 0 <= step <= STEP_MAX:
        raise ValueError(f"invalid step {str(step)[:30]}")
    seconds = committed.seconds
    return Bucket(
        first_step=step,
        last_step=step,
        at=at,
        num=1,
        reward=math.nan if committed.reward is None else committed.reward,
        seconds=seconds,
        seconds_max=seconds if math.isfinite(seconds) else 0.0,
        tokens=float(committed.tokens),
        signs=policy_health_of(committed),
    )
