"""The charts of `report.html`: Altair charts rendered to inline SVG, all on one time scale.

A fault has a letter, the same in every chart and in the text; badges that would touch go into rows above each other.
Colours are CSS variables of the page (`style.py`), so that the charts follow its light and dark themes. Every shape
carries a `<title>` for the pointer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt
import vl_convert

from rolecall.core.ids import role_of
from rolecall.core.membership import STANDBY_ROLES, is_standby
from rolecall.core.text import escape, plain, seconds
from rolecall.views.lifetimes import replica_order

WIDTH = 1120
"""Of a chart, in SVG units; the page scales it."""
LEFT = 104  # names of lanes, labels of the y axis
RIGHT = 14
BOTTOM = 24
PLOT_WIDTH = WIDTH - LEFT - RIGHT
ROW = 27  # one lane
GROUP_GAP = 9
BAR = 13
BADGE_ROW = 20
ROLE_ORDER = ("trainer", "rollout", *STANDBY_ROLES, "reward", "controller")
SMOOTH_STEPS = 5
"""The bold reward curve is the mean of this many steps: the reward of one step has the noise of one batch."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentMarker:
    """One incident (or missed fault) as the charts show it. Times are seconds after the start of the run."""

    key: str  # A, B, C ...
    replica: str
    label: str
    began: float
    found: float | None
    resolved: float | None
    ends: float
    injected: bool = True  # False: no injected fault matches this incident

    @property
    def title(self) -> str:
        return plain(f"{self.key}: {self.label} on {self.replica}")


def key_of(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> A2."""
    letter = chr(ord("A") + number % 26)
    return letter if number < 26 else f"{letter}{number // 26 + 1}"


def incident_markers(report: Mapping[str, Any]) -> list[IncidentMarker]:
    """Incidents in order, then the faults that were missed."""
    zero, end = float(report["started_at"]), float(report["wall_seconds"])

    def after(at: Any) -> float | None:
        return None if at is None else float(at) - zero

    markers = []
    for number, incident in enumerate(report["incidents"]):
        fault = incident["fault"]
        suspect = incident["suspects"][0].partition("#")[0] if incident["suspects"] else ""
        closed, resolved = after(incident["closed_at"]), after(incident["resolved_at"])
        markers.append(
            IncidentMarker(
                key=key_of(number),
                replica=str(fault["target"] if fault else suspect),
                label=fault["kind"] if fault else incident["fault_class"],
                began=float(fault["injected_at"] if fault else incident["onset"]) - zero,
                found=after(incident["detected_at"]),
                resolved=resolved,
                ends=resolved if resolved is not None else closed if closed is not None else end,
                injected=fault is not None,
            )
        )
    for number, fault in enumerate(report["missed"], start=len(markers)):
        markers.append(
            IncidentMarker(
                key=key_of(number),
                replica=fault["target"],
                label=f"{fault['kind']}, missed",
                began=float(fault["injected_at"]) - zero,
                found=None,
                resolved=None,
                ends=end,
            )
        )
    return markers


def badge_rows(xs: Sequence[float], width: float = 22.0) -> list[int]:
    """For each x, in order, the lowest row in which its badge touches no other."""
    last: list[float] = []
    rows = []
    for position in xs:
        row = next((n for n, taken in enumerate(last) if position - taken >= width), len(last))
        if row == len(last):
            last.append(position)
        last[row] = position
        rows.append(row)
    return rows


def lane_order(lanes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Replicas grouped by role, roles in the order of the page."""
    groups: dict[str, set[str]] = {}
    for lane in lanes:
        groups.setdefault(role_of(str(lane["replica"])), set()).add(str(lane["replica"]))

    roles = sorted(groups, key=lambda r: (ROLE_ORDER.index(r) if r in ROLE_ORDER else len(ROLE_ORDER), r))
    return [sorted(groups[r], key=lambda replica: (replica_order(replica), replica)) for r in roles]


def render(layers: Sequence[alt.Chart], label: str, height: float, *, top: float = 6) -> str:
    """The layers, on one time axis and each with its own y scale, as an SVG element."""
    chart = (
        alt.layer(*layers)
        .resolve_scale(y="independent")
        .properties(
            width=PLOT_WIDTH,
            height=height,
            padding={"left": LEFT, "right": RIGHT, "top": top, "bottom": BOTTOM},
            autosize=alt.AutoSizeParams(type="none"),
        )
        .configure(aria=False, background="transparent")
        .configure_view(stroke=None)
        .configure_axis(
            domain=False,
            ticks=False,
            gridColor="var(--line)",
            labelColor="var(--soft)",
            labelFontSize=12,
            labelPadding=8,
            title=None,
        )
        .configure_text(fill="var(--soft)")
    )
    svg = vl_convert.vegalite_to_svg(chart.to_dict(validate=False))
    head = f'<svg viewBox="0 0 {WIDTH} {height + top + BOTTOM:g}" role="img" aria-label="{escape(label, 200)}">'
    body = re.sub(r"^<svg[^>]*>", "", svg)
    # Vega writes a mark's description as aria-label; browsers show a <title> under the pointer.
    return head + re.sub(
        r'<(path|text|line)([^>]*?) aria-label="([^"]*)"([^>]*?)/>', r"<\1\2\4><title>\3</title></\1>", body
    )


def pixels(field: str) -> alt.Y:
    """A y channel in SVG units below the top of the plot."""
    return alt.Y(field, type="quantitative", scale=alt.Scale(domain=[0, 1], range=[0, 1]), axis=None)


def layer(rows: Rows) -> alt.Chart:
    """As a text: Altair copies each row of a list again for every layer, which takes longer than drawing the chart."""
    return alt.Chart(alt.Data(values=json.dumps(rows), format=alt.DataFormat(type="json")))


def _time(report: Mapping[str, Any], field: str = "at") -> alt.X:
    scale = alt.Scale(domain=[0, max(1.0, float(report["wall_seconds"]))], nice=False, clamp=True)
    axis = alt.Axis(labelExpr="datum.label + ' s'", tickCount=9, grid=True)
    return alt.X(field, type="quantitative", scale=scale, axis=axis, title=None)


def _value(field: str, domain: Sequence[float], ticks: int, unit: str = "") -> alt.Y:
    axis = alt.Axis(labelExpr=f"datum.label + '{unit}'", tickCount=ticks, grid=True)
    return alt.Y(field, type="quantitative", scale=alt.Scale(domain=list(domain), nice=False), axis=axis, title=None)


def _seconds_per_pixel(report: Mapping[str, Any]) -> float:
    return max(1.0, float(report["wall_seconds"])) / PLOT_WIDTH


def _bands(report: Mapping[str, Any], markers: Sequence[IncidentMarker]) -> list[alt.Chart]:
    """From the onset of each fault to its end."""
    least = _seconds_per_pixel(report)
    rows = [{"at": m.began, "until": max(m.ends, m.began + least)} for m in markers]
    at = _time(report)
    return [
        layer(rows).mark_rect(color="var(--band)").encode(x=at, x2="until:Q"),
        layer(rows).mark_rule(color="var(--bad)", opacity=0.55, strokeDash=[2, 4]).encode(x=at),
    ]


def _badges(report: Mapping[str, Any], rows: Rows) -> list[alt.Chart]:
    """Rows: at, y, key, title, injected."""
    disc = alt.condition("datum.injected", alt.value("var(--bad)"), alt.value("var(--soft)"))
    place = {"x": _time(report), "y": pixels("y")}
    return [
        layer(rows).mark_circle(size=254, opacity=1).encode(**place, color=disc, description="title:N"),
        layer(rows)
        .mark_text(fontWeight="bold", fontSize=11, fill="var(--card)", baseline="middle")
        .encode(**place, text="key:N"),
    ]


def _badge(marker: IncidentMarker, at: float, y: float) -> dict[str, Any]:
    return {"at": at, "y": y, "key": marker.key, "title": marker.title, "injected": marker.injected}


def reward_chart(report: Mapping[str, Any]) -> str:
    """Reward over time; the band of a fault spans its injection to its resolution."""
    markers = incident_markers(report)
    rows = badge_rows([m.began / _seconds_per_pixel(report) for m in markers])
    steps = [(float(s["at"]), float(s["reward"])) for s in report["steps"] if s["reward"] is not None]
    values = [reward for _, reward in steps]
    high = max([1.0, *values]) if values and max(values) <= 1 else max([0.1, *values])
    reward_axis = _value("reward", (min([0.0, *values]), high), 4)
    smooth = [
        {"at": at, "reward": sum(window) / len(window)}
        for n, (at, _) in enumerate(steps)
        for window in [values[max(0, n - SMOOTH_STEPS + 1) : n + 1]]
    ]
    raw = layer([{"at": at, "reward": reward} for at, reward in steps])
    curves = alt.layer(
        raw.mark_line(color="var(--accent)", strokeWidth=1, opacity=0.35).encode(x=_time(report), y=reward_axis),
        layer(smooth).mark_line(color="var(--accent)", strokeWidth=2.25).encode(x=_time(report), y=reward_axis),
    )
    badges = [_badge(m, m.began, -10.0 - BADGE_ROW * row) for m, row in zip(markers, rows, strict=True)]
    layers = [*_bands(report, markers), curves, *_badges(report, badges)]
    return render(layers, "reward over time", 210, top=6 + BADGE_ROW * (max(rows, default=-1) + 1))


def evaluation_chart(report: Mapping[str, Any]) -> str:
    """Held-out reward over time with its 95 % interval; empty without an evaluation that has a score."""
    points = [e for e in report.get("evaluations", ()) if e["reward"] is not None]
    if not points:
        return ""
    rows: Rows = [
        {
            "at": float(e["at"]),
            "reward": float(e["reward"]),
            "low": float(e["reward"] if e["reward_low"] is None else e["reward_low"]),
            "high": float(e["reward"] if e["reward_high"] is None else e["reward_high"]),
            "title": f"step {e['step']}: {e['reward']:.3f} on {e['prompts']} prompts",
        }
        for e in points
    ]
    low, high = min([0.0, *(r["low"] for r in rows)]), max(r["high"] for r in rows)
    y = _value("reward", (low, high if high > low else low + 1.0), 4)
    x, data = _time(report), layer(rows)
    curve = alt.layer(
        data.mark_rule(color="var(--accent)", strokeWidth=3, opacity=0.4).encode(
            x=x, y=_value("low", (low, high if high > low else low + 1.0), 4), y2="high:Q"
        ),
        data.mark_line(color="var(--accent)", strokeWidth=2.25).encode(x=x, y=y),
        data.mark_circle(color="var(--accent)", size=40, opacity=1).encode(x=x, y=y, description="title:N"),
    )
    return render([*_bands(report, incident_markers(report)), curve], "held-out reward over time", 130)


def policy_health_chart(report: Mapping[str, Any], metric: str, label: str) -> str:
    """A policy-health metric over time, from 0; empty where no step has it."""
    values = report["health"].get(metric) or []
    rows = [
        {"at": float(step["at"]), "value": float(value)}
        for step, value in zip(report["steps"], values, strict=False)
        if value is not None
    ]
    if not rows:
        return ""
    low, high = min(0.0, *(r["value"] for r in rows)), max(r["value"] for r in rows)
    y = _value("value", (low, high if high > low else low + 1.0), 3)
    curve = layer(rows).mark_line(color="var(--accent)", strokeWidth=2.25).encode(x=_time(report), y=y)
    return render([*_bands(report, incident_markers(report)), curve], label, 90)


def step_chart(report: Mapping[str, Any]) -> str:
    """Seconds from commit to commit: a tall bar is a step that a fault delayed."""
    times = [float(report["training_started_seconds"]), *(float(s["at"]) for s in report["steps"])]
    rows: Rows = [
        {"at": a, "until": b, "took": b - a, "zero": 0.0, "title": f"step {step['step']}: {seconds(b - a)}"}
        for (a, b), step in zip(pairwise(times), report["steps"], strict=True)
    ]
    seconds_axis = _value("took", (0.0, max((r["took"] for r in rows), default=1.0) or 1.0), 2, " s")
    bars = (
        layer(rows)
        .mark_rect(color="var(--lane)", xOffset=0.3, x2Offset=-0.3)
        .encode(x=_time(report), x2="until:Q", y=seconds_axis, y2="zero:Q", description="title:N")
    )
    return render([*_bands(report, incident_markers(report)), bars], "seconds from commit to commit", 80)


def lanes_chart(report: Mapping[str, Any]) -> str:
    """One lane for each replica, one bar for each incarnation, each fault on the lane that it hit."""
    markers = incident_markers(report)
    lane_y: dict[str, float] = {}
    top = 14.0
    for group in lane_order(report["lanes"]):
        for replica in group:
            lane_y[replica] = top
            top += ROW
        top += GROUP_GAP
    names = [{"y": at, "name": plain(replica, 16)} for replica, at in lane_y.items()]
    bars: Rows = []
    labels: Rows = []
    for life in report["lanes"]:
        _add_incarnation(report, life, lane_y[life["replica"]], bars, labels)
    spans: Rows = []
    diamonds: Rows = []
    badges: Rows = []
    pixel = _seconds_per_pixel(report)
    for marker in markers:
        if marker.replica not in lane_y:
            continue
        at_y = lane_y[marker.replica]
        found = marker.found if marker.found is not None else marker.ends
        if marker.injected:
            until = max(found, marker.began + 2.5 * pixel)
            spans.append(_bar(marker.began, until, at_y, BAR + 5, "var(--bad)", f"{marker.title}: not yet found"))
        if marker.found is not None:
            begin = max(found, marker.began + 2.5 * pixel)
            until = max(marker.ends, begin + 2.5 * pixel)
            title = f"{marker.title}: found, not yet resolved"
            spans.append(_bar(begin, until, at_y, BAR + 5, "var(--warn)", title))
            if marker.resolved is not None:
                diamonds.append(
                    {"at": max(marker.resolved, begin + 2.5 * pixel), "y": at_y, "title": f"{marker.title}: resolved"}
                )
        badges.append(_badge(marker, marker.began - 13 * pixel, at_y))
    place = {"x": _time(report), "y": pixels("y")}
    rectangle = {"x": _time(report), "x2": "until:Q", "y": pixels("y"), "y2": "y2:Q", "description": "title:N"}
    colours = {"fill": alt.Fill("fill:N", scale=None), "stroke": alt.Stroke("stroke:N", scale=None)}
    layers = [
        *_bands(report, markers),
        layer(names)
        .mark_text(align="right", baseline="middle", fontSize=12.5, fill="var(--ink)")
        .encode(x=alt.value(-12), y=pixels("y"), text="name:N"),
        layer(bars).mark_rect(cornerRadius=2).encode(**rectangle, **colours),
        layer(labels)
        .mark_text(align="right", baseline="middle", fontSize=10.5, dx=-8, fill="var(--card)")
        .encode(**place, text="text:N"),
        layer(spans).mark_rect(cornerRadius=2).encode(**rectangle, **colours),
        layer(diamonds)
        .mark_point(shape="diamond", filled=True, size=170, opacity=1, color="var(--good)")
        .encode(**place, description="title:N"),
        *_badges(report, badges),
    ]
    return render(layers, "timeline by replica", top - ROW / 2 - GROUP_GAP + 6)


def _bar(
    at: float, until: float, top: float, tall: float, fill: str, title: str, stroke: str = "none"
) -> dict[str, Any]:
    return {
        "at": at,
        "until": until,
        "y": top - tall / 2,
        "y2": top + tall / 2,
        "fill": fill,
        "stroke": stroke,
        "title": plain(title),
    }


def _add_incarnation(report: Mapping[str, Any], life: Mapping[str, Any], top: float, bars: Rows, labels: Rows) -> None:
    """Its start (a thin bar) and its service (a bar, with the origin of a replacement as its label)."""
    end, pixel = float(report["wall_seconds"]), _seconds_per_pixel(report)
    until = min([float(t) for t in (life["lost"], life["stopped"]) if t is not None] + [end])
    name = f"{life['replica']}#{life['incarnation']}, pid {life['pid']} on {life['node']}"
    stands_by = is_standby(life["replica"])
    is_replacement = life["incarnation"] > 1 and not stands_by
    begun = life["starting"] if life["starting"] is not None else life["ready"]
    working = life["ready"] if stands_by or life["serving"] is None else life["serving"]
    if begun is not None:
        stop = min(float(working), until) if working is not None else until
        stop = max(stop, float(begun) + pixel)
        bars.append(_bar(float(begun), stop, top, 5, "var(--starting)", f"{name}: starting"))
    if working is None or float(working) >= until:
        return
    fill = "none" if stands_by else "var(--lane-new)" if is_replacement else "var(--lane)"
    state = "warm standby" if stands_by else "serving"
    title = f"{name}: {state} from {seconds(float(working))}"
    stop = max(until, float(working) + pixel)
    bars.append(_bar(float(working), stop, top, BAR, fill, title, "var(--lane)" if stands_by else "none"))
    if is_replacement and (stop - float(working)) / pixel > 150:
        origin = "from standby" if life["from_standby"] else "new process"
        labels.append({"at": stop, "y": top, "text": f"#{life['incarnation']} {origin}"})
