"""Datasets: rows by number and epoch, the fingerprint of their files, and errors that name the place."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.config.data import DataConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.tasks.dataset import fingerprint_of, open_dataset, row_of

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1", "answer": "2", "level": 1},
    {"question": [{"role": "user", "content": "2 + 2"}], "answer": "4", "level": 2},
    {"question": "3 + 3", "answer": "6", "level": 3},
]


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(path=str(path), prompt="question", answer="answer", metadata=("level",), **changes)


def test_rows_of_json_lines(tmp_path: Path) -> None:
    dataset = open_dataset(config(written(tmp_path / "train.jsonl")))
    assert len(dataset) == 3
    first, second = dataset.row(0), dataset.row(1)
    assert (first.prompt, first.answer, first.metadata) == ("1 + 1", "2", {"level": 1})
    assert second.prompt == ({"role": "user", "content": "2 + 2"},)


def test_rows_of_parquet(tmp_path: Path) -> None:
    polars.DataFrame([ROWS[0], ROWS[2]]).write_parquet(tmp_path / "train.parquet")
    dataset = open_dataset(config(tmp_path / "train.parquet"))
    assert [dataset.row(n).prompt for n in range(2)] == ["1 + 1", "3 + 3"]


def test_a_message_keeps_what_its_template_may_read(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "2", "name": "add"}]
    rows = [{"question": chat, "answer": "2", "level": 1}]
    wanted = tuple(chat)
    assert open_dataset(config(written(tmp_path / "train.jsonl", rows))).row(0).prompt == wanted
    polars.DataFrame(rows).write_parquet(tmp_path / "train.parquet")
    assert open_dataset(config(tmp_path / "train.parquet")).row(0).prompt == wanted, "without empty fields"


def test_rows_of_a_folder_that_datasets_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    written(folder / "train.jsonl", [ROWS[0], ROWS[2]])
    written(folder / "test.jsonl", [ROWS[2]])
    assert len(open_dataset(config(folder))) == 2
    assert open_dataset(config(folder, split="test")).row(0).prompt == "3 + 3"
    with pytest.raises(ConfigError, match=r"data.split: no 'other'; there are train, test"):
        open_dataset(config(folder, split="other"))


def test_other_files_are_refused_by_their_fingerprint(tmp_path: Path) -> None:
    path = written(tmp_path / "train.jsonl")
    pinned = config(path, fingerprint=fingerprint_of(path))
    assert open_dataset(pinned).fingerprint == fingerprint_of(path)
    written(path, [*ROWS[:2], {**ROWS[2], "answer": "7"}])
    with pytest.raises(ConfigError, match="the files have changed"):
        open_dataset(pinned)


def test_a_folders_fingerprint_is_of_contents_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("23")
    seen = {fingerprint_of(tmp_path)}
    (tmp_path / "a").write_text("12")
    (tmp_path / "b").write_text("3")
    seen.add(fingerprint_of(tmp_path))
    (tmp_path / "b").rename(tmp_path / "c")
    seen.add(fingerprint_of(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no rows"),
        ('{"question": "1 + 1"\n', "line 1 is not JSON"),
        ('{"question": "1", "answer": "2", "level": 1}\n\n[1]\n', "line 3 is a list, not an object"),
        (
            '{"prompt": "1 + 1", "answer": "2", "level": 1}\n',
            "row 0 has no column 'question'; it has 'prompt', 'answer'",
        ),
        ('{"question": "1 + 1", "answer": "2"}\n', "row 0 has no column 'level'"),
        ('{"question": 5, "answer": "2", "level": 1}\n', "data.prompt: row 0: 5 is not a text"),
        ('{"question": [{"role": "user"}], "answer": "2", "level": 1}\n', "is not a text, or a list of messages"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_place(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        open_dataset(config(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')
    (tmp_path / "rows.csv").write_text("question,answer\n")
    for name, why in (
        ("none.jsonl", "No such file"),
        ("bad.parquet", "not Parquet"),
        ("latin.jsonl", "not UTF-8"),
        ("rows.csv", r".csv: expected .jsonl or .parquet, or a folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_dataset(config(tmp_path / name))


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans())
def test_each_epoch_has_every_row_once(num_rows: int, seed: int, shuffle: bool) -> None:
    places = [row_of(n, num_rows, seed=seed, shuffle=shuffle) for n in range(3 * num_rows)]
    for epoch in range(3):
        of_epoch = places[epoch * num_rows : (epoch + 1) * num_rows]
        assert {e for _, e in of_epoch} == {epoch}
        assert sorted(row for row, _ in of_epoch) == list(range(num_rows))


def test_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(row_of(n + 50 * e, 50, seed=1, shuffle=True)[0] for n in range(50)) for e in range(4)}
    assert len(orders) == 4
    assert [row_of(n, 3, seed=1, shuffle=False) for n in range(4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
