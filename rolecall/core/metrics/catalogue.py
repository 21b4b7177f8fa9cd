"""The metric catalogue: the table of which exposition, detection and `docs/reference/metrics.md`
(tools/reference_pages.py) are derived.

Names are `rolecall_<thing>_<unit>[_total]` in base units (seconds, bytes, ratio 0..1); counters, and only they, end in
`_total`; a metric with unit "" counts things or is 0/1. Labels are bounded: node, role, replica, rank, and closed sets
(phase, state, probe, kind); never message text, never a PID. A process counter starts again at 0 with each incarnation,
as Prometheus expects of counters.

`source` names the field of `ProcessSample`, `HostSample` or `GpuSample`; other metrics of collectors and the agent's
own have none. `process_values` and `host_values` are the only translation from sample to metric.
"""

import math
from collections.abc import Iterator

from rolecall.core.metrics.collectors import ENGINE_METRICS, NETWORK_METRICS, STORAGE_METRICS
from rolecall.core.metrics.gpu import GPU_METRICS
from rolecall.core.metrics.kernel import KERNEL_METRICS
from rolecall.core.metrics.metric import NODE, RANK, Metric, MetricScope, MetricValue, row, rows
from rolecall.core.metrics.nccl import NCCL_METRICS
from rolecall.core.metrics.watch import RUN_METRICS, WATCH_METRICS
from rolecall.core.policy_health import SIGNS
from rolecall.core.telemetry import HEALTH_SIGNS, HostSample, ProcessSample, is_instrumented


def _process(name: str, source: str, help_: str, *, detect: bool = True) -> Metric:
    node_clock = name.endswith("_timestamp_seconds")
    return row(MetricScope.PROCESS, RANK, name, help_, source=source, detect=detect, node_clock=node_clock)


def _host(name: str, source: str, help_: str) -> Metric:
    return row(MetricScope.HOST, NODE, f"host_{name}", help_, source=source, detect=True)


_FROM_PAGE = (
    _process("process_up", "alive", "1 while the registered process exists, 0 once it has gone"),
    _process("process_page_ok", "page_ok", "0: the state page is torn, page values are the last good ones"),
    _process("process_incarnation", "incarnation", "Number of times that this replica has been started"),
    _process("process_epoch", "epoch", "Membership epoch that the process works in"),
    _process("process_phase{phase}", "phase", "1 for the phase that the process is in"),
    _process(
        "process_phase_start_timestamp_seconds", "phase_since", "When the process entered its phase, seconds since 1970"
    ),
    _process("process_phase_entries_total", "phase_entries", "Phase entries"),
    _process("process_step", "step", "Optimizer step that the process works on, -1 before the first"),
    _process("process_policy_version", "policy_version", "Policy version that the process holds, -1: none"),
    _process(
        "process_progress_total",
        "progress",
        "Units of work finished: microbatches, engine steps, scored samples or loop turns, by role",
    ),
    _process("process_progress_timestamp_seconds", "progress_at", "When work was last finished, seconds since 1970"),
    _process("process_beats_total", "beats", "Ticks of a Python side thread: grows while bytecode can run"),
    _process("collectives_entered_total", "collectives_entered", "Collectives that the process has entered"),
    _process("collectives_done_total", "collectives_done", "Collectives that the process has left again"),
    _process(
        "process_collectives_issued",
        "collectives_issued",
        "Collectives of the job's default process group, by torch's count; -1: unknown",
        detect=False,
    ),
    _process(
        "process_collectives_at_step",
        "collectives_at_step",
        "The same at the end of the last step; -1: unknown",
        detect=False,
    ),
    _process(
        "process_collectives_at_begin",
        "collectives_at_begin",
        "The same at the beginning of the step that is in progress; -1: none is",
        detect=False,
    ),
    _process("exchanges_total", "exchanges", "Waits for the other ranks of the replica that the process has begun"),
    _process("process_busy_seconds_total", "busy_seconds", "Wall time spent inside units of work, exchanges excluded"),
    _process(
        "exchange_seconds_total",
        "exchange_seconds",
        "Wall time inside units of work in which the process waited for the other ranks of its replica",
        detect=False,
    ),
    _process(
        "loading_seconds_total",
        "loading_seconds",
        "Wall time inside the busy seconds in which a job that names no phases loaded data",
        detect=False,
    ),
    _process("process_work_units_total", "work_units", "Units of work counted in the busy seconds"),
    _process("process_tokens_total", "tokens", "Tokens generated (rollout) or trained on (trainer)"),
    _process("process_requests_active", "requests_active", "Requests that the engine holds"),
    _process("process_tokens_held", "tokens_held", "Tokens of the requests that the engine holds", detect=False),
    _process("train_loss", "loss", "Loss of the newest optimizer step; absent before the first"),
    _process("train_grad_norm", "grad_norm", "Gradient norm of the newest optimizer step, before clipping"),
    _process("train_reward", "reward", "Mean reward of the newest optimizer step"),
    _process("train_unfinite_total", "unfinite", "Losses, gradient norms and rewards that were NaN or infinite"),
    _process("train_jumps_total", "jumps", "Losses, gradient norms and rewards outside their own recent range"),
    _process("train_healths_total", "healths", "Steps whose policy health was reported"),
    *(_process(f"train_{s.metric}", s.name, s.help) for s in SIGNS if s.name in HEALTH_SIGNS),
)

_FROM_PROC = (
    _process(
        "process_state{state}", "proc_state", "1 for the kernel's state of the process (R S D T Z X, ? when unknown)"
    ),
    _process("process_cpu_seconds_total", "cpu_seconds", "User and system time of all threads"),
    _process(
        "process_run_delay_seconds_total",
        "run_delay_seconds",
        "Time that threads were runnable and waited for a CPU (schedstat), summed over threads",
    ),
    _process(
        "process_main_run_delay_seconds_total",
        "main_run_delay_seconds",
        "Run delay of the working thread alone; separates a starved process from a slow one",
    ),
    _process(
        "process_throttled_seconds_total",
        "throttled_seconds",
        "Time that the process's cgroup was stopped by its CPU quota",
    ),
    _process("process_resident_memory_bytes", "rss_bytes", "Resident memory"),
    _process("process_threads", "num_threads", "Threads of the process", detect=False),
    _process("process_major_faults_total", "major_faults", "Page faults that had to read from disk"),
)

_FROM_HOST = (
    _host("cpus", "cpu_count", "CPUs that the node may use"),
    _host("cpu_busy_seconds_total", "cpu_busy_seconds", "CPU time not idle, summed over all CPUs"),
    _host("load1", "load_1m", "Load average over one minute"),
    _host("memory_total_bytes", "memory_total_bytes", "Memory of the node"),
    _host("memory_available_bytes", "memory_available_bytes", "Memory available without swapping"),
    _host(
        "cpu_stall_seconds_total",
        "cpu_some_stall_seconds",
        "Time in which some task waited for a CPU (PSI); 0 where the kernel has none",
    ),
    _host(
        "memory_stall_seconds_total",
        "memory_some_stall_seconds",
        "Time in which some task waited for memory (PSI); 0 where the kernel has none",
    ),
    _host("oom_kills_total", "oom_kills", "Processes killed by the kernel's OOM killer"),
)

_OF_AGENT = rows(
    MetricScope.AGENT,
    NODE,
    {
        "agent_build_info{version}": "1; joins the agent's version",
        "agent_start_timestamp_seconds": "When this agent process started, seconds since 1970",
        "agent_cpu_seconds_total": "CPU time of the agent itself",
        "agent_resident_memory_bytes": "Resident memory of the agent itself",
        "agent_processes": "Registered processes that the agent watches",
        "process_exits_total{role,replica,rank,reason}": "Processes that ended, by what ended them: finished, "
        "killed, crashed, oom, exception, exit, unknown",
        "agent_rounds_total": "Sampling rounds finished",
        "agent_round_seconds": "Duration of the newest sampling round",
        "agent_samples_total": "Process and host samples taken",
        "agent_samples_lost_total": "Samples that left the ring before any reader asked for them",
        "agent_events_total{kind}": "Events recorded, by kind",
        "agent_events_lost_total": "Events that could not be kept on disk",
        "agent_registrations_refused_total": "Registrations without a valid secret or peer credentials",
        "agent_messages_malformed_total": "Malformed messages of processes, dropped",
        "agent_pages_torn_total": "Reads of a state page that found it torn or damaged",
        "probe_up{probe}": "1 if the probe could be read in the newest round, 0 if not",
        "probe_seconds{probe}": "Duration of the newest poll, including its wait for data",
        "probe_cpu_seconds_total{probe}": "CPU time of the thread of a collector",
        "probe_facts_dropped_total{probe}": "Facts beyond the limit of one poll of a collector",
        "probe_lines_malformed_total{probe}": "Malformed lines of another exporter",
        "probe_series_dropped_total{probe}": "Series of another exporter beyond the limit",
    },
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
    *ENGINE_METRICS,
    *_OF_AGENT,
    *WATCH_METRICS,
    *RUN_METRICS,
)
BY_NAME: dict[str, Metric] = {m.name: m for m in CATALOGUE}

PROCESS_METRICS = tuple(m for m in CATALOGUE if m.subject is MetricScope.PROCESS)
UNPAGED_METRICS = tuple(m for m in PROCESS_METRICS if m in _FROM_PROC or m.source == "alive")
"""Metrics of a process without a state page."""
_HOST = tuple(m for m in CATALOGUE if m.subject is MetricScope.HOST)


def process_values(sample: ProcessSample) -> Iterator[MetricValue]:
    """Every process metric of one sample. Without values that are NaN (not yet reported), times never set, and page
    fields of a process without a state page."""
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
