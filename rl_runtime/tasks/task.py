"""What a run learns: prompts by number and rewards of their answers. The built-in tasks generate both.

digit_parity: the prompt is `<bos>` + n digits + `=`, the answer one letter per digit, `o` (odd) or `e` (even), then the
end token. All answers have the same length.

long_addition: two numbers in a small base, the answer gives, for each place, the carry and the digit of the place's
sum, then the end token. Most numbers are short and some are long, so answers have 3 to 2n + 1 tokens. Base 10, three of
at most four places, 957 + 68:

    prompt  <bos> 78 56 90 __ =         both numbers' digits of a place side by side, ones first, filled up to n places
    answer  15 12 10 <eos>              7 + 8 = 15, 5 + 6 + 1 = 12, 9 + 1 = 10: the sum is 1025

All prompts have the same length, and the inputs of an answer token are at the same distance before it in every place of
every prompt. The carry precedes the digit: each token is then a sum, or a thresholded sum, of earlier tokens and can be
learned one at a time from random weights. With the digit first, base 2 would require the exclusive or of three tokens,
of which no two carry information.

Reward = correct positions / positions. Every token of the answer is a position, including the end token, and surplus
tokens count as wrong; it is 1.0 only for the exact answer. Infrastructure (timeouts, crashes, the engine) never affects
a reward: an unfinished answer has no reward and continues elsewhere (invariant Infrastructure is not reward,
docs/invariants.md).
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.core.config.job import TaskConfig
from rolecall.core.errors import InvalidId
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.protocol.messages import Conversation, Observation, PromptGroup
from rolecall.rl_runtime.tasks.tokenizer import FILLER, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    group_id: GroupId
    tokens: tuple[int, ...]
    unusable: str = ""
    """Why nothing can be generated for it; its group is dropped for this reason."""


_GROUP = re.compile(r"g(\d{8,})(?:-(\d{5,}))?", re.ASCII)


def group_id(number: int, start: int = 0) -> GroupId:
    """7 -> `g00000007`; the window that begins after 12 tokens: `g00000007-00012`. Ids sort as numbers do."""
    if number < 0 or start < 0:
        raise InvalidId(what="group", text=f"{number}, {start}")
    return GroupId(f"g{number:08d}-{start:05d}" if start else f"g{number:08d}")


def group_number(group: str) -> int:
    """`g00000007` and `g00000007-00012` -> 7. Raises InvalidId: `group` does not have this format."""
    return _parsed(group)[0]


def group_start(group: str) -> int:
    """`g00000007` -> 0, `g00000007-00012` -> 12. Raises InvalidId: `group` does not have this format."""
    return _parsed(group)[1]


def _parsed(group: str) -> tuple[int, int]:
    found = _GROUP.fullmatch(group)
    number, start = (int(found[1]), int(found[2] or 0)) if found else (-1, 0)
    if found is None or group != group_id(number, start):  # only the canonical text of an id is valid
        raise InvalidId(what="group", text=group)
    return number, start


_HELD_OUT = re.compile(r"h(\d{8})-(\d{6})", re.ASCII)


def held_out_id(version: int, number: int) -> GroupId:
    """Of the held-out prompt `number` in the evaluation of policy `version`: `h00000020-000007`.

    Behind the ids of training groups, which therefore come first where groups wait in the order of their ids.
    """
    return GroupId(f"h{version:08d}-{number:06d}")


def is_held_out(group: str) -> bool:
    """Whether it is a group of an evaluation: never in the ledger, never trained on."""
    return group.startswith("h")


def held_out_of(group: str) -> tuple[int, int]:
    """`h00000020-000007` -> (version 20, prompt 7). Raises InvalidId: `group` does not have this format."""
    found = _HELD_OUT.fullmatch(group)
    if found is None:
        raise InvalidId(what="held-out group", text=group)
    return int(found[1]), int(found[2])


HELD_OUT_START = 10**9
"""Of a built-in task, held-out prompts are those from this number on, which no run reaches. Short ones may have the
text of a prompt of training."""


class Task(ABC):
    """Every process has the same prompt for a number."""

    runs_foreign_code = False
    """Whether `rewards` runs the user's code: in reward workers only, with a deadline."""

    def __init__(self, vocab: Vocabulary, seed: int, max_response_tokens: int) -> None:
        self.vocab, self.seed, self.max_response_tokens = vocab, seed, max_response_tokens

    @abstractmethod
    def prompt(self, number: int) -> Prompt: ...

    @abstractmethod
    def rewards(self, group: PromptGroup) -> Sequence[float]:
        """One per sample."""

    def observe(self, conversations: Sequence[Conversation]) -> list[Observation]:
        """What the environment answers to each."""
        raise NotImplementedError(f"{type(self).__name__} has no environment")

    def origin(self, number: int) -> str:
        """What the ledger says of the prompt beside its seed; the same in every process."""
        return ""

    @property
    def num_rows(self) -> int:
        """Of the dataset, which an epoch goes through once; 0: the prompts have no end."""
        return 0

    def held_out(self, number: int) -> Prompt:
        """The prompt `number` of an evaluation, without an id of its own."""
        return self.prompt(HELD_OUT_START + number)

    def num_held_out(self, wanted: int | None) -> int:
        """How many prompts an evaluation has. `wanted`: at most so many; None: all."""
        assert wanted is not None, "checked by JobConfig"
        return wanted


class GeneratedTask(Task):
    """Stateless: the same reward for an answer in every process."""

    def __init__(self, config: TaskConfig, vocab: Vocabulary, seed: int) -> None:
        super().__init__(vocab, seed, config.max_response_tokens)
        self.num_digits, self.base = config.num_digits, config.base

    @abstractmethod
    def answer(self, prompt_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The exact answer, including the end token."""

    def reward(self, prompt_tokens: tuple[int, ...], response_tokens: tuple[int, ...]) -> float:
        """In [0, 1]; 1.0 only if the response is the exact answer."""
        return share_right(self.answer(prompt_tokens), response_tokens)

    def rewards(self, group: PromptGroup) -> list[float]:
        return [self.reward(group.prompt_tokens, s.tokens) for s in group.samples]


def share_right(answer: tuple[int, ...], response: tuple[int, ...]) -> float:
    """Number of positions at which `response` equals `answer`, divided by the longer length."""
    right = sum(a == b for a, b in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


class DigitParity(GeneratedTask):
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


class LongAddition(GeneratedTask):
    def places(self, number: int) -> list[tuple[int, int]]:
        """Both numbers' digits by place, ones first, of prompt `number`.

        One to `num_digits` places; the probability of k places is proportional to 1/k, so lengths 1 to 2, 2 to 4, 4 to
        8 and so on are about equally frequent.
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


def make_task(config: TaskConfig, vocab: Vocabulary, seed: int) -> GeneratedTask:
    """The built-in task named in the job file."""
    made: dict[str, type[GeneratedTask]] = {"digit_parity": DigitParity, "long_addition": LongAddition}
    return made[config.name](config, vocab, seed)
