"""Origin and time of a kernel log line: the part before the message, in all common log formats.

    6,1234,5678901,-;message                                /dev/kmsg: priority, sequence number, microseconds since
    boot <4>[ 5678.901234] message    kern  :err   : [ 5678.901234] message    [ 5678.901234] message             dmesg
    [Sun Nov 22 08:00:00 2026] message    2026-11-22T08:00:00,123456+00:00 message                dmesg -T,
    --time-format Nov 22 08:00:00 host kernel: [ 5678.901234] message     2026-11-22T08:00:00.123456+00:00 host kernel:
    message [ 5678.901234] host kernel: message    1795334400.123456 host kernel: message        journalctl -k -o
    short-...

    [Nov22 08:00] message    [  +0.000012] message        dmesg -H: a minute, then seconds since the line before

A record of several lines (printk with line breaks) is one record of /dev/kmsg with escaped line breaks. dmesg and
journalctl print its further lines indented and without a time, rsyslog writes `#012` for each line break. The indented
lines of a record of /dev/kmsg are its properties (` SUBSYSTEM=pci`), and no message.

A syslog line whose tag is not `kernel` is from another program, and a /dev/kmsg record whose facility is not the
kernel's was written by a process: neither comes from the kernel. Formats: Documentation/ABI/testing/dev-kmsg, dmesg(1),
journalctl(1), RFC 3164, util-linux sys-utils/dmesg.c, rsyslog's $EscapeControlCharactersOnReceive."""

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

LINE_CHARS_MAX = 8192
HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampedLine:
    """One line of the kernel. At most one of the times is given, and none by `dmesg -t`.

    `wall_at`: seconds since 1970. `uptime_seconds`: since boot, as the kernel's own clock counts. `local`: month, day,
    hour, minute, second of a clock without year and zone. `zone_assumed`: `wall_at` is of a clock without a zone, taken
    to show UTC.
    """

    message: str
    host: str = ""
    wall_at: float | None = None
    uptime_seconds: float | None = None
    local: tuple[int, int, int, int, float] | None = None
    zone_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KmsgRecord:
    """One record of /dev/kmsg. `facility` 0: the kernel's own; others come from processes that write there."""

    sequence: int
    uptime_seconds: float
    facility: int
    message: str


_RECORD = re.compile(r"(\d{1,6}),(\d{1,20}),(\d{1,20}),([-c+][^;]{0,100}|[^;]{0,100});(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
KERNEL_FACILITY = 0


def parse_record(raw: str) -> KmsgRecord | None:
    """What one `read()` of /dev/kmsg gives; its continuation lines (` SUBSYSTEM=pci`) are left out. None: malformed."""
    head, _, _ = raw.partition("\n")
    match = _RECORD.match(head)
    if match is None:
        return None
    return KmsgRecord(
        sequence=int(match[2]),
        uptime_seconds=int(match[3]) / 1e6,
        facility=int(match[1]) >> 3,
        message=_ESCAPE.sub(lambda e: chr(int(e[1], 16)), match[5]),
    )


_HOST = r"([A-Za-z0-9][\w.:-]{0,252})"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = f"({'|'.join(_MONTHS)})"
_CLOCK = r"(\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
_UPTIME = r"\[ {0,8}(\d{1,12}\.\d{3,9})\](?:\[ {0,8}[TC]\d{1,10}\])?"
"""The kernel writes six decimals; some boards and log shippers write milliseconds or nanoseconds."""
_ISO_TIME = r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|[+-]\d\d:?\d\d))?)"
_KERNEL_PRIORITY = r"(?:<[0-7]>|kern {0,4}:\w{3,6} {0,4}: )?"
"""`dmesg -r` and `dmesg -x`; other facilities are not the kernel's."""

_DMESG = re.compile(rf"{_KERNEL_PRIORITY}{_UPTIME} ?(.*)", re.DOTALL)
_DMESG_DATE = re.compile(
    rf"{_KERNEL_PRIORITY}\[\w{{3}} {_MONTH} {{1,2}}(\d{{1,2}}) {_CLOCK} (\d{{4}})\] ?(.*)", re.DOTALL
)
_DMESG_MINUTE = re.compile(rf"{_KERNEL_PRIORITY}\[{_MONTH} {{0,2}}(\d{{1,2}}) (\d\d):(\d\d)\] ?(.*)", re.DOTALL)
_DMESG_SINCE = re.compile(rf"{_KERNEL_PRIORITY}\[ {{0,8}}\+(\d{{1,8}}\.\d{{3,9}})\] ?(.*)", re.DOTALL)
_ISO = re.compile(rf"{_KERNEL_PRIORITY}{_ISO_TIME} (.*)", re.DOTALL)
_OF_DMESG = re.compile(r".{10}T.{8},\d{6}[+-]\d\d:\d\d")
"""A comma before six digits, and a zone: neither journalctl, rsyslog nor Python's logging writes a time so."""
_SHORT = re.compile(rf"(?:<\d{{1,3}}>)?{_MONTH} {{1,2}}(\d{{1,2}}) {_CLOCK} (.*)", re.DOTALL)
_FULL = re.compile(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?) UTC (.*)", re.DOTALL)
_UNIX = re.compile(r"(\d{9,11}\.\d{1,9}) (.*)", re.DOTALL)
_TAG = re.compile(rf"{_HOST} kernel: ?(.*)", re.DOTALL)
_INNER_UPTIME = re.compile(r"\[ {0,8}\d{1,12}\.\d{1,9}\](?:\[ {0,8}[TC]\d{1,10}\])? ?")
"""Behind `kernel:` any number of decimals: some log shippers shorten them."""
_SYSLOG_LINE_BREAK = "#012"


def parse_line(line: str) -> TimestampedLine | None:
    """A line of a text log; None: it has no stamp that is known, or another program wrote it. Never raises."""
    line = line[:LINE_CHARS_MAX].rstrip("\r\n")
    if match := _RECORD.match(line):
        record = parse_record(line)
        if record is None or record.facility != KERNEL_FACILITY:
            return None
        return TimestampedLine(message=record.message, uptime_seconds=record.uptime_seconds)
    if match := _DMESG.match(line):
        return _tagged(TimestampedLine(message=match[2], uptime_seconds=float(match[1])), tag_wanted=False)
    if match := _DMESG_DATE.match(line):
        local = _local(match[1], match[2], match[3], match[4], match[5])
        wall_at = _wall(int(match[6]), local)
        return None if wall_at is None else TimestampedLine(message=match[7], wall_at=wall_at, zone_assumed=True)
    for pattern in (_ISO, _FULL):
        if match := pattern.match(line):
            if (at := _iso(match[1])) is None:
                return None
            wall_at = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
            zone_assumed = pattern is _ISO and at.tzinfo is None
            # dmesg writes no host after its time; journalctl and rsyslog do.
            tag_wanted = not _OF_DMESG.fullmatch(match[1])
            stamped = TimestampedLine(message=match[2], wall_at=wall_at, zone_assumed=zone_assumed)
            return _tagged(stamped, tag_wanted=tag_wanted)
    if match := _SHORT.match(line):
        local = _local(match[1], match[2], match[3], match[4], match[5])
        # 2024 is a leap year: without the year, February 29 may exist.
        return None if _wall(2024, local) is None else _tagged(TimestampedLine(message=match[6], local=local))
    if match := _UNIX.match(line):
        return _tagged(TimestampedLine(message=match[2], wall_at=float(match[1])))
    return None


class LineReader:
    """Takes the lines of one text log in order: a further line of a record gets its time stamp.

    `unstamped`: the log is `dmesg -t`, whose lines have no stamps. A further line counts only if it begins with the
    same word as its record: a process may have a line break in its name, and would otherwise write lines of its own.
    """

    def __init__(self, *, unstamped: bool = False) -> None:
        self._unstamped = unstamped
        self._record: TimestampedLine | None = None  # the newest line of the kernel, if nothing else followed
        self._minute: tuple[int, int, int, int, float] | None = None  # of dmesg -H

    def take(self, line: str) -> TimestampedLine | None:
        """None: neither a line of the kernel nor the rest of one. Never raises."""
        line = line[:LINE_CHARS_MAX].rstrip("\r\n")
        if line[:1] in (" ", "\t"):
            record, rest = self._record, line.strip()
            return replace(record, message=rest) if record is not None and continues(record.message, rest) else None
        stamped = parse_line(line) or self._of_minute(line)
        if stamped is None and self._unstamped and line:
            stamped = TimestampedLine(message=line)
        self._record = None if _RECORD.match(line) else stamped
        return stamped

    def _of_minute(self, line: str) -> TimestampedLine | None:
        """`dmesg -H` gives the seconds since the line before, and a new date with each new minute."""
        if match := _DMESG_MINUTE.match(line):
            local = _local(match[1], match[2], match[3], match[4], "0")
            if _wall(2024, local) is None:
                return None
            self._minute = local
            return TimestampedLine(message=match[5], local=local)
        if match := _DMESG_SINCE.match(line):
            if self._minute is not None:
                self._minute = (*self._minute[:4], min(self._minute[4] + float(match[1]), 59.999999))
            return TimestampedLine(message=match[2], local=self._minute)
        return None


def continues(record: str, message: str) -> bool:
    """Whether `message` can be a further line of this record: both begin with the same word (`NVRM:`)."""
    return bool(message) and record.split(maxsplit=1)[:1] == message.split(maxsplit=1)[:1]


def _tagged(line: TimestampedLine, *, tag_wanted: bool = True) -> TimestampedLine | None:
    """Splits `host kernel: message` after a time; without `tag_wanted`, the message may be there alone."""
    match = _TAG.match(line.message)
    if match is None:
        return None if tag_wanted else line
    message = match[2]
    if inner := _INNER_UPTIME.match(message):
        message = message[inner.end() :]
    return replace(line, message=message.replace(_SYSLOG_LINE_BREAK, "\n"), host=match[1])


def _local(month: str, day: str, hour: str, minute: str, second: str) -> tuple[int, int, int, int, float]:
    return _MONTHS.index(month) + 1, int(day), int(hour), int(minute), float(second.replace(",", "."))


def _wall(year: int, local: tuple[int, int, int, int, float]) -> float | None:
    """Seconds since 1970, the clock taken to show UTC. None: there is no such time."""
    month, day, hour, minute, second = local
    try:
        return datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp() + second if second < 61 else None
    except ValueError:
        return None


def _iso(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.replace(",", ".").replace(" +", "+").replace(" -", "-").replace(" Z", "Z"))
    except ValueError:
        return None


def wall_of_local(local: tuple[int, int, int, int, float], not_after: float) -> float | None:
    """Seconds since 1970 of a time without a year: the latest that is not after `not_after` (by more than a day, for
    the zone is not known either, and UTC is assumed). None: there is no such day in either year."""
    year = datetime.fromtimestamp(not_after, UTC).year
    for y in (year + 1, year, year - 1, year - 2, year - 3, year - 4):
        at = _wall(y, local)
        if at is not None and at <= not_after + 86_400:
            return at
    return None


_SYSLOG = re.compile(
    rf"(?:{_MONTH} {{1,2}}\d{{1,2}} {_CLOCK}|{_ISO_TIME}) {_HOST} [\w./@()-]{{1,64}}(?:\[\d{{1,10}}\])?: "
)


def is_syslog(line: str) -> bool:
    """Whether it is a line of syslog or the journal, whoever wrote it."""
    return _SYSLOG.match(line[:LINE_CHARS_MAX]) is not None
