"""Baseline detectors from the literature in one framework, for comparison with ours.

The residual of a sample is its distance to the median of the machines at that tick, in units of the metric's usual
residual. A method scores each machine from the last `WINDOW_TICKS` residuals of all metrics; a machine whose score
stays above the threshold for `persistence_ticks` is named. Missing samples are filled with the nearest in the window.

A panel starts with a warm-up without alarms: the usual residuals and the method's model are fitted on its first half,
the threshold (`TailThreshold`) on its second half. As limits of these methods, a fault present from the first tick is
learned as normal, a metric that is constant in the warm-up is ignored, and nothing is learned later.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.panels.peer_scores import (
    NUM_SAMPLES_MIN,
    WINDOW_TICKS,
    PeerTracker,
    Scores,
    TailThreshold,
    against_others,
    block_length,
    block_probability,
    mean_distances,
    peer_median,
    persistence_ticks,
    surprise,
)

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

    bound: float = math.inf

    def fit(self, samples: Floats) -> None:
        """(S, M): window means of healthy machines. Without effect for methods that use only the current window."""

    def score(self, residuals: Floats) -> Scores:
        """(W, M, N) -> (N,): larger is more anomalous. Distances are squared, so that their tail is roughly
        exponential."""


class RobustZ(Scorer):
    """The largest deviation of any metric from the peers' median, in units of 1.4826 times the peers' median absolute
    deviation (the current or the usual one, whichever is larger)."""

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


class Mahalanobis(Scorer):
    """Distance to the median machine, in the covariance of the machines' window means over the warm-up."""

    def fit(self, samples: Floats) -> None:
        seen = samples.T.astype(np.float64) @ samples / len(samples)
        seen = (1 - SHRINKAGE) * seen + SHRINKAGE * np.diag(np.diag(seen) + np.finfo(np.float32).eps)
        self._whiten = np.linalg.inv(np.linalg.cholesky(seen))

    def score(self, residuals: Floats) -> Scores:
        found: Scores = np.square(self._whiten @ residuals.mean(axis=0)).sum(axis=0)
        return found


class Pca(Scorer):
    """The part of a machine's window means that the principal components of the warm-up leave unexplained."""

    def fit(self, samples: Floats) -> None:
        _, sizes, rows = np.linalg.svd(samples.astype(np.float64), full_matrices=False)
        part = np.cumsum(sizes**2) / max(float(np.sum(sizes**2)), np.finfo(np.float64).tiny)
        self._components = rows[: min(int(np.searchsorted(part, EXPLAINED_RATIO)) + 1, len(rows) - 1)]

    def score(self, residuals: Floats) -> Scores:
        x = residuals.mean(axis=0)
        found: Scores = np.square(x - self._components.T @ (self._components @ x)).sum(axis=0)
        return found


class Neighbours(Scorer):
    """Mean distance to the nearest peers, so that a few similar outliers count as each other's neighbors."""

    def score(self, residuals: Floats) -> Scores:
        x = residuals.mean(axis=0)
        num = x.shape[1]
        squares = (x * x).sum(axis=0)
        apart = squares[:, None] + squares[None] - 2 * (x.T @ x)
        np.fill_diagonal(apart, np.inf)
        nearest = min(NUM_NEIGHBOURS, num - 1)
        found: Scores = np.sqrt(np.maximum(np.partition(apart, nearest - 1, axis=1)[:, :nearest], 0)).mean(axis=1)
        return found.astype(np.float64) ** 2


class Forest(Scorer):
    """scikit-learn's isolation forest, fitted on the warm-up. Its score is bounded: no sample scores much above the
    most extreme training samples. It therefore cannot reach low false alarm rates, and an anomaly in one metric of
    several has little effect."""

    def fit(self, samples: Floats) -> None:
        from sklearn.ensemble import IsolationForest  # type: ignore[import-untyped]

        every = math.ceil(len(samples) / NUM_FOREST_SAMPLES_MAX)
        self._forest: Any = IsolationForest(n_estimators=NUM_TREES, random_state=0).fit(samples[::every])
        far = np.full((1, samples.shape[1]), FAR, dtype=np.float32)
        self.bound = -float(self._forest.score_samples(np.concatenate([far, -far])).min())

    def score(self, residuals: Floats) -> Scores:
        found: Scores = -self._forest.score_samples(residuals.mean(axis=0).T)
        return found


class Pairwise(Scorer):
    """Minder without its denoiser, all metrics equal: a machine's distances to all others, compared with those of its
    peers; the largest excess over metrics counts."""

    def score(self, residuals: Floats) -> Scores:
        apart = mean_distances(residuals)
        peers = np.ones(apart.shape[1], dtype=np.bool_)
        sigmas: Scores = against_others(apart, peers, PAIRWISE_SPREAD_MIN).max(axis=0)
        return surprise(sigmas, len(sigmas) - 1)


PAIRWISE_SPREAD_MIN = 0.1
"""Minimum spread of the distances, in usual residuals."""


PERSISTENCE_SECONDS = 60.0
SLOW_METHOD_STRIDE_SECONDS = 8.0
"""Forests and pairwise distances are scored at this interval, on windows that then do not overlap."""


@dataclass(frozen=True, slots=True)
class BaselineDetector:
    """Runs one method in the framework. `stride_seconds`: time between scores; at longer intervals, every tick."""

    false_alarms_per_1000_machine_days: float
    name: str
    scorer: Callable[[], Scorer]
    stride_seconds: float = 0.0
    persistence_seconds: float = PERSISTENCE_SECONDS

    def track(self, shape: PanelShape) -> "BaselineTracker":
        return BaselineTracker(self, shape)


class BaselineTracker(PeerTracker):
    def __init__(self, method: BaselineDetector, shape: PanelShape) -> None:
        num_metrics, num_machines, interval = len(shape.metrics), len(shape.machines), shape.interval_seconds
        self._method = method
        self._stride = max(1, math.floor(method.stride_seconds / interval))
        ticks = persistence_ticks(method.persistence_seconds, interval)
        self._num_scores = math.ceil(ticks / self._stride)
        block, asked = block_length(self._num_scores), method.false_alarms_per_1000_machine_days
        tail = TailThreshold(block, block_probability(asked, block * self._stride * interval))
        super().__init__(shape, num_metrics, tail)
        self._samples: list[Floats] = []
        self._scorer: Scorer | None = None
        self._scale = np.ones((num_metrics, 1), dtype=np.float32)
        self._since = np.zeros(num_machines)
        self._num_above = np.zeros(num_machines, dtype=np.int64)
        self._num_below = np.zeros(num_machines, dtype=np.int64)
        self._standing = np.zeros(num_machines, dtype=np.bool_)

    def _tick(self, at: float, values: Floats) -> list[Finding]:
        self._windows.push(values - peer_median(values))
        num = self._windows.num_ticks
        if num < WINDOW_TICKS or num % self._stride:
            return []
        if num < self._warm_up // 2:
            if num % NUM_SAMPLES_MIN < self._stride:
                self._samples.append(self._windows.filled().mean(axis=0))
            return []
        if self._scorer is None:
            self._scorer = self._fitted()
            self._tail.bound = self._scorer.bound
        window = self._windows.filled()
        present = np.isfinite(window[-1]).any(axis=0)
        residuals = np.nan_to_num(window / self._scale, nan=0.0, posinf=0.0, neginf=0.0)
        score = np.where(present, self._scorer.score(residuals), np.nan)
        if num < self._warm_up:
            self._tail.add(score[None])
            return []
        return self._judge(at, score, float(self._learned(score[None])[0]), residuals)

    def _fitted(self) -> Scorer:
        """Fits the usual residuals, then the method's model."""
        seen = (
            np.stack(self._samples) if self._samples else np.zeros((1, *self._windows.filled().shape[1:]), np.float32)
        )
        self._samples.clear()
        known = np.isfinite(seen)
        squares = np.where(known, seen.astype(np.float64) ** 2, 0.0).sum(axis=(0, 2))
        scale = np.sqrt(squares / np.maximum(known.sum(axis=(0, 2)), 1)).astype(np.float32)
        self._scale = np.where(scale > 0, scale, np.inf)[:, None].astype(np.float32)
        rows = np.nan_to_num(seen / self._scale).transpose(0, 2, 1).reshape(-1, seen.shape[1]).astype(np.float32)
        scorer = self._method.scorer()
        scorer.fit(rows)
        return scorer

    def _judge(self, at: float, score: Scores, threshold: float, residuals: Floats) -> list[Finding]:
        above = score > threshold
        self._since = np.where(above & (self._num_above == 0), at, self._since)
        self._num_above = np.where(above, self._num_above + 1, 0)
        self._num_below = np.where(above, 0, self._num_below + 1)
        self._standing &= self._num_below < self._num_scores
        new = (self._num_above >= self._num_scores) & ~self._standing
        self._standing |= new
        return [self._finding(at, n, float(score[n]), threshold, residuals) for n in np.flatnonzero(new)]

    def _finding(self, at: float, machine: int, score: float, threshold: float, residuals: Floats) -> Finding:
        shape, method = self._shape, self._method
        apart = residuals[:, :, machine].mean(axis=0)
        m = int(np.argmax(np.abs(apart)))
        since = float(self._since[machine])
        text = f"{shape.metrics[m]} lies {apart[m]:+.1f} usual residuals from the median of its peers"
        because = (
            f"{shape.machines[machine].name} of {shape.name} differs from its {len(shape.machines) - 1} peers for "
            f"{at - since:.0f} s: {method.name} score {score:.3g} over {threshold:.3g}; {text}"
        )
        return Finding(
            detector=method.name,
            suspects=(shape.suspect(machine),),
            fault_class=FaultClass.SLOW,
            onset=since,
            detected_at=at,
            confidence=CONFIDENCE,
            because=because,
            evidence=(
                Evidence(kind=f"metric:{shape.metrics[m]}", text=text, values={"sigmas": float(apart[m])}),
                Evidence(kind="score", text=method.name, values={"score": score, "threshold": threshold}),
            ),
        )


CONFIDENCE = 0.7
"""Set, not measured: these methods give no probability."""


BASELINES: dict[str, Callable[..., BaselineDetector]] = {
    name: partial(BaselineDetector, name=name, scorer=scorer, stride_seconds=stride_seconds)
    for name, scorer, stride_seconds in (
        ("mahalanobis", Mahalanobis, 0.0),
        ("isolation-forest", Forest, SLOW_METHOD_STRIDE_SECONDS),
        ("pca", Pca, 0.0),
        ("knn", Neighbours, SLOW_METHOD_STRIDE_SECONDS),
        ("robust-z", RobustZ, 0.0),
        ("pairwise", Pairwise, SLOW_METHOD_STRIDE_SECONDS),
    )
}
"""Name -> `make(false_alarms_per_1000_machine_days)`."""
