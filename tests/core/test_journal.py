"""The journal keeps every acknowledged event, in one chain, with any writers and after any death; and it names what was
touched."""

import math
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.core.clock import FakeClock
from rolecall.core.errors import JournalCorrupt, JournalError, LeaseFenced
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.store import GENESIS
from rolecall.core.membership import Actual, Desired, ReplicaState
from tests.core.strategies import JSON_BODIES
from tests.events import filled

WRITER = [sys.executable, "-m", "tests.core.writer"]
ROLLOUT = ReplicaId("rollout/1")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def journal(url: str, clock: FakeClock) -> Iterator[Journal]:
    opened = Journal(url, clock=clock)
    yield opened
    opened.close()


def _write(journal: Journal, num: int) -> None:
    for n in range(num):
        journal.append(filled(EventKind.REPLICA_LOST, {"incarnation": n}))


def _tamper(url: str, *statements: str) -> None:
    """Like a user with a database shell: disables the triggers, then changes rows."""
    engine = sa.create_engine(url)
    with engine.begin() as conn:
        if engine.dialect.name == "sqlite":
            for (name,) in conn.exec_driver_sql("select name from sqlite_master where type = 'trigger'").fetchall():
                conn.exec_driver_sql(f"drop trigger {name}")
        else:
            conn.exec_driver_sql("alter table events disable trigger all")
        for statement in statements:
            assert conn.exec_driver_sql(statement).rowcount, f"{statement} changed nothing"
    engine.dispose()


# --- events -------------------------------------------------------------------------------------------------------


def test_an_event_comes_back_as_it_was_acknowledged(journal: Journal, clock: FakeClock) -> None:
    first = journal.append(filled(EventKind.RUN_STARTED, {"seed": 3}))
    clock.advance(1.5)
    second = journal.append(filled(EventKind.INCIDENT_OPENED, {"window": "w"}), incident_id="i1", caused_by="e1")
    assert [first.seq, second.seq] == [1, 2]
    assert second.wall_at - first.wall_at == 1.5
    assert journal.events() == [first, second]
    assert journal.events(after=1) == journal.events(kinds=[EventKind.INCIDENT_OPENED]) == [second]
    assert journal.events(incident_id="i1") == [second] and journal.events(limit=1) == [first]
    assert (journal.head().position, journal.head().hash) == (2, second.hash)
    assert journal.verify() == journal.head()


def test_an_empty_journal_is_whole(journal: Journal) -> None:
    assert journal.verify() == journal.head()
    assert (journal.head().position, journal.head().hash) == (0, GENESIS)


@settings(max_examples=30)
@given(bodies=st.lists(JSON_BODIES, min_size=1, max_size=5))
def test_any_body_is_kept_and_chained(
    bodies: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    journal = Journal(f"sqlite:///{tmp_path_factory.mktemp('j') / 'journal.db'}")
    for body in bodies:
        journal.append(filled(EventKind.PLAN_CREATED, {"question": body}))
    assert [e.payload.question for e in journal.events()] == bodies
    assert journal.verify().position == len(bodies)
    journal.close()


def test_a_number_that_json_lacks_is_kept_as_a_word_that_float_reads(journal: Journal) -> None:
    # A NaN loss is what a diagnosis will quote: it must neither be lost nor stop its writer.
    event = journal.append(
        filled(EventKind.STEP_COMMITTED, {"loss": math.nan, "reward": math.inf, "health": {"x": -math.inf}})
    )
    assert math.isnan(float(event.payload.loss))
    assert float(event.payload.reward) == math.inf
    assert float(event.payload.to_body()["health"]["x"]) == -math.inf
    assert [e.hash for e in journal.events()] == [event.hash] and journal.verify().position == 1


def test_the_same_key_is_written_once(journal: Journal, clock: FakeClock) -> None:
    first = journal.append(filled(EventKind.PLAN_CREATED, {"outcome": "one"}), key="plan-i1")
    clock.advance(5)
    again = journal.append(filled(EventKind.PLAN_CREATED, {"outcome": "two"}), key="plan-i1")
    assert again == first
    assert len(journal.events()) == 1


def test_threads_share_a_journal(journal: Journal) -> None:
    threads = [threading.Thread(target=_write, args=(journal, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert journal.verify().position == 40


# --- death and concurrency ----------------------------------------------------------------------------------------


def _acknowledged(output: str) -> dict[int, str]:
    """Whole lines only: the last one may have been cut by the kill."""
    whole = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {int(seq): link for seq, link in whole}


def test_sigkill_loses_no_acknowledged_event(url: str, rng: random.Random) -> None:
    acknowledged = dict[int, str]()
    for round_ in range(5):
        argv = [*WRITER, url, f"round-{round_}", "0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            read = [child.stdout.readline() for _ in range(rng.randrange(1, 30))]
            # Dies somewhere inside the next append, at a moment that no test chooses.
            threading.Event().wait(rng.uniform(0, 0.01))
            child.kill()
            read.append(child.stdout.read())
        assert child.returncode == -9
        acknowledged |= _acknowledged("".join(read))
        journal = Journal(url, create=False)
        journal.verify()
        kept = {e.seq: e.hash for e in journal.events()}
        journal.close()
        assert acknowledged.items() <= kept.items()
    assert len(acknowledged) >= 5


def test_several_processes_keep_one_chain(url: str) -> None:
    Journal(url).close()
    argv = [[*WRITER, url, f"w{n}", "20"] for n in range(3)]
    children = [subprocess.Popen(a, stdout=subprocess.PIPE, text=True) for a in argv]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    journal = Journal(url, create=False)
    events = journal.events()
    assert journal.verify().position == len(events) == 3 * (20 + 4)
    for output in outputs:
        seen = list(_acknowledged(output))
        assert len(seen) == 20 and seen == sorted(seen)
    assert [e.payload.epoch for e in events if e.kind is EventKind.EPOCH_ADVANCED] == list(range(1, 13))
    journal.close()


def test_two_processes_may_create_the_same_journal_at_once(url: str) -> None:
    argv = [[*WRITER, url, f"w{n}", "2"] for n in range(3)]
    children = [subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in argv]
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], errors


# --- what was touched is named ------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["events", "ledger"])
@pytest.mark.parametrize("verb", ["UPDATE {} SET hash = ''", "DELETE FROM {}"])
def test_the_database_itself_forbids_changes(journal: Journal, table: str, verb: str) -> None:
    from rolecall.core.ids import GroupId
    from rolecall.core.journal.ledger import GroupState, Ledger, LedgerLine

    _write(journal, 2)
    Ledger(journal.store).write([LedgerLine(group_id=GroupId("g1"), state=GroupState.ISSUED)])
    with pytest.raises(sa.exc.DatabaseError, match=f"{table} is append-only"), journal.store.write() as conn:
        conn.exec_driver_sql(verb.format(table))
    assert journal.verify().position == 2


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("UPDATE events SET body = '{}' WHERE seq = 3", 3),
        ("UPDATE events SET kind = 'run_ended' WHERE seq = 1", 1),
        ("UPDATE events SET wall_at = wall_at + 1 WHERE seq = 5", 5),
        ("UPDATE events SET incident_id = 'i9' WHERE seq = 2", 2),
        ("UPDATE events SET hash = (SELECT hash FROM events WHERE seq = 1) WHERE seq = 4", 4),
        ("DELETE FROM events WHERE seq = 3", 3),
        ("DELETE FROM events WHERE seq = 1", 1),
        ("UPDATE events SET seq = 9 WHERE seq = 5", 5),
    ],
)
def test_a_line_changed_or_removed_is_named(journal: Journal, url: str, statement: str, line: int) -> None:
    _write(journal, 5)
    _tamper(url, statement)
    with pytest.raises(JournalCorrupt) as caught:
        journal.verify()
    assert caught.value.where == f"{journal.store.where}: events line {line}"


def test_a_truncated_tail_shows_against_an_anchor(journal: Journal, url: str) -> None:
    _write(journal, 5)
    anchor = journal.head()
    _tamper(url, "DELETE FROM events WHERE seq > 3")
    assert journal.verify().position == 3 < anchor.position


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 400)


def _damaged_middle(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * (path.stat().st_size - 4096))


def _cut_file(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [_garbage, _damaged_middle, _cut_file])
def test_a_damaged_file_is_named_and_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(f"sqlite:///{path}")
    for n in range(200):
        journal.append(filled(EventKind.REPLICA_LOST, {"incarnation": n, "because": "x" * 200}))
    journal.close()
    harm(path)
    with pytest.raises(JournalCorrupt) as caught:
        opened = Journal(f"sqlite:///{path}", create=False)
        try:
            opened.verify()
        finally:
            opened.close()
    assert caught.value.where and caught.value.reason


def test_a_missing_journal_is_not_made_by_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(JournalError):
        Journal(f"sqlite:///{path}", create=False)
    assert not path.exists()


def test_a_journal_of_a_later_schema_is_refused(journal: Journal, url: str) -> None:
    _tamper(url, "UPDATE meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(JournalCorrupt, match="schema version 99"):
        Journal(url)


# --- leases -------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_refused_and_taken_over_with_a_growing_fence(journal: Journal, clock: FakeClock) -> None:
    first = journal.acquire("watch", "a", 5.0)
    assert first is not None and first.fence == 1
    assert journal.acquire("watch", "b", 5.0) is None
    clock.advance(4)
    renewed = journal.acquire("watch", "a", 5.0)
    assert renewed is not None and (renewed.fence, renewed.expires_at) == (1, clock.wall() + 5)
    assert journal.acquire("watch", "b", 5.0, lapsed=first) is None, "it was renewed since"
    second = journal.acquire("watch", "b", 5.0, lapsed=renewed)
    assert second is not None and second.fence == 2
    assert journal.acquire("watch", "a", 5.0) is None
    assert journal.acquire("watch", "c", 5.0, lapsed=renewed) is None, "another one was faster"
    assert journal.lease("watch") == second and journal.lease("other") is None


def test_a_former_leaseholder_cannot_write(journal: Journal, clock: FakeClock) -> None:
    old = journal.acquire("watch", "a", 5.0)
    assert old is not None
    desired = Desired(replica=ROLLOUT, incarnation=2, node=NodeId("node-4"))
    clock.advance(6)
    journal.append(filled(EventKind.PLAN_CREATED), lease=old)  # lapsed but not taken: no other holder acts
    new = journal.acquire("watch", "b", 5.0, lapsed=old)
    assert new is not None
    with pytest.raises(LeaseFenced) as caught:
        journal.append(filled(EventKind.ACTION_STARTED), lease=old)
    assert (caught.value.fence, caught.value.holder) == (1, "b")
    with pytest.raises(LeaseFenced):
        journal.set_desired(desired, lease=old)
    assert len(journal.events()) == 1 and journal.desired() == {}
    assert journal.set_desired(desired, lease=new)


def test_a_released_lease_is_free_at_once_and_its_number_is_over(journal: Journal) -> None:
    first = journal.acquire("watch", "a", 500.0)
    assert first is not None
    journal.release(first)
    with pytest.raises(LeaseFenced):
        journal.append(filled(EventKind.PLAN_CREATED), lease=first)
    second = journal.acquire("watch", "a", 5.0)
    assert second is not None and second.fence == 2
    journal.release(first)  # of a number that is over: does nothing
    assert journal.lease("watch") == second


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=15))
@settings(max_examples=30)
def test_one_fence_never_has_two_holders(
    steps: list[tuple[str, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = FakeClock()
    journal = Journal(f"sqlite:///{tmp_path_factory.mktemp('j') / 'journal.db'}", clock=clock)
    holder_of, newest = dict[int, str](), 0
    for holder, lapses in steps:
        clock.advance(2.0)
        lease = journal.acquire("watch", holder, 5.0, lapsed=journal.lease("watch") if lapses else None)
        if lease is not None:
            assert holder_of.setdefault(lease.fence, holder) == holder
            assert lease.fence >= newest
            newest = lease.fence
    journal.close()


# --- desired and actual -------------------------------------------------------------------------------------------


def _desired(incarnation: int, node: str = "node-3") -> Desired:
    return Desired(replica=ROLLOUT, incarnation=incarnation, node=NodeId(node), because="because", incident_id="i1")


def test_desired_moves_forward_only_and_only_from_where_it_was_expected(journal: Journal) -> None:
    assert journal.set_desired(_desired(1))
    assert journal.set_desired(_desired(1)), "writing the current record is not a change"
    assert journal.set_desired(_desired(2, "node-4"), expect_incarnation=1)
    assert journal.set_desired(_desired(2, "node-4"), expect_incarnation=1), "the same writer, again after its death"
    assert not journal.set_desired(_desired(3), expect_incarnation=1), "another writer was first"
    assert not journal.set_desired(_desired(1)), "an old incarnation never comes back"
    assert not journal.set_desired(_desired(2, "node-5")), "the same incarnation has one node"
    assert journal.desired() == {ROLLOUT: _desired(2, "node-4")}
    journal.remove_desired(ROLLOUT)
    assert journal.desired() == {}


def _actual(state: ReplicaState, incarnation: int = 1) -> Actual:
    return Actual(replica=ROLLOUT, incarnation=incarnation, node=NodeId("node-3"), state=state, pid=7, start_ticks=9)


def test_a_lost_replica_is_not_called_serving_by_a_late_message(journal: Journal, clock: FakeClock) -> None:
    over = (ReplicaState.LOST, ReplicaState.STOPPED)
    assert journal.set_actual(_actual(ReplicaState.READY), unless=over)
    assert journal.set_actual(_actual(ReplicaState.SERVING), unless=over)
    clock.advance(3)
    assert journal.set_actual(_actual(ReplicaState.LOST))
    assert not journal.set_actual(_actual(ReplicaState.SERVING), unless=over)
    record = journal.actual()[(ROLLOUT, 1)]
    assert (record.state, record.changed_at) == (ReplicaState.LOST, clock.wall())
    assert journal.set_actual(_actual(ReplicaState.STARTING, 2), unless=over), "the next incarnation is another record"
    assert journal.current()[ROLLOUT].incarnation == 2
    assert set(journal.actual()) == set(journal.actual([ROLLOUT])) == {(ROLLOUT, 1), (ROLLOUT, 2)}
    assert journal.actual([]) == journal.actual([ReplicaId("trainer/0")]) == {}


# --- epochs, flags, windows ---------------------------------------------------------------------------------------


def test_epochs_grow_by_one_and_are_journaled_with_their_members(journal: Journal) -> None:
    assert journal.epoch() is None
    first = journal.grow_epoch([("trainer/1", 1), ("rollout/0", 1), ("trainer/0", 1)], because="start")
    second = journal.grow_epoch([("trainer/0", 1)], because="trainer/1 is lost")
    assert (first.number, second.number) == (1, 2)
    assert first.members == (("rollout/0", 1), ("trainer/0", 1), ("trainer/1", 1))
    assert journal.epoch() == second
    bodies = [e.payload.to_body() for e in journal.events(kinds=[EventKind.EPOCH_ADVANCED])]
    assert [b["epoch"] for b in bodies] == [1, 2]
    assert bodies[1] == {"epoch": 2, "members": [["trainer/0", 1]], "because": "trainer/1 is lost"}


def test_flags_are_set_replaced_and_removed(journal: Journal) -> None:
    assert journal.flag("paused") is None
    journal.set_flag("paused", "by me")
    journal.set_flag("paused", "by you")
    assert journal.flag("paused") == "by you"
    journal.set_flag("paused", "me: caf\udce9")  # bytes of a command line that are not UTF-8
    assert journal.flag("paused") == "me: caf\N{REPLACEMENT CHARACTER}"
    journal.set_flag("paused", None)
    journal.set_flag("paused", None)
    assert journal.flag("paused") is None


def test_reads_within_a_view_see_one_state(journal: Journal) -> None:
    with journal.view():
        assert journal.flag("paused") is None and journal.head().position == 0
        journal.set_flag("paused", "by a test")
        _write(journal, 1)
        assert journal.flag("paused") is None and journal.events() == []
    assert journal.flag("paused") == "by a test" and len(journal.events()) == 1


def test_an_error_within_a_view_ends_it(journal: Journal) -> None:
    with pytest.raises(ValueError, match="of the reader"), journal.view():
        assert journal.head().position == 0
        raise ValueError("of the reader")
    _write(journal, 1)
    assert journal.head().position == 1


def test_the_first_window_saved_under_a_name_stays(journal: Journal) -> None:
    journal.save_window("i1", "window", {"series": [1.0, 2.0]})
    journal.save_window("i1", "window", {"series": []})
    journal.save_window("i1", "config", {"a": 1})
    assert journal.windows("i1") == {"window": {"series": [1.0, 2.0]}, "config": {"a": 1}}
    assert journal.windows("i2") == {}
