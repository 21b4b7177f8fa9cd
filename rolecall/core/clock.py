"""The only module that reads the time, so that everything else can take a clock as a parameter.

`monotonic()` orders events inside one node; `wall()` (seconds since 1970) is for display and for joining nodes.
"""

import time
from typing import Protocol

CLOCK_SET_SECONDS_MIN = 1.0
"""A wall clock that moves more than this against the monotonic one was set, or the machine slept."""


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


class SteadyTime:
    """Seconds since 1970 for a loop that compares times: the wall clock, except that it is set only when the loop calls
    `follow`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.wall() - clock.monotonic()

    def now(self) -> float:
        return self._clock.monotonic() + self._offset

    def follow(self) -> float:
        """By how many seconds the wall clock was set since the last call; 0: it was not. `now` moves by as much, and so
        must every time that the loop has kept."""
        moved = self._clock.wall() - self.now()
        if abs(moved) <= CLOCK_SET_SECONDS_MIN:
            return 0.0
        self._offset += moved
        return moved


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
