"""Waits until a file grows or another comes under its name: inotify(7), which Python's library does not have.

For who follows a log: looking five times a second costs more than all the lines of a quiet one.
"""

import ctypes
import os
import select
from pathlib import Path

IN_MODIFY, IN_CREATE, IN_MOVED_TO = 0x2, 0x100, 0x80
EVENTS_BYTES = 4096


class FileChanges:
    """Of the file open as `descriptor`, and of the folder that holds `path`. Close it when another file is followed."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Raises OSError: the kernel gives no watch (there is a number of them for each user)."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        # The descriptor's own name in /proc: under the path another file may stand by now.
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
                pass  # all are read: what they say does not matter, the file does

    def close(self) -> None:
        os.close(self._inotify)
