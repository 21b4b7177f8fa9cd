"""What panels say of a run's own processes, and what the engine makes of it: told when nothing else explains it."""

import json
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.metrics.catalogue import process_values
from rolecall.core.telemetry import NO_PAGE, UNCOUNTED, AgentEventKind, Phase, ProcessSample, SampleBatch
from rolecall.detector.base.findings import PANEL
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, suspect
from rolecall.detector.live.run_panels import RUN_DELAY, SETTLE_TICKS, SILENT_SECONDS, RunPanels
from rolecall.detector.live.stages.evidence import panels
from rolecall.detector.live.stages.evidence.panels import PanelsStage
from rolecall.detector.live.stages.stage import Tick
from rolecall.detector.panels.metrics import panel_metric, process_reading
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.panels.registry import detector
from rolecall.testing.synthetic_run import FakeFault, FakeFleet

ROLES = {"trainer": 2, "rollout": 3, "reward": 2, "controller": 1}
RSS = "rolecall_process_resident_memory_bytes"
BEGUN_SECONDS = 12.0 + SETTLE_TICKS
"""By then all processes have left phase start, and the panel of the rollouts has begun."""
MEMORY_BYTES, NOISE_BYTES = 2e9, 1e6


@dataclass
class Accuser:
    """Accuses the machine at `accused` once it is set; keeps what it was shown."""

    accused: int | None = None
    made: list[PanelShape] = field(default_factory=list)
    seen: list[tuple[PanelShape, Floats]] = field(default_factory=list)
    name: str = "toy"

    def track(self, shape: PanelShape) -> "AccuserTracker":
        self.made.append(shape)
        return AccuserTracker(self, shape)


@dataclass
class AccuserTracker:
    by: Accuser
    shape: PanelShape

    def tick(self, at: float, values: Floats) -> list[Finding]:
        self.by.seen.append((self.shape, values.copy()))
        if self.by.accused is None:
            return []
        who, self.by.accused = self.by.accused, None
        return [
            Finding(
                detector="toy",
                suspects=(self.shape.suspect(who),),
                fault_class=FaultClass.SLOW,
                onset=at,
                detected_at=at,
                confidence=0.8,
                because="its metrics",
            )
        ]


@dataclass
class Run:
    """A fake fleet under the panels and the engine, put together as `watch` does it."""

    fleet: FakeFleet
    panels: RunPanels
    engine: LiveDetector = field(default_factory=lambda: LiveDetector(DetectorConfig(mask_proc_state=True), ROLES))
    reported: dict[str, Diagnosis] = field(default_factory=dict)
    standing: list[Diagnosis] = field(default_factory=list)

    def go(self, seconds: float) -> list[Finding]:
        found: list[Finding] = []
        for observation in self.fleet.run(seconds):
            said = self.panels.findings(observation)
            found += said
            self.look(replace(observation, panel_findings=said))
        return found

    def look(self, observation: Observation) -> None:
        self.standing = self.engine.observe(observation)
        for d in self.standing:
            self.reported.setdefault(d.key, d)

    def keys(self) -> list[str]:
        return [d.key for d in self.standing]


class SteadyRun:
    """Three rollouts that do nothing but generate, one sample a second."""

    def __init__(self, panels: RunPanels) -> None:
        self.panels, self.engine = panels, LiveDetector(DetectorConfig(mask_proc_state=True))
        self.rng, self.now = random.Random(5), 1_700_000_000.0
        self.leaked_bytes = 0.0  # by rollout/1
        self.reported: dict[str, Diagnosis] = {}
        self.standing: list[Diagnosis] = []
        self.processes = [ProcessId(node=NodeId(f"node-{i}"), pid=100 + i, start_ticks=1) for i in range(3)]
        self.work = [0.0, 0.0, 0.0]  # units, of which one takes about 10 ms

    def go(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            batches = tuple(self._batch(i) for i in range(3))
            seen = Observation(wall_at=self.now, batches=batches)
            seen = replace(seen, panel_findings=self.panels.findings(seen))
            self.standing = self.engine.observe(seen)
            self.reported.update({d.key: d for d in self.standing})

    def _batch(self, i: int) -> SampleBatch:
        self.work[i] += self.rng.gauss(90, 5)
        leaked = self.leaked_bytes if i == 1 else 0.0
        at = self.now - 1_600_000_000.0
        sample = ProcessSample(
            process=self.processes[i],
            role="rollout",
            replica=f"rollout/{i}",
            rank=0,
            incarnation=1,
            at=at,
            wall_at=self.now,
            alive=True,
            page_ok=True,
            phase=Phase.GENERATE,
            progress=int(self.work[i]),
            progress_at=at,
            beats=int(at * 10),
            busy_seconds=at * 0.9,
            work_units=int(self.work[i]),
            tokens=int(self.work[i] * 16),
            requests_active=16,
            cpu_seconds=at * 0.8,
            rss_bytes=int(MEMORY_BYTES + leaked + self.rng.gauss(0, NOISE_BYTES)),
        )
        head = {"node": self.processes[i].node, "agent_pid": 1, "cursor": 1, "lost": 0}
        return SampleBatch(**head, at=at, wall_at=self.now, processes=(sample,), hosts=())


def begun(accuser: Accuser, seed: int = 1) -> Run:
    run = Run(FakeFleet(seed=seed), RunPanels(accuser))
    run.go(BEGUN_SECONDS)
    return run


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes become seconds."""
    monkeypatch.setattr(panels, "AFTERMATH_SECONDS", 10.0)
    monkeypatch.setattr(panels, "SAME_FAULT_SECONDS", 40.0)


def calm(accuser: Accuser, seed: int = 1) -> Run:
    """So long after the start that it explains nothing any more."""
    run = begun(accuser, seed)
    run.go(panels.AFTERMATH_SECONDS + panels.ONSET_SECONDS)
    return run


# --- panels of a run


@pytest.mark.parametrize("is_shared", [True, False])
def test_waiting_for_a_cpu_is_not_compared_within_a_node(is_shared: bool) -> None:
    accuser = Accuser()
    run = SteadyRun(RunPanels(accuser))
    if is_shared:
        run.processes = [replace(p, node=NodeId("node-0")) for p in run.processes]
    run.go(SETTLE_TICKS + 5)
    (shape,) = accuser.made
    assert RSS in shape.metrics and (RUN_DELAY <= {*shape.metrics}) is not is_shared
    assert not is_shared or not RUN_DELAY & {*shape.metrics}


def test_the_rollouts_are_a_panel_and_fewer_than_three_are_none() -> None:
    accuser = Accuser()
    begun(accuser)
    [shape] = accuser.made
    assert (shape.role, [m.replica for m in shape.machines]) == ("rollout", ["rollout/0", "rollout/1", "rollout/2"])
    assert {RSS, "rolecall_process_tokens_per_second", "rolecall_process_cpu_ratio"} <= set(shape.metrics)
    assert "rolecall_process_incarnation" not in shape.metrics


@pytest.mark.parametrize(
    ("exchanges", "panels_made"),
    [
        (1, [("role rollout", [0, 0, 0]), ("role rollout, further ranks", [1, 1, 1])]),
        (0, [("role rollout", [0, 1, 0, 1, 0, 1])]),
    ],
    ids=["compute together", "do not"],
)
def test_further_ranks_of_replicas_have_a_panel_of_their_own(
    exchanges: int, panels_made: list[tuple[str, list[int]]]
) -> None:
    """The first rank of a replica that computes together leads the others, so that its counters differ."""
    accuser = Accuser()
    run = SteadyRun(RunPanels(accuser))
    for _ in range(SETTLE_TICKS + 2):
        run.now += 1.0
        batches = []
        for batch in map(run._batch, range(3)):
            (first,) = (replace(s, exchanges=exchanges) for s in batch.processes)
            further = replace(first, rank=1, process=replace(first.process, pid=first.process.pid + 50))
            batches.append(replace(batch, processes=(first, further)))
        run.panels.findings(Observation(wall_at=run.now, batches=tuple(batches)))
    assert [(shape.name, [m.rank for m in shape.machines]) for shape in accuser.made] == panels_made


def test_engines_that_sleep_have_a_panel_of_their_own() -> None:
    """Those of hybrids, in mode semi_sync: the others work meanwhile."""
    accuser = Accuser()
    run = SteadyRun(RunPanels(accuser))
    for second in range(SETTLE_TICKS + 2):
        run.now += 1.0
        batches = []
        for n, batch in enumerate(run._batch(i % 3) for i in range(6)):
            (first,) = batch.processes
            sleeps = n >= 3 and second % 10 < 4
            process = replace(first.process, pid=first.process.pid + n)
            phase = Phase.SLEEP if sleeps else Phase.GENERATE
            sample = replace(first, replica=f"rollout/{n}", process=process, phase=phase)
            batches.append(replace(batch, processes=(sample,)))
        run.panels.findings(Observation(wall_at=run.now, batches=tuple(batches)))
    assert [[m.replica[-1] for m in shape.machines] for shape in accuser.made] == [["0", "1", "2"], ["3", "4", "5"]]


def test_panel_findings_name_process_and_incarnation() -> None:
    accuser = Accuser()
    run = begun(accuser)
    accuser.accused = 1
    [finding] = run.go(3.0)
    process = run.fleet.processes["rollout/1"].process
    [who] = finding.suspects
    assert (who.replica, who.rank, who.incarnation, who.process) == ("rollout/1", 0, 1, process)
    assert finding.detector == f"{PANEL}toy"


def test_values_are_those_of_the_processes_and_none_where_an_agent_was_silent() -> None:
    accuser = Accuser()
    run = begun(accuser)
    run.fleet.unreachable["node-rollout-2"] = (run.fleet.now, "no answer in time")
    accuser.seen.clear()
    run.go(5.0)
    shape, values = accuser.seen[-1]
    row = dict(zip(shape.metrics, values, strict=True))
    beats = row["rolecall_process_beats_per_second"]
    assert beats[:2] == pytest.approx(10, abs=6) and np.isnan(beats[2])
    run.go(SILENT_SECONDS + SETTLE_TICKS)
    assert accuser.seen[-1][0] is shape, "of the two that are left nothing is said"


def test_a_role_with_a_replacement_is_learned_again() -> None:
    accuser = Accuser()
    run = begun(accuser)
    run.fleet.kill("rollout/2")
    run.go(2.0)
    run.fleet.promote("standby/0", "rollout/2", 2)
    run.go(SETTLE_TICKS + 3.0)
    before, after = accuser.made
    assert before.machines[:2] == after.machines[:2]
    assert (before.machines[2].node, after.machines[2].node) == ("node-rollout-2", "node-standby-0")


def test_a_process_that_announced_its_exit_is_no_member() -> None:
    accuser = Accuser()
    run = begun(accuser)
    run.fleet.event(AgentEventKind.FINISHED, run.fleet.processes.pop("rollout/2"))
    run.go(3.0)
    accuser.seen.clear()
    run.go(SETTLE_TICKS + 5.0)
    assert not accuser.seen


def test_a_process_that_takes_the_name_of_another_takes_its_place_at_once() -> None:
    accuser = Accuser()
    run = SteadyRun(RunPanels(accuser))
    run.go(SETTLE_TICKS + 5)
    run.processes[1] = replace(run.processes[1], pid=999)
    run.go(SETTLE_TICKS + int(SILENT_SECONDS))
    assert [len(shape.machines) for shape in accuser.made] == [3, 3]


@pytest.mark.parametrize("phase", [Phase.GENERATE, NO_PAGE])
def test_processes_are_compared_in_what_is_exposed_of_them(phase: str) -> None:
    """`/metrics` and panels have one translation each: they must not drift apart."""
    sample = SteadyRun(RunPanels(Accuser()))._batch(1).processes[0]
    sample = replace(sample, phase=phase, loss=1.5, throttled_seconds=2.5, healths=1, entropy=0.5)
    exposed = {v.metric.name: v.value for v in process_values(sample) if panel_metric(v.metric)}
    assert process_reading(sample).values == exposed
    assert ("rolecall_train_loss" in exposed) == (phase == Phase.GENERATE) and "rolecall_train_reward" not in exposed
    assert not [name for name in exposed if "entropy" in name or "healths" in name], "of the training, not the machine"


# --- what the engine makes of it


def test_metrics_that_shift_are_reported_with_evidence_and_the_window_replays() -> None:
    """The default detector, a leak that no other detector sees, and fifteen minutes before it."""
    run = SteadyRun(RunPanels(detector()))
    run.go(900)
    assert not run.reported
    at = run.now
    run.leaked_bytes = 50 * NOISE_BYTES
    run.go(20)
    [d] = run.standing
    assert (d.key, d.detectors, d.gain_ratio) == ("slow:rollout/1#1", (f"{PANEL}sequential",), None)
    assert d.detected_at - d.onset < 20 and abs(d.onset - at) < 10
    assert RSS in d.because and any(e.kind == f"metric:{RSS}" for e in d.evidence)
    window = json.loads(json.dumps(run.engine.window(), allow_nan=False))
    assert d in LiveDetector.replay_window(window)[-1]
    assert run.engine.progressing("rollout/1", 1)[0], "it is not as it was, and it works"


def test_a_stall_that_comes_after_takes_its_place_and_one_that_came_before_explains_it() -> None:
    accuser = Accuser(accused=None)
    run = calm(accuser)
    accuser.accused = 1
    run.go(3.0)
    assert run.keys() == ["slow:rollout/1#1"]
    run.fleet.processes["rollout/1"].fault = FakeFault("stopped")
    run.go(6.0)
    assert run.keys() == ["hang:rollout/1#1"], "cause instead of symptom"
    run.reported.clear()
    accuser.accused = 1
    run.go(3.0)
    accuser.accused = 0
    run.go(3.0)
    assert list(run.reported) == ["hang:rollout/1#1"], "neither of the stalled one nor of those who take over its work"


@pytest.mark.parametrize("arrives", [False, True])
def test_the_start_of_a_run_explains_nothing_and_a_later_arrival_does(arrives: bool) -> None:
    """A panel that has just begun is heard, also by a watch that has just been restarted."""
    accuser = Accuser()
    run = begun(accuser)
    *_, state = run.engine.state_in_parts(100)
    assert state is not None
    run.engine = LiveDetector.resumed(DetectorConfig(mask_proc_state=True), ROLES, json.loads(state))
    if arrives:
        run.fleet.start("reward", 7, incarnation=1)
    run.go(1.0)
    accuser.accused = 1
    run.go(3.0)
    assert run.keys() == ([] if arrives else ["slow:rollout/1#1"])


def test_another_replica_that_changed_before_the_stall_stays_reported() -> None:
    accuser = Accuser()
    run = calm(accuser)
    accuser.accused = 0
    run.go(10.0)
    run.fleet.processes["rollout/1"].fault = FakeFault("stopped")
    run.go(6.0)
    assert sorted(run.keys()) == ["hang:rollout/1#1", "slow:rollout/0#1"]


def test_panel_findings_wait_while_a_process_stalls_undiagnosed() -> None:
    accuser = Accuser()
    run = calm(accuser)
    run.fleet.processes["rollout/1"].fault = FakeFault("stopped")
    run.go(1.2)
    accuser.accused = 0
    [said] = run.go(1.2)
    assert not run.reported
    run.go(5.0)
    assert list(run.reported) == ["hang:rollout/1#1"] and said.suspects[0].replica == "rollout/0"


def test_it_ends_with_its_process_and_when_it_was_not_said_for_long() -> None:
    accuser = Accuser()
    run = calm(accuser)
    accuser.accused = 0
    run.go(panels.SAME_FAULT_SECONDS / 2)
    accuser.accused = 0
    run.go(panels.SAME_FAULT_SECONDS - 5)
    assert run.keys() == ["slow:rollout/0#1"] and len(run.reported) == 1, "said again, it is the same fault"
    run.go(10.0)
    assert not run.standing
    accuser.accused = 2
    run.go(3.0)
    assert run.keys() == ["slow:rollout/2#1"]
    run.engine.forget("rollout/2", 2)
    run.go(1.0)
    assert not run.standing


def test_findings_survive_a_restart_of_the_watcher() -> None:
    accuser = Accuser()
    run = calm(accuser)
    accuser.accused = 0
    run.go(3.0)
    [d] = run.standing
    state = json.loads(json.dumps(run.engine.state(), allow_nan=False))
    run.engine = LiveDetector.resumed(DetectorConfig(mask_proc_state=True), ROLES, state)
    run.go(2.0)
    assert run.standing == [d]
    old = state | {"stages": {k: v for k, v in state["stages"].items() if k != "panels"}}
    run.engine = LiveDetector.resumed(DetectorConfig(mask_proc_state=True), ROLES, old)
    run.go(2.0)
    assert not run.standing, "a state of before there was that stage"


def test_a_panel_finding_is_held_while_its_process_is_in_an_uninterruptible_wait() -> None:
    process = MonitoredProcess("trainer/1", "trainer", 0, UNCOUNTED, "node-1", None, seen_wall=1000.0)
    fleet = MonitoredProcesses(subjects={process.key: process})
    slow = Finding(
        detector="panel:sequential",
        suspects=(suspect(process),),
        fault_class=FaultClass.SLOW,
        onset=1000.0,
        detected_at=1006.0,
        confidence=0.6,
        because="its metrics changed",
    )

    def reported(now: float, *found: Finding) -> list[Finding]:
        observation = Observation(wall_at=now, panel_findings=found)
        return stage.evaluate(
            Tick(observation=observation, fleet=fleet, config=DetectorConfig(), expected_roles={}, now=now)
        )

    stage = PanelsStage()
    process.halted.advance(6.0, 0.0, 0.0)
    assert reported(1006.0, slow) == []
    process.halted.reset()
    assert reported(1010.0) == [slow]
