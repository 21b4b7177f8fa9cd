"""Flight Recorder dumps on request: a hung main thread, no torch, a recorder that fails, answers that no one can
trust."""

import http.client
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent import evidence
from rolecall.agent.evidence import EvidenceUnavailable, FlightRecorders
from rolecall.agent.reporter import flight_recorder_request as flight_request
from rolecall.agent.reporter.flight_recorder_request import (
    FlightRecorderResponder,
    FlightRecorderUnavailable,
    answer_paths,
    dump,
    request_path,
)
from rolecall.core.clock import SystemClock
from rolecall.core.rundir import bearer_token
from rolecall.detector.artifacts.flight_recorder import dumps as flight_dumps
from tests.agent.processes import TOKEN, AgentProcess, Child
from tests.support import PATIENCE_SECONDS, eventually

CONTENT = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": [], "rank": 3}
STAND_IN = (
    "import sys, types, pickle; m = types.ModuleType('torch._C._distributed_c10d'); "
    f"m._dump_nccl_trace = lambda **options: pickle.dumps({CONTENT!r}, protocol=2); "
    "sys.modules['torch._C._distributed_c10d'] = m"
)
"""For a process without torch."""
HANG = "import threading; threading.Event().wait()"


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    path = tmp_path / "node-1"
    (path / "pages").mkdir(parents=True)
    return path


@pytest.fixture
def child(node_dir: Path) -> Iterator[Child]:
    it = Child(node_dir)
    yield it
    it.close()


@pytest.fixture
def recorders(node_dir: Path) -> FlightRecorders:
    return FlightRecorders(node_dir / "pages", SystemClock())


def asked(recorders: FlightRecorders, child: Child) -> bytes:
    return recorders.dump(child.pid, child.start_ticks, lambda: child.process.poll() is None)


def left(node_dir: Path) -> list[str]:
    return sorted(p.name for p in (node_dir / "pages").iterdir() if "flight" in p.name)


def test_a_process_with_a_hung_main_thread_answers(
    child: Child, recorders: FlightRecorders, node_dir: Path, tmp_path: Path
) -> None:
    child.start("trainer/3")
    child.do(STAND_IN)
    child.execute(HANG)
    for _ in range(2):
        assert pickle.loads(asked(recorders, child)) == CONTENT
    assert left(node_dir) == []
    file = tmp_path / "trainer_rank_3"
    file.write_bytes(asked(recorders, child))
    assert flight_dumps.is_dump(file) and flight_dumps.read(file).rank == 3


def test_torch_is_never_imported_for_it(child: Child, recorders: FlightRecorders) -> None:
    child.start("trainer/0")
    with pytest.raises(EvidenceUnavailable, match=r"torch\.distributed is not imported in this process"):
        asked(recorders, child)
    child.do("import sys; assert 'torch' not in sys.modules")


def test_a_hanging_dump_stops_neither_beats_nor_the_agent(
    child: Child, recorders: FlightRecorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolecall.agent.processes.state_pages import PageReader

    monkeypatch.setattr(evidence, "FLIGHT_SECONDS_MAX", 0.6)
    child.start("trainer/0")
    child.do(STAND_IN, "import sys, threading; sys.modules['torch._C._distributed_c10d']._dump_nccl_trace = "
             "lambda **options: threading.Event().wait()")  # fmt: skip
    with pytest.raises(EvidenceUnavailable, match="no response in"):
        asked(recorders, child)
    reader = PageReader(child.page)
    beats = reader.read().beats
    eventually(lambda: reader.read().beats > beats, "it still beats")


def test_a_process_that_ends_or_has_no_page_is_not_waited_for(
    child: Child, recorders: FlightRecorders, node_dir: Path
) -> None:
    with pytest.raises(EvidenceUnavailable, match="no state page"):
        asked(recorders, child)
    child.start("trainer/0")
    child.signal(signal.SIGKILL)
    child.process.wait(PATIENCE_SECONDS)
    with pytest.raises(EvidenceUnavailable, match="the process ended"):
        asked(recorders, child)
    assert left(node_dir) == []


@pytest.fixture
def answering(tmp_path: Path) -> FlightRecorderResponder:
    page = tmp_path / "7-9.page"
    page.touch()
    return FlightRecorderResponder(page)


def module(**recorders: object) -> types.ModuleType:
    made = types.ModuleType("torch._C._distributed_c10d")
    vars(made).update(recorders)
    return made


def _fails(**options: object) -> bytes:
    raise RuntimeError("no recorder here")


def _older(*options: object) -> bytes:
    return b"an older one"


@pytest.mark.parametrize(
    ("recorders", "reported"),
    [
        ({"_dump_fr_trace": lambda **o: b"gloo"}, b"gloo"),
        ({"_dump_nccl_trace": lambda **o: b"empty", "_dump_fr_trace": lambda **o: b"with entries"}, b"with entries"),
        ({"_dump_nccl_trace": _fails, "_dump_fr_trace": lambda **o: b"gloo"}, b"gloo"),
        ({"_dump_nccl_trace": _older}, b"an older one"),
    ],
)
def test_the_recorder_that_holds_more_is_reported(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[str, object], reported: bytes
) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module(**recorders))
    assert dump() == reported


@pytest.mark.parametrize(
    ("recorders", "reason"),
    [
        ({}, "no Flight Recorder"),
        ({"_dump_nccl_trace": _fails}, "_dump_nccl_trace: RuntimeError: no recorder here"),
        ({"_dump_nccl_trace": lambda **o: None}, "no Flight Recorder"),
    ],
)
def test_why_there_is_no_dump(monkeypatch: pytest.MonkeyPatch, recorders: dict[str, object], reason: str) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module(**recorders))
    with pytest.raises(FlightRecorderUnavailable, match=reason):
        dump()


@pytest.mark.parametrize("request_", [b"", b"../../../etc/x", b"0123456789abcdeF", b"0123456789abcdef0", b"\xff" * 16])
def test_requests_that_are_none_are_left_alone(
    answering: FlightRecorderResponder, tmp_path: Path, request_: bytes
) -> None:
    request_path(tmp_path / "7-9.page").write_bytes(request_)
    answering.poll()
    assert answering._thread is None


@pytest.mark.parametrize(
    "kind",
    [
        "pipe",
        "link",
        "folder",
        pytest.param("another user's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give it")),
    ],
)
def test_what_another_process_of_the_group_requests_is_left_alone(
    answering: FlightRecorderResponder, tmp_path: Path, kind: str
) -> None:
    request = request_path(tmp_path / "7-9.page")
    if kind == "pipe":
        os.mkfifo(request)
    elif kind == "link":
        (tmp_path / "elsewhere").write_text("0123456789abcdef")
        request.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        request.mkdir()
    else:
        request.write_text("0123456789abcdef")
        os.chown(request, 4711, -1)
    poll = threading.Thread(target=answering.poll, daemon=True)
    poll.start()
    poll.join(PATIENCE_SECONDS)
    assert not poll.is_alive() and answering._thread is None and request.name in os.listdir(tmp_path)


def test_a_dump_too_large_is_not_written(
    answering: FlightRecorderResponder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_request, "DUMP_BYTES_MAX", 10)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module(_dump_fr_trace=lambda **o: b"x" * 11))
    page = tmp_path / "7-9.page"
    request_path(page).write_text("0123456789abcdef")
    answering.poll()
    whole, failed = answer_paths(page, "0123456789abcdef")
    eventually(failed.exists, "the reason is written")
    assert failed.read_text() == "its dump takes 11 bytes" and not whole.exists()


def test_an_answer_after_the_timeout_is_removed(
    answering: FlightRecorderResponder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, go = threading.Event(), threading.Event()

    def slow(**options: object) -> bytes:
        going.set()
        go.wait(PATIENCE_SECONDS)
        return b"late"

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module(_dump_fr_trace=slow))
    request = request_path(tmp_path / "7-9.page")
    request.write_text("0123456789abcdef")
    answering.poll()
    assert going.wait(PATIENCE_SECONDS)
    answering.poll()  # while it is answered, nothing is begun
    request.unlink()
    go.set()
    assert answering._thread is not None
    answering._thread.join(PATIENCE_SECONDS)
    assert [p.name for p in tmp_path.iterdir()] == ["7-9.page"]


@pytest.mark.parametrize(
    "kind",
    [
        "link",
        "pipe",
        "large",
        pytest.param("another user's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give it")),
    ],
)
def test_answers_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    page = tmp_path / "7-9.page"
    page.touch()
    monkeypatch.setattr(evidence.secrets, "token_hex", lambda n: "0123456789abcdef")
    monkeypatch.setattr(evidence, "DUMP_BYTES_MAX", 10)
    whole, _ = answer_paths(page, "0123456789abcdef")

    def answered() -> bool:  # like a malicious process, between two polls
        if not whole.exists() and not whole.is_symlink():
            if kind == "link":
                whole.symlink_to("/etc/passwd")
            elif kind == "pipe":
                os.mkfifo(whole)
            elif kind == "large":
                whole.write_bytes(b"x" * 11)
            else:
                whole.write_bytes(b"forged")
                os.chown(whole, 4711, -1)
        return True

    reason = {
        "link": "cannot be written or its answer read",
        "pipe": "not a regular file",
        "large": "exceeds 10",
        "another user's": "it is user 4711's",
    }
    proc = tmp_path.parent / f"{tmp_path.name}-proc"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "status").write_text("Uid:\t1000\t1000\t1000\t1000\n")
    with pytest.raises(EvidenceUnavailable, match=reason[kind]):
        FlightRecorders(tmp_path, SystemClock(), proc).dump(7, 9, answered)
    assert [p.name for p in tmp_path.iterdir()] == ["7-9.page"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_file_that_others_put_beside_the_request_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(FlightRecorders, "_clean", lambda *args: None)  # placed after the agent has cleaned
    pages, own = tmp_path / "pages", tmp_path / "own"
    pages.mkdir()
    (pages / "7-9.page").touch()
    own.write_text("the agent's")
    request = request_path(pages / "7-9.page")
    placed = request.with_name(request.name + ".tmp")
    if kind == "link":
        placed.symlink_to(own)
    else:
        os.mkfifo(placed)
    reasons, written = [], []

    def ends() -> bool:
        written.append((request.read_text(), request.stat().st_mode & 0o777))
        return False

    def ask() -> None:
        try:
            FlightRecorders(pages, SystemClock()).dump(7, 9, ends)
        except EvidenceUnavailable as e:
            reasons.append(str(e))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert reasons == ["the process ended"] and own.read_text() == "the agent's"
    assert [mode for _, mode in written] == [0o644] and len(written[0][0]) == 16


def test_a_request_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "7-9.page").touch()
    request_path(tmp_path / "7-9.page").mkdir()
    with pytest.raises(EvidenceUnavailable, match="the request cannot be written"):
        FlightRecorders(tmp_path, SystemClock()).dump(7, 9, lambda: True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7-9.flight-request", "7-9.page"]


def test_over_http_with_the_token_and_for_registered_processes_only(node_dir: Path, child: Child) -> None:
    agent = AgentProcess(node_dir)
    try:
        child.start("trainer/3")
        eventually(lambda: agent.newest("trainer/3") is not None, "it is registered")
        child.do(STAND_IN)
        child.execute(HANG)
        token = f"Bearer {bearer_token(TOKEN)}"
        path = f"/v1/evidence/flight_recorder?pid={child.pid}"
        assert agent.get(path)[0] == 401
        assert agent.get(path.replace(str(child.pid), str(os.getpid())), Authorization=token)[0] == 404
        connection = http.client.HTTPConnection(agent.netloc, timeout=PATIENCE_SECONDS)
        connection.request("GET", path, headers={"Authorization": token})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert pickle.loads(body) == CONTENT
        connection.close()
    finally:
        agent.close()
