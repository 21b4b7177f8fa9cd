"""The command line: bad input is one clear message, the right exit code, and nothing started."""

import errno
import logging
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from rolecall.cli.main import main
from rolecall.cli.options import whoami
from rolecall.core.journal.database import run_url
from rolecall.core.journal.store import Store
from rolecall.core.journal.tables import METADATA
from rolecall.core.rundir import RunDir
from tests import postgres


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_wrong_job_file_reports_every_problem_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("seed: -1\nfoo: 1\nroles: {trainer: 0}\n")
    code, out, err = _run(capsys, "run", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 2 and out == ""
    assert "3 problems" in err
    assert all(path in err for path in ("seed: ", "roles.trainer: ", "foo: unknown key"))
    assert not (tmp_path / "runs").exists()


def test_too_few_nodes_says_who_lacks_what_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("runtime: {nodes: 3}\n")
    code, _, err = _run(capsys, "run", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "rollout lacks 3 of 3" in err and "standby lacks 1 of 1" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("run", "nowhere.yaml"), "nowhere.yaml"),
        (("demo", "--faults", "nope"), "nope: unknown"),
        (("demo", "--faults", "trainer-hang:nope"), "known for trainer-hang are stop, gil"),
        (
            ("demo", "--faults", "trainer-standby-kill"),
            "--faults: trainer-standby-kill: the job has no trainer-standby",
        ),
        (("demo", "--mode", "sync", "--faults", "standby-hang:stop"), "standby-hang:stop: the job has no standby"),
        (("demo", "--set", "seed=["), "--set seed=[: not YAML"),
        (("demo", "--set", "journal=mysql://u:pw@h/db"), "got 'mysql://u:***@h/db'"),
        (("demo", "--id", "x\x1b[31m"), "run id"),
        (("demo", "--set", "detector.nope=1"), "detector.nope: unknown key"),
        (("demo", "--id", "Bad Id"), "Bad Id"),
        (("demo", "--algorithm", "reinforce"), "algorithm.name: Input should be 'grpo', 'dapo', 'ppo', 'tppo', "),
        (("demo", "--task", "chess"), "task.name: Input should be 'digit_parity' or 'long_addition'"),
        (("status", "nothing-here"), "nothing-here"),
        (("audit", "nothing-here"), "nothing-here"),
        (("down", "nothing-here"), "nothing-here"),
        (("up", "nothing-here"), "nothing-here"),
        (("inject", "nothing-here", "--kind", "rollout-kill"), "nothing-here"),
        (("inject", "nothing-here", "--kind", "nope"), "rollout-kill, trainer-hang"),
        (("frobnicate",), "frobnicate"),
        (("watch", "run", "nothing-here", "--for", "0"), "--for: must be above 0 and at most"),
        (("watch", "agents", "http://localhost:1", "--for", "-5"), "got -5"),
        (("watch", "agents", "http://localhost:1", "--for", "inf"), "got inf"),
        (("watch", "prometheus", "http://localhost:1", "--for", "nan"), "got nan"),
        (("record", "run", "nothing-here", "-o", "x.parquet", "--for", "1e9"), "--for: "),
        (("watch", "agents", "http://localhost:1", "--webhook", "pager"), "recovery.webhook_url: must be http://host/"),
    ],
)
def test_usage_errors_are_one_message_and_exit_code_2(
    argv: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *argv)
    assert code == 2
    assert said in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        ("demo", "--minutes-max", "nan"),
        ("demo", "--hold-minutes", "nan"),
        ("run", "job.yaml", "--minutes-max", "inf"),
        ("up", "my-run", "--minutes-max", "nan"),
        ("inject", "my-run", "--kind", "nope", "--seconds", "nan"),
        ("hold", "582be534fb4cd49b", "--reason", "a look", "--minutes", "nan"),
        ("node", "end", "4194304", "--start-ticks", "1", "--grace", "nan"),
        ("node", "burn-in", "--seconds", "nan"),
        ("simulate", "run", "--days", "nan"),
        ("watch", "recording", "r.parquet", "--speed", "nan"),
    ],
    ids=" ".join,
)
def test_a_number_is_finite(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Typer may have refused it before, with the bounds."""
    code, _, err = _run(capsys, *argv)
    assert code == 2 and f"Invalid value for '{argv[-2]}': " in err


def test_only_a_speed_may_be_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "watch", "recording", str(tmp_path / "none.parquet"), "--speed", "inf")
    assert code == 2 and "No such file" in err


def _job(tmp_path: Path, text: str = "{}") -> str:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return str(path)


def test_the_agents_own_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--help"]) == 0 and "--explain" in capsys.readouterr().out
    assert main(["agent", "--nonsense"]) == 2


def test_a_run_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    code, _, err = _run(capsys, "run", _job(tmp_path), "--id", "x", "--runs", str(tmp_path / "runs"))
    assert code == 2 and "a run 'x' exists already" in err
    assert list((tmp_path / "runs" / "x").iterdir()) == []


def test_runs_that_cannot_be_kept_there_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Root may write anywhere: a file where a directory should be stands for every path that cannot be written to."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = _run(capsys, "run", _job(tmp_path), "--id", "x", "--runs", str(blocked))
    assert code == 2
    assert err == f"rolecall: {blocked}/x: Not a directory\n"


def test_a_journal_that_cannot_be_reached_starts_nothing_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg", reason="the driver psycopg is not installed")
    job = _job(tmp_path, f"journal: 'postgresql://me:s3cr3t@/db?host={tmp_path}/no one-here'\n")
    code, out, err = _run(capsys, "run", job, "--id", "x", "--runs", str(tmp_path / "runs"))
    assert code == 2 and out == ""
    assert "the journal cannot be used now" in err and "me:***@" in err and "s3cr3t" not in err
    assert not (tmp_path / "runs" / "x").exists()


def test_a_disk_without_room_is_said_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fdopen", _full)  # the token is written through it, after the directories were made
    code, _, err = _run(capsys, "run", _job(tmp_path), "--id", "x", "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert err == "rolecall: No space left on device: free some space and try again\n"
    assert list((tmp_path / "runs").iterdir()) == []


def _full(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _defect(_: Path) -> NoReturn:
    raise AssertionError("boom \x1b[2J postgresql://me:s3cr3t@h/db")


def _defective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.core.config.job.load_job", _defect)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own: a process that keeps a log writes it there


def test_a_defect_is_one_sentence_and_shows_where_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _defective(monkeypatch)
    code, _, err = _run(capsys, "run", "job.yaml")
    assert code == 3
    assert "AssertionError: boom" in err and "defect of rolecall" in err
    assert "Traceback" not in err and "\x1b" not in err and "s3cr3t" not in err
    monkeypatch.setenv("ROLECALL_TRACEBACK", "1")
    assert "Traceback" in _run(capsys, "run", "job.yaml")[2]


@pytest.mark.parametrize(("package", "extra"), [("torch", "all"), ("numpy", "detector"), ("altair", "reports")])
def test_a_package_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    def without(_: Path) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    _defective(monkeypatch)
    monkeypatch.setattr("rolecall.core.config.job.load_job", without)
    code, _, err = _run(capsys, "run", "job.yaml")
    assert code == 2
    assert err == f"rolecall: {package} is not installed; in a clone of rolecall: pip install '.[{extra}]'\n"


def test_output_that_no_one_reads_any_more_is_no_defect(fake_run: RunDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rolecall", "report", "--json", str(fake_run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        reader.stdout.close()
        assert reader.stderr.read() == b""
    assert reader.returncode == 1


def test_a_run_reads_the_same_from_postgresql(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    which = (str(fake_run.path), "--json")
    # The report first: once it is written, it is one more anchor of every later audit.
    commands = [("report", *which), ("report", *which), ("status", *which), ("audit", *which)]
    commands.append(("incidents", "--run", *which))
    before = [_run(capsys, *argv) for argv in commands]
    with postgres.server() as server:
        _move_journal(fake_run, run_url(server.url, fake_run.run_id))
        assert [_run(capsys, *argv) for argv in commands[1:]] == before[1:]


def _move_journal(run: RunDir, url: str) -> None:
    old, new = Store(run.database_url, create=False), Store(url)
    with old.read() as source, new.write() as target:
        for table in METADATA.sorted_tables:
            rows = [dict(r) for r in source.execute(table.select()).mappings()]
            if rows and table.name != "meta":
                target.execute(table.insert(), rows)
    for store in (old, new):
        store.close()
    run.database_path.write_text(url)
    (run.path / "journal.db").unlink()


@pytest.mark.parametrize("content", ["", "\n", "# nothing yet\n", "---\n"])
def test_a_job_file_without_content_starts_nothing(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _job(tmp_path, content)
    code, out, err = _run(capsys, "run", path, "--runs", str(tmp_path / "runs"))
    assert code == 2 and out == ""
    assert err.startswith(f"rolecall: {path}: the file has no content")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [("run",), ("agent", "--config"), ("doctor", "--config"), ("watch", "agents")])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xe8\x00\xff", "not a text file (UTF-8)"),
        (
            b"a: 1\nb: [1,\n",
            "not YAML, line 3: expected the node content, but found the end, while parsing a flow node",
        ),
        (b"a: \x00\n", "not a text: it has control characters"),
    ],
)
def test_a_file_that_is_no_yaml_is_said_without_internals(
    command: tuple[str, ...], content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    code, _, err = _run(capsys, *command, str(path))
    assert code == 2 and err.count("\n") == 1 and f"{path}: {said}" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"hello", "not a Parquet file"), (b"PAR1 and no more", "not a readable Parquet file: its end")],
)
def test_a_recording_that_is_no_parquet_is_said_without_internals(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.parquet"
    path.write_bytes(content)
    code, _, err = _run(capsys, "watch", "recording", str(path))
    assert code == 2 and f"{path}: {said}" in err and "PARE" not in err


def test_errors_have_no_numbers_of_the_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.yaml")
    for argv in (
        ("run", missing),
        ("doctor", "--config", missing),
        ("watch", "agents", missing),
        ("watch", "prometheus", "http://127.0.0.1:1", "--queries", missing),
        ("dashboard", "--users", missing, "--journal", "sqlite:///" + missing),
        ("diagnose", missing),
    ):
        code, _, err = _run(capsys, *argv)
        assert code == 2 and "rrno" not in err and "no such file" in err.lower(), argv
        assert err.count(missing) == 1 and "problem" not in err, "one sentence"


def test_without_runs_the_next_step_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("status",), ("incidents",), ("status", "my-run"), ("report",), ("watch", "run")):
        code, _, err = _run(capsys, *argv, "--runs", str(tmp_path))
        assert code == 2 and f"no runs in {tmp_path}; try `rolecall demo` or --runs DIR" in err


def test_a_missing_run_is_reported_with_the_whole_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, "status", "my-run", "--runs", "runs")
    assert code == 2 and f"no runs in {tmp_path / 'runs'}; " in err


def test_an_unknown_run_lists_those_that_there_are(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "status", "other", "--runs", str(fake_run.path.parent))
    assert code == 2 and f"newest first: {fake_run.run_id}" in err


def test_a_run_is_an_argument_or_an_option_but_not_two(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(fake_run.path)
    assert _run(capsys, "status", path, "--json") == _run(capsys, "status", "--run", path, "--json")
    assert _run(capsys, "audit", "--run", path)[0] == 0
    code, _, err = _run(capsys, "status", path, "--run", "other")
    assert code == 2 and "give one of the two" in err
    code, _, err = _run(capsys, "down")
    assert code == 2 and "name a run" in err, "nothing is stopped by default"


def test_a_run_where_an_incident_is_expected_is_recognised(
    fake_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ("--runs", str(fake_run.path.parent))
    code, _, err = _run(capsys, "incidents", fake_run.run_id, *runs)
    assert code != 0 and f"did you mean --run {fake_run.run_id}?" in err
    assert "did you mean" not in _run(capsys, "incidents", "inc-99", *runs)[2]


def test_the_command_in_a_hint_runs_as_it_is_printed(fake_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ("--runs", str(fake_run.path.parent))
    paused = _run(capsys, "pause", "--reason", "a look", *runs)[1]
    assert "paused" in _run(capsys, "status", str(fake_run.path))[1].lower()
    code, out, _ = _run(capsys, *_hinted(paused))
    assert code == 0 and "resumed" in out


def _hinted(text: str) -> list[str]:
    program, *argv = shlex.split(text.split("`")[1])
    assert program == "rolecall"
    return argv


def test_a_run_in_the_default_directory_is_named_by_its_id(
    fake_run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("ROLECALL_RUNS", raising=False)
    assert fake_run.shell_name == str(fake_run.path)
    monkeypatch.setenv("ROLECALL_RUNS", str(fake_run.path.parent))
    assert fake_run.shell_name == fake_run.run_id


def test_the_user_has_a_name_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert whoami() == f"{pwd.getpwuid(os.getuid()).pw_name}@{os.uname().nodename}"

    def nobody(_: int) -> NoReturn:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert whoami() == f"uid {os.getuid()}@{os.uname().nodename}"
