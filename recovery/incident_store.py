"""All incidents of a journal, updated incrementally from its events.

It can be discarded and rebuilt at any time. An incident whose events are invalid or unreadable (a foreign writer, a
damaged line, a bug) is set aside with its history and does not affect the others.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.errors import InvalidTransition, JournalCorrupt, JournalError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads import IncidentOpened, RunEnded
from rolecall.core.journal.rows import DamagedLine
from rolecall.recovery.incidents.incident import Incident, IncidentState
from rolecall.recovery.incidents.projection import INCIDENT_KINDS, apply
from rolecall.recovery.triage import incident_name, storable

logger = logging.getLogger(__name__)

READ_KINDS = (*INCIDENT_KINDS, EventKind.RUN_ENDED)
NOTIFIED_KINDS = frozenset({EventKind.ONCALL_PAGED, EventKind.PLAN_PROPOSED, EventKind.INCIDENT_CLOSED})
WINDOW_NAME = "observations"
"""Journal window with what the detectors had read when the incident was opened."""
NUMBER_TRIES_MAX = 20
"""Numbers tried for a new incident: others may be opened at the same moment, but not that many."""


class IncidentProjection:
    """Owned by one loop."""

    def __init__(self) -> None:
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
        """Applies events of `READ_KINDS` and unreadable lines that the caller has read."""
        lines: list[Event | DamagedLine] = [*events, *damaged]
        for line in sorted(lines, key=lambda line: line.seq):
            self._seen_seq = line.seq
            if isinstance(line, DamagedLine):
                self._set_aside(line.incident_id or f"journal line {line.seq}", line.error)
            else:
                self._take(line)

    def _take(self, event: Event) -> None:
        if isinstance(event.payload, RunEnded):
            self.ended = event.payload.because or event.payload.outcome or "ended"
        if event.kind is EventKind.INCIDENT_OPENED:
            self.num_opened += 1
        if event.kind in NOTIFIED_KINDS:
            self.to_notify.append(event)
        name = event.incident_id
        if name is None or event.kind is EventKind.RUN_ENDED or name in self.broken:
            return
        try:
            self.incidents[name] = apply(self.incidents.get(name), event)
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


def open_incident(
    journal: Journal, projection: IncidentProjection, diagnosis: Diagnosis, *, lease: Lease | None = None
) -> str:
    """Writes INCIDENT_OPENED under the next free number and returns the incident's id.

    The number is part of the event's key, so two writers never share one, and a repetition after a crash finds its own.

    Raises:
        LeaseFenced: `lease` is over.
        JournalError: no number was free.
    """
    d = storable(diagnosis)
    projection.refresh(journal)
    for number in range(projection.num_opened + 1, projection.num_opened + 1 + NUMBER_TRIES_MAX):
        name = incident_name(number, d)
        opened = IncidentOpened(diagnosis=d, window=WINDOW_NAME)
        try:
            event = journal.append(opened, incident_id=name, key=f"incident:{number}", lease=lease)
        except JournalCorrupt:
            continue  # an unreadable line has this number
        if event.incident_id == name:
            projection.refresh(journal)
            return name
    raise JournalError(f"no free number for an incident after {NUMBER_TRIES_MAX} tries")
