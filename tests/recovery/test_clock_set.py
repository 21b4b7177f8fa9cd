"""The wall clock of the watch's machine is set during a repair: nothing times out early, waits longer, or is led twice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.diagnosis import ActionKind, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import HoldPlaced, PlanApproved
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import Watch
from rolecall.recovery.next_step import CLEAR_SECONDS, decision_key
from rolecall.recovery.nodes import returned_nodes
from rolecall.recovery.operators import commands
from rolecall.recovery.policy import lost_nodes
from rolecall.recovery.triage import LOST_GRACE_SECONDS
from rolecall.testing.recovery_world import diagnosis
from tests.events import filled
from tests.recovery.world import TICK_SECONDS, World

K, S = EventKind, IncidentState
HOUR = 3600.0
TIMEOUT_SECONDS = 20.0
REPLICA = "rollout/1"

pytestmark = pytest.mark.parametrize("seconds", [0.0, -HOUR, HOUR], ids=["not set", "back", "forward"])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def within_approval(tmp_path: Path) -> World:
    return World(tmp_path, mode="approve", approval_timeout_seconds=TIMEOUT_SECONDS)


def breaks(world: World, watch: Watch, state: IncidentState) -> None:
    world.runtime.inject(REPLICA, FaultClass.CRASH)
    world.until(lambda: [i.state for i in world.incidents()] == [state], watch)


def verifying(world: World) -> Watch:
    """A watch that has waited 5 s for a replacement that hangs."""
    watch = world.watch()
    world.runtime.starts_that_hang[REPLICA] = 1
    breaks(world, watch, S.VERIFYING)
    world.run(5, watch)
    return watch


def takes(world: World, done: Callable[[], object], watch: Watch) -> float:
    """Seconds until then."""
    began = world.clock.monotonic()
    world.until(done, watch)
    return world.clock.monotonic() - began


def approves(world: World) -> None:
    incident = world.only()
    assert incident.attempt is not None
    approved = PlanApproved(digest=incident.attempt.plan.digest, by="bob")
    world.journal.append(approved, incident_id=incident.incident_id, key=decision_key(incident.incident_id, 1))


def test_proposed(tmp_path: Path, seconds: float) -> None:
    world = within_approval(tmp_path)
    watch = world.watch()
    breaks(world, watch, S.PROPOSED)
    world.run(5, watch)
    world.clock.set_wall(seconds)
    left = takes(world, lambda: world.events(K.PLAN_EXPIRED), watch)
    assert left == pytest.approx(TIMEOUT_SECONDS - 5, abs=2 * TICK_SECONDS)


def test_approved(tmp_path: Path, seconds: float) -> None:
    world = within_approval(tmp_path)
    watch = world.watch()
    breaks(world, watch, S.PROPOSED)
    world.journal.set_flag("paused", "bob: a look")
    approves(world)
    world.run(5, watch)
    world.clock.set_wall(seconds)
    world.run(TIMEOUT_SECONDS - 6, watch)
    assert world.only().state is S.PROPOSED
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_a_proposal_made_after_the_clock_was_set(tmp_path: Path, seconds: float) -> None:
    world = within_approval(tmp_path)
    watch = world.watch()
    world.step(watch)
    world.clock.set_wall(seconds)
    breaks(world, watch, S.PROPOSED)
    left = takes(world, lambda: world.events(K.PLAN_EXPIRED), watch)
    assert left == pytest.approx(TIMEOUT_SECONDS, abs=2 * TICK_SECONDS)
    (proposed,) = world.events(K.PLAN_PROPOSED)
    assert proposed.payload.expires_at == pytest.approx(proposed.wall_at + TIMEOUT_SECONDS, abs=1), "on the new clock"


def test_on_hold(tmp_path: Path, seconds: float) -> None:
    world = within_approval(tmp_path)
    watch = world.watch()
    breaks(world, watch, S.PROPOSED)
    approves(world)
    attempt = world.only().attempt
    assert attempt is not None
    hold = HoldPlaced(digest=attempt.plan.digest, by="bob", because="a look", until=world.clock.wall() + 10)
    world.journal.append(hold, incident_id=world.only().incident_id)
    world.run(5, watch)
    world.clock.set_wall(seconds)
    left = takes(world, lambda: world.events(K.ACTION_STARTED), watch)
    assert left == pytest.approx(5, abs=2 * TICK_SECONDS)


def test_acting(world: World, seconds: float) -> None:
    watch = world.watch()
    actuator = world.actuators[-1]
    perform, actuator.perform = actuator.perform, lambda *_: None  # type: ignore[method-assign,assignment]
    breaks(world, watch, S.ACTING)
    world.clock.set_wall(seconds)
    world.run(2 * TIMEOUT_SECONDS, watch)
    assert world.only().state is S.ACTING
    actuator.perform = perform  # type: ignore[method-assign]
    assert takes(world, world.all_closed, watch) < 5
    assert world.only().outcome is IncidentOutcome.RESOLVED and len(world.only().attempts) == 1


def test_verifying(world: World, seconds: float) -> None:
    watch = verifying(world)
    world.clock.set_wall(seconds)
    left = takes(world, lambda: world.events(K.ACTION_FAILED), watch)
    assert left == pytest.approx(TIMEOUT_SECONDS - 5, abs=2 * TICK_SECONDS)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_verifying_while_the_watch_is_replaced(world: World, seconds: float) -> None:
    """Forward, the time that the clock jumped over counts as waited; back, nothing does."""
    verifying(world)
    world.clock.set_wall(seconds)
    other = world.watch()
    expected = {0.0: TIMEOUT_SECONDS - 5, -HOUR: TIMEOUT_SECONDS, HOUR: 0.0}[seconds]
    left = takes(world, lambda: world.events(K.ACTION_FAILED), other)
    assert left == pytest.approx(max(expected, 0.0), abs=2 * TICK_SECONDS)
    world.until(world.all_closed, other)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_an_event_of_a_machine_whose_clock_is_wrong(world: World, seconds: float) -> None:
    """No other one becomes older or younger by it, for a watch that reads them all at once."""
    verifying(world)
    world.clock.set_wall(seconds)
    world.journal.append(filled(K.ONCALL_PAGED), key="page")
    world.clock.set_wall(-seconds)
    other = world.watch()
    left = takes(world, lambda: world.events(K.ACTION_FAILED), other)
    assert left == pytest.approx(TIMEOUT_SECONDS - 5, abs=2 * TICK_SECONDS)


def test_a_fault_that_ends_by_itself(world: World, seconds: float) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject(REPLICA, FaultClass.HANG)
    world.run(5, watch)
    world.clock.set_wall(seconds)
    world.run(5, watch)
    world.runtime.processes[REPLICA].fault = None
    assert takes(world, world.all_closed, watch) == pytest.approx(CLEAR_SECONDS, abs=2 * TICK_SECONDS)


def test_a_loss_that_no_detector_sees(world: World, seconds: float) -> None:
    watch = world.watch()
    world.detector.silent = True
    world.runtime.inject(REPLICA, FaultClass.CRASH)
    world.run(1, watch)
    world.clock.set_wall(seconds)
    left = takes(world, world.incidents, watch)
    assert left == pytest.approx(LOST_GRACE_SECONDS - 1, abs=2 * TICK_SECONDS)


def test_the_budget_of_evictions(tmp_path: Path, seconds: float) -> None:
    world = World(tmp_path, evictions_per_hour_max=1)
    watch = world.watch()
    world.runtime.inject(REPLICA, FaultClass.CRASH)
    world.until(world.all_closed, watch)
    world.clock.set_wall(seconds)
    world.runtime.inject("rollout/2", FaultClass.CRASH)
    world.run(10, watch)
    assert [e.payload.guard for e in world.events(K.PLAN_BLOCKED)] == ["evictions"]
    world.clock.advance(HOUR)
    world.until(world.all_closed, watch)


def test_a_closed_incident_does_not_explain_the_next_fault(world: World, seconds: float) -> None:
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    for _ in range(2):
        world.runtime.inject(REPLICA, FaultClass.HANG)
        world.run(5, watch)
        world.runtime.processes[REPLICA].fault = None
        world.until(world.all_closed, watch)
        world.clock.set_wall(seconds)
        world.run(1, watch)
    assert [i.outcome for i in world.incidents()] == 2 * [IncidentOutcome.SELF_RECOVERED]


def test_what_came_first(world: World, seconds: float) -> None:
    """The journal tells, not the clocks: a step was committed between two faults of a replica."""
    watch = world.watch()
    for step in range(2):
        world.step(watch)
        world.runtime.inject(REPLICA, FaultClass.CRASH)
        world.until(lambda n=step: len(world.incidents()) > n and world.all_closed(), watch)  # type: ignore[misc]
        world.clock.set_wall(seconds)
        world.step(watch)
        world.journal.append(filled(K.STEP_COMMITTED), key=f"step:{step}")
    assert [e.payload.plan.action for e in world.events(K.ACTION_STARTED)] == 2 * [ActionKind.REPLACE_REPLICA]


def test_a_node_that_was_returned(tmp_path: Path, seconds: float) -> None:
    world = World(tmp_path, free_nodes=0, quarantined_share_max=0.0)
    watch = world.watch()
    lost = replace(diagnosis(FaultClass.NODE_LOST, ("trainer/1", 1)), suspects=(Suspect(node=NodeId("node-7")),))
    world.detector.extra = [lost]
    world.run(5, watch)
    world.detector.extra = []
    world.until(world.all_closed, watch)
    commands.return_node(RunDir(tmp_path), "node-7", "alice", "a new machine", world.clock)
    world.clock.set_wall(seconds)
    world.run(1, watch)
    assert lost_nodes(watch._projection.incidents.values(), returned_nodes(world.journal)) == frozenset()


def test_two_watches(world: World, seconds: float) -> None:
    first, second = world.watch(), world.watch()
    world.run(3, first, second)
    world.clock.set_wall(seconds)
    world.run(20, second, first)
    assert first.acting and not second.acting and len(world.events(K.LEASE_ACQUIRED)) == 1
    took = takes(world, lambda: second.acting, second)
    assert world.config.lease_seconds / 2 < took <= world.config.lease_seconds + 2 * TICK_SECONDS


def test_a_watch_that_starts_after_the_first_one_was_killed(world: World, seconds: float) -> None:
    first = world.watch()
    world.run(3, first)
    world.clock.set_wall(seconds)
    second = world.watch()
    assert takes(world, lambda: second.acting, second) <= world.config.lease_seconds + 2 * TICK_SECONDS
