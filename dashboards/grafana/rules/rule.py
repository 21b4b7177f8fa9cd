"""Alert and recording rules for Prometheus as typed values.

A rule whose expression names an unknown metric, or a label that the metric does not have, raises ValueError when it is
built: Prometheus would accept it and never fire. The groups are one module each; `all.py` lists them and writes the
files.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from rolecall.dashboards.grafana.promql import labels_of, selectors

SCRAPE_LABELS = frozenset({"job", "instance"})
WATCH_JOB = "rolecall-watch"
AGENT_JOBS = "rolecall|rolecall-agent"
"""Scrape jobs as deploy/prometheus.yaml and a run's targets.json name them. Only `up` depends on the names."""
_ALERT_NAME = re.compile(r"Rolecall[A-Z][A-Za-z]+")
_RECORD_NAME = re.compile(r"[a-z_]+:rolecall_[a-z0-9_]+:[a-z0-9_]+")

UNLESS_ENDED = "unless on (job, instance) (rolecall_run_ended == 1)"
OBSERVE_MODE = 'on (job, instance) (rolecall_watch_mode{mode="observe"} == 1)'
REPORTED_BY = "(reported by {{ $labels.instance }})"
GPU_OF_NODE = "GPU {{ $labels.gpu }} of {{ $labels.node }}"


class Severity(StrEnum):
    CRITICAL = "critical"  # the run is losing time, or recovery does not work: page on-call
    WARNING = "warning"  # it will, or hardware needs service: handle in working hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expr: str
    hold: str = "0s"
    """How long the expression must hold before the alert fires (`for`)."""
    severity: Severity
    summary: str
    description: str

    def __post_init__(self) -> None:
        if not _ALERT_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: expected RolecallName")
        check(self.expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """`name` is level:metric:operation, Prometheus' naming convention for recording rules."""

    name: str
    expr: str

    def __post_init__(self) -> None:
        if not _RECORD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: expected level:rolecall_metric:operation")
        check(self.expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Rules that Prometheus evaluates in order, every `interval`."""

    name: str
    rules: tuple[Alert | RecordingRule, ...]
    interval: str = "15s"


def check(expr: str) -> None:
    """Raises ValueError: an unknown metric, or a label that a metric does not have."""
    found = list(selectors(expr))
    if not found and "up{" not in expr:
        raise ValueError(f"no rolecall metric in: {expr}")
    for one in found:
        if unknown := set(one.labels) - labels_of(one.metric) - SCRAPE_LABELS:
            raise ValueError(f"{one.metric} has no label {', '.join(sorted(unknown))}: {expr}")
