"""Engine processes without their server hold a GPU's memory, and nobody will ever use or end them.

The agent proves it: the process names itself as a part of an engine, and its parent is an init process, in two polls.
One finding for each, which names node and process and the command that ends it. It stands until the process is gone.
"""

from collections.abc import Sequence

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.core.text import plain
from rolecall.detector.base.findings import ADVISES, ORPHAN
from rolecall.detector.live.stages.stage import Stage, Tick

ORPHANS_MAX = 256
TEXT_CHARACTERS_MAX = 200


class OrphansStage(Stage):
    name = ORPHAN

    def __init__(self) -> None:
        self.state: dict[str, Finding] = {}
        """By node, PID and start time."""

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        for node in tick.observation.left:
            self._forget(node)
        for event, _ in tick.events:
            if event.kind is AgentEventKind.AGENT_STARTED:
                self._forget(event.node)  # it reports again those that are left
            if event.process is None:
                continue
            key = str(event.process)
            if event.kind is AgentEventKind.ORPHANED_ENGINE and len(self.state) < ORPHANS_MAX:
                self.state.setdefault(key, _finding(event, tick.now))
            elif event.kind is AgentEventKind.ORPHAN_GONE:
                self.state.pop(key, None)
        return list(self.state.values())

    def _forget(self, node: str) -> None:
        self.state = {key: f for key, f in self.state.items() if f.suspects[0].node != node}


def _finding(event: AgentEvent, now: float) -> Finding:
    assert event.process is not None
    title, parent, command = (
        plain(event.detail.get(name, ""), TEXT_CHARACTERS_MAX) for name in ("title", "adopted_by", "command")
    )
    process = event.process
    because = (
        f"{title} (pid {process.pid}) on {event.node} has lost its server and belongs to {parent} now: it keeps its "
        "GPU memory, and nothing will use or end it"
    )
    return Finding(
        detector=ORPHAN,
        suspects=(Suspect(node=event.node, process=process),),
        fault_class=FaultClass.RESOURCE_EXHAUSTED,
        onset=min(event.wall_at, now),
        detected_at=now,
        confidence=0.9,
        because=because,
        evidence=(
            Evidence(kind="process", text=f"{title}: child of {parent}"),
            Evidence(kind=ADVISES, text=f"on {event.node}: {command}"),
        ),
        about=f":{ORPHAN}:{process.pid}-{process.start_ticks}",
    )
