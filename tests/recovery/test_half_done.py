"""Actions that take several ticks and are left half done, or refused: by a pause, by mode observe, by the other system."""

from collections.abc import Collection
from pathlib import Path

import pytest

from rolecall.core.diagnosis import Plan
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import CallStarted, OncallPaged
from rolecall.recovery.actuators.base import ActionResult, NoopActuator
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.recovery.loop import LATE_EXIT_SECONDS, Watch
from rolecall.testing.recovery_world import FakeSource
from tests.recovery.simulated_kill import KillableJournal, SimulatedKill
from tests.recovery.world import World

K = EventKind


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class TwoTicks(RayRuntime):
    """Takes two ticks for an action. `calls`: the first one makes a call to another system."""

    def __init__(self, journal: Journal, *, calls: bool) -> None:
        super().__init__(journal)
        self._calls, self.num_performed = calls, 0

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult:
        self.num_performed += 1
        if self.num_performed > 1:
            return super().perform(plan, lease, lost_nodes)
        if self._calls:
            made = CallStarted(actuator=self.name, call="suspend it", words="suspend it")
            key = f"{plan.incident_id}:call:{plan.digest}:rollout/1:suspend"
            self._journal.append(made, incident_id=plan.incident_id, key=key, lease=lease)
        return None  # type: ignore[return-value]  # as of an actuator that waits


@pytest.mark.parametrize("calls", [True, False])
def test_a_pause_leaves_no_action_half_done_and_begins_none(world: World, calls: bool) -> None:
    actuator = TwoTicks(world.journal, calls=calls)
    watch = Watch(
        *(world.journal, FakeSource(world.clock), world.detector, actuator, world.config, world.notifier, world.clock),
        "host:1:1",
    )
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: actuator.num_performed, watch)
    world.journal.set_flag("paused", "bob: a look")
    world.run(5, watch)
    assert (world.desired("rollout/1") == 2) is calls
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


@pytest.mark.parametrize("acts", [True, False], ids=["the actuator is still configured", "it is not"])
def test_on_call_is_told_of_an_action_that_mode_observe_leaves_half_done(world: World, acts: bool) -> None:
    before = TwoTicks(world.journal, calls=True)
    after = TwoTicks(world.journal, calls=True) if acts else NoopActuator()
    observing = world.config.model_copy(update={"mode": "observe"})
    first, second = (
        Watch(
            *(world.journal, FakeSource(world.clock), world.detector, actuator, config, world.notifier, world.clock),
            holder,
        )
        for actuator, config, holder in ((before, world.config, "host:1:1"), (after, observing, "host:2:1"))
    )
    world.run(2, first)
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: before.num_performed, first)
    world.run(30, second)
    (page,) = world.events(K.ONCALL_PAGED)
    assert "it was begun, and is left half done" in page.as_(OncallPaged).because
    assert world.desired("rollout/1") == 1 and not world.all_closed()


class Scheduled(TwoTicks):
    """Of a job that rolecall did not start: refuses in the second tick. It would end reward/0, too."""

    schedules = True

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        return ("reward/0",)

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult:
        if self.num_performed:
            return ActionResult(done=False, because="status 403")
        return super().perform(plan, lease, lost_nodes)


@pytest.mark.parametrize("calls", [True, False])
def test_what_runs_on_after_an_action_that_was_refused_is_watched(tmp_path: Path, calls: bool) -> None:
    """Once a call was made it may end still, and be told of late."""
    world = World(tmp_path, replicas_at_once_max=2)
    actuator = Scheduled(world.journal, calls=calls)
    watch = Watch(
        *(world.journal, FakeSource(world.clock), world.detector, actuator, world.config, world.notifier, world.clock),
        "host:1:1",
    )
    world.run(2, watch)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.ESCALATED and "status 403" in world.only().because
    ends = {("rollout/1", 2), ("reward/0", 2)}
    world.run(LATE_EXIT_SECONDS / 2, watch)
    assert ends & set(world.detector.forgotten) == (ends if calls else set())
    world.runtime.inject("reward/0", FaultClass.CRASH)  # as the action meant it to
    world.run(LATE_EXIT_SECONDS, watch)
    assert ends & set(world.detector.forgotten) == ({("reward/0", 2)} if calls else set())


def test_a_watch_that_takes_over_does_not_watch_either_what_a_failed_action_may_still_end(tmp_path: Path) -> None:
    """The first one dies between the failure and the next plan."""
    world = World(tmp_path, replicas_at_once_max=2)
    actuator = Scheduled(world.journal, calls=True)
    first, second = (
        Watch(
            *(journal, FakeSource(world.clock), world.detector, actuator, world.config, world.notifier, world.clock),
            holder,
        )
        for journal, holder in (
            (KillableJournal(world.url, clock=world.clock, switch=world.switch), "host:1:1"),
            (world.journal, "host:2:1"),
        )
    )
    world.run(2, first)
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: actuator.num_performed, first)
    world.switch.dies_before = "append plan_created"
    with pytest.raises(SimulatedKill):
        world.run(10, first)
    assert len(world.events(K.ACTION_FAILED)) == 1 and not world.all_closed()
    world.until(world.all_closed, second)
    assert {("rollout/1", 2), ("reward/0", 2)} <= set(world.detector.forgotten)
    world.run(2 * LATE_EXIT_SECONDS, second)
    assert ("reward/0", 2) not in world.detector.forgotten
