"""A trainer that has lost its node gets that of a rollout: which one, what is written, and when the rollout is back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, ReplicaLoad, Suspect
from rolecall.core.errors import CommandRefused
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import LenderResumed, NodeLent
from rolecall.core.membership import Desired, ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.borrowing import choose_lenders, comebacks
from rolecall.recovery.fleet_view import FleetView, ReplicaView, RunPlaces
from rolecall.recovery.incidents import ActionFailure, IncidentOutcome
from rolecall.recovery.nodes import returned_nodes
from rolecall.recovery.operators import commands, queries
from rolecall.recovery.policy import PolicyInput, decide, lost_nodes, without_node
from rolecall.testing.recovery_world import FLEET, diagnosis
from rolecall.views.incidents import named_by_plans
from tests.recovery.test_policy import ask, failed, view
from tests.recovery.world import World
from tests.terminal.texts import status_text

A, F, K = ActionKind, FaultClass, EventKind
NODES = ("node-0", *(f"node-{n}" for n, replica in enumerate(FLEET) if not replica.startswith("reward/")))
LOST_NODE = "node-7"  # of trainer/1
LOADS = {
    "rollout/0": ReplicaLoad(requests=2, tokens=900),
    "rollout/1": ReplicaLoad(requests=8, tokens=40),
    "rollout/2": ReplicaLoad(requests=5, tokens=300),
}


def fleet(*more: ReplicaView, places: RunPlaces | None = None, **states: ReplicaState) -> FleetView:
    """`rollout_1=LOST`: its state. Reward workers are on the first node, each other replica has one of its own."""
    of = {name.replace("_", "/"): state for name, state in states.items()}
    homes = {r: 0 if r.startswith("reward/") else n for n, r in enumerate(FLEET)}
    rows = [view(r, f"node-{n}", state=of.get(r, ReplicaState.SERVING)) for r, n in homes.items()]
    return FleetView(replicas=(*rows, *more), places=places or RunPlaces(nodes=NODES))


def standby(replica: str, node: str) -> ReplicaView:
    return view(replica, node, state=ReplicaState.READY)


def lent(replica: str) -> ReplicaView:
    return replace(view(replica, "", desired=2, state=ReplicaState.LOST), incarnation=1)


def of_node(fault: FaultClass, *who: tuple[str, str]) -> Diagnosis:
    """(replica, node)."""
    suspects = tuple(Suspect(node=NodeId(node), role=r.partition("/")[0], replica=r, incarnation=1) for r, node in who)
    return replace(diagnosis(fault), suspects=suspects)


def asked(view: FleetView, fault: FaultClass = F.GPU, **more: object) -> PolicyInput:
    question = ask(
        of_node(fault, ("trainer/1", LOST_NODE)), view=view, **{k: v for k, v in more.items() if k != "busy"}
    )
    return replace(question, loads=LOADS, busy=more.get("busy", frozenset()))


def test_the_rollout_whose_end_costs_least_lends_its_node_with_the_arithmetic() -> None:
    question = asked(fleet())
    plan = decide(question).plan
    assert plan.action is A.REPLACE_NODE and [t.replica for t in plan.targets] == ["trainer/1"]
    assert plan.lent == (PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-4")),)
    assert plan.because.endswith(
        "; no standby of trainer is ready, and no node is free; rollout/1#1 lends node-4: it holds 8 unfinished "
        "requests with 40 tokens; more would be lost with rollout/2: 5 unfinished requests with 300 tokens, "
        "rollout/0: 2 unfinished requests with 900 tokens; 2 rollouts of 3 go on, at least 1 must"
    )
    assert plan.intent == "move trainer/1#1 on node-7 to node-4, which rollout/1#1 lends"
    assert decide(PolicyInput.from_dict(question.to_dict())).to_dict() == decide(question).to_dict()
    assert Plan.from_dict(plan.to_dict()) == plan
    assert replace(plan, lent=()).digest != plan.digest, "an operator approves the lender, too"


def test_a_question_of_an_older_journal_can_be_read() -> None:
    body = asked(fleet()).to_dict()
    for name in ("loads", "busy"):
        del body[name]
    del body["fleet"]["places"]
    plan = decide(PolicyInput.from_dict(body)).plan
    assert [t.replica for t in plan.lent] == ["rollout/0"], "without loads by name"
    stored = {k: v for k, v in replace(plan, lent=()).to_dict().items() if k != "lent"}
    assert Plan.from_dict(stored).lent == ()


@pytest.mark.parametrize(
    ("view", "more", "lender"),
    [
        pytest.param(fleet(standby("trainer-standby/0", "node-9")), {}, None, id="a standby of its role"),
        pytest.param(fleet(places=RunPlaces(nodes=(*NODES, "node-8"))), {}, None, id="a free node"),
        pytest.param(fleet(standby("standby/0", "node-9")), {}, "standby/0", id="a standby of rollouts does no work"),
        pytest.param(fleet(), {"busy": frozenset({"rollout/1"})}, "rollout/2", id="one of another incident"),
        pytest.param(fleet(rollout_1=ReplicaState.READY), {}, "rollout/2", id="one that does not serve"),
        pytest.param(fleet(standby("standby/0", "node-4")), {}, "rollout/2", id="one that shares its node"),
        pytest.param(fleet(), {"lost_nodes": frozenset({"node-4"})}, "rollout/2", id="one on a lost node"),
    ],
)
def test_who_lends(view: FleetView, more: dict[str, object], lender: str | None) -> None:
    plan = decide(asked(view, **more)).plan
    assert plan.action is A.REPLACE_NODE
    assert [str(t.replica) for t in plan.lent] == ([lender] if lender else [])


@pytest.mark.parametrize(
    ("view", "config", "reason"),
    [
        (fleet(), {"rollouts_min": 3}, "3 rollouts serving, 3 must remain (recovery.rollouts_min)"),
        (
            fleet(rollout_0=ReplicaState.LOST, rollout_1=ReplicaState.STARTING),
            {},
            "1 rollout serving, 1 must remain (recovery.rollouts_min); rollout/0 is lost; rollout/1 is starting",
        ),
        (
            fleet(places=RunPlaces(nodes=NODES, gpus=dict.fromkeys(NODES, 1), ranks={"trainer": 2})),
            {},
            "rollout/0 has 1 GPU on node-3, and a trainer needs 2; ",
        ),
    ],
    ids=["the minimum", "others are lost", "GPUs"],
)
def test_where_nothing_can_yield_oncall_is_paged(view: FleetView, config: dict[str, int], reason: str) -> None:
    decision = decide(asked(view, **config))
    assert decision.page_oncall and decision.plan.action is A.TOLERATE
    assert "no node is free; nothing can lend its node: " in decision.plan.because
    assert reason in decision.plan.because


def test_a_node_with_too_little_memory_is_not_lent() -> None:
    gib = 1 << 30
    places = RunPlaces(nodes=NODES, memory_bytes={"trainer": 3 * gib})
    room = {"rollout/0": 1, "rollout/1": 1, "rollout/2": 2}
    loads = {r: replace(LOADS[r], available_bytes=n * gib, rss_bytes=gib) for r, n in room.items()}
    loan = choose_lenders(fleet(places=places), loads, 1, rollouts_min=1)
    assert [t.replica for t in loan.lenders] == ["rollout/2"]
    assert "a trainer needs 3.0 GiB, and 2.0 + 1.0 GiB will be free" in loan.because
    assert "rollout/1 would leave 1.0 + 1.0 GiB on node-4, and a trainer needs 3.0 GiB" in loan.because


def test_a_machine_that_computed_wrong_numbers_again_is_left_also_without_a_free_node() -> None:
    question = asked(fleet())
    twice = replace(of_node(F.SILENT_CORRUPTION, ("trainer/1", LOST_NODE)), detectors=("wrong_numbers",))
    plan = decide(replace(question, diagnosis=twice)).plan
    assert plan.action is A.REPLACE_NODE and [t.replica for t in plan.lent] == ["rollout/1"]


def test_the_node_of_a_standby_goes_to_one_replica() -> None:
    free = fleet(standby("standby/0", "node-9"))
    assert free.spare_node("rollout", frozenset()) == "node-9"
    rows = tuple(replace(r, next_node="node-9") if r.replica == "rollout/1" else r for r in free.replicas)
    assert replace(free, replicas=rows).spare_node("rollout", frozenset()) is None


def test_a_trainer_of_hybrids_needs_the_gpus_of_the_larger_half() -> None:
    places = RunPlaces(nodes=NODES, gpus=dict.fromkeys(NODES, 2), ranks={"trainer": 1, "rollout": 4}, num_hybrids=1)
    assert [places.gpus_needed(role) for role in ("trainer", "rollout", "reward")] == [4, 4, 0]
    assert replace(places, num_hybrids=0).gpus_needed("trainer") == 1


def test_a_rollout_neither_borrows_nor_shares_a_node() -> None:
    question = ask(of_node(F.GPU, ("rollout/1", "node-4")), view=fleet(standby("trainer-standby/0", "node-9")))
    decision = decide(question)
    assert decision.page_oncall and "no standby of rollout is ready, and no node is free" in decision.plan.because


def test_a_reward_worker_shares_a_node_and_leaves_free_ones_free() -> None:
    assert decide(ask(of_node(F.GPU, ("reward/0", "node-0")), view=fleet())).plan.action is A.REPLACE_NODE
    seen = fleet(view("reward/2", "node-9"), places=RunPlaces(nodes=(*NODES, "node-8")))
    assert seen.spare_node("reward", frozenset()) == "node-3"
    assert seen.free_nodes("trainer") == ["node-8", "node-9"], "a reward worker needs no node for itself"


def test_two_trainers_borrow_two_nodes_or_none() -> None:
    both = of_node(F.NODE_LOST, ("trainer/0", "node-6"), ("trainer/1", LOST_NODE))
    question = replace(ask(both, view=fleet()), loads=LOADS)
    assert [t.replica for t in decide(question).plan.lent] == ["rollout/1", "rollout/2"]
    fewer = replace(question, config=question.config.model_copy(update={"rollouts_min": 2}))
    assert decide(fewer).plan.action is A.TOLERATE


def test_a_replacement_that_has_left_the_faulty_node_borrows_no_second_one() -> None:
    tried = replace(failed(replica="trainer/1", failure=ActionFailure.DIED), action=A.REPLACE_NODE)
    moved = replace(view("trainer/1", "node-4", desired=2, state=ReplicaState.LOST), started=True)
    rows = tuple(moved if r.replica == "trainer/1" else r for r in fleet().replicas if r.replica != "rollout/1")
    question = asked(FleetView(replicas=(*rows, lent("rollout/1")), places=RunPlaces(nodes=(*NODES,))))
    again = decide(replace(question, past=(tried,), quarantined_nodes=frozenset({LOST_NODE}))).plan
    assert again.action is A.REPLACE_REPLICA and again.lent == () and again.targets[0].node == "node-4"


@pytest.mark.parametrize(
    ("view", "avoid", "wanted"),
    [
        (fleet(lent("rollout/9")), (), {}),
        (fleet(lent("rollout/9"), places=RunPlaces(nodes=(*NODES, "node-8"))), (), {"rollout/9": "node-8"}),
        (fleet(lent("rollout/9"), places=RunPlaces(nodes=(*NODES, "node-8"))), ("node-8",), {}),
        (
            fleet(lent("rollout/9"), lent("standby/0"), places=RunPlaces(nodes=(*NODES, "node-8"))),
            (),
            {"rollout/9": "node-8"},
        ),
        (fleet(lent("rollout/9"), places=RunPlaces(nodes=(*NODES, "node-8"), gpus={"node-0": 1})), (), {}),
        (
            fleet(
                lent("rollout/9"),
                replace(view("trainer/9", "node-3"), desired_incarnation=2, next_node="node-8"),
                places=RunPlaces(nodes=(*NODES, "node-8")),
            ),
            (),
            {},
        ),
    ],
    ids=["none is free", "one is free", "quarantined", "rollouts first", "without GPUs", "another one starts there"],
)
def test_when_a_lender_runs_again(view: FleetView, avoid: tuple[str, ...], wanted: dict[str, str]) -> None:
    found = comebacks(view, avoid)
    assert {str(c.replica): str(c.node) for c in found} == wanted and all(c.incarnation == 3 for c in found)


def faulty_node(world: World, fault: FaultClass = F.GPU) -> None:
    world.detector.extra = [replace(of_node(fault, ("trainer/1", LOST_NODE)), onset=world.clock.wall())]


def test_the_borrowed_node_works_and_is_given_back(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=0)
    world.detector.known_loads = LOADS
    run, watch = RunDir(tmp_path), world.watch()
    faulty_node(world)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    desired = world.journal.desired()
    assert (desired[ReplicaId("trainer/1")].node, desired[ReplicaId("rollout/1")].lent) == ("node-4", True)
    assert sorted(world.runtime.replaced) == [("rollout/1", 1), ("trainer/1", 1)]
    lent = world.events(K.NODE_LENT)[0].as_(NodeLent)
    assert (lent.replica, lent.incarnation, lent.node, lent.to) == ("rollout/1", 1, "node-4", "trainer/1")
    world.run(30, watch)
    assert len(world.incidents()) == 1, "a lent replica is neither lost nor silent"
    assert ("rollout/1", 1) in named_by_plans(world.journal.events())
    shown = status_text(queries.status(run, world.clock))
    assert re.search(r"rollout/1#1 +lent its node +node-4 to trainer/1", shown), shown
    assert queries.replay(run, world.only().incident_id)["same"] is True
    with pytest.raises(CommandRefused, match="rollout/1 has lent its node"):
        commands.replace(run, "rollout/1", "it is not here", "alice", world.clock)

    world.journal.set_flag("paused", "bob: a look")
    commands.return_node(run, LOST_NODE, "alice", "a new GPU", world.clock)
    world.run(3, watch)
    assert world.events(K.LENDER_RESUMED) == [], "a pause holds it back"
    world.journal.set_flag("paused", None)
    world.until(lambda: world.runtime.healthy("rollout/1"), watch)
    back = world.events(K.LENDER_RESUMED)[0].as_(LenderResumed)
    assert (back.replica, back.incarnation, back.node) == ("rollout/1", 3, LOST_NODE)
    assert back.because == "node-7 is free: rollout/1, which had lent its node, runs again"
    world.run(10, watch)
    assert len(world.events(K.LENDER_RESUMED)) == 1 and len(world.incidents()) == 1


def test_a_lost_node_takes_nothing_until_it_is_returned(tmp_path: Path) -> None:
    """Also where none may be quarantined."""
    world = World(tmp_path, free_nodes=0, quarantined_share_max=0.0)
    run, watch = RunDir(tmp_path), world.watch()
    faulty_node(world, F.NODE_LOST)
    world.until(world.all_closed, watch)
    world.run(5, watch)
    assert world.journal.desired()[ReplicaId("rollout/0")].lent and world.events(K.LENDER_RESUMED) == []
    world.detector.extra = []
    commands.return_node(run, LOST_NODE, "alice", "a new machine", world.clock)
    assert lost_nodes(world.incidents(), returned_nodes(world.journal)) == frozenset()
    world.until(lambda: world.events(K.LENDER_RESUMED), watch)


def test_an_approved_plan_whose_lender_is_gone_is_proposed_anew_with_another_one(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=0, mode="approve")
    watch = world.watch()
    faulty_node(world)
    world.until(lambda: world.events(K.PLAN_PROPOSED), watch)
    rollout = world.journal.desired()[ReplicaId("rollout/0")]
    world.journal.set_desired(replace(rollout, incarnation=2))
    attempt = world.only().attempt
    assert attempt is not None and attempt.plan.lent == (
        PlanTarget(replica=rollout.replica, incarnation=1, node=rollout.node),
    )
    commands.approve_plan(RunDir(tmp_path), attempt.plan.digest, "alice", world.clock)
    world.until(lambda: len(world.events(K.PLAN_PROPOSED)) == 2, watch)
    world.run(3, watch)
    anew = world.only().attempt
    assert anew is not None and anew.decision is None and anew.plan.digest != attempt.plan.digest
    assert ("trainer/1", 1) not in world.runtime.replaced, "nobody has approved that"
    commands.approve_plan(RunDir(tmp_path), anew.plan.digest, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.events(K.ONCALL_PAGED) == []


@pytest.mark.parametrize("free", [(), ("node-20",), ("node-20", "node-21")], ids=len)
@pytest.mark.parametrize("lost", [(), ("node-6",), ("node-7",), ("node-6", "node-7")], ids=len)
@pytest.mark.parametrize("fault", [F.CRASH, F.GPU])
@pytest.mark.parametrize("rollouts_min", [1, 3])
def test_a_plan_has_the_nodes_that_it_was_made_for(
    fault: FaultClass, lost: tuple[str, ...], free: tuple[str, ...], rollouts_min: int
) -> None:
    """Else it would be made again without end."""
    both = of_node(fault, ("trainer/0", "node-6"), ("trainer/1", LOST_NODE))
    seen = fleet(places=RunPlaces(nodes=(*NODES, *free)))
    question = replace(ask(both, view=seen, lost_nodes=frozenset(lost), rollouts_min=rollouts_min), loads=LOADS)
    plan = decide(question).plan
    assert without_node(question, plan) == ()
    if plan.action is A.REPLACE_NODE and not plan.lent:
        assert without_node(replace(question, fleet=fleet()), plan) != (), "the free nodes are taken"


def test_a_standby_lends_its_node_also_while_too_few_rollouts_serve(tmp_path: Path) -> None:
    """Policy and guard agree: else the plan would be made again without end."""
    world = World(tmp_path, free_nodes=1, rollouts_min=3)
    watch = world.watch()
    world.journal.set_desired(Desired(replica=ReplicaId("standby/0"), incarnation=1, node=NodeId("node-8")))
    world.run(3, watch)
    world.journal.change_actual(ReplicaId("rollout/0"), 1, state=ReplicaState.READY)
    faulty_node(world)
    world.until(lambda: world.events(K.NODE_LENT), watch)
    assert world.events(K.INCIDENT_UPDATED) == []


def take_free_node(world: World) -> None:
    """Another replica is desired on the only free node."""
    free = NodeId(f"node-{len(FLEET)}")
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/3"), incarnation=1, node=free))


def test_an_approved_plan_whose_free_node_is_taken_is_proposed_anew_with_a_lender(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=1, mode="approve")
    watch = world.watch()
    faulty_node(world, F.NODE_LOST)
    world.until(lambda: world.events(K.PLAN_PROPOSED), watch)
    attempt = world.only().attempt
    assert attempt is not None and not attempt.plan.lent
    take_free_node(world)
    commands.approve_plan(RunDir(tmp_path), attempt.plan.digest, "alice", world.clock)
    world.until(lambda: len(world.events(K.PLAN_PROPOSED)) == 2, watch)
    anew = world.only().attempt
    assert anew is not None and anew.plan.lent and not world.runtime.replaced
    commands.approve_plan(RunDir(tmp_path), anew.plan.digest, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.runtime.healthy("trainer/1")


def test_a_plan_that_waited_while_its_node_was_taken_is_made_again_and_again_once_there_is_one(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=1)
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    world.runtime.inject("rollout/1", F.CRASH)
    world.runtime.processes["rollout/1"].fault = None  # diagnosed by its node alone
    world.detector.extra = [of_node(F.NODE_LOST, ("rollout/1", "node-4"))]
    world.until(lambda: world.incidents() and world.only().attempt, watch)
    take_free_node(world)
    world.run(3, watch)
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert {i.outcome for i in world.incidents()} == {IncidentOutcome.TOLERATED} and world.events(K.ONCALL_PAGED)
    world.journal.remove_desired(ReplicaId("rollout/3"))
    world.until(lambda: world.runtime.healthy("rollout/1"), watch)
    assert world.journal.desired()[ReplicaId("rollout/1")].node == f"node-{len(FLEET)}"


def test_a_plan_that_waited_is_made_again_when_its_lender_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=0)
    watch = world.watch()
    world.journal.set_flag("paused", "bob: a look")
    faulty_node(world)
    world.until(lambda: world.incidents() and world.only().attempt, watch)
    attempt = world.only().attempt
    assert attempt is not None and [t.replica for t in attempt.plan.lent] == ["rollout/0"]
    rollout = world.journal.desired()[ReplicaId("rollout/0")]
    world.journal.set_desired(replace(rollout, incarnation=2))
    world.until(lambda: world.runtime.healthy("rollout/0"), watch)
    world.journal.set_flag("paused", None)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and ("trainer/1", 1) in world.runtime.replaced
    assert world.events(K.NODE_LENT)[0].as_(NodeLent).incarnation == (1 if world.runtime.healthy("rollout/0") else 2)


@pytest.mark.parametrize("free_nodes", [0, 1])
def test_a_replica_whose_node_takes_no_process_moves_once_another_node_is_free(tmp_path: Path, free_nodes: int) -> None:
    """Raylet and agent of a node die together: the start of the replacement there is refused at once."""
    world = World(tmp_path, free_nodes=1)
    watch = world.watch()
    if not free_nodes:
        take_free_node(world)
    world.runtime.refusing = {"node-4": "node-4 has no raylet any more"}
    world.runtime.inject("rollout/1", F.CRASH)
    world.runtime.processes["rollout/1"].fault = None
    world.detector.extra = [of_node(F.CRASH, ("rollout/1", "node-4"))]
    world.until(lambda: world.incidents() and world.all_closed(), watch)
    if not free_nodes:
        world.run(60, watch)
        assert {i.outcome for i in world.incidents()} == {IncidentOutcome.TOLERATED}
        assert world.desired("rollout/1") == 2 and len(world.events(K.ONCALL_PAGED)) == 2
        world.journal.remove_desired(ReplicaId("rollout/3"))
    world.until(lambda: world.runtime.healthy("rollout/1"), watch)
    world.run(5, watch)
    assert world.incidents()[-1].outcome is IncidentOutcome.RESOLVED and world.desired("rollout/1") == 3
    assert [e.payload.to_body()["failure"] for e in world.events(K.ACTION_FAILED)] == ["not_started"]


def test_a_trainer_for_which_there_was_no_node_moves_once_there_is_one(tmp_path: Path) -> None:
    world = World(tmp_path, free_nodes=0, rollouts_min=3)
    run, watch = RunDir(tmp_path), world.watch()
    world.runtime.inject("trainer/1", F.CRASH)
    faulty_node(world, F.NODE_LOST)
    world.until(lambda: world.incidents() and world.all_closed(), watch)
    world.run(20, watch)
    known = len(world.incidents())
    assert {i.outcome for i in world.incidents()} == {IncidentOutcome.TOLERATED} and world.events(K.ONCALL_PAGED)
    assert not world.runtime.replaced
    world.detector.extra = []
    commands.return_node(run, LOST_NODE, "alice", "a new machine", world.clock)
    world.until(lambda: world.runtime.healthy("trainer/1"), watch)
    world.run(20, watch)
    assert len(world.incidents()) == known + 1 and world.incidents()[-1].outcome is IncidentOutcome.RESOLVED


@pytest.mark.parametrize("written", [0, 1])
def test_the_two_records_are_written_once_also_if_a_watch_dies_between_them(tmp_path: Path, written: int) -> None:
    world = World(tmp_path, free_nodes=0)
    lease = world.journal.acquire("watch", "me", 5.0)
    assert lease is not None
    plan = Plan(
        incident_id=IncidentId("inc-1-x"),
        action=A.REPLACE_NODE,
        targets=(PlanTarget(replica=ReplicaId("trainer/1"), incarnation=1, node=NodeId(LOST_NODE)),),
        because="it is so",
        lent=(PlanTarget(replica=ReplicaId("rollout/2"), incarnation=1, node=NodeId("node-5")),),
    )
    actuator = RayRuntime(world.journal)
    assert actuator.perform(plan, lease).done
    whole = world.journal.desired()
    if not written:  # as if only the lender's record had been written
        (tmp_path / "other").mkdir()
        other = World(tmp_path / "other", free_nodes=0)
        lease = other.journal.acquire("watch", "me", 5.0)
        assert lease is not None
        other.journal.set_desired(whole[ReplicaId("rollout/2")], lease=lease)
        world, actuator = other, RayRuntime(other.journal)
    assert actuator.perform(plan, lease).done
    assert world.journal.desired() == whole
    assert len(world.events(K.NODE_LENT)) == written
    assert actuator.also_hit(plan) == ("rollout/2 ends and lends node-5",)


def test_a_restart_leaves_a_lent_replica_out() -> None:
    rows = tuple(r for r in fleet().replicas if r.replica != "rollout/2")
    died = replace(failed(ActionFailure.DIED), action=A.REPLACE_REPLICA)
    view_ = FleetView(replicas=(*rows, lent("rollout/2")))
    supports = frozenset({A.REPLACE_REPLICA, A.REPLACE_NODE, A.RESTART_ROLE, A.RESTART_JOB})
    dead = replace(view("rollout/1", "node-4", desired=3, state=ReplicaState.LOST), started=True)
    view_ = replace(view_, replicas=tuple(dead if r.replica == "rollout/1" else r for r in view_.replicas))
    past = (died, replace(died, targets=(replace(died.targets[0], incarnation=2),)))
    plan = decide(ask(diagnosis(F.CRASH, ("rollout/1", 1)), *past, view=view_, supports=supports)).plan
    assert plan.action is A.RESTART_ROLE and [t.replica for t in plan.targets] == ["rollout/0", "rollout/1"]
