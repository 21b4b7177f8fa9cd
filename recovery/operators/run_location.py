"""Where a command finds the run it speaks to: a run directory, or nothing but the URL of its journal.

The journal is all that a person's word needs, so a dashboard on another machine can say what the command line can.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from rolecall.core.clock import Clock
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.journal.database import checked_url, redacted
from rolecall.core.journal.journal import Journal
from rolecall.recovery.incident_store import IncidentProjection

NAME_CHARS_MAX = 64
"""Of a person's name: it stands in every table and every sentence that tells what was decided."""
REASON_CHARS_MAX = 2000
"""Of a person's reason: as much as is ever shown of one sentence."""
SCHEMA_PREFIX = "rolecall-"
"""Of a run's schema in PostgreSQL (`core.database.run_url`)."""


class RunLocation(Protocol):
    """What every command takes. `RunDir` is one."""

    @property
    def run_id(self) -> str: ...

    @property
    def database_url(self) -> str:
        """Where the journal is. May hold a password: `core.database.redacted` before it is shown."""


class JournalLocation:
    """A run of which only the journal can be reached."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: `url` is none that a journal can live at. The reason shows no password.
        """
        try:
            self.database_url = checked_url(url)
        except ValueError as e:
            raise ConfigError([f"journal: {redacted(url)!r} {e}"]) from None
        self.run_id = run_id_of(self.database_url)

    def __repr__(self) -> str:
        return f"JournalPlace({redacted(self.database_url)!r})"


def run_id_of(url: str) -> str:
    """The run's name, as its journal's place tells it: the directory of its file, or its schema."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        path = Path(parsed.database or "")
        return path.parent.name if path.name == "journal.db" and path.parent.name else path.stem
    options = str(parsed.query.get("options", ""))
    _, found, rest = options.partition(f'search_path="{SCHEMA_PREFIX}')
    return rest.partition('"')[0] if found else str(parsed.database)


@contextmanager
def journal_of(place: RunLocation, clock: Clock | None = None) -> Iterator[Journal]:
    """The journal of `place`, for as long as the block."""
    journal = Journal(place.database_url, clock=clock, create=False)
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def opened(place: RunLocation, clock: Clock | None = None) -> Iterator[tuple[Journal, IncidentProjection]]:
    """The journal with its incidents."""
    with journal_of(place, clock) as journal:
        book = IncidentProjection()
        book.refresh(journal)
        yield journal, book


def checked_name(by: str) -> str:
    """Who speaks.

    Raises:
        CommandRefused: it is no name that can be shown.
    """
    if not by.strip() or len(by) > NAME_CHARS_MAX or not by.isprintable():
        raise CommandRefused(f"{by[:NAME_CHARS_MAX]!r}: who says so? At most {NAME_CHARS_MAX} printable characters")
    return by


def checked_reason(because: str, *, needed: bool = True) -> str:
    """Why.

    Raises:
        CommandRefused: there is none where one is `needed`, or it is longer than is ever shown.
    """
    if needed and not because.strip():
        raise CommandRefused("no reason is given: it is what everybody else will read")
    if len(because) > REASON_CHARS_MAX:
        raise CommandRefused(f"the reason has {len(because)} characters, at most {REASON_CHARS_MAX} are kept")
    return because
