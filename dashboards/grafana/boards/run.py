"""The run at a glance (open incidents, replicas, progress, lost time), and its policy health.

Policy health is the metrics of core/policy_health.py over time, each with its normal range. The first rows of that
board show the run's metrics from its journal (jobs that rolecall runs). The last row shows what each trainer reports,
which trainers of any job can (`reporter.health`).
"""

from collections.abc import Sequence
from dataclasses import replace

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from rolecall.core.policy_health import BY_NAME, LOG_RATIO_ALARM
from rolecall.dashboards.grafana.board import (
    OVERVIEW,
    ROW_TO_GPUS,
    ROW_TO_REPLICA,
    SERIES_TO_REPLICA,
    SERIES_TO_ROLE,
    TRAINING,
    PanelRow,
    board,
    of_servers,
)
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
from rolecall.dashboards.grafana.rules import FILTERED_RATIO_MAX, KL_MAX_NATS, TRUNCATED_RATIO_MAX

SUSPECT = "node, role, replica, fault"
NOT_RUN = "not run by rolecall"
"""In place of data that only a run of rolecall has; a job that is only watched has its own dashboard."""
NO_STEP = "no committed step"
"""In place of data that a run of rolecall has from its first step on, and a job that is only watched never."""
NOT_RECORDED = "not in the run's journal"
NONE_YET = "none yet"
ETTR_GOOD, ETTR_FAIR = 0.95, 0.85
"""ETTR from which on it is shown green, and yellow."""
WATCH_STATE = """
    (max(rolecall_watch_blind) * 5 > 0) or (max(rolecall_watch_mode{mode="observe"}) * 4 > 0)
    or (max(rolecall_watch_paused) * 3 > 0)
    or (max(rolecall_watch_acting) * 2 > 0) or (max(rolecall_watch_acting) * 0 + 1)
"""
WATCH_STATES = {
    1: MappedValue("passive", YELLOW),
    2: MappedValue("active", GREEN),
    3: MappedValue("PAUSED", ORANGE),
    4: MappedValue("observes", GREEN),
    5: MappedValue("NO DATA", RED),
}
TOKENS = "max(rate(rolecall_run_tokens_total[$__rate_interval]))"


def overview(incidents: Sequence[Link] = ()) -> Dashboard:
    """`incidents`: links to `rolecall dashboard`."""
    return board(
        OVERVIEW,
        "run overview",
        "Start here: open incidents, role health, progress, and lost time of a run that rolecall started. Watched job "
        "shows a job that it only watches.",
        of_servers(),
        [_now(incidents), _numbers(), _progress(), _time(), _incidents()],
    )


def watch_state() -> Panel:
    """Whether a watch acts, is passive, paused or without data."""
    return numbers(
        "rolecall",
        """active: may act. observes: diagnoses and never acts. passive: another watch holds the lease. PAUSED: by an
        operator. NO DATA: it cannot diagnose.""",
        PanelFormat(mappings=WATCH_STATES, no_value="no watch"),
        PanelQuery(WATCH_STATE),
    )


def agents() -> Panel:
    """How many agents the watch reaches."""
    return numbers(
        "Agents",
        "Agents that the watch reaches and does not reach. The state of an unreachable agent's node is unknown.",
        PanelFormat(decimals=0, no_value="no watch"),
        PanelQuery("max by (state) (rolecall_watch_agents)", "{{state}}"),
    )


def open_incidents(links: Sequence[Link]) -> tuple[Panel, Panel]:
    """How many there are, and each with its suspect and age. `links`: to `rolecall dashboard`."""
    return (
        numbers(
            "Open incidents",
            "In any state: diagnosed, planned, awaiting approval, acting, verifying.",
            PanelFormat(
                mappings={0: MappedValue("none", GREEN)},
                limits=((None, GREEN), (1, RED)),
                no_value="no watch",
                links=links,
            ),
            PanelQuery("sum(max by (state) (rolecall_incidents_open))"),
        ),
        rows(
            "Open incidents by suspect",
            "Suspects with an open incident, and how long it has been open. Links lead to the suspect, its peers and "
            "its node.",
            PanelFormat("s", limits=((None, RED),), no_value="none", links=(ROW_TO_REPLICA, ROW_TO_GPUS, *links)),
            PanelQuery(f"time() - max by ({SUSPECT}) (rolecall_incident_opened_timestamp_seconds)", "open for"),
            {"fault": "fault", "role": "role", "replica": "replica", "node": "node"},
        ),
    )


def _now(incidents: Sequence[Link]) -> PanelRow:
    at_work = 'sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))'
    wanted = "max by (role) (rolecall_replicas_wanted)"
    return PanelRow(
        "Health",
        *open_incidents(incidents),
        bars(
            "Replicas serving",
            "Share of the desired replicas of each role that are ready or serving. The link leads to the role.",
            PanelFormat(
                "percentunit",
                most=1.0,
                limits=((None, RED), (0.5, ORANGE), (1.0, GREEN)),
                mappings={1: MappedValue("all", GREEN)},
                links=(SERIES_TO_ROLE,),
                no_value=NOT_RUN,
            ),
            PanelQuery(f"({at_work} or {wanted} * 0) / ({wanted} > 0)", "{{role}}"),
        ),
        widths=(4, 12, 8),
        height=6,
    )


def _numbers() -> PanelRow:
    return PanelRow(
        "Key figures",
        numbers(
            "Plans awaiting approval",
            "Use `rolecall approve DIGEST --run RUN` or the Operations page of `rolecall dashboard`. They expire at "
            "their deadline.",
            PanelFormat(mappings={0: MappedValue("none", GREEN)}, limits=((None, GREEN), (1, ORANGE))),
            PanelQuery("max(rolecall_plans_waiting)"),
        ),
        watch_state(),
        numbers(
            "Step",
            "Latest committed optimizer step, and the number of steps that the job asks for.",
            PanelFormat(decimals=0, least=None, no_value=NOT_RUN),
            PanelQuery("max(rolecall_run_step)", "committed"),
            PanelQuery("max(rolecall_run_steps_wanted)", "wanted"),
        ),
        numbers(
            "Reward",
            "Mean reward of the latest committed step.",
            PanelFormat(decimals=3, least=None, no_value=NO_STEP),
            PanelQuery("max(rolecall_run_reward)"),
            trend=True,
        ),
        numbers(
            "Tokens per second",
            "In committed steps.",
            PanelFormat("short", decimals=0, no_value=NOT_RUN),
            PanelQuery(TOKENS),
            trend=True,
        ),
        numbers(
            "ETTR",
            "Effective training time ratio so far: effective seconds over training seconds.",
            PanelFormat(
                "percentunit",
                decimals=1,
                most=1.0,
                limits=((None, RED), (ETTR_FAIR, YELLOW), (ETTR_GOOD, GREEN)),
                no_value=NO_STEP,
            ),
            PanelQuery("max(rolecall_run_ettr_ratio)"),
        ),
        numbers(
            "Lost time",
            "Training time lost to faults so far.",
            PanelFormat("s", decimals=0, no_value="none counted"),
            PanelQuery("sum(max by (role, fault) (rolecall_run_lost_seconds))"),
        ),
        widths=(4, 4, 4, 3, 3, 3, 3),
        height=4,
    )


def _progress() -> PanelRow:
    return PanelRow(
        "Progress",
        lines(
            "Reward and loss",
            "Of committed steps. If it drops without an incident, check the role trainer.",
            PanelFormat(least=None, decimals=3, no_value=NO_STEP),
            PanelQuery("max(rolecall_run_reward)", "reward"),
            PanelQuery("max(rolecall_run_loss)", "loss"),
        ),
        lines(
            "Tokens per second",
            "In committed steps.",
            PanelFormat("short", no_value=NOT_RUN),
            PanelQuery(TOKENS, "tokens per second"),
        ),
        lines(
            "Step time",
            "Of the latest committed step. A step that a fault interrupted takes long.",
            PanelFormat("s", no_value=NO_STEP),
            PanelQuery("max(rolecall_run_step_seconds)", "step"),
        ),
        lines(
            "Steps",
            "Committed steps, and interruptions by faults. Flat: training makes no progress.",
            PanelFormat(decimals=0, least=None, no_value=NOT_RUN),
            PanelQuery("max(rolecall_run_step)", "committed"),
            PanelQuery("max(rolecall_run_steps_interrupted_total)", "interruptions"),
        ),
        lines(
            "Policy staleness",
            "Largest number of versions between the trained policy and one that generated tokens.",
            PanelFormat(decimals=0, no_value=NO_STEP),
            PanelQuery("max(rolecall_run_staleness)", "staleness"),
        ),
        lines(
            "Replicas by role",
            "Ready or serving replicas by role.",
            PanelFormat(decimals=0, links=(SERIES_TO_ROLE,), no_value=NOT_RUN),
            PanelQuery('sum by (role) (max by (role, state) (rolecall_replicas{state=~"ready|serving"}))', "{{role}}"),
        ),
    )


def _time() -> PanelRow:
    return PanelRow(
        "Time accounting",
        lines(
            "ETTR",
            "Effective training time ratio so far.",
            PanelFormat("percentunit", most=1.0, limits=((None, RED), (ETTR_GOOD, GREEN)), no_value=NO_STEP),
            PanelQuery("max(rolecall_run_ettr_ratio)", "ETTR"),
        ),
        bars(
            "Lost time by role and fault",
            "Training time lost to each fault. Lost and effective time add up to the training time.",
            PanelFormat("s", limits=((None, ORANGE),), links=(SERIES_TO_ROLE,), no_value="none counted"),
            PanelQuery("max by (role, fault) (rolecall_run_lost_seconds)", "{{role}}: {{fault}}"),
        ),
        lines(
            "Training time",
            "Effective and lost seconds, stacked.",
            PanelFormat("s", no_value=NO_STEP),
            PanelQuery("max(rolecall_run_effective_seconds)", "effective"),
            PanelQuery("sum(max by (role, fault) (rolecall_run_lost_seconds))", "lost"),
            stacked=True,
        ),
        lines(
            "Model FLOPs utilisation",
            "Share of the peak FLOP/s in the job file that the model's own arithmetic uses, by role. Empty without a "
            "peak in the job file.",
            PanelFormat("percentunit", links=(SERIES_TO_ROLE,), no_value="no peak in a job file"),
            PanelQuery("max by (role) (rolecall_run_mfu_ratio)", "{{role}}"),
        ),
        widths=6,
    )


def incidents_over_time() -> tuple[Panel, Panel]:
    return (
        states(
            "Incidents over time",
            "Each row is a suspect with its fault. OPEN from detection to close.",
            PanelFormat(mappings={0: MappedValue("closed", GREEN), 1: MappedValue("OPEN", RED)}, no_value="none"),
            PanelQuery("max by (replica, fault) (rolecall_incident_open)", "{{replica}} {{fault}}"),
        ),
        rows(
            "Incidents in the time range",
            "Opened in the time range, by role and fault.",
            PanelFormat(limits=((None, BLUE),), no_value="none"),
            PanelQuery(grown("rolecall_incidents_opened_total", "role, fault") + " > 0", "incidents"),
            {"role": "role", "fault": "fault"},
        ),
    )


def active_diagnoses() -> Panel:
    return lines(
        "Active diagnoses",
        "Current diagnoses by fault class.",
        PanelFormat(decimals=0, no_value="none"),
        PanelQuery("max by (fault) (rolecall_watch_diagnoses) > 0", "{{fault}}"),
    )


def _incidents() -> PanelRow:
    return PanelRow(
        "Recent incidents",
        *incidents_over_time(),
        numbers(
            "Latest incident: time to detect and to recover",
            "From onset to detection, and from detection until the replacement makes progress.",
            PanelFormat("s", decimals=1, no_value=NONE_YET),
            PanelQuery("max by (role) (rolecall_incident_newest_detection_seconds)", "{{role}} detected"),
            PanelQuery("max by (role) (rolecall_incident_newest_resolution_seconds)", "{{role}} resolved"),
        ),
        widths=(12, 6, 6),
    )


SHARE = PanelFormat("percentunit", most=1.0)
FEW = PanelFormat("percentunit")
"""A share of which a few percent matter."""


def training() -> Dashboard:
    return board(
        TRAINING,
        "training health",
        "Reward, entropy, response length, clipping, and divergence from the sampler of a run that rolecall started. "
        "The last row is for any job whose trainers call `reporter.health`.",
        of_servers(),
        [_latest_step(), _learning(), _held_out(), _distance(), _unused(), _critic(), _trainers()],
    )


def _of_run(title: str, style: PanelFormat, *shown: tuple[str, str]) -> Panel:
    """Health metrics of the run on one axis: (metric, legend). The first one's normal range is the description."""
    metrics = [BY_NAME[name] for name, _ in shown]
    description = f"{'; '.join(metric.help for metric in metrics)}. {metrics[0].normal}"
    style = replace(style, no_value=NOT_RECORDED)
    return lines(title, description, style, *(PanelQuery(_run(name), line) for name, line in shown))


def _run(sign: str) -> str:
    return f"max(rolecall_run_{BY_NAME[sign].metric})"


def _latest_step() -> PanelRow:
    def now(title: str, sign: str, style: PanelFormat) -> Panel:
        description = f"{BY_NAME[sign].help}. {BY_NAME[sign].normal}"
        return numbers(title, description, replace(style, no_value=NOT_RECORDED), PanelQuery(_run(sign)))

    return PanelRow(
        "Latest step",
        numbers(
            "Reward",
            "Mean reward of the latest step. Meaningful only while the other metrics are healthy.",
            PanelFormat(decimals=3, least=None, no_value=NO_STEP),
            PanelQuery("max(rolecall_run_reward)"),
        ),
        now("Entropy, nats per token", "entropy", PanelFormat(decimals=3)),
        now("Response length, tokens", "response_length", PanelFormat(decimals=1)),
        now("KL to sampler, nats", "kl_sampler", _limited(KL_MAX_NATS, "none", decimals=4)),
        now("Truncated responses", "truncated_fraction", _limited(TRUNCATED_RATIO_MAX, "percentunit", decimals=1)),
        now("Filtered groups", "filtered_fraction", _limited(FILTERED_RATIO_MAX, "percentunit", decimals=1)),
        widths=4,
        height=4,
    )


def _limited(limit: float, unit: str, decimals: int | None = None) -> PanelFormat:
    """With the threshold of the alert."""
    return PanelFormat(unit, decimals=decimals, limits=((None, BLUE), (limit, RED)))


def _learning() -> PanelRow:
    return PanelRow(
        "Learning",
        lines(
            "Reward",
            "Mean reward of each step.",
            PanelFormat(least=None, no_value=NO_STEP),
            PanelQuery("max(rolecall_run_reward)", "reward"),
        ),
        _of_run("Entropy, nats per token", PanelFormat(), ("entropy", "entropy")),
        _of_run(
            "Response length, tokens", PanelFormat(), ("response_length", "mean"), ("response_length_max", "longest")
        ),
    )


def _held_out() -> PanelRow:
    dropped = "max by (reason) (rolecall_run_dataset_groups_dropped_total)"
    unscored = "max by (reason) (rolecall_run_evaluation_unscored)"
    return PanelRow(
        "Held-out prompts and dataset (empty without)",
        lines(
            "Held-out reward",
            "Mean reward of the newest evaluation, with its 95 % interval over prompts.",
            PanelFormat(least=None, decimals=3, no_value=NOT_RECORDED),
            PanelQuery("max(rolecall_run_evaluation_reward)", "mean"),
            PanelQuery("max(rolecall_run_evaluation_reward_low)", "low"),
            PanelQuery("max(rolecall_run_evaluation_reward_high)", "high"),
        ),
        lines(
            "Held-out pass@k",
            "Share of held-out prompts of which one of k answers passes.",
            replace(SHARE, no_value=NOT_RECORDED),
            PanelQuery("max by (k) (rolecall_run_evaluation_pass_ratio)", "pass@{{k}}"),
        ),
        lines(
            "Epochs of the dataset",
            "How often the run has gone through its dataset.",
            PanelFormat(decimals=2, no_value=NOT_RECORDED),
            PanelQuery("max(rolecall_run_dataset_epoch) + max(rolecall_run_dataset_epoch_ratio)", "epochs"),
        ),
        lines(
            "Groups dropped, prompts not scored",
            "Prompt groups of the run dropped so far, and held-out prompts of the newest evaluation without a score, "
            "by reason.",
            PanelFormat(decimals=0, no_value=NOT_RECORDED),
            PanelQuery(dropped, "dropped: {{reason}}"),
            PanelQuery(unscored, "not scored: {{reason}}"),
        ),
        widths=6,
    )


def _distance() -> PanelRow:
    return PanelRow(
        "Divergence from the sampler",
        _of_run(
            "KL, nats per token",
            _limited(KL_MAX_NATS, "none"),
            ("kl_sampler", "to the sampler"),
            ("kl_reference", "to the reference"),
        ),
        _of_run(
            "Clipped tokens",
            FEW,
            ("clip_fraction_low", "from below"),
            ("clip_fraction_high", "from above"),
            ("clip_fraction_dual", "from above, wrong"),
            ("capped_fraction", "weight truncated"),
            ("rejected_fraction", "rejected"),
        ),
        _of_run(
            "Importance ratios",
            PanelFormat(),
            ("ratio_mean", "mean"),
            ("ratio_std", "standard deviation"),
            ("ratio_max", "largest"),
        ),
        _of_run(
            "Trainer and engine mismatch",
            _limited(LOG_RATIO_ALARM, "none"),
            ("log_ratio_max", "largest |log-ratio|, same weights"),
        ),
        widths=6,
    )


def _unused() -> PanelRow:
    return PanelRow(
        "Unused samples",
        _of_run(
            "Truncated responses", _limited(TRUNCATED_RATIO_MAX, "percentunit"), ("truncated_fraction", "truncated")
        ),
        _of_run("Filtered groups", _limited(FILTERED_RATIO_MAX, "percentunit"), ("filtered_fraction", "filtered")),
        _of_run("Stale tokens", FEW, ("stale_fraction", "stale")),
    )


def _critic() -> PanelRow:
    return PanelRow(
        "Critic (empty without one)",
        _of_run("Explained variance", PanelFormat(least=None, most=1.0), ("explained_variance", "explained variance")),
        _of_run("Critic loss", PanelFormat(), ("value_loss", "loss")),
        widths=12,
    )


def _trainers() -> PanelRow:
    def each(title: str, style: PanelFormat, *shown: str) -> Panel:
        metrics = [BY_NAME[name] for name in shown]

        def legend(metric: str) -> str:
            rank = "{{replica}} rank {{rank}}"
            return rank if len(metrics) == 1 else f"{rank} {metric.removesuffix('_ratio').replace('_', ' ')}"

        return lines(
            title,
            f"{'; '.join(metric.help for metric in metrics)}. All trainers of a job report the same value, of the "
            f"whole step.",
            replace(style, no_value="no trainer reports it"),
            *(
                PanelQuery(f"max by (role, replica, rank) (rolecall_train_{m.metric})", legend(m.metric))
                for m in metrics
            ),
        )

    linked = (SERIES_TO_REPLICA,)
    return PanelRow(
        "Per trainer (any job that calls `reporter.health`)",
        each("Entropy, nats per token", PanelFormat(links=linked), "entropy"),
        each("Response length, tokens", PanelFormat(links=linked), "response_length"),
        each("Truncated responses, filtered groups", SHARE, "truncated_fraction", "filtered_fraction"),
        each("KL to sampler, nats per token", PanelFormat(links=linked), "kl_sampler"),
        each("Clipped tokens", FEW, "clip_fraction_low", "clip_fraction_high"),
        each("Importance ratios", PanelFormat(links=linked), "ratio_mean", "ratio_max"),
        each("Mismatch with engines, same weights", PanelFormat(links=linked), "log_ratio_max"),
        collapsed=True,
    )
