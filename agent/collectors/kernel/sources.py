"""Sources of kernel messages: /dev/kmsg or a text log, each read from a cursor without blocking.

/dev/kmsg returns one record per read, from the oldest that the kernel still holds, with sequence numbers since boot. A
reader too slow for the ring gets EPIPE once and continues with the oldest record; the gap in the numbers is the count
of lost records. Numbers restart at each boot, so a cursor includes the boot ID (Documentation/ABI/testing/dev-kmsg).

A file is followed by inode and offset, with the last bytes before the offset: after a rename the rest of the old file
is read first, and a truncated file (copytruncate) is read from its beginning, even if it has grown beyond the offset
again."""

import contextlib
import ctypes
import errno
import logging
import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.formats.kernel_log.timestamps import KERNEL_FACILITY, LineReader, parse_record, wall_of_local

logger = logging.getLogger(__name__)

RECORD_BYTES_MAX = 8192
"""The kernel rejects (EINVAL) a buffer too short for the next record; CONSOLE_EXT_LOG_MAX is 8192."""
READ_BYTES_MAX = 128 << 10
"""Per read of a file."""
LOOKBACK_BYTES = 1 << 20
"""Read from the end of a file seen for the first time; older lines are ignored."""
LINE_BYTES_MAX = 64 << 10
"""An unterminated line is cut at this length."""
TAIL_BYTES = 64
NUM_SIBLINGS_MAX = 64
"""Rotated files searched for the one being read."""
IN_MODIFY, IN_CREATE, IN_MOVED_TO = 0x2, 0x100, 0x80
EVENTS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """A kernel message. `record`: its permanent ID (`<boot>:<sequence>` or `<inode>:<offset>`)."""

    message: str
    record: str
    uptime_seconds: float | None = None
    wall_at: float | None = None


class KernelLogSource(Protocol):
    """`num_lost`: lines overwritten before they could be read. `at_end`: the newest line has been read."""

    num_lost: int
    at_end: bool

    def poll(self) -> Iterator[KernelMessage | None]:
        """New lines, oldest first; None for each line that is not the kernel's. May be abandoned at any point: the next
        poll continues after the last line yielded. Raises CollectorUnavailable."""
        ...

    def wait(self, seconds: float) -> None:
        """Until there may be a new line, at most `seconds`; returns at once without change notification."""
        ...

    def cursor(self) -> dict[str, Any]:
        """Position after the last line yielded."""
        ...

    def close(self) -> None: ...


def source(path: Path, cursor: dict[str, Any], proc: Path = Path("/proc")) -> KernelLogSource:
    """The source for `path`. Raises CollectorUnavailable: it is missing or unusable."""
    try:
        mode = path.stat().st_mode
    except OSError as e:
        raise cannot_open(path, e) from None
    if stat.S_ISCHR(mode):
        return Kmsg(path, cursor, boot_id(proc))
    if stat.S_ISREG(mode):
        return LogFile(path, cursor)
    raise CollectorUnavailable(f"{path} is neither a device nor a file: name /dev/kmsg or a log file")


def boot_id(proc: Path = Path("/proc")) -> str:
    """Of the running kernel; empty if it cannot be read."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()[:64]
    except OSError:
        return ""


def cannot_open(path: Path, error: OSError) -> CollectorUnavailable:
    """The reason and how to fix it."""
    if error.errno in (errno.EACCES, errno.EPERM):
        how = "run the agent with CAP_SYSLOG (or set kernel.dmesg_restrict=0)"
        if path != Path("/dev/kmsg"):
            how = "put the agent's user into the group that may read it (adm on Debian and Ubuntu)"
        return CollectorUnavailable(f"{path}: no permission: {how}")
    if error.errno == errno.ENOENT:
        return CollectorUnavailable(f"{path} does not exist: name the kernel log, or give the container /dev/kmsg")
    return CollectorUnavailable(f"{path}: {os.strerror(error.errno or 0)}")


class Kmsg:
    """/dev/kmsg."""

    def __init__(
        self,
        path: Path,
        cursor: dict[str, Any],
        boot: str,
        *,
        open_: Callable[[Path, int], int] = os.open,
        read: Callable[[int, int], bytes] = os.read,
        close: Callable[[int], None] = os.close,
    ) -> None:
        self._path, self._boot = path, boot
        self._open, self._read, self._close = open_, read, close
        same_boot = cursor.get("boot_id") == boot and type(cursor.get("next")) is int
        self._next: int | None = cursor["next"] if same_boot else None  # None: start with the oldest record
        self._newest = -1  # since the device was opened
        self._descriptor = -1
        self.num_lost = 0
        self.at_end = False

    def poll(self) -> Iterator[KernelMessage | None]:
        self.at_end = False
        if self._descriptor < 0:
            try:
                self._descriptor = self._open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as e:
                raise cannot_open(self._path, e) from None
            self._newest = -1
        while True:
            try:
                raw = self._read(self._descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                self.at_end = self._cursor_is_valid()
                return
            except BrokenPipeError:
                continue  # overrun: the gap in the numbers gives the count
            except OSError as e:
                self.close()
                raise cannot_open(self._path, e) from None
            if not raw:  # never from a device; avoids an endless loop
                return
            yield self._line(raw)

    def _line(self, raw: bytes) -> KernelMessage | None:
        record = parse_record(raw.decode("utf-8", "replace"))
        if record is None:
            return None
        self._newest = record.sequence
        if self._next is not None:
            if record.sequence < self._next:
                return None  # read before the restart
            self.num_lost += record.sequence - self._next
        self._next = record.sequence + 1
        if record.facility != KERNEL_FACILITY:
            return None
        return KernelMessage(
            record.message, f"{self._boot[:8]}:{record.sequence}", uptime_seconds=record.uptime_seconds
        )

    def _cursor_is_valid(self) -> bool:
        """A cursor beyond the newest record is from another boot: then everything is read again."""
        if self._next is None or not 0 <= self._newest < self._next - 1:
            return True
        self._next = None
        self.close()
        return False

    def wait(self, seconds: float) -> None:
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll(seconds * 1000)

    def cursor(self) -> dict[str, Any]:
        return {} if self._next is None else {"boot_id": self._boot, "next": self._next}

    def close(self) -> None:
        if self._descriptor >= 0:
            self._close(self._descriptor)
            self._descriptor = -1


class FileChanges:
    """Waits until a file grows or is replaced: inotify(7), which the standard library lacks. Polling a quiet log five
    times a second costs more than reading all its lines.

    Watches the file open as `descriptor` and the folder of `path`. Close it before following another file.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        """Raises OSError: no watch available (the kernel limits them per user)."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        # Via /proc: the path may already name another file.
        watched = ((f"/proc/self/fd/{descriptor}", IN_MODIFY), (os.fspath(path.parent), IN_CREATE | IN_MOVED_TO))
        for name, events in watched:
            if libc.inotify_add_watch(self._inotify, os.fsencode(name), events) < 0:
                error = ctypes.get_errno()
                self.close()
                raise OSError(error, "inotify_add_watch")

    def wait(self, seconds: float) -> None:
        """Until something has changed since the last call, or for `seconds`."""
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        if poll.poll(seconds * 1000):
            with contextlib.suppress(BlockingIOError):  # drained; the events' content does not matter
                while os.read(self._inotify, EVENTS_BYTES):
                    pass

    def close(self) -> None:
        os.close(self._inotify)


class LogFile:
    """A text log, followed across renames and truncations."""

    def __init__(self, path: Path, cursor: dict[str, Any]) -> None:
        self._path = path
        self._lines = LineReader()
        self._descriptor = -1
        self._inode, self._offset, self._tail = 0, 0, b""  # tail: bytes before the offset
        self._cursor = cursor
        self._changes: FileChanges | None = None
        self._can_watch = True  # False: the kernel has no free watch, and only the collector's polling interval remains
        self.num_lost = 0  # unknown for a file
        self.at_end = False

    def poll(self) -> Iterator[KernelMessage | None]:
        self.at_end = False
        if self._descriptor < 0:
            self._begin()
        try:
            while True:
                # Checked first, so that lines written to the old file before the switch are still read.
                replaced = self._replaced()
                yield from self._rest(whole=replaced)
                if not replaced:
                    break
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self.close()
                self._take(descriptor, 0, b"")
        except FileNotFoundError:
            return  # rotated again just now
        except OSError as e:
            self.close()
            raise cannot_open(self._path, e) from None
        self.at_end = True

    def _begin(self) -> None:
        """Opens the file that was being read, under its current name; else the one at the path."""
        inode, offset, tail = _checked(self._cursor)
        if inode:
            for file in (self._path, *self._siblings()):
                try:
                    if os.stat(file).st_ino != inode:
                        continue
                    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    continue  # rotated again just now
                if _before(descriptor, offset, len(tail)) == tail:
                    self._take(descriptor, offset, tail)
                    return
                os.close(descriptor)
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise cannot_open(self._path, e) from None
        self._take(descriptor, 0, b"")
        size = os.fstat(descriptor).st_size
        if not inode and size > LOOKBACK_BYTES:
            self._offset = size - LOOKBACK_BYTES
            start = os.pread(descriptor, LINE_BYTES_MAX, self._offset)
            self._advance(start, start.find(b"\n") + 1)

    def _siblings(self) -> list[Path]:
        """`kern.log.1`, `kern.log-20261122`; compressed ones have another inode."""
        try:
            names = os.listdir(self._path.parent)
        except OSError:
            return []
        rotated = sorted(n for n in names if n.startswith((f"{self._path.name}.", f"{self._path.name}-")))
        return [self._path.parent / n for n in rotated[:NUM_SIBLINGS_MAX]]

    def _take(self, descriptor: int, offset: int, tail: bytes) -> None:
        self._descriptor, self._inode = descriptor, os.fstat(descriptor).st_ino
        self._offset, self._tail = offset, tail

    def _replaced(self) -> bool:
        """Whether the path names another, non-empty file: until then the writer may still use the old one."""
        try:
            now = os.stat(self._path)
        except OSError:
            return False  # between rename and creation there is none
        return now.st_ino != self._inode and now.st_size > 0

    def _rest(self, whole: bool) -> Iterator[KernelMessage | None]:
        """Lines from the offset to the end of this file. `whole`: also an unterminated last line."""
        status = os.fstat(self._descriptor)
        if status.st_size == self._offset:
            return
        if status.st_size < self._offset or _before(self._descriptor, self._offset, len(self._tail)) != self._tail:
            self._offset, self._tail = 0, b""  # truncated, and perhaps rewritten
        while raw := os.pread(self._descriptor, READ_BYTES_MAX, self._offset):
            chunk_at, begin = self._offset, 0
            unfinished_counts = whole and len(raw) < READ_BYTES_MAX
            while begin < len(raw):
                end = raw.find(b"\n", begin) + 1
                if not end:
                    cut = min(len(raw), begin + LINE_BYTES_MAX)
                    if cut - begin < LINE_BYTES_MAX and not unfinished_counts:
                        break
                    end = cut
                line = self._line(raw[begin:end], chunk_at + begin, status.st_mtime)
                self._advance(raw, end, chunk_at)
                begin = end
                yield line
            if begin == 0:
                return  # the last line is not finished

    def _line(self, raw: bytes, offset: int, written_at: float) -> KernelMessage | None:
        stamped = self._lines.take(raw.decode("utf-8", "replace"))
        if stamped is None:
            return None
        wall_at = stamped.wall_at
        if stamped.local is not None:
            # The node's log uses the node's time zone.
            zone_seconds = time.localtime(written_at).tm_gmtoff
            in_zone = wall_of_local(stamped.local, written_at + zone_seconds)
            wall_at = None if in_zone is None else in_zone - zone_seconds
        return KernelMessage(stamped.message, f"{self._inode}:{offset}", stamped.uptime_seconds, wall_at)

    def _advance(self, raw: bytes, end: int, raw_at: int | None = None) -> None:
        """Moves after `raw[:end]`, which begins at `raw_at` (default: the offset)."""
        start = self._offset if raw_at is None else raw_at
        self._tail = (
            raw[end - TAIL_BYTES : end] if end >= TAIL_BYTES else _before(self._descriptor, start + end, TAIL_BYTES)
        )
        self._offset = start + end

    def wait(self, seconds: float) -> None:
        if self._changes is not None:
            self._changes.wait(seconds)
        elif self._descriptor >= 0 and self._can_watch:
            try:
                # Changes from before the watch are not notified: no wait this time.
                self._changes = FileChanges(self._descriptor, self._path)
            except OSError as e:
                logger.info("%s: no change notification, polling instead: %s", self._path, e)
                self._can_watch = False

    def cursor(self) -> dict[str, Any]:
        if not self._inode:
            return self._cursor
        return {"inode": self._inode, "offset": self._offset, "tail": self._tail.hex()}

    def close(self) -> None:
        if self._descriptor >= 0:
            self._cursor = self.cursor()
            os.close(self._descriptor)
            self._descriptor = -1
        if self._changes is not None:
            self._changes.close()
            self._changes = None
        self._can_watch = True


def _before(descriptor: int, offset: int, num: int) -> bytes:
    """At most `num` bytes before `offset`."""
    start = max(0, offset - num)
    return os.pread(descriptor, offset - start, start)


def _checked(cursor: dict[str, Any]) -> tuple[int, int, bytes]:
    """(inode, offset, bytes before it); inode 0: no valid cursor."""
    inode, offset, tail = cursor.get("inode"), cursor.get("offset"), cursor.get("tail")
    if type(inode) is not int or type(offset) is not int or offset < 0 or not isinstance(tail, str):
        return 0, 0, b""
    try:
        return inode, offset, bytes.fromhex(tail)
    except ValueError:
        return 0, 0, b""
