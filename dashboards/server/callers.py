"""Who may ask this server anything, before Streamlit sees the question: ASGI middleware, and pure decisions.

A browser does what any page tells it, also on loopback, so a page of somebody else must not become a reader here:

    Host    one of our names or an IP address. A foreign name that leads here (DNS rebinding) would make a foreign page
            one of "the same origin".
    Origin  of a WebSocket, the page that was served here, or one that `--origin` names; another port of this machine
            is somebody else. Programs send none, and may do what whoever runs them may.
    Method  reading alone. Uploads would fill the memory, and no page has one.
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
"""Doors of Streamlit that nobody here needs: its own figures, its signing in, driving pages by program."""
HEADERS = {
    # A page that others could frame is a page whose buttons others could have clicked.
    b"x-frame-options": b"DENY",
    # And what foreign text could ever smuggle into a page can fetch from nobody, and send to nobody.
    b"content-security-policy": (
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; worker-src 'self' blob:; "
        b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        b"connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedOrigins:
    """As which this server may be addressed. All in small letters."""

    hosts: frozenset[str] | None
    """None: any. Where everybody has to sign in, a foreign name leads to a form and to nothing else."""
    origins: frozenset[str]


def known(address: str, names: Iterable[str], *, sign_in: bool = False) -> AllowedOrigins:
    """`address`: where this server says it is. `names`: other origins under which browsers come."""
    origins = [_origin(o) for o in (address, *names)]
    hosts = {"localhost", socket.gethostname().lower(), *(urlsplit(o).hostname or "" for o in origins)}
    return AllowedOrigins(hosts=None if sign_in else frozenset(hosts - {""}), origins=frozenset(origins))


def rejection_reason(
    known: AllowedOrigins, *, kind: str, method: str, path: str, host: str, origin: str | None
) -> tuple[int, str]:
    """(status, why): why a question is not answered; (0, ""): it is. `kind`: http or websocket."""
    name = _hostname(host)
    if known.hosts is not None and name not in known.hosts and not _is_ip(name):
        said = "This server has another name. Start it with --origin http(s)://NAME[:PORT] to reach it by this one."
        return HTTPStatus.MISDIRECTED_REQUEST, said
    if kind == "websocket":
        if (
            origin is not None
            and _origin(origin) not in known.origins
            and urlsplit(origin).netloc.lower() != host.lower()
        ):
            return HTTPStatus.FORBIDDEN, "A page of another origin may not connect here."
    elif method not in METHODS:
        return HTTPStatus.METHOD_NOT_ALLOWED, "Pages are read here, and nothing is sent."
    if any(path == c.rstrip("/") or path.startswith(c) for c in CLOSED):
        return HTTPStatus.NOT_FOUND, "There is nothing here."
    return 0, ""


class OriginMiddleware:
    """ASGI: lets in whom `refusal` has nothing against; every answer carries `HEADERS`."""

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
        status, said = rejection_reason(
            self._known,
            kind=scope["type"],
            method=scope.get("method", "GET"),
            path=scope["path"],
            host=given.get(b"host", ""),
            origin=given.get(b"origin"),
        )
        if status:
            await _refuse(scope["type"], with_headers, int(status), said)
        else:
            await self._app(scope, receive, with_headers)


async def _refuse(kind: str, send: Any, status: int, said: str) -> None:
    if kind == "websocket":  # before it is accepted: the server answers 403
        await send({"type": "websocket.close", "code": 1008, "reason": said})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{said}\n".encode()})


def _hostname(host: str) -> str:
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises where it is no number
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
    """As browsers write it: without the port that its scheme implies."""
    text = text.lower().rstrip("/")
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if text.startswith(scheme):
            text = text.removesuffix(port)
    return text
