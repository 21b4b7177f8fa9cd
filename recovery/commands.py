"""What a person can say to recovery: the functions behind `rolecall pause`, `approve`, `hold` and so on.

A person's word is an event like any other. Nothing here acts: a request opens an incident, which the watch that holds
the lease takes through the same guards as a diagnosis. Works with any watch, on any machine that reaches the database.

All that a person may say or ask has its name here; nodes stand in `node_commands`, questions in `asking`.
"""

from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import Diagnosis, FaultClass, Suspect
from rolecall.core.errors import CommandRefused
from rolecall.core.events import EventKind
from rolecall.core.ids import split_replica
from rolecall.core.journal import Journal
from rolecall.recovery.asking import incidents, incidents_text, replay, status, status_text
from rolecall.recovery.book import Book, open_incident
from rolecall.recovery.fleet import fleet_view
from rolecall.recovery.incidents import PERSON, Attempt, Incident, IncidentState
from rolecall.recovery.moves import decision_key
from rolecall.recovery.node_commands import burned_in, drain, nodes, quarantine, return_node
from rolecall.recovery.place import JournalPlace, Place, journal_of, opened
from rolecall.recovery.watch import LEASE_NAME, PAUSED_FLAG

__all__ = [
    "JournalPlace",
    "Place",
    "approve",
    "burned_in",
    "drain",
    "hold",
    "incidents",
    "incidents_text",
    "lift",
    "mark",
    "nodes",
    "pause",
    "quarantine",
    "reject",
    "replace",
    "replay",
    "resume",
    "return_node",
    "status",
    "status_text",
]  # fmt: skip

K = EventKind


def hold(place: Place, digest: str, by: str, because: str, seconds: float, clock: Clock | None = None) -> str:
    """Nothing of this plan begins for so long; returns the sentence that says so."""
    raise CommandRefused("hold: not built yet")


def lift(place: Place, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Ends a hold before its time; returns the sentence that says so."""
    raise CommandRefused("lift: not built yet")


def mark(place: Place, incident_id: str, right: bool, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Says whether the diagnosis of an incident was right."""
    raise CommandRefused("mark: not built yet")


# --- saying -------------------------------------------------------------------------------------------------------


def pause(place: Place, by: str, because: str) -> str:
    """Stops all acting before the next action; returns the sentence that says so."""
    with journal_of(place) as journal:
        # The flag first: it is what stops the next action, the event is what remembers.
        journal.set_flag(PAUSED_FLAG, f"{by}: {because}")
        journal.append(K.PAUSED, {"by": by, "because": because})
    return f"{place.run_id} is paused: no action begins until `rolecall resume`"


def resume(place: Place, by: str) -> str:
    """Ends a pause; returns the sentence that says so."""
    with journal_of(place) as journal:
        was = journal.flag(PAUSED_FLAG)
        journal.set_flag(PAUSED_FLAG, None)
        journal.append(K.RESUMED, {"by": by})
    return f"{place.run_id} acts again" if was is not None else f"{place.run_id} was not paused"


def approve(place: Place, digest: str, by: str, clock: Clock | None = None) -> str:
    """Approves the proposed plan of this digest, once; the guards look again before it is performed.

    Raises:
        CommandRefused: no such proposal, or it was decided or has lapsed already.
    """
    with opened(place, clock) as (journal, book):
        incident, attempt = _proposal(book, digest)
        now = (clock or SystemClock()).wall()
        if attempt.expires_at is not None and now > attempt.expires_at:
            raise CommandRefused(f"plan {digest} lapsed {now - attempt.expires_at:.0f} s ago: it is not approved")
        _decide(journal, incident, attempt, K.PLAN_APPROVED, {"by": by})
    return f"{attempt.plan.action} of {_targets(attempt)} is approved, for {incident.incident_id}"


def reject(place: Place, digest: str, by: str, because: str = "") -> str:
    """Rejects the proposed plan of this digest.

    Raises:
        CommandRefused: no such proposal, or it was decided or has lapsed already.
    """
    with opened(place) as (journal, book):
        incident, attempt = _proposal(book, digest)
        _decide(journal, incident, attempt, K.PLAN_REJECTED, {"by": by, "because": because})
    return f"{attempt.plan.action} of {_targets(attempt)} is rejected, for {incident.incident_id}"


def _proposal(book: Book, digest: str) -> tuple[Incident, Attempt]:
    for incident in book.open_incidents():
        attempt = incident.attempt
        if attempt is None or attempt.plan.digest != digest:
            continue
        if attempt.decision is not None:
            raise CommandRefused(f"plan {digest} was {attempt.decision} already")
        if incident.state is not IncidentState.PROPOSED:
            raise CommandRefused(f"plan {digest} is not proposed: {incident.incident_id} is {incident.state}")
        return incident, attempt
    waiting = [i.attempt.plan.digest for i in book.open_incidents() if i.attempt and i.state is IncidentState.PROPOSED]
    raise CommandRefused(f"no plan {digest} is open; these wait for a word: {', '.join(waiting) or 'none'}")


def _decide(journal: Journal, incident: Incident, attempt: Attempt, kind: EventKind, body: dict[str, Any]) -> None:
    # Approval, rejection and lapse share a key: whichever is written first stands, and comes back here.
    event = journal.append(
        kind,
        {"digest": attempt.plan.digest, **body},
        incident_id=incident.incident_id,
        caused_by=incident.last_event_id,
        key=decision_key(incident.incident_id, attempt.number),
    )
    if event.kind is not kind or event.body.get("by") != body["by"]:
        raise CommandRefused(f"plan {attempt.plan.digest}: {event.kind} came first ({event.body.get('because', '')})")


def _targets(attempt: Attempt) -> str:
    return ", ".join(f"{t.replica}#{t.incarnation}" for t in attempt.plan.targets) or "the job"


def replace(place: Place, replica: str, reason: str, by: str, clock: Clock | None = None) -> str:
    """Asks for the present incarnation of `replica` to be replaced; returns the sentence with the incident's id.

    Raises:
        BadId: `replica` is not written role/index.
        CommandRefused: there is no such replica, or an incident deals with it already.
    """
    role, _ = split_replica(replica)
    with opened(place, clock) as (journal, book):
        view = fleet_view(journal.desired(), journal.current()).find(replica)
        if view is None:
            known = ", ".join(sorted(journal.desired()))
            raise CommandRefused(f"{replica} is not part of this run: {known}")
        for incident in book.open_incidents():
            if replica in (*incident.named, *incident.touched):
                raise CommandRefused(f"{incident.incident_id} deals with {replica} already: {incident.state}")
        now = (clock or SystemClock()).wall()
        suspect = Suspect(node=view.node, role=role, replica=replica, incarnation=view.desired_incarnation)
        asked = Diagnosis(
            suspects=(suspect,),
            fault_class=FaultClass.CANNOT_TELL,
            onset=now,
            detected_at=now,
            confidence=1.0,
            because=f"{by} asks for {replica}#{view.desired_incarnation} to be replaced: {reason}",
            detectors=(PERSON,),
        )
        name = open_incident(journal, book, asked)
        lease = journal.lease(LEASE_NAME)
        watched = lease is not None and lease.holder != "" and lease.expires_at > now
    hint = "" if watched else " (no watch holds the lease now: one must be started)"
    return f"{name} is open: {replica} is replaced when the guards pass{hint}"
