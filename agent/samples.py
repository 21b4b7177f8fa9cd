"""Sampling rounds: registered processes each time, the node every HOST_SECONDS, and the newest poll of the GPUs.

A ring keeps the last rounds. Its readers pass a cursor and get newer rounds and the number of samples they missed. A
cursor is a round number. Numbers start at the node's monotonic clock in milliseconds and grow by one per round (far
slower than the clock), so that they also grow across agent restarts until the next boot; a cursor larger than any
issued (another boot) reads from the start."""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import itemgetter
from typing import Any

from rolecall.agent.collectors.process.host import HostProbe
from rolecall.agent.processes.state_pages import PageState
from rolecall.agent.registry import Registry, Tracked
from rolecall.core.clock import Clock
from rolecall.core.columns import GPUS, HOSTS, PROCESSES
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import NO_PAGE, WIRE_VERSION, GpuSample, HostSample, ProcessSample

NUM_ROUNDS_KEPT = 300
"""One minute at five rounds a second."""
NUM_SAMPLES_KEPT = 4096
"""With many processes fewer rounds are kept."""
NUM_DROPPED_REMEMBERED = 4096


SampleRow = tuple[Any, ...]
"""The values of a ProcessSample, in order."""


@dataclass(slots=True)
class _Round:
    """One sampling round. Samples and JSON are made for the first reader and kept: several rounds at once cost little
    more than one."""

    number: int
    rows: tuple[ProcessSample | SampleRow, ...]
    hosts: tuple[HostSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    _json: tuple[str, ...] = ()

    @property
    def processes(self) -> tuple[ProcessSample, ...]:
        samples = tuple(r if isinstance(r, ProcessSample) else PROCESSES.sample(r) for r in self.rows)
        self.rows = samples
        return samples

    def json(self) -> tuple[str, ...]:
        """Of processes, hosts and GPUs, without brackets."""
        if not self._json:
            kinds = (self.processes, self.hosts, self.gpus)
            self._json = tuple(",".join(_dumps(sample.to_dict()) for sample in kind) for kind in kinds)
        return self._json

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.hosts) + len(self.gpus)


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
        self,
        processes: tuple[ProcessSample | SampleRow, ...],
        hosts: tuple[HostSample, ...],
        gpus: tuple[GpuSample, ...] = (),
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

    def since_json(self, cursor: int) -> bytes:
        """Everything newer than `cursor` (0: everything held) as JSON, in the form of `SampleBatch.to_dict`."""
        rounds, last, lost = self._since(cursor)
        head = {"version": WIRE_VERSION, "node": self._node, "agent_pid": self._agent_pid, "cursor": last, "lost": lost}
        head |= {"at": self._clock.monotonic(), "wall_at": self._clock.wall()}
        texts = [r.json() for r in rounds]
        processes, hosts, gpus = (",".join(t[kind] for t in texts if t[kind]) for kind in range(3))
        return f'{_dumps(head)[:-1]},"processes":[{processes}],"hosts":[{hosts}],"gpus":[{gpus}]}}'.encode()

    def news(self, cursor: int, rounds_max: int = 0) -> dict[str, Any]:
        """The same as columns (rolecall.core.columns) of JSON types; empty kinds are absent. A nonzero `rounds_max`
        limits it to the newest rounds of processes and the newest host and GPU samples; the rest does not count as
        lost."""
        rounds, last, lost = self._since(cursor)
        answer: dict[str, Any] = {"cursor": last, "samples_lost": lost}
        if processes := [p for r in rounds[-rounds_max:] for p in r.processes]:
            answer["processes"] = PROCESSES.encode(processes)
        if hosts := [h for r in _newest(rounds, rounds_max, lambda r: r.hosts) for h in r.hosts]:
            answer["hosts"] = HOSTS.encode(hosts)
        if gpus := [g for r in _newest(rounds, rounds_max, lambda r: r.gpus) for g in r.gpus]:
            answer["gpus"] = GPUS.encode(gpus)
        return answer

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
            # For a cursor of an earlier agent process only this process's drops are known.
            num_lost_rounds = self._rounds[0].number - cursor - 1 if cursor and self._rounds else 0
            lost = sum(islice(reversed(self._dropped), max(0, num_lost_rounds)))
            return newer[::-1], self._last, lost


def _newest(rounds: list[_Round], rounds_max: int, of: Callable[[_Round], object]) -> list[_Round]:
    """All rounds, or with a limit the last one that has such samples."""
    return rounds if not rounds_max else [r for r in rounds if of(r)][-1:]


HOST_SECONDS = 1.0


EngineFields = Callable[[str, int, float], Mapping[str, Any]]
"""(replica, rank, node monotonic seconds) -> fields that an engine's own metrics give; empty: none."""


def sample_of(
    tracked: Tracked, at: float, wall_at: float, engine: EngineFields = lambda *_: {}
) -> ProcessSample | SampleRow:
    """Joins page and kernel state into one sample. `registry.poll` has just read the page."""
    who, page = tracked.registration, tracked.page
    kernel = tracked.probe.read(page.work_tid if page else 0, at)
    if not (alive := tracked.exited_at is None):
        kernel = kernel._replace(proc_state="X", rss_bytes=0, num_threads=0)
    identity = (who.process, who.role, who.replica, who.rank, who.incarnation)
    reported = _NOT_REPORTED if page is None else _reported(page)
    row = (*identity, at, wall_at, alive, tracked.page_ok, *reported, *kernel)
    if page is not None:
        return row
    return replace(PROCESSES.sample(row), phase=NO_PAGE, **engine(who.replica, who.rank, at))


_PAGE_FIELDS = [f for f in fields(ProcessSample) if f.name in {*PageState._fields} - {"replica", "rank", "incarnation"}]
"""The fields of a sample from the page, between those of its time and those of the kernel. The identity is the one that
the registry has verified."""
_reported = itemgetter(*(PageState._fields.index(f.name) for f in _PAGE_FIELDS))
_NOT_REPORTED = tuple(f.default for f in _PAGE_FIELDS)


@dataclass(slots=True)
class RoundStats:
    num_rounds: int = 0
    last_at: float = float("-inf")  # node monotonic, when the newest round ended
    round_seconds: float = 0.0
    process_seconds: float = 0.0
    host_seconds: float = 0.0
    host_ok: bool = True
    processes_ok: bool = True


class Sampler:
    """Called from one thread; writes samples into the ring."""

    def __init__(
        self,
        registry: Registry,
        host: HostProbe,
        ring: SampleRing,
        clock: Clock,
        gpus: Callable[[float, float], tuple[GpuSample, ...]] | None = None,
        engine: EngineFields = lambda *_: {},
    ) -> None:
        """`gpus(monotonic, wall)`: samples of the newest poll of the GPUs, if not yet taken. `engine`: of processes
        without a state page."""
        self._registry, self._host, self._ring, self._clock, self._gpus = registry, host, ring, clock, gpus
        self._engine = engine
        self._host_due = 0.0
        self.stats = RoundStats()

    def round(self) -> None:
        """Samples everything once."""
        begun, wall = self._clock.monotonic(), self._clock.wall()
        samples, all_readable = [], True
        for tracked in self._registry.processes():
            with self._registry.locked():
                if tracked.exited_at is None:
                    self._registry.poll(tracked)
                at = self._clock.monotonic()
                samples.append(sample_of(tracked, at, wall + (at - begun), self._engine))
                all_readable &= tracked.exited_at is not None or tracked.probe.reading.proc_state != "?"
        host_done = self._clock.monotonic()
        hosts: tuple[HostSample, ...] = ()
        if begun >= self._host_due:
            self._host_due = begun + HOST_SECONDS
            hosts = (self._host.read(begun, wall),)
            self.stats.host_ok = not self._host.failures
            self.stats.host_seconds = self._clock.monotonic() - host_done
        gpus = self._gpus(begun, wall) if self._gpus is not None else ()
        self._ring.add(tuple(samples), hosts, gpus)
        self.stats.num_rounds += 1
        self.stats.process_seconds = host_done - begun
        self.stats.processes_ok = all_readable
        self.stats.last_at = self._clock.monotonic()
        self.stats.round_seconds = self.stats.last_at - begun
