"""Queries to a Prometheus server, and the labels of its series that identify a machine.

A counter's rate is used only where it is reliable (`trusted_rate`): a target that restarts, appears or disappears is a
gap.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.core.metrics.catalogue import CATALOGUE
from rolecall.core.metrics.metric import MetricScope, MetricType
from rolecall.detector.panels.metrics import BUSY, NODE_ROLE, SECONDS_PER_UNIT, UNITS, panel_metric
from rolecall.detector.panels.panel import Machine
from rolecall.detector.panels.series import PanelPosition
from rolecall.detector.sources.prometheus_api import is_name

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels that identify the machine of a series: of each list, the first that is not empty."""

    role: tuple[str, ...] = ("role",)
    role_otherwise: str = "machine"
    """Role of a series without such a label."""
    replica: tuple[str, ...] = ("replica",)
    node: tuple[str, ...] = ("node", "hostname", "Hostname", "instance")
    """Series without any of these are ignored."""
    rank: tuple[str, ...] = ("rank",)
    gpu: tuple[str, ...] = ("gpu",)
    job: tuple[str, ...] = ()
    phase: tuple[str, ...] = ("phase",)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.role, *self.replica, *self.node, *self.rank, *self.gpu, *self.job, *self.phase)

    def place(self, labels: Mapping[str, str]) -> PanelPosition | None:
        """None: no node, a rank or gpu that is not a number, or an unusable name."""

        def first(names: tuple[str, ...]) -> str:
            return next((labels[n] for n in names if labels.get(n)), "")

        node, rank, gpu = first(self.node), first(self.rank), first(self.gpu)
        role, replica, job, phase = first(self.role), first(self.replica), first(self.job), first(self.phase)
        numbers = all(not n or _NUMBER.fullmatch(n) for n in (rank, gpu))
        if not node or not numbers or not all(map(is_name, (node, role, replica, job, phase))):
            return None
        machine = Machine(node=node, replica=replica, rank=int(rank) if rank else None, gpu=int(gpu) if gpu else None)
        return PanelPosition(role=role or self.role_otherwise, machine=machine, job=job, phase=phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricQuery:
    """`expression`: PromQL, in which `$match` stands for the user's selector (and one for a subset of machines, when a
    server rejects a query for all), `$window` for the duration of rates, `$interval` for that of a tick."""

    metric: str
    expression: str
    labels: Labels = Labels()


def trusted_rate(name: str) -> str:
    """Rate of a counter, if its series exists at both ends of the window and was not reset in it.

    `rate` alone divides by the whole window even if the series covers only a part: a target that appears or disappears
    would look slow for a window. `and` drops series that are stale now or were absent then, `unless resets` those that
    were reset.
    """
    series = f"{name}{{$match}}"
    return f"rate({series}[$window]) and {series} and {series} offset $window unless resets({series}[$window]) > 0"


ALIVE = " and rolecall_process_up{$match} == 1"
"""An agent continues to export the last values of a dead process: also a gap."""


def catalogue_queries() -> tuple[MetricQuery, ...]:
    """Metrics of rolecall's agents (core/metrics/catalogue.py). Phases change faster than servers scrape, so only the
    role defines peers."""
    found = []
    for metric in CATALOGUE:
        if (
            name := panel_metric(metric)
        ) and metric.subject is not MetricScope.GPU:  # no label identifies the GPU's owner
            counter = metric.type is MetricType.COUNTER
            expression = trusted_rate(metric.name) if counter else f"{metric.name}{{$match}}"
            if metric.subject is MetricScope.PROCESS:
                found.append(MetricQuery(metric=name, expression=expression + ALIVE, labels=Labels(phase=())))
            else:
                labels = Labels(role=(), role_otherwise=NODE_ROLE, phase=())
                found.append(MetricQuery(metric=name, expression=expression, labels=labels))
    each = f"({trusted_rate(BUSY)}) / (({trusted_rate(UNITS)}) > 0){ALIVE}"
    return (*found, MetricQuery(metric=SECONDS_PER_UNIT, expression=each, labels=Labels(phase=())))


DCGM_GAUGES = (
    "DEV_SM_CLOCK",
    "DEV_MEM_CLOCK",
    "DEV_GPU_TEMP",
    "DEV_MEMORY_TEMP",
    "DEV_POWER_USAGE",
    "DEV_GPU_UTIL",
    "DEV_MEM_COPY_UTIL",
    "DEV_FB_USED",
    "DEV_NVLINK_BANDWIDTH_TOTAL",
    "PROF_GR_ENGINE_ACTIVE",
    "PROF_SM_ACTIVE",
    "PROF_SM_OCCUPANCY",
    "PROF_PIPE_TENSOR_ACTIVE",
    "PROF_DRAM_ACTIVE",
    "PROF_PCIE_TX_BYTES",
    "PROF_PCIE_RX_BYTES",
)
"""From dcgm-exporter's `default-counters.csv`; without the last XID, which is a code and not a measurement."""


def dcgm_queries() -> tuple[MetricQuery, ...]:
    """Metrics of dcgm-exporter: one column per GPU. Its host label was `Hostname` until May 2026
    (dcgm-exporter#655)."""
    labels = Labels(role=("role",), role_otherwise="gpu", node=("hostname", "Hostname", "node", "instance"))
    gauges = [
        MetricQuery(metric=f"DCGM_FI_{g}", expression=f"DCGM_FI_{g}{{$match}}", labels=labels) for g in DCGM_GAUGES
    ]
    replays = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
    return (*gauges, MetricQuery(metric=f"{replays}_per_second", expression=trusted_rate(replays), labels=labels))
