"""A watch keeps what it can see, name, replace and end in its job, for the dashboard, and never waits for an agent."""

import threading
from pathlib import Path
from typing import Any

from rolecall.core.clock import FakeClock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.journal import Journal
from rolecall.core.telemetry import (
    NO_PAGE,
    UNCOUNTED,
    AgentEvent,
    AgentEventKind,
    Phase,
    ProcessSample,
    SampleBatch,
)
from rolecall.detector.base.observation import Observation
from rolecall.views.observed_capabilities import FLAG, ObservedCapability, from_json, to_json
from rolecall.watch.job_facts import NoAnswer
from rolecall.watch.visibility import EVERY_SECONDS, FIRST_SECONDS, RecordedCapabilities
from tests.support import eventually

WALL = 1_800_000_000.0
PAGE = 'rolecall_probe_up{probe="kernel_log"} 0\nrolecall_probe_up{probe="gpu"} 1\n'


def process(node: str, rank: int) -> ProcessId:
    return ProcessId(node=NodeId(node), pid=40 + rank, start_ticks=9)


def sample(node: str, rank: int, phase: str = NO_PAGE, **more: Any) -> ProcessSample:
    fields: dict[str, Any] = {"at": 10.0, "wall_at": WALL, "alive": True} | more
    return ProcessSample(
        process=process(node, rank), role="trainer", replica="trainer/0", rank=rank, incarnation=UNCOUNTED,
        page_ok=phase != NO_PAGE, phase=phase, **fields,
    )  # fmt: skip


def event(node: str, rank: int, kind: AgentEventKind = AgentEventKind.REGISTERED, **detail: str) -> AgentEvent:
    return AgentEvent(
        seq=1, kind=kind, node=NodeId(node), at=1.0, wall_at=WALL, process=process(node, rank), role="trainer",
        replica="trainer/0", rank=rank, detail=detail,
    )  # fmt: skip


class Source:
    def __init__(self, *samples: ProcessSample, events: tuple[AgentEvent, ...] = ()) -> None:
        self.samples, self.events = samples, events

    def poll(self, timeout_seconds: float) -> Observation:
        del timeout_seconds
        nodes = dict.fromkeys(s.process.node for s in self.samples)
        batches = tuple(
            SampleBatch(
                node=node, agent_pid=1, cursor=1, lost=0, at=10.0, wall_at=WALL, hosts=(),
                processes=tuple(s for s in self.samples if s.process.node == node),
            )
            for node in nodes
        )  # fmt: skip
        events, self.events = self.events, ()
        return Observation(wall_at=WALL, batches=batches, events=events)


class Watch:
    """One watch, its journal and its agents."""

    def __init__(self, folder: Path, source: Source, *, token: bool = False) -> None:
        self.clock, self.source = FakeClock(), source
        self.journal = Journal(f"sqlite:///{folder / 'journal.db'}", clock=self.clock)
        self.pages: dict[str, str | None] = {"http://a": PAGE, "http://b": PAGE}
        self.asked: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.recorded = RecordedCapabilities(
            source,
            self.journal,
            self.clock,
            urls=lambda: {"a": "http://a", "b": "http://b"},
            get=self.get,
            may_read_stacks=lambda _: token,
        )

    def get(self, url: str, path: str, seconds: float) -> bytes:
        self.asked.append(url + path)
        assert self.answers.wait(30.0) and seconds > 0
        page = self.pages[url]
        if page is None:
            raise NoAnswer("connection refused")
        return page.encode()

    def found(self) -> tuple[ObservedCapability, ...]:
        return from_json(self.journal.flag(FLAG))

    def finds_out(self) -> dict[tuple[str, str], list[ObservedCapability]]:
        """The first answer, by what it is about."""
        self.recorded.poll(0.0)
        self.clock.advance(FIRST_SECONDS)
        self.recorded.poll(0.0)
        eventually(lambda: not self.recorded.is_busy, "the thread to end")
        self.recorded.poll(0.0)
        by: dict[tuple[str, str], list[ObservedCapability]] = {}
        for one in self.found():
            by.setdefault((one.about, one.name), []).append(one)
        return by


def test_ranks_that_can_the_same_are_one_line(tmp_path: Path) -> None:
    found = Watch(tmp_path, Source(*(sample("a", n) for n in range(3)), sample("b", 3))).finds_out()
    (steps,) = found["seen", "steps"]
    assert (steps.can, steps.ranks, steps.num_ranks) == ("no", "trainer/0 0-3", 4)
    assert "reports nothing" in steps.because and "rolecall exec" in steps.fix
    assert found["seen", "process"][0].can == "yes"


def test_a_registration_and_the_phases_of_the_last_minute_count(tmp_path: Path) -> None:
    works: dict[str, Any] = {"progress": 9, "step": 9, "phase_entries": 20, "work_units": 9, "busy_seconds": 3.0}
    source = Source(
        sample("a", 0, Phase.STEP, **works), sample("a", 0, Phase.WAIT, **works),
        events=(event("a", 0, source="hooks", flight_recorder="2000"),),
    )  # fmt: skip
    found = Watch(tmp_path, source, token=True).finds_out()
    assert found["seen", "steps"][0].because == "from torch's hooks (`rolecall exec`)"
    assert found["seen", "phases"][0].because == "in the last minute: step, wait"
    assert found["seen", "stacks"][0].can == "yes" and found["seen", "own time of a step"][0].can == "yes"


def test_why_a_collector_cannot_read_comes_from_its_event(tmp_path: Path) -> None:
    down = event("a", 0, AgentEventKind.PROBE_DOWN, probe="kernel_log", reason="/dev/kmsg: permission denied")
    found = Watch(tmp_path, Source(sample("a", 0), events=(down,))).finds_out()
    assert found["seen", "kernel log"][0].because == "/dev/kmsg: permission denied"
    assert found["seen", "GPU"][0].can == "none", "its agent looked, and there is none"


def test_an_agent_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    watch = Watch(tmp_path, Source(sample("a", 0), sample("b", 1)))
    watch.pages["http://b"] = None
    found = watch.finds_out()
    assert sum(one.num_ranks for one in found["seen", "steps"]) == 2
    watch.answers.clear()
    watch.clock.advance(EVERY_SECONDS)
    watch.recorded.poll(0.0)
    before = len(watch.asked)
    watch.clock.advance(10 * EVERY_SECONDS)
    assert watch.recorded.poll(0.0).batches, "polls go on"
    assert watch.recorded.is_busy and len(watch.asked) <= before + 1, "one look at a time"
    watch.answers.set()
    eventually(lambda: not watch.recorded.is_busy, "the thread to end")


def test_what_has_ended_is_left_out(tmp_path: Path) -> None:
    watch = Watch(tmp_path, Source(sample("a", 0), sample("a", 1)))
    assert watch.finds_out()["seen", "steps"][0].num_ranks == 2
    watch.source.samples = (sample("a", 0), sample("a", 1, alive=False))
    watch.clock.advance(EVERY_SECONDS)
    watch.recorded.poll(0.0)
    eventually(lambda: not watch.recorded.is_busy, "the thread to end")
    watch.recorded.poll(0.0)
    (steps,) = (one for one in watch.found() if one.name == "steps")
    assert (steps.ranks, steps.num_ranks) == ("trainer/0 0", 1)


def test_nothing_is_asked_before_a_rank_is_seen(tmp_path: Path) -> None:
    watch = Watch(tmp_path, Source())
    assert watch.finds_out() == {} and watch.asked == []


def test_garbage_is_nothing() -> None:
    one = ObservedCapability("seen", "steps", "no", "it reports nothing", "rolecall exec", "trainer/0 0", 1)
    assert from_json(to_json([one])) == (one,)
    assert from_json(None) == from_json("{") == from_json('[["seen"]]') == from_json("[1]") == ()
