"""GRPO loss in plain PyTorch.

    A_i   = R_i - mean(R)                 over the samples of one prompt; divided by std(R) if asked
    r_it  = pi(o_it) / pi_behaviour(o_it)
    loss  = -1/N  sum_i sum_t [ min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + c H_it ]

The clipped surrogate with group-relative advantages is GRPO, DeepSeekMath (arXiv 2402.03300) eq. 3, without its KL
term; in that term's place stands an optional bonus c for the entropy H_it of the policy at each token (PPO, arXiv
1707.06347, eq. 9), without which a model that starts from nothing settles on one answer before it has learnt to look
at the question. Every token has the same weight and the clip range is asymmetric, as in DAPO (arXiv 2503.14476) eq. 8, 10 and
12. N is a constant, as in Dr. GRPO (arXiv 2503.20783), which also leaves out the division by std(R).

N = samples a step x longest response. It depends on nothing that a fault could change, so the sum over microbatches
is the loss of the whole batch whatever the split (design law 5). pi_behaviour is the log-probability that the engine
stored with each token, under the policy version that made it: stale tokens are corrected by the same ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolecall.core.config_algorithm import AlgorithmConfig
from rolecall.rl_runtime.protocol import Group

NOT_COMPARED = -1.0
"""Below every difference, so that the largest of several is one where any was compared."""
STD_FLOOR = 1e-6  # keeps a division finite where all rewards are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one microbatch, padded on the right; S samples, T tokens of prompt and response."""

    tokens_st: torch.Tensor  # int64
    mask_st: torch.Tensor  # float32, 1 where token t was generated (never at t = 0)
    behaviour_logprobs_st: torch.Tensor  # float32, 0 outside the mask
    versions_st: torch.Tensor  # int64, -1 outside the mask
    advantages_s: torch.Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`total` is the sum over tokens divided by the fixed normaliser: it has the gradient."""

    total: torch.Tensor
    log_ratio_max: float  # of tokens made by `policy_version`: the same weights, so any difference is an error
    """`NOT_COMPARED` where there is no such token: with a bound on staleness that is used, most steps have none."""
    clipped_tokens: int


def advantages(rewards: Sequence[float], *, divide_by_std: bool) -> tuple[float, ...]:
    """Group-relative advantages; all 0 when all rewards are equal."""
    mean = sum(rewards) / len(rewards)
    centred = tuple(r - mean for r in rewards)
    if not divide_by_std:
        return centred
    std = (sum(c * c for c in centred) / len(rewards)) ** 0.5
    return tuple(c / (std + STD_FLOOR) for c in centred)


def normaliser(algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    """N of the loss: constant for a job."""
    return float(algorithm.groups_per_step * algorithm.group_size * max_new_tokens)


def make_batch(groups: Sequence[Group], *, pad: int, divide_by_std: bool) -> Batch:
    """Pads the samples of whole groups into tensors.

    Raises:
        ValueError: a sample's log-probabilities or versions do not match its tokens.
    """
    rows = [(g.prompt_tokens, s) for g in groups for s in g.samples]
    values = [a for g in groups for a in advantages([s.reward for s in g.samples], divide_by_std=divide_by_std)]
    length = max(len(p) + len(s.tokens) for p, s in rows)
    tokens = torch.full((len(rows), length), pad, dtype=torch.int64)
    mask, behaviour = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
    versions = torch.full((len(rows), length), -1, dtype=torch.int64)
    for i, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.tokens)
        if not len(sample.tokens) == len(sample.logprobs) == len(sample.versions) or start == 0:
            raise ValueError(f"sample {sample.request_id}: tokens, logprobs and versions differ in length")
        tokens[i, :end] = torch.tensor((*prompt, *sample.tokens), dtype=torch.int64)
        mask[i, start:end] = 1.0
        behaviour[i, start:end] = torch.tensor(sample.logprobs)
        versions[i, start:end] = torch.tensor(sample.versions, dtype=torch.int64)
    return Batch(
        tokens_st=tokens,
        mask_st=mask,
        behaviour_logprobs_st=behaviour,
        versions_st=versions,
        advantages_s=torch.tensor(values, dtype=torch.float32),
    )


def token_logprobs(logits_stv: torch.Tensor, tokens_st: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token given those before it, and the entropy there; 0 at t = 0, which nothing predicts."""
    logprobs_stv = torch.log_softmax(logits_stv[:, :-1].float(), dim=-1)
    picked = logprobs_stv.gather(-1, tokens_st[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs_stv.exp() * logprobs_stv).sum(-1)
    return torch.nn.functional.pad(picked, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def grpo_loss(
    logprobs_st: torch.Tensor,
    entropy_st: torch.Tensor,
    batch: Batch,
    algorithm: AlgorithmConfig,
    *,
    normaliser: float,
    policy_version: int,
) -> Loss:
    """The microbatch's share of the step's loss, in the form that simply adds up over microbatches."""
    log_ratio = (logprobs_st - batch.behaviour_logprobs_st) * batch.mask_st
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    advantage = batch.advantages_s.unsqueeze(-1)
    gain = torch.minimum(ratio * advantage, clipped * advantage) + algorithm.entropy_coefficient * entropy_st
    generated = batch.mask_st > 0
    error = log_ratio.detach().abs()[(batch.versions_st == policy_version) & generated]
    return Loss(
        total=-(gain * batch.mask_st).sum() / normaliser,
        log_ratio_max=float(error.max()) if error.numel() else NOT_COMPARED,
        clipped_tokens=int(((clipped * advantage < ratio * advantage) & generated).sum()),
    )
