"""Whose files may be those of a process, also of one in a container."""

from pathlib import Path

import pytest

from rolecall.agent.file_owners import owners_of_files


@pytest.mark.parametrize(
    ("uids", "uid_map", "expected"),
    [
        ("1000 1000 1000 1000", "0 0 4294967295", {1000}),
        ("1000 1001 1002 1003", "", {1000, 1001, 1002, 1003}),
        ("66536 66536 66536 66536", "0 65536 65536", {66536, 1000}),  # a container; its volume may be idmapped
        ("100999 100999 100999 100999", "0 1000 1\n1 100000 65536", {100999, 1000}),
    ],
)
def test_whose_pages_may_be_those_of_a_process(tmp_path: Path, uids: str, uid_map: str, expected: set[int]) -> None:
    process = tmp_path / "7"
    process.mkdir()
    (process / "status").write_text("Name:\tUid: 5\nPid:\t7\nUid:\t" + uids.replace(" ", "\t") + "\nGid:\t5\t5\t5\t5\n")
    (process / "uid_map").write_text(uid_map)
    assert owners_of_files(tmp_path, 7, tmp_path) == expected | {0, tmp_path.stat().st_uid}


def test_of_a_process_whose_users_cannot_be_read_any_page_may_be(tmp_path: Path) -> None:
    assert owners_of_files(tmp_path, 7, tmp_path) is None
