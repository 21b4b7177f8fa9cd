"""Progress of the run: curves over its steps, ETTR, and lost time by fault.

ETTR and lost time are defined in `views/ettr.py` and updated event by event, so a poll of a week-old run costs no more
than of a new one. As in the report, a loss starts at the injected fault if the injection log has one, otherwise at the
diagnosed onset. Time counts up to the last committed step; while there is a loss, up to now.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    EpochAdvanced,
    IncidentOpened,
    PlanCreated,
    RunStarted,
    StepCommitted,
    StepInterrupted,
    WeightsAdmitted,
)
from rolecall.core.membership import Actual
from rolecall.core.policy_health import BY_NAME, policy_health_of
from rolecall.views.ettr import Loss, losses, training_began
from rolecall.views.incidents import MatchedIncidents, summarize_incidents
from rolecall.views.injections import InjectedFault
from rolecall.views.lifetimes import IncarnationRecord, Key

BUCKETS_MAX = 200
"""Points of a curve, at most as many as a chart draws (`charts.POINTS_MAX`), so that none is left out. With more steps,
neighbouring points are merged."""
WINDOW_STEPS = 5_000
"""Commits and interruptions that are kept, to find those that an incident delayed."""
INCIDENT_EVENTS_MAX = 300
"""Events kept per open incident; later ones do not change its times."""

STEP_MAX = 2**53
"""Largest integer that a chart can represent."""

UNDETECTED = "undetected"
"""Fault class of an injected fault without an incident."""

_K = EventKind
_STEPS = (_K.STEP_COMMITTED, _K.STEP_INTERRUPTED)


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
class IncidentReplicaLoss:
    """Loss of one replica because of one incident."""

    incident_id: str
    fault_class: str
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EttrSummary:
    """Lost time between `start` and `end`. `lost`: (role, fault class) -> seconds of the whole run."""

    start: float
    end: float
    lost: Mapping[tuple[str, str], float]

    @property
    def ettr(self) -> float | None:
        span = self.end - self.start
        return 1.0 - sum(self.lost.values()) / span if span > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrends:
    """Trends as shown. `account` is None until training has started and the whole journal has been read."""

    curve: tuple[Bucket, ...] = ()
    account: EttrSummary | None = None
    costs: tuple[IncidentReplicaLoss, ...] = ()
    num_rollouts: int = 0
    num_trainers: int = 0


def merged(a: Bucket, b: Bucket) -> Bucket:
    """Merges two neighbours: means over steps, maximum of step times and extremes."""
    num = a.num + b.num

    def mean(x: float, y: float) -> float:
        known = [(v, n) for v, n in ((x, a.num), (y, b.num)) if math.isfinite(v)]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else math.nan

    return Bucket(
        first_step=min(a.first_step, b.first_step),
        last_step=max(a.last_step, b.last_step),
        at=b.at,
        num=num,
        reward=mean(a.reward, b.reward),
        seconds=mean(a.seconds, b.seconds),
        seconds_max=max(a.seconds_max, b.seconds_max),
        tokens=a.tokens + b.tokens,
        signs={
            name: (_larger if BY_NAME[name].is_extreme else mean)(
                a.signs.get(name, math.nan), b.signs.get(name, math.nan)
            )
            for name in {**a.signs, **b.signs}
        },
    )


def _larger(x: float, y: float) -> float:
    """The larger finite value."""
    return max((v for v in (x, y) if math.isfinite(v)), default=math.nan)


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

    faults: Sequence[InjectedFault] = ()
    """Known injected faults, oldest first; set by the reader of the injection log."""
    curve: Curve = field(default_factory=Curve)
    _matched: set[InjectedFault] = field(default_factory=set)  # matched to closed incidents
    _roles: dict[str, int] = field(default_factory=dict)
    _began: float | None = None
    _last_commit: float | None = None
    _steps: deque[Event] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _open: dict[str, list[Event]] = field(default_factory=dict)
    _awaited: dict[Key, float | None] = field(default_factory=dict)  # replacement -> when it served
    _closed: list[IncidentReplicaLoss] = field(default_factory=list)
    _base: tuple[tuple[int, float, float], Mapping[tuple[str, str], float]] | None = None

    @property
    def awaits(self) -> bool:
        """Whether a replacement has not verified its weights yet."""
        return any(at is None for at in self._awaited.values())

    @property
    def suffers(self) -> bool:
        """Whether work is being lost, so that the trends change with time alone."""
        return bool(self._open) or len(self._matched) < len(self.faults)

    def take(self, event: Event) -> None:
        """Raises ValueError: a step that no run reaches."""
        match event.payload:
            case RunStarted(roles=roles):
                self._roles = dict(roles)
            case EpochAdvanced(members=members):
                self._began = training_began([event]) if self._began is None else self._began
                if self.awaits:
                    for replica, incarnation in members:
                        if not replica.startswith("rollout/"):
                            self._serves((replica, incarnation), event.wall_at)
            case WeightsAdmitted(replica=replica, incarnation=incarnation):
                self._serves((replica, incarnation), event.wall_at)
            case StepCommitted() as committed:
                self.curve.add(_bucket(committed, event.wall_at))
                self._last_commit = event.wall_at
                self._steps.append(event.slim())
            case StepInterrupted():
                self._steps.append(event)
            case _ if event.incident_id:
                self._of_incident(event.incident_id, event)
            case _:
                pass

    def _serves(self, key: Key, at: float) -> None:
        if key in self._awaited and self._awaited[key] is None:
            self._awaited[key] = at

    def _of_incident(self, which: str, event: Event) -> None:
        if event.kind is _K.INCIDENT_OPENED:
            self._open.setdefault(which, [])
        story = self._open.get(which)
        if story is None:
            return
        if len(story) < INCIDENT_EVENTS_MAX or event.kind is _K.INCIDENT_CLOSED:
            story.append(event.slim())
        for key in _replacements(event):
            self._awaited.setdefault(key, None)
        if event.kind is _K.INCIDENT_CLOSED:
            try:
                costs, matched = self._costs(which, math.inf)
                self._closed += costs
                self._matched |= matched
            finally:
                for e in self._open.pop(which):
                    for key in _replacements(e):
                        self._awaited.pop(key, None)

    def _costs(self, which: str, end: float) -> tuple[list[IncidentReplicaLoss], set[InjectedFault]]:
        """Losses of the incident, and the injected faults matched to it."""
        events = self._open[which]
        since = events[0].wall_at - 3600.0 if not events else min(_onset(events[0]), events[0].wall_at) - 1.0
        known = {
            key: IncarnationRecord(replica=key[0], incarnation=key[1], serving_at=at)
            for key, at in self._awaited.items()
            if at is not None
        }
        faults = [f for f in self.faults if f not in self._matched]
        joined = summarize_incidents(sorted([*events, *self._steps_since(since)], key=lambda e: e.seq), known, faults)
        told: MatchedIncidents = replace(joined, missed=())
        classes = {s.incident_id: str(s.diagnosis.fault_class) for s in told.stories}
        costs = [
            IncidentReplicaLoss(incident_id=which, fault_class=classes[which], loss=loss) for loss in losses(told, end)
        ]
        return costs, {f for f in faults if f not in joined.missed}

    def _steps_since(self, since: float) -> list[Event]:
        found = []
        for event in reversed(self._steps):
            if event.wall_at < since:
                break
            found.append(event)
        return found

    def trends(self, now: float | None, current: Mapping[ReplicaId, Actual], *, whole: bool) -> RunTrends:
        """The trends. `now`: wall seconds, None for an ended run. `whole`: the whole journal has been read."""
        rollouts, trainers = (self._number(role, current) for role in ("rollout", "trainer"))
        curve = self.curve.points()
        if not whole or self._began is None or self._last_commit is None:
            return RunTrends(curve=curve, num_rollouts=rollouts, num_trainers=trainers)
        end = max(self._last_commit, now or 0.0) if self.suffers else self._last_commit
        still = self._still(end)
        account = self._account(still, end, rollouts, trainers)
        costs = (*self._closed, *still)
        return RunTrends(curve=curve, account=account, costs=costs, num_rollouts=rollouts, num_trainers=trainers)

    def _still(self, end: float) -> list[IncidentReplicaLoss]:
        """Losses of open incidents until `end`, and of undetected faults."""
        found: list[IncidentReplicaLoss] = []
        noticed = set(self._matched)
        for which in self._open:
            costs, matched = self._costs(which, end)
            found += costs
            noticed |= matched
        missed = tuple(f for f in self.faults if f not in noticed)
        unseen = losses(MatchedIncidents(stories=(), missed=missed, false_alarms=()), end)
        return found + [IncidentReplicaLoss(incident_id="", fault_class=UNDETECTED, loss=loss) for loss in unseen]

    def _number(self, role: str, current: Mapping[ReplicaId, Actual]) -> int:
        return self._roles.get(role) or sum(r.startswith(f"{role}/") for r in current)

    def _account(self, still: Sequence[IncidentReplicaLoss], end: float, rollouts: int, trainers: int) -> EttrSummary:
        """Sums losses that end before every open one only once."""
        assert self._began is not None
        cut = min([end, *(c.loss.since for c in still)])
        key = (len(self._closed), cut, self._began)
        if self._base is None or self._base[0] != key:
            self._base = key, lost_seconds(self._closed, self._began, cut, num_rollouts=rollouts, num_trainers=trainers)
        late = [c for c in self._closed if max(c.loss.until, c.loss.stalled_until) > cut]
        rest = lost_seconds([*late, *still], cut, end, num_rollouts=rollouts, num_trainers=trainers)
        lost = {k: self._base[1].get(k, 0.0) + rest.get(k, 0.0) for k in {*self._base[1], *rest}}
        return EttrSummary(start=self._began, end=end, lost=lost)


def _replacements(event: Event) -> list[Key]:
    """Incarnations that a plan asks for."""
    if not isinstance(event.payload, PlanCreated):
        return []
    return [(str(t.replica), t.incarnation + 1) for t in event.payload.plan.targets]


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


def _onset(opened: Event) -> float:
    return opened.as_(IncidentOpened).diagnosis.onset


def lost_seconds(
    costs: Iterable[IncidentReplicaLoss], start: float, end: float, *, num_rollouts: int, num_trainers: int
) -> dict[tuple[str, str], float]:
    """Seconds of the whole run lost between `start` and `end`, by (role, fault class). Their sum is (1 - ETTR) x duration.
    If two incidents affect the same replica, the first one counts."""
    total = num_rollouts + num_trainers
    there = [c for c in costs if c.loss.until > start and c.loss.since < end]
    if total == 0 or end <= start or not there:
        return {}
    cuts = {start, end} | {
        t for c in there for t in (c.loss.since, c.loss.until, c.loss.stalled_until) if start < t < end
    }
    there.sort(key=lambda c: c.loss.since)
    begins = [c.loss.since for c in there]
    active: list[IncidentReplicaLoss] = []
    taken, lost = 0, dict[tuple[str, str], float]()
    for left, right in pairwise(sorted(cuts)):
        upto = bisect_left(begins, right)
        active = [c for c in (*active, *there[taken:upto]) if c.loss.until > left]
        taken = max(taken, upto)
        units = _units([c for c in active if c.loss.since <= left], left, num_trainers)
        whole = sum(units.values())
        scale = min(1.0, total / whole) if whole else 0.0
        for key, unit in units.items():
            lost[key] = lost.get(key, 0.0) + (right - left) * unit * scale / total
    return lost


def _units(active: Sequence[IncidentReplicaLoss], at: float, num_trainers: int) -> dict[tuple[str, str], float]:
    """Number of unproductive replicas, by (role, fault class). One stalled trainer stalls all trainers."""
    units: dict[tuple[str, str], float] = {}
    seen: set[str] = set()
    stalls = next((c for c in active if c.loss.replica.startswith("trainer/") and at < c.loss.stalled_until), None)
    if stalls is not None:
        units["trainer", stalls.fault_class] = float(num_trainers)
    for cost in active:
        replica = cost.loss.replica
        role = replica.partition("/")[0]
        if replica in seen or role not in ("rollout", "trainer") or (role == "trainer" and stalls is not None):
            continue
        seen.add(replica)
        units[role, cost.fault_class] = units.get((role, cost.fault_class), 0.0) + 1.0
    return units
