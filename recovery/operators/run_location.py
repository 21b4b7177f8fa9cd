"""Where an operator command finds its run: a run directory, or only the URL of its journal.

Commands need nothing but the journal, so a dashboard on another machine can issue the same ones as the command line.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from rolecall.core.clock import Clock
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.journal.database import checked_url, redacted, sqlite_path
from rolecall.core.journal.journal import Journal
from rolecall.recovery.projection import IncidentProjection

NAME_CHARS_MAX = 64
"""Of a user's name: it is shown in tables and sentences."""
REASON_CHARS_MAX = 2000
"""Of a reason: as much as is ever shown of one sentence."""
SCHEMA_PREFIX = "rolecall-"
"""Of a run's schema in PostgreSQL (`core.database.run_url`)."""


class RunLocation(Protocol):
    """What every command takes; `RunDir` implements it."""

    @property
    def run_id(self) -> str: ...

    @property
    def shell_name(self) -> str:
        """Names the run in a command line (`RunDir.shell_name`)."""

    @property
    def database_url(self) -> str:
        """May contain a password: use `core.journal.database.redacted` before showing it."""


class JournalLocation:
    """A run whose journal is reachable and whose directory is not."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: `url` cannot hold a journal. The message shows no password."""
        try:
            self.database_url = checked_url(url)
        except ValueError as e:
            raise ConfigError([f"journal: {redacted(url)!r} {e}"]) from None
        self.run_id = run_id_of(self.database_url)
        self.shell_name = "RUN"  # whatever it is called where its directory is

    def __repr__(self) -> str:
        return f"JournalLocation({redacted(self.database_url)!r})"


def run_id_of(url: str) -> str:
    """The run's id from its journal's URL: the directory of the SQLite file, or the PostgreSQL schema."""
    if url.startswith("sqlite"):
        path = Path(sqlite_path(url))
        return path.parent.name if path.name == "journal.db" and path.parent.name else path.stem
    parsed = sa.make_url(url)
    options = str(parsed.query.get("options", ""))
    _, found, rest = options.partition(f'search_path="{SCHEMA_PREFIX}')
    return rest.partition('"')[0] if found else str(parsed.database)


def journal_of(location: RunLocation, clock: Clock | None = None) -> AbstractContextManager[Journal]:
    """The journal at `location`, closed after the block."""
    return closing(Journal(location.database_url, clock=clock, create=False))


@contextmanager
def opened(location: RunLocation, clock: Clock | None = None) -> Iterator[tuple[Journal, IncidentProjection]]:
    """The journal and its incidents."""
    with journal_of(location, clock) as journal:
        projection = IncidentProjection()
        projection.refresh(journal)
        yield journal, projection


def checked_name(by: str) -> str:
    """The user's name, if it is printable and short enough. Raises CommandRefused: it is not."""
    if not by.strip() or len(by) > NAME_CHARS_MAX or not by.isprintable():
        needed = f"needs 1 to {NAME_CHARS_MAX} printable characters"
        raise CommandRefused(f"{by[:NAME_CHARS_MAX]!r} is not a user name: {needed}")
    return by


def check_request(by: str, because: str, *, needed: bool = True) -> None:
    """Checks the user's name and the reason of a command. Raises CommandRefused: the name is not valid; the reason is
    missing where `needed`, or too long to be shown."""
    checked_name(by)
    if needed and not because.strip():
        raise CommandRefused("a reason is required")
    if len(because) > REASON_CHARS_MAX:
        raise CommandRefused(f"the reason has {len(because)} characters, the limit is {REASON_CHARS_MAX}")
