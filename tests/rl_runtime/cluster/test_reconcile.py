"""The decision of the control loop, as tables and as a property over random worlds."""

import random
from dataclasses import replace

import pytest

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import NotEnoughNodes
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.cluster.reconcile import (
    LIVING,
    REFILL_SECONDS,
    ClusterState,
    KillSuperseded,
    MarkLost,
    Promote,
    ReconcileStep,
    RefillStandby,
    Start,
    StopReplica,
    free_nodes,
    place,
    placed_again,
    reconcile,
)

S = ReplicaState
NODES = tuple(NodeId(f"node-{i}") for i in range(7))


def want(replica: str, incarnation: int = 1, node: str = "node-4", **more: object) -> Desired:
    fields: dict[str, object] = {"because": "a reason", "prefer_standby": True, **more}
    return Desired(replica=ReplicaId(replica), incarnation=incarnation, node=NodeId(node), **fields)  # type: ignore[arg-type]


def have(replica: str, incarnation: int = 1, state: S = S.READY, pid: int = 100, node: str = "node-4") -> Actual:
    return Actual(
        replica=ReplicaId(replica), incarnation=incarnation, node=NodeId(node), state=state, pid=pid, start_ticks=1
    )


def fleet(
    desired: list[Desired],
    actual: list[Actual],
    *,
    dead: tuple[str, ...] = (),
    busy: tuple[tuple[str, int], ...] = (),
    stopped_seconds: float = 3600.0,
) -> ClusterState:
    """Every process with a PID is alive unless `dead` names its `replica#incarnation`."""
    keys = {(a.replica, a.incarnation) for a in actual if a.pid and f"{a.replica}#{a.incarnation}" not in dead}
    return ClusterState(
        desired={d.replica: d for d in desired},
        actual={(a.replica, a.incarnation): a for a in actual},
        alive=keys,
        busy={(ReplicaId(r), i) for r, i in busy},
        nodes=NODES,
        stopped_seconds={(a.replica, a.incarnation): stopped_seconds for a in actual},
    )


def described(instructions: list[ReconcileStep]) -> list[str]:
    return [f"{type(i).__name__} {i.replica}#{i.incarnation}" for i in instructions]


STANDBY = (want("standby/0", node="node-6"), have("standby/0", pid=106, node="node-6"))
TRAINER_STANDBY = (
    want("trainer-standby/0", node="node-5"),
    have("trainer-standby/0", pid=105, node="node-5"),
)

LENT = (want("rollout/0", 2, node="", because="it lends node-4 to trainer/0"), have("rollout/0", state=S.SERVING))
BORROWER = want("trainer/0", 2, node="node-4")

TABLE = {
    "a lender ends, and what borrows its node waits": (
        fleet([LENT[0], BORROWER], [LENT[1]]),
        ["KillSuperseded rollout/0#1"],
    ),
    "a lender is being ended": (fleet([LENT[0], BORROWER], [LENT[1]], busy=(("rollout/0", 1),)), []),
    "a lender has ended": (
        fleet([LENT[0], BORROWER], [replace(LENT[1], state=S.LOST)], dead=("rollout/0#1",)),
        ["Start trainer/0#2"],
    ),
    "a lender stays without a process": (
        fleet([LENT[0], BORROWER], [replace(LENT[1], state=S.LOST), have("trainer/0", 2)], dead=("rollout/0#1",)),
        [],
    ),
    "a lender runs again on another node": (
        fleet([want("rollout/0", 3, node="node-1")], [replace(LENT[1], state=S.LOST)], dead=("rollout/0#1",)),
        ["Start rollout/0#3"],
    ),
    "another replica starts beside an ending lender": (
        fleet([LENT[0], want("trainer/0", node="node-1")], [LENT[1]], busy=(("rollout/0", 1),)),
        ["Start trainer/0#1"],
    ),
    "nothing is wanted, nothing is there": (fleet([], []), []),
    "wanted and there": (fleet([want("rollout/0")], [have("rollout/0", state=S.SERVING)]), []),
    "wanted and not there": (fleet([want("trainer/0")], []), ["Start trainer/0#1"]),
    "its start is under way": (
        fleet([want("trainer/0")], [have("trainer/0", state=S.STARTING, pid=0)], busy=(("trainer/0", 1),)),
        [],
    ),
    "its start was given up": (
        fleet([want("trainer/0")], [have("trainer/0", state=S.STARTING, pid=0)]),
        ["MarkLost trainer/0#1"],
    ),
    "its process died": (
        fleet([want("rollout/0")], [have("rollout/0", state=S.SERVING)], dead=("rollout/0#1",)),
        ["MarkLost rollout/0#1"],
    ),
    "it is lost, and recovery has not decided": (
        fleet([want("rollout/0")], [have("rollout/0", state=S.LOST)], dead=("rollout/0#1",)),
        [],
    ),
    "fenced by the controller, its process remains, no replacement is desired": (
        fleet([want("rollout/0")], [have("rollout/0", state=S.LOST)]),
        [],
    ),
    "the old one still runs: it ends first": (
        fleet([want("trainer/0", 2)], [have("trainer/0", state=S.SERVING)]),
        ["KillSuperseded trainer/0#1"],
    ),
    "fenced, and still running when another is wanted": (
        fleet([want("trainer/0", 2)], [have("trainer/0", state=S.LOST)]),
        ["KillSuperseded trainer/0#1"],
    ),
    "the old one is being ended": (
        fleet([want("trainer/0", 2)], [have("trainer/0", state=S.LOST)], busy=(("trainer/0", 1),)),
        [],
    ),
    "the old one is gone": (
        fleet([want("trainer/0", 2)], [have("trainer/0", state=S.LOST)], dead=("trainer/0#1",)),
        ["Start trainer/0#2"],
    ),
    "the old one is still being started, with no process yet": (
        fleet([want("trainer/0", 2)], [have("trainer/0", state=S.STARTING, pid=0)], busy=(("trainer/0", 1),)),
        ["KillSuperseded trainer/0#1"],
    ),
    "the replacement died while it started": (
        fleet(
            [want("trainer/0", 2)],
            [have("trainer/0", state=S.LOST), have("trainer/0", 2, state=S.STARTING, pid=200)],
            dead=("trainer/0#1", "trainer/0#2"),
        ),
        ["MarkLost trainer/0#2"],
    ),
    "no longer wanted": (fleet([], [have("reward/1")]), ["StopReplica reward/1#1"]),
    "no longer wanted, and gone": (fleet([], [have("reward/1", state=S.STOPPED)]), []),
    "a rollout takes the warm standby": (
        fleet([want("rollout/0", 2), STANDBY[0]], [have("rollout/0", state=S.LOST), STANDBY[1]], dead=("rollout/0#1",)),
        ["Promote rollout/0#2"],
    ),
    "a trainer does not": (
        fleet([want("trainer/0", 2), STANDBY[0]], [have("trainer/0", state=S.LOST), STANDBY[1]], dead=("trainer/0#1",)),
        ["Start trainer/0#2"],
    ),
    "a trainer takes a trainer standby": (
        fleet(
            [want("trainer/0", 2), STANDBY[0], TRAINER_STANDBY[0]],
            [have("trainer/0", state=S.LOST), STANDBY[1], TRAINER_STANDBY[1]],
            dead=("trainer/0#1",),
        ),
        ["Promote trainer/0#2"],
    ),
    "a rollout does not": (
        fleet(
            [want("rollout/0", 2), TRAINER_STANDBY[0]],
            [have("rollout/0", state=S.LOST), TRAINER_STANDBY[1]],
            dead=("rollout/0#1",),
        ),
        ["Start rollout/0#2"],
    ),
    "each role has its own standbys": (
        fleet(
            [want("rollout/0", 2), want("trainer/0", 2), want("trainer/1", 2), STANDBY[0], TRAINER_STANDBY[0]],
            [have(r, state=S.LOST) for r in ("rollout/0", "trainer/0", "trainer/1")] + [STANDBY[1], TRAINER_STANDBY[1]],
            dead=("rollout/0#1", "trainer/0#1", "trainer/1#1"),
        ),
        ["Promote rollout/0#2", "Promote trainer/0#2", "Start trainer/1#2"],
    ),
    "a reward worker has none": (
        fleet([want("reward/0", 2), *STANDBY[:1]], [have("reward/0", state=S.LOST), STANDBY[1]], dead=("reward/0#1",)),
        ["Start reward/0#2"],
    ),
    "nor a rollout that must not be": (
        fleet(
            [want("rollout/0", 2, prefer_standby=False), STANDBY[0]],
            [have("rollout/0", state=S.LOST), STANDBY[1]],
            dead=("rollout/0#1",),
        ),
        ["Start rollout/0#2"],
    ),
    "a standby that is not warm yet is not waited for": (
        fleet(
            [want("rollout/0", 2), STANDBY[0]],
            [have("rollout/0", state=S.LOST), have("standby/0", state=S.STARTING, pid=0, node="node-6")],
            dead=("rollout/0#1",),
            busy=(("standby/0", 1),),
        ),
        ["Start rollout/0#2"],
    ),
    "one standby serves one of two": (
        fleet(
            [want("rollout/0", 2), want("rollout/1", 2), STANDBY[0]],
            [have("rollout/0", state=S.LOST), have("rollout/1", state=S.LOST), STANDBY[1]],
            dead=("rollout/0#1", "rollout/1#1"),
        ),
        ["Promote rollout/0#2", "Start rollout/1#2"],
    ),
    "a standby goes to the replica that moves to its node, and to no other": (
        fleet(
            [want("rollout/0", 2), want("rollout/1", 2, node="node-6"), STANDBY[0]],
            [have("rollout/0", state=S.LOST), have("rollout/1", state=S.LOST), STANDBY[1]],
            dead=("rollout/0#1", "rollout/1#1"),
        ),
        ["Start rollout/0#2", "Promote rollout/1#2"],
    ),
    "also while the one that moves still ends": (
        fleet(
            [want("rollout/0", 2), want("rollout/1", 2, node="node-6"), STANDBY[0]],
            [have("rollout/0", state=S.LOST), have("rollout/1"), STANDBY[1]],
            dead=("rollout/0#1",),
        ),
        ["Start rollout/0#2", "KillSuperseded rollout/1#1"],
    ),
    "one that was placed there before keeps no standby from another": (
        fleet(
            [want("rollout/0", 2), want("rollout/1", 2, node="node-6"), STANDBY[0]],
            [have("rollout/0", state=S.LOST), have("rollout/1", 2, state=S.LOST), STANDBY[1]],
            dead=("rollout/0#1", "rollout/1#2"),
        ),
        ["Promote rollout/0#2"],
    ),
    "a standby whose process has another name by now serves nobody else": (
        fleet(
            [want("rollout/0", 2), want("rollout/1", 2), STANDBY[0]],
            [have("rollout/0", 2, state=S.STARTING, pid=106), have("rollout/1", state=S.LOST), STANDBY[1]],
            dead=("rollout/1#1",),
        ),
        ["Start rollout/1#2"],
    ),
    "a standby in use is never ended under its old name": (
        fleet(
            [want("rollout/0", 2), want("standby/0", 2, node="node-3")],
            [
                have("rollout/0", state=S.LOST, pid=0),
                have("rollout/0", 2, state=S.SERVING, pid=106, node="node-6"),
                have("standby/0", state=S.STOPPED, pid=106, node="node-6"),
            ],
        ),
        ["Start standby/0#2"],
    ),
    "a standby that died is recovery's": (
        fleet([STANDBY[0]], [replace(STANDBY[1], state=S.LOST)], dead=("standby/0#1",)),
        [],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    world, expected = TABLE[name]
    instructions = reconcile(world)
    assert described(instructions) == expected
    assert all(i.because for i in instructions)
    assert reconcile(world) == instructions


def test_promotion_names_the_standby_and_its_node() -> None:
    world, _ = TABLE["a rollout takes the warm standby"]
    (promote,) = reconcile(world)
    assert isinstance(promote, Promote)
    assert (promote.standby, promote.standby_incarnation, promote.node) == ("standby/0", 1, "node-6")
    assert "a reason" in promote.because


def test_a_quarantined_node_takes_nothing() -> None:
    other = (want("standby/1", node="node-5"), have("standby/1", pid=105, node="node-5"))
    lost = have("rollout/0", state=S.LOST)
    both = fleet([want("rollout/0", 2), STANDBY[0], other[0]], [lost, STANDBY[1], other[1]], dead=("rollout/0#1",))
    (promote,) = reconcile(replace(both, quarantined=(NodeId("node-6"),)))
    assert isinstance(promote, Promote) and promote.standby == "standby/1"
    shut = replace(both, quarantined=(NodeId("node-5"), NodeId("node-6")))
    assert described(reconcile(shut)) == ["Start rollout/0#2"], "on the node that recovery named"
    assert set(free_nodes(shut)).isdisjoint(shut.quarantined)


@pytest.mark.parametrize("standby", ["standby/0", "trainer-standby/0"])
def test_used_up_standby_is_refilled_on_the_free_node_after_a_while(standby: str) -> None:
    used = have(standby, state=S.STOPPED, node="node-6")
    others = [have(f"trainer/{i}", node=f"node-{i}", pid=i + 1) for i in range(4)] + [have("rollout/0", node="node-5")]
    promoted = have("rollout/1", 2, state=S.SERVING, node="node-6", pid=106)
    desired = [want(a.replica, a.incarnation, a.node) for a in (*others, promoted, used)]
    world = fleet(desired, [*others, promoted, used], stopped_seconds=REFILL_SECONDS)
    assert free_nodes(world) == ["node-4"]
    (refill,) = reconcile(world)
    assert isinstance(refill, RefillStandby)
    assert (refill.replica, refill.incarnation, refill.node) == (standby, 2, "node-4")
    assert reconcile(fleet(desired, [*others, promoted, used], stopped_seconds=REFILL_SECONDS - 0.1)) == []


def test_no_refill_while_a_replica_is_missing() -> None:
    used = have("standby/0", state=S.STOPPED, node="node-6")
    starting = have("trainer/0", state=S.STARTING, pid=0)
    busy = (("trainer/0", 1),)
    assert reconcile(fleet([want("trainer/0"), want("standby/0")], [starting, used], busy=busy)) == []
    there = have("trainer/0", state=S.READY)
    world = fleet([want("trainer/0"), want("standby/0")], [there, used])
    assert described(reconcile(world)) == ["RefillStandby standby/0#2"]


def test_no_refill_without_a_free_node() -> None:
    used = have("standby/0", state=S.STOPPED, node="node-6")
    others = [have(f"trainer/{i}", node=f"node-{i}", pid=i + 1) for i in range(7)]
    world = fleet([want(a.replica, 1, a.node) for a in (*others, used)], [*others, used])
    assert reconcile(world) == []


def test_a_node_with_reward_workers_alone_is_free_but_chosen_last() -> None:
    """As for recovery, which would place a replica there."""
    used = have("standby/0", state=S.STOPPED, node="node-6")
    others = [have(f"trainer/{i}", node=f"node-{i}", pid=i + 1) for i in range(4)]
    rewards = [have("reward/0", node="node-0", pid=20), have("reward/1", node="node-4", pid=21)]
    everything = [*others, *rewards, used]
    world = fleet([want(a.replica, 1, a.node) for a in everything], everything)
    assert free_nodes(world) == ["node-5", "node-6", "node-4"]
    full = replace(world, nodes=world.nodes[:5])
    (refill,) = reconcile(full)
    assert isinstance(refill, RefillStandby) and refill.node == "node-4"


class World:
    """Performs instructions as the supervisor would, and lets recovery and fate act at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.next_pid = rng, 0.0, 1000
        self.stopped_at: dict[tuple[ReplicaId, int], float] = {}
        placed = place(parse_job({"runtime": {"trainer_standbys": 1, "nodes": 8}}))
        self.desired = {d.replica: d for d in (want(r, node=n) for r, n in placed.items())}
        self.actual: dict[tuple[ReplicaId, int], Actual] = {}
        self.living: set[int] = set()

    def fleet(self) -> ClusterState:
        alive = {k for k, a in self.actual.items() if a.state is not S.STOPPED and a.pid in self.living}
        return ClusterState(
            desired=self.desired,
            actual=self.actual,
            alive=alive,
            busy=(),
            nodes=NODES,
            stopped_seconds={key: self.now - at for key, at in self.stopped_at.items()},
        )

    def perform(self, i: ReconcileStep) -> None:
        key = (i.replica, i.incarnation)
        match i:
            case MarkLost():
                self.actual[key] = replace(self.actual[key], state=S.LOST)
            case KillSuperseded() | StopReplica():
                record = self.actual[key]
                assert record.state is not S.STOPPED
                wanted = self.desired.get(i.replica)
                assert wanted is None or wanted.incarnation > i.incarnation, "a desired incarnation was ended"
                self.living.discard(record.pid)
                state = S.STOPPED if isinstance(i, StopReplica) else S.LOST
                self.actual[key] = replace(record, state=state)
            case Start():
                self.next_pid += 1
                self.living.add(self.next_pid)
                self.actual[key] = have(i.replica, i.incarnation, S.READY, self.next_pid, i.node)
            case Promote():
                old = (i.standby, i.standby_incarnation)
                assert self.actual[old].pid in self.living
                self.actual[key] = replace(self.actual[old], replica=i.replica, incarnation=i.incarnation)
                self.actual[old], self.stopped_at[old] = replace(self.actual[old], state=S.STOPPED), self.now
            case RefillStandby():
                self.desired[i.replica] = want(i.replica, i.incarnation, i.node)

    def disturb(self) -> None:
        self.now += self.rng.uniform(0, 10)
        if self.living and self.rng.random() < 0.5:
            self.living.discard(self.rng.choice(sorted(self.living)))
        if self.rng.random() < 0.5:
            replica = self.rng.choice(sorted(self.desired))
            old = self.desired[replica]
            self.desired[replica] = want(replica, old.incarnation + 1, old.node)

    def validate(self) -> None:
        records = [a for k, a in self.actual.items() if a.state in LIVING and a.pid in self.living]
        assert len({a.pid for a in records}) == len(records), "one process under two names"
        assert len({a.replica for a in records}) == len(records), "two processes of one replica"


@pytest.mark.parametrize("seed", range(50))
def test_random_worlds_settle_and_keep_the_invariants(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(30):
        for _ in range(12):  # an instruction may be the condition of another: a few turns settle everything
            instructions = reconcile(world.fleet())
            for i in instructions:
                untouched = world.living - {world.actual[(i.replica, i.incarnation)].pid} if _ends(i) else world.living
                world.perform(i)
                assert untouched <= world.living, f"{i} ended another process"
                world.validate()
            if not instructions:
                break
        assert reconcile(world.fleet()) == []
        for replica, desired in world.desired.items():
            assert (replica, desired.incarnation) in world.actual
        world.disturb()


def _ends(i: ReconcileStep) -> bool:
    return isinstance(i, KillSuperseded | StopReplica)


def test_placement_of_the_default_job() -> None:
    placed = place(JobConfig())
    assert placed == {
        "controller/0": "node-0",
        "reward/0": "node-0",
        "reward/1": "node-0",
        "trainer/0": "node-1",
        "trainer/1": "node-2",
        "rollout/0": "node-3",
        "rollout/1": "node-4",
        "rollout/2": "node-5",
        "standby/0": "node-6",
    }


def test_too_few_nodes_are_reported_with_the_role_that_lacks_them() -> None:
    with pytest.raises(NotEnoughNodes, match=r"need 7 .*rollout lacks 1 of 3, standby lacks 1 of 1"):
        place(parse_job({"runtime": {"nodes": 5}}))
    with pytest.raises(NotEnoughNodes, match=r"need 9 .*trainer-standby lacks 1 of 2"):
        place(parse_job({"runtime": {"nodes": 8, "trainer_standbys": 2}}))


def test_the_replicas_of_a_hybrid_share_a_node_and_all_others_have_their_own() -> None:
    job = parse_job({"roles": {"trainer": 2, "rollout": 4}, "runtime": {"mode": "semi_sync", "nodes": 6}})
    assert place(job) == {
        "controller/0": "node-0",
        "reward/0": "node-0",
        "reward/1": "node-0",
        "trainer/0": "node-1",
        "rollout/0": "node-1",
        "trainer/1": "node-2",
        "rollout/1": "node-2",
        "rollout/2": "node-3",
        "rollout/3": "node-4",
        "standby/0": "node-5",
    }
    few = parse_job({"roles": {"trainer": 2, "rollout": 4}, "runtime": {"mode": "semi_sync", "nodes": 4}})
    with pytest.raises(NotEnoughNodes, match=r"need 6 .*up to rollout/1 that of their trainer\): rollout lacks 1 of 2"):
        place(few)
    assert len(set(place(parse_job({"roles": {"rollout": 2}, "runtime": {"mode": "sync", "nodes": 3}})).values())) == 3


@pytest.mark.parametrize("standby", ["standby/0", "trainer-standby/0"])
def test_a_standby_is_refilled_only_where_its_ranks_have_gpus(standby: str) -> None:
    used_up = have(standby, state=S.STOPPED)
    small = {"trainer-standby": NODES, "standby": NODES[:5]}
    found = reconcile(replace(fleet([want(standby)], [used_up]), too_small=small))
    wanted = [NodeId("node-5")] if standby == "standby/0" else []
    assert [i.node for i in found if isinstance(i, RefillStandby)] == wanted


def test_no_refill_while_a_replica_has_lent_its_node() -> None:
    used_up = have("standby/0", state=S.STOPPED, node="node-6")
    ended = replace(LENT[1], state=S.LOST)
    found = reconcile(fleet([LENT[0], want("standby/0")], [ended, used_up], dead=("rollout/0#1",)))
    assert found == [], "a free node is first the lender's"


def test_a_run_that_is_started_again_keeps_what_is_lent_as_long_as_the_node_is_needed() -> None:
    placed = place(JobConfig())
    trainer, rollout = ReplicaId("trainer/1"), ReplicaId("rollout/2")
    lent = {rollout: want("rollout/2", 2, node="")}
    assert placed_again(placed, lent, NODES, ()) == placed, "every node is good again"
    found = placed_again(placed, lent, NODES, {placed[trainer]})
    assert found == {**placed, trainer: placed[rollout], rollout: ""}
    more = (*NODES, NodeId("node-7"))
    assert placed_again(placed, lent, more, {placed[trainer]}) == {**placed, trainer: "node-7"}
    assert placed_again(placed, {}, more, {placed[trainer]}) == {**placed, trainer: "node-7"}
