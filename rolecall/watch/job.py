"""Which job a watch of agents watches, and what it sees of it, as frozen values for a display. Pure, except for the
sources `JobObserver`, `OneJobSource` and `FirstJobSource`, which the loop owns.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rolecall.agent.collectors.process.discovery import job_number
from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId, ProcessId, role_of, split_replica
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, job_names
from rolecall.core.text import counted, spans
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.recovery.incidents import Incident
from rolecall.recovery.interfaces import ObservationSource
from rolecall.views.observed_ranks import EXITED_KEPT_SECONDS

logger = logging.getLogger(__name__)

SHOW_SECONDS = 1.0
RANKS_PER_SECOND = 2000
"""With more ranks a job is shown less often: the loop has faults to find."""
GROUPS_SHOWN_MAX = 8
ALL_JOBS = "all"
"""As --job: every job on the nodes."""
OVERLAP_SECONDS = 15.0
"""A job that runs beside the watched one for longer is another one, and never takes its place. A shorter overlap is a
job that starts again while an agent is a few polls behind."""
SILENT_SECONDS = 30.0
"""A job none of whose ranks was sampled alive for this long has ended."""
PROCESSES_MAX = 65_536
"""Processes whose job is remembered; beyond that only those of jobs that live."""
EARLY_MAX = 1000
"""Events of a job that are held until it is known whether it is watched."""
_LAUNCHERS = ("torchrun", "slurm", "srun")
"""Rules and launchers that give all ranks of a job one rendezvous. The actors of one Ray job have several."""
UNKNOWN_SECONDS = 30.0
"""After this time in which no process is known to be of the chosen job, or the job of one of a node's processes is not
known, the watch warns."""
EXITED = "exited"
REPORTER = "reporter"
"""How a process was found that registered itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    replica: str
    rank: int
    node: str
    found_by: str  # rule of the agent, as `torchrun`; empty: not known yet
    state: str  # `running`, `exited`, `stopped` by a signal, or the phase that it reports
    step: int = -1  # optimizer step; -1: not reported
    pid: int = 0  # 0: not known yet
    job: str = ""  # run id, else rendezvous; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """`at` and the values of `unreachable` (node -> since when) are wall seconds."""

    at: float
    nodes: tuple[str, ...] = ()
    ranks: tuple[WatchedRank, ...] = ()
    unreachable: Mapping[str, float]
    incidents: tuple[Incident, ...] = ()
    other_jobs: tuple[str, ...] = ()
    """Jobs that also run on these nodes and are not watched."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Those with a rank that runs."""
        return tuple(sorted({r.job for r in self.ranks if r.job and r.state != EXITED}))

    @property
    def text(self) -> str:
        """`4 ranks: trainer/0 0-3 (torchrun) on vm`."""
        if not self.ranks:
            return f"no ranks yet on {_some(self.nodes)}"
        groups = [
            f"{replica} {spans(r.rank for r in ranks)}{f' ({found_by})' if found_by else ''} on {node}"
            for (replica, found_by, node), ranks in grouped(self.ranks).items()
        ]
        exited = sum(r.state == EXITED for r in self.ranks)
        over = "" if not exited else ", all exited" if exited == len(self.ranks) else f", {exited:,} exited"
        return f"{counted(len(self.ranks), 'rank')}{over}: {_some(groups, '; ')}"


def grouped(ranks: Iterable[WatchedRank]) -> dict[tuple[str, str, str], list[WatchedRank]]:
    """(replica, found by, node) -> its ranks, in the order of the ranks."""
    groups: dict[tuple[str, str, str], list[WatchedRank]] = {}
    for rank in ranks:
        groups.setdefault((rank.replica, rank.found_by, rank.node), []).append(rank)
    return groups


def _some(names: Collection[str], between: str = ", ") -> str:
    more = len(names) - GROUPS_SHOWN_MAX
    return between.join([*list(names)[:GROUPS_SHOWN_MAX], *([f"{more:,} more"] if more > 0 else [])])


class OneJobSource:
    """Passes on the processes of one job, by its run id or rendezvous. Called from one thread.

    An agent tells the job of a process only when it registers, and keeps that event while the process lives. Where it
    is lost nevertheless (`events.jsonl` was deleted), a new watch cannot know the process's job, and warns.
    """

    def __init__(self, source: ObservationSource, job: str, clock: Clock) -> None:
        self._source, self._job, self._clock = source, job, clock
        self._ours: set[ProcessId] = set()
        self._others: set[ProcessId] = set()
        self._warns_at: float | None = None
        self._unknown_since: dict[NodeId, float] = {}
        self._warned_of: set[NodeId] = set()

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            if event.kind is AgentEventKind.REGISTERED and event.process:
                (self._ours if self._job in job_names(event) else self._others).add(event.process)
        sampled = [p for b in seen.batches for p in b.processes]
        self._warn(len({p.process for p in sampled}))
        self._warn_of_nodes({p.process for p in sampled if p.alive})
        self._others.difference_update(p.process for p in sampled if not p.alive)
        batches = tuple(
            replace(b, processes=tuple(p for p in b.processes if p.process in self._ours)) for b in seen.batches
        )
        events = tuple(e for e in seen.events if e.process is None or e.process in self._ours)
        return replace(seen, batches=batches, events=events)

    def _warn(self, num_sampled: int) -> None:
        """Once, if only processes that are not known to be of the job are sampled."""
        if self._ours or not num_sampled:
            return
        if self._warns_at is None:
            self._warns_at = self._clock.monotonic() + UNKNOWN_SECONDS
        elif self._clock.monotonic() >= self._warns_at:
            self._warns_at = float("inf")
            logger.warning(
                "job %s: none of the %s that the agents report is known to belong to it. If it has not started yet, "
                "wait; else check --job",
                self._job,
                counted(num_sampled, "process", "processes"),
            )

    def _warn_of_nodes(self, living: Collection[ProcessId]) -> None:
        """Once per node, if processes live there whose registration is not known."""
        now = self._clock.monotonic()
        unknown = Counter(p.node for p in living if p not in self._ours and p not in self._others)
        for node in {p.node for p in living} - unknown.keys():
            self._unknown_since.pop(node, None)
        for node, num in unknown.items():
            if now - self._unknown_since.setdefault(node, now) < UNKNOWN_SECONDS or node in self._warned_of:
                continue
            self._warned_of.add(node)
            logger.warning(
                "%s: the job of %s is not known, because the agent has lost the events of their registration. If they "
                "are of job %s, they are not watched: start the watch without --job",
                *(node, counted(num, "process", "processes"), self._job),
            )


@dataclass(slots=True, kw_only=True)
class _Job:
    """One that torchrun or srun started."""

    key: str
    name: str
    registered_at: float
    is_watched: bool = False
    is_numbered: bool = False  # its replicas are numbered by its job: another job has, or may have, their names
    slots: set[tuple[str, int]] = field(default_factory=set)  # replica and rank
    alive: dict[ProcessId, float] = field(default_factory=dict)  # wall seconds of the watch, when it was sampled last
    first_at: float = 0.0  # as above, when it was first seen alive; 0: not yet
    beside_at: float = 0.0  # when it was last seen to run beside the watched job
    is_warned_of: bool = False
    held: dict[ProcessId, AgentEvent] = field(default_factory=dict)  # registrations, until it is watched
    early: list[AgentEvent] = field(default_factory=list)  # its other events meanwhile, unless it is another job

    @property
    def is_other(self) -> bool:
        """It has run beside the watched one for too long to take its place soon."""
        return self.beside_at - self.first_at > OVERLAP_SECONDS

    def hold(self, event: AgentEvent) -> None:
        if event.kind is AgentEventKind.REGISTERED and event.process is not None:
            self.held[event.process] = event
        elif len(self.early) < EARLY_MAX and not self.is_other:
            self.early.append(event)

    def release(self) -> tuple[AgentEvent, ...]:
        events = (*self.held.values(), *self.early)
        self.held.clear()
        self.early.clear()
        return events

    def sees(self, sample: ProcessSample, now: float) -> None:
        if not sample.alive:
            self.alive.pop(sample.process, None)
            return
        self.alive[sample.process] = now
        self.first_at = self.first_at or now
        self.slots.add((sample.replica, sample.rank))
        self.is_numbered |= split_replica(sample.replica)[1] == job_number(self.key)

    def lives(self, now: float) -> bool:
        return any(now - at <= SILENT_SECONDS for at in self.alive.values())

    def excludes(self, other: "_Job") -> bool:
        """Whether both cannot be parts of one run: they have the same ranks."""
        if not {role_of(r) for r, _ in self.slots} & {role_of(r) for r, _ in other.slots}:
            return False
        return self.is_numbered or other.is_numbered or bool(self.slots & other.slots)


class FirstJobSource:
    """Passes on the processes of one job: the first that is seen, and the one that takes its place after its end, as
    when it is started again. Called from one thread.

    Jobs that torchrun or srun started are told apart by their rendezvous. Two of them that have the same ranks are
    different jobs: one is watched, the other is left out and warned of once. Processes whose job is not known, actors
    of Ray, and jobs with other replicas (another role, another number) are passed on.
    """

    def __init__(self, source: ObservationSource) -> None:
        self._source = source
        self._jobs: dict[str, _Job] = {}
        self._of: dict[ProcessId, _Job] = {}
        self._now = 0.0

    @property
    def others(self) -> tuple[str, ...]:
        """The jobs that run and are left out."""
        return tuple(sorted(job.name for job in self._jobs.values() if not job.is_watched and job.lives(self._now)))

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        self._now = seen.wall_at
        for event in seen.events:
            if event.kind is AgentEventKind.REGISTERED and event.process is not None:
                self._note(event.process, event)
            elif event.kind is AgentEventKind.EXITED and event.process in self._of:
                self._of[event.process].alive.pop(event.process, None)
        for batch in seen.batches:
            for sample in batch.processes:
                if (job := self._of.get(sample.process)) is not None:
                    job.sees(sample, seen.wall_at)
        self._choose(seen.wall_at)
        # Events come before the first sample, which decides: they are passed on then. An exit that is lost here would
        # be known by a sample alone, without its signal.
        released = tuple(e for job in self._jobs.values() if job.is_watched for e in job.release())
        for event in seen.events:
            if event.process is not None and not self._is_ours(event.process):
                self._of[event.process].hold(event)
        seen = replace(seen, events=released + seen.events)
        if all(job.is_watched for job in self._jobs.values()):
            return seen
        batches = tuple(
            replace(b, processes=tuple(p for p in b.processes if self._is_ours(p.process))) for b in seen.batches
        )
        return replace(seen, batches=batches, events=tuple(e for e in seen.events if self._is_ours(e.process)))

    def _is_ours(self, process: ProcessId | None) -> bool:
        job = self._of.get(process) if process is not None else None
        return job is None or job.is_watched

    def _note(self, process: ProcessId, event: AgentEvent) -> None:
        names = job_names(event)
        if not names or not {event.detail.get("found_by", ""), event.detail.get("launcher", "")} & set(_LAUNCHERS):
            return
        key = names[-1]
        job = self._jobs.setdefault(key, _Job(key=key, name=names[0], registered_at=event.wall_at))
        job.name = names[0]  # the run id is known once the reporter has registered
        self._of[process] = job
        if len(self._of) > PROCESSES_MAX:
            self._of = {p: j for p, j in self._of.items() if j.alive or j is job}
            self._jobs = {j.key: j for j in self._of.values()}

    def _choose(self, now: float) -> None:
        waiting = [job for job in self._jobs.values() if not job.is_watched and job.lives(now)]
        for job in sorted(waiting, key=lambda j: (j.is_numbered, j.registered_at)):
            watched = next((o for o in self._jobs.values() if o.is_watched and o.lives(now) and o.excludes(job)), None)
            if watched is not None:
                job.beside_at = now
            if job.is_other:
                job.early.clear()
            if watched is None and not job.is_other:
                job.is_watched = True
            elif watched is not None and job.is_other and not job.is_warned_of:
                job.is_warned_of = True
                logger.warning(
                    "job %s also runs on these nodes and is not watched: this run watches job %s. Watch it in a run of "
                    "its own with --job %s, or all jobs in one run with --job %s",
                    *(job.name, watched.name, job.name, ALL_JOBS),
                )


def watched_rank(process: MonitoredProcess, found_by: str, job: str = "") -> WatchedRank:
    sample = process.sample
    if process.gone:
        state = EXITED
    elif sample is not None and sample.proc_state in ("T", "t"):
        state = "stopped"
    else:
        state = str(sample.phase) if sample is not None and process.reports else "running"
    return WatchedRank(
        replica=process.replica,
        rank=process.rank,
        node=process.node,
        found_by=found_by or (REPORTER if process.reports else ""),
        state=state,
        step=sample.step if sample is not None and process.reports else -1,
        pid=process.process.pid if process.process is not None else 0,
        job=job,
    )


class JobObserver:
    """Shows the job at most once a second. Wraps the source, because only its events tell how a rank was found."""

    def __init__(
        self,
        source: ObservationSource,
        show: Callable[[WatchedJob], None],
        clock: Clock,
        other_jobs: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._source, self._show, self._clock, self._other_jobs = source, show, clock, other_jobs
        self._registered: dict[ProcessId, tuple[str, str]] = {}  # found by, job
        self._unreachable: Mapping[str, float] = {}
        self._due_at = 0.0

    def poll(self, timeout_seconds: float) -> Any:
        seen = self._source.poll(timeout_seconds)
        if isinstance(seen, Observation):
            self._unreachable = {node: since for node, since, _ in seen.unreachable}
            for event in seen.events:
                if event.kind is AgentEventKind.REGISTERED and event.process is not None:
                    self._registered[event.process] = event.detail.get("found_by", ""), "".join(job_names(event)[:1])
        return seen

    def show(
        self, nodes: Iterable[str], processes: Callable[[], list[MonitoredProcess]], incidents: Iterable[Incident]
    ) -> None:
        """Called after each tick."""
        now = self._clock.monotonic()
        if now < self._due_at:
            return
        current = processes()
        self._due_at = now + max(SHOW_SECONDS, len(current) / RANKS_PER_SECOND)
        here = {p.process for p in current}
        self._registered = {process: known for process, known in self._registered.items() if process in here}
        if not all(p.gone for p in current):
            before = self._clock.wall() - EXITED_KEPT_SECONDS
            current = [p for p in current if not p.gone or p.exit_wall > before]
        ranks = [
            watched_rank(p, *(self._registered.get(p.process, ("", "")) if p.process else ("", ""))) for p in current
        ]
        self._show(
            WatchedJob(
                at=self._clock.wall(),
                nodes=tuple(nodes),
                ranks=tuple(sorted(ranks, key=lambda r: (r.node, r.replica, r.rank))),
                unreachable=self._unreachable,
                incidents=tuple(incidents),
                other_jobs=self._other_jobs(),
            )
        )
