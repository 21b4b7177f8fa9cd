"""An incident drawn on one axis of time: its moments by number, and below them the suspect's series over the band of its
peers. Altair values; texts from elsewhere stand in data, never in specifications, and are plain.

A suspect is a thick line with points of a shape of its own; peers are a band with a dashed median; a limit is a dotted
rule with its name. Each kind of moment has a row, a shape and a number that the list below the drawing explains.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt

from rolecall.dashboards.pages.incidents.signals import Signal
from rolecall.dashboards.pages.incidents.timeline import IncidentTimeline, Moment, TimelineEntryKind, TimelineRange

SIGNAL_HEIGHT = 140
X_AXIS_HEIGHT = 72
"""Of the last drawing, which alone has the numbers of the axis."""
ROW_HEIGHT = 26
NUMBER_SHARE = 0.07
"""Of the axis: moments of one row that are nearer than this have one number text."""
POINTS_MAX = 1_500
"""Of one drawing: more are thinned, keeping the extremes of each stretch."""
PADDING = {"left": 2, "right": 26, "top": 4, "bottom": 2}
AXIS_WIDTH = 66
"""Room for numbers at the left, the same in every drawing, so that all stand on one axis."""

SUSPECT, PEER, LIMIT, RULE = "#d1495b", "#4d7ea8", "#b8860b", "#808080"
"""Readable on white and on near-black."""
SHAPES: dict[TimelineEntryKind, str] = {
    TimelineEntryKind.FAULT: "cross",
    TimelineEntryKind.ONSET: "triangle-right",
    TimelineEntryKind.FOUND: "diamond",
    TimelineEntryKind.KNOWN: "circle",
    TimelineEntryKind.PLAN: "square",
    TimelineEntryKind.HELD: "stroke",
    TimelineEntryKind.PERSON: "wedge",
    TimelineEntryKind.ACTION: "triangle-up",
    TimelineEntryKind.FAILED: "cross",
    TimelineEntryKind.RUN: "circle",
    TimelineEntryKind.PROOF: "triangle-down",
    TimelineEntryKind.VERIFIED: "arrow",
    TimelineEntryKind.CLOSED: "square",
}
DASHES: dict[TimelineEntryKind, list[int]] = {
    TimelineEntryKind.FAULT: [1, 3],
    TimelineEntryKind.ONSET: [4, 4],
    TimelineEntryKind.FOUND: [1, 0],
    TimelineEntryKind.ACTION: [8, 3],
    TimelineEntryKind.PROOF: [2, 2],
    TimelineEntryKind.VERIFIED: [10, 2, 2, 2],
}
ROWS: dict[str, tuple[TimelineEntryKind, ...]] = {
    "fault": (TimelineEntryKind.FAULT, TimelineEntryKind.ONSET),
    "finding": (TimelineEntryKind.FOUND, TimelineEntryKind.KNOWN),
    "decision": (TimelineEntryKind.PLAN, TimelineEntryKind.HELD, TimelineEntryKind.PERSON),
    "action": (TimelineEntryKind.ACTION, TimelineEntryKind.FAILED),
    "run": (TimelineEntryKind.RUN,),
    "proof": (TimelineEntryKind.PROOF, TimelineEntryKind.VERIFIED, TimelineEntryKind.CLOSED),
}
"""Kinds of moments that share a row."""
ROW_OF = {mark: row for row, marks in ROWS.items() for mark in marks}


def story_charts(told: IncidentTimeline, axis: TimelineRange, signals: Sequence[Signal]) -> list[Any]:
    """One below the other, each as wide as its container: they stand on one axis because each leaves the same room at its
    left and shows the same time."""
    shown = [m for m in told.moments if axis.begin <= m.at <= axis.end]
    moments = _moments(shown, axis, last=not signals)
    drawn = [moments, *(_signal(s, shown, axis, last=s is signals[-1]) for s in signals)]
    return [
        d.configure_view(stroke=None).configure_axis(labelFontSize=11, titleFontSize=11).configure(padding=PADDING)
        for d in drawn
    ]


def _x(axis: TimelineRange, *, labels: bool) -> Any:
    """Seconds from the onset, and below them the time of day in UTC."""
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


def _moments(moments: Sequence[Moment], axis: TimelineRange, *, last: bool) -> Any:
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
        alt.Tooltip("kind:N", title="what"),
        alt.Tooltip("after:Q", title="seconds", format="+.2f"),
        alt.Tooltip("at:N", title="UTC"),
        alt.Tooltip("words:N", title="words"),
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
        width="container", height=height + 20, title=_title("What happened, by number")
    )


def _numbers(moments: Sequence[Moment], axis: TimelineRange) -> Iterator[dict[str, object]]:
    """Those that would touch in one row share one text: `7–9`."""
    near = NUMBER_SHARE * (axis.end - axis.begin)
    for row in ROWS:
        group: list[Moment] = []
        for m in [m for m in moments if ROW_OF[m.mark] == row]:
            if group and m.at - group[-1].at > near:
                yield _label(row, group, axis)
                group = []
            group.append(m)
        if group:
            yield _label(row, group, axis)


def _label(row: str, group: Sequence[Moment], axis: TimelineRange) -> dict[str, object]:
    first, last = group[0].number, group[-1].number
    follow = len(group) > 2 and last - first == len(group) - 1
    text = f"{first}–{last}" if follow else ", ".join(str(m.number) for m in group)
    return {"after": group[-1].at - axis.zero, "row": row, "number": text}


def _rules(moments: Iterable[Moment], axis: TimelineRange, x: Any) -> list[Any]:
    """Through everything: the moments that count most, each kind with dashes of its own."""
    found = []
    for mark, dashes in DASHES.items():
        values = [{"after": m.at - axis.zero} for m in moments if m.mark is mark]
        if values:
            rules = alt.Chart(alt.Data(values=values)).mark_rule(color=RULE, opacity=0.7, strokeDash=dashes)
            found.append(rules.encode(x=x))
    return found


def _signal(s: Signal, moments: Sequence[Moment], axis: TimelineRange, *, last: bool) -> Any:
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
