"""Channel `shift`: a machine differs from its peers more than usual, for long enough, in any metric.

`following` gives the distance of each value from the machine's usual level among its peers, `whitening` the part of it
that its past did not predict, `LevelShifts` the likelihood of a level shift. A machine has two scores: that of its
strongest metric, and the same plus `OTHERS_SHARE` of the next ones, since a fault often affects several metrics.
Metrics of one machine are correlated even when it is healthy, so the others count for less.

Level shifts: cumulative log likelihood ratios, and their healthy tails. The null hypothesis is the forecast of
`whitening`. The alternative is that since some time everything is higher by h; then the noise around the new level is
predicted from its own past,

    forecast = h + rho (z(t-1) - h) - theta e'(t-1),

with its own innovations e'. Each tick adds the log likelihood ratio of the two under the metric's Student t,

    W(t) = max(0, W(t-1) + log f(e') - log f(e), rarity of e),

which is Page's CUSUM (1954) with h estimated from earlier ticks only (Robbins and Siegmund 1974: a plug-in that keeps
exp(W) a supermartingale between restarts, so that P(W > w) falls like exp(-w) whatever the metric's noise). h is the
mean deviation of the last `LENGTHS` ticks, one test each: short ones detect steps at once, long ones detect small
shifts. It is at least the size that means over 36 ticks of healthy machines occasionally reach (`_least`): smaller
shifts are irrelevant, and with them the ratio would never fall. The jump itself cannot be predicted from earlier ticks;
it counts by how rare an innovation of its size is in this metric: with heavy tails it counts little, and only a
persistent shift adds to it. A machine that stayed at its level while its peers moved may be faulty, but often the peers
soon return: its evidence grows more slowly. Intermittent shifts end before W is high: the part of their W beyond that
of healthy metrics counts when they recur (`earlier`), at most as much as the evidence since.

Models are never exact. For each metric and length, the healthy block maxima of all machines are kept, and their tail is
taken as exponential above its `TAIL_SHARE` highest, with slope at least 1:

    score = -log P(block > W) = (W - location) / beta - log TAIL_SHARE.
"""

import itertools
import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.elementwise import Elementwise, clip, helper, higher, lower, where
from rolecall.detector.panels.sequential.following import MACHINES_KEPT, PeerCorrelation
from rolecall.detector.panels.sequential.order import largest
from rolecall.detector.panels.sequential.tails import SPACINGS_MIN, TAIL_SHARE, spacings
from rolecall.detector.panels.sequential.whitening import Innovations, Whitening, limit, surprise

LENGTHS = (1, 6, 36)
"""Ticks."""
LEVEL_LENGTH = 1
"""Index of the length whose mean is reported as the deviation."""
LEVEL_MIN, LEVEL_MAX = 3.0, 6.0
"""Robust scales: bounds of the smallest shift tested. Evidence begins at half of that shift."""
LEVEL_QUANTILE, LEVEL_MARGIN = 0.98, 1.25
"""Quantile of the healthy block maxima of the longest mean, and the factor applied to it."""
LEVEL_PRIOR, LEVEL_WEIGHT = 5.5, 128.0
"""Assumed for a metric until enough is known of how far its healthy machines deviate for some ticks due to unequal
work; weighted as this many block maxima (docs/decisions/0019)."""
RATIO_MAX, RATIO_STAYED = 6.0, 1.0
"""Maximum increase per tick: 1 in 400; and for a machine that stayed while its peers moved."""
RARITY_MAX, RARITY_COST = 8.0, 1.0
"""Maximum contribution of an innovation by itself, and the deduction for the many possible onsets of a shift."""
MEMORY = 1 - 1 / 256
"""Decay factor of W per tick."""
STANDING_SHARE, STALE_MEMORY = 1 / 4, 1 - 1 / 36
"""Faster decay if neither of the longer means is this share of the smallest shift: where models are wrong (clock
errors, for example), both forecasts fail equally, and W would stay high without a shift."""
SUM_MAX = 300.0
SUM_BEGUN = 2.0
"""A shift is dated from when W was last below this, or a single tick outweighed all previous evidence."""

EPISODE_COST = 4.0
"""Deducted from the evidence that an episode leaves, in addition to the healthy level: some episodes are chance."""
EARLIER_MIN = 1e-3
"""Smaller values are set to 0: denormal float32 numbers are slow."""
BLOCKS_KEPT = 64
SKIPPED_SHARE = 0.01
"""The highest block maxima are ignored because they may be faults."""
FAR_SHARE = 1 / 3
"""The highest spacings of the tail also count separately if they are larger: some tails become heavier."""
LOCATION_PRIOR, LOCATION_MIN = 5.0, 5.0
BETA_PRIOR, BETA_MIN = 1.2, 1.0
PRIOR_WEIGHT = 64.0
"""Weighted as this many block maxima. Theory gives a slope of 1 and a location near the log of the ticks of a block
over `TAIL_SHARE`."""


class LevelShifts:
    """State for M metrics, N machines and the K lengths."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        k, m, n = len(LENGTHS), num_metrics, num_machines
        zeros = np.zeros((k, m, n), dtype=np.float32)
        # (K, M, N): W; mean deviations; level and noise together under this shift; e'; ticks since W began to rise
        self.sums, self.levels, self.states, self.innovations = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        self.ages = zeros.copy()
        self.maxima = np.zeros((k + 1, m, n), dtype=np.float32)  # of this block: of W, and of the absolute longest mean
        self.least = np.full((m, 1), LEVEL_PRIOR, dtype=np.float32)  # the smallest shift that is tested
        self.location = np.full((k, m, 1), LOCATION_PRIOR, dtype=np.float32)
        self.beta = np.full((k, m, 1), BETA_PRIOR, dtype=np.float32)
        self.known = np.zeros((m, n), dtype=np.bool_)  # of the previous tick
        self.explained = self.nothing = np.zeros((m, 1), dtype=np.float32)  # see `correct`: (M, N), or nothing
        # (M, N): the first W when this episode began, its maximum since; evidence left by earlier episodes, and ticks
        # since the first of those began
        self.trough, self.peak, self.earlier, self.since = (np.zeros((m, n), dtype=np.float32) for _ in range(4))
        self.blocks = deque[Floats]()  # each (K + 1, M, machines)
        self.old_blocks = 0  # of sums before `renew`
        self.size_min = 0

    def correct(self, amount: Floats) -> None:
        """`amount` (M, N): the part of the last deviations that is now explained, so it predicts nothing."""
        self.explained = amount

    def tick(
        self,
        low: Floats,
        high: Floats,
        known: NDArray[np.bool_],
        stayed: NDArray[np.bool_],
        new: Innovations,
        past: Whitening,
    ) -> Floats:
        """Scores (M, N). `low`, `high`, `known`: (M, N), as passed to `past` for `new`; `stayed` (M, N): machines away
        from their peers because the peers moved."""
        past_tests = zip(self.sums, self.levels, self.states, self.innovations, self.ages, strict=True)
        [score] = _shift.apply(
            self,
            (
                *itertools.chain.from_iterable(past_tests),
                *(*self.maxima, self.trough, self.peak, self.earlier, self.since, self.known),
            ),
            (low, high, known, stayed, new.size, new.unit, new.clean, new.paired, past.rarity, self.explained),
            (past.rho, past.theta, past.white, *past.density, self.least),
            (*self.location, *self.beta),
        )
        self.explained = self.nothing
        return score

    def age(self, metric: int, machine: int) -> int:
        """Ticks since the shift began, by the test with the most evidence (Page's estimate of the change point), or
        since its first episode, if much of the evidence is older."""
        if self.earlier[metric, machine] >= self.sums[0, metric, machine] / 2:
            return int(self.since[metric, machine])
        scores = (self.sums[:, metric, machine] - self.location[:, metric, 0]) / self.beta[:, metric, 0]
        return int(self.ages[scores.argmax(), metric, machine])

    def end_block(self) -> Floats:
        """Returns the block's maxima, (K + 1, M, N), and starts the next block."""
        maxima = self.maxima.copy()
        self.maxima[:] = 0.0
        return maxima

    def renew(self, size_min: int) -> None:
        """Called when models are established and sums become lower: earlier block maxima count only until there are
        `size_min` new ones."""
        self.old_blocks, self.size_min = len(self.blocks), size_min

    def learn(self, maxima: Floats) -> None:
        """Fits the tails and the smallest shifts to an earlier block's maxima of healthy machines, (K + 1, M,
        machines)."""
        if maxima.shape[2] == 0:
            return
        stride = -(-maxima.shape[2] // MACHINES_KEPT)
        self.blocks.append(maxima[:, :, ::stride].copy())  # to release the full array
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
        location, used = spacings(sample[:-1], num, skipped)
        beta = used.mean(axis=2) * (1 + 1 / math.sqrt(used.shape[2]))
        beta = np.maximum(beta, used[:, :, : max(SPACINGS_MIN, int(num * FAR_SHARE))].mean(axis=2))
        own = size / (size + PRIOR_WEIGHT)
        location = np.maximum(own * location + (1 - own) * LOCATION_PRIOR, LOCATION_MIN)
        self.location = location[:, :, None].astype(np.float32)
        self.beta = np.maximum(own * beta + (1 - own) * BETA_PRIOR, BETA_MIN)[:, :, None].astype(np.float32)
        self.least = self._least(sample[-1])

    @staticmethod
    def _least(standing: Floats) -> Floats:
        """The smallest shift tested, (M, 1), from healthy block maxima (M, S) of the longest mean."""
        usual = np.quantile(standing, LEVEL_QUANTILE, axis=1, keepdims=True)
        own = standing.shape[1] / (standing.shape[1] + LEVEL_WEIGHT)
        least = own * np.clip(LEVEL_MARGIN * usual, LEVEL_MIN, LEVEL_MAX) + (1 - own) * LEVEL_PRIOR
        return np.asarray(least, dtype=np.float32)

    def forget(self, machines: NDArray[np.bool_]) -> None:
        """Restarts the tests of these machines, (N,): their fault is over and reported."""
        self.sums[:, :, machines] = 0.0
        self.trough[:, machines] = self.peak[:, machines] = self.earlier[:, machines] = 0.0


NUM_METRICS_ADDED = 3
OTHERS_SHARE = 0.6
YOUNG_TICKS = 16
"""With fewer values of a metric, a machine's scale is too imprecise for the next stages."""
CALM_SCORE = 5.3
"""Of one metric: exceeded in one of 200 healthy blocks."""


class ShiftChannel:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int, share_min: Floats | None = None) -> None:
        """`share_min`: see `PeerCorrelation`."""
        m, n = num_metrics, num_machines
        self.following = PeerCorrelation(m, n, share_min)
        self.whitening, self.levels = Whitening(m, n), LevelShifts(m, n)
        self.edge = np.zeros((m, 1), dtype=np.bool_)  # of the previous tick
        self.scores = np.zeros((m, n), dtype=np.float32)

    def tick(
        self,
        residual: Floats,
        known: NDArray[np.bool_],
        middle: Floats,
        learning: NDArray[np.bool_],
        counted: NDArray[np.bool_],
        distinct: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Scores of the strongest metric and of the strongest few `distinct` (M,) ones together, (N,) each.

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
        apart = self.scores if distinct.all() else self.scores[distinct]
        top = largest(apart, min(NUM_METRICS_ADDED, len(apart)))
        return self.scores.max(axis=0), top[0] + np.float32(OTHERS_SHARE) * top[1:].sum(axis=0)

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


MEAN_RATES = tuple(np.float32(1 - math.exp(-1 / length)) for length in LENGTHS)


@helper
def _test(test: Any, rate: Any, now: Any, metric: Any, against: Any, explained: Any) -> tuple[Any, ...]:
    """One of the lengths."""
    total, mean, state, innovation, age = test
    low, high, known, _, _, unit, clean, paired, _, _ = now
    rho, theta, white, half, square, least = metric
    usual, alone, most, memory = against
    zero, one, largest = np.float32(0), np.float32(1), limit(unit, white)
    state, innovation = state - explained, innovation - explained
    level = where(mean < zero, lower(mean, -least), higher(mean, least))
    forecast = level + rho * (state - level) - theta * innovation
    e = higher(low - forecast, zero) + lower(high - forecast, zero)
    ratio = where(paired, usual - surprise(e / unit, half, square), zero)
    total = total * memory + lower(ratio, most)
    age = where((alone > total) | (total < np.float32(SUM_BEGUN)), one, age + one)
    total = clip(higher(total, alone), zero, np.float32(SUM_MAX))
    innovation = where(known, clip(e, -largest, largest), zero)
    state = where(known & ~white, clip(forecast, low, high), forecast + innovation)
    mean = mean + where(known, rate * (clean - mean), zero)
    return total, mean, state, innovation, age


@helper
def _episode(now: Any, age: Any, trough: Any, peak: Any, earlier: Any, since: Any, location: Any) -> tuple[Any, ...]:
    """Adds the evidence of an intermittent shift each time it ends. `now`, `age`: of the shortest length."""
    zero = np.float32(0)
    since = where(earlier < np.float32(SUM_BEGUN), age, since + np.float32(1))
    earlier = where(earlier > np.float32(EARLIER_MIN), earlier * np.float32(MEMORY), zero)
    peak = higher(peak, now)
    rise = peak - trough
    over = now < trough + rise / np.float32(2)
    left = where(over, higher(rise - location - np.float32(EPISODE_COST), zero), zero)
    earlier = lower(earlier + left, np.float32(SUM_MAX))
    return where(over, now, trough), where(over, now, peak), earlier, since


@Elementwise(np.float32)
def _shift(state: Any, now: Any, metric: Any, tail: Any) -> tuple[Any, ...]:
    sum0, mean0, state0, e0, age0, sum1, mean1, state1, e1, age1, sum2, mean2, state2, e2, age2 = state[:15]
    maximum0, maximum1, maximum2, farthest, trough, peak, earlier, since, known_before = state[15:]
    _, _, known, stayed, x, _, _, paired, rarity, explained = now
    _, _, _, half, square, least = metric
    location0, location1, location2, beta0, beta1, beta2 = tail
    zero = np.float32(0)
    usual = surprise(x, half, square)
    alone = where(paired & ~stayed, lower(rarity, np.float32(RARITY_MAX)) - np.float32(RARITY_COST), zero)
    most = where(stayed, np.float32(RATIO_STAYED), np.float32(RATIO_MAX))
    stands = higher(np.abs(mean1), np.abs(mean2)) >= np.float32(STANDING_SHARE) * least
    memory = where(stands, np.float32(MEMORY), np.float32(STALE_MEMORY))
    against = usual, alone, most, memory
    explained = where(known_before, explained, zero)
    sum0, mean0, state0, e0, age0 = _test(
        (sum0, mean0, state0, e0, age0), MEAN_RATES[0], now, metric, against, explained
    )
    sum1, mean1, state1, e1, age1 = _test(
        (sum1, mean1, state1, e1, age1), MEAN_RATES[1], now, metric, against, explained
    )
    sum2, mean2, state2, e2, age2 = _test(
        (sum2, mean2, state2, e2, age2), MEAN_RATES[2], now, metric, against, explained
    )
    trough, peak, earlier, since = _episode(sum0, age0, trough, peak, earlier, since, location0)
    again = lower(earlier, sum0 - trough)
    all0, all1, all2 = sum0 + again, sum1 + again, sum2 + again
    score = higher(higher((all0 - location0) / beta0, (all1 - location1) / beta1), (all2 - location2) / beta2)
    score = higher(score - np.float32(math.log(TAIL_SHARE)), zero)
    tests = sum0, mean0, state0, e0, age0, sum1, mean1, state1, e1, age1, sum2, mean2, state2, e2, age2
    maxima = higher(maximum0, all0), higher(maximum1, all1), higher(maximum2, all2), higher(farthest, np.abs(mean2))
    return tests + maxima + (trough, peak, earlier, since, known, score)
