"""The user's code in a child process of the reward worker.

Its exceptions, endless loops and crashes stay there: at a deadline the child is killed with all that it started, and a
new one serves what comes next.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rolecall.core.errors import ConfigError, RewardFailed

START_SECONDS = 120.0
"""For the imports of the user's module."""
END_SECONDS = 5.0
SEND_SECONDS = 60.0
"""Until a child that reads nothing, because the user's code in it hangs, is killed: a long question fills its pipe."""


class UserProcess:
    """One child, started at the first use. Not for several threads."""

    def __init__(
        self,
        serve: Callable[[Connection, str], None],
        name: str,
        failed: Callable[..., RewardFailed] = RewardFailed,
    ) -> None:
        """`serve` runs in the child: it sends None once it has imported `name`, or why it cannot. `failed`: makes the
        error for a failure of the child, from `kind` and `because`.
        """
        self._serve, self._name, self._failed = serve, name, failed
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int:
        """Of the child; 0 before it is started."""
        return 0 if self._process is None else int(self._process.pid)

    def start(self) -> None:
        """Starts the child and waits until the user's code is imported.

        Raises:
            ConfigError: it cannot be used.
            RewardFailed: the child died, or its imports took too long.
        """
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon, which may have no children: functions that run code start processes.
        self._process = context.Process(target=_run, args=(self._serve, theirs, self._name))
        self._process.start()
        atexit.register(self.close)
        theirs.close()
        problem = self._receive(START_SECONDS, "its imports")
        if problem is not None:
            self.close()
            raise ConfigError([problem])

    def close(self) -> None:
        """Ends the child. Idempotent."""
        atexit.unregister(self.close)
        if self._process is not None:
            self._kill()
            self._process.join(END_SECONDS)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has its own group from its first line on
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _send(self, value: Any) -> None:
        self.start()
        assert self._connection is not None
        deadline = threading.Timer(SEND_SECONDS, self._kill)
        deadline.daemon = True
        deadline.start()
        try:
            self._connection.send(value)
        except OSError as e:
            raise self._ended() from e
        finally:
            deadline.cancel()

    def _receive(self, seconds: float, what: str) -> Any:
        assert self._connection is not None
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError) as e:
            raise self._ended() from e
        self.close()
        because = f"no answer within {seconds:g} s ({what}); its process was ended"
        raise self._failed(kind="no answer in time", because=because)

    def _ended(self) -> RewardFailed:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        self.close()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return self._failed(kind=f"its process ended ({how})", because=f"its process ended ({how})")


def _end_with_parent() -> None:
    """A killed reward worker closes nothing: without this, an endless loop of the user's code would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _run(serve: Callable[[Connection, str], None], connection: Connection, name: str) -> None:
    os.setsid()  # also: Ctrl-C is for the supervisor, which ends the run in order
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(connection, name)
