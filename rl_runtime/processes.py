"""Every process of a run: finding them all, ending them safely, and touching no other process.

A process belongs to a run when its environment carries `ROLECALL_RUN=<run directory>` (children inherit it, double
forks too), or when the run wrote down its PID with its start time in `processes.jsonl` (the supervisor, whose own
environment the kernel shows as it was at its start). A PID alone is never signalled: a pidfd is opened first, then the
start time is compared, then the signal goes through the pidfd, so that a reused PID cannot be hit.
"""

import json
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.rundir import NODE_ENV, RUN_ENV

PROC = Path("/proc")
TERM_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 5.0
"""A killed process is gone within this, or it hangs in the kernel and is named."""
POLL_SECONDS = 0.02
PROCESSES_FILE = "processes.jsonl"
RAY_DIR_PREFIX = "rolecall-ray-"
"""Ray's sockets live under a short path in the temporary directory (a Unix socket's path holds 107 characters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process that belongs to a run."""

    pid: int
    start_ticks: int
    name: str  # as the kernel shows it, at most 15 characters
    node: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, started at tick {self.start_ticks})"


def run_environment(run_dir: Path, node: str | None = None, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for a process of this run: the marker, and the node it stands for."""
    env = {**(os.environ if base is None else base), RUN_ENV: str(run_dir)}
    if node is not None:
        env[NODE_ENV] = node
    return env


def read_stat(pid: int, proc: Path = PROC) -> tuple[str, int, str] | None:
    """(state letter, start time in ticks, name) of a process; None when there is none."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = stat.rpartition(")")
    fields = tail.split()
    return fields[0], int(fields[19]), head.partition("(")[2]


def is_alive(pid: int, start_ticks: int, proc: Path = PROC) -> bool:
    """Whether this very process still runs. A zombie does not."""
    seen = read_stat(pid, proc)
    return seen is not None and seen[1] == start_ticks and seen[0] not in "ZX"


def environment_of(pid: int, proc: Path = PROC) -> dict[str, str]:
    """What the process was started with; empty when it is gone, a zombie, or not ours to read."""
    try:
        raw = (proc / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def kill_process(pid: int, start_ticks: int, sig: int = signal.SIGKILL) -> bool:
    """Signals this very process; False when it is gone (its PID may be another's by now)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is bound to the process that had the PID when it was opened; only now may the start time be
        # compared.
        if not is_alive(pid, start_ticks):
            return False
        signal.pidfd_send_signal(descriptor, sig)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def boot_id(proc: Path = PROC) -> str:
    """Start times count from boot: a record of another boot names no process."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def record_process(run_dir: Path, name: str, pid: int, *, node: str = "") -> int | None:
    """Writes down a process that was just started; returns its start time, None when it has ended already."""
    seen = read_stat(pid)
    if seen is None:
        return None
    line = {"name": name, "node": node, "pid": pid, "start_ticks": seen[1], "boot_id": boot_id()}
    # One write of one short line in append mode is whole, whichever process else writes.
    with (run_dir / PROCESSES_FILE).open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
    return seen[1]


def recorded_processes(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of `processes.jsonl` of this boot. A torn last line (power loss) is left out."""
    try:
        text = (run_dir / PROCESSES_FILE).read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["boot_id"] == boot_id()]


class ProcessWatch:
    """Tells whether known processes live, by one pidfd each: a death is seen at once and no PID is taken for
    another."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int], int] = {}
        self._dead: set[tuple[int, int]] = set()

    def alive(self, pid: int, start_ticks: int) -> bool:
        key = (pid, start_ticks)
        if pid <= 0 or key in self._dead:  # 0: a process that was asked for and is not there yet
            return False
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            descriptor = self._open(pid, start_ticks)
            if descriptor is None:
                self._dead.add(key)
                return False
            self._descriptors[key] = descriptor
        # A pidfd becomes readable when its process ends.
        if not select.select([descriptor], [], [], 0)[0]:
            return True
        os.close(self._descriptors.pop(key))
        self._dead.add(key)
        return False

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @staticmethod
    def _open(pid: int, start_ticks: int) -> int | None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if is_alive(pid, start_ticks):
            return descriptor
        os.close(descriptor)
        return None


def find_processes(run_dir: Path, *, exclude: Iterable[int] = (), proc: Path = PROC) -> list[RunProcess]:
    """All living processes of a run, by PID. `exclude`: PIDs to leave out, such as the caller's own."""
    left_out, mine, found = set(exclude), os.getuid(), dict[int, RunProcess]()
    for line in recorded_processes(run_dir):
        pid, ticks = int(line["pid"]), int(line["start_ticks"])
        if is_alive(pid, ticks, proc):
            found[pid] = RunProcess(pid=pid, start_ticks=ticks, name=line["name"], node=line["node"])
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != mine:
                continue
        except FileNotFoundError:
            continue
        pid = int(entry.name)
        seen = read_stat(pid, proc)
        env = environment_of(pid, proc) if seen is not None and seen[0] not in "ZX" else {}
        if seen is not None and env.get(RUN_ENV) == str(run_dir):
            found.setdefault(pid, RunProcess(pid=pid, start_ticks=seen[1], name=seen[2], node=env.get(NODE_ENV, "")))
    return [found[pid] for pid in sorted(found) if pid not in left_out]


def wait_gone(processes: Iterable[RunProcess], seconds: float, clock: Clock) -> list[RunProcess]:
    """Waits until they are gone, at most `seconds`; returns those that are not."""
    deadline, left = clock.monotonic() + seconds, list(processes)
    while left := [p for p in left if is_alive(p.pid, p.start_ticks)]:
        if clock.monotonic() >= deadline:
            break
        clock.sleep(POLL_SECONDS)
    return left


def stop_run(run_dir: Path, *, clock: Clock | None = None, term_seconds: float = TERM_SECONDS) -> list[RunProcess]:
    """Ends every process of a run but the caller: SIGTERM, then SIGKILL; stopped ones too. Idempotent.

    The supervisor is asked first and alone, so that it may end its run in order. Returns what it ended.

    Raises:
        OSError: processes that not even SIGKILL ended, by name.
    """
    clock, run_dir = clock or SystemClock(), run_dir.resolve()
    me = os.getpid()
    ended: dict[tuple[int, int], RunProcess] = {}

    def living() -> list[RunProcess]:
        found = find_processes(run_dir, exclude=(me,))
        ended.update({(p.pid, p.start_ticks): p for p in found})
        return found

    supervisors = [p for p in living() if p.name == "supervisor"]
    for sig, seconds in ((signal.SIGTERM, 4 * term_seconds),) if supervisors else ():
        _signal_all(supervisors, sig)
        wait_gone(supervisors, seconds, clock)
    _signal_all(living(), signal.SIGTERM)
    wait_gone(living(), term_seconds, clock)
    # Killing a raylet may let a worker be born that was not listed: list again until none is left.
    deadline = clock.monotonic() + KILL_SECONDS
    while (left := living()) and clock.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        wait_gone(left, 0.5, clock)
    if left:
        raise OSError(f"could not be ended: {', '.join(str(p) for p in left)}")
    _remove_ray_dir(run_dir)
    return sorted(ended.values(), key=lambda p: p.pid)


def _signal_all(processes: Iterable[RunProcess], sig: signal.Signals) -> None:
    for p in processes:
        kill_process(p.pid, p.start_ticks, sig)
        if sig is signal.SIGTERM:
            # A stopped process handles SIGTERM only once it continues. SIGKILL needs no such help.
            kill_process(p.pid, p.start_ticks, signal.SIGCONT)


def ray_dir(run_dir: Path) -> Path | None:
    """Ray's temporary directory of this run, if it made one."""
    try:
        path = Path((run_dir / "ray_dir").read_text().strip())
    except FileNotFoundError:
        return None
    return path


def _remove_ray_dir(run_dir: Path) -> None:
    path = ray_dir(run_dir)
    # Only what we made: a damaged file must not turn this into a removal of something else.
    if path is None or not path.name.startswith(RAY_DIR_PREFIX) or path.parent != Path(tempfile.gettempdir()):
        return
    shutil.rmtree(path, ignore_errors=True)
