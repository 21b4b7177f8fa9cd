"""The fleet as policy and guards see it: desired and actual state, one frozen row per replica, JSON both ways."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rolecall.core.errors import JournalCorrupt
from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import RunStarted
from rolecall.core.membership import STANDBY_ROLES, Actual, Desired, ReplicaState, hybrid_partner

LIVING = (ReplicaState.READY, ReplicaState.SERVING)
DEAD = (ReplicaState.LOST, ReplicaState.STOPPED)
HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    replica: ReplicaId
    desired_incarnation: int
    incarnation: int  # newest one reported by the runtime; 0: none yet
    state: ReplicaState | None
    node: NodeId  # of the newest incarnation; the desired node before there is one
    changed_at: float = 0.0  # wall seconds of the last change of `state`
    because: str = ""
    started: bool = False  # the newest incarnation has been ready, whatever became of it
    partner: ReplicaId | None = None  # the other replica of its hybrid, which is replaced with it

    @property
    def role(self) -> str:
        return split_replica(self.replica)[0]

    @property
    def unit(self) -> ReplicaId:
        """Name of what is replaced at once: of a hybrid that of its trainer."""
        return max(self.replica, self.partner or self.replica)

    @property
    def kind_of_unit(self) -> str:
        """What a restart of its role restarts."""
        return HYBRID if self.partner else self.role

    @property
    def living(self) -> bool:
        """The desired incarnation is running and can be given work."""
        return self.incarnation >= self.desired_incarnation and self.state in LIVING


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    replicas: tuple[ReplicaView, ...]  # sorted by name

    def find(self, replica: str) -> ReplicaView | None:
        return next((r for r in self.replicas if r.replica == replica), None)

    def unit_of(self, replica: str) -> str:
        found = self.find(replica)
        return found.unit if found is not None else replica

    def of_role(self, role: str) -> tuple[ReplicaView, ...]:
        return tuple(r for r in self.replicas if r.role == role)

    def standbys(self) -> tuple[ReplicaView, ...]:
        """Standbys that are ready to replace a replica."""
        return tuple(r for r in self.replicas if r.role in STANDBY_ROLES and r.living)

    def spare_node(self, avoid: frozenset[str], taken: Sequence[str] = ()) -> NodeId | None:
        """A node for a replica that must move: a standby's if there is one, else the one with the fewest living
        replicas. `taken`: nodes just chosen for other replicas."""
        standby_nodes = sorted(r.node for r in self.standbys() if r.node not in avoid and r.node not in taken)
        if standby_nodes:
            return standby_nodes[0]
        return _emptiest((r.node for r in self.replicas if r.living and r.node not in avoid), taken)

    def restart_node(self, avoid: frozenset[str], taken: Sequence[str] = ()) -> NodeId | None:
        """The same for a replica that is restarted: standbys stay where they are, so it gets the node with the fewest
        other replicas. These need not be living, because the restart ends them too."""
        places = (
            r.node
            for r in self.replicas
            if r.role not in STANDBY_ROLES and r.state not in (None, ReplicaState.LOST) and r.node not in avoid
        )
        return _emptiest(places, taken)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(r), "state": str(r.state) if r.state else None} for r in self.replicas]
        return {"replicas": [{k: v for k, v in row.items() if k != "partner" or v} for row in rows]}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        rows = (ReplicaView(**{**r, "state": ReplicaState(r["state"]) if r["state"] else None}) for r in d["replicas"])
        return cls(replicas=tuple(rows))


def _emptiest(places: Iterable[NodeId], taken: Sequence[str]) -> NodeId | None:
    """Of the nodes of some replicas the one with the fewest of them, those of `taken` included."""
    num_replicas = Counter(places)
    return min(num_replicas, key=lambda node: (num_replicas[node] + taken.count(node), node), default=None)


def num_hybrids(journal: Journal) -> int:
    """Of the run. 0 if the line that says so cannot be read: each replica is then replaced on its own."""
    try:
        started = journal.last(EventKind.RUN_STARTED)
    except JournalCorrupt:
        return 0
    return started.as_(RunStarted).num_hybrids if started is not None else 0


def fleet_of(journal: Journal) -> FleetView:
    """As it is now."""
    return fleet_view(journal.desired(), journal.current(), num_hybrids(journal))


def fleet_view(
    desired: Mapping[ReplicaId, Desired], current: Mapping[ReplicaId, Actual], hybrids: int = 0
) -> FleetView:
    """Joins desired and actual state. A replica that is no longer desired is left out. `hybrids`: their number."""
    rows = []
    for replica in sorted(desired):
        wanted, actual = desired[replica], current.get(replica)
        partner = hybrid_partner(replica, hybrids)
        rows.append(
            ReplicaView(
                replica=replica,
                desired_incarnation=wanted.incarnation,
                incarnation=actual.incarnation if actual else 0,
                state=actual.state if actual else None,
                node=actual.node if actual else wanted.node,
                changed_at=actual.changed_at if actual else 0.0,
                because=actual.because if actual else "",
                started=bool(actual and actual.pid),
                partner=partner if partner in desired else None,
            )
        )
    return FleetView(replicas=tuple(rows))
