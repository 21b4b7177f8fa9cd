"""What a panel shows of how far its healthy machines stand apart, for its profile."""

import math

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.sequential.order import spread_of
from rolecall.detector.panels.sequential.priors import SPREADS

Doubles = NDArray[np.float64]
ROBUST_MACHINES = 8
"""From this many on, the spread of a panel is that of its middle half, at half the degrees of freedom."""

RECORDINGS_APART = 1.0
"""Spreads of one recording and the next, standard deviation of the log: all metrics of a job whose work is divided
unequally on one day are farther apart on that day."""


class LearnedPlaces:
    """Sums over the windows of one recording, in units of the noise. `before` (M, N): offsets known from earlier
    recordings, NaN where unknown."""

    def __init__(self, before: Doubles) -> None:
        self.before = before
        num_metrics = len(before)
        self.spread_sum, self.num_spreads = np.zeros((num_metrics, len(SPREADS))), np.zeros(num_metrics)
        self.drift_sum, self.num_drifts = np.zeros((num_metrics, len(SPREADS))), np.zeros(num_metrics)
        self.place_sum, self.num_places = np.zeros(before.shape), np.zeros(before.shape)

    def look(self, metrics: NDArray[np.int64], places: Floats, window: Doubles, healthy: NDArray[np.bool_]) -> None:
        """`places` (L, N) of `metrics` (L,), NaN is unknown; `window` (L,): their variance from noise; `healthy`
        (N,)."""
        there = np.isfinite(places) & healthy
        self.spread_sum[metrics] += log_likelihood(np.where(there, places, math.nan), window)
        self.num_spreads[metrics] += 1
        # Not from earlier windows of this recording: they say nothing of how far offsets move until the next one.
        away = np.where(there, places - self.before[metrics], math.nan)
        known = np.isfinite(away).sum(axis=1) > 1
        self.drift_sum[metrics[known]] += log_likelihood(away[known], window[known])
        self.num_drifts[metrics[known]] += 1
        self.place_sum[metrics] += np.where(there, places, 0)
        self.num_places[metrics] += there

    @property
    def spread(self) -> Doubles:
        """What this recording says of the spreads of another, log-likelihood of SPREADS, (M, G); 0 where nothing."""
        return _widened(self.spread_sum / np.maximum(self.num_spreads, 1)[:, None])

    @property
    def drift(self) -> Doubles:
        return _widened(self.drift_sum / np.maximum(self.num_drifts, 1)[:, None])

    @property
    def offsets(self) -> Doubles:
        """(M, N), NaN where unknown."""
        return np.asarray(self.place_sum / np.where(self.num_places > 0, self.num_places, math.nan))


def _widened(log_likelihood: Doubles) -> Doubles:
    step = math.log(SPREADS[1] / SPREADS[0])
    apart = step * (np.arange(len(SPREADS))[:, None] - np.arange(len(SPREADS)))
    weight = np.exp(-0.5 * (apart / RECORDINGS_APART) ** 2)
    weight /= weight.sum(axis=0)
    most = log_likelihood.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(log_likelihood - most) @ weight + 1e-300), dtype=np.float64)


def log_likelihood(places: Floats, window: Doubles) -> Doubles:
    """Of SPREADS, (L, G). `places` (L, N), NaN is unknown; `window` (L,): variance of a place from noise."""
    num = np.isfinite(places).sum(axis=1)
    if places.shape[1] >= ROBUST_MACHINES:
        freedom = np.maximum(num - 1, 0) / 2
        squares = freedom * spread_of(places, np.isfinite(places), 0)[1][:, 0] ** 2
    else:
        filled = np.nan_to_num(places)
        centre = filled.sum(axis=1, keepdims=True) / np.maximum(num, 1)[:, None]
        freedom = np.maximum(num - 1, 0).astype(np.float64)
        squares = (np.where(np.isfinite(places), places - centre, 0) ** 2).sum(axis=1)
    variance = SPREADS**2 + window[:, None]
    found: Doubles = -0.5 * freedom[:, None] * np.log(variance) - squares[:, None] / (2 * variance)
    return found
