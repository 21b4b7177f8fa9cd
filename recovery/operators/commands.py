"""Operator commands: the functions behind `rolecall pause`, `approve`, `hold` and so on.

A command appends a journal event and takes no action itself. A replacement request opens an incident, which the watch
that holds the lease takes through the same guards as a diagnosis. Commands work from any machine that reaches the
journal's database.

A run that has ended takes no command but a pause, a review, and the result of a burn-in.

Draining a node quarantines it and opens one replacement request per replica there. Repeating a drain that was
interrupted adds only what is missing.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import ActionKind, Diagnosis, Suspect
from rolecall.core.errors import CommandRefused, ConcurrentWrite, InvalidId
from rolecall.core.faults import FaultClass
from rolecall.core.ids import checked_id, split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import (
    BurnInFinished,
    DiagnosisReviewed,
    HoldLifted,
    HoldPlaced,
    LeaseAcquired,
    NodeDrained,
    NodeQuarantined,
    NodeReturnedToService,
    PlanApproved,
    PlanRejected,
    RecoveryPaused,
    RecoveryResumed,
)
from rolecall.core.nodes import quarantined_nodes
from rolecall.recovery.borrowing import BORROWER
from rolecall.recovery.fleet_view import FleetView, ReplicaView, fleet_of
from rolecall.recovery.incidents import (
    INCIDENT_KINDS,
    NOT_STARTED,
    OPERATOR,
    RIGHT,
    WRONG,
    Attempt,
    Decision,
    Incident,
    IncidentState,
)
from rolecall.recovery.loop import LEASE_NAME, PAUSED_FLAG
from rolecall.recovery.next_step import decision_key
from rolecall.recovery.nodes import NODE_KINDS, BurnIn, NodeRecord, fold_nodes, known_nodes, returned_nodes
from rolecall.recovery.operators.queries import known
from rolecall.recovery.operators.run_location import RunLocation, check_request, checked_name, journal_of, opened
from rolecall.recovery.policy import lost_nodes
from rolecall.recovery.projection import IncidentProjection, open_incident

S = IncidentState

HOLD_SECONDS_MAX = 24 * 3600.0
"""A forgotten hold must end. To hold for longer, repeat the command or pause."""
REPLICAS_PER_DRAIN_MAX = 64
"""Incidents that one command may open."""
TRIES_MAX = 5
"""Retries of a command whose incident changed concurrently; each retry checks again whether the command is valid."""


@contextmanager
def _of_running(
    location: RunLocation, clock: Clock | None = None, *, also_watched: bool = False
) -> Iterator[tuple[Journal, IncidentProjection]]:
    """The journal and the incidents of a run that goes on. Raises CommandRefused: it has ended, or rolecall only
    watches it, unless `also_watched`."""
    with opened(location, clock) as (journal, projection):
        if not also_watched:
            _refuse_watched(
                location, journal, "rolecall neither places nor replaces its processes; use what started the job"
            )
        if projection.ended is not None:
            allowed = "only a review of a diagnosis and a burn-in can still be recorded"
            raise CommandRefused(f"{location.run_id} has ended ({projection.ended}): {allowed}")
        yield journal, projection


def _refuse_watched(location: RunLocation, journal: Journal, because: str) -> None:
    """Raises CommandRefused: rolecall only watches this run."""
    if _is_only_watched(journal):
        raise CommandRefused(f"{location.run_id} is only watched: {because}")


def _is_only_watched(journal: Journal) -> bool:
    return not journal.desired() and journal.last(EventKind.RUN_STARTED) is None


def pause_recovery(location: RunLocation, by: str, because: str) -> str:
    """No further action starts until `resume_recovery`. Returns the confirmation to print. Raises CommandRefused:
    rolecall only watches the run, and ends no orphans."""
    check_request(by, because)
    with journal_of(location) as journal:
        acquired = journal.last(EventKind.LEASE_ACQUIRED)
        if acquired is None or acquired.as_(LeaseAcquired).orphans_mode in ("", "observe"):
            _refuse_watched(location, journal, "rolecall takes no action on it, so there is nothing to pause")
        # The flag first: it stops the next action. The event is the record.
        journal.set_flag(PAUSED_FLAG, f"{by}: {because}")
        journal.append(RecoveryPaused(by=by, because=because))
    return f"{location.run_id} is paused: no action starts until `rolecall resume {location.shell_name}`"


def resume_recovery(location: RunLocation, by: str) -> str:
    """Ends a pause. Returns the confirmation to print."""
    checked_name(by)
    with journal_of(location) as journal:
        was = journal.flag(PAUSED_FLAG)
        journal.set_flag(PAUSED_FLAG, None)
        journal.append(RecoveryResumed(by=by))
    return f"{location.run_id} resumed" if was is not None else f"{location.run_id} was not paused"


def approve_plan(location: RunLocation, digest: str, by: str, clock: Clock | None = None) -> str:
    """Approves the proposed plan with this digest, once. The guards are checked again before it is performed. Raises
    CommandRefused: no such proposal, or it was already decided or has expired."""
    checked_name(by)

    def event(incident: Incident, attempt: Attempt, now: float) -> _CommandEvent:
        _refuse_if_decided(attempt)
        if incident.state is not S.PROPOSED:
            raise CommandRefused(f"plan {digest} is not proposed: {incident.incident_id} is {incident.state}")
        if attempt.expires_at is not None and now > attempt.expires_at:
            raise CommandRefused(f"plan {digest} expired {now - attempt.expires_at:.0f} s ago and cannot be approved")
        return _CommandEvent(PlanApproved(digest=digest, by=by), decision_key(incident.incident_id, attempt.number))

    incident, attempt = _append_command(location, digest, event, clock)
    text = f"approved: {_summary(incident, attempt)}"
    if attempt.hold is not None and attempt.hold.active((clock or SystemClock()).wall()):
        text += f"; on hold by {attempt.hold.by} until {attempt.hold.until_text}"
    return text


def reject_plan(location: RunLocation, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Rejects the proposed or held plan with this digest. Its incident is escalated: on-call is paged and it closes.
    Raises CommandRefused: no such plan, or it was already decided or started."""
    check_request(by, because, needed=False)

    def event(incident: Incident, attempt: Attempt, now: float) -> _CommandEvent:
        _refuse_if_decided(attempt)
        rejected = PlanRejected(digest=digest, by=by, because=because)
        return _CommandEvent(rejected, decision_key(incident.incident_id, attempt.number))

    incident, attempt = _append_command(location, digest, event, clock)
    return f"rejected: {_summary(incident, attempt)}"


def hold_plan(
    location: RunLocation, digest: str, by: str, because: str, seconds: float, clock: Clock | None = None
) -> str:
    """Keeps this plan from starting, and its proposal from expiring, for `seconds`. Repeat the command to extend the
    hold.

    When the hold ends, on-call is notified, the guards are checked again and a proposal gets its full approval time.

    Raises CommandRefused: no such plan, or it was already rejected or started.
    """
    check_request(by, because)
    if not 0 < seconds <= HOLD_SECONDS_MAX:
        raise CommandRefused(f"a hold of {seconds:g} s: must be above 0 and at most {HOLD_SECONDS_MAX:.0f} s")

    def event(incident: Incident, attempt: Attempt, now: float) -> _CommandEvent:
        _refuse_if_decided(attempt, (Decision.REJECTED, Decision.EXPIRED))
        hold = attempt.hold
        if hold is not None and hold.active(now) and now + seconds < hold.until:
            already = f"plan {digest} is already on hold by {hold.by} until {hold.until_text}"
            raise CommandRefused(f"{already}; lift that hold to end it sooner")
        return _CommandEvent(HoldPlaced(digest=digest, by=by, because=because, until=now + seconds))

    incident, attempt = _append_command(location, digest, event, clock)
    until = attempt.hold.until_text if attempt.hold else ""
    return f"on hold until {until}: {_summary(incident, attempt)}"


def lift_hold(location: RunLocation, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Ends a hold early, whoever placed it; the guards are checked again. Raises CommandRefused: no such plan, or it is
    not on hold."""
    check_request(by, because, needed=False)

    def event(incident: Incident, attempt: Attempt, now: float) -> _CommandEvent:
        _refuse_if_decided(attempt, (Decision.REJECTED, Decision.EXPIRED))
        if attempt.hold is None or not attempt.hold.active(now):
            raise CommandRefused(f"plan {digest} is not on hold")
        return _CommandEvent(HoldLifted(digest=digest, by=by, because=because))

    incident, attempt = _append_command(location, digest, event, clock)
    return f"hold lifted: {_summary(incident, attempt)}"


@dataclass(frozen=True, slots=True)
class _CommandEvent:
    payload: PlanApproved | PlanRejected | HoldPlaced | HoldLifted
    key: str | None = None


def _append_command(
    location: RunLocation, digest: str, event: Callable[[Incident, Attempt, float], _CommandEvent], clock: Clock | None
) -> tuple[Incident, Attempt]:
    """Writes the command's event if it is valid in the incident's current state; returns incident and attempt after
    it."""
    with _of_running(location, clock) as (journal, projection):
        for _ in range(TRIES_MAX):
            incident, attempt = _not_started(projection, digest)
            command = event(incident, attempt, journal.clock.wall())
            try:
                written = journal.append(
                    command.payload,
                    incident_id=incident.incident_id,
                    caused_by=incident.last_event_id,
                    key=command.key,
                    unless=INCIDENT_KINDS,
                    since=incident.last_seq,
                )
            except ConcurrentWrite:
                projection.refresh(journal)
                continue
            # Approval, rejection and expiry share a key: the first one written wins and is returned here.
            first = written.payload
            if not isinstance(first, type(command.payload)) or first.by != command.payload.by:
                because = getattr(first, "because", "")
                raise CommandRefused(f"plan {digest}: {written.kind} came first ({because})")
            projection.refresh(journal)
            after = projection.incidents[incident.incident_id]
            assert after.attempt is not None
            return after, after.attempt
    raise CommandRefused(f"plan {digest}: its incident keeps changing; check it and repeat the command")


def _not_started(projection: IncidentProjection, digest: str) -> tuple[Incident, Attempt]:
    for incident in projection.open_incidents():
        attempt = incident.attempt
        if attempt is None or attempt.plan.digest != digest:
            continue
        if incident.state in NOT_STARTED and attempt.plan.action is not ActionKind.TOLERATE:
            return incident, attempt
        raise CommandRefused(
            f"plan {digest} is neither proposed nor held: {incident.incident_id} is {incident.state}. In mode act a "
            "plan starts as soon as it is made unless a guard blocks it; a pause of recovery stops later actions"
        )
    waiting = [a.plan.digest for i in projection.open_incidents() if (a := i.attempt) and i.state in NOT_STARTED]
    raise CommandRefused(f"no open plan {digest}; plans awaiting a decision: {', '.join(waiting) or 'none'}")


def _refuse_if_decided(attempt: Attempt, decisions: Container[Decision] = tuple(Decision)) -> None:
    if attempt.decision is not None and attempt.decision in decisions:
        raise CommandRefused(f"plan {attempt.plan.digest} was already {attempt.decision}")


def _summary(incident: Incident, attempt: Attempt) -> str:
    return f"{attempt.plan.words} ({incident.incident_id})"


def review_diagnosis(
    location: RunLocation, incident_id: str, right: bool, by: str, because: str = "", clock: Clock | None = None
) -> str:
    """Records whether the diagnosis of an open or closed incident was right; the newest review counts. Raises
    CommandRefused: there is no such incident."""
    check_request(by, because, needed=False)
    with opened(location, clock) as (journal, projection):
        found = known(projection, incident_id)
        verdict = RIGHT if right else WRONG
        review = DiagnosisReviewed(verdict=verdict, by=by, because=because)
        journal.append(review, incident_id=incident_id, caused_by=found.last_event_id)
    return f"diagnosis of {incident_id} reviewed as {verdict}"


def replace(location: RunLocation, replica: str, reason: str, by: str, clock: Clock | None = None) -> str:
    """Requests replacement of the current incarnation of `replica`. Returns the confirmation with the incident's id.
    Raises InvalidId: `replica` is not written role/index; CommandRefused: there is no such replica, or an open incident
    already handles it."""
    check_request(by, reason)
    split_replica(replica)
    with _of_running(location, clock) as (journal, projection):
        view = fleet_of(journal).find(replica)
        if view is None:
            raise CommandRefused(f"{replica} is not part of this run: {', '.join(sorted(journal.desired()))}")
        if view.lent:
            raise CommandRefused(f"{replica} has lent its node and does not run; it starts again when a node is free")
        handling = handling_incident(projection, replica)
        if handling is not None:
            raise CommandRefused(f"{handling.incident_id} already handles {replica}: {handling.state}")
        name = request_replacement(journal, projection, view, by, reason)
        hint = watch_hint(journal, location.shell_name)
    return f"{name} opened: {replica} will be replaced once all guards allow it{hint}"


def quarantine(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """No new replica is placed on `node`; those that run there continue. Where rolecall only watches the job, its watch
    calls the node unfit and does no more. Raises CommandRefused: there is no such node, or it is already quarantined.
    """
    check_request(by, because)
    with _of_running(location, clock, also_watched=True) as (journal, projection):
        record = _record(journal, projection, node)
        if record.quarantined:
            by_and_why = f"{record.quarantined_by}: {record.quarantined_because}"
            raise CommandRefused(f"{node} is already quarantined by {by_and_why}")
        journal.append(NodeQuarantined(node=node, by=by, because=because))
        only_watched = _is_only_watched(journal)
    until = f"until {_return_hint(node, location.shell_name)}"
    if only_watched:
        return f"{node} is quarantined {until}: its watch calls it unfit (/v1/unfit); nothing is done to the job"
    return f"{node} is quarantined: no replica is placed there {until}"


def return_node(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Ends a quarantine, whoever set it; a node that was lost may take replicas again, too. Raises CommandRefused: the
    node is neither quarantined nor lost."""
    check_request(by, because)
    with _of_running(location, clock, also_watched=True) as (journal, projection):
        record = _record(journal, projection, node)
        lost = lost_nodes(projection.incidents.values(), returned_nodes(journal))
        if not record.quarantined and node not in lost:
            raise CommandRefused(f"{node} is neither quarantined nor lost")
        journal.append(NodeReturnedToService(node=node, by=by, because=because))
        only_watched = _is_only_watched(journal)
    return f"{node} is back in service{'' if only_watched else ': replicas may be placed there'}"


def drain(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Quarantines `node` and requests that each replica there is replaced on another node. Raises CommandRefused: there
    is no such node."""
    check_request(by, because)
    with _of_running(location, clock) as (journal, projection):
        return drain_node(journal, projection, node, by, because, location.shell_name)


def drain_node(
    journal: Journal, projection: IncidentProjection, node: str, by: str, because: str, shell_name: str = "RUN"
) -> str:
    """`drain` on an open journal."""
    if not _record(journal, projection, node).quarantined:
        journal.append(NodeQuarantined(node=node, by=by, because=f"drained: {because}"))
    fleet = fleet_of(journal)
    affected = [view for view in fleet.replicas if node in (view.node, view.next_node)]
    requested: list[str] = []
    handled: list[str] = []
    incident_ids: list[str] = []
    for view in affected[:REPLICAS_PER_DRAIN_MAX]:
        handling = handling_incident(projection, view.replica)
        if handling is None:
            name = request_replacement(journal, projection, view, by, f"{node} is drained: {because}")
            incident_ids.append(name)
            requested.append(f"{view.replica} ({name})")
        else:
            handled.append(f"{view.replica} ({handling.incident_id}, {handling.state})")
    journal.append(NodeDrained(node=node, by=by, because=because, incidents=tuple(incident_ids)))
    parts = [f"{node} is drained: no replica is placed there until {_return_hint(node, shell_name)}"]
    if requested:
        parts.append(f"to be moved once all guards allow it: {', '.join(requested)}")
    if handled:
        parts.append(f"already handled: {', '.join(handled)}")
    left = [str(view.replica) for view in affected[REPLICAS_PER_DRAIN_MAX:]]
    if left:
        parts.append(f"repeat the command for {len(left)} more: {', '.join(left[:5])}")
    avoid = frozenset({node, *quarantined_nodes(journal)})
    stay = [v.replica for v in affected if fleet.spare_node(split_replica(v.unit)[0], avoid) is None]
    if requested and stay:
        lending = f", unless a rollout lends its node to a {BORROWER}"
        hint = lending if any(split_replica(r)[0] == BORROWER for r in stay) else ""
        parts.append(f"no node is free for {', '.join(stay[:5])}: on-call is paged{hint}")
    if not affected:
        parts.append("no replica runs there")
    return "; ".join(parts) + (watch_hint(journal, shell_name) if requested else "")


def check_burn_in(location: RunLocation, node: str, by: str) -> None:
    """To be called before a burn-in, which may take hours: can its result be recorded? Raises as `record_burn_in`."""
    checked_name(by)
    _check_node_name(node)
    with journal_of(location):
        pass


def record_burn_in(
    location: RunLocation, node: str, result: Mapping[str, Any], by: str, clock: Clock | None = None
) -> str:
    """Records the result of a burn-in of `node`. The node need not be part of the run yet. Raises CommandRefused:
    `node` is not a valid node name, or `result` not a burn-in result."""
    checked_name(by)
    burn_in = BurnIn.from_dict(result)
    _check_node_name(node)
    finished = BurnInFinished(node=node, by=by, passed=burn_in.passed, seconds=burn_in.seconds, checks=burn_in.checks)
    with journal_of(location, clock) as journal:
        journal.append(finished)
    return f"recorded: burn-in of {node} {'passed' if burn_in.passed else 'FAILED'}"


def nodes(location: RunLocation, clock: Clock | None = None) -> list[dict[str, Any]]:
    """Every node with its replicas, state and the incidents that name it, as plain values; most incidents first.

    Replacement requests and diagnoses reviewed as wrong do not count.
    """
    with opened(location, clock) as (journal, projection):
        records = fold_nodes(journal.events(kinds=NODE_KINDS))
        fleet = fleet_of(journal)
        known = known_nodes(journal)
    incident_ids: dict[str, list[str]] = {}
    for incident in projection.incidents.values():
        wrong = incident.review is not None and not incident.review.right
        if not incident.requested_by_operator and not wrong:
            for node in sorted({s.node for s in incident.diagnosis.suspects if s.node}):
                incident_ids.setdefault(node, []).append(incident.incident_id)
    every = {*known, *records, *incident_ids}
    rows = [_row(records.get(n) or NodeRecord(node=n), fleet, incident_ids.get(n, [])) for n in every]
    return sorted(rows, key=lambda row: (-row["num_incidents"], row["node"]))


def _row(record: NodeRecord, fleet: FleetView, incident_ids: list[str]) -> dict[str, Any]:
    return {
        **asdict(record),
        "quarantined": record.quarantined,
        "replicas": [
            {"replica": r.replica, "incarnation": r.incarnation, "state": str(r.state) if r.state else None}
            for r in fleet.replicas
            if r.node == record.node
        ],
        "num_incidents": len(incident_ids),
        "incidents": incident_ids,
    }


def _record(journal: Journal, projection: IncidentProjection, node: str) -> NodeRecord:
    """Raises CommandRefused: there is no such node."""
    _check_node_name(node)
    records = fold_nodes(journal.events(kinds=NODE_KINDS))
    known = known_nodes(journal) | records.keys()
    known |= {str(s.node) for i in projection.incidents.values() for s in i.diagnosis.suspects if s.node}
    if node not in known:
        raise CommandRefused(f"{node} is not a node of this run: {', '.join(sorted(known)[:50]) or 'none known'}")
    return records.get(node) or NodeRecord(node=node)


def _check_node_name(node: str) -> None:
    try:
        checked_id(node, "node")
    except InvalidId as e:
        raise CommandRefused(str(e)) from None


def replacement_request(view: ReplicaView, because: str, now: float) -> Diagnosis:
    """A request to replace this incarnation, as a diagnosis. `now`: wall seconds."""
    suspect = Suspect(node=view.node, role=view.role, replica=view.replica, incarnation=view.desired_incarnation)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=FaultClass.CANNOT_TELL,
        onset=now,
        detected_at=now,
        confidence=1.0,
        because=because,
        detectors=(OPERATOR,),
    )


def request_replacement(
    journal: Journal, projection: IncidentProjection, view: ReplicaView, by: str, reason: str
) -> str:
    """Opens an incident that requests replacement of this incarnation; returns its id."""
    because = f"{by} requested replacement of {view.replica}#{view.desired_incarnation}: {reason}"
    request = replacement_request(view, because, journal.clock.wall())
    return open_incident(journal, projection, request)


def handling_incident(projection: IncidentProjection, replica: str) -> Incident | None:
    """The open incident that handles this replica."""
    return next((i for i in projection.open_incidents() if replica in (*i.named, *i.handled)), None)


def _return_hint(node: str, shell_name: str) -> str:
    return f'`rolecall node return {node} --run {shell_name} --reason "why"`'


def watch_hint(journal: Journal, shell_name: str) -> str:
    """Appended to a confirmation when no recovery leader would act on the request."""
    lease = journal.lease(LEASE_NAME)
    watched = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    start = f"`rolecall status {shell_name}` prints the command that starts one"
    return "" if watched else f" (no watch holds the lease; {start})"
