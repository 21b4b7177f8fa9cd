"""What a metric is: the type of the catalogue's rows (`core/metrics/catalogue.py`), and the names that its labels may
have."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class MetricType(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"


class MetricScope(StrEnum):
    """What a metric speaks of, and so where its value comes from."""

    PROCESS = "process"  # ProcessSample
    HOST = "host"  # HostSample
    GPU = "gpu"  # as the next ones: a collector of the agent (agent/collectors)
    NETWORK = "network"
    KERNEL = "kernel"
    STORAGE = "storage"
    NCCL = "nccl"
    VLLM = "vllm"
    AGENT = "agent"  # the agent's own counters
    WATCH = "watch"  # `rolecall watch`: itself and its incidents (metrics/watch.py)
    RUN = "run"  # the run, computed from its journal (views/run_totals.py)


NODE = ("node",)
RANK = ("node", "role", "replica", "rank")
GPU = ("node", "gpu")
LABELS_ALLOWED = frozenset(
    {*RANK, "phase", "state", "probe", "kind", "version"}
    | {*GPU, "uuid", "name", "link", "error", "reason", "xid", "action", "gpu_instance", "compute_instance", "profile"}
    | {"nic", "port", "interface", "priority", "mount", "device", "resource", "communicator", "collective"}
    | {"run", "mode", "fault", "outcome", "guard", "decision", "verdict", "detector"}
)
"""Every label that a metric may carry. All are bounded by the topology or by a closed set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    type: MetricType
    unit: str  # "seconds", "bytes", ... or "" for counts and 0/1
    help: str
    labels: tuple[str, ...]
    subject: MetricScope
    detect: bool = False  # in `/v1/samples`, where the detector reads it
    source: str = ""  # field of ProcessSample or HostSample; "" for the agent's own
    node_clock: bool = False  # the field is node-monotonic; exposed as seconds since 1970


class MetricValue(NamedTuple):
    """One exposed value. `labels` has exactly the names that the metric declares, in that order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
