"""Quarantined nodes: a fold over the quarantine events of operators and `watch`.

Recovery chooses the node that a replica moves to, the runtime promotes standbys and fills their places: both ask here.
"""

from collections.abc import Iterable

from rolecall.core.ids import NodeId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import NodeQuarantined, NodeReturnedToService
from rolecall.core.journal.rows import DamagedLine

QUARANTINE_KINDS = (EventKind.NODE_QUARANTINED, EventKind.NODE_RETURNED_TO_SERVICE)


def is_quarantined(events: Iterable[Event]) -> frozenset[NodeId]:
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
    """The same, as the journal stands now. A line that cannot be read says nothing."""
    damaged: list[DamagedLine] = []
    return is_quarantined(journal.events(kinds=QUARANTINE_KINDS, damaged=damaged))
