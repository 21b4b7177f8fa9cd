"""Rows of the metric catalogue: GPUs, read through NVML.

One series per GPU; metrics per NVLink are exported only for links with a fault (a link that is down, an error counted),
so that 8 GPUs of 18 links do not export mostly zeros. A GPU that does not support a metric has no series of it.
"""

from collections.abc import Mapping
from dataclasses import fields

from rolecall.core.metrics.metric import GPU, Metric, MetricScope, row
from rolecall.core.telemetry import GpuSample

_FIELDS = frozenset(f.name for f in fields(GpuSample))


def _gpu(table: Mapping[str, str]) -> tuple[Metric, ...]:
    found = []
    for name, help_ in table.items():
        field = name.removesuffix("_total")
        compared = {"detect": True, "source": field} if field in _FIELDS else {}
        found.append(row(MetricScope.GPU, GPU, f"gpu_{name}", help_, **compared))
    return tuple(found)


MIG_METRICS = tuple(
    row(MetricScope.GPU, (*GPU, "gpu_instance", "compute_instance"), f"gpu_instance_{name}", f"MIG instance: {help_}")
    for name, help_ in {
        "info{uuid,profile}": "1; joins its UUID and its profile",
        "processes": "processes with a context on it",
        "memory_total_bytes": "device memory",
        "memory_used_bytes": "device memory allocated",
        "memory_free_bytes": "device memory free",
        "graphics_active_ratio": "GPM: time in which any compute engine was active",
        "sm_active_ratio": "GPM: share of its SMs that were busy",
        "sm_occupancy_ratio": "GPM: resident warps over the most that fit",
        "tensor_active_ratio": "GPM: time in which tensor cores worked",
        "dram_active_ratio": "GPM: memory bandwidth used over the most there is",
    }.items()
)
"""With MIG enabled. Activity is that of the GPU instance, the same for all compute instances in it."""

GPU_METRICS = (
    *_gpu(
        {
            # state
            "info{uuid,name,version}": "1; joins UUID, product name and the driver's version",
            "up": "1 while NVML calls on the GPU succeed, 0 once none does",
            "calls_unsupported": "NVML calls and fields that this GPU or driver does not support; skipped",
            "call_errors_total{error}": "NVML calls that failed otherwise, by error",
            "mig_enabled": "1: the GPU is divided into MIG instances; activity of the whole GPU is unknown",
            "processes": "Processes with a context on the GPU",
            "rank{role,replica,rank}": "1 for each rank that uses the GPU: joins GPU series with ranks",
            "recovery_action{action}": "1 for the action that the driver recommends for the GPU",
            # activity
            "utilization_ratio": "Time in which any kernel ran; a spinning collective counts as busy",
            "memory_utilization_ratio": "Time in which device memory was read or written",
            "encoder_utilization_ratio": "Time in which the video encoder was busy",
            "decoder_utilization_ratio": "Time in which the video decoder was busy",
            "graphics_active_ratio": "GPM: time in which any compute engine was active",
            "sm_active_ratio": "GPM: share of SMs that were busy",
            "sm_occupancy_ratio": "GPM: resident warps over the most that fit",
            "tensor_active_ratio": "GPM: time in which tensor cores worked; near 0 in a spinning collective",
            "dram_active_ratio": "GPM: memory bandwidth used over the most there is",
            "fp64_active_ratio": "GPM: time in which the FP64 pipe worked",
            "fp32_active_ratio": "GPM: time in which the FP32 pipe worked",
            "fp16_active_ratio": "GPM: time in which the FP16 pipe worked",
            "pcie_transmit_bytes_per_second": "GPM: sent over PCIe since the previous poll",
            "pcie_receive_bytes_per_second": "GPM: received over PCIe since the previous poll",
            "nvlink_transmit_bytes_per_second": "GPM: sent over all NVLinks",
            "nvlink_receive_bytes_per_second": "GPM: received over all NVLinks",
            # memory
            "memory_total_bytes": "Device memory",
            "memory_used_bytes": "Device memory allocated",
            "memory_free_bytes": "Device memory free",
            "memory_reserved_bytes": "Device memory that the driver keeps for itself",
            "ecc_errors_total{error}": "Memory errors since the driver was loaded: corrected, uncorrected",
            "ecc_lifetime_errors_total{error}": "Memory errors in the life of the GPU: corrected, uncorrected",
            "sram_threshold_exceeded": "1: uncorrectable SRAM errors passed the limit at which to replace the GPU",
            "remapped_rows_total{error}": "Memory rows replaced by spare ones, by the errors that led to it",
            "remapped_rows_pending": "1: a remapping waits for the GPU's reset",
            "remapped_rows_failed": "1: a remapping failed, the GPU is to be replaced",
            # power, temperature, clocks
            "power_watts": "Power drawn",
            "power_limit_watts": "Power limit in force",
            "energy_joules_total": "Energy drawn since the driver was loaded",
            "temperature_celsius": "Temperature of the GPU",
            "memory_temperature_celsius": "Temperature of the device memory",
            "sm_clock_hertz": "Clock of the SMs",
            "sm_clock_max_hertz": "Highest clock of the SMs",
            "memory_clock_hertz": "Clock of the device memory",
            "throttle_active{reason}": "1 while clocks are throttled for the reason; `idle` is no fault",
            "thermal_throttle_seconds_total": "Time in which heat held clocks down, of the GPU or around it",
            "power_throttle_seconds_total": "Time in which the power limit or a power brake held clocks down",
            "throttle_seconds_total{reason}": "Time in which clocks were held down, by reason",
            # links
            "pcie_link_generation": "PCIe generation in use; an idle GPU lowers it",
            "pcie_link_generation_max": "PCIe generation supported by GPU and slot",
            "pcie_link_width": "PCIe lanes in use",
            "pcie_link_width_max": "PCIe lanes supported by GPU and slot",
            "pcie_replays_total": "PCIe packets sent again",
            "pcie_errors_total{error}": "PCIe errors, by kind",
            "pcie_transmit_bytes_total": "Sent over PCIe",
            "pcie_receive_bytes_total": "Received over PCIe",
            "nvlinks": "NVLinks that the GPU has",
            "nvlinks_active": "NVLinks that are up",
            "nvlink_down{link}": "1 for each NVLink that is down, or not wired; one that is up has no series",
            "nvlink_transmit_bytes_total": "Sent over all NVLinks",
            "nvlink_receive_bytes_total": "Received over all NVLinks",
            "nvlink_errors_total{error}": "NVLink errors over all links, by kind",
            "nvlink_link_errors_total{link,error}": "The same by link, where not zero",
            "fabric_state{state}": "1 for the state of the GPU's registration with the NVLink fabric",
            "fabric_fault{error}": "1 while the fabric reports this fault, by kind",
        }
    ),
    *MIG_METRICS,
)
"""XIDs are in `kernel.py`, because both of their sources are counted once."""
