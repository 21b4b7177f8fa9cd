"""What recovery decides for a watched job, whose scheduler finds nodes and whose steps are not known to be committed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, ReplicaView, RunPlaces
from rolecall.recovery.incidents import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import PolicyDecision, PolicyInput, decide, question

A, F = ActionKind, FaultClass
CONFIG = RecoveryConfig(mode="act")


def fleet(*incarnations: int) -> FleetView:
    """Of rollout/1 and those that follow it."""
    views = (
        ReplicaView(
            replica=ReplicaId(f"rollout/{n}"),
            desired_incarnation=incarnation,
            incarnation=incarnation,
            state=ReplicaState.SERVING,
            node=NodeId(f"n-{n}"),
            started=True,
        )
        for n, incarnation in enumerate(incarnations, 1)
    )
    return FleetView(replicas=tuple(views), places=RunPlaces(scheduled=True))


def found(fault: FaultClass, *incarnations: int) -> Diagnosis:
    return Diagnosis(
        suspects=tuple(
            Suspect(node=NodeId(f"n-{n}"), role="rollout", replica=f"rollout/{n}", incarnation=incarnation)
            for n, incarnation in enumerate(incarnations, 1)
        ),
        fault_class=fault,
        onset=30.0,
        detected_at=31.0,
        confidence=1.0,
        because="it hangs",
        detectors=("x",),
    )


def attempt(*incarnations: int, failure: ActionFailure | None = None) -> Attempt:
    targets = tuple(
        PlanTarget(replica=ReplicaId(f"rollout/{n}"), incarnation=incarnation, node=NodeId(f"n-{n}"))
        for n, incarnation in enumerate(incarnations, 1)
    )
    plan = Plan(incident_id=IncidentId("inc"), action=A.REPLACE_REPLICA, targets=targets, because="x")
    return Attempt(
        number=1, plan=plan, page_oncall=False, outcome="tolerated", made_at=0.0, started_at=1.0, done_at=2.0,
        failure=failure, failed_because="after 120.0 s rollout/1#2 is not started" if failure else "",
    )  # fmt: skip


def decided(
    incident: Incident,
    *earlier: Incident,
    view: FleetView,
    supports: frozenset[ActionKind],
    working: Sequence[int] = (),
) -> PolicyDecision:
    """`working`: numbers of the rollouts that make progress."""
    progress = {f"rollout/{n}": (True, "7 units") for n in working}
    asked = question(incident, [*earlier, incident], fleet=view, config=CONFIG, supports=supports, progress=progress)
    return decide(PolicyInput.from_dict(asked.to_dict()))


def incident(fault: FaultClass, incarnation: int, *attempts: Attempt, num_suspects: int = 1) -> Incident:
    diagnosis = found(fault, *[incarnation] * num_suspects)
    return Incident(
        incident_id="inc-2", state=IncidentState.OPEN, diagnosis=diagnosis, opened_at=30.0,
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
    failed = attempt(1, failure=ActionFailure.NO_PROGRESS)
    decision = decided(incident(F.HANG, 1, failed), view=fleet(1), supports=BOTH)
    assert decision.plan.action is A.TOLERATE and decision.page_oncall
    assert decision.plan.because == "rollout/1#2 was never seen: after 120.0 s rollout/1#2 is not started"


def test_nothing_is_ended_again_while_another_replacement_was_never_seen() -> None:
    """That of rollout/1 works; that of rollout/2 found no GPU."""
    failed = attempt(1, 1, failure=ActionFailure.NO_PROGRESS)
    both = incident(F.HANG, 1, failed, num_suspects=2)
    decision = decided(both, view=fleet(2, 1), supports=BOTH, working=[1])
    assert decision.plan.action is A.TOLERATE and decision.page_oncall
    assert decision.plan.because.startswith("rollout/2#2 was never seen: ")


@pytest.mark.parametrize(("working", "again"), [((), [1, 2]), ((1,), [2]), ((1, 2), [])])
def test_a_replacement_that_works_is_not_ended_again(working: Sequence[int], again: Sequence[int]) -> None:
    both = incident(F.HANG, 1, attempt(1, 1, failure=ActionFailure.NO_PROGRESS), num_suspects=2)
    decision = decided(both, view=fleet(2, 2), supports=BOTH, working=working)
    assert [(t.replica, t.incarnation) for t in decision.plan.targets] == [(f"rollout/{n}", 2) for n in again]
    assert again or (decision.outcome is IncidentOutcome.SELF_RECOVERED and not decision.page_oncall)
