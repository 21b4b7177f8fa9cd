"""Who holds up a job's collectives, from the Flight Recorder dumps of its ranks.

In each process group, k is the first collective that a waiting rank has not finished. In this order:

    some ranks entered something else as k       mismatch of type, size or dtype: the code's fault, nobody's machine
    some ranks have not enqueued k               host side: Python, data loader, CPU; or they wait in another group
    all that left a dump have, some left none    those: dead, stopped or cut off before they could write
    some finished k, or alone did not start it   GPU side: enqueued, and not finished (their GPU, or their link)
    all wait inside k                            a tie

Causes come before symptoms: whoever is late for one group because it waits in another is a victim of that one, so the
waits are followed to their ends (group -> its late ranks -> the groups they wait in), and each end is scored by the
ranks whose wait leads to it. An end that more than half of a group would have to answer for accuses nobody. Waits that
lead back to themselves are ranks in different collectives. Pairs of `send` and `recv` are groups of two.

Pure: dumps in, findings out (flight_dumps.py reads them). Sequence numbers, not times, decide; the one use of time is
that an operation that was enqueued less than a second before the dump was written waits for nobody yet.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rolecall.core.diagnosis import Evidence, FaultClass, Finding, Suspect
from rolecall.core.ids import NodeId
from rolecall.detector.findings import settles
from rolecall.detector.flight_dumps import Dump
from rolecall.detector.flight_entries import GLOO, Entries, Operation

DETECTOR = "flight_recorder"
WAIT_SECONDS_MIN = 1.0
"""Dumps of a job that works are not taken at one moment: what was enqueued just before is not waiting."""
NUM_WITNESSES = 8
"""So many of those who wait are read whole by the fast way, beside the suspects."""
NUM_SUSPECTS_OF_A_TIE = 16
"""A tie of more ranks than this names none of them."""
NUM_PARTS = 6
"""Ranks and runs of ranks that a sentence lists."""
VOTES_SHARE_MIN = 0.5
"""Ranks with less than this share of the votes of the first are not named beside it."""
NUM_LOOK_BACK = 200
"""Operations of a group in which one that was skipped is looked for as it came before."""
DEFAULT_DESC = "default_pg"

Key = tuple[str, int, int, int]
"""Of a place where ranks meet: the group's name, the number of its list of ranks (groups of one name may have several),
and of a pair its source and destination, -1 where it is none."""
Rows = NDArray[np.intp]
"""Of entries, in order."""


class Cause(StrEnum):
    """What a chain of waits ends in."""

    OUTSIDE = "host_side"
    NO_DUMP = "no_dump"
    MISMATCH = "mismatch"
    ELSEWHERE = "other_collective"
    BEHIND = "gpu_side"
    AHEAD = "ahead"
    INSIDE = "all_inside"


STRONG = (Cause.MISMATCH, Cause.OUTSIDE, Cause.ELSEWHERE)
"""They stand on what a rank itself recorded; the others give way to them where they explain the same waits."""
WEAK = (Cause.AHEAD, Cause.INSIDE)
"""They accuse nobody."""


@dataclass(frozen=True, slots=True)
class Seat:
    """How far one rank is in one place: sequence numbers. `since`: creation of what it waits for; None: unknown."""

    enqueued: int
    started: int
    completed: int
    since: float | None = None
    waits: bool = False


@dataclass(slots=True, eq=False)
class Place:
    """A group, or a pair of `send` and `recv`: who takes part, how far each is, and what is wrong there."""

    key: Key
    desc: str
    members: tuple[int, ...]
    members_known: bool
    seats: dict[int, Seat] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    frontier: int = 0
    cause: Cause | None = None
    culprits: tuple[int, ...] = ()
    detail: str = ""

    @property
    def waiting(self) -> list[int]:
        return [r for r, s in self.seats.items() if s.waits]

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
        return f"group {name}{f' ({self.desc})' if self.desc and self.desc != 'undefined' else ''}{pair}"


@dataclass(slots=True)
class RankLists:
    """Numbers the lists of ranks of all groups. Thousands of dumps hold the same few objects, of thousands of ranks each:
    to compare them each time would take longer than all the rest."""

    by_object: dict[int, int] = field(default_factory=dict)
    by_value: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, ranks: tuple[int, ...]) -> int:
        found = self.by_object.get(id(ranks))
        if found is None:
            found = self.by_object[id(ranks)] = self.by_value.setdefault(ranks, len(self.by_value))
        return found


@dataclass(slots=True)
class Job:
    """The newest dump of each rank, and who left none."""

    dumps: dict[int, Dump]
    absent: tuple[int, ...]
    nodes: dict[int, str]
    written_at: float
    ranks: RankLists
    places: dict[Key, Place] = field(default_factory=dict)
    index: dict[tuple[int, Key], int] = field(default_factory=dict)  # of a group in a rank's dump
    unread: set[int] = field(default_factory=set)  # ranks whose entries are needed before more can be said

    def suspects(self, ranks: Iterable[int]) -> tuple[Suspect, ...]:
        return tuple(Suspect(node=NodeId(self.node(r)), rank=r) for r in sorted(ranks))

    def node(self, rank: int) -> str:
        """Where nothing tells the machine the rank stands for it: two ranks are never taken for one machine."""
        return self.nodes.get(rank, f"rank-{rank}")


@dataclass(frozen=True, slots=True)
class End:
    """Where waits end: `place` is what is wrong there, or the place that waits for `ranks`. `waiters` lead to it."""

    cause: Cause
    ranks: tuple[int, ...]
    place: Place
    waiters: frozenset[int]


def diagnose(dumps: Sequence[Dump], *, world_size: int | None = None) -> list[Finding]:
    """What holds the job up, the cause that explains most first; nothing where nobody waits.

    `world_size`: number of ranks; without it what the groups tell, or else the highest rank seen.
    """
    if not dumps:
        return []
    job = _job(dumps, world_size)
    if len(job.dumps) == 1 and job.absent:
        return _alone(job)
    ends = _ends(job)
    if ends:
        return _findings(job, ends)
    return _nobody_waits(job)


def entries_wanted(dumps: Sequence[Dump], *, world_size: int | None = None) -> set[int]:
    """Ranks whose entries could change or explain what their status says; empty when enough is known."""
    if not dumps:
        return set()
    job = _job(dumps, world_size)
    wanted = set(job.unread)
    for end in _ends(job):
        wanted.update(end.ranks)
        place = end.place
        everybody = end.cause in (Cause.INSIDE, Cause.AHEAD, Cause.BEHIND, Cause.NO_DUMP)
        wanted.update(place.seats if everybody else sorted(place.waiting)[:NUM_WITNESSES])
    return {r for r in wanted if r in job.dumps and job.dumps[r].entries is None}


def looked_at(dumps: Sequence[Dump], *, world_size: int | None = None) -> str:
    """What a healthy answer stands on, one sentence."""
    if not dumps:
        return "no dump"
    job = _job(dumps, world_size)
    operations = sum(len(d.entries) for d in job.dumps.values() if d.entries is not None)
    groups = len({(p.key[0], p.key[1]) for p in job.places.values()})
    missing = f"; no dump of {_ranks(job.absent)}" if job.absent else ""
    return (
        f"Flight Recorder dumps of {_count(len(job.dumps), 'rank')}, {_count(groups, 'process group')}, "
        f"{_count(operations, 'operation')}: none has waited for {WAIT_SECONDS_MIN:g} s{missing}"
    )


# --- gathering -------------------------------------------------------------------------------------------------------


def _job(dumps: Sequence[Dump], world_size: int | None) -> Job:
    newest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda d: (d.written_at, d.path)):
        newest[dump.rank] = dump
    newest = dict(sorted(newest.items()))
    ranks = RankLists()
    for group in (g for d in newest.values() for g in d.groups):
        ranks.number(group.ranks)
    told = {r for known in ranks.by_value for r in known}
    world = told | set(newest) | set(range(world_size if world_size is not None else max(newest) + 1))
    created = [float(d.entries.created_at.max()) for d in newest.values() if d.entries is not None and len(d.entries)]
    job = Job(
        dumps=newest,
        absent=tuple(sorted(world - set(newest))),
        nodes=_nodes(newest),
        written_at=max([d.written_at for d in newest.values()] + created),
        ranks=ranks,
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
        _complete(job, place, paired, world)
    return job


def _nodes(dumps: dict[int, Dump]) -> dict[int, str]:
    """From the files' names, else from their folders, where these differ: one name for all names no machine. A rank
    between two of one machine is on it, too."""
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


def _take_seats(job: Job, rank: int, dump: Dump, paired: set[tuple[str, int]]) -> None:
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
            # Where there is point-to-point traffic its own numbers are in the status, too, and it says nothing. So it
            # is with gloo, which leaves no entry of that traffic, but whose groups have no ranks.
            done = max(0, status.completed)
            seat = Seat(max(0, status.enqueued), max(0, status.started), done, None, status.enqueued > done)
        if seat is not None:
            place.seats[rank] = seat
    if entries is None and not dump.status:
        job.unread.add(rank)


def _rows_by_group(entries: Entries) -> tuple[dict[int, Rows], dict[int, Rows]]:
    """Of each group that has any: rows of its collectives, and of its point-to-point operations."""
    p2p = np.array([o.is_p2p for o in entries.operations], dtype=bool)[entries.operation]
    split: tuple[dict[int, Rows], dict[int, Rows]] = ({}, {})
    for of_kind, kind in zip(split, (~p2p, p2p), strict=True):
        rows = np.flatnonzero(kind)
        rows = rows[np.argsort(entries.group[rows], kind="stable")]
        groups, first = np.unique(entries.group[rows], return_index=True)
        of_kind.update(zip(groups.tolist(), np.split(rows, first[1:]), strict=True) if len(rows) else ())
    return split


def _place(job: Job, key: Key, desc: str, members: tuple[int, ...]) -> Place:
    found = job.places.get(key)
    if found is None:
        found = job.places[key] = Place(key, desc, members, bool(members))
    return found


def _collective_seat(entries: Entries, rows: Rows, written_at: float) -> Seat:
    seqs = entries.seq[rows]
    enqueued = int(seqs.max())
    pending = rows[~entries.done[rows]]
    if not len(pending):
        return Seat(enqueued, enqueued, enqueued)
    first = int(entries.seq[pending].min())
    started = seqs[entries.started[rows]]
    since = float(entries.created_at[pending[entries.seq[pending] == first]].min())
    return Seat(enqueued, int(started.max()) if len(started) else 0, first - 1, since, _has_waited(since, written_at))


def _has_waited(since: float, written_at: float) -> bool:
    """A file that is older than what is in it has a clock of its own, which then says nothing."""
    return not 0 <= written_at - since < WAIT_SECONDS_MIN


def _take_pairs(job: Job, rank: int, dump: Dump, entries: Entries, mine: Rows, group: int) -> None:
    """`send` and `recv` of two ranks follow each other in order: the n-th of one meets the n-th of the other. They are
    counted from the job's first on, or, where the ring has lost that, among those that are pending."""
    about = dump.groups[group]
    pair_of: dict[int, tuple[int, int]] = {}
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, operation in zip(mine.tolist(), entries.operation[mine].tolist(), strict=True):
        pair = pair_of.get(operation)
        if pair is None:
            pair = pair_of[operation] = _pair(entries.operations[operation], about.ranks)
        if rank in pair and min(pair) >= 0 and pair[0] != pair[1]:
            rows_of[pair].append(row)
    for pair, rows in rows_of.items():
        place = _place(job, (about.name, job.ranks.number(about.ranks), *pair), about.desc, pair)
        job.index[rank, place.key] = group
        pending = [row for row in rows if not entries.done[row]]
        since = float(entries.created_at[pending[0]]) if pending else None
        waits = since is not None and _has_waited(since, dump.written_at)
        place.seats[rank] = Seat(len(rows), 0, len(rows) - len(pending), since, waits)


def _pair(operation: Operation, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Global ranks of source and destination; where the group's are not known its own numbers. -1: none."""
    places = (operation.source, operation.destination)
    if not ranks:
        return places
    source, destination = (ranks[p] if 0 <= p < len(ranks) else -1 for p in places)
    return source, destination


def _complete(job: Job, place: Place, paired: set[tuple[str, int]], world: set[int]) -> None:
    """Seats of members that say nothing about the place, who left no dump, and the frontier."""
    if not place.members_known:
        everybody = place.desc == DEFAULT_DESC
        place.members = tuple(sorted(world if everybody else place.seats))
        place.members_known = everybody
    is_pair = place.key[2] >= 0
    for rank in place.members:
        dump = job.dumps.get(rank)
        if dump is None or rank in place.seats:
            continue
        if dump.entries is None:
            # Nothing in the status means nothing begun, if the status could be read; with pairs it never can.
            if is_pair or place.key[:2] in paired or not dump.status:
                job.unread.add(rank)
                continue
        elif dump.entries.first_record > 0 and not dump.status and not is_pair:
            continue  # what it did here may be lost
        place.seats[rank] = Seat(0, 0, 0)
    if is_pair and any(_overflowed(job.dumps[r]) for r in place.seats):
        place.seats = {r: Seat(s.enqueued - s.completed, 0, 0, s.since, s.waits) for r, s in place.seats.items()}
    waiting = place.waiting
    place.absent = tuple(r for r in place.members if r not in job.dumps)
    place.frontier = min((place.seats[r].completed for r in waiting), default=-1) + 1


def _overflowed(dump: Dump) -> bool:
    return dump.entries is None or dump.entries.first_record > 0


# --- following the waits ---------------------------------------------------------------------------------------------


def _ends(job: Job) -> list[End]:
    """Where the waits end, most votes first."""
    stuck = [p for p in job.places.values() if p.frontier > 0]
    waits_in: dict[int, list[Place]] = defaultdict(list)
    for place in stuck:
        for rank in place.waiting:
            waits_in[rank].append(place)
    ends: list[End] = []
    explained_by: list[tuple[Cause, tuple[int, ...], Place]] = []
    blocked_by: dict[int, list[Place]] = defaultdict(list)  # places that are held up by a rank
    for place in stuck:
        _judge(job, place, waits_in)
        if place.cause is None:
            for rank in place.culprits:
                blocked_by[rank].append(place)
        else:
            explained_by.append((place.cause, place.culprits, place))
    outside = [r for r in blocked_by if r not in waits_in]
    for rank in outside:
        explained_by.append((Cause.OUTSIDE, (rank,), min(blocked_by[rank], key=_age)))
    reached: set[int] = set()
    for cause, ranks, place in explained_by:
        first = blocked_by[ranks[0]] if cause is Cause.OUTSIDE else [place]
        waiters = _led_by(first, blocked_by)
        if cause not in WEAK:
            reached.update(waiters)
        ends.append(End(cause, ranks, place, frozenset(waiters)))
    unexplained = [p for p in stuck if p.cause is None and not reached.intersection(p.waiting)]
    ends += _circles(unexplained, waits_in, blocked_by)
    return _most_telling(ends, waits_in)


def _age(place: Place) -> tuple[bool, float, int]:
    """Sorts groups before pairs, who has waited longest first, then by how many do."""
    since = min((s.since for s in place.seats.values() if s.waits and s.since is not None), default=float("inf"))
    return place.key[2] >= 0, since, -len(place.waiting)


def _judge(job: Job, place: Place, waits_in: dict[int, list[Place]]) -> None:
    """Sets what is wrong here, or, with no cause, the ranks that are late (`culprits`)."""
    k, half = place.frontier, len(place.members) / 2
    odd, place.detail = _mismatch(job, place)
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


def _led_by(first: Iterable[Place], blocked_by: dict[int, list[Place]]) -> set[int]:
    """Ranks whose wait leads to these places: those in them, those who wait for these elsewhere, and so on."""
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


def _circles(places: list[Place], waits_in: dict[int, list[Place]], blocked_by: dict[int, list[Place]]) -> list[End]:
    """Waits that lead back to themselves: ranks are in different collectives. Whoever is late where the smallest share
    is late has left the others."""
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
    told: set[Key] = set()
    for place in places:
        together = [q for q in places if q.key in reach[place.key] and place.key in reach[q.key]]
        if not together or place.key in told:
            continue
        told.update(q.key for q in together)
        share = min(len(q.culprits) / len(q.members) for q in together)
        least = [q for q in together if len(q.culprits) / len(q.members) == share]
        odd = tuple(sorted({r for q in least for r in q.culprits}))
        waiters = frozenset(_led_by(together, blocked_by))
        ends.append(End(Cause.ELSEWHERE, odd, max(least, key=lambda q: len(q.waiting)), waiters))
    return ends


def _most_telling(ends: list[End], waits_in: dict[int, list[Place]]) -> list[End]:
    strong = {r for e in ends if e.cause in STRONG for r in e.waiters}
    kept = [e for e in ends if e.cause in STRONG or not strong.intersection(e.place.inside)]
    medium = {r for e in kept if e.cause in (Cause.NO_DUMP, Cause.BEHIND) for r in e.waiters}
    kept = [e for e in kept if e.cause not in WEAK or not medium.intersection(e.place.inside)]
    kept = [e for e in kept if e.cause is not Cause.INSIDE or _is_oldest(e.place, waits_in)] or kept
    return sorted(kept, key=lambda e: (e.cause in WEAK, -len(e.waiters), e.ranks))


def _is_oldest(place: Place, waits_in: dict[int, list[Place]]) -> bool:
    """Whether one of its ranks waits for nothing older: what was enqueued later stands behind it."""
    for rank in place.waiting:
        since = [p.seats[rank].since for p in waits_in[rank]]
        mine = place.seats[rank].since
        if mine is None or all(s is None or s >= mine for s in since):
            return True
    return False


# --- mismatches ------------------------------------------------------------------------------------------------------

_NO_INPUTS = ("scatter", "all_to_all", "alltoall", "coalesced")
_NO_OUTPUTS = ("gather", "reduce", "_reduce_oop", "all_to_all", "alltoall", "coalesced")
_UNEVEN = ("_v", "_v_single", "_coalesced")
"""Operations in which ranks may differ: the root has other tensors, or sizes are each rank's own."""

Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[str, ...]]


def _mismatch(job: Job, place: Place) -> tuple[tuple[int, ...], str]:
    """Who entered something else as the frontier than most, all where there is no most; and what each entered."""
    if place.key[2] >= 0:
        return _pair_mismatch(job, place)
    entered: dict[int, tuple[Signature, ...]] = {}
    for rank, seat in place.seats.items():
        if seat.enqueued >= place.frontier:
            operations = _operations_at(job, rank, place.key, place.frontier)
            if operations:
                entered[rank] = tuple(_signature(o) for o in operations)
    counts = Counter(entered.values()).most_common()
    if len(counts) < 2:
        return (), ""
    tied = counts[0][1] == counts[1][1]
    odd = tuple(r for r, s in entered.items() if tied or s != counts[0][0])
    usual, other = counts[0][0], counts[1][0]
    kind = _kind_of_mismatch(usual, other)
    text = (
        f"{_described(other)} where {_ranks([r for r, s in entered.items() if s == usual])} entered {_described(usual)}"
    )
    first = next(r for r, s in entered.items() if s == other)
    witness = next(r for r, s in entered.items() if s == usual)
    return odd, f"{kind}: {text}{_as_if(job, place, first, witness, other, usual)}"


def _operations_at(job: Job, rank: int, key: Key, seq: int) -> list[Operation]:
    entries, group = job.dumps[rank].entries, job.index.get((rank, key))
    if entries is None or group is None:
        return []
    rows = np.flatnonzero((entries.group == group) & (entries.seq == seq))
    operations = [entries.operations[entries.operation[row]] for row in rows]
    return [o for o in operations if not o.is_p2p]


def _signature(operation: Operation) -> Signature:
    name = operation.name
    uneven = name.endswith(_UNEVEN) or name.startswith(("all_to_all", "alltoall"))
    inputs = () if uneven or name in _NO_INPUTS else operation.input_sizes
    outputs = () if uneven or name in _NO_OUTPUTS else operation.output_sizes
    dtypes = (operation.input_dtypes if inputs else ()) + (operation.output_dtypes if outputs else ())
    return name, inputs, outputs, tuple(sorted(set(dtypes)))


def _kind_of_mismatch(one: tuple[Signature, ...], other: tuple[Signature, ...]) -> str:
    """In the words of PyTorch's analyser."""
    if [s[0] for s in one] != [s[0] for s in other]:
        return "COLLECTIVE_TYPE_MISMATCH"
    same_sizes = [s[1:3] for s in one] == [s[1:3] for s in other]
    return "COLLECTIVE_DTYPE_MISMATCH" if same_sizes else "SIZE_OR_SYNTAX_MISMATCH"


def _described(signatures: tuple[Signature, ...]) -> str:
    name, inputs, outputs, dtypes = signatures[0]
    sizes = ", ".join("x".join(map(str, s)) or "a scalar" for s in (inputs or outputs)[:3])
    more = f" and {len(signatures) - 1} more" if len(signatures) > 1 else ""
    return f"{name}({'; '.join(t for t in (sizes, ', '.join(dtypes)) if t)}){more}"


def _as_if(
    job: Job, place: Place, odd: int, usual: int, other: tuple[Signature, ...], wanted: tuple[Signature, ...]
) -> str:
    """One skipped, or one too many: what followed, or follows now, the wanted one with those who entered it."""

    def at(rank: int, seq: int) -> tuple[Signature, ...]:
        return tuple(_signature(o) for o in _operations_at(job, rank, place.key, seq))

    k = place.frontier
    before = next((s for s in range(k - 1, max(0, k - NUM_LOOK_BACK), -1) if at(usual, s) == wanted), 0)
    if other in (at(usual, k + 1), at(usual, before + 1) if before else ()):
        return ", as if it had skipped one"
    return ", as if it had one too many" if at(odd, k + 1) == wanted else ""


def _pair_mismatch(job: Job, place: Place) -> tuple[tuple[int, ...], str]:
    """Sizes and dtypes of the first pending `send` against those of the `recv` that it meets."""
    pending: dict[int, Operation] = {}
    for rank in place.inside:
        dump, group = job.dumps[rank], job.index[rank, place.key]
        if dump.entries is None:
            return (), ""
        for row in np.flatnonzero((dump.entries.group == group) & ~dump.entries.done):
            operation = dump.entries.operations[dump.entries.operation[row]]
            if operation.is_p2p and _pair(operation, dump.groups[group].ranks) == place.key[2:]:
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
    return (
        source,
        destination,
    ), f"{kind}: rank {source} sends {list(what[0])}, rank {destination} awaits {list(what[1])}"


# --- wording ---------------------------------------------------------------------------------------------------------


def _findings(job: Job, ends: list[End]) -> list[Finding]:
    """One for each kind of cause; a kind's ranks are named together unless their votes lie far apart."""
    findings = []
    for cause in dict.fromkeys(e.cause for e in ends):
        of_kind = [e for e in ends if e.cause is cause]
        told = [e for e in of_kind if len(e.waiters) >= VOTES_SHARE_MIN * len(of_kind[0].waiters)]
        findings.append(_finding(job, cause, told))
    return findings


@dataclass(frozen=True, slots=True)
class Scene:
    """The words of one finding: `rank 3`, `it`, `all_reduce #12 of group 0`, `ranks 0-2 wait`, ` since ...`."""

    who: str
    it: str
    place: Place
    operation: str
    others_wait: str
    since: str
    num_waiters: int

    def of_who(self, one: str, several: str) -> str:
        return one if self.it == "it" else several


Verdict = tuple[FaultClass, float, str, str]
"""Fault class, confidence, the sentence, and what would settle it."""


def _finding(job: Job, cause: Cause, ends: list[End]) -> Finding:
    ranks = sorted({r for e in ends for r in e.ranks})
    waiters = {r for e in ends for r in e.waiters} - set(ranks)
    place = ends[0].place
    waiting = [r for r in place.waiting if r not in ranks] or place.waiting
    since = min(
        (s.since for e in ends for s in e.place.seats.values() if s.waits and s.since is not None), default=None
    )
    scene = Scene(
        who=_ranks(ranks),
        it="it" if len(ranks) == 1 else "they",
        place=place,
        operation=_operation_text(job, place),
        others_wait=f"{_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}",
        since=f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC" if since is not None else "",
        num_waiters=len(waiters),
    )
    if cause is Cause.OUTSIDE or cause is Cause.NO_DUMP:
        verdict = _not_there(cause, scene)
    elif cause is Cause.MISMATCH:
        verdict = _another_operation(scene)
    elif cause is Cause.ELSEWHERE:
        verdict = _another_collective(scene, _elsewhere(job, ranks, place))
    elif cause is Cause.BEHIND:
        verdict = _not_finished(scene, _is_gloo(job, place))
    else:
        verdict = _undecided(cause, scene)
        ranks = ranks if len(ranks) <= NUM_SUSPECTS_OF_A_TIE else []
    return _made(job, cause, ranks, verdict, since, len(waiters), place)


def _not_there(cause: Cause, scene: Scene) -> Verdict:
    if cause is Cause.OUTSIDE:
        because = (
            f"{scene.who} {scene.of_who('has', 'have')} not entered {scene.operation}: {scene.others_wait} in "
            f"it{scene.since}, and {scene.it} {scene.of_who('is', 'are')} in no collective (host side: Python, data "
            f"loader, GIL or CPU)"
        )
        return FaultClass.HANG, 0.9, because, ""
    because = (
        f"{scene.who} left no dump, and {scene.others_wait} for {scene.of_who('it', 'them')} in {scene.operation}"
        f"{scene.since}, which all others have entered: dead, stopped or cut off before {scene.it} could write"
    )
    return FaultClass.HANG, 0.8 if scene.place.members_known else 0.6, because, ""


def _another_operation(scene: Scene) -> Verdict:
    because = (
        f"{scene.who} entered something else as {scene.operation} ({scene.place.detail}): a fault of the code, not of a "
        f"machine; {_count(scene.num_waiters, 'other rank')} {'waits' if scene.num_waiters == 1 else 'wait'}{scene.since}"
    )
    return FaultClass.USER_CODE, 0.9, because, ""


def _another_collective(scene: Scene, elsewhere: str) -> Verdict:
    because = (
        f"{scene.who} {scene.of_who('waits', 'wait')} in another collective ({elsewhere}), while {scene.others_wait} for "
        f"{scene.of_who('it', 'them')} in {scene.operation}{scene.since}: the order of collectives differs between ranks"
    )
    return FaultClass.USER_CODE, 0.7, because, ""


def _not_finished(scene: Scene, is_gloo: bool) -> Verdict:
    because = (
        f"{scene.who} entered {scene.operation} and did not {scene.place.detail} it, as others did{scene.since}: "
        f"{scene.of_who('its', 'their')} {'link' if is_gloo else 'GPU or link'}"
    )
    return FaultClass.NETWORK if is_gloo else FaultClass.GPU, 0.6, because, ""


def _undecided(cause: Cause, scene: Scene) -> Verdict:
    if cause is Cause.AHEAD:
        because = (
            f"{scene.who} {scene.of_who('waits', 'wait')} in {scene.operation}{scene.since}, which most of the group have "
            f"not entered, who wait for nothing: either {scene.it} entered it alone, or something else holds up the others"
        )
        return FaultClass.CANNOT_TELL, 0.3, because, "stacks of those who have not entered it"
    because = (
        f"{scene.who} all wait inside {scene.operation}{scene.since}, what they entered matches, and none of them has "
        f"finished it: who holds it up cannot be told"
    )
    settle = "NCCL RAS or Inspector, or GPU and link counters of these ranks; or the dumps that are missing"
    return FaultClass.CANNOT_TELL, 0.3, because, settle


def _made(
    job: Job,
    cause: Cause,
    ranks: Sequence[int],
    verdict: Verdict,
    since: float | None,
    num_waiting: int,
    place: Place,
) -> Finding:
    fault, confidence, because, settle = verdict
    values = {
        "num_waiting": float(num_waiting),
        "num_members": float(len(place.members)),
        "sequence_number": float(place.frontier),
        "num_without_dump": float(len(job.absent)),
    }
    if since is not None:
        values["waited_seconds"] = max(0.0, job.written_at - since)
    missing = f"; no dump of {_ranks(job.absent)}" if job.absent and cause is not Cause.NO_DUMP else ""
    text = f"{place.name}, sequence number {place.frontier}: {str(cause).replace('_', ' ')}{missing}"
    evidence = [Evidence(kind=str(cause), text=text, values=values)]
    return Finding(
        detector=DETECTOR,
        suspects=job.suspects(ranks),
        fault_class=fault,
        onset=min(since, job.written_at) if since is not None else job.written_at,
        detected_at=job.written_at,
        confidence=confidence,
        because=because,
        evidence=(*evidence, *([settles(settle)] if settle else [])),
    )


def _alone(job: Job) -> list[Finding]:
    """One dump of several: what it waits for can be said, and no more."""
    (rank,) = job.dumps
    waiting = [p for p in job.places.values() if p.frontier > 0]
    if not waiting:
        return []
    place = min(waiting, key=lambda p: p.seats[rank].since or 0.0)
    since = place.seats[rank].since
    because = (
        f"rank {rank} waits in {_operation_text(job, place)}, and its dump is the only one of {len(job.absent) + 1} "
        f"ranks: who holds it up cannot be told"
    )
    settle = "dumps of the other ranks, taken while it waits"
    return [_made(job, Cause.INSIDE, (), (FaultClass.CANNOT_TELL, 0.2, because, settle), since, 1, place)]


def _nobody_waits(job: Job) -> list[Finding]:
    """Somebody is missing all the same: it may have died, or its file was not brought along."""
    if not job.absent or len(job.absent) > len(job.dumps):
        return []
    because = (
        f"{_ranks(job.absent)} left no dump; none of the {_count(len(job.dumps), 'other rank')} waits for anything: "
        f"dead, or the file was not collected"
    )
    place = Place(("-", -1, -1, -1), "", tuple(sorted({*job.dumps, *job.absent})), True)
    settle = f"whether {_ranks(job.absent)} lives, or its dump"
    named = job.absent if len(job.absent) <= NUM_SUSPECTS_OF_A_TIE else ()
    return [_made(job, Cause.NO_DUMP, named, (FaultClass.CANNOT_TELL, 0.4, because, settle), None, 0, place)]


def _operation_text(job: Job, place: Place) -> str:
    """`all_reduce #12 of group 0 (default_pg)`."""
    if place.key[2] >= 0:
        return f"send and recv of {place.name}"
    for rank in sorted(place.seats, key=lambda r: r in place.culprits):
        if place.seats[rank].enqueued >= place.frontier:
            operations = _operations_at(job, rank, place.key, place.frontier)
            if operations:
                return f"{operations[0].name} #{place.frontier} of {place.name}"
    return f"collective #{place.frontier} of {place.name}"


def _elsewhere(job: Job, ranks: Sequence[int], place: Place) -> str:
    others = [p for p in job.places.values() if p is not place and set(p.waiting) & set(ranks) and p.frontier > 0]
    return ", ".join(_operation_text(job, p) for p in others[:2]) or "?"


def _is_gloo(job: Job, place: Place) -> bool:
    for rank in place.seats:
        for operation in _operations_at(job, rank, place.key, place.frontier):
            return operation.backend == GLOO
    return False


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [p for a, b in runs for p in ([f"{a}-{b}"] if b > a + 1 else [str(r) for r in range(a, b + 1)])]
    words = parts[:NUM_PARTS]
    more = len(ordered) - sum(_span(p) for p in words)
    if more:
        words.append(f"{more} more")
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"rank{'s' if len(ordered) != 1 else ''} {listed}"


def _span(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
