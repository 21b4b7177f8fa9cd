"""Communicators of a running job that are stalled with ranks at different operation counts, as reported by NCCL RAS.

Every agent of a job receives the same report of a communicator: one finding, until all agents that reported it report
that it advances. The rank that is behind is named if its PID matches exactly one monitored rank (RAS identifies hosts
by address, and ranks in containers often share PIDs); otherwise the report is only evidence. In a symmetric hang no
rank is behind and RAS reports nothing: stacks or Flight Recorder dumps are needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.base.findings import settles
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, finding
from rolecall.detector.live.stages.stage import Stage, Tick

COMMUNICATORS_MAX = 64
FORGOTTEN_SECONDS = 3600.0
"""Expiry of a report: an agent that was killed cannot report that the communicator advances."""


@dataclass(slots=True)
class StalledCommunicator:
    """A communicator whose ranks are at different operation counts. Wall seconds. `reported_by`: node names."""

    communicator: str
    since: float
    last: float
    because: str
    pids: list[int]
    reported_by: list[str] = field(default_factory=list)


class NcclRasStage(Stage):
    """Suppressed while another fault stalls other processes, since it explains why ranks diverge."""

    name = "nccl_ras"

    def __init__(self) -> None:
        self.state: dict[str, StalledCommunicator] = {}  # by communicator

    def evaluate(self, tick: Tick) -> list[Finding]:
        for node in tick.observation.left:
            self.leave(node)
        for event, age in tick.events:
            self.take(event, tick.now, age)
        return self.find(tick.fleet, tick.now)

    def take(self, event: AgentEvent, now: float, age: float = 0.0) -> None:
        """Processes one agent event, with its time on the watcher's clock. `now`: wall seconds; `age`: seconds since it
        was written."""
        if event.kind is AgentEventKind.AGENT_STARTED:
            self.leave(str(event.node))
            return
        if event.kind is not AgentEventKind.NCCL:
            return
        what, key = event.detail.get("what", ""), event.detail.get("communicator", "")
        known = self.state.get(key)
        if what == "advances" and known is not None:
            self._leave(known, str(event.node))
        elif what == "suspicious":
            if known is None:
                if len(self.state) >= COMMUNICATORS_MAX:
                    return
                because = event.detail.get("because", "")
                known = self.state[key] = StalledCommunicator(key, event.wall_at, now - age, because, _pids(event))
            known.last = max(known.last, now - age)
            if event.node not in known.reported_by:
                known.reported_by.append(str(event.node))

    def leave(self, node: str) -> None:
        """Discards the reports of this node's agent."""
        for s in list(self.state.values()):
            self._leave(s, node)

    def _leave(self, stalled: StalledCommunicator, node: str) -> None:
        if node in stalled.reported_by:
            stalled.reported_by.remove(node)
        if not stalled.reported_by:
            self.state.pop(stalled.communicator, None)

    def find(self, fleet: MonitoredProcesses, now: float) -> list[Finding]:
        self.state = {k: s for k, s in self.state.items() if now - s.last <= FORGOTTEN_SECONDS}
        if not self.state:
            return []
        by_pid: dict[int, list[MonitoredProcess]] = {}
        for x in fleet.current():
            if x.process and not x.gone:
                by_pid.setdefault(x.process.pid, []).append(x)
        found: dict[tuple[object, ...], Finding] = {}
        for stalled in self.state.values():
            behind = [by_pid[pid][0] for pid in stalled.pids if len(by_pid.get(pid, ())) == 1]
            if any(x.stopped for x in behind):
                continue  # other stages tell of a stopped process, which may be stopped on purpose
            f = _finding(stalled, by_pid, now)
            # A rank is a member of several communicators: report it once.
            found.setdefault((f.fault_class, *f.suspects), f)
        return list(found.values())


def _pids(event: AgentEvent) -> list[int]:
    words = event.detail.get("pids", "").split()
    return [int(w) for w in words if w.isascii() and w.isdecimal() and len(w) < 10]


def _finding(stalled: StalledCommunicator, by_pid: Mapping[int, list[MonitoredProcess]], now: float) -> Finding:
    named = [by_pid[pid][0] for pid in dict.fromkeys(stalled.pids) if len(by_pid.get(pid, ())) == 1]
    evidence = Evidence(kind="nccl_ras", text=f"communicator {stalled.communicator}: {stalled.because}")
    if named and len(named) == len(stalled.pids):
        who = ", ".join(sorted(x.name() for x in named))
        return finding(
            "nccl",
            named,
            FaultClass.HANG,
            onset=stalled.since,
            now=now,
            confidence=0.8,
            because=f"{who} is behind in a collective, its peers wait: {stalled.because}",
            evidence=(evidence,),
        )
    return Finding(
        detector="nccl",
        suspects=tuple(Suspect(node=NodeId(node)) for node in sorted(stalled.reported_by)[:1]),
        fault_class=FaultClass.CANNOT_TELL,
        onset=min(stalled.since, now),
        detected_at=now,
        confidence=0.5,
        because=f"a communicator is stalled according to NCCL RAS: {stalled.because}",
        evidence=(
            evidence,
            settles("stacks or Flight Recorder dumps of its ranks: the rank that is behind is not a monitored process"),
        ),
    )
