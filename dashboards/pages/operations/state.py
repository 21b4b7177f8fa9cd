"""State for the Operations page: lease holder, mode, pause, placement, and the operator commands so far, from the
journal's events that carry a user name.

One `OperationsReader` per process. While the journal cannot be read it returns the last state; the page shows why.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import DiagnosisReviewed, LeaseAcquired, PlanCreated, RunStarted
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.operations.plans import WatchPolicy, limits_of
from rolecall.recovery.actuators import STOP_FLAG
from rolecall.recovery.fleet_view import FleetView, fleet_view
from rolecall.recovery.incidents import Incident
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.operators.run_location import JournalLocation, RunLocation
from rolecall.views.journal_reader import JournalReader

STATE_SECONDS = 1.0
"""A state younger than this is reused for all sessions."""
IDLE_FACTOR = 10.0
"""Seconds between two reads per second that a read takes (0.2 s for ten thousand incarnations)."""
EMPTY_FLEET = FleetView(replicas=())


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Times are wall seconds. `mode` is empty when no watch has ever acted."""

    at: float
    mode: str = ""
    watch: str = ""  # lease holder; empty: none
    paused: str | None = None
    stopping: str | None = None
    fleet: FleetView = field(default=EMPTY_FLEET)
    nodes: tuple[str, ...] = ()  # nodes at the start of the run
    events: tuple[Event, ...] = ()  # operator commands


class OperationsReader:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands = JournalReader(tuple(LABELS))
        self._events: tuple[Event, ...] = ()
        self._last: State | None = None
        self._stale, self._due = False, 0.0

    def latest(self, reader: Reader) -> State:
        """The current state, or the last one that could be read."""
        with self._lock:
            now = reader.now()
            if self._stale or self._last is None or not self._last.at <= now < self._due:
                try:
                    with reader.journal() as journal:
                        self._last, self._stale = self._state(journal, now), False
                    took = max(0.0, reader.now() - now)
                    self._due = now + max(STATE_SECONDS, IDLE_FACTOR * took)
                except JournalError:
                    # The page shows the error; retry at the next refresh.
                    return self._last or State(at=now)
            return self._last

    def invalidate(self) -> None:
        """Forces a read at the next call, because something was just written."""
        self._stale = True

    def _state(self, journal: Journal, now: float) -> State:
        lease, taken = journal.lease(LEASE_NAME), journal.last(EventKind.LEASE_ACQUIRED)
        started = journal.last(EventKind.RUN_STARTED)
        held = lease is not None and lease.holder and lease.expires_at > now
        for page in self._commands.pages(journal):
            self._events += tuple(page.events)
        return State(
            at=now,
            mode=taken.as_(LeaseAcquired).mode if taken else "",
            watch=lease.holder if lease is not None and held else "",
            paused=journal.flag(PAUSED_FLAG),
            stopping=journal.flag(STOP_FLAG),
            fleet=fleet_view(journal.desired(), journal.current()),
            nodes=started.as_(RunStarted).nodes if started else (),
            events=self._events,
        )


def newest_limits(reader: Reader, mode: str) -> WatchPolicy:
    """Raises JournalError."""
    with reader.journal() as journal:
        made = journal.last(EventKind.PLAN_CREATED)
    return limits_of(made.as_(PlanCreated).question if made else {}, mode)


def place_of(reader: Reader) -> RunLocation:
    """Where operator commands go: the run directory, or only its journal."""
    settings = reader.settings
    return settings.run if settings.run is not None else JournalLocation(settings.journal_url)


# --- history of commands ----------------------------------------------------------------------------------------------

K = EventKind
LABELS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved a plan",
    K.PLAN_REJECTED: "rejected a plan",
    K.HOLD_PLACED: "put a plan on hold",
    K.HOLD_LIFTED: "lifted a hold",
    K.DIAGNOSIS_REVIEWED: "reviewed a diagnosis",
    K.RECOVERY_PAUSED: "paused recovery",
    K.RECOVERY_RESUMED: "resumed recovery",
    K.NODE_QUARANTINED: "quarantined a node",
    K.NODE_RETURNED_TO_SERVICE: "returned a node to service",
    K.NODE_DRAINED: "drained a node",
    K.BURN_IN_FINISHED: "ran a burn-in",
}
"""What each operator command is called; these events are the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLogEntry:
    """One line of the history."""

    at: float
    by: str
    what: str
    on: str
    because: str


def history(events: Iterable[Event], incidents: Iterable[Incident]) -> tuple[CommandLogEntry, ...]:
    """Command history, newest first. A replacement that an operator requested is listed with its incident."""
    entries = [_entry(e) for e in events]
    entries += [
        CommandLogEntry(
            at=incident.opened_at,
            # The text of a request starts with the user's name.
            by=incident.diagnosis.because.partition(" requested replacement of ")[0]
            if " requested replacement of " in incident.diagnosis.because
            else "",
            what="requested a replacement",
            on=", ".join(
                [*(f"{s.replica}#{s.incarnation}" for s in incident.diagnosis.suspects), incident.incident_id]
            ),
            because=incident.diagnosis.because,
        )
        for incident in incidents
        if incident.requested_by_operator
    ]
    return tuple(sorted(entries, key=lambda d: d.at, reverse=True))


def _entry(event: Event) -> CommandLogEntry:
    payload = event.payload
    verdict = f" as {payload.verdict}" if isinstance(payload, DiagnosisReviewed) else ""
    on = [getattr(payload, "node", ""), getattr(payload, "digest", ""), event.incident_id or ""]
    return CommandLogEntry(
        at=event.wall_at,
        by=str(getattr(payload, "by", "")),
        what=LABELS[event.kind] + verdict,
        on=", ".join(filter(None, on)) or "the run",
        because=payload.reason,
    )
