"""The HTTP side: what it answers, and what it refuses with which reason."""

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from rolecall.agent.http import server as server_module
from rolecall.agent.http.parameters import authorize, number, only, seconds
from rolecall.agent.http.server import (
    CHUNK_BYTES,
    HEAD_BYTES_MAX,
    NUM_CONNECTIONS_MAX,
    Handler,
    HttpServer,
    attachment,
    json_response,
)
from tests.support import PATIENCE_SECONDS, eventually


def _echo(request: Request) -> Response:
    only(request, "n", "wait")
    return json_response({"n": number(request, "n", 7), "wait": seconds(request, "wait", 30.0)})


def _secret(request: Request) -> Response:
    authorize(request, "tok")
    return json_response({"ok": True})


def _defect(request: Request) -> Response:
    raise RuntimeError("a defect")


LARGE = bytes(range(256)) * (8 * CHUNK_BYTES // 256) + b"end"


def _large(request: Request) -> Response:
    return attachment(LARGE)


ROUTES: dict[str, Handler] = {"/echo": _echo, "/secret": _secret, "/defect": _defect, "/large": _large}


@pytest.fixture
def server() -> Iterator[HttpServer]:
    it = HttpServer("127.0.0.1", 0, ROUTES)
    it.start()
    yield it
    it.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """Gives up on a client after a second."""
    monkeypatch.setattr(server_module, "IDLE_SECONDS_MAX", 1)
    it = HttpServer("127.0.0.1", 0, ROUTES)
    it.start()
    yield it
    it.stop()


def _get(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def _raw(server: HttpServer, raw: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=PATIENCE_SECONDS) as s:
        s.sendall(raw)
        got = b""
        while part := s.recv(65536):
            got += part
        return got


def test_one_connection_serves_many_requests(server: HttpServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    for n in range(3):
        connection.request("GET", f"/echo?n={n}&wait=1.5")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"n": n, "wait": 1.5})
        assert answer.headers["Content-Type"] == "application/json"
    connection.close()


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/echo?n=-1", 400, "n: expected a whole number, got '-1'"),
        ("/echo?n=1e3", 400, "whole number"),
        ("/echo?n=", 400, "whole number"),
        ("/echo?n=99999999999999999999", 400, "whole number"),
        ("/echo?n=%D9%A3", 400, "whole number"),
        ("/echo?wait=31", 400, "wait: expected 0 to 30 seconds, got '31'"),
        ("/echo?wait=nan", 400, "0 to 30 seconds"),
        ("/echo?wait=-1", 400, "0 to 30 seconds"),
        ("/echo?m=1", 400, "unknown parameter 'm'"),
        ("/nowhere", 404, "Not Found"),
        ("/echo/", 404, "Not Found"),
        ("/secret", 401, "bearer token"),
        ("/defect", 500, "internal error"),
    ],
)
def test_bad_input_gets_a_reason(server: HttpServer, path: str, status: int, reason: str) -> None:
    got, body = _get(server, path)
    assert got == status
    assert reason in str(body["error"])


def test_authorization(server: HttpServer) -> None:
    assert _get(server, "/secret", Authorization="Bearer tok")[0] == 200
    for wrong in ("Bearer", "Bearer t", "Basic tok", "tok", "Bearer tok2"):
        assert _get(server, "/secret", Authorization=wrong)[0] == 401


def test_a_large_answer_arrives_complete_and_the_connection_stays(server: HttpServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    for _ in range(2):
        connection.request("GET", "/large")
        assert connection.getresponse().read() == LARGE
    connection.close()


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
def test_only_get(server: HttpServer, method: str) -> None:
    assert _get(server, "/echo", method)[0] == 405


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nno colon here\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(HEAD_BYTES_MAX // 4)),
        b"GET /echo HTTP/1.1\r\nHost: a\r\nx: " + b"y" * HEAD_BYTES_MAX,
        b"\xff\xfe\x00\r\n\r\n",
    ],
)
def test_invalid_http_or_a_large_response_is_rejected(server: HttpServer, raw: bytes) -> None:
    assert _raw(server, raw).startswith(b"HTTP/1.1 400 ")
    assert _get(server, "/echo")[0] == 200  # and nothing else suffered


def test_the_body_of_a_request_is_not_kept(server: HttpServer) -> None:
    head = b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 5\r\n\r\n"
    assert _raw(server, head + b"hello").startswith(b"HTTP/1.1 200 ")


def test_a_closed_connection_and_http_1_0(server: HttpServer) -> None:
    assert b"connection: close" in _raw(server, b"GET /echo HTTP/1.0\r\n\r\n").lower()
    asked = b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert b"connection: close" in _raw(server, asked).lower()


@pytest.mark.parametrize("sent", [b"", b"GET /ec", b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\nGET /"])
def test_a_silent_client_is_dropped(impatient: HttpServer, sent: bytes) -> None:
    with socket.create_connection(impatient.address, timeout=PATIENCE_SECONDS) as s:
        s.sendall(sent)
        while s.recv(65536):
            pass  # the answer to the first request, then the end


def test_a_client_that_drips_is_dropped(impatient: HttpServer) -> None:
    began = time.monotonic()
    with socket.create_connection(impatient.address, timeout=PATIENCE_SECONDS) as s, pytest.raises(OSError):
        for byte in itertools.cycle(b"x"):
            s.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() < began + PATIENCE_SECONDS


def test_a_client_that_does_not_read_is_dropped(impatient: HttpServer) -> None:
    with socket.create_connection(impatient.address, timeout=PATIENCE_SECONDS) as s:
        s.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        eventually(lambda: not impatient._server.server_state.connections, "the connection is dropped")


def test_a_long_poll_delays_no_other_request() -> None:
    ending = threading.Event()

    def wait(request: Request) -> Response:
        ending.wait(PATIENCE_SECONDS)
        return json_response({})

    server = HttpServer("127.0.0.1", 0, {"/wait": wait, "/echo": _echo})
    server.start()
    try:
        held = [
            socket.create_connection(server.address, timeout=PATIENCE_SECONDS) for _ in range(NUM_CONNECTIONS_MAX - 1)
        ]
        for s in held:
            s.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        eventually(lambda: len(server._server.server_state.tasks) == len(held), "all wait")
        assert _get(server, "/echo")[0] == 200
        began = time.monotonic()
        server.stop()
        assert time.monotonic() < began + 10.0, "stopping does not wait for long polls"
    finally:
        ending.set()
        for s in held:
            s.close()


def test_too_many_connections_are_refused_and_later_served(server: HttpServer) -> None:
    held = [socket.create_connection(server.address, timeout=PATIENCE_SECONDS) for _ in range(NUM_CONNECTIONS_MAX)]
    try:
        for s in held:  # each is served once, so that each holds its place for sure
            s.sendall(b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n")
            assert s.recv(65536).startswith(b"HTTP/1.1 200 ")
        with socket.create_connection(server.address, timeout=PATIENCE_SECONDS) as one_more:
            assert one_more.recv(65536).startswith(b"HTTP/1.1 503 ")
    finally:
        for s in held:
            s.close()
    eventually(lambda: _get(server, "/echo")[0] == 200, "places are free again")


def test_an_address_of_ipv6_is_listened_on() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"no IPv6 here: {e}")
    server = HttpServer("::1", 0, {"/echo": _echo})
    server.start()
    try:
        assert server.url.startswith("http://[::1]:")
        connection = http.client.HTTPConnection("::1", server.address[1], timeout=PATIENCE_SECONDS)
        connection.request("GET", "/echo")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.stop()


def test_a_taken_port_is_named(server: HttpServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        HttpServer("127.0.0.1", port, {})


def test_it_listens_on_loopback_and_nowhere_else(server: HttpServer) -> None:
    port = int(server.url.rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row[1] for row in listening if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
    assert mine == [f"0100007F:{port:04X}"]
