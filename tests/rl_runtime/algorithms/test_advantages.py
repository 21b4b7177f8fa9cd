"""Advantages against the sums of their definitions, by hand and on random numbers, to 1e-10.

pytest tests/rl_runtime/algorithms/test_advantages.py
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.group_relative import (
    all_equal,
    group_relative,
    overlong_penalty,
    sample_advantages,
    step_statistics,
)
from rolecall.rl_runtime.algorithms.objective import gae, last_of
from rolecall.rl_runtime.protocol.messages import PromptGroup, StepStatistics, TrainingSample
from tests.rl_runtime import reference_math
from tests.rl_runtime.reference_math import Answer, Method

EXACT = 1e-10
REWARDS = st.lists(st.floats(-10, 10).map(lambda r: round(r, 3)), min_size=1, max_size=16)


# --- relative to a group


WAYS: dict[str, dict[str, Any]] = {
    "undivided": {"divide_by_std": False},
    "divided": {"divide_by_std": True},
    "divided by the sample's": {"divide_by_std": True, "std": "sample"},
    "above the others": {"name": "rloo"},
}


def relative(rewards: Sequence[float], **settings: Any) -> tuple[float, ...]:
    return group_relative(rewards, AlgorithmConfig.model_validate(settings))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(rewards=REWARDS)
def test_relative_to_a_group(way: dict[str, Any], rewards: list[float]) -> None:
    algorithm = AlgorithmConfig.model_validate(way)
    (wanted,) = reference_math.sample_advantages(
        [rewards],
        Method(
            divide_by_std=algorithm.divide_by_std, bessel=algorithm.std == "sample", baseline=algorithm.method.baseline
        ),
    )
    assert group_relative(rewards, algorithm) == pytest.approx(wanted, rel=EXACT, abs=EXACT)


def test_relative_to_a_group_by_hand() -> None:
    assert relative([1.0, 0.0, 0.5, 0.5], divide_by_std=False) == (0.5, -0.5, 0.0, 0.0)
    # Deviation of the population: sqrt((0.25 + 0.25) / 4); of a sample: sqrt((0.25 + 0.25) / 3).
    root, less = math.sqrt(2), math.sqrt(1.5)
    assert relative([1.0, 0.0, 0.5, 0.5], divide_by_std=True) == pytest.approx((root, -root, 0, 0), abs=1e-15)
    assert relative([1.0, 0.0, 0.5, 0.5], std="sample") == pytest.approx((less, -less, 0, 0), abs=1e-15)
    assert relative([1.0] + [-1.0] * 3, divide_by_std=True) == pytest.approx((3**0.5, *[-(3**-0.5)] * 3))
    # 1 above the mean of 0, 0.5, 0.5.
    assert relative([1.0, 0.0, 0.5, 0.5], name="rloo") == pytest.approx((2 / 3, -2 / 3, 0, 0), abs=1e-15)
    assert relative([1.0, 0.0], name="rloo") == (1.0, -1.0)
    assert relative([1.0, 0.0, 0.5], name="reinforce++") == (1.0, 0.0, 0.5), "there is no baseline"


NOTHING = {
    "all right": [1.0] * 8,
    "all wrong": [-1.0] * 8,
    "one third each, whose mean rounds": [0.1] * 3,
    "a group of one": [0.7],
    "equal but for rounding": [0.1 + 0.2, 0.3],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("rewards", NOTHING.values(), ids=NOTHING)
def test_equal_rewards_have_no_learning_signal_at_all(rewards: list[float], way: dict[str, Any]) -> None:
    assert all_equal(rewards)
    assert relative(rewards, **way) == (0.0,) * len(rewards), "exactly, not nearly"


def test_a_small_difference_of_rewards_counts_in_full() -> None:
    assert not all_equal([0.5, 0.5001])
    assert relative([0.5, 0.5001], divide_by_std=True) == pytest.approx((-1.0, 1.0), abs=EXACT)


# --- normalized over the step


def groups_of(rewards: Sequence[Sequence[float]], length: int = 1) -> list[PromptGroup]:
    def sample(reward: float) -> TrainingSample:
        return TrainingSample(
            request_id="r", tokens=(3,) * length, logprobs=(-1.0,) * length, versions=(0,) * length, reward=reward
        )

    return [
        PromptGroup(group_id=GroupId(f"g{n}"), prompt_tokens=(1,), samples=tuple(map(sample, group)))
        for n, group in enumerate(rewards)
    ]


@pytest.mark.parametrize("std", ["population", "sample"])
@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
@given(
    rewards=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), min_size=2, max_size=4), min_size=1, max_size=5)
)
def test_normalized_over_the_step_in_any_split(name: str, std: str, rewards: list[list[float]]) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": name, "std": std})
    statistics = step_statistics(groups_of(rewards), algorithm, longest=9)
    wanted = reference_math.sample_advantages(
        rewards,
        Method(normalized=True, divide_by_std=False, bessel=std == "sample", baseline=algorithm.method.baseline),
    )
    for group, expected in zip(rewards, wanted, strict=True):
        alone = sample_advantages([group], algorithm, statistics)
        assert alone == pytest.approx(expected, rel=1e-9, abs=1e-9), "a group needs no other group"


def test_a_steps_statistics_by_hand() -> None:
    plain, baseline = (AlgorithmConfig.model_validate({"name": n}) for n in ("reinforce++", "reinforce++-baseline"))
    groups = groups_of([[1.0, 0.0], [1.0, 1.0]])
    assert step_statistics(groups, plain, longest=9) == StepStatistics(mean=0.75, deviation=math.sqrt(3) / 4)
    # Above each group's mean: 0.5, -0.5, 0, 0.
    assert step_statistics(groups, baseline, longest=9) == StepStatistics(mean=0.0, deviation=math.sqrt(0.125))
    assert step_statistics(groups, AlgorithmConfig(), longest=9) is None
    punished = AlgorithmConfig.model_validate({"name": "reinforce++", "overlong_buffer_tokens": 2})
    found = step_statistics(groups_of([[1.0, 0.0]], length=4), punished, longest=4)
    assert found == StepStatistics(mean=-0.5, deviation=0.5), "the overlong penalty is a part of the reward"


def test_a_step_of_equal_rewards_teaches_nothing() -> None:
    algorithm = AlgorithmConfig.model_validate({"name": "reinforce++", "group_size": 1})
    statistics = step_statistics(groups_of([[0.1]] * 3), algorithm, longest=9)
    assert statistics is not None and statistics.deviation == 0.0
    assert sample_advantages([[0.1]], algorithm, statistics) == [0.0]


def test_without_the_steps_statistics_nothing_is_normalized() -> None:
    algorithm = AlgorithmConfig.model_validate({"name": "reinforce++"})
    with pytest.raises(
        ValueError, match=r"reinforce\+\+ normalizes advantages over the step: its statistics are missing"
    ):
        sample_advantages([[1.0, 0.0]], algorithm, None)


# --- punishment of length


@given(longest=st.integers(1, 300), cache=st.integers(1, 300), length=st.integers(0, 400))
def test_overlong_of_any_length(longest: int, cache: int, length: int) -> None:
    cache = min(cache, longest)  # more is refused by the job file
    wanted = reference_math.overlong(length, longest=longest, cache=cache)
    assert overlong_penalty(length, longest=longest, cache=cache) == pytest.approx(wanted, abs=EXACT)


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(0, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (21, -1.0), (400, -1.0)],
)
def test_overlong_in_its_three_pieces_and_at_both_edges(length: int, wanted: float) -> None:
    assert overlong_penalty(length, longest=20, cache=4) == wanted


def test_without_a_cache_no_length_is_punished() -> None:
    assert [overlong_penalty(n, longest=4, cache=0) for n in (3, 4, 5)] == [0.0] * 3


# --- GAE and EGAE


def padded(answers: list[Answer], prompts: list[int], garbage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values, response and reward tensors, with `garbage` as the value of every state outside the responses."""
    width = max(p + len(a.logprobs) for a, p in zip(answers, prompts, strict=True)) + 2
    values = torch.full((len(answers), width), garbage, dtype=torch.float64)
    response, rewards = (torch.zeros(len(answers), width, dtype=torch.float64) for _ in range(2))
    for i, (answer, start) in enumerate(zip(answers, prompts, strict=True)):
        end = start + len(answer.logprobs)
        values[i, start:end] = torch.tensor(answer.values[:-1], dtype=torch.float64)
        response[i, start:end] = 1.0
        rewards[i, end - 1] = 0.0 if answer.cut else answer.reward
    return values, response, rewards


def an_answer(rng: Random, length: int, *, cut: bool) -> Answer:
    return Answer(
        logprobs=[0.0] * length,
        sampler_logprobs=[0.0] * length,
        trained=[True] * length,
        reward=rng.uniform(-2, 2),
        cut=cut,
        values=[rng.uniform(-2, 2) for _ in range(length + 1)],
    )


def bootstrap(answers: list[Answer], truncation_value: str) -> Tensor:
    behind = -1 if truncation_value == "critic" else -2
    return torch.tensor([a.values[behind] if a.cut else 0.0 for a in answers], dtype=torch.float64)


@given(seed=st.integers(0, 2**32), gamma=st.sampled_from([1.0, 0.99, 0.5]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@pytest.mark.parametrize("truncation_value", ["critic", "previous"])
def test_gae_is_the_sum_of_its_definition(truncation_value: str, seed: int, gamma: float, lam: float) -> None:
    rng = Random(seed)
    answers = [an_answer(rng, rng.randint(1, 9), cut=rng.random() < 0.5) for _ in range(rng.randint(1, 5))]
    prompts = [rng.randint(1, 4) for _ in answers]
    values, response, rewards = padded(answers, prompts, garbage=1e30)
    found = gae(rewards, values, response, bootstrap(answers, truncation_value), gamma=gamma, decay=lam)
    method = Method(gamma=gamma, truncation_value="critic" if truncation_value == "critic" else "previous")
    for row, start, answer in zip(found.tolist(), prompts, answers, strict=True):
        wanted = reference_math.advantages(answer, method, lam)
        end = start + len(wanted)
        assert row[start:end] == pytest.approx(wanted, rel=EXACT, abs=EXACT)
        assert set(row[:start] + row[end:]) == {0.0}


def one_row(answer: Answer, truncation_value: str, gamma: float, lam: float) -> list[float]:
    values, response, rewards = padded([answer], [1], garbage=0.0)
    found = gae(rewards, values, response, bootstrap([answer], truncation_value), gamma=gamma, decay=lam)
    row: list[float] = found[0, 1 : 1 + len(answer.logprobs)].tolist()
    return row


@pytest.mark.parametrize("truncation_value", ["critic", "previous"])
def test_of_a_finished_answer_egae_is_gae(truncation_value: str) -> None:
    answer = an_answer(Random(3), 6, cut=False)
    assert one_row(answer, truncation_value, 0.9, 0.8) == one_row(answer, "critic", 0.9, 0.8)


def test_egae_of_a_cut_in_closed_form() -> None:
    # lambda 1: the differences telescope to gamma^(l-t) V(s_l) - V(s_t); lambda 0: one difference.
    answer = an_answer(Random(4), 5, cut=True)
    v = answer.values
    assert one_row(answer, "critic", 0.9, 1.0) == pytest.approx(
        [0.9 ** (5 - t) * v[5] - v[t] for t in range(5)], abs=1e-12
    )
    assert one_row(answer, "critic", 0.9, 0.0) == pytest.approx([0.9 * b - a for a, b in pairwise(v)], abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_without_discount_the_last_difference_before_a_cut_is_nothing(lam: float) -> None:
    # The paper's V(s_l) = V(s_l-1): the tail adds nothing, rather than a wrong terminal reward.
    answer = an_answer(Random(5), 4, cut=True)
    found = one_row(answer, "previous", 1.0, lam)
    assert found[-1] == 0.0
    assert one_row(answer, "previous", 0.9, lam)[-1] == pytest.approx(-0.1 * answer.values[3], abs=1e-12)
    # And then it does not matter that the last token is there: what comes before is as without it.
    shorter = Answer(
        logprobs=[0.0] * 3, sampler_logprobs=[0.0] * 3, trained=[True] * 3, cut=True, values=answer.values[:4]
    )
    assert found[:-1] == pytest.approx(one_row(shorter, "critic", 1.0, lam), abs=1e-12)


def test_gae_by_hand() -> None:
    # V = 0.5, 0.25; reward 1; gamma 0.5, lambda 0.5: d1 = 1 - 0.25, d0 = 0.5 * 0.25 - 0.5, A0 = d0 + 0.25 d1
    answer = Answer(
        logprobs=[0.0] * 2, sampler_logprobs=[0.0] * 2, trained=[True] * 2, reward=1.0, values=[0.5, 0.25, 9.0]
    )
    assert one_row(answer, "critic", 0.5, 0.5) == [-0.1875, 0.75]


def test_last_of_finds_each_rows_last_token() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0]])
    response = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert last_of(values, response).tolist() == [3.0, 8.0, 0.0], "a row without a response has no last value"
