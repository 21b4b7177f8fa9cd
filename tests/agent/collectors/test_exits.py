"""Exits by pidfd: detected for the right process only, with signal or code where known."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rolecall.agent.collectors.process.exits import ExitStatus, ExitWatch, WatchRefused, guess_cause
from rolecall.core.ids import process_start_ticks
from tests.support import PATIENCE_SECONDS, eventually


@pytest.fixture
def exits() -> Iterator[ExitWatch]:
    it = ExitWatch()
    it.start()
    yield it
    it.stop()


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)


def _watched(exits: ExitWatch, process: "subprocess.Popen[bytes]") -> "queue.Queue[ExitStatus]":
    heard: queue.Queue[ExitStatus] = queue.Queue()
    exits.watch(process.pid, process_start_ticks(process.pid) or 0, heard.put)
    return heard


def test_a_kill_is_heard_with_its_signal(exits: ExitWatch) -> None:
    process = _sleeper()
    heard = _watched(exits, process)
    process.kill()
    assert heard.get(timeout=PATIENCE_SECONDS) == ExitStatus(signal=signal.SIGKILL)
    process.communicate()


READ = """\
import os, sys
from rolecall.agent.collectors.process.exits import exit_status
pid, start_ticks = map(int, sys.argv[1:])
status = exit_status(os.pidfd_open(pid), pid, start_ticks)
print(status.signal, status.code)
"""


@pytest.mark.parametrize(("code", "known"), [("os.kill(os.getpid(), 9)", "9 None"), ("", "None 0")])
def test_the_status_of_a_zombie_is_unknown_to_an_agent_that_may_not_trace_it(code: str, known: str) -> None:
    """The kernel shows it 0. From a user namespace of its own, a process may trace nothing outside."""
    if subprocess.run(["unshare", "--user", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces")
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; {code}"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    read = [sys.executable, "-c", READ, str(process.pid), str(process_start_ticks(process.pid))]
    assert subprocess.check_output(read, text=True).strip() == known
    assert subprocess.check_output(["unshare", "--user", *read], text=True).strip() == "None None"
    process.wait()


def test_an_exit_code_is_known_until_the_parent_reaps_the_process(exits: ExitWatch) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input(); raise SystemExit(70)"], stdin=subprocess.PIPE)
    heard = _watched(exits, process)
    process.communicate(b"\n")
    assert heard.get(timeout=PATIENCE_SECONDS) in (
        ExitStatus(code=70),
        ExitStatus(),
    )  # nothing, on a kernel before 6.15 and if reaped


def test_a_stopped_process_has_not_ended(exits: ExitWatch) -> None:
    process = _sleeper()
    heard = _watched(exits, process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert heard.empty()
    process.kill()
    assert heard.get(timeout=PATIENCE_SECONDS).signal == signal.SIGKILL
    process.communicate()


def test_another_process_of_that_pid_is_refused(exits: ExitWatch) -> None:
    with pytest.raises(WatchRefused, match="started at"):
        exits.watch(os.getpid(), 1, lambda status: None)


def test_a_process_that_is_gone_is_refused(exits: ExitWatch) -> None:
    process = _sleeper()
    start_ticks = process_start_ticks(process.pid) or 0
    process.kill()
    process.communicate()
    with pytest.raises(WatchRefused):
        exits.watch(process.pid, start_ticks, lambda status: None)


def test_a_process_whose_pid_is_a_threads_id_by_now_is_gone(exits: ExitWatch, thread_id: int) -> None:
    with pytest.raises(WatchRefused) as refused:
        exits.watch(thread_id, 1, lambda status: None)
    assert refused.value.gone


def test_a_callback_that_fails_does_not_end_the_watch(exits: ExitWatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(status: ExitStatus) -> None:
        raise RuntimeError("a defect")

    first, second = _sleeper(), _sleeper()
    exits.watch(first.pid, process_start_ticks(first.pid) or 0, fail)
    heard = _watched(exits, second)
    first.kill()
    eventually(lambda: "handling the exit of process" in caplog.text, "the failure was logged")
    second.kill()
    assert heard.get(timeout=PATIENCE_SECONDS).signal == signal.SIGKILL
    first.communicate()
    second.communicate()


def test_many_at_once(exits: ExitWatch) -> None:
    processes = [_sleeper() for _ in range(8)]
    heard = [_watched(exits, p) for p in processes]
    for p in processes:
        p.kill()
    eventually(lambda: all(h.qsize() == 1 for h in heard), "all eight were heard, each once")
    for p in processes:
        p.communicate()


@pytest.mark.parametrize(
    ("status", "facts", "cause"),
    [
        (ExitStatus(signal=9), {}, "killed"),
        (ExitStatus(signal=9), {"oom": True}, "oom"),
        (ExitStatus(signal=9), {"finished": True, "oom": True}, "finished"),
        (ExitStatus(signal=15), {}, "killed"),
        (ExitStatus(signal=11), {}, "crashed"),
        (ExitStatus(code=1), {"raised": True}, "exception"),
        (ExitStatus(code=70), {}, "exit"),
        (ExitStatus(), {}, "unknown"),
        (ExitStatus(), {"raised": True}, "exception"),
    ],
)
def test_the_guess_of_a_cause(status: ExitStatus, facts: dict[str, bool], cause: str) -> None:
    assert guess_cause(status, **{"finished": False, "raised": False, "oom": False, **facts}) == cause
