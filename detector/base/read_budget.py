"""Total memory and time budget for reading many files: readers bound each file, this bounds their sum.

In a folder of thousands of hostile files, each could stay just below the limit of a single file.
"""

from dataclasses import dataclass

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import UnreadableInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits for all files of one kind together."""

    kept_bytes_max: int = 8 << 30
    """Estimated memory of the retained data. Stacks of 4,096 processes with 30 threads in ten
    rounds are 0.8 GB, Flight Recorder dumps of 4,096 ranks with 2,000 entries each 0.4 GB."""
    seconds_max: float = 1800.0
    """Checked between files, each of which takes a few seconds at worst. Only for dumps: the time for a recording
    depends on the detector and is bounded by its size."""


class Budget:
    """Tracks consumption of the limits across files. Time counts from construction."""

    def __init__(self, limits: ReadLimits | None = None, clock: Clock | None = None) -> None:
        self._limits, self._clock = limits or ReadLimits(), clock or SystemClock()
        self._began = self._clock.monotonic()
        self._kept_bytes = self._num_files = 0

    def keep(self, num_bytes: int, path: str) -> None:
        """Accounts `num_bytes` retained from the file at `path`. Raises UnreadableInput if over budget."""
        self._num_files += 1
        self._kept_bytes += num_bytes
        most = self._limits.kept_bytes_max
        if self._kept_bytes > most:
            reason = f"with it {self._num_files:,} file(s) take more than {most / (1 << 30):.3g} GiB of memory"
            raise UnreadableInput(where=path, reason=f"{reason}, and no more are read: name fewer of them")

    def check_time(self, path: str) -> None:
        """Called before reading `path`. Raises UnreadableInput if the time budget is used up."""
        most = self._limits.seconds_max
        if self._clock.monotonic() - self._began > most:
            reason = f"reading had not come further than this file after {most:g} s, and does not go on"
            raise UnreadableInput(where=path, reason=f"{reason}: name fewer files")
