"""Jobs whose memory is measured, and the folders of their models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.rl_runtime.memory_estimate import ModelSize, built_in_size, folder_size
from rolecall.rl_runtime.model_folder import read_config, weight_shapes

MIB = 1 << 20
TASK: Mapping[str, Any] = {"num_digits": 24}  # 54 tokens of prompt and answer
ALGORITHM: Mapping[str, Any] = {"group_size": 4, "groups_per_microbatch": 1, "microbatches_per_step": 2}


def built_in(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads // 2,
        "head_dim": 64,
    }


M11, M25, M51 = built_in(384, 1024, 6, 6), built_in(512, 1536, 8, 8), built_in(640, 2048, 10, 10)
LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "llama-20m": {"vocab_size": 16_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4},
    "llama-58m": {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
    "llama-118m": {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10},
}
"""Random folders of this architecture, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`settings`: of the job file, by section. `tuned`: constants were chosen by it."""

    name: str
    kind: str  # trainer, engine or run
    model: str | Mapping[str, Any]  # name of a folder, or section `model`
    tuned: bool = False
    trainers: int = 1
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def job(self, folders: Path, seed: int) -> JobConfig:
        model = {"path": str(folders / self.model)} if isinstance(self.model, str) else dict(self.model)
        value: dict[str, Any] = {
            "seed": seed,
            "model": model,
            "task": {**TASK},
            "algorithm": {"name": "grpo", **ALGORITHM},
            "roles": {"trainer": self.trainers, "rollout": 1, "reward": 1},
            "runtime": {"nodes": 1 + self.trainers + 2, "standbys": 1, "group_timeout_seconds": 600},
        }
        for section, changes in self.settings.items():
            value[section] = {**value.get(section, {}), **changes}
        return parse_job(value)


KL, PPO = {"algorithm": {"kl_coefficient": 0.01}}, {"algorithm": {"name": "ppo"}}
BF16, TWO, TP2 = {"model": {"dtype": "bfloat16"}}, {"runtime": {"trainer_ranks": 2}}, {"runtime": {"rollout_ranks": 2}}
LORA: dict[str, Any] = {"lora": {"rank": 8}}
CASES = (
    Case(name="grpo, 11 M", kind="trainer", model=M11, tuned=True),
    Case(name="grpo, 25 M", kind="trainer", model=M25),
    Case(name="grpo, 51 M", kind="trainer", model=M51, tuned=True),
    Case(name="grpo, folder of 58 M", kind="trainer", model="llama-58m"),
    Case(
        name="1728 tokens a pass, 11 M",
        kind="trainer",
        model=M11,
        settings={"algorithm": {"groups_per_microbatch": 8}},
    ),
    Case(name="grpo with reference, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=KL),
    Case(name="grpo with reference, 25 M", kind="trainer", model=M25, settings=KL),
    Case(name="ppo, 25 M", kind="trainer", model=M25, tuned=True, settings=PPO),
    Case(name="ppo, folder of 20 M", kind="trainer", model="llama-20m", settings=PPO),
    Case(name="bfloat16, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=BF16),
    Case(name="bfloat16, folder of 58 M", kind="trainer", model="llama-58m", settings=BF16),
    Case(name="LoRA, folder of 58 M", kind="trainer", model="llama-58m", tuned=True, settings=LORA),
    Case(name="LoRA and bfloat16, folder of 118 M", kind="trainer", model="llama-118m", settings={**LORA, **BF16}),
    Case(
        name="top-p, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        tuned=True,
        settings={"sampling": {"top_p": 0.9}, "algorithm": {"groups_per_microbatch": 2}},
    ),
    Case(
        name="two updates, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        settings={"algorithm": {"mini_batches": 2, "microbatch_tokens_max": 120}},
    ),
    Case(
        name="gradient checkpointing, folder of 20 M",
        kind="trainer",
        model="llama-20m",
        settings={"model": {"gradient_checkpointing": True}, "algorithm": {"group_size": 8}},
    ),
    Case(name="two trainers, 11 M", kind="trainer", model=M11, tuned=True, trainers=2),
    Case(name="two trainers, 25 M", kind="trainer", model=M25, trainers=2),
    Case(name="2 ranks, folder of 20 M", kind="trainer", model="llama-20m", tuned=True, settings=TWO),
    Case(name="2 ranks, 51 M", kind="trainer", model=M51, tuned=True, settings=TWO),
    Case(name="2 ranks, folder of 58 M", kind="trainer", model="llama-58m", settings=TWO),
    Case(name="2 ranks, LoRA, folder of 118 M", kind="trainer", model="llama-118m", settings={**LORA, **TWO}),
    Case(
        name="2 ranks, ppo with reference, 25 M",
        kind="trainer",
        model=M25,
        settings={**TWO, "algorithm": {"name": "ppo", "kl_coefficient": 0.01}},
    ),
    Case(name="engine, 25 M", kind="engine", model=M25, tuned=True),
    Case(name="engine, folder of 118 M", kind="engine", model="llama-118m"),
    Case(name="engine, bfloat16, folder of 118 M", kind="engine", model="llama-118m", settings=BF16),
    Case(
        name="engine, 256 MiB of cache, 51 M",
        kind="engine",
        model=M51,
        settings={"runtime": {"kv_cache_bytes": 256 * MIB}},
    ),
    Case(name="engine of 2 ranks, folder of 58 M", kind="engine", model="llama-58m", tuned=True, settings=TP2),
    Case(name="engine of 2 ranks, 25 M", kind="engine", model=M25, settings=TP2),
    Case(name="a run, 0.9 M", kind="run", model={}, tuned=True),
)


def write_folder(folder: Path, name: str) -> None:
    """In a process of its own: transformers stays in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary, write_tokenizer

    shape = dict(LLAMAS[name])
    heads = shape["hidden_size"] // 64
    kv = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    config = LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder / name))
    write_tokenizer(folder / name, local_vocabulary())


def size_of(job: JobConfig) -> ModelSize:
    from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary

    if job.model.path is None:
        return built_in_size(job.model, local_vocabulary(job.task.name).size)
    folder = Path(job.model.path)
    return folder_size(weight_shapes(folder), read_config(folder), job.lora)
