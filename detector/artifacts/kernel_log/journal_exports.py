"""Reads kernel messages from the output of `journalctl -o json` and `-o export` (systemd's Journal Export Formats).

json: one object per line. export: `KEY=value` lines, an empty line after each entry; a value that is not plain text is
`KEY`, line break, its length (8 bytes, little-endian), its bytes. An entry is from the kernel if both its transport and
its facility are the kernel's: processes can write to /dev/kmsg, too.
"""

import json
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from typing import Any

from rolecall.core.errors import UnreadableInput
from rolecall.formats.kernel_log.timestamps import HOST_CHARS_MAX, LINE_CHARS_MAX, TimestampedLine

ENTRY_BYTES_MAX = 1 << 20
"""Longer lines are skipped. Kernel entries have about 2 KiB."""
KEYS = ("MESSAGE", "_HOSTNAME", "_TRANSPORT", "SYSLOG_FACILITY", "_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP")
WANTED = frozenset(k.encode() for k in KEYS)
FIRST_KEYS = (b"__CURSOR=", b"__REALTIME_TIMESTAMP=")


def kind_of(head: bytes) -> str:
    """`json`, `export`, or empty, by the first bytes of a file."""
    line = head.partition(b"\n")[0]
    if line.startswith(FIRST_KEYS):
        return "export"
    entry = _object(line) if line.startswith((b"{", b"\x1e{", b"data: {")) else None
    return "json" if entry is not None and "__REALTIME_TIMESTAMP" in entry and "MESSAGE" in entry else ""


def stamps_of_json(file: BufferedIOBase) -> Iterator[TimestampedLine]:
    """Entries of the kernel."""
    while line := file.readline(ENTRY_BYTES_MAX):
        if (entry := _object(line)) is not None and (stamped := _stamped(entry)) is not None:
            yield stamped


def stamps_of_export(file: BufferedIOBase, path: str) -> Iterator[TimestampedLine]:
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
    message = entry.get("MESSAGE")
    if isinstance(message, list):  # bytes that are not UTF-8, as a list of numbers
        numbers = message[:LINE_CHARS_MAX]
        message = bytes(b for b in numbers if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    host, at = entry.get("_HOSTNAME", ""), _seconds(entry)
    if not isinstance(message, str) or at is None:
        return None
    return TimestampedLine(
        message=message[:LINE_CHARS_MAX],
        host=host[:HOST_CHARS_MAX] if isinstance(host, str) else "",
        wall_at=at,
    )


def _seconds(entry: Mapping[str, Any]) -> float | None:
    """Time of the event, else the time at which the journal received it."""
    for key in ("_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP"):
        text = entry.get(key)
        if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= 17:
            return int(text) / 1e6
    return None
