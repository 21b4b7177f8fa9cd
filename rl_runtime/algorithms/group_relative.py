"""Advantages relative to the other samples of a prompt (GRPO, DAPO): A_i = R_i - mean(R), divided by std(R) if asked.

DeepSeekMath (2402.03300) 4.1.2. Plain floats, without torch: the controller asks here whether a group has a signal.
"""

import math
from collections.abc import Sequence

EQUAL_WITHIN = 1e-6
"""Rewards of a group that differ by no more are equal. Their mean and deviation would be of rounding alone, and
division by the deviation would blow it up to advantages of full size. So the division itself needs no floor, and is
exact."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards has no learning signal."""
    return max(rewards) - min(rewards) <= EQUAL_WITHIN


def group_relative(rewards: Sequence[float], *, divide_by_std: bool) -> tuple[float, ...]:
    """Of the samples of one prompt; all exactly 0 when all rewards are equal. The deviation is the population's."""
    if all_equal(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = tuple(r - mean for r in rewards)
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return tuple(c / std for c in centred)
