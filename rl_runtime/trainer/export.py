"""A run's newest checkpoint as a Hugging Face model folder, which transformers and vLLM load."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from rolecall.core.errors import ConfigError
from rolecall.core.rundir import RunDir
from rolecall.core.text import os_reason
from rolecall.rl_runtime.trainer.checkpoint import newest_good
from rolecall.rl_runtime.trainer.state import WEIGHT

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILES: Final = (".json", ".txt", ".model", ".jinja")
"""Of the run's model folder: configuration and tokenizer."""


def export_model(run: RunDir, folder: Path, dtype: str) -> tuple[int, int, list[str]]:
    """Writes `folder`, which must not exist: whole, or not at all. Returns (optimizer step, number of parameters,
    damaged newer checkpoints that were passed over).

    Raises:
        ConfigError: the run has no intact checkpoint, or the folder exists or cannot be written.
    """
    if folder.exists():
        raise ConfigError([f"--out: {folder} exists already"])
    search = newest_good(run.checkpoints)
    if search.found is None:
        bad = f"; damaged: {'; '.join(map(str, search.bad))}" if search.bad else ""
        raise ConfigError([f"run {run.run_id} has no checkpoint to export{bad}"])
    prefix = f"{WEIGHT}/"
    weights = {
        name.removeprefix(prefix): tensor.to(DTYPES[dtype])
        for name, tensor in search.found.tensors.items()
        if name.startswith(prefix)
    }
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        work.mkdir(parents=True)
        for path in (run.path / "model").iterdir():
            if path.suffix in FILES and not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, work / path.name)
        config: dict[str, Any] = json.loads((work / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = dtype
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        work.rename(folder)
    except OSError as e:
        raise ConfigError([f"--out: {folder}: {os_reason(e)}"]) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return search.found.step, sum(t.numel() for t in weights.values()), [str(e) for e in search.bad]
