"""Checks a job before anything starts: memory, and with a model folder data, tokenizer, reward function and model.

In a process of its own (`python -m rolecall.rl_runtime.tasks.check`), because transformers and vLLM are slow to import
and stay in memory.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.gpu.nvml import close_nvml, errors_of, open_nvml
from rolecall.core.config.job import DeviceName, JobConfig, parse_job, unshared_heads
from rolecall.core.errors import ConfigError, EnvironmentFailed, RewardFailed
from rolecall.rl_runtime.device import Hardware, device_of, found_hardware
from rolecall.rl_runtime.memory_estimate import (
    FreeMemory,
    GpuMemory,
    ModelSize,
    built_in_size,
    folder_size,
    shortages,
)
from rolecall.rl_runtime.model_folder import check_weights, read_config, weight_shapes
from rolecall.rl_runtime.tasks.rewards.functions import BUILT_IN
from rolecall.rl_runtime.tasks.tokenizer import local_vocabulary, vocabulary

CHECK_SECONDS = 300.0
ROWS_CHECKED = 256
NVML_SECONDS = 30.0
"""Without the persistence daemon a node with eight GPUs takes some ten seconds; with a lost GPU NVML hangs."""
HELD_OUT_REQUESTS_MAX, HELD_OUT_TOKENS_MAX = 2048, 2_000_000
"""Of one evaluation: half of what one engine holds at most (`token_buffer.py`), since one may have to hold all."""


def checked(job: JobConfig, seconds: float = CHECK_SECONDS) -> JobConfig:
    """The job with its dataset's fingerprint; unchanged for a built-in task. Of the built-in model only the memory is
    checked.

    Raises:
        ConfigError: all problems, each `path: reason`, or the check took more than `seconds`.
    """
    _check_loggers(job)
    if job.model.path is None:
        _check_evaluation_size(job)
        _check_machine(job)
        return job
    argv = [sys.executable, "-m", "rolecall.rl_runtime.tasks.check"]
    try:
        done = subprocess.run(
            argv, input=job.model_dump_json().encode(), capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        because = f"the check of data, reward and model took more than {seconds:g} s: are their files on a slow disk?"
        raise ConfigError([f"data: {because}"]) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
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
        fingerprints = _collected("data", lambda: _check_data(job), problems)
        _collected("reward", lambda: _check_reward(job), problems)
        _collected("environment", lambda: _check_environment(job), problems)
    else:
        _collected("evaluation", lambda: _check_evaluation_size(job), problems)
    _collected("model", lambda: _check_model(job), problems)
    _collected("model", lambda: _check_lengths(job), problems)
    _collected("model", lambda: _check_layers(job), problems)
    _collected("runtime", lambda: _check_heads(job), problems)
    _collected("roles", lambda: _check_machine(job), problems)
    return list(dict.fromkeys(problems)), fingerprints or ("", "")


T = TypeVar("T")


def _collected(section: str, check: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return check()
    except ConfigError as e:
        problems += [f"{p} ({e.source})" if e.source else p for p in e.problems]
    except RewardFailed as e:
        setting = "environment.factory" if isinstance(e, EnvironmentFailed) else "reward.function"
        problems.append(f"{setting}: {e.because}")
    except Exception as e:  # noqa: BLE001 deliberate: a library may raise anything for a file of the user's
        problems.append(f"{section}: {type(e).__name__}: {e}")
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
    config = read_config(Path(job.model.path or ""))
    vocabulary(job.model, None if job.data else job.task.name)
    from rolecall.rl_runtime.rollout.engine import import_vllm

    import_vllm()
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    _check_dtype(job.model.dtype, current_platform)
    supported = ModelRegistry.get_supported_archs()
    names = _architectures(config, job.model.path or "")
    if not any(name in supported for name in names):
        what = f"vLLM has no {', '.join(names)}" if names else "config.json names no architecture"
        raise ConfigError([f"model.path: {what}"], job.model.path or "")
    return ""


def _check_lengths(job: JobConfig) -> str:
    longest = read_config(Path(job.model.path or "")).get("max_position_embeddings")
    if longest is not None and job.max_tokens > longest:
        lengths = f"prompt and response have up to {job.max_tokens} tokens"
        raise ConfigError([f"data: {lengths}, and the model reads {longest}"], job.model.path or "")
    return ""


def _architectures(config: dict[str, Any], folder: str) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ConfigError([f"model.path: config.json: architectures is no list: {names!r:.80}"], folder)
    return names


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
    """The model without its weights: whether the files have them all, adapters and gradient checkpointing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rolecall.rl_runtime.model_layers import add_layers
    from rolecall.rl_runtime.tensor_parallel import tensor_plan

    folder = Path(job.model.path or "")
    read_config(folder)  # a folder without one is the same problem as elsewhere, in the same words
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ConfigError([f"model.path: {e}"], str(folder)) from e
    _check_weights(model, weight_shapes(folder), folder)
    if job.lora is not None or job.model.gradient_checkpointing:
        add_layers(model, job.model, job.lora, job.seed)
    if job.runtime.trainer_tensor_ranks > 1:
        tensor_plan(model.base_model, job.runtime.trainer_tensor_ranks)
    return ""


def _check_weights(model: Any, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """`model`: on no device. `shapes`: of the files' tensors.

    Names that the model does not have may be converted to others when it is loaded. What is missing is known only then.
    """
    names = dict[int, list[str]]()  # of one parameter: tied ones have several
    mismatched = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if shapes.get(name, tuple(parameter.shape)) != tuple(parameter.shape):
            mismatched.append(name)
    own = [name for same in names.values() for name in same]
    may_lack = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = [
        same[0]
        for same in names.values()
        if not any(name in shapes or any(p.search(name) for p in may_lack) for name in same)
    ]
    check_weights(missing if shapes.keys() <= {*own} else (), mismatched, folder)


def _check_heads(job: JobConfig) -> str:
    config = read_config(Path(job.model.path or ""))
    text = config.get("text_config") or config
    runtime = job.runtime
    heads = int(text.get("num_attention_heads") or math.lcm(runtime.rollout_ranks, runtime.trainer_tensor_ranks))
    if problems := unshared_heads(heads, int(text.get("num_key_value_heads") or heads), runtime):
        raise ConfigError(problems)
    return ""


def model_size(job: JobConfig) -> ModelSize:
    """Of the job's model, from its files. Raises ConfigError: they cannot be read, or its ranks cannot share heads."""
    if job.model.path is None:
        return built_in_size(job.model, local_vocabulary(job.task.name).size)
    _check_heads(job)
    folder = Path(job.model.path)
    return folder_size(weight_shapes(folder), read_config(folder), job.lora)


def _check_machine(job: JobConfig) -> str:
    hardware = found_hardware()
    device = device_of(job.runtime.device, hardware)
    return _check_memory(job, free_memory(device, hardware), device)


def _check_memory(job: JobConfig, free: FreeMemory, device: DeviceName = "cpu") -> str:
    if problems := shortages(job, model_size(job), free, device):
        raise ConfigError(problems)
    return ""


def free_memory(device: DeviceName, hardware: Hardware) -> FreeMemory:
    """Of this machine, and of the GPUs that a run may use if NVML knows them."""
    gpus: tuple[GpuMemory, ...] = ()
    if device == "cuda":
        with suppress(ConfigError):  # a container may have no NVML, and compute on its GPUs
            found = gpu_memory()
            names = [int(name) for name in hardware.gpus if name.isdecimal()]
            gpus = tuple(found[n] for n in names if n < len(found)) or found
    return FreeMemory(host_bytes=available_bytes(), gpus=gpus)


def gpu_memory(library: Path | None = None, seconds: float = NVML_SECONDS) -> tuple[GpuMemory, ...]:
    """Of each GPU. `library`: of NVML, where the loader does not find it.

    Raises:
        ConfigError: NVML cannot be used, or does not answer within `seconds`.
    """
    found, problems = list[GpuMemory](), list[str]()

    def ask() -> None:
        try:
            nvml = open_nvml(library)
        except CollectorUnavailable as e:
            problems.append(str(e))
            return
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
                found.append(GpuMemory(free_bytes=int(memory.free), total_bytes=int(memory.total)))
        except errors_of(nvml) as e:
            problems.append(str(e))
        finally:
            close_nvml(nvml)

    thread = threading.Thread(target=ask, name="check-nvml", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        problems.append(f"NVML gives no answer within {seconds:g} s")
    if problems:
        raise ConfigError([f"runtime.device: {problems[0]}"])
    return tuple(found)


def available_bytes(
    machine: Callable[[], int] = lambda: psutil.virtual_memory().available,
    own: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Memory that this process and its children can still have: the machine's, within the limits of its control group.

    Files that a group has read count as used there, and are given back when memory is short: those not in use are free.
    """
    found = [machine()]
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                base, names = root, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                base = root / "memory"
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            folder = base / path.lstrip("/")
            # In a container the group is the root of what is mounted, whatever its path is called.
            groups = [group for group in (folder, *folder.parents) if group.is_relative_to(base)]
            found += [free for group in groups for free in _free_of(group, *names)]
    return max(0, min(found))


def _free_of(group: Path, limit: str, used: str, files: str) -> list[int]:
    """Empty: the group has no limit."""
    try:
        free = int((group / limit).read_text()) - int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [free + int(stat.get(files, 0))]
    except (OSError, ValueError):  # `max`, or there is no such group
        return []


def main() -> int:
    problems, (fingerprint, held_out) = problems_of(parse_job(json.load(sys.stdin)))
    found = {"problems": problems, "fingerprint": fingerprint, "held_out_fingerprint": held_out}
    print(f"\n{json.dumps(found)}", flush=True)  # a line of the user's code may be unfinished
    return 0


if __name__ == "__main__":
    sys.exit(main())
