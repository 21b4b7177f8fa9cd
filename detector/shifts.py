"""Channel `shift`: a machine that differs from its peers more than it used to, for long enough, in any metric.

Residual r = value - median over machines; d = r - the machine's own habitual residual; z = d in units of its robust
scale, limited to +-`Z_MAX`. Averages of z over several lengths (exponential, `LENGTHS` ticks) are each divided by their
healthy standard deviation: that of an AR(1) process with the metric's measured lag-1 autocorrelation phi,

    var E = a / (2 - a) * (1 + phi (1 - a)) / (1 - phi (1 - a)),   a = 1 - exp(-1 / length),

or the one measured where that is larger (slow wander). Of each metric and length the healthy block maxima B of all
machines are kept, and their tail is taken as Weibull's,

    -log P(B > u) = (u / scale)^shape,   shape from two of their quantiles,

2 and more for what averages to a Gaussian, less for metrics with heavy tails. A metric's score is the largest
(|E| / scale)^shape over lengths, so that noisy metrics do not set the threshold for quiet ones; a machine's is the sum of
its `NUM_METRICS_ADDED` largest. Fleet-wide changes move the median; unequal machines move the
habit, which is learned slowly and not while a machine is suspected.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panel import Floats

LENGTHS = (4, 16, 64, 256)
"""Ticks: the shortest still averages two or three samples, the longest is as long as faults last."""
CALM_LENGTHS = LENGTHS[:2]
"""A machine whose short averages are as usual is well again, whatever the long ones remember."""
CALM_SCORE = 5.3
"""Of one metric and length: exceeded in one of 200 healthy blocks."""
Z_MAX = 8.0
"""What a single sample may count, robust standard deviations: outliers of heavy-tailed metrics are no faults."""
HABIT_TICKS = 1000.0
"""Memory of a machine's habitual residual and scale."""
POOLED_TICKS = 100.0
"""A machine's own scale counts as much as that of its peers after so many ticks."""
SCALE_SHARE_MIN = 0.5
"""No machine's scale is taken below this share of its peers': a metric that stood still is not infinitely precise."""
VALUE_SHARE_MIN = 1e-4
"""... nor below this share of the metric's level: the resolution of float32 and of many counters."""
MAD_TO_SIGMA = 1.2533
"""Standard deviation of a Gaussian over its mean absolute deviation."""
SQUARE_MEDIAN = 0.4549
"""Median of the square of a standard Gaussian."""

QUANTILES = (0.75, 0.97)
"""Of the block maxima: the shape follows from their ratio. Higher ones may be faults."""
SHAPE_MIN, SHAPE_MAX = 0.7, 3.0
SHAPE_PRIOR, SHAPE_WEIGHT = 2.0, 64.0
"""Counts as so many block maxima: the ratio of two quantiles of a short history says little."""
_SHAPE_FACTOR = math.log(math.log(1 / (1 - QUANTILES[1])) / math.log(1 / (1 - QUANTILES[0])))
NUM_METRICS_ADDED = 3
BLOCKS_KEPT = 64
MACHINES_KEPT = 256
"""Of large fleets so many machines, evenly spread, stand for all: quantiles need no more."""


@dataclass(slots=True)
class Shifts:
    """State for M metrics and N machines."""

    num_metrics: int
    num_machines: int
    habit: Floats = field(init=False)  # (M, N), as the next three
    size: Floats = field(init=False)  # mean |d|
    count: Floats = field(init=False)  # ticks learned from
    z_before: Floats = field(init=False)
    phi_top: Floats = field(init=False)  # (M,): mean of z z_before, and of z^2
    phi_bottom: Floats = field(init=False)
    means: Floats = field(init=False)  # (K, M, N): E
    squares: Floats = field(init=False)  # (K, M): mean over ticks of the median over machines of E^2
    block_max: Floats = field(init=False)  # (K, M, N)
    scale: Floats = field(init=False)  # (K, M)
    shape: Floats = field(init=False)  # (K, M)
    blocks: deque[Floats] = field(default_factory=lambda: deque(maxlen=BLOCKS_KEPT))  # each (K, M, machines)
    calm: NDArray[np.bool_] = field(init=False)  # (N,)
    ticks: int = 0

    def __post_init__(self) -> None:
        m, n, k = self.num_metrics, self.num_machines, len(LENGTHS)
        zeros = np.zeros((m, n), dtype=np.float32)
        self.habit, self.size, self.count, self.z_before = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        self.phi_top, self.phi_bottom = np.zeros(m, dtype=np.float32), np.full(m, 1e-3, dtype=np.float32)
        self.means = np.zeros((k, m, n), dtype=np.float32)
        self.block_max = np.zeros((k, m, n), dtype=np.float32)
        self.squares = np.zeros((k, m), dtype=np.float32)
        self.calm = np.ones(n, dtype=np.bool_)
        self.scale = np.full((k, m), 2.0, dtype=np.float32)
        self.shape = np.full((k, m), SHAPE_PRIOR, dtype=np.float32)

    def tick(self, residual: Floats, known: NDArray[np.bool_], level: Floats, learning: NDArray[np.bool_]) -> Floats:
        """Scores (N,). `residual` (M, N), 0 where not `known` (M, N); `level` (M,): the medians; `learning` (N,)."""
        self.ticks += 1
        learned = known & learning
        first = learned & (self.count == 0)
        np.copyto(self.habit, residual, where=first)
        d = residual - self.habit
        scale = self._scale(level)
        z = np.clip(d / scale, -Z_MAX, Z_MAX)
        z[~known] = 0.0
        self.count += learned
        gain = np.maximum(1 / np.maximum(self.count, 1), 1 / HABIT_TICKS).astype(np.float32) * learned
        # The habit moves by limited steps: one wild sample, or the onset of a fault, hardly moves it.
        self.habit += gain * np.clip(d, -3 * scale, 3 * scale)
        self.size += gain * (np.abs(d) - self.size)
        self._autocorrelation(z, learned)
        self._average(z)
        return self._scores()

    def _scale(self, level: Floats) -> Floats:
        own = self.size * np.float32(MAD_TO_SIGMA)
        pooled = np.median(own, axis=1, keepdims=True)
        weight = self.count / (self.count + np.float32(POOLED_TICKS))
        mixed = weight * own + (1 - weight) * pooled
        floor = np.maximum(SCALE_SHARE_MIN * pooled, VALUE_SHARE_MIN * np.abs(level)[:, None])
        return np.asarray(np.maximum(mixed, np.maximum(floor, 1e-30)), dtype=np.float32)

    def _autocorrelation(self, z: Floats, learned: NDArray[np.bool_]) -> None:
        gain = max(1 / self.ticks, 1 / HABIT_TICKS)
        num = np.maximum(1, learned.sum(axis=1))
        both = (z * self.z_before * learned).sum(axis=1) / num
        square = (z * z * learned).sum(axis=1) / num
        self.phi_top += gain * (both - self.phi_top)
        self.phi_bottom += gain * (square - self.phi_bottom)
        self.z_before = z

    def _average(self, z: Floats) -> None:
        for k, length in enumerate(LENGTHS):
            self.means[k] += np.float32(1 - np.exp(-1 / length)) * (z - self.means[k])

    def deviation(self) -> Floats:
        """Healthy standard deviation of the averages, (K, M)."""
        phi = np.clip(self.phi_top / np.maximum(self.phi_bottom, 1e-3), 0.0, 0.99)
        a = 1 - np.exp(-1 / np.array(LENGTHS))[:, None]
        square = np.maximum(self.phi_bottom, 1e-3)
        ar = a / (2 - a) * (1 + phi * (1 - a)) / (1 - phi * (1 - a)) * square
        # A young habit is itself uncertain: the variance of a mean of so many ticks.
        ar += (1 + phi) / (1 - phi) / max(1.0, min(self.ticks, HABIT_TICKS)) * square
        return np.asarray(np.sqrt(np.maximum(ar, self.squares / SQUARE_MEDIAN)), dtype=np.float32)

    def _scores(self) -> Floats:
        gain = 0.0
        size = np.abs(self.means)
        # The median over machines is taken seldom: it costs more than all averages together, and moves slowly.
        if self.ticks % 8 == 0:
            gain = max(8 / self.ticks, 8 / HABIT_TICKS)
            middle = np.median(size, axis=2) ** 2
            self.squares += np.float32(gain) * (middle - self.squares)
        size /= self.deviation()[:, :, None]
        np.maximum(self.block_max, size, out=self.block_max)
        size /= self.scale[:, :, None]
        usual = CALM_SCORE ** (1 / self.shape[: len(CALM_LENGTHS), :, None])
        self.calm = np.asarray((size[: len(CALM_LENGTHS)] < usual).all(axis=(0, 1)), dtype=np.bool_)
        # Faults show in few metrics, and often in more than one: the surprises of the first three are added.
        of_metric = (size ** self.shape[:, :, None]).max(axis=0)
        rank = min(NUM_METRICS_ADDED, self.num_metrics)
        top = np.partition(of_metric, self.num_metrics - rank, axis=0)[self.num_metrics - rank :]
        scores: Floats = top.sum(axis=0)
        return scores

    def end_block(self, counted: NDArray[np.bool_]) -> None:
        """Every `BLOCK_TICKS`: learns the tails from the machines that count, (N,)."""
        who = np.flatnonzero(counted)
        if len(who):
            who = who[:: -(-len(who) // MACHINES_KEPT)]
            self.blocks.append(self.block_max[:, :, who])
            sample = np.concatenate(self.blocks, axis=2)
            middle, high = np.maximum(np.quantile(sample, QUANTILES, axis=2), 1e-3)
            shape = _SHAPE_FACTOR / np.log(np.maximum(high / middle, 1.01))
            own = sample.shape[2] / (sample.shape[2] + SHAPE_WEIGHT)
            shape = np.clip(own * shape + (1 - own) * SHAPE_PRIOR, SHAPE_MIN, SHAPE_MAX)
            self.shape = shape.astype(np.float32)
            self.scale = (high / math.log(1 / (1 - QUANTILES[1])) ** (1 / shape)).astype(np.float32)
        self.block_max[:] = 0.0

    def forget(self, machines: NDArray[np.bool_]) -> None:
        """Averages of these begin anew, (N,): what they remember is over and told."""
        self.means[:, :, machines] = 0.0

    def strongest(self, machine: int) -> list[tuple[int, int, float, float]]:
        """Of one machine: (metric, length in ticks, average z with its sign, score), strongest metric first."""
        size = np.abs(self.means[:, :, machine]) / self.deviation()
        scores = (size / self.scale) ** self.shape
        best = scores.argmax(axis=0)
        order = np.argsort(-scores.max(axis=0), kind="stable")
        return [
            (int(m), LENGTHS[best[m]], float(self.means[best[m], m, machine]), float(scores[best[m], m])) for m in order
        ]
