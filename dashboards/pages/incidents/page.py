"""The page of one incident: what broke, why rolecall says so, what it did, whether it worked, what it cost.

Foreign text goes through `st.text` and `st.code` alone, always plain; headings and labels are ours.
"""

import json
from collections.abc import Callable, Sequence

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.errors import JournalError
from rolecall.core.journal.events import Event
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents import evidence_files as incident_files
from rolecall.dashboards.pages.incidents.cache import IncidentPageCache, IncidentPageModel
from rolecall.dashboards.pages.incidents.charts import story_charts
from rolecall.dashboards.pages.incidents.cost import IncidentCost
from rolecall.dashboards.pages.incidents.replay import replay
from rolecall.dashboards.pages.incidents.table import INCIDENT, moment
from rolecall.dashboards.pages.incidents.timeline import IncidentTimeline, TimelineRange
from rolecall.dashboards.pages.incidents.view import (
    CollectedEvidenceSection,
    Facts,
    FindingSection,
    IncidentHeader,
    PlanSection,
)

EVENTS_PER_PAGE = 100
"""Raw events on one page of their table."""
BODY_CHARS_MAX = 20_000
"""Of one event's JSON: a question holds the whole fleet."""
MARK_HELP = (
    "Was the diagnosis right? The page Accounting takes the word of who is signed in, and counts precision by it."
)
COST_HELP = (
    "Each hurt replica from the onset until its replacement serves; while a trainer is lost, each other trainer, too, "
    "until the interrupted step is committed. GPU-seconds are the same times the GPUs of each such process."
)
STYLE = """<style>
.st-key-incident-sentence [data-testid="stText"] {font-size: 1.25rem; font-weight: 600; white-space: pre-wrap;}
.st-key-incident-state [data-testid="stText"] {font-size: 1.05rem; white-space: pre-wrap;}
[class*="st-key-incident-"] [data-testid="stText"] {font-family: inherit; overflow-wrap: anywhere; white-space: pre-wrap;}
</style>"""
"""Ours, and constant."""


@st.cache_resource(show_spinner=False)
def _shelf(journal_url: str) -> IncidentPageCache:
    del journal_url  # one for each: an argument that began with an underscore would be no part of the key
    return IncidentPageCache(SystemClock())


def back() -> None:
    """To the table, with the filters that the URL still holds."""
    if st.button("All incidents", icon=":material/arrow_back:", key="incident-back"):
        del st.query_params[INCIDENT]
        st.rerun()


def draw(r: Reader, look: JournalSnapshot, incident_id: str) -> None:
    st.html(STYLE)
    if incident_id not in look.book.incidents and incident_id not in look.book.broken:
        st.info("The journal knows no such incident.", icon=":material/search_off:")
        st.text(plain(incident_id, 200))
        return
    try:
        whole = _shelf(r.settings.journal_url).take(r, look, incident_id)
    except JournalError as e:
        st.warning("The journal cannot be read now.", icon=":material/report:")
        st.text(plain(e))
        return
    _head(whole.head)
    _story(whole)
    _section("Findings and evidence", "findings", lambda: _findings(r, whole, incident_id))
    _section("Decision", "decision", lambda: _decisions(whole.plan_sections))
    _section("Action and proof", "proof", lambda: _draw_recovery(whole))
    _section("What it cost", "cost", lambda: _cost(whole.cost))
    _section("What would have changed the decision", "whatif", lambda: _what_if(whole))
    _section("Decide it again", "replay", lambda: _replay(r, whole, incident_id))
    _section("Events", "events", lambda: _events(whole.material.events, whole.material.missing))


def _section(title: str, key: str, draw_it: Callable[[], None]) -> None:
    st.subheader(title, divider="gray")
    with st.container(key=f"incident-{key}", gap="xsmall"):
        draw_it()


def _facts(facts: Facts, key: str) -> None:
    """Label above value, side by side as far as there is room."""
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


# --- top ------------------------------------------------------------------------------------------------------------


def _head(h: IncidentHeader) -> None:
    with st.container(key="incident-sentence"):
        st.text(h.sentence)
    with st.container(key="incident-state"):
        st.text(f"{h.glyph} {h.status.upper()}   {h.state}")
        for who in h.who:
            st.text(who)
        if h.injected:
            st.text(f"✚ Injected on purpose: {h.injected}")
    _facts((("Incident", h.incident_id), *h.facts), "head")


def _story(whole: IncidentPageModel) -> None:
    told, signals = whole.timeline, whole.signals
    st.subheader("The story", divider="gray")
    axis = _chosen_axis(told)
    with st.container(key="incident-story"):
        if told.moments:
            with st.container(gap=None, key="incident-charts"):
                drawn = (*signals.signals, *whole.run)
                for n, chart in enumerate(story_charts(told, axis, drawn)):
                    st.altair_chart(chart, width="stretch", key=f"incident-chart-{n}")
            _legend(whole)
        for text in (signals.missing, f"from the {signals.source}" if signals.signals else ""):
            if text:
                st.text(text[:1].upper() + text[1:] + ".")
        if signals.num_not_drawn:
            st.text(f"{signals.num_not_drawn} more suspects are not drawn.")
        if told.moments:
            st.caption("Each moment with its time after the onset")
        with st.container(gap="xxsmall", key="incident-moments"):
            for m in told.moments:
                st.text(f"{m.number:>2}  {_after(m.at - told.whole.zero)}  {m.mark}: {m.words}")
        if told.num_left_out:
            st.text(f"{told.num_left_out} moments in the middle are left out; the events below have them.")


def _after(value: float) -> str:
    sign = "+" if value >= 0 else "−"
    return f"{sign}{seconds(abs(value))}"


def _chosen_axis(told: IncidentTimeline) -> TimelineRange:
    if told.around is None:
        return told.whole
    around = "Around the finding"
    shown = st.segmented_control("Time", [around, "Whole story"], default=around, key="incident-axis")
    return told.whole if shown == "Whole story" else told.around


def _legend(whole: IncidentPageModel) -> None:
    signals = whole.signals.signals
    if not signals:
        return
    st.caption(
        "Thick line with points: suspect. Band: smallest to largest peer, dashed: their median. Dotted: threshold."
    )
    for line in signals[0].lines:
        st.text(f"suspect: {line.name}")
    peers = max(s.num_peers for s in signals)
    st.text(f"peers: {peers} of the same role" if peers else "peers: none, it is alone in its role")


# --- findings -------------------------------------------------------------------------------------------------------


def _findings(r: Reader, whole: IncidentPageModel, incident_id: str) -> None:
    for n, f in enumerate(whole.findings):
        if n == 1:
            st.caption("Later, more was known")
        _finding(f, known=whole.head.sentence)
    if not whole.findings:
        st.text("No diagnosis of it can be read.")
    st.caption(MARK_HELP)
    for w in whole.collected_evidence:
        _draw_collected_evidence(w)
    _files(r, incident_id, [name for w in whole.collected_evidence for name in w.files])


def _finding(f: FindingSection, known: str = "") -> None:
    """`known`: the sentence on top of the page, which is not told twice."""
    st.caption("FindingSection")
    st.text(f.title)
    if f.because != known:
        st.text(f.because)
    for e in f.evidence:
        numbers = f"  [{e.numbers}]" if e.numbers else ""
        st.text(f"• {e.kind}: {e.text}{numbers}")
    if f.num_left_out:
        st.text(f"and {f.num_left_out} more pieces of evidence")
    if f.advice:
        st.text(f"Advice: {f.advice}")
    if f.settle:
        st.text(f"What would settle it: {f.settle}")


def _draw_collected_evidence(w: CollectedEvidenceSection) -> None:
    st.caption("Pulled from the agents")
    st.text(f"{w.because} (after {seconds(w.seconds)})")
    _texts("Not had", w.missing)
    if w.told or w.findings:
        with st.expander("What was told, in full", icon=":material/record_voice_over:"):
            _texts("IncidentTimeline", w.told)
            for f in w.findings:
                _finding(f)


def _files(r: Reader, incident_id: str, named: Sequence[str]) -> None:
    here = incident_files.names(r.settings.run, incident_id)
    if named and not here:
        _texts("Files, on the machine of the run", [plain(name, 300) for name in named])
    if not here:
        return
    shown = {plain(name, 200): name for name in here}
    chosen = st.selectbox("Evidence files", list(shown), index=None, placeholder="choose one", key="incident-file")
    if chosen is not None:
        file = incident_files.read(r.settings.run, incident_id, shown[chosen])
        st.text(file.note)
        if file.text:
            st.code(file.text, language=None, height=400)


# --- decision, cure, cost ---------------------------------------------------------------------------------------------


def _decisions(decided: Sequence[PlanSection]) -> None:
    if not decided:
        st.text("Nothing was decided.")
    for d in decided:
        number = f"Attempt {d.number}" if len(decided) > 1 else "Plan"
        st.caption(number)
        st.text(f"{d.title}: {d.outcome}")
        st.text(f"Because {d.because}")
        _texts("Whom else it hits", d.also_hit or ("nobody",))
        _texts("Held by guards", d.held)
        _texts("Said by persons", d.words)
        _facts((*d.facts, ("Digest", d.digest)), f"decision-{d.number}")


def _draw_recovery(whole: IncidentPageModel) -> None:
    cure = whole.recovery_section
    if not (cure.replacements or cure.proofs or cure.refused or cure.verified):
        st.text("Nothing was replaced.")
    _texts("Replaced by", cure.replacements)
    for n, proof in enumerate(cure.proofs):
        st.caption("Proof of its weights")
        st.text(proof.title)
        _facts(proof.facts, f"proof-{n}")
    _texts("Weights refused", cure.refused)
    if cure.verified:
        st.caption("Seen to work")
        st.text(cure.verified)


def _cost(cost: IncidentCost | None) -> None:
    if cost is None:
        st.text("Its story cannot be told, and so its cost cannot.")
        return
    facts = [
        ("Tokens lost", f"{cost.tokens_lost:,}"),
        ("Tokens kept", f"{cost.tokens_kept:,}"),
        ("Requests that went on elsewhere", f"{cost.requests_reassigned:,}"),
        ("Steps interrupted", f"{cost.steps_interrupted:,}"),
        ("Steps undone", f"{cost.steps_undone:,}"),
        ("Replica-seconds", f"{cost.replica_seconds:,.1f}"),
    ]
    if cost.gpu_seconds is not None:
        facts.append(("GPU-seconds", f"{cost.gpu_seconds:,.1f}"))
    _facts(tuple(facts), "cost")
    if not cost.is_final:
        st.text("So far: it is open, and goes on costing.")
    _texts("How the replica-seconds come about", cost.how)
    st.caption(COST_HELP)


# --- asked again ------------------------------------------------------------------------------------------------------


def _what_if(whole: IncidentPageModel) -> None:
    what_if = whole.what_if
    _texts("How far the evidence was from its threshold", [m.text for m in whole.margins])
    _thresholds(whole)
    if what_if is None:
        st.text("No question is stored with a plan: it cannot be asked again.")
        return
    st.caption("Computed: the stored question was put to policy and guards again, with one thing changed")
    st.text(f"As it was: {what_if.then.words}.")
    with st.container(gap="xxsmall"):
        for line in what_if.lines:
            st.text(f"• {line.text}")
    _texts("Would have changed nothing", what_if.unmoved)


def _thresholds(whole: IncidentPageModel) -> None:
    """At which threshold the detectors would have kept silent; takes seconds, so only when it is asked for."""
    m = whole.material
    if m.window is None or m.incident is None or not whole.margins:
        return
    done = st.session_state.setdefault("incident-thresholds", {})
    if st.button("Ask the detectors again with higher thresholds", icon=":material/tune:", key="incident-tune"):
        with st.spinner("Replaying the stored window…"):
            try:
                from rolecall.dashboards.pages.incidents.thresholds import edge

                found = edge(m.window, m.incident.diagnosis)
                done[m.incident_id] = found if isinstance(found, str) else found.text
            except ImportError as e:
                done[m.incident_id] = plain(f"The detectors are not on this machine: {e}", 300)
    if m.incident_id in done:
        st.text(done[m.incident_id])


def _replay(r: Reader, whole: IncidentPageModel, incident_id: str) -> None:
    st.text("The same input, given to the same functions, must give the same diagnosis and the same plan.")
    done = st.session_state.setdefault("incident-replayed", {})
    if st.button("Decide again from the stored input", icon=":material/replay:", key="incident-again"):
        with st.spinner("Deciding again…"):
            done[incident_id] = replay(whole.material.events, whole.material.window)
    found = done.get(incident_id)
    if found is not None:
        if found.same is None:
            st.info("Nothing is stored that could be decided again.", icon=":material/help:")
        elif found.same:
            st.success("The same, from the same input.", icon=":material/check:")
        else:
            st.error("ANOTHER decision from the same input.", icon=":material/report:")
        for line in found.lines:
            st.text(line)
    run = r.settings.run.path.name if r.settings.run else "RUN"
    st.caption("The same in a terminal, and a bundle of all this for a ticket")
    commands = [
        f"rolecall replay {_word(incident_id)} --run {_word(run)}",
        f"rolecall incident export {_word(incident_id)} --run {_word(run)}",
    ]
    st.code("\n".join(commands), language=None, wrap_lines=True)


def _word(text: str) -> str:
    """One word of a shell, and harmless."""
    shown = plain(text, 200)
    return (
        shown
        if shown.replace("-", "").replace("_", "").replace(".", "").isalnum()
        else "'" + shown.replace("'", "'\\''") + "'"
    )


# --- events -----------------------------------------------------------------------------------------------------------


def _events(events: Sequence[Event], missing: Sequence[str]) -> None:
    _texts("Could not be had", missing)
    if not events:
        return
    pages = -(-len(events) // EVENTS_PER_PAGE)
    page = 1
    if pages > 1:
        page = int(st.number_input(f"Page of {pages}", 1, pages, 1, key="incident-events-page"))
    shown = events[(page - 1) * EVENTS_PER_PAGE : page * EVENTS_PER_PAGE]
    rows = [
        {
            "event": e.event_id,
            "when (UTC)": moment(e.wall_at).removesuffix(" UTC"),
            "kind": str(e.kind),
            "because": plain(e.payload.reason, 300),
            "caused by": plain(e.caused_by or "", 40),
        }
        for e in shown
    ]
    st.dataframe(rows, hide_index=True, key="incident-events-table")
    by_name = {f"{e.event_id} {e.kind}": e for e in shown}
    chosen = st.selectbox(
        "One event as JSON", list(by_name), index=None, placeholder="choose one", key="incident-event"
    )
    if chosen is not None:
        text = json.dumps(by_name[chosen].to_dict(), indent=1, sort_keys=True, ensure_ascii=True, default=str)
        cut = text if len(text) <= BODY_CHARS_MAX else text[:BODY_CHARS_MAX] + "\n… cut here"
        st.code(cut, language=None, height=400)
