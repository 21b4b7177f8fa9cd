"""The address at which a verl job takes orders: over loopback, with the target's own calls."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rolecall.core.config.actuators import VerlActuator
from rolecall.core.http import HttpAnswer, request
from rolecall.integrations import verl_control, verl_engines
from rolecall.integrations.verl_control import (
    ADDRESS,
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    REQUESTS_MAX,
    TOKEN_FILE,
    Control,
    control_of,
)
from rolecall.recovery.actuators.targets.verl import Verl
from tests.integrations.verl_fake import FakeJob, fake_job
from tests.recovery.actuators.driving import Driven, drive, member, order
from tests.support import PATIENCE_SECONDS, eventually

TOKEN = "s3cret"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    return path


@pytest.fixture
def job() -> FakeJob:
    job = fake_job()
    for replica in job.manager.replicas:
        replica.pid = 40 + replica.replica_rank
    job.update()
    return job


@pytest.fixture
def url(job: FakeJob, token: Path) -> Iterator[str]:
    control = Control("127.0.0.1", 0, token)
    control.serve(job.replacements)
    server = control.server
    assert server is not None
    control.serve(job.replacements)
    assert control.server is server, "once"
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(
    url: str, method: str = "GET", path: str = "/v1/replicas", body: object = None, token: str = TOKEN
) -> HttpAnswer:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return request(method, url + path, headers=headers, content=content, deadline_seconds=10, bytes_max=100_000)


def target(url: str, token: Path) -> Verl:
    return Verl(VerlActuator(kind="verl", url=url, token_path=str(token), poll_seconds=0.01))


def replace(url: str, token: Path, job: FakeJob, pid: int = 41) -> Driven:
    """The target's calls are made; the job goes on between two looks."""

    def answer(call: object) -> object:
        reply = call.make()  # type: ignore[attr-defined]
        if call.key.startswith("wait"):  # type: ignore[attr-defined]
            job.update()
            job.run_threads()
        return reply

    return drive(target(url, token).replace(order(member("rollout/1", "n-1", pid=pid))), answer)  # type: ignore[arg-type]


def test_the_target_replaces_a_replica(url: str, token: Path, job: FakeJob) -> None:
    it = replace(url, token, job)
    assert it.done == "rollout/1: the new engine has current weights and gets requests", it
    assert job.cluster.ended == ["e1"] and job.balancer.engines == {"e0", "e2", "new-1"}
    again = drive(
        target(url, token).replace(order(member("rollout/1", "n-1", pid=41), begun=True)), lambda call: call.make()
    )
    assert again.done == it.done and again.changing == [], "after a takeover it is found done"


def test_another_process_is_left_alone(url: str, token: Path, job: FakeJob) -> None:
    it = replace(url, token, job, pid=77)
    assert "pid 77 of rollout/1#2 is no process of the job's replica 1 (41)" in it.error
    assert it.changing == [] and job.replacements.state("d:rollout/1") is None


def test_what_shares_its_devices_is_told(url: str, token: Path, job: FakeJob) -> None:
    for replica in job.manager.replicas:
        replica.mode = "hybrid"
    assert "it shares its devices with the trainer (mode hybrid), and cannot be replaced alone" in (
        replace(url, token, job).error
    )


@pytest.mark.parametrize("sent", ["", "wrong", "s3cre", "s3cret2"])
def test_nobody_without_the_token(url: str, job: FakeJob, sent: str) -> None:
    body = {"replica": 1, "instance": "e1", "within_seconds": 5}
    assert ask(url, token=sent).status == 401
    assert ask(url, "PUT", "/v1/replacements/k", body, token=sent).status == 401
    assert job.replacements.state("k") is None


def test_a_token_that_is_no_secret_or_not_there_is_refused(url: str, token: Path) -> None:
    assert ask(url).status == 200
    token.chmod(0o644)
    assert ask(url).status == 403
    token.chmod(0o600)
    token.write_text("")
    assert ask(url, token="").status == 401
    token.unlink()
    assert ask(url).status == 403


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v1/replacements/", None, 404),
        ("GET", "/v1/replacements/unknown", None, 404),
        ("PUT", "/v1/replicas", {}, 404),
        ("PUT", "/v1/replacements/" + "k" * 300, {}, 404),
        ("PUT", "/v1/replacements/k", b"{", 400),
        ("PUT", "/v1/replacements/k", b"[" * 9000, 400),
        ("PUT", "/v1/replacements/k", b"x" * (BODY_BYTES_MAX + 1), 413),
        ("PUT", "/v1/replacements/k", [], 400),
        ("PUT", "/v1/replacements/k", {"replica": True, "instance": "e1", "within_seconds": 5}, 400),
        ("PUT", "/v1/replacements/k", {"replica": 1, "instance": "e1", "within_seconds": 0}, 400),
        ("PUT", "/v1/replacements/k", {"replica": 1, "instance": "e1"}, 400),
        ("PUT", "/v1/replacements/k", {"replica": 1, "instance": "e0", "within_seconds": 5}, 409),
        ("PUT", "/v1/replacements/k", {"replica": 9, "instance": "e1", "within_seconds": 5}, 404),
        ("POST", "/v1/replicas", {}, 501),
        ("DELETE", "/v1/replacements/k", None, 501),
    ],
)
def test_bad_requests(url: str, job: FakeJob, method: str, path: str, body: object, status: int) -> None:
    answer = ask(url, method, path, body)
    assert answer.status == status
    assert status == 501 or json.loads(answer.body)["error"]
    assert job.replacements.state("k") is None


def connected(url: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE_SECONDS)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


class Trickle(threading.Thread):
    """A client that sends one byte after the other, more often than any timeout of a read, until the server ends it."""

    def __init__(self, url: str, first: bytes = b"") -> None:
        super().__init__(daemon=True)
        self.client, self.stop, self.ended = connected(url), threading.Event(), False
        self.client.sendall(first)
        self.start()

    def run(self) -> None:
        self.client.settimeout(0.02)
        while not self.stop.is_set():
            try:
                self.client.send(b"x")
                self.ended = not self.client.recv(1000)
                if self.ended:
                    return
            except TimeoutError:
                continue
            except OSError:
                self.ended = True
                return

    def close(self) -> None:
        self.stop.set()
        self.join()
        self.client.close()


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET /v1/replicas HTTP/1.1\r\nX: ",
        f"PUT /v1/replacements/k HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9000\r\n\r\n".encode(),
    ],
    ids=["line", "head", "body"],
)
def test_clients_that_send_slowly_hold_no_place_for_long(
    url: str, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(verl_control, "REQUEST_SECONDS", 0.3)
    slow = [Trickle(url, first) for _ in range(REQUESTS_MAX)]
    try:
        eventually(lambda: all(one.ended for one in slow), "the server has ended them")
        assert ask(url).status == 200
    finally:
        for one in slow:
            one.close()


def test_a_large_head_is_cut_off(url: str) -> None:
    """http.server's own limit is for one line, and there may be a hundred of them."""
    line = b"X: " + b"x" * 1000 + b"\r\n"
    head = f"GET /v1/replicas HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    with connected(url) as client:
        with suppress(OSError):  # it is closed while we send
            client.sendall(head + (HEAD_BYTES_MAX // 1000 + 20) * line + b"\r\n")
        answer = b""
        with suppress(ConnectionError):
            while part := client.recv(1000):
                answer += part
    assert b"200" not in answer.partition(b"\r\n")[0]
    assert ask(url).status == 200


def test_what_ray_cannot_tell_is_an_error_of_the_answer(url: str, job: FakeJob) -> None:
    job.cluster.processes = lambda replica: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    answer = ask(url)
    assert answer.status == 500 and "ZeroDivisionError" in json.loads(answer.body)["error"]


def test_without_an_address_nothing_is_served(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert control_of({}) is None and control_of({ADDRESS: " "}) is None and not caplog.records
    assert control_of({ADDRESS: "9479"}) is None and "must name a file with a token" in caplog.text
    for wrong in ("host", "127.0.0.1:x", "127.0.0.1:99999", ":-1"):
        assert control_of({ADDRESS: wrong, TOKEN_FILE: str(token)}) is None
    it = control_of({ADDRESS: "9479", TOKEN_FILE: str(token)})
    assert it is not None and (it.host, it.port) == ("127.0.0.1", 9479)
    it = control_of({ADDRESS: "[::1]:1", TOKEN_FILE: str(token)})
    assert it is not None and (it.host, it.port) == ("::1", 1)


def test_without_an_address_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_engines, "AfterImport", lambda acts: pytest.fail("touched"))
    verl_engines.install({})
    verl_engines.install({ADDRESS: "nonsense"})


def test_an_address_in_use_is_said_and_the_job_goes_on(
    job: FakeJob, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        control = Control("127.0.0.1", taken.getsockname()[1], token)
        control.serve(job.replacements)
    assert control.server is None and "takes no orders at 127.0.0.1" in caplog.text
