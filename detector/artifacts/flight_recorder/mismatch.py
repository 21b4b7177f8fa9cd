"""Finds ranks that entered a different operation than the others, or the same with other sizes or dtypes."""

from collections import Counter

import numpy as np

from rolecall.detector.artifacts.flight_recorder.entries import FlightRecorderOperation
from rolecall.detector.artifacts.flight_recorder.progress import Job, SynchronizationPoint, operations_at, peers_of
from rolecall.detector.artifacts.flight_recorder.text import ranks_text

NUM_LOOK_BACK = 200
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
    witness = next(r for r, s in entered.items() if s == usual)
    return odd, f"{kind}: {text}{_as_if(job, place, first, witness, other, usual)}"


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
    before = next((s for s in range(k - 1, max(0, k - NUM_LOOK_BACK), -1) if at(usual, s) == wanted), 0)
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
