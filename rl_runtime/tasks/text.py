"""A Hugging Face tokenizer: prompts to tokens through its chat template, answers to text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.core.config.data import DataConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.dataset import Row
from rolecall.rl_runtime.tasks.tokenizer import Vocabulary, rows_of


class TextTokenizer:
    """Of a model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: the folder has no usable tokenizer."""
        from transformers import AutoTokenizer

        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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

    def prompt_tokens(self, row: Row, data: DataConfig) -> tuple[int, ...]:
        """Raises ConfigError: the tokenizer has no chat template, or the template refuses the messages."""
        if not data.chat_template:
            if not isinstance(row.prompt, str):
                raise ConfigError([f"data.prompt: row {row.number} is a chat, which needs chat_template: true"])
            return tuple(self._tokenizer(row.prompt)["input_ids"])
        if not self._tokenizer.chat_template:
            advice = "set data.chat_template: false for prompts as they stand"
            raise ConfigError([f"model.path: the tokenizer has no chat template: {advice}"], str(self._folder))
        try:
            tokens = self._tokenizer.apply_chat_template(
                chat(row, data.system_prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as e:  # a template is the user's code and raises what it wants to
            raise ConfigError([f"data: row {row.number}: the chat template: {type(e).__name__}: {e}"]) from e
        return tuple(int(t) for t in tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def chat(row: Row, system_prompt: str | None) -> list[Mapping[str, str]]:
    """The row's messages, after the system prompt if there is one and the row has none of its own."""
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else [*map(dict, row.prompt)]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return [*messages]
