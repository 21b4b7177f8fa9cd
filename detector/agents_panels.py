"""Source `agents`: panels straight from the agents of a run, of the metrics that Prometheus would have had of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rolecall.core.clock import Clock
from rolecall.core.metrics import BY_NAME, MetricType, host_values, process_values
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.panel import Machine
from rolecall.detector.panel_metrics import BUSY, NODE_ROLE, SECONDS_PER_UNIT, UNITS, panel_metric
from rolecall.detector.panel_source import PAUSE_SECONDS, Stopped, Tick, ticks_of
from rolecall.detector.series_panels import Panels, Place, Series
from rolecall.detector.source import AgentsSource

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
