"""Checkpoints: safetensors and JSON, complete or invisible, no unpickling.

A checkpoint is the folder `step-<number>` with `state.safetensors` (weights and optimizer state), `commit.json` (the
state's meta) and `meta.json` (size and SHA-256 of the other two). It is written to a temporary folder, synced, then
renamed into place: a kill at any byte leaves older checkpoints intact. `load` verifies every byte before use.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from rolecall.core.errors import CheckpointCorrupt

FORMAT: Final = 1
NAME: Final = re.compile(r"^step-(\d{8})$")
UNFINISHED: Final = ".tmp-"
LEFT_BEHIND_SECONDS: Final = 2 * 3600.0
"""Age from which nobody is still writing an unfinished checkpoint."""
STATE, COMMIT, META = "state.safetensors", "commit.json", "meta.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    step: int  # last optimizer step included
    tensors: dict[str, torch.Tensor]
    meta: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of `newest_good`. `bad`: newer checkpoints that were rejected, each with the reason."""

    found: Checkpoint | None
    bad: tuple[CheckpointCorrupt, ...]


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], meta: str, *, keep: int) -> Path:
    """Writes checkpoint `step` into `folder` and removes all but the newest `keep`. An existing checkpoint of that step
    is replaced.

    Raises:
        OSError: disk full or not writable; nothing was changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, work = path_of(folder, step), folder / f"{UNFINISHED}{step:08d}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        files = {STATE: bytes_of({n: t.contiguous() for n, t in tensors.items()}), COMMIT: meta.encode()}
        sums = {n: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for n, raw in files.items()}
        head = {"format": FORMAT, "step": step, "files": sums}
        for name, raw in {**files, META: json.dumps(head, indent=2).encode()}.items():
            _write_synced(work / name, raw)
        _sync_folder(work)
        _replace_folder(work, final)
    except BaseException:
        # Deliberate, and raised again: whatever interrupts the write, no partial checkpoint remains.
        shutil.rmtree(work, ignore_errors=True)
        raise
    _sync_folder(folder)
    # Never the one just written: damaged ones of later steps may lie beside it.
    unwanted = [path_of(folder, old) for old in steps(folder)[:-keep] if old != step]
    limit = time.time() - LEFT_BEHIND_SECONDS
    # What cannot be removed now is retried at the next save.
    for path in unwanted:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path)
    return final


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and verifies all of it. Raises CheckpointCorrupt: names the file and the defect."""
    raw_meta = _read(path / META)
    try:
        head: dict[str, Any] = json.loads(raw_meta)
        form, step, files = int(head["format"]), int(head["step"]), dict(head["files"])
        sums = {n: (int(files[n]["bytes"]), str(files[n]["sha256"])) for n in (STATE, COMMIT)}
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointCorrupt(path=str(path / META), reason=f"not a checkpoint's meta ({e})") from e
    if form != FORMAT:
        raise CheckpointCorrupt(path=str(path / META), reason=f"format {form}, this version reads {FORMAT}")
    named = NAME.match(path.name)
    if named and int(named.group(1)) != step:
        raise CheckpointCorrupt(path=str(path / META), reason=f"has step {step}, unlike its folder")
    raw = {n: _checked(path / n, size, digest) for n, (size, digest) in sums.items()}
    try:
        tensors = tensors_of(raw[STATE])
    except (SafetensorError, ValueError) as e:
        raise CheckpointCorrupt(path=str(path / STATE), reason=f"not safetensors: {e}") from e
    return Checkpoint(path=path, step=step, tensors=tensors, meta=raw[COMMIT].decode(errors="replace"))


def newest_good(folder: Path) -> Search:
    """The newest intact checkpoint; newer damaged ones are reported, not ignored."""
    bad: list[CheckpointCorrupt] = []
    for step in reversed(steps(folder)):
        try:
            return Search(found=load(path_of(folder, step)), bad=tuple(bad))
        except CheckpointCorrupt as e:
            bad.append(e)
    return Search(found=None, bad=tuple(bad))


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, intact or not, ascending. Unfinished ones are invisible."""
    try:
        names = [NAME.match(p.name) for p in folder.iterdir() if p.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(int(m.group(1)) for m in names if m)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _checked(path: Path, size: int, digest: str) -> bytes:
    raw = _read(path)
    if len(raw) != size:
        raise CheckpointCorrupt(path=str(path), reason=f"{len(raw)} bytes, {size} were written")
    if hashlib.sha256(raw).hexdigest() != digest:
        raise CheckpointCorrupt(path=str(path), reason="its SHA-256 is not that of what was written")
    return raw


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise CheckpointCorrupt(path=str(path), reason=e.strerror or str(e)) from e


def _write_synced(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace_folder(work: Path, final: Path) -> None:
    """Renames the existing folder to an invisible name first, because a non-empty folder cannot be renamed over."""
    if final.exists():
        aside = final.with_name(f"{UNFINISHED}old-{final.name}-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        work.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        work.rename(final)
