"""Source and detector behind one interface that never raises.

A failing detector must not stop a recovery in progress. While it fails there is no data about the fleet: no fault
counts as over, no progress is accepted, and `error` holds the reason, for which on-call is paged.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.interfaces import Detector, ObservationSource
from rolecall.recovery.triage import storable

logger = logging.getLogger(__name__)


class FaultTolerantDetector:
    """Owned by one watch."""

    def __init__(self, source: ObservationSource, detector: Detector, clock: Clock) -> None:
        self._source, self._detector, self._clock = source, detector, clock
        self._forgotten: dict[str, int] = {}  # replica -> incarnation below which the detector expects nothing
        self.error = ""
        self.since = clock.wall()  # since when the absence of a diagnosis is meaningful

    def poll(self, poll_seconds: float) -> list[Diagnosis]:
        """Current diagnoses; none while source or detector fail."""
        try:
            observation = self._source.poll(poll_seconds)
            diagnoses = [storable(d) for d in self._detector.observe(observation)]
        except Exception as e:
            # Deliberate: see the module docstring.
            logger.exception("source or detector failed")
            self.error = f"{type(e).__name__}: {e}"
            self.since = self._clock.wall()
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

    def forget_replaced(self, fleet: FleetView) -> None:
        """Tells the detector about every replacement, whichever watch ordered it: the old incarnation ends on
        purpose."""
        for view in fleet.replicas:
            if view.desired_incarnation > self._forgotten.get(view.replica, 1):
                self.forget(view.replica, view.desired_incarnation)

    def forget(self, replica: str, below_incarnation: int) -> None:
        self._forgotten[replica] = below_incarnation
        try:
            self._detector.forget(replica, below_incarnation)
        except Exception:
            # Deliberate: recovery continues; a diagnosis of an old incarnation has no effect.
            logger.exception("the detector failed to forget %s", replica)

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        """What the detectors have read about the suspects; empty if they fail."""
        try:
            return dict(self._detector.window(suspects))
        except Exception:
            # Deliberate: an incident can be resolved without its window.
            logger.exception("the detector failed to return its window")
            return {}
