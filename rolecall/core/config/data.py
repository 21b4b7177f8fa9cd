"""Sections `data`, `sampling`, `reward`, `environment` and `evaluation` of a job file: your prompts, how answers are
sampled, who scores them, who answers the model, and on which held-out prompts the policy is evaluated."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rolecall.core.config.section import PositiveInt, Seconds, Section


class DataConfig(Section):
    """Prompts from a local dataset, with columns chosen by name."""

    path: str
    """A file (.jsonl, .parquet) or a folder that Hugging Face `datasets` can load."""
    split: str = "train"
    """Split of a folder. A file has none."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of chat messages with `role` and `content`."""
    answer: str | None = None
    """Column of the answer that the reward function gets. null: it gets None, and may not need an answer."""
    metadata: tuple[str, ...] = ()
    """Columns that the reward function gets as `metadata`, a mapping."""
    system_prompt: str | None = None
    """A system message before the prompt. Needs the chat template."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template, text as one user message. false: text as it stands."""
    shuffle: bool = True
    """A new order in each epoch, by the job's seed. false: the file's order."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are not generated for: their groups are dropped, with the reason."""
    max_response_tokens: PositiveInt = 256
    """Longest answer, end token included."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the dataset's files. null: computed at the start, recorded with the run, and checked by every process
    of it. Given: other files are refused."""

    @model_validator(mode="after")
    def _template(self) -> Self:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt has no meaning with chat_template: false: put it into the prompts")
        return self

    @property
    def name(self) -> str:
        """For display: the last part of the path, without its ending."""
        return Path(self.path).stem


class SamplingConfig(Section):
    """How answers are sampled. Log-probabilities are those of the distribution that is sampled from; the trainers'
    are of the same one."""

    temperature: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    """Logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the smallest set of tokens with this probability together. 1: all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample only from this many most probable tokens. 0: all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """An answer ends after one of these texts, which belong to it. Needs a model folder with a tokenizer."""


class RewardConfig(Section):
    """Which function scores answers. A text in place of the section is its `function`."""

    function: str
    """`package.module:name`, `FILE.py:name`, or built in: `exact`, `numeric`, `math_verify`, `reasoning_gym:TASK`."""
    timeout_seconds: Seconds = 10.0
    """Time for one prompt group. A function that needs longer is ended with its process, and the group tried again."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Failures (exceptions, time-outs) after which a group is dropped, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value


class EnvironmentConfig(Section):
    """Answers the model, for several turns and tools. A text in place of the section is its `factory`."""

    factory: str
    """`package.module:Class` or `FILE.py:Class`, called without arguments for each conversation."""
    max_turns: PositiveInt = 8
    """Answers of the model after which a conversation ends, if the environment has not ended it before."""
    role: Literal["user", "tool"] = "user"
    """Role of its observations in the chat template."""
    timeout_seconds: Seconds = 10.0
    """Time for one call of `reset` or `step`. A longer one fails; one that blocks is ended with its process."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Failures (exceptions, time-outs) of one conversation after which its group is dropped, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before the first step, every `every_steps` steps, and after the last one."""

    every_steps: PositiveInt = 20
    """Committed steps between two evaluations. One that is due while another is running is left out."""
    path: str | None = None
    """Held-out prompts, as `data.path`. null: another `split` of the same folder. Without meaning for a built-in task,
    whose prompts have other numbers than those of training."""
    split: str | None = None
    """Split of a folder. null: as `data.split`."""
    prompt: str | None = None
    """Column of the prompt. null: as in `data`."""
    answer: str | None = None
    """Column of the answer. null: as in `data`."""
    metadata: tuple[str, ...] | None = None
    """Columns of the metadata. null: as in `data`."""
    num_prompts: PositiveInt | None = None
    """The first so many rows, in the file's order. null: all; a built-in task needs a number."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Answers to each prompt. 1: greedy. More: sampled, with pass@k."""
    temperature: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Of several samples. null: as in `sampling`, like `top_p` and `top_k`."""
    pass_reward: float = 1.0
    """An answer with at least this reward passes, for pass@k."""
    max_response_tokens: PositiveInt | None = None
    """Longest answer. null: as in `data`, or the task's."""
    timeout_seconds: Seconds = 1800.0
    """An evaluation ends after this time; prompts without a score by then are left out, and counted."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the held-out files, as `data.fingerprint`."""

    @model_validator(mode="after")
    def _greedy(self) -> Self:
        if self.samples == 1 and self.temperature is not None:
            raise ValueError("temperature has no meaning with samples: 1, which is greedy")
        return self

    def held_out(self, data: DataConfig) -> DataConfig:
        """The held-out prompts as a dataset of their own, in the order of the file."""
        given = {name: getattr(self, name) for name in ("path", "split", "prompt", "answer", "metadata")}
        changes = {name: value for name, value in given.items() if value is not None}
        length = self.max_response_tokens or data.max_response_tokens
        fixed = {"shuffle": False, "fingerprint": self.fingerprint, "max_response_tokens": length}
        return data.model_copy(update={**changes, **fixed})
