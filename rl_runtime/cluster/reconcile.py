"""Reconciles desired with actual state: pure and stateless; returns instructions and performs nothing.

Recovery writes desired (the supervisor does at the start), the runtime writes actual. For each replica, a process of an
older incarnation is ended first. Once it is gone, the desired incarnation is created by promoting a standby or by a
start. A dead process is marked LOST and stays so until recovery desires another incarnation: only recovery decides
replacement. The exception is a standby used up by a promotion.

Idempotent: an unchanged state gives the same instructions, and a reconciled one gives none. No instruction ever targets
an incarnation that is desired and alive.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import NotEnoughNodes
from rolecall.core.ids import NodeId, ReplicaId, replica_id, split_replica
from rolecall.core.membership import SHARING_ROLE, STANDBY_ROLES, Actual, Desired, ReplicaState, is_standby

REFILL_SECONDS = 5.0
"""Delay before a used-up standby is replaced: its start takes a core for seconds, which the promoted replica needs to
get its weights.
"""
LIVING = frozenset({ReplicaState.STARTING, ReplicaState.READY, ReplicaState.SERVING})

Incarnation = tuple[ReplicaId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Input of the decision."""

    desired: Mapping[ReplicaId, Desired]
    actual: Mapping[Incarnation, Actual]
    alive: Collection[Incarnation]  # incarnations with a running process
    busy: Collection[Incarnation]  # being started, promoted or ended by an operation
    nodes: Sequence[NodeId]  # that live
    quarantined: Collection[NodeId] = ()  # of these, nodes that only get replicas placed there explicitly by recovery
    too_small: Mapping[str, Collection[NodeId]] = field(default_factory=dict)  # of these, by role of the standby
    stopped_seconds: Mapping[Incarnation, float] = field(default_factory=dict)  # how long a standby is used up


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileStep:
    replica: ReplicaId
    incarnation: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLost(ReconcileStep):
    """Record that its process is gone, so that nothing waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSuperseded(ReconcileStep):
    """End the process of a replaced incarnation and confirm its exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplica(ReconcileStep):
    """End a replica that is no longer desired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(ReconcileStep):
    """Start a new process for it."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote(ReconcileStep):
    """Promote a standby's process to this replica, on the standby's node."""

    standby: ReplicaId
    standby_incarnation: int
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillStandby(ReconcileStep):
    """Desire a new standby for a used-up one. `incarnation` is the new one."""

    node: NodeId


def reconcile(fleet: ClusterState) -> list[ReconcileStep]:
    """Instructions for this moment, in the order of replicas."""
    found: list[ReconcileStep] = []
    promoted: set[Incarnation] = set()
    for replica in sorted({r for r, _ in fleet.actual} | set(fleet.desired)):
        desired = fleet.desired.get(replica)
        records = sorted((a for (r, _), a in fleet.actual.items() if r == replica), key=lambda a: a.incarnation)
        endings = [i for a in records if (i := _ending(fleet, desired, a)) is not None]
        found += endings
        if desired is None or desired.lent or endings or _old_remains(fleet, desired, records):
            continue
        current = next((a for a in records if a.incarnation == desired.incarnation), None)
        if current is None:
            beginning = _beginning(fleet, desired, promoted)
            if isinstance(beginning, Start) and _lender_remains(fleet, beginning.node):
                continue
            found.append(beginning)
            if isinstance(beginning, Promote):
                promoted.add((beginning.standby, beginning.standby_incarnation))
        elif refill := _refill(fleet, current, taken={i.node for i in found if isinstance(i, RefillStandby)}):
            found.append(refill)
    return found


def _ending(fleet: ClusterState, desired: Desired | None, record: Actual) -> ReconcileStep | None:
    """Instruction for a process that is dead, replaced or no longer wanted."""
    key = (record.replica, record.incarnation)
    if key in fleet.busy and record.pid:
        return None  # it is being ended or promoted
    if record.state is ReplicaState.STOPPED:
        return None  # confirmed dead, or its process continues under the name it was promoted to

    def step(kind: type[ReconcileStep], because: str) -> ReconcileStep:
        return kind(replica=record.replica, incarnation=record.incarnation, because=because)

    living, alive = record.state in LIVING, key in fleet.alive
    if living and record.pid and not alive:
        return step(MarkLost, f"its process (pid {record.pid}) on {record.node} is gone")
    if living and not record.pid and key not in fleet.busy:
        return step(MarkLost, "its start was abandoned before its process was known")
    if desired is None and (living or alive):
        return step(StopReplica, "it is no longer desired")
    if desired is not None and record.incarnation < desired.incarnation and (living or alive):
        takes_its_place = "" if desired.lent else f"incarnation {desired.incarnation} takes its place: "
        return step(KillSuperseded, takes_its_place + desired.because)
    return None


def _old_remains(fleet: ClusterState, desired: Desired, records: Iterable[Actual]) -> bool:
    """Whether a process of an older incarnation may still run. Two of one replica must never run at once."""
    older = [a for a in records if a.incarnation < desired.incarnation]
    keys = [(a.replica, a.incarnation) for a in older if a.state is not ReplicaState.STOPPED]
    return any(k in fleet.alive or k in fleet.busy for k in keys)


def _lender_remains(fleet: ClusterState, node: NodeId) -> bool:
    """Whether a process of the replica that lends `node` may still run there, with its memory and its devices."""
    lenders = {replica for replica, desired in fleet.desired.items() if desired.lent}
    return any(
        key in fleet.alive or key in fleet.busy
        for key, record in fleet.actual.items()
        if record.node == node and record.replica in lenders and record.state is not ReplicaState.STOPPED
    )


def _beginning(fleet: ClusterState, desired: Desired, promoted: set[Incarnation]) -> Start | Promote:
    replica, incarnation = desired.replica, desired.incarnation
    role, _ = split_replica(desired.replica)
    if desired.prefer_standby:
        standby = _ready_standby(fleet, role, promoted, desired.node)
        if standby is not None:
            because = f"{standby.replica} on {standby.node} is warm: {desired.because}"
            return Promote(
                replica=replica,
                incarnation=incarnation,
                because=because,
                standby=standby.replica,
                standby_incarnation=standby.incarnation,
                node=standby.node,
            )
    return Start(replica=replica, incarnation=incarnation, because=desired.because, node=desired.node)


def _ready_standby(fleet: ClusterState, role: str, promoted: set[Incarnation], desired_node: NodeId) -> Actual | None:
    """One that can replace a replica of `role`. That on a node to which another one moves is kept for it: else two
    would share the node."""
    awaited = [d for d in fleet.desired.values() if (d.replica, d.incarnation) not in fleet.actual]
    kept = {d.node for d in awaited if split_replica(d.replica)[0] == role} - {desired_node}
    for key, record in sorted(fleet.actual.items()):
        desired = fleet.desired.get(record.replica)
        fit = record.state is ReplicaState.READY and key in fleet.alive and key not in fleet.busy
        wanted = desired is not None and desired.incarnation == record.incarnation
        shut = record.node in fleet.quarantined or record.node in kept
        takes = STANDBY_ROLES.get(split_replica(record.replica)[0])
        process = record.pid, record.start_ticks
        renamed = any(
            (a.pid, a.start_ticks) == process for k, a in fleet.actual.items() if k != key and a.state in LIVING
        )
        if takes == role and fit and wanted and not shut and not renamed and key not in promoted:
            return record
    return None


def _refill(fleet: ClusterState, current: Actual, taken: set[NodeId]) -> RefillStandby | None:
    # Recovery replaces a LOST standby; STOPPED means that a promotion used it up.
    if not is_standby(current.replica) or current.state is not ReplicaState.STOPPED:
        return None
    if fleet.stopped_seconds.get((current.replica, current.incarnation), 0.0) < REFILL_SECONDS:
        return None
    # Not before every other replica has its process: another start would slow a recovery in progress.
    working = {key for key, a in fleet.actual.items() if a.state in (ReplicaState.READY, ReplicaState.SERVING)}
    others = (d for r, d in fleet.desired.items() if not is_standby(r))
    # A free node is first that of a replica that has lent its own: then this condition does not hold.
    if not all((d.replica, d.incarnation) in working for d in others):
        return None
    small = fleet.too_small.get(split_replica(current.replica)[0], ())
    node = next((n for n in free_nodes(fleet) if n not in taken and n not in small), None)
    if node is None:
        return None
    return RefillStandby(
        replica=current.replica,
        incarnation=current.incarnation + 1,
        because=f"the last one was used up ({current.because}), {node} is free",
        node=node,
    )


def free_nodes(fleet: ClusterState) -> list[NodeId]:
    """Nodes where no replica that computes lives or is awaited, excluding quarantined ones; those with reward workers
    last."""
    current = {r for (r, i), _ in fleet.actual.items() if r in fleet.desired and fleet.desired[r].incarnation == i}
    placed = [(a.replica, a.node) for a in fleet.actual.values() if a.state in LIVING]
    placed += [(r, d.node) for r, d in fleet.desired.items() if r not in current]
    shared = {node for replica, node in placed if split_replica(replica)[0] == SHARING_ROLE}
    used = {node for replica, node in placed if split_replica(replica)[0] != SHARING_ROLE} | {*fleet.quarantined}
    return sorted((n for n in fleet.nodes if n not in used), key=lambda n: n in shared)


def place(job: JobConfig) -> dict[ReplicaId, NodeId]:
    """Initial placement: controller and rewards on the head, then one trainer, rollout or standby a node; in a hybrid
    the rollout has the trainer's.

    Raises:
        NotEnoughNodes: which role lacks what.
    """
    nodes = [NodeId(f"node-{i}") for i in range(job.runtime.nodes)]
    placed = {replica_id("controller", 0): nodes[0]}
    placed |= {replica_id("reward", i): nodes[0] for i in range(job.roles.reward)}
    free, lacking, hybrids = nodes[1:], [], job.num_hybrids
    counts = {"trainer": job.roles.trainer, "rollout": job.roles.rollout - hybrids, **job.runtime.num_standbys()}
    for role, count in counts.items():
        got, first = min(count, len(free)), hybrids if role == "rollout" else 0
        placed |= {replica_id(role, first + i): free[i] for i in range(got)}
        free = free[got:]
        if got < count:
            lacking.append(f"{role} lacks {count - got} of {count}")
    if lacking:
        shared = f", and rollouts up to rollout/{hybrids - 1} that of their trainer" if hybrids else ""
        raise NotEnoughNodes(
            f"runtime.nodes: {job.runtime.nodes}, but the roles need {1 + sum(counts.values())} (controller and "
            f"rewards share one; each trainer, rollout and standby has its own{shared}): {', '.join(lacking)}"
        )
    return placed | {replica_id("rollout", i): placed[replica_id("trainer", i)] for i in range(hybrids)}


def placed_again(
    placed: Mapping[ReplicaId, NodeId],
    last: Mapping[ReplicaId, Desired],
    nodes: Iterable[NodeId],
    quarantined: Collection[NodeId],
) -> dict[ReplicaId, NodeId]:
    """Placement of a run that is started again. `placed`: as at first. What was on a quarantined node gets a free one,
    and stays together; else that of a replica that has lent its own (`last`: desired before), which then has none."""
    lenders = [r for r in placed if r in last and last[r].lent]
    found = dict(placed)
    free = [n for n in nodes if n not in quarantined and n not in placed.values()]
    free += [placed[r] for r in lenders if placed[r] not in quarantined]
    moved: dict[NodeId, NodeId] = {}
    for replica, node in placed.items():
        if node in quarantined and replica not in lenders:
            if node not in moved and free:
                moved[node] = free.pop(0)
            found[replica] = moved.get(node, node)
    for replica in lenders:
        used = {node for r, node in found.items() if r != replica}
        if found[replica] in used or found[replica] in quarantined:
            left = [n for n in free if n not in used]
            found[replica] = left[0] if left else NodeId("")
    return found
