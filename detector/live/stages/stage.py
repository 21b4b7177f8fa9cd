"""Interface and input of a stage of the live detector.

The engine runs the stages in a fixed order over each observation. Each adds findings and may rewrite those of earlier
stages. A stage that finds why processes wait lists later stages that would accuse the waiting ones (`suppresses`): the
engine drops their findings while the cause stands. Explanations between fault classes are declared by the class
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
    """Context of one observation, passed through all stages. `now`: wall seconds."""

    observation: Observation
    fleet: MonitoredProcesses
    config: DetectorConfig
    expected_roles: Mapping[str, int]
    now: float
    findings: list[Finding] = field(default_factory=list)
    """Findings of the stages so far."""
    explained: set[str] = field(default_factory=set)
    """Fingerprints of exceptions diagnosed as user code."""

    @cached_property
    def events(self) -> list[tuple[AgentEvent, float]]:
        """Agent events with their time on the watcher's clock, and the seconds since each was written."""
        offsets = self.fleet.offsets
        return [
            (replace(e, wall_at=e.wall_at + offsets.get(e.node, 0.0)), self.fleet.age(e))
            for e in self.observation.events
        ]

    @cached_property
    def stalls(self) -> list[Stall]:
        """All processes without progress where progress is due."""
        return stalls(self.fleet, self.config)


class Stage(Protocol):
    """One instance per detector; it may keep state between observations."""

    name: str
    suppresses: frozenset[str] = frozenset()
    """Later stages whose findings are dropped while one of this stage's findings stalls others
    (`FaultSpec.stalls_others`)."""
    quiet_seconds: float = 0.0
    """How long this stage stays suppressed after another stage last suppressed it."""

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        """Findings to add to `tick.findings`, which the stage may also replace. Called for each observation."""
        ...

    def state(self) -> Any:
        """Its state for a stored window, in types that `detector.live.codec` supports."""
        return None

    def restore(self, state: Any) -> None:
        """Restores the result of `state`."""


def stalls_others(finding: Finding) -> bool:
    """Whether it explains why other processes wait: its class does, and it names a process or a role."""
    return finding.fault_class.spec.stalls_others and bool(finding.suspects or finding.about.partition(":")[0])
