"""Recording rules: what is slow to compute while somebody waits, once for all who look.

Slow is a quantile over every rank of a large job: a thousand ranks take 4 to 6 ms for each point of a graph, so that six
hours are 3 to 5 s (one core, Prometheus 2.42); a sum over as many takes a tenth, and is not recorded. A rank of a role in
which work is uneven is compared with its role, and with its own past by the watch.
"""

from rolecall.dashboards.grafana.rules import Group, Record

UNIT_SECONDS = """max by (job, role, replica, rank) (rate(rolecall_process_busy_seconds_total[1m])
/ (rate(rolecall_process_work_units_total[1m]) > 0))"""
"""Of an idle rank there is none."""
PROGRESS = "max by (job, role, replica, rank) (rate(rolecall_process_progress_total[1m]))"

_ROLES = (
    Record(name="rank:rolecall_process_unit_seconds:rate1m", expr=UNIT_SECONDS),
    Record(name="role:rolecall_process_unit_seconds:median1m", expr=f"quantile by (job, role) (0.5, {UNIT_SECONDS})"),
    Record(
        name="rank:rolecall_process_unit_slowness:ratio1m",
        expr=f"{UNIT_SECONDS} / on (job, role) group_left () quantile by (job, role) (0.5, {UNIT_SECONDS})",
    ),
    Record(name="role:rolecall_process_progress:median_rate1m", expr=f"quantile by (job, role) (0.5, {PROGRESS})"),
    Record(name="role:rolecall_process_progress:min_rate1m", expr=f"min by (job, role) ({PROGRESS})"),
)

RECORD_GROUPS = (Group(name="rolecall-roles", rules=_ROLES),)
