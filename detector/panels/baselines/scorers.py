"""Baseline methods: each scores the machines of a panel by their window of residuals (detectors.py)."""

import math
from typing import Any, Protocol

import numpy as np

from rolecall.detector.panels.panel import Floats
from rolecall.detector.panels.peer_scores import Scores, against_others, mean_distances, surprise

SHRINKAGE = 0.1
"""Weight of the diagonal in a covariance learned from few samples."""
EXPLAINED_RATIO = 0.9
"""Principal components are kept up to this share of the variance."""
NUM_NEIGHBOURS = 5
NUM_TREES = 100
NUM_FOREST_SAMPLES_MAX = 8192
FAR = 1e6
"""In usual residuals: larger than any sample."""


class Scorer(Protocol):
    """One method. `residuals` are standardized; unknown ones are 0. `bound`: the maximum score."""

    bound: float

    def fit(self, samples: Floats) -> None:
        """(S, M): window means of healthy machines."""

    def score(self, residuals: Floats) -> Scores:
        """(W, M, N) -> (N,): larger is more anomalous. Distances are squared, so that their tail is roughly
        exponential."""


class RobustZ:
    """The largest deviation of any metric from the peers' median, in units of 1.4826 times the peers' median absolute
    deviation (the current or the usual one, whichever is larger)."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        usual = np.median(np.abs(samples), axis=0) * MAD_TO_SD
        self._usual = np.where(usual > 0, usual, 1.0)[:, None]

    def score(self, residuals: Floats) -> Scores:
        far = np.abs(residuals.mean(axis=0))
        now = np.median(far, axis=1, keepdims=True) * MAD_TO_SD
        largest: Scores = (far / np.maximum(now, self._usual)).max(axis=0).astype(np.float64)
        return largest**2


MAD_TO_SD = 1.4826
"""Ratio of standard deviation to median absolute deviation for a normal distribution."""


class Mahalanobis:
    """Distance to the median machine, in the covariance of the machines' window means over the warm-up."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        seen = samples.T.astype(np.float64) @ samples / len(samples)
        seen = (1 - SHRINKAGE) * seen + SHRINKAGE * np.diag(np.diag(seen) + np.finfo(np.float32).eps)
        self._whiten = np.linalg.inv(np.linalg.cholesky(seen))

    def score(self, residuals: Floats) -> Scores:
        found: Scores = np.square(self._whiten @ residuals.mean(axis=0)).sum(axis=0)
        return found


class Pca:
    """The part of a machine's window means that the principal components of the warm-up leave unexplained."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        _, sizes, rows = np.linalg.svd(samples.astype(np.float64), full_matrices=False)
        part = np.cumsum(sizes**2) / max(float(np.sum(sizes**2)), np.finfo(np.float64).tiny)
        self._components = rows[: min(int(np.searchsorted(part, EXPLAINED_RATIO)) + 1, len(rows) - 1)]

    def score(self, residuals: Floats) -> Scores:
        x = residuals.mean(axis=0)
        found: Scores = np.square(x - self._components.T @ (self._components @ x)).sum(axis=0)
        return found


class Neighbours:
    """Mean distance to the nearest peers, so that a few similar outliers count as each other's neighbors."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        pass  # uses only the current window

    def score(self, residuals: Floats) -> Scores:
        x = residuals.mean(axis=0)
        num = x.shape[1]
        squares = (x * x).sum(axis=0)
        apart = squares[:, None] + squares[None] - 2 * (x.T @ x)
        np.fill_diagonal(apart, np.inf)
        nearest = min(NUM_NEIGHBOURS, num - 1)
        found: Scores = np.sqrt(np.maximum(np.partition(apart, nearest - 1, axis=1)[:, :nearest], 0)).mean(axis=1)
        return found.astype(np.float64) ** 2


class Forest:
    """scikit-learn's isolation forest, fitted on the warm-up. Its score is bounded: no sample scores much above the
    most extreme training samples. It therefore cannot reach low false alarm rates, and an anomaly in one metric of
    several has little effect."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        from sklearn.ensemble import IsolationForest  # type: ignore[import-untyped]

        every = math.ceil(len(samples) / NUM_FOREST_SAMPLES_MAX)
        self._forest: Any = IsolationForest(n_estimators=NUM_TREES, random_state=0).fit(samples[::every])
        far = np.full((1, samples.shape[1]), FAR, dtype=np.float32)
        self.bound = -float(self._forest.score_samples(np.concatenate([far, -far])).min())

    def score(self, residuals: Floats) -> Scores:
        found: Scores = -self._forest.score_samples(residuals.mean(axis=0).T)
        return found


class Pairwise:
    """Minder without its denoiser, all metrics equal: a machine's distances to all others, compared with those of its
    peers; the largest excess over metrics counts."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        pass  # uses only the current window

    def score(self, residuals: Floats) -> Scores:
        apart = mean_distances(residuals)
        peers = np.ones(apart.shape[1], dtype=np.bool_)
        sigmas: Scores = against_others(apart, peers, PAIRWISE_SPREAD_MIN).max(axis=0)
        return surprise(sigmas, len(sigmas) - 1)


PAIRWISE_SPREAD_MIN = 0.1
"""Minimum spread of the distances, in usual residuals."""
