"""Small files that are read again and again."""

import os
from pathlib import Path

import pytest

from rolecall.agent.collectors.counters import OpenFileCache, read_whole


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_kept_file_is_reread_each_time_and_only_some_stay_open(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(5)]
    files, before = OpenFileCache(num_max=3), num_open()
    for poll in range(3):
        for n, path in enumerate(paths):
            path.write_text(f"{poll * 10 + n}\n")
        assert [files.number(str(p)) for p in paths] == [poll * 10 + n for n in range(5)]
        assert num_open() == before + 3
    files.close()
    assert num_open() == before


def test_of_a_device_that_went_and_came_the_new_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "nic1").mkdir()
    (tmp_path / "nic10").mkdir()
    path, other = tmp_path / "nic1" / "count", tmp_path / "nic10" / "count"
    path.write_text("1")
    other.write_text("7")
    files, before = OpenFileCache(), num_open()
    assert (files.number(str(path)), files.number(str(other))) == (1, 7)
    path.unlink()
    path.write_text("2")
    files.forget(str(tmp_path / "nic1"))
    assert num_open() == before + 1, "that of another device, whose name begins alike, is kept"
    assert files.number(str(path)) == 2
    files.close()


def test_a_kept_file_that_answers_with_an_error_is_reopened(tmp_path: Path) -> None:
    """As one of sysfs whose device is gone; here its descriptor is made that of a folder, which cannot be read."""
    path = tmp_path / "count"
    path.write_text("1")
    files = OpenFileCache()
    assert files.number(str(path)) == 1
    (kept,) = files._open.values()
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, kept)
    os.close(folder)
    before = num_open()
    assert files.number(str(path)) == 1
    assert num_open() == before
    files.close()


def test_a_file_of_several_pages_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 200_000 + "end")
    assert read_whole(str(tmp_path / "file")) == "x" * 200_000 + "end"
    with pytest.raises(OSError):
        read_whole(str(tmp_path / "none"))
