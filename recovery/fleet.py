"""The fleet as policy and guards see it: desired beside actual, one frozen line a replica, JSON both ways."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.membership import STANDBY_ROLE, Actual, Desired, ReplicaState

LIVING = (ReplicaState.READY, ReplicaState.SERVING)
DEAD = (ReplicaState.LOST, ReplicaState.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    replica: ReplicaId
    desired_incarnation: int
    incarnation: int  # newest that the runtime has written; 0: none yet
    state: ReplicaState | None
    node: NodeId  # where the newest incarnation runs; where it should, before there is one
    changed_at: float = 0.0  # wall seconds of the last change of `state`
    because: str = ""

    @property
    def role(self) -> str:
        return split_replica(self.replica)[0]

    @property
    def living(self) -> bool:
        """The incarnation that should be is there and can be given work."""
        return self.incarnation >= self.desired_incarnation and self.state in LIVING


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    replicas: tuple[ReplicaView, ...]  # sorted by name

    def find(self, replica: str) -> ReplicaView | None:
        return next((r for r in self.replicas if r.replica == replica), None)

    def of_role(self, role: str) -> tuple[ReplicaView, ...]:
        return tuple(r for r in self.replicas if r.role == role)

    def standbys(self) -> tuple[ReplicaView, ...]:
        """Warm ones, ready to take a rollout's place."""
        return tuple(r for r in self.of_role(STANDBY_ROLE) if r.living)

    def spare_node(self, avoid: frozenset[str]) -> NodeId | None:
        """A node for a replica that must move: a standby's if there is one, else the least crowded living one."""
        warm = sorted(r.node for r in self.standbys() if r.node not in avoid)
        if warm:
            return warm[0]
        crowd: dict[NodeId, int] = {}
        for r in self.replicas:
            if r.living and r.node not in avoid:
                crowd[r.node] = crowd.get(r.node, 0) + 1
        return min(crowd, key=lambda node: (crowd[node], node), default=None)

    def to_dict(self) -> dict[str, Any]:
        return {"replicas": [{**asdict(r), "state": str(r.state) if r.state else None} for r in self.replicas]}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        rows = (ReplicaView(**{**r, "state": ReplicaState(r["state"]) if r["state"] else None}) for r in d["replicas"])
        return cls(replicas=tuple(rows))


def fleet_view(desired: Mapping[ReplicaId, Desired], current: Mapping[ReplicaId, Actual]) -> FleetView:
    """Joins the two records of the border. A replica that nobody desires any more is left out."""
    rows = []
    for replica in sorted(desired):
        want, have = desired[replica], current.get(replica)
        rows.append(
            ReplicaView(
                replica=replica,
                desired_incarnation=want.incarnation,
                incarnation=have.incarnation if have else 0,
                state=have.state if have else None,
                node=have.node if have else want.node,
                changed_at=have.changed_at if have else 0.0,
                because=have.because if have else "",
            )
        )
    return FleetView(replicas=tuple(rows))
