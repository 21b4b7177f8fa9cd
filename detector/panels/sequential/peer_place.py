"""Place among peers: is a machine's level farther from its peers' than healthy machines are from each other?

Needs no past: a machine that was slow from the first sample is found. For each metric and machine, the feature x is the
median of block means of the residual (to the peers' median), over a short and a long window: single ticks have heavy
tails, and means of them too. How far healthy machines stand apart, omega, is unknown: it has a log-normal prior in
units of the metric's noise over time, which the other metrics of the panel and the *other* machines of the metric
update (empirical Bayes; Efron 2010, ch. 1). The p-value of x is the posterior mean of its two-sided tail,

    p = sum over omega of P(omega | the others) * P(|t| > |x - centre of the others| / sqrt(omega^2 + noise^2)),

so that three machines prove little, and twelve much. A machine that left its own level is found by the same test: x is
then the short window less the machine's own past, as far as it does not fade like the metric's noise, and omega, which
is smaller, is also learned from earlier changes.

Metrics are combined as the best one, two or three whose residuals do not move together: the sum of their -log p has a
gamma tail, times the number of such choices; or, where many are somewhat far, as the sum over all of them (Fisher 1932,
for correlated ones Brown 1975). Where no assumption fits, the peers show it: evidence counts relative to theirs of the
same kind (one odd metric of a peer says nothing of many), and evidence of changes also to that of earlier windows.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.peer_scores import peer_median
from rolecall.detector.panels.sequential.elementwise import Elementwise, clip, higher, where
from rolecall.detector.panels.sequential.following import MACHINES_KEPT
from rolecall.detector.panels.sequential.learned_places import LearnedPlaces
from rolecall.detector.panels.sequential.order import medians_of, middles, spread_of
from rolecall.detector.panels.sequential.priors import SPREADS, SpreadPrior
from rolecall.detector.panels.sequential.profile import UsualPlaces

Doubles = NDArray[np.float64]

BLOCK_TICKS = 4
"""Of the block means, and between evaluations."""
SHORT_BLOCKS, LONG_BLOCKS = 6, 24
START_BLOCKS = 4
WINDOW_TICKS = SHORT_BLOCKS * BLOCK_TICKS
FALSE_PANELS = 0.02
"""Share of healthy panels in which a machine is named for its place in the first window; in the k-th, a k-th."""
FALSE_CHANGES = 0.0004
"""Share of healthy panels in which a machine is named for a change, for each window; at most half of the requested
rate. The tails are heavier than Gaussian ones, so that on Gaussian noise far fewer are named."""
CHANGE_PRIOR = SpreadPrior(median=0.3, width=1.0, uniform=0.02)
"""Of changes of healthy machines, in units of the noise: less than their places, which include constant offsets."""
CHANGE_FREEDOM_MAX = 40.0
"""Weight of the changes so far, degrees of freedom: older ones fade."""
USUAL_WEIGHT, USUAL_MEAN = 8.0, 0.3
"""Evidence of changes that healthy machines show by chance, nats a window, and the weight of this assumption."""
EVALUATIONS = 2
"""In a row, before a machine is named."""
PRIOR_METRICS = 8.0
"""Weight of the prior against the panel's own metrics."""
PANEL_METRICS_MIN = 5
"""A panel with fewer metrics does not change the prior of spreads."""
FREEDOM, FREEDOM_CHANGE, FREEDOM_MANY, MACHINES_MANY = 12, 6, 4, 32
"""Degrees of freedom of the tail of a window's median, and of its change; with many machines, those of the offsets
between them."""
P_MIN = 1e-9
ROBUST_MACHINES = 8
"""From this many on, centre and spread of the peers are the median and its deviation, at half the degrees of freedom;
with fewer, the mean and variance of all others."""
CORRELATED, DUPLICATE = 0.5, 0.95
"""Two metrics whose residuals correlate by more: are not added up; are the same metric twice."""
NUM_METRICS_SUMMED = 3
"""Metrics that are added up if few are far."""
BROAD_MAX = 5.0
"""Where many are somewhat far, all count, each for at most so many nats."""
MEMORY_TICKS = 1000.0
BURSTY, RESTLESS_MAX = 0.25, 100.0
"""Share of the level from which on noise shows how much work there is; maximum of `_restless`."""
SPREAD_MIN = 0.25
"""Units of the noise: smaller differences between machines do not matter, however constant they are."""
OUTLIER = 6.0
"""In units of the noise: limits the effect of one tick on it."""
PHI_MAX, RHO_MAX = 0.97, 0.9
NUM_BESIDE, BESIDE_WEIGHT = 2, 1.5
"""Of a machine's peers, so many may be out of place too: that of the next shows how well p-values fit. The weight of
the assumption that they do, in nats."""
FAR_RANK = 3
"""With many machines, the next after so many farthest ones shows how far a metric's tail reaches."""
CANDIDATES = 64
"""Machines examined: the farthest ones."""
UNITS_MAX = np.float32(1e15)
"""Larger distances are clipped: float32 ends at 1e38, and their squares are needed."""
EXPONENT_MAX = 700.0
"""Exponentials of larger values overflow."""
LEVEL_SHARE_MIN = 1e-3
"""Minimum noise as a share of the metric's level: smaller differences are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """`pairs` (L, L): of metrics whose residuals move together. `num_distinct`: clusters of these. `weight`: number of
    independent metrics whose mean would be as uncertain as that of all (Brown 1975). `rho` (L, 1): autocorrelation of
    the block means of the middle machine."""

    pairs: NDArray[np.bool_]
    rho: Floats
    num_distinct: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`log_p` of a machine's place, by few of its metrics or by all. `metrics`: the first of them."""

    machine: int
    many: bool
    log_p: float
    metrics: list[int]


class PeerPlace:
    """State for M metrics and N machines. `relative` (N,): evidence as a multiple of what is needed; above 1, a machine
    is out of place. `metrics`: the metrics behind it, by machine. `changed` (N,): the machine has left its own level.
    `distinct` (M,): metrics that are not duplicates of an earlier one."""

    def __init__(self, num_metrics: int, num_machines: int, usual: UsualPlaces, false_per_tick: float) -> None:
        """`false_per_tick`: false alarms of one machine that were requested."""
        self.usual = usual
        m, n = num_metrics, num_machines
        self.learned = LearnedPlaces(usual.learned_offsets)
        # Of residuals over time, (M, N): mean, variance, covariance of neighbouring ticks, the last one, and that less
        # the mean
        self.mean, self.variance, self.covariance, self.last, self.last_away = (
            np.zeros((m, n), dtype=np.float32) for _ in range(5)
        )
        self.count = np.zeros((m, n), dtype=np.float32)
        self.step = np.zeros((m, n), dtype=np.float32)  # mean absolute difference of neighbouring ticks
        self.usual_level = np.zeros((m, 1), dtype=np.float32)  # mean of the medians
        self.level = np.zeros(m, dtype=np.float32)
        # Block means, in any order: (blocks, M, N)
        self.short = np.full((SHORT_BLOCKS, m, n), np.nan, dtype=np.float32)
        self.long = np.full((LONG_BLOCKS, m, n), np.nan, dtype=np.float32)
        self.block_sum, self.block_count = np.zeros((m, n), dtype=np.float32), np.zeros((m, n), dtype=np.float32)
        self.ticks = 0
        # Of block means older than the short window, (M, N): mean and number
        self.past_mean, self.past_count = np.zeros((m, n), dtype=np.float32), np.zeros((m, n), dtype=np.float32)
        # Of changes of healthy machines so far, (M,): sum of squares, squared units, and degrees of freedom
        self.change_squares, self.change_freedom = np.zeros(m), np.zeros(m)
        self.distinct = np.ones(m, dtype=np.bool_)  # (M,): not a duplicate of an earlier metric
        self.unit = np.zeros((m, n), dtype=np.float32)  # of places and changes
        self.noise = np.zeros((m, 1), dtype=np.float32)  # standard deviation over time of the middle machine
        self.found_long = list[Evidence]()  # by the last long window
        # Of change evidence, nats: the highest of this window, and the sum over earlier ones, (N,)
        self.change_peak, self.change_sum, self.num_changes = np.zeros(n), np.zeros(n), 0
        self.false_changes = min(FALSE_CHANGES, false_per_tick * n * WINDOW_TICKS / 2)
        self.changed = np.zeros(n, dtype=np.bool_)
        self.in_a_row = np.zeros(n, dtype=np.int64)
        self.relative = np.zeros(n, dtype=np.float32)
        self.metrics = dict[int, list[int]]()

    def tick(
        self,
        residual: Floats,
        known: NDArray[np.bool_],
        middle: Floats,
        counted: NDArray[np.bool_],
        comparable: NDArray[np.bool_],
    ) -> None:
        """`residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `counted` (N,): peers;
        `comparable` (M,): metrics whose levels can be compared among peers."""
        self.ticks += 1
        self.level = np.maximum(self.level, np.abs(middle))
        self.usual_level += (middle[:, None] - self.usual_level) / np.float32(min(self.ticks, MEMORY_TICKS))
        joined = (known & (self.count == 0)).any(axis=1) & (self.count > 0).any(axis=1)
        if joined.any():  # the median moves, and with it the residuals of all
            self.past_count[joined] = self.block_sum[joined] = self.block_count[joined] = 0
            self.short[:, joined] = self.long[:, joined] = math.nan
        self._learn(residual, known)
        if self.ticks % BLOCK_TICKS:
            return
        block = self.ticks // BLOCK_TICKS - 1
        self._age(block, counted)
        short, long = self.short[block % SHORT_BLOCKS], self.long[block % LONG_BLOCKS]
        _end_block.apply(self, (short, long, self.block_sum, self.block_count), ())
        if self.ticks >= START_BLOCKS * BLOCK_TICKS:
            self._evaluate(counted, comparable)

    def away(self, metric: int, machine: int) -> float:
        """Of a machine that is out of place: how far its last window is from the median of its peers, in units of the
        noise; if it `changed`, how much farther than before."""
        short, long = (
            _middle(np.ascontiguousarray(blocks[:, metric : metric + 1]))[0] for blocks in (self.short, self.long)
        )
        # The long window may name a machine that has not been seen lately.
        places = np.where(np.isfinite(short), short, long) - self.past_mean[metric] * self.changed[machine]
        peers = np.delete(places, machine)
        middle = np.median(peers[np.isfinite(peers)])
        return float((places[machine] - middle) / max(self.unit[metric, machine], 1e-30))

    def restart_past(self) -> None:
        """Present levels become the new past: of all machines, since the median moves with one that left its level."""
        self.past_count[:] = 0

    def _age(self, number: int, counted: NDArray[np.bool_]) -> None:
        """Block `number` begins: one leaves the short window for the past."""
        num_past = number - SHORT_BLOCKS + 1
        few = 0 < num_past <= LONG_BLOCKS - SHORT_BLOCKS
        block = self.short[number % SHORT_BLOCKS]
        past = _middle(self.long[:num_past]) if few else block  # or unused
        most = np.full_like(self.noise, math.inf) if few else np.float32(OUTLIER) * self.noise
        _age.apply(self, (self.past_mean, self.past_count), (block, past, counted), (most, most == math.inf))

    def _learn(self, residual: Floats, known: NDArray[np.bool_]) -> None:
        shared, shared_move = np.zeros_like(self.noise), np.zeros_like(self.noise)
        if residual.shape[1] < ROBUST_MACHINES:
            # Of few machines, one that leaves its level takes the median with it: what all do at once is not noise.
            both, unknown = known & (self.count > 0), np.float32(math.nan)
            shared = np.nan_to_num(peer_median(np.where(known, residual - self.mean, unknown)))
            shared_move = np.nan_to_num(peer_median(np.where(both, residual - self.last, unknown)))
        most = np.full_like(self.noise, math.inf)
        if self.ticks > 2 * BLOCK_TICKS:
            most = np.where(self.noise > 0, np.float32(OUTLIER) * self.noise, most)
        _learn.apply(
            self,
            (
                *(self.mean, self.variance, self.covariance, self.last, self.last_away, self.count, self.step),
                *(self.block_sum, self.block_count),
            ),
            (residual, known),
            (shared, shared_move, most),
        )

    def _evaluate(self, counted: NDArray[np.bool_], comparable: NDArray[np.bool_]) -> None:
        sampled = self.count > 0  # of a metric that only some machines have, only these count
        variance = medians_of(self.variance, sampled)[:, 0].astype(np.float64)
        self.noise = np.sqrt(variance)[:, None].astype(np.float32)
        live = comparable & (variance > 0)
        if not live.any():
            return
        phi = medians_of(self.covariance, sampled)[:, 0] / np.maximum(variance, 1e-30) + 2 / self.ticks
        tau = (1 + np.clip(phi, 0, PHI_MAX)) / (1 - np.clip(phi, 0, PHI_MAX))
        # A short recording shows only a part of slow noise.
        variance = variance / (1 - np.minimum(tau / self.ticks, 0.75))
        variance = np.maximum(variance, (LEVEL_SHARE_MIN * self.level.astype(np.float64)) ** 2)
        self.unit = self._unit(np.sqrt(variance)[:, None].astype(np.float32))
        alike = self._alike(live)
        filled = self.ticks // BLOCK_TICKS
        recent = stays = _middle(self.short[:filled], live)
        if filled > SHORT_BLOCKS:
            stays = self._new_level(live, alike.rho)
        found = [self._window(_nearest(recent, stays), min(filled, SHORT_BLOCKS), live, variance, tau, counted, alike)]
        if filled > SHORT_BLOCKS:
            if filled % SHORT_BLOCKS == 0:  # it changes slowly
                num_long = min(filled, LONG_BLOCKS)
                level = _middle(self.long[:num_long], live)
                if filled % LONG_BLOCKS == 0:
                    variance_of_mean = np.minimum(1, 1.4 * tau[live] / (LONG_BLOCKS * BLOCK_TICKS))
                    places = _in_units(level, self.unit[live])
                    self.learned.look(np.flatnonzero(live), places, variance_of_mean, counted)
                level = _nearest(level, recent)  # a machine that is back is in its place
                self.found_long = self._window(level, num_long, live, variance, tau, counted, alike)
            found.append(self.found_long)
        window_number = -(-self.ticks // WINDOW_TICKS)
        num = max(1, int(counted.sum()))
        needed = math.log(FALSE_PANELS / (2 * window_number * num))
        relative, chosen, _ = _strongest(itertools.chain(*found), np.ones(len(counted)), needed)
        if filled >= SHORT_BLOCKS + START_BLOCKS:
            changes = self._changes(recent, stays, live, variance, tau, counted, alike)
            needed = math.log(self.false_changes / num)
            changed, metrics, least = _strongest(changes, self._usual_change(), needed)
            self.change_peak = np.maximum(self.change_peak, -least * counted)
            if self.ticks % WINDOW_TICKS == 0:
                self.change_sum += self.change_peak
                self.num_changes += 1
                self.change_peak[:] = 0
            chosen |= {n: metrics[n] for n in metrics if changed[n] > relative[n]}
            relative, self.changed = np.maximum(relative, changed), changed > np.maximum(relative, 1)
        self.in_a_row = np.where(relative > 1, self.in_a_row + 1, 0)
        held = np.where((relative > 1) & (self.in_a_row < EVALUATIONS), 1.0, relative)
        self.relative, self.metrics = held.astype(np.float32), chosen

    def _unit(self, noise: Floats) -> Floats:
        """(M, N), of the noise (M, 1), times how much more than its peers a machine varies from tick to tick, where
        noise is large against the level. There, values show how much work there is at the moment, of which one machine
        may have all, and not how well a machine does it."""
        usual = np.maximum(medians_of(self.step, self.count > 0), np.float32(1e-30))
        bursty = self.noise > BURSTY * np.abs(self.usual_level)
        [unit] = _unit.apply(self, (), (self.step, self.mean), (noise, self.noise, usual, bursty, self.usual_level))
        return unit

    def _usual_change(self) -> Doubles:
        """(N,) at least 1: evidence of changes that the machine's peers showed in earlier windows, as a multiple of
        what chance explains."""
        others = max(1, len(self.change_sum) - 1)
        sums = (self.change_sum.sum() - self.change_sum) / others
        weight = USUAL_WEIGHT / others
        return np.asarray(np.maximum(1, (weight + sums) / (weight + self.num_changes * USUAL_MEAN)), dtype=np.float64)

    def _changes(
        self,
        recent: Floats,
        stays: Floats,
        live: NDArray[np.bool_],
        variance: Doubles,
        tau: Doubles,
        counted: NDArray[np.bool_],
        alike: Alike,
    ) -> list[Evidence]:
        """Of the short window against the machine's own past, among its peers."""
        numbers = np.flatnonzero(live)
        count, mean, unit = (x if live.all() else x[live] for x in (self.past_count, self.past_mean, self.unit))
        changes = _nearest(recent - mean, stays - mean)
        changes = _in_units(np.where(count >= START_BLOCKS, changes, np.float32(math.nan)), unit)
        num_past = medians_of(count, count > 0)[:, 0]
        window = np.minimum(1, 1.4 * tau[live] / WINDOW_TICKS)
        window = window + np.minimum(1, tau[live] / (BLOCK_TICKS * np.maximum(num_past, 1)))
        spreads = np.maximum(SPREADS, SPREAD_MIN) ** 2 + window[:, None]
        freedom, squares = self.change_freedom[live], self.change_squares[live] / variance[live]
        seen = -0.5 * freedom[:, None] * np.log(spreads) - squares[:, None] / (2 * spreads)
        prior = np.tile(CHANGE_PRIOR.log_prior(), (len(numbers), 1))
        found = _out_of_place(changes, window, prior, seen, counted, alike, FREEDOM_CHANGE)
        if self.ticks % WINDOW_TICKS == 0:
            there = np.isfinite(changes) & counted
            known = there.sum(axis=1) > 1
            spread = np.where(known, spread_of(changes, there, FAR_RANK)[1][:, 0], 0)
            added = np.where(known, np.clip((there.sum(axis=1) - 1) / 2, 0, CHANGE_FREEDOM_MAX), 0)
            keep = 1 - added / CHANGE_FREEDOM_MAX
            self.change_freedom[numbers] = self.change_freedom[numbers] * keep + added
            self.change_squares[numbers] = self.change_squares[numbers] * keep + added * spread**2 * variance[live]
        return [replace(e, metrics=[int(numbers[m]) for m in e.metrics]) for e in found]

    def _new_level(self, live: NDArray[np.bool_], rho: Floats) -> Floats:
        """(L, N): where the short window stands, by what its blocks add to what the ones before predict. A single jump
        of heavy-tailed noise, which fades, adds to one block; a lasting change to all."""
        last = self.ticks // BLOCK_TICKS - 1
        blocks = [self.long[(last - i) % LONG_BLOCKS][live] for i in range(SHORT_BLOCKS + 1)]
        return _middle(np.stack([(now - rho * before) / (1 - rho) for now, before in itertools.pairwise(blocks)]))

    def _window(
        self,
        x: Floats,
        num: int,
        live: NDArray[np.bool_],
        variance: Doubles,
        tau: Doubles,
        counted: NDArray[np.bool_],
        alike: Alike,
    ) -> list[Evidence]:
        """`x` (L, N): medians of the last `num` blocks."""
        places = _in_units(x, self.unit if live.all() else self.unit[live])
        window = np.minimum(1, 1.4 * tau[live] / (num * BLOCK_TICKS))
        numbers = np.flatnonzero(live)
        # A machine's usual offset counts where that of all its peers is known too.
        usual = self.usual.offsets[live]
        known = np.zeros(len(usual), dtype=np.bool_)
        if counted.any() and np.isfinite(usual[:, counted.argmax()]).any():
            known[:] = np.isfinite(usual).all(axis=1, where=counted)
        if known.any():
            places = np.where(known[:, None], places - usual, places).astype(np.float32)
        seen_before = np.where(known[:, None], self.usual.drift[live], self.usual.spread[live])
        freedom = FREEDOM if len(counted) < MACHINES_MANY else FREEDOM_MANY
        found = _out_of_place(places, window, self.usual.prior[live], seen_before, counted, alike, freedom)
        return [replace(e, metrics=[int(numbers[m]) for m in e.metrics]) for e in found]

    def _alike(self, live: NDArray[np.bool_]) -> Alike:
        stride = -(-self.long.shape[2] // MACHINES_KEPT)
        blocks = self.long[: self.ticks // BLOCK_TICKS, live, ::stride]
        known = np.isfinite(blocks)
        away = np.where(known, blocks - self.mean[live, ::stride], 0)
        flat = away.transpose(1, 0, 2).reshape(away.shape[1], -1).astype(np.float64)
        products = flat @ flat.T
        squares = np.diag(products) + 1e-300
        shared = products**2 / squares / squares[:, None]
        np.fill_diagonal(shared, 1)  # also of a metric that has not moved in these blocks
        # Few blocks correlate by chance: by 1 / freedom in the mean of the squares.
        freedom = max(2, int(np.median(known.sum(axis=(0, 2)))) - blocks.shape[2])
        beyond_chance = np.clip((shared - 1 / freedom) / (1 - 1 / freedom), 0, 1)
        self.distinct[:] = True
        if self.ticks >= WINDOW_TICKS:
            self.distinct[np.flatnonzero(live)[(np.triu(shared, 1) > DUPLICATE**2).any(axis=0)]] = False
        pairs: NDArray[np.bool_] = shared > CORRELATED**2
        num_distinct = (1 / beyond_chance.sum(axis=1)).sum()
        if away.shape[2] < ROBUST_MACHINES:
            away -= np.median(away, axis=2, keepdims=True)  # see `_learn`
        # In a ring of blocks one pair is not of neighbours.
        rho = (away[1:] * away[:-1]).sum(axis=0) / ((away * away).sum(axis=0) + np.float32(1e-30))
        rho = medians_of(rho, np.asarray(known.any(axis=0)))
        rho = np.clip(rho + np.float32(2 / len(away)), 0, np.float32(RHO_MAX))
        return Alike(
            rho=rho,
            pairs=pairs,
            num_distinct=max(1, math.ceil(num_distinct)),
            weight=len(flat) ** 2 / float(shared.sum()),
        )


def _middle(blocks: Floats, live: NDArray[np.bool_] | None = None) -> Floats:
    """Median of blocks (blocks, M, N) of the metrics that are `live`, (L, N); NaN where none is known."""
    return middles(blocks if live is None or live.all() else np.ascontiguousarray(blocks[:, live]))


def _nearest(x: Floats, y: Floats) -> Floats:
    """Of two distances (L, N) the smaller one; 0 if their signs differ, `x` where `y` is not known."""
    smaller = np.copysign(np.fmin(np.abs(x), np.abs(y)), x)
    return np.where(x * y < 0, np.float32(0), np.where(np.isnan(x), x, smaller))


def _in_units(x: Floats, unit: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.clip(x / unit, -UNITS_MAX, UNITS_MAX)


@Elementwise()
def _learn(state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    mean, variance, covariance, last, last_away, count, step, block_sum, block_count = state
    (residual, known), (shared, shared_move, most) = now, metric
    zero, one = np.float32(0), np.float32(1)
    both = known & (count > zero)
    size = clip(count, one, np.float32(MEMORY_TICKS))
    step = step + where(both, (np.abs(residual - last - shared_move) - step) / size, zero)
    raw, away = clip(residual - mean, -most, most), clip(residual - mean - shared, -most, most)
    count = count + where(known, one, zero)
    rate = where(known, one / clip(count, one, np.float32(MEMORY_TICKS)), zero)
    mean = mean + rate * raw
    rest = away * (one - rate)
    variance = variance + rate * (away * rest - variance)
    covariance = covariance + where(both, rate * (rest * last_away - covariance), zero)
    last, last_away = where(known, residual, last), where(known, rest, last_away)
    block_sum, block_count = block_sum + residual, block_count + where(known, one, zero)
    return mean, variance, covariance, last, last_away, count, step, block_sum, block_count


@Elementwise(np.float32)
def _unit(_state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    (step, mean), (unit, noise, usual, bursty, usual_level) = now, metric
    one = np.float32(1)
    times = clip(step / usual, one, np.float32(RESTLESS_MAX))
    bursty = bursty | (noise * times > np.float32(BURSTY) * np.abs(usual_level + mean))
    return (unit * where(bursty, times, one),)


@Elementwise()
def _end_block(state: Any, _now: Any) -> tuple[Any, ...]:
    """The first two become the mean of the block."""
    _, _, block_sum, block_count = state
    whole = block_count >= np.float32(BLOCK_TICKS / 2)
    mean = where(whole, block_sum / higher(block_count, np.float32(1)), np.float32(math.nan))
    return mean, mean, np.float32(0), np.float32(0)


@Elementwise()
def _age(state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    (mean, count), (block, past, counted), (most, few) = state, now, metric
    zero, one = np.float32(0), np.float32(1)
    usable = np.isfinite(block) & counted
    count = count + where(usable, one, zero)
    limit = where(count <= np.float32(START_BLOCKS), np.float32(math.inf), most)
    rate = one / clip(count, one, np.float32(MEMORY_TICKS / BLOCK_TICKS))
    aged = mean + rate * clip(block - mean, -limit, limit)
    return where(usable, where(few, past, aged), mean), count


def _strongest(
    found: Iterable[Evidence], usual: Doubles, needed: float
) -> tuple[Doubles, dict[int, list[int]], Doubles]:
    """(N,) the strongest evidence against each machine, as a multiple of what is `needed`, a log p; the metrics that it
    is based on; and (N,) the least log p. `usual` (N,): how many times more evidence there is than chance explains, at
    least. Evidence of few metrics and of many is compared with the peers' of the same kind."""
    log_p = np.zeros((2, len(usual)))
    metrics = dict[tuple[bool, int], list[int]]()
    for e in found:
        if e.log_p < log_p[int(e.many), e.machine]:
            log_p[int(e.many), e.machine], metrics[e.many, e.machine] = e.log_p, e.metrics
    relative = np.stack([of_kind / np.maximum(_misfit(of_kind), usual) for of_kind in log_p]) / needed
    many = relative[1] > relative[0]
    chosen = {n: metrics[bool(many[n]), n] for n in range(len(usual)) if (bool(many[n]), n) in metrics}
    return relative.max(axis=0), chosen, log_p.min(axis=0)


def _out_of_place(
    x: Floats,
    window: Doubles,
    log_prior: Doubles,
    seen_before: Doubles,
    counted: NDArray[np.bool_],
    alike: Alike,
    tail_freedom: int,
) -> list[Evidence]:
    """Against the machines farthest out of place. In units of the noise, `x` (L, N): features, NaN
    is unknown; `window` (L,): variance of a feature. Of SPREADS, (L, G): `log_prior`, and `seen_before`, the
    log-likelihood of this job's earlier recordings."""
    known = np.isfinite(x)
    peers = known & counted
    num = peers.sum(axis=1, keepdims=True)
    robust = x.shape[1] >= ROBUST_MACHINES
    candidates = np.arange(x.shape[1])
    with np.errstate(all="ignore"):
        if robust:
            centre, spread, farthest = spread_of(x, peers, FAR_RANK)
            # Of a metric with a heavy tail, many machines show how far it reaches.
            spread = np.maximum(spread, farthest / NormalDist().inv_cdf(1 - FAR_RANK / (2 * x.shape[1])))
            far = np.nan_to_num(np.fmax.reduce(np.abs(x - centre) / np.sqrt(spread**2 + 1).astype(x.dtype), axis=0))
            if len(candidates) > CANDIDATES:
                candidates = np.sort(np.argpartition(-far, CANDIDATES)[:CANDIDATES])
            x, known = x[:, candidates], known[:, candidates]
            others, freedom = np.maximum(num - 1, 1), np.maximum((num - 2) / 2, 0)  # the same for all
            squares = freedom * spread**2
        else:
            kept = np.where(peers, x, 0)
            total = kept.sum(axis=1, keepdims=True)
            others = num - peers
            centre = (total - kept) / np.maximum(others, 1)
            apart = np.where(peers, x - total / np.maximum(num, 1), 0)
            squares = (apart**2).sum(axis=1, keepdims=True) - apart**2 * num / np.maximum(num - 1, 1)
            squares = np.maximum(squares, 0)
            freedom = np.maximum(others - 1, 0)
    variance = np.maximum(SPREADS, SPREAD_MIN) ** 2 + window[:, None]  # (L, G)
    likelihood = -0.5 * freedom[:, :, None] * np.log(variance)[:, None] - squares[:, :, None] / (2 * variance[:, None])
    likelihood += seen_before[:, None]
    posterior = _normalized(likelihood + log_prior[:, None])
    if len(x) >= PANEL_METRICS_MIN:
        # What the panel's metrics say of omega, by machine, since each is judged by the others only; smoothed.
        seen = posterior.sum(axis=0)
        smooth = seen.copy()
        smooth[:, 1:] += seen[:, :-1] / 2
        smooth[:, :-1] += seen[:, 1:] / 2
        smooth *= seen.sum(axis=1, keepdims=True) / smooth.sum(axis=1, keepdims=True)
        renewed = (smooth + PRIOR_METRICS * np.exp(log_prior)[:, None]) / (len(x) + PRIOR_METRICS)  # (L, C, G)
        posterior = _normalized(likelihood + np.log(renewed))
    away = np.abs(np.where(known, x - centre, 0))
    scale = np.sqrt(variance[:, None] * (1 + 1 / np.maximum(others, 1))[:, :, None])
    tail = _t_tail(away[:, :, None] / scale, tail_freedom)
    p = np.where(known & (freedom > 0), (posterior * tail).sum(axis=2), 1.0)
    surprise = -np.log(np.maximum(p, P_MIN))
    return [e for i, n in enumerate(candidates) for e in _combined(int(n), surprise[:, i], alike) if e.log_p < 0]


def _misfit(log_p: Doubles) -> Doubles:
    """(N,) at least 1: how many times more evidence there is against a machine's peers than chance explains. Of N
    uniform p-values, the k-th smallest is near k / N; where it is much smaller, the model of what is usual is wrong."""
    evidence = -log_p
    num = len(evidence)
    k = min(NUM_BESIDE + 1, num // 2)
    ordered = np.sort(evidence)[::-1]
    # The k-th of the others: a machine that is among the first k makes room for the next.
    beside = np.where(evidence >= ordered[k - 1], ordered[k], ordered[k - 1])
    return np.asarray(np.maximum(1, (BESIDE_WEIGHT + beside) / (BESIDE_WEIGHT + math.log(num / k))), dtype=np.float64)


def _normalized(log_weight: Doubles) -> Doubles:
    weight = np.exp(log_weight - log_weight.max(axis=-1, keepdims=True))
    return np.asarray(weight / weight.sum(axis=-1, keepdims=True), dtype=np.float64)


def _t_tail(t: Doubles, freedom: int) -> Doubles:
    """Two-sided tail of Student's t with an even number of degrees of freedom (Abramowitz and Stegun 26.7.4)."""
    angle = t / math.sqrt(freedom)
    cosine_squared = 1 / (1 + angle * angle)
    term = np.ones_like(t)
    series = np.ones_like(t)
    for i in range(1, freedom // 2):
        term = term * cosine_squared * (2 * i - 1) / (2 * i)
        series += term
    return np.asarray(np.maximum(1 - angle * np.sqrt(cosine_squared) * series, P_MIN), dtype=np.float64)


def _combined(machine: int, surprise: Doubles, alike: Alike) -> tuple[Evidence, Evidence]:
    """Of few metrics and of many, from -log p of each, (L,)."""
    values = surprise.tolist()
    few = Evidence(machine=machine, many=False, log_p=0.0, metrics=[])
    taken: list[int] = []
    total = 0.0
    for m in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        if len(taken) == min(NUM_METRICS_SUMMED, alike.num_distinct) or values[m] < math.log(2):
            break
        if any(alike.pairs[m, other] for other in taken):
            continue
        taken.append(m)
        total += values[m]
        k, num = len(taken), alike.num_distinct
        choices = math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
        log_p = _log_gamma_tail(k, total) + choices + math.log(2 * NUM_METRICS_SUMMED)
        if log_p < few.log_p:
            few = replace(few, log_p=log_p, metrics=list(taken))
    weight, log_p = int(alike.weight), 0.0
    if weight > NUM_METRICS_SUMMED:
        log_p = _log_gamma_tail(weight, weight * sum(min(v, BROAD_MAX) for v in values) / len(values)) + math.log(2)
    return few, Evidence(machine=machine, many=True, log_p=min(log_p, 0.0), metrics=taken)


def _log_gamma_tail(k: int, total: float) -> float:
    """log P(the sum of `k` independent -log p > `total`)."""
    if total < EXPONENT_MAX:
        term = terms = 1.0
        for j in range(1, k):
            term *= total / j
            terms += term
        return math.log(terms) - total
    logs = np.arange(k) * math.log(total) - np.array([math.lgamma(j + 1) for j in range(k)])
    return float(np.logaddexp.reduce(logs)) - total
