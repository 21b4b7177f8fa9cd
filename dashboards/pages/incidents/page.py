"""The Incidents page: the list (listing.py); with `?incident=ID`, the page of that incident: first the whole story on
one screen (brief.py), then tabs.

Untrusted text is shown with `st.text` and `st.code`, or escaped; headings and labels are constant.
"""

import json
import shlex
from collections.abc import Sequence

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted, in_words, plain, seconds, utc
from rolecall.dashboards.data.reader import JournalSnapshot, Reader, has_incident
from rolecall.dashboards.data.run_state import step_of
from rolecall.dashboards.pages.incidents import evidence_files as incident_files
from rolecall.dashboards.pages.incidents import listing, view
from rolecall.dashboards.pages.incidents.brief import IncidentBrief, age_of, brief, links, markdown, similar_before
from rolecall.dashboards.pages.incidents.cache import IncidentCost, IncidentPageCache, IncidentPageModel
from rolecall.dashboards.pages.incidents.charts import incident_charts
from rolecall.dashboards.pages.incidents.comparisons import comparison_chart, comparisons
from rolecall.dashboards.pages.incidents.timeline import IncidentTimeline, TimelineRange
from rolecall.dashboards.pages.incidents.what_if import replay, threshold_boundary
from rolecall.dashboards.pages.links import INCIDENT, href
from rolecall.dashboards.pages.shell import RUN, chosen_run, draw_chart, other_runs, page, run_links
from rolecall.dashboards.pages.status import NOT_YET_KNOWN, status_of
from rolecall.dashboards.pages.style import banner, card
from rolecall.dashboards.pages.style import table as small_table
from rolecall.recovery.incidents import Incident

SERIES_ADVICE = (
    "`rolecall watch` stores what the detectors read in the last minutes when it opens an incident. Without that, "
    "`rolecall dashboard --prometheus URL` shows the series of that time from Prometheus."
)
EARLIER_MAX = 8
"""Earlier incidents of the same nodes that are listed, the newest; the rest is counted."""
SEARCHED_MAX = 50
"""Other runs that are searched for an incident, the newest."""


def show() -> None:
    wanted = st.query_params.get(INCIDENT)
    if wanted:
        back()
        page("Incident", lambda r, snapshot: draw(r, snapshot, wanted))
    else:
        page("Incidents", listing.draw)


EVENTS_PER_PAGE = 100
"""Rows per page of the event table."""
BODY_CHARS_MAX = 20_000
"""Of one event's JSON; a policy input contains the whole fleet."""
REVIEW_HELP = (
    "Was the diagnosis right? `rolecall review` records the answer; for signed-in users the Accounting page does, too, "
    "which computes the precision."
)
COST_HELP = (
    "Each affected replica from the onset until its replacement serves. While a trainer is lost, also every other "
    "trainer until the interrupted step is committed. A rollout that lent its node, until it serves again. "
    "GPU-seconds: replica-seconds times the GPUs per process."
)


@st.cache_resource(show_spinner=False)
def _cache(journal_url: str) -> IncidentPageCache:
    return IncidentPageCache(SystemClock())


def back() -> None:
    """Back to the table, with the filters in the URL."""
    if st.button("All incidents", icon=":material/arrow_back:", key="incident-back", shortcut="esc", type="tertiary"):
        del st.query_params[INCIDENT]
        st.rerun()


TABS = ("Timeline", "Evidence", "Decision", "Cost", "What-if", "Events")


def draw(reader: Reader, snapshot: JournalSnapshot, incident_id: str) -> None:
    if incident_id not in snapshot.projection.incidents and incident_id not in snapshot.projection.broken:
        _unknown(reader, incident_id)
        return
    try:
        whole = _cache(reader.settings.journal_url).get(reader, snapshot, incident_id)
    except JournalError as e:
        st.warning("The journal is not readable.", icon=":material/report:")
        st.text(plain(e))
        return
    earlier = similar_before(whole.material.incident, tuple(snapshot.projection.incidents.values()))
    step = None if whole.material.incident is None else step_of(whole.material.incident, snapshot)
    found = brief(whole, step, earlier)
    _first_screen(reader, whole, found, earlier, snapshot)
    _neighbours(reader, snapshot, incident_id)
    timeline, evidence, decision, cost, what_if, events = st.tabs(TABS)
    with timeline, st.container(key="incident-timeline"):
        _timeline(whole)
    with evidence, st.container(key="incident-findings", gap="xsmall"):
        _evidence(reader, whole, incident_id)
    with decision, st.container(key="incident-decision", gap="xsmall"):
        _decisions(whole.plan_sections)
        st.subheader("Actions and verification")
        _draw_recovery(whole)
    with cost, st.container(key="incident-cost", gap="xsmall"):
        _cost(whole.cost)
    with what_if, st.container(key="incident-whatif", gap="xsmall"):
        with st.expander("What would have changed the decision", icon=":material/tune:"):
            _what_if(whole)
        st.subheader("Replay")
        _replay(reader, whole, incident_id)
    with events, st.container(key="incident-events", gap="xsmall"):
        _events(whole.material.events, whole.material.missing)


def _unknown(reader: Reader, incident_id: str) -> None:
    """Says that the run has no such incident, and searches the other runs of its folder on request."""
    name = f"Run {reader.settings.name}" if reader.settings.name else "The journal"
    st.html(banner("warn", f"{name} has no such incident: {plain(incident_id, 200)}"))
    others, done = other_runs()[:SEARCHED_MAX], st.session_state.setdefault("incident-searched", {})
    if incident_id not in done:
        label = f"Search {counted(len(others), 'other run')}"
        if not others or not st.button(label, icon=":material/search:", key="incident-search"):
            return
        done[incident_id] = _search(others, incident_id)
    found, unread = done[incident_id]
    st.text("It is in:" if found else "No other run has it.")
    st.html(run_links({RUN: name, INCIDENT: incident_id} for name in found))
    if unread:
        st.text(plain(f"Not readable: {', '.join(unread)}", 600))


def _search(runs: Sequence[RunDir], incident_id: str) -> tuple[list[str], list[str]]:
    """(the runs that have the incident, those that cannot be read)."""
    found, unread = [], []
    for run in runs:
        try:
            if has_incident(run.database_url, incident_id, SystemClock()):
                found.append(str(run.run_id))
        except JournalError:
            unread.append(str(run.run_id))
    return found, unread


def _neighbours(reader: Reader, snapshot: JournalSnapshot, incident_id: str) -> None:
    """To the incidents beside this one in the unfiltered table."""
    names = [r.incident_id for r in listing.all_rows(reader, snapshot)]
    at = names.index(incident_id)
    with st.container(horizontal=True, key="incident-neighbours"):
        if st.button("Newer", disabled=at == 0, key="incident-newer", shortcut="k", type="tertiary"):
            listing.open_page(names[at - 1])
        if st.button("Older", disabled=at + 1 == len(names), key="incident-older", shortcut="j", type="tertiary"):
            listing.open_page(names[at + 1])


def _first_screen(
    reader: Reader,
    whole: IncidentPageModel,
    found: IncidentBrief,
    earlier: Sequence[Incident],
    snapshot: JournalSnapshot,
) -> None:
    with st.container(border=True, key=f"card-{found.kind}-brief", gap="small"):
        st.html(card(found.kind, found.glyph, found.title, found.tags, found.soft, found.because, found.rows))
        with st.container(horizontal=True):
            with st.popover("Copy as Markdown", icon=":material/content_copy:"):
                st.code(markdown(found, reader.settings.name or "RUN"), language="markdown", wrap_lines=True)
            for label, url in links(reader.settings, whole.material):
                st.link_button(label, url, icon=":material/open_in_new:")
            if earlier:
                with st.popover(f"Earlier on this node ({len(earlier)})", icon=":material/history:"):
                    _earlier(whole.material.incident, earlier, snapshot)


def _earlier(incident: Incident | None, earlier: Sequence[Incident], snapshot: JournalSnapshot) -> None:
    rows = [
        {
            "link": href(i.incident_id, chosen_run()),
            "when": "" if incident is None else age_of(i, incident),
            "fault": in_words(i.diagnosis.fault_class),
            "status": in_words(status_of(i, snapshot.mode_of(i), snapshot.at, ended=snapshot.run.ended != "")),
            "diagnosis": plain(i.diagnosis.because, 300),
        }
        for i in earlier[:EARLIER_MAX]
    ]
    config = {"link": st.column_config.LinkColumn("incident", display_text=r"incident=([^&]*)")}
    st.dataframe(rows, hide_index=True, column_config=config, key="incident-earlier")
    if earlier[EARLIER_MAX:]:
        st.text(f"and {counted(len(earlier) - EARLIER_MAX, 'earlier one')}")


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


def _timeline(whole: IncidentPageModel) -> None:
    timeline = whole.timeline
    if timeline.moments:
        axis = _axis(timeline)
        for n, chart in enumerate(incident_charts(timeline, axis, whole.run)):
            draw_chart(chart, key=f"incident-chart-{n}")
        st.caption("Times are relative to the onset")
        moments = [[str(m.number), _after(m.at - timeline.whole.zero), m.kind, m.words] for m in timeline.moments]
        st.html(small_table(["", "time", "event", "what"], moments, narrow=3))
    if timeline.num_left_out:
        st.text(f"{timeline.num_left_out} entries in the middle are not shown; see the tab Events.")


def _axis(timeline: IncidentTimeline) -> TimelineRange:
    if timeline.around is None:
        return timeline.whole
    around = "Around detection"
    shown = st.segmented_control("Time", [around, "Full duration"], default=around, key="incident-axis")
    return timeline.whole if shown == "Full duration" else timeline.around


def _evidence(reader: Reader, whole: IncidentPageModel, incident_id: str) -> None:
    """The series of the suspect against its peers, the first one largest, then the findings."""
    signals, timeline = whole.signals, whole.timeline
    axis = timeline.around or timeline.whole
    charts = incident_charts(timeline, axis, signals.signals)[1:] if timeline.moments else ()
    for n, chart in enumerate(charts):
        draw_chart(chart, key=f"incident-signal-{n}")
    _legend(whole)
    if not charts:
        _comparisons(whole)
    for text in (signals.missing, f"source: {signals.source}" if signals.signals else ""):
        if text:
            st.text(text[:1].upper() + text[1:] + ".")
    if signals.num_not_drawn:
        st.text(f"{signals.num_not_drawn} more suspects are not shown.")
    _findings(reader, whole, incident_id)


def _comparisons(whole: IncidentPageModel) -> None:
    """What the stored evidence has in numbers, where there are no series; and how to get series."""
    incident = whole.material.incident
    for n, found in enumerate(comparisons(incident.diagnosis) if incident is not None else ()):
        draw_chart(comparison_chart(found), key=f"incident-comparison-{n}")
    st.html(banner("note", "No series of the suspect and its peers.", advice=SERIES_ADVICE))


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
        st.text(f"To settle it: {finding.settle}")


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
    if not cost.how:
        st.text(f"{NOT_YET_KNOWN.capitalize()}." if not cost.is_final else "No loss is known.")
        st.caption(COST_HELP)
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
        st.text("Preliminary: its cost still grows.")
    _texts("Breakdown of replica-seconds", cost.how)
    st.caption(COST_HELP)


def _what_if(whole: IncidentPageModel) -> None:
    what_if = whole.what_if
    _texts("Distance to the threshold", [m.text for m in whole.margins])
    _thresholds(whole)
    if what_if is None:
        st.text("The input of this decision was not stored, so it cannot be computed again with another one.")
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
