"""Driver events as facts: XIDs, double-bit errors, and the recovery action that the driver recommends.

Separate from `collector.py`, so that waiting for events delays no sample: each read waits for the first event and
returns immediately with all pending ones. NVML reports critical XIDs only, and none once a GPU is lost; the kernel log
has the rest. `XidMerger` deduplicates the two sources, so that one XID is one fact and is counted once.

The recovery action (field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) is read when an event says that it changed; for drivers
without that event `collector.py` polls it. No other call is made here: a call on a faulty GPU may block and would delay
the events of the others.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.gpu.faults import of_action
from rolecall.agent.collectors.gpu.nvml import (
    GONE,
    LOST,
    TIMEOUT,
    FieldQuery,
    GpuId,
    Handle,
    close_nvml,
    code_of,
    identify,
    open_nvml,
)
from rolecall.agent.collectors.gpu.queries import RECOVERY_FIELD
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.xid.xid import RecoveryAction, xid

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
EVENTS_MAX = 64
"""Per read; the rest stays queued in the driver."""
LOST_RETRY_SECONDS = 5.0
"""Between two attempts to register lost GPUs again."""

XID_CRITICAL = 0x8
RECOVERY_ACTION_CHANGED = 0x8000
FAULTS: Mapping[int, dict[str, str]] = {
    0x2: {"what": "ecc", "state": "double_bit_error"},
    0x800: {"what": "remapped_rows", "state": "retirement_failed"},
    0x2000: {"what": "ecc", "state": "fatal_poison"},
    0x4000: {"what": "unavailable", "state": "unavailable"},
}
"""Other event types that are GPU faults (nvml.h, nvmlEventType*). Corrected or contained errors (single bits, a retired
row, poison that killed only its process) are not faults: XIDs and counters show them."""
NO_INSTANCE = 0xFFFFFFFF
WANTED = XID_CRITICAL | RECOVERY_ACTION_CHANGED | sum(FAULTS)


@dataclass(slots=True)
class _EventSourceGpu:
    id: GpuId
    handle: Handle


class GpuEventsCollector:
    """`last_xid` and `reported_action` (of a GPU's index) may be called from any thread."""

    name = "gpu_events"
    interval_seconds = 0.05
    """The read itself waits, so the next one follows directly."""

    def __init__(
        self,
        *,
        library: Path | None = None,
        merger: XidMerger | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._library = library
        self._merger, self.wait_seconds = merger or XidMerger(), wait_seconds
        self._nvml: Any = None
        self._set: Any = None
        self._gpus: dict[int, _EventSourceGpu] = {}  # by the handle's address; those that are not lost
        self._num_lost = 0
        self._open_at = 0.0  # when lost GPUs are retried
        self._last_xids: dict[int, int] = {}
        self._actions: dict[int, RecoveryAction] = {}
        self._logged = LoggedOnce()

    def last_xid(self, index: int) -> int:
        """0: none since the agent started."""
        return self._last_xids.get(index, 0)

    def reported_action(self, index: int) -> RecoveryAction:
        """The driver's recommendation as of the last event."""
        return self._actions.get(index, RecoveryAction.NONE)

    def read(self, at: float) -> CollectorReading:
        """Waits for events, at most `wait_seconds`.

        Raises:
            CollectorUnavailable: no NVML, no driver, or no GPU that supports events.
        """
        if self._nvml is None or (self._num_lost and at >= self._open_at):
            self.close()
            self._open(at)
        facts: list[Fact] = []
        for gpu, event_type, number, instance in self._wait():
            if event_type == XID_CRITICAL:
                facts += self._xid(at, gpu, number, instance)
            elif event_type == RECOVERY_ACTION_CHANGED:
                facts += self._action(gpu)
            elif fault := FAULTS.get(event_type):
                facts.append(Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **fault}))
        return CollectorReading(facts=tuple(facts))

    def close(self) -> None:
        if self._nvml is None:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # the driver was unloaded first
            self._nvml.nvmlEventSetFree(self._set)
        close_nvml(self._nvml)
        self._nvml = None

    def _open(self, at: float) -> None:
        """Registers all responding GPUs in one event set. A lost GPU in it would make every wait fail immediately."""
        nvml = open_nvml(self._library)
        gpus: dict[int, _EventSourceGpu] = {}
        lost = 0
        try:
            events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    gpu = _EventSourceGpu(identify(nvml, index, handle), handle)
                    types = nvml.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
                    nvml.nvmlDeviceRegisterEvents(handle, types, events)
                except nvml.NVMLError as e:
                    lost += code_of(e) in LOST
                    if self._logged.is_new(f"{index} {e}"):
                        logger.warning("GPU %d reports no events: %s", index, e)
                    continue
                gpus[_address(handle)] = gpu
        except nvml.NVMLError as e:
            close_nvml(nvml)
            raise CollectorUnavailable(f"NVML event registration failed: {e}") from None
        self._nvml, self._set, self._gpus, self._num_lost = nvml, events, gpus, lost
        self._open_at = at + LOST_RETRY_SECONDS
        if not gpus and not lost:
            self.close()
            raise CollectorUnavailable("no GPU supports events (no GPU present, or too old)")

    def _wait(self) -> Iterator[tuple[_EventSourceGpu, int, int, dict[str, str]]]:
        """(GPU, event type, event data, MIG instance or {}): waits for the first event, then drains the queue.

        Raises:
            CollectorUnavailable: the driver was unloaded.
        """
        wait_ms = int(self.wait_seconds * 1000)
        for _ in range(EVENTS_MAX):
            try:
                event = self._nvml.nvmlEventSetWait(self._set, wait_ms)
            except self._nvml.NVMLError as error:
                code = code_of(error)
                if code in GONE:
                    self.close()
                    raise CollectorUnavailable(f"the NVIDIA driver was unloaded: {error}") from None
                if code in LOST:  # every wait would fail: rebuild the set without that GPU
                    self._num_lost, self._open_at = max(1, self._num_lost), 0.0
                elif code != TIMEOUT and self._logged.is_new(f"wait {code}"):
                    logger.warning("waiting for GPU events failed: %s", error)
                return
            wait_ms = 0
            gpu = self._gpus.get(_address(event.device))
            if gpu is not None:
                ids = {"gpu_instance": event.gpuInstanceId, "compute_instance": event.computeInstanceId}
                instance = {name: str(number) for name, number in ids.items() if number != NO_INSTANCE}
                yield gpu, event.eventType, event.eventData, instance

    def _xid(self, at: float, gpu: _EventSourceGpu, code: int, instance: Mapping[str, str]) -> Iterator[Fact]:
        self._last_xids[gpu.id.index] = code
        if self._merger.merge(at, gpu.id.index, code, "nvml"):
            known = xid(code)
            meaning = {"mnemonic": known.mnemonic, "action": str(known.immediate)}
            detail = {"xid": str(code), **gpu.id.detail, **meaning, **instance, "source": "nvml"}
            yield Fact(kind=AgentEventKind.XID, detail=detail)

    def _action(self, gpu: _EventSourceGpu) -> Iterator[Fact]:
        try:
            ((code, value),) = FieldQuery(self._nvml, [(RECOVERY_FIELD, 0)]).ask(gpu.handle)
        except self._nvml.NVMLError:
            return  # lost, or about to be: `collector.py` reports that
        if code != 0 or value is None:
            return
        before, action = self.reported_action(gpu.id.index), RecoveryAction.of_number(int(value))
        self._actions[gpu.id.index] = action
        if action not in (before, RecoveryAction.NONE):  # `collector.py` reports recovery
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **of_action(action)})


def _address(handle: Handle) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
