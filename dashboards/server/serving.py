"""Serves the dashboard in this process, until Ctrl-C. Nothing listens beyond loopback unless it was told to, and nothing
is asked of anybody but the journal and the Prometheus that were named.

Settings stay in memory: a journal's URL may hold a password, and goes into no argument, environment, page or log.
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

APP = Path(__file__).parents[1] / "app.py"
BACKLOG = 64
GRACE_SECONDS = 1
"""How long open connections are waited for at the end."""
CONNECTIONS_MAX = 500
"""Open at once; each page holds one. More are told to come back later, so that files are left for the journal."""
FILES = 4_096
"""Open at once: four for each page (Streamlit gives each an event loop), also for the 128 that were closed last. Many systems
give 1,024, and more to who asks."""
_told: deque[str] = deque(maxlen=20)
"""Failures of pages that stand in the log already."""
WARM = ("altair", "pandas", "pyarrow", "streamlit.dataframe_util")
"""Imported before the address is told, because the first page would wait for them."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens already: who connects from now on is served as soon as there is anything to serve.

    Raises:
        ConfigError: the port is taken, the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise ConfigError([f"--host: {host!r} is no address of a machine: {e.strerror}"]) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError([f"--port: {port} is taken; name another one, or 0 for one that is free"]) from None
        if e.errno == errno.EACCES:
            raise ConfigError([f"--port: {port} may not be used by this user; ports from 1024 on may"]) from None
        raise ConfigError([f"--host: {host}: {e.strerror}"]) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str, *, tls: bool) -> str:
    """Where a browser finds it."""
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
    """Blocks until Ctrl-C or SIGTERM. `address`: from `address_of`. `names`: other origins under which browsers may come
    (`https://dash.example`). `ready` is called once pages can be asked for."""
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
    """So many open files, or as many as the system gives."""
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
        "runner.postScriptGC": False,  # all of the journal's objects, after every run of a page: 0.3 s each
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.corsAllowedOrigins": [address, *names],
        "server.maxUploadSize": 1,
        "browser.serverAddress": host,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "client.showSidebarNavigation": True,
        "client.allowedOrigins": [],  # whose pages may send this one messages
        # It would log tracebacks as they are; ours (`_complain`) show no password.
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
    # Streamlit asks a server on the internet for this machine's address when a foreign page knocks. It shall not.
    net_util.get_external_ip = lambda: None

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        ready()
        yield

    return st.App(
        APP, lifespan=lifespan, middleware=[Middleware(OriginMiddleware, known=names)], on_script_error=_complain
    )


def _complain(error: Exception) -> bool:
    """A page that fails says so in a sentence; what failed stands in the log of this process, where its owner reads it."""
    import streamlit as st

    from rolecall.dashboards.pages.incidents.evidence_files import harmless

    told = harmless(redacted("".join(traceback.format_exception(error))))
    if told not in _told:  # the page is drawn again in two seconds, for everybody who looks
        _told.append(told)
        logger.error("a page of the dashboard failed\n%s", told)
    st.error(
        "This page could not be drawn. What went wrong is told where `rolecall dashboard` runs.",
        icon=":material/error:",
    )
    return True
