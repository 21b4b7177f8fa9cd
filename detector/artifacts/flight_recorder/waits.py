"""The waits of a job and their root causes, from its Flight Recorder dumps.

First the progress of each rank in each process group, and in each pair of `send` and `recv`. The newest dump of each
rank in a folder counts; dumps of one rank in several folders are not judged (`mixed_jobs`). Members without a dump are
known if dumps list the ranks of the group. gloo groups list none, so only the gloo group of all ranks has known
members.

Then waits are followed to their root causes, in the order that diagnosis.py states: ranks that entered a different
operation than the others (or the same with other sizes or dtypes), ranks that have not entered it, and so on.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from rolecall.core.diagnosis import Suspect
from rolecall.core.text import node_text
from rolecall.detector.artifacts.flight_recorder.dumps import FlightRecorderDump
from rolecall.detector.artifacts.flight_recorder.entries import Entries, FlightRecorderOperation, Rows
from rolecall.detector.artifacts.stacks.dumps import Topology
from rolecall.detector.base.plain_pickle import safe

NUM_PARTS = 6
"""Maximum number of ranks and ranges in a sentence."""


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        p for a, b in runs for p in ([(f"{a}-{b}", b - a + 1)] if b > a + 1 else [(str(r), 1) for r in range(a, b + 1)])
    ]
    words = [text for text, _ in parts[:NUM_PARTS]]
    if more := sum(num for _, num in parts[NUM_PARTS:]):
        words.append(f"{more} more")
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"rank{'s' if len(ordered) != 1 else ''} {listed}"


WAIT_SECONDS_MIN = 1.0
"""Dumps of a healthy job are not simultaneous: an operation enqueued just before the dump does not count as waiting."""
DEFAULT_DESC = "default_pg"

Key = tuple[str, int, int, int]
"""Of a synchronization point: group name, index of its list of ranks (groups may share a name), and source and
destination of a pair (-1 for a group)."""


class Cause(StrEnum):
    """Root cause of a chain of waits."""

    OUTSIDE = "host_side"
    NO_DUMP = "no_dump"
    MISMATCH = "mismatch"
    ELSEWHERE = "other_collective"
    BEHIND = "gpu_side"
    AHEAD = "ahead"
    INSIDE = "all_inside"


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one rank: sequence numbers. `since`: creation of the operation that it waits for; None: unknown."""

    enqueued: int
    started: int
    completed: int
    since: float | None = None
    waits: bool = False


@dataclass(slots=True, eq=False)
class SynchronizationPoint:
    """A group, or a pair of `send` and `recv`: its members, the progress of each, and the cause of a wait."""

    key: Key
    desc: str
    members: tuple[int, ...]
    members_known: bool
    seats: dict[int, RankProgress] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    frontier: int = 0
    cause: Cause | None = None
    culprits: tuple[int, ...] = ()
    detail: str = ""

    @property
    def waiting(self) -> list[int]:
        return [r for r, s in self.seats.items() if s.waits]

    @property
    def since(self) -> float | None:
        """When the wait began: creation of the oldest operation that one of its ranks waits for."""
        return min((s.since for s in self.seats.values() if s.waits and s.since is not None), default=None)

    @property
    def inside(self) -> list[int]:
        return [r for r, s in self.seats.items() if s.enqueued >= self.frontier > s.completed]

    @property
    def late(self) -> list[int]:
        return [r for r, s in self.seats.items() if s.enqueued < self.frontier]

    @property
    def name(self) -> str:
        name, _, source, destination = self.key
        pair = f", rank {source} to {destination}" if source >= 0 else ""
        desc = f" ({self.desc})" if self.desc and self.desc != "undefined" else ""
        return f"{f'group {name}' if name else 'a group without a name'}{desc}{pair}"


@dataclass(slots=True)
class RankLists:
    """Numbers the lists of ranks of all groups. Thousands of dumps share a few objects with thousands of ranks each;
    comparing them every time would dominate the run time."""

    by_object: dict[int, int] = field(default_factory=dict)
    by_value: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, ranks: tuple[int, ...]) -> int:
        found = self.by_object.get(id(ranks))
        if found is None:
            found = self.by_object[id(ranks)] = self.by_value.setdefault(ranks, len(self.by_value))
        return found


@dataclass(slots=True)
class Job:
    """The newest dump of each rank, and the ranks without one."""

    dumps: dict[int, FlightRecorderDump]
    world: tuple[int, ...]
    absent: tuple[int, ...]
    nodes: dict[int, str]
    newest_at: float  # wall seconds of the newest recorded operation; 0: none was read
    ranks: RankLists
    topology: Topology
    places: dict[Key, SynchronizationPoint] = field(default_factory=dict)
    index: dict[tuple[int, Key], int] = field(default_factory=dict)  # index of the group in the rank's dump
    unread: set[int] = field(default_factory=set)  # ranks whose entries are needed for a decision

    def suspects(self, ranks: Iterable[int]) -> tuple[Suspect, ...]:
        """If the node of a rank is unknown, the rank stands for it: two ranks are never taken for one machine."""
        return tuple(self.topology.suspect(r, self.nodes.get(r, f"rank-{r}")) for r in sorted(ranks))

    def who(self, ranks: Sequence[int]) -> str:
        """For text: `rank 3 of trainer/1 (node m07)`, `ranks 0-3 (node m01)`; only known parts that all ranks share."""
        suspects = self.suspects(ranks)
        replicas = {s.replica or s.role for s in suspects}
        nodes = {self.nodes.get(s.rank, "") for s in suspects if s.rank is not None}
        of = f" of {replicas.pop()}" if len(replicas) == 1 and "" not in replicas else ""
        at = f" ({node_text(nodes.pop())})" if len(nodes) == 1 and "" not in nodes else ""
        return f"{ranks_text(ranks)}{of}{at}"


def mixed_jobs(dumps: Sequence[FlightRecorderDump]) -> str:
    """Why these dumps cannot be judged together; empty if they can. Each node may have a folder of its own, but one
    rank in several folders is of several jobs, or of several moments."""
    folders: dict[int, set[str]] = defaultdict(set)
    for dump in dumps:
        folders[dump.rank].add(os.path.dirname(dump.path))
    several = {rank: names for rank, names in folders.items() if len(names) > 1}
    if not several:
        return ""
    names = sorted(set().union(*several.values()))
    more = f" and {len(names) - NUM_PARTS} more" if len(names) > NUM_PARTS else ""
    return (
        f"cannot tell: {ranks_text(several)} {'has' if len(several) == 1 else 'have'} dumps in several folders, so of "
        f"different jobs or moments: {', '.join(safe(name or '.') for name in names[:NUM_PARTS])}{more}; "
        "name only the folders of one job and moment"
    )


def gathered(dumps: Sequence[FlightRecorderDump], world_size: int | None, topology: Topology | None = None) -> Job:
    newest: dict[int, FlightRecorderDump] = {}
    for dump in sorted(dumps, key=lambda d: (d.written_at, d.path)):
        newest[dump.rank] = dump
    newest = dict(sorted(newest.items()))
    ranks = RankLists()
    for group in (g for d in newest.values() for g in d.groups):
        ranks.number(group.ranks)
    listed = {r for known in ranks.by_value for r in known}
    world = listed | set(newest) | set(range(world_size if world_size is not None else max(newest) + 1))
    created = [float(d.entries.created_at.max()) for d in newest.values() if d.entries is not None and len(d.entries)]
    job = Job(
        dumps=newest,
        world=tuple(sorted(world)),
        absent=tuple(sorted(world - set(newest))),
        nodes={**_nodes(newest), **(topology.nodes if topology else {})},
        newest_at=max(created, default=0.0),
        ranks=ranks,
        topology=topology or Topology(),
    )
    paired = {
        (g.name, ranks.number(g.ranks))
        for d in newest.values()
        if d.entries is not None
        for i in _p2p_groups(d.entries)
        for g in (d.groups[i],)
    }
    for rank, dump in newest.items():
        _take_seats(job, rank, dump, paired)
    for place in job.places.values():
        _complete(job, place, paired)
    return job


def _nodes(dumps: dict[int, FlightRecorderDump]) -> dict[int, str]:
    """Node by rank, from the file names, else from the folder names, if they differ: one name for all ranks identifies
    no machine. A rank between two ranks of one machine is on that machine, too."""
    for names in ({r: d.host for r, d in dumps.items()}, {r: d.folder for r, d in dumps.items()}):
        if len(set(names.values())) > 1 and all(names.values()):
            between = dict(names)
            known = sorted(names)
            for left, right in pairwise(known):
                if names[left] == names[right]:
                    between.update(dict.fromkeys(range(left + 1, right), names[left]))
            return between
    return {}


def _p2p_groups(entries: Entries) -> list[int]:
    p2p = np.array([o.is_p2p for o in entries.operations], dtype=bool)
    return [int(g) for g in np.unique(entries.group[p2p[entries.operation]])] if p2p.any() else []


def _take_seats(job: Job, rank: int, dump: FlightRecorderDump, paired: set[tuple[str, int]]) -> None:
    entries = dump.entries
    collectives, pairs = _rows_by_group(entries) if entries is not None else ({}, {})
    for i, group in enumerate(dump.groups):
        place = _place(job, (group.name, job.ranks.number(group.ranks), -1, -1), group.desc, group.ranks)
        job.index[rank, place.key] = i
        seat = None
        if entries is not None:
            if i in collectives:
                seat = _collective_seat(entries, collectives[i], dump.written_at)
            if i in pairs:
                _take_pairs(job, rank, dump, entries, pairs[i], i)
        status = dump.status.get(i)
        if seat is None and status is not None and group.ranks and place.key[:2] not in paired:
            # The status also counts point-to-point operations, so it is ambiguous for groups that have any. gloo
            # records no entries for these, but its groups list no ranks and are excluded anyway.
            done = max(0, status.completed)
            seat = RankProgress(max(0, status.enqueued), max(0, status.started), done, None, status.enqueued > done)
        if seat is not None:
            place.seats[rank] = seat
    if entries is None and not dump.status:
        job.unread.add(rank)


def _rows_by_group(entries: Entries) -> tuple[dict[int, Rows], dict[int, Rows]]:
    """Rows of the collectives, and rows of the point-to-point operations, by group."""
    p2p = np.array([o.is_p2p for o in entries.operations], dtype=bool)[entries.operation]
    split: tuple[dict[int, Rows], dict[int, Rows]] = ({}, {})
    for of_kind, kind in zip(split, (~p2p, p2p), strict=True):
        rows = np.flatnonzero(kind)
        rows = rows[np.argsort(entries.group[rows], kind="stable")]
        groups, first = np.unique(entries.group[rows], return_index=True)
        of_kind.update(zip(groups.tolist(), np.split(rows, first[1:]), strict=True) if len(rows) else ())
    return split


def _place(job: Job, key: Key, desc: str, members: tuple[int, ...]) -> SynchronizationPoint:
    found = job.places.get(key)
    if found is None:
        found = job.places[key] = SynchronizationPoint(key, desc, members, bool(members))
    return found


def _collective_seat(entries: Entries, rows: Rows, written_at: float) -> RankProgress:
    seqs = entries.seq[rows]
    enqueued = int(seqs.max())
    pending = rows[~entries.done[rows]]
    if not len(pending):
        return RankProgress(enqueued, enqueued, enqueued)
    first = int(entries.seq[pending].min())
    started = seqs[entries.started[rows]]
    since = float(entries.created_at[pending[entries.seq[pending] == first]].min())
    return RankProgress(
        enqueued, int(started.max()) if len(started) else 0, first - 1, since, _has_waited(since, written_at)
    )


def _has_waited(since: float, written_at: float) -> bool:
    """The file's time only rules out a wait that began just before the dump. If the file is older than its entries, the
    clocks differ and time is ignored."""
    return not 0 <= written_at - since < WAIT_SECONDS_MIN


def _take_pairs(job: Job, rank: int, dump: FlightRecorderDump, entries: Entries, mine: Rows, group: int) -> None:
    """`send` and `recv` of two ranks match in order: the n-th of one with the n-th of the other. They are counted from
    the start of the job or, if the ring lost that, among the pending operations."""
    about = dump.groups[group]
    pair_of: dict[int, tuple[int, int]] = {}
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, operation in zip(mine.tolist(), entries.operation[mine].tolist(), strict=True):
        pair = pair_of.get(operation)
        if pair is None:
            pair = pair_of[operation] = peers_of(entries.operations[operation], about.ranks)
        if rank in pair and min(pair) >= 0 and pair[0] != pair[1]:
            rows_of[pair].append(row)
    for pair, rows in rows_of.items():
        place = _place(job, (about.name, job.ranks.number(about.ranks), *pair), about.desc, pair)
        job.index[rank, place.key] = group
        pending = [row for row in rows if not entries.done[row]]
        since = float(entries.created_at[pending[0]]) if pending else None
        waits = since is not None and _has_waited(since, dump.written_at)
        place.seats[rank] = RankProgress(len(rows), 0, len(rows) - len(pending), since, waits)


def peers_of(operation: FlightRecorderOperation, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Global ranks of source and destination; ranks in the group if its list is unknown. -1: none."""
    places = (operation.source, operation.destination)
    if not ranks:
        return places
    source, destination = (ranks[p] if 0 <= p < len(ranks) else -1 for p in places)
    return source, destination


def _complete(job: Job, place: SynchronizationPoint, paired: set[tuple[str, int]]) -> None:
    """Adds the members without a recorded operation or without a dump, and sets the frontier."""
    if not place.members_known:
        whole_job = place.desc == DEFAULT_DESC
        place.members = job.world if whole_job else tuple(sorted(place.seats))
        place.members_known = whole_job
    # Only ranks with a dump are visited: a hostile dump may list thousands of groups of all ranks.
    of_all = place.members is job.world
    place.absent = job.absent if of_all else tuple(r for r in place.members if r not in job.dumps)
    is_pair = place.key[2] >= 0
    for rank in job.dumps if of_all else place.members:
        dump = job.dumps.get(rank)
        if dump is None or rank in place.seats:
            continue
        if dump.entries is None:
            # An empty status means no operation, if it was readable; with pairs it never is.
            if is_pair or place.key[:2] in paired or not dump.status:
                job.unread.add(rank)
                continue
        elif dump.entries.first_record > 0 and not dump.status and not is_pair:
            continue  # the ring may have lost its operations here
        place.seats[rank] = RankProgress(0, 0, 0)
    if is_pair and any((its := job.dumps[r].entries) is None or its.first_record > 0 for r in place.seats):
        place.seats = {
            r: RankProgress(s.enqueued - s.completed, 0, 0, s.since, s.waits) for r, s in place.seats.items()
        }
    place.frontier = min((place.seats[r].completed for r in place.waiting), default=-1) + 1


def operations_at(job: Job, rank: int, key: Key, seq: int) -> list[FlightRecorderOperation]:
    entries, group = job.dumps[rank].entries, job.index.get((rank, key))
    if entries is None or group is None:
        return []
    rows = np.flatnonzero((entries.group == group) & (entries.seq == seq))
    operations = [entries.operations[entries.operation[row]] for row in rows]
    return [o for o in operations if not o.is_p2p]


NUM_EARLIER_MAX = 200
"""Number of previous operations of a group that are searched for a skipped operation."""
_NO_INPUTS = ("scatter", "all_to_all", "alltoall", "coalesced")
_NO_OUTPUTS = ("gather", "reduce", "_reduce_oop", "all_to_all", "alltoall", "coalesced")
_UNEVEN = ("_v", "_v_single", "_coalesced")
"""Operations in which ranks may differ: the root has other tensors, or sizes vary by rank."""

Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[str, ...]]


def mismatch(job: Job, place: SynchronizationPoint) -> tuple[tuple[int, ...], str]:
    """Ranks that differ from the majority at the frontier (all ranks without a majority), and a text with both
    sides."""
    if place.key[2] >= 0:
        return _pair_mismatch(job, place)
    entered: dict[int, tuple[Signature, ...]] = {}
    for rank, seat in place.seats.items():
        if seat.enqueued >= place.frontier:
            operations = operations_at(job, rank, place.key, place.frontier)
            if operations:
                entered[rank] = tuple(_signature(o) for o in operations)
    counts = Counter(entered.values()).most_common()
    if len(counts) < 2:
        return (), ""
    tied = counts[0][1] == counts[1][1]
    odd = tuple(r for r, s in entered.items() if tied or s != counts[0][0])
    usual, other = counts[0][0], counts[1][0]
    if [s[0] for s in usual] != [s[0] for s in other]:  # named as in PyTorch's analyzer
        kind = "COLLECTIVE_TYPE_MISMATCH"
    else:
        same_sizes = [s[1:3] for s in usual] == [s[1:3] for s in other]
        kind = "COLLECTIVE_DTYPE_MISMATCH" if same_sizes else "SIZE_OR_SYNTAX_MISMATCH"
    with_usual = [r for r, s in entered.items() if s == usual]
    first = next(r for r, s in entered.items() if s == other)
    text = f"{_described(other)} where {ranks_text(with_usual)} entered {_described(usual)}"
    return odd, f"{kind}: {text}{_as_if(job, place, first, with_usual[0], other, usual)}"


def _signature(operation: FlightRecorderOperation) -> Signature:
    name = operation.name
    uneven = name.endswith(_UNEVEN) or name.startswith(("all_to_all", "alltoall"))
    inputs = () if uneven or name in _NO_INPUTS else operation.input_sizes
    outputs = () if uneven or name in _NO_OUTPUTS else operation.output_sizes
    dtypes = (operation.input_dtypes if inputs else ()) + (operation.output_dtypes if outputs else ())
    return name, inputs, outputs, tuple(sorted(set(dtypes)))


def _described(signatures: tuple[Signature, ...]) -> str:
    name, inputs, outputs, dtypes = signatures[0]
    sizes = ", ".join("x".join(map(str, s)) or "a scalar" for s in (inputs or outputs)[:3])
    more = f" and {len(signatures) - 1} more" if len(signatures) > 1 else ""
    return f"{name}({'; '.join(t for t in (sizes, ', '.join(dtypes)) if t)}){more}"


def _as_if(
    job: Job,
    place: SynchronizationPoint,
    odd: int,
    usual: int,
    other: tuple[Signature, ...],
    wanted: tuple[Signature, ...],
) -> str:
    """Says whether an operation was skipped or added, from the operations that follow or precede the expected one."""

    def at(rank: int, seq: int) -> tuple[Signature, ...]:
        return tuple(_signature(o) for o in operations_at(job, rank, place.key, seq))

    k = place.frontier
    before = next((s for s in range(k - 1, max(0, k - NUM_EARLIER_MAX), -1) if at(usual, s) == wanted), 0)
    if other in (at(usual, k + 1), at(usual, before + 1) if before else ()):
        return ", as if it had skipped one"
    return ", as if it had one too many" if at(odd, k + 1) == wanted else ""


def _pair_mismatch(job: Job, place: SynchronizationPoint) -> tuple[tuple[int, ...], str]:
    """Compares sizes and dtypes of the first pending `send` with those of the matching `recv`."""
    pending: dict[int, FlightRecorderOperation] = {}
    for rank in place.inside:
        dump, group = job.dumps[rank], job.index[rank, place.key]
        if dump.entries is None:
            return (), ""
        for row in np.flatnonzero((dump.entries.group == group) & ~dump.entries.done):
            operation = dump.entries.operations[dump.entries.operation[row]]
            if operation.is_p2p and peers_of(operation, dump.groups[group].ranks) == place.key[2:]:
                pending[rank] = operation
                break
    source, destination = place.key[2:]
    if len(pending) < 2:
        return (), ""
    sent, awaited = pending[source], pending[destination]
    sizes, dtypes = sent.input_sizes == awaited.output_sizes, sent.input_dtypes == awaited.output_dtypes
    if sizes and dtypes:
        return (), ""
    kind = "SIZE_OR_SYNTAX_MISMATCH" if not sizes else "COLLECTIVE_DTYPE_MISMATCH"
    what = (sent.input_sizes, awaited.output_sizes) if not sizes else (sent.input_dtypes, awaited.output_dtypes)
    text = f"{kind}: rank {source} sends {list(what[0])}, rank {destination} expects {list(what[1])}"
    return (source, destination), text


STRONG = (Cause.MISMATCH, Cause.OUTSIDE, Cause.ELSEWHERE)
"""Causes that a rank itself recorded; they take precedence over others that explain the same waits."""
WEAK = (Cause.AHEAD, Cause.INSIDE)
"""Causes without a suspect."""


@dataclass(frozen=True, slots=True)
class WaitRootCause:
    """Root cause of waits at `place`, or the place that waits for `ranks`. `waiters`: ranks whose waits lead to it."""

    cause: Cause
    ranks: tuple[int, ...]
    place: SynchronizationPoint
    waiters: frozenset[int]


def root_causes(job: Job) -> list[WaitRootCause]:
    """Root causes, most votes first."""
    stuck = [p for p in job.places.values() if p.frontier > 0]
    waits_in: dict[int, list[SynchronizationPoint]] = defaultdict(list)
    for place in stuck:
        for rank in place.waiting:
            waits_in[rank].append(place)
    ends: list[WaitRootCause] = []
    explained_by: list[tuple[Cause, tuple[int, ...], SynchronizationPoint]] = []
    blocked_by: dict[int, list[SynchronizationPoint]] = defaultdict(list)  # by rank: places that it blocks
    for place in stuck:
        _judge(job, place, waits_in)
        if place.cause is None:
            for rank in place.culprits:
                blocked_by[rank].append(place)
        else:
            explained_by.append((place.cause, place.culprits, place))
    outside = {rank: places for rank, places in blocked_by.items() if rank not in waits_in}
    num_outside = Counter(p.key for places in outside.values() for p in places)
    for rank, places in outside.items():
        # Ranks that block one group together are named for that group.
        explained_by.append((Cause.OUTSIDE, (rank,), min(places, key=lambda p: (-num_outside[p.key], _age(p)))))
    reached: set[int] = set()
    for cause, ranks, place in explained_by:
        first = blocked_by[ranks[0]] if cause is Cause.OUTSIDE else [place]
        waiters = _led_by(first, blocked_by)
        if cause not in WEAK:
            reached.update(waiters)
        ends.append(WaitRootCause(cause, ranks, place, frozenset(waiters)))
    unexplained = [p for p in stuck if p.cause is None and not reached.intersection(p.waiting)]
    ends += _circles(unexplained, waits_in, blocked_by)
    return _most_informative(ends, waits_in)


def _age(place: SynchronizationPoint) -> tuple[bool, float, int]:
    """Sort key: groups before pairs, then the longest wait, then the number of waiting ranks."""
    since = float("inf") if place.since is None else place.since
    return place.key[2] >= 0, since, -len(place.waiting)


def _judge(job: Job, place: SynchronizationPoint, waits_in: dict[int, list[SynchronizationPoint]]) -> None:
    """Sets the cause of the wait, or, if there is none, the late ranks (`culprits`)."""
    k, half = place.frontier, len(place.members) / 2
    odd, place.detail = mismatch(job, place)
    late = place.late
    if odd:
        place.cause, place.culprits = Cause.MISMATCH, odd
    elif late:
        outside = [r for r in late if r not in waits_in]
        if len(outside) > half and len(outside) == len(late):
            place.cause, place.culprits = Cause.AHEAD, tuple(place.waiting)
        else:
            place.culprits = tuple(late if len(outside) <= half else [r for r in late if r in waits_in])
    elif place.absent and len(place.absent) <= half:
        place.cause, place.culprits = Cause.NO_DUMP, place.absent
    elif not place.members_known and job.absent and len(job.absent) <= len(job.dumps):
        place.cause, place.culprits = Cause.NO_DUMP, job.absent
    else:
        inside = place.inside
        idle = [r for r in inside if place.seats[r].started < k]
        behind = inside if len(inside) < len(place.seats) else idle
        if 0 < len(behind) <= half and not place.absent:
            place.cause, place.culprits = Cause.BEHIND, tuple(behind)
            place.detail = "start" if behind is idle else "finish"
        else:
            place.cause, place.culprits = Cause.INSIDE, tuple(inside)


def _led_by(first: Iterable[SynchronizationPoint], blocked_by: dict[int, list[SynchronizationPoint]]) -> set[int]:
    """Ranks whose waits lead to these places, directly or through other places."""
    waiters: set[int] = set()
    seen: set[Key] = set()
    places = deque(first)
    while places:
        place = places.popleft()
        if place.key in seen:
            continue
        seen.add(place.key)
        for rank in place.waiting:
            if rank not in waiters:
                waiters.add(rank)
                places.extend(blocked_by.get(rank, ()))
    return waiters


def _circles(
    places: list[SynchronizationPoint],
    waits_in: dict[int, list[SynchronizationPoint]],
    blocked_by: dict[int, list[SynchronizationPoint]],
) -> list[WaitRootCause]:
    """Cycles of waits: ranks are in different collectives. Suspects are the late ranks of the place with the smallest
    share of late ranks."""
    known = {p.key for p in places}
    beyond = {p.key: [q for r in p.culprits for q in waits_in.get(r, ()) if q.key in known] for p in places}
    reach: dict[Key, set[Key]] = {}
    for place in places:
        seen: set[Key] = set()
        ahead = deque(beyond[place.key])
        while ahead:
            q = ahead.popleft()
            if q.key not in seen:
                seen.add(q.key)
                ahead.extend(beyond[q.key])
        reach[place.key] = seen
    ends = []
    reported: set[Key] = set()
    for place in places:
        together = [q for q in places if q.key in reach[place.key] and place.key in reach[q.key]]
        if not together or place.key in reported:
            continue
        reported.update(q.key for q in together)
        share = min(len(q.culprits) / len(q.members) for q in together)
        least = [q for q in together if len(q.culprits) / len(q.members) == share]
        odd = tuple(sorted({r for q in least for r in q.culprits}))
        waiters = frozenset(_led_by(together, blocked_by))
        ends.append(WaitRootCause(Cause.ELSEWHERE, odd, max(least, key=lambda q: len(q.waiting)), waiters))
    return ends


def _most_informative(
    ends: list[WaitRootCause], waits_in: dict[int, list[SynchronizationPoint]]
) -> list[WaitRootCause]:
    strong = {r for e in ends if e.cause in STRONG for r in e.waiters}
    kept = [e for e in ends if e.cause in STRONG or not strong.intersection(e.place.inside)]
    medium = {r for e in kept if e.cause in (Cause.NO_DUMP, Cause.BEHIND) for r in e.waiters}
    kept = [e for e in kept if e.cause not in WEAK or not medium.intersection(e.place.inside)]
    kept = [e for e in kept if e.cause is not Cause.INSIDE or _is_oldest(e.place, waits_in)] or kept
    return sorted(kept, key=lambda e: (e.cause in WEAK, -len(e.waiters), e.ranks))


def _is_oldest(place: SynchronizationPoint, waits_in: dict[int, list[SynchronizationPoint]]) -> bool:
    """Whether one of its ranks waits for no older operation, behind which this one would queue."""
    for rank in place.waiting:
        since = [p.seats[rank].since for p in waits_in[rank]]
        mine = place.seats[rank].since
        if mine is None or all(s is None or s >= mine for s in since):
            return True
    return False
