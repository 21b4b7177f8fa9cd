"""Policy as a table: diagnosis and past in, action and reason out."""

from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, PlanTarget, Suspect
from rolecall.core.faults import FAULTS, FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.incidents import OPERATOR, ActionFailure, IncidentOutcome
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide, slow_gain
from rolecall.testing.recovery_world import FLEET, diagnosis

A, F = ActionKind, FaultClass
SUPPORTS = frozenset({A.REPLACE_REPLICA, A.REPLACE_NODE, A.STOP_JOB})


def view(
    replica: str, node: str, *, desired: int = 1, state: ReplicaState | None = ReplicaState.SERVING
) -> ReplicaView:
    return ReplicaView(
        replica=ReplicaId(replica), desired_incarnation=desired, incarnation=desired, state=state, node=NodeId(node)
    )


def fleet(**desired: int) -> FleetView:
    """`rollout_1=3`: rollout/1 is at its third incarnation."""
    at = {name.replace("_", "/"): n for name, n in desired.items()}
    rows = [view(r, f"node-{n}", desired=at.get(r, 1)) for n, r in enumerate(FLEET)]
    return FleetView(replicas=(*rows, view("standby/0", "node-9")))


def ask(d: Diagnosis, *past: FailedAttempt, view: FleetView | None = None, **config: Any) -> PolicyInput:
    supports = config.pop("supports", SUPPORTS)
    lost_nodes = config.pop("lost_nodes", frozenset())
    return PolicyInput(
        incident_id=IncidentId("inc-1-x"),
        diagnosis=d,
        fleet=view or fleet(),
        config=RecoveryConfig(**{"mode": "act", **config}),
        past=past,
        supports=supports,
        lost_nodes=lost_nodes,
    )


def failed(failure: ActionFailure, incarnation: int = 1, replica: str = "rollout/1") -> FailedAttempt:
    target = PlanTarget(replica=ReplicaId(replica), incarnation=incarnation, node=NodeId("node-4"))
    return FailedAttempt(failure=failure, action=A.REPLACE_REPLICA, targets=(target,), because=f"{replica} {failure}")


ONE = ("rollout/1", 1)
TABLE: dict[str, tuple[PolicyInput, ActionKind, tuple[str, ...], bool, str]] = {
    # name: question, action, targets, is an operator called, words in because
    "crash": (ask(diagnosis(F.CRASH, ONE)), A.REPLACE_REPLICA, ("rollout/1#1",), False, "rollout/1#1: crash"),
    "hang": (ask(diagnosis(F.HANG, ("trainer/0", 1))), A.REPLACE_REPLICA, ("trainer/0#1",), False, "hang"),
    "out of memory": (ask(diagnosis(F.RESOURCE_EXHAUSTED, ONE)), A.REPLACE_REPLICA, ("rollout/1#1",), False, ""),
    "wrong weights": (ask(diagnosis(F.WRONG_WEIGHTS, ONE)), A.REPLACE_REPLICA, ("rollout/1#1",), False, ""),
    "a group": (
        ask(diagnosis(F.HANG, ("trainer/1", 1), ("trainer/0", 1))),
        A.REPLACE_REPLICA,
        ("trainer/0#1", "trainer/1#1"),
        False,
        "",
    ),
    "controller": (ask(diagnosis(F.CRASH, ("controller/0", 1))), A.REPLACE_REPLICA, ("controller/0#1",), False, ""),
    "slow, worth it": (
        ask(diagnosis(F.SLOW, ONE, gain_ratio=4.0), horizon_seconds=3600.0),
        A.REPLACE_REPLICA,
        ("rollout/1#1",),
        False,
        "3600 s x (1 - 1/4.00) = 2700 s of its work for 30 s of cost",
    ),
    "slow, not worth it": (
        ask(diagnosis(F.SLOW, ONE, gain_ratio=1.5), horizon_seconds=60.0),
        A.TOLERATE,
        (),
        False,
        "60 s x (1 - 1/1.50) = 20 s of its work, less than the 30 s it costs",
    ),
    "slow, no horizon": (ask(diagnosis(F.SLOW, ONE, gain_ratio=9.0)), A.TOLERATE, (), False, "no horizon is set"),
    "slow, not measured": (
        ask(diagnosis(F.SLOW, ONE), horizon_seconds=3600.0),
        A.TOLERATE,
        (),
        False,
        "was not measured",
    ),
    "user code": (
        ask(diagnosis(F.USER_CODE, ("trainer/0", 1), ("trainer/1", 1))),
        A.STOP_JOB,
        (),
        True,
        "no replica is evicted",
    ),
    "user code, cannot stop": (
        ask(diagnosis(F.USER_CODE, ONE), supports=frozenset({A.REPLACE_REPLICA})),
        A.TOLERATE,
        (),
        True,
        "this actuator cannot stop it",
    ),
    "cannot tell": (
        ask(diagnosis(F.CANNOT_TELL, ONE, settle="a stack of both")),
        A.TOLERATE,
        (),
        True,
        "to settle it: a stack of both",
    ),
    "control plane": (ask(diagnosis(F.CONTROL_PLANE, ONE)), A.TOLERATE, (), True, "no known action resolves"),
    "data": (ask(diagnosis(F.DATA, ONE)), A.TOLERATE, (), True, "no known action resolves"),
    "node without a replica": (
        ask(replace(diagnosis(F.NODE_LOST), suspects=(Suspect(node=NodeId("node-3")),))),
        A.TOLERATE,
        (),
        True,
        "names node-3 but no replica",
    ),
    "gpu": (ask(diagnosis(F.GPU, ONE)), A.REPLACE_NODE, ("rollout/1#1",), False, ""),
    "network": (ask(diagnosis(F.NETWORK, ONE)), A.REPLACE_NODE, ("rollout/1#1",), False, ""),
    "gpu, one node only": (
        ask(diagnosis(F.GPU, ONE), view=FleetView(replicas=(view("rollout/1", "node-rollout-1"),))),
        A.TOLERATE,
        (),
        True,
        "no other node",
    ),
    "gpu, cannot move": (
        ask(diagnosis(F.GPU, ONE), supports=frozenset({A.REPLACE_REPLICA})),
        A.TOLERATE,
        (),
        True,
        "cannot perform what is needed: replace node",
    ),
    "crash on a lost node": (
        ask(diagnosis(F.CRASH, ONE), lost_nodes=frozenset({"node-rollout-1"})),
        A.REPLACE_NODE,
        ("rollout/1#1",),
        False,
        "",
    ),
    "old incarnation": (
        ask(diagnosis(F.CRASH, ONE), view=fleet(rollout_1=2)),
        A.TOLERATE,
        (),
        False,
        "already replaced",
    ),
    "incarnation of the future": (
        ask(diagnosis(F.CRASH, ("rollout/1", 5))),
        A.TOLERATE,
        (),
        True,
        "the newest incarnation is",
    ),
    "unknown incarnation": (
        ask(replace(diagnosis(F.CRASH), suspects=(Suspect(node=NodeId("n"), replica="rollout/1"),))),
        A.TOLERATE,
        (),
        True,
        "does not name the incarnation",
    ),
    "stranger": (ask(diagnosis(F.CRASH, ("rollout/7", 1))), A.TOLERATE, (), True, "not part of this run"),
    "an operator asks": (
        ask(diagnosis(F.CANNOT_TELL, ONE, detectors=(OPERATOR,))),
        A.REPLACE_REPLICA,
        ("rollout/1#1",),
        False,
        "",
    ),
    "second attempt": (
        ask(diagnosis(F.CRASH, ONE), failed(ActionFailure.DIED), view=fleet(rollout_1=2)),
        A.REPLACE_REPLICA,
        ("rollout/1#2",),
        False,
        "attempt 2: rollout/1 died",
    ),
    "slow, second attempt weighs no more": (
        ask(diagnosis(F.SLOW, ONE), failed(ActionFailure.DIED), view=fleet(rollout_1=2)),
        A.REPLACE_REPLICA,
        ("rollout/1#2",),
        False,
        "attempt 2",
    ),
    "twice on first start": (
        ask(
            diagnosis(F.CRASH, ONE), failed(ActionFailure.DIED), failed(ActionFailure.DIED, 2), view=fleet(rollout_1=3)
        ),
        A.TOLERATE,
        (),
        True,
        "the software that is started is at fault, not the machine",
    ),
    "no progress, elsewhere": (
        ask(diagnosis(F.CRASH, ONE), failed(ActionFailure.NO_PROGRESS), view=fleet(rollout_1=2)),
        A.REPLACE_NODE,
        ("rollout/1#2",),
        False,
        "attempt 2",
    ),
    "no progress, nowhere else": (
        ask(
            diagnosis(F.CRASH, ONE),
            failed(ActionFailure.NO_PROGRESS),
            view=FleetView(replicas=(view("rollout/1", "node-4", desired=2),)),
        ),
        A.REPLACE_REPLICA,
        ("rollout/1#2",),
        False,
        "attempt 2",
    ),
    "attempts used up": (
        ask(
            diagnosis(F.CRASH, ONE),
            failed(ActionFailure.NO_PROGRESS),
            failed(ActionFailure.NO_PROGRESS, 2),
            view=fleet(rollout_1=3),
            retries_per_replica_max=2,
        ),
        A.TOLERATE,
        (),
        True,
        "2 attempts failed",
    ),
    "a microbatch that was not finite once": (
        ask(replace(diagnosis(F.SILENT_CORRUPTION, ONE), detectors=("wrong_numbers_once",))),
        A.TOLERATE,
        (),
        False,
        "a single occurrence is tolerated",
    ),
    "several microbatches that were not finite": (
        ask(replace(diagnosis(F.SILENT_CORRUPTION, ONE), detectors=("wrong_numbers",))),
        A.REPLACE_NODE,
        ("rollout/1#1",),
        False,
        "rollout/1#1: silent_corruption",
    ),
    "data that is not finite anywhere": (
        ask(replace(diagnosis(F.DATA), detectors=("wrong_numbers",))),
        A.TOLERATE,
        (),
        True,
        "no known action resolves it",
    ),
    "refused": (
        ask(diagnosis(F.CRASH, ONE), failed(ActionFailure.REFUSED)),
        A.TOLERATE,
        (),
        True,
        "could not be performed",
    ),
    "replaced by somebody after our attempt": (
        ask(diagnosis(F.CRASH, ONE), failed(ActionFailure.DIED), view=fleet(rollout_1=5)),
        A.TOLERATE,
        (),
        False,
        "already replaced",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_decide(name: str) -> None:
    question, action, targets, person, words = TABLE[name]
    verdict = decide(question)
    assert verdict.plan.action is action
    assert tuple(f"{t.replica}#{t.incarnation}" for t in verdict.plan.targets) == targets
    assert verdict.page_oncall is person
    assert words in verdict.plan.because and verdict.plan.because
    assert decide(PolicyInput.from_dict(question.to_dict())) == verdict, "what is stored decides the same"


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_class_has_an_answer(fault: FaultClass) -> None:
    verdict = decide(ask(diagnosis(fault, ONE)))
    assert verdict.plan.because
    replaced = {str(t.replica) for t in verdict.plan.targets}
    assert replaced <= {"rollout/1"}, "a replica that the diagnosis does not name was replaced"


def test_of_several_replacements_only_the_dead_are_made_again() -> None:
    two = fleet(trainer_0=2, trainer_1=2)
    dead = tuple(replace(r, state=ReplicaState.LOST) if r.replica == "trainer/1" else r for r in two.replicas)
    past = FailedAttempt(
        failure=ActionFailure.DIED,
        action=A.REPLACE_REPLICA,
        targets=tuple(PlanTarget(replica=ReplicaId(f"trainer/{n}"), incarnation=1, node=NodeId("n")) for n in (0, 1)),
        because="trainer/1#2 ended",
    )
    verdict = decide(ask(diagnosis(F.HANG, ("trainer/0", 1), ("trainer/1", 1)), past, view=FleetView(replicas=dead)))
    assert [f"{t.replica}#{t.incarnation}" for t in verdict.plan.targets] == ["trainer/1#2"]


NOTHING: frozenset[ActionKind] = frozenset()
UNKNOWN = FleetView(replicas=())


@pytest.mark.parametrize(
    ("d", "todo", "paged"),
    [
        (diagnosis(F.HANG, ("trainer/1", 0)), "read the stack of trainer/1 on node-trainer-1", True),
        (diagnosis(F.CRASH, ("trainer/1", 2)), "read the log of trainer/1 on node-trainer-1", True),
        (diagnosis(F.GPU, ONE), "restart the job without node-rollout-1", True),
        (replace(diagnosis(F.USER_CODE), about="trainer:ValueError:f1"), "stop the job and fix the code", True),
        (diagnosis(F.SLOW, ONE, gain_ratio=4.0), "see what else runs on node-rollout-1", False),
        (replace(diagnosis(F.GPU), suspects=(Suspect(node=NodeId("node-3")),)), "restart the job without node-3", True),
    ],
)
def test_for_a_job_that_is_only_watched_the_plan_is_what_the_engineer_can_do(
    d: Diagnosis, todo: str, paged: bool
) -> None:
    verdict = decide(ask(d, view=UNKNOWN, supports=NOTHING))
    assert verdict.plan.action is A.TOLERATE and verdict.page_oncall is paged
    assert verdict.plan.because.startswith(f"rolecall only watches this job: {todo}")


def test_giving_up_is_reported_from_tolerating() -> None:
    assert decide(TABLE["twice on first start"][0]).outcome is IncidentOutcome.ESCALATED
    assert decide(TABLE["slow, no horizon"][0]).outcome is IncidentOutcome.TOLERATED
    assert decide(TABLE["old incarnation"][0]).outcome is IncidentOutcome.SELF_RECOVERED


@pytest.mark.parametrize(
    ("ratio", "horizon", "cost", "worth"),
    [
        (4.0, 3600.0, 30.0, True),
        (4.0, 40.0, 30.0, False),  # 40 x 0.75 = 30: a tie is not worth the risk
        (4.0, 41.0, 30.0, True),
        (1.0, 3600.0, 30.0, False),
        (0.5, 3600.0, 30.0, False),
        (float("inf"), 3600.0, 30.0, False),
        (None, 3600.0, 30.0, False),
        (4.0, None, 30.0, False),
    ],
)
def test_slow_gain(ratio: float | None, horizon: float | None, cost: float, worth: bool) -> None:
    config = RecoveryConfig(horizon_seconds=horizon, replacement_cost_seconds=cost)
    got, why = slow_gain(diagnosis(F.SLOW, ONE, gain_ratio=ratio), config)
    assert got is worth and why


def test_a_secret_is_not_stored_with_a_decision() -> None:
    for where in ({"webhook_url": "https://hooks.example.org/T0/SECRET"}, {"notify": {"secret_file": "/SECRET"}}):
        question = ask(diagnosis(F.CRASH, ONE), **where)
        assert "SECRET" not in str(question.to_dict())
