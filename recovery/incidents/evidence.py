"""The evidence of incidents, between the witnesses who are asked and the journal that keeps what they say.

Witnesses are somebody else's code, and what they say is worth less than a cure: whatever they raise, the loop goes on.
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
"""Accounts that wait for the journal; the oldest go first."""


class EvidenceRecorder:
    """Owned by one watch."""

    def __init__(self, witnesses: EvidenceCollector | None) -> None:
        self._witnesses = witnesses
        self._unwritten: list[CollectedEvidence] = []

    def ask(self, incident_id: str, diagnosis: Diagnosis) -> None:
        if self._witnesses is None:
            return
        try:
            self._witnesses.ask(incident_id, diagnosis)
        except Exception:
            # Deliberate: see the module's first lines.
            logger.exception("no evidence of %s", incident_id)

    def adopt(self, journal: Journal, incidents: Iterable[Incident]) -> None:
        """Asks again for those that the watch before us died with: their evidence is not in the journal."""
        had = {e.incident_id for e in journal.events(kinds=[EventKind.EVIDENCE_COLLECTED])}
        for incident in incidents:
            if incident.incident_id not in had and not incident.requested_by_operator:
                self.ask(incident.incident_id, incident.diagnosis)

    def heard(self) -> list[CollectedEvidence]:
        """What is to be written, until `written` says that it is: a journal that is away loses nothing."""
        if self._witnesses is not None:
            try:
                self._unwritten += self._witnesses.heard()
            except Exception:
                # Deliberate: see the module's first lines.
                logger.exception("witnesses cannot be heard")
            del self._unwritten[:-NUM_UNWRITTEN_MAX]
        return list(self._unwritten)

    def written(self, account: CollectedEvidence) -> None:
        self._unwritten.remove(account)
