"""Status of a job from NCCL's RAS subsystem: communicators, launched collectives by rank, missing ranks.

Supports both formats: JSON (NCCL 2.28.7 and later) and the text of `STATUS` (2.24 and later). Sources: NCCL user guide,
"RAS"; NCCL `src/ras/client_support.cc`. Untrusted input: gives statuses or `MalformedRasStatus`, sizes are bounded.

Pitfalls: 2.28.9 omits the comma before `status` inside `missing_ranks`: JSON is parsed strictly first, then repaired,
which the status records. Acknowledgements (`OK`) precede the body. Timestamps are local without a zone: the receiver
knows the time, and only their differences are used. A third to a half of the polls of a healthy busy job have only zero
counts (`has_counts` is false) and carry no information. Counts are of LAUNCHED operations: all ranks inside one
collective that never ends agree, and RAS reports OK. The text lists only outlier ranks.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""Order of the counts when given as a list."""
NUM_COMMUNICATORS_MAX = 4096
NUM_RANKS_MAX = 500_000
"""Of all communicators of one status together."""
NUM_STATUSES_MAX = 1000
CHECK_ITEMS = 4096
"""A deadline is checked after this many ranks or lines: some 50 ms."""
TEXT_CHARS_MAX = 96
NUM_SHOWN_MAX = 8
"""Ranks in a sentence."""


class MalformedRasStatus(ValueError):
    """Not a RAS answer; the text says why."""


class Condition(StrEnum):
    MISMATCH = "MISMATCH"
    INCOMPLETE = "INCOMPLETE"
    DEAD = "DEAD"
    ERROR = "ERROR"


class RankState(StrEnum):
    INIT = "INIT"
    RUNNING = "RUNNING"
    FINALIZE = "FINALIZE"
    ABORT = "ABORT"


class NcclResult(StrEnum):
    """`ncclResult_t`, in RAS's wording."""

    CUDA = "Unhandled CUDA error"
    SYSTEM = "System error"
    INTERNAL = "Internal error"
    ARGUMENT = "Invalid argument"
    USAGE = "Invalid usage"
    REMOTE = "Remote process error"  # a victim: another rank failed
    OTHER = "Unexpected error"


@dataclass(frozen=True, slots=True)
class CommunicatorMember:
    """A rank of a communicator: `rank` is its rank there. Unknown fields are empty or None. `gpu`: NVML's index."""

    rank: int
    host: str = ""
    pid: int | None = None
    gpu: int | None = None

    @property
    def process(self) -> tuple[str, int | None, int | None]:
        """The same in all communicators."""
        return (self.host, self.pid, self.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    member: CommunicatorMember
    state: RankState
    counts: tuple[int, ...]  # launched, in the order of the communicator's `collectives`


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """`unresponsive`: RAS could not reach it; else it answered but is not a member (it left, or has not joined yet)."""

    member: CommunicatorMember
    unresponsive: bool
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    member: CommunicatorMember
    result: NcclResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLevel:
    """`num_ranks` ranks launched `launched`. `members`: those listed; in text often none."""

    launched: int
    num_ranks: int
    members: tuple[CommunicatorMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A collective that ranks launched different numbers of times. `levels`: highest first; text may omit them."""

    collective: str
    levels: tuple[LaunchLevel, ...]

    @property
    def width(self) -> int:
        return self.levels[0].launched - self.levels[-1].launched if len(self.levels) > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """`hash`: 16 hexadecimal digits. `collectives`: names of the counts. `ranks`: empty in text. `num_missing`: did not
    answer; `missing`: those and non-members, where listed."""

    hash: str
    size: int = 0
    collectives: tuple[str, ...] = ()
    ranks: tuple[Rank, ...] = ()
    spreads: tuple[Spread, ...] = ()
    missing: tuple[Missing, ...] = ()
    num_missing: int = 0
    failures: tuple[RankFailure, ...] = ()
    conditions: frozenset[Condition] = frozenset()

    @property
    def has_counts(self) -> bool:
        """Whether it has counts of launched operations (see the module)."""
        return any(any(r.counts) for r in self.ranks) or bool(self.spreads)

    @property
    def width(self) -> int:
        """How many operations the last rank is behind the first, summed over collectives."""
        return sum(s.width for s in self.spreads)

    def launched(self) -> dict[str, int]:
        """Highest count of any rank, by collective; empty if unknown."""
        columns = zip(*(r.counts for r in self.ranks), strict=True) if self.ranks else ()
        return {name: max(column) for name, column in zip(self.collectives, columns, strict=False)}

    def standing(self) -> tuple[object, ...]:
        """Equal for two polls between which, as far as known, no rank launched anything."""
        if self.ranks:
            return tuple(sorted((r.member.rank, r.counts) for r in self.ranks))
        return tuple((s.collective, tuple((v.launched, v.num_ranks) for v in s.levels)) for s in self.spreads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostProcess:
    """From the text form: an unresponsive or dead process, with its GPUs as written."""

    pid: int
    host: str
    gpus: str
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RasStatus:
    """One answer. `communicators`: all in JSON; in text those with a condition, of `num_communicators`."""

    form: str  # "json" or "text"
    communicators: tuple[Communicator, ...]
    num_communicators: int
    lost: tuple[LostProcess, ...] = ()
    repaired: bool = False
    stamp: float | None = None
    """Seconds of the time stamp before it, of no known zone: only differences count."""

    @property
    def has_counts(self) -> bool:
        return any(c.has_counts for c in self.communicators)

    def hosts(self) -> set[str]:
        return {r.member.host for c in self.communicators for r in c.ranks}


def word(value: Any) -> str:
    """Untrusted text for display: printable ASCII, truncated."""
    if not isinstance(value, str):
        return ""
    return "".join(c if " " <= c <= "~" else "?" for c in value[:TEXT_CHARS_MAX])


def communicator_hash(value: Any) -> str:
    text = value[2:] if isinstance(value, str) and value[:2].lower() == "0x" else value
    if isinstance(text, str) and re.fullmatch(r"[0-9a-fA-F]{1,16}", text):
        return text.lower().rjust(16, "0")
    return "0" * 16


def behind(communicator: Communicator) -> dict[str, tuple[CommunicatorMember, ...]]:
    """Late ranks by collective: those with the fewest launches, where listed and at most half of the ranks."""
    found: dict[str, tuple[CommunicatorMember, ...]] = {}
    for spread in communicator.spreads:
        if len(spread.levels) < 2:
            continue
        last, num_ranks = spread.levels[-1], sum(v.num_ranks for v in spread.levels)
        if last.members and 2 * last.num_ranks <= num_ranks:
            found[spread.collective] = last.members
    return found


def ranks_text(members: Iterable[CommunicatorMember]) -> str:
    """`rank 3 (10.0.0.7, process 12, GPU 3)`, several with commas."""
    listed, words = list(members), []
    for m in listed[:NUM_SHOWN_MAX]:
        about = [m.host, f"process {m.pid}" if m.pid is not None else "", f"GPU {m.gpu}" if m.gpu is not None else ""]
        said = ", ".join(a for a in about if a)
        words.append(f"rank {m.rank}" + (f" ({said})" if said else ""))
    more = f" and {len(listed) - NUM_SHOWN_MAX} more" if len(listed) > NUM_SHOWN_MAX else ""
    return ", ".join(words) + more


_COUNT_MAX = 1 << 63
NUM_CONTAINERS_MAX = 3 * NUM_RANKS_MAX + 16 * NUM_COMMUNICATORS_MAX
"""Objects and lists: a rank has three. Two bytes make one of up to 64."""
_RESULTS = dict(enumerate((r for r in NcclResult if r is not NcclResult.OTHER), 1))  # in the order of `ncclResult_t`
_SUCCESS, _IN_PROGRESS = 0, 7

_ACKNOWLEDGED = re.compile(r"\s*(?:(?:SERVER PROTOCOL [0-9]{1,9}|OK)\r?\n\s*)+", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n\0]+")
_STAMP = re.compile(r"^[ \t]*\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?Z?\]?:?(?=\s|$)", re.MULTILINE)
"""A time stamp at the start of a line: before each report of a monitor, or before each of its lines."""
_TEXT_BEGINS = re.compile(r"^[ \t]*(?:Job summary|Communicators\.\.\.)", re.MULTILINE)


def statuses(raw: bytes, check: Callable[[], None] = lambda: None) -> list[RasStatus]:
    """All answers that stand one after the other, in order: at least one. `check` is called during the work and may
    raise, as on a deadline. Raises Malformed: there is none, or one of them is cut short or not what it begins as."""
    text, stamps = _without_stamps(raw.decode("utf-8", "replace"))
    if found := _ACKNOWLEDGED.match(text):
        text = " " * found.end() + text[found.end() :]  # positions stay
    if text.lstrip()[:1] == "{":
        if text.count("{") + text.count("[") > NUM_CONTAINERS_MAX:
            raise MalformedRasStatus(f"it may hold more than {NUM_CONTAINERS_MAX:,} lists and objects")
        values, repaired = _parsed(text)
        # A repair moves positions, so that time stamps no longer belong to them.
        return [
            _status(value, check, repaired=repaired, stamp=None if repaired else _stamp_at(stamps, at))
            for at, value in values
        ]
    if _TEXT_BEGINS.search(text):
        return _all_text(text, stamps, check)
    head = " ".join(text[:80].split())
    raise MalformedRasStatus(f"neither JSON nor the text of STATUS: {word(head)!r}" if head else "an empty answer")


Stamps = tuple[list[int], list[float]]
"""Positions of time stamps in a text, and their seconds."""


def _without_stamps(text: str) -> tuple[str, Stamps]:
    """The text with blanks in place of the time stamps, so that positions stay, and the time stamps."""
    at, seconds = list[int](), list[float]()

    def taken(match: re.Match[str]) -> str:
        try:
            when = datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return match[0]
        at.append(match.start())
        seconds.append(when)
        return " " * len(match[0])

    return _STAMP.sub(taken, text), (at, seconds)


def _stamp_at(stamps: Stamps, position: int) -> float | None:
    """The last time stamp up to this position."""
    number = bisect_right(stamps[0], position)
    return stamps[1][number - 1] if number else None


_COMMA_MISSING = re.compile(r'([0-9}\]"]|true|false|null)([ \t]*\r?\n[ \t]*)(?="[A-Za-z0-9_]{1,64}"[ \t]*:)')


def _parsed(text: str) -> tuple[list[tuple[int, Any]], bool]:
    """The values with their positions, and whether that took a repair. Raises Malformed."""
    said = ""
    for repaired, candidate in ((False, text), (True, _COMMA_MISSING.sub(r"\1,\2", text))):
        try:
            return _values(candidate), repaired
        except MalformedRasStatus:
            raise
        except ValueError as e:
            said = word(str(e))
    raise MalformedRasStatus(f"not JSON, or cut short: {said}")


def _values(text: str) -> list[tuple[int, Any]]:
    """(position, value). Raises ValueError."""
    decoder, found, at = json.JSONDecoder(), list[tuple[int, Any]](), 0
    try:
        while True:
            for skipped in (_ACKNOWLEDGED, _SPACE):
                if m := skipped.match(text, at):
                    at = m.end()
            if at == len(text):
                return found
            if len(found) == NUM_STATUSES_MAX:
                raise MalformedRasStatus(f"more than {NUM_STATUSES_MAX:,} answers")
            begin = at
            value, at = decoder.raw_decode(text, at)
            found.append((begin, value))
    except RecursionError:
        raise MalformedRasStatus("nested too deep") from None


def _status(value: Any, check: Callable[[], None], *, repaired: bool, stamp: float | None = None) -> RasStatus:
    if not isinstance(value, dict) or not isinstance(value.get("communicators"), list):
        raise MalformedRasStatus("a JSON value without a list `communicators`")
    listed = value["communicators"]
    if len(listed) > NUM_COMMUNICATORS_MAX:
        raise MalformedRasStatus(f"{len(listed):,} communicators, and {NUM_COMMUNICATORS_MAX:,} are read")
    num_ranks = sum(len(_list(c, key)) for c in listed for key in ("ranks", "missing_ranks"))
    if num_ranks > NUM_RANKS_MAX:
        raise MalformedRasStatus(f"{num_ranks:,} ranks, and {NUM_RANKS_MAX:,} are read")
    return RasStatus(
        form="json",
        communicators=tuple(_communicator(c, check) for c in listed),
        num_communicators=len(listed),
        repaired=repaired,
        stamp=stamp,
    )


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, dict):
        raise MalformedRasStatus("a communicator that is not an object")
    listed = value.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(v, dict) for v in listed):
        raise MalformedRasStatus(f"{key} is not a list of objects")
    return listed


def _communicator(value: Any, check: Callable[[], None]) -> Communicator:
    listed = _list(value, "ranks")
    by_name = next((c for one in listed if isinstance(c := one.get("collective_counts"), dict)), None)
    collectives = COLLECTIVES if by_name is None else tuple(word(name) for name in list(by_name)[:64])
    ranks, failures = [], []
    for number, one in enumerate(listed):
        if number % CHECK_ITEMS == 0:
            check()
        status = one.get("status")
        status = status if isinstance(status, dict) else {}
        member = _member(one)
        ranks.append(Rank(member=member, state=_state(status), counts=_counts(one, collectives)))
        for key in ("init_state", "async_error"):
            if (result := _result(status.get(key))) is not None:
                failures.append(RankFailure(member=member, result=result))
                break
    missing = tuple(_missing(one) for one in _list(value, "missing_ranks"))
    num_missing = sum(m.unresponsive or m.dead for m in missing)
    spreads = _spreads(ranks, collectives)
    found = {
        Condition.MISMATCH: bool(spreads) or len({r.state for r in ranks}) > 1,
        Condition.INCOMPLETE: num_missing > 0,
        Condition.DEAD: any(m.dead for m in missing),
        Condition.ERROR: bool(failures),
    }
    return Communicator(
        hash=communicator_hash(value.get("hash")),
        size=_number(value.get("size")) or len(ranks) + len(missing),
        collectives=collectives,
        ranks=tuple(ranks),
        spreads=spreads,
        missing=missing,
        num_missing=num_missing,
        failures=tuple(failures),
        conditions=frozenset(c for c, holds in found.items() if holds),
    )


def _member(one: dict[str, Any]) -> CommunicatorMember:
    rank = _number(one.get("rank"))
    if rank is None:
        raise MalformedRasStatus("a rank without its number")
    gpu = _number(one.get("nvml_dev"))
    gpu = _number(one.get("cuda_dev")) if gpu is None else gpu
    return CommunicatorMember(rank, word(one.get("host")), _number(one.get("pid")), gpu)


def _missing(one: dict[str, Any]) -> Missing:
    # Without the object (a form not known), who is listed as missing counts as not reached.
    status = one.get("status")
    status = status if isinstance(status, dict) else {"unresponsive": True}
    return Missing(
        member=_member(one), unresponsive=status.get("unresponsive") is True, dead=status.get("considered_dead") is True
    )


def _state(status: dict[str, Any]) -> RankState:
    if status.get("abort_flag") is True:
        return RankState.ABORT
    if status.get("finalize_called") is True or status.get("destroy_flag") is True:
        return RankState.FINALIZE
    return RankState.RUNNING if _number(status.get("init_state")) in (None, _SUCCESS) else RankState.INIT


def _result(value: Any) -> NcclResult | None:
    code = _number(value)
    return None if code is None or code in (_SUCCESS, _IN_PROGRESS) else _RESULTS.get(code, NcclResult.OTHER)


def _counts(one: dict[str, Any], collectives: tuple[str, ...]) -> tuple[int, ...]:
    counts = one.get("collective_counts")
    if isinstance(counts, dict):
        return tuple(_number(counts.get(name)) or 0 for name in collectives)
    if isinstance(counts, list):
        return tuple(_number(n) or 0 for n in counts[: len(collectives)]) + (0,) * (len(collectives) - len(counts))
    return (0,) * len(collectives)


def _spreads(ranks: Sequence[Rank], collectives: tuple[str, ...]) -> tuple[Spread, ...]:
    spreads = []
    for n, name in enumerate(collectives):
        by_count: dict[int, list[CommunicatorMember]] = {}
        for r in ranks:
            by_count.setdefault(r.counts[n], []).append(r.member)
        if len(by_count) > 1:
            levels = (LaunchLevel(launched=k, num_ranks=len(m), members=tuple(m)) for k, m in by_count.items())
            ordered = sorted(levels, key=lambda level: -level.launched)
            spreads.append(Spread(collective=name, levels=tuple(ordered)))
    return tuple(spreads)


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _COUNT_MAX else None


_MANAGED = r"(?: -- (?:GPU (?P<gpu>\d{1,4})(?: \(NVML (?P<nvml>\d{1,4})\))? managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,64})|.*))?$"  # noqa: E501
_LINES: dict[str, re.Pattern[str]] = {
    "row": re.compile(
        r"\d{1,6}\s+(?P<comms>\d{1,9})\s+\d{1,9}\s+\S{1,20}\s+\d{1,9}\s+\d{1,9}\s+[A-Z]{2,20}\s+[A-Z,+|/]"
    ),
    "communicator": re.compile(r"#\d{1,6}-\d{1,6} \((?P<hash>[0-9a-fA-F]{1,16})\) (?P<condition>[A-Z]{2,20})$"),
    "section": re.compile(r"(?P<section>INCOMPLETE|DEAD|TIMEOUT)$"),
    "process": re.compile(
        r"Process (?P<pid>\d{1,10}) on node (?P<host>\S{1,64}) managing GPUs? (?P<gpus>[0-9,() NVML]{1,200})$"
    ),
    "num_missing": re.compile(r"Missing communicator data from (?P<n>\d{1,9}) ranks?$"),
    "missing": re.compile(r"The missing ranks?: (?P<ranks>[0-9, ]{1,4000})$"),
    "differ": re.compile(r"Communicator ranks have different (?P<what>\w{1,40}(?: operation counts)?)"),
    "level": re.compile(r"(?P<n>\d{1,9}) ranks have (?:launched up to operation (?P<at>\d{1,18})|not launched any)"),
    "other_level": re.compile(r"\d{1,9} ranks have status "),
    "errors": re.compile(r"(?P<n>\d{1,9}) ranks reported (?P<result>[A-Za-z ]{1,60})$"),
    "rank_level": re.compile(
        r"Rank (?P<rank>\d{1,9}) has (?:launched up to operation (?P<at>\d{1,18})|not launched any operations)"
        + _MANAGED
    ),
    "rank_error": re.compile(r"Rank (?P<rank>\d{1,9}) reported (?P<result>[A-Za-z ]{1,60}?)" + _MANAGED),
    "rank": re.compile(r"Rank (?P<rank>\d{1,9})" + _MANAGED),
}
_MORE_SPACE = re.compile(r"\s+")


@dataclass(slots=True)
class _Building:
    """A communicator under construction from its sections, line by line."""

    hash: str
    conditions: set[Condition] = field(default_factory=set)
    levels: dict[str, list[tuple[int, int, list[CommunicatorMember]]]] = field(default_factory=dict)
    missing: dict[int, CommunicatorMember] = field(default_factory=dict)
    num_missing: int = 0
    failures: list[RankFailure] = field(default_factory=list)

    def built(self, dead: set[tuple[int | None, str]]) -> Communicator:
        spreads = []
        for name, rows in self.levels.items():
            levels = [LaunchLevel(launched=at, num_ranks=n, members=tuple(m)) for at, n, m in rows]
            spreads.append(Spread(collective=name, levels=tuple(sorted(levels, key=lambda v: -v.launched))))
        missing = tuple(
            Missing(member=m, unresponsive=True, dead=(m.pid, m.host) in dead) for m in self.missing.values()
        )
        more = {Condition.DEAD} if any(m.dead for m in missing) else set()
        return Communicator(
            hash=self.hash,
            spreads=tuple(spreads),
            missing=missing,
            num_missing=max(self.num_missing, len(missing)),
            failures=tuple(self.failures),
            conditions=frozenset(self.conditions | more),
        )


def _all_text(text: str, stamps: Stamps, check: Callable[[], None]) -> list[RasStatus]:
    """All answers in a text, at least one. Raises Malformed, and what `check` raises."""
    begins = [m.start() for m in re.finditer(r"^[ \t]*Job summary", text, re.MULTILINE)] or [0]
    if len(begins) > NUM_STATUSES_MAX:
        raise MalformedRasStatus(f"more than {NUM_STATUSES_MAX:,} answers")
    found = [
        _TextReader().read(text[begin:end], check, _stamp_at(stamps, text.find("Job summary", begin)))
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)
    ]
    if all(s is None for s in found):
        raise MalformedRasStatus("cut short before its table of communicators")
    return [s for s in found if s is not None]


class _TextReader:
    def __init__(self) -> None:
        self._built: dict[str, _Building] = {}
        self._now: _Building | None = None
        self._condition: Condition | None = None
        self._section = ""
        self._collective: str | None = None
        self._result = NcclResult.OTHER
        self._lost: list[LostProcess] = []
        self._num_comms = self._num_ranks = 0

    def read(self, text: str, check: Callable[[], None], stamp: float | None = None) -> RasStatus | None:
        """None where it ends before the communicators."""
        if "Communicators..." not in text:
            return None
        for number, line in enumerate(text.splitlines()):
            if number % CHECK_ITEMS == 0:
                check()
            self._line(_MORE_SPACE.sub(" ", line[:4400]).strip())
        dead: set[tuple[int | None, str]] = {(p.pid, p.host) for p in self._lost if p.dead}
        built = tuple(b.built(dead) for b in self._built.values())
        return RasStatus(
            form="text",
            communicators=built,
            num_communicators=max(self._num_comms, len(built)),
            lost=tuple(self._lost),
            stamp=stamp,
        )

    def _line(self, line: str) -> None:
        for kind, pattern in _LINES.items():
            if (m := pattern.match(line)) is not None:
                self._take(kind, m.groupdict())
                return

    def _take(self, kind: str, got: dict[str, str]) -> None:
        if kind == "row":
            self._num_comms += int(got["comms"])
        elif kind == "section":
            self._section, self._now = got["section"], None
        elif kind == "process":
            if len(self._lost) < NUM_COMMUNICATORS_MAX:
                dead = self._section == "DEAD"
                self._lost.append(LostProcess(pid=int(got["pid"]), host=got["host"], gpus=got["gpus"], dead=dead))
        elif kind == "communicator":
            self._begin(got)
        elif self._now is not None:
            self._fact(self._now, kind, got)

    def _begin(self, got: dict[str, str]) -> None:
        key = communicator_hash(got["hash"])
        if key not in self._built and len(self._built) >= NUM_COMMUNICATORS_MAX:
            raise MalformedRasStatus(f"more than {NUM_COMMUNICATORS_MAX:,} communicators")
        self._now = self._built.setdefault(key, _Building(key))
        self._collective = None
        self._condition = Condition(got["condition"]) if got["condition"] in set(Condition) else None
        if self._condition is not None:
            self._now.conditions.add(self._condition)

    def _fact(self, now: _Building, kind: str, got: dict[str, str]) -> None:
        if kind == "num_missing":
            now.num_missing = int(got["n"])
        elif kind == "missing":
            for number in re.findall(r"\d{1,9}", got["ranks"]):
                now.missing.setdefault(int(number), CommunicatorMember(int(number)))
        elif kind == "differ":
            name, counts = got["what"].removesuffix(" operation counts"), got["what"].endswith(" operation counts")
            # `collective` (2.24, 2.25): the sum of all. Lines of different states are skipped.
            self._collective = ("all" if name == "collective" else name) if counts else None
            if self._collective is not None and len(now.levels) < 64:
                now.levels.setdefault(self._collective, [])
        elif kind == "errors":
            self._result = _worded(got["result"])
        elif kind == "other_level":
            self._collective = None
        elif kind == "level":
            if (levels := now.levels.get(self._collective or "")) is not None:
                levels.append((int(got["at"] or 0), int(got["n"]), []))
        else:
            self._rank(now, kind, got)

    def _rank(self, now: _Building, kind: str, got: dict[str, str]) -> None:
        self._num_ranks += 1
        if self._num_ranks > NUM_RANKS_MAX:
            raise MalformedRasStatus(f"more than {NUM_RANKS_MAX:,} ranks")
        gpu = got["nvml"] or got["gpu"]
        pid = int(got["pid"]) if got["pid"] else None
        member = CommunicatorMember(int(got["rank"]), word(got["host"]), pid, int(gpu) if gpu else None)
        levels = now.levels.get(self._collective or "")
        if kind == "rank_error":
            now.failures.append(RankFailure(member=member, result=_worded(got["result"])))
        elif kind == "rank_level":
            if levels is not None:
                levels.append((int(got["at"] or 0), 1, [member]))
        elif self._condition is Condition.INCOMPLETE:
            now.missing[member.rank] = member
        elif self._condition is Condition.ERROR:
            now.failures.append(RankFailure(member=member, result=self._result))
        elif levels:
            levels[-1][2].append(member)


def _worded(text: str) -> NcclResult:
    return next((r for r in NcclResult if r == text.strip()), NcclResult.OTHER)
