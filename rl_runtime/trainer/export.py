"""A run's checkpoint as a Hugging Face model folder, which transformers and vLLM load: adapters are merged.

Where the run's journal can be read, checkpoints of steps that were undone are passed over.
"""

import json
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import CheckpointCorrupt, ConfigError, JournalError, ProofMismatch
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.ledger import Ledger
from rolecall.core.rundir import RunDir
from rolecall.core.text import os_reason
from rolecall.rl_runtime.protocol.checkpoints import Choice, choose
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.checkpoint import Checkpoint, checkpoints_in, load, sync, write_tensors
from rolecall.rl_runtime.trainer.state import WEIGHT, first_state

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILES: Final = (".json", ".txt", ".model", ".jinja")
"""Of the run's model folder: configuration and tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    step: int  # optimizer step
    num_parameters: int
    dtype: str
    passed_over: tuple[str, ...]  # other checkpoints, each with the reason


def export_model(run: RunDir, folder: Path, dtype: str | None = None, step: int | None = None) -> Exported:
    """Writes `folder`, which must not exist: whole, or not at all. `dtype`: None: what the run computes with. `step`:
    of the checkpoint; None: of the newest.

    Raises:
        ConfigError: the run has no intact checkpoint (of that step), or the folder exists or cannot be written.
    """
    if folder.exists():
        raise ConfigError([f"--out: {folder} exists already"])
    job = parse_job(run.config())
    found, passed_over = _checkpoint(run, step)
    dtype = dtype or job.model.dtype
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in _weights(run, job, found).items()}
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        work.mkdir(parents=True)
        for path in (run.path / "model").iterdir():
            if path.suffix in FILES and not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, work / path.name)
        config: dict[str, Any] = json.loads((work / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = dtype
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(work / "model.safetensors", weights, {"format": "pt"})
        for path in (*work.iterdir(), work):
            sync(path)
        work.rename(folder)
        sync(folder.parent)
    except OSError as e:
        raise ConfigError([f"--out: {folder}: {os_reason(e)}"]) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Exported(
        step=found.step,
        num_parameters=sum(t.numel() for t in weights.values()),
        dtype=dtype,
        passed_over=passed_over,
    )


def _checkpoint(run: RunDir, step: int | None) -> tuple[Checkpoint, tuple[str, ...]]:
    """The newest good checkpoint, or that of `step`, and those that were passed over, each with the reason."""
    choice = _choice(run)
    passed_over = list(choice.refused)
    for info in choice.usable if step is None else [i for i in choice.usable if i.step == step]:
        try:
            return load(Path(info.path)), tuple(passed_over)
        except CheckpointCorrupt as e:
            passed_over.append(str(e))
    reasons = f"; passed over: {'; '.join(passed_over)}" if passed_over else ""
    if step is None:
        raise ConfigError([f"run {run.run_id} has no checkpoint to export{reasons}"])
    there = ", ".join(str(i.step) for i in choice.usable if i.step != step) or "none"
    raise ConfigError([f"--step: run {run.run_id} has no checkpoint of step {step}; it has {there}{reasons}"])


def _choice(run: RunDir) -> Choice:
    found = checkpoints_in(run.checkpoints)
    try:
        with closing(Journal(run.database_url, create=False)) as journal:
            ledger = Ledger(journal.store)
            return choose(found, lambda commit: ledger.includes(commit.step, commit.group_ids, commit.ledger))
    except JournalError:  # what is left of a run can still be used
        return choose(found, lambda _commit: True)


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
