"""Reading a journal for people who watch: each look takes in only what is new, and what cannot be read is a sentence.

One `Reader` a process, shared by all who look, owned by no page. A thread of its own reads, when somebody asks: a page
waits a moment for news, and never for a database that is away, locked or slow. It then gets the last look that there was,
with its age and the trouble beside it. A long journal is read from its end first (`fold.py`).
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import sqlalchemy as sa

from rolecall.core.clock import Clock
from rolecall.core.errors import JournalCorrupt, JournalError, JournalUnavailable
from rolecall.core.journal.database import redacted
from rolecall.core.journal.journal import Journal, Lease
from rolecall.dashboards.data.fold import CHUNK_EVENTS, Fold, ReplicaRecords, events_after, holds, newest
from rolecall.dashboards.data.progress import RunTrends
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incident_store import IncidentProjection
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.views.injections import InjectedFault, parse_injections
from rolecall.views.snapshot import RunSnapshot

LOOK_SECONDS = 1.0
"""A look younger than this serves all who ask."""
FIRST_SECONDS = 1.2
"""How long a page waits for the very first look: first paint is to come within 2 s, with or without the journal."""
FRESH_SECONDS = 0.3
"""How long a page waits for news before it shows what was known. What was written since is usually read in 10 ms."""
SILENT_SECONDS = 2.0
"""A database that has not answered for this long is away, as far as a page is concerned."""
BUSY_SECONDS = 1.0
"""How long SQLite waits for a lock: who only looks does not queue for long."""
WHOLE_EVENTS = 3_000
"""A journal of up to so many events is read at once: about a quarter of a second."""
DAMAGED_NAMED = 20
"""Damaged lines that are named; of more the number is told."""


class JournalReadError(StrEnum):
    """Why there is nothing (newer) to show."""

    NONE = ""
    EMPTY = "empty"  # a journal with no line yet
    MISSING = "missing"  # no journal there
    AWAY = "away"  # the database does not answer, or is locked
    OLD = "old"  # of a schema version that is not known
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgress:
    """How much of the journal has been read. Until it is whole, only the newest incidents and steps are known."""

    read: int = 0
    of: int = 0
    whole: bool = True

    @property
    def percent(self) -> int:
        return 100 if self.whole or not self.of else min(99, 100 * self.read // self.of)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSnapshot:
    """What the journal said. Times are wall seconds. `snapshot`, `book` and `course` are never changed once they are here."""

    at: float
    trouble: JournalReadError
    because: str  # the trouble in a sentence
    snapshot: RunSnapshot
    book: IncidentProjection
    read_at: float | None = None
    """When the journal last answered; None: never."""
    version: int = 0
    """Grows whenever there is something new to see: what was drawn from a version can be kept for it."""
    history: ReadProgress = ReadProgress()
    damaged: tuple[str, ...] = ()
    """Lines that cannot be read, each a sentence."""
    num_damaged: int = 0
    lease: Lease | None = None
    """Who watches, or watched."""
    mode: str = ""
    """In which mode the watch acts: observe, approve, act. Empty: nobody has taken the lease yet."""
    quarantined: frozenset[str] = frozenset()
    """Nodes on which nothing is placed."""
    course: RunTrends = field(default_factory=RunTrends)

    @property
    def usable(self) -> bool:
        """Whether anything of a run is known."""
        return self.read_at is not None and self.version > 0

    @property
    def watched(self) -> bool:
        """Whether a watch holds the lease."""
        return self.lease is not None and self.lease.holder != "" and self.lease.expires_at > self.at


class Reader:
    """Thread-safe. `close()` ends its thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self._clock = settings, clock
        self._changed = threading.Condition()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._last: JournalSnapshot | None = None
        self._began: float | None = None  # the reading under way, monotonic seconds
        self._thread: threading.Thread | None = None
        self._following = _Following(settings, clock)

    def now(self) -> float:
        return self._clock.wall()

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """The journal, for one question. Raises JournalError, at once if it did not answer just now."""
        last = self.look()
        if last.trouble is JournalReadError.AWAY:
            raise JournalUnavailable(where="the journal", reason=last.because, hint="it is tried again by itself")
        journal = _opened(self.settings.journal_url, self._clock)
        try:
            yield journal
        finally:
            journal.close()

    def start(self) -> None:
        """Begins to read, before anybody asks."""
        with self._changed:
            self._ask()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def look(self) -> JournalSnapshot:
        """What the journal says now, or said when it could last be read. Never waits long."""
        with self._changed:
            before = self._last
            # A clock that was set back makes a look of the future, which is no news for as long.
            if before is not None and 0 <= self._clock.wall() - before.at < LOOK_SECONDS:
                return before
            return self._await(before, FIRST_SECONDS if before is None else FRESH_SECONDS)

    def fresh(self) -> JournalSnapshot:
        """A look that was begun after this call: what the caller has just written is in it, if the journal answers."""
        with self._changed:
            if self._began is not None:
                self._await(self._last, FIRST_SECONDS)
            return self._await(self._last, FIRST_SECONDS)

    def _await(self, before: JournalSnapshot | None, seconds: float) -> JournalSnapshot:
        """Asks for a look other than `before`; without one in time, tells what was known, and why it is old."""
        self._ask()
        if not self._silent():
            self._changed.wait_for(lambda: self._last is not before, timeout=seconds)
        last = self._last
        if last is not None and (last is not before or not self._silent()):
            return last
        now = self._clock.wall()
        since = seconds if self._began is None else self._clock.monotonic() - self._began
        because = f"The database has not answered for {since:.0f} s: it is locked, slow or away."
        if last is None:
            return JournalSnapshot(
                at=now,
                trouble=JournalReadError.AWAY,
                because=because,
                snapshot=RunSnapshot(now=now),
                book=IncidentProjection(),
            )
        return replace(last, at=now, trouble=JournalReadError.AWAY, because=because)

    def _silent(self) -> bool:
        return self._began is not None and self._clock.monotonic() - self._began > SILENT_SECONDS

    def _ask(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="dashboard reader", daemon=True)
            self._thread.start()
        self._wake.set()

    def _read(self) -> None:
        behind = 0.0  # seconds to pause before the next piece of what lies behind; 0: nothing does
        while True:
            asked = self._wake.wait(behind or None)
            if self._closed.is_set():
                self._following.close()
                return
            if asked:
                self._wake.clear()
                with self._changed:
                    self._began = self._clock.monotonic()
                look = self._following.look()
                with self._changed:
                    self._began, self._last = None, look
                    self._changed.notify_all()
            # As long a pause as the work was: half a core is left to the pages, which wait for the same interpreter.
            began = self._clock.monotonic()
            more = self._following.read_behind()
            behind = max(0.01, self._clock.monotonic() - began) if more else 0.0


def _opened(url: str, clock: Clock) -> Journal:
    journal = Journal(url, clock=clock, create=False)
    if url.startswith("sqlite"):
        engine = journal.store.engine
        engine.dispose()
        milliseconds = int(BUSY_SECONDS * 1000)
        sa.event.listen(engine, "connect", lambda c, _: c.execute(f"PRAGMA busy_timeout={milliseconds}").close())
    return journal


class _Following:
    """One journal, followed: owned by the reading thread."""

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

    def look(self) -> JournalSnapshot:
        """Reads what is new. Whatever goes wrong is part of the look."""
        now = self._clock.wall()
        trouble, because = JournalReadError.NONE, ""
        try:
            return self._kept(self._news(now))
        except JournalCorrupt as e:
            trouble, because = _of_corrupt(e), redacted(str(e))
        except JournalUnavailable as e:
            trouble, because = JournalReadError.AWAY, redacted(str(e))
        except JournalError as e:
            trouble, because = JournalReadError.MISSING, redacted(str(e))
        except Exception as e:  # noqa: BLE001 - a page must say so, whatever it is; the thread must go on
            trouble, because = JournalReadError.DAMAGED, f"It cannot be read: {redacted(repr(e))[:500]}"
        self.close()
        before = self._shown
        if before is None:
            return JournalSnapshot(
                at=now, trouble=trouble, because=because, snapshot=RunSnapshot(now=now), book=IncidentProjection()
            )
        return replace(before, at=now, trouble=trouble, because=because)

    def _kept(self, look: JournalSnapshot) -> JournalSnapshot:
        self._shown = look
        return look

    def _news(self, now: float) -> JournalSnapshot:
        journal = self._same_journal()
        fold = self._fold
        if fold.seq == 0 and self._behind is None:
            self._of = journal.head().position
            if self._of > WHOLE_EVENTS:
                self._behind = Fold()
                self._fold = fold = newest(journal, self._of)
        before_faults = fold.course.faults
        fold.course.faults = self._injections.read()
        changed = self._take_new(journal, fold) or before_faults != fold.course.faults
        paused, lease = journal.flag(PAUSED_FLAG) or "", journal.lease(LEASE_NAME)
        changed |= self._records.refresh(journal)
        before = self._shown
        if before is not None and not changed and before.version == self._versions and before.snapshot.paused == paused:
            snapshot = replace(before.snapshot, now=now, tokens_per_second=fold.memory.tokens_per_second(now))
            course = before.course
            if fold.course.suffers:  # what it loses grows with time alone
                course = self._course(fold, now, ended=snapshot.ended != "", lease=lease)
            return replace(
                before,
                at=now,
                read_at=now,
                trouble=_of_lines(fold),
                because=_damage(fold),
                lease=lease,
                snapshot=snapshot,
                course=course,
                history=self._history(),
            )
        self._versions += 1
        snapshot = fold.memory.snapshot(now, self._records.desired, self._records.current, paused)
        empty = fold.seq == 0
        return JournalSnapshot(
            at=now,
            read_at=now,
            version=self._versions if not empty else 0,
            trouble=JournalReadError.EMPTY if empty else _of_lines(fold),
            because="The journal holds no event yet." if empty else _damage(fold),
            snapshot=snapshot,
            book=fold.copied_book(),
            history=self._history(),
            damaged=tuple(redacted(str(line.error)) for line in fold.damaged[:DAMAGED_NAMED]) + self._records.damaged,
            num_damaged=len(fold.damaged) + len(self._records.damaged),
            lease=lease,
            mode=fold.mode,
            quarantined=frozenset(fold.quarantined),
            course=self._course(fold, now, ended=snapshot.ended != "", lease=lease),
        )

    def _course(self, fold: Fold, now: float, *, ended: bool, lease: Lease | None) -> RunTrends:
        """The clock of a run that nobody watches any more stands still at its last step."""
        alive = not ended and lease is not None and lease.expires_at > now
        return fold.course.told(now if alive else None, self._records.current, whole=self._behind is None)

    def _history(self) -> ReadProgress:
        if self._behind is None:
            return ReadProgress(read=self._fold.seq, of=self._fold.seq)
        return ReadProgress(read=self._behind.seq, of=max(self._of, self._fold.seq), whole=False)

    def _take_new(self, journal: Journal, fold: Fold) -> bool:
        """All that was written since; whether there was anything."""
        changed = False
        while True:
            events, damaged = events_after(journal, fold.seq, CHUNK_EVENTS, wants_admissions=fold.course.awaits)
            if not events and not damaged:
                return changed
            fold.take(events, damaged)
            changed = True

    def _same_journal(self) -> Journal:
        """The journal, opened again if it was closed, and forgotten if another run stands in its place now."""
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
        """One more piece of what lies before the newest; whether there is more."""
        journal, behind = self._journal, self._behind
        if journal is None or behind is None:
            return False
        behind.course.faults = self._injections.read()
        try:
            events, damaged = events_after(journal, behind.seq, CHUNK_EVENTS, wants_admissions=behind.course.awaits)
        except Exception:  # noqa: BLE001 - the next look meets the same trouble, and says so
            return False
        if events or damaged:
            behind.take(events, damaged)
        # What a long journal leaves in memory is no garbage, and the collector needs 0.3 s to walk it: out of its sight.
        gc.freeze()
        if behind.seq >= self._fold.seq or not (events or damaged):
            self._fold, self._behind = behind, None
            self._versions += 1
            return False
        return True


class _Injections:
    """The injector's log, where there is one: read again when it has grown. What cannot be read tells of no fault (the page
    Accounting says so)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._size = -1
        self._faults: tuple[InjectedFault, ...] = ()

    def read(self) -> tuple[InjectedFault, ...]:
        if self._path is None:
            return ()
        try:
            size = self._path.stat().st_size
            if size != self._size:
                found = parse_injections(self._path.read_text(encoding="utf-8"))
                self._faults, self._size = tuple(f for f in found if not f.of_helper), size
        except (OSError, ValueError):
            return self._faults
        return self._faults


def _file_of(url: str) -> tuple[int, int] | None:
    """Which file a SQLite journal is; None where it is none, or is not there (opening it says so)."""
    if not url.startswith("sqlite"):
        return None
    try:
        found = os.stat(url.removeprefix("sqlite:///"))
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
    return f"{len(fold.damaged)} line(s) cannot be read: {lines}{more}. Everything else is shown."
