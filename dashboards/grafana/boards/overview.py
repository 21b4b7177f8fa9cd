"""The run at a glance: open incidents, replicas, progress, lost time."""

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from rolecall.dashboards.grafana.board import OVERVIEW, PanelRow, board, of_servers
from rolecall.dashboards.grafana.links import ROW_TO_GPUS, ROW_TO_REPLICA, SERIES_TO_ROLE
from rolecall.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Link,
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

SUSPECT = "node, role, replica, fault"
ETTR_GOOD, ETTR_FAIR = 0.95, 0.85
"""ETTR from which on it is shown green, and yellow."""
WATCH_STATE = """
    (max(rolecall_watch_blind) * 4 > 0) or (max(rolecall_watch_paused) * 3 > 0)
    or (max(rolecall_watch_acting) * 2 > 0) or (max(rolecall_watch_acting) * 0 + 1)
"""
WATCH_STATES = {
    1: MappedValue("passive", YELLOW),
    2: MappedValue("active", GREEN),
    3: MappedValue("PAUSED", ORANGE),
    4: MappedValue("NO DATA", RED),
}
TOKENS = "max(rate(rolecall_run_tokens_total[$__rate_interval]))"


def overview(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to `rolecall dashboard`."""
    return board(
        OVERVIEW,
        "run overview",
        "Start here: open incidents, role health, progress, and lost time of this run.",
        of_servers(),
        [_now(incidents), _numbers(), _progress(), _time(), _incidents()],
    )


def open_now(incidents: Sequence[Link]) -> Panel:
    """Which suspects have an open incident, and for how long."""
    return rows(
        "Open incidents by suspect",
        "Suspects with an open incident, and how long it has been open. Links lead to the suspect, its peers and its "
        "node.",
        PanelFormat(unit="s", limits=((None, RED),), no_value="none", links=(ROW_TO_REPLICA, ROW_TO_GPUS, *incidents)),
        PanelQuery(f"time() - max by ({SUSPECT}) (rolecall_incident_opened_timestamp_seconds)", "open for"),
        {"fault": "fault", "role": "role", "replica": "replica", "node": "node"},
    )


def _now(incidents: Sequence[Link]) -> PanelRow:
    at_work = 'sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))'
    wanted = "max by (role) (rolecall_replicas_wanted)"
    return PanelRow(
        "Health",
        6,
        (4, 12, 8),
        [
            numbers(
                "Open incidents",
                "In any state: diagnosed, planned, awaiting approval, acting, verifying.",
                PanelFormat(
                    unit="none",
                    mappings={0: MappedValue("none", GREEN)},
                    limits=((None, GREEN), (1, RED)),
                    no_value="no watch",
                    links=incidents,
                ),
                PanelQuery("sum(max by (state) (rolecall_incidents_open))"),
            ),
            open_now(incidents),
            bars(
                "Replicas serving",
                "Share of the desired replicas of each role that are ready or serving. The link leads to the role.",
                PanelFormat(
                    unit="percentunit",
                    most=1.0,
                    limits=((None, RED), (0.5, ORANGE), (1.0, GREEN)),
                    mappings={1: MappedValue("all", GREEN)},
                    links=(SERIES_TO_ROLE,),
                ),
                PanelQuery(f"({at_work} or {wanted} * 0) / ({wanted} > 0)", "{{role}}"),
            ),
        ],
    )


def _numbers() -> PanelRow:
    return PanelRow(
        "Key figures",
        4,
        (4, 4, 4, 3, 3, 3, 3),
        [
            numbers(
                "Plans awaiting approval",
                "Use `rolecall approve DIGEST` or the Operations page of `rolecall dashboard`. They expire at their "
                "deadline.",
                PanelFormat(unit="none", mappings={0: MappedValue("none", GREEN)}, limits=((None, GREEN), (1, ORANGE))),
                PanelQuery("max(rolecall_plans_waiting)"),
            ),
            numbers(
                "rolecall",
                """active: may act. passive: another watch holds the lease, or mode observe. PAUSED: by an operator. NO DATA:
                it cannot diagnose.""",  # noqa: E501
                PanelFormat(unit="none", mappings=WATCH_STATES, no_value="no watch"),
                PanelQuery(WATCH_STATE),
            ),
            numbers(
                "Step",
                "Latest committed optimizer step, and the number of steps that the job asks for.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery("max(rolecall_run_step)", "committed"),
                PanelQuery("max(rolecall_run_steps_wanted)", "wanted"),
            ),
            numbers(
                "Reward",
                "Mean reward of the latest committed step.",
                PanelFormat(unit="none", decimals=3, least=None),
                PanelQuery("max(rolecall_run_reward)"),
                trend=True,
            ),
            numbers(
                "Tokens per second",
                "In committed steps.",
                PanelFormat(unit="short", decimals=0),
                PanelQuery(TOKENS),
                trend=True,
            ),
            numbers(
                "ETTR",
                "Effective training time ratio so far: effective seconds over training seconds.",
                PanelFormat(
                    unit="percentunit",
                    decimals=1,
                    most=1.0,
                    limits=((None, RED), (ETTR_FAIR, YELLOW), (ETTR_GOOD, GREEN)),
                ),
                PanelQuery("max(rolecall_run_ettr_ratio)"),
            ),
            numbers(
                "Lost time",
                "Training time lost to faults so far.",
                PanelFormat(unit="s", decimals=0),
                PanelQuery("sum(max by (role, fault) (rolecall_run_lost_seconds))"),
            ),
        ],
    )


def _progress() -> PanelRow:
    return PanelRow(
        "Progress",
        8,
        (8, 8, 8, 8, 8, 8),
        [
            lines(
                "Reward and loss",
                "Of committed steps. If it drops without an incident, check the role trainer.",
                PanelFormat(unit="none", least=None, decimals=3),
                PanelQuery("max(rolecall_run_reward)", "reward"),
                PanelQuery("max(rolecall_run_loss)", "loss"),
            ),
            lines(
                "Tokens per second",
                "In committed steps.",
                PanelFormat(unit="short"),
                PanelQuery(TOKENS, "tokens per second"),
            ),
            lines(
                "Step time",
                "Of the latest committed step. A step that a fault interrupted takes long.",
                PanelFormat(unit="s"),
                PanelQuery("max(rolecall_run_step_seconds)", "step"),
            ),
            lines(
                "Steps",
                "Committed steps, and interruptions by faults. Flat: training makes no progress.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery("max(rolecall_run_step)", "committed"),
                PanelQuery("max(rolecall_run_steps_interrupted_total)", "interruptions"),
            ),
            lines(
                "Policy staleness",
                "Largest number of versions between the trained policy and one that generated tokens.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max(rolecall_run_staleness)", "staleness"),
            ),
            lines(
                "Replicas by role",
                "Ready or serving replicas by role.",
                PanelFormat(unit="none", decimals=0, links=(SERIES_TO_ROLE,)),
                PanelQuery(
                    'sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))', "{{role}}"
                ),
            ),
        ],
    )


def _time() -> PanelRow:
    return PanelRow(
        "Time accounting",
        8,
        (8, 8, 8),
        [
            lines(
                "ETTR",
                "Effective training time ratio so far.",
                PanelFormat(unit="percentunit", most=1.0, limits=((None, RED), (ETTR_GOOD, GREEN))),
                PanelQuery("max(rolecall_run_ettr_ratio)", "ETTR"),
            ),
            bars(
                "Lost time by role and fault",
                "Training time lost to each fault. Lost and effective time add up to the training time.",
                PanelFormat(unit="s", limits=((None, ORANGE),), links=(SERIES_TO_ROLE,)),
                PanelQuery("max by (role, fault) (rolecall_run_lost_seconds)", "{{role}}: {{fault}}"),
            ),
            lines(
                "Training time",
                "Effective and lost seconds, stacked.",
                PanelFormat(unit="s"),
                PanelQuery("max(rolecall_run_effective_seconds)", "effective"),
                PanelQuery("sum(max by (role, fault) (rolecall_run_lost_seconds))", "lost"),
                stacked=True,
            ),
        ],
    )


def _incidents() -> PanelRow:
    return PanelRow(
        "Recent incidents",
        8,
        (12, 6, 6),
        [
            states(
                "Incidents over time",
                "Each row is a suspect with its fault. OPEN from detection to close.",
                PanelFormat(unit="none", mappings={0: MappedValue("closed", GREEN), 1: MappedValue("OPEN", RED)}),
                PanelQuery("max by (replica, fault) (rolecall_incident_open)", "{{replica}} {{fault}}"),
            ),
            rows(
                "Incidents in the time range",
                "Opened in the time range, by role and fault.",
                PanelFormat(unit="none", limits=((None, BLUE),), no_value="none"),
                PanelQuery(grown("rolecall_incidents_opened_total", "role, fault") + " > 0", "incidents"),
                {"role": "role", "fault": "fault"},
            ),
            numbers(
                "Latest incident: time to detect and to recover",
                "From onset to detection, and from detection until the replacement makes progress.",
                PanelFormat(unit="s", decimals=1),
                PanelQuery("max by (role) (rolecall_incident_newest_finding_seconds)", "{{role}} detected"),
                PanelQuery("max by (role) (rolecall_incident_newest_cure_seconds)", "{{role}} resolved"),
            ),
        ],
    )
