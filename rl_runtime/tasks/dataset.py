"""Rows of a local dataset, and its fingerprint.

Every process of a run reads the files itself and checks that they are those that the run began with: the fingerprint is
the SHA-256 of their bytes and of their names below the folder. The ledger names a row by number, epoch and fingerprint;
it stores no text.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from rolecall.core.config.data import DataConfig
from rolecall.core.errors import ConfigError
from rolecall.core.text import os_reason

READ_BYTES = 1 << 20
Message = Mapping[str, Any]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`number` counts from 0 in the order of the file."""

    number: int
    prompt: str | tuple[Message, ...]
    answer: Any
    metadata: Mapping[str, Any]


class _Records(Protocol):
    """Rows as plain mappings, by number: of a list, or of a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Dataset:
    """The rows of `data`, by number. Use `open_dataset`."""

    def __init__(self, config: DataConfig, records: _Records, fingerprint: str, section: str = "data") -> None:
        """`section`: of the job file, for errors."""
        self._config, self._records, self.fingerprint, self._section = config, records, fingerprint, section

    def __len__(self) -> int:
        return len(self._records)

    def row(self, number: int) -> Row:
        """Raises ConfigError: a column is missing in this row, or its prompt is neither text nor a chat."""
        config, record = self._config, self._records[number]
        columns = [config.prompt, *config.metadata, *([config.answer] if config.answer else [])]
        missing = [c for c in columns if c not in record]
        if missing:
            has = ", ".join(map(repr, record))
            raise ConfigError(
                [f"{self._section}: row {number} has no column {missing[0]!r}; it has {has}"], config.path
            )
        return Row(
            number=number,
            prompt=self._prompt(number, record[config.prompt]),
            answer=record[config.answer] if config.answer else None,
            metadata={name: record[name] for name in config.metadata},
        )

    def _prompt(self, number: int, value: Any) -> str | tuple[Message, ...]:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Sequence) and value and all(_is_message(m) for m in value):
            # Chat templates read other fields, too (`tool_calls`); Parquet has each of them in all messages.
            return tuple({name: part for name, part in m.items() if part is not None} for m in value)
        expected = "a text, or a list of messages with `role` and `content`"
        raise ConfigError([f"{self._section}.prompt: row {number}: {value!r:.60} is not {expected}"], self._config.path)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def open_dataset(config: DataConfig, section: str = "data") -> Dataset:
    """The dataset, once its files are found to be those of `config.fingerprint`. `section`: see `Dataset`.

    Raises:
        ConfigError: it cannot be read, is empty, lacks a column, or has another fingerprint.
    """
    try:
        return _opened(config, section)
    except ConfigError as e:
        problems = [p.replace("data", section, 1) if p.startswith("data") else p for p in e.problems]
        raise ConfigError(problems, e.source) from e


def _opened(config: DataConfig, section: str) -> Dataset:
    path = Path(config.path)
    try:
        fingerprint = fingerprint_of(path)
    except OSError as e:
        raise ConfigError([f"data.path: {os_reason(e)}"], config.path) from e
    if config.split != DataConfig.model_fields["split"].default and not path.is_dir():
        raise ConfigError(["data.split: a file has no splits: name the file of this split in path"], config.path)
    if config.fingerprint is not None and fingerprint != config.fingerprint:
        because = f"the files have changed: fingerprint {fingerprint[:12]}, and the run began with"
        raise ConfigError([f"data.path: {because} {config.fingerprint[:12]}"], config.path)
    dataset = Dataset(config, _records(path, config), fingerprint, section)
    if not len(dataset):
        raise ConfigError(["data.path: it has no rows"], config.path)
    dataset.row(0)  # a missing column is found before anything starts
    return dataset


def fingerprint_of(path: Path) -> str:
    """SHA-256 of a file's bytes, or of all files of a folder with their names. Raises OSError: it cannot be read."""
    digest = hashlib.sha256()
    for file in [path] if not path.is_dir() else sorted(p for p in path.rglob("*") if p.is_file()):
        if file != path:
            digest.update(f"\n{file.relative_to(path).as_posix()}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as f:
            while part := f.read(READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _records(path: Path, config: DataConfig) -> _Records:
    if path.is_dir():
        return _folder(path, config)
    kinds = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.suffix not in kinds:
        endings = " or ".join(kinds)
        raise ConfigError([f"data.path: {path.suffix or 'no ending'}: expected {endings}, or a folder"], config.path)
    return kinds[path.suffix](path)


def _json_lines(path: Path) -> list[Any]:
    return list(_each_line(path))


def _each_line(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as f:
        try:
            for number, line in enumerate(f, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as e:
                    raise ConfigError([f"data.path: line {number} is not JSON: {e}"], str(path)) from e
                if not isinstance(record, dict):
                    kind = type(record).__name__
                    raise ConfigError([f"data.path: line {number} is a {kind}, not an object"], str(path))
                yield record
        except UnicodeDecodeError as e:
            raise ConfigError([f"data.path: not UTF-8: {e.reason} at byte {e.start}"], str(path)) from e


def _parquet(path: Path) -> list[Any]:
    import polars

    try:
        return polars.read_parquet(path).to_dicts()
    except (polars.exceptions.PolarsError, OSError) as e:
        raise ConfigError([f"data.path: not Parquet: {' '.join(str(e).split())}"], str(path)) from e


def _folder(path: Path, config: DataConfig) -> _Records:
    try:
        import datasets
    except ImportError:
        advice = "a folder needs `datasets`: pip install '.[data]' in a clone, or give a .jsonl or .parquet file"
        raise ConfigError([f"data.path: {advice}"], config.path) from None
    datasets.disable_progress_bars()
    try:
        saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as e:  # datasets raises errors of many kinds for files that are the user's
        raise ConfigError([f"data.path: {type(e).__name__}: {e}"], config.path) from e
    if isinstance(found, Mapping):
        if config.split not in found:
            raise ConfigError([f"data.split: no {config.split!r}; there are {', '.join(found)}"], config.path)
        found = found[config.split]
    records: _Records = found
    return records


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    rows = list(range(num_rows))
    random.Random(f"data/{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


def row_of(number: int, num_rows: int, *, seed: int, shuffle: bool) -> tuple[int, int]:
    """(row, epoch) of the prompt with this number: each epoch has every row once, in an order of its own."""
    epoch, place = divmod(number, num_rows)
    return (_order(seed, epoch, num_rows)[place] if shuffle else place), epoch
