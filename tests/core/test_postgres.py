"""A journal on PostgreSQL: what its server's death, one that accepts no writes, a stopped writer and a wrong URL mean,
and who sees the password."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.config.watched import parse_watched
from rolecall.core.errors import ConfigError, JournalError, JournalUnavailable
from rolecall.core.ids import RunId
from rolecall.core.journal import store
from rolecall.core.journal.database import checked_url, redacted, run_url
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import create_run_dir
from rolecall.watch.agents import observing_run
from tests import postgres
from tests.core.test_journal import WRITER
from tests.events import filled
from tests.support import PATIENCE_SECONDS

SECRET = "s3cr3t"
WITH_PASSWORD = f"postgresql://me:{SECRET}@db.example/runs"


@pytest.fixture
def mortal() -> Iterator[postgres.Server]:
    """A server of the test's own, to be killed."""
    with postgres.server() as running:
        yield running


def _append(journal: Journal, n: int) -> None:
    journal.append(filled(EventKind.REPLICA_LOST, {"incarnation": n}), key=f"e{n}")


# --- the server dies ----------------------------------------------------------------------------------------------


def test_a_killed_server_is_named_and_when_it_is_back_the_journal_continues(
    mortal: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_SECONDS", 0.5)
    journal = Journal(mortal.fresh_url())
    for n in range(20):
        _append(journal, n)
    head = journal.head()
    mortal.kill()
    with pytest.raises(JournalUnavailable, match="start the server again") as caught:
        _append(journal, 20)
    assert "\n" not in str(caught.value)
    with pytest.raises(JournalUnavailable):
        journal.events()
    mortal.start()
    assert journal.verify() == head, "every acknowledged event was on disk"
    _append(journal, 20)
    assert journal.verify().position == 21
    journal.close()


def test_a_writer_waits_for_a_server_that_is_restarted(
    mortal: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_SECONDS", PATIENCE_SECONDS)
    journal = Journal(mortal.fresh_url())
    _append(journal, 0)
    mortal.kill()
    done = threading.Event()

    def write() -> None:
        _append(journal, 1)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not done.is_set()
    mortal.start()
    writer.join(PATIENCE_SECONDS)
    assert done.is_set() and journal.verify().position == 2
    journal.close()


def test_a_server_killed_in_the_middle_of_a_transaction_keeps_nothing_of_it(mortal: postgres.Server) -> None:
    journal = Journal(mortal.fresh_url())
    with pytest.raises(JournalUnavailable), journal.store.write() as conn:
        conn.exec_driver_sql("INSERT INTO flags VALUES ('paused', 'by me')")
        mortal.kill()
        conn.exec_driver_sql("INSERT INTO flags VALUES ('stop', 'by me')")
    mortal.start()
    assert journal.flag("paused") is None and journal.flag("stop") is None
    journal.close()


def test_a_missing_server_is_an_error_at_once(mortal: postgres.Server) -> None:
    url = mortal.fresh_url()
    mortal.kill()
    with pytest.raises(JournalUnavailable, match=r"cannot be used now: postgresql.*is the URL right"):
        Journal(url)


def test_a_server_that_accepts_no_writes_is_an_outage_until_it_does(mortal: postgres.Server) -> None:
    """As after a failover to a standby, or where a managed server is read-only because its disk is full."""
    journal = Journal(mortal.fresh_url())
    _append(journal, 0)
    server = sa.create_engine(mortal.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with server.connect() as admin:
        admin.exec_driver_sql("ALTER DATABASE postgres SET default_transaction_read_only = on")
        journal.store.engine.dispose()  # it concerns new connections
        assert journal.head().position == 1, "reading goes on"
        with pytest.raises(JournalUnavailable, match=r"read-only transaction .*or make it writable"):
            _append(journal, 1)
        admin.exec_driver_sql("ALTER DATABASE postgres RESET default_transaction_read_only")
    _append(journal, 1)
    assert journal.verify().position == 2, "over a new connection: the old one is read-only for good"
    journal.close()


# --- writers ------------------------------------------------------------------------------------------------------


def test_a_writer_stopped_in_the_middle_of_a_transaction_loses_its_turn(postgres_server: postgres.Server) -> None:
    """SIGSTOP of a controller is a fault that we inject: the watch that is to find it writes to the same journal. The
    stopped one meets an outage when it goes on."""
    url = postgres_server.fresh_url()
    journal = Journal(url)
    holds = (
        "import sys, rolecall.core.journal.journal as j\n"
        "with j.Journal(sys.argv[1], create=False).store.write() as conn:\n"
        "    print('mine', flush=True); sys.stdin.read(); conn.exec_driver_sql('SELECT 1')\n"
    )
    argv, pipe = [sys.executable, "-c", holds, url], subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stdin=pipe, stderr=pipe, text=True) as stopped:
        try:
            assert stopped.stdout is not None and stopped.stdout.readline() == "mine\n"
            os.kill(stopped.pid, signal.SIGSTOP)
            _append(journal, 0)
            os.kill(stopped.pid, signal.SIGCONT)
            _, said = stopped.communicate("", PATIENCE_SECONDS)
        finally:
            stopped.kill()
    assert said.splitlines()[-1].startswith("rolecall.core.errors.JournalUnavailable: "), said
    assert "idle-in-transaction timeout" in said.splitlines()[-1]
    assert journal.verify().position == 1
    journal.close()


def test_runs_on_one_server_do_not_see_each_other(postgres_server: postgres.Server) -> None:
    one, two = (Journal(run_url(postgres_server.url, RunId(name))) for name in ("run.one", "run-two"))
    _append(one, 0)
    assert one.head().position == 1 and two.head().position == 0
    # And they do not wait for each other: a transaction of one is open while the other writes.
    with one.store.write():
        _append(two, 0)
    for journal in (one, two):
        journal.close()


def test_a_reader_does_not_make_a_journal(postgres_server: postgres.Server) -> None:
    url = postgres_server.fresh_url()
    with pytest.raises(JournalError, match="holds no journal"):
        Journal(url, create=False)
    Journal(url).close()
    Journal(url, create=False).close()


def test_another_process_opens_the_database_of_a_run_directory(
    postgres_server: postgres.Server, tmp_path: Path
) -> None:
    run = create_run_dir(tmp_path, "pg-7", postgres_server.url)
    subprocess.run([*WRITER, run.database_url, "w", "3"], check=True, stdout=subprocess.DEVNULL)
    journal = Journal(run.database_url, create=False)
    assert journal.verify().position == 3
    journal.close()
    assert not (run.path / "journal.db").exists()


def test_watches_on_two_hosts_share_the_journal_of_a_job(postgres_server: postgres.Server, tmp_path: Path) -> None:
    """Neither sees the other's run directory; the lease in the journal says which one leads."""
    file = parse_watched({"journal": postgres_server.url})
    here = observing_run(tmp_path / "here", "pg-watched", {"n": "http://a:1"}, watched=file)
    with closing(Journal(here.database_url, create=False)) as journal:
        _append(journal, 0)
    there = observing_run(tmp_path / "there", "pg-watched", {"n": "http://a:1"}, watched=file)
    with closing(Journal(there.database_url, create=False)) as journal:
        assert journal.head().position == 1
    Journal(create_run_dir(tmp_path, "pg-own", postgres_server.url).database_url).close()
    with closing(Journal(run_url(postgres_server.url, RunId("pg-own")))) as journal:
        _append(journal, 0)
    with pytest.raises(ConfigError, match="holds the journal of another run"):
        observing_run(tmp_path / "there", "pg-own", {}, watched=file)


def test_no_password_of_a_watch_file_is_in_run_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.watch.agents.Journal", lambda url: Journal(f"sqlite:///{tmp_path}/journal.db"))
    run = observing_run(tmp_path, "r", {}, watched=parse_watched({"journal": WITH_PASSWORD}))
    assert SECRET in run.database_url and SECRET not in (run.path / "run.json").read_text()


# --- URLs and passwords -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mysql://me@host/db", "mysql is not supported"),
        ("postgresql://me@host", "names no database"),
        ("sqlite:///relative.db", "absolute path"),
        ("sqlite://", "names no database"),
        ("postgresql://me@host:port/db", "port"),
        ("nonsense", "no database URL"),
        (7, "valid string"),
    ],
)
def test_a_journal_that_cannot_be_used_is_a_problem_of_the_job_file(text: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"journal": text, "seed": -1})
    (problem,) = [p for p in caught.value.problems if p.startswith("journal: ")]
    assert message in problem
    assert len(caught.value.problems) == 2


def test_no_password_leaves_a_job_except_in_its_own_file(tmp_path: Path) -> None:
    job = parse_job({"journal": WITH_PASSWORD})
    assert job.journal is not None and SECRET in job.journal
    assert SECRET not in job.model_dump_json() and SECRET not in str(job.model_dump())
    assert job.digest() == JobConfig().digest(), "where the journal is does not make runs incomparable"
    assert parse_job(job.model_dump(mode="json")).journal == checked_url(WITH_PASSWORD.replace(SECRET, "***"))
    run = create_run_dir(tmp_path, "r", job.journal)
    assert SECRET in run.database_url
    assert stat.S_IMODE(run.database_path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError) as caught:
        parse_job({"journal": WITH_PASSWORD.replace("postgresql", "oracle")})
    assert SECRET not in str(caught.value) and "***" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a postgresql://me:{SECRET}@h/db b", "a postgresql://me:***@h/db b"),
        (f"postgresql+psycopg://me:{SECRET}@x@h/db", "postgresql+psycopg://me:***@h/db"),
        (f"postgresql://h/db?password={SECRET}&user=me", "postgresql://h/db?password=***&user=me"),
        ("postgresql://me@h/db", "postgresql://me@h/db"),
        ("http://127.0.0.1:80/a", "http://127.0.0.1:80/a"),
        ("sqlite:////runs/journal.db", "sqlite:////runs/journal.db"),
    ],
)
def test_a_password_is_shown_as_stars(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_long_run_id_makes_a_name_that_postgresql_does_not_cut(postgres_server: postgres.Server) -> None:
    url = run_url(postgres_server.url, RunId("r" * 63))
    Journal(url).close()
    Journal(url, create=False).close()
