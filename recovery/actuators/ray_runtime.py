"""The actuator of the bundled runtime (`rl_runtime`)."""

from collections.abc import Collection, Mapping

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError
from rolecall.core.ids import NodeId, ReplicaId, split_replica
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import JobStopRequested, LenderResumed, NodeLent
from rolecall.core.membership import STANDBY_ROLES, Desired
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.text import in_words
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.borrowing import BORROWER, Comeback
from rolecall.recovery.fleet_view import ReplicaView, fleet_of

STOP_FLAG = "stop"


class RayRuntime:
    """The actuator of `rl_runtime`: writes the desired state to its journal, one record per target.

    Recovery never calls Ray: the supervisor reconciles desired and actual state, kills the old incarnation, and
    promotes a standby or starts a replica. The failure unit is the replica with all its ranks, or both replicas of a
    hybrid, which get the same node. Every write expects the incarnation that the plan names and carries the fencing
    number; the record names its incident, so that a repetition recognizes it.
    A restart writes the controller first: no controller then takes over requests of engines that are about to end.
    """

    name = "ray_runtime"
    supports = frozenset(
        {ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.RESTART_ROLE, ActionKind.RESTART_JOB}
        | {ActionKind.STOP_JOB}
    )

    schedules = False

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        if plan.action is ActionKind.STOP_JOB:
            return ("every process of the job",)
        if plan.action.is_restart:
            return ()  # it names all that it takes down, and every process is started anew
        quarantined = quarantined_nodes(self._journal)
        fleet = fleet_of(self._journal)
        # Another replica may move to a standby's node, or have its process already; others wait for any.
        free = [s for s in fleet.standbys() if s.node not in quarantined and len(fleet.on(s.node)) == 1]
        nodes, desired = {s.node for s in fleet.standbys()}, self._journal.desired()
        for other in fleet.replicas:
            wanted = desired.get(other.replica)
            if wanted is None or other.incarnation >= wanted.incarnation:
                continue
            if wanted.prefer_standby and wanted.node not in nodes:
                _take_standby(free, other.role)
        found = [f"{lender.replica} ends and lends {lender.node}" for lender in plan.lent]
        for target in plan.targets:
            view = fleet.find(target.replica)
            if view is not None and view.partner:
                continue  # it starts anew beside its partner
            role, _ = split_replica(target.replica)
            standby = _take_standby(free, role)
            if standby is not None:  # it keeps its process, and is no victim of the action
                found.append(f"{standby.replica} becomes {target.replica}")
        return tuple(found)

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        del plan  # it names all that it ends: both replicas of a hybrid, and lenders
        return ()

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult:
        if plan.action not in self.supports:
            raise ActuatorError(f"{self.name} cannot {in_words(plan.action)}")
        if plan.action is ActionKind.STOP_JOB:
            return self._stop(plan, lease)
        before = self._journal.desired()
        for target in (*plan.lent, *plan.targets):
            current = before.get(target.replica)
            if current is None or not (current.incarnation == target.incarnation or _is_done(current, target, plan)):
                now_desired = (
                    f"the current incarnation is #{current.incarnation}"
                    if current
                    else "the replica is no longer part of the run"
                )
                because = f"{target.replica}#{target.incarnation} is outdated: {now_desired}"
                return ActionResult(done=False, because=because)
        # All of them are known before the first is written.
        records = self._records(plan, before, lease, frozenset(lost_nodes))
        for record in (*self._lenders(plan, before, records, lease), *records):
            if not self._journal.set_desired(record, expect_incarnation=record.incarnation - 1, lease=lease):
                return ActionResult(done=False, because=f"{record.replica} was replaced concurrently")
        after = self._journal.desired()
        named = [after[t.replica] for t in plan.targets]
        because = "desired: " + ", ".join(f"{r.replica}#{r.incarnation} on {r.node}" for r in named)
        return ActionResult(done=True, because=because, facts={"desired": {r.replica: r.incarnation for r in named}})

    def _stop(self, plan: Plan, lease: Lease) -> ActionResult:
        # The event first: the journal refuses it if the lease is over, while a flag has no fencing.
        key = f"{plan.incident_id}:stop_job"
        self._journal.append(JobStopRequested(because=plan.because), incident_id=plan.incident_id, key=key, lease=lease)
        self._journal.set_flag(STOP_FLAG, plan.because)
        return ActionResult(done=True, because="requested the job to stop")

    def resume(self, comeback: Comeback, lease: Lease) -> None:
        record = Desired(
            replica=comeback.replica,
            incarnation=comeback.incarnation,
            node=comeback.node,
            prefer_standby=False,
            fence=lease.fence,
            because=comeback.because,
        )
        # The event first: without its record the next watch finds the same, or another, node free.
        event = LenderResumed(
            replica=record.replica, incarnation=record.incarnation, node=record.node, because=record.because
        )
        self._journal.append(event, key=f"resumed:{record.replica}#{record.incarnation}:{record.node}", lease=lease)
        self._journal.set_desired(record, expect_incarnation=record.incarnation - 1, lease=lease)

    def _lenders(
        self, plan: Plan, before: Mapping[ReplicaId, Desired], records: list[Desired], lease: Lease
    ) -> list[Desired]:
        """The lenders' records that are still to be written, each with its event."""
        borrowers = {record.node: record.replica for record in sorted(records, key=lambda r: r.replica)}
        found = []
        for lender in plan.lent:
            if _is_done(before[lender.replica], lender, plan):
                continue
            to = borrowers.get(lender.node, ReplicaId(BORROWER))
            lent = NodeLent(
                replica=lender.replica,
                incarnation=lender.incarnation,
                node=lender.node,
                to=to,
                because=plan.because,
            )
            key = f"{plan.incident_id}:lent:{lender.replica}#{lender.incarnation}"
            self._journal.append(lent, incident_id=plan.incident_id, key=key, lease=lease)
            record = Desired(
                replica=lender.replica,
                incarnation=lender.incarnation + 1,
                node=NodeId(""),
                fence=lease.fence,
                because=f"it lends {lender.node} to {to}: {plan.because}",
                incident_id=plan.incident_id,
            )
            found.append(record)
        return found

    def _records(
        self, plan: Plan, before: Mapping[ReplicaId, Desired], lease: Lease, lost_nodes: frozenset[str]
    ) -> list[Desired]:
        """What is still to be written of the plan. Raises ActuatorError: a replica must move and no node is left."""
        fleet, unusable = fleet_of(self._journal), quarantined_nodes(self._journal) | lost_nodes
        restarts = plan.action.is_restart
        # A restart names healthy nodes too.
        avoid = frozenset(unusable if restarts else unusable | {t.node for t in plan.targets})
        choose = fleet.restart_node if restarts else fleet.spare_node
        due = [t for t in plan.targets if not _is_done(before[t.replica], t, plan)]
        given_away = {before[t.replica].node for t in plan.targets}
        loans = [t.node for t in plan.lent if t.node not in given_away and t.node not in unusable]
        # Nodes that this plan has already given to replicas, also before a crash of the watch.
        given = {t.replica: before[t.replica].node for t in plan.targets if t not in due}
        taken = [given[t.replica] for t in plan.targets if t not in due and given[t.replica] != t.node]
        records: list[Desired] = []
        for target in due:
            node, view = target.node, fleet.find(target.replica)
            partner = view.partner if view is not None else None
            # A node may have been lost or quarantined after the plan was made.
            if partner in given:
                node = given[partner]
            elif plan.action is ActionKind.REPLACE_NODE or node in unusable:
                role, _ = split_replica(fleet.unit_of(target.replica))
                borrows = role == BORROWER and bool(loans)
                # Fewer loans than replicas: the first ones have places of their own.
                other = None if borrows and len(loans) >= len(due) - len(records) else choose(role, avoid, taken)
                if other is None and borrows:
                    other = loans.pop(0)
                if other is None:
                    raise ActuatorError(f"{target.replica}: no node other than {', '.join(sorted(avoid))} to move to")
                node = other
                taken.append(node)
            given[target.replica] = node
            records.append(
                Desired(
                    replica=target.replica,
                    incarnation=target.incarnation + 1,
                    node=node,
                    prefer_standby=not (restarts or partner),
                    fence=lease.fence,
                    because=plan.because,
                    incident_id=plan.incident_id,
                )
            )
        return records


def _take_standby(free: list[ReplicaView], role: str) -> ReplicaView | None:
    """The first of these that can replace a replica of `role`; it is no longer free."""
    found = next((s for s in free if STANDBY_ROLES[s.role] == role), None)
    if found is not None:
        free.remove(found)
    return found


def _is_done(current: Desired, target: PlanTarget, plan: Plan) -> bool:
    """Whether the record is the one this plan writes, so it was already performed; or, of a restart, a newer one."""
    ours = current.incarnation == target.incarnation + 1 and current.incident_id == plan.incident_id
    return ours or (plan.action.is_restart and current.incarnation > target.incarnation)
