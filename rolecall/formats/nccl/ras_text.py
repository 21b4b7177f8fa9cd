"""Parses the text answer of NCCL's RAS to STATUS: a table, then errors and warnings by communicator.

It lists only outlier ranks and communicators with a condition. Source: NCCL `src/ras/client_support.cc`.
"""

import re
from dataclasses import dataclass, field

from rolecall.formats.nccl.ras import (
    NUM_COMMUNICATORS_MAX,
    NUM_RANKS_MAX,
    NUM_STATUSES_MAX,
    Communicator,
    CommunicatorMember,
    Condition,
    LaunchLevel,
    LostProcess,
    MalformedRasStatus,
    Missing,
    NcclResult,
    RankFailure,
    RasStatus,
    Spread,
    communicator_hash,
    word,
)

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
    "timeouts": re.compile(r"Encountered (?P<n>\d{1,9}) communication timeout"),
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


def all_text(text: str) -> list[RasStatus]:
    """All answers in a text, at least one. Raises Malformed."""
    begins = [m.start() for m in re.finditer(r"^Job summary", text, re.MULTILINE)] or [0]
    if len(begins) > NUM_STATUSES_MAX:
        raise MalformedRasStatus(f"more than {NUM_STATUSES_MAX:,} answers")
    version = re.search(r"NCCL version ([0-9.]{1,20})", text)
    parts = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)]
    found = [_TextReader(version.group(1) if version else "").read(part) for part in parts]
    if all(s is None for s in found):
        raise MalformedRasStatus("cut short before its table of communicators")
    return [s for s in found if s is not None]


class _TextReader:
    def __init__(self, version: str) -> None:
        self._version = version
        self._built: dict[str, _Building] = {}
        self._now: _Building | None = None
        self._condition: Condition | None = None
        self._section = ""
        self._collective: str | None = None
        self._result = NcclResult.OTHER
        self._lost: list[LostProcess] = []
        self._num_comms = self._num_timeouts = self._num_ranks = 0

    def read(self, text: str) -> RasStatus | None:
        """None where it ends before the communicators."""
        if "Communicators..." not in text:
            return None
        for line in text.splitlines():
            self._line(_MORE_SPACE.sub(" ", line[:4400]).strip())
        dead: set[tuple[int | None, str]] = {(p.pid, p.host) for p in self._lost if p.dead}
        built = tuple(b.built(dead) for b in self._built.values())
        return RasStatus(
            form="text",
            nccl_version=self._version,
            communicators=built,
            num_communicators=max(self._num_comms, len(built)),
            lost=tuple(self._lost),
            num_timeouts=self._num_timeouts,
        )

    def _line(self, line: str) -> None:
        if not line:
            return
        for kind, pattern in _LINES.items():
            if (m := pattern.match(line)) is not None:
                self._take(kind, m.groupdict())
                return

    def _take(self, kind: str, got: dict[str, str]) -> None:
        if kind == "row":
            self._num_comms += int(got["comms"])
        elif kind == "section":
            self._section, self._now = got["section"], None
        elif kind == "timeouts":
            self._num_timeouts = int(got["n"])
        elif kind == "process":
            if len(self._lost) < NUM_COMMUNICATORS_MAX:
                dead = self._section == "DEAD"
                self._lost.append(LostProcess(pid=int(got["pid"]), host=got["host"], gpus=got["gpus"], dead=dead))
        elif kind == "communicator":
            self._begin(got)
        elif self._now is not None:
            self._tell(self._now, kind, got)

    def _begin(self, got: dict[str, str]) -> None:
        key = communicator_hash(got["hash"])
        if key not in self._built and len(self._built) >= NUM_COMMUNICATORS_MAX:
            raise MalformedRasStatus(f"more than {NUM_COMMUNICATORS_MAX:,} communicators")
        self._now = self._built.setdefault(key, _Building(key))
        self._collective = None
        self._condition = Condition(got["condition"]) if got["condition"] in set(Condition) else None
        if self._condition is not None:
            self._now.conditions.add(self._condition)

    def _tell(self, now: _Building, kind: str, got: dict[str, str]) -> None:
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
