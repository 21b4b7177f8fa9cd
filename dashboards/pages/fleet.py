"""The Fleet page: nodes by health, worst first, and the history of one node."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import altair as alt
import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import plain, seconds, utc
from rolecall.dashboards.data import nodes
from rolecall.dashboards.data.hardware import FleetMetrics, XidOccurrence, codes_of, fleet_metrics, merged
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.operations.commands import operations
from rolecall.dashboards.pages.operations.plans import State, place_of
from rolecall.dashboards.pages.prometheus import PrometheusPoller, PrometheusSnapshot
from rolecall.dashboards.pages.shell import data_table, page
from rolecall.dashboards.pages.style import table as small_table
from rolecall.recovery.incidents import Incident

WIDE, NARROW = st.column_config.TextColumn(width="large"), st.column_config.TextColumn(width="small")
METRIC_PIXELS, ROW_PIXELS = 180, 58
NODE_INCIDENTS_SHOWN = 200
CODES_SHOWN = 200
NARROW_COLUMNS, COLUMN_PIXELS = 5, 96
"""Up to this many columns of the heat map keep their width."""
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
            known = state.fleet if state.fleet.replicas else nodes.observed_fleet(snapshot.observed)
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
        poller = _poller(settings.prometheus_url, settings.prometheus_authorization, place_of(reader).run_id)
        seen = poller.latest(settings.patience_seconds)
    cache = _cache(settings.journal_url)
    fleet = cache.fleet(snapshot, operations(reader).latest(reader), seen.answer or FleetMetrics(), now)
    if not fleet.rows:
        st.text("The journal contains no nodes yet.")
        return
    with st.container(horizontal=True):
        for health in nodes.NodeHealth:
            num = fleet.count(health)
            if num or (health is nodes.NodeHealth.HEALTHY and snapshot.projection.ended is None):
                st.metric(f"{nodes.GLYPHS[health]} {health}", num, border=True, width=METRIC_PIXELS)
    _hardware_source(settings.prometheus_url, seen, now)
    _table(fleet, seen.answer or FleetMetrics(), now, whole=snapshot.history.whole)
    _history(fleet, cache.by_node, now)
    names = [row.node for row in fleet.rows]
    node = st.selectbox(
        "Node details", sorted(names, key=nodes.natural), key="fleet.node", index=None, placeholder="worst node"
    )
    row = fleet.find(node or names[0])
    if row is not None:
        _node(row, cache.by_node.get(row.node, ()), fleet)


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
    elif seen.at is None:
        st.text("Querying Prometheus.")


def _table(fleet: nodes.FleetHealth, live: FleetMetrics, now: float, *, whole: bool) -> None:
    rows = fleet.rows
    several = len({r.because for r in rows}) > 1
    if not several and rows[0].because:
        st.text(f"All nodes: {plain(rows[0].because)}")
    columns: dict[str, Sequence[object]] = {
        "health": [r.status for r in rows],
        "node": [plain(r.node) for r in rows],
        "why": [plain(r.because) if several else "" for r in rows],
        "1 h": [r.in_hour for r in rows],
        "24 h": [r.in_day for r in rows],
        "30 d": [r.in_month for r in rows],
        "GPUs": [_gpus(r.node, live) for r in rows],
        "XIDs": [", ".join(dict.fromkeys(f"{c.name}{'!' if c.fatal else ''}" for c in r.codes)) for r in rows],
        "burn-in": [_burn_in_result(r.past) for r in rows],
        "last change": [f"{nodes.age(now - r.changed_at)} ago" if r.changed_at else "" for r in rows],
        "replicas": [
            plain(", ".join(v.replica + (f"#{v.incarnation}" if v.incarnation else "") for v in r.replicas))
            for r in rows
        ],
    }
    data_table(
        {name: values for name, values in columns.items() if any(v != "" for v in values)},
        column_config={"why": WIDE, "replicas": WIDE},
    )
    st.caption(
        f"Incidents per node, fleet median: {fleet.median_hour:g} in 1 h, {fleet.median_day:g} in 24 h, "
        f"{fleet.median_month:g} in 30 days. For a run that has ended, counted back from its end."
        + ("" if whole else " Loading older incidents: the counts are incomplete.")
    )


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
    cells, unit = nodes.heat(by_node, min(now, newest))
    offenders = nodes.repeat_offenders(fleet, by_node)
    left, right = st.columns([3, 2], gap="medium") if offenders else (st.container(), st.container())
    with left:
        st.subheader(f"Incidents by node and {unit}")
        is_wide = len({c.start for c in cells}) > NARROW_COLUMNS
        st.altair_chart(_heat_chart(cells, is_wide=is_wide), width="stretch" if is_wide else "content")
    with right:
        if offenders:
            st.subheader("Repeat offenders")
            st.html(small_table(["node", "30 d", "median", "classes"], offenders, narrow=1))


def _heat_chart(cells: Sequence[nodes.HeatCell], *, is_wide: bool) -> Any:
    """As wide as the page, or with columns of one width where there are few."""
    rows = [{"node": plain(c.node, 60), "from": c.start, "incidents": c.num, "class": c.classes} for c in cells]
    order = list(dict.fromkeys(r["node"] for r in rows))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("from:O", title="UTC", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("node:N", title=None, sort=order, axis=alt.Axis(labelLimit=160)),
        tooltip=["node:N", "from:N", "incidents:Q", "class:N"],
    )
    count = base.mark_text(fontWeight="bold", color="white").encode(text="incidents:Q")
    square = base.mark_rect(cornerRadius=3, stroke="white", strokeWidth=1).encode(
        color=alt.Color("incidents:Q", scale=alt.Scale(range=["#d98a94", "#a11d2e"], domainMin=1), legend=None)
    )
    return (square + count).properties(width="container" if is_wide else alt.Step(COLUMN_PIXELS), height=alt.Step(26))


def _burn_in_result(past: nodes.NodeHistory) -> str:
    found = past.record.burn_ins
    if not found:
        return ""
    return "✓ passed" if found[-1].result.passed else "✗ failed"


def _node(row: nodes.NodeRow, found: Sequence[Incident], fleet: nodes.FleetHealth) -> None:
    with st.container(border=True):
        st.text(plain(f"{row.node}: {row.status}"))
        if row.because:
            st.text(plain(row.because))
        if row.open_incidents:
            st.text(plain(f"open: {', '.join(row.open_incidents)}"))
        with st.container(gap="xxsmall"):
            for v in row.replicas:
                st.text(plain(f"{v.replica}#{v.incarnation} {v.state or 'not started'} {v.because}".strip()))
        _incidents(row, found, fleet)
        _codes(row.codes)
        _commands(row.past)
        _burn_ins(row.past)


def _incidents(row: nodes.NodeRow, found: Sequence[Incident], fleet: nodes.FleetHealth) -> None:
    st.markdown("**Incidents**")
    if not found:
        st.text("None on this node.")
        return
    st.text(
        f"{row.in_hour} in 1 h, {row.in_day} in 24 h, {row.in_month} in 30 days; fleet median: "
        f"{fleet.median_hour:g}, {fleet.median_day:g}, {fleet.median_month:g}"
    )
    newest = sorted(found, key=lambda i: -i.opened_at)[:NODE_INCIDENTS_SHOWN]
    st.altair_chart(_incidents_chart(newest), width="stretch")
    data_table(
        {
            "opened (UTC)": [_when(i.opened_at) for i in newest],
            "incident": [plain(i.incident_id) for i in newest],
            "class": [str(i.diagnosis.fault_class) for i in newest],
            "outcome": [str(i.outcome or i.state) for i in newest],
            "diagnosis": [plain(i.diagnosis.because) for i in newest],
        },
        column_config={"class": NARROW, "outcome": NARROW, "diagnosis": WIDE},
        row_height=ROW_PIXELS,
    )


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
            color=alt.Color("class:N", legend=None),
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
