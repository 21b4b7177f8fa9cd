"""The interface of a collector: one module per component of a node that can fail, each polled in its own thread.

A collector returns metric values, and facts that become events. It may block (NVML does when a GPU falls off the bus):
only its own thread waits (`agent/collectors/runner.py`); other collectors and the scrape continue.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from rolecall.core.ids import ProcessId
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import AgentEventKind


class Fact(NamedTuple):
    """An occurrence that becomes an agent event. `detail`: short texts by name, as in the event."""

    kind: AgentEventKind
    detail: Mapping[str, str]
    process: ProcessId | None = None
    role: str = ""
    replica: str = ""
    rank: int = 0
    incarnation: int = 0


class CollectorReading(NamedTuple):
    """Result of one poll. `values` replace those of the previous poll. `dcgm` renders lines in dcgm-exporter's format
    on demand, in any thread. `gpu_pids`: PIDs by GPU index, for the GPUs where they are known."""

    values: tuple[MetricValue, ...] = ()
    facts: tuple[Fact, ...] = ()
    dcgm: Callable[[], str] = str  # no lines
    gpu_pids: Mapping[int, tuple[int, ...]] | None = None


class CollectorUnavailable(Exception):
    """Nothing could be read; the text tells the operator why. The probe is shown as down, and retried."""


class Collector(Protocol):
    """`name`: the probe's name in metrics and events. `interval_seconds`: between two polls."""

    name: str
    interval_seconds: float

    def read(self, at: float) -> CollectorReading:
        """One poll, at `at` (node monotonic seconds). Raises CollectorUnavailable: nothing could be read."""
        ...

    def close(self) -> None:
        """Releases resources. Called once, not while `read` runs."""
        ...


@runtime_checkable
class EvidenceProvider(Protocol):
    """A collector that returns raw evidence on request, outside its regular polls."""

    def evidence(self) -> bytes:
        """Bounded in size and time. Called also while `read` runs or hangs. Raises CollectorUnavailable."""
        ...


NUM_REASONS_MAX = 1024
"""Remembered reasons, bounded because some name a process; beyond that they are logged again."""


@dataclass(slots=True)
class LoggedOnce:
    """Reasons already logged: an unsupported call is logged once per GPU, not every second."""

    reasons: set[str] = field(default_factory=set)

    def is_new(self, reason: str) -> bool:
        if reason in self.reasons:
            return False
        if len(self.reasons) >= NUM_REASONS_MAX:
            self.reasons.clear()
        self.reasons.add(reason)
        return True
