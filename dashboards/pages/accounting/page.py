"""The Accounting page: audit of prompt groups, ETTR and lost time, detection and recovery times, diagnosis
precision."""

import math
import re
from collections.abc import Sequence
from typing import Any

import altair as alt
import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.text import counted, escape, in_words, percent, plain, seconds, utc
from rolecall.dashboards.data.incident_titles import title as title_of
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages import charts
from rolecall.dashboards.pages.accounting.statistics import (
    FEW,
    EttrBreakdown,
    Precision,
    Slice,
    precision_summary,
    reviewable,
)
from rolecall.dashboards.pages.accounting.worker import AccountingSnapshot, AccountingWorker, IncidentStatistics
from rolecall.dashboards.pages.links import href
from rolecall.dashboards.pages.operations.commands import (
    OperatorCommand,
    OperatorCommandKind,
    as_commands,
    form,
    show_result,
)
from rolecall.dashboards.pages.shell import chosen_run, data_table, draw_chart, page
from rolecall.dashboards.pages.sign_in import Viewer, follow
from rolecall.dashboards.pages.status import status_of
from rolecall.dashboards.pages.style import Cell, Link, Segment, stacked
from rolecall.dashboards.pages.style import table as small_table
from rolecall.dashboards.settings import Settings
from rolecall.recovery.incidents import Incident
from rolecall.views.ettr import UNDETECTED
from rolecall.views.mfu import WINDOW_STEPS
from rolecall.views.phases import AFTERWARDS, LOST_LEAD, NOT_KNOWN, PHASES, PHASES_LEAD, lost_in_run

AUDIT_NOW = "accounting.audit"
ETTR_HELP = "Effective training time ratio: share of the time in which rollouts and trainers did useful work."
INCIDENTS_SHOWN = 1000
"""Rows of the review table, newest first; review older ones with `rolecall review`."""
PROBLEMS_SHOWN, KINDS_SHOWN = 50, 5
NUMBER = re.compile(r"\d+")
DAY_SECONDS = 86_400.0
TICK_SECONDS = (15, 60, 300, 900, 3600, 7200, 14_400, 43_200, 86_400, 604_800)
TICKS_MAX = 8
VALUES_MAX = 24
"""Bars that have their value written into them; of more the names would overlap."""
BAR_INK = "#0b1016"
ETTR_PIXELS = 180
RECOVERIES_SHOWN = 50
PHASE_COLOURS = {
    **dict(zip(PHASES, ("#d9822b", "#b8931c", "#3b7dd8", "#1f9e89", "#8e5bd1"), strict=True)),
    AFTERWARDS: "#8a7350",
    NOT_KNOWN: charts.CLASS_COLOURS["cannot_tell"],
    UNDETECTED: charts.CLASS_COLOURS[UNDETECTED],
}
SHORT_SECONDS = 600.0
"""Time labels of a shorter run include seconds."""


def show() -> None:
    page("Accounting", _draw, slow=_draw_statistics, last=_draw_reviews)


@st.cache_resource(show_spinner=False)
def _worker(_settings: Settings, journal_url: str, run: str) -> AccountingWorker:
    return AccountingWorker(_settings, SystemClock())


def worker(settings: Settings) -> AccountingWorker:
    return _worker(settings, settings.journal_url, str(settings.run.path) if settings.run else "")


def _draw(reader: Reader, _snapshot: JournalSnapshot) -> None:
    follow(reader)
    now = reader.now()
    show_result(reader)
    accounts = worker(reader.settings).latest(audit_now=bool(st.session_state.pop(AUDIT_NOW, False)))
    if accounts.error:
        st.warning("The numbers of this page could not be computed.", icon=":material/report:")
        st.text(plain(accounts.error))
    _audit(accounts, now)


def _draw_reviews(reader: Reader, snapshot: JournalSnapshot) -> None:
    incidents = tuple(snapshot.projection.incidents.values())
    _reviews(reader, follow(reader), incidents, snapshot)


def _draw_statistics(reader: Reader, _snapshot: JournalSnapshot) -> None:
    statistics = worker(reader.settings).latest().statistics
    if statistics is None:
        st.text("Computing statistics: the journal is long or its database slow.")
        return
    _effective(statistics)
    _utilisation(statistics)
    _speed(statistics)


def _audit(accounts: AccountingSnapshot, now: float) -> None:
    audit = accounts.audit
    if audit is None:
        st.subheader("Audit")
        st.text("The audit is running.")
        return
    st.subheader("Prompt groups" if accounts.has_ledger else "Audit")
    if audit.ok and accounts.has_ledger:
        st.success("Audit passed.", icon=":material/check_circle:")
    elif audit.ok:
        st.info("The journal's hash chain is valid. This job has no ledger, so prompt groups are not audited.")
    else:
        st.error(f"The audit found {counted(len(audit.problems), 'problem')}.", icon=":material/error:")
        for problem, alike in _alike(audit.problems):
            st.text(plain(problem + (f" (and {alike - 1:,} alike)" if alike > 1 else "")))
        if len(audit.problems) > 1:
            with st.expander("All problems"):
                st.text("\n".join(plain(problem) for problem in audit.problems[:PROBLEMS_SHOWN]))
                if len(audit.problems) > PROBLEMS_SHOWN:
                    st.text(f"and {len(audit.problems) - PROBLEMS_SHOWN:,} more; `rolecall audit RUN` lists all.")
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
                st.metric(label, f"{value:,}", border=True)
        for reason, num in sorted(groups.dropped_by_reason.items()):
            st.text(plain(f"{num:,} dropped: {in_words(reason)}"))
    for note in audit.notes if accounts.has_ledger else ():
        st.text(plain(note))
    head = audit.journal.position
    when = f" {age(now - accounts.audited_at)} ago" if accounts.audited_at is not None else ""
    ledger = (
        f", {counted(audit.ledger.head.position, 'entry', 'entries')} of the ledger and "
        f"{counted(audit.num_anchors, 'anchor')} (heads of the ledger that are recorded elsewhere)"
    )
    st.text(f"Audited{when}: {counted(head, 'event')} of the journal{ledger if accounts.has_ledger else ''}.")
    st.button(
        "Audit again",
        key="accounting.again",
        disabled=accounts.busy,
        on_click=st.session_state.update,
        args=({AUDIT_NOW: True},),
    )


def _alike(problems: Sequence[str]) -> list[tuple[str, int]]:
    """The first of the problems that differ only in their numbers, and how many those are; a few kinds."""
    found: dict[str, tuple[str, int]] = {}
    for problem in problems:
        first, num = found.get(kind := NUMBER.sub("0", problem), (problem, 0))
        found[kind] = first, num + 1
    return list(found.values())[:KINDS_SHOWN]


def _effective(statistics: IncidentStatistics) -> None:
    st.subheader("Effective training time")
    times = statistics.times
    if times is None or not times.num_replicas:
        st.text(
            "Not available: the journal has no epoch with a trainer and a rollout, or no step yet. For a job that "
            "rolecall only watches, it cannot tell which part of the time was useful."
        )
        return
    width = {3600.0: "hour", 60.0: "minute"}.get(times.slice_seconds, f"{times.slice_seconds / 60:.0f} minutes")
    with st.container(horizontal=True):
        if times.ettr is not None:
            st.metric("ETTR of the whole run", percent(times.ettr, 1), border=True, help=ETTR_HELP)
        st.metric("training time of the whole run", seconds(times.training_seconds), border=True)
        st.metric("of it lost to faults", seconds(times.lost_seconds), border=True)
    draw_chart(_ettr_chart(times.slices, width))
    with st.expander(f"By {width}, as a table"):
        data_table(
            {
                "from (UTC)": [_when(s.start) for s in times.slices],
                "ETTR": [None if s.ettr is None else round(100 * s.ettr, 1) for s in times.slices],
                "lost": [seconds(s.lost_seconds) for s in times.slices],
                "steps": [s.num_steps for s in times.slices],
                "incidents": [s.num_incidents for s in times.slices],
            },
            column_config={"ETTR": st.column_config.NumberColumn(format="%.1f %%")},
        )
    st.caption(
        f"Share of productive replicas, by {width}. A lost rollout counts as lost; while a step is interrupted, no "
        "trainer counts as productive; rollouts that keep generating do."
    )
    if not times.lost_seconds:
        st.text("No time was lost to faults.")
        return
    causes, tops = st.columns([3, 2], gap="medium")
    with causes:
        st.markdown("**Lost time by role and cause**")
        st.html(_causes_bars(times.by_cause))
    with tops:
        st.markdown("**Lost time by incident (top ten)**")
        run = chosen_run()
        rows: list[list[Cell]] = [
            [Link(p.name, href(p.name, run)) if p.name != UNDETECTED else p.name, seconds(p.seconds), percent(p.share)]
            for p in times.by_incident
        ]
        st.html(small_table(["incident", "lost", "share"], rows))
        st.caption(
            "Lost: in seconds of the whole run. The incident's page counts replica-seconds: "
            f"{times.num_replicas:,} times as many, for the run's rollouts and trainers. An open incident counts until "
            "now."
        )
    _lost_by_phase(times)


def _lost_by_phase(times: EttrBreakdown) -> None:
    lost = lost_in_run(times.by_phase)
    known = {where: spent for where, spent in lost.items() if spent is not None}
    total = sum(known.values())
    if not total:
        return
    st.markdown("**Lost replica-seconds by phase of recovery**")
    st.html(stacked([_segment(w, _amount(spent), spent / total, PHASE_COLOURS[w]) for w, spent in known.items()]))
    rows: list[list[Cell]] = [
        [where, "–", "–", "–"]
        if spent is None
        else [where, _amount(spent), seconds(spent / times.num_replicas), percent(spent / total)]
        for where, spent in {**lost, "together": total}.items()
    ]
    st.html(small_table(["phase", "replica-seconds", "of the whole run", "share"], rows))
    st.caption(LOST_LEAD)
    newest = [(which, its) for which, its in reversed(list(times.by_phase.items())) if which][:RECOVERIES_SHOWN]
    if not newest:
        return
    with st.expander(f"Replica-seconds of the newest {counted(len(newest), 'incident')}"):
        run = chosen_run()
        columns = list(lost_in_run(dict(newest)))
        of_incidents: list[list[Cell]] = [
            [Link(which, href(which, run)),
             *(_amount(its[where]) if where in its else "–" for where in columns), _amount(sum(its.values()))]
            for which, its in newest
        ]  # fmt: skip
        st.html(small_table(["incident", *columns, "together"], of_incidents, stack=True))


def _amount(replica_seconds: float) -> str:
    return f"{replica_seconds:,.1f}"


def _utilisation(statistics: IncidentStatistics) -> None:
    """Nothing where the job file gives no peak."""
    if not statistics.mfu:
        return
    st.subheader("Model FLOPs utilisation")
    with st.container(horizontal=True):
        for role, mfu in statistics.mfu.items():
            st.metric(f"{role}: newest", percent(mfu.newest, 2))
            st.metric(f"{role}: best", percent(mfu.best, 2))
    for role, mfu in statistics.mfu.items():
        if mfu.decline:
            st.warning(f"{role}: {mfu.decline}.", icon=":material/trending_down:")
    lines = {
        role: [{"step": float(step), "value": value} for step, value in charts.thinned(course)]
        for role, course in statistics.mfu_courses.items()
    }
    steps = [point["step"] for points in lines.values() for point in points]
    title = f"MFU, median of {WINDOW_STEPS} steps"
    spec = charts.curves(lines, title, across=(min(steps), max(steps)), figures=".2~%")
    draw_chart(spec, charts.columns(lines))
    st.caption(
        "Share of the peak FLOP/s in the job file that the model's own arithmetic uses. Recomputed activations and "
        "discarded answers do not count."
    )


def _ettr_chart(slices: Sequence[Slice], width: str) -> Any:
    rows = [
        {
            "start": 1000.0 * time_slice.start,
            "end": 1000.0 * time_slice.end,
            # As text, because the browser formats tooltip times in its own time zone.
            "from (UTC)": _when(time_slice.start),
            "middle": 500.0 * (time_slice.start + time_slice.end),
            "ETTR": time_slice.ettr,
            "value": percent(time_slice.ettr),
            "steps": time_slice.num_steps,
            "incidents": time_slice.num_incidents,
            "lost seconds": round(time_slice.lost_seconds, 1),
        }
        for time_slice in slices
        if time_slice.ettr is not None
    ]
    # Explicit, because Vega first renders without data and warns about an empty extent.
    across = [1000.0 * slices[0].start, 1000.0 * slices[-1].end]
    scale, axis = alt.Scale(domain=across, nice=False), _times(slices)
    drawn = alt.Chart(alt.Data(values=rows))
    bars = drawn.mark_rect(stroke="white", strokeWidth=0.5, color=charts.LINE).encode(
        x=alt.X("start:Q", title="time (UTC)", scale=scale, axis=axis),
        x2="end:Q",
        y=alt.Y(
            "ETTR:Q",
            title=None,
            axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1], labelExpr=charts.SPACED_PERCENT),
            scale=alt.Scale(domain=[0, 1]),
        ),
        y2=alt.datum(0),
        tooltip=["from (UTC):N", alt.Tooltip("ETTR:Q", format=".1%"), "steps:Q", "incidents:Q", "lost seconds:Q"],
    )
    # At 0 of the axis, not at a pixel: the chart is fitted into its height, and a text outside would squeeze the bars.
    values = drawn.mark_text(baseline="bottom", dy=-3, color=BAR_INK).encode(
        x=alt.X("middle:Q", title="time (UTC)", scale=scale, axis=axis),
        y=alt.datum(0),
        text="value:N",
    )
    title = alt.TitleParams(f"ETTR by {width}", anchor="start", fontSize=13, fontWeight=600)
    layers = (bars, values) if len(rows) <= VALUES_MAX else (bars,)
    return alt.layer(*layers).properties(height=ETTR_PIXELS, title=title)


def _times(slices: Sequence[Slice]) -> Any:
    """Ticks at round times, as numbers, because Vega misreads the explicit domain of a range of times."""
    start, end = slices[0].start, slices[-1].end
    step = next((s for s in TICK_SECONDS if end - start <= TICKS_MAX * s), TICK_SECONDS[-1])
    form = "%m-%d %H:%M" if end - start > DAY_SECONDS else "%H:%M" if end - start > SHORT_SECONDS else "%H:%M:%S"
    ticks = [1000.0 * step * n for n in range(math.ceil(start / step), int(end / step) + 1)]
    return alt.Axis(
        values=ticks, labelExpr=f"utcFormat(datum.value, '{form}')", labelOverlap=True, labelFlush=True, titlePadding=4
    )


def _causes_bars(causes: Sequence[tuple[str, str, float]]) -> str:
    """Lost time as a bar for each role, stacked by fault class, and a legend with the time of each class."""
    of_role: dict[str, list[tuple[str, float]]] = {}
    of_class: dict[str, float] = {}
    for role, fault, lost in causes:
        of_role.setdefault(role, []).append((fault, lost))
        of_class[fault] = of_class.get(fault, 0.0) + lost
    sums = {role: sum(lost for _, lost in parts) for role, parts in of_role.items()}
    longest = max(sums.values(), default=0.0)
    lines = []
    for role in sorted(sums, key=lambda r: -sums[r]):
        parts = "".join(
            f'<div title="{escape(f"{role}, {in_words(fault)}: {seconds(lost)}", 200)}" style="height:1.6rem;'
            f'width:{100 * lost / longest:.3f}%;background:{charts.CLASS_COLOURS.get(fault, charts.THIRD)}"></div>'
            for fault, lost in of_role[role]
        )
        lines.append(
            f'<tr><td class="w">{escape(role, 60)}</td><td style="width:100%"><div style="display:flex">{parts}</div>'
            f'</td><td class="n">{seconds(sums[role])}</td></tr>'
        )
    legend = "".join(
        f'<span style="margin-right:1rem;white-space:nowrap"><i style="display:inline-block;width:.8rem;height:.8rem;'
        f'border-radius:3px;background:{charts.CLASS_COLOURS.get(fault, charts.THIRD)}"></i> {escape(in_words(fault))} '
        f"{seconds(lost)}</span>"
        for fault, lost in sorted(of_class.items(), key=lambda kv: -kv[1])
    )
    return f'<div class="rc"><p>{legend}</p><table class="rc-table wide"><tbody>{"".join(lines)}</tbody></table></div>'


def _speed(statistics: IncidentStatistics) -> None:
    st.subheader("Time to detect, compared with the goals")
    if statistics.note:
        st.warning("The injection log cannot be used.", icon=":material/report:")
        st.text(plain(statistics.note))
    if statistics.num_injected:
        st.text(
            f"{counted(statistics.num_injected, 'fault was', 'faults were')} injected, {statistics.num_missed} missed; "
            f"incidents that match none of them: {statistics.num_false_alarms}."
        )
    if not statistics.detection:
        st.text("No fault was detected yet.")
    else:
        rows = [
            [
                _within(d.share), str(d.evidence), f"< {d.goal_seconds:g} s" if d.goal_seconds else "none",
                seconds(d.median_seconds), seconds(d.worst_seconds), str(d.num),
                "injection" if d.injected else "onset (estimated)",
            ]
            for d in statistics.detection
        ]  # fmt: skip
        heads = ["within the goal", "detected by", "goal", "median", "worst", "n", "measured from"]
        st.html(small_table(heads, rows, stack=True))
        st.caption(
            "Until the finding, when the detectors were certain: from the injection where its time is known, else from "
            "the estimated onset. The page Incidents always counts from the onset. "
            "The goals apply to metrics read directly from agents; with Prometheus the scrape interval is added."
        )
    if statistics.recovery:
        _recovery(statistics)
    elif statistics.episodes:
        _episodes(statistics)
    else:
        st.subheader("Time to recover")
        st.text("No action has started yet.")


def _recovery(statistics: IncidentStatistics) -> None:
    st.subheader("Time to recover")
    data_table(
        {
            "class": [in_words(c.fault_class) for c in statistics.recovery],
            "incidents": [c.num for c in statistics.recovery],
            "resolved": [c.num_resolved for c in statistics.recovery],
            "time to recover, median": [seconds(c.resolved_median) for c in statistics.recovery],
            "worst": [seconds(c.resolved_worst) for c in statistics.recovery],
        },
    )
    st.caption(
        "Of resolved incidents, from the finding until the replacement serves; resolved: it was then seen to make "
        "progress."
    )
    st.subheader("Where the time of the recoveries went")
    bar = [_segment(p.phase, seconds(p.total_seconds), p.share, PHASE_COLOURS[p.phase]) for p in statistics.phases]
    st.html(stacked(bar))
    phases: list[list[Cell]] = [
        [p.phase, str(p.num), seconds(p.median_seconds), seconds(p.worst_seconds), seconds(p.total_seconds),
         percent(p.share)]
        for p in statistics.phases
    ]  # fmt: skip
    st.html(small_table(["phase", "recoveries", "median", "worst", "sum", "share"], phases))
    st.caption(PHASES_LEAD)
    newest = statistics.recoveries[::-1][:RECOVERIES_SHOWN]
    with st.expander("Each recovery" if len(newest) == len(statistics.recoveries) else f"The newest {len(newest)}"):
        run = chosen_run()
        rows: list[list[Cell]] = [
            [Link(r.incident_id, href(r.incident_id, run)), *(seconds(r.seconds[phase]) for phase in PHASES),
             seconds(r.whole)]
            for r in newest
        ]  # fmt: skip
        st.html(small_table(["incident", *PHASES, "fault to commit"], rows, stack=True))


def _segment(name: str, spent: str, share: float, colour: str) -> Segment:
    return Segment(share=share, name=name, text=f"{spent}, {percent(share)}", colour=colour)


def _episodes(statistics: IncidentStatistics) -> None:
    """Of a job on which rolecall does not act."""
    st.subheader("Where the time of the faults went")
    run = chosen_run()
    detect = sum(e.detect_seconds for e in statistics.episodes)
    over = sum(e.until_over_seconds for e in statistics.episodes)
    total = detect + over
    if total > 0:
        parts = (
            ("detect", detect, PHASE_COLOURS["detect"]),
            ("until it was over", over, PHASE_COLOURS["restart"]),
        )
        st.html(stacked([_segment(name, seconds(spent), spent / total, colour) for name, spent, colour in parts]))
    rows: list[list[Cell]] = [
        [
            Link(e.incident_id, href(e.incident_id, run)),
            in_words(e.fault_class),
            seconds(e.detect_seconds),
            seconds(e.until_over_seconds),
            in_words(e.outcome) or "still open",
        ]
        for e in statistics.episodes[::-1][:RECOVERIES_SHOWN]
    ]
    st.html(small_table(["incident", "class", "detect", "until it was over", "outcome"], rows, stack=True))
    st.caption(
        "rolecall took no action here. Detect: onset, as diagnosed, to finding. Until it was over: finding until the "
        "same process worked again or had ended; of an open incident until now."
    )


def _within(share: float | None) -> str:
    if share is None:
        return "no goal"
    return f"{'✓' if share == 1 else '✗'} {percent(share)}"


def _reviews(reader: Reader, viewer: Viewer, incidents: Sequence[Incident], snapshot: JournalSnapshot) -> None:
    st.subheader("Diagnosis precision")
    found = precision_summary(incidents)
    st.text(found.of_all.sentence)
    waiting, known = found.of_all.num_not_reviewed, found.of_all.num_reviewed + found.of_all.num_not_reviewed
    st.text(f"{waiting:,} of {known:,} are not reviewed yet.")
    if found.of_all.num_reviewed:
        for title, rows in (("by fault class", found.by_class), ("by detector", found.by_detector)):
            st.markdown(f"**Precision {title}**")
            _precision(rows)
        st.caption(f"With fewer than {FEW} reviews, rely on the interval, not on the share.")
    listed = reviewable(incidents)[:INCIDENTS_SHOWN]
    if not listed:
        st.text("No diagnoses yet.")
        return
    ended = snapshot.run.ended != ""
    columns = {
        "review": [_review(i) for i in listed],
        "incident": [href(i.incident_id, chosen_run()) for i in listed],
        "class": [in_words(i.diagnosis.fault_class) for i in listed],
        "status": [in_words(status_of(i, snapshot.mode_of(i), snapshot.at, ended=ended)) for i in listed],
        "by": [plain(i.review.by) if i.review else "" for i in listed],
        "what": [title_of(i) for i in listed],
        "reason": [plain(i.review.because) if i.review else "" for i in listed],
    }
    data_table(
        {name: values for name, values in columns.items() if any(values)},
        column_config={"incident": st.column_config.LinkColumn(display_text=r"incident=([^&]*)")},
    )
    chosen = st.selectbox("Review", [plain(i.incident_id) for i in listed], key="accounting.review")
    incident = next((i for i in listed if plain(i.incident_id) == chosen), None)
    if incident is not None:
        st.text(plain(incident.diagnosis.because))
        right = OperatorCommand(what=OperatorCommandKind.REVIEW_RIGHT, on=incident.incident_id)
        wrong = OperatorCommand(what=OperatorCommandKind.REVIEW_WRONG, on=incident.incident_id)
        form(reader, viewer, f"review:{incident.incident_id}", {"✓ Right": right, "✗ Wrong": wrong})
        as_commands(reader, viewer, right, wrong)


def _review(incident: Incident) -> str:
    if incident.review is None:
        return ""
    return "✓ right" if incident.review.right else "✗ wrong"


def _precision(rows: Sequence[Precision]) -> None:
    data_table(
        {
            "name": [plain(p.name) for p in rows],
            "right": [p.num_right for p in rows],
            "reviewed": [p.num_reviewed for p in rows],
            "not reviewed": [p.num_not_reviewed for p in rows],
            "precision": [percent(p.ratio) if p.ratio is not None else "–" for p in rows],
            "95 % interval": [
                f"{percent(p.low)} to {percent(p.high)}" if p.low is not None and p.high is not None else "–"
                for p in rows
            ],
            "": ["few" if p.num_reviewed < FEW else "" for p in rows],
        },
    )


def _when(at: float) -> str:
    return utc(at, "%Y-%m-%d %H:%M")
