"""Peer comparison: windows of a panel's last ticks, distances between machines, and deviation from the peers.

A tracker of such scores has a warm-up, in which it learns the threshold that a healthy machine's score stays below.
There are no alarms during the warm-up. A fault present from the first tick is learned as normal, and nothing is learned
later.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Finding
from rolecall.detector.panels.panel import Floats, PanelShape

Scores = NDArray[np.float64]

WINDOW_TICKS = 8
"""As in Minder, for all methods."""
NUM_SAMPLES_MIN = WINDOW_TICKS // 2
"""A machine with fewer samples of a metric in the window is not scored: missing data is neither similar nor
different."""
NUM_MACHINES_MIN = 4
"""With fewer than four machines, an outlier is not identified reliably; Minder's smallest task also has four."""


def peer_median(values: Floats) -> Floats:
    """(M, N) -> (M, 1), missing values left out; NaN where all are missing."""
    ordered = np.sort(values, axis=1)  # NaN last
    num = np.maximum(np.isfinite(values).sum(axis=1), 1)
    low, high = (num - 1) // 2, num // 2
    rows = np.arange(len(values))
    middle: Floats = (ordered[rows, low] / 2 + ordered[rows, high] / 2)[:, None]
    return middle


def nearest_filled(window: Floats) -> Floats:
    """(W, M, N) of tick, metric, machine: a missing value is replaced by the nearest in the window, the earlier of two;
    all are NaN if fewer than `NUM_SAMPLES_MIN` are present. Nothing outside the window is used."""
    missing = np.isnan(window)
    holes = missing.any(axis=0)
    if not holes.any():
        return window
    part, known = window[:, holes], ~missing[:, holes]
    size = len(window)
    ticks = np.arange(size)[:, None]
    earlier = np.maximum.accumulate(np.where(known, ticks, -2 * size), axis=0)
    later = np.minimum.accumulate(np.where(known, ticks, 4 * size)[::-1], axis=0)[::-1]
    nearest = np.clip(np.where(ticks - earlier <= later - ticks, earlier, later), 0, size - 1)
    part = np.take_along_axis(part, nearest, axis=0)
    part[:, known.sum(axis=0) < NUM_SAMPLES_MIN] = np.nan
    filled = window.copy()
    filled[:, holes] = part
    return filled


class Windows:
    """The last `WINDOW_TICKS` ticks of a panel."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self._ring = np.full((WINDOW_TICKS, num_metrics, num_machines), np.nan, dtype=np.float32)
        self.num_ticks = 0

    def push(self, values: Floats) -> None:
        self._ring[:-1] = self._ring[1:]
        self._ring[-1] = values
        self.num_ticks += 1

    def filled(self) -> Floats:
        """(W, M, N), oldest first, missing values filled."""
        return nearest_filled(self._ring)


def distance_sums(points: Floats) -> Scores:
    """(D, N) float32 -> (N,): the sum of each point's Euclidean distances to all others. N^2 work, bounded memory."""
    centred = points - points.mean(axis=1, keepdims=True)  # centering reduces rounding errors of the squares below
    squares, ones = (centred * centred).sum(axis=0)[None], np.ones((1, points.shape[1]), dtype=np.float32)
    left = np.concatenate([-2 * centred, squares, ones]).T.copy()
    right = np.concatenate([centred, ones, squares])
    num = points.shape[1]
    sums = np.zeros(num)
    for a in range(0, num, DISTANCE_ROWS):
        b = min(num, a + DISTANCE_ROWS)
        block = left[a:b] @ right[:, a:]  # squared distances of points a..b to all from a on
        np.maximum(block, 0, out=block)
        np.sqrt(block, out=block)
        sums[a:b] += block.sum(axis=1)
        sums[b:] += block[:, b - a :].sum(axis=0)
    return sums


DISTANCE_ROWS = 64
"""Rows of the distance matrix computed at a time: the block fits into the CPU cache."""


def mean_distances(points: Floats) -> Scores:
    """(D, C, N) -> (C, N): each machine's mean distance to the others, by channel. NaN if a coordinate is missing or
    fewer than `NUM_MACHINES_MIN` machines are present."""
    known: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(points), axis=0)
    num = known.sum(axis=1)
    found = np.full(known.shape, np.nan)
    if known.all() and points.shape[2] <= DISTANCE_ROWS:
        if points.shape[2] >= NUM_MACHINES_MIN:
            apart = points[:, :, :, None] - points[:, :, None, :]
            found = np.sqrt((apart * apart).sum(axis=0)).sum(axis=2, dtype=np.float64) / (points.shape[2] - 1)
        return found
    for c in range(points.shape[1]):
        if num[c] >= NUM_MACHINES_MIN:
            found[c, known[c]] = distance_sums(points[:, c, known[c]]) / (num[c] - 1)
    return found


def against_others(values: Scores, peers: NDArray[np.bool_], spread_min: float) -> Scores:
    """(C, N) -> (C, N): how many standard deviations of the *other* peers a machine's value lies above their mean.

    For a fixed number of machines, this is a monotone function of the z-score over all, z = (v - mean) / sd, so
    decisions are equal; but z cannot exceed sqrt(N - 1) for any fault, so no tail could be fitted to it. A machine that
    is not a peer is compared with the peers. NaN with fewer than `NUM_MACHINES_MIN` peers.
    """
    counted = np.isfinite(values) & peers
    num = counted.sum(axis=1, keepdims=True)
    kept = np.where(counted, values, 0.0)
    mean = kept.sum(axis=1, keepdims=True) / np.maximum(num, 1)
    centred = np.where(counted, values - mean, 0.0)
    squares = (centred * centred).sum(axis=1, keepdims=True)
    own = counted.astype(np.float64)
    rest = np.maximum(num - own, 2)
    mean_of_rest = -centred / rest  # the centred values sum to zero
    squares_of_rest = squares - centred * centred - rest * mean_of_rest * mean_of_rest
    spread = np.sqrt(np.maximum(squares_of_rest, 0) / (rest - 1))
    score = (values - mean - mean_of_rest) / np.maximum(spread, spread_min)
    return np.where(num >= NUM_MACHINES_MIN, score, np.nan)


def surprise(sigmas: Scores, num_peers: int) -> Scores:
    """Log-likelihood ratio of "this one is higher" against "all are equal", for normal values of unknown spread:
    f/2 log(1 + t^2/f), f = peers - 1; negative if it is lower. Its tail is roughly exponential for any number of
    peers."""
    freedom = num_peers - 1
    return np.copysign(freedom / 2 * np.log1p(sigmas**2 / freedom), sigmas)


WARM_UP_SECONDS = 600.0
WARM_UP_TICKS_MIN = 256
"""Ten minutes of one-second samples; at longer intervals, the minimum number of ticks for a threshold."""
SECONDS_PER_DAY = 86_400.0
TAIL_RATIO = 0.1
"""Share of the values that forms the tail."""
NUM_TAIL_MIN = 8
BOUND_SHARE = 0.25
"""Position of the threshold between the largest observed score and the maximum possible score."""


def warm_up_ticks(interval_seconds: float) -> int:
    return max(WARM_UP_TICKS_MIN, math.ceil(WARM_UP_SECONDS / interval_seconds))


def persistence_ticks(seconds: float, interval_seconds: float) -> int:
    """More than `seconds`, and more than one window: a single bad sample is in `WINDOW_TICKS` windows."""
    return max(WINDOW_TICKS, math.floor(seconds / interval_seconds)) + 1


@dataclass(slots=True)
class TailThreshold:
    """The threshold that a machine's score stays above for a block of ticks with the requested probability.

    The data are the smallest scores of successive blocks, by channel and machine. Their upper tail is taken as
    exponential: with the mean excess b of the largest `TAIL_RATIO` of n values above the value u below them,

        threshold = u + b log(tail ratio / probability),

    where b is raised by one standard error, b / sqrt(number in the tail), since too low a threshold costs more than
    too high a one. The threshold is at least the largest observed value, unless there are so many values that some are
    expected to exceed it. The shape of the tail beyond the observed values, and changes after the warm-up, are not
    covered.
    """

    block_ticks: int
    probability: float
    bound: float = math.inf  # maximum score: the threshold is within `BOUND_SHARE` of the way to it
    minima: list[Scores] = field(default_factory=list)
    _lowest: Scores | None = None
    _num_ticks: int = 0

    def add(self, scores: Scores) -> None:
        """(C, N) of channel and machine; NaN if there is no score."""
        self._lowest = scores.copy() if self._lowest is None else np.minimum(self._lowest, scores)
        self._num_ticks += 1
        if self._num_ticks == self.block_ticks:
            self.minima.append(self._lowest)
            self._lowest, self._num_ticks = None, 0

    def thresholds(self) -> Scores:
        """(C,); infinite for a channel with too few values."""
        if not self.minima:
            return np.full(1, np.inf)
        return np.array([self._threshold(c) for c in np.stack(self.minima, axis=1)])

    def _threshold(self, values: Scores) -> float:
        """`values`: (blocks, N) of one channel."""
        ordered = np.sort(values[np.isfinite(values)])
        num_tail = max(NUM_TAIL_MIN, round(TAIL_RATIO * len(ordered)))
        if num_tail >= len(ordered):
            return math.inf
        start = ordered[-num_tail - 1]
        excess = float(np.mean(ordered[-num_tail:] - start)) * (1 + 1 / math.sqrt(num_tail))
        beyond = max(0.0, math.log(num_tail / len(ordered) / self.probability))
        most = float(ordered[-1] + BOUND_SHARE * (self.bound - ordered[-1]))
        threshold = min(float(start + excess * beyond), most)
        return threshold if self.probability * len(ordered) >= 1 else max(threshold, float(ordered[-1]))


def block_length(persistence: int) -> int:
    """The longest block such that each run of `persistence` scores contains a whole block, whatever the alignment:
    there are at most as many alarms as blocks above the threshold."""
    return (persistence + 1) // 2


def block_probability(asked_per_1000_machine_days: float, block_seconds: float, num_channels: int = 1) -> float:
    """Per machine, block and channel, from false alarms per 1,000 machine-days over all channels."""
    return asked_per_1000_machine_days / 1000 * block_seconds / SECONDS_PER_DAY / num_channels


class PeerTracker(ABC):
    """A tracker with a warm-up: windows of its ticks, and thresholds from the scores of the warm-up's second part."""

    machines_min: ClassVar[int] = NUM_MACHINES_MIN

    def __init__(self, shape: PanelShape, num_metrics: int, tail: TailThreshold) -> None:
        self._shape, self._tail = shape, tail
        self._windows = Windows(num_metrics, len(shape.machines))
        self._warm_up = warm_up_ticks(shape.interval_seconds)
        self._thresholds: Scores | None = None
        self._scores_now: Scores | None = None

    @property
    def scores(self) -> Scores:
        """(N,): the maximum over channels, in multiples of the threshold. NaN: unknown."""
        if self._scores_now is None or self._thresholds is None:
            return np.full(len(self._shape.machines), np.nan)
        if len(self._thresholds) == 1:
            return np.asarray(self._scores_now[0])
        with np.errstate(over="ignore", invalid="ignore"):  # a constant channel, or one without a threshold
            relative = self._scores_now / np.maximum(self._thresholds, np.finfo(np.float64).tiny)[:, None]
        # Channels whose metrics no machine has are unknown, and are ignored.
        return np.asarray(np.fmax.reduce(relative))

    @property
    def threshold(self) -> float:
        """Infinite during the warm-up, and if that was too short."""
        if self._thresholds is None or not np.isfinite(self._thresholds).any():
            return math.inf
        return float(self._thresholds[0]) if len(self._thresholds) == 1 else 1.0

    def tick(self, at: float, values: Floats) -> list[Finding]:
        if values.shape[1] < self.machines_min:
            return []
        with np.errstate(over="ignore", invalid="ignore"):  # values near the float32 maximum count as missing
            return self._tick(at, values)

    @abstractmethod
    def _tick(self, at: float, values: Floats) -> list[Finding]: ...

    def _learned(self, scores: Scores) -> Scores:
        """Thresholds (C,), once the warm-up is over; `scores`: (C, N) of this tick."""
        self._scores_now = scores
        if self._thresholds is None:
            self._thresholds = self._tail.thresholds()
        return self._thresholds
