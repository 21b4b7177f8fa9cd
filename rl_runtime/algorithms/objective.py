"""The objectives of policy and critic as sums over tokens, and the batch tensors that they are computed from.

    r_t    = pi(o_t) / pi_sampler(o_t)            against the policy version that sampled the token
    gain_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)              PPO 1707.06347 eq. 7, DAPO eq. 8
    gain_t = sg(min(r_t, cap)) A_t pi / sg(pi)                                     with truncated importance weights
           + c H_t  -  b (pi_ref/pi - 1 - log pi_ref/pi)                           PPO eq. 9, GRPO 2402.03300 eq. 4
    policy = -1/N sum_t gain_t            critic = 1/M sum_t (V(s_t) - return_t)^2 / 2

    group-relative (GRPO, DAPO)     A = (R - mean R) / std R                                      `group_relative.py`
    GAE (PPO)      A_t = sum_k (gamma lambda)^k d_t+k,   d_t = r_t + gamma V(s_t+1) - V(s_t)      1506.02438 eq. 16
    EGAE (T-PPO)   the same sum up to the cut of an unfinished answer                             2506.15050 sec. 3
    overlong       0 up to Lmax - Lcache, then linearly down to -1 at Lmax and beyond             DAPO eq. 13

The state s_t is the prompt and the tokens before o_t; V(s_t) is the critic's output before o_t is chosen. The value
after the last token of a finished answer is 0. After a cut it is the *bootstrap* value, the only difference between GAE
and EGAE.

**A microbatch does not depend on N and M.** Its gradient is that of the sums, which are divided once, after all
microbatches of a step are added up over all replicas (`divisors`). The result is therefore independent of the split and
of lost replicas, and an average of averages cannot occur.

**The bounds of the clip range are inclusive:** the gradient there is that of r_t A_t for either sign of the advantage;
beyond them it is 0 where clipping is active. (Autograd does this: `minimum` shares a tie between two equal terms, and
`clamp` passes at its bounds.)

**No single token can corrupt a step.** A log-ratio counts within LOG_RATIO_MIN .. LOG_RATIO_MAX and has no gradient
beyond, so neither exp nor its square overflows and 0 times infinity cannot occur. Untrained tokens are masked before
exp instead of multiplied by 0. `make_batch` rejects a log-probability or reward that is NaN or infinite; a non-finite
model output fails the step with NonFiniteValue.

The policy is trained on *fresh* response tokens (not trained in an earlier step) within the staleness bound, whether or
not the answer is complete; the critic on all tokens of complete answers. Prompts are never trained on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.rl_runtime.algorithms.group_relative import group_relative
from rolecall.rl_runtime.protocol.messages import EndReason, PromptGroup, TrainingSample
from rolecall.rl_runtime.protocol.policy_health import HealthSums

LOG_RATIO_MAX = 20.0
"""A token e^20 times as probable as when it was sampled indicates disagreement between engine and trainer, not
learning; unbounded, it alone would determine the step's direction. `PolicyHealth.ratio_max` reports it. The divergence
from a reference (`kl_coefficient`) likewise has no gradient where the reference is e^20 times as confident in a token.
"""
LOG_RATIO_MIN = -100.0
"""Below, a ratio is 0 in float32 anyway; it keeps the divergence finite where a probability is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """Token selection and reward settings besides the algorithm."""

    policy_version: int  # of the weights that are trained
    staleness_max: int  # tokens older by more versions are not trained on
    longest: int  # tokens, of a response


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one microbatch, padded on the right; S samples, T tokens of prompt and response."""

    tokens_st: Tensor  # int64
    response_st: Tensor  # 1 where token t was generated (never at t = 0)
    policy_st: Tensor  # 1 where the policy is trained
    value_st: Tensor  # 1 where the critic is trained
    weights_st: Tensor  # weight of a token in the policy's sum
    sampler_logprobs_st: Tensor  # 0 outside the response
    versions_st: Tensor  # int64, -1 outside the response
    rewards_s: Tensor  # including the overlong penalty; 0 while the answer is not complete
    over_s: Tensor  # bool: the answer is complete
    relative_s: Tensor  # group-relative advantages; 0 with a critic
    sums: HealthSums  # statistics known before any model runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Sums over a microbatch's tokens. The tensors carry gradients."""

    policy: Tensor
    value: Tensor | None
    sums: HealthSums
    log_ratio_s: Tensor
    """Of each row's tokens under the weights that sampled them, the largest |log-ratio|; -1: none compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisors:
    policy: float
    value: float


def divisors(algorithm: AlgorithmConfig, step: HealthSums, *, longest: int) -> Divisors:
    """N and M of a whole step. `constant` and `sample` depend only on the job, `token` on the trained tokens."""
    samples = algorithm.groups_per_step * algorithm.group_size
    policy = {"constant": samples * longest, "sample": samples, "token": step.tokens}[algorithm.aggregation]
    # A step without trained tokens has a gradient of 0; any divisor will do.
    return Divisors(policy=float(max(1, policy)), value=float(max(1, step.value_tokens)))


def make_batch(
    groups: Sequence[PromptGroup],
    algorithm: AlgorithmConfig,
    terms: TokenSelection,
    *,
    pad: int,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Pads the samples of whole groups into tensors.

    Raises:
        ValueError: a sample's tokens, log-probabilities and versions are inconsistent or not
                finite, or an answer without a reward belongs to a group comparison.
    """
    rows = [(g.prompt_tokens, s) for g in groups for s in g.samples]
    shape = len(rows), max(len(p) + len(s.tokens) for p, s in rows)
    tokens = torch.full(shape, pad, dtype=torch.int64)
    versions = torch.full(shape, -1, dtype=torch.int64)
    response, policy, value, weights, sampler = (torch.zeros(shape, dtype=dtype) for _ in range(5))
    over = torch.zeros(len(rows), dtype=torch.bool)
    rewards: list[float] = []
    for i, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.tokens)
        _refuse_unfit(sample, start, algorithm)
        tokens[i, :end] = torch.tensor((*prompt, *sample.tokens), dtype=torch.int64)
        response[i, start:end] = 1.0
        sampler[i, start:end] = torch.tensor(sample.logprobs, dtype=dtype)
        versions[i, start:end] = torch.tensor(sample.versions, dtype=torch.int64)
        policy[i, start + sample.first_fresh : end] = 1.0
        over[i] = sample.is_over
        value[i, start:end] = float(algorithm.has_critic and sample.is_over)
        limit = terms.longest if algorithm.overlong_limit_tokens is None else algorithm.overlong_limit_tokens
        penalty = overlong_penalty(len(sample.tokens), longest=limit, cache=algorithm.overlong_buffer_tokens)
        rewards.append(sample.reward + penalty if sample.is_over else 0.0)
    fresh = policy
    policy = fresh * (terms.policy_version - versions <= terms.staleness_max)
    weights = policy.clone()
    if algorithm.aggregation == "sample":
        weights /= policy.sum(dim=1, keepdim=True).clamp(min=1.0)
    return Batch(
        tokens_st=tokens,
        response_st=response,
        policy_st=policy,
        value_st=value,
        weights_st=weights,
        sampler_logprobs_st=sampler,
        versions_st=versions,
        rewards_s=torch.tensor(rewards, dtype=dtype),
        over_s=over,
        relative_s=torch.tensor(_relative(groups, rewards, algorithm), dtype=dtype),
        sums=_known_sums(groups, tokens=int(policy.sum()), fresh=int(fresh.sum()), value_tokens=int(value.sum())),
    )


def _refuse_unfit(sample: TrainingSample, num_prompt_tokens: int, algorithm: AlgorithmConfig) -> None:
    label = f"sample {sample.request_id}"
    if not len(sample.tokens) == len(sample.logprobs) == len(sample.versions):
        raise ValueError(f"{label}: tokens, logprobs and versions differ in length")
    if num_prompt_tokens == 0:
        raise ValueError(f"{label}: without a prompt nothing predicts its first token")
    if not all(map(math.isfinite, sample.logprobs)):
        raise ValueError(f"{label}: a log-probability is not finite")
    if sample.is_over and not math.isfinite(sample.reward):
        raise ValueError(f"{label}: its reward is {sample.reward}")
    if not sample.is_over and not algorithm.has_critic:
        raise ValueError(f"{label}: its answer is not over, it cannot be part of a group")


def _relative(groups: Sequence[PromptGroup], rewards: Sequence[float], algorithm: AlgorithmConfig) -> list[float]:
    if algorithm.has_critic:
        return [0.0] * len(rewards)
    found: list[float] = []
    for group in groups:
        own = rewards[len(found) : len(found) + len(group.samples)]
        found += group_relative(own, divide_by_std=algorithm.divide_by_std)
    return found


def _known_sums(groups: Sequence[PromptGroup], *, tokens: int, fresh: int, value_tokens: int) -> HealthSums:
    samples = [s for g in groups for s in g.samples]
    over = [s for s in samples if s.is_over]
    return HealthSums(
        tokens=tokens,
        stale=fresh - tokens,
        samples=len(samples),
        ended=len(over),
        truncated=sum(s.end is EndReason.LENGTH for s in over),
        reward=sum(s.reward for s in over),
        length=sum(len(s.tokens) for s in over),
        length_max=max((len(s.tokens) for s in over), default=0),
        value_tokens=value_tokens,
    )


def token_logprobs(logits_stv: Tensor, tokens_st: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and the entropy there; 0 at t = 0, which has no prediction.

    Computed in at least float32. A logit may be -inf: that token does not contribute to the entropy.
    """
    logits = logits_stv[:, :-1]
    logprobs_stv = torch.log_softmax(logits if logits.dtype is torch.float64 else logits.float(), dim=-1)
    picked = logprobs_stv.gather(-1, tokens_st[:, 1:].unsqueeze(-1)).squeeze(-1)
    # 0 log 0 is 0: with a finite second factor, so are product and gradient.
    entropy = -(logprobs_stv.exp() * logprobs_stv.clamp(min=torch.finfo(logprobs_stv.dtype).min)).sum(-1)
    return torch.nn.functional.pad(picked, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def state_values(after_st: Tensor) -> Tensor:
    """V(s_t), of the state in which token t was chosen, from the critic's output after each token. 0 at t = 0."""
    return torch.nn.functional.pad(after_st[:, :-1], (1, 0))


def objective(
    batch: Batch,
    algorithm: AlgorithmConfig,
    terms: TokenSelection,
    *,
    logprobs_st: Tensor,
    entropy_st: Tensor,
    values_after_st: Tensor | None = None,
    reference_logprobs_st: Tensor | None = None,
) -> Objective:
    """Both sums, from the model outputs for a batch.

    Args:
        logprobs_st, entropy_st: the policy's, with gradient (`token_logprobs`).
        values_after_st: the critic's value after each token, with gradient; needed by algorithms with a critic.
        reference_logprobs_st: of the initial policy; needed where `kl_coefficient` is above 0.
    """
    sums, value = batch.sums, None
    if algorithm.has_critic:
        assert values_after_st is not None, f"{algorithm.name} needs a critic"
        advantages_st, value, value_sums = _critic(batch, algorithm, values_after_st)
        sums = sums + value_sums
    else:
        advantages_st = batch.relative_s.unsqueeze(-1).expand_as(batch.policy_st)
    moved = logprobs_st - batch.sampler_logprobs_st
    log_ratio = _trained(batch, moved).clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)
    gain = _clipped_or_capped(log_ratio, advantages_st, algorithm)
    gain = gain + algorithm.entropy_coefficient * _trained(batch, entropy_st)
    kl_reference = None
    if algorithm.kl_coefficient > 0:
        assert reference_logprobs_st is not None, "kl_coefficient needs the reference's log-probabilities"
        kl_reference = _divergence(_trained(batch, reference_logprobs_st - logprobs_st))
        gain = gain - algorithm.kl_coefficient * kl_reference
    policy = -(gain * batch.weights_st).sum()
    same = disagreement(logprobs_st.detach(), batch.sampler_logprobs_st, batch.versions_st, terms.policy_version)
    return Objective(
        policy=policy,
        value=value,
        sums=sums
        + _policy_sums(batch, algorithm, log_ratio.detach(), advantages_st, entropy_st, kl_reference)
        + HealthSums(log_ratio_max=float(same.max())),
        log_ratio_s=same,
    )


def disagreement(logprobs_st: Tensor, sampler_logprobs_st: Tensor, versions_st: Tensor, version: int) -> Tensor:
    """(S,): each row's largest |log-ratio| of the tokens sampled by `version`, given that version's `logprobs_st`; a
    NaN counts as the maximum (-LOG_RATIO_MIN). -1 without such tokens.
    """
    away = (logprobs_st - sampler_logprobs_st).abs().nan_to_num(nan=-LOG_RATIO_MIN).clamp(max=-LOG_RATIO_MIN)
    return torch.where(versions_st == version, away, -1.0).amax(dim=1)


def _trained(batch: Batch, x_st: Tensor) -> Tensor:
    """`x_st`, with untrained positions set to 0 even if they are not finite."""
    return torch.where(batch.policy_st > 0, x_st, 0.0)


def _divergence(away: Tensor) -> Tensor:
    """pi_ref/pi - 1 - log pi_ref/pi, never below 0: accurate for nearly equal policies."""
    away = away.clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)
    return torch.expm1(away) - away


def _clipped_or_capped(log_ratio: Tensor, advantages_st: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    ratio = log_ratio.exp()
    if algorithm.importance_cap is not None:
        # Its value is the weight, its gradient that of the log-probability.
        weight = ratio.detach().clamp(max=algorithm.importance_cap)
        return weight * advantages_st * (log_ratio - log_ratio.detach()).exp()
    clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    return torch.minimum(ratio * advantages_st, clipped * advantages_st)


def _critic(batch: Batch, algorithm: AlgorithmConfig, values_after_st: Tensor) -> tuple[Tensor, Tensor, HealthSums]:
    """Advantages for the policy, the critic's sum, and the critic's health sums."""
    values_st = state_values(values_after_st)
    fixed = values_st.detach()  # values outside the response are arbitrary and unused
    behind = values_after_st.detach() if algorithm.truncation_value == "critic" else fixed
    bootstrap = torch.where(batch.over_s, torch.zeros_like(batch.rewards_s), last_of(behind, batch.response_st))
    rewards_st = last_token(batch.response_st) * batch.rewards_s.unsqueeze(1)
    gamma = algorithm.gamma

    def advantages(decay: float) -> Tensor:
        return gae(rewards_st, fixed, batch.response_st, bootstrap, gamma=gamma, decay=decay)

    returns = advantages(algorithm.lambda_value) + fixed
    valued = batch.value_st > 0
    error = torch.where(valued, values_st - returns, 0.0)
    value = 0.5 * (error * error).sum()
    wrong, target = error.detach()[valued].double(), returns[valued].double()
    sums = HealthSums(
        value_loss=float(wrong.square().sum()) / 2,
        returns=float(target.sum()),
        returns_squared=float(target.square().sum()),
        value_error=float(wrong.sum()),
        value_error_squared=float(wrong.square().sum()),
    )
    return advantages(algorithm.lambda_policy), value, sums


def _policy_sums(
    batch: Batch,
    algorithm: AlgorithmConfig,
    log_ratio: Tensor,
    advantages_st: Tensor,
    entropy_st: Tensor,
    kl_reference: Tensor | None,
) -> HealthSums:
    trained = batch.policy_st > 0
    log_r, advantage = log_ratio[trained], advantages_st[trained]
    # Clipping is reported on the ratio used by the objective; sums are in float64.
    r = log_r.exp()
    cap = algorithm.importance_cap
    return HealthSums(
        entropy=_total(entropy_st.detach()[trained]),
        clipped_low=0 if cap is not None else int(((r < 1.0 - algorithm.clip_low) & (advantage < 0)).sum()),
        clipped_high=0 if cap is not None else int(((r > 1.0 + algorithm.clip_high) & (advantage > 0)).sum()),
        ratio=_total(r),
        ratio_squared=_total(r.double().square()),
        ratio_max=float(r.max()) if r.numel() else 0.0,
        kl_sampler=_total(_divergence(log_r.double())),
        kl_reference=0.0 if kl_reference is None else _total(kl_reference.detach()[trained]),
        reference_tokens=0 if kl_reference is None else r.numel(),
        capped=0 if cap is None else int((r > cap).sum()),
    )


def _total(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def overlong_penalty(length: int, *, longest: int, cache: int) -> float:
    """In [-1, 0] for a response of `length` tokens; -1 from `longest` on; `cache` 0 disables it."""
    if cache == 0 or length <= longest - cache:
        return 0.0
    return -min(1.0, (length - (longest - cache)) / cache)


def gae(
    rewards_st: Tensor, values_st: Tensor, response_st: Tensor, bootstrap_s: Tensor, *, gamma: float, decay: float
) -> Tensor:
    """Advantages (S, T), 0 outside the response.

    Args:
        rewards_st: reward given for token t.
        values_st: V(s_t), of the state in which token t was chosen.
        response_st: 1 where token t was generated; one run of ones a row.
        bootstrap_s: value of the state after the last token: 0 where the answer is finished.
        gamma: discount. decay: lambda.
    """
    advantage = torch.zeros_like(bootstrap_s)
    after = bootstrap_s
    columns: list[Tensor] = []
    for t in range(values_st.shape[1] - 1, -1, -1):
        here = response_st[:, t] > 0
        difference = rewards_st[:, t] + gamma * after - values_st[:, t]
        summed = difference + gamma * decay * advantage
        # After the response, the state is constant: its last token sees the bootstrap value and a zero advantage.
        advantage = torch.where(here, summed, torch.zeros_like(summed))
        after = torch.where(here, values_st[:, t], bootstrap_s)
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1)


def last_token(response_st: Tensor) -> Tensor:
    """1 at each row's last response token."""
    later = torch.nn.functional.pad(response_st[:, 1:], (0, 1))
    return response_st * (1.0 - later)


def last_of(values_st: Tensor, response_st: Tensor) -> Tensor:
    """Value at each row's last response token, shape (S,); 0 for a row without response tokens."""
    return torch.where(last_token(response_st) > 0, values_st, 0.0).sum(dim=1)
