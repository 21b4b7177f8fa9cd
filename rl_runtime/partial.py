"""What a trainer has of a step that is not committed: gradients of single microbatches, and their sum.

The sum is float64: the order in which microbatches are added, which a loss changes, then shows only beyond float32.
"""

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from rolecall.core.config_algorithm import AlgorithmConfig
from rolecall.rl_runtime.grpo import grpo_loss, make_batch, token_logprobs
from rolecall.rl_runtime.protocol import Microbatch
from rolecall.rl_runtime.reduce import MicrobatchStats
from rolecall.rl_runtime.trainer_state import TrainerState


class Gradients:
    """Computes the gradient of one microbatch: a function of weights and samples, the same on every replica."""

    def __init__(self, algorithm: AlgorithmConfig, *, pad: int, normaliser: float) -> None:
        self._algorithm, self._pad, self._normaliser = algorithm, pad, normaliser

    def of(self, state: TrainerState, microbatch: Microbatch) -> tuple[torch.Tensor, MicrobatchStats]:
        """Flat float32 gradient in the order of the state's names, and what the microbatch adds to the step."""
        batch = make_batch(microbatch.groups, pad=self._pad, divide_by_std=self._algorithm.divide_by_std)
        logits = state.model(input_ids=batch.tokens_st, use_cache=False).logits
        logprobs, entropy = token_logprobs(logits, batch.tokens_st)
        version = state.commit.policy_version
        loss = grpo_loss(logprobs, entropy, batch, self._algorithm, normaliser=self._normaliser, policy_version=version)
        grads: Any = torch.autograd.grad(loss.total, state.parameters, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in grads])
        total = loss.total.detach()
        samples = [s for g in microbatch.groups for s in g.samples]
        return flat, MicrobatchStats(
            microbatch_id=microbatch.microbatch_id,
            group_ids=tuple(g.group_id for g in microbatch.groups),
            loss=float(total),
            reward_sum=sum(s.reward for s in samples),
            num_samples=len(samples),
            num_tokens=sum(len(s.tokens) for s in samples),
            log_ratio_max=loss.log_ratio_max,
            finite=bool(torch.isfinite(flat).all()) and bool(torch.isfinite(total)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One member's part of a step. `gradient`: flat float64."""

    gradient: torch.Tensor
    stats: tuple[MicrobatchStats, ...]


class PartialStep:
    """The sum so far, and of what. Its working thread adds; others may ask and clear."""

    def __init__(self, num_parameters: int) -> None:
        self._step = 0
        self._sum = torch.zeros(num_parameters, dtype=torch.float64)
        self._done: dict[str, tuple[Microbatch, MicrobatchStats]] = {}
        self._lock = threading.Lock()

    def clear(self, step: int) -> None:
        """Throws everything away; `step` comes next."""
        with self._lock:
            self._clear(step)

    def prepare(self, step: int, mine: Sequence[Microbatch]) -> None:
        """Keeps what is there when all of it is still wanted.

        A sum cannot give back one of its parts: a microbatch that is no longer mine, or has other content under its
        id, means a new start.
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
        """A copy of the sum and what is in it; None when that is not exactly `wanted`."""
        with self._lock:
            if self._done.keys() != wanted:
                return None
            stats = tuple(stats for _, stats in self._done.values())
            return Contribution(gradient=self._sum.clone(), stats=stats)

    def _clear(self, step: int) -> None:
        self._step = step
        self._sum.zero_()
        self._done.clear()
