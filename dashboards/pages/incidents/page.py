"""The Incidents page: a table with filters in the URL; with `?incident=ID`, the page of that incident with its
diagnosis, evidence, decisions, actions, verification and cost.

Untrusted text is shown with `st.text` and `st.code` only; headings and labels are constant.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event
from rolecall.core.text import plain, seconds, utc
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents import evidence_files as incident_files
from rolecall.dashboards.pages.incidents import table, view
from rolecall.dashboards.pages.incidents.cache import IncidentCost, IncidentPageCache, IncidentPageModel
from rolecall.dashboards.pages.incidents.charts import incident_charts
from rolecall.dashboards.pages.incidents.what_if import replay, threshold_boundary
from rolecall.dashboards.pages.shell import page

ANY = ""
OPEN_SHOWN = 5
"""Number of open incidents whose diagnoses are shown above the table."""
REVIEWS = {"right": "right", "wrong": "wrong", "none": "not reviewed"}
WITHIN = {"hour": "the last hour", "day": "the last 24 hours", "week": "the last 7 days"}


def show() -> None:
    wanted = st.query_params.get(table.INCIDENT)
    if wanted:
        back()
        page("Incident", lambda r, snapshot: draw(r, snapshot, wanted))
    else:
        page("Incidents", _draw)


@st.cache_resource(show_spinner=False)
def _records(journal_url: str) -> table.IncidentTable:
    return table.IncidentTable()


def _draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    rows = _records(reader.settings.journal_url).rows(snapshot.projection.incidents, snapshot.projection.broken)
    now = reader.now()
    wanted = _filters(table.choices(rows))
    found = table.shown(rows, wanted, now)
    _count(found, snapshot)
    if found.rows:
        with st.container(gap="xxsmall", key="incidents-open"):
            # In full, because table cells cut them off.
            for r in [r for r in found.rows if r.is_open][:OPEN_SHOWN]:
                st.text(f"{r.words}: {r.because}")
        _table(found.rows, now)
    elif not rows:
        st.info("No incidents in this run.", icon=":material/check_circle:")
    else:
        st.info("No incidents match these filters.", icon=":material/filter_alt_off:")
    _pager(found, wanted)


def _filters(offered: table.Choices) -> table.Filter:
    """The filter widgets, synchronized with the URL in both directions."""
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


def _count(found: table.IncidentTablePage, snapshot: JournalSnapshot) -> None:
    of = f" of {found.num_all:,}" if found.num_found != found.num_all else ""
    what = "incident" if found.num_found == 1 and not of else "incidents, open first, then newest"
    st.text(f"{found.num_found:,}{of} {what}")
    if not snapshot.history.whole:
        st.text(f"Loading history ({snapshot.history.percent} %): older incidents are still missing.")


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
        "found after the onset": seconds(row.found_seconds),
        "verified after the finding": seconds(row.verified_seconds),
        "open for": seconds(row.open_seconds(now)) if row.opened_at else "",
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


EVENTS_PER_PAGE = 100
"""Rows per page of the event table."""
BODY_CHARS_MAX = 20_000
"""Of one event's JSON; a policy input contains the whole fleet."""
REVIEW_HELP = (
    "Was the diagnosis right? Signed-in users can record a review on the Accounting page, which computes the precision."
)
COST_HELP = (
    "Each affected replica from the onset until its replacement serves. While a trainer is lost, also every other "
    "trainer until the interrupted step is committed. GPU-seconds: replica-seconds times the GPUs per process."
)
STYLE = """<style>
.st-key-incident-sentence [data-testid="stText"] {font-size: 1.25rem; font-weight: 600; white-space: pre-wrap;}
.st-key-incident-state [data-testid="stText"] {font-size: 1.05rem; white-space: pre-wrap;}
[class*="st-key-incident-"] [data-testid="stText"] {font-family: inherit; overflow-wrap: anywhere; white-space: pre-wrap;}
</style>"""  # noqa: E501


@st.cache_resource(show_spinner=False)
def _cache(journal_url: str) -> IncidentPageCache:
    return IncidentPageCache(SystemClock())


def back() -> None:
    """Back to the table, with the filters in the URL."""
    if st.button("All incidents", icon=":material/arrow_back:", key="incident-back"):
        del st.query_params[table.INCIDENT]
        st.rerun()


def draw(reader: Reader, snapshot: JournalSnapshot, incident_id: str) -> None:
    st.html(STYLE)
    if incident_id not in snapshot.projection.incidents and incident_id not in snapshot.projection.broken:
        st.info("The journal has no such incident.", icon=":material/search_off:")
        st.text(plain(incident_id, 200))
        return
    try:
        whole = _cache(reader.settings.journal_url).get(reader, snapshot, incident_id)
    except JournalError as e:
        st.warning("The journal is not readable.", icon=":material/report:")
        st.text(plain(e))
        return
    _head(whole.head)
    _timeline(whole)
    _section("Findings and evidence", "findings", lambda: _findings(reader, whole, incident_id))
    _section("Decisions", "decision", lambda: _decisions(whole.plan_sections))
    _section("Actions and verification", "proof", lambda: _draw_recovery(whole))
    _section("Cost", "cost", lambda: _cost(whole.cost))
    _section("Counterfactuals", "whatif", lambda: _what_if(whole))
    _section("Replay", "replay", lambda: _replay(reader, whole, incident_id))
    _section("Events", "events", lambda: _events(whole.material.events, whole.material.missing))


def _section(title: str, key: str, draw_it: Callable[[], None]) -> None:
    st.subheader(title, divider="gray")
    with st.container(key=f"incident-{key}", gap="xsmall"):
        draw_it()


def _facts(facts: view.Facts, key: str) -> None:
    if not facts:
        return
    with st.container(horizontal=True, key=f"incident-facts-{key}"):
        for label, value in facts:
            with st.container(width="content", gap=None):
                st.caption(label)
                st.text(value)


def _texts(label: str, texts: Sequence[str]) -> None:
    if texts:
        with st.container(gap="xxsmall"):
            st.caption(label)
            for text in texts:
                st.text(f"• {text}")


def _head(header: view.IncidentHeader) -> None:
    with st.container(key="incident-sentence"):
        st.text(header.sentence)
    with st.container(key="incident-state"):
        st.text(f"{header.glyph} {header.status.upper()}   {header.state}")
        for who in header.who:
            st.text(who)
        if header.injected:
            st.text(f"✚ Injected fault: {header.injected}")
    _facts((("Incident", header.incident_id), *header.facts), "head")


def _timeline(whole: IncidentPageModel) -> None:
    timeline, signals = whole.timeline, whole.signals
    st.subheader("Timeline", divider="gray")
    axis = timeline.whole
    if timeline.around is not None:
        around = "Around detection"
        shown = st.segmented_control("Time", [around, "Full duration"], default=around, key="incident-axis")
        axis = timeline.whole if shown == "Full duration" else timeline.around
    with st.container(key="incident-timeline"):
        if timeline.moments:
            with st.container(gap=None, key="incident-charts"):
                drawn = (*signals.signals, *whole.run)
                for n, chart in enumerate(incident_charts(timeline, axis, drawn)):
                    st.altair_chart(chart, width="stretch", key=f"incident-chart-{n}")
            _legend(whole)
        for text in (signals.missing, f"source: {signals.source}" if signals.signals else ""):
            if text:
                st.text(text[:1].upper() + text[1:] + ".")
        if signals.num_not_drawn:
            st.text(f"{signals.num_not_drawn} more suspects are not shown.")
        if timeline.moments:
            st.caption("Times are relative to the onset")
        with st.container(gap="xxsmall", key="incident-moments"):
            for m in timeline.moments:
                st.text(f"{m.number:>2}  {_after(m.at - timeline.whole.zero)}  {m.kind}: {m.words}")
        if timeline.num_left_out:
            st.text(f"{timeline.num_left_out} entries in the middle are not shown; see the events below.")


def _after(value: float) -> str:
    sign = "+" if value >= 0 else "−"
    return f"{sign}{seconds(abs(value))}"


def _legend(whole: IncidentPageModel) -> None:
    signals = whole.signals.signals
    if not signals:
        return
    st.caption(
        "Thick line with points: suspect. Band: minimum to maximum of peers, dashed: their median. Dotted: threshold."
    )
    for line in signals[0].lines:
        st.text(f"suspect: {line.name}")
    peers = max(s.num_peers for s in signals)
    st.text(f"peers: {peers} of the same role" if peers else "peers: none")


def _findings(reader: Reader, whole: IncidentPageModel, incident_id: str) -> None:
    for n, f in enumerate(whole.findings):
        if n == 1:
            st.caption("Updates")
        _finding(f, known=whole.head.sentence)
    if not whole.findings:
        st.text("The diagnosis cannot be read.")
    st.caption(REVIEW_HELP)
    for w in whole.collected_evidence:
        _draw_collected_evidence(w)
    _files(reader, incident_id, [name for w in whole.collected_evidence for name in w.files])


def _finding(finding: view.FindingSection, known: str = "") -> None:
    """`known`: the diagnosis at the top of the page, which is not repeated."""
    st.text(finding.title)
    if finding.because != known:
        st.text(finding.because)
    for e in finding.evidence:
        st.text(f"• {e}")
    if finding.num_left_out:
        st.text(f"and {finding.num_left_out} more")
    if finding.advice:
        st.text(f"Advice: {finding.advice}")
    if finding.settle:
        st.text(f"To confirm: {finding.settle}")


def _draw_collected_evidence(collected: view.CollectedEvidenceSection) -> None:
    st.caption("Collected from the agents")
    st.text(f"{collected.because} (after {seconds(collected.seconds)})")
    _texts("Missing", collected.missing)
    if collected.statements or collected.findings:
        with st.expander("Collected evidence in full", icon=":material/fact_check:"):
            _texts("Observations", collected.statements)
            for f in collected.findings:
                _finding(f)


def _files(reader: Reader, incident_id: str, named: Sequence[str]) -> None:
    here = incident_files.names(reader.settings.run, incident_id)
    if named and not here:
        _texts("Files (on the machine of the run)", [plain(name, 300) for name in named])
    if not here:
        return
    shown = {plain(name, 200): name for name in here}
    chosen = st.selectbox("Evidence files", list(shown), index=None, placeholder="choose one", key="incident-file")
    if chosen is not None:
        file = incident_files.read(reader.settings.run, incident_id, shown[chosen])
        st.text(file.note)
        if file.text:
            st.code(file.text, language=None, height=400)


def _decisions(decided: Sequence[view.PlanSection]) -> None:
    if not decided:
        st.text("No plan was made.")
    for section in decided:
        number = f"Attempt {section.number}" if len(decided) > 1 else "Plan"
        st.caption(number)
        st.text(f"{section.title}: {section.outcome}")
        st.text(f"Reason: {section.because}")
        _texts("Side effects", section.also_hit or ("none",))
        _texts("Blocked by guards", section.held)
        _texts("Operator commands", section.commands)
        _facts((*section.facts, ("Digest", section.digest)), f"decision-{section.number}")


def _draw_recovery(whole: IncidentPageModel) -> None:
    recovery = whole.recovery_section
    if not (recovery.replacements or recovery.proofs or recovery.refused or recovery.verified):
        st.text("Nothing was replaced.")
    _texts("Replaced by", recovery.replacements)
    for n, proof in enumerate(recovery.proofs):
        st.caption("Weight verification")
        st.text(proof.title)
        _facts(proof.facts, f"proof-{n}")
    _texts("Rejected weights", recovery.refused)
    if recovery.verified:
        st.caption("Verified")
        st.text(recovery.verified)


def _cost(cost: IncidentCost | None) -> None:
    if cost is None:
        st.text("The cost cannot be computed, because the incident's events are malformed.")
        return
    facts = [
        ("Tokens lost", f"{cost.tokens_lost:,}"),
        ("Tokens kept", f"{cost.tokens_kept:,}"),
        ("Requests reassigned", f"{cost.requests_reassigned:,}"),
        ("Steps interrupted", f"{cost.steps_interrupted:,}"),
        ("Steps rolled back", f"{cost.steps_undone:,}"),
        ("Replica-seconds", f"{cost.replica_seconds:,.1f}"),
    ]
    if cost.gpu_seconds is not None:
        facts.append(("GPU-seconds", f"{cost.gpu_seconds:,.1f}"))
    _facts(tuple(facts), "cost")
    if not cost.is_final:
        st.text("Preliminary: the incident is open and its cost still grows.")
    _texts("Breakdown of replica-seconds", cost.how)
    st.caption(COST_HELP)


def _what_if(whole: IncidentPageModel) -> None:
    what_if = whole.what_if
    _texts("Distance to the threshold", [m.text for m in whole.margins])
    _thresholds(whole)
    if what_if is None:
        st.text("No policy input is stored, so counterfactuals cannot be computed.")
        return
    st.caption("Computed by evaluating policy and guards again with one input changed")
    st.text(f"Actual decision: {what_if.actual.words}.")
    with st.container(gap="xxsmall"):
        for line in what_if.lines:
            st.text(f"• {line.text}")
    _texts("Without effect on the decision", what_if.without_effect)


def _thresholds(whole: IncidentPageModel) -> None:
    """The threshold at which the fault would not have been detected; takes seconds, so only on request."""
    material = whole.material
    if material.window is None or material.incident is None or not whole.margins:
        return
    done = st.session_state.setdefault("incident-thresholds", {})
    if st.button("Find the detection threshold", icon=":material/tune:", key="incident-tune"):
        with st.spinner("Replaying the telemetry window…"):
            try:
                found = threshold_boundary(material.window, material.incident.diagnosis)
                done[material.incident_id] = found if isinstance(found, str) else found.text
            except ImportError as e:
                done[material.incident_id] = plain(f"The detectors are not installed on this machine: {e}", 300)
    if material.incident_id in done:
        st.text(done[material.incident_id])


def _replay(reader: Reader, whole: IncidentPageModel, incident_id: str) -> None:
    st.text("Replaying the stored inputs must give the same diagnosis and the same plan.")
    done = st.session_state.setdefault("incident-replayed", {})
    if st.button("Replay from stored inputs", icon=":material/replay:", key="incident-again"):
        with st.spinner("Replaying…"):
            done[incident_id] = replay(whole.material.events, whole.material.window)
    found = done.get(incident_id)
    if found is not None:
        if found.same is None:
            st.info("No inputs are stored.", icon=":material/help:")
        elif found.same:
            st.success("Reproduced: same diagnosis and plan.", icon=":material/check:")
        else:
            st.error("NOT reproduced: the replay gives a different result.", icon=":material/report:")
        for line in found.lines:
            st.text(line)
    run = reader.settings.run.path.name if reader.settings.run else "RUN"
    st.caption("Replay in a terminal, and export a bundle for a ticket")
    commands = [
        f"rolecall replay {_quoted(incident_id)} --run {_quoted(run)}",
        f"rolecall incident export {_quoted(incident_id)} --run {_quoted(run)}",
    ]
    st.code("\n".join(commands), language=None, wrap_lines=True)


def _quoted(text: str) -> str:
    """A shell argument without control characters."""
    return shlex.quote(plain(text, 200))


def _events(events: Sequence[Event], missing: Sequence[str]) -> None:
    _texts("Missing", missing)
    if not events:
        return
    pages = -(-len(events) // EVENTS_PER_PAGE)
    number = 1
    if pages > 1:
        number = int(st.number_input(f"Page of {pages}", 1, pages, 1, key="incident-events-page"))
    shown = events[(number - 1) * EVENTS_PER_PAGE : number * EVENTS_PER_PAGE]
    rows = [
        {
            "event": event.event_id,
            "when (UTC)": utc(event.wall_at).removesuffix(" UTC"),
            "kind": str(event.kind),
            "reason": plain(event.payload.reason, 300),
            "caused by": plain(event.caused_by or "", 40),
        }
        for event in shown
    ]
    st.dataframe(rows, hide_index=True, key="incident-events-table")
    by_name = {f"{e.event_id} {e.kind}": e for e in shown}
    chosen = st.selectbox(
        "One event as JSON", list(by_name), index=None, placeholder="choose one", key="incident-event"
    )
    if chosen is not None:
        text = json.dumps(by_name[chosen].to_dict(), indent=1, sort_keys=True, ensure_ascii=True, default=str)
        cut = text if len(text) <= BODY_CHARS_MAX else text[:BODY_CHARS_MAX] + "\n… truncated"
        st.code(cut, language=None, height=400)
