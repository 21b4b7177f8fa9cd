"""The Incidents page: a table with filters in the URL; with `?incident=ID`, the page of that incident."""

from dataclasses import replace

import streamlit as st

from rolecall.core.text import seconds, utc
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents import page as incident_page
from rolecall.dashboards.pages.incidents import table
from rolecall.dashboards.pages.shell import page

ANY = ""
OPEN_SHOWN = 5
"""Number of open incidents whose diagnoses are shown above the table."""
REVIEWS = {"right": "right", "wrong": "wrong", "none": "not reviewed"}
WITHIN = {"hour": "the last hour", "day": "the last 24 hours", "week": "the last 7 days"}


def show() -> None:
    wanted = st.query_params.get(table.INCIDENT)
    if wanted:
        incident_page.back()
        page("Incident", lambda r, snapshot: incident_page.draw(r, snapshot, wanted))
    else:
        page("Incidents", _draw)


@st.cache_resource(show_spinner=False)
def _records(journal_url: str) -> table.IncidentTable:
    del journal_url  # the cache key
    return table.IncidentTable()


def _draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    rows = _records(reader.settings.journal_url).rows(snapshot.projection.incidents, snapshot.projection.broken)
    now = reader.now()
    wanted = _filters(table.choices(rows))
    found = table.shown(rows, wanted, now)
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


def _filters(offered: table.Choices) -> table.Filter:
    """table.Filter widgets, synchronized with the URL in both directions."""
    before = table.Filter.from_query({k: v for k, v in st.query_params.items() if k != table.INCIDENT})
    with st.container(horizontal=True, key="incidents-filters"):
        text = st.text_input("Search", before.text, key="incidents-text", width=220, placeholder="any column")
        status = _choice("State or outcome", before.status, offered.statuses, "incidents-status")
        role = _choice("Role", before.role, offered.roles, "incidents-role")
        fault = _choice("Fault class", before.fault, offered.faults, "incidents-fault")
        node = _choice("Node", before.node, offered.nodes, "incidents-node")
        day = _choice("Day (UTC)", before.day, offered.days, "incidents-day")
        within = _choice("Within", before.within, tuple(WITHIN), "incidents-within", WITHIN)
        review = _choice("Review", before.review, tuple(REVIEWS), "incidents-review", REVIEWS)
    now = table.Filter(
        text=text.strip(), status=status, role=role, fault=fault, node=node, day=day, within=within, review=review
    )
    if now == replace(before, page=1):
        return before
    _write(now)
    return now


def _choice(label: str, now: str, offered: tuple[str, ...], key: str, words: dict[str, str] | None = None) -> str:
    """One of the existing values, or any. A value from the URL is offered even if it does not occur."""
    options = [ANY, *offered, *([now] if now and now not in offered else [])]

    def called(option: str) -> str:
        return "any" if option == ANY else (words or {}).get(option, option.replace("_", " "))

    return str(st.selectbox(label, options, index=options.index(now), format_func=called, key=key, width=160))


def _write(wanted: table.Filter) -> None:
    others = {k: v for k, v in st.query_params.items() if k not in table.Filter.__slots__}
    st.query_params.from_dict({**others, **wanted.to_query()})


# --- table ----------------------------------------------------------------------------------------------------------


def _count(found: table.IncidentTablePage, snapshot: JournalSnapshot) -> None:
    of = f" of {found.num_all:,}" if found.num_found != found.num_all else ""
    what = "incident" if found.num_found == 1 and not of else "incidents, open first, then newest"
    st.text(f"{found.num_found:,}{of} {what}")
    if not snapshot.history.whole:
        st.text(f"Loading history ({snapshot.history.percent} %): older incidents are still missing.")


def _open_ones(rows: tuple[table.IncidentTableRow, ...]) -> None:
    """Diagnoses of open incidents in full; table cells would cut them off."""
    with st.container(gap="xxsmall", key="incidents-open"):
        for r in [r for r in rows if r.is_open][:OPEN_SHOWN]:
            st.text(f"{r.words}: {r.because}")


def _table(rows: tuple[table.IncidentTableRow, ...], now: float) -> None:
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
        st.query_params[table.INCIDENT] = rows[chosen[0]].incident_id
        st.rerun()


def _cells(row: table.IncidentTableRow, now: float) -> dict[str, str]:
    return {
        "link": table.href(row.incident_id),
        "state": row.words,
        "fault": row.fault_class.replace("_", " "),
        "suspect": row.who,
        "opened (UTC)": utc(row.opened_at)[5:19] if row.opened_at else "",
        "detected after": seconds(row.found_seconds),
        "recovered after": seconds(row.recovered_seconds),
        "duration": seconds(row.lasted_seconds(now)) if row.opened_at else "",
        "action": row.action.replace("_", " "),
        "because": row.because,
        "node": ", ".join(row.nodes[:3]),
        "review": row.review,
    }


def _pager(found: table.IncidentTablePage, wanted: table.Filter) -> None:
    if found.num_pages <= 1:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Newer", disabled=found.page <= 1, key="incidents-newer"):
            _go(wanted, found.page - 1)
        st.text(f"page {found.page} of {found.num_pages}")
        if st.button("Older", disabled=found.page >= found.num_pages, key="incidents-older"):
            _go(wanted, found.page + 1)


def _go(wanted: table.Filter, number: int) -> None:
    _write(replace(wanted, page=number))
    st.rerun()
