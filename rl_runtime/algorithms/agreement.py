"""Engine-trainer agreement: recompute the log-probabilities of sampled tokens under the weights that generated them.

Tokens of the current weights cost nothing to compare: the step's forward pass already computes them (`objective`). In
an asynchronous run nearly all tokens are one or two versions older. A trainer therefore keeps the newest previous
versions and recomputes a small share of each step's rows with them. A different share is drawn in each step, from one
microbatch, so that the fixed cost of a forward pass is paid once. At equal precision the results differ only by
rounding; a larger difference means wrong weights or wrong numerics in an engine or a trainer.

A replica skips tokens of versions that it does not hold, for example after it has just joined.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from rolecall.core.config.data import SamplingConfig
from rolecall.rl_runtime.algorithms.objective import Batch, disagreement, token_logprobs
from rolecall.rl_runtime.algorithms.sampled_distribution import comparable, sampled_logits

VERSIONS_KEPT: Final = 2
"""Number of previous policy versions to keep, one copy each: the default staleness bound of a job."""
SHARE: Final = 16
"""One row in `SHARE` of a step is recomputed: a sixteenth of a forward pass, about 2 % of a step's arithmetic."""


def is_asked(microbatch_id: str, all_ids: Sequence[str], step: int) -> bool:
    """Whether this microbatch is the one of `step` whose rows are recomputed; the same at each replica."""
    return sorted(all_ids)[step % len(all_ids)] == microbatch_id


def rows_to_ask(
    versions_st: Tensor, previous: Collection[int], step: int, *, microbatches: int
) -> tuple[int, list[int]] | None:
    """(one of the `previous` versions, that with the most tokens here; rows with such tokens); None without any.

    `microbatches`: number in the step; this one represents all of them.
    """
    counts = {version: int((versions_st == version).sum()) for version in previous}
    version = max(counts, key=lambda v: (counts[v], v), default=-1)
    if not counts.get(version):
        return None
    having = (versions_st == version).any(dim=1).nonzero()[:, 0].tolist()
    wanted = min(len(having), -(-len(versions_st) * microbatches // SHARE))
    return version, sorted(random.Random(step).sample(having, wanted))


@torch.no_grad()
def recomputed_log_probs(
    logits_of: Callable[[int, Tensor], Tensor],
    batch: Batch,
    previous: Collection[int],
    step: int,
    *,
    microbatches: int,
    sampling: SamplingConfig = SamplingConfig(),
    cut: Callable[[Sequence[int]], Iterable[Sequence[int]]],
) -> Tensor:
    """(S,): largest |log-probability under the token's own version - sampled log-probability| of some rows; -1 for a
    row that was not asked or has no comparable token.

    `logits_of`: logits under a version of `previous`. `cut`: rows by their lengths -> the places of those of each
    forward pass here; the rows of other ranks, which it leaves out, stay -1.
    """
    apart_s = torch.full_like(batch.rewards_s, -1.0)
    found = rows_to_ask(batch.versions_st, previous, step, microbatches=microbatches)
    if found is None:
        return apart_s
    version, rows = found
    ends = [int(batch.response_st[row].nonzero().max()) + 1 for row in rows]
    for chunk in cut(ends):
        some, end = [rows[i] for i in chunk], max(ends[i] for i in chunk)
        tokens = batch.tokens_st[some, :end]
        logits = logits_of(version, tokens)
        logprobs, _ = token_logprobs(sampled_logits(logits, tokens, sampling), tokens)
        sampled = batch.sampler_logprobs_st[some, :end]
        versions = torch.where(comparable(logits, sampling), batch.versions_st[some, :end], -1)
        apart_s[some] = disagreement(logprobs, sampled, versions, version)
    return apart_s
