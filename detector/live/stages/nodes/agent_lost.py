"""Unreachable agents: their nodes are not observed, which alone is no fault of the processes there.

A refused connection comes from a live host, so only the agent is down: `control_plane`. A timeout may mean a dead node,
a partition or a stuck agent: `cannot_tell`, with the observation that would settle it. Neither names a replica: missing
telemetry alone is no reason to evict. (A peer that waits in a collective for a rank of that node is independent
evidence, which stall.py combines with this.)
"""

from collections import Counter
from collections.abc import Sequence

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.base.findings import settles
from rolecall.detector.live.processes import MonitoredProcesses, names
from rolecall.detector.live.stages.stage import Stage, Tick

UNREACHABLE_GRACE_SECONDS = 3.0
"""Grace for one agent: a restart takes about a second."""
MANY_MIN = 3
"""If at least this many agents, and more than half, are unreachable, they share one cause, possibly the watcher."""
MANY_GRACE_SECONDS = 12.0
"""Grace when several agents are unreachable, to determine whether most are: in a large fleet agents are polled every
eight seconds with a timeout of two (`agents.REQUESTS_PER_SECOND_MAX`, `AgentClientLimits`)."""
RAYLET_SECONDS = 120.0
"""How long the loss of a raylet is reported: after that its node has been replaced or is not needed."""
REFUSED = "refused"
"""Substring of a source's reason when the agent's port refuses connections."""


class AgentLostStage(Stage):
    name = "agent_lost"

    def evaluate(self, tick: Tick) -> list[Finding]:
        return find(tick.fleet, tick.now)


def find(fleet: MonitoredProcesses, now: float) -> list[Finding]:
    silent = fleet.unreachable
    known = fleet.offsets.keys() | {node for node, _, _ in silent}
    several = len(silent) >= MANY_MIN
    most = several and 2 * len(silent) > len(known)
    grace = MANY_GRACE_SECONDS if several and not most else UNREACHABLE_GRACE_SECONDS
    overdue = [u for u in silent if now - u[1] >= grace]
    found = [_many(silent, len(known), now)] if most and overdue else [_unreachable(fleet, *u, now) for u in overdue]
    found += [_raylet(fleet, node, at, now) for node, at in fleet.raylets_gone.items() if now - at < RAYLET_SECONDS]
    return found


def unreachable_reason(fleet: MonitoredProcesses, node: str, now: float) -> str:
    """Reason why the node has been unreachable for longer than an agent restart; empty if it is reachable."""
    for name, since, reason in fleet.unreachable:
        if name == node and now - since >= UNREACHABLE_GRACE_SECONDS:
            return reason
    return ""


def _on(fleet: MonitoredProcesses, node: str) -> str:
    here = names(s for s in fleet.current() if s.node == node and not s.gone)
    return f" ({here})" if here else ""


def _unreachable(fleet: MonitoredProcesses, node: str, since: float, reason: str, now: float) -> Finding:
    seconds = now - since
    agent_only = REFUSED in reason
    if agent_only:
        because = (
            f"agent of {node} is down: {reason} for {seconds:.0f} s, so the host is up; processes on {node}"
            f"{_on(fleet, node)} are not observed and not accused"
        )
        settle = f"restart the agent of {node}; it finds its processes again"
    else:
        because = (
            f"{node} is unreachable: {reason} for {seconds:.0f} s; dead node, network partition or stuck agent; "
            f"its processes{_on(fleet, node)} are not observed and not accused"
        )
        settle = f"whether Ray lists {node} as alive, and whether peers still reach the replicas that run there"
    return Finding(
        detector="lost",
        suspects=(Suspect(node=NodeId(node)),),
        fault_class=FaultClass.CONTROL_PLANE if agent_only else FaultClass.CANNOT_TELL,
        onset=since,
        detected_at=now,
        confidence=0.9 if agent_only else 0.5,
        because=because,
        evidence=(Evidence(kind="unreachable", text=reason, values={"seconds": seconds}), settles(settle)),
    )


def _many(silent: Sequence[tuple[str, float, str]], num_known: int, now: float) -> Finding:
    since = min(at for _, at, _ in silent)
    reasons = Counter(reason for _, _, reason in silent).most_common(2)
    causes = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    some = ", ".join(sorted(node for node, _, _ in silent)[:3])
    because = (
        f"{len(silent)} of {num_known} agents are unreachable ({some}{', ...' if len(silent) > 3 else ''}): {causes}; "
        "so many at once share a cause: this watch's own host or network, a switch, or an operator who stopped them; "
        "processes there are not observed and not accused"
    )
    return Finding(
        detector="lost",
        suspects=(),
        fault_class=FaultClass.CANNOT_TELL,
        onset=since,
        detected_at=now,
        confidence=0.6,
        because=because,
        evidence=(
            Evidence(kind="unreachable", text=causes, values={"agents": float(len(silent)), "known": float(num_known)}),
            settles("whether the agents answer from another host than the watch's"),
        ),
        about="agents",
    )


def _raylet(fleet: MonitoredProcesses, node: str, at: float, now: float) -> Finding:
    return Finding(
        detector="lost",
        suspects=(Suspect(node=NodeId(node)),),
        fault_class=FaultClass.NODE_LOST,
        onset=at,
        detected_at=now,
        confidence=0.9,
        because=f"{node} left the Ray cluster: its raylet exited{_on(fleet, node)}; replicas that died are reported "
        f"separately",
        evidence=(Evidence(kind="raylet", text=f"raylet of {node} exited"),),
    )
