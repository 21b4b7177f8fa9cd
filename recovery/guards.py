"""Guards decide whether a plan may be performed now; one that blocks gives its reason. Pure.

Order: operator decisions (mode, pause, hold), facts (incarnations, evidence), counted limits. Some blocks end by
themselves (a pause, a hold, another repair); at a limit rolecall stops acting and pages on-call once. All counts come
from the journal, so a restarted watch continues with the budget that its predecessor left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Fate, Plan, PlanTarget, Suspect
from rolecall.core.ids import split_replica
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.text import counted, in_words
from rolecall.recovery.advice import WATCHED
from rolecall.recovery.borrowing import remaining
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.incidents import NO_CHANNEL, OPERATOR, Decision, Eviction, Incident, IncidentState, evictions

HOUR_SECONDS = 3600.0
AT_ONCE = "at_once"
HOLD = "hold"
LENDER = "lender"
MINIMUM = "minimum"
COMMITS = "commits"
MODE = "mode"
SERVING_ROLE = "rollout"
NOT_PEERS = ("self", "progress", "exit", "signal", "operator", "burn_in")
"""Prefixes of evidence kinds that do not compare with peers. One such item, or a comparison with `peers` 0, means that
a diagnosis does not rest on peers alone."""


Progress = Mapping[str, tuple[bool, str]]
"""replica -> (whether it is seen to make progress at the wanted incarnation, what was seen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Inputs of guards and of the next step besides the incident itself. Times are wall seconds."""

    now: float
    fleet: FleetView
    config: RecoveryConfig
    incidents: Sequence[Incident]
    paused: str | None = None
    stopping: str | None = None
    ended: str | None = None  # why the run is over
    begun: bool = False  # in a pause or mode observe: a call of the action was made, so it must not stay half done
    absent_seconds: float = 0.0  # since a diagnosis of this incident was last reported
    progress: Progress = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()  # replicas that are healthy and have no work
    worked: frozenset[str] = (
        frozenset()
    )  # replicas whose newest incarnation has finished work, and may have ended since
    fates: Mapping[Suspect, tuple[Fate, str]] | None = None
    """In mode observe: what became of the processes that the diagnosis names, and what was seen."""
    code_survives: bool = True  # in mode observe: a process whose code failed still runs
    channel: str = NO_CHANNEL
    committed_seq: int = 0  # journal line of the newest committed step, where the plan is a restart

    @property
    def observing(self) -> bool:
        """Whether rolecall may not act, so that an incident only tells what happens."""
        return self.config.mode == "observe"


@dataclass(frozen=True, slots=True)
class GuardResult:
    """`guard` names the guard that blocks; empty when all pass."""

    guard: str
    because: str
    page_oncall: bool = False

    @property
    def passed(self) -> bool:
        return not self.guard


PASSED = GuardResult("", "all guards pass")


def check(plan: Plan, incident: Incident, situation: Situation) -> GuardResult:
    """The first guard that blocks, or PASSED. Mode `approve` passes: the caller requests approval."""
    if situation.observing:
        watched = plan.because.startswith(WATCHED)
        because = plan.because if watched else f"mode is observe: rolecall only observes; it would {plan.intent}"
        if plan.action is ActionKind.END_ORPHAN:
            because += f"; {incident.diagnosis.advice}"
        attempt = incident.attempt
        needed = plan.action is not ActionKind.TOLERATE or (attempt is not None and attempt.page_oncall)
        return GuardResult(MODE, because, page_oncall=needed and not incident.requested_by_operator)
    if situation.paused is not None:
        return GuardResult("paused", f"paused by {situation.paused}")
    if situation.stopping is not None:
        return GuardResult("stopping", f"the job is stopping: {situation.stopping}")
    hold = incident.attempt.hold if incident.attempt else None
    if hold is not None and hold.active(situation.now):
        return GuardResult(HOLD, f"on hold by {hold.by} until {hold.until_text}: {hold.because}")
    for target in plan.targets:
        seen = situation.fleet.find(target.replica)
        newest = seen.desired_incarnation if seen else None
        if newest != target.incarnation and not (newest and _is_new_already(target, newest, plan, incident)):
            current = f"the current incarnation is #{newest}" if newest else "the replica is no longer part of the run"
            because = f"the plan targets {target.replica}#{target.incarnation}, but {current}"
            return GuardResult("incarnation", because)
    if plan.action is ActionKind.STOP_JOB:
        return PASSED
    if plan.action is ActionKind.END_ORPHAN:
        return _orphans(incident, situation) or PASSED
    return (
        _commits(plan, incident, situation)
        or _lenders(plan, situation)
        or _minimum(plan, situation)
        or _peer_evidence(plan, incident, situation)
        or _limits(plan, incident, situation)
        or PASSED
    )


def _orphans(incident: Incident, situation: Situation) -> GuardResult | None:
    """No replica ends, but many orphans an hour are no accident, or no orphans."""
    since, limit = situation.now - HOUR_SECONDS, situation.config.evictions_per_hour_max
    ended = sum(
        a.plan.action is ActionKind.END_ORPHAN and a.started_at is not None and a.started_at > since
        for i in situation.incidents
        if i.incident_id != incident.incident_id
        for a in i.attempts
    )
    if ended < limit:
        return None
    because = f"{counted(ended, 'orphan')} ended in the last hour, the limit is {limit}"
    return GuardResult("evictions", because, page_oncall=True)


def _commits(plan: Plan, incident: Incident, situation: Situation) -> GuardResult | None:
    """A restart may have waited, and the job works by now without the replica at fault."""
    attempt = incident.attempt
    if attempt is None or not plan.action.is_restart or situation.config.scope == "job":
        return None
    if situation.committed_seq <= attempt.made_seq:
        return None
    because = f"a step was committed after it was planned to {in_words(plan.action)}: nothing healthy is restarted"
    return GuardResult(COMMITS, because, page_oncall=True)


def _lenders(plan: Plan, situation: Situation) -> GuardResult | None:
    """What may have changed since the plan was made: the lenders, and how many rollouts serve beside them."""
    for lender in plan.lent:
        seen = situation.fleet.find(lender.replica)
        if seen is None or not seen.living or seen.desired_incarnation != lender.incarnation:
            because = f"the plan ends {lender.replica}#{lender.incarnation}, which no longer runs"
            return GuardResult(LENDER, because, page_oncall=True)
    left, at_least = remaining(situation.fleet, (*plan.lent, *plan.targets)), situation.config.rollouts_min
    if left < at_least and not all(is_standby(t.replica) for t in plan.lent):
        because = f"{counted(left, 'rollout')} would go on serving, at least {at_least} must (recovery.rollouts_min)"
        return GuardResult(LENDER, because, page_oncall=True)
    return None


def _minimum(plan: Plan, situation: Situation) -> GuardResult | None:
    """Healthy rollouts that would end with the targets. Without them there is nothing to weigh: a rollout at fault is
    replaced even if it is the last one."""
    healthy = [t for t in plan.also_ends if (v := situation.fleet.find(t.replica)) is not None and v.living]
    if not any(split_replica(t.replica)[0] == SERVING_ROLE for t in healthy):
        return None
    left, at_least = remaining(situation.fleet, (*plan.targets, *plan.also_ends)), situation.config.rollouts_min
    if left >= at_least:
        return None
    named = ", ".join(str(t.replica) for t in healthy)
    because = f"{named} would end too; {counted(left, 'rollout')} would go on serving, at least {at_least} must"
    return GuardResult(MINIMUM, f"{because} (recovery.rollouts_min)", page_oncall=True)


def _is_new_already(target: PlanTarget, newest: int, plan: Plan, incident: Incident) -> bool:
    """Whether a restart finds this healthy replica replaced since it was planned: it need not be ended again."""
    return newest > target.incarnation and str(target.replica) not in incident.at_fault(plan)


def on_peer_evidence_alone(diagnosis: Diagnosis) -> bool:
    """Whether the diagnosis rests on comparison with peers alone, without evidence from the suspects' own history."""
    if not diagnosis.fault_class.spec.compares_peers:
        return False
    own_history = any(e.kind.startswith(NOT_PEERS) or e.values.get("peers") == 0 for e in diagnosis.evidence)
    return not own_history and OPERATOR not in diagnosis.detectors


def _peer_evidence(plan: Plan, incident: Incident, situation: Situation) -> GuardResult | None:
    if not on_peer_evidence_alone(incident.diagnosis):
        return None
    ours_at_fault = incident.at_fault(plan)
    suspects = set(ours_at_fault)
    for other in situation.incidents:
        if other.state is not IncidentState.CLOSED and on_peer_evidence_alone(other.diagnosis):
            suspects |= {r for a in other.attempts for r in other.at_fault(a.plan)}
    for role in sorted({split_replica(r)[0] for r in ours_at_fault}):
        peers = _members(role, situation)
        ours = [r for r in peers if r.replica in suspects]
        if 2 * len(ours) > len(peers):
            because = f"{len(ours)} of {len(peers)} {role} replicas are suspects on peer comparison alone"
            return GuardResult("majority", f"{because}; a majority cannot be outliers", page_oncall=True)
        if not any(r.living and r.replica not in suspects | plan.ends for r in peers):
            because = f"no {role} replica would remain, on peer comparison alone"
            return GuardResult("last_living", because, page_oncall=True)
    return None


def _members(role: str, situation: Situation) -> tuple[ReplicaView, ...]:
    """Replicas of a role. In a job of another scheduler a restart may leave names behind that nobody withdraws: there,
    what has ended counts only while an open incident concerns it."""
    found = situation.fleet.of_role(role)
    if not situation.fleet.places.scheduled:
        return found
    still_open = [i for i in situation.incidents if i.state is not IncidentState.CLOSED]
    concerned = {r for i in still_open for r in (*i.named, *i.handled, *i.under_repair)}
    return tuple(r for r in found if r.state is not ReplicaState.STOPPED or r.replica in concerned)


def num_evictions(found: Iterable[Eviction], fleet: FleetView) -> int:
    """As the limit counts them: a hybrid, which is replaced as one, once."""
    return len({(e.incident_id, e.at, fleet.unit_of(e.replica)) for e in found})


def _limits(plan: Plan, incident: Incident, situation: Situation) -> GuardResult | None:
    config, since = situation.config, situation.now - HOUR_SECONDS
    recent, at_fault = evictions(situation.incidents, since=since), incident.at_fault(plan)
    # A restart follows replacements that failed, so their number does not limit it: unless it is the only answer.
    escalates = plan.action.is_restart and config.scope != "job"
    for replica in () if escalates else sorted(at_fault):
        times = sum(e.replica == replica and e.at_fault for e in recent)
        if times >= config.retries_per_replica_max:
            because = f"{replica} was replaced {times} times in the last hour"
            because += f", the limit is {config.retries_per_replica_max}"
            return GuardResult("retries", because, page_oncall=True)
    fleet = situation.fleet
    with_them = {str(t.replica) for t in plan.also_ends}
    taken, more = num_evictions(recent, fleet), len({fleet.unit_of(r) for r in at_fault | with_them})
    if taken + more > config.evictions_per_hour_max:
        because = f"{taken} evictions in the last hour and {more} more requested{_too(with_them)}"
        because += f", the limit is {config.evictions_per_hour_max}"
        return GuardResult("evictions", because, page_oncall=True)
    others = [i for i in situation.incidents if i.incident_id != incident.incident_id]
    elsewhere = {r for i in others for r in i.under_repair}
    if plan.action.is_restart:
        return _alone(plan, elsewhere)
    return _at_once(plan, situation, elsewhere, _awaiting_turn(incident, situation.incidents))


def _too(replicas: set[str]) -> str:
    """For what is counted besides the targets."""
    return f" ({', '.join(sorted(replicas))} would end too)" if replicas else ""


def _awaiting_turn(incident: Incident, incidents: Sequence[Incident]) -> set[str]:
    """Replicas of other incidents that wait only for another repair to end."""
    found: set[str] = set()
    for other in incidents:
        attempt = other.attempt
        if attempt is None or other.incident_id == incident.incident_id or attempt.held_by != {AT_ONCE}:
            continue
        if other.state is IncidentState.PLANNED or (
            other.state is IncidentState.PROPOSED and attempt.decision is Decision.APPROVED
        ):
            found |= attempt.plan.ends
    return found


def _alone(plan: Plan, elsewhere: set[str]) -> GuardResult | None:
    """A restart takes down most of a role or of the job by intent, so only a repair in progress holds it back."""
    if not elsewhere:
        return None
    busy = ", ".join(sorted(elsewhere))
    return GuardResult(AT_ONCE, f"{busy} under repair: {in_words(plan.action)} waits until that is over")


def _at_once(plan: Plan, situation: Situation, elsewhere: set[str], waiting: set[str]) -> GuardResult | None:
    """A standby does no work: its repair blocks no other one and comes after those that are due. That of the controller
    waits for none: without it no replacement is seen to work."""
    fleet, config = situation.fleet, situation.config
    targets, with_them = set(plan.ends), {str(t.replica) for t in plan.also_ends}
    if all(is_standby(t) for t in targets):
        first = sorted(r for r in elsewhere | waiting if not is_standby(r))
        if first:
            because = f"{', '.join(first)} is repaired first: standby {', '.join(sorted(targets))} does no work"
            return GuardResult(AT_ONCE, because)
    else:
        elsewhere = {r for r in elsewhere if not is_standby(r)}
    together = targets | elsewhere
    # A hybrid is replaced as one.
    is_controller = {split_replica(t)[0] for t in targets} == {"controller"}
    if not is_controller and len({fleet.unit_of(r) for r in together}) > config.replicas_at_once_max:
        busy = ", ".join(sorted(elsewhere)) or "nothing"
        because = f"{busy} under repair and {', '.join(sorted(targets))} requested{_too(with_them)}"
        because += f", the limit is {config.replicas_at_once_max} at once"
        # Too many on its own: waiting would not help.
        requested = {fleet.unit_of(t) for t in targets}
        return GuardResult(AT_ONCE, because, page_oncall=len(requested) > config.replicas_at_once_max)
    for role in sorted({split_replica(t)[0] for t in targets}):
        size = len(_members(role, situation))
        allowed = max(1, int(config.role_share_max * size))
        under = {t for t in together if split_replica(t)[0] == role}
        if len(under) > allowed:
            alone = len([t for t in targets if split_replica(t)[0] == role]) > allowed
            because = f"{len(under)} of {size} {role} replicas would be under repair{_too(with_them)}"
            because += f", the limit is {allowed}"
            return GuardResult("role_share", because, page_oncall=alone)
    return None
