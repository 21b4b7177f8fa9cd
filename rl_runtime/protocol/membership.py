"""Replicas that may get work, from the membership records alone: `desired` (recovery) and `actual` (runtime).

A replica may work when its newest incarnation is READY or SERVING in `actual` and recovery does not want a newer one.
As soon as `desired` names a newer incarnation the old one is fenced, dead or not: its late messages are rejected, and
its work is reassigned. Pure: takes records, returns verdicts with their reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolecall.core.ids import ReplicaId, split_replica
from rolecall.core.membership import Actual, Desired, ReplicaState

AT_WORK = (ReplicaState.READY, ReplicaState.SERVING)
GONE = (ReplicaState.LOST, ReplicaState.STOPPED)
"""Final states: no working state may follow for the same incarnation."""

Member = tuple[ReplicaId, int]
"""(replica, incarnation)."""
Desireds = Mapping[ReplicaId, Desired]
Actuals = Mapping[Member, Actual]


@dataclass(frozen=True, slots=True)
class MembershipView:
    """A snapshot of both records."""

    desired: Desireds
    actual: Actuals

    def usable(self, role: str) -> dict[ReplicaId, Actual]:
        """Replicas of a role that may get work, by name."""
        found = {}
        for (replica, incarnation), record in sorted(self.actual.items()):
            fits = split_replica(replica)[0] == role and record.state in AT_WORK
            if fits and self.lost_because(replica, incarnation) is None:
                found[replica] = record
        return found

    def lost_because(self, replica: ReplicaId, incarnation: int) -> str | None:
        """Why an incarnation must get no more work; None while it may, or soon may."""
        wanted = self.desired.get(replica)
        if wanted is None:
            return "it is not wanted any more"
        if wanted.lent and wanted.incarnation > incarnation:
            return wanted.because or "it lends its node"
        if wanted.incarnation > incarnation:
            return f"incarnation {wanted.incarnation} takes its place: {wanted.because or 'no reason given'}"
        newest = max((i for r, i in self.actual if r == replica), default=incarnation)
        if newest > incarnation:
            return f"incarnation {newest} has taken its place"
        record = self.actual.get((replica, incarnation))
        if record is None:
            return "nothing is known of it"
        if record.state in GONE:
            return record.because or f"it is {record.state}"
        return None

    def is_replaced_alive(self, replica: ReplicaId, incarnation: int) -> bool:
        """Whether recovery replaces an incarnation that is not fenced and still works, for example a slow one."""
        wanted, record = self.desired.get(replica), self.actual.get((replica, incarnation))
        replaced = wanted is not None and wanted.incarnation > incarnation
        return replaced and record is not None and record.state in AT_WORK


def members_after(
    members: Iterable[Member], *, joined: Iterable[Member] = (), left: Iterable[Member] = ()
) -> tuple[Member, ...]:
    """The next epoch's members, sorted. A newer incarnation replaces the older one of its replica."""
    gone = set(left)
    newest: dict[ReplicaId, int] = {}
    for replica, incarnation in (*members, *joined):
        if (replica, incarnation) not in gone:
            newest[replica] = max(incarnation, newest.get(replica, incarnation))
    return tuple(sorted(newest.items()))
