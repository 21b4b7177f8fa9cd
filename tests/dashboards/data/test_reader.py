"""The reader: new events are read, pages do not wait long, and every error is reported in a sentence."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.errors import JournalError, JournalUnavailable
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data import reader as reading
from rolecall.dashboards.data.reader import JournalReadError, JournalSnapshot, Reader, Readers
from rolecall.dashboards.settings import Settings
from tests.dashboards.big_journal import BigJournal
from tests.dashboards.made_runs import MadeRun, damage
from tests.events import filled
from tests.postgres import server
from tests.support import eventually


@contextmanager
def reader_of(url: str, clock: FakeClock | None = None) -> Iterator[Callable[[], JournalSnapshot]]:
    """A function that returns the next snapshot: the clock is advanced, so that it is a new one."""
    clock = clock or FakeClock(wall_offset=SystemClock().wall() - 1000.0)
    reader = Reader(Settings(journal_url=url), clock)

    def read() -> JournalSnapshot:
        clock.advance(reading.SNAPSHOT_SECONDS)
        found: list[JournalSnapshot] = []
        eventually(lambda: found.append(reader.fresh()) or "has not responded" not in found[-1].because, "a snapshot")
        return found[-1]

    try:
        yield read
    finally:
        reader.close()


def test_what_was_written_since_is_in_the_next_snapshot(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    with reader_of(made.run.database_url) as read:
        first = read()
        assert (first.error, first.run.step, len(first.projection.incidents)) == (JournalReadError.NONE, 29, 0)
        assert read().version == first.version  # nothing happened
        plan = made.open()
        second = read()
        assert [i.incident_id for i in second.projection.open_incidents()] == ["i-1"] and second.version > first.version
        made.plan(plan)
        made.act(plan)
        made.resolve(plan)
        assert not read().projection.open_incidents()
        assert [i.incident_id for i in second.projection.open_incidents()] == ["i-1"]  # a snapshot never changes


def test_a_run_whose_page_is_open_is_followed_however_many_others_are_looked_at(tmp_path: Path) -> None:
    clock = FakeClock(wall_offset=SystemClock().wall() - 1000.0)
    readers = Readers(clock)
    made = [MadeRun(tmp_path, run_id=f"run-{n}", num_steps=1) for n in range(reading.READERS_MAX + 2)]
    of = [Settings(journal_url=one.run.database_url) for one in made]
    shown = readers.get(of[0])
    assert shown.fresh().run.step == 0
    other = [readers.get(one) for one in of[1:]]
    made[0].open()
    clock.advance(reading.SNAPSHOT_SECONDS)
    assert shown.fresh().projection.open_incidents(), "its page has no other reader until its next refresh"

    clock.advance(reading.IDLE_SECONDS)
    assert readers.get(of[0]) is shown
    clock.advance(1.0)
    assert readers.get(of[0]) is shown and readers.get(of[-1]) is other[-1]
    assert readers.get(of[1]) is not other[0], "nobody had looked at it for long, so it was closed and is read anew"
    for settings in of:
        readers.get(settings).close()


def test_what_an_open_incident_costs_grows_with_time_alone(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    plan = made.open()
    made.plan(plan)
    made.act(plan)
    clock = FakeClock(wall_offset=SystemClock().wall() - 1000.0)
    with reader_of(made.run.database_url, clock) as read:
        before = read().trends.account
        clock.advance(60.0)
        after = read().trends.account
    assert before is not None and after is not None
    assert sum(after.lost.values()) - sum(before.lost.values()) == pytest.approx(61.0 / 4, rel=0.1)  # one of four


def test_records_and_flags_are_news_too(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    with reader_of(made.run.database_url) as read:
        before = read()
        made.state("rollout/0", ReplicaState.LOST)
        lost = read()
        assert {r.replica: r.state for r in lost.run.replicas}["rollout/0"] == "lost"
        assert lost.version > before.version
        made.journal.set_flag("paused", "by anna: night")
        assert read().run.paused == "by anna: night"
        made.say(K.NODE_QUARANTINED, {"node": "node-3", "by": "anna", "because": "XID 79"})
        made.say(K.NODE_QUARANTINED, {"node": "node-4", "by": "anna", "because": "XID 79"})
        made.say(K.NODE_RETURNED_TO_SERVICE, {"node": "node-4", "by": "anna", "because": "replaced"})
        assert read().quarantined == {"node-3"}


def test_no_journal_an_empty_file_and_a_journal_without_a_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    with reader_of(url) as read:
        assert read().error is JournalReadError.MISSING
        (tmp_path / "journal.db").touch()
        assert read().error is JournalReadError.EMPTY
        (tmp_path / "journal.db").unlink()
        Journal(url).close()
        nothing = read()
        assert (nothing.error, nothing.usable) == (JournalReadError.EMPTY, False)
        Journal(url).append(filled(K.RUN_STARTED, {"num_steps": 3}))
        assert read().error is JournalReadError.NONE  # the page goes on by itself


def test_another_schema_version_is_reported(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    with sqlite3.connect(made.run.path / "journal.db") as conn:
        conn.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    with reader_of(made.run.database_url) as read:
        found = read()
    assert found.error is JournalReadError.OLD and "schema version 99" in found.because


@pytest.mark.parametrize("body", ["{", "[]", '{"diagnosis": 3}'])
def test_damaged_lines_are_named_and_the_rest_is_shown(tmp_path: Path, body: str) -> None:
    made = MadeRun(tmp_path)
    made.open(name="i-1")
    opened = made.journal.head().position
    made.open(replica="rollout/0", name="i-2")
    damage(made.run, opened, body)
    with reader_of(made.run.database_url) as read:
        found = read()
    assert [i.incident_id for i in found.projection.open_incidents()] == ["i-2"] and "i-1" in found.projection.broken
    if body != '{"diagnosis": 3}':  # that one is readable, and means nothing
        assert found.error is JournalReadError.DAMAGED and str(opened) in found.because and found.num_damaged == 1


def test_a_step_without_its_number_stops_nothing(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.journal.append_unchecked(K.STEP_COMMITTED, {"reward": 1.0})
    line = made.journal.head().position
    made.say(K.STEP_COMMITTED, {"step": 30, "reward": 1.0})
    with reader_of(made.run.database_url) as read:
        found = read()
    assert found.run.step == 30 and str(line) in found.because


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.journal.close()
    with reader_of(made.run.database_url) as read:
        assert read().run.step == 29
        for path in made.run.path.glob("journal.db*"):
            path.unlink()
        (made.run.path / "journal.db").write_bytes(b"no database" * 500)
        found = read()
    assert found.error is JournalReadError.DAMAGED
    assert found.run.step == 29  # what was known stays


def test_another_run_in_its_place_is_read_from_its_beginning(tmp_path: Path) -> None:
    one, other = MadeRun(tmp_path / "a"), MadeRun(tmp_path / "b", num_steps=3)
    one.open()
    for made in (one, other):
        made.journal.close()
    with reader_of(one.run.database_url) as read:
        assert read().run.step == 29
        for path in one.run.path.glob("journal.db*"):
            path.unlink()
        shutil.copy(other.run.path / "journal.db", one.run.path / "journal.db")
        found = read()
    assert (found.run.step, len(found.projection.incidents)) == (2, 0)


def test_a_locked_journal_keeps_no_one_waiting(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.journal.close()
    holder = sqlite3.connect(made.run.path / "journal.db", isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    reader = Reader(Settings(journal_url=made.run.database_url), SystemClock())
    try:
        found = reader.latest()
        assert found.error is JournalReadError.UNREACHABLE and not found.usable and "locked" in found.because
        with pytest.raises(JournalUnavailable), reader.journal():
            raise AssertionError("no page may wait for it")
        holder.close()
        eventually(lambda: reader.latest().error is JournalReadError.NONE, "it goes on by itself")
        with reader.journal() as journal:
            assert journal.head().position > 0
    finally:
        holder.close()
        reader.close()


def test_the_newest_of_a_long_journal_is_there_first(tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=40, num_incidents=300, open_incidents=3).build()
    clock = FakeClock(wall_offset=1_700_000_000.0 - 1000.0)
    reader = Reader(Settings(journal_url=run.database_url), clock)
    try:
        first = reader.latest()
        if not first.usable:  # a machine under load: the first read took longer than a page waits
            eventually(lambda: reader.latest().usable, "the first snapshot")
            first = reader.latest()
        assert len(first.projection.open_incidents()) == 3 and first.run.step == 300
        assert {f"i-{n:04d}" for n in range(210, 301)} <= {name[:6] for name in first.projection.incidents}

        def whole() -> bool:
            clock.advance(reading.SNAPSHOT_SECONDS)
            return reader.latest().history.whole

        eventually(whole, "the whole history is read")
        last = reader.latest()
        assert (
            len(last.projection.incidents) == 300
            and len(last.projection.open_incidents()) == 3
            and not last.projection.broken
        )
        assert last.trends.account is not None
    finally:
        reader.close()


def test_a_long_journal_is_not_read_whole_for_the_first_snapshot(tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=20, num_incidents=300).build()
    following = reading._Following(Settings(journal_url=run.database_url), SystemClock())
    first = following.read()
    assert not first.history.whole and first.history.read == 0
    assert 100 <= len(first.projection.incidents) < 110
    following.close()


def test_a_read_without_news_runs_few_queries(tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=100, num_incidents=50).build()
    following = reading._Following(Settings(journal_url=run.database_url), SystemClock())
    following.read()
    asked: list[str] = []
    assert following._journal is not None
    sa.event.listen(
        following._journal.store.engine, "before_cursor_execute", lambda c, k, statement, *rest: asked.append(statement)
    )
    following.read()
    following.close()
    selects = [s for s in asked if s.startswith("SELECT")]
    assert 0 < len(selects) <= 6 and not any("FROM desired" in s and "sum" not in s for s in selects)


def test_the_journal_that_big_journal_makes_is_a_real_one(tmp_path: Path) -> None:
    run = BigJournal(tmp_path, num_replicas=16, num_incidents=20).build()
    journal = Journal(run.database_url, create=False)
    assert journal.verify().position == journal.head().position > 200
    journal.close()


def test_a_password_is_never_reported(tmp_path: Path) -> None:
    url = "postgresql+psycopg://anna:s3cret@127.0.0.1:1/nowhere"
    with reader_of(url) as read:
        found = read()
    assert found.error in (JournalReadError.UNREACHABLE, JournalReadError.MISSING)  # without the driver it is missing
    assert "s3cret" not in repr(found) and "s3cret" not in repr(Settings(journal_url=url))


@pytest.mark.slow
def test_a_postgresql_that_goes_away_and_comes_back() -> None:
    with server() as pg:
        url = pg.fresh_url()
        journal = Journal(url)
        journal.append(filled(K.RUN_STARTED, {"num_steps": 3}))
        journal.close()
        reader = Reader(Settings(journal_url=url), SystemClock())
        try:
            eventually(lambda: reader.latest().error is JournalReadError.NONE, "it is read")
            pg.kill()
            eventually(lambda: reader.latest().error is JournalReadError.UNREACHABLE, "it is away")
            assert reader.latest().run.num_steps == 3
            pg.start()
            eventually(lambda: reader.latest().error is JournalReadError.NONE, "it is back")
        finally:
            reader.close()


def test_a_finished_run_keeps_its_words(fake_run: RunDir) -> None:
    with reader_of(fake_run.database_url) as read:
        found = read()
    assert found.run.ended == "completed" and found.projection.ended == "all 120 steps are committed"


def test_one_question_of_a_page_raises_what_a_page_can_show(tmp_path: Path) -> None:
    reader = Reader(Settings(journal_url=f"sqlite:///{tmp_path / 'none.db'}"), SystemClock())
    with pytest.raises(JournalError), reader.journal():
        pass
    reader.close()
