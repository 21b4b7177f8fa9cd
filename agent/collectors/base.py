"""What a collector is: one file for each thing of a node that can break, each looked at in a thread of its own.

A collector reads, and says what it found: values of metrics, and facts that became events. It may block (NVML does when
a GPU falls off the bus): only its own thread waits (`agent/collectors/runner.py`), the others and the scrape go on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from rolecall.core.ids import ProcessId
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import AgentEventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened, to become an event of the agent. `detail`: short texts by name, as the event's."""

    kind: AgentEventKind
    detail: Mapping[str, str]
    process: ProcessId | None = None
    role: str = ""
    replica: str = ""
    rank: int = 0
    incarnation: int = 0


def no_lines() -> str:
    return ""


class CollectorReading(NamedTuple):
    """Of one look. `values` replace those of the look before. `dcgm` makes lines in the text format of dcgm-exporter when
    somebody asks for them, in any thread. `gpu_pids`: who uses a GPU, by its index, of those GPUs that tell."""

    values: tuple[MetricValue, ...] = ()
    facts: tuple[Fact, ...] = ()
    dcgm: Callable[[], str] = no_lines
    gpu_pids: Mapping[int, tuple[int, ...]] | None = None


class CollectorUnavailable(Exception):
    """Nothing could be read: why, in a sentence for the operator. The probe is shown as down, and tried again."""


class Collector(Protocol):
    """`name`: the probe's, in metrics and events. `interval_seconds`: between two looks."""

    @property
    def name(self) -> str: ...

    @property
    def interval_seconds(self) -> float: ...

    def read(self, at: float) -> CollectorReading:
        """One look, at `at` (node monotonic seconds).

        Raises:
            CannotRead: nothing of it could be read.
        """
        ...

    def close(self) -> None:
        """Gives back what is held. Called once, not while `read` runs."""
        ...


@runtime_checkable
class EvidenceProvider(Protocol):
    """A collector that can be asked for what it saw, beside its regular looks."""

    def evidence(self) -> bytes:
        """Bounded in size and time. Called while `read` may run, or hang, in another thread; raises CannotRead."""
        ...


NUM_REASONS_MAX = 1024
"""Remembered of those that were said; some name a process, of which there are always others. Then they are said again."""


@dataclass(slots=True)
class LoggedOnce:
    """Reasons that were said already: an unsupported call is said once for each GPU, not each second."""

    reasons: set[str] = field(default_factory=set)

    def is_new(self, reason: str) -> bool:
        if reason in self.reasons:
            return False
        if len(self.reasons) >= NUM_REASONS_MAX:
            self.reasons.clear()
        self.reasons.add(reason)
        return True
