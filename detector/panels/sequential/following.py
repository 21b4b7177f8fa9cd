"""Models how a machine follows its peers, by metric: its usual offset, gain, lead and lag. The remainder is its own
deviation.

Residual r = value - median over machines. With x the median's distance from its mean over time and y its last step,

    r(t) = habit + gain x(t) + lag y(t) + lead y(t + 1) + own deviation,

for a machine that responds more strongly than its peers (`gain`), or whose samples or clock are slightly before
(`lead`) or after theirs (`lag`). Such a machine shows a spike at every edge of a training step that is unrelated to its
health. All coefficients are learned by normalized steps (LMS; Haykin, Adaptive Filter Theory, 4th ed., ch. 6), limited
so that the onset of a fault barely moves them, and not while a machine is suspected. `lead` is known one tick late: its
effect is removed from the past, so that no forecast uses it. Part of a fleet-wide move remains unexplained: deviations
are intervals.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.elementwise import Elementwise, clip, higher, lower, where
from rolecall.detector.panels.sequential.order import MAD_TO_SIGMA, medians_of, row_medians

HABIT_TICKS = 1000.0
"""Averaging time of all parameters learned here."""
STEP_LIMIT = 3.0
"""Scales: limits the effect of a single sample on the habit."""
SIZE_LIMIT = 8.0
"""Scales: limits its effect on the scale. A lower limit would underestimate volatile metrics, a higher one would let
faults inflate the scale."""
START_TICKS = 8
"""Before a machine has a scale, it uses its peers' current deviations."""
POOLED_TICKS = 100.0
"""After this many ticks, a machine's own scale has the same weight as that of its peers."""
SCALE_SHARE_MIN = 0.5
"""Minimum scale as a share of the peers' scale: a constant metric is not infinitely precise."""
VALUE_SHARE_MIN = 1e-4
"""Minimum scale as a share of the metric's level: the resolution of float32 and of many counters."""
STATE_SHARE_MIN = 5e-3
"""The same for what a machine holds, such as memory: it stands still to the byte for minutes, and then moves by some
megabytes of gigabytes, which is no fault."""
MEAN_TO_SIGMA = 1.2533
"""Ratio of standard deviation to mean absolute deviation for a Gaussian."""
GAIN_MAX = 0.5
"""A machine that responds by half more or less than its peers is not comparable."""
GAIN_SPREADS, GAIN_SURE = 4.5, 0.05
"""A gain is limited to this many robust standard deviations of its peers' gains, at least the second value. A slow
drift during a slow move of the fleet, or a clock error of more than a tick, resembles a gain, and would cause a false
alarm at the next move of the fleet."""
GAIN_RENEW_TICKS = 8
MACHINES_KEPT = 256
"""In large fleets, statistics use this many machines, evenly spread."""
GAIN_RIDGE = 10.0
"""Gains are learned only from moves of about three scales or more: smaller ones are noise of the median."""
LAG_MAX = 1.0
"""Ticks."""
LEARNING_TICKS_MIN = 20
"""Gain, lag and lead adapt no faster than after this many ticks."""
AWAY_SHARE, STEP_SHARE = 0.01, 0.1
"""Shares of the median's distance from its mean, and of its step, that may remain unexplained."""
AWAY_NEW_SHARE, AWAY_USUAL = 0.05, 2.0
"""Additional share of the distance beyond twice its usual (root mean square) value."""
EDGE_SCALES, EDGE_MEANS = 2.0, 1.0
"""A step of the median beyond this many scales and mean steps is an edge: machines differ briefly there."""
GONE_SCALES, STILL_SCALES, STILL_TICKS = 100.0, 3.0, 32
"""A median this far from its mean, without a step of the second size for this many ticks, has changed permanently."""
STAYED_SHARE = 0.5
"""Of a machine's distance from its peers: closer to its usual level than this, it stayed there."""
DEVIATION_MAX = 1e4
"""Scales: larger deviations are clipped."""


class Deviations(NamedTuple):
    """In robust scales. `low`, `high` (M, N): bounds of the deviation; `lead` (M, N): the part of the last deviation
    that the peers' current step explains; `edge` (M, 1): whether this tick is an edge; `stayed` (M, N): machines near
    their usual level that differ from their peers because the peers moved."""

    low: Floats
    high: Floats
    lead: Floats
    edge: NDArray[np.bool_]
    stayed: NDArray[np.bool_]


class PeerCorrelation:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int, share_min: Floats | None = None) -> None:
        """`share_min` (M, 1): minimum scale as a share of a metric's level; `VALUE_SHARE_MIN` if not given."""
        m, n = num_metrics, num_machines
        self.ticks = 0
        self.share_min = np.full((m, 1), VALUE_SHARE_MIN, np.float32) if share_min is None else share_min
        zeros, column = np.zeros((m, n), dtype=np.float32), np.zeros((m, 1), dtype=np.float32)
        # (M, N); `size`: mean |d|, `count`: ticks learned from, `last`: d one tick ago
        self.habit, self.gain, self.lag, self.lead = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        self.size, self.count, self.last = zeros.copy(), zeros.copy(), zeros.copy()
        # (M, 1): mean over time of the medians, the last median, its distance from the level
        self.level, self.middle, self.away = column, column.copy(), column.copy()
        # (M, 1): median scale, ticks since the median last made a step
        self.usual, self.still = column.copy(), np.zeros((m, 1), dtype=np.int64)
        # (M, 1); `step_size`: mean |y|
        self.away_square, self.step_square, self.step_size = column.copy(), column.copy(), column.copy()
        self.edge = np.zeros((m, 1), dtype=np.bool_)  # of the previous tick, like `known` (M, N)
        self.known = np.zeros((m, n), dtype=np.bool_)
        self.gain_max = np.full((m, 1), GAIN_MAX, dtype=np.float32)

    def tick(
        self, residual: Floats, known: NDArray[np.bool_], middle: Floats, learning: NDArray[np.bool_]
    ) -> Deviations:
        """`residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `learning` (N,): machines to learn
        from."""
        self.ticks += 1
        middle = middle[:, None]
        if self.ticks == 1:
            self.level, self.middle = middle.copy(), middle.copy()
        self._restart(middle)
        away, step = middle - self.level, middle - self.middle
        pooled = medians_of(self.size, self.count > 0) * np.float32(MEAN_TO_SIGMA)
        floor = np.maximum(SCALE_SHARE_MIN * pooled, self.share_min * np.abs(middle))
        floor = np.maximum(floor, 1e-30).astype(np.float32)
        [scale] = _scale.apply(self, (), (self.size, self.count), (pooled, floor))
        self.usual = usual = row_medians(scale)
        # The response of machines to a move of unprecedented size is unknown.
        new = np.maximum(np.abs(away) - np.float32(AWAY_USUAL) * np.sqrt(self.away_square), 0)
        slack = np.float32(AWAY_SHARE) * np.abs(away) + np.float32(AWAY_NEW_SHARE) * new
        slack += np.float32(STEP_SHARE) * np.abs(step)
        memory = np.float32(max(1 / self.ticks, 1 / HABIT_TICKS)) * known.any(axis=1, keepdims=True)
        self.step_size += memory * (np.abs(step) - self.step_size)
        edge = np.abs(step) > np.maximum(np.float32(EDGE_SCALES) * usual, np.float32(EDGE_MEANS) * self.step_size)
        self.away_square += memory * (away * away - self.away_square)
        self.step_square += memory * (step * step - self.step_square)
        among = self._among(residual, known & learning, away, step)
        renews = self.ticks % GAIN_RENEW_TICKS == 0
        least = usual * usual + np.float32(1e-30)
        gain_max = np.full_like(self.gain_max, math.inf) if renews else self.gain_max
        step_square, away_square = self.step_square + least, self.away_square + np.float32(GAIN_RIDGE) * least
        low, high, lead, stayed = _follow.apply(
            self,
            (self.habit, self.gain, self.lag, self.lead, self.size, self.count, self.last, self.known),
            (residual, known, learning, scale),
            (among, away, step, self.away, slack, new, edge, self.edge, step_square, away_square, gain_max),
        )
        if renews:
            self.gain_max = _gain_max(self.gain)
            np.clip(self.gain, -self.gain_max, self.gain_max, out=self.gain)
        self.level += memory * (middle - self.level)
        self.away, self.middle, self.edge = away, middle.copy(), edge
        return Deviations(low, high, lead, edge, stayed)

    def _among(self, residual: Floats, learned: NDArray[np.bool_], away: Floats, step: Floats) -> Floats:
        """(M, 1): for a young machine, its peers define the volatility of a metric."""
        among = np.zeros((len(residual), 1), dtype=np.float32)
        young = (learned & (self.count < START_TICKS)).any(axis=1)
        if young.any():
            habit = np.where(learned & (self.count == 0), residual, self.habit)
            own = residual - habit - self.gain * away - self.lag * step
            shown = (learned | (self.count > 0))[young]
            among[young] = np.float32(MEAN_TO_SIGMA) * medians_of(np.abs(own[young]), shown)
        return among

    def _restart(self, middle: Floats) -> None:
        """Resets metrics in which the whole fleet moved permanently to a new level: what was learned there is void."""
        usual = self.usual
        moved = np.abs(middle - self.middle) > np.float32(STILL_SCALES) * usual
        self.still = np.where(moved, 0, self.still + 1)
        far = np.abs(middle - self.level) > np.float32(GONE_SCALES) * usual
        gone = far & (self.still >= STILL_TICKS)
        if gone.any():
            self.level = np.where(gone, middle, self.level)
            self.away_square = np.where(gone, 0, self.away_square).astype(np.float32)
            self.count *= ~gone
            self.gain *= ~gone


@Elementwise(np.float32)
def _scale(_state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    (size, count), (pooled, floor) = now, metric
    weight = count / (count + np.float32(POOLED_TICKS))
    mixed = weight * (size * np.float32(MEAN_TO_SIGMA)) + (np.float32(1) - weight) * pooled
    return (higher(mixed, floor),)


@Elementwise(np.float32, np.float32, np.float32, np.bool_)
def _follow(state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    habit, gain, lag, lead, size, count, last, known_before = state
    residual, known, learning, scale = now
    among, away, step, away_before, slack, new, edge, edge_before, step_square, away_square, gain_max = metric
    zero, one, lag_max = np.float32(0), np.float32(1), np.float32(LAG_MAX)
    learned = known & learning
    habit = where(learned & (count == zero), residual, habit)
    own = residual - habit - gain * away - lag * step
    most = np.float32(DEVIATION_MAX)
    low, high = clip((own - slack) / scale, -most, most), clip((own + slack) / scale, -most, most)
    explained = clip(lead * step / scale, -most, most)
    stayed = (np.abs(own + away) < np.float32(STAYED_SHARE) * np.abs(own)) & (new > zero)
    begun = count >= np.float32(START_TICKS)
    rough = where(begun, scale, higher(scale, among))
    most = np.float32(STEP_LIMIT) * rough
    limited = clip(own, -most, most)
    slowest, fastest = np.float32(1 / HABIT_TICKS), np.float32(LEARNING_TICKS_MIN)
    rate = where(learned, higher(one / higher(count, fastest), slowest), zero)
    lag = clip(lag + rate * limited * step / step_square, -lag_max, lag_max)
    # The last deviation, now that the next step is known: only now can a lead be distinguished from a gain.
    left = rate * clip(last - lead * step, -most, most)
    at_edge = edge & begun
    even = known_before & ~at_edge & ~edge_before
    gain = clip(gain + where(even, left * away_before / away_square, zero), -gain_max, gain_max)
    lead = clip(lead + where(known_before, left * step / step_square, zero), -lag_max, lag_max)
    count = count + where(learned, one, zero)
    rate = where(learned & ~at_edge, higher(one / higher(count, one), slowest), zero)
    # Limited steps: one outlier, or the onset of a fault, barely moves the habit.
    habit = habit + rate * limited
    size = size + rate * (lower(np.abs(own), np.float32(SIZE_LIMIT) * rough) - size)
    return habit, gain, lag, lead, size, count, own, known, low, high, explained, stayed


def _gain_max(gain: Floats) -> Floats:
    """The largest credible gain (M, 1) of a metric, from the gains (M, N) of its machines."""
    kept = gain[:, :: -(-gain.shape[1] // MACHINES_KEPT)]
    spread = np.float32(MAD_TO_SIGMA) * np.median(np.abs(kept), axis=1, keepdims=True)
    return np.asarray(np.clip(GAIN_SPREADS * spread, GAIN_SURE, GAIN_MAX), dtype=np.float32)
