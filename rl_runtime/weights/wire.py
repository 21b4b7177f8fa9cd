"""Frames of the weight port: mutual challenge-response, then signed JSON headers, each followed by raw bytes.

    server -> client   MAGIC, 32 random bytes
    client -> server   32 random bytes, HMAC(token, "client" | both)      fixed sizes only: an unauthenticated
    server -> client   HMAC(token, "server" | both)                       peer causes no allocation
    either  -> other   length (4 bytes), HMAC(session key, direction | number | JSON), JSON

The session key comes from the token and both random values, and frames are numbered in each direction, so recorded
frames cannot be replayed on this or another connection. Every read and write has a deadline on the whole piece, not on
each packet: a peer that sends one byte per second does not delay others. Pickle is never used.
"""

import functools
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any, Final

from rolecall.core.clock import Clock
from rolecall.core.errors import DeadlineExceeded, WireError

MAGIC: Final = b"RCW1"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
HEADER_BYTES_MAX: Final = 8 << 20
"""Longest JSON header. The index of a state with 30,000 tensors takes about 6 MiB."""
PIECE_BYTES: Final = 1 << 20
"""Payload is sent in pieces of this size, each with its own deadline: a peer may take one MiB per deadline."""


class AuthenticatedConnection:
    """One authenticated connection. Not thread-safe."""

    def __init__(self, sock: socket.socket, *, peer: str, clock: Clock, is_server: bool) -> None:
        self.sock, self.peer, self.clock = sock, peer, clock
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._key = b""
        self._sent = self._received = 0

    def _timed(self, deadline: float, what: str, call: Callable[[], int | None]) -> int | None:
        started = self.clock.monotonic()
        if started >= deadline:
            raise DeadlineExceeded(waited_for=f"{what} with {self.peer}", seconds=0.0)
        self.sock.settimeout(deadline - started)
        try:
            return call()
        except TimeoutError:
            seconds = self.clock.monotonic() - started
            raise DeadlineExceeded(waited_for=f"{what} with {self.peer}", seconds=seconds) from None
        except OSError as e:
            raise WireError(f"{self.peer}: connection failed in {what}: {e}") from e

    def read_into(self, view: memoryview, deadline: float, what: str) -> None:
        """Fills `view`.

        Raises:
            WireError: the stream ends early or fails.
            DeadlineExceeded: it is not full by `deadline` (monotonic seconds).
        """
        done = 0
        while done < len(view):
            got = self._timed(deadline, what, functools.partial(self.sock.recv_into, view[done:]))
            if not got:
                raise WireError(f"{self.peer}: stream ends after {done} of {len(view)} bytes of {what}")
            done += got

    def _read(self, size: int, deadline: float, what: str) -> bytes:
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), deadline, what)
        return bytes(buffer)

    def write(self, payload: bytes | memoryview, deadline: float, what: str) -> None:
        """Sends all of a short message before `deadline`."""
        self._timed(deadline, what, functools.partial(self.sock.sendall, payload))

    def write_payload(self, payload: memoryview, piece_seconds: float, what: str, before: Callable[[], None]) -> None:
        """Sends a tensor's bytes, each piece within `piece_seconds`; calls `before` ahead of each piece."""
        for start in range(0, len(payload), PIECE_BYTES):
            before()
            self.write(payload[start : start + PIECE_BYTES], self.clock.monotonic() + piece_seconds, what)

    def read_payload(self, view: memoryview, piece_seconds: float, deadline: float, what: str) -> None:
        """Fills `view` with a tensor's bytes, each piece within `piece_seconds` and all before `deadline`."""
        for start in range(0, len(view), PIECE_BYTES):
            until = min(deadline, self.clock.monotonic() + piece_seconds)
            self.read_into(view[start : start + PIECE_BYTES], until, what)

    def answer_handshake(self, token: bytes, deadline: float) -> None:
        """Server side of the handshake. Raises WireError: the client does not have the token."""
        mine = secrets.token_bytes(NONCE_BYTES)
        self.write(MAGIC + mine, deadline, "handshake")
        answer = self._read(NONCE_BYTES + MAC_BYTES, deadline, "handshake")
        theirs, mac = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(token, b"client", mine, theirs)):
            raise WireError(f"{self.peer}: wrong token")
        self.write(_mac(token, b"server", mine, theirs), deadline, "handshake")
        self._key = _mac(token, b"session", mine, theirs)

    def start_handshake(self, token: bytes, deadline: float) -> None:
        """Client side of the handshake.

        Raises:
            WireError: the server does not have the token, or uses another protocol.
        """
        hello = self._read(len(MAGIC) + NONCE_BYTES, deadline, "handshake")
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError(f"{self.peer}: no weight port answers there")
        theirs, mine = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        self.write(mine + _mac(token, b"client", theirs, mine), deadline, "handshake")
        if not hmac.compare_digest(self._read(MAC_BYTES, deadline, "handshake"), _mac(token, b"server", theirs, mine)):
            raise WireError(f"{self.peer}: holds another token")
        self._key = _mac(token, b"session", theirs, mine)

    def send(self, header: dict[str, Any], deadline: float) -> None:
        """Sends one signed header."""
        body = json.dumps(header, separators=(",", ":")).encode()
        if len(body) > HEADER_BYTES_MAX:
            raise WireError(f"{self.peer}: header of {len(body)} bytes is longer than {HEADER_BYTES_MAX}")
        mac = _mac(self._key, self._out, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        self.write(len(body).to_bytes(4, "big") + mac + body, deadline, "header")

    def receive(self, deadline: float, size_max: int = HEADER_BYTES_MAX) -> dict[str, Any]:
        """The next signed header.

        Raises:
            WireError: longer than `size_max`, wrongly signed, replayed, or not a JSON object.
            DeadlineExceeded: incomplete at `deadline`.
        """
        head = self._read(4 + MAC_BYTES, deadline, "header")
        size, mac = int.from_bytes(head[:4], "big"), head[4:]
        if size > size_max:
            raise WireError(f"{self.peer}: header of {size} bytes is longer than {size_max}")
        body = self._read(size, deadline, "header")
        if not hmac.compare_digest(mac, _mac(self._key, self._in, self._received.to_bytes(8, "big"), body)):
            raise WireError(f"{self.peer}: header is not signed with this session's key")
        self._received += 1
        try:
            value = json.loads(body)
        except ValueError as e:
            raise WireError(f"{self.peer}: header is not JSON: {e}") from e
        if not isinstance(value, dict):
            raise WireError(f"{self.peer}: header is not a JSON object")
        return value


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"|".join(parts), "sha256").digest()
