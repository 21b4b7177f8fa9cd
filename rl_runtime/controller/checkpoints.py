"""When a checkpoint is taken, and its writing, which goes on while the next steps run. Then those that are no longer
needed are removed."""

import asyncio
from collections.abc import Awaitable, Callable

from rolecall.rl_runtime.controller.background_tasks import Tasks
from rolecall.rl_runtime.controller.trainer_group import TrainerGroup
from rolecall.rl_runtime.protocol.clients import within
from rolecall.rl_runtime.protocol.membership import Member


class Checkpoints:
    """Of one run: a trainer copies its state between two steps, and writes the copy. One at a time: if a checkpoint is
    due while the one before is still being written, it is taken after the first step that ends once that is over.
    """

    def __init__(
        self, *, every_steps: int, trainers: TrainerGroup, tasks: Tasks, on_written: Callable[[str, int], object]
    ) -> None:
        """`on_written(path, step)`: a checkpoint is complete, with all steps up to `step`."""
        self._every, self._trainers, self._tasks, self._on_written = every_steps, trainers, tasks, on_written
        self._is_due, self._newest = False, -1
        self._failed: set[Member] = set()  # could not write the checkpoint that is due
        self._writing: asyncio.Task[bool] | None = None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def after_step(self, step: int) -> None:
        """Takes a checkpoint if one is due after `step`, which is committed."""
        if (step + 1) % self._every == 0:
            self._is_due, self._failed = True, set()
        if self._is_due and not self.is_writing:
            self._is_due = False
            if (taken := await self._trainers.take_snapshot(self._failed)) is not None:
                self._writing = self._tasks.start(self._write(*taken), "write a checkpoint")

    async def before_return(self) -> None:
        """Before the run goes back to an older step: returns when the one that this controller has begun to write is
        there, because it may be the newest."""
        await self._settled()
        self._newest = -1

    async def last(self, step: int, *, copy_seconds: float, before_write: Callable[[], Awaitable[None]]) -> None:
        """Returns when there is a checkpoint of `step` or a later one, or no trainer could write it; each one tries at
        most once. `before_write`: called once a trainer has copied its state.

        Raises DeadlineExceeded: no trainer has copied its state within `copy_seconds`.
        """
        await self._settled()
        self._failed = set()
        for _ in range(len(self._trainers.members)):
            if self._newest >= step:
                return
            copying = self._trainers.take_snapshot(self._failed)
            if (taken := await within(copying, copy_seconds, "a trainer's copy of its state")) is not None:
                await before_write()
                await self._write(*taken)

    async def _settled(self) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self, writer: Member, step: int) -> bool:
        written = await self._trainers.write_checkpoint(writer, step)
        if written is None:  # another trainer tries after the next step
            self._failed.add(writer)
            self._is_due = not self._trainers.members.keys() <= self._failed
            return False
        self._newest = step
        self._on_written(written.path, step)
        await self._trainers.remove_surplus(writer, written.found)
        return True
