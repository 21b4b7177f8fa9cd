"""NICs and TCP: `/sys/class/net`, NIC driver statistics, `/proc/net/snmp` and `netstat`.

Covers physical interfaces (with a `device` link) and configured ones: a node with containers has hundreds of virtual
interfaces. Counters continue across a driver reload.
"""

import ctypes
import fcntl
import os
import re
import socket
import struct
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact
from rolecall.agent.collectors.counters import MonotonicCounters, OpenFileCache, natural, read_whole
from rolecall.agent.collectors.network.links import LinkTransition, LinkWatch
from rolecall.core.ids import NodeId
from rolecall.core.metrics.collectors import NETWORK_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue

NUM_INTERFACES_MAX = 64
DRIVER_EVERY_SECONDS = 5.0
"""Between two reads of a driver's statistics, for which the driver queries its firmware."""
MEGABIT_BYTES = 1e6 / 8
SPEED_UNKNOWN = 2**32 - 1
"""-1 as an unsigned number; some drivers write -1."""

_BY_NAME = {m.name: m for m in NETWORK_METRICS}


def _nic(name: str) -> Metric:
    return _BY_NAME[f"rolecall_nic_{name}"]


_UP, _SPEED, _DOWNS = map(_nic, ("up", "speed_bytes_per_second", "downs_total"))
_ERRORS = _nic("errors_total")
_PAUSES_RECEIVED, _PAUSES_SENT = _nic("pauses_received_total"), _nic("pauses_sent_total")
_PAUSED = _nic("paused_seconds_total")
_COUNTERS = (
    ("carrier_changes", _nic("carrier_changes_total")),
    ("statistics/rx_bytes", _nic("received_bytes_total")),
    ("statistics/tx_bytes", _nic("sent_bytes_total")),
    ("statistics/rx_packets", _nic("received_packets_total")),
    ("statistics/tx_packets", _nic("sent_packets_total")),
)
_ERROR_STATISTICS = (
    *("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors"),
    *("rx_fifo_errors", "rx_length_errors", "tx_carrier_errors", "tx_fifo_errors"),
)

# Names by driver: mlx5 `rx_prio3_pause`, `rx_prio3_pause_duration` (microseconds), `rx_pause_ctrl_phy`; bnxt_en
# `rx_pfc_ena_frames_pri3`, `rx_pause_frames`; Intel ice `rx_priority_3_xoff.nic`, i40e `port.rx_priority_3_xoff`.
_OF_PRIORITY = re.compile(
    r"(?:port\.)?(rx|tx)_(?:prio(\d)_pause|pfc_ena_frames_pri(\d)|priority_(\d)_xoff(?:\.nic)?|prio(\d)_pause_duration)\Z"
)
_OF_LINK = re.compile(
    r"(rx|tx)_(?:pause_ctrl_phy|pause_frames|pause|global_pause|link_xoff)\Z|port\.(rx|tx)_link_xoff\Z"
)
_DRIVER_ERRORS = re.compile(
    r"(?:rx_discards_phy|tx_discards_phy|rx_symbol_err_phy|rx_crc_errors_phy|rx_pcs_symbol_err_phy|link_down_events_phy|"
    r"rx_out_of_buffer|rx_prio\d_discards|tx_pause_storm_warning_events|tx_pause_storm_error_events|"
    r"rx_prio\d_buf_discard|module_bad_shorted|module_high_temp)\Z"
)
WHOLE_LINK = "link"

_TCP = (
    ("Tcp", "OutSegs", _BY_NAME["rolecall_tcp_segments_sent_total"]),
    ("Tcp", "RetransSegs", _BY_NAME["rolecall_tcp_retransmits_total"]),
    ("TcpExt", "TCPTimeouts", _BY_NAME["rolecall_tcp_timeouts_total"]),
    ("TcpExt", "TCPSynRetrans", _BY_NAME["rolecall_tcp_syn_retransmits_total"]),
    ("TcpExt", "ListenDrops", _BY_NAME["rolecall_tcp_listen_drops_total"]),
)
_TCP_FILES = (("snmp", "Tcp"), ("netstat", "TcpExt"))


def wanted(name: str) -> bool:
    """Whether a driver statistic is exported."""
    return bool(_OF_PRIORITY.match(name) or _OF_LINK.match(name) or _DRIVER_ERRORS.match(name))


def parse_tables(text: str, wanted: Container[str]) -> dict[tuple[str, str], int]:
    """(table, field) to number, from `/proc/net/snmp` and `netstat`: pairs of lines, names then numbers. Only the
    `wanted` tables of about four hundred fields."""
    found = dict[tuple[str, str], int]()
    lines = text.split("\n")
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        table, _, fields = names.partition(":")
        same, _, values = numbers.partition(":")
        if table == same and table in wanted:
            pairs = zip(fields.split(), values.split(), strict=False)
            found |= {(table, key): int(value) for key, value in pairs if value.isascii() and value.isdecimal()}
    return found


# Driver statistics by ioctl, as in `ethtool -S`. Layouts: include/uapi/linux/ethtool.h

SIOCETHTOOL = 0x8946
ETHTOOL_GSTRINGS = 0x1B
ETHTOOL_GSTATS = 0x1D
ETHTOOL_GSSET_INFO = 0x37
ETH_SS_STATS = 1
STRING_BYTES = 32
NUM_STATISTICS_MAX = 16_384
"""mlx5 with 128 queues has about 4,000."""
SLACK = 4096
"""Spare entries, because queues may have been added since the number of statistics was read."""

Ioctl = Callable[[str, bytearray], None]
"""Queries an interface's driver; the response overwrites the request. Raises OSError."""


def kernel_ioctl(interface: str, request: bytearray) -> None:
    buffer = (ctypes.c_char * len(request)).from_buffer(request)
    ifreq = struct.pack("16sP16x", interface.encode()[:15], ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control.fileno(), SIOCETHTOOL, ifreq)


class EthtoolStatistics:
    """`read(interface)`: statistics by name, the only source of priority flow control counters; empty where the driver
    has none, or where access is refused. Reading needs no privileges (net/ethtool/ioctl.c), but a container sandbox or
    a virtual NIC may refuse."""

    def __init__(self, ioctl: Ioctl = kernel_ioctl) -> None:
        self._ioctl = ioctl
        self._names: dict[str, tuple[str, ...]] = {}

    def read(self, interface: str, wanted: Callable[[str], bool]) -> dict[str, int]:
        """Only statistics whose name is `wanted`."""
        try:
            number = self._number(interface)
            if not 0 < number <= NUM_STATISTICS_MAX:
                return {}
            names = self._names.get(interface, ())
            if len(names) != number:
                names = self._names[interface] = self._read_names(interface, number)
            if len(names) != number:
                return {}
            request = bytearray(8 + 8 * (number + SLACK))
            struct.pack_into("=II", request, 0, ETHTOOL_GSTATS, number)
            self._ioctl(interface, request)
        except (OSError, struct.error):
            return {}
        answered = struct.unpack_from("=I", request, 4)[0]
        if answered != number:  # the queues changed just now: names and numbers do not match
            self._names.pop(interface, None)
            return {}
        values = struct.unpack_from(f"={number}Q", request, 8)
        return {name: value for name, value in zip(names, values, strict=True) if wanted(name)}

    def forget(self, interface: str) -> None:
        self._names.pop(interface, None)

    def _number(self, interface: str) -> int:
        request = bytearray(struct.pack("=IIQI", ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_STATS, 0))
        self._ioctl(interface, request)
        _, _, mask, number = struct.unpack("=IIQI", request)
        return int(number) if mask else 0

    def _read_names(self, interface: str, number: int) -> tuple[str, ...]:
        request = bytearray(12 + STRING_BYTES * (number + SLACK))
        struct.pack_into("=III", request, 0, ETHTOOL_GSTRINGS, ETH_SS_STATS, number)
        self._ioctl(interface, request)
        if struct.unpack_from("=I", request, 8)[0] != number:
            return ()
        parts = (request[12 + STRING_BYTES * n : 12 + STRING_BYTES * (n + 1)] for n in range(number))
        return tuple(bytes(p).partition(b"\0")[0].decode("ascii", "replace").strip() for p in parts)


@dataclass(slots=True)
class _Interface:
    name: str
    folder: str
    instance: int  # inode of its folder, which changes when its driver is reloaded
    reloaded: bool = False
    watch: LinkWatch = field(default_factory=LinkWatch)
    driver: tuple[MetricValue, ...] = ()
    driver_due_at: float = float("-inf")


class NetworkCollector:
    """`interfaces`: to poll besides the physical ones. `proc_net`: of the network namespace to observe."""

    name = "network"

    def __init__(
        self,
        node: NodeId,
        *,
        interfaces: Iterable[str] = (),
        root: Path = Path("/sys/class/net"),
        proc_net: Path = Path("/proc/net"),
        statistics: EthtoolStatistics | None = None,
        interval_seconds: float = 1.0,
        driver_every_seconds: float = DRIVER_EVERY_SECONDS,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._node, self._named = node, frozenset(interfaces)
        self._root, self._proc_net = str(root), proc_net
        self._statistics = statistics or EthtoolStatistics()
        self._driver_every_seconds = driver_every_seconds
        self._known: dict[str, _Interface] = {}
        self._virtual = set[str]()
        self._totals = MonotonicCounters()
        self._files = OpenFileCache()

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: neither interfaces nor TCP can be read."""
        values, facts = self._tcp(), list[Fact]()
        try:
            here = self._found()
        except OSError as e:
            if not values:
                raise CollectorUnavailable(f"{self._root}: {e.strerror or e}, and nothing of {self._proc_net}") from e
            return CollectorReading(tuple(values))
        for name, interface in self._known.items():
            changes = self._poll(interface, at, values) if name in here else self._missing(interface, at, values)
            facts += [change.fact(interface=name) for change in changes]
        return CollectorReading(tuple(values), tuple(facts))

    def close(self) -> None:
        self._files.close()

    def _found(self) -> set[str]:
        """Present interfaces to poll; registers new ones. Raises OSError."""
        names = set(os.listdir(self._root))
        self._virtual &= names
        here = set[str]()
        for name in sorted(names - self._virtual, key=natural):
            folder = f"{self._root}/{name}"
            try:
                instance = os.stat(folder).st_ino
            except OSError:
                continue  # removed since it was listed
            known = self._known.get(name)
            if known is None:
                if name not in self._named and not os.path.exists(f"{folder}/device"):
                    self._virtual.add(name)
                    continue
                if len(self._known) >= NUM_INTERFACES_MAX and not self._forget_one():
                    continue
                known = self._known[name] = _Interface(name, folder, instance)
            elif known.instance != instance:
                known.instance, known.reloaded, known.driver_due_at = instance, True, float("-inf")
                self._statistics.forget(name)
            here.add(name)
        return here

    def _forget_one(self) -> bool:
        """Evicts an interface that is gone: virtual NICs come back under other names. False: all are present."""
        name = next((name for name, known in self._known.items() if known.watch.gone), None)
        if name is None:
            return False
        del self._known[name]
        self._totals.forget(name)
        self._statistics.forget(name)
        return True

    def _poll(self, interface: _Interface, at: float, values: list[MetricValue]) -> list[LinkTransition]:
        folder, labels = interface.folder, (self._node, interface.name)
        state = self._files.text(f"{folder}/operstate")
        if state is None:
            return self._missing(interface, at, values)
        # Some drivers report `unknown` as operational state; `carrier` is unreadable on an interface that is shut down.
        up = state in ("up", "unknown") and self._files.text(f"{folder}/carrier") == "1"
        num_downs = self._files.number(f"{folder}/carrier_down_count")
        changes = interface.watch.poll(at, up, num_downs, reloaded=interface.reloaded)
        interface.reloaded = False
        values.append(MetricValue(_UP, labels, float(up)))
        values.append(MetricValue(_DOWNS, labels, float(interface.watch.num_downs)))
        speed = self._files.number(f"{folder}/speed") if up else None
        if speed and speed != SPEED_UNKNOWN:
            values.append(MetricValue(_SPEED, labels, speed * MEGABIT_BYTES))
        for file, metric in _COUNTERS:
            total = self._totals.add((interface.name, file), self._files.number(f"{folder}/{file}"))
            if total is not None:
                values.append(MetricValue(metric, labels, float(total)))
        for name in _ERROR_STATISTICS:
            total = self._totals.add((interface.name, name), self._files.number(f"{folder}/statistics/{name}"))
            if total:
                values.append(MetricValue(_ERRORS, (*labels, name), float(total)))
        if at >= interface.driver_due_at:
            interface.driver = self._of_driver(interface)
            interface.driver_due_at = at + self._driver_every_seconds
        values += interface.driver
        return changes

    def _missing(self, interface: _Interface, at: float, values: list[MetricValue]) -> list[LinkTransition]:
        labels = (self._node, interface.name)
        values.append(MetricValue(_UP, labels, 0.0))
        changes = interface.watch.missing(at)
        values.append(MetricValue(_DOWNS, labels, float(interface.watch.num_downs)))
        return changes

    def _of_driver(self, interface: _Interface) -> tuple[MetricValue, ...]:
        labels = (self._node, interface.name)
        values = list[MetricValue]()
        for name, reading in self._statistics.read(interface.name, wanted).items():
            total = self._totals.add((interface.name, "driver", name), reading)
            if total is None:
                continue
            if found := _OF_PRIORITY.match(name):
                direction, *priorities = found.groups()
                priority = next(p for p in priorities if p)
                if name.endswith("_duration"):
                    if direction == "rx":
                        values.append(MetricValue(_PAUSED, (*labels, priority), total / 1e6))
                    continue
                metric = _PAUSES_RECEIVED if direction == "rx" else _PAUSES_SENT
                values.append(MetricValue(metric, (*labels, priority), float(total)))
            elif found := _OF_LINK.match(name):
                metric = _PAUSES_RECEIVED if "rx" in found.groups() else _PAUSES_SENT
                values.append(MetricValue(metric, (*labels, WHOLE_LINK), float(total)))
            elif total:
                values.append(MetricValue(_ERRORS, (*labels, name), float(total)))
        return tuple({(v.metric.name, v.labels): v for v in values}.values())

    def _tcp(self) -> list[MetricValue]:
        found = dict[tuple[str, str], int]()
        for file, table in _TCP_FILES:
            try:
                text = read_whole(f"{self._proc_net}/{file}")
            except OSError:
                continue  # a kernel without it
            found |= parse_tables(text, (table,))
        return [
            MetricValue(metric, (self._node,), float(found[table, name]))
            for table, name, metric in _TCP
            if (table, name) in found
        ]
