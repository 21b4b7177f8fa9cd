"""Who is slow in synchronous work: the worker itself from the first step on, and not those who wait for it."""

from dataclasses import replace

import numpy as np
import pytest

from rolecall.core.faults import FaultClass
from rolecall.detector.panels.metric_kinds import has_equal_levels, is_own_work
from rolecall.detector.panels.panel import Panel, cannot_tell, findings, standing
from rolecall.detector.panels.step_time import StepTime
from tests.detector.panel_data import noise

NAMES = ("backward-compute.mean", "backward-recv.sum", "forward-compute.mean")


def stage(*, machines: int = 4, ticks: int = 40, spread: float = 0.03) -> Panel:
    """Steps of a pipeline stage: about 0.5 s of each metric."""
    panel = noise(machines=machines, metrics=3, ticks=ticks, names=NAMES, role="trainer-stage0")
    level = 10 * np.arange(1, 4, dtype=np.float32)[:, None, None]
    return replace(panel, values=0.5 * np.exp(spread * (panel.values - level)).astype(np.float32))


def slowed(panel: Panel, machine: int, factor: float, metric: int = 0, since: int = 0) -> Panel:
    values = panel.values.copy()
    values[metric, since:, machine] *= factor
    return replace(panel, values=values)


def test_it_says_how_far_each_is_from_an_alarm() -> None:
    panel = slowed(stage(), 2, 2.0)
    tracker = StepTime().track(panel.shape)
    for at, values in panel.ticks():
        tracker.tick(at, values)
    stands = standing(tracker)
    assert stands is not None and [n for n, s in enumerate(stands[0]) if s > stands[1]] == [2]
    assert cannot_tell(panel.shape, "step-time", tracker) == ""


@pytest.mark.parametrize(
    ("metric", "own"),
    [
        ("backward-compute.mean", True),
        ("forwardCompute_seconds", True),
        ("rolecall_process_busy_seconds_per_work_unit", True),
        ("gemm_kernel_time", True),
        ("backward-recv.sum", False),
        ("grads-reduce-scatter.sum", False),
        ("disk_busy", False),
        ("busy_ratio", False),
        ("MEM_active", False),
        ("cpu_usage", False),
    ],
)
def test_own_work_is_known_by_name(metric: str, own: bool) -> None:
    assert is_own_work(metric) is own


@pytest.mark.parametrize(
    ("metric", "equal"),
    [
        ("node_cpu_seconds_total", True),
        ("DCGM_FI_DEV_SM_CLOCK", True),
        ("MEM_cached", False),
        ("node_memory_MemFree_bytes", False),
        ("node_filesystem_avail_bytes", False),
        ("forward-recv.sum", False),
    ],
)
def test_levels_that_healthy_peers_share_are_known_by_name(metric: str, equal: bool) -> None:
    assert has_equal_levels(metric) is equal


def test_a_worker_slow_from_the_first_step_is_named_and_only_it() -> None:
    panel = slowed(stage(), 2, 2.3)
    waiting = panel.values.copy()
    waiting[1, :, [0, 1, 3]] *= 6.0  # its peers wait for it
    found = findings(StepTime(), replace(panel, values=waiting))
    assert [(s.node, f.fault_class) for f in found for s in f.suspects] == [("n002", FaultClass.SLOW)]
    assert found[0].onset == panel.at[0] and found[0].detected_at <= panel.at[5]
    assert "backward-compute.mean" in found[0].because and "2.3" in found[0].because


def test_equal_work_a_single_stall_and_small_differences_are_no_faults() -> None:
    assert findings(StepTime(), stage()) == []
    values = stage().values.copy()
    values[0, 20, 1] *= 50.0
    assert findings(StepTime(), replace(stage(), values=values)) == []
    assert findings(StepTime(), slowed(stage(), 1, 1.15)) == []


def test_it_is_reported_once_and_again_when_it_comes_back() -> None:
    panel = slowed(stage(ticks=200), 3, 2.0, since=20)
    values = panel.values.copy()
    values[0, 60:140, 3] /= 2.0
    assert [f.suspects[0].node for f in findings(StepTime(), replace(panel, values=values))] == ["n003", "n003"]


@pytest.mark.parametrize("machines", [1, 2])
def test_one_peer_is_not_enough(machines: int) -> None:
    assert findings(StepTime(), slowed(stage(machines=machines), 0, 9.0)) == []


def test_half_of_the_peers_accuse_no_one() -> None:
    assert findings(StepTime(), slowed(slowed(stage(), 0, 3.0), 1, 3.0)) == []


def test_one_of_two_that_stays_slow_is_named_once_the_other_has_recovered() -> None:
    panel = slowed(stage(ticks=200), 0, 3.0, since=20)
    values = panel.values.copy()
    values[0, 20:60, 1] *= 3.0
    assert [f.suspects[0].node for f in findings(StepTime(), replace(panel, values=values))] == ["n000"]


def test_missing_and_senseless_values_break_nothing() -> None:
    values = slowed(stage(), 2, 2.3).values.copy()
    values[0, 5:9] = np.nan
    values[2] = 0.0
    values[0, 10, 0] = -1.0
    assert [f.suspects[0].node for f in findings(StepTime(), replace(stage(), values=values))] == ["n002"]


def test_those_that_left_are_not_counted_among_the_peers() -> None:
    panel = slowed(slowed(stage(machines=8, ticks=120), 0, 3.0, since=60), 1, 3.0, since=60)
    panel.values[:, 20:, 3:] = np.nan
    assert findings(StepTime(), panel) == []
    [f] = findings(StepTime(), replace(panel, values=np.where(np.arange(8) == 1, panel.values[..., 2:3], panel.values)))
    assert f.suspects[0].node == "n000" and "its 2 peers" in f.because
