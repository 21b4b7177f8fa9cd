"""The state machine of an incident: every event in every state either moves it or tells the story of why not."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import InvalidTransition
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import (
    ActionFailed,
    ActionStarted,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    IncidentVerified,
    PlanBlocked,
    PlanCreated,
)
from rolecall.recovery.incidents import (
    INCIDENT_KINDS,
    LEGAL,
    ActionFailure,
    IncidentOutcome,
    IncidentState,
    apply,
    evictions,
    fold,
)
from rolecall.testing.recovery_world import diagnosis
from rolecall.views.incidents import summarize_incidents
from tests.events import made_event

K, S = EventKind, IncidentState
NAME = "inc-1-rollout-1"
D = diagnosis(FaultClass.CRASH, ("rollout/1", 1))
PLAN = Plan(
    incident_id=IncidentId(NAME),
    action=ActionKind.REPLACE_REPLICA,
    targets=(PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-4")),),
    because="it crashed",
)
BODY: dict[EventKind, dict[str, Any]] = {
    K.INCIDENT_OPENED: {"diagnosis": D.to_dict()},
    K.INCIDENT_UPDATED: {"diagnosis": D.to_dict()},
    K.PLAN_CREATED: {"plan": PLAN.to_dict()},
    K.PLAN_BLOCKED: {"digest": PLAN.digest, "guard": "paused", "because": "paused by bob"},
    K.PLAN_PROPOSED: {"plan": PLAN.to_dict(), "expires_at": 100.0},
    K.PLAN_APPROVED: {"digest": PLAN.digest, "by": "alice"},
    K.PLAN_REJECTED: {"digest": PLAN.digest, "by": "alice", "because": "no"},
    K.PLAN_EXPIRED: {"digest": PLAN.digest, "because": "late"},
    K.HOLD_PLACED: {"digest": PLAN.digest, "by": "alice", "because": "a look", "until": 50.0},
    K.HOLD_LIFTED: {"digest": PLAN.digest, "by": "alice", "because": ""},
    K.DIAGNOSIS_REVIEWED: {"verdict": "wrong", "by": "alice", "because": "a flaky test"},
    K.ACTION_STARTED: {"plan": PLAN.to_dict()},
    K.ACTION_DONE: {"digest": PLAN.digest, "result": {}},
    K.ACTION_FAILED: {"digest": PLAN.digest, "failure": "died", "because": "it died"},
    K.INCIDENT_VERIFIED: {"because": "it works"},
    K.INCIDENT_CLOSED: {"outcome": "self_recovered", "because": "it went away"},
    K.ONCALL_PAGED: {"topic": "retries", "because": "3 times"},
}
TO_STATE: dict[IncidentState, list[EventKind]] = {
    S.OPEN: [K.INCIDENT_OPENED],
    S.PLANNED: [K.INCIDENT_OPENED, K.PLAN_CREATED],
    S.PROPOSED: [K.INCIDENT_OPENED, K.PLAN_CREATED, K.PLAN_PROPOSED],
    S.ACTING: [K.INCIDENT_OPENED, K.PLAN_CREATED, K.ACTION_STARTED],
    S.VERIFYING: [K.INCIDENT_OPENED, K.PLAN_CREATED, K.ACTION_STARTED, K.ACTION_DONE],
    S.CLOSED: [K.INCIDENT_OPENED, K.INCIDENT_CLOSED],
}


def events(*kinds: EventKind, **changed: dict[str, Any]) -> list[Event]:
    return [
        made_event(
            seq=n, kind=kind, wall_at=float(n), body={**BODY[kind], **changed.get(kind.value, {})}, incident_id=NAME
        )
        for n, kind in enumerate(kinds, start=1)
    ]


@pytest.mark.parametrize("kind", INCIDENT_KINDS)
@pytest.mark.parametrize("state", list(S))
def test_every_event_in_every_state(state: IncidentState, kind: EventKind) -> None:
    path = TO_STATE[state]
    assert fold(events(*path))[NAME].state is state
    # Starting is legal from proposed only after a yes, and only what is held can be lifted: see below.
    needs_more = (state is S.PROPOSED and kind is K.ACTION_STARTED) or kind is K.HOLD_LIFTED
    if state in LEGAL[kind] and not needs_more:
        fold(events(*path, kind))
        return
    with pytest.raises(InvalidTransition) as error:
        fold(events(*path, kind))
    assert error.value.incident_id == NAME and error.value.state == state and error.value.event == kind
    assert len(error.value.story) == len(path) + 1
    for line in error.value.story:
        assert line in str(error.value)


def test_an_event_of_an_unknown_incident() -> None:
    with pytest.raises(InvalidTransition, match=r"state \(unknown\)"):
        fold(events(K.PLAN_CREATED))


def test_resolution_needs_verification() -> None:
    path = TO_STATE[S.VERIFYING]
    resolved = {"incident_closed": {"outcome": "resolved", "because": "it works"}}
    with pytest.raises(InvalidTransition, match="it was not verified"):
        fold(events(*path, K.INCIDENT_CLOSED, **resolved))
    incident = fold(events(*path, K.INCIDENT_VERIFIED, K.INCIDENT_CLOSED, **resolved))[NAME]
    assert incident.outcome is IncidentOutcome.RESOLVED and incident.verified_at == 5.0 and incident.closed_at == 6.0


def test_events_about_another_plan_do_not_fit() -> None:
    with pytest.raises(InvalidTransition, match="it names plan nonsense"):
        fold(events(*TO_STATE[S.ACTING], K.ACTION_DONE, action_done={"digest": "nonsense"}))


@pytest.mark.parametrize(
    ("decisions", "problem"),
    [
        ([K.PLAN_APPROVED, K.PLAN_APPROVED], "it was already approved"),
        ([K.PLAN_REJECTED, K.PLAN_APPROVED], "it was already rejected"),
        ([K.PLAN_EXPIRED, K.PLAN_APPROVED], "it was already expired"),
        ([K.PLAN_APPROVED, K.PLAN_REJECTED], "it was already approved"),
        ([K.PLAN_REJECTED, K.ACTION_STARTED], "the plan is not approved"),
        ([K.PLAN_APPROVED, K.PLAN_EXPIRED, K.ACTION_STARTED], "the plan is not approved"),
        ([K.ACTION_STARTED], "the plan is not approved"),
    ],
)
def test_a_proposal_is_decided_once(decisions: list[EventKind], problem: str) -> None:
    with pytest.raises(InvalidTransition, match=problem):
        fold(events(*TO_STATE[S.PROPOSED], *decisions))


def test_a_failure_plans_again() -> None:
    incident = fold(events(*TO_STATE[S.VERIFYING], K.ACTION_FAILED))[NAME]
    assert incident.state is S.OPEN and incident.touched == {"rollout/1": 2}
    assert [a.failure for a in incident.failures] == [ActionFailure.DIED]
    refused = fold(events(*TO_STATE[S.ACTING], K.ACTION_FAILED, action_failed={"failure": "refused"}))[NAME]
    assert refused.touched == {}, "an action that was refused has made nothing"


def test_new_information_undoes_a_plan_but_no_action() -> None:
    planned = fold(events(*TO_STATE[S.PLANNED], K.INCIDENT_UPDATED))[NAME]
    acting = fold(events(*TO_STATE[S.ACTING], K.INCIDENT_UPDATED))[NAME]
    assert (planned.state, acting.state) == (S.OPEN, S.ACTING)


def test_evictions_count_from_their_start() -> None:
    found = fold(events(*TO_STATE[S.VERIFYING]))
    assert [(e.replica, e.at) for e in evictions(found.values(), since=0.0)] == [("rollout/1", 3.0)]
    assert evictions(found.values(), since=50.0) == []
    assert [i.under_repair for i in found.values()] == [{"rollout/1"}], "however long it takes"
    done = fold(events(*TO_STATE[S.VERIFYING], K.INCIDENT_CLOSED))
    assert [i.under_repair for i in done.values()] == [frozenset()]
    assert len(evictions(done.values(), since=0.0)) == 1


def test_of_a_restart_only_the_replica_at_fault_counts() -> None:
    targets = tuple(replace(PLAN.targets[0], replica=ReplicaId(r)) for r in ("rollout/0", "rollout/1"))
    restart = replace(PLAN, action=ActionKind.RESTART_ROLE, targets=targets)
    (incident,) = fold(events(*TO_STATE[S.OPEN])).values()
    assert incident.at_fault(PLAN) == incident.at_fault(restart) == {"rollout/1"}


def test_a_long_story_is_cut() -> None:
    with pytest.raises(InvalidTransition) as error:
        fold(events(K.INCIDENT_OPENED, *[K.INCIDENT_UPDATED] * 200, K.ACTION_DONE))
    assert len(error.value.story) == 50 and error.value.story[-1].startswith("e202 action_done")


def test_a_hold_moves_the_end_of_its_proposal() -> None:
    proposed = TO_STATE[S.PROPOSED]
    attempt = fold(events(*proposed, K.HOLD_PLACED))[NAME].attempt
    assert attempt is not None and attempt.hold is not None
    # Proposed at 3 until 100: it waits for 97 s, again from the hold's end at 50 on.
    assert attempt.expires_at == 50.0 + 97.0 and attempt.hold.active(49.9) and not attempt.hold.active(50.0)
    attempt = fold(events(*proposed, K.HOLD_PLACED, K.HOLD_LIFTED))[NAME].attempt
    assert attempt is not None and attempt.hold is not None and not attempt.hold.active(49.9)
    assert attempt.expires_at == 5.0 + 97.0
    with pytest.raises(InvalidTransition, match="it is not on hold"):
        fold(events(*proposed, K.HOLD_PLACED, K.HOLD_LIFTED, K.HOLD_LIFTED))


def test_a_hold_stays_when_its_plan_is_made_again() -> None:
    path = [*TO_STATE[S.PLANNED], K.HOLD_PLACED, K.INCIDENT_UPDATED, K.PLAN_CREATED]
    attempt = fold(events(*path))[NAME].attempt
    assert attempt is not None and attempt.number == 2 and attempt.hold is not None and attempt.hold.by == "alice"


@pytest.mark.parametrize(("incarnation", "stays"), [(PLAN.targets[0].incarnation, True), (9, False)])
def test_a_hold_protects_the_replicas_that_the_plan_takes_down(incarnation: int, stays: bool) -> None:
    target = replace(PLAN.targets[0], incarnation=incarnation)
    other = replace(PLAN, action=ActionKind.REPLACE_NODE, targets=(target,))
    again = made_event(seq=9, kind=K.PLAN_CREATED, wall_at=9.0, body={"plan": other.to_dict()}, incident_id=NAME)
    attempt = fold([*events(*TO_STATE[S.PLANNED], K.HOLD_PLACED, K.INCIDENT_UPDATED), again])[NAME].attempt
    assert attempt is not None and attempt.number == 2 and (attempt.hold is not None) is stays


def test_a_rejected_plan_is_not_made_again_and_never_starts() -> None:
    rejected = [*TO_STATE[S.PLANNED], K.PLAN_REJECTED]
    assert fold(events(*rejected, K.INCIDENT_UPDATED))[NAME].state is S.PLANNED
    with pytest.raises(InvalidTransition, match="the plan was rejected"):
        fold(events(*rejected, K.ACTION_STARTED))
    with pytest.raises(InvalidTransition, match="it was already rejected"):
        fold(events(*rejected, K.HOLD_PLACED))


@pytest.mark.parametrize("state", list(S))
def test_a_mark_changes_nothing_but_itself(state: IncidentState) -> None:
    path = TO_STATE[state]
    before = fold(events(*path))[NAME]
    reviewed = fold(events(*path, K.DIAGNOSIS_REVIEWED))[NAME]
    assert reviewed.review is not None and reviewed.review.right is False and reviewed.review.by == "alice"
    assert replace(reviewed, review=None, last_event_id=before.last_event_id) == before
    right = {"verdict": "right", "by": "bob", "because": ""}
    newest = made_event(seq=20, kind=K.DIAGNOSIS_REVIEWED, wall_at=20.0, body=right, incident_id=NAME)
    reported = fold([*events(*path, K.DIAGNOSIS_REVIEWED), newest])[NAME].review
    assert reported is not None and reported.right is True and reported.by == "bob"
    with pytest.raises(InvalidTransition, match="neither right nor wrong"):
        fold(events(*path, K.DIAGNOSIS_REVIEWED, diagnosis_reviewed={"verdict": "maybe", "by": "bob"}))


# --- one fold for all readers -------------------------------------------------------------------------------------

OTHERS = {K.INCIDENT_UPDATED: 3, K.PLAN_CREATED: 3, K.PLAN_BLOCKED: 2, K.ACTION_FAILED: 3}
"""Kinds that differ from one another when they repeat, and in how many ways."""


def _said(kind: EventKind, variant: int, plan: Plan) -> dict[str, Any]:
    match kind:
        case K.INCIDENT_OPENED | K.INCIDENT_UPDATED:
            changed = replace(D, onset=D.onset + variant, detected_at=D.detected_at + variant, because=f"{variant}")
            suspect = replace(D.suspects[0], incarnation=1 + variant)
            return {"diagnosis": replace(changed, suspects=(suspect,)).to_dict()}
        case K.PLAN_CREATED | K.PLAN_PROPOSED | K.ACTION_STARTED:
            return {**BODY[kind], "plan": plan.to_dict()}
        case K.PLAN_BLOCKED | K.ACTION_FAILED:
            return {**BODY[kind], "digest": plan.digest, "because": f"{kind} {variant}"}
        case _ if "digest" in BODY[kind]:
            return {**BODY[kind], "digest": plan.digest}
    return BODY[kind]


@given(st.data())
def test_all_readers_of_valid_events_see_the_same_incident(data: st.DataObject) -> None:
    """Recovery folds strictly, views leniently. What the views derive is compared with the events themselves."""
    said: list[Event] = []
    plan, incident = PLAN, None
    for seq in range(1, data.draw(st.integers(2, 25)) + 1):
        fitting = []
        for kind in INCIDENT_KINDS:
            variant = data.draw(st.integers(0, OTHERS.get(kind, 1) - 1)) if seq > 1 else 0
            target = replace(PLAN.targets[0], incarnation=1 + variant)
            newest = replace(PLAN, targets=(target,)) if kind is K.PLAN_CREATED else plan
            body = _said(kind, variant, newest)
            event = made_event(seq=seq, kind=kind, wall_at=float(seq), body=body, incident_id=NAME)
            with suppress(InvalidTransition):
                apply(incident, event)
                fitting.append((event, newest))
        event, plan = data.draw(st.sampled_from(fitting))
        incident = apply(incident, event)
        said.append(event)
    assert fold(said) == fold(said, strict=False) == {NAME: incident}
    (summary,) = summarize_incidents(said, {}, ()).summaries
    assert summary.incident == incident
    reported, payloads = summary.to_dict(0.0), [(e.wall_at, e.payload) for e in said]
    diagnoses = [p.diagnosis for _, p in payloads if isinstance(p, IncidentOpened | IncidentUpdated)]
    assert (reported["onset"], reported["detected_at"]) == (diagnoses[0].onset, diagnoses[0].detected_at)
    assert reported["because"] == diagnoses[-1].because
    assert summary.incident.suspects == tuple(s for d in diagnoses for s in d.suspects)
    plans = [p.plan for _, p in payloads if isinstance(p, PlanCreated)]
    assert reported["num_plans"] == len(plans) and reported["action"] == (str(plans[-1].action) if plans else None)
    assert reported["held"] == [p.because for _, p in payloads if isinstance(p, PlanBlocked)]
    assert reported["action_failed"] == [p.because for _, p in payloads if isinstance(p, ActionFailed)]
    started = [at for at, p in payloads if isinstance(p, ActionStarted)]
    assert summary.incident.action_started_at == (started[0] if started else None)
    verified = [(at, p.because) for at, p in payloads if isinstance(p, IncidentVerified)]
    assert (summary.incident.verified_at, reported["verified"]) == (verified[-1] if verified else (None, ""))
    closed = [(at, p.outcome, p.because) for at, p in payloads if isinstance(p, IncidentClosed)]
    assert (reported["closed_at"], reported["outcome"], reported["closed_because"]) == (
        closed[-1] if closed else (None, "open", "")
    )


@pytest.mark.parametrize("missing", [K.PLAN_CREATED, K.ACTION_STARTED, K.ACTION_DONE, K.INCIDENT_VERIFIED])
def test_a_missing_line_does_not_hide_those_after_it_from_a_page(missing: EventKind) -> None:
    resolved = {"incident_closed": {"outcome": "resolved", "because": "it works"}}
    whole = events(*TO_STATE[S.VERIFYING], K.INCIDENT_VERIFIED, K.INCIDENT_CLOSED, **resolved)
    rest = [e for e in whole if e.kind is not missing]
    with pytest.raises(InvalidTransition):
        fold(rest)
    seen = fold(rest, strict=False)[NAME]
    assert (seen.state, seen.outcome, seen.closed_at) == (S.CLOSED, IncidentOutcome.RESOLVED, 6.0)
    assert seen.verified_at == (None if missing is K.INCIDENT_VERIFIED else 5.0)


def test_a_page_skips_what_it_cannot_read() -> None:
    opened = events(K.INCIDENT_OPENED)
    assert fold(events(K.PLAN_CREATED), strict=False) == {}
    assert fold([*opened, *events(K.INCIDENT_OPENED)], strict=False) == fold(opened)
    newer = events(*TO_STATE[S.ACTING], K.ACTION_FAILED, action_failed={"failure": "of a later version"})
    assert fold(newer, strict=False) == fold(newer[:-1])
