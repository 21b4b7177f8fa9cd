"""Ports of InfiniBand and RoCE NICs, from `/sys/class/infiniband`: links every second, counters every few seconds.

A link that goes down or comes back is a fact, as is a NIC that disappears (`links.py`). Counters continue across a
driver reload, and keep their last value while they cannot be read."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, Fact
from rolecall.agent.collectors.counters import MonotonicCounters, OpenFileCache, natural
from rolecall.agent.collectors.network.links import LinkTransition, LinkWatch
from rolecall.core.ids import NodeId
from rolecall.core.metrics.collectors import NETWORK_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.formats.infiniband import (
    DATA_WORD_BYTES,
    FAULT_COUNTERS,
    PHYSICAL_STATES,
    SATURATES_AT,
    UNKNOWN,
    UP_STATES,
    parse_rate,
    parse_state,
)

COUNTERS_EVERY_SECONDS = 10.0
"""Each of about fifty counters per port is a firmware query; Prometheus scrapes every 15 s or less often."""
NUM_TURNS = 5
"""Ports are spread over this many polls, so that no poll reads all counters."""
NUM_PORTS_MAX = 64
NUM_COUNTERS_MAX = 192
"""Per port and folder. mlx5 has 22 and about 60."""
_COUNTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_INTERFACE_NAME = re.compile(r"[^\s/]{1,15}\Z")
_NO_COUNTERS = frozenset({"lifespan"})
"""How long the driver caches a reading: a setting among the counters."""
_FOLDERS = ("counters_ext", "counters", "hw_counters")
"""The first folder that has a counter wins: the oldest kernels keep 64 bits in `counters_ext` and 32 in `counters`."""
_BYTES_PER_COUNT = {"port_rcv_data": DATA_WORD_BYTES, "port_xmit_data": DATA_WORD_BYTES, "rx_bytes": 1, "tx_bytes": 1}
"""AWS's EFA has `rx_bytes` and `tx_bytes` in place of `port_*_data`."""
_RECEIVED, _SENT = ("port_rcv_data", "rx_bytes"), ("port_xmit_data", "tx_bytes")

_BY_NAME = {m.name: m for m in NETWORK_METRICS}


def _metric(name: str) -> Metric:
    return _BY_NAME[f"rolecall_infiniband_{name}"]


_UP, _PHYSICAL, _RATE, _DOWNS = map(_metric, ("up", "physical_state", "rate_bytes_per_second", "downs_total"))
_RECEIVED_BYTES, _SENT_BYTES = _metric("received_bytes_total"), _metric("sent_bytes_total")
_EVENTS, _SATURATED = _metric("events_total"), _metric("saturated")


@dataclass(slots=True)
class _Port:
    nic: str
    number: str
    folder: str
    instance: int  # inode of the device's folder, which changes when its driver is reloaded
    turn: float = 0.0  # fraction of the interval by which its second and all later counter readings are delayed
    watch: LinkWatch = field(default_factory=LinkWatch)
    totals: dict[str, int] = field(default_factory=dict)  # by counter
    counters: tuple[MetricValue, ...] = ()
    counters_reloaded: bool = False
    counters_due_at: float = float("-inf")


class InfinibandCollector:
    """`interval_seconds`: between two polls of the links."""

    name = "infiniband"

    def __init__(
        self,
        node: NodeId,
        *,
        root: Path = Path("/sys/class/infiniband"),
        interval_seconds: float = 1.0,
        counters_every_seconds: float = COUNTERS_EVERY_SECONDS,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._node, self._root = node, str(root)
        self._counters_every_seconds = counters_every_seconds
        self._devices: dict[str, tuple[int, tuple[str, ...]]] = {}  # present devices: inode of the folder, ports
        self._ports: dict[tuple[str, str], _Port] = {}
        self._totals = MonotonicCounters()
        self._files = OpenFileCache()

    def read(self, at: float) -> CollectorReading:
        """One poll. A node without InfiniBand has no values, which is not an error."""
        here = self._found()
        values, facts = list[MetricValue](), list[Fact]()
        for key, port in self._ports.items():
            if key in here:
                changes = self._poll(port, at, values)
            else:
                changes = port.watch.missing(at)
                self._gone(port, values)
            if changes:
                interface = self._files.text(f"{port.folder}/gid_attrs/ndevs/0")  # RoCE: it shares this link
                named = {"interface": interface} if interface and _INTERFACE_NAME.match(interface) else {}
                facts += [change.fact(nic=port.nic, port=port.number, **named) for change in changes]
        return CollectorReading(tuple(values), tuple(facts))

    def close(self) -> None:
        self._files.close()

    def _found(self) -> set[tuple[str, str]]:
        """Present ports; registers new ones."""
        try:
            names = set(os.listdir(self._root))
        except OSError:
            names = set()
        for gone in self._devices.keys() - names:
            self._forget_device(gone)
        here = set[tuple[str, str]]()
        for nic in [*self._devices, *sorted(names - self._devices.keys(), key=natural)]:
            try:
                instance = os.stat(f"{self._root}/{nic}").st_ino
            except OSError:
                self._forget_device(nic)
                continue  # removed since it was listed
            known = self._devices.get(nic)
            if known is None or known[0] != instance:
                self._forget_device(nic)
                known = self._devices[nic] = instance, tuple(sorted(_listed(f"{self._root}/{nic}/ports"), key=natural))
            here.update((nic, number) for number in known[1] if self._is_taken(nic, number, instance))
        return here

    def _forget_device(self, nic: str) -> None:
        """The device disappeared or was replaced: its open files are stale."""
        if self._devices.pop(nic, None) is not None:
            self._files.forget(f"{self._root}/{nic}")

    def _is_taken(self, nic: str, number: str, instance: int) -> bool:
        """Whether this port is polled; registers a new one if there is room."""
        port = self._ports.get((nic, number))
        if port is None:
            if not number.isdecimal() or (len(self._ports) >= NUM_PORTS_MAX and not self._forget_one()):
                return False
            folder = f"{self._root}/{nic}/ports/{number}"
            turn = len(self._ports) % NUM_TURNS / NUM_TURNS
            self._ports[nic, number] = _Port(nic, number, folder, instance, turn)
        elif port.instance != instance:
            port.instance, port.counters_reloaded = instance, True
            port.counters_due_at = float("-inf")
        return True

    def _forget_one(self) -> bool:
        """Evicts a port that is gone: virtual NICs come back under other names. False: all are present."""
        key = next((key for key, port in self._ports.items() if port.watch.gone), None)
        if key is None:
            return False
        del self._ports[key]
        self._totals.forget(key[0])
        return True

    def _poll(self, port: _Port, at: float, values: list[MetricValue]) -> list[LinkTransition]:
        """Appends the port's values to `values`; returns its link transitions."""
        labels = (self._node, port.nic, port.number)
        state = parse_state(self._files.text(f"{port.folder}/state"))
        if state is None:  # removed, or malformed
            self._gone(port, values)
            return port.watch.missing(at)
        up = state in UP_STATES
        counted = self._files.number(f"{port.folder}/counters/link_downed")
        changes = port.watch.poll(at, up, counted, reloaded=port.counters_reloaded)
        if at >= port.counters_due_at or changes:
            port.counters = self._counters(port)
            port.counters_due_at = at + self._counters_every_seconds * (1.0 + port.turn)
            port.turn = 0.0
            port.counters_reloaded = False
        physical = PHYSICAL_STATES.get(parse_state(self._files.text(f"{port.folder}/phys_state")) or 0, UNKNOWN)
        values.append(MetricValue(_UP, labels, float(up)))
        values.append(MetricValue(_PHYSICAL, (*labels, physical), 1.0))
        if up and (rate := parse_rate(self._files.text(f"{port.folder}/rate"))) is not None:
            values.append(MetricValue(_RATE, labels, rate.bytes_per_second))
        values.append(MetricValue(_DOWNS, labels, float(port.watch.num_downs)))
        values += port.counters
        return changes

    def _gone(self, port: _Port, values: list[MetricValue]) -> None:
        labels = (self._node, port.nic, port.number)
        values.append(MetricValue(_UP, labels, 0.0))
        values.append(MetricValue(_DOWNS, labels, float(port.watch.num_downs)))
        values += port.counters

    def _counters(self, port: _Port) -> tuple[MetricValue, ...]:
        labels = (self._node, port.nic, port.number)
        seen, num_saturated = set[str](), 0
        for folder in _FOLDERS:
            for file in _listed(f"{port.folder}/{folder}")[:NUM_COUNTERS_MAX]:
                name = file.removesuffix("_64") if folder == "counters_ext" else file
                if name in seen or name in _NO_COUNTERS or not _COUNTER_NAME.match(name):
                    continue
                reading = self._files.number(f"{port.folder}/{folder}/{file}")
                if reading is not None:
                    seen.add(name)
                    num_saturated += folder != "counters_ext" and reading == SATURATES_AT.get(name)
                total = self._totals.add((port.nic, port.number, name), reading, reloaded=port.counters_reloaded)
                if total is not None:
                    port.totals[name] = total
        values = list[MetricValue]()
        for metric, names in ((_RECEIVED_BYTES, _RECEIVED), (_SENT_BYTES, _SENT)):
            for name in names:
                if name in port.totals:
                    values.append(MetricValue(metric, labels, float(port.totals[name] * _BYTES_PER_COUNT[name])))
                    break
        values += [
            MetricValue(_EVENTS, (*labels, name), float(total))
            for name, total in port.totals.items()
            if name not in _BYTES_PER_COUNT and (total or name in FAULT_COUNTERS)
        ]
        values.append(MetricValue(_SATURATED, labels, float(num_saturated)))
        return tuple(values)


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
