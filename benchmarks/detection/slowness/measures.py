"""What a recording says of slowness: rates over windows, who was slowed when, and the slow test's own observations.

Pure. A window is (process, start, length); its counters are differences between the last samples at or before its two
ends, so that windows of one process follow each other without a gap. All rates are told as costs, where more is slower:

    busy      busy seconds per token                    what a rollout's own counters say
    cpu       CPU seconds per token                     blind to whatever stops a process, by construction
    delay     share of time runnable without a CPU      the neighbours' part
    effective (busy - starved) seconds per unit         the slow test's e, starved as the slow test has it

Compared are logarithms with the median of the peers in the same window (`delay`: differences).
"""

import json
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.detection.slowness.recording import Recording, replayed
from rolecall.core.config.job import DetectorConfig
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.live.monitored_process import starved_seconds
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.progress import slow
from rolecall.detector.live.stages.progress.slow import SlowState

MEASURES = ("busy", "cpu", "delay", "effective")
LOGARITHMIC = frozenset({"busy", "cpu", "effective"})
ROLES = ("rollout", "trainer")
HEALTHY, DISTURBED = "healthy", "disturbed"
WARM_SECONDS = 10.0
"""Of each process, from its first finished unit on: first batches, caches, and before that, imports."""
SETTLE_SECONDS = 5.0
"""After an incident is closed: the replacement's load comes and goes."""
BUSY_SECONDS_MIN = 0.02
"""A window with less work says nothing of its speed."""

Process = tuple[str, int]
"""(replica, incarnation)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """One injected fault: its target and kind, from its start until the process was replaced."""

    kind: str
    how: str
    process: Process
    since: float
    until: float

    @property
    def is_slow(self) -> bool:
        return self.kind.endswith("-slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    run: str
    process: Process
    role: str
    at: float  # wall seconds
    label: str  # healthy, disturbed, or how it was slowed
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """One observation of the slow test."""

    run: str
    process: Process
    role: str
    wall_at: float
    label: str
    x: float
    ratio: float  # seconds per unit over what the role takes at this load
    cusum: float
    peers: int


def slowdowns(run: Path, recording: Recording) -> list[Slowdown]:
    """The injector's log, with ends from the report, or from the process's last sample where no incident closed."""
    path = run / "injections.jsonl"
    faults = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    report = run / "report.json"
    incidents = json.loads(report.read_text())["incidents"] if report.exists() else []
    closed = {i["fault"]["injected_at"]: i["closed_at"] for i in incidents if i["fault"] and i["closed_at"]}
    last_seen: dict[int, float] = {}
    for s in recording.samples:
        last_seen[s.process.pid] = s.wall_at
    return [
        Slowdown(
            kind=f["kind"],
            how=f["how"],
            process=(f["target"], f["incarnation"] or 0),
            since=f["injected_at"],
            until=f.get("ended_at") or closed.get(f["injected_at"]) or last_seen.get(f["pid"], f["injected_at"]),
        )
        for f in faults
    ]


def label_of(process: Process, since: float, until: float, faults: Sequence[Slowdown]) -> str:
    """Of a span of time of one process. One that lies only partly in its slowdown is disturbed."""
    for f in faults:
        if f.process == process and f.is_slow and f.since <= since and until <= f.until:
            return f.how
    near = any(f.since < until and since < f.until + SETTLE_SECONDS for f in faults)
    return DISTURBED if near else HEALTHY


def windows(recording: Recording, faults: Sequence[Slowdown], seconds: float) -> list[Window]:
    """All windows of this length on one grid of wall time, of every rollout and trainer at work."""
    found = []
    for (replica, incarnation), samples in _by_process(recording.samples).items():
        role = replica.partition("/")[0]
        warm = next((s.wall_at for s in samples if s.work_units), None)
        if role not in ROLES or warm is None:
            continue
        times = [s.wall_at for s in samples]
        number = math.ceil((warm + WARM_SECONDS) / seconds)
        while (number + 1) * seconds <= times[-1]:
            at = number * seconds
            number += 1
            first, last = (samples[bisect_right(times, t) - 1] for t in (at, at + seconds))
            costs = _costs(first, last)
            if costs:
                who = (replica, incarnation)
                label = label_of(who, at, at + seconds, faults)
                found.append(Window(run=recording.run, process=who, role=role, at=at, label=label, costs=costs))
    return found


def _by_process(samples: Iterable[ProcessSample]) -> dict[Process, list[ProcessSample]]:
    found: dict[Process, list[ProcessSample]] = defaultdict(list)
    for s in samples:
        if s.alive:
            found[(s.replica, s.incarnation)].append(s)
    return found


def _costs(first: ProcessSample, last: ProcessSample) -> dict[str, float]:
    busy = last.busy_seconds - first.busy_seconds
    units, tokens = last.work_units - first.work_units, last.tokens - first.tokens
    if busy < BUSY_SECONDS_MIN or units <= 0 or tokens <= 0 or last.at <= first.at:
        return {}
    delay = max(0.0, last.main_run_delay_seconds - first.main_run_delay_seconds)
    # CPU time is counted in ticks of 10 ms: none at all is less than one.
    cpu = max(0.005, last.cpu_seconds - first.cpu_seconds)
    effective = max(0.05 * busy, busy - starved_seconds(first, last))
    return {
        "busy": busy / tokens,
        "cpu": cpu / tokens,
        "delay": delay / (last.at - first.at),
        "effective": effective / units,
    }


def peer_ratios(found: Sequence[Window], role: str, measure: str) -> list[float]:
    """Largest over smallest cost among healthy peers, of each window in which two or more worked."""
    by_time: dict[tuple[str, float], list[float]] = defaultdict(list)
    for w in found:
        if w.role == role and w.label == HEALTHY:
            by_time[w.run, w.at].append(w.costs[measure])
    return [max(v) / min(v) for v in by_time.values() if len(v) > 1 and min(v) > 0]


def against_peers(found: Sequence[Window], role: str, measure: str) -> dict[str, list[float]]:
    """label -> how much slower than the median of its peers in the same window (log ratio; `delay`: difference)."""
    by_time: dict[tuple[str, float], list[Window]] = defaultdict(list)
    for w in found:
        if w.role == role:
            by_time[w.run, w.at].append(w)
    told: dict[str, list[float]] = defaultdict(list)
    for together in by_time.values():
        for w in together:
            peers = [p.costs[measure] for p in together if p.process != w.process]
            if not peers or w.label == DISTURBED:
                continue
            here, reference = w.costs[measure], statistics.median(peers)
            told[w.label].append(math.log(here / reference) if measure in LOGARITHMIC else here - reference)
    return told


def auc(healthy: Sequence[float], slowed: Sequence[float]) -> float:
    """Probability that a slowed window looks slower than a healthy one; ties count half."""
    ordered = sorted(healthy)
    below = 0.0
    for value in slowed:
        right = bisect_right(ordered, value)
        equal = right - bisect_right(ordered, math.nextafter(value, -math.inf))
        below += right - equal / 2
    return below / (len(ordered) * len(slowed))


def d_prime(healthy: Sequence[float], slowed: Sequence[float]) -> float:
    """Distance of the means in standard deviations (root of the mean variance)."""
    spread = math.sqrt((statistics.pvariance(healthy) + statistics.pvariance(slowed)) / 2)
    return (statistics.fmean(slowed) - statistics.fmean(healthy)) / spread if spread else math.inf


def strides(recording: Recording, faults: Sequence[Slowdown], config: DetectorConfig) -> Iterator[Stride]:
    """Every observation that the slow test makes of this recording, looking as often as `watch` does.

    Learning stops where the live detector stops it: for whoever is alarmed, and for all while another fault is open.
    """
    fleet, state = MonitoredProcesses(mask_proc_state=True), SlowState()
    seen: dict[Process, tuple[float, float]] = {}  # of the newest stride: until it is too old, wall time
    for observation in replayed(recording, config.poll_seconds):
        now = observation.wall_at
        other_fault = any(not f.is_slow and f.since <= now <= f.until for f in faults)
        fleet.quiet = {s.key for s in fleet.current() if other_fault or s.slow.alarmed}
        fleet.ingest(observation)
        slow.update(state, fleet, config, now)
        for subject in fleet.current():
            who, meter = (subject.replica, subject.incarnation), subject.slow
            until, since = seen.get(who, (0.0, now))
            if subject.role not in ROLES or meter.residual_until == until:
                continue
            seen[who] = meter.residual_until, now
            yield Stride(
                run=recording.run,
                process=who,
                role=subject.role,
                wall_at=now,
                label=label_of(who, since, now, faults),
                x=meter.last_x,
                ratio=math.exp(meter.residual),
                cusum=meter.cusum,
                peers=meter.peers,
            )


def rows_of(found: Iterable[Stride]) -> list[list[Stride]]:
    """The strides of each process of each run, in order."""
    rows: dict[tuple[str, Process], list[Stride]] = defaultdict(list)
    for s in found:
        rows[s.run, s.process].append(s)
    return list(rows.values())


def autocorrelation(found: Sequence[Stride]) -> float:
    """Lag 1, over consecutive strides of one process, both healthy."""
    xs = [s.x for s in found if s.label == HEALTHY]
    mean = statistics.fmean(xs)
    pairs = [
        (a.x - mean, b.x - mean)
        for row in rows_of(found)
        for a, b in pairwise(row)
        if a.label == b.label == HEALTHY and b.wall_at - a.wall_at < 5.0
    ]
    variance = statistics.pvariance(xs)
    return statistics.fmean(a * b for a, b in pairs) / variance if pairs and variance else 0.0


def alarms(row: Sequence[Stride], drift: float, h: float) -> list[float]:
    """Times at which Page's sum over one process's strides reaches h; it begins anew after each."""
    told, total, length = [], 0.0, 0
    for s in row:
        total = max(0.0, total + s.x - drift)
        length = length + 1 if total > 0 else 0
        if total >= h and length >= slow.STRIDES_MIN:
            told.append(s.wall_at)
            total, length = 0.0, 0
    return told


def largest_sum(row: Sequence[Stride], drift: float) -> float:
    """The largest that Page's sum becomes over these strides."""
    largest = total = 0.0
    for s in row:
        total = max(0.0, total + s.x - drift)
        largest = max(largest, total)
    return largest
