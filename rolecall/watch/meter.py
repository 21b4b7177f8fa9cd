"""Measurements of the recovery loop, as one frozen `TickView` that is replaced after each tick.

The loop writes it and `/metrics` reads it without waiting for each other; while a tick is stuck, the previous view with
its time remains.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import Diagnosis
from rolecall.detector.base.observation import Observation
from rolecall.recovery import interfaces
from rolecall.recovery.incidents import Incident
from rolecall.recovery.loop import Watch
from rolecall.watch.metrics import TickView

COUNT_SECONDS = 5.0
"""Interval of counting processes, of which there may be sixteen thousand."""


class Meter:
    """Owned by the loop; `view` may be read from any thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.view = TickView(started_at=clock.wall(), mode="")
        self.waited = 0.0  # in the current tick
        self.counted_at = -math.inf

    def change(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)


class MeteredSource:
    """A source that measures its waiting time, unreachable agents and the age of its data."""

    def __init__(self, source: interfaces.ObservationSource, meter: Meter, num_agents: Callable[[], int]) -> None:
        self._source, self._meter, self._num_agents = source, meter, num_agents

    def poll(self, timeout_seconds: float) -> Any:
        clock = self._meter.clock
        started_at = clock.monotonic()
        try:
            observation = self._source.poll(timeout_seconds)
        finally:
            self._meter.waited += clock.monotonic() - started_at
        if isinstance(observation, Observation):
            self._record(observation)
        return observation

    def _record(self, observation: Observation) -> None:
        ages = [max(0.0, observation.wall_at - batch.wall_at) for batch in observation.batches]
        self._meter.change(
            observed_age_seconds=max(ages, default=self._meter.view.observed_age_seconds),
            num_agents=self._num_agents(),
            unreachable=tuple((node, since) for node, since, _ in observation.unreachable),
        )


class MeteredDetector:
    """A detector that measures its time, current diagnoses and number of processes."""

    def __init__(self, detector: interfaces.Detector, meter: Meter, num_processes: Callable[[], int]) -> None:
        self._detector, self._meter, self._num_processes = detector, meter, num_processes
        self.progressing, self.waits, self.has_worked = detector.progressing, detector.waits, detector.has_worked
        self.fate, self.survives = detector.fate, detector.survives
        self.forget, self.unforget = detector.forget, detector.unforget
        self.window, self.loads = detector.window, detector.loads

    def observe(self, observation: Any) -> Sequence[Diagnosis]:
        meter = self._meter
        started_at = meter.clock.monotonic()
        try:
            standing = self._detector.observe(observation)
        finally:
            now = meter.clock.monotonic()
            meter.change(detection_seconds=meter.view.detection_seconds + now - started_at)
        meter.change(standing=Counter(str(d.fault_class) for d in standing))
        if now - meter.counted_at >= COUNT_SECONDS:
            meter.counted_at = now
            meter.change(num_processes=self._num_processes())
        return standing


class MeteredWatch(Watch):
    """The loop with each tick measured."""

    def __init__(self, *arguments: Any, meter: Meter, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._meter = meter
        self.after_tick: Callable[[], None] = lambda: None
        meter.change(mode=self._config.mode)

    @property
    def incidents(self) -> Collection[Incident]:
        return self._projection.incidents.values()

    def run(self, stop: Any) -> None:
        try:
            super().run(stop)
        finally:
            self._meter.change(acting=self.acting)

    def tick(self) -> None:
        meter = self._meter
        meter.waited, started_at = 0.0, meter.clock.monotonic()
        failed = 1
        try:
            super().tick()
            failed = 0
        finally:
            busy = max(0.0, meter.clock.monotonic() - started_at - meter.waited)
            meter.change(
                num_ticks=meter.view.num_ticks + 1,
                num_failures=meter.view.num_failures + failed,
                ended_at=meter.clock.wall(),
                seconds=busy,
                busy_seconds=meter.view.busy_seconds + busy,
                acting=self.acting,
                blind=bool(self._detector.error),
                num_unhandled=len(self._failures.errors()),
            )
        self.after_tick()
