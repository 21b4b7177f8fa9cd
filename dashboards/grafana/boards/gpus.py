"""The GPUs of a node, and the node around them.

It works with rolecall's agent and with dcgm-exporter alone: each panel queries the agent's metric and, for GPUs without
an agent, DCGM's, converted to the same unit and labels (`either`).
"""

from grafana_foundation_sdk.builders.dashboard import QueryVariable
from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import GPUS, Choice, PanelRow, board, of_servers, query_variable
from rolecall.dashboards.grafana.links import ROW_TO_REPLICA
from rolecall.dashboards.grafana.panels import (
    GREEN,
    ORANGE,
    RED,
    UP_DOWN,
    YELLOW,
    MappedValue,
    PanelFormat,
    PanelQuery,
    bars,
    lines,
    numbers,
    rows,
)
from rolecall.dashboards.grafana.promql import grown, scoped

NODE, GPU = 'node=~"$node"', 'node=~"$node",gpu=~"$gpu"'
OF_NODE, OF_GPU = "{{node}}", "{{node}} GPU {{gpu}}"
HOT_CELSIUS = 85.0
"""Data-centre GPUs begin to slow down a few degrees above (H100: 87 to 90)."""
MANY_ERRORS = 0.1
"""Share of a resource's time: worth checking."""


def either(ours: str, theirs: str, scale: str = "", *, also: str = "", rate: bool = False) -> str:
    """The agent's metric `ours` (with matchers `also`) per node and GPU, or else DCGM's `theirs` converted by `scale`.
    `rate`: both are counters; use their rate."""
    own = f"{ours}{{{GPU}{',' + also if also else ''}}}"
    return f"max by (node, gpu) ({_rate(own) if rate else own}) or {of_exporter(theirs, scale, rate=rate)}"


def of_exporter(metric: str, scale: str = "", *, rate: bool = False) -> str:
    """A metric of dcgm-exporter with our labels."""
    found = [f'{metric}{{{name}=~"$node",gpu=~"$gpu"}}' for name in ("hostname", "Hostname")]
    return f"max by (node, gpu) ({_named(*map(_rate, found) if rate else found)}) {scale}".strip()


def _rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def _named(of_hostname: str, of_old: str) -> str:
    return (
        f'label_replace({of_hostname}, "node", "$1", "hostname", "(.+)") '
        f'or label_replace({of_old}, "node", "$1", "Hostname", "(.+)")'
    )


def node_variable() -> QueryVariable:
    """Every node with an agent or a dcgm-exporter."""
    theirs = _named('DCGM_FI_DEV_GPU_TEMP{hostname=~".+"}', 'DCGM_FI_DEV_GPU_TEMP{Hostname=~".+"}')
    nodes = scoped(f"group by (node) (rolecall_agent_build_info) or group by (node) ({theirs})")
    return query_variable("node", "Node", f"query_result({nodes})", Choice.SEVERAL).regex('/node="([^"]+)"/')


def gpu_variable() -> QueryVariable:
    """GPUs of the selected nodes."""
    found = (
        'rolecall_gpu_up{node=~"$node"}',
        *(f'DCGM_FI_DEV_GPU_TEMP{{{n}=~"$node"}}' for n in ("hostname", "Hostname")),
    )
    numbers_of = scoped(" or ".join(f"group by (gpu) ({selector})" for selector in found))
    return query_variable("gpu", "GPU", f"query_result({numbers_of})").regex('/gpu="([^"]+)"/')


def gpus() -> Dashboard:
    return board(
        GPUS,
        "GPUs of a node",
        "GPUs and host of the selected nodes: utilization, temperature, clocks, memory errors, XIDs; from rolecall's "
        "agent or dcgm-exporter.",
        [*of_servers(), node_variable(), gpu_variable()],
        [_health(), _work(), _heat(), _memory(), _host()],
    )


def _health() -> PanelRow:
    up = f"min by (node, gpu) (rolecall_gpu_up{{{GPU}}}) or {of_exporter('DCGM_FI_DEV_GPU_TEMP', '* 0 + 1')}"
    xids = grown(f"rolecall_xid_events_total{{{NODE}}}", "node, gpu, xid") + " > 0"
    failed = either("rolecall_gpu_remapped_rows_failed", "DCGM_FI_DEV_ROW_REMAP_FAILURE")
    pending = either("rolecall_gpu_remapped_rows_pending", "DCGM_FI_DEV_ROW_REMAP_PENDING")
    return PanelRow(
        "Health",
        7,
        (6, 6, 4, 8, 6, 6, 12),
        [
            numbers(
                "GPU status",
                "DOWN: all NVML calls on the GPU fail. With dcgm-exporter alone a lost GPU has no series.",
                PanelFormat(unit="none", mappings=UP_DOWN),
                PanelQuery(up, OF_GPU),
            ),
            rows(
                "XIDs in the time range",
                "Number of each XID from the driver or the kernel log, including the first. Empty: no XIDs. "
                "`rolecall diagnose` on a kernel log explains each code.",
                PanelFormat(unit="none", limits=((None, RED),), no_value="none"),
                PanelQuery(xids, "Times"),
                {"node": "node", "gpu": "GPU", "xid": "XID"},
            ),
            numbers(
                "Latest XID (DCGM)",
                "Latest XID of each GPU since the driver was loaded. It never returns to 0, and a repeated code does "
                "not show; `XIDs in the time range` counts them.",
                PanelFormat(unit="none", mappings={0: MappedValue("none", GREEN)}, limits=((None, GREEN), (1, RED))),
                PanelQuery(of_exporter("DCGM_FI_DEV_XID_ERRORS"), OF_GPU),
            ),
            rows(
                "Recommended recovery action",
                "The driver's recommended recovery action per GPU. Needs rolecall's agent.",
                PanelFormat(unit="none", mappings={1: MappedValue("yes", ORANGE)}),
                PanelQuery(f"max by (node, gpu, action) (rolecall_gpu_recovery_action{{{GPU}}} == 1)", "Recommended"),
                {"node": "node", "gpu": "GPU", "action": "Action"},
            ),
            numbers(
                "Row remapping failed",
                "FAILED: the GPU has no spare memory rows left and must be replaced.",
                PanelFormat(unit="none", mappings={0: MappedValue("no", GREEN), 1: MappedValue("FAILED", RED)}),
                PanelQuery(failed, OF_GPU),
            ),
            numbers(
                "Row remapping pending",
                "PENDING: memory rows are remapped at the next GPU reset. Schedule one.",
                PanelFormat(unit="none", mappings={0: MappedValue("no", GREEN), 1: MappedValue("PENDING", YELLOW)}),
                PanelQuery(pending, OF_GPU),
            ),
            rows(
                "Ranks on these GPUs",
                "Ranks that use each GPU; the link compares the replica with its peers. Needs rolecall's agent.",
                PanelFormat(unit="none", mappings={1: MappedValue("yes", GREEN)}, links=(ROW_TO_REPLICA,)),
                PanelQuery(f"max by (node, gpu, role, replica, rank) (rolecall_gpu_rank{{{GPU}}} == 1)", "Runs"),
                {"node": "node", "gpu": "GPU", "role": "role", "replica": "replica", "rank": "rank"},
            ),
        ],
    )


def _work() -> PanelRow:
    share = PanelFormat(unit="percentunit", most=1.0)
    used = either("rolecall_gpu_memory_used_bytes", "DCGM_FI_DEV_FB_USED", "* 1048576")
    return PanelRow(
        "Utilization",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "Tensor core activity",
                "Near 0 while the GPU counts as busy: it spins in a collective and waits for a peer. Hopper and later.",
                share,
                PanelQuery(either("rolecall_gpu_tensor_active_ratio", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), OF_GPU),
            ),
            lines(
                "SM activity",
                "Share of streaming multiprocessors with active warps.",
                share,
                PanelQuery(either("rolecall_gpu_sm_active_ratio", "DCGM_FI_PROF_SM_ACTIVE"), OF_GPU),
            ),
            lines(
                "GPU utilization",
                "As nvidia-smi reports it. A spinning collective counts as busy, so do not rely on it alone.",
                share,
                PanelQuery(either("rolecall_gpu_utilization_ratio", "DCGM_FI_DEV_GPU_UTIL", "/ 100"), OF_GPU),
            ),
            lines(
                "Memory bandwidth",
                "Share of the peak bandwidth of device memory.",
                share,
                PanelQuery(either("rolecall_gpu_dram_active_ratio", "DCGM_FI_PROF_DRAM_ACTIVE"), OF_GPU),
            ),
            lines("Memory allocated", "Device memory in use.", PanelFormat(unit="bytes"), PanelQuery(used, OF_GPU)),
            lines(
                "Processes on the GPU",
                "Processes with a CUDA context. More than the ranks: another program uses the GPU. Needs rolecall's "
                "agent.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(f"max by (node, gpu) (rolecall_gpu_processes{{{GPU}}})", OF_GPU),
            ),
        ],
    )


def _heat() -> PanelRow:
    def throttled(ours: str, theirs: str) -> str:
        return either(ours, theirs, "/ 1e9", rate=True)

    share = PanelFormat(unit="percentunit", most=1.0, limits=((None, GREEN), (MANY_ERRORS, ORANGE)))
    return PanelRow(
        "Temperature, power, clocks",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "Temperature",
                "GPU core temperature. The threshold is shortly below the throttling temperature.",
                PanelFormat(unit="celsius", limits=((None, GREEN), (HOT_CELSIUS, RED))),
                PanelQuery(either("rolecall_gpu_temperature_celsius", "DCGM_FI_DEV_GPU_TEMP"), OF_GPU),
            ),
            lines(
                "Memory temperature",
                "Temperature of the device memory.",
                PanelFormat(unit="celsius"),
                PanelQuery(either("rolecall_gpu_memory_temperature_celsius", "DCGM_FI_DEV_MEMORY_TEMP"), OF_GPU),
            ),
            lines(
                "Power",
                "Power draw and the active limit (the limit needs rolecall's agent). Flat and low while busy: the "
                "GPU waits.",
                PanelFormat(unit="watt"),
                PanelQuery(either("rolecall_gpu_power_watts", "DCGM_FI_DEV_POWER_USAGE"), OF_GPU),
                PanelQuery(f"max by (node, gpu) (rolecall_gpu_power_limit_watts{{{GPU}}})", f"{OF_GPU} limit"),
            ),
            lines(
                "SM clock",
                "Lower than its neighbours' under the same load: throttled. See the throttling panels for the reason.",
                PanelFormat(unit="hertz"),
                PanelQuery(either("rolecall_gpu_sm_clock_hertz", "DCGM_FI_DEV_SM_CLOCK", "* 1e6"), OF_GPU),
            ),
            lines(
                "Thermal throttling",
                "Share of time.",
                share,
                PanelQuery(
                    throttled("rolecall_gpu_thermal_throttle_seconds_total", "DCGM_FI_DEV_THERMAL_VIOLATION"),
                    OF_GPU,
                ),
            ),
            lines(
                "Power throttling",
                "Share of time at the power limit. Normal under full load, not at half load.",
                PanelFormat(unit="percentunit", most=1.0),
                PanelQuery(
                    throttled("rolecall_gpu_power_throttle_seconds_total", "DCGM_FI_DEV_POWER_VIOLATION"), OF_GPU
                ),
            ),
        ],
    )


def _memory() -> PanelRow:
    def errors(kind: str, theirs: str) -> str:
        return either("rolecall_gpu_ecc_errors_total", theirs, also=f'error="{kind}"')

    remapped = either(
        "rolecall_gpu_remapped_rows_total", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", also='error="uncorrected"'
    )
    return PanelRow(
        "Memory errors",
        8,
        (8, 8, 8),
        [
            lines(
                "Uncorrected memory errors",
                "Since the driver was loaded. Each killed the process that used that memory.",
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, RED))),
                PanelQuery(errors("uncorrected", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"), OF_GPU),
            ),
            lines(
                "Corrected memory errors",
                "Since the driver was loaded. Harmless individually; many on one GPU predict failure.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(errors("corrected", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"), OF_GPU),
            ),
            bars(
                "Rows remapped after uncorrected errors",
                "Memory rows replaced by spare rows over the life of the GPU.",
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, ORANGE))),
                PanelQuery(remapped, OF_GPU),
            ),
        ],
    )


def _host() -> PanelRow:
    def rate(metric: str) -> str:
        return f"max by (node) (rate({metric}{{{NODE}}}[$__rate_interval]))"

    waits = (
        ("CPU", "rolecall_host_cpu_stall_seconds_total"),
        ("memory", "rolecall_host_memory_stall_seconds_total"),
        ("disk", "rolecall_host_io_stall_seconds_total"),
    )
    return PanelRow(
        "The host (needs rolecall's agent)",
        8,
        (6, 6, 6, 6),
        [
            lines(
                "CPU",
                "Share of all CPUs in use.",
                PanelFormat(unit="percentunit", most=1.0),
                PanelQuery(
                    f"{rate('rolecall_host_cpu_busy_seconds_total')} / max by (node) (rolecall_host_cpus{{{NODE}}})",
                    OF_NODE,
                ),
            ),
            lines(
                "Available memory",
                "Memory available without swapping.",
                PanelFormat(unit="bytes"),
                PanelQuery(f"max by (node) (rolecall_host_memory_available_bytes{{{NODE}}})", OF_NODE),
            ),
            lines(
                "Resource pressure",
                "Share of time in which at least one task waited for the resource (PSI).",
                PanelFormat(unit="percentunit", most=1.0),
                *(PanelQuery(rate(metric), f"{OF_NODE} {what}") for what, metric in waits),
            ),
            numbers(
                "OOM kills",
                "Processes killed by the OOM killer in the time range.",
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, RED))),
                PanelQuery(f"max by (node) (increase(rolecall_host_oom_kills_total{{{NODE}}}[$__range]))", OF_NODE),
            ),
        ],
    )
