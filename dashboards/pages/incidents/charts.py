"""Charts of an incident on one time axis: numbered timeline entries, and below them the suspects' series over the band
of their peers. Untrusted text appears only in chart data, never in specs.

A suspect is a thick line with its own point shape; peers are a band with a dashed median; a threshold is a dotted line
with a label. Each kind of entry has a row, a shape and a number, explained in the list below the chart.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import altair as alt

from rolecall.core.text import utc
from rolecall.dashboards.pages.incidents.signals import Signal
from rolecall.dashboards.pages.incidents.timeline import (
    IncidentTimeline,
    TimelineEntry,
    TimelineEntryKind,
    TimelineRange,
)

SIGNAL_HEIGHT, MAIN_HEIGHT = 130, 260
"""Of a series; the first one is the evidence itself."""
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
LOOKS: dict[TimelineEntryKind, tuple[str, str]] = {
    TimelineEntryKind.FAULT: ("fault", "cross"),
    TimelineEntryKind.ONSET: ("fault", "triangle-right"),
    TimelineEntryKind.DETECTED: ("diagnosis", "diamond"),
    TimelineEntryKind.UPDATED: ("diagnosis", "circle"),
    TimelineEntryKind.EVIDENCE: ("diagnosis", "circle"),
    TimelineEntryKind.PLAN: ("plan", "square"),
    TimelineEntryKind.BLOCKED: ("plan", "stroke"),
    TimelineEntryKind.OPERATOR: ("plan", "wedge"),
    TimelineEntryKind.PAGED: ("plan", "wedge"),
    TimelineEntryKind.ACTION: ("action", "triangle-up"),
    TimelineEntryKind.FAILED: ("action", "cross"),
    TimelineEntryKind.RUN: ("run", "circle"),
    TimelineEntryKind.WEIGHTS: ("recovery", "triangle-down"),
    TimelineEntryKind.VERIFIED: ("recovery", "arrow"),
    TimelineEntryKind.CLOSED: ("recovery", "square"),
}
"""Row and shape of each kind of entry."""
ROWS = tuple(dict.fromkeys(row for row, _ in LOOKS.values()))
DASHES: dict[TimelineEntryKind, list[int]] = {
    TimelineEntryKind.FAULT: [1, 3],
    TimelineEntryKind.ONSET: [4, 4],
    TimelineEntryKind.DETECTED: [1, 0],
    TimelineEntryKind.ACTION: [8, 3],
    TimelineEntryKind.WEIGHTS: [2, 2],
    TimelineEntryKind.VERIFIED: [10, 2, 2, 2],
}


def incident_charts(timeline: IncidentTimeline, axis: TimelineRange, signals: Sequence[Signal]) -> list[Any]:
    """Charts to be stacked, each as wide as its container. Their time axes align, because all have the same range and
    the same width of the value axis."""
    shown = [m for m in timeline.moments if axis.begin <= m.at <= axis.end]
    moments = _moments(shown, axis, last=not signals)
    drawn = [moments, *(_signal(s, shown, axis, last=s is signals[-1], height=_height(s, signals)) for s in signals)]
    return [
        d.configure_view(stroke=None).configure_axis(labelFontSize=11, titleFontSize=11).configure(padding=PADDING)
        for d in drawn
    ]


def _height(signal: Signal, signals: Sequence[Signal]) -> int:
    return MAIN_HEIGHT if signal is signals[0] and not signal.of_run else SIGNAL_HEIGHT


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
    rows = [r for r in ROWS if any(LOOKS[m.kind][0] == r for m in moments)]
    values = [
        {
            "after": moment.at - axis.zero,
            "row": LOOKS[moment.kind][0],
            "kind": str(moment.kind),
            "number": str(moment.number),
            "at": _clock(moment.at),
            "words": moment.words[:200],
        }
        for moment in moments
    ]
    y_axis = alt.Axis(minExtent=AXIS_WIDTH, maxExtent=AXIS_WIDTH, ticks=False, grid=True, gridOpacity=0.25)
    x_channel, y_channel = _x(axis, labels=last), alt.Y("row:N", sort=rows, title=None, axis=y_axis)
    tooltip = [
        alt.Tooltip("number:N", title="number"),
        alt.Tooltip("kind:N", title="event"),
        alt.Tooltip("after:Q", title="seconds", format="+.2f"),
        alt.Tooltip("at:N", title="UTC"),
        alt.Tooltip("words:N", title="text"),
    ]
    shapes = alt.Scale(domain=[str(k) for k in LOOKS], range=[shape for _, shape in LOOKS.values()])
    points = (
        alt.Chart(alt.Data(values=values))
        .mark_point(size=80, filled=True, opacity=0.9, color=SUSPECT)
        .encode(x=x_channel, y=y_channel, shape=alt.Shape("kind:N", scale=shapes, legend=None), tooltip=tooltip)
    )
    numbers = (
        alt.Chart(alt.Data(values=list(_numbers(moments, axis))))
        .mark_text(dx=8, align="left", fontSize=12, fontWeight="bold", color=RULE)
        .encode(x=x_channel, y=y_channel, text="number:N")
    )
    height = max(1, len(rows)) * ROW_HEIGHT + (X_AXIS_HEIGHT if last else 0)
    return alt.layer(*_rules(moments, axis, x_channel), points, numbers).properties(
        width="container", height=height + 20, title=_title("Events (numbers refer to the list below)")
    )


def _numbers(moments: Sequence[TimelineEntry], axis: TimelineRange) -> Iterator[dict[str, object]]:
    """Number labels; entries that would overlap in a row share one: `7–9`."""
    near = NUMBER_SHARE * (axis.end - axis.begin)
    for row in ROWS:
        group: list[TimelineEntry] = []
        for moment in [m for m in moments if LOOKS[m.kind][0] == row]:
            if group and moment.at - group[-1].at > near:
                yield _label(row, group, axis)
                group = []
            group.append(moment)
        if group:
            yield _label(row, group, axis)


def _label(row: str, group: Sequence[TimelineEntry], axis: TimelineRange) -> dict[str, object]:
    first, last = group[0].number, group[-1].number
    follow = len(group) > 2 and last - first == len(group) - 1
    text = f"{first}–{last}" if follow else ", ".join(str(m.number) for m in group)
    return {"after": group[-1].at - axis.zero, "row": row, "number": text}


def _rules(moments: Iterable[TimelineEntry], axis: TimelineRange, x_channel: Any) -> list[Any]:
    """Vertical rules for the most important entries, each kind with its own dash pattern."""
    found = []
    for kind, dashes in DASHES.items():
        values = [{"after": m.at - axis.zero} for m in moments if m.kind is kind]
        if values:
            rules = alt.Chart(alt.Data(values=values)).mark_rule(color=RULE, opacity=0.7, strokeDash=dashes)
            found.append(rules.encode(x=x_channel))
    return found


def _signal(signal: Signal, moments: Sequence[TimelineEntry], axis: TimelineRange, *, last: bool, height: int) -> Any:
    x_channel = _x(axis, labels=last)
    layers = _rules(moments, axis, x_channel)
    scale = alt.Scale(zero=signal.unit != "bytes", nice=True)
    y_axis = alt.Axis(
        minExtent=AXIS_WIDTH,
        maxExtent=AXIS_WIDTH,
        ticks=False,
        format="~s" if signal.unit == "bytes" else ",.3~g",
        tickCount=4,
        gridOpacity=0.4,
    )
    if signal.band:
        rows = [
            {"after": at - axis.zero, "low": low, "middle": middle, "high": high, "at": _clock(at)}
            for at, low, middle, high in signal.band
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
            x=x_channel, y=alt.Y("low:Q", title=None, scale=scale, axis=y_axis), y2="high:Q", tooltip=tooltip
        )
        middle = base.mark_line(color=PEER, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x_channel, y="middle:Q")
        layers += [band, middle]
    for number, line in enumerate(signal.lines):
        rows = [
            {"after": at - axis.zero, "value": value, "who": line.name, "at": _clock(at)}
            for at, value in line.points
            if axis.begin <= at <= axis.end
        ]
        base = alt.Chart(alt.Data(values=rows[:: max(1, len(rows) // POINTS_MAX)]))
        layers.append(
            base.mark_line(
                color=PEER if signal.of_run else SUSPECT,
                strokeWidth=2.25,
                strokeDash=[[1, 0], [7, 3], [2, 2], [9, 3, 2, 3]][number % 4],
                point=alt.OverlayMarkDef(
                    shape=["circle", "square", "diamond", "triangle-up"][number % 4],
                    size=28,
                    color=PEER if signal.of_run else SUSPECT,
                ),
            ).encode(
                x=x_channel,
                y=alt.Y("value:Q", title=None, scale=scale, axis=y_axis),
                tooltip=[
                    alt.Tooltip("who:N", title="of" if signal.of_run else "suspect"),
                    alt.Tooltip("after:Q", title="seconds", format="+.2f"),
                    alt.Tooltip("at:N", title="UTC"),
                    alt.Tooltip("value:Q", title="value", format=".4g"),
                ],
            )
        )
    if signal.limit is not None:
        limit = alt.Chart(alt.Data(values=[{"value": signal.limit.value, "label": signal.limit.label}]))
        layers.append(limit.mark_rule(color=LIMIT, strokeDash=[2, 2], strokeWidth=1.5).encode(y="value:Q"))
        layers.append(
            limit.mark_text(color=LIMIT, align="left", dx=4, dy=-6, fontSize=11).encode(
                x=alt.value(0), y="value:Q", text="label:N"
            )
        )
    unit = f" [{signal.unit}]" if signal.unit else ""
    title = _title(f"{signal.title}{unit}")
    return alt.layer(*layers).properties(width="container", height=height + (X_AXIS_HEIGHT if last else 0), title=title)


def _title(text: str) -> Any:
    return alt.TitleParams(text, anchor="start", frame="bounds", fontSize=12, fontWeight="normal", offset=4)


def _clock(at: float) -> str:
    return utc(at, "%H:%M:%S.%f", "unknown   ")[:-3]
