"""The whole way of an orphan's incident in the recovery loop: planned, ended by one call, seen to be gone, closed."""

from pathlib import Path

import pytest

from rolecall.core.config.actuators import ReaperConfig
from rolecall.core.config.section import RecoveryMode
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import CommandRefused
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallStarted, LeaseAcquired, PlanCreated
from rolecall.dashboards.pages.operations.plans import limits_of
from rolecall.recovery.actuators.base import Actuator, NoopActuator
from rolecall.recovery.actuators.external import ExternalActuator
from rolecall.recovery.actuators.targets.reaper import Reaper
from rolecall.recovery.advice import WATCHED
from rolecall.recovery.incidents import Incident, IncidentOutcome
from rolecall.recovery.loop import Watch
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import JournalLocation
from rolecall.testing.recovery_world import FakeSource
from tests.recovery.actuators.test_external import FakeTarget
from tests.recovery.actuators.test_reaper import DIAGNOSIS
from tests.recovery.world import World
from tests.support import eventually


def watched(
    world: World, program: tuple[str, ...], orphans_mode: RecoveryMode = "act", actuator: Actuator | None = None
) -> tuple[Watch, ExternalActuator]:
    """`actuator`: for replicas, in the mode of the world; None: none is configured. Reports the orphan."""
    world.detector.extra = [DIAGNOSIS]
    reaper = Reaper(ReaperConfig(program=program, grace_seconds=0.0))
    reaping = ExternalActuator(reaper, world.journal, list, world.clock, deadline_seconds=60.0)
    watch = Watch(
        world.journal,
        FakeSource(world.clock),
        world.detector,
        actuator or NoopActuator(),
        world.config,
        world.notifier,
        world.clock,
        "host:1:1",
        reaper=reaping,
        orphans_mode=orphans_mode,
    )
    return watch, reaping


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
    watch, actuator = watched(world, ("/bin/echo",))
    try:
        ticks_until(world, watch, EventKind.ACTION_DONE)
        world.run(3.0, watch)
        assert world.only().outcome is None, "its agent still sees it"
        world.detector.extra = []
        world.until(world.all_closed, watch)
    finally:
        actuator.close()
    assert world.only().outcome is IncidentOutcome.RESOLVED
    assert calls(world) == ["/bin/echo node end 40 --start-ticks 400 --orphan"]
    assert not world.events(EventKind.ONCALL_PAGED)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/echo"], ids=["refused", "without effect"])
def test_one_that_does_not_end_is_for_on_call(tmp_path: Path, program: str) -> None:
    world = World(tmp_path)
    watch, actuator = watched(world, (program,))
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
    watch, actuator = watched(world, ("/bin/echo",), "approve")
    try:
        ticks_until(world, watch, EventKind.PLAN_PROPOSED)
        world.run(30.0, watch)
    finally:
        actuator.close()
    assert calls(world) == [] and world.only().outcome is None


# --- one mode for orphans, another one for replicas -------------------------------------------------------------------


def of_both(world: World) -> tuple[Incident, Incident]:
    """The incident of the orphan, and that of the replica."""
    orphan, replica = sorted(world.incidents(), key=lambda i: not i.is_of_orphan)
    return orphan, replica


def replacing(world: World) -> tuple[FakeTarget, ExternalActuator]:
    """An actuator of the job's replicas."""
    target = FakeTarget()
    return target, ExternalActuator(target, world.journal, list, world.clock, deadline_seconds=60.0)


def modes(world: World) -> tuple[str, str]:
    (acquired,) = world.events(EventKind.LEASE_ACQUIRED)
    told = acquired.as_(LeaseAcquired)
    return told.mode, told.orphans_mode


def until_acted(world: World, watch: Watch, *actuators: ExternalActuator) -> None:
    """A replica hangs beside the orphan, until an action is done, and 5 s more."""
    world.runtime.inject("rollout/1", FaultClass.HANG)
    try:
        ticks_until(world, watch, EventKind.ACTION_DONE)
        world.run(5.0, watch)
    finally:
        for actuator in actuators:
            actuator.close()


def test_without_an_actuator_an_orphan_is_ended_and_nothing_else_is_possible(tmp_path: Path) -> None:
    world = World(tmp_path)  # mode act: without an actuator it is observe
    watch, reaping = watched(world, ("/bin/echo",))
    until_acted(world, watch, reaping)
    orphan, replica = of_both(world)
    assert modes(world) == ("observe", "act")
    assert orphan.attempt is not None and orphan.attempt.started_at is not None
    assert replica.attempt is not None and replica.attempt.plan.action is ActionKind.TOLERATE
    assert replica.attempt.plan.because.startswith(WATCHED) and replica.attempt.held_by == {"mode"}
    assert calls(world) == ["/bin/echo node end 40 --start-ticks 400 --orphan"] and world.runtime.replaced == []


def test_orphans_in_mode_act_beside_an_actuator_in_mode_observe(tmp_path: Path) -> None:
    world = World(tmp_path, mode="observe")
    target, actuator = replacing(world)
    watch, reaping = watched(world, ("/bin/echo",), "act", actuator)
    until_acted(world, watch, reaping, actuator)
    orphan, replica = of_both(world)
    assert modes(world) == ("observe", "act")
    assert orphan.attempt is not None and orphan.attempt.started_at is not None and not orphan.page_topics
    assert replica.attempt is not None and replica.attempt.held_by == {"mode"}
    assert "it would replace rollout/1#1" in replica.page_reason
    assert target.orders == [] and len(calls(world)) == 1


def test_orphans_in_mode_observe_beside_an_actuator_in_mode_act(tmp_path: Path) -> None:
    world = World(tmp_path)
    target, actuator = replacing(world)
    watch, reaping = watched(world, ("/bin/echo",), "observe", actuator)
    until_acted(world, watch, reaping, actuator)
    orphan, replica = of_both(world)
    assert modes(world) == ("act", "observe")
    assert replica.attempt is not None and replica.attempt.started_at is not None
    assert [o.replica for o in target.orders] == ["rollout/1"] and target.made == ["read", "drain", "end"]
    assert orphan.attempt is not None and orphan.attempt.held_by == {"mode"} and orphan.outcome is None
    assert "it would end the orphaned process 40 on n" in orphan.page_reason
    assert orphan.page_reason.endswith(DIAGNOSIS.advice), "on-call still gets the command"
    assert not any("--orphan" in call for call in calls(world))


@pytest.mark.parametrize("orphans_mode", ["observe", "act"])
def test_a_reaper_that_acts_can_be_paused(tmp_path: Path, orphans_mode: RecoveryMode) -> None:
    world = World(tmp_path)
    for replica in world.journal.desired():  # of a job that is only watched none is counted
        world.journal.remove_desired(replica)
    world.detector.runtime.processes.clear()
    watch, reaping = watched(world, ("/bin/echo",), orphans_mode)
    world.detector.extra, location = [], JournalLocation(world.url)
    try:
        world.run(1.0, watch)
        if orphans_mode == "observe":
            with pytest.raises(CommandRefused, match="there is nothing to pause"):
                commands.pause_recovery(location, "bob", "let me look")
            return
        commands.pause_recovery(location, "bob", "let me look")
        world.detector.extra = [DIAGNOSIS]
        world.run(5.0, watch)
        assert calls(world) == [] and "paused" in (world.only().attempt or pytest.fail("no plan")).held_by
        commands.resume_recovery(location, "bob")
        ticks_until(world, watch, EventKind.ACTION_DONE)
    finally:
        reaping.close()


def test_the_plan_of_an_orphan_tells_the_dashboard_what_is_possible_for_replicas(tmp_path: Path) -> None:
    world = World(tmp_path)
    target, actuator = replacing(world)
    watch, reaping = watched(world, ("/bin/echo",), "observe", actuator)
    try:
        ticks_until(world, watch, EventKind.PLAN_CREATED)
    finally:
        reaping.close()
        actuator.close()
    (made,) = world.events(EventKind.PLAN_CREATED)
    question = made.as_(PlanCreated).question
    assert question["config"]["mode"] == "observe" and "end_orphan" in question["supports"]
    limits = limits_of(question, "act")
    assert limits.config.mode == "act" and limits.supports == target.supports
