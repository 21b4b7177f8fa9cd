"""One entry of the journal. `incident_id` and `caused_by` (an event id) trace an action back to its sample."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from rolecall.core.journal.payloads.contract import PAYLOADS, EventKind, Payload
from rolecall.core.journal.payloads.recovery import PlanCreated
from rolecall.core.journal.payloads.run import StepCommitted

__all__ = ["Event", "EventKind"]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    seq: int  # position in the journal, from 1
    wall_at: float
    payload: Payload
    incident_id: str | None = None
    caused_by: str | None = None
    key: str | None = None  # appending the same key again changes nothing
    hash: str = ""

    @property
    def kind(self) -> EventKind:
        return self.payload.kind

    @property
    def event_id(self) -> str:
        return f"e{self.seq}"

    def as_(self, payload: type[P]) -> P:
        """The payload, of an event whose kind is known. Raises TypeError: it is of another kind."""
        if not isinstance(self.payload, payload):
            raise TypeError(f"{self.event_id} is {self.kind}, not {payload.kind}")
        return self.payload

    def slim(self) -> Self:
        """For readers that keep many events: without the inputs of a plan and without the parts of a step."""
        payload = self.payload
        if isinstance(payload, PlanCreated):
            return replace(self, payload=replace(payload, question={}))
        if isinstance(payload, StepCommitted):
            return replace(self, payload=replace(payload, groups=(), microbatches=(), health={}, versions={}))
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with the payload as it is stored."""
        return {
            "seq": self.seq,
            "kind": str(self.kind),
            "wall_at": self.wall_at,
            "body": self.payload.to_body(),
            "incident_id": self.incident_id,
            "caused_by": self.caused_by,
            "key": self.key,
            "hash": self.hash,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError, ValueError: it is no event, or its body does not fit its kind."""
        rest = {name: value for name, value in record.items() if name not in ("kind", "body")}
        return cls(payload=PAYLOADS[EventKind(record["kind"])].read(record["body"]), **rest)
