"""Everything that one incident's page shows, made once for each state of it and kept for all who look.

A closed incident changes no more: what was made of it stands until the page's memory is needed for others.
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
from rolecall.dashboards.pages.incidents.timeline import IncidentTimeline, build_timeline, story_of
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
from rolecall.dashboards.pages.incidents.what_if import Margin, WhatIf, asked, margins, what_if
from rolecall.dashboards.settings import Settings
from rolecall.detector.base.findings import COLLAPSE

KEPT_MAX = 32
"""Incidents whose pages are kept: a window takes some megabytes."""
SETTLED_SECONDS = 120.0
"""So long after its close an incident may still get evidence; then nothing of it is read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPageModel:
    material: IncidentPageInputs
    head: IncidentHeader
    timeline: IncidentTimeline
    signals: Signals
    run: tuple[Signal, ...]
    """The run's own pace through all of it; of a collapse, what became of the policy as well."""
    findings: tuple[FindingSection, ...]
    collected_evidence: tuple[CollectedEvidenceSection, ...]
    plan_sections: tuple[PlanSection, ...]
    recovery_section: RecoverySection
    cost: IncidentCost | None
    what_if: WhatIf | None
    margins: tuple[Margin, ...]


def whole(m: IncidentPageInputs, signals: Signals | None = None) -> IncidentPageModel:
    """`signals`: those of a Prometheus server, in place of the window's. Pure."""
    story = story_of(m)
    question = asked(m)
    if signals is None:
        signals = signals_of(m)
    return IncidentPageModel(
        material=m,
        head=head(m, story),
        timeline=build_timeline(m, story),
        signals=signals,
        run=_of_the_run(m),
        findings=findings(m),
        collected_evidence=collected_evidence(m),
        plan_sections=plan_sections(m),
        recovery_section=recovery_section(m, story),
        cost=cost(m, story, signals.gpus_per_process),
        what_if=what_if(question) if question is not None else None,
        margins=margins(m.incident.diagnosis) if m.incident else (),
    )


def _of_the_run(m: IncidentPageInputs) -> tuple[Signal, ...]:
    pace = of_commits(m.around)
    collapsed = m.incident is not None and COLLAPSE in m.incident.diagnosis.detectors
    return (*(of_the_policy(m.around) if collapsed else ()), *((pace,) if pace else ()))


def _same_signals(before: IncidentPageModel, m: IncidentPageInputs) -> bool:
    """Whether nothing new can be drawn: they depend on window and diagnosis alone, and cost most of a page."""
    then, now = before.material.incident, m.incident
    same = then is not None and now is not None and then.diagnosis == now.diagnosis
    return same and bool(before.signals.signals) and before.material.window is not None


def signals_of(m: IncidentPageInputs) -> Signals:
    if m.incident is None:
        return Signals(missing="the diagnosis cannot be read")
    if m.window is None:
        return Signals(missing="no window is stored with this incident")
    return from_window(m.window, m.incident.diagnosis)


@dataclass
class IncidentPageCache:
    """One a process and journal. Thread-safe: two who look at once may both read, and nobody waits."""

    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[str, tuple[tuple[object, ...], IncidentPageModel]] = field(default_factory=OrderedDict)
    _asked: dict[str, Signals] = field(default_factory=dict)

    def take(self, r: Reader, look: JournalSnapshot, incident_id: str) -> IncidentPageModel:
        """Raises JournalError: the journal cannot be read now, and nothing was kept."""
        now = r.now()
        state = self._state(look, incident_id, now)
        with self._lock:
            before = self._kept.get(incident_id)
            if before is not None:
                self._kept.move_to_end(incident_id)
        if before is not None and before[0] == state and not before[1].material.is_open:
            return before[1]
        if before is not None and before[0] == state:
            return whole(replace(before[1].material, now=now), before[1].signals)
        kept = before[1] if before is not None else None
        with r.journal() as journal:
            window = kept.material.window if kept is not None else None
            material = read(journal, look.book, incident_id, r.settings.run, now, window)
        made = whole(material, kept.signals if kept is not None and _same_signals(kept, material) else None)
        if not made.signals.signals:
            made = self._with_prometheus(made, r.settings)
        with self._lock:
            self._kept[incident_id] = (state, made)
            while len(self._kept) > KEPT_MAX:
                gone, _ = self._kept.popitem(last=False)
                self._asked.pop(gone, None)
        return made

    def _state(self, look: JournalSnapshot, incident_id: str, now: float) -> tuple[object, ...]:
        """What it depends on: while it can change, every new look."""
        incident = look.book.incidents.get(incident_id)
        settled = incident is not None and incident.closed_at is not None and now - incident.closed_at > SETTLED_SECONDS
        return (incident, incident_id in look.book.broken, None if settled else look.version)

    def _with_prometheus(self, made: IncidentPageModel, settings: Settings) -> IncidentPageModel:
        m = made.material
        if not settings.prometheus_url or m.incident is None:
            return made
        key = m.incident_id
        found = self._asked.get(key)
        if found is None:
            # Once: an open incident is drawn every few seconds, and a server that is away must not hold it up again.
            axis = made.timeline.around or made.timeline.whole
            found = from_prometheus(
                settings.prometheus_url, settings.prometheus_authorization, m.incident.diagnosis, axis, self.clock
            )
            self._asked[key] = found
        if found.signals:
            return whole(m, found)
        return replace(made, signals=replace(made.signals, missing=f"{made.signals.missing}; {found.missing}"))
