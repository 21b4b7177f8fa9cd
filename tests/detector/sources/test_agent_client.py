"""The small HTTP client of agents: compressed answers, users, and answers that are none."""

import asyncio
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from starlette.requests import Request
from starlette.responses import Response

from rolecall.agent.http.server import HttpServer, json_response
from rolecall.detector.sources.agent_wire import InvalidAgentResponse
from rolecall.detector.sources.agents import AgentClientLimits, AgentConnection, AgentUnreachable

LIMITS = AgentClientLimits(answer_bytes_max=1 << 20, connect_seconds=5.0, answer_seconds=5.0)


def ask(url: str, path: str = "/v1/samples", seconds: float = 5.0, authorization: str = "") -> object:
    async def main() -> object:
        connection = await AgentConnection.open(url, LIMITS, authorization=authorization)
        with closing(connection):
            return await connection.get(path, seconds)

    return asyncio.run(main())


@contextmanager
def raw(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to whoever asks, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_the_agents_own_server_compresses_what_is_large_and_is_understood() -> None:
    large = {"rows": [{"role": "trainer", "n": n} for n in range(500)]}

    def answered(request: Request) -> Response:
        return json_response(large if request.url.path == "/large" else small)

    small = {"a": "of a node with one rank" * 100}
    server = HttpServer("127.0.0.1", 0, {"/large": answered, "/small": answered})
    server.start()
    try:
        assert ask(server.url, "/large") == large and ask(server.url, "/small") == small
        for path, accepted, encoding in (("/large", "gzip", "gzip"), ("/large", "", None), ("/small", "gzip", None)):
            connection = http.client.HTTPConnection(*server.address, timeout=10)
            connection.request("GET", path, headers={"Accept-Encoding": accepted})
            answer = connection.getresponse()
            assert answer.headers["Content-Encoding"] == encoding
            assert encoding is None or len(answer.read()) < len(json.dumps(large)) / 5
            connection.close()
    finally:
        server.stop()


def test_a_user_is_reported() -> None:
    seen: list[str] = []

    def answered(request: Request) -> Response:
        seen.append(request.headers.get("authorization", ""))
        return json_response({})

    server = HttpServer("127.0.0.1", 0, {"/v1/samples": answered})
    server.start()
    try:
        ask(server.url, authorization="Bearer abc")
        ask(server.url)
    finally:
        server.stop()
    assert seen == ["Bearer abc", ""]


HEAD = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(b" " * (64 << 20), mtime=0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "connection broke"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no HTTP answer"),
        (b"HTTP/1.1\r\n\r\n", "no HTTP answer"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://evil/\r\n\r\n", "status 302"),
        (HEAD + b"\r\n{}", "no length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "no length"),
        (HEAD + b"Content-Length: -2\r\n\r\n{}", "no length"),
        (HEAD + b"Content-Length: 9999999999999999\r\n\r\n{}", "more than 1 MiB"),
        (HEAD + b"Content-Length: 20\r\n\r\n{}", "connection broke"),
        (HEAD + b"X: " + b"y" * 100_000, "connection broke"),
        (HEAD + b"Content-Length: 2\r\n\r\n{]", "no JSON"),
        (HEAD + b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc", "damaged compression"),
        (
            HEAD + b"Content-Length: 9\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"{}" * 20, mtime=0)[:9],
            "too early",
        ),
        (HEAD + f"Content-Length: {len(BOMB)}\r\nContent-Encoding: gzip\r\n\r\n".encode() + BOMB, "more than 1 MiB"),
    ],
    # The bytes of an answer would make an id of megabytes.
    ids=lambda value: value if isinstance(value, str) else "answer",
)
def test_an_invalid_response_is_reported_and_bounded(answer: bytes, reason: str) -> None:
    with raw(answer) as url, pytest.raises((AgentUnreachable, InvalidAgentResponse), match=reason):
        ask(url)


def test_one_deadline_for_the_whole_answer() -> None:
    with raw(HEAD + b"Content-Length: 50\r\n\r\n") as url, pytest.raises(AgentUnreachable):
        ask(url, seconds=0.2)
