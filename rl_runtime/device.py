"""The device that the ranks of trainers and engines compute on: the job's setting, or what the machine has.

GPUs are resources of Ray's nodes. The first node has none, because controller and reward workers compute on the CPU;
the others share the machine's GPUs equally, so that each of them can take any replica. A replica is one actor that
requests a GPU for each of its ranks: Ray gives it that many of one node and shows it no others, and rank k takes the
k-th.

Without torch: the supervisor decides.
"""

import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Final

from rolecall.core.config.job import DeviceName, JobConfig, RuntimeConfig
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.text import counted

VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
BACKENDS: Final[Mapping[DeviceName, str]] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Process-group backends of the ranks of one replica: on GPUs NCCL for tensors, gloo for what the ranks tell each
other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpus: tuple[str, ...]  # of this machine, as CUDA_VISIBLE_DEVICES names them
    is_cuda_build: bool  # the installed torch


def found_hardware(*, dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> Hardware:
    """`environ`: may limit this process to some of the GPUs (CUDA_VISIBLE_DEVICES)."""
    gpus = tuple(str(n) for n in range(sum(p.name[len("nvidia") :].isdecimal() for p in dev.glob("nvidia[0-9]*"))))
    if gpus and VISIBLE_DEVICES in environ:
        # CUDA ignores what follows an invalid entry.
        gpus = tuple(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), environ[VISIBLE_DEVICES].split(",")))
    return Hardware(gpus=gpus, is_cuda_build=_is_cuda_build())


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
        )
        if not holds
    ]
    if setting == "cuda" and lacking:
        raise ConfigError([f"runtime.device: cuda, but {' and '.join(lacking)}"])
    return setting or ("cpu" if lacking else "cuda")


def gpus_of_nodes(job: JobConfig, hardware: Hardware) -> dict[NodeId, tuple[str, ...]]:
    """Each node's GPUs; without any node for a job that computes on the CPU.

    Raises:
        ConfigError: as `device_of`, or a node would have fewer GPUs than one replica has ranks.
    """
    if device_of(job.runtime.device, hardware) == "cpu":
        return {}
    num_nodes, needed = max(1, job.runtime.nodes - 1), max(job.runtime.computing_ranks().values())
    share = len(hardware.gpus) // num_nodes
    if share < needed:
        needs = f"{counted(num_nodes, 'node')} with {counted(needed, 'GPU')} each, one for each rank of a replica"
        why = (
            f"{needs} (the first node needs none); this machine has {len(hardware.gpus)}: fewer replicas need less, "
            "and `make setup DEVICE=cpu` needs none"
        )
        raise ConfigError([f"runtime.nodes: the job needs {why}"])
    first = {NodeId("node-0"): ()}
    return first | {
        NodeId(f"node-{n + 1}"): hardware.gpus[n * share : (n + 1) * share] for n in range(job.runtime.nodes - 1)
    }


def num_gpus(replica: ReplicaId, device: DeviceName, runtime: RuntimeConfig) -> int:
    """That the actor of this replica requests: one for each rank."""
    return runtime.computing_ranks().get(split_replica(replica)[0], 0) if device == "cuda" else 0
