"""Trainers of the loop that compute for long, fail by their own code, or cannot join, on a simulated fleet."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.ledger import Ledger
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
