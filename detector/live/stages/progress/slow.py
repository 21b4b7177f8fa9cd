"""Slow: a sequential test of seconds per unit of work against peers and against its own past.

Per stride of each process: e = (busy seconds - seconds starved by others) / units. Starvation is run delay minus
throttling by the process's own CPU quota: stops by signal, quotas and delays inside the unit count in e, a busy
neighbour does not. Work per unit depends on the load (tokens per unit, else open requests), so log e is compared with
the role's baseline at that load:

    r_i = log e_i - baseline(role, load)          deviation from the role's baseline, within its job
    x_i = min(r_i - median of peers' r,           slower than peers now         (cancels common slowdowns)
              r_i - own usual offset)             slower than its own history   (cancels lasting differences)
    S_i = max(0, S_i + clipped x_i - log(slow_ratio) / 2) Page's CUSUM; alarm at S_i >= h

h follows from the target false alarm rate by Siegmund's formula for the run length of a CUSUM (D. Siegmund, Sequential
Analysis, 1985), with the residuals' standard deviation widened for their lag-1 autocorrelation. Without working peers
the reference is the deviation of the other roles from their baselines, and the test is less sensitive (`sensitivity`).
A process that has no peers may have other work instead, and is no longer slow after `ACCEPTED_SECONDS`.

Ranks of a replica that compute together finish each unit at the same time. Their busy seconds leave out what they wait
for each other, so that only the slow one takes longer. Where such waits are not seen (rl_runtime/exchanges.py), all of
them look slow, and the replica is named without a rank.

The seconds in which a job loads its data, where they are known, are a part of its work with a test of their own: a
loader that is twice as slow is found although it is a small part of a step (`LOADING`). It must cost at least
`PART_SHARE_MIN` of the usual work.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from statistics import median

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.base.findings import GAIN
from rolecall.detector.live.monitored_process import (
    WORK_PHASES,
    Key,
    MonitoredProcess,
    SlowMeter,
    is_of_past_job,
    starved_seconds,
)
from rolecall.detector.live.processes import MonitoredProcesses, ProcessIndex, finding, names
from rolecall.detector.live.stages.stage import Stage, Tick

PEER_AGE_SECONDS, PEER_AGE_STRIDES = 10.0, 2
"""Maximum age of a peer's residual in the comparison: the longer of the two, in strides of that peer."""
RISING_SUM = 1.0
"""A peer whose CUSUM exceeds this (about two strides of a factor of 2.5) may be slow; learning is then suspended."""


@dataclass(frozen=True, slots=True)
class WorkPart:
    """What a test is about. `meter`: its state in a process; `seconds`: cumulative in a sample."""

    text: str
    meter: Callable[[MonitoredProcess], SlowMeter]
    seconds: Callable[[ProcessSample], float]


WORK = WorkPart("", lambda s: s.slow, lambda p: p.busy_seconds)
LOADING = WorkPart(" in loading its data", lambda s: s.slow_loading, lambda p: p.loading_seconds)
PART_SHARE_MIN = 0.1
"""Of the usual seconds per unit of all work."""


@dataclass(slots=True)
class _GroupResiduals:
    residuals: dict[Key, tuple[float, float]] = field(default_factory=dict)  # residual, wall time until it is too old
    ordered: list[float] = field(default_factory=list)  # the same residuals
    ends: list[tuple[float, Key]] = field(default_factory=list)  # heap of these times; may be superseded
    rising: set[Key] = field(default_factory=set)

    def put(self, key: Key, residual: float, until: float) -> None:
        self.drop(key)
        self.residuals[key] = residual, until
        insort(self.ordered, residual)
        heappush(self.ends, (until, key))

    def drop(self, key: Key) -> None:
        before = self.residuals.pop(key, None)
        if before is not None:
            del self.ordered[bisect_left(self.ordered, before[0])]

    def expire(self, now: float) -> None:
        while self.ends and self.ends[0][0] < now:
            until, key = heappop(self.ends)
            if key in self.residuals and self.residuals[key][1] == until:
                self.drop(key)


class SlowPeers:
    """Per group: the residuals that are not too old, and the processes that may be slow."""

    def __init__(self, part: WorkPart = WORK) -> None:
        self._part = part
        self._groups: dict[str, _GroupResiduals] = {}
        self._made_of = -1

    def refresh(self, roster: ProcessIndex, now: float) -> bool:
        """Call before each poll: drops expired residuals; rebuilds everything if the roster changed. Whether it did."""
        is_changed = self._made_of != roster.changes
        if is_changed:
            self._made_of = roster.changes
            self._groups = {}
            meter = self._part.meter
            for s in roster:
                if meter(s).residual_until and not s.gone:
                    self.note(s)
                self.note_sum(s)
        for group in self._groups.values():
            group.expire(now)
        return is_changed

    def note(self, s: MonitoredProcess) -> None:
        """Records a new residual of `s`."""
        meter = self._part.meter(s)
        self._groups.setdefault(s.group, _GroupResiduals()).put(s.key, meter.smooth, meter.residual_until)

    def note_sum(self, subject: MonitoredProcess) -> None:
        """Records a new CUSUM value of `subject`."""
        rising = self._groups.setdefault(subject.group, _GroupResiduals()).rising
        if self._part.meter(subject).cusum >= RISING_SUM:
            rising.add(subject.key)
        else:
            rising.discard(subject.key)

    def median_without(self, subject: MonitoredProcess) -> tuple[int, float]:
        """The number of peers of `subject` and the median of their residuals; (0, 0.0) without peers."""
        group = self._groups.get(subject.group)
        if group is None:
            return 0, 0.0
        mine = group.residuals.get(subject.key)
        num = len(group.ordered) - (mine is not None)
        if not num:
            return 0, 0.0
        without = bisect_left(group.ordered, mine[0]) if mine is not None else num

        def nth(n: int) -> float:
            return group.ordered[n + (n >= without)]

        return num, nth(num // 2) if num % 2 else (nth(num // 2 - 1) + nth(num // 2)) / 2

    def rising_without(self, s: MonitoredProcess) -> bool:
        """Whether a peer of `s` may be slow."""
        group = self._groups.get(s.group)
        return group is not None and len(group.rising) > (s.key in group.rising)


BUSY_SECONDS_MIN = 0.05
"""A stride ends once the expected time of its units reaches this: shorter strides are dominated by timer noise and
single pauses. The measured time must not decide, as that would select strides that contain a pause."""
STRIDE_SECONDS_MAX = 30.0
"""A stride with less work by then is dropped."""
LITTLE_WORK_SHARE, LITTLE_WORK_SECONDS = 0.005, 2.5
"""A stride with less expected work than this share of its time ends after this time. Its work, expected and done,
counts as BUSY_SECONDS_MIN at least. So a process that takes longer than that in many strides is slow, however little it
usually has to do. What a healthy one takes is too short to learn from, and says nothing about the host."""
STARVED_SHARE_MAX = 0.85
"""A stride starved for a larger fraction of its busy time is dropped: too little of its own time remains."""
ALONE_STARVED_SHARE_MAX = 0.5
"""The same without peers: on a host so crowded, all work takes longer than run delay tells, and nothing cancels it."""
RATIO_CLIP = math.log(4.0)
"""Clip of one observation in the ratio that is reported, and in the sum of a process without peers."""
SUM_CLIP = math.log(2.5)
"""Clip of one observation in the sum: a few pauses of a second within a minute do not make a process slow."""
SIGMA_MIN, ALONE_SIGMA_MIN = 0.35, 0.6
"""Lower bounds of the standard deviation, autocorrelation included, with peers and without. Against peers on shared
CPUs it is 0.27 to 0.29, with heavier tails than normal. With peers, a factor of 2.5 and more is detected after about 6
strides, two after 9, 1.5 after 20."""
ALONE_RATIO_MIN = 2.0
"""Smallest `slow_ratio` of a process without peers."""
SIGMA_PRIOR, SIGMA_PRIOR_WEIGHT = 0.6, 10
"""The deviation assumed before anything was observed, and its weight in observations."""
ACCEPTED_SECONDS = 1800.0
"""A process that has no peer, and was reported for so long, has other work than before (longer answers, say): what it
takes is usual from then on. What is slow for so long was reported long ago."""
STRIDES_MIN = 5
"""Minimum number of consecutive strides for an alarm."""
HISTORY_MIN = 5
"""Minimum number of observations at a load before its baseline is used."""
MAJORITY_WAIT_SECONDS = 10.0
"""Maximum time that an alarm waits for peers with a rising CUSUM: together they may be a majority."""
PEER_SMOOTHING = 0.5
"""Weight of the newest observation in a peer's smoothed residual: averages about three strides."""
OFFSET_PRIOR_WEIGHT = 10
"""Weight of the prior that a process equals its role, in observations."""
RHO_MAX = 0.9
"""Cap on the autocorrelation, which is first estimated from few values."""
LEARN_RATE_MIN = 1 / 300
"""Lower bound of the learning rate: baselines follow changes over 300 strides (five minutes of work)."""
OFFSET_MAX = math.log(1.5)
"""Cap on a process's own offset: a process that is four times slower from its first unit on is slow."""
LOADS_PER_OCTAVE = 2
"""Load bins of half an octave: within a bin, seconds per unit differ by less than a factor of 1.41."""
LOAD_REACH = 2
"""A load without a baseline uses one at most this many bins away (one octave)."""
SECONDS_PER_DAY = 86_400.0


@dataclass(slots=True)
class LoadBaseline:
    """Baseline of a group at one load: mean of log seconds per unit."""

    mean: float = 0.0
    count: int = 0


@dataclass(slots=True)
class SlowState:
    """Learned state per group (`MonitoredProcess.group`); owned by one detector."""

    baselines: dict[tuple[str, int], LoadBaseline] = field(default_factory=dict)
    moments: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)  # means of x, x^2, x x'; count
    peers: SlowPeers = field(init=False, default_factory=SlowPeers)
    part: WorkPart = field(init=False, default=WORK)

    def keep(self, groups: Collection[str]) -> None:
        """Drops what was learned of other groups, except roles."""
        self.baselines = {k: b for k, b in self.baselines.items() if not is_of_past_job(k[0], groups)}
        self.moments = {k: m for k, m in self.moments.items() if not is_of_past_job(k, groups)}

    def about(self, part: WorkPart) -> "SlowState":
        """The same state, for a test of this part."""
        self.part, self.peers = part, SlowPeers(part)
        return self


@dataclass(frozen=True, slots=True)
class WorkObservation:
    """One observation: a closed stride, or a lower bound from an unfinished unit (censored)."""

    seconds_per_unit: float
    load: float
    censored: bool
    starved_share: float  # of its busy time
    stride_seconds: float  # of wall time
    seconds_per_unit_min: float = 0.0  # less cannot be told from nothing


def measure(
    subject: MonitoredProcess, stride_seconds: float, gap_p99: float | None, part: WorkPart = WORK
) -> WorkObservation | None:
    """The observation completed by the subject's newest sample, if any. Advances its stride."""
    sample, meter = subject.sample, part.meter(subject)
    if sample is None or subject.gone:
        return None
    start = meter.start
    if start is None or start.work_units > sample.work_units:
        meter.start = sample
        return None
    if sample.work_units == start.work_units:
        return _censored(subject, sample, meter, stride_seconds, gap_p99) if part is WORK else None
    seconds = sample.at - start.at
    if seconds < stride_seconds or subject.stall.wall > max(SAMPLE_FRESH_SECONDS, SAMPLE_FRESH_SHARE * seconds):
        return None
    if 0.0 < start.throttled_seconds == sample.throttled_seconds and seconds < THROTTLED_READ_SECONDS:
        # A quota has throttled this process before, and the newest throttled time is not read yet: if the stride ended
        # here, the throttling would be attributed to neighbours.
        return None
    expected_busy = (sample.work_units - start.work_units) * meter.expected_seconds_per_unit
    if not meter.expected_seconds_per_unit:  # no baseline is known yet
        expected_busy = part.seconds(sample) - part.seconds(start)
    enough = expected_busy >= BUSY_SECONDS_MIN
    is_little = part is WORK and expected_busy < LITTLE_WORK_SHARE * seconds
    if not enough and seconds < (LITTLE_WORK_SECONDS if is_little else STRIDE_SECONDS_MAX):
        return None
    meter.start, meter.censored_at = sample, sample.at
    meter.waited_share = _waited_share(start, sample)
    return _closed(start, sample, part, BUSY_SECONDS_MIN if is_little else 0.0) if enough or is_little else None


SAMPLE_FRESH_SECONDS, SAMPLE_FRESH_SHARE = 0.25, 0.05
"""A stride ends at a sample taken just after a unit ended, so that busy seconds and run delay cover the same time. Of a
long stride a share of it is little, and agents sample some jobs once a second."""

THROTTLED_READ_SECONDS = 2.5
"""Agents read a cgroup's throttled time every 2 s, but run delay, which includes it, with every sample."""


def _waited_share(start: ProcessSample, sample: ProcessSample) -> float:
    """Of the time in units, what it waited for the other ranks of its replica."""
    waited = sample.exchange_seconds - start.exchange_seconds
    inside = waited + sample.busy_seconds - start.busy_seconds
    return waited / inside if inside > 0 else 0.0


def _closed(start: ProcessSample, sample: ProcessSample, part: WorkPart, least: float) -> WorkObservation | None:
    """`least`: what its work counts as at least, in seconds."""
    busy, whole = part.seconds(sample) - part.seconds(start), sample.busy_seconds - start.busy_seconds
    starved = starved_seconds(start, sample) * (busy / whole if whole > 0 else 1.0)
    if busy <= 0 or (busy > least and starved > STARVED_SHARE_MAX * busy):
        return None
    if busy <= least:
        starved = 0.0
    units = sample.work_units - start.work_units
    tokens = sample.tokens - start.tokens
    load = tokens / units if tokens > 0 else max(1.0, (start.requests_active + sample.requests_active) / 2)
    return WorkObservation((busy - starved) / units, load, False, starved / busy, sample.at - start.at, least / units)


def _censored(
    subject: MonitoredProcess, sample: ProcessSample, meter: SlowMeter, stride_seconds: float, gap_p99: float | None
) -> WorkObservation | None:
    """An unfinished unit that exceeds its expected time counts with its elapsed time: once a stride or, if longer, once
    each expected time, because one long unit among many is no evidence of slowness."""
    if gap_p99 is None or subject.phase not in WORK_PHASES or not meter.load:
        return None
    if sample.exchanges:
        return None  # the unit may wait for another rank
    stride_seconds = max(stride_seconds, meter.expected_seconds_per_unit)
    if sample.at - max(meter.censored_at, sample.progress_at) < stride_seconds:
        return None
    meter.censored_at = sample.at
    # gap_p99 includes overhead between two units (scheduling), which must not count as slowness.
    seconds = subject.stall.effective * min(1.0, meter.expected_seconds_per_unit / gap_p99)
    if seconds <= meter.expected_seconds_per_unit:
        return None
    starved_share = 1 - subject.stall.effective / subject.stall.wall if subject.stall.wall else 0.0
    return WorkObservation(seconds, meter.load, True, starved_share, stride_seconds)


def load_bin(load: float) -> int:
    return round(LOADS_PER_OCTAVE * math.log2(max(load, 1e-3)))


def expected(state: SlowState, group: str, load: float) -> float | None:
    """Log seconds per unit of the group at this load, or None without enough observations within reach."""
    here = load_bin(load)
    exact = state.baselines.get((group, here))
    if exact is not None and exact.count >= HISTORY_MIN:
        return exact.mean
    for distance in range(1, LOAD_REACH + 1):
        near = [state.baselines.get((group, here + d)) for d in (-distance, distance)]
        known = [b.mean for b in near if b is not None and b.count >= HISTORY_MIN]
        if known:
            return sum(known) / len(known)
    return None


def learn(state: SlowState, group: str, load: float, log_seconds: float, num_peers: int = 0) -> None:
    """Adds one observation to the baseline. The rate per process decreases with the number of peers, so that large and
    small roles adapt equally fast to a host that becomes slower."""
    baseline = state.baselines.setdefault((group, load_bin(load)), LoadBaseline())
    baseline.count += 1
    difference = log_seconds - baseline.mean
    if baseline.count > HISTORY_MIN:
        difference = max(-OFFSET_MAX, min(OFFSET_MAX, difference))
    baseline.mean += difference * max(1 / baseline.count, LEARN_RATE_MIN / (1 + num_peers))


def sigma(state: SlowState, group: str, sigma_min: float = SIGMA_MIN) -> float:
    """Standard deviation of a sum of n values of x over sqrt(n): includes their autocorrelation."""
    mean, square, product, count = state.moments.get(group, (0.0, 0.0, 0.0, 0))
    variance = square - mean * mean
    if variance <= 0:
        return SIGMA_PRIOR
    rho = max(0.0, min(RHO_MAX, (product - mean * mean) / variance))
    seen = math.sqrt(variance * (1 + rho) / (1 - rho))
    weight = count / (count + SIGMA_PRIOR_WEIGHT)
    return max(sigma_min, weight * seen + (1 - weight) * SIGMA_PRIOR)


def threshold(sigma_: float, drift: float, strides_between_alarms: float) -> float:
    """h with a run length of `strides_between_alarms`: Siegmund's (exp(2kb) - 2kb - 1) / 2k^2, b = h/sigma + 1.166.

    k is the drift in sigmas. The term -2kb - 1 is negligible at all realistic alarm rates and is dropped.
    """
    k = drift / sigma_
    b = math.log(2 * k * k * strides_between_alarms) / (2 * k)
    return max(drift, (b - 1.166) * sigma_)


def update(state: SlowState, fleet: MonitoredProcesses, config: DetectorConfig, now: float) -> None:
    """Processes every observation that became due."""
    if state.peers.refresh(fleet.roster, now):
        state.keep({s.group for s in fleet.roster})
    for subject in fleet.sampled:  # without a new sample nothing becomes due
        if subject.closed_wall:
            continue
        if state.part is not WORK and subject.sample is not None and not state.part.seconds(subject.sample):
            continue  # it does not report this part
        gap_p99 = fleet.gaps.p99(subject.group, subject.phase)
        work = measure(subject, config.slow_stride_seconds, gap_p99, state.part)
        if work is not None:
            _observe(state, fleet, subject, work, config, now)


def _observe(
    state: SlowState,
    fleet: MonitoredProcesses,
    subject: MonitoredProcess,
    work: WorkObservation,
    config: DetectorConfig,
    now: float,
) -> None:
    group, meter = subject.group, state.part.meter(subject)
    log_seconds = math.log(work.seconds_per_unit)
    habit = expected(state, group, work.load)
    if habit is None:
        learn(state, group, work.load, log_seconds)
        return
    meter.load, meter.expected_seconds_per_unit = work.load, math.exp(habit)
    meter.seconds_per_unit = work.seconds_per_unit
    is_little = math.exp(habit) < work.seconds_per_unit_min
    if is_little:
        meter.residual = max(0.0, log_seconds - math.log(work.seconds_per_unit_min))
    else:
        meter.residual = log_seconds - habit
    if not is_little or meter.residual > 0:
        meter.smooth += (meter.residual - meter.smooth) * (PEER_SMOOTHING if meter.residual_until else 1.0)
        meter.residual_until = now + max(PEER_AGE_SECONDS, PEER_AGE_STRIDES * work.stride_seconds)
        state.peers.note(subject)
    meter.peers, reference = state.peers.median_without(subject)
    if not meter.peers:
        if work.starved_share > ALONE_STARVED_SHARE_MAX:
            return
        reference = _fleet_shift(fleet, subject, now, state.part)
    log_ratio = min(meter.residual - reference, meter.residual - meter.offset)
    terms = sensitivity(config, meter.peers)
    # A day has fewer strides of long units, so that a lower threshold gives the same false alarms.
    strides = SECONDS_PER_DAY / max(work.stride_seconds, config.slow_stride_seconds)
    sigma_ = sigma(state, group, terms.sigma_min)
    drift = terms.drift
    meter.limit = limit = threshold(sigma_, drift, strides / config.slow_false_alarms_per_day)
    x = max(-terms.clip, min(terms.clip, log_ratio))
    if meter.cusum <= 0:
        meter.rising_since, meter.rising_strides, meter.ratio_log = now, 0, 0.0
    # Capped, so that recovery is detected equally fast after long and short faults.
    meter.cusum = min(2 * limit, max(0.0, meter.cusum + x - drift))
    meter.rising_strides += 1
    meter.ratio_log += (max(-RATIO_CLIP, min(RATIO_CLIP, log_ratio)) - meter.ratio_log) / meter.rising_strides
    if meter.alarmed:
        meter.alarmed = meter.cusum >= limit / 2
    else:
        meter.alarmed = meter.cusum >= limit and meter.rising_strides >= STRIDES_MIN
        meter.alarmed_wall = now
    if meter.alarmed and now - meter.alarmed_wall >= ACCEPTED_SECONDS and all(p.gone for p in fleet.peers(subject)):
        _accept(state, subject)
        return
    state.peers.note_sum(subject)
    if not work.censored:
        meter.pending.append((work.load, None if is_little else log_seconds, x, meter.last_x))
    meter.last_x = x
    # An excursion that ended without an alarm was noise and is learned; one that became a finding never is. While one
    # process of a role rises its peers appear fast, so they are not learned from either.
    if meter.cusum <= 0 and not state.peers.rising_without(subject):
        if subject.key not in fleet.quiet:
            for item in meter.pending:
                _learn_from(state, group, meter, *item)
        meter.pending.clear()


def _accept(state: SlowState, subject: MonitoredProcess) -> None:
    """Takes the level that was reported as the usual one, at every load."""
    meter = state.part.meter(subject)
    for (group, _), baseline in state.baselines.items():
        if group == subject.group:
            baseline.mean += meter.ratio_log
    meter.alarmed, meter.cusum, meter.smooth, meter.last_x = False, 0.0, 0.0, 0.0
    meter.pending.clear()
    state.peers.note_sum(subject)


def _learn_from(
    state: SlowState, group: str, meter: SlowMeter, load: float, log_seconds: float | None, x: float, x_before: float
) -> None:
    """`log_seconds`: None: too little to learn from."""
    habit = expected(state, group, load)
    if log_seconds is not None:
        learn(state, group, load, log_seconds, meter.peers)
    if log_seconds is not None and habit is not None:
        meter.offset_count += 1
        rate = max(1 / (meter.offset_count + OFFSET_PRIOR_WEIGHT), LEARN_RATE_MIN)
        meter.offset += (log_seconds - habit - meter.offset) * rate
        meter.offset = max(-OFFSET_MAX, min(OFFSET_MAX, meter.offset))
    mean, square, product, count = state.moments.get(group, (0.0, 0.0, 0.0, 0))
    rate = max(1 / (count + 1), LEARN_RATE_MIN)
    state.moments[group] = (
        mean + (x - mean) * rate,
        square + (x * x - square) * rate,
        product + (x * x_before - product) * rate,
        count + 1,
    )


def _fleet_shift(fleet: MonitoredProcesses, subject: MonitoredProcess, now: float, part: WorkPart) -> float:
    """Median deviation of all other processes from their baselines: the whole host may have become slower."""
    meters = (part.meter(s) for s in fleet.current() if s.key != subject.key)
    others = [m.smooth - m.offset for m in meters if now <= m.residual_until]
    return median(others) if others else 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`drift` of the sum at each stride, `clip` of one observation in it, and the least standard deviation."""

    drift: float
    clip: float
    sigma_min: float


def sensitivity(config: DetectorConfig, num_peers: int) -> Sensitivity:
    """With peers, the drift is half of the target shift, as in Page's test.

    Without peers nothing cancels what the whole host or the work does: the other roles show it only roughly. The drift
    is then the full shift, of a factor of two at least, and more noise is assumed. Each observation may count for more,
    as otherwise the larger drift would leave little of it.
    """
    if num_peers:
        return Sensitivity(drift=math.log(config.slow_ratio) / 2, clip=SUM_CLIP, sigma_min=SIGMA_MIN)
    ratio = max(config.slow_ratio, ALONE_RATIO_MIN)
    return Sensitivity(drift=math.log(ratio), clip=RATIO_CLIP, sigma_min=ALONE_SIGMA_MIN)


class SlowStage(Stage):
    name = "slow"
    part = WORK

    def __init__(self) -> None:
        self.state: SlowState = SlowState()

    def evaluate(self, tick: Tick) -> list[Finding]:
        fleet, now, meter = tick.fleet, tick.now, self.part.meter
        if self.state.part is not self.part:  # new, or restored
            self.state = self.state.about(self.part)
        update(self.state, fleet, tick.config, now)
        alarmed = [s for s in fleet.current() if meter(s).alarmed and not s.gone and not s.finished]
        found: dict[Key | str, Finding] = {}
        for s in alarmed:
            ranks = _computing_together(fleet, s)
            fault = s.replica if len(ranks) > 1 else s.key
            if self._matters(s) and fault not in found and not _may_be_of_a_majority(fleet, s, self.part, now):
                found[fault] = _finding(self.state, s, ranks, tick.config, now)
        return list(found.values())

    def _matters(self, subject: MonitoredProcess) -> bool:
        meter, usual = self.part.meter(subject), subject.slow.expected_seconds_per_unit
        lost = meter.seconds_per_unit - meter.expected_seconds_per_unit
        return self.part is WORK or (usual > 0 and lost >= PART_SHARE_MIN * usual)


class SlowLoadingStage(SlowStage):
    name = "slow_loading"
    part = LOADING


def _may_be_of_a_majority(fleet: MonitoredProcesses, subject: MonitoredProcess, part: WorkPart, now: float) -> bool:
    """Whether more peers may follow, so that this process must not be named alone yet. If only one process is slow, its
    peers appear fast."""
    if now - part.meter(subject).alarmed_wall >= MAJORITY_WAIT_SECONDS:
        return False
    peers = [part.meter(p) for p in fleet.peers(subject)]
    coming = sum(p.cusum >= RISING_SUM and not p.alarmed for p in peers)
    slow = 1 + coming + sum(p.alarmed for p in peers)
    return coming > 0 and 2 * slow > 1 + len(peers)


def _computing_together(fleet: MonitoredProcesses, subject: MonitoredProcess) -> list[MonitoredProcess]:
    """The ranks that finish each unit of work together with `subject`, itself included."""
    if subject.sample is None or not subject.sample.exchanges:
        return [subject]
    return [s for s in fleet.roster.of_replica(subject.replica).values() if s.incarnation == subject.incarnation]


def _finding(
    state: SlowState, subject: MonitoredProcess, ranks: list[MonitoredProcess], config: DetectorConfig, now: float
) -> Finding:
    """`ranks`: see `_computing_together`. Where several of them look slow, their replica is named without a rank."""
    part = state.part
    meter = part.meter(subject)
    ratio = math.exp(meter.ratio_log)
    against = (
        f"{meter.peers} peer{'s' if meter.peers != 1 else ''} at equal load"
        if meter.peers
        else "its own history (no peer is at work)"
    )
    instead = "" if meter.peers else ", or its work has changed"
    slow = [s for s in ranks if s is subject or part.meter(s).cusum >= RISING_SUM]
    waits = _waits(subject, [s for s in ranks if s is not subject]) if len(slow) == 1 else None
    if len(slow) > 1:
        them = "are slow, and which of them the others wait for is not seen"
        who, it = f"{names(slow)}{part.text} {them}", f"rank {subject.rank}"
    else:
        who, it = f"{subject.name()} is slow{part.text}", "it"
    because = (
        f"{who}: {f'{waits.text}; ' if waits else ''}for {now - meter.rising_since:.0f} s "
        f"({meter.rising_strides} strides) {it} has "
        f"taken {ratio:.1f} times the seconds per unit of {against}, and not because neighbours starve it of CPU"
        f"{instead}; its last unit took {meter.seconds_per_unit:.3g} s at load {meter.load:.3g} instead of "
        f"{meter.expected_seconds_per_unit:.3g} s (CUSUM {meter.cusum:.1f} is above {meter.limit:.1f}, the threshold "
        f"for {config.slow_false_alarms_per_day:g} false alarms per day)"
    )
    values = {
        "seconds_per_unit": meter.seconds_per_unit,
        "expected_seconds_per_unit": meter.expected_seconds_per_unit,
        "cusum": meter.cusum,
        "threshold": meter.limit,
        "strides": float(meter.rising_strides),
        "peers": float(meter.peers),
    }
    found = finding(
        "sequential",
        [subject],
        FaultClass.SLOW,
        onset=meter.rising_since,
        now=now,
        confidence=0.9 if meter.peers else 0.6,
        because=because,
        evidence=(
            Evidence(kind="seconds_per_unit", text=f"{ratio:.1f} times slower", values=values),
            *((waits,) if waits else ()),
            Evidence(kind=GAIN, text="gain of a replacement", values={"ratio": ratio}),
        ),
    )
    if len(slow) == 1:
        return found
    return replace(found, suspects=(replace(found.suspects[0], rank=None, process=None),))


def _waits(subject: MonitoredProcess, others: list[MonitoredProcess]) -> Evidence | None:
    """That the other ranks of a replica wait for `subject`; None where waits are not seen."""
    own, shares = subject.slow.waited_share, [s.slow.waited_share for s in others]
    if not shares or own >= min(shares):
        return None
    least, most = min(shares), max(shares)
    low, high = f"{100 * least:.0f}", f"{100 * most:.0f}"
    during = f"{low} %" if low == high else f"{low} to {high} %"
    return Evidence(
        kind="exchange",
        text=f"its other ranks wait for it ({during} of each unit of work, it waits for {100 * own:.0f} %)",
        values={
            "waited_ratio": own,
            "waited_ratio_of_others_min": min(shares),
            "waited_ratio_of_others_max": max(shares),
        },
    )
