"""Losses and gradients in float64 against the reference of the equations, to 1e-10; then everything that could go wrong
with numbers.

pytest tests/rl_runtime/algorithms/test_objective.py
"""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.objective import (
    TokenSelection,
    divisors,
    make_batch,
    objective,
    state_values,
    token_logprobs,
)
from rolecall.rl_runtime.algorithms.policy_gain import LOG_RATIO_MAX, LOG_RATIO_MIN
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
