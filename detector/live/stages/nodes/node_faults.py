"""Faults reported by a node's hardware and kernel (`rolecall.formats.node_faults`) as findings.

A hardware fault names the node and its GPU; recovery evicts no replica for it alone, as no replica is known to be
affected. If a replica on that node crashes or hangs within `TIED_SECONDS`, both are one fault: it is reported once, as
a hardware fault, so that the replica is replaced on another node. If another process begins there while the condition
stands, it is reported again, and explains the next crash or hang, too. XIDs caused by the application make no finding:
if the process exits, that is a crash.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.base.findings import ADVISES
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.formats.node_faults import EVIDENCE_MAX, FLAP_SECONDS, NodeFault, NodeFaults

TIED_SECONDS = 60.0
"""Maximum time between a node's event and a crash or hang there: a process notices a lost GPU at its next driver
call."""


class NodeFaultsStage(NodeFaults, Stage):
    """Attributes crashes and hangs to hardware faults of their node."""

    name = "node_faults"

    def evaluate(self, tick: Tick) -> list[Finding]:
        for node in tick.observation.left:
            self.leave(node)
        for event, age in tick.events:
            self.take(event, tick.now, age)
        tick.findings = self.join(tick.findings, tick.now, tick.fleet.current)
        return []

    def join(
        self, findings: list[Finding], now: float, processes: Callable[[], Iterable[MonitoredProcess]] = tuple
    ) -> list[Finding]:
        """`findings` with crashes and hangs attributed to hardware faults, then the remaining hardware faults."""
        self.expire(now, TIED_SECONDS)
        joined, causes = [], set[int]()
        for finding in findings:
            cause = self._cause(finding, now) if finding.fault_class in (FaultClass.CRASH, FaultClass.HANG) else None
            if cause is not None:
                cause.explained_at = max(cause.explained_at, finding.onset)
                causes.add(id(cause))
                finding = _because_of(finding, cause)
            joined.append(finding)
        standing: dict[tuple[str, str], list[NodeFault]] = {}
        for n in self.standing(now):
            # Once it has explained a crash it is silent, until something begins on the node while it stands.
            if id(n) not in causes and (not n.explained_at or (n.lasts and _begun_since(n, processes()))):
                standing.setdefault((n.node, n.fault_class), []).append(n)
        return joined + [_finding(group, now) for group in standing.values()]

    def _cause(self, finding: Finding, now: float) -> NodeFault | None:
        nodes = {str(s.node) for s in finding.suspects}
        tied = [
            n
            for n in self.state.values()
            if n.node in nodes
            and now >= n.held_until
            and FaultClass(n.fault_class).spec.is_hardware
            and (abs(finding.onset - n.onset) <= TIED_SECONDS or (n.explained_at and n.lasts and not n.ended))
            and not (n.thing.startswith("link ") and n.ended and n.ended - n.onset < FLAP_SECONDS)
        ]
        return min(tied, key=lambda n: abs(finding.onset - n.onset)) if tied and len(nodes) == 1 else None


def _begun_since(fault: NodeFault, processes: Iterable[MonitoredProcess]) -> bool:
    return any(s.node == fault.node and not s.gone and s.first_wall > fault.explained_at for s in processes)


def _evidence(faults: Iterable[NodeFault]) -> tuple[Evidence, ...]:
    return tuple(Evidence(kind=n.thing, text=text) for n in faults for text in n.lines)


def _because_of(finding: Finding, cause: NodeFault) -> Finding:
    seconds = finding.onset - cause.onset
    when = f"{seconds:.1f} s before" if seconds >= 0 else f"{-seconds:.1f} s after"
    return replace(
        finding,
        fault_class=FaultClass(cause.fault_class),
        because=f"{finding.because}; {when}, {cause.because}",
        evidence=(*finding.evidence, *_evidence([cause]), Evidence(kind=ADVISES, text=cause.advice)),
        # The next crash by a condition that lasts is no part of the fault that was handled.
        onset=min(finding.onset, cause.onset) if seconds <= TIED_SECONDS else finding.onset,
    )


def _finding(group: list[NodeFault], now: float) -> Finding:
    first = min(group, key=lambda n: n.onset)
    suspects = {(n.node, n.gpu) for n in group}
    return Finding(
        detector="node",
        suspects=tuple(
            Suspect(node=NodeId(node), gpu=gpu) for node, gpu in sorted(suspects, key=lambda s: (s[0], s[1] or 0))
        ),
        fault_class=FaultClass(first.fault_class),
        onset=min(now if n.explained_at else n.onset for n in group),  # reported again: a new fault for recovery
        detected_at=now,
        confidence=0.95 if first.fault_class != FaultClass.CONTROL_PLANE else 0.8,
        because="; ".join(n.because for n in sorted(group, key=lambda n: n.onset)[:EVIDENCE_MAX]),
        evidence=(*_evidence(group), *(Evidence(kind=ADVISES, text=n.advice) for n in group[:1])),
    )
