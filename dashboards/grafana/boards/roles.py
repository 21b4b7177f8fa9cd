"""The replicas of a role compared: outliers, throughput, training values."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import ROLES, PanelRow, board, of_servers, values_of
from rolecall.dashboards.grafana.links import ROW_TO_REPLICA, SERIES_TO_REPLICA
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    MappedValue,
    PanelFormat,
    PanelQuery,
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
REPLICA_STATES = {
    "wanted": MappedValue("wanted", YELLOW),
    "starting": MappedValue("starting", YELLOW),
    "ready": MappedValue("ready", GREEN),
    "serving": MappedValue("serving", GREEN),
    "lost": MappedValue("LOST", RED),
    "stopped": MappedValue("stopped", GREY),
}
"""The states of core/membership.py, and `wanted`: not started yet."""


def replica_state(matchers: str) -> str:
    """The state of each replica as a number: its 1-based index in REPLICA_STATES."""
    return " or ".join(
        f'max by (role, replica) (rolecall_replica_state{{{matchers},state="{state}"}} == 1) * {n}'
        for n, state in enumerate(REPLICA_STATES, start=1)
    )


STATE_MAPPINGS = dict(enumerate(REPLICA_STATES.values(), start=1))


def of_replicas(metric: str) -> str:
    """The rate of a counter, per rank of each replica."""
    return f"max by (role, replica, rank) (rate({metric}{{{OF_ROLE}}}[$__rate_interval]))"


def roles() -> Dashboard:
    return board(
        ROLES,
        "roles",
        "Replicas of the selected roles compared: states, throughput, training values.",
        [*of_servers(), values_of("role", "Role", "rolecall_process_up")],
        [_health(), _outstanding(), _pace(), _recorded(), _training()],
    )


def _health() -> PanelRow:
    style = PanelFormat(unit="none", mappings=STATE_MAPPINGS, links=(SERIES_TO_REPLICA,))
    exits = grown(f"rolecall_process_exits_total{{{OF_ROLE}}}", "node, role, replica, rank, reason") + " > 0"
    return PanelRow(
        "Health",
        9,
        (14, 5, 5, 12, 12),
        [
            states(
                "Replicas",
                "State of each replica over time. LOST: fenced, gets no work. starting: its replacement is starting.",
                style,
                PanelQuery(replica_state(OF_ROLE), "{{replica}}"),
            ),
            numbers(
                "Replicas by state",
                "Current number of replicas of each role in each state.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(f"max by (role, state) (rolecall_replicas{{{OF_ROLE}}}) > 0", "{{role}} {{state}}"),
            ),
            rows(
                "Incidents in the time range",
                "Incidents opened, by fault.",
                PanelFormat(unit="none", limits=((None, RED),), no_value="none"),
                PanelQuery(grown(f"rolecall_incidents_opened_total{{{OF_ROLE}}}", "role, fault") + " > 0", "incidents"),
                {"role": "role", "fault": "fault"},
            ),
            rows(
                "Process exits in the time range",
                "By reason. finished is normal; killed, crashed, oom and exception are not.",
                PanelFormat(unit="none", decimals=0, limits=((None, ORANGE),), no_value="none"),
                PanelQuery(exits, "times"),
                {"role": "role", "replica": "replica", "rank": "rank", "node": "node", "reason": "reason"},
            ),
            lines(
                "Incarnations",
                "Desired incarnation of each replica. Each step up is a replacement.",
                PanelFormat(unit="none", decimals=0, links=(SERIES_TO_REPLICA,)),
                PanelQuery(f"max by (role, replica) (rolecall_replica_incarnation{{{OF_ROLE}}})", "{{replica}}"),
            ),
        ],
    )


def _outstanding() -> PanelRow:
    """The few of a thousand replicas that deserve attention."""
    busy, units = of_replicas("rolecall_process_busy_seconds_total"), of_replicas("rolecall_process_work_units_total")
    unit = f"{busy} / ({units} > 0)"
    slowness = f"({unit}) / on (role) group_left () quantile by (role) (0.5, {unit})"
    delay = of_replicas("rolecall_process_main_run_delay_seconds_total")
    idle = f"time() - max by (role, replica, rank) (rolecall_process_progress_timestamp_seconds{{{OF_ROLE}}})"
    columns = {"role": "role", "replica": "replica", "rank": "rank"}
    linked = (ROW_TO_REPLICA,)
    return PanelRow(
        f"Outliers (top {FIRST})",
        8,
        (8, 8, 8),
        [
            rows(
                "Slowest",
                "Time per unit of work, relative to the median of the role.",
                PanelFormat(unit="none", decimals=2, limits=((None, GREEN), (SLOW_TIMES, ORANGE)), links=linked),
                PanelQuery(f"topk({FIRST}, {slowness})", "times the median"),
                columns,
            ),
            rows(
                "Longest without progress",
                "Seconds since a unit of work was finished. Waiting and idle replicas appear here too.",
                PanelFormat(unit="s", limits=((None, BLUE),), links=linked),
                PanelQuery(f"topk({FIRST}, {idle})", "since"),
                columns,
            ),
            rows(
                "CPU starvation",
                "Share of time in which the main thread was runnable but had no CPU.",
                PanelFormat(unit="percentunit", decimals=1, limits=((None, GREEN), (STARVED, ORANGE)), links=linked),
                PanelQuery(f"topk({FIRST}, {delay})", "CPU wait"),
                columns,
            ),
        ],
    )


def _pace() -> PanelRow:
    busy, units = of_replicas("rolecall_process_busy_seconds_total"), of_replicas("rolecall_process_work_units_total")
    newest = f"scalar(max(rolecall_process_policy_version{{{OF_ROLE}}}))"
    idle = f"time() - max by (role, replica, rank) (rolecall_process_progress_timestamp_seconds{{{OF_ROLE}}})"
    requests = f"rolecall_process_requests_active{{{OF_ROLE}}}"
    each = "{{replica}} rank {{rank}}"
    linked = (SERIES_TO_REPLICA,)
    return PanelRow(
        "Throughput",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "Tokens per second",
                "Generated (rollout) or trained on (trainer). A line far below the others: a slow replica.",
                PanelFormat(unit="short", links=linked),
                PanelQuery(of_replicas("rolecall_process_tokens_total"), each),
            ),
            lines(
                "Seconds per unit of work",
                "Microbatch, engine step or scored sample. A line far above the others: a slow replica.",
                PanelFormat(unit="s", links=linked),
                PanelQuery(f"{busy} / ({units} > 0)", each),
            ),
            lines(
                "Time since last progress",
                "Seconds since a unit of work was finished. It also grows while a replica waits or is idle.",
                PanelFormat(unit="s", links=linked),
                PanelQuery(idle, each),
            ),
            lines(
                "Policy versions behind",
                "Versions by which a replica is behind the newest of the selected roles.",
                PanelFormat(unit="none", decimals=0, links=linked),
                PanelQuery(
                    f"{newest} - max by (role, replica, rank) (rolecall_process_policy_version{{{OF_ROLE}}} >= 0)",
                    each,
                ),
            ),
            lines(
                "Active requests",
                "Requests that each engine is processing.",
                PanelFormat(unit="none", decimals=0, links=linked),
                PanelQuery(f"max by (role, replica, rank) ({alive(requests)})", each),
            ),
            lines(
                "CPU",
                "CPU cores in use per process.",
                PanelFormat(unit="none", links=linked),
                PanelQuery(of_replicas("rolecall_process_cpu_seconds_total"), each),
            ),
        ],
    )


def _recorded() -> PanelRow:
    """Recorded series: queries that take seconds for a thousand ranks."""
    return PanelRow(
        "Long time ranges (needs the recording rules of `rolecall grafana export`)",
        8,
        (12, 6, 6),
        [
            lines(
                f"The {FIRST} slowest ranks",
                "Time per unit of work, relative to the median of the role.",
                PanelFormat(unit="none", limits=((None, GREEN), (SLOW_TIMES, ORANGE)), links=(SERIES_TO_REPLICA,)),
                PanelQuery(
                    f"topk({FIRST}, rank:rolecall_process_unit_slowness:ratio1m{{{OF_ROLE}}})",
                    "{{replica}} rank {{rank}}",
                ),
            ),
            lines(
                "Seconds per unit of work",
                "Median of the role. If it rises for all, suspect the workload or the network, not a replica.",
                PanelFormat(unit="s"),
                PanelQuery(f"max by (role) (role:rolecall_process_unit_seconds:median1m{{{OF_ROLE}}})", "{{role}}"),
            ),
            lines(
                "Units of work per second",
                "Per rank: median of the role, and the slowest.",
                PanelFormat(unit="cps"),
                PanelQuery(
                    f"max by (role) (role:rolecall_process_progress:median_rate1m{{{OF_ROLE}}})", "{{role}} median"
                ),
                PanelQuery(
                    f"min by (role) (role:rolecall_process_progress:min_rate1m{{{OF_ROLE}}})", "{{role}} slowest"
                ),
            ),
        ],
        collapsed=True,
    )


def _training() -> PanelRow:
    def of_ranks(metric: str) -> PanelQuery:
        return PanelQuery(f"max by (replica, rank) ({metric}{{{OF_ROLE}}})", "{{replica}} rank {{rank}}")

    unfinite = f"max by (replica, rank) (increase(rolecall_train_unfinite_total{{{OF_ROLE}}}[$__range]))"
    jumps = f"max by (replica, rank) (increase(rolecall_train_jumps_total{{{OF_ROLE}}}[$__range]))"
    return PanelRow(
        "Training values (trainers only)",
        8,
        (6, 6, 6, 6),
        [
            lines(
                "Loss",
                "Of the latest step of each rank.",
                PanelFormat(unit="none", least=None),
                of_ranks("rolecall_train_loss"),
            ),
            lines(
                "Gradient norm",
                "Before clipping. Ranks of one group agree; a rank that differs computes wrong values.",
                PanelFormat(unit="none"),
                of_ranks("rolecall_train_grad_norm"),
            ),
            lines(
                "Reward",
                "Of the latest step of each rank.",
                PanelFormat(unit="none", least=None),
                of_ranks("rolecall_train_reward"),
            ),
            numbers(
                "NaN, infinite, jumps",
                "Losses, gradient norms and rewards that were NaN or infinite, or left their recent range, in the "
                "time range.",
                PanelFormat(unit="none", decimals=0, limits=((None, GREEN), (1, ORANGE))),
                PanelQuery(f"max({unfinite})", "NaN or infinite"),
                PanelQuery(f"max({jumps})", "jumps"),
            ),
        ],
    )
