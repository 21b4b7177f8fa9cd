"""Reads kernel logs for `rolecall diagnose`: facts with node and time. The text is untrusted: sizes are bounded.

Formats are recognized by content: output of dmesg and `journalctl -k`, /var/log/kern.log, /var/log/messages and
/dev/kmsg in all forms of `formats.kernel_log.timestamps`, journal exports, and `nvidia-bug-report.log.gz`, which
contains several of these. Files may be compressed or rotated. The node is the host in the line, else derived from the
names of file and folder. A time without a year is the latest one before the file's last modification, in UTC.

Journal exports are the output of `journalctl -o json` (one object per line) and `-o export` (systemd's Journal Export
Formats): `KEY=value` lines, an empty line after each entry; a value that is not plain text is `KEY`, line break, its
length (8 bytes, little-endian), its bytes. An entry is from the kernel if both its transport and its facility are the
kernel's: processes can write to /dev/kmsg, too.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

from rolecall.core.errors import ReadingStopped, UnreadableInput
from rolecall.core.text import counted
from rolecall.detector.artifacts.stacks.dumps import place_of
from rolecall.detector.base import packed_files as packed
from rolecall.detector.base.read_budget import Check, no_check
from rolecall.formats.kernel_log.messages import KernelFact, KernelReader, parse_message
from rolecall.formats.kernel_log.nvidia import SxidLine, XidLine
from rolecall.formats.kernel_log.timestamps import (
    HOST_CHARS_MAX,
    LINE_CHARS_MAX,
    LineReader,
    TimestampedLine,
    is_syslog,
    wall_of_local,
)

ENTRY_BYTES_MAX = 1 << 20
"""Longer lines are skipped. Kernel entries have about 2 KiB."""
KEYS = ("MESSAGE", "_HOSTNAME", "_TRANSPORT", "SYSLOG_FACILITY", "_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP")
WANTED = frozenset(k.encode() for k in KEYS)
FIRST_KEYS = (b"__CURSOR=", b"__REALTIME_TIMESTAMP=")


def export_kind(head: bytes) -> str:
    """`json`, `export`, or empty, by the first bytes of a file."""
    line = head.partition(b"\n")[0]
    if line.startswith(FIRST_KEYS):
        return "export"
    entry = _object(line) if line.startswith((b"{", b"\x1e{", b"data: {")) else None
    return "json" if entry is not None and "__REALTIME_TIMESTAMP" in entry and "MESSAGE" in entry else ""


def _stamps_of_export(file: BufferedIOBase, path: str) -> Iterator[TimestampedLine]:
    """Entries of the kernel. Raises UnreadableInput: damaged, so that the start of an entry cannot be found."""
    entry: dict[str, Any] = {}
    while line := file.readline(ENTRY_BYTES_MAX):
        if line == b"\n":
            if (stamped := _stamped(entry)) is not None:
                yield stamped
            entry = {}
            continue
        key, equals, value = line.rstrip(b"\n").partition(b"=")
        if not equals:
            value = _binary(file, path)
        if key in WANTED:
            entry[key.decode()] = value[:LINE_CHARS_MAX].decode("utf-8", "replace")
    if (stamped := _stamped(entry)) is not None:
        yield stamped


def _binary(file: BufferedIOBase, path: str) -> bytes:
    raw = file.read(8)
    length = int.from_bytes(raw, "little")
    if len(raw) == 8 and length <= ENTRY_BYTES_MAX:
        value = file.read(length + 1)
        if len(value) <= length or value.endswith(b"\n"):
            return value[:length]  # shorter: end of file
    elif len(raw) < 8:
        return b""
    raise UnreadableInput(where=path, reason="it is damaged: a field of this journal export has no proper length")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.removeprefix(b"\x1e").removeprefix(b"data: "))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _stamped(entry: Mapping[str, Any]) -> TimestampedLine | None:
    """The message of an entry if the kernel wrote it, else None."""
    if entry.get("_TRANSPORT") != "kernel" or entry.get("SYSLOG_FACILITY", "0") != "0":
        return None
    message, host = entry.get("MESSAGE"), entry.get("_HOSTNAME", "")
    if isinstance(message, list):  # bytes that are not UTF-8, as a list of numbers
        numbers = message[:LINE_CHARS_MAX]
        message = bytes(b for b in numbers if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    # Time of the event, else the time at which the journal received it.
    times = (entry.get(key) for key in ("_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP"))
    known = (t for t in times if isinstance(t, str) and t.isascii() and t.isdecimal() and len(t) <= 17)
    at = next((int(t) / 1e6 for t in known), None)
    if not isinstance(message, str) or at is None:
        return None
    host = host[:HOST_CHARS_MAX] if isinstance(host, str) else ""
    return TimestampedLine(message=message[:LINE_CHARS_MAX], host=host, wall_at=at)


HEAD_BYTES = 64 << 10
"""Bytes that decide the format of a file: most lines of /var/log/messages are not the kernel's."""
PROLOGUE_BYTES = 4096
HEAD_SHARE_MIN = 0.8
"""Minimum share of lines in the head with a recognized timestamp; one line without is none too many."""
UNSTAMPED_SHARE_MIN, UNSTAMPED_LINES_MIN = 0.6, 10
"""Of lines without stamps: minimum share that look like the kernel's; minimum number unless the log begins at boot or
one is an XID."""
LOG_BYTES_MAX = 1 << 30
"""Maximum decompressed size of a file."""
NUM_FACTS_MAX = 100_000
"""Per file; in a log storm, further lines are only counted."""
FACT_BYTES = 1500
"""Approximate memory of one fact."""
TEXT_CHARS_MAX = 400
XID_MARK = "NVRM: Xid"
PREFIX_CHARS_MAX = 80
"""Kept before the mark: log shippers put long prefixes there."""
NUM_UNREAD_XIDS_MAX = 100
"""Lines with this mark that could not be read, per file; a log with one is never healthy."""

BUG_REPORT = b"Start of NVIDIA bug report log file"
"""In the first lines of nvidia-bug-report.sh output; `uname: Linux HOST ..` follows."""
SAME_SECONDS = 1.0
"""Equal text of one node within this time, in two files or sections, is one line: syslog has whole seconds."""

_UNAME = re.compile(rb"^uname: Linux ([A-Za-z0-9][\w.-]{0,252}) ", re.MULTILINE)
_ROTATED = re.compile(r"(?:\.\d{1,3}|[-.]\d{8}(?:\d{2})?|\.old)$")
"""Suffix that logrotate adds to a name: a number or a date."""
_SUBSYSTEM = re.compile(r"(?:Linux version |[A-Za-z{\[][\w ./@,+(){}\[\]-]{0,60}(?::[\w:.]{1,40}){0,3}: ?\S)")
_DMESG_NAME = re.compile(r"(?:^|[-_.])(?:dmesg|kmsg)(?=[-_.]|$)", re.IGNORECASE)
_SUFFIX = re.compile(r"\.[A-Za-z]{1,6}$")
_GENERIC_NAME = re.compile(
    r"(?:^|[-_.])(?:dmesg|kern(?:el)?|kmsg|journal(?:ctl)?|messages|syslog|log)(?=[-_.]|$)", re.IGNORECASE
)

_HOST_NAME = re.compile(r"(?=[A-Za-z]\d*[A-Za-z-])(?!.*20\d\d([-_.]?)[01]\d\1[0-3]\d)[\w.-]*\d[\w.-]*")
"""Names of hosts have letters and digits (`gpu7`, `h100-4`); `k` or `x31` say nothing, nor does a date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogFact:
    """One fact. `at`: seconds since 1970, or since boot if not `dated`; 0 if not `timed`: unknown. `text`:
    the message, truncated. `zone_assumed`: the line has no zone, and `at` may be hours off."""

    node: str
    at: float
    dated: bool
    fact: KernelFact
    text: str
    timed: bool = True
    zone_assumed: bool = False

    @property
    def clock(self) -> int:
        """The best has number 0. Times of two clocks cannot be compared."""
        return int(self.zone_assumed) if self.dated else 2 if self.timed else 3


@dataclass(slots=True, kw_only=True)
class KernelLog:
    """`num_lines`: kernel lines. `num_dropped`: facts beyond the limit. `zone_assumed`: some times have no zone."""

    path: str
    seen: list[KernelLogFact] = field(default_factory=list)
    num_lines: int = 0
    num_dropped: int = 0
    zone_assumed: bool = False
    undated: bool = False
    untimed: bool = False
    cut_short: bool = False  # compressed, and its end is missing
    unread_xids: list[str] = field(default_factory=list)  # lines that hold XID_MARK and are no fact
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
    if export_kind(raw) or BUG_REPORT in raw[:PROLOGUE_BYTES]:
        return True
    if not raw or b"\0" in raw:
        return False
    lines = _records_of(raw)
    reader = LineReader()
    stamped = [reader.take(line) is not None for line in lines]
    if not any(stamped):
        return _is_unstamped(lines, path.name)
    known = sum(is_kernel or is_syslog(line) for line, is_kernel in zip(lines, stamped, strict=True))
    return known >= min(HEAD_SHARE_MIN * len(lines), max(2, len(lines) - 1))


def _records_of(head: bytes) -> list[str]:
    """Lines of a file's head, without continuations and journalctl's remarks."""
    lines = head.decode("utf-8", "replace").splitlines()
    if len(head) == HEAD_BYTES:
        lines.pop()  # the last line is incomplete
    return [line for line in lines if line.strip() and not line.startswith(("-- ", " ", "\t"))]


def _is_unstamped(lines: Sequence[str], name: str) -> bool:
    """Whether these lines without stamps are those of `dmesg -t`. Most look like the kernel's (`subsystem: text`), and
    one is the kernel's for certain, or the file name says so: any program can quote a line."""
    if not lines or lines[0].startswith("dmesg: ") or any(is_syslog(line) for line in lines):
        return False
    if sum(_SUBSYSTEM.match(line) is not None for line in lines) < UNSTAMPED_SHARE_MIN * len(lines):
        return False
    if any(line.startswith(("Linux version ", "Command line: ", "Kernel command line: ")) for line in lines):
        return True
    facts = [fact for line in lines if (fact := parse_message(line)) is not None]
    if len(lines) < UNSTAMPED_LINES_MIN and any(isinstance(fact, XidLine | SxidLine) for fact in facts):
        return True  # copied from a chat or a ticket
    return (bool(facts) and len(lines) >= UNSTAMPED_LINES_MIN) or _DMESG_NAME.search(name) is not None


def read(path: Path, check: Check = no_check) -> KernelLog:
    """The lines up to where `check` ends the reading, if it does. Raises UnreadableInput: the file is too large, or
    cannot be read."""
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
        unpacked = packed.DecompressedFile(path, LOG_BYTES_MAX, check)
        with BufferedReader(unpacked, packed.CHUNK_BYTES) as file:
            with suppress(ReadingStopped):
                for stamped in _stamps(file, head, log):
                    _take(log, stamped, elsewhere, status.st_mtime, readers)
            log.cut_short = unpacked.cut_short
        if is_report:
            # It repeats lines from dmesg, journal and syslog. Dated copies are kept.
            dated = with_known_zones([s for s in log.seen if s.dated])
            log.undated = log.undated and not dated
            last: dict[tuple[str, str], float] = {}
            repeated, log.seen = sorted(dated or log.seen, key=lambda s: s.at), []
            for s in repeated:
                if s.at - last.get((s.node, s.text), float("-inf")) >= SAME_SECONDS:
                    log.seen.append(s)
                last[s.node, s.text] = s.at
    except OSError as e:
        raise UnreadableInput(where=str(path), reason=f"it cannot be read: {e.strerror or e}") from e
    for node, reader in readers.items():
        log.uuids |= {(node, pci): uuid for pci, uuid in reader.uuids.items()}
    return log


def with_known_zones(seen: Sequence[KernelLogFact]) -> list[KernelLogFact]:
    """Where a line without zone and one with a zone tell of the same at the same time, the zone that was assumed is the
    right one, also in the other lines of that node."""
    zoned = {(s.node, s.text, int(s.at) + more) for s in seen if s.clock == 0 for more in (-1, 0, 1)}
    known = {s.node for s in seen if s.clock == 1 and (s.node, s.text, int(s.at)) in zoned}
    return [replace(s, zone_assumed=False) if s.clock == 1 and s.node in known else s for s in seen]


def kept_bytes(log: KernelLog) -> int:
    return FACT_BYTES * len(log.seen)


def _stamps(file: BufferedIOBase, head: bytes, log: KernelLog) -> Iterator[TimestampedLine]:
    """Lines of the kernel. Others that hold `XID_MARK` are noted in `log`."""
    match export_kind(head):
        case "json":
            while line := file.readline(ENTRY_BYTES_MAX):
                if (entry := _object(line)) is not None and (stamped := _stamped(entry)) is not None:
                    yield stamped
        case "export":
            yield from _stamps_of_export(file, log.path)
        case _:
            lines, plain = _records_of(head), LineReader()
            unstamped = not any(plain.take(line) for line in lines) and _is_unstamped(lines, Path(log.path).name)
            reader = LineReader(unstamped=unstamped)
            while raw := file.readline(LINE_CHARS_MAX):
                text = raw.decode("utf-8", "replace")
                if (stamped := reader.take(text)) is not None:
                    yield stamped
                else:
                    _note_unread(log, text)


def _take(
    log: KernelLog, stamped: TimestampedLine, elsewhere: str, written_at: float, readers: dict[str, KernelReader]
) -> None:
    log.num_lines += 1
    node = stamped.host.lower() or elsewhere
    reader = readers.setdefault(node, KernelReader()) if len(readers) < 4096 else KernelReader()
    fact = reader.take(stamped.message)
    if fact is None:
        _note_unread(log, stamped.message)
        return
    if len(log.seen) >= NUM_FACTS_MAX:
        log.num_dropped += 1
        return
    at = stamped.wall_at
    if stamped.local is not None:
        at = wall_of_local(stamped.local, written_at)
    zone_assumed = stamped.zone_assumed or stamped.local is not None
    log.zone_assumed |= zone_assumed
    dated = at is not None
    timed = dated or stamped.uptime_seconds is not None
    log.undated |= timed and not dated
    log.untimed |= not timed
    if at is None:
        at = stamped.uptime_seconds or 0.0
    text = stamped.message[:TEXT_CHARS_MAX].strip()
    log.seen.append(
        KernelLogFact(node=node, at=at, dated=dated, fact=fact, text=text, timed=timed, zone_assumed=zone_assumed)
    )


def _note_unread(log: KernelLog, line: str) -> None:
    at = line.find(XID_MARK)
    if at >= 0 and len(log.unread_xids) < NUM_UNREAD_XIDS_MAX:
        log.unread_xids.append(line[max(0, at - PREFIX_CHARS_MAX) : at + TEXT_CHARS_MAX].strip())


def _node_of(path: Path) -> str:
    """What file or folder calls a node (`node-3/dmesg`), else the name of the file (`gpu7.log`) if it looks like a
    host's, else its rest after removing words such as dmesg (`dmesg-vm.txt`), else the name of the folder
    (`gpu7/dmesg.1.gz`) if it looks like a host's, else a folder above that is called a node, else `unknown (file ..)`.
    """
    name, folder = path.name, path.absolute().parent.name
    near = place_of(Path("/", folder, name))
    for suffix in packed.SUFFIXES:
        name = name.removesuffix(suffix)
    stem = _SUFFIX.sub("", _ROTATED.sub("", name))
    rest = _GENERIC_NAME.sub("", stem).strip("-_.")
    has_name = _HOST_NAME.fullmatch(rest) or (rest != stem and any(map(str.isalpha, rest)))
    names = (
        str(near.get("node", "")),
        rest if has_name else "",
        folder if _HOST_NAME.fullmatch(folder) else "",
        str(place_of(path).get("node", "")),
    )
    return next((n.lower() for n in names if n), f"unknown (file {path.name})")


def time_remarks(logs: Sequence[KernelLog]) -> list[str]:
    """Reliability of the times."""
    remarks = []
    if any(log.zone_assumed for log in logs):
        remarks.append("some lines have no zone: UTC is assumed, and without a year as late as the file allows")
    if any(log.undated for log in logs):
        remarks.append("some lines have only seconds since boot, and so have their findings")
    if any(log.untimed for log in logs):
        remarks.append("some lines have no time (dmesg -t): when and how often their events happened is unknown")
    if dropped := sum(log.num_dropped for log in logs):
        remarks.append(f"{dropped:,} lines that report faults, beyond {NUM_FACTS_MAX:,} of a file, were left out")
    for log in logs:
        known = {s.text for s in log.seen}  # what another program quotes
        if unread := [line for line in log.unread_xids if line[line.index(XID_MARK) :] not in known]:
            remarks.append(
                f"cannot tell from {log.path}: {counted(len(unread), 'line')} with an XID could not be read, first "
                f"{unread[0]}; the output of `dmesg` or `journalctl -k` of this node would settle it"
            )
    remarks += [
        f"cannot tell from {log.path}: it has no kernel line; the output of `dmesg` or `journalctl -k` of this node "
        "would settle it"
        for log in logs
        if not log.num_lines
    ]
    return remarks + [f"{log.path}: truncated: the rest was read" for log in logs if log.cut_short]
