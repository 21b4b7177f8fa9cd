"""What a person must know before acting: who acts, in which mode, whether it is paused, what runs where, what was said.

One `OperationsReader` a process. A journal that cannot be read now gives the last state, and the page's own notice says why.
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
"""A state younger than this serves all who ask."""
IDLE_FACTOR = 10.0
"""After a state that took a second to read (ten thousand incarnations take a fifth), so many pass until the next."""
NOBODY = FleetView(replicas=())


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Times are wall seconds. `mode` is empty when no watch has ever acted."""

    at: float
    mode: str = ""
    watch: str = ""  # who holds the lease; empty: nobody does
    paused: str | None = None
    stopping: str | None = None
    fleet: FleetView = field(default=NOBODY)
    nodes: tuple[str, ...] = ()  # that the run began with
    words: tuple[Event, ...] = ()


class OperationsReader:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words = CommandLog()
        self._last: State | None = None
        self._stale, self._due = False, 0.0

    def look(self, reader: Reader) -> State:
        """What the journal says now, or said when it could last be read."""
        with self._lock:
            now = reader.now()
            if self._stale or self._last is None or not self._last.at <= now < self._due:
                try:
                    with reader.journal() as journal:
                        self._last, self._stale = self._state(journal, now), False
                    took = max(0.0, reader.now() - now)
                    self._due = now + max(STATE_SECONDS, IDLE_FACTOR * took)
                except JournalError:
                    # The page says so above; what is known stays, and is looked at again at the next draw.
                    return self._last or State(at=now)
            return self._last

    def forget(self) -> None:
        """The next look reads again: something was just written."""
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
            words=self._words.read(journal),
        )


def newest_limits(reader: Reader, mode: str) -> WatchPolicy:
    """Raises JournalError."""
    with reader.journal() as journal:
        made = journal.last(EventKind.PLAN_CREATED)
    return limits_of(made.as_(PlanCreated).question if made else {}, mode)


def place_of(reader: Reader) -> RunLocation:
    """Where a person's word goes: the run, or no more than its journal."""
    settings = reader.settings
    return settings.run if settings.run is not None else JournalLocation(settings.journal_url)
