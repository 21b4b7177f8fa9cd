"""Verifiable tasks: prompts made from (seed, group number), rewards computed from tokens alone.

digit_parity: the prompt is `<bos>` + n digits + `=`, the answer one letter a digit, `o` (odd) or `e` (even), then the
end token. Every answer is equally long.

long_addition: two numbers in a small base, the answer worked out place by place: of each place the carry that it gives
and the digit that it keeps, which together are the place's sum, then the end token. Most numbers are short and some
are long, so answers are of 3 to 2n + 1 tokens. Base 10, three of at most four places, 957 + 68:

    prompt  <bos> 78 56 90 __ =         both numbers' digits of a place side by side, ones first, filled up to n places
    answer  15 12 10 <eos>              7 + 8 = 15, 5 + 6 + 1 = 12, 9 + 1 = 10: the sum is 1025

All prompts are equally long, and what a token of the answer needs stands at the same distance before it in every place
of every prompt. The carry is written before the digit: then each token is a sum, or a sum above a bound, of tokens that
stand there already, and can be found one at a time from random weights. Digit first, base 2 would ask for the exclusive
or of three tokens, of which no two carry information.

Reward = places that are right / places, where every token of the answer is a place, the end token too, and surplus
tokens count as wrong places; it is 1.0 only for the exact answer. Nothing about infrastructure (timeouts, crashes,
which engine) enters a reward: an answer that could not be finished has no reward at all, it continues elsewhere
(invariant Infrastructure is not reward, docs/invariants.md).
"""

import random
import re
from dataclasses import dataclass
from typing import Protocol

from rolecall.core.config.job import TaskConfig
from rolecall.core.errors import InvalidId
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.tasks.tokenizer import FILLER, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    group_id: GroupId
    tokens: tuple[int, ...]


_GROUP = re.compile(r"g(\d{8,})(?:-(\d{5,}))?", re.ASCII)


def group_id(number: int, start: int = 0) -> GroupId:
    """7 -> `g00000007`; the part of its answer that begins after 12 tokens: `g00000007-00012`. Ids sort as numbers
    do."""
    if number < 0 or start < 0:
        raise InvalidId(what="group", text=f"{number}, {start}")
    return GroupId(f"g{number:08d}-{start:05d}" if start else f"g{number:08d}")


def group_number(group: str) -> int:
    """`g00000007` and `g00000007-00012` -> 7.

    Raises:
        BadId: when `group` is not written so.
    """
    return _parsed(group)[0]


def group_start(group: str) -> int:
    """`g00000007` -> 0, `g00000007-00012` -> 12.

    Raises:
        BadId: when `group` is not written so.
    """
    return _parsed(group)[1]


def _parsed(group: str) -> tuple[int, int]:
    found = _GROUP.fullmatch(group)
    number, start = (int(found[1]), int(found[2] or 0)) if found else (-1, 0)
    if found is None or group != group_id(number, start):  # each has one id, and no other text means it
        raise InvalidId(what="group", text=group)
    return number, start


class Task(Protocol):
    """Stateless: any process makes the same prompt for the same number, and gives the same answer the same reward."""

    @property
    def vocab(self) -> Vocabulary: ...

    @property
    def max_response_tokens(self) -> int: ...

    def prompt(self, number: int) -> Prompt: ...

    def answer(self, prompt_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The exact answer, end token included."""

    def reward(self, prompt_tokens: tuple[int, ...], response_tokens: tuple[int, ...]) -> float:
        """In [0, 1]; 1.0 exactly when the response is the answer."""


def share_right(answer: tuple[int, ...], response: tuple[int, ...]) -> float:
    """Places of `response` that are as in `answer`, over the places of the longer one."""
    right = sum(a == b for a, b in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


class DigitParity:
    def __init__(self, config: TaskConfig, vocab: Vocabulary, seed: int) -> None:
        self.num_digits, self.vocab, self.seed = config.num_digits, vocab, seed
        self.max_response_tokens = config.max_response_tokens

    def digits(self, number: int) -> str:
        """The digits of prompt `number`."""
        rng = random.Random(f"digit_parity/{self.seed}/{number}")
        return "".join(rng.choice("0123456789") for _ in range(self.num_digits))

    def prompt(self, number: int) -> Prompt:
        tokens = (self.vocab.bos, *self.vocab.encode(self.digits(number) + "="))
        return Prompt(group_id=group_id(number), tokens=tokens)

    def answer(self, prompt_tokens: tuple[int, ...]) -> tuple[int, ...]:
        odd = {self.vocab.ids[c] for c in "13579"}
        letters = (self.vocab.ids["o" if t in odd else "e"] for t in prompt_tokens[1:-1])
        return (*letters, self.vocab.eos)

    def reward(self, prompt_tokens: tuple[int, ...], response_tokens: tuple[int, ...]) -> float:
        return share_right(self.answer(prompt_tokens), response_tokens)


class LongAddition:
    def __init__(self, config: TaskConfig, vocab: Vocabulary, seed: int) -> None:
        self.num_digits, self.base, self.vocab, self.seed = config.num_digits, config.base, vocab, seed
        self.max_response_tokens = config.max_response_tokens

    def places(self, number: int) -> list[tuple[int, int]]:
        """Both numbers' digits by place, ones first, of prompt `number`.

        One to `num_digits` places; k of them with a probability that goes as 1/k: lengths are drawn alike often from
        1 to 2, 2 to 4, 4 to 8 and so on.
        """
        rng = random.Random(f"long_addition/{self.seed}/{number}")
        lengths = range(1, self.num_digits + 1)
        (length,) = rng.choices(lengths, [1 / k for k in lengths])
        return [(rng.randrange(self.base), rng.randrange(self.base)) for _ in range(length)]

    def prompt(self, number: int) -> Prompt:
        text = "".join(f"{a}{b}" for a, b in self.places(number)).ljust(2 * self.num_digits, FILLER)
        return Prompt(group_id=group_id(number), tokens=(self.vocab.bos, *self.vocab.encode(text + "=")))

    def answer(self, prompt_tokens: tuple[int, ...]) -> tuple[int, ...]:
        digits = {self.vocab.ids[c]: int(c) for c in "0123456789"}
        written = [digits[t] for t in prompt_tokens[1:-1] if t in digits]
        carry, worked = 0, []
        for a, b in zip(written[::2], written[1::2], strict=True):
            carry, digit = divmod(a + b + carry, self.base)
            worked += [carry, digit]
        return (*self.vocab.encode("".join(map(str, worked))), self.vocab.eos)

    def reward(self, prompt_tokens: tuple[int, ...], response_tokens: tuple[int, ...]) -> float:
        return share_right(self.answer(prompt_tokens), response_tokens)


def make_task(config: TaskConfig, vocab: Vocabulary, seed: int) -> Task:
    """The task that a job file names."""
    made: dict[str, type[DigitParity | LongAddition]] = {
        "digit_parity": DigitParity,
        "long_addition": LongAddition,
    }
    return made[config.name](config, vocab, seed)
