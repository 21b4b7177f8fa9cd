"""Which rank blocks a collective: the one that has not entered it, never those that wait inside.

Evidence in order: an unreachable node while peers wait for its rank; a rank that has not entered (its counter of
collectives, aligned with its peers' where both last computed the same step, is lower; or it is outside while all others
are inside); then, among ranks that all wait inside, the one that uses CPU while the others are idle. Heartbeats come
before this (detector/live/stages/stall.py). What is left is a tie and names no single rank: the group's own timeout
decides.
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
"""A rank that waits in a collective uses less than this: heartbeats, the agent's probe and gloo's thread take a few
percent."""
BEHIND_MARGIN_SECONDS = 1.0
"""A peer outside the collective is named only if it has been outside for this much longer than others are inside: five
samples, so that one late sample does not reverse the order."""


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
        return None  # the crash stage names it; its peers wait for the runtime to contain that
    if any(s.role == role and s.sample and s.sample.epoch == epoch for s in fleet.closed()):
        return None  # a member is being replaced: the rest waits for its end, then for a new epoch
    inside = [w.subject for w in waiters]
    unseen = {m.key: unreachable_reason(fleet, m.node, now) for m in members if m not in inside}
    if any(REFUSED in why for why in unseen.values()):
        return None  # only an agent is gone: whether its trainer computes or hangs cannot be seen
    silent = [m for m in members if unseen.get(m.key)]
    if silent:
        return _verdict(silent, waiters, FaultClass.NETWORK, 0.8, "its node is unreachable", now)
    stopped = {s.subject.key for s in all_stalls if s.beats_stopped}
    outside = [m for m in members if m.phase != Phase.REDUCE]
    if outside or any(m.key in stopped for m in members):
        # A rank outside that owes progress, or sends no heartbeat, has a deadline of its own.
        late = [m for m in outside if m.phase in PHASES_WITHOUT_DUE_PROGRESS and m.key not in stopped]
        if len(late) != len(outside) or any(m.key in stopped for m in members):
            return None
        since = max(w.clocks.wall for w in waiters)
        if any(_phase_seconds(m) < since + BEHIND_MARGIN_SECONDS for m in late):
            return None
        if any(m.stall.cpu >= WORKING_CPUS * m.stall.effective for m in late):
            return None  # it is at work on something that has no phase of its own, such as a checkpoint
        return _verdict(late, waiters, FaultClass.HANG, 0.8, "it has not entered the collective", now)
    if len(waiters) < len(members) or len(members) < 2:
        return _alone(waiters, now) if len(members) < 2 else None
    return _all_inside(members, waiters, now)


def _phase_seconds(subject: MonitoredProcess) -> float:
    return subject.sample.at - subject.sample.phase_since if subject.sample else 0.0


def _alone(waiters: list[Stall], now: float) -> Finding | None:
    """A collective of one waits for no other rank."""
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
    """Collectives entered since a step that all members were last seen computing; empty when there is none."""
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
