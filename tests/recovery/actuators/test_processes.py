"""Actuator `processes` beside fakes of slime and NeMo-RL whose engines are processes of this host: what it ends, and
what their monitors make of it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.actuators import ProcessesActuator
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted
from rolecall.core.membership import Desired
from rolecall.recovery.actuators.external import ExternalActuator, calls_of
from rolecall.recovery.actuators.targets.processes import Processes
from rolecall.recovery.actuators.targets.target import Member
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.recovery.loop import Watch
from rolecall.testing.recovery_world import FakeDetector, FakeSource, diagnosis
from tests.recovery.actuators.driving import Driven, drive, order
from tests.recovery.actuators.rollouts_fake import NemoRl, Rollouts, Slime
from tests.recovery.world import World
from tests.support import PATIENCE_SECONDS, eventually

K = EventKind
NUM_ENGINES = 3
MINE = 1
"""Number of the replica at fault."""
CALL_SECONDS = 5 * PATIENCE_SECONDS
"""Of a command, whose start alone may take long on a loaded machine."""

Start = Callable[..., Any]


def target(**config: object) -> Processes:
    program = [sys.executable, "-m", "rolecall"]
    given = {"kind": "processes", "program": program, "call_seconds": CALL_SECONDS, **config}
    return Processes(ProcessesActuator.model_validate(given))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Rollouts] = []

    def start(kind: type[Rollouts], **options: Any) -> Rollouts:
        folder = tmp_path / "job"
        folder.mkdir()
        started.append(kind(folder, NUM_ENGINES, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def end(who: Member, **config: object) -> Driven:
    return drive(target(**config).replace(order(who)), lambda call: call.make())


# --- the whole way of an incident ---------------------------------------------------------------------------------------


class EngineDetector(FakeDetector):
    """Says that rollout/1#1 hangs while it runs, and what the others generate."""

    def __init__(self, world: World, rollouts: Rollouts) -> None:
        super().__init__(world.runtime)
        self._rollouts, self._hangs = rollouts, rollouts.engine(MINE)
        self._found = diagnosis(FaultClass.HANG, (f"rollout/{MINE}", 1), onset=world.clock.wall())

    def observe(self, observation: Any) -> list[Diagnosis]:
        del observation
        return [self._found] if self._hangs.exit_code is None else []

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        n = int(replica.rpartition("/")[2])
        engine, incarnation = self._rollouts.engines[n], self._rollouts.incarnations[n]
        if engine is None or engine is self._hangs or incarnation < incarnation_min:
            return False, f"{replica}#{incarnation_min} was not seen"
        if engine.ask("alive") == (0, 0):
            return False, f"{replica}#{incarnation} has no weights"
        engine.ask("generate")
        return True, f"{replica}#{incarnation} generates"


class Watched:
    """A watch in mode act beside `rollouts`, whose processes are told to it as agents would."""

    def __init__(self, folder: Path, rollouts: Rollouts) -> None:
        self.world, self._rollouts = World(folder), rollouts
        self.world.others.append(self._count)
        clock, journal = self.world.clock, self.world.journal
        self.actuator = ExternalActuator(target(), journal, rollouts.members, clock, deadline_seconds=10_000.0)
        self.watch = Watch(
            journal,
            FakeSource(clock),
            EngineDetector(self.world, rollouts),
            self.actuator,
            RecoveryConfig(mode="act", verification_timeout_seconds=20.0),
            self.world.notifier,
            clock,
            "host:1:1",
        )

    def _count(self) -> None:
        """As `rolecall/watch/observed_fleet.py` does."""
        desired = self.world.journal.desired()
        for n, incarnation in enumerate(self._rollouts.incarnations):
            replica = ReplicaId(f"rollout/{n}")
            if incarnation > desired[replica].incarnation:
                seen = Desired(replica=replica, incarnation=incarnation, node=NodeId("node-1"))
                self.world.journal.set_desired(seen)

    def acts(self) -> None:
        """Until the actuator has done its part, in time of this host."""

        def done() -> bool:
            self.world.step(self.watch)
            return bool(self.world.events(K.ACTION_DONE, K.ACTION_FAILED))

        eventually(done, "the action ends", seconds=2 * CALL_SECONDS)
        assert self.world.events(K.ACTION_DONE), self.world.story()

    def calls(self) -> list[tuple[str, int]]:
        """The command lines after the program's, and their exit codes."""
        calls = [e.as_(CallStarted).call.partition(" -m rolecall ")[2] for e in self.world.events(K.CALL_STARTED)]
        return list(zip(calls, (e.as_(CallEnded).status for e in self.world.events(K.CALL_ENDED)), strict=True))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[Rollouts], Watched]]:
    made: list[Watched] = []

    def watch(rollouts: Rollouts) -> Watched:
        made.append(Watched(tmp_path, rollouts))
        return made[-1]

    yield watch
    for one in made:
        one.actuator.close()
        one.world.journal.close()


def without(pids: dict[int, int]) -> dict[int, int]:
    return {n: pid for n, pid in pids.items() if n != MINE}


def end_of(who: Member) -> str:
    return f"node end {who.pid} --start-ticks {who.start_ticks}"


def test_slime_fills_the_slot_before_its_next_weight_update(
    start: Start, watched: Callable[[Rollouts], Watched]
) -> None:
    slime: Slime = start(Slime)
    before, ended, who = slime.pids(), slime.engine(MINE), slime.member(MINE)
    os.kill(who.pid, signal.SIGSTOP)
    monitor = threading.Thread(target=slime.check_health, daemon=True)
    monitor.start()
    eventually(lambda: slime.asked == MINE, "the monitor waits for the engine that hangs")

    it = watched(slime)
    it.acts()
    assert it.calls() == [(end_of(who), 0)]
    monitor.join(PATIENCE_SECONDS)
    assert not monitor.is_alive() and slime.engines[MINE] is None, "the end of the engine has freed the monitor"
    assert ended.exit_code == -signal.SIGKILL and not ended.holds_its_gpu
    it.world.run(10.0, it.watch)
    assert not it.world.all_closed(), "nothing fills the slot before the next weight update"

    slime.update_weights()
    it.world.until(it.world.all_closed, it.watch)
    assert it.world.only().outcome is IncidentOutcome.RESOLVED, it.world.story()
    assert without(slime.pids()) == without(before) and slime.pids()[MINE] != who.pid
    assert len(it.calls()) == 1
    slime.check_health()
    assert {(slime.engine(n).ask("generate") or (0, 0))[0] for n in range(NUM_ENGINES)} == {2}, "weights of all"


def test_nemo_rl_restarts_the_shard_and_lets_it_serve_after_a_refit(
    start: Start, watched: Callable[[Rollouts], Watched]
) -> None:
    fleet: NemoRl = start(NemoRl)
    before, ended, who = fleet.pids(), fleet.engine(MINE), fleet.member(MINE)
    os.kill(who.pid, signal.SIGUSR1)
    for _ in range(fleet.UNHEALTHY_THRESHOLD):
        fleet.tick()
    assert fleet.history == [], "a probe does not find a shard that answers and generates nothing"

    it = watched(fleet)
    it.acts()
    assert it.calls() == [(end_of(who), 0)]
    assert ended.exit_code == -signal.SIGKILL and not ended.holds_its_gpu

    def ticked_to(state: str) -> bool:
        fleet.tick()
        return fleet.states[MINE] == state

    eventually(lambda: ticked_to("STALE"), "it has loaded")
    it.world.run(10.0, it.watch)
    assert not it.world.all_closed(), "a stale shard generates nothing"
    fleet.refit()
    it.world.until(it.world.all_closed, it.watch)
    assert it.world.only().outcome is IncidentOutcome.RESOLVED, it.world.story()
    states = ("SUSPECT", "DEAD", "RESTARTING", "STALE", "HEALTHY")
    assert fleet.history == [(MINE, state) for state in states]
    assert without(fleet.pids()) == without(before) and fleet.pids()[MINE] != who.pid
    assert len(it.calls()) == 1


@pytest.mark.parametrize(
    ("kind", "option"), [(Slime, "fault_tolerance"), (NemoRl, "restart_dead_shards")], ids=["slime", "nemo-rl"]
)
def test_a_monitor_that_starts_nothing_is_for_on_call(
    start: Start, watched: Callable[[Rollouts], Watched], kind: type[Rollouts], option: str
) -> None:
    """The setting that the documentation asks for is missing."""
    rollouts: Slime | NemoRl = start(kind, **{option: False})
    before = rollouts.pids()
    it = watched(rollouts)
    it.acts()
    if isinstance(rollouts, NemoRl):
        for _ in range(rollouts.UNHEALTHY_THRESHOLD + 1):
            rollouts.tick()
        rollouts.refit()
        assert rollouts.states[MINE] == "DEAD"
    else:
        rollouts.check_health()
    it.world.until(lambda: it.world.events(K.ONCALL_PAGED), it.watch, seconds=600.0)
    it.world.run(60.0, it.watch)
    (paged,) = it.world.events(K.ONCALL_PAGED)
    assert "rollout/1#2 was never seen" in str(paged.payload.to_body()), it.world.story()
    assert len(it.calls()) == 1, "nothing else is ended"
    assert rollouts.pids() == without(before)


# --- one call, without a watch -------------------------------------------------------------------------------------------


def test_a_dry_run_says_the_command_and_ends_nothing(start: Start) -> None:
    slime = start(Slime)
    before, who = slime.pids(), slime.member(MINE)
    (call,), ends = calls_of(target(), order(who))
    assert call.shown.endswith(f" -m rolecall {end_of(who)}") and ends == "ended 1 process of rollout/1#2"
    assert slime.pids() == before


def test_an_engine_that_is_gone_and_a_later_process_with_its_pid_are_left_alone(start: Start) -> None:
    slime = start(Slime)
    gone = slime.member(MINE)
    slime.engine(MINE).close()
    slime.engines[MINE] = None
    slime.update_weights()
    before = slime.pids()
    recycled = replace(gone, pid=before[MINE])
    for who in (gone, recycled):
        it = end(who)
        assert it.changing and not it.error
        assert it.done == "ended 0 processes of rollout/1#2; 1 had ended before"
        assert slime.pids() == before
    slime.check_health()
    assert slime.pids() == before


@pytest.mark.parametrize("ignores", [False, True])
def test_sigterm_is_followed_by_sigkill_after_the_grace_period(start: Start, ignores: bool) -> None:
    """One that obeys ends at once, and its core, which its server has left behind, with it."""
    slime = start(Slime, ignores_sigterm=ignores)
    before, ended, who = slime.pids(), slime.engine(MINE), slime.member(MINE)
    it = end(who, grace_seconds=0.2 if ignores else PATIENCE_SECONDS)
    assert it.done == "ended 1 process of rollout/1#2", it
    assert ended.exit_code == -(signal.SIGKILL if ignores else signal.SIGTERM) and not ended.holds_its_gpu
    assert slime.pids() == without(before)


def test_a_server_that_is_killed_alone_leaves_no_room_for_another(start: Start) -> None:
    """Why descendants are ended too: NeMo-RL's documentation has it measured."""
    fleet: NemoRl = start(NemoRl, max_restart_attempts_per_shard=1)
    ended = fleet.engine(MINE)
    os.kill(ended.pid, signal.SIGKILL)

    def retired() -> bool:
        fleet.tick()
        return fleet.states[MINE] == "RETIRED"

    eventually(retired, "no restart succeeds")
    assert ended.holds_its_gpu
    states = ("SUSPECT", "DEAD", "RESTARTING", "DEAD", "RETIRED")
    assert fleet.history == [(MINE, state) for state in states]
