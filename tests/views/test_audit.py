"""The audit of a run holds for a run that holds, and names whatever was done to its journal, ledger or checkpoints."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import JournalCorrupt, JournalError
from rolecall.core.ids import GroupId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.ledger import GroupState, LedgerLine
from rolecall.core.rundir import RunDir
from rolecall.reports.report import write_report
from rolecall.views.audit import admitted, audit_run, audit_text, compare_steps
from tests.events import made_event
from tests.fake_run import KILL, FakeRun

K = EventKind


def _sql(run: RunDir, *statements: str) -> None:
    with sqlite3.connect(run.path / "journal.db") as db:
        for (name,) in db.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            db.execute(f"drop trigger {name}")
        for statement in statements:
            assert db.execute(statement).rowcount, f"{statement} changed nothing"
    db.close()


def test_a_run_that_holds(fake_run: RunDir) -> None:
    found = audit_run(fake_run)
    assert found.ok, found.problems
    assert (found.ledger.groups_trained, found.ledger.groups_dropped, found.ledger.duplicates) == (960, 3, 0)
    assert found.num_anchors == 120 + 6 + 1  # every committed step, every checkpoint, the controller's last word
    assert found.weights_proven == 2
    back = {(a.replica, a.incarnation) for a in found.admissions if a.readmitted}
    assert back == {("rollout/0", 2), ("rollout/1", 2)}
    assert "the audit holds" in audit_text(found)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM ledger WHERE seq = 100", "ledger line 100 is missing"),
        ("UPDATE ledger SET num_tokens = 1 WHERE seq = 100", "ledger line 100 (group g00"),
        ("UPDATE ledger SET state = 'dropped' WHERE seq = 2", "ledger line 2 (group g00"),
        ("DELETE FROM ledger WHERE seq = 1", "ledger line 1 is missing"),
        ("DELETE FROM ledger WHERE seq > 2000", "its tail was truncated"),
        ("DELETE FROM ledger WHERE seq = (SELECT max(seq) FROM ledger)", "its tail was truncated"),
        ("DELETE FROM ledger", "its tail was truncated"),
        ("DELETE FROM events WHERE seq = 1", "events line 1: line is missing"),
        ("DELETE FROM events WHERE seq = 50", "journal.db: events line 50"),
        ("UPDATE events SET body = '{}' WHERE seq = 60", "journal.db: events line 60"),
        ("UPDATE events SET kind = 'no such kind' WHERE seq = 60", "journal.db: events line 60"),
    ],
)
def test_what_was_done_to_the_database_is_named(fake_run: RunDir, statement: str, said: str) -> None:
    _sql(fake_run, statement)
    found = audit_run(fake_run)
    assert not found.ok
    assert any(said in p for p in found.problems), found.problems
    assert said in audit_text(found)


def test_a_ledger_line_repeated_is_named(fake_run: RunDir) -> None:
    columns = "group_id, state, step, num_tokens, reason, wall_at, hash"
    _sql(
        fake_run,
        f"INSERT INTO ledger (seq, {columns}) SELECT (SELECT max(seq) + 1 FROM ledger), {columns} FROM ledger WHERE "
        f"seq = 17",
    )
    found = audit_run(fake_run)
    assert not found.ok and "was changed: its hash does not match" in found.problems[0]


@pytest.mark.parametrize("line", [1, 17, 1100, -1])
def test_a_ledger_line_removed_and_the_rest_numbered_again_is_named(fake_run: RunDir, line: int) -> None:
    last = audit_run(fake_run).ledger.head.position
    line = last if line == -1 else line
    _sql(fake_run, f"DELETE FROM ledger WHERE seq = {line}")
    if line < last:
        _sql(
            fake_run,
            f"UPDATE ledger SET seq = -seq WHERE seq > {line}",
            "UPDATE ledger SET seq = -seq - 1 WHERE seq < 0",
        )
    problems = audit_run(fake_run).problems
    said = f"ledger line {line} (group" if line < last else "its tail was truncated"
    assert any(said in p for p in problems), problems


def test_a_ledger_line_repeated_in_its_place_is_named(fake_run: RunDir) -> None:
    columns = "group_id, state, step, num_tokens, reason, wall_at, hash"
    _sql(
        fake_run,
        "UPDATE ledger SET seq = -seq WHERE seq > 17",
        "UPDATE ledger SET seq = -seq + 1 WHERE seq < 0",
        f"INSERT INTO ledger (seq, {columns}) SELECT 18, {columns} FROM ledger WHERE seq = 17",
    )
    assert "ledger line 18 (group" in audit_run(fake_run).problems[0]


@pytest.mark.parametrize("column", ["group_id", "state", "step", "num_tokens", "reason", "wall_at", "hash"])
def test_each_column_of_the_last_line_is_covered(fake_run: RunDir, column: str) -> None:
    other = {"step": "step + 1", "num_tokens": "num_tokens + 1", "wall_at": "wall_at + 1", "state": "'returned'"}
    _sql(
        fake_run,
        f"UPDATE ledger SET {column} = {other.get(column, repr('x'))} WHERE seq = (SELECT max(seq) FROM ledger)",
    )
    assert any("was changed: its hash does not match" in p for p in audit_run(fake_run).problems)


def test_the_very_last_lines_cut_off_are_found_by_the_controllers_last_word(tmp_path: Path) -> None:
    """A group issued and dropped after the last commit: no step misses it, and there is no report yet."""
    fake = FakeRun(tmp_path, num_steps=10, strikes=())
    end, late = fake._end, GroupId("g77777")

    def drop_and_end() -> None:
        fake.ledger.write([LedgerLine(group_id=late, state=GroupState.ISSUED)])
        fake.ledger.write([LedgerLine(group_id=late, state=GroupState.DROPPED, reason="the run ended")])
        end()

    fake._end = drop_and_end  # type: ignore[method-assign]
    run = fake.build()
    assert audit_run(run).ok
    last = audit_run(run).ledger.head.position
    _sql(run, f"DELETE FROM ledger WHERE seq > {last - 2}", "DELETE FROM ledger_groups WHERE group_id = 'g77777'")
    (problem,) = audit_run(run).problems
    assert (
        problem == f"the controller's last word has {last} ledger lines, the ledger {last - 2}: its tail was truncated"
    )


@pytest.mark.parametrize("word", ["{", "3", '{"ledger": 3}', "{}"])
def test_a_last_word_without_a_head_is_a_problem(fake_run: RunDir, word: str) -> None:
    _sql(fake_run, f"UPDATE flags SET value = '{word}' WHERE name = 'done'")
    found = audit_run(fake_run)
    assert found.problems == ("the controller's last word holds no ledger head",) and found.num_anchors == 120 + 6


def test_the_last_event_cut_off_is_found_by_the_report(fake_run: RunDir) -> None:
    assert write_report(fake_run)["ok"]
    _sql(fake_run, "DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)")
    assert any("report.json knows" in p and "journal lines" in p for p in audit_run(fake_run).problems)


def test_a_ledger_tail_cut_off_is_found_by_a_checkpoint_alone(fake_run: RunDir) -> None:
    _sql(fake_run, "DELETE FROM events", "DELETE FROM ledger WHERE seq > 100")
    problems = audit_run(fake_run).problems
    assert any(p.startswith("checkpoint step-00000119 has") and "truncated" in p for p in problems), problems


def test_a_journal_tail_cut_off_is_found_by_the_report(fake_run: RunDir) -> None:
    assert write_report(fake_run)["ok"]
    _sql(fake_run, "DELETE FROM events WHERE seq > 500")
    problems = audit_run(fake_run).problems
    assert any(p.startswith("report.json knows") and "the journal has 500" in p for p in problems), problems


def test_writing_the_report_again_does_not_bless_what_was_cut(fake_run: RunDir) -> None:
    before = write_report(fake_run)["audit"]["ledger_head"]
    last = before["position"]
    _sql(fake_run, f"DELETE FROM ledger WHERE seq > {last - 4}")
    for _ in range(2):
        again = write_report(fake_run)
        assert not again["ok"] and again["audit"]["ledger_head"] == before
    assert not audit_run(fake_run).ok


def _changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step": 39', b'"step": 38'))


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("commit.json", _changed, "commit.json was changed"),
        ("commit.json", lambda p: p.write_bytes(b""), "cannot be read"),
        ("commit.json", lambda p: p.unlink(), "cannot be read"),
        ("meta.json", lambda p: p.write_bytes(b"{}"), "cannot be read"),
        ("meta.json", lambda p: p.write_text("[1]"), "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named(fake_run: RunDir, name: str, harm: Callable[[Path], Any], said: str) -> None:
    harm(fake_run.checkpoints / "step-00000039" / name)
    found = audit_run(fake_run)
    assert [p for p in found.problems if "checkpoint step-00000039" in p and said in p], found.problems


def test_a_run_that_has_not_ended_has_open_groups_and_no_problem(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, num_steps=10, strikes=(), finish=False).build()
    found = audit_run(run)
    assert found.ok and "has not ended" in found.notes[0]


def test_no_journal_and_a_file_that_is_none(tmp_path: Path, fake_run: RunDir) -> None:
    with pytest.raises(JournalError):
        audit_run(RunDir(tmp_path))
    (fake_run.path / "journal.db").write_bytes(b"garbage" * 1000)
    for rest in ("journal.db-wal", "journal.db-shm"):
        (fake_run.path / rest).unlink(missing_ok=True)
    with pytest.raises(JournalCorrupt, match=r"journal\.db"):
        audit_run(fake_run)


def test_a_damaged_report_is_a_problem(fake_run: RunDir) -> None:
    (fake_run.path / "report.json").write_text("{")
    assert any("report.json cannot be read" in p for p in audit_run(fake_run).problems)


# --- steps --------------------------------------------------------------------------------------------------------


def _event(kind: EventKind, **body: Any) -> Event:
    return made_event(seq=1, kind=kind, wall_at=1.0, body=body)


def _lines(*moves: tuple[str, str, int]) -> list[dict[str, Any]]:
    return [{"group_id": g, "state": state, "step": step} for g, state, step in moves]


@pytest.mark.parametrize(
    ("reported", "moves", "complete", "num_problems"),
    [
        ({0: ["a", "b"]}, [("a", "trained", 0), ("b", "trained", 0)], True, 0),
        ({0: ["a", "b"]}, [("a", "trained", 0)], True, 1),
        ({0: ["a"]}, [("a", "trained", 0), ("b", "trained", 0)], True, 1),
        ({}, [("a", "trained", 0)], True, 0),  # a journal without steps has nothing to say
        ({0: ["a"]}, [("a", "trained", 0), ("b", "trained", 1)], True, 1),
        ({0: ["a"]}, [("a", "trained", 0), ("b", "trained", 1)], False, 0),
        ({0: ["a"], 1: ["b"]}, [("a", "trained", 0), ("b", "trained", 1), ("b", "undone", 0)], True, 0),
        ({0: ["a"], 1: ["b"]}, [("a", "trained", 0)], False, 0),  # died between the event and the ledger
        ({0: ["a"], 1: ["b"]}, [("a", "trained", 0)], True, 1),
        ({0: ["a"], 1: ["b"]}, [("b", "trained", 1)], False, 1),
    ],
)
def test_journal_and_ledger_agree_on_each_step(
    reported: dict[int, list[str]], moves: list[tuple[str, str, int]], complete: bool, num_problems: int
) -> None:
    events = [_event(K.STEP_COMMITTED, step=s, groups=g) for s, g in reported.items()]
    assert len(compare_steps(events, _lines(*moves), complete=complete)) == num_problems


# --- proofs -------------------------------------------------------------------------------------------------------

PROOF = {"manifest_digest": "m", "received_digest": "m", "storage_digest": "s", "canary_logprobs": [-1.0]}


def _admit(replica: str, incarnation: int, **changes: Any) -> Event:
    body = {"replica": replica, "incarnation": incarnation, "policy_version": 3, "proof": {**PROOF, **changes}}
    return _event(K.WEIGHTS_ADMITTED, **body)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"received_digest": "x"}, "bytes received are not the manifest's"),
        ({"manifest_digest": ""}, "without a whole proof"),
        ({"canary_logprobs": []}, "without a whole proof"),
        ({"manifest_digest": "n", "received_digest": "n"}, "another manifest than its peers"),
        ({"storage_digest": "t"}, "another storage digest than its peers"),
    ],
)
def test_a_proof_that_does_not_prove_is_a_problem(changes: dict[str, Any], said: str) -> None:
    good, bad = admitted([_admit("rollout/0", 1), _admit("rollout/1", 2, **changes)])
    assert not good.problem and not good.readmitted
    assert said in bad.problem and bad.readmitted


def test_a_later_bad_proof_of_the_same_incarnation_is_not_hidden_by_its_first() -> None:
    (found,) = admitted([_admit("rollout/0", 1), _admit("rollout/0", 1, received_digest="x")])
    assert found.problem


def test_a_promoted_standby_is_a_readmission_even_as_first_incarnation() -> None:
    ready = _event(K.REPLICA_READY, replica="rollout/0", incarnation=1, from_standby="standby/0")
    assert admitted([ready, _admit("rollout/0", 1)])[0].readmitted


def test_an_unproven_readmission_fails_the_audit_of_a_run(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, num_steps=60, strikes=(KILL,))
    fake.at(70.0, lambda: fake.say(K.WEIGHTS_ADMITTED, {"replica": "rollout/1", "incarnation": 2, "policy_version": 9}))
    found = audit_run(fake.build())
    assert found.weights_proven == 0
    assert any(p.startswith("rollout/1#2: admitted to version 9 without") for p in found.problems)


def test_foreign_text_does_not_reach_the_terminal(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, num_steps=3, strikes=())
    evil = GroupId("g99999")
    lines = [
        LedgerLine(group_id=evil, state=GroupState.ISSUED),
        LedgerLine(group_id=evil, state=GroupState.DROPPED, reason="\x1b[2J\x1b]0;owned\x07"),
    ]
    fake.at(25.0, lambda: fake.ledger.write(lines))
    text = audit_text(audit_run(fake.build()))
    assert "owned" in text and "\x1b" not in text and "\x07" not in text
    json.dumps(text)
