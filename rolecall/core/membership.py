"""The interface between recovery and runtime: one versioned record in each direction.

Recovery writes `Desired` (replica, incarnation, node), fenced by its lease. The runtime writes `Actual` and alone
grows the epoch. A control loop compares the two, so a lost message only delays a repair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from rolecall.core.ids import NodeId, ReplicaId, replica_id, role_of, split_replica

STANDBY_ROLE, TRAINER_STANDBY_ROLE = "standby", "trainer-standby"
STANDBY_ROLES: Mapping[str, str] = MappingProxyType({STANDBY_ROLE: "rollout", TRAINER_STANDBY_ROLE: "trainer"})
"""Role of a standby -> role of the replicas that it can replace. A standby is the replica `standby/<k>` until it is
promoted; it then takes the name of the replica it replaces."""


COMPUTING_ROLES = frozenset({"trainer", "rollout", *STANDBY_ROLES})
"""Roles whose ranks need a device, and whose replicas therefore have a node of their own."""

SHARING_ROLE = "reward"
"""Its replicas need no device and may share a node with any other one."""


def is_standby(replica: str) -> bool:
    return role_of(replica) in STANDBY_ROLES


HYBRID_ROLES: Mapping[str, str] = MappingProxyType({"trainer": "rollout", "rollout": "trainer"})
"""Roles of the two replicas of a hybrid, which have the same number and share a node."""


def hybrid_partner(replica: str, num_hybrids: int) -> ReplicaId | None:
    """The other replica of a hybrid; None: this one is not part of any. `num_hybrids`: of the run."""
    role, number = split_replica(replica)
    return replica_id(HYBRID_ROLES[role], number) if role in HYBRID_ROLES and number < num_hybrids else None


NO_PROCESS = "not started: "
"""Begins `Actual.because` of an incarnation that never had a process, because its node could not take one."""


class ReplicaState(StrEnum):
    STARTING = "starting"  # its process is being started
    READY = "ready"  # it registered and may be given work (trainer: may join; rollout: has no proven weights yet)
    SERVING = "serving"  # it proved its weights (rollout), is a member of the epoch (trainer), or answers (others)
    LOST = "lost"  # fenced: the runtime gives it no work and accepts nothing from it
    STOPPED = "stopped"  # stopped intentionally, confirmed dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    replica: ReplicaId
    incarnation: int  # from 1
    node: NodeId  # empty: it has lent its node
    prefer_standby: bool = True
    fence: int = 0  # fencing number of the last writer; 0: the runtime itself, at start
    because: str = ""
    incident_id: str | None = None

    @property
    def lent(self) -> bool:
        """It has lent its node to another replica: older incarnations end, and this one is not started."""
        return not self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    replica: ReplicaId
    incarnation: int
    node: NodeId
    state: ReplicaState
    pid: int = 0
    start_ticks: int = 0
    actor: str = ""  # name of the Ray actor in the job's namespace
    because: str = ""
    policy_version: int = -1
    changed_at: float = 0.0  # wall seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Membership epoch: which incarnations of which replicas may talk to each other."""

    number: int
    members: tuple[tuple[ReplicaId, int], ...]  # (replica, incarnation), sorted
    because: str
    wall_at: float
