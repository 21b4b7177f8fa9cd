"""Progress stall: a process makes no progress where progress is due, and is not just waiting for another one.

A process is hung when its clock since the last progress passes its deadline (detector/live/stalls.py). Four kinds of
hang are distinguished by heartbeats (ticks of a side thread, which stop when the interpreter cannot run) and CPU use;
the kernel's process state appears in `because` only.

Cause before symptom: in phases that depend on other processes (`reduce`, `update`, `copy`, the controller's loop) no
process is accused while another one stalls independently, has exited, or has just joined. The rank that blocks a
collective is identified in detector/live/stages/collective.py.
"""

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import Phase
from rolecall.detector.base.findings import settles
from rolecall.detector.live.findings import finding
from rolecall.detector.live.fleet import MonitoredProcesses, names, waiting
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.stalls import DEPENDENT_PHASES, Stall, emerging, own
from rolecall.detector.live.subject import MonitoredProcess, ProgressClocks

QUIET_SECONDS = 15.0
"""Grace for dependent processes after a fault, an exit or a new process: transfer timeouts (10 s) and group rebuilds
must finish first."""
BUSY_CPUS = 0.3
"""CPU seconds per second above which a process without progress is computing, not waiting: with three runnable threads
per CPU, a spinning process gets a third."""


class StallStage(Stage):
    """Processes that stall independently of others."""

    name = "stall"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        return [_hang(tick.fleet, s, tick.now) for s in own(tick.stalls) if s.ripe]


class DependentStallStage(Stage):
    """Stalled processes that depend on others, if no other fault explains the stall."""

    name = "dependent_stall"
    suppresses = frozenset({"nccl_ras"})
    quiet_seconds = QUIET_SECONDS

    def evaluate(self, tick: Tick) -> list[Finding]:
        if emerging(own(tick.stalls)) or tick.now - tick.fleet.changed_wall < QUIET_SECONDS:
            return []
        ripe = [s for s in tick.stalls if s.ripe and not s.beats_stopped and s.subject.phase in DEPENDENT_PHASES]
        return _dependents(tick.fleet, ripe, tick.now)


def _dependents(fleet: MonitoredProcesses, ripe: list[Stall], now: float) -> list[Finding]:
    """A single stalled process of a role and phase is hung; several wait for an unknown cause."""
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
                because=f"{names(members)} make no progress in {phase} for {longest:.1f} s (deadline "
                f"{group[0].deadline.text}), and no fault of another process explains it",
                evidence=(settles(f"stacks of role {role}: what the processes wait for"),),
            )
        )
    return findings


def kind_of(subject: MonitoredProcess, clocks: ProgressClocks, beats_stopped: bool) -> str:
    """Description of the kind of hang, by heartbeat and CPU use."""
    used = f"{100 * clocks.cpu / clocks.wall if clocks.wall else 0.0:.0f} % CPU"
    busy = clocks.cpu >= BUSY_CPUS * clocks.effective
    if beats_stopped and busy:
        return f"no heartbeat, {used}: a busy loop holds the interpreter"
    if beats_stopped:
        state = subject.sample.proc_state if subject.sample else "?"
        seen = f" (state {state})" if state in ("T", "t") else ""
        return f"process stopped{seen}, no heartbeat, {used}"
    if busy:
        return f"heartbeat continues, {used}: endless computation"
    return f"heartbeat continues, {used}: blocked on a lock or a read"


def _hang(fleet: MonitoredProcesses, stall: Stall, now: float) -> Finding:
    s, clocks = stall.subject, stall.clocks
    standing = max(clocks.wall, s.stall.wall) if s.progress_due else clocks.wall
    step = f" of step {s.sample.step}" if s.sample and s.sample.step >= 0 else ""
    what = "progress" if s.progress_due else "heartbeat"
    starved = clocks.wall - clocks.effective
    waiters = [
        p
        for p in fleet.peers(s)
        if p.phase == Phase.REDUCE and s.phase != Phase.REDUCE and not p.gone and p.sample is not None
    ]
    waits = f"; {waiting(waiters)} for it in all-reduce" if waiters else ""
    because = (
        f"{s.name()} is hung: no {what} in {s.phase}{step} for {standing:.1f} s (deadline {stall.deadline.text}); "
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
