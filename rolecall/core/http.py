"""Outgoing HTTP requests, each with one deadline for all of it.

httpx limits each wait, so a server that sends single bytes could block its client for hours; asyncio ends the whole
exchange at its deadline. Redirects are not followed, and proxies of the environment are not used: a request may contain
host names and must go only to its addressee.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rolecall.core.text import os_reason

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 2.0

logging.getLogger("httpx").setLevel(logging.WARNING)  # its INFO lines hold whole URLs, which may contain secrets


class HttpFailed(Exception):
    """No complete response. `late`: not within the deadline; `refused`: no listener; `too_large`: cut off; `unsent`:
    nothing of the request was sent (no name, no connection, no TLS), so that it had no effect."""

    def __init__(
        self,
        reason: str,
        *,
        late: bool = False,
        refused: bool = False,
        too_large: bool = False,
        unsent: bool = False,
    ) -> None:
        self.late, self.refused, self.too_large, self.unsent = late, refused, too_large, unsent
        super().__init__(reason)


class HttpAnswer(NamedTuple):
    status: int
    body: bytes


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def request(
    method: str,
    url: str,
    *,
    deadline_seconds: float,
    bytes_max: int,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    ca_path: str = "",
) -> HttpAnswer:
    """One exchange on a new connection. For threads without an event loop. `bytes_max` 0: the body is not read.
    `ca_path`: certificates of the authorities to trust, instead of the system's.

    Raises:
        HttpFailed: no response in time, not HTTP, more than `bytes_max` bytes, a header that cannot be sent, or no
            resource left on this machine.
    """
    import httpx

    asked = {"Accept-Encoding": "identity", **(headers or {})}
    for name, value in asked.items():
        if not (value.isascii() and value.isprintable()):  # httpx's own error shows the value, which may be a token
            because = f"the value of {name} has a character that HTTP does not allow, such as the end of a line"
            raise HttpFailed(because, unsent=True)
    sent: list[str] = []
    # Not `asyncio.run`: it would finally wait for a name lookup that hangs in another thread.
    try:
        loop = asyncio.new_event_loop()
    except OSError as e:  # no file descriptor is left
        raise HttpFailed(os_reason(e), unsent=True) from None
    try:
        exchange = _exchange(method, url, asked, content, deadline_seconds, bytes_max, ca_path, sent)
        return loop.run_until_complete(exchange)
    except (TimeoutError, httpx.TimeoutException):
        reason = f"no whole answer within {deadline_seconds:g} s{'' if sent else ', and nothing was sent'}"
        raise HttpFailed(reason, late=True, unsent=not sent) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RuntimeError) as e:  # the last: no thread is left
        causes = _causes(e)
        refused = any(isinstance(c, ConnectionRefusedError) for c in causes)
        reason = "connection refused" if refused else os_reason(causes[-1])
        raise HttpFailed(reason, refused=refused, unsent=not sent) from None
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _exchange(
    method: str,
    url: str,
    headers: dict[str, str],
    content: bytes | None,
    seconds: float,
    bytes_max: int,
    ca_path: str,
    sent: list[str],
) -> HttpAnswer:
    """`sent`: gets the events of httpcore in which a part of the request is sent."""
    import httpx

    async def trace(event: str, info: Mapping[str, Any]) -> None:
        del info
        if ".send_request_" in event:
            sent.append(event)

    # A context is expensive, and plain HTTP needs none.
    verify: Any = ssl.create_default_context(cafile=ca_path or None) if url.startswith("https:") else False
    timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(verify=verify, timeout=timeout, trust_env=False) as client,
        client.stream(method, url, headers=headers, content=content, extensions={"trace": trace}) as response,
    ):
        return HttpAnswer(response.status_code, await _body(response, bytes_max) if bytes_max else b"")


async def _body(response: "httpx.Response", bytes_max: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > bytes_max:
            raise HttpFailed(f"more than {bytes_max:,} bytes", too_large=True)
    return bytes(body)


def _causes(error: BaseException) -> list[BaseException]:
    """`error` and its causes: httpx wraps the system's error several times."""
    causes = [error]
    while inner := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(inner)
    if isinstance(causes[-1], BaseExceptionGroup):  # of a name with several addresses
        causes += causes[-1].exceptions
    return causes
