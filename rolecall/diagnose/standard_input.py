"""`rolecall diagnose -`: what a pipe delivers is saved, and judged like a file with that content."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from rolecall.core.clock import SystemClock
from rolecall.core.descriptors import is_readable
from rolecall.core.errors import UnreadableInput
from rolecall.diagnose.diagnose import Input

STANDARD_INPUT = "standard input"
PATHS = (Path("-"), Path("/dev/stdin"))
BYTES_MAX = 1 << 30
"""As much as a kernel log may have."""
SECONDS_MAX = 1800.0
CHUNK_BYTES = 1 << 20


@contextmanager
def saved(source: BinaryIO) -> Iterator[Path]:
    """A file with everything that `source` delivers until its end. Raises UnreadableInput: it is a terminal, too large
    or does not end in time."""
    if source.isatty():
        raise UnreadableInput(where=STANDARD_INPUT, reason="it is a terminal: pipe a file or a log into it")
    with TemporaryDirectory() as folder:
        # The reader of a kernel log looks for the node's name in names of files and folders: these say none.
        path = Path(folder) / "-" / STANDARD_INPUT
        path.parent.mkdir()
        clock, left = SystemClock(), BYTES_MAX
        until = clock.monotonic() + SECONDS_MAX
        with path.open("wb") as file:
            while is_readable(source, until - clock.monotonic()):
                chunk = os.read(source.fileno(), CHUNK_BYTES)
                if not chunk:
                    break
                left -= len(chunk)
                if left < 0:
                    raise UnreadableInput(where=STANDARD_INPUT, reason=f"it is larger than {BYTES_MAX >> 30} GiB")
                file.write(chunk)
            else:
                raise UnreadableInput(where=STANDARD_INPUT, reason=f"it does not end within {SECONDS_MAX:.0f} s")
        yield path


def named(source: Input, path: Path) -> Input:
    """The input as the caller knows it: not by the name of the saved file."""
    remarks = tuple(remark.replace(str(path), STANDARD_INPUT) for remark in source.remarks)
    return replace(source, path=source.path.replace(str(path), STANDARD_INPUT), remarks=remarks)
