"""The control loop with real processes but without Ray: a fake starts `sleep` where Ray would start actors."""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.errors import ActuatorError, DeadlineExceeded, JournalUnavailable, NotEnoughNodes
from rolecall.core.ids import NodeId, ReplicaId, process_start_ticks
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.store import Store
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir, registration_secret
from rolecall.rl_runtime.cluster import operations
from rolecall.rl_runtime.cluster import reconcile as decision
from rolecall.rl_runtime.cluster import supervisor as supervisor_module
from rolecall.rl_runtime.cluster.actor_operations import ActorProcess
from rolecall.rl_runtime.cluster.supervisor import AgentSupervisor, Supervisor
from rolecall.rl_runtime.controller.journal_writer import RunRecorder
from rolecall.rl_runtime.device import Hardware
from rolecall.rl_runtime.processes import rank_name, record_process, run_environment
from rolecall.rl_runtime.protocol.spawn import ActorSpec, actor_name
from tests.support import PATIENCE_SECONDS, eventually

S = ReplicaState
T = TypeVar("T")


class SleepActors:
    """Starts a `sleep` per actor and notes what it was reported. `refuse`: replicas whose start or promotion fails."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.specs: list[ActorSpec] = []
        self.promoted: list[tuple[str, str, int, str]] = []
        self.renewals = 0
        self.refuse: dict[str, Exception] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.starting = 0
        self.starting_most = 0
        self._lock = threading.Lock()
        self._ended = False

    def start(self, spawn: ActorSpec, seconds: float) -> ActorProcess:
        with self._lock:
            self.specs.append(spawn)
            self.starting += 1
            self.starting_most = max(self.starting, self.starting_most)
        try:
            assert self.hold.wait(PATIENCE_SECONDS)
            if spawn.replica in self.refuse:
                raise self.refuse[spawn.replica]
            env = run_environment(Path(spawn.run_dir), spawn.node)
            process = subprocess.Popen(["sleep", "600"], env=env)
            ticks = process_start_ticks(process.pid)
            assert ticks is not None
            with self._lock:
                self.processes[actor_name(spawn.run_id, spawn.replica, spawn.incarnation)] = process
                if self._ended:
                    self._kill()
            return ActorProcess(pid=process.pid, start_ticks=ticks)
        finally:
            with self._lock:
                self.starting -= 1

    def promote(self, actor: str, replica: ReplicaId, incarnation: int, secret: str, seconds: float) -> None:
        if replica in self.refuse:
            raise self.refuse[replica]
        self.promoted.append((actor, replica, incarnation, secret))

    def renew(self, lease_seconds: float) -> None:
        self.renewals += 1

    def stop(self, actor: str, seconds: float) -> None:
        pass

    def forget(self, actor: str) -> None:
        pass

    def end(self) -> None:
        self.hold.set()
        with self._lock:
            self._ended = True  # a start that was held may still be under way
            self._kill()

    def _kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class JournalOutage:
    """From `start` to `end`, the journal can be neither read nor written."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused_in_threads = 0
        self._is_on, self._writes_left = False, 0
        read, write = store.read, store.write
        monkeypatch.setattr(store, "read", lambda: self._through(read, 0))
        monkeypatch.setattr(store, "write", lambda: self._through(write, 1))

    def _through(self, method: Callable[[], T], num_writes: int) -> T:
        if self._is_on:
            if not self._writes_left:
                self.refused_in_threads += threading.current_thread() is not threading.main_thread()
                raise JournalUnavailable(where="journal.db", reason="disk is full", hint="free some space")
            self._writes_left -= num_writes
        return method()

    def start(self, after_writes: int = 0) -> None:
        self._writes_left, self._is_on = after_writes, True

    def end(self) -> None:
        self._is_on = False


class Rig:
    def __init__(self, root: Path, hardware: Hardware = Hardware(gpus=(), is_cuda_build=False), **runtime: int) -> None:
        self.run: RunDir = create_run_dir(root, "r")
        self.actors = SleepActors()
        job = parse_job({"runtime": runtime})
        self.supervisor = Supervisor(self.run, job, actors=self.actors, hardware=hardware)
        self.supervisor._held = frozenset()
        self.journal = self.supervisor.journal

    def want(self, replica: str, incarnation: int = 1, node: str = "node-1", *, prefer_standby: bool = True) -> None:
        who = ReplicaId(replica)
        record = Desired(
            replica=who, incarnation=incarnation, node=NodeId(node), prefer_standby=prefer_standby, because="a test"
        )
        assert self.journal.set_desired(record)

    def actual(self, replica: str, incarnation: int = 1) -> Actual | None:
        return self.journal.actual().get((ReplicaId(replica), incarnation))

    def until(self, replica: str, incarnation: int, state: ReplicaState) -> Actual:
        def reached() -> bool:
            self.supervisor.tick()
            record = self.actual(replica, incarnation)
            return record is not None and record.state is state

        eventually(reached, f"{replica}#{incarnation} to be {state}; is {self.actual(replica, incarnation)}")
        found = self.actual(replica, incarnation)
        assert found is not None
        return found

    def events(self, kind: EventKind) -> list[Event]:
        return self.journal.events(kinds=[kind])

    def close(self) -> None:
        self.actors.end()
        self.supervisor.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_desired_replicas_are_started_and_recorded(rig: Rig) -> None:
    rig.want("trainer/0")
    record = rig.until("trainer/0", 1, S.READY)
    assert record.pid == rig.actors.processes["r:trainer-0:1"].pid
    (ready,) = rig.events(EventKind.REPLICA_READY)
    assert ready.payload.pid == record.pid and ready.payload.from_standby == ""
    assert rig.actors.renewals >= 1


def test_processes_live_on_while_the_journal_cannot_be_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.want("trainer/0")
    rig.until("trainer/0", 1, S.READY)
    rig.supervisor.clock = clock = FakeClock(rig.supervisor.clock.monotonic())

    def full() -> None:
        raise JournalUnavailable(where="journal.db", reason="disk is full", hint="free some space")

    monkeypatch.setattr(rig.supervisor.journal, "actual", full)
    before = rig.actors.renewals
    for _ in range(3):
        clock.advance(rig.supervisor.job.runtime.lease_seconds)
        with pytest.raises(JournalUnavailable):
            rig.supervisor.tick()
    assert rig.actors.renewals == before + 3


@pytest.fixture
def outage(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> JournalOutage:
    monkeypatch.setattr(operations, "JOURNAL_RETRY_SECONDS", 0.01)
    return JournalOutage(rig.journal.store, monkeypatch)


def _start_into(outage: JournalOutage, rig: Rig) -> None:
    """The start of trainer/0 ends, or fails, while the journal is away."""
    rig.actors.hold.clear()
    rig.want("trainer/0")
    rig.until("trainer/0", 1, S.STARTING)
    outage.start()
    rig.actors.hold.set()
    eventually(lambda: outage.refused_in_threads, "the end of the start to meet the outage")
    outage.end()


def test_a_start_that_ends_while_the_journal_is_away_is_recorded_later(rig: Rig, outage: JournalOutage) -> None:
    _start_into(outage, rig)
    record = rig.until("trainer/0", 1, S.READY)
    assert record.pid == rig.actors.processes["r:trainer-0:1"].pid
    assert not rig.events(EventKind.REPLICA_LOST)


def test_a_start_that_fails_while_the_journal_is_away_keeps_its_reason(rig: Rig, outage: JournalOutage) -> None:
    rig.actors.refuse["trainer/0"] = ActuatorError("died while it started")
    _start_into(outage, rig)
    assert "died while it started" in rig.until("trainer/0", 1, S.LOST).because


def test_a_promotion_that_ends_while_the_journal_is_away_is_recorded_later(
    rig: Rig, outage: JournalOutage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.want("standby/0", node="node-6")
    standby = rig.until("standby/0", 1, S.READY)
    promote = rig.actors.promote

    def promote_before_the_outage(*args: Any) -> None:
        promote(*args)
        outage.start()

    monkeypatch.setattr(rig.actors, "promote", promote_before_the_outage)
    rig.want("rollout/0", 2)
    rig.supervisor.tick()
    eventually(lambda: outage.refused_in_threads, "the end of the promotion to meet the outage")
    outage.end()
    assert rig.until("rollout/0", 2, S.READY).pid == standby.pid
    used = rig.actual("standby/0")
    assert used is not None and used.state is S.STOPPED
    assert len(rig.events(EventKind.REPLICA_STOPPED)) == len(rig.actors.promoted) == 1


@pytest.mark.parametrize("num_writes", [0, 1])
def test_a_promotion_whose_beginning_cannot_be_written_begins_later(
    rig: Rig, outage: JournalOutage, num_writes: int
) -> None:
    rig.want("standby/0", node="node-6")
    standby = rig.until("standby/0", 1, S.READY)
    rig.supervisor.tick()
    rig.want("rollout/0", 2)
    outage.start(after_writes=num_writes)
    with pytest.raises(JournalUnavailable):
        rig.supervisor.tick()
    outage.end()
    assert rig.until("rollout/0", 2, S.READY).pid == standby.pid
    assert len(rig.events(EventKind.REPLICA_STARTING)) == 2


def test_an_end_that_is_wanted_is_recorded_as_such_when_the_journal_is_back(
    rig: Rig, outage: JournalOutage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.want("reward/0")
    rig.until("reward/0", 1, S.READY)
    monkeypatch.setattr(rig.actors, "forget", lambda _: outage.start())
    rig.journal.remove_desired(ReplicaId("reward/0"))
    rig.supervisor.tick()
    eventually(lambda: outage.refused_in_threads, "the end to meet the outage")
    outage.end()
    rig.until("reward/0", 1, S.STOPPED)
    eventually(lambda: rig.events(EventKind.REPLICA_STOPPED), "the event")


def test_a_death_is_recorded_once_and_nothing_is_replaced(rig: Rig) -> None:
    rig.want("rollout/0")
    rig.want("rollout/1", node="node-2")
    dying, staying = rig.until("rollout/0", 1, S.READY), rig.until("rollout/1", 1, S.READY)
    os.kill(dying.pid, signal.SIGKILL)
    lost = rig.until("rollout/0", 1, S.LOST)
    assert f"pid {dying.pid}" in lost.because
    for _ in range(5):
        rig.supervisor.tick()
    assert len(rig.events(EventKind.REPLICA_LOST)) == 1
    assert rig.actual("rollout/0", 2) is None
    assert rig.actual("rollout/1") == staying


def test_a_replacement_starts_only_when_the_old_process_is_gone(rig: Rig) -> None:
    rig.want("trainer/0")
    old = rig.until("trainer/0", 1, S.READY)
    os.kill(old.pid, signal.SIGSTOP)
    rig.want("trainer/0", 2, "node-5")
    new = rig.until("trainer/0", 2, S.READY)
    assert rig.actors.processes["r:trainer-0:1"].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert new.pid != old.pid and new.node == "node-5"
    fenced = rig.actual("trainer/0", 1)
    assert fenced is not None and fenced.state is S.LOST and "incarnation 2 takes its place" in fenced.because


@pytest.mark.parametrize(("replica", "name"), [("rollout/0", "standby/0"), ("trainer/0", "trainer-standby/0")])
def test_a_standby_is_promoted_with_its_process_and_refilled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, replica: str, name: str
) -> None:
    monkeypatch.setattr(decision, "REFILL_SECONDS", 0.2)
    rig.want(replica, node="node-3")
    rig.want(name, node="node-6")
    old, standby = rig.until(replica, 1, S.READY), rig.until(name, 1, S.READY)
    os.kill(old.pid, signal.SIGKILL)
    rig.until(replica, 1, S.LOST)
    rig.want(replica, 2, "node-3")
    new = rig.until(replica, 2, S.READY)
    actor = actor_name("r", name, 1)
    assert (new.pid, new.start_ticks, new.node, new.actor) == (standby.pid, standby.start_ticks, "node-6", actor)
    assert rig.actors.promoted == [(actor, replica, 2, registration_secret(rig.run.token(), replica, 0, 2))]
    assert rig.events(EventKind.REPLICA_READY)[-1].payload.from_standby == name
    refilled = rig.until(name, 2, S.READY)
    assert refilled.node in set(rig.supervisor.nodes) - {"node-6"}
    assert rig.actors.processes[actor].poll() is None, "the promoted process was ended under its old name"
    used = rig.actual(name, 1)
    assert used is not None and used.state is S.STOPPED


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0], ids=["back", "forward"])
def test_a_clock_that_is_set_changes_nothing_of_the_pause_before_a_refill(rig: Rig, seconds: float) -> None:
    rig.supervisor.clock = clock = FakeClock()
    key = (ReplicaId("standby/0"), 1)
    used_up = Actual(replica=key[0], incarnation=1, node=NodeId("node-6"), state=S.STOPPED)
    rig.journal.set_actual(used_up)
    assert rig.supervisor._observe().stopped_seconds == {key: 0.0}
    clock.set_wall(seconds)
    clock.advance(4.0)
    assert rig.supervisor._observe().stopped_seconds == {key: 4.0}


def test_a_failed_promotion_ends_the_standby_and_is_reported(rig: Rig) -> None:
    rig.want("standby/0", node="node-6")
    standby = rig.until("standby/0", 1, S.READY)
    rig.actors.refuse["rollout/0"] = DeadlineExceeded(waited_for="it", seconds=10.0)
    rig.want("rollout/0", 2)
    lost = rig.until("rollout/0", 2, S.LOST)
    assert "timed out" in lost.because
    rig.until("standby/0", 1, S.LOST)
    assert rig.actors.processes["r:standby-0:1"].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert standby.pid == lost.pid


def test_a_start_that_fails_is_lost_with_the_reason_and_recovery_may_try_again(rig: Rig) -> None:
    rig.actors.refuse["trainer/0"] = ActuatorError("died while it started")
    rig.want("trainer/0")
    assert "died while it started" in rig.until("trainer/0", 1, S.LOST).because
    for _ in range(5):
        rig.supervisor.tick()
    assert rig.actual("trainer/0", 2) is None, "replacing is recovery's decision"
    rig.actors.refuse.clear()
    rig.want("trainer/0", 2)
    rig.until("trainer/0", 2, S.READY)


def test_a_start_that_was_overtaken_is_not_let_in(rig: Rig) -> None:
    rig.actors.hold.clear()
    rig.want("trainer/0")
    rig.until("trainer/0", 1, S.STARTING)
    rig.want("trainer/0", 2)
    rig.until("trainer/0", 1, S.LOST)
    for _ in range(5):
        rig.supervisor.tick()
    assert rig.actual("trainer/0", 2) is None, "the first start has not ended yet: two would live at once"
    rig.actors.hold.set()
    rig.until("trainer/0", 2, S.READY)
    assert rig.actors.processes["r:trainer-0:1"].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    overtaken = rig.actual("trainer/0", 1)
    assert overtaken is not None and overtaken.state is S.LOST


def test_a_controller_that_serves_before_its_start_is_known_keeps_its_state_and_gets_its_process(rig: Rig) -> None:
    """It works from its construction on. A state without a process would be taken for an abandoned start."""
    rig.actors.hold.clear()
    rig.want("controller/0")
    rig.until("controller/0", 1, S.STARTING)
    recorder = RunRecorder(rig.journal, Ledger(rig.journal.store), ReplicaId("controller/0"), 1)
    assert recorder.set_state(ReplicaId("controller/0"), 1, S.SERVING, "runs")
    rig.actors.hold.set()

    def known() -> bool:
        rig.supervisor.tick()
        record = rig.actual("controller/0")
        return record is not None and record.pid > 0

    eventually(known, "the process to be known")
    for _ in range(5):
        rig.supervisor.tick()
    record = rig.actual("controller/0")
    assert record is not None and (record.state, record.because) == (S.SERVING, "runs")
    assert record.pid == rig.actors.processes["r:controller-0:1"].pid
    assert not rig.events(EventKind.REPLICA_LOST)


def test_a_state_that_a_controller_writes_late_keeps_the_process_that_the_supervisor_wrote(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.actors.hold.clear()
    rig.want("controller/0")
    rig.until("controller/0", 1, S.STARTING)
    recorder = RunRecorder(rig.journal, Ledger(rig.journal.store), ReplicaId("controller/0"), 1)
    before = recorder.fleet()
    rig.actors.hold.set()
    pid = rig.until("controller/0", 1, S.READY).pid
    monkeypatch.setattr(recorder, "fleet", lambda: before)
    assert recorder.set_state(ReplicaId("controller/0"), 1, S.SERVING, "runs")
    record = rig.until("controller/0", 1, S.SERVING)
    assert record.pid == pid > 0


def test_engines_start_three_at_a_time_and_others_beside_them(rig: Rig) -> None:
    rig.actors.hold.clear()
    for i in range(5):
        rig.want(f"rollout/{i}", node=f"node-{i}")
    rig.supervisor.tick()
    eventually(lambda: rig.actors.starting == 3, "three engines to be starting")
    rig.want("trainer/0")
    rig.supervisor.tick()
    eventually(lambda: rig.actors.starting == 4, "a trainer to start beside them")
    rig.actors.hold.set()
    for i in range(5):
        rig.until(f"rollout/{i}", 1, S.READY)
    assert rig.actors.starting_most == 4


def test_a_start_that_was_fenced_while_it_waited_for_its_turn_is_not_made(rig: Rig) -> None:
    rig.actors.hold.clear()
    rollouts = {ReplicaId(f"rollout/{i}") for i in range(operations.ENGINES_AT_ONCE + 1)}
    for rollout in rollouts:
        rig.want(rollout, prefer_standby=False)
    rig.supervisor.tick()
    eventually(lambda: rig.actors.starting == operations.ENGINES_AT_ONCE, "the others to be starting")
    (waiting,) = rollouts - {s.replica for s in rig.actors.specs}
    rig.want(waiting, 2, prefer_standby=False)
    rig.until(waiting, 1, S.LOST)
    rig.actors.hold.set()
    rig.until(waiting, 2, S.READY)
    assert [s.incarnation for s in rig.actors.specs if s.replica == waiting] == [2]


def test_replicas_that_are_no_longer_desired_are_stopped(rig: Rig) -> None:
    rig.want("reward/0")
    record = rig.until("reward/0", 1, S.READY)
    rig.journal.remove_desired(ReplicaId("reward/0"))
    rig.until("reward/0", 1, S.STOPPED)
    assert rig.actors.processes["r:reward-0:1"].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    eventually(lambda: rig.events(EventKind.REPLICA_STOPPED), "the event")
    assert [e.payload.incarnation for e in rig.events(EventKind.REPLICA_STOPPED)] == [record.incarnation]


class SlowPreparation:
    """A process that writes the model folder until `ends_at`."""

    def __init__(self, clock: FakeClock, ends_at: float) -> None:
        self.clock, self.ends_at, self.killed = clock, ends_at, False

    def poll(self) -> int | None:
        return 0 if self.clock.monotonic() >= self.ends_at else None

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(("startup_timeout_seconds", "in_time"), [(90, False), (600, True)])
def test_a_large_model_folder_has_the_time_that_the_job_gives_a_start(
    tmp_path: Path, startup_timeout_seconds: int, in_time: bool
) -> None:
    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(60.0)

    clock, actors = Clock(), SleepActors()
    job = parse_job({"runtime": {"startup_timeout_seconds": startup_timeout_seconds}})
    supervisor = Supervisor(create_run_dir(tmp_path, "r"), job, clock, actors=actors)
    process: Any = SlowPreparation(clock, clock.monotonic() + 500)
    try:
        if in_time:
            supervisor._finish_preparing(process)
        else:
            with pytest.raises(DeadlineExceeded, match=r"120\.0 s .*runtime\.startup_timeout_seconds"):
                supervisor._finish_preparing(process)
        assert process.killed is not in_time
    finally:
        actors.end()
        supervisor.stop()


def test_too_few_nodes_starts_nothing(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "r")
    supervisor = Supervisor(run, parse_job({"runtime": {"nodes": 3}}), actors=SleepActors())
    with pytest.raises(NotEnoughNodes, match="rollout lacks 3 of 3"):
        supervisor.start()
    assert not (run.path / "processes.jsonl").exists() and not (run.path / "run.json").exists()
    supervisor.stop()


def test_a_node_without_a_free_gpu_takes_no_further_replica(tmp_path: Path) -> None:
    rig = Rig(tmp_path, hardware=Hardware(gpus=tuple("012345"), is_cuda_build=True))
    try:
        rig.want("trainer/0", node="node-1")
        rig.until("trainer/0", 1, S.READY)
        rig.want("trainer/1", node="node-1")
        assert rig.until("trainer/1", 1, S.LOST).because == "not started: node-1 has 1 GPU: 1 used, 1 needed"
        rig.want("reward/0", node="node-1")
        rig.until("reward/0", 1, S.READY)
        rig.want("trainer/0", 2, node="node-1")
        rig.until("trainer/0", 2, S.READY)
        assert {a.device for a in rig.actors.specs} == {"cuda"}
    finally:
        rig.close()


def test_a_spare_node_without_gpus_gets_no_standby(tmp_path: Path) -> None:
    rig = Rig(tmp_path, hardware=Hardware(gpus=tuple("0123456"), is_cuda_build=True), nodes=9)
    try:
        assert rig.supervisor._observe().too_small["standby"] == ["node-0", "node-8"]
    finally:
        rig.close()


def test_a_replacement_begins_when_the_ranks_of_its_former_incarnations_are_gone(rig: Rig) -> None:
    rig.want("trainer/0")
    rig.until("trainer/0", 1, S.READY)
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        orphan, promoted, another = ranks
        record_process(rig.run.path, rank_name(ReplicaId("trainer/0"), 1, 1), orphan.pid)
        record_process(rig.run.path, rank_name(ReplicaId("trainer/0"), 1, 1), promoted.pid)
        record_process(rig.run.path, rank_name(ReplicaId("rollout/0"), 2, 1), promoted.pid)
        record_process(rig.run.path, rank_name(ReplicaId("trainer/0"), 2, 1), another.pid)
        rig.want("trainer/0", 2)
        rig.until("trainer/0", 2, S.READY)
        assert orphan.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert promoted.poll() is None, "the newest record of a process says whose it is"
        assert another.poll() is None, "it is of the incarnation that starts"
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_run_that_was_cut_off_starts_the_next_incarnation_of_every_replica(rig: Rig) -> None:
    placed = decision.place(rig.supervisor.job)
    rig.supervisor._write_run(placed)
    for replica in placed:
        rig.until(replica, 1, S.READY)
    for process in rig.actors.processes.values():
        process.kill()
        process.wait()
    again = Supervisor(rig.run, rig.supervisor.job, actors=rig.actors, hardware=Hardware(gpus=(), is_cuda_build=False))
    again._held = frozenset()
    former = rig.run.node_dir(again.nodes[0]) / "raylet.json"
    former.parent.mkdir(parents=True)
    former.write_text('{"pid": 1, "start_ticks": 1}')
    again._continue_run()
    assert not former.exists(), "the agent would report a lost node"
    rig.supervisor = again
    for replica, node in placed.items():
        rig.until(replica, 2, S.READY)
        wanted = rig.journal.desired()[replica]
        assert (wanted.incarnation, wanted.node, wanted.prefer_standby) == (2, node, False)
    trainer = rig.actual("trainer/0", 1)
    assert trainer is not None and trainer.state is S.LOST
    assert len(rig.events(EventKind.RUN_STARTED)) == len(rig.events(EventKind.COMPONENT_RESTARTED)) == 1


def test_the_agents_of_a_run_that_ends_do_not_see_its_raylets_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would report lost nodes to the watch of the run, once it is continued."""
    order: list[str] = []
    monkeypatch.setattr(rig.supervisor.agents, "stop", lambda: order.append("agents"))
    monkeypatch.setattr(rig.supervisor.cluster, "stop", lambda: order.append("raylets"))
    rig.supervisor.stop()
    assert order == ["agents", "raylets"]


class Ending(FakeClock):
    """Ends an outage after `seconds`."""

    def __init__(self, outage: JournalOutage, seconds: float) -> None:
        super().__init__()
        self._outage, self._until = outage, self.monotonic() + seconds

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic() >= self._until:
            self._outage.end()


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_start_waits_for_its_journal_for_a_limited_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    rig.want("reward/0")
    rig.until("reward/0", 1, S.READY)
    preparing = Mock(poll=Mock(side_effect=[None, None, 0]))
    waits: list[Callable[[], None]] = [
        lambda: rig.supervisor._finish_preparing(preparing),
        lambda: rig.supervisor._wait_until_ready([ReplicaId("reward/0")]),
    ]
    for wait in waits:
        outage = JournalOutage(rig.journal.store, monkeypatch)
        rig.supervisor.clock = Ending(outage, share * supervisor_module.JOURNAL_WAIT_SECONDS)
        outage.start()
        if share < 1:
            wait()
        else:
            with pytest.raises(JournalUnavailable):
                wait()
        outage.end()


def test_a_rollout_is_not_drained_without_a_controller(rig: Rig) -> None:
    """Its tokens would be taken by nobody: the whole job is being restarted."""
    rig.want("controller/0")
    rig.want("rollout/0", node="node-3")
    rig.until("controller/0", 1, S.READY)
    old = rig.until("rollout/0", 1, S.READY)
    rig.actors.hold.clear()  # the next controller does not work yet
    rig.want("controller/0", 2)
    rig.until("controller/0", 1, S.LOST)
    rig.supervisor._operations._clock = clock = FakeClock()
    began = clock.monotonic()
    rig.supervisor._operations._let_drain(old)
    assert clock.monotonic() == began, "it waited"


def test_an_agent_that_cannot_be_started_again_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restarted: list[str] = []
    failures: list[OSError] = []

    def start(*_: object, **__: object) -> tuple[subprocess.Popen[bytes], int]:
        if failures:
            raise failures.pop()
        return subprocess.Popen(["sleep", "600"]), 0

    monkeypatch.setattr(supervisor_module, "start_process", start)
    agents = AgentSupervisor(rig.run, [NodeId("node-1")], FakeClock(), lambda _, because: restarted.append(because))
    agents.start()
    failures += [OSError(errno.EAGAIN, "no process"), OSError(errno.ENOSPC, "the disk is full")]
    try:
        process = agents._kept[NodeId("node-1")].process
        assert process is not None
        process.kill()
        process.wait()
        agents.tick()
        agents.tick()
        assert not restarted and caplog.text.count("cannot be started") == 1
        agents.tick()
        agents.tick()
        assert restarted == ["the agent of node-1 had ended (signal SIGKILL)"]
    finally:
        agents.stop()
