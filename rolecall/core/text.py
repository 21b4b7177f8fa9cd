"""Sanitization of untrusted text: names, reasons and log lines may contain terminal or browser control sequences."""

import html
from collections.abc import Iterable
from datetime import UTC, datetime

DATES_FROM_SECONDS = 1e8
"""Smaller times are relative to the start of a recording, not to 1970."""
IS_GONE = "is gone"
"""Last words of `rolecall node end` if there was nothing to end."""


def plain(text: object, limit: int = 2000) -> str:
    """`text` with control, format and direction characters replaced by U+FFFD, truncated to `limit` characters.

    A newline or tab becomes a space, so that one line stays one line.
    """
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(" " if c in "\n\t\r" else c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escape(text: object, limit: int = 2000) -> str:
    """`text` for HTML: as content or inside a quoted attribute."""
    return html.escape(plain(text, limit), quote=True)


def in_words(name: object) -> str:
    """The value of an enum in a sentence: `replace replica` for `replace_replica`."""
    return str(name).replace("_", " ")


def node_text(node: str) -> str:
    """`node m07`; a name that says so itself stays as it is: `node-2`."""
    return node if node.casefold().startswith("node") else f"node {node}"


def utc(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC", none: str = "at an unknown time") -> str:
    """Wall seconds as a date; `none` if out of range, because the value may come from untrusted input."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return none


def iso_utc(at: float) -> str:
    """`2026-11-21T18:20:03Z`; seconds for times of a recording that are not dates."""
    if abs(at) < DATES_FROM_SECONDS:
        return f"{at:.1f} s"
    return utc(at, "%Y-%m-%dT%H:%M:%SZ", f"{at:g} s")


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 finding`, `2 findings`, `1,024 processes`; `plural` where the noun does not simply take an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def spans(numbers: Iterable[int]) -> str:
    """`0-3,7`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


_PAST = {
    " is hung:": " was hung:",
    " is slow:": " was slow:",
    " is lost:": " was lost:",
    " is behind in ": " was behind in ",
    " is waiting for it": " was waiting for it",
    " are waiting for it": " were waiting for it",
    " make no progress in ": " made no progress in ",
    " computes wrong numbers": " computed wrong numbers",
}
"""What detectors say of a fault that goes on, and of one that is over."""


def past(because: str) -> str:
    """The sentence of a diagnosis once the fault is over."""
    for now, then in _PAST.items():
        because = because.replace(now, then)
    return because


def os_reason(error: BaseException) -> str:
    """Why a call of the system failed, without the number: `No such file or directory`; or why a file was not read."""
    if isinstance(error, UnicodeDecodeError):
        return "not a text file (UTF-8)"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def percent(share: float, digits: int = 0) -> str:
    """`93 %`; `93.4 %` with one digit."""
    return f"{100 * share:.{digits}f} %"


_AGES = ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
"""(from this many seconds on, seconds of the unit, unit) of an age."""


def ago(at: float, now: float) -> str:
    """`3 min ago, 14:05:31 UTC`, with its date on another day. `at` and `now`: wall seconds."""
    same_day = utc(at, "%Y-%m-%d") == utc(now, "%Y-%m-%d")
    absolute = utc(at, "%H:%M:%S UTC" if same_day else "%Y-%m-%d %H:%M:%S UTC")
    size, unit = next((size, unit) for least, size, unit in _AGES if abs(now - at) >= least)
    amount = f"{abs(now - at) / size:.0f} {unit}"
    return f"{amount} ago, {absolute}" if at <= now else f"in {amount}, {absolute}"


def seconds(value: float | None, none: str = "–") -> str:
    """`0.31 s`, `9.8 s`, `2 min 05 s`, `3 h 20 min`, `2 d 04 h`."""
    if value is None:
        return none
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
