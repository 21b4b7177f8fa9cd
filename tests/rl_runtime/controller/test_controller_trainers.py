"""Trainers of the loop that compute for long, fail by their own code, or cannot join, on a simulated fleet."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import EventKind
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
