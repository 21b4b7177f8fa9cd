"""What a person asks for becomes an incident like any other: the same guards, limits and proof."""

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.journal.journal import Journal
from rolecall.recovery.fleet import ReplicaView
from rolecall.recovery.incident_store import IncidentProjection, open_incident
from rolecall.recovery.incidents.incident import PERSON, Incident
from rolecall.recovery.loop import LEASE_NAME


def request(view: ReplicaView, because: str, now: float) -> Diagnosis:
    """That this incarnation should be replaced, as a diagnosis. `now`: wall seconds."""
    suspect = Suspect(node=view.node, role=view.role, replica=view.replica, incarnation=view.desired_incarnation)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=FaultClass.CANNOT_TELL,
        onset=now,
        detected_at=now,
        confidence=1.0,
        because=because,
        detectors=(PERSON,),
    )


def ask_replacement(journal: Journal, book: IncidentProjection, view: ReplicaView, by: str, reason: str) -> str:
    """Opens an incident that asks for this incarnation to be replaced; returns its id."""
    because = f"{by} asks for {view.replica}#{view.desired_incarnation} to be replaced: {reason}"
    return open_incident(journal, book, request(view, because, journal.clock.wall()))


def handling_incident(book: IncidentProjection, replica: str) -> Incident | None:
    """The open incident that is about this replica."""
    return next((i for i in book.open_incidents() if replica in (*i.named, *i.touched)), None)


def watch_hint(journal: Journal) -> str:
    """What to add to a sentence when nobody would act on it."""
    lease = journal.lease(LEASE_NAME)
    watched = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    return "" if watched else " (no watch holds the lease now: one must be started)"
