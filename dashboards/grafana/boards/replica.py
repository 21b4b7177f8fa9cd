"""One replica compared with its peers, to confirm or rule out a suspect."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import REPLICA, Choice, PanelRow, board, of_servers, values_of
from rolecall.dashboards.grafana.boards.roles import STATE_MAPPINGS, replica_state
from rolecall.dashboards.grafana.links import ROW_TO_GPUS, ROW_TO_NETWORK
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Link,
    MappedValue,
    PanelFormat,
    PanelQuery,
    band,
    lines,
    numbers,
    rows,
    states,
)
from rolecall.dashboards.grafana.promql import alive, grown

OWN = 'role=~"$role",replica=~"$replica"'
PEERS = 'role=~"$role",replica!~"$replica"'
PHASES = {
    "start": MappedValue("start", YELLOW),
    "idle": MappedValue("idle", GREY),
    "wait": MappedValue("wait", GREY),
    "paused": MappedValue("paused", GREY),
    "compute": MappedValue("compute", GREEN),
    "reduce": MappedValue("in a collective", BLUE),
    "optimizer": MappedValue("optimizer", GREEN),
    "publish": MappedValue("publish", GREEN),
    "copy": MappedValue("copy", YELLOW),
    "checkpoint": MappedValue("checkpoint", BLUE),
    "generate": MappedValue("generate", GREEN),
    "update": MappedValue("update", BLUE),
    "score": MappedValue("score", GREEN),
}
"""The phases of core/telemetry.py; any other shows as none."""
KERNEL_STATES = {
    "R": MappedValue("running", GREEN),
    "S": MappedValue("sleeping", GREY),
    "D": MappedValue("UNINTERRUPTIBLE", ORANGE),
    "T": MappedValue("STOPPED", RED),
    "Z": MappedValue("ZOMBIE", RED),
    "X": MappedValue("DEAD", RED),
    "?": MappedValue("unknown", YELLOW),
}
"""Process states of the kernel; `t` (traced) shows as none."""


def replica(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to `rolecall dashboard`."""
    return board(
        REPLICA,
        "one replica",
        "A replica compared with its peers (the other replicas of its role): throughput, waits, host.",
        [
            *of_servers(),
            values_of("role", "Role", "rolecall_process_up", Choice.ONE),
            values_of("replica", "Replica", 'rolecall_process_up{role=~"$role"}', Choice.ONE),
        ],
        [_now(incidents), _pace(), _waits(), _engine()],
    )


def _coded(metric: str, mappings: Mapping[str, MappedValue], label: str) -> str:
    """A metric with one series per state as a number: the 1-based index of the active state."""
    each = (f'{metric}{{{OWN},{label}="{name}"}} * {n}' for n, name in enumerate(mappings, start=1))
    return f"max by (rank) ({alive('(' + ' or '.join(each) + ')')})"


def _mappings(mappings: Mapping[str, MappedValue]) -> dict[int, MappedValue]:
    return dict(enumerate(mappings.values(), start=1))


def _now(incidents: Sequence[Link]) -> PanelRow:
    where = f"max by (node, role, replica, rank) (rolecall_process_incarnation{{{OWN}}})"
    return PanelRow(
        "Current state",
        6,
        (4, 4, 4, 12, 12, 12),
        [
            numbers(
                "State",
                "As recorded by the run. LOST: fenced, gets no work.",
                PanelFormat(unit="none", mappings=STATE_MAPPINGS, links=incidents),
                PanelQuery(replica_state(OWN), "{{replica}}"),
            ),
            numbers(
                "Process",
                "Whether the process of each rank exists.",
                PanelFormat(unit="none", mappings={0: MappedValue("DOWN", RED), 1: MappedValue("up", GREEN)}),
                PanelQuery(f"max by (rank) (rolecall_process_up{{{OWN}}})", "rank {{rank}}"),
            ),
            numbers(
                "Policy version",
                "Version that the process has loaded; -1: none yet.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery(_values("rolecall_process_policy_version")[0], "rank {{rank}}"),
            ),
            rows(
                "Placement",
                "Nodes with a process of this replica (a replaced one stays for a while), and its incarnation.",
                PanelFormat(unit="none", decimals=0, links=(ROW_TO_GPUS, ROW_TO_NETWORK)),
                PanelQuery(where, "incarnation"),
                {"node": "node", "replica": "replica", "rank": "rank"},
            ),
            states(
                "Phase",
                "Current phase of each rank. A rank in a collective waits for its peers; suspect the rank that is "
                "not in it.",
                PanelFormat(unit="none", mappings=_mappings(PHASES)),
                PanelQuery(_coded("rolecall_process_phase", PHASES, "phase"), "rank {{rank}}"),
            ),
            states(
                "Process state",
                "STOPPED: by a signal or a debugger. UNINTERRUPTIBLE for long: blocked on a disk, network file "
                "system or driver.",
                PanelFormat(unit="none", mappings=_mappings(KERNEL_STATES)),
                PanelQuery(_coded("rolecall_process_state", KERNEL_STATES, "state"), "rank {{rank}}"),
            ),
        ],
    )


def _rates(metric: str) -> tuple[str, str]:
    """Rates of this replica's ranks, and of its peers' ranks."""
    own = f"max by (rank) (rate({metric}{{{OWN}}}[$__rate_interval]))"
    return own, f"max by (replica, rank) (rate({metric}{{{PEERS}}}[$__rate_interval]))"


def _values(metric: str) -> tuple[str, str]:
    own, peers = alive(f"{metric}{{{OWN}}}"), alive(f"{metric}{{{PEERS}}}")
    return f"max by (rank) ({own})", f"max by (replica, rank) ({peers})"


def _pace() -> PanelRow:
    busy, units = _rates("rolecall_process_busy_seconds_total"), _rates("rolecall_process_work_units_total")
    since = _values("rolecall_process_progress_timestamp_seconds")
    return PanelRow(
        "Throughput compared with peers",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band(
                "Seconds per unit of work",
                "Microbatch, engine step or scored sample. Persistently above the band: the replica is slow.",
                PanelFormat(unit="s"),
                f"{busy[0]} / ({units[0]} > 0)",
                f"{busy[1]} / ({units[1]} > 0)",
            ),
            band(
                "Units of work per second",
                "0 while its peers make progress: the replica hangs.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_process_progress_total"),
            ),
            band(
                "Tokens per second",
                "Generated (rollout) or trained on (trainer).",
                PanelFormat(unit="short"),
                *_rates("rolecall_process_tokens_total"),
            ),
            band(
                "Time since last progress",
                "Seconds since a unit of work was finished.",
                PanelFormat(unit="s"),
                f"time() - {since[0]}",
                f"time() - {since[1]}",
            ),
            band(
                "Heartbeats",
                "Per second, from a background thread. 0 while the process exists: it is stopped, or a thread holds "
                "the GIL.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_process_beats_total"),
            ),
            band(
                "Active requests",
                "Requests that the engine is processing (rollout).",
                PanelFormat(unit="none", decimals=0),
                *_values("rolecall_process_requests_active"),
            ),
        ],
    )


def _waits() -> PanelRow:
    share = PanelFormat(unit="percentunit")
    return PanelRow(
        "Host resources compared with peers",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band("CPU", "CPU cores in use.", PanelFormat(unit="none"), *_rates("rolecall_process_cpu_seconds_total")),
            band(
                "CPU wait",
                "Share of time in which the main thread was runnable but had no CPU: starved, not slow.",
                share,
                *_rates("rolecall_process_main_run_delay_seconds_total"),
            ),
            band(
                "CPU throttling",
                "Share of time in which its cgroup was throttled.",
                share,
                *_rates("rolecall_process_throttled_seconds_total"),
            ),
            band(
                "Memory",
                "Resident memory.",
                PanelFormat(unit="bytes"),
                *_values("rolecall_process_resident_memory_bytes"),
            ),
            band(
                "Major page faults",
                "Per second. Many: the host is short of memory.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_process_major_faults_total"),
            ),
            rows(
                "Process exits in the time range",
                "By reason. finished is normal; killed, crashed, oom and exception are not.",
                PanelFormat(unit="none", decimals=0, limits=((None, ORANGE),), no_value="none"),
                PanelQuery(grown(f"rolecall_process_exits_total{{{OWN}}}", "node, rank, reason") + " > 0", "times"),
                {"node": "node", "rank": "rank", "reason": "reason"},
            ),
        ],
        collapsed=True,
    )


def _engine() -> PanelRow:
    def mean(seconds: str, count: str) -> tuple[str, str]:
        a, b = _rates(seconds), _rates(count)
        return f"{a[0]} / ({b[0]} > 0)", f"{a[1]} / ({b[1]} > 0)"

    return PanelRow(
        "vLLM engine",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band(
                "Time to first token",
                "Mean seconds from the arrival of a request.",
                PanelFormat(unit="s"),
                *mean("rolecall_vllm_first_token_seconds_total", "rolecall_vllm_first_tokens_total"),
            ),
            band(
                "Time per output token",
                "Mean seconds. Above the band: the engine is slow.",
                PanelFormat(unit="s"),
                *mean("rolecall_vllm_token_gap_seconds_total", "rolecall_vllm_token_gaps_total"),
            ),
            lines(
                "Requests",
                "Running requests, and requests waiting to be scheduled.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(f"max by (rank) (rolecall_vllm_requests_running{{{OWN}}})", "running, rank {{rank}}"),
                PanelQuery(f"max by (rank) (rolecall_vllm_requests_waiting{{{OWN}}})", "waiting, rank {{rank}}"),
            ),
            band(
                "KV cache in use",
                "Share of blocks. When full, requests are preempted and recomputed.",
                PanelFormat(unit="percentunit", most=1.0),
                "max by (rank) (rolecall_vllm_kv_cache_used_ratio{" + OWN + "})",
                "max by (replica, rank) (rolecall_vllm_kv_cache_used_ratio{" + PEERS + "})",
            ),
            band(
                "Preempted requests",
                "Per second, to free space in the KV cache.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_vllm_preemptions_total"),
            ),
            numbers(
                "Engine",
                "Whether its metrics endpoint responds, and whether it is awake (asleep: weights or KV cache "
                "released).",
                PanelFormat(unit="none", mappings={0: MappedValue("NO", ORANGE), 1: MappedValue("yes", GREEN)}),
                PanelQuery(f"max by (rank) (rolecall_vllm_up{{{OWN}}})", "responds, rank {{rank}}"),
                PanelQuery(f"max by (rank) (rolecall_vllm_awake{{{OWN}}})", "awake, rank {{rank}}"),
            ),
        ],
        collapsed=True,
    )
