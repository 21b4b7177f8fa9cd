"""An asyncio HTTP/1.1 client for one agent over one persistent connection, with a deadline for every request.

http.client would need a thread per agent, and a thousand threads contend for the GIL (*measured*: 0.4 ms per sample,
against 0.04 here; docs/decisions/0021). Agents are untrusted: the size of a response is bounded before and after
decompression, redirects are not followed, and the deadline covers the whole response, so that a slow agent blocks no
other.
"""

import asyncio
import json
import ssl
import zlib
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from rolecall.detector.live.stages.agent_lost import REFUSED
from rolecall.detector.sources.agent_wire import InvalidAgentResponse

HEAD_BYTES_MAX = 16 << 10


class AgentUnreachable(Exception):
    """No response from the agent; the message is the reason shown to users."""


class EndpointNotFound(InvalidAgentResponse):
    """An older agent without this path. The connection cannot be used further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClientLimits:
    """Limits on the time and memory that one agent may use."""

    answer_bytes_max: int = 16 << 20
    """A minute of samples of a node with 13 processes is 3 MiB; a larger response is not from a valid agent."""
    connect_seconds: float = 1.0
    answer_seconds: float = 2.0
    """For the whole response, in addition to the long-poll time of the request."""


class AgentConnection:
    """Created by `open`, ended by `close`. For one task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, answer_bytes_max: int
    ) -> None:
        self._reader, self._writer, self._head, self._bytes_max = reader, writer, head, answer_bytes_max

    @classmethod
    async def open(
        cls, url: str, limits: AgentClientLimits, *, authorization: str = "", tls: ssl.SSLContext | None = None
    ) -> Self:
        """`authorization`: value of that header. `tls`: for https; by default, the system's authorities are trusted.

        Raises:
            AgentUnreachable: no connection in time, or `url` is not an agent's address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AgentUnreachable(f"{url!r} is no agent's address") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AgentUnreachable(f"{url!r} is no agent's address")
        context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        try:
            async with asyncio.timeout(limits.connect_seconds):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port or (443 if context else 80), ssl=context, limit=HEAD_BYTES_MAX
                )
        except ConnectionRefusedError:
            raise AgentUnreachable(f"connection {REFUSED}") from None
        except (OSError, ValueError) as e:
            raise AgentUnreachable(f"no connection ({_short(e)})") from None
        head = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: gzip\r\n"
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        return cls(reader, writer, head + "\r\n", limits.answer_bytes_max)

    def close(self) -> None:
        """Aborts without the TLS shutdown: nothing is in flight."""
        self._writer.transport.abort()

    async def get(self, path: str, seconds: float) -> object:
        """The JSON value at `path`, within `seconds`.

        Raises:
            AgentUnreachable: no complete response in time, or the connection broke.
            InvalidAgentResponse: not a JSON response within the size limit.
        """
        shown = path.partition("?")[0]
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(f"GET {path}{self._head}".encode())
                body = await self._answer(shown)
        except TimeoutError:
            raise AgentUnreachable(f"no complete answer to {shown} in time") from None
        except (OSError, EOFError, asyncio.LimitOverrunError) as e:
            raise AgentUnreachable(f"connection broke ({_short(e)})") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as e:
            raise InvalidAgentResponse(f"no JSON for {shown}: {_short(e)}") from None

    async def _answer(self, shown: str) -> bytes:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1."):
            raise InvalidAgentResponse(f"no HTTP answer for {shown}")
        if words[1] == "404":
            raise EndpointNotFound(f"status 404 for {shown}")
        if words[1] in ("401", "403"):
            raise AgentUnreachable(f"authentication required (status {words[1]}): --credentials")
        if words[1] != "200":
            raise InvalidAgentResponse(f"status {words[1][:8]} for {shown}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            raise InvalidAgentResponse(f"no length of the answer for {shown}")
        if len(length) > 12 or int(length) > self._bytes_max:
            raise InvalidAgentResponse(f"more than {self._bytes_max >> 20} MiB for {shown}")
        body = await self._reader.readexactly(int(length))
        return self._inflated(body, shown) if headers.get("content-encoding", "").lower() == "gzip" else body

    def _inflated(self, body: bytes, shown: str) -> bytes:
        inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            whole = inflater.decompress(body, self._bytes_max + 1)
        except zlib.error as e:
            raise InvalidAgentResponse(f"damaged compression of {shown}: {_short(e)}") from None
        if len(whole) > self._bytes_max:
            raise InvalidAgentResponse(f"more than {self._bytes_max >> 20} MiB for {shown}")
        if not inflater.eof:
            raise InvalidAgentResponse(f"damaged compression of {shown}: it ends too early")
        return whole


def _short(e: BaseException) -> str:
    return (str(e) or type(e).__name__)[:120]
