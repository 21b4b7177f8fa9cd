"""Which engine disagrees with the trainers? Pure.

A step's largest difference of log-probabilities is known for each engine (`algorithms/agreement.py`). If that of one
engine is large and those of all others are far smaller, its tokens alone are off; if several are, it is the trainers,
or numerics that differ everywhere, and no engine is named.
"""

from collections.abc import Mapping
from typing import Final

from rolecall.core.errors import EngineDisagrees
from rolecall.core.policy_health import LOG_RATIO_ALARM

FACTOR: Final = 10.0
"""Between engines of one precision on a few rows each: how much more than the others counts as alone."""


def disagreeing_engine(log_ratios: Mapping[str, float], step: int) -> EngineDisagrees | None:
    """`log_ratios`: nats, by engine (`role/index#incarnation`); engines without a comparable token are missing."""
    if len(log_ratios) < 2:
        return None
    worst = max(log_ratios, key=lambda engine: log_ratios[engine])
    others = max(value for engine, value in log_ratios.items() if engine != worst)
    if log_ratios[worst] <= max(LOG_RATIO_ALARM, FACTOR * others):
        return None
    replica, _, incarnation = worst.rpartition("#")
    return EngineDisagrees(
        replica=replica,
        incarnation=int(incarnation),
        step=step,
        log_ratio=log_ratios[worst],
        others=others,
        num_others=len(log_ratios) - 1,
    )
