"""PromQL of dashboards: every metric is checked, and restricted to the servers that the dashboard's variables select.

`scoped` raises UnknownMetric for a metric that neither the catalogue nor dcgm-exporter has, so a misspelt name fails
when dashboards are built, not when someone opens one. It adds the matchers of the dashboard's variables: `$watch` for
metrics of `rolecall watch`, `$instance` for metrics of agents. A label that the metric does not have is an error too:
it would match nothing and show an empty panel.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rolecall.agent.collectors.gpu import dcgm
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.metric import MetricScope

OF_WATCH = frozenset({MetricScope.WATCH, MetricScope.RUN})
DCGM_NAMES = frozenset({s.name for s in dcgm.SERIES} | {dcgm.NVLINK_BANDWIDTH, dcgm.XID})
DCGM_LABELS = frozenset({"gpu", "UUID", "device", "modelName", "hostname", "Hostname", "err_code", "err_msg"})
"""`Hostname`: dcgm-exporter until May 2026 (NVIDIA/dcgm-exporter#655)."""

SCOPE_LABELS = frozenset({"job", "instance"})
SCOPE_OF_WATCH = 'job=~"$job",instance=~"$watch"'
SCOPE_OF_AGENT = 'job=~"$job",instance=~"$instance"'

SCOPE_OF_RECORD = 'job=~"$job"'

_SELECTOR = re.compile(r"\b((?:rank|role):rolecall_\w+:\w+|rolecall_\w+|DCGM_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')

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
"""Series that Prometheus records: name -> expression. `rules.py` makes them recording rules, boards query them.

Recorded is what takes long to compute when a board is opened: quantiles over every rank of a large job. For a thousand
ranks a graph of 240 points took 1.3 to 2.8 s (three runs on a busy machine, Prometheus 2.42); sums of rates took under
0.1 s and are not recorded. A rank is compared with the median of its role; the watch compares it with its own past too.
"""
LABELS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"rank": frozenset({"role", "replica", "rank"}), "role": frozenset({"role"})}
)
"""Labels of a recorded series, by the level that its name begins with. Of the scrape labels it keeps `job` alone."""


class UnknownMetric(ValueError):
    """A programming error in a dashboard or rule."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression, with its matchers as written."""

    metric: str
    matchers: str

    @property
    def text(self) -> str:
        return f"{self.metric}{{{self.matchers}}}"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(_MATCHER.findall(self.matchers))


def selectors(expression: str) -> Iterator[Selector]:
    """Every metric that an expression reads, in order."""
    for found in _SELECTOR.finditer(expression):
        yield Selector(found[1], found[2] or "")


def scoped(expression: str) -> str:
    """The expression on one line, each selector restricted to the selected servers."""
    one_line = " ".join(expression.split())
    return _SELECTOR.sub(lambda m: _scoped(Selector(m[1], m[2] or "")).text, one_line)


def _scoped(selector: Selector) -> Selector:
    wrong = set(selector.labels) - labels_of(selector.metric)
    if wrong:
        raise UnknownMetric(f"{selector.text}: {selector.metric} has no label {', '.join(sorted(wrong))}")
    metric = BY_NAME.get(selector.metric)
    scope = SCOPE_OF_WATCH if metric is not None and metric.subject in OF_WATCH else SCOPE_OF_AGENT
    scope = SCOPE_OF_RECORD if ":" in selector.metric else scope
    return Selector(selector.metric, f"{scope},{selector.matchers}" if selector.matchers else scope)


def grown(counter: str, by: str) -> str:
    """Increase of a counter over the dashboard's time range. Unlike `increase()` it counts the first event of a series
    that appears with it. It does not handle counter resets: only for counters that survive restarts."""
    now, before = f"max by ({by}) ({counter})", f"max by ({by}) ({counter} offset $__range)"
    return f"{now} - ({before} or {now} * 0)"


def alive(vector: str) -> str:
    """Per-process series without those of processes that have exited, whose last values linger for a while."""
    return f"({vector} and on (instance, node, role, replica, rank) (rolecall_process_up == 1))"


def labels_of(name: str) -> frozenset[str]:
    """The labels that a metric can be selected by. Raises UnknownMetric."""
    if name in DCGM_NAMES:
        return DCGM_LABELS
    if name in BY_NAME:
        return frozenset(BY_NAME[name].labels)
    if name in RECORDED:
        return LABELS[name.partition(":")[0]]
    raise UnknownMetric(f"{name} is in neither the metric catalogue nor the list of dcgm-exporter's names")
