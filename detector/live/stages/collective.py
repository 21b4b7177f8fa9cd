"""Identifies the rank that blocks a collective: the one that has not entered it, not those waiting inside.

Evidence in order of precedence: an unreachable node while peers wait for its rank; a rank that has not entered (its
collective counter, aligned with its peers' at the last step that all computed, is lower, or it is outside while all
others are inside); among ranks that all wait inside, the one that uses CPU while the others are idle. Missing
heartbeats take precedence over all of these (detector/live/stages/stall.py). Otherwise it is a tie that names no single
rank: the timeout of the process group decides.
"""

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS, Phase
from rolecall.detector.base.findings import settles
from rolecall.detector.live.findings import finding
from rolecall.detector.live.fleet import MonitoredProcesses, names, waiting
from rolecall.detector.live.stages.agent_lost import REFUSED, unreachable_reason
from rolecall.detector.live.stages.stage import Stage, Tick
from rolecall.detector.live.stages.stall import BUSY_CPUS
from rolecall.detector.live.stalls import WORKING_CPUS, Stall
from rolecall.detector.live.subject import MonitoredProcess

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
        return find(tick.fleet, tick.now, tick.stalls)


def find(fleet: MonitoredProcesses, now: float, all_stalls: list[Stall]) -> list[Finding]:
    groups: dict[tuple[str, int], list[Stall]] = {}
    for s in all_stalls:
        if s.subject.phase == Phase.REDUCE and s.ripe and not s.beats_stopped and s.subject.sample is not None:
            groups.setdefault((s.subject.role, s.subject.sample.epoch), []).append(s)
    found = [_judge(fleet, role, epoch, waiters, all_stalls, now) for (role, epoch), waiters in groups.items()]
    return [f for f in found if f is not None]


def _judge(
    fleet: MonitoredProcesses, role: str, epoch: int, waiters: list[Stall], all_stalls: list[Stall], now: float
) -> Finding | None:
    role_members = fleet.roster.of_role(role).values()
    members = [s for s in role_members if s.sample is not None and s.sample.epoch == epoch]
    if any(m.gone for m in members):
        return None  # the crash stage names it; its peers wait until the runtime has handled the exit
    if any(s.role == role and s.sample and s.sample.epoch == epoch for s in fleet.closed()):
        return None  # a member is being replaced: the others wait for a new epoch
    inside = [w.subject for w in waiters]
    unseen = {m.key: unreachable_reason(fleet, m.node, now) for m in members if m not in inside}
    if any(REFUSED in why for why in unseen.values()):
        return None  # only an agent is down: the state of its trainer is unknown
    silent = [m for m in members if unseen.get(m.key)]
    if silent:
        return _verdict(silent, waiters, FaultClass.NETWORK, 0.8, "its node is unreachable", now)
    stopped = {s.subject.key for s in all_stalls if s.beats_stopped}
    outside = [m for m in members if m.phase != Phase.REDUCE]
    if outside or any(m.key in stopped for m in members):
        # A rank outside with progress due, or without heartbeats, is judged by its own deadline.
        late = [m for m in outside if m.phase in PHASES_WITHOUT_DUE_PROGRESS and m.key not in stopped]
        if len(late) != len(outside) or any(m.key in stopped for m in members):
            return None
        since = max(w.clocks.wall for w in waiters)
        if any(_phase_seconds(m) < since + BEHIND_MARGIN_SECONDS for m in late):
            return None
        if any(m.stall.cpu >= WORKING_CPUS * m.stall.effective for m in late):
            return None  # it is working on something without a phase, such as a checkpoint
        return _verdict(late, waiters, FaultClass.HANG, 0.8, "it has not entered the collective", now)
    if len(waiters) < len(members) or len(members) < 2:
        return _alone(waiters, now) if len(members) < 2 else None
    return _all_inside(members, waiters, now)


def _phase_seconds(subject: MonitoredProcess) -> float:
    return subject.sample.at - subject.sample.phase_since if subject.sample else 0.0


def _alone(waiters: list[Stall], now: float) -> Finding | None:
    """A collective with a single member waits for no other rank."""
    return _verdict([waiters[0].subject], waiters, FaultClass.HANG, 0.8, "it is stuck in a collective of one", now)


def _all_inside(members: list[MonitoredProcess], waiters: list[Stall], now: float) -> Finding:
    counts = _aligned(members)
    if counts and min(counts.values()) < max(counts.values()):
        low = min(counts.values())
        behind = [m for m in members if counts[m.key] == low]
        lag = max(counts.values()) - low
        if len(behind) < len(members):
            text = f"it is {lag} collective{'s' if lag > 1 else ''} behind the others"
            return _verdict(behind, waiters, FaultClass.HANG, 0.9, text, now)
    pending = [m for m in members if m.sample and m.sample.collectives_entered > m.sample.collectives_done]
    if pending and len(pending) < len(members):
        behind = [m for m in members if m not in pending]
        return _verdict(behind, waiters, FaultClass.HANG, 0.85, "it is outside while all others are inside", now)
    rates = {w.subject.key: w.clocks.cpu / w.clocks.wall for w in waiters}
    burning = [m for m in members if rates[m.key] >= BUSY_CPUS]
    if len(burning) == 1 and all(r < ASLEEP_CPUS for k, r in rates.items() if k != burning[0].key):
        text = f"it uses {100 * rates[burning[0].key]:.0f} % CPU inside the collective while the others are idle"
        return _verdict(burning, waiters, FaultClass.HANG, 0.7, text, now)
    return _tie(members, waiters, now)


def _aligned(members: list[MonitoredProcess]) -> dict[tuple[str, int, int], int]:
    """Collectives entered since the last step that all members were observed computing; empty without such a step."""
    common = set.intersection(*(set(m.rests) for m in members))
    if not common:
        return {}
    base = max(common)
    return {m.key: m.sample.collectives_entered - m.rests[base] for m in members if m.sample}


def _verdict(
    culprits: list[MonitoredProcess], waiters: list[Stall], fault: FaultClass, confidence: float, text: str, now: float
) -> Finding:
    others = [w for w in waiters if w.subject not in culprits] or waiters
    longest = max(others, key=lambda w: w.clocks.wall)
    seconds, deadline = longest.clocks.wall, longest.deadline
    named = " and ".join(c.name() for c in culprits)
    blocks = "blocks" if len(culprits) == 1 else "block"
    because = (
        f"{named} {blocks} all-reduce: {text}; {waiting(w.subject for w in others)} for {seconds:.1f} s "
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


def _tie(members: list[MonitoredProcess], waiters: list[Stall], now: float) -> Finding:
    seconds = max(w.clocks.wall for w in waiters)
    because = (
        f"{names(members)} all wait in the same collective for {seconds:.1f} s (deadline {waiters[0].deadline.text}); "
        "all send heartbeats and none is behind, so the rank that blocks it cannot be identified"
    )
    return finding(
        "collective",
        members,
        FaultClass.CANNOT_TELL,
        onset=min(w.subject.onset_wall(w.clocks.wall) for w in waiters),
        now=now,
        confidence=0.3,
        because=because,
        evidence=(
            settles("the process group's timeout (the rank that does not raise blocks it), or Flight Recorder dumps"),
        ),
    )
