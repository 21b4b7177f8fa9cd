"""The supervisor: starts a run, keeps the actual state at the desired one, and cleans up everything at the end.

`tick()` is one iteration of the control loop: it reads the journal and pidfds, calls the pure `reconcile`, and performs
the result. Slow work (starting an actor, promoting, ending a process) runs in a thread (`operations.py`); its
incarnation counts as busy until then, so an iteration never blocks. The supervisor decides nothing about health: it
records the deaths that it detects and brings about the desired state.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import (
    ActuatorError,
    ConfigError,
    DeadlineExceeded,
    JournalError,
    JournalUnavailable,
    RolecallError,
)
from rolecall.core.ids import NodeId, ReplicaId, process_start_ticks, split_replica
from rolecall.core.journal.database import redacted
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import ComponentRestarted, RunStarted
from rolecall.core.membership import STANDBY_ROLES, Actual, Desired, ReplicaState, is_standby
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted
from rolecall.rl_runtime.cluster.actor_operations import ActorOperations, RayActorOperations, runtime_classes
from rolecall.rl_runtime.cluster.gpus import gpus_of_nodes, num_needed
from rolecall.rl_runtime.cluster.local_cluster import Cluster
from rolecall.rl_runtime.cluster.operations import Operations
from rolecall.rl_runtime.cluster.reconcile import (
    LIVING,
    ClusterState,
    Incarnation,
    KillSuperseded,
    MarkLost,
    Promote,
    ReconcileStep,
    RefillStandby,
    Start,
    StopReplica,
    place,
    placed_again,
    reconcile,
)
from rolecall.rl_runtime.device import Hardware, device_of, found_hardware
from rolecall.rl_runtime.memory_estimate import host_bytes_by_role, needs
from rolecall.rl_runtime.processes import (
    ProcessWatch,
    find_processes,
    kill_process,
    record_process,
    start_process,
    stop_run,
)
from rolecall.rl_runtime.protocol.membership import GONE
from rolecall.rl_runtime.protocol.spawn import start_seconds
from rolecall.rl_runtime.tasks.check import model_size

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
RENEW_SECONDS_MAX = 5.0
PREPARE_SECONDS = 120.0
"""Least time for the model folder to be written; `runtime.startup_timeout_seconds` gives more."""
FINISH_SECONDS = 5.0
"""Time for the controller to shut down cleanly when the run is stopped."""

NEED_MODEL = frozenset({"trainer", "rollout", *STANDBY_ROLES})
"""Roles that wait for the model folder; standbys also wait until all others are ready."""

DRAIN_SECONDS = 10.0

RESTARTS_MAX = 5
"""Restarts of one node's agent within `RESTART_WINDOW_SECONDS`; a further one waits until the window has moved on."""
RESTART_WINDOW_SECONDS = 60.0
AGENT_STOP_SECONDS = 3.0

JOURNAL_WAIT_SECONDS = 120.0
"""How long the journal may be unavailable (its server restarts, its disk is full) before the run is stopped."""
JOURNAL_RETRY_SECONDS = 1.0

Progress = Callable[[str], None]
T = TypeVar("T")


def through_outages(call: Callable[[], T], clock: Clock, progress: Progress) -> T:
    """Repeats a call that may be repeated, as one that rereads the state, until the journal is available.

    Raises:
        JournalUnavailable: it is not for `JOURNAL_WAIT_SECONDS`.
    """
    began = clock.monotonic()
    while True:
        try:
            return call()
        except JournalUnavailable as error:
            if clock.monotonic() - began > JOURNAL_WAIT_SECONDS:
                raise
            progress(str(error))
            clock.sleep(JOURNAL_RETRY_SECONDS)


@dataclass
class _SupervisedAgent:
    process: subprocess.Popen[bytes] | None = None
    restarted_at: list[float] = field(default_factory=list)
    complained: bool = False


class AgentSupervisor:
    """Keeps one agent per node running; calls `restarted(node, because)` for every restart."""

    def __init__(
        self, run: RunDir, nodes: Sequence[NodeId], clock: Clock, restarted: Callable[[NodeId, str], None]
    ) -> None:
        self._run, self._clock, self._restarted = run, clock, restarted
        self._kept = {node: _SupervisedAgent() for node in nodes}

    def start(self) -> None:
        for node, kept in self._kept.items():
            kept.process = self._launch(node)

    def tick(self) -> None:
        """Restarts agents that have ended, as soon as that is possible."""
        for node, kept in self._kept.items():
            code = kept.process.poll() if kept.process is not None else None
            if code is None:
                continue
            now = self._clock.monotonic()
            kept.restarted_at = [t for t in kept.restarted_at if now - t < RESTART_WINDOW_SECONDS]
            if len(kept.restarted_at) >= RESTARTS_MAX:
                if not kept.complained:
                    logger.error("the agent of %s ended %d times in a minute: restarts pause", node, RESTARTS_MAX + 1)
                kept.complained = True
                continue
            try:
                kept.process = self._launch(node)
            except OSError as e:  # a full disk, or no further process: tried again at the next tick
                if not kept.complained:
                    logger.error("the agent of %s cannot be started again: %s", node, e)
                kept.complained = True
                continue
            kept.restarted_at.append(now)
            kept.complained = False
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._restarted(node, f"the agent of {node} had ended ({how})")

    def stop(self) -> None:
        """Ends them all. Idempotent."""
        running = [k.process for k in self._kept.values() if k.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(AGENT_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(AGENT_STOP_SECONDS)
        for kept in self._kept.values():
            kept.process = None

    def _launch(self, node: NodeId) -> subprocess.Popen[bytes]:
        folder = self._run.node_dir(node)
        folder.mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        argv = [sys.executable, "-m", "rolecall.agent", "--ranks-only", "--node", node, "--data-dir", str(folder)]
        argv += ["--token-file", str(self._run.token_path)]
        argv += ["--parent-pid", str(me), "--parent-start", str(process_start_ticks(me))]
        name = f"agent-{node}"
        return start_process(self._run, name, argv, self._run.logs / f"{name}.log", node=node)[0]


class Supervisor:
    """One per run, in the process that started it. `start`, then `tick` each 100 ms, then `stop`, from one thread."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        clock: Clock | None = None,
        *,
        classes: Callable[[], Mapping[str, Any]] = runtime_classes,
        actors: ActorOperations | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        """`classes`: role -> actor class, for tests with trivial actors; `actors` replaces Ray in tests without it;
        `hardware`: replaces what this machine has.

        Raises:
            ConfigError: this machine lacks the devices that the job computes on.
        """
        hardware = hardware or found_hardware()
        gpus, device = gpus_of_nodes(job, hardware), device_of(job.runtime.device, hardware)
        self.run, self.job, self.clock = run, job, clock or SystemClock()
        self.nodes = [NodeId(f"node-{i}") for i in range(job.runtime.nodes)]
        self.journal = Journal(run.database_url, clock=self.clock)
        self.cluster = Cluster(run, self.nodes, self.clock, gpus)
        self.actors = actors or RayActorOperations(job, classes)
        self.agents = AgentSupervisor(run, self.nodes, self.clock, self._agent_restarted)
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._device = device
        self._operations = Operations(run, job, self.journal, self.actors, self.clock, self._notes.put, device, gpus)
        self._watch = ProcessWatch()
        self._progress: Progress = lambda _: None
        self._fenced_nodes: set[NodeId] = set()
        self._renewed_at = 0.0
        self._stopped_at: dict[Incarnation, float] = {}  # used-up standbys: since when, monotonic seconds
        self._held = NEED_MODEL
        self._stopped = False

    def start(self, progress: Progress | None = None, *, again: bool = False) -> None:
        """Starts the run; returns when every replica except the standbys is ready. `again`: a run whose processes are
        gone continues from its journal and its newest checkpoint.

        Raises:
            NotEnoughNodes: before anything is started.
            ConfigError: the model cannot be used.
            ActuatorError: a process did not start; names it and the reason.
            DeadlineExceeded: names the replicas that were not ready in time.
        """
        self._progress = progress or self._progress
        if again:
            self._continue_run()
        else:
            self._write_run(place(self.job))
        replicas = [r for r, wanted in self.journal.desired().items() if not is_standby(r) and not wanted.lent]
        argv = [sys.executable, "-m", "rolecall.rl_runtime.trainer.model", str(self.run.path)]
        preparing, _ = start_process(self.run, "prepare", argv, self.run.logs / "prepare.log", OMP_NUM_THREADS="1")
        self._progress(f"starting {len(self.nodes)} nodes: one agent and one raylet each")
        self.agents.start()
        self.cluster.start()
        self.cluster.connect()
        self._progress("Ray is up; starting controller and rewards while the model is written")
        self._finish_preparing(preparing)
        self._held = frozenset(STANDBY_ROLES)
        self._progress("the model is written; starting trainers and engines")
        self._wait_until_ready(replicas)
        self._held = frozenset()

    def _write_run(self, placed: Mapping[ReplicaId, NodeId]) -> None:
        self.run.write(
            {
                "run_id": self.run.run_id,
                "created_at": self.clock.wall(),
                "seed": self.job.seed,
                "config": self.job.model_dump(mode="json"),
                "config_digest": self.job.digest(),
                "database_url": redacted(self.run.database_url),
                "supervisor": self._recorded_self(),
                "nodes": list(self.nodes),
                "injection_allowed": self.job.injection_allowed,
            }
        )
        roles = {**self.job.roles.counts(), **self.job.runtime.num_standbys()}
        started = RunStarted(
            seed=self.job.seed,
            config_digest=self.job.digest(),
            roles=roles,
            nodes=tuple(self.nodes),
            num_steps=self.job.num_steps,
            ranks=self.job.runtime.ranks(),
            mode=self.job.runtime.mode,
            gpus={node: len(names) for node, names in self.cluster.gpus.items()},
            memory_bytes=self._estimated_bytes(),
        )
        self.journal.append(started, key="run-started")
        for replica, node in placed.items():
            first = Desired(replica=replica, incarnation=1, node=node, prefer_standby=False, because="the run starts")
            self.journal.set_desired(first)

    def _recorded_self(self) -> dict[str, int]:
        me = os.getpid()
        record_process(self.run.path, "supervisor", me)
        return {"pid": me, "start_ticks": process_start_ticks(me) or 0}

    def _continue_run(self) -> None:
        self.run.write({**self.run.read(), "supervisor": self._recorded_self()})
        for node in self.nodes:  # an agent would take the former one, which is gone, for a lost node
            (self.run.node_dir(node) / "raylet.json").unlink(missing_ok=True)
        because = "the run is started again"
        self.journal.append(ComponentRestarted(what="supervisor", node="", because=because))
        last = self.journal.desired()
        for replica, node in placed_again(place(self.job), last, self.nodes, quarantined_nodes(self.journal)).items():
            number = last[replica].incarnation if replica in last else 0  # cut off before it was wanted
            anew = Desired(replica=replica, incarnation=number + 1, node=node, prefer_standby=False, because=because)
            self.journal.set_desired(anew, expect_incarnation=number)

    def _estimated_bytes(self) -> dict[str, int]:
        """Host memory of a replica of each role at its peak; empty where the model's files do not tell."""
        try:
            return host_bytes_by_role(needs(self.job, model_size(self.job), self._device))
        except (ConfigError, OSError) as e:
            logger.warning("no estimate of memory: %s", e)
            return {}

    def _finish_preparing(self, process: subprocess.Popen[bytes]) -> None:
        seconds = max(PREPARE_SECONDS, self.job.runtime.startup_timeout_seconds)
        deadline = self.clock.monotonic() + seconds
        while (code := process.poll()) is None:
            through_outages(self.tick, self.clock, self._progress)
            if self.clock.monotonic() > deadline:
                process.kill()
                what = "the model folder to be written (see runtime.startup_timeout_seconds)"
                raise DeadlineExceeded(waited_for=what, seconds=seconds)
            self.clock.sleep(TICK_SECONDS)
        if code:
            output = (self.run.logs / "prepare.log").read_text(errors="replace").strip()[-1500:]
            if code == 2:
                raise ConfigError([output])
            raise ActuatorError(f"writing the model folder failed with code {code}: {output}")

    def _wait_until_ready(self, replicas: list[ReplicaId]) -> None:
        seconds = start_seconds(self.job)
        deadline = self.clock.monotonic() + seconds
        shown = -1
        while True:
            desired, current = through_outages(self._ticked, self.clock, self._progress)
            newest = {r: a for r, a in current.items() if r in desired and a.incarnation >= desired[r].incarnation}
            for replica in replicas:
                if replica in newest and newest[replica].state in GONE:
                    raise ActuatorError(f"{replica} did not start: {newest[replica].because}")
            awaited = [r for r in replicas if r in desired and not desired[r].lent]
            missing = [r for r in awaited if r not in newest or newest[r].state is ReplicaState.STARTING]
            if not missing:
                return
            if len(missing) != shown:
                shown = len(missing)
                self._progress(f"{len(replicas) - shown} of {len(replicas)} replicas are ready")
            if self.clock.monotonic() > deadline:
                what = f"{', '.join(missing)} to start (see detector.first_unit_seconds)"
                raise DeadlineExceeded(waited_for=what, seconds=seconds)
            self.clock.sleep(TICK_SECONDS)

    def _ticked(self) -> tuple[dict[ReplicaId, Desired], dict[ReplicaId, Actual]]:
        self.tick()
        return self.journal.desired(), self.journal.current()

    def tick(self) -> None:
        """One iteration; never waits for another process.

        Raises:
            ActuatorError: Ray's GCS is gone. This is fatal: no actor can be reached any more.
        """
        self._print_notes()
        if self.cluster.gcs is not None and not self.cluster.gcs_alive:
            raise ActuatorError("Ray's head (GCS) has ended: the run cannot continue without it")
        self.agents.tick()
        now = self.clock.monotonic()
        # Before the journal is read: while it cannot be, the processes live on.
        if now - self._renewed_at >= min(RENEW_SECONDS_MAX, self.job.runtime.lease_seconds / 4):
            self._renewed_at = now
            self.actors.renew(self.job.runtime.lease_seconds)
        fleet = self._observe()
        for instruction in reconcile(fleet):
            self._perform(instruction, fleet)

    def _observe(self) -> ClusterState:
        # Before the records: an operation that ends in between is busy until the next iteration.
        busy = self._operations.busy()
        actual = self.journal.actual()
        dead_nodes = set(self.cluster.dead_nodes())
        self._fence(dead_nodes - self._fenced_nodes, actual)
        alive = {
            key
            for key, a in actual.items()
            if a.pid and a.state is not ReplicaState.STOPPED and self._watch.alive(a.pid, a.start_ticks)
        }
        now = self.clock.monotonic()
        stopped = [key for key, a in actual.items() if is_standby(a.replica) and a.state is ReplicaState.STOPPED]
        self._stopped_at = {key: self._stopped_at.get(key, now) for key in stopped}
        return ClusterState(
            desired=self.journal.desired(),
            actual=actual,
            alive=alive,
            busy=busy,
            nodes=[n for n in self.nodes if n not in dead_nodes],
            quarantined=quarantined_nodes(self.journal),
            too_small={role: self._too_small(role) for role in STANDBY_ROLES},
            stopped_seconds={key: now - at for key, at in self._stopped_at.items()},
        )

    def _too_small(self, role: str) -> list[NodeId]:
        """Nodes with fewer GPUs than a standby of this role has ranks."""
        gpus, ranks = self.cluster.gpus, self.job.runtime.computing_ranks()[role]
        return [n for n in self.nodes if len(gpus.get(n, ())) < ranks] if gpus else []

    def _fence(self, nodes: set[NodeId], actual: Mapping[Incarnation, Actual]) -> None:
        """Ends workers of dead raylets, which outlive them briefly, so that no two processes of one incarnation run."""
        for record in actual.values():
            if record.node in nodes and record.state in LIVING and record.pid:
                kill_process(record.pid, record.start_ticks, signal.SIGKILL)
        for node in sorted(nodes):
            self._progress(f"{node}: its raylet has ended, and with it every process there")
        self._fenced_nodes |= nodes

    def _perform(self, instruction: ReconcileStep, fleet: ClusterState) -> None:
        record = fleet.actual.get((instruction.replica, instruction.incarnation))
        match instruction:
            case MarkLost():
                assert record is not None, "only what is written can be lost"
                because = instruction.because
                if record.node in self._fenced_nodes:
                    because += f"; the raylet of {record.node} has ended"
                self._operations.lose(record, because)
            case KillSuperseded() | StopReplica():
                assert record is not None, "only what is written can be ended"
                self._operations.end(record, instruction.because, wanted=isinstance(instruction, StopReplica))
            case Start():
                if split_replica(instruction.replica)[0] in self._held:
                    return
                self._operations.start(instruction, refusal=self._refusal(instruction, fleet))
            case Promote():
                standby = fleet.actual[(instruction.standby, instruction.standby_incarnation)]
                self._operations.promote(instruction, standby)
            case RefillStandby():
                wanted = Desired(
                    replica=instruction.replica,
                    incarnation=instruction.incarnation,
                    node=instruction.node,
                    prefer_standby=False,
                    because=instruction.because,
                )
                self.journal.set_desired(wanted, expect_incarnation=instruction.incarnation - 1)

    def _refusal(self, what: Start, fleet: ClusterState) -> str:
        if what.node in self._fenced_nodes:
            return f"{what.node} has no raylet any more"
        if not self.cluster.gpus:
            return ""
        others = [
            a.replica
            for a in fleet.actual.values()
            if a.node == what.node and a.state in LIVING and a.replica != what.replica
        ]
        used, there = num_needed(others, self.job), len(self.cluster.gpus.get(what.node, ()))
        needed = num_needed([*others, what.replica], self.job) - used
        if used + needed <= there:
            return ""
        return f"{what.node} has {counted(there, 'GPU')}: {used} used, {needed} needed"

    def _agent_restarted(self, node: NodeId, because: str) -> None:
        self.journal.append(ComponentRestarted(what="agent", node=node, because=because))
        self._progress(f"{node}: agent restarted, {because}")

    def _print_notes(self) -> None:
        while True:
            try:
                self._progress(self._notes.get_nowait())
            except Empty:
                return

    def stop(self, because: str = "the run is stopped") -> None:
        """Ends everything that was started and returns when it is gone. Idempotent; safe after a failed start."""
        if self._stopped:
            return
        self._stopped = True
        self._operations.close()
        records = self._living()
        for record in sorted(records, key=lambda a: not a.replica.startswith("controller/")):
            # The controller closes its ledger; the others only report an intended exit to their agents.
            seconds = FINISH_SECONDS if record.replica.startswith("controller/") else 1.0
            if record.actor and self._watch.alive(record.pid, record.start_ticks):
                try:
                    self.actors.stop(record.actor, seconds)
                except RolecallError as e:
                    logger.warning("%s did not finish in order: %s", record.replica, e)
        # Actors that are still starting have no process record yet; they are found by name and marker.
        for process in find_processes(self.run.path, exclude=(os.getpid(),)):
            if process.name.startswith("ray::") or process.pid in {r.pid for r in records}:
                kill_process(process.pid, process.start_ticks, signal.SIGKILL)
        # Their calls must end before this process disconnects from Ray: a later call would end this process.
        if not self._operations.drain(DRAIN_SECONDS):
            logger.error("operations are still under way after %.0f s", DRAIN_SECONDS)
        self.agents.stop()  # first: to them, a raylet that ends is a lost node, also when the run is continued
        self.cluster.stop()
        stop_run(self.run.path, clock=self.clock, term_seconds=1.0)
        try:
            for record in records:
                self._operations.stopped(record, because)
        except JournalError as e:
            logger.error("could not record that everything was stopped: %s", e)
        self._watch.close()
        self._print_notes()
        self.journal.close()

    def _living(self) -> list[Actual]:
        try:
            return [a for a in self.journal.actual().values() if a.state in LIVING]
        except JournalError as e:
            # No grace period, but complete: every process of the run carries its marker.
            logger.error("ending everything without its records: %s", e)
            return []
