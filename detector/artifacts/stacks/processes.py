"""Groups dumps into the processes of each role, and repeated dumps into rounds.

Dumps belong to one process when they have the same replica and rank, else the same node and pid (and a similar file
name: in containers many have pid 1). Dumps of an earlier process in its place, by pid or incarnation, are ignored.

Repeated dumps form rounds: those in the names (`round_2/rank_3.json`) if all have one and no process is twice in one;
else the n-th dump of each process, if all have equally many; else they are split at the widest gaps in time. If that
puts a process into a round twice, or rounds overlap, there are no rounds, only older dumps. A round counts if it has
more than half of the processes and the next one follows soon enough.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import PurePath

from rolecall.core.diagnosis import Suspect
from rolecall.core.ids import NodeId, role_of
from rolecall.core.text import node_text
from rolecall.detector.artifacts.stacks.dumps import WORLD_SIZE_MAX, StackDump, Topology
from rolecall.detector.artifacts.stacks.positions import Stack, stack_of

STORY_SECONDS_MAX = 600.0
"""Rounds further apart do not belong together: an older position is no evidence of a hang."""
ROUNDS_APART_SECONDS_MIN = 1.0
"""Closer dumps of one process were copied without their times: they are ordered by name."""

Who = tuple[object, ...]
Group = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedProcess:
    """One process of a role in one round. `key` identifies it in all rounds. `stack`: None if it was not dumped.
    `moves`: whether the previous dump is at another place."""

    key: Who
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
        """For text: `trainer/1 rank 3 (node m07)`; the file, if the dump does not identify its process."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        who = " ".join(w for w in (self.replica or (self.role if rank else ""), rank) if w) or self.label
        return f"{who} ({node_text(self.node)})" if self.node else who

    @property
    def suspect(self) -> Suspect:
        """If the node is unknown, the process stands for it: two processes are never taken for one machine."""
        return Suspect(
            node=NodeId(self.node or self.name.replace(" ", "-")),
            role=self.role,
            replica=self.replica,
            rank=self.rank,
            incarnation=self.incarnation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRole:
    """`processes`: the newest state of each, then expected ones without a current dump. `rounds`: the processes of each
    round that counts, oldest first; at least one."""

    name: str
    processes: tuple[DumpedProcess, ...]
    rounds: tuple[tuple[DumpedProcess, ...], ...]


def roster(dumps: Sequence[StackDump], topology: Topology | None = None) -> list[DumpedRole]:
    """Sorted by name."""
    ranks_of_pids: dict[int, list[int]] = {}
    for rank, pid in (topology.pids if topology else {}).items():
        ranks_of_pids.setdefault(pid, []).append(rank)
    by_role: dict[str, list[StackDump]] = {}
    for dump in sorted(dumps, key=lambda d: _natural(d.path)):
        dump = _completed(dump, topology, ranks_of_pids)
        by_role.setdefault(dump.role, []).append(dump)
    return [_role(name, by_role[name], topology) for name in sorted(by_role)]


def _completed(dump: StackDump, topology: Topology | None, ranks_of_pids: Mapping[int, Sequence[int]]) -> StackDump:
    """Adds data of its rank from the topology; values of the dump take precedence."""
    if topology is None or (dump.role and topology.role and dump.role != topology.role):
        return dump
    rank = dump.rank
    if rank is None and dump.pid is not None:
        its = ranks_of_pids.get(dump.pid, ())
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
        role=dump.role or topology.role or role_of(replica),
        axes=dump.axes or topology.axes(rank),
    )


def _role(name: str, dumps: Sequence[StackDump], topology: Topology | None) -> DumpedRole:
    history = _dump_rounds(dumps)
    known = topology if topology is not None and topology.role in ("", name) else Topology()
    groups: dict[int | None, list[str]] = {}
    for group in known.groups:
        for rank in group.ranks:
            groups.setdefault(rank, []).append(f"{group.axis} {group.index}")

    def grouped(processes: Iterable[DumpedProcess]) -> tuple[DumpedProcess, ...]:
        ordered = sorted(processes, key=lambda p: (p.stack is None, p.rank is None, p.rank or 0, p.replica, p.label))
        return tuple(replace(p, groups=tuple(groups.get(p.rank, ()))) for p in ordered) if groups else tuple(ordered)

    rounds = _counted(_rounds(history), history)
    now = [_process(name, who, its) for who, its in history.items()]
    if len(rounds) > 1:
        since = min(history[who][n][0].at for who, n in rounds[-1].items())
        # A process that was dumped only in earlier rounds has no current dump.
        now = [p if p.key in rounds[-1] or p.at >= since else replace(p, stack=None, moves=None) for p in now]
    size = max(known.world_size or 0, *(d.world_size or 0 for d in dumps))
    made = [grouped(_process(name, who, history[who][: n + 1]) for who, n in r.items()) for r in rounds]
    missing = () if any(d.one_of_some for d in dumps) else _never_dumped(name, now, size, known)
    present = grouped([*now, *missing])
    return DumpedRole(name=name, processes=present, rounds=tuple(made) or (tuple(p for p in present if p.stack),))


def _never_dumped(role: str, dumped: Sequence[DumpedProcess], size: int, known: Topology) -> list[DumpedProcess]:
    """Expected ranks, at least `size`, without any dump."""
    ranks = {p.rank for p in dumped if p.rank is not None}
    if len(ranks) < len(dumped) or max(ranks) >= WORLD_SIZE_MAX:
        return []  # some ranks are unknown, or numbered per replica: the missing ones cannot be identified
    return [
        DumpedProcess(
            key=("", rank),
            role=role,
            rank=rank,
            node=known.nodes.get(rank, ""),
            replica=known.replicas.get(rank, ""),
            axes=known.axes(rank),
        )
        for rank in sorted(set(range(max(max(ranks) + 1, size))) - ranks)
    ]


def _process(role: str, who: Who, its: Sequence[tuple[StackDump, Stack]]) -> DumpedProcess:
    """One process from its dumps so far, oldest first."""
    dump, stack = its[-1]
    moves = None
    if len(its) > 1:
        older, before = its[-2]
        moves = before.key != stack.key
        if moves and dump.at - older.at > STORY_SECONDS_MAX:
            moves = None
    return DumpedProcess(
        key=who,
        role=role,
        node=dump.node,
        replica=dump.replica,
        rank=dump.rank,
        incarnation=dump.incarnation,
        axes=dump.axes,
        label=f"pid {dump.pid}" if dump.pid is not None else dump.path,
        at=dump.at,
        stack=stack,
        moves=moves,
    )


def _dump_rounds(dumps: Sequence[StackDump]) -> dict[Who, list[tuple[StackDump, Stack]]]:
    """The dumps of each process, oldest first, each with its place."""
    found: dict[Who, list[StackDump]] = {}
    for dump in dumps:
        found.setdefault(_who(dump), []).append(dump)
    history = {}
    for who, its in found.items():
        ordered = _ordered(its)
        last = ordered[-1]
        history[who] = [  # without dumps of an earlier process in the same place
            (d, stack_of(d))
            for d in ordered
            if (last.pid is None or d.pid in (None, last.pid))
            and (last.incarnation is None or d.incarnation in (None, last.incarnation))
        ]
    return history


def _who(dump: StackDump) -> Who:
    if dump.rank is not None:
        return dump.replica, dump.rank
    if dump.pid is not None and (dump.node or dump.replica):
        return dump.replica, dump.node, dump.pid, re.sub(r"\d+", "", PurePath(dump.path).stem)
    if dump.pid is not None and dump.series and dump.round_index is not None:
        return dump.series, dump.pid
    return (dump.path,)


def _ordered(dumps: Sequence[StackDump]) -> list[StackDump]:
    """Oldest first, without duplicates."""
    if len(dumps) == 1:
        return list(dumps)
    once: list[StackDump] = []
    for dump in sorted(dumps, key=lambda d: (d.at, _natural(d.path))):
        last = once[-1] if once else None
        if not (last and (last.at, last.round_index, last.threads) == (dump.at, dump.round_index, dump.threads)):
            once.append(dump)
    numbers = {d.round_index for d in once}
    if None not in numbers and len(numbers) == len(once):
        return sorted(once, key=lambda d: d.round_index or 0)
    if once[-1].at - once[0].at < ROUNDS_APART_SECONDS_MIN:
        return sorted(once, key=lambda d: _natural(d.path))
    return once


def _natural(path: str) -> list[tuple[int, str]]:
    """`rank_3.10` after `rank_3.9`."""
    return [(int(part[:18]), part) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", path)]


Round = dict[Who, int]
"""Processes dumped in the round, with the index of each one's dump."""


def _rounds(history: Mapping[Who, Sequence[tuple[StackDump, Stack]]]) -> list[Round]:
    """Oldest first; none if a process would be twice in one, or if rounds overlap in time."""
    dumps = {who: [dump for dump, _ in its] for who, its in history.items()}
    most = max(len(its) for its in dumps.values())
    numbers = {who: {d.round_index for d in its} for who, its in dumps.items()}
    numbered = all(None not in numbers[who] and len(numbers[who]) == len(its) for who, its in dumps.items())
    # More distinct numbers than possible rounds are times, or count something else.
    numbered = numbered and 1 < most and len(set().union(*numbers.values())) < 2 * most
    times = sorted(d.at for its in dumps.values() for d in its)
    widest = sorted(range(1, len(times)), key=lambda number: times[number] - times[number - 1])[len(times) - most :]
    starts = sorted(times[number] for number in widest)
    found: dict[int, Round] = {}
    for who, its in dumps.items():
        for number, dump in enumerate(its):
            if numbered:
                label = dump.round_index or 0
            else:
                label = number if len(numbers) * most == len(times) else bisect_right(starts, dump.at)
            if who in found.setdefault(label, {}):
                return []
            found[label][who] = number
    rounds = [found[label] for label in sorted(found)]
    spans = [[dumps[who][number].at for who, number in r.items()] for r in rounds]
    overlap = any(max(before) >= min(after) for before, after in pairwise(spans))
    if not numbered and overlap and times[-1] - times[0] >= ROUNDS_APART_SECONDS_MIN:
        return []  # one process after the other, each several times: not simultaneous
    return rounds


def _counted(rounds: Sequence[Round], history: Mapping[Who, Sequence[tuple[StackDump, Stack]]]) -> list[Round]:
    """The newest rounds without a long pause that show more than half of the processes."""
    found: list[Round] = []
    next_at = math.inf
    for round_ in reversed([r for r in rounds if 2 * len(r) > len(history)]):
        times = [history[who][n][0].at for who, n in round_.items()]
        if found and next_at - max(times) > STORY_SECONDS_MAX:
            break
        found.append(round_)
        next_at = min(times)
    return found[::-1]


def groups_of(process: DumpedProcess) -> Iterator[Group]:
    """Its node, replica and listed groups, and the groups of a regular grid that share some of its coordinates."""
    if process.node:
        yield "node", process.node
    if process.replica:
        yield "replica", process.replica
    for listed in process.groups:
        yield "", listed
    for number in range(len(process.axes), 0, -1):
        for fixed in combinations(process.axes, number):
            yield "grid", tuple(axis for axis, _ in process.axes), fixed


def group_name(group: Group) -> str:
    """`node m07`, `pp 3`, `the tp x pp group of dp 3`: the axes on which its members differ span it."""
    kind, of = str(group[0]), group[1]
    if kind != "grid":
        return f"{kind} {of}".strip()
    axes, fixed = group[1], group[2]
    assert isinstance(axes, tuple) and isinstance(fixed, tuple)
    where = ", ".join(f"{axis} {index}" for axis, index in fixed)
    spanned = " x ".join(axis for axis in axes if axis not in dict(fixed))
    return f"the {spanned} group of {where}" if spanned else f"the group of {where}"
