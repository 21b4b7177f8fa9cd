"""The metric catalogue: one table from which exposition, detection and `docs/reference/metrics.md` are made.

Names are `rolecall_<thing>_<unit>[_total]` in base units (seconds, bytes, ratio 0..1); `_total` stands on counters and
only there; a metric with unit "" counts things or is 0/1. Labels are bounded: node, role, replica, rank, and closed
sets (phase, state, probe, kind); never message text, never a PID. A process counter starts again at 0 with each
incarnation, as Prometheus expects of counters.

`source` names the field of `ProcessSample`, `HostSample` or `GpuSample`; what collectors find beyond those, and the
agent's own metrics, have none. `process_values` and `host_values` are the only translation from sample to metric.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.kernel import KERNEL_METRICS
from rolecall.core.metrics.metric import NODE, RANK, Metric, MetricScope, MetricType, MetricValue
from rolecall.core.metrics.nccl import NCCL_METRICS
from rolecall.core.metrics.network import NETWORK_METRICS
from rolecall.core.metrics.storage import STORAGE_METRICS
from rolecall.core.metrics.vllm import VLLM_METRICS
from rolecall.core.metrics.watch import RUN_METRICS, WATCH_METRICS
from rolecall.core.policy_health import SIGNS
from rolecall.core.telemetry import HEALTH_SIGNS, GpuSample, HostSample, ProcessSample
from rolecall.core.uninstrumented import is_instrumented


def _process(
    name: str,
    type_: MetricType,
    unit: str,
    source: str,
    help_: str,
    *,
    detect: bool = True,
    labels: tuple[str, ...] = RANK,
    node_clock: bool = False,
) -> Metric:
    return Metric(
        name=f"rolecall_{name}",
        type=type_,
        unit=unit,
        help=help_,
        labels=labels,
        subject=MetricScope.PROCESS,
        detect=detect,
        source=source,
        node_clock=node_clock,
    )


def _host(name: str, type_: MetricType, unit: str, source: str, help_: str) -> Metric:
    full = f"rolecall_host_{name}"
    return Metric(
        name=full, type=type_, unit=unit, help=help_, labels=NODE, subject=MetricScope.HOST, detect=True, source=source
    )


def _agent(name: str, type_: MetricType, unit: str, help_: str, labels: tuple[str, ...] = NODE) -> Metric:
    full = f"rolecall_{name}"
    return Metric(name=full, type=type_, unit=unit, help=help_, labels=labels, subject=MetricScope.AGENT)


_G, _C = MetricType.GAUGE, MetricType.COUNTER

_FROM_PAGE = (
    _process("process_up", _G, "", "alive", "1 while the registered process exists, 0 once it has gone"),
    _process("process_page_ok", _G, "", "page_ok", "0: the state page is torn, page values are the last good ones"),
    _process("process_incarnation", _G, "", "incarnation", "Number of times that this replica has been started"),
    _process("process_epoch", _G, "", "epoch", "Membership epoch that the process works in"),
    _process("process_phase", _G, "", "phase", "1 for the phase that the process is in", labels=(*RANK, "phase")),
    _process(
        "process_phase_start_timestamp_seconds",
        _G,
        "seconds",
        "phase_since",
        "When the process entered its phase, seconds since 1970",
        node_clock=True,
    ),
    _process("process_phase_entries_total", _C, "", "phase_entries", "Phase entries"),
    _process("process_step", _G, "", "step", "Optimizer step that the process works on, -1 before the first"),
    _process("process_policy_version", _G, "", "policy_version", "Policy version that the process holds, -1: none"),
    _process(
        "process_progress_total",
        _C,
        "",
        "progress",
        "Units of work finished: microbatches, engine steps, scored samples or loop turns, by role",
    ),
    _process(
        "process_progress_timestamp_seconds",
        _G,
        "seconds",
        "progress_at",
        "When work was last finished, seconds since 1970",
        node_clock=True,
    ),
    _process("process_beats_total", _C, "", "beats", "Ticks of a Python side thread: grows while bytecode can run"),
    _process("collectives_entered_total", _C, "", "collectives_entered", "Collectives that the process has entered"),
    _process("collectives_done_total", _C, "", "collectives_done", "Collectives that the process has left again"),
    _process("process_busy_seconds_total", _C, "seconds", "busy_seconds", "Wall time spent inside units of work"),
    _process("process_work_units_total", _C, "", "work_units", "Units of work counted in the busy seconds"),
    _process("process_tokens_total", _C, "", "tokens", "Tokens generated (rollout) or trained on (trainer)"),
    _process("process_requests_active", _G, "", "requests_active", "Requests that the engine holds"),
    _process("train_loss", _G, "", "loss", "Loss of the newest optimizer step; absent before the first"),
    _process("train_grad_norm", _G, "", "grad_norm", "Gradient norm of the newest optimizer step, before clipping"),
    _process("train_reward", _G, "", "reward", "Mean reward of the newest optimizer step"),
    _process(
        "train_unfinite_total", _C, "", "unfinite", "Losses, gradient norms and rewards that were NaN or infinite"
    ),
    _process("train_jumps_total", _C, "", "jumps", "Losses, gradient norms and rewards outside their own recent range"),
    _process("train_healths_total", _C, "", "healths", "Steps whose policy health was reported"),
    *(
        _process(f"train_{sign.metric}", _G, sign.unit, sign.name, sign.help)
        for sign in SIGNS
        if sign.name in HEALTH_SIGNS
    ),
)

_FROM_PROC = (
    _process(
        "process_state",
        _G,
        "",
        "proc_state",
        "1 for the kernel's state of the process (R S D T Z X, ? when unknown)",
        labels=(*RANK, "state"),
    ),
    _process("process_cpu_seconds_total", _C, "seconds", "cpu_seconds", "User and system time of all threads"),
    _process(
        "process_run_delay_seconds_total",
        _C,
        "seconds",
        "run_delay_seconds",
        "Time that threads were runnable and waited for a CPU (schedstat), summed over threads",
    ),
    _process(
        "process_main_run_delay_seconds_total",
        _C,
        "seconds",
        "main_run_delay_seconds",
        "Run delay of the working thread alone; separates a starved process from a slow one",
    ),
    _process(
        "process_throttled_seconds_total",
        _C,
        "seconds",
        "throttled_seconds",
        "Time that the process's cgroup was stopped by its CPU quota",
    ),
    _process("process_resident_memory_bytes", _G, "bytes", "rss_bytes", "Resident memory"),
    _process("process_threads", _G, "", "num_threads", "Threads of the process", detect=False),
    _process("process_major_faults_total", _C, "", "major_faults", "Page faults that had to read from disk"),
)

_FROM_HOST = (
    _host("cpus", _G, "", "cpu_count", "CPUs that the node may use"),
    _host("cpu_busy_seconds_total", _C, "seconds", "cpu_busy_seconds", "CPU time not idle, summed over all CPUs"),
    _host("load1", _G, "", "load_1m", "Load average over one minute"),
    _host("memory_total_bytes", _G, "bytes", "memory_total_bytes", "Memory of the node"),
    _host("memory_available_bytes", _G, "bytes", "memory_available_bytes", "Memory available without swapping"),
    _host(
        "cpu_stall_seconds_total",
        _C,
        "seconds",
        "cpu_some_stall_seconds",
        "Time in which some task waited for a CPU (PSI); 0 where the kernel has none",
    ),
    _host(
        "memory_stall_seconds_total",
        _C,
        "seconds",
        "memory_some_stall_seconds",
        "Time in which some task waited for memory (PSI); 0 where the kernel has none",
    ),
    _host("oom_kills_total", _C, "", "oom_kills", "Processes killed by the kernel's OOM killer"),
)

_OF_AGENT = (
    _agent("agent_build_info", _G, "", "1; joins the agent's version", (*NODE, "version")),
    _agent("agent_start_timestamp_seconds", _G, "seconds", "When this agent process started, seconds since 1970"),
    _agent("agent_cpu_seconds_total", _C, "seconds", "CPU time of the agent itself"),
    _agent("agent_resident_memory_bytes", _G, "bytes", "Resident memory of the agent itself"),
    _agent("agent_processes", _G, "", "Registered processes that the agent watches"),
    _agent(
        "process_exits_total",
        _C,
        "",
        "Processes that ended, by what ended them: finished, killed, crashed, oom, exception, exit, unknown",
        (*RANK, "reason"),
    ),
    _agent("agent_rounds_total", _C, "", "Sampling rounds finished"),
    _agent("agent_round_seconds", _G, "seconds", "Duration of the newest sampling round"),
    _agent("agent_samples_total", _C, "", "Process and host samples taken"),
    _agent("agent_samples_lost_total", _C, "", "Samples that left the ring before any reader asked for them"),
    _agent("agent_events_total", _C, "", "Events recorded, by kind", (*NODE, "kind")),
    _agent("agent_events_lost_total", _C, "", "Events that could not be kept on disk"),
    _agent("agent_registrations_refused_total", _C, "", "Registrations without a valid secret or peer credentials"),
    _agent("agent_messages_malformed_total", _C, "", "Malformed messages of processes, dropped"),
    _agent("agent_pages_torn_total", _C, "", "Reads of a state page that found it torn or damaged"),
    _agent("probe_up", _G, "", "1 if the probe could be read in the newest round, 0 if not", (*NODE, "probe")),
    _agent(
        "probe_seconds", _G, "seconds", "Duration of the newest poll, including its wait for data", (*NODE, "probe")
    ),
    _agent("probe_cpu_seconds_total", _C, "seconds", "CPU time of the thread of a collector", (*NODE, "probe")),
    _agent("probe_facts_dropped_total", _C, "", "Facts beyond the limit of one poll of a collector", (*NODE, "probe")),
    _agent("probe_lines_malformed_total", _C, "", "Malformed lines of another exporter", (*NODE, "probe")),
    _agent("probe_series_dropped_total", _C, "", "Series of another exporter beyond the limit", (*NODE, "probe")),
)

CATALOGUE: tuple[Metric, ...] = (
    *_FROM_PAGE,
    *_FROM_PROC,
    *_FROM_HOST,
    *GPU_METRICS,
    *NETWORK_METRICS,
    *KERNEL_METRICS,
    *STORAGE_METRICS,
    *NCCL_METRICS,
    *VLLM_METRICS,
    *_OF_AGENT,
    *WATCH_METRICS,
    *RUN_METRICS,
)
BY_NAME: dict[str, Metric] = {m.name: m for m in CATALOGUE}

PROCESS_METRICS = tuple(m for m in CATALOGUE if m.subject is MetricScope.PROCESS)
UNPAGED_METRICS = tuple(m for m in PROCESS_METRICS if m in _FROM_PROC or m.source == "alive")
"""What is known of a process without a state page."""
_HOST = tuple(m for m in CATALOGUE if m.subject is MetricScope.HOST)


def process_values(sample: ProcessSample) -> Iterator[MetricValue]:
    """Every process metric of one sample. NaN (not yet reported), times never set and what a process without a state
    page cannot say give no value."""
    rank = (sample.process.node, sample.role, sample.replica, str(sample.rank))
    for metric in PROCESS_METRICS if is_instrumented(sample) else UNPAGED_METRICS:
        raw = getattr(sample, metric.source)
        if isinstance(raw, str):  # a state of a closed set: its name is a label, the value is 1
            yield MetricValue(metric, (*rank, str(raw)), 1.0)
            continue
        value = float(raw)
        if metric.node_clock:
            if value <= 0.0:
                continue
            value += sample.wall_at - sample.at
        if not math.isnan(value):
            yield MetricValue(metric, rank, value)


def host_values(sample: HostSample) -> Iterator[MetricValue]:
    """Every host metric of one sample."""
    for metric in _HOST:
        yield MetricValue(metric, (sample.node,), float(getattr(sample, metric.source)))


_TITLES = {
    MetricScope.PROCESS: "Processes",
    MetricScope.HOST: "Nodes",
    MetricScope.GPU: "GPUs",
    MetricScope.NETWORK: "Network",
    MetricScope.KERNEL: "Kernel log",
    MetricScope.STORAGE: "Disks and file systems",
    MetricScope.NCCL: "NCCL",
    MetricScope.VLLM: "vLLM",
    MetricScope.AGENT: "The agent itself",
    MetricScope.WATCH: "`rolecall watch`: itself and its incidents",
    MetricScope.RUN: "The run",
}

_HEAD = """# Metrics

Generated from `rolecall/core/metrics/` by `python -m tools.reference_pages`.

Each node's agent serves these metrics at `/metrics` in the Prometheus text format. `rolecall watch` serves the last two
tables with `--metrics`; for a run that rolecall started, `RUN/watch.json` holds the address. Units are base units. Names of
counters end in `_total`, and a counter of a process restarts at 0 with each incarnation of its replica. Labels are bounded:
`node`, `role`, `replica` and `rank` by the topology, `phase`, `state`, `probe` and `kind` by closed sets. Metrics marked
*detect* are also in `/v1/samples`, which the detector reads.

A watch derives its metrics on incidents and on the run from the journal, so every watch of a run reports the same values and
a restarted watch continues where its predecessor stopped. With several watches take the maximum, never the sum. ETTR seconds
are gauges, because a fault is found after its onset:
`delta(rolecall_run_effective_seconds[1h]) / delta(rolecall_run_training_seconds[1h])` is the ETTR of one hour. A job that
rolecall did not start has no run metrics except `rolecall_run_info`.

Policy-health metrics (entropy, clipped fractions, importance ratios, KL, lengths) describe the newest step: trainers export
them as `rolecall_train_*`, the journal's values appear as `rolecall_run_*`. They are means (`_max`: maxima) over all tokens or
answers of the step, on all replicas that trained it. A quantity that a step did not have is absent, never 0.
"""


def markdown(catalogue: Sequence[Metric] = CATALOGUE) -> str:
    """`docs/reference/metrics.md`."""
    parts = [_HEAD]
    for subject, title in _TITLES.items():
        rows = [m for m in catalogue if m.subject is subject]
        if not rows:
            continue
        parts.append(
            f"\n## {title}\n\n| metric | meaning | type | unit | labels | detect |\n|---|---|---|---|---|---|\n"
        )
        for m in rows:
            cells = (f"`{m.name}`", m.help, m.type, m.unit or "-", ", ".join(m.labels), "yes" if m.detect else "")
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


def uncovered_fields() -> set[str]:
    """Fields of the samples that no metric shows, identity and time stamps left out. Empty, or the table has a gap."""
    identity = {"process", "role", "replica", "rank", "at", "wall_at", "node", "gpu", "uuid", "pids", "joined_by"}
    shown = {m.source for m in CATALOGUE}
    return {f.name for c in (ProcessSample, HostSample, GpuSample) for f in fields(c)} - identity - shown


if __name__ == "__main__":
    print(markdown(), end="")
