"""Processes of one node, in memory, for `rolecall node end`: /proc, pidfds and signals. A PID is given to another process
once its own has ended."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rolecall.core.errors import CommandRefused
from rolecall.node.end_process import end_process
from rolecall.recovery.actuators.calls import Call, CommandCall, Reply


@dataclass(eq=False)
class Process:
    """`mine`: it may be signalled. `obeys`: it ends at SIGTERM; `stuck`: not even at SIGKILL, as in a system call."""

    pid: int
    start_ticks: int
    parent: int
    mine: bool = True
    obeys: bool = True
    stuck: bool = False
    runs: bool = True


@dataclass
class FakeKernel:
    """`ended`: by signals. `meanwhile`: called before each look and each signal."""

    meanwhile: Callable[[], None] = lambda: None
    processes: dict[int, Process] = field(default_factory=dict)
    ended: list[Process] = field(default_factory=list)
    _ticks: int = 100
    _by_fd: dict[int, Process] = field(default_factory=dict)

    def start(self, pid: int, parent: int = 1, **traits: bool) -> Process:
        assert pid not in self.processes
        self._ticks += 1
        self.processes[pid] = process = Process(pid, self._ticks, parent, **traits)
        return process

    def over(self, process: Process) -> None:
        """It has ended; its children are adopted by init."""
        process.runs = False
        if self.processes.get(process.pid) is process:
            del self.processes[process.pid]
            for child in self.processes.values():
                if child.parent == process.pid:
                    child.parent = 1

    # --- as the kernel ------------------------------------------------------------------------------------------------

    def pidfd_open(self, pid: int) -> int:
        self.meanwhile()
        if pid not in self.processes:
            raise ProcessLookupError(pid)
        fd = os.open(os.devnull, os.O_RDONLY)
        self._by_fd[fd] = self.processes[pid]
        return fd

    def pidfd_send_signal(self, fd: int, number: int) -> None:
        self.meanwhile()
        process = self._by_fd[fd]
        if not process.runs:
            raise ProcessLookupError(process.pid)
        if not process.mine:
            raise PermissionError(process.pid)
        if (number == signal.SIGTERM and process.obeys) or (number == signal.SIGKILL and not process.stuck):
            self.ended.append(process)
            self.over(process)

    def iterdir(self) -> Iterator["_Entry"]:
        """In the order of PIDs, as /proc lists them: a process that starts meanwhile may be among them."""
        pid = 0
        while pid := min((later for later in self.processes if later > pid), default=0):
            yield _Entry(self, str(pid))

    def __truediv__(self, name: str) -> "_Entry":
        return _Entry(self, name)


@dataclass
class _Entry:
    """/proc/PID, and the `stat` below it."""

    kernel: FakeKernel
    name: str

    def __truediv__(self, name: str) -> "_Entry":
        assert name == "stat"
        return self

    def read_bytes(self) -> bytes:
        self.kernel.meanwhile()
        process = self.kernel.processes.get(int(self.name))
        if process is None:
            raise FileNotFoundError(self.name)
        return f"{process.pid} (engine) S {process.parent} {'0 ' * 17}{process.start_ticks} {'0 ' * 30}".encode()


def run_node_end(kernels: dict[str, FakeKernel], call: Call, monkeypatch: Any) -> Reply:
    """`ssh NODE rolecall node end PID --start-ticks TICKS [--grace SECONDS]`, by the code of the command itself."""
    assert isinstance(call, CommandCall)
    ssh, node, program, *words = call.argv
    assert (ssh, program, words[:2], words[3]) == ("ssh", "rolecall", ["node", "end"], "--start-ticks")
    kernel: Any = kernels[node]
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", kernel.pidfd_open)
        patched.setattr(signal, "pidfd_send_signal", kernel.pidfd_send_signal)
        try:
            text = end_process(
                int(words[2]),
                int(words[4]),
                grace_seconds=1e-9 if "--grace" in words else 0.0,
                deadline_seconds=0.0,
                proc=kernel,
                pause=lambda _: None,
            )
        except CommandRefused as e:
            return Reply(status=2, text=str(e))
    return Reply(status=0, text=text)
