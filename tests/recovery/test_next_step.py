"""The next move of an incident, as a table: state and situation in, one move out. No journal, no clock."""

from dataclasses import replace
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Fate, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet_view import FleetView, ReplicaView, RunPlaces
from rolecall.recovery.guards import Situation
from rolecall.recovery.incidents import (
    OPERATOR,
    ActionFailure,
    Attempt,
    Decision,
    Incident,
    IncidentOutcome,
    IncidentState,
)
from rolecall.recovery.next_step import CLEAR_SECONDS, UNSEEN_SECONDS, Append, Decide, Move, Perform, next_step
from rolecall.recovery.policy import FULL_DISK
from rolecall.testing.recovery_world import diagnosis
from tests.recovery.test_policy import ask, fleet

A, F, K, S, R = ActionKind, FaultClass, EventKind, IncidentState, ReplicaState
NOW = 1000.0
CRASH = diagnosis(F.CRASH, ("rollout/1", 1))
TARGET = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-4"))
WORKS, STILL = {"rollout/1": (True, "7 units")}, {"rollout/1": (False, "no unit yet")}


def _attempt(action: ActionKind = A.REPLACE_REPLICA, **changes: Any) -> Attempt:
    targets = (TARGET,) if action is A.REPLACE_REPLICA else ()
    plan = Plan(incident_id=IncidentId("inc-1"), action=action, targets=targets, because="it is so")
    attempt = Attempt(number=1, plan=plan, page_oncall=False, outcome="tolerated", made_at=NOW - 1)
    return replace(attempt, **changes)


def _incident(state: IncidentState, *attempts: Attempt, d: Diagnosis = CRASH, **changes: Any) -> Incident:
    incident = Incident(
        incident_id="inc-1",
        state=state,
        diagnosis=d,
        opened_at=NOW - 2,
        seen_keys=frozenset({d.key}),
        attempts=attempts,
    )
    return replace(incident, **changes)


def _move(i: Incident, *others: Incident, view: FleetView | None = None, **situation: Any) -> Move | None:
    config = {"mode": "act", **situation.pop("config", {})}
    s = Situation(now=NOW, fleet=view or fleet(), config=RecoveryConfig(**config), incidents=(i, *others), **situation)
    return next_step(i, s, ask(i.diagnosis))


def _said(move: Move | None) -> tuple[EventKind, str]:
    """What is written: its kind, and the outcome, topic, guard or failure."""
    assert isinstance(move, Append), move
    body = move.payload.to_body()
    return move.payload.kind, str(
        body.get("outcome") or body.get("topic") or body.get("guard") or body.get("failure") or ""
    )


def _person(d: Diagnosis = CRASH) -> Diagnosis:
    return replace(d, detectors=(OPERATOR,))


def _row(incarnation: int, state: ReplicaState, desired: int | None = None) -> FleetView:
    row = ReplicaView(
        replica=ReplicaId("rollout/1"),
        desired_incarnation=desired or incarnation,
        incarnation=incarnation,
        state=state,
        node=NodeId("node-4"),
    )
    return FleetView(replicas=(row,))


# --- whatever the state -------------------------------------------------------------------------------------------


def test_a_closed_incident_makes_no_move() -> None:
    assert _move(_incident(S.CLOSED, _attempt(), outcome=IncidentOutcome.RESOLVED), ended="done") is None


@pytest.mark.parametrize("state", [S.OPEN, S.PLANNED, S.PROPOSED, S.ACTING, S.VERIFYING])
def test_the_end_of_the_run_ends_every_open_incident(state: IncidentState) -> None:
    attempts = () if state is S.OPEN else (_attempt(started_at=NOW - 1, done_at=NOW - 1),)
    move = _move(_incident(state, *attempts), ended="40 steps", progress=STILL, view=_row(2, R.STARTING))
    assert _said(move) == (K.INCIDENT_CLOSED, "escalated")
    assert isinstance(move, Append) and "40 steps" in move.payload.because


def test_a_verified_recovery_counts_after_the_end_of_the_run() -> None:
    i = _incident(S.VERIFYING, _attempt(started_at=NOW - 1, done_at=NOW - 1))
    assert _said(_move(i, ended="40 steps", progress=WORKS, view=_row(2, R.SERVING)))[0] is K.INCIDENT_VERIFIED


def test_every_plan_has_a_key_of_its_own() -> None:
    first = _move(_incident(S.OPEN))
    assert isinstance(first, Decide) and first.key == "inc-1:plan:1"
    again = _move(_incident(S.OPEN, _attempt(failure=ActionFailure.DIED)))
    assert isinstance(again, Decide) and again.key == "inc-1:plan:2"


# --- planned ------------------------------------------------------------------------------------------------------


def test_tolerating_calls_an_operator_first_where_nothing_helps_and_only_once() -> None:
    i = _incident(S.PLANNED, _attempt(A.TOLERATE, page_oncall=True, outcome="escalated"))
    assert _said(_move(i)) == (K.ONCALL_PAGED, "nothing_helps")
    called = replace(i, page_topics=frozenset({"nothing_helps"}))
    assert _said(_move(called)) == (K.INCIDENT_CLOSED, "escalated")
    assert _said(_move(_incident(S.PLANNED, _attempt(A.TOLERATE)))) == (K.INCIDENT_CLOSED, "tolerated")


@pytest.mark.parametrize("mode", ["act", "approve"])
def test_the_incident_of_a_full_disk_stays_open_until_there_is_room(mode: str) -> None:
    suspects = (Suspect(node=NodeId("node-0")),)
    full = replace(CRASH, suspects=suspects, fault_class=F.RESOURCE_EXHAUSTED, detectors=(FULL_DISK,))
    i = _incident(S.PLANNED, _attempt(A.TOLERATE, page_oncall=True), d=full)
    config = {"config": {"mode": mode}}
    assert _said(_move(i, **config)) == (K.ONCALL_PAGED, "nothing_helps")
    called = replace(i, page_topics=frozenset({"nothing_helps"}))
    assert _move(called, **config) is None
    over = _move(called, absent_seconds=CLEAR_SECONDS, **config)
    assert _said(over) == (K.INCIDENT_CLOSED, "self_recovered")


@pytest.mark.parametrize("mode", ["act", "approve", "observe"])
def test_a_fault_that_is_over_is_not_acted_on(mode: str) -> None:
    i = _incident(S.PLANNED, _attempt())
    over = {"absent_seconds": CLEAR_SECONDS, "progress": WORKS, "config": {"mode": mode}}
    assert _said(_move(i, **over)) == (K.INCIDENT_CLOSED, "self_recovered")


OBSERVE = {"config": {"mode": "observe"}}
NOBODY_LEFT = {
    "fates": {s: (Fate.ENDED, "no process of rollout/1 is left") for s in CRASH.suspects},
    "progress": STILL,
}


@pytest.mark.parametrize(
    ("attempt", "topic"),
    [
        (_attempt(), "mode"),
        (_attempt(A.TOLERATE, page_oncall=True), "mode"),
        (_attempt(A.TOLERATE), ""),  # not worth an action: not worth a call either
    ],
)
def test_an_observed_incident_tells_what_would_be_done_and_waits(attempt: Attempt, topic: str) -> None:
    i = _incident(S.PLANNED, attempt)
    blocked = _move(i, **OBSERVE)
    assert isinstance(blocked, Append) and _said(blocked) == (K.PLAN_BLOCKED, "mode")
    assert f"it would {attempt.plan.intent}" in blocked.payload.to_body()["because"]
    i = replace(i, attempts=(replace(attempt, held_by=frozenset({"mode"})),))
    if topic:
        paged = _move(i, **OBSERVE)
        assert isinstance(paged, Append) and _said(paged) == (K.ONCALL_PAGED, topic)
        assert paged.payload.to_body()["because"].startswith(i.diagnosis.because)
        i = replace(i, page_topics=frozenset({topic}))
    assert _move(i, **OBSERVE) is None


def test_a_plan_that_is_moot_closes_an_observed_incident() -> None:
    i = _incident(S.PLANNED, _attempt(A.TOLERATE, outcome="self_recovered"))
    assert _said(_move(i, **OBSERVE)) == (K.INCIDENT_CLOSED, "self_recovered")


@pytest.mark.parametrize(
    ("d", "absent", "outcome"),
    [
        (CRASH, UNSEEN_SECONDS - 0.1, None),  # a launcher may be restarting them
        (CRASH, UNSEEN_SECONDS, "ended"),
        (replace(CRASH, suspects=(Suspect(node=NodeId("node-8")),)), CLEAR_SECONDS, None),
        (replace(CRASH, suspects=(Suspect(node=NodeId("node-8")),)), UNSEEN_SECONDS, "self_recovered"),
        (replace(CRASH, suspects=()), CLEAR_SECONDS, None),
        (replace(CRASH, suspects=()), UNSEEN_SECONDS, "self_recovered"),
    ],
)
def test_what_makes_no_progress_is_over_later(d: Diagnosis, absent: float, outcome: str | None) -> None:
    i = _incident(S.PLANNED, _attempt(held_by=frozenset({"mode"})), d=d, page_topics=frozenset({"mode"}))
    move = _move(i, **OBSERVE, **NOBODY_LEFT, absent_seconds=absent)
    assert (move is None) if outcome is None else _said(move) == (K.INCIDENT_CLOSED, outcome)


def test_the_end_of_the_run_is_the_outcome_of_an_observed_incident() -> None:
    assert _said(_move(_incident(S.PLANNED, _attempt()), ended="40 steps", **OBSERVE)) == (K.INCIDENT_CLOSED, "ended")


@pytest.mark.parametrize(
    ("situation", "why"),
    [
        ({"absent_seconds": CLEAR_SECONDS - 0.1, "progress": WORKS}, "it stood a moment ago"),
        ({"absent_seconds": CLEAR_SECONDS, "progress": STILL}, "nobody sees it work"),
        ({"absent_seconds": CLEAR_SECONDS}, "nothing is known of its work"),
        ({"absent_seconds": CLEAR_SECONDS, "progress": WORKS, "view": _row(2, R.STARTING)}, "its successor starts"),
    ],
)
def test_a_fault_is_not_over_before_its_suspect_is_seen_to_work(situation: dict[str, Any], why: str) -> None:
    move = _move(_incident(S.PLANNED, _attempt()), **situation)
    assert not isinstance(move, Append) or move.payload.kind is not K.INCIDENT_CLOSED, why


def test_a_replacement_made_elsewhere_ends_the_incident() -> None:
    move = _move(_incident(S.PLANNED, _attempt()), view=_row(2, R.SERVING))
    assert _said(move) == (K.INCIDENT_CLOSED, "self_recovered")
    assert isinstance(move, Append) and "rollout/1#2 replaced it and is serving" in move.payload.because


@pytest.mark.parametrize(
    ("state", "started", "seen"),
    [
        (R.STARTING, False, ""),
        (R.READY, True, "standby/0#2 replaced it and is ready"),
        (R.STOPPED, True, "standby/0#2 replaced it and was ready"),  # a promotion has used it up
        (R.STOPPED, False, ""),
    ],
)
def test_a_replacement_of_a_standby_made_elsewhere_ends_the_incident(
    state: ReplicaState, started: bool, seen: str
) -> None:
    """A standby never serves."""
    row = _row(2, state).replicas[0]
    row = replace(row, replica=ReplicaId("standby/0"), started=started)
    i = _incident(S.PLANNED, _attempt(), d=diagnosis(F.GPU, ("standby/0", 1)))
    move = _move(i, view=FleetView(replicas=(row,)))
    assert isinstance(move, Append)
    assert (move.payload.kind is K.INCIDENT_CLOSED) is bool(seen)
    assert not seen or seen in move.payload.because


def test_a_request_of_an_operator_is_not_over_because_the_replica_works() -> None:
    i = _incident(S.PLANNED, _attempt(), d=_person())
    assert _said(_move(i, absent_seconds=99.0, progress=WORKS))[0] is K.ACTION_STARTED


def test_a_diagnosis_without_suspects_ends_when_it_is_no_longer_reported() -> None:
    nobody = _incident(S.PLANNED, _attempt(), d=replace(diagnosis(F.CRASH, ("rollout/1", 1)), suspects=()))
    assert _said(_move(nobody, absent_seconds=CLEAR_SECONDS)) == (K.INCIDENT_CLOSED, "self_recovered")
    assert _said(_move(nobody, absent_seconds=CLEAR_SECONDS - 0.1))[0] is not K.INCIDENT_CLOSED


def test_a_node_without_a_replica_is_over_when_it_stands_no_longer() -> None:
    node = replace(diagnosis(F.NODE_LOST, ("rollout/1", 1)), suspects=(Suspect(node=NodeId("node-8")),))
    i = _incident(S.PLANNED, _attempt(), d=node)
    assert _said(_move(i, absent_seconds=CLEAR_SECONDS)) == (K.INCIDENT_CLOSED, "self_recovered")


def test_approve_proposes_with_an_end_and_an_operator_needs_no_approval() -> None:
    proposed = _move(_incident(S.PLANNED, _attempt()), config={"mode": "approve", "approval_timeout_seconds": 60.0})
    assert isinstance(proposed, Append) and proposed.payload.kind is K.PLAN_PROPOSED
    assert proposed.payload.expires_at == NOW + 60
    asked = _move(_incident(S.PLANNED, _attempt(), d=_person()), config={"mode": "approve"})
    assert _said(asked)[0] is K.ACTION_STARTED


@pytest.mark.parametrize("action", [A.RESTART_ROLE, A.RESTART_JOB])
def test_a_restart_that_a_request_of_an_operator_led_to_needs_approval(action: ActionKind) -> None:
    i = _incident(S.PLANNED, _attempt(action), d=_person())
    assert _said(_move(i, config={"mode": "approve"}))[0] is K.PLAN_PROPOSED
    assert _said(_move(i))[0] is K.ACTION_STARTED


@pytest.mark.parametrize("state", [S.PLANNED, S.PROPOSED])
def test_a_restart_that_waited_is_given_up_once_the_job_commits_steps(state: IncidentState) -> None:
    decision = Decision.APPROVED if state is S.PROPOSED else None
    i = _incident(state, _attempt(A.RESTART_ROLE, decision=decision, expires_at=NOW + 60, made_seq=9))
    assert _said(_move(i, committed_seq=8))[0] is K.ACTION_STARTED, "before it was planned"
    assert _said(_move(i, committed_seq=10, config={"scope": "job"}))[0] is K.ACTION_STARTED
    assert _said(_move(i, committed_seq=10)) == (K.ONCALL_PAGED, "commits")
    paged = replace(i, page_topics=frozenset({"commits"}))
    assert _said(_move(paged, committed_seq=10)) == (K.INCIDENT_CLOSED, "escalated")


def test_a_blocking_guard_is_recorded_once_and_a_request_times_out() -> None:
    i = _incident(S.PLANNED, _attempt(), d=_person())
    kind, guard = _said(_move(i, paused="by me"))
    assert kind is K.PLAN_BLOCKED and guard
    held = replace(i, attempts=(_attempt(held_by=frozenset({guard})),))
    assert _move(held, paused="by me") is None
    late = replace(held, opened_at=NOW - 601.0)
    assert _said(_move(late, paused="by me")) == (K.ONCALL_PAGED, "request_held")
    reported = replace(late, page_topics=frozenset({"request_held"}))
    assert _said(_move(reported, paused="by me")) == (K.INCIDENT_CLOSED, "escalated")


# --- the job's own code explains it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "opened_at", "superseded"),
    [
        (diagnosis(F.USER_CODE, ("rollout/1", 1)), NOW, True),
        (diagnosis(F.USER_CODE, ("rollout/1", 1)), NOW - 9, False),  # an old failure of the code, not this one
        (diagnosis(F.USER_CODE, ("trainer/0", 1)), NOW, False),
        (replace(diagnosis(F.USER_CODE, ("rollout/0", 1)), suspects=(), about="rollout:f1"), NOW, True),
        (diagnosis(F.CRASH, ("rollout/1", 2)), NOW, False),
    ],
)
def test_user_code_takes_over_what_it_took_along(code: Diagnosis, opened_at: float, superseded: bool) -> None:
    other = replace(_incident(S.OPEN, d=code), incident_id="inc-2", opened_at=opened_at)
    kind, outcome = _said(_move(_incident(S.PLANNED, _attempt()), other, config={"replicas_at_once_max": 9}))
    assert ((kind, outcome) == (K.INCIDENT_CLOSED, "self_recovered")) is superseded


def test_user_code_is_not_taken_over_by_other_user_code() -> None:
    d = diagnosis(F.USER_CODE, ("rollout/1", 1))
    other = replace(_incident(S.OPEN, d=d), incident_id="inc-2", opened_at=NOW)
    move = _move(_incident(S.PLANNED, _attempt(A.STOP_JOB), d=d), other)
    assert _said(move)[0] is not K.INCIDENT_CLOSED


# --- proposed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "situation", "kind", "detail"),
    [
        ({}, {}, None, ""),
        ({}, {"absent_seconds": CLEAR_SECONDS, "progress": WORKS}, K.PLAN_EXPIRED, ""),
        ({"expires_at": NOW - 1}, {}, K.PLAN_EXPIRED, ""),
        ({"decision": Decision.APPROVED}, {}, K.ACTION_STARTED, ""),
        ({"decision": Decision.APPROVED, "expires_at": NOW - 1}, {}, K.PLAN_EXPIRED, ""),
        ({"decision": Decision.REJECTED}, {}, K.ONCALL_PAGED, "rejected"),
        ({"decision": Decision.EXPIRED}, {}, K.ONCALL_PAGED, "expired"),
        (
            {"decision": Decision.EXPIRED},
            {"absent_seconds": 9.0, "progress": WORKS},
            K.INCIDENT_CLOSED,
            "self_recovered",
        ),
    ],
)
def test_a_proposal_waits_for_a_word_and_lapses(
    changes: dict[str, Any], situation: dict[str, Any], kind: EventKind | None, detail: str
) -> None:
    attempt = _attempt(**{"expires_at": NOW + 60, **changes})
    move = _move(_incident(S.PROPOSED, attempt), config={"mode": "approve"}, **situation)
    if kind is None:
        assert move is None
    else:
        assert _said(move) == (kind, detail)


@pytest.mark.parametrize(("decision", "topic"), [(Decision.REJECTED, "rejected"), (Decision.EXPIRED, "expired")])
def test_a_refused_proposal_ends_once_an_operator_was_called(decision: Decision, topic: str) -> None:
    i = _incident(S.PROPOSED, _attempt(decision=decision), page_topics=frozenset({topic}))
    assert _said(_move(i, config={"mode": "approve"})) == (K.INCIDENT_CLOSED, "escalated")


def test_approval_and_expiry_race_for_one_key() -> None:
    """Whichever is written first is the decision: a plan is never both approved and lapsed."""
    expired = _move(_incident(S.PROPOSED, _attempt(expires_at=NOW - 1)), config={"mode": "approve"})
    assert isinstance(expired, Append) and expired.key == "inc-1:decision:1"
    decided = _attempt(expires_at=NOW - 1, decision=Decision.APPROVED)
    later = _move(_incident(S.PROPOSED, decided), config={"mode": "approve"})
    assert isinstance(later, Append) and later.key == "inc-1:expired:1"


def test_a_pause_holds_an_approved_plan_and_is_recorded_once() -> None:
    i = _incident(S.PROPOSED, _attempt(expires_at=NOW + 60, decision=Decision.APPROVED))
    kind, guard = _said(_move(i, paused="by me", config={"mode": "approve"}))
    assert kind is K.PLAN_BLOCKED
    held = replace(i, attempts=(replace(i.attempts[0], held_by=frozenset({guard})),))
    assert _move(held, paused="by me", config={"mode": "approve"}) is None


# --- acting and verifying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "situation", "performs"),
    [
        (fleet(), {}, True),
        (fleet(), {"paused": "by me"}, False),
        (fleet(), {"config": {"mode": "observe"}}, False),
        (fleet(rollout_1=2), {"paused": "by me"}, True),  # it has happened: repeating it is without effect
        (fleet(), {"paused": "by me", "begun": True}, True),  # of several calls some were made
    ],
)
def test_an_action_found_half_done_is_repeated_but_does_not_begin_in_a_pause(
    view: FleetView, situation: dict[str, Any], performs: bool
) -> None:
    move = _move(_incident(S.ACTING, _attempt(started_at=NOW - 1)), view=view, **situation)
    assert isinstance(move, Perform) is performs and (performs or move is None)


def test_an_action_that_mode_observe_leaves_half_done_has_failed() -> None:
    acting = _incident(S.ACTING, _attempt(started_at=NOW - 1))
    move = _move(acting, begun=True, config={"mode": "observe"})
    assert _said(move) == (K.ACTION_FAILED, "refused")
    assert isinstance(move, Append) and "left half done" in move.payload.because
    refused = _attempt(started_at=NOW - 1, failure=ActionFailure.REFUSED)
    told = _attempt(A.TOLERATE, page_oncall=True, held_by=frozenset({"mode"}))
    observed_before = _incident(S.PLANNED, refused, told, page_topics=frozenset({"mode"}))
    assert _said(_move(observed_before, config={"mode": "observe"})) == (K.ONCALL_PAGED, "failed")


def test_stopping_the_job_does_not_begin_in_a_pause_and_goes_on_once_it_has_begun() -> None:
    i = _incident(S.ACTING, _attempt(A.STOP_JOB, started_at=NOW - 1))
    assert _move(i, paused="by me") is None
    assert isinstance(_move(i, paused="by me", stopping="user code"), Perform)


def test_a_stopped_job_pages_oncall_and_is_not_resolved() -> None:
    i = _incident(S.VERIFYING, _attempt(A.STOP_JOB, started_at=NOW - 1, done_at=NOW - 1))
    assert _said(_move(i)) == (K.ONCALL_PAGED, "job_stopped")
    reported = replace(i, page_topics=frozenset({"job_stopped"}))
    assert _said(_move(reported)) == (K.INCIDENT_CLOSED, "escalated")


@pytest.mark.parametrize(
    ("view", "progress", "done_at", "kind", "detail"),
    [
        (_row(2, R.SERVING), WORKS, NOW - 1, K.INCIDENT_VERIFIED, ""),
        (_row(2, R.STARTING), STILL, NOW - 1, None, ""),
        (_row(2, R.STARTING), STILL, NOW - 999, K.ACTION_FAILED, "no_progress"),
        (_row(2, R.LOST), STILL, NOW - 1, K.ACTION_FAILED, "died"),
    ],
)
def test_a_replacement_is_verified_failed_or_pending(
    view: FleetView, progress: dict[str, Any], done_at: float, kind: EventKind | None, detail: str
) -> None:
    i = _incident(S.VERIFYING, _attempt(started_at=done_at, done_at=done_at))
    move = _move(i, view=view, progress=progress)
    if kind is None:
        assert move is None
    else:
        assert _said(move) == (kind, detail)


@pytest.mark.parametrize(
    ("past", "waits"), [((), 1), (("no_progress",), 2), (("no_progress", "no_progress"), 3), (("died",), 1)]
)
def test_after_a_start_that_took_too_long_the_next_one_gets_more_time(past: tuple[str, ...], waits: int) -> None:
    attempts = [_attempt(failure=ActionFailure(f)) for f in past]
    for seconds, over in ((20.0 * waits - 1, False), (20.0 * waits + 1, True)):
        now = _attempt(started_at=NOW - seconds, done_at=NOW - seconds)
        i = replace(_incident(S.VERIFYING, now), attempts=(*attempts, now))
        move = _move(i, view=_row(2, R.STARTING), config={"verification_timeout_seconds": 20.0})
        assert (move is not None and _said(move) == (K.ACTION_FAILED, "no_progress")) is over


@pytest.mark.parametrize(
    ("controller", "state", "changes", "failed"),
    [
        ((1, R.SERVING, NOW - 50), S.CLOSED, {}, True),
        ((2, R.SERVING, NOW - 5), S.CLOSED, {}, False),
        ((2, R.SERVING, NOW + 5), S.CLOSED, {}, True),
        ((1, R.LOST, NOW - 5), S.PROPOSED, {}, False),
        ((2, R.STARTING, NOW - 5), S.VERIFYING, {}, False),
        ((1, R.LOST, NOW - 5), S.PLANNED, {"held_by": frozenset({"paused"})}, False),
        ((1, R.LOST, NOW - 5), S.PLANNED, {"held_by": frozenset({"at_once"})}, True),
        ((1, R.LOST, NOW - 5), S.CLOSED, {}, True),
    ],
    ids=["serves", "is back", "clock set back", "proposed", "starts", "paused", "waits for this", "nobody replaces it"],
)
def test_the_time_of_a_verification_does_not_run_while_the_controller_is_being_replaced(
    controller: tuple[int, ReplicaState, float], state: IncidentState, changes: dict[str, Any], failed: bool
) -> None:
    incarnation, of_controller, changed_at = controller
    row = ReplicaView(
        replica=ReplicaId("controller/0"),
        desired_incarnation=incarnation,
        incarnation=incarnation,
        state=of_controller,
        node=NodeId("node-0"),
        changed_at=changed_at,
    )
    view = FleetView(replicas=(row, *_row(2, R.READY).replicas))
    other = _incident(state, _attempt(**changes), d=diagnosis(F.CRASH, ("controller/0", 1)), incident_id="inc-2")
    i = _incident(S.VERIFYING, _attempt(started_at=NOW - 30, done_at=NOW - 30))
    move = _move(i, other, view=view, progress=STILL, config={"verification_timeout_seconds": 20.0})
    assert (move is not None and _said(move) == (K.ACTION_FAILED, "no_progress")) is failed


def _with_second(second: ReplicaView) -> FleetView:
    """A job of another scheduler, rollout/1#2 and another one."""
    return FleetView(replicas=(*_row(2, R.SERVING).replicas, second), places=RunPlaces(scheduled=True))


SECOND = PlanTarget(replica=ReplicaId("rollout/2"), incarnation=1, node=NodeId("node-4"))
BACK = replace(_row(2, R.SERVING).replicas[0], replica=SECOND.replica)
STOPPED = replace(_row(1, R.STOPPED).replicas[0], replica=SECOND.replica)
RUNS_ON = replace(STOPPED, state=R.SERVING)


@pytest.mark.parametrize(
    ("second", "progress", "seconds", "said"),
    [
        (BACK, WORKS, 1, (K.INCIDENT_VERIFIED, "")),
        (STOPPED, WORKS, 1, None),
        (STOPPED, WORKS, 21, (K.ONCALL_PAGED, "not_back")),
        (STOPPED, STILL, 21, (K.ONCALL_PAGED, "not_back")),  # it may wait for the other one
        (BACK, STILL, 21, (K.ACTION_FAILED, "no_progress")),
    ],
)
@pytest.mark.parametrize("ended_by", ["this attempt", "an earlier one"])
def test_what_else_an_action_has_ended_has_to_be_back(
    ended_by: str, second: ReplicaView, progress: dict[str, Any], seconds: float, said: tuple[EventKind, str] | None
) -> None:
    now = _attempt(started_at=NOW - seconds, done_at=NOW - seconds)
    past: tuple[Attempt, ...] = ()
    if ended_by == "this attempt":
        now = replace(now, plan=replace(now.plan, also_ends=(SECOND,)))
    else:  # of its two replacements only that of rollout/1 has died
        both = replace(now.plan, targets=(TARGET, SECOND))
        past = (_attempt(plan=both, started_at=NOW - 99, failure=ActionFailure.DIED),)
    i = _incident(S.VERIFYING, *past, now)
    situation = {"view": _with_second(second), "progress": progress, "config": {"verification_timeout_seconds": 20.0}}
    move = _move(i, **situation)
    assert move is None if said is None else _said(move) == said
    if said == (K.ONCALL_PAGED, "not_back"):
        assert isinstance(move, Append) and "rollout/2#2, which was ended too, is not back" in move.payload.because
        assert _said(_move(replace(i, page_topics=frozenset({"not_back"})), **situation)) == (
            K.INCIDENT_CLOSED,
            "escalated",
        )


@pytest.mark.parametrize(("seconds", "resolved"), [(1, False), (21, True)])
def test_what_may_have_ended_with_the_target_and_runs_on_delays_the_end_and_pages_nobody(
    seconds: int, resolved: bool
) -> None:
    now = _attempt(started_at=NOW - seconds, done_at=NOW - seconds)
    i = _incident(S.VERIFYING, replace(now, plan=replace(now.plan, also_ends=(SECOND,))))
    config = {"verification_timeout_seconds": 20.0}
    move = _move(i, view=_with_second(RUNS_ON), progress=WORKS, config=config)
    assert _said(move) == (K.INCIDENT_VERIFIED, "") if resolved else move is None


def test_a_verified_incident_closes_as_resolved() -> None:
    i = _incident(S.VERIFYING, _attempt(started_at=NOW - 1, done_at=NOW - 1), verified_at=NOW)
    assert _said(_move(i)) == (K.INCIDENT_CLOSED, "resolved")


def test_an_exhausted_budget_is_reported_and_oncall_is_paged_once() -> None:
    used_up = {"config": {"evictions_per_hour_max": 0}}
    i = _incident(S.PLANNED, _attempt())
    kind, guard = _said(_move(i, **used_up))
    assert kind is K.PLAN_BLOCKED
    held = replace(i, attempts=(_attempt(held_by=frozenset({guard})),))
    assert _said(_move(held, **used_up)) == (K.ONCALL_PAGED, guard)
    assert _move(replace(held, page_topics=frozenset({guard})), **used_up) is None


@pytest.mark.parametrize(("survives", "outcome"), [(False, "ended"), (True, "self_recovered")])
def test_failed_code_recovers_only_in_the_same_processes(survives: bool, outcome: str) -> None:
    failed_code = diagnosis(FaultClass.USER_CODE, about="trainer:ValueError:f1")
    i = _incident(S.PLANNED, _attempt(A.STOP_JOB), d=failed_code)
    move = _move(i, **OBSERVE, absent_seconds=UNSEEN_SECONDS, code_survives=survives)
    assert _said(move) == (K.INCIDENT_CLOSED, outcome)
