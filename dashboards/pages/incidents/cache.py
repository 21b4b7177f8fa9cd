"""Page model of each incident, computed once per state and shared by all sessions.

A closed incident does not change, so its model stays cached until it is evicted.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from rolecall.core.clock import Clock
from rolecall.dashboards.data.reader import JournalSnapshot, Reader
from rolecall.dashboards.pages.incidents.cost import IncidentCost, cost
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs, read
from rolecall.dashboards.pages.incidents.prometheus import from_prometheus
from rolecall.dashboards.pages.incidents.signals import Signal, Signals, from_window, of_commits, of_the_policy
from rolecall.dashboards.pages.incidents.timeline import IncidentTimeline, build_timeline, incident_summary
from rolecall.dashboards.pages.incidents.view import (
    CollectedEvidenceSection,
    FindingSection,
    IncidentHeader,
    PlanSection,
    RecoverySection,
    collected_evidence,
    findings,
    head,
    plan_sections,
    recovery_section,
)
from rolecall.dashboards.pages.incidents.what_if import Margin, WhatIf, decision_inputs, margins, what_if
from rolecall.dashboards.settings import Settings
from rolecall.detector.base.findings import COLLAPSE

KEPT_MAX = 32
"""Cached incidents; a telemetry window takes some megabytes."""
SETTLED_SECONDS = 120.0
"""Evidence may still arrive this long after the close; then the incident is not read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPageModel:
    material: IncidentPageInputs
    head: IncidentHeader
    timeline: IncidentTimeline
    signals: Signals
    run: tuple[Signal, ...]
    """Signals of the whole run: step times, and policy health for a collapse."""
    findings: tuple[FindingSection, ...]
    collected_evidence: tuple[CollectedEvidenceSection, ...]
    plan_sections: tuple[PlanSection, ...]
    recovery_section: RecoverySection
    cost: IncidentCost | None
    what_if: WhatIf | None
    margins: tuple[Margin, ...]


def page_model(m: IncidentPageInputs, signals: Signals | None = None) -> IncidentPageModel:
    """`signals`: from Prometheus, instead of the stored window. Pure."""
    summary = incident_summary(m)
    inputs = decision_inputs(m)
    if signals is None:
        signals = signals_of(m)
    return IncidentPageModel(
        material=m,
        head=head(m, summary),
        timeline=build_timeline(m, summary),
        signals=signals,
        run=_of_the_run(m),
        findings=findings(m),
        collected_evidence=collected_evidence(m),
        plan_sections=plan_sections(m),
        recovery_section=recovery_section(m, summary),
        cost=cost(m, summary, signals.gpus_per_process),
        what_if=what_if(inputs) if inputs is not None else None,
        margins=margins(m.incident.diagnosis) if m.incident else (),
    )


def _of_the_run(m: IncidentPageInputs) -> tuple[Signal, ...]:
    pace = of_commits(m.around)
    collapsed = m.incident is not None and COLLAPSE in m.incident.diagnosis.detectors
    return (*(of_the_policy(m.around) if collapsed else ()), *((pace,) if pace else ()))


def _same_signals(before: IncidentPageModel, m: IncidentPageInputs) -> bool:
    """Whether the signals are unchanged: they depend on window and diagnosis only, and are the most expensive part."""
    then, now = before.material.incident, m.incident
    same = then is not None and now is not None and then.diagnosis == now.diagnosis
    return same and bool(before.signals.signals) and before.material.window is not None


def signals_of(m: IncidentPageInputs) -> Signals:
    if m.incident is None:
        return Signals(missing="the diagnosis cannot be read")
    if m.window is None:
        return Signals(missing="no telemetry window is stored with this incident")
    return from_window(m.window, m.incident.diagnosis)


@dataclass
class IncidentPageCache:
    """One per process and journal. Thread-safe; concurrent calls may compute the same model, but never wait."""

    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[str, tuple[tuple[object, ...], IncidentPageModel]] = field(default_factory=OrderedDict)
    _prometheus: dict[str, Signals] = field(default_factory=dict)

    def get(self, r: Reader, snapshot: JournalSnapshot, incident_id: str) -> IncidentPageModel:
        """Raises JournalError: the journal is not readable and nothing is cached."""
        now = r.now()
        state = self._state(snapshot, incident_id, now)
        with self._lock:
            before = self._kept.get(incident_id)
            if before is not None:
                self._kept.move_to_end(incident_id)
        if before is not None and before[0] == state and not before[1].material.is_open:
            return before[1]
        if before is not None and before[0] == state:
            return page_model(replace(before[1].material, now=now), before[1].signals)
        kept = before[1] if before is not None else None
        with r.journal() as journal:
            window = kept.material.window if kept is not None else None
            material = read(journal, snapshot.projection, incident_id, r.settings.run, now, window)
        made = page_model(material, kept.signals if kept is not None and _same_signals(kept, material) else None)
        if not made.signals.signals:
            made = self._with_prometheus(made, r.settings)
        with self._lock:
            self._kept[incident_id] = (state, made)
            while len(self._kept) > KEPT_MAX:
                gone, _ = self._kept.popitem(last=False)
                self._prometheus.pop(gone, None)
        return made

    def _state(self, snapshot: JournalSnapshot, incident_id: str, now: float) -> tuple[object, ...]:
        """Cache key: while the incident can change, it includes the snapshot version."""
        incident = snapshot.projection.incidents.get(incident_id)
        settled = incident is not None and incident.closed_at is not None and now - incident.closed_at > SETTLED_SECONDS
        return (incident, incident_id in snapshot.projection.broken, None if settled else snapshot.version)

    def _with_prometheus(self, made: IncidentPageModel, settings: Settings) -> IncidentPageModel:
        m = made.material
        if not settings.prometheus_url or m.incident is None:
            return made
        key = m.incident_id
        found = self._prometheus.get(key)
        if found is None:
            # Once per incident: the page of an open one refreshes every few seconds and must not wait for the server
            # again.
            axis = made.timeline.around or made.timeline.whole
            found = from_prometheus(
                settings.prometheus_url, settings.prometheus_authorization, m.incident.diagnosis, axis, self.clock
            )
            self._prometheus[key] = found
        if found.signals:
            return page_model(m, found)
        return replace(made, signals=replace(made.signals, missing=f"{made.signals.missing}; {found.missing}"))
