"""What an environment is: `from rolecall.environment import Environment, Step`. Standard library only."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Opening = str | Sequence[Mapping[str, str]] | None
"""What the model reads behind the prompt before its first answer: text, chat messages, or nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one response of the model."""

    observation: str
    """What the model reads next. Not used once `done`."""
    reward: float = 0.0
    """The rewards of a conversation are summed."""
    done: bool = False
    """Whether the conversation ends here."""


class Environment(Protocol):
    """One conversation. Its class is called without arguments, in a process of the reward workers.

    Both methods may be `async` or not. Equal arguments and responses must give equal observations: a conversation
    whose process was lost is replayed in another one, and dropped if its observations differ. Anything random must
    come from `seed`.

    A method `close`, `async` or not, is called if there is one, once the conversation is scored or lost to a failure.
    Nothing calls it when the process ends.
    """

    def reset(
        self, *, prompt: Any, answer: Any, metadata: Mapping[str, Any], seed: int
    ) -> Opening | Awaitable[Opening]:
        """Begins. It gets those of the four arguments that it names.

        Args:
            prompt, answer, metadata: of the row, as a reward function gets them.
            seed: the same in all samples of a prompt group, another one in each epoch.
        """

    def step(self, response: str) -> Step | Awaitable[Step]:
        """Answers the model's response, which is without special tokens."""
