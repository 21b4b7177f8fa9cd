"""Stacks: who holds up the rest, from one look at the stacks of all processes of a role.

Each process is at one place: the thread that tells most, its main thread unless that only waits for another. Equal
places make a group; two waits for others are the same when the call that waits and its callers are, whatever lies
below. Then, cause before symptom:

  most wait for others, some do not        those who do not are the suspects: the rest waits for them; most at the same
                                           place in two looks wait, too
  all wait, and a rank has no dump         that rank: the stopped and the dead cannot be looked at
  all wait, most in one collective         the others, as the smallest parallel group that holds them, and how many of
                                           it are likely innocent (ByteRobust, arXiv 2509.16293, stack aggregation)
  all wait in one place; most do not wait  nobody: a healthy moment looks like this
  two halves                               cannot tell, and what would settle it

One look cannot tell a slow process from a hung one: an older dump of the same process says whether it moves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rolecall.core.diagnosis import Evidence, FaultClass, Finding, Suspect
from rolecall.core.ids import NodeId
from rolecall.detector.findings import settles
from rolecall.detector.stack_dumps import WORLD_SIZE_MAX, Dump, Topology
from rolecall.detector.stack_places import Doing, Stack, shown, stack_of

DETECTOR = "stacks"
STACK_GROUP = "stack_group"
"""Evidence of this kind tells of one group of processes at the same place: `num_processes`, and the place in its text."""
PARALLEL_GROUP = "parallel_group"
"""Evidence of this kind tells of a group that is suspected as a whole: `num_members`, `num_likely_innocent`."""
UNKNOWN_NODE = NodeId("unknown")
"""Node of a suspect whose dump, file and topology name none: a suspect needs one."""
NUM_GROUPS_SHOWN = 8
NUM_FRAMES_SHOWN = 8
NUM_NAMES_SHOWN = 8
NUM_TOLD = 3
NUM_UNDECIDED_MAX = 64
"""A "cannot tell" names no more processes than this."""

CONFIDENCE_OUTSIDE = 0.8
CONFIDENCE_AT_WORK = 0.6
"""Somebody is always the last to arrive: one who computes may only be slow."""
CONFIDENCE_ABSENT = 0.6
CONFIDENCE_ELSEWHERE = 0.5
CONFIDENCE_CANNOT_TELL = 0.3
MOVES_CHANGE = 0.1
"""An older dump that shows the same place makes a hang likelier, one that shows another makes it less likely."""

DUMP_AGAIN = (
    "dumps of the same processes some seconds later: who is then at the same place, outside of a wait, is stuck"
)
RECORDER = "Flight Recorder dumps, which tell who has not entered which collective; or stacks some seconds later"

# --- who is who ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a role. Without a stack: known of, not dumped. `moves`: whether an older dump shows another place."""

    role: str
    node: str
    replica: str = ""
    rank: int | None = None
    incarnation: int | None = None
    axes: tuple[tuple[str, int], ...] = ()
    groups: tuple[str, ...] = ()
    label: str = ""
    at: float = 0.0
    stack: Stack | None = None
    moves: bool | None = None

    @property
    def name(self) -> str:
        """For sentences: `trainer/1 rank 3 (node m07)`; the file, where the dump says nothing of itself."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        who = " ".join(w for w in (self.replica or (self.role if rank else ""), rank) if w) or self.label
        return f"{who} (node {self.node})" if self.node else who

    @property
    def suspect(self) -> Suspect:
        return Suspect(
            node=NodeId(self.node) if self.node else UNKNOWN_NODE,
            role=self.role,
            replica=self.replica,
            rank=self.rank,
            incarnation=self.incarnation,
        )


def roster(dumps: Sequence[Dump], topology: Topology | None = None) -> dict[str, list[Process]]:
    """By role: its dumped processes, then those that must exist and have no dump."""
    dumps = [_completed(d, topology) for d in dumps]
    by_role: dict[str, list[Dump]] = {}
    for dump in dumps:
        by_role.setdefault(dump.role, []).append(dump)
    return {role: _processes(role, by_role[role], topology) for role in sorted(by_role)}


def _completed(dump: Dump, topology: Topology | None) -> Dump:
    """With what the topology knows of its rank; a dump's own words come first."""
    if topology is None or (dump.role and topology.role and dump.role != topology.role):
        return dump
    rank = dump.rank
    if rank is None and dump.pid is not None:
        its = [r for r, pid in topology.pids.items() if pid == dump.pid]
        known = [r for r in its if not dump.node or topology.nodes.get(r, dump.node) == dump.node]
        rank = known[0] if len(known) == 1 else None
    if rank is None:
        return dump if dump.role else replace(dump, role=topology.role)
    replica = dump.replica or topology.replicas.get(rank, "")
    return replace(
        dump,
        rank=rank,
        replica=replica,
        node=dump.node or topology.nodes.get(rank, ""),
        role=dump.role or topology.role or replica.partition("/")[0],
        axes=dump.axes or topology.axes(rank),
    )


def _processes(role: str, dumps: list[Dump], topology: Topology | None) -> list[Process]:
    newest: dict[tuple[object, ...], list[Dump]] = {}
    for dump in sorted(dumps, key=lambda d: (-d.at, d.path)):
        if dump.rank is not None:
            who: tuple[object, ...] = (dump.replica, dump.rank)
        elif dump.pid is not None and (dump.node or dump.replica):
            who = (dump.replica, dump.node, dump.pid)
        else:
            who = (dump.path,)
        newest.setdefault(who, []).append(dump)
    processes = [_process(role, its) for its in newest.values()]
    processes.sort(key=lambda p: (p.rank is None, p.rank or 0, p.replica, p.label))
    ranks = {p.rank for p in processes if p.rank is not None}
    if len(ranks) < len(processes) or max(ranks) >= WORLD_SIZE_MAX:
        return processes  # some unknown, or counted in each replica anew: who is missing cannot be said
    known = topology if topology is not None and topology.role in ("", role) else Topology()
    size = max(max(ranks) + 1, known.world_size or 0, *(d.world_size or 0 for d in dumps))
    for rank in sorted(set(range(size)) - ranks):
        node, replica = known.nodes.get(rank, ""), known.replicas.get(rank, "")
        processes.append(Process(role=role, rank=rank, node=node, replica=replica, axes=known.axes(rank)))
    groups: dict[int, list[str]] = {}
    for group in known.groups:
        for rank in group.ranks:
            groups.setdefault(rank, []).append(f"{group.axis} {group.index}")
    return [replace(p, groups=tuple(groups.get(p.rank or 0, ()))) for p in processes] if groups else processes


def _process(role: str, dumps: list[Dump]) -> Process:
    """Of all dumps of one process, newest first."""
    dump, stack = dumps[0], stack_of(dumps[0])
    older = [d for d in dumps[1:] if d.at < dump.at]
    return Process(
        role=role,
        node=dump.node,
        replica=dump.replica,
        rank=dump.rank,
        incarnation=dump.incarnation,
        axes=dump.axes,
        label=f"pid {dump.pid}" if dump.pid is not None else dump.path,
        at=dump.at,
        stack=stack,
        moves=stack_of(older[0]).key != stack.key if older else None,
    )


# --- verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Processes at the same place."""

    stack: Stack
    processes: tuple[Process, ...]


def places(processes: Iterable[Process]) -> list[Place]:
    """Largest first; equal ones in the order of their first process."""
    found: dict[tuple[object, ...], list[Process]] = {}
    for p in processes:
        if p.stack is not None:
            found.setdefault((p.stack.doing, p.stack.key), []).append(p)
    grouped = [Place(its[0].stack, tuple(its)) for its in found.values() if its[0].stack is not None]
    return sorted(grouped, key=lambda place: -len(place.processes))


def diagnose(dumps: Sequence[Dump], *, topology: Topology | None = None) -> list[Finding]:
    """At most one finding per role. Times are those of the files: by the first of them the fault stood."""
    found = [_judge(role, processes) for role, processes in roster(dumps, topology).items()]
    return [f for f in found if f is not None]


def looked_at(dumps: Sequence[Dump], *, topology: Topology | None = None) -> str:
    """What the dumps show, for an answer without a finding: `trainer: 8 stacks: 8 wait in a collective: all_reduce ...`."""
    parts = []
    for role, processes in roster(dumps, topology).items():
        found = places(processes)
        number = sum(len(place.processes) for place in found)
        told = [f"{len(p.processes)} {_said(p.stack, len(p.processes))}" for p in found[:NUM_GROUPS_SHOWN]]
        if len(found) > NUM_GROUPS_SHOWN:
            told.append(f"{len(found) - NUM_GROUPS_SHOWN} more places")
        parts.append(f"{role or 'no role named'}: {number} stack{'s' if number != 1 else ''}: {'; '.join(told)}")
    return ". ".join(parts)


def _stood(processes: list[Process]) -> list[Process]:
    """Most at one place that is not known as a wait, twice: a wait that Python does not show, such as reading a value
    from a GPU whose peers have not come. Once, it would be work that all do."""
    found = places(processes)
    top = found[0]
    if top.stack.waits or 2 * len(top.processes) <= sum(len(place.processes) for place in found):
        return processes
    if any(p.moves is not False for p in top.processes):
        return processes
    return [
        replace(p, stack=replace(p.stack, doing=Doing.STOOD)) if p.stack and p.stack.key == top.stack.key else p
        for p in processes
    ]


def _judge(role: str, processes: list[Process]) -> Finding | None:
    processes = _stood(processes)
    waiting = [p for p in processes if p.stack is not None and p.stack.waits]
    outside = [p for p in processes if p.stack is not None and not p.stack.waits]
    absent = [p for p in processes if p.stack is None]
    if not waiting or len(outside) > len(waiting):
        return None  # most are at work: who is early waits, and that accuses nobody
    case = _Case(role, tuple(processes), tuple(places(processes)))
    if len(processes) == 1:
        because = f"{_at_last(processes[0])}, and no other process was looked at"
        return case.cannot_tell(waiting, because, "dumps of the processes that it waits for")
    if outside:
        return _late(case, waiting, outside, absent)
    if absent:
        return _absent(case, waiting, absent)
    if len(case.places) > 1:
        return _elsewhere(case)
    if any(p.moves is not False for p in waiting):
        return None
    return case.cannot_tell(
        waiting, f"all {case.who} {_said(case.places[0].stack, 0)}, now as in older dumps", RECORDER
    )


def _late(case: "_Case", waiting: list[Process], outside: list[Process], absent: list[Process]) -> Finding:
    """Some do not wait for others: they are the cause."""
    at_work = {p for p in outside if p.stack is not None and p.stack.doing == Doing.WORK}
    outside = sorted(outside, key=lambda p: p in at_work)
    stuck = any(p.moves is False for p in outside)
    told = f"{len(waiting)} of {case.who} wait for others"
    if len(outside) == len(waiting):
        return case.cannot_tell(outside, f"{told}, as many do not: {_names(outside)}", DUMP_AGAIN)
    in_pipeline = sum(p.stack is not None and p.stack.doing == Doing.PIPELINE for p in waiting)
    if len(at_work) == len(outside) and 2 * in_pipeline > len(waiting) and not stuck:
        because = f"{told}, most of them in a pipeline, while {_names(outside)} compute: so does a healthy pipeline"
        return case.cannot_tell(outside, because, DUMP_AGAIN)
    confidence = CONFIDENCE_AT_WORK if len(at_work) == len(outside) or absent else CONFIDENCE_OUTSIDE
    confidence += MOVES_CHANGE * (stuck - any(p.moves is True for p in outside))
    largest = next(place for place in case.places if place.stack.waits)
    because = f"{told} ({largest.stack.at}); " + "; ".join(_at_last(p) for p in outside[:NUM_TOLD])
    if len(outside) > NUM_TOLD:
        because += f"; and {len(outside) - NUM_TOLD} more"
    if len(outside) > 1 and (group := _shared(case.processes, outside)):
        because += f". All of them are in {group.name}"
    if absent:
        because += f". There is no dump of {_names(absent)}"
    return case.finding(outside, confidence, because, _gil_evidence(outside))


def _absent(case: "_Case", waiting: list[Process], absent: list[Process]) -> Finding:
    """All that were looked at wait, and some were not: the stopped and the dead give no dump."""
    told = f"all {case.who} that have a dump wait for others ({case.places[0].stack.at})"
    if len(absent) >= len(waiting):
        because = f"{told}, and {len(absent)} have none: {_names(absent)}"
        return case.cannot_tell(absent, because, "dumps of the other processes")
    because = f"{told}, and there is no dump of {_names(absent)}: the stopped and the dead give none"
    if len(absent) > 1 and (group := _shared(case.processes, absent)):
        because += f". All of them are in {group.name}"
    return case.finding(absent, CONFIDENCE_ABSENT, because)


def _elsewhere(case: "_Case") -> Finding:
    """All wait, not in the same place."""
    top, *rest = case.places
    others = [p for place in rest for p in place.processes]
    told = "; ".join(f"{len(place.processes)} {_said(place.stack, len(place.processes))}" for place in case.places[:3])
    if len(top.processes) <= len(others) or top.stack.doing == Doing.PIPELINE:
        because = f"all {case.who} wait for others, and no collective holds the most of them: {told}"
        return case.cannot_tell(others, because, RECORDER)
    because = f"all {case.who} wait for others, most of them in one place: {told}"
    group = _shared(case.processes, others) if len(others) > 1 else None
    if group is None:
        return case.finding(others, CONFIDENCE_ELSEWHERE, f"{because}. Elsewhere: {_names(others)}")
    # Who waits for a cause waits one level further out, with more others: the fewest are the nearest to it.
    alone = len(rest) == 1 or len(rest[-1].processes) < len(rest[-2].processes)
    first = rest[-1].processes if alone else ()
    members = [*first, *(p for p in group.members if p not in first)]
    innocent = len(members) - max(1, len(first))
    nodes = len({p.node for p in members if p.node})
    size = f"{len(members)} processes" + (f" on {nodes} node{'s' if nodes != 1 else ''}" if nodes else "")
    because += f". Those elsewhere are in {group.name}, {size}, of which {innocent} are likely innocent"
    if first and innocent:
        because += f": look first at {_names(first)}"
    values = {"num_members": float(len(members)), "num_likely_innocent": float(innocent)}
    evidence = Evidence(kind=PARALLEL_GROUP, text=f"{group.name}: {_names(members)}", values=values)
    return case.finding(members, CONFIDENCE_ELSEWHERE, because, (evidence,))


@dataclass(frozen=True, slots=True)
class _Case:
    """One role as it was looked at, and how findings about it are worded."""

    role: str
    processes: tuple[Process, ...]
    places: tuple[Place, ...]

    @property
    def who(self) -> str:
        seen = sum(p.stack is not None for p in self.processes)
        return f"{seen} {self.role} processes" if self.role else f"{seen} processes"

    def cannot_tell(self, about: Sequence[Process], because: str, settle: str) -> Finding:
        suspects = about[:NUM_UNDECIDED_MAX]
        return self._finding(suspects, FaultClass.CANNOT_TELL, CONFIDENCE_CANNOT_TELL, because, (settles(settle),))

    def finding(
        self, suspects: Sequence[Process], confidence: float, because: str, evidence: tuple[Evidence, ...] = ()
    ) -> Finding:
        return self._finding(suspects, FaultClass.HANG, confidence, because, evidence)

    def _finding(
        self,
        suspects: Sequence[Process],
        fault_class: FaultClass,
        confidence: float,
        because: str,
        evidence: tuple[Evidence, ...],
    ) -> Finding:
        times = [p.at for p in self.processes if p.stack is not None]
        return Finding(
            detector=DETECTOR,
            suspects=tuple(p.suspect for p in suspects),
            fault_class=fault_class,
            onset=min(times),
            detected_at=max(times),
            confidence=round(confidence, 2),
            because=because,
            evidence=(*(_place_evidence(place) for place in self.places[:NUM_GROUPS_SHOWN]), *evidence),
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    name: str
    members: tuple[Process, ...]


def _shared(processes: Sequence[Process], outliers: Sequence[Process]) -> _Shared | None:
    """The smallest group, not all processes, that holds all outliers: node, replica, or parallel group."""
    first = outliers[0]
    found = [
        _Shared(
            f"{what} {getattr(first, what)}", tuple(p for p in processes if getattr(p, what) == getattr(first, what))
        )
        for what in ("node", "replica")
        if getattr(first, what) and len({getattr(p, what) for p in outliers}) == 1
    ]
    listed = [g for g in first.groups if all(g in p.groups for p in outliers)]
    found += [_Shared(g, tuple(p for p in processes if g in p.groups)) for g in listed]
    # Of a regular grid: the axes on which they differ span the group, what they have in common tells which one it is.
    fixed = {(axis, index) for axis, index in first.axes if all((axis, index) in p.axes for p in outliers)}
    if fixed and all(len(p.axes) == len(first.axes) for p in outliers):
        spanned = " x ".join(axis for axis, index in first.axes if (axis, index) not in fixed)
        where = ", ".join(f"{axis} {index}" for axis, index in first.axes if (axis, index) in fixed)
        found.append(_Shared(f"the {spanned} group of {where}", tuple(p for p in processes if fixed <= set(p.axes))))
    found = [g for g in found if len(g.members) < len(processes)]
    return min(found, key=lambda g: len(g.members), default=None)


# --- words --------------------------------------------------------------------------------------------------------

_PLURAL = {
    "waits": "wait",
    "is": "are",
    "reads": "read",
    "stands": "stand",
    "compiles": "compile",
    "collects": "collect",
}


def _said(stack: Stack, number: int = 1) -> str:
    """`waits in a collective: all_reduce (...)`; of several `wait in ...`."""
    words = str(stack.doing)
    if number != 1:
        verb, _, rest = words.partition(" ")
        words = f"{_PLURAL[verb]} {rest}".rstrip().replace("its ", "their ")
    return f"{words}: {stack.at}"


def _names(processes: Sequence[Process]) -> str:
    told = ", ".join(p.name for p in processes[:NUM_NAMES_SHOWN])
    return told + (f" and {len(processes) - NUM_NAMES_SHOWN} more" if len(processes) > NUM_NAMES_SHOWN else "")


def _at_last(process: Process) -> str:
    """What a process that does not wait is at, and whether it moves."""
    if process.stack is None:
        return process.name
    before = {None: "", True: "; an older dump shows it elsewhere: it moves", False: "; an older dump shows the same"}
    return f"{process.name} {_said(process.stack)}{before[process.moves]}"


def _place_evidence(place: Place) -> Evidence:
    number = len(place.processes)
    frames = " < ".join(shown(f) for f in place.stack.frames[:NUM_FRAMES_SHOWN])
    who = f"{number} process{'es' if number != 1 else ''}"
    return Evidence(
        kind=STACK_GROUP,
        text=f"{who} ({_names(place.processes)}) {_said(place.stack, number).partition(': ')[0]}: {frames}",
        values={"num_processes": float(number)},
    )


def _gil_evidence(processes: Sequence[Process]) -> tuple[Evidence, ...]:
    held = [(p.name, p.stack.gil_holder) for p in processes if p.stack is not None and p.stack.gil_holder]
    return tuple(
        Evidence(kind="gil", text=f"{name}: another thread holds the GIL: {holder}")
        for name, holder in held[:NUM_GROUPS_SHOWN]
    )
