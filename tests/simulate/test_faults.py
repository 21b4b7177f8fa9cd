"""Drawn faults: their rates, and what stays the same when one setting changes."""

from typing import Any

import pytest

from rolecall.simulate.faults import ROLLOUT, TRAINER, draw_scenario, machine_rates
from rolecall.simulate.settings import SimulationSettings
from rolecall.simulate.simulator import simulate


def settings(**faults: Any) -> SimulationSettings:
    return SimulationSettings.model_validate({"days": 100, "faults": faults})


def test_the_rates_are_those_of_the_settings() -> None:
    of = settings(machine_share=0.5, implicit_share=0.25, burst_sizes={1: 3, 4: 1}, offender_share=0.0)
    drawn = draw_scenario(of, 1).faults
    by_role = {role: [f for f in drawn if f.role == role] for role in (TRAINER, ROLLOUT)}
    hours = 100 * 24
    assert len(by_role[TRAINER]) == pytest.approx(1.97e-5 * 2048 * hours, rel=0.25)
    assert len(by_role[ROLLOUT]) == pytest.approx(1.31e-5 * 2048 * hours, rel=0.25)
    assert [f.at for f in drawn] == sorted(f.at for f in drawn) and drawn[-1].at < of.seconds
    lost = [f for f in drawn if f.num_machines]
    assert len(lost) / len(drawn) == pytest.approx(0.5, abs=0.1)
    assert sum(f.is_implicit for f in drawn) / len(drawn) == pytest.approx(0.25, abs=0.1)
    assert sum(f.num_machines == 4 for f in lost) / len(lost) == pytest.approx(0.25, abs=0.12)


def test_false_alarms_and_the_other_role_leave_faults_as_they_are() -> None:
    quiet = draw_scenario(settings(), 3).faults
    loud = draw_scenario(settings(false_alarms_per_1000_machine_days=50.0), 3).faults
    assert tuple(f for f in loud if not f.is_false_alarm) == quiet and len(loud) > len(quiet)
    safer = draw_scenario(settings(rollout_per_gpu_hour=0.0), 3).faults
    assert safer == tuple(f for f in quiet if f.role == TRAINER)


def test_repeat_offenders_fail_more_often_and_all_together_as_often() -> None:
    of = settings(offender_share=0.1, offender_factor=10.0)
    ordinary, offender = machine_rates(of.faults)
    assert 0.9 * ordinary + 0.1 * offender == pytest.approx(1.0) and offender == pytest.approx(10 * ordinary)
    arm = of.arms["replica"]
    with_them = [simulate(of, arm, draw_scenario(of, n), standbys={}).num_faults for n in range(5)]
    equal = settings(offender_share=0.0)
    without = [simulate(equal, arm, draw_scenario(equal, n), standbys={}).num_faults for n in range(5)]
    assert sum(with_them) == pytest.approx(sum(without), rel=0.15)


def test_without_repeat_offenders_returning_there_are_fewer_faults() -> None:
    rates = {"offender_share": 0.1, "offender_factor": 20.0, "trainer_per_gpu_hour": 2e-4, "rollout_per_gpu_hour": 2e-4}
    returning, retired = (settings(**rates, retire_offenders=retire) for retire in (False, True))
    arm = returning.arms["replica"]
    scenario = draw_scenario(returning, 1)
    numbers = [simulate(of, arm, scenario, standbys={}).num_faults for of in (returning, retired)]
    assert numbers[1] < 0.8 * numbers[0]
