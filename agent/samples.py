"""The last rounds of samples, for readers that come with a cursor: what is newer than it, and how much they missed.

A cursor is the number of a round. Numbers start at the node's monotonic clock in milliseconds and grow by one a round
(far slower than the clock), so that they grow over a restart of the agent, too, until the next boot; a larger one than
any given out (another boot) reads from the start.
"""

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import HostSample, ProcessSample, SampleBatch

NUM_ROUNDS_KEPT = 300
"""One minute at five rounds a second."""
NUM_SAMPLES_KEPT = 4096
"""Fewer rounds are kept where there are many processes."""
NUM_DROPPED_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Round:
    number: int
    processes: tuple[ProcessSample, ...]
    hosts: tuple[HostSample, ...]

    @property
    def size(self) -> int:
        return len(self.processes) + len(self.hosts)


class SampleRing:
    """Owns the rounds. All methods may be called from any thread."""

    def __init__(
        self,
        node: NodeId,
        agent_pid: int,
        clock: Clock,
        num_rounds: int = NUM_ROUNDS_KEPT,
        num_samples: int = NUM_SAMPLES_KEPT,
    ) -> None:
        self._node, self._agent_pid, self._clock = node, agent_pid, clock
        self._num_rounds, self._num_samples = num_rounds, num_samples
        self._lock = threading.Lock()
        self._rounds: deque[_Round] = deque()
        self._held = 0  # samples in _rounds
        self._dropped: deque[int] = deque(maxlen=NUM_DROPPED_REMEMBERED)  # sizes of the last dropped rounds
        self._last = int(clock.monotonic() * 1000)
        self._last_asked = 0
        self.num_taken = 0
        self.num_lost = 0  # dropped before any reader asked

    def add(self, processes: tuple[ProcessSample, ...], hosts: tuple[HostSample, ...]) -> int:
        """One round; returns its number."""
        with self._lock:
            self._last += 1
            self._rounds.append(_Round(self._last, processes, hosts))
            self.num_taken += self._rounds[-1].size
            self._held += self._rounds[-1].size
            while len(self._rounds) > 1 and (len(self._rounds) > self._num_rounds or self._held > self._num_samples):
                gone = self._rounds.popleft()
                self._held -= gone.size
                self._dropped.append(gone.size)
                if gone.number > self._last_asked:
                    self.num_lost += gone.size
            return self._last

    def newest(self) -> tuple[tuple[ProcessSample, ...], tuple[HostSample, ...]]:
        """The last look at each process, and the last at the host."""
        with self._lock:
            if not self._rounds:
                return (), ()
            hosts = next((r.hosts for r in reversed(self._rounds) if r.hosts), ())
            return self._rounds[-1].processes, hosts[-1:]

    def since(self, cursor: int) -> SampleBatch:
        """Everything newer than `cursor` (0: everything held)."""
        with self._lock:
            if cursor > self._last:
                cursor = 0
            rounds = [r for r in self._rounds if r.number > cursor]
            lost = self._num_lost_since(cursor)
            self._last_asked = last = self._last
        return SampleBatch(
            node=self._node,
            agent_pid=self._agent_pid,
            cursor=last,
            lost=lost,
            at=self._clock.monotonic(),
            wall_at=self._clock.wall(),
            processes=tuple(p for r in rounds for p in r.processes),
            hosts=tuple(h for r in rounds for h in r.hosts),
        )

    def _num_lost_since(self, cursor: int) -> int:
        if cursor == 0 or not self._rounds:
            return 0
        num_rounds = self._rounds[0].number - cursor - 1
        # A cursor of an earlier agent counts only what this one dropped: the other's rounds are unknown to it.
        return sum(islice(reversed(self._dropped), max(0, num_rounds)))
