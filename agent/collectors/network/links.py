"""When a link went down and came back, from looks once a second and the kernel's own count of downs.

A look sees a link that stays down; the count tells of one that was back before the next look. A device that is not
there may be one that is read at a bad moment: it is gone when three looks in a row miss it. A link that was never seen
up is not reported as down: ports without a cable are usual.
"""

from collections import deque
from typing import NamedTuple

FLAP_WINDOW_SECONDS = 300.0
"""One flap is tolerated, two in five minutes are acted upon (ByteRobust)."""
NUM_LOOKS_GONE = 3
NUM_DOWNS_KEPT = 64
"""Of one window: more flaps are told as so many."""
NUM_UNSEEN_MAX = 16
"""Flaps between two looks that are told one by one."""


class LinkTransition(NamedTuple):
    """`num_flaps`: times that it went down within the last `FLAP_WINDOW_SECONDS`, this one included."""

    up: bool
    what: str
    num_flaps: int


class LinkWatch:
    """One link. `num_downs`: how often it went down since the first look."""

    def __init__(self) -> None:
        self.num_downs = 0
        self._up: bool | None = None
        self._counted: int | None = None
        self._owed = 0  # downs that a look saw and the kernel's count does not hold yet
        self._num_missed = 0
        self._gone = False
        self._downs: deque[float] = deque(maxlen=NUM_DOWNS_KEPT)

    def look(self, at: float, up: bool, counted: int | None = None, *, anew: bool = False) -> list[LinkTransition]:
        """What changed. `counted`: the kernel's count of downs, where it keeps one; `anew`: its driver was loaded again."""
        self._num_missed, was_gone, self._gone = 0, self._gone, False
        changes = list[LinkTransition]()
        if anew and self._up and up:
            changes += [self._down(at, "driver loaded again"), self._change(at, True, "up")]
        elif self._up and not up:
            self._owed = 1
            changes.append(self._down(at, "down"))
        unseen = self._num_unseen(counted, anew or was_gone)
        for _ in range(min(unseen, NUM_UNSEEN_MAX)):
            changes.append(self._down(at, "down between two looks"))
            if up:
                changes.append(self._change(at, True, "up"))
        if up and self._up is False:
            changes.append(self._change(at, True, "back" if was_gone else "up"))
        self._up = up
        return changes

    def missing(self, at: float) -> list[LinkTransition]:
        """The device is not there."""
        self._num_missed += 1
        if self._gone or self._num_missed < NUM_LOOKS_GONE:
            return []
        self._gone = True
        was_up, self._up = self._up, False
        return [self._down(at, "gone")] if was_up else []

    @property
    def gone(self) -> bool:
        return self._gone

    def _num_unseen(self, counted: int | None, anew: bool) -> int:
        before, self._counted = self._counted, counted
        if counted is None or before is None or anew or counted <= before:
            return 0
        grown = counted - before
        paid = min(grown, self._owed)
        self._owed -= paid
        return grown - paid

    def _down(self, at: float, what: str) -> LinkTransition:
        self.num_downs += 1
        self._downs.append(at)
        return self._change(at, False, what)

    def _change(self, at: float, up: bool, what: str) -> LinkTransition:
        while self._downs and at - self._downs[0] > FLAP_WINDOW_SECONDS:
            self._downs.popleft()
        return LinkTransition(up, what, len(self._downs))
