"""The ranks of a job that rolecall only watches, as its watch last saw them.

Such a job writes neither desired nor actual state. Its watch keeps the newest sample of each rank in one flag of the
journal, at most every `WRITE_SECONDS`, so that pages can show the job that is there. Old values are replaced: this is a
view, not a history.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from rolecall.core.clock import Clock
from rolecall.core.errors import JournalError
from rolecall.core.ids import ProcessId
from rolecall.core.journal.journal import Journal
from rolecall.core.telemetry import AgentEventKind, ProcessSample, job_names, launcher_pid
from rolecall.detector.base.observation import Observation
from rolecall.recovery.interfaces import ObservationSource

logger = logging.getLogger(__name__)

FLAG = "observed_ranks"
WRITE_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""A rank that was not sampled for this long is not known to be alive."""
EXITED_KEPT_SECONDS = 60.0
"""How long a rank that exited is kept while others run: after that it belongs to an earlier job."""
RANKS_MAX = 4096
"""Ranks that are kept, the first by name: 4,096 are 300 kB a write."""

REGISTERED_MAX = 65_536
"""Processes whose job is remembered; beyond that only of those that are kept."""


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """`step` is -1 and `progress_at` None for a rank that does not use the reporter. Times are wall seconds."""

    replica: str
    rank: int
    node: str
    pid: int
    is_alive: bool
    phase: str
    step: int
    seen_at: float
    progress_at: float | None
    job: str = ""  # run id, else rendezvous; empty: not known
    launcher_pid: int = 0  # 0: not known

    def alive_at(self, now: float) -> bool:
        """Whether it is known to be alive at `now`, wall seconds."""
        return self.is_alive and now - self.seen_at <= SILENT_SECONDS


def of_sample(sample: ProcessSample, job: str = "", launcher: int = 0) -> ObservedRank:
    progressed = sample.progress > 0 and sample.progress_at > 0
    return ObservedRank(
        replica=sample.replica,
        rank=sample.rank,
        node=str(sample.process.node),
        pid=sample.process.pid,
        is_alive=sample.alive,
        phase=str(sample.phase),
        step=sample.step,
        seen_at=sample.wall_at,
        progress_at=sample.wall_at - max(0.0, sample.at - sample.progress_at) if progressed else None,
        job=job,
        launcher_pid=launcher,
    )


def to_json(ranks: Iterable[ObservedRank]) -> str:
    ordered = sorted(ranks, key=lambda r: (r.replica, r.rank, r.node))
    return json.dumps([astuple(r) for r in ordered[:RANKS_MAX]], separators=(",", ":"))


def from_json(text: str | None) -> tuple[ObservedRank, ...]:
    """Empty for a text that is none of `to_json`."""
    try:
        return tuple(ObservedRank(*row) for row in json.loads(text or "[]"))
    except (ValueError, TypeError):
        return ()


class RecordedRanks:
    """A source that keeps the newest sample of each rank in the journal. Called from one thread."""

    def __init__(self, source: ObservationSource, journal: Journal, clock: Clock) -> None:
        self._source, self._journal, self._clock = source, journal, clock
        self._newest: dict[tuple[str, int, str], ObservedRank] = {}
        self._registered: dict[ProcessId, tuple[str, int]] = {}  # job, PID of its launcher
        self._wrote_at = float("-inf")

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            if event.kind is AgentEventKind.REGISTERED and event.process is not None:
                self._registered[event.process] = next(iter(job_names(event)), ""), launcher_pid(event)
                self._forget(event.process, event.detail.get("was", event.replica), event.rank, event.replica)
        for batch in seen.batches:
            for sample in batch.processes:
                key = sample.replica, sample.rank, str(sample.process.node)
                self._newest[key] = of_sample(sample, *self._registered.get(sample.process, ("", 0)))
        now = self._clock.monotonic()
        if any(rank.is_alive for rank in self._newest.values()):
            newest = max(rank.seen_at for rank in self._newest.values())
            self._newest = {
                key: rank
                for key, rank in self._newest.items()
                if rank.is_alive or newest - rank.seen_at <= EXITED_KEPT_SECONDS
            }
        if self._newest and now - self._wrote_at >= WRITE_SECONDS:
            self._wrote_at = now
            if len(self._registered) > REGISTERED_MAX:
                here = {(rank.node, rank.pid) for rank in self._newest.values()}
                self._registered = {p: known for p, known in self._registered.items() if (p.node, p.pid) in here}
            try:
                self._journal.set_flag(FLAG, to_json(self._newest.values()))
            except JournalError as e:  # pages show older values; detection goes on
                logger.warning("the observed ranks are not written: %s", e)
        return seen

    def _forget(self, process: ProcessId, was: str, rank: int, replica: str) -> None:
        """The name that the process had before, as that of the rule that found it."""
        before = self._newest.get((was, rank, str(process.node)))
        if before is not None and was != replica and before.pid == process.pid:
            del self._newest[was, rank, str(process.node)]
