"""The status of an incident, in the same words on every page: in one or two words, and in a sentence. Pure."""

from collections.abc import Mapping

from rolecall.core.text import plain, utc
from rolecall.dashboards.data.incident_titles import MODE_OBSERVE, would_do
from rolecall.dashboards.pages.operations.plans import PlanStatus, plan_row
from rolecall.recovery.incidents import UNDER_REPAIR, Incident

SET_ASIDE = "set aside"
DIAGNOSED = "diagnosed"
ONLY_OBSERVED = "only observed"
NO_ACTION = "no action"
ACTION_FAILED = "action failed"
RUN_ENDED = "ended"
"""Also the outcome of what ends with its run."""
EXPIRED = "approval expired"
_OF_PLAN: Mapping[PlanStatus, str] = {
    **{status: str(status) for status in PlanStatus},
    PlanStatus.APPROVED: "approved",
    PlanStatus.NOT_EXECUTED: ONLY_OBSERVED,
    PlanStatus.EXPIRED: EXPIRED,
}

GLYPHS: Mapping[str, str] = {
    DIAGNOSED: "●",
    ONLY_OBSERVED: "◎",
    NO_ACTION: "–",
    PlanStatus.AWAITS_APPROVAL: "?",
    PlanStatus.HELD: "‖",
    PlanStatus.BLOCKED: "‖",
    "approved": "✓",
    PlanStatus.DUE: "▷",
    EXPIRED: "◇",
    PlanStatus.REJECTED: "✗",
    ACTION_FAILED: "✗",
    "acting": "▶",
    "verifying": "◐",
    "resolved": "✓",
    "tolerated": "–",
    RUN_ENDED: "○",
    "self_recovered": "⊘",
    "escalated": "✗",
    SET_ASIDE: "⚠",
}
"""A glyph for each status, so that colour is not the only cue."""


NOT_YET_KNOWN = "not yet known"
"""The cost of an open incident without a known loss. It is never shown as 0."""


def status_of(incident: Incident, mode: str, now: float, *, ended: bool = False) -> str:
    """One of `GLYPHS`: the outcome of a closed incident, else the state of its newest plan. `mode`: of the watch
    for this incident. `ended`: the run has ended, so that nothing goes on."""
    attempt = incident.attempt
    if incident.outcome is not None:
        return str(incident.outcome)
    if ended:
        return RUN_ENDED
    if attempt is None:
        return DIAGNOSED
    if incident.state in UNDER_REPAIR:
        return str(incident.state)
    if attempt.started_at is None and mode == MODE_OBSERVE:
        return ONLY_OBSERVED
    if attempt.failure is not None:
        return ACTION_FAILED
    row = plan_row(incident, mode, now)
    return NO_ACTION if row is None else _OF_PLAN[row.status]


def doing(incident: Incident, mode: str, now: float, *, ended: bool = False) -> str:
    """What is being done about an open incident, in words. `ended`: the run has ended, at `now`."""
    return plain(("the run has ended. Last: " if ended else "") + _doing(incident, mode, now))


def _doing(incident: Incident, mode: str, now: float) -> str:
    attempt, row = incident.attempt, plan_row(incident, mode, now)
    if attempt is None:
        return "planning the recovery"
    plan = attempt.plan
    match status_of(incident, mode, now):
        case "acting":
            return f"in progress: {plan.intent}"
        case "verifying":
            return f"done: {plan.intent}; waiting for the replacement to make progress"
        case "only observed":
            return f"nothing, mode observe; {would_do(incident)}"
        case "action failed":
            return f"failed: {plan.intent}: {attempt.failed_because}. Planning again"
        case "no action":
            return f"nothing: {plan.because}"
        case "approval expired":
            at = "" if attempt.expires_at is None else f" at {utc(attempt.expires_at)}"
            return f"nothing: the approval expired{at}. The plan was to {plan.intent}"
        case "rejected":
            why = f": {attempt.decision_because}" if attempt.decision_because else ""
            return f"nothing: {attempt.decided_by or 'an operator'} rejected the plan to {plan.intent}{why}"
        case "awaits approval":
            return f"waiting for approval to {plan.intent}"
        case "on hold" if row is not None and row.hold is not None:
            return f"on hold by {row.hold.by} until {row.hold.until_text}: {plan.intent}"
        case "blocked by a guard":
            return f"blocked ({'; '.join(attempt.held_because)}): {plan.intent}"
        case "approved":
            return f"approved by {attempt.decided_by or 'an operator'}, guards are checked again: {plan.intent}"
    return f"next: {plan.intent}"
