"""Identifiers: ids match one pattern, a replica is written `role/index`, a process is (node, pid, start time).

A PID alone is ambiguous, because the kernel reuses it. `ProcessId.start_ticks` is field 22 of `/proc/PID/stat` (clock
ticks since boot), which together with the PID is unique on one node between two boots.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from rolecall.core.errors import InvalidId
from rolecall.core.proc_stat import PROC, read_stat

NodeId = NewType("NodeId", str)
RunId = NewType("RunId", str)
ReplicaId = NewType("ReplicaId", str)
GroupId = NewType("GroupId", str)
IncidentId = NewType("IncidentId", str)

ID_PATTERN = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,62}$")
REPLICA_PATTERN = re.compile(r"^([a-z0-9][a-z0-9_.-]{0,62})/(0|[1-9][0-9]{0,5})$")


def checked_id(text: str, what: str = "id") -> str:
    """`text` itself if it is a legal id. Raises InvalidId: naming `what` and the offending text."""
    # fullmatch: `$` alone would accept a trailing newline.
    if not ID_PATTERN.fullmatch(text):
        raise InvalidId(what=what, text=text)
    return text


def replica_id(role: str, index: int) -> ReplicaId:
    """`rollout`, 3 -> `rollout/3`."""
    return ReplicaId(f"{checked_id(role, 'role')}/{index}")


def split_replica(replica: str) -> tuple[str, int]:
    """`rollout/3` -> (`rollout`, 3). Raises InvalidId: when `replica` is not written `role/index`."""
    found = REPLICA_PATTERN.fullmatch(replica)
    if found is None:
        raise InvalidId(what="replica", text=replica)
    return found.group(1), int(found.group(2))


def role_of(replica: str) -> str:
    """`trainer` of `trainer/1`; a text without a number is a role."""
    return replica.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ProcessId:
    """One OS process: unique on its node until the next boot."""

    node: NodeId
    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.node}:{self.pid}:{self.start_ticks}"


def process_start_ticks(pid: int, proc: Path = PROC) -> int | None:
    """Start time of `pid` in clock ticks since boot, or None when there is no such process (a zombie still counts)."""
    stat = read_stat(pid, proc)
    return None if stat is None else stat.start_ticks
