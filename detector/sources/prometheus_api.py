"""A client of Prometheus's HTTP API (v1).

Servers are untrusted: sizes are limited, redirects are not followed, every wait has a deadline. Credentials are sent,
but never shown.
"""

import http.client
import json
import math
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from rolecall.core.clock import Clock
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.text import os_reason
from rolecall.detector.panels.panel import Stopped, pause

RETRY_SECONDS, RETRY_SECONDS_MAX = 0.2, 5.0
_TOO_MUCH = re.compile(r"too many|too large|too long|exceed|limit|maximum|timed out", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusClientLimits:
    """Limits on the time and memory that one server may use."""

    answer_bytes_max: int = 32 << 20
    """JSON size; parsing takes about ten times as much memory. Larger responses are requested in halves."""
    connect_seconds: float = 5.0
    """For the name lookup, and for each address."""
    answer_seconds: float = 30.0
    """For one whole response."""
    patience_seconds: float = 10.0
    """Time limit for retries of a request."""


class PrometheusUnavailable(Exception):
    """No usable response now, but possibly later. The message is the reason."""


class PrometheusResponseTooLarge(Exception):
    """The request was rejected or its response too large. The message is the server's."""


Addresses = Iterable[tuple[int, int, int, str, Any]]
"""As returned by `socket.getaddrinfo`."""


class Client:
    """One persistent connection. `authorization`: the header's value, or "" for none; it is never shown."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        authorization: str = "",
        limits: PrometheusClientLimits | None = None,
        resolve: Callable[..., Addresses] = socket.getaddrinfo,
    ) -> None:
        """Raises ConfigError; its text does not repeat a URL that may hold a password."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError(["--url: not a URL"]) from None
        if parts.username is not None or parts.password is not None or "@" in parts.netloc:
            reason = "credentials do not belong into a URL, where others see them: use --credentials or the environment"
            raise ConfigError([f"--url: {reason}"])
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise ConfigError([f"--url: expected http(s)://HOST[:PORT][/PATH], got {url[:200]!r}"])
        try:
            self._host.encode("idna")
            parts.path.encode("ascii")
        except UnicodeError:
            raise ConfigError([f"--url: its host or path cannot be sent as it is, got {url[:200]!r}"]) from None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self.where = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "rolecall"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._clock, self._limits = clock, limits or PrometheusClientLimits()
        self._connection: http.client.HTTPConnection | None = None
        self._resolve = resolve
        self._lookup: futures.Future[Addresses] | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def now(self, stopped: Stopped) -> float:
        """The server's clock, seconds since 1970. Raises UnreadableInput, PrometheusUnavailable."""
        try:
            result = self.ask("query", {"query": "time()"}, stopped)
        except PrometheusResponseTooLarge as e:  # the server is overloaded
            raise PrometheusUnavailable(str(e)) from None
        try:
            found = result["result"]
            first = found if result["resultType"] == "scalar" else found[0]["value"]
            now = float(first[0])
            if math.isfinite(now):
                return now
        except (KeyError, IndexError, TypeError, ValueError):
            pass
        raise PrometheusUnavailable("invalid response: it has no time")

    def matrix(self, expression: str, start: float, end: float, step: float, stopped: Stopped) -> list[Any]:
        """Series of a range query, as the server sent them. Raises UnreadableInput, PrometheusUnavailable,
        PrometheusResponseTooLarge."""
        asked = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        found = self.ask("query_range", asked, stopped)
        if isinstance(found, dict) and found.get("resultType") == "matrix" and isinstance(found.get("result"), list):
            return list(found["result"])
        raise PrometheusUnavailable("invalid response: no matrix for a range query")

    def label_values(self, label: str, match: str, start: float, end: float, stopped: Stopped) -> list[str]:
        """Values of a label on series that match `{match}`, without unusable names. Raises UnreadableInput,
        PrometheusUnavailable, PrometheusResponseTooLarge."""
        asked = urlencode({"match[]": f"{{{match}}}", "start": f"{start:.3f}", "end": f"{end:.3f}"})
        found = self.ask(f"label/{quote(label, safe='')}/values?{asked}", None, stopped)
        if isinstance(found, list) and all(isinstance(v, str) for v in found):
            return sorted(filter(is_name, found))
        raise PrometheusUnavailable("invalid response: no list of label values")

    def ask(self, path: str, form: Mapping[str, str] | None, stopped: Stopped) -> Any:
        """`data` of the response; retries for `patience_seconds`. Raises UnreadableInput: a retry cannot help;
        PrometheusUnavailable; PrometheusResponseTooLarge."""
        until = self._clock.monotonic() + self._limits.patience_seconds
        wait = RETRY_SECONDS
        while True:
            try:
                return self._data(*self._exchange(path, form))
            except PrometheusUnavailable:
                if stopped() or self._clock.monotonic() + wait >= until:
                    raise
            pause(self._clock, wait, stopped)
            wait = min(2 * wait, RETRY_SECONDS_MAX)

    def _exchange(self, path: str, form: Mapping[str, str] | None) -> tuple[int, bytes]:
        """Status and body. A watchdog closes the connection at the deadline: a server that sends single bytes never
        lets a read time out."""
        seconds = self._limits.answer_seconds
        body = None if form is None else urlencode(form)
        headers = self._headers | ({"Content-Type": "application/x-www-form-urlencoded"} if body is not None else {})
        late = threading.Event()
        watchdog = threading.Timer(seconds, self._cut_off, (late,))
        watchdog.daemon = True
        watchdog.start()
        most, too_late = self._limits.answer_bytes_max, f"no whole answer within {seconds:.3g} s"
        whole = keep = False
        try:
            connection = self._connected(seconds, late)
            if late.is_set():  # timed out while connecting, so the watchdog had nothing to close
                raise TimeoutError
            connection.request("GET" if body is None else "POST", f"{self._prefix}/api/v1/{path}", body, headers)
            response = connection.getresponse()
            read = response.read(most + 1)
            whole = not response.length and not late.is_set()  # `length`: remaining bytes of the announced length
            keep = whole and response.isclosed()  # a chunked response may have more data
        except ssl.SSLCertVerificationError as e:
            self._refuse(f"its certificate is not trusted: {e.verify_message}")
        except (OSError, http.client.HTTPException) as e:
            why = too_late if late.is_set() or isinstance(e, TimeoutError) else short(e)
            raise PrometheusUnavailable(why) from None
        finally:
            watchdog.cancel()
            if not keep:
                self.close()
        if len(read) > most:
            raise PrometheusResponseTooLarge(f"its answer is larger than {most >> 20} MiB")
        if not whole:
            raise PrometheusUnavailable(too_late if late.is_set() else "its answer was cut short")
        return response.status, read

    def _connected(self, seconds: float, late: threading.Event) -> http.client.HTTPConnection:
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
            return self._connection
        kind = http.client.HTTPConnection if self._tls is None else http.client.HTTPSConnection
        connection = self._connection = kind(self._host, self._port)
        timeout = min(seconds, self._limits.connect_seconds)
        failed = OSError("its name has no address")
        for family, sort, protocol, _, address in self._found(connection.port, timeout):
            if late.is_set():
                raise TimeoutError
            try:
                connection.sock = socket.socket(family, sort, protocol)
                connection.sock.settimeout(timeout)
                connection.sock.connect(address)
                break
            except OSError as e:
                connection.close()
                failed = e
        else:
            raise failed
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            shaken = self._tls.wrap_socket(connection.sock, server_hostname=self._host, do_handshake_on_connect=False)
            connection.sock = shaken  # before the handshake, so that the watchdog can abort it
            shaken.do_handshake()
        connection.sock.settimeout(seconds)
        return connection

    def _found(self, port: int, seconds: float) -> Addresses:
        """Resolves the host. A lookup has no deadline: it continues in a thread, and the next attempt uses its
        result."""
        if self._lookup is None:
            self._lookup = futures.Future()

            def resolve(answer: futures.Future[Addresses] = self._lookup) -> None:
                try:
                    answer.set_result(self._resolve(self._host, port, type=socket.SOCK_STREAM))
                except (OSError, UnicodeError) as e:
                    answer.set_exception(e)

            threading.Thread(target=resolve, daemon=True).start()
        done, _ = futures.wait([self._lookup], seconds)
        if not done:
            host = _printable(self._host)
            raise PrometheusUnavailable(f"no address of {host} within {seconds:.3g} s: looking up its name hangs")
        found, self._lookup = self._lookup, None
        return found.result()

    def _cut_off(self, late: threading.Event) -> None:
        late.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # already closed
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _data(self, status: int, body: bytes) -> Any:
        """Raises UnreadableInput, PrometheusUnavailable, PrometheusResponseTooLarge."""
        if 300 <= status < 400:
            self._refuse(f"it redirects elsewhere (status {status}), which is not followed: give the final address")
        if status == http.client.UNAUTHORIZED:
            self._refuse("it requires credentials, or rejects these (status 401)")
        if status == http.client.FORBIDDEN:
            self._refuse("these credentials are not allowed to query it (status 403)")
        if status == http.client.NOT_FOUND:
            self._refuse("it has no /api/v1 there (status 404): is this a Prometheus server, and the path right?")
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = {}
        said = said if isinstance(said, dict) else {}
        reason = f"{_printable(said.get('error') or 'no reason given')} (status {status})"
        if status == http.client.REQUEST_ENTITY_TOO_LARGE or said.get("errorType") == "timeout":
            raise PrometheusResponseTooLarge(reason)
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY) and _TOO_MUCH.search(reason):
            raise PrometheusResponseTooLarge(reason)
        if status >= 500 or status in (http.client.TOO_MANY_REQUESTS, http.client.REQUEST_TIMEOUT):
            raise PrometheusUnavailable(reason)
        if status != http.client.OK:
            self._refuse(reason)
        if said.get("status") != "success":
            raise PrometheusUnavailable("invalid response: no JSON of Prometheus's API")
        return said.get("data")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnreadableInput(where=self.where, reason=reason)


NAME_MAX = 256
"""Characters in a label's value."""


def is_name(text: str) -> bool:
    """Whether a label's value is usable as a name: not too long, and encodable text."""
    return len(text) <= NAME_MAX and (text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text))


def short(e: BaseException) -> str:
    return _printable(os_reason(e))


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text)[:300])
