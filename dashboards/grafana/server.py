"""One Grafana server, asked through grafana-client, which has no limits of its own: here every question has one deadline
and every answer a largest size, from name look-up to the last byte.

Nothing is asked but the server that was named: a redirect is not followed, for it would carry the token elsewhere, and
no certificate's revocation is looked up at a third party. The token goes into one header and nowhere else.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import niquests
from grafana_client import GrafanaApi
from grafana_client.client import GrafanaException

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.text import plain

DEADLINE_SECONDS = 20.0
"""For one question. A Grafana with a slow database takes seconds for a large dashboard; a person waits before the screen."""
ANSWER_BYTES_MAX = 32 << 20
"""A dashboard is well below one MiB, a list of 5,000 annotations a few."""
SILENCE_SHARE = 0.8
"""Of the deadline, for one read or connect: a silent server is given up, and its connection closed, before the whole is."""
CHUNK_BYTES = 1 << 16
REASON_MAX = 300
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Json = dict[str, Any]


class GrafanaRefused(CommandRefused):
    """The server said no, or nothing usable. `status` is 0 where there was no answer: a write may then have happened."""

    def __init__(self, reason: str, *, status: int = 0, said: Mapping[str, Any] | None = None) -> None:
        self.status, self.said = status, dict(said or {})
        super().__init__(reason)


class Token:
    """A secret that no repr, log or error shows."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        """Raises ConfigError, whose text does not repeat it."""
        if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
            raise ConfigError(["token: expected one word of printable ASCII characters"])
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(...)"

    def revealed(self) -> str:
        return self._secret


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaAddress:
    """Where a Grafana is. `prefix`: the path below which it is served, "" or "grafana/"."""

    scheme: str
    host: str
    port: int | None
    prefix: str

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}/{self.prefix}".rstrip("/")

    @property
    def token_in_the_clear(self) -> bool:
        return self.scheme == "http" and self.host.strip("[]") not in LOOPBACK


def address(url: str) -> GrafanaAddress:
    """Raises ConfigError; its text does not repeat a URL that may hold a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(["--url: not a URL"]) from None
    if "@" in parts.netloc:
        raise ConfigError(["--url: no user or password belongs into a URL: give a token of a service account"])
    if parts.query or parts.fragment:  # grafana-client would take `?verify=false` for an order
        raise ConfigError(["--url: expected http(s)://HOST[:PORT][/PATH], without ? and #"])
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError([f"--url: expected http(s)://HOST[:PORT][/PATH], got {plain(url, 200)!r}"])
    prefix = parts.path.strip("/")
    return GrafanaAddress(
        scheme=parts.scheme, host=f"[{host}]" if ":" in host else host, port=port, prefix=f"{prefix}/" if prefix else ""
    )


class Server:
    """Asked from one thread."""

    def __init__(
        self,
        where: GrafanaAddress,
        token: Token,
        *,
        ca_file: Path | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError: the file of certificates cannot be read."""
        if ca_file is not None and not ca_file.is_file():
            raise ConfigError([f"--ca-file: no file {plain(ca_file)}"])
        self.where, self._deadline_seconds = where, deadline_seconds
        self._api: Any = GrafanaApi(  # untyped: what it answers is looked at below
            token.revealed(),
            host=where.host,
            port=where.port,
            url_path_prefix=where.prefix,
            protocol=where.scheme,
            verify=str(ca_file) if ca_file is not None else True,
            timeout=deadline_seconds * SILENCE_SHARE,
            user_agent="rolecall",
        )
        self._api.client.s.close()
        self._session = _BoundedSession(clock or SystemClock(), deadline_seconds)
        self._api.client.s = self._session

    def close(self) -> None:
        self._session.close()

    def mapping(self, ask: Callable[[Any], Any]) -> Json:
        """The answer to one call of grafana-client, a JSON object. Raises GrafanaRefused."""
        found = self.answer(ask)
        if isinstance(found, dict):
            return found
        raise self._odd(found, "object")

    def listing(self, ask: Callable[[Any], Any]) -> list[Json]:
        """The answer to one call of grafana-client, a JSON list of objects. Raises GrafanaRefused."""
        found = self.answer(ask)
        if isinstance(found, list) and all(isinstance(one, dict) for one in found):
            return found
        raise self._odd(found, "list of objects")

    def _odd(self, found: object, wanted: str) -> GrafanaRefused:
        kind = "a text" if isinstance(found, str) else f"a JSON {type(found).__name__}"
        return GrafanaRefused(f"{self.where} answered with {kind} where a JSON {wanted} belongs: is this a Grafana?")

    def answer(self, ask: Callable[[Any], Any]) -> Any:
        """The answer to one call of grafana-client, whatever JSON it is, or a text. Raises GrafanaRefused."""
        # In a thread: looking up a name, or headers that come byte by byte, know no deadline.
        answers: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(ask(self._api))
            except Exception as e:  # noqa: BLE001 - told below, in the caller's thread
                errors.append(e)

        thread = threading.Thread(target=run, name="grafana", daemon=True)
        thread.start()
        thread.join(self._deadline_seconds)
        if errors:
            raise self._told(errors[0]) from None
        if not answers:
            raise GrafanaRefused(f"{self.where} gave no answer within {self._deadline_seconds:g} s")
        return answers[0]

    def _told(self, error: Exception) -> GrafanaRefused:
        if isinstance(error, GrafanaException) and error.status_code:
            said = error.response if isinstance(error.response, dict) else {}
            return GrafanaRefused(self._reason(error.status_code, said), status=error.status_code, said=said)
        if isinstance(error, _Unusable):
            return GrafanaRefused(f"{self.where} {error}")
        if isinstance(error, (ValueError, RecursionError)) and not isinstance(error, niquests.RequestException):
            return GrafanaRefused(f"{self.where} answered with something that is no JSON: is this a Grafana?")
        late = isinstance(error, niquests.Timeout) or "imeout" in type(error).__name__
        if late:
            return GrafanaRefused(f"{self.where} gave no answer within {self._deadline_seconds:g} s")
        return GrafanaRefused(f"{self.where} cannot be asked: {_root(error)}")

    def _reason(self, status: int, said: Mapping[str, Any]) -> str:
        words = plain(said.get("message") or "no reason given", REASON_MAX)
        if status == 401:
            return f"{self.where} does not accept the token (401: {words})"
        if status == 403:
            return f"{self.where}: the token may not do this (403: {words}); it wants the role Editor"
        return f"{self.where}: {words} ({status})"


class _Unusable(Exception):
    """An answer that is not looked into. The message continues a sentence that begins with the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrafanaResponse:
    """What grafana-client reads of a response."""

    status_code: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class _BoundedSession:
    """Stands where grafana-client has its session. Reads answers within limits, follows no redirect."""

    def __init__(self, clock: Clock, deadline_seconds: float) -> None:
        self._clock, self._deadline_seconds = clock, deadline_seconds
        self._session = niquests.Session(disable_http3=True, revocation_configuration=None)
        self._session.headers.update({"User-Agent": "rolecall", "Accept-Encoding": "identity"})

    def close(self) -> None:
        self._session.close()

    def request(self, method: str, url: str, **options: Any) -> _GrafanaResponse:
        until = self._clock.monotonic() + self._deadline_seconds
        response = self._session.request(method, url, **options, allow_redirects=False, stream=True)
        try:
            status = response.status_code or 0
            if 300 <= status < 400:
                raise _Unusable(f"redirects elsewhere ({status}), which is not followed: give the final address")
            body = bytearray()
            for chunk in response.iter_content(CHUNK_BYTES):
                body += chunk if isinstance(chunk, bytes) else chunk.encode()
                if len(body) > ANSWER_BYTES_MAX:
                    raise _Unusable(f"answers with more than {ANSWER_BYTES_MAX >> 20} MiB: it is not read")
                if self._clock.monotonic() > until:
                    raise _Unusable(f"was still answering after {self._deadline_seconds:g} s")
            headers = {str(k): str(v) for k, v in response.headers.items()}
            return _GrafanaResponse(status_code=status, headers=headers, text=body.decode("utf-8", "replace"))
        finally:
            response.close()


def _root(error: BaseException) -> str:
    """The innermost reason: `Connection refused` rather than four nested pools and retries."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        error = found
        nested = next((a for a in found.args if isinstance(a, BaseException)), None)
        reason = getattr(found, "reason", None)
        found = (
            nested or (reason if isinstance(reason, BaseException) else None) or found.__cause__ or found.__context__
        )
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return plain(text or type(error).__name__, REASON_MAX)
