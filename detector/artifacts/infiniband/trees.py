"""Reads copies of `/sys/class/infiniband`, of one node or of many side by side.

A folder `<node>/[infiniband/]<device>/ports/<n>` is a port if its file `state` parses as a port state; the files that
the diagnosis (findings.py) needs become an `InfinibandPort`. The files are untrusted: sizes and numbers are bounded.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolecall.core.ids import NodeId
from rolecall.formats.infiniband import PHYSICAL_STATES, STATES, UNKNOWN, UP_STATES, Rate, parse_rate, parse_state

TEXT_BYTES_MAX = 4096
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


def read(devices: Sequence[Path]) -> list[InfinibandPort]:
    """All ports. A missing or malformed file leaves its value unknown."""
    ports = [p for device in devices for folder in _port_folders(device) if (p := _port(device, folder)) is not None]
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
