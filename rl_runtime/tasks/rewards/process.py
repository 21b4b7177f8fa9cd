"""The user's reward function in a child process of the reward worker (`user_process.py`).

None of its failures is ever a reward.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rolecall.core.config.data import RewardConfig
from rolecall.core.errors import ConfigError, RewardFailed
from rolecall.rl_runtime.tasks.rewards.functions import Answer, load_scorer
from rolecall.rl_runtime.tasks.user_process import UserProcess


class RewardProcess(UserProcess):
    """One child, started at the first use. Not for several threads."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(_serve, config.function)
        self._config = config

    def score(self, group: Sequence[Answer]) -> list[float]:
        """One reward per sample.

        Raises:
            RewardFailed: the function raised, took longer than the deadline, or ended its process.
            ConfigError: the function cannot be used.
        """
        self._send(list(group))
        kind, answer = self._receive(self._config.timeout_seconds, f"{len(group)} samples")
        if kind:
            raise RewardFailed(kind=kind, because=answer)
        rewards: list[float] = answer
        return rewards


def _serve(connection: Connection, name: str) -> None:
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
