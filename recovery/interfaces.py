"""Protocols of what recovery needs from other packages: observation source, detector, evidence collector, notifier.

Recovery imports neither detector nor agent: `rolecall.watch.run` passes implementations to the loop, tests pass fakes
(`rolecall.testing`). Recovery waits until a replica makes progress; the detector decides whether it does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.core.diagnosis import Diagnosis, Fate, ReplicaLoad, Suspect
from rolecall.core.journal.payloads.recovery import EvidenceCollected


class ObservationSource(Protocol):
    def poll(self, timeout_seconds: float) -> Any:
        """New data, for the detector; returns within about `timeout_seconds` even if there is none."""


class Detector(Protocol):
    def observe(self, observation: Any) -> Sequence[Diagnosis]:
        """Processes one observation and returns every current diagnosis, repeating those that still hold."""

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        """Whether `replica` is seen to finish work at this or a later incarnation, and what was seen, as text."""

    def waits(self, replica: str, incarnation_min: int) -> bool:
        """Whether `replica` is healthy at this or a later incarnation and has no work: no progress is due of it."""

    def has_worked(self, replica: str, incarnation: int) -> bool:
        """Whether this incarnation has finished work, whatever became of it since."""

    def fate(self, suspect: Suspect) -> tuple[Fate, str]:
        """What became of the process that a diagnosis names (of its replica, where it names no process), and what was
        seen."""

    def survives(self, role: str, since: float) -> bool:
        """Whether a process of `role` that ran at `since` (wall seconds) still runs."""

    def forget(self, replica: str, below_incarnation: int) -> None:
        """Incarnations of `replica` below this one are being replaced: their end is no fault."""

    def unforget(self, replica: str, incarnation: int) -> None:
        """This incarnation of `replica` runs on: it was not replaced."""

    def loads(self) -> Mapping[str, ReplicaLoad]:
        """Replica -> what its newest samples show that it holds and has."""

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        """What the detectors have read, as JSON, stored with an incident for replay. In a large fleet only the suspects
        and some of their peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidence:
    """Evidence collected for an incident, and what is missing, as its journal payload. `part`: see `request`."""

    incident_id: str
    payload: EvidenceCollected
    part: int = 1


class EvidenceCollector(Protocol):
    """Requests an incident's evidence from its providers in separate threads: no call blocks the loop."""

    def request(self, incident_id: str, diagnosis: Diagnosis, part: int = 1) -> None:
        """Starts a collection; it produces at most one `CollectedEvidence`, later. `part`: how many this incident has,
        with this one; its files stand beside those of the others."""

    def collected(self) -> Sequence[CollectedEvidence]:
        """Evidence completed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification for on-call. `seq` is the journal position of its event, by which the receiver can drop
    duplicates: a message is sent at least once."""

    seq: int
    kind: str
    run_id: str
    because: str
    wall_at: float
    incident_id: str = ""
    resolved: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class Notifier(Protocol):
    """Delivers messages in order in a separate thread: no call blocks the loop."""

    @property
    def channel(self) -> str:
        """How on-call is paged, for the journal; never a URL, which may contain a secret."""

    @property
    def settled_seq(self) -> int:
        """Highest `seq` delivered or dropped after all retries; 0 before the first."""

    def offer(self, message: Message) -> bool:
        """Queues a message; False when the queue is full (offer it again later)."""

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        """Sends a heartbeat; a receiver pages when it stops. Dropped while another one is in flight."""

    def close(self, seconds: float) -> None:
        """Delivers queued messages for at most `seconds`, then stops."""
