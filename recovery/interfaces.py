"""What recovery needs from others, as Protocols: somebody who looks, somebody who judges, somebody who can be told.

Recovery imports neither detector nor agent: `rolecall watch` is given objects of these shapes (see `rolecall.watch.run`),
tests give it fakes (`recovery.testing`). Waiting for "healthy again" is recovery's, the predicate is the detector's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.journal.payloads import EvidenceCollected


class TimedObservation(Protocol):
    """One look at the run. Recovery reads only when it was."""

    @property
    def wall_at(self) -> float:
        """Seconds since 1970."""


class ObservationSource(Protocol):
    def poll(self, timeout_seconds: float) -> Any:
        """What is new, as an `TimedObservation`; returns within about `timeout_seconds` even if nothing is."""


class Detector(Protocol):
    def observe(self, observation: Any) -> Sequence[Diagnosis]:
        """Takes one observation in and returns every diagnosis that stands; the same ones again while they stand."""

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        """Whether `replica`, at this incarnation or a later one, is seen to finish work; and what was seen, in words."""

    def forget(self, replica: str, below_incarnation: int) -> None:
        """Incarnations of `replica` below this are being replaced: that they end is wanted from now on."""

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        """What the detectors have read, as JSON: kept with an incident for replay. Of a large fleet, those whom
        `suspects` name and some of their peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEvidence:
    """What was had of an incident's evidence, and what was not, as its event tells it."""

    incident_id: str
    payload: EvidenceCollected


class EvidenceCollector(Protocol):
    """Asks others for the evidence of an incident, in threads of its own: no call ever blocks the loop."""

    def ask(self, incident_id: str, diagnosis: Diagnosis) -> None:
        """Begins to ask; at most one account comes of it, later."""

    def heard(self) -> Sequence[CollectedEvidence]:
        """Those that came since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Something a person should hear of. `seq` is the journal position of the event that it tells: the receiver may
    drop what it has seen, because a message is sent at least once."""

    seq: int
    kind: str
    run_id: str
    because: str
    wall_at: float
    incident_id: str = ""
    resolved: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class Notifier(Protocol):
    """Delivers messages in order, in its own thread: no call ever blocks the loop."""

    @property
    def channel(self) -> str:
        """What the journal says of the way a person was called; never a URL, which may hold a secret."""

    @property
    def settled_seq(self) -> int:
        """Highest `seq` that was delivered or given up after all retries; 0 before the first."""

    def offer(self, message: Message) -> bool:
        """Queues a message; False when the queue is full (offer it again later)."""

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        """The dead-man signal: somebody else notices when it stops. Dropped while one is under way already."""

    def close(self, seconds: float) -> None:
        """Delivers what is queued for at most `seconds`, then ends."""
