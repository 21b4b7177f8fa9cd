"""What of a metric could not be foreseen from its own past: innovations, as normal scores.

Metrics of machines are autocorrelated and have heavy tails: a lone outlier of twenty deviations that fades over half a
minute is everyday life, and a plain average of it looks like a fault. Here each deviation z is compared with what its
past foretells, under the model of a slow part and a part that comes and goes,

    z = s + w,   s(t) = rho s(t-1) + u,   w white,

of which the linear forecast is that of an ARMA(1,1) process, rho z(t-1) - theta e(t-1) (Box and Jenkins 1976, ch. 5).
rho and theta follow from autocovariances c0, c1, c2 of the metric over all machines: rho = c2 / c1 (an instrumental
variable: w has no part in it), the slow part's share of the variance is c1 / (rho c0), and theta is the Kalman gain's
complement in the steady state. After an outlier nobody knows in which part it was: whatever lies between "gone at once"
and "fades as outliers of this metric do" (`rho_far`) was to be expected.

Innovations e, in units of their robust size on that machine, become normal scores by their rank among all that the metric
showed on any machine (van der Waerden 1952): what a heavy-tailed metric does every hour counts as little as it should,
and nothing counts more than `SCORE_MAX`, so that averages of them have light tails whatever the metric.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panel import Floats

MEMORY_TICKS = 1000.0
"""Of sizes and autocovariances."""
POOLED_TICKS = 100.0
"""A machine's own size counts as much as that of its peers after so many ticks."""
SIZE_SHARE_MIN = 0.5
"""No machine's innovations are taken as smaller than this share of its peers'."""
MEAN_TO_SIGMA = 1.2533
"""Standard deviation of a Gaussian over its mean absolute deviation."""
SIZE_LIMIT = 3.0
"""In units: what an outlier counts in the size."""
Z_MAX = 1e4
INSTRUMENT_MAX, RESPONSE_MAX = 3.0, 20.0
"""Of z in autocovariances: with an earlier value beyond the first it does not count, for that may be a fault; the later
ones are limited to the second."""
RHO_MAX = 0.99
PHI_MIN = 0.05
"""With less autocorrelation there is no slow part."""
RHO_TICKS = 64
"""Before so many ticks lag 2 says nothing."""
RENEW_TICKS = 8
OUTLIER = 3.0
"""Units: from here on an innovation may be of either part."""
FAR = 5.0
"""Deviation from which a value is an outlier that fades."""
FAR_WEIGHT = 20.0
"""rho counts as so many outliers of that size, until the metric has shown how its own fade."""
FAR_MAX = 0.95
RHO_SLOW = 0.97
"""With more the slow part is a wander over minutes, and no outlier is of it: more than `OUTLIER` units of an innovation do
not move its forecast."""
SLACK = 0.02
"""How far off rho may be: of the part of a deviation beyond `INSTRUMENT_MAX`."""

BINS = 128
LOG_LOW, LOG_HIGH = math.log(0.01), math.log(1000)
HISTORY_TICKS = 4000.0
TABLE_TICKS = 32
SKIPPED_TICKS = 8
"""The first ones have no scale yet."""
SCORE_MAX = 4.0
SCORE_YOUNG = 2.0
"""The limit before there is a history."""
MACHINES_KEPT = 256
"""Of large fleets so many machines, evenly spread, stand for all."""
_QUANTILE = NormalDist().inv_cdf


@dataclass(slots=True)
class Whitening:
    """State for M metrics and N machines."""

    num_metrics: int
    num_machines: int
    rho: Floats = field(init=False)  # (M, 1), as the next two
    rho_far: Floats = field(init=False)
    theta: Floats = field(init=False)
    square: Floats = field(init=False)  # (M,): mean square of the scores
    state: Floats = field(init=False)  # (M, N): z, or its forecast where there was none; as the next ones
    innovation: Floats = field(init=False)
    size: Floats = field(init=False)  # mean |e|
    count: Floats = field(init=False)
    known1: NDArray[np.bool_] = field(init=False)  # one tick ago
    known2: NDArray[np.bool_] = field(init=False)  # two ticks ago
    z1: Floats = field(init=False)
    z2: Floats = field(init=False)
    covariances: Floats = field(init=False)  # (4, M): c0 and c1 of lag 1, c1 and c2 of lag 2
    fades: Floats = field(init=False)  # (2, M): of outliers that are over, sum of z(t) z(t-1), and of z(t-1)^2
    fading: Floats = field(init=False)  # (2, M, machines kept): the same of those that are not
    pooled: Floats = field(init=False)  # (M, 1)
    history: NDArray[np.float64] = field(init=False)  # (M, BINS): how often |e| was how large
    table: Floats = field(init=False)  # (M, BINS): normal scores
    ticks: int = 0

    def __post_init__(self) -> None:
        m, n = self.num_metrics, self.num_machines
        column, zeros, no = np.zeros((m, 1), np.float32), np.zeros((m, n), np.float32), np.zeros((m, n), np.bool_)
        self.rho, self.rho_far, self.theta = column, column.copy(), column.copy()
        self.square = np.full(m, 0.8, np.float32)
        self.state, self.innovation, self.count = zeros, zeros.copy(), zeros.copy()
        self.z1, self.z2 = zeros.copy(), zeros.copy()
        self.size = np.full((m, n), 1 / MEAN_TO_SIGMA, np.float32)
        self.known1, self.known2 = no, no.copy()
        self.covariances, self.fades = np.zeros((4, m), np.float32), np.zeros((2, m), np.float32)
        self.fading = np.zeros((2, m, len(range(n)[self._kept()])), np.float32)
        self.pooled = np.ones((m, 1), np.float32)
        self.history = np.zeros((m, BINS))
        edges = np.exp(LOG_LOW + (np.arange(BINS) + 0.5) * (LOG_HIGH - LOG_LOW) / BINS)
        self.table = np.tile(np.minimum(edges, SCORE_YOUNG).astype(np.float32), (m, 1))

    def tick(self, z: Floats, known: NDArray[np.bool_], counted: NDArray[np.bool_]) -> Floats:
        """Scores (M, N), 0 where there is no sample or none before. `z`, `known`: (M, N); `counted` (N,): learned from."""
        self.ticks += 1
        z = np.clip(z, -Z_MAX, Z_MAX)
        unit = self._unit()
        near = self.rho * self.state - self.theta * self.innovation
        size = np.abs(self.state)
        slow = self.rho >= RHO_SLOW
        unclear = ((np.abs(self.innovation) > OUTLIER * unit) | (size > FAR)) & ~slow
        far = np.where(unclear, np.where(size > FAR, self.rho_far, self.rho) * self.state, near)
        low, high = np.minimum(near, far), np.maximum(near, far)
        low, high = np.where(unclear, np.minimum(low, 0), low), np.where(unclear, np.maximum(high, 0), high)
        slack = np.float32(SLACK) * np.maximum(size - np.float32(INSTRUMENT_MAX), 0)
        e = z - np.clip(z, low - slack, high + slack)
        e *= known
        pair = known & self.known1
        used = pair & counted
        scores = self._scores(e / unit, used)
        scores *= pair  # after a gap little is foretold: what differs is no news, and yet the forecast goes on from it
        self._learn(z, e, unit, scores, used, counted)
        self.known2, self.known1 = self.known1, known
        self.z2, self.z1 = self.z1, z
        limit = np.where(slow, np.float32(OUTLIER) * unit, np.float32(np.inf))
        tame = np.clip(e, -limit, limit)
        self.state = np.where(known, np.where(slow, near + tame, z), near)
        self.innovation = tame
        return scores

    def _unit(self) -> Floats:
        own = self.size * np.float32(MEAN_TO_SIGMA)
        if self.ticks % RENEW_TICKS == 1 or self.ticks < TABLE_TICKS:
            self.pooled = np.asarray(np.median(own, axis=1, keepdims=True), dtype=np.float32)
        weight = self.count / (self.count + np.float32(POOLED_TICKS))
        mixed = weight * own + (1 - weight) * self.pooled
        return np.asarray(np.maximum(mixed, np.float32(SIZE_SHARE_MIN) * self.pooled) + np.float32(1e-6))

    def _scores(self, x: Floats, used: NDArray[np.bool_]) -> Floats:
        """Normal scores of innovations in units, (M, N)."""
        places = (np.log(np.abs(x) + np.float32(1e-6)) - np.float32(LOG_LOW)) * np.float32(BINS / (LOG_HIGH - LOG_LOW))
        bins = np.clip(places, 0, BINS - 1).astype(np.int32)
        bins += (BINS * np.arange(self.num_metrics, dtype=np.int32))[:, None]
        if self.ticks > SKIPPED_TICKS:
            kept = self._kept()
            new = np.bincount(bins[:, kept][used[:, kept]], minlength=self.history.size)
            self.history *= 1 - 1 / HISTORY_TICKS
            self.history += new.reshape(self.history.shape)
        if self.ticks % TABLE_TICKS == 0:
            total = self.history.sum(axis=1, keepdims=True)
            beyond = total - np.cumsum(self.history, axis=1) + self.history / 2
            share = (beyond + 0.5) / (total + 1)
            table = np.reshape([_QUANTILE(1 - p / 2) for p in share.ravel()], share.shape)
            self.table = np.where(total > 0, np.minimum(table, SCORE_MAX), self.table).astype(np.float32)
        return np.asarray(np.copysign(self.table.ravel()[bins], x) * (x != 0), dtype=np.float32)

    def _kept(self) -> slice:
        return slice(None, None, -(-self.num_machines // MACHINES_KEPT))

    def _learn(
        self,
        z: Floats,
        e: Floats,
        unit: Floats,
        scores: Floats,
        used: NDArray[np.bool_],
        counted: NDArray[np.bool_],
    ) -> None:
        self.count += used
        own_gain = np.maximum(1 / np.maximum(self.count, 1), np.float32(1 / MEMORY_TICKS)) * used
        self.size += own_gain * (np.minimum(np.abs(e), np.float32(SIZE_LIMIT) * unit) - self.size)
        kept = self._kept()
        used, scores, z = used[:, kept], scores[:, kept], z[:, kept]
        z1, z2, used2 = self.z1[:, kept], self.z2[:, kept], used & self.known2[:, kept]
        num = np.maximum(1, used.sum(axis=1))
        gain = np.float32(max(1 / self.ticks, 1 / MEMORY_TICKS))
        if self.ticks > 1:
            self.square += gain * ((scores * scores * used).sum(axis=1) / num - self.square)
        before = z1 * (used & (np.abs(z1) <= INSTRUMENT_MAX))
        before2 = z2 * (used2 & (np.abs(z2) <= INSTRUMENT_MAX))
        late, late1 = np.clip(z, -RESPONSE_MAX, RESPONSE_MAX), np.clip(z1, -RESPONSE_MAX, RESPONSE_MAX)
        pairs = ((before, late1), (before, late), (before2, late1), (before2, late))
        now = np.stack([(a * b).sum(axis=1) for a, b in pairs]) / num
        self.covariances += gain * (now.astype(np.float32) - self.covariances)
        self.fading *= counted[kept]  # what became an alarm teaches nothing
        far1, far2 = np.abs(z1) > FAR, np.abs(z2) > FAR
        self._follow_outliers(late, late1, used2 & far1 & far2, self.known1[:, kept] & ~far1)
        if self.ticks % RENEW_TICKS == 0 or self.ticks < TABLE_TICKS:
            self._fit()

    def _follow_outliers(self, z: Floats, z1: Floats, outside: NDArray[np.bool_], inside: NDArray[np.bool_]) -> None:
        """How outliers fade, learned when they have: one that stands may be a fault, and must not become what is expected."""
        self.fading[0] += z * z1 * outside
        self.fading[1] += z1 * z1 * outside
        over = inside & (self.fading[1] > 0)
        self.fades *= np.float32(1 - 1 / HISTORY_TICKS)
        if over.any():
            self.fades += np.where(over, self.fading, 0).sum(axis=2)
            self.fading *= ~over

    def _fit(self) -> None:
        c0, c1, d1, d2 = self.covariances
        phi = np.clip(c1 / np.maximum(c0, 1e-3), 0, RHO_MAX)
        rho = np.clip(d2 / np.maximum(d1, 1e-3), phi, RHO_MAX)
        rho = np.where((phi < PHI_MIN) | (self.ticks < RHO_TICKS), phi, rho)
        slow = phi / np.maximum(rho, 1e-3)  # share of the variance
        white, driven = 1 - slow, slow * (1 - rho**2)
        q = rho * white / np.maximum(driven + white * (1 + rho**2), 1e-6)
        theta = np.where(q > 1e-6, (1 - np.sqrt(np.maximum(1 - 4 * q**2, 0))) / np.maximum(2 * q, 1e-6), 0)
        weight = FAR_WEIGHT * FAR**2
        far = np.minimum((self.fades[0] + weight * rho) / (self.fades[1] + weight), FAR_MAX)
        self.rho, self.theta = rho[:, None].astype(np.float32), theta[:, None].astype(np.float32)
        self.rho_far = np.maximum(rho, far)[:, None].astype(np.float32)
