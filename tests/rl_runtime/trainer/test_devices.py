"""Trainers on each kind of device: one step is that of the CPU, and a state moves between replicas through the host.

pytest tests/rl_runtime/trainer/test_devices.py
"""

from collections.abc import Iterator

import pytest
import torch

from rolecall.core.config.job import DeviceName
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.trainer.ranks import Ranks
from rolecall.rl_runtime.weights.digest import entries_of
from tests.rl_runtime.trainer.test_trainer_faults import assert_gradients_equal, assert_same_state
from tests.rl_runtime.trainer_process import LEDGER, Place, Spied, Team, make_microbatches, tiny_job

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[("grpo", {"kl_coefficient": 0.1, "microbatch_tokens_max": 16}), ("ppo", {"ppo_epochs": 2})])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """In float64, where devices differ only far beyond the bound of the gradients."""
    name, settings = request.param
    team = Team(tiny_job(name, algorithm=settings, group_timeout_seconds=600.0))
    yield team
    team.close()


def alone_on_the_cpu(team: Team, steps: int) -> Spied:
    alone = Spied(replica=replica_id("trainer", 0), incarnation=1, job=team.job, dtype=torch.float64)
    alone.join(1, 1, 0, 1, "127.0.0.1", 0)
    for step in range(steps):
        microbatches = make_microbatches(team.job, step)
        ids = [m.microbatch_id for m in microbatches]
        alone.train_step(1, 1, step, microbatches, ids, LEDGER, [alone.replica])
    return alone


@pytest.mark.parametrize("device", DEVICES)
def test_two_replicas_on_a_device_step_and_copy_as_on_a_cpu(team: Team, device: DeviceName) -> None:
    place = Place(device=device, float64=True)
    members = [team.start(index, place=place) for index in range(2)]
    joiner = team.start(2, place=place, has_state=False)
    for process in (*members, joiner):
        process.ready()
    team.join(members)
    team.tell_step(0, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
    for member in members:
        member.answer()
    joiner.ask("take", *members[0].ask("exported"))
    team.join([*members, joiner])
    team.tell_step(1, dict(zip([*members, joiner], ([0, 1], [2], [3]), strict=True)))
    for member in (*members, joiner):
        member.answer()
        assert_same_state(member.ask("exported"), members[0].ask("exported"))
    wanted = alone_on_the_cpu(team, 2)
    for step in range(2):
        assert_gradients_equal(members[0].ask("gradient_of", step), wanted.gradient_of(step))


@pytest.mark.parametrize("device", DEVICES)
def test_what_leaves_a_trainer_is_on_the_host(device: DeviceName) -> None:
    trainer = Spied(replica=replica_id("trainer", 0), incarnation=1, job=tiny_job(), ranks=Ranks(device=device))
    assert {t.device.type for _, t in trainer.state.policy.tensors()} == {device}
    weights, entries = trainer.state.policy_snapshot(0)
    assert {t.device.type for t in (*weights.values(), *trainer.state.export()[0].values())} == {"cpu"}
    assert entries == entries_of(weights), "pullers verify what they receive by BLAKE3, whatever the vote compares"
