"""`rolecall node end PID`: ends one process of this node and its descendants, and never another one.

A PID is reused by the kernel, so a process is named by PID and start time, and signalled through a pidfd that was
opened before the start time was compared. Descendants go with it: an engine's core that outlives its engine keeps the
GPU's memory.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from rolecall.core.errors import CommandRefused
from rolecall.core.proc_stat import read_stat
from rolecall.core.text import IS_GONE, counted

POLL_SECONDS = 0.02


def end_process(
    pid: int,
    start_ticks: int,
    *,
    grace_seconds: float = 0.0,
    deadline_seconds: float = 10.0,
    proc: Path = Path("/proc"),
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Ends the process with SIGKILL, after SIGTERM and `grace_seconds` if that is not 0. Returns what was done; a
    process that is gone, or whose PID another process has, is done with.

    Raises:
        CommandRefused: it is this process, an ancestor of it, or PID 1; it may not be signalled; or it does not end in
            time, as in an uninterruptible system call.
    """
    if pid == 1 or pid in _ancestors(os.getpid(), proc):
        raise CommandRefused(f"PID {pid} is not ended: this command runs below it")
    with ExitStack() as stack:
        family = [(pid, start_ticks), *_descendants(pid, proc)]
        opened: list[tuple[int, int]] = []  # (PID, pidfd)
        for one, ticks in family:
            try:
                fd = os.pidfd_open(one)
            except ProcessLookupError:
                continue
            stack.callback(os.close, fd)
            stat = read_stat(one, proc)
            if stat is None or stat.start_ticks != ticks or stat.has_ended:
                if one == pid:
                    break  # its children, if there are any, are those of another process
            elif one == pid or stat.parent in {parent for parent, _ in opened}:
                # Of a parent that has ended since, another process may have had the PID when its children were read.
                opened.append((one, fd))
        if not opened or opened[0][0] != pid:
            return f"process {pid} with start time {start_ticks} {IS_GONE}"
        try:
            if grace_seconds:
                signal.pidfd_send_signal(opened[0][1], signal.SIGTERM)
                _wait(opened[:1], grace_seconds, proc, pause)
            for _, fd in opened:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by now
        except PermissionError:
            raise CommandRefused(f"process {pid} may not be signalled by user {os.geteuid()}") from None
        left = _wait(opened, deadline_seconds, proc, pause)
    if left:
        pids = ", ".join(map(str, left))
        raise CommandRefused(f"SIGKILL was sent, but {pids} did not end within {deadline_seconds:g} s")
    return f"ended process {pid} and {counted(len(opened) - 1, 'descendant')}"


def _wait(opened: list[tuple[int, int]], seconds: float, proc: Path, pause: Callable[[float], None]) -> list[int]:
    """PIDs of those that still run at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        left = [pid for pid, fd in opened if not _is_over(pid, fd, proc)]
        if not left or time.monotonic() > deadline:
            return left
        pause(POLL_SECONDS)


def _is_over(pid: int, fd: int, proc: Path) -> bool:
    try:
        signal.pidfd_send_signal(fd, 0)
    except ProcessLookupError:
        return True
    return _is_zombie(pid, proc)  # its parent has not read its exit code


def _is_zombie(pid: int, proc: Path) -> bool:
    stat = read_stat(pid, proc)
    return stat is None or stat.has_ended


def _ancestors(pid: int, proc: Path) -> set[int]:
    found = {pid}
    while stat := read_stat(pid, proc):
        pid = stat.parent
        found.add(pid)
    return found


def _descendants(pid: int, proc: Path) -> list[tuple[int, int]]:
    """(PID, start time) of all, parents first."""
    children: dict[int, list[tuple[int, int]]] = {}
    for folder in proc.iterdir():
        stat = read_stat(int(folder.name), proc) if folder.name.isdecimal() else None
        if stat is not None:
            children.setdefault(stat.parent, []).append((int(folder.name), stat.start_ticks))
    found, todo = list[tuple[int, int]](), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [child for child, _ in below]
    return found
