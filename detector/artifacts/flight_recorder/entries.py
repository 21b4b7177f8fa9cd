"""The entries of a dump, as columns: each operation, its group, creation time and progress.

Input is PyTorch's list of dicts, or that list without its regular entries (regular_entries.py). In a hostile dump, one
dict or list may be referenced many times, so each traversal is counted and bounded.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.artifacts.flight_recorder.regular_entries import NUMBERS, ExtractedEntries
from rolecall.detector.base.plain_pickle import NUM_CHARACTERS_MAX, safe

NUM_ENTRIES_MAX = 400_000
"""The number that fits into the largest file that is read."""
NUM_TENSORS_MAX = 10_000
"""Of one operation: a fused operation of a large model has hundreds."""
NUM_DIMENSIONS_MAX = 64
NUM_SIZES_MAX = 8_000_000
"""Sizes and types of all distinct entries of a dump together: four thousand in each of two thousand entries."""
NUM_GROUPS_MAX = 10_000
"""Of one rank; a few dozen are usual."""
GLOO = "gloo"
_INT64 = 1 << 63

Ints = NDArray[np.int64]
Indices = NDArray[np.int32]
Bools = NDArray[np.bool_]
Seconds = NDArray[np.float64]


class MalformedDump(Exception):
    """The dump deviates from PyTorch's format; the message gives the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group as this rank knows it. `ranks`: global, in order; empty if the dump does not list them (gloo)."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderOperation:
    """An operation without its time. `source` and `destination`: ranks in the group, only for `send` and `recv`."""

    backend: str
    name: str
    input_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_sizes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[str, ...]
    is_p2p: bool
    source: int = -1
    destination: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The ring, oldest first, as columns of length E. `group` and `operation` index into those of the dump; `seq`
    counts a group's collectives, or its point-to-point operations. `first_record`: number of the first entry that the
    ring still holds."""

    group: Indices
    seq: Ints
    operation: Indices
    created_at: Seconds
    started: Bools
    done: Bools
    operations: tuple[FlightRecorderOperation, ...]
    first_record: int

    def __len__(self) -> int:
        return len(self.seq)


def columns(
    rows: Any, groups: list[ProcessGroup], cut: ExtractedEntries | None = None
) -> tuple[Entries, dict[int, int]]:
    """Columns of a dump's `entries` and of the extracted ones, and the group of each `pg_id` (-1: ambiguous). Adds
    missing groups to `groups`. Raises MalformedDump."""
    if not isinstance(rows, list) or len(rows) > NUM_ENTRIES_MAX:
        raise MalformedDump(f"entries is not a list of at most {NUM_ENTRIES_MAX:,}")
    told, kind, numbers = _put_back(rows, cut) if cut is not None else _apart(rows)
    reader = _EntryReader(groups)
    kinds = [reader.kind(entry) for entry in told]
    group, operation, pg_id, started, done = (
        np.array([getattr(k, name) for k in kinds]) for name in ("group", "operation", "pg_id", "started", "done")
    )
    pairs: dict[int, int] = {}
    for number, at in zip(pg_id.tolist(), group.tolist(), strict=True):
        pairs[number] = at if pairs.get(number, at) == at else -1
    operations = tuple(reader.operations)
    is_p2p = np.array([o.is_p2p for o in operations], dtype=bool)
    of = operation.astype(np.int32)[kind]
    collective, p2p, created = numbers.T
    entries = Entries(
        group=group.astype(np.int32)[kind],
        seq=np.where(is_p2p[of], p2p, collective),
        operation=of,
        created_at=created / 1e9,
        started=started.astype(bool)[kind],
        done=done.astype(bool)[kind],
        operations=operations,
        first_record=number_of(told[0].get("record_id", 0), "record_id") if told else 0,
    )
    return entries, pairs


# --- layout -------------------------------------------------------------------------------------------------------


def _apart(rows: list[Any]) -> tuple[list[dict[str, Any]], Indices, Ints]:
    """Distinct entries, the index of each row's entry, and the three numbers of each row (E, 3)."""
    place: dict[int, int] = {}
    told: list[dict[str, Any]] = []
    kind = np.zeros(len(rows), dtype=np.int32)
    for n, row in enumerate(rows):
        at = kind[n] = place.setdefault(id(row), len(told))
        if at == len(told):
            told.append(_entry(row))
    numbers = np.array([_numbers(entry) for entry in told], dtype=np.int64).reshape(-1, len(NUMBERS))
    return told, kind, numbers[kind]


def _put_back(rows: list[Any], cut: ExtractedEntries) -> tuple[list[dict[str, Any]], Indices, Ints]:
    """Like `_apart`, for a list in which each extracted entry is replaced by the number of its kind, the first of a
    kind followed by one full entry. Raises MalformedDump if the list differs from that."""
    told: list[dict[str, Any]] = []
    kind: list[int] = []  # index into `told`, by row
    own: dict[int, tuple[int, ...]] = {}  # numbers of the rows that were not extracted
    place: list[int] = []  # index into `told`, by kind
    met: list[int] = []
    following = iter(rows)
    for row in following:
        if type(row) is not int:
            entry = _entry(row)
            own[len(kind)] = _numbers(entry)
            kind.append(len(told))
            told.append(entry)
            continue
        if row == len(place) and told:
            place.append(len(told))
            told.append(_entry(next(following, None)))
        elif not 0 <= row < len(place):
            raise MalformedDump("an entry is a number")
        kind.append(place[row])
        met.append(row)
    if met != cut.kinds:
        raise MalformedDump("an entry is a number")
    numbers = np.zeros((len(kind), len(NUMBERS)), dtype=np.int64)
    of_own = np.zeros(len(kind), dtype=bool)
    of_own[list(own)] = True
    numbers[of_own] = np.array([*own.values()], dtype=np.int64).reshape(-1, len(NUMBERS))
    numbers[~of_own] = cut.numbers
    return told, np.array(kind, dtype=np.int32), numbers


def _entry(row: Any) -> dict[str, Any]:
    if type(row) is not dict:
        raise MalformedDump("an entry is not a table")
    return row


def _numbers(entry: dict[str, Any]) -> tuple[int, ...]:
    """In the order of NUMBERS."""
    found: list[int] = []
    for name in NUMBERS:
        value = entry.get(name, 0 if name == "p2p_seq_id" else None)
        if type(value) is not int or not -_INT64 <= value < _INT64:
            raise MalformedDump(f"the {name} of an entry is not a number")
        found.append(value)
    return tuple(found)


# --- fields ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    group: int
    operation: int
    pg_id: int
    started: bool
    done: bool


class _EntryReader:
    """Converts entries into kinds, and numbers their groups and operations."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self._groups = groups
        self._names = {g.name: i for i, g in enumerate(groups)}
        self.operations: dict[FlightRecorderOperation, int] = {}
        self._num_sizes = 0

    def kind(self, entry: dict[str, Any]) -> _Kind:
        state = entry.get("state")
        if type(state) is not str:
            raise MalformedDump("the state of an entry is not text")
        operation = self._operation(entry)
        done = state == "completed"
        if operation.backend == GLOO:
            # gloo's entries stay `scheduled`; only `retired` shows that they finished.
            done = done or entry.get("retired") is True
        return _Kind(
            group=self._group(entry.get("process_group")),
            operation=self.operations.setdefault(operation, len(self.operations)),
            pg_id=number_of(entry.get("pg_id", -1), "pg_id"),
            started=state in ("started", "completed"),
            done=done,
        )

    def _group(self, pair: Any) -> int:
        if type(pair) not in (tuple, list) or len(pair) != 2:
            raise MalformedDump("a process_group is not a name and a description")
        name, desc = text_of(pair[0], "process_group"), text_of(pair[1], "process_group")
        if name not in self._names:
            if len(self._groups) >= NUM_GROUPS_MAX:
                raise MalformedDump("more groups than there can be")
            self._names[name] = len(self._groups)
            self._groups.append(ProcessGroup(name=name, desc=desc, ranks=()))
        return self._names[name]

    def _operation(self, entry: dict[str, Any]) -> FlightRecorderOperation:
        name = entry.get("profiling_name")
        if type(name) is not str or len(name) > NUM_CHARACTERS_MAX:
            raise MalformedDump("a profiling_name is not a name")
        backend, kind, source, destination = _parsed_name(name)
        return FlightRecorderOperation(
            backend=backend,
            name=kind,
            input_sizes=self._sizes(entry.get("input_sizes", [])),
            input_dtypes=self._texts(entry.get("input_dtypes", [])),
            output_sizes=self._sizes(entry.get("output_sizes", [])),
            output_dtypes=self._texts(entry.get("output_dtypes", [])),
            is_p2p=entry.get("is_p2p") is True,
            source=source,
            destination=destination,
        )

    def _sizes(self, value: Any) -> tuple[tuple[int, ...], ...]:
        if type(value) is not list or len(value) > NUM_TENSORS_MAX:
            raise MalformedDump("sizes are not a list of lists")
        self._count(len(value))
        sizes = tuple(ints_of(size, NUM_DIMENSIONS_MAX, "sizes") for size in value)
        self._count(sum(map(len, sizes)))
        return sizes

    def _texts(self, value: Any) -> tuple[str, ...]:
        if type(value) is not list or len(value) > NUM_TENSORS_MAX:
            raise MalformedDump("dtypes are not a list")
        self._count(len(value))
        return tuple(text_of(v, "dtypes") for v in value)

    def _count(self, num: int) -> None:
        self._num_sizes += num
        if self._num_sizes > NUM_SIZES_MAX:
            raise MalformedDump(f"more than {NUM_SIZES_MAX:,} sizes")


_PEERS = re.compile(r"(send|recv) ([0-9]{1,7})(?:->|<-)([0-9]{1,7})")


@lru_cache(maxsize=4096)
def _parsed_name(profiling_name: str) -> tuple[str, str, int, int]:
    """`nccl:recv 3<-0` -> nccl, recv, 0, 3."""
    backend, _, name = safe(profiling_name).rpartition(":")
    peers = _PEERS.fullmatch(name)
    if peers is None:
        return backend, name, -1, -1
    kind, left, right = peers.groups()
    return (backend, kind, int(left), int(right)) if kind == "send" else (backend, kind, int(right), int(left))


def ints_of(value: Any, num_max: int, what: str) -> tuple[int, ...]:
    if (
        type(value) is not list
        or len(value) > num_max
        or not all(type(v) is int and -_INT64 <= v < _INT64 for v in value)
    ):
        raise MalformedDump(f"{what} are not a list of at most {num_max:,} numbers")
    return tuple(value)


def number_of(value: Any, what: str) -> int:
    """A 64-bit integer; JSON may have it as a string of digits."""
    if type(value) is str and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise MalformedDump(f"{what} is not a number")
    return value


def text_of(value: Any, what: str) -> str:
    if type(value) is not str:
        raise MalformedDump(f"{what} is not text")
    return safe(value[:NUM_CHARACTERS_MAX])
