"""Incidents as frozen values: states, outcomes, plans, and operator decisions. Made from journal events
(`projection`)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan

OPERATOR = "operator"
"""`Diagnosis.detectors` of a replacement that an operator requested."""
RIGHT, WRONG = "right", "wrong"
"""Verdicts of a diagnosis review."""


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
    OBSERVED = "observed"  # mode observe: the fault ended without rolecall
    SELF_RECOVERED = "self_recovered"
    ESCALATED = "escalated"


class ActionFailure(StrEnum):
    """How an action failed; the policy escalates each kind differently."""

    DIED = "died"  # the replacement ended before it made progress
    NO_PROGRESS = "no_progress"  # none was seen within `verification_timeout_seconds`
    REFUSED = "refused"  # the actuator could not perform it


class Decision(StrEnum):
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"


S = IncidentState
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
    """One plan and its outcome. Times are wall seconds of the journal."""

    number: int  # from 1
    plan: Plan
    page_oncall: bool
    outcome: str  # what closes the incident when the plan is to do nothing
    made_at: float
    held_by: frozenset[str] = frozenset()  # guards that have blocked it
    expires_at: float | None = None  # of its proposal; at least its approval time after the end of a hold
    approval_timeout_seconds: float = 0.0  # of its proposal
    hold: Hold | None = None  # the newest
    decision: Decision | None = None
    decided_by: str = ""
    decision_because: str = ""
    started_at: float | None = None
    done_at: float | None = None
    failure: ActionFailure | None = None
    failed_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    incident_id: str
    state: IncidentState
    diagnosis: Diagnosis
    opened_at: float
    seen_keys: frozenset[str]  # every diagnosis key attributed to this incident
    attempts: tuple[Attempt, ...] = ()
    verified_at: float | None = None
    closed_at: float | None = None
    outcome: IncidentOutcome | None = None
    because: str = ""  # of the close
    page_topics: frozenset[str] = frozenset()
    page_reason: str = ""  # of the last page
    mark: DiagnosisReview | None = None  # the newest
    last_event_id: str = ""
    story: tuple[str, ...] = field(default=(), compare=False)

    @property
    def attempt(self) -> Attempt | None:
        """The newest plan."""
        return self.attempts[-1] if self.attempts else None

    @property
    def last_seq(self) -> int:
        """Journal line of its newest event."""
        return int(self.last_event_id.removeprefix("e"))

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
    def named(self) -> dict[str, int | None]:
        """replica -> incarnation that the diagnosis names."""
        return {s.replica: s.incarnation for s in self.diagnosis.suspects if s.replica}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One replica taken down by one started action; the limits count these."""

    incident_id: str
    replica: str
    at: float
    under_repair: bool


def evictions(incidents: Iterable[Incident], since: float) -> list[Eviction]:
    """Every replica on which an action started after `since` (wall seconds). Counted at the start, so that a crash
    between start and end does not refill the budget."""
    found = []
    for incident in incidents:
        for attempt in incident.attempts:
            started = attempt.started_at
            if started is None or attempt.plan.action is ActionKind.STOP_JOB:
                continue
            last = attempt is incident.attempt and incident.state in UNDER_REPAIR
            if started > since or last:
                found += [
                    Eviction(incident_id=incident.incident_id, replica=t.replica, at=started, under_repair=last)
                    for t in attempt.plan.targets
                ]
    return found
