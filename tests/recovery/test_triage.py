"""Which incident a diagnosis belongs to after a restart, which takes down healthy replicas too."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.incidents import ActionFailure, Attempt, Decision, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.triage import LOST_GRACE_SECONDS, TriageAction, triage, unrepaired, with_runtime_reason
from rolecall.testing.recovery_world import FLEET, diagnosis
from tests.recovery.test_guards import incident, plan
from tests.recovery.test_policy import fleet

F, S = FaultClass, IncidentState
AT_FAULT, HEALTHY = "trainer/0", "rollout/1"
RESTARTED = incident(
    "inc-1-job",
    diagnosis(F.CRASH, (AT_FAULT, 1)),
    plan(*FLEET, action=ActionKind.RESTART_JOB, incident="inc-1-job"),
    started=1.0,
)
LOST = {r: LOST_GRACE_SECONDS for r in FLEET}
AFTER = fleet(**{r.replace("/", "_"): 2 for r in FLEET})


def _failed(state: IncidentState) -> Incident:
    return replace(RESTARTED, state=state, attempts=(replace(RESTARTED.attempts[0], failure=ActionFailure.DIED),))


def _escalated() -> Incident:
    tolerate = Plan(incident_id=IncidentId("inc-1-job"), action=ActionKind.TOLERATE, targets=(), because="it failed")
    last = Attempt(number=2, plan=tolerate, page_oncall=True, outcome="escalated", made_at=2.0)
    failed = _failed(S.CLOSED)
    return replace(failed, attempts=(*failed.attempts, last), outcome=IncidentOutcome.ESCALATED, closed_at=3.0)


def _rejected() -> Incident:
    attempt = replace(RESTARTED.attempts[0], started_at=None, done_at=None, decision=Decision.REJECTED)
    return replace(RESTARTED, state=S.CLOSED, attempts=(attempt,), outcome=IncidentOutcome.ESCALATED, closed_at=3.0)


def _lost(fleet_: FleetView) -> FleetView:
    return FleetView(
        replicas=tuple(
            replace(r, state=ReplicaState.LOST) if r.replica in (AT_FAULT, HEALTHY) else r for r in fleet_.replicas
        )
    )


@pytest.mark.parametrize(
    ("known", "view", "incarnation", "onset"),
    [
        (_escalated(), AFTER, 2, 10.0),
        (_failed(S.OPEN), AFTER, 2, 10.0),
        (_failed(S.PLANNED), AFTER, 2, 10.0),
        (_rejected(), fleet(), 1, 2.0),
    ],
    ids=["escalated", "open", "planned", "rejected"],
)
def test_after_a_restart_a_crash_of_a_replica_that_was_healthy_opens_an_incident(
    known: Incident, view: FleetView, incarnation: int, onset: float
) -> None:
    def action(replica: str) -> TriageAction:
        crash = diagnosis(F.CRASH, (replica, incarnation), onset=onset)
        return triage(crash, [known], view, reported_before=False).kind

    assert action(HEALTHY) is TriageAction.OPEN
    assert action(AT_FAULT) is TriageAction.IGNORE, "that fault is known"


@pytest.mark.parametrize("known", [_escalated(), _failed(S.OPEN)], ids=["escalated", "open"])
def test_after_a_restart_a_lost_replica_that_was_healthy_is_repaired(known: Incident) -> None:
    found = unrepaired(_lost(AFTER), [known], 0.0, LOST)
    assert [s.replica for d in found for s in d.suspects] == [HEALTHY]


def test_a_replica_that_dies_during_a_restart_belongs_to_it() -> None:
    crash = diagnosis(F.CRASH, (HEALTHY, 2), onset=10.0)
    during = replace(RESTARTED, state=S.VERIFYING)
    assert triage(crash, [during], AFTER, reported_before=False).kind is TriageAction.FAIL
    assert unrepaired(_lost(AFTER), [during], 0.0, LOST) == []


def test_one_that_has_worked_since_has_a_fault_of_its_own() -> None:
    during = replace(RESTARTED, state=S.VERIFYING)

    def action(replica: str) -> TriageAction:
        crash = diagnosis(F.CRASH, (replica, 2), onset=10.0)
        return triage(crash, [during], AFTER, reported_before=False, worked=frozenset({replica})).kind

    assert action(HEALTHY) is TriageAction.OPEN
    assert action(AT_FAULT) is TriageAction.FAIL, "the restart was to help this one"


def _of_rank(fault: FaultClass, rank: int | None, because: str = "") -> Diagnosis:
    found = diagnosis(fault, (AT_FAULT, 1), because=because)
    return replace(found, suspects=tuple(replace(s, rank=rank) for s in found.suspects))


def _of_ranks(*ranks: int) -> Diagnosis:
    of_each = [_of_rank(F.CRASH, rank) for rank in ranks]
    return replace(of_each[0], suspects=tuple(s for d in of_each for s in d.suspects))


@pytest.mark.parametrize(
    ("found", "relation"),
    [
        (_of_rank(F.HANG, 3), "a second fault of a replica whose incident is open: now rank 3 of trainer/0"),
        (_of_rank(F.CRASH, 3), "a second fault of a replica whose incident is open: now rank 3 of trainer/0"),
        (_of_ranks(1, 3), "a second fault of a replica whose incident is open: now rank 3 of trainer/0 too"),
        (_of_rank(F.HANG, 1), "it was diagnosed as crash before: more is known of the fault"),
        (_of_rank(F.HANG, None), "it was diagnosed as crash before: more is known of the fault"),
    ],
)
def test_an_update_of_an_open_incident_says_how_it_is_related_to_it(found: Diagnosis, relation: str) -> None:
    first = incident("inc-1-x", _of_rank(F.CRASH, 1), plan(AT_FAULT, incident="inc-1-x"))
    taken = triage(found, [first], fleet(), reported_before=False)
    assert (taken.kind, taken.incident_id) == (TriageAction.UPDATE, "inc-1-x") and taken.because.startswith(relation)


def test_findings_that_alternate_between_ranks_update_an_incident_once_each() -> None:
    known = incident("inc-1-x", _of_rank(F.CRASH, 1), plan(AT_FAULT, incident="inc-1-x"))
    for found, action in (
        (_of_rank(F.CRASH, 3), TriageAction.UPDATE),
        (_of_ranks(1, 3), TriageAction.UPDATE),
        (_of_rank(F.CRASH, 1), TriageAction.IGNORE),
        (_of_rank(F.CRASH, 3), TriageAction.IGNORE),
        (_of_rank(F.CRASH, None), TriageAction.IGNORE),
        (_of_rank(F.CRASH, 2), TriageAction.UPDATE),
    ):
        assert triage(found, [known], fleet(), reported_before=True).kind is action
        if action is TriageAction.UPDATE:
            known = replace(
                known,
                diagnosis=found,
                earlier_diagnoses=known.diagnoses,
                seen_keys=known.seen_keys | {found.key},
            )


TIMED_OUT = "DeadlineExceeded: timed out after 240.0 s waiting for trainer/0 to start"


@pytest.mark.parametrize(
    ("because", "state", "incarnation", "is_cause"),
    [
        (TIMED_OUT, ReplicaState.LOST, 2, True),
        ("its process (pid 7) on node-1 is gone", ReplicaState.LOST, 2, False),
        (TIMED_OUT, ReplicaState.LOST, 1, False),
        (TIMED_OUT, ReplicaState.STARTING, 2, False),
    ],
)
def test_a_process_that_the_runtime_has_ended_did_not_crash_by_itself(
    because: str, state: ReplicaState, incarnation: int, is_cause: bool
) -> None:
    changed = {"state": state, "incarnation": incarnation, "because": because}
    view = FleetView(replicas=tuple(replace(r, **changed) if r.replica == AT_FAULT else r for r in AFTER.replicas))
    crashed = diagnosis(F.CRASH, (AT_FAULT, 2), onset=10.0)
    found = with_runtime_reason(crashed, view)
    ended = f"{AT_FAULT}#2 was ended by the runtime: {because}; " if is_cause else ""
    assert found == replace(crashed, because=f"{ended}{crashed.because}") and found.key == crashed.key
    hung = diagnosis(F.HANG, (AT_FAULT, 2), onset=10.0)
    assert with_runtime_reason(hung, view) == hung
