"""Is the cure a cure? The replacement serves, and is seen to make progress; else the action failed. Pure.

Serving is the runtime's word (for a rollout: after proof of its weights), progress the detector's. A replacement that
ended is not waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.diagnosis import Plan
from rolecall.core.ids import split_replica
from rolecall.core.membership import STANDBY_ROLE, ReplicaState
from rolecall.recovery.fleet import DEAD, FleetView
from rolecall.recovery.incidents.incident import ActionFailure

Progress = Mapping[str, tuple[bool, str]]
"""replica -> (is it seen to make progress at the wanted incarnation, what was seen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`resolved`, or `failure`, or neither yet. `serving_at`: when the last replacement began to serve, wall seconds."""

    because: str
    resolved: bool = False
    failure: ActionFailure | None = None
    serving_at: float = 0.0


def verify(
    plan: Plan, *, fleet: FleetView, progress: Progress, done_at: float, now: float, verification_timeout_seconds: float
) -> Verification:
    """How the performed plan stands at `now` (wall seconds)."""
    seen: list[str] = []
    missing: list[str] = []
    serving_at = 0.0
    for target in plan.targets:
        wanted = target.incarnation + 1
        view = fleet.find(target.replica)
        name = f"{target.replica}#{wanted}"
        if view is None:
            missing.append(f"{name} is not desired any more")
        elif view.incarnation >= wanted and view.state in DEAD:
            return Verification(
                because=f"{target.replica}#{view.incarnation} ended before its first work: {view.because or view.state}",
                failure=ActionFailure.DIED,
            )
        elif view.incarnation < wanted or view.state not in _service(target.replica):
            missing.append(f"{name} is {view.state if view.incarnation >= wanted else 'not there'}")
        elif split_replica(target.replica)[0] == STANDBY_ROLE:
            seen.append(f"{name} stands by")
        else:
            moves, words = progress.get(target.replica, (False, "nothing is known of its progress"))
            (seen if moves else missing).append(f"{name}: {words}")
        serving_at = max(serving_at, view.changed_at if view else 0.0)
    if not missing:
        return Verification(because="; ".join(seen), resolved=True, serving_at=serving_at)
    waited = now - done_at
    because = f"after {waited:.1f} s " + "; ".join(missing)
    if waited > verification_timeout_seconds:
        return Verification(because=because, failure=ActionFailure.NO_PROGRESS)
    return Verification(because=because)


def _service(replica: str) -> tuple[ReplicaState, ...]:
    # A standby does no work until it is promoted: being there is all that can be asked of it.
    if split_replica(replica)[0] == STANDBY_ROLE:
        return (ReplicaState.READY, ReplicaState.SERVING)
    return (ReplicaState.SERVING,)
