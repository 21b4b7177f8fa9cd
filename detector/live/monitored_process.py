"""One monitored process: its clocks since the last progress or heartbeat, the rules that advance them, and the learned
deadlines.

It keeps clocks, not histories: seconds without progress on the wall clock, and on the effective clock, which excludes
time in which the process was runnable but got no CPU. A clock advances only with samples, by at most
`SAMPLE_GAP_SECONDS_MAX` each, so that a pause of the agent or of the whole machine does not count against a process.

Deadlines are learned per (role, phase) of one job: k x own P99, at most the ceiling or 3 x the median, at least the
floor. A learned value is the effective time between two advances of progress. Only completed gaps are learned, and none
from a process with a standing finding: faulty behaviour must not enter the baseline. Start and state copy, of which an
incarnation has one, get a multiple of the longest one that the run has seen.
"""

import heapq
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from rolecall.core.config.job import DetectorConfig
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import (
    PHASES_WITHOUT_DUE_PROGRESS,
    UNCOUNTED,
    AgentEvent,
    Phase,
    ProcessSample,
    is_instrumented,
)

BEATS = "(beats)"
"""Pseudo-phase under which gaps between heartbeats are stored."""
UNITS = "(units)"
"""The same for the mean seconds of a unit of work, as the process itself measures them: of work too short to be
sampled."""
STEPS = "(steps)"
"""The same for the mean seconds of a step with its waits for other ranks: for phase `step`, which samples may miss on a
busy machine."""
PAUSES = "(pauses)"
"""The same for times between two steps of at least `LONG_PAUSE_SECONDS`, which short ones must not displace: there may
be a thousand steps between two checkpoints."""
LONG_PAUSE_SECONDS = 30.0
"""Half of what a rank that others wait for has in any case."""
GAPS_KEPT = 512
"""Gaps kept per (role, phase): the P99 of 512 values depends on the five largest."""
GAPS_MIN = 8
"""With fewer gaps the P99 is unknown: the role's other phases, or the first-unit deadline, are used instead."""
REFRESH_EVERY = 16
"""New gaps between two recomputations of the P99: sorting 512 numbers for each sample is too expensive."""


EFFECTIVE_SHARE = 0.4
"""Fraction of the deadline that must have passed on the effective clock. With k = 5 this is twice the P99 of a unit:
more CPU time than a healthy unit needs under any starvation. A process with half a CPU is found at 1.25 deadlines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    seconds: float
    text: str  # its derivation, for `because`
    learned: bool
    effective_share: float = EFFECTIVE_SHARE


def is_of_past_job(group: str, groups: Collection[str]) -> bool:
    """Whether a job beside another one had this group, and none has it now. `groups`: of all processes."""
    return "/" in group and group not in groups


@dataclass(slots=True)
class ProgressGaps:
    """By group (`MonitoredProcess.group`) and phase."""

    values: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    cached: dict[tuple[str, str], float] = field(default_factory=dict)

    def keep(self, groups: Collection[str]) -> None:
        """Drops what was learned of other groups, except roles."""
        for key in [k for k in self.values if is_of_past_job(k[0], groups)]:
            del self.values[key], self.counts[key]
            self.cached.pop(key, None)

    def add(self, role: str, phase: str, seconds: float) -> None:
        key = (role, phase)
        kept = self.values.get(key)
        if kept is None:
            kept = self.values[key] = deque(maxlen=GAPS_KEPT)
            self.counts[key] = 0
        kept.append(seconds)
        self.counts[key] += 1
        if self.counts[key] % REFRESH_EVERY == 0 or self.counts[key] <= REFRESH_EVERY:
            ordered = sorted(kept)
            self.cached[key] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    def p99(self, role: str, phase: str) -> float | None:
        """Seconds, or None with fewer than `GAPS_MIN` gaps."""
        key = (role, phase)
        return self.cached[key] if self.counts.get(key, 0) >= GAPS_MIN else None

    def median(self, role: str, phase: str) -> float:
        """Seconds; 0 with fewer than `GAPS_MIN` gaps."""
        key = (role, phase)
        return statistics.median(self.values[key]) if self.counts.get(key, 0) >= GAPS_MIN else 0.0

    def p99_of_role(self, role: str) -> float | None:
        """The largest P99 of the role's phases: used for a phase too short to have been sampled."""
        excluded = PHASES_WITHOUT_DUE_PROGRESS | SINGLE_PHASES | {BEATS, UNITS, STEPS, PAUSES}
        keys = [k for k in self.values if k[0] == role and k[1] not in excluded]
        known = [self.cached[k] for k in keys if self.counts[k] >= GAPS_MIN]
        return max(known) if known else None

    def longest(self, role: str, phase: str) -> float | None:
        """Seconds; None before there is any."""
        return max(self.values.get((role, phase), ()), default=None)

    def second_longest(self, role: str, phase: str) -> float:
        """Seconds; 0 before there are two."""
        two = heapq.nlargest(2, self.values.get((role, phase), ()))
        return two[1] if len(two) > 1 else 0.0


def capped(factor: float, p99: float, config: DetectorConfig) -> str:
    """For text: a multiple of the P99, at most the ceiling."""
    found, ceiling = f"{factor:g} x P99 {p99:.2f}", config.hang_ceiling_seconds
    return found if factor * p99 <= ceiling else f"min({ceiling:g}, {found})"


EARLY_SECONDS = 120.0
"""Of a phase that a role has been in, but not often enough for a P99; or the first-unit deadline, if that is less."""


class Multiple(NamedTuple):
    """`factor` x `seconds`, which a deadline is not below, and for its text: of what, and why."""

    factor: float
    seconds: float
    what: str
    why: str


def learned_deadline(p99: float | None, config: DetectorConfig, least: Sequence[Multiple] = ()) -> Deadline:
    """k x P99, at most the ceiling, at least the floor. Without a P99 the first-unit deadline, if nothing is known."""
    if p99 is None:
        seconds = min(config.first_unit_seconds, EARLY_SECONDS) if least else config.first_unit_seconds
        text, learned = f"{seconds:g} s, {'little' if least else 'no'} history yet", False
    else:
        floor, factor = config.hang_floor_seconds, config.hang_p99_factor
        seconds = max(floor, min(config.hang_ceiling_seconds, factor * p99))
        text, learned = f"{seconds:.1f} s = max({floor:g}, {capped(factor, p99, config)})", True
    for m in least:
        if m.factor * m.seconds > seconds:
            seconds, learned = m.factor * m.seconds, True
            text = f"{seconds:.1f} s = {m.factor:g} x {m.what} {m.seconds:.2f}, {m.why}"
    return Deadline(seconds=seconds, text=text, learned=learned)


LONG_UNITS_FACTOR = 3.0
"""Units may take longer than the ceiling: no deadline is below this multiple of their median, which one outlier does
not raise."""
TAIL_FACTOR = 2.0
"""Nor below this multiple of the second longest: generations have a long tail, and a step with an evaluation in it is
longer than all others. One hang does not raise it either."""


def least_of_long_units(gaps: ProgressGaps, role: str, phase: str) -> Sequence[Multiple]:
    """Of a phase whose units may take longer than the ceiling."""
    why = "above the ceiling"
    return (
        Multiple(LONG_UNITS_FACTOR, gaps.median(role, phase), "median", why),
        Multiple(TAIL_FACTOR, gaps.second_longest(role, phase), "second longest", why),
    )


def least_of_few_units(longest: float | None) -> Sequence[Multiple]:
    """Of a phase that was seen too seldom for a P99 of its own. None: not once."""
    return () if longest is None else (Multiple(LONG_UNITS_FACTOR, longest, "longest", "little history yet"),)


SINGLE_PHASES = frozenset({Phase.START, Phase.COPY})
"""Phases that an incarnation is in once. Their deadline is that of `single_deadline`."""
SINGLE_FACTOR = 3.0
"""A replacement starts where the run is at work, and perhaps on a node whose page cache is cold."""
SINGLE_FLOOR_SECONDS = 30.0
"""The first starts of a run may have found everything in the page cache, and taken a second each."""
FIRST_INCARNATION = 1


def single_deadline(longest: float | None, is_first: bool, config: DetectorConfig) -> Deadline:
    """Of a phase that an incarnation is in once: max(floor, 3 x the longest of its role), at most the first-unit
    deadline. That one before there is any, and for a first incarnation: all of these start at the same time, so that
    the first to finish say little about the others. All of it must have passed on the effective clock: a start is CPU
    time above all, and takes as much of it on a busy machine."""
    if longest is None or is_first:
        return replace(learned_deadline(None, config), effective_share=1.0)
    seconds = min(config.first_unit_seconds, max(SINGLE_FLOOR_SECONDS, SINGLE_FACTOR * longest))
    text = f"{seconds:.1f} s = max({SINGLE_FLOOR_SECONDS:g}, {SINGLE_FACTOR:g} x longest {longest:.2f})"
    return Deadline(seconds=seconds, text=text, learned=True, effective_share=1.0)


Key = tuple[str, int, int]
"""(replica, rank, incarnation)"""

SAMPLE_GAP_SECONDS_MAX = 0.6
"""Three sample intervals (0.2 s each): longer time between two samples is unobserved and does not count. Without the
limit, a pause of the machine for 3 s would make all its processes appear hung."""

MISSED_SAMPLES_MAX = 3
"""The same limit for agents that sample, or are polled, less often: a multiple of their usual interval."""
SLOW_SAMPLING_SECONDS = 0.5
"""Usual intervals of at least this are long by design; shorter ones are due to pauses of agents that sample five times
per second."""
INTERVAL_SMOOTHING = 0.1

UNPAGED_GAP_SECONDS_MAX = 3.0
"""The same limit for uninstrumented processes, which agents sample once per second."""

TRACED_STATE = "t"
STOPPED_STATES = frozenset({"T", TRACED_STATE})
"""Stopped, traced: proc(5)."""
HELD_STATES = STOPPED_STATES | {"D"}
"""Also in an uninterruptible wait."""

STARVED_SAMPLE_SHARE = 0.5
"""Fraction of the sample interval without CPU from which a process counts as starved; a lower sample ends this."""
STARVED_SMOOTHING_SECONDS = 15.0
"""Time constant of `MonitoredProcess.starved_share`."""

EXPERIENCED_UNITS = 8
"""Units of work (two steps of four microbatches) after which an incarnation has been in every phase of its work: from
then on an unobserved phase is too short to be sampled, not possibly long."""

USER_HZ = 100.0
"""Start ticks per second: proc(5), on every usual Linux."""

RESTS_MAX = 8
"""Alignment points of collective counters kept per subject."""

PENDING_MAX = 64
"""Observations kept during an excursion of the slow test, until its outcome is known."""

WORK_PHASES = frozenset({Phase.STEP, Phase.COMPUTE, Phase.GENERATE, Phase.SCORE, Phase.CONTROL})
"""Phases in which finished units prove that a replica has recovered."""

_POSITION = attrgetter(
    *("progress", "phase_entries", "phase", "collectives_done", "collectives_entered", "collectives_issued"),
)
"""Of a sample: a process whose position changed has made progress."""


@dataclass(slots=True)
class ProgressClocks:
    """Seconds since a counter last advanced."""

    wall: float = 0.0
    effective: float = 0.0
    cpu: float = 0.0  # CPU seconds used in that time

    def advance(self, wall: float, starved: float, cpu: float) -> None:
        self.wall += wall
        self.effective += max(0.0, wall - starved)
        self.cpu += cpu

    def reset(self, wall: float = 0.0) -> None:
        self.wall, self.effective, self.cpu = wall, wall, 0.0


TRAINING_VALUES = ("loss", "grad_norm", "reward")
NOT_FINITE_SECONDS = 60.0
"""After this long with finite values the next NaN is a new fault."""


@dataclass(slots=True)
class NotFinite:
    """NaN and infinite training values that a process reported since the first of them. Times are wall seconds."""

    count: int = 0
    since: float = 0.0
    newest: float = 0.0
    step: int = -1  # at the first
    values: dict[str, str] = field(default_factory=dict)  # name -> NaN or infinite; those that can be told
    lasting_since: float = 0.0  # each sample since then has one; 0: the newest has none

    def advance(self, previous: ProcessSample, sample: ProcessSample, now: float) -> None:
        new = sample.unfinite - previous.unfinite
        if new > 0:
            if now - self.newest > NOT_FINITE_SECONDS:
                self.count, self.since, self.step, self.values = 0, now, sample.step, {}
            self.count, self.newest = self.count + new, now
        # A value that was never reported is NaN, too.
        turned = (n for n in TRAINING_VALUES if math.isnan(getattr(sample, n)) and not math.isnan(getattr(previous, n)))
        endless = {n: "infinite" for n in TRAINING_VALUES if math.isinf(getattr(sample, n))}
        if new > 0:
            self.values |= dict.fromkeys(turned, "NaN") | endless
        is_now = bool(endless) or any(math.isnan(getattr(sample, n)) for n in self.values)
        if not self.values:  # it was NaN before the watch began
            is_now = new > 0
        self.lasting_since = (self.lasting_since or now) if is_now else 0.0


@dataclass(slots=True)
class SlowMeter:
    """State of the slow test of one part of a subject's work (see detector/live/stages/progress/slow.py)."""

    start: ProcessSample | None = None  # start of the current stride
    censored_at: float = 0.0  # node time of the last observation of an unfinished unit
    offset: float = 0.0  # its usual log ratio to the role's baseline
    offset_count: int = 0
    residual: float = 0.0  # newest log ratio to the role's baseline
    residual_until: float = 0.0  # wall time at which `residual` is too old for its peers; 0: none yet
    smooth: float = 0.0  # mean of the last few residuals
    pending: deque[tuple[float, float | None, float, float]] = field(default_factory=lambda: deque(maxlen=PENDING_MAX))
    """(load, log seconds, x, previous x) of an excursion; learned if it ends without an alarm."""
    last_x: float = 0.0
    cusum: float = 0.0
    limit: float = 0.0  # of `cusum`, at the newest observation
    rising_since: float = 0.0  # wall time when the sum last left zero
    rising_strides: int = 0
    ratio_log: float = 0.0  # mean log ratio since `rising_since`
    seconds_per_unit: float = 0.0
    expected_seconds_per_unit: float = 0.0
    waited_share: float = 0.0  # of its time in units, in the newest stride: for other ranks of its replica
    load: float = 0.0
    peers: int = 0
    alarmed: bool = False
    alarmed_wall: float = 0.0  # start of the alarm

    def copied(self) -> "SlowMeter":
        other = copy(self)
        other.pending = self.pending.copy()
        return other


@dataclass(slots=True)
class MonitoredProcess:
    replica: str
    role: str
    rank: int
    incarnation: int
    node: str
    process: ProcessId | None
    seen_wall: float  # time of the last sample or event
    first_wall: float = 0.0  # time of its registration, or of what was first seen of it
    foreign: bool = False  # of a job that rolecall did not start, even if a watch counts its incarnations
    sample: ProcessSample | None = None
    stall: ProgressClocks = field(default_factory=ProgressClocks)
    beat: ProgressClocks = field(default_factory=ProgressClocks)
    beats_seen: bool = False
    tainted: bool = False  # its current work overlaps with a finding: excluded from learning
    worked: int = 0  # units finished in work phases under this name
    worked_wall: float = 0.0
    phases_done: set[str] = field(default_factory=set)
    epoch_fresh: bool = True  # no collective finished yet in its current epoch
    rests: dict[tuple[int, int], int] = field(default_factory=dict)  # (epoch, step) -> collectives done before it
    exit_event: AgentEvent | None = None
    ray_event: AgentEvent | None = None  # why it ended, from Ray's logs
    exit_wall: float = 0.0
    followed: bool = False  # uninstrumented: its exit is a consequence of another exit
    dead_wall: float = 0.0  # time of the first sample that reports it as dead
    finished: bool = False
    halted: ProgressClocks = field(default_factory=ProgressClocks)  # uninstrumented: time in one blocked kernel state
    starved: ProgressClocks = field(default_factory=ProgressClocks)  # uninstrumented; `effective`: time without CPU
    starved_share: float = 0.0  # uninstrumented: recent fraction of time runnable without a CPU
    closed_wall: float = 0.0  # 0: current; else time when it was superseded, promoted or forgotten
    offset_seconds: float = 0.0  # watcher's wall clock minus its node's
    slow: SlowMeter = field(default_factory=SlowMeter)
    slow_loading: SlowMeter = field(default_factory=SlowMeter)
    not_finite: NotFinite = field(default_factory=NotFinite)
    sample_seconds: float = 0.0  # usual time between two samples
    job: str = ""  # that rolecall did not start; empty: not known
    group: str = ""  # its role; or a replica, where another job of the run has that role
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.replica, self.rank, self.incarnation)
        self.group = self.group or self.role
        self.foreign = self.foreign or self.incarnation == UNCOUNTED

    def copied(self) -> "MonitoredProcess":
        """An independent copy of the current state."""
        other = copy(self)
        other.stall, other.beat = copy(self.stall), copy(self.beat)
        other.halted, other.starved = copy(self.halted), copy(self.starved)
        other.phases_done, other.rests = set(self.phases_done), dict(self.rests)
        other.not_finite = replace(self.not_finite, values=dict(self.not_finite.values))
        other.slow, other.slow_loading = self.slow.copied(), self.slow_loading.copied()
        return other

    @property
    def phase(self) -> str:
        return self.sample.phase if self.sample else Phase.START

    @property
    def reports(self) -> bool:
        """Whether it writes a state page; False for processes of uninstrumented jobs."""
        return not self.foreign if self.sample is None else is_instrumented(self.sample)

    @property
    def is_first(self) -> bool:
        """Whether its role has had no start to compare with; those of another launcher load any checkpoint."""
        return self.foreign or self.incarnation <= FIRST_INCARNATION

    @property
    def gone(self) -> bool:
        return self.exit_wall > 0.0

    @property
    def stopped(self) -> bool:
        """Whether the kernel showed it as stopped in the newest sample."""
        return self.sample is not None and self.sample.proc_state in STOPPED_STATES

    @property
    def experienced(self) -> bool:
        return self.worked >= EXPERIENCED_UNITS

    @property
    def mean_step_seconds(self) -> float | None:
        """From its start to its last unit of work, by its own count: for a watch that began later. None before enough
        units. A step may have several units, and may be numbered from those before a restart."""
        s = self.sample
        if s is None or s.progress < EXPERIENCED_UNITS:
            return None
        num_steps = max(1, min(s.progress, s.step)) if s.step >= 0 else s.progress
        return max(0.0, s.progress_at - s.process.start_ticks / USER_HZ) / num_steps

    @property
    def progress_due(self) -> bool:
        """Whether progress is due: true for an idle engine with open requests, false for uninstrumented processes."""
        if self.sample is None or not self.reports:
            return False
        if self.phase == Phase.IDLE:
            return self.sample.requests_active > 0
        return self.phase not in PHASES_WITHOUT_DUE_PROGRESS

    def onset_wall(self, standing_seconds: float) -> float:
        """Watcher's wall time of its last progress."""
        wall_at = self.sample.wall_at if self.sample else self.seen_wall
        return wall_at + self.offset_seconds - standing_seconds

    def name(self) -> str:
        pid = f", pid {self.process.pid}" if self.process else ""
        rank = f" rank {self.rank}" if self.rank or self.foreign else ""
        incarnation = "" if self.foreign else f", incarnation {self.incarnation}"
        return f"{self.replica}{rank} ({self.node}{pid}{incarnation})"


def phase_text(phase: str, step: int) -> str:
    """`compute of step 80`; `step 80` in a job that names no phases."""
    if step < 0:
        return phase
    return f"step {step}" if phase == Phase.STEP else f"{phase} of step {step}"


def first(subject: MonitoredProcess, sample: ProcessSample) -> None:
    """Initializes from the first sample: counters are per process, so work finished so far counts. A job that rolecall
    did not start may be between two steps."""
    subject.slow.start = subject.slow_loading.start = sample
    if sample.phase in WORK_PHASES or (subject.foreign and sample.phase == Phase.WAIT):
        subject.worked = sample.progress


def starved_seconds(previous: ProcessSample, sample: ProcessSample) -> float:
    """Seconds for which the working thread was runnable but did not get a CPU because of other processes.

    The kernel also counts throttling by the process's own quota as run delay; that part is subtracted.
    """
    delay = sample.main_run_delay_seconds - previous.main_run_delay_seconds
    return max(0.0, delay - max(0.0, sample.throttled_seconds - previous.throttled_seconds))


def advance(
    subject: MonitoredProcess, previous: ProcessSample, sample: ProcessSample, gaps: ProgressGaps | None, now: float
) -> None:
    """Advances the subject's clocks from one sample to the next; `gaps` learns from it unless None."""
    if not is_instrumented(sample):
        _advance_unpaged(subject, previous, sample)
        return
    if sample.unfinite:
        subject.not_finite.advance(previous, sample, now)
    counted = min(sample.at - previous.at, _gap_seconds_max(subject))
    subject.sample_seconds += (
        min(sample.at - previous.at, UNPAGED_GAP_SECONDS_MAX) - subject.sample_seconds
    ) * INTERVAL_SMOOTHING
    starved = min(counted, starved_seconds(previous, sample))
    subject.tainted |= gaps is None
    cpu = max(0.0, sample.cpu_seconds - previous.cpu_seconds)
    if sample.beats != previous.beats:
        if gaps is not None and subject.beats_seen:
            gaps.add(subject.group, BEATS, subject.beat.effective + counted / 2)
        subject.beats_seen = True
        subject.beat.reset()
    else:
        # Uses the working thread's run delay for the heartbeat thread: agents read other threads only every 10 s.
        subject.beat.advance(counted, starved, cpu)
    units = sample.progress - previous.progress
    # A unit may be much shorter than a sample interval: a process that changed phase may have worked in between.
    changed = sample.phase_entries != previous.phase_entries
    if units > 0 and (changed or sample.phase in WORK_PHASES or previous.phase in WORK_PHASES):
        finished, busy = sample.work_units - previous.work_units, sample.busy_seconds - previous.busy_seconds
        # Without seconds they were not measured.
        if gaps is not None and finished > 0 and busy > 0.0 and subject.experienced and not subject.tainted:
            gaps.add(subject.group, UNITS, busy / finished)
            gaps.add(subject.group, STEPS, (busy + sample.exchange_seconds - previous.exchange_seconds) / units)
        subject.worked += units
        subject.worked_wall = now
    if _POSITION(previous) != _POSITION(sample):
        _learn(subject, previous, sample, starved, None if subject.tainted else gaps)
        subject.tainted = gaps is None
        since = max(sample.progress_at, sample.phase_since)
        subject.stall.reset(min(counted, max(0.0, sample.at - since)))
    else:
        subject.stall.advance(counted, starved, cpu)
    _track_collectives(subject, previous, sample)


def _gap_seconds_max(subject: MonitoredProcess) -> float:
    usual = subject.sample_seconds
    return max(SAMPLE_GAP_SECONDS_MAX, MISSED_SAMPLES_MAX * usual if usual >= SLOW_SAMPLING_SECONDS else 0.0)


def _advance_unpaged(subject: MonitoredProcess, previous: ProcessSample, sample: ProcessSample) -> None:
    """Clocks of an uninstrumented process: time blocked in the kernel, and time starved by other processes."""
    counted = min(sample.at - previous.at, UNPAGED_GAP_SECONDS_MAX)
    cpu = max(0.0, sample.cpu_seconds - previous.cpu_seconds)
    if sample.proc_state in HELD_STATES and sample.proc_state == previous.proc_state and not cpu:
        subject.halted.advance(counted, 0.0, cpu)
    else:
        subject.halted.reset()
    kept_from = starved_seconds(previous, sample)
    if counted > 0:
        share = min(1.0, kept_from / counted)
        subject.starved_share += (share - subject.starved_share) * min(1.0, counted / STARVED_SMOOTHING_SECONDS)
    if kept_from >= STARVED_SAMPLE_SHARE * counted:
        subject.starved.wall += counted
        subject.starved.effective += min(counted, kept_from)
    else:
        subject.starved.reset()


def _learn(
    subject: MonitoredProcess, previous: ProcessSample, sample: ProcessSample, starved: float, gaps: ProgressGaps | None
) -> None:
    """Adds the effective duration of the unit or phase that just ended to `gaps`."""
    left = sample.phase != previous.phase or sample.phase_entries != previous.phase_entries
    ended_at = sample.phase_since if left else max(sample.progress_at, previous.at)
    tail = min(_gap_seconds_max(subject), max(0.0, min(ended_at, sample.at) - previous.at))
    share = tail / (sample.at - previous.at) if sample.at > previous.at else 0.0
    gap = subject.stall.effective + max(0.0, tail - starved * min(1.0, share))
    # The first time of each phase in an incarnation includes warm-up, and the first of an epoch a rendezvous.
    warm = previous.phase in subject.phases_done and not (subject.epoch_fresh and previous.phase == Phase.REDUCE)
    if gaps is not None and (warm or previous.phase in SINGLE_PHASES):
        gaps.add(subject.group, previous.phase, gap)
        if previous.phase == Phase.WAIT and gap >= LONG_PAUSE_SECONDS:
            gaps.add(subject.group, PAUSES, gap)
    subject.phases_done.add(previous.phase)


def _track_collectives(subject: MonitoredProcess, previous: ProcessSample, sample: ProcessSample) -> None:
    if sample.epoch != previous.epoch:
        subject.epoch_fresh = True
        subject.rests.clear()
    elif sample.collectives_done != previous.collectives_done:
        subject.epoch_fresh = False
    if sample.phase == Phase.COMPUTE and sample.collectives_entered == sample.collectives_done:
        # While it computes step n it has finished all collectives of earlier steps and none of this one: at this
        # point the counters of peers, which started at different times, can be aligned.
        subject.rests[(sample.epoch, sample.step)] = sample.collectives_done
        while len(subject.rests) > RESTS_MAX:
            del subject.rests[next(iter(subject.rests))]
