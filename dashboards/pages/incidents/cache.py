"""Page model of each incident, computed once per state and shared by all sessions.

A closed incident does not change, so its model stays cached until it is evicted. For incidents whose telemetry window
has no series of suspects and peers, a Prometheus server is asked for them, again while the answer can change.

The cost of an incident comes from the journal:

replica-seconds   each affected replica from the onset (or the injection, if known) until its replacement serves; while
                  a trainer is lost also every other trainer, which waits until the interrupted step is committed;
                  a rollout that lent its node, until it serves again
GPU-seconds       replica-seconds times the GPUs per process, if the stored window shows how many
tokens            of requests that left the affected replica; kept: continued elsewhere from where they were
steps             interrupted: started again; rolled back: undone, because a trainer loaded an older checkpoint
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.run import RequestsReassigned
from rolecall.core.text import plain, seconds
from rolecall.dashboards.data.hardware import is_of_run
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents import view
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs, read
from rolecall.dashboards.pages.incidents.signals import (
    NUM_LINES_MAX,
    Point,
    Signal,
    SignalLine,
    Signals,
    SignalSpec,
    from_window,
    kinds_for,
    of_commits,
    of_the_policy,
    signal_of,
)
from rolecall.dashboards.pages.incidents.timeline import (
    IncidentTimeline,
    TimelineRange,
    build_timeline,
    incident_summary,
)
from rolecall.dashboards.pages.incidents.what_if import Margin, WhatIf, decision_inputs, margins, what_if
from rolecall.dashboards.settings import Settings
from rolecall.detector.base.findings import COLLAPSE
from rolecall.detector.sources.prometheus_api import (
    Client,
    PrometheusClientLimits,
    PrometheusResponseTooLarge,
    PrometheusUnavailable,
)
from rolecall.views.ettr import Loss, losses, waiting_trainers
from rolecall.views.incidents import IncidentSummary, MatchedIncidents, away_times

K = EventKind
TRAINER = "trainer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCost:
    replica_seconds: float
    gpu_seconds: float | None
    """None: no GPU was observed."""
    tokens_lost: int
    tokens_kept: int
    requests_reassigned: int
    steps_interrupted: int
    steps_undone: int
    is_final: bool
    """False: the run goes on, and the incident is open or a rollout that lent its node does not serve yet: the cost
    still grows."""
    how: tuple[str, ...]
    """How the replica-seconds add up, a line each; empty: no loss is known."""


def cost(
    material: IncidentPageInputs, summary: IncidentSummary | None, gpus_per_process: float = 0.0
) -> IncidentCost | None:
    """None: the incident cannot be summarized."""
    if summary is None:
        return None
    end = material.now
    if not material.is_open:
        closed_at = summary.incident.closed_at
        end = closed_at if closed_at is not None else material.events[-1].wall_at
    lost = losses(MatchedIncidents(summaries=(summary,)), end)
    loans = away_times(material.around)
    lenders = losses(MatchedIncidents(away=loans), material.now if material.ended_at is None else material.ended_at)
    waiting = waiting_trainers(lost, (name for name, _ in material.known if name.startswith(TRAINER)))
    replica_seconds = sum(loss.until - loss.since for loss in (*lost, *lenders)) + sum(s for _, s in waiting)
    during = [e for e in material.around if summary.began_at - 0.05 <= e.wall_at <= (summary.ends_at or float("inf"))]
    hit = {x.replica for x in (*lost, *lenders)}
    moved = [e.payload for e in during if isinstance(e.payload, RequestsReassigned) and e.payload.from_replica in hit]
    interrupted = sum(e.kind is K.STEP_INTERRUPTED for e in during)
    return IncidentCost(
        replica_seconds=replica_seconds,
        gpu_seconds=replica_seconds * gpus_per_process if gpus_per_process > 0 else None,
        tokens_lost=summary.tokens_lost,
        tokens_kept=summary.tokens_kept,
        requests_reassigned=sum(said.num_requests for said in moved),
        steps_interrupted=interrupted if any(replica.startswith(TRAINER) for replica in hit) else 0,
        steps_undone=summary.steps_lost,
        is_final=material.ended_at is not None
        or (not material.is_open and all(lent.until is not None for lent in loans)),
        how=tuple(_words(lost, lenders, waiting)),
    )


def _words(lost: list[Loss], lenders: list[Loss], waiting: list[tuple[str, float]]) -> list[str]:
    impaired = [f"{loss.replica} was impaired for {seconds(loss.until - loss.since)}" for loss in lost]
    idle = [f"{replica} waited for {seconds(s)} until the interrupted step was committed" for replica, s in waiting]
    away = [f"{x.replica}, which lent its node, did not serve for {seconds(x.until - x.since)}" for x in lenders]
    return [plain(text, 200) for text in (*impaired, *idle, *away)]


KEPT_MAX = 32
"""Cached incidents; a telemetry window takes some megabytes."""
SETTLED_SECONDS = 120.0
"""Evidence may still arrive this long after the close; then the incident is not read again."""
ASK_SECONDS, ASK_AGAIN_SECONDS = 60.0, 30.0
"""Interval of queries to Prometheus for an incident that is not settled, and after an answer without series. The page
refreshes every few seconds and must not wait for the server each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPageModel:
    material: IncidentPageInputs
    head: view.IncidentHeader
    timeline: IncidentTimeline
    signals: Signals
    run: tuple[Signal, ...]
    """Signals of the whole run: step times, and policy health for a collapse."""
    findings: tuple[view.FindingSection, ...]
    collected_evidence: tuple[view.CollectedEvidenceSection, ...]
    plan_sections: tuple[view.PlanSection, ...]
    recovery_section: view.RecoverySection
    cost: IncidentCost | None
    what_if: WhatIf | None
    margins: tuple[Margin, ...]


def page_model(material: IncidentPageInputs, signals: Signals | None = None) -> IncidentPageModel:
    """`signals`: of the stored window, if they are known. Pure."""
    summary = incident_summary(material)
    inputs = decision_inputs(material)
    if signals is None:
        signals = signals_of(material)
    pace = of_commits(material.around)
    collapsed = material.incident is not None and COLLAPSE in material.incident.diagnosis.detectors
    return IncidentPageModel(
        material=material,
        head=view.head(material, summary),
        timeline=build_timeline(material, summary),
        signals=signals,
        run=(*(of_the_policy(material.around) if collapsed else ()), *((pace,) if pace else ())),
        findings=view.findings(material),
        collected_evidence=view.collected_evidence(material),
        plan_sections=view.plan_sections(material),
        recovery_section=view.recovery_section(material, summary),
        cost=cost(material, summary, signals.gpus_per_process),
        what_if=what_if(inputs) if inputs is not None else None,
        margins=margins(material.incident.diagnosis) if material.incident else (),
    )


def _same_signals(before: IncidentPageModel, material: IncidentPageInputs) -> bool:
    """Whether the signals are unchanged: they depend on window and diagnosis only, and are the most expensive part."""
    then, now = before.material.incident, material.incident
    same = then is not None and now is not None and then.diagnosis == now.diagnosis
    return same and bool(before.signals.signals) and before.material.window is not None


def signals_of(material: IncidentPageInputs) -> Signals:
    if material.incident is None:
        return Signals(missing="the diagnosis cannot be read")
    if material.window is None:
        return Signals(missing="no telemetry window is stored with this incident")
    return from_window(material.window, material.incident.diagnosis)


@dataclass
class IncidentPageCache:
    """One per process and journal. Thread-safe; concurrent calls may compute the same model, but never wait."""

    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[str, tuple[tuple[object, ...], IncidentPageModel]] = field(default_factory=OrderedDict)
    _prometheus: dict[str, tuple[Signals, float]] = field(default_factory=dict)
    """And when to ask again, monotonic seconds."""

    def get(self, reader: Reader, snapshot: JournalSnapshot, incident_id: str) -> IncidentPageModel:
        """Raises JournalError: the journal is not readable and nothing is cached."""
        made = self._from_journal(reader, snapshot, incident_id)
        return made if made.signals.signals else self._with_prometheus(made, reader.settings)

    def _from_journal(self, reader: Reader, snapshot: JournalSnapshot, incident_id: str) -> IncidentPageModel:
        now = reader.now()
        with self._lock:
            before = self._kept.get(incident_id)
            if before is not None:
                self._kept.move_to_end(incident_id)
        grows = before is not None and before[1].cost is not None and not before[1].cost.is_final
        state = self._state(snapshot, incident_id, now, grows=grows)
        if before is not None and before[0] == state:
            if not before[1].material.is_open or before[1].material.ended_at is not None:
                return before[1]
            return page_model(replace(before[1].material, now=now), before[1].signals)
        kept = before[1] if before is not None else None
        with reader.journal() as journal:
            window = kept.material.window if kept is not None else None
            run, mode_of = reader.settings.run, snapshot.mode_of
            material = read(journal, snapshot.projection, incident_id, run, now, window, mode_of)
        made = page_model(material, kept.signals if kept is not None and _same_signals(kept, material) else None)
        with self._lock:
            self._kept[incident_id] = (state, made)
            while len(self._kept) > KEPT_MAX:
                gone, _ = self._kept.popitem(last=False)
                self._prometheus.pop(gone, None)
        return made

    def _state(self, snapshot: JournalSnapshot, incident_id: str, now: float, *, grows: bool) -> tuple[object, ...]:
        """Cache key: while the incident can change, or its cost grows, it includes the snapshot version."""
        incident = snapshot.projection.incidents.get(incident_id)
        settled = incident is not None and incident.closed_at is not None and now - incident.closed_at > SETTLED_SECONDS
        version = None if settled and not grows else snapshot.version
        return (incident, incident_id in snapshot.projection.broken, version)

    def _with_prometheus(self, made: IncidentPageModel, settings: Settings) -> IncidentPageModel:
        incident = made.material.incident
        if not settings.prometheus_url or incident is None:
            return made
        found, due = self._prometheus.get(incident.incident_id, (Signals(), -math.inf))
        if self.clock.monotonic() >= due:
            axis = made.timeline.around or made.timeline.whole
            answer = from_prometheus(settings, incident.diagnosis, axis, self.clock)
            settled = incident.closed_at is not None and self.clock.wall() - incident.closed_at > SETTLED_SECONDS
            wait = ASK_AGAIN_SECONDS if answer.missing else math.inf if settled else ASK_SECONDS
            found = answer if answer.signals or not found.signals else found
            self._prometheus[incident.incident_id] = found, self.clock.monotonic() + wait
        if found.signals:
            return replace(made, signals=found)
        return replace(made, signals=replace(made.signals, missing=f"{made.signals.missing}; {found.missing}"))


LIMITS = PrometheusClientLimits(answer_bytes_max=8 << 20, connect_seconds=2.0, answer_seconds=3.0, patience_seconds=2.0)
NUM_POINTS = 240
STEP_SECONDS_MIN = 1.0
WINDOW_STEPS = 4
"""Window of a rate in steps, and at least 20 s: four scrapes at a 5 s interval."""
WINDOW_SECONDS_MIN = 20.0
SPAN_SECONDS_MAX = 24 * 3600.0
"""Longest range; for longer incidents the first day."""


def from_prometheus(settings: Settings, diagnosis: Diagnosis, axis: TimelineRange, clock: Clock) -> Signals:
    """Signals of the suspects and of the other replicas of their roles in this run."""
    roles = sorted({s.role for s in diagnosis.suspects if s.role})
    names = roles or sorted({str(s.node) for s in diagnosis.suspects if s.node})
    if not names:
        return Signals(missing="the diagnosis names neither a role nor a node to query in Prometheus")
    try:
        client = Client(settings.prometheus_url, clock, authorization=settings.prometheus_authorization, limits=LIMITS)
    except ConfigError as e:
        return Signals(missing=plain(f"Prometheus: {e}", 300))
    selector = f"{'role' if roles else 'node'}=~{json.dumps('|'.join(map(_literal, names)), ensure_ascii=False)}"
    end = min(axis.end, axis.begin + SPAN_SECONDS_MAX, clock.wall())
    step = max(STEP_SECONDS_MIN, (end - axis.begin) / NUM_POINTS)
    window = f"{max(WINDOW_SECONDS_MIN, WINDOW_STEPS * step):.0f}s"
    drawn: list[Signal] = []
    missing = ""
    try:
        for kind in kinds_for(diagnosis):
            if kind.promql:
                expression = kind.promql.replace("$match", selector).replace("$window", window)
                found = [_read(x) for x in client.matrix(expression, axis.begin, end, step, lambda: False)]
                signal = _signal(kind, [x for x in found if is_of_run(x[0], settings.run_id)], diagnosis)
                drawn += [signal] if signal else []
    except (PrometheusUnavailable, PrometheusResponseTooLarge, UnreadableInput) as e:
        missing = f"Prometheus at {client.where} query failed: {e}"
    finally:
        client.close()
    if not drawn and not missing:
        missing = f"Prometheus at {client.where} has no series of the suspects for that time"
    return Signals(
        signals=tuple(drawn), missing=plain(missing, 300), source=f"Prometheus at {plain(client.where, 100)}"
    )


def _literal(name: str) -> str:
    """A name, escaped for an RE2 regular expression."""
    return "".join(c if c.isalnum() or c in "_-/" else f"\\x{{{ord(c):x}}}" for c in name)


def _signal(
    kind: SignalSpec, result: Sequence[tuple[Mapping[str, str], list[Point]]], diagnosis: Diagnosis
) -> Signal | None:
    lines, peers = [], []
    for labels, points in result:
        if not points:
            continue
        if any(_is(labels, s) for s in diagnosis.suspects):
            name = f"{labels.get('replica') or labels.get('node', '')} ({labels.get('node', '')})"
            lines.append(SignalLine(name=plain(name, 100), points=tuple(points)))
        else:
            peers.append(points)
    return signal_of(kind, diagnosis, tuple(lines[:NUM_LINES_MAX]), peers) if lines else None


def _read(series: Any) -> tuple[Mapping[str, str], list[Point]]:
    try:
        labels = {str(k): str(v) for k, v in series["metric"].items()}
        points = [(float(t), float(v)) for t, v in series["values"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}, []
    return labels, [(t, v) for t, v in points if math.isfinite(v)]


def _is(labels: Mapping[str, str], suspect: Suspect) -> bool:
    """Labels do not contain incarnations, so a replica's line continues with its replacement."""
    if suspect.replica:
        return labels.get("replica") == suspect.replica and (
            suspect.rank is None or labels.get("rank", str(suspect.rank)) == str(suspect.rank)
        )
    return labels.get("node") == suspect.node
