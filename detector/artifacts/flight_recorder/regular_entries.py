"""Extracts the regular entries of a dump from its pickle at byte level, which cuts the time to read it to a third.

A ring of thousands of entries has a few kinds, all with the same order of keys. Values that were written before are
references to the pickle's memo, so all entries of a kind but the first consist of references, numbers and lists of
these. One regular expression, built from the first such entry, finds them. In the remaining pickle, each is replaced by
the number of its kind, and the first of a kind is followed by one full entry. The three numbers that differ within a
kind become columns.

The bytes are untrusted: the remaining pickle is read like any other, and the reader checks the positions of the kinds.
Bytes that do not match the pattern are left in place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

NUMBERS = ("collective_seq_id", "p2p_seq_id", "time_created_ns")
"""Fields that increase within a kind."""
_UNUSED = (
    "frames",
    "record_id",
    "op_id",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
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


def cut(data: bytes, begin: int) -> ExtractedEntries | None:
    """`data`: a pickle of protocol 2, with the entries after `begin`. None: no regular entries were found."""
    numbers = [_reference(data, name) for name in NUMBERS]
    first = _first_entry(data, begin)
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
        told = b"".join(key + group[row] for key, group in zip(keys, groups, strict=True))
        left[row] = marks[kind] + b"}(" + told + b"u"
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


def _first_entry(data: bytes, begin: int) -> bytes:
    at = begin
    for _ in range(NUM_TRIES_MAX):
        at = data.find(b"}(", at)
        if at < 0:
            break
        if found := _ENTRY.match(data, at):
            return found.group()
        at += 2
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
