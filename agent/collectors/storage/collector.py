"""Disks, file systems and pressure: `/proc/diskstats`, statvfs of mounts, `/proc/pressure`.

Disks: physical ones (with a `device` link) and configured ones. File systems: local ones on a disk, the root and shared
memory (which a data loader fills), each device once, and configured mounts. statvfs of a network file system may never
return when its server is gone: such a mount is polled only if it is configured, and in its own thread.
Formats: Documentation/admin-guide/iostats.rst, Documentation/accounting/psi.rst, proc(5).

In a container the mounts are those of the host's init process, and each is queried below the host's root file system
(`rootfs`); names are the host's. Read-only state comes from the mount's line in `mounts`, because a container's own
view is mostly read-only."""

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.agent.collectors.counters import MonotonicCounters
from rolecall.agent.collectors.process.host import parse_stalls
from rolecall.agent.disk_space import is_remote
from rolecall.core.ids import NodeId
from rolecall.core.metrics.collectors import STORAGE_METRICS
from rolecall.core.metrics.metric import Metric, MetricValue

NUM_DISKS_MAX = 64
NUM_MOUNTS_MAX = 32
FILE_SYSTEMS_EVERY_SECONDS = 15.0
SECTOR_BYTES = 512
"""Unit of diskstats, independent of the disk's sector size."""
FIRST_ANSWER_SECONDS = 0.2
MOUNT_CHARS_MAX = 256
LOCAL_TYPES = frozenset(
    {*("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"), "vfat", "exfat", "ntfs3"}
)
ALWAYS = frozenset({"/", "/dev/shm"})
"""Polled whatever their type: in a container the root is an overlay, and shared memory is a tmpfs."""

_BY_NAME = {m.name: m for m in STORAGE_METRICS}
_OCTAL = re.compile(r"\\([0-7]{3})")


def _metric(name: str) -> Metric:
    return _BY_NAME[f"rolecall_{name}"]


_DISK_COLUMNS: tuple[tuple[int, float, Metric], ...] = (
    (0, 1.0, _metric("disk_reads_total")),
    (2, 1 / SECTOR_BYTES, _metric("disk_read_bytes_total")),
    (3, 1000.0, _metric("disk_read_seconds_total")),
    (4, 1.0, _metric("disk_writes_total")),
    (6, 1 / SECTOR_BYTES, _metric("disk_written_bytes_total")),
    (7, 1000.0, _metric("disk_write_seconds_total")),
    (9, 1000.0, _metric("disk_busy_seconds_total")),
)
"""Column after the name, counts per base unit, metric. Milliseconds are 32 bits wide and wrap."""
_ACTIVE_COLUMN, _ACTIVE = 8, _metric("disk_requests_active")
_NUM_COLUMNS = 11
_ANSWERS, _SIZE, _AVAILABLE = map(_metric, ("filesystem_up", "filesystem_size_bytes", "filesystem_available_bytes"))
_FILES, _FILES_FREE, _READONLY = map(_metric, ("filesystem_files", "filesystem_files_free", "filesystem_readonly"))
_IO_STALL, _FULL_STALL = _metric("host_io_stall_seconds_total"), _metric("host_full_stall_seconds_total")
_RESOURCES = ("cpu", "memory", "io")


def parse_diskstats(text: str) -> dict[str, list[int]]:
    """The columns after the name, by device. Malformed lines are skipped."""
    found = dict[str, list[int]]()
    for line in text.splitlines():
        _, _, device, *columns = line.split() if line.count(" ") > 2 else ("", "", "")
        if len(columns) >= _NUM_COLUMNS and all(c.isascii() and c.isdecimal() for c in columns):
            found[device] = [int(c) for c in columns]
    return found


class Mount(NamedTuple):
    device: str
    path: str
    type: str
    readonly: bool = False


def parse_mounts(text: str) -> list[Mount]:
    """Parses `/proc/mounts`; spaces in paths are written `\\040`."""
    found = []
    for line in text.splitlines():
        parts = line.split(" ")
        if len(parts) >= 4:
            device, path = (_OCTAL.sub(lambda m: chr(int(m.group(1), 8)), p) for p in parts[:2])
            found.append(Mount(device, path, parts[2], "ro" in parts[3].split(",")))
    return found


def chosen(mounts: Iterable[Mount], named: Iterable[str]) -> list[Mount]:
    """`named` mounts, then local disks, each device once, by the shortest path; at most NUM_MOUNTS_MAX."""
    # The last mount on a path hides earlier ones.
    on_top = {m.path: m for m in mounts if len(m.path) <= MOUNT_CHARS_MAX}
    taken = {path: on_top[path] for path in dict.fromkeys(named) if path in on_top}
    devices = {m.device for m in taken.values() if m.type in LOCAL_TYPES}
    for mount in sorted(on_top.values(), key=lambda m: (m.path not in ALWAYS, len(m.path), m.path)):
        local = mount.type in LOCAL_TYPES and mount.device not in devices
        if (local or mount.path in ALWAYS) and mount.path not in taken and not is_remote(mount.type):
            taken[mount.path] = mount
            devices.add(mount.device)
    return list(taken.values())[:NUM_MOUNTS_MAX]


Statvfs = Callable[[str], os.statvfs_result]


@dataclass(slots=True)
class _Remote:
    """A network file system: one thread at a time calls statvfs, and may hang forever."""

    thread: threading.Thread | None = None
    answer: os.statvfs_result | OSError | None = None


class StorageCollector:
    """`disks`, `mounts`: to poll besides those found. `interval_seconds`: of disks and pressure. `rootfs`: where the
    host's root file system is mounted."""

    name = "storage"

    def __init__(
        self,
        node: NodeId,
        *,
        disks: Iterable[str] = (),
        mounts: Iterable[str] = (),
        proc: Path = Path("/proc"),
        rootfs: Path = Path("/"),
        block: Path = Path("/sys/block"),
        statvfs: Statvfs = os.statvfs,
        interval_seconds: float = 1.0,
        file_systems_every_seconds: float = FILE_SYSTEMS_EVERY_SECONDS,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._node, self._disks, self._mounts = node, frozenset(disks), tuple(mounts)
        self._proc, self._block, self._statvfs = proc, str(block), statvfs
        # /proc/mounts shows the mount namespace of the reader.
        self._mounts_file = "mounts" if rootfs == Path("/") else "1/mounts"
        self._rootfs = str(rootfs).rstrip("/")
        self._file_systems_every_seconds = file_systems_every_seconds
        self._file_systems: list[MetricValue] = []
        self._file_systems_due_at = float("-inf")
        self._remotes: dict[str, _Remote] = {}
        self._chosen_disks: dict[str, bool] = {}
        self._totals = MonotonicCounters()

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: neither disks nor mounts nor pressure can be read."""
        values = self._of_disks() + self._of_pressure()
        if at >= self._file_systems_due_at:
            self._file_systems = self._of_mounts()
            self._file_systems_due_at = at + self._file_systems_every_seconds
        values += self._file_systems
        if not values:
            raise CollectorUnavailable(f"neither diskstats nor mounts nor pressure in {self._proc}")
        return CollectorReading(tuple(values))

    def close(self) -> None:
        pass  # a hanging thread is a daemon: nothing waits for it

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text("utf-8", "replace")
        except OSError:
            return ""  # no PSI in this kernel (or EOPNOTSUPP when disabled)

    def _of_disks(self) -> list[MetricValue]:
        found = parse_diskstats(self._text("diskstats"))
        self._chosen_disks = {d: c for d, c in self._chosen_disks.items() if d in found}
        values = list[MetricValue]()
        for disk, columns in found.items():
            if not self._is_chosen(disk):
                continue
            labels = (self._node, disk)
            for column, divisor, metric in _DISK_COLUMNS:
                total = self._totals.add((disk, metric.name), columns[column])
                if total is not None:
                    values.append(MetricValue(metric, labels, total / divisor))
            values.append(MetricValue(_ACTIVE, labels, float(columns[_ACTIVE_COLUMN])))
        return values

    def _is_chosen(self, disk: str) -> bool:
        chosen_before = self._chosen_disks.get(disk)
        if chosen_before is None:
            wanted = disk in self._disks or os.path.exists(f"{self._block}/{disk.replace('/', '!')}/device")
            chosen_before = wanted and sum(self._chosen_disks.values()) < NUM_DISKS_MAX
            self._chosen_disks[disk] = chosen_before
        return chosen_before

    def _of_pressure(self) -> list[MetricValue]:
        """`some` of CPU and memory comes from agent/collectors/process/host.py."""
        values = list[MetricValue]()
        for resource in _RESOURCES:
            stalls = parse_stalls(self._text(f"pressure/{resource}"))
            if resource == "io" and "some" in stalls:
                values.append(MetricValue(_IO_STALL, (self._node,), stalls["some"]))
            if "full" in stalls:
                values.append(MetricValue(_FULL_STALL, (self._node, resource), stalls["full"]))
        return values

    def _of_mounts(self) -> list[MetricValue]:
        values = list[MetricValue]()
        here = chosen(parse_mounts(self._text(self._mounts_file)), self._mounts)
        paths = {m.path for m in here}
        # The thread of an unmounted file system may still hang: keep it until it ends.
        self._remotes = {p: r for p, r in self._remotes.items() if p in paths or (r.thread and r.thread.is_alive())}
        for path in (p for p in self._mounts if p not in paths):
            values.append(MetricValue(_ANSWERS, (self._node, path), 0.0))  # configured but not mounted
        for mount in here:
            answer: os.statvfs_result | OSError | None
            if is_remote(mount.type):
                answer = self._ask_remote(mount.path)
            else:
                try:
                    answer = self._statvfs(self._seen_at(mount.path))
                except OSError as e:
                    answer = e
            values += self._of_mount(mount, answer)
        return values

    def _seen_at(self, path: str) -> str:
        return f"{self._rootfs}{path}".rstrip("/") or "/"

    def _of_mount(self, mount: Mount, answer: os.statvfs_result | OSError | None) -> list[MetricValue]:
        labels = (self._node, mount.path)
        if not isinstance(answer, os.statvfs_result):
            return [MetricValue(_ANSWERS, labels, 0.0)]
        values = [
            MetricValue(_ANSWERS, labels, 1.0),
            MetricValue(_SIZE, labels, float(answer.f_blocks * answer.f_frsize)),
            MetricValue(_AVAILABLE, labels, float(answer.f_bavail * answer.f_frsize)),
            MetricValue(_READONLY, labels, float(mount.readonly)),
        ]
        if answer.f_files:
            values.append(MetricValue(_FILES, labels, float(answer.f_files)))
            values.append(MetricValue(_FILES_FREE, labels, float(answer.f_favail)))
        return values

    def _ask_remote(self, path: str) -> os.statvfs_result | OSError | None:
        """The result of the previous poll's call, and starts the next one; None while a call hangs."""
        remote = self._remotes.setdefault(path, _Remote())
        if remote.thread is not None and remote.thread.is_alive():
            return None
        answer, remote.answer = remote.answer, None

        def ask() -> None:
            try:
                remote.answer = self._statvfs(self._seen_at(path))
            except OSError as e:
                remote.answer = e

        remote.thread = threading.Thread(target=ask, name=f"statvfs-{path[:40]}", daemon=True)
        remote.thread.start()
        if answer is None:  # the first call: most servers respond at once
            remote.thread.join(FIRST_ANSWER_SECONDS)
            answer = remote.answer
        return answer
