"""The fleet benchmark counts right: on alarms made up, and with a detector whose answers are known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from benchmarks.intervals import binomial_interval, poisson_interval
from benchmarks.panels.fleet import judge as fleet
from benchmarks.panels.fleet import report as fleet_report
from benchmarks.panels.fleet.judge import Alarm
from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.detector.panels.panel import Floats, PanelShape
from rolecall.detector.simulation.fleet import EPOCH_SECONDS, Onset, SecondaryFault, SimulatedFault, SimulatedTask

ONSET = EPOCH_SECONDS + 200
FAULT = SimulatedFault(
    kind="other",
    machine=1,
    onset=ONSET,
    end=ONSET + 300,
    effect_sigmas=5.0,
    metrics=(0,),
    how=Onset.STEP,
    victims=(SecondaryFault(machine=2, share=0.3, delay_seconds=5.0),),
)
TASK = SimulatedTask(seed=1, index=0, mix="production", num_machines=6, num_ticks=620, fault=FAULT)
HEALTHY = replace(TASK, index=1, mix="healthy", fault=None)


def scored(task: SimulatedTask, alarms: Sequence[Alarm]) -> fleet_report.Outcome:
    return fleet.score(task, alarms, detector="made-up", asked=100.0)


@pytest.mark.parametrize(
    ("alarms", "delay", "healthy", "faulty", "victims"),
    [
        ([], None, 0, 0, 0),
        ([(ONSET, "m0001")], 0.0, 0, 0, 0),
        ([(ONSET + 40, "m0001"), (ONSET + 20, "m0001"), (ONSET + 300, "m0001")], 20.0, 0, 0, 0),
        ([(ONSET + 360, "m0001")], 360.0, 0, 0, 0),
        ([(ONSET + 361, "m0001")], None, 0, 1, 0),
        ([(ONSET - 1, "m0001")], None, 1, 0, 0),
        ([(ONSET - 1, "m0001"), (ONSET + 9, "m0001")], 9.0, 1, 0, 0),
        ([(ONSET + 10, "m0002"), (ONSET + 11, "m0003")], None, 0, 2, 1),
        ([(ONSET - 100, "m0003"), (ONSET + 199, "m0003")], None, 1, 0, 0),
        ([(ONSET - 100, "m0003"), (ONSET + 201, "m0003")], None, 1, 1, 0),
    ],
)
def test_alarms_are_right_free_or_false(
    alarms: list[Alarm], delay: float | None, healthy: int, faulty: int, victims: int
) -> None:
    got = scored(TASK, alarms)
    assert (got.delay_seconds, got.false_healthy, got.false_faulty, got.false_victims) == (
        delay,
        healthy,
        faulty,
        victims,
    )
    assert got.healthy_machine_seconds == 6 * 200


def test_of_a_healthy_task_all_time_counts_and_all_alarms_are_false() -> None:
    got = scored(HEALTHY, [(EPOCH_SECONDS + 3, "m0001"), (EPOCH_SECONDS + 619, "m0001")])
    assert (got.delay_seconds, got.false_healthy, got.false_faulty) == (None, 2, 0)
    assert got.healthy_machine_seconds == 6 * 620


@dataclass
class Clockwork:
    """Names two machines at one tick."""

    name: str = "clockwork"
    shape: PanelShape | None = None

    def track(self, shape: PanelShape) -> "Clockwork":
        self.shape = shape
        return self

    def tick(self, at: float, values: Floats) -> list[Finding]:
        assert values.shape == (21, 6)
        if at != ONSET + 7:
            return []
        assert self.shape
        suspects = (self.shape.suspect(1), self.shape.suspect(4))
        return [
            Finding(
                detector=self.name,
                suspects=suspects,
                fault_class=FaultClass.SLOW,
                onset=at - 100,
                detected_at=at - 100,  # a boast: the tick counts
                confidence=1.0,
                because="",
            )
        ]


def test_a_detector_sees_every_tick_and_each_suspect_is_an_alarm() -> None:
    ((alarms, spent),) = fleet.watch(TASK, [Clockwork()])
    assert alarms == [(ONSET + 7, "m0001"), (ONSET + 7, "m0004")]
    assert spent > 0


def test_the_report_says_recall_delay_calibration_and_precision() -> None:
    found = [replace(scored(replace(TASK, index=i), [(ONSET + i, "m0001")])) for i in range(9)]
    missed = scored(replace(TASK, index=9), [(ONSET + 2, "m0004")])
    text = "\n".join(fleet_report.report([[*found, missed, scored(HEALTHY, [(ONSET, "m0000")])]]))
    assert "| 4 to 8 sigma | 10 | 9 | 0.900 [0.555, 0.997] | 4 s | missed |" in text
    assert "| 8 to 20 sigma | 0 | 0 | - | - | - |" in text
    machine_days = (10 * 6 * 200 + 6 * 620) / 86_400
    counted = f"| 0 | {100 * machine_days / 1000:.1f} | 1 | {1000 / machine_days:,.1f} ["
    assert f"| 100 asked {counted}" in text and f"| 100, 4 to 16 machines {counted}" in text
    assert "| base rate | 0.900 | 0.100 |" in text
    svg = fleet_report.curve([[*found, missed]])
    assert svg.startswith("<svg") and "made-up, 100 asked" in svg


def test_quantiles_of_delays_take_missed_faults_for_the_latest() -> None:
    assert fleet_report.delay_quantile([3.0, None, 1.0, 2.0], 0.5) == 2.0
    assert math.isinf(fleet_report.delay_quantile([3.0, None, 1.0, 2.0], 0.95))
    assert fleet_report.delay_quantile([3.0], 0.95) == 3.0


def test_exact_intervals() -> None:
    # Clopper and Pearson for 8 of 10, Garwood for 0 and 5: published tables.
    assert binomial_interval(8, 10) == pytest.approx((0.4439, 0.9748), abs=1e-4)
    assert binomial_interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert poisson_interval(0) == pytest.approx((0.0, 3.6889), abs=1e-4)
    assert poisson_interval(5) == pytest.approx((1.6235, 11.6683), abs=1e-4)


def test_a_budget_makes_the_largest_task_smaller() -> None:
    assert fleet.within(0, 1, 4, 1) == 1500
    most = fleet.within(2e6, 1, 4, 1)
    assert 4 < most < 1500
    tasks = fleet.fleet(seed=1, num_tasks=4, num_healthy=1, num_machines_max=most)
    assert 1.5e6 < sum(t.num_machines * t.num_ticks for t in tasks) <= 2e6
