"""Ring of the last sampling rounds. Readers pass a cursor and get newer rounds and the number of samples they missed.

A cursor is a round number. Numbers start at the node's monotonic clock in milliseconds and grow by one per round (far
slower than the clock), so that they also grow across agent restarts until the next boot; a cursor larger than any
issued (another boot) reads from the start."""

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.columns import GPUS, HOSTS, PROCESSES
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import WIRE_VERSION, GpuSample, HostSample, ProcessSample, SampleBatch

NUM_ROUNDS_KEPT = 300
"""One minute at five rounds a second."""
NUM_SAMPLES_KEPT = 4096
"""With many processes fewer rounds are kept."""
NUM_DROPPED_REMEMBERED = 4096


@dataclass(slots=True)
class _Round:
    """One sampling round. Its JSON is rendered for the first reader and cached."""

    number: int
    processes: tuple[ProcessSample, ...]
    hosts: tuple[HostSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    processes_json: str | None = None
    hosts_json: str = ""
    gpus_json: str = ""

    def make_json(self) -> None:
        if self.processes_json is None:
            self.hosts_json = ",".join(_dumps(h.to_dict()) for h in self.hosts)
            self.gpus_json = ",".join(_dumps(g.to_dict()) for g in self.gpus)
            self.processes_json = ",".join(_dumps(p.to_dict()) for p in self.processes)

    @property
    def size(self) -> int:
        return len(self.processes) + len(self.hosts) + len(self.gpus)


_dumps = json.JSONEncoder(separators=(",", ":")).encode


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

    def add(
        self, processes: tuple[ProcessSample, ...], hosts: tuple[HostSample, ...], gpus: tuple[GpuSample, ...] = ()
    ) -> int:
        """One round; returns its number."""
        with self._lock:
            self._last += 1
            self._rounds.append(_Round(self._last, processes, hosts, gpus))
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
        """The newest samples of the processes and the newest of the host."""
        with self._lock:
            if not self._rounds:
                return (), ()
            hosts = next((r.hosts for r in reversed(self._rounds) if r.hosts), ())
            return self._rounds[-1].processes, hosts[-1:]

    def since(self, cursor: int) -> SampleBatch:
        """Everything newer than `cursor` (0: everything held)."""
        rounds, last, lost = self._since(cursor)
        return SampleBatch(
            node=self._node,
            agent_pid=self._agent_pid,
            cursor=last,
            lost=lost,
            at=self._clock.monotonic(),
            wall_at=self._clock.wall(),
            processes=tuple(p for r in rounds for p in r.processes),
            hosts=tuple(h for r in rounds for h in r.hosts),
            gpus=tuple(g for r in rounds for g in r.gpus),
        )

    def since_json(self, cursor: int) -> bytes:
        """`since` as JSON, in the form of `SampleBatch.to_dict`."""
        rounds, last, lost = self._since(cursor)
        for r in rounds:
            r.make_json()
        head = {"version": WIRE_VERSION, "node": self._node, "agent_pid": self._agent_pid, "cursor": last, "lost": lost}
        head |= {"at": self._clock.monotonic(), "wall_at": self._clock.wall()}
        processes = ",".join(r.processes_json for r in rounds if r.processes_json)
        hosts = ",".join(r.hosts_json for r in rounds if r.hosts_json)
        gpus = ",".join(r.gpus_json for r in rounds if r.gpus_json)
        return f'{_dumps(head)[:-1]},"processes":[{processes}],"hosts":[{hosts}],"gpus":[{gpus}]}}'.encode()

    def news(self, cursor: int, rounds_max: int = 0) -> dict[str, Any]:
        """`since` as columns (rolecall.core.columns) of JSON types; empty kinds are absent. A nonzero `rounds_max`
        limits it to the newest rounds of processes and the newest host and GPU samples; the rest does not count as
        lost."""
        rounds, last, lost = self._since(cursor)
        said: dict[str, Any] = {"cursor": last, "samples_lost": lost}
        if processes := [p for r in rounds[-rounds_max:] for p in r.processes]:
            said["processes"] = PROCESSES.encode(processes)
        if hosts := [h for r in _newest(rounds, rounds_max, lambda r: r.hosts) for h in r.hosts]:
            said["hosts"] = HOSTS.encode(hosts)
        if gpus := [g for r in _newest(rounds, rounds_max, lambda r: r.gpus) for g in r.gpus]:
            said["gpus"] = GPUS.encode(gpus)
        return said

    def _since(self, cursor: int) -> tuple[list[_Round], int, int]:
        with self._lock:
            if cursor > self._last:
                cursor = 0
            newer: list[_Round] = []
            for r in reversed(self._rounds):  # pollers need the last one or two of three hundred
                if r.number <= cursor:
                    break
                newer.append(r)
            self._last_asked = self._last
            return newer[::-1], self._last, self._num_lost_since(cursor)

    def _num_lost_since(self, cursor: int) -> int:
        if cursor == 0 or not self._rounds:
            return 0
        num_rounds = self._rounds[0].number - cursor - 1
        # For a cursor of an earlier agent process only this process's drops are known.
        return sum(islice(reversed(self._dropped), max(0, num_rounds)))


def _newest(rounds: list[_Round], rounds_max: int, of: Callable[[_Round], object]) -> list[_Round]:
    """All rounds, or with a limit the last one that has such samples."""
    return rounds if not rounds_max else [r for r in rounds if of(r)][-1:]
