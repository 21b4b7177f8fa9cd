"""What is known of each node: a fold over node events, as an incident is one over its own. Pure but for `known_nodes`.

A node that is quarantined takes nothing new, and what runs there goes on; a drained one was quarantined, and its
replicas were asked to move. Both end when a person returns it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rolecall.core.errors import CommandRefused
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import (
    BurnInCheck,
    BurnInFinished,
    NodeDrained,
    NodeQuarantined,
    NodeReturnedToService,
    RunStarted,
)

K = EventKind
NODE_KINDS = (K.NODE_QUARANTINED, K.NODE_DRAINED, K.NODE_RETURNED_TO_SERVICE, K.BURN_IN_FINISHED)
BURN_INS_KEPT = 20
"""Of one node: what it did a year ago says little."""
CHECKS_MAX = 64
"""Of one burn-in, against a writer that never ends."""
TEXT_CHARS_MAX = 500
"""Of one check's sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnIn:
    """A node was worked hard on purpose, and its answers compared."""

    passed: bool  # no check failed; at least one was done
    seconds: float
    checks: tuple[BurnInCheck, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """
        Raises:
            CommandRefused: it is none.
        """
        try:
            checks = tuple(_check_from_dict(c) for c in d["checks"])[:CHECKS_MAX]
            passed = any(c.passed for c in checks) and all(c.passed is not False for c in checks)
            if bool(d["passed"]) != passed:
                raise ValueError(f"passed is {d['passed']!r}, and its checks say {passed}")
            return cls(passed=passed, seconds=float(d["seconds"]), checks=checks)
        except (KeyError, TypeError, ValueError) as e:
            raise CommandRefused(f"this is no result of a burn-in: {e!r}") from None


def _check_from_dict(d: Mapping[str, Any]) -> BurnInCheck:
    passed = d["passed"]
    if not isinstance(passed, bool | None):
        raise TypeError(f"passed is {passed!r}")
    because = str(d.get("because", ""))[:TEXT_CHARS_MAX]
    return BurnInCheck(name=str(d["name"])[:64], passed=passed, because=because, values=dict(d.get("values") or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBurnIn:
    """A burn-in in the journal."""

    at: float  # wall seconds
    by: str
    result: BurnIn


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """Times are wall seconds; None: it is not so."""

    node: str
    quarantined_since: float | None = None
    quarantined_by: str = ""
    quarantined_because: str = ""
    drained_at: float | None = None
    drained_by: str = ""
    moved: tuple[str, ...] = ()  # incidents that its draining opened
    returned_at: float | None = None
    returned_by: str = ""
    burn_ins: tuple[RecordedBurnIn, ...] = ()  # newest last

    @property
    def quarantined(self) -> bool:
        return self.quarantined_since is not None


def fold_nodes(events: Iterable[Event]) -> dict[str, NodeRecord]:
    """All nodes of which something was said. Events of other things, and those that name no node, are skipped."""
    nodes: dict[str, NodeRecord] = {}
    for event in events:
        said = event.payload
        if isinstance(said, NodeQuarantined | NodeDrained | NodeReturnedToService | BurnInFinished) and said.node:
            nodes[said.node] = _after(nodes.get(said.node) or NodeRecord(node=said.node), said, event.wall_at)
    return nodes


def _after(
    before: NodeRecord, said: NodeQuarantined | NodeDrained | NodeReturnedToService | BurnInFinished, at: float
) -> NodeRecord:
    match said:
        case NodeQuarantined():
            if before.quarantined:
                return before  # who said it first is who knows why
            return replace(
                before,
                quarantined_since=at,
                quarantined_by=said.by,
                quarantined_because=said.because,
                returned_at=None,
            )
        case NodeDrained():
            return replace(before, drained_at=at, drained_by=said.by, moved=(*before.moved, *said.incidents))
        case NodeReturnedToService():
            return NodeRecord(node=before.node, returned_at=at, returned_by=said.by, burn_ins=before.burn_ins)
        case BurnInFinished():
            result = BurnIn(passed=said.passed, seconds=said.seconds, checks=said.checks)
            found = RecordedBurnIn(at=at, by=said.by, result=result)
            return replace(before, burn_ins=(*before.burn_ins, found)[-BURN_INS_KEPT:])


def known_nodes(journal: Journal) -> set[str]:
    """Every node that the run began with, or that a replica was ever on."""
    started = journal.last(K.RUN_STARTED)
    found = set(started.as_(RunStarted).nodes) if started else set()
    found |= {str(d.node) for d in journal.desired().values()}
    return found | {str(a.node) for a in journal.actual().values()}
