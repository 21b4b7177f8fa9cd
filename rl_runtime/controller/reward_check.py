"""Second opinions on rewards: do workers give the same group the same rewards? Pure.

The tasks' scorers are deterministic, so equal tokens have equal rewards on every machine. A seeded share of the scored
groups is scored by another worker, too; if the two differ, a third decides, and the odd one out is named.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolecall.core.ids import GroupId
from rolecall.rl_runtime.controller.open_group import EngineKey

Rewards = tuple[float, ...]
"""One per sample of a group."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardVerdict:
    odd: EngineKey | None
    """Whose rewards two others contradict; None: nobody's, or all differ."""
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
