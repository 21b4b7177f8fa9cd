"""When checkpoints are taken, and which trainer writes them, while training goes on."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rolecall.rl_runtime.controller.background_tasks import Tasks
from rolecall.rl_runtime.controller.checkpoints import Checkpoints

EVERY = 2


class Trainers:
    """Two trainers, of which `bad` cannot write. A write lasts until `may_write` is set."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.members = dict.fromkeys(range(2))
        self.bad, self.step, self.tried = bad, -1, list[tuple[int, int]]()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def take_snapshot(self, failed: set[int]) -> tuple[int, int] | None:
        return min(self.members, key=lambda m: (m in failed, m), default=0), self.step

    async def write_checkpoint(self, writer: int, step: int) -> str | None:
        await self.may_write.wait()
        self.tried.append((writer, step))
        return None if writer in self.bad else f"step-{step}"


class Run:
    def __init__(self, trainers: Trainers) -> None:
        self.trainers, self.written = trainers, list[tuple[str, int]]()
        self.checkpoints = Checkpoints(
            every_steps=EVERY,
            trainers=trainers,  # type: ignore[arg-type]
            tasks=Tasks(),
            on_written=lambda path, step: self.written.append((path, step)),
        )

    async def steps(self, number: int) -> None:
        for _ in range(number):
            self.trainers.step += 1
            await self.checkpoints.after_step(self.trainers.step)
            for _ in range(3):
                await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10.0))


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    async def test() -> None:
        a = Run(Trainers())
        a.trainers.may_write.clear()
        await a.steps(5)
        assert a.written == []
        a.trainers.may_write.set()
        await a.checkpoints.before_return()
        assert a.written == [("step-1", 1)], "one at a time"
        await a.steps(1)
        assert a.written == [("step-1", 1), ("step-5", 5)]

    run(test())


def test_one_that_became_due_meanwhile_is_taken_after_the_next_step() -> None:
    async def test() -> None:
        a = Run(Trainers())
        a.trainers.may_write.clear()
        await a.steps(4)
        a.trainers.may_write.set()
        await a.checkpoints.before_return()
        await a.steps(1)
        assert a.written == [("step-1", 1), ("step-4", 4)]

    run(test())


@pytest.mark.parametrize(("bad", "written"), [((0,), [("step-2", 2), ("step-4", 4)]), ((0, 1), [])])
def test_another_trainer_tries_after_the_next_step_and_each_one_once(
    bad: tuple[int, ...], written: list[tuple[str, int]]
) -> None:
    async def test() -> None:
        a = Run(Trainers(bad))
        await a.steps(5)
        assert a.written == written
        assert a.trainers.tried == [(0, 1), (1, 2), (0, 3), (1, 4)]

    run(test())


@pytest.mark.parametrize("bad", [(), (0,), (0, 1)])
def test_the_last_one_is_awaited(bad: tuple[int, ...]) -> None:
    async def test() -> None:
        a = Run(Trainers(bad))
        await a.steps(1)
        await a.checkpoints.last(0)
        assert a.written == ([] if len(bad) == 2 else [("step-0", 0)])
        assert len(a.trainers.tried) == min(2, len(bad) + 1)
        await a.checkpoints.last(0)
        assert len(a.written) < 2, "it is there"

    run(test())


def test_a_trainer_that_is_lost_while_it_writes_is_followed_by_a_survivor() -> None:
    async def test() -> None:
        a = Run(Trainers(bad=(0,)))
        a.trainers.may_write.clear()
        await a.steps(2)
        del a.trainers.members[0]
        a.trainers.may_write.set()
        await a.checkpoints.before_return()
        await a.steps(1)
        assert a.written == [("step-2", 2)]

    run(test())


def test_a_step_that_is_trained_again_is_written_again() -> None:
    async def test() -> None:
        a = Run(Trainers())
        await a.steps(2)
        await a.checkpoints.before_return()
        await a.checkpoints.last(1)
        assert a.written == [("step-1", 1)] * 2

    run(test())
