"""GPU samples: the newest poll joined with the ranks that use each GPU. Makes no GPU call itself.

The poll is that of our NVML collector or of the dcgm-exporter collector, whichever the node runs.

NVML lists the PIDs that hold a context on a GPU. A rank is a listed process or its ancestor: the workers of an
inference engine are children of the registered process. Without NVML's list (dcgm-exporter in its place, an
unresponsive GPU, PIDs of another namespace), the process's initial CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES and
LOCAL_RANK decide. Values that a process sets later (as Ray does) are not visible.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from rolecall.agent.collectors.base import CollectorReading, LoggedOnce
from rolecall.agent.collectors.counters import read_at_most, stat_of, variables
from rolecall.agent.identity import Registration
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.metric import MetricValue
from rolecall.core.telemetry import GpuSample

logger = logging.getLogger(__name__)

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


ANCESTORS_MAX = 16
ENVIRON_BYTES_MAX = 256 * 1024
OWNERS_MAX = 64
"""Registered processes per GPU; further ones are left out."""
BY_NVML, BY_ENVIRONMENT = "nvml", "environment"
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
CONTAINER, CUDA = "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_VARIABLES = frozenset({*LOCAL_RANKS, CONTAINER, CUDA})
_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class GpuOwnership:
    """Of one GPU: PIDs of registered processes, and the source of that."""

    pids: tuple[int, ...] = ()
    by: str = ""


NO_OWNER = GpuOwnership()


def gpus_of(environ: Mapping[str, str], uuids: Mapping[int, str]) -> tuple[int, ...]:
    """Indices of the GPUs that a process with this environment uses; () if unknown. `uuids`: of the node's GPUs, by
    index. Assumes that CUDA and NVML number GPUs alike, which holds on nodes with one GPU model."""
    visible = sorted(uuids)
    if environ.get(CONTAINER, "") not in ("", "all", "none", "void"):
        visible = _listed(environ[CONTAINER], visible, uuids)
    if CUDA in environ:
        visible = _listed(environ[CUDA], visible, uuids)
    local_rank = next((environ[name] for name in LOCAL_RANKS if _NUMBER.fullmatch(environ.get(name, ""))), "")
    if not local_rank:
        return tuple(visible) if CUDA in environ or len(visible) < len(uuids) else ()
    return tuple(visible) if len(visible) == 1 else tuple(visible[int(local_rank) :][:1])


def _listed(text: str, seen: Sequence[int], uuids: Mapping[int, str]) -> list[int]:
    """CUDA stops at the first invalid entry; an index is relative to the visible GPUs `seen`."""
    found: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            named = [seen[int(entry)]] if int(entry) < len(seen) else []
        else:
            named = [gpu for gpu in seen if entry.startswith("GPU-") and uuids[gpu].startswith(entry)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


class GpuOwners:
    """Mutable; used by one thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._lines: dict[int, tuple[int, ...]] = {}
        """Per listed PID: itself and its ancestors, nearest first; () if it is not in /proc."""
        self._from_environ: dict[ProcessId, tuple[int, ...]] = {}
        self._logged = LoggedOnce()

    def of_gpus(
        self, listed: Mapping[int, Sequence[int]], uuids: Mapping[int, str], ranks: Sequence[Registration]
    ) -> dict[int, GpuOwnership]:
        """By GPU index. `listed`: PIDs by GPU, from NVML; `uuids`: of all GPUs."""
        pids = {pid for found in listed.values() for pid in found}
        lines = self._lines
        self._lines = {pid: lines[pid] if pid in lines else tuple(self._line(pid)) for pid in pids}
        if any(self._lines.values()):
            live = {rank.process.pid for rank in ranks}
            # The registered process that a listed one is or descends from; 0: none.
            owner = {pid: next((above for above in line if above in live), 0) for pid, line in self._lines.items()}
            return {gpu: _owners((owner[pid] for pid in found), BY_NVML) for gpu, found in listed.items()}
        if pids:
            self._log_once(f"none of the processes that NVML lists is in {self._proc}: another PID namespace")
        return self._by_environment(uuids, ranks)

    def _line(self, pid: int) -> Iterator[int]:
        """The process and its ancestors, by proc(5), field 4 of `stat`."""
        for _ in range(ANCESTORS_MAX):
            stat = stat_of(self._proc, pid)
            if stat is None:
                return
            yield pid
            pid = stat.parent
            if pid <= 1:
                return

    def _by_environment(self, uuids: Mapping[int, str], ranks: Sequence[Registration]) -> dict[int, GpuOwnership]:
        known = self._from_environ
        self._from_environ = {
            rank.process: known[rank.process] if rank.process in known else self._environ_says(rank, uuids)
            for rank in ranks
        }
        users: dict[int, list[int]] = {}
        for process, gpus in self._from_environ.items():
            for gpu in gpus:
                users.setdefault(gpu, []).append(process.pid)
        return {gpu: _owners(pids, BY_ENVIRONMENT) for gpu, pids in users.items()}

    def _environ_says(self, rank: Registration, uuids: Mapping[int, str]) -> tuple[int, ...]:
        raw = read_at_most(f"{self._proc}/{rank.process.pid}/environ", ENVIRON_BYTES_MAX)
        environ = variables(raw, _VARIABLES)
        found = gpus_of(environ, uuids)
        if not found and CUDA not in environ:
            self._log_once(
                f"GPU assignment unknown for {rank.replica} rank {rank.rank}, and possibly other ranks: NVML lists no "
                f"process of this node, and the environment has neither {CUDA} nor {LOCAL_RANKS[0]}"
            )
        return found

    def _log_once(self, text: str) -> None:
        """Logs the first text of each kind, whichever process it concerns."""
        if self._logged.is_new(text[:20]):
            logger.warning("GPUs and ranks: %s", text)


def _owners(pids: Iterable[int], by: str) -> GpuOwnership:
    found = tuple(sorted({pid for pid in pids if pid}))[:OWNERS_MAX]
    return GpuOwnership(found, by) if found else NO_OWNER


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
        by_pid, values = {rank.process.pid: rank for rank in ranks}, list[MetricValue]()
        for number, gpu in gpus.items():
            labels = (self._node, str(number))
            gpu.compared |= _throttle_sums(gpu.throttled) | self._rates(number, gpu, at)
            values += [MetricValue(_METRICS[n], labels, gpu.compared[n]) for n in _SUMS if n in gpu.compared]
            for rank in (by_pid[pid] for pid in owners.get(number, NO_OWNER).pids):
                values.append(MetricValue(_RANK, (*labels, rank.role, rank.replica, str(rank.rank)), 1.0))
        self.values = tuple(values)
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
