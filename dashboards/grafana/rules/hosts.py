"""Alerts on hosts: hardware errors and file systems."""

from rolecall.dashboards.grafana.rules.rule import Alert, RuleGroup, Severity

GROUP = RuleGroup(
    name="rolecall-hosts",
    rules=(
        Alert(
            name="RolecallHardwareError",
            expr="""(rolecall_kernel_hardware_errors_total{state="uncorrected"}
            - (rolecall_kernel_hardware_errors_total{state="uncorrected"} offset 15m
            or rolecall_kernel_hardware_errors_total{state="uncorrected"} * 0)) > 0""",
            severity=Severity.WARNING,
            summary="Uncorrected hardware error ({{ $labels.kind }}) on {{ $labels.node }}",
            description="The kernel logged {{ $value }} uncorrected error(s) in the last 15 minutes.",
        ),
        Alert(
            name="RolecallDiskFull",
            expr="""rolecall_filesystem_available_bytes / rolecall_filesystem_size_bytes < 0.05
            or rolecall_filesystem_files_free / rolecall_filesystem_files < 0.05""",
            hold="2m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.mount }} on {{ $labels.node }} has {{ $value | humanizePercentage }} left",
            description="The file system is running out of space or inodes. Checkpoints, logs and the journal will "
            "fail to write.",
        ),
        Alert(
            name="RolecallFilesystemUnavailable",
            expr="""rolecall_filesystem_up == 0
            or (rolecall_filesystem_readonly == 1
            and min_over_time(rolecall_filesystem_readonly[6h]) == 0)""",
            hold="1m",
            severity=Severity.CRITICAL,
            summary="{{ $labels.mount }} on {{ $labels.node }} is unavailable",
            description="The file system fails, hangs, or became read-only within the last six hours. Processes that "
            "write to it hang or crash.",
        ),
    ),
)
