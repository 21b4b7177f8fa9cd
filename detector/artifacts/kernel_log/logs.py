"""Reads kernel logs for `rolecall diagnose`: facts with node and time. The text is untrusted: sizes are bounded.

Formats are recognized by content: output of dmesg and `journalctl -k`, /var/log/kern.log, /var/log/messages and
/dev/kmsg in all forms of `formats.kernel_log.timestamps`, journal exports (`journal_exports.py`), and
`nvidia-bug-report.log.gz`, which contains several of these. Files may be compressed or rotated. The node is the host in
the line, else derived from the names of file and folder. A time without a year is the latest one before the file's last
modification, in UTC; if there are only seconds since boot, these are the times.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase, BufferedReader
from pathlib import Path

from rolecall.core.errors import UnreadableInput
from rolecall.detector.artifacts.kernel_log import journal_exports
from rolecall.detector.artifacts.stacks.file_names import place_of
from rolecall.detector.base import packed_files as packed
from rolecall.detector.base.read_budget import Budget
from rolecall.formats.kernel_log.messages import KernelFact, KernelReader
from rolecall.formats.kernel_log.timestamps import LINE_CHARS_MAX, TimestampedLine, is_syslog, parse_line, wall_of_local

HEAD_BYTES = 64 << 10
"""Bytes that decide the format of a file: most lines of /var/log/messages are not the kernel's."""
PROLOGUE_BYTES = 4096
HEAD_SHARE_MIN = 0.8
"""Minimum share of lines in the head with a recognized timestamp."""
LOG_BYTES_MAX = 1 << 30
"""Maximum decompressed size of a file."""
NUM_FACTS_MAX = 100_000
"""Per file; in a log storm, further lines are only counted."""
FACT_BYTES = 1500
"""Approximate memory of one fact."""
TEXT_CHARS_MAX = 400

BUG_REPORT = b"Start of NVIDIA bug report log file"
"""In the first lines of nvidia-bug-report.sh output; `uname: Linux HOST ..` follows."""
SAME_SECONDS = 1.0
"""Equal text of one node within this time, in two files or sections, is one line: syslog has whole seconds."""

_UNAME = re.compile(rb"^uname: Linux ([A-Za-z0-9][\w.-]{0,252}) ", re.MULTILINE)
_ROTATED = re.compile(r"(?:\.\d{1,3}|[-.]\d{8}(?:\d{2})?|\.old)$")
"""Suffix that logrotate adds to a name: a number or a date."""
_SUFFIX = re.compile(r"\.[A-Za-z]{1,6}$")
_GENERIC_NAME = re.compile(
    r"(?:^|[-_.])(?:dmesg|kern(?:el)?|kmsg|journal(?:ctl)?|messages|syslog|log)(?=[-_.]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogFact:
    """One fact. `at`: seconds since 1970, or since boot if not `dated`. `text`: the message, truncated."""

    node: str
    at: float
    dated: bool
    fact: KernelFact
    text: str


@dataclass(slots=True, kw_only=True)
class KernelLog:
    """`num_lines`: kernel lines. `num_dropped`: facts beyond the limit. `zone_assumed`: some times have no zone."""

    path: str
    seen: list[KernelLogFact] = field(default_factory=list)
    num_lines: int = 0
    num_dropped: int = 0
    zone_assumed: bool = False
    undated: bool = False
    cut_short: bool = False  # compressed, and its end is missing
    uuids: dict[tuple[str, str], str] = field(default_factory=dict)  # by node and PCI address


def is_log(path: Path) -> bool:
    """Whether the file begins like a kernel log (timestamped lines, some of them the kernel's) or like a journal
    export. Raises OSError."""
    if not path.is_file():  # a pipe would block
        return False
    try:
        raw = packed.head(path, HEAD_BYTES)
    except UnreadableInput:
        return _GENERIC_NAME.search(path.name) is not None  # reading it reports the error
    if journal_exports.kind_of(raw) or BUG_REPORT in raw[:PROLOGUE_BYTES]:
        return True
    if not raw or b"\0" in raw:
        return False
    lines = raw.decode("utf-8", "replace").splitlines()
    if len(raw) == HEAD_BYTES:
        lines.pop()  # the last line is incomplete
    lines = [line for line in lines if line.strip() and not line.startswith(("-- ", " "))]
    kernel = sum(parse_line(line) is not None for line in lines)
    return kernel > 0 and sum(
        parse_line(line) is not None or is_syslog(line) for line in lines
    ) >= HEAD_SHARE_MIN * len(lines)


def read(path: Path) -> KernelLog:
    """Raises UnreadableInput: the file is too large, or cannot be read."""
    log = KernelLog(path=str(path))
    readers: dict[str, KernelReader] = {}
    elsewhere = _node_of(path)
    try:
        status = path.stat()
        if status.st_size > LOG_BYTES_MAX:
            raise UnreadableInput(where=str(path), reason=f"it is larger than {LOG_BYTES_MAX >> 30} GiB: cut it")
        head = packed.head(path, HEAD_BYTES)
        is_report = BUG_REPORT in head[:PROLOGUE_BYTES]
        if is_report and (uname := _UNAME.search(head[:PROLOGUE_BYTES])):
            elsewhere = uname[1].decode().lower()
        unpacked = packed.DecompressedFile(path, LOG_BYTES_MAX)
        with BufferedReader(unpacked, packed.CHUNK_BYTES) as file:
            for stamped in _stamps(file, head, str(path)):
                _take(log, stamped, elsewhere, status.st_mtime, readers)
            log.cut_short = unpacked.cut_short
        if is_report:
            _drop_repeated(log)
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=f"it cannot be read: {e.strerror or e}") from e
    for node, reader in readers.items():
        log.uuids |= {(node, pci): uuid for pci, uuid in reader.uuids.items()}
    return log


def read_all(files: Sequence[Path], named: Sequence[Path], budget: Budget) -> tuple[list[KernelLog], tuple[str, ...]]:
    """The logs, and the errors of unreadable files in folders. Raises UnreadableInput: one of `named` or all files are
    unreadable, or the memory budget is exhausted."""
    logs, unreadable = list[KernelLog](), list[UnreadableInput]()
    for file in files:
        budget.check_time(str(file))
        try:
            log = read(file)
        except UnreadableInput as e:
            if file in named:
                raise
            unreadable.append(e)
            continue
        budget.keep(FACT_BYTES * len(log.seen), str(file))
        logs.append(log)
    if not logs:
        raise unreadable[0]
    return logs, tuple(str(e) for e in unreadable)


def _drop_repeated(log: KernelLog) -> None:
    """A bug report repeats lines from dmesg, journal and syslog. Dated copies are kept."""
    dated = [s for s in log.seen if s.dated]
    log.undated = log.undated and not dated
    last: dict[tuple[str, str], float] = {}
    kept = []
    for s in sorted(dated or log.seen, key=lambda s: s.at):
        if s.at - last.get((s.node, s.text), float("-inf")) >= SAME_SECONDS:
            kept.append(s)
        last[s.node, s.text] = s.at
    log.seen = kept


def _stamps(file: BufferedIOBase, head: bytes, path: str) -> Iterator[TimestampedLine]:
    """Lines of the kernel."""
    match journal_exports.kind_of(head):
        case "json":
            yield from journal_exports.stamps_of_json(file)
        case "export":
            yield from journal_exports.stamps_of_export(file, path)
        case _:
            while raw := file.readline(LINE_CHARS_MAX):
                if (stamped := parse_line(raw.decode("utf-8", "replace"))) is not None:
                    yield stamped


def _take(
    log: KernelLog, stamped: TimestampedLine, elsewhere: str, written_at: float, readers: dict[str, KernelReader]
) -> None:
    log.num_lines += 1
    node = stamped.host.lower() or elsewhere
    reader = readers.setdefault(node, KernelReader()) if len(readers) < 4096 else KernelReader()
    fact = reader.take(stamped.message)
    if fact is None:
        return
    if len(log.seen) >= NUM_FACTS_MAX:
        log.num_dropped += 1
        return
    at = stamped.wall_at
    if stamped.local is not None:
        at, log.zone_assumed = wall_of_local(stamped.local, written_at), True
    dated = at is not None
    log.undated |= not dated
    if at is None:
        at = stamped.uptime_seconds or 0.0
    log.seen.append(
        KernelLogFact(node=node, at=at, dated=dated, fact=fact, text=stamped.message[:TEXT_CHARS_MAX].strip())
    )


def _node_of(path: Path) -> str:
    """From the file name (`node-7/dmesg.1.gz`, `dmesg-gpu7.txt`, `gpu7.log`), else from the folder name."""
    if node := place_of(path).get("node"):
        return str(node).lower()
    name = path.name
    for suffix in packed.SUFFIXES:
        name = name.removesuffix(suffix)
    rest = _GENERIC_NAME.sub("", _SUFFIX.sub("", _ROTATED.sub("", name))).strip("-_.")
    return (rest or path.absolute().parent.name).lower()


def time_remarks(logs: Sequence[KernelLog]) -> list[str]:
    """Reliability of the times."""
    said = []
    if any(log.zone_assumed for log in logs):
        said.append(
            "some lines say neither year nor zone: they were taken to be of UTC, and as late as the file allows"
        )
    if any(log.undated for log in logs):
        said.append("some lines say only seconds since boot: so do the times of what was found in them")
    if dropped := sum(log.num_dropped for log in logs):
        said.append(f"{dropped:,} lines beyond {NUM_FACTS_MAX:,} of a file that tell of faults were left out")
    said += [f"{log.path}: its end is missing: what was left was read" for log in logs if log.cut_short]
    return said
