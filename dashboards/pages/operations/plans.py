"""The plans that stand, as the person on call must see them: what, whom, why, whom else, until when. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.diagnosis import ActionKind
from rolecall.recovery.incidents.incident import NOT_BEGUN, Attempt, Decision, Hold, Incident, IncidentState

MODES: Mapping[str, str] = {
    "observe": "rolecall says what it would do and does nothing. An approval changes nothing until the watch runs in "
    "another mode.",
    "approve": "rolecall asks first. A plan that waits lapses when nobody has spoken by its deadline.",
    "act": "rolecall acts by itself as soon as its guards pass. Hold or veto a plan to stop it, pause to stop them all.",
}


class PlanStatus(StrEnum):
    """What a plan waits for, in the order in which a person is asked to look."""

    WAITS = "waits for a person"
    HELD = "held by a person"
    GUARDED = "held by a guard"
    APPROVED = "approved, the guards look again"
    DUE = "due"
    WOULD = "would be done in another mode"
    EXPIRED = "expired"
    REFUSED = "vetoed"


GLYPHS: Mapping[PlanStatus, str] = {
    PlanStatus.WAITS: "◐",
    PlanStatus.HELD: "‖",
    PlanStatus.GUARDED: "▲",
    PlanStatus.APPROVED: "✓",
    PlanStatus.DUE: "▶",
    PlanStatus.WOULD: "○",
    PlanStatus.EXPIRED: "◇",
    PlanStatus.REFUSED: "✗",
}
_ORDER = tuple(PlanStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Times are wall seconds."""

    incident_id: str
    digest: str
    standing: PlanStatus
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
        return self.standing is PlanStatus.WAITS

    @property
    def can_be_stopped(self) -> bool:
        """Held or vetoed."""
        return self.standing not in (PlanStatus.EXPIRED, PlanStatus.REFUSED)

    def seconds_left(self, now: float) -> float | None:
        """Until the proposal lapses; None when it does not."""
        return None if self.expires_at is None else max(0.0, self.expires_at - now)


def plan_rows(incidents: Iterable[Incident], mode: str, now: float) -> tuple[PlanRow, ...]:
    """Every plan that is not begun, those that wait for a person first, and of these what lapses soonest."""
    rows = []
    for i in incidents:
        a = i.attempt
        if a is None or i.state not in NOT_BEGUN:
            continue
        if a.plan.action is not ActionKind.TOLERATE:
            rows.append(_row(i, a, mode, now))
    return tuple(sorted(rows, key=lambda r: (_ORDER.index(r.standing), r.expires_at or r.made_at, r.incident_id)))


def _row(i: Incident, a: Attempt, mode: str, now: float) -> PlanRow:
    hold = a.hold if a.hold is not None and a.hold.stands(now) else None
    d = i.diagnosis
    return PlanRow(
        incident_id=i.incident_id,
        digest=a.plan.digest,
        standing=_standing(i, a, hold, mode, now),
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


def _standing(i: Incident, a: Attempt, hold: Hold | None, mode: str, now: float) -> PlanStatus:
    if a.decision is Decision.REJECTED:
        return PlanStatus.REFUSED
    if hold is not None:
        return PlanStatus.HELD
    lapsed = a.expires_at is not None and now > a.expires_at and a.decision is None
    if a.decision is Decision.EXPIRED or lapsed:
        return PlanStatus.EXPIRED
    if i.state is IncidentState.PROPOSED:
        return PlanStatus.APPROVED if a.decision is Decision.APPROVED else PlanStatus.WAITS
    if mode == "observe":
        return PlanStatus.WOULD
    return PlanStatus.GUARDED if a.held_by else PlanStatus.DUE
