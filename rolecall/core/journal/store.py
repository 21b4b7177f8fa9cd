"""The run's one database: opening it, its schema version, and the hash chain that both journal and ledger use.

SQLite in WAL mode by default, or PostgreSQL. Writers take turns: a write transaction starts with BEGIN IMMEDIATE
(SQLite) or an advisory lock (PostgreSQL), because the next link of a chain depends on the last one. With
`synchronous=FULL` (SQLite) or `synchronous_commit` (PostgreSQL) an acknowledged write survives SIGKILL and loss of
power."""

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, InterfaceError, InternalError, OperationalError, ProgrammingError

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalCorrupt, JournalError, JournalUnavailable
from rolecall.core.journal.database import redacted, sqlite_path
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.tables import META, METADATA

SCHEMA_VERSION = 1
BUSY_SECONDS = 10.0
"""How long a writer waits for its turn, or for a disconnected server, before it raises an error."""
MODE_RETRY_SECONDS = 0.02
RECONNECT_SECONDS = 0.2
GENESIS = "0" * 64
_ADVISORY_LOCK = 0x726F6C65
DAMAGE_SIGNS = ("Could not decode", "no such table", "no such column", "malformed", "not a database")
"""SQLite errors of the same class as 'busy' that mean a damaged file."""


def canonical(value: Any) -> str:
    """JSON in a canonical form, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def chain_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """Link of an append-only chain: SHA-256 over the previous link and the canonical entry, in hex."""
    return hashlib.sha256(f"{previous}\n{canonical(entry)}".encode()).hexdigest()


def chain_head(conn: sa.Connection, table: sa.Table) -> ChainHead:
    """Last link of the chain in `table`."""
    last = conn.execute(sa.select(table.c.seq, table.c.hash).order_by(table.c.seq.desc()).limit(1)).first()
    return ChainHead(position=last.seq, hash=last.hash) if last else ChainHead(position=0, hash=GENESIS)


class Store:
    """An open database. Threads may share it; processes open their own."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Opens the database, creating its tables when `create`.

        Raises:
            JournalError: it does not exist (and `create` is false) or cannot be reached.
            JournalCorrupt: the file is not a journal, or of an unknown schema version.
        """
        self.url = url
        self.where = _named(url)
        self._is_sqlite = url.startswith("sqlite")
        self._was_open = False
        self._clock = SystemClock()
        self._reading = threading.local()  # `conn`: of the thread's transaction
        self.engine = _sqlite_engine(url, create) if self._is_sqlite else _postgresql_engine(url)
        try:
            self._open(create)
            self._was_open = True
        except ProgrammingError as e:
            raise JournalError(f"{self.where}: holds no journal: {_first_line(e)}") from e
        finally:
            if not self._was_open:
                self.engine.dispose()

    def _open(self, create: bool) -> None:
        if create:
            with self.write() as conn:
                if not self._is_sqlite:
                    _create_schema(conn)
                METADATA.create_all(conn)
                if conn.execute(sa.select(META.c.value).where(META.c.name == "schema")).scalar() is None:
                    conn.execute(META.insert().values(name="schema", value=str(SCHEMA_VERSION)))
                    for table in ("events", "ledger"):
                        (_forbid_changes if self._is_sqlite else _forbid_changes_postgresql)(conn, table)
        with self.read() as conn:
            version = conn.execute(sa.select(META.c.value).where(META.c.name == "schema")).scalar()
        if version != str(SCHEMA_VERSION):
            raise JournalCorrupt(
                where=self.where, reason=f"schema version {version}, this rolecall reads {SCHEMA_VERSION}"
            )

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One write transaction: all of it is stored, or nothing.

        Raises:
            JournalUnavailable: the database cannot be used now. The transaction may have been stored: read again.
        """
        with self._connected(rolecall_write=True) as conn, conn.begin():
            if not self._is_sqlite:
                # Of this schema only: each run has its own, and runs do not wait for each other.
                lock = "select pg_advisory_xact_lock(:k, hashtext(current_setting('search_path')))"
                conn.execute(sa.text(lock), {"k": _ADVISORY_LOCK})
            yield conn

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view. Within it, further reads of this thread see the same view: a transaction costs more than
        a small query. It does not show what is written meanwhile.

        Raises:
            JournalUnavailable: the database cannot be used now. JournalCorrupt: the file is damaged.
        """
        outer: sa.Connection | None = getattr(self._reading, "conn", None)
        if outer is not None:
            yield outer
            return
        options: dict[str, Any] = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        with self._connected(**options) as conn, conn.begin():
            self._reading.conn = conn
            try:
                yield conn
            finally:
                self._reading.conn = None

    def rows(self, query: sa.Select[Any], **parameters: Any) -> Sequence[sa.RowMapping]:
        """The result of a query. Raises as `read`."""
        with self.read() as conn:
            return conn.execute(query, parameters).mappings().all()

    @contextmanager
    def _connected(self, **options: Any) -> Iterator[sa.Connection]:
        try:
            with self._connect() as conn:
                yield conn.execution_options(**options)
        except (OperationalError, InterfaceError, InternalError) as e:
            if isinstance(e, InternalError) and not e.connection_invalidated:
                raise  # not an outage
            if self._is_sqlite and any(sign in str(e.orig) for sign in DAMAGE_SIGNS):
                raise JournalCorrupt(where=self.where, reason=_first_line(e)) from e
            raise JournalUnavailable(where=self.where, reason=_first_line(e), hint=self._hint()) from e
        except DatabaseError as e:
            if type(e) is DatabaseError and self._is_sqlite:  # subclasses are not damage of the file
                raise JournalCorrupt(where=self.where, reason=_first_line(e)) from e
            raise

    def _connect(self) -> sa.Connection:
        """A working connection. No transaction has begun yet, so waiting for the server is safe."""
        deadline = self._clock.monotonic() + BUSY_SECONDS
        while True:
            try:
                return self.engine.connect()
            except OperationalError:
                if self._is_sqlite or not self._was_open or self._clock.monotonic() > deadline:
                    raise
            self._clock.sleep(RECONNECT_SECONDS)

    def _hint(self) -> str:
        if self._is_sqlite:
            return "is its directory writable, and does its disk have free space?"
        if self._was_open:
            return "start the server again or make it writable: processes with an open journal reconnect automatically"
        return "is the server running, and is the URL right?"

    def check_file(self) -> None:
        """The database's own integrity check. Raises JournalCorrupt: what SQLite found."""
        if not self._is_sqlite:
            return
        with self.read() as conn:
            result = str(conn.exec_driver_sql("PRAGMA quick_check(1)").scalar())
        if result != "ok":
            raise JournalCorrupt(where=self.where, reason=result)

    def close(self) -> None:
        self.engine.dispose()


def _named(url: str) -> str:
    """Name of the database for messages: its file, or its URL without the password."""
    if url.startswith("sqlite"):
        return sqlite_path(url)
    return redacted(sa.make_url(url).set(query={}).render_as_string(hide_password=True))


def _first_line(error: DatabaseError | InterfaceError) -> str:
    return next(iter(redacted(str(error.orig)).splitlines()), type(error.orig).__name__)


def _sqlite_engine(url: str, create: bool) -> sa.Engine:
    path, query = sqlite_path(url), dict[str, str]()
    if not create:
        _check_exists(Path(path))
        path, query = f"file:{quote(os.fsencode(path))}", {"mode": "rw", "uri": "true"}
    where = sa.URL.create("sqlite", database=path, query=query)
    engine = sa.create_engine(where, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_exists(path: Path) -> None:
    # SQLite has the same message for all of these.
    if not path.exists():
        raise JournalError(f"{path}: there is no journal (the file is missing)")
    if not path.is_file():
        raise JournalCorrupt(where=str(path), reason="not a file")
    if path.stat().st_size == 0:
        raise JournalCorrupt(where=str(path), reason="the file is empty")


def _configure_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # We begin transactions ourselves, because the driver begins them late, which breaks BEGIN IMMEDIATE.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _use_wal(cursor: Any) -> None:
    """SQLite's busy timeout does not cover two processes that change a new file's mode at the same time."""
    clock = SystemClock()
    deadline = clock.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or clock.monotonic() > deadline:
                raise
        clock.sleep(MODE_RETRY_SECONDS)


def _begin_sqlite(conn: sa.Connection) -> None:
    conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get("rolecall_write") else "BEGIN")


def _forbid_changes(conn: sa.Connection, table: str) -> None:
    for verb in ("UPDATE", "DELETE"):
        conn.exec_driver_sql(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )


_SESSION = (
    # Whatever the server's default: an acknowledged event is on disk.
    "SET synchronous_commit = on",
    f"SET lock_timeout = '{BUSY_SECONDS:.0f}s'",
    # A writer that is stopped inside a transaction (an injected fault) loses its turn before others give up.
    f"SET idle_in_transaction_session_timeout = '{BUSY_SECONDS / 2:.0f}s'",
)
_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
"""A dead server never answers; without these a write would wait for many minutes."""
_READ_ONLY = "25006"  # SQLSTATE read_only_sql_transaction


def _postgresql_engine(url: str) -> sa.Engine:
    try:
        engine = sa.create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 5, **_KEEPALIVE})
    except ModuleNotFoundError as e:
        raise JournalError(f"{redacted(url)}: needs {e.name}; install it with: pip install 'psycopg[binary]'") from e
    sa.event.listen(engine, "connect", _configure_postgresql)
    sa.event.listen(engine, "handle_error", _leave_read_only_server)
    return engine


def _leave_read_only_server(context: sa.engine.ExceptionContext) -> None:
    """Makes the next connection a new one: after a failover, this one would stay with the server that is read-only."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


def _configure_postgresql(dbapi_connection: Any, _record: Any) -> None:
    with dbapi_connection.cursor() as cursor:
        for statement in _SESSION:
            cursor.execute(statement)
    dbapi_connection.commit()  # a rollback would undo the settings


def _create_schema(conn: sa.Connection) -> None:
    """Creates the schema of the URL if it does not exist yet (`core.database.run_url`)."""
    if conn.execute(sa.text("select current_schema()")).scalar() is None:
        name = str(conn.execute(sa.text("select current_setting('search_path')")).scalar()).strip('"')
        conn.execute(sa.schema.CreateSchema(name, if_not_exists=True))


def _forbid_changes_postgresql(conn: sa.Connection, table: str) -> None:
    conn.exec_driver_sql(
        f"CREATE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN RAISE EXCEPTION '{table} is append-only'; END$$"
    )
    conn.exec_driver_sql(
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_append_only()"
    )
