"""Inputs of an incident's page, read from the journal at once: its events, the run's events at that time, the telemetry
window of the diagnosis, and the injection log if the run is on this machine.

Missing inputs are listed with a reason, and the page shows the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads.run import ReplicaReady, StepCommitted
from rolecall.core.journal.rows import DamagedLine
from rolecall.core.journal.run_end import recorded_end
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain
from rolecall.dashboards.data.reader import injected_faults
from rolecall.dashboards.pages.incidents.table import first_line
from rolecall.recovery.incidents import INCIDENT_KINDS, WINDOW_NAME, Incident
from rolecall.recovery.projection import IncidentProjection
from rolecall.views.incidents import AwayReplicas, InjectedFault
from rolecall.views.journal_reader import JournalReader
from rolecall.views.lifetimes import IncarnationRecord, Key, incarnation_records

EVENTS_MAX = 20_000
"""Events read per incident."""
AROUND_MAX = 20_000
"""Events of the run read in addition."""
LINES_BEFORE = 2_000
"""Events of the journal searched before the incident's first: the fault precedes its detection."""
BEFORE_SECONDS, AFTER_SECONDS = 120.0, 60.0
"""Time before the onset and after the incident's last event that is shown."""

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
    """Of an incident that is open when its run ends: that moment, after which it takes and costs no time."""
    incident: Incident | None
    """None: it cannot be read."""
    set_aside: str
    """Why it is not handled further; empty: it is handled."""
    others: tuple[Incident, ...]
    events: tuple[Event, ...]
    """Its own events, oldest first."""
    around: tuple[Event, ...]
    """All relevant events of that time including its own, oldest first."""
    known: Mapping[Key, IncarnationRecord]
    window: Mapping[str, Any] | None
    faults: tuple[InjectedFault, ...]
    missing: tuple[str, ...]
    """Missing inputs, each with its reason."""
    mode: str = ""
    """Of the watch."""
    ended_at: float | None = None
    """The end of the run."""
    steps_undone: Mapping[int, float] = field(default_factory=dict)
    """Optimizer step -> wall time at which it was last undone, from the ledger."""

    @property
    def is_open(self) -> bool:
        return self.incident is not None and self.incident.closed_at is None and not self.set_aside


def read(
    journal: Journal,
    projection: IncidentProjection,
    incident_id: str,
    run: RunDir | None,
    now: float,
    window: Mapping[str, Any] | None = None,
    mode_of: Callable[[Incident], str] = lambda _: "",
) -> IncidentPageInputs:
    """`window`: if already read; a stored window never changes. `mode_of`: mode of the watch. Raises JournalError: the
    journal is not readable."""
    incident = projection.incidents.get(incident_id)
    missing: list[str] = []
    damaged: list[DamagedLine] = []
    events = journal.events(incident_id=incident_id, limit=EVENTS_MAX, damaged=damaged)
    if len(events) == EVENTS_MAX:
        missing.append(f"events after the first {EVENTS_MAX}")
    faults, error = injected_faults(run)
    if error:
        missing.append(f"the injection log: {plain(error)}")
    around = _around(journal, incident, events, damaged, missing, others=bool(faults))
    around += [e for e in _ends_of_loans(journal, events) if e.seq not in {x.seq for x in around}]
    end = recorded_end(journal)
    is_open = incident is not None and incident.closed_at is None
    missing += [plain(str(line.error)) for line in damaged[:5]]
    return IncidentPageInputs(
        incident_id=incident_id,
        now=min(now, end.wall_at) if end is not None and is_open else now,
        incident=incident,
        set_aside=first_line(projection.broken[incident_id]) if incident_id in projection.broken else "",
        others=tuple(i for i in list(projection.incidents.values()) if i.incident_id != incident_id),
        events=tuple(events),
        around=tuple(around),
        known=_lives(journal, projection, around, missing),
        window=window if window is not None else _window(journal, incident_id, missing),
        faults=_of_that_time(faults, around),
        missing=tuple(missing),
        mode=mode_of(incident) if incident is not None else "",
        ended_at=None if end is None else end.wall_at,
        steps_undone=_steps_undone(journal, incident, around),
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
    """`others`: include events of other incidents, needed to match injected faults to incidents."""
    if not events:
        return []
    begin = min(incident.diagnosis.onset if incident else events[0].wall_at, events[0].wall_at) - BEFORE_SECONDS
    is_open = incident is not None and incident.closed_at is None
    end = float("inf") if is_open else max(e.wall_at for e in events) + AFTER_SECONDS
    kinds = (*INCIDENT_KINDS, *RUN_KINDS) if others else RUN_KINDS
    reader, num_read = JournalReader(kinds=kinds, page_events=CHUNK_LINES), 0
    reader.seq = max(0, events[0].seq - LINES_BEFORE)
    kept = {e.seq: e for e in events}
    have = {line.seq for line in damaged}
    for page in reader.pages(journal):
        kept |= {e.seq: e for e in page.events if begin <= e.wall_at <= end}
        damaged += [line for line in page.damaged if line.seq not in have]
        num_read += len(page.events)
        if page.events and page.events[-1].wall_at > end:
            break
        if num_read >= AROUND_MAX and not reader.at_end:
            missing.append(f"events of the run after the first {AROUND_MAX}")
            break
    return [kept[seq] for seq in sorted(kept)]


def _steps_undone(journal: Journal, incident: Incident | None, around: list[Event]) -> Mapping[int, float]:
    """Of a long ledger only what follows the first commit of that time."""
    first = next((e for e in around if e.kind is K.STEP_COMMITTED), None)
    before = first is not None and incident is not None and first.wall_at <= incident.first_diagnosis.onset
    return Ledger(journal.store).undone_steps(first.as_(StepCommitted).ledger.position if first and before else 0)


def _ends_of_loans(journal: Journal, own: list[Event]) -> list[Event]:
    """When the rollouts that lent their nodes served again, however late. Looked up after each of their starts, because
    rollouts prove their weights at every step."""
    lenders, found = AwayReplicas(), list[Event]()
    for event in own:
        lenders.take(event)
    if not lenders.open:
        return []
    for start in journal.events(after=own[0].seq, kinds=(K.REPLICA_READY,), limit=AROUND_MAX, damaged=[]):
        said = start.as_(ReplicaReady)
        lent = lenders.open.get(said.replica)
        if lent is not None and said.incarnation > lent.incarnation:
            proofs = journal.events(after=start.seq, kinds=(K.WEIGHTS_ADMITTED,), limit=CHUNK_LINES, damaged=[])
            found += [e for e in proofs if lenders.take(e)]
    return found


def _lives(
    journal: Journal, projection: IncidentProjection, around: list[Event], missing: list[str]
) -> Mapping[Key, IncarnationRecord]:
    """The newest incarnation of each replica, and all of those that the incidents of that time replaced. A long run of
    many replicas has ten times as many."""
    near = {e.incident_id for e in around}
    attempts = [a for name in near if name in projection.incidents for a in projection.incidents[name].attempts]
    replaced = {target.replica for attempt in attempts for target in attempt.plan.targets}
    try:
        newest = {(a.replica, a.incarnation): a for a in journal.current().values()}
        return incarnation_records(around, newest | journal.actual(replaced))
    except (JournalCorrupt, KeyError, TypeError, ValueError) as e:
        missing.append(f"which process ran which replica: {plain(e)}")
        return {}


def _window(journal: Journal, incident_id: str, missing: list[str]) -> Mapping[str, Any] | None:
    try:
        window = journal.windows(incident_id).get(WINDOW_NAME)
    except JournalCorrupt as e:
        missing.append(plain(e))
        return None
    if window is not None and not isinstance(window, Mapping):
        missing.append(f"the telemetry window of {plain(incident_id)}: {type(window).__name__} instead of a mapping")
        return None
    return window


def _of_that_time(faults: list[InjectedFault], around: list[Event]) -> tuple[InjectedFault, ...]:
    if not around:
        return ()
    begin, end = around[0].wall_at, around[-1].wall_at
    return tuple(f for f in faults if begin <= f.injected_at <= end and not f.of_helper)
