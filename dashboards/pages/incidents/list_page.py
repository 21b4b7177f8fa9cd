"""The Incidents page: a table with filters in the URL; with `?incident=ID`, the page of that incident."""

import streamlit as st

from rolecall.core.text import seconds
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents import page as incident_page
from rolecall.dashboards.pages.incidents.table import (
    INCIDENT,
    Choices,
    Filter,
    IncidentTable,
    IncidentTablePage,
    IncidentTableRow,
    choices,
    href,
    moment,
    shown,
)
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import sidebar

ANY = ""
OPEN_SHOWN = 5
"""Number of open incidents whose diagnoses are shown above the table."""
MARKS = {"right": "right", "wrong": "wrong", "none": "not reviewed"}
WITHIN = {"hour": "the last hour", "day": "the last 24 hours", "week": "the last 7 days"}


def show() -> None:
    sidebar(reader())
    wanted = st.query_params.get(INCIDENT)
    if wanted:
        incident_page.back()
        page("Incident", lambda r, snapshot: incident_page.draw(r, snapshot, wanted))
    else:
        page("Incidents", _draw)


@st.cache_resource(show_spinner=False)
def _records(journal_url: str) -> IncidentTable:
    del journal_url  # the cache key
    return IncidentTable()


def _draw(r: Reader, snapshot: JournalSnapshot) -> None:
    rows = _records(r.settings.journal_url).rows(snapshot.projection.incidents, snapshot.projection.broken)
    now = r.now()
    wanted = _filters(choices(rows))
    found = shown(rows, wanted, now)
    _count(found, snapshot)
    if found.rows:
        _open_ones(found.rows)
        _table(found.rows, now)
    elif not rows:
        st.info("No incidents in this run.", icon=":material/check_circle:")
    else:
        st.info("No incidents match these filters.", icon=":material/filter_alt_off:")
    _pager(found, wanted)


# --- filters --------------------------------------------------------------------------------------------------------


def _filters(offered: Choices) -> Filter:
    """Filter widgets, synchronized with the URL in both directions."""
    before = Filter.from_query({k: v for k, v in st.query_params.items() if k != INCIDENT})
    with st.container(horizontal=True, key="incidents-filters"):
        text = st.text_input("Search", before.text, key="incidents-text", width=220, placeholder="any column")
        status = _choice("State or outcome", before.status, offered.statuses, "incidents-status")
        role = _choice("Role", before.role, offered.roles, "incidents-role")
        fault = _choice("Fault class", before.fault, offered.faults, "incidents-fault")
        node = _choice("Node", before.node, offered.nodes, "incidents-node")
        day = _choice("Day (UTC)", before.day, offered.days, "incidents-day")
        within = _choice("Within", before.within, tuple(WITHIN), "incidents-within", WITHIN)
        marked = _choice("Review", before.marked, tuple(MARKS), "incidents-marked", MARKS)
    now = Filter(
        text=text.strip(), status=status, role=role, fault=fault, node=node, day=day, within=within, marked=marked
    )
    same = now == Filter(**{**{f: getattr(before, f) for f in Filter.__slots__}, "page": 1})
    now = before if same else now
    if now != before:
        _write(now)
    return now


def _choice(label: str, now: str, offered: tuple[str, ...], key: str, words: dict[str, str] | None = None) -> str:
    """One of the existing values, or any. A value from the URL is offered even if it does not occur."""
    options = [ANY, *offered, *([now] if now and now not in offered else [])]

    def called(option: str) -> str:
        return "any" if option == ANY else (words or {}).get(option, option.replace("_", " "))

    return str(st.selectbox(label, options, index=options.index(now), format_func=called, key=key, width=160))


def _write(wanted: Filter) -> None:
    others = {k: v for k, v in st.query_params.items() if k not in Filter.__slots__}
    st.query_params.from_dict({**others, **wanted.to_query()})


# --- table ----------------------------------------------------------------------------------------------------------


def _count(found: IncidentTablePage, snapshot: JournalSnapshot) -> None:
    of = f" of {found.num_all:,}" if found.num_found != found.num_all else ""
    what = "incident" if found.num_found == 1 and not of else "incidents, open first, then newest"
    st.text(f"{found.num_found:,}{of} {what}")
    if not snapshot.history.whole:
        st.text(f"Loading history ({snapshot.history.percent} %): older incidents are still missing.")


def _open_ones(rows: tuple[IncidentTableRow, ...]) -> None:
    """Diagnoses of open incidents in full; table cells would cut them off."""
    with st.container(gap="xxsmall", key="incidents-open"):
        for r in [r for r in rows if r.is_open][:OPEN_SHOWN]:
            st.text(f"{r.words}: {r.because}")


def _table(rows: tuple[IncidentTableRow, ...], now: float) -> None:
    config = {
        "link": st.column_config.LinkColumn("incident", display_text=r"incident=([^&]*)", pinned=True),
        "because": st.column_config.TextColumn("diagnosis", width="large"),
    }
    picked = st.dataframe(
        [_cells(r, now) for r in rows],
        hide_index=True,
        column_config=config,
        key="incidents-table",
        on_select="rerun",
        selection_mode="single-row",
    )
    chosen = picked["selection"]["rows"]
    if chosen and chosen[0] < len(rows):
        st.query_params[INCIDENT] = rows[chosen[0]].incident_id
        st.rerun()


def _cells(r: IncidentTableRow, now: float) -> dict[str, str]:
    return {
        "link": href(r.incident_id),
        "state": r.words,
        "fault": r.fault_class.replace("_", " "),
        "suspect": r.who,
        "opened (UTC)": moment(r.opened_at)[5:19] if r.opened_at else "",
        "detected after": seconds(r.found_seconds),
        "recovered after": seconds(r.recovered_seconds),
        "duration": seconds(r.lasted_seconds(now)) if r.opened_at else "",
        "action": r.action.replace("_", " "),
        "because": r.because,
        "node": ", ".join(r.nodes[:3]),
        "review": r.marked,
    }


def _pager(found: IncidentTablePage, wanted: Filter) -> None:
    if found.num_pages <= 1:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Newer", disabled=found.page <= 1, key="incidents-newer"):
            _go(wanted, found.page - 1)
        st.text(f"page {found.page} of {found.num_pages}")
        if st.button("Older", disabled=found.page >= found.num_pages, key="incidents-older"):
            _go(wanted, found.page + 1)


def _go(wanted: Filter, number: int) -> None:
    _write(Filter(**{**{f: getattr(wanted, f) for f in Filter.__slots__}, "page": number}))
    st.rerun()
