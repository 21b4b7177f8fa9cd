"""A run directory: made once, found by id, path or `latest`; its secret is the owner's; files are whole or not
there."""

import json
import os
import re
import stat
from contextlib import closing
from pathlib import Path

import pytest

from rolecall.core.errors import RunNotFound
from rolecall.core.journal.database import checked_url, run_url
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import (
    RunDir,
    create_run_dir,
    newest_runs,
    open_run_dir,
    registration_secret,
    write_atomically,
)
from rolecall.recovery.operators.run_location import run_id_of


def test_a_fresh_run_has_its_folders_and_a_secret_only_its_owner_reads(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = create_run_dir(tmp_path / "runs", "demo-1")
    finally:
        os.umask(old)
    assert run.run_id == "demo-1" and run.path.is_absolute()
    assert all(p.is_dir() for p in (run.logs, run.inject_dir, run.checkpoints, run.path / "nodes"))
    assert stat.S_IMODE(run.token_path.stat().st_mode) == 0o600
    assert len(run.token()) == 64
    run.write({})
    assert stat.S_IMODE((run.path / "run.json").stat().st_mode) == 0o600, "a URL in it may be a secret"
    assert create_run_dir(tmp_path / "runs", "demo-2").token() != run.token()
    assert run.node_dir("node-3") == run.path / "nodes" / "node-3"


def test_a_run_is_made_once(tmp_path: Path) -> None:
    create_run_dir(tmp_path, "demo-1")
    with pytest.raises(FileExistsError):
        create_run_dir(tmp_path, "demo-1")


def test_a_run_is_found_by_id_by_path_and_as_the_latest(tmp_path: Path) -> None:
    for n, name in enumerate(("b", "a")):
        run = create_run_dir(tmp_path, name)
        run.write({"seed": n})
        os.utime(run.path / "run.json", (n, n))
    assert open_run_dir(tmp_path, "b").read() == {"seed": 0}
    assert open_run_dir(tmp_path, str(tmp_path / "b")).run_id == "b"
    assert open_run_dir(tmp_path, "latest").run_id == "a"


def test_the_newest_run_is_the_one_created_last_whichever_was_written_last(tmp_path: Path) -> None:
    for created_at, name in ((1.0, "first"), (3.0, "third"), (2.0, "second")):
        create_run_dir(tmp_path, name).write({"created_at": created_at})
    assert newest_runs(tmp_path) == ["third", "second", "first"]
    old = create_run_dir(tmp_path, "unknown")
    for text in ("{}", "{", '{"created_at": null}'):
        (old.path / "run.json").write_text(text)
        os.utime(old.path / "run.json", (2.5, 2.5))
        assert newest_runs(tmp_path) == ["third", "unknown", "second", "first"], "by the time of its file"


@pytest.mark.parametrize("which", ["none", "latest", "../x"])
def test_a_missing_run_is_named(tmp_path: Path, which: str) -> None:
    with pytest.raises(RunNotFound):
        open_run_dir(tmp_path, which)


def test_a_path_that_exists_and_is_no_run_is_not_called_unknown(tmp_path: Path) -> None:
    root, other = tmp_path / "runs", tmp_path / "other"
    create_run_dir(root, "a").write({})
    other.mkdir()
    (other / "file").touch()
    (root / "half").mkdir()
    for which, said in (
        (str(other), f"{other}: a folder, but not that of a run: run.json is missing; {root} holds, newest first: a"),
        ("half", f"{root / 'half'}: a folder, but not that of a run: run.json is missing"),
        (str(other / "file"), f"{other / 'file'}: a file, not the folder of a run"),
        (str(root), f"{root}: holds runs and is none itself (a): give --runs {root}; "),
    ):
        with pytest.raises(RunNotFound, match=f"^{re.escape(said)}"):
            open_run_dir(root, which)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_damaged_run_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunNotFound, match=r"run\.json.*damaged"):
        RunDir(tmp_path).read()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a?mode=ro", "a%41b", "100%", "a b", "é", "\udce9"])
def test_a_journal_is_found_again_below_any_folder(tmp_path: Path, name: str) -> None:
    run = create_run_dir(tmp_path / name, "demo-1")
    Journal(run.database_url).close()
    with closing(Journal(run.database_url, create=False)) as journal:
        assert journal.store.where == str(run.path / "journal.db")
    assert [p.name for p in tmp_path.iterdir()] == [name] and (run.path / "journal.db").is_file()
    assert checked_url(run.database_url) == run_url(run.database_url, run.run_id) == run.database_url
    assert run_id_of(run.database_url) == "demo-1"


def test_a_run_without_its_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="missing"):
        RunDir(tmp_path).read()


def test_a_write_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, json.dumps({"a": "x" * 10_000}))
    write_atomically(path, "{}")
    assert path.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [path]


def test_a_registration_secret_is_valid_for_one_rank_of_one_incarnation() -> None:
    base = registration_secret("token", "rollout/1", 0, 1)
    assert base == registration_secret("token", "rollout/1", 0, 1)
    others = {
        registration_secret("other", "rollout/1", 0, 1),
        registration_secret("token", "rollout/2", 0, 1),
        registration_secret("token", "rollout/1", 1, 1),
        registration_secret("token", "rollout/1", 0, 2),
    }
    assert base not in others and len(others) == 4


def test_the_error_of_a_file_that_cannot_be_written_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "a.html", tmp_path / "folder"):
        with pytest.raises(OSError) as caught:
            write_atomically(path, "text")
        assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
