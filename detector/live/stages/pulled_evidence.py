"""Collected evidence that settles a tie: stacks or Flight Recorder dumps identify one of the tied ranks. Pure.

Collected evidence is a snapshot of the past, so it is valid only while the `cannot_tell` that it settles stands, and
only if it names some, but not all, of its suspects. Fusion then drops the tie.
"""

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import NOT_FINITE
from rolecall.detector.live.stages.stage import Stage, Tick

CONFIDENCE_MIN = 0.7
"""A single stack snapshot that shows a process working (0.6) or elsewhere (0.5) may have caught a slow process."""


class PulledEvidenceStage(Stage):
    name = "pulled_evidence"

    def __init__(self) -> None:
        self.state: list[Finding] = []

    def evaluate(self, tick: Tick) -> list[Finding]:
        """The retained and new findings that settle a currently standing tie."""
        ties = [
            suspects
            for f in tick.findings
            if f.fault_class is FaultClass.CANNOT_TELL and f.detector != NOT_FINITE and (suspects := _who(f))
        ]
        found = [f for f in (*self.state, *tick.observation.pulled_findings) if f.confidence >= CONFIDENCE_MIN]
        self.state = []
        for finding in sorted(found, key=lambda f: -f.confidence):
            named = _who(finding)
            same = any(named & _who(k) for k in self.state)
            if finding.fault_class.spec.settles_ties and named and not same and any(named < tie for tie in ties):
                self.state.append(finding)
        return self.state


def _who(f: Finding) -> frozenset[tuple[str, int | None, int | None]]:
    return frozenset((s.replica, s.rank, s.incarnation) for s in f.suspects if s.replica)
