"""Policy: from a diagnosis to a plan, with the reason. Pure: the same input gives the same plan, byte for byte.

The row of the fault's class in `core.faults.FAULTS` names the remedy:

    replace   replace the named incarnation of the replica, nothing else
    move      the same, on another node, if there is one; a rollout may lend its own to a trainer (borrowing.py)
    weigh     replace if horizon x (1 - 1/ratio) > cost of replacing, else tolerate
    stop      stop the job, evict nothing: the same code would fail again anywhere
    page      no action; page on-call

Where nothing can act (a job that rolecall only watches), the plan is what the engineer can do (advice.py).

The two replicas of a hybrid share a machine: they are replaced together, and `role` means all hybrids.

Three rules come first: a replica on a quarantined node always moves, because nothing is placed there; and a policy
collapse, or a full disk, only pages on-call, whatever its class.

Retries escalate by cause and by count, one rung after the other: replace the replica, restart its role, restart the
job, page on-call. A replacement that runs without progress may be on a bad node, so the next one goes to another, as
does one that its node could not take, which says nothing of the software that is started. The rules that lead to a
restart are those of RobustRL (arXiv 2512.22492, section 4), each counted:

    first iteration    two replacements in a row that started but died before their first progress
    same step          the replica (no standby) was replaced, worked, and failed again before the next step committed,
                       on a node that it need not leave
    beyond the role    the restart of the role failed too, the fault is of several roles, or the role is one replica

Nothing healthy is restarted if the job has committed a step since the last attempt started, or without one since the
incident was opened: it works without the replica. Nor if the replacements did not even start: then the software that is
started is at fault, and on-call is paged. With `recovery.scope: job` the restart of the job is the only rung. A
diagnosis of an incarnation that was already replaced needs no action.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, Self

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, ReplicaLoad
from rolecall.core.faults import Remedy
from rolecall.core.ids import IncidentId, ReplicaId, split_replica
from rolecall.core.membership import COMPUTING_ROLES, NO_PROCESS, STANDBY_ROLES, is_standby
from rolecall.core.text import in_words
from rolecall.recovery.advice import WATCHED, what_to_do
from rolecall.recovery.borrowing import BORROWER, choose_lenders
from rolecall.recovery.fleet_view import DEAD, FleetView
from rolecall.recovery.incidents import OPERATOR, ActionFailure, Incident, IncidentOutcome, IncidentState

COLLAPSE = "collapse"
"""`Diagnosis.detectors` of a policy collapse. Its job still runs: stopping it on a statistical finding that is wrong
would cost more than a page costs when it is right."""
FULL_DISK = "full_disk"
"""Of a disk without space. It names a node; no new process would find more space there."""
ORPHAN = "orphan"
"""Of an engine process without its server: no replica is at fault. It is ended, or on-call is told the command."""
ONCE = "wrong_numbers_once"
"""`Diagnosis.detectors` of a single microbatch with numbers that another replica did not get."""
AGAIN = "wrong_numbers"
"""Of several: the machine computes wrong numbers, so the replica leaves its node."""
_ENDED = frozenset({ActionFailure.DIED, ActionFailure.NOT_STARTED})
DEATHS_ON_START_MAX = 2
"""One dead replacement may be a second fault; two in a row point to what they have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """A failed attempt of this incident, as input of the policy."""

    failure: ActionFailure
    action: ActionKind
    targets: tuple[PlanTarget, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failure": str(self.failure), "action": str(self.action)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Self:
        return cls(
            failure=ActionFailure(body["failure"]),
            action=ActionKind(body["action"]),
            targets=tuple(PlanTarget(**t) for t in body["targets"]),
            because=body["because"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """Everything a decision reads; stored with the plan so that the decision can be replayed."""

    incident_id: IncidentId
    diagnosis: Diagnosis
    fleet: FleetView
    config: RecoveryConfig
    past: tuple[FailedAttempt, ...]
    supports: frozenset[ActionKind]
    lost_nodes: frozenset[str] = frozenset()  # diagnosed as lost: nothing is placed there
    quarantined_nodes: frozenset[str] = frozenset()  # nothing is placed there until they are returned
    same_step: frozenset[ActionKind] = frozenset()  # resolved earlier incidents of these replicas since the last commit
    commits_since: bool = (
        False  # a step was committed since the last failed attempt started, or the incident was opened
    )
    loads: Mapping[str, ReplicaLoad] = field(default_factory=dict)  # replica -> what it holds and has
    busy: frozenset[str] = frozenset()  # replicas that other open incidents concern
    working: frozenset[str] = frozenset()  # replicas whose replacement by this incident makes progress

    @property
    def performable(self) -> frozenset[ActionKind]:
        """What a plan may contain. For a job that is only watched: all, which tells whether the fault is worth a
        call."""
        return self.supports or frozenset(ActionKind)

    @property
    def avoided(self) -> frozenset[str]:
        """Nodes on which nothing is placed: also one that could not take a process of a suspect, unless an operator
        asks for it."""
        named = () if OPERATOR in self.diagnosis.detectors else {s.replica for s in self.diagnosis.suspects}
        lost = (r for r in self.fleet.replicas if r.replica in named and r.lost)
        return self.lost_nodes | self.quarantined_nodes | {r.node for r in lost if r.because.startswith(NO_PROCESS)}

    def to_dict(self) -> dict[str, Any]:
        return {
            "incident_id": self.incident_id,
            "diagnosis": self.diagnosis.to_dict(),
            "fleet": self.fleet.to_dict(),
            # Where on-call is notified may contain a secret and does not affect the decision.
            "config": self.config.model_dump(mode="json", exclude={"webhook_url", "notify"}),
            "past": [p.to_dict() for p in self.past],
            "supports": sorted(str(a) for a in self.supports),
            "lost_nodes": sorted(self.lost_nodes),
            "quarantined_nodes": sorted(self.quarantined_nodes),
            "same_step": sorted(str(a) for a in self.same_step),
            "commits_since": self.commits_since,
            "loads": {replica: asdict(load) for replica, load in sorted(self.loads.items())},
            "busy": sorted(self.busy),
            "working": sorted(self.working),
        }

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Self:
        return cls(
            incident_id=IncidentId(body["incident_id"]),
            diagnosis=Diagnosis.from_dict(body["diagnosis"]),
            fleet=FleetView.from_dict(body["fleet"]),
            config=RecoveryConfig.model_validate(body["config"]),
            past=tuple(FailedAttempt.from_dict(p) for p in body["past"]),
            supports=frozenset(ActionKind(a) for a in body["supports"]),
            lost_nodes=frozenset(body["lost_nodes"]),
            quarantined_nodes=frozenset(body["quarantined_nodes"]),
            same_step=frozenset(ActionKind(a) for a in body.get("same_step", ())),  # absent in older journals
            commits_since=body.get("commits_since", False),
            loads={replica: ReplicaLoad.from_dict(load) for replica, load in body.get("loads", {}).items()},
            busy=frozenset(body.get("busy", ())),
            working=frozenset(body.get("working", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """A plan; if it is to do nothing, also the incident's outcome and whether to page on-call."""

    plan: Plan
    page_oncall: bool = False
    outcome: IncidentOutcome = IncidentOutcome.TOLERATED

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "page_oncall": self.page_oncall, "outcome": str(self.outcome)}


def question(
    incident: Incident,
    incidents: Iterable[Incident],
    *,
    fleet: FleetView,
    config: RecoveryConfig,
    supports: frozenset[ActionKind],
    quarantined_nodes: frozenset[str] = frozenset(),
    committed_seq: int = 0,
    returned_seq: Mapping[str, int] | None = None,
    loads: Mapping[str, ReplicaLoad] | None = None,
    progress: Mapping[str, tuple[bool, str]] | None = None,
) -> PolicyInput:
    """The input of `decide` for an incident. `committed_seq`: journal line of the newest committed step; 0: there is
    none. `returned_seq`: as of `lost_nodes`. `progress`: as of `Situation`."""
    known, seen = list(incidents), progress or {}
    failures = incident.failures
    # A step that was in progress when the fault began may still be committed: it does not show that the job works.
    began_seq = (failures[-1].started_seq if failures else 0) or incident.opened_seq
    past = tuple(
        FailedAttempt(failure=a.failure, action=a.plan.action, targets=a.plan.targets, because=a.failed_because)
        for a in failures
        if a.failure is not None
    )
    return PolicyInput(
        incident_id=IncidentId(incident.incident_id),
        diagnosis=incident.diagnosis,
        fleet=fleet,
        config=config,
        past=past,
        supports=supports,
        lost_nodes=lost_nodes(known, returned_seq or {}),
        quarantined_nodes=quarantined_nodes,
        same_step=frozenset(
            i.attempt.plan.action
            for i in known
            if not fleet.places.scheduled  # the steps of another system's job are not known to be committed
            if i.attempt is not None and i.outcome is IncidentOutcome.RESOLVED and not i.requested_by_operator
            if i.verified_seq > committed_seq
            and {fleet.unit_of(r) for r in i.named} & {fleet.unit_of(r) for r in incident.named}
        ),
        commits_since=committed_seq > began_seq,
        loads=loads or {},
        busy=busy_replicas(known, incident.incident_id),
        working=frozenset(r for r in incident.touched if r in seen and seen[r][0]),
    )


def busy_replicas(incidents: Iterable[Incident], but: str = "") -> frozenset[str]:
    """Replicas that open incidents concern, or whose nodes their plans lend. `but`: an incident that does not count."""
    found: set[str] = set()
    for incident in incidents:
        if incident.state is not IncidentState.CLOSED and incident.incident_id != but:
            found |= {*incident.named, *incident.handled}
            found |= {str(t.replica) for t in (incident.attempt.plan.lent if incident.attempt else ())}
    return frozenset(found)


def lost_nodes(incidents: Iterable[Incident], returned_seq: Mapping[str, int]) -> frozenset[str]:
    """Nodes diagnosed as lost and not returned to service since. `returned_seq`: node -> journal line of its last
    return."""
    return frozenset(
        s.node
        for i in incidents
        if i.diagnosis.fault_class.spec.loses_node
        for s in i.diagnosis.suspects
        if returned_seq.get(s.node, -1) < i.opened_seq
    )


def decide(facts: PolicyInput) -> PolicyDecision:
    """The plan for a diagnosis, with its reason."""
    decision = _of_class(facts)
    if facts.supports:
        return decision
    # Nothing can act on this job. What is worth an action is worth a call, with what the engineer can do.
    needed = decision.page_oncall or decision.plan.action is not ActionKind.TOLERATE
    failed = "".join(f"{p.because}; " for p in facts.past[-1:])
    return _nothing(facts, f"{WATCHED}: {failed}{what_to_do(facts.diagnosis)}", page=needed)


def _of_class(facts: PolicyInput) -> PolicyDecision:
    diagnosis = facts.diagnosis
    if COLLAPSE in diagnosis.detectors:
        because = f"{diagnosis.because}: no replica is evicted; an operator must decide whether to stop the job"
        return _nothing(facts, because, page=True)
    if FULL_DISK in diagnosis.detectors:
        return _nothing(facts, f"{diagnosis.because}: no replica is evicted; {diagnosis.advice}", page=True)
    if ORPHAN in diagnosis.detectors:
        return _end_orphan(facts)
    if ONCE in diagnosis.detectors:
        return _nothing(facts, f"{diagnosis.because}; a single occurrence is tolerated")
    remedy = diagnosis.fault_class.spec.remedy
    if remedy is Remedy.STOP:
        return _stop(facts)
    if OPERATOR not in diagnosis.detectors:
        if remedy is Remedy.WEIGH and not facts.past:
            worth, arithmetic = slow_gain(diagnosis, facts.config, num_restarted=_num_restarted(facts))
            return _replace(facts, arithmetic) if worth else _nothing(facts, arithmetic)
        if remedy is Remedy.PAGE:
            settle = f"; to settle it: {diagnosis.settle}" if diagnosis.settle else ""
            because = f"{diagnosis.because}; no known action resolves it{settle}"
            return _nothing(facts, because, page=True)
    return _replace(facts, diagnosis.because)


def _end_orphan(facts: PolicyInput) -> PolicyDecision:
    """Once: a process that does not end then is for on-call."""
    diagnosis = facts.diagnosis
    process = next((s.process for s in diagnosis.suspects if s.process is not None), None)
    if process is None or facts.past or ActionKind.END_ORPHAN not in facts.supports:
        tried = f": {facts.past[-1].because}" if facts.past else ""
        because = f"{diagnosis.because}{tried}: no replica is at fault; {diagnosis.advice}"
        outcome = IncidentOutcome.ESCALATED if facts.past else IncidentOutcome.TOLERATED
        return _nothing(facts, because, page=True, outcome=outcome)
    plan = Plan(
        incident_id=facts.incident_id,
        action=ActionKind.END_ORPHAN,
        targets=(),
        because=diagnosis.because,
        process=process,
    )
    return PolicyDecision(plan=plan)


def _num_restarted(facts: PolicyInput) -> int:
    """Replicas whose work a plan for a slow one would cost: with the scope job those of all computing roles."""
    restarts = facts.config.scope == "job" and ActionKind.RESTART_JOB in facts.performable
    working = COMPUTING_ROLES - STANDBY_ROLES.keys()
    return max(1, sum(r.role in working and not r.lent for r in facts.fleet.replicas)) if restarts else 1


def slow_gain(diagnosis: Diagnosis, config: RecoveryConfig, num_restarted: int = 1) -> tuple[bool, str]:
    """Whether replacing a slow replica pays off over the horizon, with the arithmetic.

    A replica slowed r times does horizon / r of its work; a replacement does horizon - cost. The gain is their
    difference, horizon x (1 - 1/r) - cost, in seconds of one replica's healthy work. A restart of the job costs that
    of every replica.
    """
    ratio, horizon = diagnosis.gain_ratio, config.horizon_seconds
    cost = config.replacement_cost_seconds * num_restarted
    if ratio is None or not math.isfinite(ratio) or ratio <= 1:
        return False, f"{diagnosis.because}; the gain of a replacement was not measured"
    if horizon is None:
        unset = "no action, because recovery.horizon_seconds is not set"
        return False, f"{ratio:.2f} times slower; {unset} (an action would cost about {cost:.0f} s)"
    gain = horizon * (1 - 1 / ratio)
    costs = f"{cost:.0f} s"
    if num_restarted > 1:
        costs = f"{config.replacement_cost_seconds:.0f} s x {num_restarted} replicas = {costs}"
    sum_ = f"{horizon:.0f} s x (1 - 1/{ratio:.2f}) = {gain:.0f} s of its work"
    if gain > cost:
        return True, f"{diagnosis.because}; replacing gains {sum_} for {costs} of cost"
    return False, f"replacing would gain {sum_}, less than the {costs} it costs"


def _nothing(
    facts: PolicyInput, because: str, *, page: bool = False, outcome: IncidentOutcome = IncidentOutcome.TOLERATED
) -> PolicyDecision:
    plan = Plan(incident_id=facts.incident_id, action=ActionKind.TOLERATE, targets=(), because=because)
    return PolicyDecision(plan=plan, page_oncall=page, outcome=outcome)


def _stop(facts: PolicyInput) -> PolicyDecision:
    if ActionKind.STOP_JOB not in facts.performable:
        because = f"{facts.diagnosis.because}: the job must stop and this actuator cannot stop it"
        return _nothing(facts, because, page=True)
    because = f"{facts.diagnosis.because}: failure of the job's own code; no replica is evicted and the job stops"
    plan = Plan(incident_id=facts.incident_id, action=ActionKind.STOP_JOB, targets=(), because=because)
    return PolicyDecision(plan=plan, page_oncall=True, outcome=IncidentOutcome.ESCALATED)


def _replace(facts: PolicyInput, because: str) -> PolicyDecision:
    targets, why_not = _targets(facts)
    because += _shared(facts.fleet, targets)
    if not targets:
        moot = why_not == _REPLACED_ALREADY
        outcome = IncidentOutcome.SELF_RECOVERED if moot else IncidentOutcome.TOLERATED
        return _nothing(facts, why_not, page=not moot, outcome=outcome)
    gave_up = _gave_up(facts, targets)
    if gave_up:
        return _nothing(facts, gave_up, page=True, outcome=IncidentOutcome.ESCALATED)
    action, why = _restart(facts, targets)
    if action is not None:
        restarted = tuple(_of_restart(action, facts.fleet, targets))
        return PolicyDecision(
            plan=Plan(incident_id=facts.incident_id, action=action, targets=restarted, because=f"{because}; {why}")
        )
    avoided = any(t.node in facts.avoided for t in targets)
    no_progress = bool(facts.past) and facts.past[-1].failure is ActionFailure.NO_PROGRESS
    if leaves_node(facts.diagnosis) or avoided or (no_progress and ActionKind.REPLACE_NODE in facts.performable):
        action = ActionKind.REPLACE_NODE
    else:
        action = ActionKind.REPLACE_REPLICA
    tried = f"{because}; attempt {len(facts.past) + 1}: {facts.past[-1].because}" if facts.past else because
    lent: tuple[PlanTarget, ...] = ()
    homeless = _homeless(facts, targets) if action is ActionKind.REPLACE_NODE and facts.supports else ()
    if homeless:
        # A replacement that has left the faulty node need not leave its own, too.
        faulty = {str(s.node) for s in facts.diagnosis.suspects}
        must = any(t.node in facts.avoided for t in homeless) or (
            leaves_node(facts.diagnosis) and any(t.node in faulty for t in homeless)
        )
        lent, why = _lenders(facts, homeless) if must else ((), "")
        if must and not lent:
            return _nothing(facts, f"{because}: there is no other node to move to: {why}", page=True)
        tried = f"{tried}; {why}" if lent else tried
        action = ActionKind.REPLACE_NODE if lent else ActionKind.REPLACE_REPLICA
    if action not in facts.performable:
        return _nothing(facts, f"{because}: this actuator cannot perform what is needed: {in_words(action)}", page=True)
    plan = Plan(incident_id=facts.incident_id, action=action, targets=targets, because=tried, lent=lent)
    return PolicyDecision(plan=plan)


def _homeless(facts: PolicyInput, targets: tuple[PlanTarget, ...]) -> tuple[PlanTarget, ...]:
    """Targets for which there is neither a standby of their role nor a free node; of a hybrid one, its trainer's role
    decides."""
    if facts.fleet.places.scheduled:
        return ()
    avoid = facts.avoided | {str(t.node) for t in targets}
    taken: list[str] = []
    found: list[PlanTarget] = []
    for unit, target in {facts.fleet.unit_of(t.replica): t for t in targets}.items():
        node = facts.fleet.spare_node(split_replica(unit)[0], avoid, taken)
        if node is None:
            found.append(target)
        else:
            taken.append(node)
    return tuple(found)


def without_node(facts: PolicyInput, plan: Plan) -> tuple[PlanTarget, ...]:
    """Targets of a plan that waited which must move and for which no node is left."""
    if plan.action.is_restart:
        return ()
    moves = plan.action is ActionKind.REPLACE_NODE
    found = tuple(t for t in _homeless(facts, plan.targets) if moves or t.node in facts.avoided)
    return found if len(found) > len(plan.lent) else ()


def _lenders(facts: PolicyInput, homeless: tuple[PlanTarget, ...]) -> tuple[tuple[PlanTarget, ...], str]:
    """Replicas that lend their nodes, and the arithmetic; none if they do not suffice."""
    roles = {split_replica(facts.fleet.unit_of(t.replica))[0] for t in homeless}
    none = f"no standby of {' or '.join(sorted(roles))} is ready, and no node is free"
    if roles != {BORROWER}:
        return (), none
    loan = choose_lenders(
        facts.fleet,
        facts.loads,
        len(homeless),
        rollouts_min=facts.config.rollouts_min,
        avoid=facts.avoided | {str(t.node) for t in homeless},
        busy=facts.busy,
    )
    return loan.lenders, f"{none}; {'' if loan.lenders else 'nothing can lend its node: '}{loan.because}"


_REPLACED_ALREADY = "the named incarnation was already replaced"


def _targets(facts: PolicyInput) -> tuple[tuple[PlanTarget, ...], str]:
    """The incarnations to replace: those named, or their replacements if this incident already replaced them."""
    made = {
        str(t.replica): t.incarnation + 1
        for p in facts.past
        if p.failure is not ActionFailure.REFUSED
        for t in p.targets
    }
    last = facts.past[-1].failure if facts.past else None
    # There nothing but its process shows that a replacement was started, and nothing but its work that it serves.
    unproven = last is ActionFailure.NO_PROGRESS and facts.fleet.places.scheduled
    for target in facts.past[-1].targets if unproven else ():
        view = facts.fleet.find(target.replica)
        if view is None or view.desired_incarnation <= target.incarnation:
            return (), f"{target.replica}#{target.incarnation + 1} was never seen: {facts.past[-1].because}"
    found: dict[str, PlanTarget] = {}
    why_not = "the evidence names no replica"
    for suspect in facts.diagnosis.suspects:
        if not suspect.replica:
            why_not = f"the evidence names {suspect.node} but no replica"
            continue
        if suspect.incarnation is None:
            why_not = f"the evidence does not name the incarnation of {suspect.replica}"
            continue
        replica, seen = suspect.replica, facts.fleet.find(suspect.replica)
        incarnation_now = max(suspect.incarnation, made.get(replica, 0))
        if seen is None and not facts.supports:  # rolecall did not start this job and knows only what is observed
            found[replica] = PlanTarget(replica=ReplicaId(replica), incarnation=incarnation_now, node=suspect.node)
        elif seen is None and facts.fleet.places.scheduled:
            why_not = f"{replica} may not be replaced: its role is not in `roles` of the watch file"
        elif seen is None:
            why_not = f"{replica} is not part of this run"
        elif seen.lent:
            why_not = f"{replica} has lent its node and does not run"
        elif seen.desired_incarnation > incarnation_now:
            why_not = _REPLACED_ALREADY
        elif seen.desired_incarnation < incarnation_now:
            why_not = f"{replica}#{incarnation_now} is named, but the newest incarnation is #{seen.desired_incarnation}"
        else:
            # On a retry the fleet shows the replacement's node, which is the relevant one.
            node = seen.node if facts.past or not suspect.node else suspect.node
            found[replica] = PlanTarget(replica=seen.replica, incarnation=incarnation_now, node=node)
    if unproven and found:
        found = {r: t for r, t in found.items() if r not in facts.working}
        why_not = why_not if found else _REPLACED_ALREADY
    if last in _ENDED:
        # Of several replacements only the dead ones are replaced again.
        dead = {r: t for r, t in found.items() if (v := facts.fleet.find(r)) is not None and v.state in DEAD}
        found = dead or found
    for view in [v for r in found if (v := facts.fleet.find(r)) is not None]:
        partner = facts.fleet.find(view.partner) if view.partner else None
        if partner is not None and partner.replica not in found:
            number, node = partner.desired_incarnation, found[view.replica].node
            found[partner.replica] = PlanTarget(replica=partner.replica, incarnation=number, node=node)
    return tuple(found[r] for r in sorted(found)), why_not


def _shared(fleet: FleetView, targets: tuple[PlanTarget, ...]) -> str:
    """Why a plan replaces more than the diagnosis names; empty if it does not."""
    views = [v for t in targets if (v := fleet.find(t.replica)) is not None and v.partner]
    units = sorted({v.unit for v in views})
    pairs = ", ".join(f"{unit} and {next(v.partner for v in views if v.replica == unit)}" for unit in units)
    return f"; {pairs} share a machine and are replaced together" if pairs else ""


def _gave_up(facts: PolicyInput, targets: tuple[PlanTarget, ...]) -> str:
    """Why no further attempt is made; empty if one is."""
    past = facts.past
    if past and past[-1].failure is ActionFailure.REFUSED:
        return f"the action could not be performed: {past[-1].because}"
    why = _needs_restart(facts, targets)
    if not why:
        return ""
    views = [v for t in targets if (v := facts.fleet.find(t.replica)) is not None]
    if past and past[-1].failure in _ENDED and not any(v.started for v in views):
        software = ": the software that is started is at fault, not the machine; another node would not help"
        return f"{why}{software if _deaths(past) >= DEATHS_ON_START_MAX else ''}"
    higher = _next_restart(facts, targets)
    if higher is None or higher not in facts.performable:
        return why
    if facts.commits_since and facts.config.scope != "job":
        return f"{why}; nothing else is restarted, because the job still commits steps"
    return ""


def _restart(facts: PolicyInput, targets: tuple[PlanTarget, ...]) -> tuple[ActionKind | None, str]:
    """The restart that is due, and why; None: a replacement will do."""
    why = _needs_restart(facts, targets)
    if why:
        return _next_restart(facts, targets), why
    of_job = facts.config.scope == "job" and ActionKind.RESTART_JOB in facts.performable
    works = not all(is_standby(t.replica) for t in targets)
    if of_job and works and OPERATOR not in facts.diagnosis.detectors:
        return ActionKind.RESTART_JOB, "recovery.scope is job"
    return None, ""


def _needs_restart(facts: PolicyInput, targets: tuple[PlanTarget, ...]) -> str:
    """Which rule says that one more replacement will not help; empty if none does."""
    past = facts.past
    if _deaths(past) >= DEATHS_ON_START_MAX:
        return f"{_deaths(past)} replacements in a row died before their first progress ({past[-1].because})"
    if len(past) >= facts.config.retries_per_replica_max:
        return f"{len(past)} attempts failed, the last: {past[-1].because}"
    if facts.config.scope == "job":
        return ""
    if past and past[-1].action.is_restart:
        return f"{in_words(past[-1].action)} did not help: {past[-1].because}"
    again = facts.same_step and not past and facts.diagnosis.fault_class.spec.is_repairable
    standby = any(is_standby(t.replica) for t in targets)  # no restart ends a standby: it is replaced again
    lost = any(t.node in facts.avoided for t in targets)  # a fault of another machine: moving is a new remedy
    if again and not standby and not lost and OPERATOR not in facts.diagnosis.detectors:
        done = ", ".join(sorted(in_words(a) for a in facts.same_step))
        return f"it failed again in the same step, after {done}"
    return ""


def _next_restart(facts: PolicyInput, targets: tuple[PlanTarget, ...]) -> ActionKind | None:
    """The rung above those that were tried; None: there is none."""
    tried = facts.same_step | {p.action for p in facts.past}
    roles = {_kind(facts.fleet, t) for t in targets}
    if ActionKind.RESTART_JOB in tried or roles & STANDBY_ROLES.keys():
        return None
    beyond_the_role = ActionKind.RESTART_ROLE in tried or len(roles) > 1
    units = {r.unit for r in facts.fleet.replicas if r.kind_of_unit in roles}
    if beyond_the_role or len(units) == 1:
        return ActionKind.RESTART_JOB
    return ActionKind.RESTART_ROLE


def _of_restart(action: ActionKind, fleet: FleetView, targets: tuple[PlanTarget, ...]) -> list[PlanTarget]:
    """All replicas of the role, or of the job: but standbys, which do no work and hold no state."""
    role = _kind(fleet, targets[0])
    return [
        PlanTarget(replica=r.replica, incarnation=r.desired_incarnation, node=r.node)
        for r in fleet.replicas
        if not r.lent and (r.kind_of_unit == role if action is ActionKind.RESTART_ROLE else not is_standby(r.replica))
    ]


def _kind(fleet: FleetView, target: PlanTarget) -> str:
    """What a restart of the target's role restarts."""
    seen = fleet.find(target.replica)
    return seen.kind_of_unit if seen is not None else split_replica(target.replica)[0]


def _deaths(past: tuple[FailedAttempt, ...]) -> int:
    """Attempts in a row, up to now, that ended before their first progress. One without a process shows nothing of the
    software that is started."""
    had_process = [p for p in reversed(past) if p.failure is not ActionFailure.NOT_STARTED]
    return len(list(takewhile(lambda p: p.failure is ActionFailure.DIED, had_process)))


def leaves_node(diagnosis: Diagnosis) -> bool:
    """Whether the fault stays with the node, which is then quarantined."""
    return diagnosis.fault_class.spec.remedy is Remedy.MOVE or bool(diagnosis.suspects and AGAIN in diagnosis.detectors)
