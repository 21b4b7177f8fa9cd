"""Rows of the journal are validated: each of these bodies was once in a real file."""

from typing import Any

import pytest

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.events import Event
from rolecall.core.journal.rows import WALL_MAX, event_of


def read(body: str, wall_at: Any = 5.0) -> Event:
    row = {
        "seq": 7,
        "kind": "action_done",
        "wall_at": wall_at,
        "body": body,
        "incident_id": None,
        "caused_by": None,
    }
    return event_of({**row, "key": None, "hash": "00"}, "the file")


@pytest.mark.parametrize(
    "body",
    ["[]", "null", "5", "{", "", '{"a": NaN}', '{"a": -Infinity}', '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
     '{"a":' + "9" * 5_000 + "}"],
    ids=["list", "null", "number", "half", "empty", "nan", "infinity", "deep", "long number"],
)  # fmt: skip
def test_an_invalid_body_is_reported_as_a_damaged_line(body: str) -> None:
    with pytest.raises(JournalCorrupt, match="the file: events line 7: cannot be read"):
        read(body)


@pytest.mark.parametrize("wall_at", [-1.0, WALL_MAX * 2, float("nan"), float("inf"), "yesterday", None])
def test_a_time_that_no_calendar_has(wall_at: Any) -> None:
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        read('{"digest": "d", "result": {}}', wall_at)


def test_an_unpaired_surrogate_becomes_the_replacement_character_and_pairs_stay() -> None:
    found = read(
        r'{"digest": "d", "result": {"na\uDC80me": ["a\ud800b", "\ud83d\ude00", {"x": "\\ud800"}]}}'
    ).payload.result
    assert found == {"na\ufffdme": ["a\ufffdb", "\N{GRINNING FACE}", {"x": r"\ud800"}]}
    str(found).encode()
