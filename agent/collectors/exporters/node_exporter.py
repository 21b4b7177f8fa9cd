"""node_exporter's series as our network and storage metrics, where both mean the same.

Names: prometheus/node_exporter, collectors enabled by default. Left out: CPU, memory and load, which the agent always
samples itself. node_exporter's `drop` includes missed packets. Downs of links are counted as in our own collectors,
from the first page on; they are no events.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.samples import Sample

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.network.links import LinkWatch
from rolecall.agent.collectors.storage.collector import ALWAYS, LOCAL_TYPES
from rolecall.agent.disk_space import is_remote
from rolecall.core.ids import NodeId
from rolecall.core.metrics.collectors import NETWORK_METRICS, STORAGE_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.formats.infiniband import FAULT_COUNTERS, PHYSICAL_STATES, UNKNOWN, UP_STATES

NUM_OF_A_KIND_MAX = 64
"""Interfaces, ports, disks or mounts per metric; each error kind counts separately."""

_BY_NAME = {m.name.removeprefix("rolecall_"): m for m in (*NETWORK_METRICS, *STORAGE_METRICS)}
_VIRTUAL = re.compile(
    r"(?:lo|veth|docker|br-|virbr|cali|cilium|lxc|cni|flannel|vxlan|tun|tap|dummy|ifb|kube|nodelocal)"
)
"""Our own collector finds hardware interfaces in sysfs; a page does not identify them."""
_SPEED_BYTES_MAX = 1e13
"""A driver that does not know the speed reports -1, read as an unsigned number of megabits."""

Found = Iterable[tuple[Metric, tuple[str, ...], float]]
Rule = Callable[[Mapping[str, str], float], Found]
"""A sample's labels and value to our metric, labels after the node, and value."""


def _plain(name: str, *more: str) -> Rule:
    """For node-wide metrics."""
    metric = _BY_NAME[name]
    return lambda labels, value: ((metric, more, value),)


def _interface(name: str) -> Rule:
    metric = _BY_NAME[name]

    def rule(labels: Mapping[str, str], value: float) -> Found:
        device = labels.get("device", "")
        if device and not _VIRTUAL.match(device):
            yield metric, (device,), value

    return rule


def _error(error: str) -> Rule:
    """Absent until the first error, as in our own collector."""
    rule = _interface("nic_errors_total")
    return lambda labels, value: ((m, (*of, error), v) for m, of, v in rule(labels, value) if v > 0)


def _speed(labels: Mapping[str, str], value: float) -> Found:
    if 0 < value < _SPEED_BYTES_MAX:
        yield from _interface("nic_speed_bytes_per_second")(labels, value)


def _of(name: str, *wanted: str) -> Rule:
    """For a metric of what the labels `wanted` name; without them it is not exported."""
    metric = _BY_NAME[name]

    def rule(labels: Mapping[str, str], value: float) -> Found:
        if all(label in labels for label in wanted):
            yield metric, tuple(labels[label] for label in wanted), value

    return rule


def _port(name: str) -> Rule:
    return _of(name, "device", "port")


def _disk(name: str) -> Rule:
    return _of(name, "device")


def _port_up(labels: Mapping[str, str], value: float) -> Found:
    return _port("infiniband_up")(labels, float(value in UP_STATES))


def _port_physical(labels: Mapping[str, str], value: float) -> Found:
    state = PHYSICAL_STATES.get(int(value), UNKNOWN)
    return ((m, (*of, state), 1.0) for m, of, _ in _port("infiniband_physical_state")(labels, value))


def _port_event(counter: str) -> Rule:
    """`counter`: the driver's name. Fault counters are always exported, others once they are nonzero."""
    rule, always = _port("infiniband_events_total"), counter in FAULT_COUNTERS
    return lambda labels, value: ((m, (*of, counter), v) for m, of, v in rule(labels, value) if v or always)


def _link_downed(labels: Mapping[str, str], value: float) -> Found:
    yield from _port_event("link_downed")(labels, value)
    yield from _port("infiniband_downs_total")(labels, value)


def _mount(name: str, *, inverted: bool = False) -> Rule:
    metric = _BY_NAME[name]

    def rule(labels: Mapping[str, str], value: float) -> Found:
        mount, kind = labels.get("mountpoint", ""), labels.get("fstype", "")
        ours = mount in ALWAYS or kind in LOCAL_TYPES or is_remote(kind)
        if mount and ours:
            yield metric, (mount,), float(not value) if inverted else value

    return rule


_RULES: Mapping[str, Rule] = {
    # The carrier of an interface that is shut down cannot be read; only `up` is available.
    "node_network_carrier": _interface("nic_up"),
    "node_network_up": _interface("nic_up"),
    "node_network_speed_bytes": _speed,
    "node_network_carrier_changes_total": _interface("nic_carrier_changes_total"),
    "node_network_carrier_down_changes_total": _interface("nic_downs_total"),
    "node_network_receive_bytes_total": _interface("nic_received_bytes_total"),
    "node_network_transmit_bytes_total": _interface("nic_sent_bytes_total"),
    "node_network_receive_packets_total": _interface("nic_received_packets_total"),
    "node_network_transmit_packets_total": _interface("nic_sent_packets_total"),
    "node_network_receive_errs_total": _error("rx_errors"),
    "node_network_transmit_errs_total": _error("tx_errors"),
    "node_network_receive_drop_total": _error("rx_dropped"),
    "node_network_transmit_drop_total": _error("tx_dropped"),
    "node_network_receive_fifo_total": _error("rx_fifo_errors"),
    "node_network_transmit_fifo_total": _error("tx_fifo_errors"),
    "node_netstat_Tcp_OutSegs": _plain("tcp_segments_sent_total"),
    "node_netstat_Tcp_RetransSegs": _plain("tcp_retransmits_total"),
    "node_netstat_TcpExt_TCPTimeouts": _plain("tcp_timeouts_total"),
    "node_netstat_TcpExt_TCPSynRetrans": _plain("tcp_syn_retransmits_total"),
    "node_netstat_TcpExt_ListenDrops": _plain("tcp_listen_drops_total"),
    "node_infiniband_state_id": _port_up,
    "node_infiniband_physical_state_id": _port_physical,
    "node_infiniband_rate_bytes_per_second": _port("infiniband_rate_bytes_per_second"),
    "node_infiniband_port_data_received_bytes_total": _port("infiniband_received_bytes_total"),
    "node_infiniband_port_data_transmitted_bytes_total": _port("infiniband_sent_bytes_total"),
    "node_infiniband_link_downed_total": _link_downed,
    "node_infiniband_link_error_recovery_total": _port_event("link_error_recovery"),
    "node_infiniband_symbol_error_total": _port_event("symbol_error"),
    "node_infiniband_port_errors_received_total": _port_event("port_rcv_errors"),
    "node_infiniband_port_discards_transmitted_total": _port_event("port_xmit_discards"),
    "node_infiniband_port_constraint_errors_received_total": _port_event("port_rcv_constraint_errors"),
    "node_infiniband_port_constraint_errors_transmitted_total": _port_event("port_xmit_constraint_errors"),
    "node_infiniband_port_transmit_wait_total": _port_event("port_xmit_wait"),
    "node_disk_reads_completed_total": _disk("disk_reads_total"),
    "node_disk_writes_completed_total": _disk("disk_writes_total"),
    "node_disk_read_bytes_total": _disk("disk_read_bytes_total"),
    "node_disk_written_bytes_total": _disk("disk_written_bytes_total"),
    "node_disk_read_time_seconds_total": _disk("disk_read_seconds_total"),
    "node_disk_write_time_seconds_total": _disk("disk_write_seconds_total"),
    "node_disk_io_time_seconds_total": _disk("disk_busy_seconds_total"),
    "node_disk_io_now": _disk("disk_requests_active"),
    "node_filesystem_device_error": _mount("filesystem_up", inverted=True),
    "node_filesystem_size_bytes": _mount("filesystem_size_bytes"),
    "node_filesystem_avail_bytes": _mount("filesystem_available_bytes"),
    "node_filesystem_files": _mount("filesystem_files"),
    "node_filesystem_files_free": _mount("filesystem_files_free"),
    "node_filesystem_readonly": _mount("filesystem_readonly"),
    "node_pressure_io_waiting_seconds_total": _plain("host_io_stall_seconds_total"),
    "node_pressure_io_stalled_seconds_total": _plain("host_full_stall_seconds_total", "io"),
    "node_pressure_memory_stalled_seconds_total": _plain("host_full_stall_seconds_total", "memory"),
}
_FILES, _FILES_FREE = _BY_NAME["filesystem_files"].name, _BY_NAME["filesystem_files_free"].name
_LINKS = tuple((_BY_NAME[f"{kind}_up"].name, _BY_NAME[f"{kind}_downs_total"]) for kind in ("nic", "infiniband"))
_ORDER = {name: number for number, name in enumerate(_RULES)}


class NodeExporterPage:
    """If two series mean the same, the one whose rule comes first counts."""

    wanted = frozenset(_RULES)

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._links: dict[tuple[str, tuple[str, ...]], LinkWatch] = {}  # of the last page

    def values(self, samples: Iterable[Sample]) -> list[MetricValue]:
        """Raises CollectorUnavailable: no node_exporter series on the page."""
        found: dict[tuple[str, tuple[str, ...]], MetricValue] = {}
        num_of: dict[tuple[str, str], int] = {}
        for name, labels, value, *_ in sorted(samples, key=lambda s: _ORDER[s.name]):
            if not 0.0 <= value < float("inf"):
                continue  # NaN, and speeds of -1
            for metric, of, number in _RULES[name](labels, value):
                key = metric.name, of
                if key in found:
                    continue
                num = num_of[name, metric.name] = num_of.get((name, metric.name), 0) + 1
                if num <= NUM_OF_A_KIND_MAX:
                    found[key] = MetricValue(metric, (self._node, *of), number)
        self._count_downs(found)
        for metric_name, of in [k for k, v in found.items() if k[0] == _FILES and not v.value]:
            del found[metric_name, of]  # no limit on their number
            found.pop((_FILES_FREE, of), None)
        if not found:
            raise CollectorUnavailable("no series of node_exporter on this page")
        return list(found.values())

    def _count_downs(self, found: dict[tuple[str, tuple[str, ...]], MetricValue]) -> None:
        """Replaces the kernel's counts of downs, which begin with the driver, by those since the first page."""
        links = dict[tuple[str, tuple[str, ...]], LinkWatch]()
        for up, downs in _LINKS:
            counts = {of: int(found.pop((name, of)).value) for name, of in list(found) if name == downs.name}
            for key in [key for key in found if key[0] == up]:
                link = links[key] = self._links.get(key) or LinkWatch()
                link.poll(0.0, bool(found[key].value), counts.get(key[1]))  # the time is of use to events alone
                found[downs.name, key[1]] = MetricValue(downs, (self._node, *key[1]), float(link.num_downs))
        self._links = links
