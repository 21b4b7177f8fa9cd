"""Reads and normalizes stack dumps of many processes. The text is untrusted: sizes and counts are bounded.

Formats, recognized by content: `py-spy dump --json`, the text of `py-spy dump`, and an agent's response of
`/v1/evidence/stacks`. An agent's response identifies its process, and has the stacks of the engine processes below it;
otherwise the names of the file and its folders do, and a topology file adds the rest: `{"role", "world_size", "ranks":
{"3": {"node", "replica", "pid"}}, "parallel": {"tp": 2, "pp": 4, "dp": 4}, "groups": {"pp": [[0, 2], [1, 3]]}}`, each
part optional. The first axis of `parallel` varies fastest with the rank, as in Megatron. Ranks are global: of the whole
role, not of one replica.

Names that identify process and round, of which missing parts stay unknown:

    trainer-1_rank3.json    rank_3.json    trainer_rank3_of_8.txt    node-2/trainer-0-pid123.txt    dp0_pp1_tp0.json
    round_2/rank_3.json     rank_3_round2.json    2/rank_3.json    rank_3.2.json

A frame becomes `file:function`, so that processes at the same place compare equal: no line numbers, addresses,
installation prefixes or template arguments; generated names are folded.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rolecall.core.diagnosis import Suspect
from rolecall.core.errors import UnreadableInput
from rolecall.core.ids import NodeId, role_of
from rolecall.detector.base.read_budget import Check, head_of, no_check

WORLD_SIZE_MAX = 200_000
AXES = ("tp", "pp", "dp", "ep", "cp")
"""Kinds of parallel group that file names may contain: tensor, pipeline, data, expert, context."""

# A `local_rank` exists on every node, and a `node_rank` identifies the node: neither identifies a process of the role.
_RANK = re.compile(
    r"(?<![a-z])(?<!local[-_.])(?<!node[-_.])(?:global_?)?rank[-_=.]?(\d{1,7})(?:[-_]?of[-_]?(\d{1,7}))?(?!\d)"
)
_PID = re.compile(r"(?<![a-z])pid[-_=.]?(\d{1,10})(?!\d)")
_AXIS = re.compile(rf"(?<![a-z])({'|'.join(AXES)})[-_=]?(\d{{1,6}})(?!\d)")
_NODE = re.compile(r"(?<![a-z])((?:node|host|machine)(?:=[^_,]+|[-_]?[a-z0-9]*\d[a-z0-9]*))", re.IGNORECASE)
_NODE_FOLDER = re.compile(r"(?:node|host|machine)(?:[-_]?\d{1,5}(?:\.[a-z][\w.-]*)?|=.+)\Z", re.IGNORECASE)
"""One node, with its domain or without. `hosts_20261122` and `node-logs-2026-11-22` hold the files of several."""
_KNOWN_ROLE = r"trainer-standby|trainer|rollout|reward|reference|critic|controller|standby"
_ROLE = re.compile(rf"(?<![a-z0-9])({_KNOWN_ROLE})(?![a-z])(?:[-/]?(\d{{1,6}})(?!\d))?")
_OTHER_ROLE = re.compile(r"([a-z]{2,30})-(\d{1,6})(?=[-_.]?(?:rank|pid|round)|\Z)")
_ROUND_WORD = r"round|look|sample|snapshot|take"
_ROUND = re.compile(rf"(?<![a-z])(?:{_ROUND_WORD})[-_=.]?(\d{{1,18}})(?!\d)", re.IGNORECASE)
_ROUND_FOLDER = re.compile(r"\d{1,18}\Z")
_ROUND_LAST = re.compile(r"[-_.](\d{1,18})\Z")
_NO_ROLES = frozenset(
    (
        *(*AXES, *_ROUND_WORD.split("|"), "rank", "local", "pid", "node", "host", "machine", "stack", "stacks", "dump"),
        *("process", "pyspy", "spy", "worker"),
    )
)
NUM_FOLDERS_READ = 3
"""Above the file: `job/round_2/node-3/rank_5.json`."""


def place_of(path: Path) -> dict[str, Any]:
    """Fields of a dumps.StackDump from the names."""
    stem = path.stem.lower()
    place: dict[str, Any] = _round_of(path)
    if found := _RANK.search(stem):
        place["rank"] = int(found.group(1))
        if found.group(2):
            place["world_size"] = min(int(found.group(2)), WORLD_SIZE_MAX)
    if found := _PID.search(stem):
        place["pid"] = int(found.group(1))
    if axes := _AXIS.findall(stem):
        place["axes"] = tuple(sorted({axis: int(index) for axis, index in axes}.items()))
    folders = [folder.name for folder in path.absolute().parents[:NUM_FOLDERS_READ]]
    if found := _NODE.search(path.stem):
        place["node"] = found.group(1).partition("=")[2] or found.group(1)
    elif of_node := [name for name in folders if _NODE_FOLDER.match(name)]:
        place["node"] = of_node[0].partition("=")[2] or of_node[0]
    found = _ROLE.search(stem)
    if found is None and (other := _OTHER_ROLE.match(stem)) and other.group(1) not in _NO_ROLES:
        found = other
    if found:
        place["role"] = found.group(1)
        if found.group(2):
            place["replica"] = f"{found.group(1)}/{int(found.group(2))}"
    return place


def _round_of(path: Path) -> dict[str, Any]:
    """The number of the round: the one that a name calls a round, else the last number of the file name, else a numeric
    folder name."""
    folders = path.absolute().parents[:NUM_FOLDERS_READ]
    for named in (path, *folders):
        if found := _ROUND.search(named.stem if named is path else named.name):
            return {"round_index": int(found.group(1)), "series": _ROUND.sub("", str(path.absolute()))}
    rest = path.stem.lower()
    for known in (_RANK, _PID, _AXIS, _NODE, _ROLE, _OTHER_ROLE):
        rest = known.sub("", rest)
    if rest != path.stem.lower() and (found := _ROUND_LAST.search(path.stem)) and _ROUND_LAST.search(rest):
        return {"round_index": int(found.group(1))}
    numbers = [folder.name for folder in folders if _ROUND_FOLDER.match(folder.name)]
    return {"round_index": int(numbers[0])} if numbers else {}


DUMP_BYTES_MAX = 16 << 20
"""Per file. A trainer with 30 threads of 40 frames takes 0.3 MB as JSON."""
HEAD_BYTES = 8192
"""Bytes that decide the format of a file."""
NUM_THREADS_MAX = 4096
NUM_FRAMES_MAX = 4096
"""py-spy itself stops beyond both."""
TEXT_CHARS_MAX = 512
"""Longer names of files and functions are truncated."""
RANK_DIGITS_MAX = 18
"""Of a rank as a key: longer numbers are not ranks, and slow to parse."""
NUM_AXES_MAX = 8
NUM_ENGINES_MAX = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """`file`: path from the package on (`torch/distributed/distributed_c10d.py`), else the file name; `name`: the
    function."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """`frames`: innermost first. `active`: on a CPU or runnable when it was sampled."""

    name: str
    frames: tuple[Frame, ...]
    active: bool
    owns_gil: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """The threads of one process, main thread first. `at`: wall seconds, from the file, since py-spy writes no time.

    Unknown values are empty or None. `axes`: coordinates (`pp`, 1) from the file name. `round_index`: number of the
    round of dumps in the names; `series`: the path without it, if the names call it a round. `one_of_some`: only some
    processes of the role were dumped, so none counts as missing. `is_stopped`: by a signal or a debugger.
    """

    path: str
    at: float
    threads: tuple[Thread, ...]
    pid: int | None = None
    node: str = ""
    role: str = ""
    replica: str = ""
    rank: int | None = None
    incarnation: int | None = None
    world_size: int | None = None
    axes: tuple[tuple[str, int], ...] = ()
    round_index: int | None = None
    series: str = ""
    one_of_some: bool = False
    is_stopped: bool = False
    engines: tuple["EngineDump", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDump:
    """An engine process below the dumped one, in an agent's response. `parent`: PID of the next one above it, else of
    the dumped process. `dump` None: there are no stacks of it."""

    pid: int
    parent: int
    title: str
    dump: StackDump | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """A parallel group that a topology file lists: `pp 3` is the fourth of its kind."""

    axis: str
    index: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A topology file's description of one role (of all, if `role` is empty), by global rank. `sizes`: its
    `parallel`."""

    role: str = ""
    world_size: int | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    replicas: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    sizes: tuple[tuple[str, int], ...] = ()
    groups: tuple[ParallelGroup, ...] = ()

    def axes(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Coordinates of a rank in the grid of `sizes`."""
        at = []
        for axis, size in self.sizes:
            rank, index = divmod(rank, size)
            at.append((axis, index))
        return tuple(at)

    def suspect(self, rank: int | None, node: str, gpu: int | None = None) -> Suspect:
        """The process of a rank, None: unknown. `node`: if the topology does not name it."""
        replica = self.replicas.get(rank, "") if rank is not None else ""
        if rank is not None:
            node = self.nodes.get(rank, node)
        role = self.role or role_of(replica)
        return Suspect(node=NodeId(node), role=role, replica=replica, rank=rank, gpu=gpu)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_JSON_HEAD = re.compile(r'\s*\[\s*\{.*"(?:thread_id|owns_gil|frames)"\s*:', re.DOTALL)
_AGENT_HEAD = re.compile(r'\s*\{.*"threads"\s*:\s*\[', re.DOTALL)
_THREAD_LINE = re.compile(r'^Thread (\S{1,32}) \((idle|active|active\+gil)\)(?:: "(.{0,512})")?\r?$', re.MULTILINE)
_TOPOLOGY_KEY = re.compile(r'"(?:parallel|groups)"\s*:\s*\{|"ranks"\s*:\s*\{\s*"\d+"\s*:\s*\{')
_PROCESS_LINE = re.compile(r"^Process (\d{1,10}): ", re.MULTILINE)
_TEXT_HEAD = re.compile(r"^Process \d{1,10}: .*\n(?:.*\n)?Python v", re.MULTILINE)


def is_dump(path: Path) -> bool:
    """Whether the file begins like one of the three formats. Raises OSError."""
    head = _head(path)
    return bool(_JSON_HEAD.match(head) or _AGENT_HEAD.match(head) or _is_text(head))


def is_topology(path: Path) -> bool:
    """Whether it is a JSON object with `parallel`, `groups`, or `ranks` of objects by number. Raises OSError."""
    head = _head(path)
    if not head.lstrip().startswith("{") or _AGENT_HEAD.match(head) or '"pg_config"' in head or '"entries"' in head:
        return False
    return bool(_TOPOLOGY_KEY.search(head))


def _head(path: Path) -> str:
    return _COLOUR.sub("", head_of(path, HEAD_BYTES).decode("utf-8", "replace"))


def _is_text(head: str) -> bool:
    return bool(_TEXT_HEAD.search(head) or _THREAD_LINE.search(head))


def read(path: Path, check: Check = no_check) -> StackDump:
    """`check` is called for each thread. Raises UnreadableInput: too large, truncated, without threads, or not a
    dump."""
    text, at = _text(path)
    place, engines = place_of(path), []
    if text.lstrip()[:1] in ("[", "{"):
        value = _json(path, text)
        if isinstance(value, dict):
            place |= _agent_fields(path, value)
            engines, value = value.get("engines", []), value["threads"]
        pid, threads = _from_json(path, value, place.get("pid"), check)
    elif _is_text(text[:HEAD_BYTES]):
        pid, threads = _from_text(path, text, check)
    else:
        raise _wrong(path, "neither JSON nor text of py-spy")
    if not any(t.frames for t in threads):
        raise _wrong(path, "no thread in it has a Python frame")
    return StackDump(
        **{**place, "path": str(path), "at": at, "threads": tuple(threads), "pid": pid or place.get("pid")},
        engines=tuple(_engines(path, engines, at, check)),
    )


def _wrong(path: Path, reason: str) -> UnreadableInput:
    return UnreadableInput(where=str(path), reason=reason)


def _text(path: Path) -> tuple[str, float]:
    try:
        if not path.is_file():
            raise _wrong(path, "not a file")
        status = path.stat()
        with path.open("rb") as file:
            raw = file.read(DUMP_BYTES_MAX + 1)
    except OSError as e:
        raise _wrong(path, e.strerror or str(e)) from None
    if len(raw) > DUMP_BYTES_MAX:
        raise _wrong(path, f"{status.st_size:,} bytes, and {DUMP_BYTES_MAX:,} are read of one dump")
    return _COLOUR.sub("", raw.decode("utf-8", "replace")), status.st_mtime


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _wrong(path, "nested too deep") from None
    except ValueError as e:
        raise _wrong(path, f"not JSON, or cut short: {e}") from None


def _from_json(path: Path, value: Any, pid: int | None, check: Check) -> tuple[int | None, list[Thread]]:
    if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
        raise _wrong(path, "not a list of threads")
    if len(value) > NUM_THREADS_MAX:
        raise _wrong(path, f"{len(value):,} threads, and {NUM_THREADS_MAX:,} are read")
    # With --subprocesses the dump also holds child processes; only the process itself is compared.
    pids = [p for t in value if (p := _integer(t.get("pid"))) is not None]
    pid = pid if pid in pids else pids[0] if pids else pid
    threads: list[Thread] = []
    main: int | None = None
    for thread in value:
        check()
        if pids and _integer(thread.get("pid")) != pid:
            continue
        frames = thread.get("frames")
        if not isinstance(frames, list) or not all(isinstance(f, dict) for f in frames):
            raise _wrong(path, f"thread {len(threads)} has no list of frames")
        if len(frames) > NUM_FRAMES_MAX:
            raise _wrong(path, f"a thread of {len(frames):,} frames, and {NUM_FRAMES_MAX:,} are read")
        name = _text_of(thread.get("thread_name"))
        if name == "MainThread" or (main is None and pid is not None and thread.get("os_thread_id") == pid):
            main = len(threads)
        pairs = (
            (_text_of(f.get("short_filename")) or _text_of(f.get("filename")), _text_of(f.get("name"))) for f in frames
        )
        threads.append(
            Thread(
                name=name,
                frames=_frames(pairs),
                active=thread.get("active") is True,
                owns_gil=thread.get("owns_gil") is True,
            )
        )
    # The interpreter lists its newest thread first.
    return pid, _main_first(threads, len(threads) - 1 if main is None else main)


def _from_text(path: Path, text: str, check: Check) -> tuple[int | None, list[Thread]]:
    processes = list(_PROCESS_LINE.finditer(text))
    pid = int(processes[0].group(1)) if processes else None
    own = text[: processes[1].start()] if len(processes) > 1 else text
    heads = list(_THREAD_LINE.finditer(own))
    if len(heads) > NUM_THREADS_MAX:
        raise _wrong(path, f"{len(heads):,} threads, and {NUM_THREADS_MAX:,} are read")
    threads: list[Thread] = []
    main: int | None = None
    for number, head in enumerate(heads):
        check()
        body = own[head.end() : heads[number + 1].start() if number + 1 < len(heads) else len(own)]
        pairs = [pair for line in body.splitlines() if (pair := _frame_of(line)) is not None]
        if len(pairs) > NUM_FRAMES_MAX:
            raise _wrong(path, f"a thread of {len(pairs):,} frames, and {NUM_FRAMES_MAX:,} are read")
        name = _text_of(head.group(3))
        if name == "MainThread" or (main is None and head.group(1) == str(pid)):
            main = number
        status = head.group(2)
        threads.append(
            Thread(name=name, frames=_frames(pairs), active=status != "idle", owns_gil=status == "active+gil")
        )
    return pid, _main_first(threads, main or 0)


def _frame_of(line: str) -> tuple[str, str] | None:
    """(file, function) of `    step (train.py:12)`; local variables are indented further."""
    line = line[: 4 * TEXT_CHARS_MAX].rstrip()
    if not line.startswith("    ") or line[4:5].isspace() or not line.endswith(")"):
        return None
    name, bracket, place = line[4:-1].partition(" (")
    file, colon, number = place.rpartition(":")
    return (_text_of(file if colon and number.isdecimal() else place), _text_of(name)) if bracket else None


def _main_first(threads: list[Thread], main: int) -> list[Thread]:
    return threads[main : main + 1] + threads[:main] + threads[main + 1 :]


def _text_of(value: Any) -> str:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else ""


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def kept_bytes(dump: StackDump, counted: set[int]) -> int:
    """Memory of a dump. Dumps share most of their frames: `counted` holds the ids of frames already counted, and is
    valid as long as their dumps are kept."""
    threads = [*dump.threads, *(t for e in dump.engines if e.dump is not None for t in e.dump.threads)]
    num_bytes = sum(256 + 4 * len(t.name) + 8 * len(t.frames) for t in threads)
    met = {id(frame): frame for t in threads for frame in t.frames}
    for number in met.keys() - counted:
        num_bytes += 256 + 4 * (len(met[number].file) + len(met[number].name))
    counted.update(met)
    return num_bytes


def _agent_fields(path: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """Fields of a StackDump in an agent's response."""
    if not isinstance(answer.get("threads"), list):
        raise _wrong(path, "a JSON object without a list `threads`")
    place: dict[str, Any] = {key: answer.get(key) is True for key in ("one_of_some", "is_stopped")}
    for key in ("rank", "pid", "incarnation"):
        if (number := _integer(answer.get(key))) is not None:
            place[key] = number
    if node := _text_of(answer.get("node")):
        place["node"] = node
    if replica := _text_of(answer.get("replica")):
        place |= {"replica": replica, "role": role_of(replica)}
    return place


def _engines(path: Path, listed: Any, at: float, check: Check) -> Iterator[EngineDump]:
    """Raises UnreadableInput."""
    if not isinstance(listed, list) or len(listed) > NUM_ENGINES_MAX or not all(isinstance(e, dict) for e in listed):
        raise _wrong(path, f"engines: not a list of at most {NUM_ENGINES_MAX} objects")
    for engine in listed:
        pid, parent = _integer(engine.get("pid")), _integer(engine.get("parent"))
        if pid is None or parent is None:
            raise _wrong(path, "engines: one has no pid or no parent")
        threads = tuple(_from_json(path, engine.get("threads"), pid, check)[1])
        is_stopped = engine.get("is_stopped") is True
        dump = StackDump(path=str(path), at=at, threads=threads, pid=pid, is_stopped=is_stopped)
        has_frames = any(t.frames for t in threads)
        title = _text_of(engine.get("title"))
        yield EngineDump(pid=pid, parent=parent, title=title, dump=dump if has_frames else None)


_STANDARD_LIBRARY = re.compile(r"lib(?:64)?/python\d[\d.]*t?/")
_GENERATED_NAME = re.compile(r"__compiled_fn|torch_dynamo_resume_in|triton_")
_GENERATED_STEM = re.compile(r"(?=.*\d)[0-9a-z]{24,}\Z")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def _frames(pairs: Iterable[tuple[str, str]]) -> tuple[Frame, ...]:
    return tuple(f for file, name in pairs if (f := normal_frame(file, name)) is not None)


@lru_cache(maxsize=65_536)
def normal_frame(file: str, name: str) -> Frame | None:
    """The normalized frame; None for one without information (a bare address)."""
    name = _ADDRESS.sub("", name).strip()
    if not name or name == "<shim>":
        return None
    if _GENERATED_NAME.match(name):
        name = re.sub(r"_?\d+", "", name)
    elif "::" in name or "(" in name:
        name = re.split(r"[<(]", name, maxsplit=1)[0].strip() or name  # C++: arguments and template arguments
    return Frame(normal_file(file), name)


def normal_file(file: str) -> str:
    if file.startswith("<"):  # <string>, <frozen runpy>, <ipython-input-3-4f2a>, <eval_with_key>.12
        found = re.match(r"<[A-Za-z_ .-]+", file)
        return found.group(0).rstrip(" .-_") + ">" if found else "<generated>"
    if "ipykernel_" in file:
        return "<ipython-input>"
    if "torchinductor_" in file:
        return "<torchinductor>"
    for installed in ("site-packages/", "dist-packages/"):
        if installed in file:
            return file.rpartition(installed)[2]
    if found := _STANDARD_LIBRARY.search(file):
        return file[found.end() :]
    base = file.rpartition("/")[2]
    if _GENERATED_STEM.match(base.partition(".")[0]):
        return "<generated>"
    return base if file.startswith("/") else file  # the same script may have another path on another node


def read_topology(path: Path) -> Topology:
    """Raises UnreadableInput: not JSON, a part of the wrong type, or contradictory sizes."""
    value = _json(path, _text(path)[0])
    if not isinstance(value, dict):
        raise _wrong(path, "a topology is a JSON object")
    world_size = value.get("world_size")
    if world_size is not None and not 1 <= (_integer(world_size) or 0) <= WORLD_SIZE_MAX:
        raise _wrong(path, f"world_size: {str(world_size)[:40]} is not a number from 1 to {WORLD_SIZE_MAX:,}")
    ranks = value.get("ranks", {})
    if not isinstance(ranks, dict) or not all(
        k.isdecimal() and len(k) <= RANK_DIGITS_MAX and isinstance(v, dict) for k, v in ranks.items()
    ):
        raise _wrong(path, "ranks: not an object of rank to object")
    by_rank = {int(k): v for k, v in ranks.items()}
    sizes, groups = _sizes(path, value.get("parallel", {}), world_size), _listed(path, value.get("groups", {}))
    if sizes:
        world_size = math.prod(sizes.values())
    known = [*by_rank, *(r for g in groups for r in g.ranks)]
    if known and max(known) >= (world_size or WORLD_SIZE_MAX):
        raise _wrong(path, f"rank {max(known)} is outside of world_size {world_size or WORLD_SIZE_MAX}")
    return Topology(
        role=_text_of(value.get("role")),
        world_size=world_size,
        nodes={r: node for r, v in by_rank.items() if (node := _text_of(v.get("node")))},
        replicas={r: replica for r, v in by_rank.items() if (replica := _text_of(v.get("replica")))},
        pids={r: pid for r, v in by_rank.items() if (pid := _integer(v.get("pid"))) is not None},
        sizes=tuple(sizes.items()),
        groups=tuple(groups),
    )


def _sizes(path: Path, sizes: Any, world_size: int | None) -> dict[str, int]:
    if not isinstance(sizes, dict) or not all((_integer(s) or 0) >= 1 for s in sizes.values()):
        raise _wrong(path, "parallel: not an object of axis to size")
    if len(sizes) > NUM_AXES_MAX or (total := math.prod(sizes.values())) > WORLD_SIZE_MAX:
        raise _wrong(path, f"parallel: more than {NUM_AXES_MAX} axes or {WORLD_SIZE_MAX:,} ranks")
    if sizes and world_size is not None and total != world_size:
        raise _wrong(path, f"parallel: the sizes make {total} ranks, and world_size is {world_size}")
    return {axis[:40]: size for axis, size in sizes.items()}


def _listed(path: Path, groups: Any) -> list[ParallelGroup]:
    if not isinstance(groups, dict):
        raise _wrong(path, "groups: not an object of axis to lists of ranks")
    found = []
    for axis, lists in groups.items():
        if not isinstance(lists, list) or not all(isinstance(ranks, list) for ranks in lists):
            raise _wrong(path, f"groups: {axis[:40]}: not a list of lists of ranks")
        for index, ranks in enumerate(lists):
            numbers = [r for r in ranks if _integer(r) is not None]
            if len(numbers) != len(ranks):
                raise _wrong(path, f"groups: {axis[:40]} {index}: not a list of ranks")
            found.append(ParallelGroup(axis=axis[:40], index=index, ranks=frozenset(numbers)))
    return found
