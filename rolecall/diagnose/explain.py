"""`--explain`: one page that shows why each diagnosis was made. No script, no external resources, every text escaped.

For a diagnosis from metrics: the suspects' most deviant series over the band of their peers, and the score against its
threshold, with onset and decision marked. For one from stacks: the groups. For all: the diagnosis, the evidence with
its numbers, and the advice. The page stays under `PAGE_BYTES_MAX`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.text import escape, seconds
from rolecall.detector.artifacts.stacks.findings import STACK_GROUP
from rolecall.detector.panels.panel import Floats, Machine, Panel, Times
from rolecall.diagnose.explain_charts import (
    NUM_LINES_MAX,
    SCORE_OVER_THRESHOLD_MAX,
    metric_chart,
    quantiles,
    score_chart,
    window,
)
from rolecall.reports.charts import key_of
from rolecall.reports.style import CSS

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
    partial = out.with_name(out.name + ".partial")
    partial.write_text(render(items), encoding="utf-8")
    partial.replace(out)
    return out


def render(items: Sequence[ExplainedDiagnosis]) -> str:
    """The whole page."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>rolecall: why</title><style>{CSS}{MORE_CSS}</style></head>\n<body><main>\n{_header(items)}\n"
    )
    left, left_for_charts = PAGE_BYTES_MAX - len(head.encode()), CHART_BYTES_MAX
    parts = []
    for n, item in enumerate(items):
        charts = _charts(item) if left_for_charts > 0 else ""
        left_for_charts -= len(charts.encode())
        if left_for_charts <= 0:
            charts = '<p class="muted small">Not drawn: the page would be too large.</p>'
        part = _section(item, key_of(n), charts)
        left -= len(part.encode())
        if left < 0:
            parts.append(f'<p class="muted">{len(items) - n} more are not shown: the page would be too large.</p>')
            break
        parts.append(part)
    return head + "\n".join(parts) + "\n</main></body></html>\n"


# --- text --------------------------------------------------------------------------------------------------------


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
    if not EPOCH_SECONDS_MIN <= abs(at) < 1e11:
        return f"{at:.1f} s"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _after(delay: float) -> str:
    return f", {seconds(delay)} after the onset" if math.isfinite(delay) and delay >= 0.01 else ""


def _section(item: ExplainedDiagnosis, key: str, charts: str) -> str:
    d = item.diagnosis
    undecided = d.fault_class == FaultClass.CANNOT_TELL
    tag = f'<span class="tag {"" if undecided else "bad"}">confidence {d.confidence:.0%}</span>'
    what = str(d.fault_class).replace("_", " ")
    rows = [
        ("Suspects", _who(d.suspects)),
        ("Onset", moment(d.onset)),
        ("Decision", moment(d.detected_at) + _after(d.detected_at - d.onset)),
        ("Detectors", ", ".join(d.detectors)),
        ("Input", _panel_words(item.panel)),
        ("Advice", d.advice),
        ("To settle it", d.settle),
    ]
    facts = "".join(f"<dt>{a}</dt><dd>{escape(b, 4000)}</dd>" for a, b in rows if b)
    return (
        f'<article class="card incident"><header><span class="key{" none" if undecided else ""}">{key}</span>'
        f"<h3>{escape(what)}: {escape(_who(d.suspects), 200)}</h3>{tag}</header>"
        f'<p class="because">{escape(d.because)}</p>{charts}'
        f'<dl class="steps">{facts}</dl>{_groups(d.evidence)}{_evidence(d.evidence)}</article>'
    )


def _panel_words(panel: Panel | None) -> str:
    if panel is None:
        return ""
    s = panel.shape
    return f"{s.name}: {len(s.machines)} machines, {len(s.metrics)} metrics, {len(panel.at)} ticks"


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
        rows.append((escape(e.kind.removeprefix(METRIC).replace("_", " "), 100), escape(e.text), escape(numbers)))
    return _table("Evidence", ("Kind", "Observation", "Numbers"), rows, len(others) - NUM_EVIDENCE_SHOWN)


# --- charts -----------------------------------------------------------------------------------------------------


def _charts(item: ExplainedDiagnosis) -> str:
    d, panel = item.diagnosis, item.panel
    cards: list[tuple[str, str]] = []
    by = None
    has_usual = False
    if panel is not None and len(panel.at):
        columns = [n for n, m in enumerate(panel.shape.machines) if any(_is(m, s) for s in d.suspects)]
        by = window(panel.at, panel.shape.interval_seconds, d.onset, d.detected_at)
        metrics = named_metrics(d.evidence, panel) or (chosen_metrics(panel, columns, d) if columns else [])
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
            by = window(at, float(np.median(np.diff(at))) if len(at) > 1 else 1.0, d.onset, d.detected_at)
        threshold = np.broadcast_to(np.asarray(item.score.threshold, dtype=np.float64), at.shape)
        chart, is_cut = score_chart(at, item.score.score.astype(np.float64), threshold, by)
        up_to = f", drawn up to {SCORE_OVER_THRESHOLD_MAX:g} thresholds" if is_cut else ""
        cards.append((f"Score and threshold of {', '.join(d.detectors)}{up_to}", chart))
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
    rows = [
        (f'<polyline class="suspect s{n}" points="1,6 21,6"/>', name) for n, name in enumerate(names[:NUM_LINES_MAX])
    ]
    if len(names) > NUM_LINES_MAX:
        rows.append(("", f"{len(names) - NUM_LINES_MAX} more suspects are not drawn"))
    if item.panel is not None:
        rows.append(('<rect class="peers" x="1" y="1" width="20" height="10"/>', "10 to 90 % of the peers"))
        rows.append(('<polyline class="median" points="1,6 21,6"/>', "their median"))
    if has_usual:
        whose = "it" if len(names) < 2 else names[0]
        rows.append(('<polyline class="usual" points="1,6 21,6"/>', f"where {whose} usually is among them"))
    if item.score is not None:
        rows.append(('<polyline class="threshold" points="1,6 21,6"/>', "threshold"))
    parts = "".join(f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{s}</svg>{escape(w, 200)}</li>' for s, w in rows)
    return f'<ul class="legend">{parts}</ul>'


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
svg .peers { fill: var(--lane); opacity: .3; }
svg .median { fill: none; stroke: var(--soft); stroke-width: 1.25; }
svg .usual { fill: none; stroke: var(--bad); stroke-width: 1; stroke-dasharray: 2 3; opacity: .8; }
svg .suspect { fill: none; stroke: var(--bad); stroke-width: 1.75; stroke-linejoin: round; }
svg .s1 { stroke: var(--accent); stroke-dasharray: 7 3; } svg .s2 { stroke: var(--good); stroke-dasharray: 2 3; }
svg .s3 { stroke: var(--ink); stroke-dasharray: 9 3 2 3; }
svg .threshold { fill: none; stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 6 4; }
.incident .chart { padding: 6px 0 0; }
h3.table { margin: 18px 0 4px; }
.incident > header h3 { overflow-wrap: anywhere; min-width: 0; flex: 1; }
.groups td:last-child { width: 55%; }
.incident td { overflow-wrap: anywhere; min-width: 90px; } .incident .steps { margin-top: 14px; }
"""
