"""The actuator of the bundled runtime: one record a target, once, fenced, for one incarnation."""

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError, LeaseFenced
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.journal import Lease
from rolecall.core.journal.payloads.recovery import NodeQuarantined
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.testing.recovery_world import FLEET
from tests.recovery.world import World

A = ActionKind


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def take(world: World, holder: str = "me") -> Lease:
    lease = world.journal.acquire("watch", holder, 5.0, lapsed=world.journal.lease("watch"))
    assert lease is not None
    return lease


def plan(*who: tuple[str, int, str], action: ActionKind = A.REPLACE_REPLICA) -> Plan:
    targets = tuple(PlanTarget(replica=ReplicaId(r), incarnation=i, node=NodeId(n)) for r, i, n in who)
    return Plan(incident_id=IncidentId("inc-1-x"), action=action, targets=targets, because="it is so")


def desired(world: World, replica: str) -> Desired:
    return world.journal.desired()[ReplicaId(replica)]


def test_a_replacement_is_one_record_however_often_it_is_performed(world: World) -> None:
    actuator, lease = RayRuntime(world.journal), take(world)
    for _ in range(3):
        assert actuator.perform(plan(("rollout/1", 1, "node-4")), lease).done
    assert desired(world, "rollout/1") == Desired(
        replica=ReplicaId("rollout/1"),
        incarnation=2,
        node=NodeId("node-4"),
        fence=lease.fence,
        because="it is so",
        incident_id="inc-1-x",
    )
    assert sum(d.incarnation for d in world.journal.desired().values()) == len(world.journal.desired()) + 1


def test_an_incarnation_that_is_over_is_left_alone(world: World) -> None:
    actuator, lease = RayRuntime(world.journal), take(world)
    world.journal.set_desired(replace(desired(world, "rollout/1"), incarnation=2))
    result = actuator.perform(plan(("rollout/0", 1, "node-3"), ("rollout/1", 1, "node-4")), lease)
    assert not result.done and "rollout/1#1 is outdated: the current incarnation is #2" in result.because
    assert desired(world, "rollout/0").incarnation == 1, "all of a plan, or nothing"


def test_a_replica_that_left_the_run_is_not_brought_back(world: World) -> None:
    world.journal.remove_desired(ReplicaId("rollout/1"))
    result = RayRuntime(world.journal).perform(plan(("rollout/1", 1, "node-4")), take(world))
    assert not result.done and ReplicaId("rollout/1") not in world.journal.desired()


@pytest.mark.parametrize("action", [A.REPLACE_REPLICA, A.STOP_JOB])
def test_a_watch_that_lost_the_lease_does_nothing(world: World, action: ActionKind) -> None:
    old = take(world)
    world.clock.advance(10)
    take(world, "another")
    targets = [("rollout/1", 1, "node-4")] if action is A.REPLACE_REPLICA else []
    with pytest.raises(LeaseFenced):
        RayRuntime(world.journal).perform(plan(*targets, action=action), old)
    assert desired(world, "rollout/1").incarnation == 1 and world.journal.flag("stop") is None


def test_moving_chooses_another_node_and_a_repetition_the_same(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=1)
    actuator, lease = RayRuntime(world.journal), take(world)
    moved = plan(("rollout/1", 1, "node-4"), action=A.REPLACE_NODE)
    actuator.perform(moved, lease)
    node = desired(world, "rollout/1").node
    assert node != "node-4"
    assert actuator.perform(moved, lease).done and desired(world, "rollout/1").node == node


def test_unsupported_actions_are_refused(world: World) -> None:
    with pytest.raises(ActuatorError, match="cannot end orphan"):
        RayRuntime(world.journal).perform(plan(action=A.END_ORPHAN), take(world))


def test_a_restart_starts_new_processes_and_leaves_what_was_replaced_since_it_was_planned(world: World) -> None:
    actuator, lease = RayRuntime(world.journal), take(world)
    world.journal.set_desired(replace(desired(world, "rollout/1"), incarnation=4, because="another incident"))
    restart = plan(*((r, 1, "node-0") for r in FLEET), action=A.RESTART_JOB)
    for _ in range(2):
        assert actuator.perform(restart, lease).done
    now = {r: desired(world, r) for r in FLEET}
    assert {r: d.incarnation for r, d in now.items()} == {r: 4 if r == "rollout/1" else 2 for r in FLEET}
    assert not any(d.prefer_standby for r, d in now.items() if r != "rollout/1")
    assert actuator.also_hit(restart) == ()


def quarantine(world: World, *nodes: str) -> None:
    for node in nodes:
        world.journal.append(NodeQuarantined(node=node, by="alice", because="it is faulty"))


def standby(world: World, name: str, node: str) -> None:
    world.journal.set_desired(Desired(replica=ReplicaId(name), incarnation=1, node=NodeId(node)))
    world.run(3)


def test_a_standby_that_another_replica_gets_is_not_named(world: World) -> None:
    standby(world, "standby/0", "node-20")
    actuator, crash = RayRuntime(world.journal), plan(("rollout/1", 1, "node-4"))
    assert actuator.also_hit(crash) == ("standby/0 becomes rollout/1",)
    lease = take(world)
    assert actuator.perform(plan(("rollout/0", 1, "node-3")), lease).done
    assert actuator.also_hit(crash) == (), "it becomes rollout/0"
    for number in (1, 2):
        name, node = ReplicaId(f"standby/{number}"), NodeId(f"node-2{number}")
        world.journal.set_desired(Desired(replica=name, incarnation=1, node=node))
        world.journal.set_actual(Actual(replica=name, incarnation=1, node=node, state=ReplicaState.READY, pid=1))
    assert actuator.also_hit(crash) == ("standby/1 becomes rollout/1",)
    world.journal.set_desired(replace(desired(world, "rollout/2"), incarnation=2, node=NodeId("node-21")))
    assert actuator.also_hit(crash) == ("standby/2 becomes rollout/1",), "rollout/2 moves to node-21"


RESTART = plan(*((r, 1, f"node-{n}") for n, r in enumerate(FLEET)), action=A.RESTART_JOB)


@pytest.mark.parametrize("performed", [0, 3, 7], ids=["none", "three", "all but one"])
def test_a_restart_leaves_quarantined_nodes_each_replica_for_another_one(world: World, performed: int) -> None:
    """Also if a watch died after it had written some of the records."""
    standby(world, "standby/0", "node-20")
    lease = take(world)
    part = replace(RESTART, targets=RESTART.targets[:performed])
    quarantine(world, "node-4", "node-7")
    if part.targets:
        assert RayRuntime(world.journal).perform(part, lease).done
    assert RayRuntime(world.journal).perform(RESTART, lease).done
    now = {r: desired(world, r) for r in FLEET}
    assert {d.incarnation for d in now.values()} == {2}
    moved = [now[r].node for r in ("rollout/1", "trainer/1")]
    assert len(set(moved)) == 2 and not set(moved) & {"node-4", "node-7"}
    assert "node-20" not in moved, "the standby stays there and is not promoted"
    assert all(d.node == f"node-{n}" for n, d in enumerate(now.values()) if n not in (4, 7))


def test_a_restart_leaves_lost_nodes_that_are_not_quarantined(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=1)
    assert RayRuntime(world.journal).perform(RESTART, take(world), lost_nodes={"node-4"}).done
    assert desired(world, "rollout/1").node == "node-8"
    assert desired(world, "rollout/0").node == "node-3"


def test_a_restart_that_has_no_node_left_changes_nothing(world: World) -> None:
    standby(world, "standby/0", "node-20")
    quarantine(world, *(f"node-{n}" for n in range(len(FLEET))))
    trainers = replace(RESTART, action=A.RESTART_ROLE, targets=RESTART.targets[-2:])
    with pytest.raises(ActuatorError, match="trainer/0: no node other than"):
        RayRuntime(world.journal).perform(trainers, take(world))
    assert desired(world, "trainer/0").incarnation == desired(world, "trainer/1").incarnation == 1


def test_replicas_that_move_together_get_nodes_of_different_standbys(world: World) -> None:
    standby(world, "standby/0", "node-20")
    standby(world, "standby/1", "node-21")
    moved = plan(("rollout/0", 1, "node-3"), ("rollout/1", 1, "node-4"), action=A.REPLACE_NODE)
    RayRuntime(world.journal).perform(moved, take(world))
    assert {desired(world, r).node for r in ("rollout/0", "rollout/1")} == {"node-20", "node-21"}


def test_a_plan_lists_its_side_effects(world: World) -> None:
    actuator = RayRuntime(world.journal)
    assert actuator.also_hit(plan(("trainer/0", 1, "n"))) == ()
    assert actuator.also_hit(plan(action=A.STOP_JOB)) == ("every process of the job",)
    for name, node in (("standby/0", "node-9"), ("trainer-standby/0", "node-10")):
        world.journal.set_desired(Desired(replica=ReplicaId(name), incarnation=1, node=NodeId(node)))
    world.runtime.tick()
    for _ in range(3):
        world.step()
    world.run(3)
    assert actuator.also_hit(plan(("rollout/1", 1, "n"))) == ("standby/0 becomes rollout/1",)
    both = plan(("trainer/0", 1, "n"), ("trainer/1", 1, "n"), ("rollout/1", 1, "n"))
    assert actuator.also_hit(both) == ("trainer-standby/0 becomes trainer/0", "standby/0 becomes rollout/1")
