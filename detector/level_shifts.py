"""Has a metric of a machine gone to another level? Cumulative log likelihood ratios, and their healthy tails.

Against "nothing happened" (the forecast of `whitening`) stands "since some moment everything lies higher by h": then the
noise around the new level is foretold by its own past,

    forecast = h + rho (z(t-1) - h) - theta e'(t-1),

with innovations e' of its own. Each tick adds the log likelihood ratio of the two under the metric's Student t,

    W(t) = max(0, W(t-1) + log f(e') - log f(e), rarity of e),

which is Page's CUSUM (1954) with h estimated from earlier ticks only (Robbins and Siegmund 1974: a plug-in that keeps
exp(W) a supermartingale between restarts, so that P(W > w) falls like exp(-w) whatever the metric's noise). h is the mean
deviation of the last `LENGTHS` ticks, one test each: short ones see steps at once, long ones faint ones; but not less
than `LEVEL_MIN`, for smaller shifts are nobody's concern, and the ratio would never fall. The jump itself, of which no
earlier tick tells, counts by how rare an innovation as large is in this metric: heavy tails make it worth little, and
only what stays adds to it.

Models are never quite right. Of each metric and length the healthy block maxima of all machines are kept, and their tail
is taken as exponential above its `TAIL_SHARE` highest, with slope at least 1:

    score = -log P(block > W) = (W - location) / beta - log TAIL_SHARE.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panel import Floats
from rolecall.detector.tails import SPACINGS_MIN, TAIL_SHARE, spacings
from rolecall.detector.whitening import MACHINES_KEPT, Innovations, Whitening

LENGTHS = (1, 6, 36)
"""Ticks."""
LEVEL_LENGTH = 1
"""Index of the length whose mean is told as the deviation."""
LEVEL_MIN = 5.0
"""Robust scales: no shift is smaller, so that evidence begins at half of it. Healthy machines of real clusters stand two
or three scales off for a minute, as their work is unequal (docs/why.md)."""
RATIO_MAX = 6.0
"""What one tick may add: 1 in 400."""
RARITY_MAX, RARITY_COST = 8.0, 1.0
"""What an innovation may add by itself, and what is taken off for the many moments at which a shift may begin."""
MEMORY = 1 - 1 / 256
"""W falls by as much a tick."""
SUM_MAX = 300.0
SUM_BEGUN = 2.0
"""A shift is dated from where W was last below, or a single tick outweighed all before."""

BLOCKS_KEPT = 64
SKIPPED_SHARE = 0.01
"""The topmost block maxima may be faults."""
FAR_SHARE = 1 / 3
"""Of the tail's spacings the topmost so many count by themselves, too, where they are larger: tails that grow heavier."""
LOCATION_PRIOR, LOCATION_MIN = 5.0, 5.0
BETA_PRIOR, BETA_MIN = 1.2, 1.0
PRIOR_WEIGHT = 64.0
"""Counts as so many block maxima. Theory has a slope of 1 and a location near log of the ticks of a block over `TAIL_SHARE`."""


@dataclass(slots=True)
class LevelShifts:
    """State for M metrics, N machines and the K lengths."""

    num_metrics: int
    num_machines: int
    sums: Floats = field(init=False)  # (K, M, N): W, as the next four
    levels: Floats = field(init=False)  # mean deviations
    states: Floats = field(init=False)  # level and noise together, were there this shift
    innovations: Floats = field(init=False)  # e'
    ages: Floats = field(init=False)  # ticks since W began to rise
    maxima: Floats = field(init=False)  # (K, M, N): of this block
    location: Floats = field(init=False)  # (K, M, 1)
    beta: Floats = field(init=False)  # (K, M, 1)
    blocks: deque[Floats] = field(default_factory=deque)  # each (K, M, machines)
    old_blocks: int = 0  # of sums that meant something else
    size_min: int = 0
    known: NDArray[np.bool_] = field(init=False)  # (M, N): one tick ago

    def __post_init__(self) -> None:
        k, m, n = len(LENGTHS), self.num_metrics, self.num_machines
        zeros = np.zeros((k, m, n), dtype=np.float32)
        self.sums, self.levels, self.states, self.innovations = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        self.ages, self.maxima = zeros.copy(), zeros.copy()
        self.location = np.full((k, m, 1), LOCATION_PRIOR, dtype=np.float32)
        self.beta = np.full((k, m, 1), BETA_PRIOR, dtype=np.float32)
        self.known = np.zeros((m, n), dtype=np.bool_)

    def correct(self, amount: Floats) -> None:
        """So much of the last deviations, (M, N), is explained by now, and foretells nothing."""
        amount = amount * self.known
        self.states -= amount
        self.innovations -= amount

    def tick(self, low: Floats, high: Floats, known: NDArray[np.bool_], new: Innovations, past: Whitening) -> Floats:
        """Scores (M, N). `low`, `high`, `known`: (M, N), as `past` had them for what is `new`."""
        usual = past.surprise(new.size)
        alone = (np.minimum(past.rarity, np.float32(RARITY_MAX)) - np.float32(RARITY_COST)) * new.paired
        limit = past.limit(new.unit)
        for k, length in enumerate(LENGTHS):
            mean = self.levels[k]
            level = np.copysign(np.maximum(np.abs(mean), np.float32(LEVEL_MIN)), mean)
            forecast = level + past.rho * (self.states[k] - level) - past.theta * self.innovations[k]
            e = np.maximum(low - forecast, 0) + np.minimum(high - forecast, 0)
            ratio = (usual - past.surprise(e / new.unit)) * new.paired
            total = self.sums[k] * np.float32(MEMORY) + np.minimum(ratio, np.float32(RATIO_MAX))
            self.ages[k] = np.where((alone > total) | (total < SUM_BEGUN), 1, self.ages[k] + 1)
            np.clip(np.maximum(total, alone), 0, np.float32(SUM_MAX), out=self.sums[k])
            tame = np.clip(e, -limit, limit) * known
            self.states[k] = np.where(known & ~past.white, np.clip(forecast, low, high), forecast + tame)
            self.innovations[k] = tame
            mean += np.float32(1 - math.exp(-1 / length)) * (new.clean - mean) * known
        self.known = known
        np.maximum(self.maxima, self.sums, out=self.maxima)
        score = ((self.sums - self.location) / self.beta).max(axis=0) - np.float32(math.log(TAIL_SHARE))
        return np.asarray(np.maximum(score, 0), dtype=np.float32)

    def age(self, metric: int, machine: int) -> int:
        """Ticks since the shift began, by the test that is surest of it (Page's estimate of the moment of change)."""
        scores = (self.sums[:, metric, machine] - self.location[:, metric, 0]) / self.beta[:, metric, 0]
        return int(self.ages[scores.argmax(), metric, machine])

    def end_block(self) -> Floats:
        """The block's maxima, (K, M, N); the next begins."""
        maxima = self.maxima.copy()
        self.maxima[:] = 0.0
        return maxima

    def renew(self, size_min: int) -> None:
        """From now on the sums are of models that know their metrics, and are lower: block maxima from before count only
        until there are `size_min` new ones."""
        self.old_blocks, self.size_min = len(self.blocks), size_min

    def learn(self, maxima: Floats) -> None:
        """The tails, from an earlier block's maxima of healthy machines, (K, M, machines)."""
        if maxima.shape[2] == 0:
            return
        self.blocks.append(maxima[:, :, :: -(-maxima.shape[2] // MACHINES_KEPT)].copy())  # not a view of all
        if self.old_blocks and sum(b.shape[2] for b in list(self.blocks)[self.old_blocks :]) >= self.size_min:
            for _ in range(self.old_blocks):
                self.blocks.popleft()
            self.old_blocks = 0
        if len(self.blocks) > BLOCKS_KEPT:
            self.blocks.popleft()
            self.old_blocks = max(0, self.old_blocks - 1)
        sample = np.concatenate(self.blocks, axis=2)
        size = sample.shape[2]
        num = int(TAIL_SHARE * size)
        skipped = max(1, math.ceil(SKIPPED_SHARE * size))
        if num - skipped < SPACINGS_MIN:
            return
        location, used = spacings(sample, num, skipped)
        beta = used.mean(axis=2) * (1 + 1 / math.sqrt(used.shape[2]))
        beta = np.maximum(beta, used[:, :, : max(SPACINGS_MIN, int(num * FAR_SHARE))].mean(axis=2))
        own = size / (size + PRIOR_WEIGHT)
        location = np.maximum(own * location + (1 - own) * LOCATION_PRIOR, LOCATION_MIN)
        self.location = location[:, :, None].astype(np.float32)
        self.beta = np.maximum(own * beta + (1 - own) * BETA_PRIOR, BETA_MIN)[:, :, None].astype(np.float32)

    def forget(self, machines: NDArray[np.bool_]) -> None:
        """Tests of these begin anew, (N,): what they remember is over and told."""
        self.sums[:, :, machines] = 0.0
