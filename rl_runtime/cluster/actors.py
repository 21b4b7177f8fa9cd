"""Ray actors: thin wrappers around plain classes, each with a lease. A process whose lease expires exits.

Methods of the concurrency group `work` run sequentially in one thread, those of `control` in parallel to them. Each
constructor imports its role's dependencies, so a reward worker or controller loads neither torch nor vLLM. Exceptions
of work are reported to the agent before they reach the caller. `actor_operations.py` creates the actors.
"""

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import NonFiniteValue, RolecallError
from rolecall.core.ids import process_start_ticks
from rolecall.core.membership import Actual
from rolecall.core.rundir import RunDir
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.protocol.spawn import ActorSpec

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

LEASE_EXIT = 70
"""Exit code of a process whose lease expired."""
START_LEASE_SECONDS = 300.0
"""Lease of a constructor: nothing can be renewed before it returns, and an engine may take minutes."""
LEASE_CHECKS_PER_LEASE = 10
STOP_DELAY_SECONDS = 0.1
"""Between the answer to `stop` and the exit, so that the answer arrives."""


def _work(method: Callable[P, T]) -> Callable[P, T]:
    """Runs sequentially in the single work thread."""
    decorated: Callable[P, T] = ray.method(concurrency_group="work")(method)
    return decorated


def _control(method: Callable[P, T]) -> Callable[P, T]:
    """Runs in parallel to the work, so that it answers while work takes long or hangs."""
    decorated: Callable[P, T] = ray.method(concurrency_group="control")(method)
    return decorated


class ActorLease:
    """Exits this process when its lease is not renewed in time, so that an abandoned actor does not live on."""

    def __init__(self, seconds: float, clock: Clock, end: Callable[[], None]) -> None:
        self._clock, self._end = clock, end
        self.renew(seconds)
        threading.Thread(target=self._watch, name="rolecall-lease", daemon=True).start()

    def renew(self, seconds: float) -> None:
        self._seconds, self._until = seconds, self._clock.monotonic() + seconds

    def _watch(self) -> None:
        while self._clock.monotonic() < self._until:
            self._clock.sleep(self._seconds / LEASE_CHECKS_PER_LEASE)
        self._end()


def _exit_on_lease_expiry() -> None:
    logger.error("the lease of this process was not renewed: exiting")
    os._exit(LEASE_EXIT)


def is_code_error(error: Exception) -> bool:
    """Whether the job's code raised it. Lost peers, stale messages and deadlines belong to the runtime."""
    return isinstance(error, NonFiniteValue) or not isinstance(error, RolecallError)


class _Actor:
    """Common base of all roles."""

    def __init__(self, spawn: ActorSpec, job: dict[str, Any]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # must precede the import of torch
        self._spawn, self._job = spawn, parse_job(job)
        self._lease = ActorLease(START_LEASE_SECONDS, SystemClock(), _exit_on_lease_expiry)
        reporter.start(
            replica=spawn.replica,
            rank=spawn.rank,
            incarnation=spawn.incarnation,
            secret=spawn.secret,
            node_dir=str(spawn.run.node_dir(spawn.node)),
        )
        try:
            self._make(spawn, self._job)
        except Exception as e:
            reporter.exception(e)
            raise
        self._lease.renew(self._job.runtime.lease_seconds)

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        raise NotImplementedError

    def _injection(self, *names: str) -> tuple[Callable[[], None], ...]:
        """One hook per named injection point, sharing one injection agreement."""
        injection = faults.Injection(self._spawn.run_dir, self._job.injection_allowed)
        return tuple(_hook(injection, name) for name in names)

    def _reported(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as e:
            if is_code_error(e):
                reporter.exception(e)
            raise

    @_control
    def ready(self) -> tuple[int, int]:
        """(pid, start time in clock ticks)."""
        pid = os.getpid()
        return pid, process_start_ticks(pid) or 0

    @_control
    def renew(self, seconds: float) -> None:
        self._lease.renew(seconds)

    @_control
    def stop(self) -> None:
        """Exits the process deliberately, right after the answer."""
        reporter.finish("stopped by its supervisor")
        timer = threading.Timer(STOP_DELAY_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()


def _node_address() -> str:
    """Of this actor's node, as given to its raylet: loopback in a local cluster, never an external interface."""
    return str(ray.util.get_node_ip_address())


def _hook(injection: faults.Injection, name: str) -> Callable[[], None]:
    return lambda: injection.checkpoint(name)


class TrainerActor(_Actor):
    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        from rolecall.rl_runtime.trainer.service import TrainerService

        on_microbatch, on_bucket = self._injection(faults.MICROBATCH, faults.BUCKET)
        (on_tensor,) = self._injection(faults.WEIGHTS)  # separate: the port's threads run checkpoints too
        self._service = TrainerService(
            spawn,
            job,
            address=_node_address(),
            on_microbatch=on_microbatch,
            on_bucket=on_bucket,
            on_tensor=on_tensor,
        )
        reporter.enter_phase(Phase.WAIT)

    @_control
    def info(self) -> Any:
        return self._service.info()

    @_control
    def open_store(self, epoch: int) -> Any:
        return self._service.open_store(epoch)

    @_control
    def reset_step(self, step: int) -> None:
        self._service.reset_step(step)

    @_control
    def commit_record(self) -> Any:
        return self._service.commit_record()

    @_control
    def last_result(self) -> Any:
        return self._service.last_result()

    @_control
    def manifest(self, policy_version: int) -> Any:
        return self._service.manifest(policy_version)

    @_work
    def idle(self) -> None:
        self._service.idle()

    @_work
    def join(self, *args: Any) -> None:
        self._reported(self._service.join, *args)

    @_work
    def train_step(self, *args: Any) -> Any:
        return self._reported(self._service.train_step, *args)

    @_work
    def copy_from(self, holder: Any) -> None:
        self._reported(self._service.copy_from, holder)

    @_work
    def load_checkpoint(self, folder: str) -> Any:
        return self._reported(self._service.load_checkpoint, folder)

    @_work
    def save_checkpoint(self, folder: str, keep: int) -> str:
        return self._reported(self._service.save_checkpoint, folder, keep)


class RolloutActor(_Actor):
    """Also a standby, until it is promoted."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        from rolecall.rl_runtime.rollout.engine import EngineSettings
        from rolecall.rl_runtime.rollout.rollout import RolloutReplica

        (on_step,) = self._injection(faults.ENGINE_STEP)
        settings = EngineSettings(
            model_dir=str(spawn.run.path / "model"),
            kv_cache_bytes=job.runtime.kv_cache_bytes,
            max_model_len=max(EngineSettings(model_dir="").max_model_len, job.task.max_tokens),
            seed=job.seed,
            fixed_length=job.task.fixed_length,
        )
        self._rollout = RolloutReplica(
            replica=spawn.replica,
            incarnation=spawn.incarnation,
            token=spawn.run.token(),
            settings=settings,
            address=_node_address(),
            transfer_seconds=job.runtime.transfer_timeout_seconds,
            on_step=on_step,
            on_failure=_engine_failed,
        )

    @_control
    def info(self) -> Any:
        return self._rollout.info()

    @_control
    def submit(self, incarnation: int, requests: Any) -> None:
        self._rollout.submit(incarnation, requests)

    @_control
    def tokens_since(self, incarnation: int, offsets: dict[str, int]) -> Any:
        return self._rollout.tokens_since(incarnation, offsets)

    @_control
    def drain(self, incarnation: int, offsets: dict[str, int], seconds: float) -> Any:
        return self._rollout.drain(incarnation, offsets, seconds)

    @_control
    def ack(self, incarnation: int, request_ids: list[str]) -> None:
        self._rollout.ack(incarnation, request_ids)

    @_control
    def abort(self, incarnation: int, request_ids: list[str]) -> None:
        self._rollout.abort(incarnation, request_ids)

    @_control
    def list_requests(self, incarnation: int) -> Any:
        return self._rollout.list_requests(incarnation)

    @_work
    def update_weights(self, *args: Any) -> Any:
        return self._reported(self._rollout.update_weights, *args)

    @_control
    def promote(self, replica: Any, incarnation: int, secret: str) -> None:
        self._rollout.promote(replica, incarnation, secret)


def _engine_failed(error: BaseException) -> None:
    """Reports a failed engine and exits the process, so that it is replaced."""
    reporter.exception(error)
    logger.error("the engine failed: %s: %s", type(error).__name__, error)
    os._exit(1)


class RewardActor(_Actor):
    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        from rolecall.rl_runtime.tasks.reward_worker import RewardWorker

        (on_group,) = self._injection(faults.SCORE)
        self._worker = RewardWorker(replica=spawn.replica, incarnation=spawn.incarnation, job=job, on_group=on_group)

    @_work
    def score(self, incarnation: int, groups: Any) -> Any:
        return self._reported(self._worker.score, incarnation, groups)


class ControllerActor(_Actor):
    """Runs the loop in its own thread from construction on."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        self._controller: Any = None
        threading.Thread(target=self._run, name="controller", daemon=True).start()

    def _run(self) -> None:
        try:
            outcome = asyncio.run(self._loop())
        except Exception as e:
            # The controller cannot continue: report the error and exit, so that a replacement takes over.
            reporter.exception(e)
            logger.exception("the controller failed")
            os._exit(1)
        reporter.enter_phase(Phase.IDLE)
        logger.info("the controller is done: %s", outcome)

    async def _loop(self) -> Any:
        from rolecall.core.journal.journal import Journal
        from rolecall.core.journal.ledger import Ledger
        from rolecall.rl_runtime.controller.controller import Controller
        from rolecall.rl_runtime.protocol.ray_clients import connect
        from rolecall.rl_runtime.tasks.reward_worker import task_of
        from rolecall.rl_runtime.weights.proof import ProofVerifier

        clock = SystemClock()
        journal = Journal(self._spawn.database_url, clock=clock, create=False)
        task = task_of(self._job)
        self._controller = Controller(
            self._spawn,
            self._job,
            connect=connect,
            source=task,
            verifier=ProofVerifier(),
            journal=journal,
            ledger=Ledger(journal.store, clock=clock),
            clock=clock,
            tokens_generated=report_tokens(self._spawn.run),
            vocab_size=task.vocab.size,
        )
        try:
            return await self._controller.run()
        finally:
            journal.close()

    @_control
    def status(self) -> dict[str, object]:
        return dict(self._controller.status()) if self._controller is not None else {}


def report_tokens(run: RunDir) -> Callable[[Actual], int | None]:
    """Reads from a process's state page how many tokens it has generated; the page outlives the process."""
    layout: Any = vars(reporter)["at"]  # the dead process's reporter used this layout

    def read(record: Actual) -> int | None:
        pages: Path = run.node_dir(record.node) / "pages"
        try:
            with (pages / layout.page_name(record.pid, record.start_ticks)).open("rb") as f:
                f.seek(8 * layout.W_TOKENS)
                return int(struct.unpack("=q", f.read(8))[0])
        except (OSError, struct.error):
            return None

    return read
