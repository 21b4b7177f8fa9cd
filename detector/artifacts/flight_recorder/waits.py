"""Follows waits to their root causes, and finds ranks that entered a different operation than the others, or the same
with other sizes or dtypes.

In each group, k is the first collective that a waiting rank has not finished (diagnosis.py gives the order of causes).
A rank that is late for one group because it waits in another is a victim of the latter.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rolecall.detector.artifacts.flight_recorder.entries import FlightRecorderOperation
from rolecall.detector.artifacts.flight_recorder.progress import (
    Cause,
    Job,
    Key,
    SynchronizationPoint,
    operations_at,
    peers_of,
    ranks_text,
)

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
    kind = _kind_of_mismatch(usual, other)
    text = (
        f"{_described(other)} where {ranks_text([r for r, s in entered.items() if s == usual])} entered "
        f"{_described(usual)}"
    )
    first = next(r for r, s in entered.items() if s == other)
    example = next(r for r, s in entered.items() if s == usual)
    return odd, f"{kind}: {text}{_as_if(job, place, first, example, other, usual)}"


def _signature(operation: FlightRecorderOperation) -> Signature:
    name = operation.name
    uneven = name.endswith(_UNEVEN) or name.startswith(("all_to_all", "alltoall"))
    inputs = () if uneven or name in _NO_INPUTS else operation.input_sizes
    outputs = () if uneven or name in _NO_OUTPUTS else operation.output_sizes
    dtypes = (operation.input_dtypes if inputs else ()) + (operation.output_dtypes if outputs else ())
    return name, inputs, outputs, tuple(sorted(set(dtypes)))


def _kind_of_mismatch(one: tuple[Signature, ...], other: tuple[Signature, ...]) -> str:
    """Named as in PyTorch's analyzer."""
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
    return (
        source,
        destination,
    ), f"{kind}: rank {source} sends {list(what[0])}, rank {destination} awaits {list(what[1])}"


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


def ends_of(job: Job) -> list[WaitRootCause]:
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
    outside = [r for r in blocked_by if r not in waits_in]
    for rank in outside:
        explained_by.append((Cause.OUTSIDE, (rank,), min(blocked_by[rank], key=_age)))
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
    since = min((s.since for s in place.seats.values() if s.waits and s.since is not None), default=float("inf"))
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
