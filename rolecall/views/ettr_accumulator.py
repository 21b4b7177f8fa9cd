"""ETTR and lost time of a run in progress: the definition of `ettr.py`, updated event by event. Pure.

For a run in progress, time counts up to now, so that an outage shows while it lasts; for an ended one, up to its last
committed step, as in the report. Time more than `SETTLE_SECONDS` ago, before the onset of every open incident and of
every injected fault without an incident, is settled: it is summed once, and its events and losses are dropped. The
result differs from the report's only if a fault is detected later than `SETTLE_SECONDS` after its onset: the settled
part of its loss is missing.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import IncidentOpened, RunStarted
from rolecall.views.ettr import Cause, Loss, by_cause, losses, lost_seconds, training_began
from rolecall.views.incidents import CLOCK_SLACK_SECONDS, IncidentSummary, MatchedIncidents, summarize_incidents
from rolecall.views.injections import InjectedFault
from rolecall.views.lifetimes import incarnation_records

SETTLE_SECONDS = 600.0
"""Slow replicas are detected within minutes; panels, the slowest detectors, trigger no action and thus no loss."""
NUM_RETAINED_MAX = 50_000
"""Events kept for open incidents: hours of a run. Beyond it the oldest are dropped."""

_K = EventKind
RETAINED = frozenset(
    {_K.EPOCH_ADVANCED, _K.STEP_COMMITTED, _K.STEP_INTERRUPTED, _K.REQUESTS_REASSIGNED, _K.WEIGHTS_ADMITTED}
    | {_K.REPLICA_STARTING, _K.REPLICA_READY, _K.REPLICA_LOST, _K.REPLICA_STOPPED}
    | {_K.INCIDENT_OPENED, _K.INCIDENT_UPDATED, _K.PLAN_CREATED, _K.ACTION_STARTED, _K.ACTION_FAILED}
    | {_K.INCIDENT_VERIFIED, _K.INCIDENT_CLOSED}
)
"""Events from which the summary of an incident is computed."""


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
    """Owned by one reader, which passes every event once, in order.

    `num_rollouts`, `num_trainers`: 0 until the event `run_started`. `faults`: the known part of the injection log,
    oldest first; a loss then starts at the injection, and an undetected fault is a loss.
    """

    num_rollouts: int = 0
    num_trainers: int = 0
    faults: Sequence[InjectedFault] = ()
    settle_seconds: float = SETTLE_SECONDS
    _matched: set[InjectedFault] = field(default_factory=set)  # faults of closed incidents
    _began_at: float | None = None
    _committed_at: float | None = None
    _ended: bool = False
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=NUM_RETAINED_MAX))
    _open: dict[str, float] = field(default_factory=dict)  # incident -> onset
    _started: set[str] = field(default_factory=set)  # open incidents with an action: only these cause losses
    _losses: list[Loss] = field(default_factory=list)  # of closed incidents, not settled yet
    _settled_until: float = 0.0
    _settled: dict[Cause, float] = field(default_factory=dict)

    @property
    def has_open_incidents(self) -> bool:
        return bool(self._open)

    @property
    def is_losing(self) -> bool:
        """Whether work is being lost now, so that the account changes with time alone."""
        return bool(self._open) or len(self._matched) < len(self.faults)

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
        if event.kind not in RETAINED:
            return None
        self._events.append(event.slim())
        incident = event.incident_id or ""
        if isinstance(event.payload, IncidentOpened):
            self._settle(self._settled_by(event.wall_at))
            diagnosis = event.payload.diagnosis
            self._open[incident] = min(diagnosis.onset, diagnosis.detected_at, event.wall_at)
        elif event.kind is _K.ACTION_STARTED and incident in self._open:
            self._started.add(incident)
        elif event.kind is _K.INCIDENT_CLOSED and incident in self._open:
            joined, matched = self._summarized(incident)
            del self._open[incident]
            self._started.discard(incident)
            self._matched |= matched
            self._losses += losses(joined, event.wall_at)
            return next(iter(joined.stories), None)
        return None

    def account(self, now: float | None) -> EttrAccount | None:
        """`now`: wall seconds; None for an ended run. Returns None before training began."""
        if self._began_at is None:
            return None
        end = self._committed_at if (now is None or self._ended) and self._committed_at is not None else now
        if end is None:
            return None
        self._settle(min(end, self._settled_by(end if now is None else now)))
        lost = dict(self._settled)
        for cause, seconds in self._between(self._settled_until, end, [*self._losses, *self._open_losses(end)]).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
        return EttrAccount(start=self._began_at, end=end, lost=lost)

    def _open_losses(self, end: float) -> list[Loss]:
        """Losses of open incidents and undetected faults, until `end`."""
        found: list[Loss] = []
        detected = set(self._matched)
        for incident in sorted(self._open if self.faults else self._started):
            joined, matched = self._summarized(incident)
            found += losses(joined, end)
            detected |= matched
        missed = tuple(f for f in self.faults if f not in detected)
        return found + losses(MatchedIncidents(stories=(), missed=missed, false_alarms=()), end)

    def _summarized(self, incident: str) -> tuple[MatchedIncidents, set[InjectedFault]]:
        """The summary of one incident, and the injected faults matched to it; none if its events are incomplete."""
        since = self._open[incident] - CLOCK_SLACK_SECONDS
        events = [e for e in self._events if e.incident_id in (None, incident) and e.wall_at >= since]
        faults = [f for f in self.faults if f not in self._matched]
        with suppress(LookupError, TypeError, ValueError):
            joined = summarize_incidents(events, incarnation_records(events, {}), faults)
            return replace(joined, missed=()), {f for f in faults if f not in joined.missed}
        return MatchedIncidents(stories=(), missed=(), false_alarms=()), set()

    def _between(self, start: float, end: float, lost: Iterable[Loss]) -> dict[Cause, float]:
        return by_cause(lost_seconds(lost, start, end, num_rollouts=self.num_rollouts, num_trainers=self.num_trainers))

    def _settled_by(self, now: float) -> float:
        pending = (f.injected_at for f in self.faults if f not in self._matched)
        return min(now - self.settle_seconds, *self._open.values(), *pending, math.inf)

    def _settle(self, until: float) -> None:
        while self._events and self._events[0].wall_at < until:
            self._events.popleft()
        if until <= self._settled_until:
            return
        for cause, seconds in self._between(self._settled_until, until, self._losses).items():
            self._settled[cause] = self._settled.get(cause, 0.0) + seconds
        self._settled_until = until
        self._losses = [c for c in self._losses if c.until > until]
