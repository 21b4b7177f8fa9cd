"""Collected evidence that settles a tie: stacks or Flight Recorder dumps identify one of the tied ranks. Pure.

Collected evidence is a snapshot of the past, so it is valid only while the `cannot_tell` or the suspicion that it
settles stands, and only if it names some, but not all, of its suspects. Fusion then drops the tie.
"""

from dataclasses import replace

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import NOT_FINITE
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.stages.stall import kind_of

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
            for f in (*tick.findings, *tick.suspicions)
            if f.fault_class is FaultClass.CANNOT_TELL and f.detector != NOT_FINITE and (suspects := _who(f))
        ]
        new = [_with_kind(f, tick.fleet) for f in tick.observation.pulled_findings]
        found = [f for f in (*self.state, *new) if f.confidence >= CONFIDENCE_MIN]
        self.state = []
        for finding in sorted(found, key=lambda f: -f.confidence):
            named = _who(finding)
            same = any(named & _who(k) for k in self.state)
            if finding.fault_class.spec.settles_ties and named and not same and any(named < tie for tie in ties):
                self.state.append(finding)
        return self.state


def _with_kind(found: Finding, fleet: MonitoredProcesses) -> Finding:
    """Says how the one process that is named hangs."""
    if found.fault_class is not FaultClass.HANG or len(found.suspects) != 1:
        return found
    (who,) = found.suspects
    here = fleet.roster.of_replica(who.replica).values()
    subject = next((s for s in here if s.process == who.process and s.process is not None), None)
    if subject is None:
        return found
    return replace(found, because=f"{found.because}; {kind_of(subject, subject.stall, False)}")


def _who(f: Finding) -> frozenset[tuple[str, int | None, int | None]]:
    return frozenset((s.replica, s.rank, s.incarnation) for s in f.suspects if s.replica)
