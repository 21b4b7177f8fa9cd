"""`/metrics`: the newest samples, collector readings and the agent's own counters as families of prometheus_client.

The catalogue (`core/metrics/catalogue.py`) gives each metric its name, type, HELP and labels.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolecall import __version__
from rolecall.core.metrics.catalogue import BY_NAME, CATALOGUE, host_values, process_values
from rolecall.core.metrics.metric import MetricType, MetricValue
from rolecall.core.telemetry import NO_PAGE, HostSample, Phase, ProcessSample

OTHER_PHASE = "other"
_PHASES = frozenset({"", NO_PAGE, *Phase})
_FAMILIES = {MetricType.GAUGE: GaugeMetricFamily, MetricType.COUNTER: CounterMetricFamily}


def agent_value(name: str, value: float, node: str, *labels: str) -> MetricValue:
    """A value of the metric `rolecall_<name>`."""
    return MetricValue(BY_NAME[f"rolecall_{name}"], (node, *labels), value)


def build_info(node: str) -> MetricValue:
    return agent_value("agent_build_info", 1.0, node, __version__)


def of_each_rank(processes: Iterable[ProcessSample]) -> Iterable[ProcessSample]:
    """The newest process of each rank: a series must not appear twice when a replacement has started."""
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
        # A state page may hold any phase; the label has a closed set of values.
        known = process if process.phase in _PHASES else replace(process, phase=OTHER_PHASE)
        yield from process_values(known)
    for host in hosts:
        yield from host_values(host)
    yield from own


class SnapshotCollector(Collector):
    """Metric families of one snapshot, in the catalogue's order. Of a series that appears twice, the first counts."""

    def __init__(self, values: Iterable[MetricValue]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        series: dict[str, dict[tuple[str, ...], float]] = {}
        for metric, labels, value in self._values:
            series.setdefault(metric.name, {}).setdefault(labels, value)
        for metric in CATALOGUE:
            if found := series.get(metric.name):
                family = _FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
                for labels, value in found.items():
                    family.add_metric([_utf8(label) for label in labels], value)
                yield family


def _utf8(label: str) -> str:
    """Names from os.listdir may hold surrogates, which cannot be encoded."""
    return label if label.isascii() else label.encode("utf-8", "replace").decode()


def render(values: Iterable[MetricValue], accept: str = "") -> tuple[bytes, str]:
    """Page and content type in the format that the header `Accept` asks for; by default Prometheus text 0.0.4."""
    encode, content_type = choose_encoder(accept)
    return encode(SnapshotCollector(values)), content_type
