"""Detects process exits within milliseconds: one thread, one epoll, one pidfd per process.

A pidfd becomes readable when the last thread of its process has ended, and never refers to a later process with the
same PID. The exit status comes from the zombie (`/proc/PID/stat`, field 52) or, if its parent has reaped it, from the
pidfd (PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15 and later; include/uapi/linux/pidfd.h); else it is unknown.

Of a zombie that this process may not trace, the kernel shows status 0, whatever it is (proc_pid_stat(5)): another
user's, to an agent without CAP_SYS_PTRACE."""

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rolecall.core.proc_stat import parse_stat

logger = logging.getLogger(__name__)

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3
_INFO_FORMAT = "=QQ11Ii"  # mask, cgroupid, pid .. fsgid, exit_code (a wait status)

_NO_PROCESS = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})
"""Of `pidfd_open`. The last two: the number is a thread's by now, on newer and on older kernels."""

NUM_WATCHED_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """A signal, an exit code, or unknown (both None)."""

    signal: int | None = None
    code: int | None = None

    @classmethod
    def from_wait_status(cls, status: int) -> "ExitStatus":
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(code=os.WEXITSTATUS(status))

    def detail(self) -> dict[str, str]:
        """As in an agent event."""
        return {k: str(v) for k, v in (("signal", self.signal), ("code", self.code)) if v is not None}


_CRASH_SIGNALS = frozenset({signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})


def guess_cause(status: ExitStatus, *, finished: bool, raised: bool, oom: bool) -> str:
    """`finished` (the process reported it), `oom`, `killed`, `crashed`, `exception` (reported), `exit` or `unknown`.

    `oom`: the kernel's count of OOM kills grew since the last exit; a guess, because another process may have been
    killed."""
    if finished:
        return "finished"
    if status.signal == signal.SIGKILL:
        return "oom" if oom else "killed"
    if status.signal is not None:
        return "crashed" if status.signal in _CRASH_SIGNALS else "killed"
    if raised:
        return "exception"
    return "unknown" if status.code is None else "exit"


_EXIT_REQUEST_SIGNALS: Mapping[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGHUP: "SIGHUP"}

_HANDLED_SIGNAL_CODE = 128


def requested_exit(status: ExitStatus) -> str:
    """Why the exit of a process that nobody announces was intended; empty if it was not.

    A launcher terminates the other ranks with SIGTERM when one dies: those exits are not separate faults. A process
    that handles the signal, as to save its state before a preemption, ends with 128 and its number by convention.
    """
    if status.code == 0:
        return "exited with code 0"
    if status.code is not None:
        handled = _EXIT_REQUEST_SIGNALS.get(status.code - _HANDLED_SIGNAL_CODE)
        return f"exited with code {status.code}, as after {handled}" if handled else ""
    asked = _EXIT_REQUEST_SIGNALS.get(status.signal or 0)
    return f"ended on {asked}" if asked else ""


class WatchRefused(Exception):
    """The process cannot be watched. `gone`: it has ended; otherwise a limit was reached."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        self.gone = gone
        super().__init__(reason)


def reaped_status(pidfd: int) -> int | None:
    """Wait status of a reaped process; None before that, or without kernel support."""
    info = bytearray(struct.pack(_INFO_FORMAT, _PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    fields = struct.unpack(_INFO_FORMAT, info)
    return int(fields[-1]) if fields[0] & _PIDFD_INFO_EXIT else None


def may_trace(pid: int) -> bool:
    """Asked of the kernel, which makes the same check for the link `exe`: user IDs, capabilities and user namespaces
    decide together. True of a zombie that may be traced, whose link is absent, and of no process."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def exit_status(pidfd: int, pid: int, start_ticks: int) -> ExitStatus:
    """How the process of `pidfd` ended, as far as known."""
    permitted = may_trace(pid)  # first: after it, `stat` shows whether the answer was about this process
    with contextlib.suppress(OSError, ValueError):  # reaped
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
        if stat.has_ended and stat.start_ticks == start_ticks and (permitted or stat.exit_code):
            return ExitStatus.from_wait_status(stat.exit_code)
    status = reaped_status(pidfd)
    return ExitStatus() if status is None else ExitStatus.from_wait_status(status)


@dataclass(frozen=True, slots=True)
class _WatchedProcess:
    pid: int
    start_ticks: int
    on_exit: Callable[[ExitStatus], None]


class ExitWatch:
    """Calls back once for each watched process that ends, in its own thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: dict[int, _WatchedProcess] = {}  # by pidfd
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="exits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all watches and the thread (waits at most 2 s for it)."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(2.0)
        with self._lock:
            for pidfd in self._watched:
                os.close(pidfd)
            self._watched.clear()
        self._epoll.close()
        os.close(self._wake)

    def watch(self, pid: int, start_ticks: int, on_exit: Callable[[ExitStatus], None]) -> None:
        """Calls `on_exit`, which must not raise, once when this process has ended.

        Raises:
            WatchRefused: the process has ended, or a limit is reached.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as e:
            raise WatchRefused(f"process {pid}: {os.strerror(e.errno or 0)}", gone=e.errno in _NO_PROCESS) from None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, pidfd)
            # Checked after the pidfd exists: from here on PID reuse cannot go unnoticed.
            try:
                stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
            except (FileNotFoundError, ProcessLookupError):
                raise WatchRefused(f"process {pid} is gone", gone=True) from None
            except (OSError, ValueError) as e:
                raise WatchRefused(f"process {pid}: cannot read its start time: {e}") from None
            if stat.start_ticks != start_ticks:
                raise WatchRefused(f"process {pid} started at {stat.start_ticks}, not at {start_ticks}", gone=True)
            with self._lock:
                if len(self._watched) >= NUM_WATCHED_MAX:
                    raise WatchRefused(f"already watching {NUM_WATCHED_MAX} processes")
                self._watched[pidfd] = _WatchedProcess(pid, start_ticks, on_exit)
                self._epoll.register(pidfd, select.EPOLLIN)
            undo.pop_all()

    def _run(self) -> None:
        while not self._stopping:
            for descriptor, _ in self._epoll.poll():  # no timeout: `stop` writes to the eventfd
                if descriptor != self._wake:
                    self._ended(descriptor)

    def _ended(self, pidfd: int) -> None:
        with self._lock:
            watched = self._watched.pop(pidfd, None)
            if watched is None:
                return
            self._epoll.unregister(pidfd)
        try:
            status = exit_status(pidfd, watched.pid, watched.start_ticks)
        finally:
            os.close(pidfd)
        try:
            watched.on_exit(status)
        except Exception:  # a bug in one callback must not end the watch of all other processes
            logger.exception("handling the exit of process %d failed", watched.pid)
