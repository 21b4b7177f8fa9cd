"""All incidents of a journal: the projection that folds their events, and the opening of a new one."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.clock import SteadyTime
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import InvalidTransition, JournalCorrupt, JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import HoldPlaced, IncidentOpened, PlanProposed
from rolecall.core.journal.payloads.run import ComponentRestarted, RunEnded
from rolecall.core.journal.rows import DamagedLine
from rolecall.recovery.incidents import INCIDENT_KINDS, LEGAL, WINDOW_NAME, Incident, IncidentState, apply, storable

logger = logging.getLogger(__name__)

NUMBER_TRIES_MAX = 20
"""Numbers tried for a new incident: others may be opened at the same moment, but not that many."""

READ_KINDS = (*INCIDENT_KINDS, EventKind.RUN_ENDED, EventKind.COMPONENT_RESTARTED)
PROPOSAL_ENDS = frozenset({EventKind.PLAN_APPROVED, EventKind.PLAN_REJECTED, EventKind.PLAN_EXPIRED})
NOTIFIED_KINDS = PROPOSAL_ENDS | {EventKind.ONCALL_PAGED, EventKind.PLAN_PROPOSED, EventKind.INCIDENT_CLOSED}


class IncidentProjection:
    """All incidents of a journal, updated incrementally from its events. Owned by one loop.

    It can be discarded and rebuilt at any time. An incident whose events are invalid or unreadable (a foreign writer, a
    damaged line, a bug) is set aside with its history and does not affect the others.

    Times are those of the writers' wall clocks. A loop that acts on them gives its own `time`: then no event is older
    than the line before it, nor than the last read, nor newer than now.
    """

    def __init__(self, time: SteadyTime | None = None) -> None:
        self._time, self._read_at = time, -math.inf
        self.incidents: dict[str, Incident] = {}
        self.broken: dict[str, Exception] = {}  # incident id, or the journal line where the incident is unknown
        self.to_notify: list[Event] = []
        self.num_opened = 0
        self.ended: str | None = None
        self._seen_seq = 0

    def refresh(self, journal: Journal) -> None:
        """Applies what was written since the last refresh."""
        damaged: list[DamagedLine] = []
        self.take(journal.events(after=self._seen_seq, kinds=READ_KINDS, damaged=damaged), damaged)

    def take(self, events: Sequence[Event], damaged: Sequence[DamagedLine]) -> None:
        """Applies events and unreadable lines that the caller has read; kinds not in `READ_KINDS` are skipped."""
        lines: list[Event | DamagedLine] = [*events, *damaged]
        times = self._times(events)
        for line in sorted(lines, key=lambda line: line.seq):
            self._seen_seq = line.seq
            if isinstance(line, DamagedLine):
                self._set_aside(line.incident_id or f"journal line {line.seq}", line.error)
            else:
                self._take(line, times.get(line.seq, line.wall_at))

    def _times(self, events: Sequence[Event]) -> dict[int, float]:
        """Line -> when it was written, in the order of lines."""
        if self._time is None:
            return {}
        now, at = self._time.now(), self._read_at
        times = {e.seq: (at := min(max(at, e.wall_at), now)) for e in events}
        self._read_at = now
        return times

    def follow(self) -> None:
        """Follows the wall clock where it was set."""
        seconds = self._time.follow() if self._time is not None else 0.0
        if seconds:
            self._read_at += seconds
            self.incidents = {name: i.moved(seconds) for name, i in self.incidents.items()}

    def _take(self, event: Event, at: float) -> None:
        if isinstance(event.payload, RunEnded):
            self.ended = event.payload.because or event.payload.outcome or "ended"
        elif isinstance(event.payload, ComponentRestarted) and event.payload.continues_run:
            self.ended = None
        if event.kind is EventKind.INCIDENT_OPENED:
            self.num_opened += 1
        if event.kind in NOTIFIED_KINDS:
            self.to_notify.append(event)
        name = event.incident_id
        if name is None or event.kind not in LEGAL or name in self.broken:
            return
        try:
            self.incidents[name] = apply(self.incidents.get(name), _written(event, at))
        except InvalidTransition as e:
            self._set_aside(name, e)
        except Exception as e:  # noqa: BLE001
            # Deliberate: a value that this version does not know (an outcome, a failure) concerns this incident alone.
            self._set_aside(name, JournalError(f"{name}: {event.event_id} {event.kind} cannot be read: {e!r}"))

    def _set_aside(self, name: str, error: Exception) -> None:
        if name in self.broken:
            return
        logger.error("%s", error)
        self.broken[name] = error
        before = self.incidents.get(name)
        if before is not None:
            # No further action for it; its evictions still count, and its diagnosis opens no second incident.
            self.incidents[name] = replace(before, state=IncidentState.CLOSED)

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents.values() if i.state is not IncidentState.CLOSED]


def _written(event: Event, at: float) -> Event:
    """The event as if `at` was the time on its writer's clock."""
    seconds, payload = at - event.wall_at, event.payload
    if not seconds:
        return event
    if isinstance(payload, PlanProposed):
        payload = replace(payload, expires_at=payload.expires_at + seconds)
    elif isinstance(payload, HoldPlaced):
        payload = replace(payload, until=payload.until + seconds)
    return replace(event, wall_at=at, payload=payload)


def open_incident(
    journal: Journal, projection: IncidentProjection, diagnosis: Diagnosis, *, lease: Lease | None = None
) -> str:
    """Writes INCIDENT_OPENED under the next free number and returns the incident's id.

    The number is part of the event's key, so two writers never share one, and a repetition after a crash finds its own.

    Raises LeaseFenced: `lease` is over; JournalError: no number was free.
    """
    stored = storable(diagnosis)
    projection.refresh(journal)
    for number in range(projection.num_opened + 1, projection.num_opened + 1 + NUMBER_TRIES_MAX):
        # `inc-3-rollout-1`; `inc-3-node-2` if only a node is known; `inc-3-job` if several suspects or none.
        suspects = {s.replica or str(s.node) for s in stored.suspects}
        suspect = suspects.pop() if len(suspects) == 1 else "job"
        name = f"inc-{number}-{suspect.replace('/', '-')}"[:63]
        opened = IncidentOpened(diagnosis=stored, window=WINDOW_NAME)
        try:
            event = journal.append(opened, incident_id=name, key=f"incident:{number}", lease=lease)
        except JournalCorrupt:
            continue  # an unreadable line has this number
        if event.incident_id == name:
            projection.refresh(journal)
            return name
    raise JournalError(f"no free number for an incident after {NUMBER_TRIES_MAX} tries")
