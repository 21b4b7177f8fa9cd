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

import numpy as np

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.baselines.scorers import Forest, Mahalanobis, Neighbours, Pairwise, Pca, RobustZ, Scorer
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.panels.peer_scores import NUM_SAMPLES_MIN, WINDOW_TICKS, Scores, peer_median
from rolecall.detector.panels.sequential.warm_up import (
    PeerTracker,
    TailThreshold,
    block_length,
    block_probability,
    persistence_ticks,
)

PERSISTENCE_SECONDS = 60.0
SLOW_METHOD_STRIDE_SECONDS = 8.0
"""Forests and pairwise distances are scored at this interval, on windows that then do not overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineDetector:
    """Runs one method in the framework. `stride_seconds`: time between scores; at longer intervals, every tick."""

    name: str
    scorer: Callable[[], Scorer]
    false_alarms_per_1000_machine_days: float
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
            self._collect()
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

    def _collect(self) -> None:
        if self._windows.num_ticks % NUM_SAMPLES_MIN < self._stride:
            self._samples.append(self._windows.filled().mean(axis=0))

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


def _maker(name: str, scorer: Callable[[], Scorer], stride_seconds: float = 0.0) -> Callable[..., BaselineDetector]:
    def make(
        false_alarms_per_1000_machine_days: float, persistence_seconds: float = PERSISTENCE_SECONDS
    ) -> BaselineDetector:
        return BaselineDetector(
            name=name,
            scorer=scorer,
            false_alarms_per_1000_machine_days=false_alarms_per_1000_machine_days,
            stride_seconds=stride_seconds,
            persistence_seconds=persistence_seconds,
        )

    return make


BASELINES: dict[str, Callable[..., BaselineDetector]] = {
    "mahalanobis": _maker("mahalanobis", Mahalanobis),
    "isolation-forest": _maker("isolation-forest", Forest, SLOW_METHOD_STRIDE_SECONDS),
    "pca": _maker("pca", Pca),
    "knn": _maker("knn", Neighbours, SLOW_METHOD_STRIDE_SECONDS),
    "robust-z": _maker("robust-z", RobustZ),
    "pairwise": _maker("pairwise", Pairwise, SLOW_METHOD_STRIDE_SECONDS),
}
"""Name -> `make(false_alarms_per_1000_machine_days)`."""
