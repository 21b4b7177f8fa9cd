"""The address at which a verl job takes orders to replace a rollout replica (target `verl` of a watch).

    GET  /v1/replicas              every rollout replica of this process, and why it cannot be replaced
    PUT  /v1/replacements/KEY      {"replica": 2, "instance": "...", "within_seconds": 600}: once for each KEY
    GET  /v1/replacements/KEY      how far it is

Two variables of the job's environment switch it on: the address, and a file with the token that each request must send
(`Authorization: Bearer ...`). One process of the job serves it: the one that sends weights to the replicas. Answers are
JSON; those that refuse have `error`. A few requests at a time, small ones, each with one deadline for all that the
client sends: one that sends slowly holds a place no longer. Standard library only.
"""

import hmac
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from rolecall.integrations.verl_replacements import KEY_LENGTH_MAX, Refused, Replacements

logger = logging.getLogger(__name__)

ADDRESS = "ROLECALL_VERL_REPLACE"
"""`127.0.0.1:9479`, or a port alone, on this machine only."""
TOKEN_FILE = "ROLECALL_VERL_TOKEN_FILE"
"""File with the token, readable by its owner and group only. It is read for each request."""
LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 5.0
"""For all of a request to arrive, and for the answer to leave."""
BODY_BYTES_MAX = 10_000
HEAD_BYTES_MAX = 16_384
REQUESTS_MAX = 8
"""At the same time; further ones are closed."""
REPLICAS, REPLACEMENTS = "/v1/replicas", "/v1/replacements/"
OTHERS_MAY = 0o007


class Control:
    """Serves once, from the first weight update on. `host`, `port`: where."""

    def __init__(self, host: str, port: int, token_file: Path) -> None:
        self.host, self.port, self._token_file = host, port, token_file
        self._lock = threading.Lock()
        self._tried = False
        self.server: ThreadingHTTPServer | None = None

    def serve(self, replacements: Replacements) -> None:
        """Does nothing the second time. Never raises: without the address, nothing is replaced."""
        with self._lock:
            if self._tried:
                return
            self._tried = True
        try:
            self.server = _Server(self.host, self.port, replacements, self._token_file)
            threading.Thread(target=self.server.serve_forever, name="rolecall-control", daemon=True).start()
            logger.warning("rolecall takes orders to replace rollout replicas at %s:%d", self.host, self.port)
        except Exception as e:  # noqa: BLE001 the job goes on
            logger.warning("rolecall takes no orders at %s:%d: %s: %s", self.host, self.port, type(e).__name__, e)


def control_of(environ: Mapping[str, str]) -> Control | None:
    """None: it is not switched on, or wrongly, which is logged."""
    text = environ.get(ADDRESS, "").strip()
    if not text:
        return None
    host, _, port = text.rpartition(":")
    token_file = environ.get(TOKEN_FILE, "")
    try:
        number = int(port)
        if not 0 <= number <= 65535:
            raise ValueError(port)
    except ValueError:
        logger.warning("rolecall replaces nothing: %s is no address, as %s:9479: %r", ADDRESS, LOOPBACK, text)
        return None
    if not token_file:
        logger.warning("rolecall replaces nothing: %s must name a file with a token", TOKEN_FILE)
        return None
    return Control(host.strip("[]") or LOOPBACK, number, Path(token_file))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, replacements: Replacements, token_file: Path) -> None:
        self.replacements, self.token_file = replacements, token_file
        self._free = threading.BoundedSemaphore(REQUESTS_MAX)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks its name up, which may take long: the trainer waits.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address  # a client that went away


class _Request(io.RawIOBase):
    """What a client sends, up to `bytes_max` bytes and until `ends_at` (monotonic seconds). A timeout of the socket
    alone would begin again with each byte."""

    def __init__(self, connection: socket.socket, ends_at: float, bytes_max: int) -> None:
        self._connection, self._ends_at, self._bytes_left = connection, ends_at, bytes_max

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError: too late; Refused: too much. 0 bytes: the client ends."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not self._bytes_left:
            raise Refused(413, f"more than {HEAD_BYTES_MAX + BODY_BYTES_MAX:,} bytes")
        self._connection.settimeout(left)
        num_bytes = self._connection.recv_into(buffer, min(len(buffer), self._bytes_left))
        self._bytes_left -= num_bytes
        return num_bytes


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        ends_at = time.monotonic() + REQUEST_SECONDS
        self.rfile = io.BufferedReader(_Request(self.connection, ends_at, HEAD_BYTES_MAX + BODY_BYTES_MAX))

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args  # the job's output is not ours

    def _answer(self) -> None:
        try:
            status, body = 200, self._result()
        except Refused as e:
            status, body = e.status, {"error": str(e)}
        except TimeoutError:
            status, body = 408, {"error": f"not received within {REQUEST_SECONDS:g} s"}
        except Exception as e:  # noqa: BLE001 the job goes on
            status, body = 500, {"error": f"{type(e).__name__}: {e}"}
        content = json.dumps(body).encode()
        self.connection.settimeout(REQUEST_SECONDS)  # of all that `sendall` sends
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _result(self) -> dict[str, Any]:
        check_token(self.headers.get("Authorization", ""), self.server.token_file)
        path = urlsplit(self.path).path
        if self.command == "GET" and path == REPLICAS:
            process = {"host": socket.gethostname(), "pid": os.getpid()}
            return {"process": process, "replicas": self.server.replacements.listing()}
        key = unquote(path.removeprefix(REPLACEMENTS))
        if not path.startswith(REPLACEMENTS) or not 0 < len(key) <= KEY_LENGTH_MAX:
            raise Refused(404, f"there is only {REPLICAS} and {REPLACEMENTS}KEY")
        if self.command == "PUT":
            return self.server.replacements.order(key, *_ordered(self._body()))
        known = self.server.replacements.state(key)
        if known is None:
            raise Refused(404, f"no replacement {key} was ordered here")
        return known

    def _body(self) -> Any:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise Refused(411, "Content-Length is missing") from None
        if not 0 <= length <= BODY_BYTES_MAX:
            raise Refused(413, f"more than {BODY_BYTES_MAX:,} bytes")
        try:
            return json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            raise Refused(400, "the body is no JSON") from None


def _ordered(body: Any) -> tuple[int, str, float]:
    """Number, instance and seconds of an order. Raises Refused."""
    match body:
        case {"replica": int(number), "instance": str(instance), "within_seconds": int(seconds) | float(seconds)} if (
            not isinstance(number, bool) and not isinstance(seconds, bool) and seconds > 0
        ):
            return number, instance, float(seconds)
    raise Refused(400, "expected replica (a number), instance (text) and within_seconds (a number above 0)")


def check_token(header: str, path: Path) -> None:
    """Raises Refused: `Authorization` is not the token in the file, or the file is no secret."""
    try:
        if path.stat().st_mode & OTHERS_MAY:
            raise Refused(403, f"everybody may read or write {path}: chmod o= it")
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as e:
        raise Refused(403, f"the token cannot be read: {type(e).__name__}") from None
    if not token or not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "the token is not the one of this job")
