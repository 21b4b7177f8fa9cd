"""Findings of metric panels: the weakest evidence, reported only if nothing else explains it.

A panel finding states that the metrics of a machine changed, not why. It has an onset but no end, and counts as the
same fault for `SAME_FAULT_SECONDS`. Any other finding that names the same machine replaces it permanently.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.detector.live.fusion import SAME_FAULT_SECONDS, incarnations
from rolecall.detector.live.processes import MonitoredProcesses
from rolecall.detector.live.stages.stage import Stage, Tick, emerging, own

AFTERMATH_SECONDS = 300.0
"""A metric change with an onset during another finding, or this long after it, counts as its effect: other processes
wait or take over work. The same applies after processes joined or exited, except for the start of the run."""
STARTED_SECONDS = 60.0
"""The start of a run is over when its processes have been the same for so long; panels begin no earlier."""
ONSET_SECONDS = 5.0
"""Uncertainty of the onset of a metric change."""


@dataclass(slots=True)
class PanelFault:
    """A panel finding about one machine."""

    finding: Finding
    last_wall: float  # when it was last reported
    reported: bool = False


class PanelsStage(Stage):
    name = "panels"

    def __init__(self) -> None:
        self._faults: list[PanelFault] = []
        self._trouble = (0.0, 0.0)  # start and end of the latest findings of other stages
        self._started = 0.0  # when the last process joined at the start of the run; 0: it is not over

    def evaluate(self, tick: Tick) -> list[Finding]:
        """New panel findings are held while a process stalls that is not diagnosed yet, which may explain them; and
        while their own process is stopped or in an uninterruptible wait (uninstrumented.py reports it if it lasts)."""
        since, until = self._trouble
        changed = tick.fleet.changed_wall
        if not self._started and tick.now - changed >= STARTED_SECONDS:
            self._started = changed
        if not changed > self._started > 0:
            changed = 0.0
        if tick.findings or changed > until:
            began = min([f.onset for f in tick.findings] + ([changed] if changed > until else []))
            recent = tick.now - until <= AFTERMATH_SECONDS
            self._trouble = (since if recent else began, tick.now if tick.findings else changed)
        for finding in tick.observation.panel_findings:
            same = next((p for p in self._faults if p.finding.suspects == finding.suspects), None)
            if same is None:
                self._faults.append(PanelFault(finding, tick.now))
            else:
                same.last_wall = tick.now
        standing = [p for p in self._faults if tick.now - p.last_wall <= SAME_FAULT_SECONDS]
        # Only faults whose processes still exist and whose onset is not in the aftermath of another finding.
        since, until = self._trouble
        self._faults = [
            p
            for p in standing
            if not since - ONSET_SECONDS <= p.finding.onset <= until + AFTERMATH_SECONDS
            and all(_lives(s, tick.fleet) for s in p.finding.suspects)
        ]
        kept = unexplained([p.finding for p in self._faults], tick.findings, tick.fleet.roster.sizes())
        self._faults = [p for p in self._faults if p.finding in kept]
        if not emerging(own(tick.stalls)):
            halted = {s.replica for s in tick.fleet.unpaged() if s.halted.wall > 0}
            for p in self._faults:
                p.reported |= not any(s.replica in halted for s in p.finding.suspects)
        return [p.finding for p in self._faults if p.reported]

    @property
    def state(self) -> dict[str, Any]:
        return {"faults": self._faults, "trouble": self._trouble, "started": self._started}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._faults, self._trouble, self._started = state["faults"], state["trouble"], state["started"]


def _lives(suspect: Suspect, fleet: MonitoredProcesses) -> bool:
    """Whether the suspect's processes still exist; always true for a suspect that is a whole node."""
    if not suspect.replica:
        return True
    ranks = fleet.roster.of_replica(suspect.replica).values()
    return bool(ranks) and all(s.incarnation == suspect.incarnation and not s.gone for s in ranks)


def unexplained(of_panels: Sequence[Finding], findings: list[Finding], role_sizes: Mapping[str, int]) -> list[Finding]:
    """Panel findings, oldest first, without another explanation.

    Dropped permanently are findings whose process or node is named by any other finding or by an earlier panel finding,
    and all findings of a role if they name more than half of it: the comparison with peers is then invalid.
    """
    accused = {who for f in findings for who in incarnations(f.suspects)}
    nodes = {str(s.node) for f in findings for s in f.suspects if s.node}
    kept: list[Finding] = []
    for finding in of_panels:
        here = {str(s.node) for s in finding.suspects if s.node}
        if not (incarnations(finding.suspects) & accused or here & nodes):
            kept.append(finding)
            nodes |= here
    named: dict[str, set[str]] = {}
    for f in kept:
        for s in f.suspects:
            named.setdefault(s.role, set()).add(s.replica or s.node)
    void = {role for role, who in named.items() if len(who) > 1 and 2 * len(who) > role_sizes.get(role, math.inf)}
    return [f for f in kept if not any(s.role in void for s in f.suspects)]
