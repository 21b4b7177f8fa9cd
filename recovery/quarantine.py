"""Automatic quarantine of a node that a replica leaves because the node is faulty. Pure.

Only nodes that the diagnosis names: a retry may leave a node that is no suspect. And only a limited share of all nodes:
a false positive about a whole rack must not leave a run without nodes.
"""

from collections.abc import Collection

from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.faults import Remedy
from rolecall.core.journal.payloads import NodeQuarantined, OncallPaged
from rolecall.recovery.incidents.incident import Incident
from rolecall.recovery.next_step import Append

BY_WATCH = "watch"
"""`by` of an automatic quarantine."""
TOPIC = "quarantine"
"""Topic of the page when too many nodes would be quarantined."""


def events_before_plan(
    incident: Incident,
    plan: Plan,
    *,
    quarantined: Collection[str],
    known: Collection[str],
    share_max: float,
    channel: str,
) -> list[Append]:
    """Events to write before `plan` is performed. `quarantined`: nodes in quarantine; `known`: all nodes of the run."""
    if (
        plan.action is not ActionKind.REPLACE_NODE
        or incident.diagnosis.fault_class.spec.remedy is not Remedy.MOVE
        or not share_max
    ):
        return []
    faulty = {str(t.node) for t in plan.targets} & {str(s.node) for s in incident.diagnosis.suspects}
    take, left = to_quarantine(faulty, quarantined, known, share_max)
    name = incident.incident_id
    because = f"{name}: {incident.diagnosis.because}"
    events = [
        Append(
            payload=NodeQuarantined(node=node, by=BY_WATCH, because=because),
            key=f"{name}:quarantine:{node}",
        )
        for node in take
    ]
    if left:
        because = (
            f"{', '.join(left)} should be quarantined, but {len(quarantined) + len(take)} of {len(known)} nodes "
            f"already are: the limit is {share_max:.0%}"
        )
        paged = OncallPaged(topic=TOPIC, because=because, channel=channel)
        events.append(Append(payload=paged, key=f"{name}:person:{TOPIC}"))
    return events


def to_quarantine(
    faulty: Collection[str], quarantined: Collection[str], known: Collection[str], share_max: float
) -> tuple[list[str], list[str]]:
    """Splits faulty nodes into those to quarantine and those beyond the limit."""
    take: list[str] = []
    left: list[str] = []
    for node in sorted(set(faulty) - set(quarantined)):
        within = len({*quarantined, *take, node}) <= share_max * len({*known, node})
        (take if within else left).append(node)
    return take, left
