"""Turns of environments: a reward worker's environment answers conversations whose model has ended its turn.

An answer depends on the conversation alone: its row, its seed and its tokens so far. Any worker can therefore give it.
One that has the conversation's live environment does at once; another one replays the conversation first. All
conversations of a group go to one worker while it answers them.

A failure is never an observation or a reward: the conversation is tried again, elsewhere if there is another worker,
and after `attempts` failures its group is dropped with the reason. A failure of a call with several conversations that
none of them has by itself (their process ended) counts against none: each is tried again alone.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from rolecall.core.config.data import EnvironmentConfig
from rolecall.core.errors import DeadlineExceeded
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.controller.background_tasks import RETRY_SECONDS
from rolecall.rl_runtime.controller.trajectories import EngineKey, TrajectoryTable
from rolecall.rl_runtime.protocol.clients import ReplicaExited, RewardPort
from rolecall.rl_runtime.protocol.messages import Conversation, Observation

logger = logging.getLogger(__name__)

CONVERSATIONS_PER_CALL: Final = 16
LOSSES_MAX: Final = 3
"""Workers that died while answering one conversation alone: after three, it is considered the cause."""
NO_ROOM: Final = "its first observation leaves no room for an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """`seconds`: of one call, beside those of its conversations. `turn_seconds`: of one call of the environment."""

    seconds: float
    turn_seconds: float
    max_turns: int
    attempts: int

    @classmethod
    def of(cls, environment: EnvironmentConfig, seconds: float) -> "TurnLimits":
        return cls(
            seconds=seconds,
            turn_seconds=environment.timeout_seconds,
            max_turns=environment.max_turns,
            attempts=environment.attempts,
        )

    def turn_call_seconds(self, conversations: int) -> float:
        """One call of each environment, and the replay of one. With less than that each is tried alone."""
        return self.seconds + (conversations + self.max_turns) * self.turn_seconds

    def replay_seconds(self, conversations: int) -> float:
        """All are replayed from their start, one after the other."""
        return self.seconds + conversations * (self.max_turns + 1) * self.turn_seconds


class Conversations:
    """Which worker answers which conversation, and what follows from its answers."""

    def __init__(
        self, table: TrajectoryTable, limits: TurnLimits, drop: Callable[[GroupId, str], None], wake: Callable[[], None]
    ) -> None:
        """`drop`: a group, with the reason. `wake`: conversations go on, or are finished."""
        self._table, self._limits, self._drop, self._wake = table, limits, drop, wake
        self._workers: dict[GroupId, EngineKey] = {}
        self._under_way: set[str] = set()
        self._alone: set[str] = set()
        self._failed_at: dict[str, list[EngineKey]] = defaultdict(list)
        self._losses: Counter[str] = Counter()

    def belongs_to(self, group_id: GroupId, key: EngineKey, workers: Collection[EngineKey]) -> bool:
        """Whether no other worker has the group's live environments."""
        worker = self._workers.get(group_id, key)
        return worker == key or worker not in workers

    def release(self, group_id: GroupId) -> None:
        """Any worker may have the group next."""
        self._workers.pop(group_id, None)

    def take(self, key: EngineKey, workers: Collection[EngineKey]) -> list[Conversation]:
        """Conversations for one of the `workers`; one that failed there is left to others, if any."""
        self._workers = {g: k for g, k in self._workers.items() if g in self._table.groups and k in workers}
        open_ones = [t.as_conversation() for t in self._table.awaiting()]
        self._forget_others({c.request_id for c in open_ones})
        awaiting = [c for c in open_ones if c.request_id not in self._under_way]
        free = [
            c
            for c in awaiting
            if self._workers.get(c.group_id, key) == key
            and not (len(workers) > 1 and self._failed_at.get(c.request_id, [])[-1:] == [key])
        ]
        alone = [c for c in free if c.request_id in self._alone]
        taken = alone[:1] or free[:CONVERSATIONS_PER_CALL]
        self._workers.update((c.group_id, key) for c in taken)
        return taken

    async def answer(self, port: RewardPort, key: EngineKey, asked: Sequence[Conversation]) -> None:
        """Asks the worker, and adds what its environments answer.

        Raises:
            ReplicaExited, DeadlineExceeded: of the worker; the conversations are free for others.
        """
        ids = [c.request_id for c in asked]
        self._under_way.update(ids)
        try:
            answers = await port.observe(asked, self._limits.turn_call_seconds(len(asked)))
            if len(answers) != len(asked):
                raise ValueError(f"{len(answers)} answers for {len(asked)} conversations")
        except ReplicaExited as e:
            self._alone.update(ids)
            if len(asked) == 1:
                self._losses[ids[0]] += 1
                if self._losses[ids[0]] >= LOSSES_MAX:
                    self._give_up(asked[0], f"{LOSSES_MAX} workers died with it, last: {e.because}")
            raise
        except Exception as e:
            name = type(e).__name__
            logger.warning("%s#%d: its environments failed: %s: %s", *key, name, e)
            for c in asked:
                self._failed(c, key, Observation(failure=name, is_alone=len(asked) == 1))
            if isinstance(e, DeadlineExceeded):
                raise
            await asyncio.sleep(RETRY_SECONDS)
        else:
            for c, answer in zip(asked, answers, strict=True):
                self._take(c, key, answer)
            if any(answer.failure for answer in answers):
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._under_way.difference_update(ids)
            self._wake()

    def _take(self, asked: Conversation, key: EngineKey, answer: Observation) -> None:
        if not self._table.is_current(asked):
            return
        if answer.failure:
            logger.warning("%s#%d: environment of %s: %s", *key, asked.request_id, answer.failure)
            self._failed(asked, key, answer)
            return
        self._clear(asked.request_id)
        end = self._table.observe(asked, answer)
        if end is not None and not asked.tokens:
            self._give_up(asked, NO_ROOM)

    def _failed(self, asked: Conversation, key: EngineKey, answer: Observation) -> None:
        if not self._table.is_current(asked):  # its group was dropped for another conversation
            return
        self.release(asked.group_id)
        if not answer.is_alone:
            self._alone.add(asked.request_id)
            return
        self._failed_at[asked.request_id].append(key)
        if answer.is_final or len(self._failed_at[asked.request_id]) >= self._limits.attempts:
            self._give_up(asked, answer.failure)

    def _give_up(self, asked: Conversation, reason: str) -> None:
        self._clear(asked.request_id)
        self._drop(asked.group_id, f"environment_failed: {reason}")

    def _forget_others(self, awaiting: Collection[str]) -> None:
        """Of dropped groups."""
        for request_id in (self._alone | self._failed_at.keys() | self._losses.keys()).difference(awaiting):
            self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        self._failed_at.pop(request_id, None)
        self._losses.pop(request_id, None)
        self._alone.discard(request_id)
