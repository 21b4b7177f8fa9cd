"""Rows of the metric catalogue: kernel log events, and XIDs of kernel log and NVML combined."""

from rolecall.core.metrics.metric import GPU, NODE, Metric, MetricScope, MetricType


def _kernel(name: str, type_: MetricType, unit: str, labels: tuple[str, ...], help_: str) -> Metric:
    full = f"rolecall_{name}"
    return Metric(name=full, type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.KERNEL)


_G, _C = MetricType.GAUGE, MetricType.COUNTER

XID_EVENTS = _kernel(
    "xid_events_total",
    _C,
    "",
    (*GPU, "xid"),
    "XIDs of a GPU (its index, or its PCI address where that is not known); continues across restarts of the agent",
)
XID_LAST = _kernel(
    "xid_last_timestamp_seconds", _G, "seconds", (*GPU, "xid"), "When this XID was last seen, seconds since 1970"
)
XIDS_NOT_COUNTED = _kernel(
    "xid_events_not_counted_total", _C, "", NODE, "XIDs beyond the number of pairs of GPU and code that are kept"
)
SXID_EVENTS = _kernel("nvswitch_errors_total", _C, "", (*NODE, "device", "error"), "SXids of an NVSwitch, by code")
OOM_KILLS = _kernel("kernel_oom_kills_total", _C, "", NODE, "OOM kills in the kernel log")
LINK_DOWNS = _kernel("kernel_link_downs_total", _C, "", (*NODE, "interface"), "Times that the link went down")
HARDWARE_ERRORS = _kernel(
    "kernel_hardware_errors_total",
    _C,
    "",
    (*NODE, "kind", "state"),
    "Hardware errors (machine_check, memory, pcie, firmware), corrected or uncorrected",
)
FAULTS = _kernel(
    "kernel_faults_total", _C, "", (*NODE, "kind"), "Other faults: lockups, hung tasks, disks, NICs and so on"
)
LINES = _kernel("kernel_log_lines_total", _C, "", NODE, "Lines of the kernel log that were read")
LINES_LOST = _kernel(
    "kernel_log_lines_lost_total", _C, "", NODE, "Lines that the kernel overwrote before they could be read"
)

KERNEL_METRICS: tuple[Metric, ...] = (
    *(XID_EVENTS, XID_LAST, XIDS_NOT_COUNTED, SXID_EVENTS, OOM_KILLS, LINK_DOWNS, HARDWARE_ERRORS, FAULTS),
    *(LINES, LINES_LOST),
)
