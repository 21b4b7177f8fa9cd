"""The replicas of a role compared (outliers, throughput, training values), and one replica compared with its peers."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from rolecall.dashboards.grafana.board import (
    REPLICA,
    ROLES,
    ROW_TO_GPUS,
    ROW_TO_NETWORK,
    ROW_TO_REPLICA,
    SERIES_TO_REPLICA,
    Choice,
    PanelRow,
    board,
    of_servers,
    values_of,
)
from rolecall.dashboards.grafana.boards.run import NOT_RUN
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    UP_DOWN,
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

FIRST = 10
SLOW_TIMES = 1.5
"""Times the median of peers: more than uneven work explains in most jobs."""
STARVED = 0.2
OF_ROLE = 'role=~"$role"'
NOT_REPORTED = "no rank reports it"
NOT_RECORDED = "no recording rules, or no rank reports it"
NO_ENGINE = "no vLLM or SGLang engine with data"
REPLICA_STATES = {
    "wanted": MappedValue("wanted", YELLOW),
    "lent": MappedValue("lent", YELLOW),
    "starting": MappedValue("starting", YELLOW),
    "ready": MappedValue("ready", GREEN),
    "serving": MappedValue("serving", GREEN),
    "lost": MappedValue("LOST", RED),
    "stopped": MappedValue("stopped", GREY),
}
"""The states of core/membership.py; `wanted`: not started yet; and `lent`: its node works for another replica."""


def replica_state(matchers: str) -> str:
    """The state of each replica as a number: its 1-based index in REPLICA_STATES."""
    return " or ".join(
        f'max by (role, replica) (rolecall_replica_state{{{matchers},state="{state}"}} == 1) * {n}'
        for n, state in enumerate(REPLICA_STATES, start=1)
    )


def _mappings(mappings: Mapping[str, MappedValue]) -> dict[int, MappedValue]:
    return dict(enumerate(mappings.values(), start=1))


def of_replicas(metric: str) -> str:
    """The rate of a counter, per rank of each replica."""
    return f"max by (role, replica, rank) (rate({metric}{{{OF_ROLE}}}[$__rate_interval]))"


BUSY, UNITS = of_replicas("rolecall_process_busy_seconds_total"), of_replicas("rolecall_process_work_units_total")
UNIT_SECONDS = f"{BUSY} / ({UNITS} > 0)"
IDLE = f"time() - max by (role, replica, rank) (rolecall_process_progress_timestamp_seconds{{{OF_ROLE}}})"


def roles() -> Dashboard:
    return board(
        ROLES,
        "roles",
        "Replicas of the selected roles compared: states, throughput, training values.",
        [*of_servers(), values_of("role", "Role", "rolecall_process_up")],
        [_health(), _outstanding(), _pace(), _recorded(), _training()],
    )


def exits(matchers: str, *columns: str) -> Panel:
    return rows(
        "Process exits in the time range",
        "By reason. finished is normal; killed, crashed, oom and exception are not.",
        PanelFormat(decimals=0, limits=((None, ORANGE),), no_value="none"),
        PanelQuery(
            grown(f"rolecall_process_exits_total{{{matchers}}}", ", ".join((*columns, "reason"))) + " > 0", "times"
        ),
        {name: name for name in (*columns, "reason")},
    )


def _health() -> PanelRow:
    style = PanelFormat(mappings=_mappings(REPLICA_STATES), links=(SERIES_TO_REPLICA,), no_value=NOT_RUN)
    return PanelRow(
        "Health",
        states(
            "Replicas",
            "State of each replica over time. LOST: fenced, gets no work. starting: its replacement is starting.",
            style,
            PanelQuery(replica_state(OF_ROLE), "{{replica}}"),
        ),
        numbers(
            "Replicas by state",
            "Current number of replicas of each role in each state.",
            PanelFormat(decimals=0, no_value=NOT_RUN),
            PanelQuery(f"max by (role, state) (rolecall_replicas{{{OF_ROLE}}}) > 0", "{{role}} {{state}}"),
        ),
        rows(
            "Incidents in the time range",
            "Incidents opened, by fault.",
            PanelFormat(limits=((None, RED),), no_value="none"),
            PanelQuery(grown(f"rolecall_incidents_opened_total{{{OF_ROLE}}}", "role, fault") + " > 0", "incidents"),
            {"role": "role", "fault": "fault"},
        ),
        exits(OF_ROLE, "role", "replica", "rank", "node"),
        lines(
            "Incarnations",
            "Desired incarnation of each replica. Each step up is a replacement.",
            PanelFormat(decimals=0, links=(SERIES_TO_REPLICA,), no_value=NOT_RUN),
            PanelQuery(f"max by (role, replica) (rolecall_replica_incarnation{{{OF_ROLE}}})", "{{replica}}"),
        ),
        widths=(14, 5, 5, 12, 12),
        height=9,
    )


def _outstanding() -> PanelRow:
    """The few of a thousand replicas that deserve attention."""
    slowness = f"({UNIT_SECONDS}) / on (role) group_left () quantile by (role) (0.5, {UNIT_SECONDS})"
    delay = of_replicas("rolecall_process_main_run_delay_seconds_total")
    columns = {"role": "role", "replica": "replica", "rank": "rank"}
    linked = (ROW_TO_REPLICA,)
    return PanelRow(
        f"Outliers (top {FIRST})",
        rows(
            "Slowest",
            "Time per unit of work, relative to the median of the role.",
            PanelFormat(decimals=2, limits=((None, GREEN), (SLOW_TIMES, ORANGE)), no_value=NOT_REPORTED, links=linked),
            PanelQuery(f"topk({FIRST}, {slowness})", "times the median"),
            columns,
        ),
        rows(
            "Longest without progress",
            "Seconds since a unit of work was finished. Waiting and idle replicas appear here too.",
            PanelFormat("s", limits=((None, BLUE),), no_value=NOT_REPORTED, links=linked),
            PanelQuery(f"topk({FIRST}, {IDLE})", "since"),
            columns,
        ),
        rows(
            "CPU starvation",
            "Share of time in which the main thread was runnable but had no CPU.",
            PanelFormat("percentunit", decimals=1, limits=((None, GREEN), (STARVED, ORANGE)), links=linked),
            PanelQuery(f"topk({FIRST}, {delay})", "CPU wait"),
            columns,
        ),
    )


def _pace() -> PanelRow:
    newest = f"scalar(max(rolecall_process_policy_version{{{OF_ROLE}}}))"
    requests = f"rolecall_process_requests_active{{{OF_ROLE}}}"
    each = "{{replica}} rank {{rank}}"
    linked = (SERIES_TO_REPLICA,)
    return PanelRow(
        "Throughput",
        lines(
            "Tokens per second",
            "Generated (rollout) or trained on (trainer). A line far below the others: a slow replica.",
            PanelFormat("short", no_value=NOT_REPORTED, links=linked),
            PanelQuery(of_replicas("rolecall_process_tokens_total"), each),
        ),
        lines(
            "Seconds per unit of work",
            "Microbatch, engine step or scored sample. A line far above the others: a slow replica.",
            PanelFormat("s", no_value=NOT_REPORTED, links=linked),
            PanelQuery(UNIT_SECONDS, each),
        ),
        lines(
            "Time since last progress",
            "Seconds since a unit of work was finished. It also grows while a replica waits or is idle.",
            PanelFormat("s", no_value=NOT_REPORTED, links=linked),
            PanelQuery(IDLE, each),
        ),
        lines(
            "Policy versions behind",
            "Versions by which a replica is behind the newest of the selected roles.",
            PanelFormat(decimals=0, no_value=NOT_REPORTED, links=linked),
            PanelQuery(
                f"{newest} - max by (role, replica, rank) (rolecall_process_policy_version{{{OF_ROLE}}} >= 0)", each
            ),
        ),
        lines(
            "Active requests",
            "Requests that each engine is processing.",
            PanelFormat(decimals=0, no_value=NOT_REPORTED, links=linked),
            PanelQuery(f"max by (role, replica, rank) ({alive(requests)})", each),
        ),
        lines(
            "CPU",
            "CPU cores in use per process.",
            PanelFormat(links=linked),
            PanelQuery(of_replicas("rolecall_process_cpu_seconds_total"), each),
        ),
    )


def _recorded() -> PanelRow:
    """Recorded series: queries that take seconds for a thousand ranks."""
    return PanelRow(
        "Long time ranges (needs the recording rules of `rolecall grafana export`)",
        lines(
            f"The {FIRST} slowest ranks",
            "Time per unit of work, relative to the median of the role.",
            PanelFormat(
                limits=((None, GREEN), (SLOW_TIMES, ORANGE)), links=(SERIES_TO_REPLICA,), no_value=NOT_RECORDED
            ),
            PanelQuery(
                f"topk({FIRST}, rank:rolecall_process_unit_slowness:ratio1m{{{OF_ROLE}}})", "{{replica}} rank {{rank}}"
            ),
        ),
        lines(
            "Seconds per unit of work",
            "Median of the role. If it rises for all, suspect the workload or the network, not a replica.",
            PanelFormat("s", no_value=NOT_RECORDED),
            PanelQuery(f"max by (role) (role:rolecall_process_unit_seconds:median1m{{{OF_ROLE}}})", "{{role}}"),
        ),
        lines(
            "Units of work per second",
            "Per rank: median of the role, and the slowest.",
            PanelFormat("cps", no_value=NOT_RECORDED),
            PanelQuery(f"max by (role) (role:rolecall_process_progress:median_rate1m{{{OF_ROLE}}})", "{{role}} median"),
            PanelQuery(f"min by (role) (role:rolecall_process_progress:min_rate1m{{{OF_ROLE}}})", "{{role}} slowest"),
        ),
        widths=(12, 6, 6),
        collapsed=True,
    )


def _training() -> PanelRow:
    def of_ranks(metric: str) -> PanelQuery:
        return PanelQuery(f"max by (replica, rank) ({metric}{{{OF_ROLE}}})", "{{replica}} rank {{rank}}")

    unfinite = f"max by (replica, rank) (increase(rolecall_train_unfinite_total{{{OF_ROLE}}}[$__range]))"
    jumps = f"max by (replica, rank) (increase(rolecall_train_jumps_total{{{OF_ROLE}}}[$__range]))"
    return PanelRow(
        "Training values (trainers only)",
        lines(
            "Loss",
            "Of the latest step of each rank.",
            PanelFormat(least=None, no_value=NOT_REPORTED),
            of_ranks("rolecall_train_loss"),
        ),
        lines(
            "Gradient norm",
            "Before clipping. Ranks of one group agree; a rank that differs computes wrong values.",
            PanelFormat(no_value=NOT_REPORTED),
            of_ranks("rolecall_train_grad_norm"),
        ),
        lines(
            "Reward",
            "Of the latest step of each rank.",
            PanelFormat(least=None, no_value=NOT_REPORTED),
            of_ranks("rolecall_train_reward"),
        ),
        numbers(
            "NaN, infinite, jumps",
            "Losses, gradient norms and rewards that were NaN or infinite, or left their recent range, in the "
            "time range.",
            PanelFormat(decimals=0, limits=((None, GREEN), (1, ORANGE)), no_value=NOT_REPORTED),
            PanelQuery(f"max({unfinite})", "NaN or infinite"),
            PanelQuery(f"max({jumps})", "jumps"),
        ),
        widths=6,
    )


OWN = 'role=~"$role",replica=~"$replica"'
PEERS = 'role=~"$role",replica!~"$replica"'
PHASES = {
    "start": MappedValue("start", YELLOW),
    "idle": MappedValue("idle", GREY),
    "wait": MappedValue("wait", GREY),
    "paused": MappedValue("paused", GREY),
    "sleep": MappedValue("sleep", GREY),
    "compute": MappedValue("compute", GREEN),
    "reduce": MappedValue("in a collective", BLUE),
    "optimizer": MappedValue("optimizer", GREEN),
    "publish": MappedValue("publish", GREEN),
    "copy": MappedValue("copy", YELLOW),
    "checkpoint": MappedValue("checkpoint", BLUE),
    "generate": MappedValue("generate", GREEN),
    "update": MappedValue("update", BLUE),
    "score": MappedValue("score", GREEN),
    "step": MappedValue("step", GREEN),
}
"""The phases of core/telemetry.py that last; any other shows as none."""
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
        [_now(incidents), _pace_of_one(), _waits(), _engine()],
    )


def _coded(metric: str, mappings: Mapping[str, MappedValue], label: str) -> str:
    """A metric with one series per state as a number: the 1-based index of the active state."""
    each = (f'{metric}{{{OWN},{label}="{name}"}} * {n}' for n, name in enumerate(mappings, start=1))
    return f"max by (rank) ({alive('(' + ' or '.join(each) + ')')})"


def _now(incidents: Sequence[Link]) -> PanelRow:
    incarnation = f"rolecall_process_incarnation{{{OWN}}} or rolecall_process_up{{{OWN}}} * 0"
    return PanelRow(
        "Current state",
        numbers(
            "State",
            "As recorded by the run. LOST: fenced, gets no work.",
            PanelFormat(mappings=_mappings(REPLICA_STATES), links=incidents, no_value=NOT_RUN),
            PanelQuery(replica_state(OWN), "{{replica}}"),
        ),
        numbers(
            "Process",
            "Whether the process of each rank exists.",
            PanelFormat(mappings=UP_DOWN),
            PanelQuery(f"max by (rank) (rolecall_process_up{{{OWN}}})", "rank {{rank}}"),
        ),
        numbers(
            "Policy version",
            "Version that the process has loaded; -1: none yet.",
            PanelFormat(decimals=0, least=None, no_value=NOT_REPORTED),
            PanelQuery(_values("rolecall_process_policy_version")[0], "rank {{rank}}"),
        ),
        rows(
            "Placement",
            "Nodes with a process of this replica (a replaced one stays for a while), and its incarnation.",
            PanelFormat(
                decimals=0, mappings={0: MappedValue("not reported", GREY)}, links=(ROW_TO_GPUS, ROW_TO_NETWORK)
            ),
            PanelQuery(f"max by (node, role, replica, rank) ({incarnation})", "incarnation"),
            {"node": "node", "replica": "replica", "rank": "rank"},
        ),
        states(
            "Phase",
            "Current phase of each rank. A rank in a collective waits for its peers; suspect the rank that is "
            "not in it.",
            PanelFormat(mappings=_mappings(PHASES), no_value=NOT_REPORTED),
            PanelQuery(_coded("rolecall_process_phase", PHASES, "phase"), "rank {{rank}}"),
        ),
        states(
            "Process state",
            "STOPPED: by a signal or a debugger. UNINTERRUPTIBLE for long: blocked on a disk, network file "
            "system or driver.",
            PanelFormat(mappings=_mappings(KERNEL_STATES)),
            PanelQuery(_coded("rolecall_process_state", KERNEL_STATES, "state"), "rank {{rank}}"),
        ),
        widths=(4, 4, 4, 12, 12, 12),
        height=6,
    )


def _rates(metric: str) -> tuple[str, str]:
    """Rates of this replica's ranks, and of its peers' ranks."""
    own = f"max by (rank) (rate({metric}{{{OWN}}}[$__rate_interval]))"
    return own, f"max by (replica, rank) (rate({metric}{{{PEERS}}}[$__rate_interval]))"


def _values(metric: str) -> tuple[str, str]:
    own, peers = alive(f"{metric}{{{OWN}}}"), alive(f"{metric}{{{PEERS}}}")
    return f"max by (rank) ({own})", f"max by (replica, rank) ({peers})"


def _pace_of_one() -> PanelRow:
    busy, units = _rates("rolecall_process_busy_seconds_total"), _rates("rolecall_process_work_units_total")
    since = _values("rolecall_process_progress_timestamp_seconds")
    return PanelRow(
        "Throughput compared with peers",
        band(
            "Seconds per unit of work",
            "Microbatch, engine step or scored sample. Persistently above the band: the replica is slow.",
            PanelFormat("s", no_value=NOT_REPORTED),
            f"{busy[0]} / ({units[0]} > 0)",
            f"{busy[1]} / ({units[1]} > 0)",
        ),
        band(
            "Units of work per second",
            "0 while its peers make progress: the replica hangs.",
            PanelFormat("cps", no_value=NOT_REPORTED),
            *_rates("rolecall_process_progress_total"),
        ),
        band(
            "Tokens per second",
            "Generated (rollout) or trained on (trainer).",
            PanelFormat("short", no_value=NOT_REPORTED),
            *_rates("rolecall_process_tokens_total"),
        ),
        band(
            "Time since last progress",
            "Seconds since a unit of work was finished.",
            PanelFormat("s", no_value=NOT_REPORTED),
            f"time() - {since[0]}",
            f"time() - {since[1]}",
        ),
        band(
            "Heartbeats",
            "Per second, from a background thread. 0 while the process exists: it is stopped, or a thread holds "
            "the GIL.",
            PanelFormat("cps", no_value=NOT_REPORTED),
            *_rates("rolecall_process_beats_total"),
        ),
        band(
            "Active requests",
            "Requests that the engine is processing (rollout).",
            PanelFormat(decimals=0, no_value=NOT_REPORTED),
            *_values("rolecall_process_requests_active"),
        ),
    )


def _waits() -> PanelRow:
    share = PanelFormat("percentunit")
    return PanelRow(
        "Host resources compared with peers",
        band("CPU", "CPU cores in use.", PanelFormat(), *_rates("rolecall_process_cpu_seconds_total")),
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
        band("Memory", "Resident memory.", PanelFormat("bytes"), *_values("rolecall_process_resident_memory_bytes")),
        band(
            "Major page faults",
            "Per second. Many: the host is short of memory.",
            PanelFormat("cps"),
            *_rates("rolecall_process_major_faults_total"),
        ),
        exits(OWN, "node", "rank"),
        collapsed=True,
    )


def _engine() -> PanelRow:
    def mean(seconds: str, count: str) -> tuple[str, str]:
        a, b = _rates(seconds), _rates(count)
        return f"{a[0]} / ({b[0]} > 0)", f"{a[1]} / ({b[1]} > 0)"

    return PanelRow(
        "Inference engine",
        band(
            "Time to first token",
            "Mean seconds from the arrival of a request.",
            PanelFormat("s", no_value=NO_ENGINE),
            *mean("rolecall_engine_first_token_seconds_total", "rolecall_engine_first_tokens_total"),
        ),
        band(
            "Time per output token",
            "Mean seconds. Above the band: the engine is slow.",
            PanelFormat("s", no_value=NO_ENGINE),
            *mean("rolecall_engine_token_gap_seconds_total", "rolecall_engine_token_gaps_total"),
        ),
        lines(
            "Requests",
            "Running requests, and requests waiting to be scheduled; of SGLang as of its last log.",
            PanelFormat(decimals=0, no_value=NO_ENGINE),
            PanelQuery(f"max by (rank) (rolecall_engine_requests_running{{{OWN}}})", "running, rank {{rank}}"),
            PanelQuery(f"max by (rank) (rolecall_engine_requests_waiting{{{OWN}}})", "waiting, rank {{rank}}"),
        ),
        band(
            "KV cache in use",
            "When full, requests are preempted and recomputed.",
            PanelFormat("percentunit", most=1.0, no_value=NO_ENGINE),
            "max by (rank) (rolecall_engine_kv_cache_used_ratio{" + OWN + "})",
            "max by (replica, rank) (rolecall_engine_kv_cache_used_ratio{" + PEERS + "})",
        ),
        band(
            "Preempted requests",
            "Per second, to free space in the KV cache.",
            PanelFormat("cps", no_value=NO_ENGINE),
            *_rates("rolecall_engine_preemptions_total"),
        ),
        numbers(
            "Engine",
            "Whether its metrics endpoint responds, and whether it is awake (asleep: weights or KV cache released). "
            "SGLang does not tell the latter.",
            PanelFormat(mappings={0: MappedValue("NO", ORANGE), 1: MappedValue("yes", GREEN)}, no_value=NO_ENGINE),
            PanelQuery(f"max by (rank) (rolecall_engine_up{{{OWN}}})", "responds, rank {{rank}}"),
            PanelQuery(f"max by (rank) (rolecall_engine_awake{{{OWN}}})", "awake, rank {{rank}}"),
        ),
        collapsed=True,
    )
