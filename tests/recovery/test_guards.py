"""Guards as a table: who holds what, and whether an operator is called."""

from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, PlanTarget
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, RunPlaces
from rolecall.recovery.guards import Situation, check, on_peer_evidence_alone
from rolecall.recovery.incidents import (
    OPERATOR,
    ActionFailure,
    Attempt,
    Incident,
    IncidentOutcome,
    IncidentState,
)
from rolecall.testing.recovery_world import FLEET, diagnosis
from tests.recovery.test_policy import fleet, view

A, F, S = ActionKind, FaultClass, IncidentState
NOW = 100_000.0


def plan(*who: str, action: ActionKind = A.REPLACE_REPLICA, incident: str = "inc-9-x") -> Plan:
    targets = tuple(PlanTarget(replica=ReplicaId(r), incarnation=1, node=NodeId("n")) for r in who)
    return Plan(incident_id=IncidentId(incident), action=action, targets=targets, because="it is so")


def incident(
    name: str, d: Diagnosis, p: Plan, *, state: IncidentState = S.PLANNED, started: float | None = None
) -> Incident:
    attempt = Attempt(
        number=1, plan=p, page_oncall=False, outcome="tolerated", made_at=0.0, started_at=started, done_at=started
    )
    return Incident(
        incident_id=name,
        state=state,
        diagnosis=d,
        opened_at=0.0,
        seen_keys=frozenset({d.key}),
        attempts=(attempt,),
        outcome=IncidentOutcome.RESOLVED if state is S.CLOSED else None,
    )


def past(replica: str, seconds_ago: float, state: IncidentState = S.CLOSED) -> Incident:
    name = f"inc-{replica}-{seconds_ago}"
    return incident(
        name, diagnosis(F.CRASH, (replica, 1)), plan(replica, incident=name), state=state, started=NOW - seconds_ago
    )


def waiting(replica: str, *held_by: str) -> Incident:
    name = f"inc-{replica}-waits"
    found = incident(name, diagnosis(F.CRASH, (replica, 1)), plan(replica, incident=name))
    return replace(found, attempts=(replace(found.attempts[0], held_by=frozenset(held_by)),))


def guarded(
    *who: str,
    d: Diagnosis | None = None,
    others: tuple[Incident, ...] = (),
    view: FleetView | None = None,
    action: ActionKind = A.REPLACE_REPLICA,
    paused: str | None = None,
    stopping: str | None = None,
    **config: Any,
) -> tuple[str, bool]:
    p = plan(*who, action=action)
    this = incident("inc-9-x", d or diagnosis(F.CRASH, *((r, 1) for r in who)), p)
    settings = {"mode": "act", "replicas_at_once_max": 9, "evictions_per_hour_max": 99, "role_share_max": 1.0, **config}
    situation = Situation(
        fleet=view or fleet(),
        config=RecoveryConfig(**settings),
        incidents=(this, *others),
        paused=paused,
        stopping=stopping,
        now=NOW,
    )
    found = check(p, this, situation)
    assert found.because
    assert found.passed is (found.guard == "")
    return found.guard, found.page_oncall


PASS, WAITS, CALLS = ("", False), False, True


def slow(*who: str, **more: Any) -> Diagnosis:
    return diagnosis(F.SLOW, *((r, 1) for r in who), gain_ratio=4.0, **more)


def dead(*who: str) -> FleetView:
    return FleetView(
        replicas=tuple(replace(r, state=ReplicaState.LOST) if r.replica in who else r for r in fleet().replicas)
    )


TABLE: dict[str, tuple[tuple[str, bool], tuple[str, bool]]] = {
    "nothing against it": (guarded("rollout/1"), PASS),
    "observe": (guarded("rollout/1", mode="observe"), ("mode", CALLS)),
    "approve passes here": (guarded("rollout/1", mode="approve"), PASS),
    "paused": (guarded("rollout/1", paused="bob: upgrade"), ("paused", WAITS)),
    "observe comes before pause": (guarded("rollout/1", mode="observe", paused="bob"), ("mode", CALLS)),
    "stopping": (guarded("rollout/1", stopping="user code"), ("stopping", WAITS)),
    "stop job in a pause": (guarded(action=A.STOP_JOB, paused="bob"), ("paused", WAITS)),
    "stop job needs no budget": (guarded(action=A.STOP_JOB, evictions_per_hour_max=0), PASS),
    "incarnation is over": (guarded("rollout/1", view=fleet(rollout_1=2)), ("incarnation", WAITS)),
    "no longer desired": (guarded("rollout/1", view=FleetView(replicas=())), ("incarnation", WAITS)),
    # evictions per hour
    "budget of none": (guarded("rollout/1", evictions_per_hour_max=0), ("evictions", CALLS)),
    "budget left": (guarded("rollout/1", others=(past("reward/0", 10),), evictions_per_hour_max=2), PASS),
    "budget spent": (
        guarded("rollout/1", others=(past("reward/0", 10), past("reward/1", 3599)), evictions_per_hour_max=2),
        ("evictions", CALLS),
    ),
    "budget comes back": (
        guarded("rollout/1", others=(past("reward/0", 10), past("reward/1", 3601)), evictions_per_hour_max=2),
        PASS,
    ),
    "two targets cost two": (guarded("rollout/0", "rollout/1", evictions_per_hour_max=1), ("evictions", CALLS)),
    # retries per replica
    "third time": (
        guarded("rollout/1", others=tuple(past("rollout/1", s) for s in (10, 20)), retries_per_replica_max=3),
        PASS,
    ),
    "fourth time": (
        guarded("rollout/1", others=tuple(past("rollout/1", s) for s in (10, 20, 30)), retries_per_replica_max=3),
        ("retries", CALLS),
    ),
    "others' retries do not count": (
        guarded("rollout/1", others=tuple(past("rollout/0", s) for s in (10, 20, 30)), retries_per_replica_max=3),
        PASS,
    ),
    # at once
    "another is under repair": (
        guarded("rollout/1", others=(past("trainer/0", 10, S.VERIFYING),), replicas_at_once_max=1),
        ("at_once", WAITS),
    ),
    "the controller, without which no other repair ends": (
        guarded("controller/0", others=(past("trainer/0", 10, S.VERIFYING),), replicas_at_once_max=1),
        PASS,
    ),
    "another was repaired": (
        guarded("rollout/1", others=(past("trainer/0", 10, S.CLOSED),), replicas_at_once_max=1),
        PASS,
    ),
    "under repair for hours still counts": (
        guarded("rollout/1", others=(past("trainer/0", 9000, S.ACTING),), replicas_at_once_max=1),
        ("at_once", WAITS),
    ),
    "alone too many": (guarded("rollout/0", "rollout/1", replicas_at_once_max=1), ("at_once", CALLS)),
    "the repair of a standby holds up nobody": (
        guarded("rollout/1", others=(past("standby/0", 10, S.VERIFYING),), replicas_at_once_max=1),
        PASS,
    ),
    "a standby alone": (guarded("standby/0", replicas_at_once_max=1), PASS),
    "a standby waits for the repair of who works": (
        guarded("standby/0", others=(past("trainer/0", 10, S.VERIFYING),), replicas_at_once_max=9),
        ("at_once", WAITS),
    ),
    "a standby waits for who waits for a turn": (
        guarded("standby/0", others=(waiting("trainer/0", "at_once"),), replicas_at_once_max=9),
        ("at_once", WAITS),
    ),
    "a standby does not wait for who needs an operator": (
        guarded("standby/0", others=(waiting("trainer/0", "at_once", "retries"),), replicas_at_once_max=9),
        PASS,
    ),
    # share of a role
    "one replica is always allowed": (guarded("controller/0", role_share_max=0.0), PASS),
    "half of two": (
        guarded("trainer/1", others=(past("trainer/0", 10, S.VERIFYING),), role_share_max=0.5),
        ("role_share", WAITS),
    ),
    "another role": (guarded("trainer/1", others=(past("reward/0", 10, S.VERIFYING),), role_share_max=0.5), PASS),
    "a group beyond the share": (guarded("rollout/0", "rollout/1", role_share_max=0.5), ("role_share", CALLS)),
    # peer evidence
    "slow, one of three": (guarded("rollout/1", d=slow("rollout/1")), PASS),
    "slow, two of three": (guarded("rollout/0", "rollout/1", d=slow("rollout/0", "rollout/1")), ("majority", CALLS)),
    "slow, the second of three": (
        guarded(
            "rollout/1",
            d=slow("rollout/1"),
            others=(incident("inc-8", slow("rollout/0"), plan("rollout/0", incident="inc-8")),),
        ),
        ("majority", CALLS),
    ),
    "slow, the others are dead": (
        guarded("rollout/1", d=slow("rollout/1"), view=dead("rollout/0", "rollout/2")),
        ("last_living", CALLS),
    ),
    "crashed, the others are dead": (guarded("rollout/1", view=dead("rollout/0", "rollout/2")), PASS),
    "slow against itself, alone": (
        guarded(
            "rollout/1",
            d=slow("rollout/1", evidence=(Evidence(kind="seconds_per_unit", text="", values={"peers": 0.0}),)),
            view=dead("rollout/0", "rollout/2"),
        ),
        PASS,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_guards(name: str) -> None:
    got, wanted = TABLE[name]
    assert got == wanted


RESTART = incident(
    "inc-1-job",
    diagnosis(F.CRASH, ("trainer/0", 1)),
    plan(*FLEET, action=A.RESTART_JOB, incident="inc-1-job"),
    state=S.VERIFYING,
    started=NOW - 10,
)


@pytest.mark.parametrize(
    ("others", "settings", "wanted"),
    [
        ((), {"replicas_at_once_max": 1, "role_share_max": 0.0}, PASS),
        ((past("reward/0", 10, S.VERIFYING),), {}, ("at_once", WAITS)),
        ((past("reward/0", 10),), {}, PASS),
        ((), {"evictions_per_hour_max": 0}, ("evictions", CALLS)),
        ((), {"evictions_per_hour_max": 1}, PASS),
        (tuple(past("trainer/0", n) for n in (10, 20, 30)), {"retries_per_replica_max": 3}, PASS),
        (tuple(past("trainer/0", n) for n in (10, 20, 30)), {"scope": "job"}, ("retries", CALLS)),
        (tuple(past("trainer/0", n) for n in (10, 20)), {"scope": "job"}, PASS),
        (tuple(past("trainer/1", n) for n in (10, 20, 30)), {"scope": "job"}, PASS),
        ((), {"mode": "approve"}, PASS),
        ((), {"paused": "bob"}, ("paused", WAITS)),
    ],
)
def test_a_restart_has_the_budget_of_the_replica_at_fault_and_waits_for_other_repairs(
    others: tuple[Incident, ...], settings: dict[str, Any], wanted: tuple[str, bool]
) -> None:
    d = diagnosis(F.CRASH, ("trainer/0", 1))
    assert guarded(*FLEET, d=d, others=others, action=A.RESTART_JOB, **settings) == wanted


def test_a_restart_blocks_other_repairs_and_costs_one_eviction() -> None:
    assert guarded("rollout/1", others=(RESTART,), replicas_at_once_max=2) == ("at_once", WAITS)
    done = replace(RESTART, state=S.CLOSED)
    assert guarded("rollout/1", others=(done,), evictions_per_hour_max=2, retries_per_replica_max=1) == PASS
    assert guarded("rollout/1", others=(done,), evictions_per_hour_max=1) == ("evictions", CALLS)


def test_a_restart_takes_healthy_replicas_as_they_are_now_but_not_the_one_at_fault() -> None:
    d = diagnosis(F.CRASH, ("trainer/0", 1))
    assert guarded(*FLEET, d=d, action=A.RESTART_JOB, view=fleet(rollout_1=2)) == PASS
    assert guarded(*FLEET, d=d, action=A.RESTART_JOB, view=fleet(trainer_0=2)) == ("incarnation", WAITS)


def test_a_retry_of_the_same_incident_is_not_under_repair_beside_itself() -> None:
    first = past("rollout/1", 10, S.PLANNED)
    tried = replace(first, attempts=(replace(first.attempts[0], failure=ActionFailure.DIED),))
    assert guarded("rollout/1", others=(tried,), replicas_at_once_max=1) == PASS


@pytest.mark.parametrize(
    ("d", "alone"),
    [
        (slow("rollout/1"), True),
        (slow("rollout/1", evidence=(Evidence(kind="seconds_per_unit", text="", values={"peers": 2.0}),)), True),
        (slow("rollout/1", evidence=(Evidence(kind="self_history", text=""),)), False),
        (slow("rollout/1", detectors=(OPERATOR,)), False),
        (diagnosis(F.HANG, ("rollout/1", 1)), False),
    ],
)
def test_peer_evidence(d: Diagnosis, alone: bool) -> None:
    assert on_peer_evidence_alone(d) is alone


def restarted(*, scheduled: bool = True, stopped: str = "") -> FleetView:
    """Eight rollouts, and the names of the 24 that ran on other nodes before restarts of the job. `stopped`: of the
    eight, one that has ended, too."""
    live = [view(f"rollout/{n}", f"node-{n}") for n in range(8)]
    old = [view(f"rollout/{n}", f"node-{n}", state=ReplicaState.STOPPED) for n in range(8, 32)]
    now = (replace(r, state=ReplicaState.STOPPED) if r.replica == stopped else r for r in live)
    return FleetView(replicas=(*now, *old), places=RunPlaces(scheduled=scheduled))


FOUR = tuple(f"rollout/{n}" for n in range(4))
FIVE = (*FOUR, "rollout/4")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (guarded(*FOUR, view=restarted(), role_share_max=0.5), PASS),
        (guarded(*FIVE, view=restarted(), role_share_max=0.5), ("role_share", CALLS)),
        (guarded(*FIVE, d=slow(*FIVE), view=restarted()), ("majority", CALLS)),
        (guarded(*FIVE, view=restarted(scheduled=False), role_share_max=0.5), PASS),
        # One that has ended and is under repair is a member as before.
        (
            guarded(
                *FOUR[1:],
                view=restarted(stopped=FOUR[0]),
                others=(past(FOUR[0], 10, S.VERIFYING),),
                role_share_max=0.5,
            ),
            PASS,
        ),
    ],
)
def test_replicas_that_ended_long_ago_make_no_role_larger(found: tuple[str, bool], expected: tuple[str, bool]) -> None:
    """Nobody says in a job of another scheduler that a replica is no longer wanted."""
    assert found == expected


def with_it(
    *also: str, target: str = "rollout/1", others: tuple[Incident, ...] = (), **config: Any
) -> tuple[str, bool]:
    """The guards of a plan for `target` that also ends `also`."""
    ends = tuple(PlanTarget(replica=ReplicaId(r), incarnation=1, node=NodeId("n")) for r in also)
    p = replace(plan(target), also_ends=ends)
    this = incident("inc-9-x", diagnosis(F.CRASH, (target, 1)), p)
    settings = {"mode": "act", "replicas_at_once_max": 9, "evictions_per_hour_max": 99, "role_share_max": 1.0, **config}
    situation = Situation(
        fleet=fleet(), config=RecoveryConfig(**settings), incidents=(this, *others), now=NOW, paused=None
    )
    found = check(p, this, situation)
    assert found.passed or any(r in found.because for r in also)
    return found.guard, found.page_oncall


@pytest.mark.parametrize(
    ("also", "settings", "wanted"),
    [
        ((), {"evictions_per_hour_max": 1, "replicas_at_once_max": 1}, PASS),
        (("reward/0",), {}, PASS),
        (("reward/0",), {"evictions_per_hour_max": 1}, ("evictions", CALLS)),
        (("reward/0",), {"evictions_per_hour_max": 2}, PASS),
        (("reward/0",), {"replicas_at_once_max": 1}, ("at_once", CALLS)),
        (("reward/0",), {"replicas_at_once_max": 2}, PASS),
        (("rollout/0",), {"role_share_max": 0.5}, ("role_share", CALLS)),
        (("reward/0",), {"role_share_max": 0.5}, PASS),
        (("rollout/0",), {"rollouts_min": 1}, PASS),
        (("rollout/0",), {"rollouts_min": 2}, ("minimum", CALLS)),
        (("rollout/0", "rollout/2"), {}, ("minimum", CALLS)),
        (("reward/0",), {"rollouts_min": 3}, PASS),
    ],
)
def test_what_ends_with_a_replica_counts_against_every_limit(
    also: tuple[str, ...], settings: dict[str, Any], wanted: tuple[str, bool]
) -> None:
    assert with_it(*also, **settings) == wanted


def test_what_ended_with_another_replica_was_evicted_but_not_replaced_for_a_fault() -> None:
    before = past("reward/0", 10)
    ended = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("n"))
    attempt = before.attempts[0]
    before = replace(before, attempts=(replace(attempt, plan=replace(attempt.plan, also_ends=(ended,))),))
    assert guarded("rollout/1", others=(before,), evictions_per_hour_max=2) == ("evictions", CALLS)
    assert guarded("rollout/1", others=(before,), evictions_per_hour_max=3, retries_per_replica_max=1) == PASS
    assert guarded("rollout/1", others=(replace(before, state=S.ACTING),), replicas_at_once_max=2) == PASS
    assert guarded("rollout/0", others=(replace(before, state=S.ACTING),), replicas_at_once_max=2) == ("at_once", WAITS)


def test_on_peer_comparison_alone_a_peer_must_remain_that_does_not_end_with_the_suspect() -> None:
    ends = tuple(PlanTarget(replica=ReplicaId(r), incarnation=1, node=NodeId("n")) for r in ("reward/0",))
    p = replace(plan("reward/1"), also_ends=ends)
    this = incident("inc-9-x", slow("reward/1"), p)
    config = RecoveryConfig(mode="act", replicas_at_once_max=9, evictions_per_hour_max=99, role_share_max=1.0)
    found = check(p, this, Situation(fleet=fleet(), config=config, incidents=(this,), now=NOW))
    assert found.guard == "last_living"
