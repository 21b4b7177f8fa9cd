"""Totals of a step's ballots. Computed once, after the vote, and bitwise equal at every member and for every
assignment:
microbatches are added in the order of their ids, on any replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from rolecall.agent.reporter import reporter
from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.algorithms.objective import Divisors, divisors
from rolecall.rl_runtime.protocol.policy_health import HealthSums, PolicyHealth, health
from rolecall.rl_runtime.trainer.reduce import CommitVote


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    group_ids: tuple[GroupId, ...]  # sorted
    num_tokens: int  # tokens that the policy is trained on
    divisors: Divisors
    loss: float  # policy loss, divided
    reward: float | None  # mean over the complete answers
    health: PolicyHealth
    log_ratio_max: float | None  # see StepResult

    @classmethod
    def of(cls, ballots: Sequence[CommitVote], algorithm: AlgorithmConfig, *, longest: int) -> Self:
        stats = sorted((s for b in ballots for s in b.microbatches), key=lambda s: s.microbatch_id)
        sums = sum((s.health for s in stats), HealthSums())
        by = divisors(algorithm, sums, longest=longest)
        return cls(
            group_ids=tuple(sorted(g for s in stats for g in s.group_ids)),
            num_tokens=sums.tokens,
            divisors=by,
            loss=sum(s.policy_loss for s in stats) / by.policy,
            reward=sums.reward / sums.ended if sums.ended else None,
            health=_of_what_there_is(health(sums), algorithm),
            log_ratio_max=sums.log_ratio_max if sums.log_ratio_max >= 0 else None,
        )

    def report(self) -> None:
        """Writes the totals to this process's state page."""
        signs = self.health
        reporter.update(loss=self.loss, reward=self.reward)
        reporter.health(
            entropy=signs.entropy,
            clip_fraction_low=signs.clip_fraction_low,
            clip_fraction_high=signs.clip_fraction_high,
            ratio_mean=signs.ratio_mean,
            ratio_max=signs.ratio_max,
            kl_sampler=signs.kl_sampler,
            response_length=signs.response_length,
            truncated_fraction=signs.truncated_fraction,
            log_ratio_max=self.log_ratio_max,
        )


def _of_what_there_is(found: PolicyHealth, algorithm: AlgorithmConfig) -> PolicyHealth:
    """Drops metrics that do not apply: nothing is clipped with truncated weights, or vice versa, and that is not a
    share of 0.
    """
    if algorithm.importance_cap is None:
        return replace(found, capped_fraction=None)
    return replace(found, clip_fraction_low=None, clip_fraction_high=None)
