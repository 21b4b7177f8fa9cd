"""The critic beside the policy: made, moved, copied, checkpointed and voted on with it, and never handed on.

pytest tests/rl_runtime/trainer/test_critic.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.core.config.job import JobConfig, ModelConfig
from rolecall.core.errors import NonFiniteMicrobatch, NonFiniteValue, ProofMismatch
from rolecall.core.ids import NodeId, replica_id
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.algorithms.objective import Divisors
from rolecall.rl_runtime.protocol.messages import StepResult, first_commit
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.band import LearnedBand
from rolecall.rl_runtime.trainer.model import make_critic, make_model, write_model_folder
from rolecall.rl_runtime.trainer.service import TrainerService
from rolecall.rl_runtime.trainer.state import CRITIC
from tests.rl_runtime.trainer_process import BUCKET_BYTES, LEDGER, Spied, make_microbatches, tiny_job

NAME = replica_id("trainer", 0)
PPO, GRPO = tiny_job("ppo"), tiny_job("grpo")
Tensors = dict[str, torch.Tensor]


def alone(job: JobConfig = PPO, *, incarnation: int = 1, **kwargs: object) -> Spied:
    trainer = Spied(replica=NAME, incarnation=incarnation, job=job, **kwargs)
    trainer.join(incarnation, 1, 0, 1, "127.0.0.1", 0)
    return trainer


def take_step(trainer: Spied, step: int, *, like: int | None = None) -> StepResult:
    """`like`: with the samples of that step."""
    microbatches = make_microbatches(trainer.job, step if like is None else like)
    ids = [f"{step}.{n}" for n in range(len(microbatches))]
    mine = [type(m)(microbatch_id=i, groups=m.groups) for i, m in zip(ids, microbatches, strict=True)]
    return trainer.train_step(trainer.incarnation, 1, step, mine, ids, LEDGER, [NAME])


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def critic_weights(trainer: Spied) -> Tensors:
    assert trainer.state.critic is not None
    return trainer.state.critic.weights()


@pytest.fixture
def trainer() -> Iterator[Spied]:
    trainer = alone()
    yield trainer
    trainer.close()


def test_begins_as_the_policys_body_and_claims_next_to_nothing() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    vocab, model = local_vocabulary(), PPO.model
    critic = make_critic(model, vocab, seed=3)
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
    assert same(critic.state_dict(), make_critic(model, vocab, seed=3).state_dict())
    assert not same(critic.state_dict(), make_critic(model, vocab, seed=4).state_dict())
    body = {n: p for n, p in make_model(model, vocab, seed=3).state_dict().items() if n != "lm_head.weight"}
    assert same(body, {n: p for n, p in critic.state_dict().items() if n != "value_head.weight"})
    with torch.no_grad():
        values = critic(torch.randint(0, vocab.size, (4, 9)))
    assert values.shape == (4, 9)
    assert 0.0 < float(values.abs().max()) < 0.05


@pytest.mark.slow
def test_of_a_model_folder_it_is_the_folders_body(tmp_path: Path) -> None:
    write_model_folder(tmp_path, PPO.model, seed=3)
    tokens = torch.randint(3, 16, (2, 7))
    with torch.no_grad():
        ours = make_critic(PPO.model, local_vocabulary(), seed=3)(tokens)
        theirs = make_critic(ModelConfig(path=str(tmp_path)), local_vocabulary(), seed=3)(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)


def test_only_algorithms_with_a_critic_have_one() -> None:
    for name in ("grpo", "dapo"):
        assert not any(n.startswith(CRITIC) for n in alone(tiny_job(name)).state.export()[0])
    for name in ("ppo", "tppo"):
        names = set(alone(tiny_job(name)).state.export()[0])
        assert {n.removeprefix(CRITIC) for n in names if n.startswith(CRITIC)} > {
            "weight/value_head.weight",
            "exp_avg/model.norm.weight",
        }


def test_the_critic_learns_the_rewards(trainer: Spied) -> None:
    losses = [take_step(trainer, step, like=0).health.value_loss or 0.0 for step in range(20)]
    assert losses[-1] < 0.2 * losses[0]


def test_each_network_has_its_own_learning_rate() -> None:
    for still, rates in (("policy", {"learning_rate": 0.0}), ("critic", {"value_learning_rate": 0.0})):
        job = PPO.model_copy(update={"algorithm": PPO.algorithm.model_copy(update=rates)})
        trainer = alone(job)
        before = {"policy": trainer.state.policy_tensors(0), "critic": critic_weights(trainer)}
        take_step(trainer, 0)
        after = {"policy": trainer.state.policy_tensors(1), "critic": critic_weights(trainer)}
        for network, weights in before.items():
            assert same(weights, after[network]) == (network == still), (network, rates)


def test_each_network_has_its_own_clip() -> None:
    moved = []
    for wrong in (1.0, 1e6):
        trainer = alone()
        state = trainer.state
        sums = torch.linspace(-1.0, 1.0, state.num_parameters, dtype=torch.float64)
        sums[state.policy.num_parameters :] *= wrong
        norm = state.apply(sums, Divisors(policy=100.0, value=100.0), first_commit(), LearnedBand())
        moved.append((norm, trainer.state.policy_tensors(0)))
    assert moved[0][0] == moved[1][0] > 0.0
    assert same(moved[0][1], moved[1][1]), "a critic that is far off does not make the policy's step smaller"


def test_a_sum_beyond_float32_is_refused_and_changes_nothing() -> None:
    for network in ("policy", "critic"):
        trainer = alone()
        before = trainer.state.export()
        apply, state = trainer.state.apply, trainer.state

        def too_large(sums: torch.Tensor, *rest: Any) -> float:
            sums[0 if network == "policy" else -1] = 1e300  # noqa: B023 - called within this turn
            return apply(sums, *rest)  # noqa: B023

        state.apply = too_large  # type: ignore[method-assign,assignment]
        with pytest.raises(NonFiniteValue, match="the sum of finite gradients"):
            take_step(trainer, 0)
        assert same(trainer.state.export()[0], before[0]) and trainer.state.export()[1] == before[1]
        assert trainer._partial.computed(0) == (), "the step is computed anew"
        state.apply = apply  # type: ignore[method-assign]
        assert take_step(trainer, 0).commit.step == 0


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_a_weight_that_is_no_number_ends_in_no_step(trainer: Spied, network: str) -> None:
    take_step(trainer, 0)
    good = trainer.state.export()
    trainer.corrupt_weight(network, float("nan"))
    with pytest.raises(NonFiniteMicrobatch, match=r"1\.\d"):
        take_step(trainer, 1)
    assert trainer.state.commit.step == 0
    trainer.load_state(*good)
    assert take_step(trainer, 1).commit.step == 1


def test_a_copy_and_a_checkpoint_continue_bit_by_bit(trainer: Spied, tmp_path: Path) -> None:
    take_step(trainer, 0)
    take_step(trainer, 1)
    tensors, meta = trainer.state.export()
    found = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, meta))
    heir = alone(incarnation=2)
    heir.load_state(found.tensors, found.meta)
    assert same(heir.state.export()[0], tensors)
    take_step(trainer, 2)
    take_step(heir, 2)
    assert same(heir.state.export()[0], trainer.state.export()[0])
    assert heir.state.weights_digest == trainer.state.weights_digest


def test_a_rollback_takes_the_critic_back_too(trainer: Spied, tmp_path: Path) -> None:
    service = TrainerService(make_spawn(create_run_dir(tmp_path, "r"), NAME, 1, NodeId("node-1")), PPO)
    service.join(1, 1, 0, 1, "127.0.0.1", 0)
    first = service.replica.state.export()[0]
    folder = str(tmp_path / "checkpoints")

    def step(number: int) -> None:
        microbatches = make_microbatches(PPO, number)
        service.train_step(1, 1, number, microbatches, [m.microbatch_id for m in microbatches], LEDGER, [NAME])

    step(0)
    kept = service.replica.state.export()[0]
    service.write_checkpoint(folder, service.take_snapshot())
    step(1)
    assert not same(service.replica.state.export()[0], kept)
    service.load_checkpoint(service.list_checkpoints(folder)[-1].path)
    assert same(service.replica.state.export()[0], kept)
    service.load_checkpoint("")
    assert same(service.replica.state.export()[0], first), "without a checkpoint: as the run began"
    service.close()


def test_never_leaves_for_the_engines(trainer: Spied, tmp_path: Path) -> None:
    plain = alone(GRPO)
    assert same(trainer.state.policy_tensors(0), plain.state.policy_tensors(0)), "the same policy for every algorithm"
    take_step(trainer, 0)
    assert trainer.state.policy_tensors(1).keys() == plain.state.policy_tensors(0).keys()
    service = TrainerService(make_spawn(create_run_dir(tmp_path, "r"), NAME, 1, NodeId("node-1")), PPO)
    manifest = service.manifest(0)
    assert [e.name for e in manifest.tensors] == sorted(plain.state.policy_tensors(0))
    service.replica.close()
    service.close()


def test_is_part_of_the_digest_that_members_vote_on(trainer: Spied) -> None:
    before, policy = trainer.state.weights_digest, trainer.state.policy_tensors(0)
    trainer.corrupt_weight("critic")
    assert trainer.state.weights_digest != before
    assert same(trainer.state.policy_tensors(0), policy)


def test_one_reduce_carries_both_networks() -> None:
    for job in (GRPO, PPO):
        buckets: list[int] = []
        trainer = alone(job, bucket_bytes=BUCKET_BYTES, on_bucket=lambda buckets=buckets: buckets.append(1))
        take_step(trainer, 0)
        vote = 1
        assert len(buckets) == -(-trainer.state.num_parameters * 8 // BUCKET_BYTES) + vote


def test_state_of_another_algorithm_is_refused_and_named(trainer: Spied) -> None:
    plain = alone(GRPO)
    for heir, state, because in (
        (trainer, plain.state.export(), "it holds no critic"),
        (plain, trainer.state.export(), "it holds a critic, this job's algorithm has none"),
    ):
        before = heir.state.export()
        with pytest.raises(ProofMismatch, match=because) as refused:
            heir.load_state(*state)
        assert refused.value.tensor == "critic/*"
        assert same(heir.state.export()[0], before[0]) and heir.state.export()[1] == before[1]


def test_state_from_before_there_were_critics_still_loads(trainer: Spied) -> None:
    old = alone(GRPO)
    take_step(old, 0)
    tensors, meta = old.state.export()
    assert json.loads(meta)["format"] == 2
    meta_1 = json.dumps({**json.loads(meta), "format": 1})
    heir = alone(GRPO, incarnation=2)
    heir.load_state(tensors, meta_1)
    assert same(heir.state.export()[0], tensors) and heir.state.export()[1] == meta
    with pytest.raises(ProofMismatch, match="it holds no critic"):
        trainer.load_state(tensors, meta_1)


def test_the_reference_policy_is_that_of_the_runs_beginning() -> None:
    job = GRPO.model_copy(update={"algorithm": GRPO.algorithm.model_copy(update={"kl_coefficient": 0.5})})
    first = alone(job)
    diverged = [take_step(first, step).health.kl_reference for step in range(3)]
    assert diverged[0] == 0.0, "the first step is that of the reference itself"
    assert diverged[1] and diverged[2] and diverged[2] > 0.0
    heir = alone(job, incarnation=2)  # a replacement: its reference is made, not copied
    heir.load_state(*first.state.export())
    assert take_step(heir, 3).health == take_step(first, 3).health
    assert same(heir.state.export()[0], first.state.export()[0])
    assert not any("reference" in name for name in first.state.export()[0])
    other = alone(job.model_copy(update={"seed": job.seed + 1}), incarnation=3)  # as of a changed model folder
    before = other.state.export()
    with pytest.raises(ProofMismatch, match="trained with another reference policy: the model folder has changed"):
        other.load_state(*first.state.export())
    assert same(other.state.export()[0], before[0])
    other.load_state(*alone(GRPO).state.export())  # the job's initial state, from a process without the objective
