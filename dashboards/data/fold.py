"""Projections of a journal for the dashboard, and reading a long journal from its end.

A `Fold` that starts at the first event is complete. One that starts near the end (`newest`) has the open incidents, the
newest incidents and the newest steps; a complete one replaces it once that has caught up.
"""

from collections.abc import Mapping, Sequence
from copy import copy

import sqlalchemy as sa

from rolecall.core.errors import JournalCorrupt
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import LeaseAcquired, NodeQuarantined, NodeReturnedToService
from rolecall.core.journal.rows import DamagedLine, actual_of, event_of
from rolecall.core.journal.tables import METADATA
from rolecall.core.membership import Actual, Desired
from rolecall.dashboards.data.progress import RunTrendsProjection
from rolecall.recovery.incident_store import READ_KINDS, IncidentProjection
from rolecall.views.snapshot import RunSnapshotProjection

CHUNK_EVENTS = 500
"""Events per chunk: about 30 ms, the longest that pages wait for the interpreter."""
NEWEST_INCIDENTS = 100
"""Incidents of a long journal that are read first, in addition to the open ones."""
OPEN_MAX = 500
"""Open incidents that are read first."""
NEWEST_STEPS = 400

_K = EventKind
_INCIDENT_KINDS = frozenset(READ_KINDS)
_FIRST_AND_LAST = (_K.RUN_STARTED, _K.RUN_ENDED, _K.LEASE_ACQUIRED)


def _table(name: str) -> sa.Table:
    return METADATA.tables[name]


class Fold:
    """Owned by one thread."""

    def __init__(self, *, partial: bool = False) -> None:
        self.run, self.projection, self.trends = RunSnapshotProjection(), IncidentProjection(), RunTrendsProjection()
        self.damaged: list[DamagedLine] = []
        self.quarantined: set[str] = set()
        self.mode = ""
        self.seq, self.hash = 0, ""
        self._partial = partial

    def take(self, events: Sequence[Event], damaged: Sequence[DamagedLine] = ()) -> None:
        """Applies the next events of the journal."""
        if self._partial:
            known = self.projection.incidents
            ours = {e.incident_id for e in events if e.kind is _K.INCIDENT_OPENED}
            kept = [e for e in events if not e.incident_id or e.incident_id in known or e.incident_id in ours]
        else:
            kept = list(events)
        misread = [line for event in kept if (line := self._misread(event)) is not None]
        self.projection.take([e for e in kept if e.kind in _INCIDENT_KINDS], damaged)
        self.projection.to_notify.clear()  # the dashboard sends no notifications
        self.damaged += sorted([*damaged, *misread], key=lambda line: line.seq)
        for event in kept:
            match event.payload:
                case NodeQuarantined(node=node):
                    self.quarantined.add(node)
                case NodeReturnedToService(node=node):
                    self.quarantined.discard(node)
                case LeaseAcquired(mode=mode):
                    self.mode = mode
        if events and events[-1].seq > self.seq:
            self.seq, self.hash = events[-1].seq, events[-1].hash
        self.seq = max([self.seq, *(line.seq for line in damaged)])

    def _misread(self, event: Event) -> DamagedLine | None:
        """Applies an event to all but the incident projection; a malformed event becomes a damaged line."""
        try:
            self.run.read([event])
            self.trends.take(event)
        except Exception as e:  # noqa: BLE001 - one malformed event must not hide the others
            error = JournalCorrupt(where=f"events line {event.seq}", reason=f"{event.kind} cannot be read: {e!r}"[:200])
            return DamagedLine(seq=event.seq, incident_id=event.incident_id, error=error)
        return None

    def copied_projection(self) -> IncidentProjection:
        """A copy of the incident projection for other threads."""
        copied = copy(self.projection)
        copied.incidents, copied.broken, copied.to_notify = dict(copied.incidents), dict(copied.broken), []
        return copied


def events_after(
    journal: Journal, seq: int, limit: int, *, wants_admissions: bool
) -> tuple[list[Event], list[DamagedLine]]:
    """The next events. Admissions of weights come at every step from every rollout: those that nobody waits for are
    left out."""
    events = _table("events")
    with journal.store.read() as conn:
        rows = conn.execute(sa.select(events).where(events.c.seq > seq).order_by(events.c.seq).limit(limit)).mappings()
        return _parsed(rows.all(), journal.store.where, wants_admissions)


def _parsed(rows: Sequence[sa.RowMapping], where: str, wants_admissions: bool) -> tuple[list[Event], list[DamagedLine]]:
    found: list[Event] = []
    damaged: list[DamagedLine] = []
    for row in rows:
        wants_admissions = wants_admissions or row["kind"] == _K.PLAN_CREATED
        if row["kind"] == _K.WEIGHTS_ADMITTED and not wants_admissions and row is not rows[-1]:
            continue  # the last one says how far was read
        try:
            found.append(event_of(row, where))
        except JournalCorrupt as e:
            damaged.append(DamagedLine(seq=row["seq"], incident_id=row["incident_id"], error=e))
    return found, damaged


def holds(journal: Journal, seq: int, link: str) -> bool:
    """Whether the journal still has the last event that was read; another run's journal has a different one."""
    if not seq or not link:
        return True
    events = _table("events")
    with journal.store.read() as conn:
        found = conn.execute(sa.select(events.c.hash).where(events.c.seq == seq)).scalar()
    return found == link


def newest(journal: Journal, head: int) -> Fold:
    """A partial fold at event `head`: start and state of the run, newest steps, open and newest incidents."""
    events = _table("events")
    opened, closed = str(_K.INCIDENT_OPENED), str(_K.INCIDENT_CLOSED)
    done = sa.select(events.c.incident_id).where(events.c.kind == closed)
    is_open = (events.c.kind == opened) & events.c.incident_id.not_in(done)
    last_opened = sa.select(events.c.incident_id, events.c.seq).where(events.c.kind == opened)
    with journal.store.read() as conn:

        def latest(where: sa.ColumnElement[bool], limit: int) -> list[int]:
            query = sa.select(events.c.seq).where(where, events.c.seq <= head)
            return [r.seq for r in conn.execute(query.order_by(events.c.seq.desc()).limit(limit))]

        query = last_opened.where(events.c.seq <= head).order_by(events.c.seq.desc())
        names = {r.incident_id for r in conn.execute(query.limit(NEWEST_INCIDENTS))}
        still = last_opened.where(is_open, events.c.seq <= head).order_by(events.c.seq.desc()).limit(OPEN_MAX)
        names |= {r.incident_id for r in conn.execute(still)}
        lines: set[int] = set()
        for kind in _FIRST_AND_LAST:
            of_kind = events.c.kind == str(kind)
            lines.update(conn.execute(sa.select(sa.func.min(events.c.seq)).where(of_kind)).scalars())
            lines.update(latest(of_kind, 1))
        lines.update(latest(events.c.kind == str(_K.STEP_COMMITTED), NEWEST_STEPS))
        lines.update(latest(events.c.kind == str(_K.EPOCH_ADVANCED), 1))
        lines.update(latest(events.c.kind.in_([str(_K.NODE_QUARANTINED), str(_K.NODE_RETURNED_TO_SERVICE)]), OPEN_MAX))
        wanted = events.c.incident_id.in_(sorted(names)) | events.c.seq.in_(sorted(x for x in lines if x))
        rows = conn.execute(sa.select(events).where(wanted, events.c.seq <= head).order_by(events.c.seq)).mappings()
        found, damaged = _parsed(rows.all(), journal.store.where, True)
        last = conn.execute(sa.select(events.c.hash).where(events.c.seq == head)).scalar()
        number = conn.execute(sa.select(sa.func.count()).where(events.c.kind == opened)).scalar()
    fold = Fold(partial=True)
    fold.take(found, damaged)
    fold.projection.num_opened = int(number or 0)
    fold.seq, fold.hash = head, str(last or "")
    return fold


class ReplicaRecords:
    """Desired and actual state of every replica, reread only after a change."""

    def __init__(self) -> None:
        self.desired: Mapping[ReplicaId, Desired] = {}
        self.current: Mapping[ReplicaId, Actual] = {}
        self.damaged: tuple[str, ...] = ()
        self._mark: tuple[object, ...] | None = None

    def refresh(self, journal: Journal) -> bool:
        """Whether anything changed."""
        actual, desired = _table("actual"), _table("desired")
        count, total = sa.func.count(), sa.func.sum
        marks = (
            sa.select(count, total(actual.c.changed_at), total(actual.c.policy_version)).select_from(actual),
            sa.select(count, total(desired.c.incarnation), total(desired.c.fence)).select_from(desired),
        )
        with journal.store.read() as conn:
            mark = tuple(value for query in marks for value in conn.execute(query).one())
            if mark == self._mark:
                return False
            last = sa.select(actual.c.replica, sa.func.max(actual.c.incarnation).label("last"))
            newest_of = last.group_by(actual.c.replica).subquery()
            join = (actual.c.replica == newest_of.c.replica) & (actual.c.incarnation == newest_of.c.last)
            rows = conn.execute(sa.select(actual).join(newest_of, join)).mappings().all()
        current: dict[ReplicaId, Actual] = {}
        damaged = []
        for row in rows:
            try:
                current[ReplicaId(row["replica"])] = actual_of(row, journal.store.where)
            except JournalCorrupt as e:
                damaged.append(str(e))
        self.desired, self.current, self.damaged = journal.desired(), current, tuple(damaged)
        self._mark = mark
        return True
