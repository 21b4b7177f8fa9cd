"""The Fleet page: nodes by health, worst first, and the history of one node."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import altair as alt
import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import counted, escape, in_words, plain, seconds, utc
from rolecall.dashboards.data import nodes
from rolecall.dashboards.data.hardware import FleetMetrics, XidOccurrence, codes_of, fleet_metrics, merged
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.charts import CLASS_COLOURS
from rolecall.dashboards.pages.links import href
from rolecall.dashboards.pages.operations.commands import operations
from rolecall.dashboards.pages.operations.plans import State
from rolecall.dashboards.pages.overview import view
from rolecall.dashboards.pages.prometheus import PrometheusPoller, PrometheusSnapshot
from rolecall.dashboards.pages.shell import chosen_run, data_table, page
from rolecall.dashboards.pages.status import status_of
from rolecall.dashboards.pages.style import STATES, Cell, Link, cell, class_of
from rolecall.dashboards.pages.style import table as small_table
from rolecall.recovery.incidents import Incident

NODE_KEY = "fleet.node"
"""Of the node that was chosen, in the session."""
NODE_INCIDENTS_SHOWN = 200
CODES_SHOWN = 200
PHONE_NODES = 50
"""Nodes of the shorter table that a phone shows (style.py), the worst."""
HEAT_SHARES = (30, 55, 100)
"""Percent of the colour with one, two, and more incidents: the same scale for every run."""
LISTED_INCIDENTS, LISTED_PIXELS = 8, 420
"""Height of a node's list of incidents, if it is longer than this."""
SPARE_SECONDS = 60.0
"""Padding before the first and after the last incident; a single incident is centred in two minutes."""


def show() -> None:
    page("Fleet", _draw)


@dataclass
class _FleetPageCache:
    """Values derived from a snapshot, shared by all sessions: one per process and journal. Thread-safe."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    of: tuple[object, ...] = ()
    by_node: Mapping[str, Sequence[Incident]] = field(default_factory=dict)
    codes: tuple[XidOccurrence, ...] = ()
    pasts: Mapping[str, nodes.NodeHistory] = field(default_factory=dict)

    def fleet(self, snapshot: JournalSnapshot, state: State, live: FleetMetrics, now: float) -> nodes.FleetHealth:
        with self.lock:
            incidents = tuple(snapshot.projection.incidents.values())
            if self.of != (incidents, state.events):
                self.by_node, self.codes = nodes.incidents_by_node(incidents), codes_of(incidents)
                self.pasts, self.of = nodes.pasts(state.events), (incidents, state.events)
            ended = snapshot.projection.ended is not None
            known = (
                state.fleet if state.fleet.replicas else nodes.observed_fleet(snapshot.observed, snapshot.sampled_at)
            )
            until = nodes.counted_until(incidents, known, ended, now)
            return nodes.fleet_rows(known, self.by_node, self.pasts, self.codes, live, until, state.nodes, ended=ended)


@st.cache_resource(show_spinner=False)
def _cache(journal_url: str) -> _FleetPageCache:
    return _FleetPageCache()


@st.cache_resource(show_spinner=False)
def _poller(url: str, _authorization: str, run_id: str) -> PrometheusPoller[FleetMetrics]:
    return PrometheusPoller(url, _authorization, SystemClock(), lambda ask: fleet_metrics(ask, run_id))


def _draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    settings, now = reader.settings, reader.now()
    seen: PrometheusSnapshot[FleetMetrics] = PrometheusSnapshot()
    if settings.prometheus_url:
        poller = _poller(settings.prometheus_url, settings.prometheus_authorization, settings.run_id)
        seen = poller.latest(settings.patience_seconds)
    cache = _cache(settings.journal_url)
    fleet = cache.fleet(snapshot, operations(reader).latest(reader), seen.answer or FleetMetrics(), now)
    if not fleet.rows:
        st.text("The journal contains no nodes yet.")
        return
    counts = [(health, fleet.count(health)) for health in nodes.NodeHealth]
    when = nodes.AT_THE_END if snapshot.projection.ended is not None else ""
    parts = "".join(
        f"<span>{nodes.GLYPHS[health]} <b>{num:,}</b> {health}{when}</span>" for health, num in counts if num
    )
    st.html(f'<div class="rc rc-role"><p><b>{counted(len(fleet.rows), "node")}</b> {parts}</p></div>')
    _hardware_source(settings.prometheus_url, seen, now)
    _table(fleet, seen.answer or FleetMetrics(), now, snapshot)
    _history(fleet, cache.by_node, now)
    names = [row.node for row in fleet.rows]
    node = st.selectbox(
        "Node details", sorted(names, key=nodes.natural), key=NODE_KEY, index=None, placeholder="worst node"
    )
    row = fleet.find(node or names[0])
    if row is not None:
        _node(row, cache.by_node.get(row.node, ()), fleet, snapshot)


def _hardware_source(url: str, seen: PrometheusSnapshot[FleetMetrics], now: float) -> None:
    if not url:
        st.caption(
            "Hardware status from incidents. With `--prometheus URL` it also shows live XIDs and GPU status of all "
            "nodes."
        )
    elif seen.error:
        st.warning("Prometheus is not responding: hardware status comes from incidents.", icon=":material/cloud_off:")
        st.text(plain(seen.error))
        if seen.at is not None:
            st.text(f"Its latest response is {nodes.age(now - seen.at)} old.")
    elif seen.answer is None:
        st.text("Querying Prometheus.")
    elif seen.answer.errors:
        st.warning("Prometheus refuses a query: part of the hardware status is missing.", icon=":material/cloud_off:")
        st.text(plain("; ".join(dict.fromkeys(seen.answer.errors))))


def _table(fleet: nodes.FleetHealth, live: FleetMetrics, now: float, snapshot: JournalSnapshot) -> None:
    rows = fleet.rows
    columns: dict[str, Sequence[object]] = {
        "health": [r.status for r in rows],
        "node": [plain(r.node) for r in rows],
        "why": [plain(r.because) for r in rows],
        "incidents, 1 h": [r.in_hour for r in rows],
        "24 h": [r.in_day for r in rows],
        "30 d": [r.in_month for r in rows],
        "GPUs": [_gpus(r.node, live) for r in rows],
        "XIDs": [", ".join(dict.fromkeys(f"{c.name}{'!' if c.fatal else ''}" for c in r.codes)) for r in rows],
        "burn-in": [_burn_in_result(r.past) for r in rows],
        "last change": [_since(r.changed_at, now, ended=snapshot.projection.ended is not None) for r in rows],
        "replicas": [len(r.replicas) or "" for r in rows],
    }
    with st.container(key="fleet-table"):
        data_table(
            {name: values for name, values in columns.items() if any(v != "" for v in values)},
            column_config={"why": st.column_config.TextColumn(width="large")},
        )
    phone = [[plain(r.node), r.status, str(r.in_month), plain(r.because)] for r in rows[:PHONE_NODES]]
    st.html(f'<div class="rc-phone">{small_table(["node", "health", "30 d", "why"], phone, narrow=1)}</div>')
    st.caption(
        f"Incidents per node, fleet median: {fleet.median_hour:g} in 1 h, {fleet.median_day:g} in 24 h, "
        f"{fleet.median_month:g} in 30 days."
        + (" Counted back from the end of the run." if snapshot.projection.ended is not None else "")
        + ("" if snapshot.history.whole else " Loading older incidents: the counts are incomplete.")
        + (" A passed burn-in or a return to service clears a fatal XID." if fleet.count(nodes.NodeHealth.XID) else "")
    )


def _since(at: float | None, now: float, *, ended: bool) -> str:
    """For a run that has ended the time itself: its age says nothing."""
    return "" if not at else _when(at) if ended else f"{nodes.age(now - at)} ago"


def _gpus(node: str, live: FleetMetrics) -> str:
    """A mark for each GPU of the node, in order; those that do not answer are named."""
    known = (live.gpus or {}).get(node, {})
    marks = "".join("■" if up else "✖" for _, up in sorted(known.items(), key=lambda g: nodes.natural(g[0])))
    lost = [gpu for gpu, up in known.items() if not up]
    return plain(f"{marks} {', '.join(lost)} lost" if lost else marks, 200)


def _history(fleet: nodes.FleetHealth, by_node: Mapping[str, Sequence[Incident]], now: float) -> None:
    newest = max((i.opened_at for found in by_node.values() for i in found), default=None)
    if newest is None:
        return
    found = nodes.heat(by_node, [r.node for r in fleet.rows], min(now, newest))
    offenders = nodes.repeat_offenders(fleet, by_node)
    left, right = st.columns([3, 2], gap="medium") if offenders else (st.container(), st.container())
    with left:
        st.subheader(f"Incidents by node and {found.unit}")
        st.html(_heat_table(found))
        if len(found.rows) < len(fleet.rows):
            st.caption(f"{len(found.rows)} of {len(fleet.rows):,} nodes, those with the most incidents.")
    with right:
        if offenders:
            st.subheader("Repeat offenders")
            st.html(small_table(["node", "30 d", "median", "classes"], offenders, narrow=1))


def _heat_table(found: nodes.HeatMap) -> str:
    """A number in each cell, so that colour is not the only cue. Days and hours are in UTC."""
    box = "white-space:nowrap;min-width:1.9rem;max-width:4rem;padding:.15rem;text-align:center"
    spread = f"{box};border:2px solid transparent"
    heads = []
    for n, start in enumerate(found.columns):
        day, _, hour = start.partition(" ")
        is_new_day = n == 0 or found.columns[n - 1].partition(" ")[0] != day
        label = f"{escape(day)}<br>{escape(hour[:2])}" if is_new_day and hour else escape(hour[:2] or day)
        heads.append(f'<th scope=col style="{spread};vertical-align:bottom" title="{escape(start)} UTC">{label}</th>')
    lines = []
    for node, cells in found.rows:
        parts = []
        for start, (num, classes) in zip(found.columns, cells, strict=True):
            share = HEAT_SHARES[min(num, len(HEAT_SHARES)) - 1] if num else 0
            ink = "light-dark(#ffffff, #1d0d0b)" if share > HEAT_SHARES[1] else "var(--ink)"
            ground = f"color-mix(in srgb, light-dark(#a11d2e, #ff8a80) {share}%, var(--shade))"
            named = escape(f"{node}, {start} UTC: {counted(num, 'incident')} {classes}".strip(), 300)
            parts.append(
                f'<td title="{named}" style="{spread};background:{ground};background-clip:padding-box;'
                f'border-radius:5px;color:{ink};font-weight:600">{num or ""}</td>'
            )
        lines.append(
            f'<tr><th scope=row style="white-space:nowrap;border:0">{escape(node, 60)}</th>{"".join(parts)}</tr>'
        )
    head = f"<tr><th scope=col>UTC</th>{''.join(heads)}</tr>"
    return (
        f'<div class="rc" style="overflow-x:auto"><table class="rc-table"><thead>{head}</thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _burn_in_result(past: nodes.NodeHistory) -> str:
    found = past.record.burn_ins
    if not found:
        return ""
    return "✓ passed" if found[-1].result.passed else "✗ failed"


def _node(row: nodes.NodeRow, found: Sequence[Incident], fleet: nodes.FleetHealth, snapshot: JournalSnapshot) -> None:
    with st.container(border=True):
        because = f": {escape(row.because, 300)}" if row.because else ""
        st.html(f'<div class="rc"><b>{escape(row.node, 100)}</b> {escape(row.status)}{because}</div>')
        st.html(_replicas(row, snapshot))
        _incidents(row, found, fleet, snapshot)
        _codes(row.codes)
        _commands(row.past)
        _burn_ins(row.past)


def _replicas(row: nodes.NodeRow, snapshot: JournalSnapshot) -> str:
    """A square for each replica or, of a job that rolecall only watches, each rank; those with a fault are named. The
    states are those of the Overview page."""
    if snapshot.run.replicas:
        known = {c.replica: c.state for role in view.roles(snapshot) for c in role.cells}
        what = "replica"
        found = [
            (f"{v.replica}#{v.incarnation}", known.get(v.replica, str(v.state or "starting")), v.because)
            for v in row.replicas
        ]
    else:
        suspects = {(s.replica, s.rank) for i in snapshot.projection.open_incidents() for s in i.diagnosis.suspects}
        what = "rank"
        found = []
        for r in snapshot.observed:
            if r.node == row.node:
                is_suspect = bool(suspects & {(r.replica, r.rank), (r.replica, None)})
                state = "suspect" if is_suspect else "healthy" if r.alive_at(snapshot.sampled_at) else "lost"
                found.append((f"{r.replica} rank {r.rank}, pid {r.pid}", state, ""))
    if not found:
        return '<div class="rc rc-soft">No replica runs on it.</div>'
    total, counts = counted(len(found), what), Counter(state for _, state, _ in found)
    told = "".join(f'<span class="rc-{class_of(s)}">{STATES[s][0]} {counts[s]} {s}</span>' for s in STATES if counts[s])
    squares = "".join(cell(state, name) for name, state, _ in found)
    usual = ("healthy", "standby", "ended")
    named = "".join(
        f"<div>{STATES[state][0]} {escape(name, 100)} {state}{escape(f': {because}' if because else '', 300)}</div>"
        for name, state, because in found
        if state not in usual
    )
    return (
        f'<div class="rc rc-role"><p><b>{total}</b> {told}</p><div class="rc-map rc-healthy" role="img" '
        f'aria-label="{total}, one square each">{squares}</div>{named}</div>'
    )


def _incident_table(found: Sequence[Incident], snapshot: JournalSnapshot) -> str:
    """Each incident with a link to its page."""
    run = chosen_run()
    rows: list[list[Cell]] = [
        [
            _when(i.opened_at),
            Link(i.incident_id, href(i.incident_id, run)),
            in_words(i.diagnosis.fault_class),
            in_words(status_of(i, snapshot.mode_of(i), snapshot.at, ended=snapshot.run.ended != "")),
            i.diagnosis.because,
        ]
        for i in found
    ]
    return small_table(["opened (UTC)", "incident", "class", "status", "diagnosis"], rows, stack=True)


def _incidents(
    row: nodes.NodeRow, found: Sequence[Incident], fleet: nodes.FleetHealth, snapshot: JournalSnapshot
) -> None:
    st.markdown("**Incidents**")
    if not found:
        st.text("None on this node.")
        return
    st.text(
        f"{row.in_hour} in 1 h, {row.in_day} in 24 h, {row.in_month} in 30 days; fleet median: "
        f"{fleet.median_hour:g}, {fleet.median_day:g}, {fleet.median_month:g}"
    )
    newest = sorted(found, key=lambda i: (i.closed_at is not None, -i.opened_at))[:NODE_INCIDENTS_SHOWN]
    # Once a node is chosen: the chart's library is large, and would delay the table of all nodes.
    if len(newest) > 1 and st.session_state.get(NODE_KEY):
        st.altair_chart(_incidents_chart(newest), width="stretch")
    with st.container(height=LISTED_PIXELS if len(newest) > LISTED_INCIDENTS else "content", border=False):
        st.html(_incident_table(newest, snapshot))


def _incidents_chart(found: Sequence[Incident]) -> Any:
    """A node's incidents over time, one row per fault class. Row and shape encode the class; colour repeats it."""
    rows = [
        {
            "at": datetime.fromtimestamp(incident.opened_at, UTC).isoformat(),
            # As text, because the browser formats tooltip times in its own time zone.
            "opened (UTC)": _when(incident.opened_at),
            "class": str(incident.diagnosis.fault_class),
            "outcome": str(incident.outcome or "open"),
            "what": plain(incident.diagnosis.because, 300),
            "incident": plain(incident.incident_id),
        }
        for incident in found
    ]
    times = [i.opened_at for i in found]
    spare = max(SPARE_SECONDS, (max(times) - min(times)) / 20)
    between = [datetime.fromtimestamp(at, UTC).isoformat() for at in (min(times) - spare, max(times) + spare)]
    axis = alt.Axis(format="%m-%d %H:%M:%S", tickCount=4, labelOverlap=True, labelFlush=True, grid=True)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=90, opacity=0.8)
        .encode(
            x=alt.X("at:T", title="opened at (UTC)", scale=alt.Scale(type="utc", domain=between), axis=axis),
            y=alt.Y("class:N", title=None),
            shape=alt.Shape("class:N", legend=None),
            color=alt.Color(
                "class:N", scale=alt.Scale(domain=[*CLASS_COLOURS], range=[*CLASS_COLOURS.values()]), legend=None
            ),
            tooltip=["incident:N", "outcome:N", "what:N", "opened (UTC):N"],
        )
        .properties(height=90 + 34 * len({r["class"] for r in rows}))
    )


def _codes(codes: Sequence[XidOccurrence]) -> None:
    if not codes:
        return
    st.markdown("**XIDs and hardware**")
    shown = merged(codes)[:CODES_SHOWN]
    data_table(
        {
            "code": [c.name for c in shown],
            "GPU": [plain(c.gpu) for c in shown],
            "count": [c.count for c in shown],
            "latest (UTC)": [_when(c.at) if c.at is not None else "" for c in shown],
            "severity": ["✖ fatal" if c.fatal else "○ non-fatal" for c in shown],
            "class": [c.fault_class for c in shown],
            "meaning": [c.meaning for c in shown],
            "advice": [c.advice for c in shown],
            "source": [plain(c.source) for c in shown],
        },
    )


def _commands(past: nodes.NodeHistory) -> None:
    if past.entries:
        st.markdown("**Quarantines and drains**")
    for e in reversed(past.entries):
        st.text(plain(f"{_when(e.at)} {e.what} by {e.by}: {e.because}"))


def _burn_ins(past: nodes.NodeHistory) -> None:
    st.markdown("**Burn-ins**")
    if not past.record.burn_ins:
        st.text("No burn-in yet. Run it on the node:")
        st.code("rolecall node burn-in", language=None)
    for b in reversed(past.record.burn_ins):
        result = "✓ passed" if b.result.passed else "✗ failed"
        st.text(plain(f"{_when(b.at)} {result} in {seconds(b.result.seconds)}, by {b.by}"))
        for c in b.result.checks:
            values = ", ".join(f"{k} {v}" for k, v in sorted(c.values.items()))
            glyph = "– skipped:" if c.passed is None else "✓" if c.passed else "✗"
            st.text(plain(f"    {glyph} {c.name}: {c.because}{f' ({values})' if values else ''}"))


def _when(at: float) -> str:
    return utc(at, "%Y-%m-%d %H:%M:%S")
