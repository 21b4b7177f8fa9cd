"""Rows of the metric catalogue: NICs, InfiniBand and RoCE, TCP."""

from rolecall.core.metrics.metric import NODE, Metric, MetricScope, MetricType

_G, _C = MetricType.GAUGE, MetricType.COUNTER
_INTERFACE = (*NODE, "interface")
_PORT = (*NODE, "nic", "port")


def _metric(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...]) -> Metric:
    return Metric(
        name=f"rolecall_{name}", type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.NETWORK
    )


_OF_INTERFACES = (
    _metric("nic_up", _G, "", "1 while the interface is up and has a carrier", _INTERFACE),
    _metric(
        "nic_speed_bytes_per_second",
        _G,
        "bytes_per_second",
        "Negotiated link speed; absent while the link is down",
        _INTERFACE,
    ),
    _metric("nic_downs_total", _C, "", "Times that the link went down since the agent started", _INTERFACE),
    _metric("nic_carrier_changes_total", _C, "", "Changes of the carrier state", _INTERFACE),
    _metric("nic_received_bytes_total", _C, "bytes", "Bytes received", _INTERFACE),
    _metric("nic_sent_bytes_total", _C, "bytes", "Bytes sent", _INTERFACE),
    _metric("nic_received_packets_total", _C, "", "Packets received", _INTERFACE),
    _metric("nic_sent_packets_total", _C, "", "Packets sent", _INTERFACE),
    _metric(
        "nic_errors_total",
        _C,
        "",
        "Packets lost or damaged, and faults of the link, by the driver's name for it; absent until there was one",
        (*_INTERFACE, "error"),
    ),
    _metric(
        "nic_pauses_received_total",
        _C,
        "",
        "Pause frames received, by priority (PFC; link: of the whole link): the peer could take no more",
        (*_INTERFACE, "priority"),
    ),
    _metric(
        "nic_pauses_sent_total",
        _C,
        "",
        "Pause frames sent, by priority (PFC; link: of the whole link): this node could take no more",
        (*_INTERFACE, "priority"),
    ),
    _metric(
        "nic_paused_seconds_total",
        _C,
        "seconds",
        "Time in which sending was stopped by received pause frames, by priority",
        (*_INTERFACE, "priority"),
    ),
)

_OF_TCP = (
    _metric("tcp_segments_sent_total", _C, "", "TCP segments sent", NODE),
    _metric("tcp_retransmits_total", _C, "", "TCP segments sent again", NODE),
    _metric("tcp_timeouts_total", _C, "", "Retransmission timers of TCP that ran out", NODE),
    _metric("tcp_syn_retransmits_total", _C, "", "First segments of a TCP connection sent again", NODE),
    _metric("tcp_listen_drops_total", _C, "", "TCP connections dropped because a listener was full", NODE),
)

_OF_PORTS = (
    _metric("infiniband_up", _G, "", "1 while the port is active; 0: not, or its NIC is gone", _PORT),
    _metric("infiniband_physical_state", _G, "", "1 for the physical state that the port is in", (*_PORT, "state")),
    _metric("infiniband_rate_bytes_per_second", _G, "bytes_per_second", "Negotiated rate of the port", _PORT),
    _metric("infiniband_downs_total", _C, "", "Times that the port went down since the agent started", _PORT),
    _metric("infiniband_received_bytes_total", _C, "bytes", "Bytes received, RDMA included", _PORT),
    _metric("infiniband_sent_bytes_total", _C, "bytes", "Bytes sent, RDMA included", _PORT),
    _metric(
        "infiniband_events_total",
        _C,
        "",
        "Every other counter of the port (counters and hw_counters), by the driver's name for it: those that "
        "indicate a fault always, others once they have counted",
        (*_PORT, "name"),
    ),
    _metric(
        "infiniband_saturated",
        _G,
        "",
        "Counters of the port that are saturated and stop counting until they are cleared",
        _PORT,
    ),
)

NETWORK_METRICS: tuple[Metric, ...] = (*_OF_INTERFACES, *_OF_TCP, *_OF_PORTS)
