"""Policy as a table: diagnosis and past in, action and reason out."""

from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, PlanTarget, Suspect
from rolecall.core.faults import FAULTS, FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, ReplicaView, RunPlaces
from rolecall.recovery.incidents import OPERATOR, ActionFailure, Attempt, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import FULL_DISK, FailedAttempt, PolicyInput, decide, question, slow_gain
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
    "full disk": (
        ask(diagnosis(F.RESOURCE_EXHAUSTED, because="disk is full", detectors=(FULL_DISK,), advice="free space on it")),
        A.TOLERATE,
        (),
        True,
        "disk is full: no replica is evicted; free space on it",
    ),
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
    "slow, no horizon": (
        ask(diagnosis(F.SLOW, ONE, gain_ratio=9.0)),
        A.TOLERATE,
        (),
        False,
        "horizon_seconds is not set",
    ),
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


LADDER = SUPPORTS | {A.RESTART_ROLE, A.RESTART_JOB}
TRAINERS, ROLLOUTS = ("trainer/0", "trainer/1"), ("rollout/0", "rollout/1", "rollout/2")


def attempt(failure: ActionFailure, action: ActionKind = A.REPLACE_REPLICA, number: int = 1) -> FailedAttempt:
    target = PlanTarget(replica=ReplicaId("trainer/0"), incarnation=number, node=NodeId("node-6"))
    return FailedAttempt(failure=failure, action=action, targets=(target,), because=f"attempt {number} {failure}")


def climb(*past: FailedAttempt, who: str = "trainer/0", started: bool = True, **more: Any) -> tuple[str, list[str]]:
    """Action and targets for a fault of `who` after these attempts."""
    config = {k: more.pop(k) for k in ("scope", "retries_per_replica_max") if k in more}
    past = tuple(replace(p, targets=(replace(p.targets[0], replica=ReplicaId(who)),)) for p in past)
    desired = {who.replace("/", "_"): len(past) + 1}
    view = FleetView(replicas=tuple(replace(r, started=started) for r in fleet(**desired).replicas))
    question = replace(ask(diagnosis(F.CRASH, (who, 1)), *past, view=view, supports=LADDER, **config), **more)
    verdict = decide(question)
    assert decide(PolicyInput.from_dict(question.to_dict())) == verdict
    assert verdict.plan.because and verdict.page_oncall is (verdict.plan.action is A.TOLERATE)
    return str(verdict.plan.action), [str(t.replica) for t in verdict.plan.targets]


DIED, STUCK = ActionFailure.DIED, ActionFailure.NO_PROGRESS
TWO_DEATHS = (attempt(DIED), attempt(DIED, number=2))
REPLACED = frozenset({A.REPLACE_REPLICA})


def test_one_death_of_a_replacement_is_tolerated_and_the_second_restarts_the_role() -> None:
    assert climb(attempt(DIED)) == ("replace_replica", ["trainer/0"])
    assert climb(*TWO_DEATHS) == ("restart_role", [*TRAINERS])


def test_a_second_failure_of_a_replica_in_one_step_restarts_its_role() -> None:
    assert climb(same_step=REPLACED) == ("restart_role", [*TRAINERS])
    assert climb(same_step=REPLACED | {A.RESTART_ROLE}) == ("restart_job", [*FLEET])
    assert climb(same_step=frozenset({A.RESTART_JOB})) == ("tolerate", [])


@pytest.mark.parametrize("done", [A.REPLACE_REPLICA, A.REPLACE_NODE])
def test_a_replacement_whose_node_is_lost_in_the_same_step_moves_and_nothing_else_ends(done: ActionKind) -> None:
    nodes = frozenset({"node-trainer-0"})
    question = ask(diagnosis(F.NODE_LOST, ("trainer/0", 1)), supports=LADDER, lost_nodes=nodes)
    plan = decide(replace(question, same_step=frozenset({done}))).plan
    assert plan.action is A.REPLACE_NODE and [str(t.replica) for t in plan.targets] == ["trainer/0"]


@pytest.mark.parametrize("standby", ["standby/0", "trainer-standby/0"])
def test_a_standby_that_fails_again_in_one_step_is_replaced_again(standby: str) -> None:
    spare = FleetView(replicas=(*fleet().replicas, view("trainer-standby/0", "node-10")))
    question = replace(ask(diagnosis(F.CRASH, (standby, 1)), view=spare, supports=LADDER), same_step=REPLACED)
    verdict = decide(question)
    assert verdict.plan.action is A.REPLACE_REPLICA and [str(t.replica) for t in verdict.plan.targets] == [standby]


def test_a_failure_beyond_the_role_restarts_the_job() -> None:
    past = (*TWO_DEATHS, attempt(STUCK, A.RESTART_ROLE, 3))
    assert climb(*past) == ("restart_job", [*FLEET])
    assert climb(*past, attempt(STUCK, A.RESTART_JOB, 4)) == ("tolerate", [])
    assert climb(*TWO_DEATHS, who="controller/0") == ("restart_job", [*FLEET]), "its role is one replica"
    several = ask(diagnosis(F.CRASH, ("reward/0", 1), ("rollout/1", 1)), supports=LADDER)
    assert decide(replace(several, same_step=REPLACED)).plan.action is A.RESTART_JOB


def test_attempts_that_are_used_up_restart_the_role() -> None:
    assert climb(attempt(STUCK), attempt(STUCK, number=2), retries_per_replica_max=2) == ("restart_role", [*TRAINERS])


@pytest.mark.parametrize("retries", [3, 20])
@pytest.mark.parametrize("failure", [DIED, STUCK])
def test_the_ladder_ends(failure: ActionFailure, retries: int) -> None:
    """Whatever fails, each restart is tried once, and then on-call is paged."""
    past: list[FailedAttempt] = []
    for number in range(1, 2 * retries):
        action, _ = climb(*past, retries_per_replica_max=retries)
        if action == "tolerate":
            break
        past.append(attempt(failure, ActionKind(action), number))
    tried = [str(p.action) for p in past]
    assert tried[-2:] == ["restart_role", "restart_job"] and tried.count("restart_role") == 1


def test_a_job_that_works_without_the_replica_is_not_restarted() -> None:
    assert climb(*TWO_DEATHS, commits_since=True) == ("tolerate", [])


@pytest.mark.parametrize(
    ("starts", "committed_seq", "works"),
    [
        ((), 99, False),
        ((), 101, True),
        ((110,), 105, False),
        ((110,), 0, False),
        ((110, 120), 119, False),
        ((110, 120), 121, True),
    ],
)
def test_only_a_step_after_the_start_of_the_last_attempt_shows_that_the_job_works(
    starts: tuple[int, ...], committed_seq: int, works: bool
) -> None:
    plan = decide(ask(diagnosis(F.CRASH, ONE))).plan
    attempts = tuple(
        Attempt(
            number=n, plan=plan, page_oncall=False, outcome="", made_at=0.0, started_seq=seq, failure=ActionFailure.DIED
        )
        for n, seq in enumerate(starts, start=1)
    )
    incident = Incident(
        incident_id="inc-1-x",
        state=IncidentState.OPEN,
        diagnosis=diagnosis(F.CRASH, ONE),
        opened_at=0.0,
        opened_seq=100,
        seen_keys=frozenset(),
        attempts=attempts,
    )
    config = RecoveryConfig(mode="act")
    asked = question(incident, [], fleet=fleet(), config=config, supports=LADDER, committed_seq=committed_seq)
    assert asked.commits_since is works


def test_replacements_that_do_not_even_start_restart_nothing() -> None:
    assert climb(*TWO_DEATHS, started=False) == ("tolerate", [])
    assert climb(attempt(DIED), started=False, retries_per_replica_max=1) == ("tolerate", [])


NOT_STARTED = ActionFailure.NOT_STARTED
REFUSED_THERE = "not started: node-6 has no raylet any more"


def refused(*past: FailedAttempt, nodes: tuple[str, ...] = (), **more: Any) -> tuple[str, str]:
    """Action and reason for a trainer that its node could not take. `nodes`: that are free."""
    lost = replace(view("trainer/0", "node-6", desired=len(past) + 1, state=ReplicaState.LOST), because=REFUSED_THERE)
    others = tuple(
        replace(r, node=NodeId("node-0")) if r.role == "reward" else r
        for r in fleet().replicas
        if r.replica not in ("trainer/0", "standby/0")
    )
    seen = FleetView(replicas=(*others, lost), places=RunPlaces(nodes=nodes))
    question = ask(diagnosis(F.CRASH, ("trainer/0", len(past) + 1)), *past, view=seen, supports=LADDER, **more)
    verdict = decide(question)
    assert decide(PolicyInput.from_dict(question.to_dict())) == verdict
    return str(verdict.plan.action), verdict.plan.because


def test_an_incarnation_without_a_process_says_nothing_of_the_software() -> None:
    for past in ((NOT_STARTED,), (DIED, NOT_STARTED), (NOT_STARTED, NOT_STARTED)):
        attempts = [attempt(failure, number=n) for n, failure in enumerate(past, start=1)]
        assert refused(*attempts, nodes=("node-20",))[0] == "replace_node"
    assert climb(attempt(DIED), attempt(NOT_STARTED, number=2), attempt(DIED, number=3), retries_per_replica_max=9) == (
        "restart_role",
        [*TRAINERS],
    )


def test_what_no_node_takes_ends_with_a_page() -> None:
    action, because = refused(*(attempt(NOT_STARTED, number=n) for n in (1, 2, 3)), nodes=("node-20",))
    assert action == "tolerate" and "3 attempts failed" in because and "software" not in because


def test_a_node_that_could_not_take_a_process_is_left_unless_an_operator_asks() -> None:
    action, because = refused(attempt(NOT_STARTED))
    assert action == "replace_node" and " lends " in because
    assert refused(attempt(NOT_STARTED), rollouts_min=3)[0] == "tolerate", "no other node"
    lost = replace(view("rollout/1", "node-4", desired=2, state=ReplicaState.LOST), because=REFUSED_THERE)
    asked = ask(diagnosis(F.CANNOT_TELL, ("rollout/1", 2), detectors=(OPERATOR,)), view=FleetView(replicas=(lost,)))
    assert decide(asked).plan.action is A.REPLACE_REPLICA


def test_slowness_and_requests_of_operators_escalate_nothing() -> None:
    for d in (diagnosis(F.SLOW, ONE, gain_ratio=4.0), diagnosis(F.CANNOT_TELL, ONE, detectors=(OPERATOR,))):
        question = replace(ask(d, supports=LADDER, horizon_seconds=3600.0), same_step=REPLACED)
        assert decide(question).plan.action is A.REPLACE_REPLICA


def test_with_the_scope_job_a_fault_restarts_the_job() -> None:
    for who in ("trainer/0", "rollout/1", "reward/0", "controller/0"):
        assert climb(who=who, scope="job") == ("restart_job", [*FLEET])
    assert climb(scope="job", same_step=frozenset({A.RESTART_JOB})) == ("restart_job", [*FLEET])
    assert climb(attempt(DIED, A.RESTART_JOB), scope="job") == ("restart_job", [*FLEET])
    assert climb(*(attempt(DIED, A.RESTART_JOB, n) for n in (1, 2)), scope="job") == ("tolerate", [])


def test_with_the_scope_job_standbys_requests_and_the_jobs_own_code_are_handled_as_before() -> None:
    def action(d: Diagnosis) -> ActionKind:
        return decide(ask(d, supports=LADDER, scope="job")).plan.action

    assert action(diagnosis(F.CRASH, ("standby/0", 1))) is A.REPLACE_REPLICA
    assert action(diagnosis(F.CANNOT_TELL, ONE, detectors=(OPERATOR,))) is A.REPLACE_REPLICA
    assert action(diagnosis(F.USER_CODE, ONE)) is A.STOP_JOB
    assert decide(ask(diagnosis(F.CRASH, ONE), scope="job")).plan.action is A.REPLACE_REPLICA, "if it can do no other"


def test_with_the_scope_job_slowness_is_weighed_at_the_cost_of_every_replica() -> None:
    supports = SUPPORTS | {A.RESTART_JOB}
    slow = diagnosis(F.SLOW, ONE, gain_ratio=2.0)
    config: dict[str, Any] = {"scope": "job", "horizon_seconds": 200.0, "supports": supports}
    decision = decide(ask(slow, **config))
    assert decision.plan.action is A.TOLERATE
    assert "100 s of its work, less than the 30 s x 5 replicas = 150 s it costs" in decision.plan.because
    assert decide(ask(slow, **{**config, "horizon_seconds": 400.0})).plan.action is A.RESTART_JOB
    assert decide(ask(slow, **{**config, "scope": "replica"})).plan.action is A.REPLACE_REPLICA
