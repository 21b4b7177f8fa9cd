"""A trainer replica with its services: weight port, version manifests, state copies and checkpoints.

After each commit the version is published with its manifest; the state stream gives a replacement the whole state
between two steps. Without Ray; one working thread calls `join`, `train_step`, `copy_from` and the checkpoint methods.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import CheckpointUnwritable, StaleIncarnation
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.protocol.clients import LoadedCheckpoint
from rolecall.rl_runtime.protocol.messages import CommitRecord, Holder, Manifest, StepResult, TrainerInfo
from rolecall.rl_runtime.protocol.spawn import ActorSpec
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.reduce import LOOPBACK
from rolecall.rl_runtime.trainer.state import first_state
from rolecall.rl_runtime.trainer.trainer import TrainerReplica
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.proof import CANARY
from rolecall.rl_runtime.weights.pull import pull_state

MANIFESTS_MAX: Final = 4
"""Number of newest versions whose manifest is available."""


class TrainerService:
    """The service of a trainer's process. Later incarnations than the first must copy their weights."""

    def __init__(
        self,
        spawn: ActorSpec,
        job: JobConfig,
        *,
        address: str = LOOPBACK,
        clock: Clock | None = None,
        on_microbatch: Callable[[], float | None] = lambda: None,
        on_bucket: Callable[[], None] = lambda: None,
        on_tensor: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_tensor`: called before each tensor is sent, in a thread of the weight port."""
        self._spawn, self._job, self._clock = spawn, job, clock or SystemClock()
        self._token = spawn.run.token()
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self.replica = replica = TrainerReplica(
            replica=spawn.replica,
            incarnation=spawn.incarnation,
            job=job,
            has_state=spawn.incarnation == 1,
            address=address,
            clock=self._clock,
            on_microbatch=on_microbatch,
            on_bucket=on_bucket,
            on_publish=self._publish,
        )
        self.join, self.train_step, self.open_store = replica.join, replica.train_step, replica.open_store
        self.reset_step = replica.reset_step
        self._server = TensorServer(
            self._token, address, clock=self._clock, on_tensor=lambda _puller, _name: on_tensor()
        )
        self._server.state_provider = self.replica.state.export
        if spawn.incarnation == 1:
            self._publish(self.replica.state.commit.policy_version)

    def _publish(self, version: int) -> None:
        tensors, entries = self.replica.state.policy_snapshot(version)
        manifest = build_manifest(version, tensors, self.replica.state.canary_logprobs(CANARY), entries)
        self._server.publish(manifest, tensors, copy=False)
        self._manifests[version] = manifest
        self._manifests.move_to_end(version)
        while len(self._manifests) > MANIFESTS_MAX:
            self._manifests.popitem(last=False)

    # Callable from any thread.

    def info(self) -> TrainerInfo:
        return self.replica.info(self._server.holder(self._spawn.replica, self._spawn.incarnation))

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

    # In the working thread.

    def idle(self) -> None:
        """Returns when the working thread is free."""

    def copy_from(self, holder: Holder) -> None:
        """Becomes a copy of another trainer: weights, optimizer state, commit record.

        Raises:
            TransferFailed: the holder could not provide everything; nothing was changed.
            ProofMismatch: the received data is not a state of this model; nothing was changed.
        """
        tensors, meta = pull_state(
            holder,
            token=self._token,
            puller=self._spawn.replica,
            timeout_seconds=self._job.runtime.transfer_timeout_seconds,
            clock=self._clock,
        )
        self.replica.load_state(tensors, meta)
        self._publish(self.replica.state.commit.policy_version)

    def save_checkpoint(self, folder: str, keep: int) -> str:
        """Path of the checkpoint written.

        Raises:
            CheckpointUnwritable: older ones remain. A full disk is not an exception of the job's code.
        """
        with reporter.phase(Phase.CHECKPOINT):
            tensors, meta = self.replica.state.export()
            step = self.replica.state.commit.step
            try:
                return str(checkpoint.save(Path(folder), step, tensors, meta, keep=keep))
            except OSError as e:
                raise CheckpointUnwritable(path=folder, reason=e.strerror or str(e)) from e

    def load_checkpoint(self, folder: str) -> LoadedCheckpoint:
        """Loads the newest good checkpoint; without one, the run's initial weights."""
        search = checkpoint.newest_good(Path(folder))
        refused = tuple(str(e) for e in search.bad)
        if search.found is not None:
            self.replica.load_state(search.found.tensors, search.found.meta)
            path = str(search.found.path)
        else:
            self.replica.load_state(*first_state(self._job, self.replica.vocab, replica=self._spawn.replica).export())
            path = ""
        self._publish(self.replica.state.commit.policy_version)
        return LoadedCheckpoint(path=path, refused=refused)

    def close(self) -> None:
        self.replica.close()
        self._server.close()
