"""Waits until a file grows or is replaced: inotify(7), which the standard library lacks.

For following a log: polling a quiet log five times a second costs more than reading all its lines.
"""

import ctypes
import os
import select
from pathlib import Path

IN_MODIFY, IN_CREATE, IN_MOVED_TO = 0x2, 0x100, 0x80
EVENTS_BYTES = 4096


class FileChanges:
    """Watches the file open as `descriptor` and the folder of `path`. Close it before following another file."""

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
            try:
                while os.read(self._inotify, EVENTS_BYTES):
                    pass
            except BlockingIOError:
                pass  # drained; the events' content does not matter

    def close(self) -> None:
        os.close(self._inotify)
