"""Answers, log-probabilities and rewards of a simulated fleet, all functions of the seed: a lost or doubled token shows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rolecall.rl_runtime.algorithms.sampler import request_seed
from rolecall.rl_runtime.controller.evaluation import held_out_seed
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION
from rolecall.rl_runtime.tasks.task import group_number, held_out_of, is_held_out

MAX_NEW_TOKENS = 16


def expected_tokens(seed: int, longest: int = MAX_NEW_TOKENS, *, long_tail: bool = False) -> tuple[int, ...]:
    """The answer of every engine for a seed, from any prefix: a lost or doubled token is visible.

    `long_tail`: as many lengths between 1 and 2 as between 2 and 4, and so on up to `longest`.
    """
    rng = random.Random(f"tokens/{seed}")
    count = int(longest ** rng.random()) if long_tail else rng.randrange(1, longest + 1)
    return tuple(rng.randrange(3, 16) for _ in range(count))


def expected_reward(tokens: Sequence[int]) -> float:
    return sum(tokens) / (16.0 * MAX_NEW_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedResponses:
    """The fake model's answer to each prompt and its reward: deterministic functions of the seed."""

    longest: int = MAX_NEW_TOKENS
    long_tail: bool = False
    right_below: int | None = None
    """None: rewards are graded. Otherwise an answer is exact (1.0) if its last token, one of 3 to 15, is below this,
    and wrong (0.0) if not."""

    def tokens(self, seed: int) -> tuple[int, ...]:
        return expected_tokens(seed, self.longest, long_tail=self.long_tail)

    def written(self, seed: int) -> set[int]:
        return set()

    def turn_end(self, seed: int, start: int) -> int:
        """Where the turn ends that goes on at `start`."""
        return len(self.tokens(seed))

    def reward(self, tokens: Sequence[int]) -> float:
        return expected_reward(tokens) if self.right_below is None else float(tokens[-1] < self.right_below)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConversations(ScriptedResponses):
    """Conversations with an environment: an opening, then turns of the model with an observation between two."""

    max_turns: int = 3

    def parts(self, seed: int) -> list[tuple[int, ...]]:
        """Observation, turn, observation, ..., turn; without a limit of tokens."""
        rng = random.Random(f"turns/{seed}")

        def words(longest: int) -> tuple[int, ...]:
            return tuple(rng.randrange(3, 16) for _ in range(rng.randint(1, longest)))

        return [words(2 if n % 2 == 0 else 5) for n in range(2 * rng.randint(1, self.max_turns))]

    def tokens(self, seed: int) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for n, part in enumerate(self.parts(seed)):
            if n % 2 == 0 and len(found) + len(part) >= self.longest:
                break
            found = (*found, *part)[: self.longest]
        return found

    def written(self, seed: int) -> set[int]:
        """Positions of the environment's tokens."""
        ends = [0, *accumulate(map(len, self.parts(seed)))]
        return {at for n in range(0, len(ends) - 1, 2) for at in range(ends[n], ends[n + 1])}

    def turn_end(self, seed: int, start: int) -> int:
        return min((at for at in self.written(seed) if at >= start), default=len(self.tokens(seed)))

    def observation(self, seed: int, start: int) -> tuple[int, ...] | None:
        """What the environment says behind `start` tokens; None: it is done."""
        starts = [0, *accumulate(map(len, self.parts(seed)))]
        number = starts.index(start)
        return None if number + 1 == len(starts) else self.parts(seed)[number]


def expected_logprob(version: int, position: int) -> float:
    """Log-probability of the token at `position`, the same on every engine; it encodes version and position. 0: the
    environment's."""
    if version == ENVIRONMENT_VERSION:
        return 0.0
    return -1.0 - version / 1000.0 - position / 1_000_000.0


def request_seed_of(job_seed: int, request_id: str) -> int:
    group, _, sample = request_id.rpartition(".")
    if is_held_out(group):
        return held_out_seed(job_seed, held_out_of(group)[1], int(sample))
    return request_seed(job_seed, group_number(group), int(sample))
