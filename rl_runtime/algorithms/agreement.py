"""Do engines and trainers agree? A token's log-probability, asked again of the very weights that made it.

Tokens of the weights that are trained are compared for nothing: the step's own forward pass says it (`objective`). In
an asynchronous run nearly all tokens are a version or two older. So a trainer keeps the weights of the newest former
versions, and asks them about a small share of each step's rows, drawn again in each step; all in one microbatch,
because what a forward pass costs whatever its rows is then paid once. Where both compute in one precision the two
differ by rounding; more means wrong weights or wrong numerics in an engine or a trainer.

What a replica does not hold (it has just joined, the token is older) it does not judge.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

from rolecall.rl_runtime.algorithms.objective import Batch, disagreement, token_logprobs

VERSIONS_KEPT: Final = 2
"""Former versions, one copy of the policy each: what a default job lets a token be older by."""
SHARE: Final = 16
"""One row of a step in so many is asked again: a sixteenth of a forward pass, about 2 % of a step's arithmetic."""

Weights = Mapping[str, Tensor]


def is_asked(microbatch_id: str, all_ids: Sequence[str], step: int) -> bool:
    """Whether this is the one microbatch of `step` whose rows are asked: another one in each step, on whichever
    replica."""
    return sorted(all_ids)[step % len(all_ids)] == microbatch_id


def rows_to_ask(
    versions_st: Tensor, former: Mapping[int, Weights], step: int, *, microbatches: int
) -> tuple[int, list[int]] | None:
    """(former version with the most tokens here, rows that have some); None where there is no token of any.

    `microbatches` of the step: this one answers for all of them.
    """
    counts = {version: int((versions_st == version).sum()) for version in former}
    version = max(counts, key=lambda v: (counts[v], v), default=-1)
    if not counts.get(version):
        return None
    having = (versions_st == version).any(dim=1).nonzero()[:, 0].tolist()
    wanted = min(len(having), -(-len(versions_st) * microbatches // SHARE))
    return version, sorted(random.Random(step).sample(having, wanted))


@torch.no_grad()
def asked_again(module: Any, batch: Batch, former: Mapping[int, Weights], step: int, *, microbatches: int) -> float:
    """Largest |log-probability under its own former version - as it was sampled|, of some rows; -1 where nothing can be
    asked. `module`: the policy; its own weights are not used."""
    found = rows_to_ask(batch.versions_st, former, step, microbatches=microbatches)
    if found is None:
        return -1.0
    version, rows = found
    end = int(batch.response_st[rows].any(dim=0).nonzero().max()) + 1
    tokens = batch.tokens_st[rows, :end]
    out = functional_call(module, dict(former[version]), kwargs={"input_ids": tokens, "use_cache": False})
    logprobs, _ = token_logprobs(out.logits, tokens)
    return disagreement(logprobs, batch.sampler_logprobs_st[rows, :end], batch.versions_st[rows, :end], version)
