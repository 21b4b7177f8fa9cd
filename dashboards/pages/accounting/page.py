"""The Accounting page: audit of prompt groups, ETTR and lost time, detection and recovery times, diagnosis
precision."""

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.accounting.charts import ettr_chart, lost_chart
from rolecall.dashboards.pages.accounting.lost_time import EttrBreakdown, LostTimeShare
from rolecall.dashboards.pages.accounting.precision import FEW, Precision, precision_summary, reviewable
from rolecall.dashboards.pages.accounting.worker import AccountingSnapshot, AccountingWorker, IncidentStatistics
from rolecall.dashboards.pages.operations.buttons import as_commands, form, show_result
from rolecall.dashboards.pages.operations.commands import OperatorCommand, OperatorCommandKind
from rolecall.dashboards.pages.shell import page, reader
from rolecall.dashboards.pages.sign_in import Viewer, follow, sidebar
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents.incident import Incident

AUDIT_NOW = "accounting.audit"
INCIDENTS_SHOWN = 1000
"""Rows of the review table, newest first; review older ones with `rolecall mark`."""
PROBLEMS_SHOWN = 50


def show() -> None:
    sidebar(reader())
    page("Accounting", _draw, slow=_draw_statistics)


@st.cache_resource(show_spinner=False)
def _worker(_settings: Settings, journal_url: str, run: str) -> AccountingWorker:
    return AccountingWorker(_settings, SystemClock())


def worker(settings: Settings) -> AccountingWorker:
    """The accounting worker of this process for this journal."""
    return _worker(settings, settings.journal_url, str(settings.run.path) if settings.run else "")


def _draw(r: Reader, snapshot: JournalSnapshot) -> None:
    viewer, now = follow(r), r.now()
    show_result()
    accounts = worker(r.settings).latest(audit_now=bool(st.session_state.pop(AUDIT_NOW, False)))
    if accounts.error:
        st.warning("The accounts could not be computed.", icon=":material/report:")
        st.text(plain(accounts.error))
    _audit(accounts, now)
    _marks(r, viewer, tuple(snapshot.projection.incidents.values()))


def _draw_statistics(r: Reader, _snapshot: JournalSnapshot) -> None:
    statistics = worker(r.settings).latest().statistics
    if statistics is None:
        st.text("Computing statistics: the journal is long or its database slow.")
        return
    _effective(statistics)
    _speed(statistics)


# --- audit --------------------------------------------------------------------------------------------------------


def _audit(accounts: AccountingSnapshot, now: float) -> None:
    st.subheader("Prompt groups")
    audit = accounts.audit
    if audit is None:
        st.text("The audit is running.")
        return
    if audit.ok and accounts.has_ledger:
        st.success("✓ Audit passed.", icon=":material/check_circle:")
    elif audit.ok:
        st.info("The journal's hash chain is valid. This job has no ledger, so prompt groups are not audited.")
    else:
        st.error(f"✗ The audit found {len(audit.problems)} problem(s).", icon=":material/error:")
        for problem in audit.problems[:PROBLEMS_SHOWN]:
            st.text(plain(problem))
    if accounts.has_ledger:
        groups = audit.ledger
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
            st.text(plain(f"{num} dropped: {reason}"))
    for note in audit.notes:
        st.text(plain(note))
    head = audit.journal.position
    when = f", {age(now - accounts.audited_at)} ago" if accounts.audited_at is not None else ""
    st.text(f"{head} events, {audit.ledger.head.position} ledger entries, {audit.num_anchors} anchors{when}")
    st.button("Audit again", key="accounting.again", disabled=accounts.busy, on_click=_ask_for_audit)


def _ask_for_audit() -> None:
    st.session_state[AUDIT_NOW] = True


# --- time ---------------------------------------------------------------------------------------------------------


def _effective(statistics: IncidentStatistics) -> None:
    st.subheader("Effective training time")
    t = statistics.times
    if t is None or not t.num_replicas:
        st.text(
            "Not available: the journal has no epoch with a trainer and a rollout. rolecall does not account for the "
            "time of jobs that it only observes."
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
        f"Share of productive replicas, by {width}. A lost rollout counts as lost; while a step is interrupted, no "
        "trainer counts as productive; rollouts that keep generating do."
    )
    if not t.lost_seconds:
        st.text("No time was lost to faults.")
        return
    roles, classes, tops = st.columns(3)
    with roles:
        _lost("by role", t.by_role)
    with classes:
        _lost("by fault class", t.by_class)
    with tops:
        _lost("by incident (top ten)", t.by_incident)


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
    st.markdown(f"**Lost time {title}**")
    st.altair_chart(lost_chart(parts), width="stretch")
    with st.container(gap="xxsmall"):
        for part in parts:
            st.text(plain(f"{part.name}: {seconds(part.seconds)} ({part.share:.0%})"))


# --- speed --------------------------------------------------------------------------------------------------------


def _speed(statistics: IncidentStatistics) -> None:
    st.subheader("Time to detect, compared with the goals")
    if statistics.note:
        st.warning("The injection log cannot be used.", icon=":material/report:")
        st.text(plain(statistics.note))
    if statistics.num_injected:
        st.text(
            f"{statistics.num_injected} faults were injected, {statistics.num_missed} were missed; "
            f"{statistics.num_false_alarms} "
            "incident(s) match none of them."
        )
    if not statistics.detection:
        st.text("No fault was detected yet.")
    else:
        rows = statistics.detection
        st.dataframe(
            {
                "detected by": [str(d.evidence) for d in rows],
                "goal": [f"< {d.goal_seconds:g} s" if d.goal_seconds else "–" for d in rows],
                "measured from": ["injection" if d.injected else "onset (estimated)" for d in rows],
                "n": [d.num for d in rows],
                "median": [seconds(d.median_seconds) for d in rows],
                "worst": [seconds(d.worst_seconds) for d in rows],
                "within the goal": [_within(d.share) for d in rows],
            },
            hide_index=True,
            width="stretch",
        )
        st.caption(
            "The goals apply to metrics read directly from agents; with Prometheus the scrape interval is added."
        )
    st.subheader("Time to recover")
    if not statistics.recovery:
        st.text("No action has started yet.")
        return
    st.dataframe(
        {
            "class": [c.fault_class for c in statistics.recovery],
            "incidents": [c.num for c in statistics.recovery],
            "resolved": [c.num_resolved for c in statistics.recovery],
            "resolved after, median": [seconds(c.resolved_median) for c in statistics.recovery],
            "resolved after, worst": [seconds(c.resolved_worst) for c in statistics.recovery],
            "serving again": [c.num_served for c in statistics.recovery],
            "serving after, median": [seconds(c.serving_median) for c in statistics.recovery],
            "serving after, worst": [seconds(c.serving_worst) for c in statistics.recovery],
        },
        hide_index=True,
        width="stretch",
    )
    st.caption(
        "Measured from detection. Resolved: the replacement serves and was later verified to make progress; the time "
        "is when it started to serve."
    )


def _within(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{'✓' if share == 1 else '✗'} {share:.0%}"


# --- marks --------------------------------------------------------------------------------------------------------


def _marks(r: Reader, viewer: Viewer, incidents: Sequence[Incident]) -> None:
    st.subheader("Diagnosis precision")
    found = precision_summary(incidents)
    st.text(found.of_all.sentence)
    unmarked, known = found.of_all.num_unmarked, found.of_all.num_marked + found.of_all.num_unmarked
    st.text(f"{unmarked:,} of {known:,} are not reviewed yet.")
    if found.of_all.num_marked:
        for title, rows in (("by fault class", found.by_class), ("by detector", found.by_detector)):
            st.markdown(f"**Precision {title}**")
            _precision(rows)
        st.caption(f"With fewer than {FEW} reviews, rely on the interval, not on the share.")
    listed = reviewable(incidents)[:INCIDENTS_SHOWN]
    if not listed:
        st.text("No diagnoses yet.")
        return
    st.dataframe(
        {
            "review": [_review(i) for i in listed],
            "incident": [plain(i.incident_id) for i in listed],
            "class": [str(i.diagnosis.fault_class) for i in listed],
            "outcome": [str(i.outcome or i.state) for i in listed],
            "by": [plain(i.mark.by) if i.mark else "" for i in listed],
            "diagnosis": [plain(i.diagnosis.because) for i in listed],
            "reason": [plain(i.mark.because) if i.mark else "" for i in listed],
        },
        hide_index=True,
        width="stretch",
        height=min(320, 38 + 35 * len(listed)),
    )
    chosen = st.selectbox("Review", [plain(i.incident_id) for i in listed], key="accounting.mark")
    incident = next((i for i in listed if plain(i.incident_id) == chosen), None)
    if incident is not None:
        st.text(plain(incident.diagnosis.because))
        right = OperatorCommand(what=OperatorCommandKind.MARK_RIGHT, on=incident.incident_id)
        wrong = OperatorCommand(what=OperatorCommandKind.MARK_WRONG, on=incident.incident_id)
        form(r, viewer, f"mark:{incident.incident_id}", {"✓ Right": right, "✗ Wrong": wrong})
        as_commands(r, viewer, right, wrong)


def _review(i: Incident) -> str:
    if i.mark is None:
        return "–"
    return "✓ right" if i.mark.right else "✗ wrong"


def _precision(rows: Sequence[Precision]) -> None:
    st.dataframe(
        {
            "name": [plain(p.name) for p in rows],
            "right": [p.num_right for p in rows],
            "reviewed": [p.num_marked for p in rows],
            "not reviewed": [p.num_unmarked for p in rows],
            "precision": [f"{p.ratio:.0%}" if p.ratio is not None else "–" for p in rows],
            "95 % interval": [f"{p.low:.0%} to {p.high:.0%}" if p.low is not None else "–" for p in rows],
            "": ["few" if p.num_marked < FEW else "" for p in rows],
        },
        hide_index=True,
        width="stretch",
    )


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
