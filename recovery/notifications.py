"""Paging on-call. The journal is the outbox; messages are JSON over HTTP, sent from a separate thread, so that a
webhook that hangs never delays recovery.

Pages, proposals and the resolution of incidents that were paged go to the notifier in journal order. The journal flag
`notified` holds the position delivered so far, so the next watch continues there: at least once, never blocking.

Each message has a few tries with growing pauses, and a deadline per try. Redirects are not followed: a message may
contain machine names. A URL that ends with `/api/v2/alerts` gets the Alertmanager v2 format; any other gets one JSON
object per message, identified by `kind` and `id`. Heartbeats go to the same URL.
"""

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ConfigError
from rolecall.core.http import HttpFailed, request
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.recovery.incidents import Incident, IncidentOutcome, IncidentProjection
from rolecall.recovery.interfaces import Message, Notifier

logger = logging.getLogger(__name__)

ALERTMANAGER_PATH = "/api/v2/alerts"
TRY_SECONDS = 5.0
"""Deadline of one try, from connecting to the last byte of the response header."""
TRIES_MAX = 4
PAUSE_SECONDS = 1.0
"""Pause after the first failed try; doubled after each further one."""
QUEUE_MAX = 1000
"""Messages kept while the receiver does not answer; the loop offers further ones again."""
FIRING_SECONDS = 86_400.0
"""How long Alertmanager shows an alert that is not resolved."""
HEARTBEATS_MISSED_MAX = 3
"""Alertmanager drops the heartbeat alert after this many intervals without a new one."""

NOTIFIED_FLAG = "notified"
RESOLVING_OUTCOMES = (IncidentOutcome.RESOLVED, IncidentOutcome.OBSERVED, IncidentOutcome.SELF_RECOVERED)
"""Outcomes that resolve an alert; after `escalated` and `tolerated` the fault continues."""
SHOWN_CHARS_MAX = 2000
"""Of one text: an exception's message may be a whole file."""
_FACTS = ("outcome", "topic", "expires_at", "digest")


def notification_text(text: object) -> str:
    """Text as one printable line: it may quote an exception's message or an external name, which must neither control a
    terminal nor imitate a line of rolecall."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))
    return line if len(line) <= SHOWN_CHARS_MAX else line[: SHOWN_CHARS_MAX - 1] + "…"


class NotificationSender:
    """Owned by one watch; `adopt` when it acquires the lease."""

    def __init__(self, notifier: Notifier, clock: Clock, *, run_id: str, deadman_seconds: float) -> None:
        self._notifier, self._clock = notifier, clock
        self._run_id, self._deadman_seconds = run_id, deadman_seconds
        self._offered_seq = 0
        self._notified_seq = 0
        self._heartbeat_at = 0.0

    def adopt(self, journal: Journal) -> None:
        """Continues after the last delivered event."""
        self._offered_seq = self._notified_seq = int(journal.flag(NOTIFIED_FLAG) or 0)

    def send(self, journal: Journal, projection: IncidentProjection) -> None:
        """Offers new events to the notifier and records what was delivered."""
        for event in projection.to_notify:
            if event.seq <= self._offered_seq:
                continue
            notification = message(event, projection.incidents.get(event.incident_id or ""), self._run_id)
            if notification is not None and not self._notifier.offer(notification):
                break
            self._offered_seq = event.seq
        settled = min(self._notifier.settled_seq, self._offered_seq)
        if settled > self._notified_seq:
            journal.set_flag(NOTIFIED_FLAG, str(settled))
            self._notified_seq = settled

    def heartbeat(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Sends a heartbeat when it is due."""
        now = self._clock.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._deadman_seconds
            self._notifier.heartbeat(facts())


def message(event: Event, incident: Incident | None, run_id: str) -> Message | None:
    """The notification for an event; None if it needs none."""
    closed = event.kind is EventKind.INCIDENT_CLOSED
    if closed:
        if incident is None or incident.outcome not in RESOLVING_OUTCOMES:
            return None
        if not incident.page_topics and all(a.expires_at is None for a in incident.attempts):
            return None  # nothing was sent that this could resolve
    body = event.payload.to_body()
    facts: dict[str, Any] = {k: body[k] for k in _FACTS if k in body}
    return Message(
        seq=event.seq,
        kind=str(event.kind),
        run_id=run_id,
        incident_id=event.incident_id or "",
        because=notification_text(event.payload.reason),
        wall_at=event.wall_at,
        resolved=closed,
        facts=facts,
    )


class LogNotifier:
    """Used where no webhook is set: pages go to the log."""

    channel = "log"

    def __init__(self) -> None:
        self.settled_seq = 0

    def offer(self, message: Message) -> bool:
        logger.warning("%s: %s", message.kind, message.because)
        self.settled_seq = max(self.settled_seq, message.seq)
        return True

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        del facts

    def close(self, seconds: float) -> None:
        del seconds


class WebhookNotifier:
    """POSTs to one URL from a daemon thread. `settled_seq` and `num_failed` may be read from any thread."""

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        deadman_seconds: float = 60.0,
        clock: Clock | None = None,
        try_seconds: float = TRY_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        tries_max: int = TRIES_MAX,
    ) -> None:
        """Raises ConfigError: `url` is not http(s) with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(["recovery.webhook_url: must be http://host/... or https://host/..."])
        self.channel = "alertmanager" if parts.path.endswith(ALERTMANAGER_PATH) else "webhook"
        self.settled_seq = 0
        self.num_failed = 0
        self._url, self._run_id, self._deadman_seconds = url, run_id, deadman_seconds
        self._clock = clock or SystemClock()
        self._try_seconds, self._pause_seconds, self._tries_max = try_seconds, pause_seconds, tries_max
        self._queue: queue.Queue[Message | bytes] = queue.Queue(maxsize=QUEUE_MAX)
        self._beating = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="notify", daemon=True)
        self._thread.start()

    def offer(self, message: Message) -> bool:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return False
        return True

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        if self._beating.is_set():
            return
        self._beating.set()
        try:
            self._queue.put_nowait(self._body_of_heartbeat(facts))
        except queue.Full:
            self._beating.clear()

    def close(self, seconds: float) -> None:
        self._ending.set()
        self._thread.join(seconds)

    def _deliver(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._ending.is_set():
                    return
                continue
            if isinstance(item, bytes):
                # A late heartbeat is useless: it is tried once, and the next one is due soon.
                self._try(item)
                self._beating.clear()
                continue
            self._send(item)
            self.settled_seq = max(self.settled_seq, item.seq)

    def _send(self, message: Message) -> None:
        if self.channel == "alertmanager":
            body = json.dumps([_alert(message)]).encode()
        else:
            value = {
                "id": f"{message.run_id}:e{message.seq}",
                "kind": message.kind,
                "run": message.run_id,
                "incident": message.incident_id,
                "because": message.because,
                "at": message.wall_at,
                "resolved": message.resolved,
                **message.facts,
            }
            body = json.dumps(value).encode()
        pause = self._pause_seconds
        for try_number in range(1, self._tries_max + 1):
            if self._try(body):
                return
            if try_number < self._tries_max:
                self._ending.wait(pause)
                pause *= 2
        self.num_failed += 1
        logger.error("on-call could not be paged over %s: %d tries failed", self.channel, self._tries_max)

    def _try(self, body: bytes) -> bool:
        try:
            status, _ = request(
                "POST",
                self._url,
                headers={"Content-Type": "application/json"},
                content=body,
                deadline_seconds=self._try_seconds,
                bytes_max=0,
            )
        except HttpFailed as e:
            logger.warning("notification over %s failed: %s", self.channel, "timeout" if e.late else "no HTTP answer")
            return False
        if not 200 <= status < 300:
            logger.warning("notification over %s was answered with %d", self.channel, status)
        return 200 <= status < 300

    def _body_of_heartbeat(self, facts: Mapping[str, Any]) -> bytes:
        now = self._clock.wall()
        if self.channel == "alertmanager":
            alert = {
                "labels": {"alertname": "RolecallWatchAlive", "run": self._run_id, "severity": "none"},
                "annotations": {"summary": "rolecall watch is alive; this alert must always fire"},
                "startsAt": _iso(now),
                "endsAt": _iso(now + HEARTBEATS_MISSED_MAX * self._deadman_seconds),
            }
            return json.dumps([alert]).encode()
        return json.dumps({"kind": "watch_alive", "run": self._run_id, "at": now, **facts}).encode()


def _alert(message: Message) -> dict[str, Any]:
    """One alert of the Alertmanager v2 API (POST /api/v2/alerts, `postableAlerts`)."""
    # Labels identify an alert: firing and resolved must carry the same ones. Without an end Alertmanager would resolve
    # it after minutes, because it expects clients to repeat their alerts.
    ends_at = message.wall_at if message.resolved else message.wall_at + FIRING_SECONDS
    return {
        "labels": {
            "alertname": "RolecallIncident",
            "run": message.run_id,
            "incident": message.incident_id,
            "severity": "critical",
        },
        "annotations": {"summary": message.because, "kind": message.kind, "id": f"{message.run_id}:e{message.seq}"},
        "startsAt": _iso(message.wall_at),
        "endsAt": _iso(ends_at),
    }


def _iso(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat()
