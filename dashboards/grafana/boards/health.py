"""The health of rolecall itself: detection and recovery performance, and overhead."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import HEALTH, PanelRow, board, of_servers
from rolecall.dashboards.grafana.boards.run import NONE_YET, active_diagnoses, agents, watch_state
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    MappedValue,
    PanelFormat,
    PanelQuery,
    bars,
    lines,
    numbers,
    rows,
    states,
)
from rolecall.dashboards.grafana.promql import grown

WATCH = "{{instance}}"
OBSERVED_OLD_SECONDS = 5.0
"""Detectors tolerate samples up to this age; older ones delay detection."""
ROUND_LONG_SECONDS = 1.0
"""An agent samples once per second by default; a longer round skips one."""


def health() -> Dashboard:
    return board(
        HEALTH,
        "rolecall health",
        "Health of the watch and the agents, detection and recovery times, actions, and overhead.",
        of_servers(),
        [_health(), _detection(), _recovery(), _overhead(), _agents()],
    )


def _per_watch(metric: str) -> str:
    return f"max by (instance) ({metric})"


def _per_watch_rate(metric: str) -> str:
    return f"max by (instance) (rate({metric}[$__rate_interval]))"


def _health() -> PanelRow:
    many = ((None, GREEN), (1, ORANGE))
    return PanelRow(
        "Health",
        watch_state(),
        rows(
            "Watches",
            "Watches of the run. One holds the lease and may act; the others are on standby.",
            PanelFormat(mappings={0: MappedValue("standby", BLUE), 1: MappedValue("active", GREEN)}),
            PanelQuery("max by (instance) (rolecall_watch_acting)", "role"),
            {"instance": "watch"},
        ),
        rows(
            "Mode",
            "observe: takes no action. approve: an operator approves each plan. act: acts on its own within its "
            "guards.",
            PanelFormat(mappings={1: MappedValue("active", GREEN)}),
            PanelQuery("max by (instance, mode) (rolecall_watch_mode == 1)", "is"),
            {"instance": "watch", "mode": "mode"},
        ),
        numbers(
            "Time since last tick",
            "A watch without a tick for a minute hangs or is down.",
            PanelFormat("s", limits=((None, GREEN), (15, ORANGE), (60, RED))),
            PanelQuery(f"time() - {_per_watch('rolecall_watch_tick_timestamp_seconds')}", WATCH),
        ),
        agents(),
        numbers(
            "Problems",
            "Incidents that cannot be read or whose handling fails repeatedly, and notifications that were not "
            "delivered.",
            PanelFormat(limits=many),
            PanelQuery("max(rolecall_incidents_broken)", "unreadable incidents"),
            PanelQuery("max(rolecall_watch_unhandled)", "handling fails"),
            PanelQuery("max(rolecall_watch_notifications_failed_total)", "undelivered notifications"),
        ),
        states(
            "Detection",
            "While the data source or the detectors fail, nothing is diagnosed.",
            PanelFormat(mappings={0: MappedValue("up", GREEN), 1: MappedValue("NO DATA", RED)}),
            PanelQuery(_per_watch("rolecall_watch_blind"), WATCH),
        ),
        lines(
            "Failed ticks",
            "Ticks that ended with an error since the watch started.",
            PanelFormat(decimals=0, limits=many),
            PanelQuery(_per_watch("rolecall_watch_tick_failures_total"), WATCH),
        ),
        widths=(4, 4, 4, 4, 4, 4, 12, 12),
        height=6,
    )


def _detection() -> PanelRow:
    def mean(what: str, count: str) -> str:
        return f"max by (role) ({what}) / (max by (role) ({count}) > 0)"

    return PanelRow(
        "Detection and recovery",
        bars(
            "Time to detect",
            "From onset to detection: mean over the incidents of the run, by role.",
            PanelFormat("s", decimals=1, no_value=NONE_YET),
            PanelQuery(
                mean("rolecall_incident_detection_seconds_total", "rolecall_incident_detections_total"), "{{role}}"
            ),
        ),
        bars(
            "Time to recover",
            "From detection until the replacement serves and makes progress: mean over resolved incidents, by role. A "
            "watch that observes resolves none.",
            PanelFormat("s", decimals=1, no_value=NONE_YET),
            PanelQuery(
                mean("rolecall_incident_resolution_seconds_total", "rolecall_incident_resolutions_total"), "{{role}}"
            ),
        ),
        bars(
            "Incident outcomes",
            """resolved: recovered by an action. tolerated: no action was worth its cost. self_recovered: the fault ended
            without an action. ended: the run ended before the fault. escalated: on-call was paged.""",  # noqa: E501
            PanelFormat(decimals=0),
            PanelQuery("max by (outcome) (rolecall_incidents_closed_total)", "{{outcome}}"),
        ),
        bars(
            "Detectors",
            "Detectors that contributed to diagnoses.",
            PanelFormat(decimals=0, no_value=NONE_YET),
            PanelQuery("max by (detector) (rolecall_incidents_found_total)", "{{detector}}"),
        ),
        active_diagnoses(),
        lines(
            "Open incidents",
            "By state. `proposed`: awaits an operator's approval.",
            PanelFormat(decimals=0),
            PanelQuery("max by (state) (rolecall_incidents_open)", "{{state}}"),
            stacked=True,
        ),
        numbers(
            "Reviewed diagnoses",
            "Diagnoses that operators reviewed as right or wrong (`rolecall review`).",
            PanelFormat(decimals=0),
            PanelQuery("max by (verdict) (rolecall_diagnoses_reviewed)", "{{verdict}}"),
        ),
        widths=(6, 6, 6, 6, 8, 8, 8),
    )


def _recovery() -> PanelRow:
    return PanelRow(
        "Plans and actions",
        bars(
            "Plans",
            "Plans by action.",
            PanelFormat(decimals=0, no_value=NONE_YET),
            PanelQuery("max by (action) (rolecall_plans_total) > 0", "{{action}}"),
        ),
        bars(
            "Actions",
            "By outcome. refused, died, not_started and no_progress are failures.",
            PanelFormat(decimals=0, no_value=NONE_YET),
            PanelQuery("max by (action, outcome) (rolecall_actions_total) > 0", "{{action}}: {{outcome}}"),
        ),
        rows(
            "Plans blocked by guards in the time range",
            "A guard that often blocks is too strict, or is protecting the run.",
            PanelFormat(decimals=0, limits=((None, YELLOW),), no_value="none"),
            PanelQuery(grown("rolecall_plans_held_total", "guard") + " > 0", "times"),
            {"guard": "guard"},
        ),
        rows(
            "Decisions on proposed plans in the time range",
            "expired: no one decided before the deadline.",
            PanelFormat(decimals=0, limits=((None, BLUE),), no_value="none"),
            PanelQuery(grown("rolecall_plans_decided_total", "decision") + " > 0", "plans"),
            {"decision": "decision"},
        ),
        lines(
            "Evictions in the last hour",
            "Replicas evicted by actions. At the limit rolecall pages on-call instead.",
            PanelFormat(decimals=0),
            PanelQuery("max(rolecall_evictions_last_hour)", "evictions"),
            PanelQuery("max(rolecall_evictions_limit)", "limit"),
        ),
        numbers(
            "Pages, quarantine, approvals",
            "Pages to on-call, nodes in quarantine, and plans that await approval.",
            PanelFormat(decimals=0),
            PanelQuery("max(rolecall_oncall_pages_total)", "pages"),
            PanelQuery("max(rolecall_nodes_quarantined)", "nodes in quarantine"),
            PanelQuery("max(rolecall_plans_waiting)", "plans awaiting approval"),
        ),
        lines(
            "Events in the journal",
            "Events per second by kind.",
            PanelFormat("cps"),
            PanelQuery("max by (kind) (rate(rolecall_journal_events_total[$__rate_interval])) > 0", "{{kind}}"),
        ),
        widths=(6, 6, 6, 6, 8, 8, 8),
    )


def _overhead() -> PanelRow:
    ticks = _per_watch_rate("rolecall_watch_ticks_total")
    return PanelRow(
        "Overhead of the watch",
        lines(
            "Tick duration",
            "Mean without idle time, and the share of the detectors.",
            PanelFormat("s"),
            PanelQuery(f"{_per_watch_rate('rolecall_watch_tick_busy_seconds_total')} / ({ticks} > 0)", WATCH),
            PanelQuery(
                f"{_per_watch_rate('rolecall_watch_detection_seconds_total')} / ({ticks} > 0)", f"{WATCH} detectors"
            ),
        ),
        lines(
            "Telemetry age",
            "Age of the oldest agent response in the latest poll. It adds to the detection time.",
            PanelFormat("s", limits=((None, GREEN), (OBSERVED_OLD_SECONDS, ORANGE))),
            PanelQuery(_per_watch("rolecall_watch_observed_age_seconds"), WATCH),
        ),
        lines(
            "CPU of the watch",
            "CPU cores in use.",
            PanelFormat(),
            PanelQuery(_per_watch_rate("rolecall_watch_cpu_seconds_total"), WATCH),
        ),
        lines(
            "Memory of the watch",
            "Resident memory.",
            PanelFormat("bytes"),
            PanelQuery(_per_watch("rolecall_watch_resident_memory_bytes"), WATCH),
        ),
        lines("Ticks", "Per second.", PanelFormat("cps"), PanelQuery(ticks, WATCH)),
        lines(
            "Monitored processes",
            "Processes of the job. Fewer than the job has: an agent is missing or does not see them.",
            PanelFormat(decimals=0),
            PanelQuery(_per_watch("rolecall_watch_processes"), WATCH),
        ),
        widths=(6, 6, 6, 6, 12, 12),
    )


def _agents() -> PanelRow:
    probes = "min by (node, probe) (rolecall_probe_up)"
    return PanelRow(
        "Agents",
        lines(
            "CPU of agents",
            "CPU cores per agent: maximum and median.",
            PanelFormat(),
            PanelQuery("max(rate(rolecall_agent_cpu_seconds_total[$__rate_interval]))", "highest"),
            PanelQuery("quantile(0.5, rate(rolecall_agent_cpu_seconds_total[$__rate_interval]))", "median"),
        ),
        lines(
            "Memory of agents",
            "Resident memory: maximum and median.",
            PanelFormat("bytes"),
            PanelQuery("max(rolecall_agent_resident_memory_bytes)", "highest"),
            PanelQuery("quantile(0.5, rolecall_agent_resident_memory_bytes)", "median"),
        ),
        lines(
            "Duration of a collection round",
            "Maximum and median.",
            PanelFormat("s", limits=((None, GREEN), (ROUND_LONG_SECONDS, ORANGE))),
            PanelQuery("max(rolecall_agent_round_seconds)", "longest"),
            PanelQuery("quantile(0.5, rolecall_agent_round_seconds)", "median"),
        ),
        rows(
            "Failing probes",
            "Data that agents are configured to read and cannot; `rolecall doctor` on the node shows why.",
            PanelFormat(mappings={0: MappedValue("FAILS", ORANGE)}, no_value="none"),
            PanelQuery(f"{probes} == 0", "probe is"),
            {"node": "node", "probe": "probe"},
        ),
        lines(
            "Lost samples and events",
            "Samples overwritten in the ring buffer before they were read, and events that could not be stored, "
            "per second.",
            PanelFormat("cps"),
            PanelQuery("max(rate(rolecall_agent_samples_lost_total[$__rate_interval]))", "samples, worst agent"),
            PanelQuery("max(rate(rolecall_agent_events_lost_total[$__rate_interval]))", "events, worst agent"),
        ),
        rows(
            "Versions",
            "Agents by version.",
            PanelFormat(decimals=0),
            PanelQuery("count by (version) (rolecall_agent_build_info)", "agents"),
            {"version": "version"},
        ),
    )
