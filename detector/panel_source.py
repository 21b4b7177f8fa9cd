"""Live panels: where their ticks come from, and how a detector follows a fleet whose machines come and go.

A source yields ticks, oldest first, of all its panels: a Prometheus server (prometheus.py), a recording or the agents of
a run (here). A tracker knows one fixed set of machines. So a machine that leaves is missing (NaN) from then on, which is
a gap and no fault; for machines or metrics that come, `PanelWatch` makes a new tracker once they have been there for
some ticks, and shows it the ticks that it has kept before it goes on.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import FaultClass, Finding, Suspect
from rolecall.core.errors import ConfigError, UnreadableInput
from rolecall.core.metrics import BY_NAME, NODE, RANK, Metric, MetricType, host_values, process_values
from rolecall.core.telemetry import ProcessSample
from rolecall.detector import recording
from rolecall.detector.panel import Floats, Machine, Panel, PanelDetector, PanelShape, Times, Tracker
from rolecall.detector.source import AgentsSource

Stopped = Callable[[], bool]
"""Whether to end now. Asked often: sources never wait for longer than PAUSE_SECONDS without asking."""
PanelKey = tuple[str, str, str, bool, bool]
"""Job, role, phase, and whether its machines have a rank and a gpu; as in recordings."""

PAUSE_SECONDS = 0.2
NODE_ROLE = "node"
"""Role of what is measured of a node and not of a process."""

PANELS_MAX, METRICS_MAX, MACHINES_MAX = 1000, 500, 50_000
"""More panels, or more in one panel, come of labels that do not name machines."""
TOLD_MAX = 10_000
"""Findings of a panel that are remembered, so that none is told twice."""
FORGET_SECONDS = 3600.0
"""A machine that was not seen for so long is left out when the panel next grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """`values`: (M, N) float32 of metric and machine of `shape`; NaN is missing, and no value is infinite."""

    shape: PanelShape
    at: float
    values: Floats


class PanelSource(Protocol):
    def ticks(self, stopped: Stopped) -> Iterator[Tick]:
        """Ticks of all panels, each panel's in order. Ends when there are no more, or soon after `stopped()`.

        The shape of a panel may change from tick to tick. Raises UnreadableInput.
        """
        ...


def panel_key(shape: PanelShape) -> PanelKey:
    first = shape.machines[0]
    return shape.job, shape.role, shape.phase, first.rank is not None, first.gpu is not None


def ticks_of(panels: Sequence[Panel]) -> Iterator[Tick]:
    """The ticks of several panels in the order of time."""

    def of(panel: Panel) -> Iterator[Tick]:
        return (Tick(shape=panel.shape, at=at, values=values) for at, values in panel.ticks())

    return heapq.merge(*map(of, panels), key=lambda tick: tick.at)


def pause(clock: Clock, seconds: float, stopped: Stopped) -> None:
    """Sleeps, and less than that when stopped."""
    until = clock.monotonic() + seconds
    while not stopped() and (left := until - clock.monotonic()) > 0:
        clock.sleep(min(left, PAUSE_SECONDS))


# --- what of the catalogue is compared ----------------------------------------------------------------------------

NOT_COMPARED = frozenset(
    {
        # Ordinals and truths: peers that differ in them are at another point of the same work, or were restarted.
        "rolecall_process_up",
        "rolecall_process_page_ok",
        "rolecall_process_incarnation",
        "rolecall_process_epoch",
        "rolecall_process_step",
        "rolecall_process_policy_version",
        # Properties of the hardware.
        "rolecall_host_cpus",
        "rolecall_host_memory_total_bytes",
    }
)
SECONDS_PER_UNIT = "rolecall_process_busy_seconds_per_work_unit"
BUSY, UNITS = "rolecall_process_busy_seconds_total", "rolecall_process_work_units_total"


def panel_metric(metric: Metric) -> str:
    """What a metric of the catalogue is called in panels: a gauge is itself, a counter its rate (`..._per_second`, of
    seconds `..._ratio`). "" for what peers are not compared in: states, which a label holds, and NOT_COMPARED."""
    if not metric.detect or metric.node_clock or metric.labels not in (NODE, RANK) or metric.name in NOT_COMPARED:
        return ""
    if metric.type is not MetricType.COUNTER:
        return metric.name
    if metric.unit == "seconds":
        return f"{metric.name.removesuffix('_seconds_total')}_ratio"
    return f"{metric.name.removesuffix('_total')}_per_second"


# --- panels out of series -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which panel a series belongs to, and which machine of it."""

    role: str
    machine: Machine
    job: str = ""
    phase: str = ""

    @property
    def key(self) -> PanelKey:
        return self.job, self.role, self.phase, self.machine.rank is not None, self.machine.gpu is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of many machines. `values`: (S, T) float32 of place and tick; NaN is missing, none is infinite."""

    metric: str
    places: Sequence[Place]
    values: Floats


@dataclass(slots=True)
class _Columns:
    shape: PanelShape
    metrics: dict[str, int]
    machines: dict[Machine, int]
    seen_at: dict[Machine, float] = field(default_factory=dict)


class Panels:
    """Puts series into panels, and remembers machines and metrics, so that shapes change only when something comes."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._columns: dict[PanelKey, _Columns] = {}

    def build(self, at: Times, series: Sequence[Series]) -> list[Panel]:
        """`at`: (T,) seconds. Where two series give the same value, the first counts. Raises UnreadableInput: more
        panels, machines or metrics than there can be."""
        parts: dict[PanelKey, list[tuple[Series, list[int]]]] = {}
        for one in series:
            rows: dict[PanelKey, list[int]] = {}
            for row in np.flatnonzero(np.isfinite(one.values).any(axis=1)).tolist():
                rows.setdefault(one.places[row].key, []).append(row)
            for key, found in rows.items():
                parts.setdefault(key, []).append((one, found))
        return [self._panel(key, at, part) for key, part in parts.items()]

    def _panel(self, key: PanelKey, at: Times, part: list[tuple[Series, list[int]]]) -> Panel:
        columns = self._grown(key, float(at[-1]), part)
        values = np.full((len(columns.metrics), len(at), len(columns.machines)), np.nan, dtype=np.float32)
        for one, rows in part:
            n = np.array([columns.machines[one.places[row].machine] for row in rows])
            _fill(values[columns.metrics[one.metric]], n, one.values[rows])
        told = np.isfinite(values).any(axis=(0, 2))
        return Panel(shape=columns.shape, at=at[told], values=values[:, told, :])

    def _grown(self, key: PanelKey, now: float, part: list[tuple[Series, list[int]]]) -> _Columns:
        """The columns of a panel, with all that `part` has."""
        machines = {one.places[row].machine for one, rows in part for row in rows}
        metrics = {one.metric for one, _ in part}
        columns = self._columns.get(key)
        if columns is None or not (metrics <= columns.metrics.keys() and machines <= columns.machines.keys()):
            seen_at = columns.seen_at if columns is not None else {}
            kept = {m: seen for m, seen in seen_at.items() if now - seen <= FORGET_SECONDS}
            metrics |= columns.metrics.keys() if columns is not None else set()
            columns = self._columns[key] = self._fresh(key, metrics, machines | kept.keys())
            columns.seen_at = kept
        columns.seen_at.update(dict.fromkeys(machines, now))
        return columns

    def _fresh(self, key: PanelKey, metrics: set[str], machines: set[Machine]) -> _Columns:
        job, role, phase, _, _ = key
        shape = PanelShape(
            job=job,
            role=role,
            phase=phase,
            metrics=tuple(sorted(metrics)),
            machines=tuple(sorted(machines)),
            interval_seconds=self._interval_seconds,
        )
        many = [
            (len(self._columns), PANELS_MAX, "panels"),
            (len(metrics), METRICS_MAX, "metrics"),
            (len(machines), MACHINES_MAX, "machines"),
        ]
        for number, most, what in many:
            if number > most:
                reason = f"more than {most:,} {what}: the labels that name job, role, phase and machine do not fit"
                raise UnreadableInput(where=shape.name, reason=reason)
        return _Columns(
            shape, {m: i for i, m in enumerate(shape.metrics)}, {m: i for i, m in enumerate(shape.machines)}
        )


def _fill(target: Floats, n: NDArray[np.int64], values: Floats) -> None:
    """Writes `values` (S, T) into columns `n` (S,) of `target` (T, N), where nothing stands yet."""
    columns, first = np.unique(n, return_index=True)
    standing = target[:, columns]
    target[:, columns] = np.where(np.isnan(standing), values[first].T, standing)
    for row in sorted({*range(len(n))} - {*first.tolist()}):
        column = target[:, n[row]]
        target[:, n[row]] = np.where(np.isnan(column), values[row], column)


# --- recordings ---------------------------------------------------------------------------------------------------


class RecordingSource:
    """A recording, as if it happened now. `speed`: recorded seconds a second; infinite: without any wait."""

    def __init__(self, path: Path, speed: float, clock: Clock) -> None:
        """Raises UnreadableInput; ConfigError: no such speed."""
        if not speed > 0:
            raise ConfigError([f"--speed: must be above 0, got {speed:g}"])
        self._speed, self._clock = speed, clock
        self.recording = recording.read(path)

    def ticks(self, stopped: Stopped) -> Iterator[Tick]:
        first, begun = None, self._clock.monotonic()
        for tick in ticks_of(self.recording.panels):
            first = tick.at if first is None else first
            pause(self._clock, begun + (tick.at - first) / self._speed - self._clock.monotonic(), stopped)
            if stopped():
                return
            yield tick


# --- detectors on ticks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    grow_ticks: int = 20
    """A panel grows when something new has been there for so many ticks: raising it makes new machines wait, lowering
    it makes a fleet that grows machine by machine cost more."""
    history_ticks: int = 300
    """So many ticks are shown to the tracker of a panel that grew, and kept for that."""
    history_bytes: int = 256 << 20
    """Of one panel; fewer ticks are kept where they need more."""


@dataclass(slots=True)
class _Watched:
    shape: PanelShape
    tracker: Tracker
    history: deque[Tick] = field(default_factory=deque)
    history_bytes: int = 0
    growing_since: float | None = None  # first tick with something that the tracker does not know
    growing_ticks: int = 0
    told: dict[tuple[tuple[Suspect, ...], FaultClass], float] = field(default_factory=dict)
    repeats_until: float = float("-inf")  # a tracker that is new may tell again what its predecessor told
    columns_of: "tuple[PanelShape, _Picked] | None" = None  # for the newest shape that is not the tracker's own

    def laid_out(self, tick: Tick) -> Floats:
        """The tick's values in the tracker's rows and columns."""
        if tick.shape is self.shape:
            return tick.values
        picked = self.picked(tick.shape)
        values = np.full((len(self.shape.metrics), len(self.shape.machines)), np.nan, dtype=np.float32)
        values[np.ix_(picked.m_to, picked.n_to)] = tick.values[np.ix_(picked.m_from, picked.n_from)]
        return values

    def picked(self, shape: PanelShape) -> "_Picked":
        if self.columns_of is None or self.columns_of[0] is not shape:
            self.columns_of = shape, _Picked.of(shape, self.shape)
        return self.columns_of[1]

    def keep(self, tick: Tick, limits: WatchLimits) -> None:
        self.history.append(tick)
        self.history_bytes += tick.values.nbytes
        while len(self.history) > limits.history_ticks or self.history_bytes > limits.history_bytes:
            self.history_bytes -= self.history.popleft().values.nbytes

    def knows(self, shape: PanelShape) -> bool:
        return shape is self.shape or self.picked(shape).complete


@dataclass(frozen=True, slots=True)
class _Picked:
    """Rows and columns that two shapes share: where they are in the one, where in the other."""

    m_from: list[int]
    m_to: list[int]
    n_from: list[int]
    n_to: list[int]
    complete: bool  # the other one has all of the one

    @classmethod
    def of(cls, source: PanelShape, target: PanelShape) -> "_Picked":
        metrics = {m: i for i, m in enumerate(target.metrics)}
        machines = {m: i for i, m in enumerate(target.machines)}
        m = [(i, metrics[x]) for i, x in enumerate(source.metrics) if x in metrics]
        n = [(i, machines[x]) for i, x in enumerate(source.machines) if x in machines]
        complete = len(m) == len(source.metrics) and len(n) == len(source.machines)
        return cls([i for i, _ in m], [i for _, i in m], [i for i, _ in n], [i for _, i in n], complete)


class PanelWatch:
    """One detector on all panels of a source.

    While the shapes stay as they are, its findings are those of `panel.findings`. Of what a grown panel's new tracker
    says about the ticks that it is shown again, only what begins after the growth counts: its predecessor has judged
    the rest.
    """

    def __init__(self, detector: PanelDetector, limits: WatchLimits | None = None) -> None:
        self._detector, self._limits = detector, limits or WatchLimits()
        self._panels: dict[PanelKey, _Watched] = {}

    @property
    def shapes(self) -> list[PanelShape]:
        """What is being watched."""
        return [p.shape for p in self._panels.values()]

    def tick(self, tick: Tick) -> list[Finding]:
        """Takes the next tick of its panel; findings that begin with it."""
        key = panel_key(tick.shape)
        panel = self._panels.pop(key, None)
        if panel is None:
            panel = _Watched(tick.shape, self._detector.track(tick.shape))
            if len(self._panels) >= PANELS_MAX:  # the one that had no tick for the longest
                del self._panels[next(iter(self._panels))]
        self._panels[key] = panel
        panel.keep(tick, self._limits)
        if not panel.knows(tick.shape):
            panel.growing_since = tick.at if panel.growing_since is None else panel.growing_since
            panel.growing_ticks += 1
            if panel.growing_ticks >= self._limits.grow_ticks:
                return self._grow(panel, tick.shape)
        return _told_once(panel, panel.tracker.tick(tick.at, panel.laid_out(tick)), tick.at)

    def _grow(self, panel: _Watched, shape: PanelShape) -> list[Finding]:
        since = panel.growing_since
        assert since is not None
        panel.shape, panel.tracker, panel.columns_of = shape, self._detector.track(shape), None
        panel.growing_since, panel.growing_ticks = None, 0
        found: list[Finding] = []
        for tick in panel.history:
            found += [f for f in panel.tracker.tick(tick.at, panel.laid_out(tick)) if f.detected_at >= since]
        now = panel.history[-1].at
        panel.repeats_until = now + self._limits.history_ticks * shape.interval_seconds
        return _told_once(panel, found, now)


def _told_once(panel: _Watched, found: list[Finding], now: float) -> list[Finding]:
    """Without what a predecessor of the tracker told already."""
    fresh = []
    for f in found:
        who = f.suspects, f.fault_class
        if who in panel.told and now <= panel.repeats_until:
            continue
        panel.told[who] = now
        if len(panel.told) > TOLD_MAX:
            del panel.told[next(iter(panel.told))]
        fresh.append(f)
    return fresh


# --- the agents of a run ------------------------------------------------------------------------------------------

READING_AGE_INTERVALS = 3
"""A rate reaches back so far at most; a process that was not sampled for longer starts anew."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What an agent said of one process or node at one moment. `of`: whose counters these are."""

    at: float  # node monotonic
    of: tuple[object, ...]
    values: dict[str, float]  # by the catalogue's names


class AgentsPanels:
    """Panels straight from the agents of a run, of the metrics that Prometheus would have had of them."""

    def __init__(self, source: AgentsSource, clock: Clock, interval_seconds: float) -> None:
        self._source, self._clock, self._interval_seconds = source, clock, interval_seconds
        self._panels = Panels(interval_seconds)
        self._newest: dict[Place, _Reading] = {}  # since the last tick
        self._before: dict[Place, _Reading] = {}  # at the last tick that had one

    def ticks(self, stopped: Stopped) -> Iterator[Tick]:
        self._source.start()
        try:
            following = math.floor(self._clock.wall() / self._interval_seconds) + 1
            while not stopped():
                observation = self._source.poll(PAUSE_SECONDS)
                for batch in observation.batches:
                    for process in batch.processes:
                        if process.alive:  # a dead one is shown for a while beside the next in its place
                            self._newest[_place_of(process)] = _process_reading(process)
                    for host in batch.hosts:
                        values = {v.metric.name: v.value for v in host_values(host)}
                        place = Place(role=NODE_ROLE, machine=Machine(node=host.node))
                        self._newest[place] = _Reading(host.at, (), values)
                if observation.wall_at >= following * self._interval_seconds:
                    yield from self._tick(following * self._interval_seconds)
                    following = math.floor(observation.wall_at / self._interval_seconds) + 1
        finally:
            self._source.close()

    def _tick(self, at: float) -> Iterator[Tick]:
        measured: dict[str, list[tuple[Place, float]]] = {}
        for place, reading in self._newest.items():
            before = self._before.get(place)
            for metric, value in self._measured(before, reading):
                measured.setdefault(metric, []).append((place, value))
        self._before.update(self._newest)
        self._newest.clear()
        series = []
        for metric, found in measured.items():
            values = np.array([[value] for _, value in found], dtype=np.float32)
            values[~np.isfinite(values)] = np.nan
            series.append(Series(metric=metric, places=[place for place, _ in found], values=values))
        return ticks_of(self._panels.build(np.array([at]), series))

    def _measured(self, before: _Reading | None, now: _Reading) -> Iterator[tuple[str, float]]:
        """Values by their names in panels; rates only where the counters went on."""
        seconds = now.at - before.at if before is not None and before.of == now.of else 0.0
        grown: dict[str, float] = {}
        if before is not None and 0 < seconds <= READING_AGE_INTERVALS * self._interval_seconds:
            both = now.values.keys() & before.values.keys()
            grown = {name: now.values[name] - before.values[name] for name in both}
        for name, value in now.values.items():
            metric = BY_NAME[name]
            if not (called := panel_metric(metric)):
                continue
            if metric.type is not MetricType.COUNTER:
                yield called, value
            elif grown.get(name, -1.0) >= 0:
                yield called, grown[name] / seconds
        if grown.get(UNITS, 0.0) > 0 and grown.get(BUSY, -1.0) >= 0:
            yield SECONDS_PER_UNIT, grown[BUSY] / grown[UNITS]


def _place_of(sample: ProcessSample) -> Place:
    return Place(role=sample.role, machine=Machine(node=sample.process.node, replica=sample.replica, rank=sample.rank))


def _process_reading(sample: ProcessSample) -> _Reading:
    values = {v.metric.name: v.value for v in process_values(sample)}
    return _Reading(sample.at, (sample.process, sample.incarnation), values)
