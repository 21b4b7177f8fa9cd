"""Which shard holds a weight transfer up, from one stack of each trainer rank and engine process. Pure.

Trainers send their weights to the engines in collectives that all of them enter. Seen from one of them, a shard that
hangs, one that was never asked and one that has finished look the same: all others wait (trl's issue 6913, AReaL's
1180). The stacks tell where each process is:

  inside     waits for others, in code of the transfer
  held       in code of the transfer, but at rest outside of any collective: at a lock, in its own code, stopped
  outside    at rest in other code: it has not entered the transfer
  idle       outside, and waits for requests in its event loop: never asked, or finished
  elsewhere  waits for others in other code, as trainer ranks in a barrier while one of them sends; or is busy

A replica is named only if others are inside and its processes alone are held or outside. In every other case the
finding names no shard and says why: to guess would accuse a healthy one.

A server waits for its engine's core, and a core for its workers: of a process with engine processes below it, those
without further ones below them are looked at in its place, unless all of them are idle.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolecall.core.diagnosis import Evidence, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.artifacts.stacks.dumps import Frame, StackDump
from rolecall.detector.artifacts.stacks.positions import Stack, StackActivity, shown, stack_of
from rolecall.detector.base.findings import settles

DETECTOR = "weight_sync"
PLACE = "weight_sync"
"""Kind of the evidence: where one process is."""
CONFIDENCE_NAMED = 0.8
CONFIDENCE_CANNOT_TELL = 0.3
NUM_SHOWN_MAX = 16
NUM_FRAMES_SHOWN = 4
AT_REST = frozenset({StackActivity.LOCK, StackActivity.STILL, StackActivity.STOPPED})
RECORDER = "Flight Recorder dumps of all these processes (TORCH_FR_BUFFER_SIZE), or their stacks some minutes later"

_TRANSFER = re.compile(
    r"(?:update|sync|broadcast|transfer|send|receive|recv|publish|push|pull|refit|load)_?(?:\w*_)?weights?(?:_|\Z)"
    r"|weights?_?(?:sync|update|transfer|broadcast)|update_(?:named_)?param(?:s|eters)?(?:_|\Z)"
    r"|(?:update|broadcast)_\w*bucket|refit_policy|(?:\A|_)refit(?:_|\Z)",
    re.IGNORECASE,
)
_IDLE = re.compile(
    r"run_forever|_?run_once|main_loop|(?:_\w+)?busy_loop|event_loop|_?process_input_queue|serve(?:_forever)?|"
    r"wait_for_(?:request|work|task)s?|get_(?:request|task)s?|recv_requests?|dequeue"
)
_AT_WORK = re.compile(r"_handle_client_request|_execute_worker_rpc|run_method")
"""Of vLLM's core and workers: below them is the loop, above them what was asked for."""
_RAY_WAITS = frozenset({"get", "get_objects", "wait"})


class Place(StrEnum):
    INSIDE = "waits for others inside the transfer"
    HELD = "stands still inside the transfer, in no collective"
    OUTSIDE = "has not entered the transfer"
    IDLE = "is idle: it was never asked, or has finished"
    ELSEWHERE = "is elsewhere"


@dataclass(frozen=True, slots=True)
class Shard:
    """One process. `stack` None: there is no stack of it. `engine`: which engine process below `who` it is."""

    who: Suspect
    stack: Stack | None
    at: float = 0.0
    engine: str = ""

    @property
    def name(self) -> str:
        rank = f" rank {self.who.rank}" if self.who.rank is not None else ""
        return f"{self.who.replica}{rank}{self.engine and f' ({self.engine})'}"


def shards_of(who: Suspect, dump: StackDump) -> list[Shard]:
    """The process, and what is looked at in its place or beside it."""
    own = Shard(who, stack_of(dump), dump.at)
    above = {e.parent for e in dump.engines}
    engines = [
        Shard(who, stack_of(e.dump) if e.dump is not None else None, dump.at, f"{e.title}, pid {e.pid}")
        for e in dump.engines
        if e.pid not in above
    ]
    idle = all(e.stack is not None and place_of(e.stack) is Place.IDLE for e in engines)
    # A trainer rank that sends to others beside its own engine is inside, whatever its engine does.
    is_seen = idle or (own.stack is not None and place_of(own.stack) is Place.INSIDE)
    return [*([own] if is_seen else []), *engines]


def _bare(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]


def is_of_a_transfer(stack: Stack) -> bool:
    return any(_TRANSFER.search(_bare(frame)) for frame in stack.frames)


def place_of(stack: Stack) -> Place:
    # A trainer that waits for the answer of an engine's server or actor is part of the transfer, and waits for it.
    awaits_answer = stack.doing is StackActivity.IO or _awaits_actor(stack)
    if is_of_a_transfer(stack):
        if stack.waits or awaits_answer:
            return Place.INSIDE
        return Place.HELD if stack.doing in AT_REST else Place.ELSEWHERE
    if stack.waits or stack.doing not in AT_REST | {StackActivity.IO}:
        return Place.ELSEWHERE
    if stack.doing is not StackActivity.STOPPED and _is_idle(stack):
        return Place.IDLE
    return Place.ELSEWHERE if awaits_answer else Place.OUTSIDE


def _is_idle(stack: Stack) -> bool:
    for name in map(_bare, stack.frames):
        if _AT_WORK.fullmatch(name):
            return False
        if _IDLE.fullmatch(name):
            return True
    return False


def _awaits_actor(stack: Stack) -> bool:
    """In `ray.get` or `ray.wait`."""
    place = stack.key[0]
    return stack.doing is StackActivity.STILL and place.file == "ray/_private/worker.py" and _bare(place) in _RAY_WAITS


def diagnose(shards: Sequence[Shard]) -> Finding | None:
    """None: no process waits inside a weight transfer, or there is one process only."""
    places = {shard: place_of(shard.stack) for shard in shards if shard.stack is not None}
    inside = [s for s, place in places.items() if place is Place.INSIDE]
    if not inside or len(shards) < 2:
        return None
    held = [s for s, place in places.items() if place in (Place.HELD, Place.OUTSIDE)]
    waits = f"{_names(inside)} {'waits' if len(inside) == 1 else 'wait'} inside a weight transfer ({_at(inside[0])})"
    unseen = [s for s in shards if s.stack is None]
    if len({s.who.replica for s in held}) == 1:
        words = "; ".join(f"{s.name} {places[s]}: {_at(s)}" for s in held[:NUM_SHOWN_MAX])
        verb = "holds" if len(held) == 1 else "hold"
        because = f"{_names(held)} {verb} the weight sync up: {words}; {waits}"
        return _finding(FaultClass.HANG, held, CONFIDENCE_NAMED, because, places)
    why = _why_not(places, held, unseen)
    about = held or unseen or [s for s, place in places.items() if place is Place.IDLE] or list(places)
    because = f"the weight sync hangs, and no shard is named: {waits}, and {why}"
    return _finding(FaultClass.CANNOT_TELL, about, CONFIDENCE_CANNOT_TELL, because, places)


def _why_not(places: Mapping[Shard, Place], held: Sequence[Shard], unseen: Sequence[Shard]) -> str:
    if held:
        return f"{_names(held)} are not in it: any of them may hold it up"
    if unseen:
        return f"there is no stack of {_names(unseen)}"
    idle = [s for s, place in places.items() if place is Place.IDLE]
    if idle:
        verb = "is" if len(idle) == 1 else "are"
        return f"{_names(idle)} {verb} idle: never asked to take part, or finished with it"
    others = [s for s, place in places.items() if place is Place.ELSEWHERE]
    if others:
        verb = "is" if len(others) == 1 else "are"
        return f"{_names(others)} {verb} busy, or waits for others elsewhere"
    return "all of them are inside: their stacks do not tell who has not sent or received its part"


def _finding(
    fault_class: FaultClass,
    about: Sequence[Shard],
    confidence: float,
    because: str,
    places: Mapping[Shard, Place],
) -> Finding:
    times = [s.at for s in places]
    evidence = [
        Evidence(kind=PLACE, text=f"{s.name} {place}: {_at(s)}") for s, place in list(places.items())[:NUM_SHOWN_MAX]
    ]
    if fault_class is FaultClass.CANNOT_TELL:
        evidence.append(settles(RECORDER))
    return Finding(
        detector=DETECTOR,
        suspects=tuple(dict.fromkeys(s.who for s in about[:NUM_SHOWN_MAX])),
        fault_class=fault_class,
        onset=min(times),
        detected_at=max(times),
        confidence=confidence,
        because=because,
        evidence=tuple(evidence),
    )


def _at(shard: Shard) -> str:
    """`get (queue.py) < load_weights (worker.py)`."""
    return " < ".join(shown(f) for f in shard.stack.frames[:NUM_FRAMES_SHOWN]) if shard.stack is not None else "unknown"


def _names(shards: Sequence[Shard]) -> str:
    names = ", ".join(s.name for s in shards[:NUM_SHOWN_MAX])
    more = len(shards) - NUM_SHOWN_MAX
    return names + (f" and {counted(more, 'more process', 'more processes')}" if more > 0 else "")
