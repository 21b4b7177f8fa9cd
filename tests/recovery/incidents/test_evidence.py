"""Evidence beside the loop: asked for when an incident is opened, written whenever it comes, and in no one's way."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import EvidenceCollected
from rolecall.recovery import isolation
from rolecall.recovery.incidents import NUM_COLLECTIONS_MAX
from rolecall.recovery.interfaces import CollectedEvidence
from rolecall.recovery.isolation import EvidenceRecorder
from rolecall.testing.recovery_world import diagnosis
from tests.recovery.world import World

EVIDENCE = EvidenceCollected(
    because="2 stacks", files=(), statements=("stack: wait",), findings=(), missing=(), seconds=0.2
)


class Asked:
    """Witnesses who say what they are told to say, or fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, FaultClass]] = []
        self.parts: list[tuple[int, list[str]]] = []  # of each request, and the nodes of its suspects
        self.says: list[CollectedEvidence] = []
        self.error = ""

    def request(self, incident_id: str, diagnosis: Diagnosis, part: int = 1) -> None:
        if self.error:
            raise ValueError(self.error)
        self.asked.append((incident_id, diagnosis.fault_class))
        self.parts.append((part, [str(s.node) for s in diagnosis.suspects]))

    def collected(self) -> list[CollectedEvidence]:
        if self.error:
            raise ValueError(self.error)
        said, self.says = self.says, []
        return said


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def world(tmp_path: Path, asked: Asked) -> World:
    world = World(tmp_path)
    world.evidence_collector = asked
    return world


def test_evidence_is_asked_for_once_and_written_when_it_comes(world: World, asked: Asked) -> None:
    watch = world.watch()
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    assert asked.asked == [("inc-1-rollout-1", FaultClass.HANG)]
    before = world.only()
    asked.says = [
        CollectedEvidence(incident_id="inc-1-rollout-1", payload=EVIDENCE),
        CollectedEvidence(incident_id="inc-9", payload=EVIDENCE),
    ]
    world.run(1, watch)
    (event,) = world.events(EventKind.EVIDENCE_COLLECTED)
    assert (event.incident_id, event.payload) == ("inc-1-rollout-1", EVIDENCE)
    assert event.caused_by == before.last_event_id
    assert world.only() == before, "it is no move of the incident"


def test_a_failing_evidence_collector_delays_no_recovery(
    world: World, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    watch = world.watch()
    world.run(2, watch)
    asked.error = "a row too many"
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    assert str(world.only().outcome) == "resolved" and "a row too many" in caplog.text


def test_a_successor_asks_again_for_what_is_not_in_the_journal(world: World, asked: Asked) -> None:
    config = world.config.model_copy(update={"mode": "observe"})
    first = world.watch(config)
    world.run(2, first)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.runtime.inject("rollout/2", FaultClass.CRASH)
    world.until(lambda: len(asked.asked) == 2, first)
    names = {name.rpartition("-")[2]: name for name, _ in asked.asked}
    asked.says = [CollectedEvidence(incident_id=names["2"], payload=EVIDENCE)]
    world.run(1, first)
    asked.asked.clear()
    second = world.watch(config)
    world.until(lambda: second.acting, second)
    world.run(1, second)
    assert asked.asked == [(names["1"], FaultClass.HANG)]


def test_evidence_of_a_further_suspect_is_asked_for_once(world: World, asked: Asked) -> None:
    """Also by a successor, if it is not in the journal; and of few: each is a request to many agents."""
    config = world.config.model_copy(update={"mode": "observe"})

    def named(fault: FaultClass, *nodes: str) -> Diagnosis:
        (one,) = diagnosis(fault, ("trainer/0", 1), onset=world.clock.wall()).suspects
        suspects = tuple(replace(one, node=NodeId(node), rank=rank) for rank, node in enumerate(nodes))
        return replace(diagnosis(fault, ("trainer/0", 1), onset=world.clock.wall()), suspects=suspects)

    watch = world.watch(config)
    for found in (
        named(FaultClass.CANNOT_TELL, "node-0"),
        named(FaultClass.HANG, "node-0"),
        named(FaultClass.HANG, "node-0", "node-1"),
        named(FaultClass.HANG, "node-0"),
        named(FaultClass.CRASH, "node-0", "node-1"),
    ):
        world.detector.extra = [found]
        world.run(3, watch)
    assert asked.parts == [(1, ["node-0"]), (2, ["node-1"])]
    asked.says = [CollectedEvidence(incident_id=world.only().incident_id, payload=EVIDENCE)]
    world.run(1, watch)
    second = world.watch(config)
    world.until(lambda: second.acting, second)
    assert asked.parts[2:] == [(2, ["node-1"])]
    asked.says = [CollectedEvidence(incident_id=world.only().incident_id, payload=EVIDENCE, part=2)]
    world.run(1, second)
    assert len(world.events(EventKind.EVIDENCE_COLLECTED)) == 2

    for n in range(3, 2 * NUM_COLLECTIONS_MAX):
        world.detector.extra = [named(FaultClass.HANG, *(f"node-{rank}" for rank in range(n)))]
        world.run(3, second)
    assert [part for part, _ in asked.parts[3:]] == list(range(3, NUM_COLLECTIONS_MAX + 1))


def test_evidence_waiting_for_the_journal_is_bounded(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "NUM_UNWRITTEN_MAX", 2)
    file = EvidenceRecorder(asked)
    for n in range(4):
        asked.says = [CollectedEvidence(incident_id=f"inc-{n}", payload=EVIDENCE)]
        file.collected()
    assert [a.incident_id for a in file.collected()] == ["inc-2", "inc-3"]
    file.written(CollectedEvidence(incident_id="inc-2", payload=EVIDENCE))
    assert [a.incident_id for a in file.collected()] == ["inc-3"]


def test_a_doubt_that_evidence_settles_is_resolved(world: World, asked: Asked) -> None:
    """A tie of two is tolerated, since no action is known to help; the replica that the evidence names is replaced."""
    watch = world.watch()
    world.run(2, watch)
    tie = diagnosis(FaultClass.CANNOT_TELL, ("trainer/0", 1), ("trainer/1", 1), onset=world.clock.wall())
    world.detector.extra = [tie]
    world.run(1, watch)
    assert [fault for _, fault in asked.asked] == [FaultClass.CANNOT_TELL] and world.runtime.replaced == []
    world.detector.extra = []  # fusion drops it for the one that the evidence names
    world.runtime.inject("trainer/1", FaultClass.HANG)
    asked.says = [CollectedEvidence(incident_id=asked.asked[0][0], payload=EVIDENCE)]
    world.until(world.all_closed, watch)
    world.run(5, watch)
    doubt, sure = world.incidents()
    assert (str(doubt.outcome), str(sure.outcome)) == ("tolerated", "resolved")
    assert [str(r) for r in sure.touched] == ["trainer/1"]
    (event,) = world.events(EventKind.EVIDENCE_COLLECTED)
    assert event.incident_id == doubt.incident_id
