"""GPU metrics per rank for comparison with peers, and GPU evidence for findings.

Each GPU is read once per tick, counters as rates, and its values are assigned to every process that the agent mapped to
it. A rank with several GPUs gets the lowest clock, the highest temperatures and throttle ratios (the slowest GPU delays
the rest), and the mean of all other metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, median

from rolecall.core.diagnosis import Evidence
from rolecall.core.ids import NodeId
from rolecall.core.metrics.gpu import GPU_METRICS as GPU_TABLE
from rolecall.core.metrics.metric import MetricType
from rolecall.core.telemetry import GpuSample
from rolecall.detector.base.findings import OF_GPU
from rolecall.detector.panels.metrics import panel_metric

RATE_SECONDS = 15.0
"""Maximum interval of a rate: three scrapes of dcgm-exporter, fifteen of rolecall's own collector."""
SILENT_SECONDS = 30.0
GPUS_MAX = 32_768
"""`agents.AGENTS_MAX` nodes with eight GPUs each."""
NUM_SHOWN = 6
"""Maximum number of values per GPU in evidence text."""

Who = tuple[NodeId, int]
"""Node and PID."""

OF_TIME = " of the time"
_LEAST, _MOST = frozenset({"rolecall_gpu_sm_clock_hertz"}), ("_celsius", "_throttle_ratio")
_WORDS: Mapping[str, tuple[str, float, str]] = {
    "sm_clock_hertz": ("SM clock", 1e-6, "MHz"),
    "thermal_throttle_ratio": ("held down by heat", 100.0, f"%{OF_TIME}"),
    "power_throttle_ratio": ("held down by the power limit", 100.0, f"%{OF_TIME}"),
    "sm_active_ratio": ("SM activity", 100.0, "%"),
    "tensor_active_ratio": ("tensor core activity", 100.0, "%"),
    "dram_active_ratio": ("memory bandwidth", 100.0, "%"),
    "utilization_ratio": ("utilisation", 100.0, "%"),
    "power_watts": ("power", 1.0, "W"),
    "temperature_celsius": ("temperature", 1.0, "C"),
    "memory_temperature_celsius": ("memory temperature", 1.0, "C"),
    "memory_used_bytes": ("memory used", 1 / 2**30, "GiB"),
    "pcie_transmit_bytes_per_second": ("sent over PCIe", 1e-6, "MB/s"),
    "pcie_receive_bytes_per_second": ("received over PCIe", 1e-6, "MB/s"),
    "nvlink_transmit_bytes_per_second": ("sent over NVLink", 1e-6, "MB/s"),
    "nvlink_receive_bytes_per_second": ("received over NVLink", 1e-6, "MB/s"),
}
"""Panel metric name without `rolecall_gpu_` -> display name, scale and unit, in display order."""
PREFIX = "rolecall_gpu_"
_COMPARED = [m for m in GPU_TABLE if panel_metric(m)]
_GAUGES = [panel_metric(m) for m in _COMPARED if m.type is not MetricType.COUNTER]
_RATES = [panel_metric(m) for m in _COMPARED if m.type is MetricType.COUNTER]
GPU_METRICS = frozenset({*_GAUGES, *_RATES})
"""Panel metric names."""
_gauges = attrgetter(*(m.source for m in _COMPARED if m.type is not MetricType.COUNTER))
_counters = attrgetter(*(m.source for m in _COMPARED if m.type is MetricType.COUNTER))


@dataclass(slots=True)
class _GpuReading:
    sample: GpuSample
    heard_wall: float
    fresh: bool = True  # new since the last tick
    before: GpuSample | None = None  # at the last tick with a sample
    values: dict[str, float] = field(default_factory=dict)  # of the newest tick with a sample

    def read(self) -> bool:
        """Updates `values`; False without a new sample since the last tick."""
        if not self.fresh:
            return False
        self.fresh = False
        sample, before = self.sample, self.before
        self.values = {name: v for name, v in zip(_GAUGES, _gauges(sample), strict=True) if v == v}  # noqa: PLR0124 NaN
        if before is not None and before.uuid == sample.uuid and 0 < sample.at - before.at <= RATE_SECONDS:
            for name, now, then in zip(_RATES, _counters(sample), _counters(before), strict=True):
                if now >= then:
                    self.values[name] = (now - then) / (sample.at - before.at)
        self.before = sample
        return True


class GpuReadings:
    """Mutable: GPU samples received between two ticks."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[NodeId, int], _GpuReading] = {}
        self._users: dict[Who, list[_GpuReading]] = {}  # at the newest tick

    def take(self, sample: GpuSample, now: float) -> None:
        """`now`: wall seconds, as in `tick`."""
        known = self._gpus.get((sample.node, sample.gpu))
        if known is None:
            if len(self._gpus) < GPUS_MAX:
                self._gpus[sample.node, sample.gpu] = _GpuReading(sample, now)
        elif sample.at > known.sample.at or sample.uuid != known.sample.uuid:
            known.sample, known.heard_wall, known.fresh = sample, now, True

    def tick(self, now: float) -> dict[Who, dict[str, float]]:
        """Values by panel metric name, for processes whose GPUs were sampled since the last tick."""
        self._gpus = {k: g for k, g in self._gpus.items() if now - g.heard_wall <= SILENT_SECONDS}
        self._users = {}
        by_process: dict[Who, list[dict[str, float]]] = {}
        for (node, _), gpu in sorted(self._gpus.items(), key=lambda item: item[0]):
            is_read = gpu.read()
            for pid in gpu.sample.pids:
                self._users.setdefault((node, pid), []).append(gpu)
                if is_read:
                    by_process.setdefault((node, pid), []).append(gpu.values)
        return {who: _together(values) for who, values in by_process.items()}

    def evidence(self, who: Who, peers: Iterable[Who], metrics: Sequence[str] = ()) -> tuple[Evidence, ...]:
        """Evidence for each GPU of a process: its identity, the ranks sharing it, and its values compared with `peers`.
        `metrics` are listed first."""
        others: dict[str, list[float]] = {}
        for peer in peers:
            if peer != who:
                for metric, value in _together([g.values for g in self._users.get(peer, ())]).items():
                    others.setdefault(metric, []).append(value)
        usual = {metric: median(values) for metric, values in others.items()}
        return tuple(_evidence(gpu, usual, metrics) for gpu in self._users.get(who, ()))


def _together(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combined values of a rank's GPUs. Callers must not modify the result."""
    if len(values) == 1:
        return values[0]
    found: dict[str, list[float]] = {}
    for one in values:
        for metric, value in one.items():
            found.setdefault(metric, []).append(value)
    return {
        metric: min(many) if metric in _LEAST else max(many) if metric.endswith(_MOST) else fmean(many)
        for metric, many in found.items()
    }


def _evidence(gpu: _GpuReading, usual: Mapping[str, float], metrics: Sequence[str]) -> Evidence:
    sample = gpu.sample
    named = [m.removeprefix(PREFIX) for m in metrics if m in gpu.values]
    order = [*named, *(w for w in _WORDS if w not in named)]
    words: list[str] = []
    numbers: dict[str, float] = {"gpu": float(sample.gpu)}
    for short in order:
        metric = PREFIX + short
        if metric not in gpu.values or len(words) >= max(NUM_SHOWN, len(named)):
            continue
        value, peers = gpu.values[metric], usual.get(metric)
        if value == peers and short not in named:
            continue  # not informative, e.g. no GPU is throttled
        numbers[metric] = value
        text = f"{_WORDS[short][0]} {_said(short, value)}"
        if peers is not None:
            numbers[f"{metric}_peers"] = peers
            text += f" (peers {_said(short, peers).removesuffix(OF_TIME)})"
        words.append(text)
    shared = f", shared by {len(sample.pids)} ranks" if len(sample.pids) > 1 else ""
    guessed = ", by the environment of the process" if sample.joined_by == "environment" else ""
    name = f"GPU {sample.gpu} of {sample.node} ({sample.uuid or 'uuid not known'}{shared}{guessed})"
    return Evidence(kind=OF_GPU, text=f"{name}: {', '.join(words)}", values=numbers)


def _said(short: str, value: float) -> str:
    """The scaled value with its unit."""
    _, scale, unit = _WORDS[short]
    return f"{value * scale:.0f}{'' if unit.startswith('%') else ' '}{unit}"
