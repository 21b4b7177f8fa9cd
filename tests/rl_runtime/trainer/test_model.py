"""pytest tests/rl_runtime/trainer/test_model.py"""

import json
from pathlib import Path

import pytest
import torch

from rolecall.core.config.job import ModelConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary, vocabulary
from rolecall.rl_runtime.trainer.model import load_model_folder, make_model, write_model_folder

TINY = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {n: p.detach().numpy().tobytes() for n, p in model.named_parameters()}


def test_same_seed_same_bits_and_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = make_model(TINY, local_vocabulary(), seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert bits(one) == bits(make_model(TINY, local_vocabulary(), seed=3))
    assert bits(one) != bits(make_model(TINY, local_vocabulary(), seed=4))


def test_folder_round_trips_and_any_folder_works_the_same_way(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "made", TINY, seed=3)
    made = make_model(TINY, local_vocabulary(), seed=3)
    assert bits(load_model_folder(tmp_path / "made")) == bits(made)
    given = ModelConfig(path=str(tmp_path / "made"))
    assert vocabulary(given) == local_vocabulary()
    assert bits(make_model(given, vocabulary(given), seed=9)) == bits(made)
    write_model_folder(tmp_path / "copied", given, seed=9)
    assert bits(load_model_folder(tmp_path / "copied")) == bits(made)
    config = json.loads((tmp_path / "copied" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model_folder(tmp_path)
    write_model_folder(tmp_path / "made", TINY, seed=3)
    (tmp_path / "made" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        write_model_folder(tmp_path / "copied", ModelConfig(path=str(tmp_path / "made")), seed=0)


def test_default_model_is_small() -> None:
    parameters = sum(p.numel() for p in make_model(ModelConfig(), local_vocabulary(), seed=0).parameters())
    assert 200_000 < parameters < 2_000_000
