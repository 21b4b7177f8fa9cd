"""The user's reward function in a child process of the reward worker.

Its exceptions, endless loops and crashes stay there: at the deadline the child is killed with all that it started, and
a new one serves the next group. None of these is ever a reward.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rolecall.core.config.data import RewardConfig
from rolecall.core.errors import ConfigError, RewardFailed
from rolecall.rl_runtime.tasks.rewards.functions import Answer, load_scorer

START_SECONDS = 120.0
"""For the imports of the user's module."""
END_SECONDS = 5.0


class RewardProcess:
    """One child, started at the first use. Not for several threads."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int:
        """Of the child; 0 before it is started."""
        return 0 if self._process is None else int(self._process.pid)

    def start(self) -> None:
        """Starts the child and waits until the function is imported.

        Raises:
            ConfigError: the function cannot be used.
            RewardFailed: the child died, or its imports took too long.
        """
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon, which may have no children: functions that run code start processes.
        self._process = context.Process(target=_serve, args=(theirs, self._config.function))
        self._process.start()
        atexit.register(self.close)
        theirs.close()
        problem = self._receive(START_SECONDS, "its imports")
        if problem is not None:
            self.close()
            raise ConfigError([problem])

    def score(self, group: Sequence[Answer]) -> list[float]:
        """One reward per sample.

        Raises:
            RewardFailed: the function raised, took longer than the deadline, or ended its process.
            ConfigError: the function cannot be used.
        """
        self.start()
        assert self._connection is not None
        try:
            self._connection.send(list(group))
        except OSError as e:
            raise self._ended() from e
        kind, answer = self._receive(self._config.timeout_seconds, f"{len(group)} samples")
        if kind:
            raise RewardFailed(kind=kind, because=answer)
        rewards: list[float] = answer
        return rewards

    def close(self) -> None:
        """Ends the child. Idempotent."""
        atexit.unregister(self.close)
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has its own group from its first line on
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join(END_SECONDS)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _receive(self, seconds: float, what: str) -> Any:
        assert self._connection is not None
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError) as e:
            raise self._ended() from e
        self.close()
        because = f"no answer within {seconds:g} s ({what}); its process was ended"
        raise RewardFailed(kind="no answer in time", because=because)

    def _ended(self) -> RewardFailed:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        self.close()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RewardFailed(kind=f"its process ended ({how})", because=f"its process ended ({how})")


def _end_with_parent() -> None:
    """A killed reward worker closes nothing: without this, an endless loop of the user's code would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection, name: str) -> None:
    os.setsid()  # also: Ctrl-C is for the supervisor, which ends the run in order
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        score = load_scorer(name)
    except ConfigError as e:
        connection.send(str(e))
        return
    connection.send(None)
    while True:
        try:
            group = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = "", score(group)
        except Exception as e:  # noqa: BLE001 deliberate: the user's code may raise anything, and it is reported
            answer = type(e).__name__, f"{type(e).__name__}: {e}"
        connection.send(answer)
