"""The charts of `--explain`: a suspect against its peers, and a detector's score against its threshold.

The series are computed by pure functions and rendered by Altair on one time axis, seconds from the onset, with onset
and decision as vertical rules. A series of any length becomes at most two points for each of `NUM_BUCKETS` stretches of
time, its smallest and its largest value, so that no excursion is lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import numpy as np
from numpy.typing import NDArray

from rolecall.detector.panels.panel import Panel, Times
from rolecall.reports.charts import PLOT_WIDTH, Rows, layer, pixels, render

Series = NDArray[np.float64]

NUM_BUCKETS = 420
"""A suspect's line and the band of its peers then take about 10 kB each."""
PLOT_TOP = 34.0  # labels of onset and decision
PLOT_HEIGHT = 120.0
NUM_LINES_MAX = 4
"""Suspects in one chart; more cannot be told apart."""
LINE_STYLES = (("var(--bad)", [1, 0]), ("var(--accent)", [7, 3]), ("var(--good)", [2, 3]), ("var(--ink)", [9, 3, 2, 3]))
"""Colour and dashes of each suspect."""
USUAL_TICKS, USUAL_TICKS_MIN = 600, 16
"""Ticks before the onset from which the suspect's usual distance from its peers is computed: at most, and at least."""
BAND_VALUES_MAX = 20_000_000
"""Of a larger panel the band is computed at every k-th tick."""
BAND = (0.1, 0.5, 0.9)
"""Quantiles of the peers."""
SCORE_OVER_THRESHOLD_MAX = 5.0
"""A score is cut at this many thresholds: anything above is an alarm anyway, and the crossing must stay visible."""
CONTEXT_BEFORE = 3.0
CONTEXT_AFTER = 1.0
"""The window spans this many times the delay from onset to decision, before and after."""
CONTEXT_TICKS = 30
"""But this many ticks at least."""
UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86_400.0))


@dataclass(frozen=True, slots=True)
class Window:
    """The time span of a chart, seconds. `onset` and `decided` may lie outside: their rules are then at the edge."""

    begin: float
    end: float
    onset: float
    decided: float

    def holds(self, at: Times) -> NDArray[np.bool_]:
        return (at >= self.begin) & (at <= self.end)


def window(at: Times, interval_seconds: float, onset: float, decided: float) -> Window:
    """The part of `at` around onset and decision; all of it if they lie outside."""
    first, last = float(at[0]), float(at[-1])
    if not (math.isfinite(onset) and math.isfinite(decided) and onset <= last and decided >= first):
        return Window(first, last, onset, decided)
    delay = max(decided - onset, CONTEXT_TICKS * interval_seconds)
    return Window(
        max(first, onset - CONTEXT_BEFORE * delay), min(last, decided + CONTEXT_AFTER * delay), onset, decided
    )


def quantiles(values: NDArray[np.float32], shares: Sequence[float]) -> Series:
    """(shares, T) of values (T, N) over machines: NaN ignored, linear between order statistics; NaN where all are."""
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


# --- series -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedMetric:
    """One metric in a window. `band`: quantiles (3, T') of the peers at the times `band_at` (T'); `usual`: the peers'
    median plus the first suspect's usual distance from it (T'); `suspects`: a series (T) each, at the times `at`
    (T)."""

    at: Times
    suspects: list[Series]
    band_at: Times
    band: Series
    usual: Series


def metric_series(panel: Panel, metric: int, suspects: Sequence[int], by: Window) -> PlottedMetric:
    held = by.holds(panel.at)
    at, values = panel.at[held], panel.values[metric][held]
    peers = np.setdiff1d(np.arange(values.shape[1]), np.asarray(suspects, dtype=np.intp))
    stride = max(1, math.ceil(len(at) * len(peers) / BAND_VALUES_MAX))
    band = quantiles(values[::stride][:, peers], BAND)
    return PlottedMetric(
        at=at,
        suspects=[values[:, s].astype(np.float64) for s in suspects[:NUM_LINES_MAX]],
        band_at=at[::stride],
        band=band,
        usual=band[1] + _usual_distance(panel, metric, suspects[0], peers, by.onset),
    )


def _usual_distance(panel: Panel, metric: int, machine: int, peers: NDArray[np.intp], onset: float) -> float:
    """Median distance from the peers' median in the ticks before the onset; NaN if there are too few."""
    end = int(np.searchsorted(panel.at, onset))
    values = panel.values[metric, max(0, end - USUAL_TICKS) : end]
    distance = values[:, machine] - quantiles(values[:, peers], (0.5,))[0]
    known = distance[np.isfinite(distance)]
    return float(np.median(known)) if len(known) >= USUAL_TICKS_MIN else math.nan


def _buckets(at: Times, known: NDArray[np.bool_], by: Window) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The bucket of each known tick, and its run: a run ends where a bucket has ticks and none of them is known."""
    share = (at - by.begin) / max(by.end - by.begin, 1e-9)
    bucket = np.clip((share * NUM_BUCKETS).astype(np.intp), 0, NUM_BUCKETS - 1)
    seen = np.unique(bucket)
    place = np.searchsorted(seen, bucket[known])
    return bucket[known], np.cumsum(np.diff(place, prepend=place[:1]) > 1)


def extremes(at: Times, values: Series, by: Window) -> list[list[tuple[float, float]]]:
    """(seconds, value) of the smallest and the largest value of each bucket, in order, run by run."""
    known = np.isfinite(values)
    if not known.any():
        return []
    bucket, run = _buckets(at, known, by)
    known_at, known_values = at[known], values[known]
    order = np.lexsort((known_values, bucket))
    first = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    picked = np.unique(np.concatenate((order[first], order[last])))
    edges = np.flatnonzero(np.diff(run[picked])) + 1
    return [list(zip(known_at[p].tolist(), known_values[p].tolist(), strict=True)) for p in np.split(picked, edges)]


# --- charts -------------------------------------------------------------------------------------------------------


def metric_chart(panel: Panel, metric: int, suspects: Sequence[int], by: Window) -> tuple[str, bool]:
    """The suspects' lines over the band (10 to 90 %) and the median of their peers, and whether the first suspect's
    usual place among them is known and drawn: a machine may be far from its own place and still within the band."""
    series = metric_series(panel, metric, suspects, by)
    axes = _Axes(by, [series.band[0], series.band[2], series.usual, *series.suspects])
    layers = [axes.band(series.band_at, series.band[0], series.band[2])]
    layers += axes.line(series.band_at, series.band[1], "var(--soft)", 1.25)
    layers += axes.line(series.band_at, series.usual, "var(--bad)", 1, [2, 3])
    for line, (colour, dash) in zip(series.suspects, LINE_STYLES, strict=False):
        layers += axes.line(series.at, line, colour, 1.75, dash)
    svg = axes.render(layers, f"{panel.shape.metrics[metric]} over time")
    return svg, bool(np.isfinite(series.usual).any())


def score_chart(at: Times, score: Series, threshold: Series, by: Window) -> tuple[str, bool]:
    """The chart, and whether the score exceeds it. `score` and `threshold` have the length of `at`."""
    held = by.holds(at)
    at, score, threshold = at[held], score[held], threshold[held]
    limits = threshold[np.isfinite(threshold)]
    highest = SCORE_OVER_THRESHOLD_MAX * limits.max() if len(limits) and limits.max() > 0 else math.inf
    is_cut = bool((score > highest).any())
    score = np.minimum(score, highest)
    axes = _Axes(by, [score, threshold, np.zeros(1)])
    layers = [
        *axes.line(at, threshold, "var(--warn)", 1.5, [6, 4]),
        *axes.line(at, score, LINE_STYLES[0][0], 1.75),
    ]
    return axes.render(layers, "score against its threshold"), is_cut


class _Axes:
    """Scales of one chart: time from the onset in a readable unit, and values with a margin of 5 %."""

    def __init__(self, by: Window, series: Sequence[Series]) -> None:
        self._by = by
        self._zero = by.onset if by.begin <= by.onset <= by.end else by.begin
        self._unit, self._per = next((u for u in UNITS if by.end - by.begin < u[1] * 180), UNITS[-1])
        known = [s[np.isfinite(s)] for s in series]
        low = min((float(s.min()) for s in known if len(s)), default=0.0)
        high = max((float(s.max()) for s in known if len(s)), default=1.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        # Vega computes in units of the largest value: it cannot place ticks at 1e34.
        largest = max(abs(low - margin), abs(high + margin))
        self._power = 10.0 ** math.floor(math.log10(largest)) if not 1e-3 <= largest < 1e16 else 1.0
        self._domain = [(low - margin) / self._power, (high + margin) / self._power]

    def time(self, at: float) -> float:
        return (at - self._zero) / self._per

    def _x(self) -> alt.X:
        domain = [self.time(self._by.begin), max(self.time(self._by.end), self.time(self._by.begin) + 1e-9)]
        axis = alt.Axis(format="+~g", labelExpr=f"datum.label + ' {self._unit}'", tickCount=8, grid=True)
        scale = alt.Scale(domain=domain, nice=False, clamp=True)
        return alt.X("at", type="quantitative", scale=scale, axis=axis, title=None)

    def _y(self) -> alt.Y:
        power = f" + 'e{math.log10(self._power):.0f}'" if self._power != 1.0 else ""
        axis = alt.Axis(format="~s", labelExpr=f"datum.label{power}", tickCount=4, grid=True)
        return alt.Y(
            "value", type="quantitative", scale=alt.Scale(domain=self._domain, nice=False), axis=axis, title=None
        )

    def line(
        self, at: Times, values: Series, colour: str, width: float, dash: Sequence[int] = (1, 0)
    ) -> list[alt.Chart]:
        """A line for each run of known values, and a dot for a run of one."""
        runs = extremes(at, values, self._by)
        rows = [
            {"at": self.time(t), "value": value / self._power, "run": number}
            for number, run in enumerate(runs)
            if len(run) > 1
            for t, value in run
        ]
        dots = [{"at": self.time(t), "value": v / self._power} for run in runs if len(run) == 1 for t, v in run]
        place = {"x": self._x(), "y": self._y()}
        return [
            layer(rows)
            .mark_line(color=colour, strokeWidth=width, strokeDash=list(dash))
            .encode(**place, detail="run:N"),
            layer(dots).mark_circle(color=colour, size=7, opacity=1).encode(**place),
        ]

    def band(self, at: Times, low: Series, high: Series) -> alt.Chart:
        """From the smallest lower to the largest upper quantile of each bucket."""
        known = np.isfinite(low)
        rows: Rows = []
        if known.any():
            bucket, run = _buckets(at, known, self._by)
            first = np.flatnonzero(np.diff(bucket, prepend=-1))
            rows = [
                {"at": self.time(t), "value": below / self._power, "upper": above / self._power, "run": int(number)}
                for t, below, above, number in zip(
                    at[known][first].tolist(),
                    np.minimum.reduceat(low[known], first).tolist(),
                    np.maximum.reduceat(high[known], first).tolist(),
                    run[first].tolist(),
                    strict=True,
                )
            ]
        area = layer(rows).mark_area(color="var(--lane)", opacity=0.3)
        return area.encode(x=self._x(), y=self._y(), y2="upper:Q", detail="run:N")

    def render(self, layers: Sequence[alt.Chart], label: str) -> str:
        """With onset (dashed) and decision (solid); their labels are in two rows, so that they never touch."""
        rules: list[alt.Chart] = []
        for at, name, top, dash in (
            (self._by.onset, "onset", 4 - PLOT_TOP, [3, 3]),
            (self._by.decided, "decision", 18 - PLOT_TOP, [1, 0]),
        ):
            if not math.isfinite(at):
                continue
            row = {"at": self.time(at), "y": top, "y2": PLOT_HEIGHT, "name": name}
            share = (at - self._by.begin) / max(self._by.end - self._by.begin, 1e-9)
            on_left = share * PLOT_WIDTH > PLOT_WIDTH - 60
            rules += [
                layer([row])
                .mark_rule(color="var(--ink)", strokeDash=dash)
                .encode(x=self._x(), y=pixels("y"), y2="y2:Q"),
                layer([row])
                .mark_text(align="right" if on_left else "left", dx=-4 if on_left else 4, dy=6, fontSize=12.5)
                .encode(x=self._x(), y=pixels("y"), text="name:N"),
            ]
        return render([alt.layer(*layers), *rules], label, PLOT_HEIGHT, top=PLOT_TOP)
