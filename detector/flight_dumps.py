"""Flight Recorder dumps, read safely: what each rank of a PyTorch job last did in its process groups.

A dump is a pickle or JSON that PyTorch writes per rank (torch/csrc/distributed/c10d/FlightRecorder, versions 2.x):
`pg_config` (groups and their ranks), `pg_status` (last enqueued, started and completed collective of each group) and
`entries`, a ring of the newest operations. It may come from a compromised machine, so nothing in it is trusted. A
pickle is first read opcode by opcode against the few that plain data need (no import, no call, no huge memo or
allocation), then by an unpickler that refuses every name; sizes, counts and types are bounded before they are used.
Whatever does not fit is UnreadableInput, with the file and, where it wanted to run something, what that was.
"""

import io
import json
import marshal
import os
import pickle
import pickletools
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from gc import disable, enable, isenabled
from itertools import repeat
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from rolecall.core.errors import UnreadableInput

SIZE_BYTES_MAX = 64 << 20
"""A dump of 2,000 entries, PyTorch's default, takes 0.3 to 1 MB; this is room for 100,000."""
NUM_CONTAINERS_MAX = 4_000_000
"""Dicts and lists: one byte of a pickle makes one of up to 232 bytes, so that this bounds memory to about 1 GB."""
NUM_ENTRIES_MAX = 1_000_000
NUM_GROUPS_MAX = 10_000
"""Of one rank, which is in a few dozen."""
NUM_RANKS_MAX = 1_000_000
NUM_TENSORS_MAX = 10_000
"""Of one operation: a fused one of a large model has hundreds."""
NUM_DIMENSIONS_MAX = 64
NUM_CHARACTERS_MAX = 200
"""Of a name that is quoted; the rest is cut off."""
HEAD_BYTES = 128 << 10
"""Read first where only the status is wanted: it stands before the entries, behind the ranks of each group."""
POOL_MIN = 64
"""Fewer files than this are read here: starting processes takes longer."""
CHUNK = 16
"""Files that a process is given at once."""

PICKLE_MAGIC = re.compile(rb"\x80[\x02-\x05]")
JSON_KEYS = (b'"entries"', b'"pg_config"', b'"pg_status"')
KEYS = ("entries", "pg_config", "pg_status")
GLOO = "gloo"

Ints = NDArray[np.int64]
Indices = NDArray[np.int32]
Bools = NDArray[np.bool_]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as this rank knows it. `ranks`: global, in order; empty where the dump does not say (gloo)."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Sequence numbers of the newest collective in each state; 0 or less: none yet."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What was asked for, without when. `source` and `destination`: places in the group, of `send` and `recv` only."""

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
    """The ring, oldest first, as columns of length E. `group` and `operation` index into the dump's; `seq` counts a
    group's collectives, or its point-to-point operations. `first_record`: what the ring no longer holds ends there."""

    group: Indices
    seq: Ints
    operation: Indices
    created_at: Seconds
    started: Bools
    done: Bools
    operations: tuple[Operation, ...]
    first_record: int

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """`written_at`: wall seconds, the file's. `status`: by index into `groups`. `entries`: None when not read. `host`:
    what its name says beside the rank; `folder`: the name of the folder it is in."""

    path: str
    rank: int
    host: str
    folder: str
    version: str
    written_at: float
    groups: tuple[Group, ...]
    status: dict[int, Status]
    entries: Entries | None


def is_dump(path: Path) -> bool:
    """Whether it begins like one: a pickle, or JSON with a dump's keys. False for pipes. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return PICKLE_MAGIC.match(head) is not None or (head.lstrip()[:1] == b"{" and any(k in head for k in JSON_KEYS))


def read(path: Path, *, entries: bool = True) -> Dump:
    """One dump; without `entries` only its head is read where it has the order in which PyTorch writes.

    Raises UnreadableInput: too large, cut short, not a dump, or something that plain data do not need.
    """
    where = str(path)
    try:
        with _collector_paused():
            return _read(path, where, entries)
    except OSError as e:
        raise UnreadableInput(where=where, reason=f"cannot be read: {e.strerror or e}") from e
    except MemoryError as e:
        raise UnreadableInput(where=where, reason="takes more memory than there is") from e


def read_many(
    paths: Sequence[Path],
    *,
    entries: bool = True,
    num_processes: int | None = None,
    told: Callable[[int], None] = lambda num: None,
) -> tuple[list[Dump], list[UnreadableInput]]:
    """All that can be read, in order, and why the others cannot. `told` hears how many are done so far."""
    dumps: list[Dump] = []
    unreadable: list[UnreadableInput] = []
    for n, got in enumerate(_each(paths, entries, num_processes or os.cpu_count() or 1), start=1):
        (dumps if isinstance(got, Dump) else unreadable).append(got)  # type: ignore[arg-type]
        told(n)
    return dumps, unreadable


def read_as_needed(
    paths: Sequence[Path],
    wanted: Callable[[Sequence[Dump]], set[int]],
    *,
    num_processes: int | None = None,
) -> tuple[list[Dump], list[UnreadableInput]]:
    """The fast way: the status of all, then the entries of those ranks that `wanted` asks for, until it asks no more."""
    dumps, unreadable = read_many(paths, entries=False, num_processes=num_processes)
    while True:
        chosen = wanted(dumps)
        missing = [i for i, d in enumerate(dumps) if d.entries is None and d.rank in chosen]
        if not missing:
            return dumps, unreadable
        whole, failed = read_many([Path(dumps[i].path) for i in missing], num_processes=num_processes)
        unreadable += failed
        by_path = {d.path: d for d in whole}
        lost = {e.where for e in failed}
        dumps = [by_path.get(d.path, d) for d in dumps if d.path not in lost]


def _each(paths: Sequence[Path], entries: bool, num_processes: int) -> Iterator[Dump | UnreadableInput]:
    if len(paths) < POOL_MIN or num_processes < 2:
        yield from (_read_or_error((path, entries)) for path in paths)
        return
    # Not forked: other threads of this process may hold locks.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_read_or_error, ((path, entries) for path in paths), chunksize=CHUNK)


def _read_or_error(asked: tuple[Path, bool]) -> Dump | UnreadableInput:
    try:
        return read(asked[0], entries=asked[1])
    except UnreadableInput as e:
        return e


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Tens of thousands of dicts come at once, none of them garbage: looking through them doubles the time."""
    was = isenabled()
    disable()
    try:
        yield
    finally:
        if was:
            enable()


def _read(path: Path, where: str, entries: bool) -> Dump:
    # Not to wait for a pipe that nobody writes to: Flight Recorder's own stand beside its dumps.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableInput(where=where, reason="not a regular file")
        if about.st_size > SIZE_BYTES_MAX:
            reason = f"{about.st_size:,} bytes, and a dump of more than {SIZE_BYTES_MAX:,} is not read"
            raise UnreadableInput(where=where, reason=reason)
        content: dict[str, Any] | None = None
        data = b""
        if not entries:
            data = _up_to(file, HEAD_BYTES)
            content = _head(data)
        if content is None:
            data += _up_to(file, about.st_size - len(data))
            content = _content(data, where)
            if not entries:
                content.pop("entries", None)
    return _dump(content, path, where, about.st_mtime)


def _up_to(file: io.FileIO, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while num_bytes > 0 and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _content(data: bytes, where: str) -> dict[str, Any]:
    if data[:1] == b"\x80":
        content = _unpickled(data, where)
    elif data.lstrip()[:1] == b"{":
        content = _from_json(data, where)
    else:
        raise UnreadableInput(where=where, reason="neither a pickle nor JSON" if data else "it is empty")
    if not isinstance(content, dict) or not any(k in content for k in KEYS):
        raise UnreadableInput(where=where, reason=f"not a Flight Recorder dump: it has none of {', '.join(KEYS)}")
    return content


# --- pickles ---------------------------------------------------------------------------------------------------------

# What plain data need, most frequent first; strings, whose length is in the data, are stepped over one by one. A memo
# index is held below 2**24 and a frame below 2**32 bytes, because the unpickler allocates all of them at once.
_RUN = re.compile(
    rb"(?:h.|[N\x88\x89\](}eua)s\x94\x85\x86\x87t]+|K.|J.{4}"
    rb"|\x8a(?:\x08.{8}|\x05.{5}|\x06.{6}|\x07.{7}|\x04.{4}|\x03.{3}|\x02.{2}|\x01.|\x00)"
    rb"|M..|q.|j.{4}|r.{3}\x00|G.{8}|\x95.{4}\x00{4})*+",
    re.DOTALL,
)
_ENTRIES_KEY = (b"X\x07\x00\x00\x00entries", b"\x8c\x07entries")
_SETITEMS_STOP = b"u."
_NUM_OPCODES_EXPLAINED = 1_000_000


class _PlainUnpickler(pickle.Unpickler):
    """The second lock: the opcodes that could come here are refused before."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: object) -> Never:
        raise pickle.UnpicklingError("it asks for an object from outside")


def _unpickled(data: bytes, where: str) -> Any:
    problem = _problem(data)
    if problem:
        raise UnreadableInput(where=where, reason=problem)
    try:
        return _loaded(data)
    except (pickle.UnpicklingError, EOFError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as e:
        raise UnreadableInput(where=where, reason=f"not a readable pickle: {_safe(str(e))}") from e


def _loaded(data: bytes) -> Any:
    # Only a stream with `peek` is read ahead; from any other the unpickler asks for a few bytes at a time.
    return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), buffer_size=1 << 20)).load()


def _problem(data: bytes) -> str:
    """Why this pickle is not read; empty when it holds nothing but plain data."""
    if not PICKLE_MAGIC.match(data):
        return "a pickle of an unknown protocol"
    if len(data) > NUM_CONTAINERS_MAX < data.count(b"}") + data.count(b"]"):
        return f"it may hold more than {NUM_CONTAINERS_MAX:,} lists and dicts"
    end, size = 2, len(data)
    while True:
        found = _RUN.match(data, end)
        assert found is not None  # it matches nothing at least
        end = found.end()
        opcode = data[end : end + 1]
        if opcode == b"X" and end + 5 <= size:
            end += 5 + int.from_bytes(data[end + 1 : end + 5], "little")
        elif opcode == b"\x8c" and end + 2 <= size:
            end += 2 + data[end + 1]
        elif opcode == b".":
            return "" if end + 1 == size else "something follows the end of the pickle"
        else:
            break
    # A string may reach beyond the end; nothing follows an opcode that is cut off.
    return _explained(data, min(end, size))


def _explained(data: bytes, end: int) -> str:
    """What the opcode at `end` is, in words: never executed, only named."""
    strings: list[str] = []
    memo: dict[int, str] = {}
    try:
        for n, (opcode, argument, place) in enumerate(pickletools.genops(data)):
            if n > _NUM_OPCODES_EXPLAINED:
                break
            name = opcode.name
            if place is not None and place >= end:
                if name in ("GLOBAL", "INST"):
                    return f"refused: it wants to run {_safe(str(argument).replace(' ', '.'))}, which no dump needs"
                if name == "STACK_GLOBAL":
                    return f"refused: it wants to run {_safe('.'.join(strings[-2:]))}, which no dump needs"
                return f"refused: it holds a {name}, which no dump needs"
            if "UNICODE" in name:
                strings.append(str(argument))
            elif name == "MEMOIZE":
                memo[len(memo)] = strings[-1] if strings else ""
            elif name in ("BINPUT", "LONG_BINPUT") and strings:
                memo[int(argument or 0)] = strings[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                strings.append(memo.get(int(argument or 0), "?"))
            del strings[:-2]
    except (ValueError, UnicodeError, IndexError, OverflowError):
        pass  # cut off in the midst of an opcode, or one that does not exist
    return "it is cut short, or damaged" if end >= len(data) else f"damaged at byte {end:,}, or cut short"


def _head(data: bytes) -> dict[str, Any] | None:
    """What stands before the entries, or None where they cannot be told apart: the beginning of a dict, closed."""
    end = min((at for key in _ENTRIES_KEY if (at := data.find(key)) > 0), default=0)
    if not end or data[:2] != b"\x80\x02":
        return None
    head = data[:end] + _SETITEMS_STOP
    if _problem(head):
        return None
    try:
        content = _loaded(head)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, reading the whole file will tell
        return None
    return content if isinstance(content, dict) and "pg_status" in content else None


# --- JSON ------------------------------------------------------------------------------------------------------------


def _from_json(data: bytes, where: str) -> Any:
    if data.count(b"{") + data.count(b"[") > NUM_CONTAINERS_MAX:
        raise UnreadableInput(where=where, reason=f"it may hold more than {NUM_CONTAINERS_MAX:,} lists and objects")
    try:
        return json.loads(data)
    except RecursionError as e:
        raise UnreadableInput(where=where, reason="not readable JSON: nested too deeply") from e
    except ValueError as e:  # UnicodeDecodeError, and integers of too many digits, too
        raise UnreadableInput(where=where, reason=f"not readable JSON: {_safe(str(e))}") from e


# --- what they hold --------------------------------------------------------------------------------------------------

_REQUIRED = ("process_group", "collective_seq_id", "profiling_name", "time_created_ns", "state")
_OPTIONAL: dict[str, Any] = {
    "pg_id": -1,
    "record_id": 0,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "retired": False,
    "input_sizes": [],
    "input_dtypes": [],
    "output_sizes": [],
    "output_dtypes": [],
}
"""Fields that older versions lack."""
_STATES = {"started": 1, "completed": 2}
_COLUMNS = itemgetter(
    "process_group", "collective_seq_id", "p2p_seq_id", "time_created_ns", "state", "retired", "pg_id"
)
_OPERATION = itemgetter("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "is_p2p")


def _dump(content: dict[str, Any], path: Path, where: str, written_at: float) -> Dump:
    rank, host = _rank_and_host(path.name)
    told = content.get("rank")
    if type(told) is int and 0 <= told < NUM_RANKS_MAX:
        rank = told
    if not 0 <= rank < NUM_RANKS_MAX:
        raise UnreadableInput(where=where, reason="neither the dump nor the name of its file tells its rank")
    try:
        groups = _groups(content.get("pg_config") or {})
        names = {g.name: i for i, g in enumerate(groups)}
        entries, pairs = None, dict[int, int]()
        if "entries" in content or "pg_status" not in content:
            entries, pairs = _entries(content.get("entries") or [], groups, names)
        status = _status(content.get("pg_status") or {}, groups, pairs)
    except _Malformed as e:
        raise UnreadableInput(where=where, reason=f"not a Flight Recorder dump: {e}") from e
    return Dump(
        path=where,
        rank=rank,
        host=host,
        folder=_safe(path.absolute().parent.name),
        version=_safe(str(content.get("version", ""))[:NUM_CHARACTERS_MAX]),
        written_at=written_at,
        groups=tuple(groups),
        status=status,
        entries=entries,
    )


class _Malformed(Exception):
    """What of a dump is not as PyTorch writes it."""


def _groups(config: Any) -> list[Group]:
    if not isinstance(config, dict) or len(config) > NUM_GROUPS_MAX:
        raise _Malformed("pg_config is not a table of groups")
    groups = []
    for name, about in config.items():
        if not isinstance(name, str) or not isinstance(about, dict):
            raise _Malformed("pg_config is not a table of groups")
        ranks = about.get("ranks", "[]")
        ranks = _ranks(ranks) if isinstance(ranks, str) else _ints(ranks, NUM_RANKS_MAX, "ranks")
        if not name and not ranks:
            continue  # gloo's only line, which stands for all of its groups and tells nothing of them
        groups.append(Group(name=_safe(name), desc=_text(about.get("desc", ""), "desc"), ranks=ranks))
    return groups


@lru_cache(maxsize=1024)
def _ranks(text: str) -> tuple[int, ...]:
    """`[0, 1, 2]`: a string where a list is meant, since PyTorch writes it so."""
    if not re.fullmatch(r"\[(?:[0-9]{1,7}(?:, ?[0-9]{1,7})*+)?\]", text):
        raise _Malformed("the ranks of a group are not a list of numbers")
    return tuple(sorted(json.loads(text)))


def _status(table: Any, groups: Sequence[Group], pairs: dict[int, int]) -> dict[int, Status]:
    """By group. The table goes by a number that `pairs`, from the entries, translates. Both the numbers and the names of
    groups count up as groups are made, and a group without operations is in no status: a number that no entry has is
    paired with the group at its place, if no entry says otherwise."""
    if not isinstance(table, dict) or len(table) > NUM_GROUPS_MAX:
        raise _Malformed("pg_status is not a table")
    read = {}
    for key, values in table.items():
        if not isinstance(values, dict):
            raise _Malformed("pg_status is not a table")
        numbers = (values.get(f"last_{what}_collective", 0) for what in ("enqueued", "started", "completed"))
        enqueued, started, completed = (_number(n, "pg_status") for n in numbers)
        read[_number(key, "pg_status")] = Status(enqueued=enqueued, started=started, completed=completed)
    by_order: dict[int, int] = {}
    if all(g.name.isdecimal() for g in groups):
        in_order = sorted(range(len(groups)), key=lambda i: int(groups[i].name))
        if all(0 <= pg_id < len(groups) for pg_id in read):
            by_order = {pg_id: in_order[pg_id] for pg_id in read}
        elif len(read) == len(groups):
            by_order = dict(zip(sorted(read), in_order, strict=True))
        if any(by_order.get(pg_id, group) != group for pg_id, group in pairs.items()):
            by_order = {}
    paired = {**by_order, **pairs}
    return {paired[pg_id]: status for pg_id, status in read.items() if paired.get(pg_id, -1) >= 0}


def _entries(rows: Any, groups: list[Group], names: dict[str, int]) -> tuple[Entries, dict[int, int]]:
    """The columns, and the group of each `pg_id` (-1: two groups have it). Adds the groups that `pg_config` lacks."""
    if not isinstance(rows, list) or len(rows) > NUM_ENTRIES_MAX:
        raise _Malformed(f"entries is not a list of at most {NUM_ENTRIES_MAX:,}")
    try:
        try:
            columns, keys = _columns(rows)
        except KeyError:
            rows = [_OPTIONAL | row for row in rows]
            columns, keys = _columns(rows)
        groups_of, collective_seq, p2p_seq, created, states, retired, pg_ids = columns
        first_row = dict(zip(reversed(keys), range(len(rows) - 1, -1, -1), strict=True))
        operations = tuple(_operation(_OPERATION(rows[n])) for n in first_row.values())
        place = {key: i for i, key in enumerate(first_row)}
        of = np.fromiter(map(place.__getitem__, keys), np.int32, len(rows))
        p2p = np.array([o.is_p2p for o in operations], dtype=bool)[of]
        state = np.fromiter(map(_STATES.get, states, repeat(0)), np.int8, len(rows))
        done = state == _STATES["completed"]
        if any(o.backend == GLOO for o in operations):
            # gloo's entries stay `scheduled`; that they are retired tells that they finished.
            gloo = np.array([o.backend == GLOO for o in operations], dtype=bool)[of]
            done |= gloo & np.array([r is True for r in retired], dtype=bool)
        group = _group_column(groups_of, groups, names)
        pairs: dict[int, int] = {}
        for pg_id, at in set(zip(pg_ids, group, strict=True)):
            pairs[_number(pg_id, "pg_id")] = at if pairs.get(pg_id, at) == at else -1
        entries = Entries(
            group=np.array(group, dtype=np.int32),
            seq=np.where(p2p, _int_column(p2p_seq), _int_column(collective_seq)),
            operation=of,
            created_at=_int_column(created) / 1e9,
            started=state > 0,
            done=done,
            operations=operations,
            first_record=_number(rows[0].get("record_id", 0), "record_id") if rows else 0,
        )
    except KeyError as e:
        raise _Malformed(f"an entry has no {_safe(str(e))}") from e
    except (TypeError, ValueError, OverflowError, AttributeError) as e:
        raise _Malformed(f"an entry is not as it should be: {_safe(str(e))}") from e
    return entries, pairs


def _columns(rows: list[Any]) -> tuple[tuple[Sequence[Any], ...], list[bytes]]:
    # Both run through in C: this is most of what reading costs beside the unpickler. Equal operations have equal bytes
    # nearly always; where they do not, the table of operations only holds one twice.
    keys = list(map(marshal.dumps, map(_OPERATION, rows)))
    columns = tuple(zip(*map(_COLUMNS, rows), strict=True)) if rows else ((),) * 7
    return columns, keys


def _group_column(pairs: Sequence[Any], groups: list[Group], names: dict[str, int]) -> list[int]:
    if any(type(p) is list for p in pairs):
        pairs = [tuple(p) if type(p) is list else p for p in pairs]
    known: dict[Any, int] = {}
    for pair in dict.fromkeys(pairs):
        if type(pair) is not tuple or len(pair) != 2:
            raise _Malformed("a process_group is not a name and a description")
        name, desc = _text(pair[0], "process_group"), _text(pair[1], "process_group")
        if name not in names:
            if len(groups) >= NUM_GROUPS_MAX:
                raise _Malformed("more groups than there can be")
            names[name] = len(groups)
            groups.append(Group(name=name, desc=desc, ranks=()))
        known[pair] = names[name]
    return [known[pair] for pair in pairs]


_PEERS = re.compile(r"(send|recv) ([0-9]{1,7})(?:->|<-)([0-9]{1,7})")


@lru_cache(maxsize=4096)
def _parsed_name(profiling_name: str) -> tuple[str, str, int, int]:
    """`nccl:recv 3<-0` -> nccl, recv, 0, 3."""
    backend, _, name = _safe(profiling_name).rpartition(":")
    peers = _PEERS.fullmatch(name)
    if peers is None:
        return backend, name, -1, -1
    kind, left, right = peers.groups()
    return (backend, kind, int(left), int(right)) if kind == "send" else (backend, kind, int(right), int(left))


def _operation(values: tuple[Any, ...]) -> Operation:
    name, input_sizes, input_dtypes, output_sizes, output_dtypes, is_p2p = values
    if type(name) is not str or len(name) > NUM_CHARACTERS_MAX:
        raise _Malformed("a profiling_name is not a name")
    backend, kind, source, destination = _parsed_name(name)
    return Operation(
        backend=backend,
        name=kind,
        input_sizes=_sizes(input_sizes),
        input_dtypes=_texts(input_dtypes),
        output_sizes=_sizes(output_sizes),
        output_dtypes=_texts(output_dtypes),
        is_p2p=is_p2p is True,
        source=source,
        destination=destination,
    )


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if type(value) is not list or len(value) > NUM_TENSORS_MAX:
        raise _Malformed("sizes are not a list of lists")
    return tuple(_ints(size, NUM_DIMENSIONS_MAX, "sizes") for size in value)


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > NUM_TENSORS_MAX:
        raise _Malformed("dtypes are not a list")
    return tuple(_text(v, "dtypes") for v in value)


def _ints(value: Any, num_max: int, what: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > num_max or not all(type(v) is int for v in value):
        raise _Malformed(f"{what} are not a list of at most {num_max:,} numbers")
    return tuple(value)


def _int_column(values: Sequence[Any]) -> Ints:
    if set(map(type, values)) - {int}:
        raise _Malformed("something else stands where a number should")
    return np.array(values, dtype=np.int64)


def _number(value: Any, what: str) -> int:
    """An integer, or in JSON its digits."""
    if type(value) is str and re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _Malformed(f"{what} is not a number")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise _Malformed(f"{what} is not text")
    return _safe(value[:NUM_CHARACTERS_MAX])


def _safe(text: str) -> str:
    """For terminals and logs: printable ASCII, everything else escaped; not too long."""
    if text.isascii() and text.isprintable():
        return text[:NUM_CHARACTERS_MAX]
    return text[:NUM_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")


_SUFFIX = re.compile(r"\.(?:pickle|pkl|json|dump|bin|trace|txt)$", re.IGNORECASE)
_RANK = re.compile(r"rank[_.=-]*([0-9]{1,7})", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]{1,7})(?![0-9]|.*[0-9])")
_NO_HOST = re.compile(
    r"(?<![a-z0-9])(?:nccl|ncclx|gloo|comm|lib|trace|traces|rank|dump|flight|recorder|fr|debug|info|pg)(?![a-z0-9])"
)
_HOST = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def _rank_and_host(name: str) -> tuple[int, str]:
    """`node7_nccl_trace_rank_12` -> 12, `node7`. -1 without a number; the host is empty where nothing is left of the
    name. The rank follows the word, or is the last number."""
    stem = _SUFFIX.sub("", name)
    found = [*_NUMBER.finditer(stem), *_RANK.finditer(stem)]
    if not found:
        return -1, ""
    rest = _NO_HOST.sub("", f"{stem[: found[-1].start()]}_{stem[found[-1].end() :]}".lower().replace("_", " ").strip())
    host = re.sub(r"[ _]+", "_", rest).strip("_.- ")
    return int(found[-1].group(1)), host if _HOST.fullmatch(host) else ""
