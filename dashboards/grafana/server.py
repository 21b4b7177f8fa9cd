"""A Grafana server, through grafana-client. grafana-client has no limits, so this module adds a deadline for each
request (from name lookup to the last byte) and a maximum response size.

Only the configured server is contacted: redirects are not followed, because they would send the token elsewhere, and
certificate revocation is not checked with third parties. The token is sent in one header and appears nowhere else.
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
from rolecall.core.errors import ConfigError, RolecallError
from rolecall.core.text import plain

DEADLINE_SECONDS = 20.0
"""For one request. With a slow database Grafana takes seconds for a large dashboard, and a user is waiting."""
ANSWER_BYTES_MAX = 32 << 20
"""A dashboard is well below 1 MiB, a list of 5,000 annotations a few MiB."""
SILENCE_SHARE = 0.8
"""Share of the deadline for one read or connect, so that a silent server times out before the whole request does."""
CHUNK_BYTES = 1 << 16
REASON_MAX = 300
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Json = dict[str, Any]


class GrafanaRefused(RolecallError):
    """The server rejected a request or sent no usable response. `status` 0: no response, so a write may have
    happened."""

    def __init__(self, reason: str, *, status: int = 0, said: Mapping[str, Any] | None = None) -> None:
        self.status, self.said = status, dict(said or {})
        super().__init__(reason)


class Token:
    """A secret that never appears in a repr, log or error."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        """Raises ConfigError; its message does not contain the token."""
        if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
            raise ConfigError(["token: expected printable ASCII characters without spaces"])
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(...)"

    def revealed(self) -> str:
        return self._secret


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaAddress:
    """Address of a Grafana. `prefix`: the path it is served under, "" or "grafana/"."""

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
    """Raises ConfigError; its message does not repeat a URL that may contain a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(["--url: not a URL"]) from None
    if "@" in parts.netloc:
        raise ConfigError(["--url: must not contain a user or password; use a service account token"])
    if parts.query or parts.fragment:  # grafana-client would obey `?verify=false`
        raise ConfigError(["--url: expected http(s)://HOST[:PORT][/PATH], without ? and #"])
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError([f"--url: expected http(s)://HOST[:PORT][/PATH], got {plain(url, 200)!r}"])
    prefix = parts.path.strip("/")
    return GrafanaAddress(
        scheme=parts.scheme, host=f"[{host}]" if ":" in host else host, port=port, prefix=f"{prefix}/" if prefix else ""
    )


class Server:
    """Not thread-safe."""

    def __init__(
        self,
        where: GrafanaAddress,
        token: Token,
        *,
        ca_file: Path | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError: the CA file does not exist."""
        if ca_file is not None and not ca_file.is_file():
            raise ConfigError([f"--ca-file: no file {plain(ca_file)}"])
        self.where, self._deadline_seconds = where, deadline_seconds
        self._api: Any = GrafanaApi(  # untyped; responses are validated below
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
        """The response to one call of grafana-client, a JSON object. Raises GrafanaRefused."""
        found = self.answer(ask)
        if isinstance(found, dict):
            return found
        raise self._odd(found, "object")

    def listing(self, ask: Callable[[Any], Any]) -> list[Json]:
        """The response to one call of grafana-client, a JSON list of objects. Raises GrafanaRefused."""
        found = self.answer(ask)
        if isinstance(found, list) and all(isinstance(one, dict) for one in found):
            return found
        raise self._odd(found, "list of objects")

    def _odd(self, found: object, wanted: str) -> GrafanaRefused:
        kind = "text" if isinstance(found, str) else f"a JSON {type(found).__name__}"
        return GrafanaRefused(f"{self.where} returned {kind} instead of a JSON {wanted}: is this a Grafana server?")

    def answer(self, ask: Callable[[Any], Any]) -> Any:
        """The response to one call of grafana-client: any JSON value, or text. Raises GrafanaRefused."""
        # In a thread, because name lookup and slowly arriving headers have no timeout.
        answers: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(ask(self._api))
            except Exception as e:  # noqa: BLE001 - reported below, in the caller's thread
                errors.append(e)

        thread = threading.Thread(target=run, name="grafana", daemon=True)
        thread.start()
        thread.join(self._deadline_seconds)
        if errors:
            raise self._refused(errors[0]) from None
        if not answers:
            raise GrafanaRefused(f"{self.where} did not respond within {self._deadline_seconds:g} s")
        return answers[0]

    def _refused(self, error: Exception) -> GrafanaRefused:
        if isinstance(error, GrafanaException) and error.status_code:
            said = error.response if isinstance(error.response, dict) else {}
            return GrafanaRefused(self._reason(error.status_code, said), status=error.status_code, said=said)
        if isinstance(error, _Unusable):
            return GrafanaRefused(f"{self.where} {error}")
        if isinstance(error, (ValueError, RecursionError)) and not isinstance(error, niquests.RequestException):
            return GrafanaRefused(f"{self.where} returned something that is not JSON: is this a Grafana server?")
        late = isinstance(error, niquests.Timeout) or "imeout" in type(error).__name__
        if late:
            return GrafanaRefused(f"{self.where} did not respond within {self._deadline_seconds:g} s")
        return GrafanaRefused(f"{self.where} is not reachable: {_root(error)}")

    def _reason(self, status: int, said: Mapping[str, Any]) -> str:
        words = plain(said.get("message") or "no reason given", REASON_MAX)
        if status == 401:
            return f"{self.where} does not accept the token (401: {words})"
        if status == 403:
            return f"{self.where}: the token may not do this (403: {words}); it needs the role Editor"
        return f"{self.where}: {words} ({status})"


class _Unusable(Exception):
    """A response that is not parsed. The message continues a sentence that starts with the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrafanaResponse:
    """The part of a response that grafana-client uses."""

    status_code: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class _BoundedSession:
    """Replaces grafana-client's session. Enforces limits on responses and follows no redirects."""

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
                raise _Unusable(f"redirects ({status}), and redirects are not followed: use the final address")
            body = bytearray()
            for chunk in response.iter_content(CHUNK_BYTES):
                body += chunk if isinstance(chunk, bytes) else chunk.encode()
                if len(body) > ANSWER_BYTES_MAX:
                    raise _Unusable(f"returns more than {ANSWER_BYTES_MAX >> 20} MiB")
                if self._clock.monotonic() > until:
                    raise _Unusable(f"was still sending its response after {self._deadline_seconds:g} s")
            headers = {str(k): str(v) for k, v in response.headers.items()}
            return _GrafanaResponse(status_code=status, headers=headers, text=body.decode("utf-8", "replace"))
        finally:
            response.close()


def _root(error: BaseException) -> str:
    """The innermost cause: `Connection refused` instead of four nested pools and retries."""
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
