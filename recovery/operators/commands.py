"""Operator commands: the functions behind `rolecall pause`, `approve`, `hold` and so on.

A command appends a journal event and takes no action itself. A replacement request opens an incident, which the watch
that holds the lease takes through the same guards as a diagnosis. Commands work from any machine that reaches the
journal's database.

This module exports every command and query; node commands are in `node_commands`, queries in `queries`.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import CommandRefused, ConcurrentWrite
from rolecall.core.ids import split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads import (
    DiagnosisReviewed,
    HoldLifted,
    HoldPlaced,
    PlanApproved,
    PlanRejected,
    RecoveryPaused,
    RecoveryResumed,
)
from rolecall.recovery.fleet import fleet_view
from rolecall.recovery.incident_store import IncidentProjection
from rolecall.recovery.incidents.incident import NOT_STARTED, RIGHT, WRONG, Attempt, Decision, Incident, IncidentState
from rolecall.recovery.incidents.projection import INCIDENT_KINDS
from rolecall.recovery.loop import PAUSED_FLAG
from rolecall.recovery.next_step import decision_key
from rolecall.recovery.operators.node_commands import drain, nodes, quarantine, record_burn_in, return_node
from rolecall.recovery.operators.queries import incidents, incidents_text, known, replay, status, status_text
from rolecall.recovery.operators.requests import handling_incident, request_replacement, watch_hint
from rolecall.recovery.operators.run_location import (
    JournalLocation,
    RunLocation,
    checked_name,
    checked_reason,
    journal_of,
    opened,
)

__all__ = [
    "JournalLocation",
    "RunLocation",
    "approve_plan",
    "drain",
    "hold_plan",
    "incidents",
    "incidents_text",
    "lift_hold",
    "nodes",
    "pause_recovery",
    "quarantine",
    "record_burn_in",
    "reject_plan",
    "replace",
    "replay",
    "resume_recovery",
    "return_node",
    "review_diagnosis",
    "status",
    "status_text",
]  # fmt: skip

K, S = EventKind, IncidentState


HOLD_SECONDS_MAX = 24 * 3600.0
"""A forgotten hold must end. To hold for longer, repeat the command or pause."""
TRIES_MAX = 5
"""Retries of a command whose incident changed concurrently; each retry checks again whether the command is valid."""


def pause_recovery(location: RunLocation, by: str, because: str) -> str:
    """No further action starts until `resume_recovery`. Returns the confirmation to print."""
    checked_name(by)
    checked_reason(because)
    with journal_of(location) as journal:
        # The flag first: it stops the next action. The event is the record.
        journal.set_flag(PAUSED_FLAG, f"{by}: {because}")
        journal.append(RecoveryPaused(by=by, because=because))
    return f"{location.run_id} is paused: no action starts until `rolecall resume`"


def resume_recovery(location: RunLocation, by: str) -> str:
    """Ends a pause. Returns the confirmation to print."""
    checked_name(by)
    with journal_of(location) as journal:
        was = journal.flag(PAUSED_FLAG)
        journal.set_flag(PAUSED_FLAG, None)
        journal.append(RecoveryResumed(by=by))
    return f"{location.run_id} resumed" if was is not None else f"{location.run_id} was not paused"


def approve_plan(location: RunLocation, digest: str, by: str, clock: Clock | None = None) -> str:
    """Approves the proposed plan with this digest, once. The guards are checked again before it is performed.

    Raises:
        CommandRefused: no such proposal, or it was already decided or has expired.
    """
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

    Raises:
        CommandRefused: no such plan, or it was already decided or started.
    """
    checked_name(by)
    checked_reason(because, needed=False)

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

    Raises:
        CommandRefused: no such plan, or it was already rejected or started.
    """
    checked_name(by)
    checked_reason(because)
    if not 0 < seconds <= HOLD_SECONDS_MAX:
        raise CommandRefused(f"a hold of {seconds:g} s: must be above 0 and at most {HOLD_SECONDS_MAX:.0f} s")

    def event(incident: Incident, attempt: Attempt, now: float) -> _CommandEvent:
        _refuse_if_decided(attempt, (Decision.REJECTED, Decision.EXPIRED))
        hold = attempt.hold
        if hold is not None and hold.active(now) and now + seconds < hold.until:
            raise CommandRefused(
                f"plan {digest} is already on hold by {hold.by} until {hold.until_text}; lift that hold to end it "
                f"sooner"
            )
        return _CommandEvent(HoldPlaced(digest=digest, by=by, because=because, until=now + seconds))

    incident, attempt = _append_command(location, digest, event, clock)
    until = attempt.hold.until_text if attempt.hold else ""
    return f"on hold until {until}: {_summary(incident, attempt)}"


def lift_hold(location: RunLocation, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Ends a hold early, whoever placed it; the guards are checked again.

    Raises:
        CommandRefused: no such plan, or it is not on hold.
    """
    checked_name(by)
    checked_reason(because, needed=False)

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
    with opened(location, clock) as (journal, projection):
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
            "plan starts as soon as it is made unless a guard blocks it; `rolecall pause` stops later actions"
        )
    waiting = [a.plan.digest for i in projection.open_incidents() if (a := i.attempt) and i.state in NOT_STARTED]
    raise CommandRefused(f"no open plan {digest}; plans awaiting a decision: {', '.join(waiting) or 'none'}")


def _refuse_if_decided(attempt: Attempt, decisions: Container[Decision] = tuple(Decision)) -> None:
    if attempt.decision is not None and attempt.decision in decisions:
        raise CommandRefused(f"plan {attempt.plan.digest} was already {attempt.decision}")


def _summary(incident: Incident, attempt: Attempt) -> str:
    targets = ", ".join(f"{t.replica}#{t.incarnation}" for t in attempt.plan.targets) or "the job"
    return f"{attempt.plan.action} of {targets} ({incident.incident_id})"


def review_diagnosis(
    location: RunLocation, incident_id: str, right: bool, by: str, because: str = "", clock: Clock | None = None
) -> str:
    """Records whether the diagnosis of an open or closed incident was right; the newest review counts.

    Raises:
        CommandRefused: there is no such incident.
    """
    checked_name(by)
    checked_reason(because, needed=False)
    with opened(location, clock) as (journal, projection):
        found = known(projection, incident_id)
        verdict = RIGHT if right else WRONG
        review = DiagnosisReviewed(verdict=verdict, by=by, because=because)
        journal.append(review, incident_id=incident_id, caused_by=found.last_event_id)
    return f"diagnosis of {incident_id} marked {verdict}"


def replace(location: RunLocation, replica: str, reason: str, by: str, clock: Clock | None = None) -> str:
    """Requests replacement of the current incarnation of `replica`. Returns the confirmation with the incident's id.

    Raises:
        InvalidId: `replica` is not written role/index.
        CommandRefused: there is no such replica, or an open incident already handles it.
    """
    checked_name(by)
    checked_reason(reason)
    split_replica(replica)
    with opened(location, clock) as (journal, projection):
        view = fleet_view(journal.desired(), journal.current()).find(replica)
        if view is None:
            raise CommandRefused(f"{replica} is not part of this run: {', '.join(sorted(journal.desired()))}")
        handling = handling_incident(projection, replica)
        if handling is not None:
            raise CommandRefused(f"{handling.incident_id} already handles {replica}: {handling.state}")
        name = request_replacement(journal, projection, view, by, reason)
        hint = watch_hint(journal)
    return f"{name} opened: {replica} is replaced when the guards pass{hint}"
