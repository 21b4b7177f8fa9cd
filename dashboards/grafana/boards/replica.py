"""One replica against the band of its peers: is it really it?"""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import REPLICA, Choice, PanelRow, board, of_servers, values_of
from rolecall.dashboards.grafana.boards.roles import STATE_WORDS, replica_state
from rolecall.dashboards.grafana.links import ROW_TO_GPUS, ROW_TO_NETWORK
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Link,
    PanelFormat,
    PanelQuery,
    Word,
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
    "start": Word("start", YELLOW),
    "idle": Word("idle", GREY),
    "wait": Word("waits", GREY),
    "paused": Word("paused", GREY),
    "compute": Word("compute", GREEN),
    "reduce": Word("in a collective", BLUE),
    "optimizer": Word("optimizer", GREEN),
    "publish": Word("publish", GREEN),
    "copy": Word("copy", YELLOW),
    "checkpoint": Word("checkpoint", BLUE),
    "generate": Word("generate", GREEN),
    "update": Word("update", BLUE),
    "score": Word("score", GREEN),
}
"""As core/telemetry.py has them; another phase shows as none."""
KERNEL_STATES = {
    "R": Word("runs", GREEN),
    "S": Word("sleeps", GREY),
    "D": Word("WAITS FOR A DEVICE", ORANGE),
    "T": Word("STOPPED", RED),
    "Z": Word("DEAD", RED),
    "X": Word("DEAD", RED),
    "?": Word("unknown", YELLOW),
}
"""As the kernel names them; `t` (traced) is among those that show as none."""


def replica(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to rolecall's own dashboard."""
    return board(
        REPLICA,
        "one replica",
        "A replica against the band of its peers (the others of its role): its pace, its waits, its host.",
        [
            *of_servers(),
            values_of("role", "Role", "rolecall_process_up", Choice.ONE),
            values_of("replica", "Replica", 'rolecall_process_up{role=~"$role"}', Choice.ONE),
        ],
        [_now(incidents), _pace(), _waits(), _engine()],
    )


def _coded(metric: str, words: Mapping[str, Word], label: str) -> str:
    """A 1-for-the-state metric as a number: the state's place, from 1."""
    each = (f'{metric}{{{OWN},{label}="{name}"}} * {n}' for n, name in enumerate(words, start=1))
    return f"max by (rank) ({alive('(' + ' or '.join(each) + ')')})"


def _words(words: Mapping[str, Word]) -> dict[int, Word]:
    return dict(enumerate(words.values(), start=1))


def _now(incidents: Sequence[Link]) -> PanelRow:
    where = f"max by (node, role, replica, rank) (rolecall_process_incarnation{{{OWN}}})"
    return PanelRow(
        "Now",
        6,
        (4, 4, 4, 12, 12, 12),
        [
            numbers(
                "State",
                "As the run has it. LOST: fenced, it gets no work.",
                PanelFormat(unit="none", words=STATE_WORDS, links=incidents),
                PanelQuery(replica_state(OWN), "{{replica}}"),
            ),
            numbers(
                "Process",
                "Of each rank: does its process exist.",
                PanelFormat(unit="none", words={0: Word("GONE", RED), 1: Word("exists", GREEN)}),
                PanelQuery(f"max by (rank) (rolecall_process_up{{{OWN}}})", "rank {{rank}}"),
            ),
            numbers(
                "Policy version",
                "Version that the process holds; -1: none yet.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery(_values("rolecall_process_policy_version")[0], "rank {{rank}}"),
            ),
            rows(
                "Where it runs",
                "Nodes that have a process of it (one that was replaced stays for a while), and which start it is.",
                PanelFormat(unit="none", decimals=0, links=(ROW_TO_GPUS, ROW_TO_NETWORK)),
                PanelQuery(where, "incarnation"),
                {"node": "node", "replica": "replica", "rank": "rank"},
            ),
            states(
                "Phase",
                "What each rank does. In a collective it waits for its peers: the one that is not in it is the suspect.",
                PanelFormat(unit="none", words=_words(PHASES)),
                PanelQuery(_coded("rolecall_process_phase", PHASES, "phase"), "rank {{rank}}"),
            ),
            states(
                "The kernel's state of it",
                "STOPPED: by a signal or a debugger. WAITS FOR A DEVICE for long: a disk, a network file system, a driver.",
                PanelFormat(unit="none", words=_words(KERNEL_STATES)),
                PanelQuery(_coded("rolecall_process_state", KERNEL_STATES, "state"), "rank {{rank}}"),
            ),
        ],
    )


def _rates(metric: str) -> tuple[str, str]:
    """Of this replica's ranks, and of each of its peers'."""
    own = f"max by (rank) (rate({metric}{{{OWN}}}[$__rate_interval]))"
    return own, f"max by (replica, rank) (rate({metric}{{{PEERS}}}[$__rate_interval]))"


def _values(metric: str) -> tuple[str, str]:
    own, peers = alive(f"{metric}{{{OWN}}}"), alive(f"{metric}{{{PEERS}}}")
    return f"max by (rank) ({own})", f"max by (replica, rank) ({peers})"


def _pace() -> PanelRow:
    busy, units = _rates("rolecall_process_busy_seconds_total"), _rates("rolecall_process_work_units_total")
    since = _values("rolecall_process_progress_timestamp_seconds")
    return PanelRow(
        "Pace, against its peers",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band(
                "Seconds a unit of work takes",
                "Microbatch, engine step or scored sample. Above the band for longer than a moment: it is slow.",
                PanelFormat(unit="s"),
                f"{busy[0]} / ({units[0]} > 0)",
                f"{busy[1]} / ({units[1]} > 0)",
            ),
            band(
                "Units of work per second",
                "0 while its peers work: it stands still.",
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
                "Since the last progress",
                "Seconds since a unit of work was finished.",
                PanelFormat(unit="s"),
                f"time() - {since[0]}",
                f"time() - {since[1]}",
            ),
            band(
                "Ticks of its interpreter",
                "Per second, of a side thread. 0 while the process exists: something holds the interpreter, or it is "
                "stopped.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_process_beats_total"),
            ),
            band(
                "Requests held",
                "Requests that the engine works on (rollout).",
                PanelFormat(unit="none", decimals=0),
                *_values("rolecall_process_requests_active"),
            ),
        ],
    )


def _waits() -> PanelRow:
    share = PanelFormat(unit="percentunit")
    return PanelRow(
        "Its host, against its peers'",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band("CPU", "CPUs that it uses.", PanelFormat(unit="none"), *_rates("rolecall_process_cpu_seconds_total")),
            band(
                "Waits for a CPU",
                "Share of time in which its working thread could run and got no CPU: starved, not slow.",
                share,
                *_rates("rolecall_process_main_run_delay_seconds_total"),
            ),
            band(
                "Stopped by its CPU quota",
                "Share of time in which its cgroup was throttled.",
                share,
                *_rates("rolecall_process_throttled_seconds_total"),
            ),
            band("Memory", "Resident.", PanelFormat(unit="bytes"), *_values("rolecall_process_resident_memory_bytes")),
            band(
                "Page faults that read from disk",
                "Per second. Many: memory is short.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_process_major_faults_total"),
            ),
            rows(
                "Ends of its processes in the time shown",
                "What ended each: finished is well; killed, crashed, oom and exception are not.",
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
        "Its engine, where it is vLLM",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            band(
                "To the first token",
                "Mean seconds from a request's arrival.",
                PanelFormat(unit="s"),
                *mean("rolecall_vllm_first_token_seconds_total", "rolecall_vllm_first_tokens_total"),
            ),
            band(
                "From token to token",
                "Mean seconds. Above the band: the engine is slow.",
                PanelFormat(unit="s"),
                *mean("rolecall_vllm_token_gap_seconds_total", "rolecall_vllm_token_gaps_total"),
            ),
            lines(
                "Requests",
                "That the engine works on, and that wait for a place in it.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(f"max by (rank) (rolecall_vllm_requests_running{{{OWN}}})", "running, rank {{rank}}"),
                PanelQuery(f"max by (rank) (rolecall_vllm_requests_waiting{{{OWN}}})", "waiting, rank {{rank}}"),
            ),
            band(
                "KV cache in use",
                "Share of blocks. Full: requests are put back and computed again.",
                PanelFormat(unit="percentunit", most=1.0),
                "max by (rank) (rolecall_vllm_kv_cache_used_ratio{" + OWN + "})",
                "max by (replica, rank) (rolecall_vllm_kv_cache_used_ratio{" + PEERS + "})",
            ),
            band(
                "Requests put back",
                "Per second, to make room in the KV cache.",
                PanelFormat(unit="cps"),
                *_rates("rolecall_vllm_preemptions_total"),
            ),
            numbers(
                "Engine",
                "Does its page of metrics answer; does it sleep (its weights or KV cache given up).",
                PanelFormat(unit="none", words={0: Word("NO", ORANGE), 1: Word("yes", GREEN)}),
                PanelQuery(f"max by (rank) (rolecall_vllm_up{{{OWN}}})", "answers, rank {{rank}}"),
                PanelQuery(f"max by (rank) (rolecall_vllm_awake{{{OWN}}})", "awake, rank {{rank}}"),
            ),
        ],
        collapsed=True,
    )
