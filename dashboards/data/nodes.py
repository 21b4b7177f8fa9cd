"""Health of each node of the fleet, worst first, with the reason. Pure.

A node is lost if an open incident says so, its agent cannot be scraped, or every replica on it is lost; faulty if an
open incident or one of its GPUs reports broken hardware or network; suspect if an open incident names a replica on it
or one of its replicas is lost. A fatal XID marks a node until a burn-in on it has passed or an operator has returned it
to service. A healthy node with more than `OFTEN_TIMES` the fleet median of incidents in 30 days (and at least
`OFTEN_MIN`) is marked as frequently faulty. After the end of a run the health is the last that is known.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.recovery import BurnInFinished, NodeDrained, NodeQuarantined, NodeReturnedToService
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.text import in_words, utc
from rolecall.dashboards.data.hardware import FleetMetrics, XidOccurrence
from rolecall.dashboards.data.incident_titles import title
from rolecall.recovery.fleet_view import DEAD, FleetView, ReplicaView
from rolecall.recovery.incidents import Incident, IncidentState
from rolecall.recovery.nodes import NODE_KINDS, NodeRecord, fold_nodes
from rolecall.recovery.policy import leaves_node
from rolecall.views.observed_ranks import ObservedRank

HOUR, DAY, MONTH = 3600.0, 86400.0, 30 * 86400.0
OFTEN_TIMES = 3.0
OFTEN_MIN = 3
"""Two incidents in a month are not frequent, whatever the median."""
OFFENDERS_SHOWN = 8
REASON_MAX = 80
NAMED_MAX = 3
"""Lost replicas that a reason names."""


class NodeHealth(StrEnum):
    """Worst first."""

    LOST = "lost"
    FAULTY = "faulty"
    SUSPECT = "suspect"
    XID = "XID not cleared"
    QUARANTINED = "quarantined"
    OFTEN = "frequent faults"
    IDLE = "idle"
    HEALTHY = "healthy"


GLYPHS: Mapping[NodeHealth, str] = {
    NodeHealth.LOST: "✖",
    NodeHealth.FAULTY: "▲",
    NodeHealth.SUSPECT: "◆",
    NodeHealth.XID: "▼",
    NodeHealth.QUARANTINED: "■",
    NodeHealth.OFTEN: "△",
    NodeHealth.IDLE: "○",
    NodeHealth.HEALTHY: "●",
}
AT_THE_END = " at the end"
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
    ended: bool = False  # the run is over, and this was the health at its end

    @property
    def status(self) -> str:
        return f"{GLYPHS[self.health]} {self.health}{AT_THE_END if self.ended else ''}"


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


def observed_fleet(ranks: Sequence[ObservedRank], now: float) -> FleetView:
    """Where the replicas of a job run that rolecall only watches. On each node a replica serves if all its ranks there
    are known to be alive."""
    places: dict[tuple[str, str], list[ObservedRank]] = {}
    for rank in sorted(ranks, key=lambda r: (natural(r.replica), natural(r.node))):
        places.setdefault((rank.replica, rank.node), []).append(rank)
    views = []
    for (replica, node), here in places.items():
        dead = [r for r in here if not r.alive_at(now)]
        is_silent = bool(dead) and all(r.is_alive for r in dead)
        views.append(
            ReplicaView(
                replica=ReplicaId(replica), desired_incarnation=0, incarnation=0, node=NodeId(node),
                state=ReplicaState.LOST if dead else ReplicaState.SERVING,
                because=f"not seen for {age(now - max(r.seen_at for r in dead))}" if is_silent else "",
            )
        )  # fmt: skip
    return FleetView(replicas=tuple(views))


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


HEAT_NODES = 12
HEAT_DAYS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    unit: str  # of a column: day or hour
    columns: tuple[str, ...]  # day, or day and hour, in UTC, without gaps
    rows: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]  # node, and for each column: incidents, their classes


def heat(by_node: Mapping[str, Sequence[Incident]], names: Iterable[str], until: float) -> HeatMap:
    """Incidents of the last 31 days by node and day, or by hour if all lie within a day. Rows are the nodes of `names`
    with the most incidents, and of a small fleet all of them."""
    recent = {n: [i for i in found if i.opened_at > until - HEAT_DAYS * DAY] for n, found in by_node.items()}
    times = [i.opened_at for found in recent.values() for i in found]
    is_short = bool(times) and max(times) - min(times) < DAY
    form, width = ("%m-%d %H:00", HOUR) if is_short else ("%m-%d", DAY)
    starts = range(int(min(times) // width), int(max(times) // width) + 1) if times else range(0)
    worst = sorted(names, key=lambda n: (-len(recent.get(n, ())), natural(n)))[:HEAT_NODES]
    rows = []
    for node in worst:
        here: dict[int, list[str]] = {}
        for incident in recent.get(node, ()):
            classes = here.setdefault(int(incident.opened_at // width), [])
            classes.append(in_words(incident.diagnosis.fault_class))
        counted = ((len(here[s]), ", ".join(sorted({*here[s]}))) if s in here else (0, "") for s in starts)
        rows.append((node, tuple(counted)))
    columns = tuple(utc(s * width, form) for s in starts)
    return HeatMap(unit="hour" if is_short else "day", columns=columns, rows=tuple(rows))


def repeat_offenders(fleet: "FleetHealth", by_node: Mapping[str, Sequence[Incident]]) -> list[list[str]]:
    """Nodes with at least `OFTEN_MIN` incidents in 30 days, the most first: node, number, fleet median, classes."""
    found = sorted((r for r in fleet.rows if r.in_month >= OFTEN_MIN), key=lambda r: (-r.in_month, natural(r.node)))
    rows = []
    for row in found[:OFFENDERS_SHOWN]:
        counted = Counter(in_words(i.diagnosis.fault_class) for i in by_node.get(row.node, ()))
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
        known = tuple(sorted(seen.get(node, ()), key=lambda c: -(c.at or 0.0)))
        dead = tuple(r for r in here if (r.state is ReplicaState.LOST if ended else is_dead(r)))
        health, because = _health(
            node, here, dead, still_open, past.record, known, FleetMetrics() if ended else live, in_month, medians[2]
        )
        if health is NodeHealth.HEALTHY:
            because = _in_use_because([i for i in found if i.opened_at >= now - MONTH], past.record)
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
                codes=known,
                past=past,
                ended=ended,
            )
        )
    rows.sort(key=lambda r: (_ORDER.index(r.health), -r.in_month, natural(r.node)))
    return FleetHealth(rows=tuple(rows), median_hour=medians[0], median_day=medians[1], median_month=medians[2])


def is_dead(replica: ReplicaView) -> bool:
    """A standby that stopped was used up by a promotion."""
    is_used_up = is_standby(replica.replica) and replica.state is ReplicaState.STOPPED
    return replica.state in DEAD and not is_used_up


def _health(
    node: str,
    replicas: Sequence[ReplicaView],
    dead: Sequence[ReplicaView],
    still_open: Sequence[Incident],
    record: NodeRecord,
    codes: Sequence[XidOccurrence],
    live: FleetMetrics,
    in_month: int,
    median_month: float,
) -> tuple[NodeHealth, str]:
    lost = next((i for i in still_open if i.diagnosis.fault_class.spec.loses_node), None)
    if lost is not None:
        return NodeHealth.LOST, title(lost)
    if (live.agents or {}).get(node) is False:
        return NodeHealth.LOST, "its agent cannot be scraped by Prometheus"
    if dead and len(dead) == len(replicas):
        why = f" ({dead[0].because[:REASON_MAX]})" if dead[0].because else ""
        return NodeHealth.LOST, f"every replica on it is lost: {_named(dead)}{why}"
    broken = next((i for i in still_open if i.diagnosis.fault_class.spec.is_hardware), None)
    if broken is not None:
        return NodeHealth.FAULTY, title(broken)
    gpus = (live.lost_gpus or {}).get(node, ())
    if gpus:
        return NodeHealth.FAULTY, f"all NVML calls on GPU {', '.join(gpus)} fail"
    if still_open:
        return NodeHealth.SUSPECT, title(still_open[-1])
    if dead:
        return NodeHealth.SUSPECT, f"{_named(dead)} lost"
    if record.quarantined:
        return NodeHealth.QUARANTINED, f"quarantined by {record.quarantined_by}: {record.quarantined_because}"
    cleared_at = max((b.at for b in record.burn_ins if b.result.passed), default=0.0)
    cleared_at = max(cleared_at, record.returned_at or 0.0)
    fatal = next((c for c in codes if c.fatal and (c.at is None or c.at > cleared_at)), None)
    if fatal is not None:
        when = "" if fatal.at is None else f", {utc(fatal.at, '%m-%d %H:%M')} UTC"
        where = f" on GPU {fatal.gpu}" if fatal.gpu else ""
        return NodeHealth.XID, f"{fatal.name}{where}{when}"
    if in_month >= OFTEN_MIN and in_month > OFTEN_TIMES * median_month:
        return NodeHealth.OFTEN, f"{in_month} incidents in 30 days; the fleet median is {median_month:g}"
    if not replicas:
        return NodeHealth.IDLE, "no replica runs on it"
    return NodeHealth.HEALTHY, ""


def _in_use_because(found: Sequence[Incident], record: NodeRecord) -> str:
    """Why a node that was suspect is in use; empty if it was not. `found`: its incidents."""
    newest = max(found, key=lambda i: i.opened_at, default=None)
    if newest is None:
        return ""
    what = f"{title(newest)}: {str(newest.outcome or newest.state).replace('_', ' ')}"
    if record.returned_at is not None and record.returned_at > newest.opened_at:
        return f"{what}; {record.returned_by} returned the node to service"
    if any(b.result.passed and b.at > newest.opened_at for b in record.burn_ins):
        return f"{what}; the node passed a burn-in"
    if leaves_node(newest.diagnosis):
        return f"{what}; the node is not quarantined"
    return f"{what}; the fault was the replica's, not the node's"


def _named(replicas: Sequence[ReplicaView]) -> str:
    names = ", ".join(str(r.replica) for r in replicas[:NAMED_MAX])
    return f"{names} and {len(replicas) - NAMED_MAX} more" if len(replicas) > NAMED_MAX else names


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
