"""The controller's background tasks with one owner; an error in any of them ends the controller."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from rolecall.rl_runtime.protocol.membership import Member

logger = logging.getLogger(__name__)

FIRST_CALLS_MAX = 4
"""Handshakes that may fail with a replica's own error before it is given up."""
RETRY_SECONDS = 0.25


class Tasks:
    """Starts tasks and keeps references to them. `failed` gets the first unhandled exception."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_result(error)

    async def stop(self) -> None:
        """Cancels all tasks and waits until their clean-up has finished."""
        running = [t for t in self._running if t is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def retry_first_call(failures: Counter[Member], member: Member, error: Exception) -> str:
    """Counts a failed handshake, and waits. Returns why to give the replica up after the last one, else ""."""
    failures[member] += 1
    count = failures[member]
    because = f"its first call failed {count} times, last: {type(error).__name__}: {error}"
    logger.warning("%s#%d: %s", *member, because)
    if count >= FIRST_CALLS_MAX:
        return because
    await asyncio.sleep(RETRY_SECONDS * count)
    return ""


async def set_or_timeout(event: asyncio.Event, seconds: float) -> bool:
    """Waits for `event`, at most `seconds`, and clears it. Returns whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
