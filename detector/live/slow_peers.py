"""What the slow test compares a process with: the newest residuals of its peers, kept in order so that the median of
all but one costs no pass over the others.

A role of eight thousand closes hundreds of strides a second; with a list of peers made for each, a second's strides
took minutes (docs/decisions/0021).
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from rolecall.detector.live.roster import ProcessIndex
from rolecall.detector.live.subject import Key, MonitoredProcess

PEER_AGE_SECONDS = 10.0
"""How long a peer's last observation is compared with."""
RISING_SUM = 1.0
"""A peer's sum above this (one stride of a factor of four) means that it may be slow: nothing is learned then."""


@dataclass(slots=True)
class _RoleResiduals:
    residuals: dict[Key, tuple[float, float]] = field(default_factory=dict)  # residual, wall time when it was made
    ordered: list[float] = field(default_factory=list)  # the same residuals
    by_age: deque[tuple[float, Key]] = field(default_factory=deque)  # wall time, whose; later ones may have followed
    rising: set[Key] = field(default_factory=set)

    def put(self, key: Key, residual: float, wall: float) -> None:
        self.drop(key)
        self.residuals[key] = residual, wall
        insort(self.ordered, residual)
        self.by_age.append((wall, key))

    def drop(self, key: Key) -> None:
        before = self.residuals.pop(key, None)
        if before is not None:
            del self.ordered[bisect_left(self.ordered, before[0])]

    def expire(self, now: float) -> None:
        while self.by_age and now - self.by_age[0][0] > PEER_AGE_SECONDS:
            wall, key = self.by_age.popleft()
            if key in self.residuals and self.residuals[key][1] == wall:
                self.drop(key)


class Peers:
    """By role: the residuals of those at work that are no older than `PEER_AGE_SECONDS`, and who may be slow."""

    def __init__(self) -> None:
        self._roles: dict[str, _RoleResiduals] = {}
        self._made_of = -1

    def refresh(self, roster: ProcessIndex, now: float) -> None:
        """Before each poll: drops what is too old; rebuilds everything when a process came or went."""
        if self._made_of != roster.changes:
            self._made_of = roster.changes
            self._roles = {}
            for s in sorted(roster, key=lambda s: s.slow.residual_wall):
                self._note(s)
        for role in self._roles.values():
            role.expire(now)

    def _note(self, s: MonitoredProcess) -> None:
        if s.slow.residual_wall and not s.gone:
            self.note(s)
        self.note_sum(s)

    def note(self, s: MonitoredProcess) -> None:
        """Its residual is new."""
        self._roles.setdefault(s.role, _RoleResiduals()).put(s.key, s.slow.smooth, s.slow.residual_wall)

    def note_sum(self, s: MonitoredProcess) -> None:
        """Its sum is."""
        rising = self._roles.setdefault(s.role, _RoleResiduals()).rising
        if s.slow.cusum >= RISING_SUM:
            rising.add(s.key)
        else:
            rising.discard(s.key)

    def median_without(self, s: MonitoredProcess) -> tuple[int, float]:
        """How many peers of it there are, and the median of their residuals; 0 when there are none."""
        role = self._roles.get(s.role)
        if role is None:
            return 0, 0.0
        mine = role.residuals.get(s.key)
        num = len(role.ordered) - (mine is not None)
        if not num:
            return 0, 0.0
        without = bisect_left(role.ordered, mine[0]) if mine is not None else num

        def nth(n: int) -> float:
            return role.ordered[n + (n >= without)]

        return num, nth(num // 2) if num % 2 else (nth(num // 2 - 1) + nth(num // 2)) / 2

    def rising_without(self, s: MonitoredProcess) -> bool:
        """Whether a peer of it may be slow."""
        role = self._roles.get(s.role)
        return role is not None and len(role.rising) > (s.key in role.rising)
