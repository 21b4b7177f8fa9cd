"""Converts counters and gauges of processes and nodes into panel values, from one tick to the next."""

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
"""Maximum interval of a rate; after a longer gap, there is no rate."""


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counters and gauges of one process or node at one time, as reported by an agent. `of`: identity of the
    counters."""

    at: float  # node monotonic
    of: tuple[object, ...]
    values: dict[str, float]  # by catalog name


def _compared(metrics: Iterable[Metric]) -> tuple[tuple[str, ...], Callable[[ProcessSample], tuple[float, ...]]]:
    """Names of the compared metrics, and a function that extracts their values from a sample."""
    found = [m for m in metrics if panel_metric(m)]
    return tuple(m.name for m in found), attrgetter(*(m.source for m in found))


_PAGED, _UNPAGED = _compared(PROCESS_METRICS), _compared(UNPAGED_METRICS)
_CALLED = {m.name: (panel_metric(m), m.type is MetricType.COUNTER) for m in CATALOGUE}


def process_reading(sample: ProcessSample) -> CounterReading:
    """Like `process_values`, but only the compared metrics: thousands of processes are read each second."""
    names, get = _PAGED if is_instrumented(sample) else _UNPAGED
    values = {name: v for name, v in zip(names, get(sample), strict=True) if v == v}  # noqa: PLR0124 NaN
    return CounterReading(sample.at, (sample.process, sample.incarnation), values)


def measured(before: CounterReading | None, now: CounterReading, interval_seconds: float) -> dict[str, float]:
    """Values of `now` by panel name; rates only if the counters continued since `before`, the reading of an earlier
    tick."""
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
