"""Replacement requests of operators: each opens an incident with the same guards, limits and verification as a
fault."""

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.journal.journal import Journal
from rolecall.recovery.fleet import ReplicaView
from rolecall.recovery.incident_store import IncidentProjection, open_incident
from rolecall.recovery.incidents.incident import OPERATOR, Incident
from rolecall.recovery.loop import LEASE_NAME


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
    return open_incident(journal, projection, replacement_request(view, because, journal.clock.wall()))


def handling_incident(projection: IncidentProjection, replica: str) -> Incident | None:
    """The open incident that handles this replica."""
    return next((i for i in projection.open_incidents() if replica in (*i.named, *i.touched)), None)


def watch_hint(journal: Journal) -> str:
    """Appended to a confirmation when no recovery leader would act on the request."""
    lease = journal.lease(LEASE_NAME)
    watched = lease is not None and lease.holder != "" and lease.expires_at > journal.clock.wall()
    return "" if watched else " (no watch holds the lease: start one with `rolecall watch`)"
