"""What pulled evidence settles: a tie while it stands, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import FaultClass as F
from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.ids import NodeId
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.evidence.pulled_evidence import PulledEvidenceStage
from rolecall.detector.live.stages.stage import Tick
from tests.detector.scenario import Scenario

TIE = Path(__file__).parents[2] / "scenarios" / "detect_reduce_tie.toml"


def found(fault: F, *replicas: str, confidence: float = 0.9) -> Finding:
    return Finding(
        detector="flight_recorder",
        suspects=tuple(
            Suspect(node=NodeId(f"node-{r}".replace("/", "-")), role="trainer", replica=r, rank=0, incarnation=1)
            for r in replicas
        ),
        fault_class=fault,
        onset=10.0,
        detected_at=12.0,
        confidence=confidence,
        because=f"{', '.join(replicas)}: {fault}",
    )


def tick(fresh: list[Finding], standing: list[Finding]) -> Tick:
    observation = Observation(wall_at=20.0, pulled_findings=tuple(fresh))
    return Tick(
        observation=observation,
        fleet=MonitoredProcesses(),
        config=DetectorConfig(),
        expected_roles={},
        now=20.0,
        findings=standing,
    )


ALL = found(F.CANNOT_TELL, "trainer/0", "trainer/1", "trainer/2")
ONE = found(F.HANG, "trainer/1")


@pytest.mark.parametrize(
    ("fresh", "standing", "kept"),
    [
        pytest.param([ONE], [ALL], [ONE], id="one of a tie"),
        pytest.param([ONE], [], [], id="nothing stands that it would settle"),
        pytest.param([ONE], [found(F.HANG, "trainer/0")], [], id="somebody is named already"),
        pytest.param([found(F.HANG, "trainer/3")], [ALL], [], id="one that is no part of the tie"),
        pytest.param([replace(ALL, fault_class=F.HANG)], [ALL], [], id="all of the tie: that names nobody"),
        pytest.param([found(F.HANG, "trainer/1", confidence=0.6)], [ALL], [], id="too weak"),
        pytest.param([found(F.USER_CODE, "trainer/1")], [ALL], [], id="no class that fusion ends a tie for"),
        pytest.param([replace(ONE, confidence=0.75), ONE], [ALL], [ONE], id="the surer of two about the same one"),
        pytest.param([replace(ONE, suspects=())], [ALL], [], id="nobody is named"),
    ],
)
def test_pulled_evidence_settles_a_standing_tie(
    fresh: list[Finding], standing: list[Finding], kept: list[Finding]
) -> None:
    stage = PulledEvidenceStage()
    assert stage.evaluate(tick(fresh, standing)) == kept
    stage.state = list(fresh)
    assert stage.evaluate(tick([], standing)) == kept


def test_a_tie_becomes_an_accusation_for_as_long_as_it_stands() -> None:
    tie = Scenario(TIE)
    tie.run()
    *_, last = tie.observations
    detector = tie.detector
    assert [d.fault_class for d in detector.observe(replace(last, wall_at=last.wall_at + 0.1))] == [F.CANNOT_TELL]
    (reported,) = detector.observe(replace(last, wall_at=last.wall_at + 0.2, pulled_findings=(ONE,)))
    assert (reported.key, reported.because) == ("hang:trainer/1#1", ONE.because)
    (again,) = LiveDetector.resumed(tie.config, {"trainer": 2, "rollout": 3}, detector.state()).observe(
        replace(last, wall_at=last.wall_at + 0.3)
    )
    assert again == reported, "a restarted watch goes on with it"
    for name in ("trainer/0", "trainer/1"):
        tie.apply(40.2, {"replica": name, "set": {"phase": "compute", "collectives": 2.0, "progress": 4.0}})
    for n in range(2, 12):
        for p in tie.processes.values():
            p.advance(0.2, 40 + n / 5)
        tie.observe(40 + n / 5)
    assert detector.observe(tie.observations[-1]) == [], "they work again, and what was seen is over"
