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


def curve(points: Sequence[dict[str, float]], title: str, *, colour: str = LINE, figures: str = "~s") -> Any:
    """One curve over steps; a point tells its values. `figures`: how the axis writes numbers (d3-format)."""
    # Domains are given: Vega draws once before the data has come, and complains of an empty extent.
    steps, values = [p["step"] for p in points], [p["value"] for p in points]
    axis = {"tickCount": 4, "labelFlush": True}
    base = alt.Chart(alt.Data(values=list(points))).encode(
        x=alt.X("step:Q", title=None, scale=_domain(steps, nice=False), axis=alt.Axis(grid=False, format="~s", **axis)),
        y=alt.Y("value:Q", title=None, scale=_domain(values), axis=alt.Axis(format=figures, **axis)),
        tooltip=[alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", title=title, format=",.4~g")],
    )
    mark = base.mark_line(color=colour, strokeWidth=2) if len(points) > 1 else base.mark_point(color=colour)
    return mark.properties(height=HEIGHT_PIXELS, title=alt.TitleParams(title, anchor="start", fontSize=13))


def _domain(values: Sequence[float], *, nice: bool = True) -> Any:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return alt.Scale(domain=[low, high], nice=nice)
