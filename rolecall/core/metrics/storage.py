"""Rows of the metric catalogue: disks, file systems and I/O stalls."""

from rolecall.core.metrics.metric import NODE, Metric, MetricScope, MetricType

_G, _C = MetricType.GAUGE, MetricType.COUNTER
_DISK = (*NODE, "device")
_MOUNT = (*NODE, "mount")


def _metric(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...]) -> Metric:
    return Metric(
        name=f"rolecall_{name}", type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.STORAGE
    )


STORAGE_METRICS: tuple[Metric, ...] = (
    _metric("disk_reads_total", _C, "", "Reads finished", _DISK),
    _metric("disk_writes_total", _C, "", "Writes finished", _DISK),
    _metric("disk_read_bytes_total", _C, "bytes", "Bytes read", _DISK),
    _metric("disk_written_bytes_total", _C, "bytes", "Bytes written", _DISK),
    _metric("disk_read_seconds_total", _C, "seconds", "Time that reads took, summed over reads", _DISK),
    _metric("disk_write_seconds_total", _C, "seconds", "Time that writes took, summed over writes", _DISK),
    _metric("disk_busy_seconds_total", _C, "seconds", "Time in which the disk was busy", _DISK),
    _metric("disk_requests_active", _G, "", "Reads and writes in progress", _DISK),
    _metric("filesystem_up", _G, "", "1 if the file system answers, 0 if it fails or hangs", _MOUNT),
    _metric("filesystem_size_bytes", _G, "bytes", "Size of the file system", _MOUNT),
    _metric("filesystem_available_bytes", _G, "bytes", "Space available to unprivileged users", _MOUNT),
    _metric("filesystem_files", _G, "", "Files that the file system can hold; absent where there is no limit", _MOUNT),
    _metric("filesystem_files_free", _G, "", "Files that can still be made; absent where there is no limit", _MOUNT),
    _metric("filesystem_readonly", _G, "", "1 if nothing can be written to it", _MOUNT),
    _metric(
        "host_io_stall_seconds_total",
        _C,
        "seconds",
        "Time in which some task waited for a disk (PSI); absent where the kernel has none",
        NODE,
    ),
    _metric(
        "host_full_stall_seconds_total",
        _C,
        "seconds",
        "Time in which all tasks that had work waited for the resource at once (PSI): cpu, memory or io",
        (*NODE, "resource"),
    ),
)
