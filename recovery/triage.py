"""Triage: does a current diagnosis open an incident, belong to a known one, or show that a replacement failed? Pure.

At most one incident is open per replica. Diagnoses repeat while they hold, and several detectors may report one fault
in turn (slow, then hung, then dead): all of that is one incident. So is a second fault of the replica, in another of
its processes: the incident keeps both diagnoses, and the update says which it is. A closed incident absorbs its
diagnosis while that is still reported; the same diagnosis with a later onset is a new fault. A rejected remediation is
not proposed again for the same fault under another class.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.errors import DeadlineExceeded
from rolecall.core.faults import FaultClass, Remedy
from rolecall.core.membership import ReplicaState
from rolecall.core.text import in_words
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.incidents import OPERATOR, ActionFailure, Decision, Incident, IncidentOutcome, IncidentState
from rolecall.recovery.nodes import NodeRecord
from rolecall.recovery.policy import AGAIN, ONCE

LOST_GRACE_SECONDS = 6.0
"""Time after which recovery opens an incident for a lost replica without a diagnosis: longer than the detectors need
(crash: 1 s; 5 s while its peers may still raise the same exception, which makes it user code), because their diagnosis
is more specific."""
RUNTIME = "runtime"
BURN_IN = "burn_in"
"""Evidence of a failed burn-in, and the detector that reports it."""


class TriageAction(StrEnum):
    IGNORE = "ignore"
    OPEN = "open"
    UPDATE = "update"  # new information on an open incident
    FAIL = "fail"  # the replacement that an incident started is faulty itself


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageDecision:
    kind: TriageAction
    because: str
    incident_id: str = ""


def triage(
    diagnosis: Diagnosis,
    incidents: Iterable[Incident],
    fleet: FleetView,
    *,
    reported_before: bool,
    reconsider: bool = False,
    worked: frozenset[str] = frozenset(),
) -> TriageDecision:
    """Where a current diagnosis belongs.

    `reported_before`: it was already reported shortly before. `reconsider`: policy would now act on what it tolerated.
    `worked`: suspects whose named incarnation has finished work.
    """
    known = list(incidents)
    for incident in known:
        if incident.state is not IncidentState.CLOSED:
            found = _against_open(diagnosis, incident, worked)
            if found is not None:
                return found
    views = [(fleet.find(s.replica), s.incarnation) for s in diagnosis.suspects if s.replica]
    if (
        views
        and len(views) == len(diagnosis.suspects)
        and all(
            view is not None and incarnation is not None and incarnation < view.desired_incarnation
            for view, incarnation in views
        )
    ):
        return TriageDecision(kind=TriageAction.IGNORE, because="every incarnation it names was already replaced")
    for incident in reversed(known):
        if incident.state is IncidentState.CLOSED:
            found = _against_closed(diagnosis, incident, fleet, reported_before, reconsider)
            if found is not None:
                return found
    return TriageDecision(kind=TriageAction.OPEN, because="no incident explains it")


def _ignored(incident: Incident, because: str) -> TriageDecision:
    return TriageDecision(kind=TriageAction.IGNORE, because=because, incident_id=incident.incident_id)


def _against_open(diagnosis: Diagnosis, incident: Incident, worked: frozenset[str]) -> TriageDecision | None:
    incident_id, spec = incident.incident_id, diagnosis.fault_class.spec
    told = [s for d in incident.diagnoses if d.fault_class is diagnosis.fault_class for s in d.suspects]
    if diagnosis.key in incident.seen_keys and not diagnosis.further_ranks(told):
        return _ignored(incident, f"{incident_id} already covers it")
    named = {s.replica: s.incarnation for s in diagnosis.suspects if s.replica}
    handled = incident.handled
    if incident.state is IncidentState.VERIFYING and incident.attempt is not None:
        # A healthy replica that a restart took down, and that has worked since, has a fault of its own.
        own = worked - incident.at_fault(incident.attempt.plan)
        handled = {r: incarnation for r, incarnation in handled.items() if r not in own}
    shared = named.keys() & (incident.named.keys() | handled.keys())
    if not shared or spec.remedy is Remedy.STOP:
        # A failure of the job's own code is a separate incident that supersedes its victims' (`next_step.superseded`).
        return None
    if incident.state is IncidentState.VERIFYING and spec.is_repairable:
        for replica in sorted(shared):
            if named[replica] is not None and named[replica] == handled.get(replica):
                because = f"the replacement {replica}#{named[replica]} failed: {diagnosis.because}"
                return TriageDecision(kind=TriageAction.FAIL, because=because, incident_id=incident_id)
    handles = f"{incident_id} already handles {', '.join(sorted(shared))}"
    if spec.remedy is Remedy.WEIGH and diagnosis.gain_ratio is None:
        return _ignored(incident, f"{handles}, and this diagnosis adds no measurement")
    undecided = incident.state in (IncidentState.OPEN, IncidentState.PLANNED)
    if undecided and incident.failures and all(named[r] == handled.get(r) for r in shared):
        return _ignored(incident, f"{incident_id} already knows that its replacement failed")
    code = incident.diagnosis.fault_class.spec.remedy is Remedy.STOP
    if undecided and not incident.requested_by_operator and not code:
        because = _relation(diagnosis, incident, sorted(shared))
        return TriageDecision(kind=TriageAction.UPDATE, because=because, incident_id=incident_id)
    return _ignored(incident, handles)


def _relation(diagnosis: Diagnosis, incident: Incident, shared: Sequence[str]) -> str:
    """Of a diagnosis to the open incident of the same replicas."""
    further = [who for who in diagnosis.further_ranks(incident.suspects) if who[0] in shared]
    named = {(s.replica, s.rank) for s in diagnosis.suspects if s.replica in shared}
    is_same = diagnosis.fault_class is incident.diagnosis.fault_class
    if further and (is_same or named == set(further)):
        ranks = ", ".join(f"rank {rank} of {replica}" for replica, rank in further)
        too = " too" if len(named) > len(further) else ""
        return f"a second fault of a replica whose incident is open: now {ranks}{too}"
    if is_same:
        return "more is known of the same fault"
    word = in_words(incident.diagnosis.fault_class)
    return f"it was diagnosed as {word} before: more is known of the fault, or another one of these processes began"


def _against_closed(
    diagnosis: Diagnosis, incident: Incident, fleet: FleetView, reported_before: bool, reconsider: bool
) -> TriageDecision | None:
    incident_id, spec = incident.incident_id, diagnosis.fault_class.spec
    if diagnosis.key in incident.seen_keys and (reported_before or diagnosis.onset <= (incident.closed_at or math.inf)):
        if reconsider and incident.outcome is IncidentOutcome.TOLERATED:
            return None
        return _ignored(incident, f"{incident_id} handled it, and the diagnosis never cleared")
    unrecovered = unrecovered_replicas(incident, fleet)
    repairs = spec.is_repairable and OPERATOR not in diagnosis.detectors
    if repairs and any(
        s.replica in unrecovered and s.incarnation == incident.touched[s.replica] for s in diagnosis.suspects
    ):
        return _ignored(incident, f"{incident_id} escalated it to on-call")
    if rejected_by_operator(diagnosis, incident):
        return _ignored(incident, f"an operator rejected its remediation in {incident_id}")
    return None


def rejected_by_operator(diagnosis: Diagnosis, incident: Incident) -> bool:
    """Whether an operator rejected a remediation of its suspects after its onset. This covers diagnoses of another
    class too; a replacement request overrides the rejection."""
    attempt = incident.attempt
    if attempt is None or attempt.decision is not Decision.REJECTED or OPERATOR in diagnosis.detectors:
        return False
    before = diagnosis.onset <= (incident.closed_at or math.inf)
    at_fault = incident.at_fault(attempt.plan)
    spared = {(str(t.replica), t.incarnation) for t in attempt.plan.targets if t.replica in at_fault}
    named = {(s.replica, s.incarnation) for s in diagnosis.suspects}
    replaces = diagnosis.fault_class.spec.is_repairable or diagnosis.fault_class.spec.remedy is Remedy.WEIGH
    return before and replaces and bool(spared & named)


def unrecovered_replicas(incident: Incident, fleet: FleetView) -> frozenset[str]:
    """Replicas at fault whose newest incarnation this incident started before it escalated."""
    attempt = incident.attempts[-2] if len(incident.attempts) > 1 else None
    escalated = incident.outcome is IncidentOutcome.ESCALATED
    if not escalated or attempt is None or attempt.failure in (None, ActionFailure.REFUSED):
        return frozenset()
    found = ((r, fleet.find(r)) for r in incident.at_fault(attempt.plan))
    return frozenset(r for r, v in found if v is not None and v.desired_incarnation == incident.touched.get(r))


def unrepaired(
    fleet: FleetView, incidents: Iterable[Incident], now: float, lost_seconds: Mapping[str, float]
) -> list[Diagnosis]:
    """Diagnoses for replicas that the runtime lost and no incident handles: a lost event only delays the repair.
    `lost_seconds`: for how long this watch has seen each lost replica so."""
    known = list(incidents)
    handled = {r for i in known if i.state is not IncidentState.CLOSED for r in (*i.named, *i.handled)}
    for incident in known:
        handled |= unrecovered_replicas(incident, fleet)
    found = []
    for view in fleet.replicas:
        lost = view.state is ReplicaState.LOST and view.incarnation == view.desired_incarnation
        seconds = lost_seconds.get(view.replica, 0.0)
        if lost and seconds >= LOST_GRACE_SECONDS and view.replica not in handled:
            why = f": {view.because}" if view.because else ""
            because = (
                f"{view.replica}#{view.incarnation} is lost: the runtime reported it, and for {seconds:.1f} s this "
                f"watch has seen no replacement{why}"
            )
            found.append(
                Diagnosis(
                    suspects=(
                        Suspect(node=view.node, role=view.role, replica=view.replica, incarnation=view.incarnation),
                    ),
                    fault_class=FaultClass.CRASH,
                    onset=view.changed_at,
                    detected_at=now,
                    confidence=1.0,
                    because=because,
                    detectors=(RUNTIME,),
                )
            )
    return found


def with_runtime_reason(diagnosis: Diagnosis, fleet: FleetView) -> Diagnosis:
    """Of a crash of a replica that the runtime gave up at a deadline of its own, as that of a start: the runtime ended
    the process, so its reason is the cause. Other losses it only tells of."""
    if diagnosis.fault_class is not FaultClass.CRASH or RUNTIME in diagnosis.detectors:
        return diagnosis
    for suspect in diagnosis.suspects:
        view = fleet.find(suspect.replica)
        given_up = view is not None and view.state is ReplicaState.LOST and view.incarnation == suspect.incarnation
        if view is not None and given_up and view.because.startswith(DeadlineExceeded.__name__):
            ended = f"{view.replica}#{view.incarnation} was ended by the runtime: {view.because}"
            return replace(diagnosis, because=f"{ended}; {diagnosis.because}")
    return diagnosis


def suspected_once(incidents: Iterable[Incident], fleet: FleetView) -> list[tuple[Suspect, Diagnosis]]:
    """Replicas that were once suspected of silent corruption, tolerated, and run as the same incarnation still.

    A suspicion that an operator reviewed as wrong does not count.
    """
    found = {}
    for incident in incidents:
        if incident.review is not None and not incident.review.right:
            continue
        for diagnosis in incident.diagnoses:
            for suspect in diagnosis.suspects if ONCE in diagnosis.detectors else ():
                view = fleet.find(suspect.replica)
                if view is not None and view.desired_incarnation == suspect.incarnation and suspect.node:
                    found[suspect.replica] = (suspect, diagnosis)
    return list(found.values())


def failed_burn_ins(
    suspected: Iterable[tuple[Suspect, Diagnosis]], nodes: Mapping[str, NodeRecord], now: float
) -> list[Diagnosis]:
    """A failed burn-in of its node counts like a second suspicion of the replica.

    The node's newest burn-in that could check anything counts, whether it came before or after the suspicion, unless an
    operator has returned the node to service since.
    """
    found = []
    for suspect, once in suspected:
        record = nodes.get(suspect.node) or NodeRecord(node=suspect.node)
        done = [b for b in record.burn_ins if any(c.passed is not None for c in b.result.checks)]
        if not done or done[-1].result.passed or done[-1].at < (record.returned_at or -math.inf):
            continue
        newest = done[-1]
        failed = "; ".join(f"{c.name}: {c.because}" for c in newest.result.checks if c.passed is False)
        what = f"the burn-in of {suspect.node} by {newest.by} failed ({failed})"
        found.append(
            Diagnosis(
                suspects=(suspect,),
                fault_class=FaultClass.SILENT_CORRUPTION,
                onset=once.onset,
                detected_at=now,
                confidence=0.9,
                because=f"{suspect.replica}#{suspect.incarnation} was suspected once of computing wrong numbers, and "
                f"{what}",
                evidence=(*once.evidence, Evidence(kind=BURN_IN, text=what, values={"finished_at": newest.at})),
                detectors=(AGAIN, BURN_IN),
                about=f":{BURN_IN}",
            )
        )
    return found
