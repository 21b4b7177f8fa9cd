"""`rolecall replace --dry-run`: the calls that the actuator of a watched job would make for a replica."""

from contextlib import closing

from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError, CommandRefused
from rolecall.core.ids import IncidentId, ReplicaId, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted
from rolecall.recovery.actuators.external import calls_of, order_of
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.watch.observed_fleet import kept_members


def planned_calls(run: RunDir, replica: str) -> str:
    """What would be called, one call a line, and what else would end. Calls that only read are made.

    Raises:
        CommandRefused: the run has no actuator, the replica was not seen, or the actuator refuses: with the reason.
        InvalidId: `replica` is not written `role/index`.
    """
    split_replica(replica)
    watched = parse_watched(run.read().get("watched") or {}, str(run.path / "run.json"))
    if watched.actuator is None:
        raise CommandRefused(f"{run.run_id} has no actuator: rolecall watch agents ... --config FILE names one")
    target = target_of(watched.actuator)
    with closing(Journal(run.database_url, create=False)) as journal:
        counted_replicas = journal.desired()
        desired = counted_replicas.get(ReplicaId(replica))
        known = kept_members(journal)
    if desired is None:
        raise CommandRefused(f"{run.run_id}: {replica} was not seen")
    who = PlanTarget(replica=desired.replica, incarnation=desired.incarnation, node=desired.node)
    because = "a dry run"
    plan = Plan(
        incident_id=IncidentId("inc-0-dry-run"), action=ActionKind.REPLACE_REPLICA, targets=(who,), because=because
    )
    order = order_of(plan, who, known)
    try:
        calls, ends = calls_of(target, order)
    except ActuatorError as e:
        raise CommandRefused(f"{target.name} refuses to replace {replica}#{desired.incarnation}: {e}") from None
    lines = [f"{replica}#{desired.incarnation} on {desired.node} would be replaced by {counted(len(calls), 'call')}:"]
    lines += [f"  {call.words}\n    {call.shown}" for call in calls]
    also = target.also_hit(order)
    lines.append(f"it would end with: {ends}" if calls else ends)
    lines.append(f"also ends: {', '.join(also)}" if also else "nothing else ends")
    if beyond := sorted({*also} - {*counted_replicas}):
        names = ", ".join(beyond)
        lines.append(f"refused in the end: {names}: of a role that is not in `roles` of the watch file, or another job")
    return "\n".join(lines)
