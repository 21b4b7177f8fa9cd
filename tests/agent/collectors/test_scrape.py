"""Pages of metrics over HTTP: servers that are slow, huge, redirecting, dying or something else altogether."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolecall.agent.collectors.base import CollectorUnavailable
from rolecall.agent.collectors.exporters.scrape import fetch, parse_address, parse_page
from rolecall.core.clock import SystemClock
from tests.agent.page_server import PageServer, http_page
from tests.prometheus_server import prometheus
from tests.support import PATIENCE_SECONDS

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.close()


def read(server: PageServer, deadline_seconds: float = 5.0, bytes_max: int = 1000) -> bytes:
    return fetch(parse_address(server.url), SystemClock(), deadline_seconds=deadline_seconds, bytes_max=bytes_max)


@pytest.mark.parametrize(
    "answer",
    [http_page("up 1\n"), CHUNKED + b"3\r\nup \r\n2\r\n1\n\r\n0\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\nup 1\n"],
    ids=["length", "chunked", "until the end"],
)
def test_page(server: PageServer, answer: bytes) -> None:
    server.answer = answer
    assert read(server) == b"up 1\n"
    (head,) = server.heads
    assert head.startswith(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.port)
    assert b"Authorization" not in head and b"Accept-Encoding" not in head


def test_a_server_that_keeps_the_connection_is_not_waited_for(server: PageServer) -> None:
    def keep(connection: socket.socket) -> None:
        connection.sendall(http_page("up 1\n"))
        server.ending.wait()

    server.answer = keep
    assert read(server) == b"up 1\n"


BAD = [
    (
        http_page("", "302 Found", "Location: http://127.0.0.1:1/"),
        "answers with a redirect (302), which is not followed",
    ),
    (http_page("", "404 Not Found"), "answers with status 404"),
    (http_page("", "401 Unauthorized"), "answers with status 401"),
    (b"", "Remote end closed connection without response"),
    (b"SSH-2.0-OpenSSH\r\n", "no HTTP answer"),
    (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "no HTTP answer"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nup", "the page ended 8 bytes early"),
    (CHUNKED + b"5\r\nup", "no HTTP answer (IncompleteRead)"),
    (CHUNKED + b"zz\r\nup", "no HTTP answer"),
    (http_page("x" * 1001), "a page of more than 1000 bytes"),
    (CHUNKED + b"7d0\r\n" + b"x" * 2000, "a page of more than 1000 bytes"),
    (b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 2000, "a page of more than 1000 bytes"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD, ids=[f"{i} {reason}" for i, (_, reason) in enumerate(BAD)])
def test_bad_answer_names_address_and_reason(server: PageServer, answer: bytes, reason: str) -> None:
    server.answer = answer
    with pytest.raises(CollectorUnavailable) as e:
        read(server)
    assert str(e.value).startswith(f"{server.url}: {reason}")


def test_an_endless_page_is_cut(server: PageServer) -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    server.answer = endless
    with pytest.raises(CollectorUnavailable, match="a page of more than 1000 bytes"):
        read(server)


@pytest.mark.parametrize("how", ["drip", "hang", "continue"])
def test_the_deadline_holds_for_all_of_it(server: PageServer, how: str) -> None:
    def continues(connection: socket.socket) -> None:
        while not server.ending.wait(0.001):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    server.answer = {"drip": server.drip, "hang": server.hang, "continue": continues}[how]
    with pytest.raises(CollectorUnavailable, match=r"no page within 0\.2 s"):
        read(server, deadline_seconds=0.2)


def test_a_full_backlog_is_under_the_deadline() -> None:
    """A stopped process: the kernel takes connections until its queue is full, then they hang."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        host, port = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for s in waiting:
            s.setblocking(False)
            s.connect_ex((host, port))
        with pytest.raises(CollectorUnavailable, match=r"no page within 0\.2 s"):
            fetch(parse_address(f"http://{host}:{port}"), SystemClock(), deadline_seconds=0.2)
        for s in waiting:
            s.close()


def test_without_a_listener(server: PageServer) -> None:
    server.close()
    with pytest.raises(CollectorUnavailable, match=f"{server.url}: Connection refused"):
        read(server)


def test_localhost_finds_a_server_on_ipv4(server: PageServer) -> None:
    server.show("up 1\n")
    assert fetch(parse_address(f"http://localhost:{server.port}"), SystemClock()) == b"up 1\n"


def test_a_connection_that_is_reset(server: PageServer) -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    server.answer = reset
    with pytest.raises(CollectorUnavailable, match=f"{server.url}: "):
        read(server)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:9400", "must begin with http://"),
        ("https://localhost:9400", "must begin with http://"),
        ("http://user:secret@localhost:9400", "must hold no user and password"),
        ("http://:9400", "names no host"),
        ("http://192.0.2.7:9400", "192.0.2.7 is no address of this node"),
        ("http://localhost.example.com", "is no address of this node"),
        ("http://localhost:99999", "out of range"),
        ("http://localhost/a b", "not a URL"),
        ("http://localhost/\r\nX: y", "not a URL"),
        ("http://[::1", "IPv6"),
    ],
)
def test_address_that_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as e:
        parse_address(url)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://localhost:9400", "localhost", 9400, "/metrics"),
        ("http://127.0.0.2:9400/metrics", "127.0.0.2", 9400, "/metrics"),
        ("http://[::1]:80/m?a=b", "::1", 80, "/m?a=b"),
        ("http://127.0.0.7/", "127.0.0.7", 80, "/"),
        ("http://0.0.0.0:30000", "0.0.0.0", 30000, "/metrics"),  # stands for a node's own address, which varies
    ],
)
def test_address(url: str, host: str, port: int, path: str) -> None:
    address = parse_address(url)
    assert (address.host, address.port, address.path) == (host, port, path)


def test_the_page_of_a_real_prometheus(tmp_path: Path) -> None:
    """It writes its own metrics as all exporters in Go do."""
    with prometheus(tmp_path) as real:
        body = fetch(parse_address(f"{real.url}/metrics"), SystemClock(), deadline_seconds=PATIENCE_SECONDS)
    page = parse_page(body)
    theirs = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    assert page.num_malformed == 0 and len(page.samples) > 100
    assert [(s.name, s.labels) for s in page.samples] == [(s.name, s.labels) for s in theirs]
    assert [s.value for s in page.samples] == pytest.approx([s.value for s in theirs], nan_ok=True, rel=0, abs=0)


def test_no_thread_is_left(server: PageServer) -> None:
    server.show("up 1\n")
    before = threading.active_count()
    read(server)
    server.close()
    assert threading.active_count() <= before
