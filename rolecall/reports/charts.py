"""The drawings of `report.html`: inline SVG in one time scale, so that a fault stands at the same place in each. Pure.

A fault has a letter, the same in every drawing and in the text; letters that would touch are put in rows above each
other. Every shape carries a `<title>` for the pointer. Widths are in the units of the view box (1120 wide).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rolecall.core.text import escape, seconds

WIDTH = 1120
LEFT = 104  # room for names of lanes and of the y axis
RIGHT = 14
ROW = 27  # one lane
GROUP_GAP = 9
BAR = 13
BADGE_ROW = 20
ROLE_ORDER = ("trainer", "rollout", "standby", "reward", "controller")
SMOOTH_STEPS = 5
"""The bold reward curve is the mean of this many steps: a step's own reward has the noise of one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentMarker:
    """One incident (or missed fault) as the drawings show it. Times are seconds after the start of the run."""

    key: str  # A, B, C ...
    replica: str
    label: str
    began: float
    found: float | None
    served: float | None
    resolved: float | None
    ends: float
    injected: bool = True  # False: an incident that no fault of the injector's log belongs to


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds to x."""

    end: float

    def x(self, at: float) -> float:
        at = min(max(at, 0.0), self.end)
        return round(LEFT + at / self.end * (WIDTH - LEFT - RIGHT), 1)


def key_of(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> A2."""
    letter = chr(ord("A") + number % 26)
    return letter if number < 26 else f"{letter}{number // 26 + 1}"


def marks(report: Mapping[str, Any]) -> list[IncidentMarker]:
    """Incidents in order, then faults that nobody noticed."""
    zero, end = float(report["started_at"]), float(report["wall_seconds"])

    def after(at: Any) -> float | None:
        return None if at is None else float(at) - zero

    found = []
    for n, i in enumerate(report["incidents"]):
        fault = i["fault"]
        began = float(fault["injected_at"] if fault else i["onset"]) - zero
        closed = after(i["closed_at"])
        resolved = after(i["cured_at"])
        who = fault["target"] if fault else (i["suspects"][0].partition("#")[0] if i["suspects"] else "")
        found.append(
            IncidentMarker(
                key=key_of(n),
                replica=str(who),
                label=fault["kind"] if fault else i["fault_class"],
                began=began,
                found=after(i["detected_at"]),
                served=after(i["serving_at"]),
                resolved=resolved,
                ends=resolved if resolved is not None else closed if closed is not None else end,
                injected=fault is not None,
            )
        )
    for n, fault in enumerate(report["missed"], start=len(found)):
        began = float(fault["injected_at"]) - zero
        found.append(
            IncidentMarker(
                key=key_of(n),
                replica=fault["target"],
                label=f"{fault['kind']}, missed",
                began=began,
                found=None,
                served=None,
                resolved=None,
                ends=end,
            )
        )
    return found


def scale(report: Mapping[str, Any]) -> Scale:
    return Scale(max(1.0, float(report["wall_seconds"])))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values from `low` to `high`, about that many."""
    span = max(high - low, 1e-9)
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9) * step
    return [round(first + n * step, 9) for n in range(math.floor((high - first) / step + 1e-9) + 1)]


def badge_rows(xs: Sequence[float], width: float = 22.0) -> list[int]:
    """For each x, in order, the lowest row in which its badge touches no other."""
    last: list[float] = []
    rows = []
    for x in xs:
        row = next((n for n, taken in enumerate(last) if x - taken >= width), len(last))
        if row == len(last):
            last.append(x)
        last[row] = x
        rows.append(row)
    return rows


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _badge(mark: IncidentMarker, x: float, y: float) -> str:
    title = f"{mark.key}: {mark.label} on {mark.replica}"
    css = "badge-disc" if mark.injected else "badge-disc alarm"
    disc = f'<circle class="{css}" cx="{x:g}" cy="{y:g}" r="9"><title>{escape(title)}</title></circle>'
    return disc + f'<text class="badge" x="{x:g}" y="{y + 4:g}">{escape(mark.key)}</text>'


def _time_axis(by: Scale, y: float, top: float) -> list[str]:
    parts = []
    for t in ticks(0, by.end, 9):
        x = by.x(t)
        parts.append(f'<line class="grid" x1="{x}" y1="{top:g}" x2="{x}" y2="{y:g}"/>')
        anchor = "start" if t == 0 else "end" if x > WIDTH - RIGHT - 20 else "middle"
        parts.append(f'<text x="{x}" y="{y + 16:g}" text-anchor="{anchor}">{t:g} s</text>')
    return parts


def _guides(found: Sequence[IncidentMarker], by: Scale, top: float, bottom: float) -> list[str]:
    parts = []
    for mark in found:
        x, until = by.x(mark.began), by.x(mark.ends)
        wide = max(1.0, round(until - x, 1))
        parts.append(f'<rect class="band" x="{x}" y="{top:g}" width="{wide:g}" height="{bottom - top:g}"/>')
        parts.append(f'<line class="guide" x1="{x}" y1="{top:g}" x2="{x}" y2="{bottom:g}"/>')
    return parts


def reward_chart(report: Mapping[str, Any]) -> str:
    """Reward over time; the band of a fault reaches from its injection to its cure."""
    by, found = scale(report), marks(report)
    rows = badge_rows([by.x(m.began) for m in found])
    top = 6 + BADGE_ROW * (max(rows, default=-1) + 1)
    bottom = top + 210
    points = [(float(s["at"]), float(s["reward"])) for s in report["steps"] if s["reward"] is not None]
    values = [r for _, r in points]
    low, high = min([0.0, *values]), max([1.0, *values]) if values and max(values) <= 1 else max([0.1, *values])
    parts = [*_time_axis(by, bottom, top), *_guides(found, by, top, bottom)]

    def y(value: float) -> float:
        return round(bottom - (value - low) / (high - low) * (bottom - top), 1)

    for t in ticks(low, high, 4):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(t)}" x2="{WIDTH - RIGHT}" y2="{y(t)}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y(t) + 4:g}" text-anchor="end">{t:g}</text>')
    smooth = [(points[n][0], _mean(values[max(0, n - SMOOTH_STEPS + 1) : n + 1])) for n in range(len(points))]
    for css, line in (("raw", points), ("curve", smooth)):
        path = " ".join(f"{by.x(at)},{y(value)}" for at, value in line)
        parts.append(f'<polyline class="{css}" points="{path}"/>')
    for mark, row in zip(found, rows, strict=True):
        parts.append(_badge(mark, by.x(mark.began), top - 10 - BADGE_ROW * row))
    return _svg(bottom + 24, "reward over time", parts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def policy_health_chart(report: Mapping[str, Any], sign: str, label: str) -> str:
    """A sign of the policy's health over time, from 0; empty where no step had it."""
    values = report["health"].get(sign) or []
    points = [(float(s["at"]), float(v)) for s, v in zip(report["steps"], values, strict=False) if v is not None]
    if not points:
        return ""
    by, found = scale(report), marks(report)
    top, bottom = 6.0, 96.0
    low, high = min([0.0, *(v for _, v in points)]), max(v for _, v in points)
    span = (high - low) or 1.0
    parts = [*_time_axis(by, bottom, top), *_guides(found, by, top, bottom)]

    def y(value: float) -> float:
        return round(bottom - (value - low) / span * (bottom - top), 1)

    for t in ticks(low, low + span, 3):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(t)}" x2="{WIDTH - RIGHT}" y2="{y(t)}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y(t) + 4:g}" text-anchor="end">{t:g}</text>')
    path = " ".join(f"{by.x(at)},{y(value)}" for at, value in points)
    parts.append(f'<polyline class="curve" points="{path}"/>')
    return _svg(bottom + 24, label, parts)


def step_chart(report: Mapping[str, Any]) -> str:
    """Seconds from commit to commit: where a fault was felt, the bar is high."""
    by, found = scale(report), marks(report)
    top, bottom = 6.0, 86.0
    times = [float(report["training_started_seconds"]), *(float(s["at"]) for s in report["steps"])]
    gaps = [(a, b, b - a) for a, b in pairwise(times)]
    high = max([g for *_, g in gaps], default=1.0) or 1.0
    parts = [*_time_axis(by, bottom, top), *_guides(found, by, top, bottom)]
    for t in ticks(0, high, 2):
        y = round(bottom - t / high * (bottom - top), 1)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:g}" text-anchor="end">{t:g} s</text>')
    for (a, b, gap), step in zip(gaps, report["steps"], strict=True):
        x, wide = by.x(a), max(0.8, by.x(b) - by.x(a) - 0.6)
        tall = gap / high * (bottom - top)
        title = f"step {step['step']}: {seconds(gap)}"
        where = f'x="{x}" y="{bottom - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
        parts.append(f'<rect class="step" {where}><title>{escape(title)}</title></rect>')
    return _svg(bottom + 24, "seconds from commit to commit", parts)


# --- lanes --------------------------------------------------------------------------------------------------------


def lane_order(lanes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Replicas grouped by role, roles in the order of the page."""
    groups: dict[str, set[str]] = {}
    for lane in lanes:
        groups.setdefault(str(lane["replica"]).partition("/")[0], set()).add(str(lane["replica"]))

    def index(replica: str) -> tuple[int, str]:
        tail = replica.rpartition("/")[2]
        return (int(tail) if tail.isdigit() else 0, replica)

    roles = sorted(groups, key=lambda r: (ROLE_ORDER.index(r) if r in ROLE_ORDER else len(ROLE_ORDER), r))
    return [sorted(groups[r], key=index) for r in roles]


def lanes_chart(report: Mapping[str, Any]) -> str:
    """One lane a replica, one bar an incarnation, the faults on the lanes that they hit."""
    by, found = scale(report), marks(report)
    y_of: dict[str, float] = {}
    y = 16.0
    for group in lane_order(report["lanes"]):
        for replica in group:
            y_of[replica] = y
            y += ROW
        y += GROUP_GAP
    bottom = y - ROW / 2 - GROUP_GAP + 6
    parts = [*_time_axis(by, bottom, 2), *_guides(found, by, 2, bottom)]
    for replica, at in y_of.items():
        parts.append(
            f'<text class="name" x="{LEFT - 12}" y="{at + 4:g}" text-anchor="end">{escape(replica, 16)}</text>'
        )
    for life in report["lanes"]:
        parts += _life(life, by, y_of[life["replica"]], float(report["wall_seconds"]))
    for mark in found:
        if mark.replica in y_of:
            parts += _incident_span(mark, by, y_of[mark.replica])
    return _svg(bottom + 24, "timeline by replica", parts)


def _rect(css: str, x: float, until: float, y: float, tall: float, title: str, least: float = 1.0) -> str:
    wide = max(least, until - x)
    where = f'x="{x:g}" y="{y - tall / 2:g}" width="{wide:.1f}" height="{tall:g}" rx="2"'
    return f'<rect class="{css}" {where}><title>{escape(title)}</title></rect>'


def _life(life: Mapping[str, Any], by: Scale, y: float, end: float) -> list[str]:
    ends = [float(t) for t in (life["lost"], life["stopped"]) if t is not None]
    until = min([*ends, end])
    name = f"{life['replica']}#{life['incarnation']}"
    where = f"{name}, pid {life['pid']} on {life['node']}"
    standby = str(life["replica"]).startswith("standby/")
    begun = life["starting"] if life["starting"] is not None else life["ready"]
    works = life["ready"] if standby or life["serving"] is None else life["serving"]
    parts = []
    if begun is not None:
        stop = min(float(works), until) if works is not None else until
        parts.append(_rect("bar-starting", by.x(float(begun)), by.x(stop), y, 5, f"{where}: starting"))
    if works is not None and float(works) < until:
        x, right = by.x(float(works)), by.x(until)
        css = "bar-standby" if standby else "bar-new" if life["incarnation"] > 1 else "bar"
        said = "stands by" if standby else "serves"
        parts.append(_rect(css, x, right, y, BAR, f"{where}: {said} from {seconds(float(works))}"))
        if life["incarnation"] > 1 and not standby and right - x > 150:
            origin = "from standby" if life["from_standby"] else "new process"
            text = f"#{life['incarnation']} {origin}"
            parts.append(
                f'<text class="on-bar" x="{right - 8:g}" y="{y + 3.6:g}" text-anchor="end">{escape(text)}</text>'
            )
    return parts


def _incident_span(mark: IncidentMarker, by: Scale, y: float) -> list[str]:
    began = by.x(mark.began)
    found = by.x(mark.found if mark.found is not None else mark.ends)
    who = f"{mark.key}: {mark.label} on {mark.replica}"
    parts = []
    if mark.injected:
        parts.append(_rect("undetected", began, found, y, BAR + 5, f"{who}: not yet found", 2.5))
    if mark.found is not None:
        begin = max(found, began + 2.5)
        parts.append(_rect("recovering", begin, by.x(mark.ends), y, BAR + 5, f"{who}: found, not yet resolved", 2.5))
        if mark.resolved is not None:
            x = max(by.x(mark.resolved), begin + 2.5)
            points = f"{x},{y - 9:g} {x + 6:g},{y:g} {x},{y + 9:g} {x - 6:g},{y:g}"
            parts.append(
                f'<polygon class="resolved" points="{points}"><title>{escape(who)}: resolved</title></polygon>'
            )
    parts.append(_badge(mark, began - 13, y))
    return parts
