"""All rule groups, and the files that Prometheus loads (`rule_files`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml

from rolecall.dashboards.grafana.rules import agents, gpus, hosts, network, recovery, roles, run, training, watch
from rolecall.dashboards.grafana.rules.rule import Alert, RecordingRule, RuleGroup

RUNBOOKS = "docs/runbooks"
"""Where the runbooks are; pass the URL of a copy that on-call can open."""
LINE_CHARS_MAX = 118

GROUPS: Mapping[str, tuple[RuleGroup, ...]] = MappingProxyType(
    {
        "rolecall-alerts.yaml": (
            watch.GROUP,
            recovery.GROUP,
            run.GROUP,
            training.GROUP,
            agents.GROUP,
            gpus.GROUP,
            network.GROUP,
            hosts.GROUP,
        ),
        "rolecall-records.yaml": (roles.GROUP,),
    }
)
"""File name -> its groups."""
ALERTS: tuple[Alert, ...] = tuple(
    r for groups in GROUPS.values() for g in groups for r in g.rules if isinstance(r, Alert)
)
RECORDING_RULES: tuple[RecordingRule, ...] = tuple(
    r for groups in GROUPS.values() for g in groups for r in g.rules if isinstance(r, RecordingRule)
)


def rules_yaml(runbooks: str = RUNBOOKS) -> dict[str, str]:
    """File name -> YAML. `runbooks`: URL or folder that `runbook_url` points into."""
    return {
        name: yaml.safe_dump(
            {"groups": [_group(g, runbooks) for g in groups]}, sort_keys=False, allow_unicode=True, width=LINE_CHARS_MAX
        )
        for name, groups in GROUPS.items()
    }


def _group(group: RuleGroup, runbooks: str) -> dict[str, Any]:
    rules = [_alert(r, runbooks) if isinstance(r, Alert) else _record(r) for r in group.rules]
    return {"name": group.name, "interval": group.interval, "rules": rules}


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": _one_line(alert.expr),
        "for": alert.hold,
        "labels": {"severity": str(alert.severity)},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbooks.rstrip('/')}/{alert.name}.md",
        },
    }


def _record(record: RecordingRule) -> dict[str, Any]:
    return {"record": record.name, "expr": _one_line(record.expr)}


def _one_line(expr: str) -> str:
    return " ".join(expr.split())
