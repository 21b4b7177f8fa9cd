"""The list of incidents: a table with filters in the URL, on a phone cards.

Untrusted text is shown with `st.text` and in tables, or escaped; headings and labels are constant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas
import streamlit as st

from rolecall.core.text import escape, in_words, seconds, utc
from rolecall.dashboards.data.incident_titles import Severity
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.data.run_state import KIND_OF, step_of
from rolecall.dashboards.pages.incidents import table
from rolecall.dashboards.pages.links import INCIDENT, href
from rolecall.dashboards.pages.shell import chosen_run
from rolecall.dashboards.pages.style import sparkline

ANY = ""
SEVERITY_STYLES = {
    Severity.CRITICAL: "background-color: #fbdcdc; color: #8a1c1c",
    Severity.WARNING: "background-color: #fdebcf; color: #7a4a06",
    Severity.MINOR: "background-color: #dde9fb; color: #1d4486",
}
ROW_PIXELS = 58
"""Two lines of a diagnosis; a longer one is whole on the incident's page, and in the cell when it is opened."""
SPARK_INCIDENTS, SPARK_MIN = 60, 3
"""Incidents of the sparklines, the newest; fewer than the smallest number have none."""
REVIEWS = {"right": "right", "wrong": "wrong", "none": "not reviewed"}
WITHIN = {"hour": "the last hour", "day": "the last 24 hours", "week": "the last 7 days"}
FOUND_HELP = "From the onset that the first diagnosis estimates until the detectors were certain."
VERIFIED_HELP = "From the moment when the detectors were certain until the replacements were seen to make progress."


@st.cache_resource(show_spinner=False)
def _records(journal_url: str) -> table.IncidentTable:
    return table.IncidentTable()


def all_rows(reader: Reader, snapshot: JournalSnapshot) -> list[table.IncidentTableRow]:
    return _records(reader.settings.journal_url).rows(
        snapshot.projection.incidents,
        snapshot.projection.broken,
        mode_of=snapshot.mode_of,
        now=snapshot.at,
        step_of=lambda incident: step_of(incident, snapshot),
        ended=snapshot.run.ended != "",
    )


def draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    rows, now = all_rows(reader, snapshot), reader.now()
    wanted = _filters(table.choices(rows))
    found = table.shown(rows, wanted, now)
    _sparklines([r for r in rows if wanted.takes(r, now)])
    _count(found, snapshot)
    if found.rows:
        _table(found.rows, snapshot.until)
    elif not rows:
        st.info("No incidents in this run.", icon=":material/check_circle:")
    else:
        st.info("No incidents match these filters.", icon=":material/filter_alt_off:")
    _pager(found, wanted)


def _filters(offered: table.Choices) -> table.Filter:
    """The filter widgets, synchronized with the URL in both directions."""
    before = table.Filter.from_query({k: v for k, v in st.query_params.items() if k != INCIDENT})
    st.toggle("Filters", key="incidents-show")  # on a phone only (style.py)
    with st.container(horizontal=True, key="incidents-filters", gap="xsmall"):
        text = st.text_input("Search", before.text, key="incidents-text", width=180, placeholder="any column")
        status = _choice("State", before.status, offered.statuses, "incidents-status")
        role = _choice("Role", before.role, offered.roles, "incidents-role")
        fault = _choice("Class", before.fault, offered.faults, "incidents-fault")
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
        return "any" if option == ANY else (words or {}).get(option, in_words(option))

    return str(st.selectbox(label, options, index=options.index(now), format_func=called, key=key, width=124))


def _write(wanted: table.Filter) -> None:
    others = {k: v for k, v in st.query_params.items() if k not in table.Filter.__slots__}
    st.query_params.from_dict({**others, **wanted.to_query()})


def _sparklines(rows: Sequence[table.IncidentTableRow]) -> None:
    """Times to detect and to recover of the newest incidents, oldest first."""
    newest = rows[:SPARK_INCIDENTS]
    shown = (
        ("Onset to finding", [r.found_seconds for r in reversed(newest) if r.found_seconds is not None]),
        (
            "Finding to verified recovery",
            [r.verified_seconds for r in reversed(newest) if r.verified_seconds is not None],
        ),
    )
    parts = [sparkline(f"{label}, newest {len(v)}", v) for label, v in shown if len(v) >= SPARK_MIN]
    if parts:
        with st.container(key="incidents-sparks"):
            st.html(f'<div class="rc rc-sparks">{"".join(parts)}</div>')
            st.caption("From the estimated onset; the page Accounting counts from the injection where it is known.")


def _count(found: table.IncidentTablePage, snapshot: JournalSnapshot) -> None:
    of = f" of {found.num_all:,}" if found.num_found != found.num_all else ""
    what = "incident" if found.num_found == 1 and not of else "incidents, open first, then newest"
    with st.container(horizontal=True, vertical_alignment="center"):
        st.text(f"{found.num_found:,}{of} {what}", width="content")
        if found.rows:
            _cursor(found.rows)
    if not snapshot.history.whole:
        st.text(f"Loading history ({snapshot.history.percent} %): older incidents are still missing.")


def _cursor(rows: Sequence[table.IncidentTableRow]) -> None:
    """By keys: J and K mark the next and the previous row, O opens the marked one."""
    at = _marked(rows)
    with st.container(horizontal=True, key="incidents-keys", gap="xsmall"):
        if st.button("Next row", disabled=at + 1 >= len(rows), key="incidents-next", shortcut="j", type="tertiary"):
            _mark(at + 1)
        if st.button("Previous row", disabled=at == 0, key="incidents-previous", shortcut="k", type="tertiary"):
            _mark(at - 1)
        if st.button("Open the marked row", key="incidents-first", shortcut="o", type="tertiary"):
            open_page(rows[at].incident_id)


def _marked(rows: Sequence[table.IncidentTableRow]) -> int:
    return min(int(st.session_state.get("incidents-marked", 0)), max(0, len(rows) - 1))


def _mark(number: int) -> None:
    st.session_state["incidents-marked"] = number
    st.rerun()


def open_page(incident_id: str) -> None:
    st.query_params[INCIDENT] = incident_id
    st.rerun()


def _table(rows: tuple[table.IncidentTableRow, ...], now: float) -> None:
    config = {
        "": st.column_config.TextColumn(width=24, help="The marked row: J, K, and O to open it"),
        "found after onset": st.column_config.TextColumn(help=FOUND_HELP),
        "verified after finding": st.column_config.TextColumn(help=VERIFIED_HELP),
        "severity": st.column_config.TextColumn(width=90),
        "link": st.column_config.LinkColumn("incident", display_text=r"incident=([^&]*)", width=190),
        "what": st.column_config.TextColumn(width=150),
        "opened (UTC)": st.column_config.TextColumn(width=105),
        "because": st.column_config.TextColumn("diagnosis", width="large"),
    }
    run = chosen_run()
    st.html(_phone_cards(rows, now, run))
    marked = _marked(rows)
    cells = [{"": "▸" if n == marked else "", **_cells(r, now, run)} for n, r in enumerate(rows)]
    filled = [name for name in cells[0] if any(c[name] for c in cells)] if cells else []
    shown = pandas.DataFrame([{name: c[name] for name in filled} for c in cells])
    if "severity" in filled:
        shown = shown.style.map(_severity_style, subset=["severity"])
    picked = st.dataframe(
        shown,
        hide_index=True,
        column_config=config,
        row_height=ROW_PIXELS,
        key="incidents-table",
        on_select="rerun",
        selection_mode="single-row",
    )
    chosen = picked["selection"]["rows"]
    if chosen and chosen[0] < len(rows):
        open_page(rows[chosen[0]].incident_id)


def _severity_style(value: str) -> str:
    """CSS of a severity's cell, readable on a light and on a dark page."""
    return next((style for level, style in SEVERITY_STYLES.items() if value.endswith(level)), "")


def _kind(row: table.IncidentTableRow) -> str:
    return next((kind for level, kind in KIND_OF.items() if row.severity.endswith(level)), "soft")


def _phone_cards(rows: Sequence[table.IncidentTableRow], now: float, run: Mapping[str, str]) -> str:
    """The rows as cards, which a phone shows instead of the table (style.py)."""
    cards = []
    for row in rows:
        when = f"open for {age(row.open_seconds(now))}" if row.is_open else utc(row.opened_at)
        name = escape(row.title or row.incident_id, 200)
        cards.append(
            f'<div><a href="{escape(href(row.incident_id, run))}" aria-label="{name}"></a><b>{name}</b>'
            f'<span><i class="rc-{_kind(row)}">{escape(row.severity)}</i> {escape(row.words)} · {escape(when)}</span>'
            f"<small>{escape(row.because)}</small></div>"
        )
    return f'<div class="rc rc-phone-cards">{"".join(cards)}</div>'


def _cells(row: table.IncidentTableRow, now: float, run: Mapping[str, str]) -> dict[str, object]:
    return {
        "severity": row.severity,
        "what": row.title,
        "state": row.words,
        "because": row.because,
        "link": href(row.incident_id, run),
        "opened (UTC)": utc(row.opened_at)[5:19] if row.opened_at else "",
        "found after onset": seconds(row.found_seconds, ""),
        "verified after finding": seconds(row.verified_seconds, ""),
        "open for": seconds(row.open_seconds(now)) if row.opened_at else "",
        "suspect": row.who,
        "fault": in_words(row.fault_class),
        "action": in_words(row.action),
        "node": ", ".join(row.nodes[:3]),
        "review": row.review,
    }


def _pager(found: table.IncidentTablePage, wanted: table.Filter) -> None:
    if found.num_pages <= 1:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Newer", disabled=found.page <= 1, key="incidents-newer", shortcut="shift+k"):
            _go(wanted, found.page - 1)
        st.text(f"page {found.page} of {found.num_pages}")
        if st.button("Older", disabled=found.page >= found.num_pages, key="incidents-older", shortcut="shift+j"):
            _go(wanted, found.page + 1)


def _go(wanted: table.Filter, number: int) -> None:
    _write(replace(wanted, page=number))
    _mark(0)
