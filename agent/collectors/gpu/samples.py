"""GPU samples: the newest poll joined with the ranks that use each GPU. Makes no GPU call itself.

The poll is that of our NVML collector or of the dcgm-exporter collector, whichever the node runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.gpu.owners import NO_OWNER, GpuOwners, GpuOwnership
from rolecall.agent.identity import Registration
from rolecall.core.ids import NodeId
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import GpuSample

GPU_PROBES = ("gpu", "dcgm_exporter")
"""Names of the collectors that poll GPUs."""
GPUS_MAX = 64

_FIELDS = {m.name: m.source for m in GPU_METRICS if m.source}
_INFO, _THROTTLED = "rolecall_gpu_info", "rolecall_gpu_throttle_seconds_total"
_TRAFFIC = {
    f"rolecall_gpu_{link}_{way}_bytes_total": f"{link}_{way}_bytes_per_second"
    for link in ("pcie", "nvlink")
    for way in ("transmit", "receive")
}
"""Counters whose rate GPM provides where it is supported."""
_WANTED = frozenset({*_FIELDS, *_TRAFFIC, _INFO, _THROTTLED})
_HEAT, _HEAT_OLD, _POWER = "thermal_throttle_seconds", "thermal", "power_throttle_seconds"
_SUMS = {_HEAT: ("sw_thermal", "hw_thermal"), _POWER: ("sw_power_cap", "hw_power_brake")}
_METRICS = {name: BY_NAME[f"rolecall_gpu_{name}_total"] for name in _SUMS}
_RANK = BY_NAME["rolecall_gpu_rank"]
_DIGITS = {"_ratio": 4, "_seconds": 3, "_watts": 1, "_celsius": 0, "_hertz": 0, "_bytes": 0, "_per_second": -3}
"""Decimals by unit: more is noise, and costs bytes in each response."""
_ROUNDING = {f: next(n for unit, n in _DIGITS.items() if f.endswith(unit)) for f in _FIELDS.values()}


@dataclass(slots=True)
class _GpuSampleState:
    """One GPU in one poll. `compared`: by field of GpuSample; `throttled`: seconds by reason."""

    uuid: str = ""
    compared: dict[str, float] = field(default_factory=dict)
    throttled: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)  # bytes so far, by field of GpuSample


class GpuSamples:
    """Mutable; `take` is called from one thread. `newest()`: the newest poll of the GPUs and its start (node monotonic
    seconds); `ranks()`: the live registered processes."""

    def __init__(
        self,
        node: NodeId,
        newest: Callable[[], tuple[float, CollectorReading]],
        ranks: Callable[[], Sequence[Registration]],
        proc: Path = Path("/proc"),
    ) -> None:
        self._node, self._newest, self._ranks = node, newest, ranks
        self._owners = GpuOwners(proc)
        self._reading = CollectorReading()
        self._traffic: dict[tuple[int, str], tuple[float, float]] = {}  # time and value of the counter's last change
        self.values: tuple[MetricValue, ...] = ()
        """Values for `/metrics` known only here. Replaced as a whole: any thread may read it."""

    def take(self, now: float, wall: float) -> tuple[GpuSample, ...]:
        """Samples of the newest poll; empty if it was taken already. `now`, `wall`: the same moment on both clocks."""
        at, reading = self._newest()
        if reading is self._reading:
            return ()
        self._reading = reading
        ranks = self._ranks() if reading.values else ()
        gpus = _sorted_out(reading)
        listed = {gpu: pids for gpu, pids in (reading.gpu_pids or {}).items() if gpu in gpus}
        owners = self._owners.of_gpus(listed, {n: gpu.uuid for n, gpu in gpus.items()}, ranks) if gpus else {}
        for number, gpu in gpus.items():
            gpu.compared |= _throttle_sums(gpu.throttled) | self._rates(number, gpu, at)
        self.values = tuple(self._own_values(gpus, owners, {rank.process.pid: rank for rank in ranks}))
        return tuple(
            GpuSample(
                node=self._node,
                gpu=number,
                at=at,
                wall_at=wall - (now - at),
                uuid=gpu.uuid,
                pids=owners.get(number, NO_OWNER).pids,
                joined_by=owners.get(number, NO_OWNER).by,
                **{name: round(value, _ROUNDING[name]) for name, value in gpu.compared.items() if isfinite(value)},
            )
            for number, gpu in gpus.items()
            if gpu.compared  # a lost GPU has no numbers
        )

    def _rates(self, number: int, gpu: _GpuSampleState, at: float) -> dict[str, float]:
        """Rates of changed counters without a driver-provided rate. NVML does not read all of them at each poll."""
        rates = {}
        for name, total in gpu.traffic.items():
            then, before = self._traffic.get((number, name), (at, total))
            if total != before or (number, name) not in self._traffic:
                self._traffic[number, name] = (at, total)
            if total > before and at > then and name not in gpu.compared:
                rates[name] = (total - before) / (at - then)
        return rates

    def _own_values(
        self, gpus: Mapping[int, _GpuSampleState], owners: Mapping[int, GpuOwnership], ranks: Mapping[int, Registration]
    ) -> Iterator[MetricValue]:
        for number, gpu in gpus.items():
            for name in _SUMS:
                if name in gpu.compared:
                    yield MetricValue(_METRICS[name], (self._node, str(number)), gpu.compared[name])
            for pid in owners.get(number, NO_OWNER).pids:
                rank = ranks[pid]
                labels = (self._node, str(number), rank.role, rank.replica, str(rank.rank))
                yield MetricValue(_RANK, labels, 1.0)


def _sorted_out(reading: CollectorReading) -> dict[int, _GpuSampleState]:
    """GPUs by index, in order."""
    found: dict[str, _GpuSampleState] = {}
    for metric, labels, value in reading.values:
        name = metric.name
        if name not in _WANTED:
            continue
        gpu = found.get(labels[1])
        if gpu is None:
            if len(found) >= GPUS_MAX:
                continue
            gpu = found[labels[1]] = _GpuSampleState()
        if name in _FIELDS:
            gpu.compared[_FIELDS[name]] = value
        elif name == _THROTTLED:
            gpu.throttled[labels[2]] = value
        elif name == _INFO:
            gpu.uuid = labels[2]
        else:
            gpu.traffic[_TRAFFIC[name]] = value
    return dict(sorted((int(number), gpu) for number, gpu in found.items()))


def _throttle_sums(seconds: Mapping[str, float]) -> dict[str, float]:
    """Throttled seconds by group of reasons; older drivers have a single thermal counter."""
    sums = {}
    for name, reasons in _SUMS.items():
        known = [seconds[reason] for reason in reasons if reason in seconds]
        if not known and name == _HEAT and _HEAT_OLD in seconds:
            known = [seconds[_HEAT_OLD]]
        if known:
            sums[name] = sum(known)
    return sums
