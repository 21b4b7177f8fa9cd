"""Guards decide whether a plan may be performed now; one that blocks gives its reason. Pure.

Order: operator decisions (mode, pause, hold), facts (incarnations, evidence), counted limits. Some blocks end by
themselves (a pause, a hold, another repair); at a limit rolecall stops acting and pages on-call once. All counts come
from the journal, so a restarted watch continues with the budget that its predecessor left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan
from rolecall.core.ids import split_replica
from rolecall.core.membership import STANDBY_ROLE
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.incidents.incident import OPERATOR, Decision, Incident, IncidentState, evictions

HOUR_SECONDS = 3600.0
AT_ONCE = "at_once"
HOLD = "hold"
NOT_PEERS = ("self", "progress", "exit", "signal", "operator")
"""Prefixes of evidence kinds that do not compare with peers. One such item, or a comparison with `peers` 0, means that
a diagnosis does not rest on peers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """`guard` names the guard that blocks; empty when all pass."""

    guard: str
    because: str
    page_oncall: bool = False

    @property
    def passed(self) -> bool:
        return not self.guard


PASSED = GuardResult(guard="", because="all guards pass")


def check(
    plan: Plan,
    incident: Incident,
    *,
    fleet: FleetView,
    config: RecoveryConfig,
    incidents: Sequence[Incident],
    paused: str | None,
    stopping: str | None,
    now: float,
) -> GuardResult:
    """The first guard that blocks, or PASSED. `now`: wall seconds. Mode `approve` passes: the caller requests
    approval."""
    held = _operator_guards(config, paused, stopping) or _operator_hold(incident, now) or _incarnations(plan, fleet)
    if held is None and plan.action is not ActionKind.STOP_JOB:
        held = _peer_evidence(plan, incident, fleet, incidents) or _limits(
            plan, incident, fleet, config, incidents, now
        )
    return held or PASSED


def _operator_guards(config: RecoveryConfig, paused: str | None, stopping: str | None) -> GuardResult | None:
    if config.mode == "observe":
        return GuardResult(
            guard="mode", because="mode is observe: rolecall reports what it would do and takes no action"
        )
    if paused is not None:
        return GuardResult(guard="paused", because=f"paused by {paused}")
    if stopping is not None:
        return GuardResult(guard="stopping", because=f"the job is stopping: {stopping}")
    return None


def _operator_hold(incident: Incident, now: float) -> GuardResult | None:
    hold = incident.attempt.hold if incident.attempt else None
    if hold is None or not hold.active(now):
        return None
    return GuardResult(guard=HOLD, because=f"on hold by {hold.by} until {hold.until_text}: {hold.because}")


def _incarnations(plan: Plan, fleet: FleetView) -> GuardResult | None:
    for target in plan.targets:
        seen = fleet.find(target.replica)
        newest = seen.desired_incarnation if seen else None
        if newest != target.incarnation:
            now_desired = f"#{newest} is desired now" if newest else "it is no longer desired"
            return GuardResult(
                guard="incarnation",
                because=f"the plan targets {target.replica}#{target.incarnation}, but {now_desired}",
            )
    return None


def on_peer_evidence_alone(d: Diagnosis) -> bool:
    """Whether the diagnosis rests on comparison with peers alone, without evidence from the suspects' own history."""
    if not d.fault_class.spec.compares_peers:
        return False
    own_history = any(e.kind.startswith(NOT_PEERS) or e.values.get("peers") == 0 for e in d.evidence)
    return not own_history and OPERATOR not in d.detectors


def _peer_evidence(
    plan: Plan, incident: Incident, fleet: FleetView, incidents: Sequence[Incident]
) -> GuardResult | None:
    if not on_peer_evidence_alone(incident.diagnosis):
        return None
    suspects = {t.replica for t in plan.targets}
    for other in incidents:
        if other.state is not IncidentState.CLOSED and on_peer_evidence_alone(other.diagnosis):
            suspects |= {t.replica for a in other.attempts for t in a.plan.targets}
    for role in sorted({split_replica(t.replica)[0] for t in plan.targets}):
        peers = fleet.of_role(role)
        ours = [r for r in peers if r.replica in suspects]
        if 2 * len(ours) > len(peers):
            return GuardResult(
                guard="majority",
                because=f"{len(ours)} of {len(peers)} {role} replicas are suspects on peer comparison alone; "
                "a majority cannot be outliers",
                page_oncall=True,
            )
        if not any(r.living and r.replica not in suspects for r in peers):
            return GuardResult(
                guard="last_living",
                because=f"no {role} replica would remain, on peer comparison alone",
                page_oncall=True,
            )
    return None


def _limits(
    plan: Plan,
    incident: Incident,
    fleet: FleetView,
    config: RecoveryConfig,
    incidents: Sequence[Incident],
    now: float,
) -> GuardResult | None:
    counted = evictions(incidents, since=now - HOUR_SECONDS)
    recent = [e for e in counted if e.at > now - HOUR_SECONDS]
    for target in plan.targets:
        times = sum(e.replica == target.replica for e in recent)
        if times >= config.retries_per_replica_max:
            return GuardResult(
                guard="retries",
                because=f"{target.replica} was replaced {times} times in the last hour, "
                f"the limit is {config.retries_per_replica_max}",
                page_oncall=True,
            )
    if len(recent) + len(plan.targets) > config.evictions_per_hour_max:
        return GuardResult(
            guard="evictions",
            because=f"{len(recent)} evictions in the last hour and {len(plan.targets)} more requested, "
            f"the limit is {config.evictions_per_hour_max}",
            page_oncall=True,
        )
    elsewhere = {e.replica for e in counted if e.under_repair and e.incident_id != incident.incident_id}
    return _at_once(plan, fleet, config, elsewhere, _awaiting_turn(incident, incidents))


def _is_standby(replica: str) -> bool:
    return split_replica(replica)[0] == STANDBY_ROLE


def _awaiting_turn(incident: Incident, incidents: Sequence[Incident]) -> set[str]:
    """Replicas of other incidents that wait only for another repair to end."""
    found: set[str] = set()
    for other in incidents:
        a = other.attempt
        if a is None or other.incident_id == incident.incident_id or a.held_by != {AT_ONCE}:
            continue
        if other.state is IncidentState.PLANNED or (
            other.state is IncidentState.PROPOSED and a.decision is Decision.APPROVED
        ):
            found |= {str(t.replica) for t in a.plan.targets}
    return found


def _at_once(
    plan: Plan, fleet: FleetView, config: RecoveryConfig, elsewhere: set[str], waiting: set[str]
) -> GuardResult | None:
    """A standby does no work: its repair blocks no other one and comes after those that are due."""
    targets = {str(t.replica) for t in plan.targets}
    if all(_is_standby(t) for t in targets):
        first = sorted(r for r in elsewhere | waiting if not _is_standby(r))
        if first:
            because = f"{', '.join(first)} is repaired first: standby {', '.join(sorted(targets))} does no work"
            return GuardResult(guard=AT_ONCE, because=because)
    else:
        elsewhere = {r for r in elsewhere if not _is_standby(r)}
    together = targets | elsewhere
    if len(together) > config.replicas_at_once_max:
        return GuardResult(
            guard=AT_ONCE,
            because=f"{', '.join(sorted(elsewhere)) or 'nothing'} under repair and {', '.join(sorted(targets))} "
            f"requested, the limit is {config.replicas_at_once_max} at once",
            # Too many on its own: waiting would not help.
            page_oncall=len(targets) > config.replicas_at_once_max,
        )
    for role in sorted({split_replica(t)[0] for t in targets}):
        size = len(fleet.of_role(role))
        allowed = max(1, int(config.role_share_max * size))
        under = {t for t in together if split_replica(t)[0] == role}
        if len(under) > allowed:
            alone = len([t for t in targets if split_replica(t)[0] == role]) > allowed
            return GuardResult(
                guard="role_share",
                because=f"{len(under)} of {size} {role} replicas would be under repair, the limit is {allowed}",
                page_oncall=alone,
            )
    return None
