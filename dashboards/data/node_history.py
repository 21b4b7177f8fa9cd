"""History of each node in journal order: quarantines, drains, burn-ins. `recovery.nodes` has the current state.
Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import BurnInFinished, NodeDrained, NodeQuarantined, NodeReturnedToService
from rolecall.recovery.nodes import NODE_KINDS, NodeRecord, fold_nodes

_K = EventKind
_WHAT: Mapping[EventKind, str] = {
    _K.NODE_QUARANTINED: "quarantined",
    _K.NODE_DRAINED: "drained",
    _K.NODE_RETURNED_TO_SERVICE: "returned to service",
    _K.BURN_IN_FINISHED: "burn-in",
}
ENTRIES_MAX = 200
"""Entries kept per node, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistoryEntry:
    """One operator command or burn-in result."""

    at: float  # wall seconds
    what: str
    by: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    record: NodeRecord
    entries: tuple[NodeHistoryEntry, ...] = ()  # newest last


def past_of(node: str) -> NodeHistory:
    """History of a node without entries."""
    return NodeHistory(record=NodeRecord(node=node))


def pasts(events: Iterable[Event]) -> dict[str, NodeHistory]:
    """Node -> history."""
    entries: dict[str, list[NodeHistoryEntry]] = {}
    kept = [e for e in events if e.kind in NODE_KINDS]
    for event in kept:
        payload = event.payload
        assert isinstance(payload, NodeQuarantined | NodeDrained | NodeReturnedToService | BurnInFinished)
        because = payload.reason
        if isinstance(payload, BurnInFinished):
            because = "passed" if payload.passed else "failed"
        entry = NodeHistoryEntry(at=event.wall_at, what=_WHAT[event.kind], by=payload.by, because=because)
        entries.setdefault(payload.node, []).append(entry)
    return {
        node: NodeHistory(record=record, entries=tuple(entries.get(node, ())[-ENTRIES_MAX:]))
        for node, record in fold_nodes(kept).items()
    }


def quarantined(events: Iterable[Event]) -> dict[str, NodeRecord]:
    """Node -> its record, for nodes in quarantine."""
    return {node: record for node, record in fold_nodes(events).items() if record.quarantined}
