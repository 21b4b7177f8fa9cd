"""Place among peers: is a machine's level farther from its peers' than healthy machines are from each other?

Needs no past: a machine that was slow from the first sample is found. For each metric and machine, the feature x is the
median of block means of the residual (to the peers' median), over a short and a long window: single ticks have heavy
tails, and means of them too. How far healthy machines stand apart, omega, is unknown: it has a log-normal prior in
units of the metric's noise over time, which the other metrics of the panel and the *other* machines of the metric
update (empirical Bayes; Efron 2010, ch. 1). The p-value of x is the posterior mean of its two-sided tail,

    p = sum over omega of P(omega | the others) * P(|t| > |x - centre of the others| / sqrt(omega^2 + noise^2)),

so that three machines prove little, and twelve much. Metrics are combined as the best one, two or three whose
residuals do not move together: the sum of their -log p has a gamma tail, times the number of such choices; or, where
many are somewhat far, by their number (Berk and Jones 1979). The error
budget is for the panel, not for each window: `FALSE_PANELS` in all, of which the k-th window may spend 1 / (k (k + 1)).
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.peer_scores import peer_median
from rolecall.detector.panels.sequential.following import MACHINES_KEPT, MAD_TO_SIGMA
from rolecall.detector.panels.sequential.learned_places import LearnedPlaces
from rolecall.detector.panels.sequential.priors import SPREADS
from rolecall.detector.panels.sequential.profile import UsualPlaces

Doubles = NDArray[np.float64]

BLOCK_TICKS = 4
"""Of the block means, and between evaluations."""
SHORT_BLOCKS, LONG_BLOCKS = 6, 24
START_BLOCKS = 4
WINDOW_TICKS = SHORT_BLOCKS * BLOCK_TICKS
FALSE_PANELS = 0.003
"""Healthy panels in which a machine is named, however long they last."""
EVALUATIONS = 2
"""In a row, before a machine is named."""
PRIOR_METRICS = 8.0
"""Weight of the prior against the panel's own metrics."""
PANEL_METRICS_MIN = 5
"""With fewer metrics, they do not change the prior."""
FREEDOM, FREEDOM_MANY, MACHINES_MANY = 8, 4, 32
"""Degrees of freedom of the tail of a window's median; with many machines, those of the offsets between them."""
P_MIN = 1e-9
ROBUST_MACHINES = 8
"""From this many on, centre and spread of the peers are the median and its deviation, at half the degrees of freedom;
with fewer, the mean and variance of all others."""
CORRELATED = 0.5
"""Two metrics whose residuals correlate by more count once."""
NUM_METRICS_SUMMED, NUM_METRICS_MAX, NUM_METRICS_SHOWN = 3, 24, 3
"""Metrics that are added up, that are counted, that are named."""
MEMORY_TICKS = 1000.0
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


class PeerPlace:
    """State for M metrics and N machines. `relative` (N,): evidence as a multiple of what is needed; above 1, a machine
    is out of place. `metrics`: those that say so, by machine."""

    def __init__(self, comparable: NDArray[np.bool_], num_machines: int, usual: UsualPlaces) -> None:
        """`comparable` (M,): metrics whose levels can be compared among peers."""
        self.comparable, self.usual = comparable, usual
        m, n = len(comparable), num_machines
        self.learned = LearnedPlaces(usual.learned_offsets)
        # Of residuals over time, (M, N): mean, variance, covariance of neighbouring ticks, the last one
        self.mean, self.variance, self.covariance, self.last = (np.zeros((m, n), dtype=np.float32) for _ in range(4))
        self.count = np.zeros((m, n), dtype=np.float32)
        self.level = np.zeros(m, dtype=np.float32)
        # Block means, in any order: (M, N, blocks)
        self.short = np.full((m, n, SHORT_BLOCKS), np.nan, dtype=np.float32)
        self.long = np.full((m, n, LONG_BLOCKS), np.nan, dtype=np.float32)
        self.block_sum, self.block_count = np.zeros((m, n), dtype=np.float32), np.zeros((m, n), dtype=np.float32)
        self.ticks = 0
        self.noise = np.zeros((m, 1), dtype=np.float32)  # standard deviation over time of the middle machine
        self.found_long = dict[int, tuple[float, list[int]]]()  # by the last long window: log p and metrics, by machine
        self.in_a_row = np.zeros(n, dtype=np.int64)
        self.relative = np.zeros(n, dtype=np.float32)
        self.metrics = dict[int, list[int]]()

    def tick(self, residual: Floats, known: NDArray[np.bool_], middle: Floats, counted: NDArray[np.bool_]) -> None:
        """`residual` (M, N), 0 where not `known` (M, N); `middle` (M,): the medians; `counted` (N,): peers."""
        self.ticks += 1
        self.level = np.maximum(self.level, np.abs(middle))
        self._learn(residual, known)
        self.block_sum += residual
        self.block_count += known
        if self.ticks % BLOCK_TICKS:
            return
        whole = self.block_count >= BLOCK_TICKS / 2
        block, mean = self.ticks // BLOCK_TICKS - 1, self.block_sum / np.maximum(self.block_count, 1)
        self.short[:, :, block % SHORT_BLOCKS] = self.long[:, :, block % LONG_BLOCKS] = np.where(whole, mean, np.nan)
        self.block_sum[:] = self.block_count[:] = 0
        if self.ticks >= START_BLOCKS * BLOCK_TICKS:
            self._evaluate(counted)

    def _learn(self, residual: Floats, known: NDArray[np.bool_]) -> None:
        away = residual - self.mean
        before = self.last - self.mean
        if self.ticks > 2 * BLOCK_TICKS:
            most = np.float32(OUTLIER) * self.noise + np.float32(1e-30)
            away, before = np.clip(away, -most, most), np.clip(before, -most, most)
        both = known & (self.count > 0)
        self.count += known
        rate = np.where(known, 1 / np.clip(self.count, 1, MEMORY_TICKS), 0).astype(np.float32)
        self.mean += rate * away
        rest = away * (1 - rate)
        self.variance += rate * (away * rest - self.variance)
        self.covariance += rate * both * (rest * before - self.covariance)
        np.copyto(self.last, residual, where=known)

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
        alike = self._alike(live)
        filled = self.ticks // BLOCK_TICKS
        found = [self._window(self.short, filled, live, variance, tau, counted, alike)]
        if filled > SHORT_BLOCKS:
            if filled % SHORT_BLOCKS == 0:  # it changes slowly
                self.found_long = self._window(self.long, filled, live, variance, tau, counted, alike)
            found.append(self.found_long)
        best, chosen = np.zeros(len(counted)), dict[int, list[int]]()
        for by_machine in found:
            for n, (log_p, metrics) in by_machine.items():
                if log_p < best[n]:
                    best[n], chosen[n] = log_p, metrics
        window_number = -(-self.ticks // WINDOW_TICKS)
        budget = FALSE_PANELS / (2 * window_number * (window_number + 1) * max(1, int(counted.sum())))
        relative = best / _misfit(best) / math.log(budget)
        self.in_a_row = np.where(relative > 1, self.in_a_row + 1, 0)
        held = np.where((relative > 1) & (self.in_a_row < EVALUATIONS), 1.0, relative)
        self.relative, self.metrics = held.astype(np.float32), chosen

    def _window(
        self,
        blocks: Floats,
        filled: int,
        live: NDArray[np.bool_],
        variance: Doubles,
        tau: Doubles,
        counted: NDArray[np.bool_],
        alike: NDArray[np.bool_],
    ) -> dict[int, tuple[float, list[int]]]:
        num = min(filled, blocks.shape[2])
        kept = blocks[live, :, :num]
        x = np.median(kept, axis=2)
        holes = np.isnan(x)
        if holes.any():
            some = holes & ~np.isnan(kept).all(axis=2)
            x[some] = np.nanmedian(kept[some], axis=1)
        noise = np.sqrt(variance[live])
        places = x / noise[:, None]
        window = np.minimum(1, 1.4 * tau[live] / (num * BLOCK_TICKS))
        numbers = np.flatnonzero(live)
        if filled % LONG_BLOCKS == 0 and num == LONG_BLOCKS:
            self.learned.look(numbers, places, window, counted)
        # A machine's usual offset counts where that of all its peers is known too.
        usual = self.usual.offsets[live]
        known = np.asarray(np.isfinite(usual[:, counted]).all(axis=1) & counted.any())
        places = np.where(known[:, None], places - usual, places)
        seen_before = np.where(known[:, None], self.usual.drift[live], self.usual.spread[live])
        found = _out_of_place(places, window, self.usual.prior[live], seen_before, counted, alike)
        return {n: (log_p, [int(numbers[m]) for m in metrics]) for n, log_p, metrics in found}

    def _alike(self, live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(L, L): pairs of live metrics whose residuals move together."""
        stride = -(-self.long.shape[1] // MACHINES_KEPT)
        blocks = self.long[live, ::stride, : self.ticks // BLOCK_TICKS]
        away = np.nan_to_num(blocks - self.mean[live, ::stride, None])
        flat = away.reshape(len(away), -1).astype(np.float64)
        norm = np.sqrt((flat * flat).sum(axis=1, keepdims=True)) + 1e-300
        flat = flat / norm
        pairs: NDArray[np.bool_] = np.abs(flat @ flat.T) > CORRELATED
        np.fill_diagonal(pairs, True)
        return pairs


def _out_of_place(
    x: Doubles,
    window: Doubles,
    log_prior: Doubles,
    seen_before: Doubles,
    counted: NDArray[np.bool_],
    alike: NDArray[np.bool_],
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
    variance = SPREADS**2 + window[:, None]  # (L, G)
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
    tail = _t_tail(away[:, :, None] / scale, FREEDOM if len(counted) < MACHINES_MANY else FREEDOM_MANY)
    p = np.where(known & (freedom > 0), (posterior * tail).sum(axis=2), 1.0)
    surprise = -np.log(np.maximum(p, P_MIN))
    num_metrics = max(1, round(len(x) ** 2 / float(alike.sum())))  # that move independently
    found = []
    for i, n in enumerate(candidates):
        log_p, metrics = _combined(surprise[:, i], alike, num_metrics)
        if log_p < 0:
            found.append((int(n), log_p, metrics))
    return found


def _misfit(log_p: Doubles) -> Doubles:
    """(N,) at least 1: how many times more evidence there is against a machine's peers than chance explains. Of N
    uniform p-values, the k-th smallest is near k / N; where it is much smaller, the model of what is usual is wrong."""
    evidence = -log_p
    num = len(evidence)
    k = min(NUM_BESIDE + 1, num - 1)
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


def _combined(surprise: Doubles, alike: NDArray[np.bool_], num_metrics: int) -> tuple[float, list[int]]:
    """log p of a machine from -log p of its metrics, (L,), and the metrics it is based on."""
    best: tuple[float, list[int]] = (0.0, [])
    taken: list[int] = []
    total = 0.0
    for m in np.argsort(-surprise, kind="stable"):
        if len(taken) == min(NUM_METRICS_MAX, num_metrics) or surprise[m] < math.log(2):
            break
        if any(alike[m, other] for other in taken):
            continue
        taken.append(int(m))
        total += float(surprise[m])
        kinds = NUM_METRICS_SUMMED if len(taken) <= NUM_METRICS_SUMMED else NUM_METRICS_MAX - NUM_METRICS_SUMMED
        log_p = _log_tail(len(taken), num_metrics, total, float(surprise[m])) + math.log(2 * kinds)
        if log_p < best[0]:
            best = (log_p, taken[:NUM_METRICS_SHOWN])
    return best


def _log_tail(k: int, num_metrics: int, total: float, least: float) -> float:
    """log P(the best `k` of so many metrics sum up to `total`, or all reach `least`), of -log p: the sum where few
    metrics are far, the number of them where many are (Berk and Jones 1979)."""
    choices = math.lgamma(num_metrics + 1) - math.lgamma(k + 1) - math.lgamma(num_metrics - k + 1)
    if k <= NUM_METRICS_SUMMED:
        return math.log(sum(total**j / math.factorial(j) for j in range(k))) - total + choices
    p = math.exp(-least)
    rest = num_metrics - k
    ratio = min(rest * p / ((k + 1) * (1 - p)), 0.9)  # of successive terms of the binomial tail
    return choices - k * least + rest * math.log1p(-p) - math.log1p(-ratio)
