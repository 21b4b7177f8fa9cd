"""When a replica leaves a node for the node's own fault, nothing is to come after it. Pure.

Only the nodes that the diagnosis names: a retry leaves one that nobody has accused. And never too many of all: a detector
that is wrong about a whole rack must not leave a run without nodes.
"""

from collections.abc import Collection

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.faults import Remedy
from rolecall.core.journal.payloads import NodeQuarantined, OncallPaged
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.next_step import Append

BY_WATCH = "watch"
"""Who quarantines a node that no person spoke of."""
TOPIC = "quarantine"
"""Of the call for a person when too many nodes would be quarantined."""


def events_before_plan(
    incident: Incident, plan: Plan, *, shut: Collection[str], known: Collection[str], share_max: float, channel: str
) -> list[Append]:
    """What to write before `plan` is performed. `shut`: nodes in quarantine; `known`: all of the run."""
    if (
        plan.action is not ActionKind.REPLACE_NODE
        or incident.diagnosis.fault_class.spec.remedy is not Remedy.MOVE
        or not share_max
    ):
        return []
    faulty = {str(t.node) for t in plan.targets} & {str(s.node) for s in incident.diagnosis.suspects}
    take, left = to_quarantine(faulty, shut, known, share_max)
    name = incident.incident_id
    because = f"{name}: {incident.diagnosis.because}"
    said = [
        Append(
            payload=NodeQuarantined(node=node, by=BY_WATCH, because=because),
            key=f"{name}:quarantine:{node}",
        )
        for node in take
    ]
    if left:
        because = (
            f"{', '.join(left)} should be quarantined, and {len(shut) + len(take)} of {len(known)} nodes are: "
            f"the limit is {share_max:.0%}"
        )
        paged = OncallPaged(topic=TOPIC, because=because, channel=channel)
        said.append(Append(payload=paged, key=f"{name}:person:{TOPIC}"))
    return said


def to_quarantine(
    faulty: Collection[str], quarantined: Collection[str], known: Collection[str], share_max: float
) -> tuple[list[str], list[str]]:
    """Of nodes with a fault: those to quarantine, and those that would be too many of all."""
    take: list[str] = []
    left: list[str] = []
    for node in sorted(set(faulty) - set(quarantined)):
        within = len({*quarantined, *take, node}) <= share_max * len({*known, node})
        (take if within else left).append(node)
    return take, left
