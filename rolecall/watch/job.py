"""What a watch of agents sees of a job, as frozen values for a display. Pure, except for the sources `JobObserver` and
`OneJobSource`, which the loop owns.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind
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
UNKNOWN_SECONDS = 30.0
"""After this time in which no process is known to be of the chosen job, the watch warns."""
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


def job_names(registered: AgentEvent) -> tuple[str, ...]:
    """Of the job of a process that registers: run id, and rendezvous (`host:port` of torchrun, `job.step` of Slurm)."""
    return tuple(name for key in ("job", "rendezvous") if (name := registered.detail.get(key, "")))


class OneJobSource:
    """Passes on the processes of one job, by its run id or rendezvous. Called from one thread.

    An agent tells the job of a process only when it registers. Where that event is no longer in the agent's log, a new
    watch cannot know the job's processes, and warns.
    """

    def __init__(self, source: ObservationSource, job: str, clock: Clock) -> None:
        self._source, self._job, self._clock = source, job, clock
        self._ours: set[ProcessId] = set()
        self._warns_at: float | None = None

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            if event.kind is AgentEventKind.REGISTERED and event.process and self._job in job_names(event):
                self._ours.add(event.process)
        self._warn(len({p.process for b in seen.batches for p in b.processes}))
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
                "wait; else check --job, or start the watch without --job: an agent tells the job of a process only "
                "when it registers, and may have dropped that event",
                self._job,
                counted(num_sampled, "process", "processes"),
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

    def __init__(self, source: ObservationSource, show: Callable[[WatchedJob], None], clock: Clock) -> None:
        self._source, self._show, self._clock = source, show, clock
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
            )
        )
