"""Detectors that others use, on one frame, to compare ours with.

The frame, the same for all: the residual of a sample is its distance to the median of the machines at that tick, in
units of the metric's usual residual. A method gives each machine a score from the last `WINDOW_TICKS` residuals of all
metrics; a machine whose score stays above the threshold for `persistence_ticks` is named. Missing samples are the
nearest in time within the window.

The first part of a panel is a warm-up without alarms: its first half teaches the usual residuals and the method's
model, its second half the threshold (`TailThreshold`). A fault that stands from the first tick is learned as normal,
a metric that does not vary in the warm-up is left out, and nothing is learned later: that is what these methods are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Evidence, FaultClass, Finding
from rolecall.detector.panel import Floats, PanelShape

Scores = NDArray[np.float64]

WINDOW_TICKS = 8
"""As Minder has it, for all methods."""
NUM_SAMPLES_MIN = WINDOW_TICKS // 2
"""A machine with fewer samples of a metric in the window takes no part: silence is not a likeness or a difference."""
NUM_MACHINES_MIN = 4
"""With fewer peers than three nobody can be told apart; Minder's smallest task has four machines, too."""
WARM_UP_SECONDS = 600.0
WARM_UP_TICKS_MIN = 256
"""Ten minutes of samples of one second; at longer intervals as many ticks as a threshold needs at least."""
PERSISTENCE_SECONDS = 60.0
SLOW_METHOD_STRIDE_SECONDS = 8.0
"""Forests and pairwise distances score once in so many seconds, on windows that then do not overlap."""
SHRINKAGE = 0.1
"""Weight of the diagonal in a covariance learned from few samples."""
EXPLAINED_RATIO = 0.9
"""Principal components are kept up to this part of the variance."""
NUM_NEIGHBOURS = 5
NUM_TREES = 100
NUM_FOREST_SAMPLES_MAX = 8192
FAR = 1e6
"""In usual residuals: beyond all samples."""
SECONDS_PER_DAY = 86_400.0


def warm_up_ticks(interval_seconds: float) -> int:
    return max(WARM_UP_TICKS_MIN, math.ceil(WARM_UP_SECONDS / interval_seconds))


def persistence_ticks(seconds: float, interval_seconds: float) -> int:
    """More than `seconds`, and more than one window: a single bad sample stands in `WINDOW_TICKS` windows."""
    return max(WINDOW_TICKS, math.floor(seconds / interval_seconds)) + 1


def peer_median(values: Floats) -> Floats:
    """(M, N) -> (M, 1), missing values left out; NaN where all are missing."""
    ordered = np.sort(values, axis=1)  # NaN last
    num = np.maximum(np.isfinite(values).sum(axis=1), 1)
    low, high = (num - 1) // 2, num // 2
    rows = np.arange(len(values))
    middle: Floats = (ordered[rows, low] / 2 + ordered[rows, high] / 2)[:, None]
    return middle


def nearest_filled(window: Floats) -> Floats:
    """(W, M, N) of tick, metric, machine: a missing value is the nearest in time in the window, the earlier of two;
    all are NaN where fewer than `NUM_SAMPLES_MIN` are there. Nothing outside the window is looked at."""
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


@dataclass(slots=True)
class TailThreshold:
    """The threshold that a machine's score stays above for a block of ticks with the asked probability.

    Collected are the smallest scores of successive blocks, of each channel and machine. Their upper tail is taken to be
    exponential: with the mean excess b of the largest `TAIL_RATIO` of n values above the value u below them,

        threshold = u + b log(tail ratio / probability),

    where b has one standard error added, b / sqrt(number in the tail), since too low a threshold costs more than one too
    high; and no less than the largest value seen, unless so many were seen that some would exceed it. What it cannot
    know is how the tail goes on beyond the warm-up, and whether what follows is like the warm-up at all.
    """

    block_ticks: int
    probability: float
    bound: float = math.inf  # what a score can reach: the threshold lies within `BOUND_SHARE` of the way to it
    minima: list[Scores] = field(default_factory=list)
    _lowest: Scores | None = None
    _num_ticks: int = 0

    def add(self, scores: Scores) -> None:
        """(C, N) of channel and machine; NaN where there is none."""
        self._lowest = scores.copy() if self._lowest is None else np.minimum(self._lowest, scores)
        self._num_ticks += 1
        if self._num_ticks == self.block_ticks:
            self.minima.append(self._lowest)
            self._lowest, self._num_ticks = None, 0

    def thresholds(self) -> Scores:
        """(C,); infinite for a channel with too few values."""
        if not self.minima:
            return np.full(1, np.inf)
        return np.array([self._threshold(c) for c in np.stack(self.minima, axis=1)])

    def _threshold(self, values: Scores) -> float:
        """`values`: (blocks, N) of one channel."""
        ordered = np.sort(values[np.isfinite(values)])
        num_tail = max(NUM_TAIL_MIN, round(TAIL_RATIO * len(ordered)))
        if num_tail >= len(ordered):
            return math.inf
        start = ordered[-num_tail - 1]
        excess = float(np.mean(ordered[-num_tail:] - start)) * (1 + 1 / math.sqrt(num_tail))
        beyond = max(0.0, math.log(num_tail / len(ordered) / self.probability))
        most = float(ordered[-1] + BOUND_SHARE * (self.bound - ordered[-1]))
        threshold = min(float(start + excess * beyond), most)
        return threshold if self.probability * len(ordered) >= 1 else max(threshold, float(ordered[-1]))


TAIL_RATIO = 0.1
NUM_TAIL_MIN = 8
BOUND_SHARE = 0.25


def block_length(persistence: int) -> int:
    """The longest for which each run of `persistence` scores holds a whole block, wherever the blocks begin: so there are
    at most as many alarms as blocks above the threshold."""
    return (persistence + 1) // 2


def block_probability(asked_per_1000_machine_days: float, block_seconds: float, num_channels: int = 1) -> float:
    """Of one machine in one block and channel, from false alarms per 1,000 machine-days of all channels together."""
    return asked_per_1000_machine_days / 1000 * block_seconds / SECONDS_PER_DAY / num_channels


def distance_sums(points: Floats) -> Scores:
    """(D, N) float32 -> (N,): the sum of each point's Euclidean distances to all others. N^2 work, bounded memory."""
    centred = points - points.mean(axis=1, keepdims=True)  # small numbers lose less in the squares below
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
"""Rows of the distance matrix at a time: the block stays in the processor's cache."""


def mean_distances(points: Floats) -> Scores:
    """(D, C, N) -> (C, N): each machine's mean distance to the others, by channel. NaN where a coordinate is missing or
    fewer than `NUM_MACHINES_MIN` machines are there."""
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

    For a fixed number of machines this grows with the z-score over all of them, z = (v - mean) / sd, and decides alike;
    but z cannot exceed sqrt(N - 1), whatever the fault, so that no tail could be fitted to it. A machine that is no
    peer is compared with the peers. NaN where fewer than `NUM_MACHINES_MIN` peers are there.
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
    """The log-likelihood ratio of "this one lies higher" against "all are alike", normal values of unknown spread:
    f/2 log(1 + t^2/f), f = peers - 1; negative where it lies lower. Its tail is about exponential, however few peers."""
    freedom = num_peers - 1
    return np.copysign(freedom / 2 * np.log1p(sigmas**2 / freedom), sigmas)


class Scorer(Protocol):
    """One method. `residuals` are standardised; unknown ones are 0. `bound`: what its score can reach."""

    bound: float

    def fit(self, samples: Floats) -> None:
        """(S, M): window means of healthy machines."""

    def score(self, residuals: Floats) -> Scores:
        """(W, M, N) -> (N,): larger is less usual; where it is a distance, its square, whose tail is about exponential."""


class RobustZ:
    """The largest deviation of any metric from the peers' median, in units of 1.4826 times the peers' median absolute
    deviation, now or usually, whichever is larger."""

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
"""Standard deviation over median absolute deviation, of a normal distribution."""


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
    """What the principal components of the warm-up leave unexplained of a machine's window means."""

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
    """Mean distance to the nearest peers, so that a few alike outliers count as each other's neighbours."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        pass  # it knows only the present

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
    """scikit-learn's isolation forest, grown on the warm-up. Its score is bounded: nothing gets much more than the outermost
    samples it was grown on. So a low rate cannot be asked of it, and a machine that is off in one metric of several
    hardly stands out."""

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
    """Minder without its denoiser, metrics on a par: the largest, over metrics, of how far a machine's distances to all
    others lie above the others' own."""

    bound = math.inf

    def fit(self, samples: Floats) -> None:
        pass  # it knows only the present

    def score(self, residuals: Floats) -> Scores:
        apart = mean_distances(residuals)
        everybody = np.ones(apart.shape[1], dtype=np.bool_)
        sigmas: Scores = against_others(apart, everybody, PAIRWISE_SPREAD_MIN).max(axis=0)
        return surprise(sigmas, len(sigmas) - 1)


PAIRWISE_SPREAD_MIN = 0.1
"""Of the distances, in usual residuals: peers are never taken to be more alike than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A method on the frame. `stride_seconds`: time between scores; at intervals of more than that, every tick."""

    name: str
    scorer: Callable[[], Scorer]
    false_alarms_per_1000_machine_days: float
    stride_seconds: float = 0.0
    persistence_seconds: float = PERSISTENCE_SECONDS

    def track(self, shape: PanelShape) -> "BaselineTracker":
        return BaselineTracker(self, shape)


class BaselineTracker:
    def __init__(self, method: Baseline, shape: PanelShape) -> None:
        self._method, self._shape = method, shape
        num_metrics, num_machines = len(shape.metrics), len(shape.machines)
        interval = shape.interval_seconds
        self._warm_up = warm_up_ticks(interval)
        self._stride = max(1, math.floor(method.stride_seconds / interval))
        ticks = persistence_ticks(method.persistence_seconds, interval)
        self._num_scores = math.ceil(ticks / self._stride)
        self._windows = Windows(num_metrics, num_machines)
        self._samples: list[Floats] = []
        self._scorer: Scorer | None = None
        self._scale = np.ones((num_metrics, 1), dtype=np.float32)
        block = block_length(self._num_scores)
        asked = method.false_alarms_per_1000_machine_days
        self._tail = TailThreshold(block, block_probability(asked, block * self._stride * interval))
        self._threshold: float | None = None
        self._since = np.zeros(num_machines)
        self._num_above = np.zeros(num_machines, dtype=np.int64)
        self._num_below = np.zeros(num_machines, dtype=np.int64)
        self._standing = np.zeros(num_machines, dtype=np.bool_)

    def tick(self, at: float, values: Floats) -> list[Finding]:
        if values.shape[1] < NUM_MACHINES_MIN:
            return []
        with np.errstate(over="ignore", invalid="ignore"):  # of values near the end of float32: they count as missing
            return self._tick(at, values)

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
        if self._threshold is None:
            self._threshold = float(self._tail.thresholds()[0])
        return self._judge(at, score, self._threshold, residuals)

    def _collect(self) -> None:
        if self._windows.num_ticks % NUM_SAMPLES_MIN < self._stride:
            self._samples.append(self._windows.filled().mean(axis=0))

    def _fitted(self) -> Scorer:
        """Learns the usual residuals, then the method's model."""
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
            f"{shape.machines[machine].name} of {shape.name} is unlike its {len(shape.machines) - 1} peers since "
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
"""Stated, not measured: these methods know of no probability."""


def _maker(name: str, scorer: Callable[[], Scorer], stride_seconds: float = 0.0) -> Callable[..., Baseline]:
    def make(false_alarms_per_1000_machine_days: float, persistence_seconds: float = PERSISTENCE_SECONDS) -> Baseline:
        return Baseline(
            name=name,
            scorer=scorer,
            false_alarms_per_1000_machine_days=false_alarms_per_1000_machine_days,
            stride_seconds=stride_seconds,
            persistence_seconds=persistence_seconds,
        )

    return make


BASELINES: dict[str, Callable[..., Baseline]] = {
    "mahalanobis": _maker("mahalanobis", Mahalanobis),
    "isolation-forest": _maker("isolation-forest", Forest, SLOW_METHOD_STRIDE_SECONDS),
    "pca": _maker("pca", Pca),
    "knn": _maker("knn", Neighbours, SLOW_METHOD_STRIDE_SECONDS),
    "robust-z": _maker("robust-z", RobustZ),
    "pairwise": _maker("pairwise", Pairwise, SLOW_METHOD_STRIDE_SECONDS),
}
"""Name -> `make(false_alarms_per_1000_machine_days)`."""
