"""The Prometheus text format, read: lines `name{label="value",...} number [milliseconds]`.

Format: Prometheus' documentation, "Exposition formats", version 0.0.4. A damaged line is counted and passed over, the
others stand. Of a page with thousands of series a collector wants a few: lines of other names are not looked into.
"""

import re
from collections.abc import Container
from typing import NamedTuple

NUM_SAMPLES_MAX = 20_000
"""Of one page; what comes after is counted and passed over."""
LINE_BYTES_MAX = 16_384

# Each way to read a line has one way to split it: on a hostile line a second one would cost the square of its length.
_NAME = re.compile(r"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?=[{ \t])")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,|\})')
_NO_LABELS = re.compile(r"\{[ \t]*\}")
_TRAILING = re.compile(r"[ \t]*\}")  # of `{a="b",}`
_VALUE = re.compile(
    r"[ \t]*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?|[+-]?[iI]nf|[nN]a[nN])"
    r"(?:[ \t]+(-?[0-9]{1,18}))?[ \t\r]*\Z"
)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}


class MalformedMetricLine(ValueError):
    """A line that is not of the format: why."""


class PrometheusSample(NamedTuple):
    """`at_ms`: milliseconds since 1970, None where the line has no time of its own."""

    name: str
    labels: dict[str, str]
    value: float
    at_ms: int | None = None


class ParsedExposition(NamedTuple):
    """`num_malformed`: lines that could not be read; `num_dropped`: those beyond the bound."""

    samples: list[PrometheusSample]
    num_malformed: int
    num_dropped: int


def parse_line(line: str) -> PrometheusSample:
    """One line that is neither empty nor a comment.

    Raises:
        BadLine: it is no sample.
    """
    found = _NAME.match(line)
    if found is None:
        raise MalformedMetricLine("does not begin with a name")
    return _parse_rest(found.group(1), line, found.end())


def parse_page(
    body: bytes, wanted: Container[str] | None = None, *, num_samples_max: int = NUM_SAMPLES_MAX
) -> ParsedExposition:
    """The samples whose name is `wanted` (None: all). Never raises, whatever the bytes."""
    samples: list[PrometheusSample] = []
    malformed = dropped = 0
    for raw in body.split(b"\n"):
        if not raw or raw.startswith(b"#") or raw.isspace():
            continue
        try:
            if len(raw) > LINE_BYTES_MAX:
                raise MalformedMetricLine("too long")
            line = raw.decode()
            found = _NAME.match(line)
            if found is None:
                raise MalformedMetricLine("does not begin with a name")
            name = found.group(1)
            if wanted is not None and name not in wanted:
                continue
            if len(samples) >= num_samples_max:
                dropped += 1
                continue
            samples.append(_parse_rest(name, line, found.end()))
        except (UnicodeDecodeError, MalformedMetricLine):
            malformed += 1
    return ParsedExposition(samples, malformed, dropped)


def _parse_rest(name: str, line: str, at: int) -> PrometheusSample:
    """What follows the name, from `at`. Raises BadLine."""
    labels: dict[str, str] = {}
    if line[at] == "{":
        at = _parse_labels(line, at, labels)
    found = _VALUE.match(line, at)
    if found is None:
        raise MalformedMetricLine("no number, or more after it than a time stamp")
    value, at_ms = found.groups()
    return PrometheusSample(name, labels, float(value), None if at_ms is None else int(at_ms))


def _parse_labels(line: str, at: int, labels: dict[str, str]) -> int:
    """Fills `labels` from the `{` at `at`; where it ended. Raises BadLine."""
    if found := _NO_LABELS.match(line, at):
        return found.end()
    at += 1
    while True:
        found = _LABEL.match(line, at)
        if found is None:
            raise MalformedMetricLine('a label is not of the form name="value"')
        name, value, end = found.groups()
        if name in labels:
            raise MalformedMetricLine(f"label {name} stands twice")
        labels[name] = _ESCAPE.sub(_unescaped, value) if "\\" in value else value
        at = found.end()
        if end == "}":
            return at
        if trailing := _TRAILING.match(line, at):
            return trailing.end()


def _unescaped(found: re.Match[str]) -> str:
    try:
        return _ESCAPED[found.group(1)]
    except KeyError:
        raise MalformedMetricLine(f"\\{found.group(1)} is no escape of the format") from None
