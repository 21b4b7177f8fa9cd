"""The page `Accounting`: is every prompt group accounted for, what was the time worth, how fast and how right are we."""

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.accounting.accounts import AccountingSnapshot, AccountingWorker, IncidentStatistics
from rolecall.dashboards.pages.accounting.charts import ettr_chart, lost_chart
from rolecall.dashboards.pages.accounting.marks import FEW, Precision, markable, marks
from rolecall.dashboards.pages.accounting.time import EttrBreakdown, LostTimeShare
from rolecall.dashboards.pages.operations.buttons import answer, as_commands, form
from rolecall.dashboards.pages.operations.commands import OperatorCommand, OperatorCommandKind
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import Viewer, follow, sidebar
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents.incident import Incident

AUDIT_NOW = "accounting.audit"
INCIDENTS_SHOWN = 1000
"""In the table of marks, newest first; older ones are marked with `rolecall mark`."""
PROBLEMS_SHOWN = 50


def show() -> None:
    sidebar(reader())
    page("Accounting", _draw, slow=_draw_told)


@st.cache_resource(show_spinner=False)
def _keeper(_settings: Settings, journal_url: str, run: str) -> AccountingWorker:
    return AccountingWorker(_settings, SystemClock())


def keeper(settings: Settings) -> AccountingWorker:
    """The one bookkeeper of this process, for this journal."""
    return _keeper(settings, settings.journal_url, str(settings.run.path) if settings.run else "")


def _draw(r: Reader, look: JournalSnapshot) -> None:
    person, now = follow(r), r.now()
    answer()
    books = keeper(r.settings).look(audit_now=bool(st.session_state.pop(AUDIT_NOW, False)))
    if books.trouble:
        st.warning("The books could not be made up.", icon=":material/report:")
        st.text(plain(books.trouble))
    _audit(books, now)
    _marks(r, person, tuple(look.book.incidents.values()))


def _draw_told(r: Reader, _look: JournalSnapshot) -> None:
    told = keeper(r.settings).look().told
    if told is None:
        st.text("The accounts are being made up: the journal is long, or its database slow.")
        return
    _effective(told)
    _speed(told)


# --- audit --------------------------------------------------------------------------------------------------------


def _audit(books: AccountingSnapshot, now: float) -> None:
    st.subheader("Prompt groups")
    found = books.audit
    if found is None:
        st.text("The audit is under way.")
        return
    if found.ok and books.has_ledger:
        st.success("✓ The audit holds.", icon=":material/check_circle:")
    elif found.ok:
        st.info("The journal's chain holds. This job keeps no ledger: its prompt groups are not rolecall's to count.")
    else:
        st.error(f"✗ The audit found {len(found.problems)} problem(s).", icon=":material/error:")
        for problem in found.problems[:PROBLEMS_SHOWN]:
            st.text(plain(problem))
    if books.has_ledger:
        groups = found.ledger
        in_flight = max(0, groups.groups_issued - groups.groups_trained - groups.groups_dropped)
        with st.container(horizontal=True):
            for label, value in (
                ("issued", groups.groups_issued),
                ("trained", groups.groups_trained),
                ("dropped", groups.groups_dropped),
                ("undone", groups.groups_undone),
                ("trained twice", groups.duplicates),
                ("in flight", in_flight),
            ):
                st.metric(label, value)
        for reason, num in sorted(groups.dropped_by_reason.items()):
            st.text(plain(f"{num} dropped because {reason}"))
    for note in found.notes:
        st.text(plain(note))
    head = found.journal.position
    when = f", {age(now - books.audited_at)} ago" if books.audited_at is not None else ""
    st.text(f"{head} events and {found.ledger.head.position} ledger lines, {found.num_anchors} anchors{when}")
    st.button("Audit again", key="accounting.again", disabled=books.busy, on_click=_ask_for_audit)


def _ask_for_audit() -> None:
    st.session_state[AUDIT_NOW] = True


# --- time ---------------------------------------------------------------------------------------------------------


def _effective(told: IncidentStatistics) -> None:
    st.subheader("Effective training time")
    t = told.times
    if t is None or not t.num_replicas:
        st.text(
            "Not known: no epoch with a trainer and a rollout stands in the journal. Of a job that rolecall only "
            "observes, the time is not its to count."
        )
        return
    width = {3600.0: "hour", 60.0: "minute"}.get(t.slice_seconds, f"{t.slice_seconds / 60:.0f} minutes")
    with st.container(horizontal=True):
        st.metric("ETTR", f"{t.ettr:.1%}" if t.ettr is not None else "–")
        st.metric("training", seconds(t.training_seconds))
        st.metric("lost", seconds(t.lost_seconds))
    st.altair_chart(ettr_chart(t.slices), width="stretch")
    with st.expander(f"By {width}, as a table"):
        _slices(t)
    st.caption(
        f"By {width}: the share of replicas at work, each second. A lost rollout counts as lost; while a step is "
        "interrupted no trainer counts. Rollouts that go on generating count."
    )
    if not t.lost_seconds:
        st.text("No time was lost to a fault.")
        return
    roles, classes, tops = st.columns(3)
    with roles:
        _lost("by role", t.by_role)
    with classes:
        _lost("by class of fault", t.by_class)
    with tops:
        _lost("by incident, the first ten", t.by_incident)


def _slices(t: EttrBreakdown) -> None:
    st.dataframe(
        {
            "from (UTC)": [_when(s.start) for s in t.slices],
            "ETTR": [None if s.ettr is None else round(100 * s.ettr, 1) for s in t.slices],
            "lost": [seconds(s.lost_seconds) for s in t.slices],
            "steps": [s.num_steps for s in t.slices],
            "incidents": [s.num_incidents for s in t.slices],
        },
        hide_index=True,
        width="stretch",
        column_config={"ETTR": st.column_config.NumberColumn(format="%.1f %%")},
    )


def _lost(title: str, parts: Sequence[LostTimeShare]) -> None:
    st.markdown(f"**Lost {title}**")
    st.altair_chart(lost_chart(parts), width="stretch")
    with st.container(gap="xxsmall"):
        for part in parts:
            st.text(plain(f"{part.name}: {seconds(part.seconds)} ({part.share:.0%})"))


# --- speed --------------------------------------------------------------------------------------------------------


def _speed(told: IncidentStatistics) -> None:
    st.subheader("From fault to finding, against the goals")
    if told.note:
        st.warning("Injected faults cannot be told.", icon=":material/report:")
        st.text(plain(told.note))
    if told.num_injected:
        st.text(
            f"{told.num_injected} faults were injected; {told.num_missed} were missed, and {told.num_false_alarms} "
            "incident(s) belong to none of them."
        )
    if not told.detection:
        st.text("Nothing was found yet.")
    else:
        rows = told.detection
        st.dataframe(
            {
                "found by": [str(d.evidence) for d in rows],
                "goal": [f"< {d.goal_seconds:g} s" if d.goal_seconds else "–" for d in rows],
                "counted from": ["injection" if d.injected else "onset (estimate)" for d in rows],
                "n": [d.num for d in rows],
                "median": [seconds(d.median_seconds) for d in rows],
                "worst": [seconds(d.worst_seconds) for d in rows],
                "within the goal": [_within(d.share) for d in rows],
            },
            hide_index=True,
            width="stretch",
        )
        st.caption("The goals are for metrics straight from agents; with Prometheus the scrape interval comes on top.")
    st.subheader("From finding to cure")
    if not told.recovery:
        st.text("No action was started yet.")
        return
    st.dataframe(
        {
            "class": [c.fault_class for c in told.recovery],
            "acted on": [c.num for c in told.recovery],
            "resolved": [c.num_resolved for c in told.recovery],
            "resolved after, median": [seconds(c.resolved_median) for c in told.recovery],
            "worst": [seconds(c.resolved_worst) for c in told.recovery],
            "serve again": [c.num_served for c in told.recovery],
            "serve after, median": [seconds(c.serving_median) for c in told.recovery],
            "the worst": [seconds(c.serving_worst) for c in told.recovery],
        },
        hide_index=True,
        width="stretch",
    )
    st.caption(
        "Counted from the finding. Resolved: the replacement serves, and was later seen to finish work; the time is when it "
        "began to serve."
    )


def _within(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{'✓' if share == 1 else '✗'} {share:.0%}"


# --- marks --------------------------------------------------------------------------------------------------------


def _marks(r: Reader, person: Viewer, incidents: Sequence[Incident]) -> None:
    st.subheader("Were the diagnoses right?")
    found = marks(incidents)
    st.text(found.of_all.sentence)
    unmarked, known = found.of_all.num_unmarked, found.of_all.num_marked + found.of_all.num_unmarked
    st.text(f"{unmarked:,} of {known:,} are not marked yet.")
    if found.of_all.num_marked:
        for title, rows in (("by class of fault", found.by_class), ("by detector", found.by_detector)):
            st.markdown(f"**Precision {title}**")
            _precision(rows)
        st.caption(f"With fewer than {FEW} marks the interval is what counts, not the share.")
    listed = markable(incidents)[:INCIDENTS_SHOWN]
    if not listed:
        st.text("No diagnosis was made yet.")
        return
    st.dataframe(
        {
            "mark": [_mark_told(i) for i in listed],
            "incident": [plain(i.incident_id) for i in listed],
            "class": [str(i.diagnosis.fault_class) for i in listed],
            "outcome": [str(i.outcome or i.state) for i in listed],
            "by": [plain(i.mark.by) if i.mark else "" for i in listed],
            "what": [plain(i.diagnosis.because) for i in listed],
            "why": [plain(i.mark.because) if i.mark else "" for i in listed],
        },
        hide_index=True,
        width="stretch",
        height=min(320, 38 + 35 * len(listed)),
    )
    chosen = st.selectbox("Mark", [plain(i.incident_id) for i in listed], key="accounting.mark")
    incident = next((i for i in listed if plain(i.incident_id) == chosen), None)
    if incident is not None:
        st.text(plain(incident.diagnosis.because))
        right = OperatorCommand(what=OperatorCommandKind.MARK_RIGHT, on=incident.incident_id)
        wrong = OperatorCommand(what=OperatorCommandKind.MARK_WRONG, on=incident.incident_id)
        form(r, person, f"mark:{incident.incident_id}", {"✓ Right": right, "✗ Wrong": wrong})
        as_commands(r, person, right, wrong)


def _mark_told(i: Incident) -> str:
    if i.mark is None:
        return "–"
    return "✓ right" if i.mark.right else "✗ wrong"


def _precision(rows: Sequence[Precision]) -> None:
    st.dataframe(
        {
            "of": [plain(p.name) for p in rows],
            "right": [p.num_right for p in rows],
            "marked": [p.num_marked for p in rows],
            "not marked": [p.num_unmarked for p in rows],
            "precision": [f"{p.ratio:.0%}" if p.ratio is not None else "–" for p in rows],
            "95 % interval": [f"{p.low:.0%} to {p.high:.0%}" if p.low is not None else "–" for p in rows],
            "": ["few" if p.num_marked < FEW else "" for p in rows],
        },
        hide_index=True,
        width="stretch",
    )


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
