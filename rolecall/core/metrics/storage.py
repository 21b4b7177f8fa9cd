"""Rows of the metric catalogue: disks, file systems and I/O stalls."""

from rolecall.core.metrics.metric import NODE, MetricScope, rows

STORAGE_METRICS = rows(
    MetricScope.STORAGE,
    NODE,
    {
        "disk_reads_total{device}": "Reads finished",
        "disk_writes_total{device}": "Writes finished",
        "disk_read_bytes_total{device}": "Bytes read",
        "disk_written_bytes_total{device}": "Bytes written",
        "disk_read_seconds_total{device}": "Time that reads took, summed over reads",
        "disk_write_seconds_total{device}": "Time that writes took, summed over writes",
        "disk_busy_seconds_total{device}": "Time in which the disk was busy",
        "disk_requests_active{device}": "Reads and writes in progress",
        "filesystem_up{mount}": "1 if the file system answers, 0 if it fails or hangs",
        "filesystem_size_bytes{mount}": "Size of the file system",
        "filesystem_available_bytes{mount}": "Space available to unprivileged users",
        "filesystem_files{mount}": "Files that the file system can hold; absent where there is no limit",
        "filesystem_files_free{mount}": "Files that can still be made; absent where there is no limit",
        "filesystem_readonly{mount}": "1 if nothing can be written to it",
        "host_io_stall_seconds_total": "Time in which some task waited for a disk (PSI); absent where the kernel has "
        "none",
        "host_full_stall_seconds_total{resource}": "Time in which all tasks that had work waited for the resource at "
        "once (PSI): cpu, memory or io",
    },
)
