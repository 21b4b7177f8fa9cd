"""What would come of draining a node, said before anybody clicks: each replica on it, the plan, and the guards' word. Pure.

The same `decide` and `check` that the watch uses, on the journal as it stands: a preview, not a promise. The limits are
those of the newest plan in the journal, for no other word of the watch tells them.
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
from rolecall.recovery.operators.requests import request
from rolecall.recovery.policy import decide, question

SUPPORTS = frozenset({ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.STOP_JOB})
"""What a run of ours can do."""


MODES = ("observe", "approve", "act")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How the watch decides, as far as the journal knows."""

    config: RecoveryConfig
    supports: frozenset[ActionKind]
    known: bool  # False: no plan was made yet, these are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedReplica:
    """One replica of the node."""

    replica: str
    action: str
    because: str
    guard: str  # empty: all pass
    guard_because: str


def limits_of(asked: Mapping[str, Any], mode: str) -> WatchPolicy:
    """`asked`: what the newest plan was decided from. `mode`: of the watch, which may have changed since."""
    try:
        config = RecoveryConfig.model_validate({**asked["config"], **({"mode": mode} if mode else {})})
        return WatchPolicy(config=config, supports=frozenset(ActionKind(a) for a in asked["supports"]), known=True)
    except (KeyError, TypeError, ValueError):
        # A plan of another writer: it tells nothing of its limits.
        config = RecoveryConfig.model_validate({"mode": mode} if mode in MODES else {})
        return WatchPolicy(config=config, supports=SUPPORTS, known=False)


def replicas_on(fleet: FleetView, node: str) -> tuple[ReplicaView, ...]:
    """Those that draining the node would ask to move."""
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
        asked = _asked(r, node, now)
        wondered = question(
            asked,
            incidents,
            fleet=fleet,
            config=limits.config,
            supports=limits.supports,
            quarantined_nodes=avoided | {node},
        )
        plan = decide(wondered).plan
        guarded = check(
            plan,
            asked,
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


def _asked(r: ReplicaView, node: str, now: float) -> Incident:
    diagnosis = request(r, f"{node} is to be drained", now)
    name = IncidentId("preview")
    return Incident(
        incident_id=name,
        state=IncidentState.PLANNED,
        diagnosis=diagnosis,
        opened_at=now,
        seen_keys=frozenset({diagnosis.key}),
    )
