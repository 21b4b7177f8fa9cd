"""Health of each node of the fleet, worst first, with the reason. Pure.

A node is lost if an open incident says so or its agent cannot be scraped; faulty if an open incident or one of its GPUs
reports broken hardware or network; suspect if an open incident names a replica on it. A healthy node with more than
`OFTEN_TIMES` the fleet median of incidents in 30 days (and at least `OFTEN_MIN`) is marked as frequently faulty. After
the end of a run no node is called healthy: nothing observes it for this run.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import BurnInFinished, NodeDrained, NodeQuarantined, NodeReturnedToService
from rolecall.core.membership import ReplicaState
from rolecall.core.text import utc
from rolecall.dashboards.data.hardware import FleetMetrics, XidOccurrence
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.incidents import Incident, IncidentState
from rolecall.recovery.nodes import NODE_KINDS, NodeRecord, fold_nodes
from rolecall.views.observed_ranks import ObservedRank

HOUR, DAY, MONTH = 3600.0, 86400.0, 30 * 86400.0
OFTEN_TIMES = 3.0
OFTEN_MIN = 3
"""Two incidents in a month are not frequent, whatever the median."""
OFFENDERS_SHOWN = 8


class NodeHealth(StrEnum):
    """Worst first."""

    LOST = "lost"
    FAULTY = "faulty"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    OFTEN = "frequent faults"
    ENDED = "run ended"
    IDLE = "idle"
    HEALTHY = "healthy"


GLYPHS: Mapping[NodeHealth, str] = {
    NodeHealth.LOST: "✖",
    NodeHealth.FAULTY: "▲",
    NodeHealth.SUSPECT: "◆",
    NodeHealth.QUARANTINED: "■",
    NodeHealth.OFTEN: "△",
    NodeHealth.ENDED: "·",
    NodeHealth.IDLE: "○",
    NodeHealth.HEALTHY: "●",
}
_ORDER = tuple(NodeHealth)
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
    at: float  # wall seconds
    what: str
    by: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    record: NodeRecord
    entries: tuple[NodeHistoryEntry, ...] = ()  # newest last


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """`changed_at`: latest change of a replica on it, wall seconds."""

    node: str
    health: NodeHealth
    because: str
    replicas: tuple[ReplicaView, ...]
    open_incidents: tuple[str, ...]
    in_hour: int
    in_day: int
    in_month: int
    changed_at: float | None
    codes: tuple[XidOccurrence, ...]
    past: NodeHistory

    @property
    def status(self) -> str:
        return f"{GLYPHS[self.health]} {self.health}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHealth:
    """`median_*`: over all nodes, including those without incidents."""

    rows: tuple[NodeRow, ...]  # worst first
    median_hour: float
    median_day: float
    median_month: float

    def find(self, node: str) -> NodeRow | None:
        return next((r for r in self.rows if r.node == node), None)

    def count(self, health: NodeHealth) -> int:
        return sum(r.health is health for r in self.rows)


def observed_fleet(ranks: Sequence[ObservedRank]) -> FleetView:
    """Where the replicas of a job run that rolecall only watches."""
    places = sorted({(r.replica, r.node) for r in ranks}, key=lambda p: (natural(p[0]), natural(p[1])))
    alive = {(r.replica, r.node) for r in ranks if r.is_alive}
    return FleetView(
        replicas=tuple(
            ReplicaView(
                replica=ReplicaId(replica), desired_incarnation=0, incarnation=0, node=NodeId(node),
                state=ReplicaState.SERVING if (replica, node) in alive else ReplicaState.LOST,
            )
            for replica, node in places
        )
    )  # fmt: skip


def node_names(fleet: FleetView, away: Iterable[str] = ()) -> list[str]:
    """All known nodes in natural order: node-2 before node-10."""
    return sorted({*(str(r.node) for r in fleet.replicas if r.node), *away}, key=natural)


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that compares digits as numbers."""
    parts = re.split(r"([0-9]+)", name)  # every second part is a number
    return tuple((0, int(p)) if n % 2 else (1, p) for n, p in enumerate(parts) if p)


def incidents_by_node(incidents: Iterable[Incident]) -> dict[str, list[Incident]]:
    """Incidents by suspected node. Operator requests and diagnoses reviewed as wrong do not count."""
    found: dict[str, list[Incident]] = {}
    for i in incidents:
        if not i.requested_by_operator and (i.review is None or i.review.right):
            for node in {str(s.node) for s in i.diagnosis.suspects if s.node}:
                found.setdefault(node, []).append(i)
    return found


HEAT_NODES = 20
HEAT_COLUMNS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    node: str
    start: str  # day, or day and hour, in UTC
    num: int
    classes: str  # of its incidents


def heat(by_node: Mapping[str, Sequence[Incident]], until: float) -> tuple[tuple[HeatCell, ...], str]:
    """Incidents by node and day of the last 31 days (by hour if all lie within a day), of the nodes with the most; and
    the word for a column."""
    recent = {n: [i for i in found if i.opened_at > until - HEAT_COLUMNS * DAY] for n, found in by_node.items()}
    times = [i.opened_at for found in recent.values() for i in found]
    is_short = bool(times) and max(times) - min(times) < DAY
    form = "%m-%d %H:00" if is_short else "%m-%d"
    worst = sorted((n for n in recent if recent[n]), key=lambda n: (-len(recent[n]), natural(n)))[:HEAT_NODES]
    cells = []
    for node in worst:
        columns: dict[str, list[Incident]] = {}
        for incident in recent[node]:
            columns.setdefault(utc(incident.opened_at, form), []).append(incident)
        for start, here in sorted(columns.items()):
            classes = sorted({str(i.diagnosis.fault_class).replace("_", " ") for i in here})
            cells.append(HeatCell(node=node, start=start, num=len(here), classes=", ".join(classes)))
    return tuple(cells), "hour" if is_short else "day"


def repeat_offenders(fleet: "FleetHealth", by_node: Mapping[str, Sequence[Incident]]) -> list[list[str]]:
    """Nodes with at least `OFTEN_MIN` incidents in 30 days, the most first: node, number, fleet median, classes."""
    found = sorted((r for r in fleet.rows if r.in_month >= OFTEN_MIN), key=lambda r: (-r.in_month, natural(r.node)))
    rows = []
    for row in found[:OFFENDERS_SHOWN]:
        counted = Counter(str(i.diagnosis.fault_class).replace("_", " ") for i in by_node.get(row.node, ()))
        classes = ", ".join(f"{name} {num}" for name, num in counted.most_common(3))
        rows.append([row.node, str(row.in_month), f"{fleet.median_month:g}", classes])
    return rows


def counted_until(incidents: Iterable[Incident], fleet: FleetView, ended: bool, now: float) -> float:
    """End of the counting window: now, or the last known time of a run that has ended."""
    if not ended:
        return now
    times = [t for i in incidents for t in (i.opened_at, i.closed_at or 0.0)]
    return min(now, max([*times, *(r.changed_at for r in fleet.replicas)], default=now))


def age(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 d`."""
    for size, unit in ((DAY, "d"), (HOUR, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def fleet_rows(
    fleet: FleetView,
    by_node: Mapping[str, Sequence[Incident]],
    pasts: Mapping[str, NodeHistory],
    codes: Sequence[XidOccurrence],
    live: FleetMetrics,
    now: float,
    idle: Iterable[str] = (),
    *,
    ended: bool = False,
) -> FleetHealth:
    """`by_node`: from `incidents_by_node`. `now`: wall seconds. `idle`: all nodes of the run. Nodes of other runs,
    which Prometheus may know, are left out. `ended`: the run is over, so its nodes are observed no more."""
    replicas: dict[str, list[ReplicaView]] = {}
    for r in fleet.replicas:
        replicas.setdefault(str(r.node), []).append(r)
    seen: dict[str, list[XidOccurrence]] = {}
    for code in (*codes, *live.codes):
        seen.setdefault(code.node, []).append(code)
    names = {*replicas, *by_node, *pasts, *idle} - {""}
    counts = {
        n: tuple(sum(i.opened_at >= now - s for i in by_node.get(n, ())) for s in (HOUR, DAY, MONTH)) for n in names
    }
    medians = [statistics.median(c[k] for c in counts.values()) if counts else 0.0 for k in range(3)]
    rows = []
    for node in names:
        here, found = tuple(replicas.get(node, ())), by_node.get(node, ())
        past = pasts.get(node) or NodeHistory(record=NodeRecord(node=node))
        in_hour, in_day, in_month = counts[node]
        still_open = [i for i in found if i.state is not IncidentState.CLOSED]
        health, because = _health(
            node, here, still_open, past.record, FleetMetrics() if ended else live, in_month, medians[2]
        )
        if ended and health in (NodeHealth.IDLE, NodeHealth.HEALTHY):
            health, because = NodeHealth.ENDED, "the run has ended: its present state is unknown"
        rows.append(
            NodeRow(
                node=node,
                health=health,
                because=because,
                replicas=here,
                open_incidents=tuple(i.incident_id for i in still_open),
                in_hour=in_hour,
                in_day=in_day,
                in_month=in_month,
                changed_at=max((r.changed_at for r in here if r.changed_at), default=None),
                codes=tuple(sorted(seen.get(node, ()), key=lambda c: -(c.at or 0.0))),
                past=past,
            )
        )
    rows.sort(key=lambda r: (_ORDER.index(r.health), -r.in_month, natural(r.node)))
    return FleetHealth(rows=tuple(rows), median_hour=medians[0], median_day=medians[1], median_month=medians[2])


def _health(
    node: str,
    replicas: Sequence[ReplicaView],
    still_open: Sequence[Incident],
    record: NodeRecord,
    live: FleetMetrics,
    in_month: int,
    median_month: float,
) -> tuple[NodeHealth, str]:
    lost = next((i for i in still_open if i.diagnosis.fault_class.spec.loses_node), None)
    if lost is not None:
        return NodeHealth.LOST, lost.diagnosis.because
    if (live.agents or {}).get(node) is False:
        return NodeHealth.LOST, "its agent cannot be scraped by Prometheus"
    broken = next((i for i in still_open if i.diagnosis.fault_class.spec.is_hardware), None)
    if broken is not None:
        return NodeHealth.FAULTY, broken.diagnosis.because
    gpus = (live.lost_gpus or {}).get(node, ())
    if gpus:
        return NodeHealth.FAULTY, f"all NVML calls on GPU {', '.join(gpus)} fail"
    if still_open:
        return NodeHealth.SUSPECT, still_open[-1].diagnosis.because
    if record.quarantined:
        return NodeHealth.QUARANTINED, f"quarantined by {record.quarantined_by}: {record.quarantined_because}"
    if in_month >= OFTEN_MIN and in_month > OFTEN_TIMES * median_month:
        return NodeHealth.OFTEN, f"{in_month} incidents in 30 days; the fleet median is {median_month:g}"
    if not replicas:
        return NodeHealth.IDLE, "no replica runs on it"
    return NodeHealth.HEALTHY, ""


def pasts(events: Iterable[Event]) -> dict[str, NodeHistory]:
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
    return {node: record for node, record in fold_nodes(events).items() if record.quarantined}
