"""One count of XIDs from several sources: NVML reports the critical ones, the kernel log nearly all.

Reports of two sources for the same GPU and code within `SAME_SECONDS` are one event; two reports of one source are two.
`XidMerger` deduplicates and counts; `XidCollector` exports the counts and keeps them on disk, because Prometheus sees
no increase in a counter that first appears with the value 1."""

import json
import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, LoggedOnce
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.kernel import XID_EVENTS, XID_LAST, XIDS_NOT_COUNTED
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.rundir import write_atomically
from rolecall.formats.kernel_log.nvidia import normal_pci

logger = logging.getLogger(__name__)

SAME_SECONDS = 2.0
"""Between NVML's and the kernel log's report of one event. A longer window merges distinct events more often."""
NUM_PENDING_MAX = 256
"""Events of one GPU and code within that window that the other source may still report."""
NUM_SERIES_MAX = 512
"""Pairs of GPU and code that are counted: 8 GPUs with 64 codes each. Further ones share one counter."""
SAVE_INTERVAL_SECONDS = 1.0


@dataclass(slots=True)
class _Event:
    at: float
    sources: set[str]


@dataclass(slots=True)
class Count:
    """`last_at`: node monotonic seconds; before the agent's start they may be negative."""

    number: int = 0
    last_at: float = 0.0


@dataclass(slots=True)
class _Series:
    count: Count = field(default_factory=Count)
    pending: deque[_Event] = field(default_factory=lambda: deque(maxlen=NUM_PENDING_MAX))


def gpu_key(gpu_or_pci: int | str) -> str:
    """`3`, `"3"` -> `3`; an address -> `0000:3b:00`. Sources must name a GPU alike, by index where it is known."""
    text = str(gpu_or_pci)
    return normal_pci(text) if ":" in text else text


class XidMerger:
    """Thread-safe: each method holds one lock for microseconds and calls no foreign code under it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[str, int], _Series] = {}
        self.not_counted = 0

    def merge(self, at: float, gpu_or_pci: int | str, xid: int, source: str) -> bool:
        """Whether this event is new, and now counted; else another `source` (`nvml`, `kernel`) reported it."""
        key = gpu_key(gpu_or_pci), xid
        with self._lock:
            series = self._series.get(key)
            if series is None:
                if len(self._series) >= NUM_SERIES_MAX:
                    self.not_counted += 1
                    return True
                series = self._series[key] = _Series()
            pending = series.pending
            while pending and pending[0].at < at - SAME_SECONDS:
                pending.popleft()
            for event in pending:
                if source not in event.sources and abs(event.at - at) <= SAME_SECONDS:
                    event.sources.add(source)
                    return False
            pending.append(_Event(at, {source}))
            series.count.number += 1
            series.count.last_at = max(at, series.count.last_at) if series.count.number > 1 else at
            return True

    def counts(self) -> dict[tuple[str, int], Count]:
        """By GPU and code, a copy."""
        with self._lock:
            return {key: Count(s.count.number, s.count.last_at) for key, s in self._series.items()}

    def resume(self, counts: dict[tuple[str, int], Count]) -> None:
        """Restores the counts from before a restart. Called before the first `merge`."""
        with self._lock:
            for key, count in list(counts.items())[:NUM_SERIES_MAX]:
                self._series[key] = _Series(count)


class XidCollector:
    """The merger's counts as metrics. Reading cannot fail; with a full disk a restart loses the counts."""

    name = "xids"
    interval_seconds = 1.0

    def __init__(
        self,
        merger: XidMerger,
        *,
        node: NodeId,
        state_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._merger, self._node, self._file = merger, node, state_file
        self._clock = clock or SystemClock()
        self._logged = LoggedOnce()
        self._values: tuple[MetricValue, ...] = ()
        self._shown: dict[tuple[str, int], Count] = {}
        self._saved_at = float("-inf")
        self._unsaved = False
        if state_file is not None:
            merger.resume(self._load(state_file))

    def read(self, at: float) -> CollectorReading:
        counts = self._merger.counts()
        if counts != self._shown or not self._values:
            self._shown, self._unsaved = counts, self._unsaved or counts != self._shown
            offset = self._clock.wall() - self._clock.monotonic()
            values = [MetricValue(XIDS_NOT_COUNTED, (self._node,), float(self._merger.not_counted))]
            for (gpu, xid), count in sorted(counts.items()):
                labels = (self._node, gpu, str(xid))
                values.append(MetricValue(XID_EVENTS, labels, float(count.number)))
                values.append(MetricValue(XID_LAST, labels, count.last_at + offset))
            self._values = tuple(values)
        if self._unsaved and at - self._saved_at >= SAVE_INTERVAL_SECONDS:
            self._write(at)
        return CollectorReading(values=self._values)

    def close(self) -> None:
        self.read(self._clock.monotonic())
        if self._unsaved:
            self._write(self._clock.monotonic())

    def _write(self, at: float) -> None:
        self._saved_at, self._unsaved = at, False
        if self._file is None:
            return
        offset = self._clock.wall() - self._clock.monotonic()
        rows = [[gpu, xid, c.number, c.last_at + offset] for (gpu, xid), c in sorted(self._shown.items())]
        try:
            write_atomically(self._file, json.dumps({"xids": rows}) + "\n")
        except OSError as e:
            if self._logged.is_new("save"):
                logger.warning("%s: %s; after a restart of the agent XIDs are counted from 0", self._file, e)

    def _load(self, file: Path) -> dict[tuple[str, int], Count]:
        offset = self._clock.wall() - self._clock.monotonic()
        try:
            rows = json.loads(file.read_text())["xids"]
            return {(str(g), int(x)): Count(int(n), float(at) - offset) for g, x, n, at in rows}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as e:
            logger.warning("%s is damaged, XIDs are counted from 0: %s", file, e)
            return {}
