"""Characters and token ids. A local vocabulary has one token per character; a model folder has its own.

Engines run without a tokenizer (token ids in, token ids out), so this is needed only to generate prompts and to score
answers. `tokenizer.json` is also written into local model folders, so that other tools can read them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rolecall.core.config.job import ModelConfig, TaskName
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.model_folder import read_config, rows_of

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
FILLER = "_"
CHARACTERS: Mapping[TaskName, str] = MappingProxyType(
    {TaskName.DIGIT_PARITY: "0123456789=eo", TaskName.LONG_ADDITION: f"0123456789={FILLER}"}
)
"""Characters of the prompts and answers of each task."""
ROWS_MIN = 16
"""Minimum number of rows of a local vocabulary, so that it includes the canary's tokens (`proof.CANARY`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token ids of the characters that tasks use. `size` counts all rows of the embedding, used or not."""

    ids: dict[str, int]
    pad: int
    bos: int
    eos: int
    size: int

    def encode(self, text: str) -> tuple[int, ...]:
        """One id per character. Raises KeyError: a character is not in the vocabulary."""
        return tuple(self.ids[c] for c in text)

    def decode(self, tokens: tuple[int, ...] | list[int]) -> str:
        """Text up to the end token; an id without a character becomes `?`."""
        names = {i: c for c, i in self.ids.items()}
        text = []
        for token in tokens:
            if token == self.eos:
                break
            text.append(names.get(token, "?"))
        return "".join(text)


def local_vocabulary(task: TaskName = TaskName.DIGIT_PARITY) -> Vocabulary:
    """pad 0, bos 1, eos 2, then the task's characters."""
    names = [PAD, BOS, EOS, *CHARACTERS[task]]
    ids = {c: names.index(c) for c in CHARACTERS[task]}
    return Vocabulary(ids=ids, pad=0, bos=1, eos=2, size=max(ROWS_MIN, len(names)))


def vocabulary(model: ModelConfig, task: TaskName | None = TaskName.DIGIT_PARITY) -> Vocabulary:
    """The vocabulary of `model` for a task, without loading the model; None: for a dataset, whose text a tokenizer
    reads.

    Raises:
        ConfigError: the model folder cannot be used.
    """
    return (
        local_vocabulary(task or TaskName.DIGIT_PARITY)
        if model.path is None
        else folder_vocabulary(Path(model.path), task)
    )


def write_tokenizer(folder: Path, vocab: Vocabulary) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` in Hugging Face's format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {PAD: vocab.pad, BOS: vocab.bos, EOS: vocab.eos, **vocab.ids}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": PAD,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def folder_vocabulary(folder: Path, task: TaskName | None = TaskName.DIGIT_PARITY) -> Vocabulary:
    """The vocabulary of any Hugging Face model folder (config.json, tokenizer.json), limited to the characters of a
    task.

    A model without a start token (Qwen) starts prompts with its end token.

    Raises:
        ConfigError: a file is missing or malformed, or a character of the task is not a single token there.
    """
    from tokenizers import Tokenizer

    config = read_config(folder)
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError([f"model.path: {e}"], str(folder)) from e
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # the Rust extension raises plain Exception; a bad file is the user's error
        raise ConfigError([f"model.path: tokenizer.json: {e}"], str(folder)) from e
    found = {c: tokenizer.token_to_id(c) for c in (CHARACTERS[task] if task else "")}
    missing = [c for c, i in found.items() if i is None]
    eos = _first_id(config.get("eos_token_id"))
    problems = [f"model.path: tokenizer.json has no token of its own for {c!r}" for c in missing]
    if eos is None:
        problems.append("model.path: config.json has no eos_token_id")
    if problems or eos is None:
        raise ConfigError(problems, str(folder))
    bos, pad = _first_id(config.get("bos_token_id")), _first_id(config.get("pad_token_id"))
    return Vocabulary(
        ids={c: int(i) for c, i in found.items() if i is not None},
        pad=eos if pad is None else pad,
        bos=eos if bos is None else bos,
        eos=eos,
        size=rows_of(config, len(tokenizer.get_vocab())),
    )


def _first_id(value: Any) -> int | None:
    """Hugging Face allows one id, a list of ids, or null."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
