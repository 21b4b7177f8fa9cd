"""Detection and recovery times compared with the goals, by detection channel. Pure.

The time to detect of an injected fault starts at the injection. For any other fault it starts at the diagnosed onset,
which the same detector estimates, so the two are shown separately.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import DetectionChannel
from rolecall.recovery.incidents.incident import OPERATOR
from rolecall.views.incidents import IncidentSummary

GOAL_SECONDS: dict[DetectionChannel, float] = {
    DetectionChannel.EXIT: 1.0,
    DetectionChannel.HARDWARE: 2.0,
    DetectionChannel.STALL: 5.0,
    DetectionChannel.COLLECTIVE: 10.0,
    DetectionChannel.SLOW: 30.0,
}
"""From fault to detection, with metrics read directly from agents. Wrong values have a goal of one step; others
none."""
OF_COLLECTIVES = frozenset({"nccl", "nccl_ras", "nccl_inspector", "flight_recorder", "lost", "infiniband_trees"})
OF_MACHINES = frozenset({"node", "kernel-log"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionTimes:
    """`share`: within the goal; None without a goal."""

    evidence: DetectionChannel
    goal_seconds: float | None
    injected: bool  # whether the true time of the faults is known
    num: int
    median_seconds: float | None
    worst_seconds: float | None
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Incidents of one fault class with an action. Seconds from detection."""

    fault_class: str
    num: int
    num_served: int
    serving_median: float | None
    serving_worst: float | None
    num_resolved: int
    resolved_median: float | None
    resolved_worst: float | None


def evidence_of(d: Diagnosis) -> DetectionChannel:
    """The channel of a diagnosis, by fault class and detector."""
    seen, channel = frozenset(d.detectors), d.fault_class.spec.channel
    if channel is DetectionChannel.COLLECTIVE and seen & OF_MACHINES:
        return DetectionChannel.HARDWARE
    if channel is DetectionChannel.STALL and seen & OF_COLLECTIVES:
        return DetectionChannel.COLLECTIVE
    return channel


def detection(stories: Iterable[IncidentSummary]) -> tuple[DetectionTimes, ...]:
    """One row per channel with detections; injected and other faults separately."""
    found: dict[tuple[DetectionChannel, bool], list[float]] = {}
    for story in stories:
        if OPERATOR in story.diagnosis.detectors or (story.fault is not None and not story.named_right):
            continue  # an operator request is no detection, and a wrong suspect is no detection of this fault
        key = evidence_of(story.diagnosis), story.fault is not None
        found.setdefault(key, []).append(max(0.0, story.detected_at - story.began_at))
    order = list(DetectionChannel)
    return tuple(
        _detected(e, injected, found[e, injected]) for e, injected in sorted(found, key=lambda k: order.index(k[0]))
    )


def _detected(evidence: DetectionChannel, injected: bool, seconds: Sequence[float]) -> DetectionTimes:
    goal = GOAL_SECONDS.get(evidence)
    return DetectionTimes(
        evidence=evidence,
        goal_seconds=goal,
        injected=injected,
        num=len(seconds),
        median_seconds=statistics.median(seconds),
        worst_seconds=max(seconds),
        share=None if goal is None else sum(s < goal for s in seconds) / len(seconds),
    )


def recovery(stories: Iterable[IncidentSummary]) -> tuple[RecoveryTimes, ...]:
    """One row per fault class with a started action."""
    found: dict[str, list[IncidentSummary]] = {}
    for story in stories:
        if story.action_started_at is not None:
            found.setdefault(str(story.diagnosis.fault_class), []).append(story)
    return tuple(_recovered(name, found[name]) for name in sorted(found))


def _recovered(name: str, stories: Sequence[IncidentSummary]) -> RecoveryTimes:
    def took(at: Callable[[IncidentSummary], float | None]) -> list[float]:
        return [s for story in stories if (s := story.since_finding(at(story))) is not None]

    serving, resolved = took(lambda s: s.serving_at), took(lambda s: s.cured_at)
    return RecoveryTimes(
        fault_class=name,
        num=len(stories),
        num_served=len(serving),
        serving_median=statistics.median(serving) if serving else None,
        serving_worst=max(serving, default=None),
        num_resolved=len(resolved),
        resolved_median=statistics.median(resolved) if resolved else None,
        resolved_worst=max(resolved, default=None),
    )
