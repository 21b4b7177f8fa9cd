"""The next move of an incident: one journal event, or one call of the actuator. Pure; `watch` performs it and asks again.

Each move is keyed by (incident, attempt, what), so that a watch that died before or after a move makes it once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.faults import Remedy
from rolecall.core.ids import split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    IncidentClosed,
    IncidentVerified,
    OncallPaged,
    Payload,
    PlanBlocked,
    PlanCreated,
    PlanExpired,
    PlanProposed,
)
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.guards import check
from rolecall.recovery.incidents.incident import Attempt, Decision, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.policy import PolicyDecision, PolicyInput
from rolecall.recovery.verification import Progress, verify

CLEAR_SECONDS = 5.0
"""How long a diagnosis must not stand, its suspects making progress, before the fault counts as over."""

K, S = EventKind, IncidentState
A_PERSONS_NO = frozenset({K.HOLD_PLACED, K.PLAN_REJECTED})
"""What a person may say while a watch is about to begin a plan, or to let it lapse: then it decides again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Write this event; nothing is written if its key stands already."""

    payload: Payload
    key: str
    unless: frozenset[EventKind] = frozenset()  # a person's word that came meanwhile: decide again


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Ask policy, and write its plan."""

    question: PolicyInput
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Perform:
    """Call the actuator."""

    plan: Plan
    number: int


Move = Append | Decide | Perform


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the next move depends on, beside the incident itself. Times are wall seconds."""

    now: float
    fleet: FleetView
    config: RecoveryConfig
    incidents: Sequence[Incident]
    paused: str | None = None
    stopping: str | None = None
    ended: str | None = None  # why the run is over
    absent_seconds: float = 0.0  # for how long no diagnosis of this incident has stood
    progress: Progress = field(default_factory=dict)
    channel: str = "log"


def next_step(i: Incident, s: Situation, question: PolicyInput) -> Move | None:
    """What to do now; None: wait."""
    if i.state is S.CLOSED:
        return None
    if s.ended is not None and i.state is not S.VERIFYING:
        return _close(i, IncidentOutcome.ESCALATED, f"the run ended before it was resolved: {s.ended}")
    if i.state is S.OPEN or i.attempt is None:
        return Decide(question=question, key=f"{i.incident_id}:plan:{len(i.attempts) + 1}")
    if i.state is S.PLANNED:
        return _from_planned(i, i.attempt, s)
    if i.state is S.PROPOSED:
        return _from_proposed(i, i.attempt, s)
    if i.state is S.ACTING:
        return _from_acting(i, i.attempt, s)
    return _from_verifying(i, i.attempt, s)


def plan_created(verdict: PolicyDecision, question: PolicyInput) -> PlanCreated:
    """The plan, and all that it was made from."""
    return PlanCreated(
        plan=verdict.plan,
        page_oncall=verdict.page_oncall,
        outcome=str(verdict.outcome),
        question=question.to_dict(),
    )


# --- states -------------------------------------------------------------------------------------------------------


def _from_planned(i: Incident, a: Attempt, s: Situation) -> Move | None:
    if a.plan.action is ActionKind.TOLERATE:
        if a.page_oncall:
            called = _page_oncall(i, "nothing_helps", a.plan.because, s)
            if called is not None:
                return called
        return _close(i, IncidentOutcome(a.outcome), a.plan.because)
    if a.decision is Decision.REJECTED:
        return _rejected(i, a, s)
    over = _over(i, s)
    if over:
        return _close(
            i, IncidentOutcome.OBSERVED if s.config.mode == "observe" else IncidentOutcome.SELF_RECOVERED, over
        )
    told = _hold_ended(i, a, s)
    if told is not None:
        return told
    guarded = check(a.plan, i, **_guard_inputs(s))
    if guarded.passed:
        if s.config.mode == "approve" and not i.requested_by_operator:
            expires_at = s.now + s.config.approval_timeout_seconds
            proposed = PlanProposed(digest=a.plan.digest, plan=a.plan, expires_at=expires_at)
            return _about(i, a, "proposed", proposed)
        return _start(i, a)
    if guarded.guard not in a.held_by:
        blocked = PlanBlocked(digest=a.plan.digest, guard=guarded.guard, because=guarded.because)
        return _about(i, a, f"held:{guarded.guard}", blocked)
    if (
        i.requested_by_operator
        and s.now > max(i.opened_at, a.hold.until if a.hold else 0.0) + s.config.approval_timeout_seconds
    ):
        because = f"the request was held for {s.config.approval_timeout_seconds:.0f} s: {guarded.because}"
        return _page_oncall(i, "request_held", because, s) or _close(i, IncidentOutcome.ESCALATED, because)
    if guarded.page_oncall:
        return _page_oncall(i, guarded.guard, guarded.because, s)
    return None


def _from_proposed(i: Incident, a: Attempt, s: Situation) -> Move | None:
    if a.decision is Decision.REJECTED:
        return _rejected(i, a, s)
    over = _over(i, s)
    if a.decision is Decision.EXPIRED:
        if over:
            return _close(i, IncidentOutcome.SELF_RECOVERED, over)
        because = f"the plan lapsed: {a.decision_because}"
        return _page_oncall(i, "expired", because, s) or _close(i, IncidentOutcome.ESCALATED, because)
    if over:
        return _expire(i, a, over)
    told = _hold_ended(i, a, s)
    if told is not None:
        return told
    if s.now > (a.expires_at or 0.0):
        seconds = s.config.approval_timeout_seconds
        what = "approved and held by a guard" if a.decision is Decision.APPROVED else "not approved"
        return _expire(i, a, f"{what} for {seconds:.0f} s")
    if a.decision is not Decision.APPROVED:
        return None
    guarded = check(a.plan, i, **_guard_inputs(s))
    if guarded.passed:
        return _start(i, a, approved_by=a.decided_by)
    if guarded.guard not in a.held_by:
        blocked = PlanBlocked(digest=a.plan.digest, guard=guarded.guard, because=guarded.because)
        return _about(i, a, f"held:{guarded.guard}", blocked)
    return _page_oncall(i, guarded.guard, guarded.because, s) if guarded.page_oncall else None


def _from_acting(i: Incident, a: Attempt, s: Situation) -> Move | None:
    # Found again after a restart, the action may have been performed or not: performing is idempotent, so it is
    # repeated - but nothing that has not happened yet begins in a pause.
    not_yet = [t for t in a.plan.targets if (v := s.fleet.find(t.replica)) and v.desired_incarnation == t.incarnation]
    begins = bool(not_yet) or (a.plan.action is ActionKind.STOP_JOB and s.stopping is None)
    if begins and (s.paused is not None or s.config.mode == "observe"):
        return None
    return Perform(plan=a.plan, number=a.number)


def _from_verifying(i: Incident, a: Attempt, s: Situation) -> Move | None:
    if a.plan.action is ActionKind.STOP_JOB:
        return _page_oncall(i, "job_stopped", a.plan.because, s) or _close(i, IncidentOutcome.ESCALATED, a.plan.because)
    if i.verified_at is not None:
        return _close(i, IncidentOutcome.RESOLVED, a.plan.because)
    seen = verify(
        a.plan,
        fleet=s.fleet,
        progress=s.progress,
        done_at=a.done_at or s.now,
        now=s.now,
        verification_timeout_seconds=s.config.verification_timeout_seconds,
    )
    if seen.resolved:
        verified = IncidentVerified(digest=a.plan.digest, because=seen.because, serving_at=seen.serving_at)
        return _about(i, a, "verified", verified)
    if s.ended is not None:
        return _close(i, IncidentOutcome.ESCALATED, f"the run ended before it was resolved: {s.ended}")
    if seen.failure is not None:
        return failed(i, a, seen.failure, seen.because)
    return None


# --- pieces -------------------------------------------------------------------------------------------------------


def failed(i: Incident, a: Attempt, failure: str, because: str) -> Append:
    return _about(i, a, "failed", ActionFailed(digest=a.plan.digest, failure=str(failure), because=because))


def done(i: Incident, a: Attempt, result: Mapping[str, Any]) -> Append:
    return _about(i, a, "done", ActionDone(digest=a.plan.digest, result=dict(result)))


def decision_key(incident_id: str, number: int) -> str:
    """Approval, rejection and lapse of one proposal share this key: whichever is written first is the decision."""
    return f"{incident_id}:decision:{number}"


def _start(i: Incident, a: Attempt, approved_by: str = "") -> Append:
    started = ActionStarted(digest=a.plan.digest, plan=a.plan, approved_by=approved_by)
    return replace(_about(i, a, "started", started), unless=A_PERSONS_NO)


def _rejected(i: Incident, a: Attempt, s: Situation) -> Append:
    because = f"rejected by {a.decided_by}" + (f": {a.decision_because}" if a.decision_because else "")
    return _page_oncall(i, "rejected", because, s) or _close(i, IncidentOutcome.ESCALATED, because)


def _hold_ended(i: Incident, a: Attempt, s: Situation) -> Append | None:
    """Who held a plan and forgot it hears so once, before it goes on."""
    hold = a.hold
    if hold is None or hold.lifted or hold.active(s.now):
        return None
    because = f"the hold by {hold.by} is over ({hold.because}): {a.plan.action}, because {a.plan.because}, goes on"
    return _page_oncall(i, f"hold_over:{hold.number}", because, s)


def _expire(i: Incident, a: Attempt, because: str) -> Append:
    key = f"{i.incident_id}:expired:{a.number}" if a.decision else decision_key(i.incident_id, a.number)
    return Append(payload=PlanExpired(digest=a.plan.digest, because=because), key=key, unless=A_PERSONS_NO)


def _about(i: Incident, a: Attempt, what: str, payload: Payload) -> Append:
    return Append(payload=payload, key=f"{i.incident_id}:{what}:{a.number}")


def _close(i: Incident, outcome: IncidentOutcome, because: str) -> Append:
    return Append(payload=IncidentClosed(outcome=str(outcome), because=because), key=f"{i.incident_id}:closed")


def _page_oncall(i: Incident, topic: str, because: str, s: Situation) -> Append | None:
    """Once for each topic; None when it was done."""
    if topic in i.page_topics:
        return None
    paged = OncallPaged(topic=topic, because=because, channel=s.channel)
    return Append(payload=paged, key=f"{i.incident_id}:person:{topic}")


def _guard_inputs(s: Situation) -> dict[str, Any]:
    return {
        "fleet": s.fleet,
        "config": s.config,
        "incidents": s.incidents,
        "paused": s.paused,
        "stopping": s.stopping,
        "now": s.now,
    }


def superseded(i: Incident, incidents: Sequence[Incident]) -> str:
    """The incident that explains this one better: the job's own code failing takes replicas along."""
    if i.diagnosis.fault_class.spec.remedy is Remedy.STOP:
        return ""
    for other in incidents:
        code = other.diagnosis.fault_class.spec.remedy is Remedy.STOP and other.opened_at >= i.opened_at
        roles = {split_replica(r)[0] for r in i.named}
        if code and (other.named.keys() & i.named.keys() or other.diagnosis.role_at_fault in roles):
            return other.incident_id
    return ""


def _over(i: Incident, s: Situation) -> str:
    """Why the fault is over without us; empty while it is not, or nobody can tell."""
    better = superseded(i, s.incidents)
    if better:
        return f"{better} explains it: the job's own code"
    if not i.diagnosis.suspects:
        return "it stands no longer" if s.absent_seconds >= CLEAR_SECONDS else ""
    # A retry is about what our own attempt made, not about the incarnation first named.
    meant = {**i.named, **i.touched}
    words = []
    for suspect in i.diagnosis.suspects:
        incarnation = meant.get(suspect.replica)
        view = s.fleet.find(suspect.replica) if suspect.replica else None
        if view is not None and incarnation is not None and view.incarnation > incarnation:
            if view.state is not ReplicaState.SERVING:
                return ""
            words.append(f"{suspect.replica}#{view.incarnation} took its place and serves")
            continue
        moves, seen = s.progress.get(suspect.replica, (False, "")) if suspect.replica else (True, "it stands no longer")
        if i.requested_by_operator or not moves or s.absent_seconds < CLEAR_SECONDS:
            return ""
        words.append(f"{suspect.replica or suspect.node}: {seen}")
    return "; ".join(words)
