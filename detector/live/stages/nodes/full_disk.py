"""A disk that processes write to is full: which node, which path, how much is left.

Its agent says so by events, and says when it has room again (agent/disk_space.py). No new process would cure it: the
finding names a node and no replica. Nodes that share a disk (a home directory, or nodes that are processes of one host)
give one finding: it names the node of the controller, which writes the journal, else the first by name.

The journal may be on this disk. Then the finding cannot be recorded before there is room, and therefore stands for
`RECORD_SECONDS` after that. Nothing is done because of it, so that it may come late.
"""

from dataclasses import dataclass, field

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.core.text import counted
from rolecall.detector.base.findings import ADVISES, FULL_DISK
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.stage import Stage, Tick

GATHER_SECONDS = 2.0
"""All agents of the nodes that share a disk look at it within this time."""
RECORD_SECONDS = 15.0
"""After the end: the journal is tried twice a second, and a watch that is restarted needs a few seconds."""
SILENT_SECONDS = 60.0
"""A node whose agent has not answered for this long says nothing of its disk any more."""
DISKS_MAX = 256
CONTROLLER = "controller"


@dataclass(slots=True)
class FullDisk:
    """One disk. Times in wall seconds; `ended` is 0 while it is full."""

    path: str
    available_bytes: int
    size_bytes: int
    files_free: int | None
    onset: float
    paths: dict[str, str] = field(default_factory=dict)  # node that saw it full -> its directory there
    full_on: set[str] = field(default_factory=set)  # nodes that see it full
    node: str = ""  # that the finding names, from the first one on
    num_nodes: int = 0  # that had seen it full when it was first reported
    ended: float = 0.0


class FullDiskStage(Stage):
    name = FULL_DISK

    def __init__(self) -> None:
        self.state: dict[str, FullDisk] = {}  # by device

    def evaluate(self, tick: Tick) -> list[Finding]:
        for event, _ in tick.events:
            self._take(event, tick.now)
        silent = {node for node, since, _ in tick.fleet.unreachable if tick.now - since > SILENT_SECONDS}
        for node in {*tick.observation.left, *silent}:
            self._end(node, tick.now)
        self.state = {d: s for d, s in self.state.items() if not s.ended or tick.now - s.ended <= RECORD_SECONDS}
        return [_finding(tick, disk) for disk in self.state.values() if _is_reported(disk, tick.now)]

    def _take(self, event: AgentEvent, now: float) -> None:
        node, device = str(event.node), event.detail.get("device", "")
        if event.kind is AgentEventKind.AGENT_STARTED:
            self._end(node, event.wall_at)  # it soon says so again, if it still is
        elif event.kind is AgentEventKind.DISK_FREE:
            self._end(node, event.wall_at, device)
        elif event.kind is AgentEventKind.DISK_FULL:
            disk = self.state.get(device)
            if disk is None or (disk.ended and event.wall_at - disk.ended > RECORD_SECONDS):
                if disk is None and len(self.state) >= DISKS_MAX:
                    return
                disk = self.state[device] = FullDisk(
                    path=event.detail.get("path", ""),
                    available_bytes=_number(event.detail.get("available_bytes")) or 0,
                    size_bytes=_number(event.detail.get("size_bytes")) or 0,
                    files_free=_number(event.detail.get("files_free")),
                    onset=min(event.wall_at, now),
                )
            disk.paths[node], disk.ended = event.detail.get("path", ""), 0.0
            disk.full_on.add(node)

    def _end(self, node: str, at: float, device: str = "") -> None:
        """This node sees no full disk any more; `device`: this one only."""
        for known, disk in self.state.items():
            if node in disk.full_on and device in ("", known):
                disk.full_on.remove(node)
                disk.ended = 0.0 if disk.full_on else at


def _is_reported(disk: FullDisk, now: float) -> bool:
    """Not one that had room again at once."""
    return (disk.ended or now) - disk.onset >= GATHER_SECONDS


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 20 and text.isascii() and text.isdecimal() else None


def _finding(tick: Tick, disk: FullDisk) -> Finding:
    if not disk.node:
        disk.node = min(disk.paths, key=lambda node: (not _has_controller(tick.fleet, node), node))
        disk.path, disk.num_nodes = disk.paths[disk.node], len(disk.paths)
    left = f"{disk.available_bytes:,} of {disk.size_bytes:,} bytes"
    if disk.files_free == 0:
        left += " and no inode"
    shared = disk.num_nodes - 1
    because = f"the disk of {disk.path} on {disk.node} is full: {left} free"
    if shared > 0:
        because += f"; {counted(shared, 'other node')} {'shares' if shared == 1 else 'share'} it"
    values = {"available_bytes": float(disk.available_bytes), "size_bytes": float(disk.size_bytes)}
    return Finding(
        detector=FULL_DISK,
        suspects=(Suspect(node=NodeId(disk.node)),),
        fault_class=FaultClass.RESOURCE_EXHAUSTED,
        onset=disk.onset,
        detected_at=tick.now,
        confidence=0.99,
        because=because,
        evidence=(
            Evidence(kind=FULL_DISK, text=because, values=values),
            Evidence(kind=ADVISES, text=f"free space on the disk of {disk.path}; never delete journal.db-wal"),
        ),
        about=f":{FULL_DISK}:{disk.path}",
    )


def _has_controller(fleet: MonitoredProcesses, node: str) -> bool:
    return any(s.node == node for s in fleet.roster.of_role(CONTROLLER).values())
