"""A trainer replica with its services: weight port, version manifests, state copies and checkpoints.

After each commit the version is published with its manifest; the state stream gives a replacement the whole state
between two steps. A checkpoint is a copy of the state that is written while the next steps run. Without Ray; one
working thread calls `join`, `train_step`, `copy_from`, `list_checkpoints`, `load_checkpoint` and `take_snapshot`.

Of several ranks each has a service. The first one publishes and writes checkpoints, which hold whole tensors: a run can
resume with another number of ranks. Each rank reads its part of the checkpoint that the controller names. State copies
go from rank to rank.
"""

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import CheckpointCorrupt, CheckpointUnwritable, StaleIncarnation, WireError
from rolecall.core.ids import ReplicaId
from rolecall.core.membership import is_standby
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.faults.process_side import COPY, SNAPSHOT
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo, WrittenCheckpoint
from rolecall.rl_runtime.protocol.messages import CommitRecord, Holder, Manifest, StepResult, TrainerInfo
from rolecall.rl_runtime.protocol.spawn import ActorSpec
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.ranks import ALONE, Ranks
from rolecall.rl_runtime.trainer.reduce import LOOPBACK
from rolecall.rl_runtime.trainer.state import first_state
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.proof import CANARY
from rolecall.rl_runtime.weights.pull import pull_state

MANIFESTS_MAX: Final = 4
"""Number of newest versions whose manifest is available."""


def _return_free_memory() -> None:
    """To the kernel: versions of the weights come and go in small pieces, between which glibc would keep the gaps."""
    with suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


class TrainerService:
    """The service of a trainer's process. Later incarnations than the first, and standbys, must copy their weights."""

    def __init__(
        self,
        spawn: ActorSpec,
        job: JobConfig,
        *,
        address: str = LOOPBACK,
        ranks: Ranks = ALONE,
        clock: Clock | None = None,
        on_microbatch: Callable[[], float | None] = lambda: None,
        on_bucket: Callable[[], None] = lambda: None,
        on_stage: Callable[[str], None] = lambda _stage: None,
        on_tensor: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`on_stage`: called at the beginning of a backward pass, a vote, a copy, and a snapshot, with the names of
        `process_side`. `on_tensor`: called before each tensor is sent, in a thread of the weight port
        (`TensorServer`)."""
        self._spawn, self._job, self._clock = spawn, job, clock or SystemClock()
        self._token, self._ranks = spawn.run.token(), ranks
        self._on_stage = on_stage
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        has_state = spawn.incarnation == 1 and not is_standby(spawn.replica)
        self._writing, self._slot = threading.Lock(), threading.Lock()
        self._snapshot: tuple[int, dict[str, Tensor], str] | None = None  # guarded by _slot
        self.replica = replica = TrainerReplica(
            replica=spawn.replica,
            incarnation=spawn.incarnation,
            job=job,
            has_state=has_state,
            address=address,
            ranks=ranks,
            clock=self._clock,
            on_microbatch=on_microbatch,
            on_bucket=on_bucket,
            on_stage=on_stage,
            on_publish=self._publish,
        )
        self.join, self.train_step, self.open_store = replica.join, replica.train_step, replica.open_store
        self.reset_step = replica.reset_step
        self._server = TensorServer(
            self._token, address, clock=self._clock, on_tensor=lambda _puller, _name: on_tensor()
        )
        self._server.state_provider = self.replica.state.export
        _, *rank_ports = ranks.gather(self._server.port)
        self._rank_ports = tuple(rank_ports)
        if has_state:
            self._publish(self.replica.state.commit.policy_version)

    def _publish(self, version: int) -> None:
        tensors, entries = self.replica.state.policy_snapshot(version)
        canary = self.replica.state.canary_logprobs(CANARY)
        if not self._ranks.is_first:
            return
        manifest = build_manifest(version, tensors, canary, entries)
        self._server.publish(manifest, tensors, copy=False)
        self._manifests[version] = manifest
        self._manifests.move_to_end(version)
        while len(self._manifests) > MANIFESTS_MAX:
            self._manifests.popitem(last=False)
        del tensors, manifest
        _return_free_memory()
        if self._job.num_hybrids:
            torch.cuda.empty_cache()  # for the engine that wakes up next; no effect without a GPU

    # Callable from any thread.

    def promote(self, replica: ReplicaId, incarnation: int, secret: str) -> None:
        """A standby becomes `replica`. It must copy the state, as every replacement."""
        self.take_name(replica, incarnation)
        reporter.become(replica=replica, incarnation=incarnation, secret=secret)

    def take_name(self, replica: ReplicaId, incarnation: int) -> None:
        """The part of `promote` that concerns this service; idempotent."""
        self._spawn = replace(self._spawn, replica=replica, incarnation=incarnation)
        self.replica.take_name(replica, incarnation)

    def info(self) -> TrainerInfo:
        holder = self._server.holder(self._spawn.replica, self._spawn.incarnation)
        return self.replica.info(replace(holder, rank_ports=self._rank_ports))

    def manifest(self, policy_version: int) -> Manifest:
        """Raises StaleIncarnation: that version is not, or no longer, available here."""
        found = self._manifests.get(policy_version)
        if found is None:
            newest = self.replica.state.commit.policy_version
            raise StaleIncarnation(
                replica=self._spawn.replica, wanted=f"version {newest}", got=f"version {policy_version}"
            )
        return found

    def commit_record(self) -> CommitRecord:
        return self.replica.state.commit

    def last_result(self) -> StepResult | None:
        return self.replica.last_result

    def write_checkpoint(self, folder: str, step: int) -> WrittenCheckpoint:
        """Writes a checkpoint of the snapshot of `step`, which is forgotten.

        Raises:
            CheckpointUnwritable: nothing was changed. A full disk is not an exception of the job's code.
            StaleIncarnation: there is no snapshot of that step.
        """
        if not self._writing.acquire(blocking=False):
            raise CheckpointUnwritable(path=folder, reason="an earlier one is still being written")
        try:
            with self._slot:
                taken, self._snapshot = self._snapshot, None
            if taken is None or taken[0] != step:
                got = "none" if taken is None else f"of step {taken[0]}"
                raise StaleIncarnation(replica=self._spawn.replica, wanted=f"a snapshot of step {step}", got=got)
            path = checkpoint.save(Path(folder), *taken)
            return WrittenCheckpoint(path=str(path), found=self.list_checkpoints(folder))
        except OSError as e:
            raise CheckpointUnwritable(path=folder, reason=e.strerror or str(e)) from e
        finally:
            self._writing.release()

    def remove_checkpoints(self, paths: Sequence[str]) -> None:
        """What cannot be removed now stays."""
        checkpoint.remove(map(Path, paths))

    # In the working thread.

    def idle(self) -> None:
        """Returns when the working thread is free."""

    def copy_from(self, holder: Holder) -> None:
        """Becomes a copy of another trainer: weights, optimizer state, commit record.

        Raises:
            WireError: the holder could not provide everything to every rank; nothing was changed.
            ProofMismatch: the received data is not a state of this model; nothing was changed.
        """
        with reporter.phase(Phase.COPY):
            self._on_stage(COPY)
            self.replica.load_state(*self._pulled(holder))
            self._publish(self.replica.state.commit.policy_version)

    def _pulled(self, holder: Holder) -> tuple[dict[str, Tensor], str]:
        """This rank's part of the state that `holder` has, and its metadata."""
        rank = self._ranks.rank
        lost, tensors, meta = "", dict[str, Tensor](), ""
        try:
            tensors, meta = pull_state(
                holder if rank == 0 else replace(holder, port=holder.rank_ports[rank - 1]),
                token=self._token,
                puller=self._spawn.replica,
                timeout_seconds=self._job.runtime.transfer_timeout_seconds,
                clock=self._clock,
            )
        except WireError as e:
            if self._ranks.size == 1:
                raise
            lost = f"rank {rank}: {e}"
        if lost := self._ranks.agree(lost):
            raise WireError(lost)
        return tensors, meta

    def take_snapshot(self) -> int:
        """Copies the whole state, at the first rank, for `write_checkpoint`. Returns its step.

        Raises:
            CheckpointUnwritable: an earlier snapshot is still being written.
        """
        if because := self._ranks.agree("an earlier one is still being written" if self._writing.locked() else ""):
            raise CheckpointUnwritable(path="the checkpoint", reason=because)
        with self._slot:
            self._snapshot = None
        with reporter.phase(Phase.CHECKPOINT):
            self._on_stage(SNAPSHOT)
            tensors, meta = self.replica.state.export(whole=True)
            step = self.replica.state.commit.step
        if self._ranks.is_first:
            with self._slot:
                self._snapshot = step, tensors, meta
        return step

    def list_checkpoints(self, folder: str) -> tuple[CheckpointInfo, ...]:
        """Raises CheckpointCorrupt: the folder cannot be read."""
        return tuple(checkpoint.checkpoints_in(Path(folder)))

    def load_checkpoint(self, path: str) -> None:
        """Takes the state of the checkpoint at `path`; empty: the run's initial state.

        Raises:
            CheckpointCorrupt: a rank cannot read it; nothing was changed.
            ProofMismatch: it is not a state of this model; nothing was changed.
        """
        damage, tensors, meta = "", dict[str, Tensor](), ""
        try:
            tensors, meta = self._stored(path)
        except CheckpointCorrupt as e:
            if self._ranks.size == 1:
                raise
            damage = f"rank {self._ranks.rank}: {e}"
        if damage := self._ranks.agree(damage):
            raise CheckpointCorrupt(path=path, reason=damage)
        self.replica.load_state(tensors, meta, whole=True)
        self._publish(self.replica.state.commit.policy_version)

    def _stored(self, path: str) -> tuple[dict[str, Tensor], str]:
        if not path:
            return first_state(self._job, self.replica.vocab, replica=self._spawn.replica).export()
        found = checkpoint.load(Path(path))
        return found.tensors, found.meta

    def close(self) -> None:
        self.replica.close()
        self._server.close()
