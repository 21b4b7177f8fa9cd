"""Incarnations of the replicas of a job that rolecall did not start, for a watch that may act on it.

Nobody counts them there, so they are counted as they are seen. The first processes of a replica are incarnation 1. A
process belongs to the next one if its rank has another process in this one, or if one of this one has ended. Events
that an agent repeats to a new watch are of the past and count nothing. The journal's desired and actual state follow
what is seen: recovery then reads the same records as of a run of rolecall.

A replica serves while each rank that its largest incarnation had runs; once one has ended it is stopped. A job that
starts again with fewer ranks is whole with these: its processes say how many there are, or the ranks 0 to n-1 run for
`SHRUNK_SECONDS`, no other one starts, and none of the incarnation before runs.

A replica of which nothing has run for `OVER_SECONDS` is dropped, unless an open incident is about it: where each job
has names of its own, they would become ever more. Its number is kept: what comes back is the next incarnation.

Only the watch that leads writes, under its lease: one that stood still while another led writes nothing more. One that
stands by takes over the leader's numbers, and adds what it sees itself.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from rolecall.core.clock import Clock
from rolecall.core.errors import InvalidId, JournalError, LeaseFenced
from rolecall.core.ids import NodeId, ProcessId, ReplicaId, split_replica
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, job_names
from rolecall.detector.base.observation import Observation
from rolecall.recovery.actuators.targets.target import Member
from rolecall.recovery.interfaces import ObservationSource

logger = logging.getLogger(__name__)

FLAG = "observed_incarnations"
FORMER_FLAG, FORMER_MAX = "observed_former", 4096
"""Numbers of the replicas that were dropped, the last ones."""
OVER_SECONDS = 3600.0
SETTLE_SECONDS = 3.0
"""A process that registers gets the name that it asks for: what it was called before is not written down."""
UNCOUNTED_MAX = 65_536
"""Processes of other roles that are remembered."""
REGISTERED_MAX = 4 * UNCOUNTED_MAX
"""Registrations that are kept; beyond it only of processes that were seen to run."""
FRESH_SECONDS = 30.0
"""A registration that is older is repeated history."""
BOOT_SECONDS = 5.0
"""A process that registered so much later than another one did not start before it: its node was booted in between, and
start times began again."""
SILENT_SECONDS = 60.0
"""A process that its agent, which answers, has not sampled for this long has ended."""
SWEEP_SECONDS = 10.0
SHRUNK_SECONDS = 60.0
"""Ranks that start together are seen within this time; until then a replica may have restarted in part."""
FOREIGN = "~"
"""Before the replica of a process of another job, in what is kept."""
SEEN = "as its processes were seen"
One = TypeVar("One", ProcessSample, AgentEvent)


class _Registered(NamedTuple):
    """`at`: wall seconds of its node. `world_size`: ranks of its job; 0: not known."""

    job: str
    rendezvous: str
    pod_uid: str
    slurm_step: str
    at: float
    world_size: int = 0

    @property
    def kept(self) -> tuple[str | float, ...]:
        """In the journal: `world_size` is used once."""
        return self[:-1]


_UNKNOWN = _Registered("", "", "", "", 0.0)


def _registration(event: AgentEvent, known: _Registered | None) -> _Registered:
    """`known`: of an earlier registration of the same process."""
    size = event.detail.get("world_size", "")
    return _Registered(
        job=next(iter(job_names(event)), ""),
        rendezvous=event.detail.get("rendezvous", ""),
        pod_uid=event.detail.get("pod_uid", ""),
        slurm_step=event.detail.get("slurm_step", ""),
        at=event.wall_at if known is None else min(known.at, event.wall_at),
        world_size=int(size) if size.isascii() and size.isdecimal() else 0,
    )


class EveryProcess:
    """Passes on what a source sees, and remembers the processes that run, of whatever job: a watch of one job leaves
    the others out, and an action must not end them. Called from one thread."""

    def __init__(self, source: ObservationSource) -> None:
        self._source = source
        self._running: dict[ProcessId, tuple[str, int, float]] = {}  # replica, rank, wall seconds of the last sample
        self._registered: dict[ProcessId, _Registered] = {}
        self._swept_at = 0.0

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            if event.process is None:
                continue
            if event.kind is AgentEventKind.REGISTERED and len(self._registered) < REGISTERED_MAX:
                self._registered[event.process] = _registration(event, self._registered.get(event.process))
            elif event.kind is AgentEventKind.EXITED:
                self._forget(event.process)
        for batch in seen.batches:
            for sample in batch.processes:
                if not sample.alive:
                    self._forget(sample.process)
                elif sample.process in self._running or len(self._running) < UNCOUNTED_MAX:
                    self._running[sample.process] = sample.replica, sample.rank, seen.wall_at
        if seen.batches and abs(seen.wall_at - self._swept_at) > SWEEP_SECONDS:
            self._swept_at = seen.wall_at
            answering = {batch.node for batch in seen.batches}
            for process, (_, _, at) in list(self._running.items()):
                if process.node in answering and seen.wall_at - at > SILENT_SECONDS:
                    self._forget(process)
        return seen

    def running(self) -> Iterator[tuple[ProcessId, str, int, _Registered]]:
        """(process, replica, rank, registration) of each."""
        for process, (replica, rank, _) in self._running.items():
            yield process, replica, rank, self._registered.get(process, _UNKNOWN)

    def _forget(self, process: ProcessId) -> None:
        self._running.pop(process, None)
        self._registered.pop(process, None)


@dataclass(slots=True)
class _Counted:
    """Newest incarnation of one replica. `expected`: ranks of a whole one; `since`: monotonic seconds; `previous`:
    processes of the one before; `num_settled`: sweeps in which all its ranks were seen, since another one was;
    `over_at`: since when nothing of it runs, monotonic seconds."""

    incarnation: int
    since: float
    ranks: dict[int, ProcessId] = field(default_factory=dict)
    ended: set[ProcessId] = field(default_factory=set)
    expected: int = 1
    previous: set[ProcessId] = field(default_factory=set)
    num_settled: int = 0
    over_at: float | None = None

    @property
    def state(self) -> ReplicaState:
        if self.ended:
            return ReplicaState.STOPPED
        return ReplicaState.SERVING if len(self.ranks) >= self.expected else ReplicaState.READY


class ObservedFleet:
    """A source that counts incarnations and writes them to the journal. Called from one thread. `roles`: those whose
    replicas are counted; the others are passed on as they are, and recovery knows no such replica. Their processes are
    remembered all the same: an action on another replica must not end them. `lease`: that of this watch; None: another
    one leads. `every`: all processes of the nodes, where `source` leaves other jobs out. `needed`: replicas that open
    incidents are about."""

    def __init__(
        self,
        source: ObservationSource,
        journal: Journal,
        clock: Clock,
        roles: frozenset[str],
        lease: Callable[[], Lease | None],
        every: EveryProcess | None = None,
        needed: Callable[[], Collection[str]] = frozenset[str],
    ) -> None:
        self._source, self._journal, self._clock, self._roles, self._every = source, journal, clock, roles, every
        self._lease, self._needed = lease, needed
        self._replicas: dict[str, _Counted] = {}
        self._former: dict[str, int] = {}  # replica that was dropped -> its incarnation
        self._of: dict[ProcessId, tuple[str, int]] = {}  # (replica, incarnation)
        self._uncounted: dict[ProcessId, tuple[str, int]] = {}  # (replica, rank), of other roles
        self._registered: dict[ProcessId, _Registered] = {}
        self._written: dict[str, tuple[int, ReplicaState]] = {}
        self._kept = ""
        self._fence: int | None = None  # of the lease under which this one has led since it last read
        self._swept_at = clock.monotonic()
        self._sampled: set[ProcessId] = set()  # since then
        self._answering: set[str] = set()  # nodes, the same
        self._num_missed: dict[ProcessId, int] = {}  # sweeps in a row without a sample
        self._read()

    def members(self) -> list[tuple[int, Member]]:
        """(incarnation, process) of all that run; of roles that are not counted, and of other jobs, incarnation 0."""
        others = [
            (UNCOUNTED, _member(replica, rank, process, registered, foreign=True))
            for process, replica, rank, registered in self._foreign()
        ]
        others += [
            (UNCOUNTED, _member(replica, rank, process, self._registered.get(process, _UNKNOWN)))
            for process, (replica, rank) in self._uncounted.items()
        ]
        return others + [
            (counted.incarnation, _member(replica, rank, process, self._registered.get(process, _UNKNOWN)))
            for replica, counted in self._replicas.items()
            for rank, process in counted.ranks.items()
            if process not in counted.ended
        ]

    def _foreign(self) -> Iterator[tuple[ProcessId, str, int, _Registered]]:
        for one in self._every.running() if self._every is not None else ():
            if one[0] not in self._of and one[0] not in self._uncounted and _is_replica(one[1]):
                yield one

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        lease = self._lease()
        if lease is None or lease.fence != self._fence:  # another leader may have written since this one last read
            self._read()
        self._fence = None if lease is None else lease.fence
        for event in seen.events:
            self._take_event(event, seen.wall_at)
        for batch in seen.batches:
            if batch.processes or batch.hosts:  # else no round of its agent
                self._answering.add(batch.node)
            for sample in batch.processes:
                self._take_sample(sample)
                self._sampled.add(sample.process)
        if self._clock.monotonic() - self._swept_at >= SWEEP_SECONDS:
            self._sweep()
        if lease is not None:
            self._write(lease)
        batches = tuple(replace(b, processes=tuple(map(self._counted, b.processes))) for b in seen.batches)
        return replace(seen, batches=batches, events=tuple(map(self._counted, seen.events)))

    def _counted(self, one: One) -> One:
        known = self._of.get(one.process) if one.process is not None else None
        return one if known is None or known[0] != one.replica else replace(one, incarnation=known[1])

    def _take_event(self, event: AgentEvent, now: float) -> None:
        if event.process is None:
            return
        if event.kind is AgentEventKind.REGISTERED:
            known = self._registered.get(event.process)
            if len(self._registered) >= REGISTERED_MAX:
                here = self._of.keys() | self._uncounted.keys()
                self._registered = {p: told for p, told in self._registered.items() if p in here}
            self._registered[event.process] = _registration(event, known)
            if now - event.wall_at <= FRESH_SECONDS:
                self._count(event.replica, event.rank, event.process)
            self._shrink(event.process)
        elif event.kind is AgentEventKind.EXITED:
            self._end(event.process)

    def _take_sample(self, sample: ProcessSample) -> None:
        if sample.alive:
            self._count(sample.replica, sample.rank, sample.process)
        else:
            self._end(sample.process)

    def _count(self, replica: str, rank: int, process: ProcessId) -> None:
        before = self._of.get(process)
        if before is not None:
            if before[0] == replica:
                newest = self._replicas.get(replica)
                if newest is not None and newest.incarnation > before[1]:
                    newest.num_settled = 0
                return
            self._rename(process, before[0])
        try:
            if split_replica(replica)[0] not in self._roles:
                if len(self._uncounted) < UNCOUNTED_MAX:
                    self._uncounted[process] = replica, rank
                return
        except InvalidId:
            return
        self._uncounted.pop(process, None)
        counted = self._replicas.get(replica)
        if counted is None:
            number = self._former.get(replica, 0) + 1
            counted = self._replicas[replica] = _Counted(incarnation=number, since=self._clock.monotonic())
        elif any(self._is_older(process, p) for p in counted.ended):
            return  # older than one of this incarnation that has ended
        elif counted.ended or counted.ranks.get(rank, process) != process:
            held = counted.ranks.get(rank)
            if held is not None and self._is_older(process, held):
                return
            for old in counted.previous:
                self._of.pop(old, None)
                self._registered.pop(old, None)
            counted = self._replicas[replica] = _Counted(
                incarnation=counted.incarnation + 1,
                since=self._clock.monotonic(),
                expected=counted.expected,
                previous=set(counted.ranks.values()),
            )
        counted.ranks[rank] = process
        counted.expected = max(counted.expected, len(counted.ranks))
        counted.num_settled, counted.over_at = 0, None
        self._of[process] = replica, counted.incarnation
        self._shrink(process)

    def _shrink(self, process: ProcessId) -> None:
        """Fewer ranks make its incarnation whole if it says so. More do not: a job may have several replicas."""
        replica, incarnation = self._of.get(process, ("", 0))
        counted, size = self._replicas.get(replica), self._registered.get(process, _UNKNOWN).world_size
        if counted is not None and counted.incarnation == incarnation and max(counted.ranks, default=0) < size:
            counted.expected = min(counted.expected, size)

    def _is_older(self, process: ProcessId, than: ProcessId) -> bool:
        """Whether it started before the other one, as far as that can be told: on the same node."""
        if process.node != than.node or process.start_ticks >= than.start_ticks:
            return False
        ours, other = self._registered.get(process, _UNKNOWN), self._registered.get(than, _UNKNOWN)
        return not (other.at > 0 and ours.at > other.at + BOOT_SECONDS)

    def _rename(self, process: ProcessId, was: str) -> None:
        """Takes the process out of the replica that it was thought to belong to."""
        counted = self._replicas.get(was)
        if counted is None:
            return
        counted.ranks = {rank: p for rank, p in counted.ranks.items() if p != process}
        if not counted.ranks and was not in self._written:
            del self._replicas[was]

    def _end(self, process: ProcessId) -> None:
        if self._uncounted.pop(process, None) is not None:
            self._registered.pop(process, None)
        replica, incarnation = self._of.get(process, ("", 0))
        counted = self._replicas.get(replica)
        if counted is not None and counted.incarnation == incarnation:
            counted.ended.add(process)

    def _sweep(self) -> None:
        """Ends processes whose exit was missed. It counts sweeps, not time: this watch may have stood still."""
        running = {p for c in self._replicas.values() for p in c.ranks.values() if p not in c.ended} | {
            *self._uncounted
        }
        self._num_missed = {
            p: self._num_missed.get(p, 0) + (p.node in self._answering) for p in running - self._sampled
        }
        for process, num_missed in self._num_missed.items():
            if num_missed * SWEEP_SECONDS >= SILENT_SECONDS:
                self._end(process)
        now = self._clock.monotonic()
        for counted in self._replicas.values():
            if counted.over_at is None and counted.ended.issuperset(counted.ranks.values()):
                counted.over_at = now
            num_ranks = len(counted.ranks)
            if 0 < num_ranks < counted.expected and self._sampled.issuperset(counted.ranks.values()):
                counted.num_settled += 1
                is_gapless = max(counted.ranks) == num_ranks - 1
                if is_gapless and counted.num_settled * SWEEP_SECONDS >= SHRUNK_SECONDS:
                    counted.expected = num_ranks
        self._swept_at, self._sampled, self._answering = now, set(), set()

    # --- the journal --------------------------------------------------------------------------------------------------

    def _write(self, lease: Lease) -> None:
        now = self._clock.monotonic()
        try:
            for replica, counted in self._replicas.items():
                this = counted.incarnation, counted.state
                if self._written.get(replica) != this and counted.ranks and now - counted.since >= SETTLE_SECONDS:
                    self._write_replica(ReplicaId(replica), counted, lease)
                    self._written[replica] = this
            self._drop_over(lease)
            text = self._to_json()
            if text != self._kept:
                self._journal.set_flag(FLAG, text, lease=lease)
                self._kept = text
        except LeaseFenced as e:  # what another leader has counted since is read with the next poll
            self._fence = None
            logger.warning("the observed replicas are not written: %s", e)
        except JournalError as e:  # the next poll writes it
            logger.warning("the observed replicas are not written: %s", e)

    def _drop_over(self, lease: Lease) -> None:
        now = self._clock.monotonic()
        over = {r for r, c in self._replicas.items() if c.over_at is not None and now - c.over_at >= OVER_SECONDS}
        if over:
            over -= {*self._needed()}
        if not over:
            return
        kept = {r: number for r, number in self._former.items() if r not in over}
        kept |= {r: self._replicas[r].incarnation for r in sorted(over)}
        former = dict(list(kept.items())[-FORMER_MAX:])
        self._journal.set_flag(FORMER_FLAG, json.dumps(former, separators=(",", ":")), lease=lease)
        self._journal.forget_replicas(over, lease=lease)
        self._former = former
        for replica in over:
            counted = self._replicas.pop(replica)
            self._written.pop(replica, None)
            for process in (*counted.ranks.values(), *counted.previous):
                self._of.pop(process, None)
                self._registered.pop(process, None)

    def _write_replica(self, replica: ReplicaId, counted: _Counted, lease: Lease) -> None:
        first = counted.ranks[min(counted.ranks)]
        node = NodeId(first.node)
        seen = Desired(replica=replica, incarnation=counted.incarnation, node=node, because=SEEN)
        self._journal.set_desired(seen, lease=lease)
        self._journal.set_actual(
            Actual(
                replica=replica,
                incarnation=counted.incarnation,
                node=node,
                state=counted.state,
                pid=first.pid,
                start_ticks=first.start_ticks,
                because="a process of it has ended" if counted.ended else "",
            ),
            lease=lease,
        )

    def _to_json(self) -> str:
        kept: dict[str, list[Any]] = {}
        for replica, c in sorted(self._replicas.items()):
            ranks = [self._row(rank, p, p not in c.ended) for rank, p in c.ranks.items()]
            previous = [[p.node, p.pid, p.start_ticks] for p in sorted(c.previous)]
            kept[replica] = [c.incarnation, c.expected, ranks, *([previous] if previous else [])]
        for process, (replica, rank) in self._uncounted.items():
            kept.setdefault(replica, [UNCOUNTED, 0, []])[2].append(self._row(rank, process, True))
        for process, replica, rank, registered in self._foreign():
            row = [rank, process.node, process.pid, process.start_ticks, *registered.kept, True]
            kept.setdefault(FOREIGN + replica, [UNCOUNTED, 0, []])[2].append(row)
        return json.dumps(kept, separators=(",", ":"))

    def _row(self, rank: int, process: ProcessId, lives: bool) -> list[Any]:
        registered = self._registered.get(process, _UNKNOWN)
        return [rank, process.node, process.pid, process.start_ticks, *registered.kept, lives]

    def _read(self) -> None:
        """What another watch has counted since it was last read, and what this one has seen to end."""
        replicas: dict[str, _Counted] = {}
        of: dict[ProcessId, tuple[str, int]] = {}
        try:
            text = self._journal.flag(FLAG) or ""
            if text == self._kept:
                return
            self._kept = text
            former = {str(r): int(number) for r, number in json.loads(self._journal.flag(FORMER_FLAG) or "{}").items()}
            for replica, incarnation, expected, rank, process, registered, lives in _kept(text):
                if incarnation == UNCOUNTED:
                    continue  # those that still run are seen again
                counted = replicas.setdefault(
                    replica, _Counted(incarnation=incarnation, since=self._clock.monotonic(), expected=expected)
                )
                counted.ranks[rank] = process
                counted.ended |= set() if lives else {process}
                of[process] = replica, incarnation
                self._registered[process] = registered
            for replica, process in _kept_previous(text):
                replicas[replica].previous.add(process)
                of[process] = replica, replicas[replica].incarnation - 1
        except (JournalError, ValueError, TypeError, KeyError, AttributeError) as e:
            logger.warning("the observed replicas cannot be read, and are counted anew: %s", e)
            return
        ended = [p for counted in self._replicas.values() for p in counted.ended]
        self._replicas, self._of, self._written, self._former = replicas, of, {}, former
        for process in ended:
            self._end(process)


def _is_replica(name: str) -> bool:
    try:
        split_replica(name)
    except InvalidId:
        return False
    return True


def _member(replica: str, rank: int, process: ProcessId, registered: _Registered, *, foreign: bool = False) -> Member:
    return Member(
        replica=replica,
        rank=rank,
        node=process.node,
        pid=process.pid,
        start_ticks=process.start_ticks,
        job=registered.job,
        rendezvous=registered.rendezvous,
        registered_at=registered.at,
        pod_uid=registered.pod_uid,
        slurm_step=registered.slurm_step,
        foreign=foreign,
    )


def _kept(text: str) -> Iterator[tuple[str, int, int, int, ProcessId, _Registered, bool]]:
    """(replica, incarnation, expected ranks, rank, process, registration, whether it lives) as the newest watch saw it.
    Raises ValueError, TypeError, AttributeError: what is kept is damaged."""
    for replica, (incarnation, expected, ranks, *_) in json.loads(text or "{}").items():
        for rank, node, pid, start_ticks, *names, at, lives in ranks:
            process = ProcessId(node=NodeId(node), pid=pid, start_ticks=start_ticks)
            job, rendezvous, pod_uid, slurm_step = map(str, names)
            registered = _Registered(job, rendezvous, pod_uid, slurm_step, float(at))
            yield replica, incarnation, expected, rank, process, registered, lives


def _kept_previous(text: str) -> Iterator[tuple[str, ProcessId]]:
    """(replica, process of the incarnation before the kept one). Raises as `_kept`."""
    for replica, (_, _, _, *rest) in json.loads(text or "{}").items():
        for node, pid, start_ticks in rest[0] if rest else ():
            yield replica, ProcessId(node=NodeId(node), pid=pid, start_ticks=start_ticks)


def kept_members(journal: Journal) -> list[tuple[int, Member]]:
    """(incarnation, process) of all that ran when the newest watch last looked; none if nothing was kept."""
    try:
        return [
            (n, _member(replica.removeprefix(FOREIGN), rank, p, it, foreign=replica.startswith(FOREIGN)))
            for replica, n, _, rank, p, it, lives in _kept(journal.flag(FLAG) or "")
            if lives
        ]
    except (ValueError, TypeError, AttributeError):
        return []
