"""An injector that dies in the middle of its fault: its target is let go all the same."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.ids import process_start_ticks
from rolecall.core.proc_stat import read_stat
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_group
from rolecall.rl_runtime.faults.guardian import guarded
from rolecall.rl_runtime.faults.process_side import request_path
from rolecall.rl_runtime.processes import is_alive, run_environment
from tests.support import eventually

INJECTOR = """
import sys, time
from pathlib import Path
from rolecall.core.clock import SystemClock
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults.injector import InjectionTarget, _Injection
run, pid, ticks, how = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
_Injection(run, "rollout-slow", "", how, 600.0, SystemClock()).perform([InjectionTarget(target="rollout/0", pid=pid, start_ticks=ticks)])
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "r")


@pytest.fixture
def target(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], env=run_environment(run.path)) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    seen = read_stat(pid)
    return seen.state if seen is not None else ""


def ticks_of(pid: int) -> int:
    ticks = process_start_ticks(pid)
    assert ticks is not None
    return ticks


@pytest.mark.parametrize("how", ["stop", "duty", "quota"])
def test_a_target_continues_when_its_injector_is_killed(run: RunDir, target: subprocess.Popen[bytes], how: str) -> None:
    group = _quota_group(target.pid) if how == "quota" else None
    argv = [sys.executable, "-c", INJECTOR, str(run.path), str(target.pid), str(ticks_of(target.pid)), how]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as injector:
        if group is None:
            # A duty cycle stops it again and again: the injector is killed while it is stopped.
            eventually(lambda: state(target.pid) == "T" or injector.poll() is not None, "the target to be stopped")
            assert injector.poll() is None, injector.stderr and injector.stderr.read()
            os.kill(injector.pid, signal.SIGSTOP)
            eventually(lambda: state(injector.pid) == "T", "the injector to be stopped")
            os.kill(target.pid, signal.SIGSTOP)
        else:
            eventually(lambda: group.exists() or injector.poll() is not None, "the quota, or a refusal")
            if injector.poll() is not None:
                assert injector.stderr is not None and b"no CPU quota can be set here" in injector.stderr.read()
                return
        injector.kill()
    eventually(lambda: state(target.pid) in ("R", "S"), "the target to continue")
    if group is not None:
        eventually(lambda: not group.exists(), "the quota to be lifted")


def _quota_group(pid: int) -> Path | None:
    try:
        return cpu_group(pid)[0] / f"rolecall-{pid}"
    except QuotaUnavailable:
        pytest.skip("no control groups here")


def test_a_guardian_takes_requests_back_and_ends_with_its_injector(
    run: RunDir, target: subprocess.Popen[bytes]
) -> None:
    ticks = ticks_of(target.pid)
    run.inject_dir.mkdir(exist_ok=True)
    with guarded(run, target.pid, ticks):
        request_path(run, target.pid, ticks).write_text("{}")
        os.kill(target.pid, signal.SIGSTOP)
        eventually(lambda: state(target.pid) == "T", "the target to be stopped")
    assert state(target.pid) != "T" and not request_path(run, target.pid, ticks).exists()
    assert _guardians(target.pid) == []


def test_a_process_that_took_over_the_pid_is_unaffected(run: RunDir, target: subprocess.Popen[bytes]) -> None:
    with guarded(run, target.pid, ticks_of(target.pid) + 1):
        os.kill(target.pid, signal.SIGSTOP)
        eventually(lambda: state(target.pid) == "T", "the target to be stopped")
    assert state(target.pid) == "T" and is_alive(target.pid, ticks_of(target.pid))


def _guardians(pid: int) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rolecall.rl_runtime.faults.guardian" in words and str(pid).encode() in words:
            found.append(b" ".join(words))
    return found
