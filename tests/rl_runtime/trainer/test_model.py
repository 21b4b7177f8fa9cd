"""pytest tests/rl_runtime/trainer/test_model.py"""

import errno
import json
import os
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


def test_weights_of_a_given_folder_are_linked_and_kept_while_they_are_the_same(tmp_path: Path) -> None:
    given, run = tmp_path / "given", tmp_path / "run"
    write_model_folder(tmp_path / "blobs", TINY, seed=3)
    given.mkdir()
    for path in (tmp_path / "blobs").iterdir():  # as in a cache of the Hugging Face hub
        (given / path.name).symlink_to(path)
    config = ModelConfig(path=str(given))
    write_model_folder(run, config, seed=3)
    weights, settings = run / "model.safetensors", run / "config.json"
    assert weights.samefile(given / "model.safetensors") and not weights.is_symlink()
    assert not settings.samefile(given / "config.json"), "it may be edited in place"
    inode = settings.stat().st_ino
    write_model_folder(run, config, seed=3)
    assert (run / "model.safetensors").samefile(weights) and settings.stat().st_ino == inode
    write_model_folder(tmp_path / "other", TINY, seed=4)
    before = weights.read_bytes()
    (given / "model.safetensors").unlink()
    (given / "model.safetensors").symlink_to(tmp_path / "other" / "model.safetensors")
    write_model_folder(run, config, seed=3)
    assert weights.samefile(tmp_path / "other" / "model.safetensors")
    assert (tmp_path / "blobs" / "model.safetensors").read_bytes() == before, "what was linked is never written to"


def test_weights_that_cannot_be_linked_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    write_model_folder(tmp_path / "given", TINY, seed=3)
    config, weights = ModelConfig(path=str(tmp_path / "given")), tmp_path / "run" / "model.safetensors"
    write_model_folder(tmp_path / "run", config, seed=3)
    copied = weights.stat()
    assert weights.read_bytes() == (tmp_path / "given" / "model.safetensors").read_bytes()
    write_model_folder(tmp_path / "run", config, seed=3)
    assert weights.stat() == copied
    os.truncate(weights, 10)  # a copy that was cut off
    write_model_folder(tmp_path / "run", config, seed=3)
    assert weights.stat().st_size == copied.st_size


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
