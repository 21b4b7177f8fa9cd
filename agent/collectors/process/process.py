"""One process: state, CPU time, run delay, throttling, memory.

A `read()` costs two small reads of `/proc` (stat of the process, schedstat of its working thread), and a third while a
working thread that is not the main one stands still. The run delay over
all threads and the cgroup are read less often, because a torch or Ray process has a hundred threads. `/proc/PID/stat`
stays open: the descriptor refers to this process even if its PID is reused.

Formats: proc(5); Documentation/scheduler/sched-stats.rst for schedstat (run time, run delay, both in ns).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rolecall.core.proc_stat import STAT_BYTES_MAX, parse_stat

SLOW_ROUNDS = 50
"""Reads between two sums of all threads' run delay (10 s at five reads a second)."""
THROTTLE_ROUNDS = 10
"""Reads between two reads of the cgroup (2 s)."""
NUM_THREADS_MAX = 4096
"""Further threads are ignored."""
NANOSECONDS = 1e-9
RUNNABLE = "R"


class ProcessReading(NamedTuple):
    """Fields as in `telemetry.ProcessSample`."""

    proc_state: str = "?"
    cpu_seconds: float = 0.0
    run_delay_seconds: float = 0.0
    main_run_delay_seconds: float = 0.0
    throttled_seconds: float = 0.0
    rss_bytes: int = 0
    num_threads: int = 0
    major_faults: int = 0


def parse_run_delay(raw: bytes) -> float:
    """Seconds of run delay from a `schedstat` line; 0 where the kernel keeps none."""
    fields = raw.split()
    return int(fields[1]) * NANOSECONDS if len(fields) >= 2 else 0.0


@dataclass(slots=True)
class WorkDelay:
    """Run delay of the working thread, the wait in progress included.

    The kernel adds a wait to a thread's run delay when the thread gets a CPU: until then, on a crowded host, a thread
    that waits for seconds looks like one that is blocked. In state R without run time, it is waiting.
    """

    work_tid: int = 0
    schedstat: bytes = b""  # newest
    since: float = 0.0  # when it was first read like this, with the thread in state R; 0: not
    seconds: float = 0.0

    def update(self, schedstat: bytes, at: float, is_runnable: Callable[[], bool]) -> float:
        """Seconds, never fewer than before. `at`: monotonic seconds; `is_runnable`: whether its state is R."""
        if schedstat != self.schedstat:
            self.schedstat, self.since = schedstat, 0.0
        elif is_runnable():
            self.since = self.since or at
        else:
            self.since = 0.0
        waiting = at - self.since if self.since else 0.0
        self.seconds = max(self.seconds, parse_run_delay(schedstat) + waiting)
        return self.seconds


def read_small(path: str) -> bytes:
    """A small `/proc` file, at a third of the cost of `Path.read_bytes`, which matters with hundreds of threads.

    Raises:
        OSError: the process or thread has ended.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, STAT_BYTES_MAX)
    finally:
        os.close(descriptor)


class ProcessProbe:
    """Reads one process. `read` never raises: unreadable values keep their last value and `proc_state` becomes `?`.
    `reading`: the newest."""

    def __init__(
        self,
        pid: int,
        *,
        proc: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        ticks_per_second: int = os.sysconf("SC_CLK_TCK"),
        page_bytes: int = os.sysconf("SC_PAGE_SIZE"),
    ) -> None:
        self._pid, self._dir = pid, proc / str(pid)
        self._ticks_per_second, self._page_bytes = ticks_per_second, page_bytes
        self._stat = _OpenFile(self._dir / "stat")
        self._work: _OpenFile | None = None
        self._throttle = ThrottleProbe(self._dir, cgroup_root)
        self._work_delay = WorkDelay()
        self._delay_of_tid: dict[str, float] = {}
        self._rounds = 0
        self.reading = ProcessReading()

    def close(self) -> None:
        self._stat.close()
        if self._work is not None:
            self._work.close()
            self._work = None

    def read(self, work_tid: int = 0, at: float = 0.0) -> ProcessReading:
        """The process now, at `at` (monotonic seconds). `work_tid`: native ID of its working thread; 0: the main
        thread."""
        last = self.reading
        try:
            stat = parse_stat(self._stat.read())
        except (OSError, ValueError):
            self.reading = last._replace(proc_state="?")
            return self.reading
        work_delay = self._read_work_delay(work_tid, at, stat.state)
        total, throttled = last.run_delay_seconds, last.throttled_seconds
        if self._rounds % SLOW_ROUNDS == 0:
            total += self._grown_delay()
        if self._rounds % THROTTLE_ROUNDS == 0:
            throttled = max(throttled, self._throttled())
        self._rounds += 1
        self.reading = ProcessReading(
            proc_state=stat.state,
            cpu_seconds=stat.cpu_ticks / self._ticks_per_second,
            run_delay_seconds=total,
            main_run_delay_seconds=work_delay,
            throttled_seconds=throttled,
            rss_bytes=stat.rss_pages * self._page_bytes,
            num_threads=stat.num_threads,
            major_faults=stat.major_faults,
        )
        return self.reading

    def _read_work_delay(self, work_tid: int, at: float, main_state: str) -> float:
        """Restarts when another thread takes over the work."""
        if work_tid != self._work_delay.work_tid or self._work is None:
            if self._work is not None:
                self._work.close()
            self._work_delay = WorkDelay(work_tid)
            self._work = _OpenFile(self._dir / "task" / str(work_tid or self._pid) / "schedstat")

        def is_runnable() -> bool:
            is_main = work_tid in (0, self._pid)
            state = main_state if is_main else parse_stat(read_small(f"{self._dir}/task/{work_tid}/stat")).state
            return state == RUNNABLE

        try:
            return self._work_delay.update(self._work.read(), at, is_runnable)
        except (OSError, ValueError):
            return 0.0  # the thread ended, or the kernel keeps no such statistics

    def _grown_delay(self) -> float:
        """Seconds of run delay of all threads since the last call."""
        grown, now, tasks = 0.0, {}, f"{self._dir}/task"
        try:
            tids = os.listdir(tasks)[:NUM_THREADS_MAX]
        except OSError:
            return 0.0
        for tid in tids:
            try:
                delay = parse_run_delay(read_small(f"{tasks}/{tid}/schedstat"))
            except (OSError, ValueError):
                continue  # the thread ended, or the kernel keeps no such statistics
            now[tid] = delay
            grown += max(0.0, delay - self._delay_of_tid.get(tid, 0.0))
        self._delay_of_tid = now
        return grown

    def _throttled(self) -> float:
        try:
            return self._throttle.read()
        except (OSError, ValueError):
            return 0.0  # the process ended, or the kernel keeps no such statistics


class _OpenFile:
    """A small `/proc` file, opened at the first read and kept open."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def read(self) -> bytes:
        """Raises OSError: the process has ended."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._descriptor, STAT_BYTES_MAX, 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


NUM_LEVELS_MAX = 32
OWN = Path("/sys/fs/cgroup")
"""Root cgroup of this process's namespace; on a host the root of the hierarchy."""
NUM_GROUPS_MAX = 20_000
"""Searched to locate it, once per hierarchy: 0.2 s."""


def parse_throttled_seconds(text: str) -> float:
    """Seconds throttled, from the text of a `cpu.stat` (v1: in nanoseconds, v2: in microseconds); 0 without a quota.
    Sources: Documentation/scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst."""
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
    """Reads the throttling of one process's cgroups; their paths are resolved again only when they change.

    A quota on an ancestor throttles everything below it: the largest value on the path to the root is taken, so that
    nested quotas do not count twice. An agent in a container usually has its own cgroup namespace, and
    `/proc/PID/cgroup` then gives paths relative to its own cgroup (`/../../podB/c`) in every /proc: its inode locates
    that cgroup in the host's tree.
    """

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
