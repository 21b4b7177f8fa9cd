"""The network of a node: interfaces, InfiniBand and RoCE, TCP, NVLink, PCIe.

NVLink and PCIe also work with dcgm-exporter alone; the rest needs rolecall's agent.
"""

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import NETWORK, PanelRow, board, of_servers
from rolecall.dashboards.grafana.boards.gpus import (
    GPU,
    NODE,
    OF_GPU,
    OF_NODE,
    either,
    gpu_variable,
    node_variable,
    of_exporter,
)
from rolecall.dashboards.grafana.panels import (
    GREEN,
    ORANGE,
    RED,
    UP_DOWN,
    PanelFormat,
    PanelQuery,
    lines,
    numbers,
    rows,
    states,
)
from rolecall.dashboards.grafana.promql import grown

PORT, INTERFACE = "{{node}} {{nic}}/{{port}}", "{{node}} {{interface}}"
BYTES = PanelFormat(unit="Bps")
FAULTS = PanelFormat(unit="none", decimals=0, limits=((None, ORANGE),), no_value="none")
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


def _rate(metric: str, by: str) -> str:
    return f"max by ({by}) (rate({metric}{{{NODE}}}[$__rate_interval]))"


def _faults() -> PanelRow:
    return PanelRow(
        "Health",
        7,
        (4, 4, 8, 8, 8, 8, 8),
        [
            numbers(
                "InfiniBand and RoCE ports",
                "DOWN: the port is not active, or its NIC is gone.",
                PanelFormat(unit="none", mappings=UP_DOWN),
                PanelQuery(f"min by (node, nic, port) (rolecall_infiniband_up{{{NODE}}})", PORT),
            ),
            numbers(
                "Interfaces",
                "DOWN: no carrier, or disabled.",
                PanelFormat(unit="none", mappings=UP_DOWN),
                PanelQuery(f"min by (node, interface) (rolecall_nic_up{{{NODE}}})", INTERFACE),
            ),
            rows(
                "Port error counters in the time range",
                "Increase by driver counter. symbol_error, link_downed and port_rcv_errors: cable or port; "
                "port_xmit_wait: congestion.",
                FAULTS,
                PanelQuery(
                    grown(f"rolecall_infiniband_events_total{{{NODE}}}", "node, nic, port, name") + " > 0", "times"
                ),
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
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, RED))),
                PanelQuery(f"max by (node, nic, port) (rolecall_infiniband_downs_total{{{NODE}}})", PORT),
                PanelQuery(f"max by (node, interface) (rolecall_nic_downs_total{{{NODE}}})", INTERFACE),
            ),
            lines(
                "TCP retransmissions",
                "Share of sent segments. Above the threshold: packet loss.",
                PanelFormat(unit="percentunit", limits=((None, GREEN), (RETRANSMITS_MANY, ORANGE))),
                PanelQuery(
                    f"{_rate('rolecall_tcp_retransmits_total', 'node')} / "
                    f"({_rate('rolecall_tcp_segments_sent_total', 'node')} > 0)",
                    OF_NODE,
                ),
            ),
            lines(
                "TCP timeouts",
                "Expired retransmission timers, and connections dropped at a full listen queue, per second.",
                PanelFormat(unit="cps"),
                PanelQuery(_rate("rolecall_tcp_timeouts_total", "node"), f"{OF_NODE} timeouts"),
                PanelQuery(_rate("rolecall_tcp_listen_drops_total", "node"), f"{OF_NODE} listen drops"),
            ),
        ],
    )


def _infiniband() -> PanelRow:
    by = "node, nic, port"
    state = f"max by (node, nic, port) (rolecall_infiniband_up{{{NODE}}})"
    return PanelRow(
        "InfiniBand and RoCE (includes RDMA)",
        8,
        (8, 8, 8, 16, 8),
        [
            lines(
                "Received",
                "Bytes per second of each port.",
                BYTES,
                PanelQuery(_rate("rolecall_infiniband_received_bytes_total", by), PORT),
            ),
            lines(
                "Sent",
                "Bytes per second of each port. One far below its neighbours in the same collective: check its errors.",
                BYTES,
                PanelQuery(_rate("rolecall_infiniband_sent_bytes_total", by), PORT),
            ),
            lines(
                "Link rate",
                "Negotiated rate. Lower than its neighbours': a bad cable or a wrong setting.",
                BYTES,
                PanelQuery(f"max by ({by}) (rolecall_infiniband_rate_bytes_per_second{{{NODE}}})", PORT),
            ),
            states(
                "Ports over time",
                "Up or DOWN.",
                PanelFormat(unit="none", mappings=UP_DOWN),
                PanelQuery(state, PORT),
            ),
            lines(
                "Saturated counters",
                "Port counters at their maximum; they do not count further until they are cleared.",
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, ORANGE))),
                PanelQuery(f"max by ({by}) (rolecall_infiniband_saturated{{{NODE}}})", PORT),
            ),
        ],
    )


def _interfaces() -> PanelRow:
    by = "node, interface"
    priority = "{{node}} {{interface}} {{priority}}"
    return PanelRow(
        "Interfaces",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "Received",
                "Bytes per second. Excludes RDMA.",
                BYTES,
                PanelQuery(_rate("rolecall_nic_received_bytes_total", by), INTERFACE),
            ),
            lines(
                "Sent",
                "Bytes per second. Excludes RDMA.",
                BYTES,
                PanelQuery(_rate("rolecall_nic_sent_bytes_total", by), INTERFACE),
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
                PanelFormat(unit="cps"),
                PanelQuery(_rate("rolecall_nic_pauses_received_total", f"{by}, priority"), priority),
            ),
            lines(
                "Pause frames sent",
                "Per second, by priority: this node is congested.",
                PanelFormat(unit="cps"),
                PanelQuery(_rate("rolecall_nic_pauses_sent_total", f"{by}, priority"), priority),
            ),
            lines(
                "Transmission paused",
                "Share of time, by priority.",
                PanelFormat(unit="percentunit", most=1.0),
                PanelQuery(_rate("rolecall_nic_paused_seconds_total", f"{by}, priority"), priority),
            ),
        ],
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
        8,
        (8, 8, 8, *(6 for _ in NVLINK_ERRORS)),
        [
            lines(
                "NVLink",
                "Bytes per second over all links of a GPU, both directions.",
                BYTES,
                PanelQuery(nvlink, OF_GPU),
            ),
            lines(
                "PCIe",
                "Bytes per second in each direction.",
                BYTES,
                PanelQuery(
                    either("rolecall_gpu_pcie_transmit_bytes_per_second", "DCGM_FI_PROF_PCIE_TX_BYTES"),
                    f"{OF_GPU} sent",
                ),
                PanelQuery(
                    either("rolecall_gpu_pcie_receive_bytes_per_second", "DCGM_FI_PROF_PCIE_RX_BYTES"),
                    f"{OF_GPU} received",
                ),
            ),
            lines(
                "PCIe replays",
                "Since the driver was loaded. One GPU far above the others: suspect its slot or riser.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(either("rolecall_gpu_pcie_replays_total", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), OF_GPU),
            ),
            *(
                lines(
                    f"NVLink errors: {kind}",
                    f"{text} Since the driver was loaded, all links of a GPU.",
                    PanelFormat(unit="none", decimals=0),
                    PanelQuery(errors(kind), OF_GPU),
                )
                for kind, text in NVLINK_ERRORS.items()
            ),
        ],
    )
