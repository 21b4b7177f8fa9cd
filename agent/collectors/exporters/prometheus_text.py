"""Samples from another program's metrics page, line by line with the parser of prometheus_client.

Line by line because the parser rejects a whole page at its first malformed line. A collector needs few of a page's
thousands of series: lines with other names are skipped unparsed.
"""

import re
from collections.abc import Container
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

NUM_SAMPLES_MAX = 20_000
"""Limit per page; further samples are counted and dropped."""
LINE_BYTES_MAX = 16_384
_NAME = re.compile(rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*[{ \t]")


class ParsedExposition(NamedTuple):
    """`num_malformed`: lines that cannot be parsed; `num_dropped`: wanted samples beyond the limit."""

    samples: list[Sample]
    num_malformed: int
    num_dropped: int


def parse_page(
    body: bytes, wanted: Container[str] | None = None, *, num_samples_max: int = NUM_SAMPLES_MAX
) -> ParsedExposition:
    """The samples whose name is `wanted` (None: all). Never raises, whatever the bytes."""
    samples: list[Sample] = []
    malformed = dropped = 0
    for line in body.split(b"\n"):
        if not line or line.isspace() or line.lstrip().startswith(b"#"):
            continue
        if wanted is not None and (found := _NAME.match(line)) and found.group(1).decode() not in wanted:
            continue
        if len(samples) >= num_samples_max:
            dropped += 1
            continue
        sample = _parse_line(line)
        if sample is None:
            malformed += 1
        elif wanted is None or sample.name in wanted:
            samples.append(sample)
    return ParsedExposition(samples, malformed, dropped)


def _parse_line(line: bytes) -> Sample | None:
    if len(line) > LINE_BYTES_MAX:
        return None
    try:
        (family,) = text_string_to_metric_families(line.decode())
        (sample,) = family.samples
        return sample._replace(value=float(sample.value))
    except (ValueError, OverflowError, IndexError):  # what the parser raises for a malformed line
        return None
