"""What hardware and kernel of a node say: who is named for it, for how long, and that one fault is reported once."""

import json
from dataclasses import replace

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.history import decode, encode
from rolecall.detector.live.stages.nodes.node_faults import NodeFaultsStage
from rolecall.formats.node_faults import FAULTS_MAX, FLAP_SECONDS, HELD_SECONDS, STANDS_SECONDS
from rolecall.testing.synthetic_run import WALL_OFFSET, FakeFleet

CONFIG = DetectorConfig(mask_proc_state=True)
WALL = 1_000_000.0


def event(kind: AgentEventKind, at: float = 0.0, node: str = "node-7", **detail: str) -> AgentEvent:
    return AgentEvent(seq=1, kind=kind, node=NodeId(node), at=at, wall_at=WALL + at, detail=detail)


def alone(faults: NodeFaultsStage, at: float) -> list[tuple[str, list[int | None], str]]:
    found = faults.join([], WALL + at)
    return [(str(f.fault_class), [s.gpu for s in f.suspects], f.because) for f in found]


def test_an_xid_that_stays_with_the_gpu_names_it_until_it_is_not_reported_again() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", line="NVRM: Xid (PCI:0000:3b:00): 79, ..."), WALL)
    ((fault_class, gpus, because),) = alone(faults, 1.0)
    assert (fault_class, gpus) == ("gpu", [3]) and "XID 79 on GPU 3 of node-7" in because and "bus" in because
    faults.take(event(AgentEventKind.XID, 400.0, xid="79", gpu="3"), WALL + 400)
    assert len(alone(faults, STANDS_SECONDS + 300)) == 1
    assert alone(faults, STANDS_SECONDS + 401) == []


def test_application_and_ignorable_xids_give_no_finding() -> None:
    faults = NodeFaultsStage()
    for code in ("13", "31", "43", "45", "63", "94", "x", "", "999999999999"):
        faults.take(event(AgentEventKind.XID, xid=code, gpu="0"), WALL)
    assert alone(faults, 1.0) == []


def test_of_a_switch_and_of_nvlink_the_line_says_whether_it_is_fatal() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.XID, sxid="12028", device="nvswitch2", meaning="egress", fatal="no"), WALL)
    faults.take(event(AgentEventKind.XID, xid="145", gpu="1", fatal="no"), WALL)
    assert alone(faults, 1.0) == []
    faults.take(event(AgentEventKind.XID, sxid="20034", device="nvswitch2", meaning="a port", fatal="yes"), WALL)
    ((fault_class, gpus, because),) = alone(faults, 3.0)
    assert (fault_class, gpus) == ("network", [None]) and "SXid 20034 of nvswitch2 of node-7" in because


def test_old_kernel_log_lines_are_ignored() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", seconds_ago="40431"), WALL)
    assert alone(faults, 1.0) == []
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", seconds_ago="12"), WALL)
    (found,) = faults.join([], WALL + 1)
    assert found.onset == WALL - 12


def test_an_xid_of_a_mig_instance_names_it() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.XID, xid="95", gpu="3", gpu_instance="9", compute_instance="0"), WALL)
    assert "XID 95 on GPU 3 (MIG instance 9) of node-7" in alone(faults, 1.0)[0][2]


def test_the_drivers_own_verdict_stands_until_it_is_taken_back() -> None:
    faults = NodeFaultsStage()
    asks = {"xid": "154", "gpu": "3", "recovery": "drain_and_reset", "advice": "drain and reset it", "fatal": "yes"}
    faults.take(event(AgentEventKind.XID, **asks), WALL)
    ((fault_class, gpus, because),) = alone(faults, 2 * STANDS_SECONDS)
    assert (fault_class, gpus) == ("gpu", [3]) and "requests recovery: drain and reset" in because
    faults.take(event(AgentEventKind.XID, xid="154", gpu="3", recovery="none", fatal="no"), WALL + 5)
    assert alone(faults, 6.0) == []
    faults.take(event(AgentEventKind.XID, xid="154", gpu="3", fatal="no"), WALL)  # a line that names no action
    assert alone(faults, 1.0) == []


def test_of_nvlink_nvml_tells_the_number_and_the_kernels_line_decides() -> None:
    by_nvml = event(AgentEventKind.XID, xid="149", gpu="3", source="nvml")
    faults = NodeFaultsStage()
    faults.take(by_nvml, WALL)
    assert alone(faults, HELD_SECONDS / 2) == []
    assert len(alone(faults, HELD_SECONDS)) == 1, "no kernel log to be read: the number is all there is"

    faults = NodeFaultsStage()
    faults.take(by_nvml, WALL)
    faults.take(event(AgentEventKind.XID, xid="149", gpu="3", fatal="no", adds_to="nvml"), WALL)
    assert alone(faults, HELD_SECONDS + 1) == []

    faults = NodeFaultsStage()
    faults.take(by_nvml, WALL)
    line = {"fatal": "yes", "adds_to": "nvml", "advice": "reset it", "line": "NVRM: Xid .."}
    faults.take(event(AgentEventKind.XID, xid="149", gpu="3", **line), WALL)
    assert len(alone(faults, 0.1)) == 1

    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.XID, xid="79", gpu="3", source="nvml"), WALL)
    assert len(alone(faults, 0.0)) == 1, "of others the number says all"
    faults.take(by_nvml, WALL)
    faults.take(event(AgentEventKind.XID, xid="149", gpu="3", fatal="no", adds_to="nvml"), WALL)
    assert len(alone(faults, 0.1)) == 1


def test_two_gpus_of_a_node_are_one_finding_and_a_recovered_one_leaves_it() -> None:
    faults = NodeFaultsStage()
    for gpu in ("2", "5"):
        faults.take(event(AgentEventKind.GPU_LOST, gpu=gpu, uuid=f"GPU-{gpu}"), WALL)
    ((_, gpus, because),) = alone(faults, 1.0)
    assert gpus == [2, 5] and "GPU 2" in because and "GPU 5" in because
    faults.take(event(AgentEventKind.GPU_RECOVERED, 2.0, gpu="2"), WALL + 2)
    assert [gpus for _, gpus, _ in alone(faults, 3.0)] == [[5]]
    assert [gpus for _, gpus, _ in alone(faults, 10 * STANDS_SECONDS)] == [[5]]  # lost is lost


def test_a_link_that_is_soon_back_is_no_fault_and_one_that_stays_down_is() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.LINK_DOWN, nic="mlx5_0", port="1"), WALL)
    assert alone(faults, FLAP_SECONDS / 2) == []
    ((fault_class, gpus, because),) = alone(faults, FLAP_SECONDS + 1)
    assert fault_class == "network" and gpus == [None] and "mlx5_0/1 of node-7 is down" in because
    faults.take(event(AgentEventKind.LINK_UP, 9.0, nic="mlx5_0", port="1"), WALL + 9)
    assert alone(faults, 9.0) == []
    faults.take(event(AgentEventKind.LINK_DOWN, 20.0, interface="eth0"), WALL + 20)
    assert "link eth0" in alone(faults, 30.0)[0][2]


def test_a_driver_that_hangs_is_reported_until_it_answers_or_the_agent_starts_again() -> None:
    faults = NodeFaultsStage()
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


def test_unreadable_files_are_no_fault_of_the_node() -> None:
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.PROBE_DOWN, probe="kernel", reason="/dev/kmsg: permission denied"), WALL)
    faults.take(event(AgentEventKind.OTHER), WALL)
    assert alone(faults, 1.0) == []


def test_a_flood_is_bounded_and_the_state_round_trips() -> None:
    faults = NodeFaultsStage()
    for n in range(2 * FAULTS_MAX):
        faults.take(event(AgentEventKind.LINK_DOWN, interface=f"eth{n}"), WALL)
    for _ in range(100):
        faults.take(event(AgentEventKind.LINK_DOWN, interface="eth0"), WALL)
    assert len(faults.state) == FAULTS_MAX
    assert max(len(f.lines) for f in faults.state.values()) < 10
    assert decode(encode(faults.state)) == faults.state


# --- in the engine


def reported(detector: LiveDetector, fleet: FakeFleet, seconds: float) -> list[Diagnosis]:
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


def test_a_crash_in_the_wake_of_an_xid_is_reported_once_as_the_gpus_and_goes_elsewhere() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    assert reported(detector, fleet, 20.0) == []
    node = fleet.processes["trainer/1"].node
    hardware(fleet, node, AgentEventKind.XID, xid="79", gpu="3", line="NVRM: Xid (PCI:0000:3b:00): 79")
    (before,) = reported(detector, fleet, 1.0)
    assert (before.fault_class, [s.replica for s in before.suspects]) == (FaultClass.GPU, [""])
    assert "reboot" in before.advice
    fleet.kill("trainer/1")
    (after,) = reported(detector, fleet, 1.0)
    assert after.fault_class is FaultClass.GPU and [s.replica for s in after.suspects] == ["trainer/1"]
    assert "XID 79 on GPU 3" in after.because and any("NVRM" in e.text for e in after.evidence)
    detector.forget("trainer/1", 2)
    assert reported(detector, fleet, 1.0) == []  # its replacement runs elsewhere: nothing is reported twice


def test_a_gpu_that_stays_lost_is_reported_again_when_the_job_starts_on_its_node_again() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    reported(detector, fleet, 20.0)
    node = fleet.processes["trainer/1"].node
    hardware(fleet, node, AgentEventKind.GPU_LOST, gpu="3")
    fleet.kill("trainer/1")
    (first,) = reported(detector, fleet, 1.0)
    assert first.fault_class is FaultClass.GPU and [s.replica for s in first.suspects] == ["trainer/1"]
    detector.forget("trainer/1", 2)
    assert reported(detector, fleet, 5.0) == []  # nothing has begun there: one crash is one diagnosis
    fleet.start("trainer", 1, incarnation=2, node=node)
    (standing,) = reported(detector, fleet, 90.0)
    assert standing.fault_class is FaultClass.GPU and [(s.node, s.gpu) for s in standing.suspects] == [(node, 3)]
    assert standing.onset > first.detected_at + 5.0, "what recovery has handled would be taken for handled"
    died = fleet.now + WALL_OFFSET
    fleet.kill("trainer/1")
    (second,) = reported(detector, fleet, 1.0)
    assert second.fault_class is FaultClass.GPU and [s.incarnation for s in second.suspects] == [2]
    assert second.onset >= died - 1.0
    hardware(fleet, node, AgentEventKind.GPU_RECOVERED, gpu="3")
    detector.forget("trainer/1", 3)
    fleet.start("trainer", 1, incarnation=3, node=node)
    assert reported(detector, fleet, 90.0) == []
    fleet.kill("trainer/1")
    assert [d.fault_class for d in reported(detector, fleet, 1.0)] == [FaultClass.CRASH]


def test_a_number_that_the_line_may_take_back_explains_no_crash_yet() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    reported(detector, fleet, 20.0)
    node = fleet.processes["trainer/1"].node
    hardware(fleet, node, AgentEventKind.XID, xid="149", gpu="3", source="nvml")
    fleet.kill("trainer/1")
    assert [d.fault_class for d in reported(detector, fleet, 1.0)] == [FaultClass.CRASH]
    hardware(fleet, node, AgentEventKind.XID, xid="149", gpu="3", fatal="yes", adds_to="nvml", line="NVRM: Xid ..")
    assert [d.fault_class for d in reported(detector, fleet, 0.5)] == [FaultClass.NETWORK]


def test_a_crash_elsewhere_stays_a_crash() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    reported(detector, fleet, 20.0)
    hardware(fleet, fleet.processes["trainer/1"].node, AgentEventKind.XID, xid="79", gpu="3")
    fleet.kill("rollout/1")
    found = {d.fault_class: [s.replica for s in d.suspects] for d in reported(detector, fleet, 1.0)}
    assert found == {FaultClass.CRASH: ["rollout/1"], FaultClass.GPU: [""]}


def test_a_stored_window_with_hardware_in_it_decides_the_same_again() -> None:
    fleet, detector = FakeFleet(seed=6), LiveDetector(CONFIG)
    reported(detector, fleet, 20.0)
    hardware(fleet, fleet.processes["trainer/0"].node, AgentEventKind.GPU_LOST, gpu="0")
    last = reported(detector, fleet, 2.0)
    replayed = LiveDetector.replay_window(detector.window())
    assert [d.to_dict() for d in replayed[-1]] == [d.to_dict() for d in last] != []


def test_of_what_an_agent_keeps_of_days_conditions_stand_and_moments_do_not() -> None:
    faults, day = NodeFaultsStage(), 86_400.0
    faults.take(event(AgentEventKind.XID, -day, xid="79", gpu="3"), WALL, day)
    faults.take(event(AgentEventKind.GPU_FAULT, -day, gpu="1", what="ecc", count="2"), WALL, day)
    assert alone(faults, 1.0) == []
    faults.take(event(AgentEventKind.XID, -day, xid="154", gpu="4", recovery="drain_and_reset"), WALL, day)
    faults.take(event(AgentEventKind.GPU_LOST, -day, gpu="5"), WALL, day)
    (found,) = faults.join([], WALL + 1.0)
    assert [s.gpu for s in found.suspects] == [4, 5] and found.onset == WALL - day


def test_what_an_agent_that_starts_does_not_tell_again_is_over() -> None:
    """A lost GPU comes back with a reboot, and the agent that starts after it has never seen it lost."""
    faults = NodeFaultsStage()
    faults.take(event(AgentEventKind.GPU_LOST, gpu="5"), WALL)
    faults.take(event(AgentEventKind.GPU_LOST, gpu="6"), WALL)
    faults.take(event(AgentEventKind.AGENT_STARTED, 300.0), WALL + 300)
    faults.take(event(AgentEventKind.GPU_LOST, 301.0, gpu="6"), WALL + 301)
    assert alone(faults, 310.0)[0][1] == [5, 6]
    assert alone(faults, 301 + STANDS_SECONDS)[0][1] == [6]
    faults.leave("node-7")
    assert alone(faults, 302 + STANDS_SECONDS) == []


def test_a_watch_that_begins_takes_nothing_of_last_week_for_now() -> None:
    detector = LiveDetector(CONFIG)
    week, who = 604_800.0, ProcessId(node=NodeId("node-7"), pid=5, start_ticks=6)
    gone = AgentEvent(
        seq=1,
        kind=AgentEventKind.EXITED,
        node=NodeId("node-7"),
        at=0.0,
        wall_at=WALL - week,
        process=who,
        role="trainer",
        replica="trainer/0",
        detail={"signal": "11"},
    )
    old = (event(AgentEventKind.XID, -week, xid="79", gpu="3"), gone)

    def looked(seconds: float, events: tuple[AgentEvent, ...] = (), set_back: float = 0.0) -> list[Diagnosis]:
        """The node's clock is 50 s behind ours, and then `set_back` more."""
        wall = WALL + seconds - set_back
        batch = SampleBatch(
            node=NodeId("node-7"), agent_pid=1, cursor=1, lost=0, at=1.0, wall_at=wall, processes=(), hosts=()
        )
        return detector.observe(Observation(wall_at=WALL + seconds + 50.0, batches=(batch,), events=events))

    assert [looked(float(n), old if not n else ()) for n in range(30)] == [[]] * 30
    (now,) = looked(30.0, (event(AgentEventKind.XID, 28.0, xid="79", gpu="3"),))
    assert now.onset == pytest.approx(WALL + 78.0, abs=0.1)
    assert looked(31.0, set_back=3600.0) == [now]
    later = event(AgentEventKind.XID, 31.0 - 3600.0, sxid="20034", device="nvswitch2", fatal="yes")
    _, switch = looked(32.0, (later,), set_back=3600.0)
    assert switch.onset == pytest.approx(WALL + 81.0, abs=0.1)


def test_a_node_that_is_listed_no_more_is_spoken_of_no_more() -> None:
    fleet, detector = FakeFleet(seed=1), LiveDetector(CONFIG)
    for o in fleet.run(10.0):
        detector.observe(o)
    node = str(fleet.processes["rollout/0"].process.node)
    at = o.wall_at
    lost = event(AgentEventKind.GPU_LOST, node=node, gpu="3")
    (d,) = detector.observe(replace(o, wall_at=at + 1, events=(lost,)))
    assert d.suspects[0].node == node
    assert detector.observe(Observation(wall_at=at + 2, left=(node,))) == []
    here = {str(s.node) for s in detector.processes()}
    assert here and node not in here
    again = LiveDetector.replay_window(json.loads(json.dumps(detector.window())))
    assert [d.key for d in again[-2]] == [d.key] and again[-1] == []


def test_a_link_that_was_back_at_once_explains_no_crash() -> None:
    fleet, detector = FakeFleet(seed=1), LiveDetector(CONFIG)
    for o in fleet.run(10.0):
        detector.observe(o)
    p = fleet.processes["trainer/1"]
    for kind, seconds in ((AgentEventKind.LINK_DOWN, 0.0), (AgentEventKind.LINK_UP, FLAP_SECONDS - 0.5)):
        flap = event(kind, node=str(p.process.node), interface="eth7")
        fleet.events.append(replace(flap, wall_at=fleet.now + WALL_OFFSET + seconds))
    for o in fleet.run(8.0):
        detector.observe(o)
    fleet.kill("trainer/1", signal="11")
    reported = [d for o in fleet.run(3.0) for d in detector.observe(o)]
    assert reported and {d.fault_class for d in reported} == {FaultClass.CRASH}
