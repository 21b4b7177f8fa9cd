"""The page `Now`: what is open, who is there, how the run goes. The decisions are in view.py."""

import streamlit as st

from rolecall.core.text import plain
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages import charts
from rolecall.dashboards.pages.overview import html as now_html
from rolecall.dashboards.pages.overview import policy_health as now_health
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
"""Open incidents told in full; of more the number is told, and the page Incidents lists them."""
TABLE_KEY = "now.table"


def show() -> None:
    sidebar(reader())
    page("Now", _draw, slow=_draw_slow)


def _draw(_: Reader, look: JournalSnapshot) -> None:
    for kind, head, sentence, advice in notices(look):
        st.html(banner(kind, head, sentence, advice=advice))
    _draw_incidents(look)
    if not look.snapshot.ended:
        st.text(status_line(look))
    st.html(figures(headline_figures(look)))
    _draw_replicas(roles(look))


def _draw_incidents(look: JournalSnapshot) -> None:
    open_ = open_incidents(look)
    for t in open_[:OPEN_MAX]:
        st.html(now_html.incident(t, look.at))
        with st.container(horizontal=True):
            link = {"incident": t.incident_id}
            st.page_link("scripts/incidents.py", label="Its story", icon=":material/timeline:", query_params=link)
            if t.asks:
                st.page_link("scripts/operations.py", label="Decide", icon=":material/front_hand:")
    if len(open_) > OPEN_MAX:
        st.page_link("scripts/incidents.py", label=f"{len(open_) - OPEN_MAX} more incidents are open")
    if not open_ and not look.snapshot.ended and look.snapshot.replicas:
        st.html(banner("good", "No incident is open."))


def _draw_replicas(found: tuple[RoleSummary, ...]) -> None:
    if not found:
        return
    st.subheader("Replicas")
    st.html("".join(now_html.role(r) for r in found))
    if st.toggle("Every replica in a table", key=TABLE_KEY):
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


def _draw_slow(r: Reader, look: JournalSnapshot) -> None:
    curve = look.course.curve
    if len(curve) > 1:
        st.subheader("The run so far")
        drawn = (
            ("reward", charts.rows(curve, lambda b: b.reward), charts.LINE, "~g"),
            ("seconds a step, the slowest", charts.rows(curve, lambda b: b.seconds_max), charts.SECOND, "~g"),
            ("tokens a second", charts.rows(curve, lambda b: b.tokens_per_second), charts.LINE, "~s"),
        )
        for column, (title, points, colour, form) in zip(st.columns(3), drawn, strict=True):
            if points:
                with column:
                    st.vega_lite_chart(
                        charts.columns(points),
                        charts.curve(points, title, colour=colour, figures=form),
                        width="stretch",
                    )
    now_health.show(curve)
    rows = lost_rows(look)
    if rows:
        st.subheader("Where the lost time went")
        st.html(table(["role", "fault", "work lost", "of all time"], rows))
        st.caption(
            "ETTR: the share of time in which rollouts and trainers worked. A loss counts from the injected fault where one "
            "is known, else from the onset that its diagnosis gives, in seconds of the whole run's work."
        )
    show_prometheus(r)
