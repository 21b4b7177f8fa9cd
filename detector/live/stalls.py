"""Processes without progress where progress is due, and the deadlines that apply. It measures and makes no finding.

A deadline must pass on the wall clock, and `EFFECTIVE_SHARE` of it on the effective clock: a process starved by its
neighbours has a running wall clock and a standing effective one, and is left alone.
"""

from dataclasses import dataclass

from rolecall.core.config.job import DetectorConfig
from rolecall.core.telemetry import Phase
from rolecall.detector.live.deadlines import BEATS, Deadline, learned_deadline
from rolecall.detector.live.fleet import MonitoredProcesses
from rolecall.detector.live.subject import MonitoredProcess, ProgressClocks

EFFECTIVE_SHARE = 0.4
"""Part of the deadline that must have passed on the effective clock. With k = 5 that is twice the P99 of a unit: more
CPU time than a healthy unit needs, at any starvation; a process with half a CPU is still found at 1.25 deadlines."""
EPOCH_JOIN_SECONDS = 15.0
"""Deadline of the first collective of an epoch: it includes a rendezvous (2.7 s measured on CPU to grow by one member)
and a newcomer that copies state."""
EMERGING_SHARE = 0.3
"""A process that stalls on its own account for this share of its deadline is reason enough not to accuse processes that
depend on others."""
EMERGING_BEAT_SECONDS = 1.0
"""The same for heartbeats, which come every 0.1 s: ten missed."""
WORKING_CPUS = 0.08
"""CPU use per effective second above which a process with heartbeats is at work, at full speed or slowed down (by a
quota, or stopped for part of the time): a long unit, not a hang. Waiting processes use a few percent (heartbeats,
pollers), stopped ones none, and a busy loop that holds the interpreter sends no heartbeat."""
WORKING_P99_FACTOR = 12.0
"""Deadline of a process at work, in P99 of its units: four times slower with three times the usual tail."""

RARE_PHASES = frozenset({Phase.CHECKPOINT})
"""Entered once in many steps, and as long as a disk takes: the P99 of other phases says nothing about them. Until
enough of them were seen the deadline of a first unit holds."""

DEPENDENT_PHASES = frozenset({Phase.UPDATE, Phase.COPY, Phase.CONTROL})


@dataclass(frozen=True, slots=True)
class Stall:
    """One process against its deadline."""

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
    """Deadline of the phase that the subject is in."""
    role, phase = subject.role, subject.phase
    if phase == Phase.IDLE:
        phase = Phase.GENERATE  # holds requests: due as if it generated
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
    """Imports and compilation hold the interpreter for seconds: an incarnation without work has its own deadline."""
    if not subject.worked:
        return learned_deadline(None, config)
    return learned_deadline(fleet.gaps.p99(subject.role, BEATS) or 0.0, config)


def stalls(fleet: MonitoredProcesses, config: DetectorConfig) -> list[Stall]:
    """Every live process without progress for a while, with the clock and deadline that applies to it."""
    found = []
    # No deadline is below this. To compute one for each of thousands of processes at each poll costs more than all
    # else.
    soonest = EMERGING_SHARE * min(config.hang_floor_seconds, config.first_unit_seconds, config.hang_ceiling_seconds)
    for s in fleet.current():
        if s.stall.wall < soonest and s.beat.wall <= EMERGING_BEAT_SECONDS:
            continue
        if s.sample is None or s.gone or s.finished:
            continue
        if s.beats_seen:
            deadline = heartbeat_deadline(fleet, s, config)
            # Heartbeats may stop alone (the side thread died): then the process goes on making progress and is not
            # hung.
            if s.beat.wall > EMERGING_BEAT_SECONDS and (not s.progress_due or s.stall.wall > EMERGING_BEAT_SECONDS):
                found.append(Stall(s, deadline, s.beat, True))
                continue
        if s.progress_due:
            found.append(Stall(s, phase_deadline(fleet, s, config), s.stall, False))
    return found


def own(all_stalls: list[Stall]) -> list[Stall]:
    """Those that stall on their own account: without heartbeat, or in a phase in which they depend on no other
    process."""
    return [s for s in all_stalls if s.beats_stopped or s.subject.phase not in DEPENDENT_PHASES | {Phase.REDUCE}]


def emerging(standing_still: list[Stall]) -> bool:
    """A process stalls on its own account, if not yet for long enough to be named."""
    return any(
        s.beats_stopped or (s.clocks.wall >= EMERGING_SHARE * s.deadline.seconds and s.subject.phase != Phase.START)
        for s in standing_still
    )
