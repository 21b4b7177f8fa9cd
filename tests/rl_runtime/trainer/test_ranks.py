"""Replicas of several ranks: the same step as one process, also when a rank is lost in it.

pytest tests/rl_runtime/trainer/test_ranks.py
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rl_runtime.trainer.test_trainer_faults import assert_gradients_equal, failure_free
from tests.rl_runtime.trainer_process import RankedReplica, Team, tiny_job

SETTINGS = {"group_timeout_seconds": 600.0}


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(tiny_job(getattr(request, "param", "grpo"), **SETTINGS))
    yield team
    team.close()


def ready(*replicas: RankedReplica) -> list[RankedReplica]:
    for replica in replicas:
        replica.ready()
    return list(replicas)


@pytest.mark.parametrize("team", ["grpo", "dapo", "ppo", "tppo"], indirect=True)
def test_two_replicas_of_two_ranks_step_as_one_process(team: Team) -> None:
    members = ready(RankedReplica(team, 0, 2), RankedReplica(team, 1, 2))
    team.join(members)
    results: list[Any] = []
    for step in range(2):
        team.tell_step(step, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
        results.append([m.answer() for m in members])
    alone = failure_free(2, team.job.algorithm.name)
    for step in range(2):
        for member in members:
            assert_gradients_equal(member.gathered("gradient_of", step), alone.gradient_of(step))
        assert results[step][0].reward == results[step][1].reward
