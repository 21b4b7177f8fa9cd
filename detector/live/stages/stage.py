"""What a stage of the live detector is, and what it is given.

The engine runs its stages in a fixed order over one observation. Each adds findings, and may rewrite those of the
stages before it. A stage that finds why others wait names the later stages that would accuse those who wait: the engine
keeps them silent meanwhile. What findings of one class explain of another is declared by the class
(`FaultSpec.suppresses`) and applied at the end, by fusion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Finding
from rolecall.core.telemetry import AgentEvent
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.stalls import Stall, stalls


@dataclass(kw_only=True)
class Tick:
    """One observation on its way through the stages. `now`: wall seconds."""

    observation: Observation
    fleet: MonitoredProcesses
    config: DetectorConfig
    expected_roles: Mapping[str, int]
    now: float
    findings: list[Finding] = field(default_factory=list)
    """Of the stages so far."""
    explained: set[str] = field(default_factory=set)
    """Fingerprints of exceptions that are user code."""

    @cached_property
    def events(self) -> list[tuple[AgentEvent, float]]:
        """Events of agents with their time on our clock, and the seconds since each was written."""
        offsets = self.fleet.offsets
        return [
            (replace(e, wall_at=e.wall_at + offsets.get(e.node, 0.0)), self.fleet.age(e))
            for e in self.observation.events
        ]

    @cached_property
    def stalls(self) -> list[Stall]:
        """Everyone who makes no progress where progress is due."""
        return stalls(self.fleet, self.config)


class Stage(Protocol):
    """One per detector; it may keep state between observations."""

    name: str
    suppresses: frozenset[str] = frozenset()
    """Later stages whose findings are dropped while one of this stage's findings stalls others
    (`FaultSpec.stalls_others`)."""
    quiet_seconds: float = 0.0
    """How long after such a finding this stage stays silent where another suppresses it."""

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        """Findings that stand now, in addition to `tick.findings`, which it may replace. Called for each
        observation."""
        ...

    def state(self) -> Any:
        """What it must remember, for a stored window: values that `detector.live.codec` knows."""
        return None

    def restore(self, state: Any) -> None:
        """Takes back what `state` gave."""


def stalls_others(finding: Finding) -> bool:
    """Whether it explains why others wait: it names a process or a role, and its class says so."""
    return finding.fault_class.spec.stalls_others and bool(finding.suspects or finding.about.partition(":")[0])
