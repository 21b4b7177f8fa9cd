"""Counters and gauges of processes and nodes become what panels compare, from one tick to the next."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from rolecall.core.metrics.catalogue import CATALOGUE, PROCESS_METRICS, UNPAGED_METRICS
from rolecall.core.metrics.metric import Metric, MetricType
from rolecall.core.telemetry import ProcessSample
from rolecall.core.uninstrumented import is_instrumented
from rolecall.detector.panels.metrics import BUSY, SECONDS_PER_UNIT, UNITS, panel_metric

READING_AGE_INTERVALS = 3
"""A rate reaches back so far at most; a process that was not sampled for longer starts anew."""


@dataclass(frozen=True, slots=True)
class CounterReading:
    """What an agent said of one process or node at one moment. `of`: whose counters these are."""

    at: float  # node monotonic
    of: tuple[object, ...]
    values: dict[str, float]  # by the catalogue's names


def _compared(metrics: Iterable[Metric]) -> tuple[tuple[str, ...], Callable[[ProcessSample], tuple[float, ...]]]:
    """Names of those that processes are compared in, and what gets their values of a sample."""
    found = [m for m in metrics if panel_metric(m)]
    return tuple(m.name for m in found), attrgetter(*(m.source for m in found))


_PAGED, _UNPAGED = _compared(PROCESS_METRICS), _compared(UNPAGED_METRICS)
_CALLED = {m.name: (panel_metric(m), m.type is MetricType.COUNTER) for m in CATALOGUE}


def process_reading(sample: ProcessSample) -> CounterReading:
    """As `process_values` has them, and only those that are compared: thousands of processes are read each second."""
    names, get = _PAGED if is_instrumented(sample) else _UNPAGED
    values = {name: v for name, v in zip(names, get(sample), strict=True) if v == v}  # noqa: PLR0124 NaN
    return CounterReading(sample.at, (sample.process, sample.incarnation), values)


def measured(before: CounterReading | None, now: CounterReading, interval_seconds: float) -> dict[str, float]:
    """Values of `now` by their names in panels; rates only where the counters went on since `before`, the reading of an
    earlier tick."""
    seconds = now.at - before.at if before is not None and before.of == now.of else 0.0
    then = before.values if before is not None and 0 < seconds <= READING_AGE_INTERVALS * interval_seconds else {}
    found: dict[str, float] = {}
    for name, value in now.values.items():
        called, is_counter = _CALLED[name]
        if not called:
            continue
        if not is_counter:
            found[called] = value
        elif (grown := value - then.get(name, math.inf)) >= 0:
            found[called] = grown / seconds
    units = now.values.get(UNITS, 0.0) - then.get(UNITS, math.inf)
    busy = now.values.get(BUSY, 0.0) - then.get(BUSY, math.inf)
    if units > 0 and busy >= 0:
        found[SECONDS_PER_UNIT] = busy / units
    return found
