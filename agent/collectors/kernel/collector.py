"""The kernel log: XIDs, lost GPUs, NVSwitch errors, OOM kills, links, hardware errors, lockups, as events and counts.

The read cursor is kept on disk, so that a restarted agent continues where it stopped: after an orderly shutdown no line
is lost or repeated; after a SIGKILL the lines of the last poll (0.2 s) may repeat, with the same `record`. At its first
start the agent also reads the existing log: such an event carries `seconds_ago`.

Counts are saved with the cursor, because Prometheus sees no increase in a counter that first appears with the value 1,
and so that no line is counted twice.

Corrected hardware errors are counted without an event. An XID already reported by NVML (`XidMerger`) makes no second
event, unless the line carries more than the number: for NVLink XIDs and XID 154 an event with `adds_to` follows NVML's.
"""

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from rolecall.agent.collectors.base import CollectorReading, CollectorUnavailable, Fact, LoggedOnce
from rolecall.agent.collectors.gpu.xid_merger import XidMerger
from rolecall.agent.collectors.kernel.sources import KernelLogSource, KernelMessage, source
from rolecall.agent.identity import Registration
from rolecall.core.clock import Clock, SystemClock
from rolecall.core.ids import NodeId
from rolecall.core.metrics.kernel import (
    FAULTS,
    HARDWARE_ERRORS,
    LINES,
    LINES_LOST,
    LINK_DOWNS,
    OOM_KILLS,
    SXID_EVENTS,
)
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.core.rundir import write_atomically
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.kernel_log.messages import (
    HardwareError,
    KernelFact,
    KernelFault,
    KernelLinkChange,
    KernelReader,
    OomKill,
)
from rolecall.formats.kernel_log.nvidia import GpuLost, SxidLine, XidLine
from rolecall.formats.xid.nvlink import LINE_DECIDES
from rolecall.formats.xid.xid import sxid, xid

logger = logging.getLogger(__name__)

KERNEL_LOG = Path("/dev/kmsg")
NUM_LINES_MAX = 2000
"""Per poll, including skipped lines: about 20 ms. The rest waits in the log."""
NUM_FACTS_MAX = 64
"""Per poll, the limit of a probe (`runner.FACTS_MAX`): the next poll continues after the last line read."""
WAIT_SECONDS = 0.5
"""Longest wait for a new line, which wakes the collector. Also delays the agent's shutdown."""
PAST_SECONDS = 5.0
"""An older event carries its age."""
LINE_CHARS_MAX = 500
NUM_EVIDENCE_LINES = 200
"""Newest lines returned as evidence. An XID with its context takes about twenty."""
NUM_SERIES_MAX = 256
"""Counted series; further interfaces and switches are counted as `other`."""
_COUNTED = {m.name: m for m in (OOM_KILLS, LINES, LINES_LOST, SXID_EVENTS, LINK_DOWNS, HARDWARE_ERRORS, FAULTS)}
FELL_OFF = 79
SOURCE = "kernel"


class KernelLogCollector:
    """`gpu_of`: index of the GPU at a PCI address (`0000:3b:00`), None if unknown. `process_of`: the registered process
    with this PID (in the machine's initial PID namespace), None if it is not registered. `wait_seconds`: longest wait
    of a poll for a new line; 0: do not wait."""

    name = "kernel_log"

    def __init__(
        self,
        *,
        node: NodeId,
        merger: XidMerger,
        path: Path = KERNEL_LOG,
        state_file: Path | None = None,
        gpu_of: Callable[[str], int | None] = lambda pci: None,
        process_of: Callable[[int], Registration | None] = lambda pid: None,
        proc: Path = Path("/proc"),
        clock: Clock | None = None,
        open_source: Callable[[Path, dict[str, Any], Path], KernelLogSource] = source,
        interval_seconds: float = 0.2,
        wait_seconds: float = 0.0,
    ) -> None:
        self.interval_seconds, self.wait_seconds = interval_seconds, wait_seconds
        self._node, self._merger, self._path, self._file, self._proc = node, merger, path, state_file, proc
        self._gpu_of, self._process_of = gpu_of, process_of
        self._clock = clock or SystemClock()
        self._open_source = open_source
        self._source: KernelLogSource | None = None
        kept = self._load()
        self._cursor = kept if kept.get("path") == str(path) else {}
        self._saved = self._cursor
        self._reader = KernelReader()
        self._counts: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
        for metric in (OOM_KILLS, LINES, LINES_LOST):
            self._counts[metric, (node,)] = 0
        self._counts.update(dict(_counts(kept.get("counts"), node)))
        self._values: tuple[MetricValue, ...] = ()
        self._caught_up = False
        self._logged = LoggedOnce()

    def read(self, at: float) -> CollectorReading:
        """New lines, as soon as there are some. Raises CollectorUnavailable: no permission or no such log, and how to
        fix it."""
        self._save()  # the previous poll's facts have been reported by now
        if self._source is None:
            self._source = self._open_source(self._path, self._cursor, self._proc)
        elif self.wait_seconds and self._source.at_end:
            began = self._clock.monotonic()
            self._source.wait(self.wait_seconds)
            at += self._clock.monotonic() - began
        lost_before, facts, num_lines = self._source.num_lost, list[Fact](), 0
        try:
            for line in islice(self._source.poll(), NUM_LINES_MAX):
                num_lines += line is not None
                if line is not None and (fact := self._taken(line, at)) is not None:
                    facts.append(fact)
                    if len(facts) >= NUM_FACTS_MAX:
                        break
        except CollectorUnavailable:
            if not facts:
                raise
            # Report what was found; the next poll raises again.
        self._cursor = self._source.cursor()
        self._caught_up |= self._source.at_end
        if num_lines or self._source.num_lost != lost_before or not self._values:
            self._counts[LINES, (self._node,)] += num_lines
            self._counts[LINES_LOST, (self._node,)] += self._source.num_lost - lost_before
            self._values = tuple(MetricValue(metric, labels, float(n)) for (metric, labels), n in self._counts.items())
        return CollectorReading(values=self._values, facts=tuple(facts))

    def evidence(self) -> bytes:
        """The newest lines in dmesg's format, read independently of the cursor. Raises CollectorUnavailable."""
        fresh = self._open_source(self._path, {}, self._proc)
        try:
            lines = deque((line for line in fresh.poll() if line is not None), maxlen=NUM_EVIDENCE_LINES)
        finally:
            fresh.close()
        return "".join(f"{_stamp(line, self._node)}{line.message}\n" for line in lines).encode("utf-8", "replace")

    def close(self) -> None:
        self._save()
        if self._source is not None:
            self._source.close()
            self._source = None

    def _taken(self, line: KernelMessage, at: float) -> Fact | None:
        found = self._reader.take(line.message)
        if found is None:
            return None
        seconds_ago = self._seconds_ago(line, at)
        event = self._event_of(found, at - seconds_ago)
        if event is None:
            return None
        kind, detail, pid = event
        detail |= {"line": _plain(line.message), "record": line.record}
        if seconds_ago > PAST_SECONDS:
            detail["seconds_ago"] = f"{seconds_ago:.0f}"
        owner = self._process_of(pid) if pid is not None and seconds_ago <= PAST_SECONDS else None
        return Fact(kind=kind, detail={k: v for k, v in detail.items() if v}, **(owner.facts() if owner else {}))

    def _seconds_ago(self, line: KernelMessage, at: float) -> float:
        """0 for new lines: the kernel's clock drifts from CLOCK_MONOTONIC by seconds in weeks."""
        if self._caught_up:
            return 0.0
        if line.uptime_seconds is not None:
            return max(0.0, at - line.uptime_seconds)
        return 0.0 if line.wall_at is None else max(0.0, self._clock.wall() - line.wall_at)

    def _event_of(self, found: KernelFact, at: float) -> tuple[AgentEventKind, dict[str, str], int | None] | None:
        """Kind, detail and PID of the event; None: only counted, or already reported by another source."""
        match found:
            case XidLine():
                return self._xid(found, at)
            case GpuLost():
                return self._lost(found, at)
            case SxidLine():
                return self._sxid(found)
            case OomKill():
                self._count(OOM_KILLS)
                of = "cgroup" if found.of_cgroup else "machine"
                detail = {"pid": str(found.pid), "name": _plain(found.name), "out_of_memory": of}
                detail["rss_bytes"] = str(found.rss_bytes)
                return AgentEventKind.OOM_KILL, detail, found.pid
            case KernelLinkChange():
                detail = {"interface": found.interface, "nic": found.nic}
                if found.up:
                    return AgentEventKind.LINK_UP, detail, None
                self._count(LINK_DOWNS, found.interface)
                return AgentEventKind.LINK_DOWN, detail, None
            case HardwareError():
                self._count(HARDWARE_ERRORS, found.what, "corrected" if found.corrected else "uncorrected")
                if found.corrected:
                    return None
                return AgentEventKind.MACHINE_CHECK, {"what": found.what, "device": found.device}, None
            case KernelFault(over=True):
                return None
            case KernelFault():
                self._count(FAULTS, found.what)
                detail = {"what": found.what, "device": found.device, "name": _plain(found.name)}
                if found.pid is not None:
                    detail["pid"] = str(found.pid)
                return AgentEventKind.KERNEL, detail, found.pid
        return None

    def _xid(self, found: XidLine, at: float) -> tuple[AgentEventKind, dict[str, str], int | None] | None:
        gpu = self._gpu_of(found.pci)
        is_new = self._merger.merge(at, found.pci if gpu is None else gpu, found.code, SOURCE)
        if not is_new and found.code not in LINE_DECIDES:
            return None
        detail = _of_xid(found.code) | _of_gpu(found.pci, gpu)
        # For NVLink codes and 154 the line decides.
        detail |= {"fatal": "yes" if found.fatal else "no", "action": str(found.action), "advice": found.advice}
        if not is_new:
            detail["adds_to"] = "nvml"  # which reported only the number
        if found.recovery is not None:
            detail["recovery"] = str(found.recovery)
        if found.nvlink_register_errors:
            detail |= {
                "registers": ", ".join(found.nvlink_register_errors),
                "link": "" if found.link is None else str(found.link),
            }
        if found.nvlink is not None:
            detail |= {"unit": found.nvlink.unit, "subcode": str(found.nvlink.subcode)}
            detail["link"] = "" if found.nvlink.link is None else str(found.nvlink.link)
            if (row := found.nvlink.assessment) is not None:
                detail |= {"severity": row.severity, "investigate": str(row.investigatory)}
        detail |= {"partition": found.partition, **found.instance, "name": _plain(found.name)}
        if found.pid is not None:
            detail["pid"] = str(found.pid)
        return AgentEventKind.XID, detail, found.pid

    def _lost(self, found: GpuLost, at: float) -> tuple[AgentEventKind, dict[str, str], int | None] | None:
        """A line without an XID; together with XID 79 it is the same event."""
        gpu = self._gpu_of(found.pci)
        if not self._merger.merge(at, found.pci if gpu is None else gpu, FELL_OFF, f"{SOURCE} without XID"):
            return None
        return AgentEventKind.XID, _of_xid(FELL_OFF) | _of_gpu(found.pci, gpu) | {"fatal": "yes"}, None

    def _sxid(self, found: SxidLine) -> tuple[AgentEventKind, dict[str, str], int | None]:
        device = f"nvswitch{found.switch}"
        self._count(SXID_EVENTS, device, str(found.code))
        known = sxid(found.code)
        detail = {"sxid": str(found.code), "device": device, "pci": found.pci, "meaning": known.meaning}
        detail |= {"action": str(known.action), "advice": known.advice}
        detail["fatal"] = "yes" if found.fatal or known.fatal else "no"
        detail["link"] = "" if found.link is None else str(found.link)
        return AgentEventKind.XID, detail, None

    def _count(self, metric: Metric, *labels: str) -> None:
        key = metric, (self._node, *labels)
        if key not in self._counts and len(self._counts) >= NUM_SERIES_MAX:
            key = metric, (self._node, *("other" for _ in labels))
        self._counts[key] += 1

    def _load(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            kept = json.loads(self._file.read_text())
            if isinstance(kept, dict):
                return kept
            logger.warning("%s is damaged, reading the kernel log from its beginning", self._file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            logger.warning("%s is damaged, reading the kernel log from its beginning: %s", self._file, e)
        return {}

    def _save(self) -> None:
        if self._file is None or self._cursor == self._saved:
            return
        self._saved = self._cursor
        counts = [[metric.name, labels, n] for (metric, labels), n in self._counts.items()]
        try:
            write_atomically(self._file, json.dumps({"path": str(self._path), **self._cursor, "counts": counts}) + "\n")
        except OSError as e:
            if self._logged.is_new("save"):
                logger.warning("%s: %s; after a restart the agent will read kernel lines again", self._file, e)


def _counts(kept: Any, node: NodeId) -> Iterator[tuple[tuple[Metric, tuple[str, ...]], int]]:
    """Counts from before a restart; invalid rows and rows of another node are dropped."""
    for row in kept[:NUM_SERIES_MAX] if isinstance(kept, list) else ():
        match row:
            case [str(name), [str(of), *labels], int(number)] if name in _COUNTED and of == node and number >= 0:
                key = (of, *map(str, labels))
                if len(key) == len(_COUNTED[name].labels):
                    yield (_COUNTED[name], key), int(number)


def _of_xid(code: int) -> dict[str, str]:
    known = xid(code)
    detail = {"xid": str(code), "mnemonic": known.mnemonic, "meaning": known.meaning, "advice": known.advice}
    detail |= {"action": str(known.immediate), "class": str(known.fault_class), "second_opinion": known.second_opinion}
    return detail


def _of_gpu(pci: str, gpu: int | None) -> dict[str, str]:
    return {"pci": pci} if gpu is None else {"gpu": str(gpu), "pci": pci}


def _plain(text: str) -> str:
    """Without control characters: a process may choose any name."""
    return "".join(c if c.isprintable() else "?" for c in text[:LINE_CHARS_MAX])


def _stamp(line: KernelMessage, node: str) -> str:
    """Seconds since boot, else the time of day, else empty."""
    if line.uptime_seconds is not None:
        return f"[{line.uptime_seconds:12.6f}] "
    if line.wall_at is not None:
        return f"{datetime.fromtimestamp(line.wall_at, UTC).isoformat(timespec='microseconds')} {node} kernel: "
    return ""
