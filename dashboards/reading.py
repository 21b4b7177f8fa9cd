"""Reading a journal for people who watch: each look takes in only what is new, and what cannot be read is a sentence.

One `Reader` a process, shared by all who look, owned by no page. A page never waits for a database that is away: it gets
the last look that there was, with the problem beside it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.clock import Clock
from rolecall.core.database import redacted
from rolecall.core.errors import JournalCorrupt, JournalError, JournalUnavailable
from rolecall.core.journal import Journal
from rolecall.dashboards.settings import Settings
from rolecall.recovery.book import Book
from rolecall.recovery.watch import PAUSED_FLAG
from rolecall.snapshot import Memory, Snapshot

LOOK_SECONDS = 1.0
"""A look younger than this serves all who ask."""


class Trouble(StrEnum):
    """Why there is nothing (newer) to show."""

    NONE = ""
    EMPTY = "empty"  # a journal with no line yet
    MISSING = "missing"  # no journal there
    AWAY = "away"  # the database does not answer, or is locked
    OLD = "old"  # of a schema version that is not known
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the journal said. Times are wall seconds."""

    at: float
    trouble: Trouble
    because: str  # the trouble in a sentence
    snapshot: Snapshot
    book: Book


class Reader:
    """Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self._clock = settings, clock
        self._lock = threading.Lock()
        self._memory, self._book = Memory(), Book()
        self._last: Look | None = None

    def now(self) -> float:
        return self._clock.wall()

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """The journal, for one question. Raises JournalError."""
        journal = Journal(self.settings.journal_url, clock=self._clock, create=False)
        try:
            yield journal
        finally:
            journal.close()

    def look(self) -> Look:
        """What the journal says now, or said when it could last be read."""
        with self._lock:
            now = self._clock.wall()
            if self._last is None or now - self._last.at >= LOOK_SECONDS:
                self._last = self._look(now)
            return self._last

    def _look(self, now: float) -> Look:
        trouble, because = Trouble.NONE, ""
        snapshot = self._last.snapshot if self._last else Snapshot(now=now)
        try:
            with self.journal() as journal:
                self._memory.read(journal.events(after=self._memory.seq))
                self._book.refresh(journal)
                paused = journal.flag(PAUSED_FLAG)
                snapshot = self._memory.snapshot(now, journal.desired(), journal.current(), paused)
            if self._memory.seq == 0:
                trouble, because = Trouble.EMPTY, "The journal holds no event yet."
        except JournalCorrupt as e:
            trouble, because = Trouble.DAMAGED, redacted(str(e))
        except JournalUnavailable as e:
            trouble, because = Trouble.AWAY, redacted(str(e))
        except JournalError as e:
            trouble, because = Trouble.MISSING, redacted(str(e))
        return Look(at=now, trouble=trouble, because=because, snapshot=snapshot, book=self._book)
