"""Selects the catalog metrics (core/metrics/catalogue.py) used for peer comparison, and their names in panels."""

from rolecall.core.metrics.metric import GPU, NODE, RANK, Metric, MetricType
from rolecall.core.telemetry import HEALTH_SIGNS

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
