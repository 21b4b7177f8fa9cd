"""What a step's ballots add up to: the divisors of each update, and what the step reports. Pure but for `report`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from rolecall.agent.reporter import reporter
from rolecall.core.config.algorithm import AlgorithmConfig
from rolecall.core.ids import GroupId
from rolecall.core.telemetry import HEALTH_SIGNS
from rolecall.rl_runtime.algorithms.objective import Divisors, divisors
from rolecall.rl_runtime.protocol.policy_health import HealthSums, PolicyHealth, health
from rolecall.rl_runtime.trainer.reduce import CommitVote, MicrobatchStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals of a step's ballots. Computed once, after the last vote, and bitwise equal at every member and for every
    assignment: updates are added in their order, their microbatches in the order of their ids, on any replica.

    Of several updates, loss and health are means over all of them.
    """

    group_ids: tuple[GroupId, ...]  # sorted
    num_tokens: int  # tokens that the policy is trained on, each once
    loss: float  # policy loss, divided
    reward: float | None  # mean over the complete answers
    health: PolicyHealth
    log_ratio_max: float | None  # see StepResult
    log_ratios: Mapping[str, float]

    @classmethod
    def of(cls, votes: Sequence[Sequence[CommitVote]], algorithm: AlgorithmConfig, *, longest: int) -> Self:
        """`votes`: each update's ballots."""
        found = [_stats(ballots) for ballots in votes]
        stats = list(chain(*found))
        sums = sum((s.health for s in stats), HealthSums())
        once = list(chain(*found[: algorithm.mini_batches]))
        losses = [
            sum(s.policy_loss for s in of_one) / update_divisors(ballots, algorithm, longest=longest).policy
            for of_one, ballots in zip(found, votes, strict=True)
        ]
        return cls(
            group_ids=tuple(sorted(g for s in once for g in s.group_ids)),
            num_tokens=sum(s.health.tokens for s in once),
            loss=sum(losses) / len(losses),
            reward=sums.reward / sums.ended if sums.ended else None,
            health=health(sums),
            log_ratio_max=sums.log_ratio_max if sums.log_ratio_max >= 0 else None,
            log_ratios={
                engine: max(s.log_ratios.get(engine, 0.0) for s in stats)
                for engine in sorted({e for s in stats for e in s.log_ratios})
            },
        )

    def report(self) -> None:
        """Writes the totals to this process's state page."""
        reporter.update(loss=self.loss, reward=self.reward)
        metrics = {**self.health.to_dict(), "log_ratio_max": self.log_ratio_max}
        reporter.health(**{name: metrics.get(name) for name in HEALTH_SIGNS})


def _stats(ballots: Sequence[CommitVote]) -> list[MicrobatchStats]:
    return sorted((s for b in ballots for s in b.microbatches), key=lambda s: s.microbatch_id)


def update_divisors(ballots: Sequence[CommitVote], algorithm: AlgorithmConfig, *, longest: int) -> Divisors:
    """Of the update that these are the ballots of."""
    return divisors(algorithm, sum((s.health for s in _stats(ballots)), HealthSums()), longest=longest)
