"""The GPUs and the network of a node.

Both work with rolecall's agent and with dcgm-exporter alone: a panel of GPUs, NVLink or PCIe queries the agent's metric
and, for GPUs without an agent, DCGM's, converted to the same unit and labels (`either`). The rest needs the agent.
"""

from grafana_foundation_sdk.builders.dashboard import QueryVariable
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from rolecall.dashboards.grafana.board import (
    GPUS,
    NETWORK,
    ROW_TO_REPLICA,
    Choice,
    PanelRow,
    board,
    of_servers,
    query_variable,
)
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
    states,
)
from rolecall.dashboards.grafana.promql import grown, scoped

NODE, GPU = 'node=~"$node"', 'node=~"$node",gpu=~"$gpu"'
OF_NODE, OF_GPU = "{{node}}", "{{node}} GPU {{gpu}}"
HOT_CELSIUS = 85.0
"""Data-centre GPUs begin to slow down a few degrees above (H100: 87 to 90)."""
NONE_OF_AGENT = "none seen by an agent"
"""Of a table that dcgm-exporter cannot fill: without an agent it is empty too."""
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
    failed = either("rolecall_gpu_remapped_rows_failed", "DCGM_FI_DEV_ROW_REMAP_FAILURE")
    pending = either("rolecall_gpu_remapped_rows_pending", "DCGM_FI_DEV_ROW_REMAP_PENDING")
    return PanelRow(
        "Health",
        numbers(
            "GPU status",
            "DOWN: all NVML calls on the GPU fail. With dcgm-exporter alone a lost GPU has no series.",
            PanelFormat(mappings=UP_DOWN),
            PanelQuery(up, OF_GPU),
        ),
        xids("XIDs in the time range", NODE),
        numbers(
            "Latest XID (DCGM)",
            "Latest XID of each GPU since the driver was loaded. It never returns to 0, and a repeated code does "
            "not show; `XIDs in the time range` counts them.",
            PanelFormat(mappings={0: MappedValue("none", GREEN)}, limits=((None, GREEN), (1, RED))),
            PanelQuery(of_exporter("DCGM_FI_DEV_XID_ERRORS"), OF_GPU),
        ),
        rows(
            "Recommended recovery action",
            "The driver's recommended recovery action per GPU. Needs rolecall's agent.",
            PanelFormat(mappings={1: MappedValue("yes", ORANGE)}),
            PanelQuery(f"max by (node, gpu, action) (rolecall_gpu_recovery_action{{{GPU}}} == 1)", "Recommended"),
            {"node": "node", "gpu": "GPU", "action": "Action"},
        ),
        numbers(
            "Row remapping failed",
            "FAILED: the GPU has no spare memory rows left and must be replaced.",
            PanelFormat(mappings={0: MappedValue("no", GREEN), 1: MappedValue("FAILED", RED)}),
            PanelQuery(failed, OF_GPU),
        ),
        numbers(
            "Row remapping pending",
            "PENDING: memory rows are remapped at the next GPU reset. Schedule one.",
            PanelFormat(mappings={0: MappedValue("no", GREEN), 1: MappedValue("PENDING", YELLOW)}),
            PanelQuery(pending, OF_GPU),
        ),
        rows(
            "Ranks on these GPUs",
            "Ranks that use each GPU; the link compares the replica with its peers. Needs rolecall's agent.",
            PanelFormat(mappings={1: MappedValue("yes", GREEN)}, links=(ROW_TO_REPLICA,)),
            PanelQuery(f"max by (node, gpu, role, replica, rank) (rolecall_gpu_rank{{{GPU}}} == 1)", "Runs"),
            {"node": "node", "gpu": "GPU", "role": "role", "replica": "replica", "rank": "rank"},
        ),
        widths=(6, 6, 4, 8, 6, 6, 12),
        height=7,
    )


def xids(title: str, matchers: str = "", only: str = "") -> Panel:
    """`only`: what is appended to the expression to select nodes."""
    return rows(
        title,
        "Number of each XID from the driver or the kernel log, including the first. `rolecall diagnose` on a kernel "
        "log explains each code. Needs rolecall's agent.",
        PanelFormat(limits=((None, RED),), no_value=NONE_OF_AGENT),
        PanelQuery(grown(f"rolecall_xid_events_total{{{matchers}}}", "node, gpu, xid") + f" > 0{only}", "Times"),
        {"node": "node", "gpu": "GPU", "xid": "XID"},
    )


def _work() -> PanelRow:
    share = PanelFormat("percentunit", most=1.0)
    used = either("rolecall_gpu_memory_used_bytes", "DCGM_FI_DEV_FB_USED", "* 1048576")
    return PanelRow(
        "Utilization",
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
        lines("Memory allocated", "Device memory in use.", PanelFormat("bytes"), PanelQuery(used, OF_GPU)),
        lines(
            "Processes on the GPU",
            "Processes with a CUDA context. More than the ranks: another program uses the GPU. Needs rolecall's agent.",
            PanelFormat(decimals=0),
            PanelQuery(f"max by (node, gpu) (rolecall_gpu_processes{{{GPU}}})", OF_GPU),
        ),
    )


def _heat() -> PanelRow:
    def throttled(ours: str, theirs: str) -> str:
        return either(ours, theirs, "/ 1e9", rate=True)

    share = PanelFormat("percentunit", most=1.0, limits=((None, GREEN), (MANY_ERRORS, ORANGE)))
    return PanelRow(
        "Temperature, power, clocks",
        lines(
            "Temperature",
            "GPU core temperature. The threshold is shortly below the throttling temperature.",
            PanelFormat("celsius", limits=((None, GREEN), (HOT_CELSIUS, RED))),
            PanelQuery(either("rolecall_gpu_temperature_celsius", "DCGM_FI_DEV_GPU_TEMP"), OF_GPU),
        ),
        lines(
            "Memory temperature",
            "Temperature of the device memory.",
            PanelFormat("celsius"),
            PanelQuery(either("rolecall_gpu_memory_temperature_celsius", "DCGM_FI_DEV_MEMORY_TEMP"), OF_GPU),
        ),
        lines(
            "Power",
            "Power draw and the active limit (the limit needs rolecall's agent). Flat and low while busy: the "
            "GPU waits.",
            PanelFormat("watt"),
            PanelQuery(either("rolecall_gpu_power_watts", "DCGM_FI_DEV_POWER_USAGE"), OF_GPU),
            PanelQuery(f"max by (node, gpu) (rolecall_gpu_power_limit_watts{{{GPU}}})", f"{OF_GPU} limit"),
        ),
        lines(
            "SM clock",
            "Lower than its neighbours' under the same load: throttled. See the throttling panels for the reason.",
            PanelFormat("hertz"),
            PanelQuery(either("rolecall_gpu_sm_clock_hertz", "DCGM_FI_DEV_SM_CLOCK", "* 1e6"), OF_GPU),
        ),
        lines(
            "Thermal throttling",
            "Share of time.",
            share,
            PanelQuery(
                throttled("rolecall_gpu_thermal_throttle_seconds_total", "DCGM_FI_DEV_THERMAL_VIOLATION"), OF_GPU
            ),
        ),
        lines(
            "Power throttling",
            "Share of time at the power limit. Normal under full load, not at half load.",
            PanelFormat("percentunit", most=1.0),
            PanelQuery(throttled("rolecall_gpu_power_throttle_seconds_total", "DCGM_FI_DEV_POWER_VIOLATION"), OF_GPU),
        ),
    )


def _memory() -> PanelRow:
    def errors(kind: str, theirs: str) -> str:
        return either("rolecall_gpu_ecc_errors_total", theirs, also=f'error="{kind}"')

    remapped = either(
        "rolecall_gpu_remapped_rows_total", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", also='error="uncorrected"'
    )
    return PanelRow(
        "Memory errors",
        lines(
            "Uncorrected memory errors",
            "Since the driver was loaded. Each killed the process that used that memory.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, RED))),
            PanelQuery(errors("uncorrected", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"), OF_GPU),
        ),
        lines(
            "Corrected memory errors",
            "Since the driver was loaded. Harmless individually; many on one GPU predict failure.",
            PanelFormat(decimals=0),
            PanelQuery(errors("corrected", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"), OF_GPU),
        ),
        bars(
            "Rows remapped after uncorrected errors",
            "Memory rows replaced by spare rows over the life of the GPU.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, ORANGE))),
            PanelQuery(remapped, OF_GPU),
        ),
    )


def _host() -> PanelRow:
    return PanelRow("The host (needs rolecall's agent)", *host(NODE), widths=6)


def host(matchers: str = "", only: str = "") -> tuple[Panel, ...]:
    """CPU and memory of nodes. `only`: what is appended to each expression to select nodes."""

    def rate(metric: str) -> str:
        return f"max by (node) (rate({metric}{{{matchers}}}[$__rate_interval]))"

    waits = (
        ("CPU", "rolecall_host_cpu_stall_seconds_total"),
        ("memory", "rolecall_host_memory_stall_seconds_total"),
        ("disk", "rolecall_host_io_stall_seconds_total"),
    )
    cpus = f"max by (node) (rolecall_host_cpus{{{matchers}}})"
    kills = f"max by (node) (increase(rolecall_host_oom_kills_total{{{matchers}}}[$__range]))"
    return (
        lines(
            "CPU of the node",
            "Share of all CPUs in use.",
            PanelFormat("percentunit", most=1.0),
            PanelQuery(f"{rate('rolecall_host_cpu_busy_seconds_total')} / {cpus}{only}", OF_NODE),
        ),
        lines(
            "Available memory",
            "Memory available without swapping.",
            PanelFormat("bytes"),
            PanelQuery(f"max by (node) (rolecall_host_memory_available_bytes{{{matchers}}}){only}", OF_NODE),
        ),
        lines(
            "Resource pressure",
            "Share of time in which at least one task waited for the resource (PSI).",
            PanelFormat("percentunit", most=1.0),
            *(PanelQuery(rate(metric) + only, f"{OF_NODE} {what}") for what, metric in waits),
        ),
        numbers(
            "OOM kills",
            "Processes killed by the OOM killer in the time range.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, RED))),
            PanelQuery(kills + only, OF_NODE),
        ),
    )


PORT, INTERFACE = "{{node}} {{nic}}/{{port}}", "{{node}} {{interface}}"
BYTES = PanelFormat("Bps")
FAULTS = PanelFormat(decimals=0, limits=((None, ORANGE),), no_value=NONE_OF_AGENT)
NVLINK_ERRORS = {
    "crc_flit": "Flow-control packets with a CRC error.",
    "crc_data": "Data packets with a CRC error.",
    "replay": "Replayed packets.",
    "recovery": "Link recoveries.",
}
RETRANSMITS_MANY = 0.01
"""Of TCP segments: a healthy cluster network has far less."""


def network() -> Dashboard:
    return board(
        NETWORK,
        "network of a node",
        "Interfaces, InfiniBand and RoCE ports, TCP, NVLink and PCIe of the selected nodes.",
        [*of_servers(), node_variable(), gpu_variable()],
        [_faults(), _infiniband(), _interfaces(), _gpu_links()],
    )


def _rate_by(metric: str, by: str) -> str:
    return f"max by ({by}) (rate({metric}{{{NODE}}}[$__rate_interval]))"


def _faults() -> PanelRow:
    return PanelRow(
        "Health",
        numbers(
            "InfiniBand and RoCE ports",
            "DOWN: the port is not active, or its NIC is gone.",
            PanelFormat(mappings=UP_DOWN),
            PanelQuery(f"min by (node, nic, port) (rolecall_infiniband_up{{{NODE}}})", PORT),
        ),
        numbers(
            "Interfaces",
            "DOWN: no carrier, or disabled.",
            PanelFormat(mappings=UP_DOWN),
            PanelQuery(f"min by (node, interface) (rolecall_nic_up{{{NODE}}})", INTERFACE),
        ),
        rows(
            "Port error counters in the time range",
            "Increase by driver counter. symbol_error, link_downed and port_rcv_errors: cable or port; "
            "port_xmit_wait: congestion.",
            FAULTS,
            PanelQuery(grown(f"rolecall_infiniband_events_total{{{NODE}}}", "node, nic, port, name") + " > 0", "times"),
            {"node": "node", "nic": "NIC", "port": "port", "name": "counter"},
        ),
        rows(
            "Interface errors in the time range",
            "Lost or damaged packets and link errors, by driver counter.",
            FAULTS,
            PanelQuery(grown(f"rolecall_nic_errors_total{{{NODE}}}", "node, interface, error") + " > 0", "times"),
            {"node": "node", "interface": "interface", "error": "error"},
        ),
        lines(
            "Link-down events",
            "Since the agent started: ports and interfaces.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, RED))),
            PanelQuery(f"max by (node, nic, port) (rolecall_infiniband_downs_total{{{NODE}}})", PORT),
            PanelQuery(f"max by (node, interface) (rolecall_nic_downs_total{{{NODE}}})", INTERFACE),
        ),
        lines(
            "TCP retransmissions",
            "Share of sent segments. Above the threshold: packet loss.",
            PanelFormat("percentunit", limits=((None, GREEN), (RETRANSMITS_MANY, ORANGE))),
            PanelQuery(
                f"{_rate_by('rolecall_tcp_retransmits_total', 'node')} / "
                f"({_rate_by('rolecall_tcp_segments_sent_total', 'node')} > 0)",
                OF_NODE,
            ),
        ),
        lines(
            "TCP timeouts",
            "Expired retransmission timers, and connections dropped at a full listen queue, per second.",
            PanelFormat("cps"),
            PanelQuery(_rate_by("rolecall_tcp_timeouts_total", "node"), f"{OF_NODE} timeouts"),
            PanelQuery(_rate_by("rolecall_tcp_listen_drops_total", "node"), f"{OF_NODE} listen drops"),
        ),
        widths=(4, 4, 8, 8, 8, 8, 8),
        height=7,
    )


def _infiniband() -> PanelRow:
    by = "node, nic, port"
    state = f"max by (node, nic, port) (rolecall_infiniband_up{{{NODE}}})"
    return PanelRow(
        "InfiniBand and RoCE (includes RDMA)",
        lines(
            "Received",
            "Bytes per second of each port.",
            BYTES,
            PanelQuery(_rate_by("rolecall_infiniband_received_bytes_total", by), PORT),
        ),
        lines(
            "Sent",
            "Bytes per second of each port. One far below its neighbours in the same collective: check its errors.",
            BYTES,
            PanelQuery(_rate_by("rolecall_infiniband_sent_bytes_total", by), PORT),
        ),
        lines(
            "Link rate",
            "Negotiated rate. Lower than its neighbours': a bad cable or a wrong setting.",
            BYTES,
            PanelQuery(f"max by ({by}) (rolecall_infiniband_rate_bytes_per_second{{{NODE}}})", PORT),
        ),
        states("Ports over time", "Up or DOWN.", PanelFormat(mappings=UP_DOWN), PanelQuery(state, PORT)),
        lines(
            "Saturated counters",
            "Port counters at their maximum; they do not count further until they are cleared.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, ORANGE))),
            PanelQuery(f"max by ({by}) (rolecall_infiniband_saturated{{{NODE}}})", PORT),
        ),
        widths=(8, 8, 8, 16, 8),
    )


def _interfaces() -> PanelRow:
    by = "node, interface"
    priority = "{{node}} {{interface}} {{priority}}"
    return PanelRow(
        "Interfaces",
        lines(
            "Received",
            "Bytes per second. Excludes RDMA.",
            BYTES,
            PanelQuery(_rate_by("rolecall_nic_received_bytes_total", by), INTERFACE),
        ),
        lines(
            "Sent",
            "Bytes per second. Excludes RDMA.",
            BYTES,
            PanelQuery(_rate_by("rolecall_nic_sent_bytes_total", by), INTERFACE),
        ),
        lines(
            "Link speed",
            "Negotiated speed.",
            BYTES,
            PanelQuery(f"max by ({by}) (rolecall_nic_speed_bytes_per_second{{{NODE}}})", INTERFACE),
        ),
        lines(
            "Pause frames received",
            "Per second, by priority: the peer is congested.",
            PanelFormat("cps"),
            PanelQuery(_rate_by("rolecall_nic_pauses_received_total", f"{by}, priority"), priority),
        ),
        lines(
            "Pause frames sent",
            "Per second, by priority: this node is congested.",
            PanelFormat("cps"),
            PanelQuery(_rate_by("rolecall_nic_pauses_sent_total", f"{by}, priority"), priority),
        ),
        lines(
            "Transmission paused",
            "Share of time, by priority.",
            PanelFormat("percentunit", most=1.0),
            PanelQuery(_rate_by("rolecall_nic_paused_seconds_total", f"{by}, priority"), priority),
        ),
    )


def _gpu_links() -> PanelRow:
    sent, received = (
        f"max by (node, gpu) (rolecall_gpu_nvlink_{way}_bytes_per_second{{{GPU}}})" for way in ("transmit", "receive")
    )
    nvlink = f"{sent} + {received} or {of_exporter('DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL', '* 1048576')}"

    def errors(kind: str) -> str:
        dcgm = f"DCGM_FI_DEV_NVLINK_{kind.upper()}_ERROR_COUNT_TOTAL"
        return either("rolecall_gpu_nvlink_errors_total", dcgm, also=f'error="{kind}"')

    return PanelRow(
        "GPU links",
        lines(
            "NVLink", "Bytes per second over all links of a GPU, both directions.", BYTES, PanelQuery(nvlink, OF_GPU)
        ),
        lines(
            "PCIe",
            "Bytes per second in each direction.",
            BYTES,
            PanelQuery(
                either("rolecall_gpu_pcie_transmit_bytes_per_second", "DCGM_FI_PROF_PCIE_TX_BYTES"), f"{OF_GPU} sent"
            ),
            PanelQuery(
                either("rolecall_gpu_pcie_receive_bytes_per_second", "DCGM_FI_PROF_PCIE_RX_BYTES"), f"{OF_GPU} received"
            ),
        ),
        lines(
            "PCIe replays",
            "Since the driver was loaded. One GPU far above the others: suspect its slot or riser.",
            PanelFormat(decimals=0),
            PanelQuery(either("rolecall_gpu_pcie_replays_total", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), OF_GPU),
        ),
        *(
            lines(
                f"NVLink errors: {kind}",
                f"{text} Since the driver was loaded, all links of a GPU.",
                PanelFormat(decimals=0),
                PanelQuery(errors(kind), OF_GPU),
            )
            for kind, text in NVLINK_ERRORS.items()
        ),
        widths=(8, 8, 8, *(6 for _ in NVLINK_ERRORS)),
    )
