"""Rows of the metric catalogue: GPUs, read through NVML.

One series of a kind for each GPU; what is per NVLink is exported only for links with a fault (a link that is
down, an error counted), so that 8 GPUs of 18 links do not make a page of zeros. A GPU that does not support a metric
has no series of it.
"""

from rolecall.core.metrics.metric import GPU, Metric, MetricScope, MetricType

_G, _C = MetricType.GAUGE, MetricType.COUNTER


def _gpu(name: str, type_: MetricType, unit: str, help_: str, *labels: str, source: str = "") -> Metric:
    """`source`: field of GpuSample, of what ranks are compared in."""
    return Metric(
        name=f"rolecall_gpu_{name}",
        type=type_,
        unit=unit,
        help=help_,
        labels=(*GPU, *labels),
        subject=MetricScope.GPU,
        detect=bool(source),
        source=source,
    )


def _compared(field: str, type_: MetricType, unit: str, help_: str) -> Metric:
    """What ranks are compared in: named as the field of GpuSample that holds it."""
    return _gpu(f"{field}_total" if type_ is MetricType.COUNTER else field, type_, unit, help_, source=field)


_STATE = (
    _gpu("info", _G, "", "1; joins UUID, product name and the driver's version", "uuid", "name", "version"),
    _gpu("up", _G, "", "1 while NVML calls on the GPU succeed, 0 once none does"),
    _gpu("calls_unsupported", _G, "", "NVML calls and fields that this GPU or driver does not support; skipped"),
    _gpu("call_errors_total", _C, "", "NVML calls that failed otherwise, by error", "error"),
    _gpu("mig_enabled", _G, "", "1: the GPU is divided into MIG instances; activity of the whole GPU is unknown"),
    _gpu("processes", _G, "", "Processes with a context on the GPU"),
    _gpu("rank", _G, "", "1 for each rank that uses the GPU: joins GPU series with ranks", "role", "replica", "rank"),
    _gpu("recovery_action", _G, "", "1 for the action that the driver recommends for the GPU", "action"),
)

_ACTIVITY = (
    _compared("utilization_ratio", _G, "ratio", "Time in which any kernel ran; a spinning collective counts as busy"),
    _gpu("memory_utilization_ratio", _G, "ratio", "Time in which device memory was read or written"),
    _gpu("encoder_utilization_ratio", _G, "ratio", "Time in which the video encoder was busy"),
    _gpu("decoder_utilization_ratio", _G, "ratio", "Time in which the video decoder was busy"),
    _gpu("graphics_active_ratio", _G, "ratio", "GPM: time in which any compute engine was active"),
    _compared("sm_active_ratio", _G, "ratio", "GPM: share of SMs that were busy"),
    _gpu("sm_occupancy_ratio", _G, "ratio", "GPM: resident warps over the most that fit"),
    _compared(
        "tensor_active_ratio", _G, "ratio", "GPM: time in which tensor cores worked; near 0 in a spinning collective"
    ),
    _compared("dram_active_ratio", _G, "ratio", "GPM: memory bandwidth used over the most there is"),
    _gpu("fp64_active_ratio", _G, "ratio", "GPM: time in which the FP64 pipe worked"),
    _gpu("fp32_active_ratio", _G, "ratio", "GPM: time in which the FP32 pipe worked"),
    _gpu("fp16_active_ratio", _G, "ratio", "GPM: time in which the FP16 pipe worked"),
    _compared("pcie_transmit_bytes_per_second", _G, "bytes_per_second", "GPM: sent over PCIe since the previous poll"),
    _compared(
        "pcie_receive_bytes_per_second", _G, "bytes_per_second", "GPM: received over PCIe since the previous poll"
    ),
    _compared("nvlink_transmit_bytes_per_second", _G, "bytes_per_second", "GPM: sent over all NVLinks"),
    _compared("nvlink_receive_bytes_per_second", _G, "bytes_per_second", "GPM: received over all NVLinks"),
)

_MEMORY = (
    _gpu("memory_total_bytes", _G, "bytes", "Device memory"),
    _compared("memory_used_bytes", _G, "bytes", "Device memory allocated"),
    _gpu("memory_free_bytes", _G, "bytes", "Device memory free"),
    _gpu("memory_reserved_bytes", _G, "bytes", "Device memory that the driver keeps for itself"),
    _gpu("ecc_errors_total", _C, "", "Memory errors since the driver was loaded: corrected, uncorrected", "error"),
    _gpu("ecc_lifetime_errors_total", _C, "", "Memory errors in the life of the GPU: corrected, uncorrected", "error"),
    _gpu(
        "sram_threshold_exceeded", _G, "", "1: uncorrectable SRAM errors passed the limit at which to replace the GPU"
    ),
    _gpu("remapped_rows_total", _C, "", "Memory rows replaced by spare ones, by the errors that led to it", "error"),
    _gpu("remapped_rows_pending", _G, "", "1: a remapping waits for the GPU's reset"),
    _gpu("remapped_rows_failed", _G, "", "1: a remapping failed, the GPU is to be replaced"),
)

_POWER = (
    _compared("power_watts", _G, "watts", "Power drawn"),
    _gpu("power_limit_watts", _G, "watts", "Power limit in force"),
    _gpu("energy_joules_total", _C, "joules", "Energy drawn since the driver was loaded"),
    _compared("temperature_celsius", _G, "celsius", "Temperature of the GPU"),
    _compared("memory_temperature_celsius", _G, "celsius", "Temperature of the device memory"),
    _compared("sm_clock_hertz", _G, "hertz", "Clock of the SMs"),
    _gpu("sm_clock_max_hertz", _G, "hertz", "Highest clock of the SMs"),
    _gpu("memory_clock_hertz", _G, "hertz", "Clock of the device memory"),
    _gpu("throttle_active", _G, "", "1 while clocks are throttled for the reason; `idle` is no fault", "reason"),
    _compared(
        "thermal_throttle_seconds", _C, "seconds", "Time in which heat held clocks down, of the GPU or around it"
    ),
    _compared(
        "power_throttle_seconds", _C, "seconds", "Time in which the power limit or a power brake held clocks down"
    ),
    _gpu("throttle_seconds_total", _C, "seconds", "Time in which clocks were held down, by reason", "reason"),
)

_LINKS = (
    _gpu("pcie_link_generation", _G, "", "PCIe generation in use; an idle GPU lowers it"),
    _gpu("pcie_link_generation_max", _G, "", "PCIe generation supported by GPU and slot"),
    _gpu("pcie_link_width", _G, "", "PCIe lanes in use"),
    _gpu("pcie_link_width_max", _G, "", "PCIe lanes supported by GPU and slot"),
    _gpu("pcie_replays_total", _C, "", "PCIe packets sent again"),
    _gpu("pcie_errors_total", _C, "", "PCIe errors, by kind", "error"),
    _gpu("pcie_transmit_bytes_total", _C, "bytes", "Sent over PCIe"),
    _gpu("pcie_receive_bytes_total", _C, "bytes", "Received over PCIe"),
    _gpu("nvlinks", _G, "", "NVLinks that the GPU has"),
    _gpu("nvlinks_active", _G, "", "NVLinks that are up"),
    _gpu("nvlink_down", _G, "", "1 for each NVLink that is down, or not wired; one that is up has no series", "link"),
    _gpu("nvlink_transmit_bytes_total", _C, "bytes", "Sent over all NVLinks"),
    _gpu("nvlink_receive_bytes_total", _C, "bytes", "Received over all NVLinks"),
    _gpu("nvlink_errors_total", _C, "", "NVLink errors over all links, by kind", "error"),
    _gpu("nvlink_link_errors_total", _C, "", "The same by link, where not zero", "link", "error"),
    _gpu("fabric_state", _G, "", "1 for the state of the GPU's registration with the NVLink fabric", "state"),
    _gpu("fabric_fault", _G, "", "1 while the fabric reports this fault, by kind", "error"),
)


def _instance(name: str, unit: str, help_: str, *labels: str) -> Metric:
    return _gpu(f"instance_{name}", _G, unit, f"MIG instance: {help_}", "gpu_instance", "compute_instance", *labels)


MIG_METRICS = (
    _instance("info", "", "1; joins its UUID and its profile", "uuid", "profile"),
    _instance("processes", "", "processes with a context on it"),
    _instance("memory_total_bytes", "bytes", "device memory"),
    _instance("memory_used_bytes", "bytes", "device memory allocated"),
    _instance("memory_free_bytes", "bytes", "device memory free"),
    _instance("graphics_active_ratio", "ratio", "GPM: time in which any compute engine was active"),
    _instance("sm_active_ratio", "ratio", "GPM: share of its SMs that were busy"),
    _instance("sm_occupancy_ratio", "ratio", "GPM: resident warps over the most that fit"),
    _instance("tensor_active_ratio", "ratio", "GPM: time in which tensor cores worked"),
    _instance("dram_active_ratio", "ratio", "GPM: memory bandwidth used over the most there is"),
)
"""With MIG enabled. Activity is that of the GPU instance, the same for all compute instances in it."""

GPU_METRICS: tuple[Metric, ...] = (*_STATE, *_ACTIVITY, *_MEMORY, *_POWER, *_LINKS, *MIG_METRICS)
"""XIDs are in `kernel.py`, where both of their sources are counted once."""
