"""Training of `minder`: a denoiser per metric, and the order in which the metrics are tried. Needs torch.

Denoisers: LSTM-VAEs (Minder, section 4.2: window 8, hidden 4, latent 8, one layer) for windows scaled as in the
detector. Encoder: an LSTM over the window; its last hidden state gives mean and spread of the latent. Decoder: an LSTM
whose initial state and input at each tick come from the latent (without that initial state, the error is ten times that
in the paper). Loss: mean squared error + `KL_WEIGHT` times the Kullback-Leibler divergence + `SHAPE_WEIGHT` times the
error of the shape (the window minus its mean). Periods labelled faulty are excluded for the whole panel.

Priority: the features are, per tick and metric, the largest |z-score| over machines of the window means; a decision
tree (scikit-learn) learns to classify faulty ticks, and the metrics nearest its root come first.
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.minder.detector import (
    ANY_METRIC,
    HIDDEN,
    MODEL_FORMAT,
    RANGE_TICKS,
    Model,
    Weights,
    denoise,
    scaled,
    weight_shapes,
)
from rolecall.detector.panels.panel import Floats, Panel, Times
from rolecall.detector.panels.peer_scores import WINDOW_TICKS, Scores, nearest_filled

NUM_STEPS = 1500
BATCH_WINDOWS = 256
LEARNING_RATE = 3e-2
KL_WEIGHT = 1e-6
"""Small compared with the target error (1e-4): a denoiser must reproduce its input."""
SHAPE_WEIGHT = 3.0
"""Windows differ mostly in level: with equal weights, the shape is learned late or never."""
NUM_STARTS = 2
NUM_WINDOWS_COMPARED = 1024
NUM_WINDOWS_MAX = 8192
"""Per metric: the models have a few hundred parameters."""
NUM_TICKS_OF_PANEL = 256
"""Ticks per panel from which windows are taken, each of up to `NUM_MACHINES_AT_TICK` machines."""
NUM_MACHINES_AT_TICK = 32
HELD_OUT_RATIO = 0.1
NUM_TREE_TICKS_OF_PANEL = 400
TREE_DEPTH_MAX = 8
TREE_LEAF_RATIO = 0.005
"""Minimum share of all ticks in a leaf: smaller leaves fit chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledFault:
    """A labelled period in which this node was faulty. Seconds on the panel's clock."""

    node: str
    onset: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MinderFitResult:
    """`mse`: of each metric's denoiser on held-out windows; `spread`: the variance of those windows, which is the error
    of a model that predicts the mean. `num_faulty_ticks`: ticks from which the priority was learned."""

    model: Model
    mse: dict[str, float]
    spread: dict[str, float]
    num_windows: int
    num_faulty_ticks: int
    num_tree_ticks: int


def fit(
    panels: Sequence[Panel],
    faults: Sequence[Sequence[LabelledFault]],
    *,
    any_metric: Weights | None = None,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
) -> MinderFitResult:
    """`faults`: per panel. `any_metric`: a denoiser for metrics that are in no panel; by default one is trained on the
    windows of all metrics. Raises ValueError: no panel has a complete window."""
    rng = np.random.default_rng(seed)
    metrics = sorted({m for p in panels for m in p.shape.metrics})
    cut = [windows_of(p, f, rng) for p, f in zip(panels, faults, strict=True)]
    windows = {m: _joined(m, panels, cut, rng) for m in metrics}
    metrics = [m for m in metrics if windows[m].shape[1]]
    if not metrics:
        raise ValueError("there is no window of eight ticks in what was given")
    size = max(windows[m].shape[1] for m in metrics)
    # Windows are repeated up to the same number per metric, so that all models train side by side.
    rows = [windows[m][:, rng.permutation(size) % windows[m].shape[1]] for m in metrics]
    names = list(metrics)
    if any_metric is None:
        pool = np.concatenate(rows, axis=1)
        rows.append(pool[:, rng.permutation(pool.shape[1])[:size]])
        names.append(ANY_METRIC)
    stacked = np.stack(rows, axis=1)[:, :, None]
    num_held = max(1, math.ceil(HELD_OUT_RATIO * size))
    held, given = stacked[..., :num_held], stacked[..., num_held:] if size > num_held else stacked
    weights = train(given, seed=seed, num_steps=num_steps)
    mse = mean_squared_error(weights, held)
    if any_metric is not None:
        weights = weights.stacked(any_metric)
        names.append(ANY_METRIC)
    order, num_faulty, num_ticks = priority(panels, faults)
    about = f"{len(panels)} panels, {size} windows a metric, {num_steps} steps, seed {seed}"
    return MinderFitResult(
        model=Model(metrics=tuple(names), weights=weights, priority=order, about=about),
        mse=dict(zip(metrics, mse.tolist(), strict=False)),
        spread=dict(zip(metrics, held.var(axis=(0, 2, 3)).tolist(), strict=False)),
        num_windows=size,
        num_faulty_ticks=num_faulty,
        num_tree_ticks=num_ticks,
    )


def write(path: Path, model: Model) -> None:
    """Writes one safetensors file, with other data as JSON in its header. Raises OSError."""
    from safetensors.numpy import save

    about = {"format": MODEL_FORMAT, "metrics": model.metrics, "priority": model.priority, "about": model.about}
    arrays = {name: np.ascontiguousarray(a, dtype=np.float32) for name, a in asdict(model.weights).items()}
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(save(arrays, metadata={"rolecall": json.dumps(about)}))
    partial.replace(path)


def mean_squared_error(weights: Weights, windows: Floats) -> Scores:
    """(W, K, I, N) -> (K,)."""
    error = denoise(weights, windows) - windows
    found: Scores = np.mean(error.astype(np.float64) ** 2, axis=(0, 2, 3))
    return found


def windows_of(panel: Panel, faults: Sequence[LabelledFault], rng: np.random.Generator) -> Floats:
    """(W, M, B): complete windows of normal time, scaled by the range over the preceding `RANGE_TICKS`. NaN for a
    metric that a machine lacks."""
    normal = np.flatnonzero(~faulty(panel.at, faults, WINDOW_TICKS)[WINDOW_TICKS - 1 :]) + WINDOW_TICKS - 1
    if not len(normal):
        return np.empty((WINDOW_TICKS, len(panel.shape.metrics), 0), dtype=np.float32)
    ticks = np.sort(rng.permutation(normal)[:NUM_TICKS_OF_PANEL])
    lows, highs = np.fmin.reduce(panel.values, axis=2), np.fmax.reduce(panel.values, axis=2)  # (M, T)
    found = []
    for t in ticks:
        seen = slice(max(0, t + 1 - RANGE_TICKS), t + 1)
        low, high = np.fmin.reduce(lows[:, seen], axis=1), np.fmax.reduce(highs[:, seen], axis=1)
        some = rng.permutation(len(panel.shape.machines))[:NUM_MACHINES_AT_TICK]
        window = panel.values[:, t + 1 - WINDOW_TICKS : t + 1][:, :, some].transpose(1, 0, 2)
        found.append(scaled(nearest_filled(window), low, high))
    return np.concatenate(found, axis=2)


def faulty(at: Times, faults: Sequence[LabelledFault], num_ticks_after: int = 0) -> NDArray[np.bool_]:
    """(T,): whether the tick is inside a fault, or within `num_ticks_after` ticks after one."""
    inside = np.zeros(len(at), dtype=np.bool_)
    for f in faults:
        first, end = np.searchsorted(at, f.onset, "left"), np.searchsorted(at, f.end, "right")
        inside[first : end + num_ticks_after] = True
    return inside


def _joined(metric: str, panels: Sequence[Panel], cut: Sequence[Floats], rng: np.random.Generator) -> Floats:
    """(W, B): the complete windows of one metric over all panels that have it; `cut`: result of `windows_of` by
    panel."""
    parts = [w[:, p.shape.metrics.index(metric)] for p, w in zip(panels, cut, strict=True) if metric in p.shape.metrics]
    windows = np.concatenate(parts, axis=1)
    windows = windows[:, np.isfinite(windows).all(axis=0)]
    return windows[:, rng.permutation(windows.shape[1])[:NUM_WINDOWS_MAX]]


def train(windows: Floats, *, seed: int = 0, num_steps: int = NUM_STEPS, num_starts: int = NUM_STARTS) -> Weights:
    """(W, K, I, B) of scaled windows -> K models, trained side by side. The same seed gives the same weights.

    Each is trained from `num_starts` random starts, since some never learn more than a window's level; the best is
    kept.
    """
    num_models = windows.shape[1]
    trained = _train(np.repeat(windows, num_starts, axis=1), seed, num_steps)
    some = windows[..., :NUM_WINDOWS_COMPARED]
    errors = mean_squared_error(trained, np.repeat(some, num_starts, axis=1)).reshape(num_models, num_starts)
    return trained.taken([k * num_starts + int(best) for k, best in enumerate(errors.argmin(axis=1))])


def _train(windows: Floats, seed: int, num_steps: int) -> Weights:
    import torch

    num_ticks, num_models, num_inputs, num_windows = windows.shape
    random = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(num_models, num_inputs)
    shapes["spread_weight"], shapes["spread_bias"] = shapes["latent_weight"], shapes["latent_bias"]

    def begun(name: str, shape: tuple[int, int, int]) -> torch.Tensor:
        start = torch.rand(shape, generator=random) * 2 - 1
        if name == "spread_bias":
            start = torch.full(shape, SPREAD_BIAS)
        return start.requires_grad_(True)

    p = {name: begun(name, shape) for name, shape in shapes.items()}
    optimizer = torch.optim.Adam(list(p.values()), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    x_all = torch.from_numpy(np.ascontiguousarray(windows))
    for _ in range(num_steps):
        chosen = torch.randint(num_windows, (min(BATCH_WINDOWS, num_windows),), generator=random)
        x = x_all[..., chosen]
        size = (num_models, HIDDEN, x.shape[3])
        hidden, cell = torch.zeros(size), torch.zeros(size)
        for t in range(num_ticks):
            gates = p["encoder_input"] @ x[t] + p["encoder_hidden"] @ hidden + p["encoder_bias"]
            hidden, cell = _lstm(gates, cell)
        mean = p["latent_weight"] @ hidden + p["latent_bias"]
        log_variance = p["spread_weight"] @ hidden + p["spread_bias"]
        noise = torch.randn(mean.shape, generator=random)
        latent = mean + noise * torch.exp(0.5 * log_variance)
        constant = p["decoder_input"] @ latent + p["decoder_bias"]
        state = p["state_weight"] @ latent + p["state_bias"]
        hidden, cell = state[:, :HIDDEN].tanh(), state[:, HIDDEN:]
        given_back = []
        for _ in range(num_ticks):
            hidden, cell = _lstm(constant + p["decoder_hidden"] @ hidden, cell)
            given_back.append(p["output_weight"] @ hidden + p["output_bias"])
        off = torch.stack(given_back) - x
        error = off.square() + SHAPE_WEIGHT * (off - off.mean(dim=0)).square()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean(dim=1).sum()
        loss = error.mean(dim=(0, 2, 3)).sum() + KL_WEIGHT * divergence
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    kept = {f.name: p[f.name].detach().numpy().copy() for f in fields(Weights)}
    return Weights(**kept)


SPREAD_BIAS = -6.0
"""The latent's initial log variance: with a wide one, noise dominates the signal in the first hundreds of steps."""


def _lstm(gates: Any, cell: Any) -> tuple[Any, Any]:
    """One step, gates in the order of `Weights`: (hidden, cell), torch tensors."""
    opened = gates[:, : 3 * HIDDEN].sigmoid()
    cell = opened[:, HIDDEN : 2 * HIDDEN] * cell + opened[:, :HIDDEN] * gates[:, 3 * HIDDEN :].tanh()
    return opened[:, 2 * HIDDEN :] * cell.tanh(), cell


def priority(panels: Sequence[Panel], faults: Sequence[Sequence[LabelledFault]]) -> tuple[tuple[str, ...], int, int]:
    """(metrics nearest the tree's root first, faulty ticks, ticks); metrics that the tree does not use follow, ordered
    by how well each separates the ticks alone. Empty without faulty ticks or without healthy ones."""
    from sklearn.tree import DecisionTreeClassifier  # type: ignore[import-untyped]

    metrics = sorted({m for p in panels for m in p.shape.metrics})
    rows, labels = [], []
    for panel, some in zip(panels, faults, strict=True):
        scores, at = largest_scores(panel)
        full = np.zeros((len(at), len(metrics)))
        full[:, [metrics.index(m) for m in panel.shape.metrics]] = scores
        rows.append(full)
        labels.append(faulty(at, some))
    features, label = np.concatenate(rows), np.concatenate(labels)
    num_faulty = int(label.sum())
    if not 0 < num_faulty < len(label):
        return (), num_faulty, len(label)
    tree: Any = DecisionTreeClassifier(
        max_depth=TREE_DEPTH_MAX, min_samples_leaf=TREE_LEAF_RATIO, class_weight="balanced", random_state=0
    )
    tree.fit(features, label)
    asked = [metrics[m] for m in nearest_root(tree.tree_)]
    alone = _separation(features, label)
    rest = sorted((m for m in metrics if m not in asked), key=lambda m: (-alone[metrics.index(m)], m))
    return (*asked, *rest), num_faulty, len(label)


def nearest_root(tree: Any) -> list[int]:
    """The features of a scikit-learn tree in breadth-first order of their first split; within a level, the node with
    more samples comes first."""
    order: list[int] = []
    level = deque([0])
    while level:
        nodes = sorted(level, key=lambda node: -float(tree.weighted_n_node_samples[node]))
        level.clear()
        for node in nodes:
            if tree.children_left[node] < 0:
                continue
            feature = int(tree.feature[node])
            if feature not in order:
                order.append(feature)
            level.extend((tree.children_left[node], tree.children_right[node]))
    return order


def _separation(features: Scores, label: NDArray[np.bool_]) -> Scores:
    """(M,): distance between the mean scores of faulty and other ticks, in standard deviations."""
    spread = features.std(axis=0)
    gap = features[label].mean(axis=0) - features[~label].mean(axis=0)
    return np.where(spread > 0, gap / np.where(spread > 0, spread, 1), 0.0)


def largest_scores(panel: Panel) -> tuple[Scores, Times]:
    """((T', M), (T',) seconds): at evenly spaced ticks, the largest |z-score| over machines of each metric's window
    mean, 0 where there is none."""
    ticks = np.arange(WINDOW_TICKS - 1, len(panel.at))
    ticks = ticks[:: math.ceil(len(ticks) / NUM_TREE_TICKS_OF_PANEL) or 1]
    found = np.zeros((len(ticks), len(panel.shape.metrics)))
    for row, t in enumerate(ticks):
        window = panel.values[:, t + 1 - WINDOW_TICKS : t + 1].transpose(1, 0, 2)
        mean = nearest_filled(window).mean(axis=0, dtype=np.float64)
        known = np.isfinite(mean)
        num = np.maximum(known.sum(axis=1, keepdims=True), 1)
        centred = mean - np.where(known, mean, 0).sum(axis=1, keepdims=True) / num
        spread = np.sqrt(np.where(known, centred**2, 0).sum(axis=1, keepdims=True) / num)
        scores = np.abs(centred) / np.where(spread > 0, spread, 1)
        found[row] = np.where(known, scores, 0).max(axis=1)
    return found, panel.at[ticks]
