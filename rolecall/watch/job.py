"""What a watch of agents sees of a job, as frozen values for a display. Pure, except for `JobObserver`, which the loop
owns.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.ids import ProcessId
from rolecall.core.telemetry import AgentEventKind
from rolecall.core.text import counted, spans
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.recovery.incidents import Incident
from rolecall.recovery.interfaces import ObservationSource

SHOW_SECONDS = 1.0
RANKS_PER_SECOND = 2000
"""With more ranks a job is shown less often: the loop has faults to find."""
GROUPS_SHOWN_MAX = 8
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """`at` and the values of `unreachable` (node -> since when) are wall seconds."""

    at: float
    nodes: tuple[str, ...] = ()
    ranks: tuple[WatchedRank, ...] = ()
    unreachable: Mapping[str, float]
    incidents: tuple[Incident, ...] = ()

    @property
    def text(self) -> str:
        """`4 ranks: trainer/0 0-3 (torchrun) on vm`."""
        if not self.ranks:
            return f"no ranks yet on {_some(self.nodes)}"
        groups = [
            f"{replica} {spans(r.rank for r in ranks)}{f' ({found_by})' if found_by else ''} on {node}"
            for (replica, found_by, node), ranks in grouped(self.ranks).items()
        ]
        return f"{counted(len(self.ranks), 'rank')}: {_some(groups, '; ')}"


def grouped(ranks: Iterable[WatchedRank]) -> dict[tuple[str, str, str], list[WatchedRank]]:
    """(replica, found by, node) -> its ranks, in the order of the ranks."""
    groups: dict[tuple[str, str, str], list[WatchedRank]] = {}
    for rank in ranks:
        groups.setdefault((rank.replica, rank.found_by, rank.node), []).append(rank)
    return groups


def _some(names: Collection[str], between: str = ", ") -> str:
    more = len(names) - GROUPS_SHOWN_MAX
    return between.join([*list(names)[:GROUPS_SHOWN_MAX], *([f"{more:,} more"] if more > 0 else [])])


def watched_rank(process: MonitoredProcess, found_by: str) -> WatchedRank:
    sample = process.sample
    if process.gone:
        state = "exited"
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
    )


class JobObserver:
    """Shows the job at most once a second. Wraps the source, because only its events tell how a rank was found."""

    def __init__(self, source: ObservationSource, show: Callable[[WatchedJob], None], clock: Clock) -> None:
        self._source, self._show, self._clock = source, show, clock
        self._found_by: dict[ProcessId, str] = {}
        self._unreachable: Mapping[str, float] = {}
        self._due_at = 0.0

    def poll(self, timeout_seconds: float) -> Any:
        seen = self._source.poll(timeout_seconds)
        if isinstance(seen, Observation):
            self._unreachable = {node: since for node, since, _ in seen.unreachable}
            for event in seen.events:
                if event.kind is AgentEventKind.REGISTERED and event.process is not None:
                    self._found_by[event.process] = event.detail.get("found_by", "")
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
        known = {p.process: self._found_by.get(p.process, "") for p in current if p.process is not None}
        self._found_by = {process: rule for process, rule in known.items() if rule}
        ranks = (watched_rank(p, known.get(p.process, "") if p.process else "") for p in current)
        self._show(
            WatchedJob(
                at=self._clock.wall(),
                nodes=tuple(nodes),
                ranks=tuple(sorted(ranks, key=lambda r: (r.node, r.replica, r.rank))),
                unreachable=self._unreachable,
                incidents=tuple(incidents),
            )
        )
