"""What a person can say about a node: nothing new is placed there, all of it is moved away, it may take replicas again.

Draining acts no more than any other word does: it quarantines the node, so that nothing is placed there, and opens one
request a replica. Each goes through the guards and limits like `rolecall replace`. Said again after a death in the
middle, it says what is missing and nothing twice.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.errors import CommandRefused, InvalidId
from rolecall.core.ids import checked_id
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import BurnInFinished, NodeDrained, NodeQuarantined, NodeReturnedToService
from rolecall.core.nodes import quarantined_nodes
from rolecall.recovery.fleet import FleetView, ReplicaView, fleet_view
from rolecall.recovery.incident_store import IncidentProjection
from rolecall.recovery.nodes import NODE_KINDS, BurnIn, NodeRecord, fold_nodes, known_nodes
from rolecall.recovery.operators.requests import ask_replacement, handling_incident, watch_hint
from rolecall.recovery.operators.run_location import RunLocation, checked_name, checked_reason, journal_of, opened

K = EventKind
REPLICAS_PER_DRAIN_MAX = 64
"""Incidents that one word may open."""


def quarantine(place: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Nothing is placed on `node` any more; what runs there goes on.

    Raises:
        CommandRefused: there is no such node, or it is quarantined already.
    """
    checked_name(by)
    checked_reason(because)
    with opened(place, clock) as (journal, book):
        record = _record(journal, book, node)
        if record.quarantined:
            raise CommandRefused(
                f"{node} is quarantined already, by {record.quarantined_by}: {record.quarantined_because}"
            )
        journal.append(NodeQuarantined(node=node, by=by, because=because))
    return f"{node} is quarantined: nothing is placed there until `rolecall node return {node}`"


def return_node(place: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Ends a quarantine, whoever began it.

    Raises:
        CommandRefused: the node is not quarantined.
    """
    checked_name(by)
    checked_reason(because)
    with opened(place, clock) as (journal, book):
        if not _record(journal, book, node).quarantined:
            raise CommandRefused(f"{node} is not quarantined")
        journal.append(NodeReturnedToService(node=node, by=by, because=because))
    return f"{node} is returned: replicas may be placed there"


def drain(place: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Quarantines `node`, and asks for each replica there to be replaced on another one.

    Raises:
        CommandRefused: there is no such node.
    """
    checked_name(by)
    checked_reason(because)
    with opened(place, clock) as (journal, book):
        return drained(journal, book, node, by, because)


def drained(journal: Journal, book: IncidentProjection, node: str, by: str, because: str) -> str:
    """`drain`, on an open journal."""
    if not _record(journal, book, node).quarantined:
        journal.append(NodeQuarantined(node=node, by=by, because=f"drained: {because}"))
    desired = journal.desired()
    fleet = fleet_view(desired, journal.current())
    there = [v for v in fleet.replicas if node in (v.node, _comes_to(v, desired[v.replica].node))]
    asked: dict[str, str] = {}
    known: list[str] = []
    for view in there[:REPLICAS_PER_DRAIN_MAX]:
        deals = handling_incident(book, view.replica)
        if deals is None:
            asked[view.replica] = ask_replacement(journal, book, view, by, f"{node} is drained: {because}")
        else:
            known.append(f"{view.replica} ({deals.incident_id} deals with it: {deals.state})")
    journal.append(NodeDrained(node=node, by=by, because=because, incidents=tuple(asked.values())))
    left = [str(v.replica) for v in there[REPLICAS_PER_DRAIN_MAX:]]
    return _outcome_text(node, asked, known, left, _no_spare_node(fleet, journal, node)) + (
        watch_hint(journal) if asked else ""
    )


def _comes_to(view: ReplicaView, wanted: str) -> str:
    """Where its next incarnation is about to start; empty when the desired one is there."""
    return wanted if view.desired_incarnation > view.incarnation else ""


def _no_spare_node(fleet: FleetView, journal: Journal, node: str) -> bool:
    return fleet.spare_node(frozenset({node}) | quarantined_nodes(journal)) is None


def _outcome_text(node: str, asked: Mapping[str, str], known: list[str], left: list[str], nowhere: bool) -> str:
    parts = [f"{node} is drained: nothing is placed there until `rolecall node return {node}`"]
    if asked:
        moved = ", ".join(f"{replica} ({name})" for replica, name in asked.items())
        parts.append(f"moved when the guards pass: {moved}")
    if known:
        parts.append(f"not asked for twice: {', '.join(known)}")
    if left:
        parts.append(f"say it again for {len(left)} more: {', '.join(left[:5])}")
    if asked and nowhere:
        parts.append("no other node can take them: they stay, and a person is called")
    if not asked and not known:
        parts.append("nothing runs there")
    return "; ".join(parts)


def burned_in(place: RunLocation, node: str, result: Mapping[str, Any], by: str, clock: Clock | None = None) -> str:
    """Records what a burn-in of `node` found. The node need not be part of the run yet.

    Raises:
        CommandRefused: `node` is no name of a node, or `result` is no result.
    """
    checked_name(by)
    found = BurnIn.from_dict(result)
    _named(node)
    with journal_of(place, clock) as journal:
        journal.append(
            BurnInFinished(node=node, by=by, passed=found.passed, seconds=found.seconds, checks=found.checks)
        )
    return f"the burn-in of {node} {'passed' if found.passed else 'FAILED'}, and is recorded"


def nodes(place: RunLocation, clock: Clock | None = None) -> list[dict[str, Any]]:
    """Every node with its replicas, what was said of it, and the incidents that name it; repeat offenders first.

    Requests of people and diagnoses that were marked wrong count against no node. Plain values.
    """
    with opened(place, clock) as (journal, book):
        records = fold_nodes(journal.events(kinds=NODE_KINDS))
        fleet = fleet_view(journal.desired(), journal.current())
        known = known_nodes(journal)
    against: dict[str, list[str]] = {}
    for incident in book.incidents.values():
        wrong = incident.mark is not None and not incident.mark.right
        if not incident.requested_by_operator and not wrong:
            for node in sorted({s.node for s in incident.diagnosis.suspects if s.node}):
                against.setdefault(node, []).append(incident.incident_id)
    every = {*known, *records, *against}
    rows = [_row(records.get(n) or NodeRecord(node=n), fleet, against.get(n, [])) for n in every]
    return sorted(rows, key=lambda row: (-row["num_incidents"], row["node"]))


def _row(record: NodeRecord, fleet: FleetView, against: list[str]) -> dict[str, Any]:
    return {
        **asdict(record),
        "quarantined": record.quarantined,
        "replicas": [
            {"replica": r.replica, "incarnation": r.incarnation, "state": str(r.state) if r.state else None}
            for r in fleet.replicas
            if r.node == record.node
        ],
        "num_incidents": len(against),
        "incidents": against,
    }


def _record(journal: Journal, book: IncidentProjection, node: str) -> NodeRecord:
    """
    Raises:
        CommandRefused: there is no such node.
    """
    _named(node)
    records = fold_nodes(journal.events(kinds=NODE_KINDS))
    known = known_nodes(journal) | records.keys()
    known |= {str(s.node) for i in book.incidents.values() for s in i.diagnosis.suspects if s.node}
    if node not in known:
        raise CommandRefused(f"{node} is no node of this run: {', '.join(sorted(known)[:50]) or 'none is known'}")
    return records.get(node) or NodeRecord(node=node)


def _named(node: str) -> None:
    try:
        checked_id(node, "node")
    except InvalidId as e:
        raise CommandRefused(str(e)) from None
