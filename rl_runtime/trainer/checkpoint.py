"""Checkpoints: safetensors and JSON, complete or invisible, no unpickling.

A checkpoint is the folder `step-<number>` with `state.safetensors` (weights and optimizer state), `commit.json` (the
state's meta) and `meta.json` (size and SHA-256 of the other two). It is written to a temporary folder, synced, then
renamed into place: a kill at any byte leaves older checkpoints intact. `load` verifies every byte before use.

Neither direction holds a copy of the state in memory: tensors are written from where they are, and read as a mapping of
the file.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rolecall.core.errors import CheckpointCorrupt
from rolecall.core.ids import process_start_ticks
from rolecall.core.proc_stat import read_stat
from rolecall.rl_runtime.protocol.checkpoints import CheckpointInfo
from rolecall.rl_runtime.trainer.state import parse_meta

FORMAT: Final = 1
NAME: Final = re.compile(r"^step-(\d{8})$")
UNFINISHED: Final = ".tmp-"
LEFT_BEHIND_SECONDS: Final = 2 * 3600.0
"""Age from which nobody is still writing an unfinished checkpoint, also on another machine that has the same disk."""
STATE, COMMIT, META = "state.safetensors", "commit.json", "meta.json"

Sum = tuple[int, str]
"""Size in bytes, and SHA-256, of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    step: int  # last optimizer step included
    tensors: dict[str, torch.Tensor]
    """Views of the file; only what is used of them is read into memory."""
    meta: str


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], meta: str) -> Path:
    """Removes what writers that ended have left in `folder`, for their room may be needed; writes checkpoint `step`.

    An existing checkpoint of that step is replaced, unless it is of a later assignment: the run has gone back since the
    tensors were copied, and has trained the step again.

    Raises:
        OSError: disk full or not writable, or there is a later one of that step; no checkpoint was changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(folder)
    final = path_of(folder, step)
    work = _unfinished(final)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        write_tensors(work / STATE, tensors)
        (work / COMMIT).write_text(meta, encoding="utf-8")
        files = {name: _synced(work / name) for name in (STATE, COMMIT)}
        sums = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
        (work / META).write_text(json.dumps({"format": FORMAT, "step": step, "files": sums}, indent=2))
        _synced(work / META)
        sync(work)
        _refuse_later(final, meta)
        _replace_folder(work, final)
    except BaseException:
        # Deliberate, and raised again: whatever interrupts the write, no partial checkpoint remains.
        shutil.rmtree(work, ignore_errors=True)
        raise
    sync(folder)
    return final


def remove(paths: Iterable[Path]) -> None:
    """Each becomes invisible at once. What cannot be removed now stays."""
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(_hidden(path))


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and verifies all of it. Raises CheckpointCorrupt: names the file and the defect."""
    step, sums = _head(path)
    meta = _verified_meta(path, sums)
    with _reading(path / STATE):
        with (path / STATE).open("rb") as file:
            _compare(path / STATE, sums[STATE], _measured(file))
        try:
            tensors = load_file(path / STATE)
        except (SafetensorError, ValueError) as e:
            raise CheckpointCorrupt(path=str(path / STATE), reason=f"not safetensors: {e}") from e
    return Checkpoint(path=path, step=step, tensors=tensors, meta=meta)


def checkpoints_in(folder: Path) -> list[CheckpointInfo]:
    """All checkpoints, oldest first, with what is known without their tensors. Unfinished ones are invisible.

    Raises:
        CheckpointCorrupt: the folder cannot be read.
    """
    with _reading(folder):
        try:
            names = [NAME.match(p.name) for p in folder.iterdir()]
        except FileNotFoundError:
            return []
    return [_info(path_of(folder, step)) for step in sorted(int(m.group(1)) for m in names if m)]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _info(path: Path) -> CheckpointInfo:
    step = int(path.name.removeprefix("step-"))
    try:
        commit = parse_meta(_verified_meta(path, _head(path)[1]))[1]
    except CheckpointCorrupt as e:
        return CheckpointInfo(path=str(path), step=step, commit=None, damage=str(e))
    except ValueError as e:
        return CheckpointInfo(path=str(path), step=step, commit=None, damage=f"{path / COMMIT}: {e}")
    return CheckpointInfo(path=str(path), step=step, commit=commit)


def _head(path: Path) -> tuple[int, Mapping[str, Sum]]:
    """(step, sums) of a checkpoint's own record."""
    with _reading(path / META):
        raw = (path / META).read_bytes()
    try:
        head: dict[str, Any] = json.loads(raw)
        form, step, files = int(head["format"]), int(head["step"]), dict(head["files"])
        sums = {n: (int(files[n]["bytes"]), str(files[n]["sha256"])) for n in (STATE, COMMIT)}
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointCorrupt(path=str(path / META), reason=f"not a checkpoint's meta ({e})") from e
    if form != FORMAT:
        raise CheckpointCorrupt(path=str(path / META), reason=f"format {form}, this version reads {FORMAT}")
    named = NAME.match(path.name)
    if named and int(named.group(1)) != step:
        raise CheckpointCorrupt(path=str(path / META), reason=f"has step {step}, unlike its folder")
    return step, sums


def _verified_meta(path: Path, sums: Mapping[str, Sum]) -> str:
    with _reading(path / COMMIT):
        raw = (path / COMMIT).read_bytes()
    _compare(path / COMMIT, sums[COMMIT], _measured(BytesIO(raw)))
    return raw.decode(errors="replace")


def _compare(path: Path, written: Sum, found: Sum) -> None:
    if found[0] != written[0]:
        raise CheckpointCorrupt(path=str(path), reason=f"{found[0]} bytes, {written[0]} were written")
    if found != written:
        raise CheckpointCorrupt(path=str(path), reason="its SHA-256 is not that of what was written")


def _measured(file: BufferedReader | BytesIO) -> Sum:
    """Of all that is in `file`, read piece by piece."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return file.seek(0, os.SEEK_END), digest


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises CheckpointCorrupt for an OSError: that `path` cannot be read, and why."""
    try:
        yield
    except OSError as e:
        raise CheckpointCorrupt(path=str(path), reason=e.strerror or str(e)) from e


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Raises OSError: the disk is full or not writable."""
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata)
    except SafetensorError as e:  # also a full disk
        raise OSError(str(e)) from e


def _synced(path: Path) -> Sum:
    """Of a file that is on disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _measured(file)


def sync(path: Path) -> None:
    """Returns when a file, or the list of a folder's entries, is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unfinished(path: Path) -> Path:
    """An invisible name for `path`, of this process."""
    pid = os.getpid()
    return path.with_name(f"{UNFINISHED}{path.name}@{socket.gethostname()}@{pid}@{process_start_ticks(pid)}")


def _remove_left_behind(folder: Path) -> None:
    limit = time.time() - LEFT_BEHIND_SECONDS
    for path in folder.glob(f"{UNFINISHED}*@*@*@*"):
        with contextlib.suppress(OSError, ValueError):  # it stays
            if _writer_has_ended(path) or path.stat().st_mtime < limit:
                shutil.rmtree(path)


def _writer_has_ended(unfinished: Path) -> bool:
    """Of a process of another machine this is unknown."""
    host, pid, start_ticks = unfinished.name.split("@")[-3:]
    if host != socket.gethostname():
        return False
    stat = read_stat(int(pid))
    return stat is None or stat.has_ended or str(stat.start_ticks) != start_ticks


def _refuse_later(final: Path, meta: str) -> None:
    there = _info(final).commit
    if there is not None and there.ledger.position > parse_meta(meta)[1].ledger.position:
        raise OSError(f"{final.name} is of a later training of that step")


def _replace_folder(work: Path, final: Path) -> None:
    """Hides the existing folder first, because a non-empty folder cannot be renamed over."""
    if final.exists():
        before = _hidden(final)
        work.rename(final)
        shutil.rmtree(before, ignore_errors=True)
    else:
        work.rename(final)


def _hidden(path: Path) -> Path:
    """Renames it to an invisible name."""
    aside = _unfinished(path.with_name(f"old-{path.name}"))
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)
