"""The agent's Unix socket: one JSON line in, one JSON line out, then closed.

`{"kind": "register", pid, start_ticks, replica, rank, incarnation, secret}`, `{"kind": "exception", ..., number,
detail}`, `{"kind": "finished", ..., reason}`. A refusal has a `reason`; `for_now` says that the same may be accepted
later, `retry` that the agent failed at it. The sender is identified by the kernel (SO_PEERCRED), never by the message.
One thread serves all connections; a slow one blocks no other and is closed after a deadline. Beyond
`CALLS_PER_SECOND_MAX` callers wait, which bounds the CPU cost of a process that calls in a loop."""

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import LoggedOnce
from rolecall.agent.data_dir import remove
from rolecall.agent.identity import ClaimRejected
from rolecall.agent.reporter.sender import socket_address
from rolecall.core.clock import Clock
from rolecall.core.descriptors import is_readable

logger = logging.getLogger(__name__)

LINE_BYTES_MAX = 16 * 1024
NUM_CONNECTIONS_MAX = 64
CONNECTION_SECONDS_MAX = 2.0
CALLS_PER_SECOND_MAX = 500
"""More than all ranks of a node send when a job starts or fails; about 3 % of a core."""
COMPLAINT_SECONDS = 5.0
"""Minimum time between two log lines about refused messages; the registry counts all."""
LISTEN_BACKLOG = 64
_PEERCRED = struct.Struct("3i")  # pid, uid, gid

Answerer = Callable[[int, dict[str, Any]], None]
"""Takes the sender's PID and the message; raises ClaimRejected."""


@dataclass(slots=True)
class _RegistrationPeer:
    socket: socket.socket
    peer_pid: int
    deadline: float
    received: bytearray


class RegistrationServer:
    """Listens at `path`. Handlers are called in the server's thread."""

    def __init__(self, path: Path, answerers: Mapping[str, Answerer], clock: Clock, mode: int = 0o600) -> None:
        """Replaces the socket file of a dead predecessor. Raises OSError: the socket cannot be created."""
        self._path, self._answerers, self._clock, self._mode = path, answerers, clock, mode
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._listener = self._listen()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._open: dict[int, _RegistrationPeer] = {}
        self.num_malformed = 0  # not JSON, unknown kind, or too long
        self._complained_at = float("-inf")
        self._logged = LoggedOnce()
        self._second_at, self._num_in_second = clock.monotonic(), 0
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def _listen(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        address, directory = socket_address(self._path)
        try:
            listener.bind(address)
            self._path.chmod(self._mode)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
        finally:
            if directory is not None:
                os.close(directory)
        return listener

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread (waits <= 2 s) and removes the socket file."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(2.0)
        for connection in self._open.values():
            connection.socket.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)
        remove(self._path)

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(CONNECTION_SECONDS_MAX if self._open else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._open:
                    self._receive(self._open[key.fd])
            now = self._clock.monotonic()
            for late in [c for c in self._open.values() if c.deadline <= now]:
                self._close(late)
            if now - self._second_at >= 1.0:
                self._second_at, self._num_in_second = now, 0
            elif self._num_in_second >= CALLS_PER_SECOND_MAX:
                self._rest(self._second_at + 1.0 - now)

    def _rest(self, seconds: float) -> None:
        """Pauses until `stop`, at most `seconds`; callers wait in the backlog."""
        is_readable(self._wake, seconds)

    def _accept(self) -> None:
        self._num_in_second += 1  # counts failures too: without free descriptors `accept` fails immediately again
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the caller disconnected, or descriptors ran out: it will retry
        if len(self._open) >= NUM_CONNECTIONS_MAX:
            accepted.close()
            return
        accepted.setblocking(False)
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        peer_pid = int(_PEERCRED.unpack(credentials)[0])
        deadline = self._clock.monotonic() + CONNECTION_SECONDS_MAX
        self._open[accepted.fileno()] = _RegistrationPeer(accepted, peer_pid, deadline, bytearray())
        self._selector.register(accepted, selectors.EVENT_READ, None)

    def _receive(self, connection: _RegistrationPeer) -> None:
        try:
            got = connection.socket.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        connection.received += got
        if b"\n" in connection.received:
            self._answer(connection)
        elif not got or len(connection.received) >= LINE_BYTES_MAX:
            self.num_malformed += bool(connection.received)
            self._close(connection)

    def _answer(self, connection: _RegistrationPeer) -> None:
        answer = self._result(connection.peer_pid, bytes(connection.received).split(b"\n", 1)[0])
        with contextlib.suppress(OSError):  # it disconnected before the reply
            connection.socket.send(json.dumps(answer).encode() + b"\n")
        self._close(connection)

    def _result(self, peer_pid: int, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return self._malformed("not JSON")
        if not isinstance(message, dict):
            return self._malformed("not a JSON object")
        answerer = self._answerers.get(str(message.get("kind")))
        if answerer is None:
            return self._malformed(f"kind must be one of {', '.join(sorted(self._answerers))}")
        try:
            answerer(peer_pid, message)
        except ClaimRejected as error:
            self._complain(f"process {peer_pid}: {error}", again=not error.for_now)
            return {"ok": False, "reason": str(error), "for_now": error.for_now}
        except Exception:  # one bad message must not stop the server
            logger.exception("handling a message of process %d failed", peer_pid)
            return {"ok": False, "retry": True, "reason": "the agent failed at this message"}
        return {"ok": True}

    def _complain(self, text: str, *, again: bool) -> None:
        """`again`: also if it has been logged before."""
        now = self._clock.monotonic()
        if now - self._complained_at >= COMPLAINT_SECONDS and (self._logged.is_new(text) or again):
            self._complained_at = now
            logger.warning("%s", text)

    def _malformed(self, reason: str) -> dict[str, Any]:
        self.num_malformed += 1
        return {"ok": False, "reason": reason}

    def _close(self, connection: _RegistrationPeer) -> None:
        self._open.pop(connection.socket.fileno(), None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
