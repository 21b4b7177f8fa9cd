"""Counters and gauges of processes and nodes become what panels compare, from one tick to the next."""

from collections.abc import Iterator
from dataclasses import dataclass

from rolecall.core.metric import MetricType
from rolecall.core.metrics import BY_NAME, process_values
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.panel_metrics import BUSY, SECONDS_PER_UNIT, UNITS, panel_metric

READING_AGE_INTERVALS = 3
"""A rate reaches back so far at most; a process that was not sampled for longer starts anew."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an agent said of one process or node at one moment. `of`: whose counters these are."""

    at: float  # node monotonic
    of: tuple[object, ...]
    values: dict[str, float]  # by the catalogue's names


def process_reading(sample: ProcessSample) -> Reading:
    values = {v.metric.name: v.value for v in process_values(sample)}
    return Reading(sample.at, (sample.process, sample.incarnation), values)


def measured(before: Reading | None, now: Reading, interval_seconds: float) -> Iterator[tuple[str, float]]:
    """Values of `now` by their names in panels; rates only where the counters went on since `before`, the reading of an
    earlier tick."""
    seconds = now.at - before.at if before is not None and before.of == now.of else 0.0
    grown: dict[str, float] = {}
    if before is not None and 0 < seconds <= READING_AGE_INTERVALS * interval_seconds:
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
