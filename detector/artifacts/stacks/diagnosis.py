"""Localizes the processes that block the rest, from a snapshot of the stacks of all processes of a role.

Each process is represented by the place of its most informative thread: the main thread, unless it only waits for
another. Processes at equal places form a group; two waits are equal if the waiting call and its callers are. Then:

  most wait for others, some do not        suspects are those that do not: the rest waits for them; a majority at the
                                           same place in two snapshots also counts as waiting
  all wait, and a rank has no dump         suspect is that rank: a stopped or dead process gives no dump
  all wait, most in one collective         suspects are the others, as the smallest parallel group that holds them, with
                                           the number of likely innocent members (ByteRobust, arXiv 2509.16293)
  all wait in one place; most do not wait  no suspect: a healthy job shows this, too
  two halves                               cannot tell, and what would settle it

One snapshot cannot distinguish slow from hung. Several rounds can: an outlier of the last round that has not moved
while no process made progress is hung; an outlier in most rounds while the job proceeds is slow (rounds.py); any other
is undecided.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.stacks.dumps import StackDump, Topology
from rolecall.detector.artifacts.stacks.positions import Stack, StackActivity, shown
from rolecall.detector.artifacts.stacks.processes import DumpedProcess, DumpedRole, Who, group_name, groups_of, roster
from rolecall.detector.artifacts.stacks.rounds import NUM_FLAGS_MIN, NUM_ROUNDS, ROUND_SECONDS, FlagCount, tally
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
NUM_NAMED = 3
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
        return self.finding(suspects, CONFIDENCE_CANNOT_TELL, because, (settles(settle),), FaultClass.CANNOT_TELL)

    def finding(
        self,
        suspects: Sequence[DumpedProcess],
        confidence: float,
        because: str,
        evidence: tuple[Evidence, ...] = (),
        fault_class: FaultClass = FaultClass.HANG,
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
class CommonParallelGroup:
    name: str
    members: tuple[DumpedProcess, ...]


def shared(processes: Sequence[DumpedProcess], outliers: Sequence[DumpedProcess]) -> CommonParallelGroup | None:
    """The smallest group, not all processes, that contains all outliers: node, replica, or parallel group."""
    common = list(groups_of(outliers[0]))
    for process in outliers[1:]:
        its = set(groups_of(process))
        common = [group for group in common if group in its]
    members: dict[object, list[DumpedProcess]] = {group: [] for group in common}
    for process in processes:
        for group in groups_of(process):
            if group in members:
                members[group].append(process)
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
    texts = "; ".join(at_last(p) for p in processes[:NUM_NAMED])
    return texts + (f"; and {len(processes) - NUM_NAMED} more" if len(processes) > NUM_NAMED else "")


def flagged_name(f: FlagCount) -> str:
    return f.name or names_text(f.members)


def rounds_evidence(flag: FlagCount, num_rounds: int) -> Evidence:
    numbers = ", ".join(str(n + 1) for n in flag.rounds[:NUM_NAMES_SHOWN])
    more = f" and {len(flag.rounds) - NUM_NAMES_SHOWN} more" if len(flag.rounds) > NUM_NAMES_SHOWN else ""
    of_it = f" ({len(flag.members)} processes)" if flag.name and len(flag.members) > 1 else ""
    return Evidence(
        kind=ROUNDS,
        text=f"{flagged_name(flag)}{of_it}: flagged in {len(flag.rounds)} of {num_rounds} rounds: {numbers}{more}",
        values={"num_flagged": float(len(flag.rounds)), "num_rounds": float(num_rounds), "chance_ratio": flag.chance},
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


CONFIDENCE_OUTSIDE = 0.8
CONFIDENCE_AT_WORK = 0.6
"""Some rank always arrives last: a process that computes may only be slow."""
CONFIDENCE_ABSENT = 0.6
CONFIDENCE_ELSEWHERE = 0.5
CONFIDENCE_AGAIN = 0.7
"""For a slow process: the same one in most of the rounds."""
STANDS_CHANGE = 0.1
"""An older dump at the same place makes a hang more likely."""

NUM_STANDING_ROUNDS = 3
"""Twenty seconds at one place, without progress of any process."""
LIKELY = 0.5
"""Flags with at least this probability by chance give no finding, not even `cannot_tell`."""

DUMP_AGAIN = (
    "dumps of the same processes some seconds later: a process that is still at the same place, outside of "
    "a wait, is stuck"
)
MORE_ROUNDS = (
    f"{NUM_ROUNDS} rounds of dumps of all processes, {ROUND_SECONDS:g} s apart: a process that blocks the others in "
    f"{NUM_FLAGS_MIN} of them is slow, one that stays at one place is hung"
)
RECORDER = (
    "Flight Recorder dumps, which show the ranks that have not entered a collective; or stacks some seconds later"
)


def diagnose(dumps: Sequence[StackDump], *, topology: Topology | None = None, complete: bool = True) -> list[Finding]:
    """At most one finding per role. Times are file times: the fault was present by the first of them. `complete`: all
    dumps were read; otherwise a process without one is not suspected for that."""
    roles = roster(dumps, topology)
    if not complete:
        roles = [replace(role, processes=tuple(p for p in role.processes if p.stack is not None)) for role in roles]
    found = [_judge(role) for role in roles]
    return [f for f in found if f is not None]


def open_ends(dumps: Sequence[StackDump], *, topology: Topology | None = None) -> list[str]:
    """Why dumps without a finding do not show that the job is healthy, and what would settle it."""
    remarks = []
    for role in roster(dumps, topology):
        of = f"for {role.name}" if role.name else "from these stacks"
        if len(role.processes) == 1:
            remarks.append(f"cannot tell {of}: one process has no peers; dumps of the others would settle it")
        elif len(role.rounds) == 1:
            why = "a job that works and one that hangs as a whole look the same in one round of dumps"
            remarks.append(f"cannot tell {of}: {why}; {NUM_ROUNDS} rounds, {ROUND_SECONDS:g} s apart, would settle it")
    return remarks


def summary(dumps: Sequence[StackDump], *, topology: Topology | None = None) -> str:
    """Describes the input, for an answer without a finding: `trainer: 8 stacks: 8 wait in a collective: all_reduce
    ...`."""
    parts = []
    for role in roster(dumps, topology):
        found = places(role.processes)
        number = sum(len(place.processes) for place in found)
        observed = [f"{len(p.processes)} {finding_text(p.stack, len(p.processes))}" for p in found[:NUM_GROUPS_SHOWN]]
        if len(found) > NUM_GROUPS_SHOWN:
            observed.append(f"{len(found) - NUM_GROUPS_SHOWN} more places")
        which = f", the last of {len(role.rounds)} rounds" if len(role.rounds) > 1 else ""
        stacks = f"{number} stack{'s' if number != 1 else ''}{which}"
        parts.append(f"{role.name or 'no role named'}: {stacks}: {'; '.join(observed)}")
    return ". ".join(parts)


def _judge(role: DumpedRole) -> Finding | None:
    """Decides from the last round; if its outliers are not hung, from all rounds."""
    if len(role.rounds) == 1:
        return _judge_once(role.name, role.processes)
    rounds = [_stood(r) for r in role.rounds]
    outliers = [_outliers(r) for r in rounds]
    last = {p.key for p in outliers[-1]}
    hung = _hanging(role.rounds, outliers)
    now = _judge_once(role.name, [replace(p, moves=p.key not in hung) if p.key in last else p for p in role.processes])
    if now is not None and now.fault_class != FaultClass.CANNOT_TELL:
        stands = [p for p in role.processes if p.key in hung][:NUM_NAMED]
        return replace(now, evidence=(*now.evidence, *(standing_evidence(p, role.rounds) for p in stands)))
    counted = [() if _in_pipeline(r, its) else its for r, its in zip(rounds, outliers, strict=True)]
    again = None if hung else _again(role, counted)
    if again is not None or now is None:
        return again
    # An undecided round of a job that makes progress was a transient state.
    goes_on = not hung and any(p.moves for p in role.processes) and all(p.stack for p in role.processes)
    return None if goes_on else now


def _hanging(rounds: Sequence[Sequence[DumpedProcess]], outliers: Sequence[Sequence[DumpedProcess]]) -> set[Who]:
    """Outliers of the last round that stayed at one place over rounds in which no process left a wait: over
    `NUM_STANDING_ROUNDS`, or over two if they were not outliers for longer. Otherwise the job makes progress."""
    seen = [{p.key: p for p in round_} for round_ in rounds]
    flagged = [{p.key for p in some} for some in outliers]
    begin = 0  # first of the rounds in which no process left a wait
    waits: dict[Who, tuple[int, Stack]] = {}
    for number, round_ in enumerate(seen):
        for key, process in round_.items():
            waited = waits.pop(key, None)
            if waited is not None and process.stack is not None and waited[1].key != process.stack.key:
                begin = max(begin, waited[0] + 1)
            if process.stack is not None and process.stack.waits:
                waits[key] = number, process.stack
    found = set()
    for key in flagged[-1]:
        its = [number for number, round_ in enumerate(seen) if key in round_]
        since = next(number for number in its if key in flagged[number])
        stood = [its[-1]]
        for number, later in zip(its[-2::-1], its[:0:-1], strict=True):
            if number < begin or seen[later][key].moves is not False:
                break
            stood.append(number)
        if len(stood) >= NUM_STANDING_ROUNDS or (len(stood) > 1 and since >= stood[-1]):
            found.add(key)
    return found


def _stood(processes: Sequence[DumpedProcess]) -> Sequence[DumpedProcess]:
    """Marks a majority at one place in two snapshots as waiting: Python does not show some waits, such as reading a
    value from a GPU whose peers have not arrived. In a single snapshot it could be common work."""
    found = places(processes)
    if not found:
        return processes
    top = found[0]
    if top.stack.waits or 2 * len(top.processes) <= sum(len(place.processes) for place in found):
        return processes
    if any(p.moves is not False for p in top.processes):
        return processes
    return [
        replace(p, stack=replace(p.stack, doing=StackActivity.STOOD)) if p.stack and p.stack.key == top.stack.key else p
        for p in processes
    ]


def _outliers(processes: Sequence[DumpedProcess]) -> tuple[DumpedProcess, ...]:
    """Outliers of one round: processes that do not wait, if at least as many wait; if all wait, those outside the
    majority's place."""
    waiting = [p for p in processes if p.stack is not None and p.stack.waits]
    outside = [p for p in processes if p.stack is not None and not p.stack.waits]
    if len(outside) > len(waiting):
        return ()
    if outside:
        return tuple(outside)
    top, *rest = places(waiting)
    others = tuple(p for place in rest for p in place.processes)
    return others if _most(top, others) else ()


def _in_pipeline(processes: Sequence[DumpedProcess], outside: Sequence[DumpedProcess]) -> bool:
    """Whether most waits are for a pipeline neighbour and the others compute, as in a healthy pipeline."""
    waits = [p.stack.doing == StackActivity.PIPELINE for p in processes if p.stack is not None and p.stack.waits]
    at_work = all(p.stack is not None and p.stack.doing == StackActivity.WORK for p in outside)
    return bool(outside) and at_work and 2 * sum(waits) > len(waits)


def _most(top: StackCluster, others: Sequence[DumpedProcess]) -> bool:
    """Whether a majority waits at one place that involves all ranks."""
    return len(top.processes) > len(others) and top.stack.doing != StackActivity.PIPELINE


def _judge_once(role: str, processes: Sequence[DumpedProcess]) -> Finding | None:
    processes = _stood(processes)
    waiting = [p for p in processes if p.stack is not None and p.stack.waits]
    outside = [p for p in processes if p.stack is not None and not p.stack.waits]
    absent = [p for p in processes if p.stack is None]
    if not waiting or len(outside) > len(waiting):
        return None  # most compute: the early ranks wait, which gives no suspect
    case = StackAnalysis(role, tuple(processes), tuple(places(processes)))
    if len(processes) == 1:
        because = f"{at_last(processes[0])}; there is no dump of another process"
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
        waiting, f"all {case.who} {finding_text(case.places[0].stack, 0)}, now as in older dumps", RECORDER
    )


def _late(
    case: StackAnalysis, waiting: list[DumpedProcess], outside: list[DumpedProcess], absent: list[DumpedProcess]
) -> Finding:
    """Some processes do not wait for others: these are the cause, except those that make progress."""
    observed = f"{len(waiting)} of {case.who} wait for others"
    if len(outside) == len(waiting):
        return case.cannot_tell(
            outside, f"{observed}, {names_text(outside)} {'does' if len(outside) == 1 else 'do'} not", DUMP_AGAIN
        )
    largest = next(place for place in case.places if place.stack.waits)
    moving = [p for p in outside if p.moves is True]
    if len(moving) == len(outside):
        because = f"{observed} ({largest.stack.at}), but those that do not are moving: {all_at_last(outside)}"
        return case.cannot_tell(outside, because, MORE_ROUNDS)
    outside = [p for p in outside if p.moves is not True]
    stuck = any(p.moves is False for p in outside)
    if _in_pipeline(case.processes, outside) and not stuck:
        because = (
            f"{observed}, most of them in a pipeline, while {names_text(outside)} compute, as in a healthy pipeline"
        )
        return case.cannot_tell(outside, because, DUMP_AGAIN)
    at_work = {p.key for p in outside if p.stack is not None and p.stack.doing == StackActivity.WORK}
    outside.sort(key=lambda p: p.key in at_work)
    confidence = CONFIDENCE_AT_WORK if len(at_work) == len(outside) or absent else CONFIDENCE_OUTSIDE
    confidence += STANDS_CHANGE * stuck
    because = f"{observed} ({largest.stack.at}); {all_at_last(outside)}"
    if len(outside) > 1 and (group := shared(case.processes, outside)):
        because += f". All of them are in {group.name}"
    if moving:
        because += f". Of the others that do not wait, an older dump shows that they move: {names_text(moving)}"
    if absent:
        because += f". There is no dump of {names_text(absent)}"
    held = [(p.name, p.stack.gil_holder) for p in outside if p.stack is not None and p.stack.gil_holder]
    texts = [f"{name}: another thread holds the GIL: {holder}" for name, holder in held[:NUM_GROUPS_SHOWN]]
    return case.finding(outside, confidence, because, tuple(Evidence(kind="gil", text=text) for text in texts))


def _absent(case: StackAnalysis, waiting: list[DumpedProcess], absent: list[DumpedProcess]) -> Finding:
    """All processes with a dump wait, and some have none: a stopped or dead process gives no dump."""
    observed = f"all {case.who} that have a dump wait for others ({case.places[0].stack.at})"
    if len(absent) >= len(waiting):
        because = f"{observed}, and {len(absent)} have none: {names_text(absent)}"
        return case.cannot_tell(absent, because, "dumps of the other processes")
    if all(p.moves is True for p in waiting):
        because = f"{observed}, where they were not in the round before, and there is no dump of {names_text(absent)}"
        return case.cannot_tell(absent, because, f"{DUMP_AGAIN}; a dump of {names_text(absent)}")
    because = f"{observed}, and there is no dump of {names_text(absent)}: stopped or dead processes give none"
    if len(absent) > 1 and (group := shared(case.processes, absent)):
        because += f". All of them are in {group.name}"
    return case.finding(absent, CONFIDENCE_ABSENT, because)


def _elsewhere(case: StackAnalysis) -> Finding:
    """All wait, but not at the same place."""
    top, *rest = case.places
    others = [p for place in rest for p in place.processes]
    observed = "; ".join(
        f"{len(place.processes)} {finding_text(place.stack, len(place.processes))}" for place in case.places[:3]
    )
    if not _most(top, others):
        because = f"all {case.who} wait for others, and no collective holds a majority of them: {observed}"
        return case.cannot_tell(others, because, RECORDER)
    because = f"all {case.who} wait for others, most of them in one place: {observed}"
    if all(p.moves is True for p in others):
        return case.cannot_tell(others, f"{because}. Those elsewhere move: {names_text(others)}", MORE_ROUNDS)
    group = shared(case.processes, others) if len(others) > 1 else None
    if group is None:
        return case.finding(others, CONFIDENCE_ELSEWHERE, f"{because}. Elsewhere: {names_text(others)}")
    # Ranks that wait indirectly are in larger groups: the smallest group is the nearest to the cause.
    alone = len(rest) == 1 or len(rest[-1].processes) < len(rest[-2].processes)
    first = rest[-1].processes if alone else ()
    words, members, evidence = as_a_whole(group, first)
    return case.finding(members, CONFIDENCE_ELSEWHERE, f"{because}. Those elsewhere are in {words}", (evidence,))


def _again(role: DumpedRole, outliers: Sequence[Sequence[DumpedProcess]]) -> Finding | None:
    """The same processes, or the same group, block the others in many rounds, and make progress: slow."""
    found = tally(outliers, role.processes)
    if found is None:
        return None
    suspected = [p for f in found.best for p in f.members]
    flagged, num_flags = sorted({n for f in found.best for n in f.rounds}), len(found.best[0].rounds)
    by_chance = num_flags < 2 or found.best[0].chance > LIKELY
    num_flagging = sum(map(bool, outliers))
    if not found.named and by_chance and (not outliers[-1] or num_flagging > 2):
        return None  # a single round that is already over, or different outliers each time: chance
    last = role.rounds[flagged[-1]]
    case = StackAnalysis(role.name, tuple(last), tuple(places(_stood(last))))
    suspect_keys = {p.key for p in suspected}
    seen = [p for n in flagged for p in outliers[n] if p.key in suspect_keys]
    often = Counter(p.key for p in seen)
    num = f"{num_flags} of {len(role.rounds)} rounds of stacks"
    names = flagged_name(found.best[0])
    evidence = tuple(rounds_evidence(f, len(role.rounds)) for f in found.flagged[:NUM_GROUPS_SHOWN])
    if not found.named:
        because = f"the others wait for {names} in {num}: slow, or late by chance"
        if len(found.best) > 1:
            tied = " or ".join(flagged_name(f) for f in found.best[:NUM_NAMES_SHOWN])
            because = f"the others wait for {tied}, for each in {num}: a tie"
        seldom = [p for p in suspected if often[p.key]]
        finding = case.cannot_tell(seldom, because, MORE_ROUNDS)
    elif all(p.stack is not None and p.stack.waits for p in seen):
        group = CommonParallelGroup(names, tuple(suspected))
        first = [p for p in suspected if often[p.key] == max(often.values())]
        words, members, whole = as_a_whole(group, first if len(first) < len(suspected) else ())
        because = f"all wait for others, in {num} most of them at one place and those elsewhere in {words}"
        finding = case.finding(members, CONFIDENCE_ELSEWHERE, because, (whole,), FaultClass.SLOW)
    else:
        suspected = sorted((p for p in suspected if often[p.key]), key=lambda p: -often[p.key])
        at = [p for p in outliers[flagged[-1]] if p.key in often]
        because = (
            f"the others wait for {names} in {num}, and make progress in between: slow, not hung. Last seen: "
            f"{all_at_last(at)}"
        )
        finding = case.finding(suspected, CONFIDENCE_AGAIN, because, (), FaultClass.SLOW)
    times = [p.at for n in flagged for p in role.rounds[n]], [p.at for p in role.rounds[-1]]
    return replace(finding, onset=min(times[0]), detected_at=max(times[1]), evidence=(*finding.evidence, *evidence))
