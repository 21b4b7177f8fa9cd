"""The distribution that answers are sampled from, from a model's logits: temperature, then top-k, then top-p.

Engines report log-probabilities of it. A trainer computes the same here, so that the ratio of a token under unchanged
weights is 1.
"""

import math

import torch
from torch import Tensor

from rolecall.core.config.data import SamplingConfig


def sampled_logits(logits_stv: Tensor, tokens_st: Tensor, sampling: SamplingConfig) -> Tensor:
    """Logits (S, T, V) whose softmax is the distribution; those left out are -inf.

    A token of `tokens_st` (S, T) that other weights sampled is never left out: its log-probability stays finite.
    """
    logits = logits_stv if sampling.temperature == 1 else logits_stv / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return logits
    with torch.no_grad():
        left_out = _left_out(logits[:, :-1].float(), sampling)
        left_out.scatter_(-1, tokens_st[:, 1:, None], False)
    return torch.cat([logits[:, :-1].masked_fill(left_out, -math.inf), logits[:, -1:]], dim=1)


def _left_out(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        # Equal to the k-th: kept, as engines do.
        ordered = ordered.masked_fill(ordered < ordered[..., sampling.top_k - 1, None], -math.inf)
    out = ordered == -math.inf
    if sampling.top_p < 1:
        probabilities = ordered.softmax(dim=-1)
        more_probable = probabilities.cumsum(dim=-1) - probabilities
        out |= more_probable >= sampling.top_p
        out[..., 0] = False
    return torch.zeros_like(out).scatter_(-1, order, out)
