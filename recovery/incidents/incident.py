"""What an incident is: its states and outcomes, its plans and what people said of them, as frozen values.

They are made from journal events and from nothing else (`incident_events`). Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan

PERSON = "operator"
"""`Diagnosis.detectors` of a request that a person made."""
RIGHT, WRONG = "right", "wrong"
"""What a person may say of a diagnosis."""


class IncidentState(StrEnum):
    OPEN = "open"  # diagnosed; no plan, or the last one failed
    PLANNED = "planned"  # a plan stands; guards hold it, or it says to do nothing
    PROPOSED = "proposed"  # waits for a person's word, or for the guards after it
    ACTING = "acting"  # the action was started and is not known to be done
    VERIFYING = "verifying"  # done; waits to see progress
    CLOSED = "closed"


class IncidentOutcome(StrEnum):
    RESOLVED = "resolved"
    TOLERATED = "tolerated"  # nothing was worth doing
    OBSERVED = "observed"  # mode observe: the fault ended without us
    SELF_RECOVERED = "self_recovered"
    ESCALATED = "escalated"


class ActionFailure(StrEnum):
    """How an action failed: the ladder climbs differently."""

    DIED = "died"  # the replacement ended before it did any work
    NO_PROGRESS = "no_progress"  # it was not seen to work within `verification_timeout_seconds`
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
    """A person's word that a plan must not begin. Times are wall seconds."""

    number: int  # of this incident, from 1
    by: str
    because: str
    until: float  # when it ends by itself; when it was lifted, once it was
    lifted: bool = False

    @property
    def until_text(self) -> str:
        try:
            return datetime.fromtimestamp(self.until, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (OverflowError, ValueError, OSError):  # of a foreign writer: no calendar has it
            return "an unknown time"

    def active(self, now: float) -> bool:
        return not self.lifted and now < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisReview:
    """A person's verdict on a diagnosis."""

    right: bool
    by: str
    because: str
    at: float  # wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan and what became of it. Times are wall seconds of the journal."""

    number: int  # from 1
    plan: Plan
    page_oncall: bool
    outcome: str  # what closes the incident when the plan is to do nothing
    made_at: float
    held_by: frozenset[str] = frozenset()  # guards that have held it
    expires_at: float | None = None  # of its proposal; never before a hold's end and as long again
    approval_timeout_seconds: float = 0.0  # how long its proposal waits
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
    seen_keys: frozenset[str]  # every diagnosis key that was found to be this fault
    attempts: tuple[Attempt, ...] = ()
    verified_at: float | None = None
    closed_at: float | None = None
    outcome: IncidentOutcome | None = None
    because: str = ""  # of the close
    page_topics: frozenset[str] = frozenset()
    page_reason: str = ""  # why a person was last called
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
        return PERSON in self.diagnosis.detectors

    @property
    def failures(self) -> tuple[Attempt, ...]:
        return tuple(a for a in self.attempts if a.failure is not None)

    @property
    def touched(self) -> dict[str, int]:
        """replica -> newest incarnation that an action of this incident has made (or is making)."""
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
    """One replica taken down by one started action: what the limits count."""

    incident_id: str
    replica: str
    at: float
    under_repair: bool


def evictions(incidents: Iterable[Incident], since: float) -> list[Eviction]:
    """Every replica that an action was started on after `since` (wall seconds): counted when started, so that a crash
    between start and end refills nothing."""
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
