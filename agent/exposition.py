"""`/metrics`: the catalogue (`core/metrics.py`) filled with the newest samples and the agent's own counters.

Own registry: nothing of the Python process is exposed but what the catalogue names. prometheus_client is imported at
the first scrape, an agent that nobody scrapes does not carry it.
"""

from collections.abc import Callable, Iterable, Iterator

from rolecall import __version__
from rolecall.core.metric import MetricType, MetricValue
from rolecall.core.metrics import BY_NAME, CATALOGUE, host_values, process_values
from rolecall.core.telemetry import HostSample, ProcessSample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def agent_value(name: str, value: float, node: str, *labels: str) -> MetricValue:
    """A value of the agent's own metric `rolecall_<name>`."""
    return MetricValue(BY_NAME[f"rolecall_{name}"], (node, *labels), value)


def build_info(node: str) -> MetricValue:
    return agent_value("agent_build_info", 1.0, node, __version__)


def of_each_rank(processes: Iterable[ProcessSample]) -> Iterable[ProcessSample]:
    """One a rank: a dead process is shown only until the next stands in its place. Else one series would be exposed
    twice, of which Prometheus keeps the first."""
    newest: dict[tuple[str, int], ProcessSample] = {}
    for p in processes:
        known = newest.get((p.replica, p.rank))
        if known is None or (p.incarnation, p.alive) >= (known.incarnation, known.alive):
            newest[p.replica, p.rank] = p
    return newest.values()


def all_values(
    processes: Iterable[ProcessSample], hosts: Iterable[HostSample], own: Iterable[MetricValue]
) -> Iterator[MetricValue]:
    for process in of_each_rank(processes):
        yield from process_values(process)
    for host in hosts:
        yield from host_values(host)
    yield from own


def render(values: Iterable[MetricValue]) -> bytes:
    """The Prometheus text format, metrics in the catalogue's order.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    by_name: dict[str, list[MetricValue]] = {}
    for value in values:
        by_name.setdefault(value.metric.name, []).append(value)

    class Values(Collector):
        def collect(self) -> Iterator[Metric]:
            for metric in CATALOGUE:
                found = by_name.get(metric.name)
                if found is None:
                    continue
                kind: Callable[..., CounterMetricFamily | GaugeMetricFamily] = (
                    CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
                )
                family = kind(metric.name, metric.help, labels=metric.labels)
                for value in found:
                    family.add_metric(list(value.labels), value.value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Values())
    return generate_latest(registry)
