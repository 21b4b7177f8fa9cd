"""Answers over several seeds: intervals, costs of detection, false alarms and standbys, and the plan for a job."""

import math
import statistics

import pytest

from rolecall.core.config.job import parse_job
from rolecall.simulate.plan import daly_seconds, recommend, settings_of_job, young_seconds
from rolecall.simulate.settings import ARMS, SimulationSettings, resized
from rolecall.simulate.study import (
    BreakEven,
    Costs,
    Estimate,
    break_even,
    detection_value,
    estimate,
    interval,
    run_arm,
    standby_costs,
)

FLEET = SimulationSettings.model_validate({"days": 10})


def test_an_interval_holds_95_percent_of_the_values() -> None:
    found = interval([float(n) for n in range(101)])
    assert (found.n, found.median, found.low, found.high) == (101, 50.0, pytest.approx(2.5), pytest.approx(97.5))
    assert interval([3.0]).low == interval([3.0]).high == 3.0


def test_the_parts_of_a_result_add_up() -> None:
    found = run_arm(FLEET, "restart_warm", 3)
    assert found.useful_gpu_hours + sum(found.lost_gpu_hours.values()) == pytest.approx(found.gpu_hours)
    assert found.gpu_hours == pytest.approx(4096 * 240) and found.ettr.n == 3


def test_the_smaller_the_fault_domain_the_higher_ettr_and_goodput() -> None:
    """At five times the published rates; at the published ones the checkpoint of each step costs `role` as much as it
    saves."""
    often = FLEET.changed(faults={"trainer_per_gpu_hour": 1e-4, "rollout_per_gpu_hour": 6e-5})
    found = [run_arm(often, name, 5) for name in ARMS]
    for values in ([r.ettr.median for r in found], [r.goodput.median for r in found]):
        assert values == sorted(values, reverse=True) and len(set(values)) == len(values)


def test_a_second_of_detection_costs_what_stands_still() -> None:
    """A second in which trainers stand still costs the whole fleet: what rollouts generate meanwhile is waited for or
    lost later."""
    rates = {"trainer_per_gpu_hour": 1e-4, "rollout_per_gpu_hour": 0.0}
    of = FLEET.changed(faults=rates)
    a_day = 1e-4 * 2048 * 24
    for name, tolerance in (("replica", 0.1), ("restart_warm", 0.25)):  # where in a step the later faults lie is noise
        found = detection_value(of, ARMS[name], 20)
        assert found.value == pytest.approx(a_day * 4096 / 3600, rel=tolerance)
        assert 0 < found.low < found.value < found.high


def test_evictions_pay_up_to_a_rate_of_false_alarms_that_is_higher_for_smaller_domains() -> None:
    by_replica, by_job = (break_even(FLEET, ARMS[name], 5) for name in ("replica", "restart_warm"))
    assert by_replica.gain_gpu_hours_per_day.low > 0 < by_job.gain_gpu_hours_per_day.low
    assert by_replica.gpu_hours_per_alarm.high < by_job.gpu_hours_per_alarm.low
    assert math.inf > by_replica.per_1000_machine_days.value > by_job.per_1000_machine_days.value > 0


def test_json_has_no_infinite_numbers() -> None:
    one, endless = Estimate(value=1.0, low=0.0, high=2.0), Estimate(value=3.0, low=2.0, high=math.inf)
    eviction = BreakEven(gain_gpu_hours_per_day=one, gpu_hours_per_alarm=one, per_1000_machine_days=endless)
    found = Costs(detection_gpu_hours_per_day=one, eviction=eviction, standbys=[]).to_dict()
    assert found["eviction"]["per_1000_machine_days"] == {"value": 3.0, "low": 2.0, "high": None}


def test_an_estimate_is_known_the_better_the_more_runs_there_are() -> None:
    values = [float(n % 10) for n in range(400)]
    few, many = (estimate(lambda runs: statistics.fmean(values[n] for n in runs), n) for n in (20, 400))
    assert few.value == many.value == 4.5
    assert few.low < many.low < 4.5 < many.high < few.high
    # 1.96 standard deviations of the mean of 400 values, each uniform in 0 to 9.
    assert many.high - many.low == pytest.approx(2 * 1.96 * 2.87 / 20, rel=0.1)


def test_standbys_save_waiting_and_cost_their_own_time() -> None:
    found = standby_costs(FLEET, ARMS["restart_warm"], 3)
    assert sum(found[0].standbys.values()) == 0 == found[0].standby_gpu_hours_per_day
    hours = [row.standby_gpu_hours_per_day for row in found]
    lost = [row.lost_gpu_hours_per_day.value for row in found]
    assert hours == sorted(hours) and lost[0] > lost[-1]


def test_the_periods_of_young_and_daly() -> None:
    assert young_seconds(2.0, 10_000.0) == pytest.approx(200.0)
    assert daly_seconds(2.0, 10_000.0) == pytest.approx(200 * (1 + 0.01 / 3 + 0.0001 / 9) - 2)
    assert daly_seconds(30.0, 10.0) == 10.0


def test_a_plan_has_standbys_a_period_and_an_interval_for_each_arm() -> None:
    job = parse_job(
        {
            "model": {"num_heads": 8, "num_kv_heads": 8},
            "roles": {"trainer": 4, "rollout": 32},
            "runtime": {"trainer_ranks": 64, "rollout_ranks": 8},
        }
    )
    of = resized(settings_of_job(job, FLEET), 4096)
    assert (of.trainer.gpus, of.rollout.gpus, of.ahead) == (2048, 2048, 2.0)
    found = recommend(of, 2, periods=(1, 10))
    assert list(found.arms) == list(ARMS) and all(n > 0 for n in found.standbys.values())
    warm = found.arms["restart_warm"]
    # 3 s against faults 20 h apart and steps of 360 s: each step is worth a checkpoint.
    assert warm.every_steps == 1 and warm.young_seconds is not None and 300 < warm.young_seconds < 1500
    assert warm.expected.ettr.n == 2
    assert found.to_dict()["arms"]["restart_warm"]["every_steps"] == 1


@pytest.mark.parametrize(
    ("mode", "rollouts", "fleet"),
    [
        ("sync", 4, (0.0, 4, 8, 0)),
        ("semi_sync", 6, (0.5, 4, 8, 2)),
    ],
)
def test_the_hybrids_of_a_job_have_one_set_of_gpus(
    mode: str, rollouts: int, fleet: tuple[float, int, int, int]
) -> None:
    job = parse_job(
        {
            "model": {"num_heads": 8, "num_kv_heads": 8},
            "roles": {"trainer": 4, "rollout": rollouts},
            "runtime": {"mode": mode, "trainer_ranks": 2, "rollout_ranks": 8},
        }
    )
    of = settings_of_job(job, FLEET)
    assert of.mode == mode
    assert (of.ahead, of.trainer.replicas, of.trainer.gpus_per_replica, of.rollout.replicas) == fleet
    assert resized(of, 1024).mode == mode
