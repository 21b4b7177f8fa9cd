"""Serves the dashboard in this process until Ctrl-C. Listens on loopback unless configured otherwise, and connects only
to the configured journal and Prometheus.

Settings stay in memory: a journal's URL may contain a password, which must not appear in an argument, the environment,
a page or a log.
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
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rolecall.core.errors import ConfigError
from rolecall.core.journal.database import redacted
from rolecall.dashboards import settings
from rolecall.dashboards.server.callers import AllowedOrigins, OriginMiddleware, known

logger = logging.getLogger(__name__)

APP = Path(__file__).parents[1] / "scripts" / "app.py"
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; clients can connect before the server is ready.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise ConfigError([f"--host: cannot resolve {host!r}: {e.strerror}"]) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError([f"--port: {port} is in use; choose another one, or 0 for any free port"]) from None
        if e.errno == errno.EACCES:
            raise ConfigError([f"--port: {port} needs privileges; use a port from 1024"]) from None
        raise ConfigError([f"--host: {host}: {e.strerror}"]) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str, *, tls: bool) -> str:
    """The URL of the dashboard."""
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
