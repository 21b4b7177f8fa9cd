"""The objectives of policy and critic as sums over tokens, and the batch tensors that they are computed from.

    policy = -1/N sum_t m_t (gain_t + c H_t - b D_t)      gain_t, D_t, and m_t, 0 for what is rejected: `policy_gain.py`
    critic =  1/M sum_t max((V - R)^2, (V_old + clip(V - V_old, -e, e) - R)^2) / 2,  V = V(s_t), e = value_clip

    A of a sample (GRPO and its relatives)                                                        `group_relative.py`
    GAE (PPO)      A_t = sum_k (gamma lambda)^k d_t+k,   d_t = r_t + gamma V(s_t+1) - V(s_t)      1506.02438 eq. 16
    EGAE (T-PPO)   the same sum up to the cut of an unfinished answer                             2506.15050 sec. 3
    overlong       0 up to Lmax - Lcache, then linearly down to -1 at Lmax and beyond             DAPO eq. 13
    KL in reward   r_t - b (log pi_sampler - log pi_ref), in a group summed over the answer       2203.02155 eq. 2

The state s_t is the prompt and the tokens before o_t; V(s_t) is the critic's output before o_t is chosen. The value
after the last token of a finished answer is 0. After a cut it is the *bootstrap* value, the only difference between GAE
and EGAE.

**A microbatch does not depend on N and M.** Its gradient is that of the sums, which are divided once, after all
microbatches of an update are added up over all replicas (`divisors`). The result is therefore independent of the split
and of lost replicas, and an average of averages cannot occur.

**No single token can corrupt a step**, unless the job file allows it (`dual_clip: null`, a large `importance_cap` or
`kl_coefficient`). A token's slope is bounded at every ratio (`policy_gain.py`), and so is its part in the reward. A
log-ratio counts within LOG_RATIO_MIN .. LOG_RATIO_MAX and has no gradient beyond, so neither exp nor its square
overflows and 0 times infinity cannot occur. Untrained tokens are masked before exp instead of multiplied by 0.
`make_batch` rejects a log-probability or reward that is NaN or infinite; a non-finite model output fails the step with
NonFiniteValue.

The policy is trained on *fresh* response tokens (not trained in an earlier step) within the staleness bound, whether or
not the answer is complete; the critic on all tokens of complete answers. Prompts are never trained on, and neither are
tokens that an environment wrote into a conversation: they are context, not counted and not compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.rl_runtime.algorithms.group_relative import reward_of, sample_advantages
from rolecall.rl_runtime.algorithms.policy_gain import (
    KL_MAX,
    LOG_RATIO_MAX,
    LOG_RATIO_MIN,
    PolicyGain,
    divergence,
    k3,
    policy_gain,
)
from rolecall.rl_runtime.protocol.messages import (
    ENVIRONMENT_VERSION,
    EndReason,
    PromptGroup,
    StepStatistics,
    TrainingSample,
)
from rolecall.rl_runtime.protocol.policy_health import HealthSums


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
    response_st: Tensor  # 1 where the policy generated token t (never at t = 0)
    policy_st: Tensor  # 1 where the policy is trained
    value_st: Tensor  # 1 where the critic is trained
    weights_st: Tensor  # weight of a token in the policy's sum
    sampler_logprobs_st: Tensor  # 0 outside the response
    versions_st: Tensor  # int64, negative outside the response
    rewards_s: Tensor  # including the overlong penalty; 0 while the answer is not complete
    over_s: Tensor  # bool: the answer is complete
    relative_s: Tensor  # advantages of samples, without a divergence in the reward; 0 with a critic
    group_sizes: tuple[int, ...]  # samples of each group, in the order of the rows; none in a part, see `parts_of`
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


def divisors(algorithm: AlgorithmConfig, update: HealthSums, *, longest: int) -> Divisors:
    """N and M of one optimizer update: of a whole step, or of one of its mini-batches. `constant` and `sample` depend
    only on the job, `token` on the trained tokens that were not rejected.
    """
    samples = algorithm.groups_per_step // algorithm.mini_batches * algorithm.group_size
    policy = {"constant": samples * longest, "sample": samples, "token": update.tokens - update.rejected}[
        algorithm.aggregation
    ]
    # Without trained tokens the gradient is 0; any divisor will do.
    return Divisors(policy=float(max(1, policy)), value=float(max(1, update.value_tokens)))


def make_batch(
    groups: Sequence[PromptGroup],
    algorithm: AlgorithmConfig,
    terms: TokenSelection,
    *,
    pad: int,
    dtype: torch.dtype = torch.float32,
    statistics: StepStatistics | None = None,
) -> Batch:
    """Pads the samples of whole groups into tensors.

    `statistics`: of the whole step (`step_statistics`); needed by methods that normalize advantages over it.

    Raises:
        ValueError: a sample's tokens, log-probabilities and versions are inconsistent or not
                finite, an answer without a reward belongs to a group comparison, or `statistics` are missing.
    """
    rows = [(g.prompt_tokens, s) for g in groups for s in g.samples]
    shape = len(rows), max(len(p) + len(s.tokens) for p, s in rows)
    tokens = torch.full(shape, pad, dtype=torch.int64)
    versions = torch.full(shape, -1, dtype=torch.int64)
    response, policy, value, sampler = (torch.zeros(shape, dtype=dtype) for _ in range(4))
    over = torch.zeros(len(rows), dtype=torch.bool)
    rewards: list[float] = []
    for i, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.tokens)
        _refuse_unfit(sample, start, algorithm)
        tokens[i, :end] = torch.tensor((*prompt, *sample.tokens), dtype=torch.int64)
        versions[i, start:end] = torch.tensor(sample.versions, dtype=torch.int64)
        # An environment's tokens are context, as the prompt is.
        response[i, start:end] = (versions[i, start:end] != ENVIRONMENT_VERSION).to(dtype)
        sampler[i, start:end] = torch.tensor(sample.logprobs, dtype=dtype) * response[i, start:end]
        policy[i, start + sample.first_fresh : end] = response[i, start + sample.first_fresh : end]
        over[i] = sample.is_over
        value[i, start:end] = float(algorithm.has_critic and sample.is_over)
        rewards.append(reward_of(sample, algorithm, longest=terms.longest))
    fresh = policy
    policy = fresh * (terms.policy_version - versions <= terms.staleness_max)
    sizes = tuple(len(g.samples) for g in groups)
    return Batch(
        tokens_st=tokens,
        response_st=response,
        policy_st=policy,
        value_st=value,
        weights_st=token_weights(policy, algorithm),
        sampler_logprobs_st=sampler,
        versions_st=versions,
        rewards_s=torch.tensor(rewards, dtype=dtype),
        over_s=over,
        relative_s=torch.tensor(_relative(rewards, sizes, algorithm, statistics), dtype=dtype),
        group_sizes=sizes,
        sums=_known_sums(groups, tokens=int(policy.sum()), fresh=int(fresh.sum()), value_tokens=int(value.sum())),
    )


def batch_on(device: torch.device, batch: Batch) -> Batch:
    """The batch with its tensors on `device`."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved: dict[str, Any] = {name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)}
    return replace(batch, **moved)


def parts_of(batch: Batch, rows: Sequence[Sequence[int]], ends: Sequence[int]) -> list[Batch]:
    """These rows of the batch, each part up to its own column `ends`; the batch itself if one part has all its rows in
    their order.

    The first part has the batch's known sums. A part has no groups, so a divergence in the reward must be part of its
    advantages before (`with_divergence`).
    """
    if len(rows) == 1 and list(rows[0]) == list(range(len(batch.tokens_st))):
        return [batch]

    def part(number: int) -> Batch:
        changes: dict[str, Any] = {
            f.name: value[list(rows[number])] if value.dim() == 1 else value[list(rows[number]), : ends[number]]
            for f in fields(batch)
            if isinstance(value := getattr(batch, f.name), Tensor)
        }
        return replace(batch, **changes, group_sizes=(), sums=batch.sums if number == 0 else HealthSums())

    return [part(number) for number in range(len(rows))]


def with_divergence(batch: Batch, algorithm: AlgorithmConfig, reference_logprobs_st: Tensor | None) -> Batch:
    """The batch with a divergence in the reward as part of its samples' advantages, where the algorithm has both."""
    if algorithm.has_critic or not algorithm.kl_in_reward:
        return batch
    rewards_s = batch.rewards_s + _shaped(batch, algorithm, reference_logprobs_st).sum(dim=1)
    relative = _relative(rewards_s.tolist(), batch.group_sizes, algorithm)
    # The comparison may lose a value that is not finite; the product keeps it.
    return replace(batch, relative_s=rewards_s.new_tensor(relative) + 0.0 * rewards_s)


def _shaped(batch: Batch, algorithm: AlgorithmConfig, reference_logprobs_st: Tensor | None) -> Tensor:
    """The divergence in the reward of each token."""
    assert reference_logprobs_st is not None, "kl_coefficient needs the reference's log-probabilities"
    away = torch.where(batch.response_st > 0, reference_logprobs_st - batch.sampler_logprobs_st, 0.0)
    return algorithm.kl_coefficient * away.clamp(-KL_MAX, KL_MAX)


def token_weights(policy_st: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Weight of each token in the policy's sum: 1, or 1 / the number of its sample."""
    if algorithm.aggregation != "sample":
        return policy_st
    return policy_st / policy_st.sum(dim=1, keepdim=True).clamp(min=1.0)


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


def _relative(
    rewards: Sequence[float],
    group_sizes: Sequence[int],
    algorithm: AlgorithmConfig,
    statistics: StepStatistics | None = None,
) -> list[float]:
    if algorithm.has_critic:
        return [0.0] * len(rewards)
    left = iter(rewards)
    return sample_advantages([tuple(islice(left, n)) for n in group_sizes], algorithm, statistics)


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
        length=sum(s.num_generated for s in over),
        length_max=max((s.num_generated for s in over), default=0),
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
    old_logprobs_st: Tensor | None = None,
    old_values_after_st: Tensor | None = None,
) -> Objective:
    """Both sums, from the model outputs for a batch.

    Args:
        logprobs_st, entropy_st: the policy's, with gradient (`token_logprobs`).
        values_after_st: the critic's value after each token, with gradient; needed by algorithms with a critic.
        reference_logprobs_st: of the initial policy; needed where `kl_coefficient` is above 0.
        old_logprobs_st, old_values_after_st: `logprobs_st` and `values_after_st` as they were before the step's first
            update, where it has several. Without them ratios are those to the sampler, and no value is clipped.
    """
    sums, value = batch.sums, None
    assert algorithm.kl_coefficient == 0 or reference_logprobs_st is not None, "the reference's log-probabilities"
    if batch.group_sizes:
        batch = with_divergence(batch, algorithm, reference_logprobs_st)
    if algorithm.has_critic:
        shaped_st = _shaped(batch, algorithm, reference_logprobs_st) if algorithm.kl_in_reward else None
        assert values_after_st is not None, f"{algorithm.name} needs a critic"
        advantages_st, value, value_sums = _critic(batch, algorithm, values_after_st, old_values_after_st, shaped_st)
        sums = sums + value_sums
    else:
        advantages_st = batch.relative_s.unsqueeze(-1).expand_as(batch.policy_st)
    found = policy_gain(
        algorithm,
        trained_st=batch.policy_st > 0,
        advantages_st=advantages_st,
        logprobs_st=logprobs_st,
        sampler_logprobs_st=batch.sampler_logprobs_st,
        old_logprobs_st=old_logprobs_st,
    )
    gain = found.gain_st + algorithm.entropy_coefficient * _trained(batch, entropy_st)
    away_st = None
    if reference_logprobs_st is not None and algorithm.kl_coefficient > 0:
        away_st = _trained(batch, reference_logprobs_st - logprobs_st)
        if not algorithm.kl_in_reward:
            gain = gain - algorithm.kl_coefficient * divergence(away_st, algorithm)
    weights_st = batch.weights_st
    if algorithm.rejection != "none":
        weights_st = token_weights(batch.policy_st * found.kept_st, algorithm)
    policy = -(gain * weights_st).sum()
    # Of the weights that made the tokens: those before the step's first update.
    own = logprobs_st.detach() if old_logprobs_st is None else old_logprobs_st
    same = disagreement(own, batch.sampler_logprobs_st, batch.versions_st, terms.policy_version)
    return Objective(
        policy=policy,
        value=value,
        sums=sums
        + _policy_sums(batch, algorithm, found, advantages_st, entropy_st, away_st)
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


def _critic(
    batch: Batch,
    algorithm: AlgorithmConfig,
    values_after_st: Tensor,
    old_values_after_st: Tensor | None,
    shaped_st: Tensor | None,
) -> tuple[Tensor, Tensor, HealthSums]:
    """Advantages for the policy, the critic's sum, and the critic's health sums. `shaped_st`: rewards of single tokens,
    besides that of the answer.
    """
    values_st = state_values(values_after_st)
    after = values_after_st.detach() if old_values_after_st is None else old_values_after_st
    fixed = state_values(after)  # values outside the response are arbitrary and unused
    behind = after if algorithm.truncation_value == "critic" else fixed
    bootstrap = torch.where(batch.over_s, torch.zeros_like(batch.rewards_s), last_of(behind, batch.response_st))
    rewards_st = last_token(batch.response_st) * batch.rewards_s.unsqueeze(1)
    if shaped_st is not None:
        rewards_st = rewards_st + shaped_st
    gamma = algorithm.gamma

    def advantages(decay: float) -> Tensor:
        return gae(rewards_st, fixed, batch.response_st, bootstrap, gamma=gamma, decay=decay)

    returns = advantages(algorithm.lambda_value) + fixed
    valued = batch.value_st > 0
    error = torch.where(valued, values_st - returns, 0.0)
    squares = error * error
    num_clipped = None
    if algorithm.value_clip is not None and old_values_after_st is not None:
        held = values_st.clamp(fixed - algorithm.value_clip, fixed + algorithm.value_clip)
        bounded = torch.where(valued, held - returns, 0.0).square()
        num_clipped = int((bounded > squares).sum())
        squares = torch.where(bounded > squares, bounded, squares)
    value = 0.5 * squares.sum()
    wrong, target = (fixed - returns)[valued].double(), returns[valued].double()
    sums = HealthSums(
        value_loss=_total(squares.detach()) / 2,
        value_clipped=num_clipped or 0,
        value_clippable=0 if num_clipped is None else wrong.numel(),
        returns=float(target.sum()),
        returns_squared=float(target.square().sum()),
        value_error=float(wrong.sum()),
        value_error_squared=float(wrong.square().sum()),
    )
    return advantages(algorithm.lambda_policy), value, sums


def _policy_sums(
    batch: Batch,
    algorithm: AlgorithmConfig,
    found: PolicyGain,
    advantages_st: Tensor,
    entropy_st: Tensor,
    away_st: Tensor | None,
) -> HealthSums:
    """Over all trained tokens, rejected ones too; sums are in float64."""
    trained = batch.policy_st > 0
    tokens = int(trained.sum())
    log_r, advantage, ratio = found.log_ratio_st[trained], advantages_st[trained], found.ratio_st[trained]
    r = log_r.exp()
    sums = HealthSums(
        entropy=_total(entropy_st.detach()[trained]),
        ratio=_total(r),
        ratio_squared=_total(r.double().square()),
        ratio_max=float(r.max()) if tokens else 0.0,
        kl_sampler=_total(k3(log_r.double())),
    )
    if away_st is not None:
        away = away_st.detach()[trained].clamp(LOG_RATIO_MIN, LOG_RATIO_MAX)
        sums += HealthSums(kl_reference=_total(k3(away)), reference_tokens=tokens)
    if algorithm.importance_cap is None:
        high = 0 if algorithm.dual_clip is None else int(((ratio > algorithm.dual_clip) & (advantage < 0)).sum())
        sums += HealthSums(
            clippable=tokens,
            clipped_low=int(((ratio < 1.0 - algorithm.clip_low) & (advantage < 0)).sum()),
            clipped_high=int(((ratio > 1.0 + algorithm.clip_high) & (advantage > 0)).sum()),
            clipped_dual=high,
        )
    if found.weight_st is not None:
        sums += HealthSums(weighted=tokens, capped=int((found.weight_st[trained] > found.weight_cap).sum()))
    if algorithm.rejection != "none":
        sums += HealthSums(judged=tokens, rejected=int((~found.kept_st[trained]).sum()))
    return sums


def _total(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


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
