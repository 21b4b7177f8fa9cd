"""Ray actors: thin wrappers around plain classes, each with a lease. A process whose lease expires exits.

Methods of the concurrency group `work` run sequentially in one thread, those of `control` in parallel to them. Each
constructor imports its role's dependencies, so a reward worker or controller loads neither torch nor vLLM. Exceptions
of work are reported to the agent before they reach the caller. `actor_operations.py` creates the actors. `RayClient` is
the controller's way to the other actors, with Ray's errors translated.
"""

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from rolecall.agent.reporter import reporter
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import DeadlineExceeded, RolecallError
from rolecall.core.ids import process_start_ticks
from rolecall.core.membership import Actual, hybrid_partner
from rolecall.core.rundir import RunDir
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.device import VISIBLE_DEVICES
from rolecall.rl_runtime.faults import process_side as faults
from rolecall.rl_runtime.protocol.clients import ReplicaExited, is_code_error
from rolecall.rl_runtime.protocol.spawn import NAMESPACE, ActorSpec, start_seconds
from rolecall.rl_runtime.rank_processes import FurtherRanks

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

LEASE_EXIT = 70
"""Exit code of a process whose lease expired."""
LEASE_CHECKS_PER_LEASE = 10
LEASE_CHECK_SECONDS_MAX = 30.0
"""The lease of a start may be hours; the one that follows it is short."""
STOP_DELAY_SECONDS = 0.1
"""Between the answer to `stop` and the exit, so that the answer arrives."""
REASON_LENGTH_MAX = 300


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
            self._clock.sleep(min(self._seconds / LEASE_CHECKS_PER_LEASE, LEASE_CHECK_SECONDS_MAX))
        self._end()


def _exit_on_lease_expiry() -> None:
    logger.error("the lease of this process was not renewed: exiting")
    os._exit(LEASE_EXIT)


class RemoteError(Exception):
    """An exception of a replica that could not be deserialized."""


class RayClient:
    """One incarnation, reached through a named actor."""

    def __init__(self, record: Actual, handle: Any) -> None:
        self.replica, self.incarnation, self._handle = record.replica, record.incarnation, handle

    async def call(self, method: str, *args: Any) -> Any:
        """
        Raises:
            ReplicaExited: the actor died.
            DeadlineExceeded: Ray cannot reach it at the moment; it may be alive.
        """
        answer, _ = await self.timed_call(method, *args)
        return answer

    async def timed_call(self, method: str, *args: Any) -> tuple[Any, float]:
        asked_at, answered_at = monotonic(), 0.0

        def note(_: object) -> None:  # in a thread of Ray
            nonlocal answered_at
            answered_at = monotonic()

        try:
            future = getattr(self._handle, method).remote(*args).future()
            future.add_done_callback(note)  # before that of wrap_future
            answer = await asyncio.wrap_future(future)
            return answer, answered_at - asked_at
        except RayTaskError as e:
            cause = getattr(e, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None
            raise RemoteError(str(e.traceback_str).strip().splitlines()[-1][:REASON_LENGTH_MAX]) from None
        except ActorUnavailableError as e:
            call = f"{self.replica}#{self.incarnation} {method} ({_short(e)})"
            raise DeadlineExceeded(waited_for=call, seconds=0.0) from None
        except RayActorError as e:
            raise ReplicaExited(replica=self.replica, incarnation=self.incarnation, because=_short(e)) from None
        except RayError as e:
            raise RolecallError(f"{self.replica}#{self.incarnation} {method}: {_short(e)}") from None


def connect(record: Actual) -> RayClient:
    """Raises ReplicaExited: no actor has that name."""
    try:
        return RayClient(record, ray.get_actor(record.actor, namespace=NAMESPACE))
    except ValueError as e:
        because = f"no actor {record.actor}: {_short(e)}"
        raise ReplicaExited(replica=record.replica, incarnation=record.incarnation, because=because) from None


def _short(error: BaseException) -> str:
    """First informative line: Ray's messages continue with stack traces and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:REASON_LENGTH_MAX]


class _Actor:
    """Common base of all roles."""

    def __init__(self, spawn: ActorSpec, job: dict[str, Any]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # must precede the import of torch
        if spawn.gpus:  # of a hybrid: Ray gives them to no actor
            os.environ[VISIBLE_DEVICES] = ",".join(spawn.gpus)
        self._spawn, self._job = spawn, parse_job(job)
        # Nothing can be renewed before this constructor returns.
        self._lease = ActorLease(start_seconds(self._job), SystemClock(), _exit_on_lease_expiry)
        reporter.start(
            replica=spawn.replica,
            rank=0,
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

    _further_ranks: FurtherRanks | None = None
    _served: Any
    """Set by `_make`: does the role's work, and has a method for each remote call that `_forwards` adds."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        raise NotImplementedError

    def _start_ranks(self, size: int, module: str) -> FurtherRanks | None:
        """The further ranks of a replica of `size`; None if it has none. To be called before the first rank imports
        torch, so that all import it at the same time."""
        if size > 1:
            self._further_ranks = FurtherRanks(self._spawn, self._job, size=size, body=f"{module}:further_rank")
        return self._further_ranks

    def _injection(self) -> faults.Injection:
        """An injection agreement for the threads of one component."""
        return faults.Injection(self._spawn.run_dir, self._job.injection_allowed)

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
        if self._further_ranks is not None:
            self._further_ranks.finish()
        reporter.finish("stopped by its supervisor")
        timer = threading.Timer(STOP_DELAY_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()


def _node_address() -> str:
    """Of this actor's node, as given to its raylet: loopback in a local cluster, never an external interface."""
    return str(ray.util.get_node_ip_address())


def _forwards(
    *, control: Sequence[str] = (), work: Sequence[str] = (), write: Sequence[str] = ()
) -> Callable[[type[A]], type[A]]:
    """Class decorator: adds remote methods that call those of `_served`, and reports exceptions of work and writing."""

    def forwarding(name: str) -> Callable[..., Any]:
        def method(self: _Actor, *args: Any) -> Any:
            call = getattr(self._served, name)
            return call(*args) if name in control else self._reported(call, *args)

        method.__name__ = name
        return method

    def add(actor: type[A]) -> type[A]:
        for group, names in (("control", control), ("work", work), ("write", write)):
            for name in names:
                setattr(actor, name, ray.method(concurrency_group=group)(forwarding(name)))
        return actor

    return add


@_forwards(
    control=("info", "open_store", "reset_step", "commit_record", "last_result", "manifest", "promote"),
    work=("idle", "join", "train_step", "copy_from", "list_checkpoints", "load_checkpoint", "take_snapshot"),
    write=("write_checkpoint", "remove_checkpoints"),
)
class TrainerActor(_Actor):
    """Also a standby, until it is promoted."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        ranks = self._start_ranks(job.runtime.trainer_ranks, "rolecall.rl_runtime.trainer.multi_rank_trainer")
        from rolecall.rl_runtime.trainer.multi_rank_trainer import MultiRankTrainer, make_service
        from rolecall.rl_runtime.trainer.ranks import Ranks

        address = _node_address()
        if ranks is not None:
            self._served = MultiRankTrainer(spawn, job, ranks, address=address, injection=self._injection)
        else:
            alone = Ranks(device=spawn.device)
            self._served = make_service(spawn, job, address=address, ranks=alone, injection=self._injection)


@_forwards(
    control=("info", "submit", "tokens_since", "drain", "sleep", "ack", "list_requests", "promote"),
    work=("update_weights",),
)
class RolloutActor(_Actor):
    """Also a standby, until it is promoted."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        ranks = self._start_ranks(job.runtime.rollout_ranks, "rolecall.rl_runtime.rollout.multi_rank_engine")
        from rolecall.rl_runtime.rollout.engine import EngineSettings
        from rolecall.rl_runtime.rollout.rollout import RolloutReplica
        from rolecall.rl_runtime.weights.proof import CANARY

        settings = EngineSettings(
            model_dir=str(spawn.run.path / "model"),
            kv_cache_bytes=job.runtime.kv_cache_bytes,
            max_model_len=max(len(CANARY) + 1, job.max_tokens),  # the canary is served, too, with one token more
            seed=job.seed,
            dtype=job.model.dtype,
            fixed_length=job.data is None and job.task.fixed_length,
            sampling=job.sampling,
            num_ranks=job.runtime.rollout_ranks,
            device=spawn.device,
            memory_share=job.runtime.rollout_memory_share,
            cuda_graphs=job.runtime.rollout_cuda_graphs,
            sleeps=hybrid_partner(spawn.replica, job.num_hybrids) is not None,
        )
        several: dict[str, Any] = {}
        if ranks is not None:
            from rolecall.rl_runtime.rollout.multi_rank_engine import MultiRankEngine, first_place

            place = first_place(spawn, settings, ranks)
            several = {
                "make_engine": partial(MultiRankEngine, place=place, ranks=ranks),
                "on_promotion": ranks.become,
            }
        self._served = RolloutReplica(
            replica=spawn.replica,
            incarnation=spawn.incarnation,
            token=spawn.run.token(),
            settings=settings,
            address=_node_address(),
            start_seconds=start_seconds(job),
            transfer_seconds=job.runtime.transfer_timeout_seconds,
            on_step=partial(self._injection().factor, faults.ENGINE_STEP),
            on_tensor=partial(self._injection().factor, faults.WEIGHTS),
            on_failure=_engine_failed,
            **several,
        )


def _engine_failed(error: BaseException) -> None:
    """Reports a failed engine and exits the process, so that it is replaced."""
    reporter.exception(error)
    logger.error("the engine failed: %s: %s", type(error).__name__, error)
    os._exit(1)


@_forwards(work=("score", "observe"))
class RewardActor(_Actor):
    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
        from rolecall.rl_runtime.tasks.reward_worker import RewardWorker

        on_group = partial(self._injection().factor, faults.SCORE)
        self._served = RewardWorker(replica=spawn.replica, incarnation=spawn.incarnation, job=job, on_group=on_group)


class ControllerActor(_Actor):
    """Runs the loop in its own thread from construction on."""

    def _make(self, spawn: ActorSpec, job: JobConfig) -> None:
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
        from rolecall.rl_runtime.cluster.actors import connect
        from rolecall.rl_runtime.controller.controller import Controller
        from rolecall.rl_runtime.tasks.reward_worker import task_of
        from rolecall.rl_runtime.weights.proof import ProofVerifier

        clock = SystemClock()
        journal = Journal(self._spawn.database_url, clock=clock, create=False)
        task = task_of(self._job)
        controller = Controller(
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
            return await controller.run()
        finally:
            journal.close()


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
