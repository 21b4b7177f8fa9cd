"""Evidence of incidents, on its way from the collector to the journal.

Evidence matters less than recovery: whatever the collector raises, the loop continues.
"""

import logging
from collections.abc import Iterable

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.interfaces import CollectedEvidence, EvidenceCollector

logger = logging.getLogger(__name__)

NUM_UNWRITTEN_MAX = 256
"""Collected evidence waiting for the journal; the oldest is dropped first."""


class EvidenceRecorder:
    """Owned by one watch."""

    def __init__(self, evidence_collector: EvidenceCollector | None) -> None:
        self._collector = evidence_collector
        self._unwritten: list[CollectedEvidence] = []

    def request(self, incident_id: str, diagnosis: Diagnosis) -> None:
        if self._collector is None:
            return
        try:
            self._collector.request(incident_id, diagnosis)
        except Exception:
            # Deliberate: see the module docstring.
            logger.exception("evidence of %s cannot be requested", incident_id)

    def adopt(self, journal: Journal, incidents: Iterable[Incident]) -> None:
        """Requests the evidence that the previous watch had not written when it died."""
        written_ids = {e.incident_id for e in journal.events(kinds=[EventKind.EVIDENCE_COLLECTED])}
        for incident in incidents:
            if incident.incident_id not in written_ids and not incident.requested_by_operator:
                self.request(incident.incident_id, incident.diagnosis)

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
