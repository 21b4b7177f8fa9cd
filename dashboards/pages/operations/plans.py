"""Pending plans for the Operations page, and a preview of draining a node: each replica on it, the plan, and whether
the guards allow it. Pure.

The preview uses the same `decide` and `check` as the watch on the current journal, so the result can still change. The
limits come from the latest plan in the journal, because the watch records them nowhere else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import IncidentId
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.guards import Situation, check
from rolecall.recovery.incidents import NOT_STARTED, Attempt, Decision, Hold, Incident, IncidentState
from rolecall.recovery.operators.commands import replacement_request
from rolecall.recovery.policy import decide, question

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
    """A plan that has not started. Times are wall seconds."""

    incident: Incident
    attempt: Attempt
    status: PlanStatus
    hold: Hold | None  # in force

    @property
    def expires_at(self) -> float | None:
        return self.attempt.expires_at if self.attempt.decision is None else None

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
    for incident in incidents:
        attempt = incident.attempt
        if attempt is not None and incident.state in NOT_STARTED and attempt.plan.action is not ActionKind.TOLERATE:
            hold = attempt.hold if attempt.hold is not None and attempt.hold.active(now) else None
            rows.append(
                PlanRow(
                    incident=incident, attempt=attempt, status=_status(incident, attempt, hold, mode, now), hold=hold
                )
            )
    rows.sort(key=lambda r: (_ORDER.index(r.status), r.expires_at or r.attempt.made_at, r.incident.incident_id))
    return tuple(rows)


def _status(incident: Incident, attempt: Attempt, hold: Hold | None, mode: str, now: float) -> PlanStatus:
    if attempt.decision is Decision.REJECTED:
        return PlanStatus.REJECTED
    if hold is not None:
        return PlanStatus.HELD
    expired = attempt.expires_at is not None and now > attempt.expires_at and attempt.decision is None
    if attempt.decision is Decision.EXPIRED or expired:
        return PlanStatus.EXPIRED
    if incident.state is IncidentState.PROPOSED:
        return PlanStatus.APPROVED if attempt.decision is Decision.APPROVED else PlanStatus.AWAITS_APPROVAL
    if mode == "observe":
        return PlanStatus.NOT_EXECUTED
    return PlanStatus.BLOCKED if attempt.held_by else PlanStatus.DUE


# --- preview of a drain -----------------------------------------------------------------------------------------------

SUPPORTS = frozenset({ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.STOP_JOB})
"""Actions of a run that rolecall executes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """Recovery policy of the watch, as recorded in the journal."""

    config: RecoveryConfig
    supports: frozenset[ActionKind]
    known: bool  # False: no plan yet, these are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedReplica:
    """What draining does to one replica of the node."""

    replica: str
    action: str
    because: str
    guard: str  # empty: all pass
    guard_because: str


def limits_of(policy_input: Mapping[str, Any], mode: str) -> WatchPolicy:
    """`policy_input`: as stored with the latest plan. `mode`: current mode of the watch, which may have changed
    since."""
    try:
        config = RecoveryConfig.model_validate({**policy_input["config"], **({"mode": mode} if mode else {})})
        return WatchPolicy(
            config=config, supports=frozenset(ActionKind(a) for a in policy_input["supports"]), known=True
        )
    except (KeyError, TypeError, ValueError):
        # The plan was written by something else and has no limits.
        config = RecoveryConfig.model_validate({"mode": mode} if mode in MODES else {})
        return WatchPolicy(config=config, supports=SUPPORTS, known=False)


def replicas_on(fleet: FleetView, node: str) -> tuple[ReplicaView, ...]:
    """The replicas that draining the node would move."""
    return tuple(r for r in fleet.replicas if r.node == node)


def preview(
    node: str,
    *,
    fleet: FleetView,
    incidents: Sequence[Incident],
    avoided: frozenset[str],
    limits: WatchPolicy,
    paused: str | None,
    stopping: str | None,
    now: float,
) -> tuple[DrainedReplica, ...]:
    """`avoided`: nodes in quarantine."""
    found = []
    for replica in replicas_on(fleet, node):
        diagnosis = replacement_request(replica, f"{node} is to be drained", now)
        incident = Incident(
            incident_id=IncidentId("preview"),
            state=IncidentState.PLANNED,
            diagnosis=diagnosis,
            opened_at=now,
            seen_keys=frozenset({diagnosis.key}),
        )
        policy_input = question(
            incident,
            incidents,
            fleet=fleet,
            config=limits.config,
            supports=limits.supports,
            quarantined_nodes=avoided | {node},
        )
        plan = decide(policy_input).plan
        situation = Situation(
            now=now, fleet=fleet, config=limits.config, incidents=incidents, paused=paused, stopping=stopping
        )
        guarded = check(plan, incident, situation)
        found.append(
            DrainedReplica(
                replica=f"{replica.replica}#{replica.desired_incarnation}",
                action=str(plan.action).replace("_", " "),
                because=plan.because,
                guard=guarded.guard,
                guard_because=guarded.because,
            )
        )
    return tuple(found)
