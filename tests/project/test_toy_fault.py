"""A new class of fault is one row and one stage: both are here, and nothing else in rolecall knows of them.

The toy is a memory leak: a process whose resident memory passes a limit. It is followed from the samples through
detection, evidence collection, recovery policy, incident page and report.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Evidence, Finding
from rolecall.core.faults import (
    FAULTS,
    DetectionChannel,
    EvidenceKind,
    FaultClass,
    FaultSpec,
    Remedy,
    SuppressionScope,
)
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import IncidentOpened
from rolecall.core.rundir import RunDir
from rolecall.core.text import plain
from rolecall.dashboards.pages.accounting.statistics import evidence_of, precision_summary
from rolecall.dashboards.pages.incidents import signals, view
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import STAGES, LiveDetector
from rolecall.detector.live.processes import finding
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.reports.html import render_html
from rolecall.reports.report import write_report
from rolecall.testing.faults import fault_class
from rolecall.testing.synthetic_run import FakeFleet
from rolecall.watch.evidence.requests import select_evidence
from tests.dashboards.incident_cases import material_of, said
from tests.recovery.world import World

GIB = 1 << 30
LIMIT_BYTES = 8 * GIB
LEAK = FaultSpec(
    description="a process uses ever more memory",
    advice="replace the replica, and look for what it keeps",
    remedy=Remedy.REPLACE,
    suppresses={FaultClass.SLOW: SuppressionScope.ANY},
    evidence=frozenset({EvidenceKind.STACKS}),
    signals=("memory", "work"),
    channel=DetectionChannel.WRONG,
)


class MemoryLeakStage(Stage):
    name = "memory_leak"

    def evaluate(self, tick: Tick) -> list[Finding]:
        found = []
        for s in tick.fleet.current():
            used = s.sample.rss_bytes if s.sample and not s.gone else 0
            if used > LIMIT_BYTES:
                because = f"{s.name()} leaks memory: {used / GIB:.1f} GiB resident (limit {LIMIT_BYTES / GIB:.1f} GiB)"
                evidence = Evidence(kind="self_memory", text=f"{used / GIB:.1f} GiB", values={"rss_bytes": float(used)})
                found.append(
                    finding(
                        self.name,
                        [s],
                        FaultClass("memory_leak"),
                        onset=tick.now,
                        now=tick.now,
                        confidence=0.9,
                        because=because,
                        evidence=(evidence,),
                    )
                )
        return found


@pytest.fixture(autouse=True)
def leak() -> Iterator[FaultClass]:
    with fault_class("memory_leak", LEAK) as made:
        yield made


def _leaking(o: Observation, replica: str, used: int) -> Observation:
    def grown(p: Any) -> Any:
        return replace(p, rss_bytes=used if p.replica == replica else GIB)

    return replace(o, batches=tuple(replace(b, processes=tuple(map(grown, b.processes))) for b in o.batches))


def _detected() -> tuple[LiveDetector, list[Diagnosis]]:
    fleet, detector = FakeFleet(seed=7), LiveDetector(DetectorConfig(), stages=(*STAGES, MemoryLeakStage))
    standing: list[Diagnosis] = []
    for number, o in enumerate(fleet.run(12.0)):
        standing = detector.observe(_leaking(o, "rollout/1", GIB + number * GIB // 4))
    return detector, standing


def test_the_class_is_gone_with_its_row() -> None:
    with fault_class("toy", LEAK) as toy:
        assert FaultClass("toy") is toy and toy.spec is LEAK
    with pytest.raises(ValueError, match="toy"):
        FaultClass("toy")


def test_detection_names_the_process_and_evidence_is_asked_for(leak: FaultClass) -> None:
    detector, standing = _detected()
    (d,) = standing
    assert d.fault_class is leak and d.advice == LEAK.advice
    assert d.because.startswith("rollout/1 (node-rollout-1, pid ") and "leaks memory: " in d.because
    assert Diagnosis.from_dict(json.loads(json.dumps(d.to_dict()))) == d
    asked = {(r.kind, r.suspected) for r in select_evidence(d, detector.processes())}
    assert asked == {(EvidenceKind.STACKS, True), (EvidenceKind.STACKS, False)}


class SlowEverybody(Stage):
    """Says of every process that leaks that it is slow."""

    name = "slow_everybody"

    def evaluate(self, tick: Tick) -> list[Finding]:
        return [replace(f, fault_class=FaultClass.SLOW) for f in tick.findings]


class Deaf(MemoryLeakStage):
    """A leak found by a stage that keeps the one after it silent."""

    suppresses = frozenset({"slow_everybody"})


@pytest.mark.parametrize(
    ("stages", "others"),
    [
        pytest.param((MemoryLeakStage, SlowEverybody), ["slow"], id="neither"),
        pytest.param((Deaf, SlowEverybody), [], id="its stage suppresses the other stage"),
    ],
)
def test_suppression(leak: FaultClass, stages: Any, others: list[str]) -> None:
    """By the stage for a whole stage, by the class for findings about the same process."""
    FAULTS[leak] = replace(LEAK, suppresses={}, stalls_others=True)
    detector = LiveDetector(DetectorConfig(), stages=stages)
    standing: list[Diagnosis] = []
    for o in FakeFleet(seed=7).run(2.0):
        standing = detector.observe(_leaking(o, "rollout/1", 9 * GIB))
    assert [d.fault_class for d in standing] == [leak, *others]
    FAULTS[leak] = LEAK
    for o in FakeFleet(seed=7).run(2.0):
        standing = detector.observe(_leaking(o, "rollout/1", 9 * GIB))
    assert [d.fault_class for d in standing] == [leak]


@pytest.mark.parametrize("remedy", list(Remedy))
def test_recovery_does_what_the_row_says(tmp_path: Path, leak: FaultClass, remedy: Remedy) -> None:
    FAULTS[leak] = replace(LEAK, remedy=remedy)
    world, (d,) = World(tmp_path), _detected()[1]
    watch = world.watch()
    world.detector.extra = [d]
    world.run(20.0, watch)
    taken = {Remedy.REPLACE: [("rollout/1", 1)], Remedy.MOVE: [("rollout/1", 1)]}.get(remedy, [])
    assert world.runtime.replaced == taken
    assert (world.journal.flag("stop") is not None) is (remedy is Remedy.STOP)
    if remedy is Remedy.PAGE:
        assert "no known action resolves it" in world.notifier.messages[0].because
    if remedy is Remedy.REPLACE:
        assert world.only().outcome is IncidentOutcome.RESOLVED


def test_the_incident_page_draws_its_signals_and_its_advice(tmp_path: Path, leak: FaultClass) -> None:
    detector, (d,) = _detected()
    world = World(tmp_path)
    said(world, d)
    page = material_of(world)
    assert page.incident is not None
    assert ("Fault class", "memory leak") in view.head(page, None).facts
    (reported,) = view.findings(page)
    assert reported.advice == LEAK.advice and reported.because == plain(d.because)
    drawn = signals.from_window(detector.window(d.suspects), d)
    assert [s.key for s in drawn.signals] == ["memory", "work"] and not drawn.missing
    assert drawn.signals[0].lines[0].name.startswith("rollout/1")
    assert evidence_of(d) is DetectionChannel.WRONG
    assert [p.name for p in precision_summary([page.incident]).by_class] == ["memory_leak"]


def test_the_report_tells_it(fake_run: RunDir, leak: FaultClass) -> None:
    (d,) = _detected()[1]
    journal = Journal(fake_run.database_url)
    journal.append(IncidentOpened(diagnosis=d, window="observations"), incident_id="inc-9-rollout-1")
    journal.close()
    report = write_report(fake_run)
    (reported,) = [i for i in report["incidents"] if i["incident_id"] == "inc-9-rollout-1"]
    assert (reported["fault_class"], reported["advice"]) == ("memory_leak", LEAK.advice)
    assert "memory_leak" in render_html(report)


def test_every_class_has_a_row_whose_names_exist() -> None:
    assert set(FaultClass) < set(FAULTS)
    for spec in FAULTS.values():
        assert spec.description and spec.advice
        assert set(spec.signals) <= set(signals.BY_KEY)
        assert spec.threshold is None or spec.threshold.setting in DetectorConfig.model_fields


def test_stages_suppress_stages_that_come_after_them() -> None:
    names = [make().name for make in STAGES]
    assert len(set(names)) == len(names)
    for number, make in enumerate(STAGES):
        assert make().suppresses <= set(names[number + 1 :])
