"""Alert and recording rules for Prometheus as code. An alert stands for something that a person on call must see to; it
says what rolecall sees, and its runbook what rolecall has done already and what is left for people.

An expression with a metric that the catalogue does not have, or a label that the metric does not have, is refused when it
is made: in Prometheus it would be silent for ever. `rules_yaml()` is the rules as files; the alerts themselves are in
`watch.py` (the watch, people, the run), `training.py` and `nodes.py` (agents, GPUs, links, disks).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import yaml

from rolecall.dashboards.grafana.promql import labels_of, selectors

RUNBOOKS = "docs/runbooks"
"""Where the runbooks lie; give the address of a copy that people on call can open."""
OF_PROMETHEUS = frozenset({"job", "instance"})
WATCH_JOB = "rolecall-watch"
AGENT_JOBS = "rolecall|rolecall-agent"
"""Scrape jobs: as in deploy/prometheus.yaml, and as a run's own targets.json names them. Only `up` needs to know."""
LINE_MAX = 118
_ALERT_NAME = re.compile(r"Rolecall[A-Z][A-Za-z]+")
_RECORD_NAME = re.compile(r"[a-z_]+:rolecall_[a-z0-9_]+:[a-z0-9_]+")


class Severity(StrEnum):
    CRITICAL = "critical"  # the run loses time now, or nobody watches over it: wake somebody
    WARNING = "warning"  # will become so, or hardware wants hands: in working hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expr: str
    hold: str = "0s"
    """So long it must be so before somebody is told (`for`)."""
    severity: Severity
    summary: str
    description: str

    def __post_init__(self) -> None:
        if not _ALERT_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: expected RolecallThis")
        check(self.expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """`name`: level:metric:operation, as Prometheus' own naming of recording rules has it."""

    name: str
    expr: str

    def __post_init__(self) -> None:
        if not _RECORD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name}: expected level:rolecall_metric:operation")
        check(self.expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Rules that are evaluated one after the other, each `interval`."""

    name: str
    rules: tuple[Alert | RecordingRule, ...]
    interval: str = "15s"


def check(expr: str) -> None:
    """Raises ValueError: a metric that nobody serves, or a label that it does not have."""
    found = list(selectors(expr))
    if not found and "up{" not in expr:
        raise ValueError(f"no metric of ours in: {expr}")
    for one in found:
        if unknown := set(one.labels) - labels_of(one.metric) - OF_PROMETHEUS:
            raise ValueError(f"{one.metric} has no label {', '.join(sorted(unknown))}: {expr}")


def runbook(name: str, base: str = RUNBOOKS) -> str:
    return f"{base.rstrip('/')}/{name}.md"


def groups() -> Mapping[str, tuple[RuleGroup, ...]]:
    """File name -> groups."""
    # Here, because they are made of what is above.
    from rolecall.dashboards.grafana.rules.nodes import NODE_GROUPS
    from rolecall.dashboards.grafana.rules.recording import RECORD_GROUPS
    from rolecall.dashboards.grafana.rules.training import TRAINING_GROUPS
    from rolecall.dashboards.grafana.rules.watch import WATCH_GROUPS

    return MappingProxyType(
        {
            "rolecall-alerts.yaml": (*WATCH_GROUPS, *TRAINING_GROUPS, *NODE_GROUPS),
            "rolecall-records.yaml": RECORD_GROUPS,
        }
    )


def alerts() -> tuple[Alert, ...]:
    return tuple(r for made in groups().values() for g in made for r in g.rules if isinstance(r, Alert))


def rules_yaml(runbooks: str = RUNBOOKS) -> dict[str, str]:
    """File name -> text, for `rule_files` of Prometheus. `runbooks`: where people find docs/runbooks."""
    return {name: _text([_group(g, runbooks) for g in made]) for name, made in groups().items()}


def _group(group: RuleGroup, runbooks: str) -> dict[str, Any]:
    rules = [_alert(r, runbooks) if isinstance(r, Alert) else _record(r) for r in group.rules]
    return {"name": group.name, "interval": group.interval, "rules": rules}


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": _on_one_line(alert.expr),
        "for": alert.hold,
        "labels": {"severity": str(alert.severity)},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": runbook(alert.name, runbooks),
        },
    }


def _record(record: RecordingRule) -> dict[str, Any]:
    return {"record": record.name, "expr": _on_one_line(record.expr)}


def _on_one_line(expr: str) -> str:
    return " ".join(expr.split())


def _text(made: list[dict[str, Any]]) -> str:
    return yaml.safe_dump({"groups": made}, sort_keys=False, allow_unicode=True, width=LINE_MAX)
