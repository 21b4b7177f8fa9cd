"""NVML calls for each GPU: one row per call, converted to numbers in base units.

A key is the metric's name without `rolecall_gpu_`, followed by its labels after node and gpu. Both the catalogue's
values (`collector.py`) and dcgm-exporter's lines (`dcgm.py`) are made from these. FAST calls are made at each poll,
SLOW ones every few seconds: values that change only with faults, or not within a training step.

Units and meaning: nvml.h of NVIDIA, as declared by nvidia-ml-py.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.agent.collectors.gpu.nvml import Handle

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


def _mig(nvml: Any, gpu: Handle) -> Numbers:
    return {("mig_enabled",): float(nvml.nvmlDeviceGetMigMode(gpu)[0])}


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
    (Call("nvmlDeviceGetMigMode", _mig),),
    (_ecc("ecc_errors_total", 0),),
    (_ecc("ecc_lifetime_errors_total", 1),),
    (Call("nvmlDeviceGetSramEccErrorStatus", _sram),),
    (Call("nvmlDeviceGetRemappedRows", _remapped),),
    (Call("nvmlDeviceGetGpuFabricInfoV(3)", _fabric), Call("nvmlDeviceGetGpuFabricInfoV(2)", _fabric_v2)),
)

# --- field values: many in one call, each with its own return code

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
