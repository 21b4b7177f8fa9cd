"""Loss against numbers worked out by hand.

pytest tests/rl_runtime/test_grpo.py
"""

import math
import random

import pytest
import torch

from rolecall.core.config_algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.grpo import NOT_COMPARED, Batch, advantages, grpo_loss, make_batch, normaliser, token_logprobs
from rolecall.rl_runtime.protocol import Group, Sample

PLAIN = AlgorithmConfig(clip_low=0.2, clip_high=0.28, entropy_coefficient=0.0)


def batch(advantage: list[float], behaviour: list[list[float]], mask: list[list[float]]) -> Batch:
    return Batch(
        tokens_st=torch.zeros(len(mask), len(mask[0]), dtype=torch.int64),
        mask_st=torch.tensor(mask),
        behaviour_logprobs_st=torch.tensor(behaviour),
        versions_st=torch.zeros(len(mask), len(mask[0]), dtype=torch.int64),
        advantages_s=torch.tensor(advantage),
    )


def test_advantages_by_hand() -> None:
    assert advantages([1.0, 0.0, 0.5, 0.5], divide_by_std=False) == (0.5, -0.5, 0.0, 0.0)
    # std = sqrt((0.25 + 0.25) / 4) = 0.353553
    scaled = advantages([1.0, 0.0, 0.5, 0.5], divide_by_std=True)
    assert scaled == pytest.approx((1.4142136, -1.4142136, 0.0, 0.0), abs=1e-5)
    assert advantages([0.7, 0.7], divide_by_std=True) == (0.0, 0.0)


# ratio, advantage, term, gradient of the term with respect to the log-probability (term itself, or 0 where clipped)
TERMS = [
    ("inside", 1.1, 2.0, 2.2, 2.2),
    ("inside, negative", 1.1, -2.0, -2.2, -2.2),
    ("clipped above at 1.28", 1.5, 2.0, 2.56, 0.0),
    ("above, negative: not clipped, the push back stays", 1.5, -2.0, -3.0, -3.0),
    ("below, positive: not clipped", 0.5, 2.0, 1.0, 1.0),
    ("clipped below at 0.8", 0.5, -2.0, -1.6, 0.0),
    ("between 1.2 and 1.28: the upper clip is the higher one", 1.25, 2.0, 2.5, 2.5),
]


@pytest.mark.parametrize(("ratio", "advantage", "term", "slope"), [t[1:] for t in TERMS], ids=[t[0] for t in TERMS])
def test_clip_on_both_sides(ratio: float, advantage: float, term: float, slope: float) -> None:
    logprob = torch.tensor([[0.0, math.log(ratio) - 1.0]], requires_grad=True)
    b = batch([advantage], [[0.0, -1.0]], [[0.0, 1.0]])
    loss = grpo_loss(logprob, torch.zeros(1, 2), b, PLAIN, normaliser=1.0, policy_version=0)
    assert float(loss.total.detach()) == pytest.approx(-term, abs=1e-6)
    assert loss.clipped_tokens == (slope == 0.0)
    loss.total.backward()
    assert logprob.grad is not None
    assert float(logprob.grad[0, 1]) == pytest.approx(-slope, abs=1e-6)
    assert float(logprob.grad[0, 0]) == 0.0


def test_toy_batch_by_hand() -> None:
    # Two samples, one and three tokens: ratios 1.1 | 1.5 (clipped to 1.28), 1.0, 0.5; advantages -1 and +1.
    now = torch.tensor([[0.0, math.log(1.1), 9.0, 9.0], [0.0, math.log(1.5), 0.0, math.log(0.5)]])
    b = batch([-1.0, 1.0], [[0.0] * 4, [0.0] * 4], [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    loss = grpo_loss(now, torch.zeros(2, 4), b, PLAIN, normaliser=8.0, policy_version=0)
    # -(-1.1 + 1.28 + 1.0 + 0.5) / 8: every token weighs the same, whatever the length of its sample
    assert float(loss.total) == pytest.approx(-1.68 / 8.0, abs=1e-6)
    assert loss.log_ratio_max == pytest.approx(math.log(2.0), abs=1e-6)


def test_entropy_bonus_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    tokens = torch.tensor([[1, 2]])
    logprobs, entropy = token_logprobs(logits, tokens)
    assert logprobs.tolist() == [[0.0, pytest.approx(math.log(0.25))]]
    assert entropy.tolist() == [[0.0, pytest.approx(math.log(4.0))]]
    b = batch([0.0], [[0.0, math.log(0.25)]], [[0.0, 1.0]])
    with_bonus = AlgorithmConfig(entropy_coefficient=0.1)
    loss = grpo_loss(logprobs, entropy, b, with_bonus, normaliser=2.0, policy_version=0)
    assert float(loss.total) == pytest.approx(-0.1 * math.log(4.0) / 2.0, abs=1e-6)


def test_alarm_looks_only_at_tokens_of_this_version() -> None:
    b = batch([0.0], [[0.0, -1.0, -1.0]], [[0.0, 1.0, 1.0]])
    b.versions_st[0] = torch.tensor([-1, 3, 4])
    now = torch.tensor([[0.0, -2.0, -1.25]])
    found = [grpo_loss(now, now * 0, b, PLAIN, normaliser=1.0, policy_version=v).log_ratio_max for v in (2, 3, 4)]
    assert found == pytest.approx([NOT_COMPARED, 1.0, 0.25]), "no token of version 2: nothing was compared"


def sample(number: int, rng: random.Random) -> Sample:
    length = rng.randint(1, 5)
    return Sample(
        request_id=f"r{number}",
        tokens=tuple(rng.randrange(3, 16) for _ in range(length)),
        logprobs=tuple(rng.uniform(-3, 0) for _ in range(length)),
        versions=(0,) * length,
        reward=rng.random(),
    )


def make_groups(count: int) -> list[Group]:
    rng = random.Random(0)
    return [
        Group(
            group_id=GroupId(f"g{n:08d}"),
            prompt_tokens=tuple(rng.randrange(3, 16) for _ in range(rng.randint(1, 4))),
            samples=tuple(sample(n * 10 + i, rng) for i in range(4)),
        )
        for n in range(count)
    ]


def test_batch_is_padded_and_masked() -> None:
    group = Group(
        group_id=GroupId("g00000000"),
        prompt_tokens=(1, 5),
        samples=(
            Sample(request_id="a", tokens=(7,), logprobs=(-0.5,), versions=(3,), reward=1.0),
            Sample(request_id="b", tokens=(8, 2), logprobs=(-0.25, -0.125), versions=(3, 4), reward=0.0),
        ),
    )
    b = make_batch([group], pad=0, divide_by_std=False)
    assert b.tokens_st.tolist() == [[1, 5, 7, 0], [1, 5, 8, 2]]
    assert b.mask_st.tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert b.behaviour_logprobs_st.tolist() == [[0, 0, -0.5, 0], [0, 0, -0.25, -0.125]]
    assert b.versions_st.tolist() == [[-1, -1, 3, -1], [-1, -1, 3, 4]]
    assert b.advantages_s.tolist() == [0.5, -0.5]


def test_sample_with_a_token_without_logprob_is_refused() -> None:
    broken = Sample(request_id="a", tokens=(7, 8), logprobs=(-0.5,), versions=(3, 3), reward=1.0)
    with pytest.raises(ValueError, match="sample a"):
        make_batch([Group(group_id=GroupId("g"), prompt_tokens=(1,), samples=(broken,))], pad=0, divide_by_std=False)


def test_sum_over_microbatches_is_the_whole_batch_however_it_is_cut() -> None:
    torch.manual_seed(0)
    table = torch.randn(16, 16, dtype=torch.float64)
    groups = make_groups(6)
    n = normaliser(PLAIN, 5)

    def total(pieces: list[list[Group]]) -> float:
        loss = 0.0
        for piece in pieces:
            b = make_batch(piece, pad=0, divide_by_std=True)
            logprobs, entropy = token_logprobs(table[b.tokens_st], b.tokens_st)
            loss += float(grpo_loss(logprobs, entropy, b, AlgorithmConfig(), normaliser=n, policy_version=0).total)
        return loss

    whole = total([groups])
    assert whole != 0.0
    for pieces in ([groups[:1], groups[1:]], [[g] for g in groups], [groups[3:], groups[:3]]):
        assert total(pieces) == pytest.approx(whole, rel=1e-5, abs=1e-9)


def test_normaliser_knows_nothing_of_survivors() -> None:
    algorithm = AlgorithmConfig(group_size=8, microbatches_per_step=4, groups_per_microbatch=2)
    assert normaliser(algorithm, 16) == 4 * 2 * 8 * 16
