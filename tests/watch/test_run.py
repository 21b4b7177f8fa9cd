"""What `rolecall watch` puts together: panels beside the engine, which never stop it."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import LeaseAcquired
from rolecall.core.rundir import RunDir
from rolecall.detector.base.observation import Observation
from rolecall.session.demo import demo_job
from rolecall.testing.synthetic_run import WALL_OFFSET, FakeFleet
from rolecall.watch import run as watching
from rolecall.watch.agents import observing_run
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


def _kept_after(fault: Callable[[FakeFleet], object], path: Path, *seconds: float) -> list[bool]:
    """Whether the learned state is there before the fault and each so many seconds after."""
    clock, fleet = FakeClock(), FakeFleet(seed=1)
    watcher = _watcher(path, clock)
    for o in fleet.run(15.0):
        watcher.observe(o)
    fault(fleet)
    for o in fleet.run(5.0):
        standing = watcher.observe(o)
    assert standing
    kept = [(path / watching.LEARNED_FILE).exists()]
    for later in seconds:
        clock.advance(later)
        for o in fleet.run(1.0):
            watcher.observe(o)
        kept.append((path / watching.LEARNED_FILE).exists())
    return kept


def test_what_was_learned_is_kept_while_a_fault_stands_that_stalls_no_others(tmp_path: Path) -> None:
    def lose_an_agent(fleet: FakeFleet) -> None:
        fleet.unreachable["node-rollout-1"] = fleet.now + WALL_OFFSET, "connection refused"

    assert _kept_after(lose_an_agent, tmp_path, watching.KEEP_SECONDS) == [False, True]


def test_what_was_learned_is_kept_after_a_while_if_the_fault_stalls_others(tmp_path: Path) -> None:
    seconds = watching.KEEP_SECONDS, watching.KEEP_STALLED_SECONDS
    assert _kept_after(lambda fleet: fleet.kill("rollout/2"), tmp_path, *seconds) == [False, False, True]


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


REPLACES: dict[str, Any] = {"recovery": {"mode": "act"}, "roles": ["rollout"], "actuator": {"kind": "processes"}}


@pytest.mark.parametrize(
    ("file", "approve", "modes"),
    [
        ({}, False, ("observe", "observe")),
        ({"orphans": {}}, False, ("observe", "observe")),
        ({"orphans": {"mode": "act"}}, False, ("observe", "act")),
        ({**REPLACES, "orphans": {}}, False, ("act", "act")),
        ({**REPLACES, "orphans": {"mode": "observe"}}, False, ("act", "observe")),
        ({**REPLACES, "recovery": {"mode": "observe"}, "orphans": {"mode": "act"}}, False, ("observe", "act")),
        ({**REPLACES, "orphans": {}}, True, ("approve", "approve")),
        ({**REPLACES, "orphans": {"mode": "act"}}, True, ("approve", "approve")),
        ({**REPLACES, "orphans": {"mode": "observe"}}, True, ("approve", "observe")),
    ],
)
def test_replicas_and_orphans_have_the_modes_of_the_watch_file(
    tmp_path: Path, file: dict[str, Any], approve: bool, modes: tuple[str, str]
) -> None:
    run, stop = (
        observing_run(tmp_path, "job", {"n": "http://127.0.0.1:9"}, watched=parse_watched(file)),
        threading.Event(),
    )
    watching.watch_run(run, approve=approve, stop=stop, show=lambda _: stop.set())
    with closing(Journal(run.database_url, create=False)) as journal:
        acquired = journal.last(EventKind.LEASE_ACQUIRED)
    assert acquired is not None
    told = acquired.as_(LeaseAcquired)
    assert (told.mode, told.orphans_mode) == modes


@pytest.mark.parametrize(("only_job", "warned"), [("4711", True), ("all", False), ("", False)])
def test_a_watch_of_one_job_says_that_it_ends_no_orphans(
    only_job: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, stop = parse_watched({"orphans": {"mode": "act"}}), threading.Event()
    run = observing_run(tmp_path, "job", {"n": "http://127.0.0.1:9"}, watched=file)
    watching.watch_run(run, stop=stop, show=lambda _: stop.set(), only_job=only_job)
    assert ("orphans belong to no job: with --job 4711 none is seen" in caplog.text) is warned
