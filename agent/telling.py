"""The reporter's side thread: tells the agent over its Unix socket who this process is, and rare events.

One message is one connection: a JSON line out, a JSON line back (`{"ok": true}` or `{"ok": false, "reason": ...}`).
Registration is repeated until the agent answers: an agent that is missing, or restarts, never holds up training.
Everything said here also stands on the state page, so a message that is lost costs time only. Standard library only.
"""

import hashlib
import json
import logging
import os
import queue
import socket
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from rolecall.agent.layout import MESSAGE_CHARACTERS_MAX

logger = logging.getLogger(__name__)

SEND_SECONDS = 1.0
"""Limit of one attempt from the side thread."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 2.0
"""Pauses between attempts double from the one to the other."""
NUM_ATTEMPTS_EVENT = 5
"""After these an event is left to the page; registration is tried for ever."""
NUM_QUEUED_MAX = 64
REPLY_BYTES_MAX = 4096
NUM_FRAMES_MAX = 20
"""Innermost frames that enter a fingerprint."""
SOCKET_PATH_BYTES_MAX = 100
"""sockaddr_un holds 108 bytes; a longer path goes through the directory's descriptor."""


def describe_exception(exc: BaseException) -> dict[str, str]:
    """`type`, `message`, `where` (innermost frame) and `fingerprint` (type and frames, without lines and values)."""
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(exc)[:MESSAGE_CHARACTERS_MAX]
    except Exception:  # noqa: BLE001 deliberate: the exception's own __str__ is foreign code
        message = "(no message: __str__ failed)"
    # A walk without `extract_tb`: that would read source files of a process that is dying.
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(exc.__traceback__)]
    shape = "|".join(f"{'/'.join(file.split('/')[-2:])}:{function}" for file, _, function in frames[-NUM_FRAMES_MAX:])
    where = "{}:{} {}".format(*frames[-1]) if frames else ""
    fingerprint = hashlib.sha256(f"{name}|{shape}".encode()).hexdigest()[:16]
    return {"type": name, "message": message, "where": where, "fingerprint": fingerprint}


class Refused(Exception):
    """The agent understood and said no."""


def socket_address(path: Path) -> tuple[str, int | None]:
    """An address for `path` that fits into sockaddr_un, and a descriptor to close afterwards (or None)."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return str(path), None
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{path.name}", directory


def tell(path: Path, message: Mapping[str, Any], seconds: float) -> None:
    """One message to the agent that listens at `path`, within `seconds`.

    Raises:
        OSError: nobody listens, or no answer in time.
        Refused: the agent said no.
    """
    deadline = monotonic() + seconds
    address, directory = socket_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(seconds)
            s.connect(address)
            s.sendall(json.dumps(message).encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n") and len(reply) < REPLY_BYTES_MAX:
                s.settimeout(max(0.001, deadline - monotonic()))
                got = s.recv(REPLY_BYTES_MAX)
                if not got:
                    raise ConnectionError("closed without an answer")
                reply += got
    finally:
        if directory is not None:
            os.close(directory)
    try:
        answer = json.loads(reply)
    except ValueError as e:
        raise ConnectionError("the answer is not JSON") from e
    if not isinstance(answer, dict) or answer.get("retry"):
        raise ConnectionError("the agent failed at it")
    if answer.get("ok") is not True:
        raise Refused(str(answer.get("reason", "")))


class Teller:
    """Owns the side thread, which lives as long as there is something to say and ends 10 s after."""

    IDLE_SECONDS = 10.0

    def __init__(self, path: Path, pid: int, start_ticks: int) -> None:
        self._path = path
        self._who = {"pid": pid, "start_ticks": start_ticks}
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(NUM_QUEUED_MAX)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._newest_identity = 0

    def register(self, *, replica: str, rank: int, incarnation: int, secret: str) -> None:
        self._newest_identity += 1
        identity = {"replica": replica, "rank": rank, "incarnation": incarnation, "secret": secret}
        self._put({"kind": "register", "identity_number": self._newest_identity, **identity})

    def exception(self, told: Mapping[str, str], *, number: int, seconds: float) -> None:
        """At once, in the calling thread, and if that fails from the side thread."""
        message = {"kind": "exception", "number": number, "detail": dict(told)}
        try:
            tell(self._path, {**self._who, **message}, seconds)
        except (OSError, Refused):
            self._put(message)

    def finished(self, reason: str) -> None:
        self._put({"kind": "finished", "reason": reason[:MESSAGE_CHARACTERS_MAX]})

    def _put(self, message: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait({**self._who, **message})
        except queue.Full:
            return  # the page still says it
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rolecall-tell", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                message = self._queue.get(timeout=self.IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            self._deliver(message)

    def _deliver(self, message: dict[str, Any]) -> None:
        pause_seconds, attempts = RETRY_SECONDS_MIN, 0
        waiting = threading.Event()
        while True:
            if message["kind"] == "register" and message["identity_number"] != self._newest_identity:
                return  # promoted meanwhile: the older identity is over
            try:
                tell(self._path, message, SEND_SECONDS)
                return
            except Refused as e:
                logger.warning("the agent refused %s: %s", message["kind"], e)
                return
            except OSError:
                attempts += 1
            if message["kind"] != "register" and attempts >= NUM_ATTEMPTS_EVENT:
                return
            waiting.wait(pause_seconds)
            pause_seconds = min(RETRY_SECONDS_MAX, 2 * pause_seconds)
