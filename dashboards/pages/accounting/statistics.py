"""Statistics over the incidents of a run: lost time, detection and recovery times, diagnosis precision. Pure.

Lost time: ETTR is 1 - lost time / time of each hour, with the lost time of `views/ettr.py`. A live run counts up to
now, an ended one up to its last committed step. `views.ettr.charges` attributes the lost time to incidents,
`views.phases.lost_by_incident` to the phases of their recoveries.

Detection times are compared with the goals, by detection channel. The time to detect of an injected fault starts at the
injection. For any other fault it starts at the diagnosed onset, which the same detector estimates, so the two are shown
separately.

Precision is the share of reviewed diagnoses that were right, with the 95 % interval of Wilson (1927), which remains
valid for few reviews and when all of them were right.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FAULTS, DetectionChannel
from rolecall.core.text import percent
from rolecall.recovery.incidents import Incident
from rolecall.views.ettr import UNDETECTED, Charge, Step, charges, losses
from rolecall.views.incidents import IncidentSummary, MatchedIncidents
from rolecall.views.phases import RecoveryPhases, lost_by_incident

HOUR_SECONDS = 3600.0
SHORT_RUNS = ((1800.0, 60.0), (3 * HOUR_SECONDS, 300.0))
"""(run shorter than, slice length), seconds: a run of a few hours needs finer bars."""
SLICES_MAX = 24 * 62
"""Two months of hours; a longer run shows the newest."""
TOP_INCIDENTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One hour, or the part of it in which the run existed. Times are wall seconds."""

    start: float
    end: float
    ettr: float | None
    lost_seconds: float
    num_steps: int
    num_incidents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTimeShare:
    name: str
    seconds: float
    share: float  # of all lost time


@dataclass(frozen=True, slots=True, kw_only=True)
class EttrBreakdown:
    """`slice_seconds`: 3600, or less for a short run. `ettr`: of all slices."""

    slice_seconds: float
    slices: tuple[Slice, ...]
    ettr: float | None
    training_seconds: float
    lost_seconds: float
    by_cause: tuple[tuple[str, str, float], ...]  # (role, fault, seconds lost), largest first
    by_role: tuple[LostTimeShare, ...]
    by_class: tuple[LostTimeShare, ...]
    by_incident: tuple[LostTimeShare, ...]  # the first ten
    by_phase: Mapping[str, Mapping[str, float]]  # incident -> where -> replica-seconds, of `lost_by_incident`
    num_replicas: int


def times(
    joined: MatchedIncidents,
    committed: Sequence[Step],
    phases: Iterable[RecoveryPhases],
    *,
    began: float,
    until: float,
    num_rollouts: int,
    num_trainers: int,
) -> EttrBreakdown:
    """`began`, `until`: of training, wall seconds."""
    num_replicas = num_rollouts + num_trainers
    found = losses(joined, until)
    width = next((width for shorter, width in SHORT_RUNS if until - began < shorter), HOUR_SECONDS)
    first = max(began // width, (until // width) - SLICES_MAX + 1)
    edges = [max(began, (first + n) * width) for n in range(int(until // width - first) + 1)]
    ends = [*edges[1:], until]
    commits, opened = sorted(s.at for s in committed), sorted(s.incident.opened_at for s in joined.summaries)
    slices = []
    charged: list[Charge] = []
    for start, end in zip(edges, ends, strict=True):
        if end <= start:
            continue
        here = list(charges(found, start, end, num_rollouts=num_rollouts, num_trainers=num_trainers))
        lost = sum(c.replica_seconds() for c in here) / num_replicas if num_replicas else 0.0
        charged += here
        slices.append(
            Slice(
                start=start,
                end=end,
                ettr=1.0 - lost / (end - start) if num_replicas else None,
                lost_seconds=lost,
                # The last commit ends the counted time of an ended run and is included.
                num_steps=(bisect_right if end == until else bisect_left)(commits, end) - bisect_left(commits, start),
                num_incidents=bisect_left(opened, end) - bisect_left(opened, start),
            )
        )
    total = sum(s.end - s.start for s in slices)
    lost_total = sum(s.lost_seconds for s in slices)
    parts = [(c, c.replica_seconds() / num_replicas) for c in charged]
    return EttrBreakdown(
        slice_seconds=width,
        slices=tuple(slices),
        ettr=1.0 - lost_total / total if total > 0 and num_replicas else None,
        training_seconds=total,
        lost_seconds=lost_total,
        by_cause=_causes((c.role, c.loss.fault, seconds) for c, seconds in parts),
        by_role=_ranked((c.role, seconds) for c, seconds in parts),
        by_class=_ranked((c.loss.fault, seconds) for c, seconds in parts),
        by_incident=_ranked((c.loss.incident_id or UNDETECTED, seconds) for c, seconds in parts)[:TOP_INCIDENTS],
        by_phase=lost_by_incident(charged, phases),
        num_replicas=num_replicas,
    )


def _causes(parts: Iterable[tuple[str, str, float]]) -> tuple[tuple[str, str, float], ...]:
    seconds: dict[tuple[str, str], float] = {}
    for role, fault, part in parts:
        seconds[role, fault] = seconds.get((role, fault), 0.0) + part
    return tuple((role, fault, s) for (role, fault), s in sorted(seconds.items(), key=lambda kv: -kv[1]) if s > 0)


def _ranked(parts: Iterable[tuple[str, float]]) -> tuple[LostTimeShare, ...]:
    """Sums by name, largest first."""
    seconds: dict[str, float] = {}
    for name, part in parts:
        seconds[name] = seconds.get(name, 0.0) + part
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda kv: (-kv[1], kv[0]))
    return tuple(LostTimeShare(name=n, seconds=s, share=s / total if total else 0.0) for n, s in ranked)


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
    num_resolved: int
    resolved_median: float | None
    resolved_worst: float | None


def evidence_of(diagnosis: Diagnosis) -> DetectionChannel:
    """The channel of a diagnosis, by fault class and detector."""
    seen, channel = frozenset(diagnosis.detectors), diagnosis.fault_class.spec.channel
    if channel is DetectionChannel.COLLECTIVE and seen & OF_MACHINES:
        return DetectionChannel.HARDWARE
    if channel is DetectionChannel.STALL and seen & OF_COLLECTIVES:
        return DetectionChannel.COLLECTIVE
    return channel


def detection(summaries: Iterable[IncidentSummary]) -> tuple[DetectionTimes, ...]:
    """One row per channel with detections; injected and other faults separately."""
    found: dict[tuple[DetectionChannel, bool], list[float]] = {}
    for summary in summaries:
        if summary.incident.requested_by_operator or (summary.fault is not None and not summary.diagnosed_correctly):
            continue  # an operator request is no detection, and a wrong suspect is no detection of this fault
        key = evidence_of(summary.incident.diagnosis), summary.fault is not None
        found.setdefault(key, []).append(max(0.0, summary.detected_at - summary.began_at))
    order = list(DetectionChannel)
    rows = []
    for evidence, injected in sorted(found, key=lambda k: order.index(k[0])):
        goal, seconds = GOAL_SECONDS.get(evidence), found[evidence, injected]
        rows.append(
            DetectionTimes(
                evidence=evidence,
                goal_seconds=goal,
                injected=injected,
                num=len(seconds),
                median_seconds=statistics.median(seconds),
                worst_seconds=max(seconds),
                share=None if goal is None else sum(s < goal for s in seconds) / len(seconds),
            )
        )
    return tuple(rows)


def recovery(summaries: Iterable[IncidentSummary]) -> tuple[RecoveryTimes, ...]:
    """One row per fault class with a started action."""
    found: dict[str, list[IncidentSummary]] = {}
    for summary in summaries:
        if summary.incident.action_started_at is not None:
            found.setdefault(str(summary.incident.diagnosis.fault_class), []).append(summary)
    return tuple(_recovered(name, found[name]) for name in sorted(found))


def _recovered(name: str, summaries: Sequence[IncidentSummary]) -> RecoveryTimes:
    resolved = [s for summary in summaries if (s := summary.since_finding(summary.resolved_at)) is not None]
    return RecoveryTimes(
        fault_class=name,
        num=len(summaries),
        num_resolved=len(resolved),
        resolved_median=statistics.median(resolved) if resolved else None,
        resolved_worst=max(resolved, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A fault on which rolecall did not act. `until_over_seconds`: from the finding to the close, or until now."""

    incident_id: str
    fault_class: str
    detect_seconds: float
    until_over_seconds: float
    outcome: str  # empty: still open


def episodes(summaries: Iterable[IncidentSummary], now: float) -> tuple[Episode, ...]:
    """Of incidents without an action, but for requests of operators; in the order of their openings. `now`: wall
    seconds."""
    found = []
    for summary in sorted(summaries, key=lambda s: s.incident.opened_at):
        incident = summary.incident
        if incident.action_started_at is not None or incident.requested_by_operator:
            continue
        over_at = now if incident.closed_at is None else incident.closed_at
        found.append(
            Episode(
                incident_id=incident.incident_id,
                fault_class=str(incident.first_diagnosis.fault_class),
                detect_seconds=max(0.0, summary.detected_at - summary.began_at),
                until_over_seconds=max(0.0, over_at - summary.detected_at),
                outcome=str(incident.outcome or ""),
            )
        )
    return tuple(found)


Z_95 = 1.959964
FEW = 10
"""Fewer reviews than this say little: seven right of seven are compatible with any precision above 65 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    name: str
    num_right: int
    num_reviewed: int
    num_not_reviewed: int
    low: float | None
    high: float | None

    @property
    def ratio(self) -> float | None:
        return self.num_right / self.num_reviewed if self.num_reviewed else None

    @property
    def sentence(self) -> str:
        if self.ratio is None or self.low is None or self.high is None:
            return "No diagnosis has been reviewed yet."
        text = f"{self.num_right} of {self.num_reviewed} reviewed diagnoses were right: {percent(self.ratio)}"
        text += f" (95 % interval {percent(self.low)} to {percent(self.high)})"
        return f"{text}; too few reviews for a precise estimate" if self.num_reviewed < FEW else text


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSummary:
    of_all: Precision
    by_class: tuple[Precision, ...]
    by_detector: tuple[Precision, ...]


def wilson(num_right: int, num: int) -> tuple[float, float] | None:
    """Confidence interval of a share, 0..1; None without data."""
    if num <= 0:
        return None
    p, z2 = num_right / num, Z_95 * Z_95
    middle = (p + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(p * (1 - p) / num + z2 / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def reviewable(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """Incidents with a diagnosis by detectors, newest first, without operator requests."""
    return tuple(sorted((i for i in incidents if not i.requested_by_operator), key=lambda i: i.opened_at, reverse=True))


def precision_summary(incidents: Iterable[Incident]) -> PrecisionSummary:
    """A diagnosis by two detectors counts for both. The fault class is the current one."""
    found = reviewable(incidents)
    classes: dict[str, list[Incident]] = {}
    detectors: dict[str, list[Incident]] = {}
    for i in found:
        classes.setdefault(str(i.diagnosis.fault_class), []).append(i)
        for name in i.diagnosis.detectors or ("unknown",):
            detectors.setdefault(name, []).append(i)
    order = [str(c) for c in FAULTS]
    return PrecisionSummary(
        of_all=_precision("all", found),
        by_class=tuple(_precision(n, classes[n]) for n in sorted(classes, key=order.index)),
        by_detector=tuple(_precision(n, detectors[n]) for n in sorted(detectors)),
    )


def _precision(name: str, incidents: Sequence[Incident]) -> Precision:
    reviews = [i.review for i in incidents if i.review is not None]
    right = sum(m.right for m in reviews)
    low, high = wilson(right, len(reviews)) or (None, None)
    return Precision(
        name=name,
        num_right=right,
        num_reviewed=len(reviews),
        num_not_reviewed=len(incidents) - len(reviews),
        low=low,
        high=high,
    )
