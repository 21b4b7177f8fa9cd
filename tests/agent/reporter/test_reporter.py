"""The reporter inside a training process: it never blocks training, and its page is readable after any failure."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall.agent.processes.state_pages import PageReader, parse_page
from rolecall.agent.reporter import page_layout as layout
from rolecall.agent.reporter.sender import (
    NUM_QUEUED_MAX,
    RegistrationRefused,
    ReporterClient,
    describe_exception,
    send_message,
    socket_address,
)
from rolecall.core.telemetry import HEALTH_SIGNS
from tests.agent.processes import Child, secret
from tests.support import PATIENCE_SECONDS, eventually


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    it = Child(tmp_path)
    yield it
    it.close()


def test_reports_are_on_the_page(child: Child) -> None:
    child.start("trainer/1", incarnation=4)
    child.do(
        "reporter.set_step(7); reporter.enter_phase('compute')",
        "reporter.progress(busy_seconds=0.5); reporter.progress(3)",
        "reporter.progress(2, busy_seconds=0.25, exchange_seconds=0.75, tokens=9)",
        "reporter.exchange(); reporter.finish_step(8, 'wait', busy_seconds=0.5, loading_seconds=0.25)",
        "reporter.update(epoch=3, policy_version=6, requests_active=5, tokens_held=70, loss=1.5, grad_norm=float('inf'))",
    )
    page = PageReader(child.page).read()
    assert (page.replica, page.rank, page.incarnation, page.pid) == ("trainer/1", 0, 4, child.pid)
    assert page.start_ticks == child.start_ticks
    assert (page.step, page.phase, page.epoch, page.policy_version) == (8, "wait", 3, 6)
    assert (page.progress, page.work_units, page.busy_seconds, page.exchange_seconds) == (7, 4, 1.25, 0.75)
    assert (page.loading_seconds, page.exchanges) == (0.25, 1)
    assert page.tokens == 9
    assert page.tokens_held == 70
    assert (page.requests_active, page.loss, page.grad_norm) == (5, 1.5, sys.float_info.max)
    assert math.isnan(page.reward)
    assert page.work_tid == child.pid  # its main thread reported the progress
    assert 0 < page.progress_at <= page.phase_since, "the step was finished, then the phase was entered"
    assert page.exception is None and not page.finished
    assert page.proven_by(secret("trainer/1", incarnation=4))
    assert not page.proven_by(secret("trainer/1", incarnation=5))


def test_values_of_the_training_that_are_none_or_jump_are_counted(child: Child) -> None:
    child.start("trainer/0")
    child.do(
        "for n in range(100): reporter.update(loss=1.0 + 0.01 * (n % 5), reward=0.5)",
        "reporter.update(loss=40.0); reporter.update(loss=1.0, grad_norm=float('nan')); reporter.update(loss=1.0)",
    )
    page = PageReader(child.page).read()
    assert (page.loss, page.reward, page.jumps, page.unfinite) == (1.0, 0.5, 1, 1) and math.isnan(page.grad_norm)


def test_the_health_of_a_step_is_reported_and_unknown_values_stay_unknown(child: Child) -> None:
    child.start("trainer/0")
    read = PageReader(child.page).read
    first = read()
    assert first.healths == 0 and all(math.isnan(getattr(first, sign)) for sign in HEALTH_SIGNS)
    child.do(f"reporter.health(**dict(zip({HEALTH_SIGNS}, range(1, 100))))")
    page = read()
    assert [getattr(page, sign) for sign in HEALTH_SIGNS] == [float(n + 1) for n in range(len(HEALTH_SIGNS))]
    child.do("reporter.health(entropy=0.5, kl_sampler=float('nan'), ratio_max=float('inf'), clip_fraction_low=None)")
    page = read()
    assert (page.healths, page.entropy, page.ratio_max, page.unfinite) == (2, 0.5, sys.float_info.max, 0)
    unknown = set(HEALTH_SIGNS) - {"entropy", "ratio_max"}
    assert all(math.isnan(getattr(page, sign)) for sign in unknown), "of the step before"
    child.do("reporter.health(entropy='low', kl_sampler=1.0); reporter.progress()")
    page = read()
    assert (page.healths, page.entropy, page.progress) == (2, 0.5, 1) and math.isnan(page.kl_sampler)


def test_phases_nest_and_collectives_are_counted(child: Child) -> None:
    child.start("trainer/0")
    read = PageReader(child.page).read
    child.do("reporter.enter_phase('compute'); c = reporter.collective(); c.__enter__(); reporter.c = c")
    inside = read()
    assert (inside.phase, inside.collectives_entered, inside.collectives_done) == ("reduce", 1, 0)
    child.do("reporter.c.__exit__(None, None, None)")
    after = read()
    assert (after.phase, after.collectives_entered, after.collectives_done) == ("compute", 1, 1)
    assert after.phase_entries == inside.phase_entries + 1


def test_a_stopped_process_can_be_read_and_does_not_beat(child: Child) -> None:
    child.start("rollout/0")
    reader = PageReader(child.page)
    eventually(lambda: reader.read().beats > 2, "the ticker beats")
    child.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = reader.read()
    assert repr(stopped) == repr(reader.read())  # not ==: a loss not yet known is NaN
    assert stopped.beats > 2
    child.signal(signal.SIGCONT)
    eventually(lambda: reader.read().beats > stopped.beats, "it beats again")


def test_the_page_of_a_dead_process_can_be_read(child: Child) -> None:
    child.start("rollout/0")
    child.do("reporter.enter_phase('generate'); reporter.progress(41)")
    child.close()
    page = PageReader(child.page).read()
    assert (page.phase, page.progress) == ("generate", 41)


def test_the_gil_held_stops_the_beats_and_leaves_the_page_readable(child: Child) -> None:
    child.start("trainer/0")
    reader = PageReader(child.page)
    # One call into C that never gives the interpreter back: the kind of hang that no Python thread survives.
    child.execute("import re; reporter.set_step(5); re.match('(a|a)*b', 'a' * 64)")
    eventually(lambda: reader.read().step == 5, "the hang began")
    # After a fifth of a second of CPU it is inside that call for sure; after another one it still has not come out.
    until_burnt(child.pid, _cpu_ticks(child.pid) + 20)
    held = reader.read().beats
    until_burnt(child.pid, _cpu_ticks(child.pid) + 20)
    assert reader.read().beats == held


def until_burnt(pid: int, ticks: int) -> None:
    eventually(lambda: _cpu_ticks(pid) > ticks, "it burns CPU")


def _cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_a_write_that_was_cut_short_is_not_taken_for_a_state(child: Child) -> None:
    child.start("trainer/0")
    raw = bytearray(child.page.read_bytes())
    view = memoryview(raw).cast("q")
    view[layout.W_SEQUENCE] |= 1
    with pytest.raises(Exception, match="middle of a write"):
        parse_page(bytes(raw))


def test_outside_of_a_run_everything_works_in_memory(tmp_path: Path) -> None:
    child = Child()
    child.do("reporter.progress(); reporter.enter_phase('compute')")
    child.do("reporter.start(replica='trainer/0', rank=0, incarnation=1, secret='')")
    child.do("reporter.progress(); reporter.exception(ValueError('x')); reporter.finish('done')")
    child.do(f"open({str(tmp_path / 'page')!r}, 'wb').write(reporter.page_bytes())")
    page = parse_page((tmp_path / "page").read_bytes())
    assert (page.replica, page.progress, page.phase, page.finished) == ("trainer/0", 2, "compute", True)
    child.do("import threading; assert [t.name for t in threading.enumerate()] == ['MainThread', 'rolecall-beats']")
    assert child.close() == ""


def test_without_a_writable_directory_one_warning_and_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    child = Child(tmp_path / "file")  # a file where the directory should be
    child.start("trainer/0")
    child.do("reporter.progress(); reporter.enter_phase('compute')")
    assert child.close().count("cannot create the state page") == 1


def test_wrong_arguments_are_swallowed_and_warned_of_once(tmp_path: Path) -> None:
    child = Child(tmp_path)
    child.start("trainer/0")
    child.do("reporter.progress('many'); reporter.set_step(None); reporter.update(loss='low'); reporter.progress(2)")
    page = PageReader(child.page).read()  # also: the sequence lock was closed again
    assert page.progress == 2
    assert child.close().count("could not be written") == 1


def test_a_missing_agent_never_blocks_and_is_found_later(tmp_path: Path) -> None:
    child = Child(tmp_path)
    child.start("rollout/2")  # returns without a listener
    child.do("reporter.progress()")
    heard = _listen(tmp_path)
    assert heard["kind"] == "register"
    assert (heard["pid"], heard["replica"], heard["secret"]) == (child.pid, "rollout/2", secret("rollout/2"))
    assert child.close() == ""


def test_an_agent_that_starts_again_is_told_once_more(tmp_path: Path) -> None:
    """Its list of processes may be lost."""
    child = Child(tmp_path)
    child.do("from rolecall.agent.reporter import sender; sender.AGENT_CHECK_SECONDS = 0.05")
    child.start("rollout/2")
    first = _listen(tmp_path)
    (tmp_path / "agent.sock").unlink()
    assert _listen(tmp_path) == first
    assert child.close() == ""


def _listen(node_dir: Path) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(node_dir / "agent.sock"))
        s.listen(1)
        s.settimeout(PATIENCE_SECONDS)
        connection, _ = s.accept()
        with connection:
            line = connection.recv(65536)
            connection.sendall(b'{"ok": true}\n')
    message = json.loads(line)
    assert isinstance(message, dict)
    return message


def test_a_promoted_standby_reports_as_the_replica_and_keeps_its_counters(child: Child) -> None:
    child.start("standby/0")
    child.do("reporter.progress(5)")
    child.do(f"reporter.become(replica='rollout/2', incarnation=3, secret={secret('rollout/2', incarnation=3)!r})")
    page = PageReader(child.page).read()
    assert (page.replica, page.rank, page.incarnation, page.progress) == ("rollout/2", 0, 3, 5)
    assert page.proven_by(secret("rollout/2", incarnation=3))


def test_a_forked_child_does_not_write_its_parents_page(child: Child) -> None:
    child.start("trainer/0")
    child.do("reporter.progress(1)")
    child.do("p = os.fork() or (reporter.progress(100), reporter.finish('x'), os._exit(0)); os.waitpid(p, 0)")
    page = PageReader(child.page).read()
    assert (page.progress, page.finished, page.pid) == (1, False, child.pid)


def test_a_forked_child_can_start_for_itself(child: Child) -> None:
    child.start("trainer/0")
    start = f"reporter.start(replica='reward/1', rank=0, incarnation=1, secret='', node_dir={str(child.node_dir)!r})"
    child.do(f"p = os.fork() or ({start}, reporter.progress(7), os._exit(0)); os.waitpid(p, 0)")
    assert PageReader(child.page).read().replica == "trainer/0"
    assert child.node_dir is not None
    others = [PageReader(p).read() for p in child.node_dir.glob("pages/*.page") if p != child.page]
    assert [(p.replica, p.progress) for p in others] == [("reward/1", 7)]


def test_an_uncaught_exception_is_on_the_page_before_the_process_is_gone(tmp_path: Path) -> None:
    code = f"""
from rolecall.agent.reporter import reporter
reporter.start(replica="trainer/1", rank=0, incarnation=1, secret="s", node_dir={str(tmp_path)!r})
reporter.set_step(12)
def loss(): raise ValueError("bad \\u2603 batch " + "x" * 5000)
loss()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 1
    assert "ValueError: bad" in done.stderr  # the hook before ours still ran
    [path] = tmp_path.glob("pages/*.page")
    shown = PageReader(path).read().exception
    assert shown is not None
    assert (shown.number, shown.step, shown.type, shown.where) == (1, 12, "ValueError", "<string>:5 loss")
    assert shown.message.startswith("bad \u2603 batch xxx") and len(shown.message) == 500
    assert len(shown.fingerprint) == 16


HOOK_OF_THE_JOB = "sys.excepthook = lambda *_, before=sys.excepthook: (print('mine'), before(*_))"
RECORDED = """from torch.distributed.elastic.multiprocessing.errors import record
@record
def main(): raise ValueError('bad')
main()"""


@pytest.mark.parametrize(
    ("code", "number", "uncaught"),
    [
        ("raise ValueError('bad')", 1, True),
        (f"{HOOK_OF_THE_JOB}\nraise ValueError('bad')", 1, True),  # the job's own hook, set later, calls ours
        (
            "with reporter.step(3): raise ValueError('bad')",
            2,
            True,
        ),  # told as it left the block, and as nothing caught it
        ("try:\n  with reporter.step(3): raise ValueError('bad')\nexcept ValueError: pass", 1, False),
        ("try: raise ValueError('bad')\nexcept ValueError: pass", 0, False),
        ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", 0, False),  # the process goes on
        ("sys.ps1 = '>>> '\nraise ValueError('bad')", 1, False),  # a prompt shows it and goes on
        # and is not called by ours
        (f"{HOOK_OF_THE_JOB}\nreporter.start(secret='s')\nraise ValueError('bad')", 1, True),
        ("sys.exit(3)", 0, False),
        ("raise KeyboardInterrupt", 0, False),
        (RECORDED, 1, True),
    ],
)
def test_only_an_exception_that_nothing_caught_ends_the_process(
    tmp_path: Path, code: str, number: int, uncaught: bool
) -> None:
    start = f"reporter.start(replica='trainer/1', rank=0, incarnation=1, secret='s', node_dir={str(tmp_path)!r})"
    script = f"import sys, threading\nfrom rolecall.agent.reporter import reporter\n{start}\n{code}\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    [path] = tmp_path.glob("pages/*.page")
    shown = PageReader(path).read().exception
    assert (shown.number if shown else 0, shown is not None and shown.uncaught) == (number, uncaught), done.stderr
    if shown is not None:
        assert (shown.type, "uncaught" in shown.detail()) == ("ValueError", uncaught)
    assert done.stdout.count("mine") == code.count(HOOK_OF_THE_JOB)


def test_ctrl_c_is_no_exception_of_the_job(tmp_path: Path) -> None:
    code = f"""
from rolecall.agent.reporter import reporter
reporter.start(replica="trainer/1", rank=0, incarnation=1, secret="s", node_dir={str(tmp_path)!r})
raise KeyboardInterrupt
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    [path] = tmp_path.glob("pages/*.page")
    assert PageReader(path).read().exception is None


def _fails(value: int) -> None:
    if value > 1:
        raise RuntimeError(f"value {value}")
    raise RuntimeError("other")


def _caught(value: int) -> dict[str, str]:
    try:
        _fails(value)
    except RuntimeError as e:
        return describe_exception(e)
    raise AssertionError


def test_a_fingerprint_depends_on_type_and_frames_not_on_lines_or_values() -> None:
    assert _caught(2)["fingerprint"] == _caught(3)["fingerprint"] == _caught(0)["fingerprint"]
    assert _caught(2)["message"] != _caught(3)["message"]
    try:
        raise KeyError("elsewhere")
    except KeyError as e:
        assert describe_exception(e)["fingerprint"] != _caught(2)["fingerprint"]


def test_an_exception_without_a_usable_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_exception(Mute())["message"] == "(no message: __str__ failed)"


def test_reporting_has_a_deadline_and_a_refusal_its_reason(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 120) / "agent.sock"  # longer than sockaddr_un holds
    path.parent.mkdir()
    with pytest.raises(OSError):
        send_message(path, {}, 0.2)
    address, directory = socket_address(path)
    assert directory is not None
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(address)
        os.close(directory)
        s.listen(2)
        with pytest.raises(TimeoutError):
            send_message(path, {"kind": "x"}, 0.05)
        answering, _ = s.accept()
        answering.close()

        def refuse() -> None:
            connection, _ = s.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b'{"ok": false, "reason": "no such"}\n')

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(RegistrationRefused, match="no such"):
            send_message(path, {"kind": "x"}, PATIENCE_SECONDS)
        thread.join(PATIENCE_SECONDS)


def _calls(work: Callable[[], None]) -> list[str]:
    """Names of the C calls that this thread makes in `work`; `python` for a call of a Python function."""
    calls: list[str] = []

    def count(frame: object, event: str, arg: object) -> None:
        if event in ("c_call", "call"):
            calls.append(getattr(arg, "__name__", "python"))

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    calls.remove("python")  # `work` itself
    return sorted(c for c in calls if c != "setprofile")


def test_no_call_costs_more_than_a_few_stores() -> None:
    """Counted, not timed: C calls made by one progress(), so that a system call or an allocation does not creep in."""
    from rolecall.agent.reporter import reporter

    reporter.progress(0)  # the thread is known from here on
    calls = _calls(lambda: reporter.progress(1, busy_seconds=0.1, tokens=3))
    assert calls == sorted([*4 * ["python"], "acquire", "get_ident", "monotonic", "release"])


def test_an_exception_is_only_queued_by_the_caller(tmp_path: Path) -> None:
    """Counted, not timed: the calling thread opens no socket and waits for no lock but the page's, which it holds
    briefly."""
    from rolecall.agent.reporter import reporter

    mute = _caught_error()
    reporter.exception(mute)  # names of its files are known from here on
    client = ReporterClient(tmp_path / "absent.sock", 1, 1)
    before, reporter._client = reporter._client, client
    try:
        calls = _calls(lambda: reporter.exception(mute))
    finally:
        reporter._client = before
    assert set(calls) <= {
        *("python", "acquire", "release", "monotonic", "put", "qsize"),  # the page's lock, and the queue
        *("append", "join", "get", "encode", "openssl_sha256", "hexdigest", "len", "pack_into"),  # its messages
    }
    assert calls.count("put") == 1


def _caught_error() -> BaseException:
    try:
        _fails(2)
    except RuntimeError as e:
        return e
    raise AssertionError


def test_an_agent_that_never_answers_costs_the_caller_nothing_and_memory_little(tmp_path: Path) -> None:
    child = Child(tmp_path)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(str(tmp_path / "agent.sock"))
        stuck.listen(1)  # like a stopped one: it accepts no connection
        child.start("trainer/0")
        many = 10 * NUM_QUEUED_MAX
        child.do(f"[reporter.exception(ValueError(str(i))) for i in range({many})]")
        shown = PageReader(child.page).read().exception
        assert shown is not None and (shown.number, shown.message) == (many, str(many - 1))
        child.do(f"assert reporter._client._queue.qsize() <= {NUM_QUEUED_MAX}")
    assert child.close() == ""


def test_queued_messages_are_sent_before_the_interpreter_ends(tmp_path: Path) -> None:
    code = f"""
import atexit, os
atexit.register(os._exit, 1)  # called after the reporter's own: no other way of being slow may save the message
from rolecall.agent.reporter import reporter
reporter.FLUSH_SECONDS = {PATIENCE_SECONDS}  # machines of tests may be slow
atexit.register(os.write, 2, b"ENDING")  # called before it
reporter.start(replica="trainer/1", rank=0, incarnation=1, secret="s", node_dir={str(tmp_path)!r})
raise ValueError("last words")
"""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen(4)
        listener.settimeout(PATIENCE_SECONDS)
        dying = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
        with listener.accept()[0] as registering:
            registering.recv(65536)
            assert dying.stderr is not None
            output = b""
            while not output.endswith(b"ENDING"):
                output += dying.stderr.read(1)
            registering.sendall(b'{"ok": true}\n')
        with listener.accept()[0] as telling:
            message = json.loads(telling.recv(65536))
            telling.sendall(b'{"ok": true}\n')
        assert (message["kind"], message["detail"]["message"]) == ("exception", "last words")
        dying.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_death_right_after_leaves_the_exception_on_the_page(tmp_path: Path, death: str) -> None:
    code = f"""
import os
from rolecall.agent.reporter import reporter
reporter.start(replica="trainer/1", rank=0, incarnation=1, secret="s", node_dir={str(tmp_path)!r})
reporter.exception(ValueError("gone"))
{death}
"""
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_SECONDS, check=False)
    [path] = tmp_path.glob("pages/*.page")
    shown = PageReader(path).read().exception
    assert shown is not None and (shown.number, shown.message) == (1, "gone")


def test_without_a_listener_interpreter_exit_is_not_delayed(tmp_path: Path) -> None:
    client = ReporterClient(tmp_path / "absent.sock", 1, 1)
    client.register(replica="trainer/0", rank=0, incarnation=1, secret="s")
    eventually(lambda: not client._heard, "the missing listener is detected")
    flushing = threading.Thread(target=client.flush, args=(threading.TIMEOUT_MAX,), daemon=True)
    flushing.start()
    flushing.join(PATIENCE_SECONDS)
    client._newest_identity += 1  # it gives up
    assert not flushing.is_alive()


def test_a_shorter_text_replaces_a_longer_one(child: Child) -> None:
    child.start("trainer/0")
    child.do("reporter.exception(ValueError('long ' * 50)); reporter.exception(KeyError('k'))")
    shown = PageReader(child.page).read().exception
    assert shown is not None and (shown.number, shown.type, shown.message, shown.where) == (2, "KeyError", "'k'", "")
