"""HTML of the Overview page: an open incident, the replicas of a role. Pure; all text goes through `text.escape`."""

from collections.abc import Sequence
from itertools import groupby

from rolecall.core.text import escape, seconds
from rolecall.dashboards.pages.overview.view import Cell, OpenIncident, RoleSummary
from rolecall.dashboards.pages.style import STATES, class_of

CHIPS_MAX = 32
"""A role with up to this many replicas shows a chip for each; a larger one only for unhealthy replicas."""
UNWELL_MAX = 48
ROW_REPLICAS = 50


def incident(t: OpenIncident, now: float) -> str:
    """One open incident: diagnosis, stage, current action with its start time, and the required operator action."""
    rows = [("action", t.doing), ("since", f"{seconds(max(0.0, now - t.since))} ago"), ("suspect", t.suspects)]
    if t.asks:
        rows.insert(0, ("needed from you", t.asks))
    parts = "".join(f"<dt>{escape(what)}</dt><dd>{escape(text)}</dd>" for what, text in rows)
    return (
        f'<article class="rc rc-incident"><header><b>▲ {escape(t.fault_class)}</b>'
        f'<span class="rc-tag {"warn" if t.asks else "note"}">{escape(t.stage)}</span>'
        f'<span class="rc-soft">{escape(t.incident_id)}, open for {escape(seconds(max(0.0, now - t.opened_at)))}</span>'
        f'</header><p class="because">{escape(t.because)}</p><dl>{parts}</dl></article>'
    )


def role(r: RoleSummary) -> str:
    """One role: number of replicas by state, and the replicas, worst first."""
    counts = "   ".join(_count(state, num) for state, num in r.counts)
    parts = [f'<p class="rc rc-role"><b>{escape(r.name)}</b> {counts}</p>']
    if len(r.cells) <= CHIPS_MAX:
        parts.append(_chips(r.cells))
    else:
        unwell = r.unhealthy
        if unwell:
            parts.append(_chips(unwell[:UNWELL_MAX]))
        if len(unwell) > UNWELL_MAX:
            parts.append(f'<p class="rc rc-soft">and {len(unwell) - UNWELL_MAX} more unhealthy replicas</p>')
        parts.append(_map(r.cells))
    return "".join(parts)


def _count(state: str, num: int) -> str:
    return f'<span class="rc-{class_of(state)}">{STATES[state][0]} {num}&nbsp;{state}</span>&ensp;'


def _chips(cells: Sequence[Cell]) -> str:
    return f'<div class="rc rc-chips" role="list">{"".join(_chip(c) for c in cells)}</div>'


def _chip(c: Cell) -> str:
    version = f", policy {c.policy_version}" if c.policy_version >= 0 else ""
    return (
        f'<div class="rc-chip" role="listitem"><span class="rc-{class_of(c.state)}">{STATES[c.state][0]} '
        f"{c.state}</span> <b>{escape(c.replica, 80)}</b><small>#{c.incarnation} on "
        f"{escape(c.node, 80)}{version}</small></div>"
    )


def _map(cells: Sequence[Cell]) -> str:
    """Every replica as a glyph, ordered by index, so that patterns (a rack, a node range) are visible."""
    lines = []
    for start in range(0, len(cells), ROW_REPLICAS):
        row = cells[start : start + ROW_REPLICAS]
        runs = "".join(
            f'<span class="rc-{class_of(state)}">{STATES[state][0] * len(list(group))}</span>'
            for state, group in groupby(c.state for c in row)
        )
        lines.append(f'<i>{escape(row[0].index, 20)}</i><span class="row">{runs}</span>')
    label = f"{len(cells)} replicas, one glyph each"
    return f'<div class="rc rc-map" role="img" aria-label="{label}">{"".join(lines)}</div>'
