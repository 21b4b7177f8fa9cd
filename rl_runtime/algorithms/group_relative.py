"""Advantages of whole samples, from their rewards (GRPO and its relatives); algorithms with a critic have none.

    group     b_i = R_i - mean(R) of the prompt's samples                             DeepSeekMath 2402.03300 4.1.2
    others    b_i = R_i - mean(R_j, j != i)                                           RLOO 2402.14740 eq. 6
    none      b_i = R_i                                                               REINFORCE++ 2501.03262
    A_i = b_i / std(R) of the prompt's samples, if `divide_by_std`
    A_i = (b_i - mean(b)) / std(b) of all samples of the step, if the method is normalized over the step

Plain floats without torch, because the controller also checks here whether a group has a learning signal, and computes
the step's mean and deviation: a microbatch has only its own groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Literal

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.rl_runtime.protocol.messages import PromptGroup, StepStatistics, TrainingSample

EQUAL_WITHIN = 1e-6
"""Rewards of a group that differ by no more than this are equal. Their deviation would be rounding error, and dividing
by it would produce full-size advantages. The division itself therefore needs no floor and is exact.
"""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards has no learning signal."""
    return max(rewards) - min(rewards) <= EQUAL_WITHIN


def above_mean(rewards: Sequence[float]) -> tuple[float, ...]:
    mean = _mean(rewards)
    return tuple(r - mean for r in rewards)


def above_others(rewards: Sequence[float]) -> tuple[float, ...]:
    """R_i - mean of the others, which is (R_i - mean) n / (n - 1)."""
    n = len(rewards)
    return tuple(c * n / (n - 1) for c in above_mean(rewards))


BASELINES: Mapping[str, Callable[[Sequence[float]], tuple[float, ...]]] = MappingProxyType(
    {"group": above_mean, "others": above_others, "none": tuple}
)


def group_relative(rewards: Sequence[float], algorithm: AlgorithmConfig) -> tuple[float, ...]:
    """Advantages of one prompt's samples, before the step's normalization. With a baseline from the group they are
    exactly 0 for equal rewards.
    """
    method = algorithm.method
    if method.baseline != "none" and all_equal(rewards):
        return (0.0,) * len(rewards)
    found = BASELINES[method.baseline](rewards)
    if not algorithm.divide_by_std:
        return found
    spread = deviation(rewards, algorithm.std)
    return tuple(a / spread for a in found)


def step_statistics(
    groups: Sequence[PromptGroup], algorithm: AlgorithmConfig, *, longest: int
) -> StepStatistics | None:
    """Mean and deviation of a whole step's advantages; None if the method does not normalize them."""
    if not algorithm.method.normalized:
        return None
    rewards = ([reward_of(s, algorithm, longest=longest) for s in g.samples] for g in groups)
    found = tuple(chain.from_iterable(group_relative(r, algorithm) for r in rewards))
    spread = 0.0 if all_equal(found) else deviation(found, algorithm.std)
    return StepStatistics(mean=_mean(found), deviation=spread)


def sample_advantages(
    rewards: Sequence[Sequence[float]], algorithm: AlgorithmConfig, statistics: StepStatistics | None
) -> list[float]:
    """Advantages of the samples of whole groups, in order. All are 0 in a step of equal ones.

    Raises:
        ValueError: the method normalizes over the step, and the step's statistics are missing.
    """
    found = list(chain.from_iterable(group_relative(group, algorithm) for group in rewards))
    if not algorithm.method.normalized:
        return found
    if statistics is None:
        raise ValueError(f"{algorithm.name} normalizes advantages over the step: its statistics are missing")
    if statistics.deviation == 0.0:
        return [0.0] * len(found)
    return [(a - statistics.mean) / statistics.deviation for a in found]


def reward_of(sample: TrainingSample, algorithm: AlgorithmConfig, *, longest: int) -> float:
    """The task's reward and the overlong penalty; 0 while the answer is not complete."""
    if not sample.is_over:
        return 0.0
    limit = longest if algorithm.overlong_limit_tokens is None else algorithm.overlong_limit_tokens
    return sample.reward + overlong_penalty(len(sample.tokens), longest=limit, cache=algorithm.overlong_buffer_tokens)


def overlong_penalty(length: int, *, longest: int, cache: int) -> float:
    """In [-1, 0] for a response of `length` tokens; -1 from `longest` on; `cache` 0 disables it."""
    if cache == 0 or length <= longest - cache:
        return 0.0
    return -min(1.0, (length - (longest - cache)) / cache)


def deviation(values: Sequence[float], std: Literal["population", "sample"]) -> float:
    """Standard deviation of two values or more."""
    squares = math.fsum(c * c for c in above_mean(values))
    return math.sqrt(squares / (len(values) - (std == "sample")))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
