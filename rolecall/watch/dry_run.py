"""`rolecall replace --dry-run`: the calls that the actuator of a watched job would make for a replica."""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError, CommandRefused
from rolecall.core.ids import IncidentId, ReplicaId, split_replica
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.core.text import counted
from rolecall.recovery.actuators.calls import Call
from rolecall.recovery.actuators.external import calls_of, order_of
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.recovery.actuators.targets.target import Member, Target
from rolecall.watch.observed_fleet import kept_members


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """`calls`: that would change something; `ends`: what was done in the end; `also`: other replicas that end too."""

    calls: tuple[Call, ...]
    ends: str
    also: tuple[str, ...]

    def beyond(self, counted_replicas: Collection[str]) -> list[str]:
        """Of `also`, those whose role the watch file does not name: the action is refused."""
        return sorted({*self.also} - {*counted_replicas})


def dry_run(target: Target, who: PlanTarget, known: Sequence[tuple[int, Member]]) -> DryRun:
    """`known`: (incarnation, process) of all that run. Calls that only read are made. Raises ActuatorError: the target
    refuses, with why."""
    plan = Plan(
        incident_id=IncidentId("inc-0-dry-run"),
        action=ActionKind.REPLACE_REPLICA,
        targets=(who,),
        because="a dry run",
    )
    order = order_of(plan, who, known)
    calls, ends = calls_of(target, order)
    return DryRun(calls=tuple(calls), ends=ends, also=tuple(target.also_hit(order)))


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
    try:
        found = dry_run(target, who, known)
    except ActuatorError as e:
        raise CommandRefused(f"{target.name} refuses to replace {replica}#{desired.incarnation}: {e}") from None
    lines = [
        f"{replica}#{desired.incarnation} on {desired.node} would be replaced by {counted(len(found.calls), 'call')}:"
    ]
    lines += [f"  {call.words}\n    {call.shown}" for call in found.calls]
    lines.append(f"it would end with: {found.ends}" if found.calls else found.ends)
    lines.append(f"also ends: {', '.join(found.also)}" if found.also else "nothing else ends")
    if beyond := found.beyond(counted_replicas):
        names = ", ".join(beyond)
        lines.append(f"refused in the end: {names}: of a role that is not in `roles` of the watch file, or another job")
    return "\n".join(lines)
