"""Incidents as frozen values, folded from their journal events. No other state of an incident exists, so a restarted
watch knows all of it. Pure, except what takes a journal.

    open -> planned -> [proposed ->] acting -> verifying -> closed
      ^        |            |           |          |
      |        +- closed ---+           |          |        tolerated, self recovered, ended, or rejected
      +---------------------------------+----------+        the action failed: next plan, escalated

A plan whose node or lender is gone before it begins, also after its approval, is made again: the incident is open.
In mode `observe` an incident stays planned, blocked by the mode, until its fault is over, whatever the plan is.

While an operator holds a plan, it does not start and its proposal does not expire. A review of the diagnosis is valid
in any state and does not change it.

`LEGAL` lists the states in which each event is valid. Recovery folds strictly: an invalid event raises
`InvalidTransition` with the incident's history. Reports and pages fold leniently, so that a damaged line does not hide
those after it. For valid events both give the same.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from rolecall.core.diagnosis import Diagnosis, Plan, Suspect, moved
from rolecall.core.errors import InvalidTransition
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    DiagnosisReviewed,
    HoldLifted,
    HoldPlaced,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    IncidentVerified,
    OncallPaged,
    PlanApproved,
    PlanBlocked,
    PlanCreated,
    PlanExpired,
    PlanProposed,
    PlanRejected,
)
from rolecall.detector.base.findings import ORPHAN

logger = logging.getLogger(__name__)

OPERATOR = "operator"
"""`Diagnosis.detectors` of a replacement that an operator requested."""
RIGHT, WRONG = "right", "wrong"
"""Verdicts of a diagnosis review."""

NO_CHANNEL = "log"
"""`OncallPaged.channel` where no notification channel is configured."""

WINDOW_NAME = "observations"
"""Journal window with what the detectors had read when the incident was opened."""
NUM_COLLECTIONS_MAX = 4
"""Collections of evidence for one incident."""
STORY_LINES_MAX = 50
"""Events of an incident's history that an error shows."""


class IncidentState(StrEnum):
    OPEN = "open"  # diagnosed; no plan, or the last one failed
    PLANNED = "planned"  # has a plan; blocked by guards, or the plan is to do nothing
    PROPOSED = "proposed"  # awaiting approval, or approved and blocked by guards
    ACTING = "acting"  # the action started and is not known to be done
    VERIFYING = "verifying"  # done; waiting to see progress
    CLOSED = "closed"


class IncidentOutcome(StrEnum):
    RESOLVED = "resolved"
    TOLERATED = "tolerated"  # no action is worth its cost
    SELF_RECOVERED = "self_recovered"  # the fault ended without an action of rolecall
    ENDED = "ended"  # mode observe: the run, or the processes of the suspects, ended; others may have their ranks
    ESCALATED = "escalated"


class ActionFailure(StrEnum):
    """How an action failed; the policy escalates each kind differently."""

    DIED = "died"  # the replacement ended before it made progress
    NOT_STARTED = "not_started"  # its node could not take a process
    NO_PROGRESS = "no_progress"  # none was seen within `verification_timeout_seconds`
    REFUSED = "refused"  # the actuator could not perform it


class Decision(StrEnum):
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"


S, K = IncidentState, EventKind
UNDECIDED = frozenset({S.OPEN, S.PLANNED, S.PROPOSED})
NOT_STARTED = frozenset({S.PLANNED, S.PROPOSED})
UNDER_REPAIR = frozenset({S.ACTING, S.VERIFYING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An operator's hold: the plan must not start. Times are wall seconds."""

    number: int  # of this incident, from 1
    by: str
    because: str
    until: float  # when it ends; once lifted, when it was lifted
    lifted: bool = False

    @property
    def until_text(self) -> str:
        try:
            return datetime.fromtimestamp(self.until, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (OverflowError, ValueError, OSError):  # out of the calendar's range
            return "an unknown time"

    def active(self, now: float) -> bool:
        return not self.lifted and now < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisReview:
    """An operator's verdict on a diagnosis."""

    right: bool
    by: str
    because: str
    at: float  # wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan and its outcome. Times are wall seconds of the journal, which may be set; `..._seq` are its lines, which
    tell what came first."""

    number: int  # from 1
    plan: Plan
    page_oncall: bool
    outcome: str  # what closes the incident when the plan is to do nothing
    made_at: float
    made_seq: int = 0
    held_by: frozenset[str] = frozenset()  # guards that block it; none once it was proposed or has begun
    held_because: tuple[str, ...] = ()  # their reasons, oldest first
    expires_at: float | None = None  # of its proposal; at least its approval time after the end of a hold
    approval_timeout_seconds: float = 0.0  # of its proposal
    hold: Hold | None = None  # the newest
    decision: Decision | None = None
    decided_by: str = ""
    decision_because: str = ""
    started_at: float | None = None
    started_seq: int = 0
    done_at: float | None = None
    failed_at: float | None = None
    failure: ActionFailure | None = None
    failed_because: str = ""

    def moved(self, seconds: float) -> Self:
        return replace(
            self,
            made_at=self.made_at + seconds,
            expires_at=_later(self.expires_at, seconds),
            hold=self.hold and replace(self.hold, until=self.hold.until + seconds),
            started_at=_later(self.started_at, seconds),
            done_at=_later(self.done_at, seconds),
            failed_at=_later(self.failed_at, seconds),
        )


def _later(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    incident_id: str
    state: IncidentState
    diagnosis: Diagnosis  # the newest
    opened_at: float
    seen_keys: frozenset[str]  # every diagnosis key attributed to this incident
    earlier_diagnoses: tuple[Diagnosis, ...] = ()  # before the newest, oldest first
    attempts: tuple[Attempt, ...] = ()
    opened_seq: int = 0
    verified_at: float | None = None
    verified_seq: int = 0
    verified_because: str = ""
    closed_at: float | None = None
    outcome: IncidentOutcome | None = None
    because: str = ""  # of the close
    page_topics: frozenset[str] = frozenset()
    page_reason: str = ""  # of the last page
    page_channel: str = ""  # of the last page
    review: DiagnosisReview | None = None  # the newest
    last_event_id: str = ""
    story: tuple[str, ...] = field(default=(), compare=False)

    @property
    def first_diagnosis(self) -> Diagnosis:
        """The one that opened it: its times are those of the fault, a newer one only knows more about it."""
        return self.diagnoses[0]

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """All, oldest first."""
        return (*self.earlier_diagnoses, self.diagnosis)

    @property
    def evidence_due(self) -> list[Diagnosis]:
        """What evidence is collected for, one collection each: the first diagnosis, and later ones that name others,
        with these alone."""
        due, named = list[Diagnosis](), set[tuple[object, ...]]()
        for diagnosis in self.diagnoses:
            further = {(s.node, s.replica, s.rank, s.incarnation): s for s in diagnosis.suspects}
            suspects = tuple(s for who, s in further.items() if who not in named)
            if suspects or not due:
                due.append(replace(diagnosis, suspects=suspects))
            named |= further.keys()
        return due[:NUM_COLLECTIONS_MAX]

    @property
    def told_before(self) -> tuple[Diagnosis, ...]:
        """Earlier diagnoses that say something else than the newest, oldest first, each sentence once."""
        told = {d.because: d for d in reversed(self.earlier_diagnoses) if d.because != self.diagnosis.because}
        return tuple(reversed(told.values()))

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Of all its diagnoses: they are updated, and a replacement may fail too."""
        return tuple(s for d in self.diagnoses for s in d.suspects)

    @property
    def action_started_at(self) -> float | None:
        """When the first action started."""
        return next((a.started_at for a in self.attempts if a.started_at is not None), None)

    @property
    def attempt(self) -> Attempt | None:
        """The newest plan."""
        return self.attempts[-1] if self.attempts else None

    @property
    def last_seq(self) -> int:
        """Journal line of its newest event."""
        return int(self.last_event_id.removeprefix("e"))

    @property
    def is_of_orphan(self) -> bool:
        """Whether an orphan is at fault: it may have another mode than what concerns replicas."""
        return ORPHAN in self.diagnosis.detectors

    @property
    def requested_by_operator(self) -> bool:
        return OPERATOR in self.diagnosis.detectors

    @property
    def failures(self) -> tuple[Attempt, ...]:
        return tuple(a for a in self.attempts if a.failure is not None)

    @property
    def touched(self) -> dict[str, int]:
        """replica -> newest incarnation that an action of this incident has started (or is starting)."""
        made: dict[str, int] = {}
        for attempt in self.attempts:
            if attempt.started_at is not None and attempt.failure is not ActionFailure.REFUSED:
                made.update({t.replica: t.incarnation + 1 for t in attempt.plan.targets})
        return made

    @property
    def handled(self) -> dict[str, int]:
        """`touched`, but once a restart is over without those of its replicas that were healthy: a later fault of one
        of them is a fault of its own."""
        if self.state in UNDER_REPAIR:
            return self.touched
        at_fault = {r for a in self.attempts for r in self.at_fault(a.plan)}
        return {r: incarnation for r, incarnation in self.touched.items() if r in at_fault}

    @property
    def named(self) -> dict[str, int | None]:
        """replica -> incarnation that the diagnosis names."""
        return {s.replica: s.incarnation for s in self.diagnosis.suspects if s.replica}

    @property
    def under_repair(self) -> frozenset[str]:
        """Replicas on which an action is performed, or awaits their progress."""
        if self.attempt is None or self.state not in UNDER_REPAIR:
            return frozenset()
        return self.attempt.plan.ends

    def moved(self, seconds: float) -> Self:
        """The same on a wall clock that was set by so much: everything is as long ago as it was."""
        return replace(
            self,
            diagnosis=moved(self.diagnosis, seconds),
            earlier_diagnoses=tuple(moved(d, seconds) for d in self.earlier_diagnoses),
            opened_at=self.opened_at + seconds,
            attempts=tuple(a.moved(seconds) for a in self.attempts),
            verified_at=_later(self.verified_at, seconds),
            closed_at=_later(self.closed_at, seconds),
        )

    def at_fault(self, plan: Plan) -> frozenset[str]:
        """Targets of one of its plans because of which it acts: a restart takes down healthy replicas too."""
        targets = frozenset(str(t.replica) for t in plan.targets)
        return targets & {s.replica for s in self.suspects} if plan.action.is_restart else targets


def paged_text(channel: str) -> str:
    """What a page did. Without a channel nobody is called, and no text may claim it."""
    nobody = "nobody was paged, because no notification channel is configured (recovery.notify)"
    return nobody if channel == NO_CHANNEL else f"on-call paged over {channel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One replica taken down by one started action because of a fault; the limits count these. `at_fault` False: it
    ended with one that is at fault."""

    incident_id: str
    replica: str
    at: float
    at_fault: bool = True


def evictions(incidents: Iterable[Incident], since: float) -> list[Eviction]:
    """Every replica at fault on which an action started after `since` (wall seconds), and every one that ended with it:
    of a restart not the healthy ones that it takes down too. Counted at the start, so that a crash between start and
    end does not refill the budget."""
    found: list[Eviction] = []
    for incident in incidents:
        for attempt in incident.attempts:
            at, plan = attempt.started_at, attempt.plan
            if at is None or at <= since:
                continue
            at_fault = incident.at_fault(plan)
            with_them = {str(t.replica) for t in plan.also_ends} - at_fault
            found += [Eviction(incident_id=incident.incident_id, replica=r, at=at) for r in sorted(at_fault)]
            found += [
                Eviction(incident_id=incident.incident_id, replica=r, at=at, at_fault=False) for r in sorted(with_them)
            ]
    return found


LEGAL: Mapping[EventKind, frozenset[IncidentState | None]] = {
    K.INCIDENT_OPENED: frozenset({None}),
    K.INCIDENT_UPDATED: frozenset(set(S) - {S.CLOSED}),
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
ABOUT_THE_PLAN = frozenset(
    {K.PLAN_BLOCKED, K.PLAN_PROPOSED, K.PLAN_APPROVED, K.PLAN_REJECTED, K.PLAN_EXPIRED, K.HOLD_PLACED, K.HOLD_LIFTED}
    | {K.ACTION_STARTED, K.ACTION_DONE, K.ACTION_FAILED}
)
"""Events about the newest plan, which they name by its digest."""


def fold(events: Iterable[Event], *, strict: bool = True) -> dict[str, Incident]:
    """All incidents of a journal in order of opening; other events are skipped. See `apply` and `apply_leniently`."""
    incidents: dict[str, Incident] = {}
    for event in events:
        if event.incident_id and event.kind in LEGAL:
            before = incidents.get(event.incident_id)
            after = apply(before, event) if strict else apply_leniently(before, event)
            if after is not None:
                incidents[event.incident_id] = after
    return incidents


def apply(before: Incident | None, event: Event) -> Incident:
    """The incident after one more of its events. Raises InvalidTransition: the event is not valid now; the message
    contains the incident's history."""
    reason = _why_invalid(before, event)
    if reason:
        raise InvalidTransition(
            incident_id=str(event.incident_id),
            state=str(before.state) if before else "(unknown)",
            event=str(event.kind),
            reason=reason,
            story=_story(before, event),
        )
    return _after(before, event) if before else _opened(event)


def apply_leniently(before: Incident | None, event: Event) -> Incident | None:
    """Like `apply`, but an event counts in any state, since one before it may be missing. What cannot be applied at all
    changes nothing: events before the incident was opened, a second opening, values that this version does not know."""
    if before is None:
        return _opened(event) if event.kind is K.INCIDENT_OPENED else None
    if event.kind is K.INCIDENT_OPENED:
        return before
    try:
        return _after(before, event)
    except ValueError:
        return before


def _story(before: Incident | None, event: Event) -> tuple[str, ...]:
    payload = event.payload
    text = str(payload.reason or getattr(payload, "outcome", "") or getattr(payload, "digest", ""))[:200]
    line = f"{event.event_id} {event.kind} {text}".rstrip()
    return (*(before.story if before else ()), line)[-STORY_LINES_MAX:]


def _why_invalid(incident: Incident | None, event: Event) -> str:
    """Empty for a valid event."""
    if (incident.state if incident else None) not in LEGAL[event.kind]:
        return "no such transition"
    if incident is None:
        return ""
    attempt, payload = incident.attempt, event.payload
    if event.kind in ABOUT_THE_PLAN:
        digest = getattr(payload, "digest", None)
        if attempt is None:
            return "it has no plan"
        if digest != attempt.plan.digest:
            return f"it names plan {digest}, the plan is {attempt.plan.digest}"
    decision = attempt.decision if attempt else None
    hold = attempt.hold if attempt else None
    match payload:
        case PlanExpired() if decision is Decision.APPROVED:
            return ""  # approved too late
        case PlanApproved() | PlanRejected() | PlanExpired() if decision is not None:
            return f"it was already {decision}"
        case HoldPlaced() if decision in (Decision.REJECTED, Decision.EXPIRED):
            return f"it was already {decision}"
        case HoldLifted() if hold is None or hold.lifted:
            return "it is not on hold"
        case ActionStarted() if incident.state is S.PROPOSED and decision is not Decision.APPROVED:
            return "the plan is not approved"
        case ActionStarted() if decision is Decision.REJECTED:
            return "the plan was rejected"
        case DiagnosisReviewed(verdict=verdict) if verdict not in (RIGHT, WRONG):
            return f"verdict {verdict!r} is neither {RIGHT} nor {WRONG}"
        case IncidentClosed(outcome=IncidentOutcome.RESOLVED) if incident.verified_at is None:
            return "it was not verified, so it cannot be resolved"
    return ""


def _opened(event: Event) -> Incident:
    diagnosis = event.as_(IncidentOpened).diagnosis
    return Incident(
        incident_id=str(event.incident_id),
        state=S.OPEN,
        diagnosis=diagnosis,
        opened_at=event.wall_at,
        opened_seq=event.seq,
        seen_keys=frozenset({diagnosis.key}),
        last_event_id=event.event_id,
        story=_story(None, event),
    )


def _after(incident: Incident, event: Event) -> Incident:
    if event.kind in ABOUT_THE_PLAN:
        attempt = incident.attempt
        changed = (*incident.attempts[:-1], _of_plan(incident, attempt, event)) if attempt else incident.attempts
        after = replace(incident, attempts=changed, state=_NEXT_STATE.get(event.kind, incident.state))
    else:
        after = _of_incident(incident, event)
    return replace(after, last_event_id=event.event_id, story=_story(incident, event))


_NEXT_STATE = {
    K.PLAN_PROPOSED: S.PROPOSED,
    K.ACTION_STARTED: S.ACTING,
    K.ACTION_DONE: S.VERIFYING,
    K.ACTION_FAILED: S.OPEN,
}
_DECISIONS = {K.PLAN_APPROVED: Decision.APPROVED, K.PLAN_REJECTED: Decision.REJECTED, K.PLAN_EXPIRED: Decision.EXPIRED}


def _of_incident(incident: Incident, event: Event) -> Incident:
    match event.payload:
        case IncidentUpdated(diagnosis=diagnosis):
            # A plan made before this update is made again; an action in progress continues.
            rejected = incident.attempt is not None and incident.attempt.decision is Decision.REJECTED
            return replace(
                incident,
                diagnosis=diagnosis,
                earlier_diagnoses=(*incident.earlier_diagnoses, incident.diagnosis),
                seen_keys=incident.seen_keys | {diagnosis.key},
                state=S.OPEN if incident.state in NOT_STARTED and not rejected else incident.state,
            )
        case PlanCreated(plan=plan) as created:
            before = incident.attempt
            attempt = Attempt(
                number=len(incident.attempts) + 1,
                plan=plan,
                # A hold protects replicas: it carries over to a new plan for the same incarnations.
                hold=before.hold if before is not None and _taken_down(before.plan) & _taken_down(plan) else None,
                page_oncall=created.page_oncall,
                outcome=created.outcome,
                made_at=event.wall_at,
                made_seq=event.seq,
            )
            return replace(incident, attempts=(*incident.attempts, attempt), state=S.PLANNED)
        case IncidentVerified(because=because):
            return replace(incident, verified_at=event.wall_at, verified_seq=event.seq, verified_because=because)
        case IncidentClosed(outcome=outcome, because=because):
            result = IncidentOutcome(outcome)
            return replace(incident, state=S.CLOSED, closed_at=event.wall_at, outcome=result, because=because)
        case OncallPaged(topic=topic, because=because, channel=channel):
            topics = incident.page_topics | {topic}
            return replace(incident, page_topics=topics, page_reason=because, page_channel=channel)
        case DiagnosisReviewed(verdict=verdict, by=by, because=because):
            review = DiagnosisReview(right=verdict == RIGHT, by=by, because=because, at=event.wall_at)
            return replace(incident, review=review)
    return incident


def _taken_down(plan: Plan) -> set[tuple[str, int]]:
    return {(str(t.replica), t.incarnation) for t in plan.targets}


def _of_plan(incident: Incident, attempt: Attempt, event: Event) -> Attempt:
    match event.payload:
        case PlanBlocked(guard=guard, because=because):
            return replace(attempt, held_by=attempt.held_by | {guard}, held_because=(*attempt.held_because, because))
        case PlanProposed(expires_at=expires_at):
            approval_timeout_seconds = expires_at - event.wall_at
            if attempt.hold is not None:
                expires_at = max(expires_at, attempt.hold.until + approval_timeout_seconds)
            passed = replace(attempt, held_by=frozenset())
            return replace(passed, expires_at=expires_at, approval_timeout_seconds=approval_timeout_seconds)
        case PlanApproved() | PlanRejected() | PlanExpired() as decided:
            by, reason = str(getattr(decided, "by", "")), decided.reason
            return replace(attempt, decision=_DECISIONS[event.kind], decided_by=by, decision_because=reason)
        case HoldPlaced(by=by, because=because, until=until):
            number = 1 + max((a.hold.number for a in incident.attempts if a.hold is not None), default=0)
            return _until(attempt, Hold(number=number, by=by, because=because, until=until))
        case HoldLifted() if attempt.hold is not None:
            return _until(attempt, replace(attempt.hold, until=min(attempt.hold.until, event.wall_at), lifted=True))
        case ActionStarted():
            return replace(attempt, started_at=event.wall_at, started_seq=event.seq, held_by=frozenset())
        case ActionDone():
            return replace(attempt, done_at=event.wall_at)
        case ActionFailed(failure=failure, because=because):
            failed = ActionFailure(failure)
            return replace(attempt, failed_at=event.wall_at, failure=failed, failed_because=because)
    return attempt


def _until(attempt: Attempt, hold: Hold) -> Attempt:
    if attempt.expires_at is None:
        return replace(attempt, hold=hold)
    return replace(attempt, hold=hold, expires_at=hold.until + attempt.approval_timeout_seconds)


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot represent (NaN, infinity)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def storable(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis as the journal stores it, so that decisions use exactly the stored input."""
    cleaned = finite(diagnosis.to_dict())
    for evidence in cleaned["evidence"]:
        evidence["values"] = {k: v for k, v in evidence["values"].items() if v is not None}
    times = {k: cleaned[k] if cleaned[k] is not None else 0.0 for k in ("onset", "detected_at", "confidence")}
    return Diagnosis.from_dict({**cleaned, **times})
