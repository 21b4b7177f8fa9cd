"""Channel `shift`: a machine that differs from its peers more than it used to, for long enough, in any metric.

`following` gives the distance of each value from the machine's usual level among its peers, `whitening` the part of it
that its past did not predict, `level_shifts` the likelihood of a level shift. A machine has two scores: that of its
strongest metric, and the same plus `OTHERS_SHARE` of the next ones, since faults show in few metrics and often in more
than one; but metrics of one machine are correlated even when it is healthy, so the others count for less.
"""

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.following import PeerCorrelation
from rolecall.detector.panels.sequential.level_shifts import LEVEL_LENGTH, LevelShifts
from rolecall.detector.panels.sequential.whitening import Whitening

NUM_METRICS_ADDED = 3
OTHERS_SHARE = 0.6
YOUNG_TICKS = 16
"""Before a machine has shown so many values of a metric, its scale there is too rough for all that follows."""
CALM_SCORE = 5.3
"""Of one metric: exceeded in one of 200 healthy blocks."""


class ShiftChannel:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self.num_metrics, m, n = num_metrics, num_metrics, num_machines
        self.following, self.whitening, self.levels = PeerCorrelation(m, n), Whitening(m, n), LevelShifts(m, n)
        self.edge = np.zeros((m, 1), dtype=np.bool_)  # one tick ago
        self.scores = np.zeros((m, n), dtype=np.float32)

    def tick(
        self,
        residual: Floats,
        known: NDArray[np.bool_],
        middle: Floats,
        learning: NDArray[np.bool_],
        counted: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Scores of the strongest metric and of the strongest few together, (N,) each.

        `residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `learning` (N,): whose habit is
        learned; `counted` (N,): of whose noise is learned. The latter are more: what looks suspicious for a moment is
        noise, too.
        """
        low, high, lead, edge, stayed = self.following.tick(residual, known, middle, learning)
        known = known & (self.following.count > YOUNG_TICKS)
        self.whitening.correct(lead)
        self.levels.correct(lead)
        new = self.whitening.tick(low, high, known, counted, edge | self.edge)
        self.edge = edge
        self.scores = self.levels.tick(low, high, known, stayed, new, self.whitening)
        rank = min(NUM_METRICS_ADDED, self.num_metrics)
        top = np.partition(self.scores, self.num_metrics - rank, axis=0)[self.num_metrics - rank :]
        strongest = top.max(axis=0)
        return strongest, strongest + np.float32(OTHERS_SHARE) * (top.sum(axis=0) - strongest)

    @property
    def calm(self) -> NDArray[np.bool_]:
        """(N,): machines no metric of which is both suspect and away from its peers now, whatever the sums remember."""
        back = np.abs(self.levels.levels[LEVEL_LENGTH]) < self.levels.least / 2  # more is evidence of a shift
        return np.asarray(((self.scores < CALM_SCORE) | back).all(axis=0), dtype=np.bool_)

    def first(self, machine: int) -> tuple[int, float]:
        """Of one machine: its strongest metric, and that one's mean deviation of the last ticks with its sign."""
        m = int(self.scores[:, machine].argmax())
        return m, float(self.levels.levels[LEVEL_LENGTH, m, machine])

    def strongest(self, machine: int) -> list[tuple[int, int, float, float]]:
        """Of one machine: (metric, ticks since it shifted, mean deviation of the last ticks with its sign, score),
        strongest metric first."""
        scores = self.scores[:, machine]
        deviations = self.levels.levels[LEVEL_LENGTH, :, machine]
        order = [int(m) for m in np.argsort(-scores, kind="stable")]
        return [(m, self.levels.age(m, machine), float(deviations[m]), float(scores[m])) for m in order]
