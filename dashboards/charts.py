"""Small curves of the run, for both themes: the colours are readable on light and on dark, and each chart says its unit."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from rolecall.dashboards.now_course import Bucket

LINE, SECOND = "#3b7dd8", "#c2711c"
"""Blue and orange: 3:1 against white and against Streamlit's dark page, and told apart by everybody."""
HEIGHT_PIXELS = 210
POINTS_MAX = 200


def rows(curve: Sequence[Bucket], value: Callable[[Bucket], float]) -> list[dict[str, float]]:
    """(step, value) of the points that have a value, at most `POINTS_MAX` of them, the newest always."""
    known = [b for b in curve if math.isfinite(value(b))]
    stride = math.ceil(len(known) / POINTS_MAX) or 1
    kept = known[::-1][::stride][::-1]
    return [{"step": b.last_step, "value": value(b)} for b in kept]


def columns(points: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """The same, as a table of columns: what goes with `curve`."""
    return {name: [p[name] for p in points] for name in ("step", "value")}


def curve(points: Sequence[dict[str, float]], title: str, *, colour: str = LINE, figures: str = "~s") -> dict[str, Any]:
    """The description of one curve over steps, without its data; a point tells its values. `figures`: how the axis writes
    numbers (d3-format). It stays the same while points come, so that a browser redraws the line and not the chart."""
    axis = {"tickCount": 4, "labelFlush": True}
    across, up = _domain([p["step"] for p in points]), _domain([p["value"] for p in points])
    base = alt.Chart(alt.NamedData("points")).encode(
        x=alt.X("step:Q", title=None, scale=across, axis=alt.Axis(grid=False, format="~s", **axis)),
        y=alt.Y("value:Q", title=None, scale=up, axis=alt.Axis(format=figures, **axis)),
        tooltip=[alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", title=title, format=",.4~g")],
    )
    mark = base.mark_line(color=colour, strokeWidth=2) if len(points) > 1 else base.mark_point(color=colour)
    whole = mark.properties(height=HEIGHT_PIXELS, title=alt.TitleParams(title, anchor="start", fontSize=13))
    spec: dict[str, Any] = whole.to_dict()
    return {k: v for k, v in spec.items() if k not in ("data", "$schema", "config")}


def _domain(values: Sequence[float]) -> Any:
    """Given, because Vega draws once before the data has come and complains of an empty extent; round, so that it seldom
    changes."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    grain = 10 ** math.floor(math.log10(span)) / 5
    return alt.Scale(domain=[math.floor(low / grain) * grain, math.ceil(high / grain) * grain], nice=False)
