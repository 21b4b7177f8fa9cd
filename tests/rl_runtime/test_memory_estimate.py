"""The estimate of memory: sizes of models, what each setting adds, and what does not fit.

Whether the numbers are right is measured by `benchmarks/runtime/memory/`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.core.config.job import JobConfig, ModelConfig, parse_job
from rolecall.core.config.lora import LoraSettings
from rolecall.rl_runtime import memory_estimate as estimate
from rolecall.rl_runtime.algorithms import agreement
from rolecall.rl_runtime.memory_estimate import (
    FreeMemory,
    GpuMemory,
    ModelSize,
    RankNeed,
    RoleNeed,
    built_in_size,
    engine_need,
    folder_size,
    logits_bytes,
    needs,
    shortages,
    trainer_need,
)
from rolecall.rl_runtime.model_layers import target_layers
from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary
from rolecall.rl_runtime.trainer.model import make_critic, make_model
from rolecall.rl_runtime.weights import port

GIB = 1 << 30
MODEL = ModelConfig(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
LARGE = ModelSize(
    num_parameters=10**9,
    num_outside_layers=10**8,
    num_output_only=0,
    num_rows=50_000,
    hidden=1024,
    intermediate=4096,
    query=1024,
    key_value=512,
    num_layers=24,
    is_folder=True,
)


def job_of(**sections: Any) -> JobConfig:
    """With a model folder, which is not read."""
    return parse_job({**sections, "model": {"path": "model", **sections.get("model", {})}})


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_size_of_the_built_in_model_is_that_of_its_parameters() -> None:
    vocab = local_vocabulary()
    size = built_in_size(MODEL, vocab.size)
    model = make_model(MODEL, vocab, seed=0)
    assert size.num_parameters == count(model)
    assert size.num_critic == count(make_critic(MODEL, vocab, seed=0))
    assert size.num_layer == count(model.model.layers[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_the_size_of_a_folder_is_known_from_its_files(tied: bool, targets: Any) -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    lora = LoraSettings(rank=4, target_modules=targets)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        size = folder_size(shapes, config.to_dict(), lora)
        assert size.num_parameters == count(model)
        assert size.num_critic == count(model.model) + config.hidden_size
        assert size.num_layer == count(model.model.layers[0])
        assert (size.num_rows, size.query, size.key_value) == (50, 32, 16)
        names = target_layers(model, lora)
        assert size.num_adapted == sum(model.get_submodule(n).weight.numel() for n in names)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=names), model, "default")
        assert size.num_adapters == sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)


ADDED: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "a reference policy": ({}, {"algorithm": {"kl_coefficient": 0.1}}, 4),
    "a previous version": ({"runtime": {"staleness_max": 1}}, {"runtime": {"staleness_max": 2}}, 4),
    "several updates": ({}, {"algorithm": {"ppo_epochs": 2}}, 12),
    "a critic": ({}, {"algorithm": {"name": "ppo"}}, 12 + 8 + 12 + 12 + 10),
}


@pytest.mark.parametrize(("before", "after", "bytes_each"), ADDED.values(), ids=ADDED)
def test_what_a_setting_adds_for_each_parameter(
    before: dict[str, Any], after: dict[str, Any], bytes_each: float
) -> None:
    one, other = (
        trainer_need(job_of(roles={"trainer": 1}, **settings), LARGE).host_bytes for settings in (before, after)
    )
    assert other - one == pytest.approx(bytes_each * LARGE.num_parameters, rel=1e-4)


def test_less_is_needed_with_bfloat16_with_adapters_and_with_more_ranks() -> None:
    adapted = folder_size({"model.layers.0.mlp.up_proj.weight": (30_000, 30_000)}, {"hidden_size": 64}, LoraSettings())
    bfloat16 = {"model": {"dtype": "bfloat16"}}
    whole, half = (trainer_need(job_of(**s), LARGE).host_bytes for s in ({}, bfloat16))
    lora, half_lora = (trainer_need(job_of(lora={}, **s), adapted).host_bytes for s in ({}, bfloat16))
    assert whole > half > lora > half_lora
    first, further = (trainer_need(job_of(runtime={"trainer_ranks": 2}), LARGE, rank).host_bytes for rank in (0, 1))
    assert whole > first > further > whole / 10, "the first rank has the whole tensors of checkpoints"
    engine = engine_need(job_of(), LARGE).host_bytes
    _, second = (engine_need(job_of(runtime={"rollout_ranks": 2}), LARGE, rank).host_bytes for rank in (0, 1))
    assert engine > second


def test_the_logits_of_a_pass_are_bounded_by_its_tokens() -> None:
    data = {"path": "d", "answer": "a", "max_prompt_tokens": 40, "max_response_tokens": 16}
    algorithm = {"group_size": 8, "groups_per_microbatch": 2}

    def needed(sampling: dict[str, Any], **more: Any) -> float:
        job = job_of(data=data, reward="exact", algorithm={**algorithm, **more}, sampling=sampling)
        return logits_bytes(job, 49_152)

    whole = 2 * 8 * 56 * 49_152 * 4
    assert needed({}) == pytest.approx(whole * estimate.LOGITS_COPIES)
    assert (
        needed({"top_p": 0.9}) == needed({"temperature": 0.7}) == pytest.approx(whole * estimate.LOGITS_COPIES_CHANGED)
    )
    assert needed({}, microbatch_tokens_max=448) == pytest.approx(needed({}) / 2, rel=1e-6)


def test_constants_are_those_of_the_code() -> None:
    assert estimate.VERSIONS_KEPT == agreement.VERSIONS_KEPT
    assert estimate.VERSIONS_PUBLISHED == port.NUM_SNAPSHOTS_KEPT


def test_every_process_of_a_job_is_counted() -> None:
    job = job_of(
        roles={"trainer": 2, "rollout": 3, "reward": 4},
        runtime={"nodes": 9, "standbys": 1, "trainer_standbys": 2, "rollout_ranks": 2},
    )
    found = {need.role: (need.num_replicas, len(need.ranks)) for need in needs(job, LARGE)}
    assert found == {
        "trainer": (2, 1),
        "rollout": (3, 2),
        "standby": (1, 2),
        "trainer-standby": (2, 1),
        "reward": (4, 1),
        "controller": (1, 1),
        "node": (9, 1),
    }


def test_a_trainer_standby_needs_what_a_trainer_does_that_writes_no_checkpoint() -> None:
    job = job_of(runtime={"trainer_standbys": 3, "trainer_ranks": 2})
    found = {need.role: need for need in needs(job, LARGE)}
    trainers, standbys = found["trainer"], found["trainer-standby"]
    assert standbys.host_bytes == 3 * sum(trainer_need(job, LARGE, rank, writes=False).host_bytes for rank in (0, 1))
    assert standbys.ranks[1:] == trainers.ranks[1:]


@pytest.mark.parametrize(
    ("replicas", "ranks", "text"),
    [
        (1, [1.5], "trainer 1.5 GiB"),
        (2, [1.5], "trainer 2 x 1.5 GiB"),
        (2, [1.5, 1.1, 1.1], "trainer 2 x (1.5 + 2 x 1.1) GiB"),
    ],
)
def test_a_need_in_words(replicas: int, ranks: list[float], text: str) -> None:
    needed = tuple(RankNeed(host_bytes=int(gib * GIB)) for gib in ranks)
    assert str(RoleNeed(role="trainer", num_replicas=replicas, ranks=needed)) == text


def test_what_does_not_fit_is_named_with_its_size() -> None:
    job = job_of(runtime={"standbys": 0})
    assert shortages(job, LARGE, FreeMemory(host_bytes=1000 * GIB)) == []
    [problem] = shortages(job, LARGE, FreeMemory(host_bytes=10 * GIB))
    assert problem.startswith("roles: trainer 2 x ") and problem.endswith("and 10.0 are free")
    assert "rollout 3 x" in problem and "algorithm.microbatch_tokens_max" not in problem, "a small part is logits"
    job = job_of(algorithm={"group_size": 32, "groups_per_microbatch": 8}, task={"num_digits": 64})
    [problem] = shortages(job, LARGE, FreeMemory(host_bytes=10 * GIB))
    assert "for logits, less with algorithm.microbatch_tokens_max" in problem


def test_each_rank_needs_its_share_of_a_gpu() -> None:
    free = on_gpus((24, 24), (22, 24))
    [problem] = shortages(job_of(), LARGE, free, "cuda")
    assert problem.startswith("runtime.trainer_ranks: each rank of a trainer needs ")
    assert problem.endswith("GiB of a GPU, and one has 22.0 free: more ranks need less each")
    assert shortages(job_of(runtime={"trainer_ranks": 2}), LARGE, free, "cuda") == []
    assert shortages(job_of(), LARGE, FreeMemory(host_bytes=1000 * GIB), "cuda") == [], "not known"


def on_gpus(*gpus: tuple[int, int]) -> FreeMemory:
    """(free, total) GiB of each."""
    found = tuple(GpuMemory(free_bytes=free * GIB, total_bytes=total * GIB) for free, total in gpus)
    return FreeMemory(host_bytes=1000 * GIB, gpus=found)


def test_an_engine_takes_its_share_of_a_gpu() -> None:
    share = {"trainer_ranks": 4, "rollout_memory_share": 0.5}
    free = on_gpus((38, 80), (80, 80))
    assert shortages(job_of(runtime={**share, "rollout_memory_share": 0.45}), LARGE, free, "cuda") == []
    [problem] = shortages(job_of(runtime=share), LARGE, free, "cuda")
    assert problem.startswith("runtime.rollout_memory_share: 0.5 of a GPU are 40.0 GiB, and one has 38.0 free")
    assert shortages(job_of(runtime={**share, "rollout_memory_share": 0.05}), LARGE, free, "cuda") == [
        "runtime.rollout_memory_share: 0.05 of a GPU are 4.0 GiB, and each rank of a rollout needs 4.3 GiB"
    ]
    of_role = {need.role: need.ranks[0].device_bytes for need in needs(job_of(runtime=share), LARGE, "cuda", free.gpus)}
    assert of_role["rollout"] == of_role["standby"] == 40 * GIB


def test_only_fsdp_saves_rounded_copies_and_shares_embeddings() -> None:
    def on_gpu(tensor: int) -> int:
        runtime = {"trainer_ranks": 4, "trainer_tensor_ranks": tensor}
        job = job_of(roles={"trainer": 1}, runtime=runtime, model={"dtype": "bfloat16"})
        return trainer_need(job, LARGE, 1, "cuda").device_bytes

    assert on_gpu(1) < on_gpu(2) < on_gpu(4)


def test_one_trainer_at_a_time_writes_a_checkpoint() -> None:
    one, three = (next(iter(needs(job_of(roles={"trainer": n}), LARGE))) for n in (1, 3))
    assert three.checkpoint_bytes == pytest.approx(12 * LARGE.num_parameters)
    assert three.host_bytes == 3 * three.ranks[0].host_bytes - 2 * three.checkpoint_bytes
    assert one.host_bytes == one.ranks[0].host_bytes


def test_it_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, rolecall.rl_runtime.memory_estimate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
