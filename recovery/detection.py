"""Source and detector as the loop uses them: whatever they raise, the loop goes on.

A detector that fails must not stop a cure under way. While it fails nothing is known of the fleet: no fault may be
taken for over, no progress is believed, and `error` says why, so that a person hears of it.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.recovery.fleet import FleetView
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.intake import storable
from rolecall.recovery.interfaces import Detector, ObservationSource

logger = logging.getLogger(__name__)


class FaultTolerantDetector:
    """Owned by one watch."""

    def __init__(self, source: ObservationSource, detector: Detector, clock: Clock) -> None:
        self._source, self._detector, self._clock = source, detector, clock
        self._forgotten: dict[str, int] = {}  # replica -> incarnation below which the detector expects nothing
        self.error = ""
        self.since = clock.wall()  # since when the absence of a diagnosis means something

    def look(self, poll_seconds: float) -> list[Diagnosis]:
        """What stands now; nothing while source or detector fail."""
        try:
            observation = self._source.poll(poll_seconds)
            standing = [storable(d) for d in self._detector.observe(observation)]
        except Exception as e:
            # Deliberate: see the module's first lines.
            logger.exception("source or detector failed")
            self.error = f"{type(e).__name__}: {e}"
            self.since = self._clock.wall()
            return []
        self.error = ""
        return standing

    def progress(self, incident: Incident) -> dict[str, tuple[bool, str]]:
        """Whether the replicas of an incident work, at the incarnation that it is about by now."""
        found: dict[str, tuple[bool, str]] = {}
        for replica, incarnation in {**incident.named, **incident.touched}.items():
            try:
                found[replica] = self._detector.progressing(replica, incarnation or 0)
            except Exception as e:  # noqa: BLE001
                # Deliberate: not knowing is no progress, and the words say so.
                found[replica] = (False, f"its progress is unknown ({type(e).__name__}: {e})")
        return found

    def forget_replaced(self, fleet: FleetView) -> None:
        """Whoever ordered it - this watch, the one that acts, the one before us -, the old incarnation's end is wanted."""
        for view in fleet.replicas:
            if view.desired_incarnation > self._forgotten.get(view.replica, 1):
                self.forget(view.replica, view.desired_incarnation)

    def forget(self, replica: str, below_incarnation: int) -> None:
        self._forgotten[replica] = below_incarnation
        try:
            self._detector.forget(replica, below_incarnation)
        except Exception:
            # Deliberate: the cure goes on; what is diagnosed of an old incarnation asks for nothing.
            logger.exception("the detector does not forget %s", replica)

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        """What the detectors have read of these; empty if they cannot say."""
        try:
            return dict(self._detector.window(suspects))
        except Exception:
            # Deliberate: an incident without its window can be resolved all the same.
            logger.exception("no window")
            return {}
