"""What people said: the journal's events that carry a name, read on from where the last look ended.

The history of who did what, and of nodes. Pure but for `CommandLog`, one of which a process keeps.
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
WORD_KINDS = (
    *NODE_KINDS,
    K.PLAN_APPROVED,
    K.PLAN_REJECTED,
    K.HOLD_PLACED,
    K.HOLD_LIFTED,
    K.DIAGNOSIS_REVIEWED,
    K.RECOVERY_PAUSED,
    K.RECOVERY_RESUMED,
)
TOLD_AS: Mapping[EventKind, str] = {
    K.PLAN_APPROVED: "approved a plan",
    K.PLAN_REJECTED: "vetoed a plan",
    K.HOLD_PLACED: "held a plan",
    K.HOLD_LIFTED: "lifted a hold",
    K.DIAGNOSIS_REVIEWED: "marked a diagnosis",
    K.RECOVERY_PAUSED: "paused all acting",
    K.RECOVERY_RESUMED: "let it act again",
    K.NODE_QUARANTINED: "quarantined a node",
    K.NODE_RETURNED_TO_SERVICE: "ended a quarantine",
    K.NODE_DRAINED: "drained a node",
    K.BURN_IN_FINISHED: "burned a node in",
}
PAGE_EVENTS = 20_000
"""Read at a time; a journal gives so many lines in less than a second."""


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
        """Takes in what is new.

        Raises:
            JournalError: it cannot be read now.
        """
        with self._lock:
            head = journal.head().position
            while self._seq < head:
                page = journal.events(after=self._seq, kinds=WORD_KINDS, limit=PAGE_EVENTS, damaged=[])
                # A whole page may not be all; less than one is, up to the head that was asked for before.
                self._seq = page[-1].seq if len(page) == PAGE_EVENTS else max(head, *(e.seq for e in page), 0)
                self._events += tuple(page)
            return self._events

    @property
    def last(self) -> tuple[Event, ...]:
        """What was read before."""
        return self._events


def history(words: Iterable[Event], incidents: Iterable[Incident]) -> tuple[CommandLogEntry, ...]:
    """Who did what, newest first. A replica that a person had replaced shows as its incident."""
    deeds = [_deed(e) for e in words]
    deeds += [
        CommandLogEntry(
            at=i.opened_at,
            # The request's own sentence begins with who asked.
            by=i.diagnosis.because.partition(" asks for ")[0] if " asks for " in i.diagnosis.because else "",
            what="asked for a replacement",
            on=", ".join([*(f"{s.replica}#{s.incarnation}" for s in i.diagnosis.suspects), i.incident_id]),
            because=i.diagnosis.because,
        )
        for i in incidents
        if i.requested_by_operator
    ]
    return tuple(sorted(deeds, key=lambda d: d.at, reverse=True))


def _deed(event: Event) -> CommandLogEntry:
    said = event.payload
    verdict = f" as {said.verdict}" if isinstance(said, DiagnosisReviewed) else ""
    on = [getattr(said, "node", ""), getattr(said, "digest", ""), event.incident_id or ""]
    return CommandLogEntry(
        at=event.wall_at,
        by=str(getattr(said, "by", "")),
        what=TOLD_AS[event.kind] + verdict,
        on=", ".join(filter(None, on)) or "the run",
        because=said.reason,
    )
