"""A rank has left a collective out: the others wait in one that it never entered, or fail in it.

torch counts the collectives of the default process group, and all of its ranks enter the same ones. A rank has gone on
alone if it begins its next step with fewer since the last one than another rank has entered, without beginning, and has
entered one in that step. From then on its collectives meet others of its peers: they hang, or one of them is aborted
for a size that does not fit. Before it has entered one, it may only do in its step what the others do between two.

Of two ranks, either may be the one that is wrong: the one that has gone on is named if both of them have entered more
collectives between all the steps before.

The numbers are those of torch's hooks (`rolecall exec`): in the samples while processes live, in their exits after it.
A fault of the code or its input, not of a machine.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import finding, names
from rolecall.detector.live.stages.stage import Stage, Tick

DETECTOR = "skipped_collective"
RANKS_MIN = 2
USUAL_MIN, USUAL_KEPT = 2, 32
"""Steps of two ranks: that must have been seen, and that are remembered."""
STANDING_SECONDS = 1.0
ABORT_SIGNALS = ("6", "SIGABRT")
COLLECTIVES = "collectives"
"""Detail of an exit: issued, at the end of the last step, at the beginning of the next; -1: not begun."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: steps finished, and collectives entered since the last one; exact once the next has begun.
    `entered`: one since then."""

    subject: MonitoredProcess
    steps: int
    between: int
    begun: bool
    entered: bool


@dataclass(slots=True)
class UsualCollectives:
    """Collectives that both ranks of a replica entered between two steps, in the steps that were seen."""

    steps: int = -1  # finished before the newest of them
    between: deque[int] = field(default_factory=lambda: deque(maxlen=USUAL_KEPT))

    @property
    def least(self) -> int:
        """-1: not known."""
        return min(self.between) if len(self.between) >= USUAL_MIN else -1


class SkippedCollectiveStage(Stage):
    name = DETECTOR

    def __init__(self) -> None:
        self.state: dict[str, UsualCollectives] = {}  # by replica, of two ranks

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        self._learn(tick)
        replicas = {
            s.replica for s in tick.fleet.current() if s.foreign and (s.gone or s.stall.wall >= STANDING_SECONDS)
        }
        found = (self._judge(tick, replica) for replica in sorted(replicas))
        return [f for f in found if f is not None]

    def _learn(self, tick: Tick) -> None:
        counting = {
            s.replica
            for s in tick.fleet.current()
            if s.foreign and s.rank == 1 and s.sample and s.sample.collectives_at_begin >= 0
        }
        for replica in counting:
            ranks = list(tick.fleet.roster.of_replica(replica).values())
            if len(ranks) != 2:
                continue
            one, other = map(_place_of, ranks)
            if one is None or other is None or not (one.begun and other.begun) or one.steps != other.steps:
                continue
            usual = self.state.setdefault(replica, UsualCollectives())
            if one.steps != usual.steps and one.between == other.between:
                usual.steps = one.steps
                usual.between.append(one.between)
        for replica in self.state.keys() - {s.replica for s in tick.fleet.current()}:
            del self.state[replica]

    def _judge(self, tick: Tick, replica: str) -> Finding | None:
        ranks = list(tick.fleet.roster.of_replica(replica).values())
        places = [p for p in map(_place_of, ranks) if p is not None]
        if len(places) < RANKS_MIN or len(places) < len(ranks):
            return None
        ahead = [p for p in places if p.begun and p.steps == max(q.steps for q in places)]
        if len(ahead) != 1:
            return None
        (alone,) = ahead
        others = [p for p in places if p is not alone]
        # Of a rank that was aborted, and of the one whose collective aborted it, the number may be from before both.
        known = [p for p in others if not is_aborted(p.subject)]
        entered = alone.entered or len(known) < len(others)
        if not entered or not (known or len(places) == 2) or any(p.steps != alone.steps or p.begun for p in others):
            return None
        least = min((p.between for p in known), default=0)
        if len(places) == 2:
            usual = self.state.get(replica, UsualCollectives()).least
            if alone.between >= usual:
                return None
            if not known:  # the number of an aborted one may be too small
                least = alone.between + 1
        if least <= alone.between:
            return None
        subject = alone.subject
        them = f"{names(p.subject for p in others)} are" if len(others) > 1 else f"{others[0].subject.name()} is"
        because = (
            f"{subject.name()} has left out a collective: it began step {alone.steps + 1} after "
            f"{counted(alone.between, 'collective')} since the step before, while {them} in the {_ordinal(least)}, and "
            "had not begun it: a fault of the code or its input, not of a machine"
        )
        values = {"collectives": float(alone.between), "collectives_of_others": float(least)}
        return finding(
            self.name,
            [subject],
            FaultClass.USER_CODE,
            onset=subject.onset_wall(subject.stall.wall),
            now=tick.now,
            confidence=0.9,
            because=because,
            evidence=(Evidence(kind="collective", text="it entered fewer collectives than its peers", values=values),),
            about=f"{subject.role}:{DETECTOR}:{subject.rank}",
        )


def _place_of(subject: MonitoredProcess) -> Place | None:
    """None: its collectives are not known."""
    sample = subject.sample
    if sample is None:
        return None
    steps, numbers = (
        sample.progress,
        (sample.collectives_issued, sample.collectives_at_step, sample.collectives_at_begin),
    )
    detail = subject.exit_event.detail if subject.exit_event is not None else {}
    if COLLECTIVES in detail:
        try:
            steps, *rest = map(int, detail[COLLECTIVES].split())
            issued, at_step, at_begin = rest
            numbers = issued, at_step, at_begin
        except ValueError:
            return None
    issued, at_step, at_begin = numbers
    begun = at_begin >= 0
    if issued < 0 or at_step < 0 or issued < at_step or (begun and at_begin < at_step):
        return None  # not known, or the process group was created anew and counts from 0
    between = (at_begin if begun else max(issued, at_step)) - at_step
    return Place(subject, steps, between, begun, begun and issued > at_begin)


def is_aborted(subject: MonitoredProcess) -> bool:
    event = subject.exit_event
    return event is not None and event.detail.get("signal", "") in ABORT_SIGNALS


def _ordinal(n: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(n, f"{n}th")
