"""What recovery decides for a watched job, whose scheduler finds nodes and whose steps are not known to be committed."""

from dataclasses import replace

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, ReplicaView, RunPlaces
from rolecall.recovery.incidents import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import PolicyDecision, decide, question

A, F = ActionKind, FaultClass
CONFIG = RecoveryConfig(mode="act")
NAME = ReplicaId("rollout/1")


def fleet(incarnation: int) -> FleetView:
    view = ReplicaView(
        replica=NAME,
        desired_incarnation=incarnation,
        incarnation=incarnation,
        state=ReplicaState.SERVING,
        node=NodeId("n-1"),
        started=True,
    )
    return FleetView(replicas=(view,), places=RunPlaces(scheduled=True))


def found(fault: FaultClass, incarnation: int) -> Diagnosis:
    suspect = Suspect(node=NodeId("n-1"), role="rollout", replica=NAME, incarnation=incarnation)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=fault,
        onset=30.0,
        detected_at=31.0,
        confidence=1.0,
        because="it hangs",
        detectors=("x",),
    )


def attempt(incarnation: int, failure: ActionFailure | None = None) -> Attempt:
    target = PlanTarget(replica=NAME, incarnation=incarnation, node=NodeId("n-1"))
    plan = Plan(incident_id=IncidentId("inc"), action=A.REPLACE_REPLICA, targets=(target,), because="x")
    return Attempt(
        number=1, plan=plan, page_oncall=False, outcome="tolerated", made_at=0.0, started_at=1.0, done_at=2.0,
        failure=failure, failed_because="after 120.0 s rollout/1#2 is not started" if failure else "",
    )  # fmt: skip


def decided(incident: Incident, *earlier: Incident, view: FleetView, supports: frozenset[ActionKind]) -> PolicyDecision:
    return decide(question(incident, [*earlier, incident], fleet=view, config=CONFIG, supports=supports))


def incident(fault: FaultClass, incarnation: int, *attempts: Attempt) -> Incident:
    return Incident(
        incident_id="inc-2", state=IncidentState.OPEN, diagnosis=found(fault, incarnation), opened_at=30.0,
        seen_keys=frozenset(), attempts=attempts,
    )  # fmt: skip


BOTH = frozenset({A.REPLACE_REPLICA, A.REPLACE_NODE})


def test_a_second_fault_of_a_replica_is_no_reason_to_climb() -> None:
    """Nothing tells here whether the job committed a step in between."""
    before = Incident(
        incident_id="inc-1", state=IncidentState.CLOSED, diagnosis=found(F.HANG, 1), opened_at=0.0,
        seen_keys=frozenset(), attempts=(attempt(1),), outcome=IncidentOutcome.RESOLVED, verified_at=10.0,
    )  # fmt: skip
    decision = decided(incident(F.HANG, 2), before, view=fleet(2), supports=frozenset({A.REPLACE_REPLICA}))
    assert decision.plan.action is A.REPLACE_REPLICA and decision.plan.targets[0].incarnation == 2


def test_a_replica_of_another_role_is_not_touched() -> None:
    suspect = Suspect(node=NodeId("n-1"), role="trainer", replica="trainer/0", incarnation=0)
    other = replace(found(F.HANG, 1), suspects=(suspect,))
    decision = decided(replace(incident(F.HANG, 1), diagnosis=other), view=fleet(1), supports=BOTH)
    assert decision.plan.action is A.TOLERATE and decision.page_oncall
    assert "trainer/0 may not be replaced" in decision.plan.because


def test_a_faulty_node_is_left_where_the_target_can_and_else_on_call_is_paged() -> None:
    assert decided(incident(F.GPU, 1), view=fleet(1), supports=BOTH).plan.action is A.REPLACE_NODE
    other = decided(incident(F.GPU, 1), view=fleet(1), supports=frozenset({A.REPLACE_REPLICA}))
    assert other.plan.action is A.TOLERATE and other.page_oncall
    assert "cannot perform what is needed: replace node" in other.plan.because


def test_a_replacement_that_was_never_seen_is_not_killed_again() -> None:
    failed = attempt(1, ActionFailure.NO_PROGRESS)
    decision = decided(incident(F.HANG, 1, failed), view=fleet(1), supports=BOTH)
    assert decision.plan.action is A.TOLERATE and decision.page_oncall
    assert decision.plan.because == "rollout/1#2 was never seen: after 120.0 s rollout/1#2 is not started"
