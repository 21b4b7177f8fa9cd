"""Channel `shift`: a machine that differs from its peers more than it used to, for long enough, in any metric.

Residual r = value - median over machines; d = r - the machine's own habitual residual; z = d in units of its robust
scale. What of z its past does not foretell becomes a normal score (`whitening`), and averages of the scores over several
lengths (exponential, `LENGTHS` ticks) are each divided by their healthy standard deviation, that of white noise

    var E = a / (2 - a) * mean square of the scores,   a = 1 - exp(-1 / length),

or the one measured where that is larger (slow wander). Of each metric and length the healthy block maxima B of all
machines are kept, and their tail is taken as Weibull's,

    -log P(B > u) = (u / scale)^shape,   shape from two of their quantiles,

but where that shape is more than 2, as the maximum of many Gaussian values has it near its middle and not far out,

    -log P(B > u) = (u / scale)^2 - offset.

A metric's score is the largest such -log P of |E| over lengths, so that noisy metrics do not set the threshold for quiet
ones. Of a machine two scores are told: that of its strongest metric, and the sum of its `NUM_METRICS_ADDED` strongest,
for faults show in few metrics, and often in more than one. Fleet-wide changes move the median; unequal machines move the
habit, which is learned slowly and not while a machine is suspected.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panel import Floats
from rolecall.detector.whitening import Whitening

LENGTHS = (4, 16, 64, 256)
"""Ticks: the shortest still averages two or three samples, the longest is as long as faults last."""
CALM_LENGTHS = LENGTHS[:2]
"""A machine whose short averages are as usual is well again, whatever the long ones remember."""
CALM_SCORE = 5.3
"""Of one metric and length: exceeded in one of 200 healthy blocks."""
HABIT_TICKS = 1000.0
"""Memory of a machine's habitual residual and scale."""
STEP_LIMIT = 3.0
"""Scales: what a single sample may count in the habit ..."""
SIZE_LIMIT = 8.0
"""Scales: ... and in the scale: less would make it blind to how wild a metric is, more would let faults hide in it."""
POOLED_TICKS = 100.0
"""A machine's own scale counts as much as that of its peers after so many ticks."""
SCALE_SHARE_MIN = 0.5
"""No machine's scale is taken below this share of its peers': a metric that stood still is not infinitely precise."""
VALUE_SHARE_MIN = 1e-4
"""... nor below this share of the metric's level: the resolution of float32 and of many counters."""
MEAN_TO_SIGMA = 1.2533
"""Standard deviation of a Gaussian over its mean absolute deviation."""
MOVED_SHARE = 0.05
"""By so much of what the median has moved machines may differ in how they follow it."""
TOLD_TICKS = 8.0
"""Over so many ticks a deviation is averaged before it is told."""
SQUARE_MIN = 0.1
"""Mean square of normal scores is near 1; less is a metric that seldom moves."""
SQUARE_MEDIAN = 0.4549
"""Median of the square of a standard Gaussian."""

QUANTILES = (0.75, 0.97)
"""Of the block maxima: the shape follows from their ratio. Higher ones may be faults."""
SHAPE_MIN, SHAPE_GAUSS, SHAPE_MAX = 0.7, 2.0, 4.0
SHAPE_PRIOR, SHAPE_WEIGHT = 2.0, 64.0
"""Counts as so many block maxima: the ratio of two quantiles of a short history says little."""
_MIDDLE, _HIGH = (math.log(1 / (1 - q)) for q in QUANTILES)
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
    level: Floats = field(init=False)  # (M,): mean over time of the medians
    told: Floats = field(init=False)  # mean z of the last `TOLD_TICKS`
    whitening: Whitening = field(init=False)
    means: Floats = field(init=False)  # (K, M, N): E
    squares: Floats = field(init=False)  # (K, M): mean over ticks of the median over machines of E^2
    block_max: Floats = field(init=False)  # (K, M, N)
    scale: Floats = field(init=False)  # (K, M)
    shape: Floats = field(init=False)  # (K, M)
    offset: Floats = field(init=False)  # (K, M)
    blocks: deque[Floats] = field(default_factory=lambda: deque(maxlen=BLOCKS_KEPT))  # each (K, M, machines)
    calm: NDArray[np.bool_] = field(init=False)  # (N,)
    ticks: int = 0

    def __post_init__(self) -> None:
        m, n, k = self.num_metrics, self.num_machines, len(LENGTHS)
        zeros = np.zeros((m, n), dtype=np.float32)
        self.habit, self.size, self.count, self.told = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        self.level = np.zeros(m, dtype=np.float32)
        self.whitening = Whitening(m, n)
        self.means = np.zeros((k, m, n), dtype=np.float32)
        self.block_max = np.zeros((k, m, n), dtype=np.float32)
        self.squares = np.zeros((k, m), dtype=np.float32)
        self.calm = np.ones(n, dtype=np.bool_)
        self.scale = np.full((k, m), 2.0, dtype=np.float32)
        self.shape = np.full((k, m), SHAPE_PRIOR, dtype=np.float32)
        self.offset = np.zeros((k, m), dtype=np.float32)

    def tick(
        self,
        residual: Floats,
        known: NDArray[np.bool_],
        level: Floats,
        learning: NDArray[np.bool_],
        counted: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Scores of the strongest metric and of the strongest few together, (N,) each.

        `residual` (M, N), 0 where not `known` (M, N); `level` (M,): the medians; `learning` (N,): whose habit is learned;
        `counted` (N,): of whose noise is learned. The latter are more: what looks suspicious for a moment is noise, too.
        """
        self.ticks += 1
        learned = known & learning
        first = learned & (self.count == 0)
        np.copyto(self.habit, residual, where=first)
        # What all do alike each does a little differently: a machine that follows 10 units by 9.6 has not left its peers.
        moved = np.float32(MOVED_SHARE) * np.abs(level - self.level)[:, None]
        d = residual - self.habit
        d -= np.clip(d, -moved, moved)
        scale = self._scale(level)
        z = d / scale
        scores = self.whitening.tick(z, known, counted)
        self.told += np.float32(1 - np.exp(-1 / TOLD_TICKS)) * (z - self.told) * known
        self.level += np.float32(max(1 / self.ticks, 1 / HABIT_TICKS)) * (level - self.level)
        self.count += learned
        gain = np.maximum(1 / np.maximum(self.count, 1), 1 / HABIT_TICKS).astype(np.float32) * learned
        # By limited steps: one wild sample, or the onset of a fault, hardly moves the habit.
        limited = np.clip(d, -np.float32(STEP_LIMIT) * scale, np.float32(STEP_LIMIT) * scale)
        self.habit += gain * limited
        self.size += gain * (np.minimum(np.abs(d), np.float32(SIZE_LIMIT) * scale) - self.size)
        for k, length in enumerate(LENGTHS):
            self.means[k] += np.float32(1 - np.exp(-1 / length)) * (scores - self.means[k])
        return self._scores()

    def _scale(self, level: Floats) -> Floats:
        own = self.size * np.float32(MEAN_TO_SIGMA)
        pooled = np.median(own, axis=1, keepdims=True)
        weight = self.count / (self.count + np.float32(POOLED_TICKS))
        mixed = weight * own + (1 - weight) * pooled
        floor = np.maximum(SCALE_SHARE_MIN * pooled, VALUE_SHARE_MIN * np.abs(level)[:, None])
        return np.asarray(np.maximum(mixed, np.maximum(floor, 1e-30)), dtype=np.float32)

    def deviation(self) -> Floats:
        """Healthy standard deviation of the averages, (K, M)."""
        a = 1 - np.exp(-1 / np.array(LENGTHS))[:, None]
        white = a / (2 - a) * np.maximum(self.whitening.square, SQUARE_MIN)
        return np.asarray(np.sqrt(np.maximum(white, self.squares / SQUARE_MEDIAN)), dtype=np.float32)

    def _scores(self) -> tuple[Floats, Floats]:
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
        short = len(CALM_LENGTHS)
        usual = ((CALM_SCORE + self.offset[:short]) ** (1 / self.shape[:short]))[:, :, None]
        self.calm = np.asarray((size[:short] < usual).all(axis=(0, 1)), dtype=np.bool_)
        np.power(size, self.shape[:, :, None], out=size)
        size -= self.offset[:, :, None]
        of_metric = np.maximum(size.max(axis=0), 0)
        rank = min(NUM_METRICS_ADDED, self.num_metrics)
        top = np.partition(of_metric, self.num_metrics - rank, axis=0)[self.num_metrics - rank :]
        return top.max(axis=0), top.sum(axis=0)

    def end_block(self, counted: NDArray[np.bool_]) -> None:
        """Every `BLOCK_TICKS`: learns the tails from the machines that count, (N,)."""
        who = np.flatnonzero(counted)
        if len(who):
            who = who[:: -(-len(who) // MACHINES_KEPT)]
            self.blocks.append(self.block_max[:, :, who])
            sample = np.concatenate(self.blocks, axis=2)
            middle, high = np.maximum(np.quantile(sample, QUANTILES, axis=2), 1e-3)
            shape = math.log(_HIGH / _MIDDLE) / np.log(np.maximum(high / middle, 1.01))
            own = sample.shape[2] / (sample.shape[2] + SHAPE_WEIGHT)
            shape = np.clip(own * shape + (1 - own) * SHAPE_PRIOR, SHAPE_MIN, SHAPE_MAX)
            scale = high / _HIGH ** (1 / shape)
            light = shape > SHAPE_GAUSS
            slope = (_HIGH - _MIDDLE) / (high**2 - (scale * _MIDDLE ** (1 / shape)) ** 2)
            self.shape = np.minimum(shape, SHAPE_GAUSS).astype(np.float32)
            self.scale = np.where(light, slope**-0.5, scale).astype(np.float32)
            self.offset = np.where(light, slope * high**2 - _HIGH, 0).astype(np.float32)
        self.block_max[:] = 0.0

    def forget(self, machines: NDArray[np.bool_]) -> None:
        """Averages of these begin anew, (N,): what they remember is over and told."""
        self.means[:, :, machines] = 0.0

    def strongest(self, machine: int) -> list[tuple[int, int, float, float]]:
        """Of one machine: (metric, length in ticks, recent deviation z with its sign, score), strongest metric first."""
        size = np.abs(self.means[:, :, machine]) / self.deviation()
        scores = (size / self.scale) ** self.shape - self.offset
        best = scores.argmax(axis=0)
        order = np.argsort(-scores.max(axis=0), kind="stable")
        return [(int(m), LENGTHS[best[m]], float(self.told[m, machine]), float(scores[best[m], m])) for m in order]
