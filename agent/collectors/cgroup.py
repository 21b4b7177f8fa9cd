"""How long the CPU quota of a process's cgroups stopped it.

v1: `cpu.stat` of the `cpu` controller, `throttled_time` in nanoseconds; v2: `throttled_usec` in microseconds. A quota
may stand on any ancestor, and stops everything below: the largest value on the way up to the root is taken, so that
nested quotas do not count twice. Sources: Documentation/scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst.
"""

from pathlib import Path

NUM_LEVELS_MAX = 32


def parse_throttled_seconds(text: str) -> float:
    """Seconds throttled from the text of a `cpu.stat`; 0 when there is no quota."""
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


def throttled_seconds(process_dir: Path, root: Path = Path("/sys/fs/cgroup")) -> float:
    """Seconds that quotas stopped the cgroup of the process at `process_dir` (`/proc/PID`), cumulative.

    Raises:
        OSError, ValueError: `cgroup` of the process cannot be read, or is malformed.
    """
    found = cpu_cgroup((process_dir / "cgroup").read_text(), root)
    if found is None:
        return 0.0
    mount, path = found
    levels = [part for part in path.split("/") if part and part != ".."][:NUM_LEVELS_MAX]
    largest = 0.0
    for depth in range(len(levels), -1, -1):
        try:
            text = mount.joinpath(*levels[:depth], "cpu.stat").read_text()
        except OSError:
            continue  # the root has none in v2, and a foreign namespace's path leads nowhere
        largest = max(largest, parse_throttled_seconds(text))
    return largest
