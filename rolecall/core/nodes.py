"""Quarantined nodes: a fold over the quarantine events of operators and `watch`.

Used by recovery to choose the node that a replica moves to, and by the runtime to place standbys.
"""

from collections.abc import Iterable

from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import NodeQuarantined, NodeReturnedToService

QUARANTINE_KINDS = (EventKind.NODE_QUARANTINED, EventKind.NODE_RETURNED_TO_SERVICE)


def nodes_quarantined_by(events: Iterable[Event]) -> frozenset[NodeId]:
    """Nodes quarantined and not returned since. Other kinds of events are skipped."""
    nodes: set[NodeId] = set()
    for event in events:
        match event.payload:
            case NodeQuarantined(node=node):
                nodes.add(NodeId(node))
            case NodeReturnedToService(node=node):
                nodes.discard(NodeId(node))
    return frozenset(nodes)


def quarantined_nodes(journal: Journal) -> frozenset[NodeId]:
    """The same from the journal's current events. Skips lines that cannot be read."""
    return nodes_quarantined_by(journal.events(kinds=QUARANTINE_KINDS, damaged=[]))
