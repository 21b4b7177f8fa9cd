"""What hardware and kernel of a node say: who is named for it, for how long, and that one fault is told once."""

from rolecall.core.config import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.codec import decode, encode
from rolecall.detector.engine import Detector
from rolecall.detector.node_faults import FAULTS_MAX, FLAP_SECONDS, STANDS_SECONDS, NodeFaults
from rolecall.detector.testing import WALL_OFFSET, FakeFleet

CONFIG = DetectorConfig(mask_proc_state=True)
WALL = 1_000_000.0


def event(kind: AgentEventKind, at: float = 0.0, node: str = "node-7", **detail: str) -> AgentEvent:
    return AgentEvent(seq=1, kind=kind, node=NodeId(node), at=at, wall_at=WALL + at, detail=detail)


def alone(faults: NodeFaults, at: float) -> list[tuple[str, list[int | None], str]]:
    found = faults.join([], WALL + at)
    return [(str(f.fault_class), [s.gpu for s in f.suspects], f.because) for f in found]


def test_an_xid_that_stays_with_the_gpu_names_it_until_it_is_not_told_again() -> None:
    faults = NodeFaults()
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", line="NVRM: Xid (PCI:0000:3b:00): 79, ..."), WALL)
    ((fault_class, gpus, because),) = alone(faults, 1.0)
    assert (fault_class, gpus) == ("gpu", [3]) and "XID 79 on GPU 3 of node-7" in because and "bus" in because
    faults.take(event(AgentEventKind.XID, 400.0, xid="79", gpu="3"), WALL + 400)
    assert len(alone(faults, STANDS_SECONDS + 300)) == 1
    assert alone(faults, STANDS_SECONDS + 401) == []


def test_xids_of_the_application_and_those_to_be_ignored_name_nobody() -> None:
    faults = NodeFaults()
    for code in ("13", "31", "43", "45", "63", "94", "x", "", "999999999999"):
        faults.take(event(AgentEventKind.XID, xid=code, gpu="0"), WALL)
    assert alone(faults, 1.0) == []


def test_of_a_switch_and_of_nvlink_the_line_says_whether_it_is_fatal() -> None:
    faults = NodeFaults()
    faults.take(event(AgentEventKind.XID, sxid="12028", device="nvswitch2", meaning="egress", fatal="no"), WALL)
    faults.take(event(AgentEventKind.XID, xid="145", gpu="1", fatal="no"), WALL)
    assert alone(faults, 1.0) == []
    faults.take(event(AgentEventKind.XID, sxid="20034", device="nvswitch2", meaning="a port", fatal="yes"), WALL)
    ((fault_class, gpus, because),) = alone(faults, 3.0)
    assert (fault_class, gpus) == ("network", [None]) and "SXid 20034 of nvswitch2 of node-7" in because


def test_what_the_kernel_log_tells_of_long_ago_is_not_now() -> None:
    faults = NodeFaults()
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", seconds_ago="40431"), WALL)
    assert alone(faults, 1.0) == []
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", seconds_ago="12"), WALL)
    (found,) = faults.join([], WALL + 1)
    assert found.onset == WALL - 12


def test_two_gpus_of_a_node_are_one_finding_and_a_recovered_one_leaves_it() -> None:
    faults = NodeFaults()
    for gpu in ("2", "5"):
        faults.take(event(AgentEventKind.GPU_LOST, gpu=gpu, uuid=f"GPU-{gpu}"), WALL)
    ((_, gpus, because),) = alone(faults, 1.0)
    assert gpus == [2, 5] and "GPU 2" in because and "GPU 5" in because
    faults.take(event(AgentEventKind.GPU_RECOVERED, 2.0, gpu="2"), WALL + 2)
    assert [gpus for _, gpus, _ in alone(faults, 3.0)] == [[5]]
    assert [gpus for _, gpus, _ in alone(faults, 10 * STANDS_SECONDS)] == [[5]]  # lost is lost


def test_a_link_that_is_soon_back_is_no_fault_and_one_that_stays_down_is() -> None:
    faults = NodeFaults()
    faults.take(event(AgentEventKind.LINK_DOWN, nic="mlx5_0", port="1"), WALL)
    assert alone(faults, FLAP_SECONDS / 2) == []
    ((fault_class, gpus, because),) = alone(faults, FLAP_SECONDS + 1)
    assert fault_class == "network" and gpus == [None] and "mlx5_0/1 of node-7 is down" in because
    faults.take(event(AgentEventKind.LINK_UP, 9.0, nic="mlx5_0", port="1"), WALL + 9)
    assert alone(faults, 9.0) == []
    faults.take(event(AgentEventKind.LINK_DOWN, 20.0, interface="eth0"), WALL + 20)
    assert "link eth0" in alone(faults, 30.0)[0][2]


def test_a_driver_that_hangs_is_told_until_it_answers_or_the_agent_starts_anew() -> None:
    faults = NodeFaults()
    hangs = event(AgentEventKind.PROBE_DOWN, probe="gpu", reason="its read hangs for more than 5 s")
    faults.take(hangs, WALL)
    ((fault_class, _, because),) = alone(faults, 1.0)
    assert fault_class == "gpu" and "does not answer" in because
    faults.take(event(AgentEventKind.PROBE_UP, probe="gpu"), WALL + 2)
    assert alone(faults, 3.0) == []
    faults.take(hangs, WALL + 4)
    assert len(alone(faults, 5.0)) == 1
    faults.take(event(AgentEventKind.AGENT_STARTED), WALL + 6)
    assert alone(faults, 7.0) == []


def test_what_cannot_be_read_is_no_fault_of_the_node() -> None:
    faults = NodeFaults()
    faults.take(event(AgentEventKind.PROBE_DOWN, probe="kernel", reason="/dev/kmsg: permission denied"), WALL)
    faults.take(event(AgentEventKind.OTHER), WALL)
    assert alone(faults, 1.0) == []


def test_a_flood_is_bounded_and_the_state_round_trips() -> None:
    faults = NodeFaults()
    for n in range(2 * FAULTS_MAX):
        faults.take(event(AgentEventKind.LINK_DOWN, interface=f"eth{n}"), WALL)
    for _ in range(100):
        faults.take(event(AgentEventKind.LINK_DOWN, interface="eth0"), WALL)
    assert len(faults.faults) == FAULTS_MAX
    assert max(len(f.told) for f in faults.faults.values()) < 10
    assert decode(encode(faults)) == faults


# --- in the engine


def told(detector: Detector, fleet: FakeFleet, seconds: float) -> list[Diagnosis]:
    newest: list[Diagnosis] = []
    for o in fleet.run(seconds):
        newest = detector.observe(o)
    return newest


def hardware(fleet: FakeFleet, node: str, kind: AgentEventKind, **detail: str) -> None:
    fleet.events.append(
        AgentEvent(
            seq=9_000_000,
            kind=kind,
            node=NodeId(node),
            at=fleet.now,
            wall_at=fleet.now + WALL_OFFSET,
            detail=detail,
        )
    )


def test_a_crash_in_the_wake_of_an_xid_is_told_once_as_the_gpus_and_goes_elsewhere() -> None:
    fleet, detector = FakeFleet(seed=5), Detector(CONFIG)
    assert told(detector, fleet, 20.0) == []
    node = fleet.processes["trainer/1"].node
    hardware(fleet, node, AgentEventKind.XID, xid="79", gpu="3", line="NVRM: Xid (PCI:0000:3b:00): 79")
    (before,) = told(detector, fleet, 1.0)
    assert (before.fault_class, [s.replica for s in before.suspects]) == (FaultClass.GPU, [""])
    assert "reboot" in before.advice
    fleet.kill("trainer/1")
    (after,) = told(detector, fleet, 1.0)
    assert after.fault_class is FaultClass.GPU and [s.replica for s in after.suspects] == ["trainer/1"]
    assert "XID 79 on GPU 3" in after.because and any("NVRM" in e.text for e in after.evidence)
    detector.forget("trainer/1", 2)
    assert told(detector, fleet, 1.0) == []  # its replacement runs elsewhere: nothing is told twice


def test_a_crash_elsewhere_stays_a_crash() -> None:
    fleet, detector = FakeFleet(seed=5), Detector(CONFIG)
    told(detector, fleet, 20.0)
    hardware(fleet, fleet.processes["trainer/1"].node, AgentEventKind.XID, xid="79", gpu="3")
    fleet.kill("rollout/1")
    found = {d.fault_class: [s.replica for s in d.suspects] for d in told(detector, fleet, 1.0)}
    assert found == {FaultClass.CRASH: ["rollout/1"], FaultClass.GPU: [""]}


def test_a_stored_window_with_hardware_in_it_decides_the_same_again() -> None:
    fleet, detector = FakeFleet(seed=6), Detector(CONFIG)
    told(detector, fleet, 20.0)
    hardware(fleet, fleet.processes["trainer/0"].node, AgentEventKind.GPU_LOST, gpu="0")
    last = told(detector, fleet, 2.0)
    replayed = Detector.replay_window(detector.window())
    assert [d.to_dict() for d in replayed[-1]] == [d.to_dict() for d in last] != []
