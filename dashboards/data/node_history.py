"""What was said and found of each node, in the order of the journal: `recovery.nodes` knows how it stands, this how it came
to that. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import BurnInFinished, NodeDrained, NodeQuarantined, NodeReturnedToService
from rolecall.recovery.nodes import NODE_KINDS, NodeRecord, fold_nodes

_K = EventKind
_WHAT: Mapping[EventKind, str] = {
    _K.NODE_QUARANTINED: "quarantined",
    _K.NODE_DRAINED: "drained",
    _K.NODE_RETURNED_TO_SERVICE: "returned",
    _K.BURN_IN_FINISHED: "burned in",
}
SAID_MAX = 200
"""Of one node, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistoryEntry:
    """One thing that a person (or a program under a name) said of the node."""

    at: float  # wall seconds
    what: str
    by: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    record: NodeRecord
    said: tuple[NodeHistoryEntry, ...] = ()  # newest last


def past_of(node: str) -> NodeHistory:
    """Of a node of which nothing was ever said."""
    return NodeHistory(record=NodeRecord(node=node))


def pasts(events: Iterable[Event]) -> dict[str, NodeHistory]:
    """Node -> what its events tell."""
    told: dict[str, list[NodeHistoryEntry]] = {}
    kept = [e for e in events if e.kind in NODE_KINDS]
    for event in kept:
        said = event.payload
        assert isinstance(said, NodeQuarantined | NodeDrained | NodeReturnedToService | BurnInFinished)
        because = said.reason
        if isinstance(said, BurnInFinished):
            because = "passed" if said.passed else "failed"
        entry = NodeHistoryEntry(at=event.wall_at, what=_WHAT[event.kind], by=said.by, because=because)
        told.setdefault(said.node, []).append(entry)
    return {
        node: NodeHistory(record=record, said=tuple(told.get(node, ())[-SAID_MAX:]))
        for node, record in fold_nodes(kept).items()
    }


def quarantined(events: Iterable[Event]) -> dict[str, NodeRecord]:
    """Node -> who put it into quarantine, and why."""
    return {node: record for node, record in fold_nodes(events).items() if record.quarantined}
