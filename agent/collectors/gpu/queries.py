"""The NVML calls of a GPU, converted to numbers in base units, and the poller that makes them; each may fail alone.

A key is the metric's name without `rolecall_gpu_`, followed by its labels after node and gpu. Both the catalogue's
values (`collector.py`) and dcgm-exporter's lines (`dcgm.py`) are made from these. FAST calls are made at each poll,
SLOW ones every few seconds: values that change only with faults, or not within a training step. Units and meaning:
nvml.h of NVIDIA, as declared by nvidia-ml-py.

A call that a GPU or driver does not support is logged once and skipped for that GPU from then on. Other errors are
counted and retried. Results are kept by call, so that a failing call removes only its own numbers.

GPM gives the activity of a GPU's units since the last poll (SMs, tensor cores, memory, links), on Hopper and later.
NVML computes it from two counter samples at least 100 ms apart; each poll keeps its sample for the next, so that no
poll sleeps. A spinning NCCL kernel shows here: SMs at 100 %, tensor cores at 0.
"""

import ctypes
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.agent.collectors.base import CollectorUnavailable, LoggedOnce
from rolecall.agent.collectors.gpu.nvml import (
    FIELD_UNSUPPORTED,
    GONE,
    LOST,
    UNSUPPORTED,
    FieldQuery,
    Handle,
    code_of,
    error_name,
    errors_of,
)
from rolecall.formats.xid.xid import RecoveryAction

logger = logging.getLogger(__name__)

Key = tuple[str, ...]
Numbers = dict[Key, float]

THROTTLE_REASONS: dict[int, str] = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display",
}
RECOVERY_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION."""
FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
FABRIC_FAULTS = (
    ("degraded_bandwidth", 0),
    ("route_recovery", 2),
    ("route_unhealthy", 4),
    ("access_timeout_recovery", 6),
)
"""Name and shift of two bits of the health mask: 0 unknown, 1 true, 2 false."""
_FABRIC_CONFIGURATION_SHIFT = 8  # four bits: 0 unknown, 1 correct, above: kind of error
NVLINK_ERRORS = {0: "replay", 1: "recovery", 2: "crc_flit", 3: "crc_data", 4: "ecc_data"}
"""Counters of nvmlDeviceGetNvLinkErrorCounter, NVLink up to 4."""

_MEBI = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Call:
    """`name`: the NVML function, unique, used in logs. `read(pynvml, handle)` raises NVMLError."""

    name: str
    read: Callable[[Any, Handle], Numbers]


def _number(name: str, key: str, scale: float = 1.0) -> Call:
    """A call that returns one number; `key` is that number times `scale`."""
    return Call(name, lambda nvml, gpu: {(key,): getattr(nvml, name)(gpu) * scale})


def _utilization(nvml: Any, gpu: Handle) -> Numbers:
    u = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return {("utilization_ratio",): u.gpu / 100, ("memory_utilization_ratio",): u.memory / 100}


def _memory(nvml: Any, gpu: Handle) -> Numbers:
    m = nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)
    return {**_memory_of(m), ("memory_reserved_bytes",): m.reserved}


def memory_v1(nvml: Any, gpu: Handle) -> Numbers:
    """For drivers before 510 and MIG instances: reserved memory counts as used."""
    return _memory_of(nvml.nvmlDeviceGetMemoryInfo(gpu))


def _memory_of(m: Any) -> Numbers:
    return {("memory_total_bytes",): m.total, ("memory_used_bytes",): m.used, ("memory_free_bytes",): m.free}


def _temperature(name: str) -> Call:
    return Call(name, lambda nvml, gpu: {("temperature_celsius",): getattr(nvml, name)(gpu, nvml.NVML_TEMPERATURE_GPU)})


def _clock(key: str, which: int, name: str = "nvmlDeviceGetClockInfo") -> Call:
    """which: 1 SM clock, 2 memory clock (NVML_CLOCK_SM, NVML_CLOCK_MEM)."""
    return Call(f"{name}({which})", lambda nvml, gpu: {(key,): getattr(nvml, name)(gpu, which) * 1e6})


def _throttle(name: str) -> Call:
    def read(nvml: Any, gpu: Handle) -> Numbers:
        mask = getattr(nvml, name)(gpu)
        return {("throttle_active", reason): float(bool(mask & bit)) for bit, reason in THROTTLE_REASONS.items()}

    return Call(name, read)


def _coder(name: str, key: str) -> Call:
    return Call(name, lambda nvml, gpu: {(key,): getattr(nvml, name)(gpu)[0] / 100})


def _ecc(key: str, counter: int) -> Call:
    """counter: 0 since driver load, 1 lifetime (NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC)."""
    return Call(
        f"nvmlDeviceGetTotalEccErrors({counter})",
        lambda nvml, gpu: {
            (key, error): nvml.nvmlDeviceGetTotalEccErrors(gpu, type_, counter)
            for type_, error in enumerate(("corrected", "uncorrected"))
        },
    )


def _sram(nvml: Any, gpu: Handle) -> Numbers:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()  # its constructor sets the version
    nvml.nvmlDeviceGetSramEccErrorStatus(gpu, ctypes.byref(status))
    return {("sram_threshold_exceeded",): float(bool(status.bThresholdExceeded))}


def _remapped(nvml: Any, gpu: Handle) -> Numbers:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    return {
        ("remapped_rows_total", "corrected"): corrected,
        ("remapped_rows_total", "uncorrected"): uncorrected,
        ("remapped_rows_pending",): float(bool(pending)),
        ("remapped_rows_failed",): float(bool(failed)),
    }


def _fabric(nvml: Any, gpu: Handle) -> Numbers:
    info = nvml.c_nvmlGpuFabricInfo_v3_t()  # its constructor does not set the version
    info.version = nvml.nvmlGpuFabricInfo_v3
    return _fabric_of(nvml, gpu, info)


def _fabric_v2(nvml: Any, gpu: Handle) -> Numbers:
    """For drivers that do not support version 3 of the structure."""
    return _fabric_of(nvml, gpu, nvml.c_nvmlGpuFabricInfo_v2_t())  # its constructor sets the version


def _fabric_of(nvml: Any, gpu: Handle, info: Any) -> Numbers:
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    return fabric_numbers(int(info.state), int(info.status), int(info.healthMask))


def fabric_numbers(state: int, status: int, mask: int) -> Numbers:
    """State of the GPU's fabric registration, and the faults of its health mask (unknown ones: no number)."""
    name = FABRIC_STATES[state] if state < len(FABRIC_STATES) else "unknown"
    numbers: Numbers = {("fabric_state", name): 1.0}
    if name == "not_supported":
        return numbers
    if name == "completed":
        numbers["fabric_fault", "registration"] = float(status != 0)
    for fault, shift in FABRIC_FAULTS:
        if bits := mask >> shift & 0x3:
            numbers["fabric_fault", fault] = float(bits == 1)
    if bits := mask >> _FABRIC_CONFIGURATION_SHIFT & 0xF:
        numbers["fabric_fault", "incorrect_configuration"] = float(bits > 1)
    return numbers


FAST: tuple[tuple[Call, ...], ...] = (
    (Call("nvmlDeviceGetUtilizationRates", _utilization),),
    (Call("nvmlDeviceGetMemoryInfo_v2", _memory), Call("nvmlDeviceGetMemoryInfo", memory_v1)),
    (_number("nvmlDeviceGetPowerUsage", "power_watts", 1e-3),),
    (_number("nvmlDeviceGetTotalEnergyConsumption", "energy_joules_total", 1e-3),),
    (_temperature("nvmlDeviceGetTemperatureV"), _temperature("nvmlDeviceGetTemperature")),
    (_clock("sm_clock_hertz", 1),),
    (_clock("memory_clock_hertz", 2),),
    # Until driver 535 under the second name.
    (_throttle("nvmlDeviceGetCurrentClocksEventReasons"), _throttle("nvmlDeviceGetCurrentClocksThrottleReasons")),
)
"""Each row lists alternative calls for the same value, newest first: the first that the driver supports is used."""

SLOW: tuple[tuple[Call, ...], ...] = (
    (_number("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts", 1e-3),),
    (_clock("sm_clock_max_hertz", 1, "nvmlDeviceGetMaxClockInfo"),),
    (_coder("nvmlDeviceGetEncoderUtilization", "encoder_utilization_ratio"),),
    (_coder("nvmlDeviceGetDecoderUtilization", "decoder_utilization_ratio"),),
    (_number("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_link_generation"),),
    (_number("nvmlDeviceGetMaxPcieLinkGeneration", "pcie_link_generation_max"),),
    (_number("nvmlDeviceGetCurrPcieLinkWidth", "pcie_link_width"),),
    (_number("nvmlDeviceGetMaxPcieLinkWidth", "pcie_link_width_max"),),
    (_number("nvmlDeviceGetPcieReplayCounter", "pcie_replays_total"),),
    (Call("nvmlDeviceGetMigMode", lambda nvml, gpu: {("mig_enabled",): float(nvml.nvmlDeviceGetMigMode(gpu)[0])}),),
    (_ecc("ecc_errors_total", 0),),
    (_ecc("ecc_lifetime_errors_total", 1),),
    (Call("nvmlDeviceGetSramEccErrorStatus", _sram),),
    (Call("nvmlDeviceGetRemappedRows", _remapped),),
    (Call("nvmlDeviceGetGpuFabricInfoV(3)", _fabric), Call("nvmlDeviceGetGpuFabricInfoV(2)", _fabric_v2)),
)

FAST_FIELDS: Mapping[int, tuple[Key, float]] = {
    74: (("throttle_seconds_total", "sw_power_cap"), 1e-9),
    75: (("throttle_seconds_total", "thermal"), 1e-9),
    76: (("throttle_seconds_total", "sync_boost"), 1e-9),
    77: (("throttle_seconds_total", "board_limit"), 1e-9),
    79: (("throttle_seconds_total", "reliability"), 1e-9),
    269: (("throttle_seconds_total", "sw_thermal"), 1e-9),
    270: (("throttle_seconds_total", "hw_thermal"), 1e-9),
    271: (("throttle_seconds_total", "hw_power_brake"), 1e-9),
    82: (("memory_temperature_celsius",), 1.0),
    197: (("pcie_transmit_bytes_total",), 1.0),
    198: (("pcie_receive_bytes_total",), 1.0),
    RECOVERY_FIELD: (("recovery_action",), 1.0),
}
"""Field number to key and scale. 74 is also CLOCKS_EVENT_REASON_SW_POWER_CAP, 76 ..._SYNC_BOOST."""

SLOW_FIELDS: Mapping[int, tuple[Key, float]] = {
    169: (("pcie_errors_total", "l0_to_recovery"), 1.0),
    173: (("pcie_errors_total", "correctable"), 1.0),
    175: (("pcie_errors_total", "receiver"), 1.0),
    176: (("pcie_errors_total", "bad_tlp"), 1.0),
    178: (("pcie_errors_total", "bad_dllp"), 1.0),
    179: (("pcie_errors_total", "non_fatal"), 1.0),
    180: (("pcie_errors_total", "fatal"), 1.0),
    91: (("nvlinks",), 1.0),
}

LINK_FIELDS: Mapping[int, tuple[Key, float]] = {
    138: (("nvlink_transmit_bytes_total",), 1024.0),  # KiB
    139: (("nvlink_receive_bytes_total",), 1024.0),
    202: (("nvlink_transmit_bytes_total",), 1.0),
    204: (("nvlink_receive_bytes_total",), 1.0),
    206: (("nvlink_errors_total", "malformed_packet"), 1.0),
    207: (("nvlink_errors_total", "buffer_overrun"), 1.0),
    208: (("nvlink_errors_total", "receive"), 1.0),
    209: (("nvlink_errors_total", "receive_remote"), 1.0),
    211: (("nvlink_errors_total", "local_link_integrity"), 1.0),
    212: (("nvlink_errors_total", "transmit_discard"), 1.0),
    214: (("nvlink_errors_total", "link_recovery_failed"), 1.0),
    215: (("nvlink_errors_total", "link_recovery"), 1.0),
    219: (("nvlink_errors_total", "effective"), 1.0),
    221: (("nvlink_errors_total", "symbol"), 1.0),
}
"""Per link (`scopeId`). 138 and 139 are for NVLink up to 4, 202 and up for NVLink 5; where a GPU has both, the later
row wins. Bit error rates use a packed format and are left out."""


GPM_INTERVAL_SECONDS_MIN = 0.1
"""NVIDIA's documentation of nvmlGpmMetricsGet: samples closer than that give unreliable numbers."""

ROW = struct.Struct("=Iid24x")
"""nvmlGpmMetric_t: metric ID, return code, value, and three strings. Decoded as bytes, because member access through
ctypes costs thousands of attribute lookups a second for eight GPUs. A test compares the layout."""

GPM_METRICS: dict[int, tuple[Key, float]] = {
    1: (("graphics_active_ratio",), 0.01),
    2: (("sm_active_ratio",), 0.01),
    3: (("sm_occupancy_ratio",), 0.01),
    5: (("tensor_active_ratio",), 0.01),
    10: (("dram_active_ratio",), 0.01),
    11: (("fp64_active_ratio",), 0.01),
    12: (("fp32_active_ratio",), 0.01),
    13: (("fp16_active_ratio",), 0.01),
    20: (("pcie_transmit_bytes_per_second",), _MEBI),
    21: (("pcie_receive_bytes_per_second",), _MEBI),
    60: (("nvlink_receive_bytes_per_second",), _MEBI),
    61: (("nvlink_transmit_bytes_per_second",), _MEBI),
}
"""NVML metric ID to key and scale (from percent or MiB/s)."""


class GpmSampler:
    """For one GPU, or one of its MIG instances. Do not call its methods when `supported` is False (A100 and older)."""

    def __init__(self, pynvml: Any, gpu: Handle, gpu_instance: int | None = None) -> None:
        """Raises: NVMLError."""
        self._nvml, self._gpu, self._gpu_instance = pynvml, gpu, gpu_instance
        self.supported = bool(pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice)
        self._samples: list[Any] = []  # the older one first; the two buffers alternate
        self._taken_at: float | None = None
        self._numbers: Numbers = {}
        self._query: Any = None
        if self.supported:
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
            self._query = pynvml.c_nvmlGpmMetricsGet_t()
            self._query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            self._query.numMetrics = len(GPM_METRICS)
            self._rows_at = ctypes.addressof(self._query) + type(self._query).metrics.offset
            for i, number in enumerate(GPM_METRICS):
                self._query.metrics[i].metricId = number

    def sample(self, at: float) -> Numbers:
        """Numbers since the last call; empty at the first, unchanged when called again too soon.

        Raises:
            NVMLError: taking the sample or the computation as a whole failed. The next call starts over.
        """
        before = self._taken_at
        if before is not None and at - before < GPM_INTERVAL_SECONDS_MIN:
            return self._numbers
        older, newer = self._samples
        self._taken_at, self._numbers = None, {}
        # Overwrites the older of the two samples.
        if self._gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, older)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._gpu_instance, older)
        self._samples = [newer, older]
        if before is not None:
            self._query.sample1, self._query.sample2 = newer, older
            self._nvml.nvmlGpmMetricsGet(self._query)
            rows = ROW.iter_unpack(ctypes.string_at(self._rows_at, len(GPM_METRICS) * ROW.size))
            for (_, code, value), (key, scale) in zip(rows, GPM_METRICS.values(), strict=True):
                if code == 0:
                    self._numbers[key] = value * scale
        self._taken_at = at
        return self._numbers

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []


PROCESSES_MAX = 64
"""Per GPU; further ones are left out."""
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
ERRORS_SUM = "nvlink_errors_total"
ERRORS_BY_LINK = "nvlink_link_errors_total"


class GpuLostError(Exception):
    """No call on this GPU succeeds; the text says why."""


@dataclass(slots=True)
class GpuQueryState:
    """One GPU's results. `parts`: numbers by call. A changed result replaces the object, so that callers detect changes
    by identity. A failing call removes its part."""

    index: int
    handle: Handle = None
    parts: dict[str, Numbers] = field(default_factory=dict)
    pids: tuple[int, ...] = ()  # of processes with a context on it
    unsupported: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)  # other failures, by name of the error
    slow_at: float | None = None  # when the slow calls are due; None: not yet made
    by_link: dict[tuple[int, Key], float] = field(default_factory=dict)  # a link that is down keeps its counts
    gpm: GpmSampler | None = None
    queries: dict[str, FieldQuery] = field(default_factory=dict)  # by the call that makes them
    num_answered: int = 0  # calls of this poll that NVML answered, also with "not supported"
    last_error: str = ""

    def forget(self) -> None:
        """The GPU is lost: after a reset it may support other calls, and its counters restart."""
        self.parts.clear()
        self.pids = ()
        self.unsupported.clear()
        self.slow_at = None
        self.by_link.clear()
        self.queries.clear()
        self.close()

    def close(self) -> None:
        if self.gpm is not None:
            self.gpm.close()
            self.gpm = None


class GpuPoller:
    """Owned by one thread. The slow calls of `num_gpus` GPUs are spread over `slow_seconds`."""

    def __init__(self, pynvml: Any, logged: LoggedOnce, *, num_gpus: int, slow_seconds: float) -> None:
        self._nvml, self._logged = pynvml, logged
        self._errors = errors_of(pynvml)
        self._num_gpus, self._slow_seconds = num_gpus, slow_seconds

    def poll(self, gpu: GpuQueryState, at: float) -> None:
        """Raises:
        GpuLostError: no call succeeds, or NVML reports it.
        CollectorUnavailable: the driver was unloaded.
        """
        gpu.num_answered, gpu.last_error = 0, ""
        self._ask_all(gpu, at)
        if not gpu.num_answered and gpu.last_error:
            raise GpuLostError(gpu.last_error)

    def _ask_all(self, gpu: GpuQueryState, at: float) -> None:
        for calls in FAST:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("fields", lambda _, __: self._fields(gpu, "fields", FAST_FIELDS)),))
        self._ask(gpu, (Call("GPM", lambda _, __: self._gpm(gpu, at)),))
        if gpu.slow_at is None:
            # Spread over the interval, so that only the first poll makes the slow calls of all GPUs.
            gpu.slow_at = at + self._slow_seconds * gpu.index / self._num_gpus
        elif at < gpu.slow_at:
            return
        gpu.slow_at += self._slow_seconds * (1 + (at - gpu.slow_at) // self._slow_seconds)
        for calls in SLOW:
            self._ask(gpu, calls)
        self._ask(gpu, (Call("slow fields", lambda _, __: self._fields(gpu, "slow fields", SLOW_FIELDS)),))
        self._ask(gpu, (Call("NVLinks", lambda _, __: self._links(gpu)),))
        self._ask(gpu, (Call(PROCESSES, lambda _, __: self._processes(gpu)),))

    def _ask(self, gpu: GpuQueryState, calls: tuple[Call, ...]) -> None:
        """Makes the first of `calls` that this GPU and driver support; replaces its previous result.

        Raises:
            GpuLostError: NVML says that the GPU is lost.
            CollectorUnavailable: the driver was unloaded.
        """
        part = calls[0].name
        for call in calls:
            if call.name in gpu.unsupported:
                continue
            try:
                numbers = call.read(self._nvml, gpu.handle)
            except self._errors as e:
                gpu.parts.pop(part, None)
                if not self._is_unsupported(gpu, call.name, e):
                    return
            else:
                gpu.num_answered += 1
                if gpu.parts.get(part) != numbers:
                    gpu.parts[part] = numbers
                return

    def _is_unsupported(self, gpu: GpuQueryState, name: str, error: Exception) -> bool:
        """Whether to skip this call from now on. Any other failure is counted and retried at the next poll."""
        code = code_of(error)
        if code in GONE:
            raise CollectorUnavailable(f"the NVIDIA driver was unloaded: {error}")
        if code in LOST:
            raise GpuLostError(str(error))
        if code in UNSUPPORTED:
            gpu.num_answered += 1
            self._skip(gpu, name, str(error))
            return True
        gpu.last_error = str(error)
        text = error_name(self._nvml, code)
        gpu.errors[text] = gpu.errors.get(text, 0) + 1
        if self._logged.is_new(f"{gpu.index} {name} {code}"):
            logger.warning("GPU %d: %s failed: %s", gpu.index, name, error)
        return False

    def _skip(self, gpu: GpuQueryState, name: str, why: str) -> None:
        gpu.unsupported.add(name)
        if self._logged.is_new(f"{gpu.index} {name}"):
            logger.info("GPU %d: %s skipped: %s", gpu.index, name, why)

    def _fields(self, gpu: GpuQueryState, part: str, fields: Mapping[int, tuple[Key, float]]) -> Numbers:
        numbers: Numbers = {}
        for number, _, value in self._field_values(gpu, part, fields):
            key, scale = fields[number]
            if key == ("recovery_action",):
                wanted = RecoveryAction.of_number(int(value))
                numbers |= {("recovery_action", action): float(action is wanted) for action in RecoveryAction}
            else:
                numbers[key] = value * scale
        return numbers

    def _field_values(
        self, gpu: GpuQueryState, part: str, fields: Iterable[int], num_links: int = 1
    ) -> list[tuple[int, int, float]]:
        """(field, link, value) of the supported fields; unsupported ones are not queried again.

        Raises:
            NVMLError: the call as a whole failed.
        """
        query = gpu.queries.get(part)
        if query is None:
            supported = (f for f in fields if f"field {f}" not in gpu.unsupported)
            query = FieldQuery(self._nvml, ((f, link) for f in supported for link in range(num_links)))
            gpu.queries[part] = query
        found: list[tuple[int, int, float]] = []
        known: set[int] = set()
        refused: dict[int, int] = {}
        for (number, link), (code, value) in zip(query.wanted, query.ask(gpu.handle), strict=True):
            if code == 0:
                known.add(number)
                if value is not None:
                    found.append((number, link, value))
            elif code in LOST:
                raise self._nvml.NVMLError(code)
            elif code in FIELD_UNSUPPORTED:
                refused[number] = code
        for number in refused.keys() - known:  # a link that is down may reject fields that others support
            self._skip(gpu, f"field {number}", error_name(self._nvml, refused[number]))
            gpu.queries.pop(part, None)  # rebuilt without it
        return found

    def _gpm(self, gpu: GpuQueryState, at: float) -> Numbers:
        if gpu.gpm is None:
            gpu.gpm = GpmSampler(self._nvml, gpu.handle)
            if not gpu.gpm.supported:
                gpu.gpm = None
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.gpm.sample(at)

    def _links(self, gpu: GpuQueryState) -> Numbers:
        """State, bytes and errors of all NVLinks: sums, and per link where errors are nonzero."""
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
        for number, link, value in self._field_values(gpu, f"fields of {num_links} links", LINK_FIELDS, num_links):
            key, scale = LINK_FIELDS[number]
            gpu.by_link[link, key] = value * scale  # if two fields have one key, the later one wins
        for (link, key), value in gpu.by_link.items():
            numbers[key] = numbers.get(key, 0.0) + value
            if value and key[0] == ERRORS_SUM:
                numbers[ERRORS_BY_LINK, str(link), key[1]] = value
        return numbers

    def _of_links(
        self, gpu: GpuQueryState, num_links: int, function: str, *arguments: int
    ) -> Iterator[tuple[int, float]]:
        """(link, result) of the links that support the call; if none does, it is not made again.

        Raises:
            NVMLError: any other failure.
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

    def _processes(self, gpu: GpuQueryState) -> Numbers:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        gpu.pids = tuple(p.pid for p in found[:PROCESSES_MAX])
        return {("processes",): len(found)}
