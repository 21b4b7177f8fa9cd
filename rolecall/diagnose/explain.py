"""`--explain`: one page that shows why each diagnosis was made. No script, no external resources, every text escaped.

For a diagnosis from metrics: the suspects' most deviant series over the band of their peers, and the score against its
threshold, with onset and decision marked. For one from stacks: the groups. For all: the diagnosis, the evidence with
its numbers, and the advice. The page stays under `PAGE_BYTES_MAX`.

The series are computed by pure functions and rendered by Altair on one time axis, seconds from the onset, with onset
and decision as vertical rules. A series of any length becomes at most two points for each of `NUM_BUCKETS` stretches of
time, its smallest and its largest value, so that no excursion is lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import NO_TIME, Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.rundir import write_atomically
from rolecall.core.text import escape, in_words, seconds, utc
from rolecall.detector.artifacts.stacks.diagnosis import STACK_GROUP
from rolecall.detector.panels.panel import Floats, Machine, Panel, Times
from rolecall.reports.charts import PLOT_WIDTH, Rows, key_of, layer, pixels
from rolecall.reports.charts import render as render_chart
from rolecall.reports.style import document

Series = NDArray[np.float64]

NUM_BUCKETS = 420
"""A suspect's line and the band of its peers then take about 10 kB each."""
PLOT_TOP = 34.0  # labels of onset and decision
PLOT_HEIGHT = 120.0
NUM_LINES_MAX = 4
"""Suspects in one chart; more cannot be told apart."""
SOLID = [1, 0]
LINE_STYLES = (("var(--bad)", SOLID), ("var(--accent)", [7, 3]), ("var(--good)", [2, 3]), ("var(--ink)", [9, 3, 2, 3]))
"""Colour and dashes of each suspect."""
MEDIAN_STYLE, USUAL_STYLE, THRESHOLD_STYLE = ("var(--soft)", SOLID), ("var(--bad)", [2, 3]), ("var(--warn)", [6, 4])
USUAL_TICKS, USUAL_TICKS_MIN = 600, 16
"""Ticks before the onset from which the suspect's usual distance from its peers is computed: at most, and at least."""
BAND_VALUES_MAX = 20_000_000
"""Of a larger panel the band is computed at every k-th tick."""
BAND = (0.1, 0.5, 0.9)
"""Quantiles of the peers."""
SCORE_OVER_THRESHOLD_MAX = 5.0
"""A score is cut at this many thresholds: anything above is an alarm anyway, and the crossing must stay visible."""
CONTEXT_BEFORE = 3.0
CONTEXT_AFTER = 1.0
"""The window spans this many times the delay from onset to decision, before and after."""
CONTEXT_TICKS = 30
"""But this many ticks at least."""
UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86_400.0))


@dataclass(frozen=True, slots=True)
class Window:
    """The time span of a chart, seconds. `onset` and `decided` may lie outside: their rules are then at the edge."""

    begin: float
    end: float
    onset: float
    decided: float

    def holds(self, at: Times) -> NDArray[np.bool_]:
        return (at >= self.begin) & (at <= self.end)


def window(at: Times, interval_seconds: float, onset: float, decided: float) -> Window:
    """The part of `at` around onset and decision; all of it if they lie outside."""
    first, last = float(at[0]), float(at[-1])
    if not (math.isfinite(onset) and math.isfinite(decided) and onset <= last and decided >= first):
        return Window(first, last, onset, decided)
    delay = max(decided - onset, CONTEXT_TICKS * interval_seconds)
    return Window(
        max(first, onset - CONTEXT_BEFORE * delay), min(last, decided + CONTEXT_AFTER * delay), onset, decided
    )


def quantiles(values: NDArray[np.float32], shares: Sequence[float]) -> Series:
    """(shares, T) of values (T, N) over machines: NaN ignored, linear between order statistics; NaN where all are."""
    count = np.isfinite(values).sum(axis=1)
    if not values.shape[1]:
        return np.full((len(shares), len(values)), np.nan)
    ordered = np.sort(values.astype(np.float64), axis=1)  # NaN last
    rows = np.arange(len(values))
    result = np.empty((len(shares), len(values)))
    for number, share in enumerate(shares):
        place = share * np.maximum(count - 1, 0)
        low = np.floor(place).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        result[number] = ordered[rows, low] * (1 - (place - low)) + ordered[rows, high] * (place - low)
    result[:, count == 0] = np.nan
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedMetric:
    """One metric in a window. `band`: quantiles (3, T') of the peers at the times `band_at` (T'); `usual`: the peers'
    median plus the first suspect's usual distance from it (T'); `suspects`: a series (T) each, at the times `at`
    (T)."""

    at: Times
    suspects: list[Series]
    band_at: Times
    band: Series
    usual: Series


def metric_series(panel: Panel, metric: int, suspects: Sequence[int], by: Window) -> PlottedMetric:
    held = by.holds(panel.at)
    at, values = panel.at[held], panel.values[metric][held]
    peers = np.setdiff1d(np.arange(values.shape[1]), np.asarray(suspects, dtype=np.intp))
    stride = max(1, math.ceil(len(at) * len(peers) / BAND_VALUES_MAX))
    band = quantiles(values[::stride][:, peers], BAND)
    return PlottedMetric(
        at=at,
        suspects=[values[:, s].astype(np.float64) for s in suspects[:NUM_LINES_MAX]],
        band_at=at[::stride],
        band=band,
        usual=band[1] + _usual_distance(panel, metric, suspects[0], peers, by.onset),
    )


def _usual_distance(panel: Panel, metric: int, machine: int, peers: NDArray[np.intp], onset: float) -> float:
    """Median distance from the peers' median in the ticks before the onset; NaN if there are too few."""
    end = int(np.searchsorted(panel.at, onset))
    values = panel.values[metric, max(0, end - USUAL_TICKS) : end]
    distance = values[:, machine] - quantiles(values[:, peers], (0.5,))[0]
    known = distance[np.isfinite(distance)]
    return float(np.median(known)) if len(known) >= USUAL_TICKS_MIN else math.nan


def _buckets(at: Times, known: NDArray[np.bool_], by: Window) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The bucket of each known tick, and its run: a run ends where a bucket has ticks and none of them is known."""
    share = (at - by.begin) / max(by.end - by.begin, 1e-9)
    bucket = np.clip((share * NUM_BUCKETS).astype(np.intp), 0, NUM_BUCKETS - 1)
    seen = np.unique(bucket)
    place = np.searchsorted(seen, bucket[known])
    return bucket[known], np.cumsum(np.diff(place, prepend=place[:1]) > 1)


def extremes(at: Times, values: Series, by: Window) -> list[list[tuple[float, float]]]:
    """(seconds, value) of the smallest and the largest value of each bucket, in order, run by run."""
    known = np.isfinite(values)
    if not known.any():
        return []
    bucket, run = _buckets(at, known, by)
    known_at, known_values = at[known], values[known]
    order = np.lexsort((known_values, bucket))
    first = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    picked = np.unique(np.concatenate((order[first], order[last])))
    edges = np.flatnonzero(np.diff(run[picked])) + 1
    return [list(zip(known_at[p].tolist(), known_values[p].tolist(), strict=True)) for p in np.split(picked, edges)]


def metric_chart(panel: Panel, metric: int, suspects: Sequence[int], by: Window) -> tuple[str, bool]:
    """The suspects' lines over the band (10 to 90 %) and the median of their peers, and whether the first suspect's
    usual place among them is known and drawn: a machine may be far from its own place and still within the band."""
    series = metric_series(panel, metric, suspects, by)
    axes = _Axes(by, [series.band[0], series.band[2], series.usual, *series.suspects])
    layers = [axes.band(series.band_at, series.band[0], series.band[2])]
    layers += axes.line(series.band_at, series.band[1], MEDIAN_STYLE, 1.25)
    layers += axes.line(series.band_at, series.usual, USUAL_STYLE, 1)
    for line, style in zip(series.suspects, LINE_STYLES, strict=False):
        layers += axes.line(series.at, line, style, 1.75)
    svg = axes.render(layers, f"{panel.shape.metrics[metric]} over time")
    return svg, bool(np.isfinite(series.usual).any())


def score_chart(at: Times, score: Series, threshold: Series, by: Window) -> tuple[str, bool]:
    """The chart, and whether the score exceeds it. `score` and `threshold` have the length of `at`."""
    held = by.holds(at)
    at, score, threshold = at[held], score[held], threshold[held]
    limits = threshold[np.isfinite(threshold)]
    highest = SCORE_OVER_THRESHOLD_MAX * limits.max() if len(limits) and limits.max() > 0 else math.inf
    is_cut = bool((score > highest).any())
    score = np.minimum(score, highest)
    axes = _Axes(by, [score, threshold, np.zeros(1)])
    layers = [*axes.line(at, threshold, THRESHOLD_STYLE, 1.5), *axes.line(at, score, LINE_STYLES[0], 1.75)]
    return axes.render(layers, "score against its threshold"), is_cut


class _Axes:
    """Scales of one chart: time from the onset in a readable unit, and values with a margin of 5 %."""

    def __init__(self, by: Window, series: Sequence[Series]) -> None:
        self._by = by
        self._zero = by.onset if by.begin <= by.onset <= by.end else by.begin
        self._unit, self._per = next((u for u in UNITS if by.end - by.begin < u[1] * 180), UNITS[-1])
        known = [s[np.isfinite(s)] for s in series]
        low = min((float(s.min()) for s in known if len(s)), default=0.0)
        high = max((float(s.max()) for s in known if len(s)), default=1.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        # Vega computes in units of the largest value: it cannot place ticks at 1e34.
        largest = max(abs(low - margin), abs(high + margin))
        self._power = 10.0 ** math.floor(math.log10(largest)) if not 1e-3 <= largest < 1e16 else 1.0
        self._domain = [(low - margin) / self._power, (high + margin) / self._power]

    def time(self, at: float) -> float:
        return (at - self._zero) / self._per

    def _x(self) -> alt.X:
        domain = [self.time(self._by.begin), max(self.time(self._by.end), self.time(self._by.begin) + 1e-9)]
        axis = alt.Axis(format="+~g", labelExpr=f"datum.label + ' {self._unit}'", tickCount=8, grid=True)
        scale = alt.Scale(domain=domain, nice=False, clamp=True)
        return alt.X("at", type="quantitative", scale=scale, axis=axis, title=None)

    def _y(self) -> alt.Y:
        power = f" + 'e{math.log10(self._power):.0f}'" if self._power != 1.0 else ""
        axis = alt.Axis(format="~s", labelExpr=f"datum.label{power}", tickCount=4, grid=True)
        return alt.Y(
            "value", type="quantitative", scale=alt.Scale(domain=self._domain, nice=False), axis=axis, title=None
        )

    def line(self, at: Times, values: Series, style: tuple[str, list[int]], width: float) -> list[alt.Chart]:
        """A line for each run of known values, and a dot for a run of one."""
        runs = extremes(at, values, self._by)
        rows = [
            {"at": self.time(t), "value": value / self._power, "run": number}
            for number, run in enumerate(runs)
            if len(run) > 1
            for t, value in run
        ]
        dots = [{"at": self.time(t), "value": v / self._power} for run in runs if len(run) == 1 for t, v in run]
        place = {"x": self._x(), "y": self._y()}
        colour, dash = style
        return [
            layer(rows).mark_line(color=colour, strokeWidth=width, strokeDash=dash).encode(**place, detail="run:N"),
            layer(dots).mark_circle(color=colour, size=7, opacity=1).encode(**place),
        ]

    def band(self, at: Times, low: Series, high: Series) -> alt.Chart:
        """From the smallest lower to the largest upper quantile of each bucket."""
        known = np.isfinite(low)
        rows: Rows = []
        if known.any():
            bucket, run = _buckets(at, known, self._by)
            first = np.flatnonzero(np.diff(bucket, prepend=-1))
            rows = [
                {"at": self.time(t), "value": below / self._power, "upper": above / self._power, "run": int(number)}
                for t, below, above, number in zip(
                    at[known][first].tolist(),
                    np.minimum.reduceat(low[known], first).tolist(),
                    np.maximum.reduceat(high[known], first).tolist(),
                    run[first].tolist(),
                    strict=True,
                )
            ]
        area = layer(rows).mark_area(color="var(--lane)", opacity=0.3)
        return area.encode(x=self._x(), y=self._y(), y2="upper:Q", detail="run:N")

    def render(self, layers: Sequence[alt.Chart], label: str) -> str:
        """With onset (dashed) and decision (solid); their labels are in two rows, so that they never touch."""
        rules: list[alt.Chart] = []
        for at, name, top, dash in (
            (self._by.onset, "onset", 4 - PLOT_TOP, [3, 3]),
            (self._by.decided, "decision", 18 - PLOT_TOP, [1, 0]),
        ):
            if not math.isfinite(at):
                continue
            row = {"at": self.time(at), "y": top, "y2": PLOT_HEIGHT, "name": name}
            share = (at - self._by.begin) / max(self._by.end - self._by.begin, 1e-9)
            on_left = share * PLOT_WIDTH > PLOT_WIDTH - 60
            rules += [
                layer([row])
                .mark_rule(color="var(--ink)", strokeDash=dash)
                .encode(x=self._x(), y=pixels("y"), y2="y2:Q"),
                layer([row])
                .mark_text(align="right" if on_left else "left", dx=-4 if on_left else 4, dy=6, fontSize=12.5)
                .encode(x=self._x(), y=pixels("y"), text="name:N"),
            ]
        return render_chart([alt.layer(*layers), *rules], label, PLOT_HEIGHT, top=PLOT_TOP)


METRIC = "metric:"
"""Evidence of kind `metric:<name>` is about that metric of the panel."""
PAGE_BYTES_MAX = 1_900_000
CHART_BYTES_MAX = 1_300_000
"""Leaves room for the text of further diagnoses when charts fill the page."""
NUM_METRICS_MAX = 4
NUM_METRICS_CHOSEN = 2
"""Charts when the evidence names no metric: those in which the suspect deviates most from its peers."""
NUM_SUSPECTS_SHOWN = 32
NUM_EVIDENCE_SHOWN = 40
EPOCH_SECONDS_MIN = 1e9
"""Smaller times are relative to the recording, not calendar times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTrace:
    """A detector's score at the ticks `at`, and its threshold (constant, or per tick)."""

    at: Times
    score: Floats
    threshold: Floats | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedDiagnosis:
    """A diagnosis with its panel, if any, and the suspect's score, if kept."""

    diagnosis: Diagnosis
    panel: Panel | None = None
    score: ScoreTrace | None = None


def explain(out: Path, items: Sequence[ExplainedDiagnosis]) -> Path:
    """Atomically writes the page; returns its path. Raises OSError."""
    write_atomically(out, render(items))
    return out


def render(items: Sequence[ExplainedDiagnosis]) -> str:
    header = _header(items)
    left, left_for_charts = PAGE_BYTES_MAX - len(document("why", header, MORE_CSS).encode()), CHART_BYTES_MAX
    parts = [header]
    for number, item in enumerate(items):
        charts = _charts(item) if left_for_charts > 0 else ""
        left_for_charts -= len(charts.encode())
        if left_for_charts <= 0:
            charts = '<p class="muted small">Not drawn: the page would be too large.</p>'
        part = _section(item, key_of(number), charts)
        left -= len(part.encode())
        if left < 0:
            parts.append(f'<p class="muted">{len(items) - number} more are not shown: the page would be too large.</p>')
            break
        parts.append(part)
    return document("why", "\n".join(parts), MORE_CSS)


def _header(items: Sequence[ExplainedDiagnosis]) -> str:
    num_faults = sum(i.diagnosis.fault_class != FaultClass.CANNOT_TELL for i in items)
    undecided = len(items) - num_faults
    localized = num_faults or not undecided
    what = f"{num_faults} fault{'s' if num_faults != 1 else ''} found" if localized else "No fault localized"
    if undecided:
        what += f", {undecided} undecided"
    lead = (
        "Lines are suspects, the band covers 10 to 90 % of their peers. Time counts from the onset. "
        "A decision uses no later data."
        if any(i.panel is not None for i in items)
        else ""
    )
    return (
        '<header><p class="eyebrow">rolecall diagnose --explain</p>'
        f'<h1>{escape(what)}</h1><p class="lead">{lead}</p></header>'
    )


def _name(suspect: Suspect) -> str:
    replica = suspect.replica or suspect.role
    rank = "" if suspect.rank is None else f"rank {suspect.rank}"
    who = f"{replica} {rank}".strip()
    if rank and suspect.node in (rank.replace(" ", "-"), who.replace(" ", "-")):
        return who  # dumps without a node use the process as node
    return Machine(node=suspect.node, replica=replica, rank=suspect.rank, gpu=suspect.gpu).name


def _who(suspects: Sequence[Suspect]) -> str:
    names = ", ".join(_name(s) for s in suspects[:NUM_SUSPECTS_SHOWN])
    more = len(suspects) - NUM_SUSPECTS_SHOWN
    return (names + (f" and {more} more" if more > 0 else "")) or "none"


def moment(at: float) -> str:
    """A calendar time, or seconds of the recording."""
    if not math.isfinite(at):
        return "unknown"
    return utc(at) if EPOCH_SECONDS_MIN <= abs(at) < 1e11 else f"{at:.1f} s"


def _section(item: ExplainedDiagnosis, key: str, charts: str) -> str:
    diagnosis = item.diagnosis
    undecided = diagnosis.fault_class == FaultClass.CANNOT_TELL
    tag = f'<span class="tag {"" if undecided else "bad"}">confidence {diagnosis.confidence:.0%}</span>'
    what = in_words(diagnosis.fault_class)
    timed = not any(e.kind == NO_TIME for e in diagnosis.evidence)
    decision, delay = moment(diagnosis.detected_at), diagnosis.detected_at - diagnosis.onset
    if math.isfinite(delay) and delay >= 0.01:
        decision += f", {seconds(delay)} after the onset"
    content = ""
    if item.panel is not None:
        shape, num_ticks = item.panel.shape, len(item.panel.at)
        content = f"{shape.name}: {len(shape.machines)} machines, {len(shape.metrics)} metrics, {num_ticks} ticks"
    rows = [
        ("Suspects", _who(diagnosis.suspects)),
        ("Onset", moment(diagnosis.onset) if timed else "unknown"),
        ("Decision", decision if timed else ""),
        ("Detectors", ", ".join(diagnosis.detectors)),
        ("Input", content),
        ("Advice", diagnosis.advice),
        ("To settle it", diagnosis.settle),
    ]
    facts = "".join(f"<dt>{a}</dt><dd>{escape(b, 4000)}</dd>" for a, b in rows if b)
    return (
        f'<article class="card incident"><header><span class="key{" none" if undecided else ""}">{key}</span>'
        f"<h3>{escape(what)}: {escape(_who(diagnosis.suspects), 200)}</h3>{tag}</header>"
        f'<p class="because">{escape(diagnosis.because)}</p>{charts}'
        f'<dl class="steps">{facts}</dl>{_groups(diagnosis.evidence)}{_evidence(diagnosis.evidence)}</article>'
    )


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], more: int) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    header = "".join(f'<th scope="col">{h}</th>' for h in head)
    rest = f'<p class="muted small">and {more} more</p>' if more > 0 else ""
    return (
        f'<h3 class="table">{caption}</h3><div class="scroll"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{cells}</tbody></table></div>{rest}"
    )


def _groups(evidence: Sequence[Evidence]) -> str:
    groups = [e for e in evidence if e.kind == STACK_GROUP]
    if not groups:
        return ""
    rows = []
    for e in groups[:NUM_EVIDENCE_SHOWN]:
        who, _, frames = e.text.partition(": ")
        stack = "<br>".join(escape(frame, 300) for frame in frames.split(" < "))
        rows.append((f"{e.values.get('num_processes', 0):.0f}", escape(who), f'<span class="mono">{stack}</span>'))
    table = _table("Groups of equal stacks", ("Processes", "Group", "Stack, innermost first"), rows, 0)
    return f'<div class="groups">{table}</div>'


def _evidence(evidence: Sequence[Evidence]) -> str:
    others = [e for e in evidence if e.kind != STACK_GROUP]
    if not others:
        return ""
    rows = []
    for e in others[:NUM_EVIDENCE_SHOWN]:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in e.values.items())
        rows.append((escape(in_words(e.kind.removeprefix(METRIC)), 100), escape(e.text), escape(numbers)))
    return _table("Evidence", ("Kind", "Observation", "Numbers"), rows, len(others) - NUM_EVIDENCE_SHOWN)


def _charts(item: ExplainedDiagnosis) -> str:
    diagnosis, panel = item.diagnosis, item.panel
    cards: list[tuple[str, str]] = []
    by = None
    has_usual = False
    if panel is not None and len(panel.at):
        columns = [n for n, m in enumerate(panel.shape.machines) if any(_is(m, s) for s in diagnosis.suspects)]
        by = window(panel.at, panel.shape.interval_seconds, diagnosis.onset, diagnosis.detected_at)
        metrics = named_metrics(diagnosis.evidence, panel) or (
            chosen_metrics(panel, columns, diagnosis) if columns else []
        )
        if columns:
            peers = len(panel.shape.machines) - len(columns)
            against = f"against {peers} peer{'s' if peers != 1 else ''}" if peers else "without a peer"
            for metric in metrics:
                chart, usual_is_drawn = metric_chart(panel, metric, columns, by)
                has_usual = has_usual or usual_is_drawn
                cards.append((f"{panel.shape.metrics[metric]} {against}", chart))
    if item.score is not None and len(item.score.at):
        at = item.score.at
        if by is None:
            by = window(
                at, float(np.median(np.diff(at))) if len(at) > 1 else 1.0, diagnosis.onset, diagnosis.detected_at
            )
        threshold = np.broadcast_to(np.asarray(item.score.threshold, dtype=np.float64), at.shape)
        chart, is_cut = score_chart(at, item.score.score.astype(np.float64), threshold, by)
        up_to = f", drawn up to {SCORE_OVER_THRESHOLD_MAX:g} thresholds" if is_cut else ""
        cards.append((f"Score and threshold of {', '.join(diagnosis.detectors)}{up_to}", chart))
    if not cards:
        return ""
    shown = "".join(
        f'<section class="chart"><h3>{escape(title, 200)}</h3><div class="scroll">{chart}</div></section>'
        for title, chart in cards
    )
    return shown + _legend(item, has_usual=has_usual)


def _legend(item: ExplainedDiagnosis, *, has_usual: bool) -> str:
    names: list[str] = []
    if item.panel is not None:
        names = [m.name for m in item.panel.shape.machines if any(_is(m, s) for s in item.diagnosis.suspects)]
    rows = [(_key_line(colour, dash), name) for (colour, dash), name in zip(LINE_STYLES, names, strict=False)]
    if len(names) > NUM_LINES_MAX:
        rows.append(("", f"{len(names) - NUM_LINES_MAX} more suspects are not drawn"))
    if item.panel is not None:
        peers = '<rect x="1" y="1" width="20" height="10" fill="var(--lane)" opacity=".3"/>'
        rows += [(peers, "10 to 90 % of the peers"), (_key_line(*MEDIAN_STYLE), "their median")]
    if has_usual:
        whose = "it" if len(names) < 2 else names[0]
        rows.append((_key_line(*USUAL_STYLE), f"where {whose} usually is among them"))
    if item.score is not None:
        rows.append((_key_line(*THRESHOLD_STYLE), "threshold"))
    parts = "".join(f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{s}</svg>{escape(w, 200)}</li>' for s, w in rows)
    return f'<ul class="legend">{parts}</ul>'


def _key_line(colour: str, dash: Sequence[int]) -> str:
    dashes = ",".join(map(str, dash)) if dash != SOLID else "none"
    return f'<line x1="1" y1="6" x2="21" y2="6" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'


def _is(machine: Machine, suspect: Suspect) -> bool:
    """Whether the suspect matches this column; its empty fields match anything."""
    return (
        machine.node == suspect.node
        and (not suspect.replica or machine.replica == suspect.replica)
        and (suspect.rank is None or machine.rank == suspect.rank)
        and (suspect.gpu is None or machine.gpu == suspect.gpu)
    )


def named_metrics(evidence: Sequence[Evidence], panel: Panel) -> list[int]:
    """The panel's metrics that the evidence names, in its order."""
    names = dict.fromkeys(e.kind.removeprefix(METRIC) for e in evidence if e.kind.startswith(METRIC))
    return [panel.shape.metrics.index(n) for n in names if n in panel.shape.metrics][:NUM_METRICS_MAX]


def chosen_metrics(panel: Panel, columns: Sequence[int], diagnosis: Diagnosis) -> list[int]:
    """Metrics in which the first suspect deviated most from its peers between onset and decision, in robust
    deviations."""
    held = (panel.at >= diagnosis.onset) & (panel.at <= diagnosis.detected_at)
    peers = np.setdiff1d(np.arange(len(panel.shape.machines)), np.asarray(columns, dtype=np.intp))
    if not held.any() or not len(peers):
        return list(range(min(NUM_METRICS_CHOSEN, len(panel.shape.metrics))))
    apart = []
    for values in panel.values[:, held]:
        low, middle, high = quantiles(values[:, peers], (0.25, 0.5, 0.75))
        distance = (values[:, columns[0]] - middle) / np.maximum(high - low, 1e-9 + 1e-6 * np.abs(middle))
        known = distance[np.isfinite(distance)]
        apart.append(abs(float(np.median(known))) if len(known) else 0.0)
    return [int(n) for n in np.argsort(apart)[::-1][:NUM_METRICS_CHOSEN]]


MORE_CSS = """
.incident .chart { padding: 6px 0 0; }
h3.table { margin: 18px 0 4px; }
.incident > header h3 { overflow-wrap: anywhere; min-width: 0; flex: 1; }
.groups td:last-child { width: 55%; }
.incident td { overflow-wrap: anywhere; min-width: 90px; } .incident .steps { margin-top: 14px; }
"""
