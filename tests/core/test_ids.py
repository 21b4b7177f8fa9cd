"""Ids match one pattern, a replica is role/index, and a process is distinguished from a later one with its PID."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.errors import InvalidId, RolecallError
from rolecall.core.ids import ID_PATTERN, NodeId, ProcessId, checked_id, process_start_ticks, replica_id, split_replica

IDS = st.from_regex(ID_PATTERN, fullmatch=True)


@given(role=IDS, index=st.integers(0, 999_999))
def test_a_replica_is_split_as_it_was_made(role: str, index: int) -> None:
    assert split_replica(replica_id(role, index)) == (role, index)


@given(IDS)
def test_a_legal_id_is_itself(text: str) -> None:
    assert checked_id(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "A", "-a", ".a", "_a", "a b", "a/b", "a" * 64, "ä", "a\n", "a\x00", "[red]", "../x", "<b>"],
)
def test_an_illegal_id_is_refused_and_named(text: str) -> None:
    with pytest.raises(InvalidId) as caught:
        checked_id(text, "run id")
    assert caught.value.text == text
    assert "run id" in str(caught.value) and "write 1 to 63 of a-z" in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RolecallError)


@pytest.mark.parametrize(
    "text", ["rollout", "rollout/", "/1", "rollout/01", "rollout/-1", "rollout/1/2", "rollout/1\n", "Rollout/1", "r/٣"]
)
def test_an_illegal_replica_is_refused(text: str) -> None:
    with pytest.raises(InvalidId):
        split_replica(text)


def test_start_ticks_of_a_living_process_and_of_none() -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None and ticks > 0
    assert process_start_ticks(os.getpid()) == ticks
    assert process_start_ticks(2**22 + 1) is None


def test_a_command_name_with_brackets_and_spaces_does_not_move_the_fields(tmp_path: Path) -> None:
    (tmp_path / "42").mkdir()
    fields = " ".join(str(n) for n in range(4, 53))  # fields 4.. hold their own number
    (tmp_path / "42" / "stat").write_text(f"42 (a ) S 1 (x) R {fields}\n")
    assert process_start_ticks(42, proc=tmp_path) == 22


def test_processes_are_ordered_and_written_with_all_three_parts() -> None:
    process = ProcessId(node=NodeId("node-1"), pid=7, start_ticks=9)
    assert str(process) == "node-1:7:9"
    assert process < ProcessId(node=NodeId("node-1"), pid=7, start_ticks=10)
