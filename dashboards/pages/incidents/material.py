"""All that one incident's page is made of, read from the journal at once: its own events, what the run did at that time,
the window that the diagnosis had read, and the injector's log where the run is on this machine.

What cannot be had is a sentence, and the page goes on with the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.rows import DamagedLine
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain
from rolecall.dashboards.pages.incidents.table import first_line
from rolecall.recovery.incident_store import WINDOW_NAME, IncidentProjection
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.incidents.projection import INCIDENT_KINDS
from rolecall.views.injections import InjectedFault, parse_injections
from rolecall.views.lifetimes import IncarnationRecord, Key, incarnation_records

EVENTS_MAX = 20_000
"""Events of one incident that are read."""
AROUND_MAX = 20_000
"""Events of the run that are read beside them."""
LINES_BEFORE = 2_000
"""So many lines of the journal before the incident's first are looked at: the fault stands before the finding."""
BEFORE_SECONDS, AFTER_SECONDS = 120.0, 60.0
"""What the run did so long before the onset and after the incident's last event is part of its story."""

K = EventKind
CHUNK_LINES = 1_000
RUN_KINDS = (
    K.RUN_STARTED,
    K.RUN_ENDED,
    K.REPLICA_STARTING,
    K.REPLICA_READY,
    K.REPLICA_LOST,
    K.REPLICA_STOPPED,
    K.EPOCH_ADVANCED,
    K.STEP_COMMITTED,
    K.STEP_INTERRUPTED,
    K.WEIGHTS_ADMITTED,
    K.WEIGHTS_REJECTED,
    K.REQUESTS_REASSIGNED,
    K.RECOVERY_PAUSED,
    K.RECOVERY_RESUMED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPageInputs:
    incident_id: str
    now: float
    incident: Incident | None
    """None: nothing of it can be read."""
    set_aside: str
    """Why nothing more is done for it; empty: it is whole."""
    others: tuple[Incident, ...]
    events: tuple[Event, ...]
    """Its own, oldest first."""
    around: tuple[Event, ...]
    """Everything of that time, its own events among it, oldest first."""
    known: Mapping[Key, IncarnationRecord]
    window: Mapping[str, Any] | None
    faults: tuple[InjectedFault, ...]
    missing: tuple[str, ...]
    """What could not be had, each with its reason."""

    @property
    def is_open(self) -> bool:
        return self.incident is not None and self.incident.closed_at is None and not self.set_aside

    @property
    def newest_seq(self) -> int:
        return self.events[-1].seq if self.events else 0


def read(
    journal: Journal,
    book: IncidentProjection,
    incident_id: str,
    run: RunDir | None,
    now: float,
    window: Mapping[str, Any] | None = None,
) -> IncidentPageInputs:
    """`window`: as it was read before; the first one that is stored stays. Raises JournalError: the journal cannot be read
    at all."""
    incident = book.incidents.get(incident_id)
    missing: list[str] = []
    damaged: list[DamagedLine] = []
    events = journal.events(incident_id=incident_id, limit=EVENTS_MAX, damaged=damaged)
    if len(events) == EVENTS_MAX:
        missing.append(f"its events after the first {EVENTS_MAX}")
    faults = _faults(run, missing)
    around = _around(journal, incident, events, damaged, missing, others=bool(faults))
    missing += [plain(str(line.error)) for line in damaged[:5]]
    return IncidentPageInputs(
        incident_id=incident_id,
        now=now,
        incident=incident,
        set_aside=first_line(book.broken[incident_id]) if incident_id in book.broken else "",
        others=tuple(i for i in list(book.incidents.values()) if i.incident_id != incident_id),
        events=tuple(events),
        around=tuple(around),
        known=_lives(journal, around, missing),
        window=window if window is not None else _window(journal, incident_id, missing),
        faults=_of_that_time(faults, around),
        missing=tuple(missing),
    )


def _around(
    journal: Journal,
    incident: Incident | None,
    events: list[Event],
    damaged: list[DamagedLine],
    missing: list[str],
    *,
    others: bool,
) -> list[Event]:
    """`others`: with the events of other incidents, among whom faults that were injected are shared out."""
    if not events:
        return []
    begin = min(incident.diagnosis.onset if incident else events[0].wall_at, events[0].wall_at) - BEFORE_SECONDS
    is_open = incident is not None and incident.closed_at is None
    end = float("inf") if is_open else max(e.wall_at for e in events) + AFTER_SECONDS
    kinds = (*INCIDENT_KINDS, *RUN_KINDS) if others else RUN_KINDS
    after, num_read = max(0, events[0].seq - LINES_BEFORE), 0
    there: list[DamagedLine] = []
    kept: dict[int, Event] = {}
    while True:
        chunk = journal.events(after=after, kinds=kinds, limit=CHUNK_LINES, damaged=there)
        kept |= {e.seq: e for e in chunk if begin <= e.wall_at <= end}
        num_read += len(chunk)
        if not chunk or len(chunk) < CHUNK_LINES - len(there) or chunk[-1].wall_at > end:
            break
        if num_read >= AROUND_MAX:
            missing.append(f"what the run did after the first {AROUND_MAX} events from there on")
            break
        after = chunk[-1].seq
    have = {line.seq for line in damaged}
    damaged += [line for line in there if line.seq not in have]
    kept |= {e.seq: e for e in events}
    return [kept[seq] for seq in sorted(kept)]


def _lives(journal: Journal, around: list[Event], missing: list[str]) -> Mapping[Key, IncarnationRecord]:
    try:
        return incarnation_records(around, journal.actual())
    except (JournalCorrupt, KeyError, TypeError, ValueError) as e:
        missing.append(f"which process stood for which replica: {plain(e)}")
        return {}


def _window(journal: Journal, incident_id: str, missing: list[str]) -> Mapping[str, Any] | None:
    try:
        window = journal.windows(incident_id).get(WINDOW_NAME)
    except JournalCorrupt as e:
        missing.append(plain(e))
        return None
    if window is not None and not isinstance(window, Mapping):
        missing.append(f"the window of {plain(incident_id)}: it is {type(window).__name__}, not a mapping")
        return None
    return window


def _faults(run: RunDir | None, missing: list[str]) -> list[InjectedFault]:
    """All of the injector's log."""
    if run is None:
        return []
    try:
        return parse_injections(run.injections_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as e:
        missing.append(f"the injector's log: {plain(e)}")
        return []


def _of_that_time(faults: list[InjectedFault], around: list[Event]) -> tuple[InjectedFault, ...]:
    if not around:
        return ()
    begin, end = around[0].wall_at, around[-1].wall_at
    return tuple(f for f in faults if begin <= f.injected_at <= end and not f.of_helper)
