"""GPUs through NVML: numbers at each look, and facts when a GPU is lost, comes back or tells of a fault.

Calls degrade one by one: what a GPU or driver does not know is skipped for that GPU from then on, and said once. Other
errors are counted and tried again. A GPU on which no call succeeds is one fact, GPU_LOST, then silence until it is back;
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
from rolecall.agent.collectors.gpm import Gpm
from rolecall.agent.collectors.gpu_calls import (
    FAST,
    FAST_FIELDS,
    LINK_FIELDS,
    NVLINK_ERRORS,
    SLOW,
    SLOW_FIELDS,
    Call,
    Key,
    Numbers,
    field_value,
)
from rolecall.agent.collectors.gpu_faults import Conditions
from rolecall.agent.collectors.nvml import (
    FIELD_UNSUPPORTED,
    GONE,
    LOST,
    UNSUPPORTED,
    Handle,
    close_nvml,
    code_of,
    error_name,
    errors_of,
    open_nvml,
)
from rolecall.core.ids import NodeId
from rolecall.core.metric import Metric, MetricValue
from rolecall.core.metrics_gpu import GPU_METRICS
from rolecall.core.telemetry import AgentEventKind
from rolecall.core.xid import RecoveryAction

logger = logging.getLogger(__name__)

LOST_RETRY_SECONDS = 5.0
"""Between two tries of a lost GPU: each may block in the driver."""
PROCESSES_MAX = 64
"""Of one GPU; a GPU shared by more shows the first ones."""
ERRORS_SUM = "nvlink_errors_total"
ERRORS_BY_LINK = "nvlink_link_errors_total"
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


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. `memory_bytes` is 0 where the driver does not say (in containers, MIG)."""

    pid: int
    memory_bytes: int


class _LostError(Exception):
    """No call on this GPU will succeed: why."""


@dataclass(slots=True)
class _Gpu:
    """What is known of one GPU. `parts`: numbers by the call that gave them, replaced or removed at each call."""

    id: GpuId
    handle: Handle
    lost: str = ""
    retry_at: float = 0.0
    slow_at: float | None = None  # when the slow calls are due; None: never made
    parts: dict[str, Numbers] = field(default_factory=dict)
    unsupported: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)  # other failures, by name of the error
    answered: int = 0  # calls of this look that NVML answered, be it with "not supported"
    last_error: str = ""
    gpm: Gpm | None = None
    conditions: Conditions = field(default_factory=Conditions)
    by_link: dict[tuple[int, Key], float] = field(default_factory=dict)  # a link that is down keeps what it counted
    labels: str = ""  # of dcgm-exporter
    series: dict[Key, tuple[Metric, tuple[str, ...]]] = field(default_factory=dict)

    def numbers(self) -> Numbers:
        every: Numbers = {}
        for part in self.parts.values():
            every.update(part)
        return every


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
        self._errors: tuple[type[Exception], ...] = ()
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
        facts = self._open(at) if self._nvml is None else []
        for gpu in self._gpus:
            self.looking_at = f"GPU {gpu.id.index}"
            facts += self._look(gpu, at)
        self.looking_at = ""
        every = [(gpu, gpu.numbers()) for gpu in self._gpus]
        return Reading(
            values=tuple(v for gpu, numbers in every for v in self._values(gpu, numbers)),
            facts=tuple(facts),
            dcgm=self._dcgm_text(every) if self._dcgm_lines else "",
        )

    def close(self) -> None:
        if self._nvml is None:
            return
        for gpu in self._gpus:
            if gpu.gpm is not None:
                gpu.gpm.close()
        close_nvml(self._nvml)
        self._nvml = None

    def _open(self, at: float) -> list[Fact]:
        nvml = open_nvml(self._library)
        before = [g.id for g in self._gpus]
        try:
            count = nvml.nvmlDeviceGetCount()
            self._driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError as e:
            close_nvml(nvml)
            raise CannotRead(f"NVML does not say which GPUs there are: {e}") from None
        self._nvml, self._errors = nvml, errors_of(nvml)
        self._gpus = [_Gpu(id=GpuId(index=i), handle=None) for i in range(count)]
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
        return facts

    def _find(self, gpu: _Gpu) -> None:
        """Handle and identity. By UUID where it is known: indices move when a GPU before it goes.

        Raises:
            NVMLError: it does not answer.
        """
        nvml = self._nvml
        if gpu.id.uuid:
            gpu.handle = nvml.nvmlDeviceGetHandleByUUID(gpu.id.uuid)
        else:
            gpu.handle = nvml.nvmlDeviceGetHandleByIndex(gpu.id.index)
        gpu.id = identify(nvml, gpu.id.index, gpu.handle)
        gpu.labels = dcgm.label_text(
            gpu=gpu.id.index,
            uuid=gpu.id.uuid,
            pci_bus_id=gpu.id.pci_bus_id,
            minor=gpu.id.minor,
            model=gpu.id.name,
            hostname=self._node,
            driver=self._driver,
        )

    def _look(self, gpu: _Gpu, at: float) -> Iterable[Fact]:
        was_lost = gpu.lost
        if was_lost:
            if at < gpu.retry_at:
                return
            gpu.retry_at = at + LOST_RETRY_SECONDS
            try:
                self._find(gpu)
            except self._nvml.NVMLError:
                return
        gpu.answered, gpu.last_error = 0, ""
        try:
            self._ask_all(gpu, at)
            if not gpu.answered and gpu.last_error:
                raise _LostError(gpu.last_error)
        except _LostError as e:
            if not was_lost:
                yield self._lose(gpu, at, str(e))
            gpu.parts.clear()
            return
        if was_lost:
            gpu.lost = ""
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)
        found, is_well_again = gpu.conditions.update(gpu.numbers())
        for fault in found:
            if fault.get("action") == self._action_told(gpu.id.index):
                continue
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **fault})
        if is_well_again:
            yield Fact(kind=AgentEventKind.GPU_RECOVERED, detail=gpu.id.detail)

    def _lose(self, gpu: _Gpu, at: float, reason: str) -> Fact:
        """Forgets what was known: after a reset the GPU may answer differently, and its counters start again."""
        gpu.lost, gpu.retry_at, gpu.slow_at = reason, at + LOST_RETRY_SECONDS, None
        gpu.parts.clear()
        gpu.conditions = Conditions()
        gpu.by_link.clear()
        gpu.unsupported.clear()
        if gpu.gpm is not None:
            gpu.gpm.close()
            gpu.gpm = None
        self.processes = {i: p for i, p in self.processes.items() if i != gpu.id.index}
        logger.error("GPU %d %s is lost: %s", gpu.id.index, gpu.id.uuid, reason)
        return _lost_fact(gpu.id, reason)

    # --- calls, each of which may fail alone

    def _ask_all(self, gpu: _Gpu, at: float) -> None:
        for calls in FAST:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("fields", lambda _, __: self._fields(gpu, FAST_FIELDS)),))
        self._ask(gpu, (Call("GPM", lambda _, __: self._gpm(gpu, at)),))
        if gpu.slow_at is None:
            # Later ones are spread over the interval: no look bears the slow calls of all GPUs but the first.
            gpu.slow_at = at + self._slow_seconds * gpu.id.index / max(1, len(self._gpus))
        elif at < gpu.slow_at:
            return
        gpu.slow_at += self._slow_seconds * (1 + (at - gpu.slow_at) // self._slow_seconds)
        for calls in SLOW:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("slow fields", lambda _, __: self._fields(gpu, SLOW_FIELDS)),))
        self._ask(gpu, (Call("NVLinks", lambda _, __: self._links(gpu)),))
        self._ask(gpu, (Call("nvmlDeviceGetComputeRunningProcesses", lambda _, __: self._processes(gpu)),))

    def _ask(self, gpu: _Gpu, calls: tuple[Call, ...]) -> None:
        """The first of `calls` that this GPU and driver know; what it gave before is replaced.

        Raises:
            _LostError: NVML says that the GPU is lost.
            CannotRead: the driver is gone.
        """
        part = calls[0].name
        for call in calls:
            if call.name in gpu.unsupported:
                continue
            try:
                gpu.parts[part] = call.read(self._nvml, gpu.handle)
            except self._errors as e:
                gpu.parts.pop(part, None)
                if not self._is_unsupported(gpu, call.name, e):
                    return
            else:
                gpu.answered += 1
                return

    def _is_unsupported(self, gpu: _Gpu, name: str, error: Exception) -> bool:
        """Whether to go on without this call. Any other failure is counted, and tried again at the next look."""
        code = code_of(error)
        if code in GONE:
            self.close()
            raise CannotRead(f"the NVIDIA driver went away: {error}")
        if code in LOST:
            raise _LostError(str(error))
        if code in UNSUPPORTED:
            gpu.answered += 1
            self._skip(gpu, name, str(error))
            return True
        gpu.last_error = str(error)
        text = error_name(self._nvml, code)
        gpu.errors[text] = gpu.errors.get(text, 0) + 1
        if self._said.is_new(f"{gpu.id.index} {name} {code}"):
            logger.warning("GPU %d: %s failed: %s", gpu.id.index, name, error)
        return False

    def _skip(self, gpu: _Gpu, name: str, why: str) -> None:
        gpu.unsupported.add(name)
        if self._said.is_new(f"{gpu.id.index} {name}"):
            logger.info("GPU %d: %s is left out: %s", gpu.id.index, name, why)

    def _fields(self, gpu: _Gpu, fields: Mapping[int, tuple[Key, float]]) -> Numbers:
        numbers: Numbers = {}
        for number, _, value in self._field_values(gpu, [(f, 0) for f in fields]):
            key, scale = fields[number]
            if key == ("recovery_action",):
                wanted = RecoveryAction.of_number(int(value))
                numbers |= {("recovery_action", action): float(action is wanted) for action in RecoveryAction}
            else:
                numbers[key] = value * scale
        return numbers

    def _field_values(self, gpu: _Gpu, wanted: list[tuple[int, int]]) -> Iterator[tuple[int, int, float]]:
        """(field, link, value) of those of `wanted` (field, link) that NVML knows; what it does not is not asked again.

        Raises:
            NVMLError: of the call as a whole.
        """
        wanted = [w for w in wanted if f"field {w[0]}" not in gpu.unsupported]
        if not wanted:
            return
        answers = self._nvml.nvmlDeviceGetFieldValues(gpu.handle, wanted)
        known: set[int] = set()
        refused: dict[int, int] = {}
        for (number, link), answer in zip(wanted, answers, strict=True):
            code = answer.nvmlReturn
            if code == 0:
                known.add(number)
                if (value := field_value(answer)) is not None:
                    yield number, link, value
            elif code in LOST:
                raise self._nvml.NVMLError(code)
            elif code in FIELD_UNSUPPORTED:
                refused[number] = code
        for number in refused.keys() - known:  # a link that is down may refuse what the others answer
            self._skip(gpu, f"field {number}", error_name(self._nvml, refused[number]))

    def _gpm(self, gpu: _Gpu, at: float) -> Numbers:
        if gpu.gpm is None:
            gpu.gpm = Gpm(self._nvml, gpu.handle)
            if not gpu.gpm.supported:
                gpu.gpm = None
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.gpm.look(at)

    def _links(self, gpu: _Gpu) -> Numbers:
        """State, bytes and errors of all NVLinks: sums, and by link where something is wrong."""
        num_links = int(gpu.parts.get("slow fields", {}).get(("nvlinks",), 0))
        if not num_links:
            return {}
        numbers: Numbers = {("nvlinks_active",): 0.0}
        for link, active in self._of_links(gpu, num_links, "nvmlDeviceGetNvLinkState"):
            numbers[("nvlinks_active",)] += bool(active)
            numbers["nvlink_down", str(link)] = float(not active)
        for counter, error in NVLINK_ERRORS.items():
            for link, count in self._of_links(gpu, num_links, "nvmlDeviceGetNvLinkErrorCounter", counter):
                gpu.by_link[link, (ERRORS_SUM, error)] = count
        wanted = [(f, link) for f in LINK_FIELDS for link in range(num_links)]
        for number, link, value in self._field_values(gpu, wanted):
            key, scale = LINK_FIELDS[number]
            gpu.by_link[link, key] = value * scale  # of two fields for one key the later one counts
        for (link, key), value in gpu.by_link.items():
            numbers[key] = numbers.get(key, 0.0) + value
            if value and key[0] == ERRORS_SUM:
                numbers[ERRORS_BY_LINK, str(link), key[1]] = value
        return numbers

    def _of_links(self, gpu: _Gpu, num_links: int, function: str, *arguments: int) -> Iterator[tuple[int, float]]:
        """(link, answer) of those links for which NVML knows it; where that is none, it is not asked again.

        Raises:
            NVMLError: of another kind.
        """
        name = f"{function}{arguments or ''}"
        if name in gpu.unsupported:
            return
        refused, num_answered = "", 0
        for link in range(num_links):
            try:
                answer = getattr(self._nvml, function)(gpu.handle, link, *arguments)
            except self._nvml.NVMLError as e:
                if code_of(e) not in FIELD_UNSUPPORTED:
                    raise
                refused = str(e)
            else:
                num_answered += 1
                yield link, float(answer)
        if not num_answered:
            self._skip(gpu, name, refused)

    def _processes(self, gpu: _Gpu) -> Numbers:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        processes = tuple(GpuProcess(p.pid, p.usedGpuMemory or 0) for p in found[:PROCESSES_MAX])
        self.processes = {**self.processes, gpu.id.index: processes}
        return {("processes",): len(found)}

    # --- what was found, as values and lines

    def _values(self, gpu: _Gpu, numbers: Numbers) -> Iterator[MetricValue]:
        yield self._value(gpu, ("up",), float(not gpu.lost))
        if gpu.id.uuid:
            yield self._value(gpu, ("info", gpu.id.uuid, gpu.id.name, self._driver), 1.0)
        yield self._value(gpu, ("calls_unsupported",), len(gpu.unsupported))
        for error, count in gpu.errors.items():
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
