"""History of operator commands, from the journal's events that carry a user name.

Pure except `CommandLog`, which reads new events incrementally; one per process.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import DiagnosisReviewed
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.nodes import NODE_KINDS

K = EventKind
COMMAND_KINDS = (
    *NODE_KINDS,
    K.PLAN_APPROVED,
    K.PLAN_REJECTED,
    K.HOLD_PLACED,
    K.HOLD_LIFTED,
    K.DIAGNOSIS_REVIEWED,
    K.RECOVERY_PAUSED,
    K.RECOVERY_RESUMED,
)
LABELS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved a plan",
    K.PLAN_REJECTED: "rejected a plan",
    K.HOLD_PLACED: "put a plan on hold",
    K.HOLD_LIFTED: "lifted a hold",
    K.DIAGNOSIS_REVIEWED: "marked a diagnosis",
    K.RECOVERY_PAUSED: "paused recovery",
    K.RECOVERY_RESUMED: "resumed recovery",
    K.NODE_QUARANTINED: "quarantined a node",
    K.NODE_RETURNED_TO_SERVICE: "returned a node to service",
    K.NODE_DRAINED: "drained a node",
    K.BURN_IN_FINISHED: "ran a burn-in",
}
PAGE_EVENTS = 20_000
"""Events read per query; that takes less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLogEntry:
    """One line of the history."""

    at: float
    by: str
    what: str
    on: str
    because: str


class CommandLog:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._events: tuple[Event, ...] = ()

    def read(self, journal: Journal) -> tuple[Event, ...]:
        """All command events, after reading new ones. Raises JournalError: the journal is not readable."""
        with self._lock:
            head = journal.head().position
            while self._seq < head:
                page = journal.events(after=self._seq, kinds=COMMAND_KINDS, limit=PAGE_EVENTS, damaged=[])
                # A full page may not be the last; a partial one covers everything up to the head read before.
                self._seq = page[-1].seq if len(page) == PAGE_EVENTS else max(head, *(e.seq for e in page), 0)
                self._events += tuple(page)
            return self._events

    @property
    def last(self) -> tuple[Event, ...]:
        """Events read so far."""
        return self._events


def history(events: Iterable[Event], incidents: Iterable[Incident]) -> tuple[CommandLogEntry, ...]:
    """Command history, newest first. A replacement that an operator requested is listed with its incident."""
    entries = [_entry(e) for e in events]
    entries += [
        CommandLogEntry(
            at=i.opened_at,
            # The text of a request starts with the user's name.
            by=i.diagnosis.because.partition(" requested replacement of ")[0]
            if " requested replacement of " in i.diagnosis.because
            else "",
            what="requested a replacement",
            on=", ".join([*(f"{s.replica}#{s.incarnation}" for s in i.diagnosis.suspects), i.incident_id]),
            because=i.diagnosis.because,
        )
        for i in incidents
        if i.requested_by_operator
    ]
    return tuple(sorted(entries, key=lambda d: d.at, reverse=True))


def _entry(event: Event) -> CommandLogEntry:
    payload = event.payload
    verdict = f" as {payload.verdict}" if isinstance(payload, DiagnosisReviewed) else ""
    on = [getattr(payload, "node", ""), getattr(payload, "digest", ""), event.incident_id or ""]
    return CommandLogEntry(
        at=event.wall_at,
        by=str(getattr(payload, "by", "")),
        what=LABELS[event.kind] + verdict,
        on=", ".join(filter(None, on)) or "the run",
        because=payload.reason,
    )
