"""The further ranks of a replica of several: processes that the process of its first rank starts and leads.

The first rank is the replica's actor; it tells the others each call over a socket that only they have, and makes the
same call itself. A replica lives and dies as one: when a further rank ends, the first one announces that and exits;
when the first one ends, the kernel kills the others, also those that are stopped (`PR_SET_PDEATHSIG`), so that none
keeps its device.

`python -m rolecall.rl_runtime.rank_processes FD` is one further rank.
"""

import ctypes
import importlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from rolecall.agent.reporter import reporter
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import DeadlineExceeded
from rolecall.core.ids import ReplicaId
from rolecall.core.rundir import registration_secret
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.processes import rank_name, record_process
from rolecall.rl_runtime.protocol.spawn import ActorSpec

logger = logging.getLogger(__name__)

RANK_EXIT: Final = 71
"""Exit code of a first rank whose replica has lost another rank."""
PARTNER_SECONDS: Final = 3.0
"""An error may come from the loss of another rank: the replica's end is awaited for this long before it is reported."""
RANKS_TIMEOUT_SECONDS: Final = 300.0
"""Longest wait of one rank for another. A rank that hangs is found and replaced long before."""
BECOME, FINISH = "become", "finish"
PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """First message to a further rank."""

    spawn: ActorSpec
    job: dict[str, Any]
    rank: int
    size: int
    body: str  # module:function, called as Body
    leader_pid: int

    def injection(self) -> faults.Injection:
        return faults.Injection(self.spawn.run_dir, parse_job(self.job).injection_allowed)


Next = Callable[[], tuple[str, tuple[Any, ...]]]
"""Waits for the next call: (name, arguments)."""
Body = Callable[[RankStart, Next, Callable[[Any], None]], None]
"""What a further rank does: obeys calls, and answers those that ask for an answer. The first call gives it what it
needs to begin."""


class FurtherRanks:
    """Those of one replica, in the process of its first rank."""

    def __init__(self, spawn: ActorSpec, job: JobConfig, *, size: int, body: str) -> None:
        """Starts them. They import what they need, and wait for their first call."""
        self._spawn, self._size = spawn, size
        self._lock = threading.Lock()
        self._finishing = False
        self._ranks: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        started, failed = threading.Event(), list[OSError]()

        def start_all() -> None:
            for rank in range(1, size):
                start = RankStart(
                    spawn=spawn,
                    job=job.model_dump(mode="json"),
                    rank=rank,
                    size=size,
                    body=body,
                    leader_pid=os.getpid(),
                )
                self._start(start)

        def start_and_watch() -> None:
            try:
                start_all()
            except OSError as e:
                failed.append(e)
                return
            finally:
                started.set()
            self._watch()

        # The kernel binds a child to the thread that started it: this one lives as long as the process.
        threading.Thread(target=start_and_watch, name="ranks", daemon=True).start()
        if not started.wait(RANKS_TIMEOUT_SECONDS):
            raise DeadlineExceeded(waited_for="the start of the further ranks", seconds=RANKS_TIMEOUT_SECONDS)
        if failed:
            raise failed[0]

    def tell(self, name: str, *args: Any) -> None:
        """Every further rank makes this call. Raises OSError: one has ended; this process is about to exit."""
        with self._lock:
            for rank in self._ranks:
                rank.send((name, args))

    def answers(self, seconds: float) -> list[Any]:
        """To the last call, by rank.

        Raises:
            DeadlineExceeded: not all of them within `seconds`.
        """
        found = []
        for number, rank in enumerate(self._ranks, 1):
            if not rank.poll(seconds):
                raise DeadlineExceeded(waited_for=f"{self._spawn.replica} rank {number}", seconds=seconds)
            found.append(rank.recv())
        return found

    def become(self, replica: ReplicaId, incarnation: int) -> None:
        """They belong to a standby that was promoted."""
        self.tell(BECOME, replica, incarnation)
        for rank, process in enumerate(self._processes, 1):
            self._record(replica, incarnation, rank, process.pid)

    def finish(self) -> None:
        """Asks them to end; this process is about to exit."""
        self._finishing = True
        with suppress(OSError):
            self.tell(FINISH)

    def _start(self, start: RankStart) -> None:
        ours, theirs = Pipe()
        argv = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.send(start)
        self._ranks.append(ours)
        self._processes.append(process)
        self._record(start.spawn.replica, start.spawn.incarnation, start.rank, process.pid)

    def _record(self, replica: ReplicaId, incarnation: int, rank: int, pid: int) -> None:
        record_process(self._spawn.run.path, rank_name(replica, incarnation, rank), pid, node=self._spawn.node)

    def _watch(self) -> None:
        by_pidfd = {os.pidfd_open(process.pid): n for n, process in enumerate(self._processes)}
        poll = select.poll()  # unlike `select.select`, also of descriptors from 1024 on
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        number = by_pidfd[poll.poll()[0][0]]
        if not self._finishing:
            code = self._processes[number].wait()
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            because = f"rank {number + 1} ended with {ended}"
            logger.error("%s: %s: exiting", self._spawn.replica, because)
            reporter.finish(because)
            os._exit(RANK_EXIT)


def end_with_error(error: Exception) -> NoReturn:
    """Ends this process, and with it its replica. An error that the loss of another rank caused is not reported."""
    threading.Event().wait(PARTNER_SECONDS)  # the replica's end comes meanwhile if another rank was lost
    reporter.exception(error)
    logger.error("this rank failed", exc_info=error)
    os._exit(1)


def main(descriptor: int) -> int:
    """Body of a further rank: obeys its first rank until the socket closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = "1"  # must precede the import of torch
    leader = Connection(descriptor)
    start: RankStart = leader.recv()
    if os.getppid() != start.leader_pid:  # it ended before the line above took effect
        return 0
    spawn = start.spawn
    token = spawn.run.token()

    def secret(replica: ReplicaId, incarnation: int) -> str:
        return registration_secret(token, replica, start.rank, incarnation)

    def next_call() -> tuple[str, tuple[Any, ...]]:
        while True:
            name, args = leader.recv()
            if name == FINISH:
                reporter.finish("stopped by its supervisor")
                os._exit(0)
            if name != BECOME:
                return name, args
            replica, incarnation = args
            reporter.become(replica=replica, incarnation=incarnation, secret=secret(replica, incarnation))

    reporter.start(
        replica=spawn.replica,
        rank=start.rank,
        incarnation=spawn.incarnation,
        secret=secret(spawn.replica, spawn.incarnation),
        node_dir=str(spawn.run.node_dir(spawn.node)),
    )
    module, _, function = start.body.partition(":")
    try:
        body: Body = getattr(importlib.import_module(module), function)
        body(start, next_call, leader.send)
    except EOFError:
        reporter.finish("its first rank ended")
        return 0
    except Exception as e:  # noqa: BLE001 it is reported, and ends the replica
        end_with_error(e)
    return 1


if __name__ == "__main__":
    # Not sys.exit: threads of the weight port and of gloo would delay it.
    os._exit(main(int(sys.argv[1])))
