"""A full disk: who is named, when, and for how long."""

import json

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.base.findings import FULL_DISK
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import ReceivedException
from rolecall.detector.live.stages.exits.crash import blames_code
from rolecall.detector.live.stages.nodes.full_disk import DISKS_MAX, GATHER_SECONDS, RECORD_SECONDS, SILENT_SECONDS
from rolecall.testing.synthetic_run import FakeFleet

FULL, FREE, STARTED = AgentEventKind.DISK_FULL, AgentEventKind.DISK_FREE, AgentEventKind.AGENT_STARTED
WALL = 1_000_000.0


class Disks:
    """Agents that say something of their disks, and the detector that hears it."""

    def __init__(self) -> None:
        self.detector = LiveDetector(DetectorConfig())
        self.seq = 0

    def event(self, kind: AgentEventKind, node: str, at: float, device: str = "b 8:1", **more: str) -> AgentEvent:
        self.seq += 1
        detail = {"path": "/runs/a", "device": device, "available_bytes": "0", "size_bytes": "536870912", **more}
        return AgentEvent(seq=self.seq, kind=kind, node=NodeId(node), at=at, wall_at=WALL + at, detail=detail)

    def at(
        self, at: float, *events: tuple[AgentEventKind, str], silent: tuple[str, ...] = (), **detail: str
    ) -> list[Diagnosis]:
        observation = Observation(
            wall_at=WALL + at,
            events=tuple(self.event(kind, node, at, **detail) for kind, node in events),
            unreachable=tuple((node, WALL, "timeout") for node in silent),
        )
        return _of_disks(self.detector.observe(observation))


def _of_disks(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    return [d for d in diagnoses if FULL_DISK in d.detectors]


def test_the_node_is_named_with_path_and_free_bytes_until_there_is_room() -> None:
    disks = Disks()
    assert disks.at(0.0, (FULL, "node-2")) == []
    (found,) = disks.at(GATHER_SECONDS)
    assert found.fault_class is FaultClass.RESOURCE_EXHAUSTED and found.detectors == (FULL_DISK,)
    assert [(str(s.node), s.replica) for s in found.suspects] == [("node-2", "")]
    assert found.because == "the disk of /runs/a on node-2 is full: 0 of 536,870,912 bytes free"
    assert found.advice == "free space on the disk of /runs/a; never delete journal.db-wal"
    assert found.onset == WALL and disks.at(3600.0) == [found]
    assert disks.at(3601.0, (FREE, "node-2")) == [found], "it can be recorded only now"
    assert disks.at(3601.0 + RECORD_SECONDS) == [found]
    assert disks.at(3602.0 + RECORD_SECONDS) == []


def test_one_that_has_room_again_at_once_is_no_finding() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-2"))
    assert disks.at(1.0, (FREE, "node-2")) == [] and disks.at(5.0) == []


def test_nodes_that_share_a_disk_are_one_finding_and_all_must_see_room() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-7"))
    disks.at(1.0, (FULL, "node-3"), (FULL, "node-5"))
    (found,) = disks.at(2.0)
    assert [str(s.node) for s in found.suspects] == ["node-3"]
    assert found.because.endswith("bytes free; 2 other nodes share it")
    disks.at(3.0, (FREE, "node-3"), (FREE, "node-5"))
    assert disks.at(100.0) == [found]
    disks.at(101.0, (FREE, "node-7"))
    assert disks.at(102.0 + RECORD_SECONDS) == []


def test_the_controllers_node_is_the_one_to_name() -> None:
    fleet, detector, disks = FakeFleet(), LiveDetector(DetectorConfig()), Disks()
    seen = fleet.poll()
    detector.observe(seen)
    full = [disks.event(FULL, node, seen.wall_at - WALL) for node in ("node-aaa", "node-controller-0")]
    detector.observe(Observation(wall_at=seen.wall_at, events=tuple(full)))
    (found,) = _of_disks(detector.observe(Observation(wall_at=seen.wall_at + GATHER_SECONDS)))
    assert [str(s.node) for s in found.suspects] == ["node-controller-0"]


def test_two_disks_are_two_findings() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-1"))
    disks.at(0.5, (FULL, "node-2"), device="c 8:1")
    assert [str(d.suspects[0].node) for d in disks.at(5.0)] == ["node-1", "node-2"]


def test_no_inode_is_told() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-1"), available_bytes="4096000", files_free="0")
    (found,) = disks.at(5.0)
    assert found.because.endswith("is full: 4,096,000 of 536,870,912 bytes and no inode free")


def test_a_restarted_agent_tells_it_again_and_a_lost_one_no_more() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-1"), (FULL, "node-2"))
    (found,) = disks.at(5.0, (STARTED, "node-1"), (STARTED, "node-2"))
    assert disks.at(6.0, (FULL, "node-1")) == [found]
    assert disks.at(60.0, silent=("node-1",)) == [found]
    disks.at(SILENT_SECONDS + 1.0, silent=("node-1",))
    assert disks.at(SILENT_SECONDS + RECORD_SECONDS + 2.0, silent=("node-1",)) == []


def test_a_watch_that_starts_late_hears_of_the_last_one_only_if_it_is_not_long_over() -> None:
    for ago, is_told in ((RECORD_SECONDS - 1.0, True), (RECORD_SECONDS + 1.0, False)):
        disks = Disks()
        events = (disks.event(FULL, "node-1", 0.0), disks.event(FREE, "node-1", 45.0))
        found = disks.detector.observe(Observation(wall_at=WALL + 45.0 + ago, events=events))
        assert bool(found) is is_told


def test_a_stored_state_and_strange_events_do_no_harm() -> None:
    disks = Disks()
    disks.at(0.0, (FULL, "node-1"), available_bytes="many", size_bytes="-1")
    (found,) = disks.at(5.0)
    state = json.loads(json.dumps(disks.detector.state()))
    resumed = LiveDetector.resumed(DetectorConfig(), {}, state)
    assert resumed.observe(Observation(wall_at=WALL + 6.0)) == [found]
    for n in range(2 * DISKS_MAX):
        disks.at(6.0, (FULL, "node-1"), device=f"d{n}", path=f"/{n}")
    assert len(disks.at(9.0)) == DISKS_MAX


def test_errors_of_a_full_disk_do_not_blame_the_code() -> None:
    for message, is_code in (
        ("[Errno 28] No space left on device: 'x'", False),
        ("the journal cannot be used now: runs/a/journal.db: database or disk is full", False),
        ("index out of range", True),
    ):
        detail = {"type": "OSError", "message": message, "fingerprint": "f"}
        event = AgentEvent(
            seq=1, kind=AgentEventKind.EXCEPTION, node=NodeId("n"), at=0.0, wall_at=WALL, role="trainer", detail=detail
        )
        assert blames_code(ReceivedException(event, 0.0, 0)) is is_code
