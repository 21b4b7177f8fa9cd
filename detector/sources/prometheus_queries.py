"""The queries to a Prometheus server, and the labels of its series that name a machine.

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
    """Which labels name the machine of a series: of each list the first that is not empty."""

    role: tuple[str, ...] = ("role",)
    role_otherwise: str = "machine"
    """Role of a series without such a label."""
    replica: tuple[str, ...] = ("replica",)
    node: tuple[str, ...] = ("node", "hostname", "Hostname", "instance")
    """A series without is left out."""
    rank: tuple[str, ...] = ("rank",)
    gpu: tuple[str, ...] = ("gpu",)
    job: tuple[str, ...] = ()
    phase: tuple[str, ...] = ("phase",)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.role, *self.replica, *self.node, *self.rank, *self.gpu, *self.job, *self.phase)

    def place(self, labels: Mapping[str, str]) -> PanelPosition | None:
        """None: no node, a rank or gpu that is no number, or something that is no name."""

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
    """`expression`: PromQL. In it `$match` stands for the selector that the user gave (and for one that picks machines,
    when a server refuses to answer for all at once), `$window` for the duration of rates, `$interval` for a tick's."""

    metric: str
    expression: str
    labels: Labels = Labels()


def trusted_rate(name: str) -> str:
    """Rate of a counter where its series was there at both ends of the window and did not start again in it.

    `rate` alone divides by the whole window even where the series covers less: a target that comes or goes would look
    slow for a window. `and` drops what is stale now or was absent then, `unless resets` what was restarted.
    """
    series = f"{name}{{$match}}"
    return f"rate({series}[$window]) and {series} and {series} offset $window unless resets({series}[$window]) > 0"


ALIVE = " and rolecall_process_up{$match} == 1"
"""An agent continues to export the last values of a dead process: also a gap."""


def catalogue_queries() -> tuple[MetricQuery, ...]:
    """What rolecall's agents expose (core/metrics/catalogue.py). Phases change faster than servers scrape: role alone
    makes peers."""
    found = []
    for metric in CATALOGUE:
        if (
            name := panel_metric(metric)
        ) and metric.subject is not MetricScope.GPU:  # whose GPU it is, no label of it says
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
"""Of dcgm-exporter's `default-counters.csv`; without the last XID, which is a code and no measure."""


def dcgm_queries() -> tuple[MetricQuery, ...]:
    """What dcgm-exporter exposes: one column a GPU. Its host label was `Hostname` until May 2026
    (dcgm-exporter#655)."""
    labels = Labels(role=("role",), role_otherwise="gpu", node=("hostname", "Hostname", "node", "instance"))
    gauges = [
        MetricQuery(metric=f"DCGM_FI_{g}", expression=f"DCGM_FI_{g}{{$match}}", labels=labels) for g in DCGM_GAUGES
    ]
    replays = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
    return (*gauges, MetricQuery(metric=f"{replays}_per_second", expression=trusted_rate(replays), labels=labels))
