"""The Overview page: open incidents, replicas, progress and policy health. view.py computes the content."""

import streamlit as st

from rolecall.core.text import plain
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages import charts
from rolecall.dashboards.pages.overview import html, policy_health
from rolecall.dashboards.pages.overview.prometheus import show as show_prometheus
from rolecall.dashboards.pages.overview.view import (
    RoleSummary,
    headline_figures,
    lost_rows,
    notices,
    open_incidents,
    roles,
    status_line,
)
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import sidebar
from rolecall.dashboards.pages.style import banner, figures, table

OPEN_MAX = 12
"""Open incidents shown in full; the Incidents page lists the rest."""
TABLE_KEY = "overview.table"


def show() -> None:
    sidebar(reader())
    page("Overview", _draw, slow=_draw_slow)


def _draw(_: Reader, snapshot: JournalSnapshot) -> None:
    for kind, head, sentence, advice in notices(snapshot):
        st.html(banner(kind, head, sentence, advice=advice))
    _draw_incidents(snapshot)
    if not snapshot.run.ended:
        st.text(status_line(snapshot))
    st.html(figures(headline_figures(snapshot)))
    _draw_replicas(roles(snapshot))


def _draw_incidents(snapshot: JournalSnapshot) -> None:
    open_ = open_incidents(snapshot)
    for t in open_[:OPEN_MAX]:
        st.html(html.incident(t, snapshot.at))
        with st.container(horizontal=True):
            link = {"incident": t.incident_id}
            st.page_link("incidents.py", label="Details", icon=":material/timeline:", query_params=link)
            if t.asks:
                st.page_link("operations.py", label="Review plan", icon=":material/terminal:")
    if len(open_) > OPEN_MAX:
        st.page_link("incidents.py", label=f"{len(open_) - OPEN_MAX} more incidents are open")
    if not open_ and not snapshot.run.ended and snapshot.run.replicas:
        st.html(banner("good", "No open incidents."))


def _draw_replicas(found: tuple[RoleSummary, ...]) -> None:
    if not found:
        return
    st.subheader("Replicas")
    st.html("".join(html.role(r) for r in found))
    if st.toggle("Show all replicas as a table", key=TABLE_KEY):
        cells = [c for r in found for c in r.cells]
        st.dataframe(
            {
                "replica": [plain(c.replica, 80) for c in cells],
                "state": [c.state for c in cells],
                "incarnation": [c.incarnation for c in cells],
                "node": [plain(c.node, 80) for c in cells],
                "policy version": [c.policy_version if c.policy_version >= 0 else None for c in cells],
            },
            hide_index=True,
        )


def _draw_slow(r: Reader, snapshot: JournalSnapshot) -> None:
    curve = snapshot.trends.curve
    if len(curve) > 1:
        st.subheader("Progress")
        drawn = (
            ("reward", charts.rows(curve, lambda b: b.reward), charts.LINE, "~g"),
            ("step time, slowest, s", charts.rows(curve, lambda b: b.seconds_max), charts.SECOND, "~g"),
            ("tokens per second", charts.rows(curve, lambda b: b.tokens_per_second), charts.LINE, "~s"),
        )
        for column, (title, points, colour, form) in zip(st.columns(3), drawn, strict=True):
            if points:
                with column:
                    st.vega_lite_chart(
                        charts.columns(points),
                        charts.curve(points, title, colour=colour, figures=form),
                        width="stretch",
                    )
    policy_health.show(curve)
    rows = lost_rows(snapshot)
    if rows:
        st.subheader("Lost time")
        st.html(table(["role", "fault", "lost", "share of run time"], rows))
        st.caption(
            "ETTR (effective training time ratio): share of time in which rollouts and trainers did useful work. A "
            "loss counts from the injected fault if known, otherwise from the diagnosed onset, in seconds of the "
            "whole run."
        )
    show_prometheus(r)
