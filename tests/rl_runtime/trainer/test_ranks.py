"""Replicas of several ranks: the same step as one process, also when a rank is lost in it.

pytest tests/rl_runtime/trainer/test_ranks.py
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rolecall.core.errors import CommitVoteRejected, PeerLost
from rolecall.rl_runtime.trainer.ranks import Ranks, dealt
from tests.rl_runtime.trainer.test_trainer_faults import assert_gradients_equal, failure_free
from tests.rl_runtime.trainer_process import RankedReplica, Team, tiny_job
from tests.support import some

SETTINGS = {"group_timeout_seconds": 600.0}


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Of the algorithm, and its settings, that a test names as this fixture's parameter; of grpo without."""
    name, settings = getattr(request, "param", ("grpo", {}))
    team = Team(tiny_job(name, algorithm=settings, **SETTINGS))
    yield team
    team.close()


def ready(*replicas: RankedReplica) -> list[RankedReplica]:
    for replica in replicas:
        replica.ready()
    return list(replicas)


ALGORITHMS = [
    ("grpo", {}),
    ("grpo", {"kl_coefficient": 0.1, "microbatch_tokens_max": 16}),
    ("grpo", {"ppo_epochs": 2, "mini_batches": 2}),
    ("dapo", {}),
    ("ppo", {}),
    ("tppo", {}),
]


@pytest.mark.parametrize(
    "team",
    some([(a,) for a in ALGORITHMS], [(a,) for a in (ALGORITHMS[1], ALGORITHMS[2], ALGORITHMS[5])]),
    indirect=True,
    ids=lambda p: "-".join((p[0], *p[1])),
)
def test_two_replicas_of_two_ranks_step_as_one_process(team: Team) -> None:
    members = ready(RankedReplica(team, 0, 2), RankedReplica(team, 1, 2))
    team.join(members)
    results: list[Any] = []
    for step in range(2):
        team.tell_step(step, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
        results.append([m.answer() for m in members])
    alone, exact = failure_free(2, job=team.job), failure_free(1, job=team.job, dtype=torch.float64)
    for step in range(2):
        for member in members:
            assert_gradients_equal(member.gathered("gradient_of", step), alone.gradient_of(step))
    if team.job.algorithm.num_updates == 1:  # else the last update's is of weights that float32 has rounded
        assert_gradients_equal(members[0].gathered("gradient_of", 0), exact.gradient_of(0))
        assert results[step][0].reward == results[step][1].reward
    wanted = alone.last_result
    assert wanted is not None
    got = results[1][0]
    assert got.num_tokens == wanted.num_tokens and got.commit.group_ids == wanted.commit.group_ids
    assert (got.loss, got.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5, abs=1e-7)
    assert got.health.to_dict() == pytest.approx(wanted.health.to_dict(), rel=1e-4, abs=1e-6)


def test_three_ranks_have_rows_of_unequal_number(team: Team) -> None:
    [member] = ready(RankedReplica(team, 0, 3))
    team.join([member])
    team.tell_step(0, {member: [0, 1, 2, 3]})
    member.answer()
    assert_gradients_equal(member.gathered("gradient_of", 0), failure_free(1, job=team.job).gradient_of(0))


@pytest.mark.parametrize(
    ("place", "count"),
    [("microbatch", 2), ("backward", 2), ("bucket", 1), ("bucket", 2), ("vote", 1), ("publish", 1)],
    ids=lambda p: str(p),
)
def test_a_replica_lost_at_any_place_leaves_the_step_as_it_would_have_been(team: Team, place: str, count: int) -> None:
    survivor, victim = RankedReplica(team, 0, 2), RankedReplica(team, 1, 2, stops={place: count})
    members = ready(survivor, victim)
    team.join(members)
    team.tell_step(0, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
    victim.ranks[-1].arrives_at(place)
    for rank in victim.ranks:  # as its first rank and the kernel do
        rank.kill()
    if place == "publish":
        survivor.answer()  # both had committed
    else:
        with pytest.raises(PeerLost):
            survivor.answer()
        team.join([survivor])
        team.tell_step(0, {survivor: [0, 1, 2, 3]})
        survivor.answer()
    assert_gradients_equal(survivor.gathered("gradient_of", 0), failure_free(1, job=team.job).gradient_of(0))


def test_ranks_agree_before_they_commit(team: Team) -> None:
    """Another weight on one rank: its own vote fails, and so does that of the rank that has the same ones."""
    members = ready(RankedReplica(team, 0, 2), RankedReplica(team, 1, 2))
    team.join(members)
    members[0].ranks[1].ask("corrupt_weight")
    team.tell_step(0, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
    for member in members:
        with pytest.raises(CommitVoteRejected, match="weights_digest"):
            member.answer()
        assert member.ask("commit_record").step == -1


def test_a_step_reset_on_one_rank_starts_again_on_all(team: Team) -> None:
    [member] = ready(RankedReplica(team, 0, 2))
    team.join([member])
    team.tell_step(0, {member: [0, 1]})
    with pytest.raises(CommitVoteRejected, match="missing"):
        member.answer()
    assert [rank.ask("computed", 0) for rank in member.ranks] == [("0.0", "0.1")] * 2
    member.ranks[1].ask("reset_step", 0)
    team.join([member])
    team.tell_step(0, {member: [0, 1, 2, 3]})
    member.answer()
    assert_gradients_equal(member.gathered("gradient_of", 0), failure_free(1, job=team.job).gradient_of(0))


def test_rows_are_dealt_by_length() -> None:
    assert dealt([3, 9, 1, 7, 5], 1) == [[0, 1, 2, 3, 4]]
    assert dealt([3, 9, 1, 7, 5], 2) == [[1, 4, 2], [3, 0]]
    assert dealt([4], 3) == [[0], [], []]


def test_one_rank_is_alone() -> None:
    alone = Ranks()
    assert alone.gather("x") == ["x"] and alone.agree("why") == "why" and alone.norm(3.0) == 3.0
