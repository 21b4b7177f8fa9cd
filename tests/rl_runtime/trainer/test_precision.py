"""Trainers that compute in bfloat16, compute activations again, or train adapters: what they send, keep and agree on."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from rolecall.core.config.job import JobConfig, ModelConfig, parse_job
from rolecall.core.errors import ConfigError, ProofMismatch
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.model import compute_in, make_model, write_model_folder
from rolecall.rl_runtime.trainer.state import first_state
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from rolecall.rl_runtime.weights.digest import DTYPES, entries_of
from rolecall.rl_runtime.weights.proof import CANARY
from tests.rl_runtime.trainer_process import LEDGER, make_microbatches, tiny_job

TOKENS = torch.tensor([CANARY])
BFLOAT16: dict[str, Any] = {"model": {"dtype": "bfloat16"}}
CHECKPOINTING: dict[str, Any] = {"model": {"gradient_checkpointing": True}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}
ALL: dict[str, Any] = {**LORA, "model": {"dtype": "bfloat16", "gradient_checkpointing": True}}
CHANGES = {"bfloat16": BFLOAT16, "checkpointing": CHECKPOINTING, "lora": LORA, "all": ALL}
each = pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision") / "model"
    shape = tiny_job().model.model_copy(update={"num_layers": 2})
    write_model_folder(folder, shape, seed=3)
    return folder


def job_of(folder: Path, change: dict[str, Any], algorithm: str = "grpo", **algorithm_change: Any) -> JobConfig:
    value = tiny_job(algorithm).model_dump(mode="json")
    value["algorithm"].update(algorithm_change)
    return parse_job({**value, **change, "model": {"path": str(folder), **change.get("model", {})}})


def trainer_of(job: JobConfig, index: int = 0, **options: Any) -> TrainerReplica:
    return TrainerReplica(replica=replica_id("trainer", index), incarnation=1, job=job, **options)


def steps_together(trainers: list[TrainerReplica], epoch: int, steps: range) -> None:
    """The steps in one epoch of these trainers, each in a thread of its own."""
    host, port = trainers[0].open_store(epoch) if len(trainers) > 1 else ("127.0.0.1", 0)
    names, size = [t.replica for t in trainers], len(trainers)

    def run(rank: int) -> None:
        trainer = trainers[rank]
        trainer.join(1, epoch, rank, size, host, port)
        for step in steps:
            microbatches = make_microbatches(trainer.job, step)
            ids = [m.microbatch_id for m in microbatches]
            trainer.train_step(1, epoch, step, microbatches[rank::size], ids, LEDGER, names)

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(run, rank) for rank in range(size)]:
            done.result(60)


def sent(trainer: TrainerReplica) -> dict[str, torch.Tensor]:
    return trainer.state.policy_tensors(trainer.state.commit.policy_version)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def moved(state: Any, seed: int = 1) -> None:
    """Changes all masters, adapters too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for master in state.policy.masters:
            master.add_(torch.randn_like(master), alpha=0.1)
    state.policy.masters_changed()


@each
def test_trainers_stay_identical_and_their_state_can_be_copied(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    job = job_of(folder, change)
    one, other = trainer_of(job, 0), trainer_of(job, 1)
    given = load_file(folder / "model.safetensors")
    first = sent(one)
    assert same(first, {n: t.to(DTYPES[job.model.dtype]) for n, t in given.items()}), "names, dtype and values"
    steps_together([one, other], 1, range(2))
    assert one.state.weights_digest == other.state.weights_digest
    assert same(sent(one), sent(other)) and not same(sent(one), first)
    tensors, meta = one.state.export()
    assert same(tensors, other.state.export()[0])
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    found = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, meta))
    heir = trainer_of(job, 2, has_state=False)
    heir.load_state(found.tensors, found.meta)
    assert entries_of(sent(heir)) == entries_of(sent(one))
    assert heir.state.canary_logprobs(CANARY) == one.state.canary_logprobs(CANARY)
    steps_together([one, heir], 2, range(2, 3))
    assert same(sent(heir), sent(one)) and same(heir.state.export()[0], one.state.export()[0])
    for trainer in (one, other, heir):
        trainer.close()


@each
def test_what_is_sent_computes_what_the_trainer_computes(folder: Path, change: dict[str, Any]) -> None:
    """A plain model with the weights that engines get, in their dtype."""
    job = job_of(folder, change)
    state = first_state(job, vocabulary(job.model), replica=replica_id("trainer", 0))
    moved(state)
    plain = make_model(ModelConfig(path=str(folder)), vocabulary(job.model), 0)
    compute_in(plain, DTYPES[job.model.dtype])
    plain.load_state_dict(state.policy.weights())
    assert torch.equal(state.policy.module(input_ids=TOKENS, use_cache=False).logits, plain(TOKENS).logits)
    with torch.no_grad():
        assert torch.equal(state.policy.module(input_ids=TOKENS, use_cache=False).logits, plain(TOKENS).logits)


@each
def test_previous_versions_can_be_recomputed(folder: Path, change: dict[str, Any]) -> None:
    trainer = trainer_of(job_of(folder, change))
    module = trainer.state.policy.module
    with torch.no_grad():
        before = module(input_ids=TOKENS, use_cache=False).logits
        steps_together([trainer], 1, range(1))
        assert not torch.equal(before, module(input_ids=TOKENS, use_cache=False).logits)
        weights = trainer.state.previous[0]
        again = functional_call(module, dict(weights), kwargs={"input_ids": TOKENS, "use_cache": False}).logits
    assert torch.equal(before, again)
    trainer.close()


def gradients(state: Any) -> list[torch.Tensor]:
    loss = state.policy.module(input_ids=TOKENS, use_cache=False).logits.float().log_softmax(-1)[..., 3].sum()
    return list(torch.autograd.grad(loss, state.policy.parameters, materialize_grads=True))


def state_of(folder: Path, change: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    job = job_of(folder, change)
    return first_state(job, vocabulary(job.model), replica=replica_id("trainer", 0), dtype=dtype)


def test_activations_computed_again_give_the_same_gradients(folder: Path) -> None:
    plain, again = state_of(folder, {}), state_of(folder, CHECKPOINTING)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    again.policy.module.model.layers[0].mlp.register_forward_pre_hook(count)
    for one, other in zip(gradients(plain), gradients(again), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
    assert calls == 2, "once in each pass"


def test_gradients_in_bfloat16_point_the_same_way(folder: Path) -> None:
    plain, rounded = (torch.cat([g.double().flatten() for g in gradients(state_of(folder, c))]) for c in ({}, BFLOAT16))
    assert torch.cosine_similarity(plain, rounded, dim=0) > 0.999
    assert not torch.equal(plain, rounded)


def test_steps_too_small_for_bfloat16_add_up(folder: Path) -> None:
    """One step moves no bfloat16 weight; its float32 master keeps it."""
    state = state_of(folder, BFLOAT16)
    name = "model.layers.0.mlp.up_proj.weight"
    before, master = state.policy.weights()[name], state.policy.masters[state.policy.names.index(name)]
    step = before.float().abs() * 2.0**-10
    with torch.no_grad():
        master.copy_(before)
        for number in range(8):
            master.add_(step)
            state.policy.masters_changed()
            if number == 0:
                assert torch.equal(state.policy.weights()[name], before)
    assert (state.policy.weights()[name] != before).all()


@pytest.mark.parametrize("change", [LORA, {**LORA, **CHECKPOINTING}], ids=["lora", "checkpointing"])
def test_adapters_get_the_gradient_of_their_merged_weights(folder: Path, change: dict[str, Any]) -> None:
    """Against the chain rule through W + 2 B A of each layer, in float64."""
    state = state_of(folder, change, torch.float64)
    moved(state)
    found = dict(zip(state.policy.names, gradients(state), strict=True))
    given = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    adapters = {
        n: p.detach().clone().requires_grad_() for n, p in zip(state.policy.names, state.policy.masters, strict=True)
    }
    layers = {n.removesuffix(".lora_A.default.weight") for n in adapters if "lora_A" in n}
    assert len(layers) == 14, "seven linear layers in each of two decoder layers"
    for layer in layers:
        a, b = (adapters[f"{layer}.lora_{x}.default.weight"] for x in "AB")
        given[f"{layer}.weight"] = given[f"{layer}.weight"] + 2 * b @ a
    plain = make_model(ModelConfig(path=str(folder)), vocabulary(ModelConfig(path=str(folder))), 0).double()
    logits = functional_call(plain, given, kwargs={"input_ids": TOKENS, "use_cache": False}).logits
    loss = logits.float().log_softmax(-1)[..., 3].sum()
    for (name, _), wanted in zip(adapters.items(), torch.autograd.grad(loss, list(adapters.values())), strict=True):
        assert wanted.abs().max() > 0
        assert torch.allclose(found[name], wanted, rtol=1e-5, atol=1e-8), name


def test_only_the_adapters_of_the_targets_are_trained(folder: Path) -> None:
    state = state_of(folder, {"lora": {"rank": 2, "target_modules": ["q_proj", "v_proj"]}})
    assert {n.split(".")[-4] for n in state.policy.names} == {"q_proj", "v_proj"} and len(state.policy.names) == 8
    moved(state)
    given, now = load_file(folder / "model.safetensors"), state.policy.weights()
    assert {n for n in given if not torch.equal(given[n], now[n])} == {
        f"model.layers.{i}.self_attn.{p}.weight" for i in range(2) for p in ("q_proj", "v_proj")
    }


def test_a_critic_has_adapters_of_its_own_and_a_whole_head(folder: Path) -> None:
    trainer = trainer_of(job_of(folder, ALL, "ppo"))
    critic = trainer.state.critic
    assert critic is not None
    assert [n for n in critic.names if "lora_" not in n] == ["value_head.weight"]
    before = {n: t.clone() for n, t in trainer.state.export()[0].items()}
    steps_together([trainer], 1, range(2))
    after = trainer.state.export()[0]
    assert {t.dtype for t in after.values()} == {torch.float32}
    for name in ("value_head.weight", next(n for n in critic.names if "lora_B" in n)):
        assert not torch.equal(before[f"critic/weight/{name}"], after[f"critic/weight/{name}"])
    trainer.close()


@pytest.mark.parametrize("change", [LORA, ALL], ids=["float32", "bfloat16"])
def test_the_reference_policy_is_the_initial_model(folder: Path, change: dict[str, Any]) -> None:
    trainer = trainer_of(job_of(folder, change, kl_coefficient=0.1))
    reference = trainer._gradients._reference
    with torch.no_grad():
        initial = trainer.state.policy.module(input_ids=TOKENS, use_cache=False).logits
        steps_together([trainer], 1, range(1))
        assert torch.equal(reference(input_ids=TOKENS, use_cache=False).logits, initial)
        assert not torch.equal(trainer.state.policy.module(input_ids=TOKENS, use_cache=False).logits, initial)
    trainer.close()


def test_adapters_of_a_changed_model_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors, meta = state_of(folder, LORA).export()
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    state = state_of(changed, LORA)
    with pytest.raises(ProofMismatch, match="the model folder has changed"):
        state.load(tensors, meta)
    assert state.weights_digest != state_of(folder, LORA).weights_digest, "the vote sees it too"
    state_of(folder, LORA).load(tensors, meta)


def test_unknown_layers_and_a_missing_library_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("query", "lm_head", "norm"):
        with pytest.raises(ConfigError, match=rf"lora.target_modules: '{target}' is no linear layer .* q_proj"):
            state_of(folder, {"lora": {"target_modules": ["q_proj", target]}})
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora: needs peft, which cannot be imported .*pip install '.\[lora\]'"):
        state_of(folder, LORA)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"model": {"dtype": "bfloat16"}}, "model: dtype without path"),
        ({"model": {"gradient_checkpointing": True}}, "model: gradient_checkpointing without path"),
        ({"lora": {}}, "lora: needs model.path"),
        ({"model": {"path": "m"}, "lora": {"dropout": 0.1}}, "lora.dropout: unknown key"),
        ({"model": {"path": "m"}, "lora": {"target_modules": []}}, r"lora.target_modules"),
        ({"model": {"path": "m", "dtype": "float16"}}, "model.dtype: Input should be 'float32' or 'bfloat16'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(value: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_job(value)


def test_an_architecture_without_such_layers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: Callable[..., Any] = make_model
    monkeypatch.setattr(
        "rolecall.rl_runtime.trainer.model.load_model_folder",
        lambda _: own(tiny_job().model, vocabulary(ModelConfig(path=str(folder))), 0),
    )
    with pytest.raises(ConfigError, match=r"model.gradient_checkpointing: Qwen3 has no layers for it"):
        state_of(folder, CHECKPOINTING)
