"""When checkpoints are taken, which trainer writes them while training goes on, and which of them are used and kept."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rolecall.rl_runtime.controller.background_tasks import Tasks
from rolecall.rl_runtime.controller.checkpoints import Checkpoints
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo, WrittenCheckpoint, choose, surplus
from rolecall.rl_runtime.protocol.messages import CommitRecord, first_commit

EVERY = 2


def stored(step: int, *, damaged: bool = False) -> CheckpointInfo:
    commit = None if damaged else replace(first_commit(), step=step)
    return CheckpointInfo(path=f"step-{step}", step=step, commit=commit, damage=f"step-{step}: cut" if damaged else "")


class Trainers:
    """Two trainers, of which `bad` cannot write. A write lasts until `may_write` is set."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.members = dict.fromkeys(range(2))
        self.bad, self.step, self.tried = bad, -1, list[tuple[int, int]]()
        self.removed: list[tuple[int, tuple[str, ...]]] = []
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def take_snapshot(self, failed: set[int]) -> tuple[int, int] | None:
        return min(self.members, key=lambda m: (m in failed, m), default=0), self.step

    async def write_checkpoint(self, writer: int, step: int) -> WrittenCheckpoint | None:
        await self.may_write.wait()
        self.tried.append((writer, step))
        return None if writer in self.bad else WrittenCheckpoint(path=f"step-{step}", found=(stored(step),))

    async def remove_surplus(self, writer: int, found: Sequence[CheckpointInfo]) -> None:
        self.removed.append((writer, tuple(info.path for info in found)))


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

    async def last(self, step: int) -> None:
        async def copied() -> None:
            copies.append(len(self.trainers.tried))

        copies: list[int] = []
        before = len(self.trainers.tried)
        await self.checkpoints.last(step, copy_seconds=60.0, before_write=copied)
        assert copies == list(range(before, len(self.trainers.tried))), "before each attempt to write"


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
        await a.last(0)
        assert a.written == ([] if len(bad) == 2 else [("step-0", 0)])
        assert len(a.trainers.tried) == min(2, len(bad) + 1)
        await a.last(0)
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
        await a.last(1)
        assert a.written == [("step-1", 1)] * 2

    run(test())


def test_what_is_not_needed_is_removed_after_the_checkpoint_is_recorded() -> None:
    async def test() -> None:
        a = Run(Trainers(bad=(0,)))
        await a.steps(3)
        assert a.written == [("step-2", 2)] and a.trainers.removed == [(1, ("step-2",))]

        def superseded(_path: str, _step: int) -> None:
            raise RuntimeError("a later controller is at work")

        b = Run(Trainers())
        b.checkpoints = Checkpoints(every_steps=1, trainers=b.trainers, tasks=Tasks(), on_written=superseded)  # type: ignore[arg-type]
        await b.steps(1)
        assert b.trainers.tried and not b.trainers.removed

    run(test())


def before(step: int) -> Any:
    """The run went back to `step` and has trained none since."""
    return lambda commit: commit.step <= step


def everything(_commit: CommitRecord) -> bool:
    return True


def test_the_newest_checkpoint_of_the_runs_history_is_chosen() -> None:
    found = [stored(4), stored(9), stored(14, damaged=True), stored(19)]
    choice = choose(found, before(9))
    assert choice.usable == (stored(9), stored(4))
    assert choice.refused == ("step-19: its last step was undone, or is of another run", "step-14: cut")
    assert [i.step for i in choose(found, everything).usable] == [19, 9, 4]


@pytest.mark.parametrize(
    ("found", "keep", "removed"),
    [
        ([stored(4), stored(9), stored(14)], 2, [4]),
        ([stored(4), stored(9), stored(14)], 3, []),
        ([stored(4), stored(9), stored(900)], 1, [4, 900]),
        ([stored(4), stored(900)], 1, [900]),
        ([stored(4, damaged=True), stored(9), stored(12, damaged=True), stored(14)], 2, [4]),
        ([stored(4, damaged=True), stored(9)], 2, []),
        ([stored(900)], 1, [900]),
    ],
)
def test_the_newest_of_the_runs_history_are_kept(found: list[CheckpointInfo], keep: int, removed: list[int]) -> None:
    assert [i.step for i in surplus(found, before(100), keep=keep)] == removed
