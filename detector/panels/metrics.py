"""Selects the catalog metrics (core/metrics/catalogue.py) used for peer comparison, and converts counters and gauges of
processes and nodes into panel values, from one tick to the next.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from rolecall.core.metrics.catalogue import CATALOGUE, PROCESS_METRICS, UNPAGED_METRICS
from rolecall.core.metrics.metric import GPU, NODE, RANK, Metric, MetricType
from rolecall.core.telemetry import HEALTH_SIGNS, ProcessSample, is_instrumented

NODE_ROLE = "node"
"""Role of metrics of a node rather than a process."""


NOT_COMPARED = frozenset(
    {
        # Ordinals and booleans: peers differ when they are at another point of the same work, or were restarted.
        "rolecall_process_up",
        "rolecall_process_page_ok",
        "rolecall_process_incarnation",
        "rolecall_process_epoch",
        "rolecall_process_step",
        "rolecall_process_policy_version",
        # Properties of the training, not of the machine: all replicas of a step share them.
        "rolecall_train_unfinite_total",
        "rolecall_train_jumps_total",
        "rolecall_train_healths_total",
        # Properties of the hardware.
        "rolecall_host_cpus",
        "rolecall_host_memory_total_bytes",
    }
)
SECONDS_PER_UNIT = "rolecall_process_busy_seconds_per_work_unit"
BUSY, UNITS = "rolecall_process_busy_seconds_total", "rolecall_process_work_units_total"


def panel_metric(metric: Metric) -> str:
    """Name of a catalog metric in panels: a gauge keeps its name, a counter becomes a rate (`..._per_second`, a counter
    of seconds `..._ratio`). "" if peers are not compared by it: states (values in a label) and NOT_COMPARED."""
    if not metric.detect or metric.node_clock or metric.labels not in (NODE, RANK, GPU) or metric.name in NOT_COMPARED:
        return ""
    if metric.source in HEALTH_SIGNS:  # a property of the training
        return ""
    if metric.type is not MetricType.COUNTER:
        return metric.name
    if metric.unit == "seconds":
        return f"{metric.name.removesuffix('_seconds_total')}_ratio"
    return f"{metric.name.removesuffix('_total')}_per_second"


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
