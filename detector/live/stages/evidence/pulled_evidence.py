"""Collected evidence that settles a tie: stacks or Flight Recorder dumps identify one of the tied ranks. Pure.

Collected evidence is a snapshot of the past, so it is valid only while the `cannot_tell` or the suspicion that it
settles stands, and only if it names some, but not all, of its suspects. Fusion then drops the tie.
"""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.base.findings import NOT_FINITE
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.progress.stall import kind_of
from rolecall.detector.live.stages.stage import EMERGING_BEAT_SECONDS, Stage, Tick

Who = tuple[str, int | None, int | None]
WEIGHT_SYNC = "weight_sync"
"""Detector of stacks of a weight transfer (`detector.artifacts.stacks.weight_sync`)."""
LOOKS_KEPT = 2
UNNAMED_SECONDS = 30.0
CONFIDENCE_MIN = 0.7
"""A single stack snapshot that shows a process working (0.6) or elsewhere (0.5) may have caught a slow process."""


class PulledEvidenceStage(Stage):
    name = "pulled_evidence"

    def __init__(self) -> None:
        self.state: list[Finding] = []
        self.looks: list[Finding] = []
        """The newest findings about a weight transfer that stands; a restarted watch looks again."""

    def evaluate(self, tick: Tick) -> list[Finding]:
        """The retained and new findings that settle a currently standing tie."""
        ties = [
            suspects
            for f in (*tick.findings, *tick.suspicions)
            if f.fault_class is FaultClass.CANNOT_TELL and f.detector != NOT_FINITE and (suspects := _who(f))
        ]
        new = [_with_kind(f, tick.fleet) for f in tick.observation.pulled_findings]
        of_shards = self._of_shards(tick, new, ties)
        found = [f for f in (*self.state, *new) if f.confidence >= CONFIDENCE_MIN and f.detector != WEIGHT_SYNC]
        self.state = []
        for finding in sorted(found, key=lambda f: -f.confidence):
            named = _who(finding)
            same = any(named & _who(k) for k in self.state)
            if finding.fault_class.spec.settles_ties and named and not same and any(named < tie for tie in ties):
                self.state.append(finding)
        return [*self.state, *of_shards]

    def _of_shards(self, tick: Tick, new: Sequence[Finding], ties: Sequence[frozenset[Who]]) -> list[Finding]:
        """What two looks in a row say about a weight transfer, the same about the same processes: one look may have
        met a shard that was about to enter it. That no shard can be named is told once it has hung for a while."""
        looks = [*self.looks, *(f for f in new if f.detector == WEIGHT_SYNC)]
        self.looks = [f for f in looks if _who(f) and any(_who(f) <= tie for tie in ties)][-LOOKS_KEPT:]
        if len(self.looks) < LOOKS_KEPT:
            return []
        before, last = self.looks
        if (before.fault_class, _who(before)) != (last.fault_class, _who(last)):
            return []
        stands = last.detected_at - before.onset
        if last.fault_class is FaultClass.CANNOT_TELL and stands < UNNAMED_SECONDS:
            return []
        return [replace(before, detected_at=tick.now)]


def _with_kind(found: Finding, fleet: MonitoredProcesses) -> Finding:
    """Says how the one process that is named hangs."""
    if found.fault_class is not FaultClass.HANG or len(found.suspects) != 1:
        return found
    (who,) = found.suspects
    here = fleet.roster.of_replica(who.replica).values()
    subject = next((s for s in here if s.process == who.process and s.process is not None), None)
    if subject is None:
        return found
    is_silent = subject.beats_seen and subject.beat.wall > EMERGING_BEAT_SECONDS
    kind = kind_of(subject, subject.beat if is_silent else subject.stall, is_silent)
    return replace(found, because=f"{found.because}; {kind}")


def _who(f: Finding) -> frozenset[Who]:
    return frozenset((s.replica, s.rank, s.incarnation) for s in f.suspects if s.replica)
