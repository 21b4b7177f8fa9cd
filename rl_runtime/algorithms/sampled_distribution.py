"""The distribution that answers are sampled from, from a model's logits: temperature, then top-k, then top-p.

Engines report log-probabilities of it. A trainer computes the same here, so that the ratio of a token under unchanged
weights is 1.
"""

import math
from typing import Final

import torch
from torch import Tensor

from rolecall.core.config.data import SamplingConfig

EDGE_PROBABILITY: Final = {torch.bfloat16: 0.02}
EDGE_LOGIT: Final = {torch.bfloat16: 0.25}
EDGE: Final = 1e-3
"""How near to the edge of top-p or top-k a token may be for rounding to keep it in an engine and not in a trainer, by
the dtype of the logits; in float32, 1e-3 for both: an order more than engines and trainers were seen to differ by. A
bfloat16 logit between 8 and 16 is rounded to a sixteenth."""


def sampled_logits(logits_stv: Tensor, tokens_st: Tensor, sampling: SamplingConfig) -> Tensor:
    """Logits (S, T, V), in at least float32, whose softmax is the distribution; those left out are -inf.

    A token of `tokens_st` (S, T) that other weights sampled is never left out: its log-probability stays finite.
    """
    logits_stv = logits_stv if logits_stv.dtype is torch.float64 else logits_stv.float()  # as engines do
    logits = logits_stv if sampling.temperature == 1 else logits_stv / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return logits
    with torch.no_grad():
        left_out = _left_out(logits[:, :-1].float(), sampling)
        left_out.scatter_(-1, tokens_st[:, 1:, None], False)
    return torch.cat([logits[:, :-1].masked_fill(left_out, -math.inf), logits[:, -1:]], dim=1)


def comparable(logits_stv: Tensor, sampling: SamplingConfig) -> Tensor:
    """(S, T), bool: where engine and trainer sample token t from the same tokens in spite of rounding, so that their
    log-probabilities can be compared. True at t = 0.
    """
    same = torch.ones(logits_stv.shape[:2], dtype=torch.bool, device=logits_stv.device)
    if not sampling.top_k and sampling.top_p == 1:
        return same
    with torch.no_grad():
        ordered = (logits_stv[:, :-1].float() / sampling.temperature).sort(dim=-1, descending=True).values
        k = sampling.top_k
        if k and k < ordered.shape[-1]:
            same[:, 1:] &= ordered[..., k - 1] - ordered[..., k] > EDGE_LOGIT.get(logits_stv.dtype, EDGE)
            ordered = ordered[..., :k]
        probabilities = ordered.softmax(dim=-1)
        away = (probabilities.cumsum(dim=-1) - probabilities - sampling.top_p).abs()
        same[:, 1:] &= away.amin(dim=-1) > EDGE_PROBABILITY.get(logits_stv.dtype, EDGE)
    return same


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
