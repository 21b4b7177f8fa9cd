"""NCCL's RAS asked over a socket, and the Inspector's files read as they grow."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.nccl import inspector as nccl_inspector
from rolecall.agent.collectors.nccl import ras as nccl_ras
from rolecall.agent.collectors.nccl.inspector import NcclInspectorCollector
from rolecall.agent.collectors.nccl.ras import NcclRasCollector, split_address
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEventKind
from tests.agent.ras_server import RasServer, Serve, answers
from tests.formats.test_nccl_inspector import line
from tests.formats.test_nccl_ras import TEXT, communicator, lost, rank, raw

NODE = NodeId("node-1")


def counts(*each: int) -> bytes:
    return raw(communicator(*(rank(n, 0, 0, 0, 0, number) for n, number in enumerate(each))))


@pytest.fixture
def server() -> Iterator[RasServer]:
    it = RasServer(answers(counts(5, 5)))
    yield it
    it.close()


def shown(reading: CollectorReading) -> dict[tuple[str, ...], float]:
    found = {(v.metric.name.removeprefix("rolecall_nccl_"), *v.labels[1:]): v.value for v in reading.values}
    assert len(found) == len(reading.values)
    assert all(v.labels[0] == NODE and len(v.labels) == len(v.metric.labels) for v in reading.values)
    return found


def kinds(reading: CollectorReading) -> list[str]:
    assert all(f.kind is AgentEventKind.NCCL for f in reading.facts)
    return [f.detail["what"] for f in reading.facts]


KEY = "000000000000ae94"


def test_a_healthy_job_is_values_and_no_fact(server: RasServer) -> None:
    reading = NcclRasCollector(NODE, server.address).read(1.0)
    values = shown(reading)
    assert (values["ras_up",], values["communicators",], values["ras_answers_total",]) == (1, 1, 1)
    assert values["communicator_ranks", KEY] == 2
    assert values["communicator_collectives_launched_total", KEY, "AllReduce"] == 5
    assert ("communicator_collectives_launched_total", KEY, "Reduce") not in values
    assert reading.facts == ()


def test_without_a_job_nothing_is_wrong(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address)
    assert shown(it.read(1.0))["ras_up",] == 1
    server.close()
    for at in (2.0, 3.0):
        gone = it.read(at)
        assert shown(gone)["ras_up",] == 0 and gone.facts == ()
        assert ("communicators",) not in shown(gone)


def test_without_a_job_and_without_ipv6_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` of /etc/hosts has both; where the kernel has IPv4 alone, the last answer is that of the other."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    no_family = 45  # AF_MAX: a kernel without IPv6 answers the same to AF_INET6
    found = [(family, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for family in (socket.AF_INET, no_family)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert shown(NcclRasCollector(NODE, f"localhost:{port}").read(0.0))[("ras_up",)] == 0.0


def test_ranks_apart_while_nothing_advances_are_suspicious_once_confirmed(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address, confirm_seconds=60.0)
    server.serve = answers(counts(101, 100, 101, 101))
    assert [kinds(it.read(at)) for at in (0.0, 15.0, 30.0, 45.0)] == [[], [], [], []]
    reading = it.read(60.0)
    assert kinds(reading) == ["suspicious"]
    assert "rank 1 (10.0.0.0, process 101, GPU 1)" in reading.facts[0].detail["because"]
    assert reading.facts[0].detail["communicator"] == KEY and reading.facts[0].detail["pids"] == "101"
    assert shown(reading)["communicator_suspicious", KEY] == 1
    assert shown(reading)["communicator_collectives_behind", KEY] == 1
    assert kinds(it.read(75.0)) == []
    server.serve = answers(counts(102, 102, 102, 102))
    after = it.read(90.0)
    assert kinds(after) == ["advances"] and shown(after)["communicator_suspicious", KEY] == 0


def test_ranks_apart_that_advance_are_not(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address, confirm_seconds=60.0)
    for n in range(20):
        server.serve = answers(counts(101 + n, 100 + n))
        assert kinds(it.read(15.0 * n)) == []


def test_few_polls_confirm_nothing_however_long(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address, confirm_seconds=60.0)
    server.serve = answers(counts(101, 100))
    assert [kinds(it.read(at)) for at in (0.0, 500.0)] == [[], []]
    assert kinds(it.read(501.0)) == ["suspicious"]


def test_polls_of_zeros_are_neither_progress_nor_its_absence(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address, confirm_seconds=60.0)
    zeros, apart = answers(counts(0, 0)), answers(counts(101, 100))
    for n in range(10):  # zeros alone: never
        server.serve = zeros
        reading = it.read(15.0 * n)
        assert kinds(reading) == [] and shown(reading)["communicator_suspicious", KEY] == 0
    for n, serve in enumerate((apart, zeros, apart, zeros)):
        server.serve = serve
        assert kinds(it.read(200.0 + 20 * n)) == []
    server.serve = apart
    assert kinds(it.read(280.0)) == ["suspicious"]
    server.serve = zeros
    reading = it.read(300.0)
    assert kinds(reading) == [] and shown(reading)["communicator_suspicious", KEY] == 1
    assert shown(reading)["communicator_collectives_launched_total", KEY, "AllReduce"] == 101  # a counter stays


def test_missing_ranks_are_reported_the_second_time_and_dead_ones_at_once(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address)
    one_lost = raw(communicator(rank(0), rank(1), missing=(lost(2),)))
    server.serve = answers(one_lost)
    assert [kinds(it.read(at)) for at in (0.0, 15.0, 30.0)] == [[], ["missing"], []]
    server.serve = answers(raw(communicator(rank(0), rank(1), missing=(lost(2, dead=True),))))
    reading = it.read(45.0)
    assert kinds(reading) == ["dead"] and "rank 2" in reading.facts[0].detail["because"]
    assert shown(reading)["communicator_dead_ranks", KEY] == 1
    assert kinds(it.read(60.0)) == []


def test_a_rank_that_left_its_communicator_is_not_missing(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address)
    server.serve = answers(raw(communicator(rank(0), missing=(lost(1, unresponsive=False),))))
    assert [kinds(it.read(at)) for at in (0.0, 15.0, 30.0)] == [[], [], []]


def test_errors_are_reported_once(server: RasServer) -> None:
    it = NcclRasCollector(NODE, server.address)
    server.serve = answers(raw(communicator(rank(0, async_error=2), rank(1, async_error=6))))
    reading = it.read(0.0)
    assert kinds(reading) == ["error"] and "Remote process error, System error" in reading.facts[0].detail["because"]
    assert kinds(it.read(15.0)) == []


def test_a_server_without_json_is_understood_in_text(server: RasServer) -> None:
    server.serve = answers(b"", text=TEXT, knows_json=False)
    it = NcclRasCollector(NODE, server.address)
    first = it.read(0.0)
    assert kinds(first) == ["dead", "error"]
    assert shown(first)["communicators",] == 9
    assert shown(first)["communicator_collectives_behind", "27a079b828ff1a75"] == 6638
    # Text lists only communicators with a condition: one that is no longer listed is well.
    for at in (30.0, 61.0):
        last = it.read(at)
    assert "suspicious" in kinds(last)
    server.serve = answers(b"", text=TEXT.split(b"Errors\n======")[0], knows_json=False)
    assert kinds(it.read(90.0)) == ["advances"]


def test_malformed_json_is_repaired_and_counted(server: RasServer) -> None:
    broken = raw(communicator(rank(0), missing=(lost(1),))).replace(b'"nvml_dev": 1,\n', b'"nvml_dev": 1\n')
    server.serve = answers(b"OK\n" + broken)
    values = shown(NcclRasCollector(NODE, server.address).read(0.0))
    assert (values["ras_answers_repaired_total",], values["communicator_missing_ranks", KEY]) == (1, 1)


def test_an_answer_in_single_bytes_is_read(server: RasServer) -> None:
    server.serve = answers(counts(7, 7), num_bytes=1)
    assert shown(NcclRasCollector(NODE, server.address).read(0.0))["communicator_ranks", KEY] == 2


def test_too_large_an_answer_is_asked_for_as_text(server: RasServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "JSON_BYTES_MAX", 20_000)
    large = raw(communicator(*(rank(n, 0, 0, 0, 0, 5) for n in range(100))))
    assert len(large) > 20_000 > len(TEXT)
    server.serve = answers(large, text=TEXT)
    it = NcclRasCollector(NODE, server.address)
    assert ("communicators",) not in shown(it.read(0.0))
    assert shown(it.read(1.0))["communicators",] == 9
    assert (shown(it.read(2.0))["communicators",], server.num_asked) == (9, 3)  # JSON was asked for once
    server.serve = answers(large, text=large)
    with pytest.raises(CollectorUnavailable, match="more than 20,000 bytes"):
        it.read(3.0)


def _closes(connection: socket.socket) -> None:
    connection.recv(100)


def _no_end(connection: socket.socket) -> None:
    connection.sendall(b"x" * 100_000)
    connection.recv(100)


def _another(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    connection.recv(100)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (_closes, "closed the connection|reset"),
        (_no_end, "a line of more than"),
        (_another, "the greeting is not"),
        (answers(b""), "an empty answer"),
        (answers(counts(1, 1)[:300]), "cut short"),
        (answers(b"ERROR: oh\n"), "neither JSON nor"),
    ],
)
def test_another_protocol_than_ras_is_reported(server: RasServer, serve: Serve, reason: str) -> None:
    server.serve = serve
    it = NcclRasCollector(NODE, server.address)
    with pytest.raises(CollectorUnavailable, match=reason):
        it.read(0.0)
    server.serve = answers(counts(3, 3))
    values = shown(it.read(1.0))
    assert (values["ras_answers_bad_total",], values["ras_answers_total",]) == (1, 1)


def test_a_server_that_does_not_answer_costs_the_deadline_and_no_more(
    server: RasServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "ANSWER_SECONDS_MAX", 0.3)
    done = threading.Event()
    server.serve = lambda connection: bool(done.wait(60)) and None
    with pytest.raises(CollectorUnavailable, match="did not answer in time"):
        NcclRasCollector(NODE, server.address).read(0.0)
    done.set()


def test_an_answer_slower_than_a_poll_is_awaited_in_the_next(
    server: RasServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "POLL_SECONDS_MAX", 0.3)
    go, whole = threading.Event(), answers(counts(5, 4), num_bytes=100)

    def serve(connection: socket.socket) -> None:
        greeting = b"SERVER PROTOCOL 2\nOK\nOK\n" + counts(5, 4)[:200]
        connection.sendall(greeting)
        go.wait(60)
        connection.sendall(counts(5, 4)[200:])
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass

    server.serve = serve
    it = NcclRasCollector(NODE, server.address)
    waiting = shown(it.read(0.0))
    assert waiting["ras_up",] == 1 and ("communicators",) not in waiting
    go.set()
    assert shown(it.read(1.0))["communicator_collectives_behind", KEY] == 1
    server.serve = whole
    assert shown(it.read(2.0))["ras_answers_total",] == 2


def test_an_answer_that_never_ends_is_given_up(server: RasServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "POLL_SECONDS_MAX", 0.1)
    monkeypatch.setattr(nccl_ras, "ANSWER_SECONDS_MAX", 0.35)
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n{")
        done.wait(60)

    server.serve = serve
    it = NcclRasCollector(NODE, server.address)
    assert it.read(0.0).facts == ()
    with pytest.raises(CollectorUnavailable, match="did not answer in time"):
        for _ in range(100):
            it.read(1.0)
    done.set()
    it.close()


def test_a_large_job_is_asked_more_rarely_until_something_is_wrong(server: RasServer) -> None:
    def job(late: int) -> bytes:
        ranks = [{**rank(n, 0, 0, 0, 0, 9 - (n == late)), "host": f"10.0.0.{n}"} for n in range(64)]
        return raw(communicator(*ranks))

    server.serve = answers(job(-1))
    it = NcclRasCollector(NODE, server.address, interval_seconds=10.0)
    for n in range(8):
        assert shown(it.read(10.0 * n))["communicator_ranks", KEY] == 64
    assert server.num_asked == 1
    server.serve = answers(job(5))
    for n in range(8, 12):
        it.read(10.0 * n)
    assert server.num_asked == 5


def test_labels_are_bounded_and_keep_their_communicator(server: RasServer) -> None:
    def job(first: int, last: int) -> bytes:
        return raw(
            *(communicator(rank(0, 0, 0, 0, 0, 5), rank(1, 0, 0, 0, 0, 5), name=hex(n)) for n in range(first, last))
        )

    it = NcclRasCollector(NODE, server.address)
    server.serve = answers(job(10, 40))
    before = {key[1] for key in shown(it.read(0.0)) if key[0] == "communicator_ranks"}
    assert len(before) == nccl_ras.NUM_LABELLED_MAX
    server.serve = answers(job(1, 40))
    assert {key[1] for key in shown(it.read(15.0)) if key[0] == "communicator_ranks"} == before


@pytest.mark.parametrize(
    ("text", "address"), [("localhost:28028", ("localhost", 28028)), ("[::1]:9", ("::1", 9)), (":7", ("localhost", 7))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["localhost", "host:", "host:0", "host:x", "host:70000"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        NcclRasCollector(NODE, text)


# --- the Inspector ------------------------------------------------------------------------------------------------


def test_the_inspectors_lines_are_followed_from_where_they_were(tmp_path: Path) -> None:
    log = tmp_path / "node-0-pid100.log"
    log.write_bytes(line(0, 1, 500.0) * 3)
    it = NcclInspectorCollector(NODE, tmp_path)
    assert ("inspector_operations_total", "AllReduce") not in shown(it.read(0.0))  # history
    whole = line(0, 2, 1000.0)
    with log.open("ab") as file:
        file.write(whole + whole[:40])
    values = shown(it.read(5.0))
    assert values["inspector_operations_total", "AllReduce"] == 1
    assert values["inspector_seconds_total", "AllReduce"] == pytest.approx(1e-3)
    assert values["inspector_bus_bytes_total", "AllReduce"] == pytest.approx(2e9 * 1e-3)
    assert values["inspector_message_bytes_total", "AllReduce"] == 1 << 20
    with log.open("ab") as file:
        file.write(whole[40:])
    values = shown(it.read(10.0))
    assert (values["inspector_operations_total", "AllReduce"], values["inspector_lines_bad_total",]) == (2, 0)


def test_a_file_that_is_new_replaced_or_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    it = NcclInspectorCollector(NODE, tmp_path / "later")
    assert shown(it.read(0.0))["inspector_lines_total",] == 0  # no directory yet
    log = tmp_path / "later" / "node-0-pid100.log"
    log.parent.mkdir()
    log.write_bytes(line(0, 1, 1.0) * 3)
    assert shown(it.read(1.0))["inspector_lines_total",] == 3
    log.rename(log.with_suffix(".old"))
    log.write_bytes(line(0, 4, 1.0) * 5)
    assert shown(it.read(2.0))["inspector_lines_total",] == 8
    os.truncate(log, 0)
    log.write_bytes(line(0, 9, 1.0))
    assert shown(it.read(3.0))["inspector_lines_total",] == 9
    log.unlink()
    assert shown(it.read(4.0))["inspector_lines_total",] == 9


def test_a_file_that_grows_too_fast_is_read_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = NcclInspectorCollector(NODE, tmp_path)
    it.read(0.0)
    one = line(0, 1, 1.0)
    monkeypatch.setattr(nccl_inspector, "BYTES_PER_POLL", 10 * len(one))
    (tmp_path / "a.log").write_bytes(one * 100)
    values = shown(it.read(1.0))
    assert values["inspector_lines_total",] == 9  # the first of the ten may be half a line
    assert values["inspector_skipped_bytes_total",] == 90 * len(one)
    assert values["inspector_lines_bad_total",] == 0


def test_a_line_without_end_costs_no_memory(tmp_path: Path) -> None:
    it = NcclInspectorCollector(NODE, tmp_path)
    it.read(0.0)
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 100_000)
    assert shown(it.read(1.0))["inspector_lines_bad_total",] == 1
    with log.open("ab") as file:
        file.write(b"x" * 100_000 + b"\n" + line(0, 1, 1.0))
    values = shown(it.read(2.0))
    assert (values["inspector_lines_bad_total",], values["inspector_operations_total", "AllReduce"]) == (1, 1)


def test_of_the_text_files_the_worst_of_each_gpu_is_shown(tmp_path: Path) -> None:
    (tmp_path / "nccl_inspector_metrics_GPU-1.prom").write_text(
        'nccl_bus_bandwidth_gbs{gpu="GPU3",collective="AllReduce",comm_name="a"} 600\n'
        'nccl_bus_bandwidth_gbs{gpu="GPU3",collective="AllReduce",comm_name="b"} 20\n'
        'nccl_collective_exec_time_microseconds{gpu="GPU3",collective="AllReduce",comm_name="a"} 10\n'
        'nccl_collective_exec_time_microseconds{gpu="GPU3",collective="AllReduce",comm_name="b"} 3000\n'
    )
    it = NcclInspectorCollector(NODE, tmp_path)
    for at in (0.0, 1.0):
        values = shown(it.read(at))
        assert values["inspector_bus_bandwidth_bytes", "3", "AllReduce"] == pytest.approx(20e9)
        assert values["inspector_execution_seconds", "3", "AllReduce"] == pytest.approx(3e-3)


def test_other_files_are_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    (tmp_path / "b.log").symlink_to("/dev/zero")
    (tmp_path / "c.prom").symlink_to("/dev/zero")
    assert shown(NcclInspectorCollector(NODE, tmp_path).read(0.0))["inspector_lines_total",] == 0


def test_a_directory_that_cannot_be_listed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CollectorUnavailable, match="Not a directory"):
        NcclInspectorCollector(NODE, tmp_path / "file").read(0.0)
