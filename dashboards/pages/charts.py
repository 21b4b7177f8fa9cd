"""Line charts over training steps with the bands of faults, readable in light and dark themes. Titles contain the unit.

A fault has a letter, the same in every chart of a page, as in `report.html`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import altair as alt

from rolecall.dashboards.data.progress import Bucket
from rolecall.views.ettr import UNDETECTED

LINE, SECOND, THIRD = "#3b7dd8", "#c2711c", "#7a8290"
"""Blue, orange, grey: 3:1 contrast on white and on Streamlit's dark page, and distinguishable when colour-blind."""
FAULT = "#d1495b"
DASHES = ([1, 0], [6, 3], [2, 2])
"""Dash patterns of the first, second and third line, so that colour is not the only cue."""
CLASS_COLOURS = {
    "crash": "#c8423f", "hang": "#d9822b", "slow": "#b8931c", "silent_corruption": "#8e5bd1",
    "wrong_weights": "#b04fa8", "resource_exhausted": "#8a7350", "network": "#2f7fd1", "gpu": "#1f9e89",
    "node_lost": "#6b7684", "user_code": "#5c9a45", "data": "#3c9cbd", "control_plane": "#9a5b3b",
    "cannot_tell": "#8f98a3", UNDETECTED: "#5656c0",
}  # fmt: skip
"""Colour of each fault class, the same on every page and in every run."""
HEIGHT_PIXELS = 200
POINTS_MAX = 200
SPECS_KEPT = 64
LABEL_SHARE = 0.05
"""Share of the axis that the letter of a band takes."""
HEADROOM = 1.2
"""Room for the letters above the lines."""
SPACED_PERCENT = "replace(datum.label, '%', ' %')"
"""Labels of an axis as in texts: `20 %`."""
Extent = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultBand:
    """The steps from the onset of a fault to its end."""

    key: str  # A, B, C ...
    title: str
    first_step: float
    last_step: float


def rows(curve: Sequence[Bucket], value: Callable[[Bucket], float]) -> list[dict[str, float]]:
    """(step, value) of the finite points, at most `POINTS_MAX`, always including the latest."""
    known = [b for b in curve if math.isfinite(value(b))]
    return [{"step": b.last_step, "value": value(b)} for b in thinned(known)]


def thinned(points: Sequence[T]) -> Sequence[T]:
    """At most `POINTS_MAX` of them, evenly spaced, always including the latest."""
    return points[::-1][:: math.ceil(len(points) / POINTS_MAX) or 1][::-1]


def curves(
    lines: Mapping[str, Sequence[dict[str, float]]],
    title: str,
    *,
    across: tuple[float, float],
    figures: str = "~s",
    zero: bool = True,
    colour: str = LINE,
) -> dict[str, Any]:
    """Vega-Lite spec of up to three named lines over steps and the bands of faults, without data (`columns`). The spec
    rarely changes while points are added, so the browser redraws the lines, not the whole chart. `across`: first and
    last step of the axis, to align several charts. `figures`: d3 format of the value axis. `zero`: it starts at 0."""
    values = [p["value"] for points in lines.values() for p in points]
    low = min([0.0, *values] if zero else values)
    up = _rounded([low, low + HEADROOM * (max(values) - low)])
    if "%" in figures:
        up = up[0], min(up[1], max(1.0, *values))  # no share is above 100 %
    colours = (colour, SECOND, THIRD)
    is_line = max(map(len, lines.values())) > 1
    # A copy, because Streamlit may modify it.
    return deepcopy(_spec(tuple(lines), title, _rounded(across), up, figures, colours, is_line))


@lru_cache(SPECS_KEPT)
def _spec(
    names: tuple[str, ...],
    title: str,
    across: Extent,
    up: Extent,
    figures: str,
    colours: tuple[str, ...],
    is_line: bool,
) -> dict[str, Any]:
    """Cached: building one takes 20 ms, and a page draws eight per viewer every few seconds."""
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolSize=200, **_CLOSE) if names[1:] else None
    axis = {"tickCount": 4, "labelFlush": True}
    x_axis = alt.Axis(grid=False, format="~s", titleFontWeight="normal", titlePadding=2, **axis)
    at = alt.X("step:Q", title="step", scale=_scale(across), axis=x_axis)
    every = alt.Chart(alt.NamedData("points"))
    bands = every.transform_filter("isValid(datum.until)").encode(x=at, tooltip=alt.Tooltip("fault:N", title="fault"))
    base = every.transform_filter("isValid(datum.value)").encode(
        x=at,
        y=alt.Y(
            "value:Q", title=None, scale=_scale(up), axis=alt.Axis(format=figures, labelExpr=SPACED_PERCENT, **axis)
        ),
        color=alt.Color("line:N", scale=alt.Scale(domain=list(names), range=colours[: len(names)]), legend=legend),
        tooltip=[
            alt.Tooltip("step:Q", format=","),
            *([alt.Tooltip("line:N", title="series")] if names[1:] else []),
            alt.Tooltip("value:Q", title=title, format=",.4~g"),
        ],
    )
    dashes = alt.Scale(domain=list(names), range=list(DASHES[: len(names)]))
    line = base.mark_line(strokeWidth=2).encode(strokeDash=alt.StrokeDash("line:N", scale=dashes, legend=legend))
    chart = alt.layer(
        bands.mark_rect(color=FAULT, opacity=0.13).encode(x2="until:Q"),
        bands.mark_rule(color=FAULT, opacity=0.6, strokeDash=[2, 3]),
        line if is_line else base.mark_point(),
        *(
            bands.transform_filter(f"(datum.step > {across[0] + 0.9 * (across[1] - across[0])}) == {is_last}")
            .mark_text(
                color=FAULT,
                fontWeight="bold",
                fontSize=11,
                align="right" if is_last == "true" else "left",
                dx=-3 if is_last == "true" else 3,
                baseline="top",
            )
            .encode(y=alt.value(2), text=alt.Text("key:N"))
            for is_last in ("false", "true")  # at the right end a label would leave the chart
        ),
    ).properties(
        height=HEIGHT_PIXELS,
        padding={"left": 0, "right": 12, "top": 4, "bottom": 0},
        title=alt.TitleParams(title, anchor="start", fontSize=13, fontWeight=600),
    )
    return {k: v for k, v in chart.to_dict().items() if k not in ("data", "$schema", "config", "datasets")}


_CLOSE = {"offset": 0, "padding": 0, "columnPadding": 8, "labelFontSize": 11, "labelOffset": 3}
"""A compact legend: three names fit into a third of the page width."""


def columns(
    lines: Mapping[str, Sequence[dict[str, float]]], bands: Sequence[FaultBand] = ()
) -> dict[str, list[float | str | None]]:
    """The data for `curves`: the points of its lines, then a row for each band."""
    every = [(name, p) for name, points in lines.items() for p in points]
    none = [None] * len(bands)
    return {
        "step": [*(p["step"] for _, p in every), *(b.first_step for b in bands)],
        "value": [*(p["value"] for _, p in every), *none],
        "line": [*(name for name, _ in every), *none],
        "until": [*([None] * len(every)), *(b.last_step for b in bands)],
        "key": [*([""] * len(every)), *_labels(bands, max((p["step"] for _, p in every), default=0.0))],
        "fault": [*([""] * len(every)), *(b.title for b in bands)],
    }


def _labels(bands: Sequence[FaultBand], last_step: float) -> list[str]:
    """The letter of each band; those that would overlap have one label at the first of them: `C–F`."""
    groups: list[list[FaultBand]] = []
    for band in bands:
        near = groups and band.first_step - groups[-1][0].first_step < LABEL_SHARE * last_step
        groups = [*groups[:-1], [*groups[-1], band]] if near else [*groups, [band]]
    first = {g[0].key: g[0].key if len(g) == 1 else f"{g[0].key}–{g[-1].key}" for g in groups}
    return [first.get(b.key, "") for b in bands]


def _scale(extent: Extent) -> Any:
    return alt.Scale(domain=list(extent), nice=False)


def _rounded(values: Sequence[float]) -> Extent:
    """Explicit domain, because Vega first renders without data and warns about an empty extent. Rounded, so it rarely
    changes."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    grain = 10 ** math.floor(math.log10(span)) / 5
    return math.floor(low / grain) * grain, math.ceil(high / grain) * grain
