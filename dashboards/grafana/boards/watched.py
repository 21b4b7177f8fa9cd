"""A job that rolecall watches and does not run: its ranks, their progress, processes, nodes and GPUs, and incidents.

Its journal has no replicas and no steps, so everything here comes from the agents and from the watch itself. Panels
that need the reporter, NCCL RAS or a GPU say so when there is none.
"""

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import (
    ROW_TO_GPUS,
    ROW_TO_REPLICA,
    SERIES_TO_REPLICA,
    WATCHED,
    PanelRow,
    board,
    of_servers,
    values_of,
)
from rolecall.dashboards.grafana.boards.node import host, xids
from rolecall.dashboards.grafana.boards.replicas import (
    FIRST,
    IDLE,
    KERNEL_STATES,
    NOT_REPORTED,
    OF_ROLE,
    UNIT_SECONDS,
    exits,
    of_replicas,
)
from rolecall.dashboards.grafana.boards.run import (
    active_diagnoses,
    agents,
    incidents_over_time,
    open_incidents,
    watch_state,
)
from rolecall.dashboards.grafana.panels import (
    BLUE,
    RED,
    Link,
    MappedValue,
    PanelFormat,
    PanelQuery,
    lines,
    numbers,
    rows,
    states,
)
from rolecall.dashboards.grafana.promql import alive

RANK = "node, role, replica, rank"
EACH = "{{replica}} rank {{rank}}"
ON_ITS_NODES = f" and on (node) rolecall_process_up{{{OF_ROLE}}}"
"""Selects the nodes that have a rank of the selected roles."""
NO_RAS = "no agent has an answer of NCCL RAS"
GONE = len(KERNEL_STATES) + 1
STATES = {**dict(enumerate(KERNEL_STATES.values(), start=1)), GONE: MappedValue("GONE", RED)}


def rank_state() -> str:
    """The state of each rank as a number of STATES."""
    named = " or ".join(
        f'rolecall_process_state{{{OF_ROLE},state="{name}"}} * {n}' for n, name in enumerate(KERNEL_STATES, start=1)
    )
    return f"max by ({RANK}) ({alive(f'({named})')} or (rolecall_process_up{{{OF_ROLE}}} == 0) * 0 + {GONE})"


def watched(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to `rolecall dashboard`."""
    return board(
        WATCHED,
        "watched job",
        "A job that rolecall watches and does not run (`rolecall watch agents`): ranks, progress, processes, "
        "nodes, NCCL, GPUs, and incidents.",
        [*of_servers(), values_of("role", "Role", "rolecall_process_up")],
        [_now(incidents), _ranks(), _progress(), _training(), _processes(), _nodes(), _incidents(), _nccl(), _gpus()],
    )


def _now(incidents: Sequence[Link]) -> PanelRow:
    up = f"rolecall_process_up{{{OF_ROLE}}}"
    return PanelRow(
        "Health",
        *open_incidents(incidents),
        watch_state(),
        agents(),
        numbers(
            "Ranks",
            "Processes of the job that exist, and processes that are gone and were not replaced.",
            PanelFormat(decimals=0, no_value="no ranks"),
            PanelQuery(f"sum(max by ({RANK}) ({up}))", "alive"),
            PanelQuery(f"sum(1 - max by ({RANK}) ({up}))", "gone"),
        ),
        widths=(4, 11, 3, 3, 3),
        height=6,
    )


def _ranks() -> PanelRow:
    style = PanelFormat(mappings=STATES, no_value="no ranks", links=(ROW_TO_REPLICA, ROW_TO_GPUS))
    return PanelRow(
        "Ranks",
        rows(
            "State of each rank",
            "As the kernel has it, the worst first. STOPPED: by a signal or a debugger. UNINTERRUPTIBLE for long: it "
            "waits for a disk, network file system or driver.",
            style,
            PanelQuery(f"sort_desc({rank_state()})", "state"),
            {"role": "role", "replica": "replica", "rank": "rank", "node": "node"},
        ),
        states(
            "States over time",
            "Of the selected roles; a rank that is GONE and comes back was restarted.",
            PanelFormat(mappings=STATES, no_value="no ranks", links=(SERIES_TO_REPLICA,)),
            PanelQuery(rank_state(), EACH),
        ),
        exits(OF_ROLE, "replica", "rank", "node"),
        widths=(9, 9, 6),
        height=9,
    )


def _progress() -> PanelRow:
    step = f"rolecall_process_step{{{OF_ROLE}}} >= 0"
    return PanelRow(
        "Progress (ranks that use the reporter)",
        rows(
            f"Longest without progress (top {FIRST})",
            "Seconds since a rank finished a unit of work; of a job that uses `reporter.step`, a step.",
            PanelFormat("s", limits=((None, BLUE),), no_value=NOT_REPORTED, links=(ROW_TO_REPLICA,)),
            PanelQuery(f"topk({FIRST}, {IDLE})", "since"),
            {"role": "role", "replica": "replica", "rank": "rank"},
        ),
        lines(
            "Step",
            "Newest step that a rank of the role works on, and the oldest. Far apart: a rank does not follow.",
            PanelFormat(decimals=0, least=None, no_value=NOT_REPORTED),
            PanelQuery(f"max by (role) ({alive(f'({step})')})", "{{role}} newest"),
            PanelQuery(f"min by (role) ({alive(f'({step})')})", "{{role}} oldest"),
        ),
        lines(
            "Step time of each rank",
            "Seconds per unit of work; of a job that uses `reporter.step`, a step. A line far above the others: a slow "
            "rank.",
            PanelFormat("s", no_value=NOT_REPORTED, links=(SERIES_TO_REPLICA,)),
            PanelQuery(UNIT_SECONDS, EACH),
        ),
    )


def _training() -> PanelRow:
    """Of ranks that report phases and values: an integration, or calls of the reporter."""
    inside = f"count_over_time(rolecall_process_phase{{{OF_ROLE}}}[$__rate_interval])"
    return PanelRow(
        "What a step does (ranks that report it)",
        lines(
            "Time by phase",
            "Share of the time that the ranks of a role spend in each phase. TRL: generate, score, and step for the "
            "rest. In wait and idle no progress is due.",
            PanelFormat("percentunit", most=1.0, no_value=NOT_REPORTED),
            PanelQuery(
                f"sum by (role, phase) ({inside}) / on (role) group_left () sum by (role) ({inside})",
                "{{role}} {{phase}}",
            ),
        ),
        lines(
            "Reward",
            "Of the newest step, as an integration or the job reports it; the mean of the ranks that do.",
            PanelFormat(least=None, no_value=NOT_REPORTED),
            PanelQuery(f"avg by (role) ({alive(f'rolecall_train_reward{{{OF_ROLE}}}')})", "{{role}}"),
        ),
        lines(
            "Loss",
            "Of the newest step, as an integration or the job reports it; the mean of the ranks that do.",
            PanelFormat(least=None, no_value=NOT_REPORTED),
            PanelQuery(f"avg by (role) ({alive(f'rolecall_train_loss{{{OF_ROLE}}}')})", "{{role}}"),
        ),
    )


def _processes() -> PanelRow:
    linked = (SERIES_TO_REPLICA,)
    memory = alive(f"rolecall_process_resident_memory_bytes{{{OF_ROLE}}}")
    return PanelRow(
        "Processes",
        lines(
            "CPU",
            "CPU cores in use per rank. Of peers with equal work, one far above or below the others is suspect.",
            PanelFormat(links=linked),
            PanelQuery(of_replicas("rolecall_process_cpu_seconds_total"), EACH),
        ),
        lines(
            "CPU wait",
            "Share of time in which the main thread was runnable but had no CPU: starved, not slow.",
            PanelFormat("percentunit", links=linked),
            PanelQuery(of_replicas("rolecall_process_main_run_delay_seconds_total"), EACH),
        ),
        lines(
            "Memory",
            "Resident memory per rank.",
            PanelFormat("bytes", links=linked),
            PanelQuery(f"max by (role, replica, rank) ({memory})", EACH),
        ),
    )


def _nodes() -> PanelRow:
    return PanelRow(
        "Nodes of the ranks",
        *host(only=ON_ITS_NODES),
        xids("XIDs of its nodes in the time range", only=ON_ITS_NODES),
        widths=(5, 5, 5, 3, 6),
    )


def _incidents() -> PanelRow:
    return PanelRow("Incidents", *incidents_over_time(), active_diagnoses(), widths=(12, 6, 6))


def _nccl() -> PanelRow:
    def of_communicators(metric: str, legend: str = "") -> PanelQuery:
        return PanelQuery(f"max by (communicator) ({metric}{ON_ITS_NODES})", f"{{{{communicator}}}}{legend}")

    style = PanelFormat(decimals=0, no_value=NO_RAS)
    return PanelRow(
        "NCCL (needs NCCL RAS)",
        lines(
            "Collectives behind",
            "Collectives by which the last rank of each communicator is behind the first. High and constant: the first "
            "ranks wait for the last.",
            style,
            of_communicators("rolecall_nccl_communicator_collectives_behind"),
        ),
        lines(
            "Missing ranks",
            "Ranks of each communicator that NCCL RAS could not reach, or considers dead.",
            style,
            of_communicators("rolecall_nccl_communicator_missing_ranks", " missing"),
            of_communicators("rolecall_nccl_communicator_dead_ranks", " dead"),
        ),
        widths=12,
        collapsed=True,
    )


def _gpus() -> PanelRow:
    def of_ranks(metric: str) -> PanelQuery:
        ranks = f"max by (gpu, {RANK}) (rolecall_gpu_rank{{{OF_ROLE}}} == 1)"
        return PanelQuery(
            f"{ranks} * on (node, gpu) group_left () max by (node, gpu) ({metric})", f"{EACH}, GPU {{{{gpu}}}}"
        )

    def style(unit: str, most: float | None = None) -> PanelFormat:
        return PanelFormat(unit, most=most, no_value="no rank uses a GPU", links=(SERIES_TO_REPLICA,))

    return PanelRow(
        "GPUs of the ranks",
        lines(
            "Utilization",
            "Share of time in which a kernel ran. A rank that spins in a collective counts as busy.",
            style("percentunit", 1.0),
            of_ranks("rolecall_gpu_utilization_ratio"),
        ),
        lines("Device memory", "Allocated on the GPU.", style("bytes"), of_ranks("rolecall_gpu_memory_used_bytes")),
        lines("Temperature", "Of the GPU.", style("celsius"), of_ranks("rolecall_gpu_temperature_celsius")),
        lines("Power", "Of the GPU.", style("watt"), of_ranks("rolecall_gpu_power_watts")),
        widths=6,
        collapsed=True,
    )
