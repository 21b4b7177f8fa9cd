"""Recording rules: pace and slowness of the ranks of each role (`grafana/recorded.py`)."""

from rolecall.dashboards.grafana.recorded import RECORDED
from rolecall.dashboards.grafana.rules.rule import RecordingRule, RuleGroup

GROUP = RuleGroup(
    name="rolecall-roles", rules=tuple(RecordingRule(name=name, expr=expr) for name, expr in RECORDED.items())
)
