"""MIG instances: partitions of one GPU, each with its own memory, processes and activity.

With MIG enabled (A100 and later) NVML reports no utilization for the whole GPU. Memory and processes belong to the MIG
device (a compute instance); activity (GPM, Hopper and later) belongs to the GPU instance and is copied to each of its
compute instances. Instances come and go while the agent runs: one that does not respond is left out until the next
poll."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.agent.collectors.gpu.nvml import UNSUPPORTED, Handle, code_of, errors_of
from rolecall.agent.collectors.gpu.queries import GpmSampler, Key, Numbers, memory_v1
from rolecall.core.metrics.gpu import MIG_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue

POLL_SECONDS = 5.0
"""Between two polls of a GPU's instances: eight GPUs may have 56."""
INSTANCES_MAX = 16
"""Per GPU, to bound the labels: current GPUs have up to 7 GPU instances and 8 compute instances."""
_PROFILE = re.compile(r" MIG (?:\d{1,2}c\.)?(\d{1,2}g\.\d{1,4}gb(?:\+\w{1,12})*)")
"""At the end of a MIG device's name: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`; a compute instance that is only part of its
GPU instance has its share as a prefix (`1c.3g.40gb`)."""

_METRICS: dict[str, Metric] = {m.name.removeprefix("rolecall_gpu_instance_"): m for m in MIG_METRICS}
PER_INSTANCE = frozenset((name,) for name in _METRICS if name not in ("info", "processes"))
"""Keys reported per instance; dcgm-exporter's page then omits those of the GPU, to count nothing twice."""


@dataclass(slots=True)
class Instance:
    """One MIG device."""

    gpu_instance: int
    compute_instance: int
    uuid: str
    profile: str  # `1g.10gb`, or empty
    handle: Handle = None
    numbers: Numbers = field(default_factory=dict)


@dataclass(slots=True)
class MigInstances:
    """Of one GPU."""

    instances: list[Instance] = field(default_factory=list)
    gpms: dict[int, GpmSampler | None] = field(default_factory=dict)  # by GPU instance; None: not supported
    due_at: float = float("-inf")
    unsupported: set[str] = field(default_factory=set)

    def poll(self, nvml: Any, gpu: Handle, at: float, *, enabled: bool) -> None:
        """Leaves out an instance that fails; the GPU is unaffected, because its own calls detect its loss."""
        if not enabled:
            self.forget()
            return
        if at < self.due_at:
            return
        self.due_at = at + POLL_SECONDS
        self.instances = list(_found(nvml, gpu))
        for gone in self.gpms.keys() - {i.gpu_instance for i in self.instances}:
            self._close(gone)
        activity: dict[int, Numbers] = {}
        for instance in self.instances:
            if instance.gpu_instance not in activity:
                activity[instance.gpu_instance] = self._activity(nvml, gpu, instance.gpu_instance, at)
            instance.numbers = self._asked(nvml, instance) | activity[instance.gpu_instance]

    def forget(self) -> None:
        """MIG was disabled, or the GPU is lost."""
        for gpu_instance in list(self.gpms):
            self._close(gpu_instance)
        self.instances, self.due_at = [], float("-inf")
        self.unsupported.clear()

    def values(self, node: str, gpu: int) -> Iterator[MetricValue]:
        for instance in self.instances:
            labels = node, str(gpu), str(instance.gpu_instance), str(instance.compute_instance)
            yield MetricValue(_METRICS["info"], (*labels, instance.uuid, instance.profile), 1.0)
            for key, number in instance.numbers.items():
                yield MetricValue(_METRICS[key[0]], labels, number)

    def _asked(self, nvml: Any, instance: Instance) -> Numbers:
        numbers: Numbers = {}
        for name, read in _CALLS.items():
            if name in self.unsupported:
                continue
            try:
                numbers |= read(nvml, instance.handle)
            except errors_of(nvml) as e:
                if code_of(e) in UNSUPPORTED:
                    self.unsupported.add(name)
        return numbers

    def _activity(self, nvml: Any, gpu: Handle, gpu_instance: int, at: float) -> Numbers:
        try:
            if gpu_instance not in self.gpms:
                found = GpmSampler(nvml, gpu, gpu_instance)
                self.gpms[gpu_instance] = found if found.supported else None
            gpm = self.gpms[gpu_instance]
            numbers: Mapping[Key, float] = gpm.sample(at) if gpm is not None else {}
        except errors_of(nvml) as e:
            if code_of(e) in UNSUPPORTED:
                self._close(gpu_instance)
                self.gpms[gpu_instance] = None
            return {}
        return {key: number for key, number in numbers.items() if key[0] in _METRICS}

    def _close(self, gpu_instance: int) -> None:
        gpm = self.gpms.pop(gpu_instance, None)
        if gpm is not None:
            gpm.close()


def _found(nvml: Any, gpu: Handle) -> Iterator[Instance]:
    """Existing instances; indices below the maximum may be unused."""
    try:
        count = min(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), INSTANCES_MAX)
    except errors_of(nvml):
        return
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            yield Instance(
                gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(handle),
                compute_instance=nvml.nvmlDeviceGetComputeInstanceId(handle),
                uuid=nvml.nvmlDeviceGetUUID(handle),
                profile=profile_of(nvml.nvmlDeviceGetName(handle)),
                handle=handle,
            )
        except errors_of(nvml):
            continue  # unused index, or removed during the query


def profile_of(name: str) -> str:
    """Profile of the GPU instance: `3g.40gb` of `.. MIG 1c.3g.40gb`."""
    found = _PROFILE.search(name)
    return found[1] if found else ""


def _processes(nvml: Any, device: Handle) -> Numbers:
    return {("processes",): float(len(nvml.nvmlDeviceGetComputeRunningProcesses(device)))}


_CALLS = {"nvmlDeviceGetMemoryInfo": memory_v1, "nvmlDeviceGetComputeRunningProcesses": _processes}
