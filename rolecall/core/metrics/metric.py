"""The type of the rows of the metric catalogue (`core/metrics/catalogue.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class MetricType(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"


class MetricScope(StrEnum):
    """Subject of a metric, and so the source of its value."""

    PROCESS = "process"  # ProcessSample
    HOST = "host"  # HostSample
    GPU = "gpu"  # like the next ones: a collector of the agent (agent/collectors)
    NETWORK = "network"
    KERNEL = "kernel"
    STORAGE = "storage"
    NCCL = "nccl"
    ENGINE = "engine"
    AGENT = "agent"  # the agent's own counters
    WATCH = "watch"  # `rolecall watch`: itself and its incidents (metrics/watch.py)
    RUN = "run"  # the run, computed from its journal (views/run_totals.py)


NODE = ("node",)
RANK = ("node", "role", "replica", "rank")
GPU = ("node", "gpu")
UNITS = ("bytes_per_second", "seconds", "bytes", "ratio", "nats", "celsius", "watts", "joules", "hertz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    help: str
    labels: tuple[str, ...]
    subject: MetricScope
    detect: bool = False  # in `/v1/samples`, where the detector reads it
    source: str = ""  # field of ProcessSample, HostSample or GpuSample; "" if it is in none of them
    node_clock: bool = False  # the field is node-monotonic; exposed as seconds since 1970

    @property
    def type(self) -> MetricType:
        return MetricType.COUNTER if self.name.endswith("_total") else MetricType.GAUGE

    @property
    def unit(self) -> str:
        """Derived from the name: "seconds", "bytes", ... or "" for counts and 0/1."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in UNITS if stem.endswith("_" + unit)), "")


def row(subject: MetricScope, labels: tuple[str, ...], name: str, help_: str, **more: Any) -> Metric:
    """`name`: without `rolecall_`, with its labels besides `labels` in PromQL's notation: `watch_mode{mode}`."""
    name, _, own = name.removesuffix("}").partition("{")
    every = (*labels, *own.split(",")) if own else labels
    return Metric(name=f"rolecall_{name}", help=help_, labels=every, subject=subject, **more)


def rows(subject: MetricScope, labels: tuple[str, ...], table: Mapping[str, str]) -> tuple[Metric, ...]:
    """`table`: name -> help, as of `row`."""
    return tuple(row(subject, labels, name, help_) for name, help_ in table.items())


class MetricValue(NamedTuple):
    """One exposed value. `labels` has exactly the names that the metric declares, in that order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
