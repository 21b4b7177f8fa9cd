"""Input of the detector, common to all sources: everything received since the last poll."""

from dataclasses import dataclass
from typing import Any, Self

from rolecall.core.diagnosis import Finding
from rolecall.core.telemetry import AgentEvent, SampleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`wall_at` is the detector's only time source: seconds since 1970 on its own clock."""

    wall_at: float
    batches: tuple[SampleBatch, ...] = ()
    events: tuple[AgentEvent, ...] = ()
    unreachable: tuple[tuple[str, float, str], ...] = ()
    """(node, onset in wall seconds, reason) of each agent that does not answer."""
    left: tuple[str, ...] = ()
    """Nodes that were removed from the list of agents: their findings end."""
    panel_findings: tuple[Finding, ...] = ()
    """Panel findings that start with this observation (detector/live/run_panels.py). They are stored here so that a
    window can be replayed: panel trackers have hours of memory, a window covers half a minute."""
    pulled_findings: tuple[Finding, ...] = ()
    """Findings derived from evidence collected for an incident: stacks, Flight Recorder dumps
    (detector/live/stages/evidence/pulled_evidence.py)."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "wall_at": self.wall_at,
            "batches": [b.to_dict() for b in self.batches],
            "events": [e.to_dict() for e in self.events],
            "unreachable": [list(u) for u in self.unreachable],
            "left": list(self.left),
            "panel_findings": [f.to_dict() for f in self.panel_findings],
            "pulled_findings": [f.to_dict() for f in self.pulled_findings],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(
            wall_at=data["wall_at"],
            batches=tuple(SampleBatch.from_dict(b) for b in data["batches"]),
            events=tuple(AgentEvent.from_dict(e) for e in data["events"]),
            unreachable=tuple((u[0], u[1], u[2]) for u in data["unreachable"]),
            left=tuple(data["left"]),
            panel_findings=tuple(Finding.from_dict(f) for f in data["panel_findings"]),
            pulled_findings=tuple(Finding.from_dict(f) for f in data["pulled_findings"]),
        )
