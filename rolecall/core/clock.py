"""The only module that reads the time, so that everything else can take a clock as a parameter.

`monotonic()` orders events inside one node; `wall()` (seconds since 1970) is for display and for joining nodes.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks. CLOCK_MONOTONIC is shared by all processes of one node."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FakeClock:
    """A clock that advances only explicitly or by `sleep`."""

    def __init__(self, now: float = 1000.0, wall_offset: float = 1_700_000_000.0) -> None:
        self._now, self._wall_offset = now, wall_offset

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    advance = sleep

    def set_wall(self, seconds: float) -> None:
        """Sets the wall clock forward, or back."""
        self._wall_offset += seconds
