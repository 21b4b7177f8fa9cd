"""Simulated time for asyncio: the loop jumps over every wait, so that minutes of a run take a second, and the same seed
gives the same run."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

from rolecall.core.clock import FakeClock


class _JumpingSelector(selectors.PollSelector):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and nothing will ever happen")
        if not ready and timeout:
            self._clock.advance(timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a FakeClock that jumps to the next timer."""

    def __init__(self, clock: FakeClock) -> None:
        self._fake_clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._fake_clock.monotonic()


def run_simulated(clock: FakeClock, main: Coroutine[Any, Any, Any]) -> Any:
    """Runs `main` to its end in simulated time."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(clock)) as runner:
        return runner.run(main)
