"""Request filter in front of Streamlit: ASGI middleware, and pure decisions.

Browsers send requests for any page, also to loopback, so other sites must not be able to read the dashboard:

    Host    must be one of the server's names or an IP address. With another name (DNS rebinding) a foreign page would
            share the dashboard's origin.
    Origin  of a WebSocket must be this server or an `--origin`; another port of this machine is another origin.
            Non-browser clients send none and have the permissions of the user who runs them.
    Method  must be a reading one. Uploads would fill the memory, and no page has any.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

METHODS = ("GET", "HEAD", "OPTIONS")
CLOSED = ("/_stcore/metrics", "/_stcore/agent/", "/_stcore/upload_file", "/auth/", "/oauth2callback")
"""Streamlit endpoints that the dashboard does not use: metrics, its own sign-in, page automation, uploads."""
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
    known: AllowedOrigins, *, kind: str, method: str, path: str, host: str, origin: str | None
) -> tuple[int, str]:
    """(HTTP status, reason) of a rejected request; (0, "") if it is allowed. `kind`: http or websocket."""
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
