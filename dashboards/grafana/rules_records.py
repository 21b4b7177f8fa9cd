"""Recording rules: what a panel would compute from every replica or GPU of a large job, once for all who look."""

from rolecall.dashboards.grafana.rules import Group, Record

_ROLES = (
    Record(
        name="role:rolecall_process_up:sum",
        expr="sum by (job, role) (rolecall_process_up)",
    ),
    Record(
        name="role:rolecall_process_tokens:rate1m",
        expr="sum by (job, role) (rate(rolecall_process_tokens_total[1m]))",
    ),
    Record(
        name="role:rolecall_process_progress:median_rate1m",
        expr="quantile by (job, role) (0.5, rate(rolecall_process_progress_total[1m]))",
    ),
    Record(
        name="role:rolecall_process_progress:min_rate1m",
        expr="min by (job, role) (rate(rolecall_process_progress_total[1m]))",
    ),
    Record(
        name="role:rolecall_process_unit_seconds:median1m",
        expr="""quantile by (job, role) (0.5, rate(rolecall_process_busy_seconds_total[1m])
        / (rate(rolecall_process_work_units_total[1m]) > 0))""",
    ),
    Record(
        name="role:rolecall_process_unit_seconds:max1m",
        expr="""max by (job, role) (rate(rolecall_process_busy_seconds_total[1m])
        / (rate(rolecall_process_work_units_total[1m]) > 0))""",
    ),
)
_NODES = (
    Record(
        name="node:rolecall_gpu_tensor_active:avg",
        expr="avg by (job, instance, node) (rolecall_gpu_tensor_active_ratio)",
    ),
    Record(name="node:rolecall_gpu_power_watts:sum", expr="sum by (job, instance, node) (rolecall_gpu_power_watts)"),
    Record(
        name="node:rolecall_gpu_temperature_celsius:max",
        expr="max by (job, instance, node) (rolecall_gpu_temperature_celsius)",
    ),
    Record(
        name="node:rolecall_infiniband_sent_bytes:rate1m",
        expr="sum by (job, instance, node) (rate(rolecall_infiniband_sent_bytes_total[1m]))",
    ),
)

RECORD_GROUPS = (
    Group(name="rolecall-roles", rules=_ROLES),
    Group(name="rolecall-nodes", rules=_NODES),
)
