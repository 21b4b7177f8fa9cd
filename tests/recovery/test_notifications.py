"""The webhook against a server of the standard library: delivered, retried, bounded, never redirected, never
blocking."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rolecall.core.errors import ConfigError
from rolecall.recovery.interfaces import Message
from rolecall.recovery.notifications import LogNotifier, WebhookNotifier
from tests.support import PATIENCE_SECONDS, eventually


class Hook:
    """A server that answers with what it is told to, and remembers what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        self.answers: list[int] = []  # status of the next answers; 200 when empty
        self.location = ""
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append((self.path, json.loads(body)))
                status = hook.answers.pop(0) if hook.answers else 200
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", hook.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


def message(seq: int = 7, **more: Any) -> Message:
    fixed = {"kind": "oncall_paged", "run_id": "run-1", "because": "the limit is 6", "wall_at": 1_700_000_000.0}
    return Message(seq=seq, **{**fixed, **more})


def test_a_message_has_an_id_for_deduplication(hook: Hook) -> None:
    notifier = WebhookNotifier(f"{hook.url}/hook?key=secret", run_id="run-1")
    assert notifier.channel == "webhook"
    assert notifier.offer(message(incident_id="inc-1-rollout-1", facts={"topic": "evictions"}))
    eventually(lambda: notifier.settled_seq == 7, "delivered")
    (path, body), *more = hook.got
    assert more == [] and path == "/hook?key=secret"
    assert body == {
        "id": "run-1:e7",
        "kind": "oncall_paged",
        "run": "run-1",
        "incident": "inc-1-rollout-1",
        "because": "the limit is 6",
        "at": 1_700_000_000.0,
        "resolved": False,
        "topic": "evictions",
    }
    notifier.close(PATIENCE_SECONDS)


def test_a_failed_try_is_repeated_and_order_is_kept(hook: Hook) -> None:
    hook.answers = [500, 503]
    notifier = WebhookNotifier(hook.url, run_id="run-1", pause_seconds=0.01)
    notifier.offer(message(1))
    notifier.offer(message(2))
    eventually(lambda: notifier.settled_seq == 2, "delivered")
    assert [body["id"] for _, body in hook.got] == ["run-1:e1", "run-1:e1", "run-1:e1", "run-1:e2"]
    assert notifier.num_failed == 0
    notifier.close(PATIENCE_SECONDS)


def test_tries_are_bounded(hook: Hook) -> None:
    hook.answers = [500] * 3
    notifier = WebhookNotifier(hook.url, run_id="run-1", pause_seconds=0.01, tries_max=3)
    notifier.offer(message(1))
    notifier.offer(message(2))
    eventually(lambda: notifier.settled_seq == 2, "given up, and on to the next")
    assert notifier.num_failed == 1 and len(hook.got) == 4
    notifier.close(PATIENCE_SECONDS)


def test_a_redirect_is_not_followed(hook: Hook) -> None:
    other = Hook()
    try:
        hook.answers, hook.location = [307, 302], f"{other.url}/elsewhere"
        notifier = WebhookNotifier(hook.url, run_id="run-1", pause_seconds=0.01, tries_max=2)
        notifier.offer(message())
        eventually(lambda: notifier.num_failed == 1, "given up")
        assert len(hook.got) == 2 and other.got == []
        notifier.close(PATIENCE_SECONDS)
    finally:
        other.close()


def test_a_server_that_never_answers_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        patient = WebhookNotifier(url, run_id="run-1", try_seconds=PATIENCE_SECONDS)
        for seq in range(1, 101):
            patient.offer(message(seq))
            patient.heartbeat({})
        assert (patient.settled_seq, patient.num_failed) == (0, 0), "all were offered while the first was being tried"
        patient.close(0.0)
        hasty = WebhookNotifier(url, run_id="run-1", try_seconds=0.2, pause_seconds=0.01, tries_max=2)
        hasty.offer(message(1))
        eventually(lambda: hasty.num_failed == 1, "the message is given up")
        hasty.close(0.0)


def test_a_server_that_drips_is_cut_off() -> None:
    """Each byte starts the socket's own timeout anew."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                while not done.wait(0.02):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        notifier = WebhookNotifier(url, run_id="run-1", try_seconds=0.3, tries_max=1)
        notifier.offer(message())
        eventually(lambda: notifier.num_failed == 1, "cut off")
        done.set()
        thread.join()
        notifier.close(PATIENCE_SECONDS)


def test_the_dead_man_signal(hook: Hook) -> None:
    notifier = WebhookNotifier(hook.url, run_id="run-1")
    notifier.heartbeat({"mode": "act", "open_incidents": 2})
    eventually(lambda: hook.got, "a heartbeat")
    body = hook.got[0][1]
    assert (body["kind"], body["run"], body["mode"], body["open_incidents"]) == ("watch_alive", "run-1", "act", 2)
    notifier.close(PATIENCE_SECONDS)


def test_alertmanager_gets_alerts_that_it_can_resolve(hook: Hook) -> None:
    notifier = WebhookNotifier(f"{hook.url}/am/api/v2/alerts", run_id="run-1", deadman_seconds=60.0)
    assert notifier.channel == "alertmanager"
    notifier.offer(message(1, incident_id="inc-1-rollout-1"))
    notifier.offer(message(2, incident_id="inc-1-rollout-1", kind="incident_closed", resolved=True))
    notifier.heartbeat({})
    eventually(lambda: len(hook.got) == 3, "delivered")
    (firing,), (resolved,), (alive,) = (body for _, body in hook.got)
    assert firing["labels"] == resolved["labels"]
    assert firing["labels"]["incident"] == "inc-1-rollout-1"
    assert firing["annotations"]["summary"] == "the limit is 6"
    assert firing["startsAt"] == "2023-11-14T22:13:20+00:00"
    assert resolved["endsAt"] == "2023-11-14T22:13:20+00:00" < firing["endsAt"]
    assert alive["labels"]["alertname"] == "RolecallWatchAlive" and alive["startsAt"] < alive["endsAt"]
    notifier.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("url", ["ftp://host/x", "http:///x", "hooks.example.org"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="webhook_url"):
        WebhookNotifier(url, run_id="run-1")


def test_without_a_webhook_calls_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notifier = LogNotifier()
    notifier.offer(message(3))
    notifier.heartbeat({})
    notifier.close(1)
    assert notifier.settled_seq == 3 and "oncall_paged: the limit is 6" in caplog.text
