"""The run at a glance: what is wrong, who is at work, how it goes on, where the time went."""

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

SUSPECT = "node, role, replica, fault"
ETTR_GOOD, ETTR_FAIR = 0.95, 0.85
"""Of the time in which the run could have trained: from here on green, and yellow."""
MAY_ACT = """
    (max(rolecall_watch_blind) * 4 > 0) or (max(rolecall_watch_paused) * 3 > 0)
    or (max(rolecall_watch_acting) * 2 > 0) or (max(rolecall_watch_acting) * 0 + 1)
"""
MAY_ACT_WORDS = {
    1: Word("only looks", YELLOW),
    2: Word("acts", GREEN),
    3: Word("PAUSED", ORANGE),
    4: Word("BLIND", RED),
}
TOKENS = "max(rate(rolecall_run_tokens_total[$__rate_interval]))"


def overview(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to rolecall's own dashboard."""
    return board(
        OVERVIEW,
        "run overview",
        "Start here: open incidents, health of roles, progress, and where the time of this run went.",
        of_servers(),
        [_now(incidents), _numbers(), _progress(), _time(), _incidents()],
    )


def open_now(incidents: Sequence[Link]) -> Panel:
    """Which suspects have an open incident, and for how long."""
    return rows(
        "What is open",
        """Suspects with an open incident and how long it has been open. The links show the suspect against its peers, and
        its node.""",
        PanelFormat(
            unit="s", limits=((None, RED),), no_value="nothing is open", links=(ROW_TO_REPLICA, ROW_TO_GPUS, *incidents)
        ),
        PanelQuery(f"time() - max by ({SUSPECT}) (rolecall_incident_opened_timestamp_seconds)", "open for"),
        {"fault": "fault", "role": "role", "replica": "replica", "node": "node"},
    )


def _now(incidents: Sequence[Link]) -> PanelRow:
    at_work = 'sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))'
    wanted = "max by (role) (rolecall_replicas_wanted)"
    return PanelRow(
        "Is something wrong?",
        6,
        (4, 12, 8),
        [
            numbers(
                "Open incidents",
                "In any state: found, planned, waiting for a person, acted upon, being verified.",
                PanelFormat(
                    unit="none",
                    words={0: Word("none", GREEN)},
                    limits=((None, GREEN), (1, RED)),
                    no_value="no watch",
                    links=incidents,
                ),
                PanelQuery("sum(max by (state) (rolecall_incidents_open))"),
            ),
            open_now(incidents),
            bars(
                "Replicas at work",
                "Of the replicas that each role should have, those that are ready or serve. The link shows the role.",
                PanelFormat(
                    unit="percentunit",
                    most=1.0,
                    limits=((None, RED), (0.5, ORANGE), (1.0, GREEN)),
                    words={1: Word("all", GREEN)},
                    links=(SERIES_TO_ROLE,),
                ),
                PanelQuery(f"({at_work} or {wanted} * 0) / ({wanted} > 0)", "{{role}}"),
            ),
        ],
    )


def _numbers() -> PanelRow:
    return PanelRow(
        "The run in numbers",
        4,
        (4, 4, 4, 3, 3, 3, 3),
        [
            numbers(
                "Plans that wait for a person",
                "`rolecall approve DIGEST`, or the page Acting of rolecall's dashboard. They lapse at their deadline.",
                PanelFormat(unit="none", words={0: Word("none", GREEN)}, limits=((None, GREEN), (1, ORANGE))),
                PanelQuery("max(rolecall_plans_waiting)"),
            ),
            numbers(
                "rolecall",
                """acts; only looks (another watch acts, or its mode is to observe); PAUSED by a person; BLIND: it cannot
                diagnose.""",
                PanelFormat(unit="none", words=MAY_ACT_WORDS, no_value="no watch"),
                PanelQuery(MAY_ACT),
            ),
            numbers(
                "Step",
                "Newest optimizer step that is committed, of those that the job asks for.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery("max(rolecall_run_step)", "committed"),
                PanelQuery("max(rolecall_run_steps_wanted)", "wanted"),
            ),
            numbers(
                "Reward",
                "Mean reward of the newest committed step.",
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
                "Lost so far",
                "Training time that faults have taken.",
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
                "Of committed steps. A fall that no incident explains is worth a look at the role trainer.",
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
                "Duration of a step",
                "Of the newest committed step; a step that a fault interrupted is long.",
                PanelFormat(unit="s"),
                PanelQuery("max(rolecall_run_step_seconds)", "step"),
            ),
            lines(
                "Steps",
                "Committed, and how often a fault interrupted one. Flat: nothing is trained.",
                PanelFormat(unit="none", decimals=0, least=None),
                PanelQuery("max(rolecall_run_step)", "committed"),
                PanelQuery("max(rolecall_run_steps_interrupted_total)", "interruptions"),
            ),
            lines(
                "Age of policy versions",
                "Largest distance between the version that is trained and one that generated.",
                PanelFormat(unit="none", decimals=0),
                PanelQuery("max(rolecall_run_staleness)", "staleness"),
            ),
            lines(
                "Replicas by role",
                "At work (ready or serving), by role.",
                PanelFormat(unit="none", decimals=0, links=(SERIES_TO_ROLE,)),
                PanelQuery(
                    'sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))', "{{role}}"
                ),
            ),
        ],
    )


def _time() -> PanelRow:
    return PanelRow(
        "Where the time went",
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
                "Which faults took how much of the training time; with the effective time they add up to all of it.",
                PanelFormat(unit="s", limits=((None, ORANGE),), links=(SERIES_TO_ROLE,)),
                PanelQuery("max by (role, fault) (rolecall_run_lost_seconds)", "{{role}}: {{fault}}"),
            ),
            lines(
                "Training time",
                "Effective and lost seconds, added up.",
                PanelFormat(unit="s"),
                PanelQuery("max(rolecall_run_effective_seconds)", "effective"),
                PanelQuery("sum(max by (role, fault) (rolecall_run_lost_seconds))", "lost"),
                stacked=True,
            ),
        ],
    )


def _incidents() -> PanelRow:
    return PanelRow(
        "Last incidents",
        8,
        (12, 6, 6),
        [
            states(
                "Incidents over time",
                "Each row is a suspect with its fault; OPEN from the finding to the close.",
                PanelFormat(unit="none", words={0: Word("closed", GREEN), 1: Word("OPEN", RED)}),
                PanelQuery("max by (replica, fault) (rolecall_incident_open)", "{{replica}} {{fault}}"),
            ),
            rows(
                "Incidents in the time shown",
                "Opened in the time shown, by role and fault.",
                PanelFormat(unit="none", limits=((None, BLUE),), no_value="none"),
                PanelQuery(grown("rolecall_incidents_opened_total", "role, fault") + " > 0", "incidents"),
                {"role": "role", "fault": "fault"},
            ),
            numbers(
                "Newest incident: found and resolved after",
                "From the fault's onset to its finding, and from finding to cure (the replacement was seen to work).",
                PanelFormat(unit="s", decimals=1),
                PanelQuery("max by (role) (rolecall_incident_newest_finding_seconds)", "{{role}} found"),
                PanelQuery("max by (role) (rolecall_incident_newest_cure_seconds)", "{{role}} resolved"),
            ),
        ],
    )
