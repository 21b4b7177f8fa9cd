"""Charts of an incident on one time axis: numbered timeline entries, and below them the suspects' series over the band
of their peers. Untrusted text appears only in chart data, never in specs.

A suspect is a thick line with its own point shape; peers are a band with a dashed median; a threshold is a dotted line
with a label. Each kind of entry has a row, a shape and a number, explained in the list below the chart.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt

from rolecall.dashboards.pages.incidents.signals import Signal
from rolecall.dashboards.pages.incidents.timeline import (
    IncidentTimeline,
    TimelineEntry,
    TimelineEntryKind,
    TimelineRange,
)

SIGNAL_HEIGHT = 140
X_AXIS_HEIGHT = 72
"""Height of the time axis labels, which only the last chart has."""
ROW_HEIGHT = 26
NUMBER_SHARE = 0.07
"""Share of the axis: entries of one row that are closer share one label."""
POINTS_MAX = 1_500
"""Points per line and chart; more are thinned out."""
PADDING = {"left": 2, "right": 26, "top": 4, "bottom": 2}
AXIS_WIDTH = 66
"""Width of the value axis, the same in every chart, so that all time axes align."""

SUSPECT, PEER, LIMIT, RULE = "#d1495b", "#4d7ea8", "#b8860b", "#808080"
"""Readable on white and near-black."""
SHAPES: dict[TimelineEntryKind, str] = {
    TimelineEntryKind.FAULT: "cross",
    TimelineEntryKind.ONSET: "triangle-right",
    TimelineEntryKind.DETECTED: "diamond",
    TimelineEntryKind.UPDATED: "circle",
    TimelineEntryKind.PLAN: "square",
    TimelineEntryKind.BLOCKED: "stroke",
    TimelineEntryKind.OPERATOR: "wedge",
    TimelineEntryKind.ACTION: "triangle-up",
    TimelineEntryKind.FAILED: "cross",
    TimelineEntryKind.RUN: "circle",
    TimelineEntryKind.WEIGHTS: "triangle-down",
    TimelineEntryKind.VERIFIED: "arrow",
    TimelineEntryKind.CLOSED: "square",
}
DASHES: dict[TimelineEntryKind, list[int]] = {
    TimelineEntryKind.FAULT: [1, 3],
    TimelineEntryKind.ONSET: [4, 4],
    TimelineEntryKind.DETECTED: [1, 0],
    TimelineEntryKind.ACTION: [8, 3],
    TimelineEntryKind.WEIGHTS: [2, 2],
    TimelineEntryKind.VERIFIED: [10, 2, 2, 2],
}
ROWS: dict[str, tuple[TimelineEntryKind, ...]] = {
    "fault": (TimelineEntryKind.FAULT, TimelineEntryKind.ONSET),
    "diagnosis": (TimelineEntryKind.DETECTED, TimelineEntryKind.UPDATED),
    "plan": (TimelineEntryKind.PLAN, TimelineEntryKind.BLOCKED, TimelineEntryKind.OPERATOR),
    "action": (TimelineEntryKind.ACTION, TimelineEntryKind.FAILED),
    "run": (TimelineEntryKind.RUN,),
    "recovery": (TimelineEntryKind.WEIGHTS, TimelineEntryKind.VERIFIED, TimelineEntryKind.CLOSED),
}
"""Row -> kinds of entries in it."""
ROW_OF = {mark: row for row, marks in ROWS.items() for mark in marks}


def incident_charts(timeline: IncidentTimeline, axis: TimelineRange, signals: Sequence[Signal]) -> list[Any]:
    """Charts to be stacked, each as wide as its container. Their time axes align, because all have the same range and
    the same width of the value axis."""
    shown = [m for m in timeline.moments if axis.begin <= m.at <= axis.end]
    moments = _moments(shown, axis, last=not signals)
    drawn = [moments, *(_signal(s, shown, axis, last=s is signals[-1]) for s in signals)]
    return [
        d.configure_view(stroke=None).configure_axis(labelFontSize=11, titleFontSize=11).configure(padding=PADDING)
        for d in drawn
    ]


def _x(axis: TimelineRange, *, labels: bool) -> Any:
    """Time axis: seconds from the onset, and below them the time of day in UTC."""
    zero = round(axis.zero * 1000)
    words = f"[format(datum.value, '+,~g') + ' s', utcFormat({zero} + datum.value * 1000, '%H:%M:%S')]"
    return alt.X(
        "after:Q",
        scale=alt.Scale(domain=[axis.begin - axis.zero, axis.end - axis.zero], nice=False),
        axis=alt.Axis(
            title="seconds from the onset; time of day in UTC" if labels else None,
            labelExpr=words,
            labels=labels,
            ticks=labels,
            tickCount=6,
            grid=True,
            gridOpacity=0.4,
            labelOverlap="greedy",
            labelFlush=False,
            labelBound=False,
        ),
    )


def _moments(moments: Sequence[TimelineEntry], axis: TimelineRange, *, last: bool) -> Any:
    rows = [r for r in ROWS if any(ROW_OF[m.mark] == r for m in moments)]
    values = [
        {
            "after": m.at - axis.zero,
            "row": ROW_OF[m.mark],
            "kind": str(m.mark),
            "number": str(m.number),
            "at": _clock(m.at),
            "words": m.words[:200],
        }
        for m in moments
    ]
    y_axis = alt.Axis(minExtent=AXIS_WIDTH, maxExtent=AXIS_WIDTH, ticks=False, grid=True, gridOpacity=0.25)
    x, y = _x(axis, labels=last), alt.Y("row:N", sort=rows, title=None, axis=y_axis)
    tooltip = [
        alt.Tooltip("number:N", title="number"),
        alt.Tooltip("kind:N", title="event"),
        alt.Tooltip("after:Q", title="seconds", format="+.2f"),
        alt.Tooltip("at:N", title="UTC"),
        alt.Tooltip("words:N", title="text"),
    ]
    shapes = alt.Scale(domain=[str(k) for k in TimelineEntryKind], range=[SHAPES[k] for k in TimelineEntryKind])
    points = (
        alt.Chart(alt.Data(values=values))
        .mark_point(size=80, filled=True, opacity=0.9, color=SUSPECT)
        .encode(x=x, y=y, shape=alt.Shape("kind:N", scale=shapes, legend=None), tooltip=tooltip)
    )
    numbers = (
        alt.Chart(alt.Data(values=list(_numbers(moments, axis))))
        .mark_text(dx=8, align="left", fontSize=12, fontWeight="bold", color=RULE)
        .encode(x=x, y=y, text="number:N")
    )
    height = max(1, len(rows)) * ROW_HEIGHT + (X_AXIS_HEIGHT if last else 0)
    return alt.layer(*_rules(moments, axis, x), points, numbers).properties(
        width="container", height=height + 20, title=_title("Events (numbers refer to the list below)")
    )


def _numbers(moments: Sequence[TimelineEntry], axis: TimelineRange) -> Iterator[dict[str, object]]:
    """Number labels; entries that would overlap in a row share one: `7–9`."""
    near = NUMBER_SHARE * (axis.end - axis.begin)
    for row in ROWS:
        group: list[TimelineEntry] = []
        for m in [m for m in moments if ROW_OF[m.mark] == row]:
            if group and m.at - group[-1].at > near:
                yield _label(row, group, axis)
                group = []
            group.append(m)
        if group:
            yield _label(row, group, axis)


def _label(row: str, group: Sequence[TimelineEntry], axis: TimelineRange) -> dict[str, object]:
    first, last = group[0].number, group[-1].number
    follow = len(group) > 2 and last - first == len(group) - 1
    text = f"{first}–{last}" if follow else ", ".join(str(m.number) for m in group)
    return {"after": group[-1].at - axis.zero, "row": row, "number": text}


def _rules(moments: Iterable[TimelineEntry], axis: TimelineRange, x: Any) -> list[Any]:
    """Vertical rules for the most important entries, each kind with its own dash pattern."""
    found = []
    for mark, dashes in DASHES.items():
        values = [{"after": m.at - axis.zero} for m in moments if m.mark is mark]
        if values:
            rules = alt.Chart(alt.Data(values=values)).mark_rule(color=RULE, opacity=0.7, strokeDash=dashes)
            found.append(rules.encode(x=x))
    return found


def _signal(s: Signal, moments: Sequence[TimelineEntry], axis: TimelineRange, *, last: bool) -> Any:
    x = _x(axis, labels=last)
    layers = _rules(moments, axis, x)
    scale = alt.Scale(zero=s.unit != "bytes", nice=True)
    y_axis = alt.Axis(
        minExtent=AXIS_WIDTH,
        maxExtent=AXIS_WIDTH,
        ticks=False,
        format="~s" if s.unit == "bytes" else ",.3~g",
        tickCount=4,
        gridOpacity=0.4,
    )
    if s.band:
        rows = [
            {"after": at - axis.zero, "low": low, "middle": middle, "high": high, "at": _clock(at)}
            for at, low, middle, high in s.band
            if axis.begin <= at <= axis.end
        ]
        base = alt.Chart(alt.Data(values=rows[:: max(1, len(rows) // POINTS_MAX)]))
        tooltip = [
            alt.Tooltip("after:Q", title="seconds", format="+.1f"),
            alt.Tooltip("low:Q", title="smallest peer", format=".4g"),
            alt.Tooltip("middle:Q", title="median peer", format=".4g"),
            alt.Tooltip("high:Q", title="largest peer", format=".4g"),
        ]
        band = base.mark_area(color=PEER, opacity=0.3).encode(
            x=x, y=alt.Y("low:Q", title=None, scale=scale, axis=y_axis), y2="high:Q", tooltip=tooltip
        )
        middle = base.mark_line(color=PEER, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x, y="middle:Q")
        layers += [band, middle]
    for n, line in enumerate(s.lines):
        rows = [
            {"after": at - axis.zero, "value": value, "who": line.name, "at": _clock(at)}
            for at, value in line.points
            if axis.begin <= at <= axis.end
        ]
        base = alt.Chart(alt.Data(values=rows[:: max(1, len(rows) // POINTS_MAX)]))
        layers.append(
            base.mark_line(
                color=PEER if s.of_run else SUSPECT,
                strokeWidth=2.25,
                strokeDash=[[1, 0], [7, 3], [2, 2], [9, 3, 2, 3]][n % 4],
                point=alt.OverlayMarkDef(
                    shape=["circle", "square", "diamond", "triangle-up"][n % 4],
                    size=28,
                    color=PEER if s.of_run else SUSPECT,
                ),
            ).encode(
                x=x,
                y=alt.Y("value:Q", title=None, scale=scale, axis=y_axis),
                tooltip=[
                    alt.Tooltip("who:N", title="of" if s.of_run else "suspect"),
                    alt.Tooltip("after:Q", title="seconds", format="+.2f"),
                    alt.Tooltip("at:N", title="UTC"),
                    alt.Tooltip("value:Q", title="value", format=".4g"),
                ],
            )
        )
    if s.limit is not None:
        limit = alt.Chart(alt.Data(values=[{"value": s.limit.value, "label": s.limit.label}]))
        layers.append(limit.mark_rule(color=LIMIT, strokeDash=[2, 2], strokeWidth=1.5).encode(y="value:Q"))
        layers.append(
            limit.mark_text(color=LIMIT, align="left", dx=4, dy=-6, fontSize=11).encode(
                x=alt.value(0), y="value:Q", text="label:N"
            )
        )
    unit = f" [{s.unit}]" if s.unit else ""
    title = _title(f"{s.title}{unit}")
    return alt.layer(*layers).properties(
        width="container", height=SIGNAL_HEIGHT + (X_AXIS_HEIGHT if last else 0), title=title
    )


def _title(text: str) -> Any:
    return alt.TitleParams(text, anchor="start", frame="bounds", fontSize=12, fontWeight="normal", offset=4)


def _clock(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return "unknown"
