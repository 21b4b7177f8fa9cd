"""Models: a small local Qwen3-shaped decoder or any Hugging Face folder, and the critic, which uses the same body.

They are made in float32, with adapters if the job has LoRA. `compute_in` turns the weights into those that are computed
with.

All parameter names (manifests, transfers, checkpoints) are Hugging Face's, so that an engine can load them by name. The
local model is float32 with untied embeddings: 0.9 M parameters by default.

`python -m rolecall.rl_runtime.trainer.model RUN` writes the run's model folder, `runs/<id>/model`, once: a process of
its own, so that the supervisor does not load torch and continues while Ray starts. For an unusable model, it exits with
code 2 and one line on standard error.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rolecall.core.config.job import ModelConfig, TaskName, parse_job
from rolecall.core.config.lora import LoraSettings
from rolecall.core.errors import ConfigError, RolecallError
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.model_folder import check_weights
from rolecall.rl_runtime.model_layers import add_layers, is_adapter
from rolecall.rl_runtime.tasks.tokenizer import Vocabulary, vocabulary, write_tokenizer
from rolecall.rl_runtime.trainer.qwen3 import Qwen3, Qwen3Shape

INITIALIZER_RANGE = 0.05
"""Standard deviation of fresh weights. Of 0.035, 0.05 and 0.08, it learned fastest, and from every seed tried."""

VALUE_HEAD = "value_head"
VALUE_HEAD_STD = 1e-3
"""Standard deviation of the critic's fresh head. Its first values are then about 0.01, close to an uninformed 0."""

POSITIONS_MAX = 512

ROPE_THETA = 100.0
"""Base of the rotary embedding. Prompts are tens of tokens long: at the usual 10,000 most dimensions hardly rotate over
them, and learning to attend at a fixed distance takes twice as many steps (30 against 60, supervised).
"""


class Critic(nn.Module):
    """`critic(input_ids)`: a value after each token, of shape (batch, sequence)."""

    def __init__(self, body: Any, hidden_size: int) -> None:
        super().__init__()
        self.model = body
        self.value_head = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_bsh = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        values: Tensor = self.value_head(hidden_bsh.to(self.value_head.weight.dtype)).squeeze(-1)
        return values

    @property
    def base_model(self) -> Any:
        """The body, under the library's name for it."""
        return self.model


def make_model(config: ModelConfig, vocab: Vocabulary, seed: int, lora: LoraSettings | None = None) -> Any:
    """The model in float32, in eval mode (no dropout anywhere): the same arguments give the same bits. `lora`: with
    adapters, for a model folder.

    Raises:
        ConfigError: the model folder cannot be loaded, or has no such layers.
    """
    if config.path is not None:
        model = load_model_folder(Path(config.path))
        add_layers(model, config, lora, seed)
        return model
    shape = Qwen3Shape(
        vocab_size=vocab.size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=POSITIONS_MAX,
        rope_theta=ROPE_THETA,
        initializer_range=INITIALIZER_RANGE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3(shape).eval()


def make_critic(config: ModelConfig, vocab: Vocabulary, seed: int, lora: LoraSettings | None = None) -> Critic:
    """A value model: the policy's initial body, with adapters of its own if the policy has some, and a fresh scalar
    head. The same arguments give the same bits.

    Raises:
        ConfigError: the model folder cannot be loaded, or has no such layers.
    """
    body = make_model(config, vocab, seed, lora).base_model
    hidden_size = config.hidden_size if config.path is None else body.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        critic = Critic(body, hidden_size)
        nn.init.normal_(critic.value_head.weight, std=VALUE_HEAD_STD)
    return critic.eval()


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights to `dtype`. Those of adapters and of the value head stay as they are: they are small, and the
    engines have none. So do buffers: rotary frequencies in bfloat16 would be other frequencies.
    """
    for name, parameter in module.named_parameters():
        if not is_adapter(name) and not name.startswith(f"{VALUE_HEAD}."):
            parameter.data = parameter.data.to(dtype)


def write_model_folder(
    folder: Path, config: ModelConfig, seed: int, task: TaskName | None = TaskName.DIGIT_PARITY
) -> None:
    """Writes the folder that an engine starts from: config.json, model.safetensors, tokenizer. Those of a given folder
    are linked or copied, unless they are there already.

    Raises:
        ConfigError: the given model folder cannot be used.
    """
    vocab = vocabulary(config, task)
    folder.mkdir(parents=True, exist_ok=True)
    if config.path is not None:
        wanted = (".json", ".safetensors", ".txt", ".model", ".jinja")
        files = [p for p in Path(config.path).iterdir() if p.suffix in wanted]
        if not any(p.suffix == ".safetensors" for p in files):
            raise ConfigError(["model.path: no .safetensors file"], config.path)
        for path in files:
            _provide(path.resolve(), folder / path.name)  # a hard link to a symbolic link would be one, too
        return
    model = make_model(config, vocab, seed)
    fields = model.shape.to_config(pad=vocab.pad, bos=vocab.bos, eos=vocab.eos)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, vocab)


def _provide(source: Path, target: Path) -> None:
    """Weights, which may be many gigabytes, are linked where that is possible: a run only reads them. A target is
    replaced and never written to, because it may be such a link."""
    new = source.stat()
    if target.exists():
        old = target.stat()
        if os.path.samestat(old, new) or (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    target.unlink(missing_ok=True)
    if target.suffix == ".safetensors":
        try:
            os.link(source, target)
        except OSError:  # another file system, or the file of another user
            pass
        else:
            return
    shutil.copy2(source, target)  # with its time, by which it is recognized


def load_model_folder(folder: Path) -> Any:
    """A causal language model in float32 from a local folder; nothing is downloaded, nothing unpickled.

    Raises:
        ConfigError: names the folder and the reason, also a weight that it lacks: each process would make up another.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # stderr belongs to the run's own display
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names
        )
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ConfigError([f"model.path: {e}"], str(folder)) from e
    check_weights(sorted(loading["missing_keys"]), sorted(key for key, *_ in loading["mismatched_keys"]), folder)
    return model.eval()


def main(argv: list[str]) -> int:
    run = RunDir(Path(argv[0]))
    try:
        job = parse_job(run.config())
        write_model_folder(run.path / "model", job.model, job.seed, None if job.data else job.task.name)
    except RolecallError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
