"""HTTP server of the agent and of `rolecall watch`: Starlette on uvicorn, in a thread of its own.

Handlers run in a thread pool that is larger than the number of connections, or wait in the event loop, so a long poll
never keeps another request waiting. uvicorn limits the idle time between two requests; the limits that a port open to a
network also needs (connections, TLS handshakes, clients that send or read too slowly) are added here.
"""

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rolecall.agent.http import parameters
from rolecall.core.text import os_reason, plain

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16 * 1024
"""Of a request line and headers that are not complete yet; one that comes whole in a single read may have 256 KiB."""
NUM_CONNECTIONS_MAX = 32
IDLE_SECONDS_MAX = 65
"""How long a client may be silent, or not read its response; longer than a Prometheus scrape interval of a minute."""
HANDSHAKE_SECONDS_MAX = 5.0
GZIP_BYTES_MIN, GZIP_LEVEL = 4096, 1
"""Level 1 makes a tenth of the samples of 16 ranks. For less than 4 KiB, three packets, to fill the compressor's tables
(256 KiB) costs more than the response."""
CHUNK_BYTES = 1 << 20
ACCEPT_PAUSE_SECONDS = 0.1
STOP_SECONDS = 2.0
LISTENING = "0A"
"""State in /proc/net/tcp."""
DEFAULT_HEADERS = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
CHALLENGE = {"WWW-Authenticate": 'Basic realm="rolecall"'}
_BUSY = json.dumps({"error": f"{NUM_CONNECTIONS_MAX} connections are open"})
BUSY = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(_BUSY)}\r\nConnection: close\r\n\r\n{_BUSY}"
).encode()

Handler = Callable[[Request], Response | Awaitable[Response]]
"""Runs in a thread, or in the event loop if it is a coroutine function: then it must not block. May raise starlette's
HTTPException; its detail becomes `{"error": detail}`."""
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def json_response(value: Any, status: int = 200) -> Response:
    """JSON in ASCII: names on this node need not be UTF-8, as Starlette's JSONResponse requires."""
    return Response(_dumps(value), status, media_type="application/json")


def attachment(body: bytes) -> Response:
    """A file that may be large: sent in chunks, at the client's pace, so that it is not in memory twice."""

    def chunks() -> Iterator[memoryview]:
        view = memoryview(body)
        for start in range(0, len(body), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]

    # An encoding of its own keeps GZipMiddleware away: evidence of 64 MiB would hold up the event loop.
    headers = {"Content-Length": str(len(body)), "Content-Encoding": "identity"}
    return StreamingResponse(chunks(), media_type="application/octet-stream", headers=headers)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of an HTTP API, as served and as documented in docs/reference/http-api.md."""

    path: str
    method: str
    """Name of the method that handles it."""
    answer: str
    """Its response, in Markdown."""
    query: str = ""
    """Its parameters, as `after=N&wait=S`; others are refused."""
    bearer: bool = False
    """Whether it needs the bearer token, even on loopback."""


def handlers(endpoints: Sequence[Endpoint], owner: object, bearer: str = "") -> dict[str, Handler]:
    """path -> the method of `owner`, behind the checks that `endpoints` demand. `bearer`: the token."""

    def checked(endpoint: Endpoint) -> Handler:
        answer = getattr(owner, endpoint.method)
        names = [parameter.partition("=")[0] for parameter in endpoint.query.split("&")]

        def check(request: Request) -> None:
            if endpoint.bearer:
                parameters.authorize(request, bearer)
            parameters.only(request, *names)

        def handle(request: Request) -> Response:
            check(request)
            response: Response = answer(request)
            return response

        async def handle_in_loop(request: Request) -> Response:
            check(request)
            response: Response = await answer(request)
            return response

        return handle_in_loop if iscoroutinefunction(answer) else handle

    return {endpoint.path: checked(endpoint) for endpoint in endpoints}


def application(
    routes: Mapping[str, Handler],
    allows: Callable[[str], bool] | None = None,
    public: Mapping[str, Handler] | None = None,
) -> Starlette:
    """`allows`: whether a value of `Authorization` is accepted (None: all are); other requests get `public` or 401."""
    middleware = [Middleware(GZipMiddleware, minimum_size=GZIP_BYTES_MIN, compresslevel=GZIP_LEVEL)]
    if allows is not None:
        middleware.insert(0, Middleware(_Users, allows=allows, public=public or {}))
    app = Starlette(
        routes=[Route(path, handler, methods=["GET"]) for path, handler in routes.items()],
        middleware=middleware,
        exception_handlers={HTTPException: _refuse, Exception: _fail},
    )
    app.router.redirect_slashes = False
    return app


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = CHALLENGE if error.status_code == 401 else error.headers
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _fail(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=error)
    return JSONResponse({"error": "internal error"}, 500)


class _Users:
    """Accepts only requests with a valid `Authorization` header."""

    def __init__(self, app: ASGIApp, allows: Callable[[str], bool], public: Mapping[str, Handler]) -> None:
        self._app, self._allows = app, allows
        self._public, self._public_paths = application(public), frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        header = Headers(scope=scope).get("authorization", "")
        # In a thread: bcrypt takes a tenth of a second on purpose.
        if not await run_in_threadpool(self._allows, header):
            if scope["path"] in self._public_paths:
                app = self._public
            else:
                app = JSONResponse({"error": "a user name and password are required"}, 401, CHALLENGE)
        await app(scope, receive, send)


class _BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a limit on every wait for the client, not only on that between two requests."""

    _deadline: asyncio.TimerHandle | None = None
    on_connected: Callable[[], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.on_connected()
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._unlimit()  # the handler is running
        else:
            self._limit()  # a request whose head is incomplete: more bytes do not extend the deadline

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unlimit()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # close() would wait for a client that does not read

    def _limit(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _unlimit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """uvicorn's server, which accepts connections itself: at most NUM_CONNECTIONS_MAX, each with the TLS context of now
    and a limit on its handshake."""

    def __init__(self, config: uvicorn.Config, tls: "Callable[[], ssl.SSLContext] | None") -> None:
        super().__init__(config)
        self._tls = tls
        self._connecting: set[asyncio.Task[None]] = set()
        """Of connections that are not in `server_state.connections` yet, so that none counts twice."""
        self._stopping = asyncio.Event()
        self._handshake_failed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._loop, self.servers, self.started = asyncio.get_running_loop(), [], True
        # A handler continues without its client, and its connection is free for another one.
        to_thread.current_default_thread_limiter().total_tokens = 2 * NUM_CONNECTIONS_MAX
        self._accepting = asyncio.create_task(self._accept(sockets[0]))
        self.ready.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes up ten times a second to see whether it should stop."""
        await self.on_tick(0)  # sets the default headers
        await self._stopping.wait()
        self._accepting.cancel()

    def stop(self) -> None:
        """From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        failing = False
        while True:
            try:
                # Not `loop.sock_accept`: cancelled at the wrong moment, it loses a connection without closing it.
                connection, _ = listener.accept()
                connection.setblocking(False)
                failing = False
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as e:  # out of descriptors: it would fail again at once
                logger.log(logging.DEBUG if failing else logging.WARNING, "cannot accept connections: %s", e)
                failing = True
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            state = self.server_state
            if len(self._connecting) + max(len(state.connections), len(state.tasks)) >= NUM_CONNECTIONS_MAX:
                # 503 over plain HTTP; a TLS client sees a closed connection.
                with contextlib.suppress(OSError):  # it is closed already
                    connection.send(BUSY)
                    connection.shutdown(socket.SHUT_WR)
                connection.close()
                continue
            task = asyncio.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await loop.connect_accepted_socket(self._protocol, connection)
            else:
                await loop.connect_accepted_socket(
                    self._protocol, connection, ssl=self._tls(), ssl_handshake_timeout=HANDSHAKE_SECONDS_MAX
                )
        except OSError as e:  # ssl.SSLError is one: no TLS, no certificate, too slow
            # Logged once, because any client can cause them.
            logger.log(logging.DEBUG if self._handshake_failed else logging.WARNING, "TLS handshake failed: %s", e)
            self._handshake_failed = True
            connection.close()
        except asyncio.CancelledError:  # the server stops
            connection.close()
            raise

    def _protocol(self) -> asyncio.Protocol:
        protocol = _BoundedProtocol(self.config, self.server_state, app_state={})
        task = asyncio.current_task()
        assert task is not None
        protocol.on_connected = functools.partial(self._connecting.discard, task)
        return protocol


async def _readable(listener: socket.socket) -> None:
    """Returns when a connection waits at `listener`."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)


def _listening_on(port: int) -> str:
    """`PID 4711 (python3)`, as far as this user may see it."""
    sockets = set[str]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
            sockets |= {f"socket:[{r[9]}]" for r in rows if r[3] == LISTENING and r[1].endswith(f":{port:04X}")}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(descriptor) in sockets:
                process = descriptor.parents[1]
                return f"PID {process.name} ({plain((process / 'comm').read_text().strip())})"
    return "another process"


class HttpServer:
    """Listens from the moment it is made; serves between `start` and `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Handler],
        *,
        tls: "Callable[[], ssl.SSLContext] | None" = None,
        allows: Callable[[str], bool] | None = None,
        public: Mapping[str, Handler] | None = None,
    ) -> None:
        """`port` 0: any free one. `tls`: context for the next connection. `allows`, `public`: see `application`.

        Raises:
            OSError: the port is taken; names it.
        """
        self._tls = tls
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as e:
            reason = f"in use by {_listening_on(port)}" if e.errno == errno.EADDRINUSE else os_reason(e)
            raise OSError(e.errno, f"cannot listen on {host}:{port}: {reason}") from e
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        config: dict[str, Any] = {
            "loop": "asyncio",
            "http": _BoundedProtocol,
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "critical",  # errors that any client can cause are not logged
            "access_log": False,
            "proxy_headers": False,
            "server_header": False,
            "date_header": False,
            "headers": DEFAULT_HEADERS,
            "h11_max_incomplete_event_size": HEAD_BYTES_MAX,
            "timeout_keep_alive": IDLE_SECONDS_MAX,
            "timeout_graceful_shutdown": 1,
        }
        self._server = _Server(uvicorn.Config(application(routes, allows, public), **config), tls)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        self._thread.start()
        self._server.ready.wait(STOP_SECONDS)

    def stop(self) -> None:
        """Stops listening (waits <= 2 s). Requests that are still being handled end with the process."""
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._listener.close()
