"""Series that Prometheus records: name -> expression. `rules/roles.py` makes them recording rules, boards query them.

Recorded is what takes long to compute when a board is opened: quantiles over every rank of a large job. For a thousand
ranks a graph of 240 points took 1.3 to 2.8 s (three runs on a busy machine, Prometheus 2.42); sums of rates took under
0.1 s and are not recorded. A rank is compared with the median of its role; the watch compares it with its own past too.
"""

from collections.abc import Mapping
from types import MappingProxyType

_UNIT_SECONDS = """max by (job, role, replica, rank) (rate(rolecall_process_busy_seconds_total[1m])
/ (rate(rolecall_process_work_units_total[1m]) > 0))"""
"""Seconds per unit of work of each rank; an idle rank has no value."""
_PROGRESS = "max by (job, role, replica, rank) (rate(rolecall_process_progress_total[1m]))"

RECORDED: Mapping[str, str] = MappingProxyType(
    {
        "role:rolecall_process_unit_seconds:median1m": f"quantile by (job, role) (0.5, {_UNIT_SECONDS})",
        "rank:rolecall_process_unit_slowness:ratio1m": (
            f"{_UNIT_SECONDS} / on (job, role) group_left () quantile by (job, role) (0.5, {_UNIT_SECONDS})"
        ),
        "role:rolecall_process_progress:median_rate1m": f"quantile by (job, role) (0.5, {_PROGRESS})",
        "role:rolecall_process_progress:min_rate1m": f"min by (job, role) ({_PROGRESS})",
    }
)
LABELS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"rank": frozenset({"role", "replica", "rank"}), "role": frozenset({"role"})}
)
"""Labels of a recorded series, by the level that its name begins with. Of the scrape labels it keeps `job` alone."""
