"""The wall clock of the watch's machine is set while it watches: the detectors find what they find otherwise, and when."""

import math
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.rundir import RunDir
from rolecall.detector.base.observation import Observation
from rolecall.session.demo import demo_job
from rolecall.watch.run import _PersistentDetector
from tests.detector.scenario import SAMPLE_SECONDS, WALL_OFFSET, Scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"
HOUR = 3600.0
Report = tuple[float, str, list[str], float, float | None]
"""(reported, class, suspects, onset, stood until) of a diagnosis, seconds of the scenario."""


class Watched:
    """The watch's detectors, on a clock that follows the scenario's. The watch restarts after `restarts_at` seconds."""

    def __init__(self, scenario: Scenario, folder: Path, restarts_at: float = math.inf) -> None:
        self.clock, self._folder, self._restarts_at = FakeClock(0.0, WALL_OFFSET), folder, restarts_at
        self._roles = scenario.spec.get("roles", {})
        self.detector = self._started()

    def _started(self) -> _PersistentDetector:
        job = demo_job(seed=1, num_steps=1, injection_allowed=False, settings=["detector.mask_proc_state=true"])
        return _PersistentDetector(RunDir(self._folder), job, self.clock, self._roles)

    def forget(self, replica: str, below_incarnation: int) -> None:
        self.detector.forget(replica, below_incarnation)

    def observe(self, observation: Observation) -> list[Diagnosis]:
        self.clock.advance(SAMPLE_SECONDS)
        if self.clock.monotonic() >= self._restarts_at:
            self.detector, self._restarts_at = self._started(), math.inf
        self.clock.set_wall(observation.wall_at - self.clock.wall())
        return list(self.detector.observe(observation))


def reports(name: str, folder: Path, *changes: dict[str, float], restarts_at: float = math.inf) -> list[Report]:
    folder.mkdir()
    scenario = Scenario(SCENARIOS / f"{name}.toml")
    scenario.spec["at"] += changes
    scenario.detector = Watched(scenario, folder, restarts_at)  # type: ignore[assignment]
    scenario.run()
    return [
        (at, d.fault_class, [s.replica or s.node for s in d.suspects], d.onset - WALL_OFFSET, until)
        for at, d, until in scenario.reported.values()
    ]


@pytest.mark.parametrize("seconds", [-HOUR, HOUR], ids=["back", "forward"])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("detect_wrong_numbers_twice", 10.0),
        ("detect_survivor_waits", 24.5),
        ("detect_partition_in_reduce", 19.0),
        ("detect_partition_in_reduce", 21.0),
        ("detect_two_kinds_of_user_code", 21.2),
        ("detect_step_tie", 4.0),
        ("detect_start_stopped", 25.0),
    ],
)
def test_the_same_faults_are_found_at_the_same_time(name: str, at: float, seconds: float, tmp_path: Path) -> None:
    expected = reports(name, tmp_path / "as ever")
    found = reports(name, tmp_path / "set", {"t": at, "set_clock": seconds})
    assert expected
    assert_the_same(found, expected, at, seconds)


@pytest.mark.parametrize("seconds", [-HOUR, HOUR], ids=["back", "forward"])
@pytest.mark.parametrize("name", ["detect_wrong_numbers_twice", "detect_survivor_waits", "detect_start_stopped"])
def test_a_watch_that_restarts_after_its_clock_was_set_goes_on_in_time(
    name: str, seconds: float, tmp_path: Path
) -> None:
    expected = reports(name, tmp_path / "as ever", restarts_at=19.0)
    found = reports(name, tmp_path / "set", {"t": 5.0, "set_clock": seconds}, restarts_at=19.0)
    assert expected
    assert_the_same(found, expected, 5.0, seconds)


def assert_the_same(found: list[Report], expected: list[Report], at: float, seconds: float) -> None:
    """But for the onsets after the clock was set."""
    assert [(f[1], f[2]) for f in found] == [(e[1], e[2]) for e in expected]
    for (reported, *_, onset, until), (usually, *_, began, over) in zip(found, expected, strict=True):
        assert reported == pytest.approx(usually, abs=0.3) and (until is None) == (over is None)
        assert onset == pytest.approx(began + (seconds if reported > at else 0.0), abs=1.5), "on the clock as it is"


def test_whether_a_process_of_then_still_runs_is_asked_on_the_clock_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(Scenario(SCENARIOS / "detect_step_tie.toml"), tmp_path)
    asked: list[float] = []
    monkeypatch.setattr(watched.detector._detector, "survives", lambda role, since: asked.append(since))
    for moved in (0.0, HOUR):
        watched.observe(Observation(wall_at=watched.clock.wall() + SAMPLE_SECONDS + moved))
        watched.detector.survives("trainer", 100.0 + moved)
    assert asked == [100.0, 100.0]
