"""Pending plans for the Operations page: action, targets, reason, side effects, deadline. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.diagnosis import ActionKind
from rolecall.recovery.incidents.incident import NOT_STARTED, Attempt, Decision, Hold, Incident, IncidentState

MODES: Mapping[str, str] = {
    "observe": "rolecall reports what it would do and takes no action. Approvals have no effect until the watch runs "
    "in another mode.",
    "approve": "rolecall waits for approval. A plan without a decision expires at its deadline.",
    "act": "rolecall acts on its own once all guards pass. Hold or reject a plan to stop it; pause to stop all.",
}


class PlanStatus(StrEnum):
    """State of a pending plan, most urgent for the operator first."""

    AWAITS_APPROVAL = "awaits approval"
    HELD = "on hold"
    BLOCKED = "blocked by a guard"
    APPROVED = "approved, guards are checked again"
    DUE = "due"
    NOT_EXECUTED = "not executed in this mode"
    EXPIRED = "expired"
    REJECTED = "rejected"


GLYPHS: Mapping[PlanStatus, str] = {
    PlanStatus.AWAITS_APPROVAL: "◐",
    PlanStatus.HELD: "‖",
    PlanStatus.BLOCKED: "▲",
    PlanStatus.APPROVED: "✓",
    PlanStatus.DUE: "▶",
    PlanStatus.NOT_EXECUTED: "○",
    PlanStatus.EXPIRED: "◇",
    PlanStatus.REJECTED: "✗",
}
_ORDER = tuple(PlanStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Times are wall seconds."""

    incident_id: str
    digest: str
    status: PlanStatus
    action: str
    targets: tuple[str, ...]
    sentence: str  # the diagnosis
    because: str  # the plan
    also_hit: tuple[str, ...]
    evidence: tuple[str, ...]
    confidence: float
    attempt: int
    made_at: float
    expires_at: float | None = None
    held_by: tuple[str, ...] = ()  # guards
    hold: Hold | None = None
    decided: str = ""

    @property
    def can_be_approved(self) -> bool:
        return self.status is PlanStatus.AWAITS_APPROVAL

    @property
    def can_be_stopped(self) -> bool:
        """Whether it can be put on hold or rejected."""
        return self.status not in (PlanStatus.EXPIRED, PlanStatus.REJECTED)

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the plan expires; None if it has no deadline."""
        return None if self.expires_at is None else max(0.0, self.expires_at - now)


def plan_rows(incidents: Iterable[Incident], mode: str, now: float) -> tuple[PlanRow, ...]:
    """Every plan that has not started; plans that await approval first, those that expire soonest at the top."""
    rows = []
    for i in incidents:
        a = i.attempt
        if a is None or i.state not in NOT_STARTED:
            continue
        if a.plan.action is not ActionKind.TOLERATE:
            rows.append(_row(i, a, mode, now))
    return tuple(sorted(rows, key=lambda r: (_ORDER.index(r.status), r.expires_at or r.made_at, r.incident_id)))


def _row(i: Incident, a: Attempt, mode: str, now: float) -> PlanRow:
    hold = a.hold if a.hold is not None and a.hold.active(now) else None
    d = i.diagnosis
    return PlanRow(
        incident_id=i.incident_id,
        digest=a.plan.digest,
        status=_status(i, a, hold, mode, now),
        action=str(a.plan.action).replace("_", " "),
        targets=tuple(f"{t.replica}#{t.incarnation} on {t.node}" for t in a.plan.targets),
        sentence=d.because,
        because=a.plan.because,
        also_hit=a.plan.also_hit,
        evidence=tuple(f"{e.kind}: {e.text}" for e in d.evidence),
        confidence=d.confidence,
        attempt=a.number,
        made_at=a.made_at,
        expires_at=a.expires_at if a.decision is None else None,
        held_by=tuple(sorted(a.held_by)),
        hold=hold,
        decided=f"{a.decision} by {a.decided_by}" if a.decision and a.decided_by else str(a.decision or ""),
    )


def _status(i: Incident, a: Attempt, hold: Hold | None, mode: str, now: float) -> PlanStatus:
    if a.decision is Decision.REJECTED:
        return PlanStatus.REJECTED
    if hold is not None:
        return PlanStatus.HELD
    expired = a.expires_at is not None and now > a.expires_at and a.decision is None
    if a.decision is Decision.EXPIRED or expired:
        return PlanStatus.EXPIRED
    if i.state is IncidentState.PROPOSED:
        return PlanStatus.APPROVED if a.decision is Decision.APPROVED else PlanStatus.AWAITS_APPROVAL
    if mode == "observe":
        return PlanStatus.NOT_EXECUTED
    return PlanStatus.BLOCKED if a.held_by else PlanStatus.DUE
