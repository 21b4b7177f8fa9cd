"""Scrapes another program's metrics page on this node: bounded in time and size, no redirects, no credentials; and
parses it line by line with the parser of prometheus_client.

Each scrape opens and closes a connection: the exporters are on this node, and a hanging one costs at most its deadline.
Uses http.client directly: httpx limits only single waits, and a client and event loop for each page would not fit into
the agent's CPU budget.

Line by line because the parser rejects a whole page at its first malformed line. A collector needs few of a page's
thousands of series: lines with other names are skipped unparsed.
"""

import http.client
import io
import ipaddress
import re
import socket
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.http import is_loopback
from rolecall.core.ids import NodeId
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.metric import MetricValue

DEADLINE_SECONDS = 2.0
"""For connecting, header and body together. An exporter answers in milliseconds."""
PAGE_BYTES_MAX = 8 << 20
"""dcgm-exporter's page of eight GPUs has 0.2 MB, node_exporter's 0.1 to 1 MB."""
_MALFORMED, _DROPPED = BY_NAME["rolecall_probe_lines_malformed_total"], BY_NAME["rolecall_probe_series_dropped_total"]
_HEADERS = "Accept: text/plain;version=0.0.4\r\nUser-Agent: rolecall-agent\r\nConnection: close\r\n"
"""No Accept-Encoding: a compressed page could be of any size."""
NUM_SAMPLES_MAX = 20_000
"""Limit per page; further samples are counted and dropped."""
LINE_BYTES_MAX = 16_384
_NAME = re.compile(rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*[{ \t]")


@dataclass(frozen=True, slots=True)
class ScrapeAddress:
    """`host` as passed to the socket, `host_header` as in the URL."""

    url: str
    host: str
    host_header: str
    port: int
    path: str


def parse_address(url: str) -> ScrapeAddress:
    """`http://host[:port][/path]`; without a path `/metrics`.

    Raises:
        ValueError: not such a URL, or one with credentials or of another node; the message says which.
    """
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r}: not a URL")
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"{url}: must begin with http://")
    if "@" in parts.netloc:
        raise ValueError("a URL of metrics must hold no user and password")
    host = parts.hostname
    if not host:
        raise ValueError(f"{url}: names no host")
    if not _is_of_this_node(host):
        raise ValueError(f"{url}: {host} is no address of this node: its values would appear under this node's name")
    path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
    return ScrapeAddress(url, host, parts.netloc, parts.port or 80, path)


def _is_of_this_node(host: str) -> bool:
    """Only an address of this node can be bound. Names other than localhost are not resolved. A server may listen on
    the node's address alone, as SGLang under slime does."""
    if is_loopback(host):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def fetch(
    address: ScrapeAddress, clock: Clock, *, deadline_seconds: float = DEADLINE_SECONDS, bytes_max: int = PAGE_BYTES_MAX
) -> bytes:
    """The page. Resolving a name other than localhost is not under the deadline.

    Raises:
        CollectorUnavailable: address and reason.
    """
    try:
        return _fetch(address, _Deadline(clock, deadline_seconds), bytes_max)
    except TimeoutError:
        raise CollectorUnavailable(f"{address.url}: no page within {deadline_seconds:g} s") from None
    except OSError as e:
        raise CollectorUnavailable(f"{address.url}: {e.strerror or e or type(e).__name__}") from None
    except http.client.HTTPException as e:
        raise CollectorUnavailable(f"{address.url}: no HTTP answer ({type(e).__name__})") from None
    except ValueError as e:  # http.client: a chunk length that is not a number
        raise CollectorUnavailable(f"{address.url}: no HTTP answer ({e})") from None


class _Deadline:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        """Raises TimeoutError."""
        left = self._end - self._clock.monotonic()
        if left <= 0.0:
            raise TimeoutError
        return left


class _Stream(io.RawIOBase):
    """A socket with one deadline for all reads: its own timeout restarts with each byte."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.left())
        return self._sock.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Required by http.client."""
        return io.BufferedReader(self)


def _fetch(address: ScrapeAddress, deadline: _Deadline, bytes_max: int) -> bytes:
    with _connected(address, deadline) as sock:
        sock.settimeout(deadline.left())
        sock.sendall(f"GET {address.path} HTTP/1.1\r\nHost: {address.host_header}\r\n{_HEADERS}\r\n".encode())
        stream: Any = _Stream(sock, deadline)
        response = http.client.HTTPResponse(stream)
        with response:
            response.begin()
            if 300 <= response.status < 400:
                raise CollectorUnavailable(
                    f"{address.url}: answers with a redirect ({response.status}), which is not followed"
                )
            if response.status != http.client.OK:
                raise CollectorUnavailable(f"{address.url}: answers with status {response.status}")
            body = response.read(bytes_max + 1)
            if len(body) > bytes_max:
                raise CollectorUnavailable(f"{address.url}: a page of more than {bytes_max} bytes")
            if response.length:
                raise CollectorUnavailable(f"{address.url}: the page ended {response.length} bytes early")
            return body


def _connected(address: ScrapeAddress, deadline: _Deadline) -> socket.socket:
    """Tries every address of the name: an exporter may listen on IPv4 only. Raises OSError."""
    error: OSError = OSError("the name has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as e:  # a kernel without IPv6
            error = e
            continue
        try:
            sock.settimeout(deadline.left())
            sock.connect(place)
            return sock
        except OSError as e:
            sock.close()
            error = e
    raise error


class ParsedExposition(NamedTuple):
    """`num_malformed`: lines that cannot be parsed; `num_dropped`: wanted samples beyond the limit."""

    samples: list[Sample]
    num_malformed: int
    num_dropped: int


def parse_page(
    body: bytes, wanted: Container[str] | None = None, *, num_samples_max: int = NUM_SAMPLES_MAX
) -> ParsedExposition:
    """The samples whose name is `wanted` (None: all). Never raises, whatever the bytes."""
    samples: list[Sample] = []
    malformed = dropped = 0
    for line in body.split(b"\n"):
        if not line or line.isspace() or line.lstrip().startswith(b"#"):
            continue
        if wanted is not None and (found := _NAME.match(line)) and found.group(1).decode() not in wanted:
            continue
        if len(samples) >= num_samples_max:
            dropped += 1
            continue
        sample = _parse_line(line)
        if sample is None:
            malformed += 1
        elif wanted is None or sample.name in wanted:
            samples.append(sample)
    return ParsedExposition(samples, malformed, dropped)


def _parse_line(line: bytes) -> Sample | None:
    if len(line) > LINE_BYTES_MAX:
        return None
    try:
        (family,) = text_string_to_metric_families(line.decode())
        (sample,) = family.samples
        return sample._replace(value=float(sample.value))
    except (ValueError, OverflowError, IndexError):  # what the parser raises for a malformed line
        return None


class Scraper:
    """Scrapes pages for one collector, and counts malformed and dropped lines."""

    def __init__(
        self,
        node: NodeId,
        probe: str,
        wanted: Container[str],
        *,
        clock: Clock | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._labels, self._wanted, self._clock = (node, probe), wanted, clock or SystemClock()
        self._deadline_seconds = deadline_seconds
        self.num_malformed = self.num_dropped = 0

    def scrape(self, address: ScrapeAddress) -> tuple[bytes, list[Sample]]:
        """The page as received, and its wanted samples. Raises CollectorUnavailable."""
        body = fetch(address, self._clock, deadline_seconds=self._deadline_seconds)
        page = parse_page(body, self._wanted)
        self.num_malformed += page.num_malformed
        self.num_dropped += page.num_dropped
        return body, page.samples

    def counts(self) -> tuple[MetricValue, MetricValue]:
        return (
            MetricValue(_MALFORMED, self._labels, float(self.num_malformed)),
            MetricValue(_DROPPED, self._labels, float(self.num_dropped)),
        )
