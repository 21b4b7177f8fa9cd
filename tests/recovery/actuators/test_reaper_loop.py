"""The whole way of an orphan's incident in the recovery loop: planned, ended by one call, seen to be gone, closed."""

from pathlib import Path

import pytest

from rolecall.core.config.actuators import ReaperConfig
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallStarted
from rolecall.detector.base.observation import Observation
from rolecall.recovery.actuators.external import ExternalActuator
from rolecall.recovery.actuators.targets.reaper import Reaper
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.recovery.loop import Watch
from rolecall.testing.recovery_world import FakeDetector, FakeSource
from tests.recovery.actuators.test_external import FakeTarget
from tests.recovery.actuators.test_reaper import DIAGNOSIS
from tests.recovery.world import World
from tests.support import eventually


class OrphanDetector(FakeDetector):
    """Reports the orphan as long as it is there."""

    there = True

    def observe(self, observation: Observation) -> list[Diagnosis]:
        del observation
        return [DIAGNOSIS] if self.there else []


def watched(
    world: World, program: tuple[str, ...], mode: str = "act"
) -> tuple[Watch, OrphanDetector, ExternalActuator]:
    detector = OrphanDetector(world.runtime)
    config = RecoveryConfig(mode=mode, verification_timeout_seconds=20.0)  # type: ignore[arg-type]
    reaper = Reaper(ReaperConfig(program=program, grace_seconds=0.0))
    actuator = ExternalActuator(FakeTarget(), world.journal, list, world.clock, deadline_seconds=60.0, reaper=reaper)
    watch = Watch(
        world.journal, FakeSource(world.clock), detector, actuator, config, world.notifier, world.clock, "host:1:1"
    )
    return watch, detector, actuator


def calls(world: World) -> list[str]:
    return [e.as_(CallStarted).call for e in world.journal.events(kinds=[EventKind.CALL_STARTED])]


def ticks_until(world: World, watch: Watch, kind: EventKind) -> None:
    def seen() -> bool:
        world.clock.advance(0.25)
        watch.tick()
        return bool(world.events(kind))

    eventually(seen, f"{kind}: {world.story()}")


def test_it_is_ended_once_and_the_incident_closes_when_it_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch, detector, actuator = watched(world, ("/bin/echo",))
    try:
        ticks_until(world, watch, EventKind.ACTION_DONE)
        world.run(3.0, watch)
        assert world.only().outcome is None, "its agent still sees it"
        detector.there = False
        world.until(world.all_closed, watch)
    finally:
        actuator.close()
    assert world.only().outcome is IncidentOutcome.RESOLVED
    assert calls(world) == ["/bin/echo node end 40 --start-ticks 400 --orphan"]
    assert not world.events(EventKind.ONCALL_PAGED)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/echo"], ids=["refused", "without effect"])
def test_one_that_does_not_end_is_for_on_call(tmp_path: Path, program: str) -> None:
    world = World(tmp_path)
    watch, _, actuator = watched(world, (program,))
    try:
        ticks_until(world, watch, EventKind.ACTION_FAILED)
        world.until(lambda: world.events(EventKind.ONCALL_PAGED), watch)
        world.run(60.0, watch)
    finally:
        actuator.close()
    assert len(calls(world)) == 1, "it is not tried again"
    (paged,) = world.events(EventKind.ONCALL_PAGED)
    assert DIAGNOSIS.advice in str(paged.payload.to_body()["because"])


def test_in_mode_approve_nothing_is_called_before_the_approval(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch, _, actuator = watched(world, ("/bin/echo",), "approve")
    try:
        ticks_until(world, watch, EventKind.PLAN_PROPOSED)
        world.run(30.0, watch)
    finally:
        actuator.close()
    assert calls(world) == [] and world.only().outcome is None
