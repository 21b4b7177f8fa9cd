"""The supervisor's long operations, each in a thread; its incarnations count as busy until it ends.

An operation updates `actual` as soon as a state changes and never raises out of its thread: a failure marks the
incarnation LOST with the reason, and recovery decides again. While the journal cannot be used, an operation waits:
a process that has started or was promoted would otherwise be taken for an abandoned one.
"""

import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from rolecall.core.clock import Clock
from rolecall.core.config.job import DeviceName, JobConfig
from rolecall.core.errors import ActuatorError, JournalUnavailable
from rolecall.core.ids import NodeId, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.run import ReplicaLost, ReplicaReady, ReplicaStarting, ReplicaStopped
from rolecall.core.membership import NO_PROCESS, STANDBY_ROLE, Actual, ReplicaState, hybrid_partner
from rolecall.core.rundir import RunDir, registration_secret
from rolecall.rl_runtime.cluster.actor_operations import ActorOperations
from rolecall.rl_runtime.cluster.reconcile import Incarnation, Promote, Start
from rolecall.rl_runtime.device import num_gpus
from rolecall.rl_runtime.processes import RunProcess, former_ranks, is_alive, kill_process, wait_gone
from rolecall.rl_runtime.protocol.membership import GONE
from rolecall.rl_runtime.protocol.spawn import actor_name, make_spawn, start_seconds

logger = logging.getLogger(__name__)
T = TypeVar("T")

THREADS = 32
ENGINES_AT_ONCE = 3
"""Engines that start at the same time; each uses a core for about 8 s. Measured on two cores, beside two trainers: all
replicas ready after 30 s with three at once, 30 and 37 s with two, where the third start leaves a core idle.
"""
WORKING = frozenset({ReplicaState.READY, ReplicaState.SERVING})
ENGINE_ROLES = frozenset({"rollout", STANDBY_ROLE})
KILL_SECONDS = 5.0
POLL_SECONDS = 0.02
DRAIN_SECONDS = 3.0
"""Time for the controller to take the last tokens of a live rollout that is replaced, and to fence it."""
PROMOTE_SECONDS = 10.0
JOURNAL_RETRY_SECONDS = 1.0


class Operations:
    """Performs instructions. `note` receives progress messages from worker threads."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        journal: Journal,
        actors: ActorOperations,
        clock: Clock,
        note: Callable[[str], None],
        device: DeviceName = "cpu",
        gpus: Mapping[NodeId, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """`gpus`: of each node."""
        self._device, self._gpus = device, gpus
        self._run, self._job, self._journal, self._actors = run, job, journal, actors
        self._clock, self._note = clock, note
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="operation")
        self._busy: Counter[Incarnation] = Counter()  # the same incarnation may be started and ended concurrently
        self._lock = threading.Lock()
        self._engines = threading.Semaphore(ENGINES_AT_ONCE)
        self._closed = threading.Event()

    def busy(self) -> frozenset[Incarnation]:
        with self._lock:
            return frozenset(+self._busy)

    def close(self) -> None:
        """Accepts no new operations; running ones end with the processes they wait for."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def drain(self, seconds: float) -> bool:
        """Waits until no operation is running; False if some still are after `seconds`."""
        deadline = self._clock.monotonic() + seconds
        while self.busy():
            if self._clock.monotonic() > deadline:
                return False
            self._clock.sleep(POLL_SECONDS)
        return True

    # Short operations run in the caller's thread.

    def lose(self, record: Actual, because: str) -> None:
        """Records a death once and lets Ray forget the actor."""
        if self._journal.set_actual(replace(record, state=ReplicaState.LOST, because=because), unless=GONE):
            self._event(ReplicaLost, replace(record, because=because), "lost")
            self._note(f"{record.replica}#{record.incarnation} is lost: {because}")
        if record.actor:
            self._actors.forget(record.actor)

    def stopped(self, record: Actual, because: str) -> None:
        """Waits for the journal, until `close`."""
        stopped = replace(record, state=ReplicaState.STOPPED, because=because)
        if self._patiently(lambda: self._journal.set_actual(stopped, unless=GONE)):
            self._patiently(lambda: self._event(ReplicaStopped, stopped, "stopped"))

    # Long operations each run in a thread of the pool.

    def start(self, what: Start, *, refusal: str) -> None:
        """`refusal`: why its node cannot take it; empty if it can."""
        record = Actual(
            replica=what.replica,
            incarnation=what.incarnation,
            node=what.node,
            state=ReplicaState.STARTING,
            actor=actor_name(self._run.run_id, what.replica, what.incarnation),
            because=what.because,
        )
        self._begin(record)
        if refusal:
            self.lose(record, f"{NO_PROCESS}{refusal}")
            return
        self._submit([(what.replica, what.incarnation)], lambda: self._start(record))

    def _start(self, record: Actual) -> None:
        # Ray gives a GPU to one actor only, so that it gives a hybrid none, and its two actors take the same ones.
        shares = hybrid_partner(record.replica, self._job.num_hybrids) is not None
        number = num_gpus(record.replica, self._device, self._job.runtime) if shares else 0
        spawn = make_spawn(
            self._run,
            record.replica,
            record.incarnation,
            record.node,
            database_url=self._journal.store.url,
            device=self._device,
            gpus=tuple(self._gpus.get(record.node, ())[:number]),
        )
        is_engine = split_replica(record.replica)[0] in ENGINE_ROLES
        if is_engine:
            self._engines.acquire()
        try:
            # It may have waited: then it may have been fenced, and its place may be taken.
            if self._closed.is_set() or self._patiently(lambda: self._is_gone(record)):
                return
            # They end with their first rank; one that does not would keep its device.
            self._end_processes(former_ranks(self._run.path, record.replica, record.incarnation))
            born = self._actors.start(spawn, start_seconds(self._job))
        finally:
            if is_engine:
                self._engines.release()
        started = replace(record, pid=born.pid, start_ticks=born.start_ticks)
        self._patiently(lambda: self._admit(started, from_standby=""))

    def promote(self, what: Promote, standby: Actual) -> None:
        record = replace(
            standby,
            replica=what.replica,
            incarnation=what.incarnation,
            state=ReplicaState.STARTING,
            because=what.because,
        )
        self._begin(record)
        both = [(what.replica, what.incarnation), (standby.replica, standby.incarnation)]
        self._submit(both, lambda: self._promote(record, standby))

    def _promote(self, record: Actual, standby: Actual) -> None:
        secret = registration_secret(self._run.token(), record.replica, 0, record.incarnation)
        try:
            self._actors.promote(standby.actor, record.replica, record.incarnation, secret, PROMOTE_SECONDS)
        except Exception:
            # Deliberate, and raised again: a standby whose promotion failed has no known identity.
            self._patiently(lambda: self.lose(standby, f"it could not become {record.replica}"))
            self._kill(standby)
            raise
        self.stopped(standby, f"it became {record.replica}#{record.incarnation}")
        self._patiently(lambda: self._admit(record, from_standby=standby.replica))

    def end(self, record: Actual, because: str, *, wanted: bool) -> None:
        """Fences an incarnation, ends its process and confirms the exit. `wanted`: without replacement."""
        key = (record.replica, record.incarnation)
        self._submit([key], lambda: self._end(record, because, wanted))

    def _end(self, record: Actual, because: str, wanted: bool) -> None:
        if not wanted and split_replica(record.replica)[0] == "rollout":
            self._patiently(lambda: self._let_drain(record))
        if not wanted:
            # Fence first: no message of it is accepted any more.
            self._patiently(lambda: self.lose(record, because))
        self._kill(record)
        if wanted:
            self.stopped(record, because)

    def _let_drain(self, record: Actual) -> None:
        """Waits until the controller has taken the tokens of a live rollout and fenced it, or until the time is up.

        Without a controller, as when the whole job is restarted, nobody takes them.
        """
        deadline = self._clock.monotonic() + DRAIN_SECONDS
        while self._clock.monotonic() < deadline:
            standing = self._journal.actual().get((record.replica, record.incarnation))
            if standing is None or standing.state in GONE or not is_alive(record.pid, record.start_ticks):
                return
            if not any(a.state in WORKING for r, a in self._journal.current().items() if r.startswith("controller/")):
                return
            self._clock.sleep(POLL_SECONDS)

    def _submit(self, keys: list[Incarnation], operation: Callable[[], None]) -> None:
        with self._lock:
            self._busy.update(keys)

        def run() -> None:
            try:
                operation()
            except Exception as e:  # noqa: BLE001
                # Any failure marks only this incarnation LOST, with the reason; recovery decides again.
                if not self._closed.is_set():  # processes still starting at the end of a run are ended
                    logger.warning("%s#%d: %s", *keys[0], e)
                self._fail(keys[0], f"{type(e).__name__}: {e}")
            finally:
                self._done(keys)

        try:
            future = self._pool.submit(run)
        except RuntimeError:  # the pool is closed: the run is ending
            self._done(keys)
            return
        future.add_done_callback(lambda f: self._done(keys) if f.cancelled() else None)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeats a call, which may be repeated, until the journal can be used or the run ends."""
        while True:
            try:
                return call()
            except JournalUnavailable:
                if self._closed.wait(JOURNAL_RETRY_SECONDS):
                    raise

    def _done(self, keys: list[Incarnation]) -> None:
        with self._lock:
            self._busy.subtract(keys)

    def _fail(self, key: Incarnation, because: str) -> None:
        if self._closed.is_set():
            return
        record = self._patiently(self._journal.actual).get(key)
        if record is None:
            return
        self._patiently(lambda: self.lose(record, because))
        try:
            self._kill(record)
        except ActuatorError as e:
            logger.error("%s", e)  # the process may outlive its LOST record: reconcile retries

    def _kill(self, record: Actual) -> None:
        if record.pid:
            self._end_processes([RunProcess(pid=record.pid, start_ticks=record.start_ticks, name=record.replica)])
        if record.actor:
            self._actors.forget(record.actor)

    def _end_processes(self, processes: list[RunProcess]) -> None:
        """Raises ActuatorError: one is not gone after SIGKILL."""
        for process in processes:
            kill_process(process.pid, process.start_ticks, signal.SIGKILL)
        for left in wait_gone(processes, KILL_SECONDS, self._clock):
            raise ActuatorError(f"{left.name}: process {left.pid} is not gone {KILL_SECONDS} s after SIGKILL")

    def _begin(self, record: Actual) -> None:
        # Event first: without a record, this is tried again at the next iteration.
        self._event(ReplicaStarting, record, "starting")
        self._journal.set_actual(record)

    def _is_gone(self, record: Actual) -> bool:
        standing = self._journal.actual([record.replica]).get((record.replica, record.incarnation))
        return standing is None or standing.state in GONE

    def _admit(self, record: Actual, from_standby: str) -> None:
        """Marks the replica READY unless it was fenced during the start; recovery then wants another incarnation."""
        if self._is_gone(record):
            self._kill(record)
            return
        # Event first, so that events about a READY replica follow it in the journal.
        process = {"pid": record.pid, "start_ticks": record.start_ticks}
        self._event(ReplicaReady, record, "ready", **process, from_standby=from_standby)
        ready = replace(record, state=ReplicaState.READY)
        # A controller works from its construction on, so it may be SERVING by now.
        if not self._journal.set_actual(
            ready, unless=(*GONE, ReplicaState.SERVING)
        ) and not self._journal.change_actual(record.replica, record.incarnation, unless=GONE, **process):
            self._kill(record)
            return
        how = f" (was {from_standby})" if from_standby else ""
        self._note(f"{record.replica}#{record.incarnation} is ready on {record.node}, pid {record.pid}{how}")

    def _event(self, payload: Callable[..., Payload], record: Actual, key: str, **more: Any) -> None:
        """Writes an event about `record`, once."""
        desired = self._journal.desired().get(record.replica)
        same = desired is not None and desired.incarnation == record.incarnation
        self._journal.append(
            payload(
                replica=record.replica,
                incarnation=record.incarnation,
                node=record.node,
                because=record.because,
                **more,
            ),
            incident_id=desired.incident_id if desired is not None and same else None,
            key=f"{key}:{record.replica}#{record.incarnation}",
        )
