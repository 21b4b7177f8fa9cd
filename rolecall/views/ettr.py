"""Effective training time ratio (ETTR), pace of steps, and seconds to N steps compared with a failure-free run. Pure.

ETTR follows RobustRL (arXiv 2512.22492): the share of time in which rollouts or trainers compute. While trainers
recover and the rollouts run, a window counts

    num_rollouts / (num_rollouts + num_trainers)

because the rollouts continue to generate. The paper does not define the cost of a lost rollout. Here, while k of the
rollouts are lost, the window counts (num_rollouts - k + active trainers) / (num_rollouts + num_trainers), so the result
is never higher than the paper's. A rollout that has lent its node is lost, too. From the fault until the interrupted
step is committed, no trainer counts; from then until the replacement serves, the survivors do. A replica slowed by a
fault counts as lost, although it still does some work. All replicas of a run that ended and was started again are lost
until each serves: from the last commit or membership epoch on, because the journal does not say when it ended.

The time runs from the first membership epoch with a trainer and a rollout until now (`counted_until`); of an ended run
to its last committed step. An open incident costs its suspects from the onset until now.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rolecall.core.ids import role_of
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.run import ComponentRestarted, EpochAdvanced, RunStarted, StepCommitted
from rolecall.core.policy_health import BY_NAME, policy_health_of
from rolecall.recovery.incidents import INCIDENT_KINDS, Incident, IncidentState, apply_leniently
from rolecall.views.incidents import (
    CLOCK_SLACK_SECONDS,
    AwayReplicas,
    AwayTime,
    IncidentSummary,
    InjectedFault,
    MatchedIncidents,
    summarize_incidents,
)
from rolecall.views.lifetimes import incarnation_records

SETTLE_SECONDS = 600.0
"""Slow replicas are detected within minutes; panels, the slowest detectors, trigger no action and thus no loss."""
NUM_RETAINED_MAX = 50_000
"""Events kept for open incidents: hours of a run. Beyond it the oldest are dropped."""

_K = EventKind
RETAINED = frozenset(
    {_K.EPOCH_ADVANCED, _K.STEP_COMMITTED, _K.STEP_INTERRUPTED, _K.REQUESTS_REASSIGNED, _K.WEIGHTS_ADMITTED}
    | {_K.REPLICA_STARTING, _K.REPLICA_READY, _K.REPLICA_LOST, _K.REPLICA_STOPPED, _K.NODE_LENT}
    | {_K.COMPONENT_RESTARTED}
)
"""Events from which the cost of incidents and outages is computed."""
UNDETECTED = "undetected"
"""Fault class of time lost without an incident: to an injected fault, or to an outage of the whole run."""

Cause = tuple[str, str]
"""(role, fault class) of lost time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step as finally committed. Times are wall seconds."""

    step: int
    at: float
    seconds: float
    reward: float
    loss: float
    epoch: int
    num_tokens: int
    signs: Mapping[str, float] = field(default_factory=dict)
    """Policy health metrics (core/policy_health.py) that the step reported."""

    def to_dict(self, zero: float) -> dict[str, float | int | None]:
        """Layout in the report: `at` in seconds after `zero`; non-finite values are null."""
        return {
            "step": self.step,
            "at": round(self.at - zero, 3),
            "seconds": _finite(self.seconds),
            "reward": _finite(self.reward),
            "loss": _finite(self.loss),
            "epoch": self.epoch,
            "num_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Work of one replica lost from `since` to `until`, wall seconds. `stalled_until`: trainers only; no trainer
    computes before it. `incident_id` is empty for an undetected fault. `by_restart`: its role, the job, or the whole
    run was started again."""

    replica: str
    since: float
    until: float
    stalled_until: float = 0.0
    fault: str = UNDETECTED
    incident_id: str = ""
    by_restart: bool = False

    @property
    def role(self) -> str:
        return role_of(self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Work lost from `since` until `until`, wall seconds, charged to one loss. `replicas`: how many do not count then,
    a fraction where the losses of a moment exceed the replicas of the run."""

    role: str
    loss: Loss
    since: float
    until: float
    replicas: float

    def replica_seconds(self, start: float = -math.inf, end: float = math.inf) -> float:
        return self.replicas * max(0.0, min(self.until, end) - max(self.since, start))


def _number(value: float | None) -> float:
    """NaN for null: a restarted controller may know that a step was committed, but not its loss."""
    return math.nan if value is None else value


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def training_began(events: Iterable[Event]) -> float | None:
    """When an epoch first had both a trainer and a rollout, wall seconds."""
    for event in events:
        if isinstance(event.payload, EpochAdvanced):
            roles = {role_of(replica) for replica, _ in event.payload.members}
            if {"trainer", "rollout"} <= roles:
                return event.wall_at
    return None


def steps(events: Iterable[Event]) -> list[Step]:
    """The committed steps in order; for a step that was undone and repeated, the last time counts."""
    found: dict[int, Step] = {}
    for event in events:
        if isinstance(event.payload, StepCommitted):
            found[event.payload.step] = step_of(event.payload, event.wall_at)
    return [found[n] for n in sorted(found)]


def step_of(committed: StepCommitted, at: float) -> Step:
    return Step(
        step=committed.step,
        at=at,
        seconds=committed.seconds,
        reward=_number(committed.reward),
        loss=_number(committed.loss),
        epoch=committed.epoch,
        num_tokens=committed.tokens,
        signs=policy_health_of(committed),
    )


def health(committed: Sequence[Step]) -> dict[str, list[float | None]]:
    """Policy health metrics for the report: name -> one value per step, null if missing."""
    measured = [name for name in BY_NAME if any(name in step.signs for step in committed)]
    return {name: [_finite(step.signs.get(name, math.nan)) for step in committed] for name in measured}


def losses(joined: MatchedIncidents, end: float) -> list[Loss]:
    """Lost work per replica of each incident and each undetected fault; open losses last until `end`."""
    found = []
    for summary in joined.summaries:
        incident, diagnosis = summary.incident, summary.incident.diagnosis
        over = incident.closed_at is not None or incident.requested_by_operator
        if summary.fault is None and incident.action_started_at is None and over:
            continue  # no known impact, and no replica was replaced
        until = summary.serving_at if summary.serving_at is not None else summary.ends_at
        stalled = summary.step_committed_at if summary.step_committed_at is not None else until
        since = {**dict.fromkeys(summary.affected, summary.began_at), **summary.partners}
        found += [
            Loss(
                replica=replica,
                since=since[replica],
                until=end if until is None else min(until, end),
                stalled_until=end if stalled is None else min(stalled, end),
                fault=str(diagnosis.fault_class),
                incident_id=incident.incident_id,
            )
            for replica in sorted(since)
        ]
        found += [_loss_of(away, str(diagnosis.fault_class), end) for away in summary.restarts]
    classes = {s.incident.incident_id: str(s.incident.diagnosis.fault_class) for s in joined.summaries}
    found += [_loss_of(away, classes.get(away.incident_id, UNDETECTED), end) for away in joined.away]
    found += [Loss(replica=r, since=f.injected_at, until=end, stalled_until=end) for f in joined.missed for r in f.hit]
    return [loss for loss in found if loss.until > loss.since]


def _loss_of(away: AwayTime, fault: str, end: float) -> Loss:
    """Trainers wait for the last one that a restart took down."""
    until = end if away.until is None else min(away.until, end)
    return Loss(
        replica=away.replica,
        since=away.since,
        until=until,
        stalled_until=until if away.by_restart else 0.0,
        fault=fault,
        incident_id=away.incident_id,
        by_restart=away.by_restart,
    )


def counted_until(
    now: float, committed_at: float | None, *, ended: bool, watched: bool, has_open_incident: bool
) -> float | None:
    """The end of the counted time: now while a watch observes the run or an incident is open, else the last committed
    step, because what happened since is not known. None: there is no such step. Wall seconds."""
    return now if not ended and (watched or has_open_incident) else committed_at


def waiting_trainers(lost: Sequence[Loss], trainers: Iterable[str]) -> list[tuple[str, float]]:
    """Healthy trainers, and the seconds that each waited for the lost ones of one incident."""
    of_trainers = [loss for loss in lost if loss.role == "trainer"]
    if not of_trainers:
        return []
    since, until = min(loss.since for loss in of_trainers), max(loss.stalled_until for loss in of_trainers)
    others = sorted(set(trainers) - {loss.replica for loss in of_trainers})
    return [(replica, until - since) for replica in others if until > since]


def charges(
    lost: Iterable[Loss], start: float, end: float, *, num_rollouts: int, num_trainers: int
) -> Iterator[Charge]:
    """What is lost between `start` and `end`, in order of time.

    Time lost to several faults at once is charged to the loss that began first; a stalled trainer is charged for all
    trainers.
    """
    total = num_rollouts + num_trainers
    here = sorted((c for c in lost if c.until > start and c.since < end), key=lambda c: (c.since, c.replica))
    if total == 0 or end <= start or not here:
        return
    cuts = {start, end} | {t for c in here for t in (c.since, c.until, c.stalled_until) if start < t < end}
    begins = [c.since for c in here]
    active: list[Loss] = []
    taken = 0
    for left, right in pairwise(sorted(cuts)):
        upto = bisect_left(begins, right)
        active = [c for c in (*active, *here[taken:upto]) if c.until > left]
        taken = max(taken, upto)
        units = _idle_replicas([c for c in active if c.since <= left], left, num_trainers)
        idle = sum(units.values())
        scale = min(1.0, total / idle) if idle else 0.0
        for (role, loss), unit in units.items():
            yield Charge(role=role, loss=loss, since=left, until=right, replicas=unit * scale)


def lost_seconds(
    lost: Iterable[Loss], start: float, end: float, *, num_rollouts: int, num_trainers: int
) -> dict[tuple[str, Loss], float]:
    """Seconds of the whole run lost between `start` and `end`, by role and by the loss that is charged. Their sum is
    (1 - ETTR) x duration."""
    found: dict[tuple[str, Loss], float] = {}
    for c in charges(lost, start, end, num_rollouts=num_rollouts, num_trainers=num_trainers):
        seconds = c.replica_seconds() / (num_rollouts + num_trainers)
        found[c.role, c.loss] = found.get((c.role, c.loss), 0.0) + seconds
    return found


def _idle_replicas(active: Sequence[Loss], at: float, num_trainers: int) -> dict[tuple[str, Loss], float]:
    """Number of replicas that do not count at `at`, by role and loss. One stalled trainer stalls all trainers."""
    units: dict[tuple[str, Loss], float] = {}
    seen: set[str] = set()
    stall = next((c for c in active if c.role == "trainer" and at < c.stalled_until), None)
    if stall is not None:
        units["trainer", stall] = float(num_trainers)
    for loss in active:
        if loss.replica in seen or loss.role not in ("rollout", "trainer") or (loss.role == "trainer" and stall):
            continue
        seen.add(loss.replica)
        units[loss.role, loss] = 1.0
    return units


def by_cause(lost: Mapping[tuple[str, Loss], float]) -> dict[Cause, float]:
    """Sums of `lost_seconds` by role and fault class."""
    found: dict[Cause, float] = {}
    for (role, loss), seconds in lost.items():
        found[role, loss.fault] = found.get((role, loss.fault), 0.0) + seconds
    return found


def ettr(
    start: float, end: float, lost: Iterable[Loss], *, num_rollouts: int, num_trainers: int, count_rollouts: bool = True
) -> float | None:
    """Effective training time ratio from `start` to `end`, 0..1; None if no time passed.

    `count_rollouts` false: the paper's formula, in which a lost rollout costs nothing. One that a restart ended does,
    because the paper counts rollouts that are alive.
    """
    if end <= start or num_rollouts + num_trainers == 0:
        return None
    counted = [c for c in lost if count_rollouts or c.role != "rollout" or c.by_restart]
    idle = lost_seconds(counted, start, end, num_rollouts=num_rollouts, num_trainers=num_trainers)
    return 1.0 - sum(idle.values()) / (end - start)


def faultless_step_seconds(committed: Sequence[Step], lost: Sequence[Loss]) -> float | None:
    """Mean time between commits without an open fault in between; None if there is no such pair."""
    gaps = [
        b.at - a.at
        for a, b in pairwise(committed)
        if not any(loss.since <= b.at and a.at <= loss.until for loss in lost)
    ]
    return sum(gaps) / len(gaps) if gaps else None


def compare_pace(
    committed: Sequence[Step], start: float, lost: Sequence[Loss], baseline: Mapping[str, Any] | None
) -> dict[str, object]:
    """`seconds_to_n_steps` of the report.

    `baseline`: the report of a failure-free run, with its `steps` and `training_started_seconds`. Without one,
    `baseline` is null and `estimate` is derived from this run's pace without faults.
    """
    num_steps, theirs, name = len(committed), None, None
    if baseline is not None:
        num_steps = min(num_steps, len(baseline["steps"]))
        if num_steps:
            theirs = round(baseline["steps"][num_steps - 1]["at"] - baseline["training_started_seconds"], 3)
            name = str(baseline["run_id"])
    pace = faultless_step_seconds(committed, lost)
    return {
        "n": num_steps,
        "this": round(committed[num_steps - 1].at - start, 3) if num_steps else None,
        "baseline": theirs,
        "baseline_run": name,
        "estimate": round(pace * num_steps, 3) if pace is not None and num_steps else None,
        "estimate_how": "n x mean time between commits of this run with no fault open in between",
    }


def mean_of_ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last 10 %, of at least 3 values each; missing values are ignored."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return None, None
    width = min(len(known), max(3, round(len(known) / 10)))
    return round(sum(known[:width]) / width, 4), round(sum(known[-width:]) / width, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class EttrAccount:
    """From `start`, when training began, to `end`, wall seconds. `lost` and `effective_seconds` add up to
    `training_seconds`."""

    start: float
    end: float
    lost: Mapping[Cause, float]

    @property
    def training_seconds(self) -> float:
        return max(0.0, self.end - self.start)

    @property
    def effective_seconds(self) -> float:
        return max(0.0, self.training_seconds - sum(self.lost.values()))

    @property
    def ettr(self) -> float | None:
        return self.effective_seconds / self.training_seconds if self.training_seconds > 0 else None


@dataclass
class EttrAccumulator:
    """ETTR and lost time of a run in progress, updated event by event.

    Time counts as in `counted_until`, so that an outage shows while it lasts. Time more than `SETTLE_SECONDS` ago,
    before the onset of every open incident and of every injected fault without an incident, is settled: it is summed
    once, and its events and losses are dropped. The result differs from the report's only if a fault is detected later
    than `SETTLE_SECONDS` after its onset: the settled part of its loss is missing. Owned by one reader,
    which passes every event once, in order.

    `num_rollouts`, `num_trainers`: 0 until the event `run_started`. `faults`: the known part of the injection log,
    oldest first; a loss then starts at the injection, and an undetected fault is a loss.
    """

    num_rollouts: int = 0
    num_trainers: int = 0
    faults: Sequence[InjectedFault] = ()
    settle_seconds: float = SETTLE_SECONDS
    open_incidents: dict[str, Incident] = field(default_factory=dict)
    _matched: set[InjectedFault] = field(default_factory=set)  # faults of closed incidents
    _began_at: float | None = None
    _committed_at: float | None = None
    _ended: bool = False
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=NUM_RETAINED_MAX))
    _losses: list[Loss] = field(default_factory=list)  # of closed incidents, not settled yet
    _away: AwayReplicas = field(default_factory=AwayReplicas)
    _away_for: dict[str, str] = field(default_factory=dict)  # incident -> fault class, of replicas that are away now
    _settled_until: float = 0.0
    _settled: dict[Cause, float] = field(default_factory=dict)

    def take(self, event: Event) -> IncidentSummary | None:
        """Returns the summary of an incident that this event closes."""
        if self._began_at is None:
            self._began_at = training_began([event])
            self._settled_until = self._began_at or 0.0
        if isinstance(event.payload, RunStarted):
            self.num_rollouts = self.num_rollouts or event.payload.roles.get("rollout", 0)
            self.num_trainers = self.num_trainers or event.payload.roles.get("trainer", 0)
        elif event.kind is _K.STEP_COMMITTED:
            self._committed_at = event.wall_at
        elif event.kind is _K.RUN_ENDED:
            self._ended = True
        elif isinstance(event.payload, ComponentRestarted) and event.payload.continues_run:
            self._ended = False
        if event.kind in INCIDENT_KINDS:
            return self._take_incident(event)
        self._take_away(event)
        if event.kind in RETAINED:
            self._events.append(event.slim())
        return None

    def _take_away(self, event: Event) -> None:
        self._losses += [self._loss_of(away, event.wall_at) for away in self._away.take(event)]
        if event.kind is _K.NODE_LENT and event.incident_id in self.open_incidents:
            fault = self.open_incidents[event.incident_id].diagnosis.fault_class
            self._away_for[event.incident_id] = str(fault)
        causes = {away.incident_id for away in self._away.open.values()}
        self._away_for = {which: fault for which, fault in self._away_for.items() if which in causes}

    def _loss_of(self, away: AwayTime, end: float) -> Loss:
        return _loss_of(away, self._away_for.get(away.incident_id, UNDETECTED), end)

    def _take_incident(self, event: Event) -> IncidentSummary | None:
        which = event.incident_id or ""
        incident = apply_leniently(self.open_incidents.get(which), event)
        if incident is None:
            return None
        if which not in self.open_incidents:
            self._settle(self._settled_by(event.wall_at))
        if incident.state is not IncidentState.CLOSED:
            self.open_incidents[which] = incident
            return None
        self.open_incidents.pop(which, None)
        matched, faults = self._summarized(incident)
        self._matched |= faults
        self._losses += losses(matched, event.wall_at)
        for away in (away for summary in matched.summaries for away in summary.restarts):
            if away.until is None and role_of(away.replica) in ("rollout", "trainer"):
                self._away.open.setdefault(away.replica, away)  # goes on; `charges` counts what overlaps once
                self._away_for[which] = str(incident.diagnosis.fault_class)
        return next(iter(matched.summaries), None)

    def account(self, now: float, *, watched: bool = True) -> EttrAccount | None:
        """`now`: wall seconds. `watched`: a watch holds the lease. Returns None before training began."""
        if self._began_at is None:
            return None
        has_open = bool(self.open_incidents)
        end = counted_until(now, self._committed_at, ended=self._ended, watched=watched, has_open_incident=has_open)
        if end is None:
            return None
        self._settle(min(end, self._settled_by(now)))
        lost = dict(self._settled)
        for cause, seconds in self._between(self._settled_until, end, [*self._losses, *self._open_losses(end)]).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
        return EttrAccount(start=self._began_at, end=end, lost=lost)

    def _open_losses(self, end: float) -> list[Loss]:
        """Losses of open incidents and undetected faults, until `end`."""
        found: list[Loss] = []
        detected = set(self._matched)
        for incident in self.open_incidents.values():
            matched, faults = self._summarized(incident)
            found += losses(matched, end)
            detected |= faults
        found += [self._loss_of(away, end) for away in self._away.open.values()]
        return found + losses(MatchedIncidents(missed=tuple(f for f in self.faults if f not in detected)), end)

    def _summarized(self, incident: Incident) -> tuple[MatchedIncidents, set[InjectedFault]]:
        """The summary of one incident, and the injected faults matched to it; none if its events are incomplete."""
        since = _began_at(incident) - CLOCK_SLACK_SECONDS
        events = [e for e in self._events if e.wall_at >= since]
        faults = [f for f in self.faults if f not in self._matched]
        with suppress(LookupError, TypeError, ValueError):
            joined = summarize_incidents(events, incarnation_records(events, {}), faults, incidents=[incident])
            return replace(joined, missed=(), away=()), {f for f in faults if f not in joined.missed}
        return MatchedIncidents(), set()

    def _between(self, start: float, end: float, lost: Iterable[Loss]) -> dict[Cause, float]:
        return by_cause(lost_seconds(lost, start, end, num_rollouts=self.num_rollouts, num_trainers=self.num_trainers))

    def _settled_by(self, now: float) -> float:
        pending = (f.injected_at for f in self.faults if f not in self._matched)
        return min(now - self.settle_seconds, *map(_began_at, self.open_incidents.values()), *pending, math.inf)

    def _settle(self, until: float) -> None:
        while self._events and self._events[0].wall_at < until:
            self._events.popleft()
        if until <= self._settled_until:
            return
        away = [self._loss_of(away, math.inf) for away in self._away.open.values()]
        for cause, seconds in self._between(self._settled_until, until, [*self._losses, *away]).items():
            self._settled[cause] = self._settled.get(cause, 0.0) + seconds
        self._settled_until = until
        self._losses = [c for c in self._losses if c.until > until]

    @property
    def awaits_weights(self) -> bool:
        """Whether a loss lasts until an engine's weights are admitted."""
        return bool(self.open_incidents or self._away.open)

    def open_losses(self) -> tuple[Loss, ...]:
        """Losses of open incidents, until infinity while they go on."""
        return tuple(loss for loss in self._open_losses(math.inf) if loss.incident_id)


def _began_at(incident: Incident) -> float:
    first = incident.first_diagnosis
    return min(first.onset, first.detected_at, incident.opened_at)
