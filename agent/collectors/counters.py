"""Counters of the kernel, made fit to be exposed: read without harm, and never falling.

A text file of sysfs holds one number, or `N/A`, or cannot be read; a driver that was loaded again begins at 0; counters
of 32 bits go round. What is exposed goes on from where it was: a total.
"""

import os
import re
import stat

TEXT_BYTES_MAX = 4096
"""Sysfs gives at most one page."""
_NUMBER = re.compile(r"[0-9]{1,20}\Z")
DEAD = frozenset({2**64 - 1})
"""All ones: what a device that left the bus answers."""
ROUND = 1 << 32
NEAR = ROUND >> 2
"""A counter has gone round, and did not begin anew, if it was this close below 2^32 and is now this close above 0.
Between two looks nothing counts a quarter of 2^32, and a driver is rarely loaded just then."""
NUM_SERIES_MAX = 16_384
"""Remembered by one collector: 64 ports of 128 counters are half of it."""

Key = tuple[str, ...]


def read_text(path: str) -> str | None:
    """The file's text without white space at its ends; None: not there, no file, or it refuses to be read."""
    try:
        # Not to wait for the writer of a pipe that somebody put into a copy of a tree.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return None
        return os.read(number, TEXT_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError:
        return None  # EINVAL (a link that is down has no speed), ENODEV (the device went while it was read)
    finally:
        os.close(number)


def number_of(text: str | None) -> int | None:
    """A counter's value; None for `N/A`, a negative or damaged one, and what a dead device answers."""
    if text is None or not _NUMBER.match(text):
        return None
    number = int(text)
    return None if number in DEAD or number >= ROUND**2 else number


def read_number(path: str) -> int | None:
    return number_of(read_text(path))


def entries(folder: str) -> list[str]:
    """Names in it, sorted as people count (`mlx5_2` before `mlx5_10`); none if it is not there."""
    try:
        return sorted(os.listdir(folder), key=natural)
    except OSError:
        return []


def natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isascii() and p.isdecimal() else (1, 0, p) for p in parts]


class Totals:
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
