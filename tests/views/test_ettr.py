"""ETTR by the paper's formula and by ours, pace, and the ends of the reward curve: small numbers checked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.journal.events import Event, EventKind
from rolecall.views.ettr import (
    Loss,
    Step,
    by_cause,
    compare_pace,
    ettr,
    faultless_step_seconds,
    lost_seconds,
    mean_of_ends,
    steps,
    training_began,
)
from tests.events import made_event


def _ettr(*lost: Loss, count_rollouts: bool = True) -> float:
    value = ettr(0.0, 100.0, lost, num_rollouts=3, num_trainers=2, count_rollouts=count_rollouts)
    assert value is not None
    return value


def test_without_a_loss_all_time_counts() -> None:
    assert _ettr() == 1.0


def test_while_trainers_recover_the_rollouts_count_as_in_the_paper() -> None:
    # 20 s in which no trainer works: 3 / (3 + 2) of them count.
    lost = Loss(replica="trainer/1", since=10.0, until=30.0, stalled_until=30.0)
    assert _ettr(lost) == pytest.approx((80 + 20 * 3 / 5) / 100)
    assert _ettr(lost, count_rollouts=False) == _ettr(lost)


def test_once_the_interrupted_step_is_committed_the_survivors_count() -> None:
    # 5 s stalled at 3/5, then 15 s in which one of two trainers works: 4/5.
    lost = Loss(replica="trainer/1", since=10.0, until=30.0, stalled_until=15.0)
    assert _ettr(lost) == pytest.approx((80 + 5 * 3 / 5 + 15 * 4 / 5) / 100)


def test_a_lost_rollout_costs_its_share_in_ours_and_nothing_in_the_papers() -> None:
    lost = Loss(replica="rollout/0", since=0.0, until=50.0)
    assert _ettr(lost) == pytest.approx((50 + 50 * 4 / 5) / 100)
    assert _ettr(lost, count_rollouts=False) == 1.0


def test_the_same_replica_lost_twice_at_once_is_lost_once() -> None:
    one = Loss(replica="rollout/0", since=0.0, until=50.0)
    assert _ettr(one, one) == _ettr(one)


def test_reward_workers_do_not_count() -> None:
    assert _ettr(Loss(replica="reward/0", since=0.0, until=50.0)) == 1.0


def test_no_time_has_no_ratio() -> None:
    assert ettr(5.0, 5.0, [], num_rollouts=3, num_trainers=2) is None
    assert ettr(0.0, 5.0, [], num_rollouts=0, num_trainers=0) is None


LOSSES = st.builds(
    Loss,
    replica=st.sampled_from(["trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2", "reward/0"]),
    since=st.floats(-10, 110),
    until=st.floats(-10, 110),
    stalled_until=st.floats(-10, 110),
)


@given(st.lists(LOSSES, max_size=6), LOSSES)
def test_the_ratio_stays_within_its_bounds_and_more_loss_is_never_better(lost: list[Loss], more: Loss) -> None:
    before, after = _ettr(*lost), _ettr(*lost, more)
    assert 0.0 <= after <= before + 1e-9 <= 1.0 + 2e-9
    assert _ettr(*lost) <= _ettr(*lost, count_rollouts=False) + 1e-9


# --- pace ---------------------------------------------------------------------------------------------------------


def _steps(*at: float) -> list[Step]:
    return [Step(step=n, at=t, seconds=1, reward=0, loss=0, epoch=1, num_tokens=1) for n, t in enumerate(at)]


def test_the_faultless_pace_leaves_out_what_a_fault_touches() -> None:
    committed = _steps(1, 2, 3, 9, 10)
    assert faultless_step_seconds(committed, [Loss(replica="trainer/0", since=4, until=8)]) == 1.0
    assert faultless_step_seconds(committed, []) == pytest.approx(9 / 4)
    assert faultless_step_seconds(_steps(1), []) is None


def test_seconds_to_n_steps() -> None:
    assert compare_pace(_steps(1, 2, 3), 0.5, [], None)["this"] == 2.5
    shorter = {"run_id": "base", "training_started_seconds": 0.0, "steps": [{"at": 1.0}, {"at": 2.0}]}
    assert compare_pace(_steps(1, 2, 3), 0.5, [], shorter)["this"] == 1.5
    assert compare_pace([], 0.5, [], None)["this"] is None


def test_pace_beside_a_failure_free_run_counts_the_steps_that_both_have() -> None:
    rows = [{"at": 10.0 + n} for n in range(3)]
    baseline = {"run_id": "base", "training_started_seconds": 9.0, "steps": rows}
    found = compare_pace(_steps(1, 2, 3, 4, 5), 0.0, [], baseline)
    assert (found["n"], found["this"], found["baseline"], found["baseline_run"]) == (3, 3.0, 3.0, "base")
    assert found["estimate"] == 3.0


def test_pace_without_a_failure_free_run_is_an_estimate_that_says_so() -> None:
    found = compare_pace(_steps(1, 2, 3), 0.0, [], None)
    assert (
        found["baseline"] is None
        and found["estimate"] == 3.0
        and "mean time between commits" in str(found["estimate_how"])
    )


def test_pace_of_a_run_without_steps() -> None:
    assert compare_pace([], 0.0, [], None)["this"] is None


def test_the_ends_of_a_curve() -> None:
    assert mean_of_ends([]) == (None, None)
    assert mean_of_ends([math.nan]) == (None, None)
    assert mean_of_ends([1.0, 2.0]) == (1.5, 1.5)
    assert mean_of_ends([0, 0, 0, 5, 5, 1, 1, 1]) == (0.0, 1.0)
    assert mean_of_ends([0.0] * 5 + [0.5] * 90 + [math.nan] + [1.0] * 5) == (0.25, 0.75)


# --- from events --------------------------------------------------------------------------------------------------


def _event(seq: int, kind: EventKind, **body: object) -> Event:
    return made_event(seq=seq, kind=kind, wall_at=float(seq), body=body)


def test_a_step_done_again_counts_the_last_time_and_what_is_not_known_is_null() -> None:
    found = steps(
        [
            _event(1, EventKind.STEP_COMMITTED, step=0, reward=0.5, loss="nan", tokens=7),
            _event(2, EventKind.STEP_COMMITTED, step=1, reward=None),
            _event(3, EventKind.STEP_COMMITTED, step=0, reward=0.7, loss=0.1),
        ]
    )
    assert [(s.step, s.at) for s in found] == [(0, 3.0), (1, 2.0)]
    assert found[0].reward == 0.7 and found[1].to_dict(0.0)["reward"] is None


def test_training_begins_when_trainer_and_rollout_are_members_together() -> None:
    alone = _event(1, EventKind.EPOCH_ADVANCED, members=[["trainer/0", 1]])
    both = _event(2, EventKind.EPOCH_ADVANCED, members=[["rollout/0", 1], ["trainer/0", 1]])
    assert training_began([alone, both]) == 2.0 and training_began([alone]) is None


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([], {}),
        ([Loss(replica="rollout/0", since=10, until=20, fault="crash")], {("rollout", "crash"): 2.5}),
        (
            [Loss(replica="trainer/0", since=10, until=20, stalled_until=14, fault="crash")],
            {("trainer", "crash"): 4 * 2 / 4 + 6 * 1 / 4},
        ),
        # A replica lost to two incidents at once is charged to the first.
        (
            [
                Loss(replica="rollout/0", since=10, until=20, fault="crash"),
                Loss(replica="rollout/0", since=12, until=18, fault="slow"),
            ],
            {("rollout", "crash"): 2.5},
        ),
        ([Loss(replica="reward/0", since=10, until=20, fault="crash")], {}),
    ],
)
def test_lost_seconds_by_cause(lost: list[Loss], expected: dict[tuple[str, str], float]) -> None:
    found = by_cause(lost_seconds(lost, 0.0, 100.0, num_rollouts=2, num_trainers=2))
    assert found == pytest.approx(expected)
