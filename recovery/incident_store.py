"""The book of incidents: the journal's recovery events, read on from where the last look ended and folded.

It can be thrown away at any time and read again. An incident whose events do not fit or cannot be read (a foreign writer,
a damaged line, a bug) is set aside with its story, and does not stop the others.
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
from rolecall.recovery.intake import incident_name, storable

logger = logging.getLogger(__name__)

READ_KINDS = (*INCIDENT_KINDS, EventKind.RUN_ENDED)
TELLS_PERSON = frozenset({EventKind.ONCALL_PAGED, EventKind.PLAN_PROPOSED, EventKind.INCIDENT_CLOSED})
WINDOW_NAME = "observations"
"""What the detectors had read when an incident was opened, among the journal's windows of that incident."""
NUMBER_TRIES_MAX = 20
"""How often a new incident looks for a free number: others may open one at the same moment, not that many."""


class IncidentProjection:
    """Owned by one loop."""

    def __init__(self) -> None:
        self.incidents: dict[str, Incident] = {}
        self.broken: dict[str, Exception] = {}  # incident, or where no incident is known the journal's line
        self.to_tell: list[Event] = []
        self.num_opened = 0
        self.ended: str | None = None
        self._seen_seq = 0

    def refresh(self, journal: Journal) -> None:
        """Takes in what was written since the last look."""
        damaged: list[DamagedLine] = []
        self.take(journal.events(after=self._seen_seq, kinds=READ_KINDS, damaged=damaged), damaged)

    def take(self, events: Sequence[Event], damaged: Sequence[DamagedLine]) -> None:
        """Takes in what somebody else has read: events of `READ_KINDS`, and lines that could not be read."""
        lines: list[Event | DamagedLine] = [*events, *damaged]
        for line in sorted(lines, key=lambda line: line.seq):
            self._seen_seq = line.seq
            if isinstance(line, DamagedLine):
                self._set_aside(line.incident_id or f"journal line {line.seq}", line.error)
            else:
                self._take(line)

    def _take(self, event: Event) -> None:
        if isinstance(event.payload, RunEnded):
            self.ended = event.payload.because or event.payload.outcome or "it is over"
        if event.kind is EventKind.INCIDENT_OPENED:
            self.num_opened += 1
        if event.kind in TELLS_PERSON:
            self.to_tell.append(event)
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
            # Nothing more is done for it; what it did still counts, and its diagnosis opens no second one.
            self.incidents[name] = replace(before, state=IncidentState.CLOSED)

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents.values() if i.state is not IncidentState.CLOSED]


def open_incident(
    journal: Journal, book: IncidentProjection, diagnosis: Diagnosis, *, lease: Lease | None = None
) -> str:
    """Writes INCIDENT_OPENED under the next free number and returns the incident's id.

    The number is the event's key, so two writers never share one, and a writer that died in between comes to the same.

    Raises:
        Fenced: `lease` is over.
        JournalError: no number was free.
    """
    d = storable(diagnosis)
    book.refresh(journal)
    for number in range(book.num_opened + 1, book.num_opened + 1 + NUMBER_TRIES_MAX):
        name = incident_name(number, d)
        opened = IncidentOpened(diagnosis=d, window=WINDOW_NAME)
        try:
            event = journal.append(opened, incident_id=name, key=f"incident:{number}", lease=lease)
        except JournalCorrupt:
            continue  # a line that cannot be read has this number
        if event.incident_id == name:
            book.refresh(journal)
            return name
    raise JournalError(f"no free number for an incident after {NUMBER_TRIES_MAX} tries")
