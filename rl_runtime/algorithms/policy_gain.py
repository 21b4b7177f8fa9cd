"""What one trained token contributes to the policy's objective, before the two optional terms and the weighting.

    x_t = log pi - log pi_sampler     of the policy version that made the token
    y_t = log pi - log pi_old         of the policy before the step's first update; x_t if there is but one
    w_t = min(pi_old / pi_sampler, OLD_WEIGHT_CAP); 1 if there is but one             AReaL 2505.24298 sec. 5.2
          GSPO: of the geometric mean over the answer

    clipped   gain_t = w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)       PPO 1707.06347 eq. 7, DAPO eq. 8
              and at least w_t dual_clip A, for A < 0                                 1912.09729
              r_t = exp(y_t); GSPO: exp(sg(mean of y) + y_t - sg(y_t))                2507.18071 eq. 7, 14
    weighted  gain_t = sg(min(exp(x_t), importance_cap)) A pi / sg(pi)                CISPO 2506.13585 eq. 4, 5
              with `importance: sequence` the sum of x over the answer in place of x_t

    rejection leaves out tokens, or answers by their geometric mean, where pi_old / pi_sampler (or the present
             pi / pi_sampler) is outside [rejection_low, rejection_high]

    k1 = -d,  k2 = d^2 / 2,  k3 = e^d - 1 - d,  d = log pi_ref - log pi            Schulman, Approximating KL divergence

**A token's slope is bounded**, by the log-probability, at every ratio:

    clipped   |A| w max(1 + clip_high, dual_clip)
    weighted  |A| importance_cap
    k3, k2    e^d - 1 <= 12.6 and |d| <= 4.5 where the estimate is at most KL_MAX, and 0 beyond

Means and sums over an answer are over its trained tokens. The bounds of every range are inclusive: `clamp` passes the
gradient there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig

LOG_RATIO_MAX = 20.0
"""A token e^20 times as probable as when it was sampled indicates disagreement between engine and trainer, not
learning. It has no gradient, and `PolicyHealth.ratio_max` reports it.
"""
LOG_RATIO_MIN = -100.0
"""Below, a ratio is 0 in float32 anyway; it keeps the divergence finite where a probability is 0."""
OLD_WEIGHT_CAP = 2.0
"""Largest weight pi_old / pi_sampler of a clipped token."""
KL_MAX = 10.0
"""Nats. Largest divergence of one token from the reference, in the loss and in the reward. A larger one has no
gradient: with k3 where the token's probability is 13.6 times too small, or e^11 times too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGain:
    gain_st: Tensor  # with gradient; 0 for untrained tokens
    kept_st: Tensor  # bool: not rejected
    ratio_st: Tensor  # what is clipped, or the untruncated importance weight; without gradient
    log_ratio_st: Tensor  # to the sampler; without gradient
    weight_st: Tensor | None  # untruncated importance weight, where one is truncated
    weight_cap: float


def policy_gain(
    algorithm: AlgorithmConfig,
    *,
    trained_st: Tensor,
    advantages_st: Tensor,
    logprobs_st: Tensor,
    sampler_logprobs_st: Tensor,
    old_logprobs_st: Tensor | None,
) -> PolicyGain:
    """`trained_st`: bool. Only `logprobs_st` gets a gradient; values of untrained tokens do not matter."""

    def log_ratio(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(trained_st, a - b, 0.0).clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)

    def level(x_st: Tensor) -> Tensor:
        return x_st if algorithm.method.ratio == "token" else _mean(x_st, trained_st)

    moved = log_ratio(logprobs_st, sampler_logprobs_st)
    fixed = moved.detach()
    mismatch = fixed if old_logprobs_st is None else log_ratio(old_logprobs_st, sampler_logprobs_st)
    weight, cap = None, 0.0
    if algorithm.importance_cap is not None:
        cap = algorithm.importance_cap
        weighed = fixed if algorithm.importance == "token" else _total(fixed).clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)
        ratio = weight = weighed.exp()
        # Its value is the weight, its gradient that of the log-probability.
        gain = weight.clamp(max=cap) * advantages_st * (moved - fixed).exp()
    else:
        since = moved if old_logprobs_st is None else log_ratio(logprobs_st, old_logprobs_st)
        # Equal in value to the level, and each token's gradient is its own.
        ratio = (level(since.detach()) + (since - since.detach())).exp()
        gain = clipped(ratio, advantages_st, algorithm)
        if old_logprobs_st is not None:
            weight, cap = level(mismatch).exp(), OLD_WEIGHT_CAP
            gain = gain * weight.clamp(max=cap)
    return PolicyGain(
        gain_st=torch.where(trained_st, gain, 0.0),
        kept_st=_kept(mismatch, trained_st, algorithm),
        ratio_st=ratio.detach(),
        log_ratio_st=fixed,
        weight_st=weight,
        weight_cap=cap,
    )


def clipped(ratio: Tensor, advantages_st: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """max(min(r A, clip(r) A), dual_clip A if A < 0): only one bound is active for each sign, and both for A < 0."""
    above = ratio.clamp(max=1.0 + algorithm.clip_high)
    below = ratio.clamp(min=1.0 - algorithm.clip_low, max=algorithm.dual_clip)
    return advantages_st * torch.where(advantages_st < 0, below, above)


def _kept(mismatch: Tensor, trained_st: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    if algorithm.rejection == "none":
        return torch.ones_like(trained_st)
    judged = (mismatch if algorithm.rejection == "token" else _mean(mismatch, trained_st)).exp()
    return (judged >= algorithm.rejection_low) & (judged <= algorithm.rejection_high)


def _total(x_st: Tensor) -> Tensor:
    """Each row's sum, at each of its tokens; `x_st` is 0 where nothing is trained."""
    return x_st.sum(dim=1, keepdim=True).expand_as(x_st)


def _mean(x_st: Tensor, trained_st: Tensor) -> Tensor:
    return _total(x_st) / trained_st.sum(dim=1, keepdim=True).clamp(min=1)


def k2(away: Tensor) -> Tensor:
    return 0.5 * away * away


def k3(away: Tensor) -> Tensor:
    """Never below 0, and accurate for nearly equal policies."""
    return torch.expm1(away) - away


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"k2": k2, "k3": k3})
"""Of the divergence of pi from pi_ref in the loss, from log pi_ref - log pi."""


def divergence(away: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Its estimate in the loss, from log pi_ref - log pi: at most KL_MAX, without gradient beyond."""
    return ESTIMATORS[algorithm.kl_estimator](away.clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)).clamp(max=KL_MAX)
