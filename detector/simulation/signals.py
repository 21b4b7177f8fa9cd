"""Components of a simulated fleet's metrics: the shared signal, noise of each machine, and missing samples.

`fleet` combines them and explains the sources [Minder], [issue], [fit] and [assumed]. The unit is the peer standard
deviation.
"""

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats

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
        self.slow /= np.sqrt((2 + self.rho) / 3).astype(
            np.float32
        )  # linear interpolation between knots reduces the variance
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
