"""The regimes: every size, interval and length; the same seed gives the same cases; an effect is as large as stated."""

import dataclasses

import numpy as np
import pytest

from rolecall.detector.panels.panel import Panel
from rolecall.detector.simulation import regimes
from rolecall.detector.simulation.regimes import REGIMES, Onset, OnsetTime, Regime, RegimeCase

SMALL = [r for r in REGIMES if r.num_machines <= 12]


def _regime(machines: int, metrics: int, schedule: int) -> Regime:
    return Regime(num_machines=machines, num_metrics=metrics, schedule=regimes.SCHEDULES[schedule])


def _spread(panel: Panel, metric: int, ticks: slice) -> tuple[float, np.ndarray]:
    """(standard deviation over machines and time, means by machine) of a metric without its shared signal."""
    values = panel.values[metric, ticks]
    apart = values - np.nanmedian(values, axis=1, keepdims=True)
    return float(np.nanstd(apart)), np.nanmean(apart, axis=0)


def test_there_is_every_combination() -> None:
    assert len(REGIMES) == len(set(REGIMES)) == 5 * 3 * 4
    assert {r.schedule.interval_seconds * r.schedule.num_ticks for r in REGIMES} == {900, 3600, 10_800, 172_800}


@pytest.mark.parametrize("regime", SMALL, ids=lambda r: r.name)
def test_a_recording_has_the_size_of_its_regime(regime: Regime) -> None:
    (case,) = regimes.cases(regime, seed=3, num_faulty=1, num_healthy=0)
    panel = regimes.panel(case)
    assert panel.values.shape == (regime.num_metrics, regime.schedule.num_ticks, regime.num_machines)
    assert panel.values.dtype == np.float32 and not np.isinf(panel.values).any()
    assert np.allclose(np.diff(panel.at), regime.schedule.interval_seconds)
    assert 0.005 < np.isnan(panel.values).mean() < 0.1
    assert (len(panel.shape.metrics), len(panel.shape.machines)) == (regime.num_metrics, regime.num_machines)


def test_the_same_seed_gives_the_same_values_and_another_does_not() -> None:
    regime = _regime(4, 21, 1)
    (first,), (again,), (other,) = (regimes.cases(regime, seed=s, num_faulty=0, num_healthy=1) for s in (1, 1, 2))
    np.testing.assert_array_equal(regimes.panel(first).values, regimes.panel(again).values)
    assert not np.array_equal(regimes.panel(first).values, regimes.panel(other).values)


def test_faults_begin_before_early_and_later_in_turn() -> None:
    regime = _regime(12, 21, 2)
    found = [c.fault for c in regimes.cases(regime, seed=5, num_faulty=30, num_healthy=2)]
    assert found[30:] == [None, None]
    for n, fault in enumerate(found[:30]):
        assert fault is not None and fault.onset is list(OnsetTime)[n % 3]
        tenth = regime.schedule.num_ticks // 10
        assert {"before": fault.start == 0, "in": 0 < fault.start < tenth, "later": fault.start >= 2 * tenth}[
            fault.onset.split()[0]
        ]
        assert fault.start < fault.end <= regime.schedule.num_ticks and 6 <= fault.effect_spreads <= 20
    assert {f.course for f in found if f} == set(Onset)


@pytest.mark.parametrize("index", range(6))
def test_an_effect_exceeds_what_the_offsets_of_its_metric_are(index: int) -> None:
    """Of 79 machines, with k spreads, the faulty one is k of the others' standard deviations away."""
    regime = _regime(79, 21, 1)
    case = regimes.cases(regime, seed=7, num_faulty=6, num_healthy=0, effects=(10.0, 10.000001))[index]
    assert case.fault is not None
    steady = dataclasses.replace(case.fault, course=Onset.STEP)
    panel = regimes.panel(dataclasses.replace(case, fault=steady))
    for metric, sign in zip(steady.metrics, steady.signs, strict=True):
        _, means = _spread(panel, metric, slice(steady.start, steady.end))
        others = np.delete(means, steady.machine)
        away = sign * (means[steady.machine] - np.median(others))
        assert away > 0
        spread, _ = _spread(_without(panel, steady.machine), metric, slice(None))
        # The offset of the machine itself is drawn, too: a few spreads of it may be lacking or added.
        assert 5 < away / spread < 15


def _without(panel: Panel, machine: int) -> Panel:
    return dataclasses.replace(panel, values=np.delete(panel.values, machine, axis=2))


def test_of_many_metrics_most_say_nothing_new() -> None:
    regime = _regime(12, 138, 1)
    (case,) = regimes.cases(regime, seed=11, num_faulty=0, num_healthy=1)
    values = regimes.panel(case).values.astype(np.float64)
    still = np.nanmax(values, axis=1) == np.nanmin(values, axis=1)
    assert still.all(axis=1).sum() >= 35
    inventory = [len(set(np.nanmax(v, axis=0))) for v in values[still.all(axis=1)]]
    assert max(inventory) == 2 and inventory.count(2) >= 3, "a healthy machine with more memory than its peers"
    moving = values[~still.all(axis=1)][:, :, 0]
    alike = np.abs(np.ma.corrcoef(np.ma.masked_invalid(moving)).filled(0))
    assert ((alike > 0.9).sum(axis=1) > 1).sum() >= 50


def test_a_healthy_case_differs_from_the_faulty_one_of_its_number() -> None:
    regime = _regime(4, 2, 0)
    faulty, healthy = regimes.cases(regime, seed=1, num_faulty=1, num_healthy=1)
    same = RegimeCase(seed=1, index=0, regime=regime, fault=None)
    assert faulty.fault and not healthy.fault
    assert not np.array_equal(regimes.panel(faulty).values, regimes.panel(same).values)


def test_a_run_knows_what_it_costs() -> None:
    regime = _regime(4, 2, 0)
    assert regimes.num_values(regimes.cases(regime, seed=1, num_faulty=2, num_healthy=1)) == 3 * 4 * 2 * 900
