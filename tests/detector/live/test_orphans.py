"""An engine's process without its server: one finding from its event until it is gone; on-call gets the command."""

import pytest

from rolecall.core.config.job import DetectorConfig, RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis
from rolecall.core.ids import IncidentId, NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.policy import PolicyInput, decide

COMMAND = "rolecall node end 40 --start-ticks 400 --grace 10"


def event(kind: AgentEventKind, seq: int, process: bool = True) -> AgentEvent:
    detail = {"title": "VLLM::EngineCore", "adopted_by": "systemd (1)", "command": COMMAND}
    who = ProcessId(node=NodeId("n-1"), pid=40, start_ticks=400) if process else None
    return AgentEvent(
        seq=seq,
        kind=kind,
        node=NodeId("n-1"),
        at=1.0,
        wall_at=100.0 + seq,
        process=who,
        detail=detail if process else {},
    )


def observed(detector: LiveDetector, at: float, *events: AgentEvent, left: tuple[NodeId, ...] = ()) -> list[Diagnosis]:
    return detector.observe(Observation(wall_at=at, events=events, left=left))


@pytest.fixture
def detector() -> LiveDetector:
    return LiveDetector(DetectorConfig(), {})


def test_it_stands_until_it_is_gone(detector: LiveDetector) -> None:
    found = event(AgentEventKind.ORPHANED_ENGINE, 1)
    (said,) = observed(detector, 102.0, found)
    assert said.because.startswith("VLLM::EngineCore (pid 40) on n-1 has lost its server and belongs to systemd (1)")
    assert said.advice == f"on n-1: {COMMAND}"
    assert observed(detector, 900.0) == [said] and observed(detector, 901.0, found) == [said]
    again = LiveDetector.resumed(DetectorConfig(), {}, detector.state())
    assert observed(again, 902.0) == [said]
    assert observed(detector, 903.0, event(AgentEventKind.ORPHAN_GONE, 2)) == []


def test_a_restarted_agent_reports_it_again_and_a_node_that_left_has_none(detector: LiveDetector) -> None:
    found = event(AgentEventKind.ORPHANED_ENGINE, 1)
    observed(detector, 102.0, found)
    assert observed(detector, 103.0, event(AgentEventKind.AGENT_STARTED, 2, process=False)) == []
    assert len(observed(detector, 104.0, event(AgentEventKind.ORPHANED_ENGINE, 3))) == 1
    assert observed(detector, 105.0, left=(NodeId("n-1"),)) == []


@pytest.mark.parametrize("supports", [frozenset(), frozenset({ActionKind.REPLACE_REPLICA})])
def test_nothing_is_ended_and_on_call_gets_the_command(detector: LiveDetector, supports: frozenset[ActionKind]) -> None:
    (said,) = observed(detector, 102.0, event(AgentEventKind.ORPHANED_ENGINE, 1))
    facts = PolicyInput(
        incident_id=IncidentId("inc-1"), diagnosis=said, fleet=FleetView(replicas=()), past=(), supports=supports,
        config=RecoveryConfig(mode="act" if supports else "observe"),
    )  # fmt: skip
    decision = decide(facts)
    assert decision.plan.action is ActionKind.TOLERATE and decision.page_oncall
    assert decision.plan.because.endswith(f"on n-1: {COMMAND}")
