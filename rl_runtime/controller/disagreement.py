"""Which process disagrees with the others? Pure.

Engines: a step's largest difference of log-probabilities is known for each engine (`algorithms/agreement.py`). If that
of one engine is large and those of all others are far smaller, its tokens alone are off; if several are, it is the
trainers, or numerics that differ everywhere, and no engine is named.

Reward workers: the tasks' scorers are deterministic, so equal tokens have equal rewards on every machine. A seeded
share of the scored groups is scored by a second worker; if the two differ, a third decides, and the odd one is named.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rolecall.core.errors import EngineDisagrees
from rolecall.core.ids import GroupId
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.rl_runtime.controller.trajectories import EngineKey

ENGINE_FACTOR: Final = 10.0
"""An engine is named if its value exceeds all others by this; between engines of one precision, on a few rows each."""
Rewards = tuple[float, ...]
"""One per sample of a group."""
ROUNDING = 1e-9


def disagreeing_engine(
    log_ratios: Mapping[str, float], step: int, *, alarm: float = LOG_RATIO_ALARM
) -> EngineDisagrees | None:
    """`log_ratios`: nats, by engine (`role/index#incarnation`); engines without a comparable token are missing.
    `alarm`: nats, what rounding never reaches in the job's dtype (`LOG_RATIO_ALARMS`)."""
    if len(log_ratios) < 2:
        return None
    worst = max(log_ratios, key=lambda engine: log_ratios[engine])
    others = max(value for engine, value in log_ratios.items() if engine != worst)
    if log_ratios[worst] <= max(alarm, ENGINE_FACTOR * others):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardVerdict:
    odd: EngineKey | None
    """The worker that two others contradict; None: none, or all differ."""
    rewards: Rewards
    """Those of the majority; without one, of the first."""


def is_sampled(seed: int, group_id: GroupId, share: float) -> bool:
    """Whether this group is scored twice: the same for every controller of a run."""
    digest = hashlib.sha256(f"{seed}/{group_id}".encode()).digest()
    return int.from_bytes(digest[:4]) < share * 2**32


def equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING) for a, b in zip(one, other, strict=True)
    )


def judge(answers: Mapping[EngineKey, Rewards]) -> RewardVerdict:
    """`answers`: of up to three scorers, in the order in which they were asked."""
    first = next(iter(answers.values()))
    for key, rewards in answers.items():
        others = [r for k, r in answers.items() if k != key]
        if len(others) == 2 and equal(*others) and not equal(rewards, others[0]):
            return RewardVerdict(odd=key, rewards=others[0])
    return RewardVerdict(odd=None, rewards=first)
