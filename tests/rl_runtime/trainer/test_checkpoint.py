"""pytest tests/rl_runtime/trainer/test_checkpoint.py"""

import json
import os
from pathlib import Path

import pytest
import torch

from rolecall.core.errors import CheckpointCorrupt
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.checkpoint import load, newest_good, path_of, save, steps

META = '{"commit": 1}'


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((3, 2), value), "exp_avg/a": torch.full((3, 2), -value)}


def test_round_trip_bit_by_bit(tmp_path: Path) -> None:
    exact = {"a": torch.randn(5, 7), "b": torch.tensor([float("nan"), -0.0, 1e-45]), "n": torch.arange(3)}
    path = save(tmp_path, 12, exact, META, keep=3)
    assert path == path_of(tmp_path, 12)
    got = load(path)
    assert (got.step, got.meta, got.tensors.keys()) == (12, META, exact.keys())
    for name, tensor in exact.items():
        assert got.tensors[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, tensors(step), META, keep=2)
    assert steps(tmp_path) == [15, 20]


def test_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 5, tensors(1.0), META, keep=2)
    save(tmp_path, 5, tensors(2.0), META, keep=2)
    assert float(load(path_of(tmp_path, 5)).tensors["weight/a"][0, 0]) == 2.0
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_the_one_just_written_stays_beside_damaged_later_ones(tmp_path: Path) -> None:
    for step in (20, 30, 40):
        save(tmp_path, step, tensors(step), META, keep=3)
    save(tmp_path, 25, tensors(25), META, keep=2)
    assert steps(tmp_path) == [25, 30, 40]


def test_what_an_ended_writer_left_behind_is_removed_and_nothing_younger(tmp_path: Path) -> None:
    old, young = tmp_path / f"{checkpoint.UNFINISHED}00000001-7", tmp_path / f"{checkpoint.UNFINISHED}00000002-8"
    for folder in (old, young):
        folder.mkdir()
    past = young.stat().st_mtime - checkpoint.LEFT_BEHIND_SECONDS - 60
    os.utime(old, (past, past))
    save(tmp_path, 5, tensors(1.0), META, keep=2)
    assert not old.exists() and young.exists()


FILES = ["state.safetensors", "commit.json", "meta.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "empty"])
def test_harm_is_named_and_the_one_before_offered(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 10, tensors(1.0), META, keep=3)
    save(tmp_path, 20, tensors(2.0), META, keep=3)
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
    search = newest_good(tmp_path)
    assert search.found is not None
    assert search.found.step == 10
    assert [Path(b.path).parent.name for b in search.bad] == ["step-00000020"]


def test_renamed_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10, tensors(1.0), META, keep=3)
    path.rename(path_of(tmp_path, 30))
    with pytest.raises(CheckpointCorrupt, match="has step 10"):
        load(path_of(tmp_path, 30))
    head = path_of(tmp_path, 30) / "meta.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "format": 99}))
    with pytest.raises(CheckpointCorrupt, match="format 99"):
        load(path_of(tmp_path, 30))


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "absent") == checkpoint.Search(found=None, bad=())


def test_a_kill_at_any_write_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every effect of `save` fails in turn, as if the process died there: what was there before still loads."""

    class Died(BaseException):
        pass

    save(tmp_path, 10, tensors(1.0), META, keep=3)
    effects = ["_write_synced", "_sync_folder", "_replace_folder"]
    calls = 0

    def dying(real: object, at: int) -> object:
        def effect(*args: object) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Died
            real(*args)  # type: ignore[operator]

        return effect

    num_effects = 6  # three files, the folder, the rename, the folder above
    for at in range(1, num_effects + 1):
        calls = 0
        with monkeypatch.context() as patch:
            for name in effects:
                patch.setattr(checkpoint, name, dying(getattr(checkpoint, name), at))
            with pytest.raises(Died):
                save(tmp_path, 20, tensors(2.0), META, keep=3)
        search = newest_good(tmp_path)
        assert search.found is not None
        assert search.bad == ()
        assert search.found.step == (10 if at < num_effects else 20)
    assert calls == num_effects
