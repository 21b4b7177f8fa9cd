"""Policy health: the metrics of core/policy_health.py over time, each with its normal range.

The first rows show the run's metrics from its journal (jobs that rolecall runs). The last row shows what each trainer
reports, which trainers of any job can (`reporter.health`).
"""

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from rolecall.core.policy_health import BY_NAME, LOG_RATIO_ALARM
from rolecall.dashboards.grafana.board import TRAINING, PanelRow, board, of_servers
from rolecall.dashboards.grafana.links import SERIES_TO_REPLICA
from rolecall.dashboards.grafana.panels import BLUE, RED, PanelFormat, PanelQuery, lines, numbers
from rolecall.dashboards.grafana.rules.training import FILTERED_RATIO_MAX, KL_MAX_NATS, TRUNCATED_RATIO_MAX

SHARE = PanelFormat(unit="percentunit", most=1.0)
FEW = PanelFormat(unit="percentunit")
"""A share of which a few percent matter."""


def training() -> Dashboard:
    return board(
        TRAINING,
        "training health",
        "Reward, entropy, response length, clipping, and divergence from the sampler.",
        of_servers(),
        [_numbers(), _learning(), _distance(), _unused(), _critic(), _trainers()],
    )


def _of_run(title: str, style: PanelFormat, *shown: tuple[str, str]) -> Panel:
    """Health metrics of the run on one axis: (metric, legend). The first one's normal range is the description."""
    metrics = [BY_NAME[name] for name, _ in shown]
    description = f"{'; '.join(metric.help for metric in metrics)}. {metrics[0].normal}"
    return lines(title, description, style, *(PanelQuery(_run(name), line) for name, line in shown))


def _run(sign: str) -> str:
    return f"max(rolecall_run_{BY_NAME[sign].metric})"


def _numbers() -> PanelRow:
    def now(title: str, sign: str, style: PanelFormat) -> Panel:
        return numbers(title, f"{BY_NAME[sign].help}. {BY_NAME[sign].normal}", style, PanelQuery(_run(sign)))

    return PanelRow(
        "Latest step",
        4,
        (4, 4, 4, 4, 4, 4),
        [
            numbers(
                "Reward",
                "Mean reward of the latest step. Meaningful only while the other metrics are healthy.",
                PanelFormat(unit="none", decimals=3, least=None),
                PanelQuery("max(rolecall_run_reward)"),
            ),
            now("Entropy, nats per token", "entropy", PanelFormat(unit="none", decimals=3)),
            now("Response length, tokens", "response_length", PanelFormat(unit="none", decimals=1)),
            now("KL to sampler, nats", "kl_sampler", _limited(KL_MAX_NATS, "none", decimals=4)),
            now("Truncated responses", "truncated_fraction", _limited(TRUNCATED_RATIO_MAX, "percentunit", decimals=1)),
            now("Filtered groups", "filtered_fraction", _limited(FILTERED_RATIO_MAX, "percentunit", decimals=1)),
        ],
    )


def _limited(limit: float, unit: str, decimals: int | None = None) -> PanelFormat:
    """With the threshold of the alert."""
    return PanelFormat(unit=unit, decimals=decimals, limits=((None, BLUE), (limit, RED)))


def _learning() -> PanelRow:
    return PanelRow(
        "Learning",
        8,
        (8, 8, 8),
        [
            lines(
                "Reward",
                "Mean reward of each step.",
                PanelFormat(unit="none", least=None),
                PanelQuery("max(rolecall_run_reward)", "reward"),
            ),
            _of_run("Entropy, nats per token", PanelFormat(unit="none"), ("entropy", "entropy")),
            _of_run(
                "Response length, tokens",
                PanelFormat(unit="none"),
                ("response_length", "mean"),
                ("response_length_max", "longest"),
            ),
        ],
    )


def _distance() -> PanelRow:
    return PanelRow(
        "Divergence from the sampler",
        8,
        (6, 6, 6, 6),
        [
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
                ("capped_fraction", "weight truncated"),
            ),
            _of_run(
                "Importance ratios",
                PanelFormat(unit="none"),
                ("ratio_mean", "mean"),
                ("ratio_std", "standard deviation"),
                ("ratio_max", "largest"),
            ),
            _of_run(
                "Trainer and engine mismatch",
                _limited(LOG_RATIO_ALARM, "none"),
                ("log_ratio_max", "largest |log-ratio|, same weights"),
            ),
        ],
    )


def _unused() -> PanelRow:
    return PanelRow(
        "Unused samples",
        8,
        (8, 8, 8),
        [
            _of_run(
                "Truncated responses", _limited(TRUNCATED_RATIO_MAX, "percentunit"), ("truncated_fraction", "truncated")
            ),
            _of_run("Filtered groups", _limited(FILTERED_RATIO_MAX, "percentunit"), ("filtered_fraction", "filtered")),
            _of_run("Stale tokens", FEW, ("stale_fraction", "stale")),
        ],
    )


def _critic() -> PanelRow:
    return PanelRow(
        "Critic (empty without one)",
        8,
        (12, 12),
        [
            _of_run(
                "Explained variance",
                PanelFormat(unit="none", least=None, most=1.0),
                ("explained_variance", "explained variance"),
            ),
            _of_run("Critic loss", PanelFormat(unit="none"), ("value_loss", "loss")),
        ],
    )


def _trainers() -> PanelRow:
    def each(title: str, style: PanelFormat, *shown: str) -> Panel:
        metrics = [BY_NAME[name] for name in shown]
        return lines(
            title,
            f"{'; '.join(metric.help for metric in metrics)}. All trainers of a job report the same value, of the "
            f"whole step.",
            style,
            *_queries([metric.metric for metric in metrics]),
        )

    linked = (SERIES_TO_REPLICA,)
    return PanelRow(
        "Per trainer (any job that calls `reporter.health`)",
        8,
        (8, 8, 8, 8, 8, 8, 8),
        [
            each("Entropy, nats per token", PanelFormat(unit="none", links=linked), "entropy"),
            each("Response length, tokens", PanelFormat(unit="none", links=linked), "response_length"),
            each("Truncated responses, filtered groups", SHARE, "truncated_fraction", "filtered_fraction"),
            each("KL to sampler, nats per token", PanelFormat(unit="none", links=linked), "kl_sampler"),
            each("Clipped tokens", FEW, "clip_fraction_low", "clip_fraction_high"),
            each("Importance ratios", PanelFormat(unit="none", links=linked), "ratio_mean", "ratio_max"),
            each("Mismatch with engines, same weights", PanelFormat(unit="none", links=linked), "log_ratio_max"),
        ],
        collapsed=True,
    )


def _queries(metrics: Sequence[str]) -> list[PanelQuery]:
    def legend(metric: str) -> str:
        rank = "{{replica}} rank {{rank}}"
        return rank if len(metrics) == 1 else f"{rank} {metric.removesuffix('_ratio').replace('_', ' ')}"

    return [PanelQuery(f"max by (role, replica, rank) (rolecall_train_{m})", legend(m)) for m in metrics]
