"""Channel `shift`: a machine differs from its peers more than usual, for long enough, in any metric.

`following` gives the distance of each value from the machine's usual level among its peers, `whitening` the part of it
that its past did not predict, `level_shifts` the likelihood of a level shift. A machine has two scores: that of its
strongest metric, and the same plus `OTHERS_SHARE` of the next ones, since a fault often affects several metrics.
Metrics of one machine are correlated even when it is healthy, so the others count for less.
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
"""With fewer values of a metric, a machine's scale is too imprecise for the next stages."""
CALM_SCORE = 5.3
"""Of one metric: exceeded in one of 200 healthy blocks."""


class ShiftChannel:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self.num_metrics, m, n = num_metrics, num_metrics, num_machines
        self.following, self.whitening, self.levels = PeerCorrelation(m, n), Whitening(m, n), LevelShifts(m, n)
        self.edge = np.zeros((m, 1), dtype=np.bool_)  # of the previous tick
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

        `residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `learning` (N,): machines whose habit
        is learned; `counted` (N,): machines whose noise is learned. The latter are more: brief suspicious deviations
        are noise, too.
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
        """(N,): machines without a metric that is both suspect and currently away from its peers, whatever the sums
        are."""
        back = np.abs(self.levels.levels[LEVEL_LENGTH]) < self.levels.least / 2  # more is evidence of a shift
        return np.asarray(((self.scores < CALM_SCORE) | back).all(axis=0), dtype=np.bool_)

    def first(self, machine: int) -> tuple[int, float]:
        """The strongest metric of a machine, and that metric's signed mean deviation over the last ticks."""
        m = int(self.scores[:, machine].argmax())
        return m, float(self.levels.levels[LEVEL_LENGTH, m, machine])

    def strongest(self, machine: int) -> list[tuple[int, int, float, float]]:
        """(metric, ticks since it shifted, signed mean deviation of the last ticks, score) of a machine's metrics,
        strongest first."""
        scores = self.scores[:, machine]
        deviations = self.levels.levels[LEVEL_LENGTH, :, machine]
        order = [int(m) for m in np.argsort(-scores, kind="stable")]
        return [(m, self.levels.age(m, machine), float(deviations[m]), float(scores[m])) for m in order]
