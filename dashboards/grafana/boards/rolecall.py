"""rolecall itself: is it awake, how well does it find and cure, and what does it cost."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from rolecall.dashboards.grafana.board import ITSELF, PanelRow, board, of_servers
from rolecall.dashboards.grafana.boards.overview import MAY_ACT, MAY_ACT_WORDS
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    PanelFormat,
    PanelQuery,
    Word,
    bars,
    lines,
    numbers,
    rows,
    states,
)
from rolecall.dashboards.grafana.promql import grown

WATCH = "{{instance}}"
OBSERVED_OLD_SECONDS = 5.0
"""The detectors live with samples this old; older ones delay findings."""
ROUND_LONG_SECONDS = 1.0
"""An agent samples once a second by default: a longer round skips one."""


def itself() -> Dashboard:
    return board(
        ITSELF,
        "rolecall itself",
        "The watch and the agents: awake, quick, cheap; findings, plans and actions, and what people had to do.",
        of_servers(),
        [_awake(), _findings(), _acting(), _cost(), _agents()],
    )


def _per_watch(metric: str) -> str:
    return f"max by (instance) ({metric})"


def _per_watch_rate(metric: str) -> str:
    return f"max by (instance) (rate({metric}[$__rate_interval]))"


def _awake() -> PanelRow:
    many = ((None, GREEN), (1, ORANGE))
    return PanelRow(
        "Is it awake?",
        6,
        (4, 4, 4, 4, 4, 4, 12, 12),
        [
            numbers(
                "rolecall",
                """acts; only looks (another watch acts, or its mode is to observe); PAUSED by a person; BLIND: it cannot
                diagnose.""",
                PanelFormat(unit="none", words=MAY_ACT_WORDS, no_value="no watch"),
                PanelQuery(MAY_ACT),
            ),
            rows(
                "Watches",
                "Each watch of the run, its version; one acts, the others stand by.",
                PanelFormat(unit="none", words={0: Word("stands by", BLUE), 1: Word("acts", GREEN)}),
                PanelQuery("max by (instance) (rolecall_watch_acting)", "role"),
                {"instance": "watch"},
            ),
            rows(
                "Mode",
                "observe: it never acts; approve: a person approves each plan; act: it acts within its guards.",
                PanelFormat(unit="none", words={1: Word("in force", GREEN)}),
                PanelQuery("max by (instance, mode) (rolecall_watch_mode == 1)", "is"),
                {"instance": "watch", "mode": "mode"},
            ),
            numbers(
                "Since the newest tick",
                "A watch that has not ticked for a minute hangs, or is gone.",
                PanelFormat(unit="s", limits=((None, GREEN), (15, ORANGE), (60, RED))),
                PanelQuery(f"time() - {_per_watch('rolecall_watch_tick_timestamp_seconds')}", WATCH),
            ),
            numbers(
                "Agents",
                "That the watch reaches, and that it does not. What an unreachable agent's node does is unknown.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (state) (rolecall_watch_agents)", "{{state}}"),
            ),
            numbers(
                "Needs a look",
                "Incidents that could not be read, whose handling fails again and again, and messages that reached nobody.",
                PanelFormat(unit="none", limits=many),
                PanelQuery("max(rolecall_incidents_broken)", "unreadable incidents"),
                PanelQuery("max(rolecall_watch_unhandled)", "failing again and again"),
                PanelQuery("max(rolecall_watch_calls_failed_total)", "messages undelivered"),
            ),
            states(
                "Blind",
                "While source or detectors fail nothing is diagnosed.",
                PanelFormat(unit="none", words={0: Word("sees", GREEN), 1: Word("BLIND", RED)}),
                PanelQuery(_per_watch("rolecall_watch_blind"), WATCH),
            ),
            lines(
                "Ticks that failed",
                "How often a tick ended with an error, since the watch started; the watch goes on.",
                PanelFormat(unit="none", decimals=0, limits=many),
                PanelQuery(_per_watch("rolecall_watch_tick_failures_total"), WATCH),
            ),
        ],
    )


def _findings() -> PanelRow:
    def mean(what: str, count: str) -> str:
        return f"max by (role) ({what}) / (max by (role) ({count}) > 0)"

    return PanelRow(
        "Finding and recovering",
        8,
        (6, 6, 6, 6, 8, 8, 8),
        [
            bars(
                "From onset to finding",
                "Mean over the incidents of the run, by role.",
                PanelFormat(unit="s", decimals=1),
                PanelQuery(
                    mean("rolecall_incident_finding_seconds_total", "rolecall_incident_findings_total"), "{{role}}"
                ),
            ),
            bars(
                "From finding to cure",
                "Mean over the resolved incidents of the run, by role; resolved: the replacement serves and was seen to work.",
                PanelFormat(unit="s", decimals=1),
                PanelQuery(mean("rolecall_incident_cure_seconds_total", "rolecall_incident_cures_total"), "{{role}}"),
            ),
            bars(
                "How incidents ended",
                """resolved; tolerated: nothing was worth doing; observed: we may not act; refuted: the fault ended before we
                acted; gave_up: a person was called.""",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (outcome) (rolecall_incidents_closed_total)", "{{outcome}}"),
            ),
            bars(
                "Who found them",
                "Detectors that had a part in diagnoses.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (detector) (rolecall_incidents_found_total)", "{{detector}}"),
            ),
            lines(
                "Diagnoses that stand",
                "By class of fault, as the detectors see it now.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (fault) (rolecall_watch_diagnoses) > 0", "{{fault}}"),
            ),
            lines(
                "Open incidents",
                "By state. One that stays `proposed` waits for a person.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (state) (rolecall_incidents_open)", "{{state}}"),
                stacked=True,
            ),
            numbers(
                "What people say of diagnoses",
                "Incidents that a person marked right or wrong (`rolecall mark`).",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max by (verdict) (rolecall_diagnoses_marked)", "{{verdict}}"),
            ),
        ],
    )


def _acting() -> PanelRow:
    return PanelRow(
        "Plans and actions",
        8,
        (6, 6, 6, 6, 8, 8, 8),
        [
            bars(
                "Plans",
                "Plans made, by action.",
                PanelFormat(unit="none", decimals=0, no_value="none yet"),
                PanelQuery("max by (action) (rolecall_plans_total) > 0", "{{action}}"),
            ),
            bars(
                "Actions",
                "By outcome: started; done; refused, died and no_progress are failures.",
                PanelFormat(unit="none", decimals=0, no_value="none yet"),
                PanelQuery("max by (action, outcome) (rolecall_actions_total) > 0", "{{action}}: {{outcome}}"),
            ),
            rows(
                "Plans held by a guard in the time shown",
                "A guard that holds often is set too tight, or saves you.",
                PanelFormat(unit="none", decimals=0, limits=((None, YELLOW),), no_value="none"),
                PanelQuery(grown("rolecall_plans_held_total", "guard") + " > 0", "times"),
                {"guard": "guard"},
            ),
            rows(
                "What became of plans that waited, in the time shown",
                "lapsed: nobody came before the deadline.",
                PanelFormat(unit="none", decimals=0, limits=((None, BLUE),), no_value="none"),
                PanelQuery(grown("rolecall_plans_decided_total", "decision") + " > 0", "plans"),
                {"decision": "decision"},
            ),
            lines(
                "Evictions within the last hour",
                "Replicas taken down by actions. At the limit a person is called instead.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max(rolecall_evictions_last_hour)", "evictions"),
                PanelQuery("max(rolecall_evictions_limit)", "limit"),
            ),
            numbers(
                "People and nodes",
                "How often a person was called, and how many nodes nothing is placed on.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max(rolecall_persons_called_total)", "calls"),
                PanelQuery("max(rolecall_nodes_quarantined)", "nodes in quarantine"),
                PanelQuery("max(rolecall_plans_waiting)", "plans that wait"),
            ),
            lines(
                "Events in the journal",
                "Written per second, by kind.",
                PanelFormat(unit="cps"),
                PanelQuery("max by (kind) (rate(rolecall_journal_events_total[$__rate_interval])) > 0", "{{kind}}"),
            ),
        ],
    )


def _cost() -> PanelRow:
    ticks = _per_watch_rate("rolecall_watch_ticks_total")
    return PanelRow(
        "The watch: quick and cheap?",
        8,
        (6, 6, 6, 6, 12, 12),
        [
            lines(
                "Duration of a tick",
                "Mean, without its wait for news; and of it what the detectors took.",
                PanelFormat(unit="s"),
                PanelQuery(f"{_per_watch_rate('rolecall_watch_tick_busy_seconds_total')} / ({ticks} > 0)", WATCH),
                PanelQuery(
                    f"{_per_watch_rate('rolecall_watch_judging_seconds_total')} / ({ticks} > 0)",
                    f"{WATCH} detectors",
                ),
            ),
            lines(
                "Age of what is judged",
                "Of the oldest of the agents' newest answers. It adds to the time to a finding.",
                PanelFormat(unit="s", limits=((None, GREEN), (OBSERVED_OLD_SECONDS, ORANGE))),
                PanelQuery(_per_watch("rolecall_watch_observed_age_seconds"), WATCH),
            ),
            lines(
                "CPU of the watch",
                "CPUs that it uses.",
                PanelFormat(unit="none"),
                PanelQuery(_per_watch_rate("rolecall_watch_cpu_seconds_total"), WATCH),
            ),
            lines(
                "Memory of the watch",
                "Resident.",
                PanelFormat(unit="bytes"),
                PanelQuery(_per_watch("rolecall_watch_resident_memory_bytes"), WATCH),
            ),
            lines(
                "Ticks",
                "Per second.",
                PanelFormat(unit="cps"),
                PanelQuery(ticks, WATCH),
            ),
            lines(
                "Processes that it knows",
                "Processes of the job. Fewer than the job has: an agent is missing, or does not see them.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery(_per_watch("rolecall_watch_processes"), WATCH),
            ),
        ],
    )


def _agents() -> PanelRow:
    probes = "min by (node, probe) (rolecall_probe_up)"
    return PanelRow(
        "Agents",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "CPU of agents",
                "CPUs that an agent uses: the most, and the median.",
                PanelFormat(unit="none"),
                PanelQuery("max(rate(rolecall_agent_cpu_seconds_total[$__rate_interval]))", "highest"),
                PanelQuery("quantile(0.5, rate(rolecall_agent_cpu_seconds_total[$__rate_interval]))", "median"),
            ),
            lines(
                "Memory of agents",
                "Resident: the most, and the median.",
                PanelFormat(unit="bytes"),
                PanelQuery("max(rolecall_agent_resident_memory_bytes)", "highest"),
                PanelQuery("quantile(0.5, rolecall_agent_resident_memory_bytes)", "median"),
            ),
            lines(
                "Duration of a sampling round",
                "The longest, and the median.",
                PanelFormat(unit="s", limits=((None, GREEN), (ROUND_LONG_SECONDS, ORANGE))),
                PanelQuery("max(rolecall_agent_round_seconds)", "longest"),
                PanelQuery("quantile(0.5, rolecall_agent_round_seconds)", "median"),
            ),
            rows(
                "Probes that cannot read",
                "What agents should read and cannot; `rolecall doctor` on the node says why.",
                PanelFormat(unit="none", words={0: Word("CANNOT READ", ORANGE)}, no_value="none"),
                PanelQuery(f"{probes} == 0", "probe is"),
                {"node": "node", "probe": "probe"},
            ),
            lines(
                "Lost on the way",
                "Samples that left the ring before anybody asked, and events that could not be kept, per second.",
                PanelFormat(unit="cps"),
                PanelQuery("max(rate(rolecall_agent_samples_lost_total[$__rate_interval]))", "samples, worst agent"),
                PanelQuery("max(rate(rolecall_agent_events_lost_total[$__rate_interval]))", "events, worst agent"),
            ),
            rows(
                "Versions",
                "How many agents run which version.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("count by (version) (rolecall_agent_build_info)", "agents"),
                {"version": "version"},
            ),
        ],
    )
