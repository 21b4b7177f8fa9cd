"""The further ranks of a trainer replica: processes that the process of its first rank starts and leads.

The first rank is the replica's actor; it tells the others each call over a socket that only they have, and makes the
same call itself. A replica lives and dies as one: when a further rank ends, the first one announces that and exits;
when the first one ends, the kernel kills the others, also those that are stopped (`PR_SET_PDEATHSIG`).

`python -m rolecall.rl_runtime.trainer.rank_processes FD` is one further rank.
"""

import ctypes
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
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from rolecall.agent.reporter import reporter
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import RolecallError
from rolecall.core.rundir import registration_secret
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.processes import record_process
from rolecall.rl_runtime.protocol.spawn import ActorSpec

logger = logging.getLogger(__name__)

RANK_EXIT: Final = 71
"""Exit code of a first rank whose replica has lost another rank."""
PARTNER_SECONDS: Final = 3.0
"""An error may come from the loss of another rank: the replica's end is awaited for this long before it is reported."""
RANKS_TIMEOUT_SECONDS: Final = 300.0
"""Longest wait of one rank for another. A rank that hangs is found and replaced long before."""
TOLD: Final = frozenset(("join", "train_step", "copy_from", "load_checkpoint", "save_checkpoint", "reset_step"))
"""Calls that every rank makes; the first one alone answers the others."""
FINISH: Final = "finish"
PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """First message to a further rank."""

    spawn: ActorSpec
    job: dict[str, Any]
    rank: int
    address: str
    store: tuple[str, int]
    leader_pid: int


def process_name(spawn: ActorSpec, rank: int) -> str:
    """`trainer/0#2 rank 1`: in the list of the run's processes."""
    return f"{spawn.replica}#{spawn.incarnation} rank {rank}"


class LedTrainer:
    """A trainer service of several ranks, in the process of the first one."""

    def __init__(self, spawn: ActorSpec, job: JobConfig, *, address: str, injection: Callable[[], Any]) -> None:
        """Starts the further ranks, and returns when all are ready. `injection`: makes an injection agreement."""
        from rolecall.rl_runtime.trainer.ranks import Ranks
        from rolecall.rl_runtime.trainer.reduce import LOOPBACK, EpochStore

        size = job.runtime.trainer_ranks
        self._store = EpochStore(LOOPBACK, RANKS_TIMEOUT_SECONDS)
        at = self._store.host, self._store.port
        self._lock = threading.Lock()
        self._finishing = False
        self._ranks: list[Connection] = []
        started = threading.Event()
        # The kernel binds a child to the thread that started it: this one lives as long as the process.
        threading.Thread(
            target=self._start_and_watch, args=(spawn, job, size, address, at, started), name="ranks", daemon=True
        ).start()
        started.wait(RANKS_TIMEOUT_SECONDS)
        ranks = Ranks(0, size, host=at[0], port=at[1], seconds=RANKS_TIMEOUT_SECONDS)
        self._service = make_service(spawn, job, address=address, ranks=ranks, injection=injection)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._service, name)
        return partial(self._by_all, name, method) if name in TOLD else method

    def finish(self) -> None:
        """Asks the further ranks to end; this process is about to exit."""
        self._finishing = True
        with suppress(OSError):
            self._tell(FINISH, ())

    def _by_all(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            self._tell(name, args)
            return method(*args)
        except RolecallError:
            raise  # every rank has it
        except Exception as e:  # noqa: BLE001 it is reported
            end_with_error(e)  # the other ranks may be in the middle of the call

    def _tell(self, name: str, args: tuple[Any, ...]) -> None:
        with self._lock:
            for rank in self._ranks:
                rank.send((name, args))

    def _start_and_watch(
        self, spawn: ActorSpec, job: JobConfig, size: int, address: str, at: tuple[str, int], started: threading.Event
    ) -> None:
        by_pidfd: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        for rank in range(1, size):
            ours, theirs = Pipe()
            argv = [sys.executable, "-m", __name__, str(theirs.fileno())]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
            record_process(spawn.run.path, process_name(spawn, rank), process.pid, node=spawn.node)
            ours.send(
                RankStart(
                    spawn=spawn,
                    job=job.model_dump(mode="json"),
                    rank=rank,
                    address=address,
                    store=at,
                    leader_pid=os.getpid(),
                )
            )
            self._ranks.append(ours)
            by_pidfd[os.pidfd_open(process.pid)] = rank, process
        started.set()
        ended = select.select(list(by_pidfd), [], [])[0]
        rank, process = by_pidfd[ended[0]]
        if not self._finishing:
            because = f"rank {rank} ended with {exit_text(process.wait())}"
            logger.error("%s: %s: exiting", spawn.replica, because)
            reporter.finish(because)
            os._exit(RANK_EXIT)


def make_service(spawn: ActorSpec, job: JobConfig, *, address: str, ranks: Any, injection: Callable[[], Any]) -> Any:
    """A trainer service with the checkpoints of fault injection."""
    from rolecall.rl_runtime.trainer.service import TrainerService

    of_work = injection()
    return TrainerService(
        spawn,
        job,
        address=address,
        ranks=ranks,
        on_microbatch=partial(of_work.factor, faults.MICROBATCH),
        on_bucket=partial(of_work.checkpoint, faults.BUCKET),
        on_tensor=partial(injection().checkpoint, faults.WEIGHTS),
    )


def exit_text(code: int) -> str:
    """`signal 9` or `exit code 1`."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


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
    if os.getppid() != start.leader_pid:  # it ended before the kernel knew whom to kill
        return 0
    spawn, job = start.spawn, parse_job(start.job)
    reporter.start(
        replica=spawn.replica,
        rank=start.rank,
        incarnation=spawn.incarnation,
        secret=registration_secret(spawn.run.token(), spawn.replica, start.rank, spawn.incarnation),
        node_dir=str(spawn.run.node_dir(spawn.node)),
    )
    from rolecall.rl_runtime.trainer.ranks import Ranks

    host, port = start.store
    try:
        ranks = Ranks(start.rank, job.runtime.trainer_ranks, host=host, port=port, seconds=RANKS_TIMEOUT_SECONDS)
        service = make_service(
            spawn,
            job,
            address=start.address,
            ranks=ranks,
            injection=lambda: faults.Injection(spawn.run_dir, job.injection_allowed),
        )
        reporter.enter_phase(Phase.WAIT)
        while True:
            name, args = leader.recv()
            if name == FINISH:
                reporter.finish("stopped by its supervisor")
                return 0
            with suppress(RolecallError):  # the first rank has the same, and answers
                getattr(service, name)(*args)
    except EOFError:
        reporter.finish("its first rank ended")
        return 0
    except Exception as e:  # noqa: BLE001 it is reported, and ends the replica
        end_with_error(e)
    return 1


if __name__ == "__main__":
    # Not sys.exit: threads of the weight port and of gloo would delay it.
    os._exit(main(int(sys.argv[1])))
