"""The Overview page: state of the run, open incidents, replicas, progress and policy health. view.py computes the
content.

Policy health is drawn as charts side by side, each with its normal range, because a rising reward means learning only
while entropy, lengths and dropped samples stay healthy.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import streamlit as st

from rolecall.core.clock import SystemClock
from rolecall.core.policy_health import BY_NAME
from rolecall.core.text import counted, escape, plain, seconds
from rolecall.dashboards.data.hardware import Query
from rolecall.dashboards.data.nodes import age
from rolecall.dashboards.data.progress import Bucket
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.data.run_state import run_state
from rolecall.dashboards.pages import charts
from rolecall.dashboards.pages.accounting.page import worker
from rolecall.dashboards.pages.overview import view, watched_job
from rolecall.dashboards.pages.prometheus import PrometheusPoller
from rolecall.dashboards.pages.shell import chosen_run, draw_chart, page
from rolecall.dashboards.pages.style import (
    STATES,
    Cell,
    Mark,
    band_legend,
    banner,
    card,
    cell,
    class_of,
    figures,
    stacked,
    state_line,
    table,
)
from rolecall.views.snapshot import ReplicaRow

OPEN_MAX = 12
"""Open incidents shown in full; the Incidents page lists the rest."""
TABLE_KEY = "overview.table"
AUDIT_KEY = "overview.audit"
"""(run, what its newest audit found wrong), of the run that this session looks at."""
QUERIES: Mapping[str, str] = {
    "targets up": "count(up == 1)",
    "targets down": "count(up == 0)",
    "GPUs": "count(rolecall_gpu_up == 1) or count(DCGM_FI_DEV_GPU_TEMP)",
    "GPUs down": "count(rolecall_gpu_up == 0)",
    "GPU utilization, mean": "avg(rolecall_gpu_utilization_ratio) * 100 or avg(DCGM_FI_DEV_GPU_UTIL)",
    "hottest GPU": "max(rolecall_gpu_temperature_celsius) or max(DCGM_FI_DEV_GPU_TEMP)",
    "GPU power, total": "sum(rolecall_gpu_power_watts) or sum(DCGM_FI_DEV_POWER_USAGE)",
}
UNITS = {"GPU utilization, mean": " %", "hottest GPU": " °C", "GPU power, total": " W"}
ADVICE = (
    "The rest of this page comes from the journal and is complete. Check that the server runs and "
    "`--prometheus` is right."
)
CHIPS_MAX = 32
"""A run with up to this many replicas shows a chip for each; a larger one only for unhealthy replicas."""
UNWELL_MAX = 48
RANKS_MAX = 64
"""Ranks drawn inside one replica, and in the table of ranks."""
COLUMNS = 3
Lines = dict[str, list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class PolicyHealthChart:
    title: str
    lines: tuple[tuple[str, str], ...]  # (metric of core/policy_health.py, legend)
    figures: str = "~g"
    zero: bool = True

    def normal(self, shown: Collection[str]) -> str:
        """Of the lines that are drawn. `shown`: their legends."""
        if len(self.lines) == 1:
            return BY_NAME[self.lines[0][0]].normal
        texts = (f"{legend.capitalize()}: {BY_NAME[metric].normal}" for metric, legend in self.lines if legend in shown)
        return " ".join(texts)


PANELS = (
    PolicyHealthChart("entropy, nats per token", (("entropy", "entropy"),)),
    PolicyHealthChart(
        "response length, tokens", (("response_length", "mean"), ("response_length_max", "longest")), figures="~s"
    ),
    PolicyHealthChart(
        "unused responses, groups and tokens",
        (("truncated_fraction", "truncated"), ("filtered_fraction", "filtered"), ("stale_fraction", "stale")),
        figures=".1~%",
    ),
    PolicyHealthChart(
        "clipped tokens", (("clip_fraction_low", "from below"), ("clip_fraction_high", "from above")), figures=".1~%"
    ),
    PolicyHealthChart("importance ratios", (("ratio_mean", "mean"), ("ratio_std", "spread"))),
    PolicyHealthChart("KL to sampler, nats per token", (("kl_sampler", "KL"),)),
    PolicyHealthChart("trainer and engine mismatch, nats", (("log_ratio_max", "largest log-ratio"),), figures=".1~e"),
    PolicyHealthChart("critic explained variance", (("explained_variance", "explained variance"),), zero=False),
    PolicyHealthChart("critic loss", (("value_loss", "loss"),)),
)


def show() -> None:
    page("Overview", _draw, slow=_draw_slow)


def _draw(reader: Reader, snapshot: JournalSnapshot) -> None:
    state = run_state(snapshot)
    st.html(state_line(state.kind, state.word, state.details))
    for kind, head, sentence, advice in view.notices(snapshot):
        st.html(banner(kind, head, sentence, advice=advice))
    run, failed = st.session_state.get(AUDIT_KEY, ("", ""))
    if failed and run == reader.settings.name:
        st.html(
            banner(
                "bad",
                failed,
                "The journal and the ledger contradict each other: the numbers of the page Accounting may be wrong.",
            )
        )
        st.page_link("accounting.py", label="See the audit", icon=":material/receipt_long:", query_params=chosen_run())
    _draw_incidents(snapshot)
    shown = view.headline_figures(snapshot)
    if shown:
        st.html(figures(shown))
    _draw_ranks(snapshot)
    found, events = view.roles(snapshot), view.recent_events(snapshot)
    left, right = st.columns([3, 2], gap="medium") if found and events else (st.container(), st.container())
    with left:
        _draw_replicas(found)
        _draw_phases(snapshot)
    with right:
        if events:
            st.subheader("Last events")
            when = "time (UTC)" if snapshot.run.ended else "ago"
            st.html(f'<div class="rc-events">{table([when, "event"], events, narrow=1)}</div>')
    _draw_capabilities(snapshot)


def _draw_incidents(snapshot: JournalSnapshot) -> None:
    open_ = view.open_incidents(snapshot)
    for n, incident in enumerate(open_[:OPEN_MAX]):
        with st.container(border=True, key=f"card-{incident.kind}-{n}", gap="small"):
            st.html(_card(incident, snapshot.until))
            with st.container(horizontal=True):
                link = {"incident": incident.incident_id, **chosen_run()}
                st.page_link(
                    "incidents.py", label="Open the incident", icon=":material/timeline:", query_params=link,
                    width="content",
                )  # fmt: skip
                if not snapshot.run.ended:
                    label = "Approve or reject" if incident.asks else "Act on it"
                    st.page_link(
                        "operations.py", label=label, icon=":material/terminal:", query_params=chosen_run(),
                        width="content",
                    )  # fmt: skip
    if len(open_) > OPEN_MAX:
        label = f"{len(open_) - OPEN_MAX} more incidents are open"
        st.page_link("incidents.py", label=label, query_params={"status": "open", **chosen_run()})


def _card(incident: view.OpenIncident, now: float) -> str:
    rows = [
        ("needed from you", incident.asks),
        ("paging", incident.paged),
        ("recovery", incident.doing),
        ("cost", incident.cost),
        ("suspect", incident.suspects + (f" on {incident.nodes}" if incident.nodes else "")),
    ]
    soft = f"open for {age(max(0.0, now - incident.opened_at))}, {incident.incident_id}"
    return card(
        incident.kind, incident.glyph, incident.title, (incident.severity, incident.stage), soft, incident.because, rows
    )


def _draw_replicas(found: tuple[view.RoleSummary, ...]) -> None:
    if not found:
        return
    st.subheader("Replicas")
    compact = sum(len(r.cells) for r in found) > CHIPS_MAX
    st.html("".join(role_html(r, compact=compact) for r in found))
    if compact:
        st.caption("One square per replica, grouped by node. The table below names each of them.")
    elif any(c.incarnation > 1 for r in found for c in r.cells):
        st.caption("#2: the second incarnation of a replica, started in place of the first.")
    if sum(len(r.cells) for r in found) > 1 and st.toggle("Show all replicas as a table", key=TABLE_KEY):
        cells = sorted((c for r in found for c in r.cells), key=lambda c: view.SEVERITY[c.state])  # worst first
        counted = any(c.incarnation for c in cells)
        served = any(c.policy_version >= 0 for c in cells)
        st.dataframe(
            {
                "replica": [plain(c.replica, 80) for c in cells],
                "state": [c.state for c in cells],
                **({"incarnation": [c.incarnation for c in cells]} if counted else {}),
                "node": [plain(c.node, 80) for c in cells],
                **(
                    {"policy version": [c.policy_version if c.policy_version >= 0 else None for c in cells]}
                    if served
                    else {}
                ),
            },
            hide_index=True,
            placeholder="",
        )


def _draw_ranks(snapshot: JournalSnapshot) -> None:
    """Of a job that rolecall only watches."""
    if not snapshot.observed:
        return
    st.subheader("Ranks")
    if not snapshot.watched:
        seen = age(max(0.0, snapshot.at - snapshot.sampled_at))
        st.caption(f"As the watch last saw them, {seen} ago: what they do now is not known.")
    head, rows = watched_job.rank_table(snapshot)
    st.html(table(head, rows[:RANKS_MAX]))
    more = f" And {len(rows) - RANKS_MAX:,} more: `rolecall status --json`." if len(rows) > RANKS_MAX else ""
    if "own time" in head:
        st.caption(
            "The worst first. Step time: mean of the last minute. Own time: the part of a unit of work in which the "
            f"rank does not wait for others, so a slow rank stands out there.{more}"
        )
    elif more:
        st.caption(f"The worst first.{more}")


def _draw_phases(snapshot: JournalSnapshot) -> None:
    phases = watched_job.role_phases(snapshot)
    if phases:
        st.subheader("Where the time goes")
    for role in phases:
        step = "" if role.step_seconds is None else f", a step takes {watched_job.brief(role.step_seconds)}"
        st.html(
            f'<p class="rc"><b>{escape(role.role, 60)}</b> <span class="rc-soft">'
            f"{counted(role.num_ranks, 'rank')}{step}</span></p>{stacked(role.segments)}"
        )


def _draw_capabilities(snapshot: JournalSnapshot) -> None:
    found = snapshot.capabilities
    if not found:
        return
    st.subheader("What rolecall can see, name, replace and end here")
    rows: list[list[Cell]] = [
        [Mark("good", about), "all ranks", "; ".join(names), "", ""]
        for about, names in watched_job.works(found).items()
    ]
    rows += watched_job.missing(found)
    st.html(table(["", "ranks", "what", "why", "what to do"], rows, narrow=2, stack=True))
    absent = watched_job.absent(found)
    if absent:
        st.text(f"Not there: {plain(absent, 300)}")
    st.caption("As the watch found out while the job ran; `rolecall doctor --job all` also tries stacks and dry runs.")


def _draw_slow(reader: Reader, snapshot: JournalSnapshot) -> None:
    curve, bands = view.curve_of(snapshot), view.fault_bands(snapshot)
    if len(curve) > 1:
        st.subheader("Progress")
        across = curve[0].last_step, curve[-1].last_step
        is_ours = bool(snapshot.trends.curve)
        took = "step time as reported, slowest, s" if is_ours else "time per step, s"
        lost = () if is_ours else (("loss", charts.rows(curve, _value_of("loss")), charts.THIRD, "~g"),)
        shown = (
            ("reward", charts.rows(curve, lambda b: b.reward), charts.LINE, "~g"),
            *lost,
            (took, charts.rows(curve, lambda b: b.seconds_max), charts.SECOND, "~g"),
            ("tokens per second", charts.rows(curve, lambda b: b.tokens_per_second), charts.LINE, "~s"),
        )
        columns = st.columns(COLUMNS)
        known = [one for one in shown if one[1]]
        for n, (title, points, colour, form) in enumerate(known):
            lines = {title: points}
            spec = charts.curves(lines, title, across=across, figures=form, zero=False, colour=colour)
            with columns[n % COLUMNS]:
                draw_chart(spec, charts.columns(lines, bands))
        if bands:
            st.html(band_legend([(b.key, b.title) for b in bands], snapshot.projection.num_opened))
    _draw_evaluations(snapshot, bands)
    _draw_policy_health(curve, bands)
    audit = worker(reader.settings).latest().audit  # drawn on top, in the next refresh
    num_problems = 0 if audit is None or audit.ok else len(audit.problems)
    failed = f"The audit found {counted(num_problems, 'problem')}." if num_problems else ""
    st.session_state[AUDIT_KEY] = reader.settings.name, failed
    rows = view.lost_rows(snapshot)
    if not snapshot.history.whole:
        st.subheader("Lost time")
        st.caption(f"Loading history: {snapshot.history.percent} %.")
    elif rows:
        st.subheader("Lost time")
        st.html(table(["role", "fault", "lost", "share of run time"], rows))
        st.caption(
            "ETTR (effective training time ratio): share of time in which rollouts and trainers did useful work. A "
            "loss counts from the injected fault if known, otherwise from the diagnosed onset, in seconds of the "
            "whole run."
        )
    _draw_prometheus(reader)


def _draw_evaluations(snapshot: JournalSnapshot, bands: Sequence[charts.FaultBand]) -> None:
    """Reward and length on held-out prompts, and progress in the dataset; nothing in a run without them."""
    shown, lines = view.learning_figures(snapshot), view.evaluation_lines(snapshot.trends.evaluations)
    if shown:
        st.subheader("Held-out prompts and dataset")
        st.html(figures(shown))
    drawn_lines = [(title, lines_) for title, lines_ in lines if any(lines_.values())]
    across = 0, max((p.result.step for p in snapshot.trends.evaluations), default=0) or 1
    for column, (title, of) in zip(st.columns(COLUMNS), drawn_lines, strict=False):
        with column:
            spec = charts.curves(of, title, across=across, zero=False, figures="~r")
            draw_chart(spec, charts.columns(of, bands))


@st.cache_resource(show_spinner=False)
def _poller(url: str, _authorization: str) -> PrometheusPoller[Mapping[str, float]]:
    return PrometheusPoller(url, _authorization, SystemClock(), _values)


def _values(ask: Query) -> Mapping[str, float]:
    """Name of each metric that has a value -> its value."""
    answers = {name: ask(expression) for name, expression in QUERIES.items()}
    return {name: found[0][1] for name, found in answers.items() if found}


def _draw_prometheus(reader: Reader) -> None:
    """Hosts and GPUs; nothing if no server is configured."""
    settings = reader.settings
    if not settings.prometheus_url:
        return
    seen = _poller(settings.prometheus_url, settings.prometheus_authorization).latest(settings.patience_seconds)
    st.subheader("Hosts and GPUs")
    if seen.error:
        old = "" if seen.at is None else f"The data shown is {seconds(reader.now() - seen.at)} old."
        st.html(banner("warn", "Prometheus is not responding.", plain(seen.error, 300), old, advice=ADVICE))
    elif seen.at is None:
        st.caption("Querying Prometheus.")
    elif not seen.answer:
        st.html(
            banner("note", "Prometheus has no rolecall targets.", "docs/reference/dashboard.md lists what to scrape.")
        )
    if seen.answer:
        st.html(figures([(name, f"{v:,.0f}{UNITS.get(name, '')}", "") for name, v in seen.answer.items()]))


def _value_of(metric: str) -> Callable[[Bucket], float]:
    return lambda bucket: bucket.signs.get(metric, math.nan)


def drawn(curve: Sequence[Bucket]) -> list[tuple[PolicyHealthChart, Lines]]:
    """The panels that have data, with their lines: a run without a critic has no critic panels."""
    found = []
    for panel in PANELS:
        lines = {name: charts.rows(curve, _value_of(metric)) for metric, name in panel.lines}
        known = {name: points for name, points in lines.items() if points}
        if known:
            found.append((panel, known))
    return found


def _draw_policy_health(curve: Sequence[Bucket], bands: Sequence[charts.FaultBand]) -> None:
    """Draws the panels; nothing where no step has a metric of them."""
    panels = drawn(curve)
    if not panels:
        return
    st.subheader("Policy health")
    across = curve[0].last_step, curve[-1].last_step
    for row in range(0, len(panels), COLUMNS):
        for column, (panel, lines) in zip(st.columns(COLUMNS), panels[row : row + COLUMNS], strict=False):
            with column:
                spec = charts.curves(lines, panel.title, across=across, figures=panel.figures, zero=panel.zero)
                draw_chart(spec, charts.columns(lines, bands))
                st.caption(panel.normal(lines))


def role_html(role: view.RoleSummary, *, compact: bool = False) -> str:
    """`compact`: chips only for unhealthy replicas, a map for all."""
    counts = "".join(
        f'<span class="rc-{class_of(state)}">{STATES[state][0]} {num:,}&nbsp;{state}</span>'
        for state, num in role.counts
    )
    parts = [f"<p><b>{escape(role.name)}</b> {counts}</p>"]
    if len(role.cells) <= CHIPS_MAX and not compact:
        parts.append(_chips(role, role.cells))
    else:
        unwell = role.unhealthy
        if unwell:
            parts.append(_chips(role, unwell[:UNWELL_MAX]))
        if len(unwell) > UNWELL_MAX:
            parts.append(f'<p class="rc-soft">and {len(unwell) - UNWELL_MAX} more unhealthy replicas</p>')
        parts.append(_map(role.cells))
    return f'<section class="rc rc-role">{"".join(parts)}</section>'


def _chips(role: view.RoleSummary, cells: Sequence[ReplicaRow]) -> str:
    chips = "".join(_chip(c, role.ranks.get(c.replica, ())) for c in cells)
    return f'<div class="rc-chips" role="list">{chips}</div>'


def _chip(found: ReplicaRow, ranks: Sequence[tuple[str, str]]) -> str:
    number = f"#{found.incarnation} " if found.incarnation else ""
    version = f", policy {found.policy_version}" if found.policy_version >= 0 else ""
    beside = f" with {escape(found.partner, 80)}" if found.partner else ""
    where = f"on {escape(found.node, 80)}{beside}" if found.node else "its node works for another replica"
    inside = "".join(cell(state, name) for name, state in ranks[:RANKS_MAX])
    ranked = f'<span class="rc-ranks" role="img" aria-label="{len(ranks)} ranks">{inside}</span>' if inside else ""
    return (
        f'<div class="rc-chip rc-{class_of(found.state)}" role="listitem"><b>{escape(found.replica, 80)}</b> '
        f"{STATES[found.state][0]} {found.state}<small>{number}{where}{version}</small>"
        f"{ranked}</div>"
    )


def _map(cells: Sequence[ReplicaRow]) -> str:
    """Every replica as a square, those of a node together, so that patterns (a rack, a node range) are visible."""
    parts = []
    for node, group in groupby(cells, key=lambda c: c.node):
        here = list(group)
        last = f" to {here[-1].replica}" if here[1:] else ""
        squares = "".join(cell(c.state, f"{c.replica}#{c.incarnation} on {node}") for c in here)
        parts.append(
            f'<span class="rc-node" title="{escape(f"{node}: {here[0].replica}{last}", 120)}">{squares}</span>'
        )
    usual = "rc-healthy" if cells[0].state != "ended" else "rc-ended"
    label = f"{len(cells)} replicas, one square each, grouped by node"
    return f'<div class="rc-map {usual}" role="img" aria-label="{label}">{"".join(parts)}</div>'
