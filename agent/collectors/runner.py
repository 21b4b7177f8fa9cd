"""Runs the collectors, each in a thread of its own, and keeps what each found last.

A read may block for as long as the thing it reads pleases (NVML does, when a GPU falls off the bus): the others go on, a
scrape only copies what is there. A read that lasts longer than `HANG_SECONDS` is told as an event, once, and its values
leave the exposition: numbers that nobody renews are no measurement. The same holds for a collector that cannot read.
"""

import logging
import threading
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from rolecall.agent.collectors.base import Collector, CollectorReading, CollectorUnavailable, EvidenceProvider, Fact
from rolecall.agent.events import EventLog
from rolecall.core.clock import Clock
from rolecall.core.telemetry import AgentEventKind

logger = logging.getLogger(__name__)

HANG_SECONDS = 5.0
"""Healthy reads take milliseconds; NVML on a sick GPU tens of seconds."""
DOWN_INTERVAL_SECONDS = 5.0
"""At least so long between two tries of what cannot be read."""
FACTS_MAX = 64
"""Of one read: a flood tells no more than its first lines, and events are kept on disk."""
STOP_SECONDS = 2.0
NOTHING = CollectorReading()


class NoSuchCollector(Exception):
    """Evidence was asked of a collector that does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeState:
    """`up`: its newest values are shown; `reason`: why not. Seconds are of the newest read that ended."""

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
        self._begun_at: float | None = None  # of the read that goes on
        self._reason = "not read yet"
        self._told_down = False
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
        except Exception as e:  # a defect of one collector must not end the agent: it is shown, and tried again
            logger.exception("collector %s", self.collector.name)
            reason = f"{type(e).__name__}: {e}"
        with self._lock:
            self._begun_at = None
            self._read_seconds = self._clock.monotonic() - begun
            self._cpu_seconds = time.thread_time()
            self._reading, self._reading_at = reading, begun
            dropped = max(0, len(reading.facts) - FACTS_MAX)
            self._facts_dropped += dropped
        self._tell(reason)
        for fact in reading.facts[:FACTS_MAX]:
            _append(self._events, fact)
        if dropped:
            logger.warning("%s: %d of %d facts of one look dropped", self.collector.name, dropped, len(reading.facts))
        return not reason

    def look(self, now: float) -> None:
        """Tells, once, when a read hangs."""
        with self._lock:
            begun = self._begun_at
        if begun is not None and now - begun > HANG_SECONDS:
            at = getattr(self.collector, "looking_at", "")
            self._tell(f"its read hangs for more than {HANG_SECONDS:.0f} s" + (f" at {at}" if at else ""), begun)

    def _tell(self, reason: str, of_read: float | None = None) -> None:
        """Events at the changes only: down, and up again. What never was up is told once. `of_read`: about the read that
        began then, and nothing if that has ended meanwhile."""
        with self._lock:
            if of_read is not None and self._begun_at != of_read:
                return
            was_down, self._reason = self._told_down, reason
            self._told_down = bool(reason)
        name = self.collector.name
        if reason and not was_down:
            self._events.append(AgentEventKind.PROBE_DOWN, detail={"probe": name, "reason": reason})
            logger.warning("%s cannot be read: %s", name, reason)
        elif was_down and not reason:
            self._events.append(AgentEventKind.PROBE_UP, detail={"probe": name})
            logger.info("%s can be read again", name)

    def reading(self) -> CollectorReading:
        """The newest one; nothing while it is down or hangs."""
        with self._lock:
            return NOTHING if self._reason else self._reading

    def newest(self) -> tuple[float, CollectorReading]:
        """And when that look began, node monotonic; nothing while it is down or hangs."""
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


def _append(events: EventLog, fact: Fact) -> None:
    events.append(
        fact.kind,
        process=fact.process,
        role=fact.role,
        replica=fact.replica,
        rank=fact.rank,
        incarnation=fact.incarnation,
        detail=dict(fact.detail),
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

    def look(self) -> None:
        """Called every second or so by the agent's main thread: notices reads that hang."""
        now = self._clock.monotonic()
        for probe in self.probes:
            probe.look(now)

    def readings(self) -> Iterator[CollectorReading]:
        return (p.reading() for p in self.probes)

    def evidence(self, name: str) -> bytes:
        """What the collector of this name gives when asked (`collector.EvidenceProvider`), in the caller's thread.

        Raises:
            NoSuchCollector: it does not run here.
            CannotRead: there is none to be had.
        """
        found = next((p.collector for p in self.probes if p.collector.name == name), None)
        if not isinstance(found, EvidenceProvider):
            raise NoSuchCollector(f"collector {name} does not run here: agent.yaml turns it on")
        return found.evidence()

    def newest(self, names: Container[str]) -> tuple[float, CollectorReading]:
        """Of the first probe of such a name that has found something (`Probe.newest`)."""
        every = (p.newest() for p in self.probes if p.collector.name in names)
        return next((found for found in every if found[1].values), (float("-inf"), NOTHING))

    def states(self) -> tuple[ProbeState, ...]:
        return tuple(p.state() for p in self.probes)

    def stop(self) -> None:
        """Ends the threads; one that hangs is left behind, it ends with the process."""
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
            # A look that came late is skipped, not made up for.
            due = max(due + (interval if read else max(interval, DOWN_INTERVAL_SECONDS)), self._clock.monotonic())
