"""Progress stall: somebody stands still where progress is due, and is not merely waiting for somebody else.

A process is called hung when its clock since the last sign of progress passes its deadline (detector/live/deadlines.py) on the wall,
and `EFFECTIVE_SHARE` of it on the effective clock: a process starved by its neighbours has a running wall clock and a
standing effective one, and is left alone. Four kinds of hang are told apart by beats (a side thread's ticks: they
stop when the interpreter cannot run) and CPU use; the kernel's process state is read for the sentence only.

Cause before symptom: phases in which a process depends on others (`reduce`, `update`, `copy`, the controller's loop)
accuse nobody while somebody else stands still on his own account, is gone, or came a moment ago. Who waits inside a
collective is judged in detector/live/collective.py.
"""

from dataclasses import dataclass

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import Phase
from rolecall.detector.base.findings import finding, settles
from rolecall.detector.live.deadlines import BEATS, Deadline, learned_deadline
from rolecall.detector.live.fleet import MonitoredProcesses, names
from rolecall.detector.live.subject import MonitoredProcess, ProgressClocks

EFFECTIVE_SHARE = 0.4
"""Part of the deadline that must have passed on the effective clock. With k = 5 that is twice the P99 of a unit: more
CPU time than a healthy unit needs, at any starvation; a process with half a CPU is still found at 1.25 deadlines."""
EPOCH_JOIN_SECONDS = 15.0
"""Deadline of the first collective of an epoch: it waits for a rendezvous (2.7 s measured to grow by one on CPU) and
for a newcomer that copies state."""
EMERGING_SHARE = 0.3
"""Somebody who has stood still on his own account for this share of his deadline is, for now, reason enough not to
accuse those who depend on others."""
EMERGING_BEAT_SECONDS = 1.0
"""The same for beats, which come every 0.1 s: ten missed."""
QUIET_SECONDS = 15.0
"""After a fault, an exit or a newcomer those who depend on others get so long before they are accused: timeouts of
transfers (10 s) and group rebuilds have to run out first."""
BUSY_CPUS = 0.3
"""CPU use per second above which a process that stands still is computing rather than waiting: one that spins on a
machine with three wanting each CPU gets a third."""
WORKING_CPUS = 0.08
"""CPU use per effective second above which a process whose interpreter ticks is at work, at full speed or crawling
(under a quota, or stopped for part of the time): a long unit, not a hang. Waiting ones use a few percent (beats,
pollers), stopped ones none, and a busy loop that holds the interpreter does not tick."""
WORKING_P99_FACTOR = 12.0
"""Deadline of a process at work, in P99 of its units: four times slower with three times the usual tail."""

RARE_PHASES = frozenset({Phase.CHECKPOINT})
"""Entered once in many steps, and as long as a disk takes: neither experience with other phases nor their P99 says how
long that may be. Until enough of them were seen the deadline of a first unit holds."""

DEPENDENT_PHASES = frozenset({Phase.UPDATE, Phase.COPY, Phase.CONTROL})


@dataclass(frozen=True, slots=True)
class Stall:
    """One subject against its deadlines."""

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
        text = f"{longer:.1f} s = {WORKING_P99_FACTOR:g} x P99 {p99:.2f}, for it uses CPU"
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
    """Everyone alive who has stood still for a while, with the clock and deadline that applies to him."""
    found = []
    # Nobody asks after those who moved a moment ago, and a deadline for each of thousands, at each look, costs more than
    # all else: no deadline is below this.
    soonest = EMERGING_SHARE * min(config.hang_floor_seconds, config.first_unit_seconds, config.hang_ceiling_seconds)
    for s in fleet.current():
        if s.stall.wall < soonest and s.beat.wall <= EMERGING_BEAT_SECONDS:
            continue
        if s.sample is None or s.gone or s.finished:
            continue
        if s.beats_seen:
            deadline = heartbeat_deadline(fleet, s, config)
            # Beats may stop alone (the side thread died): then the process goes on making progress and is not hung.
            if s.beat.wall > EMERGING_BEAT_SECONDS and (not s.progress_due or s.stall.wall > EMERGING_BEAT_SECONDS):
                found.append(Stall(s, deadline, s.beat, True))
                continue
        if s.progress_due:
            found.append(Stall(s, phase_deadline(fleet, s, config), s.stall, False))
    return found


def own(all_stalls: list[Stall]) -> list[Stall]:
    """Those who stand still on their own account: not beating, or in a phase in which they depend on nobody."""
    return [s for s in all_stalls if s.beats_stopped or s.subject.phase not in DEPENDENT_PHASES | {Phase.REDUCE}]


def find_own(fleet: MonitoredProcesses, now: float, all_stalls: list[Stall]) -> list[Finding]:
    return [_hang(fleet, s, now) for s in own(all_stalls) if s.ripe]


def find_dependent(fleet: MonitoredProcesses, now: float, all_stalls: list[Stall], fault_wall: float) -> list[Finding]:
    """Those who depend on others, if nobody else explains them. `fault_wall`: when a fault of another kind last stood;
    0 if never."""
    if emerging(own(all_stalls)) or now - max(fault_wall, fleet.changed_wall) < QUIET_SECONDS:
        return []
    ripe = [s for s in all_stalls if s.ripe and not s.beats_stopped and s.subject.phase in DEPENDENT_PHASES]
    return _dependents(fleet, ripe, now)


def emerging(standing_still: list[Stall]) -> bool:
    """Somebody stands still on his own account, if not yet for long enough to be named."""
    return any(
        s.beats_stopped or (s.clocks.wall >= EMERGING_SHARE * s.deadline.seconds and s.subject.phase != Phase.START)
        for s in standing_still
    )


def _dependents(fleet: MonitoredProcesses, ripe: list[Stall], now: float) -> list[Finding]:
    """Nobody else explains them. One of a role and phase is hung; several at once wait for something unseen."""
    groups: dict[tuple[str, str], list[Stall]] = {}
    for s in ripe:
        groups.setdefault((s.subject.role, s.subject.phase), []).append(s)
    findings = []
    for (role, phase), group in groups.items():
        if len(group) == 1:
            findings.append(_hang(fleet, group[0], now))
            continue
        members = [s.subject for s in group]
        longest = max(s.clocks.wall for s in group)
        findings.append(
            finding(
                "stall",
                members,
                FaultClass.CANNOT_TELL,
                onset=min(s.subject.onset_wall(s.clocks.wall) for s in group),
                now=now,
                confidence=0.3,
                because=f"{names(members)} stand still in phase {phase} together for {longest:.1f} s (deadline "
                f"{group[0].deadline.text}), and nobody is seen whom they could be waiting for",
                evidence=(settles(f"the stacks of role {role}: what they wait for"),),
            )
        )
    return findings


def kind_of(subject: MonitoredProcess, clocks: ProgressClocks, beats_stopped: bool) -> str:
    """Which of the four kinds of hang the evidence fits."""
    rate = clocks.cpu / clocks.wall if clocks.wall else 0.0
    busy = clocks.cpu >= BUSY_CPUS * clocks.effective
    if beats_stopped and busy:
        return f"its interpreter ticks no more while it uses {rate:.1f} CPUs: a busy loop holds it"
    if beats_stopped:
        state = subject.sample.proc_state if subject.sample else "?"
        seen = " (process state T)" if state in ("T", "t") else ""
        return f"its interpreter ticks no more and it uses no CPU{seen}: it is stopped"
    if busy:
        return f"its interpreter ticks and it uses {rate:.1f} CPUs: it computes without an end"
    return "its interpreter ticks and it uses no CPU: it waits for a lock or a read that does not come"


def _hang(fleet: MonitoredProcesses, stall: Stall, now: float) -> Finding:
    s, clocks = stall.subject, stall.clocks
    standing = max(clocks.wall, s.stall.wall) if s.progress_due else clocks.wall
    step = f" of step {s.sample.step}" if s.sample and s.sample.step >= 0 else ""
    what = "has finished nothing" if s.progress_due else "has given no sign of life"
    starved = clocks.wall - clocks.effective
    waiters = [
        p
        for p in fleet.peers(s)
        if p.phase == Phase.REDUCE and s.phase != Phase.REDUCE and not p.gone and p.sample is not None
    ]
    waits = f"; waiting for it in the collective: {names(waiters)}" if waiters else ""
    because = (
        f"{s.name()} hangs: in phase {s.phase}{step} it {what} for {standing:.1f} s (deadline {stall.deadline.text}); "
        f"{kind_of(s, clocks, stall.beats_stopped)}{waits}"
    )
    values = {
        "stalled_seconds": standing,
        "effective_seconds": clocks.effective,
        "starved_seconds": starved,
        "cpu_seconds": clocks.cpu,
        "deadline_seconds": stall.deadline.seconds,
        "beat_seconds": s.beat.wall,
    }
    return finding(
        "stall",
        [s],
        FaultClass.HANG,
        onset=s.onset_wall(standing),
        now=now,
        confidence=0.95 if stall.beats_stopped or waiters else 0.9,
        because=because,
        evidence=(Evidence(kind="progress", text=f"no progress for {standing:.1f} s in {s.phase}", values=values),),
    )
