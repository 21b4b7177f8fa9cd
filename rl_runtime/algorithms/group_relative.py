"""Advantages relative to the other samples of a prompt (GRPO, DAPO): A_i = R_i - mean(R), optionally divided by std(R).

DeepSeekMath (2402.03300) 4.1.2. Plain floats without torch, because the controller also checks here whether a group has
a learning signal.
"""

import math
from collections.abc import Sequence

EQUAL_WITHIN = 1e-6
"""Rewards of a group that differ by no more than this are equal. Their deviation would be rounding error, and dividing
by it would produce full-size advantages. The division itself therefore needs no floor and is exact.
"""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards has no learning signal."""
    return max(rewards) - min(rewards) <= EQUAL_WITHIN


def group_relative(rewards: Sequence[float], *, divide_by_std: bool) -> tuple[float, ...]:
    """Advantages of one prompt's samples; all exactly 0 for equal rewards. Uses the population deviation."""
    if all_equal(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = tuple(r - mean for r in rewards)
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return tuple(c / std for c in centred)
