"""Source `agents`: panels directly from the agents of a run, with the metrics that they export to Prometheus."""

import math
from collections.abc import Iterator

import numpy as np

from rolecall.core.clock import Clock
from rolecall.core.metrics.catalogue import host_values
from rolecall.detector.live.gpu_readings import GpuReadings, Who
from rolecall.detector.panels.metrics import NODE_ROLE, CounterReading, measured, process_reading
from rolecall.detector.panels.panel import PAUSE_SECONDS, Machine, PanelTick, Stopped, ticks_of
from rolecall.detector.panels.series import MetricSeries, PanelPosition, Panels
from rolecall.detector.sources.agents import AgentsSource


class AgentsPanels:
    def __init__(self, source: AgentsSource, clock: Clock, interval_seconds: float) -> None:
        self._source, self._clock, self._interval_seconds = source, clock, interval_seconds
        self._panels = Panels(interval_seconds)
        self._newest: dict[PanelPosition, CounterReading] = {}  # since the last tick
        self._before: dict[PanelPosition, CounterReading] = {}  # at the last tick that had one
        self._gpus = GpuReadings()
        self._ranks: dict[Who, PanelPosition] = {}  # of the newest samples

    def ticks(self, stopped: Stopped) -> Iterator[PanelTick]:
        self._source.start()
        try:
            following = math.floor(self._clock.wall() / self._interval_seconds) + 1
            while not stopped():
                observation = self._source.poll(PAUSE_SECONDS)
                for batch in observation.batches:
                    for process in batch.processes:
                        if process.alive:  # a dead process is listed for a while beside its replacement
                            who = process.process
                            machine = Machine(node=who.node, replica=process.replica, rank=process.rank)
                            place = PanelPosition(role=process.role, machine=machine)
                            self._newest[place] = process_reading(process)
                            self._ranks[who.node, who.pid] = place
                        else:
                            self._ranks.pop((process.process.node, process.process.pid), None)
                    for gpu in batch.gpus:
                        self._gpus.take(gpu, observation.wall_at)
                    for host in batch.hosts:
                        values = {v.metric.name: v.value for v in host_values(host)}
                        place = PanelPosition(role=NODE_ROLE, machine=Machine(node=host.node))
                        self._newest[place] = CounterReading(host.at, (), values)
                if observation.wall_at >= following * self._interval_seconds:
                    yield from self._tick(following * self._interval_seconds)
                    following = math.floor(observation.wall_at / self._interval_seconds) + 1
        finally:
            self._source.close()

    def _tick(self, at: float) -> Iterator[PanelTick]:
        by_metric: dict[str, list[tuple[PanelPosition, float]]] = {}
        for place, reading in self._newest.items():
            before = self._before.get(place)
            for metric, value in measured(before, reading, self._interval_seconds).items():
                by_metric.setdefault(metric, []).append((place, value))
        for who, of_gpus in self._gpus.tick(at).items():
            if who in self._ranks:
                for metric, value in of_gpus.items():
                    by_metric.setdefault(metric, []).append((self._ranks[who], value))
        self._before.update(self._newest)
        self._newest.clear()
        series = []
        for metric, found in by_metric.items():
            values = np.array([[value] for _, value in found], dtype=np.float32)
            values[~np.isfinite(values)] = np.nan
            series.append(MetricSeries(metric=metric, places=[place for place, _ in found], values=values))
        return ticks_of(self._panels.build(np.array([at]), series))
