"""Serves the dashboard in this process until Ctrl-C. Listens on loopback unless configured otherwise, and connects only
to the configured journal and Prometheus.

Settings stay in memory: a journal's URL may contain a password, which must not appear in an argument, the environment,
a page or a log.

Every request passes a filter in front of Streamlit: ASGI middleware, and pure decisions. Browsers send requests for any
page, also to loopback, so other sites must not be able to read the dashboard:

    Host    must be one of the server's names or an IP address. With another name (DNS rebinding) a foreign page would
            share the dashboard's origin.
    Origin  of a WebSocket must be this server or an `--origin`; another port of this machine is another origin.
            Non-browser clients send none and have the permissions of the user who runs them.
    Method  must be a reading one. Uploads would fill the memory, and no page has any.
"""

import contextlib
import errno
import importlib
import ipaddress
import logging
import os
import resource
import socket
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import redacted
from rolecall.dashboards import settings

METHODS = ("GET", "HEAD", "OPTIONS")
THEME = {
    "theme.baseFontSize": 14,
    "theme.baseRadius": "6px",
    "theme.headingFontSizes": ["1.6rem", "1.35rem", "1.1rem", "1rem", "1rem", "1rem"],
    "theme.headingFontWeights": [600, 600, 600, 600, 600, 600],
    "theme.showWidgetBorder": True,
    "theme.light.primaryColor": "#1a56c4",
    "theme.light.backgroundColor": "#ffffff",
    "theme.light.secondaryBackgroundColor": "#f5f7f9",
    "theme.light.borderColor": "#dde2e8",
    "theme.dark.primaryColor": "#8ab4ff",
    "theme.dark.backgroundColor": "#111418",
    "theme.dark.secondaryBackgroundColor": "#1b2026",
    "theme.dark.borderColor": "#333c46",
}
"""A dense page with one type scale; the colours are those of `pages/style.py`."""
CLOSED = ("/_stcore/metrics", "/_stcore/agent/", "/_stcore/upload_file", "/auth/", "/oauth2callback")
"""Streamlit endpoints that the dashboard does not use: metrics, its own sign-in, page automation, uploads."""
APP = Path(__file__).parents[1] / "scripts" / "app.py"
PAGES = frozenset(script.stem for script in APP.parent.glob("[a-z]*.py")) - {"app", "overview"} | {""}
"""Paths of the pages. For any other Streamlit would draw the Overview page below a dialog."""
ASSETS = frozenset({"_stcore", "component", "media", "static"})
HEADERS = {
    # Prevents clickjacking.
    b"x-frame-options": b"DENY",
    # Injected content could neither load from nor send to other servers.
    b"content-security-policy": (
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; worker-src 'self' blob:; "
        b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        b"connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"  # noqa: E501
    ),
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedOrigins:
    """Host names and origins of this server, in lower case."""

    hosts: frozenset[str] | None
    """None: any. If reading requires sign-in, a foreign name only leads to the sign-in form."""
    origins: frozenset[str]


def known(address: str, names: Iterable[str], *, sign_in: bool = False) -> AllowedOrigins:
    """`address`: the server's own URL. `names`: additional origins that browsers use."""
    origins = [_origin(o) for o in (address, *names)]
    hosts = {"localhost", socket.gethostname().lower(), *(urlsplit(o).hostname or "" for o in origins)}
    return AllowedOrigins(hosts=None if sign_in else frozenset(hosts - {""}), origins=frozenset(origins))


def rejection_reason(
    known: AllowedOrigins, *, kind: str, method: str, path: str, host: str, origin: str | None, accept: str = ""
) -> tuple[int, str]:
    """(HTTP status, reason) of a rejected request; (0, "") if it is allowed. `kind`: http or websocket. `accept`: the
    header; a browser that opens a page asks for text/html."""
    name = _hostname(host)
    if known.hosts is not None and name not in known.hosts and not _is_ip(name):
        reason = "Unknown host name. Start the server with --origin http(s)://NAME[:PORT] to allow it."
        return HTTPStatus.MISDIRECTED_REQUEST, reason
    if kind == "websocket":
        if (
            origin is not None
            and _origin(origin) not in known.origins
            and urlsplit(origin).netloc.lower() != host.lower()
        ):
            return HTTPStatus.FORBIDDEN, "Connections from other origins are not allowed."
    elif method not in METHODS:
        return HTTPStatus.METHOD_NOT_ALLOWED, "Only reading requests are allowed."
    if any(path == c.rstrip("/") or path.startswith(c) for c in CLOSED):
        return HTTPStatus.NOT_FOUND, "Not found."
    if accept.startswith("text/html") and path.strip("/").partition("/")[0] not in PAGES | ASSETS:
        return HTTPStatus.NOT_FOUND, "No such page. The start page of this dashboard is /"
    return 0, ""


class OriginMiddleware:
    """ASGI middleware: rejects requests by `rejection_reason`, and adds `HEADERS` to every response."""

    def __init__(self, app: Any, *, known: AllowedOrigins) -> None:
        self._app, self._known = app, known

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                kept = [(k, v) for k, v in message.get("headers", ()) if k.lower() not in HEADERS]
                message = {**message, "headers": [*kept, *HEADERS.items()]}
            await send(message)

        given = {k.lower(): v.decode("latin-1") for k, v in reversed(scope["headers"])}
        status, reason = rejection_reason(
            self._known,
            kind=scope["type"],
            method=scope.get("method", "GET"),
            path=scope["path"],
            host=given.get(b"host", ""),
            origin=given.get(b"origin"),
            accept=given.get(b"accept", ""),
        )
        if status:
            await _refuse(scope["type"], with_headers, int(status), reason)
        else:
            await self._app(scope, receive, with_headers)


async def _refuse(kind: str, send: Any, status: int, reason: str) -> None:
    if kind == "websocket":  # before accept, so the server responds with 403
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


def _hostname(host: str) -> str:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return ""
    return (parts.hostname or "").rstrip(".") if parts.netloc == host and parts.username is None else ""


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _origin(text: str) -> str:
    """An origin as browsers write it, without the scheme's default port."""
    text = text.lower().rstrip("/")
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if text.startswith(scheme):
            text = text.removesuffix(port)
    return text


logger = logging.getLogger(__name__)

BACKLOG = 64
GRACE_SECONDS = 1
"""Time for open connections to finish at shutdown."""
CONNECTIONS_MAX = 500
"""Concurrent connections; each page has one. More are rejected, so that file descriptors remain for the journal."""
FILES = 4_096
"""File descriptors: four per page (Streamlit gives each an event loop), also for the 128 pages closed last. The soft
limit is often 1,024 and can be raised."""
_logged: deque[str] = deque(maxlen=20)
"""Page errors that are already in the log."""
WARM = ("altair", "pandas", "pyarrow", "streamlit.dataframe_util")
"""Imported before the URL is printed, so that the first page does not wait for them."""


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; clients can connect before the server is ready.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError([f"--host: cannot resolve {host!r}: {error.strerror}"]) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError([f"--port: {port} is in use; choose another one, or 0 for any free port"]) from None
        if error.errno == errno.EACCES:
            raise ConfigError([f"--port: {port} needs privileges; use a port from 1024"]) from None
        raise ConfigError([f"--host: {host}: {error.strerror}"]) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str, *, tls: bool) -> str:
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"{'https' if tls else 'http'}://{shown}:{listener.getsockname()[1]}"


def serve(
    what: settings.Settings,
    listener: socket.socket,
    *,
    address: str,
    names: tuple[str, ...] = (),
    cert: Path | None = None,
    key: Path | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Blocks until Ctrl-C or SIGTERM. `address`: from `address_of`. `names`: additional allowed origins
    (`https://dash.example`). `ready` is called when pages can be requested."""
    settings.use(what)
    _allow_files(FILES)
    from rolecall.dashboards.pages.shell import reader

    reader().start()  # reads while Streamlit is imported
    app = _app(_options(listener, address, names), ready, known(address, names, sign_in=what.sign_in))
    for name in (*WARM, "rolecall.dashboards.pages.overview.page"):
        importlib.import_module(name)
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        ssl_certfile=None if cert is None else str(cert),
        ssl_keyfile=None if key is None else str(key),
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
        ws_ping_interval=20,
        ws_ping_timeout=20,
        ws_max_size=8 << 20,
        limit_concurrency=CONNECTIONS_MAX,
        lifespan="on",
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def _allow_files(number: int) -> None:
    """Raises the limit of open files to `number`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _options(listener: socket.socket, address: str, names: tuple[str, ...]) -> dict[str, Any]:
    host = address.partition("://")[2].rpartition(":")[0]
    return {
        "server.address": listener.getsockname()[0],
        "server.port": listener.getsockname()[1],
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.runOnSave": False,
        "runner.magicEnabled": False,
        "runner.postScriptGC": False,  # it would scan all journal objects after every page run: 0.3 s each
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.corsAllowedOrigins": [address, *names],
        "server.maxUploadSize": 1,
        "browser.serverAddress": host,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "client.showSidebarNavigation": True,
        "client.allowedOrigins": [],  # origins that may send messages to the page
        # Streamlit logs raw tracebacks; `_report_error` redacts passwords.
        "logger.level": "critical",
        "logger.enableRich": False,
        "logger.hideWelcomeMessage": True,
        "global.developmentMode": False,
        **THEME,
    }


def _app(options: dict[str, Any], ready: Callable[[], None], names: AllowedOrigins) -> Any:
    os.environ.setdefault("STREAMLIT_BROWSER_GATHER_USAGE_STATS", "false")
    import streamlit as st
    from starlette.middleware import Middleware
    from streamlit import net_util
    from streamlit.web import bootstrap

    bootstrap.load_config_options(flag_options=options)
    # Streamlit would query an internet server for this machine's address when it rejects an origin.
    net_util.get_external_ip = lambda: None

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        ready()
        yield

    return st.App(
        APP, lifespan=lifespan, middleware=[Middleware(OriginMiddleware, known=names)], on_script_error=_report_error
    )


def _report_error(error: Exception) -> bool:
    """Shows a short message on the page and logs the traceback."""
    import streamlit as st

    from rolecall.dashboards.pages.incidents.evidence_files import harmless

    trace = harmless(redacted("".join(traceback.format_exception(error))))
    if trace not in _logged:  # the page is redrawn every two seconds in every session
        _logged.append(trace)
        logger.error("a dashboard page failed\n%s", trace)
    st.error(
        "This page failed. The log of `rolecall dashboard` has the details.",
        icon=":material/error:",
    )
    return True
