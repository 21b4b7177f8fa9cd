"""pytest tests/rl_runtime/trainer/test_checkpoint.py"""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rolecall.core.errors import CheckpointCorrupt
from rolecall.core.ids import process_start_ticks
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.rl_runtime.protocol.messages import first_commit
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.checkpoint import checkpoints_in, load, path_of, remove, save
from rolecall.rl_runtime.trainer.state import META_FORMAT
from tests.full_disk import small_disk


def meta(position: int = 1) -> str:
    """Of a commit whose step was assigned at this position of the ledger."""
    commit = replace(first_commit(), ledger=ChainHead(position=position, hash="0"))
    return json.dumps({"format": META_FORMAT, "optimizer_step": 1, "commit": asdict(commit)})


META = meta()


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((3, 2), value), "exp_avg/a": torch.full((3, 2), -value)}


def steps(folder: Path) -> list[int]:
    return [info.step for info in checkpoints_in(folder)]


def test_round_trip_bit_by_bit(tmp_path: Path) -> None:
    exact = {"a": torch.randn(5, 7), "b": torch.tensor([float("nan"), -0.0, 1e-45]), "n": torch.arange(3)}
    exact["t"] = exact["a"].T
    path = save(tmp_path, 12, exact, META)
    assert path == path_of(tmp_path, 12)
    got = load(path)
    assert (got.step, got.meta, got.tensors.keys()) == (12, META, exact.keys())
    for name, tensor in exact.items():
        assert got.tensors[name].numpy().tobytes() == tensor.numpy().tobytes()
    [info] = checkpoints_in(tmp_path)
    assert (info.path, info.step, info.damage) == (str(path), 12, "")
    assert info.commit is not None and info.commit.ledger.position == 1


def test_removes_what_it_is_told_to(tmp_path: Path) -> None:
    paths = [save(tmp_path, step, tensors(step), META) for step in (5, 10, 15)]
    mapped = load(paths[0])
    remove([paths[0], paths[2], tmp_path / "step-00000020"])
    assert steps(tmp_path) == [10] and os.listdir(tmp_path) == ["step-00000010"]
    assert float(mapped.tensors["weight/a"][2, 1]) == 5.0, "what has been opened stays readable"


def test_same_step_again_replaces_unless_it_is_of_an_earlier_assignment(tmp_path: Path) -> None:
    save(tmp_path, 5, tensors(1.0), meta(10))
    save(tmp_path, 5, tensors(2.0), meta(10))
    assert float(load(path_of(tmp_path, 5)).tensors["weight/a"][0, 0]) == 2.0
    save(tmp_path, 5, tensors(3.0), meta(20))
    with pytest.raises(OSError, match="step-00000005 is of a later training of that step"):
        save(tmp_path, 5, tensors(4.0), meta(10))
    assert float(load(path_of(tmp_path, 5)).tensors["weight/a"][0, 0]) == 3.0
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_what_an_ended_writer_left_behind_is_removed_and_nothing_younger_of_others(tmp_path: Path) -> None:
    me, here = os.getpid(), socket.gethostname()
    names = [
        f"1@elsewhere@7@{me}",
        f"2@elsewhere@8@{me}",
        f"3@{here}@{me}@{process_start_ticks(me)}",
        f"4@{here}@{me}@1",
    ]
    old, young, mine, reused = (tmp_path / f"{checkpoint.UNFINISHED}{name}" for name in names)
    for folder in (old, young, mine, reused):
        folder.mkdir()
    past = young.stat().st_mtime - checkpoint.LEFT_BEHIND_SECONDS - 60
    os.utime(old, (past, past))
    made = save(tmp_path, 5, tensors(1.0), META)
    assert set(tmp_path.iterdir()) == {young, mine, made}


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from rolecall.rl_runtime.trainer import checkpoint

checkpoint.sync = lambda _folder: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(Path(sys.argv[1]), 1, {"a": torch.zeros(1 << 19)}, sys.argv[2])
"""


def test_what_a_killed_writer_left_does_not_keep_the_next_one_from_its_room(tmp_path: Path) -> None:
    """2 MiB each, on a disk of 3 MiB."""
    with small_disk(tmp_path / "disk", size_kib=3 * 1024) as disk:
        killed = subprocess.run([sys.executable, "-c", KILLED, str(disk.path), META], check=False, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        [left] = disk.path.iterdir()
        assert (left / "state.safetensors").stat().st_size > 1 << 21
        made = save(disk.path, 2, {"a": torch.ones(1 << 19)}, META)
        assert load(made).step == 2 and list(disk.path.iterdir()) == [made]


FILES = ["state.safetensors", "commit.json", "meta.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "empty"])
def test_harm_is_named(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 10, tensors(1.0), META)
    save(tmp_path, 20, tensors(2.0), META)
    victim = path_of(tmp_path, 20) / name
    raw = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        at = raw.index(b'"sha256": "') + 12 if name == "meta.json" else len(raw) - 1
        raw[at] ^= 0x01
        victim.write_bytes({"cut": bytes(raw[:-1]), "flip": bytes(raw), "empty": b""}[harm])
    with pytest.raises(CheckpointCorrupt) as corrupt:
        load(path_of(tmp_path, 20))
    blamed = Path(corrupt.value.path).name
    # A sum that was changed in meta.json shows at the file that it is the sum of.
    assert blamed == name or (name == "meta.json" and blamed in FILES)
    good, bad = checkpoints_in(tmp_path)
    assert (good.step, bad.step) == (10, 20) and good.commit is not None
    is_found = blamed != "state.safetensors"
    assert (bad.commit is None) == is_found and bad.damage == (str(corrupt.value) if is_found else "")


def test_renamed_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10, tensors(1.0), META)
    path.rename(path_of(tmp_path, 30))
    with pytest.raises(CheckpointCorrupt, match="has step 10"):
        load(path_of(tmp_path, 30))
    head = path_of(tmp_path, 30) / "meta.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "format": 99}))
    with pytest.raises(CheckpointCorrupt, match="format 99"):
        load(path_of(tmp_path, 30))
    save(tmp_path, 40, tensors(1.0), '{"format": 1}')
    assert [(i.commit, "KeyError: 'commit'" in i.damage) for i in checkpoints_in(tmp_path)] == [
        (None, False),
        (None, True),
    ]


def test_an_empty_folder_has_no_checkpoint_and_a_file_is_none(tmp_path: Path) -> None:
    assert checkpoints_in(tmp_path / "absent") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointCorrupt, match="file: Not a directory"):
        checkpoints_in(tmp_path / "file")


def test_a_kill_at_any_write_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every effect of `save` fails in turn, as if the process died there: what was there before still loads."""

    class Died(BaseException):
        pass

    save(tmp_path, 10, tensors(1.0), META)
    effects = ["write_tensors", "_synced", "sync", "_replace_folder"]
    calls = 0

    def dying(real: object, at: int) -> object:
        def effect(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Died
            return real(*args)  # type: ignore[operator]

        return effect

    num_effects = 7  # the tensors, three files synced, the folder, the rename, the folder above
    for at in range(1, num_effects + 1):
        calls = 0
        with monkeypatch.context() as patch:
            for name in effects:
                patch.setattr(checkpoint, name, dying(getattr(checkpoint, name), at))
            with pytest.raises(Died):
                save(tmp_path, 20, tensors(2.0), META)
        found = checkpoints_in(tmp_path)
        assert [load(Path(info.path)).step for info in found] == ([10] if at < num_effects else [10, 20])
    assert calls == num_effects


WITHOUT_COPIES = """
import resource, sys
from pathlib import Path
import torch
from rolecall.rl_runtime.trainer import checkpoint

def anonymous():
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(rows[name].split()[0]) << 10 for name in ("RssAnon", "VmData")}

MIB, folder, META = 1 << 20, Path(sys.argv[1]), sys.argv[2]
checkpoint.load(checkpoint.save(folder, 1, {"a": torch.zeros(3)}, META))  # whatever is made once
tensors = {f"weight/{n}": torch.full((6 * MIB,), float(n)) for n in range(4)}  # 96 MiB
limit = anonymous()["VmData"] + 32 * MIB
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
path = checkpoint.save(folder, 2, tensors, META)
resource.setrlimit(resource.RLIMIT_DATA, before)
del tensors
before = anonymous()["RssAnon"]
found = checkpoint.load(path)
mine = found.tensors["weight/3"].chunk(2)[1].clone()  # as one of two ranks takes its part
assert float(mine.sum()) == 3.0 * 3 * MIB
more = anonymous()["RssAnon"] - before
assert more < 32 * MIB, f"{more / MIB:.0f} MiB"
"""


def test_no_copy_of_the_state_is_held_while_it_is_written_and_read(tmp_path: Path) -> None:
    """With 96 MiB of tensors, in a process that may have 32 MiB more."""
    argv = [sys.executable, "-c", WITHOUT_COPIES, str(tmp_path), META]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
