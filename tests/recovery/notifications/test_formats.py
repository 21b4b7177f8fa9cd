"""Each format as its service documents it: method, address, headers and body, for an alert and for its end."""

import json
from typing import Any
from urllib.parse import unquote

import pytest

from rolecall.core.config.job import NotifyFormat
from rolecall.recovery.interfaces import Message
from rolecall.recovery.notifications.formats import (
    OPSGENIE_MESSAGE_CHARS_MAX,
    PAGERDUTY_SUMMARY_CHARS_MAX,
    Target,
    alert_key,
    calls_for,
    heartbeat,
    severity,
)

F = NotifyFormat
AT, AT_ISO = 1_700_000_000.0, "2023-11-14T22:13:20+00:00"


def _message(**more: Any) -> Message:
    fixed = {"seq": 7, "kind": "oncall_paged", "run_id": "run-1", "incident_id": "inc-1-trainer-1", "wall_at": AT}
    facts = {"topic": "mode"}
    return Message(**{**fixed, "because": "trainer/1 <is> hung", "facts": facts, **more})


def _end(**more: Any) -> Message:
    return _message(kind="incident_closed", resolved=True, because="it works", facts={"outcome": "ended"}, **more)


def _sent(form: NotifyFormat, message: Message, url: str = "https://x.example/y", secret: str = "k3y") -> Any:
    call, *_ = calls_for(Target(format=form, url=url, secret=secret), message)
    assert call.method == "POST" and call.headers["Content-Type"] == "application/json"
    return json.loads(call.body)


def test_pagerduty_triggers_and_resolves_one_alert_per_incident() -> None:
    assert _sent(F.PAGERDUTY, _message()) == {
        "routing_key": "k3y",
        "event_action": "trigger",
        "dedup_key": "run-1:inc-1-trainer-1",
        "client": "rolecall",
        "payload": {
            "summary": "rolecall run-1 inc-1-trainer-1: trainer/1 <is> hung",
            "source": "run-1",
            "severity": "critical",
            "timestamp": AT_ISO,
            "group": "run-1",
            "class": "oncall_paged",
            "custom_details": {"because": "trainer/1 <is> hung", "incident": "inc-1-trainer-1", "topic": "mode"},
        },
    }
    assert _sent(F.PAGERDUTY, _end()) == {
        "routing_key": "k3y",
        "event_action": "resolve",
        "dedup_key": "run-1:inc-1-trainer-1",
    }
    long = _sent(F.PAGERDUTY, _message(because="x" * 2000))
    assert len(long["payload"]["summary"]) == PAGERDUTY_SUMMARY_CHARS_MAX
    (call,) = calls_for(Target(format=F.PAGERDUTY, url="u", secret="k3y"), _message())
    assert "Authorization" not in call.headers


def test_opsgenie_creates_and_closes_by_alias() -> None:
    there = Target(format=F.OPSGENIE, url="https://api.opsgenie.com/v2/alerts", secret="k3y")
    (created,), (closed, _) = calls_for(there, _message()), calls_for(there, _end())
    assert created.url == "https://api.opsgenie.com/v2/alerts"
    assert created.headers["Authorization"] == closed.headers["Authorization"] == "GenieKey k3y"
    assert json.loads(created.body) == {
        "message": "rolecall run-1 inc-1-trainer-1: trainer/1 <is> hung",
        "alias": "run-1:inc-1-trainer-1",
        "description": "trainer/1 <is> hung",
        "priority": "P1",
        "source": "rolecall",
        "entity": "run-1",
        "tags": ["rolecall", "oncall_paged"],
        "details": {"incident": "inc-1-trainer-1", "topic": "mode"},
    }
    assert closed.url == ("https://api.opsgenie.com/v2/alerts/run-1%3Ainc-1-trainer-1/close?identifierType=alias")
    assert json.loads(closed.body) == {"source": "rolecall", "note": "it works"}
    assert len(_sent(F.OPSGENIE, _message(because="x" * 2000))["message"]) == OPSGENIE_MESSAGE_CHARS_MAX


def test_slack_gets_text_that_cannot_be_markup() -> None:
    text = ":rotating_light: critical: *rolecall run-1 inc-1-trainer-1*\ntrainer/1 &lt;is&gt; hung\ntopic: mode"
    assert _sent(F.SLACK, _message()) == {"text": text}
    assert _sent(F.SLACK, _message(because="<!channel> & co"))["text"].splitlines()[1] == "&lt;!channel&gt; &amp; co"
    assert _sent(F.SLACK, _end())["text"].startswith(":white_check_mark: resolved: *rolecall run-1 inc-1-trainer-1*")


def test_a_secret_of_a_webhook_is_a_bearer_token() -> None:
    for form in (F.WEBHOOK, F.ALERTMANAGER):
        (call,) = calls_for(Target(format=form, url="https://x.example/y", secret="k3y"), _message())
        assert call.headers["Authorization"] == "Bearer k3y" and b"k3y" not in call.body
        (call,) = calls_for(Target(format=form, url="https://x.example/y"), _message())
        assert "Authorization" not in call.headers


@pytest.mark.parametrize(
    ("message", "key", "severe"),
    [
        (_message(), "run-1:inc-1-trainer-1", "critical"),
        (_end(), "run-1:inc-1-trainer-1", "critical"),
        (_message(kind="plan_proposed"), "run-1:inc-1-trainer-1:plan", "warning"),
        (_message(kind="plan_expired", resolved=True), "run-1:inc-1-trainer-1:plan", "warning"),
        (_message(incident_id="", facts={"topic": "watch"}), "run-1:watch:e7", "critical"),
        (_message(incident_id="", facts={"topic": "watch"}, seq=8), "run-1:watch:e8", "critical"),
        (_message(incident_id="", facts={"topic": "full_disk"}, seq=0), "run-1:full_disk:1700000000", "critical"),
        (_message(kind="test", incident_id="test-1"), "run-1:test-1", "info"),
    ],
)
def test_an_incident_has_an_alert_for_pages_and_one_for_proposals_and_a_page_without_an_incident_one_of_its_own(
    message: Message, key: str, severe: str
) -> None:
    assert (alert_key(message), severity(message)) == (key, severe)


def test_the_end_of_an_incident_resolves_the_alert_of_its_pages_and_that_of_its_proposals() -> None:
    def bodies(form: NotifyFormat) -> list[Any]:
        return [json.loads(c.body) for c in calls_for(Target(format=form, url="https://x.example", secret="k"), _end())]

    keys = ["run-1:inc-1-trainer-1", "run-1:inc-1-trainer-1:plan"]
    assert [(b["event_action"], b["dedup_key"]) for b in bodies(F.PAGERDUTY)] == [("resolve", key) for key in keys]
    opsgenie = calls_for(Target(format=F.OPSGENIE, url="https://x.example", secret="k"), _end())
    assert [unquote(c.url).split("/")[3] for c in opsgenie] == keys
    closed = [alert for body in bodies(F.ALERTMANAGER) for alert in body]
    fired = _sent(F.ALERTMANAGER, _message()) + _sent(F.ALERTMANAGER, _message(kind="plan_proposed"))
    assert [a["labels"] for a in closed] == [a["labels"] for a in fired]
    assert fired[0]["labels"] != fired[1]["labels"] and {a["endsAt"] for a in closed} == {AT_ISO}
    assert [len(bodies(form)) for form in (F.SLACK, F.WEBHOOK)] == [1, 1]


@pytest.mark.parametrize("kind", ["plan_approved", "plan_rejected", "plan_expired"])
def test_a_proposal_that_no_longer_waits_resolves_its_own_alert_and_is_no_message_elsewhere(kind: str) -> None:
    ended = _message(kind=kind, resolved=True, because="plan approved by anna")
    calls = {
        form: calls_for(Target(format=form, url="https://x.example", secret="k"), ended) for form in F if form != F.AUTO
    }
    assert {form: len(sent) for form, sent in calls.items()} == {
        F.WEBHOOK: 0, F.SLACK: 0, F.PAGERDUTY: 1, F.OPSGENIE: 1, F.ALERTMANAGER: 1
    }  # fmt: skip
    body = json.loads(calls[F.PAGERDUTY][0].body)
    assert (body["event_action"], body["dedup_key"]) == ("resolve", "run-1:inc-1-trainer-1:plan")
    assert ":plan/close" in unquote(calls[F.OPSGENIE][0].url)
    (alert,) = json.loads(calls[F.ALERTMANAGER][0].body)
    assert alert["labels"] == _sent(F.ALERTMANAGER, _message(kind="plan_proposed"))[0]["labels"]
    assert alert["endsAt"] == AT_ISO


def test_alertmanager_tells_pages_without_an_incident_apart() -> None:
    def labels(**more: Any) -> Any:
        return _sent(F.ALERTMANAGER, _message(**more))[0]["labels"]

    assert labels(incident_id="") != labels(incident_id="", seq=8)
    assert labels(incident_id="") == labels(incident_id=""), "a retry"
    assert labels() == labels(seq=8), "one incident"


@pytest.mark.parametrize("form", [f for f in F if f is not F.AUTO])
def test_a_test_message_is_marked(form: NotifyFormat) -> None:
    sent = json.dumps(_sent(form, _message(kind="test", because="test message of rolecall", facts={})))
    assert "test message of rolecall" in sent and "critical" not in sent


@pytest.mark.parametrize(
    ("form", "url", "shown"),
    [
        (F.SLACK, "https://hooks.slack.com/services/T0/B0/s3cret", "https://hooks.slack.com/***"),
        (F.WEBHOOK, "https://u:s3cret@x.example:8443/s3cret?key=s3cret#s3cret", "https://x.example:8443/***"),
        (F.WEBHOOK, "http://x.example", "http://x.example"),
        (F.OPSGENIE, "https://api.opsgenie.com/v2/alerts", "https://api.opsgenie.com/v2/alerts"),
        (F.ALERTMANAGER, "http://u:s3cret@am:9093/api/v2/alerts?s3cret", "http://am:9093/api/v2/alerts"),
    ],
)
def test_a_shown_address_has_no_secret(form: NotifyFormat, url: str, shown: str) -> None:
    assert Target(format=form, url=url, secret="k3y").shown == shown


def test_only_machines_get_heartbeats() -> None:
    def beat(form: NotifyFormat) -> Any:
        return heartbeat(Target(format=form, url="https://x.example/y"), "run-1", {"mode": "act"}, AT, 60.0)

    assert json.loads(beat(F.WEBHOOK).body) == {"kind": "watch_alive", "run": "run-1", "at": AT, "mode": "act"}
    (alert,) = json.loads(beat(F.ALERTMANAGER).body)
    assert (alert["startsAt"], alert["endsAt"]) == (AT_ISO, "2023-11-14T22:16:20+00:00")
    assert [beat(f) for f in (F.SLACK, F.PAGERDUTY, F.OPSGENIE)] == [None, None, None]
