"""A trainer's network cable is pulled in the middle of a reduce: packets are dropped without an error.

Three real trainers, each in a network namespace of its own, behind a switch. The test is the controller; it reaches
all of them over pipes, so that it can also ask the one that is cut off.

pytest tests/rl_runtime/cluster/test_partition.py -s      # prints the time from the cut to the survivors' commit
"""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from rolecall.core.errors import PeerLost, StaleIncarnation
from tests.netns import Network
from tests.rl_runtime.trainer.test_trainer_faults import (
    NUM_BUCKETS,
    assert_gradients_equal,
    assert_same_state,
    failure_free,
)
from tests.rl_runtime.trainer_process import LEDGER, Place, Team, TrainerProcess, make_microbatches, tiny_job

GROUP_TIMEOUT_SECONDS = 6.0
"""Joins and steps of a healthy group must fit in on a loaded machine, where they take half a second; each test waits
for it once."""
ALL_OF_STEP_0 = ("0.0", "0.1", "0.2", "0.3")


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(3)
    yield network
    network.close()


@pytest.fixture
def team(network: Network) -> Iterator[Team]:
    team = Team(tiny_job(group_timeout_seconds=GROUP_TIMEOUT_SECONDS))
    yield team
    team.close()


def start(team: Team, network: Network, stops: dict[int, dict[str, int]]) -> list[TrainerProcess]:
    members = [team.start(i, stops=stops.get(i), place=Place(machine=m)) for i, m in enumerate(network.machines)]
    [m.ready() for m in members]
    team.join(members)
    return members


def cut_in_step_0(team: Team, network: Network, members: list[TrainerProcess], victim: int) -> float:
    """Step 0, in which the victim's cable is pulled while the others wait for it inside a collective; when it was."""
    shares = {members[0]: [0, 1], members[1]: [2], members[2]: [3]}
    team.tell_step(0, shares)
    members[victim].arrives_at("bucket")
    network.cut(victim)
    cut_at = time.monotonic()
    members[victim].go_on()
    return cut_at


def survivors_finish_the_step(
    team: Team, network: Network, victim: int, bucket: int
) -> tuple[list[TrainerProcess], TrainerProcess]:
    """The victim is cut off when it comes to its `bucket`: the others train on, and it cannot. (survivors, victim)"""
    members = start(team, network, {victim: {"bucket": bucket}})
    lost = members[victim]
    survivors = [m for m in members if m is not lost]
    cut_at = cut_in_step_0(team, network, members, victim)
    because = {}
    for member in members:
        with pytest.raises(PeerLost) as error:
            member.answer()
        assert error.value.epoch == 1
        because[member] = str(error.value)
    # No reset came through the cut: a timeout ended the waits. (One survivor may hear of it from the other.)
    assert "imed out" in because[lost], because
    assert any("imed out" in because[s] for s in survivors), because
    for member in members:
        assert member.ask("commit_record").step == -1

    team.join(survivors)
    team.tell_step(0, {survivors[0]: [0, 1], survivors[1]: [2, 3]})
    commits = [s.answer().commit for s in survivors]
    print(f"\ncut to commit: {time.monotonic() - cut_at:.2f} s with a group timeout of {GROUP_TIMEOUT_SECONDS:g} s")
    assert commits[0] == commits[1]
    assert (commits[0].step, commits[0].epoch, commits[0].microbatch_ids) == (0, 2, ALL_OF_STEP_0)
    wanted = failure_free(1)
    assert commits[0].group_ids == wanted.commit_record().group_ids
    assert_gradients_equal(survivors[0].ask("gradient_of", 0), wanted.gradient_of(0))
    assert_same_state(survivors[0].ask("exported"), survivors[1].ask("exported"))
    assert lost.ask("commit_record").step == -1
    with pytest.raises(StaleIncarnation):
        lost.ask("policy_tensors", 1)
    return survivors, lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "bucket"),
    [(0, 2), (2, NUM_BUCKETS + 1)],
    ids=["the member with the store in the reduce", "a member in the vote"],
)
def test_survivors_finish_the_step_and_the_partitioned_member_cannot(
    team: Team, network: Network, victim: int, bucket: int
) -> None:
    survivors_finish_the_step(team, network, victim, bucket)


@pytest.mark.slow
def test_a_member_partitioned_in_the_reduce_is_refused_after_the_partition(team: Team, network: Network) -> None:
    survivors, lost = survivors_finish_the_step(team, network, victim=2, bucket=2)
    members = [*survivors, lost]
    network.heal(2)

    def asked_of_lost(incarnation: int, epoch: int) -> None:
        microbatches = make_microbatches(team.job, 0)
        ids = [m.microbatch_id for m in microbatches]
        names = [m.replica for m in members]
        lost.ask("train_step", incarnation, epoch, 0, microbatches, ids, LEDGER, names)

    with pytest.raises(PeerLost):  # its epoch: the group is over, also now that packets would arrive
        asked_of_lost(1, 1)
    with pytest.raises(StaleIncarnation, match="epoch"):  # it was never let into the survivors' epoch
        asked_of_lost(1, 2)
    with pytest.raises(StaleIncarnation, match="incarnation"):  # what is meant for its replacement
        asked_of_lost(2, 2)
    with pytest.raises(StaleIncarnation):  # no member returns to the old epoch
        survivors[0].ask("join", 1, 1, 0, 3, network.machines[2].address, 1)
    assert lost.ask("commit_record").step == -1
    with pytest.raises(StaleIncarnation):
        lost.ask("policy_tensors", 1)

    # It does not disturb the survivors, and may come back only as a copy of one of them.
    team.tell_step(1, {survivors[0]: [0, 3], survivors[1]: [1, 2]})
    commits = [s.answer().commit for s in survivors]
    assert (commits[0].epoch, commits[0].step) == (2, 1) and commits[0] == commits[1]
    lost.ask("take", *survivors[0].ask("exported"))
    team.join(members)
    team.tell_step(2, {members[0]: [0, 1], members[1]: [2], members[2]: [3]})
    assert len({m.answer().commit.gradient_digest for m in members}) == 1
    assert_same_state(lost.ask("exported"), survivors[0].ask("exported"))
    wanted, got = failure_free(3).exported()[0], lost.ask("exported")[0]
    for name, tensor in wanted.items():
        assert np.linalg.norm(got[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name
