"""A target: the system that runs the job's processes and can replace one unit of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.core.ids import split_replica
from rolecall.recovery.actuators.calls import Procedure

OF_ANOTHER_JOB = " of another job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of the job as its agent sees it. `job`: run id or rendezvous; `rendezvous`: that alone (`host:port` of
    torchrun, `job.step` of Slurm); empty: not known. `registered_at`: when its agent first saw it, wall seconds of its
    node; what contains the process has started before. 0: not known. `pod_uid`, `slurm_step` (`4711.0`): what contains
    it, from its cgroup; empty: not known, or not there. `foreign`: of another job, which the watch leaves out; its
    replica may have the name of one of ours."""

    replica: str
    rank: int
    node: str
    pid: int
    start_ticks: int
    job: str = ""
    rendezvous: str = ""
    registered_at: float = 0.0
    pod_uid: str = ""
    slurm_step: str = ""
    foreign: bool = False

    @property
    def label(self) -> str:
        """Name of its replica, different from that of every replica of ours if it is of another job."""
        return f"{self.replica}{OF_ANOTHER_JOB}" if self.foreign else self.replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to replace. `key`: of this plan, the same when it is performed again after a crash. `members`: the living
    processes of the named incarnation, rank 0 first; `others`: those of all other replicas, of other jobs too.
    `leave_node`: the replacement must run on another node, because the fault stays with `node`. `begun`: a call that
    may end processes was made for it before, so that members may be gone because of it."""

    key: str
    incident_id: str
    replica: str
    incarnation: int
    node: str
    because: str
    members: tuple[Member, ...]
    others: tuple[Member, ...] = ()
    leave_node: bool = False
    begun: bool = False

    @property
    def role(self) -> str:
        return split_replica(self.replica)[0]

    @property
    def index(self) -> int:
        return split_replica(self.replica)[1]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the members, each once."""
        return tuple(sorted({m.node for m in self.members}))

    @property
    def fields(self) -> Mapping[str, str | int]:
        """For templates of names in the configuration."""
        return {
            "replica": self.replica,
            "role": self.role,
            "index": self.index,
            "incarnation": self.incarnation,
            "node": self.node,
        }


def filled(template: str, member: Member) -> str:
    """A template of the configuration (core/config/actuators.py, MEMBER_FIELDS) for the replica of this process."""
    role, index = split_replica(member.replica)
    return template.format(replica=member.replica, role=role, index=index, node=member.node, job=member.job)


class HasEnded(ActuatorError):
    """What ran the named incarnation is gone, or runs a later one. After a takeover that is the effect of the plan."""


class Target(Protocol):
    """One module each. Pure: effects are the calls that a procedure yields."""

    @property
    def name(self) -> str:
        """As `actuator.kind` in the configuration."""

    @property
    def supports(self) -> frozenset[ActionKind]: ...

    def also_hit(self, order: Order) -> Sequence[str]:
        """Other replicas that replacing this one would take down, by their labels."""

    def replace(self, order: Order) -> Procedure:
        """Ends the replica, and has its replacement started where the system does not do that by itself. A procedure
        first reads whether the named incarnation is still the one that runs, and changes nothing if it is not."""
