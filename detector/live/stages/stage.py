"""Interface and input of a stage of the live detector.

Folders beside this module hold the stages by what they look at: processes that end (`exits`), processes that stand
still or are slow (`progress`), machines and agents (`nodes`), what the training computes (`numbers`), and evidence that
comes from elsewhere (`evidence`).

The engine runs the stages in a fixed order over each observation. Each adds findings and may rewrite those of earlier
stages. A stage that finds why processes wait lists later stages that would accuse the waiting ones (`suppresses`): the
engine drops their findings while the cause stands. Explanations between fault classes are declared by the class
(`FaultSpec.suppresses`) and applied at the end, by fusion.

Several stages need the processes without progress where progress is due (`Tick.stalls`). One is overdue when its
deadline has passed on the wall clock and a part of it (`Deadline.effective_share`) on the effective clock, which does
not advance while its neighbours starve it of CPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.membership import is_standby
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS, AgentEvent, Phase
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.monitored_process import (
    BEATS,
    LONG_UNITS_FACTOR,
    SINGLE_PHASES,
    STEPS,
    UNITS,
    Deadline,
    MonitoredProcess,
    ProgressClocks,
    capped,
    learned_deadline,
    least_of_few_units,
    least_of_long_units,
    single_deadline,
)
from rolecall.detector.live.processes import MonitoredProcesses

EPOCH_JOIN_SECONDS = 15.0
"""Deadline of the first collective of an epoch: it includes a rendezvous (2.7 s measured on CPU to grow by one member)
and the state copy of the new member."""
EMERGING_SHARE = 0.3
"""A process that stalls independently for this fraction of its deadline is enough to spare processes that depend on
others."""
EMERGING_BEAT_SECONDS = 1.0
"""The same for heartbeats: ten missed at an interval of 0.1 s."""
WORKING_CPUS = 0.08
"""CPU seconds per effective second above which a process with heartbeats is working, possibly slowed by a quota or
intermittent stops: a long unit, not a hang. Waiting processes use a few percent (heartbeats, pollers), stopped ones
none, and a busy loop that holds the interpreter sends no heartbeats."""
WORKING_P99_FACTOR = 12.0
"""Deadline of a working process as a multiple of the P99 of its units: four times slower, with three times the usual
tail."""

STANDBY_BEAT_SECONDS = 30.0
"""Deadline for the heartbeat of a standby that has started and waits. Nothing holds its interpreter; nor does anybody
wait for it, so that there is time to be sure. Its start has a longer one."""

BETWEEN_BEAT_SECONDS = 30.0
"""Least deadline for the heartbeat of a running process between two steps of a job that rolecall did not start, while
no rank waits for it in the next step. Jobs compile and fork there, and pickle what an evaluation found, which holds the
interpreter: for CPU time above all."""

RARE_PHASES = frozenset({Phase.CHECKPOINT})
"""Phases entered once in many steps, with a duration set by the disk: the P99 of other phases does not apply. Until
enough of them have been observed the first-unit deadline applies."""

PHASES_BEFORE_WORK = SINGLE_PHASES | PHASES_WITHOUT_DUE_PROGRESS
"""Of a process that has not worked yet: imports hold the interpreter in a start, and nothing does in the others. In
other phases its first unit of work may compile."""

MEASURED_PHASES = frozenset({Phase.COMPUTE, Phase.GENERATE, Phase.SCORE})
"""Phases that end with a unit of work whose seconds the process reports, and in which it waits for no other one."""

DEPENDENT_PHASES = frozenset({Phase.UPDATE, Phase.COPY, Phase.CONTROL, Phase.STEP})


@dataclass(frozen=True, slots=True)
class Stall:
    """A process, its deadline and its progress clocks."""

    subject: MonitoredProcess
    deadline: Deadline
    clocks: ProgressClocks
    beats_stopped: bool
    awaited: bool = False
    """Other ranks of its replica have begun to wait for it."""

    @property
    def ripe(self) -> bool:
        """Whether it is overdue."""
        seconds = self.deadline.seconds
        return self.clocks.wall >= seconds and self.clocks.effective >= self.deadline.effective_share * seconds


def phase_deadline(fleet: MonitoredProcesses, subject: MonitoredProcess, config: DetectorConfig) -> Deadline:
    """Deadline of the subject's current phase."""
    group, phase = subject.group, subject.phase
    if phase == Phase.IDLE:
        phase = Phase.GENERATE  # with open requests: the deadline of generation applies
    if phase in SINGLE_PHASES:
        return single_deadline(fleet.gaps.longest(group, phase), subject.is_first, config)
    if phase not in subject.phases_done and (not subject.experienced or phase in RARE_PHASES):
        known = None if phase in RARE_PHASES else subject.mean_step_seconds
        return learned_deadline(None, config, least_of_few_units(known))
    p99, longest = fleet.gaps.p99(group, phase), None
    if p99 is None and phase not in RARE_PHASES:
        p99, longest = fleet.gaps.p99_of_role(group), fleet.gaps.longest(group, phase)
        if p99 is None and phase in (Phase.STEP, *MEASURED_PHASES):
            p99 = fleet.gaps.p99(group, STEPS if phase == Phase.STEP else UNITS)
        if p99 is None and longest is None:
            longest = subject.mean_step_seconds
    least = least_of_few_units(longest)
    if p99 is not None and p99 * LONG_UNITS_FACTOR > config.hang_ceiling_seconds:
        least = (*least, *least_of_long_units(fleet.gaps, group, phase))
    deadline = learned_deadline(p99, config, least)
    longer = WORKING_P99_FACTOR * (p99 or 0.0)
    seconds = min(longer, config.hang_ceiling_seconds)
    if p99 and seconds > deadline.seconds and subject.stall.cpu >= WORKING_CPUS * subject.stall.effective:
        text = f"{seconds:.1f} s = {capped(WORKING_P99_FACTOR, p99, config)}, it is using CPU"
        return Deadline(seconds=seconds, text=text, learned=True)
    if phase == Phase.REDUCE and subject.epoch_fresh and deadline.seconds < EPOCH_JOIN_SECONDS:
        return Deadline(seconds=EPOCH_JOIN_SECONDS, text=f"{EPOCH_JOIN_SECONDS:g} s, first of its epoch", learned=False)
    return deadline


def beat_deadline(fleet: MonitoredProcesses, subject: MonitoredProcess, config: DetectorConfig) -> Deadline:
    """Deadline of the subject's next heartbeat."""
    # A stopped process neither imports nor compiles. One that has no work yet holds nobody up.
    if subject.worked or (subject.stopped and subject.phase not in PHASES_WITHOUT_DUE_PROGRESS):
        learned = learned_deadline(fleet.gaps.p99(subject.group, BEATS) or 0.0, config)
        is_between = subject.foreign and subject.phase == Phase.WAIT and not subject.stopped
        if is_between and learned.seconds < BETWEEN_BEAT_SECONDS and not _is_waited_for(fleet, subject, config):
            text = f"{BETWEEN_BEAT_SECONDS:g} s, between two steps"
            learned = Deadline(seconds=BETWEEN_BEAT_SECONDS, text=text, learned=False)
        return replace(learned, effective_share=1.0) if is_between else learned
    if is_standby(subject.replica) and subject.phase in PHASES_WITHOUT_DUE_PROGRESS:
        seconds = min(STANDBY_BEAT_SECONDS, config.first_unit_seconds)
        return Deadline(seconds=seconds, text=f"{seconds:g} s, of a standby", learned=False, effective_share=1.0)
    if subject.phase in PHASES_BEFORE_WORK:
        return single_deadline(fleet.gaps.longest(subject.group, Phase.START), subject.is_first, config)
    return learned_deadline(None, config)


def _is_waited_for(fleet: MonitoredProcesses, subject: MonitoredProcess, config: DetectorConfig) -> bool:
    """Whether another rank of its replica stands in a step for longer than that takes, or in a later collective."""
    issued = -1 if subject.sample is None else subject.sample.collectives_issued
    for p in fleet.peers(subject):
        if p.replica != subject.replica or p.gone or p.sample is None:
            continue
        if p.phase == Phase.STEP and p.stall.wall >= phase_deadline(fleet, p, config).seconds:
            return True
        if p.sample.collectives_issued > issued >= 0 and p.stall.wall >= config.hang_floor_seconds:
            return True
    return False


def stalls(fleet: MonitoredProcesses, config: DetectorConfig) -> list[Stall]:
    """Every live process without recent progress, with the applicable clocks and deadline."""
    found = []
    # Lower bound of all deadlines: computing the deadline of thousands of processes at each poll would dominate the
    # cost.
    soonest = EMERGING_SHARE * min(config.hang_floor_seconds, config.first_unit_seconds, config.hang_ceiling_seconds)
    for subject in fleet.current():
        if subject.stall.wall < soonest and subject.beat.wall <= EMERGING_BEAT_SECONDS:
            continue
        if subject.sample is None or subject.gone or subject.finished:
            continue
        # A process without heartbeats that still makes progress is not hung: only its side thread died.
        is_silent = subject.beats_seen and subject.beat.wall > EMERGING_BEAT_SECONDS
        if is_silent and (not subject.progress_due or subject.stall.wall > EMERGING_BEAT_SECONDS):
            found.append(Stall(subject, beat_deadline(fleet, subject, config), subject.beat, True))
        elif subject.progress_due:
            found.append(Stall(subject, phase_deadline(fleet, subject, config), subject.stall, False))
    waiting = [s for s in found if _waits_in_its_replica(s, found)]
    if not waiting:
        return found
    waits = {w.subject.key for w in waiting}
    # Of jobs that rolecall did not start: the phases of its own say what a rank waits for.
    held_up = {_replica_of(w) for w in waiting if w.subject.foreign}
    return [replace(s, awaited=_replica_of(s) in held_up) for s in found if s.subject.key not in waits]


def _replica_of(stall: Stall) -> tuple[str, int]:
    return stall.subject.replica, stall.subject.incarnation


def _waits_in_its_replica(stall: Stall, found: list[Stall]) -> bool:
    """Whether another rank of its replica, whose ranks start and compute together, stands still and is what it waits
    for: one without heartbeats, else one that began fewer exchanges."""
    mine = stall.subject.sample
    assert mine is not None, "a stalled process has a sample"
    if stall.beats_stopped or not (mine.exchanges or mine.phase == Phase.START):
        return False
    return any(
        other.beats_stopped or (other.subject.sample and other.subject.sample.exchanges < mine.exchanges)
        for other in found
        if other.subject.key != stall.subject.key
        and (other.subject.replica, other.subject.incarnation) == (stall.subject.replica, stall.subject.incarnation)
    )


def dependents(all_stalls: list[Stall]) -> set[int]:
    """Places in `all_stalls` of those whose phase may be a wait for other processes. So may generation where several
    ranks of a replica generate together and do not report their exchanges: the ranks of a trainer that samples by
    itself."""
    generating = Counter((s.subject.replica, s.subject.incarnation) for s in all_stalls if _generates_silently(s))
    return {
        n
        for n, s in enumerate(all_stalls)
        if s.subject.phase in DEPENDENT_PHASES
        or (_generates_silently(s) and generating[s.subject.replica, s.subject.incarnation] > 1)
    }


def _generates_silently(stall: Stall) -> bool:
    sample = stall.subject.sample
    return stall.subject.phase == Phase.GENERATE and sample is not None and not sample.exchanges


def own(all_stalls: list[Stall]) -> list[Stall]:
    """Independent stalls: without heartbeat, waited for, or in a phase that does not depend on other processes."""
    waits = dependents(all_stalls)
    return [
        s
        for n, s in enumerate(all_stalls)
        if s.beats_stopped or s.awaited or not (s.subject.phase == Phase.REDUCE or n in waits)
    ]


def emerging(standing_still: list[Stall]) -> bool:
    """Whether a process stalls independently, even if its deadline has not passed yet."""
    return any(
        s.beats_stopped or (s.clocks.wall >= EMERGING_SHARE * s.deadline.seconds and s.subject.phase != Phase.START)
        for s in standing_still
    )


@dataclass(kw_only=True)
class Tick:
    """Context of one observation, passed through all stages. `now`: wall seconds."""

    observation: Observation
    fleet: MonitoredProcesses
    config: DetectorConfig
    expected_roles: Mapping[str, int]
    now: float
    findings: list[Finding] = field(default_factory=list)
    """Findings of the stages so far."""
    suspicions: list[Finding] = field(default_factory=list)
    """`cannot_tell` of processes whose state may be usual: not reported, evidence about them is collected."""
    explained: set[str] = field(default_factory=set)
    """Fingerprints of exceptions diagnosed as user code."""

    @cached_property
    def events(self) -> list[tuple[AgentEvent, float]]:
        """Agent events with their time on the watcher's clock, and the seconds since each was written."""
        offsets = self.fleet.offsets
        return [
            (replace(e, wall_at=e.wall_at + offsets.get(e.node, 0.0)), self.fleet.age(e))
            for e in self.observation.events
        ]

    @cached_property
    def stalls(self) -> list[Stall]:
        """All processes without progress where progress is due."""
        return stalls(self.fleet, self.config)


class Stage(Protocol):
    """One instance per detector."""

    name: str
    suppresses: frozenset[str] = frozenset()
    """Later stages whose findings are dropped while one of this stage's findings stalls others
    (`FaultSpec.stalls_others`)."""
    quiet_seconds: float = 0.0
    """How long this stage stays suppressed after another stage last suppressed it."""
    state: Any = None
    """What it keeps between observations, for a stored window: in types that `detector.live.history` supports."""

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        """Findings to add to `tick.findings`, which the stage may also replace. Called for each observation."""
        ...


def stalls_others(finding: Finding | Diagnosis) -> bool:
    """Whether it explains why other processes wait: its class does, and it names a process or a role."""
    return finding.fault_class.spec.stalls_others and bool(finding.suspects or finding.about.partition(":")[0])
