"""Trainers whose ranks share the matrices of each layer, alone and with FSDP2: the same step as one process.

pytest tests/rl_runtime/trainer/test_tensor_ranks.py
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError, PeerLost
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.tensor_parallel import Style, tensor_plan
from rolecall.rl_runtime.trainer.checkpoint import Checkpoint
from rolecall.rl_runtime.trainer.model import make_critic, make_model, write_model_folder
from tests.rl_runtime.multi_rank_process import MultiRankProcess, join, tell_step
from tests.rl_runtime.trainer.test_rank_processes import saved
from tests.rl_runtime.trainer.test_trainer_faults import REL_L2_MAX, assert_gradients_equal, failure_free
from tests.rl_runtime.trainer_process import RankedReplica, Team, tiny_job
from tests.support import some

FLOAT64_REL_L2_MAX = 1e-12
KINDS = [
    ("qwen3", "grpo", {}),
    ("qwen3", "grpo", {"kl_coefficient": 0.1, "microbatch_tokens_max": 16}),
    ("qwen3", "grpo", {"ppo_epochs": 2, "mini_batches": 2}),
    ("qwen3", "dapo", {}),
    ("qwen3", "ppo", {}),
    ("qwen3", "tppo", {}),
    ("llama", "grpo", {}),
    ("llama", "ppo", {}),
    ("llama-lora", "grpo", {"kl_coefficient": 0.1, "microbatch_tokens_max": 16}),
    ("llama-lora", "ppo", {"ppo_epochs": 2, "mini_batches": 2}),
]
LAYOUTS = [*((kind, 1, 4) for kind in KINDS), *((kind, 2, 2) for kind in (KINDS[0], KINDS[-3], KINDS[-1]))]
"""(model and algorithm, replicas, ranks of each). Four ranks are 2 shards x 2 tensor ranks."""
LAYOUTS_EVERY_TIME = [
    *((kind, 1, 4) for kind in (KINDS[1], KINDS[5], KINDS[7], KINDS[8])),
    *((kind, 2, 2) for kind in (KINDS[0], KINDS[-1])),
]
"""Each model, each setting of an algorithm that changes what ranks compute together, and both layouts."""
IN_FLOAT32 = [k for k in KINDS[3:] if "ppo_epochs" not in k[2]]


def llama_folder(folder: Path) -> Path:
    """Random weights, biases where the architecture may have some, and the tokenizer of the built-in task."""
    from transformers import LlamaConfig, LlamaForCausalLM

    job = small_job("grpo", {})
    write_model_folder(folder, job.model, seed=3)
    config = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    kept = (*kept, "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(
            LlamaConfig(**{name: config[name] for name in kept}, attention_bias=True, mlp_bias=True)
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def small_job(
    name: str, algorithm: dict[str, Any], path: Path | None = None, *, lora: Any = None, **runtime: Any
) -> JobConfig:
    """As `tiny_job`, with heads for two tensor ranks."""
    job = tiny_job(name, algorithm=algorithm, group_timeout_seconds=600.0).model_dump(mode="json")
    model = {**job["model"], "num_heads": 4, "num_kv_heads": 2} if path is None else {"path": str(path)}
    return parse_job({**job, "model": model, "lora": lora, "runtime": {**job["runtime"], **runtime}})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Of the model, the algorithm and its settings that a test names as this fixture's parameter."""
    kind, name, settings = getattr(request, "param", KINDS[0])
    folder = None if kind == "qwen3" else request.getfixturevalue("llama")
    team = Team(small_job(name, settings, folder, lora={"rank": 3, "alpha": 6} if kind == "llama-lora" else None))
    yield team
    team.close()


def started(team: Team, replicas: int, ranks: int, *, float64: bool = False, **of_the_last: Any) -> list[RankedReplica]:
    members = [
        RankedReplica(team, index, ranks, tensor=2, float64=float64, **(of_the_last if index == replicas - 1 else {}))
        for index in range(replicas)
    ]
    for member in members:
        member.ready()
    team.join(members)
    return members


def named(kind: Any) -> str | None:
    return "-".join((*kind[:2], *kind[2])) if isinstance(kind, tuple) else None


@pytest.mark.parametrize(("team", "replicas", "ranks"), some(LAYOUTS, LAYOUTS_EVERY_TIME), indirect=["team"], ids=named)
def test_tensor_ranks_step_as_one_process(team: Team, replicas: int, ranks: int) -> None:
    """In float64: there the order of additions cannot hide a mistake."""
    members = started(team, replicas, ranks, float64=True)
    shares = ([0, 1], [2, 3]) if replicas == 2 else ([0, 1, 2, 3],)
    results: list[Any] = []
    for step in range(2):
        team.tell_step(step, dict(zip(members, shares, strict=True)))
        results = [m.answer() for m in members]
    alone = failure_free(2, job=team.job, dtype=torch.float64)
    wanted = alone.last_result
    assert wanted is not None
    for member, got in zip(members, results, strict=True):
        for step in range(2):
            assert_close(member.gathered("gradient_of", step), alone.gradient_of(step), FLOAT64_REL_L2_MAX)
        assert got.num_tokens == wanted.num_tokens and got.reward == wanted.reward
        assert (got.loss, got.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-9, abs=1e-12)
        assert got.health.to_dict() == pytest.approx(wanted.health.to_dict(), rel=1e-9, abs=1e-9)
        tensors, meta = member.ask("exported", True)
        assert_close(tensors, alone.exported()[0], FLOAT64_REL_L2_MAX)
        band = json.loads(alone.exported()[1])["band"]  # numbers of single microbatches
        assert len(band) == 8 and np.allclose(json.loads(meta)["band"], band, rtol=1e-9, atol=1e-12)
        sent = {name: weight.numpy() for name, weight in member.ask("policy_tensors", 2).items()}
        assert_close(sent, {name: t.numpy() for name, t in alone.policy_tensors(2).items()}, FLOAT64_REL_L2_MAX)
        for name, weight in sent.items() if team.job.lora is None else ():
            assert np.array_equal(weight, tensors[f"weight/{name}"]), name


@pytest.mark.parametrize("team", some([(k,) for k in IN_FLOAT32], [(KINDS[5],), (KINDS[8],)]), indirect=True, ids=named)
def test_their_float32_gradients_are_those_of_one_float64_process(team: Team) -> None:
    [member] = started(team, 1, 4)
    team.tell_step(0, {member: [0, 1, 2, 3]})
    member.answer()
    wanted = failure_free(1, job=team.job, dtype=torch.float64)
    assert_close(member.gathered("gradient_of", 0), wanted.gradient_of(0), REL_L2_MAX)


def assert_close(got: dict[str, Any], wanted: dict[str, Any], rel_l2_max: float) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.linalg.norm(got[name] - tensor) <= rel_l2_max * np.linalg.norm(tensor), name


def test_a_replica_lost_in_the_reduce_leaves_the_step_as_it_would_have_been(team: Team) -> None:
    survivor, victim = started(team, 2, 2, stops={"bucket": 2})
    team.tell_step(0, {survivor: [0, 1], victim: [2, 3]})
    victim.ranks[-1].arrives_at("bucket")
    for rank in victim.ranks:
        rank.kill()
    with pytest.raises(PeerLost):
        survivor.answer()
    team.join([survivor])
    team.tell_step(0, {survivor: [0, 1, 2, 3]})
    survivor.answer()
    assert_gradients_equal(survivor.gathered("gradient_of", 0), failure_free(1, job=team.job).gradient_of(0))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("team", [("qwen3", "ppo", {})], indirect=True, ids=["ppo"])
def test_a_checkpoint_of_whole_tensors_resumes_on_any_layout(team: Team, ranks: int) -> None:
    [member] = started(team, 1, ranks)
    before = failure_free(1, job=team.job).exported()
    member.ask("take", *before, True)
    tensors, meta = member.ask("exported", True)
    assert meta == before[1] and all(np.array_equal(tensors[n], t) for n, t in before[0].items())
    team.tell_step(1, {member: [0, 1, 2, 3]})
    member.answer()
    assert_close(member.ask("exported", True)[0], failure_free(2, job=team.job).exported()[0], REL_L2_MAX)


def test_checkpoint_files_and_copies_of_whole_processes(tmp_path: Path) -> None:
    """Written by tensor ranks and resumed by one rank, and the other way round; copied rank by rank."""
    run = create_run_dir(tmp_path, "r")
    job = small_job("grpo", {})
    shared = small_job("grpo", {}, trainer_ranks=2, trainer_tensor_ranks=2)
    with ExitStack() as stack:

        def start(index: int, of: JobConfig, incarnation: int = 1) -> MultiRankProcess:
            process = MultiRankProcess(run, index, of, incarnation)
            stack.callback(process.close)
            return process

        several, one, replacement = start(0, shared), start(1, job), start(2, shared, incarnation=2)
        for process in (several, one, replacement):
            process.answer()
        for step, trainer, reader in ((0, several, one), (1, one, several)):
            join(1 + step, trainer)
            tell_step(job, 1 + step, step, trainer)
            trainer.answer()
            folder = tmp_path / str(step)
            written = saved(trainer, folder)
            reader.ask("load_checkpoint", str(written.path))
            assert_same(saved(reader, tmp_path / f"read-{step}"), written)
        holder = several.ask("info").holder
        assert len(holder.rank_ports) == 1, "each rank copies from its own"
        replacement.ask("copy_from", holder)
        assert_same(saved(replacement, tmp_path / "copy"), written)
    alone = failure_free(2, job=job).exported()[0]
    assert_close({name: t.numpy() for name, t in written.tensors.items()}, alone, REL_L2_MAX)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.meta == other.meta and one.tensors.keys() == other.tensors.keys()
    for name, tensor in other.tensors.items():
        assert np.array_equal(one.tensors[name], tensor), name


def test_the_library_has_the_plan_of_our_own_model() -> None:
    from transformers import Qwen3Config

    job = small_job("grpo", {})
    body = make_model(job.model, vocabulary(job.model, job.task.name), 0).base_model
    assert body.base_model_tp_plan == Qwen3Config().base_model_tp_plan


def test_a_plan_gives_each_layer_its_style() -> None:
    job = small_job("ppo", {})
    vocab = vocabulary(job.model, job.task.name)
    for model in (make_model(job.model, vocab, 0), make_critic(job.model, vocab, 0)):
        plan = tensor_plan(model.base_model, 2)
        assert plan["layers.0.self_attn.q_proj"] is Style.COLUMN and plan["layers.0.mlp.down_proj"] is Style.ROW
        assert plan["layers.0.self_attn.k_norm"] is Style.SUMMED and "layers.0.input_layernorm" not in plan


class Shared(nn.Module):
    def __init__(self, plan: dict[str, str] | None) -> None:
        super().__init__()
        self.w1, self.odd, self.norm = nn.Linear(4, 6), nn.Linear(3, 5), nn.LayerNorm(4)
        self.base_model_tp_plan = plan
        self.config = self


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (None, "Shared has no plan"),
        ({"w1": "colwise", "odd": "packed_colwise"}, r"trainers do not know \(odd: packed_colwise\)"),
        ({"odd": "colwise"}, "2 ranks do not divide the 5 outputs of odd"),
        ({"odd": "rowwise"}, "2 ranks do not divide the 3 inputs of odd"),
        ({"norm": "colwise"}, "norm of Shared is no linear layer"),
        ({"absent": "colwise"}, "Shared has no plan"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(plan: dict[str, str] | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"runtime.trainer_tensor_ranks: .*{reason}"):
        tensor_plan(Shared(plan), 2)
