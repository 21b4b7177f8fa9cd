"""An all-dead pipeline: every process of a role has ended, and the other roles of the job wait for it.

With every engine gone a trainer waits without end, and with every trainer gone the engines have nothing to do
(prime-rl's issue 3015). Told apart, that would be a crash for each of them, or a hang of those that wait. It is one
fault: the finding names the process that ended first and why, and counts the others.

Only of jobs that rolecall did not start. Where it may replace replicas (incarnations are counted), each of them is an
incident of its own, because each is replaced; hangs of the waiting ones are dropped there, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.base.findings import EXIT
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, finding, names
from rolecall.detector.live.stages.exits.crash import exit_values, log_file
from rolecall.detector.live.stages.exits.uninstrumented import ENDED_SECONDS, SERVICES
from rolecall.detector.live.stages.stage import Stage, Tick

DETECTOR = "dead_role"
ROLES = ("trainer", *sorted(SERVICES))
"""Roles that wait for each other."""
CONSEQUENCES = frozenset({FaultClass.HANG, FaultClass.CANNOT_TELL})
HUNG_BEFORE_SECONDS = 1.0
"""A process that stood still for this long before the first of the others ended has a fault of its own."""
SETTLE_SECONDS = 15.0
"""How long one finding alone stays as it is: the rest of the job may be about to end."""
NUM_NAMED_MAX = 8
AFTER_IT = "exited after it"
"""The finding of an exit names these itself."""


@dataclass(frozen=True, slots=True)
class DeadRole:
    """`gone`: its processes, the first that ended first. `waiting`: living processes of the other roles."""

    role: str
    gone: tuple[MonitoredProcess, ...]
    waiting: tuple[MonitoredProcess, ...]

    @property
    def since(self) -> float:
        """Wall seconds of the last exit: from then on nothing of the role was left."""
        return max(map(ended_at, self.gone))


def ended_at(subject: MonitoredProcess) -> float:
    """Wall seconds of the watcher."""
    event = subject.exit_event
    return event.wall_at + subject.offset_seconds if event is not None else subject.exit_wall


def dead_role(fleet: MonitoredProcesses, role: str) -> DeadRole | None:
    """None: a process of the role lives, none was seen, or nobody waits."""
    members = list(fleet.roster.of_role(role).values())
    if not members or not all(s.gone for s in members):
        return None
    gone = sorted(members, key=lambda s: (ended_at(s), s.key))
    last = ended_at(gone[-1])
    waiting = tuple(s for s in _others(fleet, role) if s.first_wall < last)
    return DeadRole(role, tuple(gone), waiting) if waiting else None


def _others(fleet: MonitoredProcesses, role: str) -> Iterable[MonitoredProcess]:
    return (s for other in ROLES if other != role for s in fleet.roster.of_role(other).values() if not s.gone)


class DeadRoleStage(Stage):
    name = DETECTOR

    def __init__(self) -> None:
        self.state: dict[str, Finding] = {}
        """By role, while nothing of it lives: its processes are forgotten after a while, those that wait are not."""

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        """Replaces the findings about a dead role by one, and drops those about processes that wait for it."""
        if not tick.fleet.roster.gone and not self.state:
            return []
        for role in ROLES:
            dead = dead_role(tick.fleet, role)
            if dead is not None:
                self._judge(tick, dead)
            elif role in self.state:
                self._go_on(tick, role)
        return list(self.state.values())

    def _judge(self, tick: Tick, dead: DeadRole) -> None:
        about = [f for f in tick.findings if _is_about(f, dead)]
        # A fault of the code says more than the exits that follow from it.
        if any(f.fault_class is FaultClass.USER_CODE for f in tick.findings):
            self.state.pop(dead.role, None)
            return
        began = ended_at(dead.gone[0])
        if not all(s.foreign for s in dead.gone):
            if about:
                tick.findings = [f for f in tick.findings if not _is_of_waiting(f, dead.waiting, began)]
            return
        has_cause = any(f.fault_class is FaultClass.CRASH and f.onset <= began for f in tick.findings if f not in about)
        is_lost = dead.role in SERVICES and tick.now - dead.since >= ENDED_SECONDS
        is_past = tick.fleet.began_wall > dead.since
        if has_cause or (not about and (is_past or not is_lost)):
            self.state.pop(dead.role, None)
            return
        if len(about) == 1 and dead.role not in self.state and tick.now - dead.since < SETTLE_SECONDS:
            return
        tick.findings = [f for f in tick.findings if f not in about and not _is_of_waiting(f, dead.waiting, began)]
        self.state[dead.role] = _finding(dead, about, tick.now)

    def _go_on(self, tick: Tick, role: str) -> None:
        members, waiting = tick.fleet.roster.of_role(role), tuple(_others(tick.fleet, role))
        if members or not waiting:
            del self.state[role]
            return
        onset = self.state[role].onset
        tick.findings = [f for f in tick.findings if not _is_of_waiting(f, waiting, onset)]


def _is_about(found: Finding, dead: DeadRole) -> bool:
    is_exit = found.fault_class is FaultClass.CRASH or found.fault_class.spec.is_hardware
    return is_exit and bool(found.suspects) and all(s.role == dead.role and s.replica for s in found.suspects)


def _is_of_waiting(found: Finding, waiting: Sequence[MonitoredProcess], since: float) -> bool:
    keys = {s.key for s in waiting}
    named = [(s.replica, s.rank, s.incarnation) for s in found.suspects]
    return (
        found.fault_class in CONSEQUENCES
        and found.onset >= since - HUNG_BEFORE_SECONDS
        and bool(named)
        and all(who in keys for who in named)
    )


def _finding(dead: DeadRole, about: Sequence[Finding], now: float) -> Finding:
    """`about`: the findings of its exits; the earliest says why the first one ended."""
    lead = min(about, key=lambda f: f.onset, default=None)
    first = dead.gone[0]
    if lead is not None:
        keys = {(s.replica, s.rank, s.incarnation) for s in lead.suspects}
        first = next((s for s in dead.gone if s.key in keys), first)
    replicas = {s.replica for s in dead.gone}
    total = f"every {dead.role} of the job is gone ({counted(len(replicas), 'replica')}"
    total += f", {counted(len(dead.gone), 'process', 'processes')})" if len(dead.gone) > len(replicas) else ")"
    waits = "waits" if len(dead.waiting) == 1 else "wait"
    why = lead.because if lead is not None else f"{first.name()} ended{_how(first)}"
    others = [s for s in dead.gone if s.key != first.key]
    rest = ", ".join(f"{s.name()}{_how(s)} {ended_at(s) - ended_at(first):+.0f} s" for s in others[:NUM_NAMED_MAX])
    more = f" and {len(others) - NUM_NAMED_MAX} more" if len(others) > NUM_NAMED_MAX else ""
    then = f"; then {rest}{more}" if rest and AFTER_IT not in why else ""
    own = [*lead.evidence] if lead is not None else [_exit_evidence(first), *_log_of(first)]
    return finding(
        DETECTOR,
        [first],
        FaultClass.CRASH if lead is None else lead.fault_class,
        onset=ended_at(first),
        now=now,
        confidence=max((f.confidence for f in about), default=0.5),
        because=f"{total}, and {names(dead.waiting)} {waits} for it: first, {why}{then}",
        evidence=(*own, *(_exit_evidence(s) for s in others[:NUM_NAMED_MAX])),
        about=f":{DETECTOR}:{dead.role}",
    )


def _how(subject: MonitoredProcess) -> str:
    detail = subject.exit_event.detail if subject.exit_event is not None else {}
    if detail.get("signal"):
        return f" on signal {detail['signal']}"
    return f" with code {detail['code']}" if detail.get("code") else ""


def _exit_evidence(subject: MonitoredProcess) -> Evidence:
    detail = subject.exit_event.detail if subject.exit_event is not None else {}
    values = exit_values(detail.get("signal", ""), oom=detail.get("cause") == "oom")
    return Evidence(kind=EXIT, text=f"process {subject.process} exited{_how(subject)}", values=values)


def _log_of(subject: MonitoredProcess) -> tuple[Evidence, ...]:
    return log_file(subject.exit_event.detail) if subject.exit_event is not None else ()
