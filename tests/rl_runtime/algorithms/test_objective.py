"""Losses and gradients in float64 against the reference of the equations, to 1e-10; then everything that could go wrong
with numbers.

pytest tests/rl_runtime/algorithms/test_objective.py
"""

import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from rolecall.core.config.algorithm import AlgorithmConfig, AlgorithmName
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.objective import (
    TokenSelection,
    divisors,
    make_batch,
    objective,
    state_values,
    token_logprobs,
)
from rolecall.rl_runtime.algorithms.policy_gain import LOG_RATIO_MAX, LOG_RATIO_MIN, divergence
from rolecall.rl_runtime.protocol.messages import EndReason, PromptGroup, TrainingSample
from rolecall.rl_runtime.protocol.policy_health import HealthSums, health
from tests.rl_runtime import reference_math
from tests.rl_runtime.objective_rig import (
    ALGORITHMS,
    CUTS,
    LATER,
    TERMS,
    VOCABULARY,
    Case,
    RandomAnswer,
    case_of,
    configured,
    divided,
    expected_gradients,
    measure,
    random_answer,
    random_case,
)

EXACT = 1e-10
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=25, deadline=None)


def agrees(case: Case) -> None:
    """Values and gradients, through logits and values, are those of the reference."""
    measured = measure(case)
    wanted = reference_math.step(case.answers(), case.method())
    by = divisors(case.algorithm, measured.found.sums, longest=case.terms.longest)
    assert divided(case, measured) == pytest.approx((wanted.policy, wanted.value), rel=EXACT, abs=EXACT)
    for got, expected in zip(
        measured.gradients(policy=by.policy, value=by.value), expected_gradients(case, measured), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


# --- every combination that the job file allows

SWEPT: dict[str, list[dict[str, Any]]] = {
    "gain": [
        {},
        {"dual_clip": None},
        {"dual_clip": 1.1, "clip_low": 0.1, "clip_high": 0.15},
        {"importance_cap": 1.2},
        {"importance_cap": 1.2, "importance": "sequence"},
    ],
    "rejection": [
        {},
        {"rejection": "token", "rejection_low": 0.8, "rejection_high": 1.3},
        {"rejection": "sequence", "rejection_low": 0.9, "rejection_high": 1.1},
    ],
    "divergence": [
        {},
        {"kl_coefficient": 0.3},
        {"kl_coefficient": 0.3, "kl_estimator": "k2"},
        {"kl_coefficient": 0.3, "kl_in_reward": True},
    ],
    "deviation": [{}, {"std": "sample"}],
    "aggregation": [{}, {"aggregation": "token"}, {"aggregation": "sample"}],
}


@pytest.mark.parametrize("later", [False, True], ids=["only update", "later update"])
@pytest.mark.parametrize("name", AlgorithmName)
def test_every_allowed_combination(name: AlgorithmName, later: bool) -> None:
    allowed = 0
    for number, parts in enumerate(product(*SWEPT.values())):
        chosen: dict[str, Any] = {"name": str(name)}
        for part in parts:
            chosen |= part
        try:
            case = case_of(chosen, number, groups=2, later=later)
        except ValidationError:
            continue
        allowed += 1
        agrees(case)
    assert allowed >= 18


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_the_references_slopes_are_those_of_its_loss(name: str, seed: int) -> None:
    """By central differences; what is behind sg() stays."""
    case = random_case(name, seed)
    method, step, tiny = case.method(), reference_math.step, 1e-6
    frozen = [[replace(a, frozen_logprobs=a.logprobs) for a in group] for group in case.answers()]
    found = step(frozen, method)
    flat = [(g, i) for g, group in enumerate(frozen) for i in range(len(group))]

    def moved(row: int, t: int, by: float) -> float:
        groups = [list(group) for group in frozen]
        g, i = flat[row]
        logprobs = [p + by * (u == t) for u, p in enumerate(groups[g][i].logprobs)]
        groups[g][i] = replace(groups[g][i], logprobs=logprobs)
        return step(groups, method).policy

    for row, slopes in enumerate(found.by_logprob):
        for t, slope in enumerate(slopes):
            difference = (moved(row, t, tiny) - moved(row, t, -tiny)) / (2 * tiny)
            assert difference == pytest.approx(slope, rel=1e-5, abs=1e-8)


# --- random batches, and edges


@pytest.mark.parametrize("name", ALGORITHMS)
@FEW
@given(seed=SEEDS)
def test_random_batches(name: str, seed: int) -> None:
    agrees(random_case(name, seed))


def one_group(name: str, *samples: RandomAnswer, prompt: tuple[int, ...] = (1, 2)) -> Case:
    """One group of the samples; where groups have one sample, as many groups."""
    if name in CUTS:
        groups = tuple((prompt, (s,)) for s in samples)
        return Case(algorithm=configured(name, len(samples), 1), terms=TERMS, groups=groups, later=name in LATER)
    algorithm = configured(name, 1, len(samples))
    return Case(algorithm=algorithm, terms=TERMS, groups=((prompt, samples),), later=name in LATER)


def row_of(count: int, **settings: Any) -> list[RandomAnswer]:
    rng = Random(11)
    lengths = settings.pop("lengths", [3, 1, 5, 9][:count])
    return [random_answer(rng, i, length=n, **settings) for i, n in enumerate(lengths)]


def with_rewards(*rewards: float) -> list[RandomAnswer]:
    return [replace(s, sample=replace(s.sample, reward=r)) for s, r in zip(row_of(len(rewards)), rewards, strict=True)]


EDGES = {
    "one token each": row_of(2, lengths=[1, 1]),
    "an answer without a token": row_of(2, lengths=[0, 3]),
    "one token, and the longest": row_of(2, lengths=[1, 9]),
    "all truncated": row_of(3, end=EndReason.LENGTH, lengths=[9, 9, 9]),
    "all right": with_rewards(1.0, 1.0, 1.0),
    "all wrong": with_rewards(-1.0, -1.0, -1.0),
    "no variance, of a value that rounds": with_rewards(0.1, 0.1, 0.1),
    "one right": with_rewards(1.0, -1.0, -1.0),
    "all tokens too old": row_of(3, ages=[3] * 9, lengths=[9] * 3),
    "one too old among fresh ones": row_of(2, ages=[0, 3, 2], lengths=[3, 3]),
    "made by the very weights": row_of(3, ages=[0] * 9, lengths=[9] * 3, spread=0.0),
    "far from the sampler": row_of(4, spread=3.0),
    "on the edge of the punishment": row_of(4, lengths=[5, 6, 8, 9]),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("samples", EDGES.values(), ids=EDGES)
def test_edges(name: str, samples: list[RandomAnswer]) -> None:
    agrees(one_group(name, *samples))


CUT_EDGES = {
    "all cut": row_of(3, end=EndReason.TRUNCATED),
    "all cut after one token": row_of(2, end=EndReason.TRUNCATED, lengths=[1, 1]),
    "nothing fresh, cut": row_of(2, end=EndReason.TRUNCATED, lengths=[4, 4], first_fresh=4),
    "nothing fresh, over": row_of(2, lengths=[4, 4], first_fresh=4),
    "over before its first fresh token": row_of(2, lengths=[4, 2], first_fresh=6),
    "only the last token fresh": row_of(2, end=EndReason.TRUNCATED, lengths=[4, 4], first_fresh=3),
    "cut and over together": [*row_of(2, end=EndReason.TRUNCATED, first_fresh=1), *row_of(2)],
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("samples", CUT_EDGES.values(), ids=CUT_EDGES)
def test_edges_of_windows(name: str, samples: list[RandomAnswer]) -> None:
    agrees(one_group(name, *samples))


@pytest.mark.parametrize("name", ["ppo", "tppo"])
def test_a_group_of_one(name: str) -> None:
    agrees(one_group(name, *row_of(1)))


def test_lengths_are_weighted_as_in_each_paper() -> None:
    # Two samples, of 1 and 3 tokens with ratio 1, advantages -1 and +1 (or -0.5 and 0.5).
    short = TrainingSample(request_id="a", tokens=(3,), logprobs=(-1.0,), versions=(7,), reward=0.0)
    long = TrainingSample(request_id="b", tokens=(3,) * 3, logprobs=(-1.0,) * 3, versions=(7,) * 3, reward=1.0)

    def loss(**chosen: Any) -> float:
        algorithm = AlgorithmConfig.model_validate(
            {
                "group_size": 2,
                "microbatches_per_step": 1,
                "groups_per_microbatch": 1,
                "entropy_coefficient": 0,
                **chosen,
            }
        )
        group = PromptGroup(group_id=GroupId("g"), prompt_tokens=(1,), samples=(short, long))
        batch = make_batch([group], algorithm, TERMS, pad=0, dtype=torch.float64)
        now = -batch.response_st
        found = objective(batch, algorithm, TERMS, logprobs_st=now, entropy_st=now * 0)
        return float(found.policy) / divisors(algorithm, found.sums, longest=TERMS.longest).policy

    assert loss(aggregation="sample") == pytest.approx(0.0), "-(-1 + 3/3) / 2: each sample counts once"
    assert loss(aggregation="token") == pytest.approx(-0.5), "-(-1 + 3) / 4: each token counts once"
    assert loss(aggregation="constant") == pytest.approx(-2 / 18), "-(-1 + 3) / (2 * 9)"
    assert loss(aggregation="constant", divide_by_std=False) == pytest.approx(-1 / 18)


# --- one token

HALF, TWO = math.log(0.5), math.log(2.0)
# log-ratio, advantage's sign, slope of the loss by log-probability over advantage (None: none, exactly)
BOUNDS = {
    "inside, right": (0.1, 1, math.exp(0.1)),
    "inside, wrong": (0.1, -1, math.exp(0.1)),
    "at the upper bound, right": (TWO, 1, 2.0),
    "at the upper bound, wrong": (TWO, -1, 2.0),
    "at the lower bound, right": (HALF, 1, 0.5),
    "at the lower bound, wrong": (HALF, -1, 0.5),
    "above, right: clipped": (math.nextafter(TWO, 3) + 1e-15, 1, None),
    "above, wrong: pushed back": (1.0, -1, math.e),
    "below, right: pulled back": (-1.0, 1, 1 / math.e),
    "below, wrong: clipped": (math.nextafter(HALF, -3) - 1e-15, -1, None),
    "the same": (0.0, 1, 1.0),
    "far above, right": (19.0, 1, None),
    "far below, wrong": (-99.0, -1, None),
}
CLIPPED: dict[str, Any] = {"clip_low": 0.5, "clip_high": 1.0}  # of which exp and log round to the very bounds


def one_token(
    log_ratio: float, advantage: float, *, dtype: torch.dtype = torch.float64, **chosen: Any
) -> tuple[float, float, HealthSums]:
    """Objective, slope by log-probability and sums of a token; of two samples, the other one weighs nothing."""
    algorithm = AlgorithmConfig.model_validate({"group_size": 2, "entropy_coefficient": 0.0, **chosen})
    samples = (
        TrainingSample(request_id="a", tokens=(3,), logprobs=(-1.0,), versions=(7,), reward=advantage),
        TrainingSample(request_id="b", tokens=(3,), logprobs=(-1.0,), versions=(0,), reward=-advantage),
    )
    group = PromptGroup(group_id=GroupId("g"), prompt_tokens=(1,), samples=samples)
    batch = make_batch([group], algorithm, TERMS, pad=0, dtype=dtype)
    # The sampler's is 0, so that the ratio's logarithm is the number asked for to the last bit.
    batch = replace(batch, sampler_logprobs_st=torch.zeros(2, 2, dtype=dtype))
    now = torch.tensor([[5.0, log_ratio], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    none = torch.zeros_like(now)
    found = objective(batch, algorithm, TERMS, logprobs_st=now, entropy_st=none, reference_logprobs_st=none)
    (slope,) = torch.autograd.grad(found.policy, now)
    assert slope.flatten()[[0, 2, 3]].tolist() == [0.0] * 3
    return -float(found.policy.detach()), -float(slope[0, 1]), found.sums


@pytest.mark.parametrize(("log_ratio", "sign", "slope"), BOUNDS.values(), ids=BOUNDS)
def test_a_ratio_at_its_bounds_is_inside(log_ratio: float, sign: int, slope: float | None) -> None:
    if log_ratio in (HALF, TWO):
        ratio = float(torch.tensor(log_ratio, dtype=torch.float64).exp())
        assert ratio in (1.0 - CLIPPED["clip_low"], 1.0 + CLIPPED["clip_high"]), "the very bound, not nearly"
    gain, got, sums = one_token(log_ratio, sign, **CLIPPED)
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 0.5), 2.0)
    assert gain == pytest.approx(min(ratio * sign, bounded * sign), rel=EXACT, abs=EXACT)
    if slope is None:
        assert got == 0.0
    else:
        assert got == pytest.approx(slope * sign, rel=EXACT)
    assert (sums.clipped_high, sums.clipped_low) == (slope is None and sign > 0, slope is None and sign < 0)


def test_each_bound_is_its_own() -> None:
    # DAPO's 0.2 and 0.28: between 1.2 and 1.28 nothing is clipped, between 0.72 and 0.8 it is.
    for ratio, sign, clipped in ((1.25, 1, False), (1.29, 1, True), (0.81, -1, False), (0.75, -1, True)):
        gain, slope, _ = one_token(math.log(ratio), sign, clip_low=0.2, clip_high=0.28)
        assert (slope == 0.0) is clipped, ratio
        assert gain == pytest.approx(sign * min(max(ratio, 0.8), 1.28))


def test_a_truncated_weight_is_a_number_without_a_gradient() -> None:
    for ratio, weight in ((0.1, 0.1), (1.9, 1.9), (2.0, 2.0), (2.1, 2.0), (1e4, 2.0)):
        gain, slope, sums = one_token(math.log(ratio), -1, importance_cap=2.0)
        assert (gain, slope) == pytest.approx((-weight, -weight), rel=EXACT)
        assert sums.capped == (ratio > 2.0)
        assert (sums.clipped_low, sums.clipped_high) == (0, 0)


def test_the_dual_clip_bounds_what_is_wrong_and_nothing_else() -> None:
    for ratio, sign, gain, slope in (
        (2.9, -1, -2.9, -2.9),
        (3.1, -1, -3.0, 0.0),
        (1e6, -1, -3.0, 0.0),
        (1e6, 1, 2.0, 0.0),
        (0.4, -1, -0.5, 0.0),
    ):
        got = one_token(math.log(ratio), sign, **CLIPPED)
        assert got[:2] == pytest.approx((gain, slope), rel=EXACT)
        assert got[2].clipped_dual == (ratio > 3 and sign < 0)
    two = one_token(TWO, -1, clip_low=0.5, dual_clip=2.0)
    assert two[:2] == (-2.0, -2.0) and two[2].clipped_dual == 0, "the bound is inside"
    assert one_token(5.0, -1, dual_clip=None)[1] == pytest.approx(-math.exp(5.0), rel=EXACT)


@pytest.mark.parametrize(
    ("estimator", "away", "value", "slope"),
    [
        ("k3", 0.0, 0.0, 0.0),
        ("k3", 2.0, math.exp(2.0) - 3.0, 1 - math.exp(2.0)),
        ("k3", -2.0, math.exp(-2.0) + 1.0, 1 - math.exp(-2.0)),
        ("k3", 2.7, 10.0, 0.0),
        ("k3", 20.0, 10.0, 0.0),
        ("k3", -10.9, 9.9 + math.exp(-10.9), 1 - math.exp(-10.9)),
        ("k3", -11.1, 10.0, 0.0),
        ("k2", 2.0, 2.0, -2.0),
        ("k2", -4.0, 8.0, 4.0),
        ("k2", math.sqrt(20.0) + 1e-9, 10.0, 0.0),
        ("k2", -20.0, 10.0, 0.0),
    ],
)
def test_a_divergence_is_at_most_10(estimator: str, away: float, value: float, slope: float) -> None:
    algorithm = AlgorithmConfig.model_validate({"kl_coefficient": 0.5, "kl_estimator": estimator})
    now = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    found = divergence(away - now, algorithm)
    (got,) = torch.autograd.grad(found, now)
    assert (float(found.detach()), float(got)) == pytest.approx((value, slope), rel=EXACT, abs=EXACT)


def rows(name: str, moved: list[list[float]], **outputs: Any) -> tuple[list[list[float]], HealthSums]:
    """Slopes of two samples' tokens, of which the first is worth 1 and the second -1, at these log-ratios."""
    length = len(moved[0])
    samples = [
        TrainingSample(
            request_id=f"r{i}", tokens=(3,) * length, logprobs=(-1.0,) * length, versions=(7,) * length, reward=r
        )
        for i, r in enumerate((1.0, -1.0))
    ]
    algorithm = AlgorithmConfig.model_validate(
        {"name": name, "group_size": 2, "entropy_coefficient": 0.0, **outputs.pop("settings", {})}
    )
    group = PromptGroup(group_id=GroupId("g"), prompt_tokens=(1,), samples=tuple(samples))
    batch = make_batch([group], algorithm, TERMS, pad=0, dtype=torch.float64)
    batch = replace(batch, sampler_logprobs_st=torch.zeros(2, 1 + length, dtype=torch.float64))
    now = torch.tensor([[0.0, *row] for row in moved], dtype=torch.float64, requires_grad=True)
    found = objective(batch, algorithm, TERMS, logprobs_st=now, entropy_st=now.detach() * 0, **outputs)
    (slope,) = torch.autograd.grad(-found.policy, now)
    return slope[:, 1:].tolist(), found.sums


def test_the_ratio_of_an_answer_is_its_geometric_mean() -> None:
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    # The mean log-ratio is 0.1 in both: inside, although single tokens are far outside.
    found, _ = rows("gspo", [[1.0, -0.8], [0.5, -0.3]], settings=wide)
    each = math.exp(0.1) / 2
    assert found == [pytest.approx([each, each]), pytest.approx([-each, -each])]
    found, sums = rows("gspo", [[1.0, -0.4], [-1.0, 0.4]], settings=wide)
    assert found == [[0.0, 0.0], [0.0, 0.0]], "exp(0.3) > 1.2, and exp(-0.3) < 0.8"
    assert (sums.clipped_high, sums.clipped_low, sums.clippable) == (2, 2, 4)


def test_the_weight_of_an_answer_is_the_product_over_its_tokens() -> None:
    settings = {"importance_cap": 2.0, "importance": "sequence"}
    found, sums = rows("grpo", [[0.5, -0.2], [1.0, 0.5]], settings=settings)
    assert found == [pytest.approx([math.exp(0.3)] * 2), pytest.approx([-2.0] * 2)]
    assert (sums.capped, sums.weighted, sums.clippable) == (2, 4, 0)


def test_what_is_rejected_has_no_gradient_and_is_not_counted() -> None:
    tokens, sums = rows("grpo", [[0.1, -0.8], [0.6, 0.7]], settings={"rejection": "token"})
    assert tokens == [pytest.approx([math.exp(0.1), 0.0]), pytest.approx([-math.exp(0.6), 0.0])]
    assert (sums.rejected, sums.judged) == (2, 4)
    token_algorithm = AlgorithmConfig.model_validate({"aggregation": "token", "rejection": "token"})
    assert divisors(token_algorithm, sums, longest=9).policy == 2.0
    # Of the first answer the geometric mean is exp(-0.35), of the second exp(0.65).
    answers, sums = rows("grpo", [[0.1, -0.8], [0.6, 0.7]], settings={"rejection": "sequence", "rejection_high": 1.8})
    assert answers == [pytest.approx([math.exp(0.1), math.exp(-0.8)]), [0.0, 0.0]]
    assert sums.rejected == 2


def test_a_ratio_at_the_bounds_of_rejection_is_kept() -> None:
    found, sums = rows("grpo", [[HALF, TWO], [0.0, 0.0]], settings={"rejection": "token", "importance_cap": 4.0})
    assert found[0] == pytest.approx([0.5, 2.0]) and sums.rejected == 0


def test_behind_the_first_update_the_ratio_is_to_the_old_policy_and_its_weight_is_truncated() -> None:
    old = torch.tensor([[0.0, 0.2, 1.5], [0.0, 0.2, -3.0]], dtype=torch.float64)
    found, sums = rows("grpo", [[0.3, 1.5], [0.3, -3.0]], old_logprobs_st=old)
    assert found[0] == pytest.approx([math.exp(0.2) * math.exp(0.1), 2.0]), "1.5 is truncated to a weight of 2"
    assert found[1] == pytest.approx([-math.exp(0.3), -math.exp(-3.0)]), "and its ratio is 1"
    assert (sums.capped, sums.weighted, sums.clipped_low) == (1, 4, 0)
    # At the first update the policy is the old one: all weights, no ratio. With one update, all ratio.
    first, _ = rows("grpo", [[0.2, 0.5], [0.2, -0.5]], old_logprobs_st=torch.tensor([[0, 0.2, 0.5], [0, 0.2, -0.5]]))
    only, _ = rows("grpo", [[0.2, 0.5], [0.2, -0.5]])
    torch.testing.assert_close(torch.tensor(first), torch.tensor(only), rtol=1e-7, atol=0.0)


def test_cispo_is_grpo_with_truncated_weights_over_tokens() -> None:
    moved = [[0.1, 3.0], [-4.0, 0.9]]
    same = {"importance_cap": 2.0, "aggregation": "token"}
    assert rows("cispo", moved) == rows("grpo", moved, settings=same)


def test_dr_grpo_is_grpo_without_its_two_divisions() -> None:
    moved = [[0.1, 0.2], [0.0, 0.9]]
    same = {"divide_by_std": False, "aggregation": "constant"}
    assert rows("dr-grpo", moved) == rows("grpo", moved, settings=same)


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [(0.1, 0.405, -0.9), (0.2, 0.32, -0.8), (0.5, 0.32, 0.0), (1.7, 0.32, 0.0), (2.1, 0.605, 1.1), (-0.5, 1.125, -1.5)],
    ids=["inside", "at the bound", "beyond, nearer", "beyond, behind", "beyond, farther", "the wrong way"],
)
def test_a_value_that_moved_too_far_towards_its_return_is_clipped(value: float, loss: float, slope: float) -> None:
    # The return is 1 and the old value 0: 0.2 is as far as it may go.
    algorithm = AlgorithmConfig.model_validate({"name": "ppo", "group_size": 1, "ppo_epochs": 2, "value_clip": 0.2})
    sample = TrainingSample(request_id="a", tokens=(3,), logprobs=(-1.0,), versions=(7,), reward=1.0)
    group = PromptGroup(group_id=GroupId("g"), prompt_tokens=(1,), samples=(sample,))
    batch = make_batch([group], algorithm, TERMS, pad=0, dtype=torch.float64)
    none = torch.zeros(1, 2, dtype=torch.float64)
    values = torch.tensor([[value, 9.0]], dtype=torch.float64, requires_grad=True)

    def found(old: Tensor | None) -> tuple[float, list[float], HealthSums]:
        made = objective(
            batch,
            algorithm,
            TERMS,
            logprobs_st=none,
            entropy_st=none,
            values_after_st=values,
            old_values_after_st=old,
        )
        assert made.value is not None
        return float(made.value.detach()), torch.autograd.grad(made.value, values)[0][0].tolist(), made.sums

    got, slopes, sums = found(none)
    assert (got, slopes) == (pytest.approx(loss), [pytest.approx(slope), 0.0])
    assert (sums.value_clipped, sums.value_clippable) == (slope == 0.0, 1)
    got, slopes, sums = found(None)
    assert (got, slopes[0]) == pytest.approx(((value - 1) ** 2 / 2, value - 1)), "with one update nothing is clipped"
    assert sums.value_clippable == 0


def test_a_divergence_in_the_reward_is_of_each_token_and_bounded() -> None:
    known = torch.tensor([[0.0, 0.0, -0.3], [0.0, 0.0, 0.0]], dtype=torch.float64)
    settings = {"kl_coefficient": 0.5, "kl_in_reward": True, "divide_by_std": False}

    def first(second_token: float) -> float:
        known[0, 2] = -second_token
        found, _ = rows("grpo", [[0.0, 0.0], [0.0, 0.0]], settings=settings, reference_logprobs_st=known)
        assert found[0][0] == pytest.approx(found[0][1], nan_ok=True), "summed over the answer"
        return found[0][0]

    assert first(0.0) == 1.0
    assert first(0.4) == pytest.approx(1.0 - 0.5 * 0.4 / 2), "half of it is the mean's"
    assert first(10.0) == first(30.0) == pytest.approx(1.0 - 0.5 * 10 / 2)
    assert first(-30.0) == pytest.approx(1.0 + 0.5 * 10 / 2)
    assert math.isnan(first(math.nan)), "which fails the step, and no comparison may hide it"


# --- numbers that could poison a step

FAR = [20.1, 89.0, 710.0, 1e30, -101.0, -1e30, -math.inf]
WAYS: dict[str, dict[str, Any]] = {"clipped": {}, "capped": {"importance_cap": 3.0}, "kl": {"kl_coefficient": 0.5}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0], ids=["right", "wrong", "neither"])
@pytest.mark.parametrize("log_ratio", FAR)
def test_an_extreme_ratio_stays_finite_and_is_reported(
    log_ratio: float, advantage: float, way: dict[str, Any], dtype: torch.dtype
) -> None:
    gain, slope, sums = one_token(log_ratio, advantage, dtype=dtype, **way)
    assert math.isfinite(gain)
    assert slope == 0.0, "it measures engine against trainer, not the objective"
    assert all(math.isfinite(v) for v in health(sums).to_dict().values())
    assert sums.ratio_max == pytest.approx(math.exp(LOG_RATIO_MAX if log_ratio > 0 else LOG_RATIO_MIN), rel=1e-6)
    assert sums.log_ratio_max == pytest.approx(min(abs(log_ratio), -LOG_RATIO_MIN)), "the detector sees it"


def test_just_inside_the_bounds_of_log_ratios_the_equations_hold() -> None:
    for log_ratio, advantage in ((19.9, -1.0), (-30.0, 1.0)):
        gain, slope, _ = one_token(log_ratio, advantage, dual_clip=None)
        assert (gain, slope) == pytest.approx((math.exp(log_ratio) * advantage,) * 2, rel=EXACT)


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if not configured(n, 1, 2).kl_in_reward])
def test_untrained_tokens_have_no_effect(name: str) -> None:
    """Too old, used before, of a prompt or padding: not even a ratio that overflows, or infinite values, get
    through. (A divergence in the reward is that of the whole answer.)"""
    case = random_case(name, 5)
    plain = measure(case)

    def spoilt(one: RandomAnswer) -> RandomAnswer:
        trained = one.answer(case.terms).trained
        logprobs = tuple(p if on else -1e4 for p, on in zip(one.sample.logprobs, trained, strict=True))
        return replace(one, sample=replace(one.sample, logprobs=logprobs))

    groups = tuple((prompt, tuple(map(spoilt, group))) for prompt, group in case.groups)
    worse = measure(replace(case, groups=groups), garbage=1e308, pad=VOCABULARY - 1)
    assert not torch.equal(worse.batch.sampler_logprobs_st, plain.batch.sampler_logprobs_st), "something was spoilt"
    assert torch.equal(plain.found.policy, worse.found.policy)
    for a, b in zip(plain.gradients(), worse.gradients(), strict=True):
        assert torch.equal(a, b)
    assert replace(plain.found.sums, log_ratio_max=0.0) == replace(worse.found.sums, log_ratio_max=0.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_outputs_for_untrained_tokens_may_be_anything(name: str, garbage: float) -> None:
    case = random_case(name, 6)
    batch = make_batch(
        case.protocol_groups(), case.algorithm, case.terms, pad=0, dtype=torch.float64, statistics=case.statistics
    )
    torch.manual_seed(1)
    outputs = [torch.randn_like(batch.policy_st) for _ in range(6)]
    answered = batch.response_st > 0
    behind = torch.nn.functional.pad(batch.response_st[:, 1:], (0, 1)) + batch.response_st > 0
    # In the reward and in the critic's returns a token counts although the policy is not trained on it.
    known = answered if case.algorithm.kl_in_reward else batch.policy_st > 0
    trained = batch.policy_st > 0
    inside = (trained, trained, known, trained, behind, behind)

    def found(x: float) -> list[Tensor]:
        spoilt = [torch.where(m, o, x) for m, o in zip(inside, outputs, strict=True)]
        now, entropy, reference, old, values, old_values = spoilt
        leaves = [now.requires_grad_(), entropy.requires_grad_(), values.requires_grad_()]
        made = objective(
            batch,
            case.algorithm,
            case.terms,
            logprobs_st=now,
            entropy_st=entropy,
            values_after_st=values if case.algorithm.has_critic else None,
            reference_logprobs_st=reference if case.algorithm.kl_coefficient else None,
            old_logprobs_st=old if case.later else None,
            old_values_after_st=old_values if case.later and case.algorithm.has_critic else None,
        )
        loss = made.policy if made.value is None else made.policy + made.value
        return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]

    for plain, worse in zip(found(0.0), found(garbage), strict=True):
        assert torch.isfinite(worse).all() and torch.equal(plain, worse)


def test_values_of_padding_may_be_infinite() -> None:
    case = random_case("tppo", 8)
    batch = make_batch(case.protocol_groups(), case.algorithm, case.terms, pad=0, dtype=torch.float64)
    plain = measure(case)
    inside = torch.nn.functional.pad(batch.response_st[:, 1:], (0, 1)) + batch.response_st > 0
    values = torch.where(inside, plain.values_after.detach(), math.inf).requires_grad_()
    nothing = torch.zeros_like(values)
    found = objective(
        batch, case.algorithm, case.terms, logprobs_st=nothing, entropy_st=nothing, values_after_st=values
    )
    assert found.value is not None and plain.found.value is not None
    assert torch.equal(found.value, plain.found.value)
    (got,) = torch.autograd.grad(found.value, values)
    assert torch.equal(got, torch.autograd.grad(plain.found.value, plain.values_after)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_token_that_cannot_be_has_no_part_in_the_entropy(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], dtype=dtype, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert entropy[0].tolist() == [0.0, pytest.approx(math.log(2.0))]
    (slope,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert slope[0].tolist() == [pytest.approx([-0.5, 0.5, 0.0]), [0.0] * 3]


def test_at_least_float32_for_every_dtype_of_the_model() -> None:
    logits = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert logprobs.dtype is entropy.dtype is torch.float32
    assert float(logprobs[0, 1]) == pytest.approx(-math.log1p(math.exp(-1.0)), abs=1e-7)


GOOD = TrainingSample(request_id="r1", tokens=(3, 4), logprobs=(-1.0, -2.0), versions=(7, 7), reward=1.0)
REFUSED: dict[str, tuple[TrainingSample, tuple[int, ...], str]] = {
    "a token without its log-probability": (replace(GOOD, logprobs=(-1.0,)), (1,), "differ in length"),
    "a token without its version": (replace(GOOD, versions=(7,)), (1,), "differ in length"),
    "no prompt": (GOOD, (), "without a prompt"),
    "no number": (replace(GOOD, logprobs=(-1.0, math.nan)), (1,), "log-probability is not finite"),
    "impossible token": (replace(GOOD, logprobs=(-math.inf, -1.0)), (1,), "log-probability is not finite"),
    "reward of no number": (replace(GOOD, reward=math.nan), (1,), "its reward is nan"),
    "endless reward": (replace(GOOD, reward=math.inf), (1,), "its reward is inf"),
    "cut, to be compared": (replace(GOOD, end=EndReason.TRUNCATED), (1,), "its answer is not over"),
}


@pytest.mark.parametrize(("sample", "prompt", "why"), REFUSED.values(), ids=REFUSED)
def test_untrainable_samples_are_rejected_by_name(sample: TrainingSample, prompt: tuple[int, ...], why: str) -> None:
    group = PromptGroup(group_id=GroupId("g"), prompt_tokens=prompt, samples=(replace(GOOD, request_id="r0"), sample))
    with pytest.raises(ValueError, match=f"sample r.: .*{why}"):
        make_batch([group], configured("grpo", 1, 2), TERMS, pad=0)


def test_a_cut_answer_has_no_reward() -> None:
    group = PromptGroup(
        group_id=GroupId("g"), prompt_tokens=(1,), samples=(replace(GOOD, end=EndReason.TRUNCATED, reward=math.nan),)
    )
    batch = make_batch([group], configured("tppo", 1, 1), TERMS, pad=0)
    assert batch.rewards_s.tolist() == [0.0]
    assert batch.sums.reward == 0.0


# --- masks


def test_batch_is_padded_and_masked() -> None:
    samples = (
        TrainingSample(request_id="a", tokens=(7,), logprobs=(-0.5,), versions=(5,), reward=1.0),
        TrainingSample(request_id="b", tokens=(8, 2), logprobs=(-0.25, -0.125), versions=(4, 7), reward=0.0),
    )
    other = TrainingSample(
        request_id="c", tokens=(9,), logprobs=(-1.0,), versions=(4,), reward=0.5, end=EndReason.LENGTH
    )
    groups = [
        PromptGroup(group_id=GroupId("g00000000"), prompt_tokens=(1, 5), samples=samples),
        PromptGroup(group_id=GroupId("g00000001"), prompt_tokens=(1,), samples=(other, other)),
    ]
    b = make_batch(groups, configured("dr. grpo", 2, 2), TERMS, pad=0)
    assert b.tokens_st.tolist() == [[1, 5, 7, 0], [1, 5, 8, 2], [1, 9, 0, 0], [1, 9, 0, 0]]
    assert b.response_st.tolist() == [[0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert b.policy_st.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0] * 4, [0] * 4], "versions 5 to 7 are young enough"
    assert b.weights_st.tolist() == b.policy_st.tolist()
    assert not b.value_st.any(), "there is no critic"
    assert b.sampler_logprobs_st.tolist() == [[0, 0, -0.5, 0], [0, 0, -0.25, -0.125], [0, -1, 0, 0], [0, -1, 0, 0]]
    assert b.versions_st.tolist() == [[-1, -1, 5, -1], [-1, -1, 4, 7], [-1, 4, -1, -1], [-1, 4, -1, -1]]
    assert b.relative_s.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert b.over_s.tolist() == [True] * 4


def test_policy_and_critic_train_on_their_own_tokens() -> None:
    rng = Random(0)
    cut = random_answer(rng, 0, length=4, end=EndReason.TRUNCATED, first_fresh=2, ages=[1, 0, 0, 3])
    over = random_answer(rng, 1, length=3, first_fresh=1, ages=[3, 0, 0])
    case = one_group("tppo", cut, over, prompt=(1,))
    b = measure(case).batch
    assert b.policy_st.tolist() == [[0, 0, 0, 1, 0], [0, 0, 1, 1, 0]], "fresh and young, of both"
    assert b.value_st.tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0]], "all tokens, of what is over"
    by_logits, by_values = measure(case).gradients()
    assert (by_logits.abs().sum(-1) > 0).int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 0, 0]], (
        "logits predict the next token"
    )
    assert (by_values != 0).int().tolist() == [[0] * 5, [1, 1, 1, 0, 0]], "the state behind an answer is no state"


def test_weights_of_a_sample_are_of_the_tokens_that_are_trained() -> None:
    rng = Random(0)
    samples = [random_answer(rng, 0, length=4, ages=[0, 0, 3, 3]), random_answer(rng, 1, length=3, ages=[3, 3, 3])]
    b = measure(one_group("grpo", *samples, prompt=(1,))).batch
    assert b.weights_st.tolist() == [[0, 0.5, 0.5, 0, 0], [0] * 5]


def test_state_values_are_of_the_state_in_which_a_token_was_chosen() -> None:
    assert state_values(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]


def test_the_log_probability_of_a_token_is_that_after_the_previous_one() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)], [9.0, 0.0]]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([[1, 0, 1]]))
    assert logprobs[0].tolist() == [0.0, pytest.approx(math.log(0.5)), pytest.approx(math.log(0.75))]
    assert entropy[0].tolist() == [
        0.0,
        pytest.approx(math.log(2.0)),
        pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)),
    ]


def test_the_overlong_punishment_reaches_the_reward_and_not_the_report() -> None:
    rng = Random(1)
    samples = [random_answer(rng, i, length=n, reward=1.0) for i, n in enumerate((5, 7, 9))]
    case = one_group("dapo", *samples)  # longest 9, cache 4
    batch = measure(case).batch
    assert batch.rewards_s.tolist() == [1.0, 0.5, 0.0]
    assert batch.sums.reward == 3.0, "as the task gave it"
    assert batch.relative_s.tolist() == pytest.approx([1.5**0.5, 0.0, -(1.5**0.5)]), "and equal rewards teach length"


# --- the split cannot matter


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_microbatches_of_any_split_add_up_to_the_whole(name: str, seed: int) -> None:
    case = random_case(name, seed, groups=5)
    whole = measure(case)
    by = divisors(case.algorithm, whole.found.sums, longest=case.terms.longest)
    wanted = torch.cat([_per_sample(case, measure(case), by.policy, by.value)])
    order = list(range(5))
    Random(seed).shuffle(order)
    for pieces in (order[:1], order[1:]), (order[:3], order[3:4], order[4:]), [[n] for n in order]:
        parts = [case.only(numbers) for numbers in pieces]
        measured = [measure(part) for part in parts]
        total = HealthSums()
        for one in measured:
            total = total + one.found.sums
        divided_by = divisors(case.algorithm, total, longest=case.terms.longest)
        assert divided_by == by
        rows = torch.cat(
            [
                _per_sample(part, one, divided_by.policy, divided_by.value)
                for part, one in zip(parts, measured, strict=True)
            ]
        )
        placed = torch.empty_like(rows)
        size = case.algorithm.group_size
        places = [n * size + i for numbers in pieces for n in numbers for i in range(size)]
        placed[places] = rows
        torch.testing.assert_close(placed, wanted, rtol=1e-13, atol=1e-15)


def _per_sample(case: Case, measured: Any, policy: float, value: float) -> Tensor:
    """(S, longest, V + 1) gradients of the responses, without prompts and padding."""
    by_logits, by_values = measured.gradients(policy=policy, value=value)
    both = torch.cat([by_logits, by_values.unsqueeze(-1)], dim=-1)
    found = torch.zeros(len(case.rows()), case.terms.longest, VOCABULARY + 1, dtype=torch.float64)
    for i, (start, one) in enumerate(case.rows()):
        length = len(one.sample.tokens)
        found[i, :length] = both[i, start - 1 : start - 1 + length]
    return found


def test_divisors() -> None:
    sums = HealthSums(tokens=37, value_tokens=50, samples=3)
    shape: dict[str, Any] = {"microbatches_per_step": 4, "groups_per_microbatch": 2, "group_size": 8}

    def of(aggregation: str, step: HealthSums = sums) -> tuple[float, float]:
        algorithm = AlgorithmConfig.model_validate({"aggregation": aggregation, **shape})
        found = divisors(algorithm, step, longest=16)
        return found.policy, found.value

    assert of("constant") == (4 * 2 * 8 * 16, 50)
    assert of("sample") == (64, 50)
    assert of("token") == (37, 50)
    assert of("token", HealthSums()) == (1, 1), "nothing over something"


# --- a real network


class Network(nn.Module):
    """Causal, small, smooth: the output after token t depends on tokens 0 to t."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.mix = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, tokens_st: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.mix(self.embed(tokens_st))[0])
        return hidden


def through_networks(name: str, seed: int) -> tuple[Any, list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(seed)
    policy, critic, reference = (Network(n).double() for n in (VOCABULARY, 1, VOCABULARY))
    case = random_case(name, seed, groups=3)
    batch = make_batch(
        case.protocol_groups(), case.algorithm, case.terms, pad=0, dtype=torch.float64, statistics=case.statistics
    )
    with torch.no_grad():
        known = token_logprobs(reference(batch.tokens_st), batch.tokens_st)[0]
        # Sampled from about this policy, so that ratios lie on both sides of the bounds.
        now = token_logprobs(policy(batch.tokens_st), batch.tokens_st)[0]
        batch = replace(batch, sampler_logprobs_st=(now + 0.5 * torch.randn_like(now)) * batch.response_st)

    def sums() -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = token_logprobs(policy(batch.tokens_st), batch.tokens_st)
        found = objective(
            batch,
            case.algorithm,
            case.terms,
            logprobs_st=logprobs,
            entropy_st=entropy,
            values_after_st=critic(batch.tokens_st).squeeze(-1),
            reference_logprobs_st=known,
        )
        return found.policy, found.value

    return sums, list(policy.parameters()), list(critic.parameters())


def central(f: Any, parameters: list[nn.Parameter], towards: list[Tensor], step: float = 1e-5) -> float:
    """(f(x + h) - f(x - h)) / 2h."""
    found = []
    with torch.no_grad():
        for sign in (1.0, -1.0):
            for p, d in zip(parameters, towards, strict=True):
                p.add_(d, alpha=sign * step)
            found.append(float(f()))
            for p, d in zip(parameters, towards, strict=True):
                p.sub_(d, alpha=sign * step)
    return (found[0] - found[1]) / (2 * step)


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if configured(n, 1, 2).importance_cap is None])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_policys_gradient_through_a_network(name: str, seed: int) -> None:
    sums, policy, critic = through_networks(name, seed)
    gradient = torch.autograd.grad(sums()[0], policy + critic, allow_unused=True)
    assert all(g is None for g in gradient[len(policy) :]), "advantages teach the critic nothing"
    for _ in range(3):
        towards = [torch.randn_like(p) for p in policy]
        wanted = sum(float((g * d).sum()) for g, d in zip(gradient, towards, strict=False) if g is not None)
        assert abs(wanted) > 1e-3
        assert central(lambda: sums()[0], policy, towards) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_critics_gradient_through_a_network(seed: int) -> None:
    # With lambda 1 a return is the reward itself, and differences of the sum see what the gradient sees.
    sums, policy, critic = through_networks("ppo, as it comes", seed)
    gradient = torch.autograd.grad(sums()[1], policy + critic, allow_unused=True)
    assert all(g is None for g in gradient[: len(policy)])
    for _ in range(3):
        towards = [torch.randn_like(p) for p in critic]
        wanted = sum(
            float((g * d).sum()) for g, d in zip(gradient[len(policy) :], towards, strict=True) if g is not None
        )
        assert abs(wanted) > 1e-3
        assert central(lambda: sums()[1], critic, towards) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("terms", [replace(TERMS, staleness_max=0), replace(TERMS, staleness_max=9)])
def test_the_bound_on_staleness_is_the_terms(terms: TokenSelection) -> None:
    case = replace(random_case("dapo", 4), terms=terms)
    agrees(case)
    trained = sum(sum(a.trained) for group in case.answers() for a in group)
    assert measure(case).found.sums.tokens == trained


def test_the_alarm_covers_only_tokens_of_this_version() -> None:
    sample = replace(GOOD, logprobs=(-1.0, -1.0), versions=(6, 7))
    group = PromptGroup(group_id=GroupId("g"), prompt_tokens=(1,), samples=(sample,))
    algorithm = configured("grpo, as it comes", 1, 2)
    now = torch.tensor([[0.0, -3.0, -1.25]], dtype=torch.float64)

    def seen(version: int) -> float:
        terms = replace(TERMS, policy_version=version)
        batch = make_batch([group], algorithm, terms, pad=0, dtype=torch.float64)
        return objective(batch, algorithm, terms, logprobs_st=now, entropy_st=now * 0).sums.log_ratio_max

    assert [seen(version) for version in (6, 7, 8)] == [2.0, 0.25, -1.0], "of version 8 nothing was compared"
