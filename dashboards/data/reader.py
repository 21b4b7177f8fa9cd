"""Snapshots of a journal for the pages. Each poll reads only new events; errors become a message in the snapshot.

One `Reader` per process and run, shared by all sessions. A background thread reads on demand: a page waits briefly for
a newer snapshot, but never for a database that is unreachable, locked or slow. It then gets the last snapshot with its
age and the error. A long journal is read from its end first.

A `Fold` projects the journal. One that starts at the first event is complete. One that starts near the end (`newest`)
has the open incidents, the newest incidents and the newest steps; a complete one replaces it once that has caught up.
"""

import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import sqlalchemy as sa

from rolecall.core.clock import Clock
from rolecall.core.errors import JournalCorrupt, JournalError, JournalUnavailable
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.database import redacted, sqlite_path
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import LeaseAcquired, NodeQuarantined, NodeReturnedToService
from rolecall.core.journal.rows import DamagedLine, actual_of, event_of
from rolecall.core.journal.tables import ACTUAL, DESIRED, EVENTS, FLAGS
from rolecall.core.membership import Actual, Desired
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted
from rolecall.dashboards.data.progress import RunTrends, RunTrendsProjection
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents import Incident
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.projection import IncidentProjection
from rolecall.views import observed_capabilities, observed_course, observed_ranks
from rolecall.views.incidents import InjectedFault, parse_injections
from rolecall.views.journal_reader import JournalReader
from rolecall.views.observed_capabilities import ObservedCapability
from rolecall.views.observed_course import CoursePoint
from rolecall.views.observed_ranks import ObservedRank
from rolecall.views.snapshot import RunSnapshot, RunSnapshotProjection

CHUNK_EVENTS = 500
"""Events per chunk: about 30 ms, the longest that pages wait for the interpreter."""
NEWEST_INCIDENTS = 100
"""Incidents of a long journal that are read first, in addition to the open ones."""
OPEN_MAX = 500
"""Open incidents that are read first."""
NEWEST_STEPS = 400

_K = EventKind
_FIRST_AND_LAST = (_K.RUN_STARTED, _K.RUN_ENDED, _K.LEASE_ACQUIRED)


class Fold:
    """Owned by one thread."""

    def __init__(self, *, partial: bool = False) -> None:
        self.run, self.projection, self.trends = RunSnapshotProjection(), IncidentProjection(), RunTrendsProjection()
        self.damaged: list[DamagedLine] = []
        self.quarantined: set[str] = set()
        self.mode, self.orphans_mode = "", ""
        self.seq, self.hash = 0, ""  # of the newest event that was applied
        self.reader = JournalReader(page_events=CHUNK_EVENTS, wanted=self._wanted)
        self._awaited = False  # by an event since the last `take`
        self._partial = partial

    def _wanted(self, kind: str) -> bool:
        """Admissions of weights come at every step from every rollout: those that nothing waits for are left out."""
        self._awaited |= kind in (_K.PLAN_CREATED, _K.NODE_LENT, _K.COMPONENT_RESTARTED)
        return kind != _K.WEIGHTS_ADMITTED or self._awaited or self.trends.ettr.awaits_weights

    def take(self, events: Sequence[Event], damaged: Sequence[DamagedLine] = ()) -> None:
        self._awaited = False
        if self._partial:
            known = self.projection.incidents
            ours = {e.incident_id for e in events if e.kind is _K.INCIDENT_OPENED}
            kept = [e for e in events if not e.incident_id or e.incident_id in known or e.incident_id in ours]
        else:
            kept = list(events)
        misread = [line for event in kept if (line := self._misread(event)) is not None]
        self.projection.take(kept, damaged)
        self.projection.to_notify.clear()  # the dashboard sends no notifications
        self.damaged += sorted([*damaged, *misread], key=lambda line: line.seq)
        for event in kept:
            match event.payload:
                case NodeQuarantined(node=node):
                    self.quarantined.add(node)
                case NodeReturnedToService(node=node):
                    self.quarantined.discard(node)
                case LeaseAcquired(mode=mode, orphans_mode=of_orphans):
                    self.mode, self.orphans_mode = mode, of_orphans
        if events and events[-1].seq > self.seq:
            self.seq, self.hash = events[-1].seq, events[-1].hash

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


def _parsed(rows: Sequence[sa.RowMapping], where: str) -> tuple[list[Event], list[DamagedLine]]:
    found: list[Event] = []
    damaged: list[DamagedLine] = []
    for row in rows:
        try:
            found.append(event_of(row, where))
        except JournalCorrupt as e:
            damaged.append(DamagedLine(seq=row["seq"], incident_id=row["incident_id"], error=e))
    return found, damaged


def holds(journal: Journal, seq: int, link: str) -> bool:
    """Whether the journal still has the last event that was read; another run's journal has a different one."""
    if not seq or not link:
        return True
    with journal.store.read() as conn:
        return bool(conn.execute(sa.select(EVENTS.c.hash).where(EVENTS.c.seq == seq)).scalar() == link)


def newest(journal: Journal, head: int) -> Fold:
    """A partial fold at event `head`: start and state of the run, newest steps, open and newest incidents."""
    opened, closed = str(_K.INCIDENT_OPENED), str(_K.INCIDENT_CLOSED)
    done = sa.select(EVENTS.c.incident_id).where(EVENTS.c.kind == closed)
    is_open = (EVENTS.c.kind == opened) & EVENTS.c.incident_id.not_in(done)
    last_opened = sa.select(EVENTS.c.incident_id, EVENTS.c.seq).where(EVENTS.c.kind == opened)
    with journal.store.read() as conn:

        def latest(where: sa.ColumnElement[bool], limit: int) -> list[int]:
            query = sa.select(EVENTS.c.seq).where(where, EVENTS.c.seq <= head)
            return [r.seq for r in conn.execute(query.order_by(EVENTS.c.seq.desc()).limit(limit))]

        query = last_opened.where(EVENTS.c.seq <= head).order_by(EVENTS.c.seq.desc())
        names = {r.incident_id for r in conn.execute(query.limit(NEWEST_INCIDENTS))}
        still = last_opened.where(is_open, EVENTS.c.seq <= head).order_by(EVENTS.c.seq.desc()).limit(OPEN_MAX)
        names |= {r.incident_id for r in conn.execute(still)}
        lines: set[int] = set()
        for kind in _FIRST_AND_LAST:
            of_kind = EVENTS.c.kind == str(kind)
            lines.update(conn.execute(sa.select(sa.func.min(EVENTS.c.seq)).where(of_kind)).scalars())
            lines.update(latest(of_kind, 1))
        lines.update(latest(EVENTS.c.kind == str(_K.STEP_COMMITTED), NEWEST_STEPS))
        lines.update(latest(EVENTS.c.kind == str(_K.EPOCH_ADVANCED), 1))
        lines.update(latest(EVENTS.c.kind == str(_K.COMPONENT_RESTARTED), OPEN_MAX))  # one may continue an ended run
        lines.update(latest(EVENTS.c.kind.in_([str(_K.NODE_QUARANTINED), str(_K.NODE_RETURNED_TO_SERVICE)]), OPEN_MAX))
        wanted = EVENTS.c.incident_id.in_(sorted(names)) | EVENTS.c.seq.in_(sorted(x for x in lines if x))
        rows = conn.execute(sa.select(EVENTS).where(wanted, EVENTS.c.seq <= head).order_by(EVENTS.c.seq)).mappings()
        found, damaged = _parsed(rows.all(), journal.store.where)
        last = conn.execute(sa.select(EVENTS.c.hash).where(EVENTS.c.seq == head)).scalar()
        number = conn.execute(sa.select(sa.func.count()).where(EVENTS.c.kind == opened)).scalar()
    fold = Fold(partial=True)
    fold.take(found, damaged)
    fold.projection.num_opened = int(number or 0)
    fold.seq, fold.hash, fold.reader.seq = head, str(last or ""), head
    return fold


class ReplicaRecords:
    """Desired and actual state of every replica, reread only after a change."""

    def __init__(self) -> None:
        self.desired: Mapping[ReplicaId, Desired] = {}
        self.current: Mapping[ReplicaId, Actual] = {}
        self.damaged: tuple[str, ...] = ()
        self.observed: tuple[ObservedRank, ...] = ()
        self.course: tuple[CoursePoint, ...] = ()
        self.capabilities: tuple[ObservedCapability, ...] = ()
        self._mark: tuple[object, ...] | None = None

    def refresh(self, journal: Journal) -> bool:
        """Whether anything changed."""
        count, total = sa.func.count(), sa.func.sum
        flags = (
            sa.select(FLAGS.c.value).where(FLAGS.c.name == name).scalar_subquery()
            for name in (observed_ranks.FLAG, observed_course.FLAG, observed_capabilities.FLAG)
        )
        marks = (
            sa.select(*flags, count, total(ACTUAL.c.changed_at), total(ACTUAL.c.policy_version)).select_from(ACTUAL),
            sa.select(count, total(DESIRED.c.incarnation), total(DESIRED.c.fence)).select_from(DESIRED),
        )
        with journal.store.read() as conn:
            mark = tuple(value for query in marks for value in conn.execute(query).one())
            if mark == self._mark:
                return False
            last = sa.select(ACTUAL.c.replica, sa.func.max(ACTUAL.c.incarnation).label("last"))
            newest_of = last.group_by(ACTUAL.c.replica).subquery()
            join = (ACTUAL.c.replica == newest_of.c.replica) & (ACTUAL.c.incarnation == newest_of.c.last)
            rows = conn.execute(sa.select(ACTUAL).join(newest_of, join)).mappings().all()
        current: dict[ReplicaId, Actual] = {}
        damaged = []
        for row in rows:
            try:
                current[ReplicaId(row["replica"])] = actual_of(row, journal.store.where)
            except JournalCorrupt as e:
                damaged.append(str(e))
        self.desired, self.current, self.damaged = journal.desired(), current, tuple(damaged)
        ranks, course, capabilities = (str(text or "") for text in mark[:3])
        self.observed = observed_ranks.from_json(ranks)
        self.course = observed_course.from_json(course)
        self.capabilities = observed_capabilities.from_json(capabilities)
        self._mark = mark
        return True


SNAPSHOT_SECONDS = 1.0
"""A snapshot younger than this is reused."""
FIRST_SECONDS = 1.2
"""How long a page waits for the very first snapshot, so that it renders within 2 s with or without the journal."""
FRESH_SECONDS = 0.3
"""How long a page waits for a newer snapshot. Reading new events usually takes 10 ms."""
SILENT_SECONDS = 2.0
"""A database that has not responded for this long counts as unreachable."""
BUSY_SECONDS = 1.0
"""How long SQLite waits for a lock; readers should not queue for long."""
WHOLE_EVENTS = 3_000
"""A journal with up to this many events is read at once, in about 0.25 s."""
DAMAGED_NAMED = 20
"""Damaged events that are listed; the rest is counted."""


class JournalReadError(StrEnum):
    """Why there is no (newer) snapshot."""

    NONE = ""
    EMPTY = "empty"  # no events yet
    MISSING = "missing"  # no journal at this address
    UNREACHABLE = "unreachable"  # the database does not respond, or is locked
    OLD = "old"  # unknown schema version
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgress:
    """How much of the journal has been read. Before `whole`, only the newest incidents and steps are known."""

    read: int = 0
    of: int = 0
    whole: bool = True

    @property
    def percent(self) -> int:
        return 100 if self.whole or not self.of else min(99, 100 * self.read // self.of)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSnapshot:
    """The state of the journal at one time. Times are wall seconds. `run`, `projection` and `trends` are never
    modified."""

    at: float
    error: JournalReadError
    because: str  # the error in a sentence
    run: RunSnapshot
    projection: IncidentProjection
    read_at: float | None = None
    """When the journal was last read; None: never."""
    version: int = 0
    """Increases with every change, so it can be used as a cache key."""
    history: ReadProgress = ReadProgress()
    damaged: tuple[str, ...] = ()
    """Damaged events, a message each."""
    num_damaged: int = 0
    lease: Lease | None = None
    """The lease of the watch, current or expired."""
    mode: str = ""
    """Mode of the watch: observe, approve, act. Empty: no watch has started yet."""
    orphans_mode: str = ""
    """The same for incidents of orphans; empty: as `mode`."""
    quarantined: frozenset[str] = frozenset()  # nodes
    trends: RunTrends = field(default_factory=RunTrends)
    observed: tuple[ObservedRank, ...] = ()  # ranks of a job that rolecall only watches, as the two below
    course: tuple[CoursePoint, ...] = ()
    capabilities: tuple[ObservedCapability, ...] = ()

    @property
    def usable(self) -> bool:
        return self.read_at is not None and self.version > 0

    def mode_of(self, incident: Incident) -> str:
        """For this incident."""
        return (self.orphans_mode if incident.is_of_orphan else "") or self.mode

    @property
    def until(self) -> float:
        """Now; of an ended run its end, after which nothing is done and nothing costs time."""
        return self.at if self.run.ended_at is None else min(self.at, self.run.ended_at)

    @property
    def sampled_at(self) -> float:
        """When `observed` is judged: now; without a watch at the newest sample, because nothing is known since."""
        if self.watched or not self.observed:
            return self.at
        return min(self.at, max(r.seen_at for r in self.observed))

    @property
    def watched(self) -> bool:
        return self.lease is not None and self.lease.holder != "" and self.lease.expires_at > self.at


class Reader:
    """Thread-safe. `close()` ends its thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self._clock = settings, clock
        self._changed = threading.Condition()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._last: JournalSnapshot | None = None
        self._began: float | None = None  # start of the current read, monotonic seconds
        self._thread: threading.Thread | None = None
        self._following = _Following(settings, clock)

    def now(self) -> float:
        return self._clock.wall()

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """The journal, for one query. Raises JournalError, without waiting if it is unreachable."""
        last = self.latest()
        if last.error is JournalReadError.UNREACHABLE:
            raise JournalUnavailable(where="the journal", reason=last.because, hint="it is retried automatically")
        with closing(_opened(self.settings.journal_url, self._clock)) as journal:
            yield journal

    def start(self) -> None:
        """Starts reading before the first request."""
        with self._changed:
            self._ask()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def latest(self) -> JournalSnapshot:
        """The current snapshot, or the last one that could be read. Never waits long."""
        with self._changed:
            before = self._last
            # If the clock was set back, the last snapshot is in the future: read again.
            if before is not None and 0 <= self._clock.wall() - before.at < SNAPSHOT_SECONDS:
                return before
            return self._await(before, FIRST_SECONDS if before is None else FRESH_SECONDS)

    def fresh(self) -> JournalSnapshot:
        """A snapshot read after this call, so it contains what the caller has just written, if the journal is
        reachable."""
        with self._changed:
            if self._began is not None:
                self._await(self._last, FIRST_SECONDS)
            return self._await(self._last, FIRST_SECONDS)

    def _await(self, before: JournalSnapshot | None, seconds: float) -> JournalSnapshot:
        """Waits for a snapshot other than `before`; on timeout returns the last one with an error."""
        self._ask()
        seconds = max(seconds, self.settings.patience_seconds)
        if not self._silent():
            self._changed.wait_for(lambda: self._last is not before, timeout=seconds)
        last = self._last
        if last is not None and (last is not before or not self._silent()):
            return last
        now = self._clock.wall()
        since = seconds if self._began is None else self._clock.monotonic() - self._began
        because = f"The database has not responded for {since:.0f} s: it is locked, slow or unreachable."
        if last is None:
            return _nothing(now, JournalReadError.UNREACHABLE, because)
        return replace(last, at=now, error=JournalReadError.UNREACHABLE, because=because)

    def _silent(self) -> bool:
        return self._began is not None and self._clock.monotonic() - self._began > max(
            SILENT_SECONDS, self.settings.patience_seconds
        )

    def _ask(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="dashboard reader", daemon=True)
            self._thread.start()
        self._wake.set()

    def _read(self) -> None:
        pause = 0.0  # seconds before the next part of the history is read; 0: it is complete
        while True:
            asked = self._wake.wait(pause or None)
            if self._closed.is_set():
                self._following.close()
                return
            if asked:
                self._wake.clear()
                with self._changed:
                    self._began = self._clock.monotonic()
                snapshot = self._following.read()
                with self._changed:
                    self._began, self._last = None, snapshot
                    self._changed.notify_all()
            # Pause as long as the read took, so that pages get half of the interpreter.
            began = self._clock.monotonic()
            more = self._following.read_behind()
            pause = max(0.01, self._clock.monotonic() - began) if more else 0.0


READERS_MAX = 4
"""Runs that are followed at once, unless pages of more are open."""
IDLE_SECONDS = 120.0
"""A browser refreshes a page in the background once a minute: after this time without a request no page is open."""


class Readers:
    """One reader for each run that pages look at. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._asked: dict[Settings, tuple[Reader, float]] = {}  # and when, monotonic seconds; the latest is last

    def get(self, settings: Settings) -> Reader:
        """Closes readers that no page asks for, the one asked for longest ago first."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._asked.pop(settings, None)
            found = known[0] if known is not None else Reader(settings, self._clock)
            self._asked[settings] = found, now
            for other, (reader, at) in list(self._asked.items())[:-READERS_MAX]:
                if now - at > IDLE_SECONDS:
                    del self._asked[other]
                    reader.close()
            return found


def _opened(url: str, clock: Clock) -> Journal:
    journal = Journal(url, clock=clock, create=False)
    if url.startswith("sqlite"):
        engine = journal.store.engine
        engine.dispose()
        milliseconds = int(BUSY_SECONDS * 1000)
        sa.event.listen(engine, "connect", lambda c, _: c.execute(f"PRAGMA busy_timeout={milliseconds}").close())
    return journal


def has_incident(url: str, incident_id: str, clock: Clock) -> bool:
    """Whether a journal has this incident. Raises JournalError: it is not readable."""
    with closing(_opened(url, clock)) as journal:
        return bool(journal.events(incident_id=incident_id, limit=1))


class _Following:
    """Reads one journal incrementally. Owned by the reading thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._url, self._clock = settings.journal_url, clock
        self._injections = _Injections(settings.run.injections_path if settings.run else None)
        self._journal: Journal | None = None
        self._file: tuple[int, int] | None = None
        self._shown: JournalSnapshot | None = None
        self._versions = 0
        self._forget()

    def _forget(self) -> None:
        self._fold = Fold()
        self._behind: Fold | None = None
        self._records = ReplicaRecords()
        self._of = 0

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def read(self) -> JournalSnapshot:
        """Reads new events. Errors become part of the snapshot."""
        now = self._clock.wall()
        error, because = JournalReadError.NONE, ""
        try:
            self._shown = self._news(now)
            return self._shown
        except JournalCorrupt as e:
            error, because = _of_corrupt(e), redacted(str(e))
        except JournalUnavailable as e:
            error, because = JournalReadError.UNREACHABLE, redacted(str(e))
        except JournalError as e:
            error, because = JournalReadError.MISSING, redacted(str(e))
        except Exception as e:  # noqa: BLE001 - any error is shown on the page, and the thread must continue
            error, because = JournalReadError.DAMAGED, f"It cannot be read: {redacted(repr(e))[:500]}"
        self.close()
        before = self._shown
        if before is None:
            return _nothing(now, error, because)
        return replace(before, at=now, error=error, because=because)

    def _news(self, now: float) -> JournalSnapshot:
        journal = self._same_journal()
        fold = self._fold
        if fold.reader.seq == 0 and self._behind is None:
            self._of = journal.head().position
            if self._of > WHOLE_EVENTS:
                self._behind = Fold()
                self._fold = fold = newest(journal, self._of)
        before_faults = fold.trends.ettr.faults
        fold.trends.ettr.faults = self._injections.read()
        changed = before_faults != fold.trends.ettr.faults
        for page in fold.reader.pages(journal):
            if page.events or page.damaged:
                fold.take(page.events, page.damaged)
                changed = True
        paused, lease = journal.flag(PAUSED_FLAG) or "", journal.lease(LEASE_NAME)
        changed |= self._records.refresh(journal)
        before = self._shown
        if before is not None and not changed and before.version == self._versions and before.run.paused == paused:
            run = replace(before.run, now=now, tokens_per_second=fold.run.tokens_per_second(now))
            trends = before.trends if run.ended else self._trends(fold, now, lease)  # its account grows with time
            return replace(
                before,
                at=now,
                read_at=now,
                error=_of_lines(fold),
                because=_damage(fold),
                lease=lease,
                run=run,
                trends=trends,
                history=self._history(),
            )
        self._versions += 1
        run = fold.run.snapshot(now, self._records.desired, self._records.current, paused)
        empty = fold.reader.seq == 0 and not self._records.observed
        return JournalSnapshot(
            at=now,
            read_at=now,
            version=self._versions if not empty else 0,
            error=JournalReadError.EMPTY if empty else _of_lines(fold),
            because="The journal has no events yet." if empty else _damage(fold),
            run=run,
            projection=fold.copied_projection(),
            history=self._history(),
            damaged=tuple(redacted(str(line.error)) for line in fold.damaged[:DAMAGED_NAMED]) + self._records.damaged,
            num_damaged=len(fold.damaged) + len(self._records.damaged),
            lease=lease,
            mode=fold.mode,
            orphans_mode=fold.orphans_mode,
            quarantined=frozenset(fold.quarantined),
            trends=self._trends(fold, now, lease),
            observed=self._records.observed,
            course=self._records.course,
            capabilities=self._records.capabilities,
        )

    def _trends(self, fold: Fold, now: float, lease: Lease | None) -> RunTrends:
        watched = lease is not None and lease.expires_at > now
        return fold.trends.trends(now, self._records.current, whole=self._behind is None, watched=watched)

    def _history(self) -> ReadProgress:
        if self._behind is None:
            return ReadProgress(read=self._fold.reader.seq, of=self._fold.reader.seq)
        return ReadProgress(read=self._behind.reader.seq, of=max(self._of, self._fold.reader.seq), whole=False)

    def _same_journal(self) -> Journal:
        """The journal, reopened if it was closed; starts over if it was replaced by another run's."""
        file = _file_of(self._url)
        if self._journal is not None and file != self._file:
            self.close()
        if self._journal is None:
            self._journal = _opened(self._url, self._clock)
            self._file = file
        if not holds(self._journal, self._fold.seq, self._fold.hash):
            self._forget()
            self._shown = None
        return self._journal

    def read_behind(self) -> bool:
        """Reads the next part of the history; whether there is more."""
        journal, behind = self._journal, self._behind
        if journal is None or behind is None:
            return False
        behind.trends.ettr.faults = self._injections.read()
        try:
            page = next(behind.reader.pages(journal))
        except Exception:  # noqa: BLE001 - the next read reports the same error
            return False
        behind.take(page.events, page.damaged)
        # Exclude the history from garbage collection, which would need 0.3 s to traverse it.
        gc.freeze()
        if behind.reader.at_end or behind.reader.seq >= self._fold.reader.seq:
            self._fold, self._behind = behind, None
            self._versions += 1
            return False
        return True


def injected_faults(run: RunDir | None) -> tuple[list[InjectedFault], str]:
    """The injection log, if the run is on this machine and has one; and why it cannot be used."""
    if run is None:
        return [], ""
    try:
        return parse_injections(run.injections_path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return [], ""
    except (OSError, ValueError) as e:
        return [], str(e)


class _Injections:
    """The injection log, if there is one, reread when it has grown. An unreadable log counts as empty; the Accounting
    page reports it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._size = -1
        self._faults: tuple[InjectedFault, ...] = ()

    def read(self) -> tuple[InjectedFault, ...]:
        if self._path is None:
            return ()
        with suppress(OSError, ValueError):
            size = self._path.stat().st_size
            if size != self._size:
                found = parse_injections(self._path.read_text(encoding="utf-8"))
                self._faults, self._size = tuple(f for f in found if not f.of_helper), size
        return self._faults


def _nothing(now: float, error: JournalReadError, because: str) -> JournalSnapshot:
    """The snapshot before anything could be read."""
    return JournalSnapshot(
        at=now, error=error, because=because, run=RunSnapshot(now=now), projection=IncidentProjection()
    )


def _file_of(url: str) -> tuple[int, int] | None:
    """Identity of a SQLite file; None if the journal is not SQLite or does not exist."""
    if not url.startswith("sqlite"):
        return None
    try:
        found = os.stat(sqlite_path(url))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _of_corrupt(error: JournalCorrupt) -> JournalReadError:
    if error.reason.startswith("schema version"):
        return JournalReadError.OLD
    return JournalReadError.EMPTY if error.reason == "the file is empty" else JournalReadError.DAMAGED


def _of_lines(fold: Fold) -> JournalReadError:
    return JournalReadError.DAMAGED if fold.damaged else JournalReadError.NONE


def _damage(fold: Fold) -> str:
    if not fold.damaged:
        return ""
    lines = ", ".join(str(line.seq) for line in fold.damaged[:DAMAGED_NAMED])
    more = "" if len(fold.damaged) <= DAMAGED_NAMED else f" and {len(fold.damaged) - DAMAGED_NAMED} more"
    return f"{counted(len(fold.damaged), 'event')} cannot be read: {lines}{more}. Everything else is shown."
