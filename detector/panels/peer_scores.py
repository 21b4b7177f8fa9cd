"""Peer comparison: windows of a panel's last ticks, distances between machines, and deviation from the peers."""

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Floats

Scores = NDArray[np.float64]

WINDOW_TICKS = 8
"""As in Minder, for all methods."""
NUM_SAMPLES_MIN = WINDOW_TICKS // 2
"""A machine with fewer samples of a metric in the window is not scored: missing data is neither similar nor
different."""
NUM_MACHINES_MIN = 4
"""With fewer than four machines, an outlier is not identified reliably; Minder's smallest task also has four."""


def peer_median(values: Floats) -> Floats:
    """(M, N) -> (M, 1), missing values left out; NaN where all are missing."""
    ordered = np.sort(values, axis=1)  # NaN last
    num = np.maximum(np.isfinite(values).sum(axis=1), 1)
    low, high = (num - 1) // 2, num // 2
    rows = np.arange(len(values))
    middle: Floats = (ordered[rows, low] / 2 + ordered[rows, high] / 2)[:, None]
    return middle


def nearest_filled(window: Floats) -> Floats:
    """(W, M, N) of tick, metric, machine: a missing value is replaced by the nearest in the window, the earlier of two;
    all are NaN if fewer than `NUM_SAMPLES_MIN` are present. Nothing outside the window is used."""
    missing = np.isnan(window)
    holes = missing.any(axis=0)
    if not holes.any():
        return window
    part, known = window[:, holes], ~missing[:, holes]
    size = len(window)
    ticks = np.arange(size)[:, None]
    earlier = np.maximum.accumulate(np.where(known, ticks, -2 * size), axis=0)
    later = np.minimum.accumulate(np.where(known, ticks, 4 * size)[::-1], axis=0)[::-1]
    nearest = np.clip(np.where(ticks - earlier <= later - ticks, earlier, later), 0, size - 1)
    part = np.take_along_axis(part, nearest, axis=0)
    part[:, known.sum(axis=0) < NUM_SAMPLES_MIN] = np.nan
    filled = window.copy()
    filled[:, holes] = part
    return filled


class Windows:
    """The last `WINDOW_TICKS` ticks of a panel."""

    def __init__(self, num_metrics: int, num_machines: int) -> None:
        self._ring = np.full((WINDOW_TICKS, num_metrics, num_machines), np.nan, dtype=np.float32)
        self.num_ticks = 0

    def push(self, values: Floats) -> None:
        self._ring[:-1] = self._ring[1:]
        self._ring[-1] = values
        self.num_ticks += 1

    def filled(self) -> Floats:
        """(W, M, N), oldest first, missing values filled."""
        return nearest_filled(self._ring)


def distance_sums(points: Floats) -> Scores:
    """(D, N) float32 -> (N,): the sum of each point's Euclidean distances to all others. N^2 work, bounded memory."""
    centred = points - points.mean(axis=1, keepdims=True)  # centering reduces rounding errors of the squares below
    squares, ones = (centred * centred).sum(axis=0)[None], np.ones((1, points.shape[1]), dtype=np.float32)
    left = np.concatenate([-2 * centred, squares, ones]).T.copy()
    right = np.concatenate([centred, ones, squares])
    num = points.shape[1]
    sums = np.zeros(num)
    for a in range(0, num, DISTANCE_ROWS):
        b = min(num, a + DISTANCE_ROWS)
        block = left[a:b] @ right[:, a:]  # squared distances of points a..b to all from a on
        np.maximum(block, 0, out=block)
        np.sqrt(block, out=block)
        sums[a:b] += block.sum(axis=1)
        sums[b:] += block[:, b - a :].sum(axis=0)
    return sums


DISTANCE_ROWS = 64
"""Rows of the distance matrix computed at a time: the block fits into the CPU cache."""


def mean_distances(points: Floats) -> Scores:
    """(D, C, N) -> (C, N): each machine's mean distance to the others, by channel. NaN if a coordinate is missing or
    fewer than `NUM_MACHINES_MIN` machines are present."""
    known: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(points), axis=0)
    num = known.sum(axis=1)
    found = np.full(known.shape, np.nan)
    if known.all() and points.shape[2] <= DISTANCE_ROWS:
        if points.shape[2] >= NUM_MACHINES_MIN:
            apart = points[:, :, :, None] - points[:, :, None, :]
            found = np.sqrt((apart * apart).sum(axis=0)).sum(axis=2, dtype=np.float64) / (points.shape[2] - 1)
        return found
    for c in range(points.shape[1]):
        if num[c] >= NUM_MACHINES_MIN:
            found[c, known[c]] = distance_sums(points[:, c, known[c]]) / (num[c] - 1)
    return found


def against_others(values: Scores, peers: NDArray[np.bool_], spread_min: float) -> Scores:
    """(C, N) -> (C, N): how many standard deviations of the *other* peers a machine's value lies above their mean.

    For a fixed number of machines, this is a monotone function of the z-score over all, z = (v - mean) / sd, so
    decisions are equal; but z cannot exceed sqrt(N - 1) for any fault, so no tail could be fitted to it. A machine that
    is not a peer is compared with the peers. NaN with fewer than `NUM_MACHINES_MIN` peers.
    """
    counted = np.isfinite(values) & peers
    num = counted.sum(axis=1, keepdims=True)
    kept = np.where(counted, values, 0.0)
    mean = kept.sum(axis=1, keepdims=True) / np.maximum(num, 1)
    centred = np.where(counted, values - mean, 0.0)
    squares = (centred * centred).sum(axis=1, keepdims=True)
    own = counted.astype(np.float64)
    rest = np.maximum(num - own, 2)
    mean_of_rest = -centred / rest  # the centred values sum to zero
    squares_of_rest = squares - centred * centred - rest * mean_of_rest * mean_of_rest
    spread = np.sqrt(np.maximum(squares_of_rest, 0) / (rest - 1))
    score = (values - mean - mean_of_rest) / np.maximum(spread, spread_min)
    return np.where(num >= NUM_MACHINES_MIN, score, np.nan)


def surprise(sigmas: Scores, num_peers: int) -> Scores:
    """Log-likelihood ratio of "this one is higher" against "all are equal", for normal values of unknown spread:
    f/2 log(1 + t^2/f), f = peers - 1; negative if it is lower. Its tail is roughly exponential for any number of
    peers."""
    freedom = num_peers - 1
    return np.copysign(freedom / 2 * np.log1p(sigmas**2 / freedom), sigmas)
