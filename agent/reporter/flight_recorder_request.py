"""Flight Recorder dumps on request: the agent writes a request file beside the state page, the process a response file.

PyTorch itself writes dumps only when its watchdog times out, minutes later. Here the reporter's ticker polls for a
request at each beat, and a separate thread makes the dump, because it may wait for the recorder's lock while beats
continue. It works while the main thread hangs in a collective, but not while anything holds the GIL. torch is used if
the process has imported it, and never imported here.

    <pid>-<start>.flight-request            the request's number, 16 hexadecimal digits
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

from rolecall.agent.data_dir import open_owned
from rolecall.agent.reporter.page_layout import PAGE_MODE

DUMP_BYTES_MAX = 64 << 20
"""The limit of `rolecall diagnose`. The default of 2,000 entries takes up to 1 MB."""
REASON_CHARS_MAX = 500
_NUMBER = re.compile(r"[0-9a-f]{16}")
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables with the number of collectives that the recorder keeps: the setting, and its name before torch 2.9. Set
before torch is imported."""
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""For NCCL, and for other backends (gloo)."""


def request_path(page: Path) -> Path:
    return page.with_suffix(".flight-request")


def answer_paths(page: Path, number: str) -> tuple[Path, Path]:
    """(dump, reason why there is none)."""
    return page.with_name(f"{page.stem}.{number}.flight"), page.with_name(f"{page.stem}.{number}.flight-error")


class FlightRecorderUnavailable(Exception):
    """No dump; the text says why."""


def dump() -> bytes:
    """This process's Flight Recorder as a pickle; without stacks, whose symbolization is slow.

    Raises:
        FlightRecorderUnavailable: torch is not imported, or too old, or its recorder fails.
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
                data = make(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            except TypeError:  # torch before 2.5 takes no such arguments
                data = make()
        except Exception as e:  # noqa: BLE001 foreign code must not raise into training
            reason = f"{name}: {type(e).__name__}: {e}"
            continue
        if isinstance(data, bytes):
            made.append(data)
    if not made:
        raise FlightRecorderUnavailable(reason)
    return max(made, key=len)  # the recorder of the backend in use holds more


class FlightRecorderResponder:
    """Owned by the ticker thread: answers each request once."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._request = str(request_path(page))
        self._answered = ""
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        """One system call without a request. Never raises."""
        if not os.path.lexists(self._request) or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            number = self._number()
            if _NUMBER.fullmatch(number) and number != self._answered:
                self._answered = number
                self._thread = threading.Thread(
                    target=self._answer, args=(number,), name="rolecall-flight", daemon=True
                )
                self._thread.start()
        except (OSError, ValueError, RuntimeError):
            return  # withdrawn, malformed, not the agent's, or no thread available: the agent times out

    def _number(self) -> str:
        """Of the request. Raises OSError, ValueError: there is none that the agent wrote.

        Others of the group may create files here. The ticker waits for none of them: a rank without beats is hung.
        """
        agents = {0, os.stat(self._page.parent).st_uid}
        with open(open_owned(self._request, agents), encoding="ascii") as file:
            return file.read(17)

    def _answer(self, number: str) -> None:
        whole, failed = answer_paths(self._page, number)
        try:
            data, path = dump(), whole
            if len(data) > DUMP_BYTES_MAX:
                data, path = f"its dump takes {len(data):,} bytes".encode(), failed
        except FlightRecorderUnavailable as e:
            data, path = str(e)[:REASON_CHARS_MAX].encode("utf-8", "replace"), failed
        try:
            if self._number() != number:
                return  # withdrawn: the response would never be removed
            _write(path, data)
        except (OSError, ValueError):
            return  # withdrawn, or a full disk


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PAGE_MODE)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, PAGE_MODE)
            file.write(data)
        os.rename(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
