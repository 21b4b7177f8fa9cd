"""Jobs side by side in one run, all with the role `trainer`: none is measured by another one."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, SampleBatch, job_of
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector

NODE = NodeId("vm")
WALL = 1_700_000_000.0
SAMPLE_SECONDS = 0.2
TORCHFT = "http://head:29510"


@dataclass
class Rank:
    """A step every `seconds`: between two steps, in its step, in a collective."""

    replica: str
    rank: int
    pid: int
    detail: dict[str, str]  # of its registration
    seconds: float = 1.0
    began: float = 100.0
    collects: bool = True
    incarnation: int = UNCOUNTED  # or as the watch counts it, where it may act
    stands: dict[str, Any] = field(default_factory=dict)  # from now on

    @property
    def process(self) -> ProcessId:
        return ProcessId(node=NODE, pid=self.pid, start_ticks=7)

    def stand(self, phase: str, now: float) -> None:
        """It goes on to this phase, and stands still there."""
        at = self.fields(now)
        entered = at["collectives_entered"] + (phase == "reduce" and at["phase"] != "reduce")
        moved = {"phase": phase, "phase_since": now, "phase_entries": at["phase_entries"] + 1}
        self.stands = {**at, **moved, "collectives_entered": entered}

    def fields(self, now: float) -> dict[str, Any]:
        if self.stands:
            return self.stands
        step, part = divmod(now - self.began, self.seconds)
        number, part = int(step), part / self.seconds
        place = (part >= 0.3) + (part >= 0.6 and self.collects)
        return {
            "phase": ("wait", "step", "reduce")[place],
            "phase_since": self.began + (number + 0.3 * place) * self.seconds,
            "phase_entries": 3 * number + place,
            "step": number,
            "progress": number,
            "progress_at": self.began + number * self.seconds,
            "work_units": number,
            "busy_seconds": 0.6 * number * self.seconds,
            "collectives_entered": number + (place == 2),
            "collectives_done": number,
        }


class Jobs:
    """What one watch sees of them."""

    def __init__(self, incarnation: int = UNCOUNTED, roles: dict[str, int] | None = None) -> None:
        self.now, self.ranks, self.incarnation = 100.0, list[Rank](), incarnation
        self.detector = LiveDetector(DetectorConfig(), roles)
        self.events: list[AgentEvent] = []

    def start(self, replica: str, pid: int, ranks: int = 1, seconds: float = 1.0, **detail: str) -> list[Rank]:
        new = [Rank(replica, n, pid + n, detail, seconds, self.now, incarnation=self.incarnation) for n in range(ranks)]
        self.ranks += new
        self.events += [self._event(AgentEventKind.REGISTERED, r, {"launcher": "torchrun", **detail}) for r in new]
        return new

    def end(self, ranks: list[Rank]) -> None:
        self.ranks = [r for r in self.ranks if r not in ranks]
        for r in ranks:
            self.events.append(self._event(AgentEventKind.FINISHED, r, {}))
            self.events.append(self._event(AgentEventKind.EXITED, r, {"code": "0"}))

    def _event(self, kind: AgentEventKind, r: Rank, detail: dict[str, str]) -> AgentEvent:
        return AgentEvent(
            seq=1, kind=kind, node=NODE, at=self.now, wall_at=WALL + self.now, process=r.process, role="trainer",
            replica=r.replica, rank=r.rank, incarnation=r.incarnation, detail=detail,
        )  # fmt: skip

    def _sample(self, r: Rank) -> ProcessSample:
        return ProcessSample(
            process=r.process, role="trainer", replica=r.replica, rank=r.rank, incarnation=r.incarnation, at=self.now,
            wall_at=WALL + self.now, alive=True, page_ok=True, beats=int(10 * self.now), proc_state="S",
            cpu_seconds=0.01 * self.now, **r.fields(self.now),
        )  # fmt: skip

    def run(self, seconds: float) -> list[Diagnosis]:
        """All that was diagnosed meanwhile."""
        found: dict[str, Diagnosis] = {}
        for _ in range(round(seconds / SAMPLE_SECONDS)):
            self.now += SAMPLE_SECONDS
            batch = SampleBatch(
                node=NODE, agent_pid=1, cursor=0, lost=0, at=self.now, wall_at=WALL + self.now, hosts=(),
                processes=tuple(map(self._sample, self.ranks)),
            )  # fmt: skip
            events, self.events = tuple(self.events), []
            seen = Observation(wall_at=WALL + self.now, batches=(batch,), events=events)
            found |= {d.key: d for d in self.detector.observe(seen)}
        return list(found.values())

    def groups(self) -> dict[tuple[str, int], str]:
        return {(s.replica, s.rank): s.group for s in self.detector.processes() if not s.gone}


@pytest.mark.parametrize(
    ("detail", "job"),
    [
        ({"job": "run-1", "rendezvous": "head:29500"}, "run-1"),
        ({"rendezvous": "head:29500"}, "head:29500"),
        ({"job": "01000000"}, "01000000"),
        ({"rendezvous": "127.0.0.1:29500"}, "vm 127.0.0.1:29500"),
        ({"rendezvous": "127.0.0.1:29500", "lighthouse": TORCHFT}, TORCHFT),
        ({"rendezvous": "head:29500", "lighthouse": "http://localhost:29510"}, "vm http://localhost:29510"),
        ({}, ""),
    ],
)
def test_what_tells_a_job_from_others(detail: dict[str, str], job: str) -> None:
    event = AgentEvent(seq=1, kind=AgentEventKind.REGISTERED, node=NODE, at=0.0, wall_at=0.0, detail=detail)
    assert job_of(event) == job


def _named(found: list[Diagnosis]) -> list[tuple[str, str, int | None]]:
    return [(str(d.fault_class), s.replica, s.rank) for d in found for s in d.suspects]


@pytest.mark.parametrize(("is_idle", "incarnation"), [(True, UNCOUNTED), (True, 1), (False, UNCOUNTED)])
def test_of_a_hang_in_a_collective_only_ranks_of_the_same_job_are_named(is_idle: bool, incarnation: int) -> None:
    jobs = Jobs(incarnation)
    mine = jobs.start("trainer/0", 100, ranks=2, rendezvous="h:1")
    (other,) = jobs.start("trainer/7", 200, rendezvous="h:2")
    other.collects = False
    assert jobs.run(30.0) == []
    mine[1].stand("wait", jobs.now)
    if is_idle:
        other.stand("wait", jobs.now)
    jobs.run(3.0)
    mine[0].stand("reduce", jobs.now)
    assert _named(jobs.run(60.0)) == [("hang", "trainer/0", 1)]


def test_processes_of_the_runtime_are_of_one_job_whatever_ray_calls_it() -> None:
    jobs = Jobs(1, {"trainer": 2})
    jobs.start("trainer/0", 100, job="01000000")
    jobs.start("trainer/1", 200, job="02000000")  # its supervisor was started again
    jobs.run(5.0)
    assert set(jobs.groups().values()) == {"trainer"}


def test_replicas_of_torchft_are_one_job_whatever_their_rendezvous() -> None:
    jobs = Jobs()
    first = jobs.start("trainer/0", 100, rendezvous="h:1", lighthouse=TORCHFT)
    second = jobs.start("trainer/1", 200, rendezvous="h:2", lighthouse=TORCHFT)
    assert jobs.run(30.0) == []
    second[0].stand("wait", jobs.now)
    jobs.run(3.0)
    first[0].stand("reduce", jobs.now)
    assert _named(jobs.run(60.0)) == [("hang", "trainer/1", 0)]


def test_a_job_whose_steps_are_longer_is_neither_slow_nor_hung() -> None:
    jobs = Jobs()
    jobs.start("trainer/0", 100, seconds=0.5, rendezvous="h:1")
    jobs.run(60.0)
    jobs.start("trainer/7", 200, seconds=4.0, rendezvous="h:2")
    jobs.start("trainer/8", 300, seconds=40.0, rendezvous="h:3")
    assert jobs.run(400.0) == []


def test_a_rank_that_becomes_slow_is_named_beside_another_job_too() -> None:
    jobs = Jobs()
    mine = jobs.start("trainer/0", 100, ranks=4, rendezvous="h:1")
    jobs.start("trainer/7", 200, seconds=3.0, rendezvous="h:2")
    assert jobs.run(90.0) == []
    slow = mine[2]
    before = slow.fields(jobs.now)
    slow.began, slow.seconds = jobs.now - 4.0 * (jobs.now - slow.began), 4.0
    assert slow.fields(jobs.now)["progress"] == before["progress"]
    found = jobs.run(90.0)
    assert (FaultClass.SLOW, "trainer/0", 2) in _named(found) and {s.replica for d in found for s in d.suspects} == {
        "trainer/0"
    }


def test_a_job_keeps_what_was_learned_when_it_starts_again_and_another_one_takes_nothing_over() -> None:
    jobs = Jobs()
    mine = jobs.start("trainer/0", 100, ranks=2, rendezvous="h:1")
    theirs = jobs.start("trainer/7", 200, rendezvous="h:2")
    jobs.run(20.0)
    assert jobs.groups() == {("trainer/0", 0): "trainer", ("trainer/0", 1): "trainer", ("trainer/7", 0): "trainer/7"}
    jobs.end(mine[:1])
    jobs.start("trainer/0", 300, ranks=1, rendezvous="h:9")  # another port, while rank 1 still ends
    jobs.run(5.0)
    assert jobs.groups()["trainer/0", 0] == "trainer"
    jobs.end([r for r in jobs.ranks if r not in theirs])
    jobs.run(5.0)
    state = json.loads(json.dumps(jobs.detector.state()))
    jobs.detector = LiveDetector.resumed(DetectorConfig(), {}, state)
    jobs.events = [jobs._event(AgentEventKind.REGISTERED, r, r.detail) for r in theirs]  # repeated to a new watch
    jobs.run(5.0)
    assert jobs.groups() == {("trainer/7", 0): "trainer/7"}
    jobs.start("trainer/0", 400, rendezvous="h:10")
    jobs.run(5.0)
    assert jobs.groups() == {("trainer/7", 0): "trainer/7", ("trainer/0", 0): "trainer"}


def test_what_was_learned_of_a_job_beside_another_one_is_dropped_after_its_end() -> None:
    jobs = Jobs()
    jobs.start("trainer/0", 100, rendezvous="h:1")
    second = jobs.start("trainer/7", 200, rendezvous="h:2")
    jobs.run(30.0)
    assert '"trainer/7", "step"' in json.dumps(jobs.detector.state())
    jobs.end(second)
    jobs.run(1100.0)
    jobs.start("trainer/8", 300, rendezvous="h:3")
    jobs.run(1.0)
    learned = jobs.detector.state()
    assert "trainer/7" not in json.dumps([learned["fleet"]["gaps"], learned["stages"]["slow"]])


def test_learned_state_from_before_jobs_were_told_apart_is_read() -> None:
    jobs = Jobs()
    ranks = jobs.start("trainer/0", 100, ranks=2, rendezvous="h:1")
    jobs.run(30.0)
    state = json.loads(json.dumps(jobs.detector.state()))
    for subject in state["subjects"]:
        del subject["job"], subject["group"]
    jobs.detector = LiveDetector.resumed(DetectorConfig(), {}, state)
    jobs.events = [jobs._event(AgentEventKind.REGISTERED, r, r.detail) for r in ranks]
    assert jobs.run(5.0) == [] and set(jobs.groups().values()) == {"trainer"}
