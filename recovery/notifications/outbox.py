"""The journal is the outbox of notifications. Pages, proposals, and the ends of proposals and of incidents that were
paged go to the notifier in journal order. The journal flag `notified` holds the position delivered so far, so the next
watch continues there: at least once, never blocking.
"""

from collections.abc import Callable
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.text import in_words
from rolecall.recovery.incidents import Incident, IncidentOutcome
from rolecall.recovery.interfaces import Message, Notifier
from rolecall.recovery.projection import PROPOSAL_ENDS, IncidentProjection

NOTIFIED_FLAG = "notified"
RESOLVING_OUTCOMES = (IncidentOutcome.RESOLVED, IncidentOutcome.SELF_RECOVERED, IncidentOutcome.ENDED)
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

    def send_unrecorded(self, topic: str, because: str) -> bool:
        """Offers a page that the journal cannot take now; it has no position there, so that none counts as delivered.
        False: the notifier takes none now."""
        paged = Message(
            seq=0,
            kind=str(EventKind.ONCALL_PAGED),
            run_id=self._run_id,
            because=notification_text(because),
            wall_at=self._clock.wall(),
            facts={"topic": topic},
        )
        return self._notifier.offer(paged)

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
    by = f"{in_words(event.kind)} by {body['by']}" if "by" in body else ""
    return Message(
        seq=event.seq,
        kind=str(event.kind),
        run_id=run_id,
        incident_id=event.incident_id or "",
        because=notification_text(event.payload.reason or by),
        wall_at=event.wall_at,
        resolved=closed or event.kind in PROPOSAL_ENDS,
        facts=facts,
    )
