"""A trainer of several ranks as its actor has it, in a process of its own that is driven over a pipe."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rolecall.core.config.job import DeviceName, JobConfig
from rolecall.core.errors import RolecallError
from rolecall.core.ids import NodeId, ReplicaId, replica_id
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.processes import is_alive, recorded_processes
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.rank_processes import FurtherRanks
from rolecall.rl_runtime.trainer.multi_rank_trainer import MultiRankTrainer, further_rank, make_service
from rolecall.rl_runtime.trainer.ranks import Ranks
from tests.rl_runtime.trainer_process import DEADLINE_SECONDS, LEDGER, PRELOADED, make_microbatches
from tests.support import eventually

NODE = NodeId("node-1")


def serve(
    conn: Connection, run: Path, replica: ReplicaId, incarnation: int, job: JobConfig, device: DeviceName
) -> None:
    """Body of the process: obeys (method, args) until the pipe closes."""
    spawn = make_spawn(RunDir(run), replica, incarnation, NODE, device=device)

    def injection() -> faults.Injection:
        return faults.Injection(spawn.run_dir, job.injection_allowed)

    service: Any
    if job.runtime.trainer_ranks > 1:
        body = f"{further_rank.__module__}:{further_rank.__name__}"
        ranks = FurtherRanks(spawn, job, size=job.runtime.trainer_ranks, body=body)
        service = MultiRankTrainer(spawn, job, ranks, address="127.0.0.1", injection=injection)
    else:
        alone = Ranks(device=device)
        service = make_service(spawn, job, address="127.0.0.1", ranks=alone, injection=injection)
    conn.send(("ok", None))
    while True:
        try:
            method, args = conn.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            conn.send(("ok", getattr(service, method)(*args)))
        except RolecallError as e:
            conn.send(("error", e))


class MultiRankProcess:
    """The test's handle on one replica."""

    def __init__(
        self,
        run: RunDir,
        index: int,
        job: JobConfig,
        incarnation: int = 1,
        *,
        device: DeviceName = "cpu",
        role: str = "trainer",
    ) -> None:
        self.replica, self.incarnation, self._run, self._job = replica_id(role, index), incarnation, run, job
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._conn, theirs = context.Pipe()
        args = theirs, run.path, self.replica, incarnation, job, device
        self.process = context.Process(target=serve, args=args)
        self.process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        self._conn.send((method, args))

    def answer(self) -> Any:
        """Raises EOFError: the process has ended."""
        assert self._conn.poll(DEADLINE_SECONDS), f"{self.replica} gave no answer"
        kind, value = self._conn.recv()
        if kind == "error":
            raise value
        return value

    def ask(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.answer()

    def promote(self, replica: ReplicaId, incarnation: int) -> None:
        self.ask("promote", replica, incarnation, "a secret")
        self.replica, self.incarnation = replica, incarnation

    def further_ranks(self) -> list[tuple[int, int]]:
        """(PID, start time) of each."""
        prefix = f"{self.replica}#{self.incarnation} rank "
        found = [line for line in recorded_processes(self._run.path) if line["name"].startswith(prefix)]
        return [(int(line["pid"]), int(line["start_ticks"])) for line in found]

    def exit_code(self) -> int | None:
        self.process.join(DEADLINE_SECONDS)
        return self.process.exitcode

    def assert_gone(self) -> None:
        """With all of its ranks."""
        assert self.exit_code() is not None
        eventually(lambda: not any(is_alive(pid, ticks) for pid, ticks in self.further_ranks()), "end of the ranks")

    def close(self) -> None:
        self._conn.close()
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.assert_gone()


def join(epoch: int, *members: MultiRankProcess) -> None:
    host, port = members[0].ask("open_store", epoch) if len(members) > 1 else ("127.0.0.1", 0)
    for rank, member in enumerate(members):
        member.send("join", member.incarnation, epoch, rank, len(members), host, port)
    for member in members:
        member.answer()


def tell_step(job: JobConfig, epoch: int, step: int, *members: MultiRankProcess) -> None:
    """Equal shares, in order."""
    microbatches = make_microbatches(job, step)
    ids, names = [m.microbatch_id for m in microbatches], [m.replica for m in members]
    for number, member in enumerate(members):
        mine = microbatches[number :: len(members)]
        member.send("train_step", member.incarnation, epoch, step, mine, ids, LEDGER, names)
