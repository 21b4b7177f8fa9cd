"""A run's newest checkpoint as a Hugging Face model folder, which transformers and vLLM load: adapters are merged."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError, ProofMismatch
from rolecall.core.ids import ReplicaId
from rolecall.core.rundir import RunDir
from rolecall.core.text import os_reason
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.checkpoint import Checkpoint, newest_good
from rolecall.rl_runtime.trainer.state import WEIGHT, first_state

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILES: Final = (".json", ".txt", ".model", ".jinja")
"""Of the run's model folder: configuration and tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    step: int  # optimizer step
    num_parameters: int
    dtype: str
    damaged: tuple[str, ...]  # newer checkpoints that were passed over, with the reasons


def export_model(run: RunDir, folder: Path, dtype: str | None = None) -> Exported:
    """Writes `folder`, which must not exist: whole, or not at all. `dtype`: None: what the run computes with.

    Raises:
        ConfigError: the run has no intact checkpoint, or the folder exists or cannot be written.
    """
    if folder.exists():
        raise ConfigError([f"--out: {folder} exists already"])
    search = newest_good(run.checkpoints)
    if search.found is None:
        bad = f"; damaged: {'; '.join(map(str, search.bad))}" if search.bad else ""
        raise ConfigError([f"run {run.run_id} has no checkpoint to export{bad}"])
    job = parse_job(run.read()["config"])
    dtype = dtype or job.model.dtype
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in _weights(run, job, search.found).items()}
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
    return Exported(
        step=search.found.step,
        num_parameters=sum(t.numel() for t in weights.values()),
        dtype=dtype,
        damaged=tuple(map(str, search.bad)),
    )


def _weights(run: RunDir, job: JobConfig, found: Checkpoint) -> dict[str, torch.Tensor]:
    """Under their Hugging Face names. A checkpoint of adapters is merged with the run's copy of the model folder."""
    if job.lora is None:
        prefix = f"{WEIGHT}/"
        return {n.removeprefix(prefix): t for n, t in found.tensors.items() if n.startswith(prefix)}
    model = job.model.model_copy(update={"path": str(run.path / "model")})
    job = job.model_copy(update={"model": model})
    state = first_state(job, vocabulary(model, None), replica=ReplicaId("export/0"))
    try:
        state.load(found.tensors, found.meta)
    except ProofMismatch as e:
        raise ConfigError([f"run {run.run_id}: {e}"]) from e
    return state.policy.weights()
