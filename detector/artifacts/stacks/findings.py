"""Findings on stacks: the place of each process, the group that holds all suspects, and the evidence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.stacks.positions import Stack, shown
from rolecall.detector.artifacts.stacks.processes import DumpedProcess, group_name, groups_of
from rolecall.detector.artifacts.stacks.rounds import FlagCount
from rolecall.detector.base.findings import settles

DETECTOR = "stacks"
STACK_GROUP = "stack_group"
"""Evidence of this kind is one group of processes at the same place: `num_processes`, and the place in its text."""
PARALLEL_GROUP = "parallel_group"
"""Evidence of this kind is a group that is suspected as a whole: `num_members`, `num_likely_innocent`."""
ROUNDS = "rounds"
"""Evidence of this kind says in how many rounds of stacks a process was an outlier: `num_flagged` of `num_rounds`."""
NUM_GROUPS_SHOWN = 8
NUM_FRAMES_SHOWN = 8
NUM_NAMES_SHOWN = 8
NUM_TOLD = 3
NUM_UNDECIDED_MAX = 64
"""Maximum number of processes in a "cannot tell"."""
CONFIDENCE_CANNOT_TELL = 0.3


@dataclass(frozen=True, slots=True)
class StackCluster:
    """Processes at the same place."""

    stack: Stack
    processes: tuple[DumpedProcess, ...]


def places(processes: Iterable[DumpedProcess]) -> list[StackCluster]:
    """Largest first; ties in the order of their first process."""
    found: dict[tuple[object, ...], list[DumpedProcess]] = {}
    for p in processes:
        if p.stack is not None:
            found.setdefault((p.stack.doing, p.stack.key), []).append(p)
    grouped = [StackCluster(its[0].stack, tuple(its)) for its in found.values() if its[0].stack is not None]
    return sorted(grouped, key=lambda place: -len(place.processes))


@dataclass(frozen=True, slots=True)
class StackAnalysis:
    """One role in one snapshot; creates its findings."""

    role: str
    processes: tuple[DumpedProcess, ...]
    places: tuple[StackCluster, ...]

    @property
    def who(self) -> str:
        seen = sum(p.stack is not None for p in self.processes)
        return f"{seen} {self.role} processes" if self.role else f"{seen} processes"

    def cannot_tell(self, about: Sequence[DumpedProcess], because: str, settle: str) -> Finding:
        suspects = about[:NUM_UNDECIDED_MAX]
        return self._finding(suspects, FaultClass.CANNOT_TELL, CONFIDENCE_CANNOT_TELL, because, (settles(settle),))

    def finding(
        self, suspects: Sequence[DumpedProcess], confidence: float, because: str, evidence: tuple[Evidence, ...] = ()
    ) -> Finding:
        return self._finding(suspects, FaultClass.HANG, confidence, because, evidence)

    def slow(
        self, suspects: Sequence[DumpedProcess], confidence: float, because: str, evidence: tuple[Evidence, ...]
    ) -> Finding:
        return self._finding(suspects, FaultClass.SLOW, confidence, because, evidence)

    def _finding(
        self,
        suspects: Sequence[DumpedProcess],
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


# --- groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommonParallelGroup:
    name: str
    members: tuple[DumpedProcess, ...]


def shared(processes: Sequence[DumpedProcess], outliers: Sequence[DumpedProcess]) -> CommonParallelGroup | None:
    """The smallest group, not all processes, that contains all outliers: node, replica, or parallel group."""
    common = list(groups_of(outliers[0]))
    for p in outliers[1:]:
        its = set(groups_of(p))
        common = [group for group in common if group in its]
    members: dict[object, list[DumpedProcess]] = {group: [] for group in common}
    for p in processes:
        for group in groups_of(p):
            if group in members:
                members[group].append(p)
    found = [CommonParallelGroup(group_name(g), tuple(members[g])) for g in common if len(members[g]) < len(processes)]
    return min(found, key=lambda g: len(g.members), default=None)


def as_a_whole(group: CommonParallelGroup, first: Sequence[DumpedProcess]) -> tuple[str, list[DumpedProcess], Evidence]:
    """(text, members, evidence) of a group that is suspected as a whole; `first`: the processes nearest to the
    cause."""
    nearest = {p.key for p in first}
    members = [*(p for p in group.members if p.key in nearest), *(p for p in group.members if p.key not in nearest)]
    innocent = len(members) - max(1, len(first))
    nodes = len({p.node for p in members if p.node})
    size = f"{len(members)} processes" + (f" on {nodes} node{'s' if nodes != 1 else ''}" if nodes else "")
    words = f"{group.name}, {size}, of which {innocent} are likely innocent"
    if first and innocent:
        words += f": check first {names_text(first)}"
    values = {"num_members": float(len(members)), "num_likely_innocent": float(innocent)}
    evidence = Evidence(kind=PARALLEL_GROUP, text=f"{group.name}: {names_text(members)}", values=values)
    return words, members, evidence


# --- text ---------------------------------------------------------------------------------------------------------

_PLURAL = {"waits": "wait", "is": "are", "reads": "read", "compiles": "compile", "collects": "collect"}


def finding_text(stack: Stack, number: int = 1) -> str:
    """`waits in a collective: all_reduce (...)`; of several `wait in ...`."""
    words = str(stack.doing)
    if number != 1:
        verb, _, rest = words.partition(" ")
        words = f"{_PLURAL[verb]} {rest}".rstrip().replace("its ", "their ")
    return f"{words}: {stack.at}"


def names_text(processes: Sequence[DumpedProcess]) -> str:
    names = ", ".join(p.name for p in processes[:NUM_NAMES_SHOWN])
    return names + (f" and {len(processes) - NUM_NAMES_SHOWN} more" if len(processes) > NUM_NAMES_SHOWN else "")


def at_last(process: DumpedProcess) -> str:
    """Text on the current activity of a process, and whether it moves."""
    if process.stack is None:
        return process.name
    before = {None: "", True: "; an older dump shows it elsewhere: it moves", False: "; an older dump shows the same"}
    return f"{process.name} {finding_text(process.stack)}{before[process.moves]}"


def all_at_last(processes: Sequence[DumpedProcess]) -> str:
    texts = "; ".join(at_last(p) for p in processes[:NUM_TOLD])
    return texts + (f"; and {len(processes) - NUM_TOLD} more" if len(processes) > NUM_TOLD else "")


def flagged_name(f: FlagCount) -> str:
    return f.name or names_text(f.members)


def rounds_evidence(f: FlagCount, num_rounds: int) -> Evidence:
    numbers = ", ".join(str(n + 1) for n in f.rounds[:NUM_NAMES_SHOWN])
    more = f" and {len(f.rounds) - NUM_NAMES_SHOWN} more" if len(f.rounds) > NUM_NAMES_SHOWN else ""
    of_it = f" ({len(f.members)} processes)" if f.name and len(f.members) > 1 else ""
    return Evidence(
        kind=ROUNDS,
        text=f"{flagged_name(f)}{of_it}: flagged in {len(f.rounds)} of {num_rounds} rounds: {numbers}{more}",
        values={"num_flagged": float(len(f.rounds)), "num_rounds": float(num_rounds), "chance_ratio": f.chance},
    )


def standing_evidence(process: DumpedProcess, rounds: Sequence[Sequence[DumpedProcess]]) -> Evidence:
    """Evidence with the number of last rounds that the process spent at its current place."""
    keys = [next((p.stack.key for p in r if p.key == process.key and p.stack), None) for r in reversed(rounds)]
    num = next((n for n, key in enumerate(keys) if key != keys[0]), len(keys))
    text = f"{process.name}: at the same place in the last {num} of {len(rounds)} rounds"
    return Evidence(kind=ROUNDS, text=text, values={"num_flagged": float(num), "num_rounds": float(len(rounds))})


def _place_evidence(place: StackCluster) -> Evidence:
    number = len(place.processes)
    frames = " < ".join(shown(f) for f in place.stack.frames[:NUM_FRAMES_SHOWN])
    who = f"{number} process{'es' if number != 1 else ''}"
    return Evidence(
        kind=STACK_GROUP,
        text=f"{who} ({names_text(place.processes)}) {finding_text(place.stack, number).partition(': ')[0]}: {frames}",
        values={"num_processes": float(number)},
    )


def gil_evidence(processes: Sequence[DumpedProcess]) -> tuple[Evidence, ...]:
    held = [(p.name, p.stack.gil_holder) for p in processes if p.stack is not None and p.stack.gil_holder]
    return tuple(
        Evidence(kind="gil", text=f"{name}: another thread holds the GIL: {holder}")
        for name, holder in held[:NUM_GROUPS_SHOWN]
    )
