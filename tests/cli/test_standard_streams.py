"""Standard streams that are closed or cannot be written: what failed is named, and what was done is said."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolecall.core.rundir import RunDir
from rolecall.recovery.operators import queries

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def _rolecall(*argv: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """`shell`: redirections."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "rolecall", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


FAILED = "rolecall: standard output: No space left on device\n"


def test_output_that_cannot_be_written_is_not_called_a_full_disk(fake_run: RunDir) -> None:
    for argv in (("status", "--json"), ("status",), ("report", "--json"), ("node", "list")):
        done = _rolecall(argv[0], *argv[1:], "--run", str(fake_run.path), shell=f">{FULL}")
        assert (done.returncode, done.stderr) == (2, FAILED), argv


def test_what_was_done_is_said_elsewhere(fake_run: RunDir) -> None:
    done = _rolecall("pause", "--reason", "a look", "--run", str(fake_run.path), shell=f">{FULL}")
    assert done.returncode == 2 and queries.status(fake_run)["paused"] is not None
    assert done.stderr == (
        f"rolecall: done: {fake_run.run_id} is paused: no action starts until `rolecall resume {fake_run.shell_name}`\n"
        f"{FAILED}"
    )


@pytest.mark.parametrize(
    ("shell", "said"), [(f">{FULL}", FAILED), (">&-", "rolecall: standard output is closed: the access token is shown")]
)
def test_nobody_is_added_whose_token_cannot_be_shown(tmp_path: Path, shell: str, said: str) -> None:
    file = tmp_path / "users.yaml"
    done = _rolecall("users", "add", "bob", "--file", str(file), shell=shell)
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not file.exists()


def test_nobody_is_added_whose_token_no_one_reads(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    with _pipe_without_reader() as pipe:
        command = [sys.executable, "-m", "rolecall", "users", "add", "bob", "--file", str(file)]
        assert subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False).returncode == 1
    assert not file.exists()


@contextmanager
def _pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def test_a_closed_stream_is_no_defect(fake_run: RunDir) -> None:
    path = str(fake_run.path)
    assert _rolecall("status", path, shell=">&-").returncode == 0
    assert _rolecall("status", path, shell="<&- >&- 2>&-").returncode == 0
    assert _rolecall("status", f"{path}-none", shell="2>&-").returncode == 2
    done = _rolecall("diagnose", "-", shell="<&-")
    assert done.returncode == 2 and done.stderr.startswith("rolecall: standard input: ")
    done = _rolecall("grafana", "push", "--url", "http://127.0.0.1:1", "--token", "-", shell="<&-")
    assert done.returncode == 2 and "token: expected" in done.stderr
