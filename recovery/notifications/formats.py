"""Formats of notification services: a message in, HTTP requests out. Pure; `delivery` sends them.

    webhook        POST of one JSON object, identified by `kind` and `id`
    alertmanager   Alertmanager v2: https://github.com/prometheus/alertmanager/blob/main/api/v2/openapi.yaml
    slack          incoming webhook: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
    pagerduty      Events API v2: https://developer.pagerduty.com/docs/send-alert-event
    opsgenie       Alert API: https://docs.opsgenie.com/docs/alert-api

PagerDuty, Opsgenie and Alertmanager keep an alert for the pages of an incident and one for its plans that wait for
approval (`alert_key`): a page that joined an alert of lower severity would wake nobody. The close of the incident
resolves both; so does the end of a proposal its own, or the next proposal would join it. Each page without an incident
has an alert of its own. Slack keeps no state: it gets a message for each.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from rolecall.core.config.job import NotifyFormat
from rolecall.core.journal.events import EventKind
from rolecall.recovery.interfaces import Message
from rolecall.recovery.projection import PROPOSAL_ENDS

TEST = "test"
"""`Message.kind` of a test message, which is no event of a journal."""
FIRING_SECONDS = 86_400.0
"""How long Alertmanager shows an alert that is not resolved."""
HEARTBEATS_MISSED_MAX = 3
"""Alertmanager drops the heartbeat alert after this many intervals without a new one."""
PAGERDUTY_SUMMARY_CHARS_MAX = 1024
OPSGENIE_MESSAGE_CHARS_MAX = 130
ISSUED_PATHS = frozenset({NotifyFormat.SLACK, NotifyFormat.WEBHOOK})
"""Formats of services that issue URLs whose path is the secret."""
_OF_PROPOSALS: frozenset[str] = PROPOSAL_ENDS | {EventKind.PLAN_PROPOSED}
_WITH_ALERTS = frozenset({NotifyFormat.PAGERDUTY, NotifyFormat.OPSGENIE, NotifyFormat.ALERTMANAGER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where notifications go. Neither `url` nor `secret` may be logged: use `shown`."""

    format: NotifyFormat  # never `auto`
    url: str = field(repr=False)
    secret: str = field(default="", repr=False)  # routing key, API key, or bearer token

    @property
    def shown(self) -> str:
        """The address without what may be a secret: users, queries, and paths that services issue."""
        return shown_url(self.url, self.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    method: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def shown_url(url: str, form: NotifyFormat) -> str:
    """See `Target.shown`."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    issued = form in ISSUED_PATHS and parts.path not in ("", "/")
    return f"{parts.scheme}://{parts.hostname}{port}{'/***' if issued else parts.path}"


def calls_for(target: Target, message: Message) -> list[HttpCall]:
    """The requests that deliver `message`."""
    messages = [message]
    if target.format in _WITH_ALERTS:
        if message.kind == EventKind.INCIDENT_CLOSED:
            messages.append(replace(message, kind=str(EventKind.PLAN_PROPOSED)))
    elif message.kind in PROPOSAL_ENDS:
        return []
    return [_CALLS[target.format](target, each) for each in messages]


def heartbeat(
    target: Target, run_id: str, facts: Mapping[str, Any], now: float, interval_seconds: float
) -> HttpCall | None:
    """The request that tells that the watch is alive; None: people read this target, and a heartbeat is for machines.
    `now`: wall seconds."""
    if target.format is NotifyFormat.WEBHOOK:
        return _post(target, {"kind": "watch_alive", "run": run_id, "at": now, **facts})
    if target.format is not NotifyFormat.ALERTMANAGER:
        return None
    alert = {
        "labels": {"alertname": "RolecallWatchAlive", "run": run_id, "severity": "none"},
        "annotations": {"summary": "rolecall watch is alive; this alert must always fire"},
        "startsAt": _iso(now),
        "endsAt": _iso(now + HEARTBEATS_MISSED_MAX * interval_seconds),
    }
    return _post(target, [alert])


def alert_key(message: Message) -> str:
    """The same for all pages of one incident of a run, and for all its proposals, so that a service keeps one alert of
    each. A page without an incident has a key of its own: nothing resolves its alert, and a service would take the next
    page as a repetition.
    """
    if message.incident_id:
        key = f"{message.run_id}:{message.incident_id}"
        return f"{key}:plan" if message.kind in _OF_PROPOSALS else key
    # A page that the journal could not take has no position there.
    page = f"e{message.seq}" if message.seq else f"{message.wall_at:.0f}"
    return f"{message.run_id}:{message.facts.get('topic') or message.kind}:{page}"


def severity(message: Message) -> str:
    """As PagerDuty names it. A plan that waits for an approval is no failure of recovery."""
    if message.kind == TEST:
        return "info"
    return "warning" if message.kind in _OF_PROPOSALS else "critical"


def _webhook(target: Target, message: Message) -> HttpCall:
    value = {
        "id": _event_id(message),
        "kind": message.kind,
        "run": message.run_id,
        "incident": message.incident_id,
        "because": message.because,
        "at": message.wall_at,
        "resolved": message.resolved,
        **message.facts,
    }
    return _post(target, value)


def _alertmanager(target: Target, message: Message) -> HttpCall:
    # Labels identify an alert: firing and resolved must carry the same ones. Without an end Alertmanager would resolve
    # it after minutes, because it expects clients to repeat their alerts.
    ends_at = message.wall_at if message.resolved else message.wall_at + FIRING_SECONDS
    alert = {
        "labels": {
            "alertname": "RolecallTest" if message.kind == TEST else "RolecallIncident",
            "run": message.run_id,
            "incident": message.incident_id,
            "severity": severity(message),
            **({} if message.incident_id else {"page": alert_key(message)}),
        },
        "annotations": {"summary": message.because, "kind": message.kind, "id": _event_id(message)},
        "startsAt": _iso(message.wall_at),
        "endsAt": _iso(ends_at),
    }
    return _post(target, [alert])


def _slack(target: Target, message: Message) -> HttpCall:
    mark = ":white_check_mark: resolved" if message.resolved else f":rotating_light: {severity(message)}"
    lines = [f"{mark}: *{_title(message)}*", message.because, *(f"{k}: {v}" for k, v in message.facts.items())]
    text = "\n".join(lines)
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # Slack reads no other character as markup
        text = text.replace(plain, escaped)
    return _post(target, {"text": text})


def _pagerduty(target: Target, message: Message) -> HttpCall:
    event: dict[str, Any] = {"routing_key": target.secret, "dedup_key": alert_key(message)}
    if message.resolved:
        return _post(target, {**event, "event_action": "resolve"})
    event |= {
        "event_action": "trigger",
        "client": "rolecall",
        "payload": {
            "summary": f"{_title(message)}: {message.because}"[:PAGERDUTY_SUMMARY_CHARS_MAX],
            "source": message.run_id,
            "severity": severity(message),
            "timestamp": _iso(message.wall_at),
            "group": message.run_id,
            "class": message.kind,
            "custom_details": {"because": message.because, "incident": message.incident_id, **message.facts},
        },
    }
    return _post(target, event)


def _opsgenie(target: Target, message: Message) -> HttpCall:
    alias = alert_key(message)
    if message.resolved:
        url = f"{target.url.rstrip('/')}/{quote(alias, safe='')}/close?identifierType=alias"
        return _post(target, {"source": "rolecall", "note": message.because}, url)
    alert = {
        "message": f"{_title(message)}: {message.because}"[:OPSGENIE_MESSAGE_CHARS_MAX],
        "alias": alias,
        "description": message.because,
        "priority": {"critical": "P1", "warning": "P3"}.get(severity(message), "P5"),
        "source": "rolecall",
        "entity": message.run_id,
        "tags": ["rolecall", message.kind],
        "details": {"incident": message.incident_id, **{k: str(v) for k, v in message.facts.items()}},
    }
    return _post(target, alert)


_CALLS: Mapping[NotifyFormat, Callable[[Target, Message], HttpCall]] = {
    NotifyFormat.WEBHOOK: _webhook,
    NotifyFormat.SLACK: _slack,
    NotifyFormat.PAGERDUTY: _pagerduty,
    NotifyFormat.OPSGENIE: _opsgenie,
    NotifyFormat.ALERTMANAGER: _alertmanager,
}


def _post(target: Target, value: Any, url: str = "") -> HttpCall:
    headers = {"Content-Type": "application/json"}
    if target.format is NotifyFormat.OPSGENIE:
        headers["Authorization"] = f"GenieKey {target.secret}"
    elif target.secret and target.format in (NotifyFormat.WEBHOOK, NotifyFormat.ALERTMANAGER):
        headers["Authorization"] = f"Bearer {target.secret}"
    return HttpCall(method="POST", url=url or target.url, headers=headers, body=json.dumps(value).encode())


def _title(message: Message) -> str:
    return " ".join(filter(None, ("rolecall", message.run_id, message.incident_id)))


def _event_id(message: Message) -> str:
    return f"{message.run_id}:e{message.seq}"


def _iso(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat()
