"""A dataset whose answers are conversations with the user's environment.

The prompt ends before the model's first answer begins: what stands between (the environment's opening, the template's
beginning of an answer) is the environment's first observation. Every later one is what the chat template writes between
two answers of the model. Tokens are only ever added: nothing that was generated is rendered or tokenized again.
"""

import random
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ConfigError, EnvironmentFailed
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, Conversation, Observation, PromptGroup
from rolecall.rl_runtime.tasks.dataset import Row
from rolecall.rl_runtime.tasks.dataset_task import DatasetTask
from rolecall.rl_runtime.tasks.environments.process import NOT_DETERMINISTIC, EnvironmentProcess, Played, Script
from rolecall.rl_runtime.tasks.task import group_id, held_out_of, is_held_out

Tokens = tuple[int, ...]
NOT_RENDERED: Final = "an observation cannot be rendered"


def turns(tokens: Sequence[int], versions: Sequence[int]) -> tuple[list[Tokens], list[Tokens]]:
    """(observations, responses) of a conversation, in order. The first observation may be empty, so there are as many
    of them as responses, or one more.
    """
    observations: list[Tokens] = []
    responses: list[Tokens] = []
    for written, pairs in groupby(zip(tokens, versions, strict=True), lambda pair: pair[1] == ENVIRONMENT_VERSION):
        if not written and not observations:
            observations.append(())
        (observations if written else responses).append(tuple(token for token, _ in pairs))
    return observations, responses


class EnvironmentTask(DatasetTask):
    """Of `data`, `environment` and, where the job has one, `reward`."""

    def __init__(self, job: JobConfig) -> None:
        """Raises ConfigError: the dataset or the tokenizer cannot be used."""
        super().__init__(job)
        assert job.environment is not None
        self._environment, self._environments = job.environment, EnvironmentProcess(job.environment)

    def check_environment(self) -> None:
        """Begins the first row's conversation, and renders an observation.

        Raises:
            ConfigError: the class cannot be used, or the chat template cannot.
            EnvironmentFailed: `reset` failed.
        """
        try:
            first = Conversation(request_id="", group_id=group_id(0), tokens=(), versions=())
            (played,) = self._environments.play([self._script(first)])
            if isinstance(played, EnvironmentFailed):
                raise played
            try:
                row = self._group_row(first.group_id)
                self._tokenizer.opening_tokens(row, self._data, played.opening, self._environment.role)
                self._tokenizer.observation_tokens("observation", self.vocab.eos, self._data, self._environment.role)
            except Exception as e:  # a template is the user's code and raises what it wants to
                raise ConfigError([f"environment.role: {type(e).__name__}: {e}"]) from e
        finally:
            self._environments.close()

    def observe(self, conversations: Sequence[Conversation]) -> list[Observation]:
        played = self._environments.play([self._script(c) for c in conversations])
        return [self._observation(c, p) for c, p in zip(conversations, played, strict=True)]

    def rewards(self, group: PromptGroup) -> list[float]:
        """Those of the function where the job has one, else the sums of the environment's. The group's environments
        end then.

        Raises:
            RewardFailed, EnvironmentFailed: of the function, or of the environment of any conversation.
        """
        try:
            return self._sums(group) if self._process is None else super().rewards(group)
        finally:
            self._environments.end([s.request_id for s in group.samples])

    def _sums(self, group: PromptGroup) -> list[float]:
        conversations = [
            Conversation(request_id=s.request_id, group_id=group.group_id, tokens=s.tokens, versions=s.versions)
            for s in group.samples
        ]
        found = []
        for c, played in zip(
            conversations, self._environments.play(list(map(self._script, conversations))), strict=True
        ):
            if isinstance(played, EnvironmentFailed):
                raise played
            self._compare(c, played)
            found.append(sum(step.reward for step in played.steps))
        return found

    def _prompt_tokens(self, row: Row) -> Tokens:
        return self._tokenizer.prompt_tokens(row, self._data, answers=False)

    def _seed(self, group: str) -> int:
        """The same in all samples of a group, in every process, and of a held-out prompt in every evaluation."""
        name = f"held out/{held_out_of(group)[1]}" if is_held_out(group) else group
        return random.Random(f"environment/{self.seed}/{name}").randrange(2**31)

    def _script(self, conversation: Conversation) -> Script:
        row = self._group_row(conversation.group_id)
        _, responses = turns(conversation.tokens, conversation.versions)
        arguments = {
            "prompt": row.prompt,
            "answer": row.answer,
            "metadata": row.metadata,
            "seed": self._seed(conversation.group_id),
        }
        texts = tuple(self._tokenizer.text(response) for response in responses)
        return Script(key=conversation.request_id, arguments=arguments, responses=texts)

    def _observation(self, conversation: Conversation, played: Played | EnvironmentFailed) -> Observation:
        try:
            if isinstance(played, EnvironmentFailed):
                raise played
            self._compare(conversation, played)
            if played.steps and played.steps[-1].done:
                return Observation(done=True)
            return Observation(tokens=self._observations(conversation, played)[-1])
        except EnvironmentFailed as e:
            return Observation(failure=e.kind, is_final=e.is_final, is_alone=e.is_alone)

    def _compare(self, conversation: Conversation, played: Played) -> None:
        """Raises EnvironmentFailed: its observations are not those that the model has read."""
        recorded, _ = turns(conversation.tokens, conversation.versions)
        rendered = self._observations(conversation, played)[: len(recorded)]
        if rendered != recorded:
            because = "a replay of the conversation gave other observations"
            raise EnvironmentFailed(kind=NOT_DETERMINISTIC, because=because, is_final=True)

    def _observations(self, conversation: Conversation, played: Played) -> list[Tokens]:
        """The opening, then the observation behind each response, up to the end of the conversation.

        Raises:
            EnvironmentFailed: the tokenizer cannot render one.
        """
        _, responses = turns(conversation.tokens, conversation.versions)
        data, role = self._data, self._environment.role
        try:
            found = [self._tokenizer.opening_tokens(self._group_row(conversation.group_id), data, played.opening, role)]
            for response, step in zip(responses, played.steps, strict=True):
                if not step.done:
                    tokens = self._tokenizer.observation_tokens(step.observation, response[-1], data, role)
                    found.append(tokens)
        except Exception as e:  # a template is the user's code and raises what it wants to
            raise EnvironmentFailed(kind=NOT_RENDERED, because=f"{type(e).__name__}: {e}", is_final=True) from e
        if any(token >= self.vocab.size for tokens in found for token in tokens):
            raise EnvironmentFailed(kind=NOT_RENDERED, because="a token that the model does not have", is_final=True)
        return found
