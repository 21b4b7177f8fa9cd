"""Reads Flight Recorder dumps: the last operations of each rank of a PyTorch job in its process groups.

A dump is a pickle or JSON that PyTorch writes per rank (torch/csrc/distributed/c10d/FlightRecorder, versions 2.x):
`pg_config` (groups and their ranks), `pg_status` (last enqueued, started and completed collective of each group) and
`entries`, a ring of the newest operations. Dumps are untrusted, since they may come from a compromised machine: the
pickle reader (detector/base/plain_pickle.py) can neither import nor call, and sizes, counts and types are checked
before use. Anything else raises UnreadableInput, with the file and any call that the pickle attempted.
"""

import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from gc import disable, enable, isenabled
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.detector.artifacts.flight_recorder.entries import (
    NUM_GROUPS_MAX,
    Entries,
    ExtractedEntries,
    MalformedDump,
    ProcessGroup,
    columns,
    extract,
    ints_of,
    number_of,
    text_of,
)
from rolecall.detector.base.plain_pickle import (
    CONTAINER_BYTES,
    MAGIC,
    NUM_CONTAINERS_MAX,
    READ_BYTES_MAX,
    TEXT_FACTOR,
    UnsafePickle,
    loads,
    refuse_beyond,
    safe,
)
from rolecall.detector.base.read_budget import Budget, Check, head_of, no_check

SIZE_BYTES_MAX = 64 << 20
"""A dump of 2,000 entries, PyTorch's default, takes 0.3 to 1 MB; this allows for 100,000."""
RANK_MAX = 1_000_000
NUM_RANKS_MAX = 2_000_000
"""All groups of one dump together."""
HEAD_BYTES = 128 << 10
"""Read first if only the status is needed: it comes after the ranks of each group and before the entries."""
POOL_MIN = 64
"""Fewer files than this are read in this process: starting others takes longer."""
TASK_FILES_MAX = 8
"""Files per task of a worker process."""
TASK_SHARE_MAX = 0.25
"""Of the memory for reading; a file that needs more is a task alone."""
RESULT_SHARE = 0.375
"""What is kept of a dump takes at most this share of what reading it may: 40 bytes for a size that takes two."""
NUM_PROCESSES_MAX = 8
"""Each takes 40 MB before it reads anything."""
READ_FACTOR, READ_BYTES_MIN = 64, 8 << 20
"""A read may take this many times the size of its file, and this much more: PyTorch's dumps take less than half."""
JSON_VALUE_BYTES, JSON_PAIR_BYTES = 48, 100
NUM_TASKS_EACH = 2
"""Maximum tasks in flight per worker process: finished results that are not yet consumed take memory."""

JSON_KEYS = (b'"entries"', b'"pg_config"', b'"pg_status"')
KEYS = ("entries", "pg_config", "pg_status")


class Status(NamedTuple):
    """Sequence numbers of the newest collective in each state; 0 or less: none yet."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderDump:
    """`written_at`: wall seconds, from the file. `status`: by index into `groups`. `entries`: None if not read. `host`:
    the rest of the file name without the rank; `folder`: the name of the parent folder."""

    path: str
    rank: int
    host: str
    folder: str
    version: str
    written_at: float
    groups: tuple[ProcessGroup, ...]
    status: dict[int, Status]
    entries: Entries | None


def is_dump(path: Path) -> bool:
    """Whether the file begins like a dump: a pickle, or JSON with a dump's keys. False for pipes. Raises OSError."""
    head = head_of(path, 4096)
    return MAGIC.match(head) is not None or (head.lstrip()[:1] == b"{" and any(k in head for k in JSON_KEYS))


@dataclass(frozen=True, slots=True)
class Reading:
    """Limits of reading one file: memory, and a check for the deadline."""

    bytes_max: int = READ_BYTES_MAX
    check: Check = no_check


def read(path: Path, *, entries: bool = True, reading: Reading = Reading()) -> FlightRecorderDump:
    """Reads one dump; without `entries`, only its head if the keys are in PyTorch's order. Raises UnreadableInput: too
    large, cut short, not a dump, not plain data, or beyond the limits of `reading`."""
    where = str(path)
    try:
        with _collector_paused():
            return _read(path, where, entries, reading)
    except UnsafePickle as e:
        raise UnreadableInput(where=where, reason=str(e)) from None
    except MalformedDump as e:
        raise UnreadableInput(where=where, reason=f"not a Flight Recorder dump: {e}") from None
    except OSError as e:
        raise UnreadableInput(where=where, reason=f"cannot be read: {e.strerror or e}") from e
    except MemoryError as e:
        raise UnreadableInput(where=where, reason="takes more memory than there is") from e


def read_many(
    paths: Sequence[Path],
    *,
    entries: bool = True,
    num_processes: int | None = None,
    progress: Callable[[int], None] = lambda num: None,
    budget: Budget | None = None,
) -> tuple[list[FlightRecorderDump], list[UnreadableInput]]:
    """The readable dumps, in order, and the errors of the others. `progress` is called with the number of files done.
    Ends early if the budget is used up, which the budget then says. Raises UnreadableInput: a worker process was
    killed."""
    dumps: list[FlightRecorderDump] = []
    unreadable: list[UnreadableInput] = []
    budget, counted = budget or Budget(), set[tuple[str, int]]()
    with closing(_each(paths, entries, num_processes or os.cpu_count() or 1, budget)) as each, suppress(ReadingStopped):
        for number, (path, got) in enumerate(zip(paths, each, strict=True), start=1):
            if isinstance(got, FlightRecorderDump):
                budget.keep(_kept_bytes(got, counted), str(path))
                dumps.append(got)
            elif isinstance(got, ReadingStopped):
                budget.stop(got)
            else:
                unreadable.append(got)
            progress(number)
    return dumps, unreadable


def _kept_bytes(dump: FlightRecorderDump, counted: set[tuple[str, int]]) -> int:
    """Upper estimate of the memory of a dump and of the structures derived from it. Dumps of one job share a few lists
    of ranks: `counted` holds those already counted, by group and object."""
    num_bytes = 32 * len(dump.entries or ()) + 512 * (len(dump.groups) + len(dump.status))
    for group in dump.groups:
        if (met := (group.name, id(group.ranks))) not in counted:
            counted.add(met)
            num_bytes += 48 * len(group.ranks)
    for operation in dump.entries.operations if dump.entries is not None else ():
        sizes = (*operation.input_sizes, *operation.output_sizes)
        dtypes = (*operation.input_dtypes, *operation.output_dtypes)
        num_bytes += 512 + 64 * (len(sizes) + len(dtypes)) + 40 * sum(map(len, sizes)) + sum(map(len, dtypes))
    return num_bytes


def read_as_needed(
    paths: Sequence[Path],
    wanted: Callable[[Sequence[FlightRecorderDump]], set[int]],
    *,
    num_processes: int | None = None,
    budget: Budget | None = None,
) -> tuple[list[FlightRecorderDump], list[UnreadableInput]]:
    """The fast path: reads the status of all dumps, then the entries of the ranks from `wanted`, until it has none, or
    the budget is used up. Raises UnreadableInput: a worker process was killed."""
    budget = budget or Budget()
    dumps, unreadable = read_many(paths, entries=False, num_processes=num_processes, budget=budget)
    asked: set[str] = set()  # some dumps have no entries: request each once
    while True:
        chosen = wanted(dumps)
        missing = [i for i, d in enumerate(dumps) if d.entries is None and d.rank in chosen and d.path not in asked]
        if not missing or budget.stopped is not None:
            return dumps, unreadable
        again = [Path(dumps[i].path) for i in missing]
        whole, failed = read_many(again, num_processes=num_processes, budget=budget)
        unreadable += failed
        asked.update(dumps[i].path for i in missing)
        by_path = {d.path: d for d in whole}
        lost = {e.where for e in failed}
        dumps = [by_path.get(d.path, d) for d in dumps if d.path not in lost]


def read_bytes(path: Path, bytes_max: int) -> int:
    """The memory that reading this file may take, by its size."""
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # reading it reports the error
    return min(bytes_max, READ_FACTOR * size + READ_BYTES_MIN)


def _each(
    paths: Sequence[Path], entries: bool, num_processes: int, budget: Budget
) -> Generator[FlightRecorderDump | UnreadableInput]:
    most = min(READ_BYTES_MAX, budget.reading_bytes_max)
    if len(paths) < POOL_MIN or num_processes < 2:
        for path in paths:
            yield _read_or_error(path, entries, Reading(read_bytes(path, most), budget.check(path)))
        return
    # A process may keep what it took for its largest file, so all together must be able to.
    largest = max(read_bytes(path, most) for path in paths)
    num_processes = min(num_processes, NUM_PROCESSES_MAX, max(1, most // largest))
    deadline = SystemClock().monotonic() + budget.seconds_left  # the same clock in all processes of this machine
    waiting: deque[tuple[int, Future[list[FlightRecorderDump | UnreadableInput]]]] = deque()
    # Not forked: other threads of this process may hold locks.
    try:
        with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
            try:
                for task in _tasks([(path, read_bytes(path, most)) for path in paths], most):
                    needed = _task_bytes(task)
                    while waiting and not _fits([b for b, _ in waiting], needed, num_processes, most):
                        yield from waiting.popleft()[1].result()
                    waiting.append((needed, pool.submit(_read_task, task, entries, deadline)))
                while waiting:
                    yield from waiting.popleft()[1].result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # the rest may not be needed
    except BrokenProcessPool:
        reason = f"a process that read {len(paths):,} dumps was ended from outside, perhaps for want of memory"
        raise UnreadableInput(where=str(paths[0].parent), reason=reason) from None


def _tasks(files: Sequence[tuple[Path, int]], bytes_max: int) -> Iterator[list[tuple[Path, int]]]:
    task = list[tuple[Path, int]]()
    for file in files:
        if task and (len(task) == TASK_FILES_MAX or _task_bytes([*task, file]) > TASK_SHARE_MAX * bytes_max):
            yield task
            task = []
        task.append(file)
    yield task


def _task_bytes(task: Sequence[tuple[Path, int]]) -> int:
    """A process reads one file after the other and has the results of all until the task is done."""
    num_bytes = [b for _, b in task]
    return max(num_bytes) + int(RESULT_SHARE * sum(num_bytes))


def _fits(in_flight: Sequence[int], needed: int, num_processes: int, bytes_max: int) -> bool:
    """Whether one more task may begin: large files leave memory for fewer readers at once."""
    return len(in_flight) < NUM_TASKS_EACH * num_processes and sum(in_flight) + needed <= bytes_max


def _read_task(
    files: Sequence[tuple[Path, int]], entries: bool, deadline: float, clock: Clock = SystemClock()
) -> list[FlightRecorderDump | UnreadableInput]:
    def check_of(path: Path) -> Check:
        def check() -> None:
            if clock.monotonic() > deadline:
                reason = "not read to its end in the time of a call; no more are read: name fewer files"
                raise ReadingStopped(where=str(path), reason=reason)

        return check

    return [_read_or_error(path, entries, Reading(num_bytes, check_of(path))) for path, num_bytes in files]


def _read_or_error(path: Path, entries: bool, reading: Reading) -> FlightRecorderDump | UnreadableInput:
    try:
        reading.check()
        return read(path, entries=entries, reading=reading)
    except UnreadableInput as e:
        return e


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Tens of thousands of live dicts are created at once; scanning them for garbage would double the time."""
    was = isenabled()
    disable()
    try:
        yield
    finally:
        if was:
            enable()


def _read(path: Path, where: str, entries: bool, reading: Reading) -> FlightRecorderDump:
    # A pipe without a writer would block: Flight Recorder leaves its own next to its dumps.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableInput(where=where, reason="not a regular file")
        if about.st_size > SIZE_BYTES_MAX:
            reason = f"{about.st_size:,} bytes, and a dump of more than {SIZE_BYTES_MAX:,} is not read"
            raise UnreadableInput(where=where, reason=reason)
        data = b""
        if not entries:
            data = file.read(HEAD_BYTES)
            if (status := _head(data)) is not None:
                return _dump(status, path, where, about.st_mtime)
        data += file.read(max(0, about.st_size - len(data)))
    if data[:1] != b"\x80":
        return _dump(_from_json(data, reading.bytes_max), path, where, about.st_mtime, entries=entries)
    found = extract(data, data.find(_ENTRIES_KEY)) if entries else None
    if found is not None:
        try:
            rest = loads(found.rest, bytes_max=reading.bytes_max, check=reading.check)
            return _dump(rest, path, where, about.st_mtime, cut=found)
        except (UnsafePickle, MalformedDump):
            pass  # a false match, or a malformed dump: reading the whole pickle decides
    content = loads(data, bytes_max=reading.bytes_max, check=reading.check)
    return _dump(content, path, where, about.st_mtime, entries=entries)


def _head(data: bytes) -> Any:
    """The part before the entries, closed as a dict; None if their beginning is not found."""
    end = data.find(_ENTRIES_KEY)
    if end < 0 or data[:2] != b"\x80\x02":
        return None
    try:
        content = loads(data[:end] + _SETITEMS_STOP)
    except UnsafePickle:
        return None  # reading the whole file reports the error
    return content if isinstance(content, dict) and "pg_status" in content else None


_ENTRIES_KEY = b"X\x07\x00\x00\x00entries"
_SETITEMS_STOP = b"u."


def _from_json(data: bytes, bytes_max: int) -> Any:
    """Raises UnsafePickle."""
    if data.lstrip()[:1] != b"{":
        raise UnsafePickle("neither a pickle nor JSON" if data else "it is empty")
    if data.count(b"{") + data.count(b"[") > NUM_CONTAINERS_MAX:
        raise UnsafePickle(f"it may hold more than {NUM_CONTAINERS_MAX:,} lists and objects")
    needed = CONTAINER_BYTES * (data.count(b"{") + data.count(b"[")) + TEXT_FACTOR * len(data)
    refuse_beyond(needed + JSON_VALUE_BYTES * data.count(b",") + JSON_PAIR_BYTES * data.count(b":"), bytes_max)
    try:
        return json.loads(data)
    except RecursionError:
        raise UnsafePickle("not readable JSON: nested too deeply") from None
    except ValueError as e:  # includes UnicodeDecodeError, and integers with too many digits
        raise UnsafePickle(f"not readable JSON: {safe(str(e))}") from None


def _dump(
    content: Any,
    path: Path,
    where: str,
    written_at: float,
    *,
    entries: bool = True,
    cut: ExtractedEntries | None = None,
) -> FlightRecorderDump:
    """Raises MalformedDump."""
    if not isinstance(content, dict) or not any(k in content for k in KEYS):
        raise MalformedDump(f"it has none of {', '.join(KEYS)}")
    rank, host = _rank_and_host(path.name)
    stated = content.get("rank")
    if type(stated) is int and 0 <= stated <= RANK_MAX:
        rank = stated
    if not 0 <= rank <= RANK_MAX:
        raise MalformedDump("neither it nor the name of its file gives its rank")
    groups = _groups(content.get("pg_config") or {})
    rows, pairs = None, dict[int, int]()
    if entries and ("entries" in content or "pg_status" not in content):
        rows, pairs = columns(content.get("entries") or [], groups, cut)
    return FlightRecorderDump(
        path=where,
        rank=rank,
        host=host,
        folder=safe(path.absolute().parent.name),
        version=text_of(content.get("version", ""), "version"),
        written_at=written_at,
        groups=tuple(groups),
        status=_status(content.get("pg_status") or {}, groups, pairs),
        entries=rows,
    )


def _groups(config: Any) -> list[ProcessGroup]:
    if not isinstance(config, dict) or len(config) > NUM_GROUPS_MAX:
        raise MalformedDump("pg_config is not a table of groups")
    groups, num_ranks = [], 0
    for name, about in config.items():
        if not isinstance(about, dict):
            raise MalformedDump("pg_config is not a table of groups")
        stated = about.get("ranks", "[]")
        ranks = _ranks(stated) if isinstance(stated, str) else ints_of(stated, NUM_RANKS_MAX, "ranks")
        num_ranks += len(ranks)
        if num_ranks > NUM_RANKS_MAX or (ranks and not 0 <= min(ranks) <= max(ranks) <= RANK_MAX):
            raise MalformedDump(f"the ranks of its groups are not at most {NUM_RANKS_MAX:,} numbers up to {RANK_MAX:,}")
        if not name and not ranks:
            continue  # gloo's only status line, shared by all of its groups
        groups.append(ProcessGroup(name=safe(name), desc=text_of(about.get("desc", ""), "desc"), ranks=ranks))
    return groups


@lru_cache(maxsize=64)
def _ranks(text: str) -> tuple[int, ...]:
    """Parses `[0, 1, 2]`: PyTorch writes the list as a string."""
    if not re.fullmatch(r"\[(?:[0-9]{1,7}(?:, ?[0-9]{1,7})*+)?\]", text):
        raise MalformedDump("the ranks of a group are not a list of numbers")
    return tuple(sorted(map(int, text[1:-1].split(",")))) if len(text) > 2 else ()


def _status(table: Any, groups: Sequence[ProcessGroup], pairs: dict[int, int]) -> dict[int, Status]:
    """Status by group. The table is indexed by a number that `pairs`, from the entries, maps to a group. Both the
    numbers and the names of groups increase in order of creation, and a group without operations has no status: a
    number without entries is paired with the group at the same position, unless an entry contradicts that."""
    if not isinstance(table, dict) or len(table) > NUM_GROUPS_MAX:
        raise MalformedDump("pg_status is not a table")
    read = {}
    for key, values in table.items():
        if not isinstance(values, dict):
            raise MalformedDump("pg_status is not a table")
        numbers = (values.get(f"last_{what}_collective", 0) for what in ("enqueued", "started", "completed"))
        read[number_of(key, "pg_status")] = Status(*(number_of(n, "pg_status") for n in numbers))
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


_SUFFIX = re.compile(r"\.(?:pickle|pkl|json|dump|bin|trace|txt)$", re.IGNORECASE)
_RANK = re.compile(r"rank[_.=-]*([0-9]{1,7})", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]{1,7})(?![0-9]|.*[0-9])")
_NO_HOST = re.compile(
    r"(?<![a-z0-9])(?:nccl|ncclx|gloo|comm|lib|trace|traces|rank|dump|flight|recorder|fr|debug|info|pg)(?![a-z0-9])"
)
_HOST = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def _rank_and_host(name: str) -> tuple[int, str]:
    """`node7_nccl_trace_rank_12` -> 12, `node7`. The rank is the number after `rank`, else the last number, else -1;
    the host is empty if nothing else remains of the name."""
    stem = _SUFFIX.sub("", name)
    found = [*_NUMBER.finditer(stem), *_RANK.finditer(stem)]
    if not found:
        return -1, ""
    rest = _NO_HOST.sub("", f"{stem[: found[-1].start()]}_{stem[found[-1].end() :]}".lower().replace("_", " ").strip())
    host = re.sub(r"[ _]+", "_", rest).strip("_.- ")
    return int(found[-1].group(1)), host if _HOST.fullmatch(host) else ""
