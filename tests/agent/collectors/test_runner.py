"""Collectors in threads of their own: one that hangs, fails or floods is reported, and affects no other."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import NUM_REASONS_MAX, CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.runner import FACTS_MAX, HANG_SECONDS, Probe, Probes
from rolecall.agent.events import EventLog
from rolecall.agent.http.exposition import agent_value
from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEventKind
from tests.support import PATIENCE_SECONDS, eventually

NODE = NodeId("node-1")
VALUE = agent_value("agent_processes", 1.0, NODE)


class Scripted:
    """A collector that does as reported."""

    def __init__(self, name: str, read: Callable[[], CollectorReading], interval_seconds: float = 0.01) -> None:
        self.name, self.interval_seconds, self._read = name, interval_seconds, read
        self.num_reads, self.closed = 0, False

    def read(self, at: float) -> CollectorReading:
        self.num_reads += 1
        return self._read()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl", NODE, SystemClock())
    yield log
    log.close()


def reported(events: EventLog) -> list[tuple[str, str]]:
    return [(str(e.kind), e.detail.get("probe", "")) for e in events.after(0).events]


def test_a_reading_becomes_values_and_events(events: EventLog) -> None:
    fact = Fact(kind=AgentEventKind.XID, detail={"xid": "79"}, role="trainer", replica="trainer/0", rank=3)
    probe = Probe(
        Scripted("kernel", lambda: CollectorReading((VALUE,), (fact,), lambda: "DCGM 1\n")), events, FakeClock()
    )
    assert probe.newest()[1] == CollectorReading() and not probe.state().up
    assert probe.once()
    assert probe.newest()[1].values == (VALUE,) and probe.newest()[1].dcgm() == "DCGM 1\n" and probe.state().up
    (event,) = events.after(0).events
    assert (event.kind, event.detail, event.replica, event.rank) == (AgentEventKind.XID, {"xid": "79"}, "trainer/0", 3)


def test_a_collector_that_cannot_read_is_down_until_it_can_and_each_change_is_reported_once(
    events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[CollectorReading | Exception] = [
        CollectorReading((VALUE,)),
        CollectorUnavailable("/dev/kmsg: permission denied"),
        CollectorUnavailable("/dev/kmsg: permission denied"),
        CollectorReading((VALUE,)),
        ZeroDivisionError("a defect"),
    ]

    def read() -> CollectorReading:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    probe = Probe(Scripted("kernel", read), events, FakeClock())
    assert [probe.once() for _ in range(3)] == [True, False, False]
    assert probe.newest()[1] == CollectorReading() and probe.state().reason == "/dev/kmsg: permission denied"
    assert probe.once() and probe.newest()[1].values == (VALUE,)
    assert not probe.once() and "ZeroDivisionError: a defect" in probe.state().reason
    assert reported(events) == [("probe_down", "kernel"), ("probe_up", "kernel"), ("probe_down", "kernel")]
    assert caplog.messages.count("kernel cannot be read: /dev/kmsg: permission denied") == 1


def test_a_read_that_hangs_is_reported_once_and_its_values_are_shown_no_more(events: EventLog) -> None:
    clock, inside, go_on, block = FakeClock(), threading.Event(), threading.Event(), threading.Event()

    def read() -> CollectorReading:
        if block.is_set():
            inside.set()
            assert go_on.wait(PATIENCE_SECONDS)
        return CollectorReading((VALUE,))

    probe = Probe(Scripted("gpu", read), events, clock)
    probe.once()
    block.set()
    thread = threading.Thread(target=probe.once)
    thread.start()
    assert inside.wait(PATIENCE_SECONDS)
    probe.check_hang(clock.monotonic())
    assert probe.newest()[1].values == (VALUE,)  # it may still come
    clock.advance(HANG_SECONDS + 1)
    probe.check_hang(clock.monotonic())
    probe.check_hang(clock.monotonic())
    assert probe.newest()[1] == CollectorReading() and "hanging" in probe.state().reason
    assert reported(events) == [("probe_down", "gpu")]
    go_on.set()
    thread.join(PATIENCE_SECONDS)
    assert probe.newest()[1].values == (VALUE,)
    assert reported(events) == [("probe_down", "gpu"), ("probe_up", "gpu")]


def test_a_read_that_ends_while_it_is_read_is_no_hang(events: EventLog) -> None:
    probe = Probe(Scripted("gpu", lambda: CollectorReading((VALUE,))), events, FakeClock())
    probe.once()
    probe._report_state("its read hangs", of_read=1000.0)  # that read had ended in the meantime
    assert probe.state().up and reported(events) == []


def test_a_flood_of_facts_is_cut_and_counted(events: EventLog) -> None:
    facts = tuple(Fact(kind=AgentEventKind.KERNEL, detail={"line": str(n)}) for n in range(FACTS_MAX + 9))
    probe = Probe(Scripted("kernel", lambda: CollectorReading(facts=facts)), events, FakeClock())
    probe.once()
    assert len(events.after(0).events) == FACTS_MAX and probe.state().facts_dropped == 9


def test_one_that_hangs_delays_neither_the_others_nor_the_end(events: EventLog) -> None:
    never = threading.Event()

    def hang() -> CollectorReading:
        never.wait(PATIENCE_SECONDS)
        return CollectorReading()

    stuck, well = Scripted("gpu", hang), Scripted("storage", lambda: CollectorReading((VALUE,)))
    probes = Probes([stuck, well], events, SystemClock())
    probes.start()
    eventually(lambda: stuck.num_reads == 1 and well.num_reads > 3, "the other continues")
    assert {s.name: s.up for s in probes.states()} == {"gpu": False, "storage": True}
    probes.stop()
    reads = well.num_reads
    assert well.closed and not stuck.closed
    never.set()
    assert well.num_reads == reads


def test_a_reason_is_logged_once() -> None:
    reasons = LoggedOnce()
    assert [reasons.is_new(r) for r in ("a", "b", "a")] == [True, True, False]


def test_logged_reasons_are_remembered_up_to_a_bound() -> None:
    reasons = LoggedOnce()
    assert reasons.is_new("a") and not reasons.is_new("a")
    for n in range(3 * NUM_REASONS_MAX):
        reasons.is_new(str(n))
    assert len(reasons.reasons) <= NUM_REASONS_MAX
