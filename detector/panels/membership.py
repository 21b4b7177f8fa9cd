"""Adapts a detector to a fleet whose machines change.

A tracker has a fixed set of machines. A machine that leaves is missing (NaN) from then on, which is a gap and not a
fault. When new machines or metrics have been present for some ticks, `PanelFollower` creates a new tracker and replays
the retained ticks to it.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import (
    Floats,
    PanelDetector,
    PanelKey,
    PanelShape,
    PanelTick,
    SeenValues,
    Tracker,
    cannot_tell,
    panel_key,
)
from rolecall.detector.panels.series import PANELS_MAX

REPORTED_MAX = 10_000
"""Findings per panel that are remembered to avoid duplicate reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    grow_ticks: int = 20
    """A panel grows when new machines or metrics have been present for this many ticks: higher values delay new
    machines, lower values cost more when a fleet grows machine by machine."""
    history_ticks: int = 720
    """Ticks that are retained and replayed after a panel grows: with fewer than 383 (703 in a role of three), the
    default detector starts with a period without alarms."""
    repeat_ticks: int = 300
    """For this many ticks after a panel grows, its new tracker does not repeat reported faults. Higher values hide
    faults that recur."""
    history_bytes: int = 256 << 20
    """Per panel; fewer ticks are kept if they need more."""


@dataclass(slots=True)
class _FollowedPanel:
    shape: PanelShape
    tracker: Tracker
    seen: SeenValues = field(default_factory=SeenValues)
    history: deque[PanelTick] = field(default_factory=deque)
    history_bytes: int = 0
    growing_since: float | None = None  # first tick with machines or metrics that the tracker lacks
    growing_ticks: int = 0
    reported: dict[tuple[tuple[Suspect, ...], FaultClass], float] = field(default_factory=dict)
    repeats_until: float = float("-inf")  # until then a new tracker may repeat findings of its predecessor
    # For the newest shape that differs from the tracker's.
    columns_of: "tuple[PanelShape, _SharedColumns] | None" = None

    def laid_out(self, tick: PanelTick) -> Floats:
        """The tick's values in the tracker's rows and columns."""
        if tick.shape is self.shape:
            return tick.values
        picked = self.picked(tick.shape)
        values = np.full((len(self.shape.metrics), len(self.shape.machines)), np.nan, dtype=np.float32)
        values[np.ix_(picked.m_to, picked.n_to)] = tick.values[np.ix_(picked.m_from, picked.n_from)]
        return values

    def picked(self, shape: PanelShape) -> "_SharedColumns":
        if self.columns_of is None or self.columns_of[0] is not shape:
            self.columns_of = shape, _SharedColumns.of(shape, self.shape)
        return self.columns_of[1]

    def keep(self, tick: PanelTick, limits: WatchLimits) -> None:
        self.history.append(tick)
        self.history_bytes += tick.values.nbytes
        while len(self.history) > limits.history_ticks or self.history_bytes > limits.history_bytes:
            self.history_bytes -= self.history.popleft().values.nbytes

    def knows(self, shape: PanelShape) -> bool:
        return shape is self.shape or self.picked(shape).complete


@dataclass(frozen=True, slots=True)
class _SharedColumns:
    """Rows and columns that two shapes share, as indices into each."""

    m_from: list[int]
    m_to: list[int]
    n_from: list[int]
    n_to: list[int]
    complete: bool  # the other shape contains all of this one

    @classmethod
    def of(cls, source: PanelShape, target: PanelShape) -> "_SharedColumns":
        metrics = {m: i for i, m in enumerate(target.metrics)}
        machines = {m: i for i, m in enumerate(target.machines)}
        m = [(i, metrics[x]) for i, x in enumerate(source.metrics) if x in metrics]
        n = [(i, machines[x]) for i, x in enumerate(source.machines) if x in machines]
        complete = len(m) == len(source.metrics) and len(n) == len(source.machines)
        return cls([i for i, _ in m], [i for _, i in m], [i for i, _ in n], [i for _, i in n], complete)


class PanelFollower:
    """One detector on all panels of a source.

    While the shapes stay the same, its findings are those of `panel.findings`. After a panel grows, findings of the new
    tracker on replayed ticks count only if they begin after the growth: the previous tracker judged the earlier ticks.
    """

    def __init__(self, detector: PanelDetector, limits: WatchLimits | None = None) -> None:
        self._detector, self._limits = detector, limits or WatchLimits()
        self._panels: dict[PanelKey, _FollowedPanel] = {}

    @property
    def shapes(self) -> list[PanelShape]:
        """Shapes of the monitored panels."""
        return [p.shape for p in self._panels.values()]

    @property
    def open_ends(self) -> list[str]:
        """Undecided cases, one sentence each."""
        hindrances = (cannot_tell(p.shape, self._detector.name, p.tracker, p.seen) for p in self._panels.values())
        return [h for h in hindrances if h]

    def tick(self, tick: PanelTick) -> list[Finding]:
        """Processes the next tick of its panel; returns the findings that begin with it."""
        key = panel_key(tick.shape)
        panel = self._panels.pop(key, None)
        if panel is None:
            panel = _FollowedPanel(tick.shape, self._detector.track(tick.shape))
            if len(self._panels) >= PANELS_MAX:  # evict the least recently updated panel
                del self._panels[next(iter(self._panels))]
        self._panels[key] = panel
        panel.keep(tick, self._limits)
        if not panel.knows(tick.shape):
            panel.growing_since = tick.at if panel.growing_since is None else panel.growing_since
            panel.growing_ticks += 1
            if panel.growing_ticks >= self._limits.grow_ticks:
                return self._grow(panel, tick.shape)
        values = panel.laid_out(tick)
        panel.seen.tick(values)
        return _unreported(panel, panel.tracker.tick(tick.at, values), tick.at)

    def _grow(self, panel: _FollowedPanel, shape: PanelShape) -> list[Finding]:
        since = panel.growing_since
        assert since is not None
        panel.shape, panel.tracker, panel.columns_of = shape, self._detector.track(shape), None
        panel.growing_since, panel.growing_ticks = None, 0
        found: list[Finding] = []
        for tick in panel.history:
            found += [f for f in panel.tracker.tick(tick.at, panel.laid_out(tick)) if f.detected_at >= since]
        now = panel.history[-1].at
        panel.repeats_until = now + self._limits.repeat_ticks * shape.interval_seconds
        return _unreported(panel, found, now)


def _unreported(panel: _FollowedPanel, found: list[Finding], now: float) -> list[Finding]:
    """Removes findings that a previous tracker already reported."""
    fresh = []
    for f in found:
        who = f.suspects, f.fault_class
        if who in panel.reported and now <= panel.repeats_until:
            continue
        panel.reported[who] = now
        if len(panel.reported) > REPORTED_MAX:
            del panel.reported[next(iter(panel.reported))]
        fresh.append(f)
    return fresh
