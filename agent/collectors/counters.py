"""Kernel counters as Prometheus counters: read cheaply, and never decreasing.

A sysfs file holds one number or `N/A`, or is unreadable; a reloaded driver restarts at 0; 32-bit counters wrap. The
exported total continues across both.
"""

import os
import re
import stat
from collections.abc import Container
from pathlib import Path

from rolecall.core.proc_stat import STAT_BYTES_MAX, Stat, parse_stat

TEXT_BYTES_MAX = 4096
"""A sysfs file has at most one page."""
WHOLE_BYTES = 1 << 16
_NUMBER = re.compile(r"[0-9]{1,20}\Z")
NUM_OPEN_MAX = 256
"""Files kept open by one collector; a process may have 1,024 descriptors by default."""
DEAD = frozenset({2**64 - 1})
"""All ones: the reading of a device that fell off the bus."""
ROUND = 1 << 32
NEAR = ROUND >> 2
"""A counter wrapped, rather than restarted, if it was this close below 2^32 and is now this close above 0.
No counter grows by a quarter of 2^32 between two polls, and a driver reload at that moment is unlikely."""
NUM_SERIES_MAX = 16_384
"""Per collector: 64 ports of 128 counters are half of it."""

Key = tuple[str, ...]


class OpenFileCache:
    """Keeps frequently read small files open: one system call per read instead of four. An open sysfs file whose device
    is gone returns an error, even if a new device has the same name; it is then reopened. One thread uses it."""

    def __init__(self, num_max: int = NUM_OPEN_MAX) -> None:
        self._num_max = num_max
        self._open: dict[str, int] = {}

    def text(self, path: str) -> str | None:
        """The file's text, stripped; None: missing, not a regular file, or unreadable."""
        kept = self._open.get(path)
        if kept is not None:
            try:
                return os.pread(kept, TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
            except OSError:
                os.close(self._open.pop(path))
        try:
            # O_NONBLOCK: a copied tree may contain a pipe, whose open would block.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            return None
        try:
            text = os.pread(number, TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
        except OSError:
            os.close(number)
            return None  # EINVAL (a link that is down has no speed), ENODEV (the device disappeared)
        if len(self._open) < self._num_max:
            self._open[path] = number
        else:
            os.close(number)
        return text

    def number(self, path: str) -> int | None:
        return number_of(self.text(path))

    def forget(self, folder: str) -> None:
        """Closes the files of a device that disappeared or was replaced."""
        for path in [p for p in self._open if p.startswith(f"{folder}/")]:
            os.close(self._open.pop(path))

    def close(self) -> None:
        for number in self._open.values():
            os.close(number)
        self._open.clear()


def read_whole(path: str) -> str:
    """A /proc file of any length, at a fifth of the cost of `Path.read_text`. Raises OSError: it cannot be read."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return whole(number)
    finally:
        os.close(number)


def whole(number: int) -> str:
    """The same of an open file, from its beginning."""
    parts, offset = [], 0
    while part := os.pread(number, WHOLE_BYTES, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts).decode("utf-8", "replace")


def read_at_most(path: str, bytes_max: int) -> bytes:
    """At most `bytes_max` of a file; empty if it is missing or unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        parts, left = [], bytes_max
        while left > 0 and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def stat_of(proc: Path | str, pid: int) -> Stat | None:
    """None: it is gone, or unreadable."""
    try:
        return parse_stat(read_at_most(f"{proc}/{pid}/stat", STAT_BYTES_MAX))
    except ValueError:
        return None


def variables(environ: bytes, names: Container[str]) -> dict[str, str]:
    """Those of `names` in the text of `/proc/PID/environ`."""
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in environ.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals and name in names}


def number_of(text: str | None) -> int | None:
    """A counter's value; None for `N/A`, a negative or malformed number, and the reading of a dead device."""
    if text is None or not _NUMBER.match(text):
        return None
    number = int(text)
    return None if number in DEAD or number >= ROUND**2 else number


def natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isascii() and p.isdecimal() else (1, 0, p) for p in parts]


class MonotonicCounters:
    """Totals by series. The first reading is taken as the initial total."""

    def __init__(self, num_series_max: int = NUM_SERIES_MAX) -> None:
        self._num_series_max = num_series_max
        self._newest: dict[Key, int] = {}
        self._before: dict[Key, int] = {}  # total before the counter's last restart

    def forget(self, device: str) -> None:
        """Drops all series whose key begins with `device`."""
        for known in (self._newest, self._before):
            for key in [key for key in known if key[0] == device]:
                del known[key]

    def add(self, key: Key, reading: int | None, *, reloaded: bool = False) -> int | None:
        """The new total; without a reading the previous one; None: unknown. `reloaded`: a decrease is a restart."""
        newest = self._newest.get(key)
        if reading is None:
            return None if newest is None else self._before.get(key, 0) + newest
        if newest is None:
            if len(self._newest) >= self._num_series_max:
                return None
        elif reading < newest:
            wrapped = not reloaded and ROUND - NEAR <= newest < ROUND and reading < NEAR
            self._before[key] = self._before.get(key, 0) + (ROUND if wrapped else newest)
        self._newest[key] = reading
        return self._before.get(key, 0) + reading
