"""Series of the suspects compared with their peers, from the telemetry window of the diagnosis. Pure.

    samples of processes -> one value a bucket of time and process -> suspects' lines, and min, median, max of their
    peers

The fault class and the metrics in the evidence select the signals. Rates use the counters of two samples of one
process; a restarted process starts anew. Peers are processes of the same role that are not suspects.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.core.membership import STANDBY_ROLES
from rolecall.core.metrics.catalogue import CATALOGUE
from rolecall.core.metrics.metric import MetricScope, MetricType
from rolecall.core.policy_health import policy_health_of
from rolecall.core.telemetry import PHASES_WITHOUT_DUE_PROGRESS, GpuSample, Phase, ProcessSample
from rolecall.core.text import in_words, plain
from rolecall.detector.base.observation import Observation
from rolecall.detector.panels.metrics import SECONDS_PER_UNIT, panel_metric

METRIC = "metric:"
"""Prefix of the kind of evidence about a metric."""
GPU_PREFIX = "rolecall_gpu_"
NUM_BUCKETS_MAX = 240
BUCKET_SECONDS_MIN = 1.0
"""Rates over shorter times are noise at five samples per second."""
NUM_LINES_MAX = 4
"""Suspects per chart; more cannot be distinguished."""
NUM_SIGNALS_MAX = 5
NUM_COMMITS_MIN = 2
NUM_SAMPLES_MAX = 400_000
"""For a larger window, every k-th observation is used."""

Value = Callable[[ProcessSample | None, ProcessSample], float | None]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSpec:
    """A signal. `value` takes the latest sample of the previous bucket (None without one) and of this bucket."""

    key: str
    title: str
    unit: str
    value: Value
    needs_before: bool = True
    """A rate: it needs two samples."""
    promql: str = ""
    """The PromQL equivalent; `$match` stands for the selector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalLine:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    value: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Times are wall seconds on the watch's clock."""

    key: str
    title: str
    unit: str
    lines: tuple[SignalLine, ...]
    band: tuple[tuple[float, float, float, float], ...] = ()
    """(at, smallest, median, largest) of the peers."""
    num_peers: int = 0
    limit: Limit | None = None
    of_run: bool = False
    """A signal of the whole run, not of a suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    signals: tuple[Signal, ...] = ()
    missing: str = ""
    """Why signals are missing."""
    source: str = ""
    num_not_drawn: int = 0
    """Number of suspects that are not drawn."""
    gpus_per_process: float = 0.0
    """GPUs per process of the suspects, as far as the window shows."""


def _standing(_before: ProcessSample | None, now: ProcessSample) -> float | None:
    """Time without progress, in phases in which progress is due."""
    due = now.phase not in PHASES_WITHOUT_DUE_PROGRESS or (now.phase == Phase.IDLE and now.requests_active > 0)
    return max(0.0, now.at - max(now.progress_at, now.phase_since)) if due else 0.0


def _per_unit(before: ProcessSample | None, now: ProcessSample) -> float | None:
    if before is None or now.work_units <= before.work_units or now.busy_seconds < before.busy_seconds:
        return None
    return (now.busy_seconds - before.busy_seconds) / (now.work_units - before.work_units)


def _rate_of(key: str, title: str, unit: str, source: str, metric: str) -> SignalSpec:
    """The rate of a counter. `source`: its field of `ProcessSample`."""

    def value(before: ProcessSample | None, now: ProcessSample) -> float | None:
        if before is None:
            return None
        grown, seconds = float(getattr(now, source)) - float(getattr(before, source)), now.at - before.at
        return grown / seconds if seconds > 0 and grown >= 0 else None

    return SignalSpec(key=key, title=title, unit=unit, value=value, promql=f"rate({metric}{{$match}}[$window])")


def _gauge_of(key: str, title: str, unit: str, source: str, metric: str) -> SignalSpec:
    """A gauge. `source`: its field of `ProcessSample`."""

    def value(_before: ProcessSample | None, now: ProcessSample) -> float:
        return float(getattr(now, source))

    return SignalSpec(key=key, title=title, unit=unit, value=value, needs_before=False, promql=f"{metric}{{$match}}")


WORK = _rate_of("work", "Units of work", "1/s", "progress", "rolecall_process_progress_total")
STANDING = SignalSpec(
    key="standing",
    title="Time since last progress",
    unit="s",
    value=_standing,
    needs_before=False,
    promql="timestamp(rolecall_process_progress_timestamp_seconds{$match})"
    " - rolecall_process_progress_timestamp_seconds{$match}",
)
PER_UNIT = SignalSpec(
    key="per_unit",
    title="Busy seconds per unit of work",
    unit="s",
    value=_per_unit,
    promql="rate(rolecall_process_busy_seconds_total{$match}[$window])"
    " / (rate(rolecall_process_work_units_total{$match}[$window]) > 0)",
)
TOKENS = _rate_of("tokens", "Tokens", "1/s", "tokens", "rolecall_process_tokens_total")
CPU = _rate_of("cpu", "CPU cores in use", "CPUs", "cpu_seconds", "rolecall_process_cpu_seconds_total")
DELAY = _rate_of(
    "delay", "CPU wait (main thread)", "s/s", "main_run_delay_seconds", "rolecall_process_main_run_delay_seconds_total"
)
MEMORY = _gauge_of("memory", "Resident memory", "bytes", "rss_bytes", "rolecall_process_resident_memory_bytes")
REQUESTS = _gauge_of("requests", "Active requests", "", "requests_active", "rolecall_process_requests_active")
LOSS = _gauge_of("loss", "Loss", "", "loss", "rolecall_train_loss")


def _of_catalogue() -> dict[str, SignalSpec]:
    """Signals of the metric catalogue, by the names that detector panels use."""
    found = {}
    for metric in CATALOGUE:
        name = panel_metric(metric)
        if name and metric.subject is MetricScope.PROCESS and metric.source:
            made = _rate_of if metric.type is MetricType.COUNTER else _gauge_of
            title = in_words(name.removeprefix("rolecall_"))
            found[name] = made(name, title, _unit(name), metric.source, metric.name)
    return found


def _unit(name: str) -> str:
    return next((u for u in ("per_second", "celsius", "watts", "hertz", "bytes", "ratio") if name.endswith(u)), "")


BY_METRIC: Mapping[str, SignalSpec] = {
    **_of_catalogue(),
    "rolecall_process_progress_per_second": WORK,
    "rolecall_process_tokens_per_second": TOKENS,
    "rolecall_process_cpu_ratio": CPU,
    "rolecall_process_resident_memory_bytes": MEMORY,
    "rolecall_process_requests_active": REQUESTS,
    "rolecall_train_loss": LOSS,
    SECONDS_PER_UNIT: PER_UNIT,
}
BY_KEY: Mapping[str, SignalSpec] = {
    s.key: s for s in (WORK, STANDING, PER_UNIT, TOKENS, CPU, DELAY, MEMORY, REQUESTS, LOSS)
}
"""What `FaultSpec.signals` names."""
OF_POLICY = (
    ("reward", "Policy: mean reward per step", ""),
    ("entropy", "Policy: entropy", "nats per token"),
    ("response_length", "Policy: mean response length", "tokens"),
    ("truncated_fraction", "Policy: truncated responses", "share"),
    ("kl_sampler", "Policy: KL to sampler", "nats per token"),
    ("log_ratio_max", "Trainer and engine mismatch for the same weights", "nats"),
)
"""Signals of a collapse: (policy health metric, title, unit)."""


def kinds_for(diagnosis: Diagnosis) -> tuple[SignalSpec, ...]:
    """Signals for a diagnosis; metrics in its evidence first."""
    named = [e.kind.removeprefix(METRIC) for e in diagnosis.evidence if e.kind.startswith(METRIC)]
    found = [BY_METRIC[n] for n in named if n in BY_METRIC] + [_gpu_kind(n) for n in named if n.startswith(GPU_PREFIX)]
    found += [BY_KEY[key] for key in diagnosis.fault_class.spec.signals]
    return tuple({k.key: k for k in found}.values())[:NUM_SIGNALS_MAX]


def _gpu_kind(metric: str) -> SignalSpec:
    """A signal from GPU samples; `value` is not used."""
    title = f"GPU: {plain(metric.removeprefix(GPU_PREFIX), 60).replace('_', ' ')}"
    return SignalSpec(key=metric, title=title, unit=_unit(metric), value=lambda _before, _now: None)


def limit_of(kind: SignalSpec, diagnosis: Diagnosis) -> Limit | None:
    """The threshold, if the evidence contains it."""
    for evidence in diagnosis.evidence:
        if kind is STANDING and "deadline_seconds" in evidence.values:
            return Limit(value=evidence.values["deadline_seconds"], label="deadline")
        if kind is PER_UNIT and "expected_seconds_per_unit" in evidence.values:
            return Limit(value=evidence.values["expected_seconds_per_unit"], label="expected at this load")
    return None


def signal_of(
    kind: SignalSpec, diagnosis: Diagnosis, lines: tuple[SignalLine, ...], peers: Sequence[list[Point]]
) -> Signal:
    """`lines`: of the suspects. `peers`: points of each."""
    return Signal(
        key=kind.key,
        title=kind.title,
        unit=kind.unit,
        lines=lines,
        band=band_of(peers),
        num_peers=sum(map(bool, peers)),
        limit=limit_of(kind, diagnosis),
    )


@dataclass(frozen=True, slots=True)
class _Sampled:
    at: float  # wall seconds of the watch
    sample: ProcessSample


Key = tuple[str, int, int, str]
"""Replica, rank, incarnation, node."""


def from_window(window: Mapping[str, Any], diagnosis: Diagnosis) -> Signals:
    """Signals from a stored window; for a damaged one, the reason why there are none."""
    try:
        stored = window["observations"]
        num = sum(len(b["processes"]) for o in stored for b in o["batches"])
        observations = [Observation.from_dict(o) for o in stored[:: max(1, math.ceil(num / NUM_SAMPLES_MAX))]]
        return _signals(observations, diagnosis)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        return Signals(missing=f"the stored window cannot be read ({type(e).__name__}: {plain(e, 200)})")


def of_commits(events: Iterable[Event]) -> Signal | None:
    """Progress of the run: time between committed steps."""
    at = [e.wall_at for e in events if e.kind is EventKind.STEP_COMMITTED]
    points = tuple((b, b - a) for a, b in pairwise(at))
    if len(points) < NUM_COMMITS_MIN:
        return None
    line = SignalLine(name="run", points=points)
    title = "Run: time between committed steps"
    return Signal(key="commits", title=title, unit="s", lines=(line,), of_run=True)


def of_the_policy(events: Iterable[Event]) -> tuple[Signal, ...]:
    """Policy health over the steps: reward, entropy, lengths, mismatch."""
    found: dict[str, list[Point]] = {}
    for event in events:
        if not isinstance(event.payload, StepCommitted):
            continue
        for name, value in (*policy_health_of(event.payload).items(), ("reward", event.payload.reward)):
            if value is not None and math.isfinite(value):
                found.setdefault(name, []).append((event.wall_at, value))
    return tuple(
        Signal(
            key=name,
            title=title,
            unit=unit,
            lines=(SignalLine(name="policy", points=tuple(found[name])),),
            of_run=True,
        )
        for name, title, unit in OF_POLICY
        if len(found.get(name, [])) >= NUM_COMMITS_MIN
    )


def _signals(observations: Sequence[Observation], diagnosis: Diagnosis) -> Signals:
    by_process = _by_process(observations)
    accused = {key for key in by_process if any(_is(key, s) for s in diagnosis.suspects)}
    roles = {by_process[key][0].sample.role for key in accused} - STANDBY_ROLES.keys()
    peers = {k for k, found in by_process.items() if k not in accused and found[0].sample.role in roles}
    if not accused:
        return Signals(missing=_missing_suspects(diagnosis, bool(by_process)))
    times = [s.at for found in by_process.values() for s in found]
    bucket = max(BUCKET_SECONDS_MIN, (max(times) - min(times)) / NUM_BUCKETS_MAX)
    gpus = _gpu_values(observations)
    drawn = []
    ordered = sorted(accused)
    for kind in kinds_for(diagnosis):
        series = {k: _series(kind, k, by_process[k], gpus, bucket) for k in (*ordered, *peers)}
        lines = tuple(SignalLine(name=_name(k), points=tuple(series[k])) for k in ordered[:NUM_LINES_MAX] if series[k])
        signal = signal_of(kind, diagnosis, lines, [series[k] for k in peers])
        if lines and (any(v for line in lines for _, v in line.points) or any(high for *_, high in signal.band)):
            drawn.append(signal)
    processes = {by_process[k][-1].sample.process for k in accused}
    users = [(p.node, p.pid) for p in processes]
    num_gpus = sum(user in g_users for user in users for g_users in gpus.users.values())
    return Signals(
        signals=tuple(drawn),
        missing="" if drawn else "the stored window has no series of the suspects",
        source=f"telemetry window of the incident: {len(observations)} snapshots over {max(times) - min(times):.0f} s",
        num_not_drawn=max(0, len(ordered) - NUM_LINES_MAX),
        gpus_per_process=num_gpus / max(1, len(users)),
    )


def _missing_suspects(diagnosis: Diagnosis, any_process: bool) -> str:
    who = ", ".join(plain(s.replica or s.node, 60) for s in diagnosis.suspects[:NUM_LINES_MAX])
    if not any_process:
        return "the stored window has no process samples"
    return f"the stored window has no samples of {who}" if who else "the diagnosis has no suspect"


def _by_process(observations: Sequence[Observation]) -> dict[Key, list[_Sampled]]:
    offsets: dict[str, float] = {}
    for observation in observations:
        for batch in observation.batches:
            # Node clocks differ; the smallest difference belongs to the fastest response.
            offsets[batch.node] = min(offsets.get(batch.node, math.inf), observation.wall_at - batch.wall_at)
    found: dict[Key, list[_Sampled]] = {}
    for observation in observations:
        for batch in observation.batches:
            for sample in batch.processes:
                key = (sample.replica, sample.rank, sample.incarnation, str(batch.node))
                found.setdefault(key, []).append(_Sampled(sample.wall_at + offsets[batch.node], sample))
    return found


def _is(key: Key, suspect: Suspect) -> bool:
    """Whether a process matches a suspect; unset fields match everything."""
    replica, rank, incarnation, node = key
    if not suspect.replica:
        return node == suspect.node and (suspect.rank is None or rank == suspect.rank)
    return (
        replica == suspect.replica
        and (suspect.incarnation is None or incarnation == suspect.incarnation)
        and (suspect.rank is None or rank == suspect.rank)
    )


def _name(key: Key) -> str:
    replica, rank, incarnation, node = key
    of_rank = f" rank {rank}" if rank else ""
    number = f"#{incarnation}" if incarnation > 0 else ""
    return plain(f"{replica}{number}{of_rank} ({node})", 100)


def _series(kind: SignalSpec, key: Key, sampled: list[_Sampled], gpus: "_Gpus", bucket: float) -> list[Point]:
    if kind.key.startswith(GPU_PREFIX):
        return gpus.series(kind.key, key[3], sampled[-1].sample.process.pid)
    last: dict[int, _Sampled] = {}
    for reading in sampled:
        last[math.floor(reading.at / bucket)] = reading
    points: list[Point] = []
    before: ProcessSample | None = None
    for _, reading in sorted(last.items()):
        if kind.needs_before and before is not None and reading.sample.at - before.at < bucket / 2:
            continue  # the window ends within a bucket, and a rate over a tenth of a second is noise
        value = kind.value(before, reading.sample)
        before = reading.sample
        if value is not None and math.isfinite(value):
            points.append((reading.at, value))
    return points


def band_of(series: Iterable[list[Point]]) -> tuple[tuple[float, float, float, float], ...]:
    """Minimum, median and maximum of the peers per second; peers without a value are left out."""
    at: dict[int, list[float]] = {}
    for points in series:
        for t, value in points:
            at.setdefault(round(t), []).append(value)
    return tuple((float(t), min(v), median(v), max(v)) for t, v in sorted(at.items()))


@dataclass
class _Gpus:
    """GPU samples by the process that uses them."""

    samples: dict[tuple[str, int], list[tuple[float, GpuSample]]]
    users: dict[tuple[str, int], set[tuple[str, int]]]

    def series(self, metric: str, node: str, pid: int) -> list[Point]:
        """Mean over the GPUs of a process; an outlier GPU has its own finding."""
        name = metric.removeprefix(GPU_PREFIX)
        at: dict[int, list[float]] = {}
        for gpu, found in self.samples.items():
            if (node, pid) not in self.users[gpu]:
                continue
            for t, sample in found:
                value = getattr(sample, name, None)
                if isinstance(value, int | float) and math.isfinite(value):
                    at.setdefault(round(t), []).append(float(value))
        return [(float(t), sum(v) / len(v)) for t, v in sorted(at.items())]


def _gpu_values(observations: Sequence[Observation]) -> _Gpus:
    found = _Gpus({}, {})
    for observation in observations:
        for batch in observation.batches:
            for sample in batch.gpus:
                key = (str(sample.node), sample.gpu)
                found.samples.setdefault(key, []).append((observation.wall_at, sample))
                found.users.setdefault(key, set()).update((str(sample.node), pid) for pid in sample.pids)
    return found
