"""Status of a job from NCCL's RAS subsystem: communicators, launched collectives by rank, missing ranks.

Supports both formats: JSON (NCCL 2.28.7 and later) and the text of `STATUS` (2.24 and later). Sources: NCCL user guide,
"RAS"; NCCL `src/ras/client_support.cc`. Untrusted input: gives statuses or `MalformedRasStatus`, sizes are bounded.

Pitfalls: 2.28.9 omits the comma before `status` inside `missing_ranks`: JSON is parsed strictly first, then repaired,
which the status records. Acknowledgements (`OK`) precede the body. Timestamps are local without a zone and ignored; the
receiver knows the time. A third to a half of the polls of a healthy busy job have only zero counts (`has_counts` is
false) and carry no information. Counts are of LAUNCHED operations: all ranks inside one collective that never ends
agree, and RAS reports OK. The text lists only outlier ranks."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""Order of the counts when given as a list."""
NUM_COMMUNICATORS_MAX = 4096
NUM_RANKS_MAX = 500_000
"""Of all communicators of one status together."""
NUM_STATUSES_MAX = 1000
TEXT_CHARS_MAX = 96


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
    nccl_version: str = ""
    communicators: tuple[Communicator, ...]
    num_communicators: int
    lost: tuple[LostProcess, ...] = ()
    num_timeouts: int = 0
    repaired: bool = False

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


def ranks_text(members: Iterable[CommunicatorMember], num_max: int = 8) -> str:
    """`rank 3 (10.0.0.7, process 12, GPU 3)`, several with commas."""
    listed = list(members)
    words = []
    for m in listed[:num_max]:
        about = [m.host, f"process {m.pid}" if m.pid is not None else "", f"GPU {m.gpu}" if m.gpu is not None else ""]
        said = ", ".join(a for a in about if a)
        words.append(f"rank {m.rank}" + (f" ({said})" if said else ""))
    return ", ".join(words) + (f" and {len(listed) - num_max} more" if len(listed) > num_max else "")
