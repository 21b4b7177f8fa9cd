"""Checks a job with a model folder before anything starts: data, tokenizer, reward function, model and memory.

In a process of its own (`python -m rolecall.rl_runtime.tasks.check`), because transformers and vLLM are slow to import
and stay in memory.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import ConfigError, DeadlineExceeded, EnvironmentFailed, RewardFailed
from rolecall.rl_runtime.tasks.rewards.functions import BUILT_IN
from rolecall.rl_runtime.tasks.tokenizer import vocabulary

CHECK_SECONDS = 300.0
ROWS_CHECKED = 256
WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2}
TRAINED_BYTES: Final = {"float32": 56, "bfloat16": 52}
"""Per trained parameter, of policy or critic: weights and, in bfloat16, their rounded copy, two of AdamW, gradients,
two sums in float64, older versions, the published one, and what a checkpoint copies. Measured in float32 with 134.5 M:
9.1 GiB at most, libraries and activations included."""
FROZEN_COPIES: Final = 5
"""Of a parameter with adapters: as given, merged, two older versions, and the published one."""
DRAFT_BYTES: Final = {"float32": 12, "bfloat16": 14}
"""Per trained parameter, of a step with several updates: the weights and moments of AdamW that they move. With adapters
a parameter as given, and merged."""
PROCESS_BYTES = 1 << 30
"""Of libraries and activations, per process."""
HELD_OUT_REQUESTS_MAX, HELD_OUT_TOKENS_MAX = 2048, 2_000_000
"""Of one evaluation: half of what one engine holds at most (`token_buffer.py`), since one may have to hold all."""


def checked(job: JobConfig) -> JobConfig:
    """The job with its dataset's fingerprint; unchanged for a built-in task. The built-in model needs no check.

    Raises:
        ConfigError: all problems, each `path: reason`.
        DeadlineExceeded: the check takes too long.
    """
    _check_loggers(job)
    if job.model.path is None:
        _check_evaluation_size(job)
        return job
    argv = [sys.executable, "-m", "rolecall.rl_runtime.tasks.check"]
    try:
        done = subprocess.run(
            argv, input=job.model_dump_json().encode(), capture_output=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(waited_for="the check of data, reward and model", seconds=CHECK_SECONDS) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = done.stderr.decode(errors="replace").strip()[-1500:]
        raise ConfigError([f"data: the check ended with code {done.returncode}: {reason}"]) from None
    if answer["problems"]:
        raise ConfigError(answer["problems"])
    if job.data is None:
        return job
    changes: dict[str, Any] = {"data": job.data.model_copy(update={"fingerprint": answer["fingerprint"]})}
    if job.evaluation is not None:
        changes["evaluation"] = job.evaluation.model_copy(update={"fingerprint": answer["held_out_fingerprint"]})
    return job.model_copy(update=changes)


def _check_loggers(job: JobConfig) -> None:
    problems = [
        f"logging.{name}: package {name} is not installed: pip install {name}"
        for name in job.logging.names
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems)


def problems_of(job: JobConfig) -> tuple[list[str], tuple[str, str]]:
    """(each `path: reason`, fingerprints of the dataset and of the held-out one)."""
    problems: list[str] = []
    fingerprints = None
    if job.data is not None:
        fingerprints = _collected(lambda: _check_data(job), problems)
        _collected(lambda: _check_reward(job), problems)
        _collected(lambda: _check_environment(job), problems)
    else:
        _collected(lambda: _check_evaluation_size(job), problems)
    _collected(lambda: _check_model(job), problems)
    _collected(lambda: _check_layers(job), problems)
    _collected(lambda: _check_memory(job, psutil.virtual_memory().available), problems)
    return problems, fingerprints or ("", "")


T = TypeVar("T")


def _collected(check: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return check()
    except ConfigError as e:
        problems += [f"{p} ({e.source})" if e.source else p for p in e.problems]
    except RewardFailed as e:
        setting = "environment.factory" if isinstance(e, EnvironmentFailed) else "reward.function"
        problems.append(f"{setting}: {e.because}")
    return None


def _check_data(job: JobConfig) -> tuple[str, str]:
    from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
    from rolecall.rl_runtime.tasks.reward_worker import task_of

    task = task_of(job)
    assert isinstance(task, DatasetTask)
    task.check(ROWS_CHECKED)
    if job.evaluation is not None:
        _check_held_out(job, task.fingerprint, task.held_out_fingerprint)
        _check_evaluation_size(job, task.num_held_out(job.evaluation.num_prompts))
    return task.fingerprint, task.held_out_fingerprint


def _check_held_out(job: JobConfig, trained: str, held_out: str) -> None:
    """Equal files may have different paths."""
    assert job.data is not None and job.evaluation is not None
    given = job.evaluation.held_out(job.data)
    if trained == held_out and (given.split == job.data.split or not Path(job.data.path).is_dir()):
        raise ConfigError(["evaluation.path: these prompts are trained on: its files are those of data.path"])


def _check_evaluation_size(job: JobConfig, prompts: int = 0) -> None:
    """`prompts`: of a dataset; 0: a built-in task has as many as are asked for.

    Raises:
        ConfigError: an evaluation has more requests or tokens than one engine can hold.
    """
    if job.evaluation is None:
        return
    prompts = prompts or job.evaluation.num_prompts or 0
    requests = prompts * job.evaluation.samples
    tokens = requests * (job.evaluation.max_response_tokens or job.max_response_tokens)
    for num, limit, of in ((requests, HELD_OUT_REQUESTS_MAX, "requests"), (tokens, HELD_OUT_TOKENS_MAX, "tokens")):
        if num > limit:
            what = f"{prompts} prompts x {job.evaluation.samples} samples are up to {num:,} {of}"
            raise ConfigError([f"evaluation.num_prompts: {what}, at most {limit:,}"])


def _check_reward(job: JobConfig) -> str:
    from rolecall.rl_runtime.tasks.rewards.process import RewardProcess

    if job.reward is None:
        return ""
    process = RewardProcess(job.reward)
    try:
        needs = process.needs()
    finally:
        process.close()
    _check_columns(job, needs)
    return ""


def _check_columns(job: JobConfig, needs: AbstractSet[str]) -> None:
    """`needs`: of the reward function. Raises ConfigError: the job names no column for one of them."""
    assert job.data is not None and job.reward is not None
    name = job.reward.function
    why = f"reward {name} " + ("compares with it" if name in {*BUILT_IN, "math_verify"} else "needs it")
    given = {"answer": job.data.answer is not None, "metadata": bool(job.data.metadata)}
    problems = [f"data.{n}: {why}: name the column" for n, is_given in given.items() if n in needs and not is_given]
    if problems:
        raise ConfigError(problems)


def _check_environment(job: JobConfig) -> str:
    from rolecall.rl_runtime.tasks.environment_task import EnvironmentTask

    if job.environment is not None:
        try:
            task = EnvironmentTask(job)
        except ConfigError:
            return ""  # the data's own check says so
        task.check_environment()
    return ""


def _check_model(job: JobConfig) -> str:
    config = _model_config(job)
    vocabulary(job.model, None if job.data else job.task.name)
    from rolecall.rl_runtime.rollout.engine import import_vllm

    import_vllm()
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    _check_dtype(job.model.dtype, current_platform)
    supported = ModelRegistry.get_supported_archs()
    names = config.get("architectures") or []
    if not any(name in supported for name in names):
        what = f"vLLM has no {', '.join(names)}" if names else "config.json names no architecture"
        raise ConfigError([f"model.path: {what}"], job.model.path or "")
    longest = config.get("max_position_embeddings")
    if longest is not None and job.max_tokens > longest:
        lengths = f"prompt and response have up to {job.max_tokens} tokens"
        raise ConfigError([f"data: {lengths}, and the model reads {longest}"], job.model.path or "")
    return ""


def _check_dtype(name: str, platform: Any) -> None:
    """`platform`: vLLM's `current_platform`."""
    from rolecall.rl_runtime.weights.digest import DTYPES

    if DTYPES[name] not in platform.supported_dtypes:
        raise ConfigError([f"model.dtype: vLLM has no {name} on this machine ({platform.device_type})"])
    try:
        platform.check_if_supports_dtype(DTYPES[name])
    except NotImplementedError:
        pass  # a CPU has no more to say
    except ValueError as e:
        raise ConfigError([f"model.dtype: {e}"]) from e


def _check_layers(job: JobConfig) -> str:
    """Adapters and gradient checkpointing, on the model without its weights."""
    if job.lora is None and not job.model.gradient_checkpointing:
        return ""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rolecall.rl_runtime.model_layers import add_layers

    try:
        config = AutoConfig.from_pretrained(str(job.model.path), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ConfigError([f"model.path: {e}"], job.model.path or "") from e
    add_layers(model, job.model, job.lora, job.seed)
    return ""


def _check_memory(job: JobConfig, available: int) -> str:
    num = _num_parameters(Path(job.model.path or ""))
    algorithm, roles, dtype = job.algorithm, job.roles, job.model.dtype
    weight = WEIGHT_BYTES[dtype]
    network = TRAINED_BYTES[dtype] if job.lora is None else FROZEN_COPIES * weight
    trainer = network * (1 + algorithm.has_critic) + weight * (algorithm.kl_coefficient > 0)
    rollouts = roles.rollout + job.runtime.standbys
    if algorithm.num_updates > 1:
        trainer += (DRAFT_BYTES[dtype] if job.lora is None else 2 * weight) * (1 + algorithm.has_critic)
    needed = roles.trainer * (num * trainer + PROCESS_BYTES)
    needed += rollouts * (num * weight + job.runtime.kv_cache_bytes + PROCESS_BYTES)
    if needed > available:
        what = f"{roles.trainer} trainers and {rollouts} engines of {num / 1e6:.0f} M parameters"
        raise ConfigError([f"roles: {what} need about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} are free"])
    return ""


def _model_config(job: JobConfig) -> dict[str, Any]:
    path = Path(job.model.path or "") / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError([f"model.path: {e}"], str(path)) from e
    return config


def _num_parameters(folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    num = 0
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(["model.path: no .safetensors file"], str(folder))
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 it is no mapping
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    num += size
        except (OSError, SafetensorError) as e:
            raise ConfigError([f"model.path: {file.name}: {e}"], str(folder)) from e
    return num


def main() -> int:
    problems, (fingerprint, held_out) = problems_of(parse_job(json.load(sys.stdin)))
    found = {"problems": problems, "fingerprint": fingerprint, "held_out_fingerprint": held_out}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
