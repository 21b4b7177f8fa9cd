"""What the files of a Hugging Face model folder say, without loading the model: config.json and the tensors' shapes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.core.errors import ConfigError
from rolecall.core.text import os_reason


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigError: it cannot be read, or is not a mapping."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError([f"model.path: {os_reason(e)}"], str(path)) from e
    except ValueError as e:
        raise ConfigError([f"model.path: {e}"], str(path)) from e
    if not isinstance(config, dict):
        raise ConfigError([f"model.path: expected a mapping, got a {type(config).__name__}"], str(path))
    return config


def rows_of(config: dict[str, Any], otherwise: int) -> int:
    """Rows of the embedding, by a model's config.json; multi-modal models have it in `text_config`."""
    return int((config.get("text_config") or config).get("vocab_size") or otherwise)


def check_weights(missing: Sequence[str], mismatched: Sequence[str], folder: Path) -> None:
    """Raises ConfigError: the files lack some of the model's weights, or have them in another shape."""
    found = [
        f"model.path: {what}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for what, names in (("no such weight", missing), ("a weight of another shape than in config.json", mismatched))
        if names
    ]
    if found:
        raise ConfigError(found, str(folder))


def weight_files(folder: Path) -> list[Path]:
    """The model's safetensors files: those of the index where there is one, else all.

    Raises:
        ConfigError: there is none, or the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            files = [folder / name for name in sorted({*json.loads(index.read_text("utf-8"))["weight_map"].values()})]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError([f"model.path: {index.name}: {type(e).__name__}: {e}"], str(folder)) from e
    if not files:
        raise ConfigError(["model.path: no .safetensors file"], str(folder))
    return files


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of each tensor of the model's files. Raises ConfigError: they cannot be read."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 it is no mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError) as e:
            raise ConfigError([f"model.path: {file.name}: {e}"], str(folder)) from e
    return shapes
