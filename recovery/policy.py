"""Policy: from a diagnosis to a plan, with the reason. Pure: the same input gives the same plan, byte for byte.

The row of the fault's class in `core.faults.FAULTS` names the remedy:

    replace   replace the named incarnation of the replica, nothing else
    move      the same, on another node, if there is one
    weigh     replace if horizon x (1 - 1/ratio) > cost of replacing, else tolerate
    stop      stop the job, evict nothing: the same code would fail again anywhere
    page      no action; page on-call

Two rules come before it: whatever happens on a quarantined node moves, for nothing is placed there again; and a policy
that collapsed only pages on-call, whatever its class.

The ladder climbs by cause (rungs that cannot help are skipped) and by count: a replacement that twice ends before its
first work is not a hardware fault, so another node would not help and a person is called; one that lives but does
nothing may sit on a bad node, so the next one goes elsewhere. A diagnosis of an incarnation that was replaced already
asks for nothing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import Remedy
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.recovery.fleet import DEAD, FleetView
from rolecall.recovery.incidents.incident import PERSON, ActionFailure, Incident, IncidentOutcome

COLLAPSE = "collapse"
"""`Diagnosis.detectors` of a policy that collapsed. Its job still runs: to stop it on a statistical word would cost more,
when the word is wrong, than a person who looks costs when it is right."""
DEATHS_ON_START_MAX = 2
"""One death of a replacement may be a second fault; two in a row have their cause in what is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """A failed attempt of this incident, as the ladder sees it."""

    failure: ActionFailure
    action: ActionKind
    targets: tuple[PlanTarget, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failure": str(self.failure), "action": str(self.action)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(
            failure=ActionFailure(d["failure"]),
            action=ActionKind(d["action"]),
            targets=tuple(PlanTarget(**t) for t in d["targets"]),
            because=d["because"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """All that a decision reads, and nothing else: stored with the plan, so that it replays."""

    incident_id: IncidentId
    diagnosis: Diagnosis
    fleet: FleetView
    config: RecoveryConfig
    past: tuple[FailedAttempt, ...]
    supports: frozenset[ActionKind]
    lost_nodes: frozenset[str] = frozenset()  # nodes that were diagnosed as lost: nothing is placed there
    quarantined_nodes: frozenset[str] = frozenset()  # nor on these, for as long as nobody returns them

    @property
    def avoided(self) -> frozenset[str]:
        return self.lost_nodes | self.quarantined_nodes

    def to_dict(self) -> dict[str, Any]:
        return {
            "incident_id": self.incident_id,
            "diagnosis": self.diagnosis.to_dict(),
            "fleet": self.fleet.to_dict(),
            # A webhook URL may hold a secret and decides nothing.
            "config": self.config.model_dump(mode="json", exclude={"webhook_url"}),
            "past": [p.to_dict() for p in self.past],
            "supports": sorted(str(a) for a in self.supports),
            "lost_nodes": sorted(self.lost_nodes),
            "quarantined_nodes": sorted(self.quarantined_nodes),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(
            incident_id=IncidentId(d["incident_id"]),
            diagnosis=Diagnosis.from_dict(d["diagnosis"]),
            fleet=FleetView.from_dict(d["fleet"]),
            config=RecoveryConfig.model_validate(d["config"]),
            past=tuple(FailedAttempt.from_dict(p) for p in d["past"]),
            supports=frozenset(ActionKind(a) for a in d["supports"]),
            lost_nodes=frozenset(d["lost_nodes"]),
            quarantined_nodes=frozenset(d.get("quarantined_nodes", ())),  # older questions have none
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """A plan; and when it is to do nothing, what closes the incident and whether a person must hear of it."""

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
) -> PolicyInput:
    """What `decide` must know of an incident, and of the others that bear on it."""
    past = tuple(
        FailedAttempt(failure=a.failure, action=a.plan.action, targets=a.plan.targets, because=a.failed_because)
        for a in incident.failures
        if a.failure is not None
    )
    return PolicyInput(
        incident_id=IncidentId(incident.incident_id),
        diagnosis=incident.diagnosis,
        fleet=fleet,
        config=config,
        past=past,
        supports=supports,
        lost_nodes=frozenset(
            s.node for i in incidents if i.diagnosis.fault_class.spec.loses_node for s in i.diagnosis.suspects
        ),
        quarantined_nodes=quarantined_nodes,
    )


def decide(q: PolicyInput) -> PolicyDecision:
    """What to do about it, and why."""
    d = q.diagnosis
    if COLLAPSE in d.detectors:
        return _nothing(
            q, f"{d.because}: nobody is evicted for it, and whether to stop is for a person to say", person=True
        )
    remedy = d.fault_class.spec.remedy
    if remedy is Remedy.STOP:
        return _stop(q)
    if PERSON not in d.detectors:
        if remedy is Remedy.WEIGH and not q.past:
            worth, arithmetic = slow_gain(d, q.config)
            if not worth:
                return _nothing(q, arithmetic)
            return _replace(q, arithmetic)
        if remedy is Remedy.PAGE:
            settle = f" What would settle it: {d.settle}" if d.settle else ""
            return _nothing(q, f"no action is known to help against {d.fault_class}: {d.because}.{settle}", person=True)
    return _replace(q, d.because)


def slow_gain(d: Diagnosis, config: RecoveryConfig) -> tuple[bool, str]:
    """Whether replacing a slow replica pays over the horizon, with the arithmetic.

    A replica slowed r times does horizon / r of its work; a replacement does horizon - cost. The gain is their
    difference, horizon x (1 - 1/r) - cost, in seconds of this replica's healthy work.
    """
    ratio, horizon, cost = d.gain_ratio, config.horizon_seconds, config.replacement_cost_seconds
    if ratio is None or not math.isfinite(ratio) or ratio <= 1:
        return False, f"tolerated: how much would be gained was not measured ({d.because})"
    if horizon is None:
        return (
            False,
            f"tolerated: {ratio:.2f} times slower, but no horizon is set to weigh {cost:.0f} s of cost against",
        )
    gain = horizon * (1 - 1 / ratio)
    sum_ = f"{horizon:.0f} s x (1 - 1/{ratio:.2f}) = {gain:.0f} s of its work"
    if gain > cost:
        return True, f"{d.because}; replacing gains {sum_} for {cost:.0f} s of cost"
    return False, f"tolerated: replacing would gain {sum_}, less than the {cost:.0f} s it costs"


def _nothing(
    q: PolicyInput, because: str, *, person: bool = False, outcome: IncidentOutcome = IncidentOutcome.TOLERATED
) -> PolicyDecision:
    plan = Plan(incident_id=q.incident_id, action=ActionKind.TOLERATE, targets=(), because=because)
    return PolicyDecision(plan=plan, page_oncall=person, outcome=outcome)


def _stop(q: PolicyInput) -> PolicyDecision:
    if ActionKind.STOP_JOB not in q.supports:
        return _nothing(q, f"the job should stop and cannot be stopped from here: {q.diagnosis.because}", person=True)
    because = f"{q.diagnosis.because}: the job's own code, so nobody is evicted and the job stops"
    plan = Plan(incident_id=q.incident_id, action=ActionKind.STOP_JOB, targets=(), because=because)
    return PolicyDecision(plan=plan, page_oncall=True, outcome=IncidentOutcome.ESCALATED)


def _replace(q: PolicyInput, because: str) -> PolicyDecision:
    if not q.supports:
        return _nothing(q, f"{because}; rolecall only watches this job: what helps is for a person to do", person=True)
    targets, why_not = _targets(q)
    if not targets:
        moot = why_not == _REPLACED_ALREADY
        return _nothing(
            q, why_not, person=not moot, outcome=IncidentOutcome.SELF_RECOVERED if moot else IncidentOutcome.TOLERATED
        )
    gave_up = _exhausted(q)
    if gave_up:
        return _nothing(q, gave_up, person=True, outcome=IncidentOutcome.ESCALATED)
    action = _rung(q, targets)
    tried = f"{because} (attempt {len(q.past) + 1}: {q.past[-1].because})" if q.past else because
    if action is ActionKind.REPLACE_NODE and _elsewhere(q, targets) is None:
        if q.diagnosis.fault_class.spec.remedy is Remedy.MOVE or _on_avoided_node(q, targets):
            return _nothing(q, f"{because}: there is no other node to move to", person=True)
        action = ActionKind.REPLACE_REPLICA
    if action not in q.supports:
        return _nothing(q, f"{because}: {action} is needed, and cannot be done from here", person=True)
    return PolicyDecision(plan=Plan(incident_id=q.incident_id, action=action, targets=targets, because=tried))


_REPLACED_ALREADY = "the named incarnation was replaced already"


def _targets(q: PolicyInput) -> tuple[tuple[PlanTarget, ...], str]:
    """The incarnations to replace: those named, or where this incident replaced them already, what it made of them."""
    made = {
        str(t.replica): t.incarnation + 1 for p in q.past if p.failure is not ActionFailure.REFUSED for t in p.targets
    }
    found: dict[str, PlanTarget] = {}
    why_not = "the evidence names no replica"
    for suspect in q.diagnosis.suspects:
        named, reason = _named(suspect, q.fleet)
        if named is None:
            why_not = reason
            continue
        replica, incarnation = named
        seen = q.fleet.find(replica)
        meant = max(incarnation, made.get(replica, 0))
        if seen is None:
            why_not = f"{replica} is not part of this run"
        elif seen.desired_incarnation > meant:
            why_not = _REPLACED_ALREADY
        elif seen.desired_incarnation < meant:
            why_not = f"{replica}#{meant} is named, and {replica}#{seen.desired_incarnation} is the newest there is"
        else:
            found[replica] = PlanTarget(replica=seen.replica, incarnation=meant, node=_node(suspect, seen.node, q))
    if q.past and q.past[-1].failure is ActionFailure.DIED:
        # Of several replacements only those that ended are made again.
        dead = {r: t for r, t in found.items() if (v := q.fleet.find(r)) is not None and v.state in DEAD}
        found = dead or found
    return tuple(found[r] for r in sorted(found)), why_not


def _named(suspect: Suspect, fleet: FleetView) -> tuple[tuple[str, int] | None, str]:
    if not suspect.replica:
        return None, f"the evidence names {suspect.node} and no replica"
    if suspect.incarnation is None:
        return None, f"the evidence does not tell which incarnation of {suspect.replica}"
    return (ReplicaId(suspect.replica), suspect.incarnation), ""


def _node(suspect: Suspect, runs_on: NodeId, q: PolicyInput) -> NodeId:
    # Before a retry the fleet may already show the replacement's node, which is the one that matters now.
    return runs_on if q.past or not suspect.node else suspect.node


def _exhausted(q: PolicyInput) -> str:
    """Why no further attempt is made; empty while one is."""
    past = q.past
    if past and past[-1].failure is ActionFailure.REFUSED:
        return f"the action could not be performed: {past[-1].because}"
    deaths = 0
    for p in reversed(past):
        if p.failure is not ActionFailure.DIED:
            break
        deaths += 1
    if deaths >= DEATHS_ON_START_MAX:
        return (
            f"{deaths} replacements in a row ended before their first work ({past[-1].because}): "
            "what is started is at fault, not the machine, and another node would not help"
        )
    if len(past) >= q.config.retries_per_replica_max:
        return f"{len(past)} attempts failed, the last one because {past[-1].because}"
    return ""


def _rung(q: PolicyInput, targets: Sequence[PlanTarget]) -> ActionKind:
    if q.diagnosis.fault_class.spec.remedy is Remedy.MOVE or _on_avoided_node(q, targets):
        return ActionKind.REPLACE_NODE
    if q.past and q.past[-1].failure is ActionFailure.NO_PROGRESS and ActionKind.REPLACE_NODE in q.supports:
        return ActionKind.REPLACE_NODE
    return ActionKind.REPLACE_REPLICA


def _on_avoided_node(q: PolicyInput, targets: Sequence[PlanTarget]) -> bool:
    return any(t.node in q.avoided for t in targets)


def _elsewhere(q: PolicyInput, targets: Sequence[PlanTarget]) -> NodeId | None:
    return q.fleet.spare_node(q.avoided | {t.node for t in targets})
