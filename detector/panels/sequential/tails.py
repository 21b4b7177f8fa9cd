"""Tail distribution of healthy scores: thresholds that follow from a requested rate of false alarms.

Scores of neighbouring ticks depend on each other, so the unit is the block: the highest score of one machine in
`BLOCK_TICKS` ticks. The blocks of all machines of a panel form one sample. Above its `TAIL_SHARE` highest values the
tail is taken as exponential (Pickands 1975, Balkema and de Haan 1974, with shape 0: scores are built of bounded,
averaged deviations), so that

    P(block > h) = TAIL_SHARE * exp(-(h - u) / beta),   u = the quantile.

The sample also contains unlabelled faults. In an exponential tail, the spacings of the ordered values,
i (X_(i) - X_(i+1)) from the top, are independent with mean beta (Renyi 1953). beta is their mean without the topmost
`FAULT_SHARE` of the sample, which may be faults, with i counted as if half of those were faults: a sixth too low if
none was, half too high if all were. In fleets of more than 100 machines, fewer are excluded, since at most
`FAULTY_MACHINES_MAX` are faulty for long, and the slope of the topmost values counts if it is larger: only large fleets
show how heavy the far tail is. beta is raised by one standard error, so that short histories give high thresholds
rather than false alarms.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats

BLOCK_TICKS = 32
"""Longer than most excursions of a score: then blocks are nearly independent, and an alarm spans one or two."""
TAIL_SHARE = 0.15
FAULT_SHARE = 0.02
"""Of a machine's time: a fault of seven machine-hours every two weeks, ten times the usual."""
FAULTY_MACHINES_MAX = 2
FAR_SHARE = 1 / 8
"""In large fleets, this share of the highest spacings also counts separately if they are larger."""
BLOCKS_MIN = 4
"""Per panel, before it has a threshold: there are no findings before."""
SPACINGS_MIN = 5
SAMPLE_MAX = 200_000
"""Block maxima kept; the oldest are dropped first."""


def spacings(sample: Floats, num: int, skipped: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For the last axis of `sample` (..., S): the quantile that `num` values exceed, (...), and the spacings of these
    from the `skipped`-th largest down, (..., num - skipped); the mean of each spacing is the tail's mean excess."""
    first = sample.shape[-1] - num - 1
    top = np.sort(np.partition(sample, first, axis=-1)[..., first:], axis=-1)[..., ::-1].astype(np.float64)
    weights = np.arange(1, num + 1) - skipped / 2
    return top[..., -1], (weights * (top[..., :-1] - top[..., 1:]))[..., skipped:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The assumed tail of a panel without data, weighted as `weight` block maxima. `beta_min`: lower bound of beta.
    `young_beta`: before there are enough data for a tail, of scores relative to the peers'; None: no evidence then."""

    location: float
    beta: float
    weight: float
    beta_min: float = 0.0
    young_beta: float | None = None


@dataclass(slots=True)
class ScoreTail:
    """Block maxima of one score of all machines of a panel."""

    prior: "Prior | None" = None
    blocks: deque[Floats] = field(default_factory=deque)  # each (machines,)
    size: int = 0
    location: float = math.inf
    beta: float = 0.0
    num_blocks: int = 0
    old_blocks: int = 0  # of the score before `renew`
    old_size: int = 0
    size_min: int = 0

    def renew(self, size_min: int) -> None:
        """Called when the score changes its meaning and becomes lower: earlier block maxima count only until there are
        `size_min` new ones."""
        self.old_blocks, self.old_size, self.size_min = len(self.blocks), self.size, size_min

    def add(self, maxima: Floats) -> None:
        """Adds the maxima of one block, of the machines that count, in any order."""
        self.num_blocks += 1
        self.blocks.append(maxima)
        self.size += len(maxima)
        if self.old_blocks and self.size - self.old_size >= self.size_min:
            for _ in range(self.old_blocks):
                self.size -= len(self.blocks.popleft())
            self.old_blocks = self.old_size = 0
        while len(self.blocks) > 1 and self.size > SAMPLE_MAX:
            self.size -= len(self.blocks.popleft())
            self.old_blocks = max(0, self.old_blocks - 1)
        # A long history changes slowly: fitting it at every block would dominate the run time.
        if len(self.blocks) <= 64 or self.num_blocks % 16 == 0:
            self._fit()

    def _fit(self) -> None:
        share = min(FAULT_SHARE, FAULTY_MACHINES_MAX * len(self.blocks) / self.size) if self.size else FAULT_SHARE
        skipped = max(1, math.ceil(share * self.size))
        num = int(TAIL_SHARE * self.size)
        if len(self.blocks) < BLOCKS_MIN or num - skipped < SPACINGS_MIN:
            return
        location, used = spacings(np.concatenate(self.blocks), num, skipped)
        self.location = float(location)
        self.beta = float(used.mean()) * (1 + 1 / math.sqrt(len(used)))
        if share < FAULT_SHARE:
            far = used[: max(SPACINGS_MIN, int(FAR_SHARE * len(used)))]
            self.beta = max(self.beta, float(far.mean()) * (1 + 1 / math.sqrt(len(far))))
        if self.prior:
            own = self.size / (self.size + self.prior.weight)
            self.location = own * self.location + (1 - own) * self.prior.location
            self.beta = max(own * self.beta + (1 - own) * self.prior.beta, self.prior.beta_min)

    def surprise(self, scores: Floats) -> Floats:
        """Distance beyond the quantile, in mean excesses: -log of the share of blocks that get this high, up to a
        constant; 0 before there is a history."""
        if not math.isfinite(self.location):
            return np.zeros_like(scores)
        surprise: Floats = ((scores - self.location) / max(self.beta, 1e-6)).astype(np.float32)
        return surprise

    def threshold(self, rate_per_block: float) -> float:
        """The score that a healthy machine exceeds in this share of its blocks; infinite before there is a history."""
        if not math.isfinite(self.location):
            return math.inf
        return self.location + max(self.beta, 1e-6) * math.log(TAIL_SHARE / min(rate_per_block, TAIL_SHARE))
