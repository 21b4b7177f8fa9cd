"""ETTR and where the lost time went, while the run goes on: the definition of `ettr.py`, folded event by event.

A running run is counted up to now, so that an outage shows while it lasts; one that is over to its last committed step, as
the report does. What lies `SETTLE_SECONDS` back, before the beginning of every open incident, is settled: it is added up
once, and its events and losses are let go. Only a fault that is found later than that after it began comes out less than
in the report, by the part of it that was settled already. The injector's log is not read: the onset that the diagnosis
gives is when the harm began.

Each second goes to effective or lost time by the share of replicas at work; what is lost goes to the role of the replica
that is hurt and to the class of its fault, of several to the one that began first. Pure.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import IncidentOpened
from rolecall.views.ettr import Loss, losses, training_began
from rolecall.views.incidents import CLOCK_SLACK_SECONDS, IncidentSummary, MatchedIncidents, summarize_incidents
from rolecall.views.lifetimes import incarnation_records

SETTLE_SECONDS = 600.0
"""Slow replicas are found within minutes; panels, the slowest of all, lead to no action and so to no loss."""
NUM_RETAINED_MAX = 50_000
"""Events kept for open incidents: hours of a run. Beyond it the oldest are let go."""

Cause = tuple[str, str]
"""(role, class of the fault)."""

_K = EventKind
RETAINED = frozenset(
    {_K.EPOCH_ADVANCED, _K.STEP_COMMITTED, _K.STEP_INTERRUPTED, _K.REQUESTS_REASSIGNED, _K.WEIGHTS_ADMITTED}
    | {_K.REPLICA_STARTING, _K.REPLICA_READY, _K.REPLICA_LOST, _K.REPLICA_STOPPED}
    | {_K.INCIDENT_OPENED, _K.INCIDENT_UPDATED, _K.PLAN_CREATED, _K.ACTION_STARTED, _K.ACTION_FAILED}
    | {_K.INCIDENT_VERIFIED, _K.INCIDENT_CLOSED}
)
"""What the story of an incident is told from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausedLoss:
    loss: Loss
    fault: str

    @property
    def cause(self) -> Cause:
        return self.loss.replica.partition("/")[0], self.fault


@dataclass(frozen=True, slots=True, kw_only=True)
class EttrAccount:
    """Seconds since training began; `lost` and `effective_seconds` add up to `training_seconds`."""

    training_seconds: float
    lost: Mapping[Cause, float]

    @property
    def effective_seconds(self) -> float:
        return max(0.0, self.training_seconds - sum(self.lost.values()))

    @property
    def ettr(self) -> float | None:
        return self.effective_seconds / self.training_seconds if self.training_seconds > 0 else None


def lost_between(
    start: float, end: float, lost: Sequence[CausedLoss], *, num_rollouts: int, num_trainers: int
) -> dict[Cause, float]:
    """What `effective.ettr` leaves out between `start` and `end`, by cause, in seconds of the whole run."""
    total = num_rollouts + num_trainers
    found: dict[Cause, float] = {}
    if end <= start or total == 0:
        return found
    times = (t for c in lost for t in (c.loss.since, c.loss.until, c.loss.stalled_until))
    cuts = {start, end} | {t for t in times if start < t < end}
    ordered = sorted(lost, key=lambda c: (c.loss.since, c.loss.replica))
    for left, right in pairwise(sorted(cuts)):
        now = [c for c in ordered if c.loss.since <= left < c.loss.until]
        for cause, num in _hurt(now, left, num_rollouts, num_trainers).items():
            found[cause] = found.get(cause, 0.0) + (right - left) * num / total
    return found


def _hurt(now: Sequence[CausedLoss], at: float, num_rollouts: int, num_trainers: int) -> dict[Cause, int]:
    """How many replicas do not count, by cause."""
    rollouts = _first_of_each(c for c in now if c.loss.replica.startswith("rollout/"))[:num_rollouts]
    trainers = [c for c in now if c.loss.replica.startswith("trainer/")]
    stalled = next((c for c in trainers if at < c.loss.stalled_until), None)
    causes = [c.cause for c in rollouts]
    if stalled is not None:
        causes += [stalled.cause] * num_trainers
    else:
        causes += [c.cause for c in _first_of_each(trainers)[:num_trainers]]
    return {cause: causes.count(cause) for cause in causes}


def _first_of_each(found: Iterable[CausedLoss]) -> list[CausedLoss]:
    first: dict[str, CausedLoss] = {}
    for one in found:
        first.setdefault(one.loss.replica, one)
    return list(first.values())


@dataclass
class EttrAccumulator:
    """Owned by one reader, who gives it every event once, in order."""

    num_rollouts: int
    num_trainers: int
    settle_seconds: float = SETTLE_SECONDS
    _began_at: float | None = None
    _committed_at: float | None = None
    _ended: bool = False
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=NUM_RETAINED_MAX))
    _open: dict[str, float] = field(default_factory=dict)  # incident -> when its harm began
    _started: set[str] = field(default_factory=set)  # open ones with an action: the others have taken nothing yet
    _losses: list[CausedLoss] = field(default_factory=list)  # of closed incidents, not settled yet
    _settled_until: float = 0.0
    _settled: dict[Cause, float] = field(default_factory=dict)

    def take(self, event: Event) -> IncidentSummary | None:
        """Returns the story of an incident that this event closes."""
        if self._began_at is None:
            self._began_at = training_began([event])
            self._settled_until = self._began_at or 0.0
        if event.kind is _K.STEP_COMMITTED:
            self._committed_at = event.wall_at
        elif event.kind is _K.RUN_ENDED:
            self._ended = True
        if event.kind not in RETAINED:
            return None
        self._events.append(event.slim())
        which = event.incident_id or ""
        if event.kind is _K.INCIDENT_OPENED:
            self._settle(self._settled_by(event.wall_at))
            self._open[which] = _began_at(event)
        elif event.kind is _K.ACTION_STARTED and which in self._open:
            self._started.add(which)
        elif event.kind is _K.INCIDENT_CLOSED and which in self._open:
            story = next(iter(self._stories([which])), None)
            del self._open[which]
            self._started.discard(which)
            if story is not None:
                self._losses += _caused([story], event.wall_at)
            return story
        return None

    def account(self, now: float) -> EttrAccount | None:
        """None before training began. `now`: wall seconds."""
        if self._began_at is None:
            return None
        end = now
        if self._ended and self._committed_at is not None:
            end = self._committed_at
        self._settle(min(end, self._settled_by(now)))
        known = self._losses + _caused(self._stories(sorted(self._started)), end)
        lost = dict(self._settled)
        for cause, seconds in self._between(self._settled_until, end, known).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
        return EttrAccount(training_seconds=max(0.0, end - self._began_at), lost=lost)

    def _between(self, start: float, end: float, lost: Sequence[CausedLoss]) -> dict[Cause, float]:
        return lost_between(start, end, lost, num_rollouts=self.num_rollouts, num_trainers=self.num_trainers)

    def _settled_by(self, now: float) -> float:
        return min(now - self.settle_seconds, *self._open.values(), math.inf)

    def _settle(self, until: float) -> None:
        while self._events and self._events[0].wall_at < until:
            self._events.popleft()
        if until <= self._settled_until:
            return
        for cause, seconds in self._between(self._settled_until, until, self._losses).items():
            self._settled[cause] = self._settled.get(cause, 0.0) + seconds
        self._settled_until = until
        self._losses = [c for c in self._losses if c.loss.until > until]

    def _stories(self, which: Iterable[str]) -> list[IncidentSummary]:
        found: list[IncidentSummary] = []
        for incident in which:
            since = self._open[incident] - CLOCK_SLACK_SECONDS
            events = [e for e in self._events if e.incident_id in (None, incident) and e.wall_at >= since]
            found += summarize_incidents(events, incarnation_records(events, {}), ()).stories
        return found


def _began_at(opened: Event) -> float:
    d = opened.as_(IncidentOpened).diagnosis
    return min(d.onset, d.detected_at, opened.wall_at)


def _caused(stories: Iterable[IncidentSummary], end: float) -> list[CausedLoss]:
    return [
        CausedLoss(loss=loss, fault=str(story.diagnosis.fault_class))
        for story in stories
        for loss in losses(MatchedIncidents(stories=(story,), missed=(), false_alarms=()), end)
    ]
