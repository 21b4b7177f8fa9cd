"""No single token can corrupt a step: its share of the gradient's norm is bounded at every log-ratio.

A step of 744 tokens, all but one near the policy that made them. The odd one's log-ratio goes from -20 to 20: to the
sampler, to the reference, to the policy before the first update. The share is that of its slope by log-probability;
the others' rows are orthogonal to it, so the squares of slopes add up. Unbounded, the share was 0.62 at a log-ratio of 3
and 0.999999 at 10.

pytest tests/rl_runtime/algorithms/test_bounded_influence.py
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig, AlgorithmName
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.algorithms.objective import Batch, TokenSelection, make_batch, objective
from rolecall.rl_runtime.protocol.messages import PromptGroup, TrainingSample

TOKENS, LENGTH = 744, 12
SAMPLES = TOKENS // LENGTH
TERMS = TokenSelection(policy_version=7, staleness_max=2, longest=LENGTH)
LOG_RATIOS = [*(float(x) for x in range(-20, 21)), -2.5, -0.6, 0.6, 1.05, 2.5]
"""The last ones are just inside the bounds."""
SHARE_MAX = 0.35
"""Of a token whose slope is at most 10 times that of the others: 10 / sqrt(100 + 743)."""
WITHOUT_DIVERGENCE: dict[str, dict[str, Any]] = {
    **{str(name): {"name": str(name)} for name in AlgorithmName},
    "grpo, capped": {"name": "grpo", "importance_cap": 3.0},
    "grpo, capped by answer": {"name": "grpo", "importance_cap": 3.0, "importance": "sequence"},
    "ppo, capped": {"name": "ppo", "importance_cap": 3.0},
    "grpo, tokens rejected": {"name": "grpo", "rejection": "token"},
}
DIVERGENCES: dict[str, dict[str, Any]] = {
    "without divergence": {},
    "k2": {"kl_coefficient": 0.2, "kl_estimator": "k2"},
    "k3": {"kl_coefficient": 0.2},
    "in the reward": {"kl_coefficient": 0.2, "kl_in_reward": True},
}
NOT_ALLOWED = {("dapo", "k2"), ("dapo", "k3"), ("dapo", "in the reward")} | {
    (name, "in the reward") for name in ("reinforce++", "reinforce++-baseline")
}
CASES = [
    (name, divergence, of)
    for name in WITHOUT_DIVERGENCE
    for divergence in DIVERGENCES
    for of in ("sampler", "reference", "old", "old and sampler")
    if (name, divergence) not in NOT_ALLOWED
    # The policy before the first update is not in the divergence.
    if not (divergence in ("k2", "k3") and of.startswith("old"))
    if not (divergence == "without divergence" and of == "reference")
]


def a_step(algorithm: AlgorithmConfig, sign: float) -> Batch:
    """The first sample's reward is `sign`, and half of all are 1 and -1."""
    rewards = [sign * (-1.0) ** i for i in range(SAMPLES)]
    samples = [
        TrainingSample(
            request_id=f"r{i}", tokens=(3,) * LENGTH, logprobs=(-1.0,) * LENGTH, versions=(7,) * LENGTH, reward=reward
        )
        for i, reward in enumerate(rewards)
    ]
    size = algorithm.group_size
    groups = [
        PromptGroup(group_id=GroupId(f"g{n}"), prompt_tokens=(1,), samples=tuple(samples[n : n + size]))
        for n in range(0, SAMPLES, size)
    ]
    statistics = step_statistics(groups, algorithm, longest=LENGTH)
    return make_batch(groups, algorithm, TERMS, pad=0, dtype=torch.float64, statistics=statistics)


def slopes(algorithm: AlgorithmConfig, batch: Batch, sampler: Tensor, **outputs: Tensor | None) -> Tensor:
    now = (-batch.response_st).requires_grad_()
    none = torch.zeros_like(now)
    values = none if algorithm.has_critic else None  # so that the advantages of lambda 1 are the rewards
    found = objective(
        replace(batch, sampler_logprobs_st=sampler),
        algorithm,
        TERMS,
        logprobs_st=now,
        entropy_st=none,
        values_after_st=values,
        old_values_after_st=values if outputs.get("old_logprobs_st") is not None else None,
        **outputs,
    )
    return torch.autograd.grad(found.policy, now)[0]


def share(algorithm: AlgorithmConfig, batch: Batch, away: float, of: str) -> float:
    """Of the third token of the first answer, whose log-ratio to `of` is `away`."""
    usual = -batch.response_st
    odd = usual.clone()
    odd[0, 3] -= away
    found = slopes(
        algorithm,
        batch,
        odd if of in ("sampler", "old and sampler") else usual,
        reference_logprobs_st=odd if of == "reference" else usual,
        old_logprobs_st={"old": odd, "old and sampler": usual}.get(of),
    )
    assert torch.isfinite(found).all()
    return float(found[0, 3].abs() / torch.linalg.vector_norm(found))


def configured(**settings: Any) -> AlgorithmConfig:
    own = {"lambda_policy": 1.0} if settings["name"] in ("ppo", "tppo") else {}
    size = 1 if settings["name"] == "tppo" else 2
    return AlgorithmConfig.model_validate({**own, "group_size": size, "entropy_coefficient": 0.0, **settings})


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["right", "wrong"])
@pytest.mark.parametrize(("name", "divergence", "of"), CASES)
def test_one_tokens_share_of_the_gradient_is_bounded(name: str, divergence: str, sign: float, of: str) -> None:
    algorithm = configured(**WITHOUT_DIVERGENCE[name], **DIVERGENCES[divergence])
    batch = a_step(algorithm, sign)
    found = [share(algorithm, batch, x, of) for x in LOG_RATIOS]
    assert share(algorithm, batch, 0.0, of) == pytest.approx(1 / math.sqrt(TOKENS)), "as any other's, at a ratio of 1"
    assert max(found) < SHARE_MAX


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["right", "wrong"])
def test_with_the_defaults_it_is_at_most_three_usual_tokens(sign: float) -> None:
    algorithm = configured(name="grpo")
    batch = a_step(algorithm, sign)
    found = [share(algorithm, batch, x, "sampler") for x in LOG_RATIOS]
    assert max(found) <= 3 / math.sqrt(9 + TOKENS - 1)


def test_without_the_dual_clip_one_token_takes_the_step() -> None:
    algorithm = configured(name="grpo", dual_clip=None)
    batch = a_step(algorithm, -1.0)
    assert share(algorithm, batch, 3.0, "sampler") == pytest.approx(0.59, abs=0.01)
    assert share(algorithm, batch, 10.0, "sampler") > 0.99999
