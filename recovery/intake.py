"""Whose fault is this? A diagnosis that stands is a new incident, a known one, or the death of a replacement. Pure.

At most one incident is open for a replica. Diagnoses repeat while they stand, and one fault may be named in turn by
several detectors (slow, then hung, then dead): all of that is one incident. A closed incident swallows its diagnosis
for as long as that goes on standing; the same words about something that began later are a new fault. What a person said
no to is not taken up again under another name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass, Remedy
from rolecall.core.ids import split_replica
from rolecall.core.membership import ReplicaState
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.incidents.incident import (
    PERSON,
    ActionFailure,
    Decision,
    Incident,
    IncidentOutcome,
    IncidentState,
)

LOST_GRACE_SECONDS = 6.0
"""How long a replica that the runtime lost may stay without a diagnosis before recovery opens an incident by itself:
longer than the detectors need (crash: 1 s; 5 s while its peers may still raise the same exception, which would make it
user code), so that their better sentence comes first."""
RUNTIME = "runtime"


class TriageAction(StrEnum):
    IGNORE = "ignore"
    OPEN = "open"
    UPDATE = "update"  # more is known of an open incident
    FAIL = "fail"  # the replacement that an incident made has a fault itself


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageDecision:
    kind: TriageAction
    because: str
    incident_id: str = ""


def triage(
    d: Diagnosis, incidents: Iterable[Incident], fleet: FleetView, *, stood_before: bool, reconsider: bool = False
) -> TriageDecision:
    """Where a standing diagnosis belongs.

    `stood_before`: it stood a moment ago already. `reconsider`: policy would now act on what it tolerated before.
    """
    known = list(incidents)
    for incident in known:
        if incident.state is not IncidentState.CLOSED:
            found = _against_open(d, incident)
            if found is not None:
                return found
    if _all_replaced(d, fleet):
        return TriageDecision(kind=TriageAction.IGNORE, because="every incarnation that it names was replaced already")
    for incident in reversed(known):
        if incident.state is IncidentState.CLOSED:
            found = _against_closed(d, incident, fleet, stood_before, reconsider)
            if found is not None:
                return found
    return TriageDecision(kind=TriageAction.OPEN, because="nothing known explains it")


def _against_open(d: Diagnosis, incident: Incident) -> TriageDecision | None:
    this = incident.incident_id
    if d.key in incident.seen_keys:
        return TriageDecision(kind=TriageAction.IGNORE, because=f"{this} is about it", incident_id=this)
    named = {s.replica: s.incarnation for s in d.suspects if s.replica}
    shared = named.keys() & (incident.named.keys() | incident.touched.keys())
    if not shared or d.fault_class.spec.remedy is Remedy.STOP:
        # The job's own code failing is an incident of its own: it takes over those of its victims (`moves.superseded`).
        return None
    if incident.state is IncidentState.VERIFYING and d.fault_class.spec.is_repairable:
        for replica in sorted(shared):
            if named[replica] is not None and named[replica] == incident.touched.get(replica):
                because = f"the replacement {replica}#{named[replica]} failed: {d.because}"
                return TriageDecision(kind=TriageAction.FAIL, because=because, incident_id=this)
    if d.fault_class.spec.remedy is Remedy.WEIGH and d.gain_ratio is None:
        because = f"{this} deals with {', '.join(sorted(shared))}, and what is not measured tells no more of it"
        return TriageDecision(kind=TriageAction.IGNORE, because=because, incident_id=this)
    undecided = incident.state in (IncidentState.OPEN, IncidentState.PLANNED)
    if undecided and incident.failures and all(named[r] == incident.touched.get(r) for r in shared):
        return TriageDecision(
            kind=TriageAction.IGNORE, because=f"{this} knows that its replacement failed", incident_id=this
        )
    code = incident.diagnosis.fault_class.spec.remedy is Remedy.STOP
    if undecided and not incident.requested_by_operator and not code:
        return TriageDecision(kind=TriageAction.UPDATE, because=f"more is known of {this}", incident_id=this)
    return TriageDecision(
        kind=TriageAction.IGNORE, because=f"{this} deals with {', '.join(sorted(shared))}", incident_id=this
    )


def _all_replaced(d: Diagnosis, fleet: FleetView) -> bool:
    named = [(s.replica, s.incarnation) for s in d.suspects if s.replica and s.incarnation is not None]
    if not named or len(named) < len(d.suspects):
        return False
    seen = [(fleet.find(replica), incarnation) for replica, incarnation in named]
    return all(view is not None and incarnation < view.desired_incarnation for view, incarnation in seen)


def _against_closed(
    d: Diagnosis, incident: Incident, fleet: FleetView, stood_before: bool, reconsider: bool
) -> TriageDecision | None:
    this = incident.incident_id
    if d.key in incident.seen_keys and (stood_before or d.onset <= (incident.closed_at or math.inf)):
        if reconsider and incident.outcome is IncidentOutcome.TOLERATED:
            return None
        return TriageDecision(
            kind=TriageAction.IGNORE, because=f"{this} was about it, and it never went away", incident_id=this
        )
    if (
        incident.outcome is IncidentOutcome.ESCALATED
        and d.fault_class.spec.is_repairable
        and not _requested_by_operator(d)
    ):
        for s in d.suspects:
            if s.replica in unrecovered_replicas(incident, fleet) and s.incarnation == incident.touched[s.replica]:
                return TriageDecision(
                    kind=TriageAction.IGNORE, because=f"{this} gave up on it: a person was called", incident_id=this
                )
    if rejected_by_operator(d, incident):
        return TriageDecision(kind=TriageAction.IGNORE, because=f"a person said no to it in {this}", incident_id=this)
    return None


def rejected_by_operator(d: Diagnosis, incident: Incident) -> bool:
    """Whether a person rejected to touch what it names: however detectors call what began before that word, it is what
    the word was about. A request of a person is a newer word."""
    attempt = incident.attempt
    if attempt is None or attempt.decision is not Decision.REJECTED or _requested_by_operator(d):
        return False
    before = d.onset <= (incident.closed_at or math.inf)
    spared = {(str(t.replica), t.incarnation) for t in attempt.plan.targets}
    named = {(s.replica, s.incarnation) for s in d.suspects}
    replaces = d.fault_class.spec.is_repairable or d.fault_class.spec.remedy is Remedy.WEIGH
    return before and replaces and bool(spared & named)


def _requested_by_operator(d: Diagnosis) -> bool:
    return PERSON in d.detectors


def unrecovered_replicas(incident: Incident, fleet: FleetView) -> frozenset[str]:
    """Replicas whose newest incarnation this incident made and gave up on."""
    attempt = incident.attempts[-2] if len(incident.attempts) > 1 else None
    if (
        incident.outcome is not IncidentOutcome.ESCALATED
        or attempt is None
        or attempt.failure in (None, ActionFailure.REFUSED)
    ):
        return frozenset()
    found = ((t.replica, fleet.find(t.replica)) for t in attempt.plan.targets)
    return frozenset(str(r) for r, v in found if v is not None and v.desired_incarnation == incident.touched.get(r))


def unrepaired(fleet: FleetView, incidents: Iterable[Incident], now: float) -> list[Diagnosis]:
    """Replicas that the runtime lost and that nobody deals with: a lost event delays a repair, it never loses it."""
    known = list(incidents)
    dealt_with = {r for i in known if i.state is not IncidentState.CLOSED for r in (*i.named, *i.touched)}
    for incident in known:
        dealt_with |= unrecovered_replicas(incident, fleet)
    found = []
    for view in fleet.replicas:
        lost = view.state is ReplicaState.LOST and view.incarnation == view.desired_incarnation
        if lost and now - view.changed_at >= LOST_GRACE_SECONDS and view.replica not in dealt_with:
            found.append(_lost(view.replica, view.incarnation, view.node, view.because, view.changed_at, now))
    return found


def _lost(replica: str, incarnation: int, node: Any, because: str, at: float, now: float) -> Diagnosis:
    suspect = Suspect(node=node, role=split_replica(replica)[0], replica=replica, incarnation=incarnation)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=FaultClass.CRASH,
        onset=at,
        detected_at=now,
        confidence=1.0,
        because=f"{replica}#{incarnation} was lost by the runtime {now - at:.1f} s ago and nobody replaced it: {because}",
        detectors=(RUNTIME,),
    )


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot say (NaN, infinity)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def storable(d: Diagnosis) -> Diagnosis:
    """The diagnosis as the journal can keep it: what is decided from is exactly what is stored."""
    cleaned = finite(d.to_dict())
    for evidence in cleaned["evidence"]:
        evidence["values"] = {k: v for k, v in evidence["values"].items() if v is not None}
    times = {k: cleaned[k] if cleaned[k] is not None else 0.0 for k in ("onset", "detected_at", "confidence")}
    return Diagnosis.from_dict({**cleaned, **times})


def incident_name(number: int, d: Diagnosis) -> str:
    """`inc-3-rollout-1`; `inc-3-node-2` where only a node is known; `inc-3-job` for everybody's fault."""
    who = {s.replica or str(s.node) for s in d.suspects}
    one = who.pop() if len(who) == 1 else "job"
    return f"inc-{number}-{one.replace('/', '-')}"[:63]
