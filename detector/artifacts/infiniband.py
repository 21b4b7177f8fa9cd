"""Reads copies of `/sys/class/infiniband`, of one node or of many side by side, and diagnoses ports that are down or
slow, and abnormal counters.

A folder `<node>/[infiniband/]<device>/ports/<n>` is a port if its file `state` parses as a port state; the files that
the diagnosis needs become an `InfinibandPort`. The files are untrusted: sizes and numbers are bounded.

A *rail* is the same port on all nodes; the ports of a rail often share a switch. A port is compared with its rail, else
with the other ports of its node.

    down: not active, while most of its rail is, or it has carried traffic
    slow: active at a lower rate than most of its rail (else than similar ports of its node), or InfiniBand on one lane
    counters: far above those of the other ports (`MANY`) or, with two copies of a node, growing too fast (`GROWTH`)
    congested: with two copies, it sends congestion notifications far more often than the others (`CONGESTION`)

A fault that many nodes of one rail share, or most of the fleet, is not attributed to single nodes (one switch affects
many): it becomes one `cannot tell` with these nodes. Cases that need a second copy become remarks.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.errors import ReadingStopped
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.text import counted, node_text
from rolecall.detector.base.findings import settles
from rolecall.detector.base.read_budget import Budget
from rolecall.formats.infiniband import (
    PHYSICAL_STATES,
    SATURATES_AT,
    STATES,
    UNKNOWN,
    UP_STATES,
    Rate,
    parse_rate,
    parse_state,
)

TEXT_BYTES_MAX = 4096
PORT_BYTES = 4000
"""Approximate size of a port in memory."""
NUM_PORTS_MAX = 16
"""Per device; real devices have one or two."""
CLASS_FOLDERS = frozenset({"infiniband", "class", "sys", "ports", ""})
"""Path components that are not node names."""
THIS_NODE = NodeId("this-node")
TRAFFIC = ("port_rcv_data", "port_xmit_data")
COUNTERS = (
    *TRAFFIC,
    *("link_downed", "link_error_recovery", "symbol_error", "rnr_nak_retry_err", "roce_slow_restart"),
    *("excessive_buffer_overrun_errors", "local_link_integrity_errors", "port_rcv_errors", "port_xmit_discards"),
    *("local_ack_timeout_err", "np_cnp_sent"),
)
"""Counters that the diagnosis reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandPort:
    """One port in one copy. `at`: time of the copy, wall seconds of its file `state`; `gid`: globally unique, if the
    copy has it; `node_folder`: the folder named after the node."""

    node: NodeId
    device: str
    number: str
    path: str
    node_folder: str
    at: float
    gid: str = ""
    state: int
    physical: int | None = None
    link_layer: str = ""
    rate: Rate | None = None
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def rail(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def up(self) -> bool:
        return self.state in UP_STATES

    @property
    def used(self) -> bool:
        return any(self.counters.get(c, 0) for c in (*TRAFFIC, "link_downed"))

    @property
    def condition(self) -> str:
        physical = PHYSICAL_STATES.get(self.physical or 0, UNKNOWN)
        return f"{STATES.get(self.state, UNKNOWN)}, physical state {physical}"


def is_device(folder: Path) -> bool:
    """Whether the folder is an RDMA device: `ports/<n>/state` parses as a port state."""
    return next(_port_folders(folder), None) is not None


def devices_in(folder: Path, names: Iterable[str]) -> list[Path]:
    """Subfolders in `names` that are devices, including links: `/sys/class/infiniband` contains only links."""
    return [device for name in sorted(names) if is_device(device := folder / name)]


def read(devices: Sequence[Path], budget: Budget | None = None) -> list[InfinibandPort]:
    """All ports, up to where the budget ends the reading. A missing or malformed file leaves its value unknown."""
    budget, ports = budget or Budget(), list[InfinibandPort]()
    with suppress(ReadingStopped):
        for device in devices:
            budget.check_time(str(device))
            its = [p for folder in _port_folders(device) if (p := _port(device, folder)) is not None]
            budget.keep(PORT_BYTES * len(its), str(device))
            ports += its
    gids = dict[tuple[NodeId, str], set[str]]()
    for p in ports:
        gids.setdefault((p.node, p.rail), set()).add(p.gid)
    if all(len(its) == 1 for its in gids.values()):
        return ports
    # `rack-1/node-1` and `rack-2/node-1` are not two copies of one node.
    top = os.path.commonpath([p.node_folder for p in ports])
    return [replace(p, node=NodeId(os.path.relpath(p.node_folder, top))) for p in ports]


def _port_folders(device: Path) -> Iterator[Path]:
    try:
        numbers = sorted(os.listdir(device / "ports"))[:NUM_PORTS_MAX]
    except OSError:
        return
    for number in numbers:
        folder = device / "ports" / number
        if re.fullmatch("[0-9]{1,3}", number) and parse_state(_text(folder / "state")) is not None:
            yield folder


def _port(device: Path, folder: Path) -> InfinibandPort | None:
    try:
        state, made_at = parse_state(_text(folder / "state")), (folder / "state").stat().st_mtime
    except OSError:
        state = None
    if state is None:
        return None  # it disappeared while it was read
    counters = dict[str, int]()
    for name in COUNTERS:
        text = _text(folder / "counters" / name) or _text(folder / "hw_counters" / name)
        if text and re.fullmatch("[0-9]{1,20}", text) and int(text) < 2**64 - 1:  # all ones: a dead device
            counters[name] = int(text)
    node_folder = next((parent for parent in device.absolute().parents if parent.name not in CLASS_FOLDERS), None)
    return InfinibandPort(
        node=NodeId(node_folder.name) if node_folder else THIS_NODE,
        node_folder=str(node_folder or "/"),
        device=device.name,
        number=folder.name,
        path=str(folder),
        at=made_at,
        gid=_text(folder / "gids" / "0") or "",
        state=state,
        physical=parse_state(_text(folder / "phys_state")),
        link_layer=(_text(folder / "link_layer") or "")[:40],
        rate=parse_rate(_text(folder / "rate")),
        counters=counters,
    )


def _text(file: Path) -> str | None:
    try:
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A pipe or a device in an untrusted tree could block forever.
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return os.read(number, TEXT_BYTES_MAX).decode("utf-8", "replace").strip() if is_file else None
    except OSError:
        return None
    finally:
        os.close(number)


DETECTOR = "infiniband_trees"
NUM_EVIDENCE_MAX = 8
NUM_UNDECIDED_MAX = 64
"""Maximum number of nodes in a "cannot tell"."""
MANY = {
    **dict.fromkeys(("excessive_buffer_overrun_errors", "local_link_integrity_errors"), 1),
    "link_downed": 2,
    "link_error_recovery": 5,
    "rnr_nak_retry_err": 10,
    "symbol_error": 120,
    "roce_slow_restart": 600,
    "port_rcv_errors": 600,
    "port_xmit_discards": 6000,
    "local_ack_timeout_err": 60,
}
"""Lower counts are normal, regardless of the peers: single flaps are tolerated, a job that dies leaves some retries,
and the other values are those that `GROWTH` allows within an hour or a minute."""
TIMES_PEERS = 10.0
"""A count is high at ten times the median of the others: counters of healthy links differ by less."""
NUM_PEERS_MIN = 3
GROWTH: Mapping[str, tuple[float, float, str]] = {
    **dict.fromkeys(
        ("link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors", "rnr_nak_retry_err"),
        (0.0, 1.0, "no increase is normal"),
    ),
    "symbol_error": (120.0, 3600.0, "at most 120 an hour are normal"),
    "link_error_recovery": (5.0, 60.0, "at most 5 a minute are normal"),
    **dict.fromkeys(("roce_slow_restart", "port_rcv_errors"), (10.0, 1.0, "at most 10 a second are normal")),
    "port_xmit_discards": (100.0, 1.0, "at most 100 a second are normal"),
    "local_ack_timeout_err": (1.0, 1.0, "at most one a second is normal"),
}
"""By counter: (maximum growth, per seconds, explanation), from NVIDIA/NVSentinel, nic-health-monitor, link counter
detection; 120 symbol errors an hour are the IBTA's bit error rate of 1e-12."""
OF_OTHERS = frozenset({"local_ack_timeout_err", "rnr_nak_retry_err", "roce_slow_restart", "port_xmit_discards"})
"""Counters that the remote end or the path may cause: a dead peer does not respond."""
CONGESTION: Mapping[str, tuple[float, str]] = {"np_cnp_sent": (1000.0, "congestion notifications (CNP)")}
"""By counter: (minimum per second, description). No normal rate is published, so ports are compared only with each
other. A flow with all packets marked causes one notification per 50 us, 20,000 per second (DCQCN, Zhu et al., SIGCOMM
2015, section 5). PFC pauses are not in InfiniBand trees; `ethtool -S` has them."""
NUM_GROWN_MIN = 5
"""A smaller growth is too small for a rate: two in a second are not 7,200 per hour."""
NUM_NODES_SHARED_MIN = 3
SHARED_RATIO = 0.5
NUM_RAILS_MIN = 4
"""With this many rails, independent faults of machines do not concentrate on one of them."""
CONFIDENCE_CANNOT_TELL = 0.3
SETTLE_COUNTS = "a second copy of the same nodes some minutes later, next to the first: whether it still grows"
SETTLE_OTHERS = (
    "the same counter of its communication peers: if it is high there, too, one of them or the path is faulty"
)
SETTLE_CONGESTED = "its PCIe link and the PFC pauses that it sends (ethtool -S: tx_prio*_pause), to see if it is slow"
SETTLE_SHARED = "what they have in common: the switch of this rail, its cabling, the subnet manager and their logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFault:
    """A fault of one port. `kind`: `down`, `slow`, or the counter's name."""

    port: InfinibandPort
    kind: str
    confidence: float
    text: str
    values: Mapping[str, float] = field(default_factory=dict)
    settle: str = ""

    @property
    def evidence(self) -> Evidence:
        return Evidence(kind=f"infiniband_{self.kind}", text=f"{self.port.node}: {self.text}", values=dict(self.values))


class InfinibandFabric:
    """`ports`: the newest copy of each; `before`: the oldest copy by (node, rail), where there are two or more."""

    def __init__(self, copies: Iterable[InfinibandPort]) -> None:
        first, last = dict[tuple[str, str], InfinibandPort](), dict[tuple[str, str], InfinibandPort]()
        for port in sorted(copies, key=lambda p: (p.at, p.path)):
            key = port.node, port.rail
            first.setdefault(key, port)
            last[key] = port
        self.ports = tuple(last[key] for key in sorted(last))
        self.before = {k: p for k, p in first.items() if last[k].at > p.at}
        self.rails, self.nodes = dict[str, list[InfinibandPort]](), dict[NodeId, list[InfinibandPort]]()
        counts = dict[tuple[str, str], list[int]]()
        for port in self.ports:
            self.rails.setdefault(port.rail, []).append(port)
            self.nodes.setdefault(port.node, []).append(port)
            for name, count in port.counters.items():
                counts.setdefault((port.link_layer, name), []).append(count)
        self.usual = {key: (median(its), len(its)) for key, its in counts.items()}
        rates = dict[tuple[str, str], list[float]]()
        for port in self.ports:
            for name in CONGESTION:
                if (grown := self.grown(port, name)) is not None:
                    rates.setdefault((port.link_layer, name), []).append(grown[0] / grown[1])
        self.usual_rates = {key: (median(its), len(its)) for key, its in rates.items()}

    def grown(self, port: InfinibandPort, counter: str) -> tuple[int, float] | None:
        """(growth, seconds) between the oldest and the newest copy; None: there is only one copy."""
        before = self.before.get((port.node, port.rail))
        if before is None or counter not in before.counters or counter not in port.counters:
            return None
        old, new = before.counters[counter], port.counters[counter]
        return (new - old if new >= old else new), port.at - before.at  # lower than before: the counter was reset

    def rail(self, port: InfinibandPort) -> list[InfinibandPort]:
        """The same port of other nodes."""
        return [p for p in self.rails[port.rail] if p is not port]

    def alike(self, port: InfinibandPort) -> list[InfinibandPort]:
        """Other ports of the same kind on its node."""
        return [p for p in self.nodes[port.node] if p.link_layer == port.link_layer and p is not port]


def diagnose(ports: Sequence[InfinibandPort]) -> tuple[list[Finding], list[str]]:
    """Findings, one per node or shared fault; and remarks on cases that these copies cannot decide."""
    if not ports:
        return [], ["cannot tell anything: the ports disappeared while they were read"]
    fleet = InfinibandFabric(ports)
    remarks = list[str]()
    faults = list[PortFault]()
    for port in fleet.ports:
        faults += (_slow if port.up else _down)(fleet, port, remarks)
        faults += (f for name in MANY if name in port.counters for f in _counted(fleet, port, name, remarks))
        faults += (f for name in CONGESTION for f in _congested(fleet, port, name))
    if len(fleet.ports) == 1 and not (fleet.before or faults or remarks):
        remarks.append(
            f"whether port {fleet.ports[0].rail} is as fast and as free of errors as others: it is the only one; "
            "copies of other nodes, or a second copy some minutes later, would settle it"
        )
    shared, own = _shared(fleet, faults)
    times = min(p.at for p in ports), max(p.at for p in ports)
    by_node = groupby(sorted(own, key=lambda c: c.port.node), key=lambda c: c.port.node)
    findings = [_of_node(list(its), *times) for _, its in by_node]
    named = {c.port.node for c in own}
    findings += [_of_several(s, named, fleet, *times) for s in shared]
    # Each remark once, with its number of nodes.
    return findings, [
        f"cannot tell {text}" + (f" (on {number} nodes)" if number > 1 else "")
        for text, number in Counter(remarks).items()
    ]


def summary(ports: Sequence[InfinibandPort]) -> str:
    fleet = InfinibandFabric(ports)
    up = sum(p.up for p in fleet.ports)
    copies = ", two or more copies of some" if fleet.before else ""
    return f"{counted(len(fleet.ports), 'port')} of {counted(len(fleet.nodes), 'node')}, {up} of them active{copies}"


def _down(fleet: InfinibandFabric, port: InfinibandPort, remarks: list[str]) -> Iterator[PortFault]:
    rail = fleet.rail(port)
    up = sum(p.up for p in rail)
    values = {"num_up": float(up), "num_peers": float(len(rail))}
    what = f"port {port.rail} is down ({port.condition})"
    if up > SHARED_RATIO * len(rail):
        confidence = 0.9 if up > 1 else 0.7
        text = f"{what}, and active on {up} of {counted(len(rail), 'other node')}"
        yield PortFault(port=port, kind="down", confidence=confidence, text=text, values=values)
    elif port.used:
        yield PortFault(port=port, kind="down", confidence=0.7, text=f"{what}, and has been in use", values=values)
    else:
        remarks.append(f"whether port {port.rail} should be active: it is down, and no counter shows that it ever was")


def _slow(fleet: InfinibandFabric, port: InfinibandPort, remarks: list[str]) -> Iterator[PortFault]:
    if port.rate is None:
        return
    for group, words, confidence in (
        (fleet.rail(port), "of other nodes", 0.85),
        (fleet.alike(port), "of its node", 0.6),
    ):
        rates = [p.rate for p in group if p.up and p.rate is not None]
        usual = _usual([r.bytes_per_second for r in rates])
        if usual is None:
            continue
        if port.rate.bytes_per_second < usual:
            other = next(r for r in rates if r.bytes_per_second == usual)
            number = sum(r.bytes_per_second == usual for r in rates)
            text = f"port {port.rail} runs at {port.rate}, {number} of {len(rates)} ports {words} at {other}"
            values = {"rate_bytes_per_second": port.rate.bytes_per_second, "peers_bytes_per_second": usual}
            yield PortFault(port=port, kind="slow", confidence=confidence, text=text, values=values)
        return  # the rail is the better reference
    if port.link_layer == "InfiniBand" and port.rate.num_lanes == 1:
        text = f"port {port.rail} runs at {port.rate}: one lane, and an InfiniBand port has four"
        yield PortFault(port=port, kind="slow", confidence=0.6, text=text, values={"num_lanes": 1.0})
    elif port.link_layer == "InfiniBand" and port.rate.num_lanes == 2:
        remarks.append(f"whether port {port.rail} should run on four lanes: it runs on two, as split cables make it do")


def _usual(rates: Sequence[float]) -> float | None:
    """The rate of the majority of two or more ports, if there is one."""
    if len(rates) < 2:
        return None
    rate, number = Counter(rates).most_common(1)[0]
    return rate if number > len(rates) / 2 else None


def _counted(fleet: InfinibandFabric, port: InfinibandPort, name: str, remarks: list[str]) -> Iterator[PortFault]:
    count = port.counters[name]
    settle = SETTLE_OTHERS if name in OF_OTHERS else ""
    if (growth := fleet.grown(port, name)) is not None:
        grown, seconds = growth
        most, per_seconds, in_order = GROWTH[name]
        if grown > most * seconds / per_seconds and (not most or grown >= NUM_GROWN_MIN):
            text = f"port {port.rail}: {name} grew by {grown} to {count} in {seconds:.0f} s, and {in_order}"
            values = {"num_grown": float(grown), "seconds": seconds}
            confidence = 0.5 if settle else 0.8
            yield PortFault(port=port, kind=name, confidence=confidence, text=text, values=values, settle=settle)
        return
    if count < MANY[name]:
        return
    middle, num_ports = fleet.usual[port.link_layer, name]
    if num_ports <= NUM_PEERS_MIN:
        remarks.append(f"whether {name} of port {port.rail} is high: one copy, and fewer than {NUM_PEERS_MIN} peers")
    elif count >= TIMES_PEERS * middle:
        at_end = ", its maximum" if count == SATURATES_AT.get(name) else ""
        text = f"port {port.rail}: {name} {count}{at_end}; the median of {num_ports} ports is {middle:g}"
        values = {"count": float(count), "median": float(middle)}
        yield PortFault(port=port, kind=name, confidence=0.5, text=text, values=values, settle=SETTLE_COUNTS)


def _congested(fleet: InfinibandFabric, port: InfinibandPort, name: str) -> Iterator[PortFault]:
    growth = fleet.grown(port, name)
    if growth is None:
        return
    grown, seconds = growth
    least, words = CONGESTION[name]
    usual, num_ports = fleet.usual_rates[port.link_layer, name]
    rate = grown / seconds
    if num_ports > NUM_PEERS_MIN and rate >= max(least, TIMES_PEERS * usual):
        text = (
            f"port {port.rail}: {name} grew by {rate:,.0f} a second in {seconds:.0f} s: it sent {words} to its "
            f"senders; the median of {num_ports} ports is {usual:,.0f} a second"
        )
        values = {"per_second": rate, "median_per_second": usual, "seconds": seconds}
        yield PortFault(port=port, kind=name, confidence=0.4, text=text, values=values, settle=SETTLE_CONGESTED)


@dataclass(frozen=True, slots=True)
class SharedPortFault:
    """`rails`: the affected rails; empty when most nodes are affected, on any rails."""

    kind: str
    rails: tuple[str, ...]
    faults: tuple[PortFault, ...]


def _shared(fleet: InfinibandFabric, faults: Sequence[PortFault]) -> tuple[list[SharedPortFault], list[PortFault]]:
    """Faults shared by several nodes, by kind; and the others, which belong to single nodes."""
    shared, own = list[SharedPortFault](), list[PortFault]()
    for kind in dict.fromkeys(c.kind for c in faults):
        of_kind = [c for c in faults if c.kind == kind]
        by_rail = dict[str, list[PortFault]]()
        for c in of_kind:
            by_rail.setdefault(c.port.rail, []).append(c)
        hit = tuple(rail for rail, some in by_rail.items() if _is_shared(fleet, len(some), rail, len(of_kind)))
        if hit:
            shared.append(SharedPortFault(kind, hit, tuple(c for rail in hit for c in by_rail.pop(rail))))
        rest = [c for some in by_rail.values() for c in some]
        affected = len({c.port.node for c in rest})
        if affected >= NUM_NODES_SHARED_MIN and affected >= SHARED_RATIO * len(fleet.nodes):
            shared.append(SharedPortFault(kind, (), tuple(rest)))
        else:
            own += rest
    return shared, own


def _is_shared(fleet: InfinibandFabric, number: int, rail: str, num_of_kind: int) -> bool:
    if number > 1 and number >= SHARED_RATIO * len(fleet.rails[rail]):
        return True
    concentrated = len(fleet.rails) >= NUM_RAILS_MIN and number > SHARED_RATIO * num_of_kind
    return concentrated and number >= NUM_NODES_SHARED_MIN


def _of_node(faults: Sequence[PortFault], first_at: float, last_at: float) -> Finding:
    worst_first = sorted(faults, key=lambda c: -c.confidence)
    node = worst_first[0].port.node
    more = f"; and {len(worst_first) - 1} more" if len(worst_first) > 1 else ""
    settled_by = tuple(dict.fromkeys(c.settle for c in faults if c.settle))
    return Finding(
        detector=DETECTOR,
        suspects=(Suspect(node=node),),
        fault_class=FaultClass.NETWORK,
        onset=first_at,
        detected_at=last_at,
        confidence=worst_first[0].confidence,
        because=f"{node_text(node)}: {worst_first[0].text}{more}",
        evidence=(*(c.evidence for c in worst_first[:NUM_EVIDENCE_MAX]), *map(settles, settled_by)),
    )


def _of_several(
    shared: SharedPortFault, named: set[NodeId], fleet: InfinibandFabric, first_at: float, last_at: float
) -> Finding:
    nodes = list(dict.fromkeys(c.port.node for c in shared.faults))
    # A node with its own finding is not undecided.
    suspects = [n for n in nodes if n not in named] or nodes
    what = {"down": "is down", "slow": "runs slow"}.get(shared.kind, f"counts {shared.kind}")
    more = f" (and {len(shared.rails) - 1} more)" if len(shared.rails) > 1 else ""
    which = f"port {shared.rails[0]}{more}" if shared.rails else "some port"
    return Finding(
        detector=DETECTOR,
        suspects=tuple(Suspect(node=n) for n in suspects[:NUM_UNDECIDED_MAX]),
        fault_class=FaultClass.CANNOT_TELL,
        onset=first_at,
        detected_at=last_at,
        confidence=CONFIDENCE_CANNOT_TELL,
        because=f"{which} {what} on {len(nodes)} of {len(fleet.nodes)} nodes: a shared cause, not a single machine",
        evidence=(*(c.evidence for c in shared.faults[:NUM_EVIDENCE_MAX]), settles(SETTLE_SHARED)),
        about=f":{shared.kind} {' '.join(shared.rails)}",  # of no role
    )
