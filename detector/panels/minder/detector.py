"""Minder (NSDI 2025): a machine is faulty if its denoised metrics differ from those of its peers for long enough.

    for each metric, in the order of a learned priority:
        e_i  = the metric's LSTM-VAE (hidden 4, latent 8, one layer) applied to machine i's last 8 samples
        d_i  = sum over the other machines k of |e_i - e_k|
        s_i  = normal score of d_i over the machines
        the machine with the largest s is the candidate while s is above the threshold
    a candidate that stays the same for more than 4 minutes is named; the first such metric in the order decides

Samples are scaled to 0..1 by the smallest and largest value of the metric, over all machines and the last 15 minutes
(900 ticks, the data of one call in the paper); a missing sample is filled with the nearest in the window. The paper
runs the detector every 8 minutes; here it runs at every tick, which makes it an online detector. No later sample is
used.

Choices that the paper leaves open: the normal score excludes the machine itself and is written as a log-likelihood
ratio (`against_others`, `surprise`: same decisions as the z-score, but with a tail); the threshold of each metric is
learned in a warm-up (`TailThreshold`), with the requested rate shared equally among the metrics; 4 minutes are 240
ticks at one sample per second, and at least 8 ticks at longer intervals, because one bad sample is in 8 windows. A
named machine is neither peer nor candidate until it resembles the others again: in the paper it is replaced
immediately.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.errors import UnreadableInput
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.panels.peer_scores import (
    WINDOW_TICKS,
    PeerTracker,
    Scores,
    TailThreshold,
    against_others,
    block_length,
    block_probability,
    mean_distances,
    persistence_ticks,
    surprise,
)

HIDDEN, LATENT = 4, 8
CONTINUITY_SECONDS = 240.0
RANGE_TICKS = 900
"""15 minutes at one sample per second: the range that samples are scaled by."""
NUM_METRICS = 7
"""The paper uses the first seven metrics of the priority; fewer lower the recall, more lower the precision."""
SPREAD_MIN = 1e-3
"""Minimum spread of the distances, in units of the metric's range: smaller differences are within the denoiser's
error."""
BLOCK_TICKS_MAX = 60
"""The threshold is learned from scores that persist for this long, less than the 4 minutes: a warm-up of 10 minutes
has ten such blocks per machine. Alarms are therefore rarer than requested."""
COLUMNS_AT_ONCE = 4096
"""Windows that are denoised together: more would exceed the CPU cache."""
MODEL_BYTES_MAX = 16 << 20
MODEL_FORMAT = 1
BUILT_IN = Path(__file__).with_name("builtin.safetensors")
ANY_METRIC = "*"
"""Name of the denoiser for metrics without one of their own."""
CONFIDENCE = 0.9
"""The precision that the paper reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """K LSTM-VAEs side by side, for windows of I values per tick. H = 4 hidden, L = 8 latent; gate order: input,
    forget, output, candidate. Weights used only in training (the latent's spread) are not kept."""

    encoder_input: Floats  # (K, 4H, I)
    encoder_hidden: Floats  # (K, 4H, H)
    encoder_bias: Floats  # (K, 4H, 1)
    latent_weight: Floats  # (K, L, H)
    latent_bias: Floats  # (K, L, 1)
    state_weight: Floats  # (K, 2H, L): the decoder's first hidden and cell state, from the latent
    state_bias: Floats  # (K, 2H, 1)
    decoder_input: Floats  # (K, 4H, L)
    decoder_hidden: Floats  # (K, 4H, H)
    decoder_bias: Floats  # (K, 4H, 1)
    output_weight: Floats  # (K, I, H)
    output_bias: Floats  # (K, I, 1)

    def taken(self, rows: Sequence[int]) -> Self:
        """The models of these rows, in this order; a row may occur twice."""
        return type(self)(**{f.name: getattr(self, f.name)[list(rows)] for f in fields(self)})

    def stacked(self, other: Self) -> Self:
        """These models, followed by those of `other`."""
        both = {f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)}
        return type(self)(**both)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`metrics`: the metric of each of the K denoisers. `priority`: metrics in the order in which they are tried; empty
    if there were no labels to learn it from."""

    metrics: tuple[str, ...]
    weights: Weights
    priority: tuple[str, ...] = ()
    about: str = ""

    def rows(self, metrics: Sequence[str]) -> list[int]:
        """The denoiser of each metric; the general one if it has none of its own."""
        known = {name: k for k, name in enumerate(self.metrics)}
        return [known.get(m, known.get(ANY_METRIC, 0)) for m in metrics]

    def order(self, metrics: Sequence[str], num: int | None) -> list[int]:
        """Indices of a panel's metrics in the order in which they are tried: the first `num` of the priority if the
        panel has them all, else all metrics of the panel, those of the priority first."""
        first = self.priority[:num]
        here = {m: i for i, m in enumerate(metrics)}
        if first and all(m in here for m in first):
            return [here[m] for m in first]
        known = [m for m in self.priority if m in here]
        return [here[m] for m in (*known, *(m for m in metrics if m not in known))]


class Variant(StrEnum):
    """Ablations in the paper. RAW: no denoiser. CON: the denoised windows of all metrics as one vector. INT: one
    denoiser for all metrics together."""

    PER_METRIC = "per-metric"
    RAW = "raw"
    CONCATENATED = "concatenated"
    INTEGRATED = "integrated"


def denoise(weights: Weights, windows: Floats) -> Floats:
    """(W, K, I, N) -> (W, K, I, N): each window as reconstructed by the K-th model from the mean of its latent."""
    num_models, num_columns = windows.shape[1], windows.shape[3]
    at_once = max(1, COLUMNS_AT_ONCE // max(1, num_columns))
    found = np.empty_like(windows)
    for k in range(0, num_models, at_once):
        some = slice(k, k + at_once)
        found[:, some] = _denoise(weights.taken(range(num_models)[some]), windows[:, some])
    return found


def _denoise(w: Weights, windows: Floats) -> Floats:
    # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2: one tanh call computes all four gates.
    half = np.full((4 * HIDDEN, 1), 0.5, dtype=np.float32)
    half[3 * HIDDEN :] = 1
    shape = (windows.shape[1], HIDDEN, windows.shape[3])
    hidden, cell = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    from_input, from_hidden, bias = w.encoder_input * half, w.encoder_hidden * half, w.encoder_bias * half
    for x in windows:
        hidden, cell = _step(from_input @ x + bias, from_hidden, hidden, cell)
    latent = w.latent_weight @ hidden + w.latent_bias
    constant = (w.decoder_input * half) @ latent + w.decoder_bias * half
    from_hidden = w.decoder_hidden * half
    state = w.state_weight @ latent + w.state_bias
    hidden, cell = np.tanh(state[:, :HIDDEN]), state[:, HIDDEN:]
    found = np.empty_like(windows)
    for t in range(len(windows)):
        hidden, cell = _step(constant.copy(), from_hidden, hidden, cell)
        found[t] = w.output_weight @ hidden + w.output_bias
    return found


def _step(gates: Floats, from_hidden: Floats, hidden: Floats, cell: Floats) -> tuple[Floats, Floats]:
    """One step of an LSTM; overwrites `gates`."""
    gates += from_hidden @ hidden
    np.tanh(gates, out=gates)
    opened = gates[:, : 3 * HIDDEN]
    opened *= 0.5
    opened += 0.5
    cell = cell * gates[:, HIDDEN : 2 * HIDDEN]
    cell += gates[:, :HIDDEN] * gates[:, 3 * HIDDEN :]
    hidden = np.tanh(cell)
    hidden *= gates[:, 2 * HIDDEN : 3 * HIDDEN]
    return hidden, cell


def scaled(windows: Floats, low: Floats, high: Floats) -> Floats:
    """(W, K, N) to 0..1 by each metric's smallest and largest value (K,); 0 where they are equal."""
    span = high - low
    factor = np.where(span > 0, 1 / np.where(span > 0, span, 1), 0).astype(np.float32)
    return (windows - low[:, None]) * factor[:, None]


class Ranges:
    """Smallest and largest value of each metric over all machines and the last `RANGE_TICKS` ticks."""

    def __init__(self, num_metrics: int) -> None:
        self._low = np.full((RANGE_TICKS, num_metrics), np.nan, dtype=np.float32)
        self._high = self._low.copy()
        self._next = 0

    def push(self, values: Floats) -> tuple[Floats, Floats]:
        """(K, N) of the next tick -> (K,), (K,): smallest and largest, this tick included; NaN before any value."""
        self._low[self._next] = np.fmin.reduce(values, axis=1)
        self._high[self._next] = np.fmax.reduce(values, axis=1)
        self._next = (self._next + 1) % RANGE_TICKS
        return np.fmin.reduce(self._low, axis=0), np.fmax.reduce(self._high, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Minder:
    """`num_metrics`: number of priority metrics used, None for all. The other settings are the paper's ablations;
    `continuity_ticks` replaces the 4 minutes and does not change the thresholds."""

    name: ClassVar[str] = "minder"
    false_alarms_per_1000_machine_days: float
    model: Model
    num_metrics: int | None = NUM_METRICS
    variant: Variant = Variant.PER_METRIC
    continuity_ticks: int | None = None

    def track(self, shape: PanelShape) -> "MinderTracker":
        return MinderTracker(self, shape)


def make(false_alarms_per_1000_machine_days: float, *, model: Path | None = None) -> Minder:
    """`model`: a file written by `rolecall fit`; default: the built-in denoisers. Raises UnreadableInput."""
    asked = false_alarms_per_1000_machine_days
    return Minder(false_alarms_per_1000_machine_days=asked, model=read(model or BUILT_IN))


class MinderTracker(PeerTracker):
    def __init__(self, settings: Minder, shape: PanelShape) -> None:
        self._settings = settings
        self._order = settings.model.order(shape.metrics, settings.num_metrics)
        rows = settings.model.rows([shape.metrics[i] for i in self._order])
        together = settings.variant in (Variant.CONCATENATED, Variant.INTEGRATED)
        self._weights = settings.model.weights
        if settings.variant != Variant.INTEGRATED:
            self._weights = self._weights.taken(rows)
        num_machines, num_channels = len(shape.machines), 1 if together else len(rows)
        usual = persistence_ticks(CONTINUITY_SECONDS, shape.interval_seconds)
        self._num_ticks = settings.continuity_ticks or usual
        block, asked = min(block_length(usual), BLOCK_TICKS_MAX), settings.false_alarms_per_1000_machine_days
        tail = TailThreshold(block, block_probability(asked, block * shape.interval_seconds, num_channels))
        super().__init__(shape, len(rows), tail)
        self._ranges = Ranges(len(rows))
        self._sigmas = np.zeros((num_channels, num_machines))
        self._candidate = np.full(num_channels, -1)
        self._since = np.zeros(num_channels)
        self._num_held = np.zeros(num_channels, dtype=np.int64)
        self._standing = np.zeros(num_machines, dtype=np.bool_)
        self._num_like = np.zeros(num_machines, dtype=np.int64)

    def _tick(self, at: float, values: Floats) -> list[Finding]:
        tried = values[self._order]
        self._windows.push(tried)
        low, high = self._ranges.push(tried)
        if self._windows.num_ticks < WINDOW_TICKS:
            return []
        scores = self._scores(scaled(self._windows.filled(), low, high))
        if self._windows.num_ticks <= self._warm_up:
            self._tail.add(scores)
            return []
        return self._judge(at, scores, self._learned(scores))

    def _scores(self, windows: Floats) -> Scores:
        """(W, K, N) -> (C, N) of channel (a metric, or all of them) and machine."""
        match self._settings.variant:
            case Variant.RAW:
                points = windows
            case Variant.INTEGRATED:
                points = denoise(self._weights, windows[:, None]).reshape(-1, 1, windows.shape[2])
            case Variant.CONCATENATED:
                points = denoise(self._weights, windows[:, :, None]).reshape(-1, 1, windows.shape[2])
            case Variant.PER_METRIC:
                points = denoise(self._weights, windows[:, :, None])[:, :, 0]
        self._sigmas = against_others(mean_distances(points), ~self._standing, SPREAD_MIN)
        return surprise(self._sigmas, len(self._standing) - 1)

    def _judge(self, at: float, scores: Scores, thresholds: Scores) -> list[Finding]:
        above = scores > thresholds[:, None]
        self._num_like = np.where(above.any(axis=0), 0, self._num_like + 1)
        self._standing &= self._num_like < self._num_ticks
        open_scores = np.where(above & ~self._standing, scores, -np.inf)
        best = open_scores.argmax(axis=1)
        found = open_scores.max(axis=1) > -np.inf
        same = found & (best == self._candidate)
        self._since = np.where(same, self._since, at)
        self._num_held = np.where(same, self._num_held + 1, np.where(found, 1, 0))
        self._candidate = np.where(found, best, -1)
        held = np.flatnonzero(self._num_held >= self._num_ticks)
        if not len(held):
            return []
        channel = int(held[0])  # channels are in priority order
        machine = int(best[channel])
        self._standing[machine] = True
        self._num_like[machine] = 0
        mine = self._candidate == machine
        self._candidate[mine], self._num_held[mine] = -1, 0
        return [self._finding(at, channel, machine, float(scores[channel, machine]), float(thresholds[channel]))]

    def _finding(self, at: float, channel: int, machine: int, score: float, threshold: float) -> Finding:
        shape, settings = self._shape, self._settings
        single = settings.variant in (Variant.PER_METRIC, Variant.RAW)
        metric = shape.metrics[self._order[channel]] if single else "all metrics together"
        onset = float(self._since[channel])
        sigmas = float(self._sigmas[channel, machine])
        text = f"its distance to the others is {sigmas:.1f} standard deviations above theirs"
        because = (
            f"{shape.machines[machine].name} of {shape.name}: {metric} differs from its "
            f"{len(shape.machines) - 1} peers for {at - onset:.0f} s: {text} (log-likelihood ratio {score:.1f} over "
            f"{threshold:.1f}, for "
            f"{settings.false_alarms_per_1000_machine_days:g} false alarms per 1,000 machine-days)"
        )
        values = {"sigmas": sigmas, "score": score, "threshold": threshold, "seconds": at - onset}
        return Finding(
            detector=settings.name,
            suspects=(shape.suspect(machine),),
            fault_class=FaultClass.SLOW,
            onset=onset,
            detected_at=at,
            confidence=CONFIDENCE,
            because=because,
            evidence=(Evidence(kind=f"metric:{metric}", text=text, values=values),),
        )


def read(path: Path) -> Model:
    """The model written by `minder.fit.write`. Raises UnreadableInput: damaged, of another kind, not finite."""
    from safetensors import SafetensorError, safe_open

    where = str(path)
    try:
        if path.stat().st_size > MODEL_BYTES_MAX:
            raise UnreadableInput(where=where, reason=f"a model has at most {MODEL_BYTES_MAX:,} bytes")
        with safe_open(path, framework="numpy") as file:
            about: Any = json.loads((file.metadata() or {}).get("rolecall", "null"))
            arrays = {f.name: file.get_tensor(f.name) for f in fields(Weights)}
    except (OSError, SafetensorError, ValueError) as e:
        if isinstance(e, UnreadableInput):
            raise
        raise UnreadableInput(where=where, reason=f"not a model that rolecall fit wrote: {e}") from e
    return _checked(where, about, arrays)


def _checked(where: str, about: Any, arrays: dict[str, NDArray[Any]]) -> Model:
    if not isinstance(about, dict) or about.get("format") != MODEL_FORMAT:
        raise UnreadableInput(where=where, reason="not a model that rolecall fit wrote, or of another version")
    metrics, priority = (_names(where, about.get(key)) for key in ("metrics", "priority"))
    wanted = weight_shapes(len(metrics), 1)
    for name, shape in wanted.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
            raise UnreadableInput(where=where, reason=f"the model's {name} is not {shape} finite float32 numbers")
    return Model(
        metrics=metrics,
        weights=Weights(**arrays),
        priority=priority,
        about=str(about.get("about", "")),
    )


def _names(where: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, list) and all(isinstance(n, str) for n in names):
        return tuple(names)
    raise UnreadableInput(where=where, reason="the model does not say which metrics it is for")


def weight_shapes(num_models: int, num_inputs: int) -> dict[str, tuple[int, int, int]]:
    """Shape of each array of `Weights`."""
    k, gates = num_models, 4 * HIDDEN
    return {
        "encoder_input": (k, gates, num_inputs),
        "encoder_hidden": (k, gates, HIDDEN),
        "encoder_bias": (k, gates, 1),
        "latent_weight": (k, LATENT, HIDDEN),
        "latent_bias": (k, LATENT, 1),
        "state_weight": (k, 2 * HIDDEN, LATENT),
        "state_bias": (k, 2 * HIDDEN, 1),
        "decoder_input": (k, gates, LATENT),
        "decoder_hidden": (k, gates, HIDDEN),
        "decoder_bias": (k, gates, 1),
        "output_weight": (k, num_inputs, HIDDEN),
        "output_bias": (k, num_inputs, 1),
    }
