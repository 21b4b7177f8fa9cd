"""Line charts over training steps, readable in light and dark themes. Titles contain the unit."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, TypeVar

import altair as alt

from rolecall.dashboards.data.progress import Bucket

LINE, SECOND, THIRD = "#3b7dd8", "#c2711c", "#7a8290"
"""Blue, orange, grey: 3:1 contrast on white and on Streamlit's dark page, and distinguishable when colour-blind."""
DASHES = ([1, 0], [6, 3], [2, 2])
"""Dash patterns of the first, second and third line, so that colour is not the only cue."""
HEIGHT_PIXELS = 210
POINTS_MAX = 200
SPECS_KEPT = 64
Extent = tuple[float, float]
T = TypeVar("T")


def rows(curve: Sequence[Bucket], value: Callable[[Bucket], float]) -> list[dict[str, float]]:
    """(step, value) of the finite points, at most `POINTS_MAX`, always including the latest."""
    known = [b for b in curve if math.isfinite(value(b))]
    return [{"step": b.last_step, "value": value(b)} for b in thinned(known)]


def thinned(points: Sequence[T]) -> Sequence[T]:
    """At most `POINTS_MAX` of them, evenly spaced, always including the latest."""
    return points[::-1][:: math.ceil(len(points) / POINTS_MAX) or 1][::-1]


def curve(points: Sequence[dict[str, float]], title: str, *, colour: str = LINE, figures: str = "~s") -> dict[str, Any]:
    """Vega-Lite spec of one line over steps, without data. `figures`: d3 format of the axis. The spec rarely changes
    while points are added, so the browser redraws the line, not the whole chart."""
    across, up = _rounded([p["step"] for p in points]), _rounded([p["value"] for p in points])
    base = _base(title, across, up, figures)
    mark = base.mark_line(color=colour, strokeWidth=2) if len(points) > 1 else base.mark_point(color=colour)
    return _without_data(mark)


def curves(
    lines: Mapping[str, Sequence[dict[str, float]]],
    title: str,
    *,
    across: tuple[float, float],
    figures: str = "~s",
    zero: bool = True,
) -> dict[str, Any]:
    """Spec of up to three named lines, with colours and dashes. `across`: first and last step of the axis, to align
    several charts. `zero`: the value axis starts at 0."""
    values = [p["value"] for points in lines.values() for p in points]
    up = _rounded([0.0, *values] if zero else values)
    # A copy, because Streamlit may modify it.
    return deepcopy(_spec(tuple(lines), title, _rounded(across), up, figures, max(map(len, lines.values())) > 1))


@lru_cache(SPECS_KEPT)
def _spec(
    names: tuple[str, ...], title: str, across: Extent, up: Extent, figures: str, are_lines: bool
) -> dict[str, Any]:
    """Cached: building one takes 20 ms, and a page draws eight per viewer every few seconds."""
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolSize=200, **_CLOSE) if names[1:] else None
    colours, dashes = [LINE, SECOND, THIRD][: len(names)], list(DASHES[: len(names)])
    series = alt.Tooltip("line:N", title="series")
    base = _base(title, across, up, figures, series).encode(
        color=alt.Color("line:N", scale=alt.Scale(domain=list(names), range=colours), legend=legend)
    )
    if not are_lines:
        return _without_data(base.mark_point())
    dash = alt.StrokeDash("line:N", scale=alt.Scale(domain=list(names), range=dashes), legend=legend)
    return _without_data(base.mark_line(strokeWidth=2).encode(strokeDash=dash))


def _base(title: str, across: Extent, up: Extent, figures: str, *tooltips: alt.Tooltip) -> alt.Chart:
    axis = {"tickCount": 4, "labelFlush": True}
    shown = [alt.Tooltip("step:Q", format=","), *tooltips, alt.Tooltip("value:Q", title=title, format=",.4~g")]
    return (
        alt.Chart(alt.NamedData("points"))
        .encode(
            x=alt.X("step:Q", title=None, scale=_scale(across), axis=alt.Axis(grid=False, format="~s", **axis)),
            y=alt.Y("value:Q", title=None, scale=_scale(up), axis=alt.Axis(format=figures, **axis)),
            tooltip=shown,
        )
        .properties(height=HEIGHT_PIXELS, title=alt.TitleParams(title, anchor="start", fontSize=13))
    )


_CLOSE = {"offset": 0, "padding": 0, "columnPadding": 8, "labelFontSize": 11, "labelOffset": 3}
"""A compact legend: three names fit into a third of the page width."""


def line_columns(lines: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, list[Any]]:
    """The data for `curves`."""
    every = [(name, p) for name, points in lines.items() for p in points]
    return {
        "step": [p["step"] for _, p in every],
        "value": [p["value"] for _, p in every],
        "line": [name for name, _ in every],
    }


def _without_data(chart: alt.Chart) -> dict[str, Any]:
    return {k: v for k, v in chart.to_dict().items() if k not in ("data", "$schema", "config")}


def _scale(extent: Extent) -> Any:
    return alt.Scale(domain=list(extent), nice=False)


def _rounded(values: Sequence[float]) -> Extent:
    """Explicit domain, because Vega first renders without data and warns about an empty extent. Rounded, so it rarely
    changes."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    grain = 10 ** math.floor(math.log10(span)) / 5
    return math.floor(low / grain) * grain, math.ceil(high / grain) * grain
