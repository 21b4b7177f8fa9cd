"""Channel `novelty`: many metrics of one machine jump at once to unprecedented values, and its peers' do not.

A value has three distances, each in units of the metric's usual range on that machine (`RANGE_QUANTILE` of the
distances from its mean level): from its level over the last `RECENT_TICKS`; of its residual (to the peers' median) from
that residual's level over the same time; and from all values of the machine around this time of day on the previous day
(within one slot of `SLOT_SECONDS` on either side), if there are any. The smallest of the three counts: a value that is
usual for the machine, for all machines, or for this time of day is no fault. The score of a machine is the `share`-th
largest over its metrics: jumps of one metric are common, simultaneous jumps of a third of them are not.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.elementwise import Elementwise, higher, lower, where
from rolecall.detector.panels.sequential.order import largest

RECENT_TICKS = 12.0
RANGE_QUANTILE = 0.99
RANGE_GAIN = 0.3
"""How fast the range follows a value beyond it; its decay is chosen so that it balances at the quantile."""
LEVEL_TICKS = 288.0
SLOT_SECONDS = 1800.0
DAY_SECONDS = 86_400.0
SLOTS_COMPARED = 3
SUBSTITUTE_SECONDS = 14_400.0
"""Used before there is a previous day: it differs more from now, so scores are too high rather than too low."""
METRICS_SHARE = 3
"""A third of the metrics must agree; all of two, and two of three."""
DEVIATION_MAX = 2.0
"""In usual ranges: larger deviations add no information, and a constant metric has almost no range."""
RANGE_SHARE_MIN = 1e-3
"""Minimum range as a share of the metric's level: smaller changes are rounding."""


class Novelty:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self.num_metrics = num_metrics
        zeros = np.zeros((num_metrics, num_machines), dtype=np.float32)  # `spread`: usual range
        self.level, self.spread, self.count = zeros, zeros.copy(), zeros.copy()
        self.recent, self.recent_residual = zeros.copy(), zeros.copy()
        self.slots = dict[int, tuple[Floats, Floats]]()  # number -> lowest and highest (M, N)
        self.nothing = np.full_like(zeros, np.inf), np.full_like(zeros, -np.inf)
        # Which slots are compared with, and their lowest and highest (M, N)
        self.compared: tuple[tuple[float, int], Floats, Floats] = ((0.0, 0), zeros, zeros)
        self.reference = 0.0
        """Maximum age of the reference values, seconds; it only grows. 0: none yet."""

    def tick(self, at: float, values: Floats, residual: Floats, known: NDArray[np.bool_]) -> Floats:
        """Deviations in usual ranges, (M, N). `values`, `residual`, `known`: (M, N)."""
        low, high = self._slot(at)
        [deviation] = _deviate.apply(
            self,
            (self.level, self.spread, self.count, self.recent, self.recent_residual, low, high),
            (values, residual, known, *self._before(at)),
        )
        return deviation

    def _before(self, at: float) -> tuple[Floats, Floats]:
        """Lowest and highest values of the previous day around this time, (M, N); until there are some, those
        `SUBSTITUTE_SECONDS` before; until then, +inf and -inf."""
        for before in (DAY_SECONDS, SUBSTITUTE_SECONDS):
            slot = int((at - before) // SLOT_SECONDS)
            seen = [self.slots[s] for s in (slot - 1, slot, slot + 1) if s in self.slots]
            if len(seen) == SLOTS_COMPARED:
                self.reference = max(self.reference, before)
                if self.compared[0] != (before, slot):  # none of them changes any more
                    lows, highs = zip(*seen, strict=True)
                    self.compared = (before, slot), np.minimum.reduce(lows), np.maximum.reduce(highs)
                return self.compared[1:]
        return self.nothing

    def _slot(self, at: float) -> tuple[Floats, Floats]:
        slot = int(at // SLOT_SECONDS)
        if slot not in self.slots:
            self.slots[slot] = (np.full_like(self.level, np.inf), np.full_like(self.level, -np.inf))
            oldest = slot - int(DAY_SECONDS // SLOT_SECONDS) - 2
            for gone in [s for s in self.slots if s < oldest]:
                del self.slots[gone]
        return self.slots[slot]

    def scores(self, deviation: Floats) -> Floats:
        """(N,): the `ceil(M / 3)`-th largest deviation of each machine, but at least the second if there are two
        metrics."""
        rank = max(-(-self.num_metrics // METRICS_SHARE), min(2, self.num_metrics))
        return np.asarray(np.minimum(largest(deviation, rank)[-1], np.float32(DEVIATION_MAX)))


@Elementwise(np.float32)
def _deviate(state: Any, now: Any) -> tuple[Any, ...]:
    level, spread, count, recent, recent_residual, low, high = state
    values, residual, known, low_before, high_before = now
    zero, one = np.float32(0), np.float32(1)
    first = known & (count == zero)
    level, recent = where(first, values, level), where(first, values, recent)
    recent_residual = where(first, residual, recent_residual)
    own = lower(np.abs(values - recent), np.abs(residual - recent_residual))
    own = lower(own, higher(higher(low_before - values, values - high_before), zero))
    unit = higher(spread, np.float32(RANGE_SHARE_MIN) * np.abs(level) + np.float32(1e-30))
    deviation = where(known, own / unit, zero)
    count = count + where(known, one, zero)
    fastest = one / higher(count, one)
    level = level + where(known, higher(fastest, np.float32(1 / LEVEL_TICKS)) * (values - level), zero)
    distance = np.abs(values - level)
    grown = spread + np.float32(RANGE_GAIN) * (distance - spread)
    shrunk = spread * np.float32(1 - RANGE_GAIN * (1 - RANGE_QUANTILE) / RANGE_QUANTILE)
    spread = where(known, where(distance > spread, grown, shrunk), spread)
    rate = where(known, higher(fastest, np.float32(1 - math.exp(-1 / RECENT_TICKS))), zero)
    recent = recent + rate * (values - recent)
    recent_residual = recent_residual + rate * (residual - recent_residual)
    low, high = where(known, lower(low, values), low), where(known, higher(high, values), high)
    return level, spread, count, recent, recent_residual, low, high, deviation
