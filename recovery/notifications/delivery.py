"""Delivery of notifications over HTTP, from a separate thread, so that a service that hangs never delays recovery.

Each message has a few tries with growing pauses, and a deadline per try. Redirects are not followed: a message may
contain machine names.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import NotifyFormat
from rolecall.core.http import HttpFailed, request
from rolecall.core.journal.events import EventKind
from rolecall.core.text import in_words
from rolecall.recovery.incidents import NO_CHANNEL
from rolecall.recovery.interfaces import Message
from rolecall.recovery.notifications.formats import ISSUED_PATHS, TEST, HttpCall, Target, calls_for, heartbeat

logger = logging.getLogger(__name__)

TRY_SECONDS = 5.0
"""Deadline of one try, from connecting to the last byte of the response header."""
TRIES_MAX = 4
PAUSE_SECONDS = 1.0
"""Pause after the first failed try; doubled after each further one."""
QUEUE_MAX = 1000
"""Messages kept while the receiver does not answer; the loop offers further ones again."""


ANSWER_BYTES_MAX = 64 << 10
ANSWER_CHARS_MAX = 300
"""Shown of the answer to a test message."""


class LogNotifier:
    """Used where no channel is configured: pages go to the log."""

    channel = NO_CHANNEL

    def __init__(self) -> None:
        self.settled_seq = 0

    def offer(self, message: Message) -> bool:
        paged = message.kind == EventKind.ONCALL_PAGED
        what = "page" if paged else f"notification ({in_words(message.kind)})"
        text = "%s not sent: no notification channel is configured; %s"
        logger.log(logging.WARNING if paged else logging.INFO, text, what, message.because)
        self.settled_seq = max(self.settled_seq, message.seq)
        return True

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        del facts

    def close(self, seconds: float) -> None:
        del seconds


class HttpNotifier:
    """Sends to one target from a daemon thread. `settled_seq` and `num_failed` may be read from any thread."""

    def __init__(
        self,
        target: Target,
        *,
        run_id: str,
        deadman_seconds: float = 60.0,
        clock: Clock | None = None,
        try_seconds: float = TRY_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        tries_max: int = TRIES_MAX,
    ) -> None:
        self.channel = str(target.format)
        self.settled_seq = 0
        self.num_failed = 0
        self._target, self._run_id, self._deadman_seconds = target, run_id, deadman_seconds
        self._clock = clock or SystemClock()
        self._try_seconds, self._pause_seconds, self._tries_max = try_seconds, pause_seconds, tries_max
        self._queue: queue.Queue[Message | HttpCall] = queue.Queue(maxsize=QUEUE_MAX)
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
        call = heartbeat(self._target, self._run_id, facts, self._clock.wall(), self._deadman_seconds)
        if call is None:
            return
        self._beating.set()
        try:
            self._queue.put_nowait(call)
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
            if isinstance(item, HttpCall):
                # A late heartbeat is useless: it is tried once, and the next one is due soon.
                self._try(item)
                self._beating.clear()
                continue
            for call in calls_for(self._target, item):
                self._send(call)
            self.settled_seq = max(self.settled_seq, item.seq)

    def _send(self, call: HttpCall) -> None:
        pause = self._pause_seconds
        for try_number in range(1, self._tries_max + 1):
            if self._try(call):
                return
            if try_number < self._tries_max:
                self._ending.wait(pause)
                pause *= 2
        self.num_failed += 1
        logger.error("on-call could not be paged over %s: %d tries failed", self.channel, self._tries_max)

    def _try(self, call: HttpCall) -> bool:
        try:
            status, _ = request(
                call.method,
                call.url,
                headers=call.headers,
                content=call.body,
                deadline_seconds=self._try_seconds,
                bytes_max=0,
            )
        except HttpFailed as e:
            logger.warning("notification over %s failed: %s", self.channel, "timeout" if e.late else "no HTTP answer")
            return False
        except Exception as e:  # noqa: BLE001
            # Deliberate: without this thread no page would be sent any more. The text may hold a secret.
            logger.warning("notification over %s failed: %s", self.channel, type(e).__name__)
            return False
        if not 200 <= status < 300:
            logger.warning("notification over %s was answered with %d", self.channel, status)
        return 200 <= status < 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TestDelivery:
    """One message of a test. Neither text holds a secret."""

    what: str
    accepted: bool
    answer: str


def send_test(
    target: Target, run_id: str, *, clock: Clock | None = None, try_seconds: float = TRY_SECONDS
) -> list[TestDelivery]:
    """Sends one message marked as a test and, where the service keeps an alert, its resolution. Each is tried once."""
    now = (clock or SystemClock()).wall()
    because = "test message of rolecall: no fault, nothing to do"
    message = Message(seq=0, kind=TEST, run_id=run_id, incident_id=f"test-{now:.0f}", because=because, wall_at=now)
    results = [_test("test message", target, message, try_seconds)]
    if results[0].accepted and target.format is not NotifyFormat.SLACK:
        results.append(_test("its resolution", target, replace(message, resolved=True), try_seconds))
    return results


def _test(what: str, target: Target, message: Message, try_seconds: float) -> TestDelivery:
    (call,) = calls_for(target, message)
    try:
        status, body = request(
            call.method,
            call.url,
            headers=call.headers,
            content=call.body,
            deadline_seconds=try_seconds,
            bytes_max=ANSWER_BYTES_MAX,
        )
    except HttpFailed as e:
        return TestDelivery(what=what, accepted=False, answer=_without_secrets(str(e), target))
    text = _without_secrets(body.decode(errors="replace"), target)[:ANSWER_CHARS_MAX]
    return TestDelivery(what=what, accepted=200 <= status < 300, answer=f"{status} {text}".strip())


def _without_secrets(text: str, target: Target) -> str:
    """A service may quote what it was sent."""
    parts = urlsplit(target.url)
    issued = parts.path if target.format in ISSUED_PATHS else ""
    for secret in (target.url, target.secret, issued, parts.query):
        text = text.replace(secret, "***") if len(secret) > 1 else text
    return text
