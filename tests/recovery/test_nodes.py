"""Nodes: what is said of them folds, quarantine keeps replicas away, draining moves them, over whole watches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import CommandRefused
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import PAYLOADS
from rolecall.core.nodes import nodes_quarantined_by, quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.recovery.loop import Watch
from rolecall.recovery.next_step import to_quarantine
from rolecall.recovery.nodes import NODE_KINDS, BurnIn, fold_nodes
from rolecall.recovery.operators import commands, queries
from rolecall.recovery.operators.commands import drain_node
from rolecall.recovery.projection import IncidentProjection
from rolecall.testing.recovery_world import diagnosis
from tests.events import made_event
from tests.recovery.simulated_kill import KillableJournal, KillSwitch, SimulatedKill
from tests.recovery.world import World
from tests.terminal.texts import status_text

K = EventKind
BURNED: dict[str, Any] = {
    "passed": True,
    "seconds": 12.5,
    "checks": [
        {"name": "memory", "passed": True, "because": "64 MiB came back as written", "values": {"bytes": 1 << 26}},
        {"name": "gpu_math", "passed": None, "because": "no GPU is here", "values": {}},
    ],
}


def _event(seq: int, kind: EventKind, node: str = "n1", **body: Any) -> Event:
    said = {"node": node, "by": f"p{seq}", "because": f"w{seq}", **body}
    known = {name: value for name, value in said.items() if name in PAYLOADS[kind].names}
    return made_event(seq=seq, kind=kind, wall_at=float(seq), body=known)


def test_the_story_of_a_node() -> None:
    story = [
        _event(1, K.NODE_QUARANTINED),
        _event(2, K.NODE_QUARANTINED),
        _event(3, K.NODE_DRAINED, incidents=["inc-1", "inc-2"]),
        _event(4, K.BURN_IN_FINISHED, **BURNED),
        _event(5, K.RUN_ENDED),
    ]
    record = fold_nodes(story)["n1"]
    assert record.quarantined_since == 1.0 and record.quarantined_by == "p1" and record.drained_at == 3.0
    assert record.moved == ("inc-1", "inc-2") and [b.by for b in record.burn_ins] == ["p4"]
    back = fold_nodes([*story, _event(7, K.NODE_RETURNED_TO_SERVICE)])["n1"]
    assert not back.quarantined and back.drained_at is None and back.returned_by == "p7"
    assert back.burn_ins == record.burn_ins, "what was measured stays"
    assert (
        nodes_quarantined_by(story) == {"n1"}
        and nodes_quarantined_by([*story, _event(7, K.NODE_RETURNED_TO_SERVICE)]) == frozenset()
    )
    assert fold_nodes([made_event(seq=1, kind=K.NODE_QUARANTINED, wall_at=1.0, body={})]) == {}


@pytest.mark.parametrize(
    ("shut", "share", "take"),
    [(0, 0.5, 2), (3, 0.5, 1), (4, 0.5, 0), (0, 0.0, 0), (0, 0.125, 1)],
)
def test_watch_never_quarantines_more_than_its_share(shut: int, share: float, take: int) -> None:
    known = [f"n{i}" for i in range(8)]
    taken, left = to_quarantine(["n7", "n6"], known[:shut], known, share)
    assert taken == ["n6", "n7"][:take] and left == ["n6", "n7"][take:]
    assert to_quarantine(["n1"], ["n1"], known, share) == ([], []), "it is quarantined already"


def running(path: Path, *, free_nodes: int = 2, **config: Any) -> tuple[World, RunDir, Watch]:
    world = World(path, free_nodes=free_nodes, **config)
    watch = world.watch()
    world.step(watch)
    return world, RunDir(path), watch


def node_of(world: World, replica: str) -> str:
    return {str(r): str(a.node) for r, a in world.journal.current().items()}[replica]


def faulty(world: World, replica: str, fault: FaultClass) -> None:
    """A fault of this replica, on the node where it really is."""
    node = node_of(world, replica)
    found = diagnosis(fault, (replica, 1), onset=world.clock.wall())
    suspect = replace(found.suspects[0], node=NodeId(node))
    world.detector.extra = [replace(found, suspects=(suspect,))]


def test_nothing_is_placed_on_a_quarantined_node(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "rollout/1")
    assert commands.quarantine(run, node, "alice", "ECC errors", world.clock).startswith(f"{node} is quarantined")
    world.run(5, watch)
    assert world.runtime.replaced == [], "what runs there goes on"
    faulty(world, "rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and node_of(world, "rollout/1") != node
    assert queries.replay(run, world.only().incident_id)["same"] is True
    with pytest.raises(CommandRefused, match="already quarantined by alice: ECC errors"):
        commands.quarantine(run, node, "bob", "again", world.clock)
    assert f"QUARANTINED: {node}, by alice: ECC errors" in status_text(queries.status(run, world.clock))


def test_a_node_quarantined_after_the_plan_takes_nothing_either(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "rollout/1")
    commands.pause_recovery(run, "alice", "a look")
    faulty(world, "rollout/1", FaultClass.CRASH)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)
    commands.quarantine(run, node, "alice", "ECC errors", world.clock)
    commands.resume_recovery(run, "alice")
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and node_of(world, "rollout/1") != node


def test_a_returned_node_takes_replicas_again(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "rollout/1")
    commands.quarantine(run, node, "alice", "ECC errors", world.clock)
    assert "is back in service" in commands.return_node(run, node, "bob", "new GPU", world.clock)
    with pytest.raises(CommandRefused, match="neither quarantined nor lost"):
        commands.return_node(run, node, "bob", "again", world.clock)
    faulty(world, "rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert node_of(world, "rollout/1") == node


def test_no_node_is_left(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path, free_nodes=0)
    for node in sorted({node_of(world, r) for r in world.runtime.processes}):
        commands.quarantine(run, node, "alice", "the whole rack", world.clock)
    faulty(world, "rollout/1", FaultClass.CRASH)
    world.until(lambda: world.events(K.ONCALL_PAGED), watch)
    assert world.runtime.replaced == []
    assert "there is no other node to move to" in world.events(K.ONCALL_PAGED)[0].payload.because


def test_a_drained_node_is_left_by_all(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "rollout/1")
    said = commands.drain(run, node, "alice", "its fan is loud", world.clock)
    assert said == (
        f"{node} is drained: no replica is placed there until "
        f'`rolecall node return {node} --run {run.shell_name} --reason "why"`; '
        "to be moved once all guards allow it: rollout/1 (inc-1-rollout-1)"
    )
    again = commands.drain(run, node, "bob", "still", world.clock)
    assert "already handled: rollout/1 (inc-1-rollout-1, open)" in again
    world.until(world.all_closed, watch)
    assert node_of(world, "rollout/1") != node and world.runtime.replaced == [("rollout/1", 1)]
    assert world.only().diagnosis.because.endswith(f"replacement of rollout/1#1: {node} is drained: its fan is loud")
    assert "no replica runs there" in commands.drain(run, node, "bob", "still", world.clock)
    row = {r["node"]: r for r in commands.nodes(run)}[node]
    assert row["quarantined"] and row["drained_by"] == "bob" and row["moved"] == ("inc-1-rollout-1",)
    assert row["replicas"] == [] and row["num_incidents"] == 0, "a request is no fault of the node"


def test_a_drain_goes_through_the_guards(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path, evictions_per_hour_max=0, approval_timeout_seconds=20.0)
    commands.drain(run, node_of(world, "rollout/1"), "alice", "its fan is loud", world.clock)
    world.until(world.all_closed, watch)
    assert world.runtime.replaced == [] and "the limit is 0" in world.only().because


def test_a_drain_lists_replicas_that_cannot_be_moved(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path, free_nodes=0)
    every = sorted({node_of(world, r) for r in world.runtime.processes})
    for node in every[1:]:
        commands.quarantine(run, node, "alice", "the whole rack", world.clock)
    said = commands.drain(run, every[0], "alice", "and this", world.clock)
    assert "no node is free for controller/0, reward/0, reward/1: on-call is paged" in said
    world.until(world.all_closed, watch)
    assert world.runtime.replaced == []


@pytest.mark.parametrize("node", ["node-99", "NODE 1", ""])
def test_a_node_that_is_not_there(tmp_path: Path, node: str) -> None:
    world, run, _ = running(tmp_path)
    before = world.journal.head()
    for word in (commands.quarantine, commands.drain, commands.return_node):
        with pytest.raises(CommandRefused):
            word(run, node, "alice", "why", world.clock)
    assert world.journal.head() == before


def _drain_killed_at(path: Path, dies_at: int | None) -> tuple[World, str, list[str]]:
    """All of a node's replicas are asked to move by somebody who may die on the way, and then says it again."""
    path.mkdir()
    world, run, watch = running(path)
    node = node_of(world, "rollout/1")
    for replica in ("rollout/2", "reward/1"):  # more than one on this node
        stands = next(d for r, d in world.journal.desired().items() if r == replica)
        world.journal.set_desired(replace(stands, incarnation=2, node=NodeId(node)))
    world.run(4, watch)
    switch = KillSwitch()
    switch.dies_at = dies_at
    journal, book = KillableJournal(world.url, clock=world.clock, switch=switch), IncidentProjection()
    book.refresh(journal)
    try:
        drain_node(journal, book, node, "alice", "its fan is loud")
    except SimulatedKill:
        commands.drain(run, node, "alice", "its fan is loud", world.clock)
    finally:
        journal.close()
    world.until(world.all_closed, watch, seconds=200)
    return world, node, switch.points


def test_an_interrupted_drain_can_be_repeated(tmp_path: Path) -> None:
    whole, node, points = _drain_killed_at(tmp_path / "whole", None)
    assert len(points) == 2 * (1 + 3 + 1), points
    wanted = sorted(whole.runtime.replaced)
    assert len(wanted) == 5 and node not in {node_of(whole, r) for r in whole.runtime.processes}
    for n in range(len(points)):
        world, node, _ = _drain_killed_at(tmp_path / str(n), n)
        assert sorted(world.runtime.replaced) == wanted, f"killed {points[n]}: {world.story()}"
        assert node not in {node_of(world, r) for r in world.runtime.processes}
        assert len(world.events(K.NODE_QUARANTINED)) == 1 and len(world.incidents()) == 3
        world.journal.verify()
        world.journal.close()


@pytest.mark.parametrize("fault", [FaultClass.GPU, FaultClass.NETWORK, FaultClass.NODE_LOST])
def test_a_node_with_a_fault_of_its_own_is_quarantined(tmp_path: Path, fault: FaultClass) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "rollout/1")
    faulty(world, "rollout/1", fault)
    world.until(world.all_closed, watch)
    assert node_of(world, "rollout/1") != node and quarantined_nodes(world.journal) == {node}
    (said,) = world.events(*NODE_KINDS)
    assert said.payload.by == "watch" and said.payload.because.startswith("inc-1-rollout-1: rollout/1#1: ")
    assert said.seq < world.events(K.ACTION_DONE)[0].seq and said.incident_id == "inc-1-rollout-1"
    first = commands.nodes(run)[0]
    assert first["node"] == node and first["num_incidents"] == 1, "repeat offenders come first"
    commands.review_diagnosis(run, "inc-1-rollout-1", False, "alice", "the switch was rebooted")
    assert all(row["num_incidents"] == 0 for row in commands.nodes(run))


def test_a_process_fault_quarantines_no_node(tmp_path: Path) -> None:
    world, _, watch = running(tmp_path)
    faulty(world, "rollout/1", FaultClass.CRASH)
    world.until(world.all_closed, watch)
    assert quarantined_nodes(world.journal) == frozenset()


@pytest.mark.parametrize(
    ("config", "called"), [({"quarantined_share_max": 0.1}, True), ({"quarantined_share_max": 0.0}, False)]
)
def test_beyond_its_share_watch_calls_an_operator(tmp_path: Path, config: dict[str, Any], called: bool) -> None:
    world, _, watch = running(tmp_path, free_nodes=1, **config)
    faulty(world, "rollout/1", FaultClass.GPU)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and quarantined_nodes(world.journal) == frozenset()
    assert [e.payload.topic for e in world.events(K.ONCALL_PAGED)] == (["quarantine"] if called else [])


@pytest.mark.parametrize("mode", ["observe", "approve"])
def test_a_watch_that_only_observes_quarantines_nothing(tmp_path: Path, mode: str) -> None:
    world, _, watch = running(tmp_path, mode=mode)
    faulty(world, "rollout/1", FaultClass.GPU)
    world.run(10, watch)
    assert len(world.incidents()) == 1 and world.events(*NODE_KINDS) == []


def test_burn_ins_are_kept(tmp_path: Path) -> None:
    world, run, _ = running(tmp_path)
    assert commands.record_burn_in(run, "node-new", BURNED, "alice", world.clock) == (
        "recorded: burn-in of node-new passed"
    )
    row = {r["node"]: r for r in commands.nodes(run)}["node-new"]
    (kept,) = row["burn_ins"]
    assert kept["by"] == "alice" and kept["result"]["checks"][0]["values"] == {"bytes": 1 << 26}
    commands.quarantine(run, "node-new", "alice", "until its firmware is new", world.clock)


@pytest.mark.parametrize(
    "changed",
    [
        {"passed": False},
        {"checks": []},
        {"checks": [{"name": "x", "passed": "yes"}]},
        {"checks": [{"name": "gpu", "passed": None}]},
        {"seconds": "long"},
        {"checks": None},
    ],
)
def test_an_invalid_burn_in_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    world, run, _ = running(tmp_path)
    with pytest.raises(CommandRefused, match="not a burn-in result"):
        commands.record_burn_in(run, "node-1", {**BURNED, **changed}, "alice", world.clock)
    with pytest.raises(CommandRefused):
        BurnIn.from_dict({})


FAILED: dict[str, Any] = {
    "passed": False,
    "seconds": 3.0,
    "checks": [{"name": "cpu_math", "passed": False, "because": "core 7: result differs", "values": {}}],
}
UNCHECKED: dict[str, Any] = {**FAILED, "checks": [BURNED["checks"][1]]}


def suspect_once(world: World, replica: str) -> None:
    """One microbatch of this replica was wrong: reported for a moment, and tolerated."""
    faulty(world, replica, FaultClass.SILENT_CORRUPTION)
    world.detector.extra = [replace(d, detectors=("wrong_numbers_once",), about=":once") for d in world.detector.extra]


@pytest.mark.parametrize("first", ["suspicion", "burn-in"])
def test_a_failed_burn_in_counts_like_a_second_wrong_microbatch(tmp_path: Path, first: str) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "trainer/1")
    if first == "burn-in":
        commands.record_burn_in(run, node, FAILED, "alice", world.clock)
        world.run(2, watch)
        assert world.incidents() == [], "a burn-in alone replaces no one"
    suspect_once(world, "trainer/1")
    world.run(2, watch)
    world.detector.extra = []
    if first == "suspicion":
        world.step(watch, seconds=5000.0)  # more than an hour later
        world.run(2, watch)
        assert [i.outcome for i in world.incidents()] == [IncidentOutcome.TOLERATED] and world.runtime.replaced == []
        commands.record_burn_in(run, node, FAILED, "alice", world.clock)
    world.until(lambda: world.all_closed() and world.runtime.replaced, watch)
    world.run(20, watch)
    last = world.incidents()[-1]
    assert last.outcome is IncidentOutcome.RESOLVED and len(world.incidents()) == 2
    assert last.diagnosis.fault_class is FaultClass.SILENT_CORRUPTION
    assert f"the burn-in of {node} by alice failed (cpu_math: core 7: result differs)" in last.diagnosis.because
    assert world.runtime.replaced == [("trainer/1", 1)] and node_of(world, "trainer/1") != node
    assert quarantined_nodes(world.journal) == {node}
    assert queries.replay(run, last.incident_id)["same"] is True


@pytest.mark.parametrize("result", [BURNED, UNCHECKED])
def test_a_burn_in_without_findings_accuses_no_replica(tmp_path: Path, result: dict[str, Any]) -> None:
    world, run, watch = running(tmp_path)
    suspect_once(world, "trainer/1")
    world.run(2, watch)
    commands.record_burn_in(run, node_of(world, "trainer/1"), result, "alice", world.clock)
    world.run(20, watch)
    assert world.runtime.replaced == [] and world.only().outcome is IncidentOutcome.TOLERATED


def test_a_failed_burn_in_counts_only_for_a_standing_suspicion(tmp_path: Path) -> None:
    world, run, watch = running(tmp_path)
    node = node_of(world, "trainer/1")
    suspect_once(world, "trainer/1")
    world.run(2, watch)
    world.detector.extra = []
    commands.review_diagnosis(run, world.only().incident_id, False, "alice", "a test", world.clock)
    commands.record_burn_in(run, node, FAILED, "alice", world.clock)
    world.run(20, watch)
    assert world.runtime.replaced == [], "an operator has said that the suspicion was wrong"
    commands.review_diagnosis(run, world.only().incident_id, True, "alice", "it was not", world.clock)
    commands.quarantine(run, node, "alice", "a test", world.clock)
    commands.return_node(run, node, "alice", "new memory", world.clock)
    world.run(20, watch)
    assert world.runtime.replaced == [], "an operator has returned the node to service since"
