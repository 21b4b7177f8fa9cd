"""Whether the policy learns, and how healthily: the signs of core/policy_health.py over time, each with what is normal.

The first rows are of the run, as its journal has them (jobs that rolecall runs); the last is what each trainer tells, which
any job's trainers can (`reporter.health`).
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
"""A share of which a few per cent matter."""


def training() -> Dashboard:
    return board(
        TRAINING,
        "training health",
        "Does the policy learn, and how healthily? Entropy, lengths, clipping, and how far it is from who made its tokens.",
        of_servers(),
        [_numbers(), _learning(), _distance(), _unused(), _critic(), _trainers()],
    )


def _of_run(title: str, look: PanelFormat, *shown: tuple[str, str]) -> Panel:
    """Signs of the run on one axis: (sign, its line). The first says in words what is normal."""
    told = [BY_NAME[name] for name, _ in shown]
    said = f"{'; '.join(sign.help for sign in told)}. {told[0].normal}"
    return lines(title, said, look, *(PanelQuery(_run(name), line) for name, line in shown))


def _run(sign: str) -> str:
    return f"max(rolecall_run_{BY_NAME[sign].metric})"


def _numbers() -> PanelRow:
    def now(title: str, sign: str, look: PanelFormat) -> Panel:
        return numbers(title, f"{BY_NAME[sign].help}. {BY_NAME[sign].normal}", look, PanelQuery(_run(sign)))

    return PanelRow(
        "The newest step",
        4,
        (4, 4, 4, 4, 4, 4),
        [
            numbers(
                "Reward",
                "Mean reward of the newest step. It means something only while the signs beside it are healthy.",
                PanelFormat(unit="none", decimals=3, least=None),
                PanelQuery("max(rolecall_run_reward)"),
            ),
            now("Entropy, nats a token", "entropy", PanelFormat(unit="none", decimals=3)),
            now("Tokens an answer", "response_length", PanelFormat(unit="none", decimals=1)),
            now("KL to the sampler, nats", "kl_sampler", _limited(KL_MAX_NATS, "none", decimals=4)),
            now("Answers cut off", "truncated_fraction", _limited(TRUNCATED_RATIO_MAX, "percentunit", decimals=1)),
            now("Groups filtered", "filtered_fraction", _limited(FILTERED_RATIO_MAX, "percentunit", decimals=1)),
        ],
    )


def _limited(limit: float, unit: str, decimals: int | None = None) -> PanelFormat:
    """With the limit of the alert."""
    return PanelFormat(unit=unit, decimals=decimals, limits=((None, BLUE), (limit, RED)))


def _learning() -> PanelRow:
    return PanelRow(
        "Does it learn?",
        8,
        (8, 8, 8),
        [
            lines(
                "Reward",
                "Mean reward of each step.",
                PanelFormat(unit="none", least=None),
                PanelQuery("max(rolecall_run_reward)", "reward"),
            ),
            _of_run("Entropy, nats a token", PanelFormat(unit="none"), ("entropy", "entropy")),
            _of_run(
                "Tokens an answer",
                PanelFormat(unit="none"),
                ("response_length", "mean"),
                ("response_length_max", "longest"),
            ),
        ],
    )


def _distance() -> PanelRow:
    return PanelRow(
        "How far is it from who made its tokens?",
        8,
        (6, 6, 6, 6),
        [
            _of_run(
                "KL, nats a token",
                _limited(KL_MAX_NATS, "none"),
                ("kl_sampler", "to the sampler"),
                ("kl_reference", "to the reference"),
            ),
            _of_run(
                "Tokens clipped",
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
                "Trainer and engine disagree by",
                _limited(LOG_RATIO_ALARM, "none"),
                ("log_ratio_max", "largest |log-ratio|, same weights"),
            ),
        ],
    )


def _unused() -> PanelRow:
    return PanelRow(
        "What does not count",
        8,
        (8, 8, 8),
        [
            _of_run("Answers cut off", _limited(TRUNCATED_RATIO_MAX, "percentunit"), ("truncated_fraction", "cut off")),
            _of_run("Groups filtered", _limited(FILTERED_RATIO_MAX, "percentunit"), ("filtered_fraction", "filtered")),
            _of_run("Tokens too old", FEW, ("stale_fraction", "too old")),
        ],
    )


def _critic() -> PanelRow:
    return PanelRow(
        "The critic (empty without one)",
        8,
        (12, 12),
        [
            _of_run(
                "Explained variance",
                PanelFormat(unit="none", least=None, most=1.0),
                ("explained_variance", "explained variance"),
            ),
            _of_run("Loss of the critic", PanelFormat(unit="none"), ("value_loss", "loss")),
        ],
    )


def _trainers() -> PanelRow:
    def each(title: str, look: PanelFormat, *shown: str) -> Panel:
        told = [BY_NAME[name] for name in shown]
        return lines(
            title,
            f"{'; '.join(sign.help for sign in told)}. Trainers of one job agree: what they tell is of the whole step.",
            look,
            *_queries([sign.metric for sign in told]),
        )

    linked = (SERIES_TO_REPLICA,)
    return PanelRow(
        "As each trainer tells it (of any job that calls `reporter.health`)",
        8,
        (8, 8, 8, 8, 8, 8, 8),
        [
            each("Entropy, nats a token", PanelFormat(unit="none", links=linked), "entropy"),
            each("Tokens an answer", PanelFormat(unit="none", links=linked), "response_length"),
            each("Answers cut off, groups filtered", SHARE, "truncated_fraction", "filtered_fraction"),
            each("KL to the sampler, nats a token", PanelFormat(unit="none", links=linked), "kl_sampler"),
            each("Tokens clipped", FEW, "clip_fraction_low", "clip_fraction_high"),
            each("Ratios", PanelFormat(unit="none", links=linked), "ratio_mean", "ratio_max"),
            each("Apart from engines, same weights", PanelFormat(unit="none", links=linked), "log_ratio_max"),
        ],
        collapsed=True,
    )


def _queries(metrics: Sequence[str]) -> list[PanelQuery]:
    def legend(metric: str) -> str:
        rank = "{{replica}} rank {{rank}}"
        return rank if len(metrics) == 1 else f"{rank} {metric.removesuffix('_ratio').replace('_', ' ')}"

    return [PanelQuery(f"max by (role, replica, rank) (rolecall_train_{m})", legend(m)) for m in metrics]
