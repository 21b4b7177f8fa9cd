"""Acts on the bundled runtime by writing what should be: one desired record a target. The runtime does the rest.

Recovery never talks to Ray: the supervisor compares desired with actual, kills the old incarnation, promotes a standby
or spawns. The failure unit is the replica, whatever its ranks. Every write expects the incarnation that the plan names
and carries the fencing number; the record says which incident wrote it, so that a repetition finds its own work.
"""

from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError
from rolecall.core.ids import split_replica
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads import JobStopRequested
from rolecall.core.membership import Desired
from rolecall.core.nodes import quarantined_nodes
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.fleet import FleetView, fleet_view

STOP_FLAG = "stop"
STANDBY_TAKES = "rollout"
"""The role that standbys are kept for."""


class RayRuntime:
    """The actuator of `rl_runtime`, on its journal database."""

    name = "ray_runtime"
    supports = frozenset({ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.STOP_JOB})

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def failure_unit(self, replica: str) -> str:
        return replica

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        if plan.action is ActionKind.STOP_JOB:
            return ("every process of the job",)
        shut = quarantined_nodes(self._journal)
        standbys = [s for s in self._fleet().standbys() if s.node not in shut]
        takes = [t.replica for t in plan.targets if split_replica(t.replica)[0] == STANDBY_TAKES]
        # A promoted standby keeps its process: it is used up, not hurt.
        return tuple(f"{s.replica} becomes {t}" for s, t in zip(standbys, takes, strict=False))

    def perform(self, plan: Plan, lease: Lease) -> ActionResult:
        if plan.action not in self.supports:
            raise ActuatorError(f"{self.name} cannot {plan.action}")
        if plan.action is ActionKind.STOP_JOB:
            return self._stop(plan, lease)
        before = self._journal.desired()
        for target in plan.targets:
            stands = before.get(target.replica)
            if stands is None or not (stands.incarnation == target.incarnation or _ours(stands, target, plan)):
                is_now = f"#{stands.incarnation} is desired now" if stands else "it is not desired any more"
                return ActionResult(done=False, because=f"{target.replica}#{target.incarnation} is not meant: {is_now}")
        for target in plan.targets:
            if not _ours(before[target.replica], target, plan):
                record = self._wanted(target, plan, lease)
                if not self._journal.set_desired(record, expect_incarnation=target.incarnation, lease=lease):
                    return ActionResult(done=False, because=f"{target.replica} was replaced by somebody else meanwhile")
        after = self._journal.desired()
        named = [after[t.replica] for t in plan.targets]
        return ActionResult(
            done=True,
            because="desired: " + ", ".join(f"{r.replica}#{r.incarnation} on {r.node}" for r in named),
            facts={"desired": {r.replica: r.incarnation for r in named}},
        )

    def _stop(self, plan: Plan, lease: Lease) -> ActionResult:
        # The event first: it is refused to a watch whose lease is over, and a flag has no fence of its own.
        self._journal.append(
            JobStopRequested(because=plan.because),
            incident_id=plan.incident_id,
            key=f"{plan.incident_id}:stop_job",
            lease=lease,
        )
        self._journal.set_flag(STOP_FLAG, plan.because)
        return ActionResult(done=True, because="the job was asked to stop")

    def _wanted(self, target: PlanTarget, plan: Plan, lease: Lease) -> Desired:
        node, shut = target.node, quarantined_nodes(self._journal)
        # A node may be quarantined after the plan was made, and nothing is placed there either.
        if plan.action is ActionKind.REPLACE_NODE or node in shut:
            avoid = shut | {t.node for t in plan.targets}
            other = self._fleet().spare_node(frozenset(avoid))
            if other is None:
                raise ActuatorError(f"{target.replica}: there is no node beside {', '.join(sorted(avoid))} to move to")
            node = other
        return Desired(
            replica=target.replica,
            incarnation=target.incarnation + 1,
            node=node,
            prefer_standby=True,
            fence=lease.fence,
            because=plan.because,
            incident_id=plan.incident_id,
        )

    def _fleet(self) -> FleetView:
        return fleet_view(self._journal.desired(), self._journal.current())


def _ours(stands: Desired, target: PlanTarget, plan: Plan) -> bool:
    """The record is what this plan writes: it was performed before."""
    return stands.incarnation == target.incarnation + 1 and stands.incident_id == plan.incident_id
