"""A trainer's part of an uncommitted optimizer update: gradients of single microbatches, and their sum.

Gradients are of sums over tokens, never of means: the divisor is known only when all microbatches of the update are
together (`objective.divisors`). The sum is float64, so that the order of addition, which a loss changes, shows only
beyond float32. It is flat: the policy's parameters, then the critic's.

A microbatch of many tokens is computed in chunks of whole samples, of similar length and at most
`microbatch_tokens_max` padded tokens each, whose gradients are added: memory is that of one chunk. The shards of a
replica compute chunks of different samples at the same time, as many each: where one has fewer it computes one more
whose weight is 0, because a sharded model needs all ranks in each pass. The tensor ranks of a shard compute the same.
"""

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.config.data import SamplingConfig
from rolecall.rl_runtime.algorithms.agreement import recomputed_log_probs
from rolecall.rl_runtime.algorithms.batching import chunks
from rolecall.rl_runtime.algorithms.objective import (
    Batch,
    Objective,
    TokenSelection,
    batch_on,
    divisors,
    make_batch,
    objective,
    parts_of,
    token_logprobs,
    with_divergence,
)
from rolecall.rl_runtime.algorithms.sampled_distribution import comparable, sampled_logits
from rolecall.rl_runtime.protocol.messages import Microbatch, MicrobatchNumbers
from rolecall.rl_runtime.protocol.policy_health import HealthSums
from rolecall.rl_runtime.trainer.ranks import ALONE, Ranks, dealt
from rolecall.rl_runtime.trainer.reduce import MicrobatchStats, nothing
from rolecall.rl_runtime.trainer.state import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Of the models for each token of a microbatch, without gradient."""

    logprobs_st: torch.Tensor
    comparable_st: torch.Tensor  # which of them can be compared with the engine's
    values_after_st: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Rows of a batch that this rank computes together, and the length of the longest one among them. Chunks from
    `num_counted` on are padding: they do not count, and run because other ranks have more chunks."""

    rows: list[list[int]]
    ends: list[int]
    num_counted: int

    @torch.no_grad()
    def gathered(self, batch: Batch, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`of` each chunk's tokens, together as (S, T) or (S, T, ...); 0 beyond a chunk's end, and in other ranks'
        rows."""
        found = [of(batch.tokens_st[rows, :end]) for rows, end in zip(self.rows, self.ends, strict=True)]
        whole = found[0].new_zeros((*batch.tokens_st.shape, *found[0].shape[2:]))
        for rows, end, x in list(zip(self.rows, self.ends, found, strict=True))[: self.num_counted]:
            whole[rows, :end] = x
        return whole


class Gradients:
    """Computes the gradient of one microbatch: depends on weights and samples only, not on the replica. Of several
    ranks each gets its shard of the gradient, and the numbers of all rows.

    `reference`: the initial policy, if the objective needs it. Frozen, and a function of the job: each replica
    recomputes it instead of copying it.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        *,
        pad: int,
        staleness_max: int,
        longest: int,
        reference: Any = None,
        sampling: SamplingConfig = SamplingConfig(),
        ranks: Ranks = ALONE,
        on_backward: Callable[[], None] = nothing,
    ) -> None:
        self._ranks, self._on_backward = ranks, on_backward
        self._algorithm, self._pad, self._reference, self._sampling = algorithm, pad, reference, sampling
        self._staleness_max, self._longest = staleness_max, longest
        self._tokens_max = algorithm.microbatch_tokens_max

    def outputs(self, state: TrainerState, microbatch: Microbatch) -> Outputs:
        """Under the weights before a step of several updates: what its ratios and values are compared with."""
        batch, _ = self._batch(state, microbatch)
        cut = self._chunks(_lengths(microbatch))
        critic = state.critic

        def both(tokens_st: torch.Tensor) -> torch.Tensor:
            logits = state.policy.module(input_ids=tokens_st, use_cache=False).logits
            logprobs = token_logprobs(sampled_logits(logits, tokens_st, self._sampling), tokens_st)[0]
            return torch.stack([logprobs, comparable(logits, self._sampling).to(logprobs.dtype)], dim=-1)

        logprobs, same = cut.gathered(batch, both).unbind(dim=-1)
        return Outputs(
            logprobs_st=logprobs,
            comparable_st=same.bool(),
            values_after_st=None if critic is None else cut.gathered(batch, critic.module),
        )

    def of(
        self, state: TrainerState, microbatch: Microbatch, *, ask_again: bool = False, old: Outputs | None = None
    ) -> tuple[torch.Tensor, MicrobatchStats]:
        """Flat gradient of the sums, in the order of the state's parameters, and the microbatch's contribution to the
        update.

        `ask_again`: recompute log-probabilities under previous versions (`agreement`). `old`: outputs before the step,
        if it has several updates.
        """
        batch, terms = self._batch(state, microbatch)
        cut = self._chunks(_lengths(microbatch))
        reference = None
        if self._reference is not None:
            mine = cut.gathered(batch, lambda tokens: self._logprobs(self._reference, tokens))
            reference = self._ranks.sum(mine)  # rewards of a group may depend on all of its samples
            batch = with_divergence(batch, self._algorithm, reference)
        if not self._ranks.is_first:
            batch = replace(batch, sums=HealthSums())  # counted once
        flat: torch.Tensor | None = None
        policy_loss, known, finite = 0.0, HealthSums(), True
        ratio_s = torch.full_like(batch.rewards_s, -1.0)
        parts = parts_of(batch, cut.rows, cut.ends)
        for number, (rows, end, part) in enumerate(zip(cut.rows, cut.ends, parts, strict=True)):
            counts = number < cut.num_counted

            def of_part(x_st: torch.Tensor | None, rows: list[int] = rows, end: int = end) -> torch.Tensor | None:
                return None if x_st is None else x_st[rows, :end]

            found = self._objective(
                state,
                part,
                terms,
                comparable_st=of_part(old.comparable_st) if old else None,
                reference_logprobs_st=of_part(reference),
                old_logprobs_st=of_part(old.logprobs_st) if old else None,
                old_values_after_st=of_part(old.values_after_st) if old else None,
            )
            # Added in the batch's dtype, which is never below that of the gradient.
            self._on_backward()
            gradient = self._gradient(state, found, counts=counts).to(batch.rewards_s.dtype)
            flat = gradient if flat is None else flat.add_(gradient)
            if not counts:
                continue
            sums = [found.policy] if found.value is None else [found.policy, found.value]
            finite = finite and all(bool(torch.isfinite(s)) for s in sums)
            policy_loss += float(found.policy.detach())
            known += found.sums
            ratio_s[rows] = found.log_ratio_s.to(ratio_s.dtype)
        assert flat is not None, "a microbatch has samples"
        if ask_again:
            recomputed_s = recomputed_log_probs(
                state.previous_logits,
                batch,
                state.previous,
                state.commit.step + 1,
                microbatches=self._algorithm.microbatches_per_step,
                sampling=self._sampling,
                cut=lambda lengths: self._chunks(lengths).rows,
            )
            ratio_s = torch.maximum(ratio_s, recomputed_s)
        norm = state.complete(flat)
        finite = finite and bool(torch.isfinite(flat).all())
        policy_loss, known, finite = self._of_all_ranks(policy_loss, known, finite, ratio_s)
        own = divisors(self._algorithm, known, longest=self._longest)
        return flat, MicrobatchStats(
            microbatch_id=microbatch.microbatch_id,
            group_ids=tuple(g.group_id for g in microbatch.groups),
            policy_loss=policy_loss,
            health=known + HealthSums(log_ratio_max=float(ratio_s.max())),
            log_ratios=_by_engine(microbatch, ratio_s.tolist()),
            finite=finite,
            numbers=MicrobatchNumbers(loss=policy_loss / own.policy, grad_norm=norm / own.policy),
        )

    def _of_all_ranks(
        self, policy_loss: float, known: HealthSums, finite: bool, ratio_s: torch.Tensor
    ) -> tuple[float, HealthSums, bool]:
        """(loss, sums, whether all is finite) of the microbatch; fills in other ranks' ratios."""
        if self._ranks.size == 1:
            return policy_loss, known, finite
        found = self._ranks.gather([policy_loss, asdict(known), finite, ratio_s.tolist()])
        losses, sums, finites, ratios = zip(*found, strict=True)
        ratio_s.copy_(torch.tensor(ratios, dtype=ratio_s.dtype).amax(dim=0))
        one_of_each = slice(None, None, self._ranks.num_tensor)  # the tensor ranks of a shard have the same rows
        known = sum((HealthSums(**s) for s in sums[one_of_each]), HealthSums())
        return sum(losses[one_of_each]), known, all(finites)

    def _batch(self, state: TrainerState, microbatch: Microbatch) -> tuple[Batch, TokenSelection]:
        terms = TokenSelection(
            policy_version=state.commit.policy_version, staleness_max=self._staleness_max, longest=self._longest
        )
        dtype = state.policy.masters[0].dtype
        batch = make_batch(
            microbatch.groups, self._algorithm, terms, pad=self._pad, dtype=dtype, statistics=microbatch.statistics
        )
        return batch_on(self._ranks.device, batch), terms

    def _chunks(self, lengths: Sequence[int]) -> _Chunks:
        """Of rows of these lengths."""
        of_shards = [
            [[rows[i] for i in some] for some in chunks([lengths[row] for row in rows], self._tokens_max) if some]
            for rows in dealt(lengths, self._ranks.num_shards)
        ]
        mine = of_shards[self._ranks.shard_index]
        num_padding = max(map(len, of_shards)) - len(mine)
        rows = mine + [of_shards[0][0][:1]] * num_padding
        return _Chunks(rows, [max(lengths[row] for row in some) for some in rows], len(mine))

    def _gradient(self, state: TrainerState, found: Objective, *, counts: bool) -> torch.Tensor:
        if self._ranks.num_shards > 1:
            return self._sharded_gradient(state, found, counts=counts)
        grads: list[Any] = list(torch.autograd.grad(found.policy, state.policy.parameters, materialize_grads=True))
        if state.critic is not None:
            assert found.value is not None
            grads += torch.autograd.grad(found.value, state.critic.parameters, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in grads])

    @staticmethod
    def _sharded_gradient(state: TrainerState, found: Objective, *, counts: bool) -> torch.Tensor:
        """FSDP2 reduces gradients of a backward pass to their shards, not those of `autograd.grad`."""
        loss = found.policy if found.value is None else found.policy + found.value
        (loss * float(counts)).backward()  # type: ignore[no-untyped-call]
        shards = []
        for network in (state.policy, state.critic):
            for p, master in zip(network.parameters, network.masters, strict=True) if network else ():
                grad: Any = p.grad
                shards.append(torch.zeros_like(master) if grad is None else grad.to_local())
                p.grad = None
        return torch.cat([shard.reshape(-1) for shard in shards])

    def _objective(
        self,
        state: TrainerState,
        batch: Batch,
        terms: TokenSelection,
        *,
        comparable_st: torch.Tensor | None,
        **known: torch.Tensor | None,
    ) -> Objective:
        """`comparable_st`: of the weights before the step, which engines sampled with; None: `state` has these.
        `known`: outputs of other weights, see `objective`.
        """
        logits = state.policy.module(input_ids=batch.tokens_st, use_cache=False).logits
        logprobs, entropy = token_logprobs(sampled_logits(logits, batch.tokens_st, self._sampling), batch.tokens_st)
        same_st = comparable(logits, self._sampling) if comparable_st is None else comparable_st
        versions = torch.where(same_st, batch.versions_st, -1)
        return objective(
            replace(batch, versions_st=versions),  # of the tokens to compare with the engine's
            self._algorithm,
            terms,
            logprobs_st=logprobs,
            entropy_st=entropy,
            values_after_st=None if state.critic is None else state.critic.module(batch.tokens_st),
            **known,
        )

    def _logprobs(self, module: Any, tokens_st: torch.Tensor) -> torch.Tensor:
        logits = module(input_ids=tokens_st, use_cache=False).logits
        return token_logprobs(sampled_logits(logits, tokens_st, self._sampling), tokens_st)[0]


def _lengths(microbatch: Microbatch) -> list[int]:
    return [len(g.prompt_tokens) + len(s.tokens) for g in microbatch.groups for s in g.samples]


def _by_engine(microbatch: Microbatch, ratio_s: Sequence[float]) -> dict[str, float]:
    """Largest log-ratio by engine, over samples whose tokens are all from one engine."""
    found: dict[str, float] = {}
    samples = [s for g in microbatch.groups for s in g.samples]
    for sample, ratio in zip(samples, ratio_s, strict=True):
        if sample.engine and ratio >= 0.0:
            found[sample.engine] = max(ratio, found.get(sample.engine, 0.0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One member's part of an update. `gradient`: flat float64, must not be changed."""

    gradient: torch.Tensor
    stats: tuple[MicrobatchStats, ...]


class PartialStep:
    """The sum so far, and its microbatches. The working thread adds; other threads may read and clear.

    Only the first update's part survives an interruption: a later one depends on the updates before it, and an
    interrupted step restarts from the weights before it.
    """

    def __init__(self, num_parameters: int, device: torch.device | str = "cpu") -> None:
        self._step, self._update = 0, 0
        self.num_added = 0
        """Microbatches since the beginning."""
        self._sum = torch.zeros(num_parameters, dtype=torch.float64, device=device)
        self._done: dict[str, tuple[Microbatch, MicrobatchStats]] = {}
        self._lock = threading.Lock()

    def clear(self, step: int) -> None:
        """Discards everything; `step` comes next."""
        with self._lock:
            self._clear(step)

    def prepare(self, step: int, mine: Sequence[Microbatch], update: int = 0) -> None:
        """Keeps the sum if it is of this update and all of its microbatches are still wanted.

        A part cannot be subtracted from the sum: a microbatch that was reassigned, or whose content changed, requires a
        restart.
        """
        plan = {m.microbatch_id: m for m in mine}
        with self._lock:
            current = (self._step, self._update) == (step, update)
            if not current or any(plan.get(i) != m for i, (m, _) in self._done.items()):
                self._clear(step, update)

    def add(self, microbatch: Microbatch, gradient: torch.Tensor, stats: MicrobatchStats) -> None:
        with self._lock:
            self._sum += gradient
            self._done[microbatch.microbatch_id] = (microbatch, stats)
            self.num_added += 1

    def has(self, microbatch_id: str) -> bool:
        with self._lock:
            return microbatch_id in self._done

    def computed(self, step: int) -> tuple[str, ...]:
        """Ids whose gradients are in the sum for the first update of `step`, sorted."""
        with self._lock:
            return tuple(sorted(self._done)) if (self._step, self._update) == (step, 0) else ()

    def taken(self, wanted: AbstractSet[str]) -> Contribution | None:
        """The sum (only the caller may change it) and its microbatches; None unless they are exactly `wanted`."""
        with self._lock:
            if self._done.keys() != wanted:
                return None
            stats = tuple(stats for _, stats in self._done.values())
            return Contribution(gradient=self._sum, stats=stats)

    def _clear(self, step: int, update: int = 0) -> None:
        self._step, self._update = step, update
        self._sum = torch.zeros_like(self._sum)
        self._done.clear()
