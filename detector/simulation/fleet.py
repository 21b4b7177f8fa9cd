"""A simulated fleet: training tasks with known faulty machine, onset and effect size. Numpy only.

Value of metric m at tick t on machine n:

    level_m + sigma_m * (offset_mn + noise_mtn + gain_mn * common_m(t + skew_n) + effect_mtn)

`common` is the signal that all machines share: the training step's phases, checkpoints, level shifts, drifts. `noise`
is scale_mn * (sqrt(1 - s) AR(1) with Student-t innovations + sqrt(s) slow wander), of variance 1 over peers and time.

One *peer standard deviation* is sigma_m: the standard deviation, over peers and time, of a machine's own noise in a
healthy metric without its constant offset (with the offset, an effect of "1 sigma" would be several times the noise for
a detector that compares a machine with its own past, and recall would be overstated). Clock skew at the edges of a step
and gains come on top of sigma, so effects are if anything smaller than stated.

Sources of the numbers: [Minder] Y. Deng et al., "Minder: Faulty Machine Detection for Large-scale Distributed Model
Training", NSDI 2025; [issue] the specification of this benchmark; [fit] `benchmarks/panels/fit_noise.py` on healthy
real recordings; [assumed] our plausible choice, with its reason. A seed gives the same fleet on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats, Machine, Panel, PanelShape

CHUNK_TICKS = 64
"""Ticks generated at a time: 8 MB for 1,500 machines. Part of the definition of a seed, independent of the reader."""

MISSING_RATIO_SINGLE, MISSING_RATIO_RUNS = 0.01, 0.01
"""[issue] 2 % of all samples are missing; half of them single samples, half in runs of a whole machine (split
[assumed])."""
MISSING_RUN_SECONDS_MAX = 39  # [assumed] runs of 1 to 39 s, uniform: an agent restart, a scrape timeout

SKEW_SECONDS = 0.5
"""[assumed] Uniform in +-0.5 s: NTP synchronizes clocks to milliseconds, but machines sample at different times within
the second."""
SKEW_BAD_RATIO, SKEW_BAD_SECONDS = 0.02, 3.0  # [assumed] machines with a wrong clock: uniform in +-3 s

STEP_SECONDS_MIN, STEP_SECONDS_MAX = 4.0, 40.0  # [assumed] seconds to tens of seconds, as in large pre-training
STEP_JITTER = 0.03  # [assumed] standard deviation of a step's length, shared by all machines
COMPUTE_SHARE_MIN, COMPUTE_SHARE_MAX = 0.55, 0.8  # [assumed] of a step; the rest is communication
CHECKPOINT_EVERY_SECONDS_MIN, CHECKPOINT_EVERY_SECONDS_MAX = 300.0, 900.0  # [assumed] often, so that every task has one
CHECKPOINT_SECONDS_MIN, CHECKPOINT_SECONDS_MAX = 10.0, 40.0  # [assumed]
EVENTS_PER_SECOND = 1 / 1200
"""[assumed] Of each kind (level shift, drift, phase change): one in 20 minutes, far more than in real fleets, to expose
detectors that raise false alarms on them."""
EVENT_SIGMAS_MIN, EVENT_SIGMAS_MAX = 2.0, 10.0  # [assumed] of shifts and drifts
DRIFT_SECONDS_MIN, DRIFT_SECONDS_MAX = 120.0, 600.0  # [assumed]

MARGIN_SECONDS = 5
"""Margin of `common` before the first tick and after the last: for skews, and the second that a sample averages
over."""
FINE = 10
"""Resolution of `common`, points per second: skews are multiples of a tenth of a second."""
MIXTURE_SIZE = 1 << 16
"""Number of scales in the normal mixture that makes Student-t noise."""

NOISE_AT = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles over real metrics for the following values. Each metric of each task draws its own between them."""
AR_COEFFICIENT = (0.0, 0.0, 0.49, 0.94, 0.95)  # [fit] both sets: `phi`, per tick
WANDER_SHARE = (0.0, 0.0, 0.0, 0.01, 0.37)  # [fit] both sets: of the variance
WANDER_SECONDS = (30.0, 30.0, 60.0, 120.0, 600.0)  # [fit] both sets
INNOVATION_DOF = (2.1, 2.13, 2.55, 3.26, 5.71)
"""[fit] both sets: `dof`. The first is 1.53 there, which has no variance: the standard deviation would depend on a few
extremes."""
OFFSET_SIGMAS = (0.14, 0.32, 0.51, 1.07, 2.31)  # [fit] exathlon
SCALE_SPREAD = (0.26, 0.27, 0.31, 0.38, 0.61)  # [fit] asd: standard deviation of the log of a machine's own scale
KNOT_TICKS = 16
"""Interval between knots of the wander, which is linear in between."""

Array = NDArray[np.float64]


class Noise:
    """Noise of single machines, variance 1 over peers and time; owned by one pass over a task."""

    def __init__(self, rng: np.random.Generator, size: tuple[int, int]) -> None:
        def drawn(quantiles: tuple[float, ...]) -> Array:
            return np.interp(rng.uniform(NOISE_AT[0], NOISE_AT[-1], size[0]), NOISE_AT, quantiles)[:, None]

        self.phi = drawn(AR_COEFFICIENT).astype(np.float32)
        wander_share, wander_seconds = drawn(WANDER_SHARE), drawn(WANDER_SECONDS)
        spread = drawn(SCALE_SPREAD)
        # Log-normal with mean square 1: the variance over peers stays 1.
        scale = np.exp(spread * rng.standard_normal(size) - spread**2)
        self.offset = (drawn(OFFSET_SIGMAS) * rng.standard_normal(size)).astype(np.float32)
        self.fast = (scale * np.sqrt(1 - wander_share)).astype(np.float32)
        self.slow = (scale * np.sqrt(wander_share)).astype(np.float32)
        self.rho = np.exp(-KNOT_TICKS / wander_seconds)
        # Linear interpolation between knots reduces the variance.
        self.slow /= np.sqrt((2 + self.rho) / 3).astype(np.float32)
        dof = drawn(INNOVATION_DOF)[:, 0]
        self.mixture = [_mixture(rng, float(d)) * np.sqrt(1 - p**2) for d, p in zip(dof, self.phi[:, 0], strict=True)]
        self.state = rng.standard_normal(size, dtype=np.float32)
        self.knot = rng.standard_normal(size)

    def ahead(self, rng: np.random.Generator) -> Floats:
        """The next CHUNK_TICKS, (T, M, N)."""
        size = (CHUNK_TICKS, *self.state.shape)
        values = rng.standard_normal(size, dtype=np.float32)
        which = rng.integers(0, MIXTURE_SIZE, size, dtype=np.uint16)
        for m, scales in enumerate(self.mixture):
            values[:, m] *= scales[which[:, m]]
        for t in range(CHUNK_TICKS):
            self.state = self.phi * self.state + values[t]
            values[t] = self.state
        values *= self.fast
        along = (np.arange(KNOT_TICKS, dtype=np.float32) / KNOT_TICKS)[:, None, None]
        for t in range(0, CHUNK_TICKS, KNOT_TICKS):
            then = self.rho * self.knot + np.sqrt(1 - self.rho**2) * rng.standard_normal(self.knot.shape)
            here = (self.slow * self.knot).astype(np.float32)
            values[t : t + KNOT_TICKS] += here + along * ((self.slow * then).astype(np.float32) - here)
            self.knot = then
        return values


def _mixture(rng: np.random.Generator, dof: float) -> Floats:
    """(MIXTURE_SIZE,) scales: a standard normal times a random one of them is Student-t with `dof`, of variance 1."""
    scales = 1 / np.sqrt(rng.standard_gamma(dof / 2, MIXTURE_SIZE))
    scales /= np.sqrt(np.mean(scales**2))
    return scales.astype(np.float32)


def skews(rng: np.random.Generator, num_machines: int) -> NDArray[np.int64]:
    """(N,) in points of `common`."""
    bad = rng.random(num_machines) < SKEW_BAD_RATIO
    most = np.where(bad, SKEW_BAD_SECONDS, SKEW_SECONDS)
    return np.rint(most * rng.uniform(-1, 1, num_machines) * FINE).astype(np.int64)


def gone(rng: np.random.Generator, num_ticks: int, num_machines: int) -> NDArray[np.bool_]:
    """(T, N): runs in which all samples of a machine are missing."""
    missing = np.zeros((num_ticks, num_machines), dtype=np.bool_)
    mean_seconds = (1 + MISSING_RUN_SECONDS_MAX) / 2
    for _ in range(int(rng.poisson(MISSING_RATIO_RUNS / mean_seconds * missing.size))):
        start, n = int(rng.integers(num_ticks)), int(rng.integers(num_machines))
        missing[start : start + int(rng.integers(1, MISSING_RUN_SECONDS_MAX + 1)), n] = True
    return missing


def common(rng: np.random.Generator, num_ticks: int, waves: Array, checkpoints: Array) -> Floats:
    """(M, fine points): the shared signal, averaged over the preceding second. `waves`, `checkpoints` (M,): effect of
    computing and of a checkpoint on each metric."""
    num_points = (-(-num_ticks // CHUNK_TICKS) * CHUNK_TICKS + 2 * MARGIN_SECONDS) * FINE
    seconds = np.arange(num_points) / FINE
    length = num_points / FINE
    changes = np.sort(_moments(rng, length))
    wave, saving = _steps(rng, seconds, changes), _checkpoints(rng, seconds)
    alike = waves[:, None] * np.ones(num_points)
    for moment in changes:  # a phase change alters the effect of the step on each metric
        alike[:, seconds >= moment] *= rng.uniform(0.5, 1.5, (len(waves), 1))
    alike = alike * wave * (1 - saving) + checkpoints[:, None] * saving
    for drifts in (False, True):
        for moment in _moments(rng, length):
            takes = rng.uniform(DRIFT_SECONDS_MIN, DRIFT_SECONDS_MAX) if drifts else 1 / FINE
            hit = rng.choice(len(waves), int(rng.integers(1, len(waves) // 3 + 1)), replace=False)
            size = rng.uniform(EVENT_SIGMAS_MIN, EVENT_SIGMAS_MAX, len(hit)) * rng.choice([-1, 1], len(hit))
            alike[hit] += size[:, None] * np.clip((seconds - moment) / takes, 0, 1)
    total = np.cumsum(alike, axis=1)
    total[:, FINE:] -= total[:, :-FINE].copy()
    return (total / FINE).astype(np.float32)


def _moments(rng: np.random.Generator, length: float) -> Array:
    return rng.uniform(0, length, int(rng.poisson(EVENTS_PER_SECOND * length)))


def _steps(rng: np.random.Generator, seconds: Array, changes: Array) -> Array:
    """-1..1: positive while computing; the mean over a step is 0."""

    def pace() -> tuple[float, float]:
        ratio = STEP_SECONDS_MAX / STEP_SECONDS_MIN
        return STEP_SECONDS_MIN * ratio ** rng.random(), rng.uniform(COMPUTE_SHARE_MIN, COMPUTE_SHARE_MAX)

    wave, at, left = np.empty_like(seconds), 0.0, list(changes)
    usual, share = pace()
    while at <= seconds[-1]:
        if left and at >= left[0]:
            usual, share = pace()
            left.pop(0)
        lasts = usual * (1 + STEP_JITTER * max(-3.0, min(3.0, rng.standard_normal())))
        start, middle, end = (round(t * FINE) for t in (at, at + share * lasts, at + lasts))
        wave[start:middle], wave[middle:end] = 1 - share, -share
        at += lasts
    return wave


def _checkpoints(rng: np.random.Generator, seconds: Array) -> Array:
    """1 during a checkpoint, else 0."""
    saving = np.zeros_like(seconds)
    every = rng.uniform(CHECKPOINT_EVERY_SECONDS_MIN, CHECKPOINT_EVERY_SECONDS_MAX)
    lasts = rng.uniform(CHECKPOINT_SECONDS_MIN, CHECKPOINT_SECONDS_MAX)
    for start in np.arange(every * rng.random(), seconds[-1], every):
        saving[(seconds >= start) & (seconds < start + lasts)] = 1.0
    return saving


EPOCH_SECONDS = 1_700_000_000.0
"""Wall time of a task's first tick."""
INTERVAL_SECONDS = 1.0  # [issue]; [Minder] also reads counters every second
NUM_MACHINES_MIN, NUM_MACHINES_MAX = 4, 1500  # [Minder]: 4 to more than 1,500 machines
EFFECT_SIGMAS_MIN, EFFECT_SIGMAS_MAX = 1.0, 20.0  # [issue]
NUM_METRICS_HIT_MAX = 3  # [issue]: 1 to 3

LEAD_IN_SECONDS = 900
"""Minimum healthy time before a fault: [Minder]'s window of 15 minutes. Up to LEAD_IN_SPREAD_SECONDS more."""
LEAD_IN_SPREAD_SECONDS = 300
FAULT_SECONDS_MEDIAN, FAULT_SECONDS_SPREAD = 600.0, 0.54
"""Log-normal: nine in ten last longer than 5 minutes ([Minder]: mostly more than 5 minutes; the spread is
[assumed])."""
FAULT_SECONDS_MIN, FAULT_SECONDS_MAX = 120.0, 1800.0
AFTERMATH_SECONDS = 120
"""A task continues this long after its fault's end, to count late detections as false alarms."""
HEALTHY_SECONDS = 3600
"""Length of a task without a fault."""

RAMP_SECONDS = 60.0  # [issue]
INTERMITTENT_SECONDS, INTERMITTENT_DUTY = 30.0, 0.5
"""[assumed] An intermittent fault is active for the first 15 of every 30 seconds, beginning at its onset."""

GAIN_SPREAD = 0.02
"""[assumed] Gains of machines on the shared signal differ by 2 % (one standard deviation)."""

GROUP_SIZE = 8  # [assumed] neighbors of a fault: machines of its block of 8, as in one pipeline
VICTIM_SHARE = 1 / 3
"""Maximum share of machines hit by propagation: beyond it, peer comparison is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMetric:
    """`wave`, `checkpoint`: effect of computing and of a checkpoint, peer standard deviations; `sign`: direction of a
    fault's effect.

    A peer standard deviation is 2 % of the level, so that an effect of 20 keeps every value positive.
    """

    name: str
    group: str
    level: float
    wave: float
    checkpoint: float
    sign: int


SIGMA_OF_LEVEL = 0.02

# 21 as in [Minder], including its seven most informative ones; the rest are of the kinds that it names. Levels, waves
# (at most 4 sigma) and signs are [assumed]: computing raises GPU activity, communication raises network activity, a
# fault lowers the work done and raises pause and congestion packets.
METRICS = tuple(
    SimulatedMetric(name=name, group=group, level=level, wave=wave, checkpoint=checkpoint, sign=sign)
    for name, group, level, wave, checkpoint, sign in (
        ("cpu_usage_ratio", "cpu", 0.4, 1.0, 5.0, -1),
        ("host_memory_used_bytes", "memory", 8e11, 0.0, 2.0, 1),
        ("disk_used_bytes", "disk", 2e12, 0.0, 3.0, 1),
        ("pfc_tx_packets_per_second", "network", 5e3, -3.0, 0.0, 1),
        ("ecn_packets_per_second", "network", 2e3, -2.0, 0.0, 1),
        ("cnp_packets_per_second", "network", 1e3, -2.0, 0.0, 1),
        ("tcp_bytes_per_second", "network", 2e8, -1.0, 6.0, -1),
        ("rdma_bytes_per_second", "network", 2e10, -4.0, -4.0, -1),
        ("pcie_bytes_per_second", "pcie", 1e10, -3.0, 2.0, -1),
        ("pcie_usage_ratio", "pcie", 0.4, -3.0, 2.0, -1),
        ("nvlink_bytes_per_second", "nvlink", 1e11, 3.0, -4.0, -1),
        ("gpu_duty_cycle_ratio", "gpu", 0.6, 3.0, -6.0, -1),
        ("gpu_power_watts", "gpu", 400.0, 3.0, -6.0, -1),
        ("gpu_temperature_celsius", "gpu", 60.0, 0.0, -1.0, 1),
        ("gpu_clock_hertz", "gpu", 1.4e9, -1.0, 1.0, -1),
        ("gpu_sm_activity_ratio", "gpu", 0.5, 4.0, -6.0, -1),
        ("gpu_tensor_activity_ratio", "gpu", 0.4, 4.0, -6.0, -1),
        ("gpu_graphics_engine_activity_ratio", "gpu", 0.6, 4.0, -6.0, -1),
        ("gpu_fp_activity_ratio", "gpu", 0.2, 3.0, -4.0, -1),
        ("gpu_memory_used_bytes", "gpu_memory", 6e10, 0.0, 0.0, 1),
        ("gpu_memory_bandwidth_ratio", "gpu_memory", 0.5, 2.0, -4.0, -1),
    )
)
ROLE = "trainer"


class Onset(StrEnum):
    STEP = "step"
    RAMP = "ramp"
    INTERMITTENT = "intermittent"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """`production_share`, `evaluation_share`: fractions in [Minder]'s seven months of production and 150 evaluation
    faults.

    `groups`: affected metrics. [Minder] states that no metric shows every fault, that CPU and GPU show most, and that a
    PCIe downgrade shows in PFC; the groups of each kind are [assumed] from that. `spreads_fast`: [Minder] lists GPU
    execution errors and PCIe downgrades as spreading fast through the parallel group.
    """

    name: str
    production_share: float
    evaluation_share: float
    groups: tuple[str, ...]
    spreads_fast: bool = False


# For the evaluation set, only the first four kinds with a share > 8 % are published; the remaining 40.7 % are split as
# in production ([assumed]). "other" is the remainder of the published production shares.
_PRODUCTION = (
    ("ecc_error", 0.389, 0.257, ("cpu", "gpu", "memory", "gpu_memory"), False),
    ("cuda_execution_error", 0.146, 0.15, ("cpu", "gpu", "nvlink"), False),
    ("gpu_execution_error", 0.077, 0.10, ("gpu", "cpu"), True),
    ("pcie_downgrade", 0.066, 0.086, ("pcie", "network"), True),
    ("machine_unreachable", 0.060, 0.0, ("cpu", "gpu", "network"), False),
    ("nic_dropout", 0.057, 0.0, ("network", "gpu", "cpu"), False),
    ("hdfs_error", 0.057, 0.0, ("disk", "cpu", "network"), False),
    ("gpu_card_drop", 0.020, 0.0, ("gpu", "gpu_memory", "cpu"), False),
    ("nvlink_error", 0.017, 0.0, ("nvlink", "gpu"), False),
    ("optical_cable_error", 0.009, 0.0, ("network",), False),
    ("other", 0.102, 0.0, tuple(sorted({m.group for m in METRICS})), False),
)
_NAMED = sum(row[2] for row in _PRODUCTION)
_UNNAMED = sum(row[1] for row in _PRODUCTION if not row[2])
FAULT_KINDS = tuple(
    FaultKind(
        name=name,
        production_share=production,
        evaluation_share=evaluation or (1 - _NAMED) * production / _UNNAMED,
        groups=groups,
        spreads_fast=fast,
    )
    for name, production, evaluation, groups, fast in _PRODUCTION
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryFault:
    """Effect of a fault on a neighbor: weaker (`share` of the effect) and later."""

    machine: int
    share: float
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """`onset`, `end`: wall seconds; `effect_sigmas`: peer standard deviations on each of `metrics` (indices)."""

    kind: str
    machine: int
    onset: float
    end: float
    effect_sigmas: float
    metrics: tuple[int, ...]
    how: Onset
    victims: tuple[SecondaryFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTask:
    """One training task of `num_ticks` seconds. `mix`: the fault distribution that it was drawn from."""

    seed: int
    index: int
    mix: str
    num_machines: int
    num_ticks: int
    fault: SimulatedFault | None

    @property
    def shape(self) -> PanelShape:
        machines = tuple(Machine(node=f"m{n:04d}", replica=f"{ROLE}/{n}") for n in range(self.num_machines))
        return PanelShape(
            job=f"task-{self.index:03d}",
            role=ROLE,
            metrics=tuple(m.name for m in METRICS),
            machines=machines,
            interval_seconds=INTERVAL_SECONDS,
        )


def fleet(
    *, seed: int, num_tasks: int = 300, num_healthy: int = 60, num_machines_max: int = NUM_MACHINES_MAX
) -> tuple[SimulatedTask, ...]:
    """`num_tasks` tasks with one fault each, alternating between the production and the evaluation mix; then healthy
    ones.

    Sizes and effects are log-uniform (sizes from 4 to `num_machines_max`), onset types in equal shares, fault kinds in
    the published shares. All are stratified, so that a small fleet covers the distributions, too.

    Raises ValueError: `num_machines_max` is not between 4 and 1500.
    """
    if not NUM_MACHINES_MIN <= num_machines_max <= NUM_MACHINES_MAX:
        raise ValueError(f"tasks have {NUM_MACHINES_MIN} to {NUM_MACHINES_MAX} machines, not {num_machines_max}")
    rng = np.random.default_rng(seed)
    size_ratio = num_machines_max / NUM_MACHINES_MIN
    sizes = [round(NUM_MACHINES_MIN * size_ratio**u) for u in (*_spread(rng, num_tasks), *_spread(rng, num_healthy))]
    effects = EFFECT_SIGMAS_MIN * (EFFECT_SIGMAS_MAX / EFFECT_SIGMAS_MIN) ** _spread(rng, num_tasks)
    onsets = rng.permutation(num_tasks) % len(Onset)
    kinds = np.empty(num_tasks, dtype=np.int64)
    shares = [[k.production_share for k in FAULT_KINDS], [k.evaluation_share for k in FAULT_KINDS]]
    for start, of_mix in enumerate(shares):
        mine = kinds[start::2]
        mine[:] = np.searchsorted(np.cumsum(of_mix) / np.sum(of_mix), _spread(rng, len(mine)))
    tasks = []
    for index, size in enumerate(sizes):
        faulty = index < num_tasks
        fault = None
        if faulty:
            kind, how = FAULT_KINDS[kinds[index]], list(Onset)[onsets[index]]
            fault = _fault(np.random.default_rng([seed, index]), size, kind, float(effects[index]), how)
        seconds = fault.end - EPOCH_SECONDS + AFTERMATH_SECONDS if fault else HEALTHY_SECONDS
        mix = ("production", "evaluation")[index % 2] if faulty else "healthy"
        tasks.append(
            SimulatedTask(seed=seed, index=index, mix=mix, num_machines=size, num_ticks=int(seconds), fault=fault)
        )
    return tuple(tasks)


def _spread(rng: np.random.Generator, size: int) -> Array:
    """(size,) uniform in [0, 1), one in each of `size` equal intervals, in random order."""
    return (rng.permutation(size) + rng.random(size)) / max(size, 1)


def _fault(rng: np.random.Generator, num_machines: int, kind: FaultKind, effect: float, how: Onset) -> SimulatedFault:
    lead_in = LEAD_IN_SECONDS + int(rng.integers(LEAD_IN_SPREAD_SECONDS + 1))
    lasts = FAULT_SECONDS_MEDIAN * np.exp(FAULT_SECONDS_SPREAD * rng.standard_normal())
    lasts = round(min(max(lasts, FAULT_SECONDS_MIN), FAULT_SECONDS_MAX))
    shows = [m for m, metric in enumerate(METRICS) if metric.group in kind.groups]
    num_hit = min(int(rng.integers(1, NUM_METRICS_HIT_MAX + 1)), len(shows))
    machine = int(rng.integers(num_machines))
    return SimulatedFault(
        kind=kind.name,
        machine=machine,
        onset=EPOCH_SECONDS + lead_in,
        end=EPOCH_SECONDS + lead_in + lasts,
        effect_sigmas=effect,
        metrics=tuple(sorted(int(m) for m in rng.choice(shows, num_hit, replace=False))),
        how=how,
        victims=_victims(rng, num_machines, machine, kind.spreads_fast),
    )


def _victims(rng: np.random.Generator, num_machines: int, machine: int, fast: bool) -> tuple[SecondaryFault, ...]:
    """[assumed] Fast kinds: up to the whole group within 10 s, at 0.3 to 0.6 of the effect; others: in every second
    case one or two machines within a minute, at 0.1 to 0.3."""
    block = machine // GROUP_SIZE * GROUP_SIZE
    group = [n for n in range(block, min(block + GROUP_SIZE, num_machines)) if n != machine]
    wanted = int(rng.integers(1, GROUP_SIZE)) if fast else int(rng.integers(1, 3)) * int(rng.random() < 0.5)
    wanted = max(0, min(wanted, len(group), int(num_machines * VICTIM_SHARE) - 1))
    share, delay = ((0.3, 0.6), (1, 10)) if fast else ((0.1, 0.3), (10, 60))
    chosen: list[int] = rng.choice(group, wanted, replace=False).tolist() if wanted else []
    return tuple(
        SecondaryFault(
            machine=int(n), share=float(rng.uniform(*share)), delay_seconds=float(rng.integers(delay[0], delay[1] + 1))
        )
        for n in chosen
    )


def envelope(how: Onset, since: Array, lasts: float) -> Array:
    """Active share of the effect, 0..1, `since` seconds after the onset of a fault of `lasts` seconds."""
    there = (since >= 0) & (since < lasts)
    if how is Onset.RAMP:
        return np.where(there, np.minimum(since / RAMP_SECONDS, 1.0), 0.0)
    if how is Onset.INTERMITTENT:
        there &= np.mod(since, INTERMITTENT_SECONDS) < INTERMITTENT_SECONDS * INTERMITTENT_DUTY
    return there.astype(np.float64)


def panel(task: SimulatedTask) -> Panel:
    """The whole task at once: 84 bytes per machine and second."""
    parts = list(chunks(task))
    at = np.concatenate([p.at for p in parts])
    return Panel(shape=parts[0].shape, at=at, values=np.concatenate([p.values for p in parts], axis=1))


def chunks(task: SimulatedTask) -> Iterator[Panel]:
    """The task in order, CHUNK_TICKS at a time (fewer at the end); values do not depend on the reader."""
    rng = np.random.default_rng([task.seed, task.index, 1])
    shape, size = task.shape, (len(METRICS), task.num_machines)
    noise = Noise(rng, size)
    sigma = np.array([SIGMA_OF_LEVEL * m.level for m in METRICS], dtype=np.float32)[:, None]
    base = np.array([m.level for m in METRICS], dtype=np.float32)[:, None] + sigma * noise.offset
    gain = sigma * (1 + GAIN_SPREAD * rng.standard_normal(size, dtype=np.float32))
    skew = skews(rng, task.num_machines)
    waves, checkpoints = np.array([m.wave for m in METRICS]), np.array([m.checkpoint for m in METRICS])
    alike = common(rng, task.num_ticks, waves, checkpoints)
    runs = gone(rng, task.num_ticks, task.num_machines)
    for start in range(0, task.num_ticks, CHUNK_TICKS):
        ticks = np.arange(start, min(start + CHUNK_TICKS, task.num_ticks))
        values = noise.ahead(rng)
        missing = rng.random(values.shape, dtype=np.float32) < MISSING_RATIO_SINGLE
        values *= sigma
        values += base
        fine = (np.arange(start, start + CHUNK_TICKS)[:, None] + MARGIN_SECONDS) * FINE + skew
        for m in range(size[0]):
            values[:, m] += gain[m] * alike[m][fine]
        values, missing = values[: len(ticks)], missing[: len(ticks)]
        at = (EPOCH_SECONDS + ticks * INTERVAL_SECONDS).astype(np.float64)
        if task.fault:
            _hit(values, task.fault, at, sigma[:, 0])
        values[missing | runs[ticks][:, None, :]] = np.nan
        yield Panel(shape=shape, at=at, values=values.transpose(1, 0, 2))


def _hit(values: Floats, fault: SimulatedFault, at: Array, sigma: Floats) -> None:
    """Adds the effect of a fault to `values` (T, M, N)."""
    lasts = fault.end - fault.onset
    culprit = SecondaryFault(machine=fault.machine, share=1.0, delay_seconds=0.0)
    for v in (culprit, *fault.victims):
        there = envelope(fault.how, at - fault.onset - v.delay_seconds, lasts - v.delay_seconds)
        for m in fault.metrics:
            size = METRICS[m].sign * v.share * fault.effect_sigmas * float(sigma[m])
            values[:, m, v.machine] += (size * there).astype(np.float32)
