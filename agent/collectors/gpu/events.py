"""What the driver tells by itself: XIDs, double-bit errors, the action that it recommends. Facts as they happen.

A collector of its own beside `collector.py`, so that waiting delays no sample: each read waits up to 0.2 s for an event, and
gives back at once what came. NVML tells of critical XIDs only, and of none once a GPU is lost: the kernel log has the
rest. `merge` (`xid_merger.py`) says which of both sources was first, so that one XID is one fact and is counted once.

The recovery action (field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION), the driver's own verdict, is read when an event says that
it changed. For drivers without that event `collector.py` looks at it. Nothing else is asked of a GPU here: a call on a sick one
may block, and the others would not be heard.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.gpu.collector import GpuId, identify
from rolecall.agent.collectors.gpu.faults import of_action
from rolecall.agent.collectors.gpu.fields import FieldQuery
from rolecall.agent.collectors.gpu.nvml import GONE, LOST, TIMEOUT, Handle, close_nvml, code_of, open_nvml
from rolecall.agent.collectors.gpu.nvml_calls import RECOVERY_FIELD
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.xid.xid import RecoveryAction

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
EVENTS_MAX = 64
"""Of one read; the rest waits in the driver for the next."""
LOST_RETRY_SECONDS = 5.0
"""Between two tries to hear again of GPUs that were lost."""

XID_CRITICAL = 0x8
RECOVERY_ACTION_CHANGED = 0x8000
FAULTS: Mapping[int, dict[str, str]] = {
    0x2: {"what": "ecc", "state": "double_bit_error"},
    0x800: {"what": "remapped_rows", "state": "retirement_failed"},
    0x2000: {"what": "ecc", "state": "fatal_poison"},
    0x4000: {"what": "unavailable", "state": "unavailable"},
}
"""Other event types that are faults of the GPU (nvml.h, nvmlEventType*). What is corrected or contained (single bits, a
row retired, poison that killed its process only) is none: XIDs and counters show it."""
NO_INSTANCE = 0xFFFFFFFF
WANTED = XID_CRITICAL | RECOVERY_ACTION_CHANGED | sum(FAULTS)

Merge = Callable[[float, int, int, str], bool]
"""(at, GPU index, xid, source) -> whether it is new, not told by another source before; it counts, too."""
Decode = Callable[[int], Mapping[str, str]]
"""xid -> `mnemonic` and `action`."""


def always_new(at: float, gpu: int, xid: int, source: str) -> bool:
    return True


def not_decoded(xid: int) -> Mapping[str, str]:
    return {}


@dataclass(slots=True)
class _EventSourceGpu:
    id: GpuId
    handle: Handle


class GpuEventsCollector:
    """`last_xid` and `action_told` (of a GPU's index) may be called from any thread."""

    name = "gpu_events"
    interval_seconds = 0.05
    """A read waits by itself: the next follows."""

    def __init__(
        self,
        *,
        library: Path | None = None,
        merge: Merge = always_new,
        decode: Decode = not_decoded,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._library = library
        self._merge, self._decode, self.wait_seconds = merge, decode, wait_seconds
        self._nvml: Any = None
        self._set: Any = None
        self._gpus: dict[int, _EventSourceGpu] = {}  # by the handle's address; those that are not lost
        self._num_lost = 0
        self._open_at = 0.0  # when lost GPUs are looked for again
        self._last_xids: dict[int, int] = {}
        self._actions: dict[int, RecoveryAction] = {}
        self._said = LoggedOnce()

    def last_xid(self, index: int) -> int:
        """0: none since the agent started."""
        return self._last_xids.get(index, 0)

    def action_told(self, index: int) -> RecoveryAction:
        """What an event said that the driver recommends."""
        return self._actions.get(index, RecoveryAction.NONE)

    def read(self, at: float) -> CollectorReading:
        """Waits for events, at most `wait_seconds`.

        Raises:
            CannotRead: no NVML, no driver, or no GPU that tells of events.
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
        try:
            self._nvml.nvmlEventSetFree(self._set)
        except self._nvml.NVMLError:
            pass  # the driver went away before us
        close_nvml(self._nvml)
        self._nvml = None

    def _open(self, at: float) -> None:
        """A set of the events of all GPUs that answer. A lost one must not be in it: the wait would fail at once."""
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
                    if self._said.is_new(f"{index} {e}"):
                        logger.warning("GPU %d tells of no events: %s", index, e)
                    continue
                gpus[_address(handle)] = gpu
        except nvml.NVMLError as e:
            close_nvml(nvml)
            raise CollectorUnavailable(f"NVML gives no events: {e}") from None
        self._nvml, self._set, self._gpus, self._num_lost = nvml, events, gpus, lost
        self._open_at = at + LOST_RETRY_SECONDS
        if not gpus and not lost:
            self.close()
            raise CollectorUnavailable("no GPU tells of events (none there, or an old one)")

    def _wait(self) -> Iterator[tuple[_EventSourceGpu, int, int, dict[str, str]]]:
        """(GPU, event type, its number, its MIG instance): waits for the first, then gives what else is there.

        Raises:
            CannotRead: the driver is gone.
        """
        wait_ms = int(self.wait_seconds * 1000)
        for _ in range(EVENTS_MAX):
            try:
                event = self._nvml.nvmlEventSetWait(self._set, wait_ms)
            except self._nvml.NVMLError as e:
                code = code_of(e)
                if code in GONE:
                    self.close()
                    raise CollectorUnavailable(f"the NVIDIA driver went away: {e}") from None
                if code in LOST:  # it would say so at once, each time: the set is made anew without that GPU
                    self._num_lost, self._open_at = max(1, self._num_lost), 0.0
                elif code != TIMEOUT and self._said.is_new(f"wait {code}"):
                    logger.warning("waiting for GPU events failed: %s", e)
                return
            wait_ms = 0
            gpu = self._gpus.get(_address(event.device))
            if gpu is not None:
                yield gpu, event.eventType, event.eventData, _instance(event)

    def _xid(self, at: float, gpu: _EventSourceGpu, xid: int, instance: Mapping[str, str]) -> Iterator[Fact]:
        self._last_xids[gpu.id.index] = xid
        if self._merge(at, gpu.id.index, xid, "nvml"):
            detail = {"xid": str(xid), **gpu.id.detail, **self._decode(xid), **instance, "source": "nvml"}
            yield Fact(kind=AgentEventKind.XID, detail=detail)

    def _action(self, gpu: _EventSourceGpu) -> Iterator[Fact]:
        try:
            ((code, value),) = FieldQuery(self._nvml, [(RECOVERY_FIELD, 0)]).ask(gpu.handle)
        except self._nvml.NVMLError:
            return  # lost, or about to be: `collector.py` tells
        if code != 0 or value is None:
            return
        before, action = self.action_told(gpu.id.index), RecoveryAction.of_number(int(value))
        self._actions[gpu.id.index] = action
        if action not in (before, RecoveryAction.NONE):  # that it is over, `collector.py` tells
            yield Fact(kind=AgentEventKind.GPU_FAULT, detail={**gpu.id.detail, **of_action(action)})


def _instance(event: Any) -> dict[str, str]:
    """The MIG instance that an XID struck; none: of the whole GPU."""
    ids = {"gpu_instance": event.gpuInstanceId, "compute_instance": event.computeInstanceId}
    return {name: str(number) for name, number in ids.items() if number != NO_INSTANCE}


def _address(handle: Handle) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
