"""Rows of the metric catalogue: NICs, TCP, InfiniBand and RoCE."""

from rolecall.core.metrics.metric import NODE, MetricScope, rows

NETWORK_METRICS = rows(
    MetricScope.NETWORK,
    NODE,
    {
        "nic_up{interface}": "1 while the interface is up and has a carrier",
        "nic_speed_bytes_per_second{interface}": "Negotiated link speed; absent while the link is down",
        "nic_downs_total{interface}": "Times that the link went down since the agent started",
        "nic_carrier_changes_total{interface}": "Changes of the carrier state",
        "nic_received_bytes_total{interface}": "Bytes received",
        "nic_sent_bytes_total{interface}": "Bytes sent",
        "nic_received_packets_total{interface}": "Packets received",
        "nic_sent_packets_total{interface}": "Packets sent",
        "nic_errors_total{interface,error}": "Packets lost or damaged, and faults of the link, by the driver's name "
        "for it; absent until there was one",
        "nic_pauses_received_total{interface,priority}": "Pause frames received, by priority (PFC; link: of the "
        "whole link): the peer could take no more",
        "nic_pauses_sent_total{interface,priority}": "Pause frames sent, by priority (PFC; link: of the whole link): "
        "this node could take no more",
        "nic_paused_seconds_total{interface,priority}": "Time in which sending was stopped by received pause frames, "
        "by priority",
        "tcp_segments_sent_total": "TCP segments sent",
        "tcp_retransmits_total": "TCP segments sent again",
        "tcp_timeouts_total": "Retransmission timers of TCP that ran out",
        "tcp_syn_retransmits_total": "First segments of a TCP connection sent again",
        "tcp_listen_drops_total": "TCP connections dropped because a listener was full",
        "infiniband_up{nic,port}": "1 while the port is active; 0: not, or its NIC is gone",
        "infiniband_physical_state{nic,port,state}": "1 for the physical state that the port is in",
        "infiniband_rate_bytes_per_second{nic,port}": "Negotiated rate of the port",
        "infiniband_downs_total{nic,port}": "Times that the port went down since the agent started",
        "infiniband_received_bytes_total{nic,port}": "Bytes received, RDMA included",
        "infiniband_sent_bytes_total{nic,port}": "Bytes sent, RDMA included",
        "infiniband_events_total{nic,port,name}": "Every other counter of the port (counters and hw_counters), by "
        "the driver's name for it: those that indicate a fault always, others once they have counted",
        "infiniband_saturated{nic,port}": "Counters of the port that are saturated and stop counting until they are "
        "cleared",
    },
)
