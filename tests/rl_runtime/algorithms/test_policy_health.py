"""Health against lists of single tokens; however a step was cut, and however large it was.

pytest tests/rl_runtime/algorithms/test_policy_health.py
"""

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.rl_runtime.protocol.messages import EndReason
from rolecall.rl_runtime.protocol.policy_health import HealthSums, PolicyHealth, health
from tests.rl_runtime import reference_math
from tests.rl_runtime.objective_rig import ALGORITHMS, Case, configured, measure, random_answer, random_case

EXACT = 1e-10
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=15, deadline=None)


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def from_lists(case: Case) -> PolicyHealth:
    """Every sign by its words, from lists of tokens and samples."""
    method = case.method()
    groups = case.answers()
    answers = [a for group in groups for a in group]
    samples = [one.sample for _, one in case.rows()]
    worth = reference_math.token_advantages(groups, method)
    trained = [(a, t, worth[i][t]) for i, a in enumerate(answers) for t, on in enumerate(a.trained) if on]
    fresh = sum(max(0, len(s.tokens) - s.first_fresh) for s in samples)
    ratios = [math.exp(a.logprobs[t] - a.sampler_logprobs[t]) for a, t, _ in trained]
    clips, later = method.cap is None, case.later
    compared = [reference_math.clip_ratio(a, t, method) for a, t, _ in trained] if clips else []
    weights = [] if clips else [reference_math.weight(a, t, method) for a, t, _ in trained]
    if clips and later:
        whole = method.whole_ratio
        weights = [
            reference_math.geometric_mismatch(a) if whole else math.exp(reference_math.mismatch(a, t))
            for a, t, _ in trained
        ]
    gains = [w for _, _, w in trained]
    over = [s for s in samples if s.end is not EndReason.TRUNCATED]
    targets, errors, losses, value_clips = [], [], [], []
    for answer in answers if method.critic else ():
        if not answer.cut:
            found = reference_math.returns(reference_math.valued(reference_math.punished(answer, method)), method)
            targets += found
            before = answer.old_values if later else answer.values  # the weights before the step are judged
            errors += [v - r for v, r in zip(before, found, strict=False)]
            for t, target in enumerate(found):
                far = (answer.values[t] - target) ** 2 / 2
                if method.value_clip is not None and later:
                    old, e = answer.old_values[t], method.value_clip
                    near = (min(max(answer.values[t], old - e), old + e) - target) ** 2 / 2
                    value_clips.append(float(near > far))
                    far = max(far, near)
                losses.append(far)
    low, high = 1 - method.clip_low, 1 + method.clip_high
    cap = method.old_weight_cap if method.cap is None else method.cap
    pairs = list(zip(compared, gains, strict=True)) if clips else []
    dual = math.inf if method.dual_clip is None else method.dual_clip
    rejected = [float(not reference_math.kept(a, method)[t]) for a, t, _ in trained if method.rejection != "none"]
    return PolicyHealth(
        entropy=mean([a.entropies[t] for a, t, _ in trained]),
        clip_fraction_low=mean([float(r < low and g < 0) for r, g in pairs]),
        clip_fraction_high=mean([float(r > high and g > 0) for r, g in pairs]),
        clip_fraction_dual=mean([float(r > dual and g < 0) for r, g in pairs]),
        ratio_mean=mean(ratios),
        ratio_std=math.sqrt(pvariance(ratios)) if ratios else None,
        ratio_max=max(ratios, default=None),
        kl_sampler=mean([r - 1 - math.log(r) for r in ratios]),
        kl_reference=mean(
            [reference_math.divergence(a.logprobs[t], a.reference_logprobs[t])[0] for a, t, _ in trained if method.kl]
        ),
        capped_fraction=mean([float(w > cap) for w in weights]),
        rejected_fraction=mean(rejected),
        stale_fraction=1 - len(trained) / fresh if fresh else None,
        response_length=mean([len(s.tokens) for s in over]),
        response_length_max=max((len(s.tokens) for s in over), default=None),
        truncated_fraction=mean([float(s.end is EndReason.LENGTH) for s in over]),
        value_loss=mean(losses),
        value_clip_fraction=mean(value_clips),
        explained_variance=1 - pvariance(errors) / pvariance(targets)
        if targets and pvariance(targets) > 1e-12
        else None,
    )


def same(got: PolicyHealth, wanted: PolicyHealth, tolerance: float = EXACT) -> None:
    for f in fields(PolicyHealth):
        a, b = getattr(got, f.name), getattr(wanted, f.name)
        assert a == (None if b is None else pytest.approx(b, rel=tolerance, abs=tolerance)), f.name


@pytest.mark.parametrize("name", ALGORITHMS)
@FEW
@given(seed=SEEDS)
def test_means_are_those_of_the_tokens(name: str, seed: int) -> None:
    case = random_case(name, seed)
    same(health(measure(case).found.sums), from_lists(case), 1e-8)  # a deviation from sums has half the digits


@pytest.mark.parametrize("name", ALGORITHMS)
@FEW
@given(seed=SEEDS, cuts=st.randoms(use_true_random=False))
def test_sums_add_up_over_any_split(name: str, seed: int, cuts: Random) -> None:
    case = random_case(name, seed, groups=5)
    numbers = list(range(5))
    cuts.shuffle(numbers)
    at = cuts.randint(1, 4)
    total = HealthSums()
    for part in (numbers[:at], numbers[at:]):
        total = total + measure(case.only(part)).found.sums
    whole = measure(case).found.sums
    for f in fields(HealthSums):
        assert getattr(total, f.name) == pytest.approx(getattr(whole, f.name), rel=1e-12, abs=1e-12), f.name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_of_twice_the_size_is_as_healthy(name: str) -> None:
    case = random_case(name, 12, groups=3)
    once = measure(case).found.sums
    twice = measure(replace(case, groups=case.groups * 2)).found.sums
    same(health(twice), health(once), 1e-12)
    same(health(once + once), health(once), 0.0)
    assert twice.tokens == 2 * once.tokens > 0


def test_float32_is_summed_in_float64() -> None:
    # One token a group: with float32 sums, 2^24 and one are 2^24.
    one = HealthSums(tokens=1, entropy=1.0, ratio=1.0)
    many = HealthSums(tokens=2**24, entropy=float(2**24), ratio=float(2**24))
    assert (many + one).entropy == 2**24 + 1
    case = random_case("grpo", 3, groups=4)
    single, double = measure(case, dtype=torch.float32).found.sums, measure(case).found.sums
    same(health(single), health(double), 1e-4)
    parts = [measure(case.only([n]), dtype=torch.float32).found.sums for n in range(4)]
    total = sum(parts[1:], start=parts[0])
    # The same float32 numbers, whatever their order: only float64's rounding is left.
    assert total.entropy == pytest.approx(single.entropy, rel=1e-14)
    assert total.ratio_squared == pytest.approx(single.ratio_squared, rel=1e-14)


def test_sums_and_extremes_by_hand() -> None:
    a = HealthSums(
        tokens=2, ratio=3.0, ratio_squared=5.0, ratio_max=2.0, entropy=1.0, ended=1, length=4, length_max=4, stale=2
    )
    b = HealthSums(
        tokens=2, ratio=1.0, ratio_squared=0.5, ratio_max=0.5, clippable=4, clipped_high=1, log_ratio_max=0.25
    )
    found = health(a + b)
    assert (a + b).log_ratio_max == 0.25
    assert (found.ratio_mean, found.ratio_max, found.entropy, found.clip_fraction_high) == (1.0, 2.0, 0.25, 0.25)
    assert found.ratio_std == pytest.approx(math.sqrt(5.5 / 4 - 1))
    assert (found.stale_fraction, found.response_length, found.response_length_max) == (2 / 6, 4.0, 4)
    assert HealthSums() + a == a + HealthSums() == a, "nothing changes nothing"


def test_metrics_without_data_are_unknown_and_not_zero() -> None:
    nothing = health(HealthSums())
    assert nothing.to_dict() == {}
    stale = health(HealthSums(stale=3))
    assert stale.to_dict() == {"stale_fraction": 1.0}
    assert health(HealthSums(), filtered_fraction=0.0).to_dict() == {"filtered_fraction": 0.0}


def test_a_step_with_only_cut_answers_has_no_metrics_of_answers() -> None:
    rng = Random(0)
    group = ((1, 2), (random_answer(rng, 0, length=3, end=EndReason.TRUNCATED, ages=[0, 0, 0]),))
    case = Case(algorithm=configured("tppo", 1, 1), terms=random_case("tppo", 0).terms, groups=(group,))
    found = health(measure(case).found.sums).to_dict()
    assert found["entropy"] > 0
    assert not {"response_length", "truncated_fraction", "value_loss", "explained_variance"} & found.keys()


@pytest.mark.parametrize("value", [0.1, 1.0, 1e6])
def test_equal_returns_have_no_variance_to_explain(value: float) -> None:
    # 0.1 squared does not round to the square of the mean: what is left is no variance.
    n = 7
    sums = HealthSums(
        value_tokens=n,
        returns=sum([value] * n),
        returns_squared=sum([value * value] * n),
        value_error=1.0,
        value_error_squared=3.0,
    )
    assert health(sums).explained_variance is None


def test_returns_that_are_equal_but_for_the_rounding_of_values_have_none_either() -> None:
    # Reward 0 without discount: each return is a sum of values that cancel.
    sums = HealthSums(
        value_tokens=2, returns=1e-16, returns_squared=1e-32, value_error=1.0, value_error_squared=2.0, value_loss=1.0
    )
    assert health(sums).explained_variance is None


def test_explained_variance_forgives_an_offset_and_value_loss_does_not() -> None:
    returns, errors = [1.0, 2.0, 3.0], [0.5, 0.5, 0.5]
    sums = HealthSums(
        value_tokens=3,
        value_loss=sum(e * e / 2 for e in errors),
        returns=sum(returns),
        returns_squared=sum(r * r for r in returns),
        value_error=sum(errors),
        value_error_squared=sum(e * e for e in errors),
    )
    found = health(sums)
    assert (found.explained_variance, found.value_loss) == (1.0, 0.125)


def test_a_ratio_that_never_varies_has_no_deviation() -> None:
    sums = HealthSums(tokens=3, ratio=0.3 + 1e-17, ratio_squared=3 * 0.1 * 0.1)
    assert health(sums).ratio_std == 0.0


def test_divergences_are_never_below_zero() -> None:
    for seed in range(20):
        rng = Random(seed)
        near = tuple(random_answer(rng, i, length=4, ages=[0] * 4, spread=1e-9) for i in range(3))
        case = Case(algorithm=configured("grpo", 1, 3), terms=random_case("grpo", 0).terms, groups=(((1, 2), near),))
        for dtype in (torch.float32, torch.float64):
            assert measure(case, dtype=dtype).found.sums.kl_sampler >= 0.0


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_health_survives_being_written_and_read(seed: int) -> None:
    found = health(measure(random_case("ppo", seed)).found.sums, filtered_fraction=0.5)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert PolicyHealth(**{f.name: read.get(f.name) for f in fields(PolicyHealth)}) == found
    assert health(HealthSums()).to_dict() == {}
