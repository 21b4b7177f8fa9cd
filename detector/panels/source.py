"""Live panels: the interface of a source of ticks.

A source yields the ticks of all its panels, oldest first: a Prometheus server (detector/sources/prometheus.py), the
agents of a run (detector/sources/agent_panels.py), or a recording (detector/sources/recording.py).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolecall.core.clock import Clock
from rolecall.detector.panels.panel import Floats, Panel, PanelShape

Stopped = Callable[[], bool]
"""Whether to stop now. Sources poll it at least every PAUSE_SECONDS."""
PanelKey = tuple[str, str, str, bool, bool]
"""Job, role, phase, and whether its machines have a rank and a gpu; as in recordings."""
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelTick:
    """`values`: (M, N) float32 of metric and machine of `shape`; NaN is missing, and no value is infinite."""

    shape: PanelShape
    at: float
    values: Floats


class PanelSource(Protocol):
    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        """Ticks of all panels, each panel's in order. Ends when there are no more, or soon after `stopped()`.

        The shape of a panel may change from tick to tick. Raises UnreadableInput.
        """
        ...


def panel_key(shape: PanelShape) -> PanelKey:
    first = shape.machines[0]
    return shape.job, shape.role, shape.phase, first.rank is not None, first.gpu is not None


def ticks_of(panels: Sequence[Panel]) -> Iterator[PanelTick]:
    """The ticks of several panels in time order."""

    def of(panel: Panel) -> Iterator[PanelTick]:
        return (PanelTick(shape=panel.shape, at=at, values=values) for at, values in panel.ticks())

    return heapq.merge(*map(of, panels), key=lambda tick: tick.at)


def pause(clock: Clock, seconds: float, stopped: Stopped) -> None:
    """Sleeps, and returns early if stopped."""
    until = clock.monotonic() + seconds
    while not stopped() and (left := until - clock.monotonic()) > 0:
        clock.sleep(min(left, PAUSE_SECONDS))
