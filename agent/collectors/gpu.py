"""GPUs through NVML: numbers at each look, and facts when a GPU is lost, comes back or tells of a fault.

Calls degrade one by one (`gpu_asking.py`). A GPU on which no call succeeds is one fact, GPU_LOST, then silence until it is back;
the other GPUs go on. XIDs, and changes of the recovery action where the driver tells of them, become facts in
`gpu_events.py`, as they happen.

One thread uses a collector. NVML may block in any call when a GPU is sick: `looking_at` says on which one.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.agent import dcgm
from rolecall.agent.collectors.collector import CannotRead, Fact, Reading, SaidOnce
from rolecall.agent.collectors.gpu_asking import Asked, Asker, GpuProcess, LostError
from rolecall.agent.collectors.gpu_calls import Key, Numbers
from rolecall.agent.collectors.gpu_faults import Conditions
from rolecall.agent.collectors.nvml import Handle, close_nvml, open_nvml
from rolecall.core.ids import NodeId
from rolecall.core.metric import Metric, MetricValue
from rolecall.core.metrics_gpu import GPU_METRICS
from rolecall.core.telemetry import AgentEventKind
from rolecall.core.xid import RecoveryAction

logger = logging.getLogger(__name__)

LOST_RETRY_SECONDS = 5.0
"""Between two tries of a lost GPU: each may block in the driver."""
ONLY_NOT_ZERO = frozenset({"nvlink_down", "recovery_action"})
"""Metrics whose zeros are not shown."""

_METRICS: dict[str, Metric] = {m.name.removeprefix("rolecall_gpu_"): m for m in GPU_METRICS}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuId:
    """`pci`: as the kernel log spells it, `0000:1a:00`; `pci_bus_id`: as NVML does. All "" or 0 where not known."""

    index: int
    uuid: str = ""
    name: str = ""
    pci: str = ""
    pci_bus_id: str = ""
    minor: int = 0

    @property
    def detail(self) -> dict[str, str]:
        return {"gpu": str(self.index), "uuid": self.uuid, "pci": self.pci}


@dataclass(slots=True)
class _Gpu:
    """What is known of one GPU."""

    id: GpuId
    asked: Asked
    lost: str = ""
    retry_at: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    labels: str = ""  # of dcgm-exporter
    series: dict[Key, tuple[Metric, tuple[str, ...]]] = field(default_factory=dict)


def identify(pynvml: Any, index: int, handle: Handle) -> GpuId:
    """Raises: NVMLError."""
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    try:
        minor = pynvml.nvmlDeviceGetMinorNumber(handle)
    except pynvml.NVMLError:
        minor = index
    return GpuId(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        pci=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
        pci_bus_id=pci.busId,
        minor=minor,
    )


def no_xid(index: int) -> int:
    """`last_xid` of a node that hears of none."""
    return 0


def no_text(xid: int) -> str:
    """`xid_text` of a node that does not decode them."""
    return ""


def no_action(index: int) -> RecoveryAction:
    """`action_told` where nobody else tells."""
    return RecoveryAction.NONE


class GpuCollector:
    """`last_xid(gpu index)` and `xid_text(xid)` fill DCGM_FI_DEV_XID_ERRORS. `action_told(gpu index)`: the recovery
    action that was told of already. `GpuEvents` has the first and the last."""

    name = "gpu"

    def __init__(
        self,
        node: NodeId,
        *,
        library: Path | None = None,
        interval_seconds: float = 1.0,
        slow_seconds: float = 10.0,
        last_xid: Callable[[int], int] = no_xid,
        xid_text: Callable[[int], str] = no_text,
        action_told: Callable[[int], RecoveryAction] = no_action,
        dcgm_lines: bool = True,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._dcgm_lines = dcgm_lines
        self.looking_at = ""
        self.processes: Mapping[int, tuple[GpuProcess, ...]] = {}
        """By GPU index, of the newest look that asked. Replaced as a whole: any thread may read it."""
        self._node, self._library, self._slow_seconds = node, library, slow_seconds
        self._last_xid, self._xid_text, self._action_told = last_xid, xid_text, action_told
        self._nvml: Any = None
        self._asker: Asker | None = None
        self._gpus: list[_Gpu] = []
        self._driver = ""
        self._said = SaidOnce()

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Those found, lost ones among them."""
        return tuple(g.id for g in self._gpus)

    # --- one look

    def read(self, at: float) -> Reading:
        """Raises:
        CannotRead: no NVML, no driver, or the driver went away: which.
        """
        try:
            facts = self._look_at_all(at)
        except CannotRead:
            self.close()
            raise
        self.processes = {g.id.index: g.asked.processes for g in self._gpus if not g.lost}
        every = [(gpu, gpu.asked.numbers()) for gpu in self._gpus]
        return Reading(
            values=tuple(v for gpu, numbers in every for v in self._values(gpu, numbers)),
            facts=tuple(facts),
            dcgm=self._dcgm_text(every) if self._dcgm_lines else "",
        )

    def close(self) -> None:
        if self._nvml is None:
            return
        for gpu in self._gpus:
            gpu.asked.close()
        close_nvml(self._nvml)
        self._nvml = self._asker = None

    def _look_at_all(self, at: float) -> list[Fact]:
        facts: list[Fact] = []
        if self._asker is None:
            self._asker, facts = self._open(at)
        for gpu in self._gpus:
            self.looking_at = f"GPU {gpu.id.index}"
            facts += self._look(gpu, self._asker, at)
        self.looking_at = ""
        return facts

    def _open(self, at: float) -> tuple[Asker, list[Fact]]:
        self._nvml = nvml = open_nvml(self._library)
        before = [g.id for g in self._gpus]
        try:
            count = nvml.nvmlDeviceGetCount()
            self._driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError as e:
            raise CannotRead(f"NVML does not say which GPUs there are: {e}") from None
        self._gpus = [_Gpu(GpuId(index=i), Asked(i)) for i in range(count)]
        facts = []
        for gpu in self._gpus:
            self.looking_at = f"GPU {gpu.id.index}"
            try:
                self._find(gpu)
            except nvml.NVMLError as e:  # it fell off the bus before we came
                facts.append(self._lose(gpu, at, str(e)))
        found = {g.id.uuid for g in self._gpus}
        for gone in before:  # the driver was loaded anew and does not see it any more
            if gone.uuid and gone.uuid not in found:
                facts.append(_lost_fact(gone, "the driver does not list it any more"))
        return Asker(nvml, self._said, num_gpus=count, slow_seconds=self._slow_seconds), facts

    def _find(self, gpu: _Gpu) -> None:
        """Handle and identity. By UUID where it is known: indices move when a GPU before it goes.

        Raises:
            NVMLError: it does not answer.
        """
        nvml = self._nvml
        if gpu.id.uuid:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.id.uuid)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu.id.index)
        gpu.asked.handle = handle
        gpu.id = identify(nvml, gpu.id.index, handle)
        gpu.labels = dcgm.label_text(
            gpu=gpu.id.index,
            uuid=gpu.id.uuid,
            pci_bus_id=gpu.id.pci_bus_id,
            minor=gpu.id.minor,
            model=gpu.id.name,
            hostname=self._node,
            driver=self._driver,
        )

    def _look(self, gpu: _Gpu, asker: Asker, at: float) -> Iterable[Fact]:
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
            asker.ask(gpu.asked, at)
        except LostError as e:
            gpu.asked.forget()
            if not was_lost:
                yield self._lose(gpu, at, str(e))
            return
        if was_lost:
            gpu.lost = ""
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)
        found, is_well_again = gpu.conditions.update(gpu.asked.numbers())
        for fault in found:
            if fault.get("action") == self._action_told(gpu.id.index):
                continue
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **fault})
        if is_well_again:
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)

    def _lose(self, gpu: _Gpu, at: float, reason: str) -> Fact:
        gpu.lost, gpu.retry_at = reason, at + LOST_RETRY_SECONDS
        gpu.conditions = Conditions()
        logger.error("GPU %d %s is lost: %s", gpu.id.index, gpu.id.uuid, reason)
        return _lost_fact(gpu.id, reason)

    # --- what was found, as values and lines

    def _values(self, gpu: _Gpu, numbers: Numbers) -> Iterator[MetricValue]:
        yield self._value(gpu, ("up",), float(not gpu.lost))
        if gpu.id.uuid:
            yield self._value(gpu, ("info", gpu.id.uuid, gpu.id.name, self._driver), 1.0)
        yield self._value(gpu, ("calls_unsupported",), len(gpu.asked.unsupported))
        for error, count in gpu.asked.errors.items():
            yield self._value(gpu, ("call_errors_total", error), count)
        for key, number in numbers.items():
            if number or key[0] not in ONLY_NOT_ZERO:
                yield self._value(gpu, key, number)

    def _value(self, gpu: _Gpu, key: Key, number: float) -> MetricValue:
        series = gpu.series.get(key)
        if series is None:
            series = gpu.series[key] = (_METRICS[key[0]], (self._node, str(gpu.id.index), *key[1:]))
        return MetricValue(*series, number)

    def _dcgm_text(self, every: Iterable[tuple[_Gpu, Numbers]]) -> str:
        return dcgm.render(self._dcgm(gpu, numbers) for gpu, numbers in every if not gpu.lost)

    def _dcgm(self, gpu: _Gpu, numbers: Numbers) -> dcgm.GpuNumbers:
        xid = self._last_xid(gpu.id.index)
        return dcgm.GpuNumbers(gpu.labels, numbers, xid, self._xid_text(xid) if xid else "")


def _lost_fact(gpu: GpuId, reason: str) -> Fact:
    return Fact(kind=AgentEventKind.GPU_LOST, detail={**gpu.detail, "reason": reason})
