"""Finding and ending a run's processes, with real ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.core.ids import process_start_ticks
from rolecall.core.proc_stat import read_stat
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.processes import (
    PROCESSES_FILE,
    ProcessWatch,
    environment_of,
    find_processes,
    is_alive,
    kill_process,
    record_process,
    recorded_processes,
    run_environment,
    start_process,
    stop_run,
)
from tests.support import PATIENCE_SECONDS, eventually

DOUBLE_FORK = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
IGNORES_TERM = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); time.sleep(600)"
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def ticks(pid: int) -> int:
    found = process_start_ticks(pid)
    assert found is not None
    return found


def start(run: Path, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env=run_environment(run), stdout=subprocess.PIPE)


def test_a_process_is_signalled_by_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    started = ticks(sleeper.pid)
    assert kill_process(sleeper.pid, started + 1) is False, "another process with this PID is not meant"
    assert sleeper.poll() is None
    assert kill_process(sleeper.pid, started) is True
    assert sleeper.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert kill_process(sleeper.pid, started) is False


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    started = ticks(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(sleeper.pid, started), "the killed process to be seen dead, unreaped")
    seen = read_stat(sleeper.pid)
    assert seen is not None and seen.state == "Z"
    assert kill_process(sleeper.pid, started) is False


def test_watch_sees_a_death_at_once_and_no_other_process(sleeper: subprocess.Popen[bytes]) -> None:
    watch, started = ProcessWatch(), ticks(sleeper.pid)
    assert watch.alive(sleeper.pid, started)
    assert not watch.alive(sleeper.pid, started + 1)
    sleeper.kill()
    eventually(lambda: not watch.alive(sleeper.pid, started), "the death to be seen")
    sleeper.wait()
    assert not watch.alive(sleeper.pid, started)
    watch.close()


def test_everything_of_a_run_is_found_and_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    run, other = tmp_path / "run", tmp_path / "run-2"
    run.mkdir()
    plain, stopped = start(run, "sleep", "600"), start(run, "sleep", "600")
    stubborn = start(run, sys.executable, "-c", IGNORES_TERM)
    forked = start(run, sys.executable, "-c", DOUBLE_FORK)
    foreign = start(other, "sleep", "600")
    assert forked.stdout is not None and stubborn.stdout is not None
    grandchild = int(forked.stdout.readline())
    stubborn.stdout.readline()
    forked.wait(PATIENCE_SECONDS)
    os.kill(stopped.pid, signal.SIGSTOP)
    record_process(run, "recorded", sleeper.pid, node="node-9")
    try:
        found = {p.pid: p for p in find_processes(run)}
        assert set(found) == {plain.pid, stopped.pid, stubborn.pid, grandchild, sleeper.pid}
        assert found[sleeper.pid].node == "node-9"
        ended = stop_run(run, term_seconds=3.0)  # enough for those that obey, on a loaded machine
        assert {p.pid for p in ended} == set(found)
        assert [p.wait(PATIENCE_SECONDS) for p in (plain, stopped, stubborn)] == [
            -signal.SIGTERM,
            -signal.SIGTERM,
            -signal.SIGKILL,
        ]
        assert (stat := read_stat(grandchild)) is None or stat.has_ended
        assert foreign.poll() is None, "a process of another run was hit"
        assert stop_run(run) == []
    finally:
        for process in (plain, stopped, stubborn, foreign):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        forked.stdout.close()


def test_records_of_another_boot_identify_no_process(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record_process(tmp_path, "x", sleeper.pid)
    path = tmp_path / "processes.jsonl"
    path.write_text(path.read_text().replace('"boot_id": "', '"boot_id": "0'))
    assert find_processes(tmp_path) == []


def test_environment_is_read_as_it_was_at_the_start(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep", "600")
    try:
        eventually(lambda: environment_of(process.pid).get("ROLECALL_RUN"), "exec")
        assert environment_of(process.pid)["ROLECALL_RUN"] == str(tmp_path)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert environment_of(process.pid) == {}


def test_a_process_that_cannot_be_recorded_is_ended(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r")
    (run.path / PROCESSES_FILE).mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        start_process(run, "agent-node-1", ["sleep", "600"], run.logs / "agent.log")
    (run.path / PROCESSES_FILE).rmdir()
    assert not find_processes(run.path)


def test_a_record_that_a_full_disk_cut_off_hides_no_other(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record_process(tmp_path, "before", sleeper.pid)
    with (tmp_path / PROCESSES_FILE).open("a") as f:
        f.write('{"name": "agent-node-1", "no')
    assert [line["name"] for line in recorded_processes(tmp_path)] == ["before"]
    record_process(tmp_path, "after", sleeper.pid)
    assert [line["name"] for line in recorded_processes(tmp_path)] == ["before", "after"]
