"""A damaged run is named and refused by every command, with exit code 2 and no traceback; what is still good is
offered."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.rundir import RunDir
from rolecall.reports.report import write_report
from rolecall.views.audit import newest_whole

Harm = Callable[[Path], None]
COMMANDS = {
    "status": ("status", "{run}"),
    "incidents": ("incidents", "--run", "{run}"),
    "incident": ("incidents", "i-1", "--run", "{run}"),
    "audit": ("audit", "{run}"),
    "replay": ("replay", "i-1", "--run", "{run}"),
    "report": ("report", "{run}"),
    "watch": ("watch", "run", "{run}"),
    "pause": ("pause", "--reason", "x", "--run", "{run}"),
    "replace": ("replace", "rollout/1", "--reason", "x", "--run", "{run}"),
}


def _run(capsys: pytest.CaptureFixture[str], run: RunDir, command: str) -> tuple[int, str, str]:
    argv = [a.format(run=run.run_id) for a in COMMANDS[command]]
    code = main([*argv, "--runs", str(run.path.parent)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "defect" not in said.err
    return code, said.out, said.err


def _bytes(change: Callable[[bytes], bytes]) -> Harm:
    def harm(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute("pragma wal_checkpoint(truncate)")
        db.close()
        for rest in ("journal.db-wal", "journal.db-shm"):
            path.with_name(rest).unlink(missing_ok=True)
        path.write_bytes(change(path.read_bytes()))

    return harm


def _sql(statement: str) -> Harm:
    def harm(path: Path) -> None:
        with sqlite3.connect(path) as db:
            for (name,) in db.execute("select name from sqlite_master where type = 'trigger'").fetchall():
                db.execute(f"drop trigger {name}")
            db.execute(statement)
        db.close()

    return harm


def _missing(path: Path) -> None:
    for p in path.parent.glob("journal.db*"):
        p.unlink()


def _directory(path: Path) -> None:
    _missing(path)
    path.mkdir()


HARMS: dict[str, tuple[Harm, str]] = {
    "garbage": (_bytes(lambda b: b"garbage" * 1000), "not a database"),
    "header": (_bytes(lambda b: b"\0" * 16 + b[16:]), "not a database"),
    "truncated": (_bytes(lambda b: b[: len(b) // 2 + 100]), "malformed"),
    "overwritten": (_bytes(lambda b: b[:8192] + b"\xff" * (len(b) - 8192)), "malformed"),
    "empty": (_bytes(lambda b: b""), "the file is empty"),
    "missing": (_missing, "the file is missing"),
    "directory": (_directory, "not a file"),
    "another version": (_sql("update meta set value = '99'"), "schema version 99, this rolecall reads"),
    "a table missing": (_sql("drop table events"), "no such table: events"),
    "no text": (_sql("update events set body = cast(x'ff7b' as text) where kind = 'incident_opened'"), "UTF-8"),
}


MATRIX = [
    *((harm, command) for harm in HARMS for command in ("status", "audit", "watch")),
    *(("truncated", command) for command in COMMANDS if command not in ("status", "audit", "watch")),
    ("no text", "report"),
]


@pytest.mark.parametrize(("harm", "command"), MATRIX)
def test_a_journal_that_cannot_be_read_is_named_and_refused(
    fake_run: RunDir, harm: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.recovery.loop.DAMAGED_TICKS_MAX", 2)  # each is a second
    do, said = HARMS[harm]
    do(fake_run.path / "journal.db")
    code, out, err = _run(capsys, fake_run, command)
    if command == "audit" and harm in ("a table missing", "no text"):
        # The file opens, its events do not hold: that is what an audit is for, and it reports on the ledger all the same.
        assert code == 1
        err = out
    else:
        assert code == 2 and out == ""
    assert str(fake_run.path / "journal.db") in err and said in err


@pytest.mark.parametrize(
    ("statement", "command", "said"),
    [
        ("update actual set state = 'nope' where replica = 'rollout/1'", "status", "actual record of rollout/1#"),
        ("update actual set state = 'nope' where replica = 'rollout/1'", "report", "actual record of rollout/1#"),
        ("update events set body = '{' where incident_id = 'i-1'", "incident", "events line "),
        ("update events set body = '{}' where kind = 'plan_created'", "replay", "events line "),
        ("insert into windows values ('i-1', 'observations', x'00')", "replay", "window 'observations' of i-1"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    fake_run: RunDir, statement: str, command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "replay" and "windows" in statement:
        _with_a_question(fake_run)
    _sql(statement)(fake_run.path / "journal.db")
    code, _, err = _run(capsys, fake_run, command)
    assert code == 2
    if command == "incident":
        assert "i-1 is set aside" in err
    assert f"{fake_run.path / 'journal.db'}: {said}" in err


def _with_a_question(run: RunDir) -> None:
    """The plan of incident i-1 as a real watch writes it."""
    from rolecall.core.config.job import RecoveryConfig
    from rolecall.core.diagnosis import Diagnosis
    from rolecall.core.ids import IncidentId
    from rolecall.core.journal.events import EventKind
    from rolecall.core.journal.journal import Journal
    from rolecall.core.journal.payloads.recovery import PlanCreated
    from rolecall.recovery.fleet_view import fleet_view
    from rolecall.recovery.policy import PolicyInput, decide

    journal = Journal(run.database_url, create=False)
    (opened,) = journal.events(kinds=[EventKind.INCIDENT_OPENED], incident_id="i-1")
    asked = PolicyInput(
        incident_id=IncidentId("i-1"),
        diagnosis=Diagnosis.from_dict(opened.payload.to_body()["diagnosis"]),
        fleet=fleet_view(journal.desired(), journal.current()),
        config=RecoveryConfig(),
        past=(),
        supports=frozenset(),
    )
    verdict, question = decide(asked), asked.to_dict()
    created = PlanCreated(
        plan=verdict.plan, page_oncall=verdict.page_oncall, outcome=str(verdict.outcome), question=question
    )
    body = json.dumps(created.to_body())
    journal.close()
    _sql(f"update events set body = '{body.replace(chr(39), chr(39) * 2)}' where kind = 'plan_created'")(
        run.path / "journal.db"
    )


def test_a_pause_needs_no_incident_to_be_readable(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    HARMS["no text"][0](fake_run.path / "journal.db")
    code, out, _ = _run(capsys, fake_run, "pause")
    assert code == 0 and "is paused" in out


def test_an_incident_that_cannot_be_read_does_not_hide_the_others(
    fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _sql("update events set body = '{' where kind = 'plan_created' and incident_id = 'i-2'")(
        fake_run.path / "journal.db"
    )
    code, out, _ = _run(capsys, fake_run, "status")
    assert code == 1 and "SET ASIDE: i-2: " in out and "journal.db: events line" in out
    code, out, _ = _run(capsys, fake_run, "incidents")
    assert code == 1 and "i-1 resolved" in out and "i-2 SET ASIDE" in out and "i-3 resolved" in out
    code, out, _ = _run(capsys, fake_run, "audit")
    assert code == 1 and "PROBLEM" in out


@pytest.mark.parametrize("command", ["status", "audit", "report", "watch"])
def test_an_unknown_run_is_said(fake_run: RunDir, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, RunDir(fake_run.path.parent / "nowhere"), command)
    assert code == 2 and out == "" and "nowhere: no run of this name" in err


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\udcff"])
def test_a_damaged_run_file_is_named(fake_run: RunDir, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_run.path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    code, _, err = _run(capsys, fake_run, "watch")
    assert code == 2 and f"{fake_run.path / 'run.json'}: damaged" in err


@pytest.mark.parametrize("command", ["up", "export", "notify", "status"])
def test_a_run_file_without_its_parts_is_named(
    fake_run: RunDir, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fake_run.path / "run.json"
    value = json.loads(file.read_text())
    part, content = ("agents", ["http://n:1"]) if command == "status" else ("config", None)
    file.write_text(json.dumps({**value, part: content}))
    (fake_run.path / "model").mkdir()
    argv = {
        "up": ("up", str(fake_run.path)),
        "export": ("export", str(fake_run.path), "--out", str(tmp_path / "out")),
        "notify": ("notify", "test", str(fake_run.path)),
        "status": ("status", str(fake_run.path)),
    }[command]
    assert main([*argv]) == 2
    assert f"rolecall: {file}: damaged: {part} is not a mapping" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"sqlite:////caf\xe9/journal.db", b"garbage", b"postgresql+psycopg"])
def test_a_damaged_address_of_the_journal_is_named(
    fake_run: RunDir, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run.database_path.write_bytes(content)
    for command in ("status", "pause", "watch"):
        code, out, err = _run(capsys, fake_run, command)
        assert (code, out) == (
            2,
            "",
        ) and err == f"rolecall: {fake_run.database_path}: damaged: not the URL of a journal\n"
    assert main(["down", str(fake_run.path)]) == 0


def test_what_is_left_can_be_removed_without_the_journal(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _bytes(lambda b: b"garbage" * 1000)(fake_run.path / "journal.db")
    assert main(["down", str(fake_run.path)]) == 0
    assert "ended 0 processes" in capsys.readouterr().out


# --- what is offered instead --------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_offered(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> str:
        return _run(capsys, fake_run, "status")[2]

    _bytes(lambda b: b"garbage" * 1000)(fake_run.path / "journal.db")
    assert f"newest whole checkpoint {fake_run.checkpoints / 'step-00000119'}" in said()
    # The newest one is damaged too: the one before is offered.
    commit = fake_run.checkpoints / "step-00000119" / "commit.json"
    commit.write_bytes(commit.read_bytes() + b" ")
    assert f"newest whole checkpoint {fake_run.checkpoints / 'step-00000099'}" in said()
    for path in fake_run.checkpoints.iterdir():
        (path / "meta.json").unlink()
    assert "holds no whole checkpoint" in said()


def test_a_good_report_is_not_written_over_from_a_damaged_journal(
    fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(fake_run)
    files = [fake_run.path / name for name in ("report.json", "report.html")]
    before = [f.read_bytes() for f in files]
    _sql("update events set body = '{}' where kind = 'step_committed'")(fake_run.path / "journal.db")
    code, out, err = _run(capsys, fake_run, "report")
    assert code == 2 and out == "" and "hash does not match the line" in err
    assert f"the report that was written before, {files[0]}" in err
    assert [f.read_bytes() for f in files] == before


def test_nothing_is_offered_where_there_are_no_checkpoints(
    fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _bytes(lambda b: b"garbage" * 1000)(fake_run.path / "journal.db")
    shutil.rmtree(fake_run.checkpoints)
    assert "checkpoint" not in _run(capsys, fake_run, "status")[2]


@pytest.mark.parametrize("meta", ["[]", "{", '{"files": 3}', '{"files": {}}', '{"files": {"commit.json": 3}}'])
def test_a_checkpoint_with_another_meta_is_not_whole(fake_run: RunDir, meta: str) -> None:
    for path in fake_run.checkpoints.iterdir():
        (path / "meta.json").write_text(meta)
    assert newest_whole(fake_run.checkpoints) is None
