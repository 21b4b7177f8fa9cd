"""The user's reward function in a child process of the reward worker (`user_process.py`).

None of its failures is ever a reward.
"""

import asyncio
from collections.abc import Sequence
from copy import deepcopy
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
        rewards: list[float] = self._answer(list(group), f"{len(group)} samples")
        return rewards

    def needs(self) -> frozenset[str]:
        """Fields of `Answer` that the function takes without a default.

        Raises:
            RewardFailed: the process ended.
            ConfigError: the function cannot be used.
        """
        found: frozenset[str] = self._answer(None, "its parameters")
        return found

    def _answer(self, question: list[Answer] | None, what: str) -> Any:
        self._send(question)
        kind, answer = self._receive(self._config.timeout_seconds, what)
        if kind:
            raise RewardFailed(kind=kind, because=answer)
        return answer


def _serve(connection: Connection, name: str) -> None:
    with asyncio.Runner() as runner:  # one loop for all groups: a function may keep locks and connections
        try:
            score = load_scorer(name, runner.run)
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
                # The samples of a group share what their row holds, and a function may change what it gets.
                answer: tuple[str, Any] = "", score.needs if group is None else score(list(map(deepcopy, group)))
            except Exception as e:  # noqa: BLE001 deliberate: the user's code may raise anything, and it is reported
                answer = type(e).__name__, f"{type(e).__name__}: {e}"
            connection.send(answer)
