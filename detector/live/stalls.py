"""Processes without progress where progress is due, and their deadlines. Measurement only, no findings.

A process is overdue when the deadline has passed on the wall clock and `EFFECTIVE_SHARE` of it on the effective clock.
The effective clock of a process starved by its neighbours does not advance, so it is not accused.
"""

from dataclasses import dataclass

from rolecall.core.config.job import DetectorConfig
from rolecall.core.telemetry import Phase
from rolecall.detector.live.deadlines import BEATS, Deadline, learned_deadline
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.subject import MonitoredProcess, ProgressClocks

EFFECTIVE_SHARE = 0.4
"""Fraction of the deadline that must have passed on the effective clock. With k = 5 this is twice the P99 of a unit:
more CPU time than a healthy unit needs under any starvation. A process with half a CPU is found at 1.25 deadlines."""
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

RARE_PHASES = frozenset({Phase.CHECKPOINT})
"""Phases entered once in many steps, with a duration set by the disk: the P99 of other phases does not apply. Until
enough of them have been observed the first-unit deadline applies."""

DEPENDENT_PHASES = frozenset({Phase.UPDATE, Phase.COPY, Phase.CONTROL})


@dataclass(frozen=True, slots=True)
class Stall:
    """A process, its deadline and its progress clocks."""

    subject: MonitoredProcess
    deadline: Deadline
    clocks: ProgressClocks
    beats_stopped: bool

    @property
    def ripe(self) -> bool:
        return is_overdue(self.clocks, self.deadline)


def is_overdue(clocks: ProgressClocks, deadline: Deadline) -> bool:
    return clocks.wall >= deadline.seconds and clocks.effective >= EFFECTIVE_SHARE * deadline.seconds


def phase_deadline(fleet: MonitoredProcesses, subject: MonitoredProcess, config: DetectorConfig) -> Deadline:
    """Deadline of the subject's current phase."""
    role, phase = subject.role, subject.phase
    if phase == Phase.IDLE:
        phase = Phase.GENERATE  # with open requests: the deadline of generation applies
    known = phase in subject.phases_done or (subject.experienced and phase not in RARE_PHASES)
    if phase == Phase.START or not known:
        return learned_deadline(None, config)
    p99 = fleet.gaps.p99(role, phase)
    if p99 is None and phase not in RARE_PHASES:
        p99 = fleet.gaps.p99_of_role(role)
    deadline = learned_deadline(p99, config)
    longer = WORKING_P99_FACTOR * (p99 or 0.0)
    if longer > deadline.seconds and subject.stall.cpu >= WORKING_CPUS * subject.stall.effective:
        text = f"{longer:.1f} s = {WORKING_P99_FACTOR:g} x P99 {p99:.2f}, it is using CPU"
        return Deadline(seconds=min(longer, config.hang_ceiling_seconds), text=text, learned=True)
    if phase == Phase.REDUCE and subject.epoch_fresh and deadline.seconds < EPOCH_JOIN_SECONDS:
        return Deadline(seconds=EPOCH_JOIN_SECONDS, text=f"{EPOCH_JOIN_SECONDS:g} s, first of its epoch", learned=False)
    return deadline


def heartbeat_deadline(fleet: MonitoredProcesses, subject: MonitoredProcess, config: DetectorConfig) -> Deadline:
    """Before the first unit of work the first-unit deadline applies: imports and compilation hold the interpreter."""
    if not subject.worked:
        return learned_deadline(None, config)
    return learned_deadline(fleet.gaps.p99(subject.role, BEATS) or 0.0, config)


def stalls(fleet: MonitoredProcesses, config: DetectorConfig) -> list[Stall]:
    """Every live process without recent progress, with the applicable clocks and deadline."""
    found = []
    # Lower bound of all deadlines: computing the deadline of thousands of processes at each poll would dominate the
    # cost.
    soonest = EMERGING_SHARE * min(config.hang_floor_seconds, config.first_unit_seconds, config.hang_ceiling_seconds)
    for s in fleet.current():
        if s.stall.wall < soonest and s.beat.wall <= EMERGING_BEAT_SECONDS:
            continue
        if s.sample is None or s.gone or s.finished:
            continue
        if s.beats_seen:
            deadline = heartbeat_deadline(fleet, s, config)
            # A process without heartbeats that still makes progress is not hung: only its side thread died.
            if s.beat.wall > EMERGING_BEAT_SECONDS and (not s.progress_due or s.stall.wall > EMERGING_BEAT_SECONDS):
                found.append(Stall(s, deadline, s.beat, True))
                continue
        if s.progress_due:
            found.append(Stall(s, phase_deadline(fleet, s, config), s.stall, False))
    return found


def own(all_stalls: list[Stall]) -> list[Stall]:
    """Independent stalls: without heartbeat, or in a phase that does not depend on other processes."""
    return [s for s in all_stalls if s.beats_stopped or s.subject.phase not in DEPENDENT_PHASES | {Phase.REDUCE}]


def emerging(standing_still: list[Stall]) -> bool:
    """Whether a process stalls independently, even if its deadline has not passed yet."""
    return any(
        s.beats_stopped or (s.clocks.wall >= EMERGING_SHARE * s.deadline.seconds and s.subject.phase != Phase.START)
        for s in standing_still
    )
