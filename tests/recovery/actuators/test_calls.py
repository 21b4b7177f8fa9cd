"""One call to another system: it always ends, and says what is known of its effect."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rolecall.recovery.actuators.calls import (
    NO_STATUS,
    NOT_SENT,
    NOT_STARTED,
    REPLY_BYTES_MAX,
    CommandCall,
    HttpCall,
    Reply,
)
from tests.support import eventually


def command(*argv: str, seconds: float = 30.0, **environment: str) -> Reply:
    return CommandCall(key="c", words="", argv=argv, environment=environment, deadline_seconds=seconds).make()


def python(code: str, seconds: float = 30.0) -> Reply:
    return command(sys.executable, "-c", code, seconds=seconds)


def test_a_command_has_its_exit_code_and_the_output_of_both_streams() -> None:
    reply = command("/bin/sh", "-c", 'echo out; echo "$KEY" >&2; exit 3', KEY="k 1")
    assert (reply.status, reply.text, reply.shown) == (3, "out\nk 1\n", "status 3: out k 1")


def test_arguments_are_not_read_by_a_shell() -> None:
    assert command("/bin/echo", "$HOME; true", "a b").text == "$HOME; true a b\n"


def test_a_command_that_cannot_start_had_no_effect() -> None:
    reply = command("/does/not/exist")
    assert reply.status == NOT_STARTED and "/does/not/exist" in reply.text


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    reply = command("/bin/sh", "-c", f"sleep 100 & echo $! > {pid_file}; wait", seconds=1.0)
    assert reply.status == NO_STATUS and not reply.known and "not done within 1 s" in reply.text
    child = int(pid_file.read_text())
    eventually(lambda: _state_of(child) in ("", "Z"), "the child has ended")


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_child_that_keeps_the_output_open_delays_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    reply = command("/bin/sh", "-c", f"setsid sleep 100 & echo $! > {pid_file}; echo done")
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert reply.status == 0 and reply.text == "done\n"


def test_endless_output_is_cut_off() -> None:
    reply = python(f"print('x' * {REPLY_BYTES_MAX + 1000})")
    assert reply.status == 0 and len(reply.text) == REPLY_BYTES_MAX


class Server(BaseHTTPRequestHandler):
    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        seen = f"{self.headers['Authorization']} {self.headers['Content-Type']} {body}"
        self.send_response(409)
        self.end_headers()
        self.wfile.write(seen.encode())

    def do_GET(self) -> None:
        threading.Event().wait(2.0)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/x"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_has_its_status_whatever_it_is_and_reads_its_token_each_time(url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    call = HttpCall(key="h", words="", method="PATCH", url=url, body={"a": 1}, token_path=str(token))
    for text in ("first\n", "second\n"):
        token.write_text(text)
        reply = call.make()
        assert reply.status == 409 and reply.text == f'Bearer {text.strip()} application/json {{"a": 1}}'
    assert call.shown == f'PATCH {url} {{"a": 1}}', "without the token"


def test_a_request_without_an_answer_may_have_had_its_effect(url: str) -> None:
    reply = HttpCall(key="h", words="", method="GET", url=url, deadline_seconds=0.2).make()
    assert reply.status == NO_STATUS and not reply.known


def test_a_request_that_reached_no_server_had_no_effect(url: str, tmp_path: Path) -> None:
    refused = HttpCall(key="h", words="", method="GET", url="http://127.0.0.1:9/x").make()
    no_token = HttpCall(key="h", words="", method="GET", url=url, token_path=str(tmp_path / "none")).make()
    no_ca = HttpCall(key="h", words="", method="GET", url="https://127.0.0.1:9/x", ca_path=str(tmp_path / "no")).make()
    assert [r.status for r in (refused, no_token, no_ca)] == [NOT_SENT] * 3, (refused, no_token, no_ca)
    assert refused.shown == "not sent: 127.0.0.1:9: connection refused"


def test_a_command_that_cannot_be_ended_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an uninterruptible system call."""
    left: list[subprocess.Popen[bytes]] = []

    def never(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        left.append(process)
        raise subprocess.TimeoutExpired("x", timeout or 0.0)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", never)
        reply = command("/bin/sleep", "100", seconds=0.1)
    left[0].wait(30.0)
    assert reply.status == NO_STATUS and "not done within 0.1 s" in reply.text


def test_a_body_that_is_nested_too_deeply_is_no_json() -> None:
    assert Reply(status=200, text="[" * 1_000_000).json is None
