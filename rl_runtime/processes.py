"""All processes of a run: finding them, and ending them safely without touching any other process.

A process belongs to a run if its environment carries `ROLECALL_RUN=<run directory>` (inherited by children, also after
a double fork), or if the run recorded its PID and start time in `processes.jsonl` (needed for the supervisor: the
kernel shows its environment as of its start). A PID alone is never signalled: open a pidfd, compare the start time,
then signal through the pidfd, so that a reused PID cannot be hit.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.descriptors import is_readable
from rolecall.core.ids import ReplicaId
from rolecall.core.proc_stat import PROC, read_stat
from rolecall.core.rundir import NODE_ENV, RUN_ENV, RunDir

TERM_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 5.0
"""A killed process must be gone within this; otherwise it hangs in the kernel and is reported."""
POLL_SECONDS = 0.02
PROCESSES_FILE = "processes.jsonl"
RAY_DIR_PREFIX = "rolecall-ray-"
"""Ray's sockets live under a short path in the temporary directory (a Unix socket's path holds 107 characters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process that belongs to a run."""

    pid: int
    start_ticks: int
    name: str  # truncated by the kernel to 15 characters
    node: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, started at tick {self.start_ticks})"


def run_environment(run_dir: Path, node: str | None = None) -> dict[str, str]:
    """Environment of a process of this run: the marker, and the node that it represents."""
    env = {**os.environ, RUN_ENV: str(run_dir)}
    if node is not None:
        env[NODE_ENV] = node
    return env


def is_alive(pid: int, start_ticks: int, proc: Path = PROC) -> bool:
    """Whether this process, identified by PID and start time, still runs. A zombie does not."""
    seen = read_stat(pid, proc)
    return seen is not None and seen.start_ticks == start_ticks and not seen.has_ended


def environment_of(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The process's initial environment; empty if it is gone, a zombie, or not readable."""
    try:
        raw = (proc / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def kill_process(pid: int, start_ticks: int, sig: int = signal.SIGKILL) -> bool:
    """Signals exactly this process; False if it is gone (its PID may have been reused)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is bound to its process, so the start time is compared after opening it.
        if not is_alive(pid, start_ticks):
            return False
        signal.pidfd_send_signal(descriptor, sig)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def boot_id(proc: Path = PROC) -> str:
    """Id of this boot. Start times count from boot, so a record of another boot identifies no process."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def record_process(run_dir: Path, name: str, pid: int, *, node: str = "") -> int | None:
    """Records a process that was just started; returns its start time, or None if it has already exited."""
    seen = read_stat(pid)
    if seen is None:
        return None
    line = {"name": name, "node": node, "pid": pid, "start_ticks": seen.start_ticks, "boot_id": boot_id()}
    # A single short write in append mode is atomic among concurrent writers. It begins on a new line: a full disk may
    # have cut off the record before it.
    with (run_dir / PROCESSES_FILE).open("a", encoding="utf-8") as f:
        f.write("\n" + json.dumps(line) + "\n")
    return seen.start_ticks


def start_process(
    run: RunDir, name: str, argv: list[str], log: Path, *, node: str = "", cwd: Path | None = None, **environment: str
) -> tuple[subprocess.Popen[bytes], int | None]:
    """Starts and records a process of the run, in a session of its own: only the supervisor handles Ctrl-C of the
    terminal. Output goes to `log`. Returns the process and its start time, None if it has already exited.

    Raises:
        OSError: it cannot be started, or not be recorded; no process remains.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv,
            env={**run_environment(run.path, node or None), **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        return process, record_process(run.path, name, process.pid, node=node)
    except OSError:
        process.kill()
        process.wait()
        raise


def recorded_processes(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of `processes.jsonl` of this boot. Torn ones (power loss, full disk) are left out."""
    try:
        text = (run_dir / PROCESSES_FILE).read_text()
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if line["boot_id"] == boot_id()]


def rank_name(replica: ReplicaId, incarnation: int, rank: int) -> str:
    """Under which a further rank is recorded: `trainer/0#2 rank 1`."""
    return f"{replica}#{incarnation} rank {rank}"


def former_ranks(run_dir: Path, replica: ReplicaId, incarnation: int) -> list[RunProcess]:
    """Ranks of earlier incarnations of `replica` that still run. The newest record of a process counts: a rank of a
    standby becomes one of the replica that the standby is promoted to."""
    newest = {(int(line["pid"]), int(line["start_ticks"])): line for line in recorded_processes(run_dir)}
    found = []
    for (pid, ticks), line in newest.items():
        owner, is_rank, _ = line["name"].partition(" rank ")
        name, _, number = owner.rpartition("#")
        if is_rank and name == replica and int(number) < incarnation and is_alive(pid, ticks):
            found.append(RunProcess(pid=pid, start_ticks=ticks, name=line["name"], node=line["node"]))
    return found


class ProcessWatch:
    """Checks known processes through one pidfd each: detects an exit at once and is immune to PID reuse."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int], int] = {}
        self._dead: set[tuple[int, int]] = set()

    def alive(self, pid: int, start_ticks: int) -> bool:
        key = (pid, start_ticks)
        if pid <= 0 or key in self._dead:  # 0: a requested process that does not exist yet
            return False
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            descriptor = self._open(pid, start_ticks)
            if descriptor is None:
                self._dead.add(key)
                return False
            self._descriptors[key] = descriptor
        # A pidfd becomes readable when its process ends.
        if not is_readable(descriptor, 0.0):
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
    """All live processes of a run, by PID. `exclude`: PIDs to leave out, such as the caller's own."""
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
        env = environment_of(pid, proc) if seen is not None and not seen.has_ended else {}
        if seen is not None and env.get(RUN_ENV) == str(run_dir):
            found.setdefault(
                pid, RunProcess(pid=pid, start_ticks=seen.start_ticks, name=seen.name, node=env.get(NODE_ENV, ""))
            )
    return [found[pid] for pid in sorted(found) if pid not in left_out]


def wait_gone(processes: Iterable[RunProcess], seconds: float, clock: Clock) -> list[RunProcess]:
    """Waits until they are gone, at most `seconds`; returns those still alive."""
    deadline, left = clock.monotonic() + seconds, list(processes)
    while left := [p for p in left if is_alive(p.pid, p.start_ticks)]:
        if clock.monotonic() >= deadline:
            break
        clock.sleep(POLL_SECONDS)
    return left


def stop_run(run_dir: Path, *, clock: Clock | None = None, term_seconds: float = TERM_SECONDS) -> list[RunProcess]:
    """Ends every process of a run except the caller, including stopped ones: SIGTERM, then SIGKILL. Idempotent.

    The supervisor gets SIGTERM first, alone, so that it can shut down its run cleanly. Returns the ended processes.

    Raises:
        OSError: names the processes that survived SIGKILL.
    """
    clock, run_dir = clock or SystemClock(), run_dir.resolve()
    me = os.getpid()
    ended: dict[tuple[int, int], RunProcess] = {}

    def living() -> list[RunProcess]:
        found = find_processes(run_dir, exclude=(me,))
        ended.update({(p.pid, p.start_ticks): p for p in found})
        return found

    supervisors = [p for p in living() if p.name == "supervisor"]
    _signal_all(supervisors, signal.SIGTERM)
    wait_gone(supervisors, 4 * term_seconds, clock)
    _signal_all(living(), signal.SIGTERM)
    wait_gone(living(), term_seconds, clock)
    # Killing a raylet may spawn a worker that was not listed: list again until none is left.
    deadline = clock.monotonic() + KILL_SECONDS
    while (left := living()) and clock.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        wait_gone(left, 0.5, clock)
    if left:
        raise OSError(f"could not be ended: {', '.join(str(p) for p in left)}")
    _remove_ray_dir(run_dir)
    return sorted(ended.values(), key=lambda p: p.pid)


def _signal_all(processes: Iterable[RunProcess], sig: signal.Signals) -> None:
    for process in processes:
        kill_process(process.pid, process.start_ticks, sig)
        if sig is signal.SIGTERM:
            # A stopped process handles SIGTERM only once it continues; SIGKILL works regardless.
            kill_process(process.pid, process.start_ticks, signal.SIGCONT)


def ray_dir(run_dir: Path) -> Path | None:
    """Ray's temporary directory of this run, if it exists."""
    try:
        path = Path((run_dir / "ray_dir").read_text().strip())
    except FileNotFoundError:
        return None
    return path


def _remove_ray_dir(run_dir: Path) -> None:
    path = ray_dir(run_dir)
    # Only our own directory: a damaged file must not cause the removal of anything else.
    if path is None or not path.name.startswith(RAY_DIR_PREFIX) or path.parent != Path(tempfile.gettempdir()):
        return
    shutil.rmtree(path, ignore_errors=True)
