"""What keeps one failure from stopping the recovery loop: of the source or a detector, of an incident's handling, of
the evidence collector.

While a detector fails there is no data about the fleet: no fault counts as over, no progress is accepted, and on-call
is paged with the reason (`FaultTolerantDetector.error`).

An incident whose handling raises is retried after a pause that doubles up to `PAUSE_SECONDS_MAX`; after `TRIES_MAX`
failures in a row on-call is paged once. This is kept in memory only; the page has a key in the journal, so it is not
sent twice. Errors that concern every incident are raised: a lost lease, a database that is busy or unavailable.

Evidence matters less than recovery: whatever its collector raises, the loop continues.
"""

import json
import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Fate, ReplicaLoad, Suspect
from rolecall.core.errors import JournalError
from rolecall.core.faults import Remedy
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.recovery.fleet_view import FleetView
from rolecall.recovery.incidents import Incident, storable
from rolecall.recovery.interfaces import CollectedEvidence, Detector, EvidenceCollector, ObservationSource

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
"""About one tick: long enough for a file or socket that was just being replaced."""
PAUSE_SECONDS_MAX = 30.0
TRIES_MAX = 5
"""Four pauses, 7.5 s in all: longer than any restart of our processes, short enough for a page."""
ERROR_CHARS_MAX = 500
OUTAGES_APART_SECONDS = 60.0
"""Without a failure, after which the next one is another outage: of one that comes and goes, on-call is told once."""

NUM_UNWRITTEN_MAX = 256
"""Collected evidence waiting for the journal; the oldest is dropped first."""


@dataclass(slots=True)
class HandlingFailure:
    name: str
    failures: int = 0
    error: str = ""
    retry_at: float = 0.0  # monotonic

    def because(self) -> str:
        return (
            f"{self.name} cannot be handled: {self.error} ({self.failures} failures in a row); retried every "
            f"{PAUSE_SECONDS_MAX:.0f} s, other incidents are not affected"
        )


class HandlingFailures:
    """Owned by one watch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, HandlingFailure] = {}

    def due(self, name: str) -> bool:
        """Whether `name` may be tried now."""
        known = self._known.get(name)
        return known is None or self._clock.monotonic() >= known.retry_at

    def last_try(self, name: str) -> bool:
        """Whether one more failure pages on-call."""
        known = self._known.get(name)
        return known is not None and known.failures >= TRIES_MAX - 1

    @contextmanager
    def isolate(self, name: str) -> Iterator[None]:
        """Errors of the block count as handling failures of `name`. Raises JournalError: the lease is lost or the
        journal unusable, so no incident can be handled now."""
        try:
            yield
        except JournalError:
            raise
        except Exception as e:  # noqa: BLE001
            # Deliberate: see the module docstring. All state is in the journal, so the next try starts from it.
            self._failed(name, e)
        else:
            if self._known.pop(name, None) is not None:
                logger.warning("%s", json.dumps({"event": "handled_again", "name": name}))

    def exhausted(self) -> list[HandlingFailure]:
        """Those for which on-call should be paged."""
        return [f for f in self._known.values() if f.failures >= TRIES_MAX]

    def errors(self) -> dict[str, str]:
        """name -> error of everything that cannot be handled now."""
        return {t.name: t.error for t in self._known.values()}

    def keep_only(self, names: Container[str]) -> None:
        """Forgets all others."""
        self._known = {n: t for n, t in self._known.items() if n in names}

    def _failed(self, name: str, error: Exception) -> None:
        failure = self._known.setdefault(name, HandlingFailure(name))
        failure.failures += 1
        failure.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        pause = min(PAUSE_SECONDS_MAX, FIRST_PAUSE_SECONDS * 2.0 ** min(failure.failures - 1, 10))
        failure.retry_at = self._clock.monotonic() + pause
        line = {"event": "not_handled", "name": name, "error": failure.error, "failures": failure.failures}
        logger.error("%s", json.dumps({**line, "retry_seconds": pause}), exc_info=error)


class FaultTolerantDetector:
    """Source and detector behind one interface that never raises. Owned by one watch."""

    def __init__(self, source: ObservationSource, detector: Detector, clock: Clock) -> None:
        self._source, self._detector, self._clock = source, detector, clock
        self._forgotten: dict[str, int] = {}  # replica -> incarnation below which the detector expects nothing
        self.error = ""
        self.outage = 0  # number of the newest one
        self.since = clock.monotonic()  # since when the absence of a diagnosis is meaningful

    def poll(self, poll_seconds: float) -> list[Diagnosis]:
        """Current diagnoses; none while source or detector fail."""
        try:
            observation = self._source.poll(poll_seconds)
            diagnoses = [storable(d) for d in self._detector.observe(observation)]
        except Exception as e:
            # Deliberate: see the module docstring.
            logger.exception("source or detector failed")
            self.error = f"{type(e).__name__}: {e}"
            now = self._clock.monotonic()
            self.outage += now - self.since >= OUTAGES_APART_SECONDS
            self.since = now
            return []
        self.error = ""
        return diagnoses

    def progress(self, incident: Incident) -> dict[str, tuple[bool, str]]:
        """Whether each replica of an incident makes progress at the incarnation it concerns now, and what was seen."""
        progress: dict[str, tuple[bool, str]] = {}
        for replica, incarnation in {**incident.named, **incident.touched}.items():
            try:
                progress[replica] = self._detector.progressing(replica, incarnation or 0)
            except Exception as e:  # noqa: BLE001
                # Deliberate: unknown counts as no progress, and the text says so.
                progress[replica] = (False, f"progress unknown ({type(e).__name__}: {e})")
        return progress

    def waiting(self, incident: Incident) -> frozenset[str]:
        """Replicas of an incident that are healthy and have no work, of which therefore no progress is due."""
        concerned = {**incident.named, **incident.touched}
        try:
            return frozenset(r for r, incarnation in concerned.items() if self._detector.waits(r, incarnation or 0))
        except Exception:
            # Deliberate: of what is unknown, progress is due.
            logger.exception("the detector failed to tell which replicas wait for work")
            return frozenset()

    def worked(self, replicas: Mapping[str, int | None]) -> frozenset[str]:
        """Of these incarnations, those that have finished work."""
        try:
            return frozenset(r for r, i in replicas.items() if i is not None and self._detector.has_worked(r, i))
        except Exception:
            # Deliberate: what is unknown has not worked.
            logger.exception("the detector failed to tell which replicas have worked")
            return frozenset()

    def fates(self, incident: Incident) -> dict[Suspect, tuple[Fate, str]]:
        """What became of each process that the diagnosis names. Empty while that is unknown."""
        try:
            return {s: self._detector.fate(s) for s in incident.diagnosis.suspects if s.replica}
        except Exception:
            # Deliberate: what is unknown has not ended.
            logger.exception("the detector failed to tell what became of the processes")
            return {}

    def code_survives(self, incident: Incident) -> bool:
        """Whether a process whose code failed still runs; True if the diagnosis is about no role."""
        role = incident.diagnosis.role_at_fault
        if not role or incident.diagnosis.fault_class.spec.remedy is not Remedy.STOP:
            return True
        try:
            return self._detector.survives(role, incident.diagnosis.onset)
        except Exception:
            # Deliberate: what is unknown has not ended.
            logger.exception("the detector failed to tell which processes are left")
            return True

    def forget_replaced(self, fleet: FleetView, ending: Collection[str]) -> None:
        """Tells the detector about every replacement, whichever watch ordered it: the old incarnation ends on purpose.
        And about what runs on, since an action that was to end it failed. `ending`: replicas that may still end."""
        for view in fleet.replicas:
            if view.desired_incarnation > self._forgotten.get(view.replica, 1):
                self.forget(view.replica, view.desired_incarnation)
            elif view.living and view.replica not in ending:
                self._unforget(view.replica, view.desired_incarnation)

    def forget(self, replica: str, below_incarnation: int) -> None:
        self._forgotten[replica] = below_incarnation
        try:
            self._detector.forget(replica, below_incarnation)
        except Exception:
            # Deliberate: recovery continues; a diagnosis of an old incarnation has no effect.
            logger.exception("the detector failed to forget %s", replica)

    def _unforget(self, replica: str, incarnation: int) -> None:
        self._forgotten[replica] = incarnation
        try:
            self._detector.unforget(replica, incarnation)
        except Exception:
            # Deliberate: as above.
            logger.exception("the detector failed to watch %s again", replica)

    def loads(self) -> Mapping[str, ReplicaLoad]:
        """What the replicas hold and have; empty if the detector fails."""
        try:
            return dict(self._detector.loads())
        except Exception:
            # Deliberate: a decision without loads is still a decision.
            logger.exception("the detector failed to return the loads of replicas")
            return {}

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        """What the detectors have read about the suspects; empty if they fail."""
        try:
            return dict(self._detector.window(suspects))
        except Exception:
            # Deliberate: an incident can be resolved without its window.
            logger.exception("the detector failed to return its window")
            return {}


def evidence_key(incident_id: str, part: int) -> str:
    """Of the event of one collection."""
    return f"{incident_id}:evidence" + (f":{part}" if part > 1 else "")


class EvidenceRecorder:
    """Evidence of incidents, on its way from the collector to the journal. Owned by one watch."""

    def __init__(self, evidence_collector: EvidenceCollector | None) -> None:
        self._collector = evidence_collector
        self._unwritten: list[CollectedEvidence] = []
        self._requested: set[str] = set()  # keys of the events

    def request(self, incident: Incident) -> None:
        """Requests what is due of an incident and was not requested yet."""
        if self._collector is None or incident.requested_by_operator:
            return
        for part, diagnosis in enumerate(incident.evidence_due, 1):
            key = evidence_key(incident.incident_id, part)
            if key in self._requested:
                continue
            self._requested.add(key)
            try:
                self._collector.request(incident.incident_id, diagnosis, part)
            except Exception:
                # Deliberate: see the module docstring.
                logger.exception("evidence of %s cannot be requested", incident.incident_id)

    def adopt(self, journal: Journal, incidents: Iterable[Incident]) -> None:
        """Requests the evidence that the previous watch had not written when it died."""
        self._requested |= {str(e.key) for e in journal.events(kinds=[EventKind.EVIDENCE_COLLECTED])}
        for incident in incidents:
            self.request(incident)

    def collected(self) -> list[CollectedEvidence]:
        """Evidence not yet confirmed by `written`, so that an unavailable journal loses nothing."""
        if self._collector is not None:
            try:
                self._unwritten += self._collector.collected()
            except Exception:
                # Deliberate: see the module docstring.
                logger.exception("collected evidence cannot be read")
            del self._unwritten[:-NUM_UNWRITTEN_MAX]
        return list(self._unwritten)

    def written(self, evidence: CollectedEvidence) -> None:
        self._unwritten.remove(evidence)
