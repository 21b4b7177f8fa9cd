"""A small file system that a test can fill and free again."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CHUNK = bytes(4096)


@dataclass(frozen=True, slots=True)
class SmallDisk:
    path: Path
    size_kib: int

    @property
    def _filler(self) -> Path:
        return self.path / "filler"

    def fill(self) -> None:
        """Writes until not one page is left."""
        with self._filler.open("ab", buffering=0) as file:
            for _ in range(self.size_kib):  # more than fit
                try:
                    file.write(CHUNK)
                except OSError:
                    break
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(path: Path, size_kib: int = 1024) -> Iterator[SmallDisk]:
    """Mounts a tmpfs at `path`; skips the test where this process may not mount."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=10)
    if made.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {made.stderr.strip()}")
    try:
        yield SmallDisk(path, size_kib)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=10)
