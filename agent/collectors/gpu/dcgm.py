"""GPU metrics under dcgm-exporter's names, so that dashboards made for it work: lines for `/metrics/dcgm`.

Names, units, label order and label spelling: NVIDIA/dcgm-exporter (`etc/default-counters.csv` and its templates). They
follow neither Prometheus's naming rules nor ours and so have a separate page. Made from the numbers of `queries.py`,
converted from base units to DCGM's (MHz, MiB, mJ, ns, percent).

DCGM_FI_DEV_XID_ERRORS is a gauge of the last code: it never returns to 0, and a repeated code is invisible.
Counts are in `rolecall_xid_events_total`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolecall.agent.collectors.gpu.nvml import GpuId
from rolecall.agent.collectors.gpu.queries import Key


@dataclass(frozen=True, slots=True)
class DcgmSeries:
    name: str
    type: str
    help: str
    key: Key
    scale: float = 1.0


_MEBI = 1.0 / (1 << 20)


def _gauge(name: str, help_: str, *key: str, scale: float = 1.0) -> DcgmSeries:
    return DcgmSeries(f"DCGM_FI_{name}", "gauge", help_, key, scale)


def _counter(name: str, help_: str, *key: str, scale: float = 1.0) -> DcgmSeries:
    return DcgmSeries(f"DCGM_FI_{name}", "counter", help_, key, scale)


_THROTTLING = {
    "POWER": ("power", "sw_power_cap"),
    "THERMAL": ("thermal", "thermal"),
    "SYNC_BOOST": ("sync-boost", "sync_boost"),
    "BOARD_LIMIT": ("board limit", "board_limit"),
    "RELIABILITY": ("reliability", "reliability"),
}
"""DCGM's name to its words and our label."""
_LINK_ERRORS = {
    "crc_flit": "flow-control CRC errors",
    "crc_data": "data CRC errors",
    "replay": "retries",
    "recovery": "recovery errors",
}
SERIES: tuple[DcgmSeries, ...] = (
    _gauge("DEV_SM_CLOCK", "SM clock frequency (in MHz).", "sm_clock_hertz", scale=1e-6),
    _gauge("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", "memory_clock_hertz", scale=1e-6),
    _gauge("DEV_MEMORY_TEMP", "Memory temperature (in C).", "memory_temperature_celsius"),
    _gauge("DEV_GPU_TEMP", "GPU temperature (in C).", "temperature_celsius"),
    _gauge("DEV_POWER_USAGE", "Power draw (in W).", "power_watts"),
    _counter(
        "DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).", "energy_joules_total", scale=1e3
    ),
    _counter("DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", "pcie_replays_total"),
    _gauge("DEV_GPU_UTIL", "GPU utilization (in %).", "utilization_ratio", scale=100),
    _gauge("DEV_MEM_COPY_UTIL", "Memory utilization (in %).", "memory_utilization_ratio", scale=100),
    _gauge("DEV_ENC_UTIL", "Encoder utilization (in %).", "encoder_utilization_ratio", scale=100),
    _gauge("DEV_DEC_UTIL", "Decoder utilization (in %).", "decoder_utilization_ratio", scale=100),
    _gauge("DEV_FB_FREE", "Framebuffer memory free (in MiB).", "memory_free_bytes", scale=_MEBI),
    _gauge("DEV_FB_USED", "Framebuffer memory used (in MiB).", "memory_used_bytes", scale=_MEBI),
    _gauge("DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", "memory_reserved_bytes", scale=_MEBI),
    _gauge(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        "remapped_rows_total",
        "uncorrected",
    ),
    _gauge(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        "remapped_rows_total",
        "corrected",
    ),
    _gauge("DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed", "remapped_rows_failed"),
    _gauge("DEV_ROW_REMAP_PENDING", "Whether a row remap is pending", "remapped_rows_pending"),
    _counter(
        "DEV_ECC_SBE_VOL_TOTAL", "Total number of single-bit volatile ECC errors.", "ecc_errors_total", "corrected"
    ),
    _counter(
        "DEV_ECC_DBE_VOL_TOTAL", "Total number of double-bit volatile ECC errors.", "ecc_errors_total", "uncorrected"
    ),
    _counter(
        "DEV_ECC_SBE_AGG_TOTAL",
        "Total number of single-bit persistent ECC errors.",
        "ecc_lifetime_errors_total",
        "corrected",
    ),
    _counter(
        "DEV_ECC_DBE_AGG_TOTAL",
        "Total number of double-bit persistent ECC errors.",
        "ecc_lifetime_errors_total",
        "uncorrected",
    ),
    *(
        _counter(
            f"DEV_{name}_VIOLATION",
            f"Throttling duration due to {cause} constraints (in ns).",
            *("throttle_seconds_total", reason),
            scale=1e9,
        )
        for name, (cause, reason) in _THROTTLING.items()
    ),
    *(
        _counter(
            f"DEV_NVLINK_{error.upper()}_ERROR_COUNT_TOTAL",
            f"Total number of NVLink {what}.",
            *("nvlink_errors_total", error),
        )
        for error, what in _LINK_ERRORS.items()
    ),
    _gauge("PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", "graphics_active_ratio"),
    _gauge("PROF_SM_ACTIVE", "The ratio of cycles an SM has work assigned.", "sm_active_ratio"),
    _gauge("PROF_SM_OCCUPANCY", "The ratio of warps resident on an SM.", "sm_occupancy_ratio"),
    _gauge("PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor pipe is active.", "tensor_active_ratio"),
    _gauge("PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface is active.", "dram_active_ratio"),
    _gauge("PROF_PIPE_FP64_ACTIVE", "Ratio of cycles the fp64 pipe is active.", "fp64_active_ratio"),
    _gauge("PROF_PIPE_FP32_ACTIVE", "Ratio of cycles the fp32 pipe is active.", "fp32_active_ratio"),
    _gauge("PROF_PIPE_FP16_ACTIVE", "Ratio of cycles the fp16 pipe is active.", "fp16_active_ratio"),
    _gauge(
        "PROF_PCIE_TX_BYTES",
        "Rate of data transmitted over PCIe (in bytes per second).",
        "pcie_transmit_bytes_per_second",
    ),
    _gauge(
        "PROF_PCIE_RX_BYTES", "Rate of data received over PCIe (in bytes per second).", "pcie_receive_bytes_per_second"
    ),
)

NVLINK_BANDWIDTH = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
"""Sum of both directions, in MiB/s as in DCGM."""
XID = "DCGM_FI_DEV_XID_ERRORS"

_LINK_SERIES = {error: f"DCGM_FI_DEV_NVLINK_{error.upper()}_ERROR_COUNT_L" for error in _LINK_ERRORS}
"""By link, only nonzero counts."""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def label_text(gpu: GpuId, hostname: str, driver: str, profile: str = "", gpu_instance: int | None = None) -> str:
    """The labels of one GPU, or of one of its MIG instances, as in each of its lines, without braces."""
    labels = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": f"nvidia{gpu.minor}",
        "modelName": gpu.name,
        **({} if gpu_instance is None else {"GPU_I_PROFILE": profile, "GPU_I_ID": str(gpu_instance)}),
        "hostname": hostname,
        "DCGM_FI_DRIVER_VERSION": driver,
    }
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


@dataclass(frozen=True, slots=True)
class GpuNumbers:
    """One GPU: `labels` from `label_text`, numbers by key, the last XID (0: none; None: a MIG instance, XIDs are not
    attributed to instances) and its mnemonic."""

    labels: str
    numbers: Mapping[Key, float]
    xid: int | None = 0
    xid_text: str = ""


def _head(name: str, type_: str, help_: str) -> str:
    return f"# HELP {name} {help_}\n# TYPE {name} {type_}\n"


_HEADS = {s.name: _head(s.name, s.type, s.help) for s in SERIES}
_NVLINK_HEAD = _head(NVLINK_BANDWIDTH, "gauge", "Total NVLink bandwidth of all links (in MiB/s).")
_XID_HEAD = _head(XID, "gauge", "Value of the last XID error encountered.")


def _text(number: float) -> str:
    """Without exponent: counters in ns and mJ exceed 10^15, and scaled ratios have rounding errors."""
    rounded = round(number, 6)
    return str(int(rounded)) if rounded == int(rounded) else repr(rounded)


def render(gpus: Iterable[GpuNumbers]) -> str:
    """All series of all GPUs, each with HELP and TYPE; series without a value are omitted."""
    gpus = tuple(gpus)
    parts: list[str] = []
    for s in SERIES:
        key, scale, name = s.key, s.scale, s.name
        lines = [
            f"{name}{{{g.labels}}} {_text(number * scale)}\n"
            for g in gpus
            if (number := g.numbers.get(key)) is not None
        ]
        if lines:
            parts.append(_HEADS[name])
            parts += lines
    parts += _nvlink(gpus)
    if gpus:
        parts.append(_XID_HEAD)
        parts += (
            f'{XID}{{{g.labels},err_code="{g.xid}",err_msg="{_escaped(g.xid_text or "No Error")}"}} {g.xid}\n'
            for g in gpus
            if g.xid is not None
        )
    return "".join(parts)


def _nvlink(gpus: Iterable[GpuNumbers]) -> Iterable[str]:
    bandwidth: list[str] = []
    links: dict[str, list[str]] = {}
    for gpu in gpus:
        sent = gpu.numbers.get(("nvlink_transmit_bytes_per_second",))
        received = gpu.numbers.get(("nvlink_receive_bytes_per_second",))
        if sent is not None and received is not None:
            bandwidth.append(f"{NVLINK_BANDWIDTH}{{{gpu.labels}}} {_text((sent + received) * _MEBI)}\n")
        for key, number in gpu.numbers.items():
            if key[0] == "nvlink_link_errors_total" and number and key[2] in _LINK_SERIES:
                name = _LINK_SERIES[key[2]] + key[1]
                links.setdefault(name, []).append(f"{name}{{{gpu.labels}}} {_text(number)}\n")
    if bandwidth:
        yield _NVLINK_HEAD
        yield from bandwidth
    for name, lines in sorted(links.items()):
        yield _head(name, "counter", "NVLink errors of one link.")
        yield from lines
