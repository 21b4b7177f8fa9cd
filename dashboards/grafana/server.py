"""A Grafana server over its HTTP API, with one deadline for each request and a maximum response size.

Only the configured server is contacted: redirects are not followed, because they would send the token elsewhere. The
token is sent in one header and appears nowhere else.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.http import HttpFailed, request
from rolecall.core.text import plain

DEADLINE_SECONDS = 20.0
"""For one request. With a slow database Grafana takes seconds for a large dashboard, and a user is waiting."""
ANSWER_BYTES_MAX = 32 << 20
"""A dashboard is well below 1 MiB, a list of 5,000 annotations a few MiB."""
REASON_MAX = 300
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Json = dict[str, Any]


class GrafanaRefused(CommandRefused):
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
    if parts.query or parts.fragment:
        raise ConfigError(["--url: expected http(s)://HOST[:PORT][/PATH], without ? and #"])
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError([f"--url: expected http(s)://HOST[:PORT][/PATH], got {plain(url, 200)!r}"])
    prefix = parts.path.strip("/")
    return GrafanaAddress(
        scheme=parts.scheme, host=f"[{host}]" if ":" in host else host, port=port, prefix=f"{prefix}/" if prefix else ""
    )


class Server:
    def __init__(
        self,
        where: GrafanaAddress,
        token: Token,
        *,
        ca_file: Path | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Raises ConfigError: the CA file does not exist or holds no certificate."""
        self.where, self._token, self._deadline_seconds = where, token, deadline_seconds
        self._tls: ssl.SSLContext | None = None
        if ca_file is not None:
            if not ca_file.is_file():
                raise ConfigError([f"--ca-file: no file {plain(ca_file)}"])
            try:
                self._tls = ssl.create_default_context(cafile=ca_file)
            except ssl.SSLError as e:
                raise ConfigError([f"--ca-file: {plain(ca_file)}: {e.reason}"]) from None

    def mapping(self, method: str, path: str, body: Json | None = None) -> Json:
        """The response, a JSON object. Raises GrafanaRefused."""
        found = self.answer(method, path, body)
        if isinstance(found, dict):
            return found
        raise self._odd(found, "object")

    def listing(self, path: str) -> list[Json]:
        """The response to a GET, a JSON list of objects. Raises GrafanaRefused."""
        found = self.answer("GET", path)
        if isinstance(found, list) and all(isinstance(one, dict) for one in found):
            return found
        raise self._odd(found, "list of objects")

    def _odd(self, found: object, wanted: str) -> GrafanaRefused:
        kind = type(found).__name__
        return GrafanaRefused(
            f"{self.where} returned a JSON {kind} instead of a JSON {wanted}: is this a Grafana server?"
        )

    def answer(self, method: str, path: str, body: Json | None = None) -> Any:
        """The response to one request below `/api`: any JSON value. Raises GrafanaRefused."""
        headers = {"Authorization": f"Bearer {self._token.revealed()}", "User-Agent": "rolecall"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            status, raw = request(
                method,
                f"{self.where}/api{path}",
                deadline_seconds=self._deadline_seconds,
                bytes_max=ANSWER_BYTES_MAX,
                headers=headers,
                content=None if body is None else json.dumps(body).encode(),
                tls=self._tls,
            )
        except HttpFailed as e:
            if e.late:
                reason = f"did not respond within {self._deadline_seconds:g} s"
            elif e.too_large:
                reason = f"returns more than {ANSWER_BYTES_MAX >> 20} MiB"
            else:
                reason = f"is not reachable: {plain(e, REASON_MAX)}"
            raise GrafanaRefused(f"{self.where} {reason}") from None
        if 300 <= status < 400:
            raise GrafanaRefused(
                f"{self.where} redirects ({status}), and redirects are not followed: use the final address"
            )
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError):
            if status < 400:
                reason = "returned something that is not JSON: is this a Grafana server?"
                raise GrafanaRefused(f"{self.where} {reason}") from None
            said = None
        if status >= 400:
            raise self._refused(status, said if isinstance(said, dict) else {})
        return said

    def _refused(self, status: int, said: Json) -> GrafanaRefused:
        words = plain(said.get("message") or "no reason given", REASON_MAX)
        if status == 401:
            text = f"{self.where} does not accept the token (401: {words})"
        elif status == 403:
            text = f"{self.where}: the token may not do this (403: {words}); it needs the role Editor"
        else:
            text = f"{self.where}: {words} ({status})"
        return GrafanaRefused(text, status=status, said=said)
