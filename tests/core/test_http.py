"""Outgoing requests: every server that misbehaves ends as HttpFailed within the deadline."""

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rolecall.core.http import HttpAnswer, HttpFailed, is_loopback, request
from tests.agent.page_server import PageServer, http_page


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.close()


def get(server: PageServer, seconds: float = 5.0) -> HttpAnswer:
    return request("GET", server.url, deadline_seconds=seconds, bytes_max=1000)


def test_an_answer(server: PageServer) -> None:
    server.answer = http_page("up 1\n")
    assert get(server) == (200, b"up 1\n")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("asyncio.new_event_loop", OSError(errno.EMFILE, "Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),  # of the thread that looks up the name
    ],
)
def test_a_resource_that_this_machine_lacks_is_a_failed_request(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
) -> None:
    def lacking(*args: object) -> None:
        raise error

    monkeypatch.setattr(what, lacking)
    with pytest.raises(HttpFailed, match=str(error.args[-1])) as e:
        request("GET", server.url.replace("127.0.0.1", "localhost"), deadline_seconds=5.0, bytes_max=1000)
    assert e.value.unsent


def test_a_redirect_is_not_followed(server: PageServer) -> None:
    server.answer = http_page("", "302 Found", "Location: http://127.0.0.1:1/")
    assert get(server).status == 302


@pytest.mark.parametrize("how", ["drip", "hang", "continue"])
def test_the_deadline_holds_for_all_of_it(server: PageServer, how: str) -> None:
    def continues(connection: socket.socket) -> None:
        while not server.ending.wait(0.001):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    server.answer = {"drip": server.drip, "hang": server.hang, "continue": continues}[how]
    began = time.monotonic()
    with pytest.raises(HttpFailed, match=r"no whole answer within 0\.3 s") as e:
        get(server, 0.3)
    assert e.value.late and time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nup", "without sending complete message body"),
        (http_page("x" * 1001), "more than 1,000 bytes"),
    ],
)
def test_bad_answers(server: PageServer, answer: bytes, reason: str) -> None:
    server.answer = answer
    with pytest.raises(HttpFailed, match=reason):
        get(server)


def test_without_a_listener(server: PageServer) -> None:
    server.close()
    with pytest.raises(HttpFailed, match="connection refused") as e:
        get(server)
    assert e.value.refused and e.value.unsent


def test_a_url_that_is_none() -> None:
    with pytest.raises(HttpFailed) as e:
        request("GET", "http://[::1", deadline_seconds=1.0, bytes_max=10)
    assert e.value.unsent


def test_what_failed_before_anything_was_sent_had_no_effect(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No TLS, no name, and no connection."""
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n"  # not TLS

    def no_name(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(HttpFailed) as no_tls:
        request("POST", server.url.replace("http:", "https:"), deadline_seconds=10.0, bytes_max=100)
    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    with pytest.raises(HttpFailed, match="Name or service not known") as unknown:
        request("POST", "http://no-such-host.invalid:1/", deadline_seconds=10.0, bytes_max=10)
    assert no_tls.value.unsent and unknown.value.unsent


def test_what_ends_after_the_request_was_sent_may_have_had_its_effect(server: PageServer) -> None:
    server.answer = lambda connection: connection.close()
    with pytest.raises(HttpFailed) as closed:
        request("POST", server.url, deadline_seconds=10.0, bytes_max=100, content=b"x")
    server.answer = lambda connection: server.ending.wait()
    with pytest.raises(HttpFailed, match="no whole answer within") as late:
        request("POST", server.url, deadline_seconds=0.5, bytes_max=100, content=b"x")
    assert not closed.value.unsent and not late.value.unsent and late.value.late


def test_a_request_for_the_status_does_not_wait_for_the_body(server: PageServer) -> None:
    def hang(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        server.ending.wait()

    server.answer = hang
    assert request("GET", server.url, deadline_seconds=5.0, bytes_max=0) == (200, b"")


def test_a_name_lookup_that_hangs_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released, ended = threading.Event(), threading.Event()

    def lookup(*args: object, **more: object) -> list[object]:
        released.wait(10)
        ended.set()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    try:
        with pytest.raises(HttpFailed) as failed:
            request("GET", "http://no-such-host.invalid:1/", deadline_seconds=0.2, bytes_max=10)
        assert failed.value.late and not ended.is_set(), "the request waited for the lookup"
        assert failed.value.unsent
    finally:
        released.set()


@pytest.mark.parametrize("token", ["secret-1\nsecret-2", "secret-\x00", "secret-\xe9"])
def test_a_header_that_cannot_be_sent_is_told_without_its_value(server: PageServer, token: str) -> None:
    with pytest.raises(HttpFailed, match="the value of Authorization has a character") as e:
        request("GET", server.url, deadline_seconds=5.0, bytes_max=100, headers={"Authorization": f"Bearer {token}"})
    assert "secret-" not in str(e.value) and e.value.unsent


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True), ("0.0.0.0", False), ("10.0.0.1", False),
     ("::", False), ("node-1", False), ("", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
