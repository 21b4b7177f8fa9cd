"""Verification of an action: the replacement serves and makes progress, otherwise the action failed. Pure.

The runtime reports serving (for a rollout: after the proof of its weights), the detector reports progress. A
replacement that died fails the action at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.diagnosis import Plan
from rolecall.core.ids import split_replica
from rolecall.core.membership import STANDBY_ROLE, ReplicaState
from rolecall.recovery.fleet import DEAD, FleetView
from rolecall.recovery.incidents.incident import ActionFailure

Progress = Mapping[str, tuple[bool, str]]
"""replica -> (whether it is seen to make progress at the wanted incarnation, what was seen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`resolved`, or `failure`, or neither yet. `serving_at`: when the last replacement began to serve, wall
    seconds."""

    because: str
    resolved: bool = False
    failure: ActionFailure | None = None
    serving_at: float = 0.0


def verify(
    plan: Plan, *, fleet: FleetView, progress: Progress, done_at: float, now: float, verification_timeout_seconds: float
) -> Verification:
    """State of the performed plan at `now` (wall seconds)."""
    seen: list[str] = []
    missing: list[str] = []
    serving_at = 0.0
    for target in plan.targets:
        wanted = target.incarnation + 1
        view = fleet.find(target.replica)
        name = f"{target.replica}#{wanted}"
        if view is None:
            missing.append(f"{name} is no longer desired")
        elif view.incarnation >= wanted and view.state in DEAD:
            return Verification(
                because=f"{target.replica}#{view.incarnation} died before its first progress: "
                f"{view.because or view.state}",
                failure=ActionFailure.DIED,
            )
        elif view.incarnation < wanted or view.state not in _service(target.replica):
            missing.append(f"{name} is {view.state if view.incarnation >= wanted else 'not started'}")
        elif split_replica(target.replica)[0] == STANDBY_ROLE:
            seen.append(f"{name} is ready")
        else:
            progressing, text = progress.get(target.replica, (False, "no data on its progress"))
            (seen if progressing else missing).append(f"{name}: {text}")
        serving_at = max(serving_at, view.changed_at if view else 0.0)
    if not missing:
        return Verification(because="; ".join(seen), resolved=True, serving_at=serving_at)
    waited = now - done_at
    because = f"after {waited:.1f} s " + "; ".join(missing)
    if waited > verification_timeout_seconds:
        return Verification(because=because, failure=ActionFailure.NO_PROGRESS)
    return Verification(because=because)


def _service(replica: str) -> tuple[ReplicaState, ...]:
    # A standby does no work until it is promoted: being ready is all that can be verified.
    if split_replica(replica)[0] == STANDBY_ROLE:
        return (ReplicaState.READY, ReplicaState.SERVING)
    return (ReplicaState.SERVING,)
