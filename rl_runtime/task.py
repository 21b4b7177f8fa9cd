"""Verifiable tasks: prompts made from (seed, group number), rewards computed from tokens alone.

digit_parity: the prompt is `<bos>` + n digits + `=`, the answer one letter a digit, `o` (odd) or `e` (even), then the
end token. Reward = places that are right / places, where the end token is a place of its own and surplus tokens count
as wrong places; it is 1.0 only for the exact answer. Nothing about infrastructure (timeouts, crashes, which engine)
enters a reward: an answer that could not be finished has no reward at all, it goes on elsewhere (design law 7).
"""

import random
from dataclasses import dataclass

from rolecall.core.config import TaskConfig
from rolecall.core.errors import BadId
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.tokenizer import Vocabulary

SURPLUS_TOKENS = 3
"""How many tokens beyond a right answer may be generated: a model must learn to stop, and cheaply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    group_id: GroupId
    tokens: tuple[int, ...]


def group_id(number: int) -> GroupId:
    """7 -> `g00000007`: ids sort as numbers do."""
    if number < 0:
        raise BadId(what="group", text=str(number))
    return GroupId(f"g{number:08d}")


def group_number(group: str) -> int:
    """`g00000007` -> 7.

    Raises:
        BadId: when `group` is not written so.
    """
    if not (group.startswith("g") and group[1:].isascii() and group[1:].isdigit() and len(group) >= 9):
        raise BadId(what="group", text=group)
    return int(group[1:])


class DigitParity:
    """The built-in task. Stateless: any process makes the same prompt for the same group."""

    def __init__(self, config: TaskConfig, vocab: Vocabulary, seed: int) -> None:
        self.num_digits, self.vocab, self.seed = config.num_digits, vocab, seed

    @property
    def max_new_tokens(self) -> int:
        return self.num_digits + 1 + SURPLUS_TOKENS

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together."""
        return self.num_digits + 2 + self.max_new_tokens

    def digits(self, number: int) -> str:
        """The digits of prompt `number`, the same in every process."""
        rng = random.Random(f"digit_parity/{self.seed}/{number}")
        return "".join(rng.choice("0123456789") for _ in range(self.num_digits))

    def prompt(self, number: int) -> Prompt:
        tokens = (self.vocab.bos, *self.vocab.encode(self.digits(number) + "="))
        return Prompt(group_id=group_id(number), tokens=tokens)

    def answer(self, prompt_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The exact answer, end token included."""
        odd = {self.vocab.ids[c] for c in "13579"}
        letters = (self.vocab.ids["o" if t in odd else "e"] for t in prompt_tokens[1:-1])
        return (*letters, self.vocab.eos)

    def reward(self, prompt_tokens: tuple[int, ...], response_tokens: tuple[int, ...]) -> float:
        """In [0, 1]; 1.0 exactly when the response is the answer."""
        answer = self.answer(prompt_tokens)
        right = sum(a == b for a, b in zip(answer, response_tokens, strict=False))
        return right / max(len(answer), len(response_tokens))


def make_task(config: TaskConfig, vocab: Vocabulary, seed: int) -> DigitParity:
    """The task that a job file names (there is one so far; pydantic refuses other names)."""
    return DigitParity(config, vocab, seed)
