"""Guess a number: the environment says whether it is higher or lower, and the model guesses again.

The number comes from `seed`, so all samples of a prompt group look for the same one, and a conversation whose process
was lost can be replayed.
"""

import random
import re

from rolecall.environment import Step

HIGHEST = 20


class GuessTheNumber:
    """One conversation. Reward: 1 for the number, less 0.1 for each guess before; -0.2 for an answer without one."""

    async def reset(self, seed: int) -> None:
        self._number = random.Random(seed).randint(1, HIGHEST)
        self._guesses = 0

    async def step(self, response: str) -> Step:
        found = re.findall(r"\d+", response)
        if not found:
            return Step(f"Answer with a number from 1 to {HIGHEST}.", reward=-0.2)
        guess = int(found[-1])
        if guess == self._number:
            return Step("Right.", reward=max(0.0, 1.0 - 0.1 * self._guesses), done=True)
        self._guesses += 1
        return Step("Higher." if guess < self._number else "Lower.")
