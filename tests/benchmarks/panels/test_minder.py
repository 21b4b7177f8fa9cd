"""Minder's benchmark makes the cases that it says, and counts right: on outcomes made up."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.panels.fleet import judge as fleet
from benchmarks.panels.fleet import report as fleet_report
from benchmarks.panels.minder import own_kind as own
from benchmarks.panels.minder.ablations import Count, compared, of_its_kind
from benchmarks.panels.minder.denoisers import smooth
from benchmarks.panels.minder.own_kind import Change, of_own_kind
from rolecall.detector.simulation.fleet import (
    AFTERMATH_SECONDS,
    EPOCH_SECONDS,
    METRICS,
    Onset,
    SimulatedFault,
    SimulatedTask,
)

ONSET = EPOCH_SECONDS + 900
FAULT = SimulatedFault(
    kind="pcie_downgrade",
    machine=1,
    onset=ONSET,
    end=ONSET + 130,
    effect_sigmas=1.0,
    metrics=(3,),
    how=Onset.INTERMITTENT,
)
TASK = SimulatedTask(seed=1, index=0, mix="evaluation", num_machines=6, num_ticks=1150, fault=FAULT)
SHOWS = {"pfc_tx_packets_per_second", "pcie_bytes_per_second", "rdma_bytes_per_second"}
"""Some of the metrics that show a PCIe downgrade."""


def fault_of(task: SimulatedTask) -> SimulatedFault:
    assert task.fault
    return task.fault


def test_a_case_of_its_own_kind_is_far_out_in_all_metrics_that_show_it_at_once_and_for_long() -> None:
    task = of_own_kind(TASK, Change.NOTHING)
    fault = fault_of(task)
    assert (fault.effect_sigmas, fault.how, fault.end - fault.onset) == (8.0, Onset.STEP, 480.0)
    assert task.num_ticks == 900 + 480 + AFTERMATH_SECONDS
    assert {METRICS[m].group for m in fault.metrics} == {"pcie", "network"}
    assert SHOWS < {METRICS[m].name for m in fault.metrics}
    assert (fault.kind, fault.machine, fault.onset, fault.victims) == ("pcie_downgrade", 1, ONSET, ())


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (Change.METRICS, {"metrics": (3,)}),
        (Change.EFFECT, {"effect_sigmas": 4.0}),
        (Change.ONSET, {"how": Onset.INTERMITTENT}),
        (Change.SHORT, {"end": ONSET + 130}),
    ],
)
def test_a_change_takes_one_thing_from_the_fleet(change: Change, other: dict[str, Any]) -> None:
    task = of_own_kind(TASK, change)
    assert fault_of(task) == replace(fault_of(of_own_kind(TASK, Change.NOTHING)), **other)
    assert task.num_ticks == fault_of(task).end - EPOCH_SECONDS + AFTERMATH_SECONDS


def test_the_largest_effect_stays_the_largest_and_long_faults_as_long() -> None:
    task = replace(TASK, fault=replace(FAULT, effect_sigmas=20.0, end=ONSET + 1000, how=Onset.RAMP))
    fault = fault_of(of_own_kind(task, Change.NOTHING))
    assert (fault.effect_sigmas, fault.end, fault.how) == (pytest.approx(20.0), ONSET + 1000, Onset.RAMP)
    assert fault_of(of_own_kind(task, Change.EFFECT)).effect_sigmas == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("change", "own_kind"),
    [
        ({}, True),
        ({"how": Onset.RAMP}, True),
        ({"how": Onset.INTERMITTENT}, False),
        ({"end": ONSET + 299}, False),
        ({"effect_sigmas": 3.9}, False),
        ({"metrics": (1, 2)}, False),
        ({"metrics": (1, 3)}, True),
    ],
)
def test_the_ablations_know_the_papers_kind_of_fault(change: dict[str, Any], own_kind: bool) -> None:
    fault = replace(FAULT, effect_sigmas=4.0, end=ONSET + 300, how=Onset.STEP)
    assert of_its_kind(replace(fault, **change), ["pfc_tx_packets_per_second"]) is own_kind
    assert not of_its_kind(None, ["pfc_tx_packets_per_second"])


def outcomes(found: int, missed: int, false_healthy: int = 0, false_victims: int = 0) -> list[fleet_report.Outcome]:
    """Found after 1, 2, ... seconds; all false alarms in the first task."""
    empty = fleet.score(TASK, [], detector="minder", asked=100.0)
    made = [*(replace(empty, delay_seconds=1.0 + n) for n in range(found)), *([empty] * missed)]
    first = replace(made[0], false_healthy=false_healthy, false_faulty=false_victims, false_victims=false_victims)
    return [first, *made[1:]]


def test_a_row_says_precision_recall_f1_false_alarms_and_delays() -> None:
    n, precision, recall, f1, false, middle, late = own.quality(outcomes(8, 2, false_healthy=1, false_victims=3))
    # Clopper and Pearson for 8 of 12 and 8 of 10: published tables.
    assert (n, precision, recall) == ("10", "0.667 [0.349, 0.901]", "0.800 [0.444, 0.975]")
    assert f1.startswith("0.727 [") and (false, middle, late) == ("4 (3)", "5 s", "missed")


def test_f1_has_the_interval_of_tasks_drawn_again() -> None:
    assert own.f1_told(outcomes(20, 0)) == "1.000 [1.000, 1.000]"
    assert own.f1_told(outcomes(0, 20)) == "0.000 [0.000, 0.000]"
    value, low, high = (float(x.strip("[],")) for x in own.f1_told(outcomes(80, 20)).split())
    # Of 100 tasks drawn again 80 +- 2 x 4 are found: F1 = 2k / (k + 100).
    assert value == pytest.approx(160 / 180, abs=1e-3)
    assert (low, high) == (pytest.approx(2 * 72 / 172, abs=0.01), pytest.approx(2 * 88 / 188, abs=0.01))


def test_no_alarm_at_all_has_no_precision() -> None:
    assert own.quality(outcomes(0, 3))[1:3] == ["-", "0.000 [0.000, 0.708]"]


@pytest.mark.parametrize(
    ("found", "missed", "false", "precision", "recall"),
    [
        (9, 1, 1, "inside the interval", "inside the interval"),
        (100, 0, 0, "below the interval", "below the interval"),
        (50, 50, 50, "above it", "above it"),
    ],
)
def test_where_the_papers_figures_lie_is_reported(
    found: int, missed: int, false: int, precision: str, recall: str
) -> None:
    reported = own.reasons(outcomes(found, missed, false_victims=false))[0]
    assert f"the paper's precision 0.904 is {precision}; the paper's recall 0.883 is {recall}." in reported
    assert (f"{missed} pcie_downgrade." if missed else "Missed: none.") in reported
    assert (
        f"Of {false} false alarms {false} name a neighbour that the fault reached, 0 come in healthy time" in reported
    )
    assert f"{false} are of the {found + missed} faults that spread fast" in reported


def test_the_ablations_count_by_variant_and_by_kind_of_fault() -> None:
    found = Count(effect_sigmas=5.0, own_kind=True, found=True, delay_seconds=30.0, num_false=0, machine_days=1.0)
    small = replace(found, effect_sigmas=2.0, own_kind=False, found=False, delay_seconds=None, num_false=1)
    healthy = replace(small, effect_sigmas=None, num_false=2)
    rows = compared(
        [
            {"full": found, "raw": replace(found, delay_seconds=50.0)},
            {"full": small, "raw": replace(small, found=True, delay_seconds=70.0)},
            {"full": healthy, "raw": replace(healthy, num_false=0)},
        ]
    )
    sure = "1.000 [0.025, 1.000]"
    assert [r[:3] + r[5:] for r in rows] == [
        ["full", "all", "2", "3", "30 s"],
        ["full", "4 sigma and more", "1", "0", "30 s"],
        ["full", "of its kind", "1", "0", "30 s"],
        ["raw", "all", "2", "1", "60 s"],
        ["raw", "4 sigma and more", "1", "0", "50 s"],
        ["raw", "of its kind", "1", "0", "50 s"],
    ]
    assert [r[3].split()[0] for r in rows] == ["0.250", "1.000", "1.000", "0.667", "1.000", "1.000"]
    assert [r[4].split()[0] for r in rows] == ["0.500", "1.000", "1.000", "1.000", "1.000", "1.000"]
    assert rows[1][3] == rows[1][4] == sure


def test_smooth_windows_are_scaled_and_of_their_seed() -> None:
    windows = smooth(1, 500)
    assert windows.shape == (8, 1, 1, 500) and windows.dtype == "float32"
    assert 0 < windows.min() and windows.max() < 1.02 and (smooth(1, 500) == windows).all()
    assert (smooth(2, 500) != windows).any()
