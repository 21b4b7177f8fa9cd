"""Resolved, failed, or not yet."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, RunPlaces
from rolecall.recovery.incidents import ActionFailure
from rolecall.recovery.next_step import verify
from tests.recovery.test_policy import view

R = ReplicaState
WORKS, STILL = (True, "7 units"), (False, "no unit yet")


@pytest.mark.parametrize(
    ("replica", "incarnation", "state", "progress", "waited", "resolved", "failure"),
    [
        ("rollout/1", 2, R.SERVING, WORKS, 1.0, True, None),
        ("rollout/1", 3, R.SERVING, WORKS, 1.0, True, None),
        ("rollout/1", 2, R.SERVING, STILL, 1.0, False, None),
        ("rollout/1", 2, R.READY, WORKS, 1.0, False, None),
        ("rollout/1", 2, R.STARTING, STILL, 1.0, False, None),
        ("rollout/1", 1, R.SERVING, WORKS, 1.0, False, None),
        ("rollout/1", 1, R.LOST, STILL, 1.0, False, None),
        ("rollout/1", 1, R.LOST, STILL, 21.0, False, ActionFailure.NO_PROGRESS),
        ("rollout/1", 2, R.LOST, STILL, 1.0, False, ActionFailure.DIED),
        ("rollout/1", 2, R.STOPPED, STILL, 1.0, False, ActionFailure.DIED),
        ("rollout/1", 2, R.SERVING, STILL, 21.0, False, ActionFailure.NO_PROGRESS),
        ("rollout/1", 2, R.SERVING, WORKS, 21.0, True, None),
        ("standby/0", 2, R.READY, STILL, 1.0, True, None),
        ("standby/0", 2, R.STARTING, STILL, 1.0, False, None),
        ("standby/0", 2, R.STARTING, STILL, 21.0, False, None),  # nobody waits for it
        ("standby/0", 2, R.STARTING, STILL, 201.0, False, ActionFailure.NO_PROGRESS),
        ("standby/0", 1, R.LOST, STILL, 21.0, False, ActionFailure.NO_PROGRESS),
        ("standby/0", 2, R.LOST, STILL, 1.0, False, ActionFailure.DIED),
        ("trainer-standby/0", 2, R.READY, STILL, 1.0, True, None),
    ],
)
def test_verify(
    replica: str,
    incarnation: int,
    state: ReplicaState,
    progress: tuple[bool, str],
    waited: float,
    resolved: bool,
    failure: ActionFailure | None,
) -> None:
    name = ReplicaId(replica)
    plan = Plan(
        incident_id=IncidentId("inc-1"),
        action=ActionKind.REPLACE_REPLICA,
        targets=(PlanTarget(replica=name, incarnation=1, node=NodeId("n")),),
        because="",
    )
    seen = replace(view(replica, "n", state=state), incarnation=incarnation, desired_incarnation=2, changed_at=55.0)
    found = verify(
        plan,
        fleet=FleetView(replicas=(seen,)),
        progress={replica: progress},
        done_at=100.0,
        now=100.0 + waited,
        verification_timeout_seconds=20.0,
    )
    assert (found.resolved, found.failure) == (resolved, failure)
    assert found.because and (not resolved or found.serving_at == 55.0)


@pytest.mark.parametrize("was_ready", [True, False])
@pytest.mark.parametrize("state", [R.STOPPED, R.LOST])
def test_a_new_standby_that_was_used_at_once_was_ready(was_ready: bool, state: ReplicaState) -> None:
    target = PlanTarget(replica=ReplicaId("standby/0"), incarnation=1, node=NodeId("n"))
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="")
    used = replace(
        view("standby/0", "n", state=state),
        incarnation=2,
        desired_incarnation=2,
        started=was_ready,
        because="it became rollout/1#3",
    )
    found = verify(
        plan, fleet=FleetView(replicas=(used,)), progress={}, done_at=0.0, now=1.0, verification_timeout_seconds=20.0
    )
    if was_ready and state is R.STOPPED:
        assert found.resolved and found.because == "standby/0#2 was ready: it became rollout/1#3"
    else:
        assert found.failure is ActionFailure.DIED


def test_a_replica_that_left_the_run_is_not_resolved() -> None:
    target = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("n"))
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="")
    empty = FleetView(replicas=())
    waiting = verify(plan, fleet=empty, progress={}, done_at=0.0, now=1.0, verification_timeout_seconds=20.0)
    assert not waiting.resolved and waiting.failure is None and "no longer part of the run" in waiting.because
    assert verify(plan, fleet=empty, progress={}, done_at=0.0, now=21.0, verification_timeout_seconds=20.0).failure


@pytest.mark.parametrize(
    ("waiting", "state", "waited", "resolved", "failure"),
    [
        (frozenset({"rollout/2"}), R.SERVING, 19.0, False, None),
        (frozenset({"rollout/2"}), R.SERVING, 21.0, True, None),
        (frozenset({"rollout/2"}), R.READY, 21.0, False, ActionFailure.NO_PROGRESS),
        (frozenset({"rollout/1"}), R.SERVING, 21.0, False, ActionFailure.NO_PROGRESS),
    ],
    ids=["it may still get work", "healthy without work", "it does not serve", "another one waits"],
)
def test_a_replica_that_gets_no_work_has_not_failed(
    waiting: frozenset[str], state: ReplicaState, waited: float, resolved: bool, failure: ActionFailure | None
) -> None:
    """The next step of the job may take longer than the time for verification."""
    names = ("rollout/1", "rollout/2")
    targets = tuple(PlanTarget(replica=ReplicaId(n), incarnation=1, node=NodeId("n")) for n in names)
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.RESTART_ROLE, targets=targets, because="")
    fleet = FleetView(replicas=(view(names[0], "n", desired=2), view(names[1], "n", desired=2, state=state)))
    found = verify(
        plan,
        fleet=fleet,
        progress={"rollout/1": WORKS, "rollout/2": STILL},
        waiting=waiting,
        done_at=100.0,
        now=100.0 + waited,
        verification_timeout_seconds=20.0,
    )
    assert (found.resolved, found.failure) == (resolved, failure)


@pytest.mark.parametrize(
    ("waiting", "progress", "waited", "resolved", "failure"),
    [
        (True, STILL, 21.0, False, None),
        (True, STILL, 201.0, False, ActionFailure.NO_PROGRESS),
        (True, WORKS, 21.0, True, None),
        (False, STILL, 21.0, False, ActionFailure.NO_PROGRESS),
    ],
    ids=["it may still get work", "it never worked", "it works", "it hangs"],
)
def test_of_a_job_that_rolecall_did_not_start_only_work_shows_that_a_replica_serves(
    waiting: bool, progress: tuple[bool, str], waited: float, resolved: bool, failure: ActionFailure | None
) -> None:
    """Its first batch may hang in the phase in which no progress is due."""
    name = "rollout/1"
    target = PlanTarget(replica=ReplicaId(name), incarnation=1, node=NodeId("n"))
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="")
    found = verify(
        plan,
        fleet=FleetView(replicas=(view(name, "n", desired=2),), places=RunPlaces(scheduled=True)),
        progress={name: progress},
        waiting=frozenset({name}) if waiting else frozenset(),
        done_at=100.0,
        now=100.0 + waited,
        verification_timeout_seconds=20.0,
    )
    assert (found.resolved, found.failure) == (resolved, failure)


@pytest.mark.parametrize(
    ("replica", "partner", "waiting", "waited", "failure"),
    [
        ("trainer/1", None, True, 199.0, None),
        ("trainer/1", None, True, 201.0, ActionFailure.NO_PROGRESS),
        ("trainer/1", None, False, 21.0, ActionFailure.NO_PROGRESS),
        ("rollout/1", ReplicaId("trainer/1"), True, 199.0, None),
        ("rollout/1", None, True, 21.0, ActionFailure.NO_PROGRESS),
    ],
)
def test_what_joins_between_two_steps_may_wait_for_the_end_of_a_long_one(
    replica: str, partner: ReplicaId | None, waiting: bool, waited: float, failure: ActionFailure | None
) -> None:
    target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId("n"))
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because="")
    seen = replace(view(replica, "n", desired=2, state=R.READY), partner=partner)
    found = verify(
        plan,
        fleet=FleetView(replicas=(seen,)),
        progress={replica: STILL},
        waiting=frozenset({replica}) if waiting else frozenset(),
        done_at=100.0,
        now=100.0 + waited,
        verification_timeout_seconds=20.0,
    )
    assert (found.resolved, found.failure) == (False, failure)


@pytest.mark.parametrize(("own", "failure"), [(frozenset({"rollout/2"}), None), (frozenset(), ActionFailure.DIED)])
def test_a_healthy_replica_that_has_worked_and_ends_is_not_the_failure_of_a_restart(
    own: frozenset[str], failure: ActionFailure | None
) -> None:
    names = ("rollout/1", "rollout/2")
    targets = tuple(PlanTarget(replica=ReplicaId(n), incarnation=1, node=NodeId("n")) for n in names)
    plan = Plan(incident_id=IncidentId("i"), action=ActionKind.RESTART_ROLE, targets=targets, because="")
    fleet = FleetView(replicas=(view(names[0], "n", desired=2), view(names[1], "n", desired=2, state=R.LOST)))
    progress = {"rollout/1": WORKS, "rollout/2": (False, "its process exited")}
    found = verify(
        plan,
        fleet=fleet,
        progress=progress,
        own_faults=own,
        done_at=100.0,
        now=110.0,
        verification_timeout_seconds=20.0,
    )
    assert (found.resolved, found.failure) == (failure is None, failure)


def test_an_incarnation_that_its_node_could_not_take_did_not_die() -> None:
    plan = Plan(
        incident_id=IncidentId("inc-1"),
        action=ActionKind.REPLACE_REPLICA,
        targets=(PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-4")),),
        because="",
    )
    lost = replace(view("rollout/1", "node-4", desired=2, state=R.LOST), because="not started: node-4 has no raylet")
    found = verify(
        plan,
        fleet=FleetView(replicas=(lost,)),
        progress={},
        done_at=100.0,
        now=101.0,
        verification_timeout_seconds=20.0,
    )
    assert found.failure is ActionFailure.NOT_STARTED
    assert found.because == "rollout/1#2 was not started: node-4 has no raylet"
