"""Communicators that stand still, as RAS says: reported once, whoever asks, with a name only where one fits."""

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.history import decode, encode
from rolecall.detector.live.stages.evidence.nccl_ras import COMMUNICATORS_MAX, FORGOTTEN_SECONDS, NcclRasStage
from rolecall.testing.synthetic_run import WALL_OFFSET, FakeFleet

CONFIG = DetectorConfig(mask_proc_state=True)
BECAUSE = "no rank launched anything for 60 s, and 1 collective(s) lie between them; behind: AllReduce: rank 3"


def said(fleet: FakeFleet, node: str, what: str, communicator: str = "abc", pids: str = "") -> AgentEvent:
    return AgentEvent(
        seq=9_000_000,
        kind=AgentEventKind.NCCL,
        node=NodeId(node),
        at=fleet.now,
        wall_at=fleet.now + WALL_OFFSET,
        detail={"what": what, "communicator": communicator, "because": BECAUSE, "pids": pids},
    )


def reported(detector: LiveDetector, fleet: FakeFleet, seconds: float = 1.0) -> list[Diagnosis]:
    newest: list[Diagnosis] = []
    for o in fleet.run(seconds):
        newest = detector.observe(o)
    return newest


def test_a_rank_behind_is_named_once_until_all_agents_report_progress() -> None:
    fleet, detector = FakeFleet(seed=7), LiveDetector(CONFIG)
    assert reported(detector, fleet, 10.0) == []
    pid = str(fleet.processes["trainer/1"].process.pid)
    for node, communicator in (("node-a", "abc"), ("node-b", "abc"), ("node-a", "def")):
        fleet.events.append(said(fleet, node, "suspicious", communicator, pid))
    (d,) = reported(detector, fleet)
    assert d.fault_class is FaultClass.HANG and [s.replica for s in d.suspects] == ["trainer/1"]
    assert BECAUSE in d.because and "abc" in d.evidence[0].text
    fleet.events.append(said(fleet, "node-a", "advances", "def"))
    fleet.events.append(said(fleet, "node-a", "advances", "abc"))
    assert len(reported(detector, fleet)) == 1  # node-b still says so
    fleet.events.append(said(fleet, "node-b", "advances", "abc"))
    assert reported(detector, fleet) == []


def test_a_pid_that_matches_no_rank_or_several_names_none() -> None:
    for pids in ("", "999999", "x"):
        fleet, detector = FakeFleet(seed=7), LiveDetector(CONFIG)
        reported(detector, fleet, 10.0)
        fleet.events.append(said(fleet, "node-a", "suspicious", pids=pids))
        (d,) = reported(detector, fleet)
        assert d.fault_class is FaultClass.CANNOT_TELL and [s.replica for s in d.suspects] == [""]
        assert "Flight Recorder" in d.settle and BECAUSE in d.because


def test_a_crash_is_why_the_others_wait() -> None:
    fleet, detector = FakeFleet(seed=8), LiveDetector(CONFIG)
    reported(detector, fleet, 20.0)
    fleet.kill("trainer/1")
    fleet.events.append(said(fleet, "node-a", "suspicious"))
    assert [d.fault_class for d in reported(detector, fleet)] == [FaultClass.CRASH]


def test_old_reports_are_forgotten_and_the_state_is_bounded() -> None:
    fleet, stage = FakeFleet(seed=9), NcclRasStage()
    wall = fleet.now + WALL_OFFSET
    for n in range(2 * COMMUNICATORS_MAX):
        stage.take(said(fleet, "node-a", "suspicious", f"c{n}"), wall)
    stage.take(said(fleet, "node-a", "advances", "never seen"), wall)
    assert len(stage.state) == COMMUNICATORS_MAX
    assert decode(encode(stage.state)) == stage.state
    started = AgentEvent(seq=1, kind=AgentEventKind.AGENT_STARTED, node=NodeId("node-a"), at=0.0, wall_at=wall)
    stage.take(started, wall)
    assert stage.state == {}  # it will say so again
    stage.take(said(fleet, "node-a", "suspicious"), wall)
    detector = LiveDetector(CONFIG)
    assert len(stage.find(detector._fleet, wall + FORGOTTEN_SECONDS - 1)) == 1
    assert stage.find(detector._fleet, wall + FORGOTTEN_SECONDS + 1) == []
