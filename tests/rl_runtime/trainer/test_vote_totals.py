"""pytest tests/rl_runtime/trainer/test_vote_totals.py"""

from dataclasses import replace

import pytest

from rolecall.core.config.algorithm import AlgorithmConfig, AlgorithmName
from rolecall.core.ids import GroupId
from rolecall.rl_runtime.protocol.messages import MicrobatchNumbers
from rolecall.rl_runtime.protocol.policy_health import HealthSums
from rolecall.rl_runtime.trainer.reduce import MicrobatchStats
from rolecall.rl_runtime.trainer.step_totals import StepTotals, update_divisors
from tests.rl_runtime.trainer.test_reduce import ballot

TOKENWISE = AlgorithmConfig(name=AlgorithmName.PPO, aggregation="token")


def part(number: int, loss: float, **health: float) -> MicrobatchStats:
    return MicrobatchStats(
        microbatch_id=f"7.{number}",
        group_ids=(GroupId(f"g{9 - number:08d}"),),
        policy_loss=loss,
        health=HealthSums(**health),  # type: ignore[arg-type]
        finite=True,
        numbers=MicrobatchNumbers(loss=0.1, grad_norm=1.0),
    )


PARTS = (
    part(0, 0.1, tokens=1, samples=2, ended=1, reward=1.0, value_tokens=4),
    part(1, 0.2, tokens=9, samples=2, ended=0, log_ratio_max=0.5),
    part(2, 0.3, tokens=0, samples=1, ended=3, reward=0.5, value_tokens=6, log_ratio_max=0.25),
)


def test_sums_are_divided_by_the_totals_of_the_step() -> None:
    ballots = [replace(ballot(0, []), microbatches=PARTS)]
    tally, by = StepTotals.of([ballots], TOKENWISE, longest=5), update_divisors(ballots, TOKENWISE, longest=5)
    assert (by.policy, by.value, tally.num_tokens) == (10.0, 10.0, 10)
    assert tally.loss == pytest.approx(0.06)
    assert (tally.reward, tally.log_ratio_max) == (1.5 / 4, 0.5)
    assert tally.group_ids == ("g00000007", "g00000008", "g00000009")


def test_the_same_to_the_bit_however_the_step_was_shared_out() -> None:
    shares = ([PARTS], [PARTS[:1], PARTS[1:]], [PARTS[2:], (), PARTS[:2]], [(PARTS[2], PARTS[0]), (PARTS[1],)])
    ballots = [[replace(ballot(i, []), microbatches=tuple(s)) for i, s in enumerate(share)] for share in shares]
    assert len({repr(StepTotals.of([b], TOKENWISE, longest=5)) for b in ballots}) == 1


def test_metrics_without_data_are_none() -> None:
    empty = StepTotals.of([[replace(ballot(0, []), microbatches=(part(0, 0.0, samples=1),))]], TOKENWISE, longest=5)
    assert (empty.reward, empty.log_ratio_max, empty.num_tokens, empty.loss) == (None, None, 0, 0.0)


def test_of_several_updates_tokens_and_groups_count_once_and_the_rest_is_a_mean() -> None:
    algorithm = TOKENWISE.model_copy(update={"microbatches_per_step": 2, "mini_batches": 2, "ppo_epochs": 2})
    first, second = (
        part(n, 0.5 * (n + 1), tokens=4 * (n + 1), entropy=4.0, samples=2, ended=2, reward=1.0) for n in (0, 1)
    )
    later = replace(first, policy_loss=1.5, health=replace(first.health, entropy=16.0))
    votes = [[replace(ballot(0, []), microbatches=(m,))] for m in (first, second, second, later)]
    tally = StepTotals.of(votes, algorithm, longest=5)
    assert tally.group_ids == ("g00000008", "g00000009")
    assert tally.num_tokens == 12
    assert tally.loss == pytest.approx((0.5 / 4 + 1.0 / 8 + 1.0 / 8 + 1.5 / 4) / 4)
    assert tally.health.entropy == pytest.approx((4.0 + 4.0 + 4.0 + 16.0) / 24)
    assert tally.reward == 0.5
