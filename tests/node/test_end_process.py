"""Ends the process that is named, with its descendants, and no other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.core.errors import CommandRefused
from rolecall.core.ids import process_start_ticks
from rolecall.node.end_process import end_process
from tests.support import PATIENCE_SECONDS, eventually

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: None); time.sleep(300)"])
open(sys.argv[1] + ".new", "w").write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(300)
"""


def ticks(pid: int) -> int:
    found = process_start_ticks(pid)
    assert found is not None
    return found


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process and the PID of its child."""
    told = tmp_path / "child"
    parent = subprocess.Popen([sys.executable, "-c", FAMILY, str(told)], start_new_session=True)
    eventually(told.exists, "it has a child")
    yield parent, int(told.read_text())
    for pid in (parent.pid, int(told.read_text())):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    parent.wait(PATIENCE_SECONDS)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_process_goes_with_its_descendants(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    assert end_process(parent.pid, ticks(parent.pid)) == f"ended process {parent.pid} and 1 descendant"
    assert not lives(parent.pid) and not lives(child) and parent.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_stopped_one_too(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    os.kill(parent.pid, signal.SIGSTOP)
    end_process(parent.pid, ticks(parent.pid))
    assert not lives(parent.pid) and not lives(child)


def test_it_may_end_by_itself_first(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    end_process(parent.pid, ticks(parent.pid), grace_seconds=PATIENCE_SECONDS)
    assert parent.wait(PATIENCE_SECONDS) == -signal.SIGTERM and not lives(child)


def test_another_process_with_the_pid_is_left_alone(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    said = end_process(parent.pid, ticks(parent.pid) - 1)
    assert "is gone" in said and lives(parent.pid) and lives(child)


def test_one_that_has_ended_is_done_with(
    family: tuple[subprocess.Popen[bytes], int], capsys: pytest.CaptureFixture[str]
) -> None:
    parent, _ = family
    started = ticks(parent.pid)
    parent.kill()
    eventually(lambda: not lives(parent.pid), "it has ended; nobody has read its exit code")
    assert main(["node", "end", str(parent.pid), "--start-ticks", str(started)]) == 0
    assert "is gone" in capsys.readouterr().out


def test_what_the_command_runs_below_is_refused() -> None:
    for who in (1, os.getpid(), os.getppid()):
        with pytest.raises(CommandRefused, match="this command runs below it"):
            end_process(who, 0)


def test_one_that_does_not_end_in_time_is_said(
    family: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, _ = family
    monkeypatch.setattr("rolecall.node.end_process._is_over", lambda *_: False)
    with pytest.raises(CommandRefused, match=rf"{parent.pid}.* did not end within 0.1 s"):
        end_process(parent.pid, ticks(parent.pid), deadline_seconds=0.1)
