"""What a person can say to recovery: the functions behind `rolecall pause`, `approve`, `hold` and so on.

A person's word is an event like any other. Nothing here acts: a request opens an incident, which the watch that holds
the lease takes through the same guards as a diagnosis. Works with any watch, on any machine that reaches the database.

All that a person may say or ask has its name here; nodes stand in `node_commands`, questions in `asking`.
"""

from collections.abc import Callable
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
from rolecall.recovery.incidents.incident import NOT_BEGUN, RIGHT, WRONG, Attempt, Decision, Incident, IncidentState
from rolecall.recovery.incidents.projection import INCIDENT_KINDS
from rolecall.recovery.loop import PAUSED_FLAG
from rolecall.recovery.next_step import decision_key
from rolecall.recovery.operators.node_commands import burned_in, drain, nodes, quarantine, return_node
from rolecall.recovery.operators.queries import incidents, incidents_text, known, replay, status, status_text
from rolecall.recovery.operators.requests import ask_replacement, handling_incident, watch_hint
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
    "burned_in",
    "drain",
    "hold_plan",
    "incidents",
    "incidents_text",
    "lift_hold",
    "nodes",
    "pause_recovery",
    "quarantine",
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
"""A hold that nobody remembers must end; who needs longer says so again, or pauses."""
TRIES_MAX = 5
"""How often a word is tried again when the incident moved meanwhile: each time it is decided anew whether it fits."""


# --- saying -------------------------------------------------------------------------------------------------------


def pause_recovery(place: RunLocation, by: str, because: str) -> str:
    """Stops all acting before the next action; returns the sentence that says so."""
    checked_name(by)
    checked_reason(because)
    with journal_of(place) as journal:
        # The flag first: it is what stops the next action, the event is what remembers.
        journal.set_flag(PAUSED_FLAG, f"{by}: {because}")
        journal.append(RecoveryPaused(by=by, because=because))
    return f"{place.run_id} is paused: no action begins until `rolecall resume`"


def resume_recovery(place: RunLocation, by: str) -> str:
    """Ends a pause; returns the sentence that says so."""
    checked_name(by)
    with journal_of(place) as journal:
        was = journal.flag(PAUSED_FLAG)
        journal.set_flag(PAUSED_FLAG, None)
        journal.append(RecoveryResumed(by=by))
    return f"{place.run_id} acts again" if was is not None else f"{place.run_id} was not paused"


def approve_plan(place: RunLocation, digest: str, by: str, clock: Clock | None = None) -> str:
    """Approves the proposed plan of this digest, once; the guards look again before it is performed.

    Raises:
        CommandRefused: no such proposal, or it was decided or has lapsed already.
    """
    checked_name(by)

    def word(i: Incident, a: Attempt, now: float) -> _CommandEvent:
        _undecided(a)
        if i.state is not S.PROPOSED:
            raise CommandRefused(f"plan {digest} is not proposed: {i.incident_id} is {i.state}")
        if a.expires_at is not None and now > a.expires_at:
            raise CommandRefused(f"plan {digest} lapsed {now - a.expires_at:.0f} s ago: it is not approved")
        return _CommandEvent(PlanApproved(digest=digest, by=by), decision_key(i.incident_id, a.number))

    incident, attempt = _append_command(place, digest, word, clock)
    told = f"{attempt.plan.action} of {_targets(attempt)} is approved, for {incident.incident_id}"
    held = attempt.hold is not None and attempt.hold.stands((clock or SystemClock()).wall())
    return told + (f"; {attempt.hold.by} holds it until {attempt.hold.until_text}" if attempt.hold and held else "")


def reject_plan(place: RunLocation, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Rejects the plan of this digest, which is proposed or held: its incident is closed, and a person is told.

    Raises:
        CommandRefused: no such plan, or it was decided or has begun already.
    """
    checked_name(by)
    checked_reason(because, needed=False)

    def word(i: Incident, a: Attempt, now: float) -> _CommandEvent:
        _undecided(a)
        rejected = PlanRejected(digest=digest, by=by, because=because)
        return _CommandEvent(rejected, decision_key(i.incident_id, a.number))

    incident, attempt = _append_command(place, digest, word, clock)
    return f"{attempt.plan.action} of {_targets(attempt)} is rejected, for {incident.incident_id}"


def hold_plan(
    place: RunLocation, digest: str, by: str, because: str, seconds: float, clock: Clock | None = None
) -> str:
    """Nothing of this plan begins for so long, and no proposal of it lapses. Said again, it is held for longer.

    When the time is over the guards look again, a proposal waits as long as a new one would, and a person is told.

    Raises:
        CommandRefused: no such plan, or it was rejected or has begun already.
    """
    checked_name(by)
    checked_reason(because)
    if not 0 < seconds <= HOLD_SECONDS_MAX:
        raise CommandRefused(f"a hold of {seconds:g} s: it may last up to {HOLD_SECONDS_MAX:.0f} s")

    def word(i: Incident, a: Attempt, now: float) -> _CommandEvent:
        _not_over(a)
        if a.hold is not None and a.hold.stands(now) and now + seconds < a.hold.until:
            raise CommandRefused(
                f"{a.hold.by} holds plan {digest} for longer, until {a.hold.until_text}; lift that hold to end it sooner"
            )
        return _CommandEvent(HoldPlaced(digest=digest, by=by, because=because, until=now + seconds))

    incident, attempt = _append_command(place, digest, word, clock)
    until = attempt.hold.until_text if attempt.hold else ""
    return f"{attempt.plan.action} of {_targets(attempt)} is held until {until}, for {incident.incident_id}"


def lift_hold(place: RunLocation, digest: str, by: str, because: str = "", clock: Clock | None = None) -> str:
    """Ends a hold before its time, whoever placed it; the guards look again.

    Raises:
        CommandRefused: no such plan, or nobody holds it.
    """
    checked_name(by)
    checked_reason(because, needed=False)

    def word(i: Incident, a: Attempt, now: float) -> _CommandEvent:
        _not_over(a)
        if a.hold is None or not a.hold.stands(now):
            raise CommandRefused(f"nobody holds plan {digest}")
        return _CommandEvent(HoldLifted(digest=digest, by=by, because=because))

    incident, attempt = _append_command(place, digest, word, clock)
    return f"{attempt.plan.action} of {_targets(attempt)} is held no longer, for {incident.incident_id}"


@dataclass(frozen=True, slots=True)
class _CommandEvent:
    """What a person says of a plan, as an event."""

    payload: PlanApproved | PlanRejected | HoldPlaced | HoldLifted
    key: str | None = None


def _append_command(
    place: RunLocation, digest: str, word: Callable[[Incident, Attempt, float], _CommandEvent], clock: Clock | None
) -> tuple[Incident, Attempt]:
    """Writes the word, if it fits what the incident is at that moment; returns incident and attempt after it."""
    with opened(place, clock) as (journal, book):
        for _ in range(TRIES_MAX):
            incident, attempt = _not_begun(book, digest)
            said = word(incident, attempt, journal.clock.wall())
            try:
                event = journal.append(
                    said.payload,
                    incident_id=incident.incident_id,
                    caused_by=incident.last_event_id,
                    key=said.key,
                    unless=INCIDENT_KINDS,
                    since=incident.last_seq,
                )
            except ConcurrentWrite:
                book.refresh(journal)
                continue
            # Approval, rejection and lapse share a key: whichever is written first stands, and comes back here.
            standing = event.payload
            if not isinstance(standing, type(said.payload)) or standing.by != said.payload.by:
                because = getattr(standing, "because", "")
                raise CommandRefused(f"plan {digest}: {event.kind} came first ({because})")
            book.refresh(journal)
            after = book.incidents[incident.incident_id]
            assert after.attempt is not None
            return after, after.attempt
    raise CommandRefused(f"plan {digest}: its incident moves on too fast, look at it again")


def _not_begun(book: IncidentProjection, digest: str) -> tuple[Incident, Attempt]:
    for incident in book.open_incidents():
        attempt = incident.attempt
        if attempt is None or attempt.plan.digest != digest:
            continue
        if incident.state in NOT_BEGUN and attempt.plan.action is not ActionKind.TOLERATE:
            return incident, attempt
        raise CommandRefused(
            f"plan {digest} is not proposed and not held: {incident.incident_id} is {incident.state}. In mode act a plan "
            "begins in the moment in which it is made, unless a guard holds it; `rolecall pause` stops what comes next"
        )
    waiting = [a.plan.digest for i in book.open_incidents() if (a := i.attempt) and i.state in NOT_BEGUN]
    raise CommandRefused(f"no plan {digest} is open; these wait for a word: {', '.join(waiting) or 'none'}")


def _undecided(attempt: Attempt) -> None:
    if attempt.decision is not None:
        raise CommandRefused(f"plan {attempt.plan.digest} was {attempt.decision} already")


def _not_over(attempt: Attempt) -> None:
    if attempt.decision in (Decision.REJECTED, Decision.EXPIRED):
        raise CommandRefused(f"plan {attempt.plan.digest} was {attempt.decision} already")


def _targets(attempt: Attempt) -> str:
    return ", ".join(f"{t.replica}#{t.incarnation}" for t in attempt.plan.targets) or "the job"


def review_diagnosis(
    place: RunLocation, incident_id: str, right: bool, by: str, because: str = "", clock: Clock | None = None
) -> str:
    """Says whether the diagnosis of an incident was right, also after its end; the newest word counts.

    Raises:
        CommandRefused: there is no such incident.
    """
    checked_name(by)
    checked_reason(because, needed=False)
    with opened(place, clock) as (journal, book):
        found = known(book, incident_id)
        verdict = RIGHT if right else WRONG
        review = DiagnosisReviewed(verdict=verdict, by=by, because=because)
        journal.append(review, incident_id=incident_id, caused_by=found.last_event_id)
    return f"the diagnosis of {incident_id} is marked {verdict}"


def replace(place: RunLocation, replica: str, reason: str, by: str, clock: Clock | None = None) -> str:
    """Asks for the present incarnation of `replica` to be replaced; returns the sentence with the incident's id.

    Raises:
        BadId: `replica` is not written role/index.
        CommandRefused: there is no such replica, or an incident deals with it already.
    """
    checked_name(by)
    checked_reason(reason)
    split_replica(replica)
    with opened(place, clock) as (journal, book):
        view = fleet_view(journal.desired(), journal.current()).find(replica)
        if view is None:
            known_ones = ", ".join(sorted(journal.desired()))
            raise CommandRefused(f"{replica} is not part of this run: {known_ones}")
        deals = handling_incident(book, replica)
        if deals is not None:
            raise CommandRefused(f"{deals.incident_id} deals with {replica} already: {deals.state}")
        name = ask_replacement(journal, book, view, by, reason)
        hint = watch_hint(journal)
    return f"{name} is open: {replica} is replaced when the guards pass{hint}"
