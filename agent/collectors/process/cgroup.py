"""Time that CPU quotas throttled a process's cgroups.

v1: `cpu.stat` of the `cpu` controller, `throttled_time` in nanoseconds; v2: `throttled_usec` in microseconds. A quota
on an ancestor throttles everything below it: the largest value on the path to the root is taken, so that nested quotas
do not count twice. Sources: Documentation/scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst.

An agent in a container usually has its own cgroup namespace, and `/proc/PID/cgroup` then gives paths relative to its
own cgroup (`/../../podB/c`) in every /proc: its inode locates that cgroup in the host's tree."""

import os
from functools import cache
from pathlib import Path

NUM_LEVELS_MAX = 32
OWN = Path("/sys/fs/cgroup")
"""Root cgroup of this process's namespace; on a host the root of the hierarchy."""
NUM_GROUPS_MAX = 20_000
"""Searched to locate it, once per hierarchy: 0.2 s."""


def parse_throttled_seconds(text: str) -> float:
    """Seconds throttled, from the text of a `cpu.stat`; 0 without a quota."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "throttled_usec":
            return int(value) * 1e-6
        if key == "throttled_time":
            return int(value) * 1e-9
    return 0.0


def cpu_cgroup(text: str, root: Path) -> tuple[Path, str] | None:
    """(mount point, path below it) of the hierarchy that controls CPU time, from the text of `/proc/PID/cgroup`."""
    unified: str | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" in controllers.split(","):
            joined = root / controllers
            return (joined if joined.is_dir() else root / "cpu"), path
        if number == "0" and not controllers:
            unified = path
    if unified is None:
        return None
    hybrid = root / "unified"  # systemd's hybrid layout
    return (hybrid if hybrid.is_dir() else root), unified


class ThrottleProbe:
    """Reads the throttling of one process's cgroups; their paths are resolved again only when they change."""

    def __init__(self, process_dir: Path, root: Path = Path("/sys/fs/cgroup")) -> None:
        """`process_dir`: `/proc/PID`."""
        self._file, self._root = process_dir / "cgroup", root
        self._membership = ""
        self._stats: list[Path] = []

    def read(self) -> float:
        """Cumulative seconds that quotas throttled the process's cgroup.

        Raises:
            OSError, ValueError: the process's `cgroup` is unreadable, or a `cpu.stat` is malformed.
        """
        membership = self._file.read_text()
        if membership != self._membership:
            self._membership, self._stats = membership, stat_files(membership, self._root)
        largest = 0.0
        for path in self._stats:
            try:
                largest = max(largest, parse_throttled_seconds(path.read_text()))
            except FileNotFoundError:
                continue  # the cgroup was removed
        return largest


def stat_files(membership: str, root: Path, own: Path = OWN) -> list[Path]:
    """The `cpu.stat` files from a process's cgroup up to the root, from the text of its `/proc/PID/cgroup`."""
    found = cpu_cgroup(membership, root)
    if found is None:
        return []
    mount, path = found
    path = os.path.normpath(f"{namespace_root(mount, own / mount.relative_to(root))}/{path}")
    levels = [part for part in path.split("/") if part][:NUM_LEVELS_MAX]
    candidates = [mount.joinpath(*levels[:depth], "cpu.stat") for depth in range(len(levels), -1, -1)]
    # The root has none in v2, and a path of a foreign namespace does not exist.
    return [p for p in candidates if p.is_file()]


@cache
def namespace_root(mount: Path, own: Path) -> str:
    """Path below `mount` of the cgroup visible at `own`; `/` if it is the root or not found."""
    try:
        wanted = os.stat(own)
        if os.path.samestat(wanted, os.stat(mount)):
            return "/"
    except OSError:
        return "/"
    for number, (folder, _, _) in enumerate(os.walk(mount)):
        if number >= NUM_GROUPS_MAX:
            break
        try:
            if os.path.samestat(wanted, os.stat(folder)):
                return f"/{os.path.relpath(folder, mount)}"
        except OSError:
            continue  # the cgroup was removed
    return "/"
