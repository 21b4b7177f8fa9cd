"""The fleet as policy and guards see it: desired and actual state, one frozen row per replica, JSON both ways."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import RunStarted
from rolecall.core.membership import (
    COMPUTING_ROLES,
    HYBRID_ROLES,
    SHARING_ROLE,
    STANDBY_ROLES,
    Actual,
    Desired,
    ReplicaState,
    hybrid_partner,
    is_standby,
)

LIVING = (ReplicaState.READY, ReplicaState.SERVING)
DEAD = (ReplicaState.LOST, ReplicaState.STOPPED)
HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    replica: ReplicaId
    desired_incarnation: int
    incarnation: int  # newest one reported by the runtime; 0: none yet
    state: ReplicaState | None
    node: NodeId  # of the newest incarnation; the desired node before there is one; empty: it has lent its node
    changed_at: float = 0.0  # wall seconds of the last change of `state`
    because: str = ""
    started: bool = False  # the newest incarnation has been ready, whatever became of it
    partner: ReplicaId | None = None  # the other replica of its hybrid, which is replaced with it
    next_node: str = ""  # where its desired incarnation is to start; empty: it is reported already

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

    @property
    def lost(self) -> bool:
        """The desired incarnation has ended, and nothing else is desired yet."""
        return self.state is ReplicaState.LOST and self.incarnation == self.desired_incarnation and not self.lent

    @property
    def lent(self) -> bool:
        """It has lent its node to another replica and is not to run."""
        return not self.node

    @property
    def nodes(self) -> set[str]:
        """Nodes that it occupies: of its process, and where its next one is to start."""
        used_up = is_standby(self.replica) and self.state is ReplicaState.STOPPED
        moves = bool(self.next_node) and self.state in DEAD
        return {node for node in ("" if used_up or moves else self.node, self.next_node) if node}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlaces:
    """Nodes of the run, and what a replica needs of one."""

    nodes: tuple[str, ...] = ()  # those that the run began with; replicas may be on others
    gpus: Mapping[str, int] = field(default_factory=dict)  # node -> GPUs; empty: the job computes on CPUs
    ranks: Mapping[str, int] = field(default_factory=dict)  # role -> ranks of each replica, where it has several
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # role -> of one replica at its peak, an estimate
    num_hybrids: int = 0  # trainers that share their node with the rollout of the same number
    scheduled: bool = False  # the job's own scheduler finds nodes for replacements

    def gpus_needed(self, role: str) -> int:
        """One for each rank of a computing replica; a trainer stands for its hybrid, whose larger half decides."""
        if not self.gpus or role not in COMPUTING_ROLES:
            return 0
        roles = HYBRID_ROLES if self.num_hybrids and role == "trainer" else (role,)
        return max(self.ranks.get(r, 1) for r in roles)

    def has_gpus(self, node: str, role: str) -> bool:
        return self.gpus.get(node, 0) >= self.gpus_needed(role)

    @classmethod
    def of_run(cls, journal: Journal) -> Self:
        events = journal.events(kinds=[EventKind.RUN_STARTED], damaged=[])  # of a line that cannot be read: nothing
        return cls.told(events[-1].as_(RunStarted)) if events else cls()

    @classmethod
    def told(cls, started: RunStarted) -> Self:
        return cls(
            nodes=started.nodes,
            gpus=started.gpus,
            ranks=started.ranks,
            memory_bytes=started.memory_bytes,
            num_hybrids=started.num_hybrids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    replicas: tuple[ReplicaView, ...]  # sorted by name
    places: RunPlaces = RunPlaces()

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

    def on(self, node: str) -> tuple[ReplicaView, ...]:
        """Replicas that need a node for themselves: all but reward workers."""
        return tuple(r for r in self.replicas if node in r.nodes and r.role != SHARING_ROLE)

    def free_nodes(self, role: str, avoid: Iterable[str] = ()) -> list[NodeId]:
        """Nodes without such a replica, with the GPUs that a replica of `role` needs."""
        known = {*self.places.nodes, *(r.node for r in self.replicas)} - {"", *avoid}
        return sorted(NodeId(n) for n in known if not self.on(n) and self.places.has_gpus(n, role))

    def spare_node(self, role: str, avoid: frozenset[str], taken: Sequence[str] = ()) -> NodeId | None:
        """A node for a replica of `role` that must move: that of a standby of its role, else a free one. What computes
        shares no node; other roles share the one with the fewest living replicas, so that free nodes stay free.
        `taken`: nodes just chosen for other replicas."""
        if role not in COMPUTING_ROLES:
            shared = _emptiest((r.node for r in self.replicas if r.living and r.node not in avoid), taken)
            if shared is not None:
                return shared
        # Alone: another replica may be about to take it.
        of_standbys = (r.node for r in self.standbys() if STANDBY_ROLES[r.role] == role and len(self.on(r.node)) == 1)
        usable = (n for n in (*sorted(of_standbys), *self.free_nodes(role, avoid)) if n not in (*avoid, *taken))
        return next(usable, None)

    def restart_node(self, role: str, avoid: frozenset[str], taken: Sequence[str] = ()) -> NodeId | None:
        """The same for a replica that is restarted: standbys stay where they are, so it gets a free node, else the one
        with the fewest other replicas. These need not be living, because the restart ends them too."""
        free = next((n for n in self.free_nodes(role, avoid) if n not in taken), None)
        if free is not None:
            return free
        places = (
            r.node
            for r in self.replicas
            if r.role not in STANDBY_ROLES and r.state not in (None, ReplicaState.LOST)
            if not r.lent and r.node not in avoid and self.places.has_gpus(r.node, role)
        )
        return _emptiest(places, taken)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(r), "state": str(r.state) if r.state else None} for r in self.replicas]
        rows = [{k: v for k, v in row.items() if k != "partner" or v} for row in rows]
        return {"replicas": rows, "places": asdict(self.places)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        rows = (ReplicaView(**{**r, "state": ReplicaState(r["state"]) if r["state"] else None}) for r in d["replicas"])
        places = dict(d.get("places", {}))  # absent in older journals
        return cls(replicas=tuple(rows), places=RunPlaces(**{**places, "nodes": tuple(places.get("nodes", ()))}))


def _emptiest(places: Iterable[NodeId], taken: Sequence[str]) -> NodeId | None:
    """Of the nodes of some replicas the one with the fewest of them, those of `taken` included."""
    num_replicas = Counter(places)
    return min(num_replicas, key=lambda node: (num_replicas[node] + taken.count(node), node), default=None)


def fleet_view(
    desired: Mapping[ReplicaId, Desired], current: Mapping[ReplicaId, Actual], places: RunPlaces | None = None
) -> FleetView:
    """Joins desired and actual state. A replica that is no longer desired is left out."""
    rows, places = [], places or RunPlaces()
    for replica in sorted(desired):
        wanted, actual = desired[replica], current.get(replica)
        partner = hybrid_partner(replica, places.num_hybrids)
        awaited = actual is not None and actual.incarnation < wanted.incarnation
        rows.append(
            ReplicaView(
                replica=replica,
                desired_incarnation=wanted.incarnation,
                incarnation=actual.incarnation if actual else 0,
                state=actual.state if actual else None,
                node=actual.node if actual and not wanted.lent else wanted.node,
                changed_at=actual.changed_at if actual else 0.0,
                because=actual.because if actual else "",
                started=bool(actual and actual.pid),
                partner=partner if partner in desired else None,
                next_node=wanted.node if awaited else "",
            )
        )
    return FleetView(replicas=tuple(rows), places=places)


def fleet_of(journal: Journal) -> FleetView:
    """The fleet as the journal has it now."""
    return fleet_view(journal.desired(), journal.current(), RunPlaces.of_run(journal))
