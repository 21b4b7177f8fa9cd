"""Whether the disk that the agent and its ranks write to is full: one event when it is, one when it has room again.

It is the disk of the agent's data directory. State pages are there; in a run of the bundled runtime also journal,
ledger and checkpoints. Full means that a user's process can write next to nothing; the alert `RolecallDiskFull` warns
long before that. Several nodes may see the same disk: by `device` it is one.
"""

import os
from pathlib import Path
from typing import NamedTuple

from rolecall.core.telemetry import AgentEventKind

FULL_BYTES, FULL_SHARE = 1 << 20, 0.01
"""A disk with less than the smaller of both is full."""
ROOM_FACTOR = 2.0
"""It has room again with this many times as much: one that is freed and filled by turns is one fault."""
NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p", "afs", "glusterfs"),
        "wekafs",
        "virtiofs",
    }
)
"""In addition to all that begin with `fuse`."""


def is_remote(type_: str) -> bool:
    return type_ in NETWORK_TYPES or type_.startswith("fuse")


class DiskSpace(NamedTuple):
    """A file system as a user's process sees it. `number`: `major:minor` on this host. `files_free`: inodes; None if it
    does not count them."""

    path: str
    number: str
    available_bytes: int
    size_bytes: int
    files_free: int | None = None
    proc: Path = Path("/proc")

    @property
    def is_full(self) -> bool:
        return self._is_below(1.0)

    @property
    def has_room(self) -> bool:
        return not self._is_below(ROOM_FACTOR)

    def _is_below(self, factor: float) -> bool:
        return self.files_free == 0 or self.available_bytes < factor * min(FULL_BYTES, FULL_SHARE * self.size_bytes)

    @property
    def device(self) -> str:
        """The same for all that see this disk. Read from `proc` at each call: needed for events only."""
        return _device(self.number, self.proc)

    @property
    def detail(self) -> dict[str, str]:
        known = {"path": self.path, "device": self.device}
        known |= {"available_bytes": str(self.available_bytes), "size_bytes": str(self.size_bytes)}
        return known if self.files_free is None else {**known, "files_free": str(self.files_free)}


def disk_space(path: Path, proc: Path = Path("/proc")) -> DiskSpace | None:
    """The file system of `path`; None if it cannot be asked, or is read-only: nobody expects to write there."""
    try:
        stat, number = os.statvfs(path), path.stat().st_dev
    except OSError:
        return None
    if stat.f_flag & os.ST_RDONLY:
        return None
    return DiskSpace(
        path=str(path),
        number=f"{os.major(number)}:{os.minor(number)}",
        available_bytes=stat.f_bavail * stat.f_frsize,
        size_bytes=stat.f_blocks * stat.f_frsize,
        files_free=stat.f_favail if stat.f_files else None,
        proc=proc,
    )


def _device(number: str, proc: Path) -> str:
    """Of a network file system its server's name for it, which all nodes share; else the host's boot and the number."""
    try:
        for line in (proc / "self/mountinfo").read_text("utf-8", "replace").splitlines():
            mount, _, source = line.partition(" - ")
            words = source.split(" ")
            if len(words) > 1 and f" {number} " in mount and is_remote(words[0]):
                return words[1]
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot} {number}"


class DiskWatch:
    """Of one disk; owned by one thread."""

    def __init__(self) -> None:
        self._is_full = False

    def poll(self, space: DiskSpace | None) -> AgentEventKind | None:
        """The event of the change since the last poll. `space`: now; None: unknown, which is no change."""
        if space is None or not (space.has_room if self._is_full else space.is_full):
            return None
        self._is_full = not self._is_full
        return AgentEventKind.DISK_FULL if self._is_full else AgentEventKind.DISK_FREE
