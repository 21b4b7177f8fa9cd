"""Counters of the kernel, made fit to be exposed: read without harm and at little cost, and never falling.

A text file of sysfs holds one number, or `N/A`, or cannot be read; a driver that was loaded again begins at 0; counters
of 32 bits go round. What is exposed goes on from where it was: a total.
"""

import os
import re
import stat

TEXT_BYTES_MAX = 4096
"""Sysfs gives at most one page."""
WHOLE_BYTES = 1 << 16
_NUMBER = re.compile(r"[0-9]{1,20}\Z")
NUM_OPEN_MAX = 256
"""Files kept open by one collector; a process may have 1,024 descriptors by default."""
DEAD = frozenset({2**64 - 1})
"""All ones: what a device that left the bus answers."""
ROUND = 1 << 32
NEAR = ROUND >> 2
"""A counter has gone round, and did not begin anew, if it was this close below 2^32 and is now this close above 0.
Between two looks nothing counts a quarter of 2^32, and a driver is rarely loaded just then."""
NUM_SERIES_MAX = 16_384
"""Remembered by one collector: 64 ports of 128 counters are half of it."""

Key = tuple[str, ...]


class OpenFileCache:
    """Small files that are read again and again: the first ones stay open, and cost one system call each time instead of
    four. A file of sysfs whose device is gone answers with an error, also when another of its name has come: it is then
    opened anew. One thread uses it.
    """

    def __init__(self, num_max: int = NUM_OPEN_MAX) -> None:
        self._num_max = num_max
        self._open: dict[str, int] = {}

    def text(self, path: str) -> str | None:
        """The file's text without white space at its ends; None: not there, no file, or it refuses to be read."""
        kept = self._open.get(path)
        if kept is not None:
            try:
                return os.pread(kept, TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
            except OSError:
                os.close(self._open.pop(path))
        number = _opened(path)
        if number < 0:
            return None
        try:
            text = os.pread(number, TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
        except OSError:
            os.close(number)
            return None  # EINVAL (a link that is down has no speed), ENODEV (the device went while it was read)
        if len(self._open) < self._num_max:
            self._open[path] = number
        else:
            os.close(number)
        return text

    def number(self, path: str) -> int | None:
        return number_of(self.text(path))

    def forget(self, folder: str) -> None:
        """Its device went, or another came."""
        for path in [p for p in self._open if p.startswith(f"{folder}/")]:
            os.close(self._open.pop(path))

    def close(self) -> None:
        for number in self._open.values():
            os.close(number)
        self._open.clear()


def read_whole(path: str) -> str:
    """A file of /proc, which may have several pages. A fifth of the cost of `Path.read_text`, six times a second.

    Raises:
        OSError: there is none.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(number, WHOLE_BYTES):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")
    finally:
        os.close(number)


def _opened(path: str) -> int:
    """A descriptor of a regular file; -1: there is none."""
    try:
        # Not to wait for the writer of a pipe that somebody put into a copy of a tree.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(number).st_mode):
        return number
    os.close(number)
    return -1


def number_of(text: str | None) -> int | None:
    """A counter's value; None for `N/A`, a negative or damaged one, and what a dead device answers."""
    if text is None or not _NUMBER.match(text):
        return None
    number = int(text)
    return None if number in DEAD or number >= ROUND**2 else number


def entries(folder: str) -> list[str]:
    """Names in it, sorted as people count (`mlx5_2` before `mlx5_10`); none if it is not there."""
    try:
        return sorted(os.listdir(folder), key=natural)
    except OSError:
        return []


def natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isascii() and p.isdecimal() else (1, 0, p) for p in parts]


class MonotonicCounters:
    """Totals by series. The first reading counts whole, for it is what was counted before anybody looked."""

    def __init__(self, num_series_max: int = NUM_SERIES_MAX) -> None:
        self._num_series_max = num_series_max
        self._newest: dict[Key, int] = {}
        self._before: dict[Key, int] = {}  # sum of all that was counted before the counter last began anew

    def forget(self, device: str) -> None:
        """All series whose key begins with it."""
        for known in (self._newest, self._before):
            for key in [key for key in known if key[0] == device]:
                del known[key]

    def add(self, key: Key, reading: int | None, *, anew: bool = False) -> int | None:
        """The total with this reading; that of before if there is none. None: nothing is known, or no room is left.

        `anew`: the device was loaded again since, so that a smaller number cannot be one that went round.
        """
        newest = self._newest.get(key)
        if reading is None:
            return None if newest is None else self._before.get(key, 0) + newest
        if newest is None:
            if len(self._newest) >= self._num_series_max:
                return None
        elif reading < newest:
            went_round = not anew and ROUND - NEAR <= newest < ROUND and reading < NEAR
            self._before[key] = self._before.get(key, 0) + (ROUND if went_round else newest)
        self._newest[key] = reading
        return self._before.get(key, 0) + reading
