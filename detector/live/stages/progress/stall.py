"""Progress stall: a process makes no progress where progress is due, and is not just waiting for another one.

A process is hung when its clock since the last progress passes its deadline (`stage.Stall`). Four kinds of hang are
distinguished by heartbeats (ticks of a side thread, which stop when the interpreter cannot run) and CPU use.

Cause before symptom: in phases that depend on other processes (`reduce`, `step`, `update`, `copy`, the controller's
loop) no process is accused while another one stalls independently, has exited, or has just joined.

In a collective, the rank that blocks it is the one that has not entered it. Evidence in order of precedence: missing
heartbeats; an unreachable node while peers wait for its rank; a rank that has not entered (its collective counter,
aligned with its peers' at the last step that all computed, is lower, or it is outside while all others are inside);
among ranks that all wait inside, the one that uses CPU while the others are idle. Otherwise it is a tie that names no
single rank: the timeout of the process group decides.
"""

from collections.abc import Mapping, Sequence

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS, Phase
from rolecall.detector.base.findings import settles
from rolecall.detector.live.monitored_process import (
    PAUSES,
    STOPPED_STATES,
    TAIL_FACTOR,
    MonitoredProcess,
    ProgressClocks,
    phase_text,
)
from rolecall.detector.live.processes import MonitoredProcesses, finding, names, waiting
from rolecall.detector.live.stages.nodes.agent_lost import REFUSED, unreachable_reason
from rolecall.detector.live.stages.progress.suspended import suspended, suspended_finding
from rolecall.detector.live.stages.stage import (
    EMERGING_SHARE,
    WORKING_CPUS,
    Stage,
    Stall,
    Tick,
    dependents,
    emerging,
    own,
)

QUIET_SECONDS = 15.0
"""Grace for dependent processes after a fault, an exit or a new process: transfer timeouts (10 s) and group rebuilds
must finish first."""
BUSY_CPUS = 0.3
"""CPU seconds per second above which a process without progress is computing, not waiting: with three runnable threads
per CPU, a spinning process gets a third."""


SHARED_PHASES = frozenset({Phase.STEP, Phase.GENERATE})
"""Phases in which ranks of one replica may work together."""
PLACES: Mapping[str, str] = {Phase.SCORE: "reward function"}
"""Phase -> whose code hangs there, for `because`. Ranks of one replica that hang there hang at the same place, as a
server that none of them can reach: one finding names all of them."""


class StallStage(Stage):
    """Processes that stall independently of others."""

    name = "stall"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        groups: dict[object, list[Stall]] = {}
        ripe = [s for s in own(tick.stalls) if s.ripe]
        paused = suspended(tick.fleet, [s.subject for s in ripe if s.beats_stopped])
        spared = {member.key for group in paused for member in group.members}
        for s in ripe:
            if s.subject.key not in spared:
                who, at_one_place = s.subject, s.subject.phase in PLACES and not s.beats_stopped
                key = (who.replica, who.incarnation, who.phase) if at_one_place else who.key
                groups.setdefault(key, []).append(s)
        hangs = [_hang(tick.fleet, group, tick.now) for group in groups.values()]
        return [*hangs, *(suspended_finding(group, tick.now) for group in paused)]


class DependentStallStage(Stage):
    """Stalled processes that depend on others, if no other fault explains the stall."""

    name = "dependent_stall"
    suppresses = frozenset({"nccl_ras"})
    quiet_seconds = QUIET_SECONDS

    def evaluate(self, tick: Tick) -> list[Finding]:
        if emerging(own(tick.stalls)) or tick.now - tick.fleet.changed_wall < QUIET_SECONDS:
            return []
        groups: dict[tuple[str, str], list[Stall]] = {}
        waits = dependents(tick.stalls)
        for n, s in enumerate(tick.stalls):
            # Ranks that wait in a step for one of them stall within a moment of each other.
            is_shared = s.subject.phase in SHARED_PHASES
            together = is_shared and s.clocks.wall >= EMERGING_SHARE * s.deadline.seconds
            if (s.ripe or together) and not s.beats_stopped and n in waits:
                groups.setdefault((s.subject.role, s.subject.phase), []).append(s)
        groups = {key: group for key, group in groups.items() if any(s.ripe for s in group)}
        found = [_judge_dependent(tick.fleet, *key, group, tick.now) for key, group in groups.items()]
        return [f for f in found if f is not None]


AWAITED_SECONDS = 60.0
"""A rank that the others wait for may evaluate or write a checkpoint for so long before anything is reported, or twice
as long as the second longest such pause of its job; until then its stack is looked at (`wait.py`)."""


def _judge_dependent(
    fleet: MonitoredProcesses, role: str, phase: str, group: list[Stall], now: float
) -> Finding | None:
    """A single stalled process of a role and phase is hung, unless another rank of its replica has not begun the step;
    several wait for an unknown cause."""
    awaited = _not_begun(fleet, role, group)
    if awaited:
        usual = TAIL_FACTOR * fleet.gaps.second_longest(awaited[0].group, PAUSES)
        if max(s.clocks.wall for s in group) < max(AWAITED_SECONDS, usual):
            return None
    if len(group) == 1 and not awaited:
        return _hang(fleet, group, now)
    return _waiting_for_unknown(role, phase, group, awaited, now)


def _not_begun(fleet: MonitoredProcesses, role: str, group: list[Stall]) -> list[MonitoredProcess]:
    """Other ranks of these replicas that have not begun the step in which these stand. Between two steps no progress is
    due: they may evaluate, write a checkpoint, or hang."""
    steps = {
        (s.subject.replica, s.subject.incarnation): s.subject.sample.progress
        for s in group
        if s.subject.phase == Phase.STEP and s.subject.sample is not None
    }
    standing = {s.subject.key for s in group}
    return [
        p
        for p in fleet.roster.of_role(role).values()
        if p.key not in standing and p.phase == Phase.WAIT and not p.gone and p.sample is not None
        if p.sample.progress <= steps.get((p.replica, p.incarnation), -1)
    ]


def _waiting_for_unknown(
    role: str, phase: str, group: list[Stall], awaited: list[MonitoredProcess], now: float
) -> Finding:
    members = [s.subject for s in group]
    cause = "no fault of another process explains it"
    if awaited:
        has = "has" if len(awaited) == 1 else "have"
        named = names(awaited) if len(awaited) > 1 else f"rank {awaited[0].rank} of {awaited[0].replica}"
        cause = f"{named} {has} not begun it: an evaluation, a checkpoint, or a hang"
    longest = max(s.clocks.wall for s in group)
    makes = "makes" if len(members) == 1 else "make"
    return finding(
        "stall",
        [*members, *awaited],  # stacks may show that one of these holds the others up
        FaultClass.CANNOT_TELL,
        onset=min(s.subject.onset_wall(s.clocks.wall) for s in group),
        now=now,
        confidence=0.3,
        because=f"{names(members)} {makes} no progress in {phase} for {longest:.1f} s (deadline "
        f"{group[0].deadline.text}), and {cause}",
        evidence=(settles(f"stacks of role {role}: what the processes wait for"),),
    )


def kind_of(subject: MonitoredProcess, clocks: ProgressClocks, beats_stopped: bool) -> str:
    """Description of the kind of hang, by heartbeat and CPU use."""
    used = f"{100 * clocks.cpu / clocks.wall if clocks.wall else 0.0:.0f} % CPU"
    busy = clocks.cpu >= BUSY_CPUS * clocks.effective
    if beats_stopped and busy:
        return f"no heartbeat, {used}: a busy loop holds the interpreter"
    if beats_stopped:
        state = subject.sample.proc_state if subject.sample else "?"
        seen = f" (state {state})" if state in STOPPED_STATES else ""
        return f"process stopped{seen}, no heartbeat, {used}"
    if busy:
        return f"heartbeat continues, {used}: endless computation"
    return f"heartbeat continues, {used}: blocked on a lock or a read"


def _hang(fleet: MonitoredProcesses, group: Sequence[Stall], now: float) -> Finding:
    """`group`: of one replica and phase; the numbers are those of the one that has stood still for longest."""
    stall = max(group, key=lambda s: s.clocks.wall)
    subject, clocks = stall.subject, stall.clocks
    members = sorted((s.subject for s in group), key=lambda m: m.rank)
    standing = max(clocks.wall, subject.stall.wall) if subject.progress_due else clocks.wall
    where = phase_text(subject.phase, subject.sample.step if subject.sample else -1)
    what = "progress" if subject.progress_due else "heartbeat"
    starved = clocks.wall - clocks.effective
    waiters = [
        p
        for p in fleet.peers(subject)
        if p.phase == Phase.REDUCE and subject.phase != Phase.REDUCE and not p.gone and p.sample is not None
    ]
    waits = f"; {waiting(waiters)} for it in all-reduce" if waiters else ""
    named = " and ".join(m.name() for m in members)
    verb, whose = ("is", "its") if len(members) == 1 else ("are", "their")
    place = f" in {whose} {PLACES[subject.phase]}" if subject.phase in PLACES else ""
    because = (
        f"{named} {verb} hung{place}: no {what} in {where} for {standing:.1f} s "
        f"(deadline {stall.deadline.text}); {kind_of(subject, clocks, stall.beats_stopped)}{waits}"
    )
    values = {
        "stalled_seconds": standing,
        "effective_seconds": clocks.effective,
        "starved_seconds": starved,
        "cpu_seconds": clocks.cpu,
        "deadline_seconds": stall.deadline.seconds,
        "beat_seconds": subject.beat.wall,
    }
    return finding(
        "stall",
        members,
        FaultClass.HANG,
        onset=subject.onset_wall(standing),
        now=now,
        confidence=0.95 if stall.beats_stopped or waiters else 0.9,
        because=because,
        evidence=(
            Evidence(kind="progress", text=f"no progress for {standing:.1f} s in {subject.phase}", values=values),
        ),
    )


ASLEEP_CPUS = 0.15
"""CPU use per second below which a rank in a collective is waiting: heartbeats, the agent's probe and gloo's thread
use a few percent."""
BEHIND_MARGIN_SECONDS = 1.0
"""A peer is named only if it has been outside the collective for this much longer than others inside: five samples, so
that one late sample does not reverse the order."""


class CollectiveStage(Stage):
    name = "collective"
    suppresses = frozenset({"dependent_stall", "nccl_ras"})

    def evaluate(self, tick: Tick) -> list[Finding]:
        groups: dict[tuple[str, int, int], list[Stall]] = {}
        for s in tick.stalls:
            sample = s.subject.sample
            if s.subject.phase == Phase.REDUCE and s.ripe and not s.beats_stopped and sample is not None:
                # Ranks that compute together with others of their replica reduce only with the same rank elsewhere.
                shard = s.subject.rank if sample.exchanges else -1
                groups.setdefault((s.subject.group, sample.epoch, shard), []).append(s)
        found = [_judge_collective(tick.fleet, *key, waiters, tick.stalls, tick.now) for key, waiters in groups.items()]
        return [f for f in found if f is not None]


def _judge_collective(
    fleet: MonitoredProcesses,
    group: str,
    epoch: int,
    shard: int,
    waiters: list[Stall],
    all_stalls: list[Stall],
    now: float,
) -> Finding | None:
    """`shard`: the rank in its replica that all members are; -1: any."""
    of_group = [s for s in fleet.roster.of_role(waiters[0].subject.role).values() if s.group == group]
    members = [s for s in of_group if s.sample is not None and s.sample.epoch == epoch and shard in (-1, s.rank)]
    if any(m.gone for m in members):
        return None  # the crash stage names it; its peers wait until the runtime has handled the exit
    if any(s.group == group and s.sample and s.sample.epoch == epoch for s in fleet.closed()):
        return None  # a member is being replaced: the others wait for a new epoch
    inside = [w.subject for w in waiters]
    unseen = {m.key: unreachable_reason(fleet, m.node, now) for m in members if m not in inside}
    if any(REFUSED in why for why in unseen.values()):
        return None  # only an agent is down: the state of its trainer is unknown
    silent = [m for m in members if unseen.get(m.key)]
    if silent:
        return _blocks(silent, waiters, FaultClass.NETWORK, 0.8, "its node is unreachable", now)
    stopped = {s.subject.key for s in all_stalls if s.beats_stopped}
    outside = [m for m in members if m.phase != Phase.REDUCE]
    if outside or any(m.key in stopped for m in members):
        # A rank outside with progress due, or without heartbeats, is judged by its own deadline.
        late = [m for m in outside if m.phase in PHASES_WITHOUT_DUE_PROGRESS and m.key not in stopped]
        if len(late) != len(outside) or any(m.key in stopped for m in members):
            return None
        since = max(w.clocks.wall for w in waiters) + BEHIND_MARGIN_SECONDS
        if any(m.sample.at - m.sample.phase_since < since for m in late if m.sample):
            return None
        if any(m.stall.cpu >= WORKING_CPUS * m.stall.effective for m in late):
            return None  # it is working on something without a phase, such as a checkpoint
        return _blocks(late, waiters, FaultClass.HANG, 0.8, "it has not entered the collective", now)
    if len(members) < 2:  # a collective with a single member waits for no other rank
        return _blocks(inside[:1], waiters, FaultClass.HANG, 0.8, "it is stuck in a collective of one", now)
    return _all_inside(members, waiters, now) if len(waiters) >= len(members) else None


def _all_inside(members: list[MonitoredProcess], waiters: list[Stall], now: float) -> Finding:
    # Collectives entered since the last step that all members were observed computing, if there is one.
    common = set.intersection(*(set(m.rests) for m in members))
    counts = [m.sample.collectives_entered - m.rests[max(common)] for m in members if m.sample] if common else []
    lag = max(counts, default=0) - min(counts, default=0)
    if lag:
        behind = [m for m, count in zip(members, counts, strict=True) if count == min(counts)]
        text = f"it is {lag} collective{'s' if lag > 1 else ''} behind the others"
        return _blocks(behind, waiters, FaultClass.HANG, 0.9, text, now)
    pending = [m for m in members if m.sample and m.sample.collectives_entered > m.sample.collectives_done]
    if pending and len(pending) < len(members):
        behind = [m for m in members if m not in pending]
        return _blocks(behind, waiters, FaultClass.HANG, 0.85, "it is outside while all others are inside", now)
    rates = {w.subject.key: w.clocks.cpu / w.clocks.wall for w in waiters}
    burning = [m for m in members if rates[m.key] >= BUSY_CPUS]
    if len(burning) == 1 and all(r < ASLEEP_CPUS for k, r in rates.items() if k != burning[0].key):
        text = f"it uses {100 * rates[burning[0].key]:.0f} % CPU inside the collective while the others are idle"
        return _blocks(burning, waiters, FaultClass.HANG, 0.7, text, now)
    seconds = max(w.clocks.wall for w in waiters)
    because = (
        f"{names(members)} all wait in the same collective for {seconds:.1f} s (deadline {waiters[0].deadline.text}); "
        "all send heartbeats and none is behind, so the rank that blocks it cannot be identified"
    )
    settle = "the exceptions at the process group's timeout (the rank without one blocks it), or Flight Recorder dumps"
    return finding(
        "collective",
        members,
        FaultClass.CANNOT_TELL,
        onset=min(w.subject.onset_wall(w.clocks.wall) for w in waiters),
        now=now,
        confidence=0.3,
        because=because,
        evidence=(settles(settle),),
    )


def _blocks(
    culprits: list[MonitoredProcess], waiters: list[Stall], fault: FaultClass, confidence: float, text: str, now: float
) -> Finding:
    others = [w for w in waiters if w.subject not in culprits] or waiters
    longest = max(others, key=lambda w: w.clocks.wall)
    seconds, deadline = longest.clocks.wall, longest.deadline
    named = " and ".join(c.name() for c in culprits)
    blocks = "blocks" if len(culprits) == 1 else "block"
    because = (
        f"{named} {blocks} all-reduce: {text}; {waiting([w.subject for w in others])} for {seconds:.1f} s "
        f"(deadline {deadline.text})"
    )
    values = {"waited_seconds": seconds, "deadline_seconds": deadline.seconds}
    return finding(
        "collective",
        culprits,
        fault,
        onset=min(w.subject.onset_wall(w.clocks.wall) for w in waiters),
        now=now,
        confidence=confidence,
        because=because,
        evidence=(Evidence(kind="collective", text=text, values=values),),
    )
