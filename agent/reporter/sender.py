"""The reporter's side thread: sends registration and rare events to the agent over its Unix socket.

Callers enqueue a message and continue. One message is one connection: a JSON line out, a JSON line back (`{"ok": true}`
or `{"ok": false, "reason": ...}`). Registration is retried until the agent answers. It is repeated to an agent that
starts later, which may have lost it, and to one that refuses it for now, as while the former process of the rank lives:
a missing or restarting agent never delays training. Everything sent is also on the state page, which the agent reads
once more after the process's exit: a lost message only delays its event. Standard library only."""

import hashlib
import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from rolecall.agent.reporter.page_layout import MESSAGE_CHARACTERS_MAX

logger = logging.getLogger(__name__)

SEND_SECONDS = 1.0
"""Limit of one attempt from the side thread."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 2.0
"""Bounds of the exponential backoff between attempts."""
NUM_ATTEMPTS_EVENT = 5
"""Attempts to send an event, which is on the page anyway; registration is retried forever."""
AGENT_CHECK_SECONDS = 5.0
"""Between two looks at the agent's socket, which a new agent replaces; and between two registrations that are refused
for now. 256 processes that wait for a place cost the agent 50 messages a second."""
NUM_QUEUED_MAX = 64
REPLY_BYTES_MAX = 4096
NUM_FRAMES_MAX = 20
"""Innermost frames included in a fingerprint."""
NUM_FILES_REMEMBERED = 256
SOCKET_PATH_BYTES_MAX = 100
"""sockaddr_un holds 108 bytes; a longer path goes through the directory's descriptor."""


def describe_exception(exc: BaseException) -> dict[str, str]:
    """`type`, `message`, `where` (innermost frame) and `fingerprint` (type and frames, without lines and values)."""
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(exc)[:MESSAGE_CHARACTERS_MAX]
    except Exception:  # noqa: BLE001 the exception's __str__ is foreign code
        message = "(no message: __str__ failed)"
    # Not `extract_tb`, which would read source files in a dying process.
    frames, where, short, at = [], "", _short_names.get, exc.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        file, function = code.co_filename, code.co_name
        frames.append(f"{short(file) or _short(file)}:{function}")
        last, at = at, at.tb_next
        if at is None:
            where = f"{file}:{last.tb_lineno} {function}"
    shape = "|".join(frames[-NUM_FRAMES_MAX:])
    fingerprint = hashlib.blake2s(f"{name}|{shape}".encode(), digest_size=8).hexdigest()  # half of SHA-256's time
    return {"type": name, "message": message, "where": where, "fingerprint": fingerprint}


def _short(file: str) -> str:
    """`folder/file.py`: the same on every node."""
    short = "/".join(file.split("/")[-2:])
    if len(_short_names) < NUM_FILES_REMEMBERED:
        _short_names[file] = short
    return short


_short_names: dict[str, str] = {}


class RegistrationRefused(Exception):
    """The agent rejected the message. `for_now`: it may accept the same later."""

    def __init__(self, reason: str, *, for_now: bool = False) -> None:
        self.for_now = for_now
        super().__init__(reason)


def socket_address(path: Path) -> tuple[str, int | None]:
    """An address for `path` that fits into sockaddr_un, and a descriptor to close afterwards (or None)."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return str(path), None
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{path.name}", directory


def send_message(path: Path, message: Mapping[str, Any], seconds: float) -> None:
    """One message to the agent that listens at `path`, within `seconds`.

    Raises:
        OSError: nothing listens, or no answer in time.
        RegistrationRefused: the agent rejected it.
    """
    deadline = monotonic() + seconds
    address, directory = socket_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(address)
            connection.sendall(json.dumps(message).encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n") and len(reply) < REPLY_BYTES_MAX:
                connection.settimeout(max(0.001, deadline - monotonic()))
                got = connection.recv(REPLY_BYTES_MAX)
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
        raise ConnectionError("the agent failed to handle it")
    if answer.get("ok") is not True:
        raise RegistrationRefused(str(answer.get("reason", "")), for_now=answer.get("for_now") is True)


class ReporterClient:
    """Owns the side thread, which sleeps until a message is queued."""

    def __init__(self, path: Path, pid: int, start_ticks: int) -> None:
        self._path = path
        self._who = {"pid": pid, "start_ticks": start_ticks}
        # Not queue.Queue: its lock is not reentrant, and a signal handler may report from inside a `put`.
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event] = queue.SimpleQueue()
        self._newest_identity = 0
        self._registration: dict[str, Any] | None = None  # the newest
        self._registered_at: tuple[int, int] | None = None  # the socket that it was sent to; None: refused for now
        self._refusal = ""  # the newest
        self._heard = True  # whether the last attempt reached an agent
        threading.Thread(target=self._run, name="rolecall-sender", daemon=True).start()

    def register(
        self, *, replica: str, rank: int, incarnation: int, secret: str, detail: Mapping[str, str] | None = None
    ) -> None:
        """`detail`: of the event that the agent writes."""
        self._newest_identity += 1
        identity = {"replica": replica, "rank": rank, "incarnation": incarnation, "secret": secret}
        numbered = {"kind": "register", "identity_number": self._newest_identity}
        self._registration = {**numbered, **identity, "detail": dict(detail or {})}
        self._put(self._registration)

    def exception(self, detail: Mapping[str, str], *, number: int) -> None:
        self._put({"kind": "exception", "number": number, "detail": detail})

    def finished(self, reason: str) -> None:
        self._put({"kind": "finished", "reason": reason[:MESSAGE_CHARACTERS_MAX]})

    def flush(self, seconds: float) -> None:
        """Waits until the queue is sent, at most `seconds`; returns at once if no agent listens."""
        if self._heard:
            sent = threading.Event()
            self._queue.put(sent)
            sent.wait(seconds)

    def _put(self, message: dict[str, Any]) -> None:
        if self._queue.qsize() < NUM_QUEUED_MAX:  # else the page still holds it
            self._queue.put(message)

    def _run(self) -> None:
        while True:
            try:
                message = self._queue.get(timeout=AGENT_CHECK_SECONDS)
            except queue.Empty:
                if self._registration is None or self._socket() in (None, self._registered_at):
                    continue
                message = self._registration
            if isinstance(message, threading.Event):
                message.set()
            else:
                self._deliver({**self._who, **message})

    def _deliver(self, message: dict[str, Any]) -> None:
        pause_seconds, attempts = RETRY_SECONDS_MIN, 0
        waiting = threading.Event()
        while True:
            if message["kind"] == "register" and message["identity_number"] != self._newest_identity:
                return  # promoted in the meantime: the older identity is obsolete
            try:
                if message["kind"] == "register":
                    self._registered_at = self._socket()
                send_message(self._path, message, SEND_SECONDS)
                self._heard = True
                return
            except RegistrationRefused as e:
                self._heard = True
                if e.for_now:
                    self._registered_at = None  # it is sent again, as to a new agent
                if str(e) != self._refusal:
                    logger.warning("the agent refused %s: %s", message["kind"], e)
                self._refusal = str(e)
                return
            except OSError:
                self._heard = False
                attempts += 1
            if message["kind"] != "register" and attempts >= NUM_ATTEMPTS_EVENT:
                return
            waiting.wait(pause_seconds)
            pause_seconds = min(RETRY_SECONDS_MAX, 2 * pause_seconds)

    def _socket(self) -> tuple[int, int] | None:
        """Inode and time of creation; None: there is none."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
