"""A Hugging Face tokenizer: prompts to tokens through its chat template, answers to text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.core.config.data import DataConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.model_folder import read_config, rows_of
from rolecall.rl_runtime.tasks.dataset import Row
from rolecall.rl_runtime.tasks.environments.interface import Opening
from rolecall.rl_runtime.tasks.tokenizer import Vocabulary

RESPONSE = "rolecall-response"
"""Stands for a response of the model in a rendered chat: what the template writes behind it is looked for."""


class TextTokenizer:
    """Of a model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: the folder has no usable tokenizer."""
        from transformers import AutoTokenizer

        config = read_config(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as e:  # transformers raises errors of many kinds for a bad folder
            raise ConfigError([f"model.path: no usable tokenizer: {' '.join(str(e).split())}"], str(folder)) from e
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(["model.path: the tokenizer has no end token"], str(folder))
        pad, bos = self._tokenizer.pad_token_id, self._tokenizer.bos_token_id
        self.vocab = Vocabulary(
            ids={},
            pad=eos if pad is None else pad,
            bos=eos if bos is None else bos,
            eos=eos,
            size=rows_of(config, len(self._tokenizer)),
        )
        self._folder = folder

    def prompt_tokens(self, row: Row, data: DataConfig, *, answers: bool = True) -> tuple[int, ...]:
        """`answers`: with the beginning of the model's answer, where the template has one.

        Raises:
            ConfigError: the tokenizer has no chat template or refuses the text, or the template refuses the messages.
        """
        if not data.chat_template:
            if not isinstance(row.prompt, str):
                raise ConfigError([f"data.prompt: row {row.number} is a chat, which needs chat_template: true"])
            try:
                return tuple(self._tokenizer(row.prompt)["input_ids"])
            except TypeError as e:  # half of a surrogate pair, which JSON can hold
                raise ConfigError([f"data.prompt: row {row.number}: the tokenizer refuses its text: {e}"]) from e
        if not self._tokenizer.chat_template:
            advice = "set data.chat_template: false for prompts as they stand"
            raise ConfigError([f"model.path: the tokenizer has no chat template: {advice}"], str(self._folder))
        try:
            tokens = self._tokenizer.apply_chat_template(
                chat(row, data.system_prompt), add_generation_prompt=answers, tokenize=True, return_dict=False
            )
        except Exception as e:  # a template is the user's code and raises what it wants to
            raise ConfigError([f"data: row {row.number}: the chat template: {type(e).__name__}: {e}"]) from e
        return tuple(int(t) for t in tokens)

    def opening_tokens(self, row: Row, data: DataConfig, opening: Opening, role: str) -> tuple[int, ...]:
        """What stands between `prompt_tokens(..., answers=False)` and the model's first answer.

        Raises:
            ValueError: the template changes what it rendered of the prompt.
        """
        if not data.chat_template:
            return self._plain(opening or "")
        messages = chat(row, data.system_prompt)
        if isinstance(opening, str):
            behind: list[Mapping[str, str]] = [{"role": role, "content": opening}]
        else:
            behind = [*(opening or ())]
        prompt, whole = self._rendered(messages, answers=False), self._rendered([*messages, *behind], answers=True)
        if not whole.startswith(prompt):
            raise ValueError("the chat template renders a prompt differently once messages follow it")
        return self._tokens(whole[len(prompt) :])

    def observation_tokens(self, observation: str, last: int, data: DataConfig, role: str) -> tuple[int, ...]:
        """What stands between a response of the model, with `last` as its last token, and its next one. The response's
        own tokens stay what they are.

        Raises:
            ValueError: it would be empty, or the template does not show the response.
        """
        if not data.chat_template:
            tokens = self._plain(observation)
            if not tokens:
                raise ValueError("an observation without text needs chat_template: true")
            return tokens
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": RESPONSE},
            {"role": role, "content": observation},
        ]
        _, found, behind = self._rendered(messages, answers=True).partition(RESPONSE)
        if not found:
            raise ValueError("the chat template does not show a response of the model")
        if last in self._tokenizer.all_special_ids:  # the response has its end already
            behind = behind.lstrip(" ").removeprefix(self._tokenizer.convert_ids_to_tokens(last))
        return self._tokens(behind)

    def _rendered(self, messages: Sequence[Mapping[str, str]], *, answers: bool) -> str:
        rendered = self._tokenizer.apply_chat_template([*messages], add_generation_prompt=answers, tokenize=False)
        return str(rendered)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(int(t) for t in self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, opening: Opening) -> tuple[int, ...]:
        if not isinstance(opening, str):
            raise ValueError("messages need chat_template: true")  # noqa: TRY004 it is a setting
        return self._tokens(opening)

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def chat(row: Row, system_prompt: str | None) -> list[Mapping[str, str]]:
    """The row's messages, after the system prompt if there is one and the row has none of its own."""
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else [*map(dict, row.prompt)]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return [*messages]
