"""When a checkpoint is taken, and its writing, which goes on while the next steps run."""

import asyncio
from collections.abc import Callable

from rolecall.rl_runtime.controller.background_tasks import Tasks
from rolecall.rl_runtime.controller.trainer_group import TrainerGroup
from rolecall.rl_runtime.protocol.clients import TrainerPort


class Checkpoints:
    """Of one run: a trainer copies its state between two steps, and writes the copy. One at a time: if a checkpoint is
    due while the one before is still being written, it is taken after the first step that ends later.
    """

    def __init__(
        self, *, every_steps: int, trainers: TrainerGroup, tasks: Tasks, on_written: Callable[[str, int], object]
    ) -> None:
        """`on_written(path, step)`: a checkpoint is complete, with all steps up to `step`."""
        self._every, self._trainers, self._tasks, self._on_written = every_steps, trainers, tasks, on_written
        self._is_due, self._failures = False, 0
        self._writing: asyncio.Task[bool] | None = None

    async def after_step(self, step: int) -> None:
        """Takes a checkpoint if one is due after `step`, which is committed."""
        if (step + 1) % self._every == 0:
            self._is_due, self._failures = True, 0
        if self._is_due and (self._writing is None or self._writing.done()):
            self._is_due = False
            if (taken := await self._trainers.take_snapshot(self._failures)) is not None:
                self._writing = self._tasks.start(self._write(*taken), "write a checkpoint")

    async def settled(self) -> None:
        """Returns when none is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def last(self) -> None:
        """Takes one and returns when it is written; each trainer tries at most once."""
        await self.settled()
        self._failures = 0
        for _ in range(len(self._trainers.members)):
            taken = await self._trainers.take_snapshot(self._failures)
            if taken is None or await self._write(*taken):
                return

    async def _write(self, writer: TrainerPort, step: int) -> bool:
        path = await self._trainers.write_checkpoint(writer)
        if path is None:  # the next trainer tries after the next step
            self._failures += 1
            self._is_due = self._failures < len(self._trainers.members)
            return False
        self._on_written(path, step)
        return True
