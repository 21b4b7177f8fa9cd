"""Alerts on agents and on what they see of their nodes: GPUs, links, disks.

The watch makes incidents of what hurts its run. These are for what wants hands, or hurts nobody yet; thresholds follow
NVIDIA's catalogue, NVSentinel and ByteRobust where they name one. Codes and names come from the catalogues.
"""

from rolecall.dashboards.grafana.rules.rule import AGENT_JOBS, Alert, RuleGroup, Severity
from rolecall.formats.xid.xid import SXIDS, XIDS

HARMLESS_XIDS = "|".join(str(code) for code, one in sorted(XIDS.items()) if not one.fatal)
"""Application errors and what is only counted. A code that no catalogue knows is not among them."""
FATAL_SXIDS = "|".join(str(code) for code, one in sorted(SXIDS.items()) if one.fatal)
FATAL_PORT_EVENTS = "excessive_buffer_overrun_errors|local_link_integrity_errors|rnr_nak_retry_err"
"""Fatal on any increase (NVSentinel). A port that went down is RolecallLinkDown and RolecallLinkFlaps."""
GPU_OF_NODE = "GPU {{ $labels.gpu }} of {{ $labels.node }}"

_AGENTS = (
    Alert(
        name="RolecallAgentDown",
        expr=f'up{{job=~"{AGENT_JOBS}"}} == 0',
        hold="2m",
        severity=Severity.WARNING,
        summary="the agent at {{ $labels.instance }} does not answer",
        description="Prometheus has not reached it for two minutes. The agent is dead, or the whole node.",
    ),
    Alert(
        name="RolecallAgentStalled",
        expr="increase(rolecall_agent_rounds_total[2m]) == 0",
        hold="1m",
        severity=Severity.WARNING,
        summary="the agent of {{ $labels.node }} answers, but looks no more",
        description="It has finished no round for two minutes; what it serves is old.",
    ),
    Alert(
        name="RolecallAgentLags",
        expr="rolecall_agent_round_seconds > 2",
        hold="5m",
        severity=Severity.WARNING,
        summary="the agent of {{ $labels.node }} lags",
        description="A round takes {{ $value | humanizeDuration }}; milliseconds are usual. The node has no CPU left for "
        "it, or something that it reads is slow.",
    ),
    Alert(
        name="RolecallProbeDown",
        expr='rolecall_probe_up{probe!~"nccl_ras|nccl_inspector|vllm"} == 0',
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }}: {{ $labels.probe }} cannot be read",
        description="For ten minutes: faults that only {{ $labels.probe }} would show stay unseen on that node.",
    ),
    Alert(
        name="RolecallClockAhead",
        expr="max by (job, instance, node) (rolecall_process_progress_timestamp_seconds) - time() > 5",
        hold="5m",
        severity=Severity.WARNING,
        summary="the clock of {{ $labels.node }} is {{ $value | humanizeDuration }} ahead",
        description="Work there was finished in Prometheus' future: one of the two clocks is wrong, and logs of the node "
        "cannot be laid beside those of others.",
    ),
    Alert(
        name="RolecallOutOfMemory",
        expr="increase(rolecall_host_oom_kills_total[10m]) > 0",
        severity=Severity.WARNING,
        summary="the kernel of {{ $labels.node }} killed for want of memory",
        description='{{ $value | printf "%.0f" }} process(es) in 10 minutes. A replica that is restarted on the same node '
        "meets the same end.",
    ),
)

_GPUS = (
    Alert(
        name="RolecallGpuLost",
        expr="rolecall_gpu_up == 0",
        hold="30s",
        severity=Severity.CRITICAL,
        summary=f"{GPU_OF_NODE} is lost",
        description="No NVML call on it succeeds any more: it fell off the bus, or the driver gave it up.",
    ),
    Alert(
        name="RolecallXid",
        expr=f'time() - rolecall_xid_last_timestamp_seconds{{xid!~"{HARMLESS_XIDS}"}} < 900',
        severity=Severity.CRITICAL,
        summary=f"XID {{{{ $labels.xid }}}} on {GPU_OF_NODE}",
        description="{{ $value | humanizeDuration }} ago. NVIDIA's catalogue wants something done about this code: "
        "`rolecall diagnose` on the kernel log says what.",
    ),
    Alert(
        name="RolecallNvswitchError",
        expr=f"""(rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}}
        - (rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} offset 15m or
        rolecall_nvswitch_errors_total{{error=~"{FATAL_SXIDS}"}} * 0)) > 0""",
        severity=Severity.CRITICAL,
        summary="SXid {{ $labels.error }} of {{ $labels.device }} on {{ $labels.node }}",
        description="A fatal error of an NVSwitch concerns every GPU on that link, and may end NVLink for the node.",
    ),
    Alert(
        name="RolecallGpuResetNeeded",
        expr='rolecall_gpu_remapped_rows_pending == 1 or rolecall_gpu_recovery_action{action!="none"} == 1',
        hold="1m",
        severity=Severity.WARNING,
        summary=f"{GPU_OF_NODE} wants a reset",
        description="A row of its memory waits to be remapped, or the driver asks for {{ $labels.action }}. It works on, "
        "with less margin.",
    ),
    Alert(
        name="RolecallGpuReplace",
        expr="rolecall_gpu_remapped_rows_failed == 1 or rolecall_gpu_sram_threshold_exceeded == 1",
        hold="1m",
        severity=Severity.CRITICAL,
        summary=f"{GPU_OF_NODE} is to be replaced",
        description="Its memory can no longer be mended: a row remapping failed, or SRAM errors passed the limit.",
    ),
    Alert(
        name="RolecallGpuThrottled",
        expr="rate(rolecall_gpu_thermal_throttle_seconds_total[10m]) > 0.2",
        hold="10m",
        severity=Severity.WARNING,
        summary=f"heat slows {GPU_OF_NODE}",
        description="In {{ $value | humanizePercentage }} of the time heat holds its clocks down: every rank waits for it.",
    ),
    Alert(
        name="RolecallNvlinkDown",
        expr="""rolecall_gpu_nvlinks_active
        < on (job, instance, node) group_left max by (job, instance, node) (rolecall_gpu_nvlinks_active)""",
        hold="2m",
        severity=Severity.WARNING,
        summary=f"{GPU_OF_NODE} has fewer NVLinks than its neighbours",
        description="{{ $value }} are up, other GPUs of the node have more: collectives run at the speed of the slowest.",
    ),
)

_LINKS = (
    Alert(
        name="RolecallLinkDown",
        expr="""(rolecall_infiniband_up == 0 and rolecall_infiniband_downs_total > 0)
        or (rolecall_nic_up == 0 and rolecall_nic_downs_total > 0)""",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} is down",
        description="It was up while the agent looked. Ports that nobody ever plugged in are not told.",
    ),
    Alert(
        name="RolecallLinkFlaps",
        expr="""increase(rolecall_infiniband_downs_total[5m]) >= 1.5
        or increase(rolecall_nic_downs_total[5m]) >= 1.5""",
        severity=Severity.WARNING,
        summary="{{ $labels.nic }}{{ $labels.interface }} of {{ $labels.node }} flaps",
        description="It went down twice or more in five minutes; a single flap is let pass.",
    ),
    Alert(
        name="RolecallPortErrors",
        expr=f"""increase(rolecall_infiniband_events_total{{name=~"{FATAL_PORT_EVENTS}"}}[10m]) > 0
        or increase(rolecall_infiniband_events_total{{name="symbol_error"}}[1h]) > 120
        or rate(rolecall_infiniband_events_total{{name="link_error_recovery"}}[5m]) * 300 > 25""",
        severity=Severity.WARNING,
        summary="port {{ $labels.port }} of {{ $labels.nic }} on {{ $labels.node }}: {{ $labels.name }}",
        description='{{ $value | printf "%.0f" }} of a kind that a sound cable does not have.',
    ),
)

_HOST = (
    Alert(
        name="RolecallHardwareError",
        expr="""(rolecall_kernel_hardware_errors_total{state="uncorrected"}
        - (rolecall_kernel_hardware_errors_total{state="uncorrected"} offset 15m
        or rolecall_kernel_hardware_errors_total{state="uncorrected"} * 0)) > 0""",
        severity=Severity.WARNING,
        summary="{{ $labels.node }}: hardware error ({{ $labels.kind }})",
        description="{{ $value }} that the machine could not correct, by its kernel log of the last 15 minutes.",
    ),
    Alert(
        name="RolecallDiskFull",
        expr="""rolecall_filesystem_available_bytes / rolecall_filesystem_size_bytes < 0.05
        or rolecall_filesystem_files_free / rolecall_filesystem_files < 0.05""",
        hold="2m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.mount }} of {{ $labels.node }} is {{ $value | humanizePercentage }} free",
        description="Checkpoints, logs and rolecall's own events need room: of space, or of files.",
    ),
    Alert(
        name="RolecallDiskGone",
        expr="""rolecall_filesystem_up == 0
        or (rolecall_filesystem_readonly == 1
        and min_over_time(rolecall_filesystem_readonly[6h]) == 0)""",
        hold="1m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.mount }} of {{ $labels.node }} cannot be used",
        description="It fails, hangs, or became read-only within the last six hours: what writes there stands or dies.",
    ),
)

NODE_GROUPS = (
    RuleGroup(name="rolecall-agents", rules=_AGENTS),
    RuleGroup(name="rolecall-gpus", rules=_GPUS),
    RuleGroup(name="rolecall-links", rules=_LINKS),
    RuleGroup(name="rolecall-hosts", rules=_HOST),
)
