"""Distributions, growth and curves with bands as plain SVG, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {"healthy": "#777777", "duty": "#c0392b", "delay": "#1f6fb2", "quota": "#2e8b57"}
OTHER_COLOUR = "#8e44ad"
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 360, 170, 46
COLUMNS = 2
FONT = 'font-family="sans-serif" font-size="11" fill="#333333"'
RATIO_MIN, RATIO_MAX = 1 / 4, 16.0
"""Ends of the axis: times slower than peers. What lies beyond is drawn at the end."""
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def distributions(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """`panels`: title -> label -> log ratios to peers. Curves: share of values at most so large."""
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * (PANEL_WIDTH + MARGIN) + MARGIN, rows * (PANEL_HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, (title, by_label) in enumerate(panels.items()):
        x = MARGIN + i % COLUMNS * (PANEL_WIDTH + MARGIN)
        y = MARGIN + i // COLUMNS * (PANEL_HEIGHT + 2 * MARGIN)
        parts += [f'<g transform="translate({x} {y})">', *_panel(title, by_label), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, by_label: Mapping[str, Sequence[float]]) -> list[str]:
    parts = [
        f'<text y="-10" font-weight="bold">{escape(title)}</text>',
        f'<rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#cccccc"/>',
        f'<text x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 30}" text-anchor="middle">times slower than peers</text>',
    ]
    for tick in TICKS:
        x = _x(math.log(tick))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y2="{PANEL_HEIGHT}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT + 14}" text-anchor="middle">{tick:g}</text>')
    for share in (0.0, 0.5, 1.0):
        y = PANEL_HEIGHT * (1 - share)
        parts.append(f'<text x="-4" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for i, (label, values) in enumerate(sorted(by_label.items())):
        colour = COLOURS.get(label, OTHER_COLOUR)
        parts.append(
            f'<polyline points="{_curve(values)}" fill="none" stroke="{colour}" stroke-width="1.6" '
            f'stroke-linejoin="round"/>'
        )
        y = PANEL_HEIGHT - 10 - 14 * i
        parts.append(f'<text x="{PANEL_WIDTH - 6}" y="{y}" text-anchor="end" fill="{colour}">{escape(label)}</text>')
    return parts


def _x(log_ratio: float) -> float:
    low, high = math.log(RATIO_MIN), math.log(RATIO_MAX)
    return (min(high, max(low, log_ratio)) - low) / (high - low) * PANEL_WIDTH


CURVE_POINTS_MAX = 200


def _curve(values: Sequence[float]) -> str:
    ordered = sorted(values)
    step = max(1, len(ordered) // CURVE_POINTS_MAX)
    kept = [(v, (i + 1) / len(ordered)) for i, v in enumerate(ordered) if i % step == 0 or i == len(ordered) - 1]
    return " ".join(f"{_x(v):.1f},{PANEL_HEIGHT * (1 - share):.1f}" for v, share in kept)


def growth(title: str, across: str, up: str, curves: Mapping[str, Mapping[float, float]]) -> str:
    """`curves`: label -> x -> y, both from 0 on linear axes; a straight line through 0 and the last point of the first
    curve (dashed) shows what linear growth would be."""
    right = max(x for points in curves.values() for x in points)
    top = 1.1 * max(y for points in curves.values() for y in points.values())
    width, height = PANEL_WIDTH + 2 * MARGIN, PANEL_HEIGHT + 2 * MARGIN

    def place(x: float, y: float) -> str:
        return f"{x / right * PANEL_WIDTH:.1f},{PANEL_HEIGHT * (1 - y / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<g transform="translate({MARGIN} {MARGIN})"><text y="-10" font-weight="bold">{escape(title)}</text>',
        f'<rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#cccccc"/>',
        f'<text x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 30}" text-anchor="middle">{escape(across)}</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = share * PANEL_WIDTH, PANEL_HEIGHT * (1 - share)
        parts.append(f'<text x="{x}" y="{PANEL_HEIGHT + 14}" text-anchor="middle">{share * right:,.0f}</text>')
        parts.append(f'<text x="-4" y="{y + 4:.1f}" text-anchor="end">{share * top:.0f}</text>')
    parts.append(f'<text x="4" y="14">{escape(up)}</text>')
    first = next(iter(curves.values()))
    last = max(first)
    parts.append(
        f'<polyline points="{place(0, 0)} {place(last, first[last])}" stroke="#999999" stroke-dasharray="4 3"/>'
    )
    for i, (label, points) in enumerate(curves.items()):
        colour = (COLOURS["delay"], OTHER_COLOUR, COLOURS["duty"])[i % 3]
        line = " ".join(place(x, points[x]) for x in sorted(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        y = PANEL_HEIGHT - 10 - 14 * i
        parts.append(f'<text x="{PANEL_WIDTH - 6}" y="{y}" text-anchor="end" fill="{colour}">{escape(label)}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"


BAND_COLOURS = ("#777777", "#1f6fb2", "#c0392b", "#2e8b57", OTHER_COLOUR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A middle curve, with a narrow and a wide band around it; as many values of each as there are `xs`."""

    label: str
    xs: Sequence[float]
    middle: Sequence[float]
    narrow: tuple[Sequence[float], Sequence[float]]  # lower end, upper end
    wide: tuple[Sequence[float], Sequence[float]]


def bands(panels: Mapping[str, tuple[str, Sequence[Band]]]) -> str:
    """`panels`: title -> (what is across, bands). Up is a share from 0 to 1, across begins at 0."""
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * (PANEL_WIDTH + MARGIN) + MARGIN, rows * (PANEL_HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, (title, (across, curves)) in enumerate(panels.items()):
        x = MARGIN + i % COLUMNS * (PANEL_WIDTH + MARGIN)
        y = MARGIN + i // COLUMNS * (PANEL_HEIGHT + 2 * MARGIN)
        parts += [f'<g transform="translate({x} {y})">', *_banded(title, across, curves), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _banded(title: str, across: str, curves: Sequence[Band]) -> list[str]:
    right = max((x for band in curves for x in band.xs), default=1.0) or 1.0

    def line(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(
            f"{x / right * PANEL_WIDTH:.1f},{PANEL_HEIGHT * (1 - y):.1f}" for x, y in zip(xs, ys, strict=True)
        )

    parts = [
        f'<text y="-10" font-weight="bold">{escape(title)}</text>',
        f'<rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#cccccc"/>',
        f'<text x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 30}" text-anchor="middle">{escape(across)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = share * PANEL_WIDTH, PANEL_HEIGHT * (1 - share)
        parts.append(f'<line x1="0" y1="{y}" x2="{PANEL_WIDTH}" y2="{y}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x}" y="{PANEL_HEIGHT + 14}" text-anchor="middle">{share * right:,.0f}</text>')
        parts.append(f'<text x="-4" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    for i, band in enumerate(curves):
        colour = BAND_COLOURS[i % len(BAND_COLOURS)]
        for (low, high), opacity in ((band.wide, 0.10), (band.narrow, 0.18)):
            around = f"{line(band.xs, low)} {line(band.xs[::-1], high[::-1])}"
            parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="{opacity}"/>')
        parts.append(
            f'<polyline points="{line(band.xs, band.middle)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        y = PANEL_HEIGHT - 8 - 14 * (len(curves) - 1 - i)
        parts.append(
            f'<text x="{PANEL_WIDTH - 6}" y="{y}" text-anchor="end" fill="{colour}">{escape(band.label)}</text>'
        )
    return parts
