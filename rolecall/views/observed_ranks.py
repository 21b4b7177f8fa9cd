"""The ranks of a job that rolecall only watches, as its watch last saw them.

Such a job writes neither desired nor actual state. Its watch keeps the newest sample of each rank, and its pace, in one
flag of the journal, every `WRITE_SECONDS`, so that pages can show the job that is there. Old values are
replaced: this is a view, not a history. The course of the job over its steps is beside it (`observed_course`).
"""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.errors import JournalError
from rolecall.core.ids import ProcessId
from rolecall.core.journal.journal import Journal
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, is_instrumented, job_names, launcher_pid
from rolecall.detector.base.observation import Observation
from rolecall.recovery.interfaces import ObservationSource
from rolecall.views import observed_course
from rolecall.views.rank_pace import RankPace

logger = logging.getLogger(__name__)

FLAG = "observed_ranks"
WRITE_SECONDS = 5.0
LARGE_RANKS, LARGE_WRITE_SECONDS = 1024, 15.0
"""With more ranks it is written less often, still within `SILENT_SECONDS`: one write of 4,096 takes 0.2 s of the
detectors' thread (measured once)."""
SILENT_SECONDS = 30.0
"""A rank that was not sampled for this long is not known to be alive."""
STOPPED_STATES = ("T", "t")
"""Of the kernel: stopped by a signal, by a debugger."""
EXITED_KEPT_SECONDS = 60.0
"""How long a rank that exited is kept while others run: after that it belongs to an earlier job."""
RANKS_MAX = 4096
"""Ranks that are kept, the first by name: 4,096 are 900 kB a write."""
OFFSET_SECONDS_MIN = 1.0
"""A node's clock that is off by less cannot be told from a late answer."""
DIGITS = 4
"""Of the numbers that are kept of a rank."""

REGISTERED_MAX = 65_536
"""Processes whose job is remembered; beyond that only of those that are kept."""


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """`step` is -1 and `progress_at` None for a rank that does not use the reporter. Times are wall seconds of the
    watch. What is not known is None or empty."""

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
    reports_by: str = ""  # `hooks`, `integration`, `reporter` (its own calls), or the rule that found it
    is_stopped: bool = False  # by a signal or a debugger
    step_seconds: float | None = None  # mean of the last minute, or of the last two steps of a slower job
    own_seconds: float | None = None  # the same of a unit of work, without what it waits for other ranks
    phases: tuple[tuple[str, float], ...] = ()  # phase, share of its time, the largest first
    loss: float | None = None
    reward: float | None = None

    def alive_at(self, now: float) -> bool:
        """Whether it is known to be alive at `now`, wall seconds."""
        return self.is_alive and now - self.seen_at <= SILENT_SECONDS


REPORTER = "reporter"
"""`reports_by` of a rank that calls the reporter itself."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process told of itself, or its agent found out. `found_by`: rule; empty: it registered itself. `source`:
    what reports; empty: the job's own calls."""

    job: str = ""
    launcher_pid: int = 0
    found_by: str = ""
    source: str = ""


_UNKNOWN = Registration()


def of_sample(sample: ProcessSample, registered: Registration = _UNKNOWN, pace: RankPace | None = None) -> ObservedRank:
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
        job=registered.job,
        launcher_pid=registered.launcher_pid,
        reports_by=registered.found_by or registered.source or (REPORTER if is_instrumented(sample) else ""),
        is_stopped=sample.proc_state in STOPPED_STATES,
        step_seconds=_short(pace.step_seconds if pace else None),
        own_seconds=_short(pace.own_seconds if pace else None),
        phases=tuple((name, round(share, DIGITS)) for name, share in pace.phases) if pace else (),
        loss=_short(sample.loss),
        reward=_short(sample.reward),
    )


def _short(value: float | None) -> float | None:
    """In few digits. None: it is not known, or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def to_json(ranks: Iterable[ObservedRank]) -> str:
    ordered = sorted(ranks, key=lambda r: (r.replica, r.rank, r.node))
    return json.dumps([astuple(r) for r in ordered[:RANKS_MAX]], separators=(",", ":"))


def from_json(text: str | None) -> tuple[ObservedRank, ...]:
    """Empty for a text that is none of `to_json`."""
    try:
        return tuple(_rank(row) for row in json.loads(text or "[]"))
    except (ValueError, TypeError):
        return ()


def _rank(row: list[Any]) -> ObservedRank:
    rank = ObservedRank(*row[: len(fields(ObservedRank))])  # a later watch may write more
    return replace(rank, phases=tuple((str(name), float(share)) for name, share in rank.phases))


class RecordedRanks:
    """A source that keeps the newest sample of each rank, and the course of the job, in the journal. Called from one
    thread."""

    def __init__(self, source: ObservationSource, journal: Journal, clock: Clock) -> None:
        self._source, self._journal, self._clock = source, journal, clock
        self._newest: dict[tuple[str, int, str], ProcessSample] = {}
        self._registered: dict[ProcessId, Registration] = {}
        self._paces: dict[ProcessId, RankPace] = {}
        self._offsets: dict[str, float] = {}  # node -> how far the watch's clock is ahead of its clock
        self._course: observed_course.Course | None = None
        self._wrote_at = float("-inf")

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        for event in seen.events:
            if event.kind is AgentEventKind.REGISTERED and event.process is not None:
                self._registered[event.process] = _registration(event, self._registered.get(event.process))
        for batch in seen.batches:
            self._offsets[batch.node] = seen.wall_at - batch.wall_at
            for sample in batch.processes:
                self._newest[sample.replica, sample.rank, str(sample.process.node)] = sample
                self._paces.setdefault(sample.process, RankPace()).take(sample)
        now = self._clock.monotonic()
        due = WRITE_SECONDS if len(self._newest) <= LARGE_RANKS else LARGE_WRITE_SECONDS
        if self._newest and now - self._wrote_at >= due:
            self._wrote_at = now
            self._drop_former_names()
            self._drop_exited()
            self._write()
        return seen

    def _drop_former_names(self) -> None:
        """A process that a rule found has another name, perhaps of another rank, once it has registered itself."""
        named: dict[ProcessId, tuple[str, int, str]] = {}
        for key, sample in self._newest.items():
            known = named.get(sample.process)
            if known is None or sample.at >= self._newest[known].at:
                named[sample.process] = key
        self._newest = {key: sample for key, sample in self._newest.items() if named[sample.process] == key}

    def _drop_exited(self) -> None:
        if any(sample.alive for sample in self._newest.values()):
            newest = max(self._by_our_clock(sample).wall_at for sample in self._newest.values())
            self._newest = {
                key: sample
                for key, sample in self._newest.items()
                if sample.alive or newest - self._by_our_clock(sample).wall_at <= EXITED_KEPT_SECONDS
            }
        here = {sample.process for sample in self._newest.values()}
        self._paces = {process: pace for process, pace in self._paces.items() if process in here}
        if len(self._registered) > REGISTERED_MAX:
            self._registered = {p: known for p, known in self._registered.items() if p in here}

    def _by_our_clock(self, sample: ProcessSample) -> ProcessSample:
        offset = self._offsets.get(sample.process.node, 0.0)
        return sample if abs(offset) < OFFSET_SECONDS_MIN else replace(sample, wall_at=sample.wall_at + offset)

    def _write(self) -> None:
        samples = [self._by_our_clock(s) for _, s in sorted(self._newest.items(), key=lambda item: item[0])]
        alive = {sample.process: sample for sample in samples if sample.alive}
        ranks = [
            of_sample(s, self._registered.get(s.process, _UNKNOWN), self._paces.get(s.process))
            for s in samples[:RANKS_MAX]
        ]
        try:
            if self._course is None:  # the watch before this one has begun it
                self._course = observed_course.Course(
                    observed_course.from_json(self._journal.flag(observed_course.FLAG))
                )
            before = self._course.points
            self._course.take(alive)
            self._journal.set_flag(FLAG, to_json(ranks))
            if self._course.points != before:
                self._journal.set_flag(observed_course.FLAG, observed_course.to_json(self._course.points))
        except JournalError as e:  # pages show older values; detection goes on
            logger.warning("the observed ranks are not written: %s", e)


def _registration(event: AgentEvent, known: Registration | None) -> Registration:
    """`known`: of an earlier registration of the same process: one that a rule found registers itself later."""
    return Registration(
        job=next(iter(job_names(event)), known.job if known else ""),
        launcher_pid=launcher_pid(event) or (known.launcher_pid if known else 0),
        found_by=event.detail.get("found_by", ""),
        source=event.detail.get("source", ""),
    )
