"""Expressions of dashboards: plain PromQL in which every metric is known and is asked of the servers that were chosen.

`scoped` reads each metric's name, raises UnknownMetric where neither the catalogue nor dcgm-exporter has it (so a misspelt
name fails when dashboards are built, not when somebody looks at one), and adds the matchers of the dashboard's variables
to it: `$watch` for what `rolecall watch` serves, `$instance` for what agents serve. A label that the metric does not have
is refused as well: it would match nothing and show nothing, in silence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
_RECORD_LABELS = {"rank": frozenset({"role", "replica", "rank"}), "role": frozenset({"role"})}
"""By the level that the name of a recorded series begins with; of servers they keep the job alone."""

_SELECTOR = re.compile(r"\b((?:rank|role):rolecall_\w+:\w+|rolecall_\w+|DCGM_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')


class UnknownMetric(ValueError):
    """A mistake in a dashboard."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression, with its matchers as they are written."""

    metric: str
    matchers: str

    @property
    def text(self) -> str:
        return f"{self.metric}{{{self.matchers}}}"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(_MATCHER.findall(self.matchers))


def selectors(expression: str) -> Iterator[Selector]:
    """Every metric that an expression reads."""
    for found in _SELECTOR.finditer(expression):
        yield Selector(found[1], found[2] or "")


def scoped(expression: str) -> str:
    """The expression with the matchers of the chosen servers in each selector, on one line."""
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
    """By how much a counter grew in the time that is shown. Unlike `increase()` it counts a series that appears with its
    first event, and unlike it cannot go over a restart: for counters that go on over one."""
    now, before = f"max by ({by}) ({counter})", f"max by ({by}) ({counter} offset $__range)"
    return f"{now} - ({before} or {now} * 0)"


def alive(vector: str) -> str:
    """Of what agents tell of processes: without those that have ended, whose last values stay for a while."""
    return f"({vector} and on (instance, node, role, replica, rank) (rolecall_process_up == 1))"


def labels_of(name: str) -> frozenset[str]:
    """The labels that a metric may be chosen by."""
    if name in DCGM_NAMES:
        return DCGM_LABELS
    if name in BY_NAME:
        return frozenset(BY_NAME[name].labels)
    level = name.partition(":")[0]
    if level in _RECORD_LABELS and name in _recorded():
        return _RECORD_LABELS[level]
    raise UnknownMetric(f"{name} is in neither the metric catalogue nor the list of dcgm-exporter's names")


def _recorded() -> frozenset[str]:
    """Names of the recording rules."""
    # Here, because their expressions are checked with what is above.
    from rolecall.dashboards.grafana.rules.rule import RecordingRule, groups

    return frozenset(
        rule.name for made in groups().values() for g in made for rule in g.rules if isinstance(rule, RecordingRule)
    )
