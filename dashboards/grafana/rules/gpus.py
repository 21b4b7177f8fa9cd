"""Alerts on GPUs, NVLink and NVSwitch. Thresholds follow NVIDIA's catalogue, NVSentinel and ByteRobust.

The watch opens incidents for faults that hurt its run. These alerts cover hardware that needs service, also when no run
uses it.
"""

from rolecall.dashboards.grafana.rules.rule import GPU_OF_NODE, Alert, RuleGroup, Severity
from rolecall.formats.xid.xid import SXIDS, XIDS

HARMLESS_XIDS = "|".join(str(code) for code, one in sorted(XIDS.items()) if not one.fatal)
"""Application errors and informational codes. A code that no catalogue lists is not among them."""
FATAL_SXIDS = "|".join(str(code) for code, one in sorted(SXIDS.items()) if one.fatal)

GROUP = RuleGroup(
    name="rolecall-gpus",
    rules=(
        Alert(
            name="RolecallGpuLost",
            expr="rolecall_gpu_up == 0",
            hold="30s",
            severity=Severity.CRITICAL,
            summary=f"{GPU_OF_NODE} is lost",
            description="All NVML calls on it fail: it fell off the bus, or the driver gave it up.",
        ),
        Alert(
            name="RolecallXid",
            expr=f'time() - rolecall_xid_last_timestamp_seconds{{xid!~"{HARMLESS_XIDS}"}} < 900',
            severity=Severity.CRITICAL,
            summary=f"XID {{{{ $labels.xid }}}} on {GPU_OF_NODE}",
            description="Reported {{ $value | humanizeDuration }} ago. NVIDIA's catalogue requires an action for this "
            "code; `rolecall diagnose` on the kernel log shows which.",
        ),
        Alert(
            name="RolecallNvswitchError",
            expr=f"""(rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}}
            - (rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} offset 15m or
            rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} * 0)) > 0""",
            severity=Severity.CRITICAL,
            summary="Fatal SXid {{ $labels.error }} of {{ $labels.device }} on {{ $labels.node }}",
            description="A fatal NVSwitch error affects every GPU on that link and can disable NVLink on the node.",
        ),
        Alert(
            name="RolecallGpuResetNeeded",
            expr='rolecall_gpu_remapped_rows_pending == 1 or rolecall_gpu_recovery_action{action!="none"} == 1',
            hold="1m",
            severity=Severity.WARNING,
            summary=f"{GPU_OF_NODE} needs a reset",
            description="A memory row remap is pending, or the driver recommends {{ $labels.action }}. The GPU keeps "
            "working until then.",
        ),
        Alert(
            name="RolecallGpuReplacementNeeded",
            expr="rolecall_gpu_remapped_rows_failed == 1 or rolecall_gpu_sram_threshold_exceeded == 1",
            hold="1m",
            severity=Severity.CRITICAL,
            summary=f"{GPU_OF_NODE} must be replaced",
            description="Its memory cannot be repaired: row remapping failed, or SRAM errors exceeded NVIDIA's "
            "threshold.",
        ),
        Alert(
            name="RolecallGpuThrottled",
            expr="rate(rolecall_gpu_thermal_throttle_seconds_total[10m]) > 0.2",
            hold="10m",
            severity=Severity.WARNING,
            summary=f"{GPU_OF_NODE} is thermally throttled",
            description="Its clocks are throttled {{ $value | humanizePercentage }} of the time. In synchronous "
            "training every rank waits for it.",
        ),
        Alert(
            name="RolecallNvlinkDown",
            expr="""rolecall_gpu_nvlinks_active
            < on (job, instance, node) group_left max by (job, instance, node) (rolecall_gpu_nvlinks_active)""",
            hold="2m",
            severity=Severity.WARNING,
            summary=f"{GPU_OF_NODE} has fewer active NVLinks than its neighbours",
            description="{{ $value }} links are up, other GPUs of the node have more. Collectives run at the speed of "
            "the slowest GPU.",
        ),
    ),
)
