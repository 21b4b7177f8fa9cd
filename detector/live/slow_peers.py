"""Peer reference of the slow test: the newest residuals per role, kept sorted so that a leave-one-out median needs no
scan.

A role of eight thousand processes closes hundreds of strides per second; building a list of peers for each took minutes
per second of observations (docs/decisions/0021).
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from rolecall.detector.live.roster import ProcessIndex
from rolecall.detector.live.subject import Key, MonitoredProcess

PEER_AGE_SECONDS = 10.0
"""Maximum age of a peer's residual in the comparison."""
RISING_SUM = 1.0
"""A peer whose CUSUM exceeds this (about one stride of a factor of four) may be slow; learning is then suspended."""


@dataclass(slots=True)
class _RoleResiduals:
    residuals: dict[Key, tuple[float, float]] = field(default_factory=dict)  # residual, wall time of measurement
    ordered: list[float] = field(default_factory=list)  # the same residuals
    by_age: deque[tuple[float, Key]] = field(default_factory=deque)  # wall time, key; may be superseded
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
    """Per role: the residuals no older than `PEER_AGE_SECONDS`, and the processes that may be slow."""

    def __init__(self) -> None:
        self._roles: dict[str, _RoleResiduals] = {}
        self._made_of = -1

    def refresh(self, roster: ProcessIndex, now: float) -> None:
        """Call before each poll: drops expired residuals; rebuilds everything if the roster changed."""
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
        """Records a new residual of `s`."""
        self._roles.setdefault(s.role, _RoleResiduals()).put(s.key, s.slow.smooth, s.slow.residual_wall)

    def note_sum(self, s: MonitoredProcess) -> None:
        """Records a new CUSUM value of `s`."""
        rising = self._roles.setdefault(s.role, _RoleResiduals()).rising
        if s.slow.cusum >= RISING_SUM:
            rising.add(s.key)
        else:
            rising.discard(s.key)

    def median_without(self, s: MonitoredProcess) -> tuple[int, float]:
        """The number of peers of `s` and the median of their residuals; (0, 0.0) without peers."""
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
        """Whether a peer of `s` may be slow."""
        role = self._roles.get(s.role)
        return role is not None and len(role.rising) > (s.key in role.rising)
