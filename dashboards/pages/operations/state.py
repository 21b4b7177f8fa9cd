"""State for the Operations page: lease holder, mode, pause, placement, command events.

One `OperationsReader` per process. While the journal cannot be read it returns the last state; the page shows why.
"""

import threading
from dataclasses import dataclass, field

from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import LeaseAcquired, PlanCreated, RunStarted
from rolecall.dashboards.data.reader import Reader
from rolecall.dashboards.pages.operations.history import CommandLog
from rolecall.dashboards.pages.operations.preview import WatchPolicy, limits_of
from rolecall.recovery.actuators.ray_runtime import STOP_FLAG
from rolecall.recovery.fleet import FleetView, fleet_view
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.operators.run_location import JournalLocation, RunLocation

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
        self._commands = CommandLog()
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
        return State(
            at=now,
            mode=taken.as_(LeaseAcquired).mode if taken else "",
            watch=lease.holder if lease is not None and held else "",
            paused=journal.flag(PAUSED_FLAG),
            stopping=journal.flag(STOP_FLAG),
            fleet=fleet_view(journal.desired(), journal.current()),
            nodes=started.as_(RunStarted).nodes if started else (),
            events=self._commands.read(journal),
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
