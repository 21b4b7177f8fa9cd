"""State of each node: a fold over node events. Pure except `known_nodes`.

No new replica is placed on a quarantined node; those that run there continue. A drained node is quarantined and its
replicas are requested to move. Both end when an operator returns the node to service.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rolecall.core.errors import CommandRefused
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import (
    BurnInCheck,
    BurnInFinished,
    NodeDrained,
    NodeQuarantined,
    NodeReturnedToService,
)
from rolecall.core.journal.payloads.run import RunStarted

K = EventKind
NodePayload = NodeQuarantined | NodeDrained | NodeReturnedToService | BurnInFinished
NODE_KINDS = (K.NODE_QUARANTINED, K.NODE_DRAINED, K.NODE_RETURNED_TO_SERVICE, K.BURN_IN_FINISHED)
BURN_INS_KEPT = 20
"""Per node, newest last."""
CHECKS_MAX = 64
"""Per burn-in: bounds what a faulty writer can store."""
TEXT_CHARS_MAX = 500
"""Per check's text."""
WATCHED_FLAG = "watched_nodes"
"""Flag of the journal: the nodes whose agents a watch of another system's job asks, separated by blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnIn:
    """Result of a burn-in: work with a known result, run on a node."""

    passed: bool  # no check failed; at least one was done
    seconds: float
    checks: tuple[BurnInCheck, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises CommandRefused: `values` is not a burn-in result."""
        try:
            checks = tuple(_check_from_dict(c) for c in values["checks"])[:CHECKS_MAX]
            passed = any(c.passed for c in checks) and all(c.passed is not False for c in checks)
            if bool(values["passed"]) != passed:
                raise ValueError(f"passed is {values['passed']!r}, but its checks give {passed}")
            return cls(passed=passed, seconds=float(values["seconds"]), checks=checks)
        except (KeyError, TypeError, ValueError) as e:
            raise CommandRefused(f"not a burn-in result: {e!r}") from None


def _check_from_dict(values: Mapping[str, Any]) -> BurnInCheck:
    passed = values["passed"]
    if not isinstance(passed, bool | None):
        raise TypeError(f"passed is {passed!r}")
    because = str(values.get("because", ""))[:TEXT_CHARS_MAX]
    return BurnInCheck(
        name=str(values["name"])[:64], passed=passed, because=because, values=dict(values.get("values") or {})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBurnIn:
    """A burn-in in the journal."""

    at: float  # wall seconds
    by: str
    result: BurnIn


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """Times are wall seconds; None: not in that state."""

    node: str
    quarantined_since: float | None = None
    quarantined_by: str = ""
    quarantined_because: str = ""
    drained_at: float | None = None
    drained_by: str = ""
    moved: tuple[str, ...] = ()  # incidents opened by its drain
    returned_at: float | None = None
    returned_by: str = ""
    burn_ins: tuple[RecordedBurnIn, ...] = ()  # newest last

    @property
    def quarantined(self) -> bool:
        return self.quarantined_since is not None


def fold_nodes(events: Iterable[Event]) -> dict[str, NodeRecord]:
    """All nodes with node events; other events are skipped."""
    nodes: dict[str, NodeRecord] = {}
    for event in events:
        payload = event.payload
        if isinstance(payload, NodePayload) and payload.node:
            before = nodes.get(payload.node) or NodeRecord(node=payload.node)
            nodes[payload.node] = _after(before, payload, event.wall_at)
    return nodes


def _after(before: NodeRecord, payload: NodePayload, at: float) -> NodeRecord:
    match payload:
        case NodeQuarantined():
            if before.quarantined:
                return before  # the first quarantine has the reason
            return replace(
                before,
                quarantined_since=at,
                quarantined_by=payload.by,
                quarantined_because=payload.because,
                returned_at=None,
            )
        case NodeDrained():
            return replace(before, drained_at=at, drained_by=payload.by, moved=(*before.moved, *payload.incidents))
        case NodeReturnedToService():
            return NodeRecord(node=before.node, returned_at=at, returned_by=payload.by, burn_ins=before.burn_ins)
        case BurnInFinished():
            result = BurnIn(passed=payload.passed, seconds=payload.seconds, checks=payload.checks)
            found = RecordedBurnIn(at=at, by=payload.by, result=result)
            return replace(before, burn_ins=(*before.burn_ins, found)[-BURN_INS_KEPT:])


def returned_nodes(journal: Journal) -> dict[str, int]:
    """Node -> journal line where it was last returned to service."""
    returned = journal.events(kinds=[K.NODE_RETURNED_TO_SERVICE], damaged=[])
    return {e.as_(NodeReturnedToService).node: e.seq for e in returned}


def known_nodes(journal: Journal) -> set[str]:
    """Every node that the run started with, that is watched, or that a replica was ever placed on."""
    started = journal.last(K.RUN_STARTED)
    found = set(started.as_(RunStarted).nodes) if started else set()
    found |= set((journal.flag(WATCHED_FLAG) or "").split())
    found |= {str(d.node) for d in journal.desired().values() if not d.lent}
    return found | {str(a.node) for a in journal.actual().values()}
