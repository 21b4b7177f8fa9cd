"""Memory and time of a call: readers bound each file, this bounds their sum, and the time of the detectors.

In a folder of thousands of hostile files, each could stay just below the limit of a single file. A budget that is used
up ends the reading and nothing else: what was read is judged, and `stopped` names the file that was not read to its
end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.core.text import counted

T = TypeVar("T")

Check = Callable[[], None]
"""Readers call it about every tenth of a second; raises ReadingStopped on the deadline."""


def no_check() -> None:
    """For reading without a deadline."""


def head_of(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a regular file; empty for others, since a pipe would block. Raises OSError."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits of a whole call."""

    kept_bytes_max: int = 768 << 20
    """Estimated memory of the recordings, and of dumps and logs of one kind: kinds are read one after the other, so
    that with what reading takes a call stays below 2 GiB. Recordings of 10,000 machines with 21 metrics for five
    minutes at 1 s are 0.25 GB, stacks of 4,096 processes with 30 threads in ten rounds 0.8 GB, Flight Recorder dumps of
    4,096 ranks with 2,000 entries each 0.4 GB."""
    reading_bytes_max: int = 768 << 20
    """Estimated memory of the Flight Recorder dumps that are being read at the same time, by all readers together.
    Recordings are read one at a time, and bound this themselves."""
    seconds_max: float = 1800.0
    """For reading and judging everything, checked within each file and between two ticks of a recording."""


class Budget:
    """Tracks consumption of the limits across files. Time counts from construction. `stopped`: what ended reading."""

    def __init__(self, limits: ReadLimits | None = None, clock: Clock | None = None) -> None:
        self._limits, self._clock = limits or ReadLimits(), clock or SystemClock()
        self._began = self._clock.monotonic()
        self._kept_bytes = self._num_files = 0
        self.stopped: ReadingStopped | None = None

    def next_kind(self) -> "Budget":
        """For the next kind of dumps or logs, after what was kept of the last kind is gone: what is left of the time,
        and all of the memory."""
        budget = Budget(self._limits, self._clock)
        budget._began = self._began
        return budget

    def keep(self, num_bytes: int, path: str) -> None:
        """Accounts `num_bytes` retained from the file at `path`. Raises ReadingStopped if over budget."""
        self._num_files += 1
        self._kept_bytes += num_bytes
        most = self._limits.kept_bytes_max
        if self._kept_bytes > most:
            reason = (
                f"with it {counted(self._num_files, 'file')} would take more than {most / (1 << 30):.3g} GiB of memory"
            )
            self.stop(ReadingStopped(where=path, reason=f"{reason}, and no more are read: name fewer of them"))

    @property
    def reading_bytes_max(self) -> int:
        return self._limits.reading_bytes_max

    @property
    def seconds_max(self) -> float:
        return self._limits.seconds_max

    @property
    def seconds_left(self) -> float:
        return self.seconds_max - (self._clock.monotonic() - self._began)

    def check_time(self, path: str) -> None:
        """Called before and while reading `path`. Raises ReadingStopped if the time budget is used up."""
        if self.seconds_left < 0:
            reason = f"not read to its end in the {self.seconds_max:g} s of a call"
            self.stop(ReadingStopped(where=path, reason=f"{reason}; no more are read: name fewer files"))

    def check(self, path: Path) -> Check:
        """`check_time` for a reader of `path`."""
        return lambda: self.check_time(str(path))

    def stop(self, stopped: ReadingStopped) -> NoReturn:
        """Ends the reading. Raises `stopped`."""
        self.stopped = self.stopped or stopped
        raise stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents(Generic[T]):
    """Of the files of one kind. `unreadable`: the errors of those that cannot be read. `stopped`: the first file that
    the budget did not suffice for; line-based readers keep what they had read of it."""

    items: list[T]
    unreadable: list[UnreadableInput]
    stopped: ReadingStopped | None = None


def read_each(
    files: Sequence[Path],
    named: Sequence[Path],
    budget: Budget,
    read: Callable[[Path, Check], T],
    kept_bytes: Callable[[T], int],
) -> Contents[T]:
    """Raises UnreadableInput: one of `named` cannot be read."""
    kept, unreadable = list[T](), list[UnreadableInput]()
    for file in files:
        try:
            budget.check_time(str(file))
            content = read(file, budget.check(file))
            budget.keep(kept_bytes(content), str(file))
            kept.append(content)
        except ReadingStopped:
            pass
        except UnreadableInput as e:
            if file in named:
                raise
            unreadable.append(e)
        if budget.stopped is not None:
            break
    return Contents(items=kept, unreadable=unreadable, stopped=budget.stopped)
