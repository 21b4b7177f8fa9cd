"""The entries of a dump, as columns: each operation, its group, creation time and progress.

Input is PyTorch's list of dicts, or that list without its regular entries. In a hostile dump, one dict or list may be
referenced many times, so each traversal is counted and bounded.

Regular entries are extracted from the pickle at byte level (`extract`), which cuts the time to read it to a third. A
ring of thousands of entries has a few kinds, all with the same order of keys. Values that were written before are
references to the pickle's memo, so all entries of a kind but the first consist of references, numbers and lists of
these. One regular expression, built from the first such entry, finds them. In the remaining pickle, each is replaced by
the number of its kind, and the first of a kind is followed by one full entry. The three numbers that differ within a
kind become columns. The bytes are untrusted: the remaining pickle is read like any other, and the reader checks the
positions of the kinds. Bytes that do not match the pattern are left in place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.detector.base.plain_pickle import NUM_CHARACTERS_MAX, safe

NUMBERS = ("collective_seq_id", "p2p_seq_id", "time_created_ns")
"""Fields that increase within a kind."""
_UNUSED = ("frames", "record_id", "op_id", "time_discovered_started_ns", "time_discovered_completed_ns")
NUM_REGULAR_MAX = 100_000
"""Above this number of entries nothing is extracted: bounds the work on bytes that only resemble entries."""
NUM_TRIES_MAX = 2000
"""Dicts tried as the first regular entry: earlier ones contain new strings, or are frames of a stack."""
NUM_KEYS_MIN, NUM_KEYS_MAX = 8, 40

_GET = rb"(?>h.|j.{4})"
_NUMBER = rb"(?>K.|M..|J.{4}|\x8a\x08.{8})"
_GETS = rb"\](?>\(" + _GET + rb"{0,512}+e|(?!\())"
_SIZES = rb"\]\((?>\](?>\(" + _NUMBER + rb"{0,8}+e|(?!\())){0,512}+e"
_LIST = rb"(?>" + _GETS + rb"|" + _SIZES + rb")"
_VALUES = (_GET + _GET + rb"\x86", _GET, rb"[\x88\x89]", rb"(?>N|" + _NUMBER + rb")", _LIST)
"""Patterns of values. Each value of an entry must match the same pattern as in the first entry."""
_KEY_AND_VALUE = re.compile(rb"(" + _GET + rb")(" + rb"|".join(_VALUES) + rb")", re.DOTALL)
_ENTRY = re.compile(
    rb"\}\((?>" + _GET + rb"(?>" + rb"|".join(_VALUES) + rb")){%d,%d}+u" % (NUM_KEYS_MIN, NUM_KEYS_MAX), re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedEntries:
    """`rest`: the remaining pickle. `kinds`: of the R extracted entries, in order, numbered by first occurrence.
    `numbers`: (R, 3), columns as in NUMBERS."""

    rest: bytes
    kinds: list[int]
    numbers: NDArray[np.int64]


def extract(data: bytes, begin: int) -> ExtractedEntries | None:
    """`data`: a pickle of protocol 2, with the entries after `begin`. None: no regular entries were found."""
    numbers = [_reference(data, name) for name in NUMBERS]
    first, at = b"", begin
    for _ in range(NUM_TRIES_MAX):
        at = data.find(b"}(", at)
        if at < 0:
            break
        if match := _ENTRY.match(data, at):
            first = match.group()
            break
        at += 2
    if not first or not all(numbers):
        return None
    pairs = tuple(_KEY_AND_VALUE.findall(first[2:-1]))
    found = _pattern(pairs, tuple(numbers), tuple(_reference(data, name) for name in _UNUSED))
    if found is None or data.count(found.starts) > NUM_REGULAR_MAX:
        return None
    parts = found.entry.split(data)
    groups = [parts[i + 1 :: found.entry.groups + 1] for i in range(found.entry.groups)]
    kind_of: dict[tuple[bytes, ...], int] = {}
    kinds = [kind_of.setdefault(k, len(kind_of)) for k in zip(*(groups[i] for i in found.same), strict=True)]
    columns = [_integers(groups[i]) for i in found.numbers]
    marks = [b"J" + kind.to_bytes(4, "little") for kind in range(len(kind_of))]
    left = [marks[kind] for kind in kinds]
    keys = [numbers[found.numbers.index(i)] if i in found.numbers else b"" for i in range(len(groups))]
    for kind, row in dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True)).items():
        content = b"".join(key + group[row] for key, group in zip(keys, groups, strict=True))
        left[row] = marks[kind] + b"}(" + content + b"u"
    gaps = parts[:: found.entry.groups + 1]
    rest = b"".join(chain.from_iterable(zip(gaps, [*left, b""], strict=True)))
    return ExtractedEntries(rest=rest, kinds=kinds, numbers=np.stack(columns, axis=1))


def _reference(data: bytes, name: str) -> bytes:
    """The opcode that references `name` in the memo; empty if it was not written or not memoized."""
    text = b"X" + len(name).to_bytes(4, "little") + name.encode()
    end = data.find(text) + len(text)
    if end >= len(text):
        if data[end : end + 1] == b"q":
            return b"h" + data[end + 1 : end + 2]
        if data[end : end + 1] == b"r":
            return b"j" + data[end + 1 : end + 5]
    return b""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """`starts`: common prefix of all matches. Groups of `entry`: `numbers`, in the order of NUMBERS, and `same`."""

    entry: re.Pattern[bytes]
    starts: bytes
    numbers: tuple[int, ...]
    same: tuple[int, ...]


def _pattern(
    pairs: tuple[tuple[bytes, bytes], ...], numbers: tuple[bytes, ...], unused: tuple[bytes, ...]
) -> _Pattern | None:
    """Pattern for entries with these keys and similar values. Adjacent values that define a kind form one group."""
    runs: list[tuple[bytes, bytes]] = []  # (number's key, `same`, or empty for ignored values; pattern)
    same = b"same"
    for key, value in pairs:
        like = next(p for p in _VALUES if re.fullmatch(p, value, re.DOTALL))
        if like is _LIST:  # usually identical: a stack, a dtype
            like = rb"(?>" + re.escape(value) + rb"|" + like + rb")"
        if key in numbers:
            if re.fullmatch(_NUMBER, value, re.DOTALL) is None:
                return None
            runs.append((key, re.escape(key) + rb"(" + _NUMBER + rb")"))
        elif key in unused:
            runs.append((b"", re.escape(key) + like))
        elif runs and runs[-1][0] == same:
            runs[-1] = same, runs[-1][1] + re.escape(key) + like
        else:
            runs.append((same, re.escape(key) + like))
    groups = [who for who, _ in runs if who]
    if any(groups.count(n) != 1 for n in numbers):
        return None
    text = b"".join(rb"(" + p + rb")" if who == same else p for who, p in runs)
    return _Pattern(
        entry=re.compile(rb"\}\(" + text + rb"u", re.DOTALL),
        starts=b"}(" + pairs[0][0],
        numbers=tuple(groups.index(n) for n in numbers),
        same=tuple(i for i, who in enumerate(groups) if who == same),
    )


def _integers(opcodes: Sequence[bytes]) -> NDArray[np.int64]:
    """Values of complete `_NUMBER` opcodes."""
    table = np.array(opcodes, dtype="S10").view(np.uint8).reshape(-1, 10)  # zero-padded
    code = table[:, 0]
    long, short = (np.ascontiguousarray(table[:, a : a + 8]).view("<i8")[:, 0] for a in (2, 1))
    signed = np.ascontiguousarray(table[:, 1:5]).view("<i4")[:, 0]
    found: NDArray[np.int64] = np.where(code == 0x8A, long, np.where(code == ord("J"), signed, short))
    return found


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
Rows = NDArray[np.intp]
"""Indices of entries, in order."""
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
    unique, kind, numbers = _put_back(rows, cut) if cut is not None else _apart(rows)
    reader = _EntryReader(groups)
    kinds = np.array([reader.kind(entry) for entry in unique], dtype=np.int64).reshape(-1, 5)
    group, operation, pg_id, started, done = kinds.T
    pairs: dict[int, int] = {}
    for number, at in zip(pg_id.tolist(), group.tolist(), strict=True):
        pairs[number] = at if pairs.get(number, at) == at else -1
    operations = tuple(reader.operations)
    is_p2p = np.array([o.is_p2p for o in operations], dtype=bool)
    of = operation.astype(np.int32)[kind]
    collective, p2p, created = numbers.T
    in_group, seq = group.astype(np.int32)[kind], np.where(is_p2p[of], p2p, collective)
    ends = np.array([o.name.endswith("coalesced") for o in operations], dtype=bool)[of]
    state = _state_rows(in_group, is_p2p[of], seq, ends)
    entries = Entries(
        group=in_group,
        seq=seq,
        operation=of,
        created_at=created / 1e9,
        started=started.astype(bool)[kind][state],
        done=done.astype(bool)[kind][state],
        operations=operations,
        first_record=number_of(unique[0].get("record_id", 0), "record_id") if unique else 0,
    )
    return entries, pairs


def _state_rows(group: Indices, is_p2p: Bools, seq: Ints, ends: Bools) -> Rows:
    """The row that has the state of each row. Operations launched together (`batch_isend_irecv`, coalesced collectives)
    share a number; PyTorch updates only the last entry of a batch (`ends`), and theirs stay `scheduled`."""
    rows = np.arange(len(seq))
    if ends.any():
        keys = list(zip(group.tolist(), is_p2p.tolist(), seq.tolist(), strict=True))
        end_of = {keys[row]: row for row in np.flatnonzero(ends).tolist()}
        rows = np.array([end_of.get(key, row) for row, key in enumerate(keys)])
    return rows


def _apart(rows: list[Any]) -> tuple[list[dict[str, Any]], Indices, Ints]:
    """Distinct entries, the index of each row's entry, and the three numbers of each row (E, 3)."""
    place: dict[int, int] = {}
    unique: list[dict[str, Any]] = []
    kind = np.zeros(len(rows), dtype=np.int32)
    for n, row in enumerate(rows):
        at = kind[n] = place.setdefault(id(row), len(unique))
        if at == len(unique):
            unique.append(_entry(row))
    numbers = np.array([_numbers(entry) for entry in unique], dtype=np.int64).reshape(-1, len(NUMBERS))
    return unique, kind, numbers[kind]


def _put_back(rows: list[Any], cut: ExtractedEntries) -> tuple[list[dict[str, Any]], Indices, Ints]:
    """Like `_apart`, for a list in which each extracted entry is replaced by the number of its kind, the first of a
    kind followed by one full entry. Raises MalformedDump if the list differs from that."""
    unique: list[dict[str, Any]] = []
    kind: list[int] = []  # index into `unique`, by row
    own: dict[int, tuple[int, ...]] = {}  # numbers of the rows that were not extracted
    place: list[int] = []  # index into `unique`, by kind
    met: list[int] = []
    following = iter(rows)
    for row in following:
        if type(row) is not int:
            entry = _entry(row)
            own[len(kind)] = _numbers(entry)
            kind.append(len(unique))
            unique.append(entry)
            continue
        if row == len(place) and unique:
            place.append(len(unique))
            unique.append(_entry(next(following, None)))
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
    return unique, np.array(kind, dtype=np.int32), numbers


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


class _EntryReader:
    """Converts entries into kinds, and numbers their groups and operations."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self._groups = groups
        self._names = {g.name: i for i, g in enumerate(groups)}
        self.operations: dict[FlightRecorderOperation, int] = {}
        self._num_sizes = 0

    def kind(self, entry: dict[str, Any]) -> tuple[int, int, int, bool, bool]:
        """(group, operation, pg_id, whether it started, whether it is done)."""
        state = entry.get("state")
        if type(state) is not str:
            raise MalformedDump("the state of an entry is not text")
        operation = self._operation(entry)
        done = state == "completed"
        if operation.backend == GLOO:
            # gloo's entries stay `scheduled`; only `retired` shows that they finished.
            done = done or entry.get("retired") is True
        number = self.operations.setdefault(operation, len(self.operations))
        pg_id = number_of(entry.get("pg_id", -1), "pg_id")
        return self._group(entry.get("process_group")), number, pg_id, state in ("started", "completed"), done

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
    valid = type(value) is list and len(value) <= num_max
    if not valid or not all(type(v) is int and -_INT64 <= v < _INT64 for v in value):
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
