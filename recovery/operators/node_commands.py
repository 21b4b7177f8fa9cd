"""Operator commands about nodes: quarantine, drain, return to service, record a burn-in; and the list of nodes.

Draining quarantines the node and opens one replacement request per replica there. Each request passes the guards and
limits like `rolecall replace`. Repeating a drain that was interrupted adds only what is missing.
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
from rolecall.recovery.fleet import FleetView, fleet_view
from rolecall.recovery.incident_store import IncidentProjection
from rolecall.recovery.nodes import NODE_KINDS, BurnIn, NodeRecord, fold_nodes, known_nodes
from rolecall.recovery.operators.requests import handling_incident, request_replacement, watch_hint
from rolecall.recovery.operators.run_location import RunLocation, checked_name, checked_reason, journal_of, opened

K = EventKind
REPLICAS_PER_DRAIN_MAX = 64
"""Incidents that one command may open."""


def quarantine(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """No new replica is placed on `node`; those that run there continue.

    Raises:
        CommandRefused: there is no such node, or it is already quarantined.
    """
    checked_name(by)
    checked_reason(because)
    with opened(location, clock) as (journal, projection):
        record = _record(journal, projection, node)
        if record.quarantined:
            raise CommandRefused(
                f"{node} is already quarantined by {record.quarantined_by}: {record.quarantined_because}"
            )
        journal.append(NodeQuarantined(node=node, by=by, because=because))
    return f"{node} is quarantined: no replica is placed there until `rolecall node return {node}`"


def return_node(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Ends a quarantine, whoever set it.

    Raises:
        CommandRefused: the node is not quarantined.
    """
    checked_name(by)
    checked_reason(because)
    with opened(location, clock) as (journal, projection):
        if not _record(journal, projection, node).quarantined:
            raise CommandRefused(f"{node} is not quarantined")
        journal.append(NodeReturnedToService(node=node, by=by, because=because))
    return f"{node} is back in service: replicas may be placed there"


def drain(location: RunLocation, node: str, by: str, because: str, clock: Clock | None = None) -> str:
    """Quarantines `node` and requests that each replica there is replaced on another node.

    Raises:
        CommandRefused: there is no such node.
    """
    checked_name(by)
    checked_reason(because)
    with opened(location, clock) as (journal, projection):
        return drain_node(journal, projection, node, by, because)


def drain_node(journal: Journal, projection: IncidentProjection, node: str, by: str, because: str) -> str:
    """`drain` on an open journal."""
    if not _record(journal, projection, node).quarantined:
        journal.append(NodeQuarantined(node=node, by=by, because=f"drained: {because}"))
    desired = journal.desired()
    fleet = fleet_view(desired, journal.current())
    affected = [  # running there, or about to start there
        view
        for view in fleet.replicas
        if view.node == node or (view.desired_incarnation > view.incarnation and desired[view.replica].node == node)
    ]
    requested: list[str] = []
    handled: list[str] = []
    incident_ids: list[str] = []
    for view in affected[:REPLICAS_PER_DRAIN_MAX]:
        handling = handling_incident(projection, view.replica)
        if handling is None:
            name = request_replacement(journal, projection, view, by, f"{node} is drained: {because}")
            incident_ids.append(name)
            requested.append(f"{view.replica} ({name})")
        else:
            handled.append(f"{view.replica} ({handling.incident_id}, {handling.state})")
    journal.append(NodeDrained(node=node, by=by, because=because, incidents=tuple(incident_ids)))
    parts = [f"{node} is drained: no replica is placed there until `rolecall node return {node}`"]
    if requested:
        parts.append(f"moved when the guards pass: {', '.join(requested)}")
    if handled:
        parts.append(f"already handled: {', '.join(handled)}")
    left = [str(view.replica) for view in affected[REPLICAS_PER_DRAIN_MAX:]]
    if left:
        parts.append(f"repeat the command for {len(left)} more: {', '.join(left[:5])}")
    if requested and fleet.spare_node(frozenset({node}) | quarantined_nodes(journal)) is None:
        parts.append("no other node can take them: they stay, and on-call is paged")
    if not affected:
        parts.append("no replica runs there")
    return "; ".join(parts) + (watch_hint(journal) if requested else "")


def record_burn_in(
    location: RunLocation, node: str, result: Mapping[str, Any], by: str, clock: Clock | None = None
) -> str:
    """Records the result of a burn-in of `node`. The node need not be part of the run yet.

    Raises:
        CommandRefused: `node` is not a valid node name, or `result` not a burn-in result.
    """
    checked_name(by)
    burn_in = BurnIn.from_dict(result)
    _check_node_name(node)
    with journal_of(location, clock) as journal:
        journal.append(
            BurnInFinished(node=node, by=by, passed=burn_in.passed, seconds=burn_in.seconds, checks=burn_in.checks)
        )
    return f"recorded: burn-in of {node} {'passed' if burn_in.passed else 'FAILED'}"


def nodes(location: RunLocation, clock: Clock | None = None) -> list[dict[str, Any]]:
    """Every node with its replicas, state and the incidents that name it, as plain values; most incidents first.

    Replacement requests and diagnoses reviewed as wrong do not count.
    """
    with opened(location, clock) as (journal, projection):
        records = fold_nodes(journal.events(kinds=NODE_KINDS))
        fleet = fleet_view(journal.desired(), journal.current())
        known = known_nodes(journal)
    incident_ids: dict[str, list[str]] = {}
    for incident in projection.incidents.values():
        wrong = incident.mark is not None and not incident.mark.right
        if not incident.requested_by_operator and not wrong:
            for node in sorted({s.node for s in incident.diagnosis.suspects if s.node}):
                incident_ids.setdefault(node, []).append(incident.incident_id)
    every = {*known, *records, *incident_ids}
    rows = [_row(records.get(n) or NodeRecord(node=n), fleet, incident_ids.get(n, [])) for n in every]
    return sorted(rows, key=lambda row: (-row["num_incidents"], row["node"]))


def _row(record: NodeRecord, fleet: FleetView, incident_ids: list[str]) -> dict[str, Any]:
    return {
        **asdict(record),
        "quarantined": record.quarantined,
        "replicas": [
            {"replica": r.replica, "incarnation": r.incarnation, "state": str(r.state) if r.state else None}
            for r in fleet.replicas
            if r.node == record.node
        ],
        "num_incidents": len(incident_ids),
        "incidents": incident_ids,
    }


def _record(journal: Journal, projection: IncidentProjection, node: str) -> NodeRecord:
    """
    Raises:
        CommandRefused: there is no such node.
    """
    _check_node_name(node)
    records = fold_nodes(journal.events(kinds=NODE_KINDS))
    known = known_nodes(journal) | records.keys()
    known |= {str(s.node) for i in projection.incidents.values() for s in i.diagnosis.suspects if s.node}
    if node not in known:
        raise CommandRefused(f"{node} is not a node of this run: {', '.join(sorted(known)[:50]) or 'none known'}")
    return records.get(node) or NodeRecord(node=node)


def _check_node_name(node: str) -> None:
    try:
        checked_id(node, "node")
    except InvalidId as e:
        raise CommandRefused(str(e)) from None
