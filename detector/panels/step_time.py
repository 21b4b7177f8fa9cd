"""Detects stragglers in synchronous work: compares seconds of own work per step among peers, from the first step.

Peers of one role and phase (one pipeline stage, one expert group) have equal work, so a different level is a fault and
not a baseline: nothing is learned as normal. Time spent waiting for others (receive, reduce, gather) is not own work,
so machines that wait for a straggler are not named.

With x = log(own seconds / median of the peers), each machine and metric has a sum S = max(0, S + 2k (x - k) / s^2), the
log-likelihood ratio of "slower by 2k" against "equal" for Gaussian x. k = -log 0.75 (NVIDIA's resiliency extension uses
this score as straggler threshold), and s is the spread of x over peers and steps so far, at least `SPREAD_MIN`. An
alarm at S > log(1 / rate) has a mean time between false alarms of at least 1 / rate ticks (Lorden 1971, theorem 2). One
tick adds at most a third of that threshold, so a single stalled step causes no alarm.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.metric_kinds import is_own_work
from rolecall.detector.panels.panel import FALSE_ALARMS_PER_1000_MACHINE_DAYS, Floats, PanelShape

SLOW_LOG_RATIO = -math.log(0.75)
SPREAD_MIN = 0.1
"""Of x: kernels of equal work differ by a few percent; a smaller value would make the sum react to irrelevant
differences."""
TICKS_MIN = 3
PEERS_MIN = 2
GONE_TICKS = 32
"""A machine without a time for so many ticks is no peer any more."""
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    name: ClassVar[str] = "step-time"
    false_alarms_per_1000_machine_days: float = FALSE_ALARMS_PER_1000_MACHINE_DAYS

    def track(self, shape: PanelShape) -> "StepTimeTracker":
        return StepTimeTracker(shape, self.false_alarms_per_1000_machine_days)


class StepTimeTracker:
    def __init__(self, shape: PanelShape, asked: float) -> None:
        """`asked`: requested false alarms per 1,000 machine-days."""
        self.shape = shape
        self.rows = [i for i, m in enumerate(shape.metrics) if is_own_work(m)]
        size = (len(self.rows), len(shape.machines))
        rate = asked / 1000 * shape.interval_seconds / SECONDS_PER_DAY
        self.threshold = math.log(max(2, len(self.rows)) / min(rate, 0.5))
        # (own-work metrics, N): S, when it last left zero (seconds), and sum and number of x since then
        self.sums, self.since, self.ratio_sum = np.zeros(size), np.zeros(size), np.zeros(size)
        self.ticks = np.zeros(size, dtype=np.int64)
        self.reported = np.zeros(size[1], dtype=np.bool_)
        self.silent = np.full(size[1], np.inf)  # (N,): ticks since the last x
        self.here = np.zeros(size[1], dtype=np.bool_)  # with an x lately
        self.spread_sum, self.spread_count = 0.0, 0  # of |x - middle| over peers

    @property
    def scores(self) -> NDArray[np.float64]:
        """(N,)."""
        return np.asarray(self.sums.max(axis=0, initial=0.0))

    def tick(self, at: float, values: Floats) -> list[Finding]:
        if not self.rows or len(self.shape.machines) <= PEERS_MIN:
            return []
        x = _log_ratios(values[self.rows].astype(np.float64))
        known = np.isfinite(x)
        spread = self._spread(x)
        step = 2 * SLOW_LOG_RATIO * (x - SLOW_LOG_RATIO) / spread**2
        step = np.where(known, np.clip(step, -self.threshold, self.threshold / TICKS_MIN), 0.0)
        begins = (self.sums == 0) & (step > 0)
        self.since[begins] = at
        self.ratio_sum[begins], self.ticks[begins] = 0.0, 0
        self.ratio_sum += np.where(known, x, 0.0)
        self.ticks += known
        self.sums = np.clip(self.sums + step, 0.0, 2 * self.threshold)
        self.silent = np.where(known.any(axis=0), 0, self.silent + 1)
        self.here = self.silent < GONE_TICKS
        slow = (self.sums > self.threshold).any(axis=0) & self.here
        self.reported &= (self.sums > 0).any(axis=0)  # recovered: a later slowdown is a new fault
        if 2 * slow.sum() >= self.here.sum():
            return []  # those that are still slow once the others have recovered are told then
        fresh = np.flatnonzero(slow & ~self.reported)
        self.reported |= slow
        return [self._finding(int(n), at) for n in fresh]

    def _spread(self, x: NDArray[np.float64]) -> float:
        """Standard deviation of x so far, from mean absolute deviations, which one slow peer barely affects."""
        size = np.abs(x[np.isfinite(x).any(axis=1)])
        middle = np.nanmedian(size, axis=1) if len(size) else np.empty(0)
        self.spread_sum += float(middle.sum())
        self.spread_count += len(middle)
        mean = self.spread_sum / self.spread_count if self.spread_count else 0.0
        return max(SPREAD_MIN, 1.4826 * mean)

    def _finding(self, n: int, at: float) -> Finding:
        row = int(np.argmax(self.sums[:, n]))
        metric = self.shape.metrics[self.rows[row]]
        ratio = math.exp(self.ratio_sum[row, n] / max(1, self.ticks[row, n]))
        machine, onset = self.shape.machines[n], float(self.since[row, n])
        text = (
            f"{machine.name} takes {ratio:.2f} times the {metric} of its {int(self.here.sum()) - 1} peers of "
            f"{self.shape.name} over {int(self.ticks[row, n])} steps, in its own work and not in waiting"
        )
        return Finding(
            detector="step-time",
            suspects=(self.shape.suspect(n),),
            fault_class=FaultClass.SLOW,
            onset=onset,
            detected_at=at,
            confidence=0.95,
            because=text,
            evidence=(
                Evidence(
                    kind=f"metric:{metric}",
                    text=f"{metric}: {ratio:.2f} times its peers, log-likelihood ratio {self.sums[row, n]:.1f} over "
                    f"{self.threshold:.1f}",
                    values={"ratio": ratio, "score": float(self.sums[row, n]), "threshold": self.threshold},
                ),
            ),
        )


def _log_ratios(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(own / median of the others), (rows, N); NaN where unknown or not positive."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(np.where(seconds > 0, seconds, np.nan))
    out: NDArray[np.float64] = np.full_like(logs, np.nan)
    num = np.isfinite(logs).sum(axis=1)
    for row in np.flatnonzero(num > PEERS_MIN):
        known = np.flatnonzero(np.isfinite(logs[row]))
        out[row, known] = logs[row, known] - _median_of_others(logs[row, known])
    return np.asarray(out)


def _median_of_others(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each element: the median of all the others, (N,); N >= 2."""
    order = np.argsort(x, kind="stable")
    ranked, n = x[order], len(x)
    rank = np.empty(n, dtype=np.int64)
    rank[order] = np.arange(n)
    low, high = (n - 2) // 2, (n - 1) // 2  # indices of the middle among the n - 1 others
    pick_low = np.where(rank <= low, low + 1, low)
    pick_high = np.where(rank <= high, high + 1, high)
    middle: NDArray[np.float64] = (ranked[pick_low] + ranked[pick_high]) / 2
    return middle
