"""Preview of draining a node: each replica on it, the plan, and whether the guards allow it. Pure.

Uses the same `decide` and `check` as the watch on the current journal, so the result can still change. The limits come
from the latest plan in the journal, because the watch records them nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind
from rolecall.core.ids import IncidentId
from rolecall.recovery.fleet import FleetView, ReplicaView
from rolecall.recovery.guards import check
from rolecall.recovery.incidents.incident import Incident, IncidentState
from rolecall.recovery.operators.requests import replacement_request
from rolecall.recovery.policy import decide, question

SUPPORTS = frozenset({ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.STOP_JOB})
"""Actions of a run that rolecall executes."""


MODES = ("observe", "approve", "act")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """Recovery policy of the watch, as recorded in the journal."""

    config: RecoveryConfig
    supports: frozenset[ActionKind]
    known: bool  # False: no plan yet, these are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedReplica:
    """What draining does to one replica of the node."""

    replica: str
    action: str
    because: str
    guard: str  # empty: all pass
    guard_because: str


def limits_of(policy_input: Mapping[str, Any], mode: str) -> WatchPolicy:
    """`policy_input`: as stored with the latest plan. `mode`: current mode of the watch, which may have changed
    since."""
    try:
        config = RecoveryConfig.model_validate({**policy_input["config"], **({"mode": mode} if mode else {})})
        return WatchPolicy(
            config=config, supports=frozenset(ActionKind(a) for a in policy_input["supports"]), known=True
        )
    except (KeyError, TypeError, ValueError):
        # The plan was written by something else and has no limits.
        config = RecoveryConfig.model_validate({"mode": mode} if mode in MODES else {})
        return WatchPolicy(config=config, supports=SUPPORTS, known=False)


def replicas_on(fleet: FleetView, node: str) -> tuple[ReplicaView, ...]:
    """The replicas that draining the node would move."""
    return tuple(r for r in fleet.replicas if r.node == node)


def preview(
    node: str,
    *,
    fleet: FleetView,
    incidents: Sequence[Incident],
    avoided: frozenset[str],
    limits: WatchPolicy,
    paused: str | None,
    stopping: str | None,
    now: float,
) -> tuple[DrainedReplica, ...]:
    """`avoided`: nodes in quarantine."""
    found = []
    for r in replicas_on(fleet, node):
        incident = _requested(r, node, now)
        policy_input = question(
            incident,
            incidents,
            fleet=fleet,
            config=limits.config,
            supports=limits.supports,
            quarantined_nodes=avoided | {node},
        )
        plan = decide(policy_input).plan
        guarded = check(
            plan,
            incident,
            fleet=fleet,
            config=limits.config,
            incidents=incidents,
            paused=paused,
            stopping=stopping,
            now=now,
        )
        found.append(
            DrainedReplica(
                replica=f"{r.replica}#{r.desired_incarnation}",
                action=str(plan.action).replace("_", " "),
                because=plan.because,
                guard=guarded.guard,
                guard_because=guarded.because,
            )
        )
    return tuple(found)


def _requested(r: ReplicaView, node: str, now: float) -> Incident:
    diagnosis = replacement_request(r, f"{node} is to be drained", now)
    name = IncidentId("preview")
    return Incident(
        incident_id=name,
        state=IncidentState.PLANNED,
        diagnosis=diagnosis,
        opened_at=now,
        seen_keys=frozenset({diagnosis.key}),
    )
