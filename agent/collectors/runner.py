"""Runs the collectors, each in its own thread, and keeps the newest reading of each.

A read may block indefinitely (NVML does when a GPU falls off the bus): the others continue, and a scrape only copies
existing values. A read longer than `HANG_SECONDS` is reported once as an event, and its values leave the exposition,
because stale numbers are not measurements. The same holds for a collector that cannot read.
"""

import logging
import threading
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from rolecall.agent.collectors.base import Collector, CollectorReading, CollectorUnavailable, EvidenceProvider
from rolecall.agent.events import EventLog
from rolecall.core.clock import Clock
from rolecall.core.telemetry import AgentEventKind

logger = logging.getLogger(__name__)

HANG_SECONDS = 5.0
"""Healthy reads take milliseconds; NVML on a sick GPU tens of seconds."""
DOWN_INTERVAL_SECONDS = 5.0
"""Minimum time between two attempts while nothing can be read."""
FACTS_MAX = 64
"""Per read: events are kept on disk, and a flood carries no more information than its first facts."""
STOP_SECONDS = 2.0
NOTHING = CollectorReading()


class NoSuchCollector(Exception):
    """Evidence was requested from a collector that does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeState:
    """`up`: its newest values are exported; `reason`: why not. `read_seconds`: duration of the last completed read."""

    name: str
    up: bool
    reason: str
    read_seconds: float
    cpu_seconds: float  # cumulative, of its thread
    facts_dropped: int


class Probe:
    """One collector and its newest reading. `once` is called from its own thread, all else from any."""

    def __init__(self, collector: Collector, events: EventLog, clock: Clock) -> None:
        self.collector = collector
        self._events, self._clock = events, clock
        self._lock = threading.Lock()
        self._reading = NOTHING
        self._reading_at = float("-inf")
        self._begun_at: float | None = None  # start of the read in progress
        self._reason = "not read yet"
        self._reported_down = False
        self._read_seconds = 0.0
        self._cpu_seconds = 0.0
        self._facts_dropped = 0

    def once(self) -> bool:
        """One read; whether it succeeded."""
        begun = self._clock.monotonic()
        with self._lock:
            self._begun_at = begun
        reason, reading = "", NOTHING
        try:
            reading = self.collector.read(begun)
        except CollectorUnavailable as e:
            reason = str(e)
        except Exception as e:  # a bug in one collector must not end the agent: report and retry
            logger.exception("collector %s", self.collector.name)
            reason = f"{type(e).__name__}: {e}"
        with self._lock:
            self._begun_at = None
            self._read_seconds = self._clock.monotonic() - begun
            self._cpu_seconds = time.thread_time()
            self._reading, self._reading_at = reading, begun
            dropped = max(0, len(reading.facts) - FACTS_MAX)
            self._facts_dropped += dropped
        self._report_state(reason)
        for fact in reading.facts[:FACTS_MAX]:
            self._events.append(**fact._asdict())
        if dropped:
            logger.warning("%s: %d of %d facts of one poll dropped", self.collector.name, dropped, len(reading.facts))
        return not reason

    def check_hang(self, now: float) -> None:
        """Reports, once, that a read hangs."""
        with self._lock:
            begun = self._begun_at
        if begun is not None and now - begun > HANG_SECONDS:
            at = getattr(self.collector, "current_device", "")
            self._report_state(
                f"a read has been hanging for more than {HANG_SECONDS:.0f} s" + (f" at {at}" if at else ""), begun
            )

    def _report_state(self, reason: str, of_read: float | None = None) -> None:
        """Records an event on each change. `of_read`: applies only while the read that began then is in progress."""
        with self._lock:
            if of_read is not None and self._begun_at != of_read:
                return
            was_down, self._reason = self._reported_down, reason
            self._reported_down = bool(reason)
        name = self.collector.name
        if reason and not was_down:
            self._events.append(AgentEventKind.PROBE_DOWN, detail={"probe": name, "reason": reason})
            logger.warning("%s cannot be read: %s", name, reason)
        elif was_down and not reason:
            self._events.append(AgentEventKind.PROBE_UP, detail={"probe": name})
            logger.info("%s can be read again", name)

    def newest(self) -> tuple[float, CollectorReading]:
        """The newest reading with its start (node monotonic seconds); empty while the collector is down or hangs."""
        with self._lock:
            return self._reading_at, NOTHING if self._reason else self._reading

    def state(self) -> ProbeState:
        with self._lock:
            return ProbeState(
                name=self.collector.name,
                up=not self._reason,
                reason=self._reason,
                read_seconds=self._read_seconds,
                cpu_seconds=self._cpu_seconds,
                facts_dropped=self._facts_dropped,
            )


class Probes:
    """All collectors of an agent."""

    def __init__(self, collectors: Iterable[Collector], events: EventLog, clock: Clock) -> None:
        self._clock = clock
        self.probes = tuple(Probe(c, events, clock) for c in collectors)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(p,), name=f"probe-{p.collector.name}", daemon=True)
            for p in self.probes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check_hangs(self) -> None:
        """Called about every second by the agent's main thread to detect hanging reads."""
        now = self._clock.monotonic()
        for probe in self.probes:
            probe.check_hang(now)

    def readings(self) -> Iterator[CollectorReading]:
        return (p.newest()[1] for p in self.probes)

    def evidence(self, name: str) -> bytes:
        """Evidence of the named collector (`base.EvidenceProvider`), collected in the caller's thread.

        Raises:
            NoSuchCollector: it does not run here.
            CollectorUnavailable: it has no evidence.
        """
        found = next((p.collector for p in self.probes if p.collector.name == name), None)
        if not isinstance(found, EvidenceProvider):
            raise NoSuchCollector(f"collector {name} does not run here: enable it in agent.yaml")
        return found.evidence()

    def newest(self, names: Container[str]) -> tuple[float, CollectorReading]:
        """`Probe.newest` of the first probe among `names` that has values."""
        every = (p.newest() for p in self.probes if p.collector.name in names)
        return next((found for found in every if found[1].values), (float("-inf"), NOTHING))

    def states(self) -> tuple[ProbeState, ...]:
        return tuple(p.state() for p in self.probes)

    def stop(self) -> None:
        """Ends the threads; a hanging one is a daemon and ends with the process."""
        self._stop.set()
        deadline = self._clock.monotonic() + STOP_SECONDS
        for probe, thread in zip(self.probes, self._threads, strict=True):
            if thread.ident is not None:
                thread.join(max(0.0, deadline - self._clock.monotonic()))
            if not thread.is_alive():
                probe.collector.close()

    def _run(self, probe: Probe) -> None:
        due = self._clock.monotonic()
        while not self._stop.wait(max(0.0, due - self._clock.monotonic())):
            read = probe.once()
            interval = probe.collector.interval_seconds
            # A missed poll is skipped, not caught up.
            due = max(due + (interval if read else max(interval, DOWN_INTERVAL_SECONDS)), self._clock.monotonic())
