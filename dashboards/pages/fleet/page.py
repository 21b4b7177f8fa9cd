"""The page `FleetHealth`: nodes by health, worst first, and one node's past."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.hardware import XidOccurrence, codes_of, merged
from rolecall.dashboards.data.node_history import NodeHistory, pasts
from rolecall.dashboards.data.nodes import (
    GLYPHS,
    FleetHealth,
    NodeHealth,
    NodeRow,
    age,
    counted_until,
    fleet_rows,
    incidents_by_node,
    natural,
)
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.fleet.charts import incidents_chart
from rolecall.dashboards.pages.fleet.prometheus import FleetMetricsPoller, FleetMetricsSnapshot
from rolecall.dashboards.pages.operations.buttons import desk
from rolecall.dashboards.pages.operations.state import State, place_of
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import sidebar
from rolecall.recovery.incidents.incident import Incident

NODE_INCIDENTS_SHOWN = 200
CODES_SHOWN = 200


def show() -> None:
    sidebar(reader())
    page("FleetHealth", _draw)


@dataclass
class _FleetPageCache:
    """What was derived from one look serves all who look: one a process and journal. Thread-safe."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    of: tuple[object, ...] = ()
    by_node: Mapping[str, Sequence[Incident]] = field(default_factory=dict)
    codes: tuple[XidOccurrence, ...] = ()
    pasts: Mapping[str, NodeHistory] = field(default_factory=dict)

    def fleet(self, look: JournalSnapshot, state: State, seen: FleetMetricsSnapshot, now: float) -> FleetHealth:
        with self.lock:
            incidents = tuple(look.book.incidents.values())
            if self.of != (incidents, state.words):
                self.by_node, self.codes = incidents_by_node(incidents), codes_of(incidents)
                self.pasts, self.of = pasts(state.words), (incidents, state.words)
            until = counted_until(incidents, state.fleet, look.book.ended is not None, now)
            return fleet_rows(state.fleet, self.by_node, self.pasts, self.codes, seen.live, until, state.nodes)


@st.cache_resource(show_spinner=False)
def _drawer(journal_url: str) -> _FleetPageCache:
    return _FleetPageCache()


@st.cache_resource(show_spinner=False)
def _eye(url: str, _authorization: str, run_id: str) -> FleetMetricsPoller:
    return FleetMetricsPoller(url, _authorization, SystemClock(), run_id)


def _draw(r: Reader, look: JournalSnapshot) -> None:
    settings, now = r.settings, r.now()
    seen = FleetMetricsSnapshot()
    if settings.prometheus_url:
        seen = _eye(settings.prometheus_url, settings.prometheus_authorization, place_of(r).run_id).look()
    drawer = _drawer(settings.journal_url)
    fleet = drawer.fleet(look, desk(r).look(r), seen, now)
    if not fleet.rows:
        st.text("The journal names no node yet.")
        return
    _counts(fleet)
    _hardware_source(settings.prometheus_url, seen, now)
    _table(fleet, now, whole=look.history.whole)
    names = [row.node for row in fleet.rows]
    node = st.selectbox("One node", sorted(names, key=natural), key="fleet.node", index=None, placeholder="the worst")
    row = fleet.find(node or names[0])
    if row is not None:
        _node(row, drawer.by_node.get(row.node, ()), fleet)


def _counts(fleet: FleetHealth) -> None:
    with st.container(horizontal=True):
        for health in NodeHealth:
            num = fleet.count(health)
            if num or health is NodeHealth.HEALTHY:
                st.metric(f"{GLYPHS[health]} {health}", num)


def _hardware_source(url: str, seen: FleetMetricsSnapshot, now: float) -> None:
    if not url:
        st.caption("Hardware as incidents tell it. With `--prometheus URL` the XIDs and GPUs of all nodes show live.")
    elif seen.away:
        st.warning("Prometheus does not answer: hardware is shown as incidents tell it.", icon=":material/cloud_off:")
        st.text(plain(seen.away))
        if seen.at is not None:
            st.text(f"Its last answers are {age(now - seen.at)} old.")
    elif seen.at is None:
        st.text("Prometheus has been asked and has not answered yet.")


def _table(fleet: FleetHealth, now: float, *, whole: bool) -> None:
    rows = fleet.rows
    st.dataframe(
        {
            "health": [r.told for r in rows],
            "node": [plain(r.node) for r in rows],
            "why": [plain(r.because) for r in rows],
            "1 h": [r.in_hour for r in rows],
            "24 h": [r.in_day for r in rows],
            "30 d": [r.in_month for r in rows],
            "XIDs": [_codes_told(r.codes) for r in rows],
            "burn-in": [_burn_in_told(r.past) for r in rows],
            "last change": [f"{age(now - r.changed_at)} ago" if r.changed_at else "–" for r in rows],
            "replicas": [plain(", ".join(f"{v.replica}#{v.incarnation}" for v in r.replicas)) for r in rows],
        },
        hide_index=True,
        width="stretch",
        height=min(420, 38 + 35 * len(rows)),
        column_config={"why": st.column_config.TextColumn(width="medium")},
    )
    st.caption(
        f"Incidents per node, fleet's median: {fleet.median_hour:g} in 1 h, {fleet.median_day:g} in 24 h, "
        f"{fleet.median_month:g} in 30 days. Of a run that is over they are counted back from its end."
        + ("" if whole else " Older incidents are still being read: the counts grow.")
    )


def _codes_told(codes: Sequence[XidOccurrence]) -> str:
    names = dict.fromkeys(f"{c.name}{'!' if c.fatal else ''}" for c in codes)
    return ", ".join(names)


def _burn_in_told(past: NodeHistory) -> str:
    found = past.record.burn_ins
    if not found:
        return "–"
    return "✓ passed" if found[-1].result.passed else "✗ failed"


# --- one node -----------------------------------------------------------------------------------------------------


def _node(row: NodeRow, found: Sequence[Incident], fleet: FleetHealth) -> None:
    with st.container(border=True):
        st.text(plain(f"{row.node}: {row.told}"))
        if row.because:
            st.text(plain(row.because))
        if row.open_incidents:
            st.text(plain(f"open: {', '.join(row.open_incidents)}"))
        with st.container(gap="xxsmall"):
            for v in row.replicas:
                st.text(plain(f"{v.replica}#{v.incarnation} {v.state or 'not there yet'} {v.because}".strip()))
        _incidents(row, found, fleet)
        _codes(row.codes)
        _said(row.past)
        _burn_ins(row.past)


def _incidents(row: NodeRow, found: Sequence[Incident], fleet: FleetHealth) -> None:
    st.markdown("**Incidents**")
    if not found:
        st.text("None that suspects this node.")
        return
    st.text(
        f"{row.in_hour} in 1 h, {row.in_day} in 24 h, {row.in_month} in 30 days; the fleet's median is "
        f"{fleet.median_hour:g}, {fleet.median_day:g}, {fleet.median_month:g}"
    )
    newest = sorted(found, key=lambda i: -i.opened_at)[:NODE_INCIDENTS_SHOWN]
    st.altair_chart(incidents_chart(newest), width="stretch")
    st.dataframe(
        {
            "opened (UTC)": [_when(i.opened_at) for i in newest],
            "incident": [plain(i.incident_id) for i in newest],
            "class": [str(i.diagnosis.fault_class) for i in newest],
            "outcome": [str(i.outcome or i.state) for i in newest],
            "what": [plain(i.diagnosis.because) for i in newest],
        },
        hide_index=True,
        width="stretch",
    )


def _codes(codes: Sequence[XidOccurrence]) -> None:
    st.markdown("**XIDs and hardware**")
    if not codes:
        st.text("No XID is known of this node.")
        return
    shown = merged(codes)[:CODES_SHOWN]
    st.dataframe(
        {
            "code": [c.name for c in shown],
            "GPU": [plain(c.gpu) or "–" for c in shown],
            "times": [c.count for c in shown],
            "newest (UTC)": [_when(c.at) if c.at is not None else "–" for c in shown],
            "severity": ["✖ fatal" if c.fatal else "○ not fatal" for c in shown],
            "class": [c.fault_class for c in shown],
            "meaning": [c.meaning for c in shown],
            "what to do": [c.advice for c in shown],
            "from": [plain(c.source) for c in shown],
        },
        hide_index=True,
        width="stretch",
    )


def _said(past: NodeHistory) -> None:
    st.markdown("**Quarantines and drains**")
    if not past.said:
        st.text("Nobody has said anything of this node.")
    for said in reversed(past.said):
        st.text(plain(f"{_when(said.at)} {said.what} by {said.by}: {said.because}"))


def _burn_ins(past: NodeHistory) -> None:
    st.markdown("**Burn-ins**")
    if not past.record.burn_ins:
        st.text("It was never burned in. On the node itself:")
        st.code("rolecall node burn-in", language=None)
    for b in reversed(past.record.burn_ins):
        word = "✓ passed" if b.result.passed else "✗ failed"
        st.text(plain(f"{_when(b.at)} {word} in {seconds(b.result.seconds)}, by {b.by}"))
        for c in b.result.checks:
            values = ", ".join(f"{k} {v}" for k, v in sorted(c.values.items()))
            glyph = "– not done:" if c.passed is None else "✓" if c.passed else "✗"
            st.text(plain(f"    {glyph} {c.name}: {c.because}{f' ({values})' if values else ''}"))


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
