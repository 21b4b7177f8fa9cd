"""Trainers of the loop that compute for long, fail by their own code, or cannot join, on a simulated fleet."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.ledger import Ledger
from rolecall.core.journal.payloads.recovery import HoldLifted, HoldPlaced
from rolecall.core.membership import Actual, ReplicaState
from tests.rl_runtime.loop import World, small_job

THREE = {"roles__trainer": 3, "algorithm__microbatches_per_step": 6}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def world(tmp_path: Path, script: Any, **job: Any) -> World:
    return World(job=small_job(**job), path=tmp_path, seed=0, script=script)


def slow(seconds: float) -> Callable[[ReplicaId], float]:
    return lambda _replica: seconds


def test_a_step_may_take_any_time_while_microbatches_are_computed(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.microbatch_seconds = slow(100.0)
        await until(lambda: w.controllers[-1].state.step == 2)
        w.fleet.microbatch_seconds = slow(0.1)

    w = world(tmp_path, script, num_steps=4).run()
    assert w.check().groups_undone == 0
    assert not w.events(EventKind.STEP_INTERRUPTED)
    assert [b["seconds"] > 200 for b in w.events(EventKind.STEP_COMMITTED)] == [True, True, False, False]


def test_survivors_that_still_compute_keep_what_they_have(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.microbatch_seconds = slow(40.0)
        await until(lambda: w.controllers[-1].state.step == 1)
        w.fleet.dead_seconds = 500.0
        await until(lambda: w.controllers[-1].state.plan is not None)
        await asyncio.sleep(5.0)
        w.fleet.kill("trainer/2")
        await until(lambda: w.controllers[-1].state.step == 2)
        w.fleet.microbatch_seconds = slow(0.1)

    w = world(tmp_path, script, num_steps=4, **THREE).run()
    assert w.check().groups_undone == 0
    [interrupted] = w.events(EventKind.STEP_INTERRUPTED)
    assert (interrupted["step"], interrupted["lost"]) == (1, ["trainer/2"])
    assert sum(p.body.num_computed for p in w.fleet.trainers()) == 4 * 6, "a microbatch was computed twice"


def test_a_trainer_that_answers_and_computes_nothing_is_left_behind(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 2)
        w.fleet.microbatch_seconds = lambda replica: 100_000.0 if replica == "trainer/1" else 0.1

    w = world(tmp_path, script, num_steps=4).run()
    assert w.check().groups_undone == 0
    [interrupted] = w.events(EventKind.STEP_INTERRUPTED)
    assert interrupted["lost"] == ["trainer/1"] and "#1: DeadlineExceeded" in interrupted["because"]
    assert w.clock.monotonic() - 1000 < 120


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_a_step_that_is_committed_after_the_controller_gave_it_up_counts(tmp_path: Path, num_trainers: int) -> None:
    """No trainer computes a microbatch in time, and each goes on until the step is committed."""

    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.microbatch_seconds = slow(80.0)
        await until(lambda: bool(w.events(EventKind.STEP_INTERRUPTED)))
        w.fleet.microbatch_seconds = slow(0.1)

    job = {"num_steps": 8, "detector__first_unit_seconds": 50.0, "roles__trainer": num_trainers}
    w = world(tmp_path, script, **job).run()
    assert w.check().groups_undone == 0 and len(w.controllers) == 1
    [gave_up, back] = w.events(EventKind.STEP_INTERRUPTED)
    assert "to compute a microbatch" in gave_up["because"] and gave_up["step"] == 3
    assert "state taken from trainer/0#1, step " in back["because"]


def test_a_trainer_that_cannot_copy_its_state_leaves_the_checkpoint_to_another_one(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.fails = lambda member, method: (
            RuntimeError("CUDA error") if (member[0], method) == ("trainer/1", "take_snapshot") else None
        )

    w = world(tmp_path, script, num_steps=6, checkpoint__every_steps=2).run()
    w.check()
    assert [b["step"] for b in w.events(EventKind.CHECKPOINT_WRITTEN)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("method", "failing", "what"),
    [
        *((m, ("trainer/0", n), "it could not join: OSError") for m in ("open_store", "join") for n in (1, 2)),
        ("copy_from", ("trainer/0", 2), "could not copy the state"),
    ],
)
def test_a_trainer_that_fails_to_join_by_its_own_code_is_given_up(
    tmp_path: Path, method: str, failing: tuple[str, int], what: str
) -> None:
    async def script(w: World) -> None:
        w.fleet.fails = lambda member, called: OSError("no address") if (member, called) == (failing, method) else None
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.kill("trainer/0")

    w = world(tmp_path, script, num_steps=30).run()
    assert w.check().groups_undone == 0 and len(w.controllers) == 1
    [lost] = [b for b in w.events(EventKind.REPLICA_LOST) if (b["replica"], b["incarnation"]) == failing]
    assert lost["because"] == f"{what}: no address"


@pytest.mark.parametrize("method", ["list_checkpoints", "load_checkpoint"])
def test_a_trainer_that_fails_to_load_by_its_own_code_leaves_it_to_another_one(tmp_path: Path, method: str) -> None:
    async def script(w: World) -> None:
        w.fleet.fails = lambda member, called: (
            MemoryError("no memory") if (member[0], called) == ("trainer/0", method) else None
        )
        await until(lambda: w.controllers[-1].state.step == 7)
        w.fleet.kill("trainer/0")
        w.fleet.kill("trainer/1")

    w = world(tmp_path, script, num_steps=12, checkpoint__keep=5).run()
    assert w.check().groups_undone == 2 * 8 and len(w.controllers) == 1


def test_a_replacement_that_no_other_trainer_reaches_is_left_out_and_given_up(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        w.fleet.unreachable = {(ReplicaId("trainer/1"), 2)}
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.kill("trainer/1")
        await until(lambda: w.fleet.newest("trainer/1").member[1] == 2)

    w = world(tmp_path, script, num_steps=30, **THREE).run()
    assert w.check().groups_undone == 0
    [lost] = [b for b in w.events(EventKind.REPLICA_LOST) if (b["replica"], b["incarnation"]) == ("trainer/1", 2)]
    assert lost["because"] == "no epoch could be formed with it, and one could without it"
    assert w.controllers[-1].trainers.members.keys() == {("trainer/0", 1), ("trainer/2", 1)}


def test_the_only_trainer_that_is_left_computes_a_microbatch_that_is_not_finite_once_more(tmp_path: Path) -> None:
    """Another trainer is lost in the same attempt, and not replaced before the next regroup."""
    spoilt = iter([True])

    async def script(w: World) -> None:
        def spoils(replica: str, microbatch: str) -> bool:
            if (replica, microbatch) != ("trainer/0", "3.0") or not next(spoilt, False):
                return False
            w.fleet.kill("trainer/1")
            return True

        w.fleet.spoils = spoils

    w = world(tmp_path, script, num_steps=6).run()
    assert w.check().groups_undone == 0
    [interrupted] = w.events(EventKind.STEP_INTERRUPTED)
    assert (interrupted["step"], interrupted["lost"]) == (3, ["trainer/1"])
    (again,) = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (again["from_replica"], again["by"], again["finite"]) == ("trainer/0", "trainer/0", True)


def test_a_replacement_computes_what_is_not_finite_at_the_only_trainer_that_is_left(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.spawn_seconds = 20.0
        w.fleet.spoils = lambda replica, microbatch: (replica, microbatch) == ("trainer/0", "3.0")
        w.fleet.kill("trainer/1")

    w = world(tmp_path, script, num_steps=6).run()
    assert w.check().groups_undone == 0
    alone, by_other = w.events(EventKind.MICROBATCH_RECOMPUTED)
    assert (alone["from_replica"], alone["by"], alone["finite"]) == ("trainer/0", "trainer/0", False)
    assert (by_other["from_replica"], by_other["by"], by_other["finite"]) == ("trainer/0", "trainer/1", True)


def test_what_is_not_finite_at_the_replacement_either_fails_its_step(tmp_path: Path) -> None:
    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.spoils = lambda replica, microbatch: microbatch == "3.0"
        w.fleet.kill("trainer/1")

    w = world(tmp_path, script, num_steps=6).run()
    assert w.outcome is not None and w.outcome.outcome == "failed" and "microbatch 3.0" in w.outcome.because
    assert [b["by"] for b in w.events(EventKind.MICROBATCH_RECOMPUTED)][-1] == "trainer/1"
    assert len(w.events(EventKind.STEP_INTERRUPTED)) <= 4


@pytest.mark.parametrize(("write_seconds", "is_written"), [(0.05, True), (30.0, True), (400.0, False)])
def test_a_step_that_ends_during_a_stop_is_in_the_ledger_before_it_is_in_a_checkpoint(
    tmp_path: Path, write_seconds: float, is_written: bool
) -> None:
    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 3)
        w.fleet.microbatch_seconds, w.fleet.write_seconds = slow(6.5), lambda: write_seconds
        await until(lambda: w.controllers[-1].state.plan is not None)
        await asyncio.sleep(1.0)
        w.journal.set_flag("stop", "enough")

    w = world(tmp_path, script, num_steps=9, checkpoint__every_steps=100).run()
    assert w.outcome is not None and (w.outcome.outcome, w.outcome.steps) == ("stopped", 4)
    [commit] = w.fleet.optimizer[3].values()
    assert Ledger(w.journal.store).includes(3, commit.group_ids, commit.ledger)
    assert (3 in w.fleet.checkpoints) == is_written and w.audit().ok


async def _nobody_acts(_: World) -> None:
    await asyncio.sleep(12.0)


async def _approved_late(_: World) -> None:
    await asyncio.sleep(5.0)


async def _paused(w: World) -> None:
    w.journal.set_flag("paused", "bob: an upgrade")
    await asyncio.sleep(12.0)
    w.journal.set_flag("paused", None)
    await asyncio.sleep(5.0)


async def _held(w: World) -> None:
    for digest, seconds in (("p-1", 12.0), ("p-2", 1000.0)):
        w.journal.append(HoldPlaced(digest=digest, by="bob", because="", until=w.clock.wall() + seconds))
    w.journal.append(HoldLifted(digest="p-2", by="bob", because=""))
    await asyncio.sleep(17.0)


async def _lifted(w: World) -> None:
    w.journal.append(HoldPlaced(digest="p-1", by="bob", because="", until=w.clock.wall() + 1000.0))
    w.journal.append(HoldLifted(digest="p-1", by="bob", because=""))
    await asyncio.sleep(12.0)


async def _slow_to_start(w: World) -> None:
    record = Actual(replica=ReplicaId("trainer/0"), incarnation=2, node=NodeId("node-0"), state=ReplicaState.STARTING)
    w.journal.set_actual(record)
    await asyncio.sleep(12.0)


@pytest.mark.parametrize(
    ("meanwhile", "outcome"),
    [
        (_nobody_acts, "failed"),
        (_lifted, "failed"),
        (_approved_late, "completed"),
        (_paused, "completed"),
        (_held, "completed"),
        (_slow_to_start, "completed"),
    ],
)
def test_a_run_without_trainers_waits_as_long_as_recovery_can_replace_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[World], Awaitable[None]], outcome: str
) -> None:
    monkeypatch.setattr("rolecall.rl_runtime.controller.trainer_group.NO_TRAINER_SECONDS", 2.0)

    async def script(w: World) -> None:
        await until(lambda: w.controllers[-1].state.step == 2)
        for trainer in ("trainer/0", "trainer/1"):
            w.fleet.kill(trainer)
        await meanwhile(w)
        for trainer in ("trainer/0", "trainer/1"):
            w.fleet.start(ReplicaId(trainer), 2)

    w = world(tmp_path, script, num_steps=4, recovery__approval_timeout_seconds=4.0)
    w.recovers = False
    w.run()
    assert w.outcome is not None and w.outcome.outcome == outcome, w.outcome
    if outcome == "failed":
        assert w.outcome.because == "timed out after 6.0 s waiting for a trainer"
