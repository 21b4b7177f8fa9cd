"""Channel `novelty`: many metrics of one machine jump at once to unprecedented values, and its peers' do not.

A value has three distances, each in units of the metric's usual range on that machine (`RANGE_QUANTILE` of the
distances from its mean level): from its level over the last `RECENT_TICKS`; of its residual (to the peers' median) from
that residual's level over the same time; and from all values of the machine around this time of day on the previous day
(within one slot of `SLOT_SECONDS` on either side), if there are any. The smallest of the three counts: a value that is
usual for the machine, for all machines, or for this time of day is no fault. The score of a machine is the `share`-th
largest over its metrics: jumps of one metric are common, simultaneous jumps of a third of them are not.
"""

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats

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
        self.reference = 0.0
        """Maximum age of the reference values, seconds; it only grows. 0: none yet."""

    def tick(self, at: float, values: Floats, residual: Floats, known: NDArray[np.bool_]) -> Floats:
        """Deviations in usual ranges, (M, N). `values`, `residual`, `known`: (M, N)."""
        first = known & (self.count == 0)
        np.copyto(self.level, values, where=first)
        np.copyto(self.recent, values, where=first)
        np.copyto(self.recent_residual, residual, where=first)
        own = np.abs(values - self.recent)
        own = np.minimum(own, np.abs(residual - self.recent_residual))
        own = np.minimum(own, self._from_before(at, values))
        unit = np.maximum(self.spread, RANGE_SHARE_MIN * np.abs(self.level) + 1e-30)
        deviation = np.where(known, own / unit, 0.0).astype(np.float32)
        self._learn(at, values, residual, known)
        return deviation

    def _from_before(self, at: float, values: Floats) -> Floats:
        """Distance to the values of the previous day; until then, to those `SUBSTITUTE_SECONDS` before."""
        for before in (DAY_SECONDS, SUBSTITUTE_SECONDS):
            slot = int((at - before) // SLOT_SECONDS)
            seen = [self.slots[s] for s in (slot - 1, slot, slot + 1) if s in self.slots]
            if len(seen) == SLOTS_COMPARED:
                self.reference = max(self.reference, before)
                low = np.minimum(np.minimum(seen[0][0], seen[1][0]), seen[2][0])
                high = np.maximum(np.maximum(seen[0][1], seen[1][1]), seen[2][1])
                away: Floats = np.maximum(np.maximum(low - values, values - high), 0)
                away[~np.isfinite(away)] = np.inf  # no sample at that time: low is +inf and high -inf
                return away
        return np.full_like(values, np.inf)

    def _learn(self, at: float, values: Floats, residual: Floats, known: NDArray[np.bool_]) -> None:
        self.count += known
        gain = (np.maximum(1 / np.maximum(self.count, 1), 1 / LEVEL_TICKS) * known).astype(np.float32)
        self.level += gain * (values - self.level)
        distance = np.abs(values - self.level)
        share = np.float32(RANGE_GAIN * (1 - RANGE_QUANTILE) / RANGE_QUANTILE)
        beyond = distance > self.spread
        grown = np.where(beyond, self.spread + RANGE_GAIN * (distance - self.spread), self.spread * (1 - share))
        np.copyto(self.spread, grown.astype(np.float32), where=known)
        recent = (np.maximum(1 / np.maximum(self.count, 1), 1 - np.exp(-1 / RECENT_TICKS)) * known).astype(np.float32)
        self.recent += recent * (values - self.recent)
        self.recent_residual += recent * (residual - self.recent_residual)
        slot = int(at // SLOT_SECONDS)
        if slot not in self.slots:
            self.slots[slot] = (np.full_like(values, np.inf), np.full_like(values, -np.inf))
            oldest = slot - int(DAY_SECONDS // SLOT_SECONDS) - 2
            for gone in [s for s in self.slots if s < oldest]:
                del self.slots[gone]
        low, high = self.slots[slot]
        np.minimum(low, np.where(known, values, np.inf), out=low)
        np.maximum(high, np.where(known, values, -np.inf), out=high)

    def scores(self, deviation: Floats) -> Floats:
        """(N,): the `ceil(M / 3)`-th largest deviation of each machine, but at least the second if there are two
        metrics."""
        rank = max(-(-self.num_metrics // METRICS_SHARE), min(2, self.num_metrics))
        ranked = np.partition(deviation, self.num_metrics - rank, axis=0)[self.num_metrics - rank]
        scores: Floats = np.minimum(ranked, DEVIATION_MAX)
        return scores
