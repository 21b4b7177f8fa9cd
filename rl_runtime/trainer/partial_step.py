"""A trainer's part of an uncommitted step: gradients of single microbatches, and their sum.

Gradients are of sums over tokens, never of means: the divisor is known only when all microbatches of the step are
together (`objective.divisors`). The sum is float64, so that the order of addition, which a loss changes, shows only
beyond float32. It is flat: the policy's parameters, then the critic's.
"""

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.config.data import SamplingConfig
from rolecall.rl_runtime.algorithms.agreement import recomputed_log_probs
from rolecall.rl_runtime.algorithms.objective import (
    Batch,
    Objective,
    TokenSelection,
    divisors,
    make_batch,
    objective,
    token_logprobs,
)
from rolecall.rl_runtime.algorithms.sampled_distribution import comparable, sampled_logits
from rolecall.rl_runtime.protocol.messages import Microbatch, MicrobatchNumbers
from rolecall.rl_runtime.protocol.policy_health import HealthSums
from rolecall.rl_runtime.trainer.reduce import MicrobatchStats
from rolecall.rl_runtime.trainer.state import TrainerState


class Gradients:
    """Computes the gradient of one microbatch: depends on weights and samples only, not on the replica.

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
    ) -> None:
        self._algorithm, self._pad, self._reference, self._sampling = algorithm, pad, reference, sampling
        self._staleness_max, self._longest = staleness_max, longest

    def of(
        self, state: TrainerState, microbatch: Microbatch, *, ask_again: bool = False
    ) -> tuple[torch.Tensor, MicrobatchStats]:
        """Flat gradient of the sums, in the order of the state's parameters, and the microbatch's contribution to the
        step.

        `ask_again`: recompute log-probabilities under previous versions (`agreement`).
        """
        terms = TokenSelection(
            policy_version=state.commit.policy_version, staleness_max=self._staleness_max, longest=self._longest
        )
        dtype = state.policy.masters[0].dtype
        batch = make_batch(
            microbatch.groups, self._algorithm, terms, pad=self._pad, dtype=dtype, statistics=microbatch.statistics
        )
        found = self._objective(state, batch, terms)
        grads: list[Any] = list(torch.autograd.grad(found.policy, state.policy.parameters, materialize_grads=True))
        if state.critic is not None:
            assert found.value is not None
            grads += torch.autograd.grad(found.value, state.critic.parameters, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in grads])
        sums = [found.policy] if found.value is None else [found.policy, found.value]
        ratio_s = found.log_ratio_s
        if ask_again:
            recomputed_s = recomputed_log_probs(
                state.policy.module,
                batch,
                state.previous,
                state.commit.step + 1,
                microbatches=self._algorithm.microbatches_per_step,
                sampling=self._sampling,
            )
            ratio_s = torch.maximum(ratio_s, recomputed_s)
        own = divisors(self._algorithm, found.sums, longest=self._longest)
        return flat, MicrobatchStats(
            microbatch_id=microbatch.microbatch_id,
            group_ids=tuple(g.group_id for g in microbatch.groups),
            policy_loss=float(found.policy.detach()),
            health=found.sums + HealthSums(log_ratio_max=float(ratio_s.max())),
            log_ratios=_by_engine(microbatch, ratio_s.tolist()),
            finite=bool(torch.isfinite(flat).all()) and all(bool(torch.isfinite(s)) for s in sums),
            numbers=MicrobatchNumbers(
                loss=float(found.policy.detach()) / own.policy,
                grad_norm=float(torch.linalg.vector_norm(flat, dtype=torch.float64)) / own.policy,
            ),
        )

    def _objective(self, state: TrainerState, batch: Batch, terms: TokenSelection) -> Objective:
        logits = state.policy.module(input_ids=batch.tokens_st, use_cache=False).logits
        logprobs, entropy = self._logprobs(logits, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference(input_ids=batch.tokens_st, use_cache=False).logits, batch)
        versions = torch.where(comparable(logits, self._sampling), batch.versions_st, -1)
        return objective(
            replace(batch, versions_st=versions),  # of the tokens to compare with the engine's
            self._algorithm,
            terms,
            logprobs_st=logprobs,
            entropy_st=entropy,
            values_after_st=None if state.critic is None else state.critic.module(batch.tokens_st),
            reference_logprobs_st=reference,
        )

    def _logprobs(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(sampled_logits(logits, batch.tokens_st, self._sampling), batch.tokens_st)


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
    """One member's part of a step. `gradient`: flat float64, must not be changed."""

    gradient: torch.Tensor
    stats: tuple[MicrobatchStats, ...]


class PartialStep:
    """The sum so far, and its microbatches. The working thread adds; other threads may read and clear."""

    def __init__(self, num_parameters: int) -> None:
        self._step = 0
        self._sum = torch.zeros(num_parameters, dtype=torch.float64)
        self._done: dict[str, tuple[Microbatch, MicrobatchStats]] = {}
        self._lock = threading.Lock()

    def clear(self, step: int) -> None:
        """Discards everything; `step` comes next."""
        with self._lock:
            self._clear(step)

    def prepare(self, step: int, mine: Sequence[Microbatch]) -> None:
        """Keeps the sum if all of its microbatches are still wanted.

        A part cannot be subtracted from the sum: a microbatch that was reassigned, or whose content changed, requires a
        restart.
        """
        plan = {m.microbatch_id: m for m in mine}
        with self._lock:
            if self._step != step or any(plan.get(i) != m for i, (m, _) in self._done.items()):
                self._clear(step)

    def add(self, microbatch: Microbatch, gradient: torch.Tensor, stats: MicrobatchStats) -> None:
        with self._lock:
            self._sum += gradient
            self._done[microbatch.microbatch_id] = (microbatch, stats)

    def has(self, microbatch_id: str) -> bool:
        with self._lock:
            return microbatch_id in self._done

    def computed(self, step: int) -> tuple[str, ...]:
        """Ids whose gradients are in the sum for `step`, sorted."""
        with self._lock:
            return tuple(sorted(self._done)) if self._step == step else ()

    def taken(self, wanted: AbstractSet[str]) -> Contribution | None:
        """The sum (only the caller may change it) and its microbatches; None unless they are exactly `wanted`."""
        with self._lock:
            if self._done.keys() != wanted:
                return None
            stats = tuple(stats for _, stats in self._done.values())
            return Contribution(gradient=self._sum, stats=stats)

    def _clear(self, step: int) -> None:
        self._step = step
        self._sum = torch.zeros_like(self._sum)
        self._done.clear()
