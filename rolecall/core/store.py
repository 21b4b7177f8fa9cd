"""The run's one database: opening it, its schema version, and the hash chain that both journal and ledger use.

SQLite in WAL mode by default, any SQLAlchemy URL otherwise (PostgreSQL). Writers take turns: a write transaction
starts with BEGIN IMMEDIATE (SQLite) or an advisory lock (PostgreSQL), because the next link of a chain depends on the
last one. With `synchronous=FULL` an acknowledged write survives SIGKILL and loss of power.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, OperationalError

from rolecall.core.errors import JournalCorrupt, JournalError

SCHEMA_VERSION = 1
BUSY_SECONDS = 10.0
"""How long a writer waits for its turn before it gives up with an error."""
GENESIS = "0" * 64
_ADVISORY_LOCK = 0x726F6C65

METADATA = sa.MetaData()

_meta = sa.Table("meta", METADATA, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))


def canonical(value: Any) -> str:
    """JSON with one spelling: what is hashed today hashes the same tomorrow."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def chain_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """Link of an append-only chain: SHA-256 over the link before and the canonical entry, in hex."""
    return hashlib.sha256(f"{previous}\n{canonical(entry)}".encode()).hexdigest()


class Store:
    """An open database. Threads may share it; processes open their own."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Opens the database, creating its tables when `create`.

        Raises:
            JournalError: it does not exist (and `create` is false) or cannot be reached.
            JournalCorrupt: the file is not a database of ours, or of a schema version that we do not know.
        """
        self.url = url
        self._is_sqlite = url.startswith("sqlite")
        connect_args = {"timeout": BUSY_SECONDS, "check_same_thread": False} if self._is_sqlite else {}
        if self._is_sqlite and not create:
            path = url.removeprefix("sqlite:///")
            url = f"sqlite:///file:{path}?mode=rw&uri=true"
        self.engine = sa.create_engine(url, connect_args=connect_args)
        if self._is_sqlite:
            sa.event.listen(self.engine, "connect", _configure_sqlite)
            sa.event.listen(self.engine, "begin", _begin_sqlite)
        try:
            self._open(create)
        except OperationalError as e:
            raise JournalError(f"{self.url}: {e.orig}") from e
        except DatabaseError as e:
            raise JournalCorrupt(where=self.url, reason=str(e.orig)) from e

    def _open(self, create: bool) -> None:
        # Every module that owns tables must have registered them before the first open.
        import rolecall.core.journal
        import rolecall.core.ledger  # noqa: F401

        if create:
            with self.write() as conn:
                METADATA.create_all(conn)
                if conn.execute(sa.select(_meta.c.value).where(_meta.c.name == "schema")).scalar() is None:
                    conn.execute(_meta.insert().values(name="schema", value=str(SCHEMA_VERSION)))
                    if self._is_sqlite:
                        for table in ("events", "ledger"):
                            _forbid_changes(conn, table)
        with self.read() as conn:
            version = conn.execute(sa.select(_meta.c.value).where(_meta.c.name == "schema")).scalar()
        if version != str(SCHEMA_VERSION):
            raise JournalCorrupt(
                where=self.url, reason=f"schema version {version}, this rolecall reads {SCHEMA_VERSION}"
            )

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One write transaction: all of it is kept, or nothing."""
        with self.engine.connect().execution_options(rolecall_write=True) as conn, conn.begin():
            if not self._is_sqlite:
                conn.execute(sa.text("select pg_advisory_xact_lock(:k)"), {"k": _ADVISORY_LOCK})
            yield conn

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view."""
        with self.engine.connect() as conn, conn.begin():
            yield conn

    def check_file(self) -> None:
        """The database's own integrity check.

        Raises:
            JournalCorrupt: what SQLite found.
        """
        if not self._is_sqlite:
            return
        try:
            with self.read() as conn:
                result = str(conn.exec_driver_sql("PRAGMA quick_check(1)").scalar())
        except DatabaseError as e:
            raise JournalCorrupt(where=self.url, reason=str(e.orig)) from e
        if result != "ok":
            raise JournalCorrupt(where=self.url, reason=result)

    def close(self) -> None:
        self.engine.dispose()


def _configure_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # We begin transactions ourselves: the driver's own habit of beginning late breaks BEGIN IMMEDIATE.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(conn: sa.Connection) -> None:
    conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get("rolecall_write") else "BEGIN")


def _forbid_changes(conn: sa.Connection, table: str) -> None:
    for verb in ("UPDATE", "DELETE"):
        conn.exec_driver_sql(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
