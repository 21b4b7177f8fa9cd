"""`/metrics`: the catalogue (`core/metrics/catalogue.py`) filled with the newest samples, readings and the agent's own counters.

Written here and not by prometheus_client, which takes longer for the two thousand series of an eight-GPU node than a
scrape may (docs/decisions/0002); `promtool check metrics` reads it in a test. Name and labels of a series are put together once:
a node's series are nearly the same at each scrape.
"""

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from rolecall import __version__
from rolecall.core.metrics.catalogue import BY_NAME, CATALOGUE, host_values, process_values
from rolecall.core.metrics.metric import Metric, MetricValue
from rolecall.core.telemetry import HostSample, Phase, ProcessSample
from rolecall.core.uninstrumented import NO_PAGE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER_PHASE = "other"
_PHASES = frozenset({"", NO_PAGE, *Phase})
NUM_SERIES_REMEMBERED = 20_000
"""Ten times what a large node has; then all are forgotten, and put together again."""


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
        # A page says what it likes, a label is of a closed set.
        known = process if process.phase in _PHASES else replace(process, phase=OTHER_PHASE)
        yield from process_values(known)
    for host in hosts:
        yield from host_values(host)
    yield from own


def _escaped(text: str) -> str:
    """A label value, as the text format wants it."""
    # A name that is no UTF-8 (os.listdir) cannot be encoded again, and would take the whole page with it.
    sound = text.encode("utf-8", "replace").decode()
    return sound.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class Exposition:
    """Renders values as text; remembers how series begin. May be called from several threads."""

    def __init__(self) -> None:
        self._heads = {
            m.name: f"# HELP {m.name} {m.help}\n# TYPE {m.name} {m.type.value}\n".encode() for m in CATALOGUE
        }
        self._prefixes: dict[tuple[str, tuple[str, ...]], str] = {}
        self._lock = threading.Lock()

    def render(self, values: Iterable[MetricValue]) -> bytes:
        """The Prometheus text format, metrics in the catalogue's order. Of a series that is there twice, the first."""
        series: dict[str, dict[str, str]] = {}
        with self._lock:
            if len(self._prefixes) > NUM_SERIES_REMEMBERED:
                self._prefixes.clear()
            prefixes = self._prefixes
            for metric, labels, value in values:
                key = (metric.name, labels)
                prefix = prefixes.get(key)
                if prefix is None:
                    prefix = prefixes[key] = _prefix(metric, labels)
                series.setdefault(metric.name, {}).setdefault(prefix, _number(float(value)))
        parts = []
        for metric in CATALOGUE:
            found = series.get(metric.name)
            if found is not None:
                parts.append(self._heads[metric.name])
                parts.append("".join([f"{prefix} {number}\n" for prefix, number in found.items()]).encode())
        return b"".join(parts)


def _prefix(metric: Metric, labels: tuple[str, ...]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(metric.labels, labels, strict=True))
    return f"{metric.name}{{{pairs}}}" if pairs else metric.name
