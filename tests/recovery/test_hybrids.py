"""Hybrids, each a trainer and a rollout on one machine: replaced together, on one node, and counted as one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.payloads.recovery import NodeQuarantined
from rolecall.core.journal.payloads.run import RunStarted
from rolecall.core.membership import Desired, ReplicaState, hybrid_partner
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.fleet_view import FleetView, ReplicaView, fleet_of, fleet_view
from rolecall.recovery.guards import Situation, check
from rolecall.recovery.incidents import ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide, question
from rolecall.testing.recovery_world import diagnosis
from tests.recovery.world import World

A, F = ActionKind, FaultClass
ALL = frozenset({A.REPLACE_REPLICA, A.REPLACE_NODE, A.RESTART_ROLE, A.RESTART_JOB, A.STOP_JOB})
NODES = {"controller/0": 0, "reward/0": 0, "trainer/0": 1, "trainer/1": 2, "trainer/2": 3}
NODES |= {"rollout/0": 1, "rollout/1": 2, "rollout/2": 3, "rollout/3": 4, "rollout/4": 5, "standby/0": 6}
PAIR = ["rollout/1", "trainer/1"]
HYBRIDS = [r for r in sorted(NODES) if r.startswith(("trainer", "rollout")) and NODES[r] <= 3]


def fleet(hybrids: int = 3, **desired: int) -> FleetView:
    """Of mode semi_sync with three hybrids. `rollout_1=2`: its incarnation."""
    at = {name.replace("_", "/"): n for name, n in desired.items()}
    rows = []
    for replica, node in sorted(NODES.items()):
        number, partner = at.get(replica, 1), hybrid_partner(replica, hybrids)
        state = ReplicaState.READY if replica == "standby/0" else ReplicaState.SERVING
        rows.append(
            ReplicaView(
                replica=ReplicaId(replica), desired_incarnation=number, incarnation=number, state=state,
                node=NodeId(f"node-{node}"), started=True, partner=partner,
            )
        )  # fmt: skip
    return FleetView(replicas=tuple(rows))


def suspected(fault: FaultClass, replica: str, incarnation: int = 1, **more: Any) -> Diagnosis:
    """On the replica's own node."""
    found = diagnosis(fault, (replica, incarnation), **more)
    (suspect,) = found.suspects
    return replace(found, suspects=(replace(suspect, node=NodeId(f"node-{NODES[replica]}")),))


def ask(d: Diagnosis, *past: FailedAttempt, view: FleetView | None = None, **more: Any) -> PolicyInput:
    config = RecoveryConfig(mode="act", **more.pop("config", {}))
    name = IncidentId("inc-1-x")
    return PolicyInput(
        incident_id=name, diagnosis=d, fleet=view or fleet(), config=config, past=past, supports=ALL, **more
    )


def names(plan: Plan) -> list[str]:
    return [str(t.replica) for t in plan.targets]


@pytest.mark.parametrize("fault", [F.CRASH, F.HANG, F.WRONG_WEIGHTS, F.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize("replica", PAIR)
def test_a_fault_of_either_replica_of_a_hybrid_replaces_both(replica: str, fault: FaultClass) -> None:
    asked = ask(suspected(fault, replica))
    verdict = decide(asked)
    assert verdict.plan.action is A.REPLACE_REPLICA and names(verdict.plan) == PAIR
    assert {t.node for t in verdict.plan.targets} == {"node-2"}
    assert verdict.plan.because.endswith("trainer/1 and rollout/1 share a machine and are replaced together")
    assert decide(PolicyInput.from_dict(asked.to_dict())) == verdict


@pytest.mark.parametrize("replica", ["rollout/3", "standby/0", "controller/0"])
def test_a_fault_of_any_other_replica_replaces_that_one_only(replica: str) -> None:
    verdict = decide(ask(suspected(F.CRASH, replica)))
    assert names(verdict.plan) == [replica] and "share a machine" not in verdict.plan.because


def test_without_hybrids_trainer_and_rollout_are_replaced_one_by_one() -> None:
    assert names(decide(ask(suspected(F.CRASH, "rollout/1"), view=fleet(hybrids=0))).plan) == ["rollout/1"]


def test_the_second_diagnosis_of_a_lost_machine_finds_its_replica_replaced() -> None:
    verdict = decide(ask(suspected(F.CRASH, "trainer/1"), view=fleet(trainer_1=2, rollout_1=2)))
    assert verdict.plan.action is A.TOLERATE and verdict.outcome is IncidentOutcome.SELF_RECOVERED


def test_replicas_of_a_hybrid_may_have_different_incarnations() -> None:
    """As of a run that was continued."""
    verdict = decide(ask(suspected(F.CRASH, "rollout/1", 2), view=fleet(trainer_1=5, rollout_1=2)))
    assert [(str(t.replica), t.incarnation) for t in verdict.plan.targets] == [("rollout/1", 2), ("trainer/1", 5)]


def test_a_slow_hybrid_is_replaced_as_a_whole_if_that_pays() -> None:
    slow = suspected(F.SLOW, "rollout/1", gain_ratio=4.0)
    assert names(decide(ask(slow, config={"horizon_seconds": 3600.0})).plan) == PAIR
    assert decide(ask(slow, config={"horizon_seconds": 30.0})).plan.action is A.TOLERATE


def test_what_was_stored_before_there_were_hybrids_decides_the_same() -> None:
    asked = ask(suspected(F.CRASH, "rollout/1"), view=fleet(hybrids=0))
    stored = asked.to_dict()
    assert all("partner" not in row for row in stored["fleet"]["replicas"])
    assert PolicyInput.from_dict(stored) == asked


# --- the three rules of escalation

DIED = ActionFailure.DIED


def attempt(number: int, failure: ActionFailure = DIED, action: ActionKind = A.REPLACE_REPLICA) -> FailedAttempt:
    targets = tuple(PlanTarget(replica=ReplicaId(r), incarnation=number, node=NodeId("node-2")) for r in PAIR)
    return FailedAttempt(failure=failure, action=action, targets=targets, because=f"attempt {number} {failure}")


def after(*past: FailedAttempt, **more: Any) -> Plan:
    number = len(past) + 1
    view = fleet(trainer_1=number, rollout_1=number)
    if past and past[-1].failure is DIED:  # of the two replacements the engine's died
        rows = [replace(r, state=ReplicaState.LOST) if r.replica == "rollout/1" else r for r in view.replicas]
        view = FleetView(replicas=tuple(rows))
    return decide(ask(suspected(F.CRASH, "rollout/1"), *past, view=view, **more)).plan


def test_rule_first_iteration_one_failed_replacement_is_tolerated_and_the_second_restarts_all_hybrids() -> None:
    once = after(attempt(1))
    assert once.action is A.REPLACE_REPLICA and names(once) == PAIR, "both, though only the engine died"
    assert [t.incarnation for t in once.targets] == [2, 2]
    twice = after(attempt(1), attempt(2))
    assert twice.action is A.RESTART_ROLE and names(twice) == HYBRIDS, "other rollouts are not part of it"


def resolved(replica: str, verified_seq: int) -> Incident:
    plan = Plan(
        incident_id=IncidentId(f"inc-{replica}"), action=A.REPLACE_REPLICA, because="x",
        targets=tuple(PlanTarget(replica=ReplicaId(r), incarnation=1, node=NodeId("node-2")) for r in PAIR),
    )  # fmt: skip
    made = Attempt(
        number=1, plan=plan, page_oncall=False, outcome="tolerated", made_at=0.0, started_at=1.0, done_at=2.0
    )
    return Incident(
        incident_id=f"inc-{replica}", state=IncidentState.CLOSED, diagnosis=suspected(F.CRASH, replica), opened_at=0.0,
        seen_keys=frozenset(), attempts=(made,), outcome=IncidentOutcome.RESOLVED, verified_seq=verified_seq,
    )  # fmt: skip


@pytest.mark.parametrize(("committed_seq", "action"), [(5, A.RESTART_ROLE), (20, A.REPLACE_REPLICA)])
def test_rule_same_step_a_failure_of_the_partner_counts(committed_seq: int, action: ActionKind) -> None:
    before = resolved("rollout/1", verified_seq=10)
    now = Incident(
        incident_id="inc-2", state=IncidentState.OPEN, diagnosis=suspected(F.CRASH, "trainer/1", 2), opened_at=30.0,
        opened_seq=30, seen_keys=frozenset(),
    )  # fmt: skip
    asked = question(
        now, [before, now], fleet=fleet(trainer_1=2, rollout_1=2), config=RecoveryConfig(mode="act"), supports=ALL,
        committed_seq=committed_seq,
    )  # fmt: skip
    plan = decide(asked).plan
    assert plan.action is action and names(plan) == (HYBRIDS if action is A.RESTART_ROLE else PAIR)


def test_rule_beyond_the_role_a_restart_that_does_not_help_restarts_the_job() -> None:
    plan = after(attempt(1), attempt(2), attempt(3, ActionFailure.NO_PROGRESS, A.RESTART_ROLE))
    assert plan.action is A.RESTART_JOB and names(plan) == [r for r in sorted(NODES) if r != "standby/0"]


def test_a_role_of_one_hybrid_is_restarted_with_the_job() -> None:
    rows = [r for r in fleet().replicas if r.replica[-1] not in "02" or r.role in ("controller", "reward")]
    single = FleetView(replicas=tuple(rows))
    plan = decide(ask(suspected(F.CRASH, "rollout/1"), view=single, same_step=frozenset({A.REPLACE_REPLICA}))).plan
    assert plan.action is A.RESTART_JOB


def test_other_rollouts_are_restarted_without_the_hybrids() -> None:
    asked = ask(suspected(F.CRASH, "rollout/3"), same_step=frozenset({A.REPLACE_REPLICA}))
    plan = decide(asked).plan
    assert plan.action is A.RESTART_ROLE and names(plan) == ["rollout/3", "rollout/4"]


# --- borrowed nodes


def test_a_hybrid_that_must_leave_its_node_borrows_one_for_both() -> None:
    plan = decide(ask(suspected(F.GPU, "rollout/1"))).plan
    assert plan.action is A.REPLACE_NODE and names(plan) == PAIR
    assert [str(t.replica) for t in plan.lent] == ["standby/0"], "one node, and never that of another hybrid"


# --- guards


def held(view: FleetView, *others: Incident, **config: Any) -> str:
    verdict = decide(ask(suspected(F.CRASH, "rollout/1"), view=view))
    mine = Incident(
        incident_id="inc-1-x", state=IncidentState.PLANNED, diagnosis=suspected(F.CRASH, "rollout/1"), opened_at=99.0,
        seen_keys=frozenset(),
    )  # fmt: skip
    settings = RecoveryConfig(mode="act", **config)
    situation = Situation(now=100.0, fleet=view, config=settings, incidents=[mine, *others])
    return check(verdict.plan, mine, situation).guard


def test_a_hybrid_counts_as_one_replacement() -> None:
    assert held(fleet(), replicas_at_once_max=1) == ""
    assert held(fleet(), evictions_per_hour_max=1) == ""
    assert held(fleet(), resolved("rollout/1", 10.0), evictions_per_hour_max=1) == "evictions"
    assert held(fleet(), resolved("rollout/1", 10.0), evictions_per_hour_max=2) == ""


# --- records


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    roles = {"trainer": 2, "rollout": 3}
    started = RunStarted(seed=0, config_digest="", roles=roles, nodes=("node-0",), mode="semi_sync")
    made.journal.append(started, key="run-started")
    return made


def performed(world: World, action: ActionKind, *nodes: str) -> dict[str, Desired]:
    targets = tuple(
        PlanTarget(replica=ReplicaId(r), incarnation=1, node=NodeId(n)) for r, n in zip(PAIR, nodes, strict=True)
    )
    lease = world.journal.acquire("watch", "me", 5.0)
    assert lease is not None
    plan = Plan(incident_id=IncidentId("inc-1-x"), action=action, targets=targets, because="x")
    actuator = RayRuntime(world.journal)
    assert actuator.also_hit(plan) == ()
    assert actuator.perform(plan, lease).done
    return {r: world.journal.desired()[ReplicaId(r)] for r in PAIR}


def test_the_journal_says_which_replicas_are_hybrids(world: World) -> None:
    partners = {r.replica: r.partner for r in fleet_of(world.journal).replicas if r.partner}
    assert partners == {
        "rollout/0": "trainer/0", "trainer/0": "rollout/0", "rollout/1": "trainer/1", "trainer/1": "rollout/1",
    }  # fmt: skip
    unknown = fleet_view(world.journal.desired(), world.journal.current())
    assert not any(r.partner for r in unknown.replicas), "of an older journal"


@pytest.mark.parametrize("action", [A.REPLACE_REPLICA, A.REPLACE_NODE])
def test_both_replicas_of_a_hybrid_start_anew_on_one_node(world: World, action: ActionKind) -> None:
    records = performed(world, action, "node-2", "node-2")
    assert {r.incarnation for r in records.values()} == {2}
    (node,) = {r.node for r in records.values()}
    assert (node == "node-2") is (action is A.REPLACE_REPLICA)
    assert not any(r.prefer_standby for r in records.values()), "a standby is elsewhere"


def test_a_hybrid_on_a_quarantined_node_moves_together_also_after_a_death_between_the_writes(world: World) -> None:
    world.journal.append(NodeQuarantined(node="node-2", by="ann", because="x"))
    lease = world.journal.acquire("watch", "me", 5.0)
    assert lease is not None
    first = Desired(
        replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("node-5"), fence=lease.fence, because="x",
        incident_id="inc-1-x", prefer_standby=False,
    )  # fmt: skip
    world.journal.set_desired(first, expect_incarnation=1, lease=lease)
    records = performed(world, A.REPLACE_REPLICA, "node-2", "node-2")
    assert {r.node for r in records.values()} == {"node-5"}
