"""What `rolecall watch` puts together: panels beside the engine, which never stop it."""

from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.rundir import RunDir
from rolecall.detector.base.observation import Observation
from rolecall.session.demo import demo_job
from rolecall.testing.synthetic_run import FakeFleet
from rolecall.watch import run as watching
from tests.full_disk import small_disk


class Panels:
    """Says once that rollout/1 changed, or fails at every look."""

    def __init__(self, error: str = "") -> None:
        self.error, self.said = error, False

    def findings(self, observation: Observation) -> tuple[Finding, ...]:
        if self.error:
            raise ValueError(self.error)
        if self.said:
            return ()
        self.said = True
        at = observation.wall_at
        who = Suspect(node=NodeId("node-rollout-1"), role="rollout", replica="rollout/1", rank=0, incarnation=1)
        return (
            Finding(
                detector="panel:toy",
                suspects=(who,),
                fault_class=FaultClass.SLOW,
                onset=at,
                detected_at=at,
                confidence=0.8,
                because="its metrics",
            ),
        )


def _watcher(path: Path, clock: FakeClock) -> watching._PersistentDetector:
    return watching._PersistentDetector(RunDir(path), demo_job(seed=1, num_steps=1, injection_allowed=False), clock)


def test_panel_findings_reach_the_engine_and_learning_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.detector.live.stages.evidence.panels.AFTERMATH_SECONDS", 0.0)
    clock, fleet = FakeClock(), FakeFleet(seed=1)
    watcher = _watcher(tmp_path, clock)
    for o in fleet.run(15.0):
        assert not watcher.observe(o)
    watcher._panels = Panels()  # type: ignore[assignment]
    clock.advance(watching.KEEP_SECONDS)
    standing = [watcher.observe(o) for o in fleet.run(2.0)]
    assert [d.because for d in standing[-1]] == ["its metrics"]
    assert "its metrics" in (tmp_path / watching.LEARNED_FILE).read_text()


def test_a_full_disk_leaves_the_engine_its_sight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, fleet = FakeClock(), FakeFleet(seed=1)
    with small_disk(tmp_path / "disk") as disk:
        watcher = _watcher(disk.path, clock)
        for o in fleet.run(15.0):
            watcher.observe(o)
        disk.fill()
        clock.advance(watching.KEEP_SECONDS)
        for o in fleet.run(3.0):
            watcher.observe(o)
        assert "No space left on device" in caplog.text
        assert not (disk.path / watching.LEARNED_FILE).exists()
        fleet.kill("rollout/2")
        reported = [d.key for o in fleet.run(1.0) for d in watcher.observe(o)]
        assert set(reported) == {"crash:rollout/2#1"}


def test_panels_that_fail_leave_the_engine_its_sight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = FakeFleet(seed=1)
    watcher = _watcher(tmp_path, FakeClock())
    for o in fleet.run(15.0):
        watcher.observe(o)
    watcher._panels = Panels(error="a row too many")  # type: ignore[assignment]
    fleet.kill("rollout/2")
    reported = [d.key for o in fleet.run(1.0) for d in watcher.observe(o)]
    assert set(reported) == {"crash:rollout/2#1"} and "a row too many" in caplog.text
