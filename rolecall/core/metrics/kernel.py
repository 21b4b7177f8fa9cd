"""Rows of the metric catalogue: kernel log events, and XIDs of kernel log and NVML combined."""

from rolecall.core.metrics.metric import NODE, Metric, MetricScope, row


def _kernel(name: str, help_: str) -> Metric:
    return row(MetricScope.KERNEL, NODE, name, help_)


XID_EVENTS = _kernel(
    "xid_events_total{gpu,xid}",
    "XIDs of a GPU (its index, or its PCI address where that is not known); continues across restarts of the agent",
)
XID_LAST = _kernel("xid_last_timestamp_seconds{gpu,xid}", "When this XID was last seen, seconds since 1970")
XIDS_NOT_COUNTED = _kernel(
    "xid_events_not_counted_total", "XIDs beyond the number of pairs of GPU and code that are kept"
)
SXID_EVENTS = _kernel("nvswitch_errors_total{device,error}", "SXids of an NVSwitch, by code")
OOM_KILLS = _kernel("kernel_oom_kills_total", "OOM kills in the kernel log")
LINK_DOWNS = _kernel("kernel_link_downs_total{interface}", "Times that the link went down")
HARDWARE_ERRORS = _kernel(
    "kernel_hardware_errors_total{kind,state}",
    "Hardware errors (machine_check, memory, pcie, firmware), corrected or uncorrected",
)
FAULTS = _kernel("kernel_faults_total{kind}", "Other faults: lockups, hung tasks, disks, NICs and so on")
LINES = _kernel("kernel_log_lines_total", "Lines of the kernel log that were read")
LINES_LOST = _kernel("kernel_log_lines_lost_total", "Lines that the kernel overwrote before they could be read")

KERNEL_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every row above, in order."""
