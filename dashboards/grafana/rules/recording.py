"""Recording rules: what is slow to compute while somebody waits, once for all who look.

Slow is a quantile over every rank of a large job: of a thousand ranks it took 1.3 to 2.8 s for a graph of 240 points (three
tries on a machine at work, Prometheus 2.42), a sum of rates under 0.1 s, which is not recorded. A rank of a role in which
work is uneven is compared with its role, and with its own past by the watch.
"""

from rolecall.dashboards.grafana.rules.rule import RecordingRule, RuleGroup

UNIT_SECONDS = """max by (job, role, replica, rank) (rate(rolecall_process_busy_seconds_total[1m])
/ (rate(rolecall_process_work_units_total[1m]) > 0))"""
"""Of an idle rank there is none."""
PROGRESS = "max by (job, role, replica, rank) (rate(rolecall_process_progress_total[1m]))"

_ROLES = (
    RecordingRule(
        name="role:rolecall_process_unit_seconds:median1m", expr=f"quantile by (job, role) (0.5, {UNIT_SECONDS})"
    ),
    RecordingRule(
        name="rank:rolecall_process_unit_slowness:ratio1m",
        expr=f"{UNIT_SECONDS} / on (job, role) group_left () quantile by (job, role) (0.5, {UNIT_SECONDS})",
    ),
    RecordingRule(
        name="role:rolecall_process_progress:median_rate1m", expr=f"quantile by (job, role) (0.5, {PROGRESS})"
    ),
    RecordingRule(name="role:rolecall_process_progress:min_rate1m", expr=f"min by (job, role) ({PROGRESS})"),
)

RECORD_GROUPS = (RuleGroup(name="rolecall-roles", rules=_ROLES),)
