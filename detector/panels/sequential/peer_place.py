"""Place among peers: is a machine's level farther from its peers' than healthy machines are from each other?

Needs no past: a machine that was slow from the first sample is found. For each metric and machine, the feature x is the
median of block means of the residual (to the peers' median), over a short and a long window: single ticks have heavy
tails, and means of them too. How far healthy machines stand apart, omega, is unknown: it has a log-normal prior in
units of the metric's noise over time, which the other metrics of the panel and the *other* machines of the metric
update (empirical Bayes; Efron 2010, ch. 1). The p-value of x is the posterior mean of its two-sided tail,

    p = sum over omega of P(omega | the others) * P(|t| > |x - centre of the others| / sqrt(omega^2 + noise^2)),

so that three machines prove little, and twelve much. A machine that left its own level is found by the same test: x is
then the short window less the machine's own past, and omega, which is smaller, is also learned from earlier changes.

Metrics are combined as the best one, two or three whose residuals do not move together: the sum of their -log p has a
gamma tail, times the number of such choices; or, where many are somewhat far, as the sum over all of them (Fisher 1932,
for correlated ones Brown 1975). Where no assumption fits, the peers show it: evidence counts relative to theirs, and
evidence of changes also to that of earlier windows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.peer_scores import peer_median
from rolecall.detector.panels.sequential.following import MACHINES_KEPT, MAD_TO_SIGMA
from rolecall.detector.panels.sequential.learned_places import LearnedPlaces
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
FREEDOM, FREEDOM_CHANGE, FREEDOM_MANY, MACHINES_MANY = 8, 6, 4, 32
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
PHI_MAX = 0.97
NUM_BESIDE, BESIDE_WEIGHT = 2, 1.5
"""Of a machine's peers, so many may be out of place too: that of the next shows how well p-values fit. The weight of
the assumption that they do, in nats."""
FAR_RANK = 3
"""With many machines, the next after so many farthest ones shows how far a metric's tail reaches."""
CANDIDATES = 64
"""Machines examined: the farthest ones."""
LEVEL_SHARE_MIN = 1e-3
"""Minimum noise as a share of the metric's level: smaller differences are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """`pairs` (L, L): of metrics whose residuals move together. `num_distinct`: clusters of these. `weight`: number of
    independent metrics whose mean would be as uncertain as that of all (Brown 1975)."""

    pairs: NDArray[np.bool_]
    num_distinct: int
    weight: float


class PeerPlace:
    """State for M metrics and N machines. `relative` (N,): evidence as a multiple of what is needed; above 1, a machine
    is out of place. `metrics`: the metrics behind it, by machine. `changed` (N,): the machine has left its own level.
    `distinct` (M,): metrics that are not duplicates of an earlier one."""

    def __init__(
        self, comparable: NDArray[np.bool_], num_machines: int, usual: UsualPlaces, false_per_tick: float
    ) -> None:
        """`comparable` (M,): metrics whose levels can be compared among peers. `false_per_tick`: false alarms of one
        machine that were requested."""
        self.comparable, self.usual = comparable, usual
        m, n = len(comparable), num_machines
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
        # Block means, in any order: (M, N, blocks)
        self.short = np.full((m, n, SHORT_BLOCKS), np.nan, dtype=np.float32)
        self.long = np.full((m, n, LONG_BLOCKS), np.nan, dtype=np.float32)
        self.block_sum, self.block_count = np.zeros((m, n), dtype=np.float32), np.zeros((m, n), dtype=np.float32)
        self.ticks = 0
        # Of block means older than the short window, (M, N): mean and number
        self.past_mean, self.past_count = np.zeros((m, n), dtype=np.float32), np.zeros((m, n), dtype=np.float32)
        # Of changes of healthy machines so far, (M,): sum of squares, squared units, and degrees of freedom
        self.change_squares, self.change_freedom = np.zeros(m), np.zeros(m)
        self.distinct = np.ones(m, dtype=np.bool_)  # (M,): not a duplicate of an earlier metric
        self.unit = np.zeros((m, n))  # of places and changes
        self.noise = np.zeros((m, 1), dtype=np.float32)  # standard deviation over time of the middle machine
        self.found_long = dict[int, tuple[float, list[int]]]()  # by the last long window: log p and metrics, by machine
        # Of change evidence, nats: the highest of this window, and the sum over earlier ones, (N,)
        self.change_peak, self.change_sum, self.num_changes = np.zeros(n), np.zeros(n), 0
        self.false_changes = min(FALSE_CHANGES, false_per_tick * n * WINDOW_TICKS / 2)
        self.changed = np.zeros(n, dtype=np.bool_)
        self.in_a_row = np.zeros(n, dtype=np.int64)
        self.relative = np.zeros(n, dtype=np.float32)
        self.metrics = dict[int, list[int]]()

    def tick(self, residual: Floats, known: NDArray[np.bool_], middle: Floats, counted: NDArray[np.bool_]) -> None:
        """`residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `counted` (N,): peers."""
        self.ticks += 1
        self.level = np.maximum(self.level, np.abs(middle))
        self.usual_level += (middle[:, None] - self.usual_level) / np.float32(min(self.ticks, MEMORY_TICKS))
        joined = (known & (self.count == 0)).any(axis=1) & (self.count > 0).any(axis=1)
        if joined.any():  # the median moves, and with it the residuals of all
            self.past_count[joined] = self.block_sum[joined] = self.block_count[joined] = 0
            self.short[joined] = self.long[joined] = math.nan
        self._learn(residual, known)
        self.block_sum += residual
        self.block_count += known
        if self.ticks % BLOCK_TICKS:
            return
        whole = self.block_count >= BLOCK_TICKS / 2
        block, mean = self.ticks // BLOCK_TICKS - 1, self.block_sum / np.maximum(self.block_count, 1)
        self._age(block, counted)
        self.short[:, :, block % SHORT_BLOCKS] = self.long[:, :, block % LONG_BLOCKS] = np.where(whole, mean, np.nan)
        self.block_sum[:] = self.block_count[:] = 0
        if self.ticks >= START_BLOCKS * BLOCK_TICKS:
            self._evaluate(counted)

    def away(self, metric: int, machine: int) -> float:
        """Of a machine that is out of place: how far its last window is from the median of its peers, in units of the
        noise; if it `changed`, how much farther than before."""
        short, long = (_middle(blocks[[metric]])[0] for blocks in (self.short, self.long))
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
        block = self.short[:, :, number % SHORT_BLOCKS]
        usable = np.isfinite(block) & counted
        self.past_count += usable
        num_past = number - SHORT_BLOCKS + 1
        if 0 < num_past <= LONG_BLOCKS - SHORT_BLOCKS:
            np.copyto(self.past_mean, _middle(self.long[:, :, :num_past]), where=usable)
        else:
            rate = usable / np.clip(self.past_count, 1, MEMORY_TICKS / BLOCK_TICKS)
            most = np.where(self.past_count <= START_BLOCKS, np.inf, np.float32(OUTLIER) * self.noise)
            self.past_mean += (rate * np.clip(np.where(usable, block - self.past_mean, 0), -most, most)).astype(
                np.float32
            )

    def _learn(self, residual: Floats, known: NDArray[np.bool_]) -> None:
        both = known & (self.count > 0)
        raw = away = residual - self.mean
        moved = residual - self.last
        if residual.shape[1] < ROBUST_MACHINES:
            # Of few machines, one that leaves its level takes the median with it: what all do at once is not noise.
            away = away - np.nan_to_num(peer_median(np.where(known, away, np.float32(math.nan))))
            moved = moved - np.nan_to_num(peer_median(np.where(both, moved, np.float32(math.nan))))
        self.step += both * (np.abs(moved) - self.step) / np.clip(self.count, 1, MEMORY_TICKS)
        if self.ticks > 2 * BLOCK_TICKS:
            most = np.where(self.noise > 0, np.float32(OUTLIER) * self.noise, np.float32(np.inf))
            raw, away = np.clip(raw, -most, most), np.clip(away, -most, most)
        self.count += known
        rate = np.where(known, 1 / np.clip(self.count, 1, MEMORY_TICKS), 0).astype(np.float32)
        self.mean += rate * raw
        rest = away * (1 - rate)
        self.variance += rate * (away * rest - self.variance)
        self.covariance += rate * both * (rest * self.last_away - self.covariance)
        np.copyto(self.last, residual, where=known)
        np.copyto(self.last_away, rest, where=known)

    def _evaluate(self, counted: NDArray[np.bool_]) -> None:
        variance = np.median(self.variance, axis=1).astype(np.float64)
        self.noise = np.sqrt(variance)[:, None].astype(np.float32)
        live = self.comparable & (variance > 0)
        if not live.any():
            return
        phi = np.median(self.covariance, axis=1) / np.maximum(variance, 1e-30) + 2 / self.ticks
        tau = (1 + np.clip(phi, 0, PHI_MAX)) / (1 - np.clip(phi, 0, PHI_MAX))
        # A short recording shows only a part of slow noise.
        variance = variance / (1 - np.minimum(tau / self.ticks, 0.75))
        variance = np.maximum(variance, (LEVEL_SHARE_MIN * self.level.astype(np.float64)) ** 2)
        self.unit = np.sqrt(variance)[:, None] * self._restless()
        alike = self._alike(live)
        filled = self.ticks // BLOCK_TICKS
        found = [self._window(self.short, filled, live, variance, tau, counted, alike)]
        if filled > SHORT_BLOCKS:
            if filled % SHORT_BLOCKS == 0:  # it changes slowly
                self.found_long = self._window(self.long, filled, live, variance, tau, counted, alike)
            found.append(self.found_long)
        place, chosen = _best(found, len(counted))
        window_number = -(-self.ticks // WINDOW_TICKS)
        num = max(1, int(counted.sum()))
        relative = place / _misfit(place) / math.log(FALSE_PANELS / (2 * window_number * num))
        if filled >= SHORT_BLOCKS + START_BLOCKS:
            change, metrics = _best([self._changes(live, variance, tau, counted, alike)], len(counted))
            surprise = np.maximum(_misfit(change), self._usual_change())
            self.change_peak = np.maximum(self.change_peak, -change * counted)
            if self.ticks % WINDOW_TICKS == 0:
                self.change_sum += self.change_peak
                self.num_changes += 1
                self.change_peak[:] = 0
            changed = change / surprise / math.log(self.false_changes / num)
            chosen |= {n: metrics[n] for n in metrics if changed[n] > relative[n]}
            relative, self.changed = np.maximum(relative, changed), changed > np.maximum(relative, 1)
        self.in_a_row = np.where(relative > 1, self.in_a_row + 1, 0)
        held = np.where((relative > 1) & (self.in_a_row < EVALUATIONS), 1.0, relative)
        self.relative, self.metrics = held.astype(np.float32), chosen

    def _restless(self) -> Doubles:
        """(M, N) at least 1: how many times as much as its peers a machine varies from tick to tick, where noise is
        large against the level. There, values show how much work there is at the moment, of which one machine may have
        all, and not how well a machine does it."""
        usual = np.median(self.step, axis=1, keepdims=True)
        times = np.clip(self.step / np.maximum(usual, np.float32(1e-30)), 1, RESTLESS_MAX)
        own_level = np.abs(self.usual_level + self.mean)
        bursty = (self.noise > BURSTY * np.abs(self.usual_level)) | (self.noise * times > BURSTY * own_level)
        return np.where(bursty, times, 1).astype(np.float64)

    def _usual_change(self) -> Doubles:
        """(N,) at least 1: evidence of changes that the machine's peers showed in earlier windows, as a multiple of
        what chance explains."""
        others = max(1, len(self.change_sum) - 1)
        sums = (self.change_sum.sum() - self.change_sum) / others
        weight = USUAL_WEIGHT / others
        return np.asarray(np.maximum(1, (weight + sums) / (weight + self.num_changes * USUAL_MEAN)), dtype=np.float64)

    def _changes(
        self, live: NDArray[np.bool_], variance: Doubles, tau: Doubles, counted: NDArray[np.bool_], alike: Alike
    ) -> dict[int, tuple[float, list[int]]]:
        """Of the short window against the machine's own past, among its peers."""
        numbers = np.flatnonzero(live)
        recent = _middle(self.short[live])
        past = self.past_count[live] >= START_BLOCKS
        changes = np.where(past, recent - self.past_mean[live], math.nan) / self.unit[live]
        num_past = np.median(self.past_count[live], axis=1)
        window = np.minimum(1, 1.4 * tau[live] / WINDOW_TICKS)
        window = window + np.minimum(1, tau[live] / (BLOCK_TICKS * np.maximum(num_past, 1)))
        spreads = np.maximum(SPREADS, SPREAD_MIN) ** 2 + window[:, None]
        freedom, squares = self.change_freedom[live], self.change_squares[live] / variance[live]
        seen = -0.5 * freedom[:, None] * np.log(spreads) - squares[:, None] / (2 * spreads)
        prior = np.tile(CHANGE_PRIOR.log_prior(), (len(numbers), 1))
        found = _out_of_place(changes, window, prior, seen, counted, alike, FREEDOM_CHANGE)
        if self.ticks % WINDOW_TICKS == 0:
            there = np.isfinite(changes) & counted
            shown = np.where(there, changes, math.nan).astype(np.float32)
            known = there.sum(axis=1) > 1
            spread = np.where(
                known,
                np.nan_to_num(MAD_TO_SIGMA * peer_median(np.abs(shown - peer_median(shown)))[:, 0].astype(np.float64)),
                0,
            )
            added = np.where(known, np.clip((there.sum(axis=1) - 1) / 2, 0, CHANGE_FREEDOM_MAX), 0)
            keep = 1 - added / CHANGE_FREEDOM_MAX
            self.change_freedom[numbers] = self.change_freedom[numbers] * keep + added
            self.change_squares[numbers] = self.change_squares[numbers] * keep + added * spread**2 * variance[live]
        return {n: (log_p, [int(numbers[m]) for m in metrics]) for n, log_p, metrics in found}

    def _window(
        self,
        blocks: Floats,
        filled: int,
        live: NDArray[np.bool_],
        variance: Doubles,
        tau: Doubles,
        counted: NDArray[np.bool_],
        alike: Alike,
    ) -> dict[int, tuple[float, list[int]]]:
        num = min(filled, blocks.shape[2])
        kept = blocks[live, :, :num]
        x = _middle(kept)
        places = (x / self.unit[live]).astype(np.float64)
        window = np.minimum(1, 1.4 * tau[live] / (num * BLOCK_TICKS))
        numbers = np.flatnonzero(live)
        if filled % LONG_BLOCKS == 0 and num == LONG_BLOCKS:
            self.learned.look(numbers, places.astype(np.float32), window, counted)
        # A machine's usual offset counts where that of all its peers is known too.
        usual = self.usual.offsets[live]
        known = np.asarray(np.isfinite(usual[:, counted]).all(axis=1) & counted.any())
        places = np.where(known[:, None], places - usual, places)
        seen_before = np.where(known[:, None], self.usual.drift[live], self.usual.spread[live])
        freedom = FREEDOM if len(counted) < MACHINES_MANY else FREEDOM_MANY
        found = _out_of_place(places, window, self.usual.prior[live], seen_before, counted, alike, freedom)
        return {n: (log_p, [int(numbers[m]) for m in metrics]) for n, log_p, metrics in found}

    def _alike(self, live: NDArray[np.bool_]) -> Alike:
        stride = -(-self.long.shape[1] // MACHINES_KEPT)
        blocks = self.long[live, ::stride, : self.ticks // BLOCK_TICKS]
        away = np.nan_to_num(blocks - self.mean[live, ::stride, None])
        flat = away.reshape(len(away), -1).astype(np.float64)
        norm = np.sqrt((flat * flat).sum(axis=1, keepdims=True)) + 1e-300
        flat = flat / norm
        shared = (flat @ flat.T) ** 2
        np.fill_diagonal(shared, 1)  # also of a metric that has not moved in these blocks
        # Few blocks correlate by chance: by 1 / freedom in the mean of the squares.
        freedom = max(2, int(np.median(np.isfinite(blocks).sum(axis=(1, 2)))) - blocks.shape[1])
        beyond_chance = np.clip((shared - 1 / freedom) / (1 - 1 / freedom), 0, 1)
        self.distinct[:] = True
        if self.ticks >= WINDOW_TICKS:
            self.distinct[np.flatnonzero(live)[(np.triu(shared, 1) > DUPLICATE**2).any(axis=0)]] = False
        pairs: NDArray[np.bool_] = shared > CORRELATED**2
        num_distinct = (1 / beyond_chance.sum(axis=1)).sum()
        return Alike(
            pairs=pairs, num_distinct=max(1, math.ceil(num_distinct)), weight=len(flat) ** 2 / float(shared.sum())
        )


def _middle(blocks: Floats) -> Floats:
    """Median of blocks (L, N, blocks), (L, N); NaN where none is known."""
    x: Floats = np.median(blocks, axis=2)
    holes = np.isnan(x)
    if holes.any():
        some = holes & ~np.isnan(blocks).all(axis=2)
        x[some] = np.nanmedian(blocks[some], axis=1)
    return x


def _best(
    found: Sequence[Mapping[int, tuple[float, list[int]]]], num_machines: int
) -> tuple[Doubles, dict[int, list[int]]]:
    """(N,) the least log p of each machine, and the metrics it is based on."""
    best, chosen = np.zeros(num_machines), dict[int, list[int]]()
    for by_machine in found:
        for n, (log_p, metrics) in by_machine.items():
            if log_p < best[n]:
                best[n], chosen[n] = log_p, metrics
    return best, chosen


def _out_of_place(
    x: Doubles,
    window: Doubles,
    log_prior: Doubles,
    seen_before: Doubles,
    counted: NDArray[np.bool_],
    alike: Alike,
    tail_freedom: int,
) -> list[tuple[int, float, list[int]]]:
    """(machine, log p, metrics) of the machines farthest out of place. In units of the noise, `x` (L, N): features, NaN
    is unknown; `window` (L,): variance of a feature. Of SPREADS, (L, G): `log_prior`, and `seen_before`, the
    log-likelihood of this job's earlier recordings."""
    known = np.isfinite(x)
    peers = known & counted
    num = peers.sum(axis=1, keepdims=True)
    robust = x.shape[1] >= ROBUST_MACHINES
    candidates = np.arange(x.shape[1])
    with np.errstate(all="ignore"):
        if robust:
            shown = np.where(peers, x, np.nan)
            centre = np.nan_to_num(peer_median(shown))
            apart = np.abs(shown - centre)
            spread = np.nan_to_num(MAD_TO_SIGMA * peer_median(apart))
            # Of a metric with a heavy tail, many machines show how far it reaches.
            ordered = np.sort(np.where(peers, apart, 0), axis=1)[:, ::-1]
            spread = np.maximum(spread, ordered[:, [FAR_RANK]] / NormalDist().inv_cdf(1 - FAR_RANK / (2 * x.shape[1])))
            far = np.nan_to_num(np.abs(x - centre) / np.sqrt(spread**2 + 1)).max(axis=0)
            if len(candidates) > CANDIDATES:
                candidates = np.sort(np.argpartition(-far, CANDIDATES)[:CANDIDATES])
            x, known = x[:, candidates], known[:, candidates]
            others = np.broadcast_to(np.maximum(num - 1, 1), x.shape)
            freedom = np.broadcast_to(np.maximum((num - 2) / 2, 0), x.shape)
            squares = freedom * spread**2
            centre = np.broadcast_to(centre, x.shape)
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
    found = []
    for i, n in enumerate(candidates):
        log_p, metrics = _combined(surprise[:, i], alike)
        if log_p < 0:
            found.append((int(n), log_p, metrics))
    return found


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


def _combined(surprise: Doubles, alike: Alike) -> tuple[float, list[int]]:
    """log p of a machine from -log p of its metrics, (L,), and the metrics it is based on."""
    best: tuple[float, list[int]] = (0.0, [])
    taken: list[int] = []
    total = 0.0
    for m in np.argsort(-surprise, kind="stable"):
        if len(taken) == min(NUM_METRICS_SUMMED, alike.num_distinct) or surprise[m] < math.log(2):
            break
        if any(alike.pairs[m, other] for other in taken):
            continue
        taken.append(int(m))
        total += float(surprise[m])
        k, num = len(taken), alike.num_distinct
        choices = math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
        log_p = _log_gamma_tail(k, total) + choices + math.log(2 * NUM_METRICS_SUMMED)
        if log_p < best[0]:
            best = (log_p, list(taken))
    weight = int(alike.weight)
    if weight > NUM_METRICS_SUMMED:
        log_p = _log_gamma_tail(weight, weight * float(np.minimum(surprise, BROAD_MAX).mean())) + math.log(2)
        if log_p < best[0]:
            best = (log_p, taken)
    return best


def _log_gamma_tail(k: int, total: float) -> float:
    """log P(the sum of `k` independent -log p > `total`)."""
    terms = np.arange(k) * math.log(max(total, 1e-12)) - np.array([math.lgamma(j + 1) for j in range(k)])
    return float(np.logaddexp.reduce(terms)) - total
