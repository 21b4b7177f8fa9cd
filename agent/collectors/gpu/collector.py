"""GPUs through NVML: numbers at each poll, and facts when a GPU is lost, recovers or reports a fault.

Calls degrade one by one (`queries.py`). A GPU on which no call succeeds yields one fact, GPU_LOST, then nothing until
it recovers; the other GPUs are unaffected. `events.py` reports XIDs and, where the driver sends an event for it,
changes of the recovery action.

One thread uses a collector. NVML may block in any call on a faulty GPU: `current_device` names that GPU.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.gpu import dcgm
from rolecall.agent.collectors.gpu.faults import Conditions
from rolecall.agent.collectors.gpu.mig import PER_INSTANCE, Instance, MigInstances
from rolecall.agent.collectors.gpu.nvml import GpuId, close_nvml, identify, open_nvml
from rolecall.agent.collectors.gpu.queries import PROCESSES, GpuLostError, GpuPoller, GpuQueryState, Key, Numbers
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.xid.xid import RecoveryAction, xid

logger = logging.getLogger(__name__)

LOST_RETRY_SECONDS = 5.0
"""Between two retries of a lost GPU: each may block in the driver."""
NONZERO_ONLY = frozenset({"nvlink_down", "recovery_action"})
"""Metrics exported only when not 0."""

_METRICS: dict[str, Metric] = {m.name.removeprefix("rolecall_gpu_"): m for m in GPU_METRICS}


@dataclass(slots=True)
class _GpuState:
    """State of one GPU."""

    id: GpuId
    query: GpuQueryState
    lost: str = ""
    retry_at: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    mig: MigInstances = field(default_factory=MigInstances)
    shown: dict[str, tuple[Numbers, tuple[MetricValue, ...]]] = field(default_factory=dict)
    """By call, as `query.parts`: its result and the metric values made from it; most are unchanged at the next poll."""
    series: dict[Key, tuple[Metric, tuple[str, ...]]] = field(default_factory=dict)


class GpuCollector:
    """`last_xid(gpu index)` fills DCGM_FI_DEV_XID_ERRORS. `reported_action(gpu index)`: the recovery action already
    reported as a fact. `GpuEventsCollector` provides both."""

    name = "gpu"

    def __init__(
        self,
        node: NodeId,
        *,
        library: Path | None = None,
        interval_seconds: float = 1.0,
        slow_seconds: float = 10.0,
        last_xid: Callable[[int], int] = lambda index: 0,
        reported_action: Callable[[int], RecoveryAction] = lambda index: RecoveryAction.NONE,
        dcgm_lines: bool = True,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._dcgm_lines = dcgm_lines
        self.current_device = ""
        self._node, self._library, self._slow_seconds = node, library, slow_seconds
        self._last_xid, self._reported_action = last_xid, reported_action
        self._nvml: Any = None
        self._poller: GpuPoller | None = None
        self._gpus: list[_GpuState] = []
        self._driver = ""
        self._logged = LoggedOnce()

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """All GPUs found, including lost ones."""
        return tuple(g.id for g in self._gpus)

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: no NVML, no driver, or the driver was unloaded; the text says which."""
        facts: list[Fact] = []
        try:
            if self._poller is None:
                self._poller, facts = self._open(at)
            for gpu in self._gpus:
                self.current_device = f"GPU {gpu.id.index}"
                facts += self._poll(gpu, self._poller, at)
            self.current_device = ""
        except CollectorUnavailable:
            self.close()
            raise
        shown = [gpu for gpu in self._gpus if not gpu.lost] if self._dcgm_lines else []
        pages = [page for gpu in shown for page in self._dcgm_pages(gpu)]
        return CollectorReading(
            values=tuple(v for gpu in self._gpus for v in self._values(gpu)),
            facts=tuple(facts),
            dcgm=lambda: dcgm.render(make() for make in pages),
            # A missing entry means unknown, an empty one means unused.
            gpu_pids={gpu.id.index: gpu.query.pids for gpu in self._gpus if PROCESSES in gpu.query.parts},
        )

    def close(self) -> None:
        if self._nvml is None:
            return
        for gpu in self._gpus:
            gpu.query.close()
            gpu.mig.forget()
        close_nvml(self._nvml)
        self._nvml = self._poller = None

    def _open(self, at: float) -> tuple[GpuPoller, list[Fact]]:
        self._nvml = nvml = open_nvml(self._library)
        before = [g.id for g in self._gpus]
        try:
            count = nvml.nvmlDeviceGetCount()
            self._driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError as e:
            raise CollectorUnavailable(f"NVML cannot list the GPUs: {e}") from None
        self._gpus = [_GpuState(GpuId(index=i), GpuQueryState(i)) for i in range(count)]
        facts = []
        for gpu in self._gpus:
            self.current_device = f"GPU {gpu.id.index}"
            try:
                self._find(gpu)
            except nvml.NVMLError as e:  # it fell off the bus before the agent started
                facts.append(self._lose(gpu, at, str(e)))
        found = {g.id.uuid for g in self._gpus}
        for gone in before:  # the driver was reloaded and no longer lists it
            if gone.uuid and gone.uuid not in found:
                facts.append(_lost_fact(gone, "the driver no longer lists it"))
        return GpuPoller(nvml, self._logged, num_gpus=count, slow_seconds=self._slow_seconds), facts

    def _find(self, gpu: _GpuState) -> None:
        """Sets handle and identity. By UUID once known: indices shift when a lower-numbered GPU disappears.

        Raises:
            NVMLError: the GPU does not respond.
        """
        nvml = self._nvml
        if gpu.id.uuid:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.id.uuid)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu.id.index)
        gpu.query.handle = handle
        gpu.id = identify(nvml, gpu.id.index, handle)

    def _poll(self, gpu: _GpuState, poller: GpuPoller, at: float) -> Iterable[Fact]:
        was_lost = gpu.lost
        if was_lost:
            if at < gpu.retry_at:
                return
            gpu.retry_at = at + LOST_RETRY_SECONDS
            try:
                self._find(gpu)
            except self._nvml.NVMLError:
                return
        try:
            poller.poll(gpu.query, at)
        except GpuLostError as error:
            gpu.query.forget()
            gpu.mig.forget()
            if not was_lost:
                yield self._lose(gpu, at, str(error))
            return
        if was_lost:
            gpu.lost = ""
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)
        mig_enabled = bool(gpu.query.parts.get("nvmlDeviceGetMigMode", {}).get(("mig_enabled",)))
        gpu.mig.poll(self._nvml, gpu.query.handle, at, enabled=mig_enabled)
        found, recovered = gpu.conditions.update(self._changed(gpu))
        for fault in found:
            if fault.get("action") == self._reported_action(gpu.id.index):
                continue
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **fault})
        if recovered:
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)

    def _lose(self, gpu: _GpuState, at: float, reason: str) -> Fact:
        gpu.lost, gpu.retry_at = reason, at + LOST_RETRY_SECONDS
        gpu.conditions = Conditions()
        logger.error("GPU %d %s is lost: %s", gpu.id.index, gpu.id.uuid, reason)
        return _lost_fact(gpu.id, reason)

    def _changed(self, gpu: _GpuState) -> Numbers:
        """Numbers of the calls whose result changed since the last poll; updates their cached values."""
        changed: Numbers = {}
        for call, numbers in gpu.query.parts.items():
            if call not in gpu.shown or gpu.shown[call][0] is not numbers:
                shown = (self._value(gpu, k, n) for k, n in numbers.items() if n or k[0] not in NONZERO_ONLY)
                gpu.shown[call] = numbers, tuple(shown)
                changed |= numbers
        return changed

    def _values(self, gpu: _GpuState) -> list[MetricValue]:
        values = [self._value(gpu, ("up",), float(not gpu.lost))]
        if gpu.id.uuid:
            values.append(self._value(gpu, ("info", gpu.id.uuid, gpu.id.name, self._driver), 1.0))
        values.append(self._value(gpu, ("calls_unsupported",), len(gpu.query.unsupported)))
        for error, count in gpu.query.errors.items():
            values.append(self._value(gpu, ("call_errors_total", error), count))
        for call in gpu.query.parts:
            values += gpu.shown[call][1]
        values += gpu.mig.values(self._node, gpu.id.index)
        return values

    def _value(self, gpu: _GpuState, key: Key, number: float) -> MetricValue:
        series = gpu.series.get(key)
        if series is None:
            series = gpu.series[key] = (_METRICS[key[0]], (self._node, str(gpu.id.index), *key[1:]))
        return MetricValue(*series, number)

    def _dcgm_pages(self, gpu: _GpuState) -> Iterable[Callable[[], dcgm.GpuNumbers]]:
        """Of the GPU and of its MIG instances (dcgm-exporter has one series per GPU instance), rendered on demand: most
        polls are never requested."""
        labels = partial(dcgm.label_text, gpu.id, self._node, self._driver)
        parts, last = tuple(gpu.query.parts.values()), self._last_xid(gpu.id.index)
        by_instance = PER_INSTANCE if gpu.mig.instances else ()

        def whole() -> dcgm.GpuNumbers:
            numbers = {key: number for part in parts for key, number in part.items() if key not in by_instance}
            return dcgm.GpuNumbers(labels(), numbers, last, xid(last).meaning if last else "")

        def of_instance(i: Instance, numbers: Numbers) -> dcgm.GpuNumbers:
            return dcgm.GpuNumbers(labels(i.profile, i.gpu_instance), numbers, None)

        yield whole
        first = {i.gpu_instance: i for i in reversed(gpu.mig.instances)}
        for _, i in sorted(first.items()):
            yield partial(of_instance, i, i.numbers)


def _lost_fact(gpu: GpuId, reason: str) -> Fact:
    return Fact(kind=AgentEventKind.GPU_LOST, detail={**gpu.detail, "reason": reason})
