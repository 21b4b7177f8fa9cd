"""Reads the output of the NCCL Inspector: `*.log` (JSON lines) incrementally, `*.prom` (text files) whole.

Each poll reads at most BYTES_PER_POLL of new lines over all files; where files grow faster (a job with small
collectives writes megabytes a second), the newest part is read and the rest is skipped and counted. Reading of a file
starts at its end when it is first seen at the first poll. A file that shrank or was replaced is read from its
beginning."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable
from rolecall.core.ids import NodeId
from rolecall.core.metrics import nccl as rows
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.formats.nccl.inspector import LINE_BYTES_MAX, InspectorOperation, Lines, gauges

INTERVAL_SECONDS = 5.0
NUM_FILES_MAX = 256
"""Newest first: directories keep the files of finished jobs."""
BYTES_PER_POLL = 256 << 10
"""Over all files: about 700 operations and 5 ms per poll."""
TEXTFILE_BYTES_MAX = 4 << 20
NUM_KINDS_MAX = 16
"""Kinds of operation with their own label; further ones are `other`."""
NUM_GPUS_MAX = 64


@dataclass(slots=True)
class LogTail:
    """Read position in one file."""

    identity: tuple[int, int]  # device and inode
    at: int
    lines: Lines = field(default_factory=Lines)
    rest: bytes = b""
    skipping: bool = False  # until the next end of line


@dataclass(slots=True)
class Sums:
    """Cumulative sums of one kind of operation."""

    num: int = 0
    seconds: float = 0.0
    message_bytes: float = 0.0
    bus_bytes: float = 0.0

    def add(self, operation: InspectorOperation) -> None:
        self.num += 1
        self.seconds += operation.seconds
        self.message_bytes += operation.size_bytes
        self.bus_bytes += operation.bus_bytes_per_second * operation.seconds


class NcclInspectorCollector:
    name = "nccl_inspector"

    def __init__(self, node: NodeId, directory: Path, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """`directory`: NCCL_INSPECTOR_DUMP_DIR of the jobs. It need not exist yet."""
        self.interval_seconds = interval_seconds
        self._node, self._directory = node, directory
        self._tails: dict[str, LogTail] = {}
        self._sums: dict[str, Sums] = {}
        self._num_lines = self._num_bad = self._num_skipped_bytes = self._num_dropped = 0
        self._first = True
        self._stamps: tuple[tuple[str, int, int, int], ...] = ()
        self._of_gpus: tuple[MetricValue, ...] = ()

    def close(self) -> None:
        self._tails.clear()

    def read(self, at: float) -> CollectorReading:
        """Raises CollectorUnavailable: the directory exists and cannot be listed."""
        try:
            logs, textfiles = self._files()
        except OSError as e:
            raise CollectorUnavailable(f"{self._directory}: {e.strerror or e}") from None
        for gone in self._tails.keys() - {name for name, _ in logs}:
            del self._tails[gone]
        left = BYTES_PER_POLL
        for n, (name, about) in enumerate(logs):
            # Later files may use the unused share of earlier ones.
            left -= self._follow(name, about, left // (len(logs) - n))
        self._first = False
        return CollectorReading(tuple(self._values(textfiles)))

    def _files(self) -> tuple[list[tuple[str, os.stat_result]], list[tuple[str, os.stat_result]]]:
        """(log files, text files). Raises OSError."""
        logs: list[tuple[str, os.stat_result]] = []
        textfiles: list[tuple[str, os.stat_result]] = []
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    kind = logs if entry.name.endswith(".log") else textfiles if entry.name.endswith(".prom") else None
                    try:
                        if kind is not None and entry.is_file(follow_symlinks=False):
                            kind.append((entry.name, entry.stat(follow_symlinks=False)))
                    except OSError:
                        continue  # removed since it was listed
        except FileNotFoundError:
            return [], []
        for found in (logs, textfiles):
            found.sort(key=lambda pair: -pair[1].st_mtime)
            del found[NUM_FILES_MAX:]
        return logs, textfiles

    def _follow(self, name: str, about: os.stat_result, num_bytes: int) -> int:
        """Reads at most `num_bytes` new bytes of a file; returns how many."""
        identity = (about.st_dev, about.st_ino)
        tail = self._tails.get(name)
        if tail is None or tail.identity != identity or about.st_size < tail.at:
            # One byte before the end: if it is a newline, the next line is complete.
            begin = max(0, about.st_size - 1) if tail is None and self._first else 0
            tail = self._tails[name] = LogTail(identity=identity, at=begin, skipping=begin > 0)
        if about.st_size == tail.at:
            return 0
        num_new = about.st_size - tail.at
        if num_new > num_bytes:
            self._num_skipped_bytes += num_new - num_bytes + len(tail.rest)
            tail.at, tail.rest, tail.skipping = about.st_size - num_bytes, b"", True
            tail.lines.lose_context()
        try:
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return 0  # removed since it was listed, or not readable
        try:
            data = os.pread(descriptor, min(num_bytes, num_new), tail.at)
        except OSError:
            return 0
        finally:
            os.close(descriptor)
        tail.at += len(data)
        self._take(tail, data)
        return len(data)

    def _take(self, tail: LogTail, data: bytes) -> None:
        if tail.skipping:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return
            tail.skipping = False
        *whole, tail.rest = (tail.rest + data).split(b"\n")
        before = tail.lines.num_lines, tail.lines.num_bad, tail.lines.num_dropped
        for line in whole:
            operation = tail.lines.take(line)
            if operation is not None:
                is_counted = operation.kind in self._sums or len(self._sums) < NUM_KINDS_MAX
                self._sums.setdefault(operation.kind if is_counted else "other", Sums()).add(operation)
        self._num_lines += tail.lines.num_lines - before[0]
        self._num_bad += tail.lines.num_bad - before[1]
        self._num_dropped += tail.lines.num_dropped - before[2]
        if len(tail.rest) > LINE_BYTES_MAX:
            self._num_bad += 1
            tail.rest, tail.skipping = b"", True

    def _values(self, textfiles: list[tuple[str, os.stat_result]]) -> Iterable[MetricValue]:
        node = self._node
        for kind, sums in self._sums.items():
            yield MetricValue(rows.OPERATIONS, (node, kind), float(sums.num))
            yield MetricValue(rows.EXECUTION, (node, kind), sums.seconds)
            yield MetricValue(rows.MESSAGE_BYTES, (node, kind), sums.message_bytes)
            yield MetricValue(rows.BUS_BYTES, (node, kind), sums.bus_bytes)
        yield MetricValue(rows.LINES, (node,), float(self._num_lines))
        yield MetricValue(rows.LINES_BAD, (node,), float(self._num_bad))
        yield MetricValue(rows.SKIPPED, (node,), float(self._num_skipped_bytes))
        yield MetricValue(rows.DROPPED, (node,), float(self._num_dropped))
        # The Inspector writes them every 30 s or less often.
        stamps = tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in textfiles[:NUM_GPUS_MAX])
        if stamps != self._stamps:
            self._stamps, self._of_gpus = stamps, tuple(self._of_textfiles([name for name, *_ in stamps]))
        yield from self._of_gpus

    def _of_textfiles(self, names: list[str]) -> Iterable[MetricValue]:
        worst: dict[tuple[Metric, str, str], float] = {}
        kinds: set[str] = set()
        for name in names:
            path = self._directory / name
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(descriptor, "rb") as file:
                    text = file.read(TEXTFILE_BYTES_MAX).decode("utf-8", "replace")
            except OSError:
                continue  # removed since it was listed, or not readable
            for gauge in gauges(text):
                kind = gauge.kind if gauge.kind in kinds or len(kinds) < NUM_KINDS_MAX else "other"
                kinds.add(kind)
                key = (rows.TIME_GPU if gauge.is_time else rows.BUSY_GPU, gauge.gpu, kind)
                known = worst.get(key, gauge.value)
                if key in worst or len(worst) < 2 * NUM_GPUS_MAX * NUM_KINDS_MAX:
                    worst[key] = max(known, gauge.value) if gauge.is_time else min(known, gauge.value)
        for (metric, gpu, kind), value in worst.items():
            yield MetricValue(metric, (self._node, gpu, kind), value)
