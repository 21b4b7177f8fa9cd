"""Output of the NCCL Inspector (a profiler plugin, NCCL 2.28.3 and later): JSON lines, or a Prometheus text file.

Only finished operations appear: a hung one is absent, and absence means unknown. Across ranks an operation is joined by
communicator and sequence number: the late rank has the shortest time, because the others' times include the wait for
it. Until format 4.2 each line is complete; from 4.3 on a `dump_stats` line carries header and metadata for the
following lines. Lines truncated by a crash are counted and skipped. Source: NCCL `plugins/profiler/inspector`, its
README.

Untrusted input: no line raises, texts and numbers are bounded.
"""

import json
import math
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rolecall.formats.nccl.ras import word

LINE_BYTES_MAX = 64 << 10
"""A line of the verbose form with 64 channels takes some 16 KB."""
NUM_GAUGES_MAX = 20_000
_GIGA = 1e9
_NUMBER_MAX = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Whose operations they are. `written_at`: wall seconds of the dump; 0 where it does not say."""

    communicator: str
    name: str
    rank: int
    num_ranks: int
    num_nodes: int
    host: str
    pid: int
    written_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorOperation:
    """A finished collective, or a send or receive (`is_p2p`)."""

    context: Context
    kind: str
    sequence: int
    size_bytes: int
    seconds: float
    bus_bytes_per_second: float
    is_p2p: bool


class Lines:
    """Lines of one file, in order. `num_bad`: truncated or unknown; `num_dropped`: reported as lost by the
    Inspector."""

    def __init__(self) -> None:
        self.num_lines = self.num_bad = self.num_dropped = 0
        self._context: Context | None = None
        self._num_left = 0

    def take(self, line: bytes) -> InspectorOperation | None:
        """The operation of a line; None for one that has none."""
        if not line.strip():
            return None
        self.num_lines += 1
        try:
            value = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.num_bad += 1
            return None
        stats = value.get("dump_stats")
        context = _context(value)
        if isinstance(stats, dict):
            self._context = context
            numbers = (_number(stats.get(f"{kind}_records")) for kind in ("coll", "p2p", "proxy"))
            self._num_left = int(sum(n or 0 for n in numbers))
            dropped = (_number(stats.get(f"{kind}_dropped_since_last_dump")) for kind in ("coll", "p2p"))
            self.num_dropped += int(sum(n or 0 for n in dropped))
            self.num_bad += context is None
            return None
        if context is None and self._num_left > 0:
            self._num_left -= 1
            context = self._context
        has_operation = isinstance(value.get("coll_perf"), dict) or isinstance(value.get("p2p_perf"), dict)
        if "proxy_trace" in value or (context is None and "header" not in value and has_operation):
            return None  # the latter: from a dump whose header was not seen
        found = _operation(value, context) if context is not None else None
        self.num_bad += found is None
        return found

    def lose_context(self) -> None:
        """Bytes were skipped: the next lines may belong to a dump whose header was not seen."""
        self._context, self._num_left = None, 0


def _context(value: dict[str, Any]) -> Context | None:
    header, metadata = value.get("header"), value.get("metadata")
    if not isinstance(header, dict):
        return None
    about: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
    rank, num_ranks = _number(header.get("rank")), _number(header.get("n_ranks"))
    communicator = word(header.get("id"))
    if rank is None or num_ranks is None or not communicator:
        return None
    return Context(
        communicator=communicator,
        name=word(header.get("comm_name")),
        rank=int(rank),
        num_ranks=int(num_ranks),
        num_nodes=int(_number(header.get("nnodes")) or 0),
        host=word(about.get("hostname")),
        pid=int(_number(about.get("pid")) or 0),
        written_at=(_number(about.get("dump_timestamp_us")) or 0.0) * 1e-6,
    )


def _operation(value: dict[str, Any], context: Context) -> InspectorOperation | None:
    for prefix in ("coll", "p2p"):
        record = value.get(f"{prefix}_perf")
        if not isinstance(record, dict):
            continue
        kind = word(record.get(prefix)) or word(record.get(f"{prefix}_operation"))
        keys = ("sn", "msg_size_bytes", "exec_time_us")
        sequence, size, micros = (_number(record.get(f"{prefix}_{key}")) for key in keys)
        if not kind or sequence is None or micros is None:
            return None
        return InspectorOperation(
            context=context,
            kind=kind,
            sequence=int(sequence),
            size_bytes=int(size or 0),
            seconds=micros * 1e-6,
            bus_bytes_per_second=(_number(record.get(f"{prefix}_busbw_gbs")) or 0.0) * _GIGA,
            is_p2p=prefix == "p2p",
        )
    return None


def _number(value: Any) -> float | None:
    """Integers stay exact."""
    if type(value) is int:
        return value if 0 <= value < 1 << 63 else None
    if type(value) is float and math.isfinite(value) and 0.0 <= value < _NUMBER_MAX:
        return value
    return None


BANDWIDTH = ("nccl_bus_bandwidth_gbs", "nccl_p2p_bus_bandwidth_gbs")
"""Geometric means of the last window."""
TIME = ("nccl_collective_exec_time_microseconds", "nccl_p2p_exec_time_microseconds")
"""Arithmetic means of the last window."""
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]{0,80})\{(?P<labels>.{0,2000})\}[ \t]+(?P<value>\S{1,40})(?:[ \t]+\S{1,40})?$"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]{0,40})="((?:[^"\\]|\\.){0,200})"(?:,|$)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A line of the text file. `value`: seconds, or bytes per second. `gpu`: the number of `GPU0`."""

    is_time: bool
    kind: str
    gpu: str
    value: float


def gauges(text: str) -> list[Gauge]:
    """Of a text file. Lines of no known form are skipped."""
    return list(islice(filter(None, map(_gauge, text.splitlines())), NUM_GAUGES_MAX))


def _gauge(line: str) -> Gauge | None:
    match = _SAMPLE.match(line.strip())
    if match is None or match.group("name") not in (*BANDWIDTH, *TIME):
        return None
    labels = {key: value for key, value in _LABEL.findall(match.group("labels"))}
    try:
        value = _number(float(match.group("value")))
    except ValueError:
        return None
    kind = word(labels.get("collective") or labels.get("p2p_operation"))
    if value is None or not kind:
        return None
    is_time = match.group("name") in TIME
    return Gauge(
        is_time=is_time,
        kind=kind,
        gpu=word(labels.get("gpu", "")).removeprefix("GPU"),
        value=value * 1e-6 if is_time else value * _GIGA,
    )
