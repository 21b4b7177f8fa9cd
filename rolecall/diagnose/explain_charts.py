"""The drawings of `--explain`: a suspect against its peers, and a detector's score against its threshold. Pure.

Inline SVG on one time scale, seconds from the onset, with the onset and the moment of decision as vertical marks. A
series of any length becomes at most two points for each of `NUM_BUCKETS` stretches of time, its smallest and its
largest value, so that no excursion is lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rolecall.core.text import escape
from rolecall.detector.panels.panel import Panel, Times
from rolecall.reports.charts import LEFT, RIGHT, WIDTH, ticks

Series = NDArray[np.float64]

NUM_BUCKETS = 420
"""A suspect's line and the band of its peers then take about 10 kB each."""
PLOT_TOP = 34.0  # room for the words of the marks
PLOT_BOTTOM = 154.0
HEIGHT = PLOT_BOTTOM + 24
NUM_LINES_MAX = 4
"""More suspects than that in one drawing cannot be told apart."""
USUAL_TICKS, USUAL_TICKS_MIN = 600, 16
"""Before the onset: the suspect's place among its peers is that of so many, and of no fewer."""
BAND_VALUES_MAX = 20_000_000
"""Of a larger panel the band is computed at every k-th tick."""
BAND = (0.1, 0.5, 0.9)
"""Quantiles of the peers."""
SCORE_OVER_THRESHOLD_MAX = 5.0
"""A score is drawn up to so many thresholds: above it is an alarm anyway, and the crossing must stay visible."""
CONTEXT_BEFORE = 3.0
CONTEXT_AFTER = 1.0
"""So many times the delay from onset to decision is shown before and after."""
CONTEXT_TICKS = 30
"""But this many ticks at least."""


@dataclass(frozen=True, slots=True)
class Window:
    """What is drawn of time, seconds. `onset` and `decided` may lie outside: they are then drawn at the edge."""

    begin: float
    end: float
    onset: float
    decided: float

    def x(self, at: float) -> float:
        share = (at - self.begin) / max(self.end - self.begin, 1e-9)
        return round(LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT), 1)

    def holds(self, at: Times) -> NDArray[np.bool_]:
        return (at >= self.begin) & (at <= self.end)


def window(at: Times, interval_seconds: float, onset: float, decided: float) -> Window:
    """The stretch of `at` around onset and decision; all of it where they lie outside."""
    first, last = float(at[0]), float(at[-1])
    if not (math.isfinite(onset) and math.isfinite(decided) and onset <= last and decided >= first):
        return Window(first, last, onset, decided)
    delay = max(decided - onset, CONTEXT_TICKS * interval_seconds)
    return Window(
        max(first, onset - CONTEXT_BEFORE * delay), min(last, decided + CONTEXT_AFTER * delay), onset, decided
    )


def quantiles(values: NDArray[np.float32], shares: Sequence[float]) -> Series:
    """(shares, T) of values (T, N) over machines, NaN left out, linear between order statistics; NaN where none is."""
    count = np.isfinite(values).sum(axis=1)
    if not values.shape[1]:
        return np.full((len(shares), len(values)), np.nan)
    ordered = np.sort(values.astype(np.float64), axis=1)  # NaN last
    rows = np.arange(len(values))
    result = np.empty((len(shares), len(values)))
    for n, share in enumerate(shares):
        place = share * np.maximum(count - 1, 0)
        low = np.floor(place).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        result[n] = ordered[rows, low] * (1 - (place - low)) + ordered[rows, high] * (place - low)
    result[:, count == 0] = np.nan
    return result


# --- drawings -----------------------------------------------------------------------------------------------------


def metric_chart(panel: Panel, metric: int, suspects: Sequence[int], by: Window) -> str:
    """The suspects' lines over the band (10 to 90 %) and the median of all others, and where the first one usually is among
    them: a machine may be far from its own place and still within the band."""
    held = by.holds(panel.at)
    at, values = panel.at[held], panel.values[metric][held]
    peers = np.setdiff1d(np.arange(values.shape[1]), np.asarray(suspects, dtype=np.intp))
    stride = max(1, math.ceil(len(at) * len(peers) / BAND_VALUES_MAX))
    band = quantiles(values[::stride][:, peers], BAND)
    lines = [values[:, s].astype(np.float64) for s in suspects[:NUM_LINES_MAX]]
    usual = band[1] + _usual_distance(panel, metric, suspects[0], peers, by.onset)
    y = _Axis.of([band[0], band[2], usual, *lines])
    parts = [*_frame(by, y), _band(by, y, at[::stride], band[0], band[2])]
    parts.append(_line("median", by, y, at[::stride], band[1]))
    parts.append(_line("usual", by, y, at[::stride], usual))
    parts += [_line(f"suspect s{n}", by, y, at, line) for n, line in enumerate(lines)]
    return _svg(f"{panel.shape.metrics[metric]} over time", [*parts, *_marks(by)])


def _usual_distance(panel: Panel, metric: int, machine: int, peers: NDArray[np.intp], onset: float) -> float:
    """Median distance from the peers' median in the ticks before the onset; NaN where there are too few."""
    end = int(np.searchsorted(panel.at, onset))
    values = panel.values[metric, max(0, end - USUAL_TICKS) : end]
    distance = values[:, machine] - quantiles(values[:, peers], (0.5,))[0]
    known = distance[np.isfinite(distance)]
    return float(np.median(known)) if len(known) >= USUAL_TICKS_MIN else math.nan


def score_chart(at: Times, score: Series, threshold: Series, by: Window) -> tuple[str, bool]:
    """The drawing, and whether the score goes beyond it. `score` and `threshold`: of the length of `at`."""
    held = by.holds(at)
    at, score, threshold = at[held], score[held], threshold[held]
    limits = threshold[np.isfinite(threshold)]
    highest = SCORE_OVER_THRESHOLD_MAX * limits.max() if len(limits) and limits.max() > 0 else math.inf
    is_cut = bool((score > highest).any())
    score = np.minimum(score, highest)
    y = _Axis.of([score, threshold, np.zeros(1)])
    parts = [*_frame(by, y), _line("threshold", by, y, at, threshold), _line("suspect s0", by, y, at, score)]
    return _svg("score against its threshold", [*parts, *_marks(by)]), is_cut


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float

    @classmethod
    def of(cls, series: Sequence[Series]) -> "_Axis":
        """Holds all finite values, and a little more."""
        known = [s[np.isfinite(s)] for s in series]
        low = min((float(s.min()) for s in known if len(s)), default=0.0)
        high = max((float(s.max()) for s in known if len(s)), default=1.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - margin, high + margin)

    def y(self, value: float) -> float:
        return round(PLOT_BOTTOM - (value - self.low) / (self.high - self.low) * (PLOT_BOTTOM - PLOT_TOP), 1)

    def ticks(self) -> list[float]:
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))  # `ticks` rounds to nine places
        return [t * unit for t in ticks(self.low / unit, self.high / unit, 4)]


def _svg(label: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT:g}" role="img" aria-label="{escape(label, 200)}">'
    return head + "".join(parts) + "</svg>"


def _frame(by: Window, y: _Axis) -> list[str]:
    """Grid and numbers."""
    parts = []
    values = y.ticks()
    for value, word in zip(values, labels(values), strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y.y(value)}" x2="{WIDTH - RIGHT}" y2="{y.y(value)}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y.y(value) + 4:g}" text-anchor="end">{word}</text>')
    zero = by.onset if by.begin <= by.onset <= by.end else by.begin
    unit, per = next((u for u in UNITS if by.end - by.begin < u[1] * 180), UNITS[-1])
    for t in ticks((by.begin - zero) / per, (by.end - zero) / per, 8):
        x = by.x(zero + t * per)
        parts.append(f'<line class="grid" x1="{x}" y1="{PLOT_TOP:g}" x2="{x}" y2="{PLOT_BOTTOM:g}"/>')
        word = f"{t:+g} {unit}" if t else f"0 {unit}"
        anchor = "end" if x > WIDTH - RIGHT - 24 else "middle"
        parts.append(f'<text x="{x}" y="{PLOT_BOTTOM + 16:g}" text-anchor="{anchor}">{word.replace("-", "−")}</text>')
    return parts


UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86_400.0))


def labels(values: Sequence[float]) -> list[str]:
    """Short, and different from each other: `1.2k`, `3M`."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest and not 1e-3 <= largest < 1e16:
        return [f"{v:.3g}" for v in values]
    scale, suffix = next(((scale, word) for least, scale, word in SUFFIXES if largest >= least), (1.0, ""))
    shown = [v / scale for v in values]
    digits = next((d for d in range(7) if len({f"{v:.{d}f}" for v in shown}) == len(shown)), 6)
    return [f"{v:.{digits}f}{suffix}".replace("-", "−") for v in shown]


SUFFIXES = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From so much on, in units of so much, with this letter."""


def _marks(by: Window) -> list[str]:
    """Onset (dashed) and decision (solid), each with its word; the words in two rows, so that they never touch."""
    parts = []
    for css, at, word, row in (("onset", by.onset, "onset", 0), ("decided", by.decided, "decision", 1)):
        if not math.isfinite(at):
            continue
        x = by.x(at)
        left = x > WIDTH - RIGHT - 60
        where = f'x="{x - 4 if left else x + 4:g}" y="{12 + 14 * row:g}" text-anchor="{"end" if left else "start"}"'
        parts.append(f'<line class="{css}" x1="{x}" y1="{4 + 14 * row:g}" x2="{x}" y2="{PLOT_BOTTOM:g}"/>')
        parts.append(f'<text class="name" {where}>{word}</text>')
    return parts


def _stretches(at: Times, known: NDArray[np.bool_], by: Window) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of each known tick its stretch of time and its run: one ends where a stretch has ticks, and none is known."""
    share = (at - by.begin) / max(by.end - by.begin, 1e-9)
    stretch = np.clip((share * NUM_BUCKETS).astype(np.intp), 0, NUM_BUCKETS - 1)
    seen = np.unique(stretch)
    place = np.searchsorted(seen, stretch[known])
    return stretch[known], np.cumsum(np.diff(place, prepend=place[:1]) > 1)


def extremes(at: Times, values: Series, by: Window) -> list[list[tuple[float, float]]]:
    """(seconds, value) of the smallest and the largest value of each stretch of time, in order, run by run."""
    known = np.isfinite(values)
    if not known.any():
        return []
    stretch, run = _stretches(at, known, by)
    its_at, its_values = at[known], values[known]
    order = np.lexsort((its_values, stretch))
    first = np.flatnonzero(np.diff(stretch[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    picked = np.unique(np.concatenate((order[first], order[last])))
    edges = np.flatnonzero(np.diff(run[picked])) + 1
    return [list(zip(its_at[p].tolist(), its_values[p].tolist(), strict=True)) for p in np.split(picked, edges)]


def _line(css: str, by: Window, y: _Axis, at: Times, values: Series) -> str:
    parts = []
    for run in extremes(at, values, by):
        if len(run) == 1:
            parts.append(f'<circle class="{css} dot" cx="{by.x(run[0][0])}" cy="{y.y(run[0][1])}" r="1.5"/>')
            continue
        points = " ".join(f"{by.x(t)},{y.y(v)}" for t, v in run)
        parts.append(f'<polyline class="{css}" points="{points}"/>')
    return "".join(parts)


def _band(by: Window, y: _Axis, at: Times, low: Series, high: Series) -> str:
    """From the smallest lower to the largest upper quantile of each stretch."""
    known = np.isfinite(low)
    if not known.any():
        return ""
    stretch, run = _stretches(at, known, by)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    drawn = [
        (by.x(t), y.y(below), y.y(above))
        for t, below, above in zip(
            at[known][first].tolist(),
            np.minimum.reduceat(low[known], first).tolist(),
            np.maximum.reduceat(high[known], first).tolist(),
            strict=True,
        )
    ]
    parts = []
    edges = [0, *(np.flatnonzero(np.diff(run[first])) + 1).tolist(), len(drawn)]
    for begin, end in pairwise(edges):
        top = " ".join(f"{x},{above}" for x, _, above in drawn[begin:end])
        bottom = " ".join(f"{x},{below}" for x, below, _ in reversed(drawn[begin:end]))
        parts.append(f'<polygon class="peers" points="{top} {bottom}"/>')
    return "".join(parts)
