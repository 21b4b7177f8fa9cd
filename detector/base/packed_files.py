"""Streaming reads of files that may be compressed, with a limit on the decompressed size.

The format is detected by its magic bytes: gzip, xz and bzip2 (standard library), and zstd if Python has a module for it
(`compression.zstd` from 3.14 on, or `zstandard`). A few bytes can decompress to terabytes or request a window of
gigabytes, so both the output size and the window are bounded.
"""

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, Protocol

from rolecall.core.errors import UnreadableInput
from rolecall.detector.base.read_budget import Check, no_check

WINDOW_BYTES_MAX = 128 << 20
"""Memory limit of an xz or zstd decoder: `xz -9` needs 65 MiB, `zstd --ultra -22` 128 MiB."""
CHUNK_BYTES = 64 << 10
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
SUFFIXES = (".gz", ".xz", ".bz2", ".zst")


class _DecompressingReader(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class _Xz:
    """Decodes concatenated xz streams, as `xz` and `logrotate` write them; `lzma.LZMAFile` has no memory limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._unpack = file, lzma.LZMADecompressor(memlimit=WINDOW_BYTES_MAX)
        self._left = b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._unpack.eof:
                self._left = self._unpack.unused_data.lstrip(b"\0") or self._file.read(CHUNK_BYTES).lstrip(b"\0")
                if not self._left:
                    return b""
                self._unpack = lzma.LZMADecompressor(memlimit=WINDOW_BYTES_MAX)
            elif self._unpack.needs_input and not self._left:
                self._left = self._file.read(CHUNK_BYTES)
                if not self._left:
                    raise EOFError
            data, self._left = self._left, b""
            if out := self._unpack.decompress(data, size):
                return out

    def close(self) -> None:
        self._file.close()


class DecompressedFile(io.RawIOBase):
    """Decompressed content of a file, to be wrapped in `io.BufferedReader`. `cut_short`: the data is truncated.

    Reads raise UnreadableInput if the data is damaged or exceeds `bytes_max`.
    """

    def __init__(self, path: Path, bytes_max: int, check: Check = no_check) -> None:
        """`check` is called before each read of at most `CHUNK_BYTES`. Raises OSError, or UnreadableInput if this
        Python has no module for the format."""
        self._check = check
        self._path, self._left, self._bytes_max = path, bytes_max, bytes_max
        self.cut_short = False
        self._file, self._damages = _opened(path)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        self._check()
        try:
            data = self._file.read(CHUNK_BYTES if size < 0 else min(size, CHUNK_BYTES))
        except EOFError:
            self.cut_short = True
            return b""
        except self._damages as e:
            reason = "it needs more memory to unpack than is allowed" if "limit" in str(e) else "it is damaged"
            raise UnreadableInput(where=str(self._path), reason=f"{reason}: it cannot be unpacked") from e
        self._left -= len(data)
        if self._left < 0:
            reason = f"there are more than {self._bytes_max >> 20:,} MiB in it: cut it"
            raise UnreadableInput(where=str(self._path), reason=reason)
        return data

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _opened(path: Path) -> tuple[_DecompressingReader, tuple[type[Exception], ...]]:
    """The reader, and the exceptions that it raises on damaged data."""
    with path.open("rb") as file:
        head = file.read(6)
    match next((name for magic, name in MAGIC.items() if head.startswith(magic)), ""):
        case "gzip":
            return gzip.open(path), (gzip.BadGzipFile, zlib.error)
        case "bzip2":
            return bz2.open(path), (ValueError, OSError)
        case "xz":
            return _Xz(path.open("rb")), (lzma.LZMAError,)
        case "zstd":
            return _zstd(path)
        case _:
            return path.open("rb"), ()


def _zstd(path: Path) -> tuple[_DecompressingReader, tuple[type[Exception], ...]]:
    for name in ("compression.zstd", "zstandard"):
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if name == "zstandard":
            unpack = module.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            return unpack.stream_reader(path.open("rb"), read_across_frames=True, closefd=True), (module.ZstdError,)
        options = {module.DecompressionParameter.window_log_max: WINDOW_BYTES_MAX.bit_length() - 1}
        return module.open(path, options=options), (module.ZstdError,)
    reason = f"it is packed by zstd, for which this Python has no module: unpack it first (zstd -d {path.name})"
    raise UnreadableInput(where=str(path), reason=reason)


def head(path: Path, num_bytes: int) -> bytes:
    """The first `num_bytes` decompressed bytes, fewer if the file is shorter. Raises OSError, UnreadableInput."""
    with DecompressedFile(path, num_bytes + CHUNK_BYTES) as file:
        found = b""
        while len(found) < num_bytes and (more := file.read(num_bytes - len(found))):
            found += more
    return found
