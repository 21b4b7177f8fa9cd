"""Warm-up of a tracker: learns the threshold that a healthy machine's score stays below.

There are no alarms during the warm-up. A fault present from the first tick is learned as normal, and nothing is learned
later.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from rolecall.core.diagnosis import Finding
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.panels.peer_scores import NUM_MACHINES_MIN, WINDOW_TICKS, Scores, Windows

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
        if values.shape[1] < NUM_MACHINES_MIN:
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
