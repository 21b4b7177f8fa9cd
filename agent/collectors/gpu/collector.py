"""GPUs through NVML: numbers at each look, and facts when a GPU is lost, comes back or tells of a fault.

Calls degrade one by one (`queries.py`). A GPU on which no call succeeds is one fact, GPU_LOST, then silence until it is back;
the other GPUs go on. XIDs, and changes of the recovery action where the driver tells of them, become facts in
`events.py`, as they happen.

One thread uses a collector. NVML may block in any call when a GPU is sick: `looking_at` says on which one.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.gpu import dcgm
from rolecall.agent.collectors.gpu.faults import Conditions
from rolecall.agent.collectors.gpu.mig import PER_INSTANCE, Instance, MigInstances
from rolecall.agent.collectors.gpu.nvml import Handle, close_nvml, open_nvml
from rolecall.agent.collectors.gpu.nvml_calls import Key, Numbers
from rolecall.agent.collectors.gpu.queries import GpuLostError, GpuPoller, GpuProcess, GpuQueryState
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.xid.xid import RecoveryAction

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
class _GpuState:
    """What is known of one GPU."""

    id: GpuId
    asked: GpuQueryState
    lost: str = ""
    retry_at: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    mig: MigInstances = field(default_factory=MigInstances)
    labels: Callable[[str, int | None], str] = dcgm.no_labels  # of dcgm-exporter; of a MIG instance by profile and id
    shown: dict[str, "_CachedCallValues"] = field(default_factory=dict)  # by call, as `asked.parts`
    series: dict[Key, tuple[Metric, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _CachedCallValues:
    """What one call gave, and the values made of it: most of them are the same at the next look."""

    numbers: Numbers
    values: tuple[MetricValue, ...]


_NOT_SHOWN = _CachedCallValues({}, ())


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
    action that was told of already. `GpuEventsCollector` has the first and the last."""

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
        self._asker: GpuPoller | None = None
        self._gpus: list[_GpuState] = []
        self._driver = ""
        self._said = LoggedOnce()

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Those found, lost ones among them."""
        return tuple(g.id for g in self._gpus)

    # --- one look

    def read(self, at: float) -> CollectorReading:
        """Raises:
        CannotRead: no NVML, no driver, or the driver went away: which.
        """
        try:
            facts = self._look_at_all(at)
        except CollectorUnavailable:
            self.close()
            raise
        self.processes = {g.id.index: g.asked.processes for g in self._gpus if not g.lost}
        shown = [gpu for gpu in self._gpus if not gpu.lost] if self._dcgm_lines else []
        pages = [page for gpu in shown for page in (self._dcgm_page(gpu), *self._dcgm_instances(gpu))]
        return CollectorReading(
            values=tuple(v for gpu in self._gpus for v in self._values(gpu)),
            facts=tuple(facts),
            dcgm=lambda: dcgm.render(make() for make in pages),
            gpu_pids={  # where nobody tells, nobody knows, which is not the same as nobody
                gpu.id.index: tuple(p.pid for p in gpu.asked.processes)
                for gpu in self._gpus
                if gpu.asked.tells_processes
            },
        )

    def close(self) -> None:
        if self._nvml is None:
            return
        for gpu in self._gpus:
            gpu.asked.close()
            gpu.mig.forget()
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

    def _open(self, at: float) -> tuple[GpuPoller, list[Fact]]:
        self._nvml = nvml = open_nvml(self._library)
        before = [g.id for g in self._gpus]
        try:
            count = nvml.nvmlDeviceGetCount()
            self._driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError as e:
            raise CollectorUnavailable(f"NVML does not say which GPUs there are: {e}") from None
        self._gpus = [_GpuState(GpuId(index=i), GpuQueryState(i)) for i in range(count)]
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
        return GpuPoller(nvml, self._said, num_gpus=count, slow_seconds=self._slow_seconds), facts

    def _find(self, gpu: _GpuState) -> None:
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
        gpu.labels = partial(
            dcgm.label_text,
            gpu=gpu.id.index,
            uuid=gpu.id.uuid,
            pci_bus_id=gpu.id.pci_bus_id,
            minor=gpu.id.minor,
            model=gpu.id.name,
            hostname=self._node,
            driver=self._driver,
        )

    def _look(self, gpu: _GpuState, asker: GpuPoller, at: float) -> Iterable[Fact]:
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
        except GpuLostError as e:
            gpu.asked.forget()
            gpu.mig.forget()
            if not was_lost:
                yield self._lose(gpu, at, str(e))
            return
        if was_lost:
            gpu.lost = ""
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)
        is_cut = bool(gpu.asked.parts.get("nvmlDeviceGetMigMode", {}).get(("mig_enabled",)))
        gpu.mig.look(self._nvml, gpu.asked.handle, at, enabled=is_cut)
        found, is_well_again = gpu.conditions.update(self._changed(gpu))
        for fault in found:
            if fault.get("action") == self._action_told(gpu.id.index):
                continue
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **fault})
        if is_well_again:
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)

    def _lose(self, gpu: _GpuState, at: float, reason: str) -> Fact:
        gpu.lost, gpu.retry_at = reason, at + LOST_RETRY_SECONDS
        gpu.conditions = Conditions()
        logger.error("GPU %d %s is lost: %s", gpu.id.index, gpu.id.uuid, reason)
        return _lost_fact(gpu.id, reason)

    # --- what was found, as values and lines

    def _changed(self, gpu: _GpuState) -> Numbers:
        """Of those calls that did not give the same as at the look before; their values are made anew."""
        changed: Numbers = {}
        for call, numbers in gpu.asked.parts.items():
            if gpu.shown.get(call, _NOT_SHOWN).numbers is not numbers:
                shown = (self._value(gpu, k, n) for k, n in numbers.items() if n or k[0] not in ONLY_NOT_ZERO)
                gpu.shown[call] = _CachedCallValues(numbers, tuple(shown))
                changed |= numbers
        return changed

    def _values(self, gpu: _GpuState) -> list[MetricValue]:
        values = [self._value(gpu, ("up",), float(not gpu.lost))]
        if gpu.id.uuid:
            values.append(self._value(gpu, ("info", gpu.id.uuid, gpu.id.name, self._driver), 1.0))
        values.append(self._value(gpu, ("calls_unsupported",), len(gpu.asked.unsupported)))
        for error, count in gpu.asked.errors.items():
            values.append(self._value(gpu, ("call_errors_total", error), count))
        for call in gpu.asked.parts:
            values += gpu.shown[call].values
        values += gpu.mig.values(self._node, gpu.id.index)
        return values

    def _value(self, gpu: _GpuState, key: Key, number: float) -> MetricValue:
        series = gpu.series.get(key)
        if series is None:
            series = gpu.series[key] = (_METRICS[key[0]], (self._node, str(gpu.id.index), *key[1:]))
        return MetricValue(*series, number)

    def _dcgm_page(self, gpu: _GpuState) -> Callable[[], dcgm.GpuNumbers]:
        """Makes what stands on the page of this look, should somebody ask for it."""
        labels, parts, xid = gpu.labels, tuple(gpu.asked.parts.values()), self._last_xid(gpu.id.index)
        by_instance = PER_INSTANCE if gpu.mig.instances else ()

        def make() -> dcgm.GpuNumbers:
            numbers = {key: number for part in parts for key, number in part.items() if key not in by_instance}
            return dcgm.GpuNumbers(labels("", None), numbers, xid, self._xid_text(xid) if xid else "")

        return make

    def _dcgm_instances(self, gpu: _GpuState) -> Iterable[Callable[[], dcgm.GpuNumbers]]:
        """Those of its MIG instances. dcgm-exporter has one series for each GPU instance."""
        first = {i.gpu_instance: i for i in reversed(gpu.mig.instances)}
        for i in sorted(first.values(), key=lambda i: i.gpu_instance):
            yield partial(_dcgm_instance, gpu.labels, i, i.numbers)


def _dcgm_instance(labels: Callable[[str, int | None], str], i: Instance, numbers: Numbers) -> dcgm.GpuNumbers:
    return dcgm.GpuNumbers(labels(i.profile, i.gpu_instance), numbers, None)


def _lost_fact(gpu: GpuId, reason: str) -> Fact:
    return Fact(kind=AgentEventKind.GPU_LOST, detail={**gpu.detail, "reason": reason})
