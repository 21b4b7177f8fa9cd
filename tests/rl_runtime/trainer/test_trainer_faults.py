"""Real trainer processes, killed and stopped at exact places; the step they were in must come out as if nothing was.

pytest tests/rl_runtime/trainer/test_trainer_faults.py
"""

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import CommitVoteRejected, NonFiniteMicrobatch, PeerLost, StaleIncarnation
from rolecall.core.ids import replica_id
from tests.rl_runtime.trainer_process import (
    BUCKET_BYTES,
    LEDGER,
    Spied,
    Team,
    TrainerProcess,
    make_microbatches,
    tiny_job,
)

REL_L2_MAX = 1e-6
GROUP_TIMEOUT_SECONDS = 600.0
"""Far beyond what a test waits for an answer: a wait for a dead peer does not end by this timeout."""


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Of the algorithm that a test names as this fixture's parameter; of grpo where it names none."""
    team = Team(tiny_job(getattr(request, "param", "grpo"), group_timeout_seconds=GROUP_TIMEOUT_SECONDS))
    yield team
    team.close()


def pair(team: Team, **of_the_second: Any) -> tuple[TrainerProcess, TrainerProcess]:
    """Two replicas that have joined one epoch."""
    members = team.start(0), team.start(1, **of_the_second)
    for member in members:
        member.ready()
    team.join(list(members))
    return members


def failure_free(
    steps: int,
    name: str = "grpo",
    *,
    job: JobConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Spied:
    """One replica that computes everything: what every other way of splitting the work must equal."""
    job = job or tiny_job(name, **settings)
    alone = Spied(replica=replica_id("trainer", 0), incarnation=1, job=job, dtype=dtype, bucket_bytes=BUCKET_BYTES)
    alone.join(1, 1, 0, 1, "127.0.0.1", 0)
    for step in range(steps):
        microbatches = make_microbatches(job, step)
        ids = [m.microbatch_id for m in microbatches]
        alone.train_step(1, 1, step, microbatches, ids, LEDGER, [alone.replica])
    return alone


def assert_gradients_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        norm = np.linalg.norm(gradient)
        assert np.linalg.norm(got[name] - gradient) <= REL_L2_MAX * norm, name


def assert_same_state(one: tuple[dict[str, Any], str], other: tuple[dict[str, Any], str]) -> None:
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    assert any(name.startswith("exp_avg_sq/") for name in one[0])
    for name, tensor in one[0].items():
        assert np.array_equal(tensor, other[0][name]), name


def test_three_replicas_step_as_one(team: Team) -> None:
    members = [team.start(i) for i in range(3)]
    [m.ready() for m in members]
    team.join(members)
    results = []
    for step in range(2):
        team.tell_step(step, {members[0]: [0, 3], members[1]: [1], members[2]: [2]})
        results = [m.answer() for m in members]
    wanted = failure_free(2)
    for member, result in zip(members, results, strict=True):
        assert_gradients_equal(member.ask("gradient_of", 1), wanted.gradient_of(1))
        assert result.commit == results[0].commit
        assert result.commit.microbatch_ids == ("1.0", "1.1", "1.2", "1.3")
        assert result.commit.group_ids == wanted.state.commit.group_ids
        assert result.num_tokens == wanted.last_result.num_tokens  # type: ignore[union-attr]
        assert result.reward == pytest.approx(wanted.last_result.reward)  # type: ignore[union-attr]
        assert_same_state(member.ask("exported"), members[0].ask("exported"))
    assert results[0].my_microbatches == ("1.0", "1.3")


NUM_BUCKETS = 3
PLACES = {
    "before its first microbatch": {"microbatch": 1},
    "between two microbatches": {"microbatch": 2},
    "before the first bucket": {"bucket": 1},
    "in the middle of the reduce": {"bucket": 2},
    "before the vote": {"bucket": NUM_BUCKETS + 1},
}


@pytest.mark.parametrize("stops", PLACES.values(), ids=PLACES)
def test_killed_peer_costs_no_step(team: Team, stops: dict[str, int]) -> None:
    survivor, victim = pair(team, stops=stops)
    team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
    victim.arrives_at(next(iter(stops)))
    victim.kill()
    with pytest.raises(PeerLost) as lost:
        survivor.answer()
    assert lost.value.epoch == 1
    with pytest.raises(PeerLost):  # the epoch is over, asking again does not hang
        team.tell_step(0, {survivor: [0, 1]})
        survivor.answer()
    assert survivor.ask("commit_record").step == -1

    team.join([survivor])
    team.tell_step(0, {survivor: [0, 1, 2, 3]})
    result = survivor.answer()
    assert result.commit.epoch == 2
    assert result.commit.microbatch_ids == ("0.0", "0.1", "0.2", "0.3")
    assert_gradients_equal(survivor.ask("gradient_of", 0), failure_free(1).gradient_of(0))


@pytest.mark.parametrize("team", ["grpo", "dapo", "tppo"], indirect=True)
def test_two_survivors_share_the_work_of_the_third(team: Team) -> None:
    one, other, victim = team.start(0), team.start(1), team.start(2, stops={"bucket": 2})
    [m.ready() for m in (one, other, victim)]
    team.join([one, other, victim])
    team.tell_step(0, {one: [0], other: [1], victim: [2, 3]})
    victim.arrives_at("bucket")
    victim.kill()
    for survivor in (one, other):
        with pytest.raises(PeerLost):
            survivor.answer()
    team.join([one, other])
    team.tell_step(0, {one: [0, 2], other: [1, 3]})
    commits = [m.answer().commit for m in (one, other)]
    assert commits[0] == commits[1]
    wanted = failure_free(1, team.job.algorithm.name)
    assert_gradients_equal(one.ask("gradient_of", 0), wanted.gradient_of(0))
    got, whole = one.ask("exported")[0], wanted.exported()[0]
    assert got.keys() == whole.keys()
    assert any(n.startswith("critic/") for n in got) == team.job.algorithm.has_critic
    for name in (n for n in whole if "weight/" in n):
        assert np.linalg.norm(got[name] - whole[name]) <= REL_L2_MAX * np.linalg.norm(whole[name]), name


STEPPED = {"mini_batches": 2, "ppo_epochs": 2}
BETWEEN = {
    "in the second update's reduce": (NUM_BUCKETS + 1) + 2,
    "before the second vote": 2 * (NUM_BUCKETS + 1),
    "before the last vote": 4 * (NUM_BUCKETS + 1),
}


@pytest.mark.parametrize("count", BETWEEN.values(), ids=BETWEEN)
def test_killed_between_two_updates_the_step_begins_again_and_a_replacement_has_all_of_it(count: int) -> None:
    team = Team(tiny_job(algorithm=STEPPED, group_timeout_seconds=GROUP_TIMEOUT_SECONDS))
    try:
        survivor, victim = pair(team, stops={"bucket": count})
        before = survivor.ask("exported")
        team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
        victim.arrives_at("bucket")
        victim.kill()
        with pytest.raises(PeerLost):
            survivor.answer()
        assert_same_state(survivor.ask("exported"), before)

        replacement = team.start(1, has_state=False)
        replacement.ready()
        replacement.ask("take", *survivor.ask("exported"))
        team.join([survivor, replacement])
        for step in range(3):
            team.tell_step(step, {survivor: [0, 1], replacement: [2, 3]})
            assert survivor.answer().commit == replacement.answer().commit
            assert_same_state(replacement.ask("exported"), survivor.ask("exported"))
        got, wanted = survivor.ask("exported")[0], failure_free(3, algorithm=STEPPED).exported()[0]
        for name, tensor in wanted.items():
            assert np.linalg.norm(got[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name
    finally:
        team.close()


def test_killed_after_the_commit_the_survivor_has_it_too(team: Team) -> None:
    survivor, victim = pair(team, stops={"publish": 1})
    team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
    victim.arrives_at("publish")
    victim.kill()
    assert survivor.answer().commit.step == 0
    with pytest.raises(StaleIncarnation):  # never twice
        team.tell_step(0, {survivor: [0, 1]})
        survivor.answer()


def test_stopped_peer_blocks_until_it_is_killed(team: Team) -> None:
    survivor, victim = pair(team, stops={"bucket": 2})
    team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
    victim.arrives_at("bucket")
    victim.signal(signal.SIGSTOP)
    with pytest.raises(AssertionError, match="gave no answer"):
        survivor.answer(seconds=1.0)
    victim.kill()
    with pytest.raises(PeerLost):
        survivor.answer()


def test_a_wait_for_a_stopped_peer_ends_at_the_timeout() -> None:
    team = Team(tiny_job(group_timeout_seconds=3.0))  # a loaded machine needs some of it to join at all
    try:
        survivor, victim = pair(team, stops={"bucket": 2})
        team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
        victim.arrives_at("bucket")
        victim.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost):
            survivor.answer()
        # Leaving the broken group and continuing alone waits for no other member.
        team.join([survivor])
        team.tell_step(0, {survivor: [0, 1, 2, 3]})
        assert survivor.answer().commit.step == 0
    finally:
        team.close()


def test_join_without_its_peer_ends_at_the_timeout() -> None:
    team = Team(tiny_job(group_timeout_seconds=2.0))
    try:
        one, absent = team.start(0), team.start(1)
        one.ready()
        absent.ready()
        absent.signal(signal.SIGSTOP)
        team.tell_join([one, absent])
        with pytest.raises(PeerLost):
            one.answer()
    finally:
        team.close()


@pytest.mark.parametrize("team", ["grpo", "ppo"], indirect=True)
def test_replacement_copies_a_survivor_bit_by_bit_and_joins(team: Team) -> None:
    survivor, victim = pair(team)
    team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
    survivor.answer()
    victim.answer()
    victim.kill()
    team.join([survivor])
    team.tell_step(1, {survivor: [0, 1, 2, 3]})
    survivor.answer()

    replacement = team.start(1, has_state=False)
    replacement.ready()
    with pytest.raises(StaleIncarnation, match="state"):
        replacement.ask("join", 1, 9, 1, 2, "127.0.0.1", 1)
    replacement.ask("take", *survivor.ask("exported"))
    assert replacement.ask("commit_record").step == 1
    assert_same_state(replacement.ask("exported"), survivor.ask("exported"))

    team.join([survivor, replacement])
    team.tell_step(2, {survivor: [0, 1], replacement: [2, 3]})
    assert survivor.answer().commit == replacement.answer().commit
    assert_same_state(replacement.ask("exported"), survivor.ask("exported"))
    assert_gradients_equal(survivor.ask("gradient_of", 2), failure_free(3, team.job.algorithm.name).gradient_of(2))


def test_the_vote_rejects_differences_between_members(team: Team) -> None:
    one, other = pair(team)
    plans = {
        "missing": {one: [0, 1], other: [2]},
        "computed by both": {one: [0, 1], other: [1, 2, 3]},
    }
    for because, shares in plans.items():
        team.tell_step(0, shares)
        for member in (one, other):
            with pytest.raises(CommitVoteRejected, match=because):
                member.answer()


@pytest.mark.parametrize(("team", "network"), [("grpo", "policy"), ("ppo", "critic")], indirect=["team"])
def test_members_that_drifted_apart_do_not_continue(team: Team, network: str) -> None:
    one, other = pair(team)
    other.ask("corrupt_weight", network)
    team.tell_step(0, {one: [0, 1], other: [2, 3]})
    for member in (one, other):
        with pytest.raises(CommitVoteRejected, match="weights_digest"):
            member.answer()
        assert member.ask("commit_record").step == -1


@pytest.mark.parametrize(
    ("team", "network"), [("grpo", "policy"), ("ppo", "policy"), ("ppo", "critic")], indirect=["team"]
)
def test_not_a_number_names_the_replica_that_made_it(team: Team, network: str) -> None:
    one, other = pair(team)
    other.ask("corrupt_weight", network, float("nan"))
    team.tell_step(0, {one: [0, 1], other: [2, 3]})
    for member in (one, other):
        with pytest.raises(NonFiniteMicrobatch) as bad:
            member.answer()
        assert (bad.value.replica, bad.value.microbatch_id) == ("trainer/1", "0.2")
        assert bad.value.group_ids
        assert member.ask("commit_record").step == -1
    assert one.ask("computed", 0) == ("0.0", "0.1"), "the finite gradients of the others are kept"
    assert other.ask("computed", 0) == ()


def test_losses_down_to_one_within_one_step(team: Team) -> None:
    last = team.start(0)
    second = team.start(1, stops={"bucket": 3})  # in epoch 1 it comes no further than the first or second
    third = team.start(2, stops={"bucket": 1})
    [m.ready() for m in (last, second, third)]
    team.join([last, second, third])
    team.tell_step(0, {last: [0], second: [1], third: [2, 3]})
    third.arrives_at("bucket")
    third.kill()
    for survivor in (last, second):
        with pytest.raises(PeerLost):
            survivor.answer()
    team.join([last, second])
    team.tell_step(0, {last: [0, 2], second: [1, 3]})
    second.arrives_at("bucket")
    second.kill()
    with pytest.raises(PeerLost):
        last.answer()
    assert last.ask("commit_record").step == -1
    team.join([last])
    team.tell_step(0, {last: [2, 0, 3, 1]})
    assert last.answer().commit.epoch == 3
    assert_gradients_equal(last.ask("gradient_of", 0), failure_free(1).gradient_of(0))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_every_other_step_with_rejoin_ends_where_the_failure_free_run_does(team: Team, seed: int) -> None:
    rng = random.Random(seed)
    num_steps = 8
    survivor, other = team.start(0), team.start(1, stops={"bucket": NUM_BUCKETS + 2})
    survivor.ready()
    other.ready()
    trained: list[tuple[str, ...]] = []
    lost = 0
    for step in range(num_steps):
        team.join([survivor, other])
        team.tell_step(step, {survivor: [0, 1], other: [2, 3]})
        if step % 2 == 0:
            assert survivor.answer().commit == other.answer().commit
        else:
            other.arrives_somewhere()
            other.kill()
            lost += 1
            with pytest.raises(PeerLost):
                survivor.answer()
            team.join([survivor])
            team.tell_step(step, {survivor: [0, 1, 2, 3]})
            assert survivor.answer().commit.step == step
        trained.append(survivor.ask("commit_record").microbatch_ids)
        if step % 2 == 1:
            stops = {"microbatch": rng.randint(3, 4), "bucket": NUM_BUCKETS + 1 + rng.randint(1, NUM_BUCKETS + 1)}
            stops = dict([rng.choice(sorted(stops.items()))])
            other = team.start(1, stops=stops, has_state=False)
            other.ready()
            other.ask("take", *survivor.ask("exported"))
    assert lost == num_steps // 2
    assert trained == [tuple(f"{s}.{n}" for n in range(4)) for s in range(num_steps)]
    wanted, got = failure_free(num_steps).exported()[0], survivor.ask("exported")[0]
    for name, tensor in wanted.items():
        assert np.linalg.norm(got[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name


@pytest.mark.parametrize("place", ["microbatch", "bucket"])
def test_exception_on_one_rank_frees_the_others_at_once(team: Team, place: str) -> None:
    survivor, other = pair(team, raises={place: 2})
    team.tell_step(0, {survivor: [0, 1], other: [2, 3]})
    with pytest.raises(ValueError, match="user code"):
        other.answer()
    with pytest.raises(PeerLost):
        survivor.answer()
    with pytest.raises(PeerLost, match="ValueError"):
        team.tell_step(0, {other: [2, 3]})
        other.answer()
    # Both live: they continue together in the next epoch.
    team.join([survivor, other])
    team.tell_step(0, {survivor: [0, 1], other: [2, 3]})
    assert survivor.answer().commit == other.answer().commit
    assert_gradients_equal(other.ask("gradient_of", 0), failure_free(1).gradient_of(0))


def test_bad_plan_for_one_member_frees_the_others_at_once(team: Team) -> None:
    one, other = pair(team)
    team.tell_step(0, {one: [0, 1], other: [2, 2]})
    with pytest.raises(CommitVoteRejected, match="repeat"):
        other.answer()
    with pytest.raises(PeerLost):
        one.answer()
