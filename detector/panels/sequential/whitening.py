"""Whitening: innovations, the part of a metric that its own past does not predict, and how rare they are.

Metrics of machines are autocorrelated and heavy-tailed: a single outlier of twenty deviations that fades over half a
minute is common, and its plain average resembles a fault. Here each deviation z is compared with the forecast from its
past, under a model with a slow part and a white part,

    z = s + w,   s(t) = rho s(t-1) + u,   w white,

whose linear forecast is that of an ARMA(1,1) process, rho z(t-1) - theta e(t-1) (Box and Jenkins 1976, ch. 5). rho and
theta follow from autocovariances c0, c1, c2 of the metric over all machines: rho = c2 / c1 (an instrumental variable,
independent of w), the slow part's share of the variance is c1 / (rho c0), and theta is one minus the Kalman gain in the
steady state. After an outlier, its part is unknown: everything between "gone at once" and "fades as outliers of this
metric do" (`rho_far`) counts as expected. Where the white part dominates, outliers belong to it, and move the forecast
by a few units only.

Innovations e are in units of their robust size on that machine. Their distribution is learned over all machines of the
metric: as a Student t whose degrees of freedom and width follow from three quantiles (for likelihoods), and as counts
(for the rarity of the largest).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.elementwise import (
    Elementwise,
    at,
    clip,
    helper,
    higher,
    log,
    lower,
    where,
)
from rolecall.detector.panels.sequential.following import MACHINES_KEPT, MEAN_TO_SIGMA, POOLED_TICKS
from rolecall.detector.panels.sequential.order import row_medians

MEMORY_TICKS = 1000.0
"""Averaging time of sizes and autocovariances."""
SIZE_SHARE_MIN = 0.5
"""Minimum size of a machine's innovations as a share of its peers'."""
UNIT_SHARE_MIN = 0.8
"""Minimum size as a share of the size that the model implies for deviations of size 1: if bursts determine a metric's
scale, it is quiet between them, but bursts will recur."""
UNIT_MIN = 0.1
"""Absolute minimum: a constant or slowly drifting metric is not infinitely precise."""
SIZE_LIMIT = 3.0
"""In units: limits the effect of an outlier on the size."""
INSTRUMENT_MAX, RESPONSE_MAX = 3.0, 20.0
"""Limits of z in autocovariances: pairs with an earlier value beyond the first are ignored, since it may be a fault;
the later value is clipped to the second."""
RHO_MAX = 0.99
PHI_MIN = 0.05
"""With less autocorrelation, there is no slow part."""
RHO_TICKS = 64
"""With fewer ticks, lag 2 is not informative."""
RENEW_TICKS = 8
OUTLIER = 3.0
"""Units: a larger innovation may belong to either part."""
FAR = 5.0
"""Minimum deviation of a fading outlier."""
FAR_WEIGHT = 20.0
"""Weight of rho as a number of outliers of that size, until enough outliers of the metric have faded."""
FAR_MAX = 0.95
"""Upper bound of `rho_far`: a persistent large deviation must not be forecast, except for a plain random walk."""
WALK_THETA = 0.3
"""A random walk has a theta of less than this share of rho."""
WHITE_THETA, WHITE_RHO = 0.75, 0.85
"""The white part dominates if theta is at least this share of rho, and rho is at least the second value."""
SLACK = 0.02
"""Uncertainty of rho: applied to the part of a deviation beyond `INSTRUMENT_MAX`."""

BINS = 128
LOG_LOW, LOG_HIGH = math.log(0.01), math.log(1000)
HISTORY_TICKS = 4000.0
TABLE_TICKS = 32
SKIPPED_TICKS = 8
"""The first ticks have no scale yet."""
FREEDOM_YOUNG = 3.0
QUANTILES = (0.7, 0.96, 0.995)
"""Of |e|: the first gives the width, the heavier of its ratios to the others the degrees of freedom. Lower quantiles
are not usable, because an innovation within the expected interval is 0."""
WIDTH_MIN = 0.3
FREEDOMS = np.array([2, 2.5, 3, 4, 6, 10, 30.0])
STUDENT = np.array(
    [
        (1.3862, 4.8487, 14.089),
        (1.3017, 3.9555, 9.5281),
        (1.2498, 3.4819, 7.4533),
        (1.1896, 2.9985, 5.5976),
        (1.1342, 2.6122, 4.3168),
        (1.0931, 2.3593, 3.5814),
        (1.0547, 2.1470, 3.0298),
    ]
)
"""(degrees of freedom, quantile of |t|). A table, because importing `scipy` takes a second."""
_MIDDLES = np.exp(LOG_LOW + (np.arange(BINS) + 1) * (LOG_HIGH - LOG_LOW) / BINS)


class Innovations(NamedTuple):
    """All (M, N). `size`: signed, in units; `clean`: the value in the deviation's interval closest to the forecast;
    `paired`: there is a sample now, and was one within the previous two ticks."""

    size: Floats
    unit: Floats
    clean: Floats
    paired: NDArray[np.bool_]


class Whitening:
    """State for M metrics and N machines."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self.num_metrics, self.num_machines = m, n = num_metrics, num_machines
        self.ticks = 0
        column, zeros, no = np.zeros((m, 1), np.float32), np.zeros((m, n), np.float32), np.zeros((m, n), np.bool_)
        # (M, 1): parameters of the model, and whether its white part dominates
        self.rho, self.rho_far, self.theta = column, column.copy(), column.copy()
        self.far_max = np.full((m, 1), FAR_MAX, np.float32)
        self.white = np.zeros((m, 1), np.bool_)
        # (M, 1): the innovations' Student t; `width` in units
        self.freedom, self.width = np.full((m, 1), FREEDOM_YOUNG, np.float32), np.ones((m, 1), np.float32)
        self.state = zeros  # (M, N): z, or its forecast if there was no sample
        # (M, N); z1, known1: one tick ago, z2, known2: two ticks ago; `rarity`: of the last innovations, from `table`
        self.innovation, self.count, self.rarity = zeros.copy(), zeros.copy(), zeros.copy()
        self.z1, self.z2, self.known1, self.known2 = zeros.copy(), zeros.copy(), no, no.copy()
        self.explained = self.nothing = column.copy()  # see `correct`: (M, N), or nothing
        self.unit_size = np.full((m, n), 1 / MEAN_TO_SIGMA, np.float32)  # (M, N): mean |e|
        self.covariances = np.zeros((4, m), np.float32)  # c0 and c1 of lag 1, c1 and c2 of lag 2
        self.fades = np.zeros((2, m), np.float32)  # sums of z(t) z(t-1) and of z(t-1)^2 over outliers that have ended
        self.fading = np.zeros((2, m, len(range(n)[self._kept()])), np.float32)  # the same of outliers that have not
        self.pooled, self.unit_min = np.ones((m, 1), np.float32), np.full((m, 1), UNIT_MIN, np.float32)
        self.history = np.zeros((m, BINS))  # histogram of |e|
        self.table = np.zeros((m, BINS), np.float32)  # -log of the share of |e| that is as large

    def correct(self, amount: Floats) -> None:
        """`amount` (M, N): the part of the last deviations that is now explained, so it predicts nothing."""
        self.explained = amount

    def tick(
        self,
        low: Floats,
        high: Floats,
        known: NDArray[np.bool_],
        counted: NDArray[np.bool_],
        edge: NDArray[np.bool_],
    ) -> Innovations:
        """`low`, `high` (M, N): bounds of the deviations; `known` (M, N); learns from machines that are `counted` (N,),
        and not from metrics at an `edge` (M, 1)."""
        self.ticks += 1
        if self.ticks % RENEW_TICKS == 1 or self.ticks < TABLE_TICKS:
            self.pooled = row_medians(self.unit_size) * np.float32(MEAN_TO_SIGMA)
        state, known1, known2 = (self.state, self.innovation), self.known1, self.known2
        explained, self.explained = self.explained, self.nothing
        x, e, unit, clean, near, paired = _innovate.apply(
            self,
            (),
            (*state, self.unit_size, self.count, known1, known2, low, high, known, explained),
            (self.pooled, self.unit_min, self.rho, self.theta, self.rho_far, self.far_max, self.white),
        )
        kept = self._kept()
        used = known[:, kept] & known1[:, kept] & counted[kept] & ~edge
        self._count(x[:, kept], used)
        z1 = self.z1[:, kept] - np.where(known1[:, kept], explained[:, kept], 0)
        self._learn(clean[:, kept], z1, used, counted[kept])
        [self.rarity] = _advance.apply(
            self,
            (*state, self.z2, self.z1, known2, known1, self.unit_size, self.count),
            (x, e, unit, clean, near, paired, known, counted, explained),
            (edge, self.white, self.table),
        )
        return Innovations(x, unit, clean, paired)

    def surprise(self, x: Floats) -> Floats:
        """-log of the density of innovations `x` (M, N) in units, up to a constant of the metric."""
        return np.asarray(surprise(x, *self.density), dtype=np.float32)

    @property
    def density(self) -> tuple[Floats, Floats]:
        """Of the Student t, (M, 1) each: (freedom + 1) / 2, and freedom times the squared width."""
        return (self.freedom + np.float32(1)) / np.float32(2), self.freedom * self.width * self.width

    def _count(self, x: Floats, used: NDArray[np.bool_]) -> None:
        """Adds innovations in units, (M, kept), to the histogram."""
        if self.ticks > SKIPPED_TICKS:
            bins = _bin(x) + (BINS * np.arange(self.num_metrics, dtype=np.int32))[:, None]
            new = np.bincount(bins[used], minlength=self.history.size).reshape(self.history.shape)
            self.history *= np.where(new.any(axis=1, keepdims=True), 1 - 1 / HISTORY_TICKS, 1)
            self.history += new
        if self.ticks % TABLE_TICKS == 0:
            self._fit_distribution()

    def _fit_distribution(self) -> None:
        below = np.cumsum(self.history, axis=1)
        total = below[:, -1:]
        share = (total - below + self.history / 2 + 0.5) / (total + 1)
        self.table = np.where(total > 0, -np.log(share), 0).astype(np.float32)
        places = [np.minimum((below < q * np.maximum(total, 1e-9)).sum(axis=1), BINS - 1) for q in QUANTILES]
        first, *others = (_MIDDLES[p] for p in places)
        freedom = np.full(self.num_metrics, FREEDOMS[-1])
        for i, point in enumerate(others, start=1):
            ratios = STUDENT[:, i] / STUDENT[:, 0]  # decreases with the degrees of freedom
            freedom = np.minimum(freedom, np.interp(-point / first, -ratios, FREEDOMS))
        width = np.maximum(first / np.interp(freedom, FREEDOMS, STUDENT[:, 0]), WIDTH_MIN)
        self.freedom, self.width = freedom[:, None].astype(np.float32), width[:, None].astype(np.float32)

    def _kept(self) -> slice:
        return slice(None, None, -(-self.num_machines // MACHINES_KEPT))

    def _learn(self, z: Floats, z1: Floats, used: NDArray[np.bool_], counted: NDArray[np.bool_]) -> None:
        """Of the machines that are kept: `z`, `z1` before it, `used` (M, kept), `counted` (kept,)."""
        kept = self._kept()
        z2, used2 = self.z2[:, kept], used & self.known2[:, kept]
        num = np.maximum(1, used.sum(axis=1))
        # Only sampled metrics decay.
        gain = np.float32(max(1 / self.ticks, 1 / MEMORY_TICKS)) * used.any(axis=1)
        before = z1 * (used & (np.abs(z1) <= INSTRUMENT_MAX))
        before2 = z2 * (used2 & (np.abs(z2) <= INSTRUMENT_MAX))
        late, late1 = np.clip(z, -RESPONSE_MAX, RESPONSE_MAX), np.clip(z1, -RESPONSE_MAX, RESPONSE_MAX)
        pairs = ((before, late1), (before, late), (before2, late1), (before2, late))
        now = np.stack([(a * b).sum(axis=1) for a, b in pairs]) / num
        self.covariances += gain * (now.astype(np.float32) - self.covariances)
        self.fading *= counted  # nothing is learned from alarms
        far1, far2 = np.abs(z1) > FAR, np.abs(z2) > FAR
        self._follow_outliers(late, late1, used2 & far1 & far2, self.known1[:, kept] & ~far1)
        if self.ticks % RENEW_TICKS == 0 or self.ticks < TABLE_TICKS:
            self._fit_model()

    def _follow_outliers(self, z: Floats, z1: Floats, outside: NDArray[np.bool_], inside: NDArray[np.bool_]) -> None:
        """Learns how outliers fade, once they have ended: a persistent one may be a fault, and must not become
        expected."""
        self.fading[0] += z * z1 * outside
        self.fading[1] += z1 * z1 * outside
        over = inside & (self.fading[1] > 0)
        self.fades *= np.float32(1 - 1 / HISTORY_TICKS)
        if over.any():
            self.fades += np.where(over, self.fading, 0).sum(axis=2)
            self.fading *= ~over

    def _fit_model(self) -> None:
        c0, c1, d1, d2 = self.covariances
        phi = np.clip(c1 / np.maximum(c0, 1e-3), 0, RHO_MAX)
        rho = np.clip(d2 / np.maximum(d1, 1e-3), phi, RHO_MAX)
        rho = np.where((phi < PHI_MIN) | (self.ticks < RHO_TICKS), phi, rho)
        slow = phi / np.maximum(rho, 1e-3)  # share of the variance
        white, driven = 1 - slow, slow * (1 - rho**2)
        q = rho * white / np.maximum(driven + white * (1 + rho**2), 1e-6)
        theta = np.where(q > 1e-6, (1 - np.sqrt(np.maximum(1 - 4 * q**2, 0))) / np.maximum(2 * q, 1e-6), 0)
        weight = FAR_WEIGHT * FAR**2
        far = (self.fades[0] + weight * rho) / (self.fades[1] + weight)
        far_max = np.where(theta > WALK_THETA * rho, FAR_MAX, np.maximum(FAR_MAX, rho))
        far = np.minimum(np.maximum(rho, np.minimum(far, FAR_MAX)), far_max)
        implied = 1 / np.sqrt(1 + (rho - theta) ** 2 / (1 - rho**2))
        self.unit_min = np.maximum(UNIT_SHARE_MIN * implied, UNIT_MIN)[:, None].astype(np.float32)
        self.white = ((theta > WHITE_THETA * rho) & (rho >= WHITE_RHO))[:, None]
        self.rho, self.theta = rho[:, None].astype(np.float32), theta[:, None].astype(np.float32)
        self.rho_far, self.far_max = far[:, None].astype(np.float32), far_max[:, None].astype(np.float32)


@helper
def surprise(x: Any, half: Any, square: Any) -> Any:
    """`half`, `square`: see `Whitening.density`."""
    return half * log(square + x * x)


@helper
def limit(unit: Any, white: Any) -> Any:
    """Maximum effect of an innovation on the forecast."""
    return where(white, np.float32(OUTLIER) * unit, np.float32(math.inf))


@helper
def _bin(x: Any) -> Any:
    """The bin of the histogram for an innovation in units."""
    places = (log(np.abs(x) + np.float32(1e-6)) - np.float32(LOG_LOW)) * np.float32(BINS / (LOG_HIGH - LOG_LOW))
    return np.int32(clip(places, np.float32(0), np.float32(BINS - 1)))


@Elementwise(np.float32, np.float32, np.float32, np.float32, np.float32, np.bool_)
def _innovate(_state: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    state, innovation, unit_size, count, known1, known2, low, high, known, explained = now
    pooled, unit_min, rho, theta, rho_far, far_max, white = metric
    zero, infinite = np.float32(0), np.float32(math.inf)
    explained = where(known1, explained, zero)
    state, innovation = state - explained, innovation - explained
    weight = count / (count + np.float32(POOLED_TICKS))
    mixed = weight * (unit_size * np.float32(MEAN_TO_SIGMA)) + (np.float32(1) - weight) * pooled
    unit = higher(mixed, higher(np.float32(SIZE_SHARE_MIN) * pooled, unit_min))
    size = np.abs(state)
    outside = size > np.float32(FAR)
    bound = where(outside, far_max * size, infinite)
    near = clip(rho * state - theta * innovation, -bound, bound)
    unclear = ((np.abs(innovation) > np.float32(OUTLIER) * unit) | outside) & ~white
    far = where(unclear, where(outside, rho_far, rho) * state, near)
    least, most = lower(near, far), higher(near, far)
    least = where(unclear, lower(least, zero), least)
    most = where(unclear, higher(most, zero), most)
    slack = np.float32(SLACK) * higher(size - np.float32(INSTRUMENT_MAX), zero)
    e = where(known, higher(low - most - slack, zero) + lower(high - least + slack, zero), zero)
    # After a gap the forecast is weak: a difference is not evidence, but the forecast continues from it.
    return e / unit, e, unit, clip(near, low, high), near, known & (known1 | known2)


@Elementwise(np.float32)
def _advance(past: Any, now: Any, metric: Any) -> tuple[Any, ...]:
    _, _, _, z1, _, known1, unit_size, count = past
    x, e, unit, clean, near, paired, known, counted, explained = now
    edge, white, table = metric
    zero, one = np.float32(0), np.float32(1)
    used = known & known1 & counted & ~edge
    count = count + where(used, one, zero)
    gain = where(used, higher(one / higher(count, one), np.float32(1 / MEMORY_TICKS)), zero)
    unit_size = unit_size + gain * (lower(np.abs(e), np.float32(SIZE_LIMIT) * unit) - unit_size)
    most = limit(unit, white)
    tame = clip(e, -most, most)
    state = where(known, where(white, near + tame, clean), near)
    rarity = where(paired, at(table, _bin(x)), zero)
    return state, tame, z1 - where(known1, explained, zero), clean, known1, known, unit_size, count, rarity
