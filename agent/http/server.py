"""The agent's HTTP side: read-only, JSON (and Prometheus text), loopback unless told otherwise.

    /healthz                        alive, and how fresh
    /metrics                        Prometheus text format
    /metrics/dcgm                   of the GPUs, in dcgm-exporter's names
    /v1/samples?since=N             SampleBatch newer than cursor N
    /v1/events?after=N&wait=S       EventBatch after number N; waits up to S <= 30 s for the first
    /v1/evidence/stacks?pid=P       stacks of a registered process; `Authorization: Bearer <bearer_token(run token)>`
    /v1/evidence/flight_recorder?pid=P  its PyTorch Flight Recorder as a file, made by the process itself; same token

With `tls` it is HTTPS; with `allows` each request needs the right user and password (agent/http/web_config.py), but for
`/healthz`, which then says to strangers no more than that the agent is well: a kubelet's probe has no password.

HTTP/1.1 with keep-alive, so that pollers reuse their connection. A bad request is answered `{"error": reason}` with
400, 401, 404, 405, 409, 429 or 503. Requests are parsed here rather than by http.server, whose header parser costs
more than everything else of an answer: seven agents share the machine with the work that they watch.
"""

import contextlib
import hmac
import json
import logging
import socket
import socketserver
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

LINE_BYTES_MAX = 8 * 1024
NUM_HEADERS_MAX = 64
NUM_CONNECTIONS_MAX = 32
IDLE_SECONDS_MAX = 65.0
"""A connection that asks nothing for so long is closed; longer than a Prometheus scrape interval of a minute."""
WAIT_SECONDS_MAX = 30.0
HANDSHAKE_SECONDS = 5.0
DEFLATE_BYTES_MIN, DEFLATE_LEVEL = 1024, 1
"""20 us for the samples of 16 ranks."""
COPIED_BYTES_MAX = 1 << 20
ACCEPT_PAUSE_SECONDS = 0.1
NUMBER_MAX = (1 << 63) - 1

JSON_TYPE = "application/json"
DEFLATED = "Content-Encoding: deflate\r\nVary: Accept-Encoding\r\n"
CHALLENGE = 'WWW-Authenticate: Basic realm="rolecall"\r\n'


class HttpRequestError(Exception):
    """Answered with `status` and `{"error": reason}`; the connection is closed when the rest cannot be understood."""

    def __init__(self, status: HTTPStatus, reason: str, *, close: bool = False) -> None:
        self.status, self.reason, self.close = status, reason, close
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # lower-case names

    def number(self, name: str, default: int) -> int:
        """Raises BadRequest unless it is a whole number from 0 to 2^63 - 1."""
        text = self.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= NUMBER_MAX):
            raise HttpRequestError(HTTPStatus.BAD_REQUEST, f"{name}: expected a whole number, got {text[:40]!r}")
        return int(text)

    def seconds(self, name: str, largest: float) -> float:
        """Raises BadRequest unless it is a number from 0 to `largest`."""
        text = self.query.get(name, "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= largest:  # NaN fails this, too
            raise HttpRequestError(
                HTTPStatus.BAD_REQUEST, f"{name}: expected 0 to {largest:g} seconds, got {text[:40]!r}"
            )
        return value

    def only(self, *names: str) -> None:
        """Raises BadRequest for a parameter that is not among `names`."""
        for name in self.query:
            if name not in names:
                raise HttpRequestError(HTTPStatus.BAD_REQUEST, f"unknown parameter {name[:40]!r}")

    def authorize(self, bearer: str) -> None:
        """Raises BadRequest (401) without the right bearer token."""
        given = self.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {bearer}".encode()):
            raise HttpRequestError(HTTPStatus.UNAUTHORIZED, "this needs the run's bearer token")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    body: bytes
    content_type: str = JSON_TYPE
    status: HTTPStatus = HTTPStatus.OK
    deflated: bool = False

    @classmethod
    def json(cls, value: Any, status: HTTPStatus = HTTPStatus.OK) -> "HttpResponse":
        return cls(json.dumps(value, separators=(",", ":")).encode(), status=status)

    def for_reader(self, headers: Mapping[str, str]) -> "HttpResponse":
        """Compressed, where the reader takes it and it is worth it: samples of alike ranks become a tenth."""
        accepted = (part.partition(";") for part in headers.get("accept-encoding", "").split(","))
        if len(self.body) < DEFLATE_BYTES_MIN or not any(
            name.strip() == "deflate" and "q=0" != weight.replace(" ", "") for name, _, weight in accepted
        ):
            return self
        return replace(self, body=zlib.compress(self.body, DEFLATE_LEVEL), deflated=True)


Route = Callable[[HttpRequest], HttpResponse]
"""May raise BadRequest."""


def read_request(stream: BufferedIOBase) -> tuple[HttpRequest, bool] | None:
    """The next request and whether the connection stays open after it; None: the peer closed.

    Raises:
        BadRequest: malformed or too large.
        OSError: the connection broke or was idle for too long.
    """
    line = stream.readline(LINE_BYTES_MAX + 1)
    if line in (b"\r\n", b"\n"):
        line = stream.readline(LINE_BYTES_MAX + 1)  # RFC 9112 2.2: one empty line before a request is ignored
    if not line:
        return None
    if len(line) > LINE_BYTES_MAX:
        raise HttpRequestError(HTTPStatus.REQUEST_URI_TOO_LONG, f"request line over {LINE_BYTES_MAX} bytes", close=True)
    words = line.decode("latin-1").split()
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpRequestError(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request line", close=True)
    headers = _read_headers(stream)
    method, target, version = words
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise HttpRequestError(HTTPStatus.BAD_REQUEST, "requests have no body here", close=True)
    if method != "GET":
        raise HttpRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is served", close=True)
    wish = headers.get("connection", "").lower()
    stays = wish != "close" and (version == "HTTP/1.1" or wish == "keep-alive")
    try:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=8))
    except ValueError as e:
        raise HttpRequestError(HTTPStatus.BAD_REQUEST, f"malformed target: {e}") from None
    return HttpRequest(parts.path, query, headers), stays


def _read_headers(stream: BufferedIOBase) -> dict[str, str]:
    headers: dict[str, str] = {}
    while True:
        line = stream.readline(LINE_BYTES_MAX + 1)
        if line in (b"\r\n", b"\n"):
            return headers
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name.strip() or len(line) > LINE_BYTES_MAX or len(headers) >= NUM_HEADERS_MAX:
            raise HttpRequestError(HTTPStatus.BAD_REQUEST, "malformed or too many headers", close=True)
        headers[name.strip().lower()] = value.strip()


def rendered(answer: HttpResponse, stays: bool) -> bytes:
    """Head and body as one block: one send, one packet."""
    return head_of(answer, stays) + answer.body


def head_of(answer: HttpResponse, stays: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        f"{DEFLATED if answer.deflated else ''}{CHALLENGE if answer.status == HTTPStatus.UNAUTHORIZED else ''}"
        f"Connection: {'keep-alive' if stays else 'close'}\r\n\r\n"
    )
    return head.encode("latin-1")


class _HttpConnection(socketserver.StreamRequestHandler):
    timeout = IDLE_SECONDS_MAX
    disable_nagle_algorithm = True
    server: "HttpServer"

    def handle(self) -> None:
        try:
            while self._one():
                pass
        except OSError:
            pass  # the poller went away, or was silent for too long

    def _one(self) -> bool:
        stays = True
        try:
            read = read_request(self.rfile)
            if read is None:
                return False
            request, stays = read
            answer = self.server.answer(request).for_reader(request.headers)
        except HttpRequestError as e:
            stays = stays and not e.close
            answer = HttpResponse.json({"error": e.reason}, e.status)
        if len(answer.body) <= COPIED_BYTES_MAX:
            self.connection.sendall(rendered(answer, stays))
        else:  # a dump of a Flight Recorder: twice in memory would be more than a unit's limit
            self.connection.sendall(head_of(answer, stays))
            self.connection.sendall(answer.body)
        return stays


class HttpServer(socketserver.ThreadingTCPServer):
    """Serves `routes` (by path) from a thread of its own, one more per connection."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        tls: "Callable[[], ssl.SSLContext] | None" = None,
        allows: Callable[[str], bool] | None = None,
        strangers: Mapping[str, Route] | None = None,
    ) -> None:
        """Listens at once (port 0: any free one). `tls`: HTTPS, with this context for the next connection; `allows`: which values of `Authorization` are let in, by
        default every one; `strangers`: by path, what the others get in place of a refusal.

        Raises:
            OSError: the port is taken; names it.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._routes, self._tls, self._allows = routes, tls, allows
        self._strangers = strangers or {}
        self._slots = threading.BoundedSemaphore(NUM_CONNECTIONS_MAX)
        try:
            super().__init__((host, port), _HttpConnection)
        except OSError as e:
            raise OSError(e.errno, f"cannot listen on {host}:{port}: {e.strerror}") from e
        self._stopping = self._handshake_failed = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"{'https' if self._tls else 'http'}://{shown}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops listening (waits <= 2 s). Connections in use end with the process."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept
        if self._thread.is_alive():
            self._thread.join(2.0)
        self.server_close()

    def _accept(self) -> None:
        """In place of serve_forever, which wakes up twice a second to see whether it should stop."""
        failing = False
        while not self._stopping:
            try:
                connection, address = self.get_request()
                failing = False
            except OSError as e:
                if not self._stopping:
                    logger.log(logging.DEBUG if failing else logging.WARNING, "no connection can be accepted: %s", e)
                    failing = True
                    self._pause.wait(ACCEPT_PAUSE_SECONDS)  # out of descriptors: it would fail again at once
                continue
            self.process_request(connection, address)

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Raises BadRequest."""
        allowed = self._allows is None or self._allows(request.headers.get("authorization", ""))
        route = (self._routes if allowed else self._strangers).get(request.path)
        if route is None and not allowed:
            raise HttpRequestError(HTTPStatus.UNAUTHORIZED, "this agent wants a user and a password", close=True)
        if route is None:
            raise HttpRequestError(HTTPStatus.NOT_FOUND, f"no such path; there are {', '.join(sorted(self._routes))}")
        try:
            return route(request)
        except HttpRequestError:
            raise
        except Exception:  # deliberate: a defect in one answer must not end the connection without a word
            logger.exception("%s failed", request.path)
            raise HttpRequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "the agent failed at this request") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self._refuse(request, f"{NUM_CONNECTIONS_MAX} connections are open")
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as e:  # no thread can be started (ulimit -u, TasksMax): the next may be
            self._slots.release()
            self._refuse(request, str(e))

    def _refuse(self, request: Any, reason: str) -> None:
        try:
            request.settimeout(1.0)
            request.sendall(rendered(HttpResponse.json({"error": reason}, HTTPStatus.SERVICE_UNAVAILABLE), stays=False))
        except OSError:
            pass  # it did not wait for the refusal
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request = self._shaken(request)
            if request is not None:
                super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def _shaken(self, request: socket.socket) -> socket.socket | None:
        """The connection after its handshake, in the connection's own thread: who dawdles holds up nobody else."""
        assert self._tls is not None
        request.settimeout(HANDSHAKE_SECONDS)
        try:
            return self._tls().wrap_socket(request, server_side=True)
        except OSError as e:  # ssl.SSLError is one: no TLS, no certificate, too slow
            # Said once: anybody who reaches the port can make as many as he likes.
            level = logging.DEBUG if self._handshake_failed else logging.WARNING
            self._handshake_failed = True
            logger.log(level, "a TLS handshake failed: %s", e)
            self.shutdown_request(request)
            return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.exception("a connection failed")

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
