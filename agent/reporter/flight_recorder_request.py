"""Flight Recorder dumps on request: the agent asks with a file beside the state page, the process answers with another.

PyTorch writes such dumps by itself only when its watchdog gives up, minutes later. Here the reporter's ticker sees the
request (it looks each beat), and a thread of its own makes the dump: it may wait for the recorder's lock, and beats must go
on. The main thread has no part in it, and may hang in a collective; what holds the interpreter's lock, though, holds this,
too. torch is used if the process imported it, never imported.

    <pid>-<start>.flight-request            a number of 16 hexadecimal digits, by which the answer is known
    <pid>-<start>.<number>.flight           the dump, by rename
    <pid>-<start>.<number>.flight-error     or why there is none

Standard library only: training processes import this.
"""

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

DUMP_BYTES_MAX = 64 << 20
"""As much as `rolecall diagnose` reads. The default of 2,000 entries takes up to 1 MB."""
REASON_CHARS_MAX = 500
_NUMBER = re.compile(r"[0-9a-f]{16}")
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Of NCCL, and of the other backends (gloo)."""


def request_path(page: Path) -> Path:
    return page.with_suffix(".flight-request")


def answer_paths(page: Path, number: str) -> tuple[Path, Path]:
    """(dump, reason why there is none)."""
    return page.with_name(f"{page.stem}.{number}.flight"), page.with_name(f"{page.stem}.{number}.flight-error")


class FlightRecorderUnavailable(Exception):
    """There is no dump: why."""


def dump() -> bytes:
    """What the Flight Recorder of this process holds, as a pickle; without stacks, whose symbols take long.

    Raises:
        NoRecorder: torch is not imported, or too old, or its recorder fails.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    if module is None:
        raise FlightRecorderUnavailable("torch.distributed is not imported in this process")
    made: list[bytes] = []
    reason = "this build of torch has no Flight Recorder"
    for name in _RECORDERS:
        make = getattr(module, name, None)
        if make is None:
            continue
        try:
            try:
                told = make(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            except TypeError:  # torch before 2.5 takes no such arguments
                told = make()
        except Exception as e:  # noqa: BLE001 deliberate: foreign code, and nothing of it may reach training
            reason = f"{name}: {type(e).__name__}: {e}"
            continue
        if isinstance(told, bytes):
            made.append(told)
    if not made:
        raise FlightRecorderUnavailable(reason)
    return max(made, key=len)  # the recorder of the backend in use holds more


class FlightRecorderResponder:
    """Owned by the ticker thread: sees requests, and has each answered once."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._request = str(request_path(page))
        self._answered = ""
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        """One system call where nothing is asked. Never raises."""
        if not os.path.exists(self._request) or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            with open(self._request, encoding="ascii") as file:
                number = file.read(17)
            if _NUMBER.fullmatch(number) and number != self._answered:
                self._answered = number
                self._thread = threading.Thread(
                    target=self._answer, args=(number,), name="rolecall-flight", daemon=True
                )
                self._thread.start()
        except (OSError, ValueError, RuntimeError):
            return  # it was taken back, is none, or there is no room for a thread: who asks gives up by itself

    def _answer(self, number: str) -> None:
        whole, failed = answer_paths(self._page, number)
        try:
            told, path = dump(), whole
            if len(told) > DUMP_BYTES_MAX:
                told, path = f"its dump takes {len(told):,} bytes".encode(), failed
        except FlightRecorderUnavailable as e:
            told, path = str(e)[:REASON_CHARS_MAX].encode("utf-8", "replace"), failed
        try:
            with open(self._request, encoding="ascii") as file:
                if file.read(17) != number:
                    return  # nobody waits any more: the file would lie there for ever
            _write(path, told)
        except (OSError, ValueError):
            return  # taken back meanwhile, or a full disk


def _write(path: Path, told: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(told)
        os.rename(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
