"""Evidence of collectors: the kernel log's newest lines, and RAS's current answer."""

import socket
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.agent.collectors.kernel import collector as kernel_log
from rolecall.agent.collectors.kernel.collector import KernelLogCollector
from rolecall.agent.collectors.nccl import ras as nccl_ras
from rolecall.agent.collectors.nccl.ras import NcclRasCollector
from rolecall.agent.collectors.runner import NoSuchCollector, Probes
from rolecall.agent.events import EventLog
from rolecall.core.clock import SystemClock
from rolecall.core.ids import NodeId
from rolecall.formats.kernel_log.timestamps import parse_line
from tests.agent.ras_server import RasServer, answers

NODE = NodeId("gpu-7")


def kernel(path: Path) -> KernelLogCollector:
    return KernelLogCollector(node=NODE, merger=XidMerger(), path=path)


def test_the_newest_lines_are_reported_and_the_cursor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "NUM_EVIDENCE_LINES", 3)
    log = tmp_path / "kern.log"
    log.write_text("".join(f"[ {n:4}.500000] usb 1-1: device {n}\n" for n in range(9)))
    it = kernel(log)
    it.read(1.0)
    for _ in range(2):
        assert it.evidence().decode().splitlines() == [
            "[    6.500000] usb 1-1: device 6",
            "[    7.500000] usb 1-1: device 7",
            "[    8.500000] usb 1-1: device 8",
        ]
    with log.open("a") as f:
        f.write("[   99.000000] usb 1-1: the last\n")
    assert it.evidence().endswith(b"the last\n")
    counted = {v.metric.name: v.value for v in it.read(2.0).values}
    assert 10.0 in counted.values(), "the regular polls miss nothing and repeat nothing"
    it.close()


def test_a_line_with_a_time_of_day_is_reported_as_one_of_this_node(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("2026-01-31T12:00:00.250000+00:00 other kernel: usb 1-1: gone\n")
    stamped = parse_line(kernel(log).evidence().decode().strip())
    assert stamped is not None and (stamped.host, stamped.message) == (NODE, "usb 1-1: gone")
    assert stamped.wall_at == 1_769_860_800.25


def test_an_unreadable_kernel_log_is_reported_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="does not exist: name the kernel log"):
        kernel(tmp_path / "none").evidence()


def test_ras_is_queried_again_in_json_then_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RasServer(answers(b'{"nccl_version": 1}', text=b"Job summary"))
    try:
        it = NcclRasCollector(NODE, server.address)
        assert it.evidence() == b'{"nccl_version": 1}'
        monkeypatch.setattr(nccl_ras, "JSON_BYTES_MAX", 12)
        assert it.evidence() == b"Job summary"
        monkeypatch.setattr(nccl_ras, "JSON_BYTES_MAX", 5)
        with pytest.raises(CollectorUnavailable, match="more than 5 bytes"):
            it.evidence()
        server.serve = lambda connection: connection.sendall(b"SSH-2.0\n")
        with pytest.raises(CollectorUnavailable, match="greeting is not RAS"):
            it.evidence()
    finally:
        server.close()
    with pytest.raises(CollectorUnavailable, match="nothing listens"):
        it.evidence()


def test_ras_that_goes_silent_in_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that leaps over every deadline as soon as it is waited for."""
    monkeypatch.setattr(nccl_ras, "POLL_SECONDS_MAX", 0.1)
    now = [0.0]

    def leap(connection: socket.socket) -> None:
        answers(b"")(connection)
        now[0] += 100.0
        connection.recv(1)  # until the client has gone

    server = RasServer(leap)
    try:
        with pytest.raises(CollectorUnavailable, match="did not answer in time"):
            NcclRasCollector(NODE, server.address, monotonic=lambda: now[0]).evidence()
    finally:
        server.close()


def test_a_collector_that_does_not_run_is_named(tmp_path: Path) -> None:
    clock = SystemClock()
    events = EventLog(tmp_path / "events.jsonl", NODE, clock)
    (tmp_path / "kern.log").write_text("[    1.000000] usb 1-1: gone\n")
    probes = Probes([kernel(tmp_path / "kern.log")], events, clock)
    assert probes.evidence("kernel_log") == b"[    1.000000] usb 1-1: gone\n"
    with pytest.raises(NoSuchCollector, match=r"nccl_ras does not run here: enable it in agent\.yaml"):
        probes.evidence("nccl_ras")
    events.close()
