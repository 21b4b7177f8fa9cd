"""One entry of the journal. `incident_id` and `caused_by` (an event id) let any action walk back to the sample that caused it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rolecall.core.errors import JournalCorrupt
from rolecall.core.journal.kinds import EventKind
from rolecall.core.journal.payloads import PAYLOADS, Payload

__all__ = ["Event", "EventKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    seq: int  # position in the journal, from 1
    kind: EventKind
    wall_at: float
    body: dict[str, Any] = field(default_factory=dict)
    incident_id: str | None = None
    caused_by: str | None = None
    key: str | None = None  # appending the same key again changes nothing
    hash: str = ""

    @property
    def payload(self) -> Payload:
        """
        Raises:
            JournalCorrupt: the body does not fit its kind.
        """
        try:
            return PAYLOADS[self.kind].read(self.body)
        except (KeyError, TypeError, ValueError) as e:
            raise JournalCorrupt(where=f"event {self.seq}", reason=f"cannot be read: {e}") from e

    @property
    def event_id(self) -> str:
        return f"e{self.seq}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(**{**d, "kind": EventKind(d["kind"])})
