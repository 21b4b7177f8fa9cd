"""Agents that do not answer: one is a node that cannot be seen, most of them at once are one fault of what they
share."""

from dataclasses import replace

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.nodes import agent_lost as lost
from rolecall.testing.synthetic_run import FakeFleet


def test_many_silent_agents_at_once_are_one_fault_without_suspects() -> None:
    fleet, detector = FakeFleet(seed=1), LiveDetector(DetectorConfig(mask_proc_state=True))
    last = [o for o in fleet.run(10.0) if [detector.observe(o)]][-1]
    nodes = sorted({p.node for p in fleet.processes.values()})
    assert len(nodes) >= 4
    at = last.wall_at

    def reported(silent: list[str], seconds: float) -> list[str]:
        unreachable = tuple((node, at, "no complete answer to /v1/news in time") for node in silent)
        return [d.key for d in detector.observe(Observation(wall_at=at + seconds, unreachable=unreachable))]

    assert reported(nodes[:2], 4.0) == [f"cannot_tell:{node}#None" for node in nodes[:2]]
    assert reported(nodes, 5.0) == ["cannot_tell:agents"]
    (standing,) = detector.observe(
        Observation(wall_at=at + 6.0, unreachable=tuple((node, at, "connection refused") for node in nodes))
    )
    assert standing.fault_class is FaultClass.CANNOT_TELL and standing.suspects == ()
    assert (
        f"{len(nodes)} of {len(nodes)} agents are unreachable" in standing.because and "another host" in standing.settle
    )
    assert reported(nodes[:1], 7.0) == [f"cannot_tell:{nodes[0]}#None"]
    assert reported([], 8.0) == []


def test_an_outage_that_reaches_the_agents_one_after_another_is_one_fault_all_the_same() -> None:
    """Each of four thousand agents is asked once in eight seconds: the first is silent long before the last."""
    nodes = [f"n-{n}" for n in range(4000)]
    fleet = MonitoredProcesses(offsets=dict.fromkeys(nodes, 0.0))
    reported = set[str]()
    for now in range(20):
        fleet.unreachable = tuple(
            (n, i / 500, "no complete answer in time") for i, n in enumerate(nodes) if i / 500 <= now
        )
        reported |= {f.about or str(f.suspects[0].node) for f in lost.find(fleet, float(now))}
    assert reported == {"agents"}


def test_several_of_many_are_reported_by_themselves_a_little_later() -> None:
    fleet = MonitoredProcesses(offsets=dict.fromkeys(["a", "b", "c", "d", "e", "f"], 0.0))
    fleet.unreachable = tuple((n, 0.0, "connection refused") for n in "abc")
    assert lost.find(fleet, lost.MANY_GRACE_SECONDS - 1.0) == []
    assert [str(f.suspects[0].node) for f in lost.find(fleet, lost.MANY_GRACE_SECONDS)] == ["a", "b", "c"]


@pytest.mark.parametrize(("age", "named"), [(5.0, True), (300.0, False)])
def test_a_raylet_that_exited_long_ago_is_not_reported_again_by_a_new_watch(age: float, named: bool) -> None:
    """Agents repeat their events to it, and the loss of that node is over."""
    fleet, detector = FakeFleet(seed=1), LiveDetector(DetectorConfig(mask_proc_state=True))
    process = fleet.processes["rollout/0"]
    fleet.event(AgentEventKind.RAYLET_EXITED, process)
    exited = replace(fleet.events[-1], process=None, replica="", role="", incarnation=0)
    fleet.events[-1] = replace(exited, at=exited.at - age, wall_at=exited.wall_at - age)
    keys = {d.key for o in fleet.run(2.0) for d in detector.observe(o)}
    assert keys == ({f"node_lost:{process.node}#None"} if named else set())


@pytest.mark.parametrize(("apart", "named"), [(1.0, True), (200.0, False)])
def test_exceptions_that_an_agent_repeats_to_a_new_watch_are_as_far_apart_as_they_were(
    apart: float, named: bool
) -> None:
    fleet, detector = FakeFleet(seed=1), LiveDetector(DetectorConfig(mask_proc_state=True))
    trainers = [p for p in fleet.processes.values() if p.role == "trainer"]
    for n, process in enumerate(trainers):
        raised = {"type": "ValueError", "message": "a bad row", "fingerprint": "f", "step": str(n)}
        fleet.event(AgentEventKind.EXCEPTION, process, **raised)
        age = 10.0 + apart * n
        fleet.events[-1] = replace(fleet.events[-1], at=fleet.now - age, wall_at=fleet.events[-1].wall_at - age)
    classes = {d.fault_class for o in fleet.run(2.0) for d in detector.observe(o)}
    assert classes == ({FaultClass.USER_CODE} if named else set())
