"""An incident is a fold of its journal events. No other state of it exists, so a restarted watch knows all of it.

    open -> planned -> [proposed ->] acting -> verifying -> closed
      ^        |            |           |          |
      |        +- closed ---+           |          |        tolerated, self-recovered, or rejected
      +---------------------------------+----------+        the action failed: next plan, escalated

An operator may put a plan that has not started on hold: until the hold ends it does not start and its proposal does not
expire. A review of the diagnosis is valid in any state and does not change it.

`LEGAL` lists the states in which each event is valid; anything else raises `InvalidTransition` with the incident's
history. Pure: events in, frozen values out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rolecall.core.diagnosis import Plan
from rolecall.core.errors import InvalidTransition
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import (
    ActionFailed,
    DiagnosisReviewed,
    HoldPlaced,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    OncallPaged,
    PlanBlocked,
    PlanCreated,
    PlanProposed,
)
from rolecall.recovery.incidents.incident import (
    NOT_STARTED,
    RIGHT,
    WRONG,
    ActionFailure,
    Attempt,
    Decision,
    DiagnosisReview,
    Hold,
    Incident,
    IncidentOutcome,
    IncidentState,
)

STORY_LINES_MAX = 50
"""Events of an incident's history that an error shows."""
S, K = IncidentState, EventKind

LEGAL: Mapping[EventKind, frozenset[IncidentState | None]] = {
    K.INCIDENT_OPENED: frozenset({None}),
    K.INCIDENT_UPDATED: frozenset({S.OPEN, S.PLANNED, S.ACTING, S.VERIFYING}),
    K.PLAN_CREATED: frozenset({S.OPEN}),
    K.PLAN_BLOCKED: frozenset({S.PLANNED, S.PROPOSED}),
    K.PLAN_PROPOSED: frozenset({S.PLANNED}),
    K.PLAN_APPROVED: frozenset({S.PROPOSED}),
    K.PLAN_REJECTED: NOT_STARTED,
    K.PLAN_EXPIRED: frozenset({S.PROPOSED}),
    K.HOLD_PLACED: NOT_STARTED,
    K.HOLD_LIFTED: NOT_STARTED,
    K.ACTION_STARTED: NOT_STARTED,
    K.ACTION_DONE: frozenset({S.ACTING}),
    K.ACTION_FAILED: frozenset({S.ACTING, S.VERIFYING}),
    K.INCIDENT_VERIFIED: frozenset({S.VERIFYING}),
    K.INCIDENT_CLOSED: frozenset(set(S) - {S.CLOSED}),
    K.ONCALL_PAGED: frozenset(set(S) - {S.CLOSED}),
    K.DIAGNOSIS_REVIEWED: frozenset(S),
}
INCIDENT_KINDS = tuple(LEGAL)


def apply(before: Incident | None, event: Event) -> Incident:
    """The incident after one more of its events.

    Raises:
        InvalidTransition: the event is not valid now; the message contains the incident's history.
    """
    line = f"{event.event_id} {event.kind} {_event_summary(event)}".rstrip()
    story = (*(before.story if before else ()), line)[-STORY_LINES_MAX:]
    state = before.state if before else None
    if state not in LEGAL[event.kind]:
        raise _invalid_event(before, event, story, "no such transition")
    if before is None:
        return replace(_opened(event), story=story)
    try:
        after = _MOVES[event.kind](before, event)
    except _InvalidIncidentEvent as e:
        raise _invalid_event(before, event, story, str(e)) from None
    return replace(after, last_event_id=event.event_id, story=story)


def fold(events: Iterable[Event]) -> dict[str, Incident]:
    """All incidents of a journal in order of opening; other events are skipped."""
    incidents: dict[str, Incident] = {}
    for event in events:
        if event.incident_id and event.kind in LEGAL:
            incidents[event.incident_id] = apply(incidents.get(event.incident_id), event)
    return incidents


class _InvalidIncidentEvent(Exception):
    pass


def _invalid_event(before: Incident | None, event: Event, story: tuple[str, ...], reason: str) -> InvalidTransition:
    return InvalidTransition(
        incident_id=str(event.incident_id),
        state=str(before.state) if before else "(unknown)",
        event=str(event.kind),
        reason=reason,
        story=story,
    )


def _event_summary(event: Event) -> str:
    payload = event.payload
    return str(payload.reason or getattr(payload, "outcome", "") or getattr(payload, "digest", ""))[:200]


def _opened(event: Event) -> Incident:
    diagnosis = event.as_(IncidentOpened).diagnosis
    return Incident(
        incident_id=str(event.incident_id),
        state=S.OPEN,
        diagnosis=diagnosis,
        opened_at=event.wall_at,
        seen_keys=frozenset({diagnosis.key}),
        last_event_id=event.event_id,
    )


def _current(incident: Incident, event: Event) -> Attempt:
    attempt = incident.attempt
    if attempt is None:
        raise _InvalidIncidentEvent("it has no plan")
    digest = getattr(event.payload, "digest", None)
    if digest != attempt.plan.digest:
        raise _InvalidIncidentEvent(f"it names plan {digest}, the plan is {attempt.plan.digest}")
    return attempt


def _with(incident: Incident, attempt: Attempt, state: IncidentState | None = None) -> Incident:
    return replace(incident, attempts=(*incident.attempts[:-1], attempt), state=state or incident.state)


def _updated(incident: Incident, event: Event) -> Incident:
    diagnosis = event.as_(IncidentUpdated).diagnosis
    # A plan made before this update is made again; an action in progress continues.
    rejected = incident.attempt is not None and incident.attempt.decision is Decision.REJECTED
    state = S.OPEN if incident.state is S.PLANNED and not rejected else incident.state
    return replace(incident, diagnosis=diagnosis, seen_keys=incident.seen_keys | {diagnosis.key}, state=state)


def _planned(incident: Incident, event: Event) -> Incident:
    created, before = event.as_(PlanCreated), incident.attempt
    plan = created.plan
    attempt = Attempt(
        number=len(incident.attempts) + 1,
        plan=plan,
        # A hold protects replicas: it carries over to a new plan for the same incarnations.
        hold=before.hold if before is not None and _taken_down(before.plan) & _taken_down(plan) else None,
        page_oncall=created.page_oncall,
        outcome=created.outcome,
        made_at=event.wall_at,
    )
    return replace(incident, attempts=(*incident.attempts, attempt), state=S.PLANNED)


def _taken_down(plan: Plan) -> set[tuple[str, int]]:
    return {(str(t.replica), t.incarnation) for t in plan.targets}


def _held(incident: Incident, event: Event) -> Incident:
    attempt = _current(incident, event)
    return _with(incident, replace(attempt, held_by=attempt.held_by | {event.as_(PlanBlocked).guard}))


def _proposed(incident: Incident, event: Event) -> Incident:
    attempt, expires_at = _current(incident, event), event.as_(PlanProposed).expires_at
    approval_timeout_seconds = expires_at - event.wall_at
    if attempt.hold is not None:
        expires_at = max(expires_at, attempt.hold.until + approval_timeout_seconds)
    return _with(
        incident, replace(attempt, expires_at=expires_at, approval_timeout_seconds=approval_timeout_seconds), S.PROPOSED
    )


def _decided(incident: Incident, event: Event) -> Incident:
    attempt = _current(incident, event)
    expired_after_approval = event.kind is K.PLAN_EXPIRED and attempt.decision is Decision.APPROVED
    if attempt.decision is not None and not expired_after_approval:
        raise _InvalidIncidentEvent(f"it was already {attempt.decision}")
    what = {K.PLAN_APPROVED: Decision.APPROVED, K.PLAN_REJECTED: Decision.REJECTED, K.PLAN_EXPIRED: Decision.EXPIRED}
    decided = replace(
        attempt,
        decision=what[event.kind],
        decided_by=str(getattr(event.payload, "by", "")),
        decision_because=event.payload.reason,
    )
    return _with(incident, decided)


def _hold(incident: Incident, event: Event) -> Incident:
    attempt, placed = _current(incident, event), event.as_(HoldPlaced)
    if attempt.decision in (Decision.REJECTED, Decision.EXPIRED):
        raise _InvalidIncidentEvent(f"it was already {attempt.decision}")
    hold = Hold(
        number=1 + max((a.hold.number for a in incident.attempts if a.hold is not None), default=0),
        by=placed.by,
        because=placed.because,
        until=placed.until,
    )
    return _with(incident, _until(attempt, hold))


def _lifted(incident: Incident, event: Event) -> Incident:
    attempt = _current(incident, event)
    if attempt.hold is None or attempt.hold.lifted:
        raise _InvalidIncidentEvent("it is not on hold")
    return _with(
        incident, _until(attempt, replace(attempt.hold, until=min(attempt.hold.until, event.wall_at), lifted=True))
    )


def _until(attempt: Attempt, hold: Hold) -> Attempt:
    if attempt.expires_at is None:
        return replace(attempt, hold=hold)
    return replace(attempt, hold=hold, expires_at=hold.until + attempt.approval_timeout_seconds)


def _apply_review(incident: Incident, event: Event) -> Incident:
    payload = event.as_(DiagnosisReviewed)
    if payload.verdict not in (RIGHT, WRONG):
        raise _InvalidIncidentEvent(f"verdict {payload.verdict!r} is neither {RIGHT} nor {WRONG}")
    mark = DiagnosisReview(right=payload.verdict == RIGHT, by=payload.by, because=payload.because, at=event.wall_at)
    return replace(incident, mark=mark)


def _started(incident: Incident, event: Event) -> Incident:
    attempt = _current(incident, event)
    if incident.state is S.PROPOSED and attempt.decision is not Decision.APPROVED:
        raise _InvalidIncidentEvent("the plan is not approved")
    if attempt.decision is Decision.REJECTED:
        raise _InvalidIncidentEvent("the plan was rejected")
    return _with(incident, replace(attempt, started_at=event.wall_at), S.ACTING)


def _done(incident: Incident, event: Event) -> Incident:
    return _with(incident, replace(_current(incident, event), done_at=event.wall_at), S.VERIFYING)


def _failed(incident: Incident, event: Event) -> Incident:
    payload = event.as_(ActionFailed)
    attempt = replace(_current(incident, event), failure=ActionFailure(payload.failure), failed_because=payload.because)
    return _with(incident, attempt, S.OPEN)


def _verified(incident: Incident, event: Event) -> Incident:
    return replace(incident, verified_at=event.wall_at)


def _closed(incident: Incident, event: Event) -> Incident:
    closed = event.as_(IncidentClosed)
    outcome = IncidentOutcome(closed.outcome)
    if outcome is IncidentOutcome.RESOLVED and incident.verified_at is None:
        raise _InvalidIncidentEvent("it was not verified, so it cannot be resolved")
    return replace(incident, state=S.CLOSED, closed_at=event.wall_at, outcome=outcome, because=closed.because)


def _apply_page(incident: Incident, event: Event) -> Incident:
    paged = event.as_(OncallPaged)
    return replace(incident, page_topics=incident.page_topics | {paged.topic}, page_reason=paged.because)


_MOVES = {
    K.INCIDENT_UPDATED: _updated,
    K.PLAN_CREATED: _planned,
    K.PLAN_BLOCKED: _held,
    K.PLAN_PROPOSED: _proposed,
    K.PLAN_APPROVED: _decided,
    K.PLAN_REJECTED: _decided,
    K.PLAN_EXPIRED: _decided,
    K.HOLD_PLACED: _hold,
    K.HOLD_LIFTED: _lifted,
    K.ACTION_STARTED: _started,
    K.ACTION_DONE: _done,
    K.ACTION_FAILED: _failed,
    K.INCIDENT_VERIFIED: _verified,
    K.INCIDENT_CLOSED: _closed,
    K.ONCALL_PAGED: _apply_page,
    K.DIAGNOSIS_REVIEWED: _apply_review,
}
