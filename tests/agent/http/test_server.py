"""The HTTP side: what it answers, and what it refuses with which reason."""

import http.client
import json
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.http.server import COPIED_BYTES_MAX, NUM_CONNECTIONS_MAX, HttpRequest, HttpResponse, HttpServer
from tests.support import PATIENCE_SECONDS, eventually


def _echo(request: HttpRequest) -> HttpResponse:
    request.only("n", "wait")
    return HttpResponse.json({"n": request.number("n", 7), "wait": request.seconds("wait", 30.0)})


def _secret(request: HttpRequest) -> HttpResponse:
    request.authorize("tok")
    return HttpResponse.json({"ok": True})


def _defect(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("a defect")


def _large(request: HttpRequest) -> HttpResponse:
    return HttpResponse(bytes(COPIED_BYTES_MAX + 1), "application/octet-stream")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    it = HttpServer("127.0.0.1", 0, {"/echo": _echo, "/secret": _secret, "/defect": _defect, "/large": _large})
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
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as s:
        s.sendall(raw)
        s.shutdown(socket.SHUT_WR)
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
        ("/echo?" + "&".join(f"n{i}=1" for i in range(20)), 400, "malformed target"),
        ("/nowhere", 404, "no such path; there are /defect, /echo, /large, /secret"),
        ("/secret", 401, "bearer token"),
        ("/defect", 500, "the agent failed at this request"),
    ],
)
def test_bad_input_gets_a_reason(server: HttpServer, path: str, status: int, reason: str) -> None:
    got, said = _get(server, path)
    assert got == status
    assert reason in str(said["error"])


def test_authorization(server: HttpServer) -> None:
    assert _get(server, "/secret", Authorization="Bearer tok")[0] == 200
    for wrong in ("Bearer", "Bearer t", "Basic tok", "tok", "Bearer tok2"):
        assert _get(server, "/secret", Authorization=wrong)[0] == 401


def test_a_large_answer_comes_whole_and_the_connection_stays(server: HttpServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    for _ in range(2):
        connection.request("GET", "/large")
        assert connection.getresponse().read() == bytes(COPIED_BYTES_MAX + 1)
    connection.close()


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE", "OPTIONS"])
def test_only_get(server: HttpServer, method: str) -> None:
    assert _raw(server, f"{method} /echo HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /echo HTTP/3\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /echo HTTP/1.1\r\nno colon here\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\n" + b"a: b\r\n" * 1 + b"".join(b"h%d: x\r\n" % i for i in range(100)) + b"\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"\xff\xfe\x00\r\n\r\n", 400),
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_what_is_not_http_is_refused(server: HttpServer, raw: bytes, status: int) -> None:
    assert _raw(server, raw).startswith(b"HTTP/1.1 %d " % status)
    assert _get(server, "/echo")[0] == 200  # and nothing else suffered


def test_a_closed_connection_and_http_1_0(server: HttpServer) -> None:
    assert _raw(server, b"") == b""
    assert b"Connection: close" in _raw(server, b"GET /echo HTTP/1.0\r\n\r\n")
    assert b"Connection: close" in _raw(server, b"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\n")


def test_too_many_connections_are_refused_and_later_served(server: HttpServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    held = [socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) for _ in range(NUM_CONNECTIONS_MAX)]
    try:
        for s in held:  # each is served once, so that each holds its place for sure
            s.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert s.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert _get(server, "/echo")[0] == 503
    finally:
        for s in held:
            s.close()
    eventually(lambda: _get(server, "/echo")[0] == 200, "places are free again")


class _NoThreads(socketserver.ThreadingTCPServer):
    """Of a user whose threads are used up, for as long as `left` says."""

    left = 1

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError("can't start new thread")
        super().process_request(request, client_address)


class _Starved(HttpServer, _NoThreads):
    pass


def test_without_a_thread_for_it_a_connection_is_refused_and_the_next_is_served() -> None:
    server = _Starved("127.0.0.1", 0, {"/echo": _echo})
    server.left = NUM_CONNECTIONS_MAX + 1  # none of them keeps a place
    server.start()
    try:
        for _ in range(NUM_CONNECTIONS_MAX + 1):
            assert _get(server, "/echo")[0] == 503
        assert _get(server, "/echo")[0] == 200
    finally:
        server.stop()


def test_an_address_of_ipv6_is_listened_on() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"no IPv6 here: {e}")
    server = HttpServer("::1", 0, {"/echo": _echo})
    server.start()
    try:
        assert server.url.startswith("http://[::1]:")
        connection = http.client.HTTPConnection("::1", server.server_address[1], timeout=PATIENCE_SECONDS)
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
