"""A user's dataset as a task: prompts are its rows, rewards come from the user's function."""

from collections.abc import Sequence
from pathlib import Path

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.protocol.messages import PromptGroup
from rolecall.rl_runtime.tasks.dataset import Dataset, Row, open_dataset, row_of
from rolecall.rl_runtime.tasks.rewards.functions import Answer
from rolecall.rl_runtime.tasks.rewards.process import RewardProcess
from rolecall.rl_runtime.tasks.task import Prompt, Task, group_id, group_number, held_out_of, is_held_out
from rolecall.rl_runtime.tasks.text import TextTokenizer

NAME_CHARACTERS = 12
"""Of a fingerprint, in the ledger."""


class DatasetTask(Task):
    """Of `data` and `reward`. Prompt numbers go through the rows of one epoch after the other."""

    runs_foreign_code = True

    def __init__(self, job: JobConfig) -> None:
        """Raises ConfigError: the dataset or the tokenizer cannot be used."""
        assert job.data is not None and job.model.path is not None
        self._data, self._dataset = job.data, open_dataset(job.data)
        self._tokenizer = TextTokenizer(Path(job.model.path))
        self._process = None if job.reward is None else RewardProcess(job.reward)
        held_out = job.evaluation.held_out(job.data) if job.evaluation is not None else None
        self._held_out = open_dataset(held_out, "evaluation") if held_out is not None else None
        super().__init__(self._tokenizer.vocab, job.seed, job.data.max_response_tokens)

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    @property
    def held_out_fingerprint(self) -> str:
        """Empty without an evaluation."""
        return self._held_out.fingerprint if self._held_out is not None else ""

    @property
    def num_rows(self) -> int:
        return len(self._dataset)

    def num_held_out(self, wanted: int | None) -> int:
        num = len(self._held_out) if self._held_out is not None else 0
        return num if wanted is None else min(num, wanted)

    def check(self, rows: int) -> None:
        """Reads every row, also the held-out ones, and renders the first `rows` prompts.

        Raises:
            ConfigError: the first row that cannot be used, or no prompt is short enough.
        """
        for dataset in filter(None, (self._dataset, self._held_out)):
            for number in range(len(dataset)):
                dataset.row(number)
        lengths = []
        for number in range(min(rows, self.num_rows)):
            tokens = self._prompt_tokens(self._dataset.row(number))
            why = self._unusable(tokens)
            if why:
                raise ConfigError([f"data.prompt: row {number}: {why}"], self._data.path)
            lengths.append(len(tokens))
        longest = self._data.max_prompt_tokens
        if min(lengths) > longest:
            none = f"none of the first {len(lengths)} prompts fits: the shortest has {min(lengths)} tokens"
            raise ConfigError([f"data.max_prompt_tokens: {none}, at most {longest}"])

    def prompt(self, number: int) -> Prompt:
        return self._rendered(number, self._dataset, self._row_of(number)[0])

    def held_out(self, number: int) -> Prompt:
        assert self._held_out is not None, "the job has no evaluation"
        return self._rendered(number, self._held_out, number)

    def _rendered(self, number: int, dataset: Dataset, row: int) -> Prompt:
        try:
            tokens = self._prompt_tokens(dataset.row(row))
        except ConfigError:
            # Not the reason itself, which quotes the row: the ledger holds no text.
            return Prompt(group_id=group_id(number), tokens=(), unusable="the prompt of this row cannot be rendered")
        longest = self._data.max_prompt_tokens
        too_long = f"prompt too long: {len(tokens)} tokens, at most {longest}" if len(tokens) > longest else ""
        return Prompt(group_id=group_id(number), tokens=tokens, unusable=self._unusable(tokens) or too_long)

    def _unusable(self, tokens: Sequence[int]) -> str:
        """Why an engine could not compute with this prompt, whatever its length; empty: it could."""
        if not tokens:
            return "prompt has no tokens"
        return "prompt has a token that the model does not have" if max(tokens) >= self.vocab.size else ""

    def _prompt_tokens(self, row: Row) -> tuple[int, ...]:
        return self._tokenizer.prompt_tokens(row, self._data)

    def origin(self, number: int) -> str:
        row, epoch = self._row_of(number)
        return f"row {row} epoch {epoch} of {self.fingerprint[:NAME_CHARACTERS]}"

    def rewards(self, group: PromptGroup) -> list[float]:
        """Raises RewardFailed: the function raised, took too long, or ended its process."""
        assert self._process is not None
        row = self._group_row(group.group_id)
        answers = [
            Answer(prompt=row.prompt, response=self._tokenizer.text(s.tokens), answer=row.answer, metadata=row.metadata)
            for s in group.samples
        ]
        return self._process.score(answers)

    def _group_row(self, group: str) -> Row:
        if is_held_out(group):
            assert self._held_out is not None, "the job has no evaluation"
            return self._held_out.row(held_out_of(group)[1])
        return self._dataset.row(self._row_of(group_number(group))[0])

    def _row_of(self, number: int) -> tuple[int, int]:
        return row_of(number, len(self._dataset), seed=self.seed, shuffle=self._data.shuffle)
