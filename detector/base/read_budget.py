"""Total memory and time budget for reading many files: readers bound each file, this bounds their sum.

In a folder of thousands of hostile files, each could stay just below the limit of a single file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import UnreadableInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits for all files of one kind together."""

    kept_bytes_max: int = 8 << 30
    """Estimated memory of the retained data; of dumps less (`for_dumps`). Stacks of 4,096 processes with 30
    threads in ten rounds are 0.8 GB, Flight Recorder dumps of 4,096 ranks with 2,000 entries each 0.4 GB."""
    reading_bytes_max: int = 768 << 20
    """Estimated memory of the Flight Recorder dumps that are being read at the same time, by all readers together."""
    seconds_max: float = 1800.0
    """Checked between files, and within kernel logs and Flight Recorder dumps. Only for dumps: the time for a recording
    depends on the detector and is bounded by its size."""


KEPT_BYTES_OF_DUMPS_MAX = 768 << 20
"""Of dumps and logs, whatever the limits allow for recordings: with `reading_bytes_max` and the readers' own memory, a
call stays below 2 GiB."""


def for_dumps(limits: ReadLimits | None) -> ReadLimits:
    limits = limits or ReadLimits()
    return replace(limits, kept_bytes_max=min(limits.kept_bytes_max, KEPT_BYTES_OF_DUMPS_MAX))


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

    @property
    def reading_bytes_max(self) -> int:
        return self._limits.reading_bytes_max

    @property
    def seconds_left(self) -> float:
        return self._limits.seconds_max - (self._clock.monotonic() - self._began)

    def check_time(self, path: str) -> None:
        """Called before and while reading `path`. Raises UnreadableInput if the time budget is used up."""
        most = self._limits.seconds_max
        if self._clock.monotonic() - self._began > most:
            reason = f"reading had not come further than this file after {most:g} s, and does not go on"
            raise UnreadableInput(where=path, reason=f"{reason}: name fewer files")


def read_each(
    files: Sequence[Path],
    named: Sequence[Path],
    budget: Budget,
    read: Callable[[Path], T],
    kept_bytes: Callable[[T], int],
) -> tuple[list[T], tuple[str, ...]]:
    """The content of each file, and the errors of unreadable ones in folders. Raises UnreadableInput: one of `named`
    cannot be read, or none can, or the budget is exhausted."""
    kept, unreadable = list[T](), list[UnreadableInput]()
    for file in files:
        budget.check_time(str(file))
        try:
            content = read(file)
        except UnreadableInput as e:
            if file in named:
                raise
            unreadable.append(e)
            continue
        budget.keep(kept_bytes(content), str(file))
        kept.append(content)
    if not kept:
        raise unreadable[0]
    return kept, tuple(str(e) for e in unreadable)
