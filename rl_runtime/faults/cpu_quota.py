"""A CPU quota on one process, through its own control group (version 1 or 2), and its removal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rolecall.core.errors import RolecallError

PERIOD_MICROSECONDS = 100_000
CGROUP_ROOT = Path("/sys/fs/cgroup")


class QuotaUnavailable(RolecallError):
    """This machine does not allow setting a quota; the message gives the reason."""


def cpu_group(pid: int, root: Path = CGROUP_ROOT, proc: Path = Path("/proc")) -> tuple[Path, int]:
    """(folder of the control group that holds the process's CPU share, version of control groups).

    Raises:
        QuotaUnavailable: no such hierarchy is mounted.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError as e:
        raise QuotaUnavailable(f"{e}") from e
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            for name in (controllers, "cpu", "cpu,cpuacct"):
                if (root / name / "cgroup.procs").exists():
                    return root / name / path.lstrip("/"), 1
        elif not controllers and (root / "cgroup.controllers").exists():
            return root / path.lstrip("/"), 2
    raise QuotaUnavailable("no control group with a CPU controller is mounted")


@contextmanager
def cpu_quota(pid: int, ratio: float, root: Path = CGROUP_ROOT) -> Iterator[Callable[[], int]]:
    """Limits the process to `ratio` of one CPU within the context, and gives a function that says in how many periods
    it ran into the quota since. Restores the process afterwards if it is still alive.

    Raises:
        QuotaUnavailable: control groups cannot be written here.
    """
    home, version = cpu_group(pid, root)
    group = _group(pid, home)
    quota = int(ratio * PERIOD_MICROSECONDS)
    try:
        group.mkdir(exist_ok=True)
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as e:
        _remove(group)
        raise QuotaUnavailable(f"{group}: {e.strerror}") from e
    try:
        yield partial(_num_throttled, group)
    finally:
        lift_quota(pid, home)


def lift_quota(pid: int, home: Path) -> None:
    """Removes our quota from a process that came from `home`; does nothing without one."""
    group = _group(pid, home)
    if not group.exists():
        return
    with suppress(ProcessLookupError):  # it exited, as a slow replica that was replaced should
        (home / "cgroup.procs").write_text(str(pid))
    _remove(group)


def _num_throttled(group: Path) -> int:
    for line in (group / "cpu.stat").read_text().splitlines():
        if line.startswith("nr_throttled "):
            return int(line.split()[1])
    return 0


def _group(pid: int, home: Path) -> Path:
    return home / f"rolecall-{pid}"


def _remove(group: Path) -> None:
    # A group is a folder with kernel-generated files; only an empty group can be removed.
    with suppress(OSError):
        group.rmdir()
