"""Channel `distance`: several metrics of one machine are far from its peers at the same time.

A value's distance is its residual to the peers' median, in units of the metric's usual one: the median over machines of
each machine's mean absolute residual so far. Neither a level of its own nor a past day is needed, so this channel
works from the first minutes on, and on a machine that was different from the first sample. The score of a machine is
the distance of its `rank`-th farthest metric, with `rank` a power of the number that vary (3 of 17, 6 of 98), and
at least the second if there are two: one metric is far often, several at once are not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.elementwise import Elementwise, higher, lower, where
from rolecall.detector.panels.sequential.order import largest, medians_of

MEMORY_TICKS = 1000.0
RANK_POWER = 0.4
"""Of many metrics, most do not concern a fault."""
DISTANCE_MAX = 100.0
"""Larger distances add no information, and a metric that hardly varies has almost no unit."""
UNIT_SHARE_MIN = 1e-3
"""Minimum unit as a share of the metric's level: smaller differences are rounding."""
START_TICKS = 8
"""Before, a unit is too imprecise."""
RENEW_TICKS = 8
"""Ticks between renewals of the units, once this many squared have passed."""


class PeerDistance:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self.size = np.zeros((num_metrics, num_machines), dtype=np.float32)  # mean absolute residual
        self.count = np.zeros((num_metrics, num_machines), dtype=np.float32)
        self.distance = np.zeros((num_metrics, num_machines), dtype=np.float32)
        self.usual = np.zeros((num_metrics, 1), dtype=np.float32)  # median of `size`, of machines with the metric
        self.ticks, self.rank = 0, 1

    def tick(
        self,
        residual: Floats,
        known: NDArray[np.bool_],
        middle: Floats,
        counted: NDArray[np.bool_],
        usable: NDArray[np.bool_],
    ) -> Floats:
        """Scores (N,). `residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `counted` (N,):
        machines whose residuals are learned; `usable` (M,): metrics whose levels can be compared among peers, and that
        are no duplicates of another."""
        self.ticks += 1
        if self.ticks <= RENEW_TICKS**2 or self.ticks % RENEW_TICKS == 0:
            self.usual = medians_of(self.size, self.count > 0)
        unit = np.maximum(self.usual, np.float32(UNIT_SHARE_MIN) * np.abs(middle[:, None]))
        varies = usable[:, None] & (self.usual > 0) & (self.count.max(axis=1, keepdims=True) >= START_TICKS)
        [self.distance] = _distance.apply(
            self,
            (self.size, self.count),
            (residual, known, counted),
            (np.where(varies, unit, 1).astype(np.float32), varies),
        )
        self.rank = max(round(float(varies.sum()) ** RANK_POWER), min(2, len(residual)))
        return np.asarray(largest(self.distance, self.rank)[-1])


@Elementwise(np.float32)
def _distance(state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    (size, count), (residual, known, counted), (unit, varies) = state, now, metric
    zero, one = np.float32(0), np.float32(1)
    far = np.abs(residual)
    distance = where(varies & known, lower(far / unit, np.float32(DISTANCE_MAX)), zero)
    learned = known & counted
    count = count + where(learned, one, zero)
    rate = where(learned, higher(one / higher(count, one), np.float32(1 / MEMORY_TICKS)), zero)
    return size + rate * (far - size), count, distance
