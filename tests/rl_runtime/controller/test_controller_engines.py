"""Engines and trainers that answer late, or with something else than an answer: the others continue, nothing counts
twice."""

import asyncio
import dataclasses
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import PeerLost, WireError
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.membership import Desired, ReplicaState
from rolecall.rl_runtime.controller import rollout_pool
from rolecall.rl_runtime.controller.background_tasks import FIRST_CALLS_MAX
from rolecall.rl_runtime.controller.reward_scoring import ATTEMPTS_MAX
from rolecall.rl_runtime.controller.rollout_pool import DRAIN_SECONDS, FAILURES_MAX, SILENT_SECONDS
from tests.rl_runtime.loop import World, small_job
from tests.rl_runtime.simulated_fleet import UPDATE_SECONDS, FakeRollout, FakeWeightPull

FIRST_CALLS = {"rollout/1": FAILURES_MAX, "trainer/1": FIRST_CALLS_MAX, "reward/1": ATTEMPTS_MAX}
"""Replica -> first calls that fail until it is given up."""


async def at_step(w: World, step: int) -> None:
    while not (w.controllers and w.controllers[-1].state.step >= step):
        await asyncio.sleep(0.01)


def world(path: Path, script: Any = None, **rest: Any) -> World:
    return World(job=small_job(), path=path, seed=0, script=script, **rest)


def test_a_version_goes_round_from_one_to_the_next_and_each_holder_gives_it_once(tmp_path: Path) -> None:
    w = world(tmp_path).run()
    w.check()
    by_version: defaultdict[int, list[FakeWeightPull]] = defaultdict(list)
    for pull in w.fleet.pulls:
        by_version[pull.version].append(pull)
    whole = [pulls for pulls in by_version.values() if len(pulls) == 3]
    assert len(whole) >= 6, "versions follow each other too fast for this test to see anything"
    for pulls in whole:
        assert len({p.holder for p in pulls}) == 3, "one holder gave it twice"
        assert any(p.holder.startswith("rollout") for p in pulls), "no relay was used"
        first, _, last = sorted(p.begun for p in pulls)
        assert last >= first + UPDATE_SECONDS, "three at a time, with two trainers to give"


@pytest.mark.parametrize("replica", list(FIRST_CALLS))
def test_a_replica_that_answers_its_first_call_with_errors_ends_nothing_and_is_given_up_by_name(
    tmp_path: Path, replica: str
) -> None:
    async def script(w: World) -> None:
        w.fleet.newest(replica).body.info_raises = [WireError("not a message")] * 1000

    w = world(tmp_path, script).run()
    w.check()
    assert len(w.controllers) == 1
    (lost,) = w.events(EventKind.REPLICA_LOST)
    assert (lost["replica"], lost["incarnation"]) == (replica, 1)
    assert f"failed {FIRST_CALLS[replica]} times" in lost["because"] and "WireError: not a message" in lost["because"]


@pytest.mark.parametrize("replica", list(FIRST_CALLS))
def test_a_replica_whose_first_calls_fail_works_eventually(tmp_path: Path, replica: str) -> None:
    async def script(w: World) -> None:
        w.fleet.newest(replica).body.info_raises = [RuntimeError("not yet")] * (FIRST_CALLS[replica] - 1)

    w = world(tmp_path, script).run()
    w.check()
    assert not w.events(EventKind.REPLICA_LOST)
    assert w.journal.current()[ReplicaId(replica)].state is ReplicaState.SERVING


def num_streaming(w: World, replica: str) -> int:
    """Requests that lie with it and have tokens."""
    return sum(map(bool, w.controllers[-1].table.offsets((ReplicaId(replica), 1)).values()))


def test_an_engine_that_answers_but_loads_no_version_is_given_up_by_name(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 2)
        w.fleet.newest("rollout/1").body.bad_updates = 1000

    w = world(tmp_path, script).run()
    w.check()
    (lost,) = w.events(EventKind.REPLICA_LOST)
    assert (lost["replica"], lost["incarnation"]) == ("rollout/1", 1)
    assert f"its update failed {FAILURES_MAX} times" in lost["because"] and "longer than the context" in lost["because"]


def test_requests_of_a_hung_rollout_continue_elsewhere_without_its_replacement(tmp_path: Path) -> None:
    """Mode observe: recovery does nothing, and may do nothing for hours."""
    hung: list[float] = []

    async def script(w: World) -> None:
        await at_step(w, 3)
        while num_streaming(w, "rollout/1") < 3:
            await asyncio.sleep(0.01)
        w.fleet.hang("rollout/1")
        hung.append(w.clock.wall())

    w = world(tmp_path, script, recovers=False).run()
    found = w.check()
    assert set(found.dropped_by_reason) <= {"run_ended"}, "a group was lost with the one that hangs"
    (moved,) = w.journal.events(kinds=[EventKind.REQUESTS_REASSIGNED])
    assert moved.payload.from_replica == "rollout/1" and moved.payload.tokens_kept >= 3
    assert "rollout/1#1" in moved.payload.because
    assert moved.wall_at - hung[0] <= SILENT_SECONDS + 1.0
    assert not w.fleet.started_over, "streamed tokens were made again"
    assert not w.events(EventKind.REPLICA_LOST), "it was given up without a request"
    assert w.journal.current()[ReplicaId("rollout/1")].state is ReplicaState.SERVING


def test_a_rollout_that_recovers_counts_nothing_twice_and_works_again(tmp_path: Path) -> None:
    late: list[set[str]] = []

    async def script(w: World) -> None:
        await at_step(w, 3)
        while num_streaming(w, "rollout/1") < 3:
            await asyncio.sleep(0.01)
        body = w.fleet.hang("rollout/1").body
        while not w.events(EventKind.REQUESTS_REASSIGNED):
            await asyncio.sleep(0.01)
        late.append(set(body.held))
        # Late tokens are for requests that it no longer has (`check` compares every token trained on).
        w.fleet.resume("rollout/1")
        step = w.controllers[-1].state.step
        while late[0] & set(body.held) or not num_streaming(w, "rollout/1"):
            assert w.controllers[-1].state.step < step + 10, "it was never asked to drop it, or got no work again"
            await asyncio.sleep(0.01)
        late.append(set())

    w = World(job=small_job(num_steps=40), path=tmp_path, seed=0, script=script, recovers=False).run()
    found = w.check()
    assert set(found.dropped_by_reason) <= {"run_ended"}
    assert len(late) == 2 and len(late[0]) >= 3
    assert len(w.events(EventKind.REQUESTS_REASSIGNED)) == 1 and not w.events(EventKind.REPLICA_LOST)


@pytest.mark.parametrize("is_hung", [True, False])
def test_only_an_engine_that_answers_is_asked_for_its_last_tokens(tmp_path: Path, is_hung: bool) -> None:
    """A live engine needs most of the time that it is given and loses no token; a silent one is fenced at once."""
    desired_at: list[float] = []

    async def script(w: World) -> None:
        await at_step(w, 3)
        while num_streaming(w, "rollout/1") < 3:
            await asyncio.sleep(0.01)
        process = w.fleet.newest("rollout/1")
        if is_hung:
            w.fleet.hang("rollout/1")
            while not w.events(EventKind.REQUESTS_REASSIGNED):
                await asyncio.sleep(0.01)
        else:
            process.body.drain_seconds = 0.8 * DRAIN_SECONDS
        desired_at.append(w.clock.wall())
        wanted = Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("node-0"), because="asked for")
        w.journal.set_desired(wanted)

    w = world(tmp_path, script, recovers=False).run()
    w.check()
    (lost,) = w.journal.events(kinds=[EventKind.REPLICA_LOST])
    assert lost.payload.to_body()["replica"] == "rollout/1"
    seconds = lost.wall_at - desired_at[0]
    assert seconds < 0.5 if is_hung else 0.8 * DRAIN_SECONDS <= seconds <= DRAIN_SECONDS
    (moved,) = w.events(EventKind.REQUESTS_REASSIGNED)
    assert not moved["tokens_lost"] and moved["tokens_kept"] >= 3
    assert not w.fleet.started_over, "streamed tokens were made again"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 0.5])
def test_an_engine_that_streams_invalid_log_probabilities_is_replaced_and_none_are_trained_on(
    tmp_path: Path, bad: float
) -> None:
    async def script(w: World) -> None:
        await at_step(w, 3)
        w.fleet.newest("rollout/1").body.bad_logprob = bad

    w = world(tmp_path, script).run()
    w.check()  # every token that was trained on has the log-probability that it was made with
    (lost,) = w.events(EventKind.REPLICA_LOST)
    assert (lost["replica"], lost["incarnation"]) == ("rollout/1", 1)
    assert f"has a log-probability of {bad}" in lost["because"]
    (moved,) = w.events(EventKind.REQUESTS_REASSIGNED)
    assert moved["from_replica"] == "rollout/1" and moved["num_requests"] > 0 and not w.fleet.started_over


def test_a_new_controller_rejects_invalid_log_probabilities_of_an_engine(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await at_step(w, 3)
        w.fleet.newest("rollout/1").body.bad_logprob = float("nan")
        w.mortalities[-1].dies_at = 0

    w = world(tmp_path, script).run()
    w.check()
    assert len(w.controllers) == 2
    (lost,) = w.events(EventKind.REPLICA_LOST)
    assert lost["replica"] == "rollout/1" and "has a log-probability of nan" in lost["because"]


def test_the_first_engine_with_a_version_does_not_get_all_work(tmp_path: Path) -> None:
    w = World(job=small_job(num_steps=30), path=tmp_path, seed=0).run()
    w.check()
    made: Counter[str] = Counter()
    for (replica, _), process in w.fleet.processes.items():
        if replica.startswith("rollout"):
            made[replica] = process.body.generated
    assert min(made.values()) > 0.5 * max(made.values()), made


def test_an_engine_is_never_given_more_requests_than_it_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_pool, "SENT_MAX", 5)
    most: Counter[str] = Counter()

    async def observe(w: World) -> None:
        while True:
            for (replica, _), process in w.fleet.processes.items():
                if isinstance(process.body, FakeRollout):
                    unfinished = sum(h.tokens != list(h.whole) for h in process.body.held.values())
                    most[replica] = max(most[replica], unfinished)
            await asyncio.sleep(0.01)

    world(tmp_path, observe).run().check()
    assert max(most.values()) == 5, most


def test_a_step_does_not_take_younger_groups_when_the_older_ones_would_become_too_old(tmp_path: Path) -> None:
    """Steps as fast as a round of updates: without looking ahead, some groups of each such run came too late."""
    w = World(job=small_job(num_steps=30), path=tmp_path, seed=2).run()
    assert set(w.check().dropped_by_reason) <= {"run_ended"}


def test_a_trainer_that_committed_in_an_epoch_the_others_left_copies_before_it_joins(tmp_path: Path) -> None:
    """Cut off in the middle of the vote it may commit a step alone: the others make that step again without it."""

    async def script(w: World) -> None:
        body = w.fleet.newest("trainer/1").body
        while body.commit.step < 3 or body.computed:
            await asyncio.sleep(0.001)
        body.commit = dataclasses.replace(body.commit, epoch=body.commit.epoch - 1)
        body.lineage = "added up in another order"
        body.raises = [PeerLost(epoch=0, because="cut off")]

    w = world(tmp_path, script).run()
    w.check()
    assert not w.fleet.newest("trainer/1").body.raises, "the group was never made anew"
    assert {len(digests) for digests in w.fleet.optimizer.values()} == {1}, "a step was taken in two ways"
