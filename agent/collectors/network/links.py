"""Link transitions, from polls once a second and the kernel's count of downs.

A poll detects a link that stays down; the count detects one that recovered before the next poll. A missing device may
be a race with its driver: it counts as gone after three consecutive polls. A link that was never seen up is not
reported as down: ports without a cable are common."""

from collections import deque
from typing import NamedTuple

from rolecall.agent.collectors.base import Fact
from rolecall.core.telemetry import AgentEventKind

FLAP_WINDOW_SECONDS = 300.0
"""One flap is tolerated, two within five minutes lead to action (ByteRobust)."""
NUM_POLLS_GONE = 3
NUM_DOWNS_KEPT = 64
"""Per window: the reported number of flaps saturates here."""
NUM_UNSEEN_MAX = 16
"""Flaps between two polls that are reported individually."""


class LinkTransition(NamedTuple):
    """`num_flaps`: downs within the last `FLAP_WINDOW_SECONDS`, including this one."""

    up: bool
    what: str
    num_flaps: int

    def fact(self, **where: str) -> Fact:
        """`where`: names of the link."""
        detail = {**where, "what": self.what, "flaps": str(self.num_flaps)}
        return Fact(kind=AgentEventKind.LINK_UP if self.up else AgentEventKind.LINK_DOWN, detail=detail)


class LinkWatch:
    """One link. `num_downs`: downs since the first poll; `gone`: its device is."""

    def __init__(self) -> None:
        self.num_downs = 0
        self._up: bool | None = None
        self._counted: int | None = None
        self._uncounted = 0  # downs that a poll saw and the kernel's count does not include yet
        self._num_missed = 0
        self.gone = False
        self._downs: deque[float] = deque(maxlen=NUM_DOWNS_KEPT)

    def poll(self, at: float, up: bool, counted: int | None = None, *, reloaded: bool = False) -> list[LinkTransition]:
        """Transitions since the last poll. `counted`: the kernel's count of downs; `reloaded`: the driver was."""
        self._num_missed, was_gone, self.gone = 0, self.gone, False
        changes = list[LinkTransition]()
        if reloaded and self._up and up:
            changes += [self._down(at, "driver reloaded"), self._change(at, True, "up")]
        elif self._up and not up:
            self._uncounted = 1
            changes.append(self._down(at, "down"))
        unseen = self._num_unseen(counted, reloaded or was_gone)
        for _ in range(min(unseen, NUM_UNSEEN_MAX)):
            changes.append(self._down(at, "down between two polls"))
            if up:
                changes.append(self._change(at, True, "up"))
        if up and self._up is False:
            changes.append(self._change(at, True, "back" if was_gone else "up"))
        self._up = up
        return changes

    def missing(self, at: float) -> list[LinkTransition]:
        """The device was not found at this poll."""
        self._num_missed += 1
        if self.gone or self._num_missed < NUM_POLLS_GONE:
            return []
        self.gone = True
        was_up, self._up = self._up, False
        return [self._down(at, "gone")] if was_up else []

    def _num_unseen(self, counted: int | None, reloaded: bool) -> int:
        before, self._counted = self._counted, counted
        if counted is None or before is None or reloaded or counted <= before:
            return 0
        grown = counted - before
        counted = min(grown, self._uncounted)
        self._uncounted -= counted
        return grown - counted

    def _down(self, at: float, what: str) -> LinkTransition:
        self.num_downs += 1
        self._downs.append(at)
        return self._change(at, False, what)

    def _change(self, at: float, up: bool, what: str) -> LinkTransition:
        while self._downs and at - self._downs[0] > FLAP_WINDOW_SECONDS:
            self._downs.popleft()
        return LinkTransition(up, what, len(self._downs))
