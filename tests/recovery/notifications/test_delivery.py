"""Delivery to a server of the standard library: retried, bounded, never redirected, never blocking."""

import logging
import socket
import threading
from typing import Any

import pytest

from rolecall.core.config.job import NotifyFormat
from rolecall.core.http import HttpAnswer
from rolecall.recovery.interfaces import Message
from rolecall.recovery.notifications import delivery
from rolecall.recovery.notifications.delivery import HttpNotifier, LogNotifier
from rolecall.recovery.notifications.formats import Target, calls_for
from tests.recovery.notifications.service import Service, serving
from tests.support import PATIENCE_SECONDS, eventually


def target(url: str, form: NotifyFormat = NotifyFormat.WEBHOOK, secret: str = "") -> Target:
    return Target(format=form, url=url, secret=secret)


def message(seq: int = 7, **more: Any) -> Message:
    fixed = {"kind": "oncall_paged", "run_id": "run-1", "because": "the limit is 6", "wall_at": 1_700_000_000.0}
    return Message(seq=seq, **{**fixed, **more})


def test_a_message_has_an_id_for_deduplication(service: Service) -> None:
    notifier = HttpNotifier(target(f"{service.url}/hook?key=secret"), run_id="run-1")
    assert notifier.channel == "webhook"
    assert notifier.offer(message(incident_id="inc-1-rollout-1", facts={"topic": "evictions"}))
    eventually(lambda: notifier.settled_seq == 7, "delivered")
    (got,) = service.got
    assert (got.method, got.path) == ("POST", "/hook?key=secret")
    assert got.body == {
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


def test_a_failed_try_is_repeated_and_order_is_kept(service: Service) -> None:
    service.answers = [(500, ""), (503, "")]
    notifier = HttpNotifier(target(service.url), run_id="run-1", pause_seconds=0.01)
    notifier.offer(message(1))
    notifier.offer(message(2))
    eventually(lambda: notifier.settled_seq == 2, "delivered")
    assert [got.body["id"] for got in service.got] == ["run-1:e1", "run-1:e1", "run-1:e1", "run-1:e2"]
    assert notifier.num_failed == 0
    notifier.close(PATIENCE_SECONDS)


def test_tries_are_bounded(service: Service) -> None:
    service.answers = [(500, "")] * 3
    notifier = HttpNotifier(target(service.url), run_id="run-1", pause_seconds=0.01, tries_max=3)
    notifier.offer(message(1))
    notifier.offer(message(2))
    eventually(lambda: notifier.settled_seq == 2, "given up, and on to the next")
    assert notifier.num_failed == 1 and len(service.got) == 4
    notifier.close(PATIENCE_SECONDS)


def test_a_failure_that_nobody_expects_is_a_failed_try(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_once(*args: Any, **named: Any) -> HttpAnswer:
        monkeypatch.undo()
        raise MemoryError(f"of {args}")

    monkeypatch.setattr(delivery, "request", fails_once)
    notifier = HttpNotifier(target(f"{service.url}/hook?key=secret"), run_id="run-1", pause_seconds=0.01)
    notifier.offer(message(1))
    eventually(lambda: notifier.settled_seq == 1, "delivered")
    assert len(service.got) == 1 and notifier.num_failed == 0
    assert "MemoryError" in caplog.text and "secret" not in caplog.text
    notifier.close(PATIENCE_SECONDS)


def test_a_redirect_is_not_followed(service: Service) -> None:
    with serving() as other:
        service.answers, service.location = [(307, ""), (302, "")], f"{other.url}/elsewhere"
        notifier = HttpNotifier(target(service.url), run_id="run-1", pause_seconds=0.01, tries_max=2)
        notifier.offer(message())
        eventually(lambda: notifier.num_failed == 1, "given up")
        assert len(service.got) == 2 and other.got == []
        notifier.close(PATIENCE_SECONDS)


def test_a_server_that_never_answers_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        patient = HttpNotifier(target(url), run_id="run-1", try_seconds=PATIENCE_SECONDS)
        for seq in range(1, 101):
            patient.offer(message(seq))
            patient.heartbeat({})
        assert (patient.settled_seq, patient.num_failed) == (0, 0), "all were offered while the first was being tried"
        patient.close(0.0)
        hasty = HttpNotifier(target(url), run_id="run-1", try_seconds=0.2, pause_seconds=0.01, tries_max=2)
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
        notifier = HttpNotifier(target(url), run_id="run-1", try_seconds=0.3, tries_max=1)
        notifier.offer(message())
        eventually(lambda: notifier.num_failed == 1, "cut off")
        done.set()
        thread.join()
        notifier.close(PATIENCE_SECONDS)


def test_the_dead_man_signal(service: Service) -> None:
    notifier = HttpNotifier(target(service.url), run_id="run-1")
    notifier.heartbeat({"mode": "act", "open_incidents": 2})
    eventually(lambda: service.got, "a heartbeat")
    body = service.got[0].body
    assert (body["kind"], body["run"], body["mode"], body["open_incidents"]) == ("watch_alive", "run-1", "act", 2)
    notifier.close(PATIENCE_SECONDS)


def test_alertmanager_gets_alerts_that_it_can_resolve(service: Service) -> None:
    notifier = HttpNotifier(
        target(f"{service.url}/am/api/v2/alerts", NotifyFormat.ALERTMANAGER), run_id="run-1", deadman_seconds=60.0
    )
    assert notifier.channel == "alertmanager"
    notifier.offer(message(1, incident_id="inc-1-rollout-1"))
    notifier.offer(message(2, incident_id="inc-1-rollout-1", kind="incident_closed", resolved=True))
    notifier.heartbeat({})
    eventually(lambda: len(service.got) == 4, "delivered")
    (firing,), (resolved,), _, (alive,) = (got.body for got in service.got)
    assert firing["labels"] == resolved["labels"]
    assert firing["labels"]["incident"] == "inc-1-rollout-1"
    assert firing["annotations"]["summary"] == "the limit is 6"
    assert firing["startsAt"] == "2023-11-14T22:13:20+00:00"
    assert resolved["endsAt"] == "2023-11-14T22:13:20+00:00" < firing["endsAt"]
    assert alive["labels"]["alertname"] == "RolecallWatchAlive" and alive["startsAt"] < alive["endsAt"]
    notifier.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("form", [NotifyFormat.SLACK, NotifyFormat.PAGERDUTY, NotifyFormat.OPSGENIE])
def test_people_get_no_heartbeat(service: Service, form: NotifyFormat) -> None:
    notifier = HttpNotifier(target(service.url, form, "s3cret"), run_id="run-1")
    notifier.heartbeat({})
    notifier.offer(message(1))
    eventually(lambda: notifier.settled_seq == 1, "delivered")
    assert len(service.got) == 1 and "watch_alive" not in str(service.got)
    notifier.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("status", [200, 403, 500])
def test_neither_url_nor_secret_is_logged(service: Service, caplog: pytest.LogCaptureFixture, status: int) -> None:
    caplog.set_level(logging.DEBUG)
    service.answers = [(status, "")] * 2
    there = target(f"{service.url}/services/T0/s3cret-path", NotifyFormat.OPSGENIE, "s3cret-key")
    notifier = HttpNotifier(there, run_id="run-1", pause_seconds=0.01, tries_max=2)
    notifier.offer(message(1))
    eventually(lambda: notifier.settled_seq == 1, "delivered or given up")
    notifier.close(PATIENCE_SECONDS)
    assert "s3cret" not in repr(there) and "s3cret" not in repr(calls_for(there, message(1)))
    ours = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert not [text for text in ours if "s3cret" in text]
    assert any(f"opsgenie was answered with {status}" in text for text in ours) is (status != 200)


def test_without_a_webhook_calls_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notifier = LogNotifier()
    notifier.offer(message(3))
    notifier.heartbeat({})
    notifier.close(1)
    assert (
        notifier.settled_seq == 3
        and "page not sent: no notification channel is configured; the limit is 6" in caplog.text
    )
